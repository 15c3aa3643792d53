"""Rebuild the graph with the layouts a strategy prescribes and the collectives these imply.

Operands offer axes for letters. An axis goes to the first offer that wants it: first come offers
that match the wanted output, then those of weights, then the rest (`assign`).

A partial sum stays one until someone needs the value, or until its primal's split makes it smaller;
then it is reduced straight into that layout (reduce-scatter, not all-reduce and slice).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from stagewright.algebra.index import Dim, Spec, layout_of, parse
from stagewright.algebra.layout import Layout, moves, replicated
from stagewright.graph.make import add, infer, letters
from stagewright.graph.make import move as move_value
from stagewright.graph.node import NO_NODES, Graph, Node, replace
from stagewright.graph.roles import Role
from stagewright.graph.table import LEAVES, OPS

# Layout that a strategy prescribes for a node; None: it follows its operands. Second argument: the
# layout that the operands give, None before it is known.
Strategy = Callable[[Node, Layout | None], Layout | None]
Splits = dict[str, tuple[str, ...]]


class Offer(NamedTuple):
    """Axes that an operand, or the wanted output, proposes for a letter of the index expression."""

    letter: str
    axes: tuple[str, ...]
    weight: bool = False
    """The operand is a weight."""
    summed: frozenset[str] = frozenset()
    """Axes over which the operand is a partial sum that the op reduces."""


_REGATHERED_BY_REMAT = frozenset({Role.KEYS, Role.SENT, Role.USED})
"""Roles of keys and weights: `remat` has decided whether backward gathers them again."""


def shard(
    graph: Graph,
    strategy: Strategy,
    primal: Mapping[Node, Node] = NO_NODES,
    *,
    keep_gathered: bool = False,
    inner: frozenset[str] = frozenset(),
    model_axes: tuple[str, ...] = (),
) -> Graph:
    """Graph in which leaves and named values have the layouts of `strategy`, with collectives.

    `primal` maps a gradient to its value, whose layout the gradient prefers. `keep_gathered` lets
    backward use what forward gathered, instead of gathering again. `inner` are the axes that split
    the inner index of a dim such as `(gr)`: heads of one key-value group over ranks that each hold
    that group. `model_axes` are those over which a norm of all parameters is a sum.
    """
    return _Sharding(strategy, primal, keep_gathered, inner, model_axes).run(graph)


class _Sharding:
    """One run over a graph; holds the layouts found so far."""

    def __init__(
        self,
        want: Strategy,
        primal: Mapping[Node, Node],
        keep_gathered: bool,
        inner: frozenset[str],
        model_axes: tuple[str, ...],
    ) -> None:
        self.inner = inner
        self.model_axes = model_axes
        self.strategy = want
        self.primal = primal
        self.keep_gathered = keep_gathered
        self.layout: dict[Node, Layout] = {}  # old node -> the layout it got
        self.made: set[Node] = set()
        self.demanded: set[Node] = set()  # old values that someone needs complete

    def run(self, graph: Graph) -> Graph:
        for n in graph:
            if n.op not in LEAVES and not (OPS[n.op].linear or OPS[n.op].multilinear):
                self.demanded.update(n.srcs)
        new, _ = graph.rebuild(self.visit)
        return new

    def visit(self, old: Node, srcs: tuple[Node, ...]) -> Node:
        if old.op in LEAVES:
            new = replace(old, layout=self.strategy(old, None) or self.of_primal(old) or old.layout)
        elif old.op == "identity":
            new = srcs[0]
        else:
            new = self.compute(old, srcs)
        target = self.strategy(old, new.layout) if old.op not in LEAVES else None
        if target is not None:
            new = self.reshard(new, target, old)
        self.layout[old] = new.layout
        self.made.add(new)
        return new

    def compute(self, old: Node, srcs: tuple[Node, ...]) -> Node:
        spec_text = str(old["spec"])
        olds = old.srcs
        if old.op == "add":
            olds, srcs = self.merge_equal_layouts(old, srcs)
            x = letters(srcs[0])
            spec_text = ",".join([x] * len(srcs)) + "->" + x
            if len(srcs) == 1:
                return srcs[0]
        spec = parse(spec_text)
        unreduced = self.unreduced_axes(old, olds, srcs)
        split_by = self.assign(old, spec, olds, srcs, unreduced)
        args: list[Node] = []
        for dims, s, sums in zip(spec.ins, srcs, unreduced, strict=True):
            splits = layout_of(dims, split_by)
            if (splits, sums) != (s.layout.dims, s.layout.partial):
                reduction = s.layout.reduction if sums else "sum"
                s = self.reshard(s, Layout(splits, sums, reduction), old, operand=True)
            args.append(s)
        attrs: dict[str, Any] = {**dict(old.attrs), "spec": spec_text}
        if "alone" in attrs:
            # A norm counts equal copies once: over every axis that splits nothing here.
            attrs["alone"] = tuple(a for a in self.model_axes if a not in args[0].layout.axes())
        layout = infer(old.op, spec, [s.layout for s in args], attrs, split_by)
        return replace(old, srcs=tuple(args), attrs=tuple(sorted(attrs.items())), layout=layout)

    def merge_equal_layouts(
        self, old: Node, srcs: tuple[Node, ...]
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """Add operands of equal layout first, so that each sum is reduced once."""
        groups: dict[Layout, list[tuple[Node, Node]]] = {}
        for o, s in zip(old.srcs, srcs, strict=True):
            groups.setdefault(s.layout, []).append((o, s))
        if len(groups) == 1:
            return old.srcs, srcs
        own = {"phase": old.phase, "once": old.once, "scope": old.scope}
        summed = tuple(add(*(s for _, s in g), **own, name=g[0][1].name) for g in groups.values())
        return tuple(g[0][0] for g in groups.values()), summed

    def unreduced_axes(
        self, old: Node, olds: tuple[Node, ...], srcs: tuple[Node, ...]
    ) -> list[frozenset[str]]:
        """Axes over which each operand stays a partial sum through the op."""
        row = OPS[old.op]
        none: list[frozenset[str]] = [frozenset()] * len(srcs)
        if any(s.layout.reduction != "sum" for s in srcs):
            return none
        if row.linear:
            shared = frozenset[str].intersection(*(s.layout.partial for s in srcs))
            if (
                len(srcs) == 1
                and self.strategy(old, None) is None
                and "alone" not in dict(old.attrs)
            ):
                # Reduced now where that makes it smaller, or where someone else reduces it anyway.
                shared -= frozenset(self.primal_axes(olds[0]))
                shared = frozenset[str]() if olds[0] in self.demanded else shared
            return [shared] * len(srcs)
        sums = [i for i, s in enumerate(srcs) if s.layout.partial]
        if row.multilinear and len(sums) == 1 and olds[sums[0]] not in self.demanded:
            (i,) = sums
            spec = parse(str(old["spec"]))
            elsewhere = {*self.primal_axes(old)}  # what may split the result or another operand
            for dims, s in (x for j, x in enumerate(zip(spec.ins, srcs, strict=True)) if j != i):
                splits = zip(dims, s.layout.dims, strict=True)
                elsewhere |= {a for d, axes in splits if spec.whole.isdisjoint(d) for a in axes}
            none[i] = srcs[i].layout.partial - elsewhere - frozenset(self.primal_axes(olds[i]))
        return none

    def primal_axes(self, old: Node) -> dict[str, int]:
        """Axes that split the primal of a gradient, with the dim that each splits."""
        layout = self.layout.get(self.primal[old]) if old in self.primal else None
        return {a: i for i, axes in enumerate(layout.dims) for a in axes} if layout else {}

    def of_primal(self, old: Node) -> Layout | None:
        """Layout of the gradient of a complete value: that of the value."""
        layout = self.layout.get(self.primal[old]) if old in self.primal else None
        return None if layout is None else Layout(layout.dims)

    def assign(
        self,
        old: Node,
        spec: Spec,
        olds: tuple[Node, ...],
        srcs: tuple[Node, ...],
        unreduced: list[frozenset[str]],
    ) -> Splits:
        """Letter -> axes.

        An axis splits one letter: that of the first offer. Offers that agree with the wanted output
        go first, then weights, then operands in order. With sequence parallelism, tp so goes to the
        dim of the weight and not to S of the stream, which is therefore wanted whole: `reshard`
        gathers it.
        """
        like = (
            self.strategy(old, None)
            or self.layout.get(self.primal.get(old, old))
            or replicated(len(spec.out))
        )
        wanted = dict(
            x for d, axes in zip(spec.out, like.dims, strict=True) for x in self.per_letter(d, axes)
        )
        offers: list[Offer] = []
        for dims, o, s, sums in zip(spec.ins, olds, srcs, unreduced, strict=True):
            # A gradient proposes the layout of its primal, everything else its own.
            proposed = self.layout.get(self.primal.get(o, o)) or s.layout
            if o in self.primal and _of_weight(self.primal[o]) and _refines(s.layout, proposed):
                proposed = s.layout  # a gradient of slices is gathered when it is reduced
            own = _is_weight(o), s.layout.partial - sums
            for dim, axes in zip(dims, proposed.dims, strict=True):
                offers += [Offer(x, some, *own) for x, some in self.per_letter(dim, axes) if some]
        offers = [self.refined(offer, offers) for offer in offers]
        keys = ring[1] if (ring := OPS[old.op].ring) else ""  # split last: heads win over them
        offers.sort(
            key=lambda x: (
                x.letter == keys,
                not set(x.axes) & set(wanted.get(x.letter, ())),
                not x.weight,
            )
        )
        known = {x for dims in spec.ins for d in dims for x in d}
        offers[:0] = [Offer(x, axes) for x, axes in wanted.items() if x not in known]
        # What is whole and wanted split is sliced before the work, not after it.
        offers += [Offer(x, axes) for x, axes in wanted.items() if x in known and axes]
        result = self.grant(old, spec, offers, frozenset[str]().union(*unreduced))
        for dim in spec.composite:
            # The inner index is split in contiguous parts only where the outer one is split up.
            outer = [x.axes for x in offers if x.letter == dim[0] and result[dim[1]]]
            if any(axes != result[dim[0]] for axes in outer):
                result[dim[1]] = ()
        return result

    def refined(self, offer: Offer, offers: list[Offer]) -> Offer:
        """Offer with further axes that another operand has on its letter.

        A weight takes them, since a slice moves no bytes; so does a partial sum over these axes,
        since a reduce_scatter moves half the bytes of an all_reduce.
        """
        known = len(offer.axes)
        further = [
            other.axes
            for other in offers
            if other.letter == offer.letter
            and other.axes[:known] == offer.axes
            and not other.weight
            and (offer.weight or offer.summed.issuperset(other.axes[known:]))
        ]
        return offer._replace(axes=max(further, key=len, default=offer.axes))

    def per_letter(self, dim: Dim, axes: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        """Letters of a dim, each with the axes that split it."""
        if len(dim) == 1:
            return [(dim[0], axes)]
        inner = tuple(a for a in axes if a in self.inner)
        return [(dim[0], tuple(a for a in axes if a not in inner)), (dim[1], inner)]

    def grant(
        self,
        old: Node,
        spec: Spec,
        offers: list[Offer],
        taken: frozenset[str],
    ) -> Splits:
        """Axes of each letter.

        Offers are granted in order, each axis to one letter, in ring attention to queries and keys.
        """
        ring, rows = OPS[old.op].ring, OPS[old.op].rows
        result: Splits = {}
        used: dict[str, str] = dict.fromkeys(taken, "")
        for letter, axes, *_ in offers:
            if letter in spec.whole or letter in result or (rows and letter == rows[0]):
                continue
            # Splits nest: an axis inside one that is taken is not granted either.
            free = tuple(takewhile(partial(_free, used, letter, ring), axes))
            if free:
                result[letter] = free
                used.update(dict.fromkeys(free, letter))
        if ring and result.get(ring[1]) != result.get(ring[0]):
            # Keys are whole, or go round the ranks that the queries are split over.
            result.pop(ring[1], None)
        if rows:
            # Rows of tokens may be in any order: the offered axes first, then those that leave
            # another dim for this one, its innermost split first.
            token_axes = [a for x in rows[1] for a in result.get(x, ())]
            first = [a for x in offers if x.letter == rows[0] for a in x.axes if a in token_axes]
            result[rows[0]] = tuple(dict.fromkeys([*first, *reversed(token_axes)]))
        return {x: result.get(x, ()) for x in spec.letters}

    def reshard(self, n: Node, to: Layout, consumer: Node, *, operand: bool = False) -> Node:
        """Bring `n` to layout `to`; consumers that need the same layout share the collectives."""
        phase, once = consumer.phase, consumer.once
        name = "" if operand else consumer.name
        role = None if operand else consumer.role
        for move in moves(n.layout, to):
            moved = partial(move_value, n, move, name=name, role=role)
            earlier = (n.phase, n.once) != (phase, once) and moved(phase=n.phase, once=n.once)
            if (
                earlier
                and earlier in self.made
                and (
                    move.kind != "all_gather"
                    or (self.keep_gathered and role not in _REGATHERED_BY_REMAT)
                )
            ):
                n = earlier
            else:
                n = moved(phase=phase, once=once)
            self.made.add(n)
        return n


def _of_weight(n: Node) -> bool:
    """A parameter, or what is made of one alone."""
    while len(n.srcs) == 1:
        n = n.srcs[0]
    return n.op == "param" or n.role is Role.USED


def _refines(finer: Layout, layout: Layout) -> bool:
    """True if every dim is split at least as in the other layout, in the same order."""
    pairs = zip(finer.dims, layout.dims, strict=True)
    return all(now[: len(then)] == then for now, then in pairs)


def _is_weight(n: Node) -> bool:
    """A parameter, as it is stored or as the computation sees it: gathered, in low precision."""
    while n.op in ("identity", "cast"):
        (n,) = n.srcs
    return n.op == "param" or n.role is Role.USED  # which another block has gathered


def _free(used: Mapping[str, str], letter: str, ring: tuple[str, str] | None, axis: str) -> bool:
    """True if `axis` may split `letter` in addition."""
    return axis not in used or (ring is not None and {used[axis], letter} == set(ring))
