"""Every damage to a directory of traces is found and said in words; sound ones pass."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stagewright
import stagewright.trace.write
from handmade import (
    COLL,
    COMP,
    RECV,
    SEND,
    STORE,
    World,
    add,
    attribute,
    collective,
    drop,
    generated,
    kernel,
    load,
    recv,
    renumber,
    send,
    set_to,
    simple,
)
from hang_search import search
from helpers import cases, times
from stagewright.check.files.groups import read_groups
from stagewright.check.files.world import World as CheckedWorld
from stagewright.check.program import Unsound, check_program
from stagewright.check.report import Findings, Report
from stagewright.check.verify import find, parts_of, read, verify
from stagewright.errors import UserError
from stagewright.executors import Processes
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run

pytestmark = pytest.mark.numerics  # whole traces are written, damaged and verified

TOY: dict[str, Any] = {"model": "gpt2", "layers": 4, "seq_length": 16, "vocab": 64}


def codes(report: Report, level: str = "error") -> list[str]:
    return [found.code for found in report.of(level)]


# ---- sound traces --------------------------------------------------------------------------------


@pytest.mark.slow
@cases
def test_our_own_traces_are_sound(run: dict[str, Any], tmp_path: Path):
    out = tmp_path / "out"
    stagewright.generate(compile(Run(**TOY | run)), str(out))
    report = verify(out)
    assert report.findings == []
    assert report.ok
    assert report.ranks == report.world_size == Run(**TOY | run).world_size
    assert "made again from the manifest's run" in report.checks
    assert report.skipped == []
    assert report.kinds <= 3 * (run.get("pp", 1))  # by pipeline rank, and digits of ranks


def test_separate_streams_are_sound_but_left_to_timing(tmp_path: Path):
    report = verify(generated(tmp_path / "out", tp=2, pp=2, dp=2, streams="separate"))
    assert report.ok
    assert codes(report, "warning") == ["order-left-to-timing"]
    why = search(_world(tmp_path / "out"), 8)
    assert why is not None
    assert why.startswith("rank ")
    assert report.findings[0].ranks == 8


def test_some_ranks_of_a_run(tmp_path: Path):
    program = compile(Run(**TOY, tp=2, pp=2, dp=2)).program
    stagewright.trace.write.write(program, tmp_path / "out", ranks=[0, 1, 5], manifest={})
    report = verify(tmp_path / "out")
    assert report.ok
    assert report.findings == []
    assert report.world_size == 8
    assert report.ranks == 3
    assert "the run: only 3 of 8 ranks are here" in report.skipped


def test_many_ranks_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_once = partial(Processes, worth=0.0)
    monkeypatch.setattr("stagewright.check.files.traces.Processes", at_once)
    monkeypatch.setattr("stagewright.check.files.traces.TASK_FILES", 1)
    folder = generated(tmp_path / "out", tp=4, dp=32, pp=2)
    report = verify(folder, workers=2)
    assert report.ok
    assert report.ranks == 256
    assert report.kinds <= 6
    one = folder / "workload.77.et"
    one.write_bytes(one.read_bytes().replace(b"all_reduce", b"all_reducf", 1))
    report = verify(folder, workers=2)
    assert codes(report) == ["checksum"]
    assert "'workload.77.et'" in report.findings[0].message


def test_places_of_traces(tmp_path: Path):
    folder = generated(tmp_path / "out", tp=2)
    assert verify(folder / "workload").ok
    report = verify(folder / "workload.1.et")
    assert report.ok
    assert report.ranks == 1
    assert report.skipped == ["groups, messages and the run: this is one rank"]
    shutil.copy(folder / "workload.0.et", folder / "other.0.et")
    for place, message in (
        (folder, "several runs; name one of .*/other, .*/workload"),
        (tmp_path / "none", "no such directory|holds no traces"),
        (tmp_path, "holds no traces, that is files such as workload.0.et"),
        (tmp_path / "a" / "b", "no such directory"),
    ):
        with pytest.raises(UserError, match=message):
            verify(place)
    with pytest.raises(UserError, match="no such file"):
        verify(folder / "workload", folder / "groups.json")


# ---- damages -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, as a stranger's: without a manifest. Rank 0 sends to 2, 1 to 3; groups of tp."""
    folder = generated(tmp_path_factory.mktemp("sound") / "w", tp=2, pp=2, global_batch_size=3)
    (folder / "manifest.json").unlink()
    return folder


Damage = Callable[[World], Any]
TYPES = {"COMP": COMP, "COLL": COLL, "SEND": SEND, "RECV": RECV}


def found_in(world: World, folder: Path, level: str) -> tuple[Report, dict[str, str]]:
    """Report on a world, and of the first finding of each code what it says."""
    report = verify(world.save(folder / "w"))
    assert report.ok == (level != "error")
    return report, {each.code: each.message for each in reversed(report.of(level))}


