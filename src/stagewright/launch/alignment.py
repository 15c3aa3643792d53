"""Megatron-Bridge, and training after pretraining: update steps of verl, NeMo-RL and OpenRLHF.

Keys have dots: hydra's `key=value` words, nested YAML, options. Those of Megatron-LM, by whatever
prefix, are rows of `megatron.csv`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import PurePath
from typing import Any, cast

from stagewright.files import from_yaml, read_text
from stagewright.launch import megatron, shell
from stagewright.launch.reading import (
    NO_COMMAND,
    Flag,
    LaunchFile,
    LaunchSource,
    Tool,
    apply,
    data_flags,
    parse,
    program_of,
    started_gpus,
    switched,
)
from stagewright.launch.shell import ShellCommand
from stagewright.launch.tables import canonical, nested, row_of, table

_OF_MEGATRON = ("megatron", "override_optimizer_config")
_OF_BRIDGE = ("model", "ddp", "optimizer", "dist", "comm_overlap")
"""Sections of Megatron-Bridge with fields of Megatron-Core."""


def _rows(flags: Iterable[Flag], tool: str) -> Iterator[Flag]:
    """Flags with rows of the tool, or of Megatron-LM."""
    for flag in flags:
        exact = table(tool).get(canonical(flag.name))
        inner = any(part in flag.name for part in _OF_MEGATRON)
        inner |= tool == "megatron_bridge" and flag.name.partition(".")[0] in _OF_BRIDGE
        last = canonical(flag.name.rpartition(".")[2])
        row = exact or (row_of(table("megatron"), last) if inner else None)
        row = row or row_of(table(tool), canonical(flag.name))
        text = "".join(flag.values)
        if text in ("null", "none", "None"):
            continue
        values = tuple(v.lower() if v in ("True", "False") else v for v in flag.values)
        yield switched(Flag(flag.name, values, row))


def _finish(
    reading: LaunchFile, given: Mapping[str, Flag], names: set[str], *, of_megatron: bool
) -> None:
    """What follows from several keys: defaults, the batch of an update, the model."""
    settings = reading.settings
    if of_megatron:
        settings |= megatron.MEGATRON_DEFAULTS | settings
        megatron.follow(reading, given, names)
    else:
        settings.setdefault("zero", 3)
        settings.setdefault("precision", "bf16")
        if settings.get("cp", 1) > 1:
            settings["cp_comm_type"] = "a2a"
    if settings.get("lora_rank") == 0:
        settings.pop("lora_rank")
        settings.pop("lora_alpha", None)
    model = next((flag for flag in given.values() if flag.row and flag.row.ours == "model.name"),
                 None)  # fmt: skip
    text = "".join(model.values) if model else ""
    reading.name_model(model.name if model else "", text)


def _overrides(words: Sequence[str]) -> Iterator[Flag]:
    """Hydra's `key=value` words; lists in brackets have several values."""
    for word in words:
        key, sign, value = word.lstrip("+").partition("=")
        if sign and word[:1] != "-":
            texts = value.strip("'\"")
            is_list = texts.startswith("[") and texts.endswith("]")
            items = re.split(r"\s*,\s*", texts[1:-1]) if is_list else [texts]
            yield Flag(key, tuple(item.strip("'\"") for item in items), None)


def _more(source: LaunchSource) -> list[Flag]:
    """Flags that the user gives besides the file's."""
    return [Flag(f.name.lstrip("-"), f.values, None) for f in parse(source.more, [{}])]


_UPDATE = "the update step is read; generation and weight transfer are not part"

# ---- verl ----------------------------------------------------------------------------------------


def _read_verl(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "verl")
    given = [*_overrides(command.words), *_more(source)]
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
    return NO_COMMAND if source.format == "yaml" and len(sections) > 1 else None


_GRPO = nested(
    {
        "policy.train_global_batch_size": "512",
        "policy.train_micro_batch_size": "4",
        "policy.max_total_sequence_length": "512",
        "policy.precision": "bfloat16",
        "policy.dtensor_cfg.enabled": "true",
        "policy.megatron_cfg.enabled": "false",
        "policy.megatron_cfg.expert_tensor_parallel_size": "1",
        "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32": "false",
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": "true",
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": "true",
    }
)
"""From examples/configs/grpo_math_1B.yaml (NVIDIA-NeMo/RL 00294d9b), where recipes begin."""


