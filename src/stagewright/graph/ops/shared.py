"""Gradients that ops of several families have."""

from __future__ import annotations

from stagewright.graph.make import apply, letters
from stagewright.graph.node import Node
from stagewright.graph.table import Grads, own_attributes


def no_gradient(n: Node, g: Node) -> Grads:
    """A result that its operand's gradient does not depend on."""
    return (None,) * len(n.srcs)


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
