"""The output directory: whole or absent, the same bytes whoever writes, errors in words."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stagewright
from helpers import cases
from stagewright.errors import UserError
from stagewright.executors import ray_cluster
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.run.settings import Run
from stagewright.trace import templates
from stagewright.trace.formats import chakra
from stagewright.trace.staging import write_file
from stagewright.trace.write import write

WORLD = 12


@pytest.fixture(scope="module")
def program() -> Program:
    run = Run(model="gpt2", layers=3, tp=4, pp=3, seq_length=16, vocab=64, global_batch_size=3)
    return compile(run).program


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written(program: Program, tmp_path: Path):
    seen: list[tuple[int, int, int]] = []
    out = tmp_path / "out"
    returned = write(
        program,
        out,
        manifest={"run": {"tp": 4}, "world_size": WORLD},
        progress=lambda *told: seen.append(told),
    )
    files = contents(out)
    traces = [f"workload.{rank}.et" for rank in range(WORLD)]
    assert set(files) == {*traces, "comm_group.json", "manifest.json"}
    assert seen[-1] == (WORLD, WORLD, sum(len(files[name]) for name in traces))
    assert seen == sorted(set(seen))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    manifest = json.loads(files["manifest.json"])
    assert manifest == returned
    assert manifest["run"] == {"tp": 4}
    assert manifest["stagewright"] == stagewright.__version__
    assert manifest["world_size"] == WORLD
    assert manifest["format"] == "chakra"
    kinds = program.classes[1].tasks.kind.tolist()
    counts = {kind.name.lower(): kinds.count(kind) for kind in TaskKind}
    assert manifest["nodes"][1] == {"pipeline_rank": 1, "files": 4} | counts
    assert list(manifest["files"]) == [*traces, "comm_group.json"]
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == len(files[name])
        assert entry["sha256"] == hashlib.sha256(files[name]).hexdigest()
    provenance = {
        "generator": f"stagewright {stagewright.__version__}",
        "world_size": WORLD,
        "mesh": ",".join(f"{axis}={size}" for axis, size in program.mesh.axes),
    }
    for rank in range(WORLD):
        assert files[traces[rank]] == chakra.encode(program, rank, provenance)
    assert files["comm_group.json"] == b"".join(chakra.comm_group(program))


@pytest.mark.parametrize("format", ["chakra", "json"])
def test_same_bytes_whoever_writes(program: Program, tmp_path: Path, format: str):
    for workers in (1, 2, 7, None):
        write(program, tmp_path / f"{workers}", format=format, manifest={}, workers=workers)
    first = contents(tmp_path / "1")
    assert len(first) == WORLD + 2
    for workers in (2, 7, None):
        assert contents(tmp_path / f"{workers}") == first


def test_some_ranks(program: Program, tmp_path: Path):
    write(program, tmp_path / "all", manifest={})
    manifest: Any = write(program, tmp_path / "some", ranks=[9, 2, 2], manifest={})
    some = contents(tmp_path / "some")
    assert set(some) == {"workload.2.et", "workload.9.et", "comm_group.json", "manifest.json"}
    whole = contents(tmp_path / "all")
    assert all(some[name] == whole[name] for name in some if name != "manifest.json")
    assert [of["files"] for of in json.loads(some["manifest.json"])["nodes"]] == [1, 0, 1]
    assert len(manifest["files"]) == 3


def refused(message: str):
    return pytest.raises(UserError, match=message)


def test_wrong_arguments(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    with refused("rank 12: the run has 12 ranks, 0 to 11"):
        write(program, out, ranks=[0, 12], manifest={})
    with refused("rank -1"):
        write(program, out, ranks=[-1], manifest={})
    with refused("no ranks"):
        write(program, out, ranks=[], manifest={})
    with refused("did you mean 'chakra'"):
        write(program, out, format="chakr", manifest={})
    with refused("does not exist; create it first"):
        write(program, tmp_path / "a" / "b", manifest={})
    with refused("File name too long"):
        write(program, tmp_path / ("x" * 250), manifest={})
    with pytest.raises(ValueError, match="world_size"):
        write(program, out, manifest={"world_size": 3})
    assert not list(tmp_path.iterdir())


def test_existing_output(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1})
    before = contents(out)
    with refused("exists already"):
        write(program, out, manifest={"nth": 2})
    assert contents(out) == before
    write(program, out, format="json", manifest={"nth": 2}, force=True)
    assert json.loads((out / "manifest.json").read_text())["nth"] == 2
    assert not (out / "workload.0.et").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_deletes_only_what_is_ours(program: Program, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with refused("is a file"):
        write(program, tmp_path / "file", manifest={}, force=True)
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    write(program, thesis, manifest={}, force=True)  # empty
    shutil.rmtree(thesis)
    for manifest in (None, "no JSON", '{"name": "of a web page"}'):
        thesis.mkdir()
        (thesis / "thesis.tex").write_text("mine")
        if manifest:
            (thesis / "manifest.json").write_text(manifest)
        with refused("may be yours"):
            write(program, thesis, manifest={}, force=True)
        shutil.rmtree(thesis)


def test_link_to_a_directory(program: Program, tmp_path: Path):
    write(program, tmp_path / "real", manifest={})
    (tmp_path / "link").symlink_to("real")
    write(program, tmp_path / "link", manifest={"nth": 2}, force=True)
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "real" / "manifest.json").read_text())["nth"] == 2


def test_unwritable_parent(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with refused("no permission to write in"):
        write(program, tmp_path / "out", manifest={})


def test_no_room_known_before(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest: Any = write(program, tmp_path / "out", manifest={})
    needed = sum(manifest["files"][f"workload.{rank}.et"]["bytes"] for rank in range(WORLD))

    def free(size: int) -> Callable[[Path], SimpleNamespace]:
        return lambda _: SimpleNamespace(free=size)

    monkeypatch.setattr(shutil, "disk_usage", free(needed - 1))
    with refused(f"needs {needed:,} bytes, {needed - 1:,} are free in .*$"):
        write(program, tmp_path / "new", manifest={})
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", free(needed))
    write(program, tmp_path / "new", manifest={})


@cases
def test_failing_disk(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
):
    def failing(folder: Path, name: str, *arguments: Any, **options: Any):
        if name == "workload.7.et":
            raise OSError(code, os.strerror(code))
        return write_file(folder, name, *arguments, **options)

    monkeypatch.setattr(templates, "write_file", failing)
    with refused(message):
        write(program, tmp_path / "out", manifest={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_interrupt_leaves_nothing(program: Program, tmp_path: Path, force: bool):
    out = tmp_path / "out"
    if force:
        write(program, out, manifest={"nth": 1})
    before = sorted(tmp_path.rglob("*"))

    def interrupt(done: int, *_: int) -> None:
        if done == 4:  # those of one class, whose small files go together
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        write(program, out, manifest={}, workers=2, progress=interrupt, force=force)
    assert sorted(tmp_path.rglob("*")) == before


def test_old_directory_returns_if_the_new_one_cannot_take_its_place(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1})
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if "partial" in self.name:
            raise OSError(errno.EIO, "gone wrong")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with refused("gone wrong"):
        write(program, out, manifest={"nth": 2}, force=True)
    assert json.loads((out / "manifest.json").read_text())["nth"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ray_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    class RayError(Exception):
        pass

    def init(**_: object) -> None:
        raise RayError("the agent has died\nand more")

    exceptions = SimpleNamespace(RayError=RayError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(UserError, match=r"^Ray does not start: the agent has died$"), ray_cluster():
        pass


def test_urls(program: Program, tmp_path: Path):
    """A URL of this machine is a path; no other URL is an output."""
    write(program, f"file://{tmp_path}/out", manifest={})
    assert len(contents(tmp_path / "out")) == WORLD + 2
    for url in ("s3://bucket/run", "memory://x"):
        for format in ("chakra", "bundle"):
            with refused(f"{url}: is a URL; wanted a path in a file system"):
                write(program, url, manifest={}, format=format)


def test_a_file_of_several_pieces(tmp_path: Path):
    for shared in (False, True):
        written = write_file(tmp_path, "a", [b"in", memoryview(b" pieces"), b""], shared=shared)
        assert (tmp_path / "a").read_bytes() == b"in pieces"
        assert written == ("a", 9, hashlib.sha256(b"in pieces").hexdigest())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_shared_file_that_fails_is_not_replaced(tmp_path: Path):
    write_file(tmp_path, "old", [b"old"])

    def pieces():
        yield b"new"
        raise OSError(errno.EIO, "gone wrong")

    with pytest.raises(OSError, match="gone wrong"):
        write_file(tmp_path, "old", pieces(), shared=True)
    assert (tmp_path / "old").read_bytes() == b"old"
    with pytest.raises(OSError, match="gone wrong"):
        write_file(tmp_path, "new", pieces())
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_manifest_of_a_terabyte_is_not_read(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={})
    os.truncate(out / "manifest.json", 1 << 40)
    with refused("may be yours"):
        write(program, out, manifest={}, force=True)
