"""Steps of inference whose experts get unequal numbers of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import COLLECTIVES
from stagewright.run.settings import Run

SERVED: dict[str, Any] = {"model": "mixtral-8x7b", "layers": 2, "dp": 4, "ep": 4}
EXPERTS, TOP_K = 8, 2


def products(**more: object) -> tuple[int, int]:
    """Experts that a rank's grouped product reads, and the FLOPs of all such products."""
    program = compile(Run(**{**SERVED, **more})).program
    tasks = program.classes[0].tasks
    grouped = [
        i
        for i in range(len(tasks))
        if tasks.shape[i] >= 0 and dict(tasks.shapes[tasks.shape[i]].extents).get("batch", 0) > 1
    ]
    shapes = [dict(tasks.shapes[tasks.shape[i]].extents) for i in grouped]
    return int(shapes[0]["batch"]), int(tasks.flops[grouped].sum())


@cases
def test_ranks_compute_as_much_as_the_busiest(step: dict[str, Any]) -> None:
    _, flops = products(**step, expert_load="1")
    assert products(**step, expert_load="1.5")[1] == pytest.approx(1.5 * flops, rel=1e-6)
    # Layers differ: the mean over them of what the busiest rank gets, here 3/2 and 1.
    lines = ((3, 3, *(5 / 3,) * 6), (1,) * 8)
    assert products(**step, expert_load=lines)[1] == pytest.approx(1.25 * flops, rel=1e-6)


def test_few_tokens_choose_few_experts() -> None:
    """Of experts that nobody chooses no weights are read, and of popular ones by all tokens."""
    step = {"mode": "decode", "batch_size": 16, "dp": 1, "ep": 1, "tp": 1}
    even, _ = products(**step, expert_load="1")
    none = 1 - (1 - TOP_K / EXPERTS) ** 16
    assert even == np.ceil(EXPERTS * none)
    assert products(**step, expert_load=((1, 1, 0, 0, 0, 0, 0, 0),))[0] == 2


def test_the_load_of_published_servers_is_uneven() -> None:
    """The busiest of several ranks has more than the mean, and few tokens choose fewer experts."""
    step: dict[str, Any] = {"model": "gpt-oss-120b", "mode": "decode", "batch_size": 32}
    whole: dict[str, Any] = {**step, "dp": 1, "ep": 1}
    (uneven, flops), (even, same) = products(**whole), products(**whole, expert_load="1")
    assert uneven < even
    assert flops == same
    assert products(**whole, expert_load="1.2") == (uneven, flops)  # of several ranks, here one
    # Popularities are spread as by a ratio of 128^0.7 = 30: their standard deviation is 0.90 of
    # the mean. Of four ranks with 32 experts each, the busiest gets 1.05 deviations more.
    split: dict[str, Any] = {**step, "dp": 4, "ep": 4}
    busiest = products(**split)[1] / products(**split, expert_load="1")[1]
    assert busiest == pytest.approx(1 + 1.05 * 0.90 * np.sqrt(96 / 127 / 32), rel=0.01)
    # Redundant copies even out the load.
    copies: dict[str, Any] = {**step, "dp": 8, "ep": 8, "num_redundant_experts": 8}
    assert products(**copies)[1] == pytest.approx(products(**split)[1] / busiest / 2)


def test_an_exchange_lasts_as_long_as_its_busiest_rank_needs() -> None:
    sent: list[int] = []
    for load in ("1.0", "1.5"):
        tasks = compile(Run(**SERVED, mode="decode", expert_load=load)).program.classes[0].tasks
        moves = tasks.collective == COLLECTIVES.index("all_to_all")
        sent.append(int(tasks.comm_bytes[moves].max()))
    assert sent[1] == pytest.approx(1.5 * sent[0], rel=1e-3)


def test_redundant_experts_even_out_a_load() -> None:
    with pytest.raises(UserError, match="num_redundant_experts=4 evens out"):
        compile(Run(**SERVED, mode="decode", num_redundant_experts=4, expert_load="1.2"))