@cases
def test_damaged_attribute(
    node: str, attribute: str, value: dict[str, Any] | None, code: str, message: str,
    sound: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """A node of rank 1 has another value, or a value of another type, or none."""
    world = load(sound)
    type_, nth = node.split()
    of = world[1].of(TYPES[type_])[int(nth)]
    drop(of, attribute) if value is None else set_to(of, attribute, **value)
    _, found = found_in(world, tmp_path, "error")
    assert re.search(message, found[code]), found


@cases
def test_damaged_file_of_groups(groups: Any, message: str, sound: Path, tmp_path: Path) -> None:
    world = load(sound)
    assert world.groups is not None
    world.groups = groups if isinstance(groups, tuple) else {**world.groups, **groups}
    _, found = found_in(world, tmp_path, "error")
    assert re.search(message, found["group-file"]), found


def comes_again(w: World, name: str, value: Any) -> None:
    """An attribute a second time."""
    w[1].of(COLL)[2].attr.add(name=name, **value)


def a_partner_twice_and_the_last_is_right(w: World) -> None:
    node = w[1].of(SEND)[1]
    right = attribute(node, "comm_dst").int32_val
    set_to(node, "comm_dst", int32_val=0)
    node.attr.add(name="comm_dst", int32_val=right)


def an_empty_all_gather(w: World) -> None:
    set_to(w[1].of(COLL)[2], "comm_type", int64_val=2)
    set_to(w[1].of(COLL)[2], "comm_size", int64_val=0)


def a_collective_more(w: World) -> None:
    name = attribute(w[1].of(COLL)[-1], "pg_name").string_val
    collective(w[1], int(name), w[1].nodes[-1].id, name="one more")


def another_order(w: World) -> None:
    sizes = [attribute(node, "comm_size") for node in w[1].of(COLL)]
    one, two = next((a, b) for a, b in pairwise(sizes) if a.int64_val != b.int64_val)
    one.int64_val, two.int64_val = two.int64_val, one.int64_val


def all_to_rank_2(w: World) -> None:
    for node in w[1].of(SEND):
        set_to(node, "comm_dst", int32_val=2)


def a_receive_before_what_it_answers(w: World) -> None:
    """Rank 0 sends only after it has received what rank 2 makes of what it sends."""
    first_send, first_recv = w[0].of(SEND)[0], w[0].of(RECV)[0]
    assert first_send.id < first_recv.id
    del first_recv.data_deps[:]
    del first_recv.ctrl_deps[:]
    first_send.data_deps.append(first_recv.id)


DAMAGES: list[tuple[str, str, Damage]] = [
    ("no-nodes", "there are no nodes", lambda w: w[1].nodes.clear()),
    ("duplicate-id", "two nodes have id 7", lambda w: setattr(w[1].nodes[3], "id", 7)),
    ("dangling", r"node 9 needs node 123456 \(data_deps\), which does not exist",
     lambda w: w[1].by_id(9).data_deps.append(123456)),
    ("cycle", "in a circle, which never runs: node 9 needs node 9; not by data_deps alone",
     lambda w: w[1].by_id(9).ctrl_deps.append(9)),
    ("cycle", r"never runs: node \d+ needs node \d+.* needs ",
     lambda w: w[1].by_id(9).data_deps.append(19)),
    ("invalid-node", 'node 9 ".*: type INVALID_NODE, or no type',
     lambda w: w[1].by_id(9).ClearField("type")),
    ("node-type", 'node 9 ".*: a type that Chakra does not have',
     lambda w: setattr(w[1].by_id(9), "type", 9)),
    ("duplicate-attribute", "comm_size comes twice, of which MLCommons' feeder takes the last",
     lambda w: comes_again(w, "comm_size", {"int64_val": 1})),
    ("duplicate-attribute", "pg_name comes twice.*: they differ",
     lambda w: comes_again(w, "pg_name", {"string_val": "no group"})),
    ("duplicate-attribute", "comm_dst comes twice.*: they differ",
     a_partner_twice_and_the_last_is_right),
    ("no-tensor_size", "has no tensor_size", lambda w: add(w[1], STORE, 1)),
    ("comm-size", "comm_size 0: nothing to send", an_empty_all_gather),
    ("idle-member", r"group \d+: rank 1 is a member but issues nothing on it, while rank 0 waits",
     lambda w: [w[1].remove(node) for node in w[1].of(COLL)]),
    ("collectives-differ", r"group 1: its collective 15 is all_reduce of \d+ bytes .* on rank 0, "
     "but missing on rank 1, which issues only 14", lambda w: w[1].remove(w[1].of(COLL)[14])),
    ("collectives-differ", r"its collective 2 is missing on rank 0, .* but all_reduce of 64",
     a_collective_more),
    ("collectives-differ", r"its collective \d+ is all_reduce of (\d+) bytes \(.*\) on rank 0, but",
     another_order),
    ("no-send", r"rank 3: recv of .* from rank 1, which sends no such message",
     lambda w: w[1].remove(w[1].of(SEND)[0])),
    ("lost-send", r"rank 1: send of .* to rank 3, which receives no such",
     lambda w: w[3].remove(w[3].of(RECV)[1])),
    ("lost-send", r"rank 1: send of .* to rank 2, which receives nothing from it", all_to_rank_2),
    ("hang", r"it never ends: rank 0 waits in recv from 2 .*so on in a circle of 2",
     a_receive_before_what_it_answers),
    ("one-member", "group 1 has one member, at which a collective on it hangs",
     lambda w: setattr(w, "groups", {"1": [0], "2": [2, 3]})),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message", "change"), DAMAGES)
def test_damage_is_found(
    code: str, message: str, change: Damage, sound: Path, tmp_path: Path
) -> None:
    world = load(sound)
    change(world)
    report, found = found_in(world, tmp_path, "error")
    assert re.search(message, found[code]), found
    told = json.dumps(report.to_json())
    assert "Traceback" not in told
    assert len(told) < 20_000


def on_both(w: World, **attributes: Any) -> None:
    """A collective more at the end of ranks 0 and 1."""
    for rank in (0, 1):
        collective(w[rank], 1, w[rank].nodes[-1].id, size=1, **attributes)


def a_kernel_with_a_duration_only(w: World) -> None:
    node = w[1].of(COMP)[4]
    drop(node, "num_ops")
    node.duration_micros = 12


def no_dimensions(w: World) -> None:
    for rank in w.ranks:
        last = w[rank].nodes[-1].id
        for dims in ([False, True], [False, False]):
            last = collective(w[rank], 0, last)
            set_to(w[rank].nodes[-1], "involved_dim", bool_list=dims)


def a_large_tag(w: World) -> None:
    for rank, type_ in ((1, SEND), (3, RECV)):
        set_to(w[rank].of(type_)[0], "comm_tag", int32_val=500_000_001)


def a_collective_at_any_time(w: World) -> None:
    for rank in (0, 1):
        for size in (997, 998, 999):
            collective(w[rank], 1, kernel(w[rank]), name="free", size=size)


def groups_of_one_residue(w: World) -> None:
    assert w.groups is not None
    w.groups["501"] = w.groups["1"]
    for rank in w.groups["1"]:
        collective(w[rank], 501, w[rank].nodes[-1].id)


WARNINGS: dict[str, tuple[str, Damage]] = {
    "metadata-node": ("a METADATA_NODE, at which ASTRA-sim aborts", lambda w: add(w[1], 1)),
    "memory-node": ("a memory node: ASTRA-sim then loses the statistics",
                    lambda w: add(w[1], STORE, w[1].of(COLL)[-1].id, tensor_size=64)),
    "cpu-node": ("a CPU node: ASTRA-sim then loses the statistics",
                 lambda w: set_to(w[1].by_id(kernel(w[1], 1)), "is_cpu_op", bool_val=True)),
    "cpu-comm": ("a communication on the CPU, at which ASTRA-sim hangs",
                 lambda w: set_to(w[1].by_id(collective(w[1], 1, 1)), "is_cpu_op", bool_val=True)),
    "only-duration": ("num_ops or tensor_size is missing: runs by its duration",
                      a_kernel_with_a_duration_only),
    "unsupported-collective": ("of type BARRIER, at which ASTRA-sim hangs",
                               lambda w: on_both(w, comm_type=9)),
    "broadcast": ("ASTRA-sim only waits for duration_micros, and for nobody",
                  lambda w: on_both(w, comm_type=5)),
    "zero-size": ("a collective of 0 bytes", lambda w: on_both(w, comm_size=0)),
    "type-of-involved_dim": ("involved_dim is no bool_list, at which ASTRA-sim exits",
                             lambda w: set_to(w[1].of(COLL)[2], "involved_dim", int32_val=1)),
    "no-dims": ("involved_dim is all false: in ASTRA-sim it never ends", no_dimensions),
    "unportable-comm_priority": (
        "comm_priority is int64_val, wanted int32_val",
        lambda w: set_to(w[1].of(COLL)[2], "comm_priority", int64_val=1)),
    "large-tag": ("a comm_tag of 500000000 or more", a_large_tag),
    "short-first": ("a first kernel of less than 1 ns on a fast device",
                    lambda w: kernel(w[1], num_ops=5, tensor_size=8)),
    "unportable-num_ops": ("num_ops is uint64_val, wanted int64_val: MLCommons' feeder takes it",
                           lambda w: set_to(w[1].of(COMP)[4], "num_ops", uint64_val=7)),
    "no-is-cpu-op": ("no is_cpu_op: ASTRA-sim before November 2024",
                     lambda w: [drop(node, "is_cpu_op") for node in w.everywhere()]),
    "empty-metadata": ("the metadata are empty, at which Chakra's Python tools stop",
                       lambda w: [trace.metadata.Clear() for trace in w.ranks.values()]),
    "order-left-to-timing": (
        "rank 0: nothing orders node .* and node .*free.*: ranks .* may .* then wait for ever",
        a_collective_at_any_time),
    "no-groups": ("there is no comm_group.json .* groups are taken to be who uses them",
                  lambda w: setattr(w, "groups", None)),
    "unused-groups": ("1 groups that no rank uses; ASTRA-sim builds each of them on every rank",
                      lambda w: (w.groups or {}).update({"9": [0, 3]})),
    "group-ids": ("groups 1 and 501 have the same id modulo 500 and share ranks",
                  groups_of_one_residue),
}  # fmt: skip


@pytest.mark.parametrize("code", WARNINGS)
def test_warning(code: str, sound: Path, tmp_path: Path) -> None:
    message, change = WARNINGS[code]
    world = load(sound)
    change(world)
    report, found = found_in(world, tmp_path, "warning")
    assert set(found) <= {code, "order-left-to-timing"}
    assert re.search(message, found[code]), found
    assert "run" in report.checks


def test_no_groups_are_missed_where_all_ranks_meet(tmp_path: Path):
    """As in ASTRA-sim's own examples: collectives on all ranks need no file of groups."""
    w = simple(4, {})
    w.groups = None
    for rank in w.ranks:
        collective(w[rank], 0)
    assert verify(w.save(tmp_path / "w")).findings == []


def test_what_is_not_checked_is_not_said_to_be(tmp_path: Path):
    """As of the PyTorch traces in Chakra's repository, whose dependencies go in circles."""
    w = simple(2, {"1": [0, 1]})
    for rank in w.ranks:
        w[rank].by_id(collective(w[rank], 1, 1))
    report = verify(w.save(tmp_path / "w"))
    assert codes(report) == ["cycle"]
    assert report.checks == ["files"]
    assert report.skipped == ["groups, messages and the run: no rank could be read whole"]


def _world(path: Path) -> CheckedWorld:
    """All ranks of a directory, as `verify` compares them."""
    files = find(path)
    parts = parts_of(read(files, 1, digests=False))
    size = len(files.traces)
    return CheckedWorld(parts, size, read_groups(path / "comm_group.json", size, Findings()))


def test_an_order_left_to_timing_can_hang(sound: Path, tmp_path: Path):
    """Ranks that take ready collectives in any order do come to wait for ever, as the warning says.

    And where dependencies order them, no order was ever found that hangs.
    """
    assert search(_world(sound), 8) is None
    world = load(sound)
    a_collective_at_any_time(world)
    why = search(_world(world.save(tmp_path / "w")), 8)
    assert why is not None
    assert re.search(r"rank \d begins all_reduce of \d+ bytes .*free", why), why


# ---- files that are none -------------------------------------------------------------------------


FILES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda _: b"", "the file is empty; a Chakra trace begins with its metadata"),
    ("gzip", gzip.compress, "compressed with gzip, which ASTRA-sim cannot read; gunzip it"),
    ("no metadata", lambda b: b[1 + b[0] :], "the first message is a node, which readers skip"),
    ("no message", lambda b: b + b"\0\x01", "an empty message where a node was expected"),
    ("text", lambda _: b"What is this?\n" * 99, "byte 1: no valid GlobalMetadata|bytes with its"),
    ("cut", lambda b: b[:-1], r"bytes with its length, but \d+ are left in the file"),
    ("cut in a length", lambda b: b + b"\xff", "the file ends within a message or its length"),
    ("length", lambda b: b + b"\xff" * 8 + b"\x0f", r"a message of 1152921504606846\d+ bytes"),
    ("no length", lambda b: b + b"\xff" * 11, "not the length of a message"),
    ("noise", lambda b: b + bytes([40, *range(7, 47)]), "no valid Node|left in the file"),
    ("group", lambda b: b + b"\x02\x0b\x0b", "no valid Node"),
    ("not UTF-8", lambda b: b.replace(b"embedding", b"embed\xff\xffng"), "Node.*(?i:utf-8)"),
]


