"""Users' own modules and strategies: read, sharded by layouts alone, refused where they are ill."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import DOCS, EXAMPLES, cases
from invariants import check as check_program
from spmd import check as same_as_one_device
from spmd import random_values, single
from stagewright import blocks as model_blocks
from stagewright.algebra import notation
from stagewright.algebra.notation import tensor
from stagewright.blocks.text.stg import parse
from stagewright.errors import UserError
from stagewright.graph.node import Graph
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.lower.blocks import shard_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.strategy_table import table_of
from stagewright.lower.variants import BlockVariant
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer
from stagewright.parallel.degrees import parallelization
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run

SSM = (EXAMPLES / "ssm.stg").read_text()
FULLY_SHARDED = (EXAMPLES / "fully-sharded-tp.stg").read_text()


def toy(text: str, **sizes: int) -> ModelConfig:
    """A file's model with other numbers behind its sizes."""
    for name, number in sizes.items():
        old = next(line for line in text.split("\n") if line.startswith(f"size {name} ="))
        text = text.replace(old, f"size {name} = {number}")
    return parse(text, "toy.stg").model


def graph_of(model: ModelConfig, **settings: Any) -> tuple[Graph, Run]:
    run = Run(model=model.name, **settings).resolved(model)
    mesh, plan = parallelization(run, model)
    plan = dataclasses.replace(plan, table=table_of(run, model, {}))
    kind = BlockVariant("layer", model.layer(0))
    sizes, recipe = sizes_of(run, model), recipe_of(run, model)
    return shard_block(kind, run, model, mesh, plan, sizes, recipe), run


def collectives(graph: Graph, phase: str) -> list[str]:
    return [
        f"{n.op} {'+'.join(n['axes'])}"
        for n in graph
        if n.op in COLLECTIVE_OPS and n.phase == phase
    ]  # type: ignore[arg-type]


def computes_the_same(model: ModelConfig, **settings: Any) -> None:
    graph, run = graph_of(model, **settings)
    block = model_blocks.BLOCKS["layer"](model, recipe_of(run, model), model.layer(0))
    sizes = sizes_of(run, model)
    values = random_values(block.graph, sizes)
    mesh, _ = parallelization(run, model)
    axes = {a: n for a, n in reversed(mesh.axes) if n > 1}
    same_as_one_device(block.graph, graph, axes, sizes, values, single(block.graph, sizes, values))


# ---- the paper's two tables ----------------------------------------------------------------------

