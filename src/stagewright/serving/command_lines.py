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

import yaml

from stagewright.errors import UserError, either
from stagewright.launch.names import written
from stagewright.launch.tables import nested, value_of
from stagewright.run.sections.declare import text_of
from stagewright.run.settings import Run
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.schedulers.named import ENGINES, schedules_ahead

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


def check_engine(engine: str, schedulers: Sequence[str]) -> None:
    """Raise UserError for an unknown engine, or one whose scheduler is none of those timed."""
    if engine not in ENGINES:
        raise UserError(f"--as {engine}: wanted {either(ENGINES)}")
    if ENGINES[engine] not in schedulers:
        raise UserError(
            f"--as {engine}: timed with --scheduler {either(schedulers)}; give only --scheduler "
            f"{ENGINES[engine]}, or another row of a search (--run)"
        )


def command_lines(deployment: Deployment, engine: str) -> list[str]:
    """Command line of an instance of each group; `#` begins comments.

    Raises UserError for an unknown engine, and one whose scheduler is not the one that was timed.
    """
    lines: list[str] = []
    for group in deployment.groups:
        check_engine(engine, [group.settings.scheduler])
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


Options = dict[str, str]
"""Words of options by name; empty: the name alone."""


def _options(tool: str, settings: Mapping[str, Any], more: Mapping[str, Any]) -> Options:
    """Options of a tool for settings, by the rows of its table; `more`: those of no setting.

    None is left out, and so is a switch that the tool lacks for its default.
    """
    options: Options = {}
    for setting, value in settings.items():
        words = None if value is None else written(tool, setting, text_of(value))
        if words is not None:
            options[words[0]] = "".join(words[1:])
    values = {name: value for name, value in more.items() if value not in (None, False)}
    return options | {name: "" if value is True else str(value) for name, value in values.items()}


def _line(command: str, options: Options) -> str:
    words = [f"--{name} {shlex.quote(text)}".rstrip() if text else f"--{name}"
             for name, text in options.items()]  # fmt: skip
    return " ".join([command, *words])


def _above_one(run: Run, *names: str) -> dict[str, int]:
    return {name: getattr(run, name) for name in names if getattr(run, name) > 1}


def _stored(run: Run) -> str | None:
    """How weights are stored; None: as the checkpoint has them."""
    return None if run.weight_precision == "bf16" else run.weight_precision


def _launch_mode(group: InstanceGroup) -> str | None:
    """Eager steps; None: CUDA graphs, which engines have by default."""
    execution = group.instance.execution
    is_eager = execution is not None and execution.launch_mode in ("eager", "blocking")
    return "eager" if is_eager else None


def _of_checkpoint(tool: str, run: Run) -> Iterator[str]:
    """Comment on weights that the server does not convert itself."""
    stored = _stored(run)
    if stored and (stored != "fp8" or tool == "trtllm"):
        yield f"# weights in {stored}: the checkpoint has to have them so"


