"""Runs and searches that `record.py` records: random ones, and cases of usual size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from sweep import draw

Settings = dict[str, Any]


class Step(NamedTuple):
    """One step to simulate, in values that JSON has."""

    settings: Settings
    """Those of `stagewright.compile`, with the model."""
    hardware: str
    execution: Settings
    """Settings of the execution and of the machine, as `stagewright.simulate` takes them."""


# ---- random steps --------------------------------------------------------------------------------

HARDWARE = ("h100-sxm", "h100-sxm", "a100-sxm-80gb", "b200", "gb200-nvl72", "mi300x", "tpu-v5p")
EXECUTIONS: tuple[Settings, ...] = (
    {},
    {"streams": "one"},
    {"no_overlap": ["dp"]},
    {"no_overlap": ["tp", "cp", "ep", "dp", "pp"]},
    {"prefetch": 0},
    {"prefetch": 3},
    {"overlap_param_gather": True},
    {"tp_comm_overlap": True},
    {"overlap_param_gather": True},
    {"collective_checks": True},
    {"p2p_metadata_s": 1e-3},
)
LAUNCH_MODES = (None, "ahead", "ahead", "compile", "eager", "blocking", "cuda_graph")


def random_steps(seed: str) -> Iterator[Step]:
    """Draws of `sweep`, each executed in a random way; many are refused by a `UserError`."""
    dice = random.Random(seed)
    while True:
        settings = {name: value for name, value in draw(dice).items() if value is not None}
        execution = dict(dice.choice(EXECUTIONS))
        mode = dice.choice(LAUNCH_MODES)
        if mode is not None:
            execution["launch_mode"] = mode
        if mode == "cuda_graph" and dice.random() < 0.5:
            execution["cuda_graph_modules"] = ["attn"]
        if settings.get("ep", 1) > 1 and dice.random() < 0.3:
            execution["moe_flex_dispatcher"] = True
        if settings.get("ep", 1) > 1 and dice.random() < 0.3:
            execution["overlap_moe_expert_parallel_comm"] = True
        if dice.random() < 0.15:
            execution["stragglers"] = {"0": 1.5}
        if settings.get("mode") == "decode" and dice.random() < 0.5:
            execution["pipeline_drain"] = True
        yield Step(settings, dice.choice(HARDWARE), execution)


# ---- cases ---------------------------------------------------------------------------------------

LLAMA = {"model": "llama3-8b", "micro_batch_size": 1}
LARGE = {"model": "llama3-70b", "tp": 8, "sequence_parallel": True, "micro_batch_size": 1}
SMALL = {"model": "gpt2", "seq_length": 128, "global_batch_size": 32}
MIXTRAL = {"model": "mixtral-8x7b", "ep": 8, "dp": 8, "zero": 1, "micro_batch_size": 1}
DEEPSEEK = {"model": "deepseek-v3", "layers": 16, "ep": 16, "dp": 16, "zero": 1,
            "micro_batch_size": 1}  # fmt: skip
QWEN = {"model": "qwen3-30b-a3b", "layers": 12, "ep": 8, "dp": 8, "micro_batch_size": 1}
PIPELINE = LARGE | {"layers": 32, "pp": 4, "dp": 2, "global_batch_size": 32}
CHUNKS = {"vpp": 2}
VOCABULARY = LARGE | {"layers": 16, "tp": 2, "pp": 4, "dp": 2, "sequence_parallel": False,
                      "global_batch_size": 32}  # fmt: skip
UNEVEN = [[9, 1, 1, 1, 2, 1, 3, 1], [1, 1, 4, 1, 1, 7, 1, 1]] * 4  # a line for each layer
SERVED = {"mode": "decode", "batch_size": 64, "context_length": 4096}
PROMPTS = {"mode": "prefill", "batch_size": 4, "prompt_length": 2048}


CASES: dict[str, tuple[Settings, Settings]] = {
    # Schedules.
    "gpipe": (PIPELINE | {"schedule": "gpipe", "recompute": "full"}, {}),
    "1f1b": (PIPELINE | {"zero": 1}, {}),
    "interleaved": (PIPELINE | CHUNKS | {"zero": 1}, {}),
    "looped-bfs": (PIPELINE | CHUNKS | {"schedule": "looped-bfs"}, {}),
    "zb-h1": (PIPELINE | {"schedule": "zb-h1", "zero": 1}, {}),
    "zb-h2": (PIPELINE | {"schedule": "zb-h2"}, {}),
    "zbv": (PIPELINE | CHUNKS | {"schedule": "zbv"}, {}),
    "v-half": (PIPELINE | CHUNKS | {"schedule": "v-half"}, {}),
    "v-min": (PIPELINE | CHUNKS | {"schedule": "v-min"}, {}),
    "dualpipe": (PIPELINE | {"schedule": "dualpipe"}, {}),
    "dualpipev": (PIPELINE | CHUNKS | {"schedule": "dualpipev"}, {}),
    "interlaced": (VOCABULARY | {"schedule": "interlaced"}, {}),
    "vocab-1": (VOCABULARY | {"schedule": "vocab-1"}, {}),
    "vocab-2": (VOCABULARY | {"schedule": "vocab-2"}, {}),
    "v-half-vocab-1": (VOCABULARY | CHUNKS | {"schedule": "v-half-vocab-1"}, {}),
    "uneven stages": (PIPELINE | {"layers": 30, "first_stage_less_layers": 1,
                                  "last_stage_less_layers": 1}, {}),
    # Sharded data parallelism: Megatron-LM's, FSDP2's, DeepSpeed's.
    "zero 1": (LLAMA | {"dp": 16, "zero": 1, "global_batch_size": 64}, {}),
    "zero 2": (LLAMA | {"dp": 16, "zero": 2, "global_batch_size": 64}, {}),
    "zero 3, late gathers": (LLAMA | {"dp": 16, "zero": 3, "global_batch_size": 32},
                             {"prefetch": 0}),
    "zero 3, early gathers": (LLAMA | {"dp": 16, "zero": 3, "global_batch_size": 32},
                              {"prefetch": 3}),
    "hsdp": (LLAMA | {"dp": 16, "dp_shard": 8, "zero": 3, "global_batch_size": 32}, {}),
    "hsdp, zero 1": (LLAMA | {"dp": 16, "dp_shard": 8, "zero": 1, "global_batch_size": 32}, {}),
    "fsdp of torchtitan": (LLAMA | {"dp": 16, "zero": 3, "framework": "torchtitan",
                                    "recompute": "full", "global_batch_size": 32}, {}),
    "fsdp2 that keeps weights, pipeline": (
        LLAMA | {"layers": 16, "dp": 4, "pp": 4, "zero": 3, "framework": "torchtitan",
                 "reshard_after_forward": False, "global_batch_size": 32}, {}),
    "fsdp2 interleaved": (
        LLAMA | {"layers": 16, "dp": 4, "pp": 4, "vpp": 2, "zero": 3, "framework": "torchtitan",
                 "global_batch_size": 64}, {}),
    "fsdp2, tp": (LLAMA | {"tp": 4, "dp": 4, "zero": 3, "framework": "torchtitan",
                           "sequence_parallel": True, "global_batch_size": 16}, {}),
    "ddp of torchtitan": (LLAMA | {"layers": 8, "dp": 8, "framework": "torchtitan",
                                   "global_batch_size": 32}, {}),
    "deepspeed, zero 2 by parameter": (
        LLAMA | {"dp": 8, "zero": 2, "bucket": "parameter", "grad_reduce_dtype": "bf16",
                 "global_batch_size": 32}, {}),
    "deepspeed, zero 3 by parameter, offloaded optimizer": (
        LLAMA | {"dp": 8, "zero": 3, "bucket": "parameter", "optimizer_cpu_offload": True,
                 "global_batch_size": 16}, {}),
    "nanotron, bucket of a rank": (
        LLAMA | {"layers": 16, "dp": 4, "pp": 2, "zero": 1, "bucket": "rank", "fuse": False,
                 "global_batch_size": 32}, {"collective_checks": True}),
    "reductions in each microbatch": (
        LLAMA | {"layers": 16, "dp": 8, "pp": 4, "zero": 2, "grad_reduce": "microbatch",
                 "global_batch_size": 64}, {}),
    "offload": (LLAMA | {"dp": 8, "zero": 1, "cpu_offloading_num_layers": 8,
                         "optimizer_cpu_offload": True, "global_batch_size": 32}, {}),
    "params gathered in forward": (
        LLAMA | {"tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True, "zero": 1,
                 "global_batch_size": 32}, {"overlap_param_gather": True}),
    "no overlap": (
        LLAMA | {"tp": 4, "pp": 2, "dp": 4, "sequence_parallel": True, "zero": 1,
                 "global_batch_size": 32}, {"no_overlap": ["tp", "dp", "pp", "cp", "ep"]}),
    # Tensors and contexts that are split.
    "rings of cp": (LLAMA | {"seq_length": 65536, "tp": 2, "cp": 4, "dp": 2, "zero": 1,
                             "sequence_parallel": True, "global_batch_size": 8}, {}),
    "all-to-all of cp": (LLAMA | {"seq_length": 32768, "cp": 4, "cp_comm_type": "a2a", "zero": 2,
                                  "dp": 2, "global_batch_size": 8}, {}),
    "tp overlapped": (LLAMA | {"tp": 8, "dp": 2, "sequence_parallel": True, "zero": 1,
                               "global_batch_size": 16}, {"tp_comm_overlap": True}),
    "unfused sums of sums": ({"model": "gpt3-175b", "layers": 8, "tp": 8, "pp": 2, "fuse": False,
                              "global_batch_size": 16}, {}),
    "kernels beside collectives": (LLAMA | {"tp": 2, "dp": 8, "sequence_parallel": True, "zero": 2,
                                            "global_batch_size": 32}, {}),
    # Hosts.
    "launch-bound": (SMALL | {"dp": 8}, {}),
    "launches of a pipeline": (SMALL | {"pp": 4, "dp": 2}, {"p2p_metadata_s": 1e-3}),
    "blocking": (SMALL | {"pp": 2, "dp": 2}, {"launch_mode": "blocking"}),
    "graphs": (SMALL | {"pp": 2, "dp": 2}, {"launch_mode": "cuda_graph"}),
    "graphs of attention": (SMALL | {"pp": 2, "dp": 2},
                            {"launch_mode": "cuda_graph", "cuda_graph_modules": ["attn"]}),
    "compiled": (SMALL | {"pp": 2, "dp": 2}, {"launch_mode": "compile"}),
    "compiled, zero bubble": (SMALL | {"pp": 2, "schedule": "zb-h1"}, {"launch_mode": "compile"}),
    "ahead": (SMALL | {"pp": 2, "dp": 2}, {"launch_mode": "ahead"}),
    "stragglers": (PIPELINE | {"layers": 16, "global_batch_size": 16},
                   {"stragglers": {"3": 1.3, "17": 1.1}}),
    "straggler of experts": (MIXTRAL | {"layers": 8, "global_batch_size": 32},
                             {"stragglers": {"5": 1.2}}),
    # Experts.
    "mixtral": (MIXTRAL | {"global_batch_size": 32}, {}),
    "mixtral, interleaved": (
        MIXTRAL | {"tp": 2, "pp": 4, "vpp": 2, "sequence_parallel": True,
                   "global_batch_size": 128}, {}),
    "mixtral, uneven": (MIXTRAL | {"layers": 8, "expert_load": UNEVEN, "global_batch_size": 32},
                        {}),
    "mixtral, uneven pipeline": (
        MIXTRAL | {"layers": 8, "pp": 2, "expert_load": UNEVEN, "global_batch_size": 64}, {}),
    "mixtral, overlap": (MIXTRAL | {"layers": 8, "global_batch_size": 32},
                         {"overlap_moe_expert_parallel_comm": True}),
    "mixtral, overlap and flex": (
        MIXTRAL | {"layers": 16, "pp": 4, "vpp": 2, "global_batch_size": 128},
        {"moe_flex_dispatcher": True, "overlap_moe_expert_parallel_comm": True}),
    "mixtral, flex": (MIXTRAL | {"layers": 16, "pp": 4, "vpp": 2, "global_batch_size": 64},
                      {"moe_flex_dispatcher": True}),
    "qwen, torchtitan": (QWEN | {"zero": 3, "framework": "torchtitan", "global_batch_size": 16},
                         {}),
    "deepseek, dualpipev": (DEEPSEEK | {"pp": 4, "vpp": 2, "schedule": "dualpipev",
                                        "global_batch_size": 256}, {}),
    "deepseek, zbv": (DEEPSEEK | {"pp": 4, "vpp": 2, "schedule": "zbv",
                                  "global_batch_size": 256}, {"moe_flex_dispatcher": True}),
    # What trains.
    "lora": (LARGE | {"layers": 16, "pp": 2, "lora_rank": 16, "global_batch_size": 8}, {}),
    "frozen, zero bubble, zero 3": (
        LLAMA | {"layers": 8, "dp": 4, "pp": 4, "schedule": "zb-h1", "zero": 3,
                 "freeze": ["layer1.*", "layer4.*"], "global_batch_size": 32}, {}),
    "quantized base": (LLAMA | {"layers": 8, "dp": 2, "lora_rank": 8, "quantize_base": "nf4",
                                "global_batch_size": 8}, {}),
    "encoder and decoder": ({"model": "t5-3b", "layers": 8, "pp": 2, "dp": 2,
                             "global_batch_size": 16}, {}),
    "states": ({"model": "nemotron-h-8b", "layers": 12, "tp": 2, "dp": 2, "zero": 1,
                "sequence_parallel": True, "seq_length": 4096, "global_batch_size": 8}, {}),
    "fp8": (LLAMA | {"layers": 16, "tp": 2, "dp": 4, "precision": "fp8", "zero": 1,
                     "sequence_parallel": True, "global_batch_size": 16}, {}),
    # Inference.
    "prefill": (PROMPTS | {"model": "llama3-70b", "tp": 8}, {}),
    "prefill, pipeline": (PROMPTS | {"model": "llama3-70b", "tp": 4, "pp": 4}, {}),
    "prefill of experts": (PROMPTS | {"model": "qwen3-30b-a3b", "tp": 2, "dp": 4, "ep": 8,
                                      "etp": 1}, {"serving_engine": "vllm"}),
    "decode": (SERVED | {"model": "llama3-70b", "tp": 8}, {"serving_engine": "trtllm"}),
    "decode, pipeline": (SERVED | {"model": "llama3-70b", "tp": 4, "pp": 4}, {}),
    "decode, drained pipeline": (SERVED | {"model": "llama3-70b", "tp": 4, "pp": 4},
                                 {"pipeline_drain": True}),
    "decode of experts": (SERVED | {"model": "deepseek-v3", "tp": 1, "dp": 16, "ep": 16},
                          {"serving_engine": "sglang"}),
    "disaggregated": (SERVED | {"model": "llama3-8b", "tp": 2, "dp": 2, "batch_size": 8,
                                "prefill": "tp=4,pp=2"}, {}),
}  # fmt: skip
"""By name: settings of a run of usual size, and of its execution; on H100."""


def cases() -> Iterator[Step]:
    """The cases, in order."""
    for settings, execution in CASES.values():
        yield Step(settings, "h100-sxm", execution)


# ---- searches ------------------------------------------------------------------------------------

GPT2 = {"hardware": "h100-sxm", "model": "gpt2", "gpus": 4, "pp": 1, "zero": 1,
        "recompute": "none", "global_batch_size": 64}  # fmt: skip
LLAMA_8B = {"hardware": "h100-sxm", "model": "llama3-8b", "gpus": 16, "global_batch_size": 256}
CALCULON = {"hardware": "a100-sxm-80gb", "model": "gpt3-175b", "gpus": 4096, "seq_length": 2048,
            "global_batch_size": 4096}  # fmt: skip

SEARCHES: dict[str, Settings] = {
    # Of docs/guides/search.md.
    "page: best": GPT2 | {"micro_batch_size": "4,8"},
    "page: front": GPT2 | {"micro_batch_size": "1,8", "objective": ["time", "memory"]},
    "page: top": GPT2 | {"tp": 1, "micro_batch_size": "1:8:x2", "top": 1},
    "page: exact": GPT2 | {"tp": 1, "micro_batch_size": "1:8:x2", "top": 1, "exact": True},
    "page: one": GPT2 | {"tp": 2, "micro_batch_size": 8},
    "page: python": GPT2 | {"tp": [1, 2], "sequence_parallel": False, "micro_batch_size": 8},
    "page: llama2-7b": {"hardware": "h100-sxm", "model": "llama2-7b", "gpus": 64},
    # Others.
    "dense": LLAMA_8B,
    "torchtitan": LLAMA_8B | {"framework": "torchtitan", "top": 8},
    "schedules": LLAMA_8B | {"tp": 1, "pp": "2,4", "micro_batch_size": "1,2", "zero": "0,1",
                             "space": "schedules", "top": 12},
    "hsdp and offload": LLAMA_8B | {"gpus": 32, "tp": "1,2", "pp": "1,2", "top": 12,
                                    "space": "hsdp,offload", "micro_batch_size": 1},
    "experts": {"hardware": "h100-sxm", "model": "mixtral-8x7b", "gpus": 32, "top": 10,
                "global_batch_size": 256},
    "experts, overlap": {"hardware": "h100-sxm", "model": "mixtral-8x7b", "gpus": 64, "tp": 1,
                         "pp": "1,2", "ep": 8, "micro_batch_size": 1, "recompute": "none",
                         "zero": 1, "global_batch_size": 128, "space": "overlap", "top": 6},
    "several machines": LLAMA_8B | {"hardware": ["h100-sxm", "a100-sxm-80gb", "mi300x"],
                                    "zero": "1,3", "top": 8},
    "cost": LLAMA_8B | {"gpus": "8,16", "zero": 1, "price": 2.5, "objective": "cost", "top": 8},
    "energy": LLAMA_8B | {"tp": "1,2", "pp": "1,2", "objective": "energy", "top": 8},
    "memory": LLAMA_8B | {"tp": "1,2,4", "pp": "1,2", "micro_batch_size": 1,
                          "objective": "memory", "top": 8},
    "front": LLAMA_8B | {"tp": "1,2,4", "pp": "1,2", "objective": ["time", "memory", "energy"],
                         "top": 10},
    "vary": LLAMA_8B | {"tp": "1,2", "pp": 1, "micro_batch_size": 2, "top": 8,
                        "vary": {"memory.gb": "80,141", "scale_out.bandwidth_gb_s": "25,50"}},
    "straggler": LLAMA_8B | {"tp": "1,2", "pp": "1,2", "micro_batch_size": 1, "zero": 1,
                             "recompute": "none", "stragglers": {"3": 1.2}, "top": 4},
    "prefill": {"hardware": "h100-sxm", "model": "llama3-70b", "gpus": 16, "mode": "prefill",
                "batch_size": 8, "prompt_length": 2048},
    "decode of experts": {"hardware": "h200", "model": "qwen3-30b-a3b", "gpus": 8,
                          "mode": "decode", "batch_size": 64, "context_length": 4096},
    # Those of docs/guides/search.md that take longest.
    "page: llama3.1-405b": {"hardware": "h100-sxm", "model": "llama3.1-405b", "gpus": 16384},
    "page: gpt3-175b": CALCULON,
}  # fmt: skip
"""Arguments of `stagewright.search` by name."""

LONG = (
    *("experts", "front", "memory", "straggler"),
    *("page: llama3.1-405b", "page: gpt3-175b"),
)
"""Searches that take a CPU-minute or more: recorded last, at a low priority."""
