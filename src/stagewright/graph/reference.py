"""What each op computes, in numpy, on one rank's arrays: the truth that tests hold the graph to.

A `Context` tells a rank where it is, and what the node is told. Nothing but tests runs this
module's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from stagewright.algebra.index import bind, parse


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
        """Whether the rank is the first along some axes: of equal copies, one counts."""
        ...

    def __getitem__(self, attr: str) -> Any:
        """An attribute of the node."""
        ...

    def get(self, attr: str, default: Any = None) -> Any:
        """An attribute of the node, or `default`."""
        ...


_erf = np.vectorize(math.erf)


def same(ctx: Context, x: Any) -> Any:
    return x


def first(ctx: Context, x: Any, *_: Any) -> Any:
    return x


def add(ctx: Context, *xs: Any) -> Any:
    return sum(xs[1:], start=xs[0])


def scale(ctx: Context, x: Any) -> Any:
    return x * ctx["by"]


def divide(ctx: Context, x: Any, y: Any) -> Any:
    return x / y


def einsum(ctx: Context, *xs: Any) -> Any:
    """Einsum over specs that may hold `(gr)` dims: these are split, contracted and joined again."""
    spec = parse(ctx["spec"])
    sizes = bind(spec, [x.shape for x in xs], ctx.shape)
    flat = [
        x.reshape([sizes[a] for d in dims for a in d]) for x, dims in zip(xs, spec.ins, strict=True)
    ]
    ins = ",".join("".join(a for d in dims for a in d) for dims in spec.ins)
    out = np.einsum(f"{ins}->{''.join(a for d in spec.out for a in d)}", *flat)
    return out.reshape([math.prod(sizes[a] for a in d) for d in spec.out])


def total(ctx: Context, x: Any) -> Any:
    return einsum(ctx, x)


def mean(ctx: Context, x: Any) -> Any:
    return einsum(ctx, x) / ctx.count


def spread(ctx: Context, g: Any) -> Any:
    return np.full(ctx.shape, g / ctx.count)


def _align(spec_text: str, x: Any, last: int = 0) -> Any:
    """The second operand, with dims of size 1 for the indices that only the first one has.

    The `last` dims of both stay as they are.
    """
    spec = parse(spec_text)
    have, want = list(spec.ins[1]), list(spec.ins[0])
    for i in range(1, last + 1):
        want[-i] = have[-i]
    order = [have.index(d) for d in want if d in have]
    index = tuple(slice(None) if d in have else None for d in want)
    return np.transpose(x, order)[index]


def bias(ctx: Context, x: Any, b: Any) -> Any:
    return x + _align(ctx["spec"], b)


_Function = Callable[[Any], Any]


class Activation(NamedTuple):
    """A function of every element, and its derivative."""

    value: _Function
    slope: _Function


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _normal(x: Any) -> Any:
    """The distribution function of the standard normal distribution."""
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


def _gelu_slope(x: Any) -> Any:
    return _normal(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: Any) -> Any:
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _swish(by: float) -> Activation:
    """x * sigmoid(by * x)."""

    def value(x: Any) -> Any:
        return x * _sigmoid(by * x)

    def slope(x: Any) -> Any:
        s = _sigmoid(by * x)
        return s + by * x * s * (1 - s)

    return Activation(value, slope)


_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "gelu": (lambda x: x * _normal(x), _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "silu": _swish(1.0),
    "quick_gelu": _swish(1.702),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": (_sigmoid, lambda x: _sigmoid(x) * (1 - _sigmoid(x))),
    "softplus": (lambda x: np.log1p(np.exp(x)), _sigmoid),
    "exp": (np.exp, np.exp),
    "neg_exp": (lambda x: -np.exp(x), lambda x: -np.exp(x)),
}
ACTIVATIONS = {name: Activation(*pair) for name, pair in _FUNCTIONS.items()}


def _act(ctx: Context, x: Any) -> Any:
    """An activation; one with a limit is flat above it."""
    if ctx["fn"] == "softcap":
        return ctx["cap"] * np.tanh(x / ctx["cap"])
    most = ctx.get("clamp")
    return ACTIVATIONS[ctx["fn"]].value(x if most is None else np.minimum(x, most))


def _slope(ctx: Context, x: Any) -> Any:
    """The derivative of the same."""
    if ctx["fn"] == "softcap":
        return 1 - np.tanh(x / ctx["cap"]) ** 2
    slope, most = ACTIVATIONS[ctx["fn"]].slope, ctx.get("clamp")
    return slope(x) if most is None else slope(np.minimum(x, most)) * (x < most)


def modulate(ctx: Context, x: Any, by: Any) -> Any:
    """x * (base + a row) + another row, the same for all positions."""
    shift = by[:, None, ctx["shift"]] if ctx["shift"] >= 0 else 0.0
    return x * (ctx["base"] + by[:, None, ctx["scale"]]) + shift


def modulate_wgrad(ctx: Context, g: Any, x: Any) -> Any:
    out = np.zeros(ctx.shape)
    out[:, ctx["scale"]] = (g * x).sum(1)
    if ctx["shift"] >= 0:
        out[:, ctx["shift"]] = g.sum(1)
    return out


def act(ctx: Context, x: Any) -> Any:
    return _act(ctx, x)


def act_bwd(ctx: Context, g: Any, x: Any) -> Any:
    return g * _slope(ctx, x)


def _weighed(ctx: Context, up: Any) -> Any:
    """What a gate weighs: within limits, and with an offset."""
    most = ctx.get("clamp")
    return (up if most is None else np.clip(up, -most, most)) + ctx.get("offset", 0.0)


def glu(ctx: Context, gate: Any, up: Any) -> Any:
    return _act(ctx, gate) * _weighed(ctx, up)


def glu_bwd(ctx: Context, g: Any, gate: Any, up: Any) -> Any:
    if ctx["wrt"] == 0:
        return g * _weighed(ctx, up) * _slope(ctx, gate)
    most = ctx.get("clamp")
    return g * _act(ctx, gate) * (1.0 if most is None else np.abs(up) <= most)


def pscan(ctx: Context, a: Any, b: Any) -> Any:
    """Each y along `dim` is a times the y before it, plus b."""
    out = np.zeros(b.shape)
    y, a, b = (np.moveaxis(x, ctx["dim"], 0) for x in (out, a, b))
    before: Any = 0.0
    for t in range(len(y)):
        before = y[t] = a[t] * before + b[t]
    return out


def pscan_bwd(ctx: Context, g: Any, a: Any, b: Any, y: Any) -> Any:
    """The scan backwards, of gradients; with respect to a (0) times the y before."""
    out = np.zeros(b.shape)
    g, a, y, d = (np.moveaxis(x, ctx["dim"], 0) for x in (g, a, y, out))
    after: Any = 0.0
    for t in reversed(range(len(g))):
        total = g[t] + after
        after = a[t] * total
        d[t] = total if ctx["wrt"] else total * (y[t - 1] if t else 0.0)
    return out


def random_mask(ctx: Context, x: Any) -> Any:
    """Pseudo-random by global position, so that every layout draws the same mask."""
    grid: Any = np.zeros(x.shape)
    for i, dim in enumerate(parse(ctx["spec"]).out):
        shape = [1] * x.ndim
        shape[i] = n = int(x.shape[i])
        at: Any = ctx.start(dim[0]) + np.arange(n)
        grid = grid * 31.7 + at.reshape(shape)
    return (np.sin(grid * 12.9898 + 78.233) * 43758.5453 % 1 >= ctx["rate"]).astype(float)


def dropout(ctx: Context, x: Any, mask: Any) -> Any:
    return x * mask / (1 - ctx["rate"])


def rope(ctx: Context, x: Any, at: Any = None) -> Any:
    """Rotate pairs of the last dim by an angle that grows with the position.

    Positions are `at`, [sequences, places], or the places in dim 1.
    """
    length, half = int(x.shape[1]), int(x.shape[-1]) // 2
    at = ctx.start("s") + np.arange(length)[None, :] if at is None else at
    sign = -1 if ctx["inverse"] else 1
    angle = at[..., None] * 100.0 ** (-np.arange(half) / max(half, 1)) * sign
    angle = angle.reshape(-1, length, *[1] * (x.ndim - 3), half)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def _standard(ctx: Context, x: Any) -> tuple[Any, Any]:
    y = x - x.mean(-1, keepdims=True) if ctx["fn"] == "layernorm" else x
    r = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return y * r, r


def norm(ctx: Context, x: Any, w: Any = 1.0, b: Any = 0.0) -> Any:
    return _standard(ctx, x)[0] * w + b


def norm_bwd(ctx: Context, g: Any, x: Any, w: Any = 1.0) -> Any:
    y, r = _standard(ctx, x)
    h = g * w
    dx = h - y * (h * y).mean(-1, keepdims=True)
    return r * (dx - h.mean(-1, keepdims=True) if ctx["fn"] == "layernorm" else dx)


def norm_wgrad(ctx: Context, g: Any, x: Any) -> Any:
    y, _ = _standard(ctx, x)
    return (g * y).reshape(-1, g.shape[-1]).sum(0)


def _mask(ctx: Context, queries: int, keys: int) -> Any:
    """0 where a query sees a key, -inf elsewhere."""
    q = ctx.start("q") + np.arange(queries)[:, None]
    k = ctx.start("k") + np.arange(keys)[None, :]
    seen = np.ones((queries, keys), dtype=bool)
    if ctx.get("causal"):
        seen &= k <= q
    if ctx.get("window"):
        seen &= k > q - ctx["window"]
    if ctx.get("chunk"):
        seen &= k // ctx["chunk"] == q // ctx["chunk"]
    return np.where(seen, 0.0, -np.inf)


def _probabilities(scores: Any, sinks: Any = None) -> Any:
    """Softmax over the last dim; `sinks`, one score more per head, take what is missing to 1."""
    most = scores.max(-1, keepdims=True)
    if sinks is None:
        e = np.exp(scores - most)
        return e / e.sum(-1, keepdims=True)
    most = np.maximum(most, sinks)
    e = np.exp(scores - most)
    return e / (e.sum(-1, keepdims=True) + np.exp(sinks - most))


def softmax(ctx: Context, x: Any, sinks: Any = None) -> Any:
    scores = x / math.sqrt(ctx["width"]) + _mask(ctx, x.shape[-2], x.shape[-1])
    return _probabilities(scores, None if sinks is None else sinks[:, None, None])


def sinks_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return -((1 - y.sum(-1)) * (g * y).sum(-1)).sum((0, 2))


def softmax_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return y * (g - (g * y).sum(-1, keepdims=True)) / math.sqrt(ctx["width"])


def _width(ctx: Context, q: Any) -> float:
    """What scores are divided by: a head of latents is wider than the head they stand for."""
    return math.sqrt(ctx.get("width", q.shape[-1]))


def attention(ctx: Context, q: Any, *keys: Any) -> Any:
    keys, more = _apart(ctx, keys)
    return _attend(ctx, q, *_heads(*keys, width=ctx.shape[-1]), more)[1]


def _apart(ctx: Context, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keys and values, and what follows them: a bias of scores, the scores of sinks."""
    names = [name for name in ("bias", "sinks") if ctx.get(name)]
    first = len(operands) - len(names)
    return operands[:first], dict(zip(names, operands[first:], strict=True))


