"""How a block is trained: gradients, their accumulation, the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagewright.blocks.builder import Block, Builder
from stagewright.blocks.recipe import Precision, Recipe
from stagewright.graph.gradient import backward
from stagewright.graph.make import add, apply, cast, elementwise, identity, leaf, letters
from stagewright.graph.node import Graph, Node, replace, toposort
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
    """Append backward, gradient accumulation and the optimizer step.

    `others` are inputs besides `x` whose gradients are asked for as well. Without a `y` the stream
    passes, or ends here.
    """
    seeds: dict[Node, Node] = {}
    if y is not None:
        seeds[y] = _loss_seed(y) if is_loss else _seed(y, "dy", STREAM)
    elif passes and x is not None:
        seeds[x] = _seed(x, "dy", STREAM)
    for carried, n in (b.taken | b.made).items():
        if carried not in b.recipe.ends:
            seeds[n] = _seed(n, f"d_{carried}", carried)
    others = [*others, *b.taken.values()]
    wrt = list(b.used.values())
    (last, seed), *more = seeds.items()
    found = backward(last, seed, [*others, *([x] if x else []), *wrt], dict(more))
    results = [n for n in (*b.extra.values(), *b.counted.values(), y, *b.made.values()) if n]
    outputs = {"loss" if is_loss else "y": y} if y is not None else {}
    outputs |= b.extra | b.made
    gradients = found.gradients[len(others) :]
    for other, g in zip(others, found.gradients, strict=False):
        named = f"d_{other.name}"
        outputs[named] = identity(g, named, phase="backward")
    if x:
        outputs["dx"] = identity(gradients[0], "dx", phase="backward")
        gradients = gradients[1:]
    squares: list[Node] = []
    updates: dict[str, Callable[[Node | None], Node]] = {}
    synced: dict[Node, Node] = {}
    for buffer, counts in b.counted.items():
        outputs[f"new.{buffer}"] = _counted(b.params[buffer], counts)
    trained = [p for p in b.params.values() if not p.binding.buffer]
    for p, g in zip(trained, gradients, strict=True):
        table = p.binding.tied
        tie = b.recipe.tie(table, first=not is_loss) if table else None
        if tie and tie.later and b.recipe.sum_tied:
            g = _with_later(p, g)
        if tie and not tie.owner:  # the tensor is that of a block before
            if b.recipe.sum_tied and not tie.leads:
                own = {"phase": "backward", **_of(p)}
                handed = "tied_grad" if table == TABLE else f"d_{table}"
                outputs[handed] = identity(g, f"d_{p.name}", role=Role.TABLE_GRADIENT, **own)
            else:
                synced[g] = _accumulated(p, _made(p, g, b.recipe), b.recipe.precision)
                outputs[f"grad.{p.name}"] = synced[g]
            continue
        synced[g] = reduced = _reduced(p, g, b.recipe, away=tie is not None and tie.away)
        if b.recipe.clip_grad and not (tie and not tie.first):
            z = letters(reduced)
            spec = f"{z}->"
            own: dict[str, Any] = {"phase": "optimizer", "once": True, "scope": p.scope}
            squares.append(
                apply("norm2", spec, reduced, alone=(), **own, name="norm2", role=Role.SQUARED_NORM)
            )
        outputs[f"grad.{p.name}"] = reduced
        updates[p.name] = lambda scale, p=p, r=reduced: _update(p, r, b.recipe, scale)
    scale = None
    if b.recipe.clip_grad:
        outputs |= (
            {"norm2": add(*squares, phase="optimizer", once=True, name="norm2")} if squares else {}
        )
        live = Binding(live_in=CLIP)
        scale = leaf("input", (), "fp32", CLIP, binding=live, phase="optimizer", once=True)
    outputs |= {f"new.{name}": update(scale) for name, update in updates.items()}
    forward = toposort(results)
    order = [*forward, *(x for g in found.order for x in (g, synced.get(g, g)))]
    return Block(name, Graph.of([*order, *outputs.values()], outputs), found.primal)


def _loss_seed(y: Node) -> Node:
    return leaf("input", (), "fp32", "d_loss", phase="backward", scope=y.scope)


def _seed(n: Node, name: str, live: str) -> Node:
    """The gradient of the live value `live` as the blocks behind found it."""
    bound = Binding(live_in=live)
    return leaf("input", n.shape, n.dtype, name, phase="backward", binding=bound)


def _of(p: Node) -> dict[str, Any]:
    """Scope and binding of what belongs to a parameter: its gradients, states and update."""
    return {"scope": p.scope, "binding": Binding(param=p.binding.param, buffer=p.binding.buffer)}


def _with_later(p: Node, g: Node) -> Node:
    """A gradient and those that the blocks behind found for the same tensor."""
    table = p.binding.tied
    name = "tied_grad" if table == TABLE else f"d_{table}"
    own: dict[str, Any] = {
        "phase": "backward",
        "binding": Binding(param=p.binding.param, live_in=table),
    }
    other = leaf("input", p.shape, g.dtype, name, role=Role.TABLE_GRADIENT, **own)
    return add(g, other, phase="backward", scope=p.scope, name=f"d_{p.name}")


def _accumulated(p: Node, g: Node, precision: Precision) -> Node:
    """Add one microbatch's gradient to the step's."""
    own = {"phase": "backward", **_of(p)}
    named: dict[str, Any] = {"phase": "backward", "scope": p.scope, "name": f"{p.name}.grad"}
    g = cast(g, precision.reduce or precision.gradient, **named)
    g = identity(g, f"{p.name}.grad", role=Role.MICROBATCH_GRADIENT, **own)
    g = cast(g, precision.gradient, **named)
    return elementwise("accumulate", g, name=f"{p.name}.grad", role=Role.ACCUMULATED, **own)


def _made(p: Node, g: Node, recipe: Recipe) -> Node:
    """One microbatch's gradient as PyTorch's ranks of a model have it."""
    own: dict[str, Any] = {"phase": "backward", **_of(p)}
    if recipe.whole_embedding_grad and g.op == "embedding_bwd":
        g = replace(g, role=Role.WHOLE_GRADIENT, binding=own["binding"])
        g = identity(g, f"{p.name}.grad", role=Role.OWN_ROWS, **own)
    if not recipe.sum_as_made:
        return g
    return identity(g, f"{p.name}.grad", role=Role.SUM_OVER_MODEL, **own)


def _reduced(p: Node, g: Node, recipe: Recipe, *, away: bool) -> Node:
    """From one microbatch's gradient to the step's: the places where a strategy may reduce it."""
    own = {"phase": "backward", **_of(p), "once": True}
    g = _accumulated(p, _made(p, g, recipe), recipe.precision)
    if recipe.sum_as_made:
        g = identity(g, f"{p.name}.grad", role=Role.SUM_OVER_MODEL, **own)
    g = identity(g, f"{p.name}.grad", role=Role.STEP_GRADIENT, **own)
    g = identity(g, f"{p.name}.grad", role=Role.REDUCED, **own)
    if away:
        own["binding"] = Binding(param=p.binding.param, tied=p.binding.tied)
        g = elementwise("tie", g, name=f"{p.name}.grad", role=Role.TIED, **own)
    return g


def _counted(p: Node, counts: Node) -> Node:
    """A buffer's step: what the tokens of all microbatches and ranks add up to, and its update."""
    own = _of(p)
    backward: dict[str, Any] = {"phase": "backward", **own}
    total = elementwise("accumulate", counts, name=f"{p.name}.count", role=Role.COUNT, **backward)
    total = identity(total, f"{p.name}.count", role=Role.COUNTED, once=True, **backward)
    own |= {"phase": "optimizer", "once": True}
    state = leaf("state", p.shape, p.dtype, p.name, role=Role.MASTER, **own)
    new = elementwise("bias_update", total, state, dtype=p.dtype, **own)
    return identity(new, f"{p.name}.new", role=Role.UPDATED, **own)