def _vllm(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    speculative: dict[str, Any] = {}
    if run.num_speculative_tokens and engines.speculative_method:
        values = {name: value for name in ("speculative_method", "speculative_model")
                  if (value := getattr(engines, name))}  # fmt: skip
        drafts = _options(
            "vllm", values | {"num_speculative_tokens": run.num_speculative_tokens}, {}
        )
        speculative = {name.partition(".")[2]: value_of(text) for name, text in drafts.items()}
    experts = group.instance.model.num_experts > 0
    settings = {
        "tp": run.tp,
        **_above_one(run, "pp", "dp"),
        "enable_expert_parallel": (experts and run.ep > 1) or None,
        "weight_precision": _stored(run),
        "kv_cache_dtype": run.kv_cache_dtype,
        "kv_block_size": run.kv_block_size,
        "max_model_len": _max_model_len(group),
        "max_num_batched_tokens": group.limits.tokens,
        "max_num_seqs": group.limits.requests,
        "gpu_memory_utilization": engines.gpu_memory_utilization,
        "num_gpu_blocks": engines.num_gpu_blocks,
        "long_prefill_token_threshold": engines.long_prefill_token_threshold or None,
        "scheduling_policy": engines.scheduling_policy,
        "enable_prefix_caching": engines.enable_prefix_caching,
        "enable_chunked_prefill": engines.enable_chunked_prefill is not False,
        "async_scheduling": schedules_ahead(engines, run.pp),
        "launch_mode": _launch_mode(group),
    }
    more = {
        "kv-cache-dtype": None if run.kv_cache_dtype else "auto",
        "speculative-config": json.dumps(speculative) if speculative else None,
        "kv-transfer-config": None
        if group.role == "both"
        else json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
    }
    yield _line(f"vllm serve {_model(group)}", _options("vllm", settings, more))
    if run.num_speculative_tokens and not speculative:
        yield _FREE_DRAFTS.format(run.num_speculative_tokens)
    ranks = run.tp * run.cp * run.dp
    if experts and run.ep not in (1, ranks):
        yield f"# ep={run.ep} of {ranks} ranks has no option: this line has ep={ranks}"
    yield from _of_checkpoint("vllm", run)


_FREE_DRAFTS = "# {} drafts a step that take no time have no option"


def _sglang(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    replicas, drafts = run.dp, run.num_speculative_tokens
    # With attention data parallelism it is multiplied by 0.3, and the chunk is that of all replicas
    # (`_handle_data_parallelism`).
    waits = engines.schedule_conservativeness / (0.3 if replicas > 1 else 1)
    speculates = bool(drafts and engines.speculative_method)
    settings = {
        "tp": run.tp * replicas,  # with attention data parallelism: of both
        **_above_one(run, "pp", "dp", "ep"),
        "enable_dp_attention": replicas > 1 or None,
        "weight_precision": _stored(run),
        "kv_cache_dtype": run.kv_cache_dtype,
        "kv_block_size": run.kv_block_size,
        "max_model_len": _max_model_len(group),
        "chunked_prefill_size": group.limits.prompt_tokens * replicas,  # of all
        "max_prefill_tokens": engines.max_prefill_tokens,
        "max_num_seqs": group.limits.requests * replicas,
        "max_total_tokens": group.num_blocks * run.kv_block_size,
        "schedule_policy": engines.schedule_policy,
        "schedule_conservativeness": round(waits, 9),
        "scheduler_recv_interval": engines.scheduler_recv_interval,
        "enable_mixed_chunk": engines.enable_mixed_chunk or None,
        "enable_prefix_caching": engines.enable_prefix_caching,
        "async_scheduling": engines.async_scheduling,
        "launch_mode": _launch_mode(group),
    }
    more: dict[str, Any] = {"kv-cache-dtype": None if run.kv_cache_dtype else "auto"}
    if speculates:
        settings |= {
            "speculative_method": engines.speculative_method,
            "speculative_model": engines.speculative_model,
            "num_speculative_tokens": drafts,
        }
        more |= {"speculative-eagle-topk": 1, "speculative-num-draft-tokens": drafts + 1}
    more["disaggregation-mode"] = None if group.role == "both" else group.role
    command = f"python3 -m sglang.launch_server --model-path {_model(group)}"
    yield _line(command, _options("sglang", settings, more))
    if drafts and not speculates:
        yield _FREE_DRAFTS.format(drafts)
    yield from _of_checkpoint("sglang", run)


_LINE = {"tp_size", "pp_size", "ep_size", "max_batch_size", "max_num_tokens", "max_seq_len"}
"""Options of `trtllm-serve`; other fields are in its YAML."""


def _trtllm(group: InstanceGroup) -> Iterator[str]:
    run, engines = group.instance.run, group.settings
    replicas, drafts = run.dp, run.num_speculative_tokens
    waits = engines.batch_wait_timeout_iters
    settings = {
        "tp": run.tp * replicas,  # with attention data parallelism: of both
        **_above_one(run, "pp", "ep"),
        "max_num_seqs": group.limits.requests,
        "max_num_batched_tokens": group.limits.tokens,
        "max_model_len": _max_model_len(group),
        "enable_attention_dp": replicas > 1,
        "enable_chunked_prefill": bool(engines.enable_chunked_prefill),
        "async_scheduling": engines.async_scheduling,
        "capacity_scheduler_policy": engines.capacity_scheduler_policy,
        "batch_wait_timeout_iters": waits or None,
        "batch_wait_max_tokens_ratio": engines.batch_wait_max_tokens_ratio if waits else None,
        "kv_cache_dtype": run.kv_cache_dtype,
        "enable_prefix_caching": engines.enable_prefix_caching,
        "kv_block_size": run.kv_block_size,
        "max_total_tokens": group.num_blocks * run.kv_block_size,
    }
    more: dict[str, Any] = {"kv_cache_config.dtype": None if run.kv_cache_dtype else "auto"}
    if drafts and engines.speculative_method:
        settings |= {
            "speculative_method": engines.speculative_method,
            "speculative_model": engines.speculative_model,
        }
        name = (
            "num_nextn_predict_layers" if engines.speculative_method == "mtp" else "max_draft_len"
        )
        more[f"speculative_config.{name}"] = drafts
    if group.role != "both":
        more["cache_transceiver_config.backend"] = "DEFAULT"
    options = _options("trtllm", settings, more)
    fields = nested({name: text for name, text in options.items() if name not in _LINE})
    fields |= {"cuda_graph_config": None} if _launch_mode(group) else {}
    if replicas > 1 and run.tp > 1:
        yield (
            f"# tp={run.tp} in each of dp={replicas} has no option: attention is split by tp or "
            f"not at all; this line has dp={run.tp * replicas}"
        )
    file = "config.yaml" if group.role == "both" else f"{group.role}.yaml"
    yield f"cat > {file} <<'END'"
    yield from yaml.safe_dump(fields, sort_keys=False).splitlines()
    yield "END"
    line = {name: text for name, text in options.items() if name in _LINE}
    yield _line(f"trtllm-serve {_model(group)}", line | {"config": file})
    if drafts and not engines.speculative_method:
        yield _FREE_DRAFTS.format(drafts)
    yield from _of_checkpoint("trtllm", run)


_WRITERS: Mapping[str, Callable[[InstanceGroup], Iterator[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
