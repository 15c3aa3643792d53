"""Habits of training frameworks, as far as lowering knows them: a class each, built from settings.

`Habit` has a method for every place in lowering where frameworks differ, and does there what
Megatron-LM does; a subclass overrides the places where its framework does something else. A run has
the habits that its settings name, whatever its `framework`, which only chooses their defaults. To
add a habit: a setting in `run.sections.habits`, and a class here, in `HABITS`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Self

from stagewright.graph.node import BYTES, Graph, Node
from stagewright.graph.roles import STREAM
from stagewright.lower.assembly.buckets import Item, Row, gathered_last, in_buckets
from stagewright.lower.assembly.habit import Habit, UnitWeights
from stagewright.lower.assembly.lifetimes import Allocation, Value
from stagewright.lower.assembly.segments import ActionRows, Owner
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.kernels.extent import Extent
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.lower.pytorch.ring import RingAttention
from stagewright.lower.pytorch.root_unit import RootUnit, module_logits
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat
from stagewright.schedule.schedules import SCHEDULES

_COMPUTED = (TaskPart.FORWARD, TaskPart.BACKWARD)


# ---- PyTorch: memory of operators and gradients --------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientsSetToNone(Habit):
    """`zero_grad(set_to_none=True)`: gradients are live from when they are made."""

    one_microbatch: bool

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `set_grads_to_none`."""
        return cls(run.microbatches == 1) if run.set_grads_to_none else None

    def allocation(self, allocation: Allocation) -> Allocation:
        """No buffers: of one microbatch, the gradient itself is what the optimizer reads."""
        return replace(allocation, gradient_buffers=False, one_microbatch=self.one_microbatch)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Autograd takes the first gradient of a parameter as its sum."""
        if action.forward or self.one_microbatch:
            return
        for i, t in action.order:
            if t.part is TaskPart.BACKWARD and t.op == "accumulate":
                gradient, total = values.value(i, t.reads[0]), values.value(i, t.made[0])
                if gradient is not None and total is not None and gradient is not total:
                    values.first_gradients.append((gradient, total))


@dataclass(frozen=True, slots=True)
class EagerOperators(Habit):
    """What PyTorch's operators and optimizers allocate while they run."""

    update_temporaries: int
    checkpoints: bool
    """Blocks are computed again by `torch.utils.checkpoint`."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `operators`; `denom` of torch.optim.AdamW is a square root, and what divides by it."""
        if run.operators != "eager":
            return None
        return cls(2 if run.optimizer == "adamw" else 0, run.recompute == "full")

    def allocation(self, allocation: Allocation) -> Allocation:
        """Updates have temporaries, and DTensor clones the part of a tensor that is a rank's."""
        more = {"update_temporaries": self.update_temporaries, "copies_slices": True}
        return replace(allocation, **more)

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Numbers that operators keep besides: attention one in fp32 for every row of scores,
        LayerNorm a row's mean and the inverse of its deviation, an opaque op what it says."""
        each = {"attention": 1, "norm": 2 * (n.get("fn") == "layernorm")}.get(n.op, 0)
        if each and n.phase != "backward":
            rows = extent.elements(n) // math.ceil(extent(n.shape[-1], n.layout.dims[-1]))
            return rows * each * int(BYTES["fp32"])
        if n.op == "topk" and n.get("kept") is not None:
            return _of_routing(n, extent)
        if n.op != "opaque":
            return 0
        indices = extent.elements(n) * int(BYTES["int64"]) if n.get("indices") else 0
        beside: Any = n.get("beside") or 0
        rows = math.ceil(extent(n.shape[0], n.layout.dims[0])) if beside else 0
        return indices + rows * beside

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Parts of a fused product live as long as the last of them, in the memory of all.

        A checkpoint holds its input until backward has read all that it has computed again.
        """
        for i, placed in enumerate(values.blocks):
            _hold_together(values, i, placed.block.graph)
        if action.forward or not self.checkpoints:
            return
        for i, placed in enumerate(values.blocks):
            reads = [
                row
                for t, row in action.row_of[i].items()
                if any(n.phase == "recompute" for n in t.reads) and t.phase == "backward"
            ]
            inputs = (n for n in placed.block.graph if interface(n) == LiveValue(STREAM))
            given = next((v for n in inputs if (v := values.value(i, n)) is not None), None)
            if reads and given is not None:
                given.touch(action.touch_by(max(reads)), "backward")


def _of_routing(n: Node, extent: Extent) -> int:
    """What routing keeps in all, less the scores and gates that stand for that here."""
    each, once = int(str(n["kept"])), int(str(n.get("kept_once") or 0))
    scores = n.srcs[0]
    tokens = extent.elements(scores) // math.ceil(extent(scores.shape[-1], scores.layout.dims[-1]))
    here = sum(extent.elements(x) * int(BYTES[x.dtype]) for x in (scores, n))
    return tokens * each + once - here


def _hold_together(values: StageValues, i: int, graph: Graph) -> None:
    """Give parts of one product's result in block `i` the same live range."""
    together: dict[object, list[Value]] = {}
    for n in graph:
        if n.op == "einsum" and n.phase != "backward" and n.get("fused"):
            value = values.value(i, n)
            if value is not None:
                together.setdefault((n["fused"], n.phase), []).append(value)
    for parts in together.values():
        touches = list(dict.fromkeys(at for value in parts for at in value.touches))
        kept = next((v.category for v in parts if v.category == "activations"), "")
        for value in parts:
            value.touches, value.category = [*touches], kept or value.category