def _update(p: Node, g: Node, recipe: Recipe, scale: Node | None) -> Node:
    """One parameter's optimizer step: reads gradient and states, writes states and parameter."""
    precision = recipe.precision
    own: dict[str, Any] = {"phase": "optimizer", "once": True, **_of(p)}
    dtypes = {"master": precision.master} if precision.master else {}
    dtypes |= {m: precision.dtype_of(m) for m in OPS[recipe.optimizer].moments}
    states = [
        leaf("state", p.shape, d, f"{p.name}.{s}", role=Role.STATE, **own)
        for s, d in dtypes.items()
    ]
    if recipe.step_tensors:
        states.append(leaf("state", (), "fp32", f"{p.name}.step", role=Role.STATE, **own))
    if not precision.master:  # the parameter is its own master copy
        states.insert(0, leaf("state", p.shape, p.dtype, p.name, role=Role.MASTER, **own))
    z = letters(p)
    times = range(recipe.sum_as_read)
    reads = [identity(g, f"{g.name}{i}", role=Role.READ, **own) for i in times] or [g]
    operands = [*reads, *([scale] if scale else []), *states]
    terms = [*[z] * len(reads), *([""] if scale else []), *(z if s.shape else "" for s in states)]
    spec = ",".join(terms) + "->" + z
    new = apply(
        recipe.optimizer,
        spec,
        *operands,
        dtype=p.dtype,
        updates=len(OPS[recipe.optimizer].moments) + bool(precision.master),
        name=f"{p.name}.new",
        **own,
    )
    return identity(new, f"{p.name}.new", role=Role.UPDATED, **own)
