"""Names of Megatron-LM, vLLM and torchtitan in our terms, for options, run files and keywords.

Names that mean the same as a setting (`Setting.names`), and switches that stand for one of its
values (`Setting.switches`), come from the tables in `data/launch` (`launch.names.other_names`).
`launch.names.OTHERS` are the options that say a setting in other terms.

>>> translate({"tensor_model_parallel_size": 8, "use_distributed_optimizer": True})[0]
{'tp': 8, 'zero': 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.errors import UserError, did_you_mean, either
from stagewright.launch.names import (
    OFFLOADED_POLICIES,
    OTHERS,
    REMAT_POLICIES,
    OtherName,
    Without,
    canonical,
)
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import Setting, text_of

SPELLINGS: Mapping[str, OtherName] = {
    canonical(name): of for of in OTHERS.values() for name in (of.name, *of.names)
}
"""Options of other tools by each of their spellings."""

SWITCHES: Mapping[str, tuple[Setting, Any]] = {
    canonical(name): (of, value)
    for of in EXPERIMENT.values()
    for name, value in of.switches.items()
}
"""Options without a value that stand for one value of a setting, by name."""

SAME: Mapping[str, str] = {
    canonical(name): of.name for of in EXPERIMENT.values() for name in of.names
}
"""Settings by the names that mean the same."""


_LATER = (
    *("enable_expert_parallel", "num_distributed_optimizer_instances"),
    *(name for name, of in OTHERS.items() if {*of.makes} & {"vpp", "layers_per_stage"}),
)
"""Options from which settings follow once dp, or the model's layers, are known."""
_SHARD_DEGREE = "parallelism_data_parallel_shard_degree"


@dataclass(frozen=True, slots=True)
class Pending:
    """What follows once all of a run is known."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of other tools, by name."""
    fills: bool = False
    """dp is all ranks that are left of the nodes."""

    def without(self, names: Mapping[str, Any]) -> Pending:
        """The options that say nothing of the settings in `names`, which take precedence."""
        kept = {
            option: value
            for option, value in self.options.items()
            if not {*OTHERS[option].makes} & names.keys()
            or (option == "enable_expert_parallel" and "ep" not in names)
        }
        return Pending(kept, self.fills)

    def makes(self) -> set[str]:
        """The settings that will follow."""
        return {setting for option in self.options for setting in OTHERS[option].makes}


def is_setting_name(name: str) -> bool:
    """True if a name belongs to a setting of any tool."""
    return name in EXPERIMENT or name in SAME or name in SWITCHES or name in SPELLINGS


def setting_of(name: str) -> str:
    """The setting that a name of some tool stands for alone; other names stay as they are.

    >>> setting_of("overlap_grad_reduce"), setting_of("micro-batch-size")
    ('no_overlap', 'micro_batch_size')
    """
    name = canonical(name)
    return SWITCHES[name][0].name if name in SWITCHES else SAME.get(name, name)


def translate(values: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], Pending]:
    """Settings by our names, and what follows when all of the run is known.

    Names that no tool has stay as they are. `where` begins errors: a file and a colon.
    """
    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    switches: list[str] = []
    off: list[str] = []
    for given, value in values.items():
        name = canonical(given)
        if name in SWITCHES:
            if _switched(given, value, where):
                switches.append(name)
            elif value is False:
                off.append(name)
        elif name in SPELLINGS:
            other = SPELLINGS[name]
            if other.name in others:
                raise UserError(f"{where}{other.flag} comes twice; keep one")
            others[other.name] = _checked(other, value, where)
        else:
            setting = SAME.get(name, name if name in EXPERIMENT else given)
            if setting in settings:
                raise UserError(f"{where}{setting} comes twice; keep one")
            settings[setting] = _value_of(setting, value, where)
    _zero(settings, others, switches, where)
    _switch(settings, switches, where)
    _switch_off(settings, off)
    _recompute(settings, others, where)
    _remat_policy(settings, others.get("remat_policy"), where)
    _data_parallel(settings, others, where)
    _input_length(settings, others, where)
    later = {name: others[name] for name in _LATER if others.get(name) not in (None, False)}
    return settings, Pending(later, others.get(_SHARD_DEGREE) == -1)


def _value_of(name: str, value: Any, where: str) -> Any:
    """Value of a setting; a word of another tool is translated, or refused with what to use."""
    setting = EXPERIMENT.get(name)
    if setting is None or not isinstance(value, str):
        return value
    if use := setting.words.get(value):
        assert isinstance(setting.kind, tuple)
        raise UserError(f"{where}{name} is {value!r}, wanted {either(setting.kind)}; use {use}")
    return setting.same_words.get(value, value)


def _switched(name: str, value: object, where: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}{name} is {value!r}, wanted true or false")
    return bool(value)


def _checked(of: OtherName, value: Any, where: str) -> Any:
    if isinstance(of.kind, tuple):
        if value not in of.kind:
            hint = did_you_mean(str(value), of.kind)
            raise UserError(f"{where}{of.flag} is {value!r}, wanted {either(of.kind)}{hint}")
    elif not (isinstance(value, of.kind) and (of.kind is bool or not isinstance(value, bool))):
        wanted = {bool: "true or false", str: "text"}.get(of.kind, "a whole number")
        raise UserError(f"{where}{of.flag} is {value!r}, wanted {wanted}")
    return value


