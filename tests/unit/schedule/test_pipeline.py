"""Schedules: closed forms, published orders, CSV, pictures, and every error in words.

`data/schedules/` holds what others do. `torch-2.13.json`: the seven schedule classes of torch
2.13.0, each stepped on trivial stages under a fake process group; per rank the actions, and the
same with the sends (`S>1`) and receives (`R<1`) as they were executed. `torch-*.csv`: lists as
torch writes them, with idle slots or communication. `deepseek-dualpipe-*.csv`: the class of
github.com/deepseek-ai/DualPipe (3da1bbe) stepped with its computation and communication stubbed.
"""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import DATA, cases
from orders import in_flight
from stagewright.errors import UserError
from stagewright.run.sections import SETTINGS
from stagewright.schedule.actions import (
    SLOTS,
    Action,
    Order,
    Overlap,
    ScheduleStep,
    flat,
    halved,
    needs,
    parts,
    shared_stages,
)
from stagewright.schedule.controllable_memory import v_half, v_min
from stagewright.schedule.generators import (
    dualpipe,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zbv,
)
from stagewright.schedule.places import mirrored, places
from stagewright.schedule.play import bubble, idle, play, validate
from stagewright.schedule.schedules import SCHEDULES, fewest, make
from stagewright.schedule.text import from_csv, text, to_csv
from stagewright.schedule.vocabulary import STOPS, SharedEnds, interlaced

PUBLISHED = DATA / "schedules"
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 5, 16)]
Execution = tuple[Order, int, int]
CHUNKED = [(p, p * k, v) for p in (1, 2, 3, 4, 8) for k in (1, 2, 5) for v in (2, 3, 4)]


def order_of(*rows: str) -> Order:
    """An order from rows such as `"0F0 0B0"`."""
    return tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)


def shared_by(ends: SharedEnds, layer_stages: int) -> frozenset[int]:
    """Numbers of the stages that all ranks share, around those of layers."""
    first, last = len(ends.before), len(ends.before) + layer_stages
    return frozenset({*range(first), *range(last, last + len(ends.after))})


def makespan(order: Order, forward: float, backward: float) -> float:
    return max(end for _, end in play(order, {"F": forward, "B": backward}).values())


def costs(forward: float, inputs: float, weights: float, both: float = 0) -> dict[str, float]:
    """Times by kind; a full backward is its two halves."""
    backward = inputs + weights
    return {
        "F": forward, "I": inputs, "W": weights, "B": backward, "F&B": both or forward + backward
    }  # fmt: skip


# ---- the schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_makespan_of_gpipe_and_1f1b(schedule: Any, p: int, m: int) -> None:
    for forward, backward in [(1, 2), (3, 3), (5, 4)]:
        expected = (m + p - 1) * (forward + backward)
        assert makespan(schedule(p, m), forward, backward) == expected
    assert bubble(schedule(p, m)) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "v"), CHUNKED)
def test_makespan_of_chunks(p: int, m: int, v: int) -> None:
    # Costs are per chunk, a v-th of a rank's layers; scaled by v so that the sums stay exact.
    for schedule in (interleaved, looped_bfs):
        order = schedule(p, m, v)
        assert makespan(order, 1, 2) == m * 3 * v + (p - 1) * 3
        assert bubble(order) == pytest.approx((p - 1) / v / (m + (p - 1) / v))


# The table of bubbles in github.com/deepseek-ai/DualPipe (README), as in DeepSeek-V3 (arXiv
# 2412.19437, table 2): B is a full backward, F&B a forward and a backward that overlap.
TIMES = [(1, 1, 1), (3, 3, 2), (10, 11, 9), (4, 3, 3), (2, 3, 2)]


@pytest.mark.parametrize(("f", "i", "w"), TIMES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 5), (4, 4), (4, 8), (8, 24)])
def test_bubble_of_1f1b_and_zb1p(p: int, m: int, f: int, i: int, w: int) -> None:
    cost, b = costs(f, i, w), i + w
    assert set(idle(one_f_one_b(p, m), cost)) == {(p - 1) * (f + b)}
    assert set(idle(zb_h1(p, m), cost)) == {(p - 1) * (f + b - 2 * w)}


