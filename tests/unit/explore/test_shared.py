"""What groups of candidates share: by the settings that were read, for tuples that answer alike."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.explore.actions import INPUTS
from stagewright.explore.responses import FIELDS, SUMS, Responses
from stagewright.explore.shared.played import LinearResponse, LinearRows
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.shared.tuples import Shared
from stagewright.explore.templates import ONLY
from stagewright.explore.timing import KnownOnMachine
from stagewright.run.sections.execution import ISSUED_BY, LAUNCHED_BY, Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.time.inference_fits import DirectAllReduce
from stagewright.time.network import Machine
from stagewright.time.simulate.issue import issue
from stagewright.time.simulate.launches import host_work

RUN = Run(model="gpt2")
H100 = resolve("h100-sxm")


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


@pytest.mark.parametrize("kind", [UserError, TypeError])
def test_an_error_that_is_raised_again_has_the_frames_of_that_time_alone(kind: type[Exception]):
    shared, frames = Shared(), list[list[str]]()

    def refused(run: Run) -> int:
        raise kind("no")

    for _ in range(3):
        tuples = shared.tuples({"tp": np.array([2, 4])}, 2)
        with pytest.raises(kind, match="no") as caught:
            shared.block("refused", RUN, tuples, refused)
        frames.append([entry.name for entry in caught.traceback])
        if kind is UserError:
            with pytest.raises(kind, match="no") as caught:
                shared.by_settings.of("refused", RUN, refused)
            frames[-1] += [entry.name for entry in caught.traceback]
    assert frames[0] == frames[1] == frames[2]
    assert "refused" not in frames[0]


def test_tuples_answer_as_when_it_was_made():
    shared = Shared()
    columns = {"tp": np.array([2, 4, 1])}

    def split(run: Run) -> list[bool]:
        return [run.tp > 1]

    made: list[list[bool]] = []
    for zero in (0, 1):
        tuples = shared.tuples(columns, 3)
        assert tuples.cases.alike.all()
        run = RUN.model_copy(update={"zero": zero, **tuples.numbers})
        made.append(shared.block("split", run, tuples, split))
        assert tuples.cases.alike.tolist() == [True, True, False]
    assert made[0] is made[1]
    others = shared.tuples({"tp": np.array([1, 4, 2])}, 3)
    run = RUN.model_copy(update={**others.numbers})
    assert shared.block("split", run, others, split) == [False]
    assert others.cases.alike.tolist() == [True, False, False]


def test_equal_whole_numbers_of_tuples_are_one_object():
    tuples = Shared().tuples({"tp": np.array([1, 4, 2])}, 3)
    tp: Any = tuples.numbers["tp"]
    assert tuples.one(tp * 2 - tp) is tp
    assert tuples.one(tp * 2) is tuples.one(tp + tp) is not tp
    assert tuples.one(tp / 3) is not tuples.one(tp / 3)
    assert tuples.one(2) == 2


class ExecutionRead:
    """An execution, and the names of the settings that were read of it."""

    def __init__(self, how: Execution, names: set[str]) -> None:
        self.how, self.names = how, names

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.how, name)


def test_orders_and_launches_are_shared_by_all_that_they_read_of_an_execution():
    tiny: dict[str, Any] = {"model": "gpt2", "layers": 1, "vocab": 256}
    steps = [
        sw.compile(**tiny, seq_length=32, dp=2, zero=1),
        sw.compile(**tiny, mode="prefill", prompt_length=32),
    ]
    captured = {"launch_mode": "cuda_graph", "cuda_graph_modules": frozenset({"attn"})}
    executions: list[dict[str, Any]] = [
        {},
        {"streams": "one"},
        {"overlap_param_gather": True, "prefetch": 2, "no_overlap": frozenset({"dp"})},
        {**captured, "collective_checks": True},
    ]
    issued, launched = set[str](), set[str]()
    for of in steps:
        for how in executions:
            read = [ExecutionRead(Execution(**how), names) for names in (issued, launched)]
            orders, launches = cast("list[Execution]", read)
            issue(of.program, of.program.classes[0].tasks, orders)
            host_work(of.program, of.run, launches, H100)
    assert (issued, launched) == ({*ISSUED_BY}, {*LAUNCHED_BY})


def test_machines_that_differ_in_their_kernels_of_collectives_share_nothing():
    machine = Machine.of(H100, gpus=8)
    kernel = DirectAllReduce(latency_us=1, gpu_us=1, bandwidth_fraction=0.5, second_us=1)
    one, other = machine, replace(machine, direct_all_reduce=kernel)
    assert KnownOnMachine.key(one) == KnownOnMachine.key(Machine.of(H100, gpus=8))
    assert KnownOnMachine.key(one) != KnownOnMachine.key(other)


def test_responses_are_joined_where_all_actions_have_programs_of_the_same_few_layers():
    table = np.zeros((FIELDS * INPUTS + 1 + SUMS, 1))

    def responses(*few: tuple[int, ...]) -> Responses:
        """A forward with no layers besides, and a backward with `few`."""
        rows = [
            LinearRows.of(table, [table], dict.fromkeys(own, table), (2,), ())
            for own in (((0,),), few)
        ]
        kinds = [(((ONLY, letter),), False) for letter in "FB"]
        of = [LinearResponse(each, np.zeros(1, dtype=np.int64)) for each in rows]
        return Responses(dict(zip(kinds, of, strict=True)), {}, {})

    assert responses((0,), (1,)).form == responses((1,), (0,)).form
    assert responses((0,)).form != responses((1,)).form != responses((0,), (1,)).form


def test_rows_of_layers_are_those_of_whole_tables():
    random = np.random.default_rng(0)

    def rows(axes: tuple[str, ...], cases: int) -> tuple[LinearRows, np.ndarray]:
        """Some that repeat, and as a table [programs, rows, cases]: 2 layers, one more, none."""
        table = random.integers(0, 2, (3, 4 + len(axes), cases)) * random.integers(1, 3)
        base, more, none = table.astype(float)
        return LinearRows.of(base, [more], {(0,): none}, (2,), axes), table.astype(float)

    (tp, of_tp), (both, of_both) = rows(("tp",), 3), rows(("dp", "tp"), 2)
    joined = LinearRows.concatenated([tp, both], ("dp", "tp"))
    widened = np.insert(of_tp, 4, 0, axis=1)  # nothing waits along dp
    base, more, none = np.concatenate([widened, of_both], axis=2)
    assert len(joined.table) < 3 * len(base)
    cases, some = np.array([4, 0, 4]), slice(1, None)
    for layers, wanted in ((2, base), (5, base + 3 * more), (0, none)):
        found = joined.at(cases, np.array([float(layers)]), some)
        assert found.expanded().tolist() == wanted[some][:, cases].tolist()
    alike = np.unique(np.concatenate([base, more, none]), axis=1, return_inverse=True)[1]
    assert (
        np.equal.outer(*2 * [joined.classes(slice(None))]) == np.equal.outer(alike, alike)
    ).all()
