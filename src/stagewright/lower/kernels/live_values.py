"""Values that the blocks of a model exchange: the residual stream, tables, gradients."""

from __future__ import annotations

from typing import NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import CHOSEN, CLIP, GATHERED, MEMORY, STREAM, TABLE


class LiveValue(NamedTuple):
    """Value that blocks pass to later ones, or its gradient, which goes the other way.

    The residual stream is "x". A block that does not make a value passes it on.
    """

    name: str
    gradient: bool = False


OUTPUTS = {
    "y": LiveValue(STREAM),
    CHOSEN: LiveValue(CHOSEN),
    MEMORY: LiveValue(MEMORY),  # output of an encoder, which a decoder's layers attend to
    "dx": LiveValue(STREAM, gradient=True),
    "tied_grad": LiveValue(TABLE, gradient=True),
}


def interface(n: Node) -> LiveValue | None:
    """Live value of an input node; None: from outside the model."""
    name = n.binding.live_in
    return LiveValue(name, n.phase == "backward") if n.op == "input" and name else None


def carried(graph: Graph) -> dict[str, Node]:
    """Inputs of a block from earlier blocks, other than the stream: leaves by name."""
    inputs = ((c, n) for n in graph if (c := interface(n)) and not c.gradient)
    return {c.name: n for c, n in inputs if c.name not in (STREAM, CLIP)}


def outputs(graph: Graph) -> dict[LiveValue, Node]:
    """Outputs of a block that other blocks read, by name.

    A value other than the stream has the name of its leaf; its gradient has `d_` and that name.
    """
    names = {c.name for n in graph if (c := interface(n))}
    names |= {n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
    gathered = {f"{GATHERED}.{x}": LiveValue(x) for x in names}
    names -= {STREAM, TABLE, CLIP}
    keys = OUTPUTS | gathered | {x: LiveValue(x) for x in names}
    keys |= {f"d_{x}": LiveValue(x, gradient=True) for x in names}
    return {keys[key]: n for key, n in graph.outputs.items() if key in keys}
