"""What groups of candidates share: by the settings that were read, for tuples that answer alike."""

import numpy as np
import pytest

from stagewright.errors import UserError
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.shared.tuples import Shared
from stagewright.run.settings import Run

RUN = Run(model="gpt2")


def test_settings_of_copies_and_properties_count_as_read():
    shared = BySettingsRead()

    def ranks(run: Run) -> list[int]:
        return [run.model_copy(update={"cp": 2}).world_size]

    first = shared.of("ranks", RUN, ranks)
    assert shared.of("ranks", RUN.model_copy(update={"zero": 1}), ranks) is first
    assert shared.of("ranks", RUN.model_copy(update={"pp": 4}), ranks) == [8]
    assert shared.of("others", RUN, ranks) is not first


def test_an_error_is_shared_too():
    shared, asked = BySettingsRead(), list[int]()

    def refused(run: Run) -> int:
        asked.append(run.tp)
        raise UserError("no")

    for zero in (0, 1):
        with pytest.raises(UserError, match="no"):
            shared.of("refused", RUN.model_copy(update={"zero": zero}), refused)
    assert asked == [1]


def test_tuples_answer_as_when_it_was_made():
    shared = Shared()
    columns = {"tp": np.array([2, 4, 1])}

    def split(run: Run) -> list[bool]:
        return [run.tp > 1]

    made: list[list[bool]] = []
    for zero in (0, 1):
        tuples = shared.tuples(columns, 3)
        assert tuples.cases.alike.all()
        run = RUN.model_copy(update={"zero": zero})
        made.append(shared.made("split", run, tuples, split))
        assert tuples.cases.alike.tolist() == [True, True, False]
    assert made[0] is made[1]
    others = shared.tuples({"tp": np.array([1, 4, 2])}, 3)
    assert shared.made("split", RUN, others, split) == [False]
    assert others.cases.alike.tolist() == [True, False, False]
