"""Requests that were recorded: traces, and the results of benchmark clients, by one table of keys.

A row that cannot be understood is an error with its line. A row that is understood but is no
request (no tokens, a negative time, no answer) is left out and counted, by reason.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError, either
from stagewright.files import from_json, read_bytes
from stagewright.run.sections.declare import LARGEST
from stagewright.serving.workload import NO_CHAIN, Chain, Workload, fold
from stagewright.serving.workloads.clients import (
    is_detailed,
    is_summary,
    load_of,
    rates_of,
    rows_of_result,
)

FORMATS: Mapping[str, Mapping[str, str]] = {
    "any table": {
        "arrival": "arrival s", "arrival_time": "arrival s", "timestamp_ms": "arrival ms",
        "prompt": "prompt", "isl": "prompt", "input_len": "prompt", "input_tokens": "prompt",
        "prompt_len": "prompt", "prompt_tokens": "prompt",
        "output": "output", "osl": "output", "output_len": "output", "output_tokens": "output",
        "completion_tokens": "output",
        "session": "session", "session_id": "session", "chat_id": "session",
        "ttft": "ttft s", "ttft_s": "ttft s", "ttft_ms": "ttft ms", "time_to_first_token": "ttft s",
        "e2e": "e2e s", "e2e_s": "e2e s", "e2e_ms": "e2e ms", "e2e_latency": "e2e s",
        "latency": "e2e s", "latency_ms": "e2e ms", "request_latency": "e2e s",
    },
    "Mooncake": {
        "timestamp": "arrival ms", "input_length": "prompt", "output_length": "output",
        "hash_ids": "blocks",
    },
    "Azure": {
        "TIMESTAMP": "arrival s", "ContextTokens": "prompt", "GeneratedTokens": "output",
    },
    "BurstGPT": {
        "Timestamp": "arrival s", "Request tokens": "prompt", "Response tokens": "output",
        "Session ID": "session",
    },
    "Vidur": {
        "arrived_at": "arrival s", "num_prefill_tokens": "prompt", "num_decode_tokens": "output",
    },
    "LLMServingSim": {
        "arrival_time_ns": "arrival ns", "input_toks": "prompt", "output_toks": "output",
    },
    "vLLM and SGLang": {
        "start_times": "arrival s", "input_lens": "prompt", "output_lens": "output",
        "ttfts": "ttft s", "latencies": "e2e s", "errors": "error",
    },
    "AIPerf": {
        "metadata.request_start_ns": "arrival ns",
        "metrics.input_sequence_length.value": "prompt",
        "metrics.output_sequence_length.value": "output",
        "metadata.x_correlation_id": "session",
        "metrics.time_to_first_token.value": "ttft ms",
        "metrics.request_latency.value": "e2e ms",
        "error": "error", "metadata.benchmark_phase": "phase",
    },
}  # fmt: skip
"""Keys of each tool, with the field of a `TraceRow` and its unit. The first key counts.

Without Mooncake's other names a `timestamp` is in seconds."""

MAX_BYTES = 1 << 30
BLOCK = 512
"""Tokens of a block of Mooncake's `hash_ids` (kvcache-ai/Mooncake, FAST25-release/traces)."""
WANTED = "a trace of requests in JSONL or CSV"

NO_TOKENS = "no prompt tokens, or no output tokens"
NEGATIVE = "a time before the trace begins"
UNANSWERED = "the server did not answer"
WARM_UP = "a request of the warm-up"

LATEST = 32503680000.0
"""Seconds from 1970 to the year 3000: later times are in another unit."""

_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_SECONDS = {"s": 1.0, "ms": 1e-3, "ns": 1e-9}


class TraceRow(NamedTuple):
    """Request of a trace."""

    at: float
    """Seconds, since some moment."""
    prompt: int
    output: int
    chain: Chain
    session: str
    ttft: float
    """Seconds to the first token; nan where it is not known."""
    e2e: float
    """Seconds to the last token; nan where it is not known."""