@pytest.mark.parametrize("both", [0, 2.5, 2.75])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 14), (8, 20), (8, 32)])
def test_bubble_of_dualpipe(p: int, m: int, both: float) -> None:
    """Exact on the ranks in the middle, which have most to overlap, where F and I are equal."""
    for w in (1, 0.5):
        cost = costs(1, 1, w, both and both * (2 + w) / 3)
        wanted = (p / 2 - 1) * (cost["F&B"] + cost["B"] - 3 * w)
        found = idle(dualpipe(p, m), cost)
        assert max(found) == pytest.approx(wanted)
        assert found[p // 2 - 1] == found[p // 2] == max(found)
        assert idle(dualpipev(p // 2, m // 2), cost) == found[: p // 2]


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 5), (4, 8), (8, 15), (8, 32)])
def test_zbv_has_no_bubble(p: int, m: int) -> None:
    """With F = I = W, counted from a rank's first action (arXiv 2401.10241, section 6)."""
    order, cost = zbv(p, m), costs(1, 1, 1)
    times = play(order, cost)
    end = max(stop for _, stop in times.values())
    for steps, without in zip(order, idle(order, cost), strict=True):
        before, after = times[flat(steps)[0]][0], end - times[flat(steps)[-1]][1]
        assert without == before + after == p - 1


@pytest.mark.parametrize(("f", "i", "w"), TIMES)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (4, 12), (8, 32)])
def test_bubble_of_zb_h2(p: int, m: int, f: int, i: int, w: int) -> None:
    """From a rank's first action to its last (arXiv 2401.10241, table 1): (p-1)(F+I-2W), or none.

    Ranks do not wait for each other at the end: the update is validated afterwards there.
    """
    order, cost = zb_h2(p, m), costs(f, i, w)
    times = play(order, cost)
    spans = [times[flat(steps)[-1]][1] - times[flat(steps)[0]][0] for steps in order]
    bubbles = [span - m * (f + i + w) for span in spans]
    assert bubbles[0] == max(bubbles)
    assert max(bubbles) == (p - 1) * (f + i - 2 * w) if f + i >= 2 * w else max(bubbles) >= 0


@pytest.mark.parametrize(("p", "m"), [(2, 6), (3, 9), (4, 12), (5, 10), (6, 24), (7, 14), (8, 32)])
def test_bubble_of_controllable_memory(p: int, m: int) -> None:
    """A few slots at the ends, whatever the number of microbatches, where F = I = W."""
    work = 6 * m
    half = max(end for _, end in play(v_half(p, m), costs(1, 1, 1)).values())
    least = max(end for _, end in play(v_min(p, m), costs(1, 1, 1)).values())
    assert half - work == (max(3 * p - 7, 1) if p % 2 == 0 else 3 * p - 4)
    assert least - work == 4 * p - (7 if p % 3 == 0 else 5)


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.fills > 1])
def test_a_full_pipeline_takes_the_same_time_for_each_further_microbatch(name: str) -> None:
    """Also where stages are uneven: within 2% of a step with twice as many."""
    p, chunks = 4, SCHEDULES[name].chunks or 2
    kinds = costs(1, 1.1, 0.9)

    def seconds(m: int) -> float:
        def cost(step: ScheduleStep) -> float:
            return sum(kinds[a.kind] * (1 + a.stage % 3 / 5) for a in parts(step))

        times = play(make(name, p, m, chunks), cost)
        return max(end for _, end in times.values())

    full = SCHEDULES[name].fills * p
    step = seconds(full + p) - seconds(full)
    further = seconds(full + p) + (full + p) / p * step
    assert further == pytest.approx(seconds(2 * full + 2 * p), rel=0.02)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight(p: int, m: int) -> None:
    assert in_flight(gpipe(p, m)) == [{rank: m} for rank in range(p)]
    assert in_flight(one_f_one_b(p, m)) == [{rank: min(p - rank, m)} for rank in range(p)]