DEGREES = [{"dp": 2, "tp": 4}, {"tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2, "zero": 1}]
DEGREES += [{"dp": 2, "tp": 2, "zero": 3}, {"dp": 4, "zero": 2}]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("text", [SSM, FULLY_SHARDED], ids=["Table X", "Table XI"])
def test_the_papers_modules_compute_what_one_device_does(
    text: str, degrees: dict[str, int]
) -> None:
    sizes = {"D": 8, "R": 4, "P": 4} if text is SSM else {"D1": 8, "D2": 8}
    computes_the_same(toy(text, **sizes), seq_length=4, **degrees)


def test_table_x_reduces_once_and_its_backward_three_times() -> None:
    """dt1 forward, its gradient backward; B and C, whole on all of tp, sum their gradients."""
    graph, _ = graph_of(toy(SSM), tp=4, dp=2, seq_length=128)
    assert collectives(graph, "forward") == ["all_reduce tp"]
    names = [n.name for n in graph if n.op == "all_reduce" and n["axes"] == ("tp",) and n.name]
    assert sorted(set(names) - {"norm2"}) == ["d_toy.B", "d_toy.C", "d_toy.dt1", "toy.dt1"]


def test_table_xi_has_the_collectives_it_states_by_themselves() -> None:
    graph, _ = graph_of(toy(FULLY_SHARDED), tp=4, dp=2, seq_length=128)
    assert collectives(graph, "forward") == ["all_gather tp", "reduce_scatter tp"]
    said = FULLY_SHARDED.replace("AllGather[tp](X)", "identity(X)")
    said = said.replace("ReduceScatter[tp](Y*)", "identity(Y*)")
    assert said.count("identity") == 2
    silent, _ = graph_of(toy(said), tp=4, dp=2, seq_length=128)
    assert [collectives(silent, p) for p in ("forward", "backward")] == [
        collectives(graph, p) for p in ("forward", "backward")
    ]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.stg")), ids=lambda p: p.stem)
def test_shipped_examples_make_sound_programs(path: Path) -> None:
    model = sw.resolve(str(path))
    more = {} if model.bare else {"layers": 4}
    run = Run(model=str(path), tp=4, dp=2, seq_length=32, vocab=None, **more)
    compiled = sw.compile(run)
    check_program(compiled.program)
    assert {int(k) for c in compiled.program.classes for k in c.tasks.kind} >= {
        TaskKind.COMPUTE,
        TaskKind.COLLECTIVE,
    }


# ---- a module in a model -------------------------------------------------------------------------

GATED = (EXAMPLES / "gated-mixer.stg").read_text()
TOY = {"num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4}
TOY |= {"num_query_groups": 2, "kv_channels": 4, "vocab_size": 16}


def gated() -> ModelConfig:
    lines = "".join(f"\n{name} = {value}" for name, value in TOY.items())
    return parse(GATED + lines, "gated.stg").model


@pytest.mark.parametrize(
    "degrees", [{"tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}], ids=str
)
def test_a_module_is_a_part_of_layers(degrees: dict[str, Any]) -> None:
    model = gated()
    assert [model.layer(i).mixer for i in range(4)] == ["gated"] * 3 + ["global"]
    computes_the_same(model, seq_length=4, **degrees)


def test_sequence_parallelism_comes_to_a_users_module_by_itself() -> None:
    """The module says that h is whole along the sequence: gathered before, scattered after."""
    graph, _ = graph_of(gated(), tp=2, sequence_parallel=True, seq_length=4)
    mixer = [n for n in graph if n.op in COLLECTIVE_OPS and n.phase == "forward"]
    assert [n.op for n in mixer] == ["all_gather", "reduce_scatter"] * 2


def test_a_manifest_repeats_a_module(tmp_path: Path) -> None:
    run = {"tp": 2, "layers": 4, "seq_length": 8}
    compiled = sw.compile(Run(model=str(EXAMPLES / "gated-mixer.stg"), vocab=64, **run))
    sw.generate(compiled, str(tmp_path / "one"))
    again = tmp_path / "manifest.json"
    found = json.loads((tmp_path / "one" / "manifest.json").read_text())
    found["run"]["model"] = "gone.stg"
    again.write_text(json.dumps(found))
    from stagewright.trace.run_manifest import load_model

    model = load_model(again)
    assert model is not None
    assert model.modules[0].text == GATED
    sw.generate(sw.compile(Run.load(again), model), str(tmp_path / "two"))
    for file in (tmp_path / "one").glob("*.et"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


# ---- from Python ---------------------------------------------------------------------------------


def test_python_function_and_table() -> None:
    def fold(b: Any, h: Any) -> Any:
        w, v = b.param("w", "M", "F"), b.param("v", "F", "M")
        return b.linear(
            "bsf,fm->bsm", b.act(b.linear("bsm,mf->bsf", h, w, "up"), "relu"), v, "down"
        )

    model = sw.resolve("llama3-8b").with_module(fold, mlps=True)
    assert model.layer(0) == Layer("global", "fold")
    run = Run(model="llama3-8b", tp=8, layers=2, seq_length=64)
    whole = sw.compile(run, model)
    split = sw.compile(run, model, table={"w": "[M, F/tp]", "v": "[F/tp, M]"})
    check_program(split.program)
    assert whole.parameters == split.parameters
    per_rank = [sum(int(c.tasks.flops.sum()) for c in x.program.classes) for x in (whole, split)]
    assert per_rank[1] < per_rank[0]


def test_a_table_may_say_what_is_said_anyway(tmp_path: Path) -> None:
    rows = tmp_path / "tp.txt"
    rows.write_text("# Megatron's columns\nwq [M, A/tp, D]\nwo [A/tp, D, M]  # rows\n")
    settings: dict[str, Any] = {"model": "llama3-8b", "tp": 4, "layers": 2, "seq_length": 64}
    plain = sw.compile(Run(**settings))
    told = sw.compile(Run(**settings, strategy=str(rows)))
    assert plain.graph_text() == told.graph_text()
    whole = sw.compile(
        Run(**settings), table={"w_up": "[M, F]", "w_gate": "[M, F]", "w_down": "[F, M]"}
    )
    assert whole.graph_text() != plain.graph_text()


# ---- what is refused -----------------------------------------------------------------------------


@cases
def test_refuses(text: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.stg"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as info:
        sw.compile(Run(model=str(path), seq_length=8))
    assert wanted in str(info.value)
    assert str(path) in str(info.value)
    assert str(info.value).count("cannot read the size") <= 1
    assert len(str(info.value)) < 600


def test_a_module_may_leave_nothing_to_compute(tmp_path: Path) -> None:
    path = tmp_path / "mine.stg"
    path.write_text("input x[B, S]\ny = add(x)")  # a sum of one value is that value
    compiled = sw.compile(Run(model=str(path), seq_length=8))
    assert not compiled.program.classes[0].values.value.size


def test_refuses_what_does_not_divide_or_need_it() -> None:
    with pytest.raises(UserError, match=r"tp=3 does not divide D = 5120 of ssm\.A \[D, P\]"):
        sw.compile(Run(model=str(EXAMPLES / "ssm.stg"), tp=3, seq_length=8))
    text = SSM.replace("AllReduce(einsum", "AllReduce[dp](einsum")
    with pytest.raises(UserError, match="line 16, column 19: all_reduce of a value that is not"):
        sw.compile(Run(model="toy", tp=2, dp=2, seq_length=8), toy(text))
    run = Run(model="llama3-8b", layers=1, tp=2, seq_length=8)
    with pytest.raises(UserError, match="has no value 'w_upp'; did you mean 'w_up'"):
        sw.compile(run, table={"w_upp": "[M, F/tp]"})
    with pytest.raises(UserError, match=r"w_up \[M\] has 1 dims, but in llama3-8b it is \[M, F\]"):
        sw.compile(run, table={"w_up": "[M]"})
    with pytest.raises(UserError, match="table: w_up: a dim without a size"):
        sw.compile(run, table={"w_up": "[M, /tp]"})


def test_tables_are_read_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("wq [M, A/tp, D]\n\n# more\nwo A/tp\n")
    with pytest.raises(UserError, match="line 4, column 1: got 'wo A/tp', wanted a name"):
        notation.table(path)
    path.write_text("wq [M]\nwq [M]\n")
    with pytest.raises(UserError, match="line 2, column 1: wq comes twice"):
        notation.table(path)
    assert str(tensor("[B/dp/cp, 4*(S + 1) @ 1/tp]")) == "[B/dp/cp, 4*(S + 1) @ 1/tp]"


def test_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "guides/own-model.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    exec(compile(code, "own-model.md", "exec"), {})
    assert capsys.readouterr().out == "mlp_residual: [B, S, M]\n"
    shown = next(b for b in text.split("```text\n") if b.startswith("# fully-sharded.stg"))
    shown = shown.split("```")[0]
    said, silent = (graph_of(toy(t), tp=4, dp=2, seq_length=8)[0] for t in (FULLY_SHARDED, shown))
    assert [n.op for n in said] == [n.op for n in silent]


def test_what_a_module_does_not_use_is_refused() -> None:
    for old, new, idle in (
        ("= einsum[bsd,d->bsd](y0, D)", "= identity(y0)", r"ssm\.D"),
        ("dB = einsum[bsp,bsd->bsdp](B, dt)", "dB = einsum[bsp,bsd->bsdp](C, dt)", "B"),
    ):
        model = parse(SSM.replace(old, new), "ssm.stg").model
        with pytest.raises(UserError, match=rf"y does not depend on {idle}; use it, or leave it"):
            sw.compile(Run(model="ssm.stg", layers=1, seq_length=8), model)
