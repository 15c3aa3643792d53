"""Power over a step: of the mean GPU, of the node with the highest peak, of all GPUs.

A kernel draws what `time.power` says, an exposed transfer what a kernel that waits draws, and a GPU
that waits for others its idle power. Watts are means over short spans, 1 ms in a long step, as a
meter would read them; kernels of several streams at once draw the TDP at most. The mean over the
step is that of `SimulatedStep.expense`, which does not have this limit. The regulation of a GPU and
the capacitors of a power supply smooth faster changes, and are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.arrays import Float
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.power import RUNNING_FRACTION, idle_watts
from stagewright.time.simulate.breakdown import exposed_intervals
from stagewright.time.simulate.timeline import TICK, Lane, Timeline
from stagewright.time.simulate.utilization import lane_energies

SPAN = 1e-3
"""Seconds of a span; shorter in a step that has fewer than `LEAST_SPANS`."""
LEAST_SPANS = 100
WINDOW = 10e-3
"""Seconds within which a swing counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Watts:
    """Power of something over a step, by span."""

    watts: Float
    span: float
    """Seconds of a span."""

    @property
    def mean(self) -> float:
        """Mean over the step."""
        return float(self.watts.mean())

    @property
    def peak(self) -> float:
        """Highest span."""
        return float(self.watts.max())

    @property
    def swing(self) -> float:
        """Largest difference between two spans that are at most `WINDOW` apart."""
        reach = min(max(round(WINDOW / self.span), 1), len(self.watts) - 1)
        windows = np.lib.stride_tricks.sliding_window_view(self.watts, reach + 1)
        return float((windows.max(axis=1) - windows.min(axis=1)).max())

    def to_dict(self) -> dict[str, float]:
        """Entry of JSON: watts."""
        return {"mean": self.mean, "peak": self.peak, "swing_within_10ms": self.swing}


@dataclass(frozen=True, slots=True, eq=False)
class PowerOverTime:
    """Power over a step."""

    gpu: Watts
    """Mean GPU, with its share of the node."""
    node: Watts
    """Node with the highest peak."""
    job: Watts
    """All GPUs."""

    @property
    def seconds(self) -> Float:
        """Beginnings of the spans."""
        return self.job.span * np.arange(len(self.job.watts), dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Entry of JSON: watts."""
        return {name: getattr(self, name).to_dict() for name in ("gpu", "node", "job")}


def power_over_time(timeline: Timeline, machine: Machine) -> PowerOverTime:
    """Power of GPUs, nodes and the job over a step."""
    spans = max(LEAST_SPANS, round(timeline.seconds / SPAN))
    span = timeline.seconds / spans
    edges = span * np.arange(spans + 1, dtype=np.float64)
    lanes = np.stack([_lane_watts(lane, edges, machine.hardware) for lane in timeline.lanes])
    ranks = np.array([len(lane.ranks) for lane in timeline.lanes])
    job = ranks @ lanes
    per_node = min(machine.hardware.gpus_per_node, machine.gpus)
    nodes = (counts @ lanes for counts in _nodes(timeline, per_node))
    node = max(nodes, key=lambda watts: float(watts.max()))
    return PowerOverTime(*(Watts(watts, span) for watts in (job / machine.gpus, node, job)))


def _nodes(timeline: Timeline, per_node: int) -> Iterator[Float]:
    """Number of GPUs of each lane on a node, for each distinct node."""
    of_rank = timeline.lane_map.of_rank
    whole = len(of_rank) // per_node * per_node
    by_node = np.sort(of_rank[:whole].reshape(-1, per_node), axis=1)
    for lanes in np.unique(by_node, axis=0):
        yield np.bincount(lanes, minlength=len(timeline.lanes)).astype(np.float64)


def _lane_watts(lane: Lane, edges: Float, hardware: Hardware) -> Float:
    """Mean power of a GPU of a lane between edges (seconds)."""
    idle, tdp = idle_watts(hardware), hardware.tdp_w
    kernels, seconds, energies = lane_energies(lane, hardware)
    # A kernel of a communication stream runs beside others, which already count as not idle.
    watts = tdp * (energies / seconds) - np.where(lane.is_kernel[kernels], idle, 0.0)
    begin, end = exposed_intervals(lane)
    exposed = np.full(len(begin), tdp * RUNNING_FRACTION - idle)
    begin = np.concatenate([lane.begin[kernels], begin]).astype(np.float64) * TICK
    end = np.concatenate([lane.end[kernels], end]).astype(np.float64) * TICK
    joules = _energy(begin, end, np.concatenate([watts, exposed]), edges)
    return np.minimum(idle + np.diff(joules) / np.diff(edges), tdp) + hardware.node_overhead_w


def _energy(begin: Float, end: Float, watts: Float, edges: Float) -> Float:
    """Energy up to each edge of intervals that draw constant power."""
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    power = np.cumsum(np.concatenate([watts, -watts])[order])
    joules = np.concatenate([[0.0], np.cumsum(power[:-1] * np.diff(times))])
    return np.interp(edges, times, joules)
