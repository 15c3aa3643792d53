"""Presets against published parameter counts, and the config.json importer against the world.

`data/published_parameters.csv` says where each count is from. Counts of the Hugging Face hub were
read from public code that quotes them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from effort import times
from paths import DATA, ROOT
from stagewright.errors import UserError
from stagewright.lower.parameters import parameters
from stagewright.model import hub
from stagewright.model.architecture import LIMITS
from stagewright.model.catalog import from_config, resolve
from stagewright.model.config import ModelConfig
from stagewright.model.hf import keys as hf_keys
from stagewright.model.hf import read as hf
from stagewright.model.layers import ATTENTIONS, RECURRENCES, SIDE_BY_SIDE, StateSpace
from stagewright.model.presets import PRESETS

RECORDED: list[dict[str, Any]] = [
    json.loads(line)
    for line in (DATA / "family_parameters.jsonl").read_text(encoding="utf-8").splitlines()
]
"""Small models with the parameters that transformers 5.23 makes of their config.json, without
biases that only balance the load of experts (`e_score_correction_bias`)."""

OTHERWISE = {
    "ApertusForCausalLM",  # without two numbers for the activation of each layer
    # Classes of their own repositories, which transformers does not have.
    *("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneForCausalLM", "YiForCausalLM"),
    *("InternLM2ForCausalLM", "MiniCPMForCausalLM", "MiniMaxM1ForCausalLM", "Phi4MMForCausalLM"),
    "CwmForCausalLM",  # small ones cannot be made by transformers 5.23; as Mistral
    "MiMoForCausalLM",  # not in transformers
    "PhiMoEForCausalLM",  # Microsoft's own name of PhimoeForCausalLM
    "MinistralForCausalLM",  # cannot be made by transformers 5.23; as Mistral
    "Step3p7FlashForCausalLM",  # a class of its own repository
}
"""Families whose counts are compared elsewhere or not at all."""

CONFIGS = sorted((DATA / "configs").glob("*.json"))
SHIPPED = ROOT / "src/stagewright/data/configs"
with (DATA / "published_parameters.csv").open(encoding="utf-8") as table:
    PUBLISHED = list(csv.DictReader(table))

# The preset that each published file must come out as, but for these fields.
SAME = {
    SHIPPED / "llama-3.1-70b.json": ("llama3.1-70b", {}),
    "bamba-9b-v1": ("bamba-9b", {}),
    "bert-base-uncased": ("bert-base", {}),
    "dbrx-instruct": ("dbrx", {}),
    "deepseek-moe-16b-base": ("deepseek-moe-16b", {}),
    "deepseek-r1": ("deepseek-r1", {}),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3.2": ("deepseek-v3.2", {}),
    "deepseek-v4-pro": ("deepseek-v4-pro", {}),
    "glm-5": ("glm-5", {}),
    "minimax-m3": ("minimax-m3", {}),
    "mimo-v2-flash": ("mimo-v2-flash", {}),
    "glm-5.2": ("glm-5.2", {}),
    "falcon-mamba-7b": ("falcon-mamba-7b", {}),
    "falcon-h1-7b-base": ("falcon-h1-7b", {}),
    "zamba2-1.2b": ("zamba2-1.2b", {}),
    "zamba2-2.7b": ("zamba2-2.7b", {}),
    "zamba2-7b": ("zamba2-7b", {}),
    "falcon-7b-instruct": ("falcon-7b", {}),
    "falcon-7b-instruct-refinedweb": ("falcon-7b", {}),
    "falcon-40b-instruct": ("falcon-40b", {}),
    "gemma-2-9b": ("gemma2-9b", {}),
    "gemma-3-1b-it": ("gemma3-1b", {}),
    "gemma-3-12b-it": ("gemma3-12b", {}),
    "glm-4.5": ("glm-4.5", {}),
    "glm-4.5-air": ("glm-4.5-air", {}),
    "gpt2": ("gpt2", {}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {}),
    "llama-4-scout-17b-16e": ("llama4-scout", {}),
    "llama-4-scout-text": ("llama4-scout", {"mlps": ("experts",)}),
    "llama-4-maverick-17b-128e": ("llama4-maverick", {}),
    "qwen1.5-moe-a2.7b": ("qwen1.5-moe-a2.7b", {}),
    "qwen2-57b-a14b": ("qwen2-57b-a14b", {}),
    "t5-base": ("t5-base", {}),
    "t5-11b": ("t5-11b", {}),
    "t5-v1_1-xxl": ("t5-v1.1-xxl", {}),
    "granite-4.0-h-micro": ("granite-4.0-h-micro", {}),
    "granite-4.0-h-small": ("granite-4.0-h-small", {}),
    "jamba-v0.1": ("jamba-v0.1", {}),
    "jamba-1.5-large": ("jamba-1.5-large", {}),
    "kimi-k2-instruct": ("kimi-k2", {}),
    "kimi-linear-48b-a3b": ("kimi-linear-48b-a3b", {}),
    "llama-3.2-1b-instruct": ("llama3.2-1b", {}),
    "mamba-2.8b-hf": ("mamba-2.8b", {}),
    "mamba-codestral-7b-v0.1": ("mamba-codestral-7b", {}),
    "minimax-text-01": ("minimax-text-01", {}),
    "minimax-text-01-hf": ("minimax-text-01", {}),
    "mistral-7b-v0.1": ("mistral-7b-v0.1", {}),
    "mistral-7b-instruct-v0.3": ("mistral-7b-v0.3", {}),
    "mixtral-8x7b-v0.1": ("mixtral-8x7b", {}),
    "mixtral-8x22b-v0.1": ("mixtral-8x22b", {}),
    "nemotron-h-8b-base-8k": ("nemotron-h-8b", {}),
    "nemotron-h-47b-base-8k": ("nemotron-h-47b", {}),
    # OPT's files say 0 where its paper says that it was trained with 0.1.
    "olmoe-1b-7b-0924": ("olmoe-1b-7b", {}),
    "opt-125m": ("opt-125m", {"attention_dropout": 0.0}),
    "opt-350m": ("opt-350m", {"attention_dropout": 0.0}),
    "phi-3-mini-4k-instruct": ("phi3-mini", {}),
    # The base model was trained for longer sequences than its instruct sibling states.
    "qwen2.5-7b-instruct": ("qwen2.5-7b", {"max_position_embeddings": 32768}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "qwen3-next-80b-a3b": ("qwen3-next-80b-a3b", {}),
    "qwen3-32b": ("qwen3-32b", {}),
    "qwen3-235b-a22b": ("qwen3-235b-a22b", {}),
}
ALONE = {"all-minilm-l6-v2", "phi-4-mini-instruct"}  # published files without a preset

LANGUAGE = {name for name, c in PRESETS.items() if not (c.vision or c.tower)}
"""The others are in tests/numerics/test_images.py."""


# Billions of parameters that a token activates, as published; what is left out of the count (the
# tables of the vocabulary: 1 the embedding, 2 also the output); how far rounding goes; and where.
ACTIVE = {
    "mixtral-8x7b": (12.9, 0, 0.05, "Mistral AI, Mixtral of experts"),
    "mixtral-8x22b": (39, 0, 0.5, "Mistral AI, Cheaper, Better, Faster, Stronger"),
    "olmoe-1b-7b": (1.3, 0, 0.05, "arXiv:2409.02060, Table 1"),
    "qwen3-30b-a3b": (3.3, 0, 0.06, "its model card; cut, not rounded"),
    "qwen3-235b-a22b": (22, 0, 0.5, "its model card"),
    "deepseek-moe-16b": (2.8, 0, 0.05, "arXiv:2401.06066"),
    "deepseek-v2": (21, 0, 0.5, "arXiv:2405.04434, abstract"),
    "deepseek-v2-lite": (2.4, 1, 0.06, "arXiv:2405.04434, appendix B; cut, not rounded"),
    "gpt-oss-20b": (3.61, 1, 0.005, "arXiv:2508.10925, Table 1, which leaves out the embedding"),
    "gpt-oss-120b": (5.13, 1, 0.005, "arXiv:2508.10925, Table 1"),
    "llama4-scout": (17, 0, 0.5, "its model card"),
    "llama4-maverick": (17, 0, 0.5, "its model card"),
    "qwen1.5-moe-a2.7b": (2.7, 0, 0.05, "its model card"),
    "qwen2-57b-a14b": (14, 0, 0.5, "arXiv:2407.10671, Table 1"),
    "deepseek-v3": (37, 1, 0.5, "arXiv:2412.19437, abstract"),
    "deepseek-r1": (37, 1, 0.5, "its model card"),
    "deepseek-v3.1": (37, 1, 0.5, "its model card"),
    "deepseek-v3.2": (37, 1, 0.5, "DeepSeek-V3's and its indexers, arXiv:2512.02556"),
    "deepseek-v4-pro": (49, 1, 0.5, "its model card: 49B active"),
    "mimo-v2-flash": (15, 0, 0.5, "its model card: 15B active"),
    "minimax-m3": (23, 2, 0.6, "its model card: ~23B"),
    "minimax-m2.5": (10, 2, 0.5, "its model card: 10B active"),
    "qwen3.5-35b-a3b": (3, 0, 0.5, "its name"),
    "qwen3.5-122b-a10b": (10, 0, 0.5, "its name"),
    "qwen3.5-397b-a17b": (17, 0, 0.5, "its name"),
    "glm-5": (40, 2, 0.5, "transformers' documentation of GlmMoeDsa"),
    "glm-5.2": (40, 2, 0.7, "GLM-5's without most indexers, arXiv:2603.12201"),
    "kimi-k2": (32, 1, 0.5, "arXiv:2507.20534, abstract"),
    "glm-4.5": (32, 2, 0.5, "arXiv:2508.06471, Table 1, which says what it leaves out"),
    "glm-4.5-air": (12, 2, 0.5, "arXiv:2508.06471, Table 1"),
    "dbrx": (36, 0, 0.5, "Databricks, Introducing DBRX"),
    "jamba-v0.1": (12, 0, 0.5, "arXiv:2403.19887, abstract"),
    "jamba-1.5-mini": (12, 0, 0.5, "arXiv:2408.12570, abstract"),
    "jamba-1.5-large": (94, 0, 0.5, "arXiv:2408.12570, abstract"),
    "granite-4.0-h-tiny": (1, 0, 0.5, "its model card"),
    "granite-4.0-h-small": (9, 0, 0.5, "its model card"),
    "nemotron3-nano-30b-a3b": (3.6, 0, 0.05, "its model card; 3.2 without embeddings"),
    "qwen3-next-80b-a3b": (3.87, 0, 0.01, "tensors of Qwen3-Coder-Next, but for idle experts"),
    "kimi-linear-48b-a3b": (3, 0, 0.5, "its model card"),
    "minimax-text-01": (45.9, 2, 0.05, "arXiv:2501.08313, abstract"),
}


def count_parameters(c: ModelConfig) -> int:
    """Parameters of a transformer in closed form, from its configuration alone."""
    return _count(c, c.num_experts)


def count_active(c: ModelConfig) -> int:
    """Those that a token meets: of the experts, as many as it goes to."""
    return _count(c, c.top_k)


def _count(c: ModelConfig, experts: int) -> int:
    hidden, vocab = c.hidden_size, c.vocab_size
    norm = hidden * (c.norm_weight + c.norm_bias)
    rows = c.max_position_embeddings + c.position_offset if c.position == "learned" else 0
    table = vocab * (c.embedding_size or hidden)
    embedding = table + (rows + c.token_types) * hidden + c.embedding_norm * norm
    projections = 2 * hidden * c.embedding_size if c.embedding_size else 0
    head = (not c.tied_embeddings) * table + c.lm_head_bias * vocab + c.final_norm * norm
    head += c.pooler * (hidden * hidden + hidden) + c.mlm_transform * (
        hidden * hidden + hidden + norm
    )
    dense = _dense(c)
    layers = 0
    for layer in map(c.layer, range(c.num_layers)):
        own = c.with_own_sizes(layer.sizes)
        layers += _layer(own, layer.mixer, layer.mlp, experts)
        layers += _adapters(c) if layer.block else 0
    if c.shared_blocks:
        q, k = (n * c.kv_channels for n in (c.num_attention_heads, c.num_query_groups))
        # One of the norms is twice as wide.
        shared = 2 * hidden * (q + 2 * k) + q * hidden + dense + 3 * norm
        layers += max(c.shared_blocks.layers) * shared
    if c.encoder_num_layers:  # and attention to its output, in each layer of the decoder
        layers += c.num_layers * (_attention(c) + norm)
        layers += c.encoder_num_layers * (_attention(c) + dense + 2 * norm) + norm
        layers += 2 * c.relative_buckets * c.num_attention_heads
    if (n := c.residual_streams) > 1:  # numbers, a bias of each, scales: twice a layer, and once
        weights = n * (n + 2)
        layers += 2 * c.num_layers * (weights * (n * hidden + 1) + 3) + n * (n * hidden + 1) + 1
    return layers + embedding + projections + head


def _dense(c: ModelConfig) -> int:
    hidden, ups = c.hidden_size, 2 if c.gated else 1
    biases = c.mlp_bias * (ups * c.ffn_hidden_size + hidden)
    return (ups + 1) * hidden * c.ffn_hidden_size + biases


def _layer(c: ModelConfig, mixer: str, mlp: str, experts: int) -> int:
    """A layer with its norms, of which Gemma 4's mixture has four more, the router's among them."""
    hidden, ups = c.hidden_size, 2 if c.gated else 1
    norm = hidden * (c.norm_weight + c.norm_bias)
    narrow = c.moe_latent_size or hidden
    widths = experts * c.moe_ffn_hidden_size * narrow + c.shared_ffn_hidden_size * hidden
    mixture = (ups + 1) * widths + 2 * hidden * c.moe_latent_size
    mixture += hidden * (c.num_experts + c.shared_expert_gate)
    mixture += c.mlp_bias * experts * (ups * c.moe_ffn_hidden_size + hidden)
    mixture += (c.router_bias + c.expert_scale) * c.num_experts
    sequential = 4 if c.norm_placement == "sandwich" else 2
    norms = c.parallel_norms if c.parallel_block else sequential
    mixers = dict.fromkeys(ATTENTIONS, _attention(c)) | {"none": 0}
    mixers["indexed"] += _indexer(c)
    mixers["compressed"] += _compressor(c, c.kv_channels, c.compress_rate_hca)
    mixers["compressed_indexed"] += (
        _compressor(c, c.kv_channels, c.compress_rate_csa, 2)
        + _compressor(c, c.index_head_dim, c.compress_rate_csa, 2)
        + c.index_n_heads * (c.q_lora_rank * c.index_head_dim + hidden)
    )
    if c.recurrence:
        mixers[c.recurrence] = RECURRENT[c.recurrence](c.hidden_size, c.state_space)
    mixers |= {name: sum(mixers.get(x, 0) for x in pair) for name, pair in SIDE_BY_SIDE.items()}
    mlps = {"dense": _dense(c), "experts": mixture, "none": 0}
    mlps["dense+experts"] = mlps["dense"] + mixture + 4 * norm
    halves = (mixer != "none") + (mlp != "none")
    return mixers[mixer] + mlps[mlp] + norm * (norms if halves == 2 else norms // 2)


def _adapters(c: ModelConfig) -> int:
    """What a layer with a shared block has of its own: arXiv:2411.15242, section II."""
    shared = c.shared_blocks
    assert shared
    rank, hidden = shared.adapter_rank, c.hidden_size
    ups = 2 if c.gated else 1
    mlp = rank * (hidden + ups * c.ffn_hidden_size) if rank else 0
    heads = (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels
    return hidden**2 + mlp + shared.attention_adapter * rank * (3 * 2 * hidden + heads)


def _mamba(hidden: int, s: StateSpace) -> int:
    """Mamba's own module, state-spaces/mamba, mamba_simple.py; Jamba's norms of dt, B and C."""
    into, out = hidden * 2 * s.heads, s.heads * hidden
    conv = s.heads * (s.conv + s.conv_bias)
    steps = s.dt_rank * s.heads + s.heads
    norms = s.dt_rank + 2 * s.state if s.inner_norms == "weighted" else 0
    return (
        into
        + conv
        + s.heads * (s.dt_rank + 2 * s.state)
        + steps
        + s.heads * s.state
        + (s.heads + out + norms)
    )


def _mamba2(hidden: int, s: StateSpace) -> int:
    """The same of mamba2.py: z, x, B, C and dt from one projection; A, D and dt's bias per head."""
    keys = s.groups * s.state
    into = hidden * (2 * s.inner + 2 * keys + s.heads)
    conv = (s.inner + 2 * keys) * (s.conv + s.conv_bias)
    return into + conv + 3 * s.heads + s.gated_norm * s.inner + s.inner * hidden


