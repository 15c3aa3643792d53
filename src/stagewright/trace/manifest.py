"""`manifest.json`, beside traces: how they were made, and the size and checksum of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagewright.arrays import Int
from stagewright.program.columns import Program, TaskKind, intersect
from stagewright.version import __version__

MANIFEST = "manifest.json"
GROUPS = "comm_group.json"


class WrittenFile(NamedTuple):
    """A file that has been written."""

    name: str
    size: int  # bytes
    sha256: str


def entries(files: Iterable[WrittenFile]) -> dict[str, dict[str, object]]:
    """Files as a manifest lists them: bytes and checksum by name."""
    return {file.name: {"bytes": file.size, "sha256": file.sha256} for file in files}


def head_of(
    given: Mapping[str, object], world_size: int, format: str, nodes: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """The manifest without its files. Fields that are given must not contradict the program."""
    ours = {"world_size": world_size, "format": format, "nodes": nodes}
    for name in ours.keys() & given.keys():
        if given[name] != ours[name]:
            raise ValueError(f"manifest {name!r} is {given[name]!r}, wanted {ours[name]!r}")
    return {**given, "stagewright": given.get("stagewright", __version__), **ours}


def counts(program: Program, ranks: Int) -> list[dict[str, object]]:
    """For each rank class the tasks of a rank by kind, and how many of its ranks are written."""
    return [
        {
            "pipeline_rank": rank_class.pipeline_rank,
            "files": len(intersect(rank_class.ranks, ranks)),
            **{kind.name.lower(): int((rank_class.tasks.kind == kind).sum()) for kind in TaskKind},
        }
        for rank_class in program.classes
    ]


def text(head: Mapping[str, object], files: Iterable[WrittenFile]) -> Iterator[bytes]:
    """The manifest as JSON with a file a line, in pieces."""
    yield json.dumps(head, indent=2).removesuffix("\n}").encode() + b',\n  "files": {'
    separator = "\n"
    for name, size, sha256 in files:
        line = f'{separator}    {json.dumps(name)}: {{"bytes": {size}, "sha256": "{sha256}"}}'
        yield line.encode()
        separator = ",\n"
    yield b"\n  }\n}\n"
