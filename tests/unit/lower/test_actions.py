"""Distinct actions and their order: copies are the rows of ranks, their bytes the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagewright.lower.assembly.live_ranges import representative_order
from stagewright.lower.assembly.work import assembled
from stagewright.lower.compile import compile
from stagewright.program.columns import CATEGORIES, KINDS, Program, RankClass, Values
from stagewright.program.memory import alive, deltas, peak_row
from stagewright.run.settings import Run

SIZES = {"seq_length": 64, "micro_batch_size": 1, "vocab": 240, "layers": 8}
DENSE: dict[str, Any] = {"model": "llama3-8b", "global_batch_size": 16} | SIZES
TIED: dict[str, Any] = {"model": "gpt2", "global_batch_size": 16} | SIZES
EXPERTS: dict[str, Any] = {"model": "mixtral-8x7b", "global_batch_size": 32} | SIZES
FSDP = {"framework": "torchtitan", "zero": 3, "dp": 2}

RUNS: dict[str, dict[str, Any]] = {
    "one rank": DENSE | {"global_batch_size": 3},
    "one microbatch": DENSE | {"pp": 2, "global_batch_size": 1},
    "gpipe": DENSE | {"pp": 4, "schedule": "gpipe"},
    "1f1b, distributed optimizer": DENSE | {"pp": 4, "dp": 2, "zero": 1, "tp": 2},
    "interleaved": DENSE | {"pp": 2, "vpp": 2, "sequence_parallel": True, "tp": 2},
    "tied tables": TIED | {"pp": 4, "dp": 2, "zero": 1},
    "split backward": DENSE | {"pp": 4, "schedule": "zb-h1", "dp": 2, "zero": 2},
    "a V": DENSE | {"pp": 4, "vpp": 2, "schedule": "zbv"},
    "a V of equal halves": TIED | {"pp": 2, "vpp": 2, "schedule": "v-half"},
    "DualPipe": EXPERTS | {"pp": 4, "dp": 2, "ep": 2, "schedule": "dualpipe", "zero": 1},
    "DualPipeV": EXPERTS | {"pp": 2, "vpp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev"},
    "DualPipe, uneven shards": EXPERTS | FSDP | {"pp": 2, "schedule": "dualpipe", "vocab": 241},
    "shared vocabulary": DENSE | {"pp": 4, "schedule": "vocab-1"},
    "interlaced vocabulary": DENSE | {"pp": 2, "dp": 2, "schedule": "interlaced", "zero": 3},
    "reduced each microbatch": DENSE | {"pp": 2, "dp": 2, "zero": 2, "grad_reduce": "microbatch"},
    "FSDP": DENSE | FSDP,
    "HSDP": DENSE | {"dp": 4, "dp_shard": 2, "zero": 3},
    "FSDP in a pipeline": DENSE | FSDP | {"pp": 4, "schedule": "1f1b"},
    "FSDP of several stages": DENSE | FSDP | {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "FSDP, split backward": DENSE | FSDP | {"pp": 2, "vpp": 2, "schedule": "zbv"},
    "kept outputs": DENSE | {"pp": 4, "schedule": "1f1b", "pipeline_caches": True},
    "kept graphs": DENSE | {"pp": 2, "vpp": 2, "schedule": "zbv", "pipeline_caches": True},
    "one bucket": TIED | {"pp": 2, "vpp": 2, "dp": 2, "zero": 1, "bucket": "rank"},
    "DDP": DENSE | {"dp": 4, "ddp_bucket_cap_mb": 25},
    "on the host": DENSE | {
        "pp": 2, "dp": 2, "zero": 1, "cpu_offloading_num_layers": 2, "optimizer_cpu_offload": True
    },
    "recomputed": DENSE | {"pp": 2, "recompute": "full", "operators": "eager"},
    "low-rank adapters": DENSE | {"pp": 2, "lora_rank": 4},
    "ring attention": DENSE | {"cp": 4, "pp": 2},
    "uneven experts": EXPERTS | {"dp": 4, "ep": 4, "pp": 2, "vpp": 2, "expert_load": 2.0},
    "decode": {
        "model": "llama3-8b", "mode": "decode", "pp": 2, "tp": 2, "batch_size": 8,
        "context_length": 64,
    },
}  # fmt: skip
SAME = ("kind", "op", "phase", "flops", "traffic", "collective", "dtype", "comm_bytes", "slot")


def program_of(settings: dict[str, Any]) -> Program:
    return compile(Run(**settings)).program


@pytest.mark.parametrize("name", RUNS)
def test_copies_of_actions_are_the_rows_of_the_rank(name: str):
    for of in program_of(RUNS[name]).classes:
        actions, order, tasks = of.work.actions, of.work.order, of.tasks
        assert order.begin[-1] == len(tasks)
        for copy, action in enumerate(order.action.tolist()):
            rows, mine = actions.rows(action), slice(*order.begin[copy : copy + 2].tolist())
            for column in SAME:
                copied, whole = getattr(actions.tasks, column), getattr(tasks, column)
                assert np.array_equal(copied[rows], whole[mine]), column
            shapes = [*actions.tasks.shapes, None], [*tasks.shapes, None]
            for n, m in zip(actions.tasks.shape[rows], tasks.shape[mine], strict=True):
                assert shapes[0][n] == shapes[1][m]
            part = actions.part[rows]
            if order.kind[copy, 0] >= 0:
                assert np.array_equal(order.stage[copy, part], tasks.stage[mine])
            once = actions.tasks.microbatch[rows] < 0
            microbatch = np.where(once, -1, order.microbatch[copy, part])
            if name != "decode":
                assert np.array_equal(microbatch, tasks.microbatch[mine])


@pytest.mark.parametrize("name", RUNS)
def test_dependencies_of_copies_are_those_of_the_rank(name: str):
    for of in program_of(RUNS[name]).classes:
        actions, order, tasks = of.work.actions, of.work.order, of.tasks
        owner = np.repeat(np.arange(len(actions.tasks)), np.diff(actions.tasks.data_ptr))
        inside = ~actions.carried
        assert (actions.tasks.data[inside] < owner[inside]).all()
        for action in np.unique(order.action).tolist():
            entries, copies = actions.dep_entries(action), np.flatnonzero(order.action == action)
            copy, row = order.sources(action, entries)
            tags = order.tags(action, actions.rows(action))
            for nth, number in enumerate(copies.tolist()):
                begin, end = order.begin[number : number + 2].tolist()
                sources = tasks.data[tasks.data_ptr[begin] : tasks.data_ptr[end]]
                distance = row[nth] - actions.begin[order.action[copy[nth]]]
                assert np.array_equal(order.begin[copy[nth]] + distance, sources)
                assert np.array_equal(copy[nth] != number, actions.carried[entries])
                assert (copy[nth] <= number).all()
                assert np.array_equal(tags[nth], tasks.tag[begin:end])


def at_peak(values: Values, rows: int) -> dict[str, int]:
    """Bytes by category of the values that are live at the peak, and their sum, `peak`."""
    there = values.value[alive(values, peak_row(values, rows))]
    held = {
        name: int(values.size[there[values.category[there] == n]].sum())
        for n, name in enumerate(CATEGORIES)
    }
    return held | {"peak": sum(held.values())}


@pytest.mark.parametrize("name", RUNS)
def test_bytes_of_copies_are_those_of_live_ranges(name: str):
    for of in program_of(RUNS[name]).classes:
        order, changes, whole = of.work.order, of.work.changes, deltas(of)
        assert np.array_equal(changes.start, whole.start)
        assert len(changes.profile) == len(order.action)
        for copy, kind in enumerate(changes.profile.tolist()):
            rows, profile = slice(*order.begin[copy : copy + 2].tolist()), changes.profiles[kind]
            assert not profile.start.any()
            assert np.array_equal(profile.allocated, whole.allocated[:, rows])
            assert np.array_equal(profile.freed, whole.freed[:, rows])
        assert not (whole.allocated - whole.freed).sum(axis=1).any()
        if len(of.values.value):
            assert dict(of.memory) == at_peak(of.values, len(of.tasks))


def parts(of: RankClass) -> set[tuple[str, ...]]:
    kinds = of.work.order.kind.tolist()
    return {tuple(KINDS[kind] for kind in copy if kind >= 0) for copy in kinds}


def test_two_that_overlap_are_one_action():
    program = program_of(RUNS["DualPipe"])
    assert all(parts(of) == {("F",), ("B",), ("I",), ("W",), ("F", "B"), ()}
               for of in program.classes)  # fmt: skip
    actions = program.classes[0].work.actions
    assert set(np.unique(actions.part)) == {0, 1}


def test_weights_are_gathered_before_all_other_actions():
    of = program_of(RUNS["FSDP of several stages"]).classes[0]
    assert parts(of) == {("U",), ("F",), ("B",), ()}
    assert of.work.order.kind[:2, 0].tolist() == [KINDS.index("U")] * 2
    gathered = of.work.actions.rows(int(of.work.order.action[0]))
    assert (of.work.actions.tasks.microbatch[gathered] == -1).all()


@pytest.mark.parametrize("name", ["interleaved", "DualPipe"])
def test_each_part_has_a_distinct_placeholder(name: str):
    actions = program_of(RUNS[name]).classes[0].work.actions
    action = np.repeat(np.arange(len(actions.begin) - 1), np.diff(actions.begin))
    part = np.stack([action, actions.part], axis=1)[actions.tasks.microbatch >= 0]
    number = actions.tasks.microbatch[actions.tasks.microbatch >= 0]
    pairs = np.unique(np.column_stack([part, number]), axis=0)
    assert len(pairs) == len(np.unique(part, axis=0)) == len(np.unique(number))


def test_microbatches_add_copies_only():
    few, many = (program_of(DENSE | {"pp": 4, "global_batch_size": n}) for n in (8, 64))
    for a, b in zip(few.classes, many.classes, strict=True):
        assert np.array_equal(a.work.actions.begin, b.work.actions.begin)
        assert len(a.work.changes.profiles) == len(b.work.changes.profiles)
        assert len(b.work.order.action) - len(a.work.order.action) == 2 * 56


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "a V", "kept graphs", "DualPipe"])
def test_a_few_microbatches_stand_for_all(name: str):
    lengths: list[list[int]] = []
    for count in (48, 96):
        settings = RUNS[name] | {"global_batch_size": count * RUNS[name].get("dp", 1)}
        orders = [assembled(of).order for of in program_of(settings).classes]
        lengths.append([len(representative_order(order)[0].order.action) for order in orders])
    assert lengths[0] == lengths[1]
    assert max(lengths[0]) < 48


def test_ranks_with_equal_actions_share_profiles():
    run = DENSE | {"pp": 4, "vpp": 2, "schedule": "interleaved"}
    first, *inner, last = (of.work.changes.profiles for of in program_of(run).classes)
    assert inner[0] is inner[1]
    assert first is not inner[0] is not last


def test_stages_of_a_class_share_actions():
    few, many = (program_of(DENSE | {"pp": pp, "vpp": 2, "layers": 4 * pp}) for pp in (4, 8))
    assert len({id(of.work.actions) for of in many.classes}) == 1
    # First, inner and last stages; ranks with the first one, with none of these, with the last one.
    counts = [len(program.classes[0].work.actions.begin) - 1 for program in (few, many)]
    assert counts == [3 * 4 + 3] * 2


def test_classes_of_a_pipeline_rank_differ_in_numbers_only():
    program = program_of(RUNS["uneven experts"])
    first, *others = [of.work for of in program.classes if of.pipeline_rank == 0]
    assert others
    for work in others:
        assert work.order is first.order
        for name in ("begin", "part", "carried"):
            assert getattr(work.actions, name) is getattr(first.actions, name)
        assert work.actions.tasks.data is first.actions.tasks.data
        assert not np.array_equal(work.actions.tasks.flops, first.actions.tasks.flops)


def test_replicas_of_a_mirrored_pipeline_are_shards():
    """241 rows of the vocabulary on four ranks: 61, 61, 61 and 58, the last pipeline rank last."""
    program = program_of(RUNS["DualPipe, uneven shards"])
    assert [of.ranks.tolist() for of in program.classes] == [[0, 1], [2], [3]]
    sizes = [of.memory["optimizer"] for of in program.classes]
    values_per_row = 4 * 4096  # two moments, of the embedding and of the output layer
    assert [sizes[0] - size for size in sizes] == [0, 0, 3 * values_per_row * 4]


def test_explicit_tables_are_one_action():
    (of,) = program_of(DENSE | {"global_batch_size": 2}).classes
    work = of.work.from_tables(of.tasks, values=of.values)
    assert work.tasks is of.tasks
    assert work.actions.tasks is of.tasks
    assert work.order.action.tolist() == [0]
    assert work.order.begin.tolist() == [0, len(of.tasks)]
    assert not work.actions.carried.any()
    assert work.memory == of.memory
    again = of.work.with_tasks(of.tasks)
    assert again.memory == of.memory
    assert again.values is of.values
