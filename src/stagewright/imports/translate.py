"""From a recording to the text of a `.stg` file, and what was assumed on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from stagewright.imports.attend import fuse_attention
from stagewright.imports.axes import Axis, AxisTable
from stagewright.imports.calls import LEAVES, OpCall
from stagewright.imports.cut import cut
from stagewright.imports.fold import Folded, Piece, fold
from stagewright.imports.notes import counted, left_out
from stagewright.imports.placement import PlacementRules
from stagewright.imports.rows.table import calls_of
from stagewright.imports.specs import Layouts
from stagewright.imports.symbols import (
    names_of_symbols,
    refuse_sizes_of_data,
    sizes_of_examples,
)
from stagewright.imports.text import Model, Writer
from stagewright.imports.trace.recording import Extent, Recording
from stagewright.imports.trace.rewrite import rewritten

MOST_POSITIONS = 131_072
"""The longest sequence of an imported model, whose code may say none."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller of an import decides."""

    dims: Mapping[str, Sequence[str]] | None = None
    """By input, names of its dims: B and S are those of the run."""
    approximate: bool = False
    """Whether operations without a row of the table are counted by their bytes."""
    loss: bool | None = None
    """Whether the output is scores, of which the cross-entropy is added; None: if it looks so."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A model as text."""

    text: str
    notes: tuple[str, ...]
    parameters: int
    """The number of values in all parameters that the text has."""


def translate(recording: Recording, options: Options | None = None) -> Translated:
    """The text of a recording's model.

    Raises UserError for an operation without a row, and for dims that nothing names.
    """
    options = options or Options()
    nodes = rewritten(recording.nodes, recording.outputs[:1])
    notes = [*recording.notes]
    if len(recording.outputs) > 1:
        notes.append(f"of {len(recording.outputs)} outputs the first is the result")
    translation = calls_of(nodes, approximate=options.approximate)
    calls = fuse_attention(translation.calls)
    (result,) = nodes.outputs
    calls, result = _with_loss(calls, result, options.loss, notes)
    calls = _needed(calls, result)
    refuse_sizes_of_data(calls)
    symbols = names_of_symbols(calls, options.dims)
    calls = _renamed_inputs(calls)
    notes += left_out(recording, calls)
    folded = fold(calls, [result])
    made = _ModelText(
        calls, folded, AxisTable(symbols, sizes_of_examples(calls, symbols)), recording
    )
    notes += counted(translation, calls)
    text = made.text()
    notes += made.notes
    head = [f"# Imported from PyTorch: {recording.name}.", *(f"# Note: {note}." for note in notes)]
    shapes = (call.shape for call in calls.values() if call.op == "param")
    count = sum(prod(map(int, shape)) for shape in shapes)
    return Translated("\n".join(head) + "\n\n" + text + "\n", tuple(notes), count)


# ---- inputs and the loss -------------------------------------------------------------------------


def _renamed_inputs(calls: dict[str, OpCall]) -> dict[str, OpCall]:
    """The first input of whole numbers is called `tokens`, as strategies call it."""
    inputs = [c for c in calls.values() if c.op == "input" and c.dtype == "int64"]
    tokens = next((c.name for c in inputs if len(c.shape) == 2 and c.name != "labels"), "")
    if not tokens or tokens == "tokens" or "tokens" in calls:
        return calls
    names = {tokens: "tokens"}

    def renamed(call: OpCall) -> OpCall:
        operands = tuple(names.get(n, n) for n in call.operands)
        return replace(call, name=names.get(call.name, call.name), operands=operands)

    return {names.get(k, k): renamed(call) for k, call in calls.items()}


def _needed(calls: Mapping[str, OpCall], result: str) -> dict[str, OpCall]:
    """The calls that the result depends on."""
    needed, todo = set[str](), [result]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += calls[name].operands
    return {name: call for name, call in calls.items() if name in needed}


