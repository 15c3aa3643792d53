"""A candidate as flags of the framework that will train it: Megatron-LM's or torchtitan's.

>>> from stagewright.explore.candidates import Column
>>> from stagewright.run.experiment import Experiment
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.run.sections.execution import Execution
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", zero=1), ClusterSection(), Execution())
>>> found = Candidates.of(base, resolve("h100-sxm"), {"tp": Column.of([4])})
>>> flags(found, 0, "megatron")
['--tensor-model-parallel-size 4', '--use-distributed-optimizer']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError, either
from stagewright.explore.answer.run_file import given
from stagewright.explore.candidates import Candidates
from stagewright.model.config import ModelConfig
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run

# ---- Megatron-LM ---------------------------------------------------------------------------------

_MEGATRON_SHARDING = (
    "",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
)
"""By ZeRO stage."""


def _sharding(stage: int) -> str:
    """The flags of a ZeRO stage in Megatron-LM."""
    return _MEGATRON_SHARDING[stage]


def _layout(layers: Sequence[int]) -> str:
    """Stages in Megatron-LM's notation: `Et*2|t*2L` of 2 and 2 layers."""
    return "E" + "|".join(f"t*{count}" for count in layers) + "L"


_MEGATRON_PRECISION = {"bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid"}
_MEGATRON_NAMES = frozenset({
    "clip_grad", "cpu_offloading_num_layers", "cuda_graph_modules", "decoder_seq_length",
    "exp_avg_dtype", "exp_avg_sq_dtype", "flash_attention", "fp8_dot_product_attention",
    "fp8_recipe", "global_batch_size", "launch_mode", "layers", "make_vocab_size_divisible_by",
    "micro_batch_size", "microbatch_group_size_per_vp_stage", "moe_aux_loss_coeff",
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_router_dtype",
    "moe_router_enable_expert_bias", "moe_router_load_balancing_type", "moe_token_dispatcher_type",
    "moe_z_loss_coeff", "mtp_loss_scaling_factor", "mtp_num_layers", "optimizer",
    "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_moe_expert_parallel_comm",
    "overlap_param_gather", "seq_length", "sequence_parallel", "sgd_momentum", "tp_comm_overlap",
    "vocab",
})  # fmt: skip
"""Settings whose option has their name, or a name that the setting declares: those of
the parser of Megatron-LM d98e8a64 (`megatron/training/arguments.py`, and the configurations that it
makes options of). All other settings have none."""
_MEGATRON: Mapping[str, Callable[[Any], str]] = {
    "tp": lambda n: f"--tensor-model-parallel-size {n}",
    "cp": lambda n: f"--context-parallel-size {n}",
    "pp": lambda n: f"--pipeline-model-parallel-size {n}",
    "dp": lambda n: "",  # Megatron-LM's follows from the world size
    "ep": lambda n: f"--expert-model-parallel-size {n}",
    "etp": lambda n: f"--expert-tensor-parallel-size {n}",
    "vpp": lambda n: f"--num-virtual-stages-per-pipeline-rank {n}",
    "zero": _sharding,
    "schedule": lambda name: "" if name in ("1f1b", "interleaved") else "?",
    "recompute": lambda kind: (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        if kind == "full"
        else "--recompute-granularity selective"
    ),
    "recompute_num_layers": lambda n: f"--recompute-method block --recompute-num-layers {n}",
    "recompute_modules": lambda names: f"--recompute-modules {' '.join(names)}",
    "cp_comm_type": lambda kind: f"--cp-comm-type {kind}",
    "precision": lambda name: _MEGATRON_PRECISION.get(name, "?"),
    "first_stage_less_layers": lambda n: (
        "--account-for-embedding-in-pipeline-split" if n == 1 else "?"
    ),
    "last_stage_less_layers": lambda n: "--account-for-loss-in-pipeline-split" if n == 1 else "?",
    "layers_per_stage": lambda layers: f"--pipeline-model-parallel-layout {_layout(layers)}",
    "moe_flex_dispatcher": lambda on: "--moe-token-dispatcher-type flex",
    "order": lambda order: "--use-tp-pp-dp-mapping" if order == "tp-cp-ep-pp-dp" else "?",
    "model": lambda name: "",
    "hardware": lambda name: "",
    "no_overlap": lambda axes: "",
}

# ---- torchtitan ----------------------------------------------------------------------------------
# `Trainer.Config` of torchtitan b5bcd76c (torchtitan/config/configs.py, torchtitan/trainer.py).

