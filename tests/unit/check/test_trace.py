"""The reader of traces against the official runtime: the same values, and the same refusals.

Then hostile files: no traceback, no hang, no memory beyond what the file's own size explains.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import times
from handmade import attribute, generated, load, read_messages
from stagewright.check.files import reader
from stagewright.check.files.columns import LARGEST
from stagewright.check.files.dependency_graph import DependencyGraph
from stagewright.check.files.rank import check_trace
from stagewright.check.files.reader import WANTED, Damaged, NodeParser, TraceReader
from stagewright.trace.formats import et_def, wire

pytestmark = pytest.mark.numerics  # whole traces

# ---- messages, in all the ways in which they can be written --------------------------------------

VARINTS = {
    "int32": 7,
    "int64": 9,
    "uint32": 11,
    "uint64": 13,
    "sint32": 15,
    "sint64": 17,
    "bool": 27,
}
FIXED = {"double": (3, 8), "fixed64": (21, 8), "sfixed64": (25, 8)}
FIXED |= {"float": (5, 4), "fixed32": (19, 4), "sfixed32": (23, 4)}
SMALL = st.integers(0, 300)
U64 = st.integers(0, 2**64 - 1) | st.sampled_from([2**56 - 1, 2**56, 2**63, 2**64 - 1]) | SMALL


def padded(value: int, by: int) -> bytes:
    """A varint with bytes that say nothing behind it."""
    plain = bytearray(wire.varint(value))
    by = min(by, 10 - len(plain))
    if by <= 0:
        return bytes(plain)
    plain[-1] |= 0x80
    return bytes(plain) + b"\x80" * (by - 1) + b"\0"


@st.composite
def varint(draw: st.DrawFn, values: st.SearchStrategy[int] = U64) -> bytes:
    return padded(draw(values), draw(st.sampled_from([0, 0, 0, 1, 4, 9])))


@st.composite
def framed(draw: st.DrawFn, number: int, payload: bytes) -> bytes:
    """A field with its length, padded up to 5 bytes."""
    size = wire.varint(len(payload))
    by = draw(st.sampled_from([0, 0, 0, 1, 5 - len(size)]))
    return wire.key(number, 2) + padded(len(payload), by) + payload


TEXT = st.text(max_size=20).map(str.encode) | st.sampled_from([b"x" * 70, "é".encode() * 200])
NAME = st.sampled_from([name.encode() for name in WANTED]) | TEXT


@st.composite
def attribute_bytes(draw: st.DrawFn) -> bytes:
    name = draw(framed(1, draw(NAME)))
    kind = draw(st.sampled_from(["varint", "varint", "varint", "string", "fixed", "list", "none"]))
    value = b""
    if kind == "varint":
        value = wire.key(draw(st.sampled_from(sorted(VARINTS.values()))), 0) + draw(varint())
    elif kind == "string":
        value = draw(framed(29, draw(TEXT)))
    elif kind == "fixed":
        number, size = draw(st.sampled_from(sorted(FIXED.values())))
        value = wire.key(number, 1 if size == 8 else 5) + draw(
            st.binary(min_size=size, max_size=size)
        )
    elif kind == "list":
        packed = b"".join(draw(st.lists(varint(), max_size=4)))
        value = draw(framed(10, wire.field(1, packed)))
    rare = draw(st.sampled_from([b"", b"", b"", wire.field(2, b"doc"), wire.key(7, 0) + b"\x05"]))
    parts = (
        draw(st.permutations([name, value, rare])) if draw(st.booleans()) else [name, value, rare]
    )
    return b"".join(parts)


@st.composite
def node_bytes(draw: st.DrawFn) -> bytes:
    parts = [wire.key(1, 0) + draw(varint()), draw(framed(2, draw(TEXT)))]
    parts.append(wire.key(3, 0) + draw(varint(st.integers(0, 9) | U64)))
    for number in (4, 5):
        deps = draw(st.lists(varint(), max_size=5))
        if draw(st.booleans()):
            parts.append(draw(framed(number, b"".join(deps))))
        else:
            parts += [wire.key(number, 0) + dep for dep in deps]
    parts += [wire.field(10, one) for one in draw(st.lists(attribute_bytes(), max_size=5))]
    parts += draw(
        st.lists(
            st.sampled_from(
                [
                    wire.key(6, 0) + b"\x07",
                    wire.key(7, 0) + b"\x88\x27",
                    wire.field(8, wire.field(1, b"[1]")),
                    wire.field(9, b""),
                    wire.field(11, b"later"),  # unknown fields and wire types
                    wire.key(1, 2) + b"\x01x",
                    wire.key(77, 0) + b"\x01",
                    wire.key(5, 5) + b"four",
                    wire.key(12, 3) + wire.key(12, 4),
                    b"\x88\x00\x09",  # a padded tag
                    wire.field(5, b"\x05\x06"),
                ]
            ),
            max_size=3,
        )
    )
    return b"".join(draw(st.permutations(parts)) if draw(st.booleans()) else parts)


def columns(nodes: Sequence[bytes]) -> list[dict[str, Any]]:
    """What our reader makes of nodes, one by one."""
    parser = NodeParser()
    ends = np.cumsum([len(node) for node in nodes])
    block = parser.block(b"".join(nodes), 0, np.concatenate(([0], ends[:-1])), ends)
    found: list[dict[str, Any]] = []
    for row in range(len(block)):
        values: dict[str, Any] = {}
        for name, column in block.attributes.items():
            for nth in np.flatnonzero(column.row == row).tolist():
                value = int(column.value[nth])
                text = column.kind[nth] == et_def.VALUES["string"]
                values[name] = int(column.kind[nth]), parser.texts[value] if text else value
        found.append(
            {
                "id": int(block.id[row]),
                "type": int(block.type[row]),
                "duration": int(block.duration[row]),
                "ctrl": block.ctrl.values[slice(*block.ctrl.ptr[row : row + 2])].tolist(),
                "data": block.data.values[slice(*block.data.ptr[row : row + 2])].tolist(),
                "attributes": values,
            }
        )
    return found


def official(data: bytes) -> dict[str, Any]:
    """What the official runtime makes of a node, in the same form."""
    node = et_def.message("Node").FromString(data)
    values: dict[str, Any] = {}
    for name, (kind, value) in et_def.values(node).items():
        word, _, form = kind.rpartition("_")
        number = et_def.VALUES[word] + (form == "list") if kind else 0
        if isinstance(value, int):
            value = min(int(value), LARGEST)
        elif not isinstance(value, str):
            value = 0
        if name in WANTED:
            values[name] = number, value
    return {
        "id": node.id,
        "type": node.type,
        "duration": node.duration_micros,
        "ctrl": list(node.ctrl_deps),
        "data": list(node.data_deps),
        "attributes": values,
    }


@pytest.mark.slow
@settings(max_examples=times(150), deadline=None)
@given(st.lists(node_bytes(), min_size=1, max_size=6))
def test_same_as_the_official_runtime(nodes: list[bytes]):
    assert columns(nodes) == [official(node) for node in nodes]


@st.composite
def damaged_nodes(draw: st.DrawFn) -> bytes:
    """A node with bytes changed, taken out and put in."""
    data = bytearray(draw(node_bytes()))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "end"]))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at : at + draw(st.integers(1, 5))]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=4))
        elif how == "end":
            del data[at:]
    return bytes(data)


@pytest.mark.slow
@settings(max_examples=times(500), deadline=None)
@given(damaged_nodes())
@example(b"\x2a\x02\x80\x80")
@example(b"\x2a\x0b" + b"\x80" * 10 + b"\0")
@example(b"\x08" + b"\xff" * 10)
@example(b"\x08" + b"\xff" * 9 + b"\x7f")
@example(b"\x52\x04\x0a\x02ab")
@example(b"\x52\x03\x0a\x05a")
@example(b"\x52\x00")
@example(b"\x52\x01\x0a")
@example(b"\x12\xff\xff\xff\xff\x0f")
@example(b"\x42\x02\x0a\x01")
@example(b"\x0b" * 200)
@example(b"")
def test_damaged_nodes_are_refused_when_the_official_runtime_refuses_them(data: bytes):
    try:
        wanted = official(data)
    except DecodeError:
        with pytest.raises(Damaged, match="no valid Node"):
            columns([data])
        return
    assert columns([data]) == [wanted]


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace."""
    folder = generated(tmp_path_factory.mktemp("trace") / "w", tp=2, layers=1)
    return folder / "workload.0.et"


