"""The figures of the presets: what the models of a family share, and a row of sizes for each.

The columns are the name, layers, hidden size, MLP width, heads, key/value heads, width of a head,
vocabulary, longest sequence and, where the family's `source` is not the source, the repository on
huggingface.co whose config.json has the figures. `models.PRESETS` is made of this, and of
`presets_state.py`.
"""

from __future__ import annotations

from typing import Any

from stagewright.model.presets_state import STATE_FAMILIES

Style = dict[str, Any]
"""Fields of `models.ModelConfig` that differ from its defaults."""

_BIASED: Style = {
    "norm": "layernorm",
    "norm_bias": True,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "gated": False,
}
_GPT2 = _BIASED | {
    "position": "learned",
    "activation": "gelu_tanh",
    "tied_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "embedding_dropout": 0.1,
}
# Sizes from the GPT-3 paper's Table 2.1, where two rows contradict themselves: 1.3B (printed with
# 24 heads of 128 at 2048) has 16 heads, 13B (printed as 5140 = 40 heads of 128) is 5120 wide; so
# its Table D.1, which these match. The paper alternates dense and banded attention but does not
# give the band, so all layers are dense here, as in all published comparisons.
_GPT3 = _GPT2 | {"source": "GPT-3, arXiv:2005.14165, Table 2.1"}
_GPT3_STAGE = _GPT2 | {"source": "GPT-3-5B of STAGE, arXiv:2511.10480; vocabulary of NeMo gpt3/5b"}
_MEGATRON = _GPT2 | {"source": "Korthikanti et al., arXiv:2205.05198, Table 3"}

# Dropouts of OPT: its paper, section 2.2, and metaseq's opt_baselines (0.1, none on embeddings).
_OPT = _GPT2 | {
    "activation": "relu",
    "position_offset": 2,
    "embedding_dropout": 0.0,
    "source": "OPT, arXiv:2205.01068, Table 1",
}
_OPT_350M = _OPT | {"norm_placement": "post", "final_norm": False, "embedding_size": 512}
_BERT = _GPT2 | {
    "activation": "gelu",
    "norm_placement": "post",
    "final_norm": False,
    "embedding_norm": True,
    "token_types": 2,
    "mlm_transform": True,
    "lm_head_bias": True,
    "causal": False,
    "encoder": True,
}

