"""Schedulers by name: ours, and those that installed packages declare."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from stagewright.errors import UserError
from stagewright.run.sections.serving import SERVING, EngineSection
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.schedulers import named
from stagewright.serving.schedulers.sglang import SGLang
from stagewright.serving.schedulers.static import Static
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.time.hardware import resolve

LIMITS = named.BatchLimits(2048, 256, 8192)


def declare(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("mine", value, named.ENTRY_POINTS)

    def entry_points(group: str) -> list[EntryPoint]:
        return [point] if group == named.ENTRY_POINTS else []

    monkeypatch.setattr(named, "entry_points", entry_points)


def made(name: str) -> Any:
    return named.scheduler_of(EngineSection(scheduler=name), LIMITS, 1)


def test_an_installed_package_declares_one(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "stagewright.serving.schedulers.static:Static")
    assert isinstance(made("mine"), Static)


def test_a_setting_of_another_scheduler_is_refused() -> None:
    named.refuse_others(EngineSection(scheduler="sglang", schedule_policy="lpm", max_num_seqs=8))
    for asked in (EngineSection(schedule_policy="lpm"),
                  EngineSection(scheduler="static", enable_chunked_prefill=True)):  # fmt: skip
        with pytest.raises(UserError, match="is a setting of --scheduler"):
            named.refuse_others(asked)


def test_chunks_below_a_block_are_refused() -> None:
    """Of 32 tokens a chunk of 16 has no whole block, and no prompt would ever begin."""
    cut = TensorRtLlm(max_num_batched_tokens=16, enable_chunked_prefill=True)
    for scheduler in (SGLang(chunked_prefill_size=16), cut):
        named.refuse_chunks_below_a_block(scheduler, 16)
        with pytest.raises(UserError, match="is 16, wanted at least --kv-block-size, 32"):
            named.refuse_chunks_below_a_block(scheduler, 32)
    named.refuse_chunks_below_a_block(TensorRtLlm(max_num_batched_tokens=16), 32)
    instance: Any = SimpleNamespace(cache=SimpleNamespace(block_size=16))
    with pytest.raises(UserError, match="--chunked-prefill-size is 8, wanted at least"):
        InstanceGroup(instance, EngineSection(), LIMITS, SGLang(chunked_prefill_size=8))


def test_a_module_that_is_only_named_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "no_such_module:Mine")
    with pytest.raises(UserError, match="wanted vllm, sglang, tensorrt-llm, static or mine"):
        made("os:system")
    with pytest.raises(UserError, match="--scheduler mine: No module named 'no_such_module'"):
        made("mine")


def test_help_names_every_scheduler() -> None:
    """Sections import no table of schedulers: the names stand there again."""
    assert named.SCHEDULERS.keys() <= {
        *SERVING["scheduler"].help.removeprefix("Scheduler: ").split(", ")
    }


def test_batches_of_an_a100_are_small_whatever_its_name() -> None:
    a100 = resolve("a100-sxm-80gb").model_copy(update={"name": "mine"})
    assert named.batch_limits(EngineSection(), a100)[:2] == (2048, 256)
    assert named.batch_limits(EngineSection(), resolve("h100-sxm"))[:2] == (8192, 1024)
