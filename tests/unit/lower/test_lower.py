"""From blocks and a schedule to rows: what runs when, who waits for whom, who talks to whom."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.program.columns import COLLECTIVES, RankWork, TaskKind, Tasks
from stagewright.program.communicators import Communicator, Peer
from stagewright.program.fit import peak_in_program_order
from stagewright.run.settings import Run
from stagewright.schedule.actions import Overlap, flat

GPT = {"model": "gpt2", "layers": 4, "seq_length": 64}
LLAMA = GPT | {"model": "llama3.1-8b"}
FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = range(4)


def compiled(**settings: Any) -> CompiledRun:
    return compile(Run(**settings))


def test_a_pipeline_rank_without_an_optimizer_has_actions_alone() -> None:
    settings = {"pp": 3, "layers": 3, "vocab": 240, "clip_grad": False}
    run = compiled(**GPT | settings, trainable=("embedding.*",))
    for rank_class in run.program.classes:
        row_by_row = RankWork.from_tables(rank_class.tasks, values=rank_class.values)
        assert rank_class.work.memory == row_by_row.memory


def op(t: Tasks, row: int) -> str:
    return t.ops[t.op[row]]


def name(t: Tasks, row: int) -> str:
    return t.names[t.name[row]]


def reads(t: Tasks, row: int) -> list[int]:
    return t.data[t.data_ptr[row] : t.data_ptr[row + 1]].tolist()


def waits(t: Tasks, row: int) -> list[int]:
    return t.order[t.order_ptr[row] : t.order_ptr[row + 1]].tolist()


def behind(t: Tasks, row: int) -> set[int]:
    """All rows that a row needs, however far."""
    found: set[int] = set()
    stack = [row]
    while stack:
        here = stack.pop()
        new = {*reads(t, here), *waits(t, here)} - found
        found |= new
        stack += new
    return found


# ---- actions -------------------------------------------------------------------------------------


@cases
def test_rows_follow_the_schedule(settings: dict[str, Any]) -> None:
    c = compiled(**GPT | settings)
    for rank, steps in zip(c.program.classes, c.order, strict=True):
        t = rank.tasks
        rows = np.flatnonzero(t.microbatch >= 0)
        columns = t.stage[rows], t.phase[rows] == FORWARD, t.microbatch[rows]
        found = zip(*(column.tolist() for column in columns), strict=True)
        wanted = ((a.stage, a.kind == "F", a.microbatch) for a in flat(steps))
        assert [key for key, _ in groupby(found)] == [key for key, _ in groupby(wanted)]
        once = t.microbatch < 0
        assert once[-1]  # the optimizer ends the step
        if all(a.kind in "FB" for a in flat(steps)):  # halves leave sums of a stage behind
            assert np.diff(once.astype(int)).min() >= 0


def test_once_per_step() -> None:
    """Weights that stay are gathered before the first forward; the last backward reduces."""
    plain = {"dp": 2, "pp": 2, "vpp": 2, "global_batch_size": 8}
    c = compiled(**LLAMA, **plain)
    for rank in c.program.classes:
        t = rank.tasks
        reduced = (t.kind == TaskKind.COLLECTIVE) & (t.phase == BACKWARD)
        assert set(t.microbatch[reduced].tolist()) == {-1}
        for i in np.flatnonzero(reduced):
            assert {int(t.microbatch[r]) for r in reads(t, i)} == {3}
    c = compiled(**LLAMA, **plain, zero=3, reshard_after_forward=False)
    for rank in c.program.classes:
        t = rank.tasks
        gathers = (t.kind == TaskKind.COLLECTIVE) & (t.phase == FORWARD)
        assert set(t.microbatch[gathers].tolist()) == {-1}
        for i in np.flatnonzero(gathers):  # in the first microbatch's action
            assert set(t.microbatch[:i][t.stage[:i] == t.stage[i]].tolist()) <= {-1, 0}
        reduced = (t.kind == TaskKind.COLLECTIVE) & (t.phase == BACKWARD)
        assert set(t.microbatch[reduced].tolist()) == {0, 1, 2, 3}  # ZeRO-3: sharded at once
        products = [
            i for i in range(len(t)) if name(t, i).endswith(".gate") and t.phase[i] == FORWARD
        ]
        assert len(products) == 2 * 4
        for i in products:
            (gather,) = (r for r in reads(t, i) if t.kind[r] == TaskKind.COLLECTIVE)
            assert gathers[gather]
            assert t.layer[gather] == t.layer[i]


def test_gathers_run_ahead() -> None:
    """ZeRO-3: a layer's weights are under way while the layer before it computes."""
    t = compiled(**LLAMA, dp=2, zero=3).program.classes[0].tasks
    for phase, step in ((FORWARD, 1), (BACKWARD, -1)):
        gathers = {
            int(t.layer[i]): int(i)
            for i in np.flatnonzero(
                (t.phase == phase) & (t.kind == TaskKind.COLLECTIVE) & (t.layer >= 0)
            )
            if op(t, i) == "all_gather"
        }
        assert len(gathers) == 4
        for layer, gather in gathers.items():
            if layer - step not in gathers:
                continue
            mine = (t.phase == phase) & (t.kind == TaskKind.COMPUTE)
            kernels = np.flatnonzero(mine & (t.layer == layer - step))
            assert gather < kernels[0]
            assert kernels[0] not in behind(t, gather)
            first = np.flatnonzero(mine & (t.layer == layer))[0]
            products = [
                i for i in np.flatnonzero(mine & (t.layer == layer)) if gather in reads(t, i)
            ]
            assert products[0] >= first