def _merged(
    reading: LaunchFile,
    data: Mapping[str, Any],
    seen: tuple[str, ...],
    done: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Keys over those of the files in `defaults` that are beside the recipe, each read once."""
    given: Any = data.get("defaults", [])
    base: dict[str, Any] = {}
    for name in cast("list[Any]", given if isinstance(given, list) else [given]):
        path = shell.beside(os.path.dirname(reading.path), str(name))
        if path is None or str(PurePath(str(name)).parent) != "." or str(name) in seen:
            is_grpo = PurePath(str(name)).name == "grpo_math_1B.yaml"
            base = _over(base, _GRPO) if is_grpo else base
            what = "those of NeMo-RL count" if is_grpo else "they are not read"
            reading.notes.append(f"defaults {name} are not beside the file: {what}")
            continue
        if str(name) not in done:
            values = from_yaml(read_text(path, "a recipe of NeMo-RL", shell.MOST_BYTES), path)
            inner = cast("dict[str, Any]", values if isinstance(values, dict) else {})
            done[str(name)] = _merged(reading, inner, (*seen, str(name)), done)
        base = _over(base, done[str(name)])
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
    data = _merged(reading, source.data or {}, (), {})
    given = [*data_flags(data, "nemo_rl"), *_more(source)]
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


# ---- Megatron-Bridge -----------------------------------------------------------------------------

_FIELD = re.compile(r"\+*(model\.\w+_parallel_size|train\.\w+_(batch_size|iters)|ddp\.\w+)=")
_RECIPE = re.compile(
    r"(?P<model>\w+?)_(?P<task>pretrain|sft|peft)"
    r"(_(?P<gpus>\d+)gpu_[a-z]+\d+\w*?_(?P<dtype>bf16|fp8cs|fp8mx|fp8sc|nvfp4))?(_\w+)?"
)
_DTYPES: Mapping[str | None, Mapping[str, str]] = {
    "fp8cs": {"precision": "fp8", "fp8_recipe": "tensorwise"},
    "fp8mx": {"precision": "fp8", "fp8_recipe": "mxfp8"},
    "fp8sc": {"precision": "fp8", "fp8_recipe": "blockwise"},
    "nvfp4": {"precision": "nvfp4"},
}
"""Precisions by the word in a recipe's name."""
_BRIDGE_DEFAULTS = {"seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 32, "tp": 1,
                    "pp": 1, "cp": 1}  # fmt: skip
"""Of `_pretrain_common` (recipes/common.py), from which recipes begin."""


def _bridge_command(source: LaunchSource) -> ShellCommand | None:
    """A command with overrides by section, or the fields of a file of YAML."""
    data = source.data or {}
    fields = {f"{of}.{key}" for of in ("model", "train") if isinstance(data.get(of), dict)
              for key in data[of]}  # fmt: skip
    sizes = ("batch_size", "parallel_size", "train_iters")
    if source.format == "yaml" and any(name.endswith(sizes) for name in fields):
        return NO_COMMAND
    named = source.first_with("run_recipe.py", "setup_experiment.py")
    return named or source.first(lambda command: any(map(_FIELD.match, command.words)))


def _read_bridge(source: LaunchSource, command: ShellCommand) -> LaunchFile:
    reading = LaunchFile(source.path, "Megatron-Bridge")
    rows, settings = table("megatron_bridge"), reading.settings
    before, _, words = program_of(command)
    options = [f._replace(name=f.name.lstrip("-")) for f in parse(words, [rows]) if f.name]
    fields = [*data_flags(source.data or {}, "megatron_bridge"), *_overrides(words)]
    flags = [*_rows([*options, *fields, *_more(source)], "megatron_bridge")]
    of_model = dict(apply(reading, flags, ignore_unknown=source.ignore_unknown))
    names = {"".join(of_model[flag].values) for flag in ("model", "recipe") if flag in of_model}
    sizes = [flag.name for flag in of_model.values() if flag.row and flag.row.ours != "model.name"]
    if sizes and not source.ignore_unknown:
        raise reading.fail(
            f"{', '.join(sizes)} change sizes of the recipe's model; name a config.json: MODEL "
            f"--config {source.path}, with --ignore-unknown"
        )
    recipe = next((match for name in names if (match := _RECIPE.fullmatch(name))), None)
    settings |= {**_DTYPES.get(recipe and recipe["dtype"], {}), **settings}
    started = started_gpus(reading, source, before)
    if "gpus" not in settings and "nodes" not in started and recipe and recipe["gpus"]:
        settings["gpus"] = int(recipe["gpus"])
        reading.notes.append(f"{recipe['gpus']} GPUs, after the recipe's name")
    nodes, per_node = settings.pop("nodes", 1), settings.pop("gpus_per_node", 0)
    settings |= {"gpus": nodes * per_node} if per_node else {}
    absent = [name for name in _BRIDGE_DEFAULTS if name not in settings]
    settings |= {name: _BRIDGE_DEFAULTS[name] for name in absent}
    if absent:
        values = ", ".join(f"{name} {settings[name]}" for name in absent)
        note = f"the recipe's own values are in Python and not read; taken as {values}"
        reading.notes.append(note)
    adapters = settings.pop("peft", False) or (recipe and recipe["task"] == "peft")
    if adapters and "lora_rank" not in settings:
        reading.needs["lora_rank"] = "the recipe trains adapters; give --lora-rank"
    if settings.pop("overlap_grads", True):
        settings["no_overlap-"] = ["dp"]
    settings.setdefault("overlap_param_gather", True)
    if not settings.pop("pad_vocab", False):
        settings.setdefault("make_vocab_size_divisible_by", 1)
    named = {"model": Flag("recipe", (_hub_name(recipe["model"] if recipe else "".join(names)),),
                           rows["recipe"])} if names else {}  # fmt: skip
    _finish(reading, named, {f.row.flag for f in flags if f.row}, of_megatron=True)
    return reading


def _hub_name(recipe: str) -> str:
    """A recipe's model as names of checkpoints are spelled.

    >>> _hub_name("llama31_8b"), _hub_name("qwen3_30b_a3b"), _hub_name("llama3_8b_config")
    ('llama3.1-8b', 'qwen3-30b-a3b', 'llama3-8b')
    """
    name = recipe.removesuffix("_config").replace("_", "-")
    return re.sub(r"^(llama|qwen)(\d)(\d)(?=-)", r"\1\2.\3", name)


BRIDGE = Tool("Megatron-Bridge", _bridge_command, _read_bridge, ("train:", "model:"))
VERL = Tool("verl", methodcaller("first_with", "verl.trainer.main_ppo"), _read_verl)
NEMO_RL = Tool("NeMo-RL", _nemo_claim, _read_nemo, ("policy:", "cluster:"))
OPENRLHF = Tool("OpenRLHF", methodcaller("first_with", "openrlhf.cli.train_"), _read_openrlhf)
