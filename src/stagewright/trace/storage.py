"""Storage for files: a directory, or an object store that fsspec reaches.

A file that is written is there whole or not at all, and the same name may be written twice: several
processes that write one file leave one whole file.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from stagewright.errors import UserError
from stagewright.files import open_regular

PAGE = 4096  # what direct writes must be aligned to, in memory and in the file

_DIRECT = 1 << 20  # bytes from which on a piece is written directly
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}  # how file systems say that they cannot


class WrittenFile(NamedTuple):
    """A file that has been written."""

    name: str
    size: int  # bytes
    sha256: str

    def entry(self) -> dict[str, object]:
        """The entry of the file in a manifest."""
        return {"bytes": self.size, "sha256": self.sha256}


class Storage(Protocol):
    """A directory of files, on this machine or elsewhere."""

    @property
    def address(self) -> str:
        """The path or URL from which `storage_at` makes the same storage in another process."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
        """Write a file, or replace it."""
        ...

    def read(self, name: str) -> bytes:
        """A whole file."""
        ...

    def digest(self, name: str) -> str | None:
        """The SHA-256 of a file as it is stored; None if it is not there."""
        ...

    def sizes(self) -> dict[str, int]:
        """The names of all files and their bytes."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, whether they are there or not."""
        ...


def storage_at(address: str) -> Storage:
    """The directory at a path or an fsspec URL such as `s3://bucket/run`."""
    return ObjectStore(address) if "://" in address else LocalFolder(Path(address))


class LocalFolder:
    """A directory of this machine, or one that it shares with others."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        """`folder` exists. `alone`: nobody else reads it, so files need not appear whole."""
        self.folder = folder
        self.address = str(folder)
        # Part of a file's name until it is whole, different for every writer.
        self._token = "" if alone else secrets.token_hex(4)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
        """Write under another name, then rename."""
        path = f"{self.address}/{name}"
        temporary = f"{self.address}/.{name}.{self._token}" if self._token else path
        size, digest = 0, hashlib.sha256()
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    digest.update(view)
                    done = 0 if size else _write_directly(file, view)
                    size += len(view)
                    while done < len(view):
                        done += os.write(file, view[done:])
            finally:
                os.close(file)
            if temporary != path:
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return WrittenFile(name, size, digest.hexdigest())

    def read(self, name: str) -> bytes:
        """A whole file."""
        with open_regular(self.folder / name) as file:
            return file.read()

    def digest(self, name: str) -> str | None:
        """The SHA-256 of a file; None if it is not there."""
        try:
            with open_regular(self.folder / name) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """The names of all files and their bytes."""
        found: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has just renamed it
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An array of bytes that can be written directly."""
    buffer = np.empty(size + PAGE, np.uint8)
    start = -buffer.ctypes.data % PAGE
    return buffer[start : start + size]


def _write_directly(file: int, view: memoryview) -> int:
    """Write the whole pages of a large piece past the page cache; returns how many bytes.

    The cache costs a copy and, where it grows, fresh pages: several times the processor's time, and
    less speed than the disk has.
    """
    flag = getattr(os, "O_DIRECT", 0)
    whole = len(view) // PAGE * PAGE
    if not flag or whole < _DIRECT:
        return 0
    if np.frombuffer(view, np.uint8).ctypes.data % PAGE:
        return 0
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag)
        done = 0
        while done < whole:
            done += os.write(file, view[done:whole])
            if done % PAGE:  # a nearly full disk: the next plain write raises the error
                break
        return done
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return os.lseek(file, 0, os.SEEK_CUR)
        raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


class ObjectStore:
    """A folder of an object store, or of anything that fsspec reaches. Objects appear whole."""

    def __init__(self, url: str) -> None:
        """`url`: a protocol that fsspec knows, and a path."""
        try:
            fsspec: Any = importlib.import_module("fsspec")
        except ImportError:
            raise UserError(
                f"{url}: needs the package fsspec and the one for its protocol, such as s3fs; "
                "install stagewright[remote]"
            ) from None
        self.address = url.rstrip("/")
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}") from None
        self._fs, self._root = found

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
        """One request for the whole object, which the store makes visible when it has it all."""
        data = b"".join(pieces)
        try:
            self._fs.pipe_file(self._path(name), data)
        except FileNotFoundError:  # no store, but a file system that wants its folders made
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path(name), data)
        return WrittenFile(name, len(data), hashlib.sha256(data).hexdigest())

    def read(self, name: str) -> bytes:
        """A whole object."""
        return self._fs.cat_file(self._path(name))

    def digest(self, name: str) -> str | None:
        """The SHA-256 of an object; None if it is not there."""
        try:
            return hashlib.sha256(self.read(name)).hexdigest()
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """The names of all objects of the folder and their bytes."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry["type"] == "file")
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in files}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
