"""The order of a block's kernels: each after what it needs, otherwise as they were given."""

from __future__ import annotations

import heapq

from stagewright.graph.node import Node
from stagewright.lower.kernels.kernel import Kernel

Cluster = list[Node]
"""The nodes of one kernel."""


def by_need(clusters: list[Cluster]) -> list[Cluster]:
    """Clusters after those whose values they read."""
    home = {n: i for i, c in enumerate(clusters) for n in c}
    needs = [
        {home[s] for n in c for s in n.srcs if s in home and home[s] != i}
        for i, c in enumerate(clusters)
    ]
    return [clusters[i] for i in _stable(needs)]


def sorted_by_need(tasks: list[Kernel]) -> list[Kernel]:
    """Tasks after what they need: a bucket after its last member, its readers after the bucket.

    A rank of a ring sends before it receives what the one before it sends then, too.
    """
    place = {t: i for i, t in enumerate(tasks)}
    needs = [{place[d] for d in t.deps if isinstance(d, Kernel)} for t in tasks]
    for i, t in enumerate(tasks):
        if t.twin is not None:
            needs[i].add(place[t.twin])
    return [tasks[i] for i in _stable(needs)]


def _stable(needs: list[set[int]]) -> list[int]:
    """Items after what they need, otherwise in the order given: always the first that is ready."""
    users: list[list[int]] = [[] for _ in needs]
    for i, some in enumerate(needs):
        for j in some:
            users[j].append(i)
    missing = [len(some) for some in needs]
    ready = [i for i, n in enumerate(missing) if n == 0]  # ascending: a heap
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in users[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    assert len(order) == len(needs), "a circle of dependencies"
    return order
