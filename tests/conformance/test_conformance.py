"""Tier by tier: what PyTorch did, figure for figure."""

import compare
import page
import pytest


@pytest.fixture(scope="module", params=compare.NAMES)
def pair(request: pytest.FixtureRequest):
    case = compare.read(request.param)
    return case, compare.compiled_of(case)


def agrees(name: str, what: str, theirs, ours) -> None:
    """Equal, but for what is listed: that must differ by just the figures that are listed."""
    listed = compare.DIFFERENT.get((name, what))
    assert compare.differences(theirs, ours) == (listed.figures if listed else {})


def test_collectives(pair):
    case, compiled = pair
    ours = compare.collectives(case, compiled)
    agrees(case["name"], "collectives", compare.recorded_collectives(case), ours)


def test_flops(pair):
    case, compiled = pair
    agrees(case["name"], "flops", compare.recorded_flops(case), compare.flops(case, compiled))


def test_state(pair):
    case, compiled = pair
    agrees(case["name"], "state", compare.recorded_state(case), compare.state(case, compiled))


def test_executed_order(pair):
    case, compiled = pair
    if "actions" in case:
        assert compare.order(case, compiled) == case["actions"]


def test_live_bytes_after_forward(pair):
    case, compiled = pair
    if "after" in case["live"]:
        ours = {"bytes": compare.live_after_forward(case, compiled)}
        agrees(case["name"], "live", {"bytes": compare.recorded_live(case, "forward")}, ours)


def test_peak(pair):
    case, compiled = pair
    theirs, ours = compare.recorded_live(case, "peak"), compare.peak(case, compiled)
    if (case["name"], "peak") in compare.DIFFERENT:
        agrees(case["name"], "peak", {"bytes": theirs}, {"bytes": ours})
        assert abs(ours / theirs - 1) > compare.TOLERANCE
    else:
        assert ours == pytest.approx(theirs, rel=compare.TOLERANCE)


def test_what_differs_is_of_a_case():
    assert {name for name, _ in compare.DIFFERENT} <= set(compare.NAMES)


@pytest.mark.slow
def test_the_page_is_current(request: pytest.FixtureRequest):
    text = page.text()
    if request.config.getoption("--bless"):
        page.PAGE.write_text(text, encoding="utf-8")
    assert page.PAGE.read_text(encoding="utf-8") == text, "run python tests/conformance/page.py"
