"""Names in backticks lead somewhere: a docstring or a page that says `graph.shard` means it."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers import ROOT

PACKAGE = ROOT / "src" / "stagewright"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
}
DOTTED = re.compile(r"`((?:stagewright\.)?[a-z_]+(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
FILES = {"py", "json", "csv", "md", "yaml", "yml", "et", "sh", "txt", "html", "toml", "stg", "svg"}
ELSEWHERE = {"torch", "numpy", "np", "pandas", "dist", "nn", "aten"}
OF_VALUES = {"b", "line", "run", "sw", "compiled", "program", "plan"}
"""Objects that a docstring speaks of: `b.weight`, `run.model`."""
THEIRS = {  # of other packages
    "training.dtype", "training.seq_len", "huggingface_hub.constants", "load.stages", "load.type",
}  # fmt: skip


@cache
def known(name: str) -> bool:
    """Whether some module whose name ends like the first words of `name` has the others."""
    words = name.removeprefix("stagewright.").split(".")
    for cut in range(len(words), 0, -1):
        ending = "." + ".".join(words[:cut])
        ends = (module for module in MODULES if module.endswith(ending))
        if any(_has(importlib.import_module(module), words[cut:]) for module in ends):
            return True
    return _has(importlib.import_module("stagewright"), words)


def _has(value: object, words: list[str]) -> bool:
    for word in words:
        fields = {**getattr(value, "__annotations__", {}), **getattr(value, "model_fields", {})}
        if not hasattr(value, word) and word not in fields:
            return False
        value = getattr(value, word, None)
    return True


def pointers(path: Path) -> Iterator[tuple[int, str]]:
    """The dotted names of a file that should lead somewhere, with their lines."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for name in DOTTED.findall(line):
            first, last = name.split(".")[0], name.split(".")[-1]
            if last not in FILES and first not in ELSEWHERE | OF_VALUES and name not in THEIRS:
                yield number, name


@pytest.mark.parametrize("room", sorted({p.name for p in PACKAGE.iterdir() if p.suffix != ".pyc"}))
def test_names_in_docstrings_lead_somewhere(room: str):
    place = PACKAGE / room
    files = [place] if place.suffix == ".py" else place.rglob("*.py")
    dead = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in pointers(file)
        if not known(name)
    ]
    assert dead == []
