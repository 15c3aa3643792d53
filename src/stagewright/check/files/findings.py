"""Findings of a check, in words: errors and warnings; findings of one kind become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

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
        """`rank`: whose file it is about, if of one."""
        self.rank = rank
        self._kinds: dict[str, Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kinds.values())

    def __contains__(self, code: str) -> bool:
        return code in self._kinds

    @property
    def errors(self) -> bool:
        """Whether any is an error."""
        return any(found.level == "error" for found in self)

    def error(self, code: str, message: str, nodes: int = 1) -> None:
        """Note that the trace is wrong."""
        self.add(Finding("error", code, message, self.rank, nodes))

    def warn(self, code: str, message: str, nodes: int = 1) -> None:
        """Note what some reader cannot do with the trace, or what is dangerous."""
        self.add(Finding("warning", code, message, self.rank, nodes))

    def add(self, found: Finding) -> None:
        """Keep it, or count it where there is one of its kind."""
        known = self._kinds.get(found.code)
        if known is not None:
            nodes, ranks = known.nodes + found.nodes, known.ranks + found.ranks
            found = known._replace(nodes=nodes, ranks=ranks)
        self._kinds[found.code] = found

    def take(self, code: str) -> Finding | None:
        """Take out those of a kind, if there are any."""
        return self._kinds.pop(code, None)

    def update(self, more: Iterable[Finding]) -> None:
        """Keep all of them."""
        for found in more:
            self.add(found)
