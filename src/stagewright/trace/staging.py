"""Outputs under construction: what is there already, what is new, and how an output appears.

In a file system everything is written to a hidden sibling of the directory, which takes its name at
the very end: the directory either holds everything or does not exist, whatever stops the run; of
several runs that replace it, it holds what the last one wrote. An object store has no such
renaming; there the manifest is written last, and an output without one is not complete.

An output may be *shared*: a run that was stopped can be gone on with, and several processes can
write it at the same time, because each notes in a `Journal` which files are done. The process that
finds no file missing completes the output.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError
from stagewright.files import check_parent, exists_already, from_json, read_bytes
from stagewright.trace.journal import PREFIX, Journal
from stagewright.trace.manifest import MANIFEST
from stagewright.trace.storage import LocalFolder, ObjectStore, Storage

PATIENCE = 10.0  # seconds that the last of several processes waits for the others to end

_OURS = re.compile(
    r"workload\.\d+\.et|rank\.\d+\.(json|dot)|comm_group\.json|manifest\.json|\.part-.*"
)


class Output(NamedTuple):
    """Which output is written, and how."""

    name: str  # as `manifest.identity` makes it
    force: bool  # replace an output that is there
    shared: bool  # go on with files of the same output, and leave files for others to go on with


class Staging(NamedTuple):
    """An output under construction."""

    storage: Storage
    """Where the files of the output are written."""
    journal: Journal
    """The files that are done."""
    publish: Callable[[Collection[str]], None]
    """Makes the files an output, of these names and no others, once every file is written."""


@contextmanager
def staged(address: str, output: Output) -> Generator[Staging]:
    """An output to write; unless it is published or shared, its files vanish at the end."""
    new = _in_store(address, output) if "://" in address else _in_folder(Path(address), output)
    with new as staging:
        yield staging


# ---- file systems --------------------------------------------------------------------------------


@contextmanager
def _in_folder(path: Path, output: Output) -> Generator[Staging]:
    check_output(path, output.force)
    folder, lock = (_shared_folder if output.shared else _own_folder)(path, output.name)
    storage = LocalFolder(folder, alone=not output.shared)
    journal = Journal(storage, output.name)

    def publish(names: Collection[str]) -> None:
        """Remove files that do not belong to the output, and give the directory its name."""
        if lock is not None:
            _locked(lock, alone=True, patience=PATIENCE)
        storage.remove(set(storage.sizes()) - set(names))
        opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _rename(folder, path, output.force)
            if output.shared:  # others may have begun files since: not all file systems know locks
                _remove_others(opened, names)
        finally:
            os.close(opened)

    try:
        if not _is_at(folder, lock):
            raise FileNotFoundError(errno.ENOENT, "ended by another", str(folder))
        yield Staging(storage, journal, publish)
        if output.force:
            _clear(path)
    except BaseException:
        if output.shared:
            with suppress(OSError):
                journal.flush()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if output.shared:
            with suppress(OSError):  # empty if others had completed the output when it was made
                folder.rmdir()
        if lock is not None:
            os.close(lock)


def check_output(path: Path, force: bool) -> None:
    """Raise a UserError where `path` must not become an output."""
    check_parent(path)
    while (found := _identity(path)) is not None:
        if not force:
            raise exists_already(path)
        with suppress(FileNotFoundError):
            if (reason := _not_ours(path)) is None:
                return
            if found == _identity(path):
                raise UserError(f"{path}: {reason}; remove it yourself")
        # Another run has replaced it meanwhile: look at what is there now.


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells one file or directory from another of the same name; None if there is none."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino


def _not_ours(path: Path) -> str | None:
    """Why --force does not delete what is there: never what is not ours."""
    if not path.is_dir():
        return "is a file, and --force replaces directories only"
    inside = sorted(entry.name for entry in path.iterdir())
    if not inside:
        return None
    listed = _files_of(path, len(inside))
    if listed is None:
        return f"has no {MANIFEST} of Stagewright's, so it may be yours"
    ours = {MANIFEST, *(_left_by_runs(path) if _RUNNER in listed else ())}
    yours = next((name for name in inside if name not in listed and name not in ours), None)
    return None if yours is None else f"holds {yours}, which Stagewright did not write"


_RUNNER = "astra-sim.sh"  # of the files that `stagewright.time.astra_sim.configuration_files` makes


def _left_by_runs(path: Path) -> list[str]:
    """What the script that runs the traces leaves beside them: its log, and ASTRA-sim's own."""
    found = ["astra-sim.log"]
    logs = path / "log"
    if logs.is_dir() and not logs.is_symlink():
        names = [entry.name for entry in logs.iterdir()]
        if all(_LOG.fullmatch(name) for name in names):
            found.append(logs.name)
    return found


_LOG = re.compile(r"(log|err)(\.\d+)?\.log")  # astra-sim/common/Logging.cc: they rotate


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


def manifest_in(storage: Storage) -> dict[str, Any] | None:
    """The manifest of an output of ours; None if there is none."""
    try:
        sizes = storage.sizes()
        if sizes.get(MANIFEST, 0) > (1 << 24) + (len(sizes) << 10):  # far too large for its files
            return None
        found = from_json(storage.read(MANIFEST), storage.address)
    except (OSError, UserError):
        return None
    return found if isinstance(found, dict) and "stagewright" in found else None  # pyright: ignore


def leftovers(path: Path) -> Generator[Path]:
    """Directories that stopped runs have left beside `path`, and in which no run is writing.

    Each is locked until the next is asked for, so that no run begins to write in it.
    """
    for folder in sorted(path.parent.glob(f".{glob.escape(path.name)}.partial-*")):
        lock = _lock(folder, alone=True)
        if lock is not None:
            try:
                yield folder
            finally:
                os.close(lock)


