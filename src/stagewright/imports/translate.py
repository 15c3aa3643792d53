"""Translates a recording into the text of a `.stg` file, with notes on what was assumed.

The steps: `rewrite` finds norms, rotary positions, gates and experts; `ops` makes calls of ops;
`attention` fuses attention written in parts; `layers` finds repeated layers; `axes` splits dims;
`projections` splits fused products; `placement` chooses degrees; `stg_writer` writes the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from stagewright.errors import UserError
from stagewright.imports.attention import fuse_attention
from stagewright.imports.axes import AxisTable
from stagewright.imports.layers import find_sections
from stagewright.imports.ops import OpCall, Translation
from stagewright.imports.recording import Recording, first_of, reachable
from stagewright.imports.rewrite import rewritten
from stagewright.imports.stg_writer import ModelText


@dataclass(frozen=True, slots=True)
class Translated:
    """A model as text."""

    text: str
    notes: tuple[str, ...]
    parameters: int
    """The number of values in all parameters that the text has."""


def translate(
    recording: Recording,
    dims: Mapping[str, Sequence[str]] | None = None,
    *,
    approximate: bool = False,
    loss: bool | None = None,
) -> Translated:
    """The text of a recording's model.

    `dims` names the dims of inputs; B and S are those of the run. `approximate` counts operations
    without a row in the table by their bytes, which are refused otherwise. `loss` adds the
    cross-entropy of the output; None: if the output is a product with a parameter. Raises UserError
    for an operation without a row, and for dims that nothing names.
    """
    graph = rewritten(recording.nodes, recording.outputs[:1])
    notes = [*recording.notes]
    if len(recording.outputs) > 1:
        notes.append(f"of {len(recording.outputs)} outputs the first is the result")
    translation = Translation(graph, approximate=approximate)
    calls = fuse_attention(translation.calls)
    (result,) = graph.outputs
    calls, result = _with_loss(calls, result, loss, notes)
    needed = reachable([result], lambda name: calls[name].operands)
    calls = {name: call for name, call in calls.items() if name in needed}
    refuse_sizes_of_data(calls)
    symbols = names_of_symbols(calls, dims)
    calls = _renamed_inputs(calls)
    notes += unused_parameters(recording, calls)
    sections = find_sections(calls, [result])
    model_text = ModelText(
        calls, sections, AxisTable(symbols, sizes_of_examples(calls, symbols)), recording
    )
    notes += approximations(translation, calls)
    text = model_text.text()
    notes += model_text.notes
    head = [f"# Imported from PyTorch: {recording.name}.", *(f"# Note: {note}." for note in notes)]
    shapes = (call.shape for call in calls.values() if call.op == "param")
    count = sum(prod(map(int, shape)) for shape in shapes)
    return Translated("\n".join(head) + "\n\n" + text + "\n", tuple(notes), count)


# ---- inputs and the loss -------------------------------------------------------------------------


def _renamed_inputs(calls: dict[str, OpCall]) -> dict[str, OpCall]:
    """Rename the first input of integers to `tokens`, its name in strategies."""
    inputs = [c for c in calls.values() if c.op == "input" and c.dtype == "int64"]
    tokens = next((c.name for c in inputs if len(c.shape) == 2 and c.name != "labels"), "")
    if not tokens or tokens == "tokens" or "tokens" in calls:
        return calls
    names = {tokens: "tokens"}

    def renamed(call: OpCall) -> OpCall:
        operands = tuple(names.get(n, n) for n in call.operands)
        return replace(call, name=names.get(call.name, call.name), operands=operands)

    return {names.get(k, k): renamed(call) for k, call in calls.items()}


def _with_loss(
    calls: dict[str, OpCall], result: str, wanted: bool | None, notes: list[str]
) -> tuple[dict[str, OpCall], str]:
    """Add the cross-entropy if the module yields scores; return the calls and the result."""
    out = calls[result]
    if not out.shape or wanted is False:
        return calls, result
    if wanted is None and not _is_scores(calls, out):
        return calls, result
    notes.append("the output is scores: their cross-entropy is added as the loss")
    rows = tuple(range(len(out.shape) - 1))
    labels = OpCall("labels", "input", out.shape[:-1], "int64", out=rows)
    loss = OpCall("loss", "cross_entropy", (), "fp32", (result, "labels"), ((*rows, "v"), rows), ())
    return {**calls, "labels": labels, "loss": loss}, "loss"


def _is_scores(calls: Mapping[str, OpCall], out: OpCall) -> bool:
    """True for a product with a parameter, perhaps after a bias, an activation or a view."""
    call = out
    if not 2 <= len(out.shape) <= 3 or not isinstance(out.shape[-1], int):
        return False
    for _ in range(12):
        if call.op == "einsum":
            last = calls[call.operands[-1]]
            while last.op in ("view", "reshape", "cast"):
                last = calls[last.operands[0]]
            return last.op == "param"
        if call.op == "add" and calls[call.operands[1]].op != "param":
            return False
        if call.op not in ("view", "reshape", "slice", "add", "act", "cast", "scale", "shift"):
            return False
        call = calls[call.operands[0]]
    return False


# ---- modules -------------------------------------------------------------------------------------


def refuse_sizes_of_data(calls: Mapping[str, OpCall]) -> None:
    """Refuse values whose size depends on data, such as the rows that a mask selects."""
    for call in calls.values():
        if any(isinstance(n, str) and re.search(r"\bu\d+\b", n) for n in call.shape):
            raise UserError(
                f"{call.where}: values of tensors decide how many "
                "elements there are (nonzero, masks, loops over experts); write it with sizes that "
                "shapes decide: sorted rows and torch._grouped_mm, or all experts in one product"
            )


def names_of_symbols(
    calls: Mapping[str, OpCall], dims: Mapping[str, Sequence[str]] | None
) -> dict[str, str]:
    """Names of the symbols of the trace: those given, else B and S in the order of the inputs."""
    inputs = [c for c in calls.values() if c.op == "input"]
    names: dict[str, str] = {}
    for name, dim_names in (dims or {}).items():
        call = next((c for c in inputs if c.name == name), None)
        if call is None or len(dim_names) != len(call.shape):
            listed = ", ".join(f"{c.name} of {len(c.shape)}" for c in inputs)
            raise UserError(f"dims: no input {name!r} of {len(dim_names)} dims; there are {listed}")
        for extent, word in zip(call.shape, dim_names, strict=True):
            if isinstance(extent, str) and extent.isidentifier():
                names[extent] = word
    unused = [word for word in ("B", "S") if word not in names.values()]
    for call in inputs:
        for at, extent in enumerate(call.shape):
            if not isinstance(extent, str) or not extent.isidentifier() or extent in names:
                continue
            if not unused:
                listed = [names.get(str(n), "?" if isinstance(n, str) else str(n))
                         for n in call.shape]  # fmt: skip
                raise UserError(
                    f"dim {at} of input {call.name} [{', '.join(listed)}] varies, besides batch "
                    f"and sequence; name each dim (--dims {call.name}=B,S, in Python "
                    f"dims={{{call.name!r}: ('B', 'S')}}), or keep all sizes of the example "
                    "(--static, static=True)"
                )
            names[extent] = unused.pop(0)
    return names


def sizes_of_examples(calls: Mapping[str, OpCall], names: Mapping[str, str]) -> dict[str, int]:
    """The sizes that named dims besides batch and sequence have in the example."""
    inputs = [c for c in calls.values() if c.op == "input" and "example" in c.attrs]
    return {
        names[str(extent)]: int(example)
        for call in inputs
        for extent, example in zip(call.shape, call.attrs["example"], strict=True)
        if names.get(str(extent), "B") not in ("B", "S")
    }


def unused_parameters(recording: Recording, calls: Mapping[str, OpCall]) -> list[str]:
    """A note on parameters that the result does not depend on, which the text lacks."""
    out = [n for n in recording.nodes if n.op == "param" and n.name not in calls]
    if not out:
        return []
    count = sum(prod(int(extent) for extent in n.shape) for n in out)
    paths = first_of([n.path for n in out], 6)
    return [f"left out: {count:,} parameters that the result does not depend on: {paths}"]


def approximations(translation: Translation, calls: Mapping[str, OpCall]) -> list[str]:
    """Notes on operations that are counted by their bytes; `calls` are those of the text."""
    counts = {
        "by their bytes": _still_counted(translation.as_bytes, translation.calls, calls),
        "without a row, by their bytes": translation.unknown,
    }
    return [
        f"operations counted {kind}: {', '.join(f'{n} {op}' for op, n in counter.most_common())}"
        for kind, counter in counts.items()
        if counter
    ]


def _still_counted(
    counted: Counter[str], before: Mapping[str, OpCall], after: Mapping[str, OpCall]
) -> Counter[str]:
    """Operations counted by their bytes that did not become a part of attention."""
    was, now = (
        Counter(str(call.attrs.get("fn")) for call in calls.values() if call.op == "opaque")
        for calls in (before, after)
    )
    return Counter(
        {fn: n for fn, count in counted.items() if (n := now[fn] if fn in was else count)}
    )