def test_memory_of_the_zero_bubble_family() -> None:
    """As much alive as 1F1B's first rank, but on all ranks (arXiv 2401.10241, tables 1 and 4).

    DualPipe: one more (DeepSeek-V3, table 2). ZB-V and DualPipeV count in half stages.
    """
    for p, m in ((2, 8), (4, 16), (8, 32)):
        assert alive(zb_h1(p, m)) == [p] * p
        assert alive(zbv(p, m)) == [2 * p] * p
        assert alive(dualpipe(p, m)) == [p + 1] * p
        assert alive(dualpipev(p // 2, m // 2)) == [p + 1] * (p // 2)


def test_memory_of_zb_h2_and_of_controllable_memory() -> None:
    """Twice, half and a third of 1F1B's (arXiv 2401.10241, table 1; 2405.15362, table 1).

    V-Half and V-Min count in half stages, of which 1F1B's first rank holds 2 p.
    """
    for p in range(2, 9):
        m = 3 * p
        assert alive(zb_h2(p, m)) == [2 * p - 1] * p
        assert max(alive(v_half(p, m))) == p + (1 if p % 2 else 2)
        assert max(alive(v_min(p, m))) == 2 * -(-(p + 2) // 3)


CONTROLLABLE: list[dict[str, Any]] = json.loads((PUBLISHED / "sail-v-half-v-min.json").read_text())


@pytest.mark.parametrize(
    "row", CONTROLLABLE, ids=lambda r: f"{r['schedule']}-{r['pp']}-{r['microbatches']}"
)
def test_controllable_memory_is_in_the_authors_order(row: dict[str, Any]) -> None:
    order = make(row["schedule"], row["pp"], row["microbatches"], 2)
    assert [" ".join(map(str, steps)) for steps in order] == row["ranks"]


@pytest.mark.parametrize("schedule", [v_half, v_min])
def test_what_is_done_for_one_microbatch_is_repeated_for_more(schedule: Any) -> None:
    """Long orders are short ones with a part repeated: they hold no more and wait no longer."""
    for p in (1, 2, 3, 4, 6):
        short, long = 3 * p + 3, 3 * p + 11
        orders = [schedule(p, m) for m in (short, long)]
        validate(orders[1], 2 * p, long)
        assert alive(orders[0]) == alive(orders[1])
        ends = [max(end for _, end in play(o, costs(1, 1, 1)).values()) for o in orders]
        assert ends[1] - ends[0] == 6 * (long - short)


def alive(order: Order) -> list[int]:
    """Per rank, the most microbatches alive at once, of all its stages."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(itertools.accumulate(change[a.kind] for a in flat(steps))) for steps in order]


TORCH = {
    "GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "zb-h1", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev",
}  # fmt: skip
RECORDED: list[dict[str, Any]] = json.loads((PUBLISHED / "torch-2.13.json").read_text())


def recorded(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return TORCH[row["schedule"]], row["pp"], row["microbatches"], row["vpp"]


@pytest.mark.parametrize("row", RECORDED, ids=lambda r: "-".join(map(str, recorded(r))))
def test_equals_the_order_torch_executes(row: dict[str, Any]) -> None:
    order = make(*recorded(row))
    validate(order, row["pp"] * row["vpp"], row["microbatches"])
    assert [" ".join(map(str, steps)) for steps in order] == row["ranks"]


@pytest.mark.parametrize("row", RECORDED, ids=lambda r: "-".join(map(str, recorded(r))))
def test_messages_are_those_of_torch(row: dict[str, Any]) -> None:
    """Where the stages are says who sends to whom: nobody to itself, as at the turn of a V."""
    order = make(*recorded(row))
    around = {(p.rank, p.stage): (p.before, p.after) for p in places(order)}
    for rank, steps in enumerate(order):
        found: list[str] = []
        for a in flat(steps):
            before, after = around[rank, a.stage]
            source, target = {"F": (before, after), "W": (None, None)}.get(a.kind, (after, before))
            found += [f"R<{source}"] if source not in (None, rank) else []
            found += [f"S>{target}"] if target not in (None, rank) else []
        wanted = [word for word in row["executed"][rank].split() if word[1] in "<>"]
        assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 20)])
def test_dualpipe_equals_the_published_one(p: int, m: int) -> None:
    published = (PUBLISHED / f"deepseek-dualpipe-pp{p}-m{m}.csv").read_text()
    assert to_csv(dualpipe(p, m)) == published
    assert from_csv(published) == dualpipe(p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 7), (3, 9), (4, 3), (5, 12), (8, 32)])
def test_interlaced_takes_as_long_as_1f1b(p: int, m: int) -> None:
    """If B = 2F, ranks that stop together never wait; rank 0 keeps 1.5 pp microbatches alive."""
    kinds = {"F": 1, "B": 2}
    order = interlaced(p, m)
    times = play(
        order, lambda a: 0 if parts(a)[0].stage in shared_by(STOPS, p) else kinds[parts(a)[0].kind]
    )
    assert max(end for _, end in times.values()) == 3 * (m + p - 1)
    alive, most = 0, 0
    for a in flat(order[0]):
        alive += (a.kind == "F") - (a.kind == "B") if a.stage == 1 else 0
        most = max(most, alive)
    assert most == min(m, p + p // 2)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 7), (3, 9), (4, 3), (5, 12), (8, 32)])
@pytest.mark.parametrize(("schedule", "barriers"), [("vocab-1", 2), ("vocab-2", 1)])
def test_a_barrier_keeps_a_microbatch_alive(schedule: str, barriers: int, p: int, m: int) -> None:
    """Table 1 of arXiv 2411.05288's repository: p + 2 and p + 1 microbatches on the first rank."""
    order = make(schedule, p, m)
    for rank, steps in enumerate(order):
        layers = [a for a in flat(steps) if a.stage == 2 + rank]
        alive = itertools.accumulate(1 if a.kind == "F" else -1 for a in layers)
        assert max(alive) == min(m, p + barriers - rank)
    # What the last rank does for a microbatch between its forward and its backward.
    last, done = p + 1, flat(order[-1])
    handed, output, loss = last + 1, last + 2, last + 3
    gradient = {2: "B", 1: "I"}[barriers]
    wanted = [(handed, "F"), (output, "F"), (loss, "F"), (loss, "B"), (output, gradient)]
    wanted += [(handed, "B"), (last, "B")]
    for microbatch in range(m):
        mine = [(a.stage, a.kind) for a in done if a.microbatch == microbatch and a.stage >= last]
        assert [step for step in mine if step[1] != "W"] == [(last, "F"), *wanted]


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 12), (5, 8), (6, 9), (7, 20)])
def test_v_half_with_a_shared_vocabulary_keeps_two_microbatches_more(p: int, m: int) -> None:
    def most(name: str, first: int) -> int:
        """Forwards of stages of layers whose weight gradients are still to come."""
        change = {"F": 1, "W": -1}
        of_layers = range(first, first + 2 * p)
        return max(
            max(
                itertools.accumulate(
                    change.get(a.kind, 0) for a in flat(steps) if a.stage in of_layers
                )
            )
            for steps in make(name, p, m, 2)
        )

    assert most("v-half-vocab-1", 2) == min(most("v-half", 0) + 4, 2 * m)


