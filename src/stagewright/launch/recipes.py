"""Training by torchtitan (TOML, Python, options), DeepSpeed (JSON) and Accelerate (YAML).

Nested keys are flags with dots, as in `deepspeed.csv`. None of these files has the sizes of a
model: torchtitan's names one, with the others the user gives MODEL.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping

from stagewright.files import read_text
from stagewright.launch import shell
from stagewright.launch.reading import (
    NO_COMMAND,
    Flag,
    LaunchFile,
    LaunchSource,
    Line,
    Tool,
    apply,
    data_flags,
    parse,
    preset_of,
    program_of,
    started_gpus,
)
from stagewright.launch.shell import ShellCommand
from stagewright.launch.tables import canonical, dotted, row_of, table
from stagewright.model.presets import PRESETS

# ---- torchtitan ----------------------------------------------------------------------------------


def _torchtitan_command(source: LaunchSource) -> ShellCommand | None:
    if source.format == "toml" and source.data is not None:
        sections = {"training", "parallelism"} & source.data.keys()
        return NO_COMMAND if sections and "model" in source.data else None
    if source.format == "python":
        return NO_COMMAND if source.data is not None else None
    rows = table("torchtitan")
    options = re.compile(r"--[^=]+\.[^=]+")
    return source.first(lambda command: any(
        row_of(rows, canonical(option[0])) for option in map(options.match, command.words) if option
    ))  # fmt: skip


def _read_torchtitan(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "torchtitan")
    settings = reading.settings
    given = [*parse(command.words, [table("torchtitan")])]
    given = [flag for flag in given if "." in flag.name]
    config = next((f.values[0] for f in given if f.name.endswith("config_file") and f.values), None)
    data = {**(source.data or {})}
    if source.format == "python" and "config" not in data:
        data = {"activation_checkpoint": "SelectiveAC.Config()"} | data  # its default
    flags = [*data_flags(data, "torchtitan")]
    if config is not None and (path := shell.beside(os.path.dirname(source.path), config)):
        text = read_text(path, "a job configuration of torchtitan", shell.MOST_BYTES)
        try:
            flags += data_flags(tomllib.loads(text), "torchtitan")
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise reading.fail(f"{config}: {error}") from None
    elif config is not None:
        reading.need_model(f"{config} is not here")
    flags += given
    names = ("training.local_batch_size", "training.batch_size")  # which only a rule reads
    batch = {name: int(f.values[0]) for f in flags if (name := f.name.lstrip("-")) in names
             and f.values and f.values[0].isdecimal()}  # fmt: skip
    kept = [flag for flag in flags if flag.name.lstrip("-") not in batch]
    extra = [*parse(source.more, [table("torchtitan")])]
    of_model = apply(reading, [*kept, *extra], ignore_unknown=source.ignore_unknown)
    settings["framework"] = "torchtitan"
    started_gpus(reading, source, program_of(command)[0])
    settings.setdefault("recompute", "none")
    settings.setdefault("launch_mode", "eager")
    settings["sequence_parallel"] = settings.get("tp", 1) > 1 and settings.get(
        "sequence_parallel", True
    )
    if settings.get("cp", 1) > 1:
        settings["zero"] = 3  # ranks of cp always shard parameters
    if settings.get("ep", 1) > 1:
        settings.setdefault("etp", 1)  # experts are whole
    if "parallelism_pipeline_parallel_layers_per_stage" not in settings and (
        settings.get("pp", 1) > 1 and settings.get("schedule", "1f1b") not in ("1f1b", "gpipe")
    ):
        settings.setdefault("vpp", 2)  # its default for schedules of several stages
    settings.setdefault("reshard_after_forward", settings.get("pp", 1) == 1)
    # Configurations in Python have CUDA graphs of whole steps unless they turn them off.
    captured = not settings.pop("disable_cuda_graphs", source.format != "python")
    if captured and settings.get("pp", 1) == 1 and settings.get("ep", 1) == 1:
        settings["launch_mode"] = "cuda_graph"
    _tokens(reading)
    for name, local in batch.items():
        reading.lines.append(Line(name, str(local), "sequences of a rank of dp in a step"))
        if settings.get("pp", 1) == 1:
            settings["micro_batch_size"] = local
        elif "global_batch_size" not in settings:
            reading.needs["global_batch_size"] = (
                f"{name} {local} is of each rank of dp; give --global-batch-size, {local} x dp"
            )
    if settings.get("global_batch_size") == -1:
        del settings["global_batch_size"]
    _shards(reading)
    _named_model(reading, of_model)
    return reading


def _tokens(reading: LaunchFile) -> None:
    """Batches that are counted in tokens, as sequences."""
    settings = reading.settings
    microbatch, step = (settings.pop(f"tokens_of_{name}", 0) for name in ("microbatch", "step"))
    count = settings.pop("pp_microbatches", 1) if settings.get("pp", 1) > 1 else 1
    length = settings.get("seq_length", 0)
    if (microbatch or step > 0) and not length:
        reading.needs["seq_length"] = "batches are counted in tokens; give --seq-length"
        return
    if microbatch % length if microbatch else False:
        raise reading.fail(f"{microbatch} tokens of a microbatch are no sequences of {length}")
    settings |= {"micro_batch_size": microbatch // length} if microbatch else {}
    if step > 0:
        settings["global_batch_size"] = step // length
    elif count > 1:
        sequences = settings.get("micro_batch_size", 1) * count
        reading.needs["global_batch_size"] = (
            f"num_pp_microbatches is {count}; give --global-batch-size, {sequences} x dp"
        )


def _shards(reading: LaunchFile) -> None:
    """A degree of -1: dp fills the GPUs, which are not in the file."""
    settings = reading.settings
    name = "parallelism_data_parallel_shard_degree"
    if settings.get(name, -1) != -1:
        return
    settings.pop(name, None)
    settings["zero"] = 3
    copies = settings.pop("parallelism_data_parallel_replicate_degree", 1)
    if copies > 1:
        raise reading.fail(
            "data_parallel_shard_degree is -1, all ranks that are left, but with copies these are "
            "not known; give it as a number: --set parallelism.data-parallel-shard-degree=N"
        )
    reading.notes.append("data_parallel_shard_degree is -1: dp fills --gpus or --nodes")


def _named_model(reading: LaunchFile, given: Mapping[str, Flag]) -> None:
    """The preset of the assets' folder, or of the name and the flavor."""
    values = {flag.name.rpartition(".")[2]: flag.text for flag in given.values()}
    name = f"{values.get('name', '')}-{values.get('flavor', '')}"
    for text in (values.get("hf_assets_path", ""), values.get("tokenizer_path", ""), name):
        if preset := preset_of(text):
            reading.settings["model"] = preset
            reading.notes.append(f"the model is {preset}, after {text}")
            reading.lines += [Line(f.name, f.text, f"(of {preset})") for f in given.values()]
            return
    if reading.settings.get("model") in PRESETS:
        base = next(line.value for line in reading.lines if line.flag == "config")
        note = f"what {base} sets itself, and the file does not, is not read"
        reading.notes.append(note)
        return
    name = reading.settings.pop("model", name)
    reading.need_model(f"the sizes of {name} are in Python code")