def _lightning(hidden: int, s: StateSpace) -> int:
    """arXiv:2501.08313: queries, keys, values and gate, a norm over all heads, and out."""
    return hidden * (2 * s.groups * s.state + 2 * s.inner) + s.inner + s.inner * hidden


def _gated_delta(hidden: int, s: StateSpace) -> int:
    """Gated delta net of Qwen3-Next: q, k, v, z, b and a; convolutions; A, dt's bias; a norm."""
    keys = 2 * s.groups * s.state
    into = hidden * (keys + 2 * s.inner + 2 * s.heads) + (keys + s.inner) * (s.conv + s.conv_bias)
    return into + 2 * s.heads + s.head_width + s.inner * hidden


def _kimi_delta(hidden: int, s: StateSpace) -> int:
    """arXiv:2510.26692: decays and gate through a narrow width, a bias per element of the keys."""
    keys = s.groups * s.state
    into = hidden * (2 * keys + s.inner + s.heads) + (2 * keys + s.inner) * (s.conv + s.conv_bias)
    narrow = 2 * hidden * s.gate_rank + s.gate_rank * (keys + s.inner)
    return into + narrow + s.heads + keys + s.head_width + s.inner * hidden


RECURRENT = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "lightning": _lightning,
    "gated_delta": _gated_delta,
    "kimi_delta": _kimi_delta,
}


