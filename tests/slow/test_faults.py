"""Kills, full disks, read-only places, two runs at once: an output is whole or not there.

What must die runs in processes of its own, started once per test, which fork what they kill.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagewright.check.verify import verify

PATHS = [path for path in sys.path if path]

PROLOGUE = """
import itertools, json, os, random, shutil, signal, sys, time
out, place = sys.argv[1], os.path.dirname(sys.argv[1])
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from stagewright.lower.compile import compile
from stagewright.errors import UserError
from stagewright.run.settings import Run
from stagewright.check.verify import verify
from stagewright.trace.write import write

def program(**settings):
    toy = dict(model="gpt2", layers=4, seq_length=16, vocab=64, tp=4, dp=16, pp=2)
    return compile(Run(**(toy | settings))).program

def forked(function):
    child = os.fork()
    if child:
        return child
    code = 9
    try:
        function()
        code = 0
    except UserError as error:
        print("refused:", error, flush=True)
        code = 2
    finally:
        os._exit(code)
"""


def run(script: str, out: Path, *wrapper: str, **more: Any) -> str:
    """Run a script in a process of its own; returns what it prints."""
    command = [*wrapper, sys.executable, "-c", PROLOGUE + script, str(out), *PATHS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done.stdout


KILLED = """
force = bool(int(os.environ["FORCE"]))
made = program()
SEEN = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove")

def dying(moment):
    # Writes, and dies just before it touches its files for the `moment`-th time; if it never comes
    # to that, it tells how often it has.
    count = itertools.count(1)  # of all threads
    def hook(event, args):
        if event in SEEN and place in str(args[0]) and next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    write(made, out, manifest={}, force=force)
    Path(place, "count").write_text(str(next(count) - 1))

def killed(child, soon=None):
    if soon is not None:
        time.sleep(soon)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not os.path.lexists(out):
        if force:  # it died between the two renames
            write(made, out, manifest={})
        return code, False
    report = verify(out, workers=1)
    assert report.findings == [], report
    assert report.ranks == report.world_size == 128
    if not force:
        shutil.rmtree(out)
    return code, True

began = time.perf_counter()
write(made, out, manifest={})
span = time.perf_counter() - began
if not force:
    shutil.rmtree(out)
assert killed(forked(lambda: dying(-1))) == (0, True)
events = int(Path(place, "count").read_text())
dice = random.Random(0)
moments = [1, 2, 3, *range(events - 5, events + 2), *dice.sample(range(4, events - 5), 30)]
exact, left = {}, []
for moment in moments:
    exact[moment] = killed(forked(lambda: dying(moment)))
    behind = [name for name in os.listdir(place) if ".partial-" in name]
    left = [*left, *behind] if force else behind
    for name in behind if force else ():  # a write with force would, at moments that `events` lacks
        shutil.rmtree(os.path.join(place, name))
for _ in range(20):  # and at moments between these, whatever they are
    killed(forked(lambda: write(made, out, manifest={}, force=force)), dice.random() * span)
shutil.rmtree(out, ignore_errors=True)
write(made, out, manifest={})
assert verify(out).findings == []
print(json.dumps([events, list(exact.items()), len(left)]))
"""


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_50_moments(tmp_path: Path, force: bool):
    """Nothing, or all of it; and what the killed leave behind is in nobody's way."""
    environment = os.environ | {"FORCE": str(int(force))}
    events, exact, left = json.loads(run(KILLED, tmp_path / "out", env=environment))
    assert events > 130  # a directory, a file per rank, groups, manifest, the final name
    for moment, (code, there) in exact:
        assert code == (-9 if moment <= events else 0), moment
        if not force:  # the last event is the one that gives the directory its name
            assert there == (moment > events), moment
    assert sum(there for _, (_, there) in exact) >= (len(exact) - 1 if force else 1)
    assert left > 20  # died in the middle of it