@pytest.mark.parametrize(("title", "change", "message"), FILES, ids=[row[0] for row in FILES])
def test_damaged_file(
    title: str, change: Callable[[bytes], bytes], message: str, sound: Path, tmp_path: Path
):
    folder = shutil.copytree(sound, tmp_path / "w")
    file = folder / "workload.1.et"
    file.write_bytes(change(file.read_bytes()))
    report = verify(folder)
    assert codes(report) == ["damaged"]
    assert re.search(message, report.findings[0].message), report.findings[0].message
    assert report.findings[0].rank == 1
    assert report.skipped == ["the run: only 3 of 4 ranks could be read whole"]


def test_a_missing_rank(sound: Path, tmp_path: Path):
    folder = shutil.copytree(sound, tmp_path / "w")
    (folder / "workload.1.et").unlink()
    report = verify(folder)
    assert codes(report) == ["missing-rank"]
    assert "rank 1 has no file, but rank 3 has" in report.findings[0].message
    shutil.copy(folder / "workload.0.et", folder / "workload.999999999.et")
    report = verify(folder)
    assert "missing-rank" in codes(report)
    assert report.skipped == ["groups, messages and the run: nearly all ranks are missing"]


def test_a_directory_and_a_pipe_in_place_of_files(sound: Path, tmp_path: Path):
    import os

    folder = shutil.copytree(sound, tmp_path / "w")
    (folder / "workload.1.et").unlink()
    (folder / "workload.1.et").mkdir()
    (folder / "workload.2.et").unlink()
    os.mkfifo(folder / "workload.2.et")
    report = verify(folder)
    assert codes(report) == ["damaged"]
    assert report.findings[0].ranks == 2
    assert "not a file" in report.findings[0].message


