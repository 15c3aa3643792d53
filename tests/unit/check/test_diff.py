"""`inspect` and `diff`, and the three commands: what they say, and their exit codes."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handmade import COLL, COMP, add, collective, generated, kernel, load, renumber, set_to, simple
from helpers import Command, cases
from stagewright.check.diff import diff
from stagewright.check.inspect import inspect, nodes
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run

pytestmark = pytest.mark.numerics  # whole traces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks; without a manifest."""
    found = generated(tmp_path_factory.mktemp("sound") / "w", tp=2, pp=2, global_batch_size=3)
    (found / "manifest.json").unlink()
    return found


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_adds_up_what_the_program_says(folder: Path):
    tasks = (
        compile(
            Run(model="gpt2", layers=2, seq_length=16, vocab=64, tp=2, pp=2, global_batch_size=3)
        )
        .program.classes[1]
        .tasks
    )
    found = inspect(folder / "workload.3.et")
    assert found.nodes == len(tasks)
    totals = found.totals
    assert sum(one.nodes for one in totals.values()) == len(tasks)
    assert sum(one.flops for one in totals.values()) == int(tasks.flops.sum())
    sent = sum(one.bytes for key, one in totals.items() if key.type != "comp")
    assert sent == int(tasks.comm_bytes.sum())
    counts = Counter(key.type for key, one in totals.items() for _ in range(one.nodes))
    kinds = [int((tasks.kind == kind).sum()) for kind in (TaskKind.COMPUTE, TaskKind.COLLECTIVE)]
    assert [counts["comp"], counts["comm_coll"]] == kinds
    assert {key.group for key in totals if key.type == "comm_coll"} == {2, 4}
    assert {key.phase for key in totals} == {"forward", "backward", "optimizer"}
    assert found.metadata["version"] == "1.0.0"
    assert found.metadata["pipeline_rank"] == 1


def test_critical_path(tmp_path: Path):
    w = simple(1, {})
    first = kernel(w[0])
    for _ in range(3):
        kernel(w[0], first)
    long = kernel(w[0], kernel(w[0], first))
    last = collective(w[0], 1, long, 3)
    kernel(w[0], last, num_ops=2**62)
    kernel(w[0], num_ops=2**62)
    kernel(w[0], num_ops=2**62)
    found = inspect(w.save(tmp_path / "w") / "workload.0.et")
    assert found.depth == 5
    assert found.path_types == {"comp": 4, "comm_coll": 1}
    (kernels,) = (one for key, one in found.totals.items() if key.type == "comp")
    assert kernels.flops == 3 * 2**62 + 6 * 10**9  # beyond 64 bits
    w[0].by_id(1).data_deps.append(last)
    assert inspect(w.save(tmp_path / "w") / "workload.0.et").depth == 0


def test_nodes(folder: Path):
    found = list(nodes(folder / "workload.0.et", 2, 4))
    assert [node["id"] for node in found] == [3, 4, 5]
    assert found[0]["name"] == "embedding.word.all_reduce"
    assert found[0]["type"] == "comm_coll"
    assert found[0]["attributes"]["pg_name"] == {"type": "string_val", "value": "1"}
    assert len(list(nodes(folder / "workload.0.et"))) == inspect(folder / "workload.0.et").nodes
    assert list(nodes(folder / "workload.0.et", 10**6, 10**7)) == []


# ---- diff ----------------------------------------------------------------------------------------


Change = Callable[[Any], Any]
SAME: dict[str, Change] = {
    "nothing": lambda w: None,
    "names": lambda w: [setattr(n, "name", "another") for n in w.everywhere()],
    "ids": lambda w: renumber(w, lambda id_: 7 * id_ + 1),
    "order in the file": lambda w: [t.nodes.reverse() for t in w.ranks.values()],
    "tags": lambda w: [
        set_to(n, "comm_tag", int32_val=100 + _tag(n)) for n in w.everywhere() if n.type in (5, 6)
    ],
    "metadata": lambda w: [t.metadata.Clear() for t in w.ranks.values()],
}


def _tag(node: Any) -> int:
    return next(a.int32_val for a in node.attr if a.name == "comm_tag")


@pytest.mark.parametrize("title", SAME)
def test_same_content(title: str, folder: Path, tmp_path: Path):
    world = load(folder)
    SAME[title](world)
    other = world.save(tmp_path / "w")
    assert diff(folder, other).same
    found = diff(folder / "workload.1.et", other / "workload.1.et")
    assert found.same
    assert found.to_json()["totals"] == []


def _kernel(w: Any) -> Any:
    return w[1].of(COMP)[3]


DIFFERENT: dict[str, tuple[Change, Callable[[Any], bool]]] = {
    "FLOPs": (
        lambda w: set_to(_kernel(w), "num_ops", int64_val=5),
        lambda d: "flops" in d.numbers and len(d.totals) == 1,
    ),
    "bytes": (
        lambda w: set_to(_kernel(w), "tensor_size", uint64_val=5),
        lambda d: not d.numbers and len(d.totals) == 1,
    ),
    "phase": (
        lambda w: set_to(_kernel(w), "phase", string_val="recompute"),
        lambda d: {key.phase for key in d.totals} == {"forward", "recompute"},
    ),
    "a node more": (
        lambda w: add(w[1], COMP, 1, num_ops=7, tensor_size=7),
        lambda d: d.numbers["nodes"][1] == d.numbers["nodes"][0] + 1,
    ),
    "a dependency": (
        lambda w: w[1].nodes[-1].data_deps.append(2),
        lambda d: list(d.numbers) == ["data dependencies"] and "1 of 4 ranks" in d.notes[0],
    ),
    "another group": (
        lambda w: w.groups.update({"1": [1, 0, 2]}),
        lambda d: "1 groups are only in A, such as [0, 1]" in d.notes,
    ),
    "another peer": (
        lambda w: [set_to(n, "comm_dst", int32_val=2) for n in w[1].of(5)],
        lambda d: "[1, 3]" in d.notes[0],
    ),
    "a rank less": (
        lambda w: w.ranks.pop(3),
        lambda d: d.numbers["ranks"] == (4, 3),
    ),
    "the kind of a collective": (
        lambda w: set_to(w[1].of(COLL)[1], "comm_type", int64_val=7),
        lambda d: {key.op for key in d.totals} == {"all_reduce", "reduce_scatter"},
    ),
}


