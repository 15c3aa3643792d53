"""Sensitivity of a candidate's step to each spec of its hardware, by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

from stagewright.blocks.recipe import PRECISIONS
from stagewright.searching.candidates import Candidates
from stagewright.searching.machines import specs_of, with_specs
from stagewright.searching.simulated import step_of
from stagewright.time.simulate.step import simulate

_CHANGE = 0.05
_PATHS = (
    *("memory_bandwidth_gb_s", "host_bandwidth_gb_s", "kernel_launch_us"),
    *("scale_up.bandwidth_gb_s", "scale_up.latency_us", "scale_up.hop_us"),
    *("scale_out.bandwidth_gb_s", "scale_out.latency_us", "scale_out.hop_us"),
    *("host_factor", "sustained_fraction.bf16"),
)


def sensitivities(candidates: Candidates, index: int) -> dict[str, float]:
    """Percent by which the step gets longer if a spec grows by one percent, largest first.

    Central differences over 5% of each spec, with the same execution: the derivative of the
    optimum, as long as no other candidate overtakes it. Specs without effect are left out.
    """
    machine = candidates.machine(index)
    product = PRECISIONS[candidates.run(index).precision].product
    compiled = step_of(candidates, index).compiled
    execution, stragglers = candidates.execution(index), candidates.cluster(index).stragglers
    specs = specs_of(machine.hardware)
    slopes: dict[str, float] = {}
    for path in (f"peak_{product}_tflops", *_PATHS):
        value = specs.get(path, 0)
        if not value:
            continue
        logs: list[float] = []
        for factor in (1 - _CHANGE, 1 + _CHANGE):
            if path.startswith("sustained_fraction") and value * factor > 1:
                factor = 1.0  # no clock is above the benchmark's
            hardware = with_specs(machine.hardware, {path: value * factor})
            changed = candidates.machine(index, hardware=hardware)
            changed = replace(changed, direct_all_reduce=machine.direct_all_reduce)
            step = simulate(compiled, changed, execution, stragglers)
            logs += [math.log(step.seconds), math.log(factor)]
        slopes[path] = (logs[2] - logs[0]) / (logs[3] - logs[1])
    ordered = sorted(slopes.items(), key=lambda item: -abs(item[1]))
    return {path: slope for path, slope in ordered if abs(slope) >= 5e-4}
