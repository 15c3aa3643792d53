"""Timelines against the slow truth, and against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagewright.arrays import Int
from stagewright.lower.training import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.run.settings import Run
from stagewright.time.simulate.issue import Execution
from stagewright.time.simulate.timeline import TICK, Timeline, timeline

from . import eventsim

SMALL: dict[str, Any] = {"model": "llama3-8b", "layers": 2, "seq_length": 64, "streams": "separate"}
SP = {"sequence_parallel": True}
GPT = SMALL | {"model": "gpt2"}
MIXTRAL = SMALL | {"model": "mixtral-8x7b"}
RUNS: dict[str, dict[str, Any]] = {
    "dp": SMALL | {"dp": 2, "global_batch_size": 4},
    "sp": SMALL | SP | {"tp": 2, "dp": 2, "zero": 1, "global_batch_size": 4},
    "pp": SMALL | {"layers": 4, "pp": 4, "global_batch_size": 6},
    "vpp": SMALL | {"layers": 4, "pp": 2, "vpp": 2, "tp": 2, "dp": 2, "global_batch_size": 8},
    "zb": SMALL | {"layers": 4, "pp": 4, "schedule": "zb-h1", "global_batch_size": 6},
    "dual": SMALL | {"layers": 4, "pp": 4, "schedule": "dualpipe", "global_batch_size": 8},
    "zero3": SMALL | {"dp": 2, "cp": 2, "zero": 3, "global_batch_size": 4},
    "zero2": SMALL | {"dp": 2, "tp": 2, "zero": 2, "global_batch_size": 4},
    "offload": SMALL | {"layers": 4, "cpu_offloading_num_layers": 2, "optimizer_cpu_offload": True,
                        "dp": 2, "zero": 1, "global_batch_size": 4},
    "apart": SMALL | {"mode": "decode", "prefill": {"tp": 2, "pp": 2}, "tp": 2, "dp": 2,
                      "batch_size": 8, "context_length": 64, "seq_length": None},
    "tied": GPT | {"layers": 4, "pp": 4, "dp": 2, "global_batch_size": 8},
    "moe": MIXTRAL | SP | {"tp": 2, "dp": 4, "ep": 4, "zero": 1, "global_batch_size": 8},
}  # fmt: skip
WAYS = {
    "overlap": Execution(),
    "one": Execution(streams="one"),
    "no dp": Execution(no_overlap=frozenset({"dp"})),
    "none": Execution(no_overlap=frozenset({"tp", "cp", "ep", "dp", "pp"})),
    "late": Execution(prefetch=0),
    "ahead": Execution(prefetch=3),
    "next": Execution(overlap_param_gather=True),
    "slow": Execution(slowdown=0.25, overlap_param_gather=True),
}


def programs(name: str) -> Program:
    return compile(Run(**RUNS[name])).program


def durations(program: Program, seed: int, alike: bool) -> list[Int]:
    """Ticks by class and row; `alike`: rows of one name take the same."""
    random = np.random.default_rng(seed)
    by_name = random.integers(1, 10**7, 10**4)
    result: list[Int] = []
    for of in program.classes:
        t = of.tasks
        ticks = by_name[t.name] if alike else random.integers(1, 10**7, len(t))
        result.append(np.where(t.slot >= 0, by_name[t.slot] % 997 + t.comm_bytes % 10**6, ticks))
    return result


def compare(
    program: Program, ticks: list[Int], how: Execution, factors: dict[int, float]
) -> Timeline:
    line = timeline(program, [t * TICK for t in ticks], how, factors)
    truth = eventsim.simulate(program, ticks, how, factors)
    slack = 0 if how.slowdown == 0 else 10 * len(truth[0][0])
    seen = 0
    for lane in line.lanes:
        for rank in lane.ranks.tolist():
            start, end = truth[rank]
            rows = lane.issue.rows
            assert abs(lane.end - np.array([int(end[r]) for r in rows])).max() <= slack
            own = lane.kind != TaskKind.RECV
            begin = np.array([int(start[r]) for r in rows])
            assert abs(lane.begin - begin)[own].max() <= slack
            seen += 1
    assert seen == program.mesh.world_size
    return line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_timeline_is_that_of_the_event_simulation(run: str, way: str) -> None:
    program = programs(run)
    for alike in (True, False) if way == "overlap" else (len(run + way) % 2 == 0,):
        compare(program, durations(program, 1, alike), WAYS[way], {})


@pytest.mark.parametrize("run", RUNS)
def test_stragglers(run: str) -> None:
    program = programs(run)
    ticks = durations(program, 2, True)
    line = compare(program, ticks, Execution(), {program.mesh.world_size - 1: 1.5})
    random = np.random.default_rng(3)
    every = dict(enumerate((1 + random.random(program.mesh.world_size)).tolist()))
    some = compare(program, ticks, Execution(slowdown=0.1), every)
    assert len(line.lanes) <= len(some.lanes) == program.mesh.world_size
