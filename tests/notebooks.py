"""Runs the code cells of a notebook (nbformat 4) as IPython does, and keeps what they give.

Only what our notebooks use: what is printed, and the value of a last line that is an expression, as
text and, where it has `_repr_html_`, as HTML. That needs no kernel, and gives the same bytes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from typing import Any

Notebook = dict[str, Any]


def notebook(source: str) -> Notebook:
    """Read a notebook; what is not as the format wants it is an AssertionError."""
    found = json.loads(source)
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(ids) == len(set(ids))
    for cell in found["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
        assert set(cell) == wanted, cell["id"]
    return found


def text(found: Notebook) -> str:
    """As Jupyter writes it."""
    return json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def execute(found: Notebook) -> Notebook:
    """The notebook with all its code run, in order, in a namespace of its own."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    number = 0
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = _run("".join(cell["source"]), space, number)
            cell = cell | {"execution_count": number, "outputs": outputs}
        cells.append(cell)
    return found | {"cells": cells}


def _run(source: str, space: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    told = io.StringIO()
    value = None
    with contextlib.redirect_stdout(told):
        exec(compile(tree, f"cell {number}", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
    outputs: list[dict[str, Any]] = []
    if told.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(told.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def _lines(whole: str) -> list[str]:
    return whole.splitlines(keepends=True)