# ---- dependencies --------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("split", [{"dp": 2}, {"dp": 2, "zero": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_updates_wait_for_their_gradients(split: dict[str, Any], clip: bool) -> None:
    c = compiled(**GPT, **split, clip_grad=clip)
    for rank in c.program.classes:
        t = rank.tasks
        updates = [i for i in range(len(t)) if op(t, i) == "adamw"]
        assert updates
        scale = [i for i in range(len(t)) if name(t, i) == "clip_scale"]
        assert len(scale) == clip
        for i in updates:
            sources = [r for r in reads(t, i) if r not in scale]
            assert [(t.phase[r], t.layer[r]) for r in sources] == [(BACKWARD, t.layer[i])]
            assert set(scale) <= set(reads(t, i))
        norms = [i for i in range(len(t)) if "norm2" in op(t, i)]
        assert bool(norms) == clip
        for s in scale:
            assert set(norms) <= behind(t, s)


def test_last_gradient_kernel_is_what_is_reduced() -> None:
    """The all-reduce of a layer's gradients waits for its sums of the last microbatch."""
    t = compiled(**LLAMA, dp=2, global_batch_size=4).program.classes[0].tasks
    rows = [i for i in range(len(t)) if t.kind[i] == TaskKind.COLLECTIVE and t.layer[i] == 1]
    (reduce,) = (i for i in rows if t.phase[i] == BACKWARD)
    sums = [i for i in range(len(t)) if "accumulate" in op(t, i) and t.layer[i] == 1]
    assert set(reads(t, reduce)) == {i for i in sums if t.microbatch[i] == 1}
    assert len(reads(t, reduce)) == 9  # of seven matrices and two norms


