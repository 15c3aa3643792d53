"""The archive of a bundle, as it is read.

Sizes in an archive are believed in proportion to its own, so that a small file cannot ask for all
the memory and time of a machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UserError
from stagewright.files import open_regular, refuse_half_characters

MAGIC = b"PK\x03\x04"
SEAL = b"sha256 of all before: "  # the archive's comment, and the end of the file
DIGEST = 64  # hexadecimal digits
CONTENTS = "contents.json"

MOST_BYTES = 1 << 30  # of a bundle
MOST_CONTENTS = 1 << 28  # bytes of contents.json
CONTENTS_RATIO = 40
"""Bytes of contents.json for each byte of the bundle; those that are written need 5 to 11."""
MOST_VALUES = 1 << 25  # strings, numbers, lists and objects in contents.json
NUMBERS_PER_BYTE = 16
"""Numbers in a column of all classes for each byte of the bundle; those that are written need at
most 8, with many thousand equal microbatches."""
FREE = 1 << 18  # bytes of contents.json, and numbers in a column, of even the smallest bundle


class Damage(Exception):
    """An archive that is not as it was written."""


def is_bundle(path: Path | str) -> bool:
    """True if a file begins as a bundle does."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a name that no file can have
        return False


class SealedArchive:
    """An archive with a right checksum, in memory."""

    def __init__(self, path: Path) -> None:
        """Read a file; `Damage` where it is not whole, UserError where it is no archive."""
        data = _sealed(path)
        self.size = len(data)
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(data))
        except _UNREADABLE as error:
            raise Damage(str(error)) from None

    @property
    def most_numbers(self) -> int:
        """The most numbers that a column of all classes together may have."""
        return FREE + NUMBERS_PER_BYTE * self.size

    def contents(self) -> Any:
        """The value in contents.json."""
        text = self._member(CONTENTS, min(MOST_CONTENTS, FREE + CONTENTS_RATIO * self.size))
        if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
            raise Damage(f"{CONTENTS} holds more than {MOST_VALUES} values")
        try:
            contents = json.loads(text)
            refuse_half_characters(text, contents)
            return contents
        except (ValueError, RecursionError) as error:
            raise Damage(f"{CONTENTS}: {error}") from None

    def column(self, member: str, length: int) -> NDArray[Any]:
        """The integers of a member, of which there must be `length`."""
        data = self._member(member, 8 * length + 4096)
        try:
            shape, dtype, at = _header(data)
        except (ValueError, TypeError, struct.error) as error:
            raise Damage(f"{member}: {error}") from None
        except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError):
            raise Damage(f"{member}: its header is no header of numpy") from None
        # Looked at before room is asked for: a header may name any shape.
        if shape != (length,) or dtype.kind not in "iu":
            raise Damage(f"{member} is {dtype}{list(shape)}, wanted {length} integers")
        if len(data) - at != length * dtype.itemsize:
            raise Damage(f"{member}: {len(data) - at} bytes for {length} numbers of {dtype}")
        return np.frombuffer(data, dtype, offset=at)

    def _member(self, name: str, limit: int) -> bytes:
        try:
            info = self._archive.getinfo(name)
            if info.compress_type not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
                raise Damage(f"{name} is not compressed with DEFLATE")
            if info.file_size > limit:
                raise Damage(f"{name} would have {info.file_size} bytes, wanted at most {limit}")
            data = self._archive.read(info)  # no more than it promises
        except _UNREADABLE as error:
            raise Damage(f"{name}: {error}") from None
        return data


_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, KeyError, ValueError, EOFError, struct.error,
    RuntimeError, OSError, OverflowError,
)  # fmt: skip
"""Exceptions of Python's reader of archives for those that are damaged, encrypted or of an unknown
kind."""


def _sealed(path: Path) -> bytes:
    """The bytes of a bundle with a right checksum."""
    try:
        with open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UserError(f"{path}: is no bundle; wanted what --format bundle writes")
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise UserError(f"{path}: over {MOST_BYTES} bytes; wanted a bundle")
            file.seek(0)
            data = file.read(size + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; wanted a bundle") from error
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{str(path)!a}: cannot be read: {error}; wanted a bundle") from error
    seal = data[:-DIGEST][-len(SEAL) :]
    digest = hashlib.sha256(memoryview(data)[:-DIGEST]).hexdigest()
    if seal != SEAL or digest.encode() != data[-DIGEST:]:
        raise Damage("its checksum differs from what was written")
    return data


def _header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and first byte of the array in a file of numpy's."""
    stream = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(stream)
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(stream)
    return shape, dtype, stream.tell()