_PALM: Style = {
    "norm": "layernorm",
    "parallel_block": True,
    "tied_embeddings": True,
    "source": "PaLM, arXiv:2204.02311, Table 1 and section 2",
}
_LLAMA: Style = {}
_TIED: Style = {"tied_embeddings": True}
_MISTRAL_V1: Style = {"sliding_window": 4096, "mixers": ("local",)}
_QWEN25: Style = {"qkv_bias": True}
_QWEN3: Style = {"qk_norm": True}
_GEMMA2: Style = {
    "norm_placement": "sandwich",
    "activation": "gelu_tanh",
    "tied_embeddings": True,
    "sliding_window": 4096,
    "mixers": ("local", "global"),
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
_GEMMA3: Style = {
    "norm_placement": "sandwich",
    "qk_norm": True,
    "activation": "gelu_tanh",
    "tied_embeddings": True,
    "sliding_window": 1024,
    "mixers": (*["local"] * 5, "global"),
}
_PHI3: Style = {"sliding_window": 2047, "mixers": ("local",)}
# Falcon ties its embeddings, though its checkpoints store the matrix twice: vllm pull 3590.
_FALCON: Style = {
    "norm": "layernorm",
    "norm_bias": True,
    "parallel_block": True,
    "gated": False,
    "activation": "gelu",
    "tied_embeddings": True,
}
_FALCON_NEW = _FALCON | {"parallel_norms": 2}


def _experts(count: int, top_k: int, width: int, shared: int = 0, dense: int = 0) -> Style:
    """Experts, how many a token goes to, their width, the shared ones' width, dense layers first.

    The column of the MLP's width is that of the dense layers, also where a model has none.
    """
    return {
        "num_experts": count,
        "top_k": top_k,
        "moe_ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared,
        "first_dense_layers": dense,
    }


# The column of the head's width is that of queries and keys: 128 without and 64 with position.
_LATENT: Style = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# The weights of a token's experts are those of all experts, as the softmax gives them.
_PLAIN: Style = {"norm_topk_prob": False}
_GROUPS: Style = {"num_expert_groups": 8, "topk_groups": 4}
# The bias of the scores (e_score_correction_bias) is no parameter that gradients reach, and not
# counted as one. Not here: the layer for multi-token prediction.
_BALANCED: Style = {"router": "sigmoid", "expert_bias": True}
_DEEPSEEK_V3 = _LATENT | _BALANCED
_GLM45: Style = {"qkv_bias": True, "rotary_fraction": 0.5} | _BALANCED
# Biases of experts and of the router; the published config.json has no key for sinks, offset and
# gate, which are in openai/gpt-oss, gpt_oss/torch/model.py.
_GPT_OSS: Style = {
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "router_bias": True,
    "attention_sinks": True,
    "sliding_window": 128,
    "mixers": ("local", "global"),
    "activation": "quick_gelu",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}
# The text part. Its scale of queries in layers without positions grows with the position: that adds
# nothing, and is not here.
_LLAMA4: Style = {
    "mixers": (*["chunked"] * 3, "nope"),
    "attention_chunk_size": 8192,
    "router": "sigmoid",
    "apply_probs": "input",
    **_PLAIN,
}
_QWEN2_MOE = _QWEN25 | _PLAIN | {"shared_expert_gate": True}
# The published config.json, as printed in mlx-community's copy; norms without biases as in
# transformers' DbrxNormAttentionNorm. It also clips queries, keys and values at 8.
_DBRX = _experts(16, 4, 10752) | {"norm": "layernorm"}
_GROK1 = (
    _experts(8, 2, 32768)
    | _PLAIN
    | {
        "norm_placement": "sandwich",
        "activation": "gelu_tanh",
        "tied_embeddings": True,
        "attention_softcap": 30.0,
        "source": "https://github.com/xai-org/grok-1, run.py and model.py",
    }
)

# Scores are not scaled; a table of 32 biases per head for each of the encoder and the decoder.
_T5: Style = {
    "position": "relative",
    "relative_buckets": 32,
    "gated": False,
    "activation": "relu",
    "tied_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "embedding_dropout": 0.1,
}


def _t5(layers: int) -> Style:
    return _T5 | {"encoder_num_layers": layers}


_T5_11: Style = {"gated": True, "activation": "gelu_tanh", "tied_embeddings": False}

_VIT = _BIASED | {
    "position": "none",  # learned ones are part of the patches
    "activation": "gelu",
    "causal": False,
    "encoder": True,
    "source": "ViT, arXiv:2010.11929, Table 1; classes of ImageNet-1k",
}
_CLIP = _VIT | {
    "embedding_norm": True,
    "source": "https://huggingface.co/openai/clip-vit-large-patch14-336/blob/main/config.json",
}
# The tower's last norm is for its first position, which is not looked at: it is not here.
_LLAVA: Style = {"tower": "clip-vit-l-336"}
_DIT = _VIT | {
    "activation": "gelu_tanh",
    "diffusion": {
        **{"image_size": 32, "patch_size": 2, "channels": 4},
        **{"classes": 1001, "out_channels": 8},
    },
    "source": "DiT, arXiv:2212.09748, Table 1; https://github.com/facebookresearch/DiT, models.py",
}
# Rows of the 26 tables, at most 40,000,000: those of MLPerf's checkpoint, facebookresearch/dlrm,
# issue 369. Widths: bench/run_and_time.sh there.
_DLRM: Style = {
    "recommendation": {
        "rows": (
            *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346),
            *(10, 2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108),
            36,
        ),
        "dense": 13,
        "bottom": (512, 256, 128),
        "top": (1024, 1024, 512, 256, 1),
    },
    "position": "none",
    "source": "https://github.com/facebookresearch/dlrm/issues/369",
}

