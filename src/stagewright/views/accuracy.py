"""Errors to expect of an answer, from published measurements: `data/accuracy.csv`.

The file has a line for each kind of answer, and for each group of its rows: step times by
accelerator and precision, times of servers by engine, accelerator, family and precision.
`benchmarks/accuracy.py` writes it, and the pages of docs/accuracy, from the same rows. Texts, JSON
and pages show the errors of the group that an answer belongs to; if it has no rows, they say so,
and show those of the next larger group.

>>> nearest("serve-tpot", "time per output token", ("vllm", "mi300x", "gpt-oss", "mxfp4")).group
('vllm',)
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.lower.weight_storage import weight_formats
from stagewright.model.config import ModelConfig
from stagewright.model.presets import family
from stagewright.numbers import plural
from stagewright.run.settings import Run
from stagewright.serving.deployment import InstanceGroup
from stagewright.time.simulate.step import SimulatedStep

PAGE = "docs/reference/errors/by-group.md"
"""The page that lists all groups with their rows."""
LOW_MFU = 0.1
"""MFU below which measured steps are a kind of their own (docs/accuracy/training.md)."""
FEW_SOURCES = 2
"""Limit of sources that a sentence names."""


class ExpectedError(NamedTuple):
    """Errors of published rows, as shares."""

    rows: int
    error: float
    """Mean absolute error."""
    median: float
    """Median absolute error."""
    p90: float
    """Absolute error that nine tenths of the rows stay below."""
    bias: float
    """Mean signed error: negative is predicted too fast, or too small."""
    least: float
    most: float
    sources: tuple[str, ...] = ()
    """Names of the sources of the rows."""

    @property
    def fast(self) -> float:
        """Mean error where predictions are too fast."""
        return -self.bias

    @property
    def fastest(self) -> float:
        """Error of the prediction that is most too fast."""
        return -self.least


class GroupError(NamedTuple):
    """The errors to expect of one figure, which belongs to a group of rows."""

    quantity: str
    """What is predicted, in words."""
    asked: tuple[str, ...]
    """Group that the figure belongs to, such as engine, accelerator, family and precision."""
    group: tuple[str, ...]
    """Group that has rows: a beginning of `asked`."""
    errors: ExpectedError

    @property
    def sentence(self) -> str:
        """The errors in words, and the page that lists them."""
        e = self.errors
        few = " and ".join(e.sources) if len(e.sources) <= FEW_SOURCES else ""
        sources = few or plural(len(e.sources), "source", "sources")
        low, high = ("low", "high") if "per second" in self.quantity else ("fast", "slow")
        bias = f", {abs(e.bias):.1%} {low if e.bias < 0 else high}" if round(e.bias, 3) else ""
        begin = f"{', '.join((self.quantity, *self.asked))}:"
        if self.group != self.asked:
            begin += f" no rows; {', '.join(self.group) or 'all others'}:"
        return (
            f"{begin} off by {e.error:.1%} on average{bias}, p90 {e.p90:.1%} "
            f"({plural(e.rows, 'row', 'rows')} of {sources}; {PAGE})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The element of `accuracy` in JSON."""
        e = self.errors._asdict() | {"sources": list(self.errors.sources)}
        return {
            "quantity": self.quantity,
            "asked": list(self.asked),
            "group": list(self.group),
            "exact": self.group == self.asked,
            **e,
            "page": PAGE,
        }


@cache
def table() -> Mapping[tuple[str, str], ExpectedError]:
    """All lines of the file by answer and group; the group of all rows is empty."""
    text = (files("stagewright") / "data" / "accuracy.csv").read_text(encoding="utf-8")
    return {
        (cells.pop("answer"), cells.pop("group")): _errors(cells)
        for cells in csv.DictReader(text.splitlines())
    }


def _errors(cells: dict[str, str]) -> ExpectedError:
    rows, sources = int(cells.pop("rows")), cells.pop("sources")
    return ExpectedError(
        rows, *map(float, cells.values()), sources=tuple(filter(None, sources.split("; ")))
    )


@cache
def expected() -> Mapping[str, ExpectedError]:
    """Expected errors by kind of answer, of all rows."""
    return {answer: errors for (answer, group), errors in table().items() if not group}


def nearest(answer: str, quantity: str, asked: tuple[str, ...]) -> GroupError:
    """The errors of the group `asked`, or of the longest beginning of it that has rows."""
    beginnings = (asked[:length] for length in range(len(asked), -1, -1))
    group = next(group for group in beginnings if (answer, ", ".join(group)) in table())
    return GroupError(quantity, asked, group, table()[answer, ", ".join(group)])


# ---- groups --------------------------------------------------------------------------------------


def trained(run: Run, hardware: str) -> tuple[str, str]:
    """Group of a training step among those of its kind: accelerator and precision."""
    return hardware, "mxfp8" if run.fp8_recipe == "mxfp8" else run.precision


def inferred(run: Run, model: ModelConfig, hardware: str) -> tuple[str, str, str]:
    """Group of a step of inference: accelerator, family of the model, and stored precision."""
    run = run.model_copy(update={"mode": "decode"})  # weights in training are another matter
    return hardware, family(model.name), weight_formats(run, model)[0]


_TRAINED = {
    "train-dense": "step time of dense models",
    "train-moe": "step time of mixtures of experts",
    "train-lora": "step time of LoRA",
}
"""Kinds of training steps in words; `kind` chooses."""


def kind(run: Run, model: ModelConfig) -> str:
    """Kind of a training step, a key of `expected`."""
    if run.lora_rank is not None:
        return "train-lora"
    return "train-moe" if model.num_experts else "train-dense"


def error_of_step(step: SimulatedStep) -> GroupError:
    """The errors to expect of the time of a simulated step."""
    run, model, hardware = step.compiled.run, step.compiled.model, step.machine.hardware.name
    if run.mode == "train":
        if step.mfu < LOW_MFU:
            return nearest("train-low", f"step time below {LOW_MFU:.0%} MFU", ())
        answer = kind(run, model)
        return nearest(answer, _TRAINED[answer], trained(run, hardware))
    group = inferred(run, model, hardware)
    if run.mode == "decode":
        return nearest("decode", "time per output token of a server", group)
    return nearest("first-token", "time to the first token of a server with few users", group)


def decoding(groups: Sequence[InstanceGroup]) -> InstanceGroup:
    """The first group of instances that decodes."""
    return next(group for group in groups if group.role != "prefill")


def errors_of_serving(groups: Sequence[InstanceGroup]) -> list[GroupError]:
    """The errors to expect of requests over time, by the first group that decodes."""
    group = decoding(groups)
    instance = group.instance
    hardware = instance.machine.hardware.name
    asked = (group.scheduler_name, *inferred(instance.run, instance.model, hardware))
    per_token = nearest("serve-tpot", "time per output token", asked)
    if group.drafts is not None:
        drafted = "time per output token with multi-token prediction"
        per_token = nearest("serve-drafts", drafted, asked)
    return [
        per_token,
        nearest("serve-ttft", "time to the first token", asked),
        nearest("serve-rate", "output tokens per second", asked),
    ]
