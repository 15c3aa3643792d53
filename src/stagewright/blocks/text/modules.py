"""Modules that users write, as parts of a layer, as blocks of a chain, or by themselves."""

from __future__ import annotations

from stagewright.algebra.size import size
from stagewright.blocks.builder import Block, Builder, stream
from stagewright.blocks.recipe import Recipe
from stagewright.blocks.training import finish
from stagewright.errors import UserError
from stagewright.graph.make import cast, identity, leaf
from stagewright.graph.node import Node, toposort
from stagewright.graph.roles import Binding
from stagewright.model.config import ModelConfig
from stagewright.model.layers import ChainLink, Layer, Module


def module_named(config: ModelConfig, name: str) -> Module:
    """The model's module of this name."""
    return next(m for m in config.modules if m.name == name)


def chained(config: ModelConfig, recipe: Recipe, what: Layer) -> Block:
    """A module as a block of a chain: its first input is the stream, but for the chain's first.

    Inputs that modules before this one hand on are live values; all others come from outside. The
    last module of a chain ends with a loss if what it yields is a number.
    """
    b = Builder(config, recipe)
    module = module_named(config, what.module)
    first = module.name == ChainLink.read(config.chain[0]).module
    handed = {name for m in config.modules for name in m.hands}
    values: dict[str, Node] = {}
    x = None
    for name, dims, dtype in module.inputs:
        if x is None and not first:
            values[name] = x = stream(dims, dtype or b.dtype, scope=module.name)
        elif name in handed and name not in module.hands:
            values[name] = b.take(name, *dims, dtype=dtype)
        else:
            bound = Binding(like=name)
            values[name] = leaf(
                "input", dims, dtype or b.dtype, name, scope=module.name, binding=bound
            )
    y = _built(module, b, values)
    kind = "layer" if what.mixer else "module"
    if not y.shape:
        return finish(kind, b, x, cast(y, "fp32", name="loss"), is_loss=True)
    return finish(kind, b, x, identity(y, "y"))


def part_of_layer(module: Module, b: Builder, h: Node) -> Node:
    """A user's module as a mixer or an MLP: from [B, S, M] to what is added to the stream."""
    (first, dims, _), *others = module.inputs
    if others:
        names = ", ".join(name for name, _, _ in others)
        raise UserError(
            f"module {module.name} has the inputs {names} besides {first}, wanted one input to be "
            "part of a layer; make them in the module, or use it by itself"
        )
    if tuple(size(d) for d in dims) != h.shape:
        shown = ", ".join(map(str, dims))
        raise UserError(f"module {module.name}: {first} is [{shown}], wanted [B, S, M] in a layer")
    y = _built(module, b, {first: identity(h, f"{module.name}.{first}")})
    if y.shape != h.shape:
        shown = ", ".join(map(str, y.shape))
        raise UserError(f"module {module.name} yields [{shown}], wanted [B, S, M] in a layer")
    return y


def _built(module: Module, b: Builder, inputs: dict[str, Node]) -> Node:
    """A module's output; a UserError names an input or parameter that it does not depend on."""
    before = set(b.used)
    y = module.build(b, inputs)
    needed = set(toposort([y, *b.made.values()]))
    own = {name: node for name, node in b.used.items() if name not in before}
    idle = next((name for name, node in (inputs | own).items() if node not in needed), None)
    if idle is not None:
        raise UserError(
            f"module {module.name}: {module.output} does not depend on {idle}; use it, or leave it "
            "out"
        )
    return y


def bare(b: Builder, module: Module) -> Block:
    """A module by itself: its inputs and the gradient of its output come from outside."""
    values: dict[str, Node] = {}
    for name, dims, dtype in module.inputs:
        if values:
            values[name] = leaf("input", dims, dtype or b.dtype, f"{module.name}.{name}")
        else:
            values[name] = stream(dims, dtype or b.dtype)
    y = _built(module, b, values)
    x, *others = values.values()
    if b.config.num_layers > 1 and (x.shape, x.dtype) != (y.shape, y.dtype):
        raise UserError(
            f"module {module.name} makes {y} of {x}: layers of it cannot follow each other; use "
            "--layers 1"
        )
    return finish("layer", b, x, y, others=[n for n in others if n.dtype == b.dtype])
