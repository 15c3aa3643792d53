"""The maps of models whose attention reads the keys that an indexer chooses."""

from __future__ import annotations

from stagewright.model.hf.keys import Keys, Map
from stagewright.model.hf.parts import DEEPSEEK_EXPERTS, LATENT
from stagewright.model.patterns import shortest

_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def _query_rank(c: Keys) -> int:
    """The rank of queries, which the indexer's are made of, too."""
    return c.size("hidden_size", "q_lora_rank")


def _listed_mlps(c: Keys) -> tuple[str, ...]:
    """MLPs as transformers 5 lists them besides; empty: as the other keys say."""
    if c.get("mlp_layer_types") is None:
        return ()
    words, layers = {"dense": "dense", "sparse": "experts"}, c.fields["num_layers"]
    listed = c.items("mlp_layer_types")
    kinds = [words[x] for x in listed if isinstance(x, str) and x in words]
    if not len(kinds) == len(listed) == layers:
        c.reject("mlp_layer_types", f"dense or sparse for each of the {layers} layers")
    first = next((i for i, kind in enumerate(kinds) if kind == "experts"), layers)
    usual = "experts" not in kinds[:first] and "dense" not in kinds[first:]
    return () if usual and first == c.fields["first_dense_layers"] else shortest(kinds)


def _shared_indexers(c: Keys) -> tuple[str, ...]:
    """Layers with an indexer, and layers that use the choice of the one before (GLM-5.2).

    Listed, or every so many layers after the first ones, as transformers' GlmMoeDsaConfig reads it.
    """
    layers = c.fields["num_layers"]
    key = "indexer_types" if c.get("indexer_types") is not None else "index_topk_pattern"
    given = c.get(key)
    if given is None:
        step = 1 if c.get("index_topk_freq") is None else c.size("num_layers", "index_topk_freq")
        offset = c.whole("index_skip_topk_offset", 0, layers)
        full = [max(i - offset + 1, 0) % step == 0 for i in range(layers)]
    else:
        words = {"full": True, "shared": False, "F": True, "S": False}
        listed = list(given) if isinstance(given, str) else c.items(key)
        full = [words[x] for x in listed if isinstance(x, str) and x in words]
        if not len(full) == len(listed) == layers or not full[0]:
            c.reject(key, f"full or shared for each of the {layers} layers, full for the first")
    return shortest(["indexed" if own else "index_shared" for own in full])


INDEXED: Map = {
    **LATENT,
    "q_lora_rank": _query_rank,
    **DEEPSEEK_EXPERTS,
    **{name: name for name in _INDEXER},
    "mlps": _listed_mlps,
}
"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer."""

INDEX_SHARED: Map = {**INDEXED, "mixers": _shared_indexers}
"""GLM-5: the same, where some layers may share the indexer of a layer before."""

UNUSED = (
    *("head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration"),
    *("index_topk_freq", "index_skip_topk_offset"),
)
"""Keys of GLM-5 that say nothing more: how rope pairs channels, and what `indexer_types` lists."""
