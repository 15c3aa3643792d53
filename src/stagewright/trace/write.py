"""Writes a program to a directory: a file per rank, the communicator groups, and a manifest.

The directory either holds everything or does not exist, whatever stops the run (`unfinished`). The
same program gives the same bytes, however many workers, processes or machines write it: each writes
a share of the ranks (`stamp`), and whoever finds that none is missing adds the rest.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from stagewright.arrays import Int
from stagewright.errors import Stopped, UserError, did_you_mean
from stagewright.program.columns import Program, Users, among
from stagewright.trace import ray_engine
from stagewright.trace.formats import bundle, chakra
from stagewright.trace.manifest import (
    GROUPS,
    MANIFEST,
    Done,
    Files,
    counts,
    head_of,
    identity,
    text,
)
from stagewright.trace.staging import (
    Output,
    Work,
    begun,
    check_parent,
    leftovers,
    manifest_in,
    new_sibling,
)
from stagewright.trace.storage import Local, Place, Written, place
from stagewright.trace.templates import FORMATS, Batch, cores, stamp

ENGINES = ("local", "ray")
BUNDLE = "bundle"  # of all ranks in one file; see `formats.bundle`

Progress = Callable[[int, int, int], None]  # done, of how many, bytes


class How(TypedDict, total=False):
    """How ranks are written; none of it changes a byte of the files."""

    force: bool
    """Replace an output that an earlier call wrote."""
    workers: int | None
    """Threads that write; by default one per core."""
    progress: Progress | None
    """Called, by the calling thread, with ranks written so far and in all, and bytes so far."""
    resume: bool
    """Go on with what a stopped run of the same has written; keep it if this one is stopped."""
    shard: tuple[int, int] | None
    """Write share i of n only. Shares may be written at once; who finds that none is missing ends
    the output. i counts round: 0 and n are the same share."""
    engine: str
    """`local`: threads of this process; `ray`: a Ray cluster, each machine of which writes to the
    output itself."""
    address: str | None
    """Of the Ray cluster: `host:port`, `ray://host:port` or `auto`."""


def write(
    program: Program,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    manifest: Mapping[str, object],
    beside: Mapping[str, bytes] | None = None,
    **how: Unpack[How],
) -> dict[str, Any]:
    """Write `ranks` (default: all) of a program to `out`; returns the manifest.

    `out` is a directory, or a URL that fsspec knows. `beside` are other files that belong to it, by
    name. Of a share that is not the last, the result has the files of the share, and how many ranks
    are `missing`.
    """
    known = (*FORMATS, BUNDLE)
    if format not in known:
        hint = did_you_mean(format, known)
        raise UserError(f"format {format!r}: choose of {', '.join(known)}{hint}")
    if format == BUNDLE and ranks is not None:
        raise UserError("a bundle holds every rank: name none, and expand those that you want")
    wanted = some_ranks(program.mesh.world_size, ranks)
    head = head_of(manifest, program.mesh.world_size, format, counts(program, wanted))
    if format == BUNDLE:
        if how.get("resume") or how.get("shard") or how.get("engine", "local") != "local":
            raise UserError("a bundle is written at once: drop --resume, --shard and --engine")
        file = _write_bundle(program, Path(os.path.realpath(out)), head, how.get("force", False))
        return {**head, "files": Files("{rank}", Done.of({}), [file])}
    return write_ranks(program, out, wanted, head, beside=beside, **how)


def write_ranks(
    program: Program,
    out: Path | str,
    wanted: Int,
    head: Mapping[str, Any],
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
    engine: str = "local",
    address: str | None = None,
    users: Sequence[Users] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Write the files of some ranks, the groups, and the manifest, which begins as `head`.

    `users` as in `Program.blocks_of_groups`, `beside` as in `write`, the rest as in `How`.
    """
    _check_engine(engine, address)
    where = _where(out)
    shared = resume or shard is not None
    form = FORMATS[head["format"]]
    mine = _share(program, wanted, shard)
    batches: Sequence[Batch] = []

    def whole() -> dict[str, Any] | None:
        return _whole(where, head, form.file, wanted)

    def written() -> dict[str, Any]:
        nonlocal batches
        with begun(where, Output(identity(head, wanted), force, shared)) as work:
            if shared and (others := whole()) is not None:
                return others
            tell = _Teller(progress, len(mine))
            done = [_checked(work, form.file, mine, workers, tell)] if shared else []
            todo = np.setdiff1d(mine, done[0].ranks, assume_unique=True) if shared else mine
            provenance = _provenance(program, head)
            batches = form.plan(program, todo, provenance)
            if sum(len(batch.ranks) for batch in batches) != len(todo):
                raise ValueError("the classes of the program do not hold every rank once")
            if isinstance(work.place, Local):
                _check_space(Path(where), batches)

            def note(some: Done) -> None:
                work.journal.note(some)
                done.append(some)

            if engine == "local":
                stamp(work.place, form.file, batches, note, tell, workers)
            else:
                ray_engine.stamp(
                    program, work.place, head["format"], batches, provenance, note, tell, address
                )
                _check_there(work.place, form.file, Done.joined(done))
            files = Done.joined(done)
            if shared:
                work.journal.flush()
                files = work.journal.read()
                missing = len(np.setdiff1d(wanted, files.ranks, assume_unique=True))
                if missing and (others := whole()) is not None:
                    return others
                if missing:
                    found = Files(form.file, files.among(mine))
                    return {**head, "files": found, "missing": missing}
                _check_there(work.place, form.file, files.among(wanted))
            more = {GROUPS: chakra.comm_group(program, users)}
            more |= {name: [data] for name, data in (beside or {}).items()}
            return _finish(work, head, Files(form.file, files.among(wanted)), more)

    with _told(where, lambda: batches, shared):
        return _with_others(written, whole) if shared else written()


