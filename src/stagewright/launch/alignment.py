"""Training after pretraining: the update step of verl, NeMo-RL and OpenRLHF.

Keys have dots: hydra's `key=value` words, nested YAML, options. Those of Megatron-LM, by whatever
prefix, are rows of `megatron.csv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from stagewright.files import from_yaml, read_text
from stagewright.launch import megatron, shell
from stagewright.launch.reading import (
    Flag,
    LaunchFile,
    LaunchSource,
    Line,
    Tool,
    apply,
    data_flags,
    parse,
)
from stagewright.launch.shell import ShellCommand, shown
from stagewright.launch.tables import canonical, row_of, table

_OF_MEGATRON = ("megatron", "override_optimizer_config")


def _rows(flags: Iterable[Flag], tool: str) -> Iterator[Flag]:
    """Flags with rows of the tool, or of Megatron-LM; switches that are off say nothing."""
    for flag in flags:
        exact = table(tool).get(canonical(flag.name))
        inner = any(part in flag.name for part in _OF_MEGATRON)
        last = canonical(flag.name.rpartition(".")[2])
        row = exact or (row_of(table("megatron"), last) if inner else None)
        row = row or row_of(table(tool), canonical(flag.name))
        text = "".join(flag.values)
        if text in ("null", "none", "None"):
            continue
        if row and row.values == "0" and text.lower() in ("true", "false"):
            if text.lower() == "true":
                yield Flag(flag.name, (), row)
            continue
        values = tuple(v.lower() if v in ("True", "False") else v for v in flag.values)
        yield Flag(flag.name, values, row)


def _finish(
    reading: LaunchFile, given: Mapping[str, Flag], names: set[str], *, of_megatron: bool
) -> None:
    """What follows from several keys: defaults, the batch of an update, the model."""
    settings = reading.settings
    if of_megatron:
        defaults = {"precision": "bf16", "zero": 1, "moe_token_dispatcher_type": "alltoall"}
        settings |= defaults | settings
        megatron.follow(reading, given, names)
    else:
        settings |= {"zero": settings.get("zero", 3)}
        settings.setdefault("precision", "bf16")
        if "clip_grad" in settings:
            settings["clip_grad"] = bool(settings["clip_grad"])
        if settings.get("cp", 1) > 1:
            settings["cp_comm_type"] = "a2a"
    if settings.get("lora_rank") == 0:
        settings.pop("lora_rank")
        settings.pop("lora_alpha", None)
    model = next((flag for flag in given.values() if flag.row and flag.row.ours == "model.name"),
                 None)  # fmt: skip
    text = "".join(model.values) if model else ""
    if preset := megatron.preset_of(text):
        settings["model"] = preset
        reading.lines.append(Line(model.name if model else "", shown(text), f"model {preset}"))
        return
    why = f"the model is {shown(text)[:60]}, which is no preset" if text else "names no model"
    reading.needs["model"] = f"{why}; name one: MODEL --config {reading.path}"


_UPDATE = "the update step is read; generation and weight transfer are not part"

# ---- verl ----------------------------------------------------------------------------------------


def _verl_command(source: LaunchSource) -> ShellCommand | None:
    commands = source.script.commands if source.script else ()
    trains = (c for c in commands if any("verl.trainer.main_ppo" in word for word in c.words))
    return next(trains, None)


def _read_verl(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "verl")
    words = (word.lstrip("+").partition("=") for word in command.words if word[:1] != "-")
    given = [Flag(key, (value.strip("'\""),), None) for key, sign, value in words if sign]
    given += [Flag(f.name.lstrip("-"), f.values, None) for f in parse(source.more, [{}])]
    flags = [*_rows(given, "verl")]
    of_model = apply(reading, flags, ignore_unknown=source.ignore_unknown)
    settings = reading.settings
    strategy = settings.pop("strategy", "")
    config = any("megatron" in word for word in command.words if word.startswith("--config"))
    of_megatron = strategy == "megatron" or config
    if not of_megatron:
        settings.setdefault("recompute", "full")  # enable_gradient_checkpointing
    shard = settings.pop("fsdp_size", -1)
    if (batch := settings.pop("mini_batch_size", None)) is not None:
        settings["global_batch_size"] = batch * settings.get("n_samples_per_prompt", 1)
    _finish(reading, of_model, {f.row.flag for f in flags if f.row}, of_megatron=of_megatron)
    megatron.update(reading)
    if not of_megatron and 1 < shard < settings["gpus"]:
        settings["dp_shard"] = shard
    reading.notes.append(_UPDATE)
    return reading


# ---- NeMo-RL -------------------------------------------------------------------------------------


def _nemo_claim(source: LaunchSource) -> ShellCommand | None:
    data = source.data or {}
    sections = {"defaults", "policy", "cluster", "grpo"} & data.keys()
    return ShellCommand((), 1) if source.format == "yaml" and len(sections) > 1 else None


def _merged(reading: LaunchFile, data: Mapping[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
    """Keys over those of the file in `defaults`, which is read if it is beside the recipe."""
    names = data.get("defaults", ())
    base: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        path = Path(reading.path).parent / PurePath(str(name)).name
        beside = str(PurePath(str(name)).parent) == "." and path.is_file()
        if not beside or str(name) in seen:
            reading.notes.append(f"defaults {name} are not beside the file: they are not read")
            continue
        text = read_text(path, "a recipe of NeMo-RL", shell.MOST_BYTES)
        values = from_yaml(text, path)
        if isinstance(values, dict):
            inner = cast("dict[str, Any]", values)
            base = _over(base, _merged(reading, inner, (*seen, str(name))))
    return _over(base, {key: value for key, value in data.items() if key != "defaults"})


def _over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base}
    for key, value in data.items():
        below = base.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _over(below, value) if both else value  # pyright: ignore
    return merged


def _read_nemo(source: LaunchSource, _: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "NeMo-RL")
    data = _merged(reading, source.data or {}, ())
    given = [*data_flags(data, "nemo_rl")]
    given += [Flag(f.name.lstrip("-"), f.values, None) for f in parse(source.more, [{}])]
    on = {flag.name: "".join(flag.values) for flag in given if flag.name.endswith("_cfg.enabled")}
    of_megatron = on.get("policy.megatron_cfg.enabled", "true") == "true" and (
        on.get("policy.dtensor_cfg.enabled") != "true"
    )
    other = "policy.dtensor_cfg." if of_megatron else "policy.megatron_cfg."
    flags = [*_rows((flag for flag in given if not flag.name.startswith(other)), "nemo_rl")]
    of_model = apply(reading, flags, ignore_unknown=source.ignore_unknown)
    settings = reading.settings
    settings.pop("dtensor", None)
    generating = settings.pop("generation_nodes", 0)
    if not settings.pop("colocated", True):
        settings["nodes"] = max(settings.get("nodes", 1) - generating, 1)
    _finish(reading, of_model, {f.row.flag for f in flags if f.row}, of_megatron=of_megatron)
    samples = settings.get("rollout_batch_size", 0) * settings.get("n_samples_per_prompt", 0)
    megatron.update(reading)
    if "global_batch_size" not in settings and samples:
        settings["global_batch_size"] = samples
        reading.notes.append(f"an update is taken to have all {samples} samples of a step")
    reading.notes.append(_UPDATE)
    return reading


# ---- OpenRLHF ------------------------------------------------------------------------------------


def _openrlhf_command(source: LaunchSource) -> ShellCommand | None:
    commands = source.script.commands if source.script else ()
    trains = (c for c in commands if any("openrlhf.cli.train_" in word for word in c.words))
    return next(trains, None)


def _read_openrlhf(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "OpenRLHF")
    flags = [f for f in parse((*command.words, *source.more), [table("openrlhf")]) if "." in f.name]
    of_model = apply(reading, flags, ignore_unknown=source.ignore_unknown)
    settings = reading.settings
    settings["no_overlap"] = [] if "dp" in settings.pop("no_overlap-", []) else ["dp"]
    _finish(reading, of_model, set(), of_megatron=False)
    if any(word.endswith(("train_dpo", "train_rm")) for word in command.words):
        for name in ("global_batch_size", "micro_batch_size"):
            settings |= {name: 2 * settings[name]} if name in settings else {}
        reading.notes.append("a sample is a pair: batches have two sequences for each")
    reading.notes.append("the file does not say how many GPUs there are: give --gpus or --nodes")
    return reading


VERL = Tool("verl", _verl_command, _read_verl)
NEMO_RL = Tool("NeMo-RL", _nemo_claim, _read_nemo, ("policy:", "cluster:"))
OPENRLHF = Tool("OpenRLHF", _openrlhf_command, _read_openrlhf)
