"""Rewrites chains of recorded operations into one node each, in the order of `REWRITES`.

    before                                              after
    ------------------------------------------------    ---------------------------------
    y = zeros_like(x); y[:, 0] = a; y[:, 1] = b         y = stack([a, b], 1)
    bmm(view(q), view(k)), viewed back                  matmul(q, k)
    w * (x * rsqrt(mean(x ** 2) + eps))                 our.norm(x, w), fn=rmsnorm
    x * cos + rotate_half(x) * sin                      our.rope(x)
    where(masked rows, 0, softmax(x))                   softmax(x)
    x * sigmoid(x)                                      our.act(x), fn=silu
    0.5 * x * (1 + tanh(...))                           our.act(x), fn=gelu_tanh
    tanh(x / cap) * cap                                 our.act(x), fn=softcap
    silu(gate) * up                                     our.glu(gate, up), fn=silu
    topk, sort, grouped products, weighted sum          our.experts(x, weights)

What no pattern matches stays as it is; nodes that nothing reads are dropped. Operations in place
are values by then (`record.functionalize`).
"""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.imports.recording import Ref, TracedNode, argument, operation, reachable, words


class TracedGraph:
    """Nodes of a recording, which rewrites replace."""

    def __init__(self, nodes: Iterable[TracedNode], outputs: Sequence[str]) -> None:
        """`outputs` are read from outside."""
        self.nodes = {node.name: node for node in nodes}
        self.outputs = tuple(outputs)

    def of(self, *operations: str) -> list[TracedNode]:
        """The nodes of some operations, in order."""
        return [node for node in self.nodes.values() if operation(node) in operations]

    def only_reader(self, node: TracedNode, users: Mapping[str, list[str]]) -> TracedNode | None:
        """The node that reads this one; None where several do, or none."""
        readers = users.get(node.name, ())
        return self.nodes[readers[0]] if len(readers) == 1 else None

    def users(self) -> dict[str, list[str]]:
        """Names of the nodes that read each node."""
        users: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for name in dict.fromkeys(node.operands()):
                users.setdefault(name, []).append(node.name)
        return users

    def operand(self, node: TracedNode, index: int) -> TracedNode | None:
        """The node of an argument; None for a number."""
        of = node.args[index] if index < len(node.args) else None
        return self.nodes.get(of.name) if isinstance(of, Ref) else None

    def replace(self, node: TracedNode, op: str, *operands: str, **kwargs: Any) -> None:
        """Replace a node's operation and operands."""
        self.nodes[node.name] = replace(node, op=op, args=tuple(map(Ref, operands)), kwargs=kwargs)

    def redirect(self, names: Mapping[str, str]) -> None:
        """Let readers of some nodes read others instead."""
        final = {name: _last(name, names) for name in names}
        self.nodes = {k: node.renamed(final) for k, node in self.nodes.items() if k not in names}
        self.outputs = tuple(final.get(n, n) for n in self.outputs)

    def prune(self) -> None:
        """Drop what no output depends on; parameters stay only where something reads them."""
        needed = reachable(self.outputs, lambda name: self.nodes[name].operands())
        self.nodes = {k: node for k, node in self.nodes.items() if k in needed}

    def source(self, node: TracedNode | None, *also: str) -> TracedNode | None:
        """The node before changes of shape and data type (and operations in `also`)."""
        while node is not None and operation(node) in (*SHAPE_CHANGES, *also):
            node = self.operand(node, 0)
        return node

    def viewed(self, node: TracedNode | None) -> TracedNode | None:
        """The node before one view."""
        if operation(node) in _VIEWS:
            node = self.operand(node, 0) if node else None
        return node


SHAPE_CHANGES = ("to", "view", "reshape", "unsqueeze", "squeeze", "contiguous", "expand",
                 "transpose", "flatten", "_to_copy", "clone", "type_as", "alias",
                 "permute")  # fmt: skip
"""Operations that change only shape, order of dims or data type."""
CASTS = ("to", "_to_copy", "type_as")
"""Changes of data type."""


def _last(name: str, names: Mapping[str, str]) -> str:
    while name in names:
        name = names[name]
    return name


