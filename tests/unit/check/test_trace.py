"""The reader of traces: columns, and the places of values.

Then hostile files: no traceback, no hang, no memory beyond what the file's own size explains.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from handmade import Trace, attribute, generated, load, read_messages
from helpers import times
from stagewright.check.files import reader
from stagewright.check.files.dependency_graph import DependencyGraph
from stagewright.check.files.rank import check_trace
from stagewright.check.files.reader import LARGEST, WANTED, Damaged, read_trace
from stagewright.check.files.reader import nodes as read_nodes
from stagewright.trace.formats import et_def, wire

pytestmark = pytest.mark.numerics  # whole traces

# ---- columns -------------------------------------------------------------------------------------

INTEGERS = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "fixed64": st.integers(0, 2**64 - 1),
    "bool": st.booleans(),
}
U64 = st.integers(0, 2**64 - 1) | st.integers(0, 300)


@st.composite
def nodes(draw: st.DrawFn) -> Any:
    """A node with attributes of all types, some of them twice."""
    made = et_def.message("Node")(
        id=draw(U64),
        name=draw(st.text(max_size=20)),
        type=draw(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 9)),
        duration_micros=draw(U64),
        ctrl_deps=draw(st.lists(U64, max_size=5)),
        data_deps=draw(st.lists(U64, max_size=5)),
    )
    for name in draw(st.lists(st.sampled_from([*WANTED, "other"]), max_size=6)):
        added = made.attr.add(name=name)
        kind = draw(st.sampled_from([*INTEGERS, "string", "bytes", "double", "list", "none"]))
        if kind in INTEGERS:
            setattr(added, f"{kind}_val", draw(INTEGERS[kind]))
        elif kind == "string":
            added.string_val = draw(st.text(max_size=3))
        elif kind == "bytes":
            added.bytes_val = b"x"
        elif kind == "double":
            added.double_val = 1.5
        elif kind == "list":
            added.bool_list.values.extend(draw(st.lists(st.booleans(), max_size=3)))
    return made


def columns(path: Path) -> list[dict[str, Any]]:
    """A file by our reader, node by node."""
    made = read_trace(path)
    found: list[dict[str, Any]] = []
    for row in range(len(made)):
        values: dict[str, Any] = {}
        for name, column in made.attributes.items():
            if column.present[row]:
                value, kind = int(column.value[row]), int(column.kind[row])
                text = kind == et_def.VALUES["string"]
                values[name] = kind, made.texts[value] if text else value
        found.append(
            {
                "id": int(made.id[row]),
                "type": int(made.type[row]),
                "duration": int(made.duration[row]),
                "ctrl": made.ctrl.values[slice(*made.ctrl.ptr[row : row + 2])].tolist(),
                "data": made.data.values[slice(*made.data.ptr[row : row + 2])].tolist(),
                "attributes": values,
                "again": {n for n, c in made.attributes.items() if c.again[row]},
                "differing": {n for n, c in made.attributes.items() if c.differing[row]},
            }
        )
    return found


def wanted(node: Any) -> dict[str, Any]:
    """The same of a message."""
    every: dict[str, list[tuple[int, Any]]] = {}
    for one in node.attr:
        word, _, form = (one.WhichOneof("value") or "").rpartition("_")
        number = et_def.VALUES[word] + (form == "list") if word else 0
        value: Any = getattr(one, f"{word}_{form}") if word else 0
        if form == "list":
            value = int(any(value.values))
        elif isinstance(value, int):
            value = min(int(value), LARGEST)
        elif not isinstance(value, str):
            value = 0
        if one.name in WANTED:
            every.setdefault(one.name, []).append((number, value))
    return {
        "id": node.id,
        "type": node.type,
        "duration": node.duration_micros,
        "ctrl": list(node.ctrl_deps),
        "data": list(node.data_deps),
        "attributes": {name: values[-1] for name, values in every.items()},
        "again": {name for name, values in every.items() if len(values) > 1},
        "differing": {name for name, values in every.items() if len(set(values)) > 1},
    }


@settings(max_examples=times(150))
@given(st.lists(nodes(), min_size=1, max_size=6))
def test_columns_are_the_messages(tmp_path_factory: pytest.TempPathFactory, made: list[Any]):
    file = tmp_path_factory.mktemp("nodes") / "w.0.et"
    header = et_def.message("GlobalMetadata")(version="1.0.0")
    made = [node for node in made if node.SerializeToString()]  # an empty message is no node
    file.write_bytes(Trace(header, made).encode())
    assert columns(file) == [wanted(node) for node in made]


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace."""
    folder = generated(tmp_path_factory.mktemp("trace") / "w", tp=2, layers=1)
    return folder / "workload.0.et"


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 1 << 20])
def test_blocks_do_not_matter(trace: Path, size: int):
    _, made = read_messages(trace)
    with mock.patch.object(reader, "BLOCK_BYTES", size):
        assert columns(trace) == [wanted(node) for node in made]
    with mock.patch.object(reader, "BLOCK_NODES", size):
        assert columns(trace) == [wanted(node) for node in made]


