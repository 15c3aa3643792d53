"""What groups of candidates share: by the settings that were read, for tuples that answer alike."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.explore.shared.settings_read import BySettingsRead
from stagewright.explore.shared.tuples import Shared
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
