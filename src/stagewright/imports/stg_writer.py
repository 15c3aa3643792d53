"""Writes the text of an imported model: a module for each kind of layer, and their chain."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.algebra.size import Size, product, size
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.imports.axes import Axis, AxisTable
from stagewright.imports.expressions import Layouts, spec_of
from stagewright.imports.layers import Section, Sections
from stagewright.imports.ops import LEAVES, Label, OpCall
from stagewright.imports.placement import PlacementRules
from stagewright.imports.projections import ProjectionSplitter
from stagewright.imports.recording import Recording, first_of

MAX_POSITIONS = 131_072
"""The longest sequence of an imported model, whose code may say none."""


class ModelText:
    """Writes a model: a module for each kind of section, and the model that chains them."""

    def __init__(
        self, calls: Mapping[str, OpCall], sections: Sections, axes: AxisTable, recording: Recording
    ) -> None:
        """`calls` of the whole forward pass; `sections`: the same in sections."""
        self.calls, self.sections, self.axes = calls, sections, axes
        self.recording = recording
        self.notes: list[str] = []
        self.kinds = self._kinds()
        self.leaves = {n: c for n, c in calls.items() if c.op in LEAVES}
        self.bodies = self._bodies()
        statements = [call for body in self.bodies.values() for call in body]
        self.layouts = Layouts(axes, axes.separate_axes(statements))
        self.placement = PlacementRules(axes, statements, self.leaves)
        self.shared = self._shared()
        dtypes = Counter(leaf.dtype for leaf in self.leaves.values() if leaf.op == "param")
        self.dtype = dtypes.most_common(1)[0][0] if dtypes else ""
        """The data type of most parameters, which stands for that of the run."""
        self.sizes: dict[Axis, str] = {}
        """Names of units as sizes of the model."""
        self.fields: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Names of values and parameters that modules share."""
        self._order_parameters(statements)
        self._name_sizes(statements)

    def _kinds(self) -> dict[tuple[object, ...], Section]:
        """The first section of each kind."""
        kinds: dict[tuple[object, ...], Section] = {}
        for section in self.sections.sections:
            kinds.setdefault(section.signature, section)
        return kinds

    def _bodies(self) -> dict[tuple[object, ...], list[OpCall]]:
        """The calls of each kind of section, without views, after their dims became axes."""
        representative = {
            section.yields: self.kinds[section.signature].yields
            for section in self.sections.sections
        }
        for section in self.kinds.values():
            if section.reads and section.reads not in self.axes.dims:
                same = representative[section.reads]
                self.axes.dims[section.reads] = self.axes.dims[same]
                self.axes.base[section.reads] = self.axes.base_of(same)
                self.axes.copies[section.reads] = self.axes.copies.get(same, set())
            for call in section.calls:
                for name in call.operands:
                    if name not in self.axes.dims and name in self.leaves:
                        self.axes.add(self.leaves[name])
                self.axes.add(call)
            first = self.axes.dims.get(section.reads) if section.layer else None
            if first is not None:
                for a, b in zip(first, self.axes.dims[section.yields], strict=True):
                    self.axes.unify(a, b)
        splitter = ProjectionSplitter(self.axes, self.leaves)
        return {signature: splitter.calls(section) for signature, section in self.kinds.items()}

    # ---- the text ------------------------------------------------------------------------------

    def text(self) -> str:
        """All modules, and the model."""
        names = self._module_names()
        modules = [
            ModuleWriter(self, section, names[signature], self.bodies[signature]).write(number)
            for number, (signature, section) in enumerate(self.kinds.items())
        ]
        self._note_whole()
        self._note_turned(names)
        return "\n\n".join([*modules, self._model(names)])

    def _order_parameters(self, calls: Iterable[OpCall]) -> None:
        """Matrices lie with what is summed over first, tables with their rows first."""
        tables = {self.axes.base_of(c.operands[1]) for c in calls if c.op == "embedding"}
        for call in calls:
            if call.op != "einsum" or len(call.operands) != 2:
                continue
            name = self.placement.parameter(call.operands[1])
            if not name or name in tables:
                continue
            out = {*call.out}
            inward = [
                a for x in call.ins[1] if x not in out for a in self.axes.label_leaves(call.name, x)
            ]
            axes = self.axes.leaves_of(name)
            if len({*axes}) == len(axes) and {*inward} <= {*axes}:
                self.layouts.order[name] = (*inward, *(a for a in axes if a not in inward))

    def _shared(self) -> frozenset[str]:
        """Parameters that several kinds of sections read, or several sections of one kind."""
        counted = Counter[str]()
        for section in self.sections.sections:
            names = {
                n for call in section.calls for n in call.operands
                if n in self.leaves and self.leaves[n].op == "param"
            }  # fmt: skip
            counted.update(names)
        return frozenset(name for name, count in counted.items() if count > 1)

    def _name_sizes(self, calls: Sequence[OpCall]) -> None:
        """Name the model's sizes by the use of their axes: heads, widths, vocabulary."""
        named: dict[str, int] = {}

        def give(name: str, unit: Axis) -> None:
            unit = unit.root()
            if unit.extent.symbols or unit in self.sizes:
                return
            extent = unit.extent.value({})
            if named.setdefault(name, extent) == extent:
                self.sizes[unit] = name

        units = self.layouts.units
        first = self.sections.sections[0]
        stream = units(self.layouts.of(first.yields)) if len(self.sections.sections) > 1 else []
        for unit in stream[2:][-1:]:
            give("M", unit)
        for call in calls:
            if call.op == "attention":
                heads = self.axes.label_leaves(call.name, "h")
                for unit in units(heads):
                    give("A", unit)
                keys = [a for a in heads if a in self.axes.leaves_of(call.operands[1])]
                for unit in units(keys):
                    give("G" if len(keys) < len(heads) else "A", unit)
                width = units(self.axes.label_leaves(call.name, "d"))
                for unit in width if len(width) == 1 else []:
                    give("D", unit)
                for unit in units(self.axes.label_leaves(call.name, "v")):
                    if named.get("D") == unit.extent.value({}):
                        give("D", unit)
        for leaf in self.placement.vocabulary:
            give("V", leaf)
        for leaf in sorted(self.placement.inner, key=lambda a: -a.extent.value({})):
            give("F", leaf)
        fields = {"M": "hidden_size", "A": "num_attention_heads", "G": "num_query_groups",
                  "D": "kv_channels", "F": "ffn_hidden_size", "V": "vocab_size"}  # fmt: skip
        if "A" in named:
            named.setdefault("G", named["A"])
        self.fields |= {fields[k]: n for k, n in named.items()}

    def _module_names(self) -> dict[tuple[object, ...], str]:
        """A name for each kind of section."""
        layers = [p for p in self.kinds.values() if p.layer]
        names: dict[tuple[object, ...], str] = {}
        taken = set[str]()
        sections = [*self.kinds.items()]
        for i, (signature, section) in enumerate(sections):
            if section.layer:
                wish = _kind_of_layer(section) if len(layers) > 1 else "layer"
            elif i == 0:
                wish = "whole" if len(sections) == 1 else "embed"
            else:
                wish = "head" if i == len(sections) - 1 else "between"
            names[signature] = free_name(wish, taken, "")
        return names

    def _model(self, names: Mapping[tuple[object, ...], str]) -> str:
        """The model: its sizes, and its chain of modules."""
        links: list[list[Any]] = []
        for section in self.sections.sections:
            name = names[section.signature]
            if section.layer and links and links[-1][0] == name:
                links[-1][1] += 1
            else:
                links.append([name, 1 if section.layer else 0])
        chain = ", ".join(f"{n} {name}" if n else name for name, n in links)
        attends = any(c.op == "attention" for p in self.kinds.values() for c in p.calls)
        if self.fields.get("num_experts"):
            layers = [p for p in self.sections.sections if p.layer]
            dense = [all(c.op != "experts" for c in p.calls) for p in layers]
            self.fields["first_dense_layers"] = dense.index(False)
        defaults = {
            "mixers": "global" if attends else "none",
            "max_position_embeddings": MAX_POSITIONS,
        }
        if "ffn_hidden_size" not in self.fields and not self.fields.get("num_experts"):
            defaults["mlps"] = "none"
        lines = [f"{k} = {value_text(v)}" for k, v in {**defaults, **self.fields}.items()]
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.recording.name)
        return "\n".join([f"model {name or 'imported'}", *lines, f"chain = {chain}"])

    def _note_turned(self, names: Mapping[tuple[object, ...], str]) -> None:
        """Add a note on streams with positions after the width, as convolutions leave them."""
        for signature, section in self.kinds.items():
            units = self.layouts.units(self.layouts.of(section.reads)) if section.reads else []
            if len(units) == 3 and self.sizes.get(units[1].root()) == "M":
                self.notes.append(
                    f"the stream of {names[signature]} lies as [batch, width, positions]: runs "
                    "with cp or sequence_parallel, which would split the width, are refused"
                )

    def _note_whole(self) -> None:
        """Add a note on matrices that tp does not split."""
        replicated: list[str] = []
        for name, leaf in self.leaves.items():
            if leaf.op != "param" or len(leaf.shape) < 2 or name not in self.axes.dims:
                continue
            is_read = any(name == self.axes.base_of(n) for body in self.bodies.values()
                       for c in body if c.op != "experts" for n in c.operands)  # fmt: skip
            units = self.layouts.units(self.layouts.of(name))
            if is_read and not any(self.placement.degree_of(unit) for unit in units):
                replicated.append(leaf.path)
        if replicated:
            self.notes.append(f"whole on every rank of tp: {first_of(replicated, 6)}")


