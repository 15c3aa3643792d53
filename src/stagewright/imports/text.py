"""The text of a `.stg` file for a folded forward pass: a module for each kind of piece, and the
model."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.algebra.size import Size, product, size
from stagewright.errors import UserError
from stagewright.imports.axes import Axis, AxisTable
from stagewright.imports.calls import Label, OpCall
from stagewright.imports.fold import Piece
from stagewright.imports.placement import PlacementRules
from stagewright.imports.specs import Layouts, spec_of
from stagewright.imports.words import (
    dtype_text,
    input_name,
    layer_path,
    short_name,
    spec_text,
    usual_spec,
    value_text,
)

RESERVED = frozenset({"module", "model", "size", "input", "param", "output", "scope", "shared"})
LAST = ("norm", "softmax", "rope")
"""Ops over the last dim."""
IMPLIED = frozenset(
    {"act", "glu", "add", "scale", "shift", "cast", "times", "random_mask", "dropout"}
)
"""Element-wise ops, whose index expression a text need not say where operands have one shape."""


@dataclass(slots=True)
class Model:
    """What all modules of a text share."""

    axes: AxisTable
    layouts: Layouts
    placement: PlacementRules
    leaves: Mapping[str, OpCall]
    sizes: dict[Axis, str]
    """Names of units as sizes of the model."""
    shared: frozenset[str]
    """Parameters of several modules."""
    handed: frozenset[str]
    dtype: str
    """The data type of most parameters, which stands for that of the run."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Of values and parameters that modules share, in the text."""
    own_sizes: dict[str, Size] = field(default_factory=dict[str, Size])


