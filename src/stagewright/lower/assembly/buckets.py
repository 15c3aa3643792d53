"""Collectives that blocks of a stage share: one unit of several blocks, and buckets of gradients.

A stage's tasks stand block by block. Here their order is changed, and collectives that are one
message are put together in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from stagewright.lower.assembly.lifetimes import moves_gradients
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.program.columns import TaskKind

_MERGED = {TaskPart.REDUCE_ONCE: "bucket", TaskPart.UPDATE: "updated"}
"""How names of merged messages begin; of others, those of FSDP's root unit."""
Item = tuple[int, Kernel]
"""A block of the stage, and one of its tasks."""
Row = list[Item]
"""The tasks that one row stands for: several messages that are sent as one, else a single task."""


def adds_before_reduction(t: Kernel) -> bool:
    """Whether a kernel adds a gradient in another precision to those of microbatches before.

    What adds a gradient that has been reduced is part of the reduction.
    """
    reduced = any(isinstance(d, Kernel) and moves_gradients(d) for d in t.deps)
    return t.op == "cast+accumulate" and not reduced


def one_by_one(items: Sequence[Item]) -> list[Row]:
    """Every task has a row of its own."""
    return [[item] for item in items]


def with_root_unit(
    items: Sequence[Item], root: AbstractSet[int], *, root_first: bool = False
) -> list[Row]:
    """Each block is a unit that gathers weights and reduces gradients, those of `root` are one.

    When its backward is done, a unit casts its gradients, adds these to those of microbatches
    before and reduces them. The blocks of `root` gather when the first of them does, and reduce
    after all other units. With `root_first`, all units reduce when the whole backward is done: that
    of `root`, then the others from the first on.
    """
    gathers = (TaskPart.GATHER_ONCE, TaskPart.GATHER)
    early = [(i, t) for i, t in items if i in root and t.part in gathers]
    reductions = _reductions(items)
    late = {i: [item for item in reductions if item[0] == i] for i, _ in items}
    added = {i: [(j, t) for j, t in items if j == i and adds_before_reduction(t)] for i in late}
    moved = {t for of in (late, added) for unit in of.values() for _, t in unit}
    moved |= {t for _, t in early}
    rest = _gather_after_loss([item for item in items if item[1] not in moved])
    # Gradients are complete when the backward of their block is done; the root's, of all blocks.
    backward = [(n, i) for n, (i, t) in enumerate(rest) if t.part is TaskPart.BACKWARD]
    end = {i: n for n, i in backward}
    last = max(end.values(), default=-1)
    rows = _merged(early)
    for n, item in enumerate(rest):
        rows.append([item])
        if end.get(item[0]) == n and item[0] not in root:
            rows += one_by_one([*added[item[0]], *(() if root_first else late[item[0]])])
        if n == last:
            rows += one_by_one([item for i in added if i in root for item in added[i]])
            rows += _merged([item for i in late if i in root for item in late[i]])
            others = sorted(late.keys() - root) if root_first else []
            rows += one_by_one([item for i in others for item in late[i]])
    return rows


def _gather_after_loss(items: Sequence[Item]) -> Row:
    """The first block of backward gathers for the next one when the loss has its gradient."""
    start = next((n for n, (_, t) in enumerate(items) if t.part is TaskPart.BACKWARD), 0)
    first = items[start][0] if items else 0
    gathers = [(i, t) for i, t in items[:start] if t.part is TaskPart.GATHER_AGAIN and i != first]
    late = {t for _, t in gathers}
    rest = (n for n in range(start, len(items)) if _ends_wait(items[n][1], late))
    at = next(rest, start)
    before = [item for item in items[:start] if item not in gathers]
    return [*before, *items[start:at], *gathers, *items[at:]] if gathers else [*items]


def _ends_wait(t: Kernel, gathers: AbstractSet[Kernel]) -> bool:
    """Whether gathers are issued before this task of backward: a product, or what needs them."""
    product = t.shape is not None and t.shape.kernel == "gemm"
    return product or any(isinstance(d, Kernel) and d in gathers for d in t.deps)


