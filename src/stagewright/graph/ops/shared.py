"""Helpers of several families: the place of a rank in an op, and common gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from stagewright.graph.make import apply, letters
from stagewright.graph.node import Node
from stagewright.graph.table import Grads, own_attributes


class Context(Protocol):
    """A rank's place in a sharded op, and the node's attributes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape of the result."""
        ...

    @property
    def count(self) -> int:
        """Points of the whole index space that the result sums over."""
        ...

    def start(self, letter: str) -> int:
        """The global index at which the rank's part of an index begins."""
        ...

    def size(self, letter: str) -> int:
        """The whole size of an index."""
        ...

    def shape_of(self, letter: str) -> int:
        """The size of the rank's part of an index."""
        ...

    def value(self, attr: str) -> int:
        """An attribute that is a size, as a number."""
        ...

    def leads(self, axes: tuple[str, ...]) -> bool:
        """True for the first rank along some axes: of equal copies, one counts."""
        ...

    def __getitem__(self, attr: str) -> Any:
        """An attribute of the node."""
        ...

    def get(self, attr: str, default: Any = None) -> Any:
        """An attribute of the node, or `default`."""
        ...


def same(ctx: Context, x: Any) -> Any:
    return x


def first(ctx: Context, x: Any, *_: Any) -> Any:
    return x


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def probabilities(scores: Any, sinks: Any = None) -> Any:
    """Softmax over the last dim; `sinks`, one score more per head, take what is missing to 1."""
    most = scores.max(-1, keepdims=True)
    if sinks is None:
        e = np.exp(scores - most)
        return e / e.sum(-1, keepdims=True)
    most = np.maximum(most, sinks)
    e = np.exp(scores - most)
    return e / (e.sum(-1, keepdims=True) + np.exp(sinks - most))


# ---- gradients -----------------------------------------------------------------------------------


def no_gradient(n: Node, g: Node) -> Grads:
    """A result that its operand's gradient does not depend on."""
    return (None,) * len(n.srcs)


def same_gradient(n: Node, g: Node) -> Grads:
    """A sum, whose operands have the gradient of the result."""
    return (g,) * len(n.srcs)


def reversed_by(op: str, *, but: str = "") -> Callable[[Node, Node], Grads]:
    """Gradient of an op of one operand: `op` with the index expression the other way round.

    It has the attributes of the node, `but` one.
    """

    def vjp(n: Node, g: Node) -> Grads:
        ins, out = str(n["spec"]).split("->")
        own = {k: v for k, v in own_attributes(n).items() if k != but}
        shape = n.srcs[0].shape
        return (apply(op, f"{out}->{ins}", g, out=shape, phase="backward", **own),)

    return vjp


def joint_gradients(n: Node, g: Node) -> Grads:
    """One kernel for all operands, and a row of `<op>_bwd` for the gradient of each."""
    ins, out = str(n["spec"]).split("->")
    return tuple(
        apply(
            f"{n.op}_bwd",
            f"{out},{ins}->{term}",
            g,
            *n.srcs,
            phase="backward",
            dtype=n.srcs[i].dtype,
            wrt=i,
            **own_attributes(n),
        )
        for i, term in enumerate(ins.split(","))
    )


def not_differentiated(n: Node, g: Node) -> Grads:
    """No gradient: the value only exists for a kernel that differentiates what it is made of."""
    raise AssertionError(
        f"{n} is no variable of its own: its user differentiates what it is made of"
    )


def sum_to(g: Node, keep: tuple[int, ...]) -> Node:
    """A gradient summed over all dims but those that are kept."""
    z = letters(g)
    return apply("sum", f"{z}->{''.join(z[i] for i in keep)}", g, phase="backward")
