"""What is said to do nothing does nothing, and what does something is not said to."""

from typing import Any

import numpy as np
import pytest

import stagewright as sw
from stagewright.run.experiment import Experiment
from stagewright.run.notes import absent_modules, notes
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.settings import Run

MODEL: dict[str, Any] = {"model": "mixtral-8x7b", "layers": 2, "seq_length": 256, "vocab": 512}
BASE: dict[str, Any] = {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "zero": 3, "sequence_parallel": True}
IDLE = [(of, case) for of in EXPERIMENT.values() for case in of.idle]


def changed(name: str) -> Any:
    """A value of a setting that is not its default."""
    of = EXPERIMENT[name]
    if of.kind is bool:
        return not of.default
    if isinstance(of.kind, tuple):
        return next(word for word in of.kind if word != of.default)
    return of.default + 1


def outcome(settings: dict[str, Any]) -> list[Any]:
    others = {name: value for name, value in settings.items() if name != "model"}
    found = sw.simulate(settings["model"], "h100-sxm", **others)
    columns = [
        np.sort(getattr(of.tasks, name))
        for of in found.compiled.program.classes
        for name in ("flops", "traffic", "comm_bytes", "kind")
    ]
    return [found.seconds, [of.memory for of in found.compiled.program.classes], *columns]


@pytest.mark.numerics
@pytest.mark.parametrize(("of", "case"), IDLE, ids=lambda x: getattr(x, "name", str(x)))
def test_what_does_nothing_changes_nothing(of: Any, case: dict[str, Any]):
    needs = {other: values[0] for other, values in of.needs.items()}
    base = {**MODEL, **BASE, **needs, **case}
    if case.get("dp") == 1:
        base["ep"] = 1  # of two ranks of tp
    base.pop(of.name, None)
    asked = {**base, of.name: changed(of.name)}
    assert any(of.name in text for text in notes(Experiment.of(asked)))
    for mine, others in zip(outcome(asked), outcome(base), strict=True):
        np.testing.assert_array_equal(mine, others)


def test_settings_that_act_are_not_noted():
    acting = MODEL | BASE | {"no_overlap": ["dp"], "prefetch": 2}
    assert notes(Experiment.of(acting)) == []


def test_axes_of_one_rank_have_nothing_to_overlap():
    said = notes(Experiment.of({"model": "gpt2", "tp": 2, "no_overlap": ["tp", "ep", "cp"]}))
    assert said == ["no_overlap=cp does nothing with cp=1", "no_overlap=ep does nothing with ep=1"]


def test_habits_of_a_framework_are_not_noted():
    assert notes(Experiment.of({"model": "gpt2", "framework": "torchtitan"})) == []
    assert {*SETTINGS} <= {*Experiment.of({"model": "gpt2"}).values()} | {"model"}
    assert Run(model="gpt2", sequence_parallel=True).sequence_parallel_ranks == 1


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        ("llama3-8b", ["moe", "moe_act", "shared_experts"]),
        ("qwen3-30b-a3b", ["mlp", "shared_experts"]),
        ("deepseek-v2-lite", []),
    ],
)
def test_modules_that_no_layer_has_are_noted(model: str, absent: list[str]):
    modules = ["core_attn", "mlp", "moe", "moe_act", "shared_experts"]
    compiled = sw.compile(model, recompute="selective", recompute_modules=modules)
    said = absent_modules(compiled.run, compiled.model)
    assert [text.split()[0].split("=")[1] for text in said] == absent