def _kind_of_layer(section: Section) -> str:
    """Name for a kind of layer, by what only it has."""
    if any(c.op == "experts" for c in section.calls):
        return "experts"
    reaches = {(c.attrs.get("causal"), c.attrs.get("window")) for c in section.calls
               if c.op in ("attention", "softmax")}  # fmt: skip
    if any(window for _, window in reaches):
        return "local"
    cross = sum(1 for c in section.calls if c.op == "attention") > 1
    return "decoder" if cross else "layer"


RESERVED = frozenset({"module", "model", "size", "input", "param", "output", "scope", "shared"})
LAST = ("norm", "softmax", "rope")
"""Ops over the last dim."""
IMPLIED = frozenset(
    {"act", "glu", "add", "scale", "shift", "cast", "times", "random_mask", "dropout"}
)
"""Element-wise ops; a text may omit their index expression if operands have one shape."""


class ModuleWriter:
    """Writes one module."""

    def __init__(
        self, model: ModelText, section: Section, name: str, calls: Sequence[OpCall]
    ) -> None:
        """`calls` are those of the section, without views."""
        self.model, self.section, self.name, self.calls = model, section, name, calls
        self.dtypes = {call.name: call.dtype for call in calls}
        self.lines: list[str] = []
        self.body: list[str] = []
        self.names: dict[str, str] = {}
        self.taken = set[str]()
        self.sizes: dict[str, Size] = {}
        self.scope = ""
        prefixes = [call.path for call in calls if re.search(r"\.\d+", call.path)]
        self.prefix = layer_path(prefixes) if section.layer else ""

    # ---- names and sizes -----------------------------------------------------------------------

    def unique_name(self, wish: str) -> str:
        """A name that nothing else in the module has."""
        wish = re.sub(r"\W+", "_", wish).strip("_") or "value"
        wish = f"_{wish}" if wish[0].isdigit() else wish
        wish = f"{wish}_" if wish in RESERVED or keyword.iskeyword(wish) else wish
        return free_name(wish, self.taken, "_")

    def size(self, unit: Axis) -> str:
        """A unit's size in the text; a number gets a name of its own."""
        known = self.model.sizes.get(unit.root())
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
            degree = self.model.placement.degree_of(unit) if degrees else ""
            if any("/tp" in dim for dim in dims):  # one dim of a parameter is split by tp
                degree = ""
            if not degrees and text == "B" and not dims:
                degree = "dp"
            dims.append(f"{text}/{degree}" if degree else text)
        return f"[{', '.join(dims) or '1'}]"

    # ---- values --------------------------------------------------------------------------------

    def value(self, name: str) -> str:
        """Name of a value in the text; declares parameters and inputs when first read."""
        base = self.model.axes.base_of(name)
        if base in self.names:
            return self.names[base]
        leaf = self.model.leaves.get(base)
        if base in self.model.sections.side_values or leaf is None:
            name_in_text = self.model.names.setdefault(base, self.unique_name("memory"))
            self.taken.add(name_in_text)
            layout = self.shape(self.model.layouts.of(base), degrees=False)
            self.lines.append(f"input {name_in_text}{layout}")
            self.names[base] = name_in_text
        elif leaf.op == "param":
            name_in_text = self.names[base] = self._parameter(leaf)
        else:
            wish = input_name(leaf)
            name_in_text = self.names[base] = self.unique_name(wish)
            dtype = dtype_text(leaf.dtype, self.model.dtype)
            layout = self.shape(self.model.layouts.of(base), degrees=False)
            self.lines.append(f"input {name_in_text}{layout}{' ' + dtype if dtype else ''}")
        if leaf is not None and not self.model.layouts.of(base):  # a leaf of a text has dims
            scalar = self.names[base] = self.unique_name(f"{name_in_text}_value")
            self.body.append(f"{scalar} = sum[a->]({name_in_text})")
        return self.names[base]

    def _parameter(self, leaf: OpCall) -> str:
        if leaf.name in self.model.shared:
            name = self.model.names.setdefault(leaf.name, short_name(leaf.path, ""))
            self.taken.add(name)
            shared = " shared"
        else:
            name, shared = self.unique_name(short_name(leaf.path, self.prefix)), ""
        layout = self.shape(self.model.layouts.of(leaf.name), degrees=True)
        self.body.append(f"param {name}{layout}{shared}")
        return name

    def _dtype(self, name: str) -> str:
        """The data type of a value; of what comes in, that of the parameters."""
        base = self.model.axes.base_of(name)
        leaf = self.model.leaves.get(base)
        return leaf.dtype if leaf is not None else self.dtypes.get(base, self.model.dtype)

    # ---- statements ----------------------------------------------------------------------------

    def write(self, number: int) -> str:
        """The module's text."""
        if number:
            layout = self.shape(self.model.layouts.of(self.section.reads), degrees=False)
            self.names[self.model.axes.base_of(self.section.reads)] = "x"
            self.taken.add("x")
            self.lines.append(f"input x{layout}")
        for call in self.calls:
            self._statement(call)
        side_values = self.model.sections.side_values
        hands = [name for n, name in self.names.items() if n in side_values and n in self.dtypes]
        result = self.value(self.section.yields)
        sizes = [f"size {name} = {value}" for name, value in self.sizes.items()]
        output = f"output {', '.join([result, *hands])}"
        return "\n".join([f"module {self.name}", *sizes, *self.lines, *self.body, output])

    def _statement(self, call: OpCall) -> None:
        start = len(self.body)
        call = self._with_unsplit_axes_last(call) if call.op in LAST else call
        call = self._with_merged_dims(call) if call.op in ("join", "slice", "attention") else call
        spec = spec_of(self.model.layouts, call, self.model.sizes)
        text = self._text(call, spec)
        scope = self._scope(call)
        if call.name in self.model.sections.side_values:
            name = self.model.names.setdefault(call.name, self.unique_name("memory"))
            self.taken.add(name)
        else:
            name = self.unique_name(self._preferred_name(call))
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

    def _with_unsplit_axes_last(self, call: OpCall) -> OpCall:
        """Transpose the operand so that the axes that must not be split come last."""
        layouts = self.model.layouts
        places = layouts.operand_axes(call, 0)
        turned = sorted(places, key=lambda place: place[0] in call.unsplit)
        if turned == places:
            return call
        (first, *others), axes = call.operands, self.model.axes
        name = f"{first}.turned"
        axes.dims[name] = axes.dims[first]
        letters = dict(zip(places, "bcdefghijklmnop", strict=False))
        spec = "->".join("".join(letters[p] for p in of) for of in (places, turned))
        self._arrange(name, "turned", [leaf for _, leaf in turned], spec, first)
        return replace(call, operands=(name, *others))

    def _with_merged_dims(self, call: OpCall) -> OpCall:
        """Merge the axes of each dim that the op takes as one.

        Of a join or a part that is the dim along which it goes; of attention the positions of keys,
        and the width of queries and keys.
        """
        if call.op != "attention":
            for i, labels in enumerate(call.ins):
                call = self._with_merged_dim(call, i, labels[int(call.attrs["dim"])], {})
            return call
        merged: dict[Label, Axis] = {}
        for i in range(len(call.operands)):
            for label in ("k", "d"):
                call = self._with_merged_dim(call, i, label, merged)
        for label, description in (("v", "width of values"), ("q", "positions of causal queries")):
            places = self.model.layouts.operand_axes(call, 2 if label == "v" else 0)
            several = len(self.model.layouts.units([leaf for x, leaf in places if x == label])) > 1
            if several and (label == "v" or call.attrs.get("causal")):
                raise UserError(
                    f"{call.where}: the {description} of attention is several "
                    "dims, which other operations take apart; wanted one dim throughout the module"
                )
        return call

    def _with_merged_dim(
        self, call: OpCall, i: int, label: Label, merged_axes: dict[Label, Axis]
    ) -> OpCall:
        """Merge the axes of one label of an operand; `merged_axes`: those of others."""
        axes, layouts, operand = self.model.axes, self.model.layouts, call.operands[i]
        places = layouts.operand_axes(call, i)
        label_axes = [leaf for x, leaf in places if x == label]
        if len(layouts.units(label_axes)) < 2:
            return call
        merged = merged_axes.setdefault(label, Axis(product(a.extent for a in label_axes)))
        layouts.merged.add(merged)
        position, name = call.ins[i].index(label), f"{operand}.merged{i}{label}"
        axes.dims[name] = [*axes.dims[operand]]
        axes.dims[name][position] = [merged]
        axes.labels[call.name] = {**axes.labels[call.name], label: [merged]}
        others = [place for place in places if place[0] != label]
        letters = dict(zip(places, "abcdefghijklmnop", strict=False))
        inside = "".join(letters[p] for p in places if p[0] == label)
        outside = [letters[p] for p in others]
        place = len(others) if call.op != "attention" else places.index((label, label_axes[0]))
        left, right = ([leaf for _, leaf in of] for of in (others[:place], others[place:]))
        outside.insert(place, f"({inside})")
        spec = f"{''.join(letters.values())}->{''.join(outside)}"
        self._arrange(name, "merged", [*left, merged, *right], spec, operand)
        operands = tuple(name if n == i else o for n, o in enumerate(call.operands))
        return replace(call, operands=operands)

    def _arrange(
        self, name: str, wish: str, order: Sequence[Axis], spec: str, operand: str
    ) -> None:
        """Write an operand once more, with its axes in another order of memory."""
        self.model.layouts.order[name] = tuple(order)
        self.names[name] = self.unique_name(wish)
        self.body.append(f"{self.names[name]} = sum[{spec}]({self.value(operand)})")

    def _scope(self, call: OpCall) -> str:
        """The part of a layer: with attention in it, or a feed-forward."""
        if not self.section.layer:
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

    def _preferred_name(self, call: OpCall) -> str:
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
        """True if ranks of tp have partial sums here that are summed into the stream."""
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
            self.model.fields |= {k: v for k, v in call.attrs.items() if k[0] != "_"}
            given = {k[1:]: v for k, v in call.attrs.items() if k[0] == "_" and v}
            words = ", ".join(f"{k}={v}" for k, v in given.items())
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
        given = {k: v for k, v in attrs.items() if v not in (None, False) or k in ("causal", "dim")}
        words += [f"{k}={value_text(v)}" for k, v in given.items()]
        shown = "" if spec.plain and op in IMPLIED else spec.text
        if is_default_spec(op, spec.text):
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
            how = "fn=outer_sum"
            if self._dtype(call.operands[0]) != call.dtype:
                how += f", dtype={dtype_text(call.dtype, '')}"
            return f"opaque[{spec.text}; {how}]({', '.join(operands)})"
        return f"bias[{parts[0]},{parts[1]}->{out}]({', '.join(operands)})"

    def _slice(self, call: OpCall, spec: Any, operand: str) -> str:
        """A slice of a dim: its first elements, its last, or the last of its first."""
        dim, start = int(call.attrs["dim"]), int(call.attrs["start"])
        places = self.model.layouts.operand_axes(call, 0)
        label = call.ins[0][dim]
        positions = [i for i, (x, _) in enumerate(places) if x == label]
        extent = product(a.extent for x, a in places if x == label)
        width = product(a.extent for a in self.model.axes.label_leaves(call.name, "p"))
        units = self.model.layouts.units([leaf for _, leaf in places])
        before = len(units[: positions[0]]) if positions else 0
        words = [f"{x.upper()}={self.size(axis)}" for x, axis in spec.letters.items()]
        words += [f"dim={before}", f"first={'false' if start else 'true'}"]
        text = spec.text
        total = extent.value({}) if not extent.symbols else None
        if start and total is not None and not width.symbols:
            end = start + width.value({})
            if end < total:  # the last of its first elements
                whole = spec.text.split("->")[0]
                low = next(c for c in whole.split(",")[0] if c.isupper())
                kept = next(c for c in "XYWKJ" if c.lower() not in spec.text.lower())
                self.sizes[f"N{end}"] = extent - (total - end)
                first = (
                    f"{whole}->{whole.replace(low, kept)}; {kept}=N{end}, dim={before}, first=true"
                )
                operand, text = f"part[{first}]({operand})", spec.text.replace(low, kept, 1)
        return f"part{spec_text(text, spec.letters, words)}({operand})"