def test_receives_are_posted_in_time() -> None:
    """A receive waits for the kernel before it only: not for other messages."""
    c = compiled(**GPT, pp=4, global_batch_size=8)
    for rank in c.program.classes:
        t = rank.tasks
        for i in np.flatnonzero(t.kind == TaskKind.RECV):
            assert reads(t, i) == []
            before = np.flatnonzero(t.kind[:i] == TaskKind.COMPUTE)
            assert waits(t, i) == before[-1:].tolist()


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_boundaries(tp: int) -> None:
    """Every microbatch crosses every boundary both ways; with sequence parallelism, in shards."""
    settings = GPT | {"pp": 4, "global_batch_size": 6, "tp": tp, "sequence_parallel": tp > 1}
    program = compiled(**settings).program
    size = 2 * 64 * 768 // tp
    for rank in program.classes:
        t = rank.tasks
        for kind, phase, ends in (
            (TaskKind.SEND, FORWARD, 3),
            (TaskKind.RECV, FORWARD, 0),
            (TaskKind.SEND, BACKWARD, 0),
            (TaskKind.RECV, BACKWARD, 3),
        ):
            rows = np.flatnonzero((t.kind == kind) & (t.phase == phase))
            assert len(rows) == (0 if rank.pipeline_rank == ends else 6)
            assert (t.comm_bytes[rows] == size).all()
            onward = (kind == TaskKind.SEND) == (phase == FORWARD)
            assert {program.peers[s] for s in t.slot[rows]} <= {Peer("pp", 1 if onward else -1)}