def _with_loss(
    calls: dict[str, OpCall], result: str, wanted: bool | None, notes: list[str]
) -> tuple[dict[str, OpCall], str]:
    """The calls with the cross-entropy of scores, where the module yields scores."""
    out = calls[result]
    if not out.shape or wanted is False:
        return calls, result
    if wanted is None and not _scores(calls, out):
        return calls, result
    notes.append("the output is scores: their cross-entropy is added as the loss")
    rows = tuple(range(len(out.shape) - 1))
    labels = OpCall("labels", "input", out.shape[:-1], "int64", out=rows)
    loss = OpCall("loss", "cross_entropy", (), "fp32", (result, "labels"), ((*rows, "v"), rows), ())
    return {**calls, "labels": labels, "loss": loss}, "loss"


def _scores(calls: Mapping[str, OpCall], out: OpCall) -> bool:
    """Whether a value is the product with a parameter, but for shape, bias and activation."""
    at = out
    if not 2 <= len(out.shape) <= 3 or not isinstance(out.shape[-1], int):
        return False
    for _ in range(12):
        if at.op == "einsum":
            last = calls[at.operands[-1]]
            while last.op in ("view", "reshape", "cast"):
                last = calls[last.operands[0]]
            return last.op == "param"
        if at.op == "add" and calls[at.operands[1]].op != "param":
            return False
        if at.op not in ("view", "reshape", "slice", "add", "act", "cast", "scale", "shift"):
            return False
        at = calls[at.operands[0]]
    return False


# ---- modules -------------------------------------------------------------------------------------