def test_places_of_values(trace: Path):
    """The bytes of the file that `places` names are the values."""
    whole = trace.read_bytes()
    checked = 0
    for made, places in zip(read_nodes(trace), read_trace(trace, partial=True).places, strict=True):
        at, end, *own = places.tolist()
        assert own == [-2, -2]
        assert (at >= 0) == any(one.name == "pg_name" for one in made.attr)
        if at >= 0:
            assert whole[at:end] == attribute(made, "pg_name").string_val.encode()
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    "written",
    [
        wire.field(10, wire.field(1, b"comm_dst") + b"\x38\x83\x00"),  # a padded varint
        wire.field(10, b"\x38\x03" + wire.field(1, b"comm_dst")),  # the value before the name
        wire.field(10, wire.field(1, b"comm_dst") + b"\x38\x03") + b"\x28\x01",  # not at the end
        wire.field(10, wire.field(1, b"comm_dst") + b"\x38\x03") + wire.field(11, b"later"),
    ],
)
def test_places_are_not_known_of_other_forms(written: bytes, tmp_path: Path):
    file = tmp_path / "w.0.et"
    file.write_bytes(HEADER + message(b"\x08\x01\x18\x05" + written))  # a send
    made = read_trace(file, partial=True)
    assert made.attributes["comm_dst"].value.tolist() == [3]
    assert made.places.tolist() == [[-1, -1, -2, -2]]


@pytest.mark.slow
def test_cut_at_every_byte(trace: Path, tmp_path: Path):
    """What is left of a trace gives the nodes that it holds, and then an error."""
    whole = trace.read_bytes()
    _, made = read_messages(trace)
    ends: set[int] = set()
    at = 0
    for _ in range(6):  # the metadata and five nodes
        size, shift, byte = 0, 0, 0x80
        while byte > 127:
            byte = whole[at]
            size |= (byte & 127) << shift
            shift, at = shift + 7, at + 1
        at += size
        ends.add(at)
    file = tmp_path / "cut.0.et"
    for length in range(max(ends)):
        file.write_bytes(whole[:length])
        try:
            made_of_it = read_trace(file, partial=True)
        except Damaged:  # the metadata
            assert length < min(ends)
        else:
            assert (made_of_it.damage is None) == (length in ends)
            assert len(made_of_it) < len([end for end in ends if end <= length]) + 1
        found = [each.code for each in check_trace(file, 0).findings]
        assert found == ([] if length in ends - {min(ends)} else ["damaged"]) or length == min(ends)
    assert len(made) > 5


@settings(max_examples=times(150))
@given(st.binary(max_size=300))
@example(b"\x00\x00")
@example(b"\x01")
@example(b"\xff" * 300)
@example(bytes(300))
def test_noise_is_no_trace(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    file = tmp_path_factory.mktemp("noise") / "w.0.et"
    file.write_bytes(data)
    checked = check_trace(file, 0)
    assert checked.findings


@pytest.mark.slow
@settings(max_examples=times(200))
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), min_size=1, max_size=6))
def test_a_damaged_trace_never_escapes(
    trace: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, bytes]]
):
    """Whatever is overwritten: a result, no exception."""
    data = bytearray(trace.read_bytes())
    for at, piece in changes:
        place = int(at * len(data))
        data[place : place + len(piece)] = piece
    file = tmp_path_factory.mktemp("damaged") / "w.0.et"
    file.write_bytes(data)
    check_trace(file, 0)


# ---- hostile files -------------------------------------------------------------------------------