def test_a_trace_of_a_terabyte_is_damaged(tmp_path: Path):
    """Its checksum would take an hour; what is wrong with it is told by its first bytes."""
    import os

    stagewright.generate(
        stagewright.compile("gpt2", layers=1, seq_length=8, tp=2), tmp_path / "out"
    )
    os.truncate(tmp_path / "out" / "workload.1.et", 1 << 40)
    report = verify(tmp_path / "out")
    assert "damaged" in codes(report)


# ---- our manifest --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `stagewright generate` writes it."""
    folder = tmp_path_factory.mktemp("ours") / "w"
    stagewright.generate(compile(Run(**TOY, tp=2, dp=2)), str(folder))
    return folder


def change_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_any_changed_byte_is_found_by_its_checksum(ours: Path, tmp_path: Path):
    folder = shutil.copytree(ours, tmp_path / "w")
    dice = np.random.default_rng(1)
    names = ["workload.0.et", "workload.3.et", "comm_group.json"]
    for name in names * 5:
        file, whole = folder / name, (folder / name).read_bytes()
        at = int(dice.integers(len(whole)))
        file.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << int(dice.integers(8))]) + whole[at + 1 :]
        )
        report = verify(folder)
        assert "checksum" in codes(report)
        (found,) = (f for f in report.findings if f.code == "checksum")
        assert f"'{name}' is not as it was written" in found.message
        file.write_bytes(whole)
    assert verify(folder).findings == []