def test_ranks_of_tp_share_a_message() -> None:
    """Each sends its part, and the receiving ranks gather what the next kernels read."""
    settings = GPT | {"pp": 2, "global_batch_size": 2, "tp": 2}
    whole = compiled(**settings).program
    shared = compiled(**settings, scatter_gather_tensors_in_pipeline=True).program
    size = 2 * 64 * 768
    for before, after in zip(whole.classes, shared.classes, strict=True):
        t = after.tasks
        messages = np.isin(t.kind, (TaskKind.SEND, TaskKind.RECV))
        assert (t.comm_bytes[messages] == size // 2).all()
        receives = np.flatnonzero(t.kind == TaskKind.RECV)
        waiter, dep = t.reads
        gathers = waiter[np.isin(dep, receives)]
        assert len(gathers) == len(receives)
        assert (t.collective[gathers] == COLLECTIVES.index("all_gather")).all()
        assert (t.comm_bytes[gathers] == size // 2).all()
        assert len(t) == len(before.tasks) + len(receives)
        assert dict(peak_in_program_order(after).by_category) == dict(
            peak_in_program_order(before).by_category
        )


@pytest.mark.parametrize(
    ("pp", "who"),
    [(2, Communicator(("pp",))), (4, Communicator(("pp",), (0, 3)))],
)
def test_tied_embedding(pp: int, who: Communicator) -> None:
    """The first and the last stage add up their gradients of the shared table."""
    program = compiled(**GPT, pp=pp, tp=2, vocab=50304).program
    for rank in program.classes:
        t = rank.tasks
        rows = np.flatnonzero(
            (t.kind == TaskKind.COLLECTIVE) & (t.microbatch < 0) & (t.phase == BACKWARD)
        )
        if rank.pipeline_rank not in (0, pp - 1):
            assert len(rows) == 0
            continue
        assert [program.communicators[t.slot[i]] for i in rows] == [who]
        assert t.comm_bytes[rows].tolist() == [4 * 50304 * 768 // 2]
    alone = compiled(**GPT).program  # one stage has one table
    assert not (alone.classes[0].tasks.kind == TaskKind.COLLECTIVE).any()


# ---- backward in halves --------------------------------------------------------------------------

HALVES = {"pp": 4, "layers": 8, "schedule": "zb-h1", "global_batch_size": 8}


def content(t: Tasks) -> list[tuple[Any, ...]]:
    """What is done, whatever the order."""
    columns = ("stage", "phase", "microbatch", "flops", "traffic", "comm_bytes", "collective")
    rows = zip(*(getattr(t, c).tolist() for c in columns), strict=True)
    return sorted((name(t, i), *row) for i, row in enumerate(rows))


@pytest.mark.numerics
@cases
@pytest.mark.parametrize("model", ["llama3.1-8b", "gpt2", "mixtral-8x7b"])
def test_halves_are_the_whole(model: str, settings: dict[str, Any]) -> None:
    """Both halves do together what a full backward does; what is sent back needs the first only."""
    common = LLAMA | HALVES | settings | {"model": model}
    whole = compiled(**common | {"schedule": "1f1b"}).program
    halves = compiled(**common).program
    for one, two in zip(whole.classes, halves.classes, strict=True):
        names = [[name(x.tasks, i) for i in range(len(x.tasks))] for x in (one, two)]
        assert names[0] != names[1] or one.pipeline_rank == 0
        last = [i for i in range(len(one.tasks)) if one.tasks.microbatch[i] < 0]
        assert content(one.tasks)[: -len(last)] == content(two.tasks)[: -len(last)]
    for rank in halves.classes[1:]:
        t = rank.tasks
        stage = rank.pipeline_rank
        back = (t.phase >= RECOMPUTE) & (t.phase <= BACKWARD) & (t.stage == stage)
        for m in (0, 3):
            mine = np.flatnonzero(back & (t.microbatch == m))
            (send,) = (i for i in mine if name(t, i) == "backward.send")
            sends = [i for i in mine if t.kind[i] == TaskKind.SEND and i <= send]  # a ring's too
            needed = set.union(*(behind_data(t, i) for i in sends)) & set(mine.tolist())
            # The first half ends with the message; nothing after it is needed by it.
            assert max(needed) < send
            sums = [i for i in mine if "accumulate" in op(t, i)]
            assert sums
            assert not needed.intersection(i for i in sums if i > send)
            after = [i for i in mine if i > send]
            assert {"accumulate"} <= {o for i in after for o in op(t, i).split("+")}
            # What runs before the message and is not needed by it, is computed again whole.
            idle = [
                i for i in mine if i < send and i not in needed and t.kind[i] == TaskKind.COMPUTE
            ]
            assert {int(t.phase[i]) for i in idle} <= {RECOMPUTE}


def behind_data(t: Tasks, row: int) -> set[int]:
    """All rows whose values a row is made of."""
    found: set[int] = set()
    stack = [row]
    while stack:
        new = set(reads(t, stack.pop())) - found
        found |= new
        stack += new
    return found


def test_reduction_waits_for_the_last_weight_gradients() -> None:
    """A half of backward that comes last reduces what all microbatches added up."""
    t = compiled(**LLAMA | HALVES, dp=2).program.classes[3].tasks
    for reduce in np.flatnonzero((t.kind == TaskKind.COLLECTIVE) & (t.phase == BACKWARD)):
        sums = reads(t, reduce)
        assert sums
        for i in sums:
            same = [j for j in range(len(t)) if t.name[j] == t.name[i] and t.phase[j] == BACKWARD]
            assert i == same[-1]


# ---- stages of one rank --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_the_turn_of_a_v_needs_no_message(schedule: str) -> None:
    c = compiled(**LLAMA | {"layers": 8}, pp=4, vpp=2, schedule=schedule)
    microbatches = c.run.microbatches
    for rank in c.program.classes:
        t, r = rank.tasks, rank.pipeline_rank
        ends = {0: 1, 3: 1}.get(r, 2)  # of the model, or of the V
        for kind in (TaskKind.SEND, TaskKind.RECV):
            for phase in (FORWARD, BACKWARD):
                rows = (t.kind == kind) & (t.phase == phase)
                assert rows.sum() == ends * microbatches
        held = set(t.stage[t.stage >= 0].tolist())
        assert held == {r, 7 - r}
    t = c.program.classes[3].tasks
    crossing = [
        (int(t.stage[i]), int(t.stage[j]), int(t.phase[i]))
        for i in range(len(t)) if t.microbatch[i] >= 0
        for j in reads(t, i) if t.stage[i] != t.stage[j]
    ]  # fmt: skip
    assert set(crossing) >= {(4, 3, FORWARD), (3, 4, BACKWARD)}


def test_a_v_holds_a_tied_table_once() -> None:
    """Embedding and output are on one rank: nothing to reduce between stages."""
    shared = compiled(**GPT | {"layers": 8}, pp=4, vpp=2, schedule="zbv", clip_grad=False)
    apart = compiled(**GPT | {"layers": 8}, pp=4, vpp=2, clip_grad=False)
    assert not shared.program.communicators
    assert apart.program.communicators == (Communicator(("pp",), (0, 3)),)
    held = [sum(c.memory["parameters"] for c in x.program.classes) for x in (shared, apart)]
    assert held[0] == 2 * shared.parameters
    assert held[1] - held[0] == 2 * 50257 * 768
    t = shared.program.classes[0].tasks
    updates = [name(t, i) for i in range(len(t)) if "wte" in name(t, i) and op(t, i) == "adamw"]
    assert updates == ["embedding.wte.new"]


def test_a_shared_table_must_be_complete_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,3F0,3I0,0B0,3W0\n1F0,2F0,2B0,1B0\n", encoding="utf-8")
    run = {"pp": 2, "vpp": 2, "schedule": str(path), "global_batch_size": 1}
    compiled(**LLAMA, **run)
    with pytest.raises(UserError, match=r"on rank 0, 3W0 comes after all backwards of stage 0"):
        compiled(**GPT, **run)


# ---- both directions -----------------------------------------------------------------------------


def test_dualpipe_reduces_gradients_between_its_replicas() -> None:
    """Ranks r and 3 - r hold stages r and 3 - r: data parallel, with microbatches of their own."""
    c = compiled(**LLAMA | {"layers": 8}, pp=4, schedule="dualpipe", dp=2, clip_grad=False)
    (who,) = c.program.communicators
    assert sorted(who.axes) == ["dp", "mirror"]
    assert [*c.program.groups().values()] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    plain = compiled(**LLAMA | {"layers": 8}, pp=4, dp=2, clip_grad=False)

    def reduced(c: CompiledRun, rank: int) -> int:
        t = c.program.classes[rank].tasks
        return int(t.comm_bytes[(t.kind == TaskKind.COLLECTIVE) & (t.microbatch < 0)].sum())

    for rank, of in enumerate(c.program.classes):
        t = of.tasks
        assert set(t.stage[t.stage >= 0].tolist()) == {rank, 3 - rank}
        assert reduced(c, rank) == reduced(plain, rank) + reduced(plain, 3 - rank)
        for held in ("parameters", "gradients", "optimizer"):
            both = [plain.program.classes[r].memory[held] for r in (rank, 3 - rank)]
            assert of.memory[held] == sum(both)
        up = {m for s, m in zip(t.stage, t.microbatch, strict=True) if m >= 0 and s == rank}
        assert up == set(range(4))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_dualpipe_shards_state_over_its_replicas(zero: int) -> None:
    common = LLAMA | {"layers": 8, "pp": 4, "vocab": 128256}
    twice = compiled(**common, schedule="dualpipe", zero=zero, dp=2).program
    plain = compiled(**common, zero=zero, dp=4).program
    for rank in range(4):
        for state, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
            if zero >= first:
                both = [plain.classes[r].memory[state] for r in (rank, 3 - rank)]
                assert twice.classes[rank].memory[state] == sum(both)


def test_overlapping_actions_take_turns() -> None:
    """While tokens are under way to their experts, the other microbatch computes."""
    settings = {"model": "mixtral-8x7b", "pp": 2, "dp": 4, "ep": 4, "layers": 4}
    c = compiled(**LLAMA | settings, schedule="dualpipe", global_batch_size=32)
    t = c.program.classes[0].tasks
    overlapped = [s for s in c.order[0] if isinstance(s, Overlap)]
    assert overlapped
    hidden = exposed = 0
    for step in overlapped:
        exchange = COLLECTIVES.index("all_to_all")
        of = {a.microbatch: a for a in (step.forward, step.backward)}
        mine = np.isin(t.microbatch, list(of))
        for i in np.flatnonzero(mine & (t.collective == exchange)):
            a = of[int(t.microbatch[i])]
            if (t.phase[i] == FORWARD) != (a.kind == "F"):
                continue
            user = next(j for j in range(i, len(t)) if i in reads(t, j))
            between = t.microbatch[i:user][t.kind[i:user] == TaskKind.COMPUTE]
            other = int((between != t.microbatch[i]).sum())
            hidden, exposed = hidden + (other > 0), exposed + (other == 0)
    assert hidden > 8 * exposed


def test_a_rank_reduces_at_once_and_gathers_at_once() -> None:
    """As nanotron's ZeRO-1: whole gradients behind backward, parameters behind the last update."""
    settings = LLAMA | {"dp": 4, "zero": 1, "global_batch_size": 8}
    (one, each) = (
        compiled(**settings, bucket=bucket).program.classes[0].tasks for bucket in ("rank", "layer")
    )

    def moved(t: Tasks, of: str, phase: int) -> list[int]:
        found = (t.collective == COLLECTIVES.index(of)) & (t.phase == phase) & (t.comm_bytes > 4)
        return t.comm_bytes[found].tolist()

    (whole,), parts = moved(one, "all_reduce", BACKWARD), moved(each, "reduce_scatter", BACKWARD)
    assert whole == sum(parts)
    assert not moved(one, "reduce_scatter", BACKWARD)
    (gathered,), several = moved(one, "all_gather", OPTIMIZER), moved(each, "all_gather", OPTIMIZER)
    assert gathered == sum(several)
    row = int(np.flatnonzero(one.comm_bytes == whole)[0])
    products = (one.kind == TaskKind.COMPUTE) & (one.phase == BACKWARD)
    assert row > np.flatnonzero(products)[-1]


def test_a_bucket_does_not_split_a_joint_weight() -> None:
    """DDP closes a bucket behind a parameter: nanotron's qkv_proj and gate_up_proj are one each."""
    settings = {"model": "llama3.1-8b", "layers": 1, "dp": 4, "ddp_bucket_cap_mb": 50}

    def buckets(*, joint: bool) -> list[int]:
        tasks = compiled(**settings, joint_projections=joint).program.classes[0].tasks
        sums = (tasks.collective == COLLECTIVES.index("all_reduce")) & (tasks.microbatch < 0)
        sums &= tasks.phase == BACKWARD
        return (tasks.comm_bytes[sums] // 2**20).tolist()

    assert buckets(joint=True) == [2004, 224, 448, 64, 96, 2004]
    assert buckets(joint=False) == [2004, 224, 224, 224, 64, 96, 2004]


def test_what_a_rank_keeps_in_parts_is_not_reduced_at_once() -> None:
    with pytest.raises(UserError, match="bucket=rank sums whole gradients"):
        compiled(**LLAMA, dp=4, zero=2, bucket="rank")


# ---- what cannot be lowered ----------------------------------------------------------------------


@cases
def test_refused(tmp_path: Path, order: str, wanted: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(order, encoding="utf-8")
    with pytest.raises(UserError, match=wanted):
        compiled(**GPT, pp=2, schedule=str(path), global_batch_size=2)


def test_what_options_of_megatron_hold() -> None:
    """Copies of logits [B, S, V] and of attention's output [B, S, H], in closed form."""
    model = {
        "model": "llama3.1-8b",
        "layers": 2,
        "seq_length": 4096,
        "tp": 8,
        "micro_batch_size": 2,
    }
    tokens, logits = 2 * 4096, 128256 // 8

    def peak(pipeline: int = 1, **options: Any) -> int:
        classes = compiled(**model, pp=pipeline, global_batch_size=8, **options).program.classes
        return max(classes, key=lambda c: c.pipeline_rank).memory["peak"]

    one, two = peak(), peak(2)
    assert peak(compiled_loss=True) - one == tokens * logits * 4
    assert peak(transposed_attention=True) - one == 2 * tokens * 4096 // 8 * 2  # two layers
    deferred: dict[str, Any] = {"defer_embedding_wgrad_compute": True}
    assert peak(2, **deferred, wgrad_deferral_limit=3) - two == 3 * tokens * logits * 2
    assert peak(2, **deferred) - two == 4 * tokens * logits * 2  # of all microbatches
