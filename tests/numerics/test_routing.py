"""Loads of experts: who sends and gets how many copies of tokens, and what ranks then do.

Toy sizes: two layers with experts, 4 experts, 2 of them for each of a rank's 16 tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import cases
from invariants import check as check_invariants
from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.lower.assembly.assemble import assemble
from stagewright.lower.assembly.lowered_block import StageBlock
from stagewright.lower.assembly.optimizer_step import ClipNorm
from stagewright.lower.blocks import lower_block
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.kernels.extent import extent_of
from stagewright.lower.recipe import sizes_of
from stagewright.lower.routing import ROWS, ExpertRows, Load, Routing
from stagewright.lower.variants import place_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind
from stagewright.run.settings import Run
from toys import MOE

M, X, BF16, COPIES = MOE.hidden_size, MOE.moe_ffn_hidden_size, 2, 16 * 2
LOADS = {"even": [1, 1, 1, 1], "one idle": [3, 1, 4, 0], "halves": [1, 3, 2, 2]}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Compile the toy with these loads, a list of numbers or one for each layer."""

    def compiled(load: object, model: ModelConfig = MOE, **settings: Any) -> CompiledRun:
        file = tmp_path / "load.json"
        file.write_text(json.dumps(load))
        given = {"expert_load": str(file)} if load else {}
        return compile(Run(model="moe", seq_length=16, **given, **settings), model)

    return compiled


def expert_flops(of: RankClass) -> int:
    """Of the products with experts' weights, whose kernels have several matrices."""
    t = of.tasks
    shapes = [t.shapes[s] if s >= 0 else None for s in t.shape]
    return sum(
        int(t.flops[i])
        for i, s in enumerate(shapes)
        if s is not None and s.kernel == "gemm" and dict(s.extents)["batch"] == 2
    )