def other_factor(graph: TracedGraph, node: TracedNode, name: str) -> TracedNode | None:
    """The factor of a product besides the one of this name."""
    others = [a for a in node.args[:2] if isinstance(a, Ref) and a.name != name]
    return graph.nodes.get(others[0].name) if len(others) == 1 else None


_GATES = {"silu": "silu", "gelu": "gelu", "sigmoid": "sigmoid", "relu": "relu"}


def activation_of(node: TracedNode | None) -> str | None:
    """The name of a node's activation, where it is one that gates."""
    if node is None:
        return None
    if node.op == "our.act" and node.kwargs.get("fn") in ("gelu_tanh", "silu"):
        return str(node.kwargs["fn"])
    fn = _GATES.get(operation(node)) if node.op.startswith("aten.") else None
    tanh = node.kwargs.get("approximate") == "tanh" or "tanh" in node.args
    return "gelu_tanh" if fn == "gelu" and tanh else fn


GROUPED = ("_grouped_mm", "grouped_mm_fallback")
"""Products of sorted rows with the matrices of all experts: PyTorch's, and what transformers calls
where PyTorch's has no kernel for the data type."""


Rewrite = Callable[[TracedGraph], None]


# ---- what changes nothing ------------------------------------------------------------------------


def _drop_identities(graph: TracedGraph) -> None:
    """Leave out casts to the same type, dropout that is off, and slices of everything."""
    names: dict[str, str] = {}
    for node in graph.nodes.values():
        kind, source = operation(node), graph.operand(node, 0)
        if source is None:
            continue
        same = (node.shape, node.dtype) == (source.shape, source.dtype)
        rate = argument(node, 1, 0.5)
        off = kind == "dropout" and (not rate or not argument(node, 2, True))
        nothing = (*CASTS, "contiguous", "clone", "alias", "detach", "slice", "expand", "reshape",
                   "view", "lift_fresh_copy", "repeat_interleave")  # fmt: skip
        if kind in ("pad", "constant_pad_nd"):
            same = same and not any(words(argument(node, 1)))
            nothing = (kind,)
        if off or (same and kind in nothing and node.op != "our"):
            names[node.name] = source.name
    graph.redirect(names)


# ---- products ------------------------------------------------------------------------------------


def _products_of_views(graph: TracedGraph) -> None:
    """The product of [b, h, n, k] and [b, h, k, m], written as one of [b*h, n, k] and [b*h, k, m].

    Decompositions of PyTorch write matrix products of more than three dims so.
    """
    for node in graph.of(*_VIEWS):
        product = graph.operand(node, 0)
        if operation(product) != "bmm" or product is None:
            continue
        operands: list[str] = []
        for of in (graph.operand(product, 0), graph.operand(product, 1)):
            whole = graph.viewed(of)
            if of is None or whole is None or whole.shape[-2:] != of.shape[-2:]:
                break
            if whole.shape[:-2] != node.shape[:-2] or node.shape[-2:] != product.shape[-2:]:
                break
            operands.append(whole.name)
        if len(operands) == 2:
            graph.replace(node, "aten.matmul.default", *operands)


_VIEWS = ("view", "reshape", "_unsafe_view")


# ---- norms ---------------------------------------------------------------------------------------


def _rms_norms(graph: TracedGraph) -> None:
    """x * rsqrt(mean(x ** 2) + eps), in fp32, times a weight before or after the cast back."""
    users = graph.users()
    for node in graph.of("rsqrt"):
        x = _squared(graph, graph.operand(node, 0))
        product = graph.only_reader(node, users)
        if x is None or product is None or operation(product) != "mul":
            continue
        if node.shape != (*x.shape[:-1], 1):
            continue
        scaled = other_factor(graph, product, node.name)
        if _uncast(graph, scaled) is not _uncast(graph, x):
            continue
        result, weight, plus = product, None, 0
        while (reader := graph.only_reader(result, users)) is not None:
            if operation(reader) in CASTS:
                result = reader
                continue
            other = other_factor(graph, reader, result.name) if operation(reader) == "mul" else None
            base = _weight(graph, other)
            if base is not None and weight is None:
                result, weight = reader, base
                plus = int(operation(graph.source(other)) == "add")
                continue
            break
        source = _uncast(graph, x) or x
        operands = [source.name] + ([weight.name] if weight else [])
        attrs = {"plus": plus} if plus else {}
        graph.replace(result, "our.norm", *operands, fn="rmsnorm", **attrs)