def _heads(k: Any, *v: Any, width: int) -> tuple[Any, Any]:
    """Keys and values of heads; latents, which all share, are keys and their beginning values."""
    return (k, v[0]) if v else (k[:, :, None], k[:, :, None, :width])


def _grouped(q: Any, k: Any) -> Any:
    b, s, a, d = q.shape
    return q.reshape(b, s, k.shape[2], a // k.shape[2], d)


def _attend(ctx: Context, q: Any, k: Any, v: Any, more: dict[str, Any]) -> tuple[Any, Any]:
    x = np.einsum("bqgrd,bkgd->bgrqk", _grouped(q, k), k) / _width(ctx, q)
    if "bias" in more:
        x = x + more["bias"].reshape(1, k.shape[2], -1, *more["bias"].shape[1:])
    sinks = _per_head(more.get("sinks"), k)
    p = _probabilities(_cap(ctx, x) + _mask(ctx, q.shape[1], k.shape[1]), sinks)
    return p, np.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(*q.shape[:3], v.shape[-1])


def _per_head(sinks: Any, k: Any) -> Any:
    """Beside scores [sequences, groups, heads of a group, queries, keys]."""
    return None if sinks is None else sinks.reshape(1, k.shape[2], -1, 1, 1)


def _cap(ctx: Context, x: Any) -> Any:
    return ctx["softcap"] * np.tanh(x / ctx["softcap"]) if ctx.get("softcap") else x


def attention_bwd(ctx: Context, g: Any, q: Any, *keys: Any) -> Any:
    keys, more = _apart(ctx, keys)
    k, v = _heads(*keys, width=g.shape[-1])
    p, _ = _attend(ctx, q, k, v, more)
    g5, q5 = _grouped(g, k), _grouped(q, k)
    dv = np.einsum("bgrqk,bqgrd->bkgd", p, g5)
    if ctx["wrt"] == "v":
        return dv
    dp = np.einsum("bqgrd,bkgd->bgrqk", g5, v)
    if ctx["wrt"] == "sinks":
        return -((1 - p.sum(-1)) * (dp * p).sum(-1)).sum((0, 3)).reshape(-1)
    dx = p * (dp - (dp * p).sum(-1, keepdims=True))
    if ctx.get("softcap"):
        x = np.einsum("bqgrd,bkgd->bgrqk", q5, k) / _width(ctx, q)
        dx = dx * (1 - np.tanh(x / ctx["softcap"]) ** 2)
    if ctx["wrt"] == "bias":
        return dx.sum(0).reshape(-1, *dx.shape[-2:])
    dx = dx / _width(ctx, q)
    if ctx["wrt"] == "q":
        return np.einsum("bgrqk,bkgd->bqgrd", dx, k).reshape(q.shape)
    dk = np.einsum("bgrqk,bqgrd->bkgd", dx, q5)
    if len(keys) == 2:
        return dk
    dk[..., : v.shape[-1]] += dv
    return dk[:, :, 0]


def _buckets(ctx: Context, queries: int, keys: int, many: int) -> Any:
    """Rows of a table of biases, one-hot [queries, keys, rows]: near distances have their own.

    T5 (arXiv 1910.10683, section 2.1) spaces far ones logarithmically; here all far ones are one.
    """
    ahead = np.arange(keys)[None, :] - ctx.start("q") - np.arange(queries)[:, None]
    return (_bucket(ctx["causal"], ahead, many)[..., None] == np.arange(many)).astype(float)


def _bucket(causal: bool, ahead: Any, many: int) -> Any:
    half = many if causal else many // 2
    return np.minimum(np.abs(ahead), half - 1) + (0 if causal else half) * (ahead > 0)


def relative_bias(ctx: Context, table: Any) -> Any:
    _, q, k = ctx.shape
    return np.einsum("va,qkv->aqk", table, _buckets(ctx, q, k, len(table)))


def relative_bias_bwd(ctx: Context, g: Any) -> Any:
    return np.einsum("aqk,qkv->va", g, _buckets(ctx, g.shape[1], g.shape[2], ctx.shape[0]))


# The cache of keys and values. Its slots are in blocks, a block is of one request. The table holds,
# per block, the request and the position of its first token as one number.
FAR = 2**32


def _owners(ctx: Context, table: Any, slots: Any) -> tuple[Any, Any]:
    """Request and position that slots hold.

    Stripes are behind each other: the tokens of a block are dealt to them in turn.
    """
    striped = ctx.get("block") is not None
    width = ctx.value("block") if striped else ctx.size("k") // ctx.size("i")  # slots of a block
    stripe, here = np.divmod(slots, width * table.shape[1])
    request, first = np.divmod(np.take_along_axis(table, here // width, axis=1), FAR)
    return request, first + here % width * (ctx.value("stripes") if striped else 1) + stripe


def cached_attention(ctx: Context, q: Any, *rest: Any) -> Any:
    """A token sees what the cache holds of its request up to its own position.

    Rows gathered from the cache come with their slots; there are as many as slots where this runs.
    """
    rest, more = _apart(ctx, rest)
    many = 1 if ctx.get("latent") else 2
    slots, table, *gathered = rest[many:]
    places = ctx.start("k") + np.arange(int(rest[0].shape[1]))[None, :]
    places = gathered[0] if gathered else places
    k, v = _heads(*rest[:many], width=ctx.shape[-1])
    asks, at = _owners(ctx, table, slots)
    holds, place = _owners(ctx, table, np.broadcast_to(places, (len(table), places.shape[-1])))
    seen = asks[:, :, None] == holds[:, None, :]
    ahead = place[:, None, :] - at[:, :, None]
    causal = ctx.get("causal", True)
    if causal:
        seen &= ahead <= 0
    if ctx.get("window"):
        seen &= place[:, None, :] > at[:, :, None] - ctx["window"]
    if ctx.get("chunk"):
        seen &= place[:, None, :] // ctx["chunk"] == at[:, :, None] // ctx["chunk"]
    bias: Any = 0.0
    if "bias" in more:  # [sequences, queries, keys, heads]
        bias = more["bias"][_bucket(causal, np.clip(ahead, -(2**20), 2**20), len(more["bias"]))]
        bias = np.moveaxis(bias, 3, 1).reshape(len(q), k.shape[2], -1, *bias.shape[1:3])
    p = _probabilities(_scores(ctx, q, k, seen) + bias, _per_head(more.get("sinks"), k))
    return np.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(*q.shape[:3], v.shape[-1])


def _scores(ctx: Context, q: Any, k: Any, seen: Any) -> Any:
    x = np.einsum("bqgrd,bkgd->bgrqk", _grouped(q, k), k) / math.sqrt(ctx["width"])
    return _cap(ctx, x) + np.where(seen, 0.0, -np.inf)[:, None, None]


def striped_attention(ctx: Context, q: Any, *rest: Any) -> Any:
    """The same to the keys of each stripe alone; or logarithms of its sums of exponentials."""
    *caches, slots, table = rest
    asks, at = _owners(ctx, table, slots)
    width = 1 if ctx.get("sums") else ctx.shape[-1]
    found: list[Any] = []
    for nth in range(int(caches[0].shape[1])):
        k, v = _heads(*(x[:, nth] for x in caches), width=width)
        many = int(k.shape[1])
        places = (ctx.start("n") + nth) * many + np.arange(many)[None, :]
        holds, place = _owners(ctx, table, np.broadcast_to(places, (len(table), many)))
        seen = (asks[:, :, None] == holds[:, None, :]) & (place[:, None, :] <= at[:, :, None])
        e = np.exp(_scores(ctx, q, k, seen))
        total = e.sum(-1)  # [sequences, groups, heads of a group, queries]; 0 where it sees none
        if ctx.get("sums"):
            with np.errstate(divide="ignore"):
                found.append(np.log(np.moveaxis(total, 3, 1)).reshape(q.shape[:3]))
            continue
        o = np.einsum("bgrqk,bkgd->bqgrd", e / np.maximum(total, 1e-300)[..., None], v)
        found.append(o.reshape(*q.shape[:3], v.shape[-1]))
    return np.stack(found)


def merge_stripes(ctx: Context, o: Any, sums: Any, sinks: Any = None) -> Any:
    """Of each stripe's result what it counts for: its part of the sum of exponentials."""
    whole = np.exp(sums).sum(0) + (0.0 if sinks is None else np.exp(sinks))
    own = sums[ctx.start("n") :][: len(o)]
    return (o * (np.exp(own) / whole)[..., None]).sum(0)


def cache(ctx: Context, old: Any, new: Any, slots: Any) -> Any:
    """The cache with new rows in their slots."""
    out: Any = np.array(old, dtype=float)
    striped = parse(ctx["spec"]).out[1] == ("n",)
    table = out if striped else out[:, None]
    stripe, at = np.divmod(slots, ctx.size("k"))
    stripe, at = stripe - (ctx.start("n") if striped else 0), at - ctx.start("k")
    here = (stripe >= 0) & (stripe < table.shape[1]) & (at >= 0) & (at < table.shape[2])
    for b, s in zip(*np.nonzero(here), strict=True):
        table[b, stripe[b, s], at[b, s]] = new[b, s]
    return out


def take(ctx: Context, x: Any, rows: Any) -> Any:
    return np.take_along_axis(x, rows[..., None], axis=rows.ndim - 1).reshape(ctx.shape)


def _rows(ctx: Context, tokens: Any, rows: int) -> Any:
    """One-hot of the tokens over this rank's part of the vocabulary."""
    return (tokens[..., None] == ctx.start("v") + np.arange(rows)).astype(float)


def embedding(ctx: Context, tokens: Any, table: Any) -> Any:
    spec = parse(ctx["spec"])
    at, of, out = ("".join(d[0] for d in dims) for dims in (*spec.ins, spec.out))
    row = next(x for x in of if x not in out)
    rows = _rows(ctx, tokens, table.shape[of.index(row)])
    return np.einsum(f"{at}{row},{of}->{out}", rows, table)


def embedding_bwd(ctx: Context, g: Any, tokens: Any) -> Any:
    spec = parse(ctx["spec"])
    made, at, of = ("".join(d[0] for d in dims) for dims in (*spec.ins, spec.out))
    row = next(x for x in of if x not in made)
    rows = _rows(ctx, tokens, ctx.shape[of.index(row)])
    return np.einsum(f"{made},{at}{row}->{of}", g, rows)


def first_token(ctx: Context, x: Any) -> Any:
    return x[:, 0] * float(ctx.start("s") == 0)


def first_token_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    if ctx.start("s") == 0:
        out[:, 0] = g
    return out


def maximum(ctx: Context, x: Any) -> Any:
    return x.max(-1)


def exp_sum(ctx: Context, x: Any, top: Any) -> Any:
    return np.exp(x - top[..., None]).sum(-1)


def exp_sum_bwd(ctx: Context, g: Any, x: Any, top: Any) -> Any:
    return g[..., None] * np.exp(x - top[..., None])


def pick(ctx: Context, x: Any, labels: Any) -> Any:
    return (x * _rows(ctx, labels, x.shape[-1])).sum(-1)


def pick_bwd(ctx: Context, g: Any, labels: Any) -> Any:
    return g[..., None] * _rows(ctx, labels, ctx.shape[-1])


def nll(ctx: Context, top: Any, summed: Any, picked: Any) -> Any:
    return np.log(summed) + top - picked


def norm2(ctx: Context, x: Any) -> Any:
    return (x * x).sum() * float(ctx.leads(ctx["alone"]))


def _chosen(ctx: Context, experts: int = 0) -> Any:
    """1 where a token goes to an expert, [tokens, experts]: in turns, so that all ranks agree."""
    sequence: Any = ctx.start("b") + np.arange(int(ctx.shape_of("b")))
    place: Any = ctx.start("s") + np.arange(int(ctx.shape_of("s")))
    token: Any = (sequence[:, None] * ctx.size("s") + place).reshape(-1)
    many = experts or int(ctx.size("e"))
    here: Any = ctx.start("e") + np.arange(int(ctx.shape_of("e")))
    turn: Any = (np.arange(many) if experts else here)[None, :] - (token * ctx["top_k"])[:, None]
    return (turn % many < ctx["top_k"]).astype(float)


def _routes(ctx: Context, rows: int) -> Any:
    """1 where a row of an expert is a copy of a token, [experts, rows, tokens]."""
    chosen = _chosen(ctx)
    result: Any = np.zeros((chosen.shape[1], rows, chosen.shape[0]))
    for e in range(int(chosen.shape[1])):
        tokens: Any = np.flatnonzero(chosen[:, e])
        result[e, np.arange(int(tokens.size)), tokens] = 1
    return result


def log_softmax(ctx: Context, x: Any) -> Any:
    return np.log(_softmax(x))


def log_softmax_bwd(ctx: Context, g: Any, y: Any) -> Any:
    return g - np.exp(y) * g.sum(-1, keepdims=True)


def log_probs(ctx: Context, x: Any, top: Any, total: Any) -> Any:
    return x - (top + np.log(total))[..., None]


def log_probs_bwd(ctx: Context, g: Any, y: Any, summed: Any) -> Any:
    return g - np.exp(y) * summed[..., None]


def repeat(ctx: Context, x: Any) -> Any:
    return np.repeat(x, ctx.shape[2] // x.shape[2], 2)


def repeat_bwd(ctx: Context, g: Any) -> Any:
    return g.reshape(*ctx.shape[:3], -1, ctx.shape[3]).sum(3)


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _gates(ctx: Context, logits: Any) -> Any:
    """Of the chosen experts, with or without weights that add up to one."""
    chosen = _chosen(ctx, logits.shape[-1]).reshape(logits.shape)
    if not ctx["norm"]:
        return chosen * (_softmax(logits) if ctx["fn"] == "softmax" else 1 / (1 + np.exp(-logits)))
    weight = np.exp(logits) if ctx["fn"] == "softmax" else 1 / (1 + np.exp(-logits))
    weight = weight * chosen
    return weight / weight.sum(-1, keepdims=True)


def topk(ctx: Context, logits: Any, *_: Any) -> Any:
    """The gates of experts, of which those behind the last are the first once more."""
    return _gates(ctx, logits[..., np.arange(ctx.shape[-1]) % logits.shape[-1]])


def topk_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    chosen = _chosen(ctx, logits.shape[-1]).reshape(logits.shape)
    s = 1 / (1 + np.exp(-logits))
    if ctx["norm"]:
        y = _gates(ctx, logits)
        back = y * (g - (g * y).sum(-1, keepdims=True))
        return back if ctx["fn"] == "softmax" else back * (1 - s)
    if ctx["fn"] == "sigmoid":
        return g * chosen * s * (1 - s)
    y = _softmax(logits)
    return y * (g * chosen - (g * chosen * y).sum(-1, keepdims=True))


def scores(ctx: Context, logits: Any) -> Any:
    """What balances the load looks at: the scores of all experts, which add up to one."""
    if ctx["fn"] == "softmax":
        return _softmax(logits)
    y = 1 / (1 + np.exp(-logits))
    return y / y.sum(-1, keepdims=True)


def scores_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    y = scores(ctx, logits)
    back = y * (g - (g * y).sum(-1, keepdims=True))
    return back if ctx["fn"] == "softmax" else back * (1 - 1 / (1 + np.exp(-logits)))


def count(ctx: Context, gates: Any) -> Any:
    """Copies of tokens that each expert gets."""
    return einsum(ctx, (gates != 0).astype(float))


def aux_loss_bwd(ctx: Context, counts: Any) -> Any:
    """Gradient of E sum(f P): f the part of copies that go to an expert, P its mean score."""
    spec = parse(ctx["spec"])
    over = {x for d in spec.out for x in d} - {x for d in spec.ins[0] for x in d}
    tokens = math.prod(ctx.size(x) for x in over)
    slope = counts * (ctx["coeff"] * ctx.size("e") / (ctx["top_k"] * tokens**2))
    ones = np.ones(ctx.shape)
    ahead = slope[:, None, :] if len(spec.ins[0]) == 2 else slope
    each = ones.shape[0] // ahead.shape[0] if ahead.ndim == 3 else 1
    return ones * (np.repeat(ahead, each, axis=0) if ahead.ndim == 3 else ahead)


def z_loss_bwd(ctx: Context, g: Any, logits: Any) -> Any:
    """With the gradient of mean(log(sum(exp(logits)))^2) (ST-MoE, arXiv 2202.08906, equation 5)."""
    spec = parse(ctx["spec"])
    tokens = math.prod(ctx.size(x) for d in spec.out[:-1] for x in d)
    top = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    return g + 2 * ctx["coeff"] * total * _softmax(logits) / tokens


def splits(ctx: Context, gates: Any) -> Any:
    """Copies that each expert gets from the tokens of a rank."""
    flat = (gates != 0).astype(float).reshape(ctx.shape[0], -1, gates.shape[-1])
    return flat.sum(1)


def _weights(ctx: Context, gates: Any) -> Any:
    flat = gates.reshape(-1, gates.shape[-1])
    return flat if ctx["weighted"] else np.ones_like(flat)


def dispatch(ctx: Context, x: Any, gates: Any) -> Any:
    routes = _routes(ctx, ctx.shape[1])
    return np.einsum("ert,tm,te->erm", routes, x.reshape(-1, x.shape[-1]), _weights(ctx, gates))


def combine(ctx: Context, h: Any, gates: Any) -> Any:
    routes = _routes(ctx, h.shape[1])
    return np.einsum("ert,erm,te->tm", routes, h, _weights(ctx, gates)).reshape(ctx.shape)


def combine_gates(ctx: Context, tokens: Any, rows: Any, gates: Any) -> Any:
    flat = tokens.reshape(-1, tokens.shape[-1])
    routes = _routes(ctx, rows.shape[1])
    return np.einsum("ert,erm,tm->te", routes, rows, flat).reshape(gates.shape)


def row_gates(ctx: Context, gates: Any) -> Any:
    flat = gates.reshape(-1, gates.shape[-1])
    return np.einsum("ert,te->er", _routes(ctx, ctx.shape[1]), flat)


def row_gates_bwd(ctx: Context, g: Any) -> Any:
    return np.einsum("ert,er->te", _routes(ctx, g.shape[1]), g).reshape(ctx.shape)


def own_experts(ctx: Context, x: Any) -> Any:
    first = ctx.start("f")
    return x[..., first : first + ctx.shape[-1]]


def own_experts_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    first = ctx.start("f")
    out[..., first : first + g.shape[-1]] = g
    return out


def weigh(ctx: Context, x: Any, w: Any) -> Any:
    return x * w[..., None]


def weigh_bwd(ctx: Context, g: Any, x: Any) -> Any:
    return (g * x).sum(-1)


def bias_update(ctx: Context, counts: Any, bias: Any) -> Any:
    """More for experts that got less than others (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    return bias + 1e-3 * np.sign(counts.mean() - counts)


def join(ctx: Context, a: Any, b: Any) -> Any:
    """Operands stand behind each other along `dim` of the result; what lacks dims is repeated."""
    spec = parse(ctx["spec"])
    found: list[Any] = []
    for x, dims in zip((a, b), spec.ins, strict=True):
        own = [d for d in dims if d not in spec.out]
        order = [d if d in dims else None for d in spec.out]
        order[ctx["dim"]] = own[0] if own else None
        x = np.transpose(x, [dims.index(d) for d in order if d is not None])
        x = x[tuple(slice(None) if d is not None else None for d in order)]
        shape = list(ctx.shape)
        shape[ctx["dim"]] = x.shape[ctx["dim"]]
        found.append(np.broadcast_to(x, shape))
    return np.concatenate(found, axis=ctx["dim"])


def part(ctx: Context, x: Any) -> Any:
    """The first or last along `dim`, summed over the dims that the result lacks."""
    spec = parse(ctx["spec"])
    own = [i for i, d in enumerate(spec.out) if d not in spec.ins[0]]
    width = ctx.shape[own[0]] if own else 1
    dim = ctx["dim"] % x.ndim
    x = x[(slice(None),) * dim + (slice(width) if ctx["first"] else slice(-width, None),)]
    lost = tuple(
        i for i, d in enumerate(spec.ins[0]) if d not in spec.out and (i != dim or not own)
    )
    return x.sum(lost)


def pad(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    dim = ctx["dim"] % out.ndim
    if g.ndim < out.ndim:
        g = np.expand_dims(g, dim)
    width = g.shape[dim]
    out[(slice(None),) * dim + (slice(width) if ctx["first"] else slice(-width, None),)] = g
    return out


def triangle(ctx: Context, x: Any) -> Any:
    """Below the diagonal of the last two dims, row by row."""
    i, j = np.tril_indices(x.shape[-1], -1)
    return x[..., i, j]


def triangle_bwd(ctx: Context, g: Any) -> Any:
    out = np.zeros(ctx.shape)
    i, j = np.tril_indices(out.shape[-1], -1)
    out[..., i, j] = g
    return out
