"""Directories of traces under construction: written beside their final name, then renamed.

A directory holds everything or does not exist, whatever stops the run. Of several runs that replace
one directory at the same time, it holds what the last one wrote.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from stagewright.errors import UserError
from stagewright.files import check_parent, exists_already, from_json, read_bytes
from stagewright.trace.manifest import MANIFEST, WrittenFile


@contextmanager
def staged(path: Path, force: bool) -> Generator[Path]:
    """A new directory, which is renamed to `path` at the end of the block, or removed on an error.

    With `force` it replaces a directory of traces, and what killed runs have left beside it goes.
    """
    check_output(path, force)
    folder, lock = _new_folder(path)
    try:
        yield folder
        _rename(folder, path, force)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    if force:
        for left in leftovers(path):
            shutil.rmtree(left, ignore_errors=True)


def write_file(
    folder: Path, name: str, pieces: Iterable[bytes | memoryview], *, shared: bool = False
) -> WrittenFile:
    """Write a file, or replace it; on an error there is no new file.

    With `shared`, other machines may write the same file: it is written under another name first.
    """
    path = f"{folder}/{name}"
    temporary = f"{folder}/.{name}.{secrets.token_hex(4)}" if shared else path
    size, digest = 0, hashlib.sha256()
    try:
        with open(temporary, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                digest.update(view)
                done = 0
                while done < len(view):
                    done += file.write(view[done:])
                size += len(view)
        if shared:
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return WrittenFile(name, size, digest.hexdigest())


# ---- what may be replaced ------------------------------------------------------------------------


def check_output(path: Path, force: bool) -> None:
    """Raise a UserError where `path` must not become a directory of traces."""
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
    """Device and inode of a file or directory; None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _not_ours(path: Path) -> str | None:
    """Why `--force` refuses this path: Stagewright did not write all that is in it."""
    if not path.is_dir():
        return "is a file, and --force replaces directories only"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return None
    listed = _listed_files(path, len(names))
    if listed is None:
        return f"has no {MANIFEST} of Stagewright's, so it may be yours"
    ours = {MANIFEST, *listed, *(_simulator_logs(path) if _RUNNER in listed else ())}
    other = next((name for name in names if name not in ours), None)
    return None if other is None else f"holds {other}, which Stagewright did not write"


_RUNNER = "astra-sim.sh"  # of the files that `stagewright.time.astra_sim.configuration_files` makes


def _simulator_logs(path: Path) -> list[str]:
    """Logs that the script which runs the traces leaves beside them."""
    names = ["astra-sim.log"]
    logs = path / "log"
    is_folder = logs.is_dir() and not logs.is_symlink()
    if is_folder and all(_LOG.fullmatch(entry.name) for entry in logs.iterdir()):
        names.append(logs.name)
    return names


_LOG = re.compile(r"(log|err)(\.\d+)?\.log")  # astra-sim/common/Logging.cc: they rotate


def _listed_files(path: Path, entries: int) -> Mapping[str, object] | None:
    """The files that the manifest in a directory lists; None if Stagewright wrote no manifest."""
    try:
        limit = (1 << 24) + (entries << 10)
        manifest = from_json(read_bytes(path / MANIFEST, "a manifest", limit), path / MANIFEST)
    except UserError:
        return None
    if not isinstance(manifest, dict) or "stagewright" not in manifest:
        return None
    files = cast("dict[str, object]", manifest).get("files")
    return cast("dict[str, object]", files) if isinstance(files, dict) else {}


# ---- temporary directories -----------------------------------------------------------------------


def leftovers(path: Path) -> Generator[Path]:
    """Directories that killed runs have left beside `path`.

    Each is locked until the next is asked for, so that no run begins to write in it.
    """
    for folder in sorted(path.parent.glob(f".{glob.escape(path.name)}.partial-*")):
        if not _PARTIAL.fullmatch(folder.name.removeprefix(f".{path.name}.")):
            continue
        lock = _lock(folder, wait=False)
        if lock is not None:
            try:
                yield folder
            finally:
                os.close(lock)


_PARTIAL = re.compile(r"partial-\d+(-\d+)?")


def _new_folder(path: Path) -> tuple[Path, int | None]:
    """A new directory beside `path`, and the lock that says that a run is writing in it."""
    while True:
        folder = _new_sibling(path, f"partial-{os.getpid()}")
        lock = _lock(folder, wait=True)
        with suppress(FileNotFoundError):
            status = folder.stat()
            if lock is None or os.path.samestat(os.fstat(lock), status):
                return folder, lock
        if lock is not None:  # a run that cleared up took it for a leftover
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a directory until its descriptor is closed; None if it is in use or cannot be locked."""
    try:
        import fcntl

        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _new_sibling(path: Path, suffix: str) -> Path:
    """A new directory; one of that name may be left by a killed run, or be another machine's."""
    for number in itertools.count():
        folder = path.with_name(f".{path.name}.{suffix}{f'-{number}' if number else ''}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def _rename(folder: Path, path: Path, force: bool) -> None:
    """Give the directory its name; an old one is removed only once the new one is in place.

    With `force`, what another run has put there meanwhile is an old one too.
    """
    while True:
        old = None
        try:
            if force and path.exists():
                check_output(path, force)
                old = _new_sibling(path, f"old-{os.getpid()}")
                with suppress(FileNotFoundError):  # another run has moved it
                    path.rename(old / path.name)
            folder.rename(path)
        except BaseException as error:
            if old is not None:
                _put_back(old, path)
            if not (force and _is_taken(error)):
                raise
        else:
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
            return


def _put_back(old: Path, path: Path) -> None:
    """Give an old directory its name again, unless another run has put its own there."""
    moved = old / path.name
    if moved.exists():
        try:
            moved.rename(path)
        except OSError as error:
            if not _is_taken(error):
                raise
            shutil.rmtree(moved)
    old.rmdir()


def _is_taken(error: BaseException) -> bool:
    """True where a directory could not be renamed because there is one of that name."""
    return isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
