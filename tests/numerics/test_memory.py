"""Bytes of a rank against closed forms: states (ZeRO) and activations (Korthikanti et al.)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from helpers import cases, evaluated, table_of
from orders import in_flight
from stagewright.errors import UserError
from stagewright.graph.node import Node
from stagewright.lower.blocks import lower_block
from stagewright.lower.compile import compile
from stagewright.lower.kernels.extent import bytes_of, extent_of
from stagewright.lower.kernels.kernel import BlockSection
from stagewright.lower.recipe import sizes_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.catalog import resolve
from stagewright.parallel.degrees import parallelization
from stagewright.program import memory as over_time
from stagewright.program.columns import CATEGORIES, RankClass
from stagewright.run.settings import Run
from stagewright.schedule.schedules import make

GPT = {"model": "gpt3-1.3b", "layers": 4, "seq_length": 256}
LLAMA = {"model": "llama3.1-8b", "layers": 4, "seq_length": 256}
SP = {"sequence_parallel": True}
STATES = ("parameters", "gradients", "optimizer")


def memory(**settings: Any) -> list[dict[str, int]]:
    """Bytes by category, per pipeline rank."""
    return [dict(c.memory) for c in compile(Run(**settings)).program.classes]


def parameters(**settings: Any) -> int:
    return compile(Run(**settings)).parameters


# ---- parameters, gradients, optimizer states -----------------------------------------------------


@cases
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda m: m["model"])
def test_states(model: dict[str, Any], recipe: dict[str, Any], wanted: str) -> None:
    (found,) = memory(**model, **recipe)
    count = parameters(**model)
    assert [found[s] for s in STATES] == [n * count for n in evaluated(wanted)]


def test_a_dim_that_does_not_divide_is_padded() -> None:
    """Over 5 ranks opt-125m splits its 2050 rows of positions evenly, and nothing else."""
    (found,) = memory(model="opt-125m", layers=2, seq_length=64, dp=5, zero=3)
    exact = 2 * parameters(model="opt-125m", layers=2) / 5
    assert exact < found["parameters"] < 1.01 * exact


@pytest.mark.parametrize("states", STATES)
def test_tensor_parallelism(states: str) -> None:
    """Products and vocabulary are split; norms, and biases after row-parallel products, are not."""
    model = resolve("gpt3-1.3b")
    h, layers = model.hidden_size, 4
    whole = layers * (4 * h + 2 * h) + 2 * h + model.max_position_embeddings * h
    count = parameters(**GPT, vocab=50304)
    (alone,) = memory(**GPT, vocab=50304)
    (split,) = memory(**GPT, vocab=50304, tp=4)
    assert split[states] * count == alone[states] * ((count - whole) // 4 + whole)


@pytest.mark.parametrize(("model", "copies"), [(LLAMA, 0), (GPT, 1)], ids=["untied", "tied"])
def test_pipeline_stages_add_up(model: dict[str, Any], copies: int) -> None:
    """A tied embedding is on the first and the last stage, with all its states."""
    held = parameters(**model) + 50257 * 2048 * copies
    ranks = memory(**model, pp=4)
    for states, size in zip(STATES, (2, 4, 12), strict=True):
        assert sum(r[states] for r in ranks) == size * held


def test_gathered_weights() -> None:
    """ZeRO-3: those of a block and of the one after it, in bf16, for a rank's part of tp."""
    layer, table = 218_112_000, 128256 * 4096  # parameters of a layer of llama3.1-8b
    for tp in (1, 2):
        norms = 2 * 4096
        local = (layer - norms) // tp + norms
        (found,) = memory(**LLAMA, dp=2, zero=3, tp=tp)
        assert found["gathered_parameters"] == 2 * (local + table // tp + 4096)  # layer 3 and head
        first = memory(**LLAMA, dp=2, zero=3, tp=tp, pp=4)[1]
        assert first["gathered_parameters"] == 2 * local
        second = memory(**LLAMA | {"layers": 8}, dp=2, zero=3, tp=tp, pp=4)[1]
        assert second["gathered_parameters"] == 2 * 2 * local
    (once,) = memory(**LLAMA, dp=2, zero=3, reshard_after_forward=False)
    assert once["gathered_parameters"] == 2 * parameters(**LLAMA)
    assert memory(**LLAMA, dp=2, zero=2)[0]["gathered_parameters"] == 0


# ---- activations ---------------------------------------------------------------------------------

MEGATRON: dict[str, Any] = {"model": "megatron-22b", "seq_length": 2048, "flash_attention": False}
H, A, S = 6144, 64, 2048
SBH = S * H  # one sequence
AS_H = Fraction(A * S, H)  # a s / h


def kept_by_layer(**settings: Any) -> Fraction:
    """Bytes that one more layer keeps from forward to backward, in units of s b h."""
    size = settings.get("micro_batch_size", 1)
    three, two = (memory(**settings, layers=n)[0]["activations"] for n in (3, 2))
    return Fraction(three - two, SBH * size)


@cases
def test_activations_of_a_layer(settings: dict[str, Any], wanted: str) -> None:
    kept = kept_by_layer(**(MEGATRON | settings))
    assert kept == evaluated(wanted, AS_H=AS_H, Fraction=Fraction)


def terms(**settings: Any) -> dict[str, Fraction]:
    """What a layer keeps, by name, in units of s b h."""
    compiled = compile(Run(**settings))
    run, graph = compiled.run, compiled.blocks["layer"]
    mesh, _ = parallelization(run, compiled.model)
    extent = extent_of(sizes_of(run, compiled.model), mesh)
    tasks = lower_block(graph, run, extent, BlockVariant("layer")).tasks
    made = {n for t in tasks if t.section is BlockSection.FORWARD for n in t.made}
    made |= {n for n in graph if n.op == "input" and n.name == "x"}
    kept: dict[Node, None] = {}
    for t in tasks:
        if t.section is BlockSection.BACKWARD:
            kept |= dict.fromkeys(n for n in t.reads if n in made and n.phase == "forward")
    found: dict[str, Fraction] = {}
    for n in kept:
        name = n.name or n.op
        found[name] = found.get(name, Fraction(0)) + Fraction(bytes_of(n, extent), SBH)
    return found


def test_every_term() -> None:
    """Section 4.1 of the paper, tensor by tensor."""
    t = 8
    assert terms(**MEGATRON, tp=t, **SP, layers=2) == {
        "x": Fraction(2, t),  # input of the first norm
        "attn_norm_out": Fraction(2, t),  # shared input of Q, K and V
        "q_biased": Fraction(2, t),
        "k_biased": Fraction(2, t),
        "v_biased": Fraction(2, t),
        "probs": 2 * AS_H / t,
        "probs.mask": AS_H / t,
        "probs.dropout": 2 * AS_H / t,
        "core": Fraction(2, t),  # input of the output projection
        "branch.mask": Fraction(1 + 1, t),  # after attention and after the MLP
        "attn_residual": Fraction(2, t),  # input of the second norm
        "mlp_norm_out": Fraction(2, t),
        "up_biased": Fraction(8, t),  # input of GeLU
        "act": Fraction(8, t),
    }


def test_gathered_copies_are_kept_on_request() -> None:
    """As torch's DTensor does: the inputs of the column-parallel products, whole."""
    again = kept_by_layer(**MEGATRON, tp=8, **SP)
    keep = kept_by_layer(**MEGATRON, tp=8, **SP, activation_gather="keep")
    assert keep - again == 2 * (2 - Fraction(2, 8))


def test_llama() -> None:
    """Grouped queries and a gated MLP, by hand: M=4096, F=14336, 32 heads, 8 of keys."""
    run = LLAMA | {"seq_length": 2048}
    four, two = (memory(**run | {"layers": n})[0]["activations"] for n in (4, 2))
    x, kv, f = 2 * 4096, 2 * 1024, 2 * 14336
    #                            x, norm, q, k, v, core, sum, norm, gate, up, act
    assert (four - two) // 2 == 2048 * (x + x + x + kv + kv + x + x + x + f + f + f)


# ---- microbatches in flight ----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
def test_in_flight(schedule: str, microbatches: int) -> None:
    """Every microbatch in flight adds what the stage's layers keep: 34 s b h each."""
    settings = MEGATRON | {"layers": 8, "pp": 4, "schedule": schedule, "flash_attention": True}
    one = memory(**settings, global_batch_size=1)
    many = memory(**settings, global_batch_size=microbatches)
    alive = in_flight(make(schedule, 4, microbatches))
    for rank in range(4):
        wanted = {"1f1b": min(4 - rank, microbatches), "gpipe": microbatches}[schedule]
        assert alive[rank][rank] == wanted
        if 0 < rank < 3:  # stages of layers alone
            grown = many[rank]["activations"] - one[rank]["activations"]
            assert grown == (wanted - 1) * 2 * 34 * SBH


def test_interleaved() -> None:
    """Chunks each keep theirs: 1 + (p - 1) / (p m) of 1F1B's on rank 0 (arXiv 2205.05198)."""
    settings = MEGATRON | {"layers": 16, "flash_attention": True, "global_batch_size": 16}
    p, m = 4, 2
    plain = memory(**settings, pp=p)
    chunks = memory(**settings, pp=p, vpp=m)
    layer = 34 * SBH
    # Rank 1: 1F1B has p - 1 microbatches of 4 layers; chunks have 2 (p - 2) + (m - 1) p + 1 of 2.
    assert chunks[1]["activations"] - plain[1]["activations"] == layer * (9 * 2 - 3 * 4)
    grown = chunks[0]["activations"] / plain[0]["activations"]
    assert grown == pytest.approx(1 + (p - 1) / (p * m), rel=0.02)


# ---- over the rows of a step ---------------------------------------------------------------------


def classes(**settings: Any) -> tuple[RankClass, ...]:
    return compile(Run(**settings)).program.classes


RUNS: list[dict[str, Any]] = table_of("test_memory", "runs")


@pytest.mark.parametrize("settings", RUNS, ids=lambda s: Run(**s).describe())
def test_changes_add_up(settings: dict[str, Any]) -> None:
    """Row by row, in plain Python: what comes and goes makes the timeline."""
    for of in classes(**settings):
        start, allocated, freed = of.work.changes
        held, most = start.copy(), 0
        timeline = of.work.changes.in_use
        for row in range(len(of.tasks)):
            held = held + allocated[:, row]
            assert (held == timeline[:, row]).all()
            most = max(most, int(held.sum()))
            held = held - freed[:, row]
            assert (held >= 0).all()
        assert most == of.memory["peak"]
        stays = {c for c, size in zip(CATEGORIES, held, strict=True) if size > 64}  # scalars
        buffers = (
            {"communication"} if {"pipeline_caches", "ddp_bucket_cap_mb"} & {*settings} else ()
        )
        assert stays <= {"parameters", "gradients", "optimizer", *buffers}
        assert [of.memory[c] for c in STATES] == held[:3].tolist()


def kept(of: RankClass, microbatch: int) -> tuple[int, int]:
    """The first and the last row at which a microbatch's activations are held."""
    v = of.values
    mine = v.microbatch == microbatch
    mine &= v.category[v.value] == CATEGORIES.index("activations")
    return int(v.first[mine].min()), int(v.last[mine].max())


def test_weight_gradients_hold_activations_until_they_are_done() -> None:
    """Where backward is split, a layer's input waits for the half that makes weight gradients."""
    (of, *_) = classes(**LLAMA, pp=2, schedule="zb-h1", global_batch_size=4)
    t, v = of.tasks, of.values
    (index,) = (i for i, n in enumerate(v.names) if n == "attn_norm_out")
    weights = [i for i, n in enumerate(t.names) if n.endswith((".d_wq+wq.grad", ".d_wk+wk.grad"))]
    assert weights
    for i in range(len(v.value)):
        if v.name[v.value[i]] == index and v.microbatch[i] == 0:
            name = t.names[t.name[v.last[i]]]
            assert ".d_w" in name, name


def test_what_is_alive_at_the_peak_is_the_peak() -> None:
    for of in classes(**RUNS[1]):
        row = of.work.changes.peak_row
        found = over_time.groups_alive(of.values, row)
        assert sum(g.bytes for g in found) == of.memory["peak"]
        for category in CATEGORIES:
            here = sum(g.bytes for g in found if g.category == category)
            assert here == of.memory[category]
        points = over_time.samples(of, 50)
        assert points.held.sum(axis=0).max() == of.memory["peak"]
        assert (points.rows[1:] > points.rows[:-1]).all()


def test_an_allowance_is_beside_the_peak() -> None:
    (plain,), (of,) = memory(**LLAMA), memory(**LLAMA, memory_allowance="1.5 GiB")
    assert of == plain | {"allowance": 3 * 2**29}
    with pytest.raises(UserError, match="memory_allowance is 'much'"):
        memory(**LLAMA, memory_allowance="much")
