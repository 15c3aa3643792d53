"""Where named activations live; values that no row names follow their operands.

Columns and rows of matrix products and the residual stream are those of Megatron-LM (arXiv
1909.08053; with sequence parallelism, 2205.05198).
"""

from __future__ import annotations

from stagewright.parallel.context import context_rows
from stagewright.parallel.dispatch import expert_rows
from stagewright.parallel.plan import Dims, Plan

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


def residual(plan: Plan) -> Dims:
    """Where the residual stream [B, S, M] lives."""
    return plan.data, plan.sequence, ()


def activation_rows(plan: Plan) -> dict[str, Dims]:
    """The axes that split each dim of a named value."""
    gathered = (plan.data, plan.context, ())
    tokens = ("tokens", "token_types", "labels", "max", "exp_sum", "picked")
    rows: dict[str, Dims] = {
        **dict.fromkeys(tokens, gathered[:2]),
        "positions": (plan.context,),
        **dict.fromkeys(_RESIDUAL, residual(plan)),
        **dict.fromkeys((*_INPUT_GRADS, "eh_gathered", "logits_whole"), gathered),
    }
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
    """Inference: the cache has a rank's requests and its key-value heads, as vLLM's.

    Ranks that share a key-value head, or latents, have a copy each, or share the tokens: queries of
    their heads then go to all of them (`_striped`). Logits are gathered for the sampler.
    """
    requests = (plan.data, ())
    heads = tuple(a for a in plan.tensor if a in plan.key_value)
    cache, striped = (*requests, heads, ()), (plan.data, plan.stripes, (), heads, ())
    rows: dict[str, Dims] = {"logits_gathered": (*requests, ()), "logit_rows": requests}
    rows["token_requests"] = requests
    rows |= {f"{name}_cache_striped": striped for name in ("k", "v")}
    rows["latent_cache_striped"] = (plan.data, plan.stripes, (), ())
    rows["prefix_slots"] = (plan.data, plan.stripes, ())
    rows["row_slots"] = requests
    rows["q_striped"] = (*requests, tuple(a for a in plan.tensor if a not in plan.stripes), ())
    rows["striped_context"] = (plan.data, plan.context, plan.tensor, ())
    rows |= {f"{name}_cache_source": cache for name in ("k", "v")}
    rows |= dict.fromkeys(("source_slots", "source_ends", "block_table_source"), requests)
    rows |= {f"{name}_striped": requests for name in ("token_slots", "block_table")}
    for kind in ("", "_local", "_chunked"):
        rows |= {f"{name}{kind}": requests for name in ("token_slots", "block_table", "key_slots")}
        rows |= {f"{name}_cache{kind}": cache for name in ("k", "v")}
        rows[f"latent_cache{kind}"] = (*requests, ())
    return rows | {"token_positions": (plan.data, plan.context)}
