"""Figures of a machine from recorded kernels: what they tell replaces the figures of a base.

Each figure is the one with which the median kernel takes as long as it was measured to take, by the
models of `time.roofline` and `time.collectives`. Kernels that a figure hardly changes do not count.
Figures that fewer than `FEWEST` kernels tell stay those of the base, as do those that no value
within their limits explains.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.graph.node import BYTES
from stagewright.numbers import plural
from stagewright.program.columns import COLLECTIVES
from stagewright.recorded.kernels import MESSAGES
from stagewright.recorded.rank import Kernel, RankTrace, RuntimeCall
from stagewright.recorded.steps import host_waits, transfer_of
from stagewright.time.collectives import (
    collective_seconds,
    message_seconds,
    seconds_by_algorithm,
)
from stagewright.time.hardware import PEAKS, Hardware, smaller_shares
from stagewright.time.measured import COLUMNS
from stagewright.time.network import Machine, Placement, placements, tier_of
from stagewright.time.roofline import gemm_seconds
from stagewright.time.simulate.launches import LAUNCH_COSTS

FEWEST = 3
"""Kernels that a figure rests on at least."""
_SENSITIVE = 1.4
"""A product counts if its time at 0.6 of the clock is this multiple of that at the full clock."""
_LARGE, _SMALL = 5.0, 0.05
"""A kernel that moves bytes counts for the bandwidth if they take this multiple of a launch, and
for the launch if they take less than this share of one."""
_BULK, _BRIEF = 0.8, 0.2
"""Share of a transfer that its bytes take, from which on it counts for the bandwidth, and up to
which for the latency."""
WIDEST = 0.35
"""Spread beyond which a median is no figure of the machine, but of some kernels."""
_CLOCKS, _SHARES, _LATENCIES = (0.05, 1.0), (0.01, 1.0), (0.0, 1000.0)
"""Least and largest value of a clock, a share of a bandwidth, and a latency (us)."""
_ATTAINABLE = (0.0, 1.0)
"""Limits that a machine can have: no latency, and the whole of its clock or bandwidth."""
_REACHED = 0.02
"""Distance of the median kernel from the model up to which a figure with limits explains it."""
_OTHER_WORK = 1.5
"""Multiple of the median interval of launches from which on an interval holds other work."""
_GRAPH_US, _CALL_US = LAUNCH_COSTS["compile"].call, LAUNCH_COSTS["eager"].call
"""Interval of launches (us) below which they are not calls of operators but of compiled code."""


class CalibratedFigure(NamedTuple):
    """A figure of the hardware file: by dots, of the base, calibrated, and what it rests on."""

    key: str
    base: float
    value: float
    kernels: int
    spread: float
    """Half the range of the middle 80% of measured over modelled times."""
    rests_on: str


@dataclass(frozen=True, eq=False)
class CalibratedHardware:
    """The figures that recorded kernels tell, and the hardware with them."""

    base: Hardware
    hardware: Hardware
    figures: Sequence[CalibratedFigure]
    kept: Sequence[str]
    """Figures that stay those of the base, and why."""
    durations: Sequence[tuple[str, str, str, int, float]]
    """Rows of a CSV: kernel, shape, data type, count, microseconds."""
    source: str

    def yaml(self, base: str, name: str) -> str:
        """A hardware file that builds upon `base`, with the source of each figure."""
        lines = [f"base: {base}", f"name: {name}"]
        sources: list[str] = []
        block = ""
        for figure in self.figures:
            outer, _, inner = figure.key.rpartition(".")
            if outer and outer != block:
                lines.append(f"{outer}:")
            block = outer
            label = figure.key.replace(".", "_")
            value = f"[{figure.value:.4g}, {label}]"
            lines.append(f"  {inner}: {value}" if outer else f"{figure.key}: {value}")
            sources.append(
                f'  {label}: "{plural(figure.kernels, "kernel", "kernels")} of {self.source}"'
            )
        return "\n".join([*lines, *(["sources:", *sources] if sources else [])]) + "\n"

    def csv(self) -> str:
        """Measured durations as `simulate --durations` takes them, with the number of each."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*COLUMNS[:3], "count", COLUMNS[3]])
        writer.writerows([*row[:4], f"{row[4]:.3f}"] for row in self.durations)
        return text.getvalue()


