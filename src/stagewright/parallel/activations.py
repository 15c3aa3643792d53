"""Where named activations live; values that no row names follow their operands.

Columns and rows of matrix products and the residual stream are those of Megatron-LM (arXiv
1909.08053; with sequence parallelism, 2205.05198).
"""

from __future__ import annotations

from stagewright.parallel.context import context_rows
from stagewright.parallel.dispatch import expert_rows
from stagewright.parallel.plan import Dims, Plan

# `d_` begins the name of a gradient (`graph.gradient`). `d_norm_out` is that of the `norm_out` that
# `Builder._eager_norm` makes; those of `_INPUT_GRADS` are of the inputs, f"{name}_in", that
# `Builder.linear` makes where the recipe reduces the gradient of each product (`of_each_linear`).
_RESIDUAL = (
    "x",
    "y",
    "dy",
    "dx",
    "attn_reduced",
    "mlp_reduced",
    "branch",
    "embedded",
    "d_norm_out",
)
_INPUT_GRADS = tuple(f"d_{name}_in" for name in ("q", "k", "v", "up", "gate", "logits"))


STREAM = frozenset({"x", "y", "dy", "dx"})
"""Of these the residual stream, which may be several, [B, S, Streams, M]."""


def residual(plan: Plan, rank: int = 3) -> Dims:
    """Where the residual stream [B, S, M] lives, or several of `rank` dims."""
    return (plan.data, plan.sequence, *[()] * (rank - 2))


def activation_rows(plan: Plan) -> dict[str, Dims]:
    """The axes that split each dim of a named value."""
    gathered = (plan.data, plan.context, ())
    tokens = ("tokens", "token_types", "labels", "max", "exp_sum", "picked")
    rows: dict[str, Dims] = {
        **dict.fromkeys(tokens, gathered[:2]),
        "positions": (plan.context,),
        **dict.fromkeys(_RESIDUAL, residual(plan)),
        **dict.fromkeys((*_INPUT_GRADS, "eh_gathered", "logits_whole"), gathered),
        # Every rank of tp scores all keys for the same queries (Megatron-LM's DSAIndexer).
        **dict.fromkeys(("index_in", "index_latent", "chosen"), gathered),
    }
    # What goes through an adapter's narrow channels is on every rank of tp.
    rows |= {"lora_low": gathered} | ({"lora_out": gathered} if plan.gather_adapters else {})
    of_groups = (*gathered[:2], plan.vocabulary)
    for name in ("group_lse", "group_picked"):
        rows |= {name: of_groups, f"d_{name}": of_groups}
    if plan.embedding_all_reduce and plan.sequence_parallel:
        rows |= {"word": gathered, "d_scatter": gathered}
    return rows | _recommendation(plan) | _cache(plan) | expert_rows(plan) | context_rows(plan)


def _recommendation(plan: Plan) -> dict[str, Dims]:
    """Every rank looks up the whole batch in its columns of the tables (arXiv 1906.00091)."""
    return {
        "indices": ((), ()),
        "found": ((), (), plan.columns),
        "rows_found": (plan.data, (), ()),
        "selection": (plan.data, (), ()),
    }


def _cache(plan: Plan) -> dict[str, Dims]:
    """Inference: a cache has a rank's requests and its key-value heads, as in vLLM.

    Ranks that share a key-value head, or latents, have a copy each; or they share the tokens of a
    request in a striped cache, and queries of their heads go to all of them. Logits are gathered
    for the sampler.
    """
    requests = (plan.data, ())
    heads = tuple(a for a in plan.tensor if a in plan.key_value)
    whole_queries = tuple(a for a in plan.tensor if a not in plan.stripes)
    return {
        "token_slots": requests,
        "token_positions": (plan.data, plan.context),
        "kv_cache": (*requests, heads, ()),
        "latent_cache": (*requests, ()),
        "striped_kv_cache": (plan.data, plan.stripes, (), heads, ()),
        "striped_latent_cache": (plan.data, plan.stripes, (), ()),
        "prefix_slots": (plan.data, plan.stripes, ()),
        "q_striped": (*requests, whole_queries, ()),
        "striped_context": (plan.data, plan.context, plan.tensor, ()),
        "logits_gathered": (*requests, ()),
    }
