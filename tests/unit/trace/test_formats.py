"""Traces against the official protobuf runtime: its bytes are ours, and it reads ours back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handmade import read_messages
from stagewright.algebra.layout import Mesh
from stagewright.check.files.reader import TraceReader
from stagewright.errors import UserError
from stagewright.program.columns import (
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    RankWork,
    TaskKind,
    Tasks,
)
from stagewright.program.communicators import Communicator, Peer
from stagewright.trace.formats import chakra, et_def, wire
from stagewright.trace.formats import json as readable

PROVENANCE = {"generator": "test", "world_size": 4}


def tasks(rows: Sequence[Mapping[str, Any]]) -> Tasks:
    """Columns of rows given as dictionaries; what a row leaves out is what its kind lacks."""
    lists = {name: [row.get(name, []) for row in rows] for name in ("data", "order")}
    columns: dict[str, Any] = {
        name: np.array([row.get(name, default) for row in rows], dtype)
        for name, default, dtype in (
            ("kind", 0, np.uint8),
            ("name", 0, np.int32),
            ("op", 0, np.int32),
            ("phase", 0, np.uint8),
            ("stage", 0, np.int32),
            ("layer", -1, np.int32),
            ("microbatch", -1, np.int32),
            ("flops", 0, np.int64),
            ("traffic", 0, np.int64),
            ("collective", -1, np.int8),
            ("dtype", 0, np.int8),
            ("comm_bytes", 0, np.int64),
            ("slot", -1, np.int16),
            ("tag", -1, np.int32),
            ("shape", -1, np.int32),
        )
    }
    for name, needed in lists.items():
        columns[name] = np.array([i for row in needed for i in row], np.int32)
        columns[f"{name}_ptr"] = np.cumsum([0, *map(len, needed)], dtype=np.int64)
    return Tasks(**columns, names=("work",), ops=("einsum",), dtypes=("bf16",), shapes=())


def example_program() -> Program:
    """Two pipeline stages of two ranks, with one node of each kind."""
    rows: list[dict[str, Any]] = [
        {"kind": TaskKind.COMPUTE, "flops": 300, "traffic": 7, "layer": 0, "microbatch": 200},
        {"kind": TaskKind.COLLECTIVE, "collective": 1, "comm_bytes": 1000, "slot": 0, "data": [0]},
        {
            "kind": TaskKind.SEND,
            "comm_bytes": 64,
            "slot": 0,
            "tag": 5,
            "data": [1, 0],
            "order": [1],
        },
        {"kind": TaskKind.RECV, "comm_bytes": 64, "slot": 1, "tag": 6, "phase": 2, "order": [2, 0]},
        {"kind": TaskKind.COMPUTE, "phase": 3, "data": [3]},
    ]
    made = tasks(rows)
    return Program(
        mesh=Mesh((("tp", 2), ("pp", 2))),
        classes=tuple(
            RankClass(np.arange(2) + 2 * pp, pp, RankWork.from_tables(made, {})) for pp in range(2)
        ),
        communicators=(Communicator(("tp",)),),
        peers=(Peer("pp", 1), Peer("pp", -1)),
    )


CHARACTERS = st.characters(exclude_characters=",", exclude_categories=["Cs"])
TEXT = st.text(CHARACTERS, min_size=1, max_size=40)
SIZE = st.integers(0, 2**63 - 1) | st.integers(0, 300)
SMALL = st.integers(-1, 2**31 - 1) | st.integers(-1, 300)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Small programs whose ranks, groups and numbers have few and many digits."""
    axes = [(name, draw(st.sampled_from([1, 2, 3, 12, 130]))) for name in ("tp", "dp")]
    mesh = Mesh((*axes, ("pp", draw(st.integers(1, 3)))))
    communicators = (Communicator(("tp",)), Communicator(("dp",)), Communicator(("tp", "dp")))
    names = tuple(draw(st.lists(TEXT | st.just("n" * 200), min_size=1, max_size=3)))
    ops = tuple(draw(st.lists(TEXT, min_size=1, max_size=3)))
    classes: list[RankClass] = []
    for stage in range(mesh.size("pp")):
        rows = [draw(row(nth, len(names), len(ops))) for nth in range(draw(st.integers(0, 9)))]
        at = np.arange(mesh.world_size) // mesh.stride("pp") == stage
        made = replace(tasks(rows), names=names, ops=ops)
        classes.append(RankClass(np.flatnonzero(at), stage, RankWork.from_tables(made, {})))
    return Program(mesh, tuple(classes), communicators, (Peer("pp", 1), Peer("pp", -1)))