def free_name(wish: str, taken: set[str], between: str) -> str:
    """A name that is not taken, with a number behind it if need be; it is taken then."""
    name, n = wish, 1
    while name in taken:
        n += 1
        name = f"{wish}{between}{n}"
    taken.add(name)
    return name


def _bases(axes: AxisTable, call: OpCall) -> list[str]:
    return [axes.base_of(n) for n in call.operands]


def is_default_spec(op: str, spec: str) -> bool:
    """True for the index expression that a text implies."""
    ins, out = spec.split("->")
    terms = ins.split(",")
    if op in ("norm", "softmax", "rope"):
        m = out[-1]
        return (
            m.isupper() and out[:-1].islower() and terms[0] == out
            and all(term == m for term in terms[1:])
        )  # fmt: skip
    return (
        op == "embedding" and len(terms[1]) == 2 and terms[1][1] == out[-1] and terms[0] == out[:-1]
    )


def spec_text(spec: str, letters: Mapping[str, Axis], words: Sequence[str]) -> str:
    """`[bsm->bsn; N=Inner]`, or nothing; letters whose sizes are said are upper case."""
    if letters and spec:
        ins, out = spec.split("->")
        out = "".join(x.upper() if x in letters else x for x in out)
        spec = f"{ins}->{out}"
    inside = "; ".join(filter(None, (spec, ", ".join(words))))
    return f"[{inside}]" if inside else ""


