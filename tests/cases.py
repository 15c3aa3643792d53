"""Cases of tests as tables: `data/cases/FILE.yaml` has the rows of each test of `FILE.py`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from paths import DATA


def cases(test: Callable[..., None]) -> Any:
    """Parametrize a test with its rows; lists are read as tuples."""
    rows = rows_of(Path(test.__code__.co_filename).stem, test.__name__)
    names = list(rows[0])
    assert all(list(row) == names for row in rows), f"{test.__name__}: rows differ in columns"
    values = [tuple(row[name] for name in names) for row in rows]
    return pytest.mark.parametrize(names, values, ids=_id)(test)


def _id(value: Any) -> str | None:
    """Text of a table or a list; of other values pytest makes its own."""
    return str(value)[:60] if isinstance(value, dict | tuple) else None


def rows_of(file: str, table: str) -> list[dict[str, Any]]:
    """Rows of a table of `data/cases/FILE.yaml`."""
    return _tables(file)[table]


@cache
def _tables(file: str) -> dict[str, list[dict[str, Any]]]:
    text = (DATA / "cases" / f"{file}.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {test: [_tuples(row) for row in rows] for test, rows in tables.items()}


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
