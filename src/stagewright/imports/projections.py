"""Splits fused projections: a product that is only read in slices becomes one product a slice.

A fused projection of queries, keys and values becomes three, so that each has separate dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagewright.algebra.size import size
from stagewright.imports.axes import Axis, AxisTable, extent_of
from stagewright.imports.layers import Section
from stagewright.imports.ops import OpCall


class ProjectionSplitter:
    """Splits fused projections; adds the parts of their parameters to `leaves`."""

    def __init__(self, axes: AxisTable, leaves: dict[str, OpCall]) -> None:
        """Split by the axes of a model."""
        self.axes, self.leaves = axes, leaves

    def calls(self, section: Section) -> list[OpCall]:
        """The section's calls without views; a product that is only read in parts is several."""
        calls = [call for call in section.calls if call.is_statement]
        readers: dict[str, list[OpCall]] = {}
        for call in calls:
            for name in call.operands:
                readers.setdefault(self.axes.base_of(name), []).append(call)
        by_name = {call.name: call for call in calls}
        replaced: dict[str, list[OpCall]] = {}
        dropped = set[str]()
        for name, users in readers.items():
            product_ = self._product_of(by_name, readers, name)
            if product_ is None or not all(u.op == "slice" for u in users):
                continue
            labels = {
                tuple(self.axes.label_leaves(u.name, u.ins[0][int(u.attrs["dim"])])) for u in users
            }
            if len(labels) != 1 or name == section.yields:
                continue
            (sliced,) = labels
            product, bias = product_
            if not {*sliced} <= {*self.axes.label_leaves(product.name, "o")}:
                continue
            if not _all_of_it(users, self.axes):
                continue
            for user in users:
                replaced[user.name] = self._part_of_product(user, product, bias, sliced)
            dropped |= {name, product.name}
        return [
            new
            for call in calls
            if call.name not in dropped
            for new in replaced.get(call.name, [call])
        ]

    def _product_of(
        self, by_name: Mapping[str, OpCall], readers: Mapping[str, list[OpCall]], name: str
    ) -> tuple[OpCall, str] | None:
        """The product with a parameter that makes a value, and its bias."""
        call, bias = by_name.get(name), ""
        if call is not None and call.op == "add" and len(call.operands) == 2:
            bias = self.axes.base_of(call.operands[1])
            if bias not in self.leaves or self.leaves[bias].op != "param":
                return None
            source = self.axes.base_of(call.operands[0])
            if len(readers.get(source, ())) != 1:
                return None
            call = by_name.get(source)
        if call is None or call.op != "einsum" or "o" not in call.out:
            return None
        weight = self.axes.base_of(call.operands[1])
        is_parameter = weight in self.leaves and self.leaves[weight].op == "param"
        return (call, bias) if is_parameter else None

    def _part_of_product(
        self, user: OpCall, product: OpCall, bias: str, sliced: Sequence[Axis]
    ) -> list[OpCall]:
        """The product that makes one slice, from its part of the parameter."""
        part = self.axes.label_leaves(user.name, "p")
        outward: list[Axis] = []
        for leaf in self.axes.label_leaves(product.name, "o"):
            if leaf in sliced:
                outward += part if leaf is sliced[0] else []
            else:
                outward.append(leaf)
        start = int(user.attrs["start"])
        dims = {"o": outward}
        weight_dims = [
            dims.get(str(x), self.axes.label_leaves(product.name, x)) for x in product.ins[1]
        ]
        weight = self._piece_of(product.operands[1], start, weight_dims)
        name = f"{user.name}.product" if bias else user.name
        part_product = replace(
            product, name=name, shape=user.shape, operands=(product.operands[0], weight),
            attrs={**product.attrs, "fused": _named(product.path)},
        )  # fmt: skip
        self.axes.labels[name] = {**self.axes.labels[product.name], "o": outward}
        if not bias:
            return [part_product]
        lead = [x for x in product.out if x != "o"]
        self.axes.dims[name] = [
            *(self.axes.label_leaves(product.name, x) for x in lead), outward,
        ]  # fmt: skip
        part_of_bias = self._piece_of(bias, start, [outward])
        total = replace(
            user, op="add", operands=(name, part_of_bias), ins=((*lead, "o"), ("o",)),
            out=(*lead, "o"), attrs={}, unsplit=frozenset(),
        )  # fmt: skip
        self.axes.labels[user.name] = {**self.axes.labels[name]}
        return [part_product, total]

    def _piece_of(self, name: str, nth: int, dims: list[list[Axis]]) -> str:
        """A parameter that is a part of another."""
        base = self.axes.base_of(name)
        fused = self.leaves[base]
        words = fused.path.split(".")
        path = ".".join([*words[:-1], f"{words[-1]}_{nth}"])
        part = f"{base}#{nth}"
        self.leaves[part] = replace(fused, name=part, path=path)
        self.axes.dims[part] = dims
        return part


def _all_of_it(slices: Sequence[OpCall], axes: AxisTable) -> bool:
    """True if the slices cover a value without overlap."""
    dim = int(slices[0].attrs["dim"])
    parts = {(int(s.attrs["start"]), s.shape[dim]) for s in slices if int(s.attrs["dim"]) == dim}
    end = 0
    for start, width in sorted(parts):
        if start != end or not isinstance(width, int):
            return False
        end += width
    total = extent_of(axes.label_leaves(slices[0].name, slices[0].ins[0][dim]))
    return len({s.attrs["dim"] for s in slices}) == 1 and total is size(end)


def _named(path: str) -> str:
    """A word for a module: the last two of its path that are no numbers."""
    words = [w for w in path.split(".") if not w.isdigit()]
    return "_".join(words[-2:]) or "product"
