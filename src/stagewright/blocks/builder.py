"""The builder, with which the forward pass of a block is written, and the block that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.algebra.size import Size, size
from stagewright.blocks.adapters import factors
from stagewright.blocks.recipe import Adapter, Recipe
from stagewright.graph.make import add, apply, cast, einsum, elementwise, identity, leaf, letters
from stagewright.graph.node import Graph, Node, replace
from stagewright.graph.parameter import Parameter
from stagewright.graph.roles import GATHERED, STREAM, Binding, Role
from stagewright.model.config import ModelConfig
from stagewright.stored import Stored

SHARED = "shared"
"""Begins the names of a shared block's parameters and, with the block's number, of their tables."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A piece of the model: a single-device graph, in training with backward and optimizer.

    Interface: inputs `x` and `dy`, outputs `y` and `dx` (absent at the ends of the model). `primal`
    maps gradients to the values they belong to.
    """

    name: str
    graph: Graph
    primal: Mapping[Node, Node]
    trained: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """By live value that the block makes: True if it depends on anything that trains."""


def renamed(block: Block, name: str, rename: Callable[[Size], Size]) -> Block:
    """The same block with other sizes."""

    def visit(old: Node, srcs: tuple[Node, ...]) -> Node:
        return replace(old, srcs=srcs, shape=tuple(rename(d) for d in old.shape))

    graph, table = block.graph.rebuild(visit)
    primal = {table[g]: table[p] for g, p in block.primal.items() if g in table and p in table}
    return Block(name, graph, primal, block.trained)


def stream(dims: tuple[str | Size, ...], dtype: str, *, scope: str = "") -> Node:
    """The residual stream that the block before hands to this one."""
    return leaf("input", dims, dtype, "x", scope=scope, binding=Binding(live_in=STREAM))


def sizes_of(dims: Iterable[str | Size], declared: Parameter) -> tuple[Size, ...]:
    """The sizes of declared dims, without what splits them."""
    pairs = zip(dims, declared.placement.dims, strict=True)
    return tuple(d if isinstance(d, Size) else size(text) for d, text in pairs)


@dataclass(slots=True)
class Builder:
    """Collects the parameters of a block while its forward pass is written down."""

    config: ModelConfig
    recipe: Recipe
    params: dict[str, Node] = field(default_factory=dict[str, Node])
    used: dict[str, Node] = field(default_factory=dict[str, Node])
    counted: dict[str, Node] = field(default_factory=dict[str, Node])
    """By buffer, the sum over a step's tokens that updates it."""
    extra: dict[str, Node] = field(default_factory=dict[str, Node])
    """Outputs that no value of the block depends on: caches, for example."""
    taken: dict[str, Node] = field(default_factory=dict[str, Node])
    """Live values besides the residual stream that blocks before this one made."""
    made: dict[str, Node] = field(default_factory=dict[str, Node])
    """Live values besides the residual stream that this block makes."""
    block: int = 0
    """The number of the shared block that is being written; 0: the layer itself is."""

    @property
    def dtype(self) -> str:
        """The number format of activations."""
        return self.recipe.precision.compute

    def param(
        self,
        name: str,
        *dims: str | Size,
        scope: str = "",
        tied: str = "",
        dtype: str | Stored = "",
        own: bool = False,
        rows: int = -1,
    ) -> Node:
        """A parameter as the computation sees it, its dims with the degrees that split them.

        `b.param("w_up", "M", "F/tp")` is [M, F], of which a rank of tp has some columns; `Plan`
        says which axes a degree, or a part such as "tp.kv", stands for. `tied` names the table that
        the parameter is a copy of; a parameter of a shared block has copies in all layers that
        share the block, unless it is the layer's `own`. The first copy of a stage hands what it has
        gathered to the others where these are of one unit. `rows` is as in `Parameter`; `dtype`
        says how the parameter is stored where that is not what is computed in.
        """
        if self.block and not own:
            name, tied = f"{SHARED}.{name}", f"{SHARED}{self.block}.{name}"
        if name not in self.params:
            declared = Parameter.declare(name, *dims, rows=rows)
            if isinstance(dtype, Stored):
                declared, dtype = declared._replace(stored=dtype), dtype.values
            shape = sizes_of(dims, declared)
            bound: dict[str, Any] = {"scope": scope, "binding": Binding(param=declared, tied=tied)}
            stored = dtype or self.recipe.precision.param or self.dtype
            self.params[name] = p = leaf("param", shape, stored, name, role=Role.PARAMETER, **bound)
            tie = self.recipe.gathered_with(tied)
            if tie and not tie.leads:
                handed = Binding(param=declared, live_in=tied)
                self.used[name] = leaf(
                    "input", shape, self.dtype, name, role=Role.USED, scope=scope, binding=handed
                )
                return self.used[name]
            used: dict[str, Any] = {"once": self.recipe.gather_once, "scope": scope}
            used["binding"] = Binding(param=declared)
            x = p if dtype else cast(p, self.dtype, name=name, role=Role.SENT, **used)
            self.used[name] = identity(x, name, role=Role.USED, **used)
            if tie and tie.later:
                self.extra[f"{GATHERED}.{tied}"] = self.used[name]
        return self.used[name]

    def take(self, name: str, *dims: str, dtype: str = "") -> Node:
        """A live value that a block before this one made; blocks behind may take it, too."""
        if name not in self.taken:
            live = Binding(live_in=name)
            self.taken[name] = leaf("input", dims, dtype or self.dtype, name, binding=live)
        return self.taken[name]

    def make(self, name: str, value: Node) -> Node:
        """Make a live value, for this block and for blocks behind it."""
        self.made[name] = identity(value, name)
        return self.made[name]

    def buffer(self, name: str, *dims: str, scope: str = "") -> Node:
        """An fp32 parameter that no gradient reaches; every rank has all of it."""
        bound = Binding(param=Parameter.declare(name, *dims), buffer=True)
        p = leaf("param", dims, "fp32", name, role=Role.PARAMETER, binding=bound, scope=scope)
        self.params[name] = p
        return p

    def weight(self, name: str, *dims: str | Size, scope: str = "", **declared: Any) -> Node:
        """A matrix, declared as in `param`, stored as it is where it is served or frozen."""
        return self.param(
            name, *dims, scope=scope, dtype=self.recipe.stored(name, scope) or "", **declared
        )

    def lowered(self, x: Node, stored: Stored | None) -> Node:
        """An input in the format in which it is multiplied with a matrix that is stored so."""
        low = stored.product if stored else ""
        return cast(x, low, scope=x.scope, name=x.name) if low else x

    def linear(
        self, spec: str, x: Node, w: Node, name: str,
        *, trained: bool = True, joint: str = "", **fields: Any,
    ) -> Node:  # fmt: skip
        """A matrix product of a layer, in the recipe's format for matrix products.

        `trained`: in training, too; otherwise such a product is lowered in inference only. `joint`:
        products of one input that share this name are timed as one, where the recipe says so.
        """
        low, of = self.recipe.precision.gemm if trained else "", (x, w)
        if not self.recipe.inference and w.dtype not in (self.dtype, low):
            again: dict[str, Any] = {"scope": w.scope, "binding": w.binding}
            w = cast(w, self.dtype, name=w.name, role=Role.DEQUANTIZED, **again)
        x = self.lowered(x, w.binding.param.stored if w.binding.param else None)
        if self.recipe.gradients.of_each_linear and len(x.shape) == 3:
            x = identity(x, f"{name}_in")  # its gradient is pinned in `parallel.activations`
        if low:
            once = self.recipe.cast_once
            moved, of_weight = self._rescaling(of[1])
            of_norm = x.op == "norm" and self.recipe.precision.norms_cast
            scope = fields.get("scope", x.scope)
            x = cast(x, low, scope=scope, name=x.name, **({} if of_norm else moved))
            attrs = {"scope": x.scope, "name": w.name, **of_weight}
            w = cast(w, low, once=once, role=Role.LOW_PRECISION, **attrs)
            fields |= moved  # so does the cast of the gradient of the result
        if joint and (self.recipe.operators.joint_projections or "fused" in fields):
            fields["joint"] = (joint, "result")
        y = einsum(spec, x, w, name=name, dtype=self.dtype, **fields)
        adapter = self.recipe.training.adapter(of[1].binding.name)
        return self.with_adapter(adapter, spec, *of, y) if adapter else y

    def _rescaling(self, w: Node) -> tuple[dict[str, Any], dict[str, Any]]:
        """Attributes of the casts of a product's activations and weight: the bytes that they move.

        Only the gradient of a weight reads the second copies of activations.
        """
        moved = self.recipe.precision.rescaling
        if moved is None:
            return {}, {}
        second = self.recipe.precision.second_copy
        frozen = w.binding.name in self.recipe.training.frozen
        return {"rescaling": moved - second if frozen else moved}, {"rescaling": moved}

    def attended(self, x: Node) -> Node:
        """Queries, keys or values in the recipe's format for fused attention, not transposed."""
        precision = self.recipe.precision
        if not precision.attention:
            return x
        moved = (precision.rescaling or 0) - precision.second_copy
        return cast(x, precision.attention, name=x.name, rescaling=moved)

    def with_adapter(self, adapter: Adapter, spec: str, x: Node, w: Node, y: Node) -> Node:
        """The product `y` of an input and a weight, plus what an adapter makes of the input.

        Adapters are multiplied in the precision of activations.
        """
        declared = w.binding.param
        assert declared is not None
        found = factors(spec, declared, adapter.rank)
        attrs: dict[str, Any] = {"scope": y.scope}
        first = self.param(adapter.first, *found.first, **attrs)
        second = self.param(adapter.second(declared.name), *found.second, **attrs)
        x = self.dropout(x, adapter.dropout)
        weights = (second, first) if found.reverse else (first, second)
        low = einsum(found.products[0], x, weights[0], name=adapter.first, **attrs)
        more = len(adapter.weights) > 1
        fields = {"joint": (f"{adapter.first}.B", "result")} if more else {}
        if len(low.shape) == 3 and not declared.of_expert:
            low = identity(low, "lora_low")
        z = einsum(found.products[1], low, weights[1], name=second.name, **attrs, **fields)
        z = elementwise("scale", z, by=adapter.scale, name=f"{y.name}_more", **attrs)
        if found.row_parallel:
            z = identity(identity(z, "lora_out"), "branch")
        return add(y, z, name=f"{y.name}_adapted", **attrs)

    def adapted(self, y: Node, x: Node, narrow: str, name: str, spec: str, *dims: str) -> Node:
        """The product `y` of a shared block's weight plus that of the layer's own adapter (LoRA,
        arXiv 2106.09685).

        The adapter is two products through `Rank` channels. Several adapters of one input may share
        the first product, which `narrow` names.
        """
        attrs: dict[str, Any] = {"scope": y.scope.partition(".")[0], "own": True}
        a = self.weight(f"adapter.{narrow}", x.shape[-1], "Rank/tp", **attrs)
        low = self.linear("bsm,mr->bsr", x, a, f"{narrow}_low", scope=y.scope)
        w = self.weight(f"adapter.{name}", "Rank", *dims, **attrs)
        more = self.linear(spec, low, w, f"{name}_more", scope=y.scope)
        return add(y, more, name=f"{name}_adapted", scope=y.scope)

    @property
    def score_width(self) -> int:
        """The width by whose square root scores are divided."""
        if self.config.position == "relative":  # T5 does not scale them
            return 1
        # Inputs of a shared block are two, of which the published scale counts one.
        return self.config.kv_channels // 2 if self.block else self.config.kv_channels

    def bias(self, x: Node, name: str, *dims: str) -> Node:
        """Add a bias over some of the dims, declared as in `param`."""
        z = letters(x)
        b = self.param(name, *dims, scope=x.scope)
        of = "".join(z[x.shape.index(d)] for d in b.shape)
        return apply("bias", f"{z},{of}->{z}", x, b, name=f"{x.name}_biased")

    def norm(self, x: Node, name: str, dim: str | Size = "M", fn: str = "", **fields: Any) -> Node:
        """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dim."""
        fn = fn or self.config.norm
        z = letters(x)
        rows, m = z[:-1], z[-1].upper()
        if not self.config.norm_weight:
            return apply("norm", f"{rows}{m}->{rows}{m}", x, fn=fn, name=f"{name}_out", **fields)
        weights = [self.param(f"{name}.weight", dim, scope=x.scope)]
        if self.recipe.operators.eager and fn == "rmsnorm":
            return self.eager_norm(x, weights[0], name, **fields)
        if self.config.norm_bias and fn == "layernorm":
            weights.append(self.param(f"{name}.bias", dim, scope=x.scope))
        spec = f"{rows}{m},{','.join([m] * len(weights))}->{rows}{m}"
        return apply("norm", spec, x, *weights, fn=fn, name=f"{name}_out", **fields)

    def norm_over(
        self, x: Node, spec: str, weight: Node | None = None, *, name: str = "normed"
    ) -> Node:
        """RMSNorm over the dims that `spec` sums away, such as a and d in `bsad->bs`.

        `weight` has all dims of `x` but the first two. Where a degree splits a dim that is summed
        away, the mean square is a partial sum, which is reduced over the ranks of that degree.
        """
        whole, rows = spec.split("->")
        square = apply("mean_square", spec, x, dtype="fp32", name="mean_square", scope=x.scope)
        weights, dims = ((), "") if weight is None else ((weight,), f",{whole[2:]}")
        spec = f"{whole},{rows}{dims}->{whole}"
        return apply("rms_scale", spec, x, square, *weights, name=name, scope=x.scope)

    def repeated(self, x: Node, name: str, q: Node) -> Node:
        """Key-value heads, copied for each head of the queries `q`: [B, S, A, width]."""
        attrs: dict[str, Any] = {"name": f"{name}_repeated", "scope": x.scope}
        out = (*x.shape[:2], q.shape[2], x.shape[3])
        return apply("repeat", "bsgd->bs(gr)d", x, out=out, **attrs)

    def eager_norm(self, x: Node, w: Node, name: str, **fields: Any) -> Node:
        """RMSNorm as a chain of operators: in fp32, its result in the precision of `x`."""
        z = letters(x)
        wide = cast(x, "fp32", name=f"{name}_in", **fields)
        # Autograd's x * (2 * x ** 1) * gradient holds two factors and the gradient of each square.
        made: dict[str, Any] = {**fields, "backward_temporaries": 3}
        square = apply("mean_square", f"{z}->{z[:-1]}", wide, name=f"{name}_square", **made)
        unit = apply("rms_scale", f"{z},{z[:-1]}->{z}", wide, square, name=f"{name}_unit", **fields)
        unit = cast(unit, x.dtype, name=f"{name}_low", **fields)
        y = apply("times", f"{z},{z[-1]}->{z}", unit, w, name=f"{name}_out", **fields)
        # Where its gradient is reduced, that of its users together: `parallel.activations` pins
        # `d_norm_out`.
        return identity(identity(y, "norm_out"), f"{name}_out") if z == "bsm" else y

    def rope(
        self, x: Node, dims: str, name: str,
        *, inverse: bool = False, at: Node | None = None, scope: str | None = None,
    ) -> Node:  # fmt: skip
        """Rotary position (arXiv 2104.09864) on the last of the dims `dims`, such as `bsaD`.

        In inference positions are `at`, [B, S], or those of the new tokens.
        """
        spec, places = f"{dims}->{dims}", ()
        if self.recipe.inference:
            spec, places = f"{dims},bs->{dims}", (self.positions() if at is None else at,)
        return apply("rope", spec, x, *places, inverse=inverse, scope=scope, name=name)

    def positions(self) -> Node:
        """The positions of new tokens in their requests, [B, S] (inference)."""
        return leaf("input", ("B", "S"), "int64", "token_positions")

    def act(self, x: Node, fn: str, **attrs: Any) -> Node:
        """An activation on every element."""
        return elementwise("act", x, fn=fn, name=f"{x.name}.{fn}", **attrs)

    def dropout(self, x: Node, rate: float) -> Node:
        """Drop with a mask of one byte per element that backward uses again."""
        if not (self.recipe.dropout and rate):
            return x
        mask = elementwise("random_mask", x, dtype="uint8", rate=rate, name=f"{x.name}.mask")
        return elementwise("dropout", x, mask, rate=rate, name=f"{x.name}.dropout")
