"""Axes: the indices that the dims of all values consist of.

A view from [B, S, A*D] to [B, S, A, D] splits the last dim in two, in the value and in the
parameter that made it. Once all views are applied to the axes, no view remains: every value is a
list of axes, and reordering or joining them is no work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from stagewright.algebra.size import Size, is_whole, product, size
from stagewright.errors import UserError
from stagewright.imports.ops import LEAVES, Label, OpCall
from stagewright.imports.recording import Extent

_ONE = size(1)


def _quotient(a: Size, b: Size) -> Size:
    return _ONE if a is b else a / b


def _divides(b: Size, a: Size) -> bool:
    """True if `a` is a multiple of `b` for all values of the symbols."""
    try:
        return a is b or is_whole(a / b)
    except ValueError:  # a sum divides nothing exactly but itself
        return False


class Axis:
    """Index of values: its extent, and the axes that it was split into."""

    __slots__ = ("extent", "parents", "parts", "same_as")

    def __init__(self, extent: Size) -> None:
        """A new axis, equal to no other."""
        self.extent = extent
        self.same_as: Axis | None = None
        self.parts: list[Axis] = []
        self.parents: list[Axis] = []

    def root(self) -> Axis:
        """The representative of all axes that are equal to this one."""
        at = self
        while at.same_as is not None:
            at = at.same_as
        return at

    def leaves(self) -> list[Axis]:
        """The axes that this one was split into, outermost first; itself if it was not split."""
        at = self.root()
        return [leaf for part in at.parts for leaf in part.leaves()] if at.parts else [at]

    def enclosing(self) -> list[Axis]:
        """The axis and all axes that it is a part of."""
        axes: dict[Axis, None] = {}
        pending = [self.root()]
        while pending:
            axis = pending.pop().root()
            if axis not in axes:
                axes[axis] = None
                pending += axis.parents
        return [*axes]


Dims = list[list[Axis]]


class AxisTable:
    """The dims of all values of a model, in axes."""

    def __init__(self, sizes: Mapping[str, str], examples: Mapping[str, int]) -> None:
        """`sizes`: names for the symbols of the recording, such as B for `s72`; `examples`: the
        numbers that names other than those of a run stand for."""
        self.sizes, self.examples = sizes, examples
        self.dims: dict[str, Dims] = {}
        self.copies: dict[str, set[Axis]] = {}
        """Axes along which a value repeats one copy (`expand`)."""
        self.base: dict[str, str] = {}
        """The value that each view shows."""
        self.labels: dict[str, dict[Label, list[Axis]]] = {}

    def extent(self, extent: Extent, call: OpCall) -> Size:
        """The size of a dim of a call's result."""
        if isinstance(extent, int):
            return size(extent)
        try:
            return size(extent).subs(self.sizes)
        except ValueError:
            raise UserError(
                f"{call.where}: {_kind(call)} of {len(call.shape)} dims has one of "
                f"{self._named(extent)}, which is no size here; keep all sizes of the example "
                "(--static, static=True)"
            ) from None

    def _named(self, expression: str) -> str:
        """An expression of the trace with the names of its symbols."""
        return re.sub(r"[a-z]\w*", lambda match: self.sizes.get(match[0], match[0]), expression)

    # ---- relations -----------------------------------------------------------------------------

    def _refine(self, whole: Axis, first: Size) -> tuple[Axis, Axis]:
        """Split an axis in two; the outer one has the extent `first`."""
        outer, inner = Axis(first), Axis(_quotient(whole.extent, first))
        whole.parts = [outer, inner]
        outer.parents.append(whole)
        inner.parents.append(whole)
        return outer, inner

    def _join(self, a: Axis, b: Axis) -> None:
        a, b = a.root(), b.root()
        if a is not b:
            a.same_as = b
            b.parents += a.parents

    def unify(self, a: Iterable[Axis], b: Iterable[Axis]) -> bool:
        """Make two lists of axes the same; False where their extents have no common refinement."""
        left = [leaf for axis in a for leaf in axis.leaves()]
        right = [leaf for axis in b for leaf in axis.leaves()]
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x is y:
                continue
            if x.extent is y.extent:
                self._join(x, y)
            elif _divides(y.extent, x.extent):
                outer, inner = self._refine(x, y.extent)
                self._join(outer, y)
                left.insert(0, inner)
            elif _divides(x.extent, y.extent):
                outer, inner = self._refine(y, x.extent)
                self._join(outer, x)
                right.insert(0, inner)
            else:
                return False
        return not left and not right

    # ---- calls ---------------------------------------------------------------------------------

    def add(self, call: OpCall) -> None:
        """Give a call's value its dims, from those of its operands."""
        shape = [self.extent(n, call) for n in call.shape]
        if call.op in LEAVES:
            self.dims[call.name] = [[] if n is _ONE else [Axis(n)] for n in shape]
        elif call.op == "reshape":
            self._reshape(call, shape)
        else:
            self._labelled(call, shape)

    def _reshape(self, call: OpCall, shape: Sequence[Size]) -> None:
        """Split and join dims, in order."""
        (source,) = call.operands
        copies = self.copies.get(source, set())
        leaves = [
            (leaf, axis in copies)
            for dim in self.dims[source]
            for axis in dim
            for leaf in axis.leaves()
        ]
        dims: Dims = []
        repeated = set[Axis]()

        def view_of(leaf: Axis, copied: bool) -> Axis:
            """The leaf; a separate axis for one that is only repeated."""
            if not copied:
                return leaf
            view = Axis(leaf.extent)
            view.same_as = leaf
            repeated.add(view)
            return view

        for extent in shape:
            dim: list[Axis] = []
            remaining = extent
            while remaining is not _ONE:
                if not leaves:
                    raise self._mixed(call)
                leaf, copied = leaves.pop(0)
                if _divides(leaf.extent, remaining):
                    dim.append(view_of(leaf, copied))
                    remaining = _quotient(remaining, leaf.extent)
                elif _divides(remaining, leaf.extent):
                    outer, inner = self._refine(leaf, remaining)
                    dim.append(view_of(outer, copied))
                    leaves.insert(0, (inner, copied))
                    remaining = _ONE
                else:
                    raise self._mixed(call)
            dims.append(dim)
        self._show(call, source, dims)
        self.copies[call.name] = repeated

    def _mixed(self, call: OpCall) -> UserError:
        return UserError(
            f"{call.where}: a view to {list(call.shape)} cuts across "
            "dims; keep them apart in the module"
        )

    def base_of(self, name: str) -> str:
        """The value that a view shows; the value itself where it is none."""
        return self.base.get(name, name)

    def _show(self, call: OpCall, source: str, made: Dims) -> None:
        self.dims[call.name] = made
        self.base[call.name] = self.base_of(source)
        self.copies[call.name] = set(self.copies.get(source, ()))

    def _labelled(self, call: OpCall, shape: Sequence[Size]) -> None:
        """Dims by their labels: equal labels are equal axes."""
        axes_of: dict[Label, list[Axis]] = {}
        for name, labels in zip(call.operands, call.ins, strict=True):
            for label, dim in zip(labels, self.dims[name], strict=True):
                if not dim:
                    continue
                if label in axes_of and not self.unify(axes_of[label], dim):
                    raise self._mixed(call)
                axes_of.setdefault(label, dim)
        dims: Dims = []
        fresh = set[Axis]()
        for label, extent in zip(call.out, shape, strict=True):
            if extent is _ONE:
                dims.append([])
                continue
            if label not in axes_of:
                axes_of[label] = [Axis(extent)]
                fresh |= {*axes_of[label]}
            dims.append(axes_of[label])
        if call.op == "view":
            (source,) = call.operands
            self._show(call, source, dims)
            self.copies[call.name] |= fresh
            return
        self.dims[call.name] = dims
        self.labels[call.name] = axes_of

    # ---- units ---------------------------------------------------------------------------------

    def leaves_of(self, name: str) -> list[Axis]:
        """The leaves of a value, in order, without those that are only repeated."""
        copies = self.copies.get(name, set())
        return [
            leaf
            for dim in self.dims[name]
            for axis in dim
            if axis not in copies
            for leaf in axis.leaves()
        ]

    def label_leaves(self, call: str, label: Label) -> list[Axis]:
        """The leaves of one label of a call."""
        return [leaf for axis in self.labels[call].get(label, ()) for leaf in axis.leaves()]

    def separate_axes(self, calls: Iterable[OpCall]) -> set[Axis]:
        """Axes of which some call reads only a part, so that their leaves stay separate."""
        separate = set[Axis]()
        for call in calls:
            if not call.is_statement:
                continue
            labels = {x for labels in (*call.ins, call.out) for x in labels}
            label_leaves = {x: self.label_leaves(call.name, x) for x in labels}
            values = [{*self.leaves_of(name)} for name in (*call.operands, call.name)]
            for leaves in label_leaves.values():
                label_set = {*leaves}
                for axis in {w for leaf in leaves for w in leaf.enclosing()}:
                    parts = {*axis.leaves()}
                    if not parts <= label_set and any(parts <= value for value in values):
                        separate.add(axis)
        return separate

    def units(self, leaves: Sequence[Axis], separate: set[Axis]) -> list[Axis]:
        """Group leaves into the largest axes that no call splits."""
        units: list[Axis] = []
        i = 0
        while i < len(leaves):
            largest, length = leaves[i], 1
            for axis in leaves[i].enclosing():
                parts = axis.leaves()
                if (
                    axis not in separate
                    and len(parts) > length
                    and [*leaves[i : i + len(parts)]] == parts
                ):
                    largest, length = axis, len(parts)
            units.append(largest)
            i += length
        return units


def _kind(call: OpCall) -> str:
    return {"input": "an input", "constant": "a constant"}.get(call.op, "a value")


def extent_of(axes: Iterable[Axis]) -> Size:
    """The product of the extents of axes."""
    return product(axis.extent for axis in axes)