def read(path: Path) -> list[dict[str, Any]]:
    """A file by our reader."""
    found: list[dict[str, Any]] = []
    for block in TraceReader(path):
        pieces = zip(block.at.tolist(), block.end.tolist(), strict=True)
        found += columns([block.source[a:b] for a, b in pieces])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 100, 1000, 1 << 20])
def test_chunks_do_not_matter(trace: Path, chunk: int):
    _, nodes = read_messages(trace)
    with mock.patch.object(reader, "CHUNK", chunk):
        assert read(trace) == [official(node.SerializeToString()) for node in nodes]


def test_places_of_values(trace: Path):
    """The bytes that `Column.at` and `end` point to are the values."""
    whole = trace.read_bytes()
    checked = 0
    for block in TraceReader(trace):
        for name in ("pg_name", "comm_size", "num_ops"):
            column = block.attributes[name]
            for row, at, end in zip(column.row, column.at, column.end, strict=True):
                wanted = attribute(block.node(int(row)), name)
                value = wanted.string_val.encode() or wire.varint(wanted.int64_val)
                assert whole[at:end] == value
                checked += 1
    assert checked > 50


@pytest.mark.slow
def test_cut_at_every_byte(trace: Path, tmp_path: Path):
    """What is left of a trace gives the nodes that it holds, and then an error."""
    whole = trace.read_bytes()
    _, nodes = read_messages(trace)
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
        count = 0
        try:
            for block in TraceReader(file):
                count += len(block)
            assert length in ends
        except Damaged:
            assert length not in ends
        assert count <= len([end for end in ends if end <= length])
        found = [each.code for each in check_trace(file, 0).findings]
        assert found == ([] if length in ends - {min(ends)} else ["damaged"]) or length == min(ends)
    assert sum(1 for _ in nodes) > 5


@settings(max_examples=times(150), deadline=None)
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
@settings(max_examples=times(200), deadline=None)
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
    monkeypatch.setattr("stagewright.check.files.rank.MOST_NODES", 10)
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


@settings(max_examples=times(300), deadline=None)
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
    assert [n["id"] for n in read(trace)] == [n.id for n in world[0].nodes]


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
