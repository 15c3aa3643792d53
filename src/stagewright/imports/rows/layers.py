"""Rows of what layers are made of: attention, norms, tables, losses, experts."""

from __future__ import annotations

from typing import Any

from stagewright.imports.rows.translation import Translation
from stagewright.imports.trace.recording import Ref, TracedNode


def attention(t: Translation, node: TracedNode) -> None:
    """Attention in one piece; where key heads are fewer, each is repeated for its query heads."""
    q, k, v = (t.name(a) for a in node.args[:3])
    mask, window = node.kwargs.get("mask", "all"), int(node.kwargs.get("window", 0))
    if node.kwargs.get("is_causal"):
        mask = "causal"
    lead = tuple(range(len(t.shape(q)) - 3))
    if t.shape(k)[-3] != t.shape(q)[-3]:  # enable_gqa: query heads are groups of key heads
        heads, keys = int(t.shape(q)[-3]), int(t.shape(k)[-3])
        shown = (*t.shape(k)[:-3], keys, heads // keys, *t.shape(k)[-2:])
        labels = (*lead, "h", "k", "x")
        wide: list[str] = []
        for which, name in (("k", k), ("v", v)):
            repeated = (*t.shape(name)[:-3], keys, heads // keys, *t.shape(name)[-2:])
            grown = t.emit(
                node, "view", (name,), (labels,), (*lead, "h", "r", "k", "x"),
                suffix=f".{which}", shape=repeated,
            )  # fmt: skip
            flat = (*shown[: len(lead)], heads, *t.shape(name)[-2:])
            wide.append(
                t.emit(node, "reshape", (grown,), ((),), (), suffix=f".{which}s", shape=flat)
            )
        k, v = wide
    ins = (*lead, "h", "q", "d"), (*lead, "h", "k", "d"), (*lead, "h", "k", "v")
    operands = [q, k, v]
    if mask in ("given", "other"):
        t.as_bytes["a mask of attention that is data"] += 1
    t.emit(
        node, "attention", operands, ins, (*lead, "h", "q", "v"), whole=("d", "v"),
        causal=mask == "causal", window=window,
        **({"copied": True} if node.kwargs.get("copied") else {}),
    )  # fmt: skip


def norm(t: Translation, node: TracedNode) -> None:
    """our.norm: over the last dim."""
    x, *weights = (t.name(a) for a in node.args)
    labels = tuple(range(len(node.shape)))
    t.emit(
        node, "norm", (x, *weights), (labels, *[labels[-1:]] * len(weights)), labels,
        whole=labels[-1:], **node.kwargs,
    )  # fmt: skip


def layer_norm(t: Translation, node: TracedNode) -> None:
    """A norm over the last dim, with weight and bias if given."""
    x = t.name(node.args[0])
    weights = [t.name(a) for a in node.args[2:4] if isinstance(a, Ref)]
    if len(node.args[1]) != 1:
        t.as_bytes["layer_norm"] += 1
        t.bytes_only(node, x, *weights)
        return
    fn = "rmsnorm" if "rms_norm" in node.op else "layernorm"
    labels = tuple(range(len(node.shape)))
    t.emit(
        node, "norm", (x, *weights), (labels, *[labels[-1:]] * len(weights)), labels,
        whole=labels[-1:], fn=fn,
    )  # fmt: skip


def group_norm(t: Translation, node: TracedNode) -> None:
    """A norm over groups of channels: its bytes, and a mean and a deviation of each group."""
    names = [a.name for a in node.args if isinstance(a, Ref)]
    t.as_bytes["group_norm"] += 1
    t.bytes_only(node, *names, beside=8 * int(node.args[1]))


def embedding(t: Translation, node: TracedNode) -> None:
    """Rows of a table, by number."""
    table, ids = (t.name(a) for a in node.args[:2])
    at = tuple(range(len(t.shape(ids))))
    t.emit(node, "embedding", (ids, table), (at, ("v", "m")), (*at, "m"))


def rope(t: Translation, node: TracedNode) -> None:
    """our.rope: rotary position."""
    labels = tuple(range(len(node.shape)))
    t.emit(node, "rope", [t.name(node.args[0])], [labels], labels, whole=labels[-1:])


def softmax(t: Translation, node: TracedNode) -> None:
    """A softmax over the last dim; a constant causal mask that was added is its attribute."""
    x, dim = t.name(node.args[0]), int(node.args[1]) % len(node.shape)
    labels = tuple(range(len(node.shape)))
    if dim != len(node.shape) - 1:
        t.as_bytes["softmax"] += 1
        t.bytes_only(node, x)
        return
    mask: dict[str, Any] = {}
    added = t.calls[x]
    if added.op == "add" and len(added.operands) == 2:
        constant = t.calls[added.operands[1]]
        while constant.op in ("view", "reshape"):
            constant = t.calls[constant.operands[0]]
        own = constant.attrs
        if constant.op == "constant" and own.get("mask") == "causal" and not own.get("hides"):
            x = added.operands[0]
            mask = {"causal": True, "window": own.get("window", 0)}
    dtype = _wide(t, node)
    t.emit(node, "softmax", [x], [labels], labels, whole=labels[-1:], dtype=dtype, **mask)


def _wide(t: Translation, node: TracedNode) -> str:
    return node.dtype


def cross_entropy(t: Translation, node: TracedNode) -> None:
    """The mean cross-entropy of scores and labels."""
    logits, labels = (t.name(a) for a in node.args[:2])
    rows = tuple(range(len(t.shape(labels))))
    t.emit(node, "cross_entropy", (logits, labels), ((*rows, "v"), rows), (), dtype="fp32")


def experts(t: Translation, node: TracedNode) -> None:
    """our.experts: the parameters are operands that the text does not show."""
    x, *weights = (t.name(a) for a in node.args)
    labels = tuple(range(len(node.shape)))
    hidden = [tuple(f"{i}.{j}" for j in range(len(t.shape(w)))) for i, w in enumerate(weights)]
    t.emit(node, "experts", (x, *weights), (labels, *hidden), labels, **node.kwargs)