def test_files_and_manifest_disagree(ours: Path, tmp_path: Path):
    folder = shutil.copytree(ours, tmp_path / "w")
    shutil.copy(folder / "workload.3.et", folder / "workload.4.et")
    assert "extra-file" in codes(verify(folder))
    (folder / "workload.4.et").unlink()
    (folder / "workload.3.et").unlink()
    report = verify(folder)
    assert codes(report) == ["missing-file", "missing-rank"] or codes(report) == ["missing-file"]


def test_a_manifest_of_another_run(ours: Path, tmp_path: Path):
    folder = shutil.copytree(ours, tmp_path / "w")
    change_manifest(folder, lambda m: m["run"].update(seq_length=32))
    report = verify(folder)
    assert report.ok
    assert codes(report, "warning") == ["not-as-made"]
    assert "workload.0.et is not what this version makes" in report.findings[0].message


def test_exchanged_files_with_right_checksums(ours: Path, tmp_path: Path):
    """Two ranks of other groups exchanged, and the manifest made to agree: wrong partners."""
    folder = shutil.copytree(ours, tmp_path / "w")
    files = [folder / f"workload.{rank}.et" for rank in (1, 2)]
    one, two = (file.read_bytes() for file in files)
    files[0].write_bytes(two)
    files[1].write_bytes(one)

    def exchange(m: Any) -> None:
        listed = m["files"]
        listed[files[0].name], listed[files[1].name] = (
            listed[files[1].name],
            listed[files[0].name],
        )

    change_manifest(folder, exchange)
    report = verify(folder)
    assert "not-member" in codes(report)
    assert "not-as-made" in codes(report, "warning")


