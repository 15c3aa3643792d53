"""Checks of a run: errors say what to change where it contradicts itself or its model.

Modes and needs of settings are declared with them, in `sections`. What the model allows:
`model_rules`; training: `training_rules`; inference: `serving_rules`. Each rule names the settings
that it reads: a search checks many runs by their distinct tuples of these.
"""

from __future__ import annotations

from functools import partial

from stagewright.model.config import ModelConfig
from stagewright.run.model_rules import decoder_sequence, images, rules_of_model
from stagewright.run.requests import read_bytes
from stagewright.run.rule import EACH, Errors, RunRule, rule
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import BYTES, Setting, describe_need, describe_value
from stagewright.run.serving_rules import served_models, served_steps
from stagewright.run.settings import Run
from stagewright.run.training_rules import AS_GIVEN, TRAINING, ranks


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError that says what to change if the run contradicts itself or the model."""
    model = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    for each in AS_GIVEN:
        each.check(run, model)
    run = run.unresolved()
    for each in rules(run.mode, model):
        each.check(run, model)


def rules(mode: str, model: ModelConfig) -> tuple[RunRule, ...]:
    """All rules of a run of a mode, in order; the model has the run's overrides.

    Each is of a run as `Run.unresolved` makes it.
    """
    tower = (*rules_of_model(model.tower, "the vision model's "), images) if model.tower else ()
    of_model = (*tower, decoder_sequence, *rules_of_model(model))
    if mode == "train":
        return (_modes, _sizes, ranks, *of_model, *_NEEDS, *TRAINING)
    return (_modes, _sizes, served_models, ranks, *of_model, served_steps)


# ---- what the declarations of settings say -------------------------------------------------------


@rule("the mode has the settings", *EACH)
def _modes(run: Run, model: ModelConfig) -> Errors:
    for setting in SETTINGS.values():
        implied = (setting.default, setting.default_of(run.framework))
        if run.mode in setting.modes or getattr(run, setting.name) in implied:
            continue
        if run.mode == "train":
            yield (
                f"{setting.name} is a setting of inference, got mode=train; "
                "set mode to prefill or decode, or drop it"
            )
        elif "train" in setting.modes:
            yield (
                f"{setting.name} is a setting of training, got mode={run.mode}: "
                f"{setting.elsewhere}; drop it"
            )


@rule("sizes in bytes can be read", *EACH)
def _sizes(run: Run, model: ModelConfig) -> Errors:
    for setting in SETTINGS.values():
        value = getattr(run, setting.name)
        if setting.unit == BYTES and value is not None:
            read_bytes(value, setting.name)
    yield from ()


def _needs(setting: Setting, run: Run, model: ModelConfig) -> Errors:
    """A setting has those that it needs, unless a framework's habit implies it."""
    value = getattr(run, setting.name)
    if value in (setting.default, setting.default_of(run.framework)):
        return
    for other, values in setting.needs.items():
        got = getattr(run, other)
        if got not in values:
            yield (
                f"{describe_value(setting.name, value)} needs {describe_need(other, values)}, "
                f"got {other}={got}; set it, or drop {setting.name}"
            )


_NEEDS = tuple(
    RunRule(f"{of.name} has what it needs", (of.name, *of.needs), partial(_needs, of))
    for of in SETTINGS.values()
    if of.needs
)