HEADER = b"\x07\x0a\x051.0.0"


def message(body: bytes) -> bytes:
    return wire.varint(len(body)) + body


def node(id_: int, *fields: bytes) -> bytes:
    return message(wire.key(1, 0) + wire.varint(id_) + b"\x18\x04" + b"".join(fields))


def attr(name: bytes, value: bytes) -> bytes:
    return wire.field(10, wire.field(1, name) + value)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a length of 2^60": lambda: HEADER + wire.varint(2**60),
    "a header of 2^60": lambda: wire.varint(2**60) + b"x",
    "a length just over the file": lambda: HEADER + wire.varint(1001) + b"\x08\x01" * 500,
    "a name of 2^60": lambda: HEADER + message(b"\x12" + wire.varint(2**60)),
    "dependencies of 2^60": lambda: HEADER + message(b"\x08\x01\x2a" + wire.varint(2**60)),
    "an attribute of 2^60": lambda: HEADER + message(b"\x52" + wire.varint(2**60)),
    "an attribute's string of 2^60": lambda: (
        HEADER
        + node(1, wire.field(10, wire.field(1, b"pg_name") + b"\xea\x01" + wire.varint(2**60)))
    ),
    "nested groups": lambda: HEADER + message(b"\x0b" * 100_000),
    "nested attributes": lambda: HEADER + node(1, _nested(2000)),
    "a megabyte of name": lambda: HEADER + node(1, wire.field(2, b"n" * 1_000_000)),
    "a megabyte of é": lambda: HEADER + node(1, wire.field(2, "é".encode() * 500_000)),
    "a name of NUL and escapes": lambda: HEADER + node(1, wire.field(2, b"\0\x1b[2J\n../..")),
    "100,000 attributes": lambda: HEADER + node(1, attr(b"a", b"\x48\x01") * 100_000),
    "100,000 names": lambda: HEADER + node(1, wire.field(2, b"a") * 100_000),
    "100,000 dependencies, unpacked": lambda: HEADER + node(1, b"\x28\x01" * 100_000),
    "300,000 dependencies": lambda: HEADER + node(1, wire.field(5, b"\x02" * 300_000)),
    "100,000 tiny nodes": lambda: HEADER + b"".join(map(node, range(100_000))),
    "100,000 nodes of one id": lambda: HEADER + node(7) * 100_000,
    "nodes without anything": lambda: HEADER + b"\x02\x18\x04" * 50_000,
    "a chain the wrong way": lambda: (
        HEADER
        + b"".join(node(i, b"\x28" + wire.varint(i + 1)) for i in range(30_000))
        + node(30_000)
    ),
    "a circle of 30,000": lambda: (
        HEADER + b"".join(node(i, b"\x28" + wire.varint((i + 1) % 30_000)) for i in range(30_000))
    ),
    "50,000 other attributes": lambda: (
        HEADER + b"".join(node(i, attr(b"op", wire.field(29, b"%d" % i))) for i in range(50_000))
    ),
    "20,000 odd attributes": lambda: (
        HEADER
        + b"".join(
            node(i, attr(b"x" * 20, b"\x1a\x01\x05"[:0] + b"\x29" + bytes(8)))
            for i in range(20_000)
        )
    ),
    "long varints": lambda: HEADER + node(1, b"\x28" + b"\xff" * 9 + b"\x01") * 20_000,
    "a group of every number": lambda: (
        HEADER
        + b"".join(
            message(
                wire.key(1, 0)
                + wire.varint(i + 1)
                + b"\x18\x07"
                + attr(b"comm_type", b"\x48\x00")
                + attr(b"comm_size", b"\x48\x08")
                + attr(b"pg_name", wire.field(29, b"%d" % (i + 1)))
            )
            for i in range(5_000)
        )
    ),
}


def _nested(depth: int) -> bytes:
    inner = b""
    for _ in range(depth):
        inner = wire.field(10, inner)
    return inner


@pytest.mark.slow
@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_file(title: str, tmp_path: Path):
    """An answer, soon, in memory that the file's own size explains."""
    data = HOSTILE[title]()
    file = tmp_path / "w.0.et"
    file.write_bytes(data)
    check_trace(file, 0)  # what is imported or cached is no one's fault
    tracemalloc.start()
    began = time.process_time()
    checked = check_trace(file, 0)
    took = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checked.findings
    assert took < 20  # seconds, slowed down some fivefold by tracemalloc; mostly under one
    assert peak < 40_000_000 + 200 * len(data)
    text = "".join(found.message for found in checked.findings)
    assert len(text) < 5000
    assert text.isprintable()


