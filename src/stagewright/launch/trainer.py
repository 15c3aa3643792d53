"""Training by Hugging Face's Trainer: its arguments, with the files that the command names.

DeepSpeed's JSON and Accelerate's YAML are read as when they are files of their own; options of
`accelerate launch` replace keys of the YAML.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

from stagewright.files import from_json, from_yaml, read_text
from stagewright.launch import shell
from stagewright.launch.reading import (
    NO_COMMAND,
    Flag,
    LaunchFile,
    LaunchSource,
    Tool,
    apply,
    known,
    parse,
    program_of,
    started_gpus,
)
from stagewright.launch.recipes import ACCELERATE, DEEPSPEED, accumulate
from stagewright.launch.shell import ShellCommand
from stagewright.launch.tables import canonical, put, row_of, table, value_of

_MARKS = {"per_device_train_batch_size", "model_name_or_path"}
"""Arguments of which a command of the Trainer has one, with two more."""
_SFT = re.compile(r"(^|[/_])sft\w*\.py$")
_SECTIONS = ("fsdp", "parallelism_config", "dynamo", "fp8")
"""First words of options of `accelerate launch` that are keys of a section; or DeepSpeed's."""
_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTERS = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05,
             "lora_target_modules": ["q_proj", "v_proj"]}  # fmt: skip
"""Defaults of TRL's ModelConfig, and of PEFT for models of the Llama family."""


def _command(source: LaunchSource) -> ShellCommand | None:
    rows = table("trainer")

    def is_trainer(command: ShellCommand) -> bool:
        words = (word.partition("=")[0] for word in command.words if word.startswith("--"))
        names = {*map(canonical, words)}
        return bool(names & _MARKS) and sum(row_of(rows, name) is not None for name in names) > 2

    return source.first(is_trainer)


def _read(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "Hugging Face Trainer")
    before, program, words = program_of(command)
    given = [*map(_worded, parse((*words, *source.more), [table("trainer")]))]
    flags = {flag.row.flag: flag for flag in given if flag.row}
    is_sft = bool(_SFT.search(program)) or words[:2] == ("trl", "sft")
    of_model = apply(reading, given, ignore_unknown=source.ignore_unknown)
    own = reading.settings
    own.setdefault("micro_batch_size", 8)
    steps = own.pop("gradient_accumulation_steps", 1)
    _of_files(reading, source, _of_accelerate(reading, source, before), flags, steps)
    settings = reading.settings
    numbers = settings.pop("gpus", None)
    if "gpus" not in started_gpus(reading, source, before) and numbers:
        settings["gpus"] = numbers
    if is_sft:  # SFTConfig's defaults
        full_precision = "bf16" in flags and "false" in flags["bf16"].values
        defaults = {"seq_length": 1024, "precision": "fp32" if full_precision else "bf16",
                    "recompute": "full"}  # fmt: skip
        if absent := [f"{k} {v}" for k, v in defaults.items() if k not in settings]:
            reading.notes.append(f"the program is taken as TRL's SFT: {', '.join(absent)}")
        reading.settings = settings = {**defaults, **settings}
    settings.setdefault("precision", "fp32")
    if settings["precision"] == "fp32" and settings.get("params_dtype") == "bf16":
        settings["precision"] = "bf16"
    _adapters(settings, flags)
    _batch(reading, steps)
    if "seq_length" not in settings:
        reading.needs["seq_length"] = "no flag gives the length of sequences; give --seq-length"
    elif not any(word.startswith(("--block_size", "--packing")) for word in words):
        reading.notes.append("each sequence is taken to have the longest length allowed")
    model = of_model.get("model_name_or_path")
    reading.name_model("--model_name_or_path", "".join(model.values) if model else "")
    return reading


def _worded(flag: Flag) -> Flag:
    """Truth values in lower case, a switch alone as `true`; several words in one are several."""
    row, values = flag.row, flag.values
    values = tuple(v.lower() if v in ("True", "False") else v for v in values)
    if row and row.values.startswith("0-") and row.words:
        values = tuple(" ".join(values).split()) or ("true",)
    if row and row.setting == "lora_target_modules" and values == ("all-linear",):
        values = _ALL_LINEAR
    return flag._replace(values=values)


def _of_accelerate(
    reading: LaunchFile, source: LaunchSource, before: Sequence[str]
) -> dict[str, Any]:
    """Keys of Accelerate's configuration, and of options that replace some; empty: another start.

    Numbers of processes among the options are those of the launcher.
    """
    if not any(PurePath(word).name == "accelerate" for word in before):
        return {}
    rows = table("accelerate")
    options = {canonical(flag.name): flag for flag in parse(before, [rows])}
    data: dict[str, Any] = {}
    if (named := options.get("config_file")) is not None:
        data = _file(reading, source, "--config_file", named.text)
    for name, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED")):
        data |= {"distributed_type": kind} if name in options else {}
    if "use_megatron_lm" in options:
        raise reading.fail("--use_megatron_lm: Megatron-LM through Accelerate is not modelled")
    for name, flag in options.items():
        first = next((key for key in _SECTIONS if name.startswith(key)), "deepspeed")
        section = first.removesuffix("_config") + "_config."
        keys = (name, f"{section}{name}")
        key = (
            keys[1] if first != "deepspeed" else next((k for k in keys if canonical(k) in rows), "")
        )
        if key and flag.values and name not in ("num_processes", "num_machines"):
            put(data, key, value_of(known(reading, flag, flag.values[0])))
    data.setdefault("distributed_type", "MULTI_GPU")
    return data


