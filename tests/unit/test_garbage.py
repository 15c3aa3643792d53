"""How often Python looks for cyclic garbage."""

import gc
from collections.abc import Generator

import pytest

from stagewright.garbage import seldom_collected


@pytest.fixture
def before() -> Generator[tuple[int, int, int]]:
    """The thresholds with which Python starts; those of the tests are larger."""
    of_tests = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*of_tests)


def test_the_last_one_that_leaves_puts_thresholds_back(before: tuple[int, int, int]):
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    second.__enter__()
    seldom = gc.get_threshold()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == seldom != before
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
