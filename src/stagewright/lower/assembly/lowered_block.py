"""Blocks as tasks, the values that they allocate, and what stages exchange.

First values and their bytes, then `LoweredBlock`, which has the tasks.

A value is allocated from the first row that touches it to the last: allocation is ideal. The
results of a collective of many weights are allocated and freed as one. Views, gradients reduced in
their buffer and parameters written by the optimizer share the bytes of another value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import STREAM, Role
from stagewright.graph.table import COLLECTIVE_OPS, OPS, is_view
from stagewright.lower.kernels.extent import Split
from stagewright.lower.kernels.kernel import BlockSection, Dependency, LoweredTask
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.lower.kernels.lowering import is_activation_slice
from stagewright.program.columns import TaskKind

# ---- values of blocks ----------------------------------------------------------------------------

RowRef = tuple[int, int, int]
"""Row of a rank: copy of an action (`segments.CopyRelation`), stage, segment row."""

_MOVES_GRADIENT = frozenset(
    {Role.SUM_OVER_MODEL, Role.MICROBATCH_GRADIENT, Role.STEP_GRADIENT, Role.REDUCED}
)
"""Roles of collectives that move gradients of weights."""


@dataclass(slots=True, eq=False)
class Value:
    """Bytes of a stage, live from the first to the last row that touches them."""

    name: str
    layer: int
    phase: str
    category: str
    size: int
    per_step: bool = False
    """Shared by all microbatches."""
    until_step_end: bool = False
    """Live until the end of the step."""
    until_step_end_if_split: bool = False
    """Live until the end of the step if its backward is split into halves."""
    permanent: bool = False
    """Allocated all the time; touches are not recorded."""
    touches: list[RowRef] = field(default_factory=list[RowRef])
    requires: RowRef | None = None
    """Row that must exist for the value to exist."""

    def touch(self, touch: RowRef, phase: str) -> None:
        """Record an access by a row of a phase: values that backward reads are activations."""
        if self.permanent:
            return
        self.touches.append(touch)
        if self.category in ("communication", "workspace"):
            later = phase == "backward" or (phase == "recompute" and self.phase == "forward")
            if later and self.phase in ("forward", "recompute"):
                self.category = "activations"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Rules for values that share bytes; by default, gradients have permanent buffers."""

    gradient_buffers: bool = True
    """Gradients of weights are summed in permanent buffers; else each is live until the step
    ends."""
    one_microbatch: bool = False
    """A gradient is not added to others."""
    copies_slices: bool = False
    """A rank's slice of an activation is copied."""
    update_temporaries: int = 0
    """Number of temporary tensors of the size of a parameter while it is updated."""

    def owner(self, n: Node) -> Node:
        """Value whose bytes these are: a view has those of its source."""
        while self._shares_bytes(n):
            n = n.srcs[0]
        return n

    def _shares_bytes(self, n: Node) -> bool:
        if is_view(n):
            return True
        if n.op == "slice" and n.role is not Role.OWN_ROWS:
            return not (self.copies_slices and is_activation_slice(n))
        if n.op == "accumulate":
            return not self.gradient_buffers and self.one_microbatch
        # Gradients are reduced in the buffer they are summed in, parameters gathered in place.
        if n.op == "reduce_scatter" and not self.gradient_buffers:
            return False
        return n.op in COLLECTIVE_OPS and n.once and n.phase in ("backward", "optimizer")

    def permanent(self, n: Node) -> bool:
        """True if a value is allocated all the time."""
        buffers = ("accumulate",) if self.gradient_buffers else ()
        return n.op in ("param", "state", *buffers) or updates(n)


PERMANENT_BUFFERS = Allocation()


def updates(n: Node) -> bool:
    """True if a value is a parameter that an optimizer writes."""
    return n.op in OPS and bool(OPS[n.op].moments)


class NewValue(NamedTuple):
    """Bytes that a task allocates: for one node, or for several as one."""

    nodes: tuple[Node, ...]
    name: str
    category: str
    size: int
    per_step: bool = False  # shared by all microbatches
    until_step_end: bool = False


class Use(NamedTuple):
    """Values that a task allocates and touches."""

    new: tuple[NewValue, ...]
    touched: tuple[Node, ...]  # owners of the bytes that it makes or reads
    scratch: int | None = None  # bytes needed while it runs, which may be 0; None: no value
    moves_gradients: bool = False  # the task is a collective of gradients of weights