HOSTILE: list[Callable[[Any], None]] = [
    lambda m: m.update(files=None),
    lambda m: m["files"].update({"../../../etc/passwd": {"sha256": "0"}}),
    lambda m: m["files"].update({"/etc/passwd": {"sha256": "0"}}),
    lambda m: m["files"].update({"workload.0.et": None}),
    lambda m: m["files"].update({"\0\n" * 500: {"sha256": 1}}),
    lambda m: m.update(world_size=10**18),
    lambda m: m.update(world_size="many"),
    lambda m: m.update(run=None),
    lambda m: m.update(run={"model": "../../nowhere", "tp": "x"}),
    lambda m: m["run"].update(layers=10**6, global_batch_size=2),
    lambda m: m["run"].update(tp=10**12),
    lambda m: m.update(model=None),
    lambda m: m["model"].update(hidden_size="wide"),
    lambda m: m["model"].update(num_layers=10**12),
    lambda m: m["model"].update(vocab_size=-5, ffn_hidden_size=0),
    lambda m: m["model"].update(mixers=[[]]),
]


@pytest.mark.numerics
@pytest.mark.parametrize("nth", range(len(HOSTILE)))
def test_hostile_manifest(nth: int, ours: Path, tmp_path: Path):
    folder = shutil.copytree(ours, tmp_path / "w")
    change_manifest(folder, HOSTILE[nth])
    report = verify(folder)
    assert len(json.dumps(report.to_json())) < 20_000
    for text in ("{" * 100_000, "[" * 100_000, '{"stagewright": 1}', "\xff", "NaN", ""):
        (folder / "manifest.json").write_text(text, encoding="latin-1")
        assert codes(verify(folder))[:1] == ["manifest"]


# ---- hangs, in words -----------------------------------------------------------------------------


def told(world: World, tmp_path: Path) -> str:
    """What is said about a world that hangs."""
    report = verify(world.save(tmp_path / "w"))
    assert codes(report) == ["hang"], report.findings
    return report.findings[0].message


def test_two_ranks_take_two_groups_in_opposite_order(tmp_path: Path):
    w = simple(2, {"1": [0, 1], "2": [0, 1]})
    for rank, groups in ((0, (1, 2)), (1, (2, 1))):
        first = collective(w[rank], groups[0], name=f"first of {rank}", microbatch=5)
        collective(w[rank], groups[1], first, name=f"second of {rank}")
    assert told(w, tmp_path) == (
        'it never ends: rank 0 waits in all_reduce on group 1 (number 1 there, node 1 "first of 0",'
        " microbatch 5) for rank 1, which has not reached it; rank 1 waits in all_reduce on group 2"
        ' (number 1 there, node 1 "first of 1", microbatch 5) for rank 0, which has not reached it;'
        " and so on in a circle of 2"
    )


def test_a_circle_through_messages_and_groups(tmp_path: Path):
    """The issue's example: a receive, an all-reduce, and a third rank that waits for the first."""
    w = simple(3, {"12": [1, 2]})
    first = recv(w[0], 1, 17, name="layer40.mlp_out", microbatch=5)
    send(w[0], 2, 18, first, name="onwards")
    meets = collective(w[1], 12, name="norm")
    send(w[1], 0, 17, meets, name="layer40.mlp_out", microbatch=5)
    last = recv(w[2], 0, 18, name="onwards")
    collective(w[2], 12, last, name="norm")
    assert told(w, tmp_path) == (
        'it never ends: rank 0 waits in recv from 1 (tag 17, node 1 "layer40.mlp_out", microbatch '
        "5), which has not sent it; rank 1 waits in all_reduce on group 12 (number 1 there, node 1 "
        '"norm") for rank 2, which has not reached it; rank 2 waits in recv from 0 (tag 18, node 1 '
        '"onwards"), which has not sent it; and so on in a circle of 3'
    )


def test_a_rank_outside_the_circle_is_left_out_of_it(tmp_path: Path):
    w = simple(3, {"1": [1, 2], "2": [1, 2]})
    recv(w[0], 1, 5)
    for rank, groups in ((1, (1, 2)), (2, (2, 1))):
        first = collective(w[rank], groups[0])
        last = collective(w[rank], groups[1], first)
        if rank == 1:
            send(w[1], 0, 5, last)
    message = told(w, tmp_path)
    assert "rank 0" not in message
    assert message.endswith("and so on in a circle of 2")


def test_a_ring_of_one_program_that_receives_first(tmp_path: Path):
    """Ranks of one program, in step: each waits for its neighbour before it sends."""
    w = simple(6, {})
    for rank in range(6):
        before = recv(w[rank], (rank - 1) % 6, 3)
        send(w[rank], (rank + 1) % 6, 3, before)
    message = told(w, tmp_path)
    assert "rank 0 waits in recv from 5 (tag 3" in message
    assert message.endswith("and so on in a circle of 6")


