"""Prefill and decode on ranks of their own: who gets which part of the cache, from whom, when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases, table_of
from stagewright.check.verify import verify
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.disaggregated import heads_held_by, prefill_run
from stagewright.model.presets import PRESETS
from stagewright.program.columns import COLLECTIVES, TaskKind
from stagewright.run.settings import Run

CASES: dict[str, dict[str, Any]] = table_of("test_disaggregated", "cases")
CONTEXT = 6400  # tokens of each request: whole blocks


def asked(**fields: Any) -> Run:
    return Run(**{"model": "llama3.1-70b", "mode": "decode", "layers": 6} | fields)


def resolved(run: Run) -> Run:
    return run.resolved(PRESETS[run.model].with_overrides(num_layers=run.layers))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> CompiledRun:
    return compile(asked(context_length=CONTEXT, **CASES[request.param]))


def moved(compiled: CompiledRun, kind: TaskKind) -> Counter[int]:
    """Bytes that each rank sends or receives, across."""
    found: Counter[int] = Counter()
    for c in compiled.program.classes:
        for row in np.flatnonzero(c.tasks.kind == kind):
            slot = int(c.tasks.slot[row])
            if compiled.program.peers[slot].axis == "cache":
                for r in c.ranks.tolist():
                    found[r] += int(c.tasks.comm_bytes[row])
    return found


def test_every_rank_gets_its_part_of_the_cache(case: CompiledRun) -> None:
    """What it holds of the requests, without the place of the new token."""
    run, model = case.run, case.model
    of_head = 2 * model.kv_channels
    held = max(1, model.num_query_groups // run.tp)
    if model.kv_lora_rank:
        of_head, held = model.kv_lora_rank + model.qk_rope_head_dim, 1
    of_head *= 1 if run.kv_cache_dtype == "fp8" else 2
    requests = (run.batch_size or 0) // run.dp
    kept = sum(
        4096 if model.layer(i).mixer == "local" else CONTEXT for i in range(model.num_layers)
    )
    start = run.world_size - run.tp * run.dp * run.pp
    got, gave = moved(case, TaskKind.RECV), moved(case, TaskKind.SEND)
    want = requests * kept // run.pp * held * of_head
    assert got == dict.fromkeys(range(start, run.world_size), want)
    assert sum(gave.values()) == sum(got.values())
    assert max(gave) < start


def test_each_side_does_what_it_does_alone(case: CompiledRun) -> None:
    run = case.run
    alone = compile(run.model_copy(update={"prefill": None})), compile(prefill_run(run))
    for column in ("flops", "traffic"):
        total = sum(
            int(getattr(c.tasks, column).sum()) * len(c.ranks)
            for one in alone
            for c in one.program.classes
        )
        both = case.program.classes
        assert total == sum(int(getattr(c.tasks, column).sum()) * len(c.ranks) for c in both)
    groups = Counter(len(members) for members in case.program.groups().values())
    assert groups == Counter(
        len(members) for one in alone for members in one.program.groups().values()
    )


def test_what_waits_for_what() -> None:
    """A send for what writes its layer's cache, attention for what its layer receives."""
    compiled = compile(asked(context_length=64, **CASES["alike"]))
    first, second = (c.tasks for c in compiled.program.classes)

    def needed(tasks: Any, row: int) -> list[int]:
        return tasks.data[tasks.data_ptr[row] : tasks.data_ptr[row + 1]].tolist()

    for row in np.flatnonzero(first.kind == TaskKind.SEND):
        layer = first.layer[row]
        writes = [i for i in needed(first, row) if first.layer[i] == layer]
        assert ["cache" in first.ops[first.op[i]].split("+") for i in writes] == [True] * 2
        assert row > np.flatnonzero(first.kind == TaskKind.COMPUTE)[-1]
    for row in np.flatnonzero(second.kind == TaskKind.RECV):
        users = [i for i in range(len(second)) if row in needed(second, i)]
        assert [second.ops[second.op[i]] for i in users] == ["cached_attention"]
        assert not needed(second, row)
    reduced = second.collective == COLLECTIVES.index("all_reduce")
    assert reduced.sum() == 1 + 2 * 6


def test_traces_are_sound_and_made_again(tmp_path: Path) -> None:
    """Groups, messages and the run of all ranks, from the files alone."""
    compiled = compile(asked(context_length=96, **CASES["dealt otherwise"]))
    sw.generate(compiled, str(tmp_path / "one"))
    report = verify(tmp_path / "one")
    assert not report.findings
    again = compile(Run.load(tmp_path / "one" / "manifest.json"))
    sw.generate(again, str(tmp_path / "two"))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@cases
def test_refused(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError) as info:
        compile(asked(**fields))
    assert str(info.value).startswith(wanted)


def test_unknown_settings_of_prefill() -> None:
    with pytest.raises(UserError, match=r"prefill: unknown setting 'tpp'"):
        Run.load(None, {"model": "gpt2", "mode": "decode", "prefill": {"tpp": 3}})


@pytest.mark.parametrize(
    ("heads", "ranks", "places"), [(2, 8, 4), (2, 8, 2), (1, 8, 4), (8, 32, 16)]
)
def test_copies_of_a_head_send_as_evenly_as_they_can(heads: int, ranks: int, places: int) -> None:
    sent: Counter[int] = Counter()
    for place in range(places):
        sent.update(dict(heads_held_by(heads, ranks, place, places)))
    each = [sent[rank] for rank in range(ranks)]
    assert max(each) - min(each) <= 1
