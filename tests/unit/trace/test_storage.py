"""Places near and far: files are whole or absent, and outputs are what a directory would hold."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extras import needed
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.trace import storage
from stagewright.trace.storage import (
    LocalFolder,
    ObjectStore,
    Storage,
    WrittenFile,
    aligned,
    storage_at,
)
from stagewright.trace.write import write

pytestmark = [pytest.mark.extra, pytest.mark.numerics]  # whole traces, on every kind of storage

TOY = {"model": "gpt2", "layers": 2, "seq_length": 16, "vocab": 64}
SIZES = [0, 1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 4097]


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(Run(**TOY, tp=2, dp=3, pp=2)).program


@pytest.fixture(params=["folder", "memory", "local"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return LocalFolder(tmp_path)
    fsspec = needed("fsspec", "remote")
    if request.param == "local":
        return storage_at(f"local://{tmp_path}/deep/down")
    fsspec.filesystem("memory").store.clear()
    return storage_at("memory://bucket/run")


def test_files_of_any_place(anywhere: Storage):
    random = np.random.default_rng(0)
    assert anywhere.sizes() == {}
    for size in SIZES:
        for data in (aligned(size), np.empty(size + 1, np.uint8)[1:]):  # in memory as it happens
            data[:] = random.integers(0, 256, size)
            plain = data.tobytes()
            told = anywhere.write(f"f{size}", [data.data])
            digest = hashlib.sha256(plain).hexdigest()
            assert told == WrittenFile(f"f{size}", size, digest)
            assert anywhere.read(f"f{size}") == plain
            assert anywhere.digest(f"f{size}") == digest
    anywhere.write("f1", [b"in", memoryview(b" pieces"), b""])
    assert anywhere.read("f1") == b"in pieces"
    assert anywhere.sizes() == {f"f{size}": size for size in SIZES} | {"f1": 9}
    assert storage_at(anywhere.address).read("f1") == b"in pieces"
    anywhere.remove(["f0", "absent"])
    assert "f0" not in anywhere.sizes()
    assert anywhere.digest("absent") is None
    with pytest.raises(FileNotFoundError):
        anywhere.read("absent")


def test_a_file_that_fails_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = LocalFolder(tmp_path)
    here.write("old", [b"old"])

    def pieces():
        yield b"new"
        raise OSError(errno.EIO, "gone wrong")

    with pytest.raises(OSError, match="gone wrong"):
        here.write("old", pieces())
    assert here.read("old") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_knows_no_direct_writes(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It says so when the flag is set, or at the write."""
    import fcntl

    data = aligned(5 << 20)
    data[:] = np.arange(5 << 20) % 251
    plain, control, written = data.tobytes(), fcntl.fcntl, os.write

    def no_flag(file: int, command: int, *more: int) -> int:
        if command == fcntl.F_SETFL and more[0] & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return control(file, command, *more)

    def no_write(file: int, view: Any) -> int:
        if control(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return written(file, view)

    monkeypatch.setattr(fcntl, "fcntl", no_flag)
    LocalFolder(tmp_path).write("a", [data.data])
    monkeypatch.undo()
    monkeypatch.setattr(storage.os, "write", no_write)
    LocalFolder(tmp_path).write("b", [data.data])
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == plain


def test_a_disk_that_fills_up_in_a_direct_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written, left = os.write, [2 << 20]

    def little(file: int, view: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = written(file, view[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(storage.os, "write", little)
    with pytest.raises(OSError, match="No space left"):
        LocalFolder(tmp_path).write("a", [aligned(5 << 20).data])
    assert not list(tmp_path.iterdir())


# ---- outputs in a store --------------------------------------------------------------------------


@pytest.fixture
def memory() -> dict[str, Any]:
    fsspec = needed("fsspec", "remote")
    store = fsspec.filesystem("memory").store
    store.clear()
    return store


def names(store: dict[str, Any]) -> set[str]:
    return {name.removeprefix("/b/") for name in store}


def read(store: dict[str, Any]) -> dict[str, bytes]:
    return {name.removeprefix("/b/"): file.getvalue() for name, file in store.items()}


@pytest.fixture(scope="module")
def whole(program: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    write(program, out, manifest={"nth": 1})
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_an_output_in_a_store(program: Program, whole: dict[str, bytes], memory: dict[str, Any]):
    told = write(program, "memory://b", manifest={"nth": 1})
    assert read(memory) == whole
    assert told == json.loads(whole["manifest.json"])
    with pytest.raises(UserError, match="memory://b: exists already; choose another name, or --f"):
        write(program, "memory://b", manifest={"nth": 1})
    write(program, "memory://b", manifest={"nth": 2}, format="json", force=True)
    assert "workload.0.et" not in names(memory)
    assert json.loads(read(memory)["manifest.json"])["nth"] == 2


def test_a_url_of_this_machine_is_a_path(program: Program, whole: dict[str, bytes], tmp_path: Path):
    write(program, f"file://{tmp_path}/out", manifest={"nth": 1})
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == whole


def test_shares_in_a_store(program: Program, whole: dict[str, bytes], memory: dict[str, Any]):
    for nth in range(5):
        assert "manifest.json" not in names(memory)
        write(program, "memory://b/", manifest={"nth": 1}, shard=(nth, 5))
    assert read(memory) == whole
    write(program, "memory://b", manifest={"nth": 1}, shard=(3, 5))
    assert read(memory) == whole


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[2], [1, 2], [2, 1]])
def test_others_at_any_moment(
    shares: list[int],
    program: Program,
    whole: dict[str, bytes],
    memory: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """Between any two steps of a share others write theirs, or all: it makes no difference."""

    def share(nth: int) -> None:
        write(program, "memory://b", manifest={"nth": 1}, shard=(nth, 2), workers=1)

    for moment in itertools.count():
        memory.clear()
        steps = itertools.count()
        with monkeypatch.context() as patch:
            for name in ("write", "read", "sizes", "remove"):
                plain = getattr(ObjectStore, name)

                def watched(
                    *given: Any,
                    plain: Any = plain,
                    moment: int = moment,
                    steps: Iterator[int] = steps,
                ) -> Any:
                    if next(steps) == moment:
                        for nth in shares:
                            share(nth)
                    return plain(*given)

                patch.setattr(ObjectStore, name, watched)
            share(1)
        if next(steps) <= moment:
            break
        assert read(memory) == whole, moment
    assert moment > 10


def test_a_stopped_output_in_a_store(
    program: Program,
    whole: dict[str, bytes],
    memory: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    def stop(done: int, *_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(program, "memory://b", manifest={"nth": 1}, workers=1, progress=stop)
    assert not memory
    with pytest.raises(KeyboardInterrupt):
        write(program, "memory://b", manifest={"nth": 1}, workers=1, progress=stop, resume=True)
    there = names(memory)
    assert any(name.endswith(".et") for name in there)
    assert "manifest.json" not in there
    with pytest.raises(UserError, match=r"what a stopped run has written; .* --resume"):
        write(program, "memory://b", manifest={"nth": 1})
    with pytest.raises(UserError, match="what a stopped run has written"):
        write(program, "memory://b", manifest={"nth": 2}, resume=True)
    written = [name for name in there if name.endswith(".et")]
    memory[f"/b/{written[0]}"].seek(9)
    memory[f"/b/{written[0]}"].write(b"?")
    write(program, "memory://b", manifest={"nth": 1}, resume=True)
    assert read(memory) == whole


def test_what_is_not_ours_stays(program: Program, memory: dict[str, Any]):
    storage_at("memory://b").write("thesis.tex", [b"mine"])
    for force in (False, True):
        with pytest.raises(UserError, match=r"holds thesis.tex, which may be yours"):
            write(program, "memory://b", manifest={}, force=force)
    assert names(memory) == {"thesis.tex"}
    storage_at("memory://b").remove(["thesis.tex"])
    storage_at("memory://b").write("manifest.json", [b'{"name": "of a web page"}'])
    with pytest.raises(UserError, match=r"holds manifest.json, which may be yours"):
        write(program, "memory://b", manifest={}, force=True)


def test_a_place_that_nobody_knows(program: Program, monkeypatch: pytest.MonkeyPatch):
    needed("fsspec", "remote")
    with pytest.raises(UserError, match="Protocol not known: nowhere"):
        write(program, "nowhere://b", manifest={})
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(UserError, match=r"install stagewright\[remote\]"):
        write(program, "memory://b", manifest={})


# ---- a finished output ---------------------------------------------------------------------------


def test_resume_looks_at_the_files_of_a_finished_output(
    program: Program, whole: dict[str, bytes], tmp_path: Path
):
    def gone(path: Path) -> None:
        path.unlink()

    def shorter(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:50])

    def flipped(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def a_pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def a_link(path: Path) -> None:
        path.unlink()
        path.symlink_to("/dev/zero")

    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1})
    for how in ({"resume": True}, {"shard": (0, 2)}, {"shard": (1, 2)}):
        for address in (str(out), f"file://{out}"):
            for damage in (gone, shorter, flipped, a_pipe, a_link):
                for name in ("workload.0.et", "workload.3.et", "comm_group.json"):
                    damage(out / name)
                    told = write(program, address, manifest={"nth": 1}, **how)  # pyright: ignore
                    assert told == json.loads(whole["manifest.json"])
                    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    # Nothing that is somebody's own is touched, nor what a simulator's user may change.
    (out / "notes.txt").write_text("mine")
    (out / "workload.1.et").unlink()
    write(program, out, manifest={"nth": 1}, resume=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "workload.1.et").read_bytes() == whole["workload.1.et"]


def test_resume_of_a_finished_output_in_a_store(
    program: Program, whole: dict[str, bytes], memory: dict[str, Any]
):
    write(program, "memory://b", manifest={"nth": 1})
    storage_at("memory://b").remove(["workload.2.et"])
    storage_at("memory://b").write("workload.1.et", [b"damaged"])
    write(program, "memory://b", manifest={"nth": 1}, resume=True)
    assert read(memory) == whole


def test_files_beside_stay_as_their_user_left_them(program: Program, tmp_path: Path):
    beside = {"network.yml": b"ours", "system.json": b"{}"}
    out = tmp_path / "out"
    write(program, out, manifest={}, beside=beside)
    (out / "network.yml").write_text("mine")
    (out / "system.json").unlink()
    write(program, out, manifest={}, beside=beside, resume=True)
    assert (out / "network.yml").read_text() == "mine"
    assert (out / "system.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "entry",
    [
        {"bytes": 1, "sha256": "zz"}, {"bytes": [], "sha256": "0" * 64}, [], True, None, "x", {},
        {"bytes": -1, "sha256": "0" * 64}, {"bytes": 10**30, "sha256": "0" * 64},
        {"bytes": 1.5, "sha256": "0" * 64}, {"bytes": 1, "sha256": "0" * 62},
        {"bytes": True, "sha256": None},
    ],
)  # fmt: skip
def test_resume_with_a_damaged_manifest(program: Program, tmp_path: Path, entry: object):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1})
    found = json.loads((out / "manifest.json").read_bytes())
    for name in ("workload.0.et", "comm_group.json", "workload.00.et", f"workload.{'9' * 5000}.et"):
        files = found["files"] | {name: entry}
        (out / "manifest.json").write_text(json.dumps(found | {"files": files}))
        with pytest.raises(UserError, match="exists already"):
            write(program, out, manifest={"nth": 1}, resume=True)
    write(program, out, manifest={"nth": 1}, force=True)


def test_resume_with_checksums_of_another_run(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1})
    found = json.loads((out / "manifest.json").read_bytes())
    found["files"]["workload.1.et"]["sha256"] = "0" * 64
    (out / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"lists are not those of this run; --force replaces all"):
        write(program, out, manifest={"nth": 1}, resume=True)


@pytest.mark.parametrize(
    "note",
    [
        b"[" * 100_000, b'{"ranks": [0], "bytes": [1e400], "sha256": ["00"]}', b"\xff", b"[]", b"7",
        b'{"ranks": [9999999999999999999999], "bytes": [1], "sha256": ["' + b"00" * 32 + b'"]}',
        b'{"ranks": ["0"], "bytes": [[]], "sha256": [0]}', b"pipe", b"sparse",
    ],
)  # fmt: skip
def test_notes_of_a_stranger_are_skipped(
    program: Program, whole: dict[str, bytes], tmp_path: Path, note: bytes
):
    write(program, tmp_path / "out", manifest={"nth": 1}, shard=(1, 2))
    (hidden,) = tmp_path.glob(".out.partial-*")
    part = next(hidden.glob(".part-*.json"))
    other = part.with_name(part.name.replace(".json", "x.json"))
    if note == b"pipe":
        os.mkfifo(other)
    else:
        other.write_bytes(note)
    if note == b"sparse":
        os.truncate(other, 1 << 40)
    write(program, tmp_path / "out", manifest={"nth": 1}, shard=(2, 2))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole


def test_a_manifest_of_a_terabyte_is_none(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={})
    os.truncate(out / "manifest.json", 1 << 40)
    with pytest.raises(UserError, match="exists already"):
        write(program, out, manifest={}, resume=True)