AT_ONCE = """
whole = {}
for nth in (1, 2):
    write(program(dp=nth * 8), out + str(nth), manifest={"nth": nth})
    whole[nth] = sorted((f.name, f.read_bytes()) for f in Path(out + str(nth)).iterdir())
made = {nth: program(dp=nth * 8) for nth in (1, 2)}
codes = []
for force in (False, True):
    for _ in range(10):
        shutil.rmtree(out, ignore_errors=True)
        start = time.time() + 0.02
        def go(nth):
            while time.time() < start:
                pass
            write(made[nth], out, manifest={"nth": nth}, force=force)
        children = [forked(lambda nth=nth: go(nth)) for nth in (1, 2)]
        found = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        codes.append(found)
        here = sorted((f.name, f.read_bytes()) for f in Path(out).iterdir())
        assert here in whole.values()
        assert not [name for name in os.listdir(place) if name.startswith(".out.")]
print(json.dumps(codes))
"""


def test_two_runs_into_one_directory_do_not_mix(tmp_path: Path):
    lines = run(AT_ONCE, tmp_path / "out").splitlines()
    codes = json.loads(lines[-1])
    assert codes[:10] == [[0, 2]] * 10  # without --force one of them is refused
    assert codes[10:] == [[0, 0]] * 10  # with it the last one stays
    assert all("exists already" in line or "cannot be written" in line for line in lines[:-1])


TOO_LARGE = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
child = forked(lambda: write(program(), out, manifest={}))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([code, os.listdir(place)]))
"""


def test_a_file_that_may_not_grow(tmp_path: Path):
    """A real error in the middle of a write, of any system: a limit on the size of files."""
    lines = run(TOO_LARGE, tmp_path / "out").splitlines()
    assert "out: cannot be written: File too large" in lines[0]
    assert json.loads(lines[-1]) == [2, []]


def own_mounts() -> list[str]:
    """A command that gives a process mounts of its own; skips the test where there is none."""
    for wrapper in (["unshare", "-m"], ["unshare", "-rm"]):
        if shutil.which("unshare"):
            mount = "mount -t tmpfs -o size=100k tmpfs /mnt"
            done = subprocess.run([*wrapper, "sh", "-c", mount], capture_output=True, check=False)
            if not done.returncode:
                return wrapper
    pytest.skip("no mounts of one's own here")


FULL = """
try:
    write(program(), out, manifest={})
except UserError as error:
    print(error)
assert os.listdir(place) == [], os.listdir(place)
shutil.disk_usage = lambda path: type("Usage", (), {"free": 10**9})  # it fills up while we write
try:
    write(program(), out, manifest={})
except UserError as error:
    print(error)
assert os.listdir(place) == [], os.listdir(place)
"""


def test_full_disk(tmp_path: Path):
    mounts = own_mounts()
    mount = f'mount -t tmpfs -o size=200k tmpfs "{tmp_path}" && exec "$@"'
    out = run(FULL, tmp_path / "out", *mounts, "sh", "-c", mount, "sh")
    before, during = out.splitlines()
    assert f"{tmp_path}/out: disk full: needs " in before
    assert f"{tmp_path}/out: disk full: needs " in during


READ_ONLY = """
for force in (False, True):
    try:
        write(program(), out, manifest={}, force=force)
    except UserError as error:
        print(error)
assert verify(place + "/before").findings == []
"""


def test_read_only_place(tmp_path: Path):
    mounts = own_mounts()
    run('write(program(), out, manifest={}); print("ok")', tmp_path / "before")
    command = f'mount --bind "{tmp_path}" "{tmp_path}" && mount -o remount,bind,ro "{tmp_path}"'
    out = run(READ_ONLY, tmp_path / "out", *mounts, "sh", "-c", f'{command} && exec "$@"', "sh")
    for line in out.splitlines():
        assert f"{tmp_path}/out: no permission to write in {tmp_path}" in line
    assert len(out.splitlines()) == 2


VERIFY_KILLED = """
write(program(), out, manifest={})
dice = random.Random(0)
for _ in range(10):
    child = forked(lambda: verify(out, workers=2))
    time.sleep(dice.random() * 0.3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(verify(out).ok)
"""


def test_verify_writes_nothing(tmp_path: Path):
    assert run(VERIFY_KILLED, tmp_path / "out").splitlines()[-1] == "True"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert verify(tmp_path / "out").ok
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
