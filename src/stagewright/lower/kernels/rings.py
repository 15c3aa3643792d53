"""Ring attention (arXiv 2310.01889): keys and values circulate, one rank per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import BlockSection, Dependency, LoweredTask
from stagewright.program.columns import TaskKind


class LocalKeys(NamedTuple):
    """Keys and values of a rank's part of the sequence."""

    bytes: int
    dtype: str
    deps: Sequence[Dependency]
    """Tasks that make them."""


class _Hop(NamedTuple):
    """Common attributes of all messages of a ring."""

    phase: str
    section: BlockSection
    axes: tuple[str, ...]
    dtype: str
    bytes: int

    def pair(self, name: str, deps: Sequence[Dependency]) -> list[LoweredTask]:
        """Message to the next rank of the ring, and message from the previous rank."""
        send, recv = (
            LoweredTask(
                f"{name}.{op}", op, kind, self.phase, self.section, axes=self.axes, shift=shift,
                comm_bytes=self.bytes, dtype=self.dtype,
            )
            for op, kind, shift in (("send", TaskKind.SEND, 1), ("recv", TaskKind.RECV, -1))
        )  # fmt: skip
        send.deps, recv.twin = [*deps], send
        return [send, recv]


def ring_steps(
    attention: LoweredTask,
    keys: LocalKeys,
    axes: tuple[str, ...],
    ranks: int,
    gradients: str | None,
) -> list[LoweredTask]:
    """Split an attention kernel into `ranks` steps with messages between them.

    `gradients`: in backward, gradients of keys and values travel with them and take one more step
    to return, in fp32 if this is "ring" (`cp_grad_comm_type`). None: forward.
    """
    hop = _Hop(attention.phase, attention.section, axes, keys.dtype, keys.bytes)
    back = hop
    if gradients == "ring":
        back = hop._replace(dtype="fp32", bytes=keys.bytes * 4 // int(BYTES[keys.dtype]))
    tasks: list[LoweredTask] = []
    key_deps = [*keys.deps]
    other_deps = [d for d in attention.deps if d not in key_deps]
    sums: list[
        LoweredTask
    ] = []  # gradients of keys that arrived with the keys, to which a rank adds
    for step in range(ranks):
        step_deps = key_deps
        if step < ranks - 1:
            tasks += (sent := hop.pair(f"{attention.name}.keys{step + 1}", key_deps))
            key_deps = [sent[1]]
        compute = LoweredTask(
            f"{attention.name}.step{step}", attention.op, TaskKind.COMPUTE, attention.phase,
            attention.section,
            flops=attention.flops * (step + 1) // ranks - attention.flops * step // ranks,
            traffic=attention.traffic * (step + 1) // ranks - attention.traffic * step // ranks,
            dtype=attention.dtype, shape=attention.shape, deps=[*other_deps, *step_deps],
        )  # fmt: skip
        tasks.append(compute)
        if gradients is not None:
            tasks += (sent := back.pair(f"{attention.name}.d_keys{step + 1}", [compute, *sums]))
            sums = [sent[1]]
    return tasks


def return_gradients(
    phase: str,
    section: BlockSection,
    axes: tuple[str, ...],
    ranks: int,
    size: int,
    deps: Sequence[Dependency],
) -> list[LoweredTask]:
    """Messages that sum gradients of keys around the ring in fp32.

    `size`: bytes of one rank's keys; `deps`: tasks that make the gradients.
    """
    hop = _Hop(phase, section, axes, "fp32", size)
    tasks: list[LoweredTask] = []
    for step in range(ranks):
        tasks += hop.pair(f"d_keys{step + 1}", deps)
        deps = [tasks[-1]]
    return tasks
