"""Flags of Megatron-LM or torchtitan for a candidate.

For each framework a table has settings that are a flag, with the framework's defaults; rules write
the flags that follow from several settings. Together they cover all that differs from the
framework's defaults, so that it does what was simulated. A setting without a flag is a comment.
Sizes of the model are left out, and flags that all runs need.

>>> from stagewright.model.catalog import resolve as preset
>>> from stagewright.run.experiment import Experiment
>>> from stagewright.run.sections.cluster import ClusterSection
>>> from stagewright.searching.candidates import Column
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2", zero=1, dp=2), ClusterSection(), Execution())
>>> columns = {"hardware": Column.constant(resolve("h100-sxm"), 1)}
>>> flags(Candidates(base, preset("gpt2"), columns, 1), 0, "megatron")[:3]
['--seq-length 1024', '--micro-batch-size 1', '--global-batch-size 2']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

from stagewright.errors import UserError, either
from stagewright.launch.names import written
from stagewright.model.config import ModelConfig
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Candidates
from stagewright.searching.run_file import non_default_settings
from stagewright.time.hardware import Hardware


class FlagLine(NamedTuple):
    """Printed line: a flag with its values, or a comment."""

    text: str
    missing: str = ""
    """Setting without a flag."""
    notable: bool = False
    """True for a comment on all figures."""


Lines = Iterator[FlagLine]


def flag(name: str, *values: object) -> FlagLine:
    """Flag of a framework with its values.

    >>> flag("cuda-graph-modules", "attn", "moe").text
    '--cuda-graph-modules attn moe'
    """
    return FlagLine(" ".join([f"--{name}", *map(text_of, values)]))


def without_flag(name: str, value: object, reason: str = "") -> FlagLine:
    """Comment on a setting without a flag.

    >>> without_flag("schedule", "zbv").text, without_flag("zero", 1, "it shards all").text
    ('# schedule=zbv has no flag', '# zero=1 has no flag: it shards all')
    """
    suffix = f": {reason}" if reason else ""
    return FlagLine(f"# {name}={text_of(value)} has no flag{suffix}", name)


@dataclass(frozen=True)
class TrainedRun:
    """Resolved candidate."""

    run: Run
    model: ModelConfig
    execution: Execution
    hardware: Hardware
    settings: Mapping[str, Any]
    """Non-default settings by name."""

    @classmethod
    def of(cls, candidates: Candidates, index: int) -> TrainedRun:
        """Resolve one candidate."""
        run, model = candidates.run(index), candidates.model
        return cls(
            run.resolved(model),
            model.with_overrides(run.layers, run.vocab, run.mtp_num_layers),
            candidates.execution(index),
            candidates.hardware(index),
            non_default_settings(candidates, index),
        )

    def value(self, name: str) -> Any:
        """Value of a setting; None if other settings leave it without effect."""
        of = EXPERIMENT[name]
        lacks = any(getattr(self.run, other) not in values for other, values in of.needs.items())
        section = self.execution if of.section == "execution" else self.run
        return None if lacks or of.is_idle(self.run) else getattr(section, name)

    @property
    def gradient_axis(self) -> str | None:
        """Axis of gradient reductions, as `no_overlap` names it; None without reductions."""
        return "dp" if self.run.dp > 1 else "cp" if self.run.cp > 1 else None


Rule = Callable[[TrainedRun], Lines]

REQUIRED = object()
"""Default of an option that has to be given."""


class Framework:
    """Flags of a framework."""

    def __init__(self, tool: str, name: str, defaults: Mapping[str, object]) -> None:
        """`defaults`: the framework's, of settings that a row of the tool's table gives."""
        self.tool, self.name, self.defaults = tool, name, defaults
        self.rules: list[Rule] = []
        self.covered = {*defaults}
        """Settings that have a flag; all others are comments."""

    def rule(self, *settings: str) -> Callable[[Rule], Rule]:
        """Add a rule that covers some settings."""

        def add(rule: Rule) -> Rule:
            self.rules.append(rule)
            self.covered.update(settings)
            return rule

        return add

    def lines(self, trained: TrainedRun) -> Lines:
        """Flags for a run, and comments on settings without one."""
        for setting, default in self.defaults.items():
            value = trained.value(setting)
            if value not in (None, default):
                words = written(self.tool, setting, text_of(value))
                yield flag(*words) if words else without_flag(setting, value)
        for rule in self.rules:
            yield from rule(trained)
        for setting, value in trained.settings.items():
            if setting in self.covered or setting in _SIMULATOR:
                continue
            if not EXPERIMENT[setting].is_idle(trained.run):
                yield without_flag(setting, value)


_SIMULATOR = frozenset({
    "model", "hardware", "topology", "algorithm", "price", "costs", "stragglers", "framework",
    "as_family", "mode", "memory_allowance", "device_memory", "expert_load", "streams",
    "pipeline_drain",
})  # fmt: skip
"""Settings of the machine and of the simulator, which no framework has."""

# ---- Megatron-LM at d98e8a64 ---------------------------------------------------------------------
# Defaults and assertions are those of `megatron/training/arguments.py` and of the configurations
# that it turns into options: `TransformerConfig`, `ModelParallelConfig` and others.

MEGATRON = Framework("megatron", "Megatron-LM", {
    "tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False, "cp_comm_type": "p2p",
    "seq_length": REQUIRED, "decoder_seq_length": None, "micro_batch_size": REQUIRED,
    "global_batch_size": REQUIRED, "tp_comm_overlap": False, "recompute": "none",
    "optimizer": "adamw", "sgd_momentum": 0.9, "exp_avg_dtype": None, "exp_avg_sq_dtype": None,
    "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_router_dtype": None, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0, "make_vocab_size_divisible_by": 128,
    "moe_router_enable_expert_bias": False, "order": EXPERIMENT["order"].default,
})  # fmt: skip


@MEGATRON.rule("dp", "etp")
def _degrees(trained: TrainedRun) -> Lines:
    """Degree of experts; dp follows from the number of ranks."""
    run = trained.run
    if run.etp not in (None, run.tp):
        yield flag("expert-tensor-parallel-size", run.etp)


@MEGATRON.rule(
    *("vpp", "schedule", "microbatch_group_size_per_vp_stage", "layers_per_stage"),
    *("pipeline_split", "first_stage_less_layers", "last_stage_less_layers"),
)
def _stages(trained: TrainedRun) -> Lines:
    """Number of virtual stages, or a layout of unequal ones."""
    run, model, split = trained.run, trained.model, trained.run.layers_per_stage or ()
    # A pattern of layers separates its stages by bars, and allows neither option.
    bars = "bars in --hybrid-layer-pattern say it" if model.recurrence is not None else ""
    if len({*split}) > 1:
        if bars or sum(split) != model.num_layers:
            yield without_flag("layers_per_stage", split, bars)
        else:
            layout = _layout(split, model.mtp_num_layers or 0)
            yield flag("pipeline-model-parallel-layout", quote(layout))
    elif run.vpp > 1:
        flag_name = "num-virtual-stages-per-pipeline-rank"
        yield without_flag("vpp", run.vpp, bars) if bars else flag(flag_name, run.vpp)
    if run.pp > 1 and run.schedule not in ("1f1b", "interleaved"):
        yield without_flag("schedule", run.schedule)
    if run.vpp > 1 and run.microbatch_group not in (None, run.pp):
        yield flag("microbatch-group-size-per-virtual-pipeline-stage", run.microbatch_group)


def _layout(layers: tuple[int, ...], predicted: int) -> str:
    """Stages in Megatron-LM's notation; `predicted`: number of MTP layers.

    >>> _layout((2, 1, 0), 1)
    'Et*2|t|mL'
    """
    stages = ["" if not count else "t" if count == 1 else f"t*{count}" for count in layers]
    return "E" + "|".join(stages) + "m" * predicted + "L"


@MEGATRON.rule("zero", "dp_shard", "grad_reduce_dtype")
def _sharding(trained: TrainedRun) -> Lines:
    run, hardware = trained.run, trained.hardware
    if run.zero == 1:
        yield flag("use-distributed-optimizer")
    elif run.zero:
        yield flag("use-megatron-fsdp")
        strategy = "optim_grads" if run.zero == 2 else "optim_grads_params"
        yield flag("data-parallel-sharding-strategy", strategy)
        yield flag("ckpt-format", "fsdp_dtensor")  # asserted
        before_blackwell = hardware.vendor == "NVIDIA" and hardware.rate_of("fp4") is None
        if before_blackwell and max(run.tp, run.cp) > 1:
            yield FlagLine(
                "# Megatron-LM warns of Megatron-FSDP with tp or cp before Blackwell: tp and cp "
                "need CUDA_DEVICE_MAX_CONNECTIONS=1, Megatron-FSDP needs it unset or larger",
                notable=True,
            )
    copies = run.dp // (run.dp_shard or run.dp)
    if run.zero and copies > 1:
        yield flag("num-distributed-optimizer-instances", copies)
    if run.zero > 1 and run.grad_reduce_dtype:
        yield flag("megatron-fsdp-grad-comm-dtype", run.grad_reduce_dtype)


@MEGATRON.rule("no_overlap", "overlap_param_gather", "overlap_moe_expert_parallel_comm")
def _overlap(trained: TrainedRun) -> Lines:
    """Overlap of dp and of experts, off by default; of pp, on by default if vpp > 1."""
    run, execution, axis = trained.run, trained.execution, trained.gradient_axis
    overlaps = axis is not None and axis not in execution.no_overlap
    overlaps = overlaps or run.zero > 1  # Megatron-FSDP always turns it on
    if overlaps:
        yield flag("overlap-grad-reduce")
    if execution.overlap_param_gather and run.zero and axis:
        why = "it needs --overlap-grad-reduce, which no_overlap leaves out"
        line = without_flag("overlap_param_gather", True, why)
        yield flag("overlap-param-gather") if overlaps else line
    for waiting in sorted(execution.no_overlap):
        if getattr(run, waiting) == 1:
            continue
        if waiting == "dp":
            if run.zero > 1:
                yield without_flag("no_overlap", waiting, "Megatron-FSDP always overlaps")
        elif waiting != "pp":
            yield without_flag("no_overlap", waiting)
        elif run.vpp > 1:  # without virtual stages kernels always wait
            line = without_flag("no_overlap", waiting, "it needs pp above 2")
            yield flag("no-overlap-p2p-communication") if run.pp > 2 else line
    if execution.overlap_moe_expert_parallel_comm:
        name = "overlap_moe_expert_parallel_comm"
        line = without_flag(name, True, "it needs bf16")
        yield line if run.precision == "fp32" else flag(name.replace("_", "-"))


def megatron_recompute_modules(run: Run, model: ModelConfig) -> Mapping[str, str | None]:
    """Megatron-LM's names for `recompute_modules`; None: it has no flag for the module."""
    # In fp8 with delayed scaling, only attention may be recomputed.
    delayed = run.precision == "fp8" and run.fp8_recipe in (None, "delayed")
    routed = model.num_experts > 0 and not model.first_dense_layers and model.moe_layer_freq == 1
    return {
        "core_attn": "core_attn",
        "norm": None if delayed else "layernorm",
        "activation": "moe_act" if routed and not delayed else None,  # of experts alone
    }


