"""Runs of training as files of other tools, for `--as TOOL`.

Settings that are one flag or key of a tool are rows of its table in `data/launch`, which read it,
too; rules write what follows from several settings. Together they cover all that differs from the
tool's defaults, so that it does what was simulated. A setting that the tool lacks is a comment and
a note. Sizes of the model are left out, and flags that all runs need. `launch` reads the files.

>>> from stagewright.model.catalog import resolve as preset
>>> trained = TrainedRun.of(Run(model="gpt2", zero=1, dp=2), preset("gpt2"), Execution())
>>> text_lines(trained, "megatron")[:3]
['--seq-length 1024', '--micro-batch-size 1', '--global-batch-size 2']
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import Any, NamedTuple, get_args

import yaml

from stagewright.errors import UserError, either
from stagewright.launch.names import written
from stagewright.launch.tables import nested, table, value_of
from stagewright.model.config import ModelConfig
from stagewright.model.presets import PRESETS
from stagewright.run.experiment import Experiment
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import text_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.memory import Module
from stagewright.run.settings import Run


class FlagLine(NamedTuple):
    """A flag or key with its values, or a comment."""

    name: str = ""
    values: tuple[str, ...] = ()
    comment: str = ""
    missing: str = ""
    """Setting without a flag."""
    notable: bool = False
    """True for a comment on all figures."""


Lines = Iterator[FlagLine]


def flag(name: str, *values: object) -> FlagLine:
    """Flag of a tool with its values.

    >>> flag("cuda-graph-modules", "attn", "moe").values
    ('attn', 'moe')
    """
    return FlagLine(name, tuple(map(text_of, values)))


def without_flag(name: str, value: object, reason: str = "") -> FlagLine:
    """Comment on a setting without a flag.

    >>> without_flag("schedule", "zbv").comment, without_flag("zero", 1, "it shards all").comment
    ('schedule=zbv has no flag', 'zero=1 has no flag: it shards all')
    """
    suffix = f": {reason}" if reason else ""
    return FlagLine(comment=f"{name}={text_of(value)} has no flag{suffix}", missing=name)


@dataclass(frozen=True)
class TrainedRun:
    """A resolved run with its execution."""

    run: Run
    model: ModelConfig
    execution: Execution
    settings: Mapping[str, Any]
    """Non-default settings by name."""
    before_blackwell: bool = False
    """True if the hardware is NVIDIA's, and older."""

    @classmethod
    def of(
        cls, run: Run, model: ModelConfig, execution: Execution, *, before_blackwell: bool = False
    ) -> TrainedRun:
        """Resolve a run of a model."""
        resolved = run.resolved(model)
        given = Experiment(run.unresolved(model), ClusterSection(), execution).given()
        if resolved.etp == resolved.tp:  # as without it
            given.pop("etp", None)
        whole = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        return cls(resolved, whole, execution, given, before_blackwell)

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


class TrainingTool:
    """Files of a tool that trains."""

    def __init__(
        self,
        tool: str,
        name: str,
        defaults: Mapping[str, object],
        text: Callable[[TrainedRun, Sequence[FlagLine]], Iterator[str]],
    ) -> None:
        """`defaults`: the tool's, of settings that a row of its table gives; `text`: lines."""
        self.tool, self.name, self.text = tool, name, text
        self.rules: list[tuple[tuple[str, ...], Rule]] = [
            ((setting,), partial(self._row, setting, default))
            for setting, default in defaults.items()
        ]
        """Rules with the settings that they read."""

    def rule(self, *settings: str) -> Callable[[Rule], Rule]:
        """Add a rule that writes some settings, and reads some that others write."""

        def add(rule: Rule) -> Rule:
            self.rules.append((settings, rule))
            return rule

        return add

    def _row(self, setting: str, default: object, trained: TrainedRun) -> Lines:
        """A setting that a row of the tool's table gives."""
        value = trained.value(setting)
        if value not in (None, default):
            words = written(self.tool, setting, text_of(value))
            yield flag(*words) if words else without_flag(setting, value)

    @property
    def covered(self) -> set[str]:
        """Settings that have a flag; all others are comments."""
        return {setting for settings, _ in self.rules for setting in settings}

    def lines(self, trained: TrainedRun) -> Lines:
        """Flags for a run, and comments on settings without one."""
        for _, rule in self.rules:
            yield from rule(trained)
        yield from self.uncovered(trained)

    def uncovered(self, trained: TrainedRun) -> Lines:
        """Comments on settings of which no rule knows."""
        covered = self.covered | _SIMULATOR
        for setting, value in trained.settings.items():
            if setting not in covered and not EXPERIMENT[setting].is_idle(trained.run):
                yield without_flag(setting, value)


