"""Writes a program to a directory: a file per rank, the communicator groups, and a manifest.

All is written to a hidden sibling of the directory, which takes its name at the very end: the
directory either holds everything or does not exist, whatever stops the run. The same program gives
the same bytes, however many workers write it.

Workers are threads. A rank costs little Python, then a SHA-256 and a write of its whole file, and
these two leave Python's lock free; and threads share the templates, end with the process, and need
no start-up.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from stagewright import __version__
from stagewright.errors import UserError, did_you_mean
from stagewright.files import from_json, read_bytes
from stagewright.formats import chakra, dot
from stagewright.formats import json as readable
from stagewright.program import Int, Kind, Program

MANIFEST = "manifest.json"
GROUPS = "comm_group.json"

_TASK = 16_000_000  # bytes that a thread writes before it takes the next task


class Template(Protocol):
    """What the files of several ranks have in common."""

    def stamped(self, rank: int) -> AbstractContextManager[memoryview]:
        """The file of one rank, valid inside the block only; several threads may stamp at once."""
        ...


class Batch(Protocol):
    """Ranks whose files share a template."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks."""
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


class Written(NamedTuple):
    """A file of the output directory."""

    name: str
    size: int  # bytes
    sha256: str

    def entry(self) -> dict[str, object]:
        """What the manifest says of it."""
        return {"bytes": self.size, "sha256": self.sha256}