@pytest.mark.parametrize("title", DIFFERENT)
def test_different_content(title: str, folder: Path, tmp_path: Path):
    change, right = DIFFERENT[title]
    world = load(folder)
    change(world)
    found = diff(folder, world.save(tmp_path / "w"))
    assert not found.same
    assert right(found), found
    json.dumps(found.to_json())


def test_options_change_what_they_should(tmp_path: Path):
    base = generated(tmp_path / "base", tp=2, dp=2)
    found = diff(base, generated(tmp_path / "sp", tp=2, dp=2, sequence_parallel=True))
    ops = {key.op for key in found.totals if key.type == "comm_coll"}
    assert ops == {"all_reduce", "all_gather", "reduce_scatter"}
    found = diff(base, generated(tmp_path / "order", tp=2, dp=2, order="dp-tp-cp-ep-pp"))
    assert not found.numbers
    assert not found.totals
    assert any("groups carry other collectives, such as [0, 1]: " in note for note in found.notes)


def test_what_cannot_be_compared(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no such directory"):
        diff(folder, tmp_path / "none" / "none")
    broken = shutil.copytree(folder, tmp_path / "w")
    (broken / "workload.2.et").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"workload.2.et: byte 0: the file ends within"):
        diff(folder, broken)


# ---- commands ------------------------------------------------------------------------------------


def test_command_verify(folder: Path, tmp_path: Path, command: Command):
    code, out, err = command("verify", folder)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "sound"
    assert f"{folder}: 4 files, 2 kinds, " in out
    code, out, _ = command("verify", folder, "--json", "--workers", 1)
    assert code == 0
    assert json.loads(out)["ok"] is True
    world = load(folder)
    world[1].by_id(9).data_deps.append(4711)
    set_to(world[0].of(COMP)[3], "num_ops", uint64_val=5)
    broken = world.save(tmp_path / "w")
    code, out, err = command("verify", broken)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith("error [dangling] rank 1: node 9 needs node 4711")
    assert lines[1].startswith("warning [unportable-num_ops] rank 0: node ")
    assert lines[-1] == "1 error, 1 warning"
    code, out, _ = command("verify", broken, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    assert [each["code"] for each in found["findings"]] == ["dangling", "unportable-num_ops"]
    world = load(folder)
    set_to(world[0].of(COMP)[3], "num_ops", uint64_val=5)
    world.save(broken)
    assert command("verify", broken)[0] == 0
    assert command("verify", broken, "--strict")[0] == 1


@cases
def test_commands_used_wrongly(line: str, folder: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command(line.format(folder=folder, tmp=tmp_path))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"stagewright: error: [^\n]+\n", err)


def test_command_inspect(folder: Path, command: Command):
    code, out, _ = command("inspect", folder / "workload.0.et")
    assert code == 0
    assert "critical path: " in out
    assert re.search(r"comm_coll +backward +all_reduce +2 ", out)
    code, out, _ = command("inspect", folder / "workload.0.et", "--json")
    assert json.loads(out)["nodes"] == len(load(folder)[0].nodes)
    code, out, _ = command("inspect", folder / "workload.0.et", "--nodes", "2-3")
    assert "embedding.word.all_reduce" in out
    assert "pg_name=1" in out
    code, out, _ = command("inspect", folder / "workload.0.et", "--nodes", "2", "--json")
    assert [node["id"] for node in json.loads(out)] == [3]


def test_a_foreign_text_does_not_reach_the_terminal(tmp_path: Path, command: Command):
    w = simple(1, {})
    kernel(w[0], name="\x1b[2J[red]ha\n" + "x" * 10_000)
    w[0].nodes[0].attr.add(name="op", string_val="\x1b]0;title\x07")
    file = w.save(tmp_path / "w") / "workload.0.et"
    for arguments in (
        ["inspect", file],
        ["inspect", file, "--nodes", "0-9"],
        ["verify", file.parent],
    ):
        _, out, err = command(*arguments)
        assert "\x1b" not in out + err
        assert "\x07" not in out + err
        assert len(out) < 50_000


def test_command_diff(folder: Path, tmp_path: Path, command: Command):
    code, out, _ = command("diff", folder, folder)
    assert code == 0
    assert out.splitlines()[-1] == "the same content"
    world = load(folder)
    set_to(_kernel(world), "num_ops", int64_val=5)
    other = world.save(tmp_path / "w")
    code, out, _ = command("diff", folder, other)
    assert code == 1
    assert "flops: " in out
    code, out, _ = command("diff", folder, other, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["same"] is False
    assert found["totals"][0]["b"]["flops"] < found["totals"][0]["a"]["flops"]
