"""Graphs, programs, files and commands are what `tests/golden/` has; see `goldens.py`."""

from collections.abc import Callable

import pytest

from goldens import GOLDEN, files

FILES = dict(files())


@pytest.mark.parametrize("name", FILES)
def test_nothing_changed(name: str):
    make: Callable[[], str] = FILES[name]
    was = (GOLDEN / name).read_text(encoding="utf-8")
    assert make() + "\n" == was, "see `python tests/goldens.py`, which prints what changed"


def test_no_golden_file_is_left_over():
    have = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    own = {name for name in have if name.startswith(("runs/", "commands/"))}
    assert own == set(FILES)