_SIMULATOR = frozenset({
    "model", "costs", "stragglers", "framework", "as_family", "mode", "memory_allowance",
    "device_memory", "expert_load", "streams", "pipeline_drain",
})  # fmt: skip
"""Settings of the simulator, which no tool has."""


# ---- forms ---------------------------------------------------------------------------------------


def _comments(lines: Sequence[FlagLine], indent: str = "") -> Iterator[str]:
    return (f"{indent}# {line.comment}" for line in lines if line.comment)


def _options(_: TrainedRun, lines: Sequence[FlagLine]) -> Iterator[str]:
    """Options of a command line."""
    yield from _comments(lines)
    for line in lines:
        if line.name:
            yield " ".join([f"--{line.name}", *line.values])


def _values(lines: Sequence[FlagLine]) -> dict[str, Any]:
    return nested({line.name: line.values[0] for line in lines if line.name})


def _json(_: TrainedRun, lines: Sequence[FlagLine]) -> Iterator[str]:
    """JSON, which has no comments."""
    yield from json.dumps(_values(lines), indent=2).splitlines()


def _yaml(_: TrainedRun, lines: Sequence[FlagLine]) -> Iterator[str]:
    yield from _comments(lines)
    yield from yaml.safe_dump(_values(lines), sort_keys=False).splitlines()


def _literal(text: str) -> str:
    value = value_of(text)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _sizes(model: ModelConfig) -> ModelConfig:
    """The model without its name; positions change no step of training."""
    return replace(model, name="model", source="", max_position_embeddings=1)


def _recipe(trained: TrainedRun, lines: Sequence[FlagLine]) -> Iterator[str]:
    """Function of Python that changes a configuration of the same model."""
    sizes = _sizes(trained.model)
    configurations = table("torchtitan")["config"].words.items()
    same = (theirs for theirs, ours in configurations if _sizes(PRESETS[ours]) == sizes)
    module, _, base = next(same, "..base").rpartition(".")
    assigned = {line.name: line.values[0] for line in lines if line.name}
    policy = assigned.get("activation_checkpoint", "None").partition(".")[0]
    if policy != "None":
        yield f"from torchtitan.distributed.activation_checkpoint import {policy}"
    if module != ".":
        yield f"from torchtitan.models.{module}.config_registry import {base}"
    else:
        yield f"from recipes import base  # put in: a configuration of {trained.run.model}"
    yield "from torchtitan.trainer import Trainer"
    yield from ("", "", "def recipe() -> Trainer.Config:", f"    config = {base}()")
    yield from _comments(lines, "    ")
    for name, text in assigned.items():
        is_code = text == "None" or "(" in text
        yield f"    config.{name} = {text if is_code else _literal(text)}"
    yield "    return config"


# ---- Megatron-LM at d98e8a64 ---------------------------------------------------------------------
# Defaults and assertions are those of `megatron/training/arguments.py` and of the configurations
# that it turns into options: `TransformerConfig`, `ModelParallelConfig` and others.

MEGATRON = TrainingTool("megatron", "Megatron-LM", {
    "tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False, "cp_comm_type": "p2p",
    "seq_length": REQUIRED, "decoder_seq_length": None, "micro_batch_size": REQUIRED,
    "global_batch_size": REQUIRED, "tp_comm_overlap": False, "recompute": "none",
    "optimizer": "adamw", "sgd_momentum": 0.9, "exp_avg_dtype": None, "exp_avg_sq_dtype": None,
    "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_router_dtype": None, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0, "make_vocab_size_divisible_by": 128,
    "moe_router_enable_expert_bias": False, "order": EXPERIMENT["order"].default,
}, _options)  # fmt: skip


@MEGATRON.rule("dp", "etp")
def _degrees(trained: TrainedRun) -> Lines:
    """Degree of experts; dp follows from the number of ranks."""
    run = trained.run
    if run.etp not in (None, run.tp):
        yield flag("expert-tensor-parallel-size", run.etp)


