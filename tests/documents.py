"""What pages promise: blocks of Markdown, commands and what they print."""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import warm
from helpers import ROOT

MADE = ROOT / "docs/reference"  # by Sphinx, out of the code, and by benchmarks/accuracy.py
WRITTEN = [page for page in (ROOT / "docs").rglob("*.md") if MADE not in page.parents]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN])

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_WALL = re.compile(r"\b\d+\.\d s\b")  # of the machine; simulated seconds have two decimals
_PROGRESS = re.compile(r"stagewright: (estimat(ing|ed)|bounds of layouts|[\d,]+ of)")


class Block(NamedTuple):
    """A fenced block, where it begins, and the comment above it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Blocks of a page in these languages, or all."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        mark = above.removeprefix("<!--").removesuffix("-->").strip() if "<!--" in above else ""
        inside = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2].strip(), inside, mark))
    return [block for block in found if not languages or block.language in languages]


class Exchange(NamedTuple):
    """A command as it stands after `$ `, indented lines that go on with it, and what it prints."""

    command: str
    output: str


def exchanges(text: str) -> Iterator[Exchange]:
    """Commands of a console block and their outputs."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], "a console block begins with a command"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body, after = [lines[start][2:]], start + 1
        while not _whole("\n".join(body)):
            body.append(lines[after])
            after += 1
        yield Exchange("\n".join(body), "\n".join(lines[after:end]))


def _whole(command: str) -> bool:
    """Whether a shell would not ask for more."""
    if command.endswith("\\"):
        return False
    loops = len(re.findall(r"^\s*for\b", command, re.MULTILINE))
    texts = len(re.findall(r"<<'END'$", command, re.MULTILINE))
    return loops == len(re.findall(r"^\s*done\b", command, re.MULTILINE)) and texts == len(
        re.findall(r"^END$", command, re.MULTILINE)
    )


def printed(command: str, folder: Path) -> str:
    """Output of a command in a folder, where `stagewright` is this one.

    Lines on the progress of a search are dropped: when they come depends on the machine, and a
    terminal shows a bar instead.
    """
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ
        | warm.ENVIRONMENT
        | {"PATH": f"{warm.installed()}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = [line.rstrip() for line in done.stdout.decode().splitlines()]
    return "\n".join(line for line in lines if not _PROGRESS.match(line)).rstrip("\n")


def same(got: str, wanted: str) -> bool:
    """Whether two outputs are, but for seconds of the machine, which have one decimal."""
    return _WALL.sub("_ s", got) == _WALL.sub("_ s", wanted)


def blessed(page: Path, answers: dict[str, str]) -> str:
    """The text of a page with other outputs of its commands."""

    def block(match: re.Match[str]) -> str:
        if match[2].strip() != "console":
            return match[0]
        lines = [
            f"$ {each.command}\n{answers[each.command]}".rstrip() for each in exchanges(match[3])
        ]
        return "\n".join(["```console", *lines, "```"])

    return _FENCE.sub(block, page.read_text(encoding="utf-8"))


def spoken(page: Path) -> list[tuple[Block, str, str | None]]:
    """Every Python block of a page, run in order in one place: what it prints, and what it should.

    What it should stands in the block of text that follows at once; where none does, `None`.
    """
    found: list[tuple[Block, str, str | None]] = []
    names: dict[str, Any] = {"__name__": "page"}
    all_ = blocks(page)
    for nth, block in enumerate(all_):
        if block.language != "python":
            continue
        out = io.StringIO()
        lines = "\n" * block.line + block.text  # so that errors name lines of the page
        with redirect_stdout(out):
            exec(compile(lines, str(page), "exec", dont_inherit=True), names)
        after = all_[nth + 1] if nth + 1 < len(all_) else None
        end = block.line + block.text.count("\n") + 3
        told = after.text if after and after.language == "text" and after.line == end else None
        got = "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())
        found.append((block, got, told))
    return found