@MEGATRON.rule("recompute_num_layers", "recompute_modules")
def _recompute(trained: TrainedRun) -> Lines:
    run, names = trained.run, megatron_recompute_modules(trained.run, trained.model)
    if run.recompute == "full":
        count = run.recompute_num_layers
        yield flag("recompute-method", "uniform" if count is None else "block")
        yield flag("recompute-num-layers", count or 1)
    elif run.recompute == "selective" and run.recompute_modules != ("core_attn",):
        modules = [name for module in run.recompute_modules if (name := names[module])]
        if modules:
            yield flag("recompute-modules", *modules)
        for module in run.recompute_modules:
            if not names[module]:
                yield without_flag("recompute_modules", module)


@MEGATRON.rule("cpu_offloading_num_layers", "optimizer_cpu_offload", "optimizer_offload_fraction")
def _offload(trained: TrainedRun) -> Lines:
    run, layers = trained.run, trained.run.cpu_offloading_num_layers
    if layers is not None:
        possible = run.pp == 1 and run.recompute == "none" and layers < trained.model.num_layers
        why = "it needs pp=1, recompute=none and a layer that is not offloaded"
        line = without_flag("cpu_offloading_num_layers", layers, why)
        yield flag("cpu-offloading-num-layers", layers) if possible else line
    if run.optimizer_cpu_offload and run.optimizer != "adamw":
        yield without_flag("optimizer_cpu_offload", True, "it needs optimizer=adamw")
        return
    if run.optimizer_cpu_offload or run.exp_avg_dtype or run.exp_avg_sq_dtype:
        yield flag("use-precision-aware-optimizer")  # asserted
    if run.optimizer_cpu_offload:
        yield flag("optimizer-cpu-offload")
        if run.optimizer_offload_fraction not in (None, 1):
            yield flag("optimizer-offload-fraction", run.optimizer_offload_fraction)


