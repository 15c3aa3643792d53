"""Traces of PyTorch's profiler: files, archives and folders become `RankTrace`s.

Kineto writes one JSON object, whose `traceEvents` have nearly all of its bytes. It is read event by
event from pieces of the text, so memory holds what is kept and not the file. Kept are kernels, the
calls that launch or wait, the ops around these calls, and annotations; Python frames, instants and
flows are passed over. Files may be compressed, or members of an archive; what a file is, its first
bytes tell, not its name.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.recorded.events import TraceEvents
from stagewright.recorded.kernels import describe_kernels
from stagewright.recorded.perfetto import perfetto_events
from stagewright.recorded.rank import RankTrace
from stagewright.recorded.ranks import as_ranks

WANTED = "a trace of PyTorch's profiler in Kineto's JSON"
MOST_BYTES = 4 << 30
"""Bytes of JSON of a file, decompressed: a minute's reading. A step rarely has a tenth of it."""
MOST_VALUE = 64 << 20
"""Characters of one event, or of one entry beside the events."""
PIECE = 1 << 20
SUFFIXES = (".json", ".json.gz", ".pftrace", ".perfetto-trace")
"""Names of the files that are read in a folder or an archive."""

_SPACE = re.compile(r"[\s,]*")


def read_traces(
    paths: Sequence[str | Path], step: int | None = None, annotation: str | None = None
) -> list[RankTrace]:
    """Read the ranks of a job by ascending rank, cut to a step or to an annotation.

    `paths`: a file, an archive or a folder each. Every error is a UserError that names the file.
    """
    if not paths:
        raise UserError(f"no trace; wanted {WANTED}, or a folder of these")
    name = f"ProfilerStep#{step}" if step is not None else annotation
    traces: list[RankTrace] = []
    for path in paths:
        for label, stream in _files(Path(path)):
            events = _read_events(label, stream)
            trace = events.trace(name)
            if trace.kernels:
                traces.append(describe_kernels(trace))
            elif len(paths) == 1 and not traces:
                raise UserError(_no_kernels(label, events, name))
    if not traces:
        raise UserError(
            f"{paths[0]}: no kernels; wanted {WANTED}, recorded with ProfilerActivity.CUDA"
        )
    return as_ranks(traces)


def _no_kernels(label: str, events: TraceEvents, window: str | None) -> str:
    """The message for a trace without kernels."""
    if events.kernels:
        return f"{label}: no kernels were launched in {window!r}; name another step or annotation"
    return f"{label}: no kernels; wanted a trace recorded with ProfilerActivity.CUDA"


def is_trace(path: str | Path) -> bool:
    """Return True for a file, an archive or a folder with a trace, judged by its content."""
    try:
        return any(_is_kineto(stream) for _, stream in _files(Path(path)))
    except (UserError, OSError):
        return False


# ---- files ---------------------------------------------------------------------------------------


def _named_as_trace(name: str) -> bool:
    return name.endswith(SUFFIXES) and not Path(name).name.startswith(".")


def _files(path: Path) -> Iterator[tuple[str, io.BufferedReader]]:
    """Label and decompressed bytes of each trace that a path leads to."""
    if path.is_dir():
        members = sorted(file for file in path.iterdir() if _named_as_trace(file.name))
        if not members:
            raise UserError(f"{path}: no {', '.join(SUFFIXES[:2])} in this folder; wanted {WANTED}")
        for member in members:
            # Beside the traces there may be others, such as a manifest.
            yield from ((label, file) for label, file in _files(member) if _is_kineto(file))
        return
    try:
        with open_regular(path) as file:
            content = _decompressed(file)
            if _is_tar(content):
                yield from _members(str(path), content)
            elif path.stat().st_size > MOST_BYTES:
                raise _too_large(str(path))
            else:
                yield str(path), content
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decompressed(file: IO[bytes]) -> io.BufferedReader:
    """The content of a file, decompressed if it is gzip."""
    stream = cast("io.BufferedReader", file)
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(cast("Any", _Gzip(fileobj=stream)), 1 << 16)
    return stream


class _Gzip(gzip.GzipFile):
    """Compressed file that repeats its error: after a cut header, gzip reads on as if empty."""

    _error: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes; every error is kept."""
        if self._error is not None:
            raise self._error
        try:
            return super().read(size)
        except (OSError, EOFError, zlib.error) as error:
            self._error = error
            raise


def _is_tar(content: io.BufferedReader) -> bool:
    return _peek(content)[257:262] == b"ustar"


def _is_kineto(content: io.BufferedReader) -> bool:
    """Return True if a file begins as a trace does; also a damaged one, which reading refuses."""
    head = _peek(content)
    return not head or _is_perfetto(head) or b'"traceEvents"' in head or b'"schemaVersion"' in head


def _is_perfetto(head: bytes) -> bool:
    """Return True for the first bytes of Perfetto's messages: a key of field 1, no JSON after."""
    return head[:1] == b"\x0a" and head.lstrip()[:1] not in (b"{", b"[", b"")