def _uncast(graph: TracedGraph, node: TracedNode | None) -> TracedNode | None:
    """The node before changes of data type."""
    while operation(node) in CASTS and node is not None and graph.operand(node, 0) is not None:
        node = graph.operand(node, 0)
    return node


def _squared(graph: TracedGraph, node: TracedNode | None) -> TracedNode | None:
    """The x of mean(x ** 2) + eps."""
    if operation(node) == "add" and node is not None:
        if isinstance(argument(node, 1), Ref):
            return None
        node = graph.operand(node, 0)
    if operation(node) != "mean" or node is None:
        return None
    power = graph.operand(node, 0)
    if operation(power) == "pow" and power is not None and power.args[1] == 2:
        return graph.operand(power, 0)
    if operation(power) == "square" and power is not None:
        return graph.operand(power, 0)
    if operation(power) == "mul" and power is not None and power.args[0] == power.args[1]:
        return graph.operand(power, 0)
    return None


def _weight(graph: TracedGraph, node: TracedNode | None) -> TracedNode | None:
    """The parameter of a norm: itself, or in 1 + weight, as Gemma stores it."""
    while node is not None and (operation(node) in CASTS or operation(node) == "add"):
        if operation(node) == "add" and any(isinstance(a, Ref) for a in node.args[1:]):
            return None
        node = graph.operand(node, 0)
    return node if node is not None and node.op == "param" and len(node.shape) == 1 else None


# ---- rotary positions ----------------------------------------------------------------------------


def _rotary(graph: TracedGraph) -> None:
    """x * cos + rotate_half(x) * sin, and the same of even and odd channels."""
    for node in [*graph.nodes.values()]:
        x = _rotated_half(graph, node) or _rotated_pairs(graph, node)
        if x is not None:
            graph.replace(node, "our.rope", x.name)
    users = graph.users()
    for node in [*graph.nodes.values()]:
        pairs = _times_complex_constant(graph, node)
        if pairs is None:
            continue
        after = graph.only_reader(node, users)
        whole = graph.viewed(pairs)
        joins = after is not None and operation(after) in (*_VIEWS, "flatten")
        if after is not None and whole is not None and joins and after.shape == whole.shape:
            graph.replace(after, "our.rope", whole.name)
        else:
            graph.replace(node, "our.rope", pairs.name)


def _times_complex_constant(graph: TracedGraph, node: TracedNode) -> TracedNode | None:
    """The x of view_as_real(view_as_complex(x) * constant), whose last dim is a pair of numbers."""
    product = graph.operand(node, 0) if operation(node) == "view_as_real" else None
    if operation(product) != "mul":
        return None
    number = _by_constant(graph, product)
    return graph.operand(number, 0) if number and operation(number) == "view_as_complex" else None


def _is_constant(node: TracedNode | None) -> bool:
    return node is not None and node.op in ("constant", "buffer")


def _by_constant(graph: TracedGraph, node: TracedNode | None) -> TracedNode | None:
    """The x of x * constant."""
    if operation(node) != "mul" or node is None:
        return None
    a, b = graph.operand(node, 0), graph.operand(node, 1)
    if _is_constant(graph.source(b, "slice")):
        return a
    return b if _is_constant(graph.source(a, "slice")) else None


def _rotated_half(graph: TracedGraph, node: TracedNode) -> TracedNode | None:
    if operation(node) != "add":
        return None
    terms = [_by_constant(graph, graph.operand(node, i)) for i in (0, 1)]
    for x, turned in (terms, terms[::-1]):
        if x is None or operation(turned) != "cat" or turned is None:
            continue
        halves = [graph.nodes[r.name] for r in turned.args[0]]
        low = graph.operand(halves[0], 0) if operation(halves[0]) == "neg" else None
        sources = [_part_of(graph, half) for half in (low, halves[-1])]
        if all(s is not None and s.name == x.name for s in sources):
            return x
    return None


def _part_of(graph: TracedGraph, node: TracedNode | None) -> TracedNode | None:
    """The operand of a slice or of a split."""
    if operation(node) == "slice" and node is not None:
        return graph.operand(node, 0)
    if node is not None and node.op == "getitem":
        whole = graph.operand(node, 0)
        return graph.operand(whole, 0) if whole else None
    return None


