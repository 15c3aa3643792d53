"""Stamps ranks: what a batch of ranks has in common is encoded once, and each rank's file from it.

Workers are threads. A rank costs little Python, then a SHA-256 and a write of its whole file, and
these two leave Python's lock free; and threads share the templates, end with the process, and need
no start-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from stagewright.arrays import Int
from stagewright.program.columns import Program
from stagewright.trace.formats import chakra, dot
from stagewright.trace.formats import json as readable
from stagewright.trace.manifest import Done
from stagewright.trace.storage import Place, Written

TASK = 16_000_000  # bytes that a thread writes before it takes the next task
MEMORY = 128_000_000  # bytes of templates, and as many of the threads' copies of them


class Template(Protocol):
    """What the files of several ranks have in common."""

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        ...

    def stamped(self, rank: int) -> AbstractContextManager[memoryview]:
        """The file of one rank, valid inside the block only; several threads may stamp at once."""
        ...


class Batch(Protocol):
    """Ranks whose files share a template."""

    @property
    def ranks(self) -> Int:
        """The ranks, ascending."""
        ...

    @property
    def at_most(self) -> int | None:
        """An upper bound of `size`, quickly; None if there is none."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes of each rank's file; None if not known before it is made."""
        ...

    def template(self) -> Template:
        """The work done once for all the ranks."""
        ...


class Format(NamedTuple):
    """A way to write a rank: to add one, write a module with a `plan`, and name it in FORMATS."""

    file: str
    plan: Callable[[Program, Int, Mapping[str, str | int]], Sequence[Batch]]


FORMATS = {
    "chakra": Format("workload.{rank}.et", chakra.plan),
    "json": Format("rank.{rank}.json", readable.plan),
    "dot": Format("rank.{rank}.dot", dot.plan),
}


def stamp(
    place: Place,
    file: str,
    batches: Sequence[Batch],
    note: Callable[[Done], None],
    tell: Callable[[Done], None],
    workers: int | None = None,
) -> None:
    """Write every rank's file.

    `file`: the name of a file, with `{rank}` in it. `note` hears of all that is written, whatever
    stops the work, `tell` while it goes on; both in the calling thread, which encodes a batch while
    workers write the one before. `workers`: threads, by default one per core.
    """
    threads = max(1, min(workers or cores(), sum(len(batch.ranks) for batch in batches)))
    busy: dict[Future[Done], Template] = {}

    def collect(most: int) -> None:
        while len(busy) > most:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                del busy[future]
                some = future.result()
                note(some)
                tell(some)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="stagewright-write")
    try:
        for batch in batches:
            template = batch.template()
            # Enough to do while the next batch is encoded, not so much that many templates are in
            # memory at once; nor that many copies of a large one are.
            memory = max(1, template.memory)
            spare, step = max(1, MEMORY // memory), max(1, min(256, TASK // memory))
            for at in range(0, len(batch.ranks), step):
                collect(min(threads, spare) + min(8, spare) - 1)
                some = batch.ranks[at : at + step]
                busy[pool.submit(stamp_some, place, file, template, some)] = template
        collect(0)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for future in busy:
            if not future.cancelled() and future.exception() is None:
                note(future.result())


def stamp_some(place: Place, file: str, template: Template, ranks: Int) -> Done:
    """Write the files of some ranks, one after the other."""
    written: dict[int, Written] = {}
    for rank in ranks.tolist():
        with template.stamped(rank) as data:
            written[rank] = place.write(file.format(rank=rank), [data])
    return Done.of(written)


def cores() -> int:
    """Cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