def test_ranks_that_share_a_stage_must_meet_in_one_order() -> None:
    order = interlaced(2, 2)
    swapped = [*order[1]]
    first, second = (swapped.index(Action.parse(action)) for action in ("0F0", "0F1"))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(UserError, match="wanted one rank for a stage and microbatch"):
        validate(order, 4, 2)
    with pytest.raises(UserError, match=r"deadlock.*rank 0 has not reached: it waits at 0F0"):
        play((order[0], tuple(swapped)), SLOTS)


VEES = {"zbv", "v-half", "v-min", "dualpipev", "dualpipe"}  # others: chunks round the ranks


@pytest.mark.numerics
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_every_schedule_is_valid(name: str, p: int, m: int, v: int) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.chunks or v
    p += p % 2 if name == "dualpipe" else 0
    m = next(n for n in range(m, 100) if schedule.takes(p, n))
    order = make(name, p, m, chunks)
    if schedule.ends:
        shared = shared_by(schedule.ends, p * chunks)
        of_shared = [[a for a in flat(steps) if a.stage in shared] for steps in order]
        assert all(actions == of_shared[0] for actions in of_shared)
        others = (tuple(a for a in flat(steps) if a.stage not in shared) for steps in order[1:])
        validate((order[0], *others), p * chunks + len(shared), m)
        play(order, SLOTS)
        assert shared_stages(order) == (shared if p > 1 else set())
        return
    validate(order, p * chunks, m)
    for rank, steps in enumerate(order):
        held = {rank, 2 * p - 1 - rank} if chunks == 2 and name in VEES else set()
        held |= {rank, p - 1 - rank} if name == "dualpipe" else set()
        assert {a.stage for a in flat(steps)} == held or {rank + c * p for c in range(chunks)}
    assert mirrored(order) == (name == "dualpipe")
    assert from_csv(to_csv(order)) == order
    assert schedule.takes(p, fewest(name, p))