def test_too_many_nodes(trace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stagewright.check.files.reader.MOST_NODES", 10)
    assert "more than 10 nodes" in check_trace(trace, 0).findings[-1].message


def test_a_large_message_is_refused(tmp_path: Path):
    file = tmp_path / "w.0.et"
    with file.open("wb") as out:
        out.write(HEADER + wire.varint(100_000_000))
        out.truncate(200_000_000)  # takes no room on the disk
    (found,) = check_trace(file, 0).findings
    assert "a message of 100000004 bytes with its length, wanted at most 67108864" in found.message


# ---- dependencies --------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> tuple[DependencyGraph, np.ndarray]:
    count = draw(st.integers(1, 12))
    pairs = draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=30)
    )
    acyclic = draw(st.booleans())
    number = np.array(draw(st.permutations(range(count))))
    if acyclic:
        pairs = [(max(p), min(p)) for p in pairs if p[0] != p[1]]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return DependencyGraph(count, number[table[:, 0]], number[table[:, 1]]), number


@settings(max_examples=times(300))
@given(graphs(), st.randoms(use_true_random=False))
def test_graph(made: tuple[DependencyGraph, np.ndarray], dice: Any):
    """Against the definitions: ancestors by brute force."""
    graph, _ = made
    needs = {row: set[int]() for row in range(graph.count)}
    for child, parent in zip(graph.child.tolist(), graph.parent.tolist(), strict=True):
        needs[child].add(parent)
    ids = np.array(dice.sample(range(1000), graph.count), np.uint64)
    order = graph.order(ids).tolist()
    left = set(range(graph.count))
    for row in order:
        ready = [r for r in left if not needs[r] & left]
        assert row == min(ready, key=ids.__getitem__)
        left.remove(row)
    assert not [r for r in left if not needs[r] & left]
    if left:
        circle = graph.cycle(np.array(order, np.int64))
        for one, two in zip(circle, [*circle[1:], circle[0]], strict=True):
            assert two in needs[one]
        return
    ancestors: dict[int, set[int]] = {}
    for row in order:
        ancestors[row] = needs[row].union(*(ancestors[p] for p in needs[row]))
    some = np.array([row for row in order if dice.random() < 0.6], np.int64)
    wanted = [n for n in range(1, len(some)) if some[n - 1] not in ancestors[int(some[n])]]
    assert graph.unordered(np.array(order), some).tolist() == wanted
    depth: dict[int, int] = {}
    for row in order:
        depth[row] = 1 + max((depth[p] for p in needs[row]), default=0)
    path = graph.longest(np.array(order)).tolist()
    assert len(path) == max(depth.values())
    assert all(a in needs[b] for a, b in pairwise(path))


def test_reading_by_hand_is_what_the_reader_reads(trace: Path):
    world = load(trace.parent)
    assert [n["id"] for n in columns(trace)] == [n.id for n in world[0].nodes]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["upb", "python"])
def test_protobufs_runtimes_agree(runtime: str, trace: Path, tmp_path: Path):
    """One of them tells bad bytes by other exceptions; users choose it by an environment variable.

    https://protobuf.dev/reference/python/python-generated/#implementation
    """
    data = trace.read_bytes()
    files = {
        "noise": data + bytes([40, *range(7, 47)]),
        "text": data.replace(b"embedding", b"embed\xff\xffng"),
        "metadata": bytes([data[0]]) + b"\xff" * data[0] + data[1 + data[0] :],
        "whole": data,
    }
    for name, content in files.items():
        (tmp_path / f"{name}.0.et").write_bytes(content)
    script = "import sys; from stagewright.check.verify import verify\n"
    script += "for path in sys.argv[1:]: print(*(f.code for f in verify(path).of('error')), '.')"
    done = subprocess.run(
        [sys.executable, "-c", script, *(str(tmp_path / f"{name}.0.et") for name in files)],
        env=os.environ
        | {
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": runtime,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:4] == ["damaged ."] * 3 + ["."]
