"""docs/fidelity.md is what `benchmarks/fidelity.py` writes, as far as that is quick to make."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stagewright import validate

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("fidelity", ROOT / "benchmarks" / "fidelity.py")
assert SPEC
assert SPEC.loader
fidelity = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fidelity)
PAGE = fidelity.PAGE.read_text(encoding="utf-8")
TOLD = "run python benchmarks/fidelity.py --quick, or without if step times have changed"


@pytest.mark.parametrize("title", fidelity.QUICK)
def test_section_is_current(title: str) -> None:
    part = fidelity.QUICK[title]()
    assert f"\n{fidelity.section(title, part)}\n" in PAGE, TOLD
    head = PAGE.split("\n## ")[0]
    for row in part.glance:
        assert f"| {' | '.join(row)} |" in head, TOLD


def test_step_times_are_current() -> None:
    """Of one source; all of them take minutes."""
    for o in validate.validate("Korthikanti"):
        assert f"| {' | '.join(fidelity.line(o))} |" in PAGE, TOLD


def test_every_section_is_there() -> None:
    for title in fidelity.QUICK | fidelity.SLOW:
        assert f"\n## {title}\n" in PAGE