def _rotated_pairs(graph: TracedGraph, node: TracedNode) -> TracedNode | None:
    """cat(even * cos - odd * sin, odd * cos + even * sin), or stacked and flattened."""
    if operation(node) != "cat" or len(node.args[0]) != 2:
        return None
    first, second = (graph.nodes[r.name] for r in node.args[0])
    if (operation(first), operation(second)) != ("sub", "add"):
        return None
    parts = [_by_constant(graph, graph.operand(n, i)) for n in (first, second) for i in (0, 1)]
    sources = {s.name for s in (_part_of(graph, part) for part in parts) if s is not None}
    if None in parts or len(sources) != 1:
        return None
    (name,) = sources
    return graph.nodes[name] if graph.nodes[name].shape == node.shape else None


# ---- softmax -------------------------------------------------------------------------------------


def _safe_softmaxes(graph: TracedGraph) -> None:
    """A softmax whose rows that are masked as a whole are zeros: the softmax."""
    names: dict[str, str] = {}
    for node in graph.of("where"):
        if len(node.args) != 3:
            continue
        zeros, chosen = graph.operand(node, 1), graph.operand(node, 2)
        filled = operation(zeros) in ("full_like", "zeros_like", "full", "scalar_tensor")
        if filled and operation(chosen) in ("softmax", "_softmax") and chosen is not None:
            names[node.name] = chosen.name
    graph.redirect(names)


# ---- activations ---------------------------------------------------------------------------------


def _silus(graph: TracedGraph) -> None:
    """x * sigmoid(x)."""
    for node in graph.of("mul"):
        for x, gate in ((0, 1), (1, 0)):
            inner, factor = graph.operand(node, x), graph.operand(node, gate)
            if inner is None or operation(factor) != "sigmoid" or factor is None:
                continue
            if graph.operand(factor, 0) is inner:
                graph.replace(node, "our.act", inner.name, fn="silu")
                break


def _new_gelu(graph: TracedGraph) -> None:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) is gelu's approximation."""
    users = graph.users()
    for node in graph.of("tanh"):
        cubes = {
            n.name: n
            for n in _inputs_within(graph, graph.operand(node, 0), 5)
            if operation(n) == "pow"
        }
        at, x = node, next((n for c in cubes.values() for n in c.operands()), None)
        for _ in range(3):  # one is added, and the factors follow in some order
            reader = graph.only_reader(at, users)
            if reader is None or x is None:
                break
            at = reader
            if _equals_function(graph, at, x, _gelu_by_tanh):
                graph.replace(at, "our.act", x, fn="gelu_tanh", operators=True)
                break


def _gelu_by_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _evaluate(op: str, a: float, b: float = 0.0) -> float:
    """Evaluate an operation on numbers; a ValueError for an unknown one."""
    if op in CASTS:
        return a
    known = {"add": a + b, "sub": a - b, "mul": a * b, "tanh": math.tanh(a), "neg": -a}
    if op in known:
        return known[op]
    if op == "div":
        return a / b
    if op == "pow" and b == int(b) > 0:
        return a ** int(b)
    raise ValueError(op)


def _equals_function(
    graph: TracedGraph, node: TracedNode, x: str, meaning: Callable[[float], float]
) -> bool:
    """True if a chain of element-wise operations equals a function at four points."""

    def of(argument: object, point: float, depth: int) -> float:
        if isinstance(argument, int | float):
            return argument
        if not isinstance(argument, Ref) or not depth:
            raise ValueError(argument)
        if argument.name == x:
            return point
        inner = graph.nodes[argument.name]
        if inner.kwargs.get("alpha", 1) != 1:
            raise ValueError(inner.op)
        own = inner.args[:1] if operation(inner) in CASTS else inner.args[:2]
        return _evaluate(operation(inner), *(of(each, point, depth - 1) for each in own))

    try:
        values = [
            (of(Ref(node.name), point, 12), meaning(point)) for point in (-1.7, -0.3, 0.6, 2.1)
        ]
    except (ValueError, TypeError, ArithmeticError):
        return False
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in values)