def test_what_hangs_in_file_order_only_is_sound(tmp_path: Path):
    """A receive is posted first but nothing that its sender needs waits for it."""
    w = simple(2, {})
    for rank in range(2):
        early = recv(w[rank], 1 - rank, 1)
        work = kernel(w[rank])
        send(w[rank], 1 - rank, 1, work)
        kernel(w[rank], early)
        kernel(w[rank], early, 3)
    assert verify(w.save(tmp_path / "w")).findings == []


def test_parts_whose_groups_reach_into_different_parts(tmp_path: Path):
    """Ranks 0 and 1 run one program and meet 2 and 3, which run two programs, in other orders."""
    w = simple(4, {"1": [0, 2], "2": [1, 3]})
    for rank in range(4):
        group = 1 + rank % 2
        first = collective(w[rank], group, size=8)
        second = collective(w[rank], group, first, size=16)
        if rank == 3:
            kernel(w[3], second, name="one more")
    assert verify(w.save(tmp_path / "w")).findings == []


def test_ranks_of_a_part_that_do_not_go_in_step(tmp_path: Path):
    """Ranks 0 and 1 run one program, but 1 can go on only after 0 has: rank by rank it ends."""
    w = simple(4, {"1": [0, 2], "2": [1, 3]})
    for rank in (0, 1):
        met = collective(w[rank], 1 + rank)
        send(w[rank], 3 - rank, 5, met)
    recv(w[2], 1, 5, collective(w[2], 1))
    collective(w[3], 2, recv(w[3], 0, 5))
    report = verify(w.save(tmp_path / "w"))
    assert report.findings == []
    assert report.kinds == 3


def test_same_bytes_on_wrong_groups(tmp_path: Path):
    """A trace that names one group where the first of its kind names two is read by itself."""
    w = simple(4, {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]})
    for rank, (one, two) in enumerate(((1, 3), (1, 4), (2, 3), (4, 4))):
        first = collective(w[rank], one)
        collective(w[rank], two, first)
    report = verify(w.save(tmp_path / "w"))
    assert {"idle-member", "collectives-differ"} <= set(codes(report))


def test_all_ranks_without_a_name(tmp_path: Path):
    w = simple(3, {})
    for rank in range(3):
        first = collective(w[rank], 0, microbatch=1)
        drop(w[rank].by_id(collective(w[rank], 0, first)), "pg_name")
    assert verify(w.save(tmp_path / "w")).findings == []
    w[2].nodes.pop()
    report = verify(w.save(tmp_path / "w"))
    assert "collectives-differ" in codes(report)
    assert "for rank 2, which never issues it" in report.findings[-1].message


# ---- other people's traces: unusual and legal ----------------------------------------------------


UNUSUAL: dict[str, Damage] = {
    "no version": lambda w: [t.metadata.ClearField("version") for t in w.ranks.values()],
    "parents after children": lambda w: [t.nodes.reverse() for t in w.ranks.values()],
    "ids from the top": lambda w: renumber(w, lambda id_: 2**64 - 1 - id_),
    "sparse ids": lambda w: renumber(w, lambda id_: id_ * 0x9E3779B97F4A7C15 % 2**64),
    "id 0": lambda w: renumber(w, lambda id_: id_ - 1),
    "dependencies twice": lambda w: [n.ctrl_deps.extend(n.data_deps) for n in w.everywhere()],
    "doc strings": lambda w: [
        setattr(a, "doc_string", "x") for n in w.everywhere() for a in n.attr
    ],
    "inputs": lambda w: [setattr(n.inputs, "values", "[1, 2]") for n in w.everywhere()],
    "unknown attributes": lambda w: [
        n.attr.add(name=f"{n.id}", double_list={"values": [1.5]}) for n in w.everywhere()
    ],
    "long names": lambda w: [setattr(n, "name", "é" * 3000) for n in w[1].nodes],
}


@pytest.mark.parametrize("title", UNUSUAL)
def test_unusual_but_legal(title: str, sound: Path, tmp_path: Path):
    world = load(sound)
    UNUSUAL[title](world)
    report = verify(world.save(tmp_path / "w"))
    assert report.findings == []
    assert "run" in report.checks


def test_an_attribute_twice_with_one_value(sound: Path, tmp_path: Path):
    world = load(sound)
    node = world[1].of(COLL)[2]
    node.attr.extend([a for a in node.attr if a.name in ("comm_size", "pg_name")])
    report = verify(world.save(tmp_path / "w"))
    assert report.ok
    assert codes(report, "warning") == ["repeated-attribute"]


def test_integers_of_other_types(sound: Path, tmp_path: Path):
    """As STAGE writes is_cpu_op: read everywhere but by MLCommons' feeder."""
    world = load(sound)
    for node in world.everywhere():
        set_to(node, "is_cpu_op", int32_val=0)
    report = verify(world.save(tmp_path / "w"))
    assert report.ok
    assert codes(report, "warning") == ["unportable-is_cpu_op"]
    assert report.findings[0].nodes == sum(1 for _ in world.everywhere())
    assert report.findings[0].ranks == 4


