"""Fit what a host takes to launch kernels and to check collectives, and the latency of EFA.

    python benchmarks/fit_host.py collectives
    python benchmarks/fit_host.py launches SOURCE[,SOURCE ...] [SHARE]

`collectives` takes the collectives of 1 GiB with which each job of nanotron's sweep began and
prints `COLLECTIVE_CHECK` of `time.simulate.launches` and `hop_us` of `h100-p5-sxm`;
no step time is in them. `launches` predicts the rows of sources that are launched eagerly with
several costs of a call, and prints the errors on the rows that may be fitted to and on those held
out (`evidence.training.held_out`), of jobs on up to four nodes whose collectives were not checked:
for nanotron 70 us, 5.9% off and 6.6% held out. SHARE, of all rows by a hash of their names,
shortens the search.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from predictions import place
from stagewright.evidence import training
from stagewright.evidence.rows import Prediction, compare
from stagewright.evidence.training import Measurement
from stagewright.time.collectives import collective_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine, placements
from stagewright.time.simulate import launches

# ---- collectives of 1 GiB ------------------------------------------------------------------------

GIB = 2**30
CALLS = 10
"""Collectives in a row, and then a barrier (`measure_bandwidth`, src/nanotron/trainer.py of
github.com/huggingface/nanotron@67c5ebb6)."""


class Probe(NamedTuple):
    """Medians over jobs, GB/s as nanotron counts them: twice the bytes of an all_reduce."""

    nodes: int
    all_reduce: float
    all_gather: float
    reduce_scatter: float

    def seconds(self) -> tuple[float, float, float]:
        """Of one collective, in the order of the fields."""
        moved = GIB * (1 - 1 / (8 * self.nodes)) / 1e9
        rates = self.all_reduce / 2, self.all_gather, self.reduce_scatter
        return moved / rates[0], moved / rates[1], moved / rates[2]


FREE = (
    Probe(1, 458.8, 263.5, 263.2), Probe(2, 428.4, 223.2, 221.3), Probe(4, 207.2, 227.4, 214.2),
    Probe(8, 187.7, 176.2, 177.0), Probe(16, 173.3, 124.4, 123.2), Probe(32, 187.8, 75.3, 74.8),
    Probe(64, 176.0, 44.4, 44.9),
)  # fmt: skip
"""314 jobs without checks: the first node of all but two sums at 450 GB/s or more."""
CHECKED = (
    Probe(1, 426.8, 242.3, 242.7), Probe(2, 328.2, 162.8, 159.0), Probe(4, 160.1, 98.5, 96.0),
    Probe(8, 94.1, 52.6, 52.5), Probe(16, 50.5, 27.0, 26.8), Probe(32, 26.6, 13.2, 13.1),
    Probe(64, 13.2, 6.5, 6.5),
)  # fmt: skip
"""932 jobs with them: their first node summed at 385 to 440 GB/s."""


def checks() -> dict[str, float]:
    """Microseconds of a check per rank of a group, within a node and over nodes.

    Over nodes the checks are longer than the collectives: hosts wait for each other, and the last
    collective alone is not hidden. Within a node the first check is seen, and that of the barrier.
    """
    pairs = [
        (8 * with_.nodes, CALLS * slow - (quick if with_.nodes > 1 else CALLS * quick))
        for without, with_ in zip(FREE, CHECKED, strict=True)
        for quick, slow in zip(without.seconds(), with_.seconds(), strict=True)
    ]
    inside = [left / 2 / ranks for ranks, left in pairs if ranks == 8]
    across = [left / (CALLS + 1) / ranks for ranks, left in pairs if ranks >= 64]
    return {"node": 1e6 * mean(inside), "network": 1e6 * mean(across)}


def hop_us() -> float:
    """The latency of EFA with which all_gather and reduce_scatter take as long as measured.

    Both were called with lists of tensors, which PyTorch copies from and to one buffer.
    """
    hardware = resolve("h100-sxm")
    memory = hardware.memory_bandwidth_gb_s * hardware.memory_bandwidth_fraction * 1e9

    def error(hop: float) -> float:
        network = hardware.scale_out.model_copy(update={"hop_us": hop})
        machine_of = hardware.model_copy(update={"scale_out": network})
        left: list[float] = []
        for probe in FREE[1:]:
            gpus = 8 * probe.nodes
            machine = Machine.of(machine_of, gpus=gpus)
            (group,) = placements(machine, np.arange(gpus).reshape(1, -1))
            ours = collective_seconds("reduce_scatter", GIB, group, machine)
            ours += 2 * GIB / memory
            left += [abs(ours / of - 1) for of in probe.seconds()[1:]]
        return mean(left)

    return min(range(5, 600, 5), key=error)


# ---- launches ------------------------------------------------------------------------------------

MOST_GPUS = 32
"""Four nodes: over more of them the latency of the network is much of a step."""
CALL_US = (0, 10, 20, 30, 40, 50, 60, 70, 80)


def predicted(rows: Sequence[Measurement], call: float) -> list[Prediction]:
    """The predictions with a cost of a call; further kernels keep theirs where it is below that."""
    known = launches.LAUNCH_COSTS
    changed = {
        mode: replace(known[mode], call=call, kernel=min(call, known[mode].kernel), graph=call)
        for mode in ("eager", "operators")
    }
    launches.LAUNCH_COSTS = {**known, **changed}
    try:
        return [o for o in compare(rows) if isinstance(o, Prediction)]
    finally:
        launches.LAUNCH_COSTS = known


def _near(m: Measurement) -> bool:
    """Whether the network between nodes decides little: few nodes, tp within one, no checks."""
    few = m.run.world_size <= MOST_GPUS and m.run.tp <= 8
    return few and not m.execution.collective_checks and not m.execution.p2p_metadata_s


def fit_launches(names: Sequence[str], share: float) -> None:
    """Print the errors by cost of a call, of the rows that fit and of those held out."""
    rows = [m for m in training.rows() if m.source in names and place(m) < share and _near(m)]
    print("us of a call: rows, mean error, bias; held out")
    for call in CALL_US:
        found = [(o.traits and o.traits.held_out, o.error_of_time) for o in predicted(rows, call)]
        words: list[str] = []
        for kind in (False, True):
            errors = [e for held, e in found if held == kind]
            if errors:
                words.append(f"{len(errors)}, {mean(map(abs, errors)):.1%}, {median(errors):+.1%}")
        print(f"{call}: {'; '.join(words)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "collectives":
        print("COLLECTIVE_CHECK", {k: round(v) for k, v in checks().items()})
        print("hop_us", hop_us())
    else:
        fit_launches(sys.argv[2].split(","), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
