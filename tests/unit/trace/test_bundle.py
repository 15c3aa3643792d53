"""A bundle: ranks out of it are those that generate writes, and what reads traces reads it."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import fuzz
import stagewright as sw
from helpers import some, table_of
from stagewright.check.diff import diff
from stagewright.check.regenerate import difference
from stagewright.check.verify import verify
from stagewright.cli.main import commands
from stagewright.errors import UserError
from stagewright.time.measured import to_csv
from stagewright.trace.formats import json as readable
from stagewright.trace.write import expand

pytestmark = pytest.mark.numerics  # whole bundles are written and read

TOY = {"model": "llama3-8b", "layers": 4, "seq_length": 64, "vocab": 128}
RUNS = table_of("test_bundle", "runs")


def compiled(**settings: Any) -> sw.Compiled:
    return sw.compile(sw.Run(**TOY | settings))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 16 ranks."""
    path = tmp_path_factory.mktemp("bundle") / "toy.bundle"
    sw.generate(compiled(tp=2, dp=4, pp=2), str(path), format="bundle")
    return path


# ---- ranks out of it -----------------------------------------------------------------------------


@pytest.mark.numerics
@pytest.mark.parametrize("name", some([*RUNS]))
def test_expanded_is_what_generate_writes(name: str, tmp_path: Path):
    run = compiled(**RUNS[name])
    sw.generate(run, f"{tmp_path}/a.bundle", format="bundle")
    source = sw.Bundle(tmp_path / "a.bundle")
    assert difference(source.program(), run.program) == ""
    for format in ("chakra", "json"):
        for ranks in (None, sorted({0, source.world_size - 1})):
            sw.generate(run, f"{tmp_path}/generated", format=format, ranks=ranks, force=True)
            told = expand(source, tmp_path / "expanded", format=format, ranks=ranks, force=True)
            assert contents(tmp_path / "expanded") == contents(tmp_path / "generated")
            assert told == json.loads((tmp_path / "generated" / "manifest.json").read_bytes())


def test_measured_durations_come_along(tmp_path: Path):
    run = compiled(tp=2, pp=2)
    rows = to_csv(run.program).splitlines()
    table = [rows[0], *(row + "12.5" for row in rows[1:-3])]
    (tmp_path / "k.csv").write_text("\n".join(table))
    durations = str(tmp_path / "k.csv")
    sw.generate(run, f"{tmp_path}/g", durations=durations)
    sw.generate(run, f"{tmp_path}/b", durations=durations, format="bundle")
    expand(sw.Bundle(tmp_path / "b"), tmp_path / "e")
    assert contents(tmp_path / "e") == contents(tmp_path / "g")
    assert verify(tmp_path / "b").findings == []


def test_same_program_same_bytes(tmp_path: Path, made: Path):
    sw.generate(compiled(tp=2, dp=4, pp=2), f"{tmp_path}/again", format="bundle")
    assert (tmp_path / "again").read_bytes() == made.read_bytes()


def test_nodes_of_a_rank(made: Path):
    source, run = sw.Bundle(made), compiled(tp=2, dp=4, pp=2)
    for rank in (0, 9, 15):
        of = next(of for of in run.program.classes if rank in of.ranks)
        assert list(source.nodes(rank)) == list(readable.nodes(run.program, of.tasks, rank))
    with pytest.raises(UserError, match=r"rank 16: .* has 16 ranks, 0 to 15"):
        source.nodes(16)


def test_other_tools_open_it(made: Path):
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        assert len(archive.comment) == 64 + len("sha256 of all before: ")
    arrays = np.load(made)
    program = sw.Bundle(made).program()
    assert np.array_equal(arrays["class1/tasks/flops"], program.classes[1].tasks.flops)
    assert np.array_equal(np.cumsum(arrays["class1/ranks"]), program.classes[1].ranks)


# ---- what reads it -------------------------------------------------------------------------------


@pytest.mark.numerics
def test_diff(made: Path, tmp_path: Path):
    sw.generate(compiled(tp=2, dp=4, pp=2), f"{tmp_path}/traces")
    for a, b in ((made, tmp_path / "traces"), (tmp_path / "traces", made), (made, made)):
        assert diff(a, b).same
    for settings in ({"dp": 8}, {"dp": 4, "seq_length": 32}, {"dp": 4, "order": "dp-tp-pp-cp-ep"}):
        other = compiled(tp=2, pp=2, **settings)
        sw.generate(other, f"{tmp_path}/other", force=True)
        sw.generate(other, f"{tmp_path}/other.bundle", format="bundle", force=True)
        files = diff(tmp_path / "traces", tmp_path / "other")
        found = diff(made, tmp_path / "other.bundle")
        assert not found.same
        assert (found.numbers, found.totals, found.notes) == (
            files.numbers,
            files.totals,
            files.notes,
        )


