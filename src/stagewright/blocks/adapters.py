"""Linear layers by the names that frameworks give them, and low-rank adapters beside them.

An adapter (LoRA, arXiv 2106.09685) has two factors, whose dims and products are here. They are
split as Megatron-Bridge splits them (`ParallelLinearAdapter` in its peft/utils.py). Beside a
column-parallel weight the first factor's channels are split and gathered behind it; beside a
row-parallel weight the first factor's inputs are split, and the outputs of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from stagewright.algebra.index import Dim, parse
from stagewright.graph.parameter import Parameter

# ---- linear layers by name -----------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear layer: weights of a block that read one input, as far as a block has them."""

    weights: tuple[str, ...]
    needs: str = ""
    """A weight that only blocks with this layer have; empty: the first one."""

    def of(self, block: frozenset[str]) -> tuple[str, ...]:
        """The weights of a block that are this layer; none where the block has no such layer."""
        if (self.needs or self.weights[0]) not in block:
            return ()
        return tuple(w for w in self.weights if w in block)


def _alike(*suffixes: str) -> tuple[Linear, ...]:
    """A layer of the dense MLP, of experts and of shared experts."""
    return tuple(
        Linear(tuple(f"{kind}_{suffix}" for suffix in suffixes)) for kind in ("w", "we", "ws")
    )


_QKV = (Linear(("wq", "wk", "wv", "wg"), needs="wk"),)
_Q = (Linear(("wq", "wg")), Linear(("cross.wq",)))
_K, _V, _O = ((Linear((f"w{x}",)), Linear((f"cross.w{x}",))) for x in "kvo")
_UP, _GATE, _DOWN, _UP_AND_GATE = _alike("up"), _alike("gate"), _alike("down"), _alike("up", "gate")
_STATE = (
    Linear(("mamba.w_x", "mamba.w_z")),
    Linear(("mamba2.w_x", "mamba2.w_z", "mamba2.w_b", "mamba2.w_c", "mamba2.w_dt")),
    Linear(("delta.w_q", "delta.w_k", "delta.w_v", "delta.w_z", "delta.w_beta", "delta.w_dt")),
    Linear(("lightning.w_q", "lightning.w_k", "lightning.w_v", "lightning.w_z")),
)
_STATE_OUT = tuple(Linear((f"{kind}.w_out",)) for kind in ("mamba", "mamba2", "delta", "lightning"))
_Q_DOWN, _Q_UP = (Linear(("w_dq",)),), (Linear(("w_uq",)),)
_KV_DOWN, _KV_UP = (Linear(("w_dkv", "w_kr")),), (Linear(("w_uk", "w_uv")),)

LINEARS: Mapping[str, tuple[Linear, ...]] = MappingProxyType(
    {
        # Megatron-LM: one layer for queries, keys and values, one for up and gate.
        "linear_qkv": _QKV,
        "linear_proj": (*_O, *_STATE_OUT[2:]),
        "linear_fc1": _UP_AND_GATE,
        "linear_fc2": _DOWN,
        "linear_q_proj": (Linear(("wq",)),),
        "linear_q_down_proj": _Q_DOWN,
        "linear_q_up_proj": _Q_UP,
        "linear_kv_down_proj": _KV_DOWN,
        "linear_kv_up_proj": _KV_UP,
        # CanonicalLoRA: an adapter for each.
        "linear_q": _Q,
        "linear_k": _K,
        "linear_v": _V,
        "linear_fc1_up": _UP,
        "linear_fc1_gate": _GATE,
        # transformers: Llama and most others.
        "q_proj": _Q,
        "k_proj": _K,
        "v_proj": _V,
        "o_proj": _O,
        "up_proj": _UP,
        "gate_proj": _GATE,
        "down_proj": _DOWN,
        "q_a_proj": _Q_DOWN,
        "q_b_proj": _Q_UP,
        "kv_a_proj_with_mqa": _KV_DOWN,
        "kv_b_proj": _KV_UP,
        "in_proj": _STATE,
        "out_proj": (*_O, *_STATE_OUT),
        # transformers: layers in one piece, and the names of GPT-2, GPT-NeoX, OPT, T5 and Mixtral.
        "qkv_proj": _QKV,
        "query_key_value": _QKV,
        "c_attn": _QKV,
        "gate_up_proj": _UP_AND_GATE,
        "c_proj": (*_O, *_DOWN),
        "c_fc": _UP,
        "dense": _O,
        "dense_h_to_4h": _UP,
        "dense_4h_to_h": _DOWN,
        "fc1": _UP,
        "fc2": _DOWN,
        "q": _Q,
        "k": _K,
        "v": _V,
        "o": _O,
        "wi_0": _GATE,
        "wi_1": _UP,
        "wi": _UP,
        "w1": _GATE,
        "w3": _UP,
        "w2": _DOWN,
        "all-linear": (
            *(*_Q, *_K, *_V, *_O, *_UP, *_GATE, *_DOWN),
            *(*_Q_DOWN, *_Q_UP, *_KV_DOWN, *_KV_UP, *_STATE, *_STATE_OUT),
        ),
    }
)
"""Layers by name. Megatron-LM's are those of `LoRA` and `CanonicalLoRA` in Megatron-Bridge, others
those of modules in Hugging Face's transformers, as PEFT's `target_modules` has them. `all-linear`
is PEFT's: every layer but the output projection."""


