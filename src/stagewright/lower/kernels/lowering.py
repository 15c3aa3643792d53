"""Lower one sharded block to the kernels and collectives of one rank: sizes, fusion, buckets.

Consecutive element-wise ops become one kernel, as in a compiler or a hand-written fused kernel;
values inside a kernel are neither written nor read. Collectives that move weights or their
gradients are merged into buckets per block. Attention whose keys are split like its queries
becomes the steps of a ring.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple, cast

from stagewright.algebra.index import parse
from stagewright.algebra.layout import Mesh
from stagewright.graph.cost import indices, traffic
from stagewright.graph.node import BYTES, Graph, Node
from stagewright.graph.roles import SUMS, Role
from stagewright.graph.table import COLLECTIVE_OPS, LEAVES, OPS, is_view
from stagewright.lower.kernels.extent import Extent, bytes_of
from stagewright.lower.kernels.kernel import TIED, BlockSection, Dependency, LoweredTask
from stagewright.lower.kernels.live_values import interface
from stagewright.lower.kernels.rings import LocalKeys, return_gradients, ring_steps
from stagewright.program.columns import TaskKind
from stagewright.program.shapes import shape_of

Cluster = list[Node]
"""Nodes of one kernel."""


class KernelRules(NamedTuple):
    """Rules for fusion, buckets and copies."""

    fuse: bool = True
    """Consecutive element-wise ops are one kernel."""
    bucket: str = "layer"
    """Collectives of a block's weights, keys and gradients that are merged.

    "layer": all of one kind; "parameter": none; "step": all but those of gradients reduced once per
    step; "rank": as "layer", with all-reduces of gradients reduced once per step.
    """
    key_grads: str = "reduce_scatter"
    """Communication that returns gradients of gathered keys: `cp_grad_comm_type`."""
    adds_casts: bool = False
    """Add a gradient without a cast kernel to one of a higher precision, even without `fuse`."""
    copies_slices: bool = False
    """Copy a rank's slice of an unsharded activation."""


def tasks_of(
    graph: Graph, extent: Extent, mesh: Mesh, rules: KernelRules | None = None
) -> tuple[list[LoweredTask], dict[Node, Dependency | None]]:
    """Tasks of a block in execution order within each section, and the task of each value."""
    lowering = _Lowering(graph, extent, mesh, rules or KernelRules())
    return lowering.run(), lowering.maker


def _fuses(n: Node) -> bool:
    """True if an operation can be fused; a cast that computes scales cannot."""
    return OPS[n.op].fuses and n.get("rescaling") is None


