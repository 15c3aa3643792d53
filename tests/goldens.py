"""What must not change by accident: graphs, programs and files of runs, and what commands print.

`python tests/goldens.py` writes `tests/golden/` anew and prints what changed, for a person to read;
`tests/test_goldens.py` holds the files against what the code makes now. A change of theirs is a
change of numbers or of what users see: its commit says why.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import itertools
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

import stagewright as sw
from helpers import table_of

GOLDEN = Path(__file__).parent / "golden"

RUNS: Mapping[str, dict[str, Any]] = table_of("goldens", "runs")

COMMANDS: Mapping[str, str] = table_of("goldens", "commands")
TRACES = "generate llama3-8b --layers 2 --tp 2 --dp 2 --seq-length 1024 -o traces"
OTHER = "generate llama3-8b --layers 2 --tp 2 --dp 2 --seq-length 1024 --sequence-parallel -o other"


def files() -> Iterator[tuple[str, Callable[[], str]]]:
    """Every golden file that this module writes: its name, and what makes its text."""
    for name, settings in RUNS.items():
        yield f"runs/{name}.txt", lambda settings=settings: of_run(settings)
    for name, command in COMMANDS.items():
        yield f"commands/{name}.txt", lambda command=command: of_command(command)


def of_run(settings: Mapping[str, Any]) -> str:
    """The sharded graph, the program in figures with a digest of each column, and of the files."""
    asked = dict(settings)
    compiled = sw.compile(asked.pop("model"), **asked)
    with tempfile.TemporaryDirectory() as folder:
        sw.generate(compiled, f"{folder}/traces", workers=1)
        traces = _digest_of_folder(Path(folder, "traces"))
    head = [f"# {compiled.run.describe()}", f"traces: sha256 {traces}", ""]
    return "\n".join([*head, *_program(compiled.program), "", compiled.graph_text()])


def of_command(command: str) -> str:
    """A command, and what it prints: on standard output, then on standard error, and its exit."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for first in (TRACES, OTHER) if "traces" in command else ():
            _run(first)
        out, err, code = _run(command)
    parts = [f"$ stagewright {command}", out.rstrip()]
    parts += [f"-- standard error --\n{err.rstrip()}"] if err.strip() else []
    return "\n".join([*parts, f"-- exit code {code} --"])


def _run(command: str) -> tuple[str, str, int]:
    from click.testing import CliRunner

    from stagewright.cli.main import commands
    from stagewright.errors import UserError

    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        apart = (
            {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
        )  # click 8.1
        done = CliRunner(**apart).invoke(commands, shlex.split(command), env={"COLUMNS": "100"})
    failed = done.exception if not isinstance(done.exception, SystemExit) else None
    if failed is not None and not isinstance(failed, UserError):
        raise failed
    text = done.stdout + (f"stagewright: error: {failed}\n" if failed else "")
    return re.sub(r"\b\d+(\.\d+)? s\b(?=;|$)", "TIME s", text, flags=re.M), done.stderr, (
        2 if failed else done.exit_code
    )  # fmt: skip


def _digest_of_folder(folder: Path) -> str:
    """One digest of all traces of a folder: names and bytes, in order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.et")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _program(program: Any) -> list[str]:
    """A program for people: its mesh and partners, and per class of ranks its figures and columns.

    Digests say that a column changed, the sums beside them what: counts, FLOPs and bytes.
    """
    lines = [f"mesh {dict(program.mesh.axes)}"]
    lines += [f"communicator {i}: {who}" for i, who in enumerate(program.communicators)]
    lines += [f"peer {i}: {who.axis} {who.shift:+}" for i, who in enumerate(program.peers)]
    for of in program.classes:
        tasks = of.tasks
        lines += ["", f"ranks {_ranges(of.ranks)}: pipeline rank {of.pipeline_rank}"]
        lines += [
            f"  {len(tasks)} tasks, {tasks.flops.sum()} FLOPs, {tasks.traffic.sum()} bytes of "
            f"traffic, {tasks.comm_bytes.sum()} bytes of communication",
            "  memory " + ", ".join(f"{name} {size}" for name, size in of.memory.items()),
            "  tasks: " + _digests(tasks),
            "  values: " + _digests(of.values),
        ]
    return lines


def _digests(table: Any) -> str:
    """Name and digest of each column; columns of text as they print."""
    words: list[str] = []
    for field in fields(table):
        column = getattr(table, field.name)
        if isinstance(column, np.ndarray):
            data = str(column.dtype).encode() + column.tobytes()
        elif isinstance(column, tuple):
            data = "\n".join(map(str, column)).encode()
        else:
            data = repr(column).encode()
        words.append(f"{field.name} {hashlib.sha256(data).hexdigest()[:8]}")
    return ", ".join(words)


def _ranges(ranks: Any) -> str:
    """Ranks such as `0-3,8`."""
    words: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks.tolist()), lambda pair: pair[1] - pair[0]):
        of = [rank for _, rank in run]
        words.append(str(of[0]) if len(of) == 1 else f"{of[0]}-{of[-1]}")
    return ",".join(words)


def main() -> int:
    """Write all golden files of this module; print what changed."""
    changed = 0
    kept: set[Path] = set()
    for name, make in files():
        path, new = GOLDEN / name, make() + "\n"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        kept.add(path)
        if new != old:
            changed += 1
            lines = old.splitlines(), new.splitlines()
            print("\n".join(difflib.unified_diff(*lines, name, name, lineterm="", n=1)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
    for folder in ("runs", "commands"):
        for path in set((GOLDEN / folder).glob("*")) - kept:
            path.unlink() if path.is_file() else shutil.rmtree(path)
            print(f"removed {path.name}")
    print(f"{changed} of {len(kept)} golden files changed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
