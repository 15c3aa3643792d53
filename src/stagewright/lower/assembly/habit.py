"""Base class `Habit`: the points in lowering where frameworks differ, and orders of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from typing import NamedTuple, Self

from stagewright.graph.node import Graph, Node
from stagewright.lower.assembly.lowered_block import Allocation, moves_gradients
from stagewright.lower.assembly.segments import ActionRows
from stagewright.lower.assembly.stage_values import StageValues
from stagewright.lower.kernels.extent import Extent
from stagewright.lower.kernels.kernel import BlockSection, LoweredTask
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order

Item = tuple[int, LoweredTask]
"""A block of the stage, and one of its tasks."""
Row = list[Item]
"""Tasks of one row: several messages that are sent as one, else a single task."""


class UnitWeights(NamedTuple):
    """Lifetime of gathered weights in a pipeline, beyond the action that gathers them."""

    keeps_gathered: bool = False
    """Weights stay gathered after a backward and are freed by the next forward: the action of a
    stage that follows a backward gathers nothing."""
    gathers_ahead: bool = False
    """A rank gathers the weights of all its stages before its first action."""


class Habit:
    """Megatron-LM at each point where frameworks differ; subclasses override points.

    A point that a subclass does not override combines those of its `parts`.
    """

    parts: tuple[Habit, ...] = ()

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """Habit with the numbers of a resolved run; None: the run does not have it."""
        return cls()

    def allocation(self, allocation: Allocation) -> Allocation:
        """Rules for values of a block that share bytes, given those of other habits."""
        return reduce(lambda rules, part: part.allocation(rules), self.parts, allocation)

    def workspace_bytes(self, n: Node, extent: Extent) -> int:
        """Bytes on one rank that the kernel of a value saves in addition to the value."""
        return sum(part.workspace_bytes(n, extent) for part in self.parts)

    def scratch(self, t: LoweredTask, size: Mapping[Node, int]) -> int:
        """Bytes on one rank that a task needs while it runs, in addition to its operators'."""
        return sum(part.scratch(t, size) for part in self.parts)

    def permanent_bytes(self, graph: Graph, size: Mapping[Node, int]) -> dict[str, int]:
        """Additional permanent bytes of a block, by category; those of parts differ."""
        return dict(x for part in self.parts for x in part.permanent_bytes(graph, size).items())

    def bucket(self, bucket: str) -> str:
        """Reductions of one block that are merged, as in `kernels.lowering.KernelRules`."""
        return reduce(lambda merged, part: part.bucket(merged), self.parts, bucket)

    def message_buffers(self) -> int:
        """Number of permanent buffers for each message between stages."""
        return max((part.message_buffers() for part in self.parts), default=0)

    def unit_weights(self) -> UnitWeights:
        """Lifetime of gathered weights in a pipeline."""
        weights = (part.unit_weights() for part in self.parts)
        return next(filter(any, weights), UnitWeights())

    def arrange(
        self, items: Sequence[Item], root: AbstractSet[int], *, forward: bool
    ) -> Sequence[Row] | None:
        """Reorder and merge the tasks of an action; None: in order, a row each.

        `root`: blocks of the stage outside of all layers.
        """
        arranged = (part.arrange(items, root, forward=forward) for part in self.parts)
        return next((rows for rows in arranged if rows is not None), None)

    def arrange_updates(self, items: Sequence[Item]) -> Sequence[Row] | None:
        """Reorder and merge the updates of a rank's blocks; None: in order, a row each."""
        arranged = (part.arrange_updates(items) for part in self.parts)
        return next((rows for rows in arranged if rows and len(rows) < len(items)), None)

    def weight_ends(self, action: ActionRows, root: AbstractSet[int]) -> Mapping[int, int] | None:
        """Row of a backward after which each block's weights are freed; None: its last one."""
        ends = (part.weight_ends(action, root) for part in self.parts)
        return next((rows for rows in ends if rows is not None), None)

    def extend_live_ranges(self, values: StageValues, action: ActionRows) -> None:
        """Touch values that live longer than the action's tasks require."""
        for part in self.parts:
            part.extend_live_ranges(values, action)


MEGATRON_LM = Habit()


# ---- rows of several tasks -----------------------------------------------------------------------