class _ModelText:
    """The pieces of each kind, in axes, and the model that they make."""

    def __init__(
        self, calls: Mapping[str, OpCall], folded: Folded, axes: AxisTable, recording: Recording
    ) -> None:
        self.calls, self.folded, self.axes = calls, folded, axes
        self.recording = recording
        self.notes: list[str] = []
        self.kinds = self._kinds()
        self.bodies = self._in_axes()

    def _kinds(self) -> dict[tuple[object, ...], Piece]:
        """The first piece of each kind."""
        kinds: dict[tuple[object, ...], Piece] = {}
        for piece in self.folded.pieces:
            kinds.setdefault(piece.signature, piece)
        return kinds

    def _in_axes(self) -> dict[int, list[OpCall]]:
        """The calls of each first piece, without views, after their dims became axes."""
        representative = {
            piece.yields: self.kinds[piece.signature].yields for piece in self.folded.pieces
        }
        for piece in self.kinds.values():
            if piece.reads and piece.reads not in self.axes.dims:
                same = representative[piece.reads]
                self.axes.dims[piece.reads] = self.axes.dims[same]
                self.axes.base[piece.reads] = self.axes.base.get(same, same)
                self.axes.copies[piece.reads] = self.axes.copies.get(same, set())
            for call in piece.calls:
                for name in call.operands:
                    if name not in self.axes.dims and self.calls[name].op in LEAVES:
                        self.axes.add(self.calls[name])
                self.axes.add(call)
            first = self.axes.dims.get(piece.reads) if piece.layer else None
            if first is not None:
                for a, b in zip(first, self.axes.dims[piece.yields], strict=True):
                    self.axes.unify(a, b)
        self.leaves = {n: c for n, c in self.calls.items() if c.op in LEAVES}
        return {id(piece): cut(self.axes, self.leaves, piece) for piece in self.kinds.values()}

    # ---- the text ------------------------------------------------------------------------------

    def text(self) -> str:
        """All modules, and the model."""
        bodies = [self.bodies[id(piece)] for piece in self.kinds.values()]
        calls = [call for body in bodies for call in body]
        apart = self.axes.apart(calls)
        layouts = Layouts(self.axes, apart)
        placement = PlacementRules(self.axes, calls, self.leaves)
        self._order_parameters(layouts, placement, calls)
        model = Model(
            self.axes, layouts, placement, self.leaves, {}, self._shared(bodies),
            self.folded.handed, _main_dtype(self.leaves.values()),
        )  # fmt: skip
        self._name_sizes(model, calls)
        names = self._names()
        modules = [
            Writer(model, piece, names[signature], self.bodies[id(piece)]).write(number)
            for number, (signature, piece) in enumerate(self.kinds.items())
        ]
        self._note_whole(model)
        self._note_turned(model, names)
        return "\n\n".join([*modules, self._model(model, names)])

    def _order_parameters(
        self, layouts: Layouts, placement: PlacementRules, calls: Iterable[OpCall]
    ) -> None:
        """Matrices lie with what is summed over first, tables with their rows first."""
        tables = {
            self.axes.base.get(c.operands[1], c.operands[1]) for c in calls if c.op == "embedding"
        }
        for call in calls:
            if call.op != "einsum" or len(call.operands) != 2:
                continue
            name = placement.parameter(call.operands[1])
            if not name or name in tables:
                continue
            out = {*call.out}
            inward = [a for x in call.ins[1] if x not in out for a in self.axes.label(call.name, x)]
            own = self.axes.flat(name)
            if len({*own}) == len(own) and {*inward} <= {*own}:
                layouts.order[name] = (*inward, *(a for a in own if a not in inward))

    def _shared(self, bodies: Sequence[Sequence[OpCall]]) -> frozenset[str]:
        """Parameters that several kinds of pieces read, or several pieces of one kind."""
        counted = Counter[str]()
        for piece in self.folded.pieces:
            names = {
                n for call in piece.calls for n in call.operands
                if n in self.leaves and self.leaves[n].op == "param"
            }  # fmt: skip
            counted.update(names)
        del bodies
        return frozenset(name for name, count in counted.items() if count > 1)

    def _name_sizes(self, model: Model, calls: Sequence[OpCall]) -> None:
        """Names of the model's own sizes, by what the axes are for."""
        named: dict[str, int] = {}

        def give(name: str, unit: Axis) -> None:
            unit = unit.known()
            if unit.extent.symbols or unit in model.sizes:
                return
            extent = unit.extent.value({})
            if named.setdefault(name, extent) == extent:
                model.sizes[unit] = name

        units = model.layouts.units
        first = self.folded.pieces[0]
        stream = units(model.layouts.of(first.yields)) if len(self.folded.pieces) > 1 else []
        for unit in stream[2:][-1:]:
            give("M", unit)
        for call in calls:
            if call.op == "attention":
                heads = self.axes.label(call.name, "h")
                for unit in units(heads):
                    give("A", unit)
                keys = [a for a in heads if a in self.axes.flat(call.operands[1])]
                for unit in units(keys):
                    give("G" if len(keys) < len(heads) else "A", unit)
                width = units(self.axes.label(call.name, "d"))
                for unit in width if len(width) == 1 else []:
                    give("D", unit)
                for unit in units(self.axes.label(call.name, "v")):
                    if named.get("D") == unit.extent.value({}):
                        give("D", unit)
        for leaf in model.placement.vocabulary:
            give("V", leaf)
        for leaf in sorted(model.placement.inner, key=lambda a: -a.extent.value({})):
            give("F", leaf)
        fields = {"M": "hidden_size", "A": "num_attention_heads", "G": "num_query_groups",
                  "D": "kv_channels", "F": "ffn_hidden_size", "V": "vocab_size"}  # fmt: skip
        if "A" in named:
            named.setdefault("G", named["A"])
        model.fields.update({fields[k]: n for k, n in named.items() if k in fields})

    def _names(self) -> dict[tuple[object, ...], str]:
        """A name for each kind of piece."""
        layers = [p for p in self.kinds.values() if p.layer]
        names: dict[tuple[object, ...], str] = {}
        taken = set[str]()
        pieces = [*self.kinds.items()]
        for i, (signature, piece) in enumerate(pieces):
            if piece.layer:
                wish = _kind_of_layer(piece) if len(layers) > 1 else "layer"
            elif i == 0:
                wish = "model" if len(pieces) == 1 else "embed"
            else:
                wish = "head" if i == len(pieces) - 1 else "between"
            name, n = wish if wish != "model" else "whole", 1
            while name in taken:
                n += 1
                name = f"{wish}{n}"
            taken.add(name)
            names[signature] = name
        return names

    def _model(self, model: Model, names: Mapping[tuple[object, ...], str]) -> str:
        """The model: its sizes, and its chain of modules."""
        links: list[list[Any]] = []
        for piece in self.folded.pieces:
            name = names[piece.signature]
            if piece.layer and links and links[-1][0] == name:
                links[-1][1] += 1
            else:
                links.append([name, 1 if piece.layer else 0])
        chain = ", ".join(f"{n} {name}" if n else name for name, n in links)
        attends = any(c.op == "attention" for p in self.kinds.values() for c in p.calls)
        fields = {k: v for k, v in model.fields.items() if not k.startswith("_")}
        if fields.get("num_experts"):
            layers = [p for p in self.folded.pieces if p.layer]
            dense = [all(c.op != "experts" for c in p.calls) for p in layers]
            fields["first_dense_layers"] = dense.index(False)
        own = {"mixers": "global" if attends else "none", "max_position_embeddings": MOST_POSITIONS}
        if "ffn_hidden_size" not in fields and not fields.get("num_experts"):
            own["mlps"] = "none"
        lines = [f"{k} = {_shown(v)}" for k, v in {**own, **fields}.items()]
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.recording.name)
        return "\n".join([f"model {name or 'imported'}", *lines, f"chain = {chain}"])

    def _note_turned(self, model: Model, names: Mapping[tuple[object, ...], str]) -> None:
        """Tell which streams have positions behind the width, as convolutions leave them."""
        for signature, piece in self.kinds.items():
            units = model.layouts.units(model.layouts.of(piece.reads)) if piece.reads else []
            if len(units) == 3 and model.sizes.get(units[1].known()) == "M":
                self.notes.append(
                    f"the stream of {names[signature]} lies as [batch, width, positions]: runs "
                    "with cp or sequence_parallel, which would split the width, are refused"
                )

    def _note_whole(self, model: Model) -> None:
        """Tell which matrices every rank of tp has whole."""
        whole: list[str] = []
        for name, leaf in self.leaves.items():
            if leaf.op != "param" or len(leaf.shape) < 2 or name not in self.axes.dims:
                continue
            used = any(name == self.axes.base.get(n, n) for body in self.bodies.values()
                       for c in body if c.op != "experts" for n in c.operands)  # fmt: skip
            units = model.layouts.units(model.layouts.of(name))
            if used and not any(model.placement.of(unit) for unit in units):
                whole.append(leaf.path)
        if whole:
            shown = ", ".join(whole[:6]) + (f" and {len(whole) - 6} more" if len(whole) > 6 else "")
            self.notes.append(f"whole on every rank of tp: {shown}")


def _kind_of_layer(piece: Piece) -> str:
    """In a word, what a layer has that others may not have."""
    if any(c.op == "experts" for c in piece.calls):
        return "experts"
    reaches = {(c.attrs.get("causal"), c.attrs.get("window")) for c in piece.calls
               if c.op in ("attention", "softmax")}  # fmt: skip
    if any(window for _, window in reaches):
        return "local"
    cross = sum(1 for c in piece.calls if c.op == "attention") > 1
    return "decoder" if cross else "layer"


def _main_dtype(leaves: Iterable[OpCall]) -> str:
    """The data type of most parameters."""
    counted = Counter(leaf.dtype for leaf in leaves if leaf.op == "param")
    return counted.most_common(1)[0][0] if counted else ""


def _shown(value: Any) -> str:
    return (
        {True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool)
        else str(value)
    )


Dim = Extent
