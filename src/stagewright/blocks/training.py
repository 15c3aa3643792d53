"""The end of a block: in training with gradients, their accumulation and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from stagewright.blocks import inference
from stagewright.blocks.builder import Block, Builder
from stagewright.blocks.recipe import Recipe
from stagewright.graph.gradient import backward, dependent
from stagewright.graph.make import add, apply, cast, elementwise, identity, leaf, letters
from stagewright.graph.node import INTEGERS, Graph, Node, replace, toposort
from stagewright.graph.roles import CLIP, STREAM, TABLE, Binding, Role
from stagewright.graph.table import OPS


def finish(
    name: str,
    b: Builder,
    x: Node | None,
    y: Node | None,
    *,
    is_loss: bool = False,
    passes: bool = False,
    others: Sequence[Node] = (),
) -> Block:
    """The whole block: forward, and in training backward, gradient accumulation, optimizer step.

    `x` and `y` are the residual stream before and after the block. Gradients are computed for `x`,
    `others` and all parameters, but for what the recipe says is frozen. Without `y` the residual
    stream ends here, or, if `passes`, it goes through the block unchanged.
    """
    if b.recipe.inference:
        return inference.finish(name, b, y)
    if b.recipe.parameters_alone:
        return _trained_parameters(name, b, table_comes_first=not is_loss)
    training = b.recipe.training
    inputs = [*others, *(n for n in b.taken.values() if has_gradient(n)), *([x] if x else [])]
    inputs = [n for n in inputs if n.binding.live_in not in training.constant]
    named = ["dx" if n is x else f"d_{n.name}" for n in inputs]
    parameters = [name for name in b.used if name not in training.frozen]
    (last, seed), *more = _seeds(b, y, x if passes else None, is_loss=is_loss).items()
    wrt = [*inputs, *(b.used[name] for name in parameters)]
    result = backward(last, seed, wrt, dict(more))
    outputs = {"loss" if is_loss else "y": y} if y is not None else {}
    outputs |= b.extra | b.made
    for gradient, g in zip(named, result.gradients, strict=False):
        outputs[gradient] = identity(g, gradient, phase="backward")
    for buffer, counts in b.counted.items():
        outputs[f"new.{buffer}"] = _counted(b.params[buffer], counts)
    of_parameters = zip(
        (b.params[name] for name in parameters), result.gradients[len(inputs) :], strict=True
    )
    gradients, summed, trained = _gradients(b, of_parameters, table_comes_first=not is_loss)
    outputs |= gradients | _optimizer_step(trained, b.recipe)
    results = [n for n in (*b.extra.values(), *b.counted.values(), y, *b.made.values()) if n]
    order = [*toposort(results), *(n for g in result.order for n in (g, summed.get(g, g)))]
    made = b.made if y is None or is_loss else {STREAM: y, **b.made}
    active = dependent(toposort(made.values()), wrt)
    graph = Graph.of([*order, *outputs.values()], outputs)
    return Block(name, graph, result.primal, {live: n in active for live, n in made.items()})


def _trained_parameters(name: str, b: Builder, *, table_comes_first: bool) -> Block:
    """The parameters that the block's optimizer step would update, and nothing that uses them."""
    weights: dict[str, Node] = {}
    for key, p in b.params.items():
        table = p.binding.tied
        tie = b.recipe.tie(table, first=table_comes_first) if table else None
        if not p.binding.buffer and (tie is None or tie.owner):
            weights[key] = p
    return Block(name, Graph.of(weights.values(), weights), {})


def has_gradient(n: Node) -> bool:
    """True for a live value of real numbers; numbers of keys, for example, have no gradient."""
    return n.dtype not in INTEGERS


class Trained(NamedTuple):
    """A parameter and its gradient, summed over the microbatches of a step."""

    parameter: Node
    gradient: Node
    in_norm: bool
    """True if the gradient counts in the global norm for clipping; that of a tied copy does not."""


def _seeds(b: Builder, y: Node | None, passing: Node | None, *, is_loss: bool) -> dict[Node, Node]:
    """Live outputs of the block, each with its gradient, which the next block computed."""
    seeds: dict[Node, Node] = {}
    if y is not None:
        loss = leaf("input", (), "fp32", "d_loss", phase="backward", scope=y.scope)
        seeds[y] = loss if is_loss else _seed(y, "dy", STREAM)
    elif passing is not None:
        seeds[passing] = _seed(passing, "dy", STREAM)
    for live, n in (b.taken | b.made).items():
        if live not in b.recipe.ends and has_gradient(n):
            seeds[n] = _seed(n, f"d_{live}", live)
    return seeds