def value_text(value: Any) -> str:
    """An attribute of an op as the text has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.17g}" if isinstance(value, float) else str(value)


_TYPES = {"bool": "uint8", "fp16": "bf16", "fp64": "fp32", "int16": "int32", "int8": "int8"}


def dtype_text(dtype: str, default: str) -> str:
    """A data type in the text; nothing for that of the run."""
    if dtype == default:
        return ""
    name = _TYPES.get(dtype, dtype)
    return name if name in BYTES else "fp32"


def input_name(leaf: OpCall) -> str:
    """The name of an input or a constant, after the module that has it."""
    if leaf.op == "input":
        return leaf.name
    return "mask" if leaf.attrs.get("mask") else leaf.path.rpartition(".")[2] or "constant"


def layer_path(paths: Sequence[str]) -> str:
    """Common prefix of the paths of a layer's modules, such as `model.layers.3`."""
    matches = [re.match(r"(.*?\.\d+)(?:\.|$)", path) for path in paths]
    prefixes = [m.group(1) for m in matches if m]
    return max(dict.fromkeys(prefixes), key=prefixes.count) if prefixes else ""


def short_name(path: str, prefix: str) -> str:
    """A parameter's name in its layer: `q_proj_weight` of `layers.3.self_attn.q_proj.weight`."""
    local = path.removeprefix(prefix).strip(".") if prefix else path
    words = [w for w in local.split(".") if w]
    return "_".join(words[-2:]) if words else "weight"