# ---- DeepSpeed and Accelerate --------------------------------------------------------------------


_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
"""Keys of which a DeepSpeed configuration has one."""


def _deepspeed_claim(source: LaunchSource) -> ShellCommand | None:
    found = source.format == "json" and source.data and {*_OF_DEEPSPEED} & source.data.keys()
    return NO_COMMAND if found else None


def _accelerate_claim(source: LaunchSource) -> ShellCommand | None:
    return NO_COMMAND if source.data and "distributed_type" in source.data else None


def _read_keys(source: LaunchSource, tool: str, name: str) -> LaunchFile:
    """Settings of a file that names no model."""
    reading = LaunchFile(source.path, name)
    apply(reading, [*data_flags(source.data or {}, tool)], ignore_unknown=source.ignore_unknown)
    reading.need_model("names no model")
    return reading


def accumulate(reading: LaunchFile, steps: int | None) -> None:
    """The batch of several microbatches, where dp is known; otherwise it is asked for."""
    settings = reading.settings
    micro, dp = settings.get("micro_batch_size", 1), settings.get("dp")
    if "global_batch_size" in settings or not steps or steps == 1:
        return
    if dp is not None:
        settings["global_batch_size"] = micro * steps * dp
        return
    reading.needs["global_batch_size"] = (
        f"gradient_accumulation_steps is {steps}; give --global-batch-size, {micro * steps} x dp"
    )


