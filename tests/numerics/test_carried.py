"""What blocks hand on besides the stream: whole models on one device against finite differences,
each block sharded as on one device, programs of all stages sound."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import pairs
from spmd import BELOW, random_values, single
from stagewright.graph.node import Graph
from stagewright.graph.table import LEAVES
from stagewright.lower.blocks import build_block
from stagewright.lower.kernels.live_values import LiveValue, interface, outputs
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant, place_blocks, tie_tables
from stagewright.model.presets import PRESETS
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.schedule.schedules import make as make_order
from toys import WITH_LIVE_VALUES as MODELS

TABLES = {"t5": 3, "t5, 1.1": 3, "zamba2": 1 + 2 * 9, "zamba2, attention": 8}
"""Those that have copies; of others, the embedding's."""


def blocks(model: str, **settings: Any) -> tuple[Run, list[tuple[BlockVariant, int]]]:
    """The blocks of a model that is all on one rank, in order."""
    config = MODELS[model]
    run = Run(model=model, dropout=False, **settings).resolved(config)
    stages = tie_tables(place_blocks(run, config), make_order("1f1b", 1, 1, 1), config)
    return run, stages[0]


class Whole:
    """A whole model on one device: its loss, and the gradient of every parameter."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = MODELS[model]
        if self.config.encoder_num_layers:
            settings["decoder_seq_length"] = 4
        run, kinds = blocks(model, seq_length=6, micro_batch_size=2, **settings)
        self.sizes = sizes_of(run, self.config)
        self.graphs = [
            build_block(k, self.config, recipe_of(run, self.config)).graph for k, _ in kinds
        ]
        self.ahead = [only_forward(graph) for graph in self.graphs]
        self.made = [{c: key(graph, n) for c, n in outputs(graph).items()} for graph in self.graphs]
        self.own: list[dict[str, Any]] = []
        shared: dict[str, Any] = {}
        for seed, graph in enumerate(self.graphs):
            values = random_values(graph, self.sizes, seed)
            tied = {n.name: n.binding.tied for n in graph if n.op == "param" and n.binding.tied}
            for name in values:
                if name in tied or name in BELOW:
                    values[name] = shared.setdefault(tied.get(name, name), values[name])
            self.own.append(values)

    def forward(self, own: list[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
        """The loss, and what every block is given."""
        handed: dict[LiveValue, Any] = {}
        inputs: list[dict[str, Any]] = []
        loss = 0.0
        for graph, made, values in zip(self.ahead, self.made, own, strict=True):
            inputs.append(values | self.given(graph, handed))
            out = single(graph, self.sizes, inputs[-1])
            handed |= {c: out[name] for c, name in made.items() if not c.gradient}
            loss = out.get("loss", loss)
        return float(loss), inputs

    def backward(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Every block's outputs with the gradients that the others hand it."""
        found: list[dict[str, Any]] = []
        handed: dict[LiveValue, Any] = {}
        every = list(zip(self.graphs, self.made, inputs, strict=True))
        for graph, made, values in reversed(every):
            out = single(graph, self.sizes, values | self.given(graph, handed) | {"d_loss": 1.0})
            handed |= {c: out[name] for c, name in made.items() if c.gradient}
            found.insert(0, out)
        return found

    def given(self, graph: Graph, handed: dict[LiveValue, Any]) -> dict[str, Any]:
        leaves = {n.name: interface(n) for n in graph if n.op in LEAVES}
        return {name: handed[c] for name, c in leaves.items() if c in handed}


def only_forward(graph: Graph) -> Graph:
    made = {n for c, n in outputs(graph).items() if not c.gradient}
    kept = {name: n for name, n in graph.outputs.items() if n in made or name == "loss"}
    return Graph.of([n for n in graph if n.phase == "forward"], kept)


def key(graph: Graph, n: Any) -> str:
    return next(name for name, other in graph.outputs.items() if other is n)


SUMMED: dict[str, Any] = {"grad_reduce": "microbatch"}


