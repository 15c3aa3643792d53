"""docs/accuracy/data/choices.csv has today's steps of layouts beside published ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import choices
from stagewright.evidence.training import machine_of, step_seconds


def test_every_run_has_its_published_layout() -> None:
    lines = choices.lines()
    for each in choices.JOBS:
        of = [o for o in lines if (o["source"], o["row"]) == (each.source, each.row)]
        assert [o["published"] for o in of].count("1") == 1, each
        m = choices.published(each)
        (published,) = (o for o in of if o["published"] == "1")
        assert [published[name] for name in choices.DEGREES] == [
            str(getattr(m.run, name)) for name in choices.DEGREES
        ]


@pytest.mark.slow
@pytest.mark.parametrize("each", choices.JOBS[:2], ids=lambda each: each.row)
def test_steps_are_those_of_the_file(each: Any) -> None:
    """Within 2%: what changes less need not simulate all layouts again."""
    m = choices.published(each)
    machine = machine_of(m)
    of = [o for o in choices.lines() if (o["source"], o["row"]) == (each.source, each.row)]
    for line in of[::4]:
        values = {name: int(line[name]) for name in choices.DEGREES}
        run = m.run if line["published"] == "1" else choices.possible(m, values)
        seconds = step_seconds(replace(m, run=run), machine)
        assert seconds == pytest.approx(float(line["seconds"]), rel=0.02)


def test_layers_are_spread_evenly_with_fewer_at_the_ends() -> None:
    assert choices.near_even(10, 4) == (2, 3, 3, 2)
    assert choices.near_even(94, 8) == (11, 12, 12, 12, 12, 12, 12, 11)
    assert sum(choices.near_even(61, 16)) == 61