def _compressor(c: ModelConfig, width: int, positions: int, halves: int = 1) -> int:
    """Rows and gates of one or two halves of channels, a bias of each position, and a norm."""
    return halves * width * (2 * c.hidden_size + positions) + width


def _attention(c: ModelConfig) -> int:
    """With latents as DeepSeek-V2's paper has it, arXiv:2405.04434, appendix C."""
    hidden, width = c.hidden_size, c.kv_channels
    queries, keys = c.num_attention_heads * width, c.num_query_groups * width
    if c.o_groups:
        low = c.o_lora_rank * (queries + c.o_groups * hidden)
        query = c.q_lora_rank * (hidden + 1 + queries)
        return query + width * (hidden + 1) + low + c.attention_sinks * c.num_attention_heads
    if c.kv_lora_rank:
        values = c.num_attention_heads * (c.v_head_dim or width)
        unrotated = queries - c.num_attention_heads * c.qk_rope_head_dim
        latent = c.kv_lora_rank * (unrotated + values + 1) + hidden * (
            c.kv_lora_rank + c.qk_rope_head_dim
        )
        rank = c.q_lora_rank
        query = rank * (hidden + 1 + queries) if rank else hidden * queries
        biases = c.latent_bias * (rank + c.kv_lora_rank + c.qk_rope_head_dim)
        return query + latent + biases + (values + c.attention_output_bias) * hidden
    value = c.v_head_dim or width
    values, results = c.num_query_groups * value, c.num_attention_heads * value
    qkv = queries + keys + values
    attention = hidden * (qkv - c.keys_are_values * keys) + results * hidden
    gates = c.num_attention_heads if c.attention_gate_per_head else queries
    attention += (
        c.attention_gate * (hidden + c.attention_gate_bias) * gates
        + c.attention_sinks * c.num_attention_heads
    )
    normed = queries + keys if c.qk_norm_over_heads else 2 * width
    return attention + c.qkv_bias * qkv + c.attention_output_bias * hidden + c.qk_norm * normed


def _indexer(c: ModelConfig) -> int:
    """What chooses the keys of a layer."""
    if c.index_block_size > 1:  # MiniMax-M3: queries and a key, with a norm of each
        width = c.index_head_dim
        return c.hidden_size * width * (c.index_n_heads + 1) + 2 * width
    return _lightning_indexer(c)


def _lightning_indexer(c: ModelConfig) -> int:
    """arXiv:2512.02556, section 2: queries, a key with its LayerNorm, and weights of the heads."""
    width = c.index_head_dim
    queries = c.q_lora_rank * c.index_n_heads * width
    return queries + c.hidden_size * (width + c.index_n_heads) + 2 * width


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / "configs" / f"{name}.json").read_text(encoding="utf-8"))


def imported(folder: Path, config: object) -> ModelConfig:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return from_config(file)