# ---- PyTorch: DistributedDataParallel ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientBuckets(Habit):
    """DDP reduces whole gradients once per step, in buckets across layers."""

    FIRST = 2**20
    """Bytes at which DDP closes its first bucket (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""

    cap: int
    """Bytes at which a bucket is closed (`compute_bucket_assignment_by_size`)."""
    replicas: int

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `ddp_bucket_cap_mb`, where gradients are whole and reduced once per step."""
        if run.zero or reduces_each_microbatch(run) or not run.ddp_bucket_cap_mb:
            return None
        return cls(run.ddp_bucket_cap_mb * 2**20, run.dp * run.cp)

    def bucket(self, bucket: str) -> str:
        """Of one block, reductions of the step are not merged."""
        return "step"

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Buckets hold the gradients once more."""
        if self.replicas < 2:
            return {}
        return {"communication": sum(size[n] for n in graph if n.op == "accumulate")}

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """In backward, gradients fill buckets in the order in which they are made."""
        return None if forward else in_buckets(items, self.cap, self.FIRST)


# ---- nanotron: FP32GradientAccumulator, ZeroDistributedOptimizer ---------------------------------


@dataclass(frozen=True, slots=True)
class OneBucket(Habit):
    """A rank's gradients are reduced at once, and its updated parameters gathered at once."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `bucket`."""
        return cls() if run.bucket == "rank" else None

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Gradients are reduced behind backward, when all are made."""
        return None if forward else in_buckets(items, sys.maxsize, sys.maxsize)

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """Gathers are last, one for all parameters of a data type."""
        return gathered_last(items)


# ---- PyTorch: torch.distributed.pipelining -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineCaches(Habit):
    """PyTorch's pipeline stages keep buffers of messages, and what they have sent."""

    microbatches: int
    split_backward: bool
    holds_sent_gradients: bool
    ranks: int

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `pipeline_caches`, for the run's schedule."""
        if not run.pipeline_caches:
            return None
        actions = [a for steps in order for a in flat(steps)]
        schedule = SCHEDULES.get(run.schedule or "")
        return cls(
            microbatches=1 + max(a.microbatch for a in actions),
            split_backward=any(a.kind == "I" for a in actions),
            holds_sent_gradients=schedule is not None and schedule.holds_sent_gradients,
            ranks=len(order),
        )

    def message_buffers(self) -> int:
        """A receive buffer for every microbatch."""
        return self.microbatches

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Outputs are kept for backward; sent gradients, and what split backward has read, too."""
        if action.forward:
            return
        if self.holds_sent_gradients:
            for value, row in action.sent:
                value.touches.append((Owner.NEXT_BACKWARD, action.stage, row))
        rows = action.every_microbatch
        if rows and self.ranks > 1:
            for output in _outputs(values):
                output.touch(action.touch_by(rows[-1]), "backward")
        if self.split_backward and values.arriving:  # the first stage has one half only
            _retain_graph(values, action)


def _outputs(values: StageValues) -> list[Value]:
    """What the stage's module returns: what it sends on, or on the last stage the logits."""
    if values.place.after is not None:
        found = [values.output(LiveValue(c.name)) for c in values.leaving]
    else:
        logits = module_logits(values)
        found = [values.value(len(values.blocks) - 1, logits)] if logits else []
    return [v for v in found if v is not None]


