"""Names, data types and index expressions as the text of a `.stg` file has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.graph.node import BYTES
from stagewright.imports.axes import Axis
from stagewright.imports.calls import OpCall


def usual_spec(op: str, spec: str) -> bool:
    """Whether a text implies this index expression."""
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


def dtype_text(dtype: str, of_run: str) -> str:
    """A data type in the text; nothing for that of the run."""
    if dtype == of_run:
        return ""
    shown = _TYPES.get(dtype, dtype)
    return shown if shown in BYTES else "fp32"


def input_name(leaf: OpCall) -> str:
    """The name of an input or a constant, after the module that has it."""
    if leaf.op == "input":
        return leaf.name
    return "mask" if leaf.attrs.get("mask") else leaf.path.rpartition(".")[2] or "constant"


def layer_path(paths: Sequence[str]) -> str:
    """What the names of a layer's modules begin with, `model.layers.3`."""
    found = [re.match(r"(.*?\.\d+)(?:\.|$)", path) for path in paths]
    words = [m.group(1) for m in found if m]
    return max(set(words), key=words.count) if words else ""


def short_name(path: str, prefix: str) -> str:
    """A parameter's name in its layer: `q_proj_weight` of `layers.3.self_attn.q_proj.weight`."""
    own = path.removeprefix(prefix).strip(".") if prefix else path
    words = [w for w in own.split(".") if w]
    return "_".join(words[-2:]) if words else "weight"
