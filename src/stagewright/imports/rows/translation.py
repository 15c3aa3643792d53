"""The walk over a recording that makes calls of its nodes, and what the rows of the table use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.imports.calls import LEAVES, Label, Labels, OpCall
from stagewright.imports.trace.nodes import TracedNodes
from stagewright.imports.trace.recording import Extent, Ref, TracedNode

Row = Callable[["Translation", TracedNode], None]


class Translation:
    """The calls of a recording, as they are made."""

    def __init__(
        self,
        nodes: TracedNodes,
        rows: Mapping[str, Row],
        functions: Mapping[str, str],
        as_bytes: Mapping[str, str],
        *,
        approximate: bool,
    ) -> None:
        """`rows`, `functions` and `as_bytes` are those of the table; `approximate`: operations
        without a row are counted by their bytes."""
        self.nodes, self.approximate = nodes, approximate
        self.rows, self.functions, self.known_bytes = rows, functions, as_bytes
        self.calls: dict[str, OpCall] = {}
        self.as_bytes: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    # ---- what rows use -------------------------------------------------------------------------

    def name(self, of: Any) -> str:
        """The name of an argument that has to be a tensor."""
        if not isinstance(of, Ref):
            raise UserError(f"an operand is {of!r}, wanted a tensor")
        return of.name

    def shape(self, name: str) -> tuple[Extent, ...]:
        """The dims of a value."""
        return self.calls[name].shape

    def emit(
        self,
        node: TracedNode,
        op: str,
        operands: Sequence[str],
        ins: Sequence[Labels],
        out: Labels,
        **how: Any,
    ) -> str:
        """Make a call of a node, and return the call's name; `how` are attributes of the op.

        Besides, `how` may say `whole`, the labels that the op needs all of, and of a step on the
        way to the node's result the `suffix` of its name, its `shape` and its `dtype`.
        """
        name, shape = node.name + how.pop("suffix", ""), how.pop("shape", None)
        dtype, whole = how.pop("dtype", "") or node.dtype, frozenset(how.pop("whole", ()))
        if dtype.startswith("complex") and op not in LEAVES and not self.approximate:
            raise UserError(
                f"{node.source or node.path or node.name}: {node.op} makes complex numbers, "
                "which have no cost here; write real and imaginary parts, or give --approximate, "
                "which counts a complex number as a real one"
            )
        self.calls[name] = OpCall(
            name, op, node.shape if shape is None else shape, dtype, tuple(operands), tuple(ins),
            out, whole, how, node.path, node.source,
        )  # fmt: skip
        return name

    def aligned(self, node: TracedNode, name: str) -> Labels:
        """The labels of an operand that is broadcast to the node's shape."""
        labels = tuple(range(len(node.shape)))
        return labels[len(labels) - len(self.shape(name)) :]

    def elementwise(
        self, node: TracedNode, op: str, *names: str, suffix: str = "", **attrs: Any
    ) -> str:
        """A call on operands that are broadcast to the node's shape."""
        ins = [self.aligned(node, name) for name in names]
        out = tuple(range(len(node.shape)))
        return self.emit(node, op, names, ins, out, suffix=suffix, **attrs)

    def bytes_only(self, node: TracedNode, *names: str, **how: Any) -> None:
        """A call that reads its operands and writes its result; all its dims are whole.

        Dims of operands that the result has are matched from the left, by extent.
        """
        out = tuple(range(len(node.shape)))
        ins: list[Labels] = []
        extra = len(out)
        for name in names:
            shape, at, labels = self.shape(name), 0, list[Label]()
            for extent in shape:
                found = next((i for i in range(at, len(out)) if node.shape[i] == extent), None)
                if found is None:
                    labels.append(extra)
                    extra += 1
                else:
                    labels.append(found)
                    at = found + 1
            ins.append(tuple(labels))
        batch = {0} if node.shape and isinstance(node.shape[0], str) else set[int]()
        whole = {x for labels in (*ins, out) for x in labels} - batch
        fn = node.op.split(".")[1] if "." in node.op else node.op
        kept = node.kwargs.get("keeps") or self.known_bytes.get(fn)
        self.emit(node, "opaque", names, ins, out, whole=whole, fn=fn, **_kept(kept, names), **how)

    # ---- the walk ------------------------------------------------------------------------------

    def run(self) -> dict[str, OpCall]:
        """All calls, in order."""
        for node in self.nodes.of.values():
            self._node(node)
        return self.calls

    def _node(self, node: TracedNode) -> None:
        if node.op in LEAVES:
            self.emit(node, node.op, (), (), tuple(range(len(node.shape))), **node.kwargs)
            return
        words = node.op.split(".")
        key = ".".join(words[:2]) if words[0] in ("aten", "our") else node.op
        kind = words[1] if len(words) > 1 else node.op
        if key in self.rows:
            try:
                self.rows[key](self, node)
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                where = node.source or node.path or node.name
                raise UserError(
                    f"{where}: no row for {node.op} with such arguments "
                    f"({type(error).__name__}: {error}); write it in another form"
                ) from None
        elif words[0] == "aten" and kind in self.functions:
            self.elementwise(node, "act", *list(node.operands())[:1], fn=self.functions[kind])
        elif words[0] == "aten" and (kind in self.known_bytes or self.approximate):
            (self.as_bytes if kind in self.known_bytes else self.unknown)[kind] += 1
            if node.dtype or node.shape:
                self.bytes_only(node, *self._tensors(node))
        elif self.approximate:
            self.unknown[node.op] += 1
            self.bytes_only(node, *self._tensors(node))
        else:
            where = f"{node.source}: " if node.source else ""
            raise UserError(
                f"{where}no row for {node.op} (in {node.path or 'the module'}); give --approximate "
                "to count it by the bytes that it reads and writes"
            )

    def _tensors(self, node: TracedNode) -> list[str]:
        """The operands of real numbers; of none, all."""
        names = list(dict.fromkeys(n for n in node.operands() if n in self.calls))
        return names


def _kept(kept: str | None, names: Sequence[str]) -> dict[str, Any]:
    """What the table says that autograd keeps of an opaque call, as the call's attributes."""
    if kept is None:
        return {}
    if kept == "constant":
        return {"keeps": kept}
    words = kept.split("&")
    there = [w for w in words if w == "result" or (w.isdigit() and int(w) < len(names))]
    own: dict[str, Any] = {"keeps": "&".join(there) or "nothing"}
    return own | ({"indices": True} if "indices" in words else {})
