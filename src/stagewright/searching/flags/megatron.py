"""Flags that differ from Megatron-LM's defaults at d98e8a64.

Defaults and assertions are those of `megatron/training/arguments.py` and of the configurations that
it turns into options: `TransformerConfig`, `ModelParallelConfig` and others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote

from stagewright.run.sections import EXPERIMENT
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

_DEGREES = {
    "tp": "tensor-model-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "ep": "expert-model-parallel-size",
}


def _degrees(trained: TrainedRun) -> Lines:
    """Degrees except dp, which follows from the number of ranks."""
    run = trained.run
    for axis, name in _DEGREES.items():
        if getattr(run, axis) > 1:
            yield flag(name, getattr(run, axis))
    if run.etp not in (None, run.tp):
        yield flag("expert-tensor-parallel-size", run.etp)
    if run.tp > 1 and run.sequence_parallel:
        yield flag("sequence-parallel")
    if run.cp > 1 and run.cp_comm_type != "p2p":
        yield flag("cp-comm-type", run.cp_comm_type)
    if run.order == "tp-cp-ep-pp-dp":
        yield flag("use-tp-pp-dp-mapping")
    elif run.order != EXPERIMENT["order"].default:
        yield without_flag("order", run.order)


def _layout(layers: Sequence[int], predicted: int) -> str:
    """Stages in Megatron-LM's notation; `predicted`: number of MTP layers.

    >>> _layout((2, 1, 0), 1)
    'Et*2|t|mL'
    """
    stages = ["" if not count else "t" if count == 1 else f"t*{count}" for count in layers]
    return "E" + "|".join(stages) + "m" * predicted + "L"


def _stages(trained: TrainedRun) -> Lines:
    """Number of virtual stages, or a layout of unequal ones."""
    run, split = trained.run, trained.run.layers_per_stage or ()
    # A pattern of layers separates its stages by bars, and allows neither option.
    patterned = trained.model.recurrence is not None
    if len(split) > 1 and len({*split}) > 1:
        if patterned or sum(split) != trained.model.num_layers:
            why = "bars in --hybrid-layer-pattern say it" if patterned else ""
            yield without_flag("layers_per_stage", split, why)
        else:
            layout = _layout(split, trained.model.mtp_num_layers or 0)
            yield flag("pipeline-model-parallel-layout", quote(layout))
    elif run.vpp > 1 and patterned:
        yield without_flag("vpp", run.vpp, "bars in --hybrid-layer-pattern say it")
    elif run.vpp > 1:
        yield flag("num-virtual-stages-per-pipeline-rank", run.vpp)
    if run.pp > 1 and run.schedule not in ("1f1b", "interleaved"):
        yield without_flag("schedule", run.schedule)
    if run.vpp > 1 and run.microbatch_group not in (None, run.pp):
        yield flag("microbatch-group-size-per-virtual-pipeline-stage", run.microbatch_group)


_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def _sharding(trained: TrainedRun) -> Lines:
    run = trained.run
    if run.zero == 1:
        yield flag("use-distributed-optimizer")
    elif run.zero:
        yield flag("use-megatron-fsdp")
        yield flag("data-parallel-sharding-strategy", _STRATEGIES[run.zero])
        yield flag("ckpt-format", "fsdp_dtensor")  # asserted
    copies = run.dp // (run.dp_shard or run.dp)
    if run.zero and copies > 1:
        yield flag("num-distributed-optimizer-instances", copies)
    if run.zero > 1 and run.grad_reduce_dtype:
        yield flag("megatron-fsdp-grad-comm-dtype", run.grad_reduce_dtype)


def _batch(trained: TrainedRun) -> Lines:
    """Sizes, also where they are 1.

    Megatron-LM requires a microbatch size; its default batch is one microbatch per rank of dp.
    """
    run = trained.run
    yield flag("seq-length", run.seq_length)
    if run.decoder_seq_length is not None:
        yield flag("decoder-seq-length", run.decoder_seq_length)
    yield flag("micro-batch-size", run.micro_batch_size)
    yield flag("global-batch-size", run.global_batch_size)


# ---- overlap -------------------------------------------------------------------------------------


def _overlap(trained: TrainedRun) -> Lines:
    """Overlap of dp, off by default, and of pipeline messages, on by default if vpp > 1."""
    run, execution, axis = trained.run, trained.execution, trained.gradient_axis
    overlaps = axis is not None and axis not in execution.no_overlap
    if overlaps or run.zero > 1:  # Megatron-FSDP always turns it on
        yield flag("overlap-grad-reduce")
    if execution.overlap_param_gather and run.zero and axis:
        if overlaps or run.zero > 1:
            yield flag("overlap-param-gather")
        else:
            why = "it needs --overlap-grad-reduce, which no_overlap leaves out"
            yield without_flag("overlap_param_gather", True, why)
    for waiting in sorted(execution.no_overlap):
        yield from _waits(trained, waiting)
    if execution.tp_comm_overlap and run.tp > 1 and run.sequence_parallel:
        yield flag("tp-comm-overlap")
    if execution.overlap_moe_expert_parallel_comm:
        yield from _expert_overlap(trained)


def _waits(trained: TrainedRun, axis: str) -> Lines:
    """Kernels that wait for communication over an axis."""
    run = trained.run
    if getattr(run, axis) == 1:
        return
    if axis == "dp":
        if run.zero > 1:
            yield without_flag("no_overlap", axis, "Megatron-FSDP always overlaps")
    elif axis != "pp":
        yield without_flag("no_overlap", axis)
    elif run.vpp > 1:  # without virtual stages kernels always wait
        line = flag("no-overlap-p2p-communication")
        yield line if run.pp > 2 else without_flag("no_overlap", axis, "it needs pp above 2")


def _expert_overlap(trained: TrainedRun) -> Lines:
    run = trained.run
    asserted = {
        "with pp it needs virtual stages": run.pp == 1 or run.vpp > 1,
        "it needs ep": run.ep > 1,
        "not with recompute=full": run.recompute != "full",
        "it needs bf16": run.precision != "fp32",
        "it needs moe_token_dispatcher_type=alltoall": run.moe_token_dispatcher_type == "alltoall",
    }
    violated = [why for why, holds in asserted.items() if not holds]
    name = "overlap_moe_expert_parallel_comm"
    yield without_flag(name, True, violated[0]) if violated else flag(name.replace("_", "-"))


# ---- memory --------------------------------------------------------------------------------------


def _recompute(trained: TrainedRun) -> Lines:
    run = trained.run
    if run.recompute == "none":
        return
    yield flag("recompute-granularity", run.recompute)
    if run.recompute == "full":
        count = run.recompute_num_layers
        yield flag("recompute-method", "uniform" if count is None else "block")
        yield flag("recompute-num-layers", count or 1)
        return
    # In fp8 with delayed scaling, only attention may be recomputed.
    delayed = run.precision == "fp8" and run.fp8_recipe in (None, "delayed")
    model = trained.model
    all_moe = trained.routed and not model.first_dense_layers and model.moe_layer_freq == 1
    names = {
        "core_attn": "core_attn",
        "norm": None if delayed else "layernorm",
        "activation": "moe_act" if all_moe and not delayed else None,  # of experts alone
    }
    if run.recompute_modules != ("core_attn",):
        modules = [name for module in run.recompute_modules if (name := names[module])]
        if modules:
            yield flag("recompute-modules", *modules)
        for module in run.recompute_modules:
            if not names[module]:
                yield without_flag("recompute_modules", module)


def _offload(trained: TrainedRun) -> Lines:
    run, layers = trained.run, trained.run.cpu_offloading_num_layers
    if layers is not None:
        offloads = run.pp == 1 and run.recompute == "none" and layers < trained.model.num_layers
        why = "it needs pp=1, recompute=none and a layer that is not offloaded"
        name = "cpu_offloading_num_layers"
        yield (
            flag("cpu-offloading-num-layers", layers)
            if offloads
            else without_flag(name, layers, why)
        )
    moments = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(run, name)]
    if run.optimizer_cpu_offload and run.optimizer != "adamw":
        yield without_flag("optimizer_cpu_offload", True, "it needs optimizer=adamw")
        return
    if run.optimizer_cpu_offload or moments:
        yield flag("use-precision-aware-optimizer")  # asserted
    for name in moments:
        yield flag(name.replace("_", "-"), getattr(run, name))
    if run.optimizer_cpu_offload:
        yield flag("optimizer-cpu-offload")
        if run.optimizer_offload_fraction not in (None, 1):
            yield flag("optimizer-offload-fraction", run.optimizer_offload_fraction)


# ---- what is computed ----------------------------------------------------------------------------

_EXPERT_OPTIONS: Mapping[str, object] = {
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
}
"""Options of the same name, with Megatron-LM's defaults."""


