"""Requests that were recorded: Mooncake's and Azure's traces, any JSONL or CSV with such columns.

What a row cannot be understood as is an error that names its line. A row that is understood but is
no request (no tokens, a time that is negative) is left out and counted, by reason.
"""

from __future__ import annotations

import csv
import io
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError, either
from stagewright.files import from_json, read_bytes
from stagewright.run.sections.declare import LARGEST
from stagewright.serving.workload import NO_CHAIN, Chain, Workload, folded

MOST_BYTES = 1 << 30
BLOCK = 512
"""Tokens of a block of Mooncake's `hash_ids` (kvcache-ai/Mooncake, FAST25-release/traces)."""
WANTED = "a trace of requests in JSONL or CSV"

NO_TOKENS = "no prompt tokens, or no output tokens"
NEGATIVE = "a time before the trace begins"

_TIMES = {
    **{"arrival": 1.0, "arrived_at": 1.0, "arrival_time": 1.0, "TIMESTAMP": 1.0},
    **{"timestamp": 1e-3, "timestamp_ms": 1e-3},
}
"""Names of the column of arrival: seconds of one (Mooncake's `timestamp` is in ms)."""
_PROMPTS = (
    *("prompt", "isl", "input_length", "input_tokens", "prompt_tokens", "num_prefill_tokens"),
    *("input_toks", "ContextTokens"),
)
_OUTPUTS = (
    *("output", "osl", "output_length", "output_tokens", "completion_tokens", "num_decode_tokens"),
    *("output_toks", "GeneratedTokens"),
)
_SESSIONS = ("session", "session_id", "chat_id")


class TraceRow(NamedTuple):
    """Request of a trace."""

    at: float
    """Seconds, since some moment."""
    prompt: int
    output: int
    chain: Chain
    session: str


def read(path: str | Path, *, speed: float = 1.0, limit: int | None = None) -> Workload:
    """The requests of a trace, by arrival; a name that ends in .gz is a compressed one.

    Times begin with 0 at the first request; with `speed` 2 requests come twice as fast. Raises
    UserError for what is no trace, with the line.
    """
    if not 0 < speed < math.inf:
        raise UserError(f"--speed is {speed:g}, wanted a number above 0; 2 is twice as fast")
    text = text_of_trace(path)
    rejected: Counter[str] = Counter()
    rows: list[TraceRow] = []
    for where, cells in cells_of_trace(text, path):
        row = row_of_trace(cells, where)
        if row.prompt < 1 or row.output < 1:
            rejected[NO_TOKENS] += 1
        elif row.at < 0:
            rejected[NEGATIVE] += 1
        else:
            rows.append(row)
    if not rows:
        why = "; ".join(f"{count} rows with {what}" for what, count in rejected.items())
        raise UserError(f"{path}: has no requests{': ' + why if why else ''}; wanted {WANTED}")
    rows.sort(key=lambda row: row.at)
    rows = rows[:limit]
    return workload_of_rows(path, rows, rejected, speed)


def workload_of_rows(
    path: str | Path, rows: Sequence[TraceRow], rejected: Mapping[str, int], speed: float = 1.0
) -> Workload:
    """The requests of a file, by arrival, of which the first arrives at 0."""
    first = rows[0].at
    sessions = {name: nth for nth, name in enumerate(dict.fromkeys(row.session for row in rows))}
    return Workload(
        Path(path).name,
        array("d", ((row.at - first) / speed for row in rows)),
        array("i", (row.prompt for row in rows)),
        array("i", (row.output for row in rows)),
        folded([row.chain for row in rows]) if any(row.chain[0] for row in rows) else None,
        session=array("i", (sessions[r.session] for r in rows)) if len(sessions) > 1 else None,
        rejected=dict(rejected),
    )


def text_of_trace(path: str | Path) -> str:
    """The text of a file, unpacked where its name ends in .gz."""
    content = read_bytes(path, WANTED, MOST_BYTES)
    if Path(path).suffix == ".gz":
        reader = zlib.decompressobj(wbits=31)
        try:
            content = reader.decompress(content, MOST_BYTES)
        except zlib.error as error:
            raise UserError(f"{path}: is not a file of gzip: {error}; wanted {WANTED}") from None
        if not reader.eof:
            raise UserError(f"{path}: is cut off, or over {MOST_BYTES} bytes; wanted {WANTED}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8; wanted {WANTED}") from None