def uses(
    tasks: Sequence[LoweredTask],
    size: Mapping[Node, int],
    graph: Graph,
    allocation: Allocation = PERMANENT_BUFFERS,
) -> dict[LoweredTask, Use]:
    """Values that each task of a block allocates and touches; `size` in bytes of one rank."""
    result: dict[LoweredTask, Use] = {}
    gradients = set[Node]()  # without buffers: the first operand of each update
    if not allocation.gradient_buffers:
        gradients = {allocation.owner(n.srcs[0]) for n in graph if updates(n)}
    for t in tasks:
        made = tuple(n for n in t.made if allocation.owner(n) is n and not allocation.permanent(n))
        separate = t.kind != TaskKind.COLLECTIVE or len(made) < 2
        allocated: list[tuple[Node, ...]] = [(n,) for n in made] if separate else [made]
        new: list[NewValue] = []
        for nodes in allocated:
            name = (nodes[0].name or nodes[0].op) if separate else t.name
            until_step_end = not gradients.isdisjoint(nodes)
            per_step = until_step_end or any(n.op == "accumulate" for n in nodes)
            category, total = "gradients" if per_step else _category(t), sum(size[n] for n in nodes)
            new.append(NewValue(nodes, name, category, total, per_step, until_step_end))
        temporaries: dict[Node, Any] = {
            n: allocation.update_temporaries if updates(n) else n.get("temporaries", 0)
            for n in t.made
        }
        scratch = (
            sum(size[n] * k for n, k in temporaries.items()) if any(temporaries.values()) else None
        )
        owners = dict.fromkeys(allocation.owner(n) for n in (*t.made, *t.reads))
        touched = tuple(n for n in owners if not allocation.permanent(n))
        result[t] = Use(tuple(new), touched, scratch, moves_gradients(t))
    return result


def permanent_bytes(
    graph: Graph,
    size: Mapping[Node, int],
    *,
    elsewhere: Collection[str] = (),
    states_on_host: bool = False,
    allocation: Allocation = PERMANENT_BUFFERS,
) -> dict[str, int]:
    """Permanent bytes of a block, by category.

    `elsewhere`: tables of which another block of the rank owns the tensor.
    """
    params = [n for n in graph if n.op == "param"]
    shared = {n.binding.param for n in params if n.binding.tied in elsewhere}
    by_category = {
        "parameters": [n for n in params if n.binding.param not in shared],
        "gradients": [n for n in graph if n.op == "accumulate" and n.binding.param not in shared],
        "optimizer": [n for n in graph if n.op == "state" and n.role is Role.STATE],
    }
    if states_on_host:
        del by_category["optimizer"]
    if not allocation.gradient_buffers:
        del by_category["gradients"]
    return {name: sum(size[n] for n in nodes) for name, nodes in by_category.items() if nodes}


def _category(t: LoweredTask) -> str:
    if t.section.gathers:
        return "gathered_parameters"
    return "workspace" if t.kind == TaskKind.COMPUTE else "communication"


def moves_gradients(t: LoweredTask) -> bool:
    """True if a task is a collective of gradients of weights."""
    return t.kind == TaskKind.COLLECTIVE and any(n.role in _MOVES_GRADIENT for n in t.made)


# ---- blocks --------------------------------------------------------------------------------------

FORWARD_SECTIONS = (BlockSection.GATHER_ONCE, BlockSection.GATHER, BlockSection.FORWARD)
BACKWARD_SECTIONS = (
    BlockSection.GATHER_AGAIN,
    BlockSection.RELOAD,
    BlockSection.BACKWARD,
    BlockSection.REDUCE_ONCE,
)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[LoweredTask]
    makers: Mapping[LiveValue, Dependency | None]
    """Task that makes each output."""
    outputs: Mapping[LiveValue, Node]
    """Node of the graph of each output."""
    inputs: Mapping[str, tuple[int, str]]
    """Bytes on one rank and dtype of each value from earlier blocks."""
    weight_half: frozenset[LoweredTask]
    """Second half of a backward that is split."""
    size: Mapping[Node, int]
    """Bytes of each value on one rank."""
    uses: Mapping[LoweredTask, Use]
    permanent: Mapping[str, int]
    """Permanent bytes, by category."""
    uneven: Sequence[Split] = ()
    """Splits by FSDP of the rows of parameters that do not divide: some ranks have fewer rows."""
    offloaded: frozenset[Node] = frozenset()
    """Values in host memory between forward and backward."""
    allocation: Allocation = PERMANENT_BUFFERS
    root: bool = False
    """Weights are gathered and reduced with those of other root blocks of the stage."""
    by_section: Mapping[BlockSection, Sequence[LoweredTask]] = field(init=False)
    norms: int = field(init=False)
    """Number of gradients with a norm."""
    tied: frozenset[str] = field(init=False)
    """Tables of which other blocks have a copy."""
    _owners: dict[Node, Node] = field(init=False, default_factory=dict[Node, Node])

    def __post_init__(self) -> None:
        by_section: dict[BlockSection, list[LoweredTask]] = {}
        for t in self.tasks:
            by_section.setdefault(t.section, []).append(t)
        object.__setattr__(self, "by_section", by_section)
        object.__setattr__(self, "norms", sum(n.op == "norm2" for n in self.graph))
        copies = (n.binding.tied for n in self.graph if n.op == "param")
        object.__setattr__(self, "tied", frozenset(name for name in copies if name))

    def owner(self, n: Node) -> Node:
        """Value with the bytes of a node; cached, since all layers share the block."""
        owner = self._owners.get(n)
        if owner is None:
            owner = self._owners[n] = self.allocation.owner(n)
        return owner


