"""What tests of all rooms share: folders, optional extras, how far draws go, tables of cases."""

import importlib
import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import yaml

A, B = TypeVar("A"), TypeVar("B")

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = TESTS / "data"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"

EFFORT = int(os.environ.get("EFFORT", "1"))
"""How far random searches go: `EFFORT=10 pytest -m slow` tries ten times as many draws."""


def times(count: int) -> int:
    """Number of draws, times the effort that is asked for."""
    return count * EFFORT


def pairs(rows: Iterable[A], columns: Iterable[B], share: int = 2) -> list[tuple[A, B]]:
    """One pair in `share`, with every row and every column; with as much effort all."""
    step = -(-share // EFFORT)
    table = itertools.product(enumerate(rows), enumerate(columns))
    return [(row, column) for (i, row), (j, column) in table if (i + j) % step == 0]


def some(cases: Sequence[A], share: int = 2) -> list[A]:
    """One case in `share`, drawn once and for all, in their order; with as much effort all."""
    share = -(-share // EFFORT)
    drawn = random.Random(len(cases)).sample(range(len(cases)), -(-len(cases) // share))
    return [cases[i] for i in sorted(drawn)]


def needed(module: str, extra: str) -> Any:
    """Module of an extra; without it the test is skipped, or fails if EXTRAS=required (CI)."""
    if os.environ.get("EXTRAS") == "required":
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"needs the extra: pip install -e '.[{extra}]'")


class Outcome(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]
"""The fixture `command`: runs the words of a command line, or one text of them."""


# ---- tables of cases -----------------------------------------------------------------------------


def cases(test: Callable[..., None]) -> Any:
    """Parametrize a test with its table in `data/cases/FILE.yaml`; lists are read as tuples."""
    rows = rows_of(Path(test.__code__.co_filename).stem, test.__name__)
    names = list(rows[0])
    assert all(list(row) == names for row in rows), f"{test.__name__}: rows differ in columns"
    values = [tuple(row[name] for name in names) for row in rows]
    return pytest.mark.parametrize(names, values, ids=_id)(test)


def rows_of(file: str, table: str) -> list[dict[str, Any]]:
    """Rows of a table of `data/cases/FILE.yaml`."""
    return [*table_of(file, table)]


def table_of(file: str, table: str) -> Any:
    """A table of `data/cases/FILE.yaml` as it is there."""
    return read_yaml(f"cases/{file}.yaml")[table]


def evaluated(formula: object, **names: Any) -> Any:
    """Value of a formula of a table of cases."""
    return eval(str(formula), {"__builtins__": {}}, names)


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """A file of `data/`, whose lists are read as tuples."""
    text = (DATA / name).read_text(encoding="utf-8")
    return _tuples(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _id(value: Any) -> str | None:
    """Text of a mapping or a list; of other values pytest makes its own."""
    return str(value)[:60] if isinstance(value, dict | tuple) else None
