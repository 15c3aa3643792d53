"""Bundles of programs that `import` made of PyTorch graphs: write them, and read their origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from stagewright.imports.recording import Recording
from stagewright.lower.traced_graph import program_of
from stagewright.program.columns import Program
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.write import BUNDLE, write

ENTRY = "traced"
"""The manifest's key for the origin of the program."""


class TracedBundle(NamedTuple):
    """A program of a bundle, and its origin."""

    name: str
    rank: int
    """The rank that was recorded; all others are taken to run the same graph."""
    parameters: int
    """Values in the parameters of this rank."""
    program: Program

    def describe(self) -> str:
        """The origin in a line."""
        return (
            f"{self.name}: the graph of rank {self.rank} of {self.program.mesh.world_size}, "
            "recorded by PyTorch; all ranks are taken to run it"
        )


def write_traced(recording: Recording, path: str, *, force: bool = False) -> Program:
    """Write the program of a recorded graph as a bundle, and return the program."""
    program = program_of(recording)
    rank = recording.process.rank if recording.process else 0
    entry = {"name": recording.name, "rank": rank, "parameters": recording.parameters}
    write(program, path, format=BUNDLE, manifest={ENTRY: entry}, force=force)
    return program


def read_traced(source: Bundle) -> TracedBundle | None:
    """The program of a bundle that `write_traced` wrote; None for any other bundle."""
    entry: object = source.manifest.get(ENTRY)
    if not isinstance(entry, dict):
        return None
    origin = cast("dict[str, Any]", entry)
    numbers: Sequence[object] = (origin.get("rank"), origin.get("parameters"))
    rank, parameters = (n if isinstance(n, int) else 0 for n in numbers)
    return TracedBundle(str(origin.get("name")), rank, parameters, source.program())
