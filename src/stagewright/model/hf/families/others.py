"""Families of makers with one or two, from Ant Group to Zyphra."""

from __future__ import annotations

from itertools import accumulate

from stagewright.errors import divisors
from stagewright.model.architecture import LIMITS, MAX_EXPERTS
from stagewright.model.hf import parts
from stagewright.model.hf.keys import Fields, Fixed, Keys, Map, Reader, family
from stagewright.model.layers import OwnSizes, SharedBlocks, shortest

_LATENT_DENSE: Map = {**parts.LATENT, "num_query_groups": parts.all_heads}


def _jamba_experts(c: Keys) -> Fields:
    """Experts once in a period of layers, at an offset; one expert is none."""
    if c.get("num_experts") == 1:
        return c.read_all(parts.NO_EXPERTS)
    often = c.size("num_layers", "expert_layer_period")
    return {
        **c.read_all(parts.experts("num_experts", "intermediate_size")),
        "norm_topk_prob": False,
        "first_dense_layers": c.integer("expert_layer_offset", 0, often - 1),
        "moe_layer_freq": often,
    }


def _ling_router(c: Keys) -> Fields:
    """Ling 2.0 scores with sigmoids and balances with a bias; Ling 1 with a softmax."""
    sigmoid = c.get("score_function") == "sigmoid"
    return {
        "router": "sigmoid" if sigmoid else "softmax",
        "expert_bias": sigmoid and c.get("moe_router_enable_expert_bias") is not False,
        "qk_norm": c.get("use_qk_norm") is True,
    }


_LING: Map = {
    **parts.DECODER,
    "qkv_bias": "use_qkv_bias",
    "attention_output_bias": "use_bias",
    **parts.experts("num_experts", "moe_intermediate_size"),
    "norm_topk_prob": "norm_topk_prob",
    "shared_ffn_hidden_size": parts.number_of_shared("num_shared_experts"),
    "first_dense_layers": parts.dense_first("first_k_dense_replace"),
    "router": _ling_router,
    "num_expert_groups": parts.expert_groups,
    "rotary_fraction": parts.rotary_fraction,
}


def _ernie_mlps(c: Keys) -> Fields:
    """Experts in one layer of a period, from one layer to another; dense layers elsewhere."""
    layers = c.fields["num_layers"]
    start = c.integer("moe_layer_start_index", 0, layers)
    end = c.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else c.integer("moe_layer_end_index", 0, 10**5)
    often = c.size("num_layers", "moe_layer_interval")
    kinds = [
        "experts" if start <= i <= last and (i + 1) % often == 0 else "dense" for i in range(layers)
    ]
    return {"mlps": shortest(kinds)}


_COMMAND: Map = {**parts.BIASED, "norm": Fixed("layernorm"), "parallel_block": True}


_DATABRICKS_SIZES = parts.sizes(
    num_layers="n_layers",
    hidden_size="d_model",
    num_attention_heads="n_heads",
    max_position_embeddings="max_seq_len",
)


def _smollm_mixers(c: Keys) -> Fields:
    """Every fourth layer has no positions, or those that the file lists."""
    flags = parts.turned_layers(c)
    read: Fields = parts.windows(lambda c, i: False, used="use_sliding_window")(c)
    kinds = ["global"] * len(flags)
    if read["sliding_window"] is not None:
        kinds = [read["mixers"][i % len(read["mixers"])] for i in range(len(flags))]
        if any(not x and k == "local" for x, k in zip(flags, kinds, strict=True)):
            c.reject("layer_types", "full_attention in layers without rope")
    mixers = [k if x else "nope" for x, k in zip(flags, kinds, strict=True)]
    return {"sliding_window": read["sliding_window"], "mixers": shortest(mixers)}


def _helium_head(c: Keys) -> int:
    """The width of a head; Helium's output projection is square, whatever its heads are."""
    width = parts.head_width(("num_attention_heads",), "head_dim")(c)
    hidden, heads = c.fields["hidden_size"], c.fields["num_attention_heads"]
    if width * heads != hidden:
        c.reject("head_dim", f"the hidden size {hidden} over the {heads} heads")
    return width


_LAGUNA: Map = {
    **parts.BIASED,
    **parts.experts("num_experts", "moe_intermediate_size"),
    **parts.SIGMOID,
    "qk_norm": True,
    "attention_gate": True,
    "attention_gate_per_head": lambda c: c.get("gating") is True or c.get("gating") == "per-head",
    "shared_ffn_hidden_size": "shared_expert_intermediate_size",
    "first_dense_layers": parts.dense_first("first_k_dense_replace"),
    "mixers": parts.windows(lambda c, i: False),
}


