"""Reorder a stage's tasks and merge collectives into one message."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.lower.assembly.lifetimes import moves_gradients
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.program.columns import TaskKind

_MERGED = {TaskPart.REDUCE_ONCE: "bucket", TaskPart.UPDATE: "updated"}
"""Prefix of names of merged messages; of other parts, those of FSDP's root unit."""
Item = tuple[int, Kernel]
"""A block of the stage, and one of its tasks."""
Row = list[Item]
"""Tasks of one row: several messages that are sent as one, else a single task."""


def one_by_one(items: Sequence[Item]) -> list[Row]:
    """Give every task its own row."""
    return [[item] for item in items]


def in_buckets(items: Sequence[Item], cap: int, first_cap: int) -> list[Row]:
    """Reduce gradients, in the order of backward, in messages of `cap` bytes or more.

    The gradient that fills a bucket closes it; the first one may be smaller. Dependents of a
    reduction come after its bucket.
    """
    rows: list[Row] = []
    bucket: Row = []
    bucket_and_dependents = set[Kernel]()
    after_bucket: Row = []
    limit = min(first_cap, cap)
    for i, t in items:
        if not bucket_and_dependents.isdisjoint(d for d in t.deps if isinstance(d, Kernel)):
            bucket_and_dependents.add(t)
            after_bucket.append((i, t))
        elif (
            t.part is TaskPart.REDUCE_ONCE
            and moves_gradients(t)
            and (not bucket or _message_key(t) == _message_key(bucket[0][1]))
        ):
            bucket.append((i, t))
            bucket_and_dependents.add(t)
            if sum(t.comm_bytes for _, t in bucket) >= limit:
                rows += [bucket, *one_by_one(after_bucket)]
                bucket, after_bucket, bucket_and_dependents, limit = [], [], set[Kernel](), cap
        else:
            rows.append([(i, t)])
    return [*rows, *([bucket] if bucket else []), *one_by_one(after_bucket)]


def gathered_last(items: Sequence[Item]) -> list[Row]:
    """Move gathers to the end, one message per group and data type; dependents follow."""
    deferred: set[Kernel] = set()
    for _, t in items:
        depends = not deferred.isdisjoint(d for d in t.deps if isinstance(d, Kernel))
        if t.op == "all_gather" or depends:
            deferred.add(t)
    remaining = [item for item in items if item[1] not in deferred]
    return [*one_by_one(remaining), *merged([item for item in items if item[1] in deferred])]


def merge_messages(row: Row) -> Kernel:
    """Task of a row: one message in place of several, or the only task as it is."""
    first = row[0][1]
    if len(row) == 1:
        return first
    name = f"{_MERGED.get(first.part, 'root')}.{first.op}"
    size = sum(t.comm_bytes for _, t in row)
    return Kernel(name, first.op, first.kind, first.phase, first.part, axes=first.axes,
                  comm_bytes=size, dtype=first.dtype)  # fmt: skip


def _message_key(t: Kernel) -> tuple[object, ...]:
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
    deps = {n: {row_of[d] for _, t in row for d in t.deps if isinstance(d, Kernel) and d in row_of}
            for n, row in remaining.items()}  # fmt: skip
    ordered: list[Row] = []
    while remaining:
        n = next(n for n in remaining if not deps[n] & (remaining.keys() - {n}))
        ordered.append(remaining.pop(n))
    return ordered