def _gradients(
    b: Builder, of_microbatch: Iterable[tuple[Node, Node]], *, table_comes_first: bool
) -> tuple[dict[str, Node], dict[Node, Node], list[Trained]]:
    """Accumulate the gradients of parameters over microbatches, and reduce them over replicas.

    `of_microbatch` are parameters that train, each with its gradient. Returns the outputs of the
    block by name; the accumulated gradient by the gradient of a microbatch; and the parameters that
    this block's optimizer step updates. `table_comes_first`: where the recipe does not say which
    copy of a tied table is the first, the block has it.
    """
    recipe = b.recipe
    outputs: dict[str, Node] = {}
    summed: dict[Node, Node] = {}
    trained: list[Trained] = []
    for p, g in of_microbatch:
        table = p.binding.tied
        tie = recipe.tie(table, first=table_comes_first) if table else None
        if tie and tie.later and recipe.sum_tied:
            g = _with_later(p, g)
        if tie and not tie.owner and recipe.sum_tied and not tie.leads:
            # An earlier block owns the tensor, and adds this gradient to its own.
            attrs = {"phase": "backward", **_of(p)}
            handed = "tied_grad" if table == TABLE else f"d_{table}"
            outputs[handed] = identity(g, f"d_{p.name}", role=Role.TABLE_GRADIENT, **attrs)
            continue
        summed[g] = _accumulated(p, g, recipe)
        if not tie or tie.owner:
            summed[g] = _reduced(p, summed[g], recipe)
            if tie and tie.away:
                summed[g] = _tied(p, summed[g])
            trained.append(Trained(p, summed[g], in_norm=not tie or tie.first))
        outputs[f"grad.{p.name}"] = summed[g]
    return outputs, summed, trained


def _optimizer_step(trained: Sequence[Trained], recipe: Recipe) -> dict[str, Node]:
    """The updated parameters, and the global norm of the gradients where they are clipped."""
    outputs: dict[str, Node] = {}
    scale = None
    if recipe.clip_grad:
        squares = [_squared_norm(t.parameter, t.gradient) for t in trained if t.in_norm]
        if squares:
            outputs["norm2"] = add(*squares, phase="optimizer", once=True, name="norm2")
        live = Binding(live_in=CLIP)
        scale = leaf("input", (), "fp32", CLIP, binding=live, phase="optimizer", once=True)
    for p, g, _ in trained:
        outputs[f"new.{p.name}"] = _update(p, g, recipe, scale)
    return outputs


def _squared_norm(p: Node, g: Node) -> Node:
    attrs: dict[str, Any] = {"phase": "optimizer", "once": True, "scope": p.scope}
    spec = f"{letters(g)}->"
    return apply("norm2", spec, g, alone=(), **attrs, name="norm2", role=Role.SQUARED_NORM)


def _seed(n: Node, name: str, live: str) -> Node:
    """The gradient of the live value `live`, an input from the next block."""
    bound = Binding(live_in=live)
    return leaf("input", n.shape, n.dtype, name, phase="backward", binding=bound)


def _of(p: Node) -> dict[str, Any]:
    """Scope and binding of a parameter's gradients, optimizer states and update."""
    return {"scope": p.scope, "binding": Binding(param=p.binding.param, buffer=p.binding.buffer)}


def _with_later(p: Node, g: Node) -> Node:
    """The sum of this block's gradient and those of later blocks for the same tied tensor."""
    table = p.binding.tied
    name = "tied_grad" if table == TABLE else f"d_{table}"
    attrs: dict[str, Any] = {
        "phase": "backward",
        "binding": Binding(param=p.binding.param, live_in=table),
    }
    other = leaf("input", p.shape, g.dtype, name, role=Role.TABLE_GRADIENT, **attrs)
    return add(g, other, phase="backward", scope=p.scope, name=f"d_{p.name}")


# ---- places of a gradient where a plan may sum or reduce it --------------------------------------


