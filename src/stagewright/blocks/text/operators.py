"""Chains of PyTorch's operators for parts of users' modules, for frameworks that fuse nothing.

A text says what is computed, in one call: `norm`, `glu`, `act[fn=gelu_tanh]`. Where a run has
`operators = eager`, the call is the operators that presets have then, or those of the module's own
code where the text says so (`operators=true`); backward keeps what autograd keeps of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagewright.blocks.builder import Builder
from stagewright.graph.make import add, apply, cast, einsum, elementwise, letters
from stagewright.graph.node import Node
from stagewright.graph.ops.dense import SLOPES_OF_RESULTS
from stagewright.graph.roles import Role
from stagewright.graph.table import Attribute, may

WRITTEN: Mapping[str, Mapping[str, Attribute]] = {
    "act": {"operators": may(bool)},
    "attention": {"operators": may(bool), "copied": may(bool)},
    "einsum": {"fused": may(str)},
    "norm": {"plus": may(int)},
}
"""By op, what a text may say of how the module's code writes it: as a chain of operators, or with a
weight to which a number is added; of attention, that its result is copied to have positions before
heads; of a product, that its weight is a part of another's."""


def without_writing(op: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the op itself."""
    return {k: v for k, v in attributes.items() if k not in WRITTEN.get(op, ())}


class Written:
    """One call of a text, as a chain of operators."""

    def __init__(self, b: Builder, attributes: Mapping[str, Any], name: str, scope: str) -> None:
        """`name` is that of the result, and begins those of what leads there."""
        self.b, self.said, self.name, self.scope = b, attributes, name, scope

    def make(self, op: str, spec: str, xs: list[Node]) -> Node | None:
        """The result; None: the call is one operator. `spec` is empty where it is implied."""
        own = without_writing(op, self.said)
        chain = bool(self.said.get("operators"))
        if op == "norm" and not spec and len(xs) == 2 and own.get("fn", "rmsnorm") == "rmsnorm":
            return self._rms_norm(*xs)
        if op == "glu" and not spec and {*own} == {"fn"}:
            gate = self._act(xs[0], own["fn"], f"{xs[0].name}.{own['fn']}")
            # Autograd keeps both factors until the gradients of both are made.
            return self._each("times", gate, xs[1], backward_temporaries=1)
        if op == "act" and not spec:
            return self._activation(own, xs[0], chain=chain)
        return self._attention(spec, own, xs) if op == "attention" and chain else None

    def _each(self, op: str, *xs: Node, name: str = "", **attributes: Any) -> Node:
        own = name or self.name
        return elementwise(op, *xs, scope=self.scope, name=own, **attributes)

    def _act(self, x: Node, fn: str, name: str = "") -> Node:
        """An activation, which keeps its result for backward where its derivative follows."""
        kept = {"of_result": True} if fn in SLOPES_OF_RESULTS else {}
        return self._each("act", x, name=name, fn=fn, **kept)

    def _activation(self, own: Mapping[str, Any], x: Node, *, chain: bool) -> Node | None:
        fn = own["fn"]
        if fn == "gelu_tanh" and chain:
            return self._gelu(x)
        if fn == "softcap":
            return self._limited(x, own["cap"])
        return self._act(x, fn) if {*own} == {"fn"} else None

    def _limited(self, x: Node, cap: float) -> Node:
        """tanh(x / cap) * cap."""
        inner = self._each("scale", x, by=1 / cap, name=f"{self.name}.in")
        limited = self._act(inner, "tanh", f"{self.name}.tanh")
        return self._each("scale", limited, by=cap)

    def _rms_norm(self, x: Node, w: Node) -> Node:
        """RMSNorm, perhaps with 1 + weight, as Gemma stores it."""
        if plus := self.said.get("plus"):
            w = self._each("shift", w, by=plus, name=f"{self.name}.weight")
        return self.b.eager_norm(x, w, self.name, scope=self.scope)

    def _gelu(self, x: Node) -> Node:
        """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), as transformers has it."""
        own = self.name
        cube = self._each("act", x, fn="cube", name=f"{own}.cube")
        part = self._each("scale", cube, by=0.044715, name=f"{own}.part")
        total = add(x, part, scope=self.scope, name=f"{own}.sum")
        inner = self._each("scale", total, by=math.sqrt(2 / math.pi), name=f"{own}.in")
        tanh = self._act(inner, "tanh", f"{own}.tanh")
        half = self._each("scale", x, by=0.5, name=f"{own}.half")
        return self._each("times", half, self._each("shift", tanh, by=1, name=f"{own}.weight"))

    def _attention(self, spec: str, own: Mapping[str, Any], xs: list[Node]) -> Node:
        """Scores, their limit and softmax, and the product with values: scores are kept."""
        ins, out = spec.lower().split("->")
        q, k, v = ins.split(",")
        lead = "".join(x for x in out if x not in "qdv")
        scores = einsum(f"{q},{k}->{lead}qk", *xs[:2], name=f"{self.name}.scores", scope=self.scope)
        if own.get("softcap"):
            scores = Written(self.b, {}, f"{self.name}.limited", self.scope)._limited(
                scores, own["softcap"]
            )
        seen = {name: own[name] for name in ("causal", "window") if own.get(name)}
        wide = cast(scores, "fp32", scope=self.scope, name=f"{self.name}.wide")
        probs = apply(
            "softmax", f"{lead}qK->{lead}qK", wide, name=f"{self.name}.probs", scope=self.scope,
            width=1, **seen,
        )  # fmt: skip
        probs = cast(probs, xs[2].dtype, scope=self.scope, name=f"{self.name}.low")
        v, out = (term if "v" in v else term.replace("d", "v") for term in (v, out))
        made: dict[str, Any] = {"name": self.name, "scope": self.scope}
        return einsum(f"{lead}qk,{v}->{out}", probs, xs[2], role=Role.CORE, **made)


def copy_of(x: Node) -> Node:
    """The same value once more: `reshape` copies what lies in another order than it asks for."""
    return apply("sum", f"{letters(x)}->{letters(x)}", x, name=f"{x.name}.copied", scope=x.scope)


def experts_as_written(b: Builder, said: str) -> Builder:
    """The builder of experts as the module's code has them, where no operators are fused.

    `weights=output`: the weights of routing multiply the results of the experts.
    """
    if said not in ("", "weights=output"):
        raise ValueError(f"got [{said}], expected nothing or [weights=output]")
    experts = b.recipe.experts
    if not said or not b.recipe.operators.eager or experts.apply_probs != "experts":
        return b
    return replace(b, recipe=replace(b.recipe, experts=replace(experts, apply_probs="output")))
