"""Shares of an output, and outputs that were stopped: in the end the same bytes as at once."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from stagewright.check.verify import verify
from stagewright.cli.main import commands
from stagewright.errors import Stopped, UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.trace import manifest, staging
from stagewright.trace.journal import Journal
from stagewright.trace.manifest import FileList, WrittenRanks
from stagewright.trace.storage import LocalFolder, WrittenFile
from stagewright.trace.write import write

TOY = {"model": "gpt2", "layers": 4, "seq_length": 16, "vocab": 64}
DEGREES = {"tp": 2, "dp": 4, "pp": 3, "order": "tp-pp-dp-cp-ep"}
WORLD = 24


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(Run(**TOY, **DEGREES)).program


@pytest.fixture(scope="module")
def whole(program: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is written at once."""
    out = tmp_path_factory.mktemp("whole") / "out"
    write(program, out, manifest={"nth": 1})
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 1), (3, 0), (5, 1), (24, 0), (30, 1)])
def test_any_number_of_shares(
    count: int, first: int, program: Program, whole: dict[str, bytes], tmp_path: Path
):
    out = tmp_path / "out"
    order = list(range(first, first + count))
    random.Random(count).shuffle(order)
    done = 0
    for nth in order:
        assert out.exists() == (done == WORLD)
        told = write(program, out, manifest={"nth": 1}, shard=(nth, count))
        done += WORLD // count + ((nth - 1) % count < WORLD % count)
        assert told.get("missing", 0) == WORLD - done
    assert contents(out) == whole
    assert left(tmp_path) == ["out"]
    again = write(program, out, manifest={"nth": 1}, shard=(order[0], count))
    assert again == json.loads(whole["manifest.json"])
    assert left(tmp_path) == ["out"]


def test_shares_of_some_ranks(program: Program, tmp_path: Path):
    ranks = [3, 4, 5, 11, 20]
    write(program, tmp_path / "at once", manifest={}, ranks=ranks)
    for nth in range(3):
        write(program, tmp_path / "out", manifest={}, ranks=ranks, shard=(nth, 3))
    assert contents(tmp_path / "out") == contents(tmp_path / "at once")


def test_shares_of_different_numbers_add_up(
    program: Program, whole: dict[str, bytes], tmp_path: Path
):
    out = tmp_path / "out"
    assert "missing" in write(program, out, manifest={"nth": 1}, shard=(1, 2))
    assert "missing" in write(program, out, manifest={"nth": 1}, shard=(2, 3))
    assert "missing" not in write(program, out, manifest={"nth": 1}, shard=(3, 3))
    assert contents(out) == whole


def test_shares_of_different_runs_do_not_mix(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1}, shard=(1, 2))
    assert write(program, out, manifest={"nth": 2}, shard=(2, 2))["missing"] == WORLD // 2
    assert write(program, out, manifest={"nth": 1}, format="json", shard=(2, 2))["missing"]
    assert write(program, out, manifest={"nth": 1}, ranks=range(20), shard=(2, 2))["missing"]
    assert len(left(tmp_path)) == 4
    assert not out.exists()


def test_what_no_share_is(program: Program, tmp_path: Path):
    for shard in ((3, 2), (-1, 2), (0, 0), (1, 0)):
        with pytest.raises(UserError, match=r"shard .*: wanted 1/. to"):
            write(program, tmp_path / "out", manifest={}, shard=shard)
    out = CliRunner().invoke(commands, ["generate", "gpt2", "-o", "x", "--shard", "two"])
    assert isinstance(out.exception, UserError)
    assert "wanted a share such as 3/8" in str(out.exception)
    with pytest.raises(UserError, match="written at once"):
        write(program, tmp_path / "out", manifest={}, format="bundle", shard=(1, 2))
    write(program, tmp_path / "out", manifest={"nth": 1})
    with pytest.raises(UserError, match="exists already"):
        write(program, tmp_path / "out", manifest={"nth": 2}, shard=(1, 2))
    assert left(tmp_path) == ["out"]


