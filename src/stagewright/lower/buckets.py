"""Collectives of weights that blocks share: FSDP's root unit, and DDP's buckets across layers.

A stage emits the tasks of its blocks one by one. Here the order is changed, and collectives that
are one message are put together: a group is a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from stagewright.lower.kernels import Kernel, TaskPart
from stagewright.lower.lifetimes import moves_gradients
from stagewright.program.columns import TaskKind

Item = tuple[int, Kernel]  # a block of the stage, and what it does
Group = list[Item]

FIRST_BUCKET = 2**20
"""Bytes at which DDP closes its first bucket (`dist._DEFAULT_FIRST_BUCKET_BYTES`)."""


def alone(items: Sequence[Item]) -> list[Group]:
    """Every task is a row."""
    return [[item] for item in items]


def sharded(items: Sequence[Item], root: AbstractSet[int]) -> list[Group]:
    """Units of FSDP2: each reduces its gradients, cast for that, when its backward is done.

    The blocks of `root` gather their weights when the first of them does, and reduce last.
    """
    early = [
        (i, t) for i, t in items if i in root and t.part in (TaskPart.GATHER_ONCE, TaskPart.GATHER)
    ]
    late = {i: _late([item for item in items if item[0] == i]) for i, _ in items}
    moved = {t for _, t in early} | {t for some in late.values() for _, t in some}
    rest = _gathered_later([item for item in items if item[1] not in moved])
    # Gradients are complete when the backward of their block is done, or of the last one.
    backward = [(n, i) for n, (i, t) in enumerate(rest) if t.part is TaskPart.BACKWARD]
    end = {i: n for n, i in backward}
    last = max(end.values(), default=-1)
    groups = _together(early)
    for n, item in enumerate(rest):
        groups.append([item])
        if end.get(item[0]) == n and item[0] not in root:
            groups += alone(late[item[0]])
        if n == last:
            groups += _together([item for i in late if i in root for item in late[i]])
    return groups


def _gathered_later(items: Sequence[Item]) -> Group:
    """The first block of backward gathers for the next one when the loss has its gradient."""
    start = next((n for n, (_, t) in enumerate(items) if t.part is TaskPart.BACKWARD), 0)
    first = items[start][0] if items else 0
    gathers = [(i, t) for i, t in items[:start] if t.part is TaskPart.GATHER_AGAIN and i != first]
    products = (n for n in range(start, len(items)) if _multiplies(items[n][1]))
    at = next(products, start)
    before = [item for item in items[:start] if item not in gathers]
    return [*before, *items[start:at], *gathers, *items[at:]] if gathers else [*items]


def _multiplies(t: Kernel) -> bool:
    return t.shape is not None and t.shape.kernel == "gemm"


def bucketed(items: Sequence[Item], cap: int) -> list[Group]:
    """Reductions of gradients, in the order of backward, in messages of `cap` bytes or more.

    A bucket is closed by the gradient that fills it (`compute_bucket_assignment_by_size` in
    PyTorch); the first one is small.
    """
    groups: list[Group] = []
    open_: Group = []
    waiting = set[Kernel]()
    after: Group = []
    limit = min(FIRST_BUCKET, cap)
    for i, t in items:
        if not waiting.isdisjoint(d for d in t.deps if isinstance(d, Kernel)):
            waiting.add(t)
            after.append((i, t))
        elif (
            t.part is TaskPart.REDUCE_ONCE
            and moves_gradients(t)
            and (not open_ or _alike(t, open_))
        ):
            open_.append((i, t))
            waiting.add(t)
            if sum(t.comm_bytes for _, t in open_) >= limit:
                groups += [open_, *alone(after)]
                open_, after, waiting, limit = [], [], set[Kernel](), cap
        else:
            groups.append([(i, t)])
    return [*groups, *([open_] if open_ else []), *alone(after)]


def joined(group: Group) -> Kernel:
    """One message in place of several."""
    first = group[0][1]
    if len(group) == 1:
        return first
    name = f"{'bucket' if first.part is TaskPart.REDUCE_ONCE else 'root'}.{first.op}"
    size = sum(t.comm_bytes for _, t in group)
    return Kernel(name, first.op, first.kind, first.phase, first.part, axes=first.axes,
                comm_bytes=size, dtype=first.dtype)  # fmt: skip


def _key(t: Kernel) -> tuple[object, ...]:
    return t.op, t.axes, t.dtype, t.phase


def _alike(t: Kernel, group: Group) -> bool:
    return _key(t) == _key(group[0][1])


def _late(items: Sequence[Item]) -> Group:
    """Reductions of gradients, what waits for them, and what they are cast from."""
    found: dict[Kernel, int] = {}
    for i, t in items:
        waits = any(isinstance(d, Kernel) and d in found for d in t.deps)
        if t.part in (TaskPart.BACKWARD, TaskPart.REDUCE_ONCE) and (waits or moves_gradients(t)):
            found[t] = i
    needed = {d for t in found if moves_gradients(t) for d in t.deps}
    return [(i, t) for i, t in items if t in found or (t in needed and t.op == "cast")]


def _together(items: Sequence[Item]) -> list[Group]:
    """Messages that are alike go as one, when the last of them can."""
    groups: dict[tuple[object, ...], Group] = {}
    for n, (i, t) in enumerate(items):
        key = _key(t) if t.kind == TaskKind.COLLECTIVE else (n,)
        group = groups.pop(key, [])
        groups[key] = [*group, (i, t)]
    return _after_what_they_need([*groups.values()])


def _after_what_they_need(groups: Sequence[Group]) -> list[Group]:
    home = {t: n for n, group in enumerate(groups) for _, t in group}
    done: list[Group] = []
    left = dict(enumerate(groups))
    while left:
        n = next(n for n, group in left.items() if not _needs(group, home) & (left.keys() - {n}))
        done.append(left.pop(n))
    return done


def _needs(group: Group, home: dict[Kernel, int]) -> set[int]:
    return {home[d] for _, t in group for d in t.deps if isinstance(d, Kernel) and d in home}
