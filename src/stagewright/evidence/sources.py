"""What is assumed of the runs of a source, where the source itself leaves it open.

`data/measured/sources.yaml` has an entry for each source: where its rows stand, the settings that
all its rows take unless a row says otherwise, each with the reason, and notes. So an assumption is
written once, and no row and no source has a constant of its own.

>>> nanotron = sources()["nanotron"]
>>> nanotron.assumed["attention_kernel"].value
'fa2'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from stagewright.files import own_yaml


class Assumption(NamedTuple):
    """The value of a setting as a cell of a row writes it, and why it is taken."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of a source stand, and what is assumed of all of them."""

    address: str
    """Address of every row; a row's own `url` follows it, or replaces it if it is whole."""
    assumed: Mapping[str, Assumption]
    """By column of the rows."""
    notes: tuple[str, ...]
    """What is assumed besides, and what is not known."""

    def complete(self, row: Mapping[str, str]) -> dict[str, str]:
        """The cells of a row with the source's address and assumptions where the row has none."""
        taken = {name: each.value for name, each in self.assumed.items() if not row.get(name)}
        url = row.get("url") or ""
        whole = url if url.startswith("https://") else self.address + url
        return {**row, **taken, "url": whole}


@cache
def sources() -> Mapping[str, Source]:
    """The sources of training measurements, by name."""
    text = files("stagewright").joinpath("data/measured/sources.yaml").read_text(encoding="utf-8")
    return {name: _source(entry) for name, entry in own_yaml(text).items()}


def _source(entry: Mapping[str, Any]) -> Source:
    assumed = {
        name: Assumption(_cell(value), reason)
        for name, (value, reason) in entry.get("assumed", {}).items()
    }
    return Source(entry.get("address", ""), assumed, tuple(entry.get("notes", ())))


def _cell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
