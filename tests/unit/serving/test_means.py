"""Sums of one request in floats beside the exact ones of whole numbers."""

import numpy as np
import pytest

from stagewright.model.layers import Reach
from stagewright.run.lengths import COLUMNS, Cache, Group, attention_sums
from stagewright.serving.steps.rows import kept_blocks
from stagewright.serving.steps.step_table import mean_sums


@pytest.mark.parametrize(
    "reach", [Reach(), Reach(window=128), Reach(top=64), Reach(top=64, block=8)]
)
def test_sums_of_whole_numbers_are_exact_but_for_the_own_block(reach):
    pairs = [(0, 1), (0, 500), (100, 60), (127, 1), (128, 1), (5000, 1), (3000, 700)]
    groups = [Group(1, context, new) for context, new in pairs]
    exact = attention_sums(groups, Cache(16), reach)
    at = [COLUMNS.index(name) for name in ("pairs", "keys")]
    mean = np.array([mean_sums(reach, float(c), float(n)) for c, n in pairs])
    assert np.allclose(mean, exact[:, at], rtol=0 if reach.block == 1 else 0.05, atol=reach.block)


def test_chunks_count_as_if_a_request_were_anywhere_in_its_own():
    groups = [Group(1, context, 1) for context in range(8192, 16384)]
    exact = attention_sums(groups, Cache(16), Reach(chunk=8192))[:, COLUMNS.index("pairs")].mean()
    assert mean_sums(Reach(chunk=8192), 12000.0, 1.0)[0] == pytest.approx(exact, rel=1e-3)


def test_layers_that_alternate_are_kept_twice_each():
    stage = [("first", -1), *(("ab"[n % 2], n) for n in range(10)), ("head", -1)]
    kept = kept_blocks(stage)
    assert [(b.variant, b.copies) for b in kept] == [
        ("first", 1), ("a", 1), ("b", 1), ("a", 1), ("b", 4), ("a", 3), ("head", 1)
    ]  # fmt: skip
    assert sum(b.copies for b in kept) == len(stage)