FAMILIES: list[tuple[Style, str]] = [
    (
        _GPT2,
        """
gpt2             12    768   3072   12   12   64   50257    1024  openai-community/gpt2
gpt2-medium      24   1024   4096   16   16   64   50257    1024  openai-community/gpt2-medium
gpt2-large       36   1280   5120   20   20   64   50257    1024  openai-community/gpt2-large
gpt2-xl          48   1600   6400   25   25   64   50257    1024  openai-community/gpt2-xl
""",
    ),
    (
        _GPT3,
        """
gpt3-125m        12    768   3072   12   12   64   50257    2048
gpt3-350m        24   1024   4096   16   16   64   50257    2048
gpt3-760m        24   1536   6144   16   16   96   50257    2048
gpt3-1.3b        24   2048   8192   16   16  128   50257    2048
gpt3-2.7b        32   2560  10240   32   32   80   50257    2048
gpt3-6.7b        32   4096  16384   32   32  128   50257    2048
gpt3-13b         40   5120  20480   40   40  128   50257    2048
gpt3-175b        96  12288  49152   96   96  128   50257    2048
""",
    ),
    (
        _GPT3_STAGE,
        """
gpt3-5b          24   4096  16384   32   32  128   51200    2048
""",
    ),
    (
        _MEGATRON,
        """
megatron-22b     48   6144  24576   64   64   96   51200    2048
megatron-175b    96  12288  49152   96   96  128   51200    2048
megatron-530b   105  20480  81920  128  128  160   51200    2048
megatron-1t     128  25600 102400  160  160  160   51200    2048
""",
    ),
    (
        _OPT,
        """
opt-125m         12    768   3072   12   12   64   50272    2048  facebook/opt-125m
opt-1.3b         24   2048   8192   32   32   64   50272    2048  facebook/opt-1.3b
opt-2.7b         32   2560  10240   32   32   80   50272    2048  facebook/opt-2.7b
opt-6.7b         32   4096  16384   32   32  128   50272    2048  facebook/opt-6.7b
opt-13b          40   5120  20480   40   40  128   50272    2048  facebook/opt-13b
opt-30b          48   7168  28672   56   56  128   50272    2048  facebook/opt-30b
opt-66b          64   9216  36864   72   72  128   50272    2048  facebook/opt-66b
opt-175b         96  12288  49152   96   96  128   50272    2048
""",
    ),
    (
        _OPT_350M,
        """
opt-350m         24   1024   4096   16   16   64   50272    2048  facebook/opt-350m
""",
    ),
    (
        _BERT,
        """
bert-base        12    768   3072   12   12   64   30522     512  google-bert/bert-base-uncased
bert-large       24   1024   4096   16   16   64   30522     512  google-bert/bert-large-uncased
""",
    ),
    (
        _PALM,
        """
palm-8b          32   4096  16384   16    1  256  256000    2048
palm-62b         64   8192  32768   32    1  256  256000    2048
palm-540b       118  18432  73728   48    1  256  256000    2048
""",
    ),
    (
        _LLAMA,
        """
llama2-7b        32   4096  11008   32   32  128   32000    4096  meta-llama/Llama-2-7b-hf
llama2-13b       40   5120  13824   40   40  128   32000    4096  meta-llama/Llama-2-13b-hf
llama2-70b       80   8192  28672   64    8  128   32000    4096  meta-llama/Llama-2-70b-hf
llama3-8b        32   4096  14336   32    8  128  128256    8192  meta-llama/Meta-Llama-3-8B
llama3-70b       80   8192  28672   64    8  128  128256    8192  meta-llama/Meta-Llama-3-70B
llama3.1-8b      32   4096  14336   32    8  128  128256  131072  meta-llama/Llama-3.1-8B
llama3.1-70b     80   8192  28672   64    8  128  128256  131072  meta-llama/Llama-3.1-70B
llama3.1-405b   126  16384  53248  128    8  128  128256  131072  meta-llama/Llama-3.1-405B
llama3.3-70b     80   8192  28672   64    8  128  128256  131072  meta-llama/Llama-3.3-70B-Instruct
mistral-7b-v0.3  32   4096  14336   32    8  128   32768   32768  mistralai/Mistral-7B-v0.3
""",
    ),
    (
        _TIED,
        """
llama3.2-1b      16   2048   8192   32    8   64  128256  131072  meta-llama/Llama-3.2-1B
llama3.2-3b      28   3072   8192   24    8  128  128256  131072  meta-llama/Llama-3.2-3B
""",
    ),
    (
        _MISTRAL_V1,
        """
mistral-7b-v0.1  32   4096  14336   32    8  128   32000   32768  mistralai/Mistral-7B-v0.1
""",
    ),
    (
        _QWEN25 | _TIED,
        """
qwen2.5-0.5b     24    896   4864   14    2   64  151936   32768  Qwen/Qwen2.5-0.5B
qwen2.5-1.5b     28   1536   8960   12    2  128  151936  131072  Qwen/Qwen2.5-1.5B
qwen2.5-3b       36   2048  11008   16    2  128  151936   32768  Qwen/Qwen2.5-3B
""",
    ),
    (
        _QWEN25,
        """
qwen2.5-7b       28   3584  18944   28    4  128  152064  131072  Qwen/Qwen2.5-7B
qwen2.5-14b      48   5120  13824   40    8  128  152064  131072  Qwen/Qwen2.5-14B
qwen2.5-32b      64   5120  27648   40    8  128  152064  131072  Qwen/Qwen2.5-32B
qwen2.5-72b      80   8192  29568   64    8  128  152064  131072  Qwen/Qwen2.5-72B
""",
    ),
    (
        _QWEN3 | _TIED,
        """
qwen3-0.6b       28   1024   3072   16    8  128  151936   40960  Qwen/Qwen3-0.6B
qwen3-1.7b       28   2048   6144   16    8  128  151936   40960  Qwen/Qwen3-1.7B
qwen3-4b         36   2560   9728   32    8  128  151936   40960  Qwen/Qwen3-4B
""",
    ),
    (
        _QWEN3,
        """
qwen3-8b         36   4096  12288   32    8  128  151936   40960  Qwen/Qwen3-8B
qwen3-14b        40   5120  17408   40    8  128  151936   40960  Qwen/Qwen3-14B
qwen3-32b        64   5120  25600   64    8  128  151936   40960  Qwen/Qwen3-32B
""",
    ),
    (
        _GEMMA2,
        """
gemma2-2b        26   2304   9216    8    4  256  256000    8192  google/gemma-2-2b
gemma2-9b        42   3584  14336   16    8  256  256000    8192  google/gemma-2-9b
gemma2-27b       46   4608  36864   32   16  128  256000    8192  google/gemma-2-27b
""",
    ),
    (
        _GEMMA3 | {"sliding_window": 512},
        """
gemma3-1b        26   1152   6912    4    1  256  262144   32768  google/gemma-3-1b-pt
""",
    ),
    (
        _GEMMA3,  # the text part; the vision tower is not here
        """
gemma3-4b        34   2560  10240    8    4  256  262208  131072  google/gemma-3-4b-pt
gemma3-12b       48   3840  15360   16    8  256  262208  131072  google/gemma-3-12b-pt
gemma3-27b       62   5376  21504   32   16  128  262208  131072  google/gemma-3-27b-pt
""",
    ),
    (
        _PHI3,
        """
phi3-mini        32   3072   8192   32   32   96   32064    4096  microsoft/Phi-3-mini-4k-instruct
phi3-medium      40   5120  17920   40   10  128   32064    4096  microsoft/Phi-3-medium-4k-instruct
""",
    ),
    (
        _FALCON,
        """
falcon-7b        32   4544  18176   71    1   64   65024    2048  tiiuae/falcon-7b
""",
    ),
    (
        _FALCON_NEW,
        """
falcon-40b       60   8192  32768  128    8   64   65024    2048  tiiuae/falcon-40b
falcon-180b      80  14848  59392  232    8   64   65024    2048  tiiuae/falcon-180B
""",
    ),
    (
        _experts(8, 2, 14336),
        """
mixtral-8x7b     32   4096  14336   32    8  128   32000   32768  mistralai/Mixtral-8x7B-v0.1
""",
    ),
    (
        _experts(8, 2, 16384),
        """
mixtral-8x22b    56   6144  16384   48    8  128   32000   65536  mistralai/Mixtral-8x22B-v0.1
""",
    ),
    (
        _GPT_OSS | _experts(32, 4, 2880),
        """
gpt-oss-20b      24   2880   2880   64    8   64  201088  131072  openai/gpt-oss-20b
""",
    ),
    (
        _GPT_OSS | _experts(128, 4, 2880),
        """
gpt-oss-120b     36   2880   2880   64    8   64  201088  131072  openai/gpt-oss-120b
""",
    ),
    (
        _LLAMA4 | _experts(16, 1, 8192, shared=8192) | {"qk_l2_norm": True},
        """
llama4-scout     48   5120  16384   40    8  128  202048 10485760 meta-llama/Llama-4-Scout-17B-16E
""",
    ),
    (
        _LLAMA4 | _experts(128, 1, 8192, shared=8192, dense=1) | {"moe_layer_freq": 2},
        """
llama4-maverick 48 5120 16384 40 8 128 202048 1048576 meta-llama/Llama-4-Maverick-17B-128E
""",
    ),
    (
        _QWEN2_MOE | _experts(60, 4, 1408, shared=5632),
        """
qwen1.5-moe-a2.7b 24  2048   5632   16   16  128  151936    8192  Qwen/Qwen1.5-MoE-A2.7B
""",
    ),
    (
        _QWEN2_MOE | _experts(64, 8, 2560, shared=20480),
        """
qwen2-57b-a14b   28   3584  18944   28    4  128  151936   131072  Qwen/Qwen2-57B-A14B
""",
    ),
    (
        _QWEN3 | _experts(128, 8, 768),
        """
qwen3-30b-a3b    48   2048   6144   32    4  128  151936   40960  Qwen/Qwen3-30B-A3B
""",
    ),
    (
        _QWEN3 | _experts(128, 8, 1536),
        """
qwen3-235b-a22b  94   4096  12288   64    4  128  151936   40960  Qwen/Qwen3-235B-A22B
""",
    ),
    (
        _PLAIN | _experts(64, 6, 1408, shared=2 * 1408, dense=1),
        """
deepseek-moe-16b 28   2048  10944   16   16  128  102400    4096  deepseek-ai/deepseek-moe-16b-base
""",
    ),
    (
        _LATENT
        | _PLAIN
        | _experts(160, 6, 1536, shared=2 * 1536, dense=1)
        | {"num_expert_groups": 8, "topk_groups": 3},
        """
deepseek-v2      60   5120  12288  128  128  192  102400  163840  deepseek-ai/DeepSeek-V2
""",
    ),
    (
        _LATENT | _PLAIN | _experts(64, 6, 1408, shared=2 * 1408, dense=1) | {"q_lora_rank": 0},
        """
deepseek-v2-lite 27   2048  10944   16   16  192  102400  163840  deepseek-ai/DeepSeek-V2-Lite
""",
    ),
    (
        _DEEPSEEK_V3 | _GROUPS | _experts(256, 8, 2048, shared=2048, dense=3),
        """
deepseek-v3      61   7168  18432  128  128  192  129280  163840  deepseek-ai/DeepSeek-V3
deepseek-r1      61   7168  18432  128  128  192  129280  163840  deepseek-ai/DeepSeek-R1
""",
    ),
    (
        _DEEPSEEK_V3 | _experts(384, 8, 2048, shared=2048, dense=1),
        """
kimi-k2          61   7168  18432   64   64  192  163840  131072  moonshotai/Kimi-K2-Instruct
""",
    ),
    (
        _GLM45 | _experts(160, 8, 1536, shared=1536, dense=3) | {"qk_norm": True},
        """
glm-4.5          92   5120  12288   96    8  128  151552  131072  zai-org/GLM-4.5
""",
    ),
    (
        _GLM45 | _experts(128, 8, 1408, shared=1408, dense=1),
        """
glm-4.5-air      46   4096  10944   96    8  128  151552  131072  zai-org/GLM-4.5-Air
""",
    ),
    (
        _DBRX,
        """
dbrx             40   6144  10752   48    8  128  100352   32768  databricks/dbrx-base
""",
    ),
    (
        _GROK1,
        """
grok-1           64   6144  32768   48    8  128  131072    8192
""",
    ),
    *(
        (_t5(layers), row)
        for layers, row in (
            (6, "t5-small 6 512 2048 8 8 64 32128 512 google-t5/t5-small"),
            (12, "t5-base 12 768 3072 12 12 64 32128 512 google-t5/t5-base"),
            (24, "t5-large 24 1024 4096 16 16 64 32128 512 google-t5/t5-large"),
            (24, "t5-3b 24 1024 16384 32 32 128 32128 512 google-t5/t5-3b"),
            (24, "t5-11b 24 1024 65536 128 128 128 32128 512 google-t5/t5-11b"),
        )
    ),
    (
        _t5(24) | _T5_11,
        """
t5-v1.1-xxl      24   4096  10240   64   64   64   32128     512  google/t5-v1_1-xxl
""",
    ),
    (
        _VIT | {"vision": {"image_size": 224, "patch_size": 16, "classes": 1000}},
        """
vit-b-16         12    768   3072   12   12   64       1     197  google/vit-base-patch16-224
vit-l-16         24   1024   4096   16   16   64       1     197  google/vit-large-patch16-224
""",
    ),
    (
        _VIT | {"vision": {"image_size": 224, "patch_size": 14, "classes": 1000}},
        """
vit-h-14         32   1280   5120   16   16   80       1     257
""",
    ),
    (
        _CLIP | {"vision": {"image_size": 336, "patch_size": 14, "patch_bias": False}},
        """
clip-vit-l-336   24   1024   4096   16   16   64       1     577
""",
    ),
    (
        _LLAVA,
        """
llava-1.5-7b     32   4096  11008   32   32  128   32064    4096  llava-hf/llava-1.5-7b-hf
""",
    ),
    (
        _DIT,
        """
dit-xl-2         28   1152   4608   16   16   72       1     257
""",
    ),
    (
        _DLRM,  # no layers: the sizes of these mean nothing
        """
dlrm              1      1      1    1    1    1       1       1
""",
    ),
    *STATE_FAMILIES,
]
