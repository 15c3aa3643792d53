"""Placement of an imported model's parameters: the degree that splits each dim.

1. tp splits heads of attention; key heads that several query heads share are split over as many
   ranks of tp as there are key heads (`tp/kv`).
2. tp splits the rows of tables whose indices come from an input, and the scores that a loss reads.
3. tp splits the width between two products with parameters if only element-wise operations are
   between them and neither has heads: columns of the first, rows of the second. Of a chain of
   products every second width is split.
4. Experts are placed by the part `experts` of the text: by ep, and inside an expert by etp.

All other parameters are replicated, but for ZeRO. `--strategy` overrides these rules, as for every
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stagewright.imports.axes import Axis, AxisTable
from stagewright.imports.ops import OpCall

PRODUCTS = ("einsum", "conv")


class PlacementRules:
    """The degrees of the axes of parameters."""

    def __init__(
        self, axes: AxisTable, calls: Sequence[OpCall], leaves: Mapping[str, OpCall]
    ) -> None:
        """`calls` are those of one module of each kind."""
        self.axes, self.calls, self.leaves = axes, calls, leaves
        self.degree: dict[Axis, str] = {}
        self.heads = self._heads()
        self.vocabulary = self._vocabulary()
        self.inner = self._inner()

    def parameter(self, name: str) -> str:
        """The parameter that a value is a view of, or nothing."""
        base = self.axes.base_of(name)
        return base if base in self.leaves and self.leaves[base].op == "param" else ""

    def _heads(self) -> set[Axis]:
        axes = set[Axis]()
        for call in self.calls:
            if call.op != "attention":
                continue
            heads = self.axes.label_leaves(call.name, "h")
            axes |= {*heads}
            keys = [leaf for leaf in heads if leaf in self.axes.leaves_of(call.operands[1])]
            for leaf in heads:
                self.degree[leaf] = "tp"
            if len(keys) < len(heads):
                for leaf in keys:
                    self.degree[leaf] = "tp.kv"
        return axes

    def _vocabulary(self) -> list[Axis]:
        """Axes of table rows and of scores, in the order of the calls."""
        axes: dict[Axis, None] = {}
        for call in self.calls:
            if call.op == "cross_entropy" or (
                call.op == "embedding" and self._follows_input(call.operands[0])
            ):
                axes |= dict.fromkeys(self.axes.label_leaves(call.name, "v"))
        for axis in axes:
            self.degree.setdefault(axis, "tp")
        return [*axes]

    def _follows_input(self, name: str) -> bool:
        """True for an input of the model, and for parts of one and sums with constants."""
        by_name = {call.name: call for call in self.calls}
        source = self.axes.base_of(name)
        while source in by_name and by_name[source].op in ("slice", "add", "shift", "cast"):
            operand = by_name[source].operands[0]
            source = self.axes.base_of(operand)
        return source in self.leaves and self.leaves[source].op == "input"

    def products(self) -> Iterable[tuple[OpCall, list[Axis], list[Axis], list[Axis]]]:
        """Products with a parameter: axes summed over, of the result, and all of the parameter."""
        for call in self.calls:
            if call.op not in PRODUCTS or len(call.operands) != 2:
                continue
            if not self.parameter(call.operands[1]):
                continue
            out = {*call.out}
            of_value = {*call.ins[0]}
            inward = [x for x in call.ins[1] if x not in out and x in of_value]
            outward = [x for x in call.ins[1] if x in out and x not in of_value]
            leaves = [
                [a for x in labels for a in self.axes.label_leaves(call.name, x)]
                for labels in (inward, outward)
            ]
            yield call, leaves[0], leaves[1], self.axes.leaves_of(call.operands[1])

    def _inner(self) -> set[Axis]:
        written, read = set[Axis](), set[Axis]()
        for _, inward, outward, every in self.products():
            if not any(leaf in self.heads or leaf in self.vocabulary for leaf in every):
                written |= {*outward}
                read |= {*inward}
        streams = {leaf for leaf in written & read if self._is_stream(leaf)}
        candidates = (written & read) - streams - self._needed_whole()
        split = set[Axis]()
        for _, inward, outward, _ in self.products():  # of a chain of products every second width
            if split.isdisjoint(inward):
                split |= candidates.intersection(outward)
        for leaf in split:
            self.degree.setdefault(leaf, "tp")
        return split

    def _is_stream(self, leaf: Axis) -> bool:
        """True for an axis of the residual stream: of a norm or an embedding."""
        return any(
            call.op in ("norm", "embedding") and leaf in self.axes.leaves_of(call.name)
            for call in self.calls
        )

    def _needed_whole(self) -> set[Axis]:
        return {
            leaf
            for call in self.calls
            if call.is_statement
            for label in call.unsplit
            for leaf in self.axes.label_leaves(call.name, label)
        }

    def degree_of(self, unit: Axis) -> str:
        """The degree that splits a unit, or nothing."""
        degrees = [self.degree.get(leaf, "") for leaf in unit.leaves()]
        if not degrees or not all(degrees):
            return ""
        return "tp.kv" if set(degrees) == {"tp.kv"} else "tp"

    def row_parallel(self, call: OpCall) -> bool:
        """True if tp splits the dim that a product sums over, so that ranks have partial sums."""
        if call.op not in PRODUCTS or len(call.operands) != 2:
            return False
        out = {*call.out}
        summed = [x for x in call.ins[1] if x not in out]
        leaves = [a for x in summed for a in self.axes.label_leaves(call.name, x)]
        return bool(self.parameter(call.operands[1])) and any(self.degree.get(a) for a in leaves)