def weight_half(
    tasks: Sequence[LoweredTask], input_gradients: Sequence[Dependency | None]
) -> frozenset[LoweredTask]:
    """Tasks of a block's backward that only gradients of weights depend on.

    `input_gradients`: tasks that make the gradients of the block's inputs. Unread recomputation
    runs in the input half. So do gathers of weights, until a stage moves them.
    """
    read = {d for t in tasks for d in t.deps}
    stack = [t for t in tasks if t.phase == "recompute" and t not in read]
    stack += [t for t in tasks if t.section in (BlockSection.GATHER_AGAIN, BlockSection.RELOAD)]
    stack += [t for t in input_gradients if isinstance(t, LoweredTask)]
    input_half: set[LoweredTask] = set()
    while stack:
        t = stack.pop()
        if t not in input_half:
            input_half.add(t)
            stack += (d for d in t.deps if isinstance(d, LoweredTask))
            stack += [t.twin] if t.twin else []  # another rank waits for it in this half
    return frozenset(t for t in tasks if t.section in BACKWARD_SECTIONS and t not in input_half)


class StageBlock(NamedTuple):
    """Block of a stage; `layer` is -1 outside the layers."""

    block: LoweredBlock
    layer: int
    label: str

    def name(self, value: str) -> str:
        """Name of a value of the block; the column `layer` distinguishes values of layers."""
        return value if self.layer >= 0 else f"{self.label}.{value}"


def nearest_maker(blocks: Sequence[StageBlock], i: int, c: LiveValue) -> int | None:
    """Nearest block of a stage that makes an input of block `i`."""
    candidates = range(i + 1, len(blocks)) if c.gradient else range(i - 1, -1, -1)
    return next((j for j in candidates if c in blocks[j].block.makers), None)


class MessageParts(NamedTuple):
    """Ranks that each send a part of an equal value, which the receiving ones gather."""

    axes: tuple[str, ...] = ()
    ranks: int = 1


WHOLE = MessageParts()
"""Every rank sends the whole value."""


class Crossing(NamedTuple):
    """Value that one stage passes to the next, with bytes and dtype on one rank."""

    name: str
    size: int
    dtype: str
    gradient: bool
    """True if a later block makes a gradient of the value."""
    parts: MessageParts = WHOLE


def with_gradient(values: Sequence[Crossing]) -> Sequence[Crossing]:
    """Values whose gradients backward passes to the previous stage."""
    return [value for value in values if value.gradient]


def crossings(
    stages: Sequence[Sequence[StageBlock]], parts: MessageParts
) -> list[tuple[Crossing, ...]]:
    """Values live between each stage and the next: made before, read after.

    Each is a message, as Megatron-LM sends the decoder's and the encoder's hidden states
    (`get_tensor_shapes` of its pipeline schedules).
    """
    live: dict[str, Crossing] = {}
    live_before: list[dict[str, Crossing]] = []  # by stage, from the last on
    memo: dict[tuple[LoweredBlock, tuple[Crossing, ...]], dict[str, Crossing]] = {}
    for stage in reversed(stages):
        for block, _, _ in reversed(stage):
            key = block, tuple(live.values())
            if key not in memo:
                memo[key] = _live_before(block, live)
            live = memo[key]
        live_before.append(live)
    result: list[tuple[Crossing, ...]] = []
    made: set[str] = set()
    for stage, later in zip(stages, live_before[-2::-1], strict=False):
        made |= {
            name for block in {block for block, _, _ in stage} for name in _forward_outputs(block)
        }
        names = sorted(made & later.keys(), key=lambda n: (n != STREAM, n))
        # A value that the ranks do not divide is sent whole (`_communicate` of Megatron-LM).
        cut = {n for n in names if later[n].size % parts.ranks == 0}
        result.append(
            tuple(later[n]._replace(parts=parts) if n in cut else later[n] for n in names)
        )
    return result


def _forward_outputs(block: LoweredBlock) -> set[str]:
    """Names of the outputs of a block in forward."""
    return {c.name for c in block.makers if not c.gradient}


def _live_before(block: LoweredBlock, live: Mapping[str, Crossing]) -> dict[str, Crossing]:
    """Values live before a block, from those live after it."""
    made = _forward_outputs(block)
    passed = {n: x for n, x in live.items() if n not in made}
    before = {n: Crossing(n, *x, False) for n, x in block.inputs.items()} | passed
    return {
        n: x._replace(gradient=x.gradient or LiveValue(n, True) in block.makers)
        for n, x in before.items()
    }