def test_show(made: Path):
    live = ["llama3-8b", "--layers", 4, "--seq-length", 64, "--vocab", 128]
    live += ["--tp", 2, "--dp", 4, "--pp", 2]
    for more in ([], ["--json"], ["--graph"], ["--schedule-picture"]):
        assert call("show", made, *more).output == call("show", *live, *more).output
    assert call("show", made, "--tp", 4).output == call("show", "--config", made, "--tp", 4).output


def test_inspect(made: Path, tmp_path: Path):
    expand(sw.Bundle(made), tmp_path / "out", ranks=[0, 9])
    for rank in (0, 9):
        trace = tmp_path / "out" / f"workload.{rank}.et"
        for more in (["--nodes", "0-9"], ["--json"]):
            bundled = call("inspect", made, "--rank", rank, *more).output
            assert bundled.replace(f"{made}, rank {rank}", str(trace)) == (
                call("inspect", trace, *more).output
            )
    assert call("inspect", made, "--json").output == (
        call("inspect", made, "--rank", 0, "--json").output
    )
    with pytest.raises(UserError, match="is no bundle"):
        call("inspect", tmp_path / "out" / "workload.0.et", "--rank", 1)


# ---- what goes wrong -----------------------------------------------------------------------------


def test_place(made: Path, tmp_path: Path):
    run = compiled(tp=2)
    with pytest.raises(UserError, match="holds every rank"):
        sw.generate(run, f"{tmp_path}/b", format="bundle", ranks=[0])
    (tmp_path / "mine").write_text("thesis")
    with pytest.raises(UserError, match="exists already"):
        sw.generate(run, f"{tmp_path}/mine", format="bundle")
    with pytest.raises(UserError, match="may be yours"):
        sw.generate(run, f"{tmp_path}/mine", format="bundle", force=True)
    shutil.copy(made, tmp_path / "old")
    sw.generate(run, f"{tmp_path}/old", format="bundle", force=True)
    assert sw.Bundle(tmp_path / "old").world_size == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "old"]
    with pytest.raises(UserError, match="choose of chakra, dot, json"):
        expand(sw.Bundle(made), tmp_path / "out", format="bundle")
    with pytest.raises(UserError, match="rank 16"):
        expand(sw.Bundle(made), tmp_path / "out", ranks=[16])
    with pytest.raises(UserError, match="is no bundle"):
        sw.Bundle(tmp_path / "mine")
    with pytest.raises(UserError, match="cannot be read"):
        sw.Bundle(tmp_path / "absent")


def test_any_changed_or_missing_byte_is_found(made: Path, tmp_path: Path):
    whole, dice = made.read_bytes(), random.Random(0)
    path = tmp_path / "b"
    for _ in range(150):
        data = bytearray(whole)
        at = dice.randrange(4, len(data))  # the first four say that it is a bundle
        if dice.random() < 0.3:
            del data[at:]
        else:
            data[at] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        report = verify(path)
        assert [found.code for found in report.findings] == ["damaged"]
        with pytest.raises(UserError, match="is damaged"):
            sw.Bundle(path)


