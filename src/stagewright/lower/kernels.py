"""From one sharded block to the kernels and messages of one rank: numbers, fusion, buckets.

Consecutive element-wise ops become one kernel, as a compiler or a hand-written fused kernel would
have it; what stays inside a kernel is neither written nor read. Collectives that move weights or
their gradients are gathered into buckets per block. Attention whose keys are split like its queries
becomes the steps of a ring.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple, cast

from stagewright.algebra.index import parse
from stagewright.algebra.layout import Mesh
from stagewright.algebra.size import Size, size
from stagewright.arithmetic import ceil, largest
from stagewright.graph.cost import bytes_per_value, indices, local, traffic
from stagewright.graph.node import BYTES, Graph, Node
from stagewright.graph.parameter import HEADS
from stagewright.graph.roles import CHOSEN, CLIP, GATHERED, MEMORY, STREAM, TABLE, Role
from stagewright.graph.table import COLLECTIVE_OPS, LEAVES, OPS
from stagewright.program.columns import Shape, TaskKind
from stagewright.program.shapes import shape_of

Mean = Fraction | Callable[[tuple[str, ...]], Fraction]  # of a dim, on a rank or by its splits


class LiveValue(NamedTuple):
    """A value that blocks hand on to those after them, or its gradient, which goes the other way.

    The residual stream is "x". A block that does not make a value lets it pass.
    """

    name: str
    gradient: bool = False


class TaskPart(Enum):
    """When a task of a block runs within a step."""

    GATHER_ONCE = "gather_once"
    """Once per step, before the first forward: weights that stay gathered."""
    GATHER = "gather"
    """Before each forward: weights of one microbatch's pass."""
    FORWARD = "forward"
    GATHER_AGAIN = "gather_again"
    """Before each backward: weights that forward has let go."""
    BACKWARD = "backward"
    REDUCE_ONCE = "reduce_once"
    """After the last backward: gradients over data parallelism."""
    TIE = "tie"
    """Gradients of a table, between the pipeline ranks that hold copies."""
    NORM = "norm"
    """The norm of the gradients."""
    UPDATE = "update"

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered here, and nothing is computed but their casts."""
        return self in (TaskPart.GATHER_ONCE, TaskPart.GATHER, TaskPart.GATHER_AGAIN)


@dataclass(slots=True, eq=False)
class Kernel:
    """A row to be: a kernel, a collective or one end of a message."""

    name: str
    op: str
    kind: TaskKind
    phase: str
    part: TaskPart
    flops: int = 0
    traffic: int = 0
    axes: tuple[str, ...] = ()  # COLLECTIVE: outermost first; SEND, RECV: the one axis
    shift: int = 0  # SEND, RECV: distance to the peer along the axis
    twin: Kernel | None = None  # RECV: the SEND that a rank the other way issues for it
    comm_bytes: int = 0
    dtype: str = ""
    shape: Shape | None = None  # COMPUTE
    # what it waits for: tasks, or what others hand on
    deps: list[Dependency] = field(default_factory=list["Dependency"])
    made: list[Node] = field(default_factory=list[Node])  # values that others see
    reads: list[Node] = field(default_factory=list[Node])  # values of others


Dependency = Kernel | LiveValue


Split = tuple[int, tuple[str, ...]]
"""A number of rows, and the axes that split them, outermost first."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """The rows that a rank has of splits that do not divide: those of `torch.chunk`.

    All ranks have as many rows as fit evenly, rounded up, until none are left: one rank has the
    rest, and those after it have none. `axes` are cut as one: those that FSDP shards over, in its
    order; other axes of a dim come before them. `held` are the rows of each such split on the rank;
    of a split that is not in it the first rank's. `met` collects the splits that were asked for.
    """

    axes: tuple[str, ...] = ()
    held: Mapping[Split, int] = field(default_factory=dict[Split, int])
    met: dict[Split, None] = field(default_factory=dict[Split, None])

    def __call__(self, count: int, axes: tuple[str, ...], mesh: Mesh) -> int:
        """Rows of `count` that the rank has."""
        over = self._sharding(axes)
        ranks = mesh.size(*over)
        count = -(-count // (mesh.size(*axes) // ranks))
        each = -(-count // ranks)
        if each * ranks == count:
            return each
        self.met[count, over] = None
        return self.held.get((count, over), each)

    def _sharding(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The last of `axes`: experts are split over axes of ep, and only then sharded."""
        rest = (axes[i:] for i in range(len(axes)))
        return next((some for some in rest if some == tuple(a for a in self.axes if a in some)), ())


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a dim is on one rank; a split that does not divide pads to the ceiling.

    `means` are dims of which only the mean is known, which need not be whole: the rows of experts.
    `rows` are axes that split heads and their channels as one dim, where they split channels: rows
    of a linear's weight as PyTorch's FSDP shards them. A size or a mesh axis may be `Varying`: then
    extents are, and what kernels do with these is exact for every configuration. `own` are the rows
    of this rank; None: those of the first rank, as if all were padded.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    means: Mapping[Size, Mean] = field(default_factory=dict[Size, Mean])
    rows: frozenset[str] = frozenset()
    known: dict[tuple[Size, tuple[str, ...]], int | Fraction] = field(
        default_factory=dict[tuple[Size, tuple[str, ...]], "int | Fraction"]
    )
    own: OwnRows | None = None
    optimizer: Extent | None = None
    """How large dims are where the optimizer works; None: as large as elsewhere."""

    def of(self, n: Node) -> Extent:
        """How large the dims of a value are.

        FSDP2 stores weights and gradients with padding, and hands the optimizer views without it.
        """
        if self.optimizer is not None and (n.phase == "optimizer" or n.op == "state"):
            return self.optimizer
        return self

    def __call__(self, dim: Size, axes: tuple[str, ...]) -> int | Fraction:
        """Points of a dim that `axes` split."""
        key = (dim, axes)
        if key not in self.known:
            if dim in self.means:
                mean = self.means[dim]
                self.known[key] = mean(axes) if callable(mean) else mean / self.mesh.size(*axes)
            else:
                self.known[key] = self._part(dim.value(self.sizes), axes)
        return self.known[key]

    def _part(self, count: int, axes: tuple[str, ...]) -> int:
        """Rows of `count` on one rank."""
        if self.own is not None:
            return self.own(count, axes, self.mesh)
        return -(-count // self.mesh.size(*axes))

    def elements(self, n: Node) -> int:
        """Elements of a value that one rank holds."""
        dims = [*zip(n.shape, n.layout.dims, strict=True)]
        last = len(dims) - 1
        over = tuple(a for a in dims[-1][1] if a in self.rows) if dims else ()
        if not over or n.shape[-1] in (size("M"), size("B")):
            return ceil(local(n, self))
        first = last
        while first and n.shape[first - 1] in HEADS:
            first -= 1
        count = [self(d, tuple(a for a in axes if a not in over)) for d, axes in dims]
        rows = ceil(math.prod(count[first:]))
        return ceil(math.prod(count[:first])) * self._part(rows, over)


def extent_of(
    sizes: Mapping[str, int],
    mesh: Mesh,
    means: Mapping[Size, Mean] | None = None,
    rows: frozenset[str] = frozenset(),
    own: OwnRows | None = None,
) -> Extent:
    """How large dims are on a rank of a mesh; see `Extent`. `own`: where the optimizer works."""
    means = means or {}
    optimizer = Extent(sizes, mesh, means, rows, own=own) if own is not None else None
    return Extent(sizes, mesh, means, rows, optimizer=optimizer)


def bytes_of(n: Node, extent: Extent) -> int:
    """Bytes of the part of a value that one rank holds."""
    return ceil(extent.elements(n) * bytes_per_value(n, extent))


class KernelRules(NamedTuple):
    """What becomes one kernel or one message, and what is copied."""

    fuse: bool = True
    """Consecutive element-wise ops are one kernel."""
    bucket: str = "layer"
    """Which reductions of a block are one message; "step" is "layer", but for gradients that are
    reduced once per step."""
    key_grads: str = "reduce_scatter"
    """How gradients of gathered keys return to their ranks: `cp_grad_comm_type`."""
    adds_casts: bool = False
    """A gradient is added as it is to one of a higher precision, whatever `fuse` says."""
    copies_slices: bool = False
    """A rank's part of an activation that it has whole is copied."""


def kernels(
    graph: Graph, extent: Extent, mesh: Mesh, rules: KernelRules | None = None
) -> tuple[list[Kernel], dict[Node, Dependency | None]]:
    """The tasks of a block in execution order within each part, and which task makes each value."""
    lowering = _Lowering(graph, extent, mesh, rules or KernelRules())
    return lowering.run(), lowering.at


Cluster = list[Node]


def _fuses(n: Node) -> bool:
    """Whether a kernel may hold this operation beside others; a cast that finds scales is alone."""
    return OPS[n.op].fuses and n.get("rescaling") is None


class _Lowering:
    """One block on its way; `at`: the task that makes a value, or an interface outside."""

    def __init__(self, graph: Graph, extent: Extent, mesh: Mesh, rules: KernelRules) -> None:
        self.rings: dict[tuple[Node, ...], list[Kernel]] = {}
        self.graph = graph
        self.extent = extent
        self.mesh = mesh
        self.rules = rules
        self.at: dict[Node, Dependency | None] = {}
        self.users: dict[Node, list[Node]] = {}
        for n in graph:
            for s in n.srcs:
                self.users.setdefault(s, []).append(n)
        self.asked = set(graph.outputs.values())
        self.light = _weights_only(graph)
        self.norms = _before_norm(graph)
        self.buckets: dict[tuple[object, ...], Kernel] = {}

    def run(self) -> list[Kernel]:
        tasks: list[Kernel] = []
        for n in self.graph:
            if n.op in LEAVES:
                self.at[n] = interface(n)
        for cluster in _in_order(self.clusters()):
            tasks += self.lower(cluster)
        # Weights are there before all else: a bucket of them delays no task that reads them.
        return _sorted(sorted(tasks, key=lambda t: not t.part.gathers))

    # Which nodes become one kernel.

    def clusters(self) -> list[Cluster]:
        result: list[Cluster] = []
        open_: Cluster = []
        behind: set[Node] = set()  # outside the open cluster, but in need of it
        joint: dict[tuple[object, ...], Cluster] = {}
        for n in self.graph:
            if n.op in LEAVES:
                continue
            together = joint.get((n.op, n.srcs, n.phase)) if n.op not in COLLECTIVE_OPS else None
            if together is not None and OPS[n.op].joint:
                together.append(n)
                continue
            if n.op in COLLECTIVE_OPS or _is_view(n):
                result.append([n])
                if any(s in behind or s in open_ for s in n.srcs):
                    behind.add(n)
                continue
            if open_ and self.joins(n, open_, behind):
                open_.append(n)
            else:
                home = self.absorbs(n, result)
                if home is not None:
                    home.append(n)
                    open_, behind = [], set()
                    continue
                result.append([n])
                open_, behind = (result[-1], set()) if _fuses(n) else ([], set())
            joint[n.op, n.srcs, n.phase] = next(c for c in reversed(result) if n in c)
        return result

    def joins(self, n: Node, cluster: Cluster, behind: set[Node]) -> bool:
        """Whether an element-wise node continues the open kernel."""
        last = cluster[-1]
        if self.rules.adds_casts and n.op == "accumulate":
            return cluster == [n.srcs[0]] and last.op == "cast" and self.users[last] == [n]
        return (
            self.rules.fuse
            and _fuses(n)
            and (n.phase, n.once) == (last.phase, last.once)
            and self.part(n) == self.part(last)
            and not any(s in behind for s in n.srcs)
            and any(s in cluster or any(s in m.srcs for m in cluster) for s in n.srcs)
        )

    def absorbs(self, n: Node, clusters: list[Cluster]) -> Cluster | None:
        """The product whose epilogue accumulates the gradient (Megatron-LM's fused wgrad)."""
        if not (
            self.rules.fuse and n.op in ("cast", "accumulate") and self.users.get(n.srcs[0]) == [n]
        ):
            return None
        home = clusters[-1] if clusters else []
        writes = n.op == "accumulate" or any(u.op == "accumulate" for u in self.users.get(n, []))
        if not writes or not home or home[-1] is not n.srcs[0] or home[-1].phase != n.phase:
            return None
        return None if home[0].op in COLLECTIVE_OPS or _is_view(home[0]) else home

    def part(self, n: Node) -> TaskPart:
        if n.op == "tie":
            return TaskPart.TIE
        if n.phase == "optimizer":
            return TaskPart.NORM if n in self.norms else TaskPart.UPDATE
        if n.phase == "forward" and n.once:
            return TaskPart.GATHER_ONCE
        if n.phase == "forward":
            return TaskPart.GATHER if n in self.light else TaskPart.FORWARD
        if n.once:
            return TaskPart.REDUCE_ONCE
        return TaskPart.GATHER_AGAIN if n in self.light else TaskPart.BACKWARD

    # What a cluster costs.

    def lower(self, cluster: Cluster) -> list[Kernel]:
        n = cluster[0]
        if n.op == "slice" and (
            n.role is Role.OWN_ROWS or (self.rules.copies_slices and is_part(n))
        ):
            self.at[n] = task = self.copy(n)
            return [task]
        if _is_view(n):
            self.at[n] = self.at[n.srcs[0]]
            if n.op == "tie":
                return [self.message(n, "all_reduce", (TIED, n.binding.tied))]
            return []
        if n.op in COLLECTIVE_OPS:
            return self.collective(n)
        task = self.kernel(cluster)
        ring = _ring_axes(n)
        if ring and self.mesh.size(*ring) > 1:
            return self.ring(task, cluster, ring)
        self.at.update(dict.fromkeys(cluster, task))
        return [task]

    def copy(self, n: Node) -> Kernel:
        """A part of a value that is made as a value of its own."""
        size = bytes_of(n, self.extent)
        return Kernel(
            n.name or n.op, n.op, TaskKind.COMPUTE, n.phase, self.part(n), traffic=2 * size,
            dtype=n.dtype, deps=self.deps(n.srcs), made=[n], reads=[*n.srcs],
        )  # fmt: skip

    def kernel(self, cluster: Cluster) -> Kernel:
        first, last = cluster[0], cluster[-1]
        inside = set(cluster)
        reads: dict[Node, int] = {}
        seen = [
            m
            for m in cluster
            if m in self.asked or any(u not in inside for u in self.users.get(m, []))
        ]
        flops = written = 0
        extent = self.extent.of(first)
        for m in cluster:
            work = traffic(m, extent)
            flops += work.flops
            if m in seen:
                written += work.written
            for s, read in zip(m.srcs, work.reads, strict=True):
                if s not in inside:
                    reads[s] = largest([read, reads.get(s, 0)])
        labels = list(dict.fromkeys(m.name or m.op for m in (first, last)))
        return Kernel(
            name="+".join(labels),
            op="+".join(dict.fromkeys(m.op for m in cluster)),
            kind=TaskKind.COMPUTE,
            phase=first.phase,
            part=self.part(first),
            flops=flops,
            # A launch without rows has a byte; elsewhere bytes are linear in the rows of experts.
            traffic=largest([int(first.phase == "optimizer"), sum(reads.values()) + written]),
            # Of the first operand: of a product the input, in whose format it is multiplied, and
            # not the weight, which may be stored in fewer bits.
            dtype=first.srcs[0].dtype if first.srcs else first.dtype,
            shape=shape_of(cluster, extent),
            deps=self.deps(reads),
            made=seen or [last],
            reads=list(reads),
        )

    def deps(self, nodes: Iterable[Node]) -> list[Dependency]:
        return list(dict.fromkeys(t for s in nodes if (t := self.at[s]) is not None))

    def collective(self, n: Node) -> list[Kernel]:
        axes = cast("tuple[str, ...]", n["axes"])
        before = self.at[n.srcs[0]]
        role, src = n.role, n.srcs[0]
        if (
            self.rules.key_grads == "ring"
            and n.op == "reduce_scatter"
            and src.op == "attention_bwd"
        ):
            return self.home(n, axes)
        alone = n.op == src.op and self.users[src] == [n] and role is None and src.role is None
        if alone and isinstance(before, Kernel) and before.part == self.part(n):
            # Moves along one axis after the other are one along both.
            before.axes = (*before.axes, *axes)
            before.made = [n]
            self.at[n] = before
            return []
        task = self.message(n, n.op, axes)
        own = self.rules.bucket == "parameter" or (
            self.rules.bucket == "step" and task.part is TaskPart.REDUCE_ONCE
        )
        if own or role is None or role not in _BUCKETED:
            return [task]
        key = (task.part, n.phase, role, n.op, axes, n.dtype)
        together = self.buckets.setdefault(key, task)
        self.at[n] = together
        if together is task:
            return [task]
        together.comm_bytes += task.comm_bytes
        together.deps = list(dict.fromkeys([*together.deps, *task.deps]))
        together.made += task.made
        together.reads += task.reads
        together.name = f"{role.value}.{n.op}"
        return []

    def home(self, n: Node, axes: tuple[str, ...]) -> list[Kernel]:
        """Gradients of keys and values go round the ring in fp32, each rank adding its part."""
        src = n.srcs[0]
        made = src.srcs  # gradients of one kernel travel together
        ranks = self.mesh.size(*axes)
        size = self.extent.elements(src) * BYTES["fp32"] // ranks
        if made in self.rings:
            together = self.rings[made]
            for t in together:
                t.comm_bytes += size
            together[-1].made.append(n)
            together[-1].reads.append(src)
            self.at[n] = together[-1]
            return []
        common: dict[str, Any] = {"phase": n.phase, "part": self.part(n), "dtype": "fp32"}
        common |= {"axes": axes, "comm_bytes": size}
        tasks: list[Kernel] = []
        deps: list[Dependency] = self.deps([src])
        for step in range(ranks):
            name = f"d_keys{step + 1}"
            send = Kernel(f"{name}.send", "send", TaskKind.SEND, shift=1, deps=deps, **common)
            recv = Kernel(f"{name}.recv", "recv", TaskKind.RECV, shift=-1, twin=send, **common)
            tasks += [send, recv]
            deps = [recv]
        tasks[-1].made, tasks[-1].reads = [n], [src]
        self.rings[made] = tasks
        self.at[n] = tasks[-1]
        return tasks

    def message(self, n: Node, op: str, axes: tuple[str, ...]) -> Kernel:
        """A collective; bytes are those of the local input, padded if a split does not divide."""
        (src,) = n.srcs
        size = bytes_of(src, self.extent)
        if op == "reduce_scatter":
            size = largest([size, bytes_of(n, self.extent) * self.mesh.size(*axes)])
        task = Kernel(
            name=f"{n.name or src.name or src.op}.{op}",
            op=op,
            kind=TaskKind.COLLECTIVE,
            phase=n.phase,
            part=self.part(n),
            axes=axes,
            comm_bytes=size,
            dtype=n.dtype,
            deps=self.deps([src]),
            made=[n],
            reads=[src],
        )
        self.at[n] = task
        return task

    def ring(self, whole: Kernel, cluster: Cluster, axes: tuple[str, ...]) -> list[Kernel]:
        """Attention in a step per rank sharing the sequence; keys and values go round meanwhile.

        Ring attention (arXiv 2310.01889); in backward the gradients of keys and values travel with
        them and take one more step to come home.
        """
        first = cluster[0]
        ranks = self.mesh.size(*axes)
        spec = parse(str(first["spec"]))
        keys = [s for s, dims in zip(first.srcs, spec.ins, strict=True) if ("k",) in dims]
        size = sum(bytes_of(k, self.extent) for k in keys)
        backward = first.op == "attention_bwd"
        common: dict[str, Any] = {
            "phase": whole.phase,
            "part": whole.part,
            "dtype": keys[0].dtype,
            "axes": axes,
            "comm_bytes": size,
        }

        def pair(label: str, deps: list[Dependency]) -> list[Kernel]:
            send = Kernel(
                f"{whole.name}.{label}.send", "send", TaskKind.SEND, shift=1, deps=deps, **common
            )
            return [
                send,
                Kernel(
                    f"{whole.name}.{label}.recv",
                    "recv",
                    TaskKind.RECV,
                    shift=-1,
                    twin=send,
                    **common,
                ),
            ]

        tasks: list[Kernel] = []
        keys_here = self.deps(keys)
        others = [d for d in whole.deps if d not in keys_here]
        sums: list[
            Kernel
        ] = []  # the sum of key gradients that came with the block, sent on with ours
        for step in range(ranks):
            here = [*keys_here]
            if step < ranks - 1:
                sent = pair(f"keys{step + 1}", here)
                tasks += sent
                keys_here = [sent[1]]
            compute = Kernel(
                f"{whole.name}.step{step}", whole.op, TaskKind.COMPUTE, whole.phase, whole.part,
                flops=whole.flops * (step + 1) // ranks - whole.flops * step // ranks,
                traffic=whole.traffic * (step + 1) // ranks - whole.traffic * step // ranks,
                dtype=whole.dtype, shape=whole.shape, deps=[*others, *here],
            )  # fmt: skip
            tasks.append(compute)
            if backward:
                sent = pair(f"d_keys{step + 1}", [compute, *sums])
                for t in sent if self.rules.key_grads == "ring" else ():
                    t.dtype, t.comm_bytes = "fp32", t.comm_bytes * 4 // int(BYTES[t.dtype])
                tasks += sent
                sums = [sent[1]]
        last = next(t for t in reversed(tasks) if t.kind == TaskKind.COMPUTE)
        last.made, last.reads = whole.made, whole.reads
        for m in cluster:
            self.at[m] = tasks[-1] if m.get("wrt") in ("k", "v") else last
        return tasks


TIED = "tied"  # not an axis: the pipeline ranks that hold a table, whose name follows
OUTPUTS = {
    "y": LiveValue(STREAM),
    CHOSEN: LiveValue(CHOSEN),
    MEMORY: LiveValue(MEMORY),  # what an encoder has made, which a decoder's layers look at
    "dx": LiveValue(STREAM, gradient=True),
    "tied_grad": LiveValue(TABLE, gradient=True),
}


def interface(n: Node) -> LiveValue | None:
    """The live value that an input stands for; None for what comes from outside the model."""
    name = n.binding.live_in
    return LiveValue(name, n.phase == "backward") if n.op == "input" and name else None


def carried(graph: Graph) -> dict[str, Node]:
    """The inputs that a block gets from earlier blocks, other than the stream: leaves by name."""
    found = ((c, n) for n in graph if (c := interface(n)) and not c.gradient)
    return {c.name: n for c, n in found if c.name not in (STREAM, CLIP)}


def handed_on(graph: Graph) -> dict[LiveValue, Node]:
    """The outputs of a block that other blocks read, by name.

    A value other than the stream has the name of its leaf; its gradient has `d_` and that name.
    """
    names = {c.name for n in graph if (c := interface(n))}
    names |= {n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
    gathered = {f"{GATHERED}.{x}": LiveValue(x) for x in names}
    names -= {STREAM, TABLE, CLIP}
    keys = OUTPUTS | gathered | {x: LiveValue(x) for x in names}
    keys |= {f"d_{x}": LiveValue(x, gradient=True) for x in names}
    return {keys[key]: n for key, n in graph.outputs.items() if key in keys}


def is_part(n: Node) -> bool:
    """Whether a slice is of an activation, and not of a weight or a gradient of one."""
    return n.op == "slice" and n.role is None and n.binding.param is None


def _is_view(n: Node) -> bool:
    """Whether a value has no bytes of its own: no kernel makes it."""
    return n.op == "slice" or (n.op in OPS and OPS[n.op].view)


_BUCKETED = frozenset(
    {
        Role.SENT, Role.USED, Role.KEYS, Role.MICROBATCH_GRADIENT, Role.STEP_GRADIENT, Role.REDUCED,
        Role.TABLE_GRADIENT, Role.WHOLE_GRADIENT, Role.OWN_ROWS, Role.COUNTED, Role.UPDATED,
    }
)  # fmt: skip
"""Roles of values whose collectives are one message for all of a block."""


def _ring_axes(n: Node) -> tuple[str, ...]:
    ring = OPS[n.op].ring
    if ring is None:
        return ()
    _, split_by = indices(n)
    return tuple(a for a in split_by.get(ring[0], ()) if a in split_by.get(ring[1], ()))


def _weights_only(graph: Graph) -> set[Node]:
    """Moves of parameters that nothing was computed from but copies in the precision that is sent:
    they may run ahead of the block."""
    light: set[Node] = set()
    for n in graph:
        moves = n.op in COLLECTIVE_OPS or n.op == "slice" or n.role is Role.SENT
        if moves and n.phase != "optimizer" and (n.srcs[0].op == "param" or n.srcs[0] in light):
            light.add(n)
    return light


def _before_norm(graph: Graph) -> set[Node]:
    """What the norm of the gradients needs of the optimizer phase."""
    stack = [graph.outputs["norm2"]] if "norm2" in graph.outputs else []
    found: set[Node] = set()
    while stack:
        n = stack.pop()
        if n.phase == "optimizer" and n not in found:
            found.add(n)
            stack += n.srcs
    return found


def _in_order(clusters: list[Cluster]) -> list[Cluster]:
    home = {n: i for i, c in enumerate(clusters) for n in c}
    needs = [
        {home[s] for n in c for s in n.srcs if s in home and home[s] != i}
        for i, c in enumerate(clusters)
    ]
    return [clusters[i] for i in _stable(needs)]


def _sorted(tasks: list[Kernel]) -> list[Kernel]:
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
