"""Orders in columns: against what each action needs."""

import numpy as np
import pytest

from stagewright.schedule.actions import Action, Order, flat, halved, needs, stage_count
from stagewright.schedule.columns import OrderColumns
from stagewright.schedule.schedules import make

ORDERS = [
    ("1f1b", 4, 6, 1),
    ("gpipe", 3, 3, 1),
    ("interleaved", 2, 6, 3),
    ("looped-bfs", 2, 4, 2),
    ("zb-h1", 4, 8, 1),
    ("zbv", 3, 6, 2),
    ("dualpipe", 4, 8, 1),
]


@pytest.mark.parametrize(("name", "pp", "microbatches", "vpp"), ORDERS)
def test_each_step_comes_behind_what_its_actions_need(
    name: str, pp: int, microbatches: int, vpp: int
) -> None:
    order = make(name, pp, microbatches, vpp)
    of = OrderColumns.of(order)
    found = of.execution()
    actions = [a for steps in order for a in flat(steps)]
    rank = {a: r for r, steps in enumerate(order) for a in flat(steps)}
    stages, halves = stage_count(order), halved(order)
    place = np.empty(len(found.steps), dtype=np.int64)
    place[found.steps] = np.arange(len(found.steps))
    at = dict(zip(actions, place[of.step].tolist(), strict=True))
    for nth, a in enumerate(actions):
        away = [need for need in needs(a, stages, halves) if rank[need] != rank[a]]
        source = int(found.source[nth])
        assert [actions[source]] * (source >= 0) == away
        for need in needs(a, stages, halves):
            assert at[need] < at[a] or (rank[need] == rank[a] and at[need] == at[a])


def test_orders_that_cannot_be_played_are_refused() -> None:
    f0, b0 = Action(0, "F", 0), Action(0, "B", 0)
    backwards: Order = ((b0, f0),)
    with pytest.raises(ValueError, match="cannot complete"):
        OrderColumns.of(backwards).execution()
    twice: Order = ((f0, b0), (f0, b0))
    with pytest.raises(ValueError, match="several ranks"):
        OrderColumns.of(twice).execution()
