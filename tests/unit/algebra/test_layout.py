"""Layouts: what they print, and that `steps` brings a value from anywhere to anywhere it can go."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import cases, times
from spmd import Coords, Spmd, group_index
from stagewright.algebra.layout import (
    Layout,
    Mesh,
    collective,
    moves,
)
from stagewright.algebra.size import size
from stagewright.graph.make import move
from stagewright.graph.node import Node, node

# ---- the mesh ------------------------------------------------------------------------------------

MESH = Mesh((("tp", 2), ("cp", 3), ("dp", 4)))


def test_mesh() -> None:
    assert MESH.names == ("tp", "cp", "dp")
    assert MESH.world_size == 24
    assert [MESH.stride(a) for a in MESH.names] == [1, 2, 6]
    assert MESH.size("tp", "dp") == 8
    assert MESH.size() == MESH.size("ep") == 1


def test_coords_number_the_ranks_fastest_axis_first() -> None:
    seen = [tuple(MESH.coords(r).values()) for r in range(MESH.world_size)]
    assert seen == [(t, c, d) for d in range(4) for c in range(3) for t in range(2)]


def test_positions_number_a_joint_group_outermost_axis_first() -> None:
    mesh = dict(MESH.axes)
    coords = {"tp": 1, "cp": 2, "dp": 3}
    assert group_index(mesh, ("cp", "tp"), coords) == 2 * 2 + 1
    assert group_index(mesh, ("tp", "cp"), coords) == 1 * 3 + 2
    assert group_index(mesh, (), coords) == 0


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "partial"), [((("a",), ("a",)), ""), ((("a", "a"),), ""), ((("a",),), "a")]
)
def test_an_axis_does_one_thing(dims: Any, partial: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        Layout(dims, frozenset(partial))


# ---- transitions ---------------------------------------------------------------------------------


def with_axis(role: int | str | None) -> Layout:
    dims = tuple(("a",) if role == i else () for i in range(2))
    return Layout(dims, frozenset({"a"} if role == "sum" else ()))


@cases
def test_nine_cells(src: int | str | None, dst: int | str | None, kind: str | None) -> None:
    have, to = with_axis(src), with_axis(dst)
    if kind == "never":
        with pytest.raises(ValueError, match="cannot become a partial sum"):
            collective(src, dst)
        with pytest.raises(ValueError, match="cannot become a partial sum"):
            moves(have, to)
        return
    assert collective(src, dst) == kind
    assert [s.kind for s in moves(have, to)] == ([kind] if kind else [])


def read(text: str) -> Layout:
    """`"a b,c@d"`: a and b split the first dim, c the second, d is a partial sum."""
    dims, _, partial = text.partition("@")
    first, _, second = dims.partition(",")
    return Layout((tuple(first.split()), tuple(second.split())), frozenset(partial.split()))


@cases
def test_transitions(what: str, have: str, to: str, expect: tuple[str, ...]) -> None:
    assert tuple(map(str, moves(read(have), read(to)))) == expect, what


AXES = {"a": 2, "b": 3, "c": 2}


def random_layout(rng: random.Random, rank: int, may_be_sums: frozenset[str]) -> Layout:
    dims: list[tuple[str, ...]] = [()] * rank
    sums: set[str] = set()
    for axis in rng.sample(sorted(AXES), len(AXES)):
        role = rng.randrange(rank + 2)
        if role < rank:
            dims[role] = (*dims[role], axis)
        elif role == rank and axis in may_be_sums:
            sums.add(axis)
    return Layout(tuple(dims), frozenset(sums))


def parts_of(spmd: Spmd, whole: Any, have: Layout, rng: np.random.Generator) -> dict[Coords, Any]:
    """What each rank holds: parts over partial axes add up, or have the whole as their maximum."""
    sums = sorted(have.partial)
    places = list(itertools.product(*(range(AXES[a]) for a in sums)))
    less = [rng.normal(size=whole.shape) for _ in places]
    if have.reduction == "max":
        holder = rng.integers(len(places), size=whole.shape)
        parts = [np.where(holder == i, whole, whole - abs(x)) for i, x in enumerate(less)]
    else:
        parts = [*less[1:], whole - sum(less[1:], start=np.zeros(whole.shape))]
    table = dict(zip(places, parts, strict=True))
    return {
        r: spmd.cut(table[tuple(spmd.at[r][a] for a in sums)], Layout(have.dims), r)
        for r in spmd.ranks
    }


@pytest.mark.numerics
@given(st.integers(0, 2**32), st.sampled_from(["sum", "max"]), st.integers(1, 3))
@settings(max_examples=times(250))
def test_steps_between_any_two_layouts(seed: int, reduction: str, rank: int) -> None:
    rng = random.Random(seed)
    have = random_layout(rng, rank, frozenset(AXES))
    to = random_layout(rng, rank, have.partial)
    have = Layout(have.dims, have.partial, reduction if have.partial else "sum")
    to = Layout(to.dims, to.partial, reduction if to.partial else "sum")
    path = moves(have, to)

    # Neighbours are merged, nothing is reduced that ends as a sum, and nothing moves in vain.
    for one, two in itertools.pairwise(path):
        alike = (one.kind, one.src, one.dst) == (two.kind, two.src, two.dst)
        assert not alike or one.kind == "all_to_all"
    assert not {a for s in path for a in s.axes} & to.partial
    assert len(path) <= 2 * len(AXES)

    spmd = Spmd(AXES, {"N": 12})
    numbers = np.random.default_rng(seed)
    whole = numbers.normal(size=(12,) * rank)
    n: Node = node("input", (), shape=(size("N"),) * rank, dtype="fp32", layout=have, name="x")
    values = parts_of(spmd, whole, have, numbers)
    for step in path:
        n = move(n, step, phase="forward", once=False)
        values = spmd.move(n, values)
    assert n.layout == to
    for r in spmd.ranks:
        want = spmd.cut(whole, Layout(to.dims), r)
        np.testing.assert_allclose(spmd.total(n, {n: values}, r), want, atol=1e-12)


@given(st.integers(0, 2**32))
@settings(max_examples=times(100))
def test_a_new_partial_sum_is_impossible(seed: int) -> None:
    rng = random.Random(seed)
    have = random_layout(rng, 2, frozenset(AXES))
    to = random_layout(rng, 2, frozenset(AXES))
    if to.partial <= have.partial:
        moves(have, to)
    else:
        with pytest.raises(ValueError, match="cannot become"):
            moves(have, to)