def exchanged(of: RankClass, layer: int) -> dict[str, int]:
    """Bytes that a rank gives to each all-to-all of hidden states."""
    t = of.tasks
    mine = (t.collective == COLLECTIVES.index("all_to_all")) & (t.layer == layer)
    names = {i: t.names[t.name[i]].split(".")[1] for i in np.flatnonzero(mine)}
    return {name: int(t.local_bytes[i]) for i, name in names.items() if "probs" not in name}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_ranks_do_the_work_of_their_experts(run: Any, load: list[int]) -> None:
    """Two ranks with two experts each; 2 ranks send 16 tokens to 2 experts each."""
    compiled = run(load, dp=2, ep=2, fuse=False)
    rows = [2 * COPIES * sum(mine) // sum(load) for mine in (load[:2], load[2:])]
    classes = compiled.program.classes
    assert len(classes) == len(set(rows))
    for c in classes:
        for rank in c.ranks.tolist():
            # three products forward, six backward, in two layers
            assert expert_flops(c) == 9 * 2 * 2 * rows[rank] * M * X
            for layer in (0, 1):
                sent, got = COPIES * M * BF16, rows[rank] * M * BF16
                assert exchanged(c, layer) == {
                    "dispatched": sent, "returned": got, "d_returned": sent, "d_expert_in": got,
                }  # fmt: skip


def test_members_of_a_group_name_one_size(run: Any) -> None:
    """That of the even exchange in which every rank gets as much as the busiest one."""
    compiled = run([[3, 3, 2, 0], [1, 1, 1, 1]], dp=2, ep=2)
    busiest = {0: 48, 1: 32}
    check_program(compiled.program)
    for c in compiled.program.classes:
        t = c.tasks
        for i in np.flatnonzero(t.collective == COLLECTIVES.index("all_to_all")):
            width = 1 if "probs" in t.names[t.name[i]] else M
            assert t.comm_bytes[i] == busiest[int(t.layer[i])] * width * BF16


@cases
def test_classes_follow_the_load(
    run: Any, load: tuple[Any, ...], settings: dict[str, Any], classes: tuple[tuple[int, ...], ...]
) -> None:
    program = run(load, **settings).program
    assert tuple(tuple(c.ranks.tolist()) for c in program.classes) == classes
    check_invariants(program, seeds=(0,))


@cases
def test_an_even_load_is_none(run: Any, settings: dict[str, Any]) -> None:
    """A file in which all experts get as many gives the same program, column by column."""
    one, two = run([7, 7, 7, 7], **settings).program, run(None, **settings).program
    assert one.communicators == two.communicators
    for a, b in zip(one.classes, two.classes, strict=True):
        assert a.memory == b.memory
        assert (a.ranks == b.ranks).all()
        for column in ("kind", "name", "flops", "traffic", "comm_bytes", "local_bytes", "data"):
            assert (getattr(a.tasks, column) == getattr(b.tasks, column)).all(), column
        mine, theirs = ([t.shapes[s] if s >= 0 else s for s in t.shape] for t in (a.tasks, b.tasks))
        assert mine == theirs


@pytest.mark.parametrize("fuse", [True, False])
@cases
def test_work_and_memory_grow_with_rows(settings: dict[str, Any], fuse: bool) -> None:
    """What is added up for each row is what a program has in which all have so many rows."""
    asked = Run(model="moe", seq_length=16, fuse=fuse, **settings).resolved(MOE)
    compiled = compile(asked, MOE)
    mesh, plan = parallelization(asked, MOE)
    routing, sizes = Routing.of(asked, MOE, mesh, plan, 2 * 16), sizes_of(asked, MOE)
    order = compiled.order
    stages = place_blocks(asked, MOE)
    graphs = dict(
        zip(dict.fromkeys(k for s in stages for k, _ in s), compiled.blocks.values(), strict=True)
    )

    def make(rows: ExpertRows) -> Program:
        extent = extent_of(sizes, mesh, {ROWS: rows})
        blocks = {kind: lower_block(graph, asked, extent, kind) for kind, graph in graphs.items()}
        placed = [[StageBlock(blocks[kind], i, "") for kind, i in stage] for stage in stages]
        return assemble(placed, order, mesh, clip=ClipNorm())

    got = np.array([[24, 8, 40, 0][: routing.positions]] * 2) * routing.held
    load = Load(routing, [], np.array([32, 32]), got)
    for c in load.programs(make).classes:
        place = int(load.position()[c.ranks[0]])
        same = make(routing.rows(32, int(got[0, place]))).classes[c.pipeline_rank]
        kernel = c.tasks.kind == TaskKind.COMPUTE
        assert (c.tasks.flops == same.tasks.flops).all()
        assert (c.tasks.traffic == np.where(kernel, np.maximum(same.tasks.traffic, 1), 0)).all()
        assert (c.tasks.local_bytes == same.tasks.comm_bytes).all()
        assert (c.values.size == same.values.size).all()
        assert c.memory == same.memory
        for one, two in zip(c.tasks.shape, same.tasks.shape, strict=True):
            assert (one < 0) == (two < 0)
            assert one < 0 or c.tasks.shapes[one] == same.tasks.shapes[two]


def test_copies_that_do_not_divide(run: Any) -> None:
    """16 tokens for 3 of 6 experts each: 8 rows an expert; of 5 tokens, 2.5."""
    six = replace(MOE, num_experts=6, top_k=3, num_layers=1)
    compiled = compile(Run(model="moe", seq_length=5, dp=2, ep=2), six)
    (c,) = compiled.program.classes
    assert exchanged(c, 0) == dict.fromkeys(
        ("dispatched", "returned", "d_returned", "d_expert_in"), 5 * 3 * M * BF16
    )


# ---- capacity ------------------------------------------------------------------------------------


@cases
def test_capacity(
    run: Any, load: tuple[int, ...] | None, factor: float, padded: bool, rows: tuple[int, ...]
) -> None:
    settings = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": padded}
    compiled = run(load, dp=2, ep=2, fuse=False, **settings)
    for c in compiled.program.classes:
        for rank in c.ranks.tolist():
            assert expert_flops(c) == 9 * 2 * 2 * rows[rank] * M * X
            sent, got = sum(rows) // 2 * M * BF16, rows[rank] * M * BF16
            assert exchanged(c, 0) == {
                "dispatched": sent, "returned": got, "d_returned": sent, "d_expert_in": got,
            }  # fmt: skip


# ---- files ---------------------------------------------------------------------------------------


@cases
def test_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    compiled = compile(
        Run(model="moe", seq_length=16, dp=4, ep=4, expert_load=str(tmp_path / name)), MOE
    )
    assert compiled.load is not None
    assert compiled.load.got.tolist() == [[48, 16, 64, 0]] * 2
    assert compiled.load.sent.tolist() == [32, 32]


@cases
def test_numbers_in_a_run(given: list[Any], wanted: str) -> None:
    settings: dict[str, Any] = {"model": "moe", "seq_length": 16, "dp": 4, "ep": 4}
    for numbers in ([3, 1, 4, 0], [[3, 1, 4, 0]], [[3, 1, 4, 0], [0.375, 0.125, 0.5, 0]]):
        load = compile(Run(**settings, expert_load=numbers), MOE).load  # type: ignore[arg-type]
        assert load is not None
        assert load.got.tolist() == [[48, 16, 64, 0]] * 2
    with pytest.raises(UserError) as info:
        compile(Run(**settings, expert_load=given), MOE)  # type: ignore[arg-type]
    assert str(info.value).startswith(wanted)


def test_the_busiest_rank_as_a_number() -> None:
    """One of four ranks gets 1.5 times the mean of 32 copies a rank, the others share the rest."""
    settings: dict[str, Any] = {"model": "moe", "seq_length": 24, "dp": 4, "ep": 4}
    for given in ("1.5", 1.5):
        load = compile(Run(**settings, expert_load=given), MOE).load
        assert load is not None
        assert load.got.tolist() == [[72, 40, 40, 40]] * 2
    even = compile(Run(**settings, expert_load="1"), MOE).load
    assert even is not None
    assert even.got.tolist() == [[48] * 4] * 2
    for given in ("0.9", "2.5", "nan"):  # each of 4 experts gets at most one of a token's 2 copies
        with pytest.raises(UserError, match=r"here from 1 to 2; or a file"):
            compile(Run(**settings, expert_load=given), MOE)
    alone = compile(Run(model="moe", seq_length=24, expert_load="1.5"), MOE).load
    assert alone is not None
    assert alone.got.tolist() == [[48]] * 2


@cases
def test_files_that_are_refused(tmp_path: Path, text: str, wanted: str) -> None:
    refuses(tmp_path / "load", text, wanted)


def test_large_files_that_are_refused(tmp_path: Path) -> None:
    for text, wanted in (
        ("[" * 100000, "nested too deep; wanted plain JSON"),
        ("[1, 2, 3, " + "9" * 5000 + "]", "not JSON: Exceeds the limit"),
        ("[1, 2, 3, 1" + "0" * 400 + "]", "wanted a number from 0 to 1e18"),
        ("1,2,3,4\n" * 100000, "has 100000 lines"),
    ):
        refuses(tmp_path / "load", text, wanted)


def refuses(file: Path, text: str, wanted: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as info:
        compile(Run(model="moe", seq_length=16, dp=2, ep=2, expert_load=str(file)), MOE)
    assert str(info.value).startswith(f"{file}: ")
    assert len(str(info.value)) < 400
    assert wanted in str(info.value)


@cases
def test_what_is_no_file_of_loads(tmp_path: Path, name: str, wanted: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe1,2")
    (tmp_path / "huge").write_bytes(b"1" * 16_000_001)
    with pytest.raises(UserError, match=wanted):
        compile(Run(model="moe", seq_length=16, expert_load=str(tmp_path / name)), MOE)


@cases
def test_settings_that_contradict(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError) as info:
        compile(Run(model="moe", seq_length=16, **settings), MOE)
    assert str(info.value) == wanted


@pytest.mark.parametrize("name", ["expert_load", "moe_router_dtype", "moe_aux_loss_coeff"])
def test_dense_models_have_no_experts_to_set(name: str) -> None:
    value = {"expert_load": "x", "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0.5}[name]
    with pytest.raises(UserError, match=f"gpt2 is a dense model; {name}={value} needs a mixture"):
        compile(Run(model="gpt2", **{name: value}))


# ---- whole runs ----------------------------------------------------------------------------------


def test_a_layer_without_rows_still_runs(run: Any) -> None:
    """An idle expert's kernels are launched; its rank gives nothing to the exchange back."""
    compiled = run([3, 1, 4, 0], dp=4, ep=4)
    idle = next(c for c in compiled.program.classes if 3 in c.ranks)
    assert idle.tasks.traffic[idle.tasks.kind == TaskKind.COMPUTE].min() >= 1
    assert exchanged(idle, 0)["returned"] == 0
    check_invariants(compiled.program)