def _read_deepspeed(source: LaunchSource, _: ShellCommand) -> LaunchFile:
    reading = _read_keys(source, "deepspeed", "DeepSpeed")
    settings = reading.settings
    left = {name for name, value in dotted(source.data or {}) if value == "auto"}
    if "precision" not in settings and left & {"bf16.enabled", "fp16.enabled"}:
        reading.needs["precision"] = "bf16 or fp16 is auto, as the program has it; give --precision"
    settings.setdefault("precision", "fp32")
    if "gradient_clipping" not in (source.data or {}):
        settings["clip_grad"] = False  # its default, unless the program gives another
    if settings.get("cp", 1) > 1:
        settings["cp_comm_type"] = "a2a"  # Ulysses
    overlaps = settings.pop("overlap_comm", settings.get("zero") == 3)  # its default
    settings["no_overlap"] = [] if overlaps else ["dp"]
    _batch(reading, settings.pop("gradient_accumulation_steps", None), left)
    return reading


def _batch(reading: LaunchFile, steps: int | None, left: set[str]) -> None:
    """Batches as `_set_batch_related_parameters` has them; `left` are keys that are `auto`."""
    settings = reading.settings
    batch, micro = settings.get("global_batch_size"), settings.get("micro_batch_size")
    if micro is None and batch is None:
        why = "auto" if "train_micro_batch_size_per_gpu" in left else "not given"
        name = "train_micro_batch_size_per_gpu"
        reading.needs["micro_batch_size"] = f"{name} is {why}; give --micro-batch-size"
    elif micro is None and batch is not None and "gradient_accumulation_steps" not in left:
        reading.needs["micro_batch_size"] = (
            f"train_batch_size is {batch}, in {steps or 1} microbatches of each rank of dp; give "
            f"--micro-batch-size, {batch // (steps or 1)} / dp"
        )
    elif micro is None:
        why = "gradient_accumulation_steps is auto"
        reading.needs["micro_batch_size"] = f"{why}; give --micro-batch-size"
    elif batch is not None and steps:
        if batch % (micro * steps):
            raise reading.fail(
                f"train_batch_size is {batch}, wanted a multiple of micro batches of {micro} times "
                f"gradient_accumulation_steps {steps}"
            )
        settings["dp"] = batch // (micro * steps)
    elif batch is None and steps is None and "gradient_accumulation_steps" in left:
        reading.needs["global_batch_size"] = (
            f"gradient_accumulation_steps is auto; give --global-batch-size, {micro} x dp x steps"
        )
    else:
        accumulate(reading, steps)


def _read_accelerate(source: LaunchSource, _: ShellCommand) -> LaunchFile:
    reading = _read_keys(source, "accelerate", "Accelerate")
    settings = reading.settings
    kind = str(settings.pop("distributed_type", "NO")).upper()
    shard, copies = settings.pop("shard_size", 1), settings.pop("replicate_size", 1)
    if kind in ("FSDP", "DEEPSPEED"):
        settings.setdefault("zero", 3 if kind == "FSDP" else 2)  # its defaults
    elif kind not in ("NO", "MULTI_GPU", "DEEPSPEED"):
        raise reading.fail(f"distributed_type is {kind}, wanted FSDP, DEEPSPEED, MULTI_GPU or NO")
    if copies > 1 and shard > 1:
        settings["dp_shard"] = shard
    elif copies > 1:
        settings["zero"] = 0
    settings.setdefault("precision", "fp32")
    settings.setdefault("gpus", 1)
    if settings.get("cp", 1) > 1:
        settings.setdefault("cp_comm_type", "all_gather")  # its default
    others = settings.get("tp", 1) * settings.get("cp", 1)
    if settings["gpus"] % others == 0:
        settings["dp"] = settings["gpus"] // others
    accumulate(reading, settings.pop("gradient_accumulation_steps", None))
    settings.pop("dp", None)
    return reading


TORCHTITAN = Tool(
    "torchtitan",
    _torchtitan_command,
    _read_torchtitan,
    ("[parallelism]", "[training]", "Trainer.Config"),
)
DEEPSPEED = Tool("DeepSpeed", _deepspeed_claim, _read_deepspeed, _OF_DEEPSPEED)
ACCELERATE = Tool("Accelerate", _accelerate_claim, _read_accelerate, ("distributed_type",))
