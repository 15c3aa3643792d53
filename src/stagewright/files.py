"""Reads files from untrusted sources, such as run files and models; writes files atomically.

Reading any file takes little time and memory: only regular files are opened (`open_regular`), sizes
are limited, a key may not come twice, and YAML's aliases, nine levels of which make a billion
values, are refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from stagewright.errors import UserError
from stagewright.printable import escaped_controls

MOST_BYTES = 1 << 18
"""Size limit of YAML files: Python's reader takes some 0.2 MB a second."""
MOST_HEAD = 1 << 20
"""Size limit of a manifest without its list of files."""


def read_bytes(path: Path | str, wanted: str, limit: int = MOST_BYTES) -> bytes:
    """The bytes of a file of at most `limit` bytes.

    `wanted` describes the file for errors: `a run file in YAML`.
    """
    content = _head(path, wanted, limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: over {limit} bytes; wanted {wanted}")
    return content


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises OSError for anything else, with the kind of file as its `strerror`: a named pipe keeps
    its reader waiting, and a device may never end.
    """
    return _open(path, pipes=False)


def _open(path: Path | str, *, pipes: bool) -> BufferedReader:
    """Open a regular file; if `pipes`, also a pipe of the shell, as in `--config <(...)`."""
    pipes = pipes and os.path.dirname(path) in _DESCRIPTORS
    _refuse_irregular(os.stat(path).st_mode, path, pipes)
    # The path may have changed since: opening a pipe must not wait for a writer.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _refuse_irregular(os.fstat(file).st_mode, path, pipes)
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(file, True)
        return open(file, "rb")
    except BaseException:
        os.close(file)
        raise


_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")

_KINDS = {
    stat.S_IFDIR: (errno.EISDIR, "Is a directory, not a file"),
    stat.S_IFIFO: (errno.EINVAL, "Is a named pipe, not a file"),
    stat.S_IFCHR: (errno.EINVAL, "Is a device, not a file"),
    stat.S_IFBLK: (errno.EINVAL, "Is a device, not a file"),
    stat.S_IFSOCK: (errno.EINVAL, "Is a socket, not a file"),
}


def _refuse_irregular(mode: int, path: Path | str, pipes: bool) -> None:
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return
    code, words = _KINDS.get(stat.S_IFMT(mode), (errno.EINVAL, "Is not a file"))
    raise OSError(code, words, str(path))


def _head(path: Path | str, wanted: str, size: int) -> bytes:
    """The first bytes of a file."""
    try:
        with _open(path, pipes=True) as stream:
            return stream.read(size)
    except OSError as error:
        named = path if str(path) else "''"
        raise UserError(f"{named}: cannot be read: {error.strerror}; wanted {wanted}") from None
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{str(path)!a}: cannot be read: {error}; wanted {wanted}") from None


def read_text(path: Path | str, wanted: str, limit: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8; arguments as of `read_bytes`."""
    try:
        return read_bytes(path, wanted, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8; wanted {wanted}") from None


def from_json(text: str | bytes, where: object, *, constants: bool = False) -> Any:
    """Parse JSON whose objects have each key once; `where` is the file, for errors.

    With `constants`, NaN and Infinity are numbers, as Python's json writes them.

    >>> from_json('{"tp": 8}', "run.json")
    {'tp': 8}
    """
    try:
        parse_constant = float if constants else _no_number
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=parse_constant)
        refuse_half_characters(text, value)
        return value
    except RecursionError:
        raise UserError(f"{where}: nested too deep; wanted plain JSON") from None
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None


def manifest_head(path: Path | str, wanted: str) -> Any:
    """Read a JSON file; of a manifest with a long list of files, the part before that list."""
    content = _head(path, wanted, MOST_HEAD + 1)
    if len(content) > MOST_HEAD:
        head, cut, _ = content.partition(b',\n  "files": {\n')
        if not cut:
            raise UserError(f"{path}: over {MOST_HEAD} bytes; wanted {wanted}")
        content = head + b"}"
    return from_json(content, path)


def refuse_half_characters(text: str | bytes, value: Any) -> None:
    r"""Raise ValueError where a value has half of a character, which no file in UTF-8 can hold.

    `text` is what the value was read from. JSON and YAML write such halves as `\ud800`.
    """
    escape = b"\\" if isinstance(text, bytes) else "\\"
    if escape not in text:  # pyright: ignore[reportOperatorIssue]
        return
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isprintable() and any("\ud800" <= c <= "\udfff" for c in item):
                raise ValueError(f"{item[:40]!a} has half of a character; write all of it")
        elif isinstance(item, dict):
            stack += (part for pair in cast("dict[Any, Any]", item).items() for part in pair)
        elif isinstance(item, list | tuple | set):
            stack += cast("list[Any]", item)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:40]!a} comes twice; keep one")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON's")


