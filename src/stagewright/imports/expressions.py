"""Index expressions of calls, such as `bsm,mf->bsf`: a letter for each axis, in memory order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stagewright.imports.axes import Axis, AxisTable
from stagewright.imports.ops import Label, OpCall

LabelledAxis = tuple[Label, Axis]
"""An axis of an operand, with the label of the call that it belongs to."""


class CallSpec(NamedTuple):
    """The index expression of a call, with what the text and the layout need besides."""

    text: str
    letters: Mapping[str, Axis]
    """Letters of the result that no operand shows."""
    plain: bool
    """True if all operands and the result have the same axes, all of which may be split."""


class Layouts:
    """Memory order of the axes of each value; views have that of the value that they show."""

    def __init__(self, axes: AxisTable, separate: set[Axis]) -> None:
        """`separate`: axes of which some call reads only a part."""
        self.axes, self.separate = axes, separate
        self.order: dict[str, tuple[Axis, ...]] = {}
        self.merged: set[Axis] = set()
        """Axes that join several adjacent dims; their size is a product."""

    def of(self, name: str) -> tuple[Axis, ...]:
        """The axes of a value in memory order."""
        base = self.axes.base_of(name)
        if base not in self.order:
            self.order[base] = tuple(self.axes.leaves_of(base))
        return tuple(leaf for known in self.order[base] for leaf in known.leaves())

    def units(self, leaves: Sequence[Axis]) -> list[Axis]:
        """Leaves grouped into the largest axes that no call splits."""
        return self.axes.units(leaves, self.separate)

    def operand_axes(self, call: OpCall, operand: int) -> list[LabelledAxis]:
        """The axes of an operand in memory order, each with its label."""
        name, labels = call.operands[operand], call.ins[operand]
        copies = self.axes.copies.get(name, set())
        by_label: list[LabelledAxis] = [
            (label, leaf)
            for label, dim in zip(labels, self.axes.dims[name], strict=True)
            for axis in dim
            if axis not in copies
            for leaf in axis.leaves()
        ]
        ordered: list[LabelledAxis] = []
        for leaf in self.of(name):
            index = next((i for i, (_, x) in enumerate(by_label) if x is leaf), None)
            if index is not None:
                ordered.append(by_label.pop(index))
        return [*ordered, *by_label]

    def result_axes(self, call: OpCall) -> list[LabelledAxis]:
        """The axes of the result with their labels, in the order of the operands."""
        labels = dict.fromkeys(call.out)
        axes: list[LabelledAxis] = [
            (x, leaf) for x in labels for leaf in self.axes.label_leaves(call.name, x)
        ]
        ordered: list[LabelledAxis] = []
        for i in range(len(call.operands)):
            operand = self.operand_axes(call, i)
            if call.op in ("join", "conv", "opaque"):
                return axes
            if call.op == "slice":
                return _changed(operand, axes)
            ordered += [p for p in operand if p in axes and p not in ordered]
        return [*ordered, *(p for p in axes if p not in ordered)]


def _changed(places: Sequence[LabelledAxis], wanted: Sequence[LabelledAxis]) -> list[LabelledAxis]:
    """The axes of an operand in the result; new axes take the position of those they replace."""
    added: list[LabelledAxis] = [p for p in wanted if p not in places]
    result: list[LabelledAxis] = []
    for place in places:
        if place in wanted:
            result.append(place)
        elif added:
            label: Label = added[0][0]
            result += [p for p in added if p[0] == label]
            added = [p for p in added if p[0] != label]
    return [*result, *added]


ATTENTION = {"q": "q", "k": "k", "d": "d", "v": "v", 0: "b"}
"""The letters of attention's labels but for heads: the op's costs go by letters."""


class Letters:
    """The letters of one call."""

    def __init__(self, layouts: Layouts, call: OpCall, names: Mapping[Axis, str]) -> None:
        """`names`: of units, as sizes; their first letters are taken where they are free."""
        self.layouts, self.call, self.names = layouts, call, names
        self.letters: dict[tuple[Label, Axis], str] = {}
        self.unit_sets: dict[Label, set[tuple[Axis, ...]]] = {}

    def term(self, places: Sequence[LabelledAxis], unsplit: frozenset[Label]) -> str:
        """One operand of the index expression."""
        units = self.layouts.units([leaf for _, leaf in places])
        text, position = "", 0
        for unit in units:
            leaves = unit.leaves()
            label = places[position][0]
            position += len(leaves)
            axes = [unit] if self._together(label, unit) else leaves
            part = "".join(self._letter(label, each) for each in axes)
            part = part.upper() if label in unsplit else part
            text += f"({part})" if len(part) > 1 else part
        return text

    def add_units(self, places: Sequence[LabelledAxis]) -> None:
        """Record the units in which an operand has each label."""
        position = 0
        for unit in self.layouts.units([leaf for _, leaf in places]):
            leaves = tuple(unit.leaves())
            self.unit_sets.setdefault(places[position][0], set()).add(leaves)
            position += len(leaves)

    def _together(self, label: Label, unit: Axis) -> bool:
        """True if no operand has only a part of the unit under this label."""
        leaves = {*unit.leaves()}
        unit_sets = self.unit_sets.get(label, set())
        return not any({*piece} < leaves for piece in unit_sets)

    def _letter(self, label: Label, axis: Axis) -> str:
        axis = axis.root()
        key = (label, axis)
        if key not in self.letters:
            self.letters[key] = self._free(label, axis)
        return self.letters[key]

    def _free(self, label: Label, axis: Axis) -> str:
        taken = set(self.letters.values())
        if self.call.op == "attention":
            if label == "v":
                same = [
                    x
                    for (of, a), x in self.letters.items()
                    if of == "d" and a.extent is axis.extent and a not in self.layouts.merged
                ]
                if same:
                    return same[0]
            if label == "h":
                wide = len({len(p) for p in self.unit_sets["h"]}) > 1
                return next(x for x in ("gr" if wide else "a") + "hn" if x not in taken)
            if ATTENTION.get(label, "") not in ("", *taken):
                return ATTENTION[label]
            taken |= {*"qkjtdviz"}  # letters that mean positions and widths (graph/table.py)
        wish = (self.names.get(axis) or str(axis.extent))[:1].lower()
        if wish and wish.isalpha() and wish not in taken:
            return wish
        return next(x for x in "zyxwvutnpqrklijohgfcae" + "bsmd" if x not in taken)


def spec_of(layouts: Layouts, call: OpCall, names: Mapping[Axis, str]) -> CallSpec:
    """The index expression of a call; records the memory order of its result."""
    terms = [layouts.operand_axes(call, i) for i in range(len(call.operands))]
    result = layouts.result_axes(call)
    letters = Letters(layouts, call, names)
    for places in (*terms, result):
        letters.add_units(places)
    inputs = [letters.term(places, call.unsplit) for places in terms]
    out = letters.term(result, call.unsplit)
    layouts.order[call.name] = tuple(leaf for _, leaf in result)
    input_letters = {x.lower() for term in inputs for x in term}
    new_letters = {
        x: axis
        for (_, axis), x in letters.letters.items()
        if x in out.lower() and x not in input_letters
    }
    plain = all(term == out for term in inputs) and out.islower()
    return CallSpec(f"{','.join(inputs)}->{out}", new_letters, plain)