class TraceFile(NamedTuple):
    """Requests of a file."""

    rows: Sequence[TraceRow]
    """Rows in order of arrival."""
    rejected: Mapping[str, int]
    """Number of rows that are no requests, by reason."""
    load: Mapping[str, Any]
    """Settings of the client, where the file is the result of one."""
    rates: Mapping[str, float]
    """Rates that the client measured (1/s)."""
    drawn: bool
    """The client does not say when it sent requests: arrivals are drawn at its rate."""


def read(path: str | Path, *, speed: float = 1.0, limit: int | None = None) -> Workload:
    """The requests of a trace, by arrival; a name that ends in .gz is a compressed one.

    Times begin with 0 at the first request; with `speed` 2 requests come twice as fast. Where a
    client kept so many requests in flight, the workload does, too. Raises UserError for what is no
    trace, with the line.
    """
    if not 0 < speed < math.inf:
        raise UserError(f"--speed is {speed:g}, wanted a number above 0; 2 is twice as fast")
    file = read_file(path)
    rows, users = file.rows[:limit], file.load.get("concurrency")
    first, closed_loop = rows[0].at, users is not None and "rate" not in file.load
    sessions = {name: nth for nth, name in enumerate(dict.fromkeys(row.session for row in rows))}
    drawn = " (arrivals drawn at its rate)" if file.drawn and not closed_loop else ""
    return Workload(
        Path(path).name + drawn,
        array("d", (0.0 if closed_loop else (row.at - first) / speed for row in rows)),
        array("i", (row.prompt for row in rows)),
        array("i", (row.output for row in rows)),
        fold([row.chain for row in rows]) if any(row.chain[0] for row in rows) else None,
        session=array("i", (sessions[r.session] for r in rows)) if len(sessions) > 1 else None,
        concurrency=users,
        rejected=dict(file.rejected),
    )


def read_file(path: str | Path) -> TraceFile:
    """The requests of a trace, a log or a result; raises UserError as `read` does."""
    rejected: Counter[str] = Counter()
    rows: list[TraceRow] = []
    load: dict[str, Any] = {}
    rates: dict[str, float] = {}
    drawn = False
    for where, entry in objects(path):
        if is_summary(entry) and (rows or not is_detailed(entry)):
            raise UserError(
                f"{where}: is the summary of a benchmark, or a second one; wanted one result, with "
                "its requests (--save-detailed of vLLM, --output-details of SGLang)"
            )
        several = [(where, entry)]
        if is_detailed(entry):
            several, load, rates = rows_of_result(entry, where), load_of(entry), rates_of(entry)
            drawn = entry.get("start_times") is None
        for place, cells in several:
            row = _row(cells, place)
            if isinstance(row, str):
                rejected[row] += 1
            elif row.prompt < 1 or row.output < 1:
                rejected[NO_TOKENS] += 1
            elif row.at < 0:
                rejected[NEGATIVE] += 1
            else:
                rows.append(row)
    if not rows:
        why = "; ".join(f"{count} rows with {what}" for what, count in rejected.items())
        raise UserError(f"{path}: has no requests{': ' + why if why else ''}; wanted {WANTED}")
    rows.sort(key=lambda row: row.at)
    if rows[0].at > LATEST:
        raise UserError(
            f"{path}: the first request arrives at {rows[0].at:.6g} s, after the year 3000; "
            "timestamps in milliseconds are a column timestamp_ms, in nanoseconds arrival_time_ns"
        )
    return TraceFile(rows, rejected, load, rates, drawn)


def summary_of(path: str | Path) -> Mapping[str, Any] | None:
    """Totals of a client's result; None for a file that has requests.

    Raises UserError for several results in one file.
    """
    totals: Mapping[str, Any] | None = None
    for where, entry in objects(path):
        if totals is not None:
            raise UserError(f"{where}: is a second result; wanted one result in a file")
        if not is_summary(entry) or is_detailed(entry):
            return None
        totals = entry
    return totals


