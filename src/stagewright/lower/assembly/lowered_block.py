"""Blocks as tasks, in their places in the pipeline; what stages hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import STREAM
from stagewright.lower.assembly.lifetimes import PERMANENT_BUFFERS, Allocation, Use
from stagewright.lower.kernels.kernel import Dependency, Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue

FORWARD_PARTS = (TaskPart.GATHER_ONCE, TaskPart.GATHER, TaskPart.FORWARD)
BACKWARD_PARTS = (
    TaskPart.GATHER_AGAIN,
    TaskPart.RELOAD,
    TaskPart.BACKWARD,
    TaskPart.REDUCE_ONCE,
)


class ValueOwner(NamedTuple):
    """The value whose bytes a node's are."""

    node: Node
    permanent: bool
    """Whether the bytes are allocated all the time."""


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[Kernel]
    makers: Mapping[LiveValue, Dependency | None]
    """Which task makes each value that the block hands on."""
    handed_on: Mapping[LiveValue, Node]
    """Which node of the graph each of these values is."""
    handed_in: Mapping[str, tuple[int, str]]
    """Bytes on one rank and dtype of each value that blocks before hand to this one."""
    weight_half: frozenset[Kernel]
    """The second half of a backward that is split."""
    size: Mapping[Node, int]
    """Bytes of each value on one rank."""
    uses: Mapping[Kernel, Use]
    permanent: Mapping[str, int]
    """Bytes that are allocated all the time, by category."""
    offloaded: frozenset[Node] = frozenset()
    """Values that are in the host's memory between forward and backward."""
    allocation: Allocation = PERMANENT_BUFFERS
    root: bool = False
    """Weights are gathered and reduced together with those of other such blocks of the stage."""
    by_part: Mapping[TaskPart, Sequence[Kernel]] = field(init=False)
    norms: int = field(init=False)
    """Gradients of which there is a norm."""
    tied: frozenset[str] = field(init=False)
    """The tables that other blocks have a copy of, too."""
    _owners: dict[Node, ValueOwner] = field(init=False, default_factory=dict[Node, ValueOwner])

    def __post_init__(self) -> None:
        by_part: dict[TaskPart, list[Kernel]] = {}
        for t in self.tasks:
            by_part.setdefault(t.part, []).append(t)
        object.__setattr__(self, "by_part", by_part)
        object.__setattr__(self, "norms", sum(n.op == "norm2" for n in self.graph))
        copies = (n.binding.tied for n in self.graph if n.op == "param")
        object.__setattr__(self, "tied", frozenset(name for name in copies if name))

    def owner(self, n: Node) -> ValueOwner:
        """Whose bytes a node of the graph has; every layer of a model asks for the same."""
        found = self._owners.get(n)
        if found is None:
            node = self.allocation.owner(n)
            found = self._owners[n] = ValueOwner(node, self.allocation.permanent(node))
        return found


def weight_half(
    tasks: Sequence[Kernel], handed_on: Sequence[Dependency | None]
) -> frozenset[Kernel]:
    """The tasks of a block's backward that only gradients of weights need.

    `handed_on` are the tasks that make the gradients which the block hands on. What is computed
    again though nothing reads it (a module's forward that is called once more) runs when backward
    first comes by, and so do gathers of weights: a stage says which of them the second half has.
    """
    read = {d for t in tasks for d in t.deps}
    stack = [t for t in tasks if t.phase == "recompute" and t not in read]
    stack += [t for t in tasks if t.part in (TaskPart.GATHER_AGAIN, TaskPart.RELOAD)]
    stack += [t for t in handed_on if isinstance(t, Kernel)]
    first: set[Kernel] = set()
    while stack:
        t = stack.pop()
        if t not in first:
            first.add(t)
            stack += (d for d in t.deps if isinstance(d, Kernel))
            stack += [t.twin] if t.twin else []  # another rank waits for it in this half
    return frozenset(t for t in tasks if t.part in BACKWARD_PARTS and t not in first)


class Placed(NamedTuple):
    """A block in its place in the model: `layer` is -1 for what is not a layer."""

    block: LoweredBlock
    layer: int
    label: str

    def name(self, what: str) -> str:
        """The name of a value of the block; values of layers are told apart by their layer."""
        return what if self.layer >= 0 else f"{self.label}.{what}"


def nearest_maker(blocks: Sequence[Placed], i: int, c: LiveValue) -> int | None:
    """The block of a stage that makes what block `i` is handed: the nearest one that does."""
    candidates = range(i + 1, len(blocks)) if c.gradient else range(i - 1, -1, -1)
    return next((j for j in candidates if c in blocks[j].block.makers), None)


class Crossing(NamedTuple):
    """A value that one stage hands to the next, and its bytes and dtype on one rank."""

    name: str
    size: int
    dtype: str
    gradient: bool
    """Whether a block behind makes a gradient of the value, for the stage before."""


def with_gradient(values: Sequence[Crossing]) -> Sequence[Crossing]:
    """The values whose gradients backward hands to the stage before."""
    return [value for value in values if value.gradient]


def crossings(stages: Sequence[Sequence[Placed]]) -> list[tuple[Crossing, ...]]:
    """The values live between each stage and the one after: made before, read behind.

    Each is a message, as Megatron-LM sends the decoder's and the encoder's hidden states
    (`get_tensor_shapes` of its pipeline schedules).
    """
    live: dict[str, Crossing] = {}
    live_before: list[dict[str, Crossing]] = []  # each stage, from the last on
    known: dict[tuple[LoweredBlock, tuple[Crossing, ...]], dict[str, Crossing]] = {}
    for stage in reversed(stages):
        for block, _, _ in reversed(stage):
            key = block, tuple(live.values())
            if key not in known:
                known[key] = _live_before(block, live)
            live = known[key]
        live_before.append(live)
    result: list[tuple[Crossing, ...]] = []
    made: set[str] = set()
    for stage, later in zip(stages, live_before[-2::-1], strict=False):
        made |= {name for block in {block for block, _, _ in stage} for name in _made(block)}
        names = sorted(made & later.keys(), key=lambda n: (n != STREAM, n))
        result.append(tuple(later[n] for n in names))
    return result


def _made(block: LoweredBlock) -> set[str]:
    """The names of values that a block makes or passes on in forward."""
    return {c.name for c in block.makers if not c.gradient}


def _live_before(block: LoweredBlock, live: Mapping[str, Crossing]) -> dict[str, Crossing]:
    """The values live before a block, given those live behind it."""
    made = _made(block)
    behind = {n: x for n, x in live.items() if n not in made}
    handed = {n: Crossing(n, *x, False) for n, x in block.handed_in.items()} | behind
    return {
        n: x._replace(gradient=x.gradient or LiveValue(n, True) in block.makers)
        for n, x in handed.items()
    }
