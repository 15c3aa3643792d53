"""Files of ranks from templates: ranks that share one are encoded once, and each stamps its own.

A format plans `Batch`es: ranks whose files share a template. A rank then costs little Python, a
SHA-256 and a write of its whole file; the last two leave Python's lock free, so that threads do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import node
from typing import NamedTuple

from stagewright.arrays import Int
from stagewright.program.columns import Program
from stagewright.trace.formats import chakra, dot, json
from stagewright.trace.manifest import WrittenFile
from stagewright.trace.staging import write_file

SHARE_BYTES = 16_000_000  # that a thread writes before it takes the next share
TEMPLATE_BYTES = 256_000_000  # of templates in memory, with the threads' copies of them
RANGE_BYTES = 256_000_000  # that a task on a cluster writes, at most


Batch = chakra.ChakraBatch | json.TextBatch
"""Ranks with files that share a template. `size`: bytes of each file; None: not known before."""
Template = chakra.ChakraTemplate | json.TextBatch
"""The bytes that the files share; `stamped` makes the file of a rank, for several threads."""


class Format(NamedTuple):
    """A way to write a rank, of a module in `trace.formats`."""

    file: str  # name of a rank's file, with `{rank}` in it
    plan: Callable[[Program, Int, Mapping[str, str | int]], Sequence[Batch]]


FORMATS = {
    "chakra": Format(chakra.FILE, chakra.plan),
    "dot": Format(dot.FILE, dot.plan),
    "json": Format(json.FILE, json.plan),
}
"""Formats of files of ranks by name, the default first."""


class Share(NamedTuple):
    """Ranks of a batch that one thread writes."""

    template: Template
    ranks: Int


def shares(batches: Sequence[Batch]) -> Iterator[Share]:
    """The shares of all batches; a batch is encoded when its first share is taken."""
    for batch in batches:
        template = batch.template()
        step = max(1, min(256, SHARE_BYTES // max(1, template.memory)))
        for at in range(0, len(batch.ranks), step):
            yield Share(template, batch.ranks[at : at + step])


def most_at_once(share: Share) -> int:
    """Largest number of shares like this one whose templates fit in `TEMPLATE_BYTES`."""
    return max(2, TEMPLATE_BYTES // max(1, share.template.memory))


@dataclass(frozen=True, slots=True)
class ShareWriter:
    """Writes the files of a share, one after the other."""

    folder: Path
    file: str  # as `Format.file`
    shared: bool = False  # as in `write_file`

    def __call__(self, share: Share) -> dict[int, WrittenFile]:
        """The files by rank."""
        written: dict[int, WrittenFile] = {}
        for rank in share.ranks.tolist():
            with share.template.stamped(rank) as data:
                name = self.file.format(rank=rank)
                written[rank] = write_file(self.folder, name, [data], shared=self.shared)
        return written


@dataclass(frozen=True, slots=True)
class RangeWriter:
    """Writes the files of a range of ranks on another machine, in a directory that all share.

    It encodes the templates anew: a program is smaller than they are.
    """

    program: Program
    folder: Path
    format: str
    provenance: Mapping[str, str | int]

    def __call__(self, ranks: Int) -> dict[int, WrittenFile]:
        """The files by rank."""
        if not self.folder.is_dir():
            raise OSError(f"{node()} has no {self.folder}: name a directory that all share")
        format = FORMATS[self.format]
        writer = ShareWriter(self.folder, format.file, shared=True)
        written: dict[int, WrittenFile] = {}
        for batch in format.plan(self.program, ranks, self.provenance):
            written |= writer(Share(batch.template(), batch.ranks))
        return written


def ranges(batches: Sequence[Batch], cores: int) -> Iterator[Int]:
    """The ranks of each task on a cluster: at most `RANGE_BYTES`, and several tasks per core."""
    sizes = [batch.at_most or 1_000_000 for batch in batches]
    total = sum(size * len(batch.ranks) for size, batch in zip(sizes, batches, strict=True))
    limit = min(RANGE_BYTES, total // (4 * max(1, cores)))
    for size, batch in zip(sizes, batches, strict=True):
        step = max(1, limit // size)
        for at in range(0, len(batch.ranks), step):
            yield batch.ranks[at : at + step]