def altered(source: Path, path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A bundle with other members and a right checksum."""
    members, head = fuzz.unsealed(source.read_bytes())
    change(members)
    path.write_bytes(fuzz.sealed(members, head))
    return path


def told(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    """Replace entries of contents.json; `None` removes them."""

    def change(members: dict[str, bytes]) -> None:
        found = json.loads(members["contents.json"]) | changes
        members["contents.json"] = json.dumps(
            {name: value for name, value in found.items() if value is not None}
        ).encode()

    return change


def in_manifest(alter: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, bytes]], None]:
    """Alter the manifest in contents.json."""

    def change(members: dict[str, bytes]) -> None:
        contents = json.loads(members["contents.json"])
        alter(contents["manifest"])
        members["contents.json"] = json.dumps(contents).encode()

    return change


def column(
    name: str, alter: Callable[[np.ndarray], np.ndarray]
) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        out = io.BytesIO()
        np.save(out, alter(np.load(io.BytesIO(members[f"class0/{name}.npy"]))))
        members[f"class0/{name}.npy"] = out.getvalue()

    return change


def at(row: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def alter(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.int64)
        values[row] = value
        return values

    return alter


def a_class(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        found = json.loads(members["contents.json"])
        found["classes"][0] |= changes
        members["contents.json"] = json.dumps(found).encode()

    return change


def _other_columns(members: dict[str, bytes]) -> None:
    found = json.loads(members["contents.json"])
    del found["columns"]["tasks"]["kind"]
    members["contents.json"] = json.dumps(found).encode()


def _vast(members: dict[str, bytes]) -> None:
    """A header that promises more numbers than there are."""
    name = "class0/tasks/kind.npy"
    found = members[name]
    at = found.index(b"(", 10)
    to = found.index(b"}", at)
    shape = b"(1125899906842624,), }"
    members[name] = found[:at] + shape + b" " * (to + 1 - at - len(shape)) + found[to + 1 :]


def _lists(members: dict[str, bytes]) -> None:
    """240 MB of lists, in 240 kB: 6 GB once Python holds them."""
    whole = members["contents.json"].rstrip().removesuffix(b"}")
    members["contents.json"] = whole + b', "x": [' + b"[]," * 80_000_000 + b"[]]}"


DAMAGES: dict[str, tuple[Callable[[dict[str, bytes]], Any], str]] = {
    "no contents": (lambda members: members.pop("contents.json"), "contents.json"),
    "other contents": (lambda members: members.update({"contents.json": b"[1]"}), "does not call"),
    "no JSON": (lambda members: members.update({"contents.json": b"{"}), "damaged"),
    "deep": (lambda members: members.update({"contents.json": b"[" * 10**5}), "damaged"),
    "newer": (told(version=2), "version 2, and this Stagewright reads version 1"),
    "unknown key": (told(more=1), "more"),
    "no mesh": (told(mesh=None), "mesh"),
    "a mesh of nothing": (told(mesh={"axes": [["tp", 0]], "groups": []}), "a mesh of"),
    "a mesh too large": (told(mesh={"axes": [["tp", 10**30]], "groups": []}), "a mesh of"),
    "no such axis": (told(peers=[{"axis": "xp", "shift": 1}]), "no axis of the mesh"),
    "a group of one": (
        told(communicators=[{"axes": ["pp"], "only": [1]}]),
        "a communicator over",
    ),
    "no manifest": (told(manifest={}), "does not count the nodes"),
    "a world of its own": (
        in_manifest(lambda manifest: manifest.update(world_size=-1)),
        "another number of ranks",
    ),
    "nodes that are none": (
        in_manifest(lambda manifest: manifest["nodes"][0].update(send={"a": 1})),
        "a number of nodes or parameters",
    ),
    "parameters that are none": (
        in_manifest(lambda manifest: manifest.update(parameters={"total": ""})),
        "a number of nodes or parameters",
    ),
    "other columns": (_other_columns, "other columns"),
    "another's communicators": (a_class(communicators=[0]), "uses communicators"),
    "no such communicator": (a_class(communicators=[9]), "a communicator that is not there"),
    "no such value": (column("values/value", at(3, 99)), "value out of range"),
    "no such moment": (column("values/last", at(3, 10**6)), "last out of range"),
    "no such tables": (a_class(tables=7), "has no tables"),
    "too many tasks": (a_class(tasks=2**31 - 1), "tasks, of which a bundle of its size has"),
    "more tasks than columns": (a_class(tasks=10_000), "uint8[214], wanted 10000 integers"),
    "too many ranks": (a_class(ranks=2**24), "ranks in classes, 16 in the mesh"),
    "a shape of a petabyte": (_vast, "wanted"),
    "lists without end": (_lists, "contents.json would have"),
    "a negative number": (a_class(tasks=-1), "tasks"),
    "no column": (lambda members: members.pop("class0/tasks/kind.npy"), "kind"),
    "text for a column": (
        lambda members: members.update({"class0/tasks/kind.npy": b"x" * 5000}),
        "kind",
    ),
    "a short column": (column("tasks/kind", lambda kind: kind[:-1]), "kind"),
    "fractions": (column("tasks/flops", lambda flops: flops / 3), "flops"),
    "objects": (column("tasks/kind", lambda kind: kind.astype(object)), "kind"),
    "no such kind": (column("tasks/kind", at(3, 200)), "kind out of range"),
    "no such name": (column("tasks/name", at(3, 10**6)), "name out of range"),
    "no such operation": (column("tasks/op", at(3, -1)), "op out of range"),
    "too large a number": (column("tasks/layer", at(3, 2**40)), "holds more than int32"),
    "needs a row before the first": (column("tasks/data", at(0, 2**20)), "data out of range"),
    "counts too many": (column("tasks/data_ptr", at(1, 99)), "does not count data"),
    "a rank twice": (column("ranks", at(1, 0)), "no ascending ranks"),
    "another's rank": (column("ranks", at(-1, 2)), "every rank once"),
    "a rank too high": (column("ranks", at(-1, 99)), "no ascending ranks"),
}


@pytest.mark.numerics
@pytest.mark.parametrize("name", DAMAGES)
def test_hostile_bundle(name: str, made: Path, tmp_path: Path):
    change, message = DAMAGES[name]
    path = altered(made, tmp_path / "b", change)
    report = verify(path)
    assert [found.code for found in report.findings] == ["damaged"]
    assert message in report.findings[0].message


def test_a_small_file_takes_little_memory(made: Path, tmp_path: Path):
    """Columns of 100 million zeros, in a megabyte: refused before they are made."""
    zeros = np.zeros(100_000_000, np.uint8)

    def change(members: dict[str, bytes]) -> None:
        found = json.loads(members["contents.json"])
        found["classes"][0]["tasks"] = len(zeros)
        members["contents.json"] = json.dumps(found).encode()
        column("tasks/kind", lambda _: zeros)(members)

    path = altered(made, tmp_path / "b", change)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="tasks, of which a bundle of its size has"):
            sw.Bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(made: Path, tmp_path: Path, method: int):
    members, head = fuzz.unsealed(made.read_bytes())
    path = tmp_path / "b"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.comment = head + b"0" * 64
        archive.writestr(zipfile.ZipInfo("x"), b"")
        for name, content in members.items():
            archive.writestr(name, content)
    whole = path.read_bytes()[:-64]
    path.write_bytes(whole + hashlib.sha256(whole).hexdigest().encode())
    with pytest.raises(UserError, match="is not compressed with DEFLATE"):
        sw.Bundle(path)


@pytest.mark.parametrize("at", [6, 8])  # of a member's entry: its flags, its compression
def test_entries_of_another_kind_are_refused(made: Path, tmp_path: Path, at: int):
    whole = bytearray(made.read_bytes()[:-64])
    begin = whole.index(b"PK\x01\x02")
    for place in (at, begin + at + 2):
        whole[place : place + 2] = b"\x63\0"
    path = tmp_path / "b"
    path.write_bytes(whole + hashlib.sha256(whole).hexdigest().encode())
    with pytest.raises(UserError, match=r"is damaged: contents\.json"):
        sw.Bundle(path)


def test_an_unsound_program_is_found(made: Path, tmp_path: Path):
    changes = {
        "needs a row that is not before it": column("tasks/data", at(0, 0)),
        "less than a byte to send": column("tasks/comm_bytes", lambda sizes: sizes * 0),
        "the manifest tells of another program": _other_manifest,
        "flops of pipeline rank 0 is not what this version makes": column("tasks/flops", at(0, 1)),
    }
    for message, change in changes.items():
        report = verify(altered(made, tmp_path / "b", change))
        assert message in report.findings[0].message


def _other_manifest(members: dict[str, bytes]) -> None:
    found = json.loads(members["contents.json"])
    found["manifest"]["nodes"][0]["compute"] += 1
    members["contents.json"] = json.dumps(found).encode()


def test_of_another_version(made: Path, tmp_path: Path):
    """Traces out of it say which version made the program; nothing is made again to compare."""

    def older(members: dict[str, bytes]) -> None:
        found = json.loads(members["contents.json"])
        found["manifest"]["stagewright"] = "0.0.1"
        members["contents.json"] = json.dumps(found).encode()

    path = altered(made, tmp_path / "b", older)
    report = verify(path)
    assert report.ok
    assert report.skipped
    told = expand(sw.Bundle(path), tmp_path / "out", ranks=[3])
    assert told["stagewright"] == "0.0.1"
    assert verify(tmp_path / "out").ok


def test_offloading_is_read_back(tmp_path: Path):
    out = tmp_path / "off.bundle"
    compiled = sw.compile("gpt2", layers=2, seq_length=16, vocab=64, cpu_offloading_num_layers=1)
    sw.generate(compiled, str(out), format="bundle")

    assert verify(out).findings == []
    assert sw.load_run(out).cpu_offloading_num_layers == 1
