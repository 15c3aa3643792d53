"""Offload optimizer states, and activations until backward, to host memory.

Both rewrite a block's tasks. Copies are separate tasks (`TaskKind.STORE` to the host,
`TaskKind.LOAD` back), one per direction and block, and overlap with kernels and collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import STREAM
from stagewright.lower.assembly.lowered_block import PERMANENT_BUFFERS
from stagewright.lower.assembly.lowered_block import updates as is_update
from stagewright.lower.kernels.kernel import BlockSection, Dependency, LoweredTask
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.program.columns import TaskKind

_LATER = (BlockSection.GATHER_AGAIN, BlockSection.BACKWARD, BlockSection.REDUCE_ONCE)


def activations(
    graph: Graph, tasks: Sequence[LoweredTask], size: Mapping[Node, int], *, with_input: bool = True
) -> tuple[list[LoweredTask], frozenset[Node]]:
    """Store activations on the host between forward and backward; return tasks and moved values.

    As in Megatron-LM's `--cpu-offloading-num-layers`: stored after the block's forward, loaded
    during the backward of the block after it. Without the input, this is what JAX's
    `save_and_offload_only_these_names` offloads.
    """
    owner = PERMANENT_BUFFERS.owner  # no gradient of a weight is made in forward
    made = {owner(n) for t in tasks if t.section is BlockSection.FORWARD for n in t.made}
    made |= {n for n in graph if with_input and interface(n) == LiveValue(STREAM)}
    later = [t for t in tasks if t.section in _LATER]
    read = dict.fromkeys(owner(n) for t in later for n in t.reads)
    saved = {n: None for n in read if n in made and not PERMANENT_BUFFERS.permanent(n)}
    total = sum(size[n] for n in saved)
    if not total:
        return [*tasks], frozenset()
    dtype = next(iter(saved)).dtype
    makers = [
        t
        for t in tasks
        if t.section is BlockSection.FORWARD and any(owner(n) in saved for n in t.made)
    ]
    stream = [LiveValue(STREAM)] if any(n.op == "input" for n in saved) else []
    deps: list[Dependency] = [*makers, *stream]
    store = LoweredTask("offload", "store", TaskKind.STORE, "forward", BlockSection.FORWARD,
                        comm_bytes=total, dtype=dtype, deps=deps, reads=list(saved))  # fmt: skip
    load = LoweredTask("reload", "load", TaskKind.LOAD, "backward", BlockSection.RELOAD,
                       comm_bytes=total, dtype=dtype, deps=[store])  # fmt: skip
    for t in later:
        if any(owner(n) in saved for n in t.reads):
            t.deps.append(load)
    return [*tasks, store, load], frozenset(saved)


def states(tasks: Sequence[LoweredTask], size: Mapping[Node, int]) -> list[LoweredTask]:
    """Move the optimizer to the host: store gradients, load parameters.

    As in Megatron-LM's `--optimizer-cpu-offload`, the host has master copies and moments and
    computes the update, which is not a task of the device.
    """
    updates = [t for t in tasks if any(map(is_update, t.made))]
    if not updates:
        return [*tasks]
    new = [n for t in updates for n in t.made]
    old = [n.srcs[0] for n in new]  # gradients come first
    section = BlockSection.UPDATE
    store = LoweredTask("gradients.offload", "store", TaskKind.STORE, "optimizer", section,
                        comm_bytes=sum(size[n] for n in old), dtype=old[0].dtype,
                        deps=list(dict.fromkeys(d for t in updates for d in t.deps)))  # fmt: skip
    load = LoweredTask("parameters.reload", "load", TaskKind.LOAD, "optimizer", section,
                       comm_bytes=sum(size[n] for n in new), dtype=new[0].dtype,
                       deps=[store])  # fmt: skip
    removed = set(updates)
    first = next(i for i, t in enumerate(tasks) if t in removed)
    remaining = [t for t in tasks if t not in removed]
    for t in remaining:
        t.deps = list(dict.fromkeys(load if d in removed else d for d in t.deps))
    return [*remaining[:first], store, load, *remaining[first:]]
