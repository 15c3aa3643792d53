"""Command lines of vLLM, SGLang and TensorRT-LLM for the instances of a deployment.

They have every setting that was timed, those that are an engine's defaults, too, so that another
version of the engine does the same. A setting without an option is a comment. Names of options:
vllm-project/vllm@00024d31 `vllm/engine/arg_utils.py`; sglang 0.5.23 `srt/server_args.py`;
NVIDIA/TensorRT-LLM@64e644e7 `tensorrt_llm/commands/serve.py`, `llmapi/llm_args.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError, either
from stagewright.launch.names import written
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.schedulers.named import schedules_ahead

_JOINING = {
    "vllm": [
        "# instances on one host need a --port and a VLLM_NIXL_SIDE_CHANNEL_PORT (5600) each",
        "# clients send to a proxy: toy_proxy_server.py in vLLM's tests/v1/kv_connector/"
        "nixl_integration, with --prefiller-hosts, --prefiller-ports, --decoder-hosts, "
        "--decoder-ports",
    ],
    "sglang": [
        "# instances on one host need a --port each, and for prefill a "
        "--disaggregation-bootstrap-port (8998) each",
        "# clients send to a router: python3 -m sglang_router.launch_router --pd-disaggregation "
        "--prefill http://HOST:PORT BOOTSTRAP_PORT --decode http://HOST:PORT",
    ],
    "trtllm": [
        "# instances on one host need a --port each",
        "# clients send to trtllm-serve disaggregated -c FILE, with urls of context_servers "
        "(prefill) and generation_servers (decode)",
    ],
}
"""Comments on how instances for prefill and for decode are reached, by engine."""
HUB = "https://huggingface.co/"
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
"""Scheduler of each engine."""


def check_engine(engine: str, schedulers: Sequence[str]) -> None:
    """Raise UserError for an engine whose scheduler is none of those that are timed."""
    if ENGINES[engine] not in schedulers:
        timed = either(schedulers)
        raise UserError(
            f"--as {engine}: scheduler {timed} is timed; add --scheduler {ENGINES[engine]}"
        )


def command_lines(deployment: Deployment, engine: str) -> list[str]:
    """Command line of an instance of each group; `#` begins comments.

    Raises UserError for an unknown engine, and one whose scheduler is not the one that was timed.
    """
    if engine not in ENGINES:
        raise UserError(f"--as {engine}: wanted {either(ENGINES)}")
    lines: list[str] = []
    for group in deployment.groups:
        timed = group.settings.scheduler
        if timed != ENGINES[engine]:
            raise UserError(
                f"--as {engine}: this deployment was timed with scheduler {timed}; give another "
                f"row (--run), or only --scheduler {ENGINES[engine]}"
            )
        role = "" if group.role == "both" else f" for {group.role}"
        count = group.settings.instances
        lines.append(
            f"# {count} x {group.instance.gpus} x {group.instance.machine.hardware.name}{role}"
        )
        lines += _WRITERS[engine](group)
    return lines + _JOINING[engine] * deployment.disaggregated


def _model(group: InstanceGroup) -> str:
    """Id on the hub, or the name or path that was given."""
    source = group.instance.model.source
    if source.startswith(HUB):
        return "/".join(source.removeprefix(HUB).split("/")[:2])
    return group.instance.run.model


def _max_model_len(group: InstanceGroup) -> int:
    """Longest request: engines do not start where the cache of one has no room for it."""
    cache = group.instance.cache
    return min(group.max_model_len, cache.num_blocks * cache.block_size)


def _line(command: str, options: Mapping[str, Any]) -> str:
    """A command with its options: True alone, None left out."""
    words = [command]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(name if value is True else f"{name} {shlex.quote(str(value))}")
    return " ".join(words)


def _name(tool: str, setting: str) -> str:
    """Option of an engine for a setting, as its table has it."""
    words = written(tool, setting, "True")
    assert words is not None, setting
    return f"--{words[0]}"


def _vllm(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    experts = group.instance.model.num_experts > 0
    speculative: dict[str, Any] | None = None
    if run.num_speculative_tokens and engines.speculative_method:
        speculative = {
            "method": engines.speculative_method,
            "num_speculative_tokens": run.num_speculative_tokens,
        }
        if engines.speculative_model:
            speculative["model"] = engines.speculative_model
    yield _line(
        f"vllm serve {_model(group)}",
        {
            _name("vllm", "tp"): run.tp,
            _name("vllm", "pp"): run.pp if run.pp > 1 else None,
            _name("vllm", "dp"): run.dp if run.dp > 1 else None,
            "--enable-expert-parallel": experts and run.ep > 1,
            "--quantization": _quantization(run.weight_precision, {"nvfp4": "modelopt_fp4"}),
            "--kv-cache-dtype": {None: "auto", "bf16": "bfloat16"}.get(
                run.kv_cache_dtype, run.kv_cache_dtype
            ),
            _name("vllm", "kv_block_size"): run.kv_block_size,
            _name("vllm", "max_model_len"): _max_model_len(group),
            _name("vllm", "max_num_batched_tokens"): group.limits.tokens,
            _name("vllm", "max_num_seqs"): group.limits.requests,
            _name("vllm", "gpu_memory_utilization"): engines.gpu_memory_utilization,
            _name("vllm", "num_gpu_blocks"): engines.num_gpu_blocks,
            _name("vllm", "long_prefill_token_threshold"): engines.long_prefill_token_threshold
            or None,
            _name("vllm", "scheduling_policy"): engines.scheduling_policy,
            _switch("enable-prefix-caching", engines.enable_prefix_caching): True,
            _switch("enable-chunked-prefill", engines.enable_chunked_prefill is not False): True,
            _switch("async-scheduling", schedules_ahead(engines, run.pp)): True,
            "--speculative-config": None if speculative is None else json.dumps(speculative),
            "--kv-transfer-config": None
            if group.role == "both"
            else json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
        },
    )
    if run.num_speculative_tokens and not speculative:
        yield f"# {run.num_speculative_tokens} drafts a step that take no time have no option"


def _sglang(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    replicas = run.dp
    # With attention data parallelism it is multiplied by 0.3, and the chunk is that of all replicas
    # (`_handle_data_parallelism`).
    waits = engines.schedule_conservativeness / (0.3 if replicas > 1 else 1)
    yield _line(
        f"python3 -m sglang.launch_server --model-path {_model(group)}",
        {
            _name("sglang", "tp"): run.tp * replicas,  # with attention data parallelism: of both
            _name("sglang", "pp"): run.pp if run.pp > 1 else None,
            _name("sglang", "dp"): replicas if replicas > 1 else None,
            _name("sglang", "enable_dp_attention"): replicas > 1,
            _name("sglang", "ep"): run.ep if run.ep > 1 else None,
            "--quantization": _quantization(run.weight_precision, {"nvfp4": "modelopt_fp4"}),
            "--kv-cache-dtype": {None: "auto", "bf16": "bf16", "fp8": "fp8_e4m3"}.get(
                run.kv_cache_dtype, run.kv_cache_dtype
            ),
            _name("sglang", "kv_block_size"): run.kv_block_size,
            _name("sglang", "max_model_len"): _max_model_len(group),
            _name("sglang", "chunked_prefill_size"): group.limits.prompt_tokens
            * replicas,  # of all
            _name("sglang", "max_prefill_tokens"): engines.max_prefill_tokens,
            _name("sglang", "max_num_seqs"): group.limits.requests * replicas,
            _name("sglang", "max_total_tokens"): group.num_blocks * run.kv_block_size,
            _name("sglang", "schedule_policy"): engines.schedule_policy,
            _name("sglang", "schedule_conservativeness"): round(waits, 9),
            _name("sglang", "scheduler_recv_interval"): engines.scheduler_recv_interval,
            _name("sglang", "enable_mixed_chunk"): engines.enable_mixed_chunk,
            "--disable-radix-cache": not engines.enable_prefix_caching,
            "--disable-overlap-schedule": not engines.async_scheduling,
            "--disaggregation-mode": None if group.role == "both" else group.role,
        },
    )
    if run.num_speculative_tokens:
        yield f"# {run.num_speculative_tokens} drafts a step: --speculative-algorithm and its model"


def _trtllm(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    replicas = run.dp
    fields: dict[str, Any] = {
        "enable_attention_dp": replicas > 1,
        "enable_chunked_prefill": bool(engines.enable_chunked_prefill),
        "disable_overlap_scheduler": not engines.async_scheduling,
        "scheduler_config": {
            "capacity_scheduler_policy": engines.capacity_scheduler_policy.upper()
        },
        "kv_cache_config": {
            "dtype": {None: "auto", "bf16": "auto"}.get(run.kv_cache_dtype, run.kv_cache_dtype),
            "enable_block_reuse": engines.enable_prefix_caching,
            "tokens_per_block": run.kv_block_size,
            "max_tokens": group.num_blocks * run.kv_block_size,
        },
    }
    if engines.batch_wait_timeout_iters:
        fields["batch_wait_timeout_iters"] = engines.batch_wait_timeout_iters
        fields["batch_wait_max_tokens_ratio"] = engines.batch_wait_max_tokens_ratio
    if group.role != "both":
        fields["cache_transceiver_config"] = {"backend": "DEFAULT"}
    yield f"# config.yaml: {json.dumps(fields)}"
    yield _line(
        f"trtllm-serve {_model(group)}",
        {
            "--tp_size": run.tp * replicas,  # with attention data parallelism: of both
            "--pp_size": run.pp if run.pp > 1 else None,
            "--ep_size": run.ep if run.ep > 1 else None,
            "--max_batch_size": group.limits.requests,
            "--max_num_tokens": group.limits.tokens,
            "--max_seq_len": _max_model_len(group),
            "--config": "config.yaml",
        },
    )
    if run.weight_precision:
        yield f"# weights in {run.weight_precision}: of the checkpoint"
    if run.num_speculative_tokens:
        yield f"# {run.num_speculative_tokens} drafts a step: speculative_config of config.yaml"


def _quantization(precision: str | None, names: Mapping[str, str]) -> str | None:
    """The engine's name of a storage format; None, bf16: the checkpoint's own."""
    return None if precision in (None, "bf16") else names.get(precision, precision)


def _switch(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


_WRITERS: Mapping[str, Callable[[InstanceGroup], Iterator[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