@st.composite
def row(draw: st.DrawFn, nth: int, names: int, ops: int) -> dict[str, object]:
    """A task that needs some of the `nth` before it."""
    kind = draw(st.sampled_from(TaskKind))
    earlier = st.lists(st.integers(0, nth - 1), max_size=6) if nth else st.just([])
    found: dict[str, object] = {
        "kind": kind,
        "name": draw(st.integers(0, names - 1)),
        "op": draw(st.integers(0, ops - 1)),
        "phase": draw(st.integers(0, len(PHASES) - 1)),
        "layer": draw(SMALL),
        "microbatch": draw(SMALL),
        "data": draw(earlier),
        "order": draw(earlier),
    }
    if kind is TaskKind.COMPUTE:
        return found | {"flops": draw(SIZE), "traffic": draw(SIZE)}
    found["comm_bytes"] = draw(SIZE)
    if kind is TaskKind.COLLECTIVE:
        kinds = st.integers(0, len(COLLECTIVES) - 1)
        return found | {"collective": draw(kinds), "slot": draw(st.integers(0, 2))}
    if kind in (TaskKind.LOAD, TaskKind.STORE):
        return found
    return found | {"slot": draw(st.integers(0, 1)), "tag": draw(st.integers(0, 2**31 - 1))}


def plainly_encoded(program: Program, rank: int) -> bytes:
    """A rank's file, message by message, by the official runtime."""
    (of,) = (of for of in program.classes if rank in of.ranks)
    header = et_def.message("GlobalMetadata")(version="1.0.0")
    header.attr.add(name="generator", string_val="test")
    header.attr.add(name="world_size", int64_val=4)
    header.attr.add(name="pipeline_rank", int64_val=of.pipeline_rank)
    found = [header, *(plain_node(program, of.tasks, rank, i) for i in range(len(of.tasks)))]
    bodies = [message.SerializeToString() for message in found]
    return b"".join(wire.varint(len(body)) + body for body in bodies)


def plain_node(program: Program, t: Tasks, rank: int, i: int) -> Any:
    """One Node out of the columns, as the contract's table of types demands."""
    kind = TaskKind(t.kind[i])
    data = {int(d) + 1 for d in t.data[t.data_ptr[i] : t.data_ptr[i + 1]]}
    order = {int(d) + 1 for d in t.order[t.order_ptr[i] : t.order_ptr[i + 1]]}
    node = et_def.message("Node")(
        id=i + 1,
        name=t.names[t.name[i]],
        type={"LOAD": 2, "STORE": 3, "COMPUTE": 4, "SEND": 5, "RECV": 6, "COLLECTIVE": 7}[
            kind.name
        ],
        ctrl_deps=sorted(order),
        data_deps=sorted(data | order),
    )
    if kind is TaskKind.COMPUTE:
        node.attr.add(name="num_ops", int64_val=max(1, int(t.flops[i])))
        node.attr.add(name="tensor_size", uint64_val=max(1, int(t.traffic[i])))
    elif kind in (TaskKind.LOAD, TaskKind.STORE):
        node.attr.add(name="tensor_size", uint64_val=int(t.comm_bytes[i]))
    elif kind is TaskKind.COLLECTIVE:
        types = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 7, "all_to_all": 6}
        number = types.get(COLLECTIVES[int(t.collective[i])], 5)
        node.attr.add(name="comm_type", int64_val=number)
        node.attr.add(name="comm_size", int64_val=int(t.comm_bytes[i]))
        node.attr.add(name="pg_name", string_val=str(program.group_of(t.slot[i])[rank]))
    else:
        peer = int(program.peer_of(t.slot[i])[rank])
        ends = (rank, peer) if kind is TaskKind.SEND else (peer, rank)
        node.attr.add(name="comm_src", int32_val=ends[0])
        node.attr.add(name="comm_dst", int32_val=ends[1])
        node.attr.add(name="comm_tag", int32_val=int(t.tag[i]))
        node.attr.add(name="comm_size", int64_val=int(t.comm_bytes[i]))
    if t.layer[i] >= 0:
        node.attr.add(name="layer", int32_val=int(t.layer[i]))
    if t.microbatch[i] >= 0:
        node.attr.add(name="microbatch", int32_val=int(t.microbatch[i]))
    node.attr.add(name="phase", string_val=PHASES[t.phase[i]])
    node.attr.add(name="op", string_val=t.ops[t.op[i]])
    node.attr.add(name="is_cpu_op", bool_val=False)
    return node


@pytest.mark.numerics
@given(program=programs(), block=st.integers(1, 10), pick=st.data())
def test_stamped_file_is_what_the_official_runtime_writes(program: Program, block: int, pick: Any):
    world = program.mesh.world_size
    ranks = pick.draw(
        st.sets(st.integers(0, world - 1), min_size=1, max_size=4) | st.just({world - 1})
    )
    with mock.patch.object(chakra, "BLOCK", block):
        batches = chakra.plan(program, np.array(sorted(ranks)), PROVENANCE)
        assert sorted(rank for batch in batches for rank in batch.ranks) == sorted(ranks)
        for batch in batches:
            template = batch.template()
            for rank in batch.ranks:
                with template.stamped(rank) as data:
                    stamped = bytes(data)
                assert stamped == plainly_encoded(program, rank)
                assert stamped == chakra.encode(program, rank, PROVENANCE)
                assert len(stamped) == batch.size <= batch.at_most


