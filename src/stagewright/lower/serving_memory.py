"""Bytes of a rank in a step of inference: weights, the cache of keys and values, and what is made.

Allocation is ideal: a value is there from the kernel that makes it to the last that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import Role
from stagewright.lower.kernels import Extent, Kernel, TaskPart, bytes_of, carried


class ServedFootprint(NamedTuple):
    """Bytes of one block on one rank, in inference."""

    parameters: int
    tables: Mapping[str, int]  # parameters that blocks of a rank share
    kv_cache: int  # of the requests of one microbatch
    peak: int  # most that lives besides


def served_footprint(graph: Graph, tasks: Sequence[Kernel], extent: Extent) -> ServedFootprint:
    """What a block needs in inference."""
    params = {n for n in graph if n.op == "param"}
    caches = {n for n in graph if n.op == "state"}
    # Written in place; what blocks hand on besides the stream is there longer than one of them.
    static = {*params, *caches, *(n for n in graph if n.op == "cache" or n.role is Role.CACHE)}
    static |= {*carried(graph).values()}
    return ServedFootprint(
        sum(bytes_of(n, extent) for n in params if not n.binding.tied),
        {n.binding.tied: bytes_of(n, extent) for n in params if n.binding.tied},
        sum(bytes_of(n, extent) for n in caches),
        _peak([t for t in tasks if t.part is TaskPart.FORWARD], static, set(), set(), extent),
    )


def served_memory(microbatches: Sequence[Sequence[ServedFootprint]]) -> dict[str, int]:
    """Bytes of one rank by category, and their peak; the blocks' footprints by microbatch.

    The requests of all microbatches have their keys and values in the cache at once.
    """
    tables = {name: held for f in microbatches[0] for name, held in f.tables.items()}
    result = {
        "parameters": sum(f.parameters for f in microbatches[0]) + sum(tables.values()),
        "kv_cache": sum(f.kv_cache for blocks in microbatches for f in blocks),
        "activations": max(f.peak for blocks in microbatches for f in blocks),
    }
    return result | {"peak": sum(result.values())}


def _peak(
    tasks: Sequence[Kernel], static: set[Node], before: set[Node], after: set[Node], extent: Extent
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
