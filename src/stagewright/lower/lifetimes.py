"""What a pipeline stage holds: its values, and the rows of its actions that touch each.

A value is there from the first row that touches it to the last, so that allocation is ideal. What
a collective of many weights makes comes and goes together. Views, gradients reduced in their
buffer and parameters written by the optimizer take no bytes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Int
from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import Role
from stagewright.graph.table import COLLECTIVE_OPS, OPS
from stagewright.lower.kernels import Kernel
from stagewright.program.columns import CATEGORIES, TaskKind, Values

Touch = tuple[int, int, int]  # whose rows (see `stages`), stage, place there

_GRADIENT = frozenset(
    {Role.SUM_OVER_MODEL, Role.MICROBATCH_GRADIENT, Role.STEP_GRADIENT, Role.REDUCED}
)  # roles of collectives that move gradients


@dataclass(slots=True, eq=False)
class Value:
    """Bytes that come and go."""

    name: str
    layer: int
    phase: str
    category: str
    size: int
    whole: bool = False  # one for all microbatches
    lasts: bool = False  # there until the step is over
    lasts_halved: bool = False  # so, where its backward is done in halves
    fixed: bool = False  # there all the time, whatever touches it
    touches: list[Touch] = field(default_factory=list[Touch])

    def touch(self, at: Touch, phase: str) -> None:
        """Some row needs it."""
        if self.fixed:
            return
        self.touches.append(at)
        later = phase == "backward" or (phase == "recompute" and self.phase == "forward")
        waits = later and self.phase in ("forward", "recompute")
        if waits and self.category in ("communication", "workspace"):
            self.category = "activations"


class Gradients(NamedTuple):
    """What holds gradients of weights: buffers that are there all the time, or what made them."""

    as_made: bool = False
    one: bool = False  # of one microbatch: there is nothing to add to
    temporaries: int = 0  # of the size of a parameter, while it is updated


BUFFERS = Gradients()


def root(n: Node, gradients: Gradients = BUFFERS) -> Node:
    """The value whose bytes these are."""
    while True:
        view = (n.op in OPS and OPS[n.op].view) or (n.op == "slice" and n.role is not Role.OWN_ROWS)
        if gradients.as_made and gradients.one and n.op == "accumulate":
            view = True
        # Gradients are reduced where they were summed up, parameters gathered where they are.
        in_place = n.op in COLLECTIVE_OPS and n.once and n.phase in ("backward", "optimizer")
        if gradients.as_made and n.op == "reduce_scatter":
            in_place = False
        if not (view or in_place):
            return n
        n = n.srcs[0]


def updates(n: Node) -> bool:
    """Whether a value is a parameter as an optimizer has just written it."""
    return n.op in OPS and bool(OPS[n.op].moments)


def stays(n: Node, gradients: Gradients = BUFFERS) -> bool:
    """Whether a value is part of what is there all the time."""
    buffers = ("accumulate",) if not gradients.as_made else ()
    return n.op in ("param", "state", *buffers) or updates(n)


class New(NamedTuple):
    """What a task makes that takes bytes of its own: one value, or several that are one."""

    nodes: tuple[Node, ...]
    name: str
    category: str
    size: int
    whole: bool = False  # one for all microbatches
    lasts: bool = False  # there until the step is over


class Use(NamedTuple):
    """What a task makes, and all that it makes or reads, by root."""

    new: tuple[New, ...]
    seen: tuple[Node, ...]
    scratch: int | None = None  # bytes that it needs while it runs, be it for no tokens; None: none


def uses(
    tasks: Sequence[Kernel],
    size: Mapping[Node, int],
    graph: Graph | None = None,
    gradients: Gradients = BUFFERS,
) -> dict[Kernel, Use]:
    """The values of a block's tasks; `size` in bytes of one rank.

    With `gradients` as they are made, the `graph` says which values these are.
    """
    result: dict[Kernel, Use] = {}
    held = set[Node]()
    if gradients.as_made and graph is not None:
        held = {root(n.srcs[0], gradients) for n in graph if updates(n)}  # gradients come first
    for t in tasks:
        made = tuple(n for n in t.made if root(n, gradients) is n and not stays(n, gradients))
        alone = t.kind != TaskKind.COLLECTIVE or len(made) < 2
        together: list[tuple[Node, ...]] = [(n,) for n in made] if alone else [made]
        new: list[New] = []
        for some in together:
            name = (some[0].name or some[0].op) if alone else t.name
            lasts = not held.isdisjoint(some)
            whole = lasts or any(n.op == "accumulate" for n in some)
            category = "gradients" if whole else _category(t)
            new.append(New(some, name, category, sum(size[n] for n in some), whole, lasts))
        times: dict[Node, Any] = {
            n: gradients.temporaries if updates(n) else n.get("temporaries", 0) for n in t.made
        }
        scratch = sum(size[n] * k for n, k in times.items()) if any(times.values()) else None
        seen = tuple(dict.fromkeys(root(n, gradients) for n in (*t.made, *t.reads)))
        seen = tuple(n for n in seen if not stays(n, gradients))
        result[t] = Use(tuple(new), seen, scratch)
    return result


def static(
    graph: Graph,
    size: Mapping[Node, int],
    *,
    states_on_host: bool = False,
    gradients: Gradients = BUFFERS,
) -> dict[str, int]:
    """Bytes of a block that stay, by category; a table shared by two blocks belongs to one."""
    params = [n for n in graph if n.op == "param"]
    updated = {n.binding.param for n in graph if n.phase == "optimizer"}
    shared = {n.binding.param for n in params} - updated
    held = {
        "parameters": [n for n in params if n.binding.param not in shared],
        "gradients": [n for n in graph if n.op == "accumulate" and n.binding.param not in shared],
        "optimizer": [n for n in graph if n.op == "state" and n.role is Role.STATE],
    }
    if states_on_host:
        del held["optimizer"]
    if gradients.as_made:
        del held["gradients"]
    return {what: sum(size[n] for n in nodes) for what, nodes in held.items() if nodes}


def _category(t: Kernel) -> str:
    if t.part.gathers:
        return "gathered_parameters"
    return "workspace" if t.kind == TaskKind.COMPUTE else "communication"


def moves_gradients(t: Kernel) -> bool:
    """Whether a task is a collective of gradients of weights."""
    return t.kind == TaskKind.COLLECTIVE and any(n.role in _GRADIENT for n in t.made)


class Where(NamedTuple):
    """How a rank finds rows: all that `rows_of` needs to know of its actions."""

    half: Callable[[Touch], int]  # of a touch, which half of the stage's actions
    once: Callable[[Touch], bool]  # whether its row is there once per step
    actions: Mapping[tuple[int, int], Int]  # stage and half -> action of each microbatch, or -1
    single: Mapping[tuple[int, int], int]  # the action with what happens once per step
    rows: Callable[[Int, Int], Int]  # actions, places -> rows, below 0 where left out
    end: int  # where the rows after all actions begin
    step: int  # `whose` of these
    next: int  # `whose` of the rows of the next microbatch


def collect(
    values: Mapping[int, Sequence[Value]],
    where: Where,
    total: int,
) -> Values:
    """The values of a rank, by stage, with their first and last rows; `total` rows in all."""
    names: dict[str, int] = {}
    table: list[tuple[int, int, int, int, int]] = []
    columns: list[list[Int]] = []
    for stage, some in values.items():
        alike: dict[tuple[int, int, bool, bool, bool], list[int]] = {}
        for v in some:
            if not v.touches:  # it stays
                instance = len(table), -1, -1, total
                columns.append([np.array([x]) for x in instance])
            else:
                made = v.touches[0]
                once = where.once(made) or v.whole
                key = made[1], where.half(made), once, v.lasts, v.lasts_halved
                alike.setdefault(key, []).append(len(table))
            table.append(
                (names.setdefault(v.name, len(names)), stage, v.layer,
                 CATEGORIES.index(v.category), v.size)
            )  # fmt: skip
        for (owner, half, once, lasts, lasts_halved), mine in alike.items():
            touched = [some[i - len(table)].touches for i in mine]
            found = _instances(np.array(mine), touched, owner, half, once, where)
            if lasts:
                found[3] = np.full_like(found[3], total - 1)
            elif lasts_halved:
                halved = where.actions[owner, 1] != where.actions[owner, 2]
                found[3] = np.where(halved[found[1]], total - 1, found[3])
            columns.append(found)
    name, of, layer, category, size = np.array(table, dtype=np.int64).reshape(-1, 5).T
    body = [np.concatenate(c).astype(np.int32) for c in zip(*columns, strict=True)]
    return Values(
        name.astype(np.int32),
        of.astype(np.int32),
        layer.astype(np.int32),
        category.astype(np.uint8),
        size,
        *body,
        names=tuple(names),
    )


def _instances(
    mine: Int, touched: Sequence[Sequence[Touch]], owner: int, half: int, once: bool, where: Where
) -> list[Int]:
    """Value, microbatch, first and last row of values that the same actions make."""
    flat = [touch for some in touched for touch in some]
    start = np.cumsum([0, *(len(some) for some in touched)])[:-1]
    every = where.actions.get((owner, half), np.array([0]))
    microbatches = np.flatnonzero(every >= 0) if owner >= 0 else np.array([0])
    rows = np.full((len(microbatches), len(flat)), -1, dtype=np.int64)
    groups: dict[tuple[int, int, bool, bool], list[int]] = {}
    for i, touch in enumerate(flat):
        key = (-1, 0, True, False) if touch[0] == where.step else (
            touch[1], where.half(touch), where.once(touch), touch[0] == where.next
        )  # fmt: skip
        groups.setdefault(key, []).append(i)
    for (stage, of, single, later), columns in groups.items():
        at = np.array([flat[i][2] for i in columns])
        if stage < 0:
            rows[:, columns] = where.end + at
        elif single and once:
            rows[:, columns] = where.rows(np.array([where.single[stage, of]]), at)
        else:
            actions = where.actions[stage, of]
            actions = (np.append(actions[1:], -1) if later else actions)[microbatches]
            some = np.flatnonzero(actions >= 0)
            rows[some[:, None], columns] = where.rows(actions[some], at)
    last = np.maximum.reduceat(rows, start, axis=1)
    first = np.minimum.reduceat(np.where(rows < 0, np.iinfo(np.int64).max, rows), start, axis=1)
    if once:
        first, last, microbatches = first.min(axis=0), last.max(axis=0), np.array([-1])
    value, microbatch = np.broadcast_arrays(mine, microbatches[:, None])
    there = last.ravel() >= 0
    return [c.ravel()[there] for c in (value, microbatch, first, last)]