@pytest.mark.parametrize(("model", "settings"), pairs(MODELS, [{}, SUMMED], 4), ids=str)
def test_a_whole_model_against_finite_differences(model: str, settings: dict[str, Any]) -> None:
    """Along a random direction: of each table with copies, which move alike, and of all others."""
    whole = Whole(model, **settings)
    found = whole.backward(whole.forward(whole.own)[1])
    rng = np.random.default_rng(3)
    together: dict[str, list[tuple[int, str]]] = {}
    for i, graph in enumerate(whole.graphs):
        for n in graph:
            if n.op == "param" and not n.binding.buffer:
                together.setdefault(n.binding.tied, []).append((i, n.name))
    assert len(together) == 1 + TABLES.get(model, 1)
    for table, places in together.items():
        one = rng.normal(size=whole.own[places[0][0]][places[0][1]].shape)
        ways = {
            (i, name): one if table else rng.normal(size=whole.own[i][name].shape)
            for i, name in places
        }
        slope = 0.0
        for sign in (1, -1):
            moved = [dict(values) for values in whole.own]
            for (i, name), way in ways.items():
                moved[i][name] = moved[i][name] + sign * 1e-7 * way
            slope += sign * whole.forward(moved)[0] / 2e-7
        gradients = [
            float((found[i][f"grad.{name}"] * way).sum())
            for (i, name), way in ways.items()
            if f"grad.{name}" in found[i]
        ]
        assert sum(gradients) == pytest.approx(slope, rel=1e-4, abs=1e-6), table


def test_keys_of_both_sequences_go_round() -> None:
    """Of each layer those of its own sequence, and in the decoder those of the encoder's too; the
    bias of a rank's queries stays where it is."""
    c = PRESETS["t5-3b"]
    run = {"model": c.name, "cp": 4, "seq_length": 512, "decoder_seq_length": 256}
    t = sw.compile(Run(**run)).program.classes[0].tasks
    sent = t.comm_bytes[(t.kind == TaskKind.SEND) & (t.phase == 0)]
    of_token = 2 * c.num_attention_heads * c.kv_channels * 2
    tokens = c.encoder_num_layers * 512 + c.num_layers * (256 + 512)
    assert int(sent.sum()) == 3 * tokens // 4 * of_token
    assert not ((t.kind == TaskKind.COLLECTIVE) & (t.phase == 0)).any()


# ---- multi-token prediction ----------------------------------------------------------------------

# Parameters of the checkpoint's layer: of the hub's counts, those with it less those without. It
# holds a copy of both tables, and the bias that balances its experts, besides.
LAYER = {
    "glm-4.5": 358_337_791_296 - 352_797_829_024,
    "glm-4.5-air": 110_468_824_832 - 106_852_251_264,
}


@pytest.mark.parametrize("name", LAYER)
def test_parameters_of_the_layer_are_those_of_the_checkpoint(name: str) -> None:
    c = PRESETS[name]
    copies = 2 * c.vocab_size * c.hidden_size + c.num_experts
    more = parameters(c.with_overrides(mtp_num_layers=1))[0] - parameters(c)[0]
    assert more == LAYER[name] - copies