def test_groups_under_the_name_that_stage_gives_them(sound: Path, tmp_path: Path):
    folder = shutil.copytree(sound, tmp_path / "w")
    (folder / "comm_group.json").rename(folder / "workload.json")
    assert verify(folder).findings == []
    (folder / "workload.json").rename(tmp_path / "elsewhere.json")
    assert verify(folder, tmp_path / "elsewhere.json").findings == []


# ---- our own generator ---------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Toy runs of at most 32 ranks, most of them valid."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    tp, cp, dp, pp = one(1, 2, 4), one(1, 2), one(1, 2, 3), one(1, 2, 3)
    layers = draw(st.integers(pp, 6))
    vpp = one(1, 2) if pp > 1 and layers >= 2 * pp else 1
    zero = one(0, 1, 2, 3)
    return Run(
        model=one("gpt2", "llama3.1-8b", "gemma2-2b"), vocab=512, layers=layers,
        tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, zero=zero,
        schedule=None if vpp > 1 else one("1f1b", "gpipe"),
        seq_length=4 * cp * tp, global_batch_size=dp * one(1, 2, 3) * (pp if vpp > 1 else 1),
        sequence_parallel=tp > 1 and one(True, False), cp_comm_type=one("p2p", "all_gather", "a2a"),
        recompute=one("none", "full"), bucket=one("layer", "parameter"), fuse=one(True, False),
        order=one("tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep"), streams=one("one", "separate"),
    )  # fmt: skip


@pytest.mark.slow
@settings(
    max_examples=times(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(run=runs())
def test_random_runs_are_sound(run: Run, tmp_path_factory: pytest.TempPathFactory):
    try:
        compiled = compile(run)
    except UserError:
        assume(False)
    assert check_program(compiled.program)["passed"]
    out = tmp_path_factory.mktemp("run") / "out"
    stagewright.generate(compiled, str(out))
    report = verify(out)
    assert report.of("error") == []
    assert set(codes(report, "warning")) <= {"order-left-to-timing", "short-first"}
    if run.streams == "one":
        assert "order-left-to-timing" not in codes(report, "warning")
    shutil.rmtree(out)


def program(**settings: Any) -> Program:
    return compile(Run(**TOY | settings)).program


def test_check_program_says_what_it_has_checked():
    checked = check_program(program(tp=2, pp=2, dp=2, cp=2))
    assert checked["communication"] == "one order per rank"
    assert checked["run"] == "rank by rank"
    separate = check_program(program(pp=2, dp=2, streams="separate"))
    assert separate["communication"] == "one order per communicator"
    assert check_program(program(dp=4096, pp=2, tp=4))["run"] == "by rank class"
    assert check_program(program(tp=2)) == check_program(program(tp=2))


def _at(column: str, kind: int, value: int) -> Callable[[Program], None]:
    def change(p: Program) -> None:
        tasks = p.classes[-1].tasks
        row = int(np.flatnonzero(tasks.kind == kind)[1])
        getattr(tasks, column)[row] = value

    return change


def _needs_itself(p: Program) -> None:
    tasks = p.classes[0].tasks
    row = int(np.flatnonzero(np.diff(tasks.data_ptr))[2])
    tasks.data[tasks.data_ptr[row]] = row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_needs_itself, "needs a row that is not before it"),
        (_at("traffic", 0, 0), "a kernel with negative FLOPs or no traffic"),
        (_at("comm_bytes", 1, 0), "less than a byte to send"),
        (_at("collective", 1, 9), "no such collective"),
        (_at("tag", 3, -1), "a message without a tag"),
        (_at("slot", 3, -1), "no partner"),
        (_at("tag", 3, 77), "which sends no such message"),
        (_at("comm_bytes", 3, 1), "which sends no such message, but a send of"),
    ],
)
def test_unsound_program(change: Callable[[Program], None], message: str):
    broken = program(tp=2, pp=2, global_batch_size=4)
    change(broken)
    with pytest.raises(Unsound, match=message):
        check_program(broken)


def test_a_program_that_hangs_is_told_in_words():
    broken = program(pp=2, global_batch_size=4)
    tasks = broken.classes[1].tasks
    sends = np.flatnonzero(tasks.kind == 2)
    # The first gradient is sent in place of the last, and so after what needs it.
    tasks.tag[sends[[0, -1]]] = tasks.tag[sends[[-1, 0]]]
    with pytest.raises(UserError, match=r"this schedule never ends: rank 0 waits in .*circle"):
        check_program(broken)
