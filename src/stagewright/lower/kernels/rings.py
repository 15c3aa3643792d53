"""Ring attention (arXiv 2310.01889): keys and values go from rank to rank, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.graph.node import BYTES
from stagewright.lower.kernels.kernel import Dependency, Kernel, TaskPart
from stagewright.program.columns import TaskKind


class OwnKeys(NamedTuple):
    """The keys and values that a rank has of its own part of the sequence."""

    bytes: int
    dtype: str
    deps: Sequence[Dependency]
    """What makes them."""


class _Hop(NamedTuple):
    """What all messages of a ring have in common."""

    phase: str
    part: TaskPart
    axes: tuple[str, ...]
    dtype: str
    bytes: int

    def pair(self, name: str, deps: Sequence[Dependency]) -> list[Kernel]:
        """A message to the next rank of the ring, and the one that comes from the rank before."""
        send, recv = (
            Kernel(
                f"{name}.{op}", op, kind, self.phase, self.part, axes=self.axes, shift=shift,
                comm_bytes=self.bytes, dtype=self.dtype,
            )
            for op, kind, shift in (("send", TaskKind.SEND, 1), ("recv", TaskKind.RECV, -1))
        )  # fmt: skip
        send.deps, recv.twin = [*deps], send
        return [send, recv]


def ring_steps(
    whole: Kernel, keys: OwnKeys, axes: tuple[str, ...], ranks: int, gradients: str | None
) -> list[Kernel]:
    """The attention of `whole` in `ranks` steps, and the messages between them.

    `gradients`: in backward those of keys and values travel with them and take one more step to
    come home, in fp32 if this is "ring" (`cp_grad_comm_type`). None: there are none.
    """
    hop = _Hop(whole.phase, whole.part, axes, keys.dtype, keys.bytes)
    back = hop
    if gradients == "ring":
        back = hop._replace(dtype="fp32", bytes=keys.bytes * 4 // int(BYTES[keys.dtype]))
    tasks: list[Kernel] = []
    here = [*keys.deps]
    others = [d for d in whole.deps if d not in here]
    sums: list[Kernel] = []  # gradients of keys that came with the keys, sent on with ours
    for step in range(ranks):
        with_keys = here
        if step < ranks - 1:
            tasks += (sent := hop.pair(f"{whole.name}.keys{step + 1}", here))
            here = [sent[1]]
        compute = Kernel(
            f"{whole.name}.step{step}", whole.op, TaskKind.COMPUTE, whole.phase, whole.part,
            flops=whole.flops * (step + 1) // ranks - whole.flops * step // ranks,
            traffic=whole.traffic * (step + 1) // ranks - whole.traffic * step // ranks,
            dtype=whole.dtype, shape=whole.shape, deps=[*others, *with_keys],
        )  # fmt: skip
        tasks.append(compute)
        if gradients is not None:
            tasks += (sent := back.pair(f"{whole.name}.d_keys{step + 1}", [compute, *sums]))
            sums = [sent[1]]
    return tasks


def way_home(
    phase: str,
    part: TaskPart,
    axes: tuple[str, ...],
    ranks: int,
    size: int,
    deps: Sequence[Dependency],
) -> list[Kernel]:
    """Messages of gradients of keys that go round the ring in fp32, each rank adding its part.

    `size`: bytes of one rank's keys; `deps`: what makes the gradients.
    """
    hop = _Hop(phase, part, axes, "fp32", size)
    tasks: list[Kernel] = []
    for step in range(ranks):
        tasks += hop.pair(f"d_keys{step + 1}", deps)
        deps = [tasks[-1]]
    return tasks