@dataclass(slots=True)
class _Calibrating:
    """The hardware as far as it is calibrated."""

    hardware: Hardware
    figures: list[CalibratedFigure] = field(default_factory=list[CalibratedFigure])
    kept: list[str] = field(default_factory=list[str])

    def set(
        self,
        key: str,
        value: float,
        base: float,
        ratios: Float,
        rests_on: str,
        number: int = 0,
        limits: tuple[float, ...] = (),
    ) -> bool:
        """Note a figure that explains its kernels and on which they agree; True if it is noted.

        `ratios`: measured over modelled times; `number`: of kernels, where ratios are of several.
        """
        low, high = np.quantile(ratios, [0.1, 0.9])
        spread, number = float(high - low) / 2, number or len(ratios)
        unexplained = _unexplained(value, ratios, limits)
        if unexplained:
            self.keep(key, f"{number} {rests_on} are {unexplained}")
            return False
        if spread > WIDEST:
            self.keep(key, f"{number} kernels would say {value:.3g}, +-{spread:.0%}")
            return False
        self.figures.append(CalibratedFigure(key, base, value, number, spread, rests_on))
        return True

    def keep(self, key: str, why: str) -> None:
        """Note a figure that stays that of the base."""
        self.kept.append(f"{key}: {why}")


def _unexplained(value: float, ratios: Float, limits: tuple[float, ...]) -> str:
    """How kernels differ from what a value within limits explains; "": it explains them.

    >>> _unexplained(0.01, np.array([1.25]), _SHARES), _unexplained(1.0, np.array([1.0]), _SHARES)
    ('25% slower than at 0.01', '')
    """
    beyond = float(np.median(ratios)) - 1
    attained = value not in limits or value in _ATTAINABLE
    if not limits or (attained and abs(beyond) <= _REACHED):
        return ""
    return f"{abs(beyond):.0%} {'slower' if beyond >= 0 else 'faster'} than at {value:g}"


def calibrate(traces: Sequence[RankTrace], base: Hardware) -> CalibratedHardware:
    """Calibrate the figures of `base` that the traces tell."""
    fit = _Calibrating(base)
    kernels = [kernel for trace in traces for kernel in trace.kernels]
    _set_clocks(fit, kernels)
    _set_memory(fit, kernels)
    _set_host(fit, traces)
    transfers = _transfers(traces)
    world = max([1, *(t.world_size for t in traces), *(max(of.ranks) + 1 for of in transfers)])
    for block in ("scale_up", "scale_out"):
        _set_link(fit, block, transfers, world)
    names = sorted({trace.path.rsplit("/", 1)[-1].replace('"', "") for trace in traces})
    source = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    order = ("sustained_fraction", "memory", "kernel_launch", "host", "scale_up", "scale_out")
    figures = sorted(
        fit.figures,
        key=lambda of: next(i for i, name in enumerate(order) if of.key.startswith(name)),
    )
    return CalibratedHardware(base, fit.hardware, figures, fit.kept, _durations(kernels), source)


def _solve(ratios: Callable[[float], Float], low: float, high: float) -> float:
    """The value at which the median kernel takes as long as measured, within limits.

    `ratios`: measured over modelled times, which grow with the value.
    """
    if np.median(ratios(low)) >= 1:
        return low
    if np.median(ratios(high)) <= 1:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        if np.median(ratios(middle)) < 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# ---- kernels -------------------------------------------------------------------------------------


def _set_clocks(fit: _Calibrating, kernels: Iterable[Kernel]) -> None:
    """Set the sustained clock of each precision from products that compute limits."""
    by_dtype: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for kernel in kernels:
        dtype = {"fp16": "bf16"}.get(kernel.dtype, kernel.dtype)
        if kernel.family == "gemm" and kernel.shape is not None and dtype in PEAKS:
            size = kernel.shape.sizes()
            extents = (size["batch"], size["m"], size["n"], size["k"])
            by_dtype[dtype].append((*map(float, extents), kernel.duration * 1e-9))
    for dtype in sorted(by_dtype.keys() | {"bf16"}):
        key = f"sustained_fraction.{dtype}"
        if fit.hardware.rate_of(dtype) is None:
            continue
        rows = np.array(by_dtype[dtype] or np.zeros((0, 5))).T
        predicted = product_seconds(rows[:4], dtype, fit.hardware)
        sensitive = predicted(0.6) > _SENSITIVE * predicted(1.0)
        seconds = rows[4][sensitive]
        if len(seconds) < FEWEST:
            fit.keep(key, f"{plural(len(seconds), 'product', 'products')} that compute limits")
            continue

        ratios = partial(_product_ratios, seconds, predicted, sensitive)
        clock, base = _solve(ratios, *_CLOCKS), fit.hardware.clock_of(dtype)
        what = "products that compute limits"
        if not fit.set(key, clock, base, ratios(clock), what, limits=_CLOCKS):
            continue
        clocks = {**fit.hardware.sustained_fraction, dtype: clock}
        fit.hardware = fit.hardware.model_copy(update={"sustained_fraction": clocks})


