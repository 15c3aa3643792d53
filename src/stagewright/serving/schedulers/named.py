"""Schedulers by name, with defaults of serving engines; others by entry points of packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError, did_you_mean, either
from stagewright.launch.servers import SERVERS
from stagewright.run.sections.execution import ServingEngine
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.engine import Scheduler
from stagewright.serving.schedulers.sglang import SGLang
from stagewright.serving.schedulers.static import Static
from stagewright.serving.schedulers.tensorrt_llm import TensorRtLlm
from stagewright.serving.schedulers.vllm import Vllm
from stagewright.time.hardware import Hardware

ENTRY_POINTS = "stagewright.schedulers"
"""The group in which installed packages declare schedulers of their own."""
ENGINES: Mapping[str, str] = {server.table: server.scheduler for server in SERVERS}
"""Scheduler of each engine, in the words of `Execution.serving_engine`."""
SCHEDULERS: Mapping[str, type[Any]] = {
    "vllm": Vllm,
    "sglang": SGLang,
    "tensorrt-llm": TensorRtLlm,
    "static": Static,
}

_LIMITS = ("max_num_batched_tokens", "max_num_seqs")
"""Limits that size memory, so any scheduler may have them."""
_LARGE = 70 * 2**30
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""SGLang's chunks by memory in GiB (sglang 0.5.23, `arg_groups/memory_hook.py`)."""


class BatchLimits(NamedTuple):
    """Limits of a step."""

    tokens: int
    requests: int
    prompt_tokens: int
    """Prompt tokens of a step of SGLang."""


def batch_limits(settings: EngineSection, hardware: Hardware) -> BatchLimits:
    """Limits of the settings, or vLLM's defaults of a server.

    From 70 GiB on, but for the A100 (`Hardware.vllm_small_batches`), 8,192 tokens and 1,024
    requests, else 2,048 and 256 (vllm-project/vllm@00024d31 `vllm/engine/arg_utils.py`,
    `get_batch_defaults`).
    """
    large = hardware.memory >= _LARGE and not hardware.vllm_small_batches
    tokens = settings.max_num_batched_tokens or (8192 if large else 2048)
    requests = settings.max_num_seqs or min(1024 if large else 256, tokens)
    if tokens < requests:
        raise UserError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {requests}: in a step "
            "each request gets at least a token; raise the first or lower the second"
        )
    prompts = next((n for gib, n in _CHUNKS if hardware.memory < gib * 2**30), 16384)
    return BatchLimits(tokens, requests, settings.chunked_prefill_size or prompts)


def schedules_ahead(settings: EngineSection, pp: int) -> bool:
    """True if a step is scheduled when the previous one begins: not in a pipeline of `pp` ranks."""
    return settings.async_scheduling and pp == 1


def scheduler_of(settings: EngineSection, limits: BatchLimits, pp: int) -> Scheduler:
    """Scheduler that the settings name, for engines with `pp` pipeline ranks.

    A class that is a dataclass gets the settings that it has fields for. Others than the built-in
    ones are entry points of installed packages in the group `ENTRY_POINTS`.
    """
    scheduler_class = class_of(settings.scheduler)
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    values |= {"max_num_batched_tokens": limits.tokens, "max_num_seqs": limits.requests}
    values["chunked_prefill_size"] = limits.prompt_tokens
    values["async_scheduling"] = schedules_ahead(settings, pp)
    values = {name: value for name, value in values.items() if value is not None}
    names = _settings(scheduler_class)
    make = cast("Callable[..., Scheduler]", scheduler_class)
    try:
        return make(**{name: values[name] for name in names & values.keys()})
    except TypeError as error:
        raise UserError(f"--scheduler {settings.scheduler}: cannot be made: {error}") from None


def refuse_chunks_below_a_block(scheduler: Scheduler, block_size: int) -> None:
    """Raise a UserError where chunks of prompts, cut to whole blocks, would have no token."""
    if isinstance(scheduler, SGLang):
        setting, tokens = "--chunked-prefill-size", scheduler.chunked_prefill_size
    elif isinstance(scheduler, TensorRtLlm) and scheduler.enable_chunked_prefill:
        setting, tokens = "--max-num-batched-tokens", scheduler.max_num_batched_tokens
    else:
        return
    if tokens < block_size:
        raise UserError(
            f"{setting} is {tokens}, wanted at least --kv-block-size, {block_size}: this scheduler "
            "cuts chunks of prompts to whole blocks; raise the first or lower the second"
        )


def refuse_others(settings: EngineSection) -> None:
    """Raise a UserError for a setting of another scheduler, which would say nothing."""
    used = _settings(class_of(settings.scheduler))
    for setting in fields(settings):
        name, is_default = setting.name, getattr(settings, setting.name) == setting.default
        owners = [key for key, of_class in SCHEDULERS.items() if name in _settings(of_class)]
        if name in {*_LIMITS, *used} or not owners or is_default:
            continue
        raise UserError(
            f"--{name.replace('_', '-')} is a setting of --scheduler {either(owners)}, not of "
            f"{settings.scheduler}; leave it out"
        )


def class_of(scheduler: str) -> Any:
    """Class of a scheduler by name."""
    return SCHEDULERS.get(scheduler) or _installed(scheduler)


def engine_of(scheduler_class: type[Any]) -> ServingEngine | None:
    """Engine whose scheduler has this class, or derives from it."""
    engines = (of for of, name in ENGINES.items() if issubclass(scheduler_class, SCHEDULERS[name]))
    return cast("ServingEngine | None", next(engines, None))


def _settings(scheduler_class: Any) -> set[str]:
    """Fields of a scheduler that is a dataclass."""
    return {f.name for f in fields(scheduler_class)} if is_dataclass(scheduler_class) else set()


def _installed(name: str) -> Any:
    """Class of an entry point; a run file can name no other code."""
    declared = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in declared:
        hint = did_you_mean(name, [*SCHEDULERS, *declared])
        raise UserError(
            f"--scheduler is {name!r}, wanted {either([*SCHEDULERS, *declared])}, or an "
            f"entry point of the group {ENTRY_POINTS!r}{hint}"
        )
    try:
        scheduler_class = declared[name].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"--scheduler {name}: {error}; see its package's entry point") from None
    if not callable(getattr(scheduler_class, "schedule", None)):
        raise UserError(f"--scheduler {name}: has no method schedule(engine)")
    return scheduler_class
