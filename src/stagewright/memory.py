"""Bytes a rank holds: parameters, gradients, optimizer states, and the peak of what comes and goes.

Allocation is ideal: a value is there from the kernel that makes it to the last that reads it. What
forward keeps for backward is counted per microbatch in flight, as the schedule has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.actions import Action
from stagewright.ir import Graph, Node
from stagewright.kernels import Extent, Task, bytes_of
from stagewright.stages import Placed


class Footprint(NamedTuple):
    """Bytes of one block on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    kept: int  # by forward for backward, per microbatch
    gathered: int  # weights gathered for this block alone
    gathered_once: int  # weights that stay gathered for the step
    forward_peak: int  # most that lives in forward, what is kept included
    backward_peak: int  # most that lives in backward, what was kept included


def footprint(graph: Graph, tasks: Sequence[Task], extent: Extent) -> Footprint:
    """What a block needs, from its tasks."""

    def total(nodes: Sequence[Node] | set[Node]) -> int:
        return sum(bytes_of(n, extent) for n in nodes)

    params = [n for n in graph if n.op == "param"]
    shared = {n.name for n in params} - {
        str(n.get("param")) for n in graph if n.phase == "optimizer"
    }
    owned = [n for n in params if n.name not in shared]
    sums = [n for n in graph if n.op == "accumulate" and n["param"] not in shared]
    states = [n for n in graph if n.op == "state" and n["role"] == "state"]
    forward = [t for t in tasks if t.part == "forward"]
    backward = [t for t in tasks if t.part == "backward"]
    weights = {n for t in tasks if t.part.startswith("gather") for n in t.made}
    static = {*params, *weights, *(n for n in graph if n.op in ("accumulate", "state"))}
    inputs = {n for n in graph if n.op == "input"}
    made = {n for t in forward for n in t.made} | inputs
    kept = {n for t in backward for n in t.reads if n in made and n.phase == "forward"} - static
    return Footprint(
        parameters=total(owned),
        gradients=total(sums),
        optimizer=total(states),
        kept=total(kept),
        gathered=total({n for t in tasks if t.part == "gather" for n in t.made}),
        gathered_once=total({n for t in tasks if t.part == "gather_once" for n in t.made}),
        forward_peak=_peak(forward, static, set(), kept, extent),
        backward_peak=_peak(backward, static, kept, set(), extent),
    )


class ServedFootprint(NamedTuple):
    """Bytes of one block on one rank, in inference."""

    parameters: int
    kv_cache: int  # of the requests of one microbatch
    peak: int  # most that lives besides


def served_footprint(
    graph: Graph, tasks: Sequence[Task], extent: Extent, shared: frozenset[str] = frozenset()
) -> ServedFootprint:
    """What a block needs in inference; weights called `shared` are held elsewhere on the rank."""
    params = {n for n in graph if n.op == "param"}
    caches = {n for n in graph if n.op == "state"}
    static = {*params, *caches, *(n for n in graph if n.op == "cache")}  # written in place
    return ServedFootprint(
        sum(bytes_of(n, extent) for n in params if n.name not in shared),
        sum(bytes_of(n, extent) for n in caches),
        _peak([t for t in tasks if t.part == "forward"], static, set(), set(), extent),
    )


def served_memory(microbatches: Sequence[Sequence[ServedFootprint]]) -> dict[str, int]:
    """Bytes of one rank by category, and their peak; the blocks' footprints by microbatch.

    The requests of all microbatches have their keys and values in the cache at once.
    """
    result = {
        "parameters": sum(f.parameters for f in microbatches[0]),
        "kv_cache": sum(f.kv_cache for blocks in microbatches for f in blocks),
        "activations": max(f.peak for blocks in microbatches for f in blocks),
    }
    return result | {"peak": sum(result.values())}


def _peak(
    tasks: Sequence[Task], static: set[Node], before: set[Node], after: set[Node], extent: Extent
) -> int:
    """Most bytes alive while the tasks run; `before` live at the start, `after` are not freed."""
    last: dict[Node, int] = {}
    for i, t in enumerate(tasks):
        for n in (*t.reads, *t.made):
            last[n] = i
    dies: dict[int, list[Node]] = {}
    for n, i in last.items():
        if n not in after and n not in static:
            dies.setdefault(i, []).append(n)
    alive = set(before)
    now = most = sum(bytes_of(n, extent) for n in alive)
    for i, t in enumerate(tasks):
        for n in (*t.reads, *t.made):
            if n not in alive and n not in static:
                alive.add(n)
                now += bytes_of(n, extent)
        most = max(most, now)
        for n in dies.get(i, ()):
            if n in alive:
                alive.discard(n)
                now -= bytes_of(n, extent)
    return most


def rank_memory(
    stages: Sequence[tuple[int, Sequence[Placed]]],
    actions: Sequence[Action],
    footprints: dict[int, Footprint],
) -> dict[str, int]:
    """Bytes of one rank by category, and their peak; `footprints` by id of the lowered block."""
    per_stage = {s: [footprints[id(p.block)] for p in blocks] for s, blocks in stages}
    every = [f for blocks in per_stage.values() for f in blocks]
    kept = {s: sum(f.kept for f in blocks) for s, blocks in per_stage.items()}
    rise = {(s, k): _stage_peak(blocks, k) for s, blocks in per_stage.items() for k in "FBIW"}
    alive = activations = gathered = 0
    for a in actions:
        here, window = rise[a.stage, a.kind]
        if a.kind == "F":
            activations = max(activations, alive + here)
            alive += kept[a.stage]
        else:
            activations = max(activations, alive - kept[a.stage] + here)
            alive -= kept[a.stage] if a.kind in "BW" else 0
        gathered = max(gathered, window)
    result = {
        "parameters": sum(f.parameters for f in every),
        "gradients": sum(f.gradients for f in every),
        "optimizer": sum(f.optimizer for f in every),
        "gathered_parameters": gathered + sum(f.gathered_once for f in every),
        "activations": activations,
    }
    return result | {"peak": sum(result.values())}


def _stage_peak(blocks: Sequence[Footprint], kind: str) -> tuple[int, int]:
    """Most bytes of a stage's activations, all it keeps included, and of weights gathered ahead."""
    before = most = window = 0
    for i, f in enumerate(blocks):
        peak = f.forward_peak if kind == "F" else f.backward_peak
        most = max(most, before + peak)
        before += f.kept
        window = max(window, f.gathered + (blocks[i + 1].gathered if i + 1 < len(blocks) else 0))
    return most, window
