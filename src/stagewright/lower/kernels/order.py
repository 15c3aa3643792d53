"""Stable topological order of a block's kernels."""

from __future__ import annotations

import heapq

from stagewright.graph.node import Node
from stagewright.lower.kernels.kernel import Kernel

Cluster = list[Node]
"""Nodes of one kernel."""


def by_need(clusters: list[Cluster]) -> list[Cluster]:
    """Sort clusters after those whose values they read."""
    home = {n: i for i, c in enumerate(clusters) for n in c}
    deps = [
        {home[s] for n in c for s in n.srcs if s in home and home[s] != i}
        for i, c in enumerate(clusters)
    ]
    return [clusters[i] for i in _stable(deps)]


def sorted_by_need(tasks: list[Kernel]) -> list[Kernel]:
    """Sort tasks after their dependencies: a bucket after its last member, readers after it.

    A rank of a ring sends before it receives what the previous rank sends in the same step.
    """
    index = {t: i for i, t in enumerate(tasks)}
    deps = [{index[d] for d in t.deps if isinstance(d, Kernel)} for t in tasks]
    for i, t in enumerate(tasks):
        if t.twin is not None:
            deps[i].add(index[t.twin])
    return [tasks[i] for i in _stable(deps)]


def _stable(deps: list[set[int]]) -> list[int]:
    """Sort items after their dependencies: always the first that is ready."""
    users: list[list[int]] = [[] for _ in deps]
    for i, sources in enumerate(deps):
        for j in sources:
            users[j].append(i)
    missing = [len(sources) for sources in deps]
    ready = [i for i, n in enumerate(missing) if n == 0]  # ascending: a heap
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in users[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    assert len(order) == len(deps), "a cycle of dependencies"
    return order
