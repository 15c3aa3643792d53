"""`manifest.json`, beside traces: how they were made, and the size and checksum of each file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.program.columns import Program, TaskKind, intersect
from stagewright.trace.storage import WrittenFile
from stagewright.version import __version__

MANIFEST = "manifest.json"
GROUPS = "comm_group.json"


class WrittenRanks(NamedTuple):
    """The files of ranks that have been written, in 48 bytes each: there may be a million."""

    ranks: Int
    sizes: Int  # bytes of each rank's file
    digests: NDArray[np.uint8]  # and its SHA-256, 32 bytes a row

    @staticmethod
    def of(files: Mapping[int, WrittenFile]) -> WrittenRanks:
        """From files by rank."""
        digests = b"".join(bytes.fromhex(file.sha256) for file in files.values())
        return WrittenRanks(
            np.array([*files], np.int64),
            np.array([file.size for file in files.values()], np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, 32),
        )

    @staticmethod
    def merge(pieces: Iterable[WrittenRanks]) -> WrittenRanks:
        """The files of all pieces by ascending rank; of a rank that comes twice, the first."""
        ranks, sizes, digests = zip(WrittenRanks.of({}), *pieces, strict=True)
        merged = WrittenRanks(np.concatenate(ranks), np.concatenate(sizes), np.concatenate(digests))
        return merged.at(np.unique(merged.ranks, return_index=True)[1])

    def at(self, which: Int | Bool) -> WrittenRanks:
        """The files in some rows."""
        return WrittenRanks(self.ranks[which], self.sizes[which], self.digests[which])

    def among(self, ranks: Int) -> WrittenRanks:
        """The files of some ranks, ascending; the rows must be ascending, too."""
        return self.at(np.searchsorted(self.ranks, intersect(self.ranks, ranks)))

    def to_json(self) -> dict[str, list[Any]]:
        """Columns that `from_json` reads."""
        digests = self.digests.tobytes().hex()
        return {
            "ranks": self.ranks.tolist(),
            "bytes": self.sizes.tolist(),
            "sha256": [digests[at : at + 64] for at in range(0, len(digests), 64)],
        }

    @staticmethod
    def from_json(found: Any) -> WrittenRanks:
        """Read what `to_json` made; ValueError, KeyError or TypeError for anything else."""
        rows = zip(found["ranks"], found["bytes"], found["sha256"], strict=True)
        return WrittenRanks.of({rank: WrittenFile("", size, sha256) for rank, size, sha256 in rows})


class FileList(Mapping[str, "dict[str, object]"]):
    """The files of an output as its manifest lists them: name -> bytes and checksum."""

    def __init__(self, file: str, ranks: WrittenRanks, more: Sequence[WrittenFile] = ()) -> None:
        """`file`: the name of a rank's file, with `{rank}` in it; `ranks` ascend."""
        self._file = file
        self._before, self._after = file.split("{rank}")
        self._ranks, self._more = ranks, {each.name: each for each in more}

    @staticmethod
    def read(file: str, found: Mapping[str, Any]) -> FileList:
        """Read the list of files in a manifest; ValueError where it is damaged."""
        before, after = file.split("{rank}")
        ranks: dict[int, WrittenFile] = {}
        more: list[WrittenFile] = []
        for name, entry in found.items():
            written = _entry(name, entry)
            text = name.removeprefix(before).removesuffix(after)
            if text.isdecimal() and name == f"{before}{int(text[:18])}{after}":
                ranks[int(text)] = written
            else:
                more.append(written)
        return FileList(file, WrittenRanks.of(dict(sorted(ranks.items()))), more)

    def and_also(self, file: WrittenFile) -> FileList:
        """The same list with one more file, which is of no rank."""
        return FileList(self._file, self._ranks, [*self._more.values(), file])

    @property
    def written(self) -> WrittenRanks:
        """The files of ranks."""
        return self._ranks

    @property
    def ranks(self) -> Int:
        """The ranks whose files are listed, ascending."""
        return self._ranks.ranks

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return int(self._ranks.sizes.sum()) + sum(file.size for file in self._more.values())

    def rows(self) -> Iterator[WrittenFile]:
        """All files, one by one."""
        digests = self._ranks.digests.tobytes()
        columns = zip(self.ranks.tolist(), self._ranks.sizes.tolist(), strict=True)
        for nth, (rank, size) in enumerate(columns):
            sha256 = digests[32 * nth : 32 * nth + 32].hex()
            yield WrittenFile(f"{self._before}{rank}{self._after}", size, sha256)
        yield from self._more.values()

    def __getitem__(self, name: str) -> dict[str, object]:
        if name in self._more:
            return self._more[name].entry()
        text = name.removeprefix(self._before).removesuffix(self._after)
        if text.isdecimal() and name == f"{self._before}{int(text)}{self._after}":
            at = int(np.searchsorted(self._ranks.ranks, int(text)))
            if at < len(self._ranks.ranks) and self._ranks.ranks[at] == int(text):
                return self._entry(at)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for rank in self._ranks.ranks.tolist():
            yield f"{self._before}{rank}{self._after}"
        yield from self._more

    def __len__(self) -> int:
        return len(self._ranks.ranks) + len(self._more)

    def _entry(self, at: int) -> dict[str, object]:
        size, digest = int(self._ranks.sizes[at]), self._ranks.digests[at].tobytes().hex()
        return {"bytes": size, "sha256": digest}


def _entry(name: str, entry: object) -> WrittenFile:
    """A file as a manifest lists it; ValueError where the entry is none."""
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    size, digest = fields.get("bytes"), fields.get("sha256")
    if not isinstance(size, int) or not isinstance(digest, str) or not 0 <= size < 1 << 62:
        raise ValueError(f"{name[:40]!a} has no size and checksum")
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"{name[:40]!a} has no SHA-256")
    return WrittenFile(name, size, digest)


_SHA256 = re.compile(r"[0-9a-f]{64}")


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
            "pipeline_rank": of.pipeline_rank,
            "files": len(intersect(of.ranks, ranks)),
            **{kind.name.lower(): int((of.tasks.kind == kind).sum()) for kind in TaskKind},
        }
        for of in program.classes
    ]


def text(head: Mapping[str, object], files: FileList) -> Iterator[bytes]:
    """The manifest as JSON with a file a line, in pieces."""
    yield json.dumps(head, indent=2).removesuffix("\n}").encode() + b',\n  "files": {'
    lines: list[str] = []
    between = "\n"
    for name, size, sha256 in files.rows():
        lines.append(f'{between}    {json.dumps(name)}: {{"bytes": {size}, "sha256": "{sha256}"}}')
        between = ",\n"
        if len(lines) == 4096:
            yield "".join(lines).encode()
            lines = []
    yield ("".join(lines) + "\n  }\n}\n").encode()


def identity(head: Mapping[str, object], ranks: Int) -> str:
    """A short name of an output, equal for equal runs that write the same ranks."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    digest.update(ranks.tobytes())
    return digest.hexdigest()[:12]
