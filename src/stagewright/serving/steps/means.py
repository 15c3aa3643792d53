"""Pairs and keys of one request whose numbers of tokens are means, for each reach of attention."""

from __future__ import annotations

from stagewright.model.layers import Reach


def mean_sums(reach: Reach, context: float, new: float) -> tuple[float, float]:
    """Pairs of a query and a key that it sees, and keys that any query sees, of one request.

    As `run.lengths.attention_sums` says of whole numbers. Where a request is in its chunk of
    positions is taken to be anywhere.

    >>> mean_sums(Reach(), 10.0, 2.0), mean_sums(Reach(window=4), 10.0, 2.0)
    ((23.0, 12.0), (8.0, 5.0))
    """
    window, chunk, top, block, _ = reach
    if window:
        before = min(context, window - 1.0)
        rising = min(max(window - context, 0.0), new)
        return rising * context + rising * (rising + 1) / 2 + (new - rising) * window, before + new
    if chunk and context + new > chunk:
        before = context if context < chunk else (chunk - 1) / 2
        seen = (before + 1 + chunk) / 2 if new > chunk else before + (new + 1) / 2
        return new * min(seen, (chunk + 1) / 2 if new > chunk else chunk), before + new
    if top:
        pairs = _chosen(context + new, top, block) - _chosen(context, top, block)
        return pairs, min(context + new, pairs)
    return new * context + new * (new + 1) / 2, context + new


def _chosen(tokens: float, top: int, block: int) -> float:
    first = min(tokens, float(top))
    rest = tokens - first
    return first * (first + 1) / 2 + rest * (top - block) + rest * (block + 1) / 2
