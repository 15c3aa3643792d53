"""Blocks as tasks, placed in the pipeline, and the values that stages exchange."""

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
    """Value with the bytes of a node."""

    node: Node
    permanent: bool
    """True if the bytes are allocated all the time."""


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBlock:
    """A block as tasks, with the graph they came from."""

    graph: Graph
    tasks: Sequence[Kernel]
    makers: Mapping[LiveValue, Dependency | None]
    """Task that makes each output."""
    outputs: Mapping[LiveValue, Node]
    """Node of the graph of each output."""
    inputs: Mapping[str, tuple[int, str]]
    """Bytes on one rank and dtype of each value from earlier blocks."""
    weight_half: frozenset[Kernel]
    """Second half of a backward that is split."""
    size: Mapping[Node, int]
    """Bytes of each value on one rank."""
    uses: Mapping[Kernel, Use]
    permanent: Mapping[str, int]
    """Permanent bytes, by category."""
    offloaded: frozenset[Node] = frozenset()
    """Values in host memory between forward and backward."""
    allocation: Allocation = PERMANENT_BUFFERS
    root: bool = False
    """Weights are gathered and reduced with those of other root blocks of the stage."""
    by_part: Mapping[TaskPart, Sequence[Kernel]] = field(init=False)
    norms: int = field(init=False)
    """Number of gradients with a norm."""
    tied: frozenset[str] = field(init=False)
    """Tables of which other blocks have a copy."""
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
        """Value with the bytes of a node; cached, since all layers share the block."""
        owner = self._owners.get(n)
        if owner is None:
            node = self.allocation.owner(n)
            owner = self._owners[n] = ValueOwner(node, self.allocation.permanent(node))
        return owner


def weight_half(
    tasks: Sequence[Kernel], input_gradients: Sequence[Dependency | None]
) -> frozenset[Kernel]:
    """Tasks of a block's backward that only gradients of weights depend on.

    `input_gradients`: tasks that make the gradients of the block's inputs. Unread recomputation
    runs in the input half. So do gathers of weights, until a stage moves them.
    """
    read = {d for t in tasks for d in t.deps}
    stack = [t for t in tasks if t.phase == "recompute" and t not in read]
    stack += [t for t in tasks if t.part in (TaskPart.GATHER_AGAIN, TaskPart.RELOAD)]
    stack += [t for t in input_gradients if isinstance(t, Kernel)]
    input_half: set[Kernel] = set()
    while stack:
        t = stack.pop()
        if t not in input_half:
            input_half.add(t)
            stack += (d for d in t.deps if isinstance(d, Kernel))
            stack += [t.twin] if t.twin else []  # another rank waits for it in this half
    return frozenset(t for t in tasks if t.part in BACKWARD_PARTS and t not in input_half)


class Placed(NamedTuple):
    """Block of a stage; `layer` is -1 outside the layers."""

    block: LoweredBlock
    layer: int
    label: str

    def name(self, value: str) -> str:
        """Name of a value of the block; the column `layer` distinguishes values of layers."""
        return value if self.layer >= 0 else f"{self.label}.{value}"


def nearest_maker(blocks: Sequence[Placed], i: int, c: LiveValue) -> int | None:
    """Nearest block of a stage that makes an input of block `i`."""
    candidates = range(i + 1, len(blocks)) if c.gradient else range(i - 1, -1, -1)
    return next((j for j in candidates if c in blocks[j].block.makers), None)


class Crossing(NamedTuple):
    """Value that one stage passes to the next, with bytes and dtype on one rank."""

    name: str
    size: int
    dtype: str
    gradient: bool
    """True if a later block makes a gradient of the value."""


def with_gradient(values: Sequence[Crossing]) -> Sequence[Crossing]:
    """Values whose gradients backward passes to the previous stage."""
    return [value for value in values if value.gradient]


def crossings(stages: Sequence[Sequence[Placed]]) -> list[tuple[Crossing, ...]]:
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
        made |= {name for block in {block for block, _, _ in stage} for name in _made(block)}
        names = sorted(made & later.keys(), key=lambda n: (n != STREAM, n))
        result.append(tuple(later[n] for n in names))
    return result


def _made(block: LoweredBlock) -> set[str]:
    """Names of the outputs of a block in forward."""
    return {c.name for c in block.makers if not c.gradient}


def _live_before(block: LoweredBlock, live: Mapping[str, Crossing]) -> dict[str, Crossing]:
    """Values live before a block, from those live after it."""
    made = _made(block)
    passed = {n: x for n, x in live.items() if n not in made}
    before = {n: Crossing(n, *x, False) for n, x in block.inputs.items()} | passed
    return {
        n: x._replace(gradient=x.gradient or LiveValue(n, True) in block.makers)
        for n, x in before.items()
    }