@MEGATRON.rule(
    *("vpp", "schedule", "microbatch_group_size_per_vp_stage", "layers_per_stage"),
    *("pipeline_split", "first_stage_less_layers", "last_stage_less_layers", "pp"),
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
    run = trained.run
    if run.zero == 1:
        yield flag("use-distributed-optimizer")
    elif run.zero:
        yield flag("use-megatron-fsdp")
        strategy = "optim_grads" if run.zero == 2 else "optim_grads_params"
        yield flag("data-parallel-sharding-strategy", strategy)
        yield flag("ckpt-format", "fsdp_dtensor")  # asserted
        if trained.before_blackwell and max(run.tp, run.cp) > 1:
            yield FlagLine(
                comment="Megatron-LM warns of Megatron-FSDP with tp or cp before Blackwell: tp and "
                "cp need CUDA_DEVICE_MAX_CONNECTIONS=1, Megatron-FSDP needs it unset or larger",
                notable=True,
            )
    copies = run.dp // (run.dp_shard or run.dp)
    if run.zero and copies > 1:
        yield flag("num-distributed-optimizer-instances", copies)
    if run.zero > 1 and run.grad_reduce_dtype:
        yield flag("megatron-fsdp-grad-comm-dtype", run.grad_reduce_dtype)
    elif run.grad_reduce_dtype == "bf16":
        yield flag("grad-reduce-in-bf16")


@MEGATRON.rule(
    *("no_overlap", "overlap_param_gather", "overlap_moe_expert_parallel_comm"),
    *("tp", "cp", "dp", "pp", "ep", "vpp", "zero", "precision"),
)
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
    # With delayed scaling, norms and activations of experts may not be recomputed.
    delayed = run.precision == "fp8" and run.fp8_recipe in (None, "delayed")
    own = {"norm": None if delayed else "layernorm", "activation": None}
    own |= {"moe_act": None} if delayed or not model.num_experts else {}
    return {name: name for name in get_args(Module)} | own


@MEGATRON.rule(
    *("recompute_num_layers", "recompute_modules", "recompute", "precision", "fp8_recipe")
)
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


@MEGATRON.rule(
    *("cpu_offloading_num_layers", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("pp", "recompute", "optimizer"),
)
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


@MEGATRON.rule("moe_token_dispatcher_type", "moe_flex_dispatcher", "moe_apply_probs")
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


@MEGATRON.rule("flash_attention", "compiled_loss", "dropout", "clip_grad")
def _kernels(trained: TrainedRun) -> Lines:
    run, model = trained.run, trained.model
    if not run.flash_attention:  # by default Transformer Engine selects a fused kernel
        yield flag("attention-backend", "unfused")
    if run.operators == "fused":
        yield flag("cross-entropy-loss-fusion")
        yield flag("cross-entropy-fusion-impl", "native" if run.compiled_loss else "te")
    dropouts = {"attention": model.attention_dropout, "hidden": model.hidden_dropout}
    for name, probability in dropouts.items():
        probability = probability if run.dropout else 0.0
        if probability != 0.1:
            yield flag(f"{name}-dropout", probability)
    if not run.clip_grad:
        yield flag("clip-grad", 0.0)


@MEGATRON.rule("defer_embedding_wgrad_compute", "wgrad_deferral_limit")
def _deferred(trained: TrainedRun) -> Lines:
    """Weight gradients of the output layer that wait for the end of the pipeline."""
    if trained.value("defer_embedding_wgrad_compute"):
        yield flag("defer-embedding-wgrad-compute")
        yield flag("wgrad-deferral-limit", trained.run.wgrad_deferral_limit)


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
# `Trainer.Config` of torchtitan/trainer.py and config/configs.py, in a function, since options of
# the command line are frozen (config/README.md). Configurations of models set degrees, compilation
# and checkpoints, so that these are always written. Batches are counted in tokens.

TORCHTITAN = TrainingTool("torchtitan", "torchtitan", dict.fromkeys(
    ("tp", "cp", "pp", "seq_length", "params_dtype"), REQUIRED), _recipe)  # fmt: skip


@TORCHTITAN.rule(
    *("sequence_parallel", "cp_comm_type", "ep", "etp", "tp", "cp", "dp", "dp_shard", "zero")
)
def _torchtitan_degrees(trained: TrainedRun) -> Lines:
    """Degree of ep, over the ranks of tp, cp and sharded dp; experts are not split by tp."""
    run = trained.run
    if run.tp > 1:
        yield flag("parallelism.enable_sequence_parallel", run.sequence_parallel)
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


@TORCHTITAN.rule("zero", "dp", "dp_shard", "reshard_after_forward", "cp")
def _torchtitan_sharding(trained: TrainedRun) -> Lines:
    """Sharding of parameters, gradients and states in one; with cp it is always on."""
    run = trained.run
    if trained.gradient_axis and run.zero in (1, 2):
        why = "dp shards parameters, gradients and optimizer states together, or nothing"
        yield without_flag("zero", run.zero, f"{why}; take --zero 0 or 3")
    elif run.zero == 0 and run.cp > 1:
        why = "ranks of cp always shard parameters; take --zero 3"
        yield without_flag("zero", run.zero, why)
    copies = run.dp if run.zero == 0 else run.dp // (run.dp_shard or run.dp)
    yield flag("parallelism.data_parallel_replicate_degree", copies)
    yield flag("parallelism.data_parallel_shard_degree", run.dp // copies)
    if run.zero == 3:
        policy = "always" if run.reshard_after_forward else "never"
        yield flag("parallelism.fsdp_reshard_after_forward", policy)


@TORCHTITAN.rule(
    *("vpp", "schedule", "layers_per_stage", "pp"),
    *("first_stage_less_layers", "last_stage_less_layers"),
)
def _torchtitan_stages(trained: TrainedRun) -> Lines:
    """Schedule and stages; the number of stages follows from the layers per stage."""
    run = trained.run
    if run.pp == 1:
        return
    prefix = "parallelism.pipeline_parallel"
    words = written("torchtitan", "schedule", str(run.schedule))
    fits = words and (run.vpp == 1) == (words[1] in ("1F1B", "GPipe"))
    yield flag(*words) if words and fits else without_flag("schedule", run.schedule)
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
    *("micro_batch_size", "global_batch_size"), *("precision", "grad_reduce_dtype", "clip_grad")
)
def _torchtitan_training(trained: TrainedRun) -> Lines:
    run, length = trained.run, trained.run.seq_length or 0
    words = written("torchtitan", "precision", run.precision)
    why = "give model_registry a converter such as Float8LinearConverter"
    yield flag(*words) if words else without_flag("precision", run.precision, why)
    microbatch, step = run.micro_batch_size * length, (run.global_batch_size or 0) * length
    yield flag("training.num_tokens_per_microbatch_per_dp_rank", microbatch)
    yield flag("training.num_tokens_per_train_step", step)
    yield flag("training.max_norm", 1.0 if run.clip_grad else 0.0)
    if run.grad_reduce_dtype == "bf16":
        yield without_flag("grad_reduce_dtype", "bf16")


@TORCHTITAN.rule(
    *("operators", "fuse", "tp_comm_overlap", "launch_mode", "cuda_graph_modules"),
    *("tp", "sequence_parallel", "pp", "ep"),
)
def _compilation(trained: TrainedRun) -> Lines:
    """Compilation, which fuses operators; CUDA graphs of forward and backward, by default on."""
    run, execution, mode = trained.run, trained.execution, trained.execution.launch_mode
    fused = {"operators": run.operators == "fused", "fuse": run.fuse}
    compiled = mode == "compile" or (mode in (None, "cuda_graph") and all(fused.values()))
    yield flag("compile.enable", compiled)
    for name, is_fused in fused.items():
        if is_fused != compiled:
            reason = "blocks are compiled" if compiled else "blocks are not compiled"
            yield without_flag(name, getattr(run, name), reason)
    if execution.tp_comm_overlap and run.tp > 1 and run.sequence_parallel:
        line = without_flag("tp_comm_overlap", True, "it needs compiled blocks")
        yield flag("compile.enable_async_tensor_parallel", True) if compiled else line
    if mode is None and run.framework == "torchtitan" and not compiled:
        why = "launches were timed as of compiled blocks, kernels as of blocks that are not"
        yield without_flag("launch_mode", "compile", f"{why}; take --launch-mode eager")
    elif mode not in (None, "eager", "compile", "cuda_graph"):
        yield without_flag("launch_mode", mode)
    whole = run.pp == 1 and run.ep == 1 and not execution.cuda_graph_modules
    captured = mode == "cuda_graph" and whole
    yield flag("training.disable_cuda_graphs", not captured)
    if mode == "cuda_graph" and not captured:
        yield without_flag("launch_mode", mode, "of whole steps, without pp and ep")


@TORCHTITAN.rule("recompute")
def _torchtitan_recompute(trained: TrainedRun) -> Lines:
    """Policy of activation checkpointing."""
    words = written("torchtitan", "recompute", trained.run.recompute)
    why = "torchtitan's keeps other results"
    yield flag(*words) if words else without_flag("recompute", trained.run.recompute, why)


# ---- DeepSpeed -----------------------------------------------------------------------------------
# deepspeed/runtime/config.py and runtime/zero/config.py. The program has the model, its sequences
# and what is recomputed; the launcher starts the ranks that dp fills.

DEEPSPEED = TrainingTool("deepspeed", "DeepSpeed", {
    "micro_batch_size": REQUIRED, "global_batch_size": REQUIRED, "zero": REQUIRED, "tp": 1,
    "cp": 1, "precision": "fp32", "optimizer": "adamw",
}, _json)  # fmt: skip


@DEEPSPEED.rule(
    *("dp", "dp_shard", "cp_comm_type", "optimizer_cpu_offload", "clip_grad", "zero", "cp")
)
def _deepspeed_rest(trained: TrainedRun) -> Lines:
    """Clipping, off by default; MiCS with stage 3; Ulysses, which exchanges by all-to-all."""
    run = trained.run
    yield flag("gradient_accumulation_steps", run.microbatches)
    yield flag("gradient_clipping", 1.0 if run.clip_grad else 0.0)
    if run.zero and run.dp_shard not in (None, run.dp):
        line = without_flag("dp_shard", run.dp_shard, "MiCS needs zero=3")
        yield flag("zero_optimization.mics_shard_size", run.dp_shard) if run.zero == 3 else line
    if run.cp > 1 and run.cp_comm_type != "a2a":
        yield without_flag("cp_comm_type", run.cp_comm_type, "Ulysses exchanges by all-to-all")
    if run.optimizer_cpu_offload:
        line = without_flag("optimizer_cpu_offload", True, "it needs zero above 0")
        yield flag("zero_optimization.offload_optimizer.device", "cpu") if run.zero else line


@DEEPSPEED.rule("no_overlap", "tp", "cp", "dp", "pp")
def _deepspeed_overlap(trained: TrainedRun) -> Lines:
    """Overlap of gradients, by default on with stage 3 only."""
    waiting = {axis for axis in trained.execution.no_overlap if getattr(trained.run, axis) > 1}
    yield flag("zero_optimization.overlap_comm", "dp" not in waiting)
    for axis in sorted(waiting - {"dp"}):
        yield without_flag("no_overlap", axis)


# ---- Accelerate ----------------------------------------------------------------------------------
# huggingface/accelerate@26db67d5 utils/dataclasses.py (`FullyShardedDataParallelPlugin`,
# `ParallelismConfig`). FSDP shards all; ZeRO's stages 1 and 2 are DeepSpeed's.

ACCELERATE = TrainingTool("accelerate", "Accelerate", {"precision": REQUIRED}, _yaml)


@ACCELERATE.rule(
    *("zero", "dp", "dp_shard", "tp", "cp", "cp_comm_type", "reshard_after_forward", "recompute"),
    *("micro_batch_size", "global_batch_size", "optimizer_cpu_offload"),
)
def _accelerate(trained: TrainedRun) -> Lines:
    """Kind of data parallelism, its degrees, and what the program has to say itself."""
    run = trained.run
    yield flag("num_processes", run.world_size // run.pp)
    split = run.tp > 1 or run.cp > 1
    kind = "FSDP" if run.zero or run.cp > 1 else "MULTI_GPU"
    kind = "DEEPSPEED" if run.zero in (1, 2) and not split else kind
    yield flag("distributed_type", kind)
    if run.zero == 0 and run.cp > 1:
        yield without_flag("zero", run.zero, "ranks of cp always shard parameters")
    if run.zero in (1, 2) and split:
        yield without_flag("zero", run.zero, "DeepSpeed's stages go without tp and cp")
    if run.microbatches > 1:
        yield flag("gradient_accumulation_steps", run.microbatches)
    if run.micro_batch_size > 1:
        for name in ("micro_batch_size", "global_batch_size"):
            why = "the program has the batch of a GPU"
            yield without_flag(name, getattr(run, name), why)
    if kind == "DEEPSPEED":
        yield flag("deepspeed_config.zero_stage", run.zero)
        if run.optimizer_cpu_offload:
            yield flag("deepspeed_config.offload_optimizer_device", "cpu")
    elif run.optimizer_cpu_offload:
        yield without_flag("optimizer_cpu_offload", True, "it needs zero=1 or 2")
    if kind != "FSDP" and run.recompute != "none":
        yield without_flag("recompute", run.recompute, "the program says it")
    shard = run.dp_shard or run.dp
    if kind == "FSDP":
        yield flag("fsdp_config.fsdp_version", 2)
        if run.zero == 3:
            again = run.reshard_after_forward
            yield flag("fsdp_config.fsdp_reshard_after_forward", again)
        words = written("accelerate", "recompute", run.recompute)
        yield flag(*words) if words else without_flag("recompute", run.recompute)
    elif shard != run.dp and run.zero:
        yield without_flag("dp_shard", shard, "it needs zero=3")
    if kind == "FSDP" or split:
        shard = 1 if run.zero == 0 else shard
        yield flag("parallelism_config.parallelism_config_dp_replicate_size", run.dp // shard)
        yield flag("parallelism_config.parallelism_config_dp_shard_size", shard)
        yield flag("parallelism_config.parallelism_config_tp_size", run.tp)
        yield flag("parallelism_config.parallelism_config_cp_size", run.cp)
    if run.cp > 1:
        words = written("accelerate", "cp_comm_type", str(run.cp_comm_type))
        yield flag(*words) if words else without_flag("cp_comm_type", run.cp_comm_type)


@DEEPSPEED.rule("pp")
@ACCELERATE.rule("pp")
def _no_stages(trained: TrainedRun) -> Lines:
    """A pipeline, without which the rest of the file is a layout of fewer GPUs."""
    run = trained.run
    if run.pp > 1:
        left = run.world_size // run.pp
        text = (
            f"without pp={run.pp} the file is of {left} GPUs, not of {run.world_size}: take --pp 1"
        )
        yield FlagLine(comment=text, missing="pp", notable=True)


# ---- all tools -----------------------------------------------------------------------------------

_TOOLS = {of.tool: of for of in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}
TOOLS = tuple(_TOOLS)


def text_lines(trained: TrainedRun, tool: str) -> list[str]:
    """Lines of a file, or flags, with which a tool trains as this run; `#` begins comments."""
    lines = flag_lines(trained, tool)
    return [*_TOOLS[tool].text(trained, lines)]


def notes(trained: TrainedRun, tool: str) -> list[str]:
    """Sentences that repeat the comments, for users who keep the flags only."""
    lines = flag_lines(trained, tool)
    names = [*dict.fromkeys(line.missing for line in lines if line.missing)]
    count = f"{len(names)} settings have" if len(names) > 1 else "1 setting has"
    missing = [f"{count} no flag in {tool}: {', '.join(names)}"] if names else []
    return missing + [line.comment for line in lines if line.notable]


def rules_of(tool: str, settings: Set[str]) -> list[tuple[tuple[str, ...], Rule]]:
    """Rules of a tool that write some of these settings, with the settings that they read."""
    of = _TOOLS[tool]
    rules = [(names, rule) for names, rule in of.rules if settings & {*names}]
    rules += [((name,), of.uncovered) for name in sorted(settings - of.covered)]
    read = [
        {*names, *(n for name in names for n in EXPERIMENT[name].read_too)} for names, _ in rules
    ]
    return [(tuple(sorted(names)), rule) for names, (_, rule) in zip(read, rules, strict=True)]


def flag_lines(trained: TrainedRun, tool: str) -> list[FlagLine]:
    """Flags of a tool for a run, and comments on settings without one."""
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    framework, profile = _TOOLS[tool], _TOOLS[trained.run.framework]
    lines = [*framework.lines(trained)]
    if profile is not framework and tool in ("megatron", "torchtitan"):
        text = (
            f"figures are with the habits of {profile.name}; give --framework {tool} for those of "
            f"{framework.name}, which may have other times and memory"
        )
        lines.insert(0, FlagLine(comment=text, notable=True))
    return lines