@MEGATRON.rule(
    *("moe_token_dispatcher_type", "moe_flex_dispatcher", "moe_apply_probs"),
)
def _experts(trained: TrainedRun) -> Lines:
    """Options of experts; by default tokens are all-gathered and experts not grouped."""
    run, dispatcher = trained.run, trained.run.moe_token_dispatcher_type
    if not trained.model.num_experts:
        return
    yield flag("moe-grouped-gemm")
    flex = trained.execution.moe_flex_dispatcher and dispatcher == "alltoall"
    yield flag("moe-token-dispatcher-type", "flex" if flex else dispatcher)
    if run.moe_apply_probs == "input":
        yield flag("moe-apply-probs-on-input")
    elif run.moe_apply_probs == "output":
        yield without_flag("moe_apply_probs", run.moe_apply_probs)


@MEGATRON.rule("precision", "fp8_recipe")
def _precision(trained: TrainedRun) -> Lines:
    """Precision, by default fp32; its recipe of fp8, by default delayed."""
    run, recipe = trained.run, trained.run.fp8_recipe
    if run.precision in ("bf16", "fp8", "nvfp4"):
        yield flag("bf16")
    elif run.precision != "fp32":
        yield without_flag("precision", run.precision)
    if run.precision == "nvfp4":
        yield flag("fp4-format", "e2m1")
    if run.precision == "fp8":
        yield flag("fp8-format", "hybrid")
        if recipe in ("tensorwise", "blockwise", "mxfp8"):
            yield flag("fp8-recipe", recipe)
        elif recipe not in (None, "delayed"):
            yield without_flag("fp8_recipe", recipe)


