"""Slices of a torus, and the rings of groups in them."""

import math

import pytest

from helpers import cases
from stagewright.time.collectives import collective_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine, Placement
from stagewright.time.torus import Pod, Ring, rings

V5P = Pod((16, 20, 28), cube=4)
V5E = Pod((16, 16))


@cases
def test_a_job_has_a_slice_of_a_published_shape(
    pod: str, chips: int, shape: tuple[int, ...]
) -> None:
    assert {"V5P": V5P, "V5E": V5E}[pod].slice(chips) == shape


def test_a_slice_is_closed_by_switches_between_cubes_or_where_it_spans_the_pod() -> None:
    assert V5P.closed((4, 4, 8)) == (True, True, True)
    assert V5P.closed((2, 2, 4)) == (False, False, False)
    assert V5E.closed((8, 16)) == (False, True)


def test_an_axis_has_dimensions_of_its_own() -> None:
    closed = (True, True, True)
    assert rings((8, 8, 8), closed, 8, 1) == (Ring(8, True, 1),)
    assert rings((8, 8, 8), closed, 64, 8) == (Ring(8, True, 1),) * 2
    assert rings((8, 8, 8), closed, 512, 1) == (Ring(8, True, 1),) * 3
    # tp takes half of a dimension, and dp the other half and the other dimension
    found = rings((4, 4), (True, True), 8, 2)
    assert math.prod(ring.size for ring in found) == 8
    assert sorted(ring.groups for ring in found) == [1, 2]


def test_groups_with_a_stride_use_the_dimensions_that_are_left() -> None:
    machine = Machine.of(resolve("tpu-v5p"), gpus=512)
    size = 2**30
    whole = collective_seconds("all_gather", size // 512, Placement(512, (512,), (1,)), machine)
    dp = collective_seconds("all_gather", size // 64, Placement(64, (64,), (8,)), machine)
    tp = collective_seconds("all_gather", size // 8, Placement(8, (8,), (1,)), machine)
    assert dp == pytest.approx(whole * 3 / 2, rel=0.03)
    assert tp == pytest.approx(whole * 3 * 7 / 8, rel=0.03)


def test_a_line_lacks_the_way_back() -> None:
    closed, line = (rings((16,), (way,), 16, 1)[0].share for way in (True, False))
    assert closed == 2 * line