def _of_files(
    reading: LaunchFile,
    source: LaunchSource,
    launched: dict[str, Any],
    flags: Mapping[str, Flag],
    steps: int,
) -> None:
    """Settings of the files that a command names, below its own."""
    own, below = reading.settings, dict[str, Any]()
    inner = launched.get("deepspeed_config")
    inner = cast("dict[str, Any]", inner if isinstance(inner, dict) else {})
    named = {"--deepspeed_config_file": inner.pop("deepspeed_config_file", None)}
    named["--deepspeed"] = flags["deepspeed"].text if "deepspeed" in flags else None
    for keys in (launched, inner):
        keys.pop("gradient_accumulation_steps", None)  # that of the Trainer counts
    if "fsdp_config" in flags:
        data = _file(reading, source, "--fsdp_config", flags["fsdp_config"].text)
        keys = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in data.items()}
        launched = {"distributed_type": "FSDP"} | launched | {"fsdp_config": keys}
    if launched:
        below = _joined(reading, ACCELERATE, source._replace(data=launched))
        if "num_processes" not in launched:
            below.pop("gpus", None)
    flag, text = next(((k, v) for k, v in named.items() if v), ("", ""))
    if flag:
        data = _file(reading, source, flag, str(text))
        counts = {"train_micro_batch_size_per_gpu": own["micro_batch_size"],
                  "gradient_accumulation_steps": steps}  # fmt: skip
        for key, count in counts.items():
            if data.get(key, "auto") not in ("auto", count):
                raise reading.fail(f"{key} is {data[key]} in {text}, wanted {count} or auto")
        batch = data.pop("train_batch_size", "auto")
        data |= counts | ({} if batch == "auto" else {"train_batch_size": batch})
        below.pop("zero", None)
        inner = _joined(reading, DEEPSPEED, source._replace(data=data))
        own |= {"clip_grad": inner["clip_grad"]} if "clip_grad" in inner else {}
        own.pop("params_dtype", None)  # DeepSpeed has a master copy
        below |= inner
    if "full" in (own.get("recompute"), below.get("recompute")):
        own["recompute"] = "full"
    reading.settings = below | own


def _joined(reading: LaunchFile, tool: Tool, source: LaunchSource) -> dict[str, Any]:
    """Settings of a file of a tool, with its lines and notes; what it lacks the Trainer has."""
    part = tool.read(source, NO_COMMAND)
    if not any(line.meaning.startswith("precision ") for line in part.lines):
        part.settings.pop("precision", None)
    reading.lines += part.lines
    reading.ignored += part.ignored
    reading.left_out += part.left_out
    reading.notes += part.notes
    reading.memory_bounds += part.memory_bounds
    return part.settings


def _file(reading: LaunchFile, source: LaunchSource, flag: str, text: str) -> dict[str, Any]:
    """Keys of a file of JSON or YAML that a flag names, or of JSON that it gives."""
    known(reading, Flag(flag, (text,), None), text)
    if text.startswith("{"):
        data = from_json(text, flag)
    elif (path := shell.beside(os.path.dirname(source.path), text)) is not None:
        content = read_text(path, f"the file of {flag}", shell.MOST_BYTES)
        is_json = content.lstrip().startswith("{")
        data = from_json(content, path) if is_json else from_yaml(content, path)
    elif source.ignore_unknown:
        reading.notes.append(f"{flag} {text} is not read")
        data = {}
    else:
        raise reading.fail(
            f"{flag} {text} is not in the script's repository or folder; put it there, or read the "
            "script without it: --ignore-unknown"
        )
    if not isinstance(data, dict):
        raise reading.fail(f"{flag} {text} has no keys")
    return cast("dict[str, Any]", data)


def _adapters(settings: dict[str, Any], flags: Mapping[str, Flag]) -> None:
    """Adapters of PEFT, which --use_peft turns on."""
    if settings.pop("use_peft", False):
        settings |= {k: v for k, v in _ADAPTERS.items() if k not in settings}
    else:
        for name in _ADAPTERS:
            settings.pop(name, None)
    if "use_bnb_nested_quant" in flags and "quantize_base" in settings:
        nested = "true" in flags["use_bnb_nested_quant"].values
        settings["quantize_base"] = "nf4-double" if nested else "nf4"


def _batch(reading: LaunchFile, steps: int) -> None:
    """The batch of all GPUs, where the file says how many there are."""
    settings = reading.settings
    if "gpus" not in settings:
        reading.notes.append("the file does not say how many GPUs there are: give --gpus")
        accumulate(reading, steps)
        return
    gpus, others = settings["gpus"], settings.get("tp", 1) * settings.get("cp", 1)
    if "dp" in settings or gpus % others:
        return
    settings["dp"] = gpus // others
    accumulate(reading, steps)
    del settings["dp"]
    if "global_batch_size" in settings:
        reading.notes.append(
            f"the batch is {settings['global_batch_size']}, that of the file's {gpus} GPUs; beside "
            "--gpus give --global-batch-size"
        )


TRAINER = Tool("Hugging Face Trainer", _command, _read)