def _with_others(
    written: Callable[[], dict[str, Any]], whole: Callable[[], dict[str, Any] | None]
) -> dict[str, Any]:
    """What `written` does, whatever others that write the same do at the same time.

    One of them may end the output at any moment, which takes away the directory under our hands:
    whatever failed by that, there is nothing left to do.
    """
    for tries in itertools.count(1):
        if (found := whole()) is not None:
            return found
        try:
            return written()
        except (OSError, UserError) as error:
            if (found := whole()) is not None:
                return found
            # They clear away what is not whole before they end it: wait for that by trying again.
            if not isinstance(error, FileNotFoundError) or tries == 3:
                raise
    raise AssertionError


def _check_engine(engine: str, address: str | None) -> None:
    if engine not in ENGINES:
        hint = did_you_mean(engine, ENGINES)
        raise UserError(f"engine {engine!r}: choose of {', '.join(ENGINES)}{hint}")
    if address is not None and engine != "ray":
        raise UserError(f"address {address}: is of a Ray cluster; add --engine ray")


def _finish(
    work: Work,
    head: Mapping[str, Any],
    files: Files,
    more: Mapping[str, Iterable[bytes]],
) -> dict[str, Any]:
    """All ranks are there: what is of no rank, and the end."""
    for name, pieces in more.items():
        files = files.and_also(work.place.write(name, pieces))
    work.place.write(MANIFEST, text(head, files))
    work.publish({*files, MANIFEST})
    return {**head, "files": files}