class _Lowering:
    """Lowering of one block.

    `maker`: the task that makes a value, or for inputs the `LiveValue` from another block.
    """

    def __init__(self, graph: Graph, extent: Extent, mesh: Mesh, rules: KernelRules) -> None:
        self.rings: dict[tuple[Node, ...], list[LoweredTask]] = {}
        self.graph = graph
        self.extent = extent
        self.mesh = mesh
        self.rules = rules
        self.maker: dict[Node, Dependency | None] = {}
        self.users: dict[Node, list[Node]] = {}
        for n in graph:
            for s in n.srcs:
                self.users.setdefault(s, []).append(n)
        self.outputs = set(graph.outputs.values())
        self.weight_moves = _weights_only(graph)
        self.before_norm = _before_norm(graph)
        self.buckets: dict[tuple[object, ...], LoweredTask] = {}

    def run(self) -> list[LoweredTask]:
        tasks: list[LoweredTask] = []
        for n in self.graph:
            if n.op in LEAVES:
                self.maker[n] = interface(n)
        for cluster in _clusters_by_need(self.clusters()):
            tasks += self.lower(cluster)
        # Weights come first: a bucket of them delays no task that reads them.
        return _tasks_by_need(sorted(tasks, key=lambda t: not t.section.gathers))

    # Which nodes become one kernel.

    def clusters(self) -> list[Cluster]:
        result: list[Cluster] = []
        open_: Cluster = []
        dependents: set[Node] = set()  # outside the open cluster, but in need of it
        joint: dict[tuple[object, ...], Cluster] = {}
        for n in self.graph:
            if n.op in LEAVES:
                continue
            joint_cluster = (
                joint.get((n.op, n.srcs, n.phase)) if n.op not in COLLECTIVE_OPS else None
            )
            if joint_cluster is not None and OPS[n.op].joint:
                joint_cluster.append(n)
                continue
            if n.op in COLLECTIVE_OPS or _is_view(n):
                result.append([n])
                if any(s in dependents or s in open_ for s in n.srcs):
                    dependents.add(n)
                continue
            if open_ and self.joins(n, open_, dependents):
                open_.append(n)
            else:
                producer = self.absorbs(n, result)
                if producer is not None:
                    producer.append(n)
                    open_, dependents = [], set()
                    continue
                result.append([n])
                open_, dependents = (result[-1], set()) if _fuses(n) else ([], set())
            joint[n.op, n.srcs, n.phase] = next(c for c in reversed(result) if n in c)
        return result

    def joins(self, n: Node, cluster: Cluster, dependents: set[Node]) -> bool:
        """True if an element-wise node continues the open kernel."""
        last = cluster[-1]
        if self.rules.adds_casts and n.op == "accumulate":
            return cluster == [n.srcs[0]] and last.op == "cast" and self.users[last] == [n]
        return (
            self.rules.fuse
            and _fuses(n)
            and (n.phase, n.once) == (last.phase, last.once)
            and self.section(n) == self.section(last)
            and (n.scope == SUMS) == (last.scope == SUMS)  # else on another stream
            and not any(s in dependents for s in n.srcs)
            and any(s in cluster or any(s in m.srcs for m in cluster) for s in n.srcs)
        )

    def absorbs(self, n: Node, clusters: list[Cluster]) -> Cluster | None:
        """Product whose epilogue accumulates the gradient (Megatron-LM's fused wgrad)."""
        if not (
            self.rules.fuse and n.op in ("cast", "accumulate") and self.users.get(n.srcs[0]) == [n]
        ):
            return None
        producer = clusters[-1] if clusters else []
        writes = n.op == "accumulate" or any(u.op == "accumulate" for u in self.users.get(n, []))
        if (
            not writes
            or not producer
            or producer[-1] is not n.srcs[0]
            or producer[-1].phase != n.phase
        ):
            return None
        return None if producer[0].op in COLLECTIVE_OPS or _is_view(producer[0]) else producer

    def section(self, n: Node) -> BlockSection:
        if n.op == "tie":
            return BlockSection.TIE
        if n.phase == "optimizer":
            return BlockSection.NORM if n in self.before_norm else BlockSection.UPDATE
        if n.phase == "forward" and n.once:
            return BlockSection.GATHER_ONCE
        if n.phase == "forward":
            return BlockSection.GATHER if n in self.weight_moves else BlockSection.FORWARD
        if n.once:
            return BlockSection.REDUCE_ONCE
        return BlockSection.GATHER_AGAIN if n in self.weight_moves else BlockSection.BACKWARD

    # What a cluster costs.

    def lower(self, cluster: Cluster) -> list[LoweredTask]:
        n = cluster[0]
        if n.op == "slice" and (
            n.role is Role.OWN_ROWS or (self.rules.copies_slices and is_activation_slice(n))
        ):
            self.maker[n] = task = self.copy(n)
            return [task]
        if _is_view(n):
            self.maker[n] = self.maker[n.srcs[0]]
            if n.op == "tie":
                return [self.collective_task(n, "all_reduce", (TIED, n.binding.tied))]
            return []
        if n.op in COLLECTIVE_OPS:
            return self.collective(n)
        task = self.kernel(cluster)
        ring = _ring_axes(n)
        if ring and self.mesh.size(*ring) > 1:
            return self.ring(task, cluster, ring)
        self.maker.update(dict.fromkeys(cluster, task))
        return [task]

    def copy(self, n: Node) -> LoweredTask:
        """Kernel that copies a slice."""
        size = bytes_of(n, self.extent)
        return LoweredTask(
            n.name or n.op, n.op, TaskKind.COMPUTE, n.phase, self.section(n), traffic=2 * size,
            dtype=n.dtype, deps=self.deps(n.srcs), made=[n], reads=[*n.srcs],
        )  # fmt: skip

    def kernel(self, cluster: Cluster) -> LoweredTask:
        first, last = cluster[0], cluster[-1]
        inside = set(cluster)
        reads: dict[Node, int] = {}
        results = [
            m
            for m in cluster
            if m in self.outputs or any(u not in inside for u in self.users.get(m, []))
        ]
        flops = written = 0
        extent = self.extent.of(first)
        for m in cluster:
            work = traffic(m, extent)
            flops += work.flops
            if m in results:
                written += work.written
            for s, read in zip(m.srcs, work.reads, strict=True):
                if s not in inside:
                    reads[s] = max(read, reads.get(s, 0))
        labels = list(dict.fromkeys(m.name or m.op for m in (first, last)))
        return LoweredTask(
            name="+".join(labels),
            op="+".join(dict.fromkeys(m.op for m in cluster)),
            kind=TaskKind.COMPUTE,
            phase=first.phase,
            section=self.section(first),
            axes=("pp",) if first.scope == SUMS else (),
            flops=flops,
            # An optimizer kernel counts at least 1 byte, also without rows. Bytes of all others are
            # linear in the rows of experts.
            traffic=max(int(first.phase == "optimizer"), sum(reads.values()) + written),
            # Of the first operand: of a product the input, in whose format it is multiplied, and
            # not the weight, which may be stored in fewer bits.
            dtype=first.srcs[0].dtype if first.srcs else first.dtype,
            shape=shape_of(cluster, extent),
            deps=self.deps(reads),
            made=results or [last],
            reads=list(reads),
        )

    def deps(self, nodes: Iterable[Node]) -> list[Dependency]:
        return list(dict.fromkeys(t for s in nodes if (t := self.maker[s]) is not None))

    def collective(self, n: Node) -> list[LoweredTask]:
        axes = cast("tuple[str, ...]", n["axes"])
        before = self.maker[n.srcs[0]]
        role, src = n.role, n.srcs[0]
        if (
            self.rules.key_grads == "ring"
            and n.op == "reduce_scatter"
            and src.op == "attention_bwd"
        ):
            return self.ring_gradients(n, axes)
        extends_collective = (
            n.op == src.op and self.users[src] == [n] and role is None and src.role is None
        )
        if (
            extends_collective
            and isinstance(before, LoweredTask)
            and before.section == self.section(n)
        ):
            # Moves along one axis after the other are one along both.
            before.axes = (*before.axes, *axes)
            before.made = [n]
            self.maker[n] = before
            return []
        all_reduced = self.rules.bucket == "rank" and n.op == "reduce_scatter"
        once = self.section(n) is BlockSection.REDUCE_ONCE
        task = self.collective_task(n, "all_reduce" if all_reduced and once else n.op, axes)
        unmerged = self.rules.bucket == "parameter" or (
            self.rules.bucket == "step" and task.section is BlockSection.REDUCE_ONCE
        )
        if unmerged or role is None or role not in _BUCKETED:
            return [task]
        key = (task.section, n.phase, role, n.op, axes, n.dtype)
        bucket = self.buckets.setdefault(key, task)
        self.maker[n] = bucket
        if bucket is task:
            return [task]
        bucket.comm_bytes += task.comm_bytes
        bucket.deps = list(dict.fromkeys([*bucket.deps, *task.deps]))
        bucket.made += task.made
        bucket.reads += task.reads
        bucket.name = f"{role.value}.{n.op}"
        return []

    def ring_gradients(self, n: Node, axes: tuple[str, ...]) -> list[LoweredTask]:
        """Return gradients of keys and values around the ring of `ring`."""
        src = n.srcs[0]
        made = src.srcs  # gradients of one kernel travel together
        ranks = self.mesh.size(*axes)
        size = self.extent.elements(src) * BYTES["fp32"] // ranks
        tasks = self.rings.get(made, [])
        for t in tasks:
            t.comm_bytes += size
        new: list[LoweredTask] = []
        if not tasks:
            deps = self.deps([src])
            new = return_gradients(n.phase, self.section(n), axes, ranks, size, deps)
        self.rings[made] = tasks = tasks or new
        tasks[-1].made.append(n)
        tasks[-1].reads.append(src)
        self.maker[n] = tasks[-1]
        return new

    def collective_task(self, n: Node, op: str, axes: tuple[str, ...]) -> LoweredTask:
        """Collective of a node.

        Its bytes are those of the local input, padded if a split does not divide.
        """
        (src,) = n.srcs
        size = bytes_of(src, self.extent)
        if op == "reduce_scatter":
            size = max(size, bytes_of(n, self.extent) * self.mesh.size(*axes))
        task = LoweredTask(
            name=f"{n.name or src.name or src.op}.{op}",
            op=op,
            kind=TaskKind.COLLECTIVE,
            phase=n.phase,
            section=self.section(n),
            axes=axes,
            comm_bytes=size,
            dtype=n.dtype,
            deps=self.deps([src]),
            made=[n],
            reads=[src],
        )
        self.maker[n] = task
        return task

    def ring(
        self, attention: LoweredTask, cluster: Cluster, axes: tuple[str, ...]
    ) -> list[LoweredTask]:
        """Attention as one step per rank that shares the sequence."""
        first = cluster[0]
        spec = parse(str(first["spec"]))
        keys = [s for s, dims in zip(first.srcs, spec.ins, strict=True) if ("k",) in dims]
        size = sum(bytes_of(k, self.extent) for k in keys)
        local_keys = LocalKeys(size, keys[0].dtype, self.deps(keys))
        gradients = self.rules.key_grads if first.op == "attention_bwd" else None
        tasks = ring_steps(attention, local_keys, axes, self.mesh.size(*axes), gradients)
        last = next(t for t in reversed(tasks) if t.kind == TaskKind.COMPUTE)
        last.made, last.reads = attention.made, attention.reads
        for m in cluster:
            self.maker[m] = tasks[-1] if m.get("wrt") in ("k", "v") else last
        return tasks