# ---- files ---------------------------------------------------------------------------------------


def _text(path: str | Path) -> str:
    """The text of a file, unpacked where its name ends in .gz."""
    content = read_bytes(path, WANTED, MAX_BYTES)
    if Path(path).suffix == ".gz":
        content = _unpacked(content, path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8; wanted {WANTED}") from None


def _unpacked(packed: bytes, path: str | Path) -> bytes:
    """The bytes of all members of a gzip file: `cat a.gz b.gz` has two."""
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MAX_BYTES + 1)
    except EOFError:
        content = None
    except (OSError, zlib.error) as error:
        raise UserError(f"{path}: is not a file of gzip: {error}; wanted {WANTED}") from None
    if content is None or len(content) > MAX_BYTES:
        raise UserError(f"{path}: is cut off, or over {MAX_BYTES} bytes; wanted {WANTED}")
    return content


def objects(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of a CSV file, or object of a JSON or JSONL file, and where it is in the file."""
    text = _text(path)
    if text.lstrip()[:1] not in ("{", "["):
        yield from _rows_of_csv(text, path)
        return
    if _is_one_document(text):
        document = from_json(text, path, constants=True)
        listed = cast("list[Any]", document) if isinstance(document, list) else [document]
        places = [f"{path}, item {number}" for number in range(1, len(listed) + 1)]
        values = zip(places if isinstance(document, list) else [str(path)], listed, strict=True)
    else:
        values = (
            (f"{path}, line {number}", from_json(line, f"{path}, line {number}", constants=True))
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        )
    for where, value in values:
        if not isinstance(value, dict):
            raise UserError(f"{where}: got {shown(value)}, wanted an object of JSON")
        yield where, cast("dict[str, Any]", value)


def _is_one_document(text: str) -> bool:
    """True for a JSON file of several lines, of which the first is no value by itself."""
    first, _, rest = text.strip().partition("\n")
    if first.startswith("[") or not rest:
        return first.startswith("[")
    try:
        json.loads(first)
    except ValueError:
        return first.rstrip().endswith(("{", "[", ","))
    return False


def _rows_of_csv(text: str, path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


# ---- rows ----------------------------------------------------------------------------------------


@lru_cache(64)
def _columns(keys: tuple[str, ...]) -> Mapping[str, tuple[str, float]]:
    """Key of each field, among `keys`, and seconds of a unit of its values."""
    columns: dict[str, tuple[str, float]] = {}
    for meanings in FORMATS.values():
        for key, meaning in meanings.items():
            field, _, unit = meaning.partition(" ")
            if key in keys:
                columns.setdefault(field, (key, _SECONDS.get(unit, 1.0)))
    if columns.get("arrival", ("", 0))[0] == "timestamp" and "input_length" not in keys:
        columns["arrival"] = ("timestamp", 1.0)
    return columns


def _row(cells: Mapping[str, Any], where: str) -> TraceRow | str:
    """A row as a request, or why it is none; raises UserError for what cannot be understood."""
    if "metadata" in cells:
        cells = dict(_flat(cells))
    columns = _columns(tuple(cells))
    failed = "error" in columns and bool(cells[columns["error"][0]])
    if "phase" in columns and cells[columns["phase"][0]] == "warmup":
        return WARM_UP
    if failed and ("output" not in columns or cells[columns["output"][0]] == 0):
        return UNANSWERED
    key, unit = _column(cells, columns, "arrival", where)
    at = seconds(cells[key], key, where) * unit
    prompt = tokens(cells, _column(cells, columns, "prompt", where)[0], where)
    output = tokens(cells, _column(cells, columns, "output", where)[0], where)
    blocks = cells.get("hash_ids")
    chain = NO_CHAIN if blocks is None else _chain(blocks, prompt, where)
    session = str(cells[columns["session"][0]]) if "session" in columns else ""
    ttft, e2e = (
        math.nan if failed or field not in columns else _duration(cells, *columns[field], where)
        for field in ("ttft", "e2e")
    )
    if e2e < ttft:
        raise UserError(f"{where}: the last token comes before the first: {e2e:g} < {ttft:g} s")
    return TraceRow(at, prompt, output, chain, session, ttft, e2e)


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Nested keys with dots between them, down to some depth."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "error" and depth > 1:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{key}.", depth - 1)
        else:
            yield prefix + key, value


def _column(
    cells: Mapping[str, Any], columns: Mapping[str, tuple[str, float]], field: str, where: str
) -> tuple[str, float]:
    if field in columns:
        return columns[field]
    had = ", ".join(map(str, cells)) or "no columns"
    meanings = [item for keys in FORMATS.values() for item in keys.items()]
    names = [key for key, meaning in meanings if meaning.split()[0] == field]
    raise UserError(f"{where}: has {had}; wanted a column {either(names)}")


def tokens(cells: Mapping[str, Any], name: str, where: str) -> int:
    """A whole number of tokens; raises UserError for anything else."""
    value = cells.get(name)
    number: int | None = None
    try:
        if not isinstance(value, bool) and int(cast("Any", value)) == float(cast("Any", value)):
            number = int(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        pass
    if number is None:
        raise UserError(f"{where}: {name} is {shown(value)}, wanted a whole number of tokens")
    if number >= LARGEST:
        raise UserError(f"{where}: {name} is {shown(value)}, wanted fewer than {LARGEST} tokens")
    return number


def seconds(value: Any, name: str, where: str) -> float:
    """A number, or a date and time such as `2023-11-16 18:15:46.6805900` (UTC without a zone)."""
    try:
        at = float(value)
    except (TypeError, ValueError):
        at = _date(value)
    if isinstance(value, bool) or at is None or not math.isfinite(at):
        raise UserError(f"{where}: {name} is {shown(value)}, wanted a time: a number, or a date")
    return at


def _date(value: Any) -> float | None:
    """Seconds since 1970 of a date; Azure's have seven digits after the point."""
    parts = _DATE.fullmatch(str(value).strip())
    if parts is None:
        return None
    whole, fraction, zone = parts.groups()
    try:
        date = datetime.fromisoformat(f"{whole}{zone or '+00:00'}")
    except ValueError:
        return None
    return date.timestamp() + float(fraction or 0)


def _duration(cells: Mapping[str, Any], name: str, unit: float, where: str) -> float:
    """Seconds; nan where the row has none."""
    if cells[name] in ("", None):
        return math.nan
    try:
        value = float(cells[name])
    except (TypeError, ValueError):
        value = -1.0
    if math.isnan(value):
        return value
    if not 0 <= value < math.inf or isinstance(cells[name], bool):
        raise UserError(f"{where}: {name} is {shown(cells[name])}, wanted a time of 0 or more")
    return value * unit


def _chain(hashes: Any, prompt: int, where: str) -> Chain:
    """Mooncake's ids: equal ids stand for equal tokens up to the end of their blocks."""
    count = -(-max(prompt, 0) // BLOCK)
    segments = block_ids(hashes, where)[:count]
    if len(segments) < count:
        raise UserError(
            f"{where}: hash_ids has {len(segments)} ids, wanted {count}: one for each {BLOCK} of "
            f"the prompt's {prompt} tokens"
        )
    return segments, (*range(BLOCK, BLOCK * len(segments), BLOCK), prompt)


def block_ids(hashes: Any, where: str) -> tuple[int, ...]:
    """Ids of the blocks of a prompt; raises UserError for anything but a list of whole numbers."""
    ids = cast("list[Any]", hashes) if isinstance(hashes, list) else list[Any]([None])
    if not all(type(key) is int for key in ids):
        raise UserError(f"{where}: hash_ids is {shown(ids)}, wanted a list of whole numbers")
    return tuple(ids)
