"""The report of a check: size of traces or a bundle, and findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stagewright.check.files.findings import Finding


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
