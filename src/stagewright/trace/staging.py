"""Outputs under construction: what is there already, what is new, and the end.

In a file system everything is written to a hidden sibling of the directory, which takes its name at
the very end: the directory either holds everything or does not exist, whatever stops the run. An
object store has no such renaming; there the manifest comes last, and what has none is not whole.

Whoever writes notes now and then, in a file of its own, which files are done and their checksums.
So a run that was stopped can be gone on with, and several processes can share one: whoever finds
that nothing is missing any more ends it.
"""

from __future__ import annotations

import errno
import glob
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from stagewright.errors import UserError
from stagewright.files import from_json, read_bytes
from stagewright.trace.manifest import MANIFEST, Done
from stagewright.trace.storage import Local, Place, Remote

NOTED = 1.0  # seconds between notes of what is done, at first
PATIENCE = 10.0  # seconds that the last of several waits for others to be done

_PART = ".part-"
_OURS = re.compile(
    r"workload\.\d+\.et|rank\.\d+\.(json|dot)|comm_group\.json|manifest\.json|\.part-.*"
)


class Output(NamedTuple):
    """Where an output goes, and how it is written."""

    name: str  # of what is written, as `manifest.identity` makes it
    force: bool  # replace what is there
    shared: bool  # go on with what others of the same name have written, and leave it to others


class Work(Protocol):
    """An output under construction."""

    @property
    def place(self) -> Place:
        """Where its files are written."""
        ...

    @property
    def journal(self) -> Journal:
        """What is done."""
        ...

    def publish(self, names: Collection[str]) -> None:
        """All is written: make it an output, of these files and no others."""
        ...


class Journal:
    """Which files of ranks are written: noted by every writer in files of its own."""

    def __init__(self, place: Place, name: str) -> None:
        """`name`: of the output."""
        self._place = place
        self._before = f"{_PART}{name}-"
        self._token = secrets.token_hex(4)
        self._pieces: list[Done] = []
        self._parts = 0
        self._began = self._flushed = time.monotonic()

    def note(self, done: Done) -> None:
        """Some files are written. They are told to others at growing intervals."""
        self._pieces.append(done)
        now = time.monotonic()
        if now - self._flushed >= max(NOTED, 0.02 * NOTED * (now - self._began)):
            self.flush()

    def flush(self, *, empty: bool = False) -> None:
        """Tell others what has been noted; `empty`: though it be nothing."""
        if self._pieces or empty:
            text = json.dumps(Done.joined(self._pieces).to_json())
            self._place.write(f"{self._before}{self._token}-{self._parts}.json", [text.encode()])
            self._parts += 1
            self._pieces = []
        self._flushed = time.monotonic()

    def read(self) -> Done:
        """What all writers have noted; what cannot be read has not been noted."""
        found: list[Done] = []
        for name in sorted(self._place.sizes()):
            if name.startswith(self._before) and name.endswith(".json"):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    found.append(Done.from_json(json.loads(self._place.read(name))))
        return Done.joined(found)


@contextmanager
def begun(out: str, output: Output) -> Generator[Work]:
    """An output to write; what is unfinished at the end vanishes, unless it is shared."""
    with _in_store(out, output) if "://" in out else _in_folder(Path(out), output) as work:
        yield work


# ---- file systems --------------------------------------------------------------------------------


class _Folder:
    """A hidden directory that will take another's name."""

    def __init__(self, folder: Path, path: Path, output: Output, lock: int | None) -> None:
        self._lock = lock
        self.place: Place = Local(folder, alone=not output.shared)
        self.journal = Journal(self.place, output.name)
        self._folder, self._path, self._force = folder, path, output.force

    def publish(self, names: Collection[str]) -> None:
        """Remove what does not belong to the output, and give it its name."""
        if self._lock is not None:
            _locked(self._lock, alone=True, patience=PATIENCE)
        self.place.remove(set(self.place.sizes()) - set(names))
        _rename(self._folder, self._path, self._force)
        # What others have begun to write since: of locks, not all file systems know.
        there = Local(self._path)
        there.remove(set(there.sizes()) - set(names))


@contextmanager
def _in_folder(path: Path, output: Output) -> Generator[Work]:
    check_place(path, output.force)
    folder = _common(path, output.name) if output.shared else _own(path, output.name)
    lock = _lock(folder, alone=not output.shared, patience=PATIENCE if output.shared else 0)
    work = _Folder(folder, path, output, lock)
    try:
        if lock is not None and not os.path.samestat(os.fstat(lock), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, "ended by another", str(folder))
        yield work
    except BaseException:
        if output.shared:
            with suppress(OSError):
                work.journal.flush()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if output.shared:
            with suppress(OSError):  # of what others had ended when it was made, or of no rank
                folder.rmdir()
        if lock is not None:
            os.close(lock)


