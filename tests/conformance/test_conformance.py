"""Tier by tier: what PyTorch did, figure for figure."""

import compare
import pytest


@pytest.fixture(scope="module", params=compare.NAMES)
def pair(request: pytest.FixtureRequest):
    case = compare.read(request.param)
    return case, compare.compiled_of(case)


def agrees(name: str, what: str, theirs, ours) -> None:
    """Equal, but for what is listed: that must differ by just the figures that are listed."""
    _, listed = compare.DIFFERENT.get((name, what), ("", {}))
    assert compare.differences(theirs, ours) == listed


def test_collectives(pair):
    case, compiled = pair
    ours = compare.collectives(case, compiled)
    agrees(case["name"], "collectives", compare.recorded_collectives(case), ours)


def test_flops(pair):
    case, compiled = pair
    agrees(case["name"], "flops", compare.recorded_flops(case), compare.flops(case, compiled))


def test_state(pair):
    case, compiled = pair
    agrees(case["name"], "state", case["params"], compare.state(case, compiled))


def test_executed_order(pair):
    case, compiled = pair
    if "actions" in case:
        assert compare.order(case, compiled) == case["actions"]


def test_what_differs_is_of_a_case():
    assert {name for name, _ in compare.DIFFERENT} <= set(compare.NAMES)
