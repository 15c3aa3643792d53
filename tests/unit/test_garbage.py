"""How often Python looks for cyclic garbage."""

import gc

from stagewright.garbage import seldom_collected


def test_the_last_one_that_leaves_puts_thresholds_back():
    before = gc.get_threshold()
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    second.__enter__()
    seldom = gc.get_threshold()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == seldom != before
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
