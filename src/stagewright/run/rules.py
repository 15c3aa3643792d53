"""Checks of a run: errors say what to change where it contradicts itself or its model.

Rows are `rule.Refuse` and `rule.Divide`; what takes more arithmetic than a row holds is a function.
Modes and needs of settings are declared with them, in `sections`. What the model allows:
`model_rules`; lengths: `sequence_rules`; training: `training_rules`; inference: `serving_rules`.
Each check names the settings that it reads: a search checks many runs by their distinct tuples of
these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from stagewright.errors import UserError
from stagewright.model.config import ModelConfig
from stagewright.run import serving_rules, training_rules
from stagewright.run.model_rules import checks_of_model
from stagewright.run.requests import read_bytes
from stagewright.run.rule import ALL, EACH, Divide, Refuse, RunCheck, apply
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import (
    BYTES,
    Setting,
    describe_need,
    describe_value,
)
from stagewright.run.sequence_rules import (
    check_decoder_sequence,
    check_images,
    check_sequence,
)
from stagewright.run.settings import Run


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError that says what to change if the run contradicts itself or the model."""
    model = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    for each in AS_GIVEN:
        each.check(run, model)
    run = run.unresolved()
    for each in checks(run.mode, model):
        each.check(run, model)


# ---- what the declarations of settings say -------------------------------------------------------


def check_modes(run: Run) -> None:
    """Refuse settings of training in inference, and those of inference in training."""
    for setting in SETTINGS.values():
        implied = (setting.default, setting.default_of(run.framework))
        if run.mode in setting.modes or getattr(run, setting.name) in implied:
            continue
        if run.mode == "train":
            raise UserError(
                f"{setting.name} is a setting of inference, got mode=train; "
                "set mode to prefill or decode, or drop it"
            )
        if "train" in setting.modes:
            raise UserError(
                f"{setting.name} is a setting of training, got mode={run.mode}: "
                f"{setting.elsewhere}; drop it"
            )


def check_sizes(run: Run) -> None:
    """Refuse sizes in bytes that cannot be read, or that lack their unit."""
    for setting in SETTINGS.values():
        value = getattr(run, setting.name)
        if setting.unit == BYTES and value is not None:
            read_bytes(value, setting.name)


def _check_needs(setting: Setting, run: Run, model: ModelConfig) -> None:
    """Refuse a setting without those that it needs, unless a framework's habit implies it."""
    value = getattr(run, setting.name)
    if value in (setting.default, setting.default_of(run.framework)):
        return
    for other, values in setting.needs.items():
        got = getattr(run, other)
        if got not in values:
            raise UserError(
                f"{describe_value(setting.name, value)} needs {describe_need(other, values)}, "
                f"got {other}={got}; set it, or drop {setting.name}"
            )


def _without_model(check: Callable[[Run], None]) -> Callable[[Run, ModelConfig], None]:
    return lambda run, model: check(run)


# ---- all of them, in order -----------------------------------------------------------------------


def _all(rows: Iterable[Refuse | Divide]) -> Callable[[Run, ModelConfig], None]:
    return partial(apply, rows)


AS_GIVEN = (
    RunCheck(
        "layers_per_stage adds up to the layers",
        ("pp", "vpp", "layers_per_stage"),
        _all(training_rules.LAYERS_ADD_UP),  # `unresolved` keeps no split that is even
    ),
    RunCheck(
        "pipeline_split allows the split",
        ("pp", "vpp", "layers_per_stage", "pipeline_split"),
        _all(training_rules.PIPELINE_SPLIT),
    ),
)
"""Checks of a run before `unresolved`, which drops what they look at."""

_STAGES = ("pp", "vpp", "schedule", "global_batch_size", "micro_batch_size", "dp")
_SEQUENCE = ("seq_length", "cp", "tp", "sequence_parallel", "cp_comm_type")

_FIRST = (
    RunCheck("the mode has the settings", EACH, _without_model(check_modes)),
    RunCheck("sizes in bytes can be read", EACH, _without_model(check_sizes)),
)

_RANKS = RunCheck(
    "ranks are not too many",
    ("tp", "cp", "dp", "pp", "order"),
    _all(training_rules.RANKS),
)

BATCH_CHECK = RunCheck(
    "micro_batch_size x dp divides the global batch",
    ("global_batch_size", "micro_batch_size", "dp"),
    _all(training_rules.BATCH),
)

_TRAINING = (
    RunCheck(
        "the sequence is split evenly",
        (*_SEQUENCE, "document_length"),
        check_sequence,
    ),
    BATCH_CHECK,
    RunCheck(
        "the schedule takes the stages and microbatches",
        (*_STAGES, "microbatch_group_size_per_vp_stage"),
        training_rules.check_stages,
    ),
    RunCheck(
        "ranks can share the vocabulary",
        ("pp", "schedule", "framework"),
        _all(training_rules.SHARED_VOCABULARY),
    ),
    RunCheck(
        "every stage has layers",
        (
            *("pp", "vpp", "layers_per_stage", "pipeline_split"),
            *("first_stage_less_layers", "last_stage_less_layers"),
        ),
        training_rules.check_layers,
    ),
    RunCheck(
        "dp_shard divides dp, and something is sharded",
        ("dp", "dp_shard", "zero", "reshard_after_forward", "bucket"),
        _all(training_rules.STATE),
    ),
    RunCheck(
        "adapters are split evenly",
        (
            *("tp", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"),
            *("lora_all_to_all", "quantize_base", "precision", "freeze", "trainable"),
        ),
        _all(training_rules.ADAPTERS),
    ),
    *(
        RunCheck(f"{of.name} has what it needs", (of.name, *of.needs), partial(_check_needs, of))
        for of in SETTINGS.values()
        if of.needs
    ),
    RunCheck(
        "recomputation and offload exclude nothing",
        (
            *("precision", "params_dtype", "recompute_num_layers", "recompute_modules"),
            *("recompute_save", "recompute_save_on_host", "optimizer_cpu_offload", "tp"),
            *("sequence_parallel_grads", "sequence_parallel", "zero"),
        ),
        _all(training_rules.RECOMPUTE_AND_OFFLOAD),
    ),
    RunCheck(
        "the program is not too large",
        ("global_batch_size", "micro_batch_size", "dp", "pp", "schedule"),
        training_rules.check_passes,
    ),
    RunCheck(
        "no kernel is too large",
        ("micro_batch_size", "seq_length", "tp", "cp"),
        training_rules.check_kernels,
    ),
)


def _check_serving_stages(run: Run, model: ModelConfig) -> None:
    training_rules.check_layers(run, model)
    serving_rules.check(run.resolved(model), model)


def checks(mode: str, model: ModelConfig) -> tuple[RunCheck, ...]:
    """All that is checked of a run of a mode, in order; the model has the run's overrides.

    Each check is of a run as `Run.unresolved` makes it.
    """
    found = list(_FIRST)
    if mode != "train":
        found.append(RunCheck("the model is served", (), _all(serving_rules.MODELS)))
    found.append(_RANKS)
    if model.tower:
        found += checks_of_model(model.tower, "the vision model's ")
        found.append(RunCheck("the sequence holds an image", _SEQUENCE, check_images))
    found.append(
        RunCheck(
            "the decoder's sequence is split evenly",
            (*_SEQUENCE, "decoder_seq_length"),
            check_decoder_sequence,
        )
    )
    found += checks_of_model(model)
    if mode != "train":
        return (*found, RunCheck("the step can be served", ALL, _check_serving_stages))
    return (*found, *_TRAINING)