@MEGATRON.rule("flash_attention", "dropout", "clip_grad")
def _kernels(trained: TrainedRun) -> Lines:
    run, model = trained.run, trained.model
    if not run.flash_attention:  # by default Transformer Engine selects a fused kernel
        yield flag("attention-backend", "unfused")
    if run.operators == "fused":
        yield flag("cross-entropy-loss-fusion")
    dropouts = {"attention": model.attention_dropout, "hidden": model.hidden_dropout}
    for name, probability in dropouts.items():
        probability = probability if run.dropout else 0.0
        if probability != 0.1:
            yield flag(f"{name}-dropout", probability)
    if not run.clip_grad:
        yield flag("clip-grad", 0.0)


@MEGATRON.rule("launch_mode", "cuda_graph_modules")
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


@MEGATRON.rule("layers", "vocab", "mtp_num_layers", "mtp_loss_scaling_factor")
def _model(trained: TrainedRun) -> Lines:
    """Overridden sizes of the model; the others are left out."""
    names = {"layers": "num_layers", "vocab": "vocab_size"}
    for name in ("layers", "vocab", "mtp_num_layers", "mtp_loss_scaling_factor"):
        if name in trained.settings:
            yield flag(names.get(name, name).replace("_", "-"), trained.settings[name])


# ---- torchtitan at b5bcd76c ----------------------------------------------------------------------
# `Trainer.Config` of torchtitan/trainer.py and config/configs.py. Model configurations set degrees,
# compilation and checkpoints, so that these are always written. Batches are counted in tokens.