def error_of(folder: Path, config: object) -> str:
    with pytest.raises(UserError) as info:
        imported(folder, config)
    text = str(info.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


class TestPresets:
    @pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
    def test_has_the_published_number_of_parameters(self, row: dict[str, str]) -> None:
        name = row["model"]
        path = DATA / "configs" / name
        config = from_config(path) if path.suffix == ".json" else PRESETS[name]
        got, published = count_parameters(config), int(row["parameters"])
        assert abs(got - published) <= int(row["tolerance"]), f"{got:,} is not {published:,}"

    @pytest.mark.parametrize("name", ACTIVE)
    def test_activates_the_published_number_of_parameters(self, name: str) -> None:
        published, left_out, rounding, source = ACTIVE[name]
        c = PRESETS[name]
        got = count_active(c) - left_out * c.vocab_size * c.hidden_size
        assert abs(got - published * 1e9) <= rounding * 1e9, (
            f"{got:,} is not {published}B: {source}"
        )

    @pytest.mark.parametrize("name", [n for n, c in PRESETS.items() if c.num_experts])
    def test_the_graph_activates_what_the_closed_form_does(self, name: str) -> None:
        c = PRESETS[name]
        assert parameters(c) == (count_parameters(c), count_active(c))

    def test_what_a_token_activates_is_published_for_every_mixture_but_one(self) -> None:
        # xAI published a share alone: 25% of Grok-1's weights, which is 2 of 8 experts.
        assert {name for name, c in PRESETS.items() if c.num_experts} == {
            *ACTIVE,
            *("grok-1", "gpt-1.8t"),  # published in all alone
        }
        c = PRESETS["grok-1"]
        assert count_active(c) / count_parameters(c) == pytest.approx(0.25, abs=0.02)

    def test_every_preset_has_a_published_count_and_a_source(self) -> None:
        assert {row["model"] for row in PUBLISHED if row["model"][-5:] != ".json"} == LANGUAGE
        assert all(row["source"] for row in PUBLISHED)
        for name, config in PRESETS.items():
            assert config.name == name == name.lower()
            assert config.source

    def test_families_are_complete(self) -> None:
        families: dict[str, int] = {}
        for name in sorted(LANGUAGE):
            family = name.split("-")[0]
            families[family] = families.get(family, 0) + 1
        assert families == {
            **{"gpt2": 4, "gpt3": 9, "megatron": 4, "opt": 9, "bert": 2, "palm": 3, "falcon": 3},
            **{"llama2": 3, "llama3": 2, "llama3.1": 3, "llama3.2": 2, "llama3.3": 1},
            **{"mistral": 2, "qwen2.5": 7, "qwen3": 9, "gemma2": 3, "gemma3": 4, "phi3": 2},
            **{"mixtral": 2, "deepseek": 8, "kimi": 2, "glm": 4, "dbrx": 1, "grok": 1},
            **{"gpt": 3, "llama4": 2, "qwen1.5": 1, "qwen2": 1, "t5": 6},
            **{"mamba": 6, "mamba2": 5, "falcon": 7, "jamba": 3, "bamba": 1, "granite": 3},
            **{"nemotron": 6, "nemotron3": 1, "minimax": 3, "mimo": 1, "zamba2": 3, "olmoe": 1},
            **{"qwen3.5": 3, "qwen3.6": 1},
        }

    def test_bert_backbone_with_pooler_has_its_published_count(self) -> None:
        change = {"mlm_transform": False, "lm_head_bias": False, "pooler": True}
        counts = {
            name: count_parameters(dataclasses.replace(PRESETS[name], **change))
            for name in ("bert-base", "bert-large")
        }
        assert counts == {"bert-base": 109_482_240, "bert-large": 335_141_888}  # keras-hub 0.32

    def test_stage_gpt3_5b_is_as_its_paper_says(self) -> None:
        c = PRESETS["gpt3-5b"]
        assert (c.num_layers, c.hidden_size, c.num_attention_heads) == (24, 4096, 32)
        assert (c.vocab_size, c.position, c.max_position_embeddings) == (51200, "learned", 2048)

    def test_dropout_only_where_the_family_trains_with_it(self) -> None:
        rates = {
            name.split("-")[0]: (c.hidden_dropout, c.attention_dropout, c.embedding_dropout)
            for name, c in PRESETS.items()
            if name in LANGUAGE
        }
        with_dropout = {family: rate for family, rate in rates.items() if any(rate)}
        assert with_dropout == {
            **dict.fromkeys(("gpt2", "gpt3", "megatron", "bert"), (0.1, 0.1, 0.1)),
            "opt": (0.1, 0.1, 0.0),
            "t5": (0.1, 0.1, 0.1),
        }

    def test_local_and_global_layers_are_where_the_families_put_them(self) -> None:
        def globals_of(name: str) -> list[int]:
            c = PRESETS[name]
            return [i for i in range(c.num_layers) if c.layer(i).mixer == "global"]

        assert globals_of("gemma3-1b") == [5, 11, 17, 23]
        assert globals_of("gemma2-2b") == list(range(1, 26, 2))
        assert globals_of("mistral-7b-v0.1") == []
        assert globals_of("mistral-7b-v0.3") == list(range(32))


class TestModelConfig:
    def test_is_a_value(self) -> None:
        c = PRESETS["llama3-8b"]
        assert c == dataclasses.replace(c)
        assert hash(c) == hash(dataclasses.replace(c))
        with pytest.raises(dataclasses.FrozenInstanceError):
            c.num_layers = 3  # type: ignore[misc]

    def test_overrides(self) -> None:
        c = PRESETS["gemma3-1b"]
        assert c.with_overrides() == c
        small = c.with_overrides(num_layers=2, vocab_size=1000)
        assert (small.num_layers, small.vocab_size, small.name) == (2, 1000, "gemma3-1b")
        assert [small.layer(i).mixer for i in range(2)] == ["local", "local"]
        with pytest.raises(UserError, match="num_layers is 0, wanted a whole number from 1"):
            c.with_overrides(num_layers=0)

    @pytest.mark.parametrize(
        ("preset", "field", "value", "wanted"),
        [
            ("llama3-8b", "num_layers", 10**12, "a whole number from 1 to 10000"),
            ("llama3-8b", "hidden_size", -1, "a whole number from 1"),
            ("llama3-8b", "hidden_size", 4096.0, "a whole number from 1"),
            ("llama3-8b", "vocab_size", True, "a whole number from 1"),
            ("llama3-8b", "num_query_groups", 5, "a divisor of num_attention_heads 32: 1, 2, 4"),
            ("llama3-8b", "kv_channels", 3, "rope turns an even part, not 3 channels"),
            ("llama3-8b", "rotary_fraction", math.nan, "above 0 and at most 1"),
            ("llama3-8b", "position", "absolute", "one of rope, learned, alibi, relative, none"),
            ("llama3-8b", "position", "relative", "some if, and only if, positions are relative"),
            ("llama3-8b", "encoder_num_layers", 2, "relative or none with an encoder"),
            ("t5-base", "mtp_num_layers", 1, "0 but in a language model"),
            ("t5-base", "mixers", ("local",), "0 with layers other than attention and MLPs"),
            ("llama3-8b", "position_offset", 2, "0 where positions are not learned"),
            ("llama3-8b", "norm_bias", True, "False: an rmsnorm has no bias"),
            ("llama3-8b", "gated", 1, "True or False"),
            ("llama3-8b", "activation", "tanh", "one of gelu, gelu_tanh, quick_gelu, silu, relu"),
            ("llama3-8b", "hidden_dropout", 1.0, "from 0 to below 1"),
            ("llama3-8b", "attention_dropout", math.inf, "from 0 to below 1"),
            ("llama3-8b", "logit_softcap", 0, "None or a number above 0"),
            ("llama3-8b", "attention_softcap", 10**400, "None or a number above 0"),
            ("llama3-8b", "parallel_norms", 2, "1 where the block is not parallel"),
            ("llama3-8b", "sliding_window", 10, "has layers with one"),
            ("llama3-8b", "mixers", ("local",), "has layers with one"),
            ("llama3-8b", "mixers", (), "not empty"),
            ("llama3-8b", "mixers", ["global"], "a tuple of 'global', 'local', 'chunked', 'nope'"),
            ("llama3-8b", "mixers", (["global"],), "a tuple of 'global', 'local', 'chunked'"),
            ("llama3-8b", "causal", False, "True, as encoder is False"),
            ("llama3-8b", "pooler", True, "False in a decoder"),
            ("llama3-8b", "embedding_size", 0, "None or a whole number from 1"),
            ("llama3-8b", "name", None, "text"),
            ("palm-8b", "norm_placement", "post", "pre in a parallel block"),
            ("mixtral-8x7b", "num_experts", 0, "top_k is 2, wanted 0 where num_experts is 0"),
            ("mixtral-8x7b", "num_experts", 1, "a whole number from 1 to num_experts 1"),
            ("mixtral-8x7b", "num_experts", 10**9, "a whole number from 0 to 65536"),
            ("mixtral-8x7b", "top_k", 0, "a whole number from 1 to num_experts 8"),
            ("mixtral-8x7b", "top_k", 9, "a whole number from 1 to num_experts 8"),
            ("mixtral-8x7b", "moe_ffn_hidden_size", 0, "the width of an expert, 1 or more"),
            ("mixtral-8x7b", "shared_ffn_hidden_size", -1, "a whole number from 0"),
            ("mixtral-8x7b", "moe_layer_freq", 0, "a whole number from 1"),
            ("mixtral-8x7b", "router", "tanh", "one of softmax, sigmoid"),
            ("deepseek-v3", "mlp_bias", True, "False with shared experts"),
            ("llama3-8b", "attention_chunk_size", 10, "if, and only if, mixers has chunked"),
            ("llama3-8b", "router_bias", True, "False where num_experts is 0"),
            ("llama3-8b", "glu_linear_offset", math.inf, "a number"),
            ("gpt2", "glu_linear_offset", 1.0, "0 in an MLP without gate"),
            ("gpt2", "activation_func_clamp_value", 7.0, "None in an MLP without gate"),
            ("deepseek-v3", "attention_sinks", True, "False with latent attention"),
            ("mixtral-8x7b", "parallel_block", True, "False in a model with experts"),
            ("llama3-8b", "top_k", 2, "0 where num_experts is 0"),
            ("llama3-8b", "first_dense_layers", 1, "0 where num_experts is 0"),
            ("llama3-8b", "moe_layer_freq", 2, "1 where num_experts is 0"),
            ("llama3-8b", "router", "sigmoid", "softmax where num_experts is 0"),
            ("llama3-8b", "qk_rope_head_dim", 64, "0 where kv_lora_rank is 0"),
            ("zamba2-1.2b", "v_head_dim", 64, "0 in a model with shared blocks"),
            ("deepseek-v3", "kv_lora_rank", 0, "q_lora_rank is 1536, wanted 0 where kv_lora_rank"),
            ("deepseek-v3", "num_query_groups", 1, "the 128 heads of latent attention"),
            ("deepseek-v3", "qk_rope_head_dim", 0, "an even part of the 192 channels of a head"),
            ("deepseek-v3", "qk_rope_head_dim", 63, "an even part of the 192 channels of a head"),
            ("deepseek-v3", "qk_rope_head_dim", 192, "an even part of the 192 channels of a head"),
            ("deepseek-v3", "position", "alibi", "rope or none with latent attention"),
            ("deepseek-v3", "qk_norm", True, "False with latent attention"),
            ("llama3-8b", "qk_norm_over_heads", True, "False where qk_norm is False"),
            ("palm-8b", "parallel_norms", 3, "a whole number from 1 to 2"),
            ("llama3-8b", "num_attention_heads", 0, "a whole number from 1"),
            ("llama3-8b", "mixers", ("mamba",), "sizes if, and only if, mixers has a recurrence"),
            ("jamba-v0.1", "mixers", ("mamba", "mamba2"), "one kind of recurrence"),
            ("mamba-2.8b", "state_space", None, "sizes if, and only if, mixers has a recurrence"),
            ("nemotron-h-8b", "mlps", ("none",), "something in every layer whose mixer is none"),
            (
                "mamba-2.8b",
                "state_space",
                StateSpace(heads=8, state=4),
                "dt_rank is 0, wanted a width",
            ),
            (
                "mamba2-2.7b",
                "state_space",
                StateSpace(heads=8, state=4, groups=3),
                "a divisor of heads",
            ),
            ("mamba2-2.7b", "state_space", StateSpace(heads=8, state=4, conv=-1), "from 0 to 64"),
            ("mamba2-2.7b", "state_space", StateSpace(heads=8, state=4, chunk=0), "from 1 to"),
        ],
    )
    def test_refuses(self, preset: str, field: str, value: object, wanted: str) -> None:
        with pytest.raises(UserError) as info:
            dataclasses.replace(PRESETS[preset], **{field: value})
        text = str(info.value)
        assert wanted in text
        assert "\n" not in text
        assert len(text) < 300


def hub_folder(home: Path, name: str, commit: str = "0f3c") -> Path:
    """A model of the hub in its cache, laid out as huggingface_hub does."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    shutil.copy(DATA / "configs/qwen3-32b.json", folder / "blobs/1234")
    (folder / "refs/main").write_text(commit)
    (folder / f"snapshots/{commit}/config.json").symlink_to("../../blobs/1234")
    return folder


class TestHub:
    """Ids of the Hugging Face hub are looked up in its local cache; nothing is fetched."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        return tmp_path

    def test_an_id(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = hub_folder(home, "Qwen/Qwen3-32B")
        model = resolve("Qwen/Qwen3-32B")
        assert (model.name, model.num_layers) == ("Qwen3-32B", 64)
        assert resolve(str(folder / "snapshots/0f3c")).name == "Qwen3-32B"
        (folder / "refs/main").unlink()  # only one snapshot is there
        assert resolve("Qwen/Qwen3-32B").num_layers == 64
        (folder / "refs/main").write_text("../../elsewhere")
        with pytest.raises(UserError):
            resolve("Qwen/Qwen3-32B")
        monkeypatch.setenv("HF_HUB_CACHE", str(home / "other"))
        assert hub.cache_folder() == home / "other"
        monkeypatch.delenv("HF_HUB_CACHE")
        monkeypatch.delenv("HF_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert hub.cache_folder() == home / "huggingface/hub"

    def test_a_folder_wins(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_folder(home, "Qwen/Qwen3-32B")
        monkeypatch.chdir(home)
        Path("Qwen/Qwen3-32B").mkdir(parents=True)
        with pytest.raises(UserError, match="no such file"):
            resolve("Qwen/Qwen3-32B")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("Qwen/Qwen3-32B", "the preset qwen3-32b is this model"),
            ("Qwen/Qwen3-33B", "did you mean 'qwen3-32b'?"),
            ("someone/else", "neither a path nor in the cache"),
        ],
    )
    def test_what_is_not_there(self, name: str, words: str) -> None:
        with pytest.raises(UserError) as info:
            resolve(name)
        assert words in str(info.value)
        assert f"`hf download {name} config.json` fetches its config" in str(info.value)


class TestResolve:
    def test_knows_presets_files_and_directories(self, tmp_path: Path) -> None:
        assert resolve("gpt2") is PRESETS["gpt2"]
        folder = tmp_path / "my-model"
        folder.mkdir()
        assert imported(folder, load("gpt2")).name == "my-model"
        for path in (folder, folder / "config.json"):
            c = resolve(str(path))
            assert (c.name, c.source) == ("my-model", str(folder / "config.json"))
        assert resolve(str(DATA / "configs" / "qwen3-32b.json")).name == "qwen3-32b"

    def test_takes_the_folder_name_from_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        imported(tmp_path, load("gpt2"))
        monkeypatch.chdir(tmp_path)
        assert resolve("config.json").name == resolve(".").name == tmp_path.name

    @pytest.mark.parametrize("name", ["lama3.1-70b", "Llama3.1-70b", "llama-3.1-70b"])
    def test_suggests_a_preset(self, name: str) -> None:
        with pytest.raises(UserError, match=r"did you mean 'llama3.1-70b'\?.*`stagewright models`"):
            resolve(name)

    @pytest.mark.parametrize("name", ["", "meta/llama/3", "x" * 100_000, "a\0b", "no/config.json"])
    def test_unknown_is_an_error_of_one_short_line(self, name: str) -> None:
        with pytest.raises(UserError) as info:
            resolve(name)
        assert "neither a preset nor a path to a config.json" in str(info.value)
        assert len(str(info.value)) < 400

    def test_directory_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"config\.json: no such file"):
            resolve(str(tmp_path))

    def test_path_that_cannot_be_one(self) -> None:
        for path in ("x" * 5000, "a\0b", "config.json/config.json"):
            with pytest.raises(UserError, match=r"no such file|cannot be read"):
                from_config(path)

    def test_device_is_no_config(self) -> None:
        with pytest.raises(UserError, match="/dev/zero: cannot be read: Is a device, not a file"):
            resolve("/dev/zero")

    @pytest.mark.parametrize(
        "code",
        [
            "import stagewright.model.config",
            "from stagewright.model.presets import PRESETS; PRESETS['gpt2']",
        ],
    )
    def test_importing_models_is_light(self, code: str) -> None:
        code += "; import sys; print({'numpy', 'pydantic', 'click'} & set(sys.modules))"
        path = str(ROOT / "src")
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == "set()"


def test_merges_in_the_packages_data_name_one_mapping() -> None:
    """PyYAML 6.0.4 takes the last of several mappings with a key, others and YAML the first."""
    files = (ROOT / "src/stagewright/data").rglob("*.yaml")
    found = [file.name for file in files if re.search(r"<<:\s*\[", file.read_text("utf-8"))]
    assert found == []


class TestPublishedFiles:
    @pytest.mark.parametrize("key", SAME, ids=str)
    def test_comes_out_as_the_preset(self, key: str | Path) -> None:
        file = key if isinstance(key, Path) else DATA / "configs" / f"{key}.json"
        name, differences = SAME[key]
        own = {"name": file.stem, "source": str(file)}
        assert from_config(file) == dataclasses.replace(PRESETS[name], **own, **differences)

    def test_all_files_and_all_architectures_are_covered(self) -> None:
        stems = {file.stem for file in CONFIGS}
        assert stems == {key for key in SAME if isinstance(key, str)} | ALONE
        named = [load(stem)["architectures"][0] for stem in stems]
        decoders = {name.replace("ForConditionalGeneration", "ForCausalLM") for name in named}
        counted = {row["config"]["architectures"][0] for row in RECORDED}
        assert set(hf.FAMILIES) <= {*named, *decoders, *counted, *OTHERWISE}

    def test_the_readme_names_a_source_of_every_file(self) -> None:
        for folder in (DATA / "configs", SHIPPED):
            readme = (folder / "README.md").read_text(encoding="utf-8")
            assert [f.name for f in folder.glob("*.json") if f.name not in readme] == []

    def test_phi4_mini_turns_part_of_each_head(self) -> None:
        c = from_config(DATA / "configs" / "phi-4-mini-instruct.json")
        assert (c.rotary_fraction, c.tied_embeddings, c.num_query_groups) == (0.75, True, 8)

    def test_bert_backbone(self) -> None:
        c = from_config(DATA / "configs" / "all-minilm-l6-v2.json")
        assert (c.pooler, c.mlm_transform, c.lm_head_bias, c.encoder) == (True, False, False, True)


class TestKeys:
    """What single keys do, as transformers 4.57 and 5 read them."""

    @pytest.mark.parametrize(
        ("name", "change", "expected"),
        [
            ("gpt2", {"n_inner": 100}, {"ffn_hidden_size": 100}),
            ("gpt2", {"tie_word_embeddings": False}, {"tied_embeddings": False}),
            ("gpt2", {"activation_function": "relu"}, {"activation": "relu"}),
            ("llama-3.2-1b-instruct", {"num_key_value_heads": None}, {"num_query_groups": 32}),
            ("llama-3.2-1b-instruct", {"head_dim": 96}, {"kv_channels": 96}),
            ("llama-3.2-1b-instruct", {"mlp_bias": True}, {"mlp_bias": True}),
            (
                "llama-3.2-1b-instruct",
                {"attention_bias": True},
                {"qkv_bias": True, "attention_output_bias": True},
            ),
            ("llama-3.2-1b-instruct", {"attention_dropout": None}, {"attention_dropout": 0.0}),
            ("mistral-7b-v0.1", {"sliding_window": None}, {"mixers": ("global",)}),
            ("mistral-7b-v0.1", {"head_dim": 64}, {"kv_channels": 64}),
            (
                "qwen2.5-7b-instruct",
                {"use_sliding_window": True, "max_window_layers": 21},
                {"mixers": ("global",) * 21 + ("local",) * 7, "sliding_window": 131072},
            ),
            (
                "qwen2.5-7b-instruct",
                {"use_sliding_window": True, "max_window_layers": 0},
                {"mixers": ("local",)},
            ),
            (
                "qwen3-32b",
                {
                    "use_sliding_window": True,
                    "sliding_window": 64,
                    "layer_types": ["sliding_attention", "full_attention"] * 32,
                },
                {"mixers": ("local", "global"), "sliding_window": 64},
            ),
            ("gemma-2-9b", {"attn_logit_softcapping": None}, {"attention_softcap": None}),
            ("gemma-2-9b", {"hidden_activation": "gelu"}, {"activation": "gelu"}),
            (
                "gemma-2-9b",
                {"layer_types": ["full_attention"] * 42},
                {"mixers": ("global",), "sliding_window": None},
            ),
            (
                "gemma-3-1b-it",
                {"sliding_window_pattern": 2},
                {"mixers": ("local", "global")},
            ),
            ("gemma-3-12b-it", {"tie_word_embeddings": False}, {"tied_embeddings": False}),
            ("phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, {"rotary_fraction": 0.5}),
            (
                "phi-4-mini-instruct",
                {"rope_parameters": {"partial_rotary_factor": 0.25}},
                {"rotary_fraction": 0.25},
            ),
            (
                "falcon-7b-instruct",  # as falcon-rw-1b
                {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
                {
                    "num_query_groups": 71,
                    "parallel_block": False,
                    "position": "alibi",
                    "qkv_bias": True,
                    "attention_output_bias": True,
                    "mlp_bias": True,
                },
            ),
            (
                "falcon-40b-instruct",  # as falcon-11B
                {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 100},
                {"parallel_norms": 1, "ffn_hidden_size": 100},
            ),
            (
                "falcon-7b-instruct-refinedweb",  # as falcon-40b at first
                {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8},
                {"num_query_groups": 8, "parallel_norms": 2, "parallel_block": True},
            ),
            (
                "opt-125m",
                {"enable_bias": False, "_remove_final_layer_norm": True},
                {"qkv_bias": False, "mlp_bias": False, "final_norm": False},
            ),
            ("bert-base-uncased", {"type_vocab_size": 1}, {"token_types": 1}),
            ("mixtral-8x7b-v0.1", {"sliding_window": 64}, {"mixers": ("local",)}),
            ("mixtral-8x7b-v0.1", {"num_local_experts": 4}, {"num_experts": 4, "top_k": 2}),
            (
                "qwen3-30b-a3b",
                {"decoder_sparse_step": 2},
                {"first_dense_layers": 1, "moe_layer_freq": 2},
            ),
            ("qwen3-30b-a3b", {"mlp_only_layers": [0, 1]}, {"first_dense_layers": 2}),
            ("qwen3-30b-a3b", {"mlp_only_layers": None}, {"first_dense_layers": 0}),
            (
                "qwen3-30b-a3b",
                {"use_sliding_window": True, "sliding_window": 64},
                {"sliding_window": 64, "mixers": ("local",)},
            ),
            (
                "deepseek-moe-16b-base",
                {"n_shared_experts": None, "moe_layer_freq": 2},
                {"shared_ffn_hidden_size": 0, "first_dense_layers": 2, "moe_layer_freq": 2},
            ),
            ("deepseek-moe-16b-base", {"scoring_func": "sigmoid"}, {"router": "sigmoid"}),
            (  # as DeepSeek-V2-Lite, and as transformers itself writes the file
                "deepseek-v2",
                {"q_lora_rank": None, "head_dim": 64},
                {"q_lora_rank": 0, "kv_channels": 192},
            ),
            ("deepseek-v3", {"num_key_value_heads": None}, {"num_query_groups": 128}),
            ("deepseek-v3", {"num_nextn_predict_layers": 0}, {"num_layers": 61}),
            ("glm-4.5-air", {"use_qk_norm": True}, {"qk_norm": True}),
            (
                "jamba-v0.1",
                {"attn_layer_period": 4, "attn_layer_offset": 0, "expert_layer_period": 1}
                | {"expert_layer_offset": 0},
                {"mixers": ("global", "mamba", "mamba", "mamba"), "moe_layer_freq": 1},
            ),
            ("jamba-v0.1", {"num_experts": 1}, {"num_experts": 0, "top_k": 0}),
            ("bamba-9b-v1", {"attn_layer_indices": None}, {"mixers": ("mamba2",)}),
            (
                "granite-4.0-h-small",
                {"position_embedding_type": "rope", "layer_types": ["mamba", "attention"] * 20},
                {"position": "rope", "mixers": ("mamba2", "global")},
            ),
            (
                "nemotron-h-8b-base-8k",
                {"layers_block_type": ["mamba", "moe"], "num_hidden_layers": 2},
                {"num_layers": 2, "mixers": ("mamba2", "none"), "mlps": ("none", "experts")}
                | {"num_experts": 8, "shared_ffn_hidden_size": 7688, "ffn_hidden_size": 0},
            ),
            (  # as Nemotron 3 Ultra
                "nemotron-h-8b-base-8k",
                {"layers_block_type": ["mamba", "moe"], "num_hidden_layers": 2}
                | {"moe_latent_size": 64},
                {"moe_latent_size": 64, "moe_ffn_hidden_size": 7688},
            ),
            (  # the sizes of Nemotron-H-4B, whose heads are wider than hidden size / heads
                "nemotron-h-47b-base-8k",
                {"hidden_size": 3072, "num_attention_heads": 32},
                {"kv_channels": 128},
            ),
            ("minimax-text-01", {"rotary_dim": 128}, {"rotary_fraction": 1.0}),
            ("glm-4.5-air", {"attention_bias": False}, {"qkv_bias": False}),
        ],
    )
    def test_sets_fields(
        self, tmp_path: Path, name: str, change: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        c = imported(tmp_path, load(name) | change)
        assert {field: getattr(c, field) for field in expected} == expected

    @pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_number_formats_are_left_to_the_run(self, tmp_path: Path, file: Path, key: str) -> None:
        config = load(file.stem)
        config.pop("torch_dtype", None)
        assert imported(tmp_path, config | {key: "float8_e4m3fn"}) == imported(tmp_path, config)

    @pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
    def test_model_type_alone_is_enough(self, tmp_path: Path, file: Path) -> None:
        config = load(file.stem)
        if config.pop("architectures") == ["BertModel"]:
            config["architectures"] = []  # a bert without more is one with its MLM head
            assert imported(tmp_path, config).mlm_transform
        else:
            expected = dataclasses.replace(
                from_config(file), name=tmp_path.name, source=str(tmp_path / "config.json")
            )
            assert imported(tmp_path, config) == expected

    def test_keys_of_the_first_llama_files(self, tmp_path: Path) -> None:
        """They had neither key/value heads nor biases nor positions."""
        config = load("llama-3.2-1b-instruct")
        for key in (
            *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
            *("max_position_embeddings", "tie_word_embeddings", "attention_dropout"),
        ):
            del config[key]
        c = imported(tmp_path, config)
        assert (c.num_query_groups, c.max_position_embeddings) == (32, 2048)
        assert (c.tied_embeddings, c.qkv_bias, c.kv_channels) == (False, False, 64)

    @pytest.mark.parametrize(
        "row", RECORDED, ids=lambda row: f"{row['config']['model_type']}-{row['parameters']}"
    )
    def test_parameters_are_those_of_transformers(self, row: dict[str, Any]) -> None:
        like, fields, _ = hf.read("config.json", row["config"])
        c = dataclasses.replace(PRESETS[like], name="small", **fields)
        assert parameters(c)[0] == count_parameters(c) == row["parameters"]

    def test_biases_that_cannot_be_counted_are_refused(self, tmp_path: Path) -> None:
        """Of an ERNIE mixture shared experts have biases and routed experts have none."""
        kind = "ernie4_5_moe"
        config = next(r["config"] for r in RECORDED if r["config"]["model_type"] == kind)
        assert "use_bias is true, wanted false" in error_of(tmp_path, config | {"use_bias": True})


class TestWrappers:
    """Files of models with more than text are read through their text part."""

    @pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
    def test_the_text_part_is_read(self, tmp_path: Path, part: str) -> None:
        text = load("qwen3-32b")
        del text["architectures"], text["tie_word_embeddings"]
        outer = {
            "architectures": ["BrandNewVLForConditionalGeneration"],
            "model_type": "brand_new",
            "tie_word_embeddings": True,
            part: text | {"model_type": "qwen3_vl_text"},
            "vision_config": {"hidden_size": 1152},
        }
        c = imported(tmp_path, outer)
        assert (c.num_layers, c.qk_norm, c.tied_embeddings) == (64, True, True)
        assert f"only the text part ({part}) is counted" in c.notes[0]
        assert "vision_config" in c.notes[0]

    def test_a_part_in_a_part(self, tmp_path: Path) -> None:
        text = load("qwen3-32b")
        inner = {"text_config": text, "audio_config": {"d_model": 8}}
        c = imported(tmp_path, {"model_type": "omni", "thinker_config": inner})
        assert c.num_layers == 64
        assert "thinker_config.audio_config" in c.notes[0]

    def test_the_class_of_a_wrapper_names_its_decoder(self, tmp_path: Path) -> None:
        text = load("qwen3-32b")
        del text["architectures"], text["model_type"]
        for name in ("Qwen3ForConditionalGeneration", "Qwen3ForCausalLM"):
            assert imported(tmp_path, {"architectures": [name], "text_config": text}).qk_norm


class TestUnknownClasses:
    SIZES: ClassVar[dict[str, Any]] = {
        "architectures": ["BrandNewForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
    }

    def test_common_names_are_read_with_a_note(self, tmp_path: Path) -> None:
        c = imported(tmp_path, self.SIZES | {"use_qk_norm": True})
        assert (c.hidden_size, c.num_query_groups, c.kv_channels, c.qk_norm) == (64, 2, 16, True)
        assert c.notes[0].startswith("BrandNewForCausalLM is not known: ")
        assert "at most 4096 positions" in c.notes[0]
        assert "--as FAMILY" in c.notes[0]

    def test_experts_and_latents(self, tmp_path: Path) -> None:
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        more = {"n_shared_experts": 2, "first_k_dense_replace": 1, "scoring_func": "sigmoid"}
        latents = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        c = imported(tmp_path, self.SIZES | experts | more | latents | {"v_head_dim": 16})
        assert (c.num_experts, c.top_k, c.shared_ffn_hidden_size) == (8, 2, 64)
        assert (c.first_dense_layers, c.router, c.kv_channels) == (1, "sigmoid", 24)

    def test_as_a_known_family(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(self.SIZES | {"max_position_embeddings": 64}))
        for name in ("qwen3", "Qwen3ForCausalLM"):
            c = resolve(str(file), name)
            assert (c.qk_norm, c.kv_channels) == (True, 128)  # as Qwen3 without a key of its own
        with pytest.raises(UserError, match="names no family; did you mean 'qwen3'"):
            resolve(str(file), "qwen3x")
        with pytest.raises(UserError, match="leave --as out"):
            resolve("gpt2", "qwen3")


class TestNotes:
    def test_keys_that_nobody_reads_and_that_may_matter_are_named(self, tmp_path: Path) -> None:
        harmless = {"sep_token_id": 3, "rope_theta": 5, "some_dropout": 0.1, "new_thing": False}
        c = imported(tmp_path, load("qwen3-32b") | harmless)
        assert c.notes == ()
        c = imported(tmp_path, load("qwen3-32b") | {"new_thing": 3})
        assert c.notes[0].endswith("may change parameters, FLOPs or memory: new_thing")

    def test_multi_token_prediction_is_said_to_be_left_out(self, tmp_path: Path) -> None:
        (note,) = imported(tmp_path, load("glm-4.5")).notes
        assert "(num_nextn_predict_layers) are left out" in note
        assert "--mtp-num-layers" in note

    def test_published_files_ask_for_nothing_unknown(self) -> None:
        asked = {f.stem: n for f in CONFIGS for n in from_config(f).notes if "not understood" in n}
        quantized = {k for k, note in asked.items() if note.endswith("memory: quantization_config")}
        assert asked.keys() - quantized == set()


class TestRefusals:
    @pytest.mark.parametrize(
        ("architecture", "missing"),
        [
            ("ZambaForCausalLM", "Mamba-1 in heads that have a B and a C each"),
            ("Phi3SmallForCausalLM", "block-sparse attention"),
        ],
    )
    def test_says_what_is_missing(self, tmp_path: Path, architecture: str, missing: str) -> None:
        text = error_of(tmp_path, {"architectures": [architecture]})
        assert text.startswith(f"{architecture} has {missing}, which is not supported: ")
        assert "--as FAMILY" in text
        assert "model NAME like PRESET" in text

    def test_says_what_a_wrapper_is_missing(self, tmp_path: Path) -> None:
        text = load("kimi-linear-48b-a3b")
        wrapper = "KimiK3ForConditionalGeneration"
        got = error_of(tmp_path, {"architectures": [wrapper], "text_config": text})
        assert got.startswith(f"{wrapper} has residual sums that attend to the layers before")

    def test_says_what_is_missing_for_a_model_type(self, tmp_path: Path) -> None:
        text = error_of(tmp_path, {"model_type": "phi3small"})
        assert text.startswith("phi3small has block-sparse attention, which is not supported: ")

    def test_a_class_that_is_no_decoder_is_named_whole(self, tmp_path: Path) -> None:
        name = "SomeNewImageTextThing3_5ForConditionalGeneration"
        text = error_of(tmp_path, {"architectures": [name], "image_size": 3})
        assert text.startswith(f"{name} is not known, and its keys are not those of a decoder: ")
        assert "num_hidden_layers is missing" in text
        assert "--as FAMILY" in text

    def test_suggests_an_architecture(self, tmp_path: Path) -> None:
        text = error_of(tmp_path, {"architectures": ["LLamaForCausalLM"]})
        assert "did you mean 'LlamaForCausalLM'?" in text

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, "model_type is missing, wanted text; use --as FAMILY"),
            ({"model_type": 3}, "model_type is 3, wanted text"),
            ({"model_type": "lama"}, "did you mean 'llama'?"),
            ({"architectures": "LlamaForCausalLM"}, "wanted a list of names"),
            ({"architectures": [None]}, "wanted a list of names"),
            ({"architectures": {"a": 1}}, "wanted a list of names"),
            (
                {"architectures": ["LlamaForCausalLM"], "model_type": "mixtral"},
                "model_type is 'mixtral', wanted llama, as architectures names LlamaForCausalLM",
            ),
        ],
    )
    def test_unclear_architecture(self, tmp_path: Path, config: object, expected: str) -> None:
        assert expected in error_of(tmp_path, config)

    @pytest.mark.parametrize(
        ("name", "key", "value", "expected"),
        [
            ("llama-3.2-1b-instruct", "num_hidden_layers", 10**12, "from 1 to 10000"),
            ("llama-3.2-1b-instruct", "num_hidden_layers", 0, "is 0, wanted a whole number"),
            ("llama-3.2-1b-instruct", "hidden_size", -2048, "is -2048, wanted a whole number"),
            ("llama-3.2-1b-instruct", "hidden_size", 2048.0, "is 2048.0, wanted a whole number"),
            ("llama-3.2-1b-instruct", "hidden_size", math.nan, "is nan, wanted a whole number"),
            ("llama-3.2-1b-instruct", "hidden_size", math.inf, "is inf, wanted a whole number"),
            ("llama-3.2-1b-instruct", "vocab_size", "128256", "is '128256', wanted a whole"),
            ("llama-3.2-1b-instruct", "vocab_size", None, "is null, wanted a whole number"),
            ("llama-3.2-1b-instruct", "vocab_size", True, "is true, wanted a whole number"),
            ("llama-3.2-1b-instruct", "num_key_value_heads", 5, "a divisor of the 32 attention"),
            ("llama-3.2-1b-instruct", "head_dim", 63, "rope turns an even part"),
            ("llama-3.2-1b-instruct", "hidden_act", "mish", "wanted one of gelu, gelu_new"),
            ("llama-3.2-1b-instruct", "mlp_bias", "no", "is 'no', wanted true or false"),
            ("llama-3.2-1b-instruct", "attention_dropout", 1.5, "a number from 0 to 0.999"),
            ("qwen2.5-7b-instruct", "num_attention_heads", 27, "a divisor of the hidden size 3584"),
            ("qwen2.5-7b-instruct", "max_window_layers", -1, None),  # read only with a window
            ("gpt2", "n_head", 7, "n_head is 7, wanted a divisor of the hidden size 768"),
            ("gpt2", "add_cross_attention", True, "wanted false; nothing else is supported"),
            ("gemma-3-1b-it", "use_bidirectional_attention", True, "wanted false"),
            ("gemma-3-1b-it", "sliding_window_pattern", 0, "a whole number from 1"),
            ("gemma-2-9b", "layer_types", ["full_attention"], "for each of the 42 layers"),
            ("gemma-2-9b", "layer_types", ["global"] * 42, "full_attention or sliding_attention"),
            ("gemma-2-9b", "layer_types", [[]] * 42, "full_attention or sliding_attention"),
            ("gemma-2-9b", "final_logit_softcapping", -1, "a number from 0.001"),
            ("gemma-3-12b-it", "text_config", None, "text_config is null, wanted an object"),
            ("gemma-3-12b-it", "text_config", {}, "text_config.num_hidden_layers is missing"),
            ("phi-4-mini-instruct", "partial_rotary_factor", 0, "rotary_fraction is 0.0"),
            ("falcon-40b-instruct", "num_kv_heads", 3, "a divisor of the 128 attention heads"),
            ("falcon-40b-instruct", "num_ln_in_parallel_attn", 3, "a whole number from 1 to 2"),
            ("opt-125m", "layer_norm_elementwise_affine", False, "wanted true"),
            ("bert-base-uncased", "position_embedding_type", "relative_key", 'wanted "absolute"'),
            ("bert-base-uncased", "is_decoder", True, "wanted false"),
            ("mixtral-8x7b-v0.1", "num_local_experts", 0, "a whole number from 1 to 65536"),
            ("mixtral-8x7b-v0.1", "num_experts_per_tok", 9, "top_k is 9, wanted a whole number"),
            ("qwen3-30b-a3b", "mlp_only_layers", [1], "the first layers in order"),
            ("qwen3-30b-a3b", "mlp_only_layers", 0, "the first layers in order"),
            ("qwen3-30b-a3b", "decoder_sparse_step", 0, "a whole number from 1"),
            ("deepseek-v3", "num_key_value_heads", 8, "the 128 attention heads"),
            ("nemotron-h-8b-base-8k", "attention_bias", True, "wanted false"),
            ("deepseek-v3", "scoring_func", "tanh", "one of softmax, sigmoid"),
            ("deepseek-v3", "qk_rope_head_dim", 63, "qk_rope_head_dim is 63, wanted an even part"),
            ("dbrx-instruct", "attn_config", None, "attn_config is null, wanted an object"),
            ("mamba-2.8b-hf", "use_bias", True, "wanted false"),
            ("mamba-2.8b-hf", "time_step_rank", 0, "a whole number from 1"),
            ("mamba-2.8b-hf", "state_size", "16", "is '16', wanted a whole number"),
            (
                "mamba-codestral-7b-v0.1",
                "n_groups",
                3,
                "n_groups is 3, wanted a divisor of the 128",
            ),
            ("jamba-v0.1", "attn_layer_offset", 8, "a whole number from 0 to 7"),
            ("bamba-9b-v1", "attn_layer_indices", [32], "a list of layers below 32"),
            ("bamba-9b-v1", "mamba_d_head", "wide", "is 'wide', wanted a whole number"),
            ("granite-4.0-h-small", "layer_types", ["mamba"], "for each of the 40 layers"),
            ("granite-4.0-h-small", "position_embedding_type", "alibi", '"rope", "nope" or null'),
            ("nemotron-h-47b-base-8k", "hybrid_override_pattern", "MX", "letters of M * - E"),
            ("nemotron-h-47b-base-8k", "num_hidden_layers", 97, "98, the length of the pattern"),
            ("qwen3-next-80b-a3b", "linear_num_key_heads", 3, "a divisor of the 32 value heads"),
            ("qwen3-next-80b-a3b", "mlp_only_layers", [1], "dense layers are not supported"),
            ("qwen3-next-80b-a3b", "decoder_sparse_step", 2, "wanted 1"),
            ("kimi-linear-48b-a3b", "mla_use_nope", False, "wanted true"),
            ("kimi-linear-48b-a3b", "num_shared_experts", -1, "a whole number from 0"),
            ("kimi-linear-48b-a3b", "linear_attn_config", {}, "linear_attn_config.kda_layers is"),
            (
                "minimax-text-01",
                "attn_type_list",
                [2] * 80,
                "0 (lightning) or 1 for each of the 80",
            ),
            ("dbrx-instruct", "ffn_config", {}, "ffn_config.moe_num_experts is missing"),
        ],
    )
    def test_names_the_key(
        self, tmp_path: Path, name: str, key: str, value: object, expected: str | None
    ) -> None:
        config = load(name) | {key: value}
        if expected is None:
            imported(tmp_path, config)
        else:
            text = error_of(tmp_path, config)
            assert expected in text
            assert key in text or "model " in text

    @pytest.mark.parametrize(
        ("name", "required"),
        [
            ("llama-3.2-1b-instruct", {"hidden_size", "intermediate_size", "vocab_size"}),
            ("mistral-7b-v0.1", {"num_key_value_heads", "max_position_embeddings"}),
            ("gpt2", {"n_embd", "n_layer", "n_head", "n_positions", "vocab_size"}),
            ("gemma-3-1b-it", {"hidden_size", "intermediate_size", "num_hidden_layers"}),
            ("falcon-7b-instruct", {"hidden_size", "num_attention_heads", "vocab_size"}),
            ("falcon-7b-instruct-refinedweb", {"multi_query", "parallel_attn", "n_layer"}),
            ("opt-125m", {"ffn_dim", "hidden_size", "vocab_size"}),
            ("bert-base-uncased", {"intermediate_size", "max_position_embeddings"}),
            ("mixtral-8x7b-v0.1", {"num_local_experts", "num_experts_per_tok"}),
            ("qwen3-30b-a3b", {"num_experts", "moe_intermediate_size"}),
            ("deepseek-v2", {"kv_lora_rank", "q_lora_rank", "v_head_dim", "n_shared_experts"}),
            ("glm-4.5", {"n_routed_experts", "first_k_dense_replace"}),
        ],
    )
    def test_requires_the_sizes(self, tmp_path: Path, name: str, required: set[str]) -> None:
        for key in required:
            config = load(name)
            del config[key]
            assert " is missing, wanted " in error_of(tmp_path, config), key

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("model: llama", "not JSON"),
            ("[1, 2]", "holds [1, 2], wanted a JSON object"),
            ("null", "holds None, wanted a JSON object"),
            ("[" * 200_000, "nested too deep"),
            ('{"a":' * 200_000, "nested too deep"),
            ('{"hidden_size": ' + "9" * 5000 + "}", "not JSON"),
            ('{"model_type": "llama", "num_hidden_layers": 1e309}', "num_hidden_layers is inf"),
            ('{"model_type": "\\ud800"}', "half of a character"),
            (json.dumps({"model_type": "x" * 100_000}), "xxxx' is not known"),
            (json.dumps({"pad": "x" * 10_000_000}), "over 10000000 bytes"),
        ],
        ids=range(12),
    )
    def test_what_is_no_config(self, tmp_path: Path, content: str, expected: str) -> None:
        text = error_of(tmp_path, content)
        assert expected in text
        assert len(text) < 1000 + len(str(tmp_path))

    def test_values_nested_to_the_limit_are_shown_short(self, tmp_path: Path) -> None:
        for depth in range(0, 1200, 50):
            value = "[" * depth + "1" + "]" * depth
            deep = f'{{"model_type": "llama", "num_hidden_layers": {value}}}'
            assert len(error_of(tmp_path, deep)) < 300 + len(str(tmp_path))

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(b"\xff\xfe\x00{")
        with pytest.raises(UserError, match="not JSON"):
            from_config(file)

    def test_duplicated_keys_and_a_byte_order_mark_are_fine(self, tmp_path: Path) -> None:
        text = json.dumps(load("gpt2"))[:-1] + ', "n_layer": 3}'
        file = tmp_path / "config.json"
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert from_config(file).num_layers == 3

    def test_longest_pattern_is_found_quickly(self, tmp_path: Path) -> None:
        layers = LIMITS["num_layers"]
        window = {"use_sliding_window": True, "max_window_layers": layers - 1}
        config = load("qwen2.5-7b-instruct") | window | {"num_hidden_layers": layers}
        assert len(imported(tmp_path, config).mixers) == layers


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 70),
    st.sampled_from([2**k for k in range(40)]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(sorted(hf_keys.ACTIVATIONS)),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = sorted({key for file in CONFIGS for key in load(file.stem)} | {"layer_types"})
FUZZ = settings(
    max_examples=times(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def accepts_or_refuses(folder: Path, config: object) -> None:
    """The one property of any input: a valid model, or an error of one line that names the file."""
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        c = from_config(file)
    except UserError as error:
        text = str(error)
        assert str(file) in text
        assert "\n" not in text
        assert len(text) < 1500 + 2 * len(str(file))
    else:
        assert dataclasses.replace(c) == c
        assert count_parameters(c) > 0
        mixers = {c.layer(i).mixer for i in range(c.num_layers)}
        assert mixers <= {*ATTENTIONS, "none", *RECURRENCES, *SIDE_BY_SIDE}


@pytest.mark.slow
class TestFuzz:
    @FUZZ
    @given(config=JSON)
    def test_any_json(self, tmp_path: Path, config: object) -> None:
        accepts_or_refuses(tmp_path, config)

    @FUZZ
    @given(
        architecture=st.sampled_from(sorted(hf.FAMILIES)),
        values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=len(KEYS)),
    )
    def test_any_values_of_the_known_keys(
        self, tmp_path: Path, architecture: str, values: dict[str, Any]
    ) -> None:
        values |= {"architectures": [architecture]}
        values.pop("model_type", None)
        accepts_or_refuses(tmp_path, values)

    @FUZZ
    @given(
        file=st.sampled_from(CONFIGS),
        changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3),
        dropped=st.sets(st.sampled_from(KEYS), max_size=2),
        inside=st.booleans(),
    )
    @example(CONFIGS[0], {"num_attention_heads": 10**6}, set(), False)
    def test_published_files_with_changes(
        self,
        tmp_path: Path,
        file: Path,
        changes: dict[str, Any],
        dropped: set[str],
        inside: bool,
    ) -> None:
        config = load(file.stem)
        target = config["text_config"] if inside and "text_config" in config else config
        target |= changes
        for key in dropped:
            target.pop(key, None)
        accepts_or_refuses(tmp_path, config)
