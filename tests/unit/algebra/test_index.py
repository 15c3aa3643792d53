"""Index expressions: reading, binding sizes, and carrying splits from operands to results."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import cases
from stagewright.algebra.index import bind, parse, show, splits


@pytest.mark.parametrize(
    "text", ["bsm,mf", "b-s->b", "b(gr->b", "bgr)->b", "b1->b", "b s->b", "b((g)r)->b"]
)
def test_unreadable(text: str) -> None:
    with pytest.raises(ValueError, match=r"no '->'|cannot read"):
        parse(text)


LETTERS = st.text("bsmfgr", min_size=1, max_size=4).map(lambda s: "".join(dict.fromkeys(s)))


@given(st.lists(LETTERS, min_size=1, max_size=3), LETTERS, st.integers(0, 2**16))
def test_show_gives_the_text_back(ins: list[str], out: str, seed: int) -> None:
    rng = random.Random(seed)
    whole = {c for c in "bsmfgr" if rng.random() < 0.2}

    def written(letters: str) -> str:
        cased = "".join(c.upper() if c in whole else c for c in letters)
        return f"{cased[:-2]}({cased[-2:]})" if len(cased) > 2 and rng.random() < 0.5 else cased

    text = ",".join(map(written, ins)) + "->" + written(out)
    assert show(parse(text)) == text


@cases
def test_bind_refuses(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(parse(text), shapes)


def axes(text: str) -> tuple[tuple[str, ...], ...]:
    """`"dp,cp tp,-"`: axes per dim."""
    return tuple(() if d == "-" else tuple(d.split()) for d in text.split(","))


@cases
def test_splits_disagree(text: str, ins: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        splits(parse(text), [axes(t) for t in ins])