def _step_layers(c: Keys) -> Fields:
    """Layers with a window may have more query heads than the others."""
    key = c.used("num_sliding_attention_heads", "attention_other_setting.num_attention_heads")
    heads = c.optional("num_attention_heads", key)
    if heads is None or heads == c.fields["num_attention_heads"]:
        return {}
    of_window = OwnSizes(num_attention_heads=heads)
    return parts.own_sizes(
        [of_window if kind == "local" else OwnSizes() for kind in parts.mixers_of_layers(c)]
    )


_OF_STATES = {"use_bias": False, "hidden_act": "silu"}


def _same_in_all(key: str, most: int) -> Reader:
    """A whole number, or a list that has the same number for every layer."""

    def read(c: Keys) -> int:
        value = c.get(key)
        if isinstance(value, list):
            numbers = {x for x in c.items(key) if type(x) is int and 0 <= x <= most}
            if len(numbers) != 1 or len(c.items(key)) < 1:
                c.reject(key, "one number for all layers")
            return numbers.pop()
        return c.integer(key, 0, most)

    return read


def _hunyuan_shared(c: Keys) -> int:
    """Shared experts, which have the width of the MLP each; one where the file does not say."""
    number = 1
    if c.get("num_shared_expert") is not None:
        number = _same_in_all("num_shared_expert", MAX_EXPERTS)(c)
    return number * c.fields["ffn_hidden_size"]


def _hunyuan_width(c: Keys) -> int:
    if c.get("moe_intermediate_size") is None:
        return c.size("ffn_hidden_size", "intermediate_size")
    return _same_in_all("moe_intermediate_size", LIMITS["ffn_hidden_size"])(c)


def _hunyuan_norm(c: Keys) -> object:
    return True if c.get("use_qk_norm") is None else c.get("use_qk_norm")


