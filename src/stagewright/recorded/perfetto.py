"""Traces in Perfetto's format, through its trace processor (the extra `perfetto`)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import IO, Any

from stagewright.errors import UserError

_SLICES = """
select s.ts, s.dur, s.name, s.category as cat, s.arg_set_id as args, t.tid, p.pid
from slice s left join thread_track k on s.track_id = k.id
left join thread t using (utid) left join process p using (upid)
"""
_ARGS = "select arg_set_id as id, key, int_value, string_value, real_value from args"
_INDEX = re.compile(r"\[(\d+)\]")


def perfetto_events(label: str, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The slices of a trace as Kineto's events."""
    try:
        processor = importlib.import_module("perfetto.trace_processor").TraceProcessor
    except ImportError:
        raise UserError(
            f"{label}: is in Perfetto's format, which needs the package perfetto; pip install "
            "'stagewright[perfetto]', or give Kineto's JSON"
        ) from None
    try:
        with processor(trace=stream) as trace:
            args: dict[int, dict[str, Any]] = {}
            for row in trace.query(_ARGS):
                value = next(
                    (v for v in (row.int_value, row.string_value, row.real_value) if v is not None),
                    None,
                )
                _put(args.setdefault(row.id, {}), row.key, value)
            for row in trace.query(_SLICES):
                yield {
                    **{"ph": "X", "ts": row.ts / 1000, "dur": row.dur / 1000, "name": row.name},
                    **{"cat": row.cat, "pid": row.pid, "tid": row.tid},
                    "args": args.get(row.args, {}),
                }
    except Exception as error:  # of a server in another process
        raise UserError(f"{label}: Perfetto's trace processor refuses it: {error}") from None


def _put(args: dict[str, Any], key: str, value: Any) -> None:
    """Set an argument; `args.Input Dims[0][1]` is an entry of a nested list.

    >>> args = {}
    >>> _put(args, "args.Input Dims[0][0]", 8); _put(args, "args.Input Dims[0][1]", 4); args
    {'Input Dims': [[8, 4]]}
    """
    name = key.removeprefix("debug.").removeprefix("args.")
    indices = [int(index) for index in _INDEX.findall(name)]
    name = name.split("[", 1)[0]
    if not indices:
        args[name] = value
        return
    entries: list[Any] = args.setdefault(name, [])
    for depth, index in enumerate(indices):
        last = depth == len(indices) - 1
        while len(entries) <= index:
            entries.append(None if last else [])
        if last:
            entries[index] = value
        else:
            entries = entries[index]
