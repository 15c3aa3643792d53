"""Findings of a check, errors and warnings in words, and the report that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Level = Literal["error", "warning"]


class Finding(NamedTuple):
    """An error or warning: the first of its kind, and on how many nodes and ranks it occurs."""

    level: Level
    code: str  # the kind: a few words with dashes, for programs
    message: str
    rank: int | None = None
    nodes: int = 1
    ranks: int = 1


class Findings:
    """Findings by kind, in order of the first of each."""

    def __init__(self, rank: int | None = None) -> None:
        """`rank`: the rank whose file is checked, if it is one file."""
        self.rank = rank
        self._kinds: dict[str, Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kinds.values())

    def __contains__(self, code: str) -> bool:
        return code in self._kinds

    def error(self, code: str, message: str, nodes: int = 1) -> None:
        """Add an error: no reader can run the trace."""
        self.add(Finding("error", code, message, self.rank, nodes))

    def warn(self, code: str, message: str, nodes: int = 1) -> None:
        """Add a warning: some reader cannot run the trace, or runs it otherwise."""
        self.add(Finding("warning", code, message, self.rank, nodes))

    def add(self, finding: Finding) -> None:
        """Add a finding; the first of a kind stays, the others are counted."""
        earlier = self._kinds.get(finding.code)
        if earlier is not None:
            nodes, ranks = earlier.nodes + finding.nodes, earlier.ranks + finding.ranks
            finding = earlier._replace(nodes=nodes, ranks=ranks)
        self._kinds[finding.code] = finding

    def update(self, findings: Iterable[Finding]) -> None:
        """Add several findings."""
        for finding in findings:
            self.add(finding)


@dataclass(slots=True)
class Report:
    """The contents of a directory of traces, and the findings."""

    directory: str
    ranks: int = 0  # files
    world_size: int = 0
    kinds: int = 0  # trace classes: ranks with files that differ in partners only
    nodes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list[Finding])
    checks: list[str] = field(default_factory=list[str])  # what was checked, and the result
    skipped: list[str] = field(default_factory=list[str])  # what was not checked, and why

    def of(self, level: str) -> list[Finding]:
        """The errors, or the warnings."""
        return [found for found in self.findings if found.level == level]

    @property
    def ok(self) -> bool:
        """No errors; there may be warnings."""
        return not self.of("error")

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        names = ("directory", "ranks", "world_size", "kinds", "nodes", "bytes", "seconds")
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in names},
            "checks": self.checks,
            "skipped": self.skipped,
            "findings": [found._asdict() for found in self.findings],
        }