def _accumulated(p: Node, g: Node, recipe: Recipe) -> Node:
    """The gradient of a step, to which that of a microbatch is added."""
    precision, gradients = recipe.precision, recipe.gradients
    attrs = _of(p)
    named: dict[str, Any] = {"phase": "backward", "scope": p.scope, "name": f"{p.name}.grad"}
    if gradients.whole_embedding and g.op == "embedding_bwd":
        # Each rank computes the gradient of the whole table and keeps its own rows.
        g = replace(g, role=Role.WHOLE_GRADIENT, binding=attrs["binding"])
        g = _at(p, g, Role.OWN_ROWS)
    if gradients.sum_as_made:  # over the ranks of one model replica
        g = _at(p, g, Role.SUM_OVER_MODEL)
    g = cast(g, precision.reduce or precision.gradient, **named)
    g = _at(p, g, Role.MICROBATCH_GRADIENT)
    if not gradients.accumulated_as_reduced:
        g = cast(g, precision.gradient, **named)
    return elementwise("accumulate", g, role=Role.ACCUMULATED, **named | attrs)


def _reduced(p: Node, g: Node, recipe: Recipe) -> Node:
    """The gradient of a step, reduced over replicas into the layout that the optimizer reads."""
    if recipe.gradients.sum_as_made:  # what is still a partial sum after accumulation
        g = _at(p, g, Role.SUM_OVER_MODEL, once=True)
    g = _at(p, g, Role.STEP_GRADIENT, once=True)
    named: dict[str, Any] = {"phase": "backward", "scope": p.scope, "name": f"{p.name}.grad"}
    return _at(p, cast(g, recipe.precision.gradient, **named, once=True), Role.REDUCED, once=True)


def _at(p: Node, g: Node, role: Role, *, once: bool = False) -> Node:
    """A gradient at a place that a plan names by its role."""
    return identity(g, f"{p.name}.grad", role=role, phase="backward", once=once, **_of(p))


def _tied(p: Node, g: Node) -> Node:
    """Gradients of a tied table's copies on other pipeline stages are summed."""
    attrs: dict[str, Any] = {"phase": "backward", "once": True, "scope": p.scope}
    attrs["binding"] = Binding(param=p.binding.param, tied=p.binding.tied)
    return elementwise("tie", g, name=f"{p.name}.grad", role=Role.TIED, **attrs)


# ---- buffers and parameters at the end of a step -------------------------------------------------


def _counted(p: Node, counts: Node) -> Node:
    """Update of a buffer from the token counts of all microbatches and ranks."""
    attrs = _of(p)
    backward: dict[str, Any] = {"phase": "backward", **attrs}
    total = elementwise("accumulate", counts, name=f"{p.name}.count", role=Role.COUNT, **backward)
    total = identity(total, f"{p.name}.count", role=Role.COUNTED, once=True, **backward)
    attrs |= {"phase": "optimizer", "once": True}
    state = leaf("state", p.shape, p.dtype, p.name, role=Role.MASTER, **attrs)
    new = elementwise("bias_update", total, state, dtype=p.dtype, **attrs)
    return identity(new, f"{p.name}.new", role=Role.UPDATED, **attrs)


def _update(p: Node, g: Node, recipe: Recipe, scale: Node | None) -> Node:
    """One parameter's optimizer step: reads gradient and states, writes states and parameter."""
    precision = recipe.precision
    attrs: dict[str, Any] = {"phase": "optimizer", "once": True, **_of(p)}
    dtypes = {"master": precision.master} if precision.master else {}
    plain = recipe.optimizer == "sgd" and not recipe.updates.momentum
    moments = () if plain else OPS[recipe.optimizer].moments
    dtypes |= {m: precision.dtype_of(m) for m in moments}
    states = [
        leaf("state", p.shape, d, f"{p.name}.{s}", role=Role.STATE, **attrs)
        for s, d in dtypes.items()
    ]
    if recipe.updates.step_tensors:
        states.append(leaf("state", (), "fp32", f"{p.name}.step", role=Role.STATE, **attrs))
    if not precision.master:  # the parameter is its own master copy
        states.insert(0, leaf("state", p.shape, p.dtype, p.name, role=Role.MASTER, **attrs))
    z = letters(p)
    times = range(recipe.updates.partial_reads)
    reads = [identity(g, f"{g.name}{i}", role=Role.READ, **attrs) for i in times] or [g]
    operands = [*reads, *([scale] if scale else []), *states]
    terms = [*[z] * len(reads), *([""] if scale else []), *(z if s.shape else "" for s in states)]
    spec = ",".join(terms) + "->" + z
    new = apply(
        recipe.optimizer,
        spec,
        *operands,
        dtype=p.dtype,
        updates=len(moments) + bool(precision.master),
        name=f"{p.name}.new",
        **attrs,
    )
    return identity(new, f"{p.name}.new", role=Role.UPDATED, **attrs)
