"""The rules of the document "Trace Event Format", which Perfetto reads.

They are those of docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the
fields of each phase, slices of a thread that nest, flows that start once, end once and are bound to
a slice.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

Number = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"pid": int, "tid": int, "ts": Number, "dur": Number, "name": str},
    "M": {"pid": int, "tid": int, "name": str, "args": dict},
    "s": {"pid": int, "tid": int, "ts": Number, "id": int, "name": str, "cat": str},
    "f": {"pid": int, "tid": int, "ts": Number, "id": int, "name": str, "cat": str, "bp": str},
    "C": {"pid": int, "ts": Number, "name": str, "args": dict},
}
OPTIONAL = {"cat": str, "args": dict}
METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check(trace: dict[str, Any]) -> None:
    """Whether a trace follows the format."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, str, int], dict[str, tuple[int, int, int]]] = defaultdict(dict)
    named: set[tuple[int, int]] = set()
    for event in trace["traceEvents"]:
        fields = REQUIRED[event["ph"]]
        for name, kind in fields.items():
            assert isinstance(event[name], kind), event
        for name in event.keys() - fields.keys() - {"ph"}:
            assert isinstance(event[name], OPTIONAL[name]), event
        thread = event["pid"], event.get("tid", 0)
        if event["ph"] == "M":
            (key, kind), *rest = METADATA[event["name"]].items()
            assert not rest
            assert isinstance(event["args"][key], kind)
            named.add(thread)
            continue
        at = round(event["ts"] * 1000)
        assert at >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[thread].append((at, at + round(event["dur"] * 1000)))
        elif event["ph"] in "sf":
            ends = flows[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in ends
            ends[event["ph"]] = (*thread, at)
    assert slices.keys() <= named
    for thread, some in slices.items():
        some = sorted(some)
        for (_, end), (begin, _) in itertools.pairwise(some):
            assert begin >= end, f"slices of thread {thread} overlap at {begin} ns"
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"][2] <= ends["f"][2]
        for pid, tid, at in ends.values():
            assert any(b <= at < e for b, e in slices[pid, tid])