def _peek(content: io.BufferedReader) -> bytes:
    """The first bytes; none of damaged ones: reading says what is wrong."""
    try:
        return content.peek(1 << 16)
    except (OSError, EOFError, zlib.error):
        return b""


def _members(label: str, content: io.BufferedReader) -> Iterator[tuple[str, io.BufferedReader]]:
    """The traces in an archive."""
    found = False
    try:
        with tarfile.open(fileobj=content, mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is not None and _named_as_trace(member.name):
                    found = True
                    yield f"{label}:{member.name}", _decompressed(stream)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{label}: the archive is damaged: {error}") from None
    if not found:
        raise UserError(f"{label}: no {', '.join(SUFFIXES[:2])} in this archive; wanted {WANTED}")


# ---- JSON ----------------------------------------------------------------------------------------


def _too_large(label: str) -> UserError:
    return UserError(
        f"{label}: over {MOST_BYTES >> 30} GiB of JSON; wanted fewer steps, or a recording without "
        "stacks (with_stack=False)"
    )


class _Text:
    """JSON text read in pieces, with the place up to which it is parsed."""

    def __init__(self, label: str, stream: IO[bytes]) -> None:
        self.label = label
        self._stream = stream
        self._decoder = json.JSONDecoder(strict=False)
        # Names of kernels may be cut within a character.
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._buffer, self._at, self._size = "", 0, 0

    def _more(self) -> bool:
        """Read another piece, as long as what is not parsed; False at the end of the file."""
        rest = self._buffer[self._at :]
        try:
            content = self._stream.read(max(PIECE, len(rest)))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{self.label}: cannot be decompressed: {error}") from None
        self._size += len(content)
        if self._size > MOST_BYTES:
            raise _too_large(self.label)
        self._buffer, self._at = rest + self._decode(content, final=not content), 0
        return bool(content)

    def peek(self) -> str:
        """The next character that is neither blank nor comma; "": the end."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # pyright: ignore
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def skip(self, character: str) -> None:
        """Pass over a character that must come next."""
        if self.peek() != character:
            raise self.damaged(f"wanted {character!r}")
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or not self._more():
                    self._at = end
                    return value
            except RecursionError:
                raise self.damaged("nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._at > MOST_VALUE:
                    raise self.damaged(error.msg) from None
                if not self._more():
                    raise self.damaged("the file is cut, or no JSON") from None
            except ValueError:  # Python refuses to read such a number
                raise self.damaged("a number of thousands of digits") from None

    @property
    def place(self) -> int:
        """Character up to which the text is parsed, about."""
        return self._size - len(self._buffer) + self._at

    def damaged(self, why: str) -> UserError:
        """The error for text that is no JSON."""
        return UserError(f"{self.label}: {why}, near character {self.place:,}; wanted {WANTED}")


def _read_events(label: str, stream: io.BufferedReader) -> TraceEvents:
    """Everything that is kept of one file."""
    if _is_perfetto(_peek(stream)):
        return TraceEvents.of(label, {}, perfetto_events(label, stream))
    text = _Text(label, stream)
    header: dict[str, Any] = {}
    events = TraceEvents(label, header)
    first = text.peek()
    if first == "[":  # a list of events alone is a trace of Chrome, too
        _read_list(text, events)
        return events
    if first != "{":
        empty = "the file has nothing but blanks" if text.place else "the file is empty"
        raise text.damaged("is no JSON object" if first else empty)
    text.skip("{")
    found = False
    while text.peek() != "}":
        if not text.peek():
            raise text.damaged("the file is cut")
        key = text.value()
        text.skip(":")
        if key == "traceEvents" and text.peek() == "[":
            found = True
            _read_list(text, events)
        else:
            header[str(key)] = text.value()
    if not found:
        hint = " (it is an execution trace: give the Kineto file beside it)" * ("nodes" in header)
        raise UserError(f"{label}: has no traceEvents{hint}; wanted {WANTED}")
    return events


def _read_list(text: _Text, events: TraceEvents) -> None:
    text.skip("[")
    while (character := text.peek()) != "]":
        if not character:
            raise text.damaged("the file is cut")
        event = text.value()
        if isinstance(event, dict):
            events.add(cast("dict[str, Any]", event))
    text.skip("]")