def is_activation_slice(n: Node) -> bool:
    """True for slices of activations, not of weights or their gradients."""
    return n.op == "slice" and n.role is None and n.binding.param is None


def _is_view(n: Node) -> bool:
    """True if no kernel makes a value: it shares the bytes of another one."""
    return n.op == "slice" or is_view(n)


_BUCKETED = frozenset(
    {
        Role.SENT, Role.USED, Role.KEYS, Role.MICROBATCH_GRADIENT, Role.STEP_GRADIENT, Role.REDUCED,
        Role.TABLE_GRADIENT, Role.WHOLE_GRADIENT, Role.OWN_ROWS, Role.COUNTED, Role.UPDATED,
    }
)  # fmt: skip
"""Roles of values whose collectives in a block may be merged, by `KernelRules.bucket`."""


def _ring_axes(n: Node) -> tuple[str, ...]:
    ring = OPS[n.op].ring
    if ring is None:
        return ()
    _, split_by = indices(n)
    return tuple(a for a in split_by.get(ring[0], ()) if a in split_by.get(ring[1], ()))


def _weights_only(graph: Graph) -> set[Node]:
    """Moves and casts of parameters, which may run ahead of the block."""
    weight_moves: set[Node] = set()
    for n in graph:
        moves = n.op in COLLECTIVE_OPS or n.op == "slice" or n.role is Role.SENT
        if (
            moves
            and n.phase != "optimizer"
            and (n.srcs[0].op == "param" or n.srcs[0] in weight_moves)
        ):
            weight_moves.add(n)
    return weight_moves