def _mimo_layers(c: Keys) -> Fields:
    """Layers with a window, which may have other key-value heads and sinks: keys with `swa_`."""
    if c.get("layer_types") is not None:
        words = {"full_attention": "global", "sliding_attention": "local"}
        kinds = parts.listed(c, "layer_types", words)
    else:
        flags, wanted = {0: "global", 1: "local"}, "0 (full attention) or 1 (a window)"
        kinds = parts.listed(c, "hybrid_layer_pattern", flags, wanted)
    before = c.optional("max_position_embeddings", "sliding_window_size")
    window = before + 1 if before else c.size("max_position_embeddings", "sliding_window")
    fields: Fields = {"mixers": shortest(kinds)}
    fields["sliding_window"] = window if "local" in kinds else None
    for key_of_window, field, key in (
        ("swa_num_attention_heads", "num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "kv_channels", "head_dim"),
        ("swa_v_head_dim", "v_head_dim", "v_head_dim"),
    ):
        if c.optional("kv_channels", key_of_window) not in (None, c.fields[field]):
            c.reject(key_of_window, f"{c.fields[field]}, as {key}")
    groups = c.optional("num_query_groups", "swa_num_key_value_heads")
    groups = groups or 2 * c.fields["num_query_groups"]
    in_all, in_windows = (
        c.flag(key) for key in ("add_full_attention_sink_bias", "add_swa_attention_sink_bias")
    )
    if c.fields["num_attention_heads"] % groups:
        c.reject("swa_num_key_value_heads", "a divisor of the attention heads")
    of_window = OwnSizes(
        num_query_groups=groups if groups != c.fields["num_query_groups"] else None,
        attention_sinks=in_windows if in_windows != in_all else None,
    )
    of_layers = [of_window if kind == "local" else OwnSizes() for kind in kinds]
    return fields | {"attention_sinks": in_all} | parts.own_sizes(of_layers)


def _mimo_bias(c: Keys) -> bool:
    """True if a bias balances experts, in a router without groups."""
    c.only("n_group", 1)
    return c.get("topk_method") == "noaux_tc"


def _zamba2_head(c: Keys) -> int:
    """The width of a head: blocks read the residual stream and the embedded tokens."""
    both, heads = 2 * c.fields["hidden_size"], c.fields["num_attention_heads"]
    if both % heads:
        c.reject("num_attention_heads", f"a divisor of twice the hidden size, {divisors(both)}")
    return both // heads


def _zamba2_blocks(c: Keys) -> SharedBlocks:
    """Hybrid layers have one of the shared blocks before them, in turn."""
    layers, key, wanted = c.fields["num_layers"], "layers_block_type", '"mamba" or "hybrid"'
    words = {"linear_attention": False, "mamba": False, "hybrid": True}
    hybrid = parts.listed(c, key, words, wanted)
    if not any(hybrid):
        c.reject(key, f"{wanted} for each of the {layers} layers")
    blocks = c.integer("num_mem_blocks", 1, layers)
    counts = zip(accumulate(hybrid, initial=0), hybrid, strict=False)
    return SharedBlocks(
        layers=tuple(n % blocks + 1 if here else 0 for n, here in counts),
        adapter_rank=c.integer("adapter_rank", 1, LIMITS["hidden_size"]),
        attention_adapter=c.flag("use_shared_attention_adapter"),
    )


def _zamba2_longest(c: Keys) -> int:
    long = c.flag("use_long_context")
    return 16384 if long else c.size("max_position_embeddings", "max_position_embeddings")


FAMILIES = {
    # AI21
    "JambaForCausalLM": family(
        "jamba",
        parts.DECODER,
        like="jamba-v0.1",
        state_space=parts.state_channels(
            *("mamba_", "mamba_dt_rank", "mamba_d_conv", "mamba_d_state"),
            inner_norms="weighted",
        ),
        mixers=parts.periodic_mixers("mamba"),
        num_experts=_jamba_experts,
        only={"mamba_proj_bias": False},
    ),
    # Ant Group: Ling
    "BailingMoeForCausalLM": family(
        "bailing_moe", _LING, unused="moe_shared_expert_intermediate_size"
    ),
    "BailingMoeV2ForCausalLM": family(
        "bailing_moe_v2 bailing_moe", _LING, unused="moe_shared_expert_intermediate_size"
    ),
    # Arcee AI
    "ArceeForCausalLM": family("arcee", parts.LLAMA, parts.UNGATED),
    "AfmoeForCausalLM": family(
        "afmoe",
        parts.BIASED,
        parts.sigmoid_experts("num_experts", "num_shared_experts", first="num_dense_layers"),
        qk_norm=True,
        attention_gate=True,
        norm_placement=Fixed("sandwich"),
        mixers=parts.local_and_nope("global_attn_every_n_layers"),
    ),
    # Baidu
    "Ernie4_5ForCausalLM": family(
        "ernie4_5 paddleocr_vl_text", parts.DECODER, dict.fromkeys(parts.ALL_BIASES, "use_bias")
    ),
    "Ernie4_5_MoeForCausalLM": family(
        "ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe_text",
        parts.DECODER,
        parts.experts("moe_num_experts", "moe_intermediate_size", "moe_k"),
        expert_bias=True,
        shared_ffn_hidden_size=parts.number_of_shared("moe_num_shared_experts"),
        mlps=_ernie_mlps,
        # transformers has such biases in shared experts and none in routed ones
        only={"use_bias": False},
        unused="moe_use_aux_free moe_capacity moe_gate",
    ),
    # Cohere
    "CohereForCausalLM": family("cohere", _COMMAND, only={"use_qk_norm": False}),
    "Cohere2ForCausalLM": family(
        "cohere2 cohere2_vision",
        _COMMAND,
        mixers=parts.local_and_nope(),
        unused="layer_switch order_of_interleaved_layers position_embedding_type "
        "rotary_pct use_embedding_sharing use_gated_activation "
        "use_parallel_block use_parallel_embedding",
    ),
    # Databricks
    "DbrxForCausalLM": family(
        "dbrx",
        _DATABRICKS_SIZES,
        parts.experts(
            *("ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size"),
            "ffn_config.moe_top_k",
        ),
        like="dbrx",
        ffn_hidden_size="ffn_config.ffn_hidden_size",
        num_query_groups=parts.query_groups("attn_config.kv_n_heads"),
        activation="ffn_config.ffn_act_fn.name",
        hidden_dropout="resid_pdrop",
        attention_dropout="attn_config.attn_pdrop",
        embedding_dropout="emb_pdrop",
    ),
    "MptForCausalLM": family(
        "mpt",
        _DATABRICKS_SIZES,
        parts.UNGATED,
        norm=Fixed("layernorm"),
        ffn_hidden_size=lambda c: c.integer("expansion_ratio", 1, 64) * c.fields["hidden_size"],
        activation=Fixed("gelu"),
        position=lambda c: "alibi" if c.get("attn_config.alibi") is not False else "learned",
        only={"no_bias": True},
    ),
    # Hugging Face
    "SmolLM3ForCausalLM": family("smollm3", parts.LLAMA, mixers=_smollm_mixers),
    # Kyutai
    "HeliumForCausalLM": family(
        "helium",
        parts.DECODER,
        kv_channels=_helium_head,
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    # LG AI Research
    "ExaoneForCausalLM": family(
        "exaone",
        parts.BIASED,
        num_layers=("num_layers", "num_hidden_layers"),
        activation="activation_function",
    ),
    "Exaone4ForCausalLM": family(
        "exaone4 exaone4_5 exaone4_5_text",
        parts.DECODER,
        norm_placement=Fixed("output"),
        qk_norm=True,
        mixers=parts.local_and_nope(),
    ),
    "ExaoneMoeForCausalLM": family(
        "exaone_moe",
        parts.DECODER,
        parts.sigmoid_experts("num_experts", "num_shared_experts"),
        qk_norm=True,
        norm_topk_prob="norm_topk_prob",
        num_expert_groups=parts.expert_groups,
        mixers=parts.local_and_nope(),
    ),
    # OpenBMB
    "MiniCPMForCausalLM": family("minicpm", parts.LLAMA),
    "MiniCPM3ForCausalLM": family("minicpm3", _LATENT_DENSE, mlp_bias="mlp_bias"),
    # Poolside, and StepFun, whose keys are much the same
    "LagunaForCausalLM": family("laguna", _LAGUNA),
    "Step3p7FlashForCausalLM": family(
        "step3p7 step3p5",
        _LAGUNA,
        num_query_groups=("num_key_value_heads", "num_attention_groups"),
        num_experts=("n_routed_experts", "num_experts", "moe_num_experts"),
        top_k=("num_experts_per_tok", "moe_top_k"),
        attention_gate_per_head=True,
        shared_ffn_hidden_size=("share_expert_dim", "share_expert_dims"),
        own_sizes=_step_layers,
        only={"attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid"},
        unused="n_shared_experts use_moe_router_bias",
    ),
    # state-spaces
    "MambaForCausalLM": family(
        "mamba",
        parts.PURE_STATES,
        like="mamba-2.8b",
        state_space=parts.state_channels("", *parts.MAMBA_KEYS),
        only=_OF_STATES,
    ),
    "Mamba2ForCausalLM": family(
        "mamba2",
        parts.PURE_STATES,
        like="mamba-codestral-7b",
        state_space=parts.state_heads(parts.StateKeys()),
        only=_OF_STATES,
    ),
    # Tencent
    "HunYuanDenseV1ForCausalLM": family(
        "hunyuan_v1_dense hunyuan_vl hunyuan_vl_text", parts.BIASED, qk_norm=_hunyuan_norm
    ),
    "HunYuanMoEV1ForCausalLM": family(
        "hunyuan_v1_moe",
        parts.BIASED,
        parts.experts("num_experts", "moe_intermediate_size"),
        qk_norm=lambda c: True if c.get("use_qk_norm") is None else c.flag("use_qk_norm"),
        moe_ffn_hidden_size=_hunyuan_width,
        top_k=_same_in_all("moe_topk", MAX_EXPERTS),
        shared_ffn_hidden_size=_hunyuan_shared,
        unused="attention_head_dim use_mixed_mlp_moe norm_type num_experts_per_tok "
        "moe_random_routing_dropped_token",
    ),
    "HYV3ForCausalLM": family(
        "hy_v3",
        parts.BIASED,
        parts.sigmoid_experts("num_experts", "num_shared_experts"),
        qk_norm=True,
        only={"mlp_bias": False},
    ),
    "YoutuForCausalLM": family("youtu", _LATENT_DENSE),
    # Xiaomi
    "MiMoForCausalLM": family(
        "mimo",
        parts.DECODER,
        qkv_bias="attention_bias",
        only={"use_sliding_window": False},
        unused="sliding_window",
    ),
    "MiMoV2FlashForCausalLM": family(
        "mimo_v2_flash",
        parts.BIASED,
        parts.experts("n_routed_experts", "moe_intermediate_size"),
        like="mimo-v2-flash",
        v_head_dim=lambda c: c.optional("kv_channels", "v_head_dim") or 0,
        router="scoring_func",
        norm_topk_prob="norm_topk_prob",
        expert_bias=_mimo_bias,
        rotary_fraction=parts.rotary_fraction,
        attention_output_bias=False,
        own_sizes=_mimo_layers,
        mlps=parts.listed_mlps,
        only={"n_shared_experts": 0},
        unused="sliding_window attention_chunk_size attention_value_scale topk_group "
        "topk_method swa_rope_theta",
    ),
    # Zyphra
    "Zamba2ForCausalLM": family(
        "zamba2",
        parts.DECODER,
        like="zamba2-2.7b",
        kv_channels=_zamba2_head,
        ffn_hidden_size=parts.or_four_times_hidden("intermediate_size"),
        max_position_embeddings=_zamba2_longest,
        shared_blocks=_zamba2_blocks,
        state_space=parts.state_heads(
            parts.StateKeys(
                heads="n_mamba_heads",
                head_width="",
                groups="mamba_ngroups",
                state="mamba_d_state",
                conv="mamba_d_conv",
                expand="mamba_expand",
            )
        ),
        position=lambda c: "rope" if c.flag("use_mem_rope") else "none",
        only={"add_bias_linear": False, "use_shared_mlp_adapter": True},
        unused="attention_head_dim attention_hidden_size ffn_hidden_size kv_channels "
        "hybrid_layer_ids mamba_headdim num_query_groups",
    ),
    # Shanghai AI Laboratory
    "InternLM2ForCausalLM": family(
        "internlm2", parts.DECODER, dict.fromkeys(parts.ALL_BIASES[:2], "bias")
    ),
    "Jais2ForCausalLM": family("jais2", parts.LLAMA, parts.UNGATED, parts.LAYER_NORM),
    # JetBrains
    "MellumForCausalLM": family(
        "mellum",
        parts.BIASED,
        parts.experts("num_experts", "moe_intermediate_size"),
        qk_norm=True,
        norm_topk_prob="norm_topk_prob",
        first_dense_layers=parts.dense_first("first_k_dense_replace"),
        mixers=parts.windows(lambda c, i: False),
    ),
    # Andrej Karpathy
    "NanoChatForCausalLM": family(
        "nanochat",
        parts.BIASED,
        parts.UNGATED,
        norm_weight=False,
        qk_l2_norm=True,
        embedding_norm=True,
        logit_softcap="final_logit_softcapping",
    ),
    # Naver
    "HyperCLOVAXForCausalLM": family(
        "hyperclovax",
        parts.LLAMA,
        norm_placement=lambda c: "sandwich" if c.flag("use_post_norm") else "pre",
    ),
    # Rednote
    "Dots1ForCausalLM": family(
        "dots1",
        parts.BIASED,
        parts.sigmoid_experts("n_routed_experts", "n_shared_experts"),
        qk_norm=True,
        norm_topk_prob="norm_topk_prob",
        mixers=parts.windows(lambda c, i: i >= c.integer("max_window_layers", 0, 10**4)),
        num_expert_groups=parts.expert_groups,
    ),
    # Rhymes AI
    "AriaTextForCausalLM": family(
        "aria_text",
        parts.LLAMA,
        parts.experts("moe_num_experts", "intermediate_size", "moe_topk"),
        shared_ffn_hidden_size=parts.number_of_shared("moe_num_shared_experts"),
    ),
    # ByteDance
    "SeedOssForCausalLM": family(
        "seed_oss",
        parts.DECODER,
        qkv_bias="attention_bias",
        attention_output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    # Stability AI
    "StableLmForCausalLM": family(
        "stablelm",
        parts.DECODER,
        parts.LAYER_NORM,
        qkv_bias="use_qkv_bias",
        parallel_block=parts.parallel("use_parallel_residual", 1),
        rotary_fraction=parts.rotary_fraction,
        only={"qk_layernorm": False},
    ),
    # Swiss AI
    "ApertusForCausalLM": family(
        "apertus",
        parts.BIASED,
        parts.UNGATED,
        qk_norm=True,
        activation=Fixed("silu"),
        only={"hidden_act": "xielu"},
        remark="xIELU is counted as SiLU, without the two numbers that each layer learns for it",
    ),
    # Upstage
    "SolarOpenForCausalLM": family(
        "solar_open",
        parts.DECODER,
        parts.sigmoid_experts("n_routed_experts", "n_shared_experts"),
        ffn_hidden_size=("intermediate_size", "moe_intermediate_size"),
        qkv_bias="attention_bias",
        norm_topk_prob="norm_topk_prob",
        rotary_fraction=parts.rotary_fraction,
        num_expert_groups=parts.expert_groups,
    ),
    "YiForCausalLM": family("Yi", parts.LLAMA),
}
