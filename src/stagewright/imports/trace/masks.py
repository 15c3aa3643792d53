"""Which keys a mask of attention hides: a constant is computed for a size that is just large
enough."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_POSITIONS = 8192
"""No mask is computed for more positions: it has the square of so many elements."""


def kind_of_mask(pt: Any, mask: Any) -> tuple[str, int]:
    """Whether a mask hides nothing (all), later keys (causal; within a window or 0), or others.

    It is computed for few positions, or for some more than any number in its making. Raises
    whatever the operations of the mask raise.
    """
    needed = _ancestors(mask)
    found = [a for n in needed for a in _numbers((n.args, n.kwargs)) if a < MOST_POSITIONS]
    positions = max([16, *(n + 8 for n in found)])
    shape = mask.meta["val"].shape
    # Of [batch, 1, queries, keys] the last two dims are positions; there is one of all others.
    symbols = dict.fromkeys(_symbols(shape), 1) | dict.fromkeys(_symbols(shape[-2:]), positions)
    return _reach(pt, _computed(pt, mask, needed, symbols))


def _ancestors(node: Any) -> list[Any]:
    """The nodes that a node is made of, in order, itself last."""
    seen: dict[Any, None] = {}

    def visit(n: Any) -> None:
        todo = [(n, False)]
        while todo:
            at, ready = todo.pop()
            if at in seen:
                continue
            if ready:
                seen[at] = None
            else:
                todo.append((at, True))
                todo += [(a, False) for a in at.all_input_nodes if a not in seen]

    visit(node)
    return [*seen]


def _numbers(value: Any) -> list[int]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, list | tuple):
        return [n for each in value for n in _numbers(each)]
    return [n for each in value.values() for n in _numbers(each)] if isinstance(value, dict) else []


def _symbols(shape: Any) -> list[Any]:
    """The symbols of a shape, each once."""
    exprs = [getattr(getattr(d, "node", None), "expr", None) for d in shape]
    return [
        *dict.fromkeys(s for e in exprs if e is not None for s in sorted(e.free_symbols, key=str))
    ]


def _computed(pt: Any, mask: Any, needed: Sequence[Any], symbols: Mapping[Any, int]) -> Any:
    """The value of a constant, with numbers for the symbols of its shape."""
    values: dict[Any, Any] = {}

    def size(expr: Any) -> int:
        """A size, where a symbol that the mask's shape lacks (the batch) is 1."""
        known = expr.subs(symbols)
        return int(known.subs(dict.fromkeys(known.free_symbols, 1)))

    def number(value: Any) -> Any:
        expr = getattr(getattr(value, "node", None), "expr", None)
        return value if expr is None else size(expr)

    def of(a: Any) -> Any:
        if hasattr(a, "all_input_nodes"):
            return values[a]
        if isinstance(a, list | tuple):
            return type(a)(of(each) for each in a)
        return pt.device("cpu") if isinstance(a, pt.device) else number(a)

    for node in needed:
        shown = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(shown, pt.Tensor | tuple | list):
            expr = getattr(getattr(shown, "node", None), "expr", None)
            if expr is not None:
                values[node] = size(expr)
                continue
            if isinstance(shown, pt.Tensor):
                values[node] = pt.zeros([number(d) for d in shown.shape], dtype=shown.dtype)
                continue
        if node.op == "call_function":
            values[node] = node.target(
                *map(of, node.args), **{k: of(v) for k, v in node.kwargs.items()}
            )
        else:
            raise ValueError(f"{node.op} {node.name}")
    return values[mask]


def _reach(pt: Any, mask: Any) -> tuple[str, int]:
    """Which keys a mask [..., queries, keys] lets a query see: all, causal or a window."""
    seen = mask[(0,) * (mask.dim() - 2)]
    seen = seen if seen.dtype == pt.bool else seen > -1
    rows, columns = seen.shape
    if bool(seen.all()):
        return "all", 0
    at = pt.arange(rows)[:, None] + (columns - rows) - pt.arange(columns)[None, :]
    if bool((seen == (at >= 0)).all()):
        return "causal", 0
    window = int(seen[-1].sum())
    if bool((seen == ((at >= 0) & (at < window))).all()):
        return "causal", window
    return "other", 0