class Writer:
    """Writes one module."""

    def __init__(self, model: Model, piece: Piece, name: str, calls: Sequence[OpCall]) -> None:
        """`calls` are those of the piece, without views."""
        self.model, self.piece, self.name, self.calls = model, piece, name, calls
        self.dtypes = {call.name: call.dtype for call in calls}
        self.lines: list[str] = []
        self.body: list[str] = []
        self.names: dict[str, str] = {}
        self.taken = set[str]()
        self.sizes: dict[str, Size] = {}
        self.scope = ""
        prefixes = [call.path for call in calls if re.search(r"\.\d+", call.path)]
        self.prefix = layer_path(prefixes) if piece.layer else ""

    # ---- names and sizes -----------------------------------------------------------------------

    def fresh(self, wish: str) -> str:
        """A name that nothing else in the module has."""
        wish = re.sub(r"\W+", "_", wish).strip("_") or "value"
        wish = f"_{wish}" if wish[0].isdigit() else wish
        wish = f"{wish}_" if wish in RESERVED or keyword.iskeyword(wish) else wish
        name, n = wish, 1
        while name in self.taken:
            n += 1
            name = f"{wish}_{n}"
        self.taken.add(name)
        return name

    def size(self, unit: Axis) -> str:
        """A unit's size in the text; a number gets a name of its own."""
        known = self.model.sizes.get(unit.known())
        if known:
            return known
        parts = unit.leaves()
        named = [self.model.sizes.get(p) for p in parts]
        if unit.extent.symbols:
            own = self.model.axes.examples
            self.sizes |= {str(s): size(own[str(s)]) for s in unit.extent.symbols if str(s) in own}
            return str(unit.extent)
        if len(parts) > 1 and all(named):
            return "*".join(map(str, named))
        name = f"N{unit.extent}"
        self.sizes[name] = unit.extent
        return name

    def shape(self, leaves: Sequence[Axis], *, degrees: bool) -> str:
        """`[M, A/tp, D]`."""
        dims: list[str] = []
        for unit in self.model.layouts.units(leaves):
            text = self.size(unit)
            degree = self.model.placement.of(unit) if degrees else ""
            if any("/tp" in dim for dim in dims):  # one dim of a parameter is split by tp
                degree = ""
            if not degrees and text == "B" and not dims:
                degree = "dp"
            dims.append(f"{text}/{degree}" if degree else text)
        return f"[{', '.join(dims) or '1'}]"

    # ---- values --------------------------------------------------------------------------------

    def value(self, name: str) -> str:
        """How the text calls a value; parameters and inputs are declared when first read."""
        base = self.model.axes.base.get(name, name)
        if base in self.names:
            return self.names[base]
        leaf = self.model.leaves.get(base)
        if base in self.model.handed or leaf is None:
            shown = self.model.names.setdefault(base, self.fresh("memory"))
            self.taken.add(shown)
            layout = self.shape(self.model.layouts.of(base), degrees=False)
            self.lines.append(f"input {shown}{layout}")
            self.names[base] = shown
        elif leaf.op == "param":
            shown = self.names[base] = self._parameter(leaf)
        else:
            wish = input_name(leaf)
            shown = self.names[base] = self.fresh(wish)
            dtype = dtype_text(leaf.dtype, self.model.dtype)
            layout = self.shape(self.model.layouts.of(base), degrees=False)
            self.lines.append(f"input {shown}{layout}{' ' + dtype if dtype else ''}")
        if leaf is not None and not self.model.layouts.of(base):  # a leaf of a text has dims
            one = self.names[base] = self.fresh(f"{shown}_value")
            self.body.append(f"{one} = sum[a->]({shown})")
        return self.names[base]

    def _parameter(self, leaf: OpCall) -> str:
        if leaf.name in self.model.shared:
            shown = self.model.names.setdefault(leaf.name, short_name(leaf.path, ""))
            self.taken.add(shown)
            shared = " shared"
        else:
            shown, shared = self.fresh(short_name(leaf.path, self.prefix)), ""
        layout = self.shape(self.model.layouts.of(leaf.name), degrees=True)
        self.body.append(f"param {shown}{layout}{shared}")
        return shown

    def _dtype(self, name: str) -> str:
        """The data type of a value; of what comes in, that of the parameters."""
        base = self.model.axes.base.get(name, name)
        leaf = self.model.leaves.get(base)
        return leaf.dtype if leaf is not None else self.dtypes.get(base, self.model.dtype)

    # ---- statements ----------------------------------------------------------------------------

    def write(self, number: int) -> str:
        """The module's text."""
        if number:
            layout = self.shape(self.model.layouts.of(self.piece.reads), degrees=False)
            self.names[self.model.axes.base.get(self.piece.reads, self.piece.reads)] = "x"
            self.taken.add("x")
            self.lines.append(f"input x{layout}")
        last = len(self.calls) - 1
        for i, call in enumerate(self.calls):
            self._statement(call, is_last=i == last)
        hands = [self.names[n] for n in self.names if n in self.model.handed and self._makes(n)]
        result = self.value(self.piece.yields)
        sizes = [f"size {name} = {value}" for name, value in self.sizes.items()]
        output = f"output {', '.join([result, *hands])}"
        return "\n".join([f"module {self.name}", *sizes, *self.lines, *self.body, output])

    def _makes(self, name: str) -> bool:
        return any(call.name == name for call in self.calls)

    def _statement(self, call: OpCall, *, is_last: bool) -> None:
        start = len(self.body)
        call = self._turned(call) if call.op in LAST else call
        call = self._merged(call) if call.op in ("join", "slice", "attention") else call
        spec = spec_of(self.model.layouts, call, self.model.sizes)
        text = self._text(call, spec)
        scope = self._scope(call)
        if call.name in self.model.handed:
            name = self.model.names.setdefault(call.name, self.fresh("memory"))
            self.taken.add(name)
        else:
            name = self.fresh(self._wish(call))
        if self._is_branch(call):
            text = f"at[branch]({text})"
        if call.op == "attention":
            text = f"at[context]({text})"
        self.names[call.name] = name
        where = f"  # {call.source}" if call.source and call.op == "opaque" else ""
        self.body.append(f"{name} = {text}{where}")
        if scope != self.scope:
            self.body.insert(start, f"scope {scope or self.name}")
            self.scope = scope

    def _turned(self, call: OpCall) -> OpCall:
        """The call on an operand whose last axes are those that the op needs whole."""
        layouts = self.model.layouts
        places = layouts.places(call, 0)
        turned = sorted(places, key=lambda place: place[0] in call.whole)
        if turned == places:
            return call
        (first, *others), axes = call.operands, self.model.axes
        name = f"{first}.turned"
        axes.dims[name] = axes.dims[first]
        layouts.order[name] = tuple(leaf for _, leaf in turned)
        letters = dict(zip(places, "bcdefghijklmnop", strict=False))
        spec = "->".join("".join(letters[p] for p in of) for of in (places, turned))
        self.names[name] = self.fresh("turned")
        self.body.append(f"{self.names[name]} = sum[{spec}]({self.value(first)})")
        return replace(call, operands=(name, *others))

    def _merged(self, call: OpCall) -> OpCall:
        """The call on operands of which each dim that the op takes as one is one axis.

        Of a join or a part that is the dim along which it goes; of attention the positions of keys,
        and the width of queries and keys.
        """
        if call.op != "attention":
            for i, labels in enumerate(call.ins):
                call = self._merged_dim(call, i, labels[int(call.attrs["dim"])], {})
            return call
        made: dict[Label, Axis] = {}
        for i in range(len(call.operands)):
            for label in ("k", "d"):
                call = self._merged_dim(call, i, label, made)
        for label, what in (("v", "width of values"), ("q", "positions of causal queries")):
            places = self.model.layouts.places(call, 2 if label == "v" else 0)
            several = len(self.model.layouts.units([leaf for x, leaf in places if x == label])) > 1
            if several and (label == "v" or call.attrs.get("causal")):
                raise UserError(
                    f"{call.source or call.path or call.name}: the {what} of attention is several "
                    "dims, which other operations take apart; wanted one dim throughout the module"
                )
        return call

    def _merged_dim(self, call: OpCall, i: int, label: Label, made: dict[Label, Axis]) -> OpCall:
        """The call with one axis for a label of an operand; `made`: those of other operands."""
        axes, layouts, operand = self.model.axes, self.model.layouts, call.operands[i]
        places = layouts.places(call, i)
        own = [leaf for x, leaf in places if x == label]
        if len(layouts.units(own)) < 2:
            return call
        merged = made.setdefault(label, Axis(product(a.extent for a in own)))
        layouts.merged.add(merged)
        at, name = call.ins[i].index(label), f"{operand}.merged{i}{label}"
        axes.dims[name] = [[merged] if n == at else dim for n, dim in enumerate(axes.dims[operand])]
        axes.labels[call.name] = {**axes.labels[call.name], label: [merged]}
        kept = [place for place in places if place[0] != label]
        letters = dict(zip(places, "abcdefghijklmnop", strict=False))
        inside = "".join(letters[p] for p in places if p[0] == label)
        outside = [letters[p] for p in kept]
        place = len(kept) if call.op != "attention" else places.index((label, own[0]))
        left, right = ([leaf for _, leaf in of] for of in (kept[:place], kept[place:]))
        layouts.order[name] = (*left, merged, *right)
        outside.insert(place, f"({inside})")
        self.names[name] = self.fresh("merged")
        spec = f"{''.join(letters.values())}->{''.join(outside)}"
        self.body.append(f"{self.names[name]} = sum[{spec}]({self.value(operand)})")
        operands = tuple(name if n == i else o for n, o in enumerate(call.operands))
        return replace(call, operands=operands)

    def _scope(self, call: OpCall) -> str:
        """The part of a layer: with attention in it, or a feed-forward."""
        if not self.piece.layer:
            return ""
        at = next(i for i, each in enumerate(self.calls) if each.name == call.name)
        cores = [i for i, c in enumerate(self.calls) if c.op == "attention"]
        if not cores:
            return "mlp" if any(c.op in ("glu", "experts") for c in self.calls) else ""
        return "attention" if at <= self._end_of_attention(cores[-1]) else "mlp"

    def _end_of_attention(self, core: int) -> int:
        """The sum with the residual stream behind the core."""
        for i in range(core, len(self.calls)):
            if self.calls[i].op == "add":
                return i
        return core

    def _wish(self, call: OpCall) -> str:
        if call.op in ("glu", "act", "attention", "cross_entropy", "softmax"):
            return {"cross_entropy": "loss", "glu": "gated"}.get(call.op, call.op)
        words = [w for w in call.path.split(".") if w and not w.isdigit()]
        if call.op == "rope":
            return f"{self.value(call.operands[0])}_rope"
        own = call.path.removeprefix(self.prefix).strip(".")
        if call.op in ("einsum", "norm", "rope", "embedding", "conv", "experts"):
            return words[-1] if words and own else call.op
        return {"add": "sum", "times": "product", "opaque": str(call.attrs.get("fn"))}.get(
            call.op, call.op
        )

    def _is_branch(self, call: OpCall) -> bool:
        """Whether ranks of tp have partial sums here that are summed into the stream."""
        if (
            not self._partial(call)
            or len(self.model.layouts.units(self.model.layouts.of(call.name))) != 3
        ):
            return False
        users = [c for c in self.calls if call.name in _bases(self.model.axes, c)]
        return not (len(users) == 1 and self._partial(users[0]))

    def _partial(self, call: OpCall) -> bool:
        if call.op == "add":
            made = {c.name: c for c in self.calls}
            operands = [made.get(n) for n in _bases(self.model.axes, call)]
            return all(o is not None and self._partial(o) for o in operands)
        return self.model.placement.row_parallel(call)

    def _text(self, call: OpCall, spec: Any) -> str:
        if call.op == "experts":
            self.model.fields.update(call.attrs)
            said = {
                k.removeprefix("_"): v for k, v in call.attrs.items() if k.startswith("_") and v
            }
            words = ", ".join(f"{k}={v}" for k, v in said.items())
            return f"experts{f'[{words}]' if words else ''}({self.value(call.operands[0])})"
        operands = [self.value(n) for n in call.operands]
        op, attrs = call.op, dict(call.attrs)
        if op == "cross_entropy":
            return f"cross_entropy({', '.join(operands)})"
        if op == "add" and not spec.plain:
            return self._broadcast_sum(call, spec, operands)
        if op == "slice":
            return self._slice(call, spec, operands[0])
        if op == "norm" and attrs.get("fn") == "rmsnorm":
            attrs.pop("fn")
        if not attrs.get("window"):
            attrs.pop("window", None)
        if op == "cast":
            attrs["dtype"] = dtype_text(call.dtype, "") or "fp32"
        elif op == "random_mask":
            attrs["dtype"] = "uint8"
        elif op == "opaque" and self._dtype(call.operands[0]) != call.dtype:
            attrs["dtype"] = dtype_text(call.dtype, "")
        words = [f"{x.upper()}={self.size(axis)}" for x, axis in spec.letters.items()]
        said = {k: v for k, v in attrs.items() if v not in (None, False) or k in ("causal", "dim")}
        words += [f"{k}={value_text(v)}" for k, v in said.items()]
        shown = "" if spec.plain and op in IMPLIED else spec.text
        if usual_spec(op, spec.text):
            shown = ""
        text = spec_text(shown, spec.letters, words)
        return f"{op}{text}({', '.join(operands)})"

    def _broadcast_sum(self, call: OpCall, spec: Any, operands: Sequence[str]) -> str:
        """A value plus another that lacks some of its dims."""
        terms, out = spec.text.split("->")
        parts = terms.split(",")
        if parts[1] == out and parts[0] != out:
            parts, operands = parts[::-1], operands[::-1]
        if parts[0] != out:
            self.model.fields.setdefault("_outer", []).append(call.name)
            how = "fn=outer_sum"
            if self._dtype(call.operands[0]) != call.dtype:
                how += f", dtype={dtype_text(call.dtype, '')}"
            return f"opaque[{spec.text}; {how}]({', '.join(operands)})"
        return f"bias[{parts[0]},{parts[1]}->{out}]({', '.join(operands)})"

    def _slice(self, call: OpCall, spec: Any, operand: str) -> str:
        """The elements of a dim from somewhere: as the first, or the last, or the last of the
        first."""
        dim, start = int(call.attrs["dim"]), int(call.attrs["start"])
        places = self.model.layouts.places(call, 0)
        label = call.ins[0][dim]
        at = [i for i, (x, _) in enumerate(places) if x == label]
        extent = product(a.extent for x, a in places if x == label)
        width = product(a.extent for a in self.model.axes.label(call.name, "p"))
        units = self.model.layouts.units([leaf for _, leaf in places])
        before = len(units[: at[0]]) if at else 0
        letters = dict(spec.letters)
        words = [f"{x.upper()}={self.size(axis)}" for x, axis in letters.items()]
        if start == 0:
            words += ["dim=" + str(before), "first=true"]
            return f"part{spec_text(spec.text, letters, words)}({operand})"
        total = extent.value({}) if not extent.symbols else None
        if total is not None and not width.symbols and start + width.value({}) < total:
            whole = spec.text.split("->")[0]
            low = next(c for c in whole.split(",")[0] if c.isupper())
            kept = next(c for c in "XYWKJ" if c.lower() not in spec.text.lower())
            name = f"N{start + width.value({})}"
            self.sizes[name] = extent - (total - start - width.value({}))
            head = whole.replace(low, kept)
            first = f"part[{whole}->{head}; {kept}={name}, dim={before}, first=true]({operand})"
            rest = spec.text.replace(low, kept, 1)
            words += ["dim=" + str(before), "first=false"]
            return f"part{spec_text(rest, letters, words)}({first})"
        words += ["dim=" + str(before), "first=false"]
        return f"part{spec_text(spec.text, letters, words)}({operand})"


def _bases(axes: AxisTable, call: OpCall) -> list[str]:
    return [axes.base.get(n, n) for n in call.operands]
