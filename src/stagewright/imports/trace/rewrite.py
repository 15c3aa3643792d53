"""Parts of models that are written as chains of operations: norms, rotary positions, gates,
experts.

Each function reads a list of nodes and returns another in which the chains are one node, a
`norm` for example; what no pattern matches stays as it is. Nodes that nothing reads are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stagewright.imports.trace.functional import copies, fills
from stagewright.imports.trace.mixtures import experts
from stagewright.imports.trace.nodes import (
    CASTS,
    TracedNodes,
    activation_of,
    operation,
    other_factor,
)
from stagewright.imports.trace.recording import Ref, TracedNode, argument, words

Rewrite = Callable[[TracedNodes], None]


def rewritten(nodes: Sequence[TracedNode], outputs: Sequence[str]) -> TracedNodes:
    """The nodes after all rewrites."""
    graph = TracedNodes(nodes, outputs)
    for rewrite in REWRITES:
        rewrite(graph)
        graph.prune()
    return graph


# ---- what changes nothing ------------------------------------------------------------------------


def _drop_nothing(graph: TracedNodes) -> None:
    """Leave out casts to the same type, dropout that is off, and slices of everything."""
    names: dict[str, str] = {}
    for node in graph.of.values():
        kind, source = operation(node), graph.arg(node, 0)
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
    graph.same(names)


# ---- products ------------------------------------------------------------------------------------


def _products_of_views(graph: TracedNodes) -> None:
    """The product of [b, h, n, k] and [b, h, k, m], written as one of [b*h, n, k] and [b*h, k, m].

    Decompositions of PyTorch write matrix products of more than three dims so.
    """
    for node in [*graph.of.values()]:
        product = graph.arg(node, 0)
        if operation(node) not in _VIEWS or operation(product) != "bmm" or product is None:
            continue
        operands: list[str] = []
        for of in (graph.arg(product, 0), graph.arg(product, 1)):
            whole = graph.plain_view(of)
            if of is None or whole is None or whole.shape[-2:] != of.shape[-2:]:
                break
            if whole.shape[:-2] != node.shape[:-2] or node.shape[-2:] != product.shape[-2:]:
                break
            operands.append(whole.name)
        if len(operands) == 2:
            graph.put(node, "aten.matmul.default", *operands)


_VIEWS = ("view", "reshape", "_unsafe_view")


# ---- norms ---------------------------------------------------------------------------------------


def _rms_norms(graph: TracedNodes) -> None:
    """x * rsqrt(mean(x ** 2) + eps), in fp32, times a weight before or after the cast back."""
    users = graph.users()
    for node in [*graph.of.values()]:
        if operation(node) != "rsqrt":
            continue
        x = _squared(graph, graph.arg(node, 0))
        product = graph.of[users[node.name][0]] if len(users.get(node.name, ())) == 1 else None
        if x is None or operation(product) != "mul":
            continue
        assert product is not None
        if node.shape != (*x.shape[:-1], 1):
            continue
        scaled = other_factor(graph, product, node.name)
        if _uncast(graph, scaled) is not _uncast(graph, x):
            continue
        result, weight, plus = product, None, 0
        while len(users.get(result.name, ())) == 1:
            after = graph.of[users[result.name][0]]
            if operation(after) in CASTS:
                result = after
                continue
            other = other_factor(graph, after, result.name) if operation(after) == "mul" else None
            base = _weight(graph, other)
            if base is not None and weight is None:
                result, weight = after, base
                plus = int(operation(graph.plain(other)) == "add")
                continue
            break
        source = _uncast(graph, x) or x
        operands = [source.name] + ([weight.name] if weight else [])
        own = {"plus": plus} if plus else {}
        graph.put(result, "our.norm", *operands, fn="rmsnorm", **own)


def _uncast(graph: TracedNodes, node: TracedNode | None) -> TracedNode | None:
    """What a node is made of by changes of data type alone."""
    while operation(node) in CASTS and node is not None and graph.arg(node, 0) is not None:
        node = graph.arg(node, 0)
    return node


def _squared(graph: TracedNodes, node: TracedNode | None) -> TracedNode | None:
    """The x of mean(x ** 2) + eps."""
    if operation(node) == "add" and node is not None:
        if isinstance(argument(node, 1), Ref):
            return None
        node = graph.arg(node, 0)
    if operation(node) != "mean" or node is None:
        return None
    power = graph.arg(node, 0)
    if operation(power) == "pow" and power is not None and power.args[1] == 2:
        return graph.arg(power, 0)
    if operation(power) == "square" and power is not None:
        return graph.arg(power, 0)
    if operation(power) == "mul" and power is not None and power.args[0] == power.args[1]:
        return graph.arg(power, 0)
    return None


def _weight(graph: TracedNodes, node: TracedNode | None) -> TracedNode | None:
    """The parameter of a norm: itself, or in 1 + weight, as Gemma stores it."""
    while node is not None and (operation(node) in CASTS or operation(node) == "add"):
        if operation(node) == "add" and any(isinstance(a, Ref) for a in node.args[1:]):
            return None
        node = graph.arg(node, 0)
    return node if node is not None and node.op == "param" and len(node.shape) == 1 else None


# ---- rotary positions ----------------------------------------------------------------------------


def _rotary(graph: TracedNodes) -> None:
    """x * cos + rotate_half(x) * sin, and the same of even and odd channels."""
    for node in [*graph.of.values()]:
        x = _rotated_half(graph, node) or _rotated_pairs(graph, node)
        if x is not None:
            graph.put(node, "our.rope", x.name)
    users = graph.users()
    for node in [*graph.of.values()]:
        pairs = _times_complex_constant(graph, node)
        if pairs is None:
            continue
        after = graph.of[users[node.name][0]] if len(users.get(node.name, ())) == 1 else None
        whole = graph.plain_view(pairs)
        joins = after is not None and operation(after) in (*_VIEWS, "flatten")
        if after is not None and whole is not None and joins and after.shape == whole.shape:
            graph.put(after, "our.rope", whole.name)
        else:
            graph.put(node, "our.rope", pairs.name)


def _times_complex_constant(graph: TracedNodes, node: TracedNode) -> TracedNode | None:
    """The x of view_as_real(view_as_complex(x) * constant), whose last dim is a pair of numbers."""
    product = graph.arg(node, 0) if operation(node) == "view_as_real" else None
    if operation(product) != "mul":
        return None
    number = _by_constant(graph, product)
    return graph.arg(number, 0) if number and operation(number) == "view_as_complex" else None


def _constant(node: TracedNode | None) -> bool:
    return node is not None and node.op in ("constant", "buffer")


def _by_constant(graph: TracedNodes, node: TracedNode | None) -> TracedNode | None:
    """The x of x * constant."""
    if operation(node) != "mul" or node is None:
        return None
    a, b = graph.arg(node, 0), graph.arg(node, 1)
    if _constant(graph.plain(b, "slice")):
        return a
    return b if _constant(graph.plain(a, "slice")) else None


def _rotated_half(graph: TracedNodes, node: TracedNode) -> TracedNode | None:
    if operation(node) != "add":
        return None
    terms = [_by_constant(graph, graph.arg(node, i)) for i in (0, 1)]
    for x, turned in (terms, terms[::-1]):
        if x is None or operation(turned) != "cat" or turned is None:
            continue
        halves = [graph.of[r.name] for r in turned.args[0]]
        low = graph.arg(halves[0], 0) if operation(halves[0]) == "neg" else None
        sources = [_part_of(graph, half) for half in (low, halves[-1])]
        if all(s is not None and s.name == x.name for s in sources):
            return x
    return None


def _part_of(graph: TracedNodes, node: TracedNode | None) -> TracedNode | None:
    """What a slice, or a part of a split, is of."""
    if operation(node) == "slice" and node is not None:
        return graph.arg(node, 0)
    if node is not None and node.op == "getitem":
        whole = graph.arg(node, 0)
        return graph.arg(whole, 0) if whole else None
    return None


def _rotated_pairs(graph: TracedNodes, node: TracedNode) -> TracedNode | None:
    """cat(even * cos - odd * sin, odd * cos + even * sin), or stacked and flattened."""
    if operation(node) != "cat" or len(node.args[0]) != 2:
        return None
    first, second = (graph.of[r.name] for r in node.args[0])
    if (operation(first), operation(second)) != ("sub", "add"):
        return None
    parts = [_by_constant(graph, graph.arg(n, i)) for n in (first, second) for i in (0, 1)]
    sources = {s.name for s in (_part_of(graph, part) for part in parts) if s is not None}
    if None in parts or len(sources) != 1:
        return None
    (name,) = sources
    return graph.of[name] if graph.of[name].shape == node.shape else None


# ---- softmax -------------------------------------------------------------------------------------


def _safe_softmaxes(graph: TracedNodes) -> None:
    """A softmax whose rows that are masked as a whole are zeros: the softmax."""
    names: dict[str, str] = {}
    for node in graph.of.values():
        if operation(node) != "where" or len(node.args) != 3:
            continue
        zeros, chosen = graph.arg(node, 1), graph.arg(node, 2)
        filled = operation(zeros) in ("full_like", "zeros_like", "full", "scalar_tensor")
        if filled and operation(chosen) in ("softmax", "_softmax") and chosen is not None:
            names[node.name] = chosen.name
    graph.same(names)


# ---- activations ---------------------------------------------------------------------------------


def _silus(graph: TracedNodes) -> None:
    """x * sigmoid(x)."""
    for node in [*graph.of.values()]:
        if operation(node) != "mul":
            continue
        for x, gate in ((0, 1), (1, 0)):
            inner, factor = graph.arg(node, x), graph.arg(node, gate)
            if inner is None or operation(factor) != "sigmoid" or factor is None:
                continue
            if graph.arg(factor, 0) is inner:
                graph.put(node, "our.act", inner.name, fn="silu")
                break


def _new_gelu(graph: TracedNodes) -> None:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) is gelu's approximation."""
    users = graph.users()
    for node in [*graph.of.values()]:
        if operation(node) != "tanh":
            continue
        cubes = {n.name: n for n in _behind(graph, graph.arg(node, 0), 5) if operation(n) == "pow"}
        at, x = node, next((n for c in cubes.values() for n in c.operands()), None)
        for _ in range(3):  # one is added, and the factors follow in some order
            readers = users.get(at.name, ())
            if len(readers) != 1 or x is None:
                break
            at = graph.of[readers[0]]
            if _computes(graph, at, x, _gelu_by_tanh):
                graph.put(at, "our.act", x, fn="gelu_tanh", operators=True)
                break