def test_interleaved_in_groups_of_more_than_pp() -> None:
    """Torch's rule; by name it is Megatron-LM's, whose groups are of pp."""
    assert str(interleaved(2, 3, 2)[1]) == (
        "(1F0, 1F1, 1F2, 3F0, 3B0, 3F1, 3B1, 3F2, 3B2, 1B0, 1B1, 1B2)"
    )
    for p, m in ((2, 3), (4, 10), (4, 5), (3, 8)):
        validate(interleaved(p, m, 2), 2 * p, m)
        validate(zb_h1(p, m, 2), 2 * p, m)


# Passes of Megatron-LM's interleaved loop (core/pipeline_parallel/schedules.py, d98e8a6: the table
# of get_schedule_table, the warm-up of get_pp_rank_microbatches): pp, microbatches, vpp and group,
# then the actions of the first rank. The first row's forwards are the example in its comments.


@cases
def test_groups_are_those_of_megatron(sizes: tuple[int, int, int, int], first: str) -> None:
    p, m, v, group = sizes
    order = make("interleaved", p, m, v, group=group)
    assert " ".join(map(str, order[0])) == first


def test_every_group_that_megatron_takes_is_valid_and_as_fast() -> None:
    """Its check: pp or more, not more than there are, and 0 or pp or more left for the last."""
    for p, v, m in itertools.product((2, 4), (2, 3), range(2, 11)):
        for group in range(1, m + 1):
            wanted = p <= group and not 0 < m % group < p
            takes = SCHEDULES["interleaved"].takes(p, m, group)
            assert takes == (wanted or group == m)
            if wanted:
                order = interleaved(p, m, v, group)
                validate(order, p * v, m)
                assert makespan(order, 1, 2) == m * 3 * v + (p - 1) * 3


# ---- dependencies and time -----------------------------------------------------------------------


