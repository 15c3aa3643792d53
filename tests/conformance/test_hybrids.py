"""Zamba2 and Falcon-H1 compute what transformers' classes do: toy models, weights by name.

`hybrids.json` has each config.json and the logits; `record_hybrids.py` has made them. Our model is
read from the config.json, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights import weight

from spmd import Spmd
from stagewright import blocks as model_blocks
from stagewright.graph.node import Graph, toposort
from stagewright.lower.recipe import sizes_of
from stagewright.model.catalog import from_config
from stagewright.model.config import ModelConfig
from stagewright.run.settings import Run

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("hybrids.json").read_text())
RECIPE = model_blocks.Recipe(dropout=False)
UPS = ("gate", "up")
Values = dict[str, Any]


class Theirs:
    """Weights as transformers has them, cut and turned into ours."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        assert config.state_space
        s = self.state = config.state_space
        self.heads = s.groups, s.heads // s.groups, s.head_width
        self.keys = s.groups, s.state

    def matrix(self, name: str, into: int, *out: int) -> Any:
        """A linear's weight, its rows first, as [into, *out]."""
        found = weight(f"{name}.weight", (int(np.prod(out)), into))
        return found.T.reshape(into, *out)

    def back(self, name: str, *into: int) -> Any:
        """The same of one that leads back to the stream, [*into, hidden]."""
        hidden = self.config.hidden_size
        found = weight(f"{name}.weight", (hidden, int(np.prod(into))))
        return found.T.reshape(*into, hidden)

    def norm(self, name: str, width: int = 0) -> Any:
        return weight(f"{name}.weight", (width or self.config.hidden_size,))

    def mamba2(self, name: str) -> Values:
        """One projection for z, x, B, C and dt, one convolution for x, B and C."""
        s, hidden = self.state, self.config.hidden_size
        keys = s.groups * s.state
        widths = {"z": s.inner, "x": s.inner, "b": keys, "c": keys, "dt": s.heads}
        shapes = {"z": self.heads, "x": self.heads, "b": self.keys, "c": self.keys}
        shapes["dt"] = self.heads[:2]
        cuts = np.cumsum([*widths.values()])
        rows = weight(f"{name}.in_proj.weight", (cuts[-1], hidden))
        parts = dict(zip(widths, np.split(rows, cuts[:-1]), strict=True))
        found = {f"w_{n}": part.T.reshape(hidden, *shapes[n]) for n, part in parts.items()}
        convolved = (s.inner + 2 * keys,)
        taps = weight(f"{name}.conv1d.weight", (*convolved, 1, s.conv))[:, 0]
        biases = weight(f"{name}.conv1d.bias", convolved)
        cut = (np.split(x, cuts[1:3] - s.inner) for x in (taps, biases))
        for n, w, b in zip("xbc", *cut, strict=True):
            found[f"conv_{n}.weight"] = w.reshape(*shapes[n], s.conv)
            found[f"conv_{n}.bias"] = b.reshape(shapes[n])
        for ours, theirs in (("dt_bias", "dt_bias"), ("a_log", "A_log"), ("d", "D")):
            found[ours] = weight(f"{name}.{theirs}", (s.heads,)).reshape(self.heads[:2])
        if s.gated_norm:
            found["norm.weight"] = self.norm(f"{name}.norm", s.inner).reshape(self.heads)
        found["w_out"] = self.back(f"{name}.out_proj", *self.heads)
        return {f"mamba2.{n}": value for n, value in found.items()}

    def attention(self, name: str, width: int) -> Values:
        c = self.config
        queries = c.num_attention_heads, c.kv_channels
        shapes = {"q": queries} | dict.fromkeys("kv", (c.num_query_groups, c.kv_channels))
        found = {f"w{n}": self.matrix(f"{name}.{n}_proj", width, *x) for n, x in shapes.items()}
        return found | {"wo": self.back(f"{name}.o_proj", *queries)}

    def falcon_h1(self, i: int) -> Values:
        of = f"model.layers.{i}"
        hidden, inner = self.config.hidden_size, self.config.ffn_hidden_size
        mlp = {f"w_{n}": self.matrix(f"{of}.feed_forward.{n}_proj", hidden, inner) for n in UPS}
        mlp["w_down"] = self.back(f"{of}.feed_forward.down_proj", inner)
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
        found = {f"{ours}.weight": self.norm(f"{of}.{n}") for ours, n in norms.items()}
        return found | mlp | self.mamba2(f"{of}.mamba") | self.attention(f"{of}.self_attn", hidden)

    def zamba2(self, i: int) -> Values:
        block, of = self.config.layer(i).block, f"model.layers.{i}"
        decoder = f"{of}.mamba_decoder" if block else of
        found = {"attn_norm.weight": self.norm(f"{decoder}.input_layernorm")}
        found |= self.mamba2(f"{decoder}.mamba")
        return found | self.shared(i, block) if block else found

    def shared(self, i: int, block: int) -> Values:
        """A shared block, which has its name from the first layer with it, and the layer's own."""
        c, hidden, inner = self.config, self.config.hidden_size, self.config.ffn_hidden_size
        blocks = c.shared_blocks
        assert blocks
        first = f"model.layers.{blocks.layers.index(block)}.shared_transformer"
        nth = sum(b > 0 for b in blocks.layers[:i])
        both, rank = 2 * hidden, blocks.adapter_rank

        def halves(name: str, width: int) -> Values:
            whole = self.matrix(f"{first}.feed_forward.{name}", width, 2 * inner)
            return dict(zip(UPS, np.split(whole, 2, axis=1), strict=True))

        found = self.attention(f"{first}.self_attn", both)
        found |= {f"w_{n}": w for n, w in halves("gate_up_proj", hidden).items()}
        found["w_down"] = self.back(f"{first}.feed_forward.down_proj", inner)
        found["attn_norm.weight"] = self.norm(f"{first}.input_layernorm", both)
        found["mlp_norm.weight"] = self.norm(f"{first}.pre_ff_layernorm")
        adapter = f"gate_up_proj_adapter_list.{nth}"
        own = halves(f"{adapter}.1", rank)
        own["mlp_narrow"] = self.matrix(f"{first}.feed_forward.{adapter}.0", hidden, rank)
        for n in "qkv" if blocks.attention_adapter else "":
            adapter = f"{first}.self_attn.linear_{n}_adapter_list.{nth}"
            own[f"{n}_narrow"] = self.matrix(f"{adapter}.0", both, rank)
            heads = c.num_attention_heads, c.kv_channels
            own[n] = self.matrix(f"{adapter}.1", rank, *heads)
        back = {"w_block": self.matrix(f"model.layers.{i}.linear", hidden, hidden)}
        ours = {f"shared.{n}": w for n, w in found.items()}
        return ours | {f"adapter.{n}": w for n, w in own.items()} | back