def from_yaml(text: str, where: object) -> Any:
    """Parse YAML of plain types; `where` is the file, for errors.

    Numbers with colons are text: YAML 1.1 reads `1:8` as 68, where people mean 1 to 8.

    >>> from_yaml("tp: 8", "run.yaml"), from_yaml("tp: 1:8", "run.yaml")
    ({'tp': 8}, {'tp': '1:8'})
    """
    try:
        value = yaml.load(text, _Loader)
        refuse_half_characters(text, value)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{place}: {error.problem}; wanted YAML such as tp: 8") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep; wanted YAML such as tp: 8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not YAML: {error}; wanted YAML such as tp: 8") from None
    except (LookupError, AttributeError, TypeError):  # of yaml's own constructors
        raise UserError(
            f"{where}: a tag such as !!int stands before another value; wanted YAML such as tp: 8"
        ) from None


def own_yaml(text: str) -> Any:
    """Parse YAML of the package's data, which can be trusted: in a sixth of the time."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Patterns of plain words by tag: those of YAML 1.1, without numbers that have a colon."""
    numbers = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}

    def without_colon(tag: str, pattern: re.Pattern[str]) -> tuple[str, re.Pattern[str]]:
        if tag not in numbers:
            return tag, pattern
        return tag, re.compile(f"(?![^:]*:){pattern.pattern}", pattern.flags)

    known: Any = yaml.SafeLoader.yaml_implicit_resolvers
    return {
        first: [without_colon(*resolver) for resolver in resolvers]
        for first, resolvers in known.items()
    }


class _Loader(yaml.SafeLoader):  # not CSafeLoader: deep nesting ends the process
    """SafeLoader that refuses aliases and repeated keys, and knows no numbers to the base 60."""

    yaml_implicit_resolvers = _resolvers()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # pyright: ignore
            event = cast(yaml.Event, self.peek_event())  # pyright: ignore
            raise yaml.constructor.ConstructorError(
                problem="an alias, which is not followed; write the value again",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)  # pyright: ignore

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        value: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(value) < len(node.value):
            names: list[object] = [key.value for key, _ in node.value]
            index = next((n for n, name in enumerate(names) if name in names[:n]), 0)
            raise yaml.constructor.ConstructorError(
                problem=f"{names[index]} comes twice; keep one",
                problem_mark=node.value[index][0].start_mark,
            )
        return value


def check_parent(path: Path) -> None:
    """Raise a UserError if the directory of `path` takes no new files."""
    if not path.parent.is_dir():
        raise UserError(f"{path}: directory {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write in {path.parent}")


def exists_already(path: object) -> UserError:
    """Error of an output that would replace another."""
    return UserError(f"{path}: exists already; choose another name, or --force to replace it")


def check_output_file(path: Path | str, *, force: bool) -> None:
    """Raise a UserError if a file cannot be written, or would replace one without `force`."""
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a directory; wanted the name of a file")
        if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
            return  # a pipe or a terminal
        check_parent(path)
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{str(path)!a}: cannot be written: {error}") from None
    if os.path.lexists(path) and not force:
        raise exists_already(path)


def check_can_be_written(path: Path | str) -> None:
    """Raise a UserError if the directory takes no file of this name, by creating one.

    Permissions do not tell for `/proc`, for a read-only disk, or for a long name.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a terminal
        return
    temporary = _temporary(path)
    try:
        temporary.touch()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _temporary(path: Path) -> Path:
    """The temporary file that becomes `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


_renames: list[tuple[Path, Path]] | None = None
"""Temporary files and what each becomes at the end of `replaced_together`."""


@contextmanager
def replaced_together() -> Generator[None]:
    """Rename the files that `atomic` writes in this block at its end: all are new, or all old."""
    global _renames
    _renames = []
    try:
        yield
        for temporary, path in _renames:
            _replace(temporary, path)
    finally:
        for temporary, _ in _renames:
            with suppress(OSError):
                temporary.unlink()
        _renames = None


def _replace(temporary: Path, path: Path) -> None:
    try:
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def atomic(path: Path | str) -> Generator[Path]:
    """A temporary file to write to, renamed to `path` on success and removed on failure."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, a terminal, or a folder, which fails
            yield path
            return
        yield temporary
        if _renames is not None:
            _renames.append((temporary, path))
            return
        _replace(temporary, path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            check_parent(path)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if _renames is None or (temporary, path) not in _renames:
            with suppress(OSError):
                temporary.unlink()


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically, without control characters but tabs and the ends of lines."""
    with atomic(path) as temporary:
        temporary.write_text(escaped_controls(text), encoding="utf-8")
