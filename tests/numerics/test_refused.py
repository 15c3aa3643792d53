"""Runs that cannot be are refused in words that say what, where and what to do."""

import re
from typing import Any

import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.run.settings import Run


@cases
def test_runs_that_cannot_be(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError) as refused:
        compile(Run(**settings))
    said = str(refused.value)
    assert said.startswith(wanted) or re.search(wanted, said), said