def test_shares_that_replace(program: Program, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 0})
    write(program, out, manifest={"nth": 1}, shard=(1, 2), force=True)
    assert json.loads((out / "manifest.json").read_bytes())["nth"] == 0
    write(program, out, manifest={"nth": 1}, shard=(2, 2), force=True)
    write(program, out, manifest={"nth": 1}, shard=(2, 2), force=True)  # put into the queue again
    assert contents(out) == whole
    assert left(tmp_path) == ["out"]


def test_shares_at_the_same_time(tmp_path: Path):
    """A job array: processes that know nothing of each other, one of them twice."""
    settings = [f"--{name}={value}" for name, value in (TOY | DEGREES).items() if name != "model"]
    line = [sys.executable, "-m", "stagewright", "generate", "gpt2"]
    line += [word.replace("_", "-") for word in settings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    jobs = [
        subprocess.Popen(
            [*line, "-o", str(tmp_path / "out"), "--shard", f"{nth}/5"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for nth in (0, 1, 2, 3, 4, 3)
    ]
    told = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 6, told
    assert any("24 of 24 ranks" in out for out, _ in told)
    subprocess.run([*line, "-o", str(tmp_path / "once")], env=environment, check=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "once")
    assert left(tmp_path) == ["once", "out"]


_watched: list[Callable[[], None]] = []
"""Called at every call to the file system, while there is one."""


def _audit(event: str, _: object) -> None:
    if _watched and event in ("open", "os.scandir", "os.listdir", "os.mkdir", "os.rename"):
        _watched[0]()


@pytest.mark.parametrize(
    ("shares", "force"), [([2], False), ([1, 2], False), ([2, 1], False), ([1, 2], True)]
)
def test_others_at_any_moment(
    shares: list[int],
    force: bool,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Between any two steps of a share, others write theirs, or all, and it makes no difference."""
    monkeypatch.setattr(staging, "PATIENCE", 0.0)
    program = compile(Run(**TOY, **DEGREES)).program
    sys.addaudithook(_audit)

    def share(nth: int, out: Path) -> None:
        write(program, out, manifest={"nth": 1}, shard=(nth, 2), force=force, workers=1)

    for moment in itertools.count(1):
        out = tmp_path / str(moment) / "out"
        out.parent.mkdir()
        if force:
            write(program, out, manifest={"nth": 0}, ranks=[0])
        steps = itertools.count(1)

        def others(out: Path = out, moment: int = moment, steps: Iterator[int] = steps) -> None:
            if next(steps) == moment:
                watch = _watched.pop()
                for nth in shares:
                    share(nth, out)
                _watched.append(watch)

        _watched.append(others)
        try:
            share(1, out)
        finally:
            _watched.clear()
        if next(steps) <= moment:  # there is no such moment any more
            break
        assert left(out.parent) == ["out"], moment
        assert contents(out) == whole, moment
    assert moment > 10


# ---- stopped, and gone on with -------------------------------------------------------------------

KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from test_unfinished import DEGREES, TOY
from stagewright.trace import journal
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace.write import write
journal.INTERVAL = 0
def stop(done, *_):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
import stagewright.trace.templates
stagewright.trace.templates.TASK = 1
made = compile(Run(**TOY, **DEGREES)).program
write(made, sys.argv[1], manifest={"nth": 1}, workers=1, progress=stop)
"""


def killed(out: Path, after: int) -> Path:
    """What a run leaves that is killed after some ranks."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), str(after), *paths], check=False)
    assert done.returncode == -signal.SIGKILL
    (folder,) = out.parent.glob(".out.partial-*")
    return folder


def test_a_killed_run_is_gone_on_with(program: Program, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"
    folder = killed(out, 15)
    there = sorted(folder.glob("*.et"))
    assert 15 <= len(there) < WORLD
    cut, changed, gone = there[2], there[5], there[9]
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    gone.unlink()
    (folder / ".workload.3.et.deadbeef").write_bytes(b"half a file")
    kept = {p.name: p.stat().st_ino for p in there if p not in (cut, changed, gone)}

    seen: list[tuple[int, ...]] = []
    told = write(program, out, manifest={"nth": 1}, resume=True, progress=lambda *n: seen.append(n))
    assert contents(out) == whole
    assert told == json.loads(whole["manifest.json"])
    assert left(tmp_path) == ["out"]
    same = [name for name, inode in kept.items() if (out / name).stat().st_ino == inode]
    assert len(same) >= 14 - 3  # the last file may not have been noted before the kill
    assert seen[-1] == (WORLD, WORLD, sum(len(d) for n, d in whole.items() if n.endswith(".et")))


def test_nothing_to_go_on_with(program: Program, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={"nth": 1}, resume=True)
    assert contents(out) == whole
    before = {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    told = write(program, out, manifest={"nth": 1}, resume=True)
    assert told == json.loads(whole["manifest.json"])
    assert {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]} == before
    with pytest.raises(UserError, match="exists already"):
        write(program, out, manifest={"nth": 2}, resume=True)


def test_another_run_is_not_gone_on_with(program: Program, tmp_path: Path):
    folder = killed(tmp_path / "out", 15)
    before = contents(folder)
    write(program, tmp_path / "out", manifest={"nth": 2}, resume=True)
    assert contents(folder) == before
    assert verify(tmp_path / "out").ok


def test_a_run_that_lives_is_left_alone(program: Program, whole: dict[str, bytes], tmp_path: Path):
    folder = killed(tmp_path / "out", 15)
    before = contents(folder)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    write(program, tmp_path / "out", manifest={"nth": 1}, resume=True)
    assert contents(folder) == before
    assert contents(tmp_path / "out") == whole
    os.close(handle)


def test_ctrl_c(program: Program, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"

    def interrupt(done: int, *_: int) -> None:
        if done >= 8:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped, match="the same command goes on with it"):
        write(program, out, manifest={"nth": 1}, resume=True, workers=1, progress=interrupt)
    (folder,) = tmp_path.iterdir()
    noted = Journal(LocalFolder(folder), folder.name.rsplit("-", 1)[-1]).read()
    assert len(noted.ranks) >= 8
    seen: list[int] = []
    write(program, out, manifest={"nth": 1}, resume=True, progress=lambda n, *_: seen.append(n))
    assert contents(out) == whole
    assert left(tmp_path) == ["out"]


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from stagewright.cli import main as cli
    from stagewright.trace import templates
    from stagewright.trace import write as writing

    line = ["generate", "gpt2", "--layers", "4", "--seq-length", "16", "--vocab", "64", "--dp", "8"]
    noted = templates.write_share
    calls: list[int] = []

    def stopping(*arguments: Any) -> WrittenRanks:
        calls.append(len(arguments[-1].ranks))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return noted(*arguments)

    monkeypatch.setattr(templates, "TASK", 1)
    monkeypatch.setattr(writing, "write_share", stopping)
    out = str(tmp_path / "out")
    assert cli._status([*line, "-o", out, "--resume", "--workers", "1"]) == 130
    assert "the same command goes on with it" in capsys.readouterr().err
    assert cli._status([*line, "-o", out, "--resume"]) == 0
    assert sum(calls) == 9  # eight ranks, one of them stopped
    assert "8 of 8 ranks" in capsys.readouterr().out
    assert verify(out).ok


def test_a_full_disk_leaves_what_is_written(
    program: Program, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = LocalFolder.write
    full = [True]

    def failing(self: LocalFolder, name: str, pieces: Any) -> WrittenFile:
        if full[0] and name == "workload.20.et":
            raise OSError(28, os.strerror(28))
        return written(self, name, pieces)

    monkeypatch.setattr(LocalFolder, "write", failing)
    with pytest.raises(UserError, match="disk full"):
        write(program, tmp_path / "out", manifest={"nth": 1}, resume=True)
    assert len(left(tmp_path)) == 1
    full[0] = False
    write(program, tmp_path / "out", manifest={"nth": 1}, resume=True)
    assert contents(tmp_path / "out") == whole
    assert left(tmp_path) == ["out"]


def test_a_share_whose_files_have_gone(program: Program, tmp_path: Path):
    out = tmp_path / "out"
    write(program, out, manifest={}, shard=(1, 2))
    (folder,) = tmp_path.iterdir()
    next(iter(folder.glob("*.et"))).unlink()
    with pytest.raises(UserError, match=r"is not what was written \(1 such\); run"):
        write(program, out, manifest={}, shard=(2, 2))
    assert not out.exists()
    write(program, out, manifest={}, resume=True)
    assert verify(out).ok


RESUMED = """
import os, random, signal, sys, time
out = sys.argv[1]
sys.path[:0] = sys.argv[2:]
from test_unfinished import DEGREES, TOY
from stagewright.trace import journal
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace.write import write
journal.INTERVAL = 0
made = compile(Run(**TOY | {"dp": 8}, **{k: v for k, v in DEGREES.items() if k != "dp"})).program
write(made, out + ".once", manifest={})
began = time.perf_counter()
write(made, out + ".timed", manifest={})
span = time.perf_counter() - began
dice = random.Random(1)
kills = 0
while not os.path.exists(out):
    child = os.fork()
    if not child:
        write(made, out, manifest={}, resume=True)
        os._exit(0)
    if kills < 25:
        time.sleep(dice.random() * span)
        os.kill(child, signal.SIGKILL)
        kills += 1
    os.waitpid(child, 0)
print(kills)
"""


def test_killed_again_and_again(tmp_path: Path):
    out = tmp_path / "out"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", RESUMED, str(out), *paths],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "out.once")
    assert left(tmp_path) == ["out", "out.once", "out.timed"]


# ---- records -------------------------------------------------------------------------------------


def some(ranks: list[int]) -> WrittenRanks:
    return WrittenRanks.of({rank: WrittenFile("", rank * 7, f"{rank:064x}") for rank in ranks})


def test_journal(tmp_path: Path):
    """Everybody reads what anybody noted; what is no note is none."""
    journals = [Journal(LocalFolder(tmp_path), name) for name in ("a", "a", "b")]
    journals[0].note(some([5, 1]))
    journals[0].flush()
    journals[0].note(some([9]))
    journals[1].note(some([2, 5]))
    journals[2].note(some([3]))
    for journal in journals[1:]:
        journal.flush()
    for text in (b"", b"[]", b"{", b'{"ranks": [1], "bytes": [], "sha256": []}', b"null"):
        (tmp_path / f".part-a-{len(text)}.json").write_bytes(text)
    found = journals[1].read()
    assert found.ranks.tolist() == [1, 2, 5]
    assert found.sizes.tolist() == [7, 14, 35]
    assert [row.tobytes().hex() for row in found.digests] == [f"{r:064x}" for r in (1, 2, 5)]
    assert found.among(np.array([2, 4, 5])).ranks.tolist() == [2, 5]


def test_files_are_a_mapping():
    files = FileList("rank.{rank}.json", some([1, 5]), [WrittenFile("groups", 3, f"{9:064x}")])
    plain = {
        "rank.1.json": {"bytes": 7, "sha256": f"{1:064x}"},
        "rank.5.json": {"bytes": 35, "sha256": f"{5:064x}"},
        "groups": {"bytes": 3, "sha256": f"{9:064x}"},
    }
    assert files == plain
    assert dict(files) == plain
    assert (len(files), files.size) == (3, 45)
    for name in ("rank.2.json", "rank.01.json", "rank.x.json", "rank.1", ""):
        assert name not in files
    assert FileList.read("rank.{rank}.json", plain) == plain
    text = b"".join(manifest.text({"nth": 1, "more": [2]}, files))
    assert json.loads(text) == {"nth": 1, "more": [2], "files": plain}
    assert json.loads(b"".join(manifest.text({"a": 1}, FileList("{rank}", some([]))))) == {
        "a": 1,
        "files": {},
    }


def test_a_million_files_in_little_memory():
    ranks = np.arange(1 << 20)
    done = WrittenRanks(ranks, ranks, np.zeros((1 << 20, 32), np.uint8))
    assert sum(column.nbytes for column in done) == 48 << 20
    files = FileList("workload.{rank}.et", done)
    assert files["workload.1048575.et"]["bytes"] == 1048575
    assert files.size == (1 << 19) * ((1 << 20) - 1)