TORCHTITAN = Framework("torchtitan", "torchtitan", dict.fromkeys(("tp", "cp", "pp"), REQUIRED))


@TORCHTITAN.rule("sequence_parallel", "cp_comm_type", "ep", "etp")
def _torchtitan_degrees(trained: TrainedRun) -> Lines:
    """Degree of ep, over the ranks of tp, cp and sharded dp; experts are not split by tp."""
    run = trained.run
    if run.tp > 1 and not run.sequence_parallel:
        yield flag("parallelism.no_enable_sequence_parallel")
    if run.cp > 1 and run.cp_comm_type != "all_gather":
        yield without_flag("cp_comm_type", run.cp_comm_type)
    if not trained.model.num_experts:
        return
    shared = run.tp * run.cp * (1 if run.zero == 0 else run.dp_shard or run.dp)
    if shared % run.ep:
        why = f"its ranks are tp x cp x those of dp that shard parameters, which are {shared}"
        yield without_flag("ep", run.ep, why)
    else:
        yield flag("parallelism.expert_parallel_degree", run.ep)
    etp = run.tp if run.etp is None else run.etp
    if run.ep > 1 and etp > 1:
        yield without_flag("etp", etp, "with ep, experts are whole")


@TORCHTITAN.rule("zero", "dp", "dp_shard", "reshard_after_forward")
def _torchtitan_sharding(trained: TrainedRun) -> Lines:
    """Sharding of parameters, gradients and states in one; with cp it is always on."""
    run = trained.run
    if trained.gradient_axis and run.zero in (1, 2):
        why = "dp shards parameters, gradients and optimizer states together, or nothing"
        yield without_flag("zero", run.zero, f"{why}; search with --zero 0,3")
        return
    if run.zero == 0 and run.cp > 1:
        why = "ranks of cp always shard parameters; search with --zero 3"
        yield without_flag("zero", run.zero, why)
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


@TORCHTITAN.rule(
    *("vpp", "schedule", "layers_per_stage"),
    *("first_stage_less_layers", "last_stage_less_layers"),
)
def _torchtitan_stages(trained: TrainedRun) -> Lines:
    """Schedule and stages; the number of stages follows from the layers per stage."""
    run = trained.run
    if run.pp == 1:
        return
    prefix = "parallelism.pipeline_parallel"
    name = _SCHEDULES.get((str(run.schedule), run.vpp > 1))
    yield flag(f"{prefix}_schedule", name) if name else without_flag("schedule", run.schedule)
    yield flag("parallelism.num_pp_microbatches", run.microbatches)
    less = run.first_stage_less_layers, run.last_stage_less_layers
    yield flag(f"{prefix}_first_stage_less_layers", less[0])
    yield flag(f"{prefix}_last_stage_less_layers", less[1])
    if run.unresolved().layers_per_stage is not None:
        yield without_flag("layers_per_stage", run.layers_per_stage)
    elif run.vpp > 1:
        layers = trained.model.depth + sum(less)
        per_stage = math.ceil(layers / run.virtual_stages)
        if math.ceil(layers / per_stage) == run.virtual_stages:
            yield flag(f"{prefix}_layers_per_stage", per_stage)
        else:
            yield without_flag("vpp", run.vpp, "no whole number of layers makes so many stages")


