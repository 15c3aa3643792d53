"""Settings that are given and have no effect: notes, not errors, since a sweep may set them.

A setting declares with it where it does nothing (`Setting.idle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.model.config import ModelConfig
from stagewright.run import lengths, requests
from stagewright.run.experiment import Experiment
from stagewright.run.expert_load import times_mean
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import DEGREES, setting_in_words
from stagewright.run.settings import Run


def notes(experiment: Experiment) -> list[str]:
    """A sentence for each setting that is not its default and has no effect in this experiment.

    >>> notes(Experiment.of({"model": "gpt2", "zero": 3}))
    ['zero=3 does nothing with dp=1 and cp=1']
    """
    run = experiment.run
    of_one_rank = run.ep == 1 and run.expert_load and (times_mean(run.expert_load) or 1) != 1
    load = [f"expert_load={run.expert_load} does nothing with ep=1"] if of_one_rank else []
    return [*_idle(experiment), *_axes(experiment), *load]


def beyond_positions(run: Run, model: ModelConfig) -> list[str]:
    """Note that sequences of a resolved run are longer than the model's positions.

    Nothing where no layer knows positions. A config.json that says nothing of positions has its
    own note.
    """
    longest = run.seq_length or 0
    if run.mode != "train":
        longest = max((lengths.length(group) for group in requests.groups(run)), default=0)
    most = model.max_position_embeddings
    if model.vision or model.position in ("none", "alibi", "relative") or longest <= most:
        return []
    return [
        f"sequences of {longest:,} tokens are longer than the {most:,} positions of {model.name} "
        "(max_position_embeddings)"
    ]


def absent_modules(run: Run, model: ModelConfig) -> list[str]:
    """Notes on modules that are to be recomputed and that no layer has."""
    if run.mode != "train" or run.recompute != "selective":
        return []
    has = {
        "mlp": "dense" in model.parts,
        "moe": model.num_experts,
        "moe_act": model.num_experts,
        "shared_experts": model.shared_ffn_hidden_size,
    }
    absent = [name for name in run.recompute_modules if not has.get(name, True)]
    return [
        f"recompute_modules={name} does nothing: {model.name} has no such module" for name in absent
    ]


def _idle(experiment: Experiment) -> Iterator[str]:
    run = experiment.run
    values = experiment.values()
    for setting in EXPERIMENT.values():
        value = values[setting.name]
        if value in (setting.default, setting.default_of(run.framework)):
            continue
        why = next(
            (case for case in setting.idle if all(values[n] == x for n, x in case.items())), None
        )
        if why is not None and run.mode in setting.modes:
            yield f"{setting_in_words(setting.name, value)} does nothing with {_case(why)}"


def _axes(experiment: Experiment) -> Iterator[str]:
    for axis in sorted(experiment.execution.no_overlap, key=DEGREES.index):
        if getattr(experiment.run, axis) == 1:
            yield f"no_overlap={axis} does nothing with {axis}=1"


def _case(case: Mapping[str, Any]) -> str:
    return " and ".join(setting_in_words(name, value) for name, value in case.items())
