"""What a recording keeps of a node of PyTorch: numbers, shapes, types, and where it is from."""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stagewright.imports.trace.recording import Extent


def own_line(places: Sequence[tuple[str, str]]) -> str:
    """The innermost of some lines that is in no file of PyTorch, as `file.py:12`."""
    own = [(file, line) for file, line in places if "/torch/" not in file and file[0] != "<"]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def number_of(value: Any) -> Any:
    """A number, or the text of an expression in symbols."""
    node = getattr(value, "node", None)
    expr = getattr(node, "expr", value)
    try:
        return int(expr) if float(expr) == int(expr) else float(expr)
    except (TypeError, ValueError, OverflowError):
        return str(expr)


def shape_of(value: Any) -> tuple[Extent, ...]:
    """The dims of a tensor: numbers, or expressions in symbols."""
    return tuple(number_of(dim) for dim in value.shape)


_SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64",
          "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}  # fmt: skip


def dtype_of(value: Any) -> str:
    """The short name of a tensor's data type."""
    name = str(value.dtype).rpartition(".")[2]
    return _SHORT.get(name, name)


def path_of(node: Any) -> str:
    """The module that made a node; empty where that is not known."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_") else path


def source_of(node: Any) -> str:
    """The innermost line of the user's code, as `file.py:12`."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return own_line(found)
