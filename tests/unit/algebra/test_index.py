"""Index expressions: reading, binding sizes, and carrying splits from operands to results."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import cases
from stagewright.algebra.index import bind, layout_of, parse, show, splits
from stagewright.algebra.size import size

GQA = "bq(gr)d,bkgd->b(gr)qk"


def test_parse() -> None:
    spec = parse("bsM,(gr)m->b(gr)")
    assert spec.ins == ((("b",), ("s",), ("m",)), (("g", "r"), ("m",)))
    assert spec.out == (("b",), ("g", "r"))
    assert spec.whole == {"m"}
    assert spec.contracted == {"s", "m"}


def test_numbers_have_no_indices() -> None:
    assert parse("->bs").ins == ((),)
    assert parse(",->").ins == ((), ())
    assert parse("bs->").out == ()
    assert parse(",->").contracted == frozenset()


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
def test_bind(text: str, shapes: list[tuple[int, ...]], expect: dict[str, int]) -> None:
    assert bind(parse(text), shapes) == expect
    names = {n: size(f"N{n}") for shape in shapes for n in shape}
    if len(set(expect.values())) == len(expect) and "(" not in text:
        symbolic = bind(parse(text), [tuple(names[n] for n in shape) for shape in shapes])
        assert symbolic == {x: names[n] for x, n in expect.items()}


def test_bind_symbolic_groups() -> None:
    b, s, a, g, d = map(size, ("B", "S", "A", "G", "D"))
    found = bind(parse(GQA), [(b, s, a, d), (b, s, g, d)])
    assert found["r"] == a / g


def test_bind_from_the_result() -> None:
    spec = parse("bq(gr)d,b(gr)qk->bkgd")
    shapes = [(2, 3, 8, 5), (2, 8, 3, 4)]
    with pytest.raises(ValueError, match="cannot tell"):
        bind(spec, shapes)
    found = bind(spec, shapes, (2, 4, 2, 5))
    assert found == {"b": 2, "q": 3, "d": 5, "k": 4, "g": 2, "r": 4}


@cases
def test_bind_refuses(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(parse(text), shapes)


def axes(text: str) -> tuple[tuple[str, ...], ...]:
    """`"dp,cp tp,-"`: axes per dim."""
    return tuple(() if d == "-" else tuple(d.split()) for d in text.split(","))


@cases
def test_splits(text: str, ins: list[str], expect: dict[str, str], out: str) -> None:
    spec = parse(text)
    found = splits(spec, [axes(t) for t in ins])
    assert {x: " ".join(a) for x, a in found.items() if a} == expect
    assert layout_of(spec.out, found) == axes(out)


@cases
def test_splits_disagree(text: str, ins: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        splits(parse(text), [axes(t) for t in ins])


def test_splits_known_from_the_result() -> None:
    spec = parse("bq(gr)d,b(gr)qk->bkgd")
    ins = [axes("-,-,kv rep,-"), axes("-,kv rep,-,-")]
    assert splits(spec, ins, {"g": ("kv",)})["r"] == ("rep",)
    assert splits(spec, ins, {"g": ()})["r"] == ("kv", "rep")