def _product_ratios(
    seconds: Float, predicted: Callable[[float], Float], selected: Bool, clock: float
) -> Float:
    """Measured over modelled times of some products."""
    return seconds / predicted(clock)[selected]


def product_seconds(extents: Float, dtype: str, hardware: Hardware) -> Callable[[float], Float]:
    """Seconds of products at a clock; `extents`: batch, m, n and k, a row each."""
    batch, m, n, k = extents
    width = float(BYTES[dtype])
    traffic = batch * (width * (m * k + k * n) + max(2.0, width) * m * n)

    def at(clock: float) -> Float:
        clocks = {**hardware.sustained_fraction, dtype: clock}
        slowed = hardware.model_copy(update={"sustained_fraction": clocks}).sustained()
        return gemm_seconds(batch, m, n, k, traffic=traffic, dtype=dtype, hardware=slowed)

    return at


def _set_memory(fit: _Calibrating, kernels: Iterable[Kernel]) -> None:
    """Set the share of the bandwidth, and the time of the shortest kernel."""
    rows = [
        (kernel.bytes, kernel.duration * 1e-9)
        for kernel in kernels
        if kernel.family in ("norm", "elementwise") and kernel.bytes > 0 and kernel.duration > 0
    ]
    size, seconds = np.array(rows or np.zeros((0, 2))).T
    peak = size / (fit.hardware.memory_bandwidth_gb_s * 1e9)
    launch = fit.hardware.kernel_launch_us * 1e-6
    brief = seconds[peak < _SMALL * launch]
    if len(brief) < FEWEST:
        fit.keep("kernel_launch_us", f"{plural(len(brief), 'kernel', 'kernels')} of few bytes")
    else:
        launch = float(np.median(brief))
        base = fit.hardware.kernel_launch_us
        if fit.set("kernel_launch_us", launch * 1e6, base, brief / launch, "kernels of few bytes"):
            fit.hardware = fit.hardware.model_copy(update={"kernel_launch_us": launch * 1e6})
    large = (peak > _LARGE * launch) & (seconds > launch)
    if large.sum() < FEWEST:
        fit.keep(
            "memory_bandwidth_fraction",
            f"{plural(int(large.sum()), 'kernel', 'kernels')} that move many bytes",
        )
        return
    shares = peak[large] / (seconds[large] - launch)
    share, base = float(np.median(shares)), fit.hardware.memory_bandwidth_fraction
    if share > 1:
        fit.keep(
            "memory_bandwidth_fraction",
            f"{plural(len(shares), 'kernel', 'kernels')} read faster than memory is, from a cache",
        )
        return
    what = "kernels that move bytes"
    if fit.set("memory_bandwidth_fraction", share, base, share / shares, what):
        fit.hardware = fit.hardware.model_copy(update={"memory_bandwidth_fraction": share})