_TORCH_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV", "looped-bfs": "LoopedBFS",
}  # fmt: skip
_TORCHTITAN: Mapping[str, Callable[[Any], str]] = {
    "tp": lambda n: f"--parallelism.tensor_parallel_degree {n}",
    "cp": lambda n: f"--parallelism.context_parallel_degree {n}",
    "pp": lambda n: f"--parallelism.pipeline_parallel_degree {n}",
    "ep": lambda n: f"--parallelism.expert_parallel_degree {n}",
    "etp": lambda n: "" if n == 1 else "?",  # experts are split by ep alone
    "schedule": lambda name: (
        f"--parallelism.pipeline_parallel_schedule {_TORCH_SCHEDULES.get(name, '?')}"
    ),
    "first_stage_less_layers": lambda n: (
        f"--parallelism.pipeline_parallel_first_stage_less_layers {n}"
    ),
    "last_stage_less_layers": lambda n: (
        f"--parallelism.pipeline_parallel_last_stage_less_layers {n}"
    ),
    "params_dtype": lambda name: {
        "fp32": "--training.dtype float32", "bf16": "--training.dtype bfloat16",
    }.get(name, "?"),
    "reshard_after_forward": lambda on: "--parallelism.fsdp_reshard_after_forward never",
    "tp_comm_overlap": lambda on: "--compile.enable_async_tensor_parallel",
}  # fmt: skip
_OF_SEVERAL = frozenset({
    "model", "hardware", "framework", "dp", "zero", "dp_shard", "vpp", "recompute", "seq_length",
    "micro_batch_size", "global_batch_size", "sequence_parallel", "launch_mode",
})  # fmt: skip
"""Settings that follow from others, or that flags of torchtitan say together."""


def _torchtitan(run: Run, model: ModelConfig, how: Execution) -> Iterator[str]:
    """What torchtitan says of several settings, or says in any case; `run` is resolved."""
    length, size, batch = run.seq_length or 0, run.micro_batch_size, run.global_batch_size or 0
    copies = {0: run.dp, 3: run.dp // (run.dp_shard or run.dp)}.get(run.zero)
    if copies is None:
        yield f"# zero={run.zero} has no flag"
    else:
        yield f"--parallelism.data_parallel_replicate_degree {copies}"
        yield f"--parallelism.data_parallel_shard_degree {run.dp // copies}"
    if run.tp > 1 and not run.sequence_parallel:
        yield "--parallelism.no-enable-sequence-parallel"
    if run.vpp > 1:
        layers = model.depth + run.first_stage_less_layers + run.last_stage_less_layers
        each = math.ceil(layers / (run.pp * run.vpp))
        fits = math.ceil(layers / each) == run.pp * run.vpp
        flag = f"--parallelism.pipeline_parallel_layers_per_stage {each}"
        yield flag if fits else f"# vpp={run.vpp} has no flag"
    # Batches are counted in tokens; a microbatch is what a rank of dp computes at once.
    yield f"--training.max_context_length {length}"
    yield f"--training.num_tokens_per_microbatch_per_dp_rank {size * length}"
    yield f"--training.num_tokens_per_train_step {batch * length}"
    if run.pp > 1:
        yield f"--parallelism.num_pp_microbatches {run.microbatches}"
    if how.launch_mode in (None, "compile"):
        yield "--compile.enable"
    elif how.launch_mode != "eager":
        yield f"# launch_mode={how.launch_mode} has no flag"
    yield f"activation-checkpoint:{run.recompute}"  # a word of its own, behind all flags


# ---- both ----------------------------------------------------------------------------------------

TOOLS = ("megatron", "torchtitan")


def flags(candidates: Candidates, row: int, tool: str) -> list[str]:
    """The flags with which a framework trains as a candidate does; `#` before what has none.

    Sizes of the model are not among them, nor what all runs of the framework need.
    """
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    values, run = given(candidates, row), candidates.run(row)
    if tool == "megatron":
        if "layers_per_stage" in values:
            values.pop("vpp", None)  # the layout has all virtual stages, and takes no other option
        return list(_lines(values, _megatron_flag))
    single = {name: value for name, value in values.items() if name not in _OF_SEVERAL}
    late = _torchtitan(run.resolved(candidates.model), candidates.model, candidates.execution(row))
    return [*_lines(single, lambda name, value: _TORCHTITAN.get(name, _none)(value)), *late]


def _none(value: object) -> str:
    return "?"


def _lines(values: Mapping[str, Any], flag: Callable[[str, Any], str]) -> Iterator[str]:
    for name, value in values.items():
        line = flag(name, value)
        if line:
            yield line if "?" not in line else f"# {name}={text_of(value)} has no flag"


def _megatron_flag(name: str, value: Any) -> str:
    if name in _MEGATRON:
        return _MEGATRON[name](value)
    setting = EXPERIMENT[name]
    known = [each for each in setting.names if "." not in each]
    flag = known[0] if known else name.replace("_", "-")
    if name not in _MEGATRON_NAMES or (isinstance(value, bool) and not value):
        return "?"
    return f"--{flag}" if isinstance(value, bool) else f"--{flag} {text_of(value)}"