def in_buckets(items: Sequence[Item], cap: int, first_cap: int) -> list[Row]:
    """Reductions of gradients, in the order of backward, in messages of `cap` bytes or more.

    A bucket is closed by the gradient that fills it; the first one may be smaller. What depends on
    a reduction comes after its bucket.
    """
    rows: list[Row] = []
    bucket: Row = []
    in_bucket_or_behind = set[Kernel]()
    behind: Row = []
    limit = min(first_cap, cap)
    for i, t in items:
        if not in_bucket_or_behind.isdisjoint(d for d in t.deps if isinstance(d, Kernel)):
            in_bucket_or_behind.add(t)
            behind.append((i, t))
        elif (
            t.part is TaskPart.REDUCE_ONCE
            and moves_gradients(t)
            and (not bucket or _message_key(t) == _message_key(bucket[0][1]))
        ):
            bucket.append((i, t))
            in_bucket_or_behind.add(t)
            if sum(t.comm_bytes for _, t in bucket) >= limit:
                rows += [bucket, *one_by_one(behind)]
                bucket, behind, in_bucket_or_behind, limit = [], [], set[Kernel](), cap
        else:
            rows.append([(i, t)])
    return [*rows, *([bucket] if bucket else []), *one_by_one(behind)]


def gathered_last(items: Sequence[Item]) -> list[Row]:
    """The items in order, and behind them one message for the gathers of each group and data type.

    What depends on a gather comes after all of them.
    """
    late: set[Kernel] = set()
    for _, t in items:
        if t.op == "all_gather" or not late.isdisjoint(d for d in t.deps if isinstance(d, Kernel)):
            late.add(t)
    early = [item for item in items if item[1] not in late]
    return [*one_by_one(early), *_merged([item for item in items if item[1] in late])]


def merge_messages(row: Row) -> Kernel:
    """The task of a row: one message in place of several, or the only task as it is."""
    first = row[0][1]
    if len(row) == 1:
        return first
    name = f"{_MERGED.get(first.part, 'root')}.{first.op}"
    size = sum(t.comm_bytes for _, t in row)
    return Kernel(name, first.op, first.kind, first.phase, first.part, axes=first.axes,
                  comm_bytes=size, dtype=first.dtype)  # fmt: skip


def _message_key(t: Kernel) -> tuple[object, ...]:
    """Messages with equal keys can be sent as one."""
    return t.op, t.axes, t.dtype, t.phase


def _reductions(items: Sequence[Item]) -> Row:
    """Reductions of gradients, the tasks that depend on these, and the casts before these."""
    moved: dict[Kernel, int] = {}
    for i, t in items:
        depends = any(isinstance(d, Kernel) and d in moved for d in t.deps)
        if t.part in (TaskPart.BACKWARD, TaskPart.REDUCE_ONCE) and (depends or moves_gradients(t)):
            moved[t] = i
    needed = {d for t in moved if moves_gradients(t) for d in t.deps}
    return [(i, t) for i, t in items if t in moved or (t in needed and t.op == "cast")]


def _merged(items: Sequence[Item]) -> list[Row]:
    """Rows in which collectives of one kind are merged, each row after those that it needs."""
    by_key: dict[tuple[object, ...], Row] = {}
    for n, (i, t) in enumerate(items):
        key = _message_key(t) if t.kind == TaskKind.COLLECTIVE else (n,)
        row = by_key.pop(key, [])
        by_key[key] = [*row, (i, t)]
    return _in_order_of_need([*by_key.values()])


def _in_order_of_need(rows: Sequence[Row]) -> list[Row]:
    row_of = {t: n for n, row in enumerate(rows) for _, t in row}
    ordered: list[Row] = []
    left = dict(enumerate(rows))
    while left:
        n = next(n for n, row in left.items() if not _needs(row, row_of) & (left.keys() - {n}))
        ordered.append(left.pop(n))
    return ordered


def _needs(row: Row, row_of: dict[Kernel, int]) -> set[int]:
    return {row_of[d] for _, t in row for d in t.deps if isinstance(d, Kernel) and d in row_of}