def _set_host(fit: _Calibrating, traces: Sequence[RankTrace]) -> None:
    """Set the host's factor from the time between the launch of a product and of the op before.

    An op counts from its first launch: cuBLAS clears its workspace just before the product.
    """
    intervals: list[int] = []
    for trace in traces:
        product_calls = {id(k.call) for k in trace.kernels if k.call and k.family == "gemm"}
        launching = {id(k.call) for k in trace.kernels if k.call}
        first: dict[str, RuntimeCall] = {}  # launch of the latest op, by thread
        gap: dict[str, int] = {}  # from the op before to the latest
        for call in trace.calls:
            if host_waits(call):
                first.pop(call.thread, None)
                gap.pop(call.thread, None)
            elif id(call) in launching:
                before = first.get(call.thread)
                if before is None or call.op is None or call.op is not before.op:
                    first[call.thread] = call
                    if before is not None:
                        gap[call.thread] = call.start - before.start
                if id(call) in product_calls and call.thread in gap:
                    intervals.append(gap.pop(call.thread))
    typical = median(intervals) / 1000 if intervals else 0.0
    if len(intervals) < FEWEST or typical < _GRAPH_US:
        why = f"launches every {typical:.1f} us, of a graph or of compiled code"
        why = why if typical else "no launches of products"
        fit.keep("host_factor", why)
        return
    # Longer intervals hold other work of the host.
    intervals = [ns for ns in intervals if ns < _OTHER_WORK * typical * 1000]
    typical = median(intervals) / 1000
    factor, base = typical / _CALL_US, fit.hardware.host_factor
    shares = np.array(intervals) / 1000 / typical
    what = f"launches of products: {typical:.1f} us, beside {_CALL_US:g} of eager"
    if fit.set("host_factor", factor, base, shares, what):
        fit.hardware = fit.hardware.model_copy(update={"host_factor": factor})


# ---- links ---------------------------------------------------------------------------------------


class _Transfer(NamedTuple):
    """Equal collectives or messages of one group."""

    kind: str
    ranks: tuple[int, ...]
    size: int
    seconds: float
    number: int


def _transfers(traces: Sequence[RankTrace]) -> list[_Transfer]:
    """Distinct transfers of known groups: the median, or the least where waiting is part of it."""
    found: dict[tuple[str, tuple[int, ...], int], dict[object, Kernel]] = defaultdict(dict)
    for trace in traces:
        for kernel in trace.kernels:
            comm = kernel.comm
            if comm is None or not comm.bytes or not kernel.duration:
                continue
            ranks = comm.ranks
            if comm.kind in MESSAGES:
                if comm.kind == "send_recv" or comm.peer < 0 or comm.transfer < 0:
                    continue
                ranks = (trace.rank, comm.peer)
            elif comm.kind not in COLLECTIVES:
                continue
            if len(ranks) > 1:
                kind = "message" if comm.kind in MESSAGES else comm.kind
                of = (comm.group, comm.index) if comm.transfer >= 0 else (trace.rank, comm.index)
                found[kind, tuple(sorted(ranks)), comm.bytes][of] = kernel
    transfers: list[_Transfer] = []
    for (kind, ranks, size), kernels in sorted(found.items()):
        times = [transfer_of(kernel) for kernel in kernels.values()]
        known = all(k.comm is not None and k.comm.transfer >= 0 for k in kernels.values())
        ns = median(times) if known else min(times)
        transfers.append(_Transfer(kind, ranks, size, ns * 1e-9, len(times)))
    return transfers


def _modelled(of: _Transfer, machine: Machine) -> float:
    """Seconds of a transfer on a machine."""
    if of.kind == "message":
        tier = tier_of(machine, *(np.array([rank]) for rank in of.ranks))
        return float(message_seconds(float(of.size), int(tier[0]), machine))
    return float(collective_seconds(of.kind, float(of.size), _placement(of, machine), machine))


def _placement(of: _Transfer, machine: Machine) -> Placement:
    return placements(machine, np.array([of.ranks], np.int64))[0]


def _level(of: _Transfer, machine: Machine) -> int:
    """The outermost tier that a transfer crosses."""
    first, last = np.array([of.ranks[0]]), np.array([of.ranks[-1]])
    return int(tier_of(machine, first, last)[0])


def _reduces_in_switch(of: _Transfer, machine: Machine) -> bool:
    """True where the model reduces in switches."""
    if of.kind != "all_reduce":
        return False
    options = seconds_by_algorithm(of.kind, float(of.size), _placement(of, machine), machine)
    return min(options, key=lambda name: options[name]) == "in_network"