_MERGED = {BlockSection.REDUCE_ONCE: "bucket", BlockSection.UPDATE: "updated"}
"""Prefix of names of merged messages; of other parts, those of FSDP's root unit."""


def one_by_one(items: Sequence[Item]) -> list[Row]:
    """Give every task its own row."""
    return [[item] for item in items]


def in_buckets(items: Sequence[Item], cap: int, first_cap: int) -> list[Row]:
    """Reduce gradients, in the order of backward, in messages of `cap` bytes or more.

    The gradient that fills a bucket closes it; the first one may be smaller. Weights of one joint
    product, such as query, key and value, are one parameter, which no bucket splits. Dependents of
    a reduction come after its bucket.
    """
    last_of_parameter = {
        (i, _parameter(t)): t for i, t in items if t.section is BlockSection.REDUCE_ONCE
    }
    rows: list[Row] = []
    bucket: Row = []
    bucket_and_dependents = set[LoweredTask]()
    after_bucket: Row = []
    limit = min(first_cap, cap)
    for i, t in items:
        if not bucket_and_dependents.isdisjoint(d for d in t.deps if isinstance(d, LoweredTask)):
            bucket_and_dependents.add(t)
            after_bucket.append((i, t))
        elif (
            t.section is BlockSection.REDUCE_ONCE
            and moves_gradients(t)
            and (not bucket or _message_key(t) == _message_key(bucket[0][1]))
        ):
            bucket.append((i, t))
            bucket_and_dependents.add(t)
            whole = last_of_parameter[i, _parameter(t)] is t
            if whole and sum(t.comm_bytes for _, t in bucket) >= limit:
                rows += [bucket, *one_by_one(after_bucket)]
                bucket, after_bucket, bucket_and_dependents, limit = [], [], set[LoweredTask](), cap
        else:
            rows.append([(i, t)])
    return [*rows, *([bucket] if bucket else []), *one_by_one(after_bucket)]


def _parameter(t: LoweredTask) -> object:
    """The joint product whose weights' gradient a task reduces; else the task itself."""
    gradient = next(iter(t.reads), None)
    while gradient is not None and gradient.op in ("accumulate", "cast"):
        gradient = gradient.srcs[0]
    joint = gradient.get("joint") if gradient is not None and gradient.op == "einsum" else None
    return joint or t


def gathered_last(items: Sequence[Item]) -> list[Row]:
    """Move gathers to the end, one message per group and data type; dependents follow."""
    deferred: set[LoweredTask] = set()
    for _, t in items:
        depends = not deferred.isdisjoint(d for d in t.deps if isinstance(d, LoweredTask))
        if t.op == "all_gather" or depends:
            deferred.add(t)
    remaining = [item for item in items if item[1] not in deferred]
    return [*one_by_one(remaining), *merged([item for item in items if item[1] in deferred])]


def merge_messages(row: Row) -> LoweredTask:
    """Task of a row: one message in place of several, or the only task as it is."""
    first = row[0][1]
    if len(row) == 1:
        return first
    name = f"{_MERGED.get(first.section, 'root')}.{first.op}"
    size = sum(t.comm_bytes for _, t in row)
    return LoweredTask(name, first.op, first.kind, first.phase, first.section, axes=first.axes,
                  comm_bytes=size, dtype=first.dtype)  # fmt: skip


def _message_key(t: LoweredTask) -> tuple[object, ...]:
    """Key of messages that can be sent as one."""
    return t.op, t.axes, t.dtype, t.phase


def merged(items: Sequence[Item]) -> list[Row]:
    """Merge collectives with equal keys into rows; each row comes after its dependencies."""
    by_key: dict[tuple[object, ...], Row] = {}
    for n, (i, t) in enumerate(items):
        key = _message_key(t) if t.kind == TaskKind.COLLECTIVE else (n,)
        row = by_key.pop(key, [])
        by_key[key] = [*row, (i, t)]
    remaining = dict(enumerate(by_key.values()))
    row_of = {t: n for n, row in remaining.items() for _, t in row}
    deps = {
        n: {row_of[d] for _, t in row for d in t.deps if isinstance(d, LoweredTask) and d in row_of}
        for n, row in remaining.items()
    }
    ordered: list[Row] = []
    while remaining:
        n = next(n for n in remaining if not deps[n] & (remaining.keys() - {n}))
        ordered.append(remaining.pop(n))
    return ordered