def write(
    program: Program,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    manifest: Mapping[str, object],
    beside: Mapping[str, bytes] | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Write `ranks` (default: all) of a program to directory `out`; returns the manifest.

    `beside` are other files of the directory, by name. `force` replaces a directory that an earlier
    call wrote. `workers` is the number of threads, by default one per core. `progress` is called
    with the ranks written so far and in all, by the calling thread.
    """
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"format {format!r}: choose of {known}{did_you_mean(format, FORMATS)}")
    wanted = _ranks(program, ranks)
    path = Path(os.path.realpath(out))
    _check_place(path, force)
    batches = FORMATS[format].plan(program, wanted, _provenance(program))
    if sum(len(batch.ranks) for batch in batches) != len(wanted):
        raise ValueError("the classes of the program do not hold every rank once")
    _check_space(path, batches)
    with _told(path, batches), _partial(path, force) as folder:
        files = _write_ranks(folder, FORMATS[format].file, batches, workers, progress)
        files.append(_write_file(folder, GROUPS, chakra.comm_group(program)))
        files += [_write_file(folder, name, data) for name, data in (beside or {}).items()]
        head = _manifest(program, manifest, format, wanted)
        _write_file(folder, MANIFEST, _manifest_text(head, files).encode())
    return {**head, "files": {file.name: file.entry() for file in files}}


def _ranks(program: Program, ranks: Sequence[int] | None) -> Int:
    world = program.mesh.world_size
    if ranks is None:
        return np.arange(world, dtype=np.int64)
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"rank {rank}: the run has {world} ranks, 0 to {world - 1}")
    if not ranks:
        raise UserError("no ranks to write: name at least one, or none for all")
    return np.unique(np.array(ranks, np.int64))


def _check_place(path: Path, force: bool) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{path}: directory {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write in {path.parent}")
    if not os.path.lexists(path):
        return
    if not force:
        raise UserError(f"{path}: exists already; choose another name, or --force to replace it")
    # --force deletes: never what is not ours.
    if not path.is_dir():
        raise UserError(
            f"{path}: is a file, and --force replaces directories only; remove it yourself"
        )
    inside = sorted(entry.name for entry in path.iterdir())
    if not inside:
        return
    listed = _files_of(path, len(inside))
    if listed is None:
        raise UserError(
            f"{path}: has no {MANIFEST} of Stagewright's, so it may be yours; remove it yourself"
        )
    yours = next((name for name in inside if name not in listed and name != MANIFEST), None)
    if yours is not None:
        raise UserError(
            f"{path}: holds {yours}, which Stagewright did not write; remove it yourself"
        )


def _files_of(path: Path, entries: int) -> Mapping[str, object] | None:
    """The files that the manifest in a directory lists; None if there is none of ours."""
    try:
        most = (1 << 24) + (entries << 10)
        found = from_json(read_bytes(path / MANIFEST, "a manifest", most), path / MANIFEST)
    except UserError:
        return None
    if not isinstance(found, dict) or "stagewright" not in found:
        return None
    files = cast("dict[str, object]", found).get("files")
    return cast("dict[str, object]", files) if isinstance(files, dict) else {}


def _check_space(path: Path, batches: Sequence[Batch]) -> None:
    free = shutil.disk_usage(path.parent).free
    # The bound is quick to get and nearly always small enough.
    if (
        _total(batches, lambda batch: batch.at_most)
        > free
        < _total(batches, lambda batch: batch.size)
    ):
        raise UserError(_no_room(path, batches))


def _total(batches: Sequence[Batch], size: Callable[[Batch], int | None]) -> int:
    """Bytes of all files; those not known before they are made count nothing."""
    return sum((size(batch) or 0) * len(batch.ranks) for batch in batches)


def _no_room(path: Path, batches: Sequence[Batch]) -> str:
    needed = _total(batches, lambda batch: batch.size)
    free = shutil.disk_usage(path.parent).free
    what = f"needs {needed:,} bytes, " if needed else ""
    stale = sorted(str(found) for found in path.parent.glob(f".{glob.escape(path.name)}.partial-*"))
    hint = f"; of runs that were killed, remove {', '.join(stale)}" if stale else ""
    return f"{path}: disk full: {what}{free:,} are free in {path.parent}{hint}"


@contextmanager
def _told(path: Path, batches: Sequence[Batch]) -> Generator[None]:
    """Turns what the system refuses into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(_no_room(path, batches)) from error
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _partial(path: Path, force: bool) -> Generator[Path]:
    """A hidden sibling of `path`: becomes `path` at the end, or vanishes if anything fails."""
    folder = _new_sibling(path, "partial")
    try:
        yield folder
        _publish(folder, path, force)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_sibling(path: Path, what: str) -> Path:
    """An empty directory. One that has its name already is a killed run's, or another machine's."""
    for nth in itertools.count():
        folder = path.with_name(f".{path.name}.{what}-{os.getpid()}{f'-{nth}' if nth else ''}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def _publish(folder: Path, path: Path, force: bool) -> None:
    """Give the directory its name; an old one is removed only once the new one is in place."""
    if not force or not path.exists():
        folder.rename(path)
        return
    aside = _new_sibling(path, "old")
    old = path.rename(aside / path.name)
    try:
        folder.rename(path)
    except BaseException:
        old.rename(path)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write_ranks(
    folder: Path,
    file: str,
    batches: Sequence[Batch],
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Written]:
    """Write every rank's file; returns them by rank.

    While workers write one batch, the calling thread encodes the next.
    """
    total = sum(len(batch.ranks) for batch in batches)
    threads = max(1, min(workers or _cores(), total))
    files: dict[int, Written] = {}
    busy: set[Future[dict[int, Written]]] = set()

    def collect(most: int) -> None:
        while len(busy) > most:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                busy.remove(future)
                files.update(future.result())
                if progress is not None:
                    progress(len(files), total)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="stagewright-write")
    try:
        for batch in batches:
            template = batch.template()
            # To hand a task to a thread costs 0.1 ms: small files go together.
            step = max(1, min(256, _TASK // (batch.at_most or _TASK)))
            for at in range(0, len(batch.ranks), step):
                # Enough to do while the next batch is encoded, not so much that many templates
                # are in memory at once.
                collect(threads + 8)
                some = batch.ranks[at : at + step]
                busy.add(pool.submit(_write_some, folder, file, template, some))
        collect(0)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [files[rank] for rank in sorted(files)]


def _write_some(
    folder: Path, file: str, template: Template, ranks: Sequence[int]
) -> dict[int, Written]:
    written: dict[int, Written] = {}
    for rank in ranks:
        with template.stamped(rank) as data:
            written[rank] = _write_file(folder, file.format(rank=rank), data)
    return written


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_file(folder: Path, name: str, data: bytes | memoryview) -> Written:
    with (folder / name).open("xb") as file:
        file.write(data)
    return Written(name, len(data), hashlib.sha256(data).hexdigest())


def _provenance(program: Program) -> dict[str, str | int]:
    """What a trace says of where it comes from."""
    mesh = ",".join(f"{name}={size}" for name, size in program.mesh.axes)
    return {
        "generator": f"stagewright {__version__}",
        "world_size": program.mesh.world_size,
        "mesh": mesh,
    }


def _manifest(
    program: Program, given: Mapping[str, object], format: str, ranks: Int
) -> dict[str, object]:
    ours: dict[str, object] = {
        "stagewright": __version__,
        "world_size": program.mesh.world_size,
        "format": format,
        "nodes": [
            {
                "pipeline_rank": of.pipeline_rank,
                "files": int(np.isin(of.ranks, ranks).sum()),
                **{kind.name.lower(): int((of.tasks.kind == kind).sum()) for kind in Kind},
            }
            for of in program.classes
        ],
    }
    for name in ours.keys() & given.keys():
        if given[name] != ours[name]:
            raise ValueError(
                f"manifest {name!r} is {given[name]!r}, but the program has {ours[name]!r}"
            )
    return {**given, **ours}


def _manifest_text(head: Mapping[str, object], files: Sequence[Written]) -> str:
    """JSON with a file a line, since there may be 100,000 of them."""
    lines = [f"    {json.dumps(file.name)}: {json.dumps(file.entry())}" for file in files]
    listed = ",\n".join(lines)
    return (
        json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "files": {{\n{listed}\n  }}\n}}\n'
    )
