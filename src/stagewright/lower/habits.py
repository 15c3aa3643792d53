"""Subclasses of `assembly.habit.Habit`: frameworks that differ from Megatron-LM in lowering.

`Habit` has a method for every point in lowering where frameworks differ, and does there what
Megatron-LM does; a class below overrides points. A run has the habits that its settings name; its
`framework` only chooses their defaults (`run.sections.habits`).

    setting            Megatron-LM          PyTorch (OneBucket: nanotron)       class
    set_grads_to_none  main_grad buffers    gradients live from backward on     GradientsSetToNone
    operators          fused kernels        temporaries, saved statistics       EagerOperators
    ddp_bucket_cap_mb  a layer's gradients  buckets of bytes across layers      GradientBuckets
    bucket             a layer's gradients  one reduction and gather of a rank  OneBucket
    pipeline_caches    freed after use      kept for all microbatches           PipelineCaches
    fsdp_root_unit     each block gathers   one unit outside the layers         fsdp.FsdpUnits
    cp_grad_comm_type  reduce-scatter       a ring of fp32 gradients            RingAttention

Options of Megatron-LM that hold more are habits, too: `compiled_loss`, `transposed_attention`,
`defer_embedding_wgrad_compute` (class `MoreMemory`).

Sources are in the classes; docs/internals/frameworks.md has all habits, also those of blocks and
layouts. To add a habit: a setting in `run.sections.habits`, a class here, its row in `HABITS`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Self

from stagewright.algebra.index import parse
from stagewright.graph.node import BYTES, Graph, Node
from stagewright.graph.roles import STREAM, Role
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.lower.assembly.habit import (
    Habit,
    Item,
    Row,
    gathered_last,
    in_buckets,
)
from stagewright.lower.assembly.lowered_block import Allocation, Value
from stagewright.lower.assembly.segments import ActionRows, CopyRelation
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.fsdp import FsdpUnits, module_logits
from stagewright.lower.kernels.extent import Extent, bytes_of
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.lower.kernels.live_values import LiveValue, interface
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat

# ---- PyTorch: memory of operators and gradients --------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientsSetToNone(Habit):
    """`Optimizer.zero_grad(set_to_none=True)`: gradients are allocated when they are made."""

    one_microbatch: bool

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with `set_grads_to_none`."""
        return cls(run.microbatches == 1) if run.set_grads_to_none else None

    def allocation(self, allocation: Allocation) -> Allocation:
        """Use no buffers; with one microbatch, the optimizer reads the gradient itself."""
        return replace(allocation, gradient_buffers=False, one_microbatch=self.one_microbatch)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Let the first gradient of a parameter become its sum, as autograd does."""
        if action.forward or self.one_microbatch:
            return
        for i, t in action.order:
            if t.section is BlockSection.BACKWARD and t.op == "accumulate":
                gradient, total = values.value(i, t.reads[0]), values.value(i, t.made[0])
                if gradient is not None and total is not None and gradient is not total:
                    values.first_gradients.append((gradient, total))


@dataclass(frozen=True, slots=True)
class EagerOperators(Habit):
    """Temporary and saved tensors of PyTorch's operators, checkpoints and optimizers."""

    update_temporaries: int
    checkpoints: bool
    """Blocks are recomputed by `torch.utils.checkpoint`."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with eager `operators`.

        torch.optim.AdamW has two temporaries: a square root and its quotient.
        """
        if run.operators != "eager":
            return None
        return cls(2 if run.optimizer == "adamw" else 0, run.recompute == "full")

    def allocation(self, allocation: Allocation) -> Allocation:
        """Add temporaries of updates; DTensor clones a rank's slice of a tensor."""
        temporaries = self.update_temporaries
        return replace(allocation, update_temporaries=temporaries, copies_slices=True)

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Bytes of statistics that operators save for backward.

        Attention has one fp32 number per row of scores, LayerNorm the mean and inverse deviation of
        each row, an opaque op what it declares.
        """
        per_row = {"attention": 1, "norm": 2 * (n.get("fn") == "layernorm")}.get(n.op, 0)
        if per_row and n.phase != "backward":
            rows = extent.elements(n) // math.ceil(extent(n.shape[-1], n.layout.dims[-1]))
            return rows * per_row * int(BYTES["fp32"])
        row_bytes: Any = n.get("beside") if n.op == "opaque" else 0
        return math.ceil(extent(n.shape[0], n.layout.dims[0])) * row_bytes if row_bytes else 0

    def scratch(self, t: LoweredTask, size: Mapping[Node, int]) -> int:
        """Bytes of a token's gradient for each of its copies, and of their products with these."""
        combined = [n for n in t.made if n.op == "combine_gates"]
        return sum(2 * max(size[s] for s in n.srcs) for n in combined)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Free the parts of a fused product as one.

        A checkpoint holds its input until backward has read all recomputed values.
        """
        for i, placed in enumerate(values.blocks):
            _join_fused(values, i, placed.block.graph)
        if action.forward or not self.checkpoints:
            return
        for i, placed in enumerate(values.blocks):
            reads = [
                row
                for t, row in action.row_of[i].items()
                if any(n.phase == "recompute" for n in t.reads) and t.phase == "backward"
            ]
            inputs = (n for n in placed.block.graph if interface(n) == LiveValue(STREAM))
            value = next((v for n in inputs if (v := values.value(i, n)) is not None), None)
            if reads and value is not None:
                value.touch(action.touch_by(max(reads)), "backward")


def _join_fused(values: StageValues, i: int, graph: Graph) -> None:
    """Give the parts of a fused product in block `i` the same live range."""
    products: dict[object, list[Value]] = {}
    for n in graph:
        if n.op == "einsum" and n.phase != "backward" and n.get("fused"):
            value = values.value(i, n)
            if value is not None:
                products.setdefault((n["fused"], n.phase), []).append(value)
    for parts in products.values():
        touches = list(dict.fromkeys(touch for value in parts for touch in value.touches))
        saved = any(v.category == "activations" for v in parts)
        for value in parts:
            value.touches = [*touches]
            value.category = "activations" if saved else value.category


# ---- buckets of gradients ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientBuckets(Habit):
    """`DistributedDataParallel` reduces unsharded gradients in buckets across layers."""

    FIRST = 2**20
    """Bytes at which DDP closes its first bucket (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""

    cap: int
    """Bytes at which a bucket is closed (`compute_bucket_assignment_by_size`)."""
    replicas: int

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with `ddp_bucket_cap_mb` that reduces whole gradients once per step."""
        whole = not run.zero and not reduces_each_microbatch(run) and run.bucket != "rank"
        if not whole or not run.ddp_bucket_cap_mb:
            return None
        return cls(run.ddp_bucket_cap_mb * 2**20, run.dp * run.cp)

    def bucket(self, bucket: str) -> str:
        """Leave each gradient's reduction by itself; `arrange` puts them into buckets."""
        return "step"

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Add the buckets, as large as the gradients."""
        if self.replicas < 2:
            return {}
        return {"communication": sum(size[n] for n in graph if n.op == "accumulate")}

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Fill buckets with gradients in the order of backward."""
        return None if forward else in_buckets(items, self.cap, self.FIRST)


@dataclass(frozen=True, slots=True)
class OneBucket(Habit):
    """One reduction of all gradients of a rank, and one gather of its updated parameters.

    As `FP32GradientAccumulator` and `ZeroDistributedOptimizer._all_gather_params` of nanotron.
    """

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with `bucket=rank`."""
        return cls() if run.bucket == "rank" else None

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Reduce all gradients after backward."""
        return None if forward else in_buckets(items, sys.maxsize, sys.maxsize)

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """Gather last, once per data type."""
        return gathered_last(items)


# ---- PyTorch: torch.distributed.pipelining -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineCaches(Habit):
    """Stages of `torch.distributed.pipelining` hold message buffers and sent values."""

    microbatches: int
    split_backward: bool
    holds_sent_gradients: bool
    """`Schedule1F1B` waits for the send of a gradient only at the next one, and so holds the
    gradient until then; its other loops do not."""
    ranks: int

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with `pipeline_caches`, for its schedule."""
        if not run.pipeline_caches:
            return None
        actions = [a for steps in order for a in flat(steps)]
        return cls(
            microbatches=1 + max(a.microbatch for a in actions),
            split_backward=any(a.kind == "I" for a in actions),
            holds_sent_gradients=run.schedule == "1f1b",
            ranks=len(order),
        )

    def message_buffers(self) -> int:
        """Use a receive buffer per microbatch."""
        return self.microbatches

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Hold outputs for backward, sent gradients, and what a split backward has read."""
        if action.forward:
            return
        if self.holds_sent_gradients:
            for value, row in action.sent:
                value.touches.append((CopyRelation.NEXT_BACKWARD, action.stage, row))
        rows = action.every_microbatch
        if rows and self.ranks > 1:
            for output in _outputs(values):
                output.touch(action.touch_by(rows[-1]), "backward")
        if self.split_backward and values.arriving:  # the first stage has no input half
            _retain_graph(values, action)


def _outputs(values: StageValues) -> list[Value]:
    """Outputs of the stage's module: what it sends, or on the last stage the logits."""
    if values.place.after == values.place.rank:
        outputs = []  # kept as the input of the next stage
    elif values.place.after is not None:
        outputs = [values.output(LiveValue(c.name)) for c in values.leaving]
    else:
        logits = module_logits(values)
        outputs = [values.value(len(values.blocks) - 1, logits)] if logits else []
    return [v for v in outputs if v is not None]


def _retain_graph(values: StageValues, action: ActionRows) -> None:
    """Hold what backward has read until the end of its weight half (`retain_graph`).

    The gradient of the stage's input stays in a buffer of the input (`Tensor.grad`): an unsplit
    backward would clear it; otherwise it is cleared at the end of the step.
    """
    last = max({*action.weight_half} - {*action.once_per_step}, default=-1)
    for v in values.values:
        if v.category == "activations" and last >= 0:
            v.touches.append((CopyRelation.SPLIT_BACKWARD, action.stage, last))
    local = values.place.before == values.place.rank  # the stage before keeps the gradient
    for c in () if local else values.arriving:
        gradient = values.output(LiveValue(c.name, True))
        if gradient is not None:
            gradient.until_step_end_if_split = True


# ---- PyTorch: ring attention ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingAttention(Habit):
    """Memory of `_templated_ring_attention_backward`, with balanced causal halves.

    Its backward holds further tensors while keys and gradients circulate.
    """

    ranks: int
    gathered: bool
    """True if keys are gathered, rather than sent from rank to rank."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with `cp_grad_comm_type=ring`, except with Ulysses."""
        if run.cp == 1 or run.cp_grad_comm_type != "ring" or run.cp_comm_type == "a2a":
            return None
        return cls(run.cp, run.cp_comm_type == "all_gather")

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Save attention's output twice: by heads, and by tokens for the next product.

        `_SDPAMerger` joins halves of outputs by heads. Only the last rank of cp has no such halves,
        and no copy.
        """
        for i, placed in enumerate(values.blocks if not action.forward else ()):
            block = placed.block
            for n in (n for n in block.graph if n.op == "attention" and n.phase != "backward"):
                output = values.value(i, n)
                reading = (
                    row
                    for t, row in action.row_of[i].items()
                    if any(block.owner(m) is n for m in t.reads)
                    and all(m.op != "attention_bwd" for m in t.made)
                )
                last = max(reading, default=-1)
                if output is not None and last >= 0:
                    copy = replace(output, name=f"{output.name}.copy", size=block.size[n.srcs[0]])
                    copy.touches = [*output.touches[:1], action.touch_by(last)]
                    values.values.append(copy)

    def scratch(self, t: LoweredTask, size: Mapping[Node, int]) -> int:
        """Bytes of the last rank in its second step, without operands and results of the kernel.

        Sums are in fp32. With the bytes q of a rank's queries and k of its keys, and f fp32 values
        for one of the computation: gradients of the queries (f q) and of this step (q, and k for
        half of the keys and half of the values), keys and values to send (2 k) and those that came,
        and four tensors with gradients of keys and values: their sum, its two parts, joined, and
        what is exchanged (2 f k each). Or earlier, when gradients of two steps are live at once.
        """
        made = {n.get("wrt"): n for n in t.made if n.op == "attention_bwd"}
        if "q" not in made or "k" not in made:
            return 0
        q, keys = size[made["q"]], made["k"]
        whole = size[keys]
        k = whole // self.ranks if self.gathered else whole
        f = int(BYTES["fp32"]) // int(BYTES[keys.dtype])
        came = 2 * self.ranks * k if self.gathered else 2 * k * min(2, self.ranks - 1)
        copied = 0 if _contiguous(made["q"]) else 2 * k
        late = f * q + q + k + 8 * f * k
        early = f * q + 2 * q + 3 * k + 6 * f * k
        total = max(late, early) + came + 2 * k + copied
        counted = q + 2 * whole + (2 * self.ranks * k if self.gathered else 0)
        return max(0, total - counted)


def _contiguous(attention: Node) -> bool:
    """True if keys are contiguous for the ring: copied heads, not a view."""
    spec = parse(str(attention["spec"]))
    operands = zip(attention.srcs, spec.ins, strict=True)
    keys = next(s for s, dims in operands if ("k",) in dims)
    while keys.op in COLLECTIVE_OPS:
        (keys,) = keys.srcs
    return keys.op == "repeat"


# ---- Megatron-LM: options that hold more ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoreMemory(Habit):
    """Options of Megatron-LM, each with the bytes that it adds.

    Megatron-LM at d98e8a64 (`calculate_gradients` in core/fusions/fused_cross_entropy.py,
    `LinearWithGradAccumulationAndAsyncCommunication` in core/tensor_parallel/layers.py);
    Transformer Engine at d0067d0d (`FlashAttention` in .../dot_product_attention/backends.py).
    """

    compiled_loss: bool
    transposed_attention: bool
    deferred: int
    """Microbatches whose gradients of logits are held."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit of a run with one of the options."""
        held = min(run.wgrad_deferral_limit or run.microbatches, run.microbatches)
        deferred = held if run.defer_embedding_wgrad_compute and run.pp > 1 else 0
        transposed = run.transposed_attention and run.micro_batch_size > 1 and run.cp == 1
        habit = cls(run.compiled_loss, transposed, deferred)
        return habit if habit != cls(False, False, 0) else None

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Bytes of attention's output, whose transpose the next product saves."""
        attention = n.op == "attention" and n.phase != "backward"
        return bytes_of(n, extent.of(n)) if self.transposed_attention and attention else 0

    def scratch(self, t: LoweredTask, size: Mapping[Node, int]) -> int:
        """Bytes of the softmax, of which the compiled backward makes a copy to subtract labels."""
        read = [n for n in t.reads if n.op == "cast" and n.srcs[0].role is Role.LOGITS]
        backward = self.compiled_loss and t.phase == "backward"
        return sum(size[n] for n in read) if backward else 0

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Add the gradients of logits that wait."""
        logits = {n for n in graph if n.role is Role.LOGITS and n.phase == "forward"}
        held = self.deferred * sum(size[n] for n in logits)
        return {"workspace": held} if held else {}


# ---- the habits of a run -------------------------------------------------------------------------

HABITS: tuple[type[Habit], ...] = (
    GradientsSetToNone,
    EagerOperators,
    GradientBuckets,
    OneBucket,
    PipelineCaches,
    FsdpUnits,
    RingAttention,
    MoreMemory,
)


@dataclass(frozen=True, slots=True)
class Habits(Habit):
    """All habits of a run as one."""

    parts: tuple[Habit, ...] = ()

    @classmethod
    def of(cls, run: Run, order: Order) -> Self:
        """Habits of a resolved run."""
        return cls(tuple(habit for cls_ in HABITS if (habit := cls_.of(run, order)) is not None))
