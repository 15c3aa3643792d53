"""Kind of a constant mask of attention: its operations run for the smallest size that shows it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagewright.imports.recording import reachable

MAX_POSITIONS = 8192
"""Limit of positions for which a mask, with the square of them, is computed."""
_STAND_IN = 61
"""Replaces a number that is too large to compute the mask with, such as a window."""


class Mask(NamedTuple):
    """The keys that a query may attend to."""

    kind: str
    """`all`, `causal` (no later keys), or `other`."""
    window: int = 0
    """Limit of keys, including the query's position; 0: none."""
    hides: bool = False
    """True if the mask is true for hidden keys, as `masked_fill` takes it."""


def kind_of_mask(pt: Any, mask: Any, buffers: Mapping[str, Any]) -> Mask:
    """Compute a constant mask of attention; `buffers`: values by name of node, None if unknown.

    The mask is computed for few positions, or for some more than any number in its making; numbers
    too large for that (of windows) are replaced by small ones. Raises whatever
    the operations of the mask raise, and a ValueError for a buffer without values.
    """
    needed = reachable([mask], lambda node: node.all_input_nodes)
    nodes = [node for node in mask.graph.nodes if node in needed]
    numbers = {a for n in nodes for a in _numbers((n.args, n.kwargs))}
    positions = max([16, *(n + 8 for n in numbers if n < MAX_POSITIONS)])
    mask_kind = _reach(pt, _computed(pt, mask, nodes, positions, buffers, {}))
    if mask_kind.kind != "causal" or mask_kind.window:
        return mask_kind
    for large in sorted(n for n in numbers if MAX_POSITIONS <= n < 2**40):
        try:
            replaced = _reach(
                pt,
                _computed(
                    pt, mask, nodes, max(positions, _STAND_IN + 8), buffers, {large: _STAND_IN}
                ),
            )
        except (RuntimeError, ValueError):  # the number is a length that others have to have
            continue
        if abs(replaced.window - _STAND_IN) <= 1:
            return replaced._replace(window=large + replaced.window - _STAND_IN)
    return mask_kind


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


def _computed(
    pt: Any,
    mask: Any,
    nodes: Sequence[Any],
    positions: int,
    buffers: Mapping[str, Any],
    instead: Mapping[int, int],
) -> Any:
    """Value of a constant for a number of positions; `instead` replaces numbers by others."""
    shape = mask.meta["val"].shape
    # Of [batch, 1, queries, keys] the last two dims are positions; there is one of all others.
    symbols = dict.fromkeys(_symbols(shape), 1) | dict.fromkeys(_symbols(shape[-2:]), positions)
    values: dict[Any, Any] = {}

    def size(expr: Any) -> int:
        """A size, where a symbol that the mask's shape lacks (the batch) is 1."""
        value = expr.subs(symbols)
        return int(value.subs(dict.fromkeys(value.free_symbols, 1)))

    def number(value: Any) -> Any:
        expr = getattr(getattr(value, "node", None), "expr", None)
        return value if expr is None else size(expr)

    def of(a: Any) -> Any:
        if hasattr(a, "all_input_nodes"):
            return values[a]
        if isinstance(a, list | tuple):
            return type(a)(of(each) for each in a)
        if isinstance(a, int) and not isinstance(a, bool):
            return instead.get(a, a)
        return pt.device("cpu") if isinstance(a, pt.device) else number(a)

    for node in nodes:
        example = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(example, pt.Tensor | tuple | list):
            expr = getattr(getattr(example, "node", None), "expr", None)
            if expr is not None:
                values[node] = size(expr)
                continue
            if isinstance(example, pt.Tensor):
                value = buffers.get(node.name, pt.zeros([number(d) for d in example.shape]))
                if value is None or value.device.type == "meta":
                    raise ValueError("a buffer has no values on the meta device")
                values[node] = value
                continue
        if node.op == "call_function":
            values[node] = node.target(
                *map(of, node.args), **{k: of(v) for k, v in node.kwargs.items()}
            )
        else:
            raise ValueError(f"{node.op} {node.name}")
    return values[mask]


def _reach(pt: Any, mask: Any) -> Mask:
    """Kind of a mask [..., queries, keys], which may be true for visible or for hidden keys."""
    matrix = mask[(0,) * (mask.dim() - 2)]
    visible = matrix if matrix.dtype == pt.bool else matrix > -1
    if bool(visible.all()):
        return Mask("all")
    for hides in (False, True):
        candidate = ~visible if hides else visible
        rows, columns = candidate.shape
        distance = pt.arange(rows)[:, None] + (columns - rows) - pt.arange(columns)[None, :]
        if bool((candidate == (distance >= 0)).all()):
            return Mask("causal", 0, hides)
        window = int(candidate[-1].sum())
        if bool((candidate == ((distance >= 0) & (distance < window))).all()):
            return Mask("causal", window, hides)
    return Mask("other")