def _before_norm(graph: Graph) -> set[Node]:
    """Nodes of the optimizer phase that the norm of the gradients depends on."""
    stack = [graph.outputs["norm2"]] if "norm2" in graph.outputs else []
    sources: set[Node] = set()
    while stack:
        n = stack.pop()
        if n.phase == "optimizer" and n not in sources:
            sources.add(n)
            stack += n.srcs
    return sources


# ---- order ---------------------------------------------------------------------------------------


def _clusters_by_need(clusters: list[Cluster]) -> list[Cluster]:
    """Sort clusters after those whose values they read."""
    cluster_of = {n: i for i, c in enumerate(clusters) for n in c}
    deps = [
        {cluster_of[s] for n in c for s in n.srcs if s in cluster_of and cluster_of[s] != i}
        for i, c in enumerate(clusters)
    ]
    return [clusters[i] for i in _stable_order(deps)]


def _tasks_by_need(tasks: list[LoweredTask]) -> list[LoweredTask]:
    """Sort tasks after their dependencies: a bucket after its last member, readers after it.

    A rank of a ring sends before it receives what the previous rank sends in the same step.
    """
    index = {t: i for i, t in enumerate(tasks)}
    deps = [{index[d] for d in t.deps if isinstance(d, LoweredTask)} for t in tasks]
    for i, t in enumerate(tasks):
        if t.twin is not None:
            deps[i].add(index[t.twin])
    return [tasks[i] for i in _stable_order(deps)]


def _stable_order(deps: list[set[int]]) -> list[int]:
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
