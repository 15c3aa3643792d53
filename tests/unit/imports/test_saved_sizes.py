"""Sizes of saved programs, which sympy evaluates as Python: only those of torch pass."""

import pytest

from helpers import cases
from stagewright.imports.saved import _is_size  # pyright: ignore[reportPrivateUsage]


@cases
def test_sizes_that_torch_writes(text: str):
    assert _is_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Add('\\\n' # ', __import__('os').system('true')\n)",  # a comment to ast, code to sympy
        "Add('x\\\ny')",
        "Symbol('a')\r__import__('os')",
        "Symbol('s', assumptions=[].__class__)",
        "9**9**9**9",
        "Integer(9)**Integer(9)**Integer(9)",
        "Pow(Integer(9), Integer(9))",
        "Pow(Symbol('s'), Integer(1000000))",
        "1 << 99999999",
        "LShift(Integer(1), Integer(99999999))",
        "open('/etc/passwd')",
        "Add('f(1)')",
    ],
)
def test_sizes_that_run_code_or_for_ever(text: str):
    assert not _is_size(text)