def cells_of_trace(text: str, path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row by column, and where it stands."""
    if text.lstrip()[:1] == "{":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                where = f"{path}, line {number}"
                cells = from_json(line, where)
                if not isinstance(cells, dict):
                    raise UserError(f"{where}: got {shown(cells)}, wanted an object of JSON")
                yield where, cells
        return
    lines = csv.reader(io.StringIO(text), strict=True)
    try:
        head = [name.strip() for name in next(lines, list[str]())]
        for name in head:
            if head.count(name) > 1:
                raise UserError(f"{path}, line 1: several columns are {shown(name)}; wanted one")
        for cells in lines:
            where = f"{path}, line {lines.line_num}"
            if len(cells) not in (0, len(head)):
                raise UserError(f"{where}: has {len(cells)} cells, wanted {len(head)}, as the head")
            if cells:
                yield where, dict(zip(head, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: is not a CSV file: {error}; wanted {WANTED}") from None


def row_of_trace(cells: Mapping[str, Any], where: str) -> TraceRow:
    """A row as a request; raises UserError for what cannot be understood."""
    time_column = _column(cells, tuple(_TIMES), where)
    if time_column == "timestamp" and "input_length" not in cells:
        raise UserError(
            f"{where}: timestamp is in milliseconds in Mooncake's traces, which this is not; name "
            "the column arrival (seconds) or timestamp_ms"
        )
    at = _seconds(cells[time_column], time_column, where) * _TIMES[time_column]
    prompt = _tokens(cells, _PROMPTS, where)
    hashes = cells.get("hash_ids")
    session = next((str(cells[name]) for name in _SESSIONS if name in cells), "")
    chain = NO_CHAIN if hashes is None else _chain(hashes, prompt, where)
    return TraceRow(at, prompt, _tokens(cells, _OUTPUTS, where), chain, session)


def _column(cells: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in cells:
            return name
    had = ", ".join(map(str, cells)) or "no columns"
    raise UserError(f"{where}: has {had}; wanted a column {either(names)}")


def _tokens(cells: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    name = _column(cells, names, where)
    value = cells[name]
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or number != float(value):
        raise UserError(f"{where}: {name} is {shown(value)}, wanted a whole number of tokens")
    if number > LARGEST:
        raise UserError(f"{where}: {name} is {shown(value)}, wanted at most {LARGEST} tokens")
    return number


def _seconds(value: Any, name: str, where: str) -> float:
    """A number, or a date and time such as `2023-11-16 18:15:46.6805900`."""
    try:
        at = float(value)
    except (TypeError, ValueError):
        at = _date(value)
    if isinstance(value, bool) or at is None or not math.isfinite(at):
        raise UserError(f"{where}: {name} is {shown(value)}, wanted a time: a number, or a date")
    return at


def _date(value: Any) -> float | None:
    """Seconds since 1970 of a date, of which Azure's have seven digits behind the point."""
    whole, _, fraction = str(value).partition(".")
    try:
        seconds = (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds()
        return seconds + float(f"0.{fraction or 0}")
    except (ValueError, TypeError):
        return None


def _chain(hashes: Any, prompt: int, where: str) -> Chain:
    """Mooncake's ids: equal ids stand for equal tokens up to the end of their blocks."""
    count = -(-max(prompt, 0) // BLOCK)
    ids = cast("list[Any]", hashes) if isinstance(hashes, list) else list[Any]([None])
    if not all(type(key) is int for key in ids):
        raise UserError(f"{where}: hash_ids is {shown(ids)}, wanted a list of whole numbers")
    keys: tuple[int, ...] = tuple(ids[:count])
    if len(keys) < count:
        raise UserError(
            f"{where}: hash_ids has {len(keys)} ids, wanted {count}: one for each {BLOCK} of the "
            f"prompt's {prompt} tokens"
        )
    return keys, (*range(BLOCK, BLOCK * len(keys), BLOCK), prompt)
