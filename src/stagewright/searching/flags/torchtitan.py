"""Flags of torchtitan b5bcd76c: `Trainer.Config` of torchtitan/trainer.py and config/configs.py.

Model configurations set degrees, compilation and checkpoints, so that these are always written.
Batches are counted in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.searching.flags.lines import (
    FlagLine,
    Lines,
    Rule,
    TrainedRun,
    flag,
    lines_of,
    without_flag,
)

# ---- parallelism ---------------------------------------------------------------------------------


def _degrees(trained: TrainedRun) -> Lines:
    run = trained.run
    yield flag("parallelism.tensor_parallel_degree", run.tp)
    if run.tp > 1 and not run.sequence_parallel:
        yield flag("parallelism.no_enable_sequence_parallel")
    yield flag("parallelism.context_parallel_degree", run.cp)
    if run.cp > 1 and run.cp_comm_type != "all_gather":
        yield without_flag("cp_comm_type", run.cp_comm_type)
    yield flag("parallelism.pipeline_parallel_degree", run.pp)
    if trained.routed:
        yield from _expert_degrees(trained)


def _expert_degrees(trained: TrainedRun) -> Lines:
    """Degree of ep, over the ranks of tp, cp and sharded dp; experts are not split by tp."""
    run = trained.run
    shared = run.tp * run.cp * (1 if run.zero == 0 else run.dp_shard or run.dp)
    if shared % run.ep:
        why = f"its ranks are tp x cp x those of dp that shard parameters, which are {shared}"
        yield without_flag("ep", run.ep, why)
    else:
        yield flag("parallelism.expert_parallel_degree", run.ep)
    etp = run.tp if run.etp is None else run.etp
    if run.ep > 1 and etp > 1:
        yield without_flag("etp", etp, "with ep, experts are whole")


_ALWAYS_SHARDED = ("ranks of cp always shard parameters", "3")
_ALL_OR_NOTHING = (
    "dp shards parameters, gradients and optimizer states together, or nothing",
    "0,3",
)
"""Reasons why torchtitan lacks a ZeRO stage, and the stages it has."""


def _sharding(trained: TrainedRun) -> Lines:
    """Sharding of parameters, gradients and states in one; with cp it is always on."""
    run = trained.run
    if trained.gradient_axis and (run.zero in (1, 2) or (run.zero == 0 and run.cp > 1)):
        reason, stages = _ALWAYS_SHARDED if run.zero == 0 else _ALL_OR_NOTHING
        text = f"# zero={run.zero} has no counterpart in torchtitan"
        yield FlagLine(f"{text}: {reason}; search with --zero {stages}", "zero")
        return
    copies = run.dp if run.zero == 0 else run.dp // (run.dp_shard or run.dp)
    yield flag("parallelism.data_parallel_replicate_degree", copies)
    yield flag("parallelism.data_parallel_shard_degree", run.dp // copies)
    if run.zero == 3 and run.reshard_after_forward != (run.pp == 1):  # the default without pp
        policy = "always" if run.reshard_after_forward else "never"
        yield flag("parallelism.fsdp_reshard_after_forward", policy)


_SCHEDULES = {
    ("1f1b", False): "1F1B",
    ("gpipe", False): "GPipe",
    ("interleaved", True): "Interleaved1F1B",
    ("looped-bfs", True): "LoopedBFS",
    ("zb-h1", True): "InterleavedZeroBubble",
    ("zbv", True): "ZBVZeroBubble",
    ("dualpipev", True): "DualPipeV",
}
"""Classes of torch.distributed.pipelining by schedule and virtual stages (vpp > 1)."""


def _stages(trained: TrainedRun) -> Lines:
    run, split = trained.run, trained.run.layers_per_stage
    if run.pp == 1:
        return
    name = _SCHEDULES.get((str(run.schedule), run.vpp > 1))
    option = "parallelism.pipeline_parallel_schedule"
    yield flag(option, name) if name else without_flag("schedule", run.schedule)
    yield flag("parallelism.num_pp_microbatches", run.microbatches)
    less = run.first_stage_less_layers, run.last_stage_less_layers
    yield flag("parallelism.pipeline_parallel_first_stage_less_layers", less[0])
    yield flag("parallelism.pipeline_parallel_last_stage_less_layers", less[1])
    if run.unresolved().layers_per_stage is not None:
        yield without_flag("layers_per_stage", split)
    elif run.vpp > 1:
        # torchtitan derives the number of stages from the layers per stage.
        layers = trained.model.depth + sum(less)
        per_stage = math.ceil(layers / run.virtual_stages)
        if math.ceil(layers / per_stage) == run.virtual_stages:
            yield flag("parallelism.pipeline_parallel_layers_per_stage", per_stage)
        else:
            yield without_flag("vpp", run.vpp, "no whole number of layers makes so many stages")


def _batch(trained: TrainedRun) -> Lines:
    """Tokens of a step, and of a microbatch of each rank of dp."""
    run = trained.run
    length, batch = run.seq_length or 0, run.global_batch_size or 0
    yield flag("training.max_context_length", length)
    yield flag("training.num_tokens_per_microbatch_per_dp_rank", run.micro_batch_size * length)
    yield flag("training.num_tokens_per_train_step", batch * length)


# ---- what is computed ----------------------------------------------------------------------------

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _precision(trained: TrainedRun) -> Lines:
    run = trained.run
    if run.params_dtype in _DTYPES:
        yield flag("training.dtype", _DTYPES[run.params_dtype])
    if run.precision in _DTYPES:
        yield flag("training.mixed_precision_param", _DTYPES[run.precision])
    else:
        yield without_flag("precision", run.precision)
    if run.grad_reduce_dtype == "bf16":
        yield without_flag("grad_reduce_dtype", "bf16")


def _compile(trained: TrainedRun) -> Lines:
    """Compilation, which fuses operators."""
    run, mode = trained.run, trained.execution.launch_mode
    fused = {"operators": run.operators == "fused", "fuse": run.fuse}
    compiled = mode == "compile" or (mode in (None, "cuda_graph") and all(fused.values()))
    if compiled:
        yield flag("compile.enable")
        yield flag("compile.components", "model,loss")
    else:
        yield flag("compile.no_enable")
    for name, is_fused in fused.items():
        if is_fused != compiled:
            reason = "blocks are compiled" if compiled else "blocks are not compiled"
            yield without_flag(name, getattr(run, name), reason)
    if trained.execution.tp_comm_overlap and run.tp > 1 and run.sequence_parallel:
        if compiled:
            yield flag("compile.enable_async_tensor_parallel")
        else:
            yield without_flag("tp_comm_overlap", True, "it needs compiled blocks")
    if mode is None and run.framework == "torchtitan" and not compiled:
        why = "launches were timed as of compiled blocks, kernels as of blocks that are not"
        yield without_flag("launch_mode", "compile", f"{why}; search with --launch-mode eager")
    elif mode not in (None, "eager", "compile", "cuda_graph"):
        yield without_flag("launch_mode", mode)


def _graphs(trained: TrainedRun) -> Lines:
    """CUDA graphs of the forward and backward pass, on by default."""
    run, execution = trained.run, trained.execution
    captured = execution.launch_mode == "cuda_graph"
    if captured and run.pp == 1 and run.ep == 1 and not execution.cuda_graph_modules:
        yield flag("training.no_disable_cuda_graphs")
        return
    yield flag("training.disable_cuda_graphs")
    if captured:
        yield without_flag(
            "launch_mode", execution.launch_mode, "of whole steps, without pp and ep"
        )


def _recompute(trained: TrainedRun) -> Lines:
    """Positional argument after all flags."""
    if trained.run.recompute == "selective":
        yield without_flag("recompute", "selective", "torchtitan's keeps other results")
    else:
        yield FlagLine(f"activation-checkpoint:{trained.run.recompute}")


# ---- all -----------------------------------------------------------------------------------------

_WRITTEN = frozenset({
    "tp", "cp", "pp", "ep", "etp", "dp", "vpp", "zero", "dp_shard", "sequence_parallel",
    "cp_comm_type", "reshard_after_forward", "schedule", "layers_per_stage",
    "first_stage_less_layers", "last_stage_less_layers", "seq_length", "micro_batch_size",
    "global_batch_size", "params_dtype", "grad_reduce_dtype", "precision", "operators", "fuse",
    "tp_comm_overlap", "launch_mode", "cuda_graph_modules", "recompute",
})  # fmt: skip
"""Settings that the rules above cover; all others have no flag."""

_RULES: Sequence[Rule] = (
    _degrees, _sharding, _stages, _batch, _precision, _compile, _graphs,
)  # fmt: skip


def torchtitan(trained: TrainedRun) -> Lines:
    """Flags of torchtitan for a run, and comments on settings without one."""
    yield from lines_of(trained, "torchtitan", _RULES, _WRITTEN)
    yield from _recompute(trained)
