"""Small runs, ways to execute them, and durations that are drawn: what timelines are tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Int
from stagewright.program.columns import Program, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.collectives import seconds_by_algorithm
from stagewright.time.network import Machine, Placement
from stagewright.time.simulate.memory import MemoryTimeline
from stagewright.time.simulate.order import deferred_past_backward
from stagewright.time.simulate.timeline import Lane, table_rows
from stagewright.time.simulate.units import CarriedDeps, Units

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
    "sums": GPT | {"tp": 2, "fuse": False, "global_batch_size": 4},
    "frozen": SMALL | {"layers": 4, "pp": 2, "dp": 2, "schedule": "zb-h1", "zero": 3,
                       "bucket": "parameter", "lora_rank": 4, "global_batch_size": 8,
                       "lora_target_modules": ("layer0.linear_fc1", "layer3.o_proj")},
    "kept": SMALL | {"layers": 4, "pp": 2, "vpp": 2, "dp": 2, "zero": 3,
                     "framework": "torchtitan", "global_batch_size": 8},
    "lots": GPT | {"layers": 4, "pp": 2, "vpp": 2, "dp": 2, "schedule": "v-half",
                   "grad_reduce": "microbatch", "bucket": "parameter", "global_batch_size": 12},
    "vocab": SMALL | {"layers": 2, "pp": 2, "schedule": "vocab-1", "global_batch_size": 4},
    "halves": SMALL | {"layers": 4, "pp": 2, "tp": 2, "vpp": 2, "schedule": "v-half-vocab-1",
                       "global_batch_size": 4},
    "ring": MIXTRAL | {"cp": 2, "ep": 2, "expert_load": 1.3, "global_batch_size": 2},
    "wide": MIXTRAL | SP | {"tp": 2, "dp": 2, "etp": 4, "ep": 1, "zero": 1, "global_batch_size": 4},
    "cp": SMALL | {"layers": 4, "cp": 2, "zero": 2, "bucket": "parameter", "global_batch_size": 3},
    "fp8": SMALL | SP | {"tp": 2, "dp": 2, "pp": 2, "zero": 1, "precision": "fp8",
                         "global_batch_size": 4},
    "again": SMALL | SP | {"tp": 2, "dp": 2, "zero": 3, "global_batch_size": 4},
}  # fmt: skip
WAYS = {
    "overlap": Execution(),
    "one": Execution(streams="one"),
    "no dp": Execution(no_overlap=frozenset({"dp"})),
    "none": Execution(no_overlap=frozenset({"tp", "cp", "ep", "dp", "pp"})),
    "late": Execution(prefetch=0),
    "ahead": Execution(prefetch=3),
    "next": Execution(overlap_param_gather=True),
}


SHOWN = [
    ("sums", "overlap"),  # sums of sums of reduced gradients, on the stream of the reductions
    ("frozen", "late"),  # weights that only the second half of a backward reads
    ("frozen", "ahead"),  # which are gathered in the first half, where the second follows at once
    ("lots", "overlap"),  # reductions of two actions without a kernel between are one lot
    ("vocab", "overlap"),  # small kernels on the stream of a communicator
    ("vocab", "late"),  # broadcasts, which have no inputs and gather no weights
    ("halves", "ahead"),  # a broadcast that only an all-gather reads
    ("ring", "overlap"),  # neighbours on a ring whose experts have unequal loads
    ("wide", "no dp"),  # axes of dp that are those of etp, too
    ("cp", "overlap"),  # reductions over cp alone are limited
    ("fp8", "next"),  # casts of weights, which wait for updated parameters
    ("again", "overlap"),  # gradients of ZeRO-3 that are reduced a second time
]
"""Runs and ways that show what few of them do."""


def durations(program: Program, seed: int, alike: bool) -> list[Int]:
    """Ticks by class and row of its actions; `alike`: rows of one name take the same."""
    random = np.random.default_rng(seed)
    by_name = random.integers(1, 10**7, 10**4)
    known: dict[int, Int] = {}
    result: list[Int] = []
    for of in program.classes:
        t = of.work.actions.tasks
        if id(t) not in known:
            ticks = by_name[t.name] if alike else random.integers(1, 10**7, len(t))
            moves = by_name[t.slot] % 997 + t.comm_bytes % 10**6
            known[id(t)] = np.where(t.slot >= 0, moves, ticks)
        result.append(known[id(t)])
    return result


def row_by_row(program: Program) -> Program:
    """The program with one action per class, which has all its rows."""
    classes = [replace(of, work=of.work.with_tasks(of.tasks)) for of in program.classes]
    return replace(program, classes=tuple(classes))


def by_row(program: Program, by_action: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """By class and row of its tasks, what is given by row of its actions."""
    pairs = zip(program.classes, by_action, strict=True)
    return [given[table_rows(of.work)] for of, given in pairs]


def by_action(program: Program, by_row: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """By class and row of its actions, what is given by row of its tasks: equal in all copies."""
    result: list[NDArray[Any]] = []
    for of, given in zip(program.classes, by_row, strict=True):
        rows = table_rows(of.work)
        each = np.zeros(len(of.work.actions.tasks), given.dtype)
        each[rows] = given
        assert np.array_equal(each[rows], given), "copies of an action differ"
        result.append(each)
    return result


def one_unit(program: Program, tasks: Tasks, execution: Execution) -> Units:
    """All rows of a rank as one unit: the oracle of units of actions."""
    size = len(tasks)
    zeros, none = np.zeros(size, np.int64), np.zeros(0, np.int64)
    return Units(
        tasks, deferred_past_backward(program, tasks, execution), np.arange(size), zeros, zeros,
        tasks.reads, CarriedDeps(none, none, none, none), ((0,),), np.arange(size),
        np.zeros((1, 1), np.int64),
    )  # fmt: skip


def algorithm_of(op: str, comm_bytes: int, group: Placement, machine: Machine) -> str:
    """The fastest algorithm of a collective."""
    options = seconds_by_algorithm(op, comm_bytes, group, machine)
    return min(options, key=lambda name: float(options[name]))


def memory_by_row(lane: Lane) -> MemoryTimeline:
    """The memory of a lane over time, counted from the times of its rows and their values."""
    start, allocated, freed = lane.rank_class.work.changes
    rows = lane.issue.rows
    ready, end = np.empty_like(lane.ready), np.empty_like(lane.end)
    ready[rows], end[rows] = lane.ready, lane.end
    come, go = allocated.any(axis=0), freed.any(axis=0)
    ticks = np.concatenate([[0], end[go], ready[come]])
    changes = np.concatenate([start[:, None], -freed[:, go], allocated[:, come]], axis=1)
    order = np.argsort(ticks, kind="stable")
    last = np.flatnonzero(np.diff(ticks[order], append=ticks.max() + 1))
    return MemoryTimeline(ticks[order[last]], changes[:, order].cumsum(axis=1)[:, last])
