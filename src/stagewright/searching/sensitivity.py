"""How the step of a candidate changes with each figure of its hardware, by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

from stagewright.blocks.recipe import PRECISIONS
from stagewright.searching.candidates import Candidates
from stagewright.searching.machines import figures_of, with_figure
from stagewright.searching.simulated import step_of
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

_CHANGE = 0.05
_FIGURES = (
    *("memory_bandwidth_gb_s", "host_bandwidth_gb_s", "kernel_launch_us"),
    *("scale_up.bandwidth_gb_s", "scale_up.latency_us", "scale_up.hop_us"),
    *("scale_out.bandwidth_gb_s", "scale_out.latency_us", "scale_out.hop_us"),
    *("host_factor", "sustained_fraction.bf16"),
)


def sensitivities(candidates: Candidates, row: int) -> dict[str, float]:
    """Percent by which the step gets longer where a figure of the hardware grows by a percent.

    Central differences of the simulated step over 5% of each figure, for the execution as it is: of
    the optimum this is the derivative of the optimum itself, as long as no other overtakes it. The
    largest first, without those that change nothing.
    """
    machine = candidates.machine(row)
    hardware, cluster = machine.hardware, candidates.cluster(row)
    product = PRECISIONS[candidates.run(row).precision].product
    compiled = step_of(candidates, row).compiled
    execution = candidates.execution(row)
    known = figures_of(hardware)
    found: dict[str, float] = {}
    for path in (f"peak_{product}_tflops", *_FIGURES):
        value = known.get(path, 0)
        if not value:
            continue
        logs: list[float] = []
        for factor in (1 - _CHANGE, 1 + _CHANGE):
            if path.startswith("sustained_fraction") and value * factor > 1:
                factor = 1.0  # a clock above the benchmark's is none
            other = with_figure(hardware, path, value * factor)
            changed = Machine.of(
                other, gpus=machine.gpus, topology=cluster.topology, algorithm=cluster.algorithm
            )
            changed = replace(changed, direct_all_reduce=machine.direct_all_reduce)
            step = simulate(compiled, changed, execution, cluster.stragglers)
            logs.append(math.log(step.seconds))
            logs.append(math.log(factor))
        found[path] = (logs[2] - logs[0]) / (logs[3] - logs[1])
    ordered = sorted(found.items(), key=lambda item: -abs(item[1]))
    return {path: slope for path, slope in ordered if abs(slope) >= 5e-4}