# ---- the factors of an adapter -------------------------------------------------------------------


class Factors(NamedTuple):
    """An adapter's factors as parameters declare them, and how they are multiplied."""

    first: tuple[str, ...]
    """Dims of the first factor, such as `("M", "16/tp")`."""
    second: tuple[str, ...]
    """Dims of the second, such as `("16", "A/tp", "D")`."""
    products: tuple[str, str]
    """The index expressions of the input's product with one factor, and of that with the other."""
    reverse: bool
    """The input is multiplied with the second factor before it is with the first."""
    row_parallel: bool
    """The weight's product is a sum over the ranks that split the tokens' channels."""


def factors(spec: str, weight: Parameter, rank: int) -> Factors:
    """The factors beside a weight whose product with the input is `spec`.

    >>> wq = Parameter.declare("wq", "M", "A/tp", "D")
    >>> found = factors("bsm,mad->bsad", wq, 16)
    >>> found.first, found.second, found.products
    (('M', '16/tp'), ('16', 'A/tp', 'D'), ('bsm,mc->bsc', 'bsc,cad->bsad'))
    >>> wo = Parameter.declare("wo", "A/tp", "D", "M")
    >>> found = factors("bsad,adm->bsm", wo, 16)
    >>> found.first, found.second, found.row_parallel
    (('A/tp', 'D', '16'), ('16', 'M/tp'), True)
    """
    x, w, out = (_letters(dims) for dims in (*parse(spec).ins, parse(spec).out))
    inputs = weight.inputs()
    lead = w[: int(weight.of_expert)]
    before = "".join(w[i] for i in inputs)
    behind = "".join(z for i, z in enumerate(w) if i not in inputs and z not in lead)
    summed = [z for z in w if z in x and z not in out]
    narrow = next(z for z in "cnuvwyzghijkl" if z not in x + w + out)
    between = "".join(z for z in x if z not in summed) + narrow
    one, other = f"{lead}{before}{narrow}", f"{lead}{narrow}{behind}"
    reverse = not {*summed} <= {*before}
    if reverse:
        one, other = other, one
    dims = dict(zip(w, _declared(weight), strict=True))
    degrees = {z: weight.placement.axes[i] for i, z in enumerate(w)}
    split_in = any(degrees[z] for z in before)
    split_out = next((degrees[z][0].partition(".")[0] for z in behind if degrees[z]), "")
    channels = str(rank)
    if split_out and not split_in and not any(z in x for z in behind):
        channels = f"{rank}/{split_out}"
    results = [dims[z] for z in behind]
    row_parallel = split_in and not split_out and not lead
    if row_parallel:
        results[-1] = f"{results[-1]}/tp"
    return Factors(
        (*(dims[z] for z in lead + before), channels),
        (*(dims[z] for z in lead), str(rank), *results),
        (f"{x},{one}->{between}", f"{between},{other}->{out}"),
        reverse,
        row_parallel,
    )


def _letters(dims: tuple[Dim, ...]) -> str:
    return "".join(x for dim in dims for x in dim)


def _declared(weight: Parameter) -> list[str]:
    """A weight's dims as they are declared, with what splits them."""
    placed = weight.placement
    return ["/".join((d, *by)) for d, by in zip(placed.dims, placed.axes, strict=True)]
