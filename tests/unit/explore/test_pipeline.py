"""Orders over arrays: equal to the player of a single order, and periodic beyond a few rounds."""

import numpy as np
import pytest

from stagewright.explore.actions import GPU, HOST, MESSAGE
from stagewright.explore.pipeline import play as playing
from stagewright.explore.pipeline.effects import Effect, plain
from stagewright.explore.pipeline.launches import without_launches
from stagewright.explore.pipeline.play import play, play_each
from stagewright.explore.pipeline.rounds import rounds, slowest_loop
from stagewright.schedule.play import play as play_one
from stagewright.schedule.schedules import known_order, make


def seconds(order, took, message=0.0):
    """When the last rank is done, by configuration; `took` by stage and kind."""
    found = play(
        order,
        lambda step, complete: plain(sum(took[of] for of in step)),
        lambda a, b: np.full(len(next(iter(took.values()))), message),
    )
    return found.gpu.max(axis=0)


def random_times(stages, count, seed=0):
    draw = np.random.default_rng(seed)
    return {(s, kind): draw.uniform(0.5, 2, count) for s in range(stages) for kind in "FBIW"}


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "vpp"),
    [
        ("1f1b", 4, 9, 1),
        ("gpipe", 3, 5, 1),
        ("interleaved", 4, 8, 3),
        ("looped-bfs", 2, 4, 2),
        ("zb-h1", 4, 8, 1),
        ("zbv", 4, 8, 2),
        ("v-half", 3, 7, 2),
        ("dualpipev", 3, 8, 2),
        ("dualpipe", 4, 12, 1),
    ],
)
def test_an_order_takes_as_long_as_played_alone(schedule, pp, microbatches, vpp):
    order = make(schedule, pp, microbatches, vpp)
    took = random_times(pp * vpp, 3)
    found = seconds(order, took)
    for nth in range(3):
        times = play_one(order, lambda a, nth=nth: took[a.stage, a.kind][nth])
        assert found[nth] == pytest.approx(max(end for _, end in times.values()))


@pytest.mark.parametrize("message", [0.0, 0.3])
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("interleaved", 2)])
def test_further_rounds_add_the_same_time(schedule, vpp, message):
    pp, microbatches = 4, 80
    took = random_times(pp * vpp, 20, seed=1)
    whole = seconds(make(schedule, pp, microbatches, vpp), took, message)
    plan = rounds(schedule, pp, microbatches)
    assert plan.played < microbatches
    last, before = (
        seconds(known_order(schedule, pp, m, vpp, None), took, message)
        for m in (plan.played, plan.before)
    )
    busiest = np.max([sum(took[s, k] for s in range(r, pp * vpp, pp) for k in "FB")
                      for r in range(pp)], axis=0)  # fmt: skip
    period = np.maximum(last - before, (plan.played - plan.before) * busiest)
    assert last + plan.more * period == pytest.approx(whole, rel=2e-2)


def test_messages_are_waited_for():
    order = make("1f1b", 2, 1)
    took = {(s, kind): np.ones(1) for s in range(2) for kind in "FB"}
    assert seconds(order, took, message=0.25)[0] == pytest.approx(4.5)


@pytest.mark.parametrize("message", [0.0, 0.3])
def test_further_microbatches_of_1f1b_pass_at_the_pace_of_the_slowest_loop(message):
    pp, more = 4, 200
    took = random_times(pp, 20, seed=1)
    both = [took[s, "F"] + took[s, "B"] for s in range(pp)]
    pace = slowest_loop(both, [2 * message * np.ones(20)] * (pp - 1))
    some = seconds(make("1f1b", pp, 100), took, message)
    assert seconds(make("1f1b", pp, 100 + more), took, message) == pytest.approx(
        some + more * pace, rel=2e-3
    )


@pytest.mark.parametrize(
    ("schedule", "pp", "counts", "vpp"),
    [
        ("1f1b", 4, (1, 2, 5, 9), 1),
        ("interleaved", 4, (4, 8, 12), 3),
        ("zbv", 4, (4, 8, 16), 2),
        ("dualpipe", 4, (12, 16), 1),
    ],
)
def test_orders_that_begin_alike_take_as_long_as_each_alone(schedule, pp, counts, vpp):
    """Of six configurations, pairs differ only in what happens once per step."""
    draw = np.random.default_rng(3)
    usual, once = draw.uniform(0.5, 2, (2, pp * vpp, 4, 6))
    usual = usual[:, :, [0, 0, 1, 1, 2, 2]]

    def given(step, complete):
        took = once if complete else usual
        return plain(sum(took[stage, "FBIW".index(kind)] for stage, kind in step))

    def message(a, b):
        return np.full(6, 0.1 * abs(a - b))

    orders = [make(schedule, pp, m, vpp) for m in counts]
    asked = [np.sort(draw.permutation(6)[: 2 + n]) for n in range(len(counts))]
    for order, own, found in zip(
        orders, asked, play_each(orders, given, message, asked), strict=True
    ):
        alone = play(order, given, message)
        np.testing.assert_array_equal(found.gpu, alone.gpu[:, own])


def launched(kernels, first, host):
    """A step whose kernels take so long, behind the launch of the `first`, and so long on the
    host."""
    ends = (kernels, (GPU, MESSAGE)), (kernels + first, (HOST,))
    return Effect((ends, ((host, (HOST,)),), *[()] * (MESSAGE - 2)), (ends,))


def inputs(part):
    return sorted(own for _, every in part for own in every)


def test_kernels_wait_for_launches_in_the_first_step_alone_where_hosts_are_ahead(monkeypatch):
    draw = np.random.default_rng(5)
    order = make("interleaved", 4, 8, 2)

    def given(kernels, host):
        first = np.full(len(kernels), 0.25)
        return lambda step, complete: launched(kernels, first, host)

    def message(a, b):
        return np.full(6, 0.1)

    kernels = draw.uniform(1, 2, 6)
    for host, ahead in ((kernels / 2, True), (np.append(kernels[1:] / 2, 3.0), False)):
        step = given(kernels, host)
        effects = {(((0, "F"),), once): step(((0, "F"),), once) for once in (False, True)}
        usual, first = (without_launches(effects)[((0, "F"),), once] for once in (False, True))
        assert (HOST in inputs(usual.moments[GPU])) is not ahead
        assert HOST in inputs(first.moments[GPU])
        found = play(order, step, message)
        with monkeypatch.context() as patched:
            patched.setattr(playing, "without_launches", lambda effects: effects)
            whole = play(order, step, message)
        for own, of in zip(found, whole, strict=True):
            np.testing.assert_array_equal(own, of)
