"""Rows of changes of shape: views, parts and joins."""

from __future__ import annotations

from dataclasses import replace

from stagewright.imports.calls import Labels
from stagewright.imports.rows.translation import Translation
from stagewright.imports.trace.recording import Extent, Ref, TracedNode, argument, words


def reshape(t: Translation, node: TracedNode) -> None:
    """Dims that are split and joined in order."""
    t.emit(node, "reshape", [t.name(node.args[0])], ((),), ())


def _view(t: Translation, node: TracedNode, labels: Labels, out: Labels) -> None:
    t.emit(node, "view", [t.name(node.args[0])], [labels], out)


def transpose(t: Translation, node: TracedNode) -> None:
    """Two dims in each other's place."""
    rank = len(node.shape)
    a, b = (int(d) % rank for d in (node.args[1:3] if len(node.args) > 2 else (0, rank - 1)))
    labels = list(range(rank))
    labels[a], labels[b] = labels[b], labels[a]
    _view(t, node, tuple(range(rank)), tuple(labels))


def permute(t: Translation, node: TracedNode) -> None:
    """Dims in another order."""
    rank = len(node.shape)
    _view(t, node, tuple(range(rank)), tuple(int(d) % rank for d in node.args[1]))


def expand(t: Translation, node: TracedNode) -> None:
    """Dims of 1 become new ones, of which the value has only one copy."""
    x = t.name(node.args[0])
    shape, grown = t.shape(x), len(node.shape) - len(t.shape(x))
    labels = tuple(range(grown, len(node.shape)))
    out = tuple(
        i if i >= grown and shape[i - grown] == node.shape[i] else f"new{i}"
        for i in range(len(node.shape))
    )
    _view(t, node, labels, out)


def same(t: Translation, node: TracedNode) -> None:
    """The same value."""
    labels = tuple(range(len(node.shape)))
    _view(t, node, labels, labels)


def _part(
    t: Translation, node: TracedNode, x: str, dim: int, start: int, *, suffix: str = ""
) -> None:
    """The elements from `start` of a dim, as many as the node has there."""
    labels = tuple(range(len(node.shape)))
    out = tuple("p" if i == dim else i for i in labels)
    t.emit(node, "slice", [x], [labels], out, whole=(dim, "p"), dim=dim, start=start)


def slice(t: Translation, node: TracedNode) -> None:
    """Some consecutive elements of a dim."""
    args = [*node.args, None, None, None, None][:5]
    x, dim = t.name(args[0]), int(args[1] or 0) % len(node.shape)
    if t.shape(x)[dim] == node.shape[dim]:
        same(t, node)
        return
    start = _start(args[2], t.shape(x)[dim])
    _part(t, node, x, dim, start)


def _start(given: object, extent: Extent) -> int:
    """Where a part of a dim begins; a negative place counts from the end."""
    start = given if isinstance(given, int) else 0
    return start + extent if start < 0 and isinstance(extent, int) else start


def select(t: Translation, node: TracedNode) -> None:
    """One element of a dim, which the result lacks."""
    x = t.name(node.args[0])
    dim = int(node.args[1]) % len(t.shape(x))
    one = (*node.shape[:dim], 1, *node.shape[dim:])
    start = _start(node.args[2], t.shape(x)[dim])
    labels = tuple(range(len(one)))
    made = x
    if t.shape(x)[dim] != 1:
        out = tuple("p" if i == dim else i for i in labels)
        made = t.emit(
            node, "slice", [x], [labels], out, suffix=".one", shape=one, whole=(dim, "p"),
            dim=dim, start=start,
        )  # fmt: skip
    t.emit(node, "view", [made], [labels], tuple(i for i in labels if i != dim))


PIECES = ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split",
           "aten.unsafe_split", "aten.unsafe_chunk")  # fmt: skip


def getitem(t: Translation, node: TracedNode) -> None:
    """One of the results of an operation with several."""
    whole = t.nodes.of[t.name(node.args[0])]
    kind, nth = ".".join(whole.op.split(".")[:2]), int(node.args[1])
    if kind not in PIECES:
        if node.dtype and kind != "getitem":
            fn = whole.op.split(".")[1] if "." in whole.op else whole.op
            t.bytes_only(replace(node, op=f"aten.{fn}"), *list(whole.operands()))
        return
    x = t.name(whole.args[0])
    shape = t.shape(x)
    if kind == "aten.unbind":
        dim = int(argument(whole, 1)) % len(shape) if len(whole.args) > 1 else 0
        select(t, replace(node, args=(Ref(x), dim, nth)))
        return
    dim = int(whole.args[2]) % len(shape) if len(whole.args) > 2 else 0
    if kind == "aten.split_with_sizes" or words(argument(whole, 1)):
        start = sum(int(n) for n in words(argument(whole, 1))[:nth] if isinstance(n, int))
    elif kind in ("aten.split", "aten.unsafe_split"):
        start = nth * int(argument(whole, 1))
    else:
        start = nth * -(-int(shape[dim]) // int(argument(whole, 1)))
    _part(t, node, x, dim, start)


def pieces(t: Translation, node: TracedNode) -> None:
    """What has several results is nothing by itself."""


def cat(t: Translation, node: TracedNode) -> None:
    """Values behind each other, two at a time."""
    names = [t.name(a) for a in node.args[0]]
    names = [n for n in names if 0 not in t.shape(n)]
    dim = int(node.args[1]) % len(node.shape) if len(node.args) > 1 else 0
    while len(names) > 1:
        a, b, *rest = names
        labels = tuple(range(len(node.shape)))
        of_a, of_b = (tuple(f"{x}{i}" if i == dim else i for i in labels) for x in "ab")
        width = _add(t.shape(a)[dim], t.shape(b)[dim])
        shape = tuple(width if i == dim else n for i, n in enumerate(node.shape))
        suffix = f".{len(rest)}" if rest else ""
        made = t.emit(
            node, "join", (a, b), (of_a, of_b), labels, suffix=suffix, shape=shape,
            whole=(f"a{dim}", f"b{dim}", dim), dim=dim,
        )  # fmt: skip
        names = [made, *rest]
    if names[0] != node.name:
        labels = tuple(range(len(node.shape)))
        t.emit(node, "view", names, [labels], labels)


def _add(a: Extent, b: Extent) -> Extent:
    return a + b if isinstance(a, int) and isinstance(b, int) else f"{a} + {b}"


def stack(t: Translation, node: TracedNode) -> None:
    """Values behind each other along a new dim."""
    names = [t.name(a) for a in node.args[0]]
    dim = int(node.args[1]) % len(node.shape) if len(node.args) > 1 else 0
    grown: list[Ref] = []
    labels = tuple(range(len(node.shape) - 1))
    out = (*labels[:dim], "one", *labels[dim:])
    shape = tuple(1 if i == dim else n for i, n in enumerate(node.shape))
    for i, name in enumerate(names):
        grown.append(Ref(t.emit(node, "view", [name], [labels], out, suffix=f".v{i}", shape=shape)))
    cat(t, replace(node, args=(tuple(grown), dim)))