def _switch(settings: dict[str, Any], switches: list[str], where: str) -> None:
    """Set what switches stand for, unless the setting says something else."""
    stands: dict[str, tuple[str, Any]] = {}
    for name in switches:
        setting, value = SWITCHES[name]
        if isinstance(value, Without):
            if value.item in settings.get(setting.name, ()):
                _contradict(name, f"{setting.flag} without {value.item}", setting, settings, where)
            continue
        before = stands.get(setting.name)
        if before is not None and before[1] != value:
            raise UserError(
                f"{where}{_flag(name)} means {setting.flag} {text_of(value)}, {_flag(before[0])} "
                f"{setting.flag} {text_of(before[1])}; drop either"
            )
        stands[setting.name] = name, value
        if settings.get(setting.name, value) != value:
            _contradict(name, f"{setting.flag} {text_of(value)}", setting, settings, where)
    settings |= {setting: value for setting, (_, value) in stands.items()}


def _switch_off(settings: dict[str, Any], switches: list[str]) -> None:
    """Add to a set the item that a switch says it lacks: `overlap_grad_reduce: false`."""
    for name in switches:
        setting, value = SWITCHES[name]
        if isinstance(value, Without):
            items = settings.get(setting.name, ())
            given = items.split(",") if isinstance(items, str) else items
            settings[setting.name] = sorted({*given, value.item})


def _contradict(
    name: str, means: str, setting: Setting, settings: Mapping[str, Any], where: str
) -> None:
    got = text_of(settings[setting.name])
    raise UserError(f"{where}{_flag(name)} means {means}, got {setting.flag} {got}; drop either")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _zero(
    settings: dict[str, Any], others: Mapping[str, Any], switches: list[str], where: str
) -> None:
    """Megatron-LM's options of data parallelism: the one that shards most says how far.

    Its FSDP shards by `--data-parallel-sharding-strategy`; `--use-distributed-optimizer` is part of
    that command line, too. Here FSDP without a strategy shards parameters.
    """
    strategy = others.get("data_parallel_sharding_strategy")
    stages = {name: SWITCHES[name][1] for name in switches if SWITCHES[name][0].name == "zero"}
    if strategy is not None:
        stages = {name: stage for name, stage in stages.items() if stage == 1}
        name = "data_parallel_sharding_strategy"
        words = OTHERS[name].kind
        assert isinstance(words, tuple)
        stages[f"{name} {strategy}"] = words.index(strategy)
    if not stages:
        return
    most = max(stages, key=lambda name: stages[name])
    if settings.setdefault("zero", stages[most]) != stages[most]:
        _contradict(most, f"--zero {stages[most]}", EXPERIMENT["zero"], settings, where)
    switches[:] = [name for name in switches if SWITCHES[name][0].name != "zero"]


def _recompute(settings: dict[str, Any], others: Mapping[str, Any], where: str) -> None:
    """Megatron-LM's uniform method computes chunks of layers again, of which here each is one."""
    if others.get("recompute_method") != "uniform":
        return
    if settings.pop("recompute_num_layers", 1) != 1:
        raise UserError(
            f"{where}--recompute-method uniform keeps the input of each chunk of "
            "--recompute-num-layers layers, which is modelled for chunks of 1; use 1, or block"
        )


def _remat_policy(settings: dict[str, Any], policy: str | None, where: str) -> None:
    """MaxText's policy as what is computed again, what is kept all the same, and where."""
    if policy is None:
        return
    save = REMAT_POLICIES[policy]
    implied: dict[str, Any] = {"recompute": "none" if save is None else "full"}
    if save is not None:  # XLA drops what no gradient reads
        implied |= {"recompute_save": save} if save else {"recompute_early_stop": True}
    implied |= {"recompute_save_on_host": True} if policy in OFFLOADED_POLICIES else {}
    for name, value in implied.items():
        given = settings.setdefault(name, value)
        if given != value:
            raise UserError(
                f"{where}--remat-policy {policy} means {EXPERIMENT[name].flag} {text_of(value)}, "
                f"got {text_of(given)}; drop either"
            )


def _data_parallel(settings: dict[str, Any], others: Mapping[str, Any], where: str) -> None:
    """torchtitan's two degrees of data parallelism as dp, dp_shard and zero."""
    shard = others.get(_SHARD_DEGREE)
    copies = others.get("parallelism_data_parallel_replicate_degree")
    if shard is None and copies is None:
        return
    if shard == -1 and (copies or 1) > 1:
        raise UserError(
            f"{where}--parallelism.data_parallel_shard_degree is -1, all ranks that are left, but "
            "with copies these are not known; give it as a number"
        )
    shard = 1 if shard is None else shard
    implied = {} if shard == -1 else {"dp": shard * (copies or 1)}
    if shard != 1:
        implied |= {"zero": 3} | ({"dp_shard": shard} if (copies or 1) > 1 else {})
    for name, value in implied.items():
        if settings.setdefault(name, value) != value:
            raise UserError(
                f"{where}the degrees of data parallelism of torchtitan make {name}={value}, got "
                f"{name}={settings[name]}; drop either"
            )


def _input_length(settings: dict[str, Any], others: Mapping[str, Any], where: str) -> None:
    """The length of prompts as the new tokens of prefill, or as the mean context of decode."""
    isl = others.get("isl")
    if isl is None:
        return
    mode = settings.get("mode")
    if mode not in ("prefill", "decode"):
        raise UserError(f"{where}--isl is for --mode prefill or decode; give the mode beside it")
    name, value = "prompt_length", isl
    if mode == "decode":
        # Ranks of prefill compute the whole context: decode is then at its first token.
        got = 0 if settings.get("prefill") else int(settings.get("output_length") or 0)
        name, value = "context_length", isl + got // 2
    if settings.setdefault(name, value) != value:
        flag = EXPERIMENT[name].flag
        raise UserError(
            f"{where}--isl {isl} means {flag} {value}, got {flag} {settings[name]}; drop either"
        )