@st.composite
def executions(draw: st.DrawFn) -> Execution:
    """A random order that cannot deadlock: some run of random work, read off per rank."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    shuffle = random.Random(draw(st.integers(0, 10**9)))
    home = [*range(ranks), *(shuffle.randrange(ranks) for _ in range(stages - ranks))]
    pairs = [(s, m) for s in range(stages) for m in range(microbatches)]
    halves = {pair for pair in pairs if shuffle.random() < 0.5}
    todo = [Action(s, "F", m) for s, m in pairs]
    todo += [Action(s, k, m) for s, m in pairs for k in ("IW" if (s, m) in halves else "B")]
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while todo:
        ready = [a for a in todo if done.issuperset(needs(a, stages, halves))]
        action = shuffle.choice(ready)
        todo.remove(action)
        done.add(action)
        rows[home[action.stage]].append(action)
    return tuple(map(tuple, rows)), stages, microbatches


@given(executions())
def test_what_can_run_is_valid_and_runs_without_needless_waiting(execution: Execution) -> None:
    order, stages, microbatches = execution
    validate(order, stages, microbatches)
    assert from_csv(to_csv(order)) == order
    times = play(order, lambda s: sum(SLOTS[a.kind] * (a.stage + 1) for a in parts(s)))
    assert set(times) == {a for actions in order for a in actions}
    for actions in order:
        free = 0
        for action in actions:
            start, end = times[action]
            required = needs(action, stages, halved(order))
            assert start == max([free, *(times[need][1] for need in required)])
            assert end == start + SLOTS[action.kind] * (action.stage + 1)
            free = end


@pytest.mark.numerics
@given(executions(), st.randoms(use_true_random=False))
def test_the_advice_about_deadlocks_repairs_any_shuffled_order(
    execution: Execution, shuffle: random.Random
) -> None:
    order, stages, microbatches = execution
    rows = [shuffle.sample(actions, len(actions)) for actions in order]
    for _ in range(sum(map(len, rows)) + 1):
        try:
            validate(tuple(map(tuple, rows)), stages, microbatches)
        except UserError as error:
            found = re.search(r"; move (\w+) before (\w+) on rank (\d+)$", str(error))
            assert found is not None
            row = rows[int(found[3])]
            row.remove(Action.parse(found[1]))
            row.insert(row.index(Action.parse(found[2])), Action.parse(found[1]))
        else:
            return
    pytest.fail("still a deadlock after as many moves as there are actions")


def test_needs() -> None:
    def words(action: str, halves: set[tuple[int, int]] | None = None) -> str:
        return " ".join(map(str, needs(Action.parse(action), 3, halves)))

    assert [words(a) for a in ("0F1", "2F1", "2B1", "1B1")] == ["", "1F1", "2F1", "1F1 2B1"]
    assert [words(a) for a in ("2I1", "1I1", "1W1")] == ["2F1", "1F1 2I1", "1I1"]
    assert [words(a, {(2, 1)}) for a in ("1B1", "1B0", "1I0")] == ["1F1 2I1", "1F0 2B0", "1F0 2B0"]


# ---- text forms ----------------------------------------------------------------------------------


def test_picture() -> None:
    assert text(interleaved(2, 2, 2)) == (
        "rank 0  0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----\n"
        "rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- .   ."
    )


def test_picture_with_wide_labels_is_aligned_and_cut() -> None:
    lines = text(one_f_one_b(11, 11)).splitlines()
    assert [line[:9] for line in lines[-2:]] == ["rank 9   ", "rank 10  "]
    assert lines[0].startswith("rank 0   0F0-- 0F1-- ")
    cut = text(one_f_one_b(11, 11), columns=30).splitlines()
    assert [len(line) for line in cut] == [30] * 11
    assert cut[0] == lines[0][:27] + "..."
    assert text(gpipe(2, 2), columns=80) == text(gpipe(2, 2))


@pytest.mark.parametrize("name", ["zero-bubble", "zbv", "dualpipev"])
def test_loads_what_torch_writes(name: str) -> None:
    """With empty cells, communication cells, overlapped pairs, and full and half backwards."""
    path = str(PUBLISHED / f"torch-{name}-pp2-vpp2-m4.csv")
    order = make(path, pp=2, microbatches=4, vpp=2)
    assert order == from_csv(Path(path)) == from_csv(Path(path).read_text())
    assert halved(order)
    assert sum(a.kind in "BI" for steps in order for a in flat(steps)) == 4 * 4
    assert any(isinstance(step, Overlap) for step in order[0]) == (name == "dualpipev")


def test_csv_is_read_leniently() -> None:
    assert from_csv("0F0, 0B0 ,,\r\n,1F0,1B0\n\n\n") == one_f_one_b(2, 1)
    assert from_csv("0F0\n\n1F0") == order_of("0F0", "", "1F0")


def test_csv_file_with_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("\ufeff" + to_csv(gpipe(2, 2)), encoding="utf-8")
    assert make(str(path), 2, 2) == gpipe(2, 2)


# ---- errors --------------------------------------------------------------------------------------


@cases
def test_errors_of_make(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make(*arguments)
    assert str(caught.value) == message


@cases
def test_errors_of_groups(name: str, group: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make(name, 4, 10, 2, group=group)
    assert str(caught.value) == message


ADVICE = "; correct the order, or change pp, vpp or the batch sizes"


@cases
def test_errors_of_validate(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(order_of(*rows), stages=2, microbatches=1)
    assert str(caught.value) == message


def test_unknown_kind_and_negative_numbers_are_errors() -> None:
    with pytest.raises(UserError, match=r"^pipeline order: stage 0, microbatch 0 has 0X0, 0F0; "):
        validate(((Action(0, "X", 0), Action(0, "F", 0)),), 1, 1)
    with pytest.raises(UserError, match=r"^pipeline order: got 0F-1, wanted only 1 stages"):
        validate(((*order_of("0F0 0B0")[0], Action(0, "F", -1)),), 1, 1)


@cases
def test_deadlocks_are_explained(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        play(order_of(*rows), SLOTS)
    assert str(caught.value) == f"deadlock in the pipeline order: {message}"


def test_a_long_circle_is_cut_short() -> None:
    rows = [f"{20 + r}F0 {r}F0 {r}B0 {20 + r}B0" for r in range(20)]
    message = "cannot start: it waits for 33F0, and so on round 20 ranks; move 19F0 before 39F0"
    with pytest.raises(UserError, match=message):
        validate(order_of(*rows), 40, 1)


WANTED = "wanted stage, kind (F, B, I or W) and microbatch, such as 2F0; correct it"


@pytest.mark.parametrize("word", ["", "2F", "F0", "2f0", "2G0", "2F0 ", "-1F0", "2F" + "9" * 10])
def test_bad_actions(word: str) -> None:
    with pytest.raises(UserError) as caught:
        Action.parse(word)
    assert str(caught.value) == f"{word!r} is not a pipeline action; {WANTED}"


@cases
def test_errors_of_csv_text(source: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_csv(source)
    assert str(caught.value) == message


def test_errors_of_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: cannot be read: .*file"):
        make(str(path), 2, 2)
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(UserError, match=r": is not text in UTF-8; wanted a schedule as CSV"):
        from_csv(path)
    path.write_text("0F0,0F\n")
    with pytest.raises(UserError) as caught:
        from_csv(path)
    assert str(caught.value) == (
        f"{path}, row 1, column 2: '0F' is not a pipeline action; {WANTED}"
    )


def test_csv_that_does_not_fit_the_run(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(to_csv(gpipe(2, 4)))
    with pytest.raises(UserError) as caught:
        make(str(path), 4, 4)
    assert str(caught.value) == f"{path}: got 2 rows, wanted one per rank with pp=4; change either"
    with pytest.raises(UserError) as caught:
        make(str(path), 2, 8)
    assert str(caught.value) == (
        f"{path}: pipeline order: stage 0, microbatch 4 has no actions; wanted F and B, or F, I "
        "and W, once for each of 2 stages and 8 microbatches, both counted from 0" + ADVICE
    )


def test_help_names_every_schedule() -> None:
    """Sections import no table of schedules, so that help is quick: the names stand there again."""
    text = SETTINGS["schedule"].help
    words = {word.strip(".") for word in re.split(r",\s*", text)}
    short = [re.match(r"(.*)\((.*)\)(.*)", word) for word in words]
    for start, option, end in (match.groups() for match in short if match):
        words |= {start + end, start + option + end}
    assert {*SCHEDULES} <= words, {*SCHEDULES} - words