def _clear(path: Path) -> None:
    """Remove what killed runs have left that nobody goes on with: no run of `--resume`."""
    for folder in leftovers(path):
        if _ALONE.fullmatch(folder.name.removeprefix(f".{path.name}.")):
            shutil.rmtree(folder, ignore_errors=True)


_ALONE = re.compile(r"partial-[0-9a-f]{12}-\d+(-\d+)?")


def _own_folder(path: Path, name: str) -> tuple[Path, int | None]:
    """A new directory and its lock."""
    while True:
        folder = new_sibling(path, f"partial-{name}-{os.getpid()}")
        lock = _lock(folder, alone=True, patience=PATIENCE)
        if _is_at(folder, lock):
            return folder, lock
        if lock is not None:  # a run that cleared up took it for a leftover
            os.close(lock)


def _shared_folder(path: Path, name: str) -> tuple[Path, int | None]:
    """The directory of all who write this output and a lock; a leftover of it becomes it."""
    folder = path.with_name(f".{path.name}.partial-{name}")
    if not folder.exists():
        for left in leftovers(path):
            if left.name.startswith(f"{folder.name}-"):
                with suppress(OSError):  # another process was quicker
                    left.rename(folder)
    folder.mkdir(exist_ok=True)
    return folder, _lock(folder, alone=False, patience=PATIENCE)


def _lock(folder: Path, *, alone: bool, patience: float = 0) -> int | None:
    """Lock a directory until the process ends; None if it is in use, or cannot be locked."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if not _locked(file, alone=alone, patience=patience):
        os.close(file)
        return None
    return file


def _is_at(folder: Path, lock: int | None) -> bool:
    """Whether a directory is there; if it is locked, whether it is the one that was locked."""
    try:
        there = folder.stat()
    except FileNotFoundError:
        return False
    return lock is None or os.path.samestat(os.fstat(lock), there)


def _locked(file: int, *, alone: bool, patience: float) -> bool:
    """Lock an open file anew; whether that was possible within `patience` seconds.

    A process that waits holds no lock meanwhile: two that want to be alone do not block each other.
    """
    try:
        import fcntl
    except ImportError:
        return False
    how = (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        except OSError:
            return False
        else:
            return True


def new_sibling(path: Path, what: str) -> Path:
    """A new directory; one of that name may be left by a killed run, or be another machine's."""
    for nth in itertools.count():
        folder = path.with_name(f".{path.name}.{what}{f'-{nth}' if nth else ''}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def _rename(folder: Path, path: Path, force: bool) -> None:
    """Give the directory its name; an old one is removed only once the new one is in place.

    With `force`, what another run has put there meanwhile is an old one too.
    """
    while True:
        aside = None
        try:
            if force and path.exists():
                check_output(path, force)
                aside = new_sibling(path, f"old-{os.getpid()}")
                with suppress(FileNotFoundError):  # another run has moved it
                    path.rename(aside / path.name)
            folder.rename(path)
        except BaseException as error:
            if aside is not None:
                _put_back(aside, path)
            if not (force and _taken(error)):
                raise
        else:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            return


def _put_back(aside: Path, path: Path) -> None:
    """Give an old directory its name again, unless another run has put its own there."""
    old = aside / path.name
    if old.exists():
        try:
            old.rename(path)
        except OSError as error:
            if not _taken(error):
                raise
            shutil.rmtree(old)
    aside.rmdir()


def _taken(error: BaseException) -> bool:
    """Whether a directory could not be renamed because there is one of that name."""
    return isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)


def _remove_others(folder: int, names: Collection[str]) -> None:
    """Remove all files but those of these names from an open directory, whatever its name is."""
    for name in set(os.listdir(folder)) - set(names):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


# ---- object stores -------------------------------------------------------------------------------


@contextmanager
def _in_store(url: str, output: Output) -> Generator[Staging]:
    storage = ObjectStore(url)
    _check_store(storage, output)
    journal = Journal(storage, output.name)
    journal.flush(empty=True)  # names the output, should nobody complete it

    def publish(names: Collection[str]) -> None:
        """Remove the notes of the journal; the manifest is there already."""
        _remove_parts(storage)

    try:
        yield Staging(storage, journal, publish)
        if output.shared and MANIFEST in storage.sizes():
            _remove_parts(storage)  # of processes that did not know it was complete
    except BaseException:
        with suppress(OSError):
            if output.shared:
                journal.flush()
            else:
                storage.remove(filter(_OURS.fullmatch, storage.sizes()))
        raise


def _remove_parts(storage: Storage) -> None:
    storage.remove(name for name in storage.sizes() if name.startswith(PREFIX))


def _check_store(storage: Storage, output: Output) -> None:
    """Raise a UserError where an output must not be written; otherwise make room for it."""
    found = storage.sizes()
    if not found:
        return
    where = storage.address
    manifest = manifest_in(storage)
    listed: Any = (manifest or {}).get("files") or {}
    foreign = sorted(name for name in found if not _OURS.fullmatch(name) and name not in listed)
    if foreign or (MANIFEST in found and manifest is None):
        raise UserError(
            f"{where}: holds {(*foreign, MANIFEST)[0]}, which may be yours; remove it yourself"
        )
    parts = [name for name in found if name.startswith(PREFIX)]
    mine = any(name.startswith(f"{PREFIX}{output.name}-") for name in parts)
    if output.shared and mine and MANIFEST not in found:
        return
    if not output.force:
        what = "exists already" if MANIFEST in found else "holds what a stopped run has written"
        how = "" if MANIFEST in found else ", --resume with the same settings to go on with it"
        raise UserError(f"{where}: {what}; choose another name{how}, or --force to replace it")
    storage.remove([MANIFEST])
    storage.remove(found)
