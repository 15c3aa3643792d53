"""A candidate as others take it: a run file, or flags of the framework that will train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stagewright.errors import UserError, either
from stagewright.explore.candidates import Candidates
from stagewright.files import write_text
from stagewright.run.sections import EXPERIMENT, RUN_SECTIONS
from stagewright.run.sections.declare import text_of
from stagewright.time.hardware import names as known_hardware


def given(candidates: Candidates, row: int) -> dict[str, Any]:
    """All settings of a candidate that are not defaults, by name, in the order of their sections.

    Of hardware the name; where figures of it are varied, of a name that no file has.
    """
    run, hardware = candidates.run(row), candidates.hardware(row)
    values: dict[str, Any] = {"model": run.model, "hardware": hardware.name, **run.given()}
    homes = {"cluster": candidates.cluster(row), "execution": candidates.execution(row)}
    for section, home in homes.items():
        for setting in EXPERIMENT.values():
            if setting.section == section and setting.name not in ("hardware", "nodes"):
                value = getattr(home, setting.name)
                if value != setting.default:
                    values[setting.name] = value
    order = ["model", "hardware", *EXPERIMENT]
    return {name: values[name] for name in order if name in values}


def run_file(candidates: Candidates, row: int, hardware: str | None = None) -> str:
    """A run file in YAML that `simulate`, `report` and `generate` take with --config.

    `hardware` replaces the hardware's name, such as by the path of a file.

    >>> from stagewright.explore import candidates as of
    >>> from stagewright.run.experiment import Experiment
    >>> from stagewright.run.settings import Run
    >>> from stagewright.time.hardware import resolve
    >>> base = Experiment(Run(model="gpt2"), of.ClusterSection(), of.Execution())
    >>> columns = {"tp": of.Column.of([4]), "no_overlap": of.Column.of([frozenset({"tp"})])}
    >>> print(run_file(Candidates.of(base, resolve("h100-sxm"), columns), 0), end="")
    model: gpt2
    tp: 4
    hardware: h100-sxm
    no_overlap: [tp]
    """
    values = given(candidates, row)
    if hardware is not None:
        values["hardware"] = hardware
    first = [name for name in values if name == "model" or EXPERIMENT[name].section in RUN_SECTIONS]
    ordered = [*first, *(name for name in values if name not in first)]
    return "".join(_line(name, _plain(values[name])) for name in ordered)


def _line(name: str, value: Any) -> str:
    """A setting as a line of YAML; a list in brackets."""
    block = yaml.safe_dump({name: value}, default_flow_style=False, width=10**6)
    if not isinstance(value, list):
        return block
    return f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=10**6)}"


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, frozenset):
        return sorted(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [_plain(each) for each in value] if isinstance(value, tuple) else value  # pyright: ignore


def write_run_file(candidates: Candidates, row: int, path: str | Path) -> list[str]:
    """Write the run file of a candidate, and of varied hardware a file beside; their names."""
    place, hardware = Path(path), candidates.hardware(row)
    written = [str(place)]
    name = None
    if hardware.name not in known_hardware():
        beside = place.with_name(f"{place.stem}.hardware.yaml")
        values = hardware.model_dump(mode="json", exclude_none=True, exclude={"sources"})
        write_text(beside, yaml.safe_dump(values, sort_keys=False))
        written.append(str(beside))
        name = str(beside)
    write_text(place, run_file(candidates, row, name))
    return written


# ---- flags of frameworks -------------------------------------------------------------------------

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
    "precision": lambda name: {"bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid"}.get(
        name, "?"
    ),
    "moe_flex_dispatcher": lambda on: "--moe-token-dispatcher-type flex",
    "order": lambda order: "--use-tp-pp-dp-mapping" if order == "tp-cp-ep-pp-dp" else "?",
    "model": lambda name: "",
    "hardware": lambda name: "",
    "no_overlap": lambda axes: "",
}
# torchtitan's `JobConfig` as of 2025 (torchtitan/config/job_config.py, commit 000204a4); in 2026
# batches are counted in tokens there, and microbatches by number.
_TORCHTITAN: Mapping[str, Callable[[Any], str]] = {
    "dp": lambda n: "",
    "zero": lambda n: "" if n == 3 else "?",
    "schedule": lambda name: (
        f"--parallelism.pipeline_parallel_schedule {_TORCH_SCHEDULES.get(name, '?')}"
    ),
    "recompute": lambda kind: f"--activation_checkpoint.mode {kind}",
    "micro_batch_size": lambda n: f"--parallelism.pipeline_parallel_microbatch_size {n}",
    "dp_shard": lambda n: f"--parallelism.data_parallel_shard_degree {n}",
    "vpp": lambda n: "",
    "model": lambda name: "",
    "hardware": lambda name: "",
    "framework": lambda name: "",
    "sequence_parallel": lambda on: "",  # torchtitan's tensor parallelism implies it
}
_TORCH_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV", "looped-bfs": "LoopedBFS",
}  # fmt: skip

TOOLS: Mapping[str, Mapping[str, Callable[[Any], str]]] = {
    "megatron": _MEGATRON,
    "torchtitan": _TORCHTITAN,
}
"""Flags of training frameworks by setting, where they are not the setting's own name there."""


def flags(candidates: Candidates, row: int, tool: str) -> list[str]:
    """The flags with which a framework trains as a candidate does; `#` before what has none.

    Sizes of the model are not among them, nor what all runs of the framework need.
    """
    if tool not in TOOLS:
        raise UserError(f"--as {tool}: wanted {either(TOOLS)}")
    lines: list[str] = []
    for name, value in given(candidates, row).items():
        line = _flag(name, value, tool)
        if line:
            lines.append(line if "?" not in line else f"# {name}={text_of(value)} has no flag")
    return lines


def _flag(name: str, value: Any, tool: str) -> str:
    if name in TOOLS[tool]:
        return TOOLS[tool][name](value)
    setting = EXPERIMENT[name]
    dotted = tool == "torchtitan"
    known = [each for each in setting.names if ("." in each) == dotted]
    flag = known[0] if known else "" if dotted else name.replace("_", "-")
    if (
        not flag
        or (not dotted and name not in _MEGATRON_NAMES)
        or (isinstance(value, bool) and not value)
    ):
        return "?"
    return f"--{flag}" if isinstance(value, bool) else f"--{flag} {text_of(value)}"