def _inputs_within(graph: TracedGraph, node: TracedNode | None, depth: int) -> list[TracedNode]:
    if node is None or not depth:
        return []
    return [
        node,
        *(n for o in node.operands() for n in _inputs_within(graph, graph.nodes[o], depth - 1)),
    ]


def _softcaps(graph: TracedGraph) -> None:
    """tanh(x / cap) * cap."""
    users = graph.users()
    for node in graph.of("tanh"):
        divided, product = graph.operand(node, 0), graph.only_reader(node, users)
        if product is None or divided is None:
            continue
        cap = product.args[1] if operation(product) == "mul" and len(product.args) > 1 else None
        if operation(divided) == "div" and isinstance(cap, int | float) and divided.args[1] == cap:
            graph.replace(product, "our.act", divided.args[0].name, fn="softcap", cap=cap)


def _gated(graph: TracedGraph) -> None:
    """activation(a) * b, where nothing else reads the activation."""
    users = graph.users()
    for node in graph.of("mul"):
        if not all(isinstance(a, Ref) for a in node.args[:2]):
            continue
        a, b = graph.operand(node, 0), graph.operand(node, 1)
        for gate, up in ((a, b), (b, a)):
            fn = activation_of(gate)
            if fn is None or gate is None or up is None or len(users[gate.name]) > 1:
                continue
            if gate.kwargs.get("operators"):  # the text says of an activation how it is written
                continue
            inner = next(iter(gate.operands()))
            if graph.nodes[inner].shape == up.shape == node.shape and not _is_constant(up):
                graph.replace(node, "our.glu", inner, up.name, fn=fn)
                break


# ---- tensors that are filled in parts ------------------------------------------------------------


def _replace_copies(graph: TracedGraph) -> None:
    """Replace a copy of x into t by x, cast or expanded to the shape of t."""
    names: dict[str, str] = {}
    for node in graph.of("slice_scatter", "copy"):
        into, source = operation(node), graph.operand(node, 1)
        if source is None:
            continue
        if (source.shape, source.dtype) == (node.shape, node.dtype):
            names[node.name] = source.name
        elif into == "copy" and source.shape == node.shape:
            graph.replace(node, "aten._to_copy.default", source.name)
        elif into == "copy" and source.dtype == node.dtype:
            graph.replace(node, "aten.expand.default", source.name)
    graph.redirect(names)


def _join_written_parts(graph: TracedGraph) -> None:
    """If every slice of a tensor is written exactly once, replace it by a concatenation.

    Before: `y = zeros_like(x); y[:, 0] = a; y[:, 1] = b`. After: `y = stack([a, b], 1)`.
    """
    users = graph.users()
    for node in graph.of("slice_scatter", "select_scatter"):
        kind = operation(node)
        if any(
            operation(graph.nodes[n]) == kind and graph.operand(graph.nodes[n], 0) is node
            for n in users.get(node.name, ())
        ):
            continue
        parts = _written_parts(graph, node, kind)
        if parts is None:
            continue
        dim = int(argument(node, 2, 0)) % len(node.shape)
        op = "aten.cat.default" if kind == "slice_scatter" else "aten.stack.default"
        made = tuple(Ref(name) for name in parts)
        graph.nodes[node.name] = TracedNode(
            node.name, op, node.shape, node.dtype, (made, dim), {}, node.path, node.source
        )


def _written_parts(graph: TracedGraph, last: TracedNode, kind: str) -> list[str] | None:
    """Values written into a tensor along a dim, in order; None unless they fill it."""
    dim = int(argument(last, 2, 0)) % len(last.shape)
    total, node = last.shape[dim], last
    values_at: dict[int, str] = {}
    end_of: dict[int, int | None] = {}
    while operation(node) == kind and int(argument(node, 2, 0)) % len(last.shape) == dim:
        base, source = graph.operand(node, 0), graph.operand(node, 1)
        start = argument(node, 3, 0)
        if base is None or source is None or not isinstance(start, int) or start < 0:
            return None
        if kind == "slice_scatter" and argument(node, 5, 1) != 1:
            return None
        width = 1 if kind == "select_scatter" else source.shape[dim]
        reaches = kind == "slice_scatter" and _reaches_end(argument(node, 4), total)
        end = None if reaches else start + width if isinstance(width, int) else -1
        if values_at.setdefault(start, source.name) == source.name:
            end_of.setdefault(start, end)
        node = base
    position: int | None = 0
    parts: list[str] = []
    while position is not None and position != total:
        if position not in values_at:
            return None
        parts.append(values_at[position])
        position = end_of[position]
    return parts if len(parts) == len(values_at) else None