class _Teller:
    """Adds up what is done, and tells."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = self._size = 0

    def __call__(self, some: Done) -> None:
        self._done += len(some.ranks)
        self._size += int(some.sizes.sum())
        if self._progress is not None:
            self._progress(self._done, self._total, self._size)


# ---- what is there already -----------------------------------------------------------------------


def _share(program: Program, ranks: Int, shard: tuple[int, int] | None) -> Int:
    """The ranks of a share, ascending; neighbours in a class, for templates to be few."""
    if shard is None:
        return ranks
    nth, count = shard
    if not 0 <= nth <= count or count < 1:
        raise UserError(
            f"shard {nth}/{count}: wanted 1/{max(1, count)} to {max(1, count)}/{max(1, count)}"
        )
    by_class = np.concatenate([among(of.ranks, ranks) for of in program.classes])
    return np.sort(np.array_split(by_class, count)[(nth - 1) % count])


def _whole(where: str, head: Mapping[str, Any], file: str, wanted: Int) -> dict[str, Any] | None:
    """The manifest of an output that is whole and the same; None if it is not there."""
    if "://" not in where and not Path(where).is_dir():
        return None
    found = manifest_in(place(where))
    if found is None:
        return None
    files = found.pop("files", None)
    if found != json.loads(json.dumps(head)) or not isinstance(files, dict):
        return None
    listed = Files.read(file, files)  # pyright: ignore
    return {**head, "files": listed} if np.array_equal(listed.ranks, wanted) else None


def _checked(
    work: Work, file: str, ranks: Int, workers: int | None, tell: Callable[[Done], None]
) -> Done:
    """Files of ranks that are there already, with the bytes and the checksum that were noted."""
    noted = work.journal.read().among(ranks)
    names = [file.format(rank=rank) for rank in noted.ranks.tolist()]
    sizes = work.place.sizes()
    good = np.zeros(len(names), bool)

    def check(nth: int) -> int:
        if sizes.get(names[nth]) == noted.sizes[nth]:
            digest = work.place.digest(names[nth])
            good[nth] = digest == noted.digests[nth].tobytes().hex()
        return nth

    pool = ThreadPoolExecutor(workers or cores(), thread_name_prefix="stagewright-check")
    try:
        for nth in pool.map(check, range(len(names))):
            if good[nth]:
                tell(noted.at(np.array([nth])))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return noted.at(good)


def _check_there(place: Place, file: str, done: Done) -> None:
    """What others have noted is there; a UserError where it is not."""
    sizes = place.sizes()
    names = [file.format(rank=rank) for rank in done.ranks.tolist()]
    found = np.array([sizes.get(name, -1) for name in names])
    wrong = np.flatnonzero(found != done.sizes).tolist()
    if wrong:
        raise UserError(
            f"{place.address}: {names[wrong[0]]} is not what was written ({len(wrong)} such); run "
            "with --resume to write it again"
        )


# ---- places --------------------------------------------------------------------------------------


def _where(out: Path | str) -> str:
    """An absolute path, or a URL."""
    text = str(out)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return text if "://" in text else os.path.realpath(text)


def some_ranks(world: int, ranks: Sequence[int] | None) -> Int:
    """The ranks that are meant, ascending and each once; None: all of the world."""
    if ranks is None:
        return np.arange(world, dtype=np.int64)
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"rank {rank}: the run has {world} ranks, 0 to {world - 1}")
    if not len(ranks):
        raise UserError("no ranks to write: name at least one, or none for all")
    return np.unique(np.array(ranks, np.int64))


def _write_bundle(program: Program, path: Path, head: Mapping[str, Any], force: bool) -> Written:
    """A bundle takes its name when it is whole."""
    check_parent(path)
    if os.path.lexists(path):
        if not force:
            raise UserError(
                f"{path}: exists already; choose another name, or --force to replace it"
            )
        if not bundle.is_bundle(path):
            raise UserError(f"{path}: is no bundle, so it may be yours; remove it yourself")
    with _told(str(path), tuple, False):
        folder = new_sibling(path, f"partial-{os.getpid()}")
        try:
            file = Local(folder).write(path.name, [bundle.encode(program, head)])
            (folder / path.name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return file


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
    stale = [str(found) for found in leftovers(path)]
    hint = f"; of runs that were stopped, remove {', '.join(stale)}" if stale else ""
    return f"{path}: disk full: {what}{free:,} are free in {path.parent}{hint}"


@contextmanager
def _told(where: str, batches: Callable[[], Sequence[Batch]], shared: bool) -> Generator[None]:
    """Turns what the system refuses into a UserError, and says what a stop leaves."""
    try:
        yield
    except KeyboardInterrupt:
        if not shared:
            raise
        raise Stopped(
            "stopped; what is written stays, and the same command goes on with it"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and "://" not in where:
            raise UserError(_no_room(Path(where), batches())) from error
        raise UserError(f"{where}: cannot be written: {error.strerror or error}") from error


def _provenance(program: Program, head: Mapping[str, Any]) -> dict[str, str | int]:
    """What a trace says of where it comes from."""
    mesh = ",".join(f"{name}={size}" for name, size in program.mesh.axes)
    return {
        "generator": f"stagewright {head['stagewright']}",
        "world_size": program.mesh.world_size,
        "mesh": mesh,
    }
