"""Runs share graphs and blocks with numbers, and get what they would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from helpers import cases, table_of, times
from stagewright.errors import UserError
from stagewright.lower import blocks, training
from stagewright.lower.assembly.lowered_block import LoweredBlock
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from sweep import draw

LLAMA: dict[str, Any] = {
    "model": "llama2-7b", "layers": 8, "seq_length": 512, "tp": 2, "pp": 2, "dp": 2,
    "global_batch_size": 8,
}  # fmt: skip
MIXTRAL = LLAMA | {"model": "mixtral-8x7b", "ep": 2, "tp": 1, "dp": 4}


def forget() -> None:
    """Empty the memos."""
    for memo in (blocks.build_for_one_device, blocks.sharded, blocks.lowered):
        memo.cache_clear()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[LoweredBlock]]:
    """Compiles a run, and returns its distinct blocks with numbers."""
    found: list[LoweredBlock] = []
    assemble = training.TrainingStep.assemble

    def noting(step: training.TrainingStep, of: dict[Any, LoweredBlock], layers: Any) -> Any:
        found.extend(of.values())
        return assemble(step, of, layers)

    monkeypatch.setattr(training.TrainingStep, "assemble", noting)

    def compiled(**settings: Any) -> list[LoweredBlock]:
        found.clear()
        compile(Run(**settings))
        return [*found]

    return compiled


@pytest.mark.parametrize("run", [LLAMA, MIXTRAL], ids=["dense", "experts"])
@cases
def test_runs_share_graphs(run: dict[str, Any], changed: dict[str, Any]) -> None:
    first, second = (compile(Run(**settings)) for settings in (run, run | changed))
    assert {*map(id, first.blocks.values())} == {*map(id, second.blocks.values())}


def similar(dice: random.Random, run: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run of the same model that differ in few of them."""
    while (other := draw(dice))["model"] != run["model"]:
        pass
    differ = sorted(x for x in {**run, **other} if run.get(x) != other.get(x))
    some = dice.sample(differ, min(len(differ), dice.choice((1, 1, 2, 3))))
    rest = {x: y for x, y in run.items() if x not in some}
    return rest | {x: other[x] for x in some if x in other}


def possible(settings: dict[str, Any]) -> CompiledRun | None:
    """A run; None where it is refused."""
    try:
        return compile(Run(**settings))
    except UserError:
        return None


def columns(program: Program) -> Iterator[object]:
    """All that a program consists of."""
    yield from (program.mesh, program.communicators, program.peers)
    for of in program.classes:
        yield from (of.pipeline_rank, of.ranks.tobytes(), of.memory)
        for table in (of.tasks, of.values):
            for field in fields(table):
                value = getattr(table, field.name)
                yield value.tobytes() if isinstance(value, np.ndarray) else value


def check_alone(settings: dict[str, Any], after: CompiledRun) -> None:
    """Compare a run that was compiled after others with the same run, compiled first."""
    forget()
    alone = compile(Run(**settings))
    assert alone.blocks == after.blocks, settings
    assert [*columns(alone.program)] == [*columns(after.program)], settings


@cases
def test_a_setting_that_changes_a_block_is_part_of_what_it_is_known_by(
    changed: dict[str, Any],
) -> None:
    settings = LLAMA | {"cp": 2, "sequence_parallel": True, "zero": 1}
    forget()
    before = compile(Run(**settings))
    after = compile(Run(**settings | changed))
    assert [*columns(before.program)] != [*columns(after.program)]
    check_alone(settings | changed, after)


@pytest.mark.parametrize("seed", range(times(4)))
def test_a_run_after_others_is_compiled_as_if_it_were_the_first(seed: int) -> None:
    """Runs that differ in few settings, one after another; then each with empty memos."""
    dice = random.Random(seed)
    forget()
    while (first := possible(settings := draw(dice))) is None:
        pass
    runs = [(settings, first)]
    for _ in range(20):
        changed = similar(dice, settings)
        after = possible(changed)
        if after is not None:
            settings = changed
            runs.append((changed, after))
    for settings, after in runs:
        check_alone(settings, after)


# ---- actions of ranks ----------------------------------------------------------------------------


SIZES = {"seq_length": 64, "micro_batch_size": 1, "vocab": 240, "layers": 8}
DENSE: dict[str, Any] = {"model": "llama3-8b", "global_batch_size": 16} | SIZES

RUNS: dict[str, dict[str, Any]] = table_of("test_memo", "runs")


def program_of(settings: dict[str, Any]) -> Program:
    return compile(Run(**settings)).program


def test_microbatches_add_copies_only():
    few, many = (program_of(DENSE | {"pp": 4, "global_batch_size": n}) for n in (8, 64))
    for a, b in zip(few.classes, many.classes, strict=True):
        assert np.array_equal(a.work.actions.begin, b.work.actions.begin)
        assert len(b.work.order.action) - len(a.work.order.action) == 2 * 56


def test_stages_of_a_class_share_actions():
    few, many = (program_of(DENSE | {"pp": pp, "vpp": 2, "layers": 4 * pp}) for pp in (4, 8))
    assert len({id(of.work.actions) for of in many.classes}) == 1
    # First, inner and last stages; ranks with the first one, with none of these, with the last one.
    counts = [len(program.classes[0].work.actions.begin) - 1 for program in (few, many)]
    assert counts == [3 * 4 + 3] * 2


def test_replicas_of_a_mirrored_pipeline_are_shards():
    """241 rows of the vocabulary on four ranks: 61, 61, 61 and 58, the last pipeline rank last."""
    program = program_of(RUNS["DualPipe, uneven shards"])
    assert [of.ranks.tolist() for of in program.classes] == [[0, 1], [2], [3]]
    sizes = [of.memory["optimizer"] for of in program.classes]
    values_per_row = 4 * 4096  # two moments, of the embedding and of the output layer
    assert [sizes[0] - size for size in sizes] == [0, 0, 3 * values_per_row * 4]
