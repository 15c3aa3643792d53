"""Which values of a block take memory, how much, and which tasks make and read them.

A value is allocated from the first row that touches it to the last, so that allocation is ideal.
The results of a collective of many weights come and go together. Views, gradients reduced in their
buffer and parameters written by the optimizer take no bytes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import Role
from stagewright.graph.table import COLLECTIVE_OPS, OPS, is_view
from stagewright.lower.kernels.kernel import Kernel
from stagewright.lower.kernels.lowering import is_part
from stagewright.program.columns import TaskKind

Touch = tuple[int, int, int]
"""A row that needs a value: whose rows (see `segments`), the stage, and the place there."""

_MOVES_GRADIENT = frozenset(
    {Role.SUM_OVER_MODEL, Role.MICROBATCH_GRADIENT, Role.STEP_GRADIENT, Role.REDUCED}
)
"""Roles of collectives that move gradients of weights."""


@dataclass(slots=True, eq=False)
class Value:
    """Bytes of a stage with a live range, which is the span of the rows that touch them."""

    name: str
    layer: int
    phase: str
    category: str
    size: int
    whole: bool = False
    """One for all microbatches."""
    lasts: bool = False
    """Live until the step is over."""
    lasts_halved: bool = False
    """Live until the step is over if its backward is done in halves."""
    fixed: bool = False
    """Allocated all the time, whatever touches it."""
    touches: list[Touch] = field(default_factory=list[Touch])
    needs: Touch | None = None
    """A row without which the value is not there: that row may belong to another microbatch's
    action."""

    def touch(self, at: Touch, phase: str) -> None:
        """A row of this phase needs the value: one that backward needs is an activation."""
        if self.fixed:
            return
        self.touches.append(at)
        if self.category in ("communication", "workspace"):
            later = phase == "backward" or (phase == "recompute" and self.phase == "forward")
            if later and self.phase in ("forward", "recompute"):
                self.category = "activations"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Which values have bytes of their own: by default, gradients have permanent buffers."""

    gradient_buffers: bool = True
    """Gradients of weights are summed in buffers allocated all the time; else each is live from
    when it is made until the step is over."""
    one_microbatch: bool = False
    """A gradient is not added to others."""
    copies_slices: bool = False
    """A rank's part of an activation that it has whole is a tensor of its own."""
    update_temporaries: int = 0
    """Temporary tensors of the size of a parameter while it is updated."""

    def owner(self, n: Node) -> Node:
        """The value whose bytes these are: a view has those of what it is a view of."""
        while self._shares_bytes(n):
            n = n.srcs[0]
        return n

    def _shares_bytes(self, n: Node) -> bool:
        if is_view(n):
            return True
        if n.op == "slice" and n.role is not Role.OWN_ROWS:
            return not (self.copies_slices and is_part(n))
        if n.op == "accumulate":
            return not self.gradient_buffers and self.one_microbatch
        # Gradients are reduced in the buffer they are summed in, parameters gathered in place.
        if n.op == "reduce_scatter" and not self.gradient_buffers:
            return False
        return n.op in COLLECTIVE_OPS and n.once and n.phase in ("backward", "optimizer")

    def permanent(self, n: Node) -> bool:
        """Whether a value is part of what is allocated all the time."""
        buffers = ("accumulate",) if self.gradient_buffers else ()
        return n.op in ("param", "state", *buffers) or updates(n)


PERMANENT_BUFFERS = Allocation()


def updates(n: Node) -> bool:
    """Whether a value is a parameter as an optimizer has just written it."""
    return n.op in OPS and bool(OPS[n.op].moments)


class NewValue(NamedTuple):
    """What a task makes that takes bytes of its own: one node, or several allocated as one."""

    nodes: tuple[Node, ...]
    name: str
    category: str
    size: int
    whole: bool = False  # one for all microbatches
    lasts: bool = False  # live until the step is over


class Use(NamedTuple):
    """The values that a task makes, and the owners of all that it makes or reads."""

    new: tuple[NewValue, ...]
    seen: tuple[Node, ...]
    scratch: int | None = None  # bytes needed while it runs, which may be 0; None: no such value
    moves_gradients: bool = False  # the task is a collective of gradients of weights


def uses(
    tasks: Sequence[Kernel],
    size: Mapping[Node, int],
    graph: Graph,
    allocation: Allocation = PERMANENT_BUFFERS,
) -> dict[Kernel, Use]:
    """What each task of a block makes and reads; `size` in bytes of one rank."""
    result: dict[Kernel, Use] = {}
    gradients = set[Node]()  # those without buffers: the first operand of each update
    if not allocation.gradient_buffers:
        gradients = {allocation.owner(n.srcs[0]) for n in graph if updates(n)}
    for t in tasks:
        made = tuple(n for n in t.made if allocation.owner(n) is n and not allocation.permanent(n))
        one_by_one = t.kind != TaskKind.COLLECTIVE or len(made) < 2
        allocated: list[tuple[Node, ...]] = [(n,) for n in made] if one_by_one else [made]
        new: list[NewValue] = []
        for nodes in allocated:
            name = (nodes[0].name or nodes[0].op) if one_by_one else t.name
            lasts = not gradients.isdisjoint(nodes)
            whole = lasts or any(n.op == "accumulate" for n in nodes)
            category = "gradients" if whole else _category(t)
            new.append(NewValue(nodes, name, category, sum(size[n] for n in nodes), whole, lasts))
        temporaries: dict[Node, Any] = {
            n: allocation.update_temporaries if updates(n) else n.get("temporaries", 0)
            for n in t.made
        }
        scratch = (
            sum(size[n] * k for n, k in temporaries.items()) if any(temporaries.values()) else None
        )
        seen = dict.fromkeys(allocation.owner(n) for n in (*t.made, *t.reads))
        kept = tuple(n for n in seen if not allocation.permanent(n))
        result[t] = Use(tuple(new), kept, scratch, moves_gradients(t))
    return result


def permanent_bytes(
    graph: Graph,
    size: Mapping[Node, int],
    *,
    elsewhere: Collection[str] = (),
    states_on_host: bool = False,
    allocation: Allocation = PERMANENT_BUFFERS,
) -> dict[str, int]:
    """Bytes of a block that are allocated all the time, by category.

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
    return {what: sum(size[n] for n in nodes) for what, nodes in by_category.items() if nodes}


def _category(t: Kernel) -> str:
    if t.part.gathers:
        return "gathered_parameters"
    return "workspace" if t.kind == TaskKind.COMPUTE else "communication"


def moves_gradients(t: Kernel) -> bool:
    """Whether a task is a collective of gradients of weights."""
    return t.kind == TaskKind.COLLECTIVE and any(n.role in _MOVES_GRADIENT for n in t.made)
