"""Fusion of attention written in parts, `softmax(q k') v`, into one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagewright.imports.ops import LEAVES, VIEWS, OpCall

_ELEMENTWISE = ("cast", "dropout", "view", "reshape", "scale", "shift")


def fuse_attention(calls: dict[str, OpCall]) -> dict[str, OpCall]:
    """Replace two products and the softmax between them by one `attention`."""
    readers: dict[str, list[OpCall]] = {}
    for call in calls.values():
        for name in call.operands:
            readers.setdefault(name, []).append(call)
    fused = dict(calls)
    for call in calls.values():
        if call.op == "softmax":
            attention = _fuse(calls, readers, call)
            if attention is not None:
                fused[attention.name] = attention
    return fused


def _fuse(
    calls: Mapping[str, OpCall], readers: Mapping[str, list[OpCall]], softmax: OpCall
) -> OpCall | None:
    attrs: dict[str, Any] = {
        "causal": bool(softmax.attrs.get("causal")),
        "window": softmax.attrs.get("window", 0),
    }
    scores = _scores_product(calls, softmax, attrs)
    result = _values_product(readers, softmax)
    if scores is None or result is None or len(scores.out) != len(softmax.shape):
        return None
    if calls[result.operands[0]].shape != softmax.shape or scores.shape != softmax.shape:
        return None
    for product, operand in ((scores, 0), (scores, 1), (result, 1)):
        if calls[product.operands[operand]].op == "param":
            return None
    names: dict[object, int | str] = dict(zip(scores.out[:-3], range(9), strict=False))
    names |= dict(zip(scores.out[-3:], "hqk", strict=True))
    summed = [x for x in scores.ins[0] if x not in scores.out]
    if len(summed) != 1 or len(scores.out) < 3:
        return None
    names[summed[0]] = "d"
    q, k = (tuple(names.get(x, x) for x in labels) for labels in scores.ins)
    back: dict[object, int | str] = dict(
        zip(result.ins[0], (*range(len(scores.out) - 3), "h", "q", "k"), strict=True)
    )
    fresh = [x for x in result.ins[1] if x not in back]
    if len(fresh) != 1:
        return None
    back[fresh[0]] = "v"
    v, out = (tuple(back[x] for x in labels) for labels in (result.ins[1], result.out))
    if "k" in out or "q" not in out:
        return None
    # PyTorch takes its own attention apart so that queries and keys are scaled, each by the root.
    attrs["operators"] = not all(calls[n].op == "scale" for n in scores.operands)
    operands = (*(_unscaled(calls, n) for n in scores.operands), result.operands[1])
    return replace(
        result, op="attention", operands=operands, ins=(q, k, v), out=out, attrs=attrs,
        unsplit=frozenset({"d", "v"}),
    )  # fmt: skip


def _unscaled(calls: Mapping[str, OpCall], name: str) -> str:
    """The operand of a scaling of queries or keys, which the kernel does itself."""
    return calls[name].operands[0] if calls[name].op == "scale" else name


def _scores_product(
    calls: Mapping[str, OpCall], softmax: OpCall, attrs: dict[str, Any]
) -> OpCall | None:
    """The product of queries and keys, before scaling, a softcap and a constant mask."""
    at = calls[softmax.operands[0]]
    for _ in range(10):
        if at.op == "einsum":
            return at
        if at.op == "act" and at.attrs.get("fn") == "softcap":
            attrs["softcap"] = at.attrs["cap"]
        elif at.op == "add":
            mask = calls[at.operands[1]]
            while mask.op in VIEWS:
                mask = calls[mask.operands[0]]
            if not _hides_keys(mask) or mask.attrs.get("hides"):
                return None
            attrs |= _reach(mask)
        elif at.op == "opaque" and at.attrs.get("fn") in ("masked_fill", "where"):
            masks = [calls[n] for n in at.operands if _hides_keys(calls[n])]
            others = [calls[n] for n in at.operands if calls[n].op not in LEAVES]
            if len(masks) != 1 or len(others) != 1:
                return None
            if at.attrs["fn"] == "masked_fill" and not masks[0].attrs.get("hides"):
                return None
            attrs |= _reach(masks[0])
            (at,) = others
            continue
        elif at.op not in _ELEMENTWISE:
            return None
        at = calls[at.operands[0]]
    return None


def _reach(mask: OpCall) -> dict[str, Any]:
    """The keys that a constant mask leaves, as attributes of attention."""
    return {"causal": mask.attrs["mask"] == "causal", "window": mask.attrs.get("window", 0)}


def _hides_keys(of: OpCall) -> bool:
    """True for a constant whose hidden keys the recording knows."""
    return of.op in ("constant", "buffer") and of.attrs.get("mask") in ("causal", "all")


def _values_product(readers: Mapping[str, list[OpCall]], softmax: OpCall) -> OpCall | None:
    """The product of the probabilities with values."""
    at = softmax
    for _ in range(8):
        users = [c for c in readers.get(at.name, ()) if c.op not in ("random_mask",)]
        if len(users) != 1:
            return None
        at = users[0]
        if at.op == "einsum":
            return at if at.operands[0] != at.operands[1] else None
        if at.op not in ("cast", "dropout", "view", "reshape"):
            return None
    return None