def test_every_rank_of_a_big_mesh_in_few_batches():
    program = replace(example_program(), mesh=Mesh((("tp", 2), ("dp", 75), ("pp", 2))))
    halves = np.arange(300).reshape(2, 150)
    classes = tuple(replace(program.classes[pp], ranks=halves[pp]) for pp in range(2))
    program = replace(program, classes=classes)
    batches = chakra.plan(program, np.arange(300), PROVENANCE)
    # Own rank below 128 or not; the peer of a second-stage rank likewise.
    assert sorted(len(batch.ranks) for batch in batches) == [22, 22, 128, 128]
    for batch in batches:
        template = batch.template()
        for rank in batch.ranks:
            with template.stamped(rank) as one, template.stamped(rank) as other:
                assert bytes(one) == bytes(other) == plainly_encoded(program, rank)


def test_dependencies_for_old_and_new_feeders(tmp_path: Path):
    path = tmp_path / "workload.0.et"
    path.write_bytes(chakra.encode(example_program(), 0, PROVENANCE))
    _, nodes = read_messages(path)
    found = [(node.id, list(node.data_deps), list(node.ctrl_deps)) for node in nodes]
    assert found == [
        (1, [], []),
        (2, [1], []),
        (3, [1, 2], [2]),
        (4, [1, 3], [1, 3]),
        (5, [4], []),
    ]


def test_groups_one_a_line():
    text = b"".join(chakra.comm_group(example_program())).decode()
    assert text == '{\n"1":[0,1],\n"2":[2,3]\n}\n'
    assert json.loads(text) == {"1": [0, 1], "2": [2, 3]}


def test_name_with_a_comma_is_refused():
    program = example_program()
    first = program.classes[0]
    of = replace(first, work=first.work.with_tasks(replace(first.tasks, names=("a,b",))))
    with pytest.raises(UserError, match="'a,b' holds a comma"):
        chakra.encode(replace(program, classes=(of,)), 0, PROVENANCE)


def test_collective_of_a_rank_outside_its_communicator():
    program = replace(example_program(), communicators=(Communicator(("pp",), only=(1,)),))
    with pytest.raises(ValueError, match="in no group"):
        chakra.encode(program, 0, PROVENANCE)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 70000), max_size=20))
@example([2**k - 1 for k in range(64)] + [2**k for k in range(63)] + [-1, -(2**63)])
def test_varints(values: list[int]):
    found = wire.varints(np.array(values, np.int64))
    message = et_def.message("Int64List")
    for nth, value in enumerate(values):
        expected = message(values=[value]).SerializeToString()[2:]
        assert wire.varint(value) == expected
        one = found[np.array([nth])]
        assert bytes(one.pieces()[0])[: int(one.lengths[0])] == expected


def test_readable_nodes(tmp_path: Path):
    program = example_program()
    (batch,) = readable.plan(program, np.array([1]), {})
    with batch.template().stamped(1) as data:
        nodes = json.loads(bytes(data))
        assert bytes(data).count(b"\n") == len(nodes) + 2
    shared = {"op": "einsum", "stage": 0, "dtype": "bf16", "name": "work"}
    assert nodes[0] == shared | {
        "id": 1,
        "kind": "compute",
        "phase": "forward",
        "layer": 0,
        "microbatch": 200,
        "flops": 300,
        "bytes": 7,
        "deps": [],
        "order": [],
    }
    assert nodes[1] == shared | {
        "id": 2,
        "kind": "collective",
        "phase": "forward",
        "bytes": 1000,
        "collective": "all_gather",
        "group": int(program.group_of(0)[1]),
        "deps": [1],
        "order": [],
    }
    assert nodes[3] == shared | {
        "id": 4,
        "kind": "recv",
        "phase": "backward",
        "bytes": 64,
        "peer": 3,
        "tag": 6,
        "deps": [],
        "order": [3, 1],
    }


def everything(path: Path) -> list[et_def.NodeMessage]:
    return list(TraceReader(path).nodes())


def error_or_nodes(path: Path) -> str | int:
    try:
        return len(everything(path))
    except UserError as error:
        return str(error)


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_give_an_error_or_nodes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, start: bool
):
    path = tmp_path_factory.mktemp("hostile") / "x.et"
    path.write_bytes((chakra.metadata(PROVENANCE) if start else b"") + data)
    found = error_or_nodes(path)
    assert isinstance(found, int) or str(path) in found


def test_values_of_others_attributes():
    node = et_def.message("Node")(id=1)
    node.attr.add(name="twice", int32_val=1)
    node.attr.add(name="twice", int32_val=2)
    node.attr.add(name="inputs").string_list.values.extend(["a", "1"])
    node.attr.add(name="nothing")
    assert et_def.values(node) == {
        "twice": ("int32_val", 2),
        "inputs": ("string_list", ["a", "1"]),
        "nothing": ("", None),
    }