def _reaches_end(end: object, total: object) -> bool:
    """True if a slice ends with its dim."""
    big = isinstance(end, int) and (end >= 2**62 or (isinstance(total, int) and end >= total))
    return end is None or big or end == total


def _expert_mixtures(graph: TracedGraph) -> None:
    """Replace mixtures of experts, from the hidden state to the sum over the chosen experts.

    Anchors are the products of sorted rows with the matrices of all experts (`_grouped_mm`).
    """
    done: set[str] = set()
    for up in graph.of(*GROUPED):
        if up.name in done or up.name not in graph.nodes:
            continue
        replaced = _mixture(graph, up)
        if replaced is not None:
            done |= replaced


def _mixture(graph: TracedGraph, up: TracedNode) -> set[str] | None:
    """Replace one mixture; return the names of its grouped products."""
    users = graph.users()
    rows = graph.source(graph.operand(up, 0))
    weight = _expert_matrix(graph, up)
    if operation(rows) != "index" or rows is None or weight is None:
        return None
    h = graph.source(graph.operand(rows, 0))
    others = [
        n for n in _descendants(graph, users, up.name) if operation(graph.nodes[n]) in GROUPED
    ]
    downs = [graph.nodes[n] for n in others]
    down = downs[-1] if downs else None
    gates = [n for n in downs if n is not down]
    if h is None or down is None:
        return None
    matrices = [weight, *filter(None, (_expert_matrix(graph, n) for n in (*gates, down)))]
    total = _sum_of_experts(graph, users, down, h)
    if total is None:
        return None
    cone = _ancestors(graph, total, h.name)
    router = [n for n in cone if operation(n) in ("linear", "mm", "matmul", "addmm")]
    topks = [n for n in cone if operation(n) == "topk"]
    if len(router) != 1 or not topks:
        return None
    num_experts = int(weight.shape[0])
    kinds = {operation(n) for n in cone}
    act = next((n.kwargs["fn"] for n in cone if n.op == "our.glu"), None)
    inner = int(last.shape[-1]) if (last := _expert_matrix(graph, down)) else 0
    divides = any(
        operation(n) == "div" and operation(graph.source(graph.operand(n, 1), "add")) == "sum"
        for n in cone
    )
    softmax_of_chosen = any(
        operation(n) == "softmax" and topks[-1] in _ancestors(graph, n) for n in cone
    )
    groups, limit = _routing_groups(graph, topks, num_experts)
    fields: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": int(topks[-1].args[1]),
        "moe_ffn_hidden_size": inner,
        "router": "sigmoid" if "sigmoid" in kinds else "softmax",
        "norm_topk_prob": divides or softmax_of_chosen,
        "gated": act is not None,
        "activation": act or next((fn for n in cone if (fn := activation_of(n))), "silu"),
        "expert_bias": any(n.op == "buffer" and n.shape == (num_experts,) for n in cone),
        "router_bias": len(router[0].args) > 2 or operation(router[0]) == "addmm",
        "num_expert_groups": groups,
        "topk_groups": limit,
    }
    if any(operation(graph.nodes[n]) == "mul" for n in _first_users(graph, users, down)):
        fields |= {"_weights": "output"}
    of_router = (graph.source(graph.nodes[n]) for n in router[0].operands())
    weights = [n for n in of_router if n is not None and n.op == "param"]
    names = tuple(dict.fromkeys(m.name for m in (*weights, *matrices)))
    shared = _shared_expert(graph, users, total, h)
    if shared is not None:
        sum_of, width, more = shared
        fields |= {"shared_ffn_hidden_size": width}
        names += more
        total = sum_of
    graph.replace(total, "our.experts", h.name, *names, **fields)
    graph.nodes[total.name] = replace(graph.nodes[total.name], dtype=h.dtype)
    return {up.name, *others}


