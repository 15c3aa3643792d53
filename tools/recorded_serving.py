"""Serving runs that `record.py` records: workloads, schedulers, deployments, and their figures.

Every run is a call of `stagewright.serve`, so that the record outlives any change below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import stagewright as sw
from stagewright.errors import UserError

Settings = dict[str, Any]

SCHEDULERS = ("vllm", "sglang", "tensorrt-llm", "static")
DENSE: Settings = {"model": "llama3.1-8b", "hardware": "h100-sxm", "layers": 2}
EXPERTS: Settings = {"model": "qwen3-30b-a3b", "hardware": "h100-sxm", "layers": 2}
STAGES: Sequence[Settings] = (
    {"stage": "embed", "seconds": 0.002, "per_token": 1e-6, "servers": 2, "batch": 8},
    {"stage": "tool", "seconds": 0.01},
    {"stage": "store", "name": "host", "bandwidth_gb_s": 20, "latency_ms": 0.05},
    {"stage": "store", "name": "ssd", "bandwidth_gb_s": 4, "latency_ms": 1, "shared_by": 2},
)

WORKLOADS: dict[str, Settings] = {
    "steady": {"rate": 400, "isl": 300, "osl": 60, "num_requests": 150},
    "bursts": {
        "rate": 900, "isl": 700, "osl": 40, "num_requests": 150, "arrival": "gamma",
        "burstiness": 0.3, "burst_size": 5, "range_ratio": 0.5, "max_num_batched_tokens": 1024,
        "router": "least_loaded",
    },
    "closed": {
        "concurrency": 40, "isl": 200, "osl": 80, "num_requests": 150, "range_ratio": 0.8,
        "max_num_seqs": 10, "router": "least_loaded",
    },
    "sessions": {
        "rate": 60, "isl": 90, "osl": 40, "num_requests": 160, "turns": 4, "think_time": 0.05,
        "system_prompt": 100, "router": "session", "range_ratio": 0.3, "num_gpu_blocks": 400,
    },
    "shared": {
        "rate": 200, "isl": 60, "osl": 30, "num_requests": 160, "turns": 3, "think_time": 0.01,
        "system_prompt": 400, "router": "kv_aware", "num_gpu_blocks": 300,
    },
    "scarce": {
        "rate": 800, "isl": 100, "osl": 120, "num_requests": 120, "range_ratio": 0.6,
        "num_gpu_blocks": 90, "max_num_batched_tokens": 512,
    },
    "uncached": {
        "rate": 500, "isl": 150, "osl": 90, "num_requests": 120, "range_ratio": 0.9,
        "num_gpu_blocks": 150, "enable_prefix_caching": False,
    },
    "ahead": {
        "rate": 700, "isl": 500, "osl": 30, "num_requests": 120, "range_ratio": 0.9,
        "async_scheduling": True, "kv_block_size": 32, "router": "kv_aware",
    },
}  # fmt: skip
"""Workloads with the settings of engines that make them difficult, each for all deployments."""

DEPLOYMENTS: dict[str, Settings] = {
    "one pool": DENSE | {"instances": 3},
    "disaggregated": DENSE | {"prefill_instances": 2, "instances": 2},
    "lockstep": EXPERTS | {"dp": 4, "ep": 4, "instances": 1},
    "drafts": DENSE | {"instances": 2, "num_speculative_tokens": 3, "acceptance_length": 2.4},
    "stages": DENSE | {"instances": 3, "stages": STAGES},
}

SPLIT = DEPLOYMENTS["disaggregated"]
CLASSES: Sequence[Settings] = (
    {"name": "chat", "share": 2, "priority": 0, "ttft": 20},
    {"name": "batch", "share": 1, "priority": 5, "e2e": 900},
)
FAILING: Settings = {"fail_at": "0.05:0,0.12:1,0.2:0", "start_up_time": 0.06}
SCALING: Settings = {
    "min_instances": 1, "max_instances": 4, "instances": 2, "adjustment_interval": 0.03,
    "start_up_time": 0.02, "kv_scale_up_threshold": 0.4, "kv_scale_down_threshold": 0.2,
    "num_gpu_blocks": 300,
}  # fmt: skip
CHUNKS: Settings = {"max_num_batched_tokens": 256}

SPECIAL: dict[str, Settings] = {
    "priority": DENSE | WORKLOADS["scarce"] | {"instances": 2, "classes": CLASSES}
    | {"scheduling_policy": "priority"},
    "priority in lockstep": EXPERTS | WORKLOADS["bursts"] | {"dp": 2, "ep": 2, "classes": CLASSES}
    | {"scheduling_policy": "priority"},
    "threshold": DENSE | WORKLOADS["bursts"] | {"instances": 2, "long_prefill_token_threshold": 96},
    "no chunks": DENSE | WORKLOADS["steady"] | {"instances": 2, "enable_chunked_prefill": False},
    "lpm": DENSE | WORKLOADS["shared"] | {"scheduler": "sglang", "schedule_policy": "lpm"},
    "mixed chunks": DENSE | WORKLOADS["bursts"] | {"scheduler": "sglang", "instances": 2}
    | {"enable_mixed_chunk": True, "chunked_prefill_size": 256},
    "receives seldom": DENSE | WORKLOADS["steady"] | {"scheduler": "sglang"}
    | {"scheduler_recv_interval": 6},
    "max utilization": DENSE | WORKLOADS["scarce"] | {"scheduler": "tensorrt-llm"}
    | {"capacity_scheduler_policy": "max_utilization", "enable_chunked_prefill": True},
    "batch waits": DENSE | WORKLOADS["steady"] | {"scheduler": "tensorrt-llm"}
    | {"batch_wait_timeout_iters": 6, "batch_wait_max_tokens_ratio": 0.3},
    "chunks pushed": SPLIT | WORKLOADS["steady"] | CHUNKS | {"kv_transfer": "chunk"},
    "layers pushed": SPLIT | WORKLOADS["bursts"] | CHUNKS | {"kv_transfer": "layer"},
    "layers pushed by sglang": SPLIT | WORKLOADS["sessions"] | CHUNKS
    | {"kv_transfer": "layer", "scheduler": "sglang", "chunked_prefill_size": 256},
    "prefill routers": SPLIT | WORKLOADS["shared"] | {"prefill_router": "kv_aware"},
    "full queues": DENSE | WORKLOADS["bursts"] | {"instances": 2, "max_queued_requests": 6},
    "failures": DENSE | WORKLOADS["steady"] | FAILING | {"instances": 3},
    "failures lose requests": DENSE | WORKLOADS["scarce"] | FAILING | {"instances": 2}
    | {"on_failure": "fail"},
    "failures, disaggregated": SPLIT | WORKLOADS["steady"] | FAILING,
    "failures, disaggregated, by sglang": SPLIT | WORKLOADS["sessions"] | FAILING
    | {"scheduler": "sglang", "fail_at": "0.05:2,0.1:0,0.2:3"},
    "autoscaling": DENSE | WORKLOADS["bursts"] | SCALING,
    "autoscaling, disaggregated": DENSE | WORKLOADS["steady"] | SCALING | {"prefill_instances": 2},
    "autoscaling and failures": DENSE | WORKLOADS["closed"] | SCALING
    | {"fail_at": "0.04:0,0.09:1"},
    "disaggregated in lockstep": EXPERTS | WORKLOADS["steady"]
    | {"dp": 2, "ep": 2, "instances": 1, "prefill_instances": 2},
    "disaggregated with drafts": SPLIT | WORKLOADS["steady"]
    | {"num_speculative_tokens": 2, "acceptance_rate": 0.7},
    "two layouts": DENSE | WORKLOADS["steady"]
    | {"pools": [{"tp": 2, "instances": 1}, {"tp": 1, "instances": 2, "max_num_seqs": 20}]},
    "pipeline": DENSE | WORKLOADS["steady"] | {"pp": 2, "instances": 2},
    "past in stores": DENSE | WORKLOADS["steady"]
    | {"instances": 4, "past_context": 500, "stages": [
        {"stage": "store", "bandwidth_gb_s": 10, "preloaded": True, "shared_by": 2},
        {"stage": "store", "name": "far", "bandwidth_gb_s": 2, "network_gb_s": 5}]},
    "documents": DENSE | WORKLOADS["steady"] | {"instances": 2, "stages": [
        {"stage": "search", "dimensions": 768, "vectors": 10**6, "centroids": 1000, "probes": 16,
         "sub_quantizers": 64, "candidates": 100, "adds_tokens": 200, "batch": 4,
         "tflops": 2, "bandwidth_gb_s": 200},
        {"stage": "rerank", "seconds": 0.001, "per_request": 1e-4, "batch": 16}]},
    "whole model": {"model": "llama3.1-8b", "hardware": "h100-sxm", "rate": 20, "isl": 1024,
     "osl": 200, "num_requests": 300, "range_ratio": 0.2, "instances": 2},
}  # fmt: skip
"""Runs of one deployment each."""

SEARCHES: dict[str, Settings] = {
    "search": {"model": "llama3.1-8b", "rate": 40, "isl": 1024, "osl": 64, "num_requests": 300,
     "ttft": 400, "tpot": 20, "gpus": 16, "hardware": ["h100-sxm"]},
    "search, scarce": {"model": "llama3.1-8b", "rate": 60, "isl": 300, "osl": 200,
     "num_requests": 300, "ttft": 200, "tpot": 15, "gpus": 8, "hardware": ["rtx-4090"],
     "num_gpu_blocks": 1500, "turns": 2},
}  # fmt: skip
COLUMNS = ("arrival", "reached", "scheduled", "first", "finish", "engine", "cached", "preempted")


def runs() -> Iterator[tuple[str, Settings]]:
    """Every run by name."""
    for (deployment, place), (workload, load), scheduler in product(
        DEPLOYMENTS.items(), WORKLOADS.items(), SCHEDULERS
    ):
        if scheduler == "static" and (deployment == "disaggregated" or workload == "ahead"):
            continue  # refused
        yield f"{workload}, {deployment}, {scheduler}", {**load, **place, "scheduler": scheduler}
    yield from SPECIAL.items()


def serving_record(name: str, settings: Settings) -> dict[str, Any]:
    """One line of `serving.jsonl`: sums over requests, and the summary."""
    asked = {**settings, "whole_run": True}  # sums over all requests, whatever is measured
    try:
        served = sw.serve(asked.pop("model"), asked.pop("hardware"), **asked)
    except UserError as error:
        return {"serving": name, "refused": str(error)}
    outcome, summary = served.outcome, served.to_dict()
    kept = ("requests", "unfinished", "rejected", "seconds", "good", "preemptions", "kv_mean")
    columns = {column: _sums(getattr(outcome.records, column)) for column in COLUMNS}
    if outcome.handover is not None:
        for column in ("prefilled", "begins", "arrives", "bytes", "tokens"):
            columns[f"handover.{column}"] = _sums(getattr(outcome.handover, column))
    return {
        "serving": name,
        **{key: summary[key] for key in kept},
        "itl": summary["itl"],
        "instances": [*map(list, outcome.instances)],
        "stages": {stage: _sums(column) for stage, column in outcome.stages.items()},
        **columns,
    }


def search_record(name: str, settings: Settings) -> dict[str, Any]:
    """A line for a search for serving: the best, and all choices that were simulated."""
    asked = dict(settings)
    ranking = sw.search_serving(asked.pop("model"), asked.pop("hardware"), **asked)
    of = ranking.ranking
    return {
        "serving": name,
        "best": [ranking.describe(n + 1) for n in range(len(of.best))],
        "candidates": of.candidates,
        "choices": [
            [each.layout, each.prompts, *(g.settings.instances for g in each.deployment.groups), *(
                getattr(each.simulated, column) for column in
                ("gpus", "good", "meets", "stopped", "user_rate")
            )] for each in of.choices
        ],
    }  # fmt: skip


def records() -> Iterator[dict[str, Any]]:
    """All lines."""
    for name, settings in runs():
        yield serving_record(name, settings)
    for name, settings in SEARCHES.items():
        yield search_record(name, settings)


def _sums(column: Sequence[float]) -> list[float]:
    """Number of values, their sum, and their sum weighted by request, which notes the order."""
    values = [(i, x) for i, x in enumerate(column, 1) if not math.isnan(x)]
    return [len(values), math.fsum(x for _, x in values), math.fsum(i * x for i, x in values)]