def check_parent(path: Path) -> None:
    """Raise a UserError where nothing can be written beside `path`."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: directory {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write in {path.parent}")


def check_place(path: Path, force: bool) -> None:
    """Raise a UserError where `path` must not become an output."""
    check_parent(path)
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


def manifest_in(place: Place) -> dict[str, Any] | None:
    """The manifest of an output of ours; None: there is none."""
    try:
        found = from_json(place.read(MANIFEST), place.address)
    except (OSError, UserError):
        return None
    return found if isinstance(found, dict) and "stagewright" in found else None  # pyright: ignore


def leftovers(path: Path) -> list[Path]:
    """What runs that were stopped have left beside `path`, and nobody writes now."""
    found = sorted(path.parent.glob(f".{glob.escape(path.name)}.partial-*"))
    return [folder for folder in found if _idle(folder)]


def _idle(folder: Path) -> bool:
    lock = _lock(folder, alone=True)
    if lock is not None:
        os.close(lock)
    return lock is not None


def _own(path: Path, name: str) -> Path:
    return new_sibling(path, f"partial-{name}-{os.getpid()}")


def _common(path: Path, name: str) -> Path:
    """The directory of all who write this output; first what a run by itself has left of it."""
    folder = path.with_name(f".{path.name}.partial-{name}")
    if not folder.exists():
        for left in leftovers(path):
            if left.name.startswith(f"{folder.name}-"):
                with suppress(OSError):  # another was quicker
                    left.rename(folder)
    folder.mkdir(exist_ok=True)
    return folder


def _lock(folder: Path, *, alone: bool, patience: float = 0) -> int | None:
    """Lock a directory until the process ends; None where it is in use, or cannot be locked."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if not _locked(file, alone=alone, patience=patience):
        os.close(file)
        return None
    return file


def _locked(file: int, *, alone: bool, patience: float) -> bool:
    """Lock an open file anew; whether it could be done within some seconds.

    Who waits has no lock meanwhile: two who want to be alone do not wait for each other.
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
    """An empty directory. One that has its name already is a killed run's, or another machine's."""
    for nth in itertools.count():
        folder = path.with_name(f".{path.name}.{what}{f'-{nth}' if nth else ''}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def _rename(folder: Path, path: Path, force: bool) -> None:
    """Give the directory its name; an old one is removed only once the new one is in place."""
    if not force or not path.exists():
        folder.rename(path)
        return
    aside = new_sibling(path, f"old-{os.getpid()}")
    old = aside / path.name
    try:
        path.rename(old)
        folder.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


# ---- object stores -------------------------------------------------------------------------------


class _Store:
    """A folder of an object store, which is an output once it has a manifest."""

    def __init__(self, place: Place, output: Output) -> None:
        self.place = place
        self.journal = Journal(place, output.name)

    def publish(self, names: Collection[str]) -> None:
        """Remove what does not belong to the output."""
        _remove_parts(self.place)


@contextmanager
def _in_store(url: str, output: Output) -> Generator[Work]:
    place = Remote(url)
    _check_store(place, output)
    work = _Store(place, output)
    work.journal.flush(empty=True)  # says whose files these are, should nobody end this
    try:
        yield work
        if output.shared and MANIFEST in place.sizes():
            _remove_parts(place)  # of who did not know that all was there
    except BaseException:
        with suppress(OSError):
            if output.shared:
                work.journal.flush()
            else:
                place.remove(filter(_OURS.fullmatch, place.sizes()))
        raise


def _remove_parts(place: Place) -> None:
    place.remove(name for name in place.sizes() if name.startswith(_PART))


def _check_store(place: Place, output: Output) -> None:
    """Raise a UserError where an output must not be written; make room for it where it may."""
    found = place.sizes()
    if not found:
        return
    where = place.address
    manifest = manifest_in(place)
    listed: Any = (manifest or {}).get("files") or {}
    foreign = sorted(name for name in found if not _OURS.fullmatch(name) and name not in listed)
    if foreign or (MANIFEST in found and manifest is None):
        raise UserError(
            f"{where}: holds {(*foreign, MANIFEST)[0]}, which may be yours; remove it yourself"
        )
    parts = [name for name in found if name.startswith(_PART)]
    mine = any(name.startswith(f"{_PART}{output.name}-") for name in parts)
    if output.shared and mine and MANIFEST not in found:
        return
    if not output.force:
        what = "exists already" if MANIFEST in found else "holds what a stopped run has written"
        how = "" if MANIFEST in found else ", --resume with the same settings to go on with it"
        raise UserError(f"{where}: {what}; choose another name{how}, or --force to replace it")
    place.remove([MANIFEST])
    place.remove(found)