def logits(config: ModelConfig, weights: dict[tuple[str, int], Values]) -> Any:
    """Of our graphs, on one device."""
    tokens = np.array(RECORDED["tokens"])
    x: Any = None
    original: Any = None
    sizes = sizes_of(Run(model=config.name), config) | dict(zip("BS", tokens.shape, strict=True))
    for (part, layer), values in weights.items():
        graph = model_blocks.BLOCKS[part](config, RECIPE, config.layer(layer)).graph
        found = {n.name: n for n in graph if n.phase == "forward"}
        end = found["logits32"].srcs[0] if part == "head" else graph.outputs["y"]
        forward = Graph.of(toposort([end]), {"end": end})
        given = values | {"tokens": tokens, "x": x, "original": original}
        x = Spmd({}, sizes).run(forward, given)[end][()]
        original = x if part == "embedding" else original
    return x


@pytest.mark.parametrize("name", RECORDED["models"])
def test_logits(name: str, tmp_path: Path) -> None:
    recorded = RECORDED["models"][name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(recorded["config"]))
    config = from_config(file)
    theirs = Theirs(config)
    table = weight("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    head = {"final_norm.weight": theirs.norm("model.final_layernorm")}
    head |= {"wte": table, "lm_head": weight("lm_head.weight", table.shape)}
    layer = theirs.zamba2 if config.shares else theirs.falcon_h1
    weights = {("embedding", 0): {"wte": table}}
    weights |= {("layer", i): layer(i) for i in range(config.num_layers)}
    got = logits(config, weights | {("head", 0): head})
    # Their norms are in fp32, ours in fp64.
    np.testing.assert_allclose(got, np.array(recorded["logits"]), rtol=1e-4, atol=2e-5)