@TORCHTITAN.rule(
    *("seq_length", "micro_batch_size", "global_batch_size"),
    *("params_dtype", "precision", "grad_reduce_dtype"),
)
def _torchtitan_training(trained: TrainedRun) -> Lines:
    run, length = trained.run, trained.run.seq_length or 0
    yield flag("training.max_context_length", length)
    microbatch, step = run.micro_batch_size * length, (run.global_batch_size or 0) * length
    yield flag("training.num_tokens_per_microbatch_per_dp_rank", microbatch)
    yield flag("training.num_tokens_per_train_step", step)
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    if run.params_dtype in dtypes:
        yield flag("training.dtype", dtypes[run.params_dtype])
    if run.precision in dtypes:
        yield flag("training.mixed_precision_param", dtypes[run.precision])
    else:
        yield without_flag("precision", run.precision)
    if run.grad_reduce_dtype == "bf16":
        yield without_flag("grad_reduce_dtype", "bf16")


@TORCHTITAN.rule("operators", "fuse", "tp_comm_overlap", "launch_mode", "cuda_graph_modules")
def _compilation(trained: TrainedRun) -> Lines:
    """Compilation, which fuses operators; CUDA graphs of forward and backward, by default on."""
    run, execution, mode = trained.run, trained.execution, trained.execution.launch_mode
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
    if execution.tp_comm_overlap and run.tp > 1 and run.sequence_parallel:
        line = without_flag("tp_comm_overlap", True, "it needs compiled blocks")
        yield flag("compile.enable_async_tensor_parallel") if compiled else line
    if mode is None and run.framework == "torchtitan" and not compiled:
        why = "launches were timed as of compiled blocks, kernels as of blocks that are not"
        yield without_flag("launch_mode", "compile", f"{why}; search with --launch-mode eager")
    elif mode not in (None, "eager", "compile", "cuda_graph"):
        yield without_flag("launch_mode", mode)
    captured = mode == "cuda_graph"
    if captured and run.pp == 1 and run.ep == 1 and not execution.cuda_graph_modules:
        yield flag("training.no_disable_cuda_graphs")
        return
    yield flag("training.disable_cuda_graphs")
    if captured:
        yield without_flag("launch_mode", mode, "of whole steps, without pp and ep")


@TORCHTITAN.rule("recompute")
def _torchtitan_recompute(trained: TrainedRun) -> Lines:
    """Positional argument."""
    if trained.run.recompute == "selective":
        yield without_flag("recompute", "selective", "torchtitan's keeps other results")
    else:
        yield FlagLine(f"activation-checkpoint:{trained.run.recompute}")


# ---- all lines -----------------------------------------------------------------------------------

_FRAMEWORKS = {"megatron": MEGATRON, "torchtitan": TORCHTITAN}
TOOLS = tuple(_FRAMEWORKS)


def flags(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Flags with which a framework trains as a candidate does; `#` begins comments."""
    return [line.text for line in _lines(candidates, index, tool)]


def notes(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Sentences that repeat the comments, for users who keep the flags only."""
    lines = _lines(candidates, index, tool)
    names = [*dict.fromkeys(line.missing for line in lines if line.missing)]
    count = f"{len(names)} settings have" if len(names) > 1 else "1 setting has"
    missing = [f"{count} no flag in {tool}: {', '.join(names)}"] if names else []
    return missing + [line.text.removeprefix("# ") for line in lines if line.notable]


def _lines(candidates: Candidates, index: int, tool: str) -> list[FlagLine]:
    """Comments, then flags: positional arguments come last."""
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    trained, framework = TrainedRun.of(candidates, index), _FRAMEWORKS[tool]
    lines = sorted(framework.lines(trained), key=lambda line: line.text[0] != "#")
    if trained.run.framework != tool:
        text = (
            f"# figures are with the habits of {_FRAMEWORKS[trained.run.framework].name}; search "
            f"with --framework {tool} for those of {framework.name}, which may have other times "
            "and memory"
        )
        lines.insert(0, FlagLine(text, notable=True))
    return lines