def _set_link(fit: _Calibrating, block: str, transfers: Sequence[_Transfer], world: int) -> None:
    """Set bandwidth and latency of the links within nodes, or between them."""
    machine = Machine.of(fit.hardware, gpus=max(world, fit.hardware.gpus_per_node))
    own = [of for of in transfers if (_level(of, machine) > 0) == (block == "scale_out")]
    if not own:
        fit.keep(block, "no transfers " + ("between nodes" if block == "scale_out" else "in nodes"))
        return
    in_switch = [_reduces_in_switch(of, machine) for of in own]
    chosen = {
        "bandwidth_fraction": [of for of, is_in in zip(own, in_switch, strict=True) if not is_in],
        "in_network_fraction": [of for of, is_in in zip(own, in_switch, strict=True) if is_in],
        "latency_us": own,
    }
    base = getattr(fit.hardware, block)
    settled: dict[str, tuple[float, Float, int, tuple[float, float]]] = {}
    for _ in range(2):  # each figure changes the others a little
        for name, rows in chosen.items():
            limits = _LATENCIES if name == "latency_us" else _SHARES
            counted = [of for of in rows if _counts(of, name, fit.hardware, world)]
            number = sum(of.number for of in counted)
            if number < FEWEST:
                continue
            seconds = np.array([of.seconds for of in counted])
            hardware = fit.hardware

            def ratios(
                value: float, name: str = name, counted: Sequence[_Transfer] = counted,
                seconds: Float = seconds, hardware: Hardware = hardware,
            ) -> Float:  # fmt: skip
                changed = _with_link(hardware, block, {name: value})
                on = Machine.of(changed, gpus=max(world, changed.gpus_per_node))
                return seconds / np.array([_modelled(of, on) for of in counted])

            if name == "latency_us":
                value = -_solve(lambda x, f=ratios: f(-x), -limits[1], -limits[0])
            else:
                value = _solve(ratios, *limits)
            settled[name] = value, ratios(value), number, limits
            explained = not _unexplained(value, settled[name][1], limits)
            value = value if explained else getattr(base, name)
            fit.hardware = _with_link(fit.hardware, block, {name: value})
    for name, rows in chosen.items():
        if name in settled:
            value, shares, number, limits = settled[name]
            key, before = f"{block}.{name}", getattr(base, name)
            if not fit.set(key, value, before, shares, "transfers", number, limits):
                fit.hardware = _with_link(fit.hardware, block, {name: before})
        elif rows or name != "in_network_fraction":
            size = "small" if name == "latency_us" else "large"
            fit.keep(f"{block}.{name}", f"fewer than {FEWEST} {size} transfers")


def _with_link(hardware: Hardware, block: str, figures: Mapping[str, float]) -> Hardware:
    """Hardware with other figures of a link; smaller messages keep their share of large ones."""
    link = getattr(hardware, block)
    large = figures.get("bandwidth_fraction")
    shares = {} if large is None else smaller_shares(link.model_dump(), large)
    changed = link.model_copy(update={**shares, **figures})
    return hardware.model_copy(update={block: changed})


def _counts(of: _Transfer, name: str, hardware: Hardware, world: int) -> bool:
    """True for a transfer that tells a figure: its bytes take most of the time, or little."""
    machine = Machine.of(hardware, gpus=max(world, hardware.gpus_per_node))
    whole = _modelled(of, machine)
    start = _modelled(of._replace(size=1), machine)
    share = 1 - start / whole if whole else 0.0
    return share <= _BRIEF if name == "latency_us" else share >= _BULK


# ---- durations -----------------------------------------------------------------------------------


def _durations(kernels: Iterable[Kernel]) -> list[tuple[str, str, str, int, float]]:
    """Median durations of kernels and collectives with known extents, longest in total first."""
    times: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for kernel in kernels:
        comm = kernel.comm
        if comm is not None:
            if comm.kind in COLLECTIVES and comm.bytes and len(comm.ranks) > 1:
                span = max(comm.ranks) - min(comm.ranks) + 1
                shape = f"bytes={comm.bytes} ranks={len(comm.ranks)} span={span}"
                times[comm.kind, shape, ""].append(transfer_of(kernel))
        elif kernel.shape is not None and kernel.dtype in BYTES:
            shape = " ".join(f"{name}={size}" for name, size in kernel.shape.extents)
            times[kernel.shape.kernel, shape, kernel.dtype].append(kernel.duration)
    rows = [(*key, len(ns), median(ns) / 1000) for key, ns in times.items() if median(ns) > 0]
    return sorted(rows, key=lambda row: (-row[3] * row[4], row[:3]))