def _first_users(graph: TracedGraph, users: Mapping[str, list[str]], node: TracedNode) -> list[str]:
    """Readers of a node, after changes of shape and data type."""
    readers: list[str] = []
    for name in users.get(node.name, ()):
        plain = operation(graph.nodes[name]) in SHAPE_CHANGES
        readers += _first_users(graph, users, graph.nodes[name]) if plain else [name]
    return readers


def _expert_matrix(graph: TracedGraph, product: TracedNode) -> TracedNode | None:
    """The parameter of a grouped product, [experts, out, in] or the like."""
    matrix = graph.source(graph.operand(product, 1))
    return matrix if matrix is not None and matrix.op == "param" else None


def _routing_groups(
    graph: TracedGraph, chosen: Sequence[TracedNode], num_experts: int
) -> tuple[int, int]:
    """Group-limited routing: groups of experts, and how many of them a token may go to."""
    if len(chosen) < 2:
        return 1, 1
    for node in chosen[:-1]:
        source = graph.operand(node, 0)
        width = source.shape[-1] if source else 0
        if isinstance(width, int) and width < num_experts and source and len(source.shape) == 2:
            return width, int(node.args[1])
    return 1, 1


def _ancestors(graph: TracedGraph, end: TracedNode, stop: str = "") -> list[TracedNode]:
    """Nodes that a node depends on, itself last, down to the node `stop`."""
    names = reachable([end.name], lambda n: graph.nodes[n].operands() if n != stop else ())
    return [n for n in graph.nodes.values() if n.name in names - {stop}]


def _descendants(graph: TracedGraph, users: Mapping[str, list[str]], name: str) -> list[str]:
    """Nodes that depend on a node and have its number of rows, in order."""
    descendants, pending = set[str](), [name]
    while pending:
        for user in users.get(pending.pop(), ()):
            node = graph.nodes[user]
            rows = node.shape[0] if node.shape else 0
            same_rows = rows == graph.nodes[name].shape[0]
            if user not in descendants and (same_rows or node.op == "getitem" or not node.shape):
                descendants.add(user)
                pending.append(user)
    return [n for n in graph.nodes if n in descendants]


def _sum_of_experts(
    graph: TracedGraph, users: Mapping[str, list[str]], down: TracedNode, h: TracedNode
) -> TracedNode | None:
    """First node after the last product that has the shape of the hidden state."""
    node, rows = down, down.shape[0]
    for _ in range(40):
        readers = [graph.nodes[n] for n in users.get(node.name, ())]
        if not readers:
            return None
        node = readers[0]
        if node.shape == h.shape and node.shape[0] != rows:
            return node
    return None


def _shared_expert(
    graph: TracedGraph, users: Mapping[str, list[str]], end: TracedNode, h: TracedNode
) -> tuple[TracedNode, int, tuple[str, ...]] | None:
    """A gated MLP of the same hidden state that is added to the experts' sum."""
    total = graph.only_reader(end, users)
    if total is None or operation(total) != "add":
        return None
    other = other_factor(graph, total, end.name)
    last = graph.source(other)
    if operation(last) != "linear" or last is None:
        return None
    glu = graph.source(graph.operand(last, 0))
    if glu is None or glu.op != "our.glu":
        return None
    parts = [graph.source(graph.nodes[n]) for n in glu.operands()]
    if any(operation(p) != "linear" for p in parts):
        return None
    if any(graph.source(graph.operand(p, 0)) is not h for p in parts if p):
        return None
    weights = [graph.operand(p, 1) for p in (*parts, last) if p]
    return total, int(glu.shape[-1]), tuple(w.name for w in weights if w)


# ---- all rewrites -----------------------------------------------------------------------------

REWRITES: tuple[Rewrite, ...] = (
    _drop_identities,
    _replace_copies,
    _join_written_parts,
    _products_of_views,
    _rms_norms,
    _rotary,
    _safe_softmaxes,
    _silus,
    _new_gelu,
    _softcaps,
    _gated,
    _expert_mixtures,
    _drop_identities,
)
"""In order: later ones read what earlier ones made."""


def rewritten(nodes: Sequence[TracedNode], outputs: Sequence[str]) -> TracedGraph:
    """The nodes after all rewrites."""
    graph = TracedGraph(nodes, outputs)
    for rewrite in REWRITES:
        rewrite(graph)
        graph.prune()
    return graph
