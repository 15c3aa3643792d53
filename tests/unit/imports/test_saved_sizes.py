"""Sizes of saved programs, which sympy evaluates as Python: only those of torch pass."""

import pytest

from stagewright.imports.saved import _is_size  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Symbol('s77', positive=True))",
        "Add(Pow(Symbol('s1'), Integer(2)), Integer(-1))",
        "Pow(Symbol('s1'), Rational(1, 2))",
        "FloorDiv(Add(Symbol('s0'), Integer(15)), Integer(16))",
        "s0*s1 + 1",
        "32",
    ],
)
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
