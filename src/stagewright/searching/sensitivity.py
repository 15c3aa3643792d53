"""Sensitivity of a candidate's step to each spec of its hardware, by finite differences."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from stagewright.blocks.recipe import PRECISIONS
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.searching.machines import specs_of, with_specs
from stagewright.searching.simulated import step_of
from stagewright.time.simulate.step import simulate

_LARGER_IS_BETTER = (
    *("memory_bandwidth_gb_s", "host_bandwidth_gb_s"),
    *("scale_up.bandwidth_gb_s", "scale_out.bandwidth_gb_s", "sustained_fraction.bf16"),
)
_SMALLER_IS_BETTER = (
    *("kernel_launch_us", "host_factor"),
    *("scale_up.latency_us", "scale_up.hop_us", "scale_out.latency_us", "scale_out.hop_us"),
)
_MIN_CHANGE = 5e-6
"""Minimum relative change of a step that is reported."""


class Sensitivity(NamedTuple):
    """Relative changes of a step's seconds where a spec gets worse and better, by 1% and by 10%."""

    worse: float
    better: float
    worse_10: float
    better_10: float


def sensitivities(candidates: Candidates, index: int) -> dict[str, Sensitivity]:
    """Sensitivity of a candidate's step to each spec, largest first; 0 is left out.

    The execution stays the same. No clock is above the benchmark's.
    """
    machine = candidates.machine(index)
    product = PRECISIONS[candidates.run(index).precision].product
    base = step_of(candidates, index)
    execution, stragglers = candidates.execution(index), candidates.cluster(index).stragglers
    specs = specs_of(machine.hardware)

    def change(path: str, factor: float) -> float:
        value = specs[path] * factor
        if path.startswith("sustained_fraction"):
            value = min(value, 1.0)
        hardware = Column.constant(with_specs(machine.hardware, {path: value}), len(candidates))
        changed = candidates.with_column(HARDWARE, hardware).machine(index)
        changed = replace(changed, direct_all_reduce=machine.direct_all_reduce)
        step = simulate(base.compiled, changed, execution, stragglers)
        return step.seconds / base.seconds - 1

    result: dict[str, Sensitivity] = {}
    for path in (f"peak_{product}_tflops", *_LARGER_IS_BETTER, *_SMALLER_IS_BETTER):
        if specs.get(path):
            sign = -1 if path in _SMALLER_IS_BETTER else 1
            factors = (1 + sign * percent / 100 for percent in (-1, 1, -10, 10))
            result[path] = Sensitivity(*(change(path, factor) for factor in factors))
    ordered = sorted(result.items(), key=lambda item: -max(map(abs, item[1][:2])))
    return {path: all_ for path, all_ in ordered if max(map(abs, all_[:2])) >= _MIN_CHANGE}
