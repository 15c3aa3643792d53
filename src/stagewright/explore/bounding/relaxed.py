"""Candidates with less to do than others: those that bounds are taken of.

A relaxed candidate has no ZeRO, and no data parallelism but as far as the latter decides where the
ranks of tp and cp lie: groups whose ranks are as far from each other communicate as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stagewright.arrays import Int, distinct_numbers
from stagewright.search.candidates import HARDWARE, Candidates, Column, code_type
from stagewright.explore.structures import ORDER, apart_from_graphs
from stagewright.run.sections import SETTINGS

_WITHOUT = {
    "overlap_param_gather": False,
    "optimizer_cpu_offload": False,
    "overlap_moe_expert_parallel_comm": False,
    "pipeline_caches": False,
    "ddp_bucket_cap_mb": 0,
}
"""Settings that relaxed candidates do not have: with them a step computes as much and holds no less
on the GPU, but for what the host holds, which counts for nothing."""
_USUAL = "tp-cp-ep-dp-pp"
_FAR = 1 << 40
"""More ranks than there are."""
_WITHIN = ("tp", "cp")
"""Axes of the collectives within a block."""


def without_extras(rows: Candidates) -> Candidates:
    """Candidates without what only adds to their time or memory, and is not looked at."""
    without = {name: Column.constant(off, len(rows)) for name, off in _WITHOUT.items()}
    overlaps = _mapped(rows.column("no_overlap"), lambda axes: frozenset(axes) - {"dp"})
    return replace(rows, columns={**rows.columns, **without, "no_overlap": overlaps})


def kinds_of_relaxed(rows: Candidates) -> Int:
    """Numbers of candidates: equal where the candidates that they relax to have the same graphs, if
    the code that makes graphs asks nothing of numbers but whether a degree is 1."""
    apart = {*apart_from_graphs(rows.model), *_WITHOUT, "zero", "dp_shard", "no_overlap"}
    found = rows.distinct(*(n for n in rows.columns if n in SETTINGS and n not in apart)).of
    split = [rows.numbers(degree) > 1 for degree in ("tp", "cp", "ep", "etp")]
    return distinct_numbers([found, *split], len(rows))[1]


def relaxed(rows: Candidates) -> Candidates:
    """Candidates without ZeRO, with two microbatches, and with dp where something depends on it.

    Where no experts are spread over the ranks of dp, dp and pp count only as the distance between
    neighbours along tp and cp: a dp of as many ranks stands for both, in an order with dp before
    tp.
    """
    count = len(rows)
    dp, order = rows.column("dp"), rows.column(ORDER)
    if not rows.model.num_experts:
        dp, order = _before_tp(rows)
    with_dp = replace(rows, columns={**rows.columns, "dp": dp, ORDER: order})
    sizes = with_dp.distinct("dp", "micro_batch_size")
    some = with_dp.take(sizes.first)
    batch = Column.of((2 * some.numbers("dp") * some.numbers("micro_batch_size")).tolist())
    columns = {
        **with_dp.columns,
        "zero": Column.constant(0, count),
        "dp_shard": Column.constant(None, count),
        "global_batch_size": Column(batch.codes[sizes.of], batch.values),
    }
    return replace(rows, columns=columns)


def _before_tp(rows: Candidates) -> tuple[Column, Column]:
    """dp and the order of candidates of which only the ranks of tp and cp communicate."""
    order = rows.column(ORDER)
    dp, codes = np.ones(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    orders, orders_apart = [_USUAL], [False]
    # What is reduced in each microbatch is relaxed away, wherever it lies.
    spread = ~rows.column("grad_reduce").is_one_of("microbatch")
    size = {axis: rows.numbers(axis) for axis in ("tp", "cp", "dp", "pp")}
    for code, text in enumerate(order.values):
        axes = [axis for axis in str(text).split("-") if axis != "ep"]
        first, last = sorted(axes.index(axis) for axis in _WITHIN)
        mine = spread & (order.codes == code)
        before = _product(size, axes[:first], len(rows))
        between = _product(size, axes[first + 1 : last], len(rows))
        split = size[axes[first]] > 1, size[axes[last]] > 1
        ranks = np.where(split[0], before, np.where(split[1], before * between, 1))
        apart = split[0] & split[1] & (between > 1)
        usual = "-".join(("ep", "dp", axes[first], axes[last], "pp"))
        for own, each, how, far in (
            (mine & ~apart, ranks, usual, False),
            (mine & apart, size["dp"], str(text), True),
        ):
            dp[own], codes[own] = each[own], len(orders)
            orders.append(how)
            orders_apart.append(far)
    # A node further is as far as any node.
    dp = np.where(np.array(orders_apart)[codes], dp, np.minimum(dp, _ranks_of_a_position(rows)))
    codes[dp == 1] = 0
    numbers = Column(codes.astype(code_type(len(orders))), tuple(orders))
    return _column(dp), _mapped(numbers, str)


def _ranks_of_a_position(rows: Candidates) -> Int:
    """Ranks in a position of the machine's outermost tier: [candidates].

    Groups whose neighbours are as many ranks apart, or more, have one rank in each position, and
    communicate alike. In a ring or a torus the distance between positions matters too, so that no
    number of ranks is large enough (`_FAR`).
    """
    systems = rows.distinct(HARDWARE, "topology").of
    first, of = distinct_numbers([systems, rows.world_size], len(rows))
    found: list[int] = []
    for row in first.tolist():
        *inner, outermost = rows.machine(row).tiers
        near = outermost.topology in ("ring", "torus")
        found.append(_FAR if near else math.prod(tier.size for tier in inner))
    return np.array(found, dtype=np.int64)[of]


def _product(size: Mapping[str, Int], axes: Sequence[str], count: int) -> Int:
    found = np.ones(count, dtype=np.int64)
    for axis in axes:
        found = found * size[axis]
    return found


def _column(numbers: Int) -> Column:
    values, codes = np.unique(numbers, return_inverse=True)
    return Column(codes.ravel().astype(code_type(len(values))), tuple(values.tolist()))


def _mapped(column: Column, change: Callable[[Any], Any]) -> Column:
    """A column with other values, of which equal ones are one."""
    found = Column.of(change(value) for value in column.values)
    return Column(found.codes[column.codes], found.values)
