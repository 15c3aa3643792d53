"""How measured servers were started and their clients sent requests: `data/measured/servers.yaml`.

Each entry has the place that says so. An entry is of all rows of a source that were measured alike,
never of a single one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.evidence.inference import ServedRow
from stagewright.files import own_yaml

REQUESTS_PER_USER = 10
"""InferenceX's `--num-prompts` over `--max-concurrency` (SemiAnalysisAI/InferenceX,
`benchmarks/benchmark_lib.sh`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Which rows an entry is of; what is empty fits all."""

    source: str = ""
    engine: str = ""
    models: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    equal: bool | None = None
    """Whether all requests are equally long."""
    tokens: tuple[int, ...] = ()
    """Of a prompt and of an output, of the longest request."""
    below_tp: float = float("inf")
    below_users: float = float("inf")
    before: str = "9"
    """A day; rows whose names end with none fit."""

    def __call__(self, row: ServedRow) -> bool:
        """Whether a row is one of them."""
        day = re.search(r"\d{4}-\d\d-\d\d$", row.row)
        return (
            self.source in row.source
            and self.engine in ("", row.engine)
            and (not self.models or str(row.settings["model"]) in self.models)
            and (not self.hardware or row.hardware in self.hardware)
            and self.equal in (None, row.shortest == 1)
            and self.tokens in ((), (row.isl + row.cached, row.osl))
            and int(row.settings.get("tp", 1)) < self.below_tp
            and (row.concurrency or 0) < self.below_users
            and (day is None or day.group() < self.before)
        )


class Client(NamedTuple):
    """How a row was measured."""

    requests_per_user: int
    settings: Mapping[str, Any]
    """Of the run, beside the row's."""
    options: Mapping[str, Any]
    """Of the engine."""
    first_step: float = 0.0
    """Seconds that the server takes longer for its first step, since no requests came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """An entry of the file."""

    fits: Fits
    cited: str
    requests_per_user: int = REQUESTS_PER_USER
    max_tokens: int | None = None
    """`max_num_batched_tokens` beyond a prompt and the users' tokens."""
    least: int = 0
    """Its least value."""
    prefill_tokens: int | None = None
    """`max_prefill_tokens` beyond a prompt."""
    first_step: float = 0.0
    """As of `Client`."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def client(self, row: ServedRow) -> Client:
        """How a row of this entry was measured."""
        options = dict(self.options)
        if self.max_tokens is not None:
            tokens = row.isl + round(row.concurrency or 0) + self.max_tokens
            options["max_num_batched_tokens"] = max(self.least, tokens)
        if self.prefill_tokens is not None:
            options["max_prefill_tokens"] = row.isl + self.prefill_tokens
        return Client(self.requests_per_user, self.settings, options, self.first_step)


@cache
def entries() -> tuple[MeasuredServer, ...]:
    """All entries, in the order in which they count."""
    text = (files("stagewright") / "data" / "measured" / "servers.yaml").read_text("utf-8")
    of: Any = own_yaml(text)
    return tuple(_entry(dict(entry)) for entry in of)


def _entry(values: dict[str, Any]) -> MeasuredServer:
    values["fits"] = _fits(values["fits"])
    return MeasuredServer(**values)


def _fits(of: Mapping[str, Any]) -> Fits:
    values: dict[str, Any] = dict(of)
    for name in ("models", "hardware", "tokens"):
        values[name] = tuple(of.get(name, ()))
    return Fits(**values)


def client_of(row: ServedRow) -> Client:
    """How a row was measured, as far as a source says."""
    found = next((entry for entry in entries() if entry.fits(row)), None)
    if found is None:
        return Client(REQUESTS_PER_USER, {}, {"max_num_batched_tokens": row.chunk})
    return found.client(row)