def _retain_graph(values: StageValues, action: ActionRows) -> None:
    """Autograd keeps what backward has read until its second half is done (`retain_graph`).

    The gradient of the stage's input stays with the input (`Tensor.grad`): a buffer, which a
    backward in one piece would clear, and which is cleared when the step is over.
    """
    last = max({*action.weight_half} - {*action.once_per_step}, default=-1)
    for v in values.values:
        if v.category == "activations" and last >= 0:
            v.touches.append(action.touch_by(last))
    for c in values.arriving:
        given = values.output(LiveValue(c.name, True))
        if given is not None:
            given.until_step_end_if_split = True


# ---- the habits of a run -------------------------------------------------------------------------

HABITS: tuple[type[Habit], ...] = (
    GradientsSetToNone,
    EagerOperators,
    GradientBuckets,
    OneBucket,
    PipelineCaches,
    RootUnit,
    RingAttention,
)


@dataclass(frozen=True, slots=True)
class Habits(Habit):
    """Several habits as one."""

    habits: tuple[Habit, ...] = ()

    @classmethod
    def of(cls, run: Run, order: Order) -> Self:
        """The habits that a resolved run has."""
        return cls(tuple(habit for kind in HABITS if (habit := kind.of(run, order)) is not None))

    def allocation(self, allocation: Allocation) -> Allocation:
        """As all habits together have it."""
        for habit in self.habits:
            allocation = habit.allocation(allocation)
        return allocation

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """The sum over the habits."""
        return sum(habit.workspace_bytes(n, extent) for habit in self.habits)

    def scratch(self, t: Kernel, size: Mapping[Node, int]) -> int:
        """The sum over the habits."""
        return sum(habit.scratch(t, size) for habit in self.habits)

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Those of all habits, each with categories of its own."""
        result: dict[str, int] = {}
        for habit in self.habits:
            result |= habit.permanent_bytes(graph, size)
        return result

    def bucket(self, bucket: str) -> str:
        """As all habits together have it."""
        for habit in self.habits:
            bucket = habit.bucket(bucket)
        return bucket

    def message_buffers(self) -> int:
        """The most that a habit asks for."""
        return max((habit.message_buffers() for habit in self.habits), default=0)

    def unit_weights(self) -> UnitWeights:
        """As the first habit has it that says more than the default."""
        said = (habit.unit_weights() for habit in self.habits)
        return next((weights for weights in said if any(weights)), UnitWeights())

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """As the first habit has it that changes the order."""
        arranged = (habit.arrange(items, root, forward=forward) for habit in self.habits)
        return next((rows for rows in arranged if rows is not None), None)

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """As the first habit has it that merges some."""
        arranged = (habit.arrange_updates(items) for habit in self.habits)
        return next((rows for rows in arranged if rows and len(rows) < len(items)), None)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """All habits prolong what they hold."""
        for habit in self.habits:
            habit.extend_live_ranges(values, action)