def _gelu_by_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _number(op: str, a: float, b: float = 0.0) -> float:
    """What an operation makes of numbers; a ValueError for one that is not known here."""
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


def _computes(
    graph: TracedNodes, node: TracedNode, x: str, meaning: Callable[[float], float]
) -> bool:
    """Whether a chain of operations on each element is a function, by its value at some places."""

    def of(argument: object, at: float, depth: int) -> float:
        if isinstance(argument, int | float):
            return argument
        if not isinstance(argument, Ref) or not depth:
            raise ValueError(argument)
        if argument.name == x:
            return at
        inner = graph.of[argument.name]
        if inner.kwargs.get("alpha", 1) != 1:
            raise ValueError(inner.op)
        own = inner.args[:1] if operation(inner) in CASTS else inner.args[:2]
        return _number(operation(inner), *(of(each, at, depth - 1) for each in own))

    try:
        found = [(of(Ref(node.name), at, 12), meaning(at)) for at in (-1.7, -0.3, 0.6, 2.1)]
    except (ValueError, TypeError, ArithmeticError):
        return False
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in found)


def _behind(graph: TracedNodes, node: TracedNode | None, depth: int) -> list[TracedNode]:
    if node is None or not depth:
        return []
    return [node, *(n for o in node.operands() for n in _behind(graph, graph.of[o], depth - 1))]


