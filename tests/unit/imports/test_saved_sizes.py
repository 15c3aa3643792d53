"""Sizes of saved programs, which sympy evaluates as Python: only those of torch pass."""

from helpers import cases
from stagewright.imports.saved import _is_size  # pyright: ignore[reportPrivateUsage]


@cases
def test_sizes_that_torch_writes(text: str):
    assert _is_size(text)


@cases
def test_sizes_that_run_code_or_for_ever(text: str):
    assert not _is_size(text)