def _experts(trained: TrainedRun) -> Lines:
    """Options of experts; by default tokens are all-gathered and experts not grouped."""
    run = trained.run
    if not trained.routed:
        return
    yield flag("moe-grouped-gemm")
    flex = trained.execution.moe_flex_dispatcher and run.moe_token_dispatcher_type == "alltoall"
    yield flag("moe-token-dispatcher-type", "flex" if flex else run.moe_token_dispatcher_type)
    for name, default in _EXPERT_OPTIONS.items():
        value = getattr(run, name)
        if value != default:
            option = name.replace("_", "-")
            yield flag(option) if value is True else flag(option, value)
    if run.moe_router_enable_expert_bias:
        yield flag("moe-router-enable-expert-bias")
    if run.moe_apply_probs == "input":
        yield flag("moe-apply-probs-on-input")
    elif run.moe_apply_probs == "output":
        yield without_flag("moe_apply_probs", run.moe_apply_probs)


_PRECISIONS: Mapping[str, Sequence[str]] = {
    "fp32": (),  # the default
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
    "nvfp4": ("--bf16", "--fp4-format e2m1"),
}
_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Values of `--fp8-recipe` besides its default, delayed."""


def _precision(trained: TrainedRun) -> Lines:
    run = trained.run
    if run.precision in _PRECISIONS:
        yield from map(FlagLine, _PRECISIONS[run.precision])
    else:
        yield without_flag("precision", run.precision)
    if run.precision == "fp8" and run.fp8_recipe not in (None, "delayed"):
        has_flag = run.fp8_recipe in _RECIPES
        line = flag("fp8-recipe", run.fp8_recipe)
        yield line if has_flag else without_flag("fp8_recipe", run.fp8_recipe)


def _kernels(trained: TrainedRun) -> Lines:
    run, (attention, hidden) = trained.run, trained.dropouts
    if not run.flash_attention:  # by default Transformer Engine selects a fused kernel
        yield flag("attention-backend", "unfused")
    if run.operators == "fused":
        yield flag("cross-entropy-loss-fusion")
    if attention != 0.1:
        yield flag("attention-dropout", attention)
    if hidden != 0.1:
        yield flag("hidden-dropout", hidden)
    if run.make_vocab_size_divisible_by != 128:
        yield flag("make-vocab-size-divisible-by", run.make_vocab_size_divisible_by)


def _optimizer(trained: TrainedRun) -> Lines:
    run = trained.run
    if run.optimizer == "sgd":
        yield flag("optimizer", "sgd")
        if run.sgd_momentum != 0.9:
            yield flag("sgd-momentum", run.sgd_momentum)
    if not run.clip_grad:
        yield flag("clip-grad", 0.0)


def _launches(trained: TrainedRun) -> Lines:
    """CUDA graphs; by default kernels are launched one by one."""
    mode, modules = trained.execution.launch_mode, sorted(trained.execution.cuda_graph_modules)
    if mode == "cuda_graph" and modules:
        yield flag("cuda-graph-impl", "transformer_engine")
        yield flag("cuda-graph-modules", *modules)
    elif mode == "cuda_graph":
        yield flag("cuda-graph-impl", "full_iteration")
        yield flag("no-check-for-nan-in-loss-and-grad")  # asserted
    elif mode not in (None, "eager"):
        yield without_flag("launch_mode", mode)


_MODEL_OPTIONS = {
    "layers": "num-layers",
    "vocab": "vocab-size",
    "mtp_num_layers": "mtp-num-layers",
    "mtp_loss_scaling_factor": "mtp-loss-scaling-factor",
}


def _model(trained: TrainedRun) -> Lines:
    """Overridden sizes of the model; the others are left out."""
    for name, option in _MODEL_OPTIONS.items():
        if name in trained.settings:
            yield flag(option, trained.settings[name])


# ---- all -----------------------------------------------------------------------------------------

_WRITTEN = frozenset({
    *_DEGREES, *_EXPERT_OPTIONS, *_MODEL_OPTIONS, "dp", "etp", "sequence_parallel", "cp_comm_type",
    "order", "vpp", "layers_per_stage", "pipeline_split", "first_stage_less_layers",
    "last_stage_less_layers", "schedule", "microbatch_group_size_per_vp_stage", "zero", "dp_shard",
    "grad_reduce_dtype", "seq_length", "decoder_seq_length", "micro_batch_size",
    "global_batch_size", "overlap_param_gather", "no_overlap", "tp_comm_overlap",
    "overlap_moe_expert_parallel_comm", "recompute", "recompute_modules", "recompute_num_layers",
    "cpu_offloading_num_layers", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload",
    "optimizer_offload_fraction", "moe_token_dispatcher_type", "moe_flex_dispatcher",
    "moe_router_enable_expert_bias", "moe_apply_probs", "precision", "fp8_recipe",
    "flash_attention", "dropout", "make_vocab_size_divisible_by", "optimizer", "sgd_momentum",
    "clip_grad", "launch_mode", "cuda_graph_modules",
})  # fmt: skip
"""Settings that the rules above cover; all others have no flag."""

_RULES: Sequence[Rule] = (
    _degrees, _stages, _sharding, _batch, _overlap, _recompute, _offload, _experts, _precision,
    _kernels, _optimizer, _launches, _model,
)  # fmt: skip


def megatron(trained: TrainedRun) -> Lines:
    """Flags of Megatron-LM for a run, and comments on settings without one."""
    yield from lines_of(trained, "megatron", _RULES, _WRITTEN)