def _softcaps(graph: TracedNodes) -> None:
    """tanh(x / cap) * cap."""
    users = graph.users()
    for node in [*graph.of.values()]:
        divided, after = graph.arg(node, 0), users.get(node.name, [])
        if operation(node) != "tanh" or len(after) != 1 or divided is None:
            continue
        product = graph.of[after[0]]
        cap = product.args[1] if operation(product) == "mul" and len(product.args) > 1 else None
        if operation(divided) == "div" and isinstance(cap, int | float) and divided.args[1] == cap:
            graph.put(product, "our.act", divided.args[0].name, fn="softcap", cap=cap)


def _gated(graph: TracedNodes) -> None:
    """activation(a) * b, where nothing else reads the activation."""
    users = graph.users()
    for node in [*graph.of.values()]:
        if operation(node) != "mul" or not all(isinstance(a, Ref) for a in node.args[:2]):
            continue
        a, b = graph.arg(node, 0), graph.arg(node, 1)
        for gate, up in ((a, b), (b, a)):
            fn = activation_of(gate)
            if fn is None or gate is None or up is None or len(users[gate.name]) > 1:
                continue
            if gate.kwargs.get("operators"):  # the text says of an activation how it is written
                continue
            inner = next(iter(gate.operands()))
            if graph.of[inner].shape == up.shape == node.shape and not _constant(up):
                graph.put(node, "our.glu", inner, up.name, fn=fn)
                break


REWRITES: tuple[Rewrite, ...] = (
    _drop_nothing,
    copies,
    fills,
    _products_of_views,
    _rms_norms,
    _rotary,
    _safe_softmaxes,
    _silus,
    _new_gelu,
    _softcaps,
    _gated,
    experts,
    _drop_nothing,
)
"""In order: later ones read what earlier ones made."""