def test_deepseek_v3_says_its_module_has_11_billion_parameters() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B, the tables left out. Two norms, a product and a
    norm around one of its layers make 11.61B."""
    c = PRESETS["deepseek-v3"]
    (one, _), (two, _) = (parameters(c.with_overrides(num_layers=n)) for n in (4, 5))
    more = parameters(c.with_overrides(mtp_num_layers=1))[0] - parameters(c)[0]
    assert more == two - one + 2 * c.hidden_size**2 + 3 * c.hidden_size
    assert more == pytest.approx(11.5e9, rel=0.01)


def test_flops_are_those_of_a_layer_a_projection_and_the_output() -> None:
    c = PRESETS["llama3.2-1b"]
    run = {"model": c.name, "seq_length": 1024, "layers": 2}

    def forward(**more: Any) -> tuple[int, int]:
        t = sw.compile(Run(**run, **more)).program.classes[0].tasks
        products = (t.phase == 0) & np.array([t.ops[i] == "einsum" for i in t.op])
        return int(t.flops[products].sum()), int(t.flops[products & (t.layer == 0)].sum())

    (plain, layer), (more, _) = forward(), forward(mtp_num_layers=1)
    tokens, hidden = 1024, c.hidden_size
    assert more - plain == layer + 2 * tokens * (2 * hidden * hidden + hidden * c.vocab_size)


def test_the_last_stage_has_it_and_its_copy_of_the_embedding_is_kept_alike() -> None:
    compiled = sw.compile(Run(model="llama3-8b", layers=4, pp=4, mtp_num_layers=1, tp=2))
    held = {
        c.pipeline_rank: Counter(c.tasks.names[i] for i in c.tasks.name)
        for c in compiled.program.classes
    }
    assert [stage for stage, names in held.items() if any("mtp1" in n for n in names)] == [3]
    assert held[0]["embedding.wte.grad.all_reduce"] == held[3]["mtp1.wte.grad.all_reduce"] == 1
    assert [who.only for who in compiled.program.communicators if who.only] == [(0, 3)]
    assert not any("lm_head.grad.all_reduce" in name for names in held.values() for name in names)


# ---- an encoder and a decoder --------------------------------------------------------------------


def t5(**settings: Any) -> sw.Compiled:
    return sw.compile(Run(model="t5-11b", seq_length=512, decoder_seq_length=128, **settings))


def moved(compiled: sw.Compiled, rank: int) -> set[tuple[str, int]]:
    t = compiled.program.classes[rank].tasks
    some = np.isin(t.kind, (TaskKind.SEND, TaskKind.RECV))
    return {(t.names[i], int(n)) for i, n in zip(t.name[some], t.comm_bytes[some], strict=True)}


def test_stages_send_what_megatron_sends() -> None:
    """Stages of the encoder its hidden states, stages of the decoder its own and the encoder's: the
    two shapes of `get_tensor_shapes` in Megatron-LM's schedules (core 0.4)."""
    compiled = t5(pp=4)
    source, target = 512 * 1024 * 2, 128 * 1024 * 2
    ways = {("backward", "recv"), ("forward", "send")}
    assert moved(compiled, 0) == {(f"{phase}.{op}", source) for phase, op in ways}
    # The first stage of the decoder begins with its own tokens.
    back = {(f"{phase}.memory.{op}", source) for phase, op in ways}
    ahead = {("forward.memory.recv", source), ("backward.memory.send", source)}
    own = {(f"{phase}.{op}", target) for phase, op in ways}
    assert moved(compiled, 2) == back | ahead | own
    own = {("forward.recv", target), ("backward.send", target)}
    assert moved(compiled, 3) == ahead | own


def test_copies_of_tables() -> None:
    """The embedding is on the first stage, the decoder's first and the last; each stage has the
    table of its stack (Megatron-LM: `embedding_ranks`, `position_embedding_ranks`)."""
    compiled = t5(pp=4)
    groups = {who.only for who in compiled.program.communicators if who.only}
    assert groups == {(0, 2, 3), (0, 1), (2, 3)}


def test_flops_of_an_encoder_and_a_decoder() -> None:
    """Products with weights: two FLOPs for each token and each parameter that it meets."""
    t = t5().program.classes[0].tasks
    products = (t.phase == 0) & np.array([t.ops[i] == "einsum" for i in t.op])
    c = PRESETS["t5-11b"]
    inner, hidden, layers = c.num_attention_heads * c.kv_channels, c.hidden_size, c.num_layers
    mlp = 2 * hidden * c.ffn_hidden_size
    source = layers * (4 * hidden * inner + mlp) + layers * 2 * hidden * inner  # keys and values
    target = layers * (6 * hidden * inner + mlp) + hidden * c.vocab_size
    assert int(t.flops[products].sum()) == 2 * (512 * source + 128 * target)
    core = (t.phase == 0) & np.array([t.ops[i] == "attention" for i in t.op])
    pairs = 512 * 512 + 128 * 128 // 2 + 128 * 512
    assert int(t.flops[core].sum()) == layers * 4 * inner * pairs
