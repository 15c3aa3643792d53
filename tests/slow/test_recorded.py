"""Steps, traces and serving runs are on record; `tools/record.py tests/data/recorded` renews it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from helpers import DATA, ROOT
from stagewright.schedule.schedules import SCHEDULES

SPEC = importlib.util.spec_from_file_location("record", ROOT / "tools" / "record.py")
assert SPEC
assert SPEC.loader
record = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record)

FOLDER = DATA / "recorded"
STEPS: list[Any] = record.read(FOLDER, "steps")
SERVING: list[Any] = record.read(FOLDER, "serving")
SERVING_RUNS = [*record.recorded_serving.runs()]
CHECKED = 40


def test_record_reaches_everything() -> None:
    """All schedules, ZeRO stages, modes, habits, and ways to execute are among the steps."""

    def seen(name: str, of: str = "settings") -> set[Any]:
        return {str(line[of].get(name)) for line in STEPS}

    assert seen("schedule") >= {*SCHEDULES}
    assert seen("zero") >= {"0", "1", "2", "3"}
    assert seen("mode") >= {"prefill", "decode"}
    assert seen("framework") >= {"torchtitan", "megatron"}
    assert seen("bucket") >= {"layer", "parameter", "rank"}
    assert seen("prefetch", "execution") >= {"0", "3"}
    modes = {"eager", "blocking", "compile", "cuda_graph", "ahead"}
    assert seen("launch_mode", "execution") >= modes
    assert seen("serving_engine", "execution") >= {"vllm", "sglang", "trtllm"}
    settings = {name for line in STEPS for name, value in line["settings"].items() if value}
    assert settings >= {"dp_shard", "expert_load", "lora_rank", "cpu_offloading_num_layers"}
    execution = {name for line in STEPS for name, value in line["execution"].items() if value}
    assert execution >= {
        "stragglers", "no_overlap", "overlap_param_gather", "tp_comm_overlap",
        "moe_flex_dispatcher", "overlap_moe_expert_parallel_comm", "collective_checks",
        "p2p_metadata_s", "pipeline_drain",
    }  # fmt: skip


@pytest.mark.parametrize("nth", range(0, len(STEPS), len(STEPS) // CHECKED))
def test_step_is_the_recorded_one(nth: int) -> None:
    (found,) = record.made("steps", STEPS[nth : nth + 1])
    assert not [*record.differences(STEPS[nth], found)]


def test_traces_are_the_recorded_ones() -> None:
    found = [*record.made("traces", STEPS)]
    assert not [*record.differences(record.read(FOLDER, "traces"), found)]


@pytest.mark.parametrize("nth", range(0, len(SERVING_RUNS), len(SERVING_RUNS) // CHECKED))
def test_serving_run_is_the_recorded_one(nth: int) -> None:
    name, settings = SERVING_RUNS[nth]
    made = record.as_written(record.recorded_serving.serving_record(name, settings))
    (old,) = (line for line in SERVING if line["serving"] == name)
    assert not [*record.differences(old, made)]
