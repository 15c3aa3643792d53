"""A step on a machine: its time, breakdown, memory and utilization.

>>> import stagewright as sw
>>> from stagewright.time.hardware import resolve
>>> compiled = sw.compile(sw.Run(model="llama3-8b", tp=8, seq_length=4096))
>>> step = simulate(compiled, Machine.of(resolve("h100-sxm"), gpus=8))
>>> step.tokens_per_second == 4096 / step.seconds, 0.1 < step.mfu < 1
(True, True)

Definitions, in PaLM's convention (arXiv 2204.02311, appendix B: attention counts as if nothing were
masked):

- *MFU*, model FLOPs utilization: FLOPs that the model needs for the step's tokens, over the dense
  peak of all GPUs at the training's precision. The model needs three times the matrix products of a
  forward pass: 6 N + 12 L H Q T per token, N without a table that is only looked up.
- *HFU*, hardware FLOPs utilization: FLOPs that the kernels execute, recomputation and padding
  included, over the same peak. HFU is never below MFU.
- `mfu_causal` and `hfu_causal` leave out masked pairs. In inference `hfu` does, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from stagewright.blocks.recipe import PRECISIONS
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.disaggregated import prefill_run
from stagewright.numbers import duration
from stagewright.program.columns import Program
from stagewright.program.fit import Fit, Peak, fit_of, peak_in_program_order
from stagewright.run.requests import groups, read_bytes
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.time.dispatch import DispatchKernels
from stagewright.time.durations import task_seconds
from stagewright.time.engines import engine_seconds, served_machine
from stagewright.time.job import Goodput, Job, job_of
from stagewright.time.measured import Coverage
from stagewright.time.network import Machine
from stagewright.time.ownership import load as load_costs
from stagewright.time.power import Expense, expense, watts_per_gpu
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate import ep_overlap
from stagewright.time.simulate.breakdown import Breakdown, breakdown, critical_path, path_parts
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.launches import host_work, launch_mode, loops_over_experts
from stagewright.time.simulate.memory import MemoryTimeline, memory_timeline, peak
from stagewright.time.simulate.power_over_time import PowerOverTime, power_over_time
from stagewright.time.simulate.serving import Served, ServingGroup, limiting, served
from stagewright.time.simulate.steady import in_flight, steady_step
from stagewright.time.simulate.timeline import Timeline
from stagewright.time.simulate.timeline import timeline as timeline_of
from stagewright.time.simulate.utilization import (
    Flops,
    SequenceFlops,
    executed_flops,
    running_and_power,
    sequence_flops,
    without_rates,
)

_POINTS = 200  # of memory over time, in JSON


class StepTimeline:
    """Step with a timeline: its duration, breakdown and critical path."""

    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.timeline.seconds

    @cached_property
    def parts(self) -> list[Breakdown]:
        """Breakdown of each lane."""
        return [breakdown(self.timeline, lane) for lane in self.timeline.lanes]

    @cached_property
    def critical_path(self) -> dict[str, float]:
        """Seconds of the critical path, by phase of kernels and by axis of communication."""
        return path_parts(self.timeline, critical_path(self.timeline))


@dataclass(frozen=True, eq=False)
class TracedStep(StepTimeline):
    """Simulated step of a program without a run, on identical ranks.

    It has times, but neither tokens nor utilization.
    """

    name: str
    machine: Machine
    timeline: Timeline

    @property
    def mean(self) -> Breakdown:
        """Breakdown of any GPU: all are equal."""
        return self.parts[0]

    @property
    def fit(self) -> Fit:
        """Fit of the graph's values into the memory of a device."""
        memory_peaks = map(peak_in_program_order, self.timeline.program.classes)
        return fit_of(memory_peaks, self.machine.hardware.memory)

    def to_dict(self) -> dict[str, Any]:
        """All results as one object for JSON; times in seconds, sizes in bytes."""
        return {
            "model": self.name,
            "hardware": self.machine.hardware.name,
            "machine": str(self.machine),
            "world_size": self.machine.gpus,
            "step_seconds": self.seconds,
            "memory": self.fit.entry(),
            "mean": asdict(self.mean),
            "critical_path": self.critical_path,
        }


@dataclass(frozen=True, eq=False)
class SimulatedStep(StepTimeline):
    """A compiled run on a machine, and the timeline of one step."""

    compiled: CompiledRun
    machine: Machine
    timeline: Timeline
    cluster: ClusterSection | None = None
    """Settings of the machine, if it was chosen by name."""
    durations: Coverage | None = None
    """Coverage of the step by a file of measured durations."""
    goodput: Goodput | None = None
    """Useful share of the time of a job, if its failures are known."""

    def __repr__(self) -> str:
        return f"<{self.compiled.run.describe()} on {self.machine}: {duration(self.seconds)}>"

    @property
    def tokens(self) -> int:
        """New tokens of a step over all ranks."""
        run = self.compiled.run
        if run.mode != "train":
            return sum(g.count * (g.new_tokens or 0) for g in groups(run))
        return (run.global_batch_size or 0) * (run.seq_length or 0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, attention counted in full."""
        return self._utilization(self._model_flops.full)

    @property
    def mfu_causal(self) -> float:
        """Model FLOPs utilization, attention counted without masked pairs."""
        return self._utilization(self._model_flops.causal)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization, attention counted in full."""
        return self._utilization(self._executed_flops.full)

    @property
    def hfu_causal(self) -> float:
        """Hardware FLOPs utilization, attention counted as kernels execute it."""
        return self._utilization(self._executed_flops.causal)

    @cached_property
    def mean(self) -> Breakdown:
        """Breakdown of the mean GPU."""
        weights = [len(lane.ranks) / self.machine.gpus for lane in self.timeline.lanes]

        def mean(seconds: Sequence[float]) -> float:
            return sum(w * s for w, s in zip(weights, seconds, strict=True))

        def mean_by_key(name: str) -> dict[str, float]:
            parts: list[Mapping[str, float]] = [getattr(part, name) for part in self.parts]
            keys = dict.fromkeys(key for part in parts for key in part)
            return {key: mean([part.get(key, 0.0) for part in parts]) for key in keys}

        return Breakdown(
            mean_by_key("kernels"), mean_by_key("exposed"),
            mean([part.bubble for part in self.parts]), mean_by_key("communication"),
            mean([part.launches for part in self.parts]),
        )  # fmt: skip

    @cached_property
    def memory_over_time(self) -> list[MemoryTimeline]:
        """Memory over time of each lane."""
        count = self.timeline.lane_map.count
        return [memory_timeline(self.timeline, lane) for lane in range(count)]

    @cached_property
    def memory_peaks(self) -> list[Peak]:
        """Memory of each lane at its peak, any allowance included.

        In inference, where memory is constant, the bytes are those of the program.
        """
        at_peak = [peak(self.timeline, lane) for lane in range(self.timeline.lane_map.count)]
        return [x if x.size else peak_in_program_order(x.rank_class) for x in at_peak]

    @property
    def fit(self) -> Fit:
        """Fit into `device_memory` of the run, or else into the hardware's memory."""
        return fit_of(self.memory_peaks, self._device_memory, self.compiled.left_out)

    @property
    def _device_memory(self) -> int:
        limit = self.compiled.run.device_memory
        return self.machine.hardware.memory if limit is None else read_bytes(limit)

    @cached_property
    def served(self) -> Served | None:
        """Serving metrics; None in training and of a disaggregated step."""
        run = self.compiled.run
        if run.mode == "train" or run.prefill is not None:
            return None
        return served(run, self.seconds, self.machine.gpus)

    @cached_property
    def groups(self) -> list[ServingGroup]:
        """The two groups of a disaggregated step, prefill first, simulated separately."""
        run, model = self.compiled.run, self.compiled.model
        if run.prefill is None:
            return []
        # The memory of the machine holds for both groups.
        memory = {name: getattr(run, name) for name in ("device_memory", "memory_allowance")}
        runs = {
            "prefill": prefill_run(run).model_copy(update=memory),
            "decode": run.model_copy(update={"prefill": None}),
        }
        result: list[ServingGroup] = []
        first = 0
        for name, group_run in runs.items():
            gpus = group_run.world_size
            machine = Machine.of(
                self.machine.hardware,
                gpus=gpus,
                topology=self.cluster.topology if self.cluster else "two_tier",
                algorithm=self.machine.algorithm,
            )
            step = simulate(compile(group_run, model), machine, self.timeline.execution)
            metrics = served(step.compiled.run, step.seconds, gpus)
            result.append(ServingGroup(name, first, gpus, metrics, step.fit))
            first += gpus
        return result

    def _serving(self) -> dict[str, Any]:
        if self.served is not None:
            return {"serving": self.served.entry()}
        if not self.groups:
            return {}
        limit, balance = limiting(*(group.served for group in self.groups))
        return {
            "serving": {
                "groups": {group.name: group.entry() for group in self.groups},
                "limited_by": limit,
                "osl_where_both_limit": balance,
            }
        }

    @cached_property
    def _sequence(self) -> SequenceFlops | None:
        run = self.compiled.run
        return sequence_flops(run, self.compiled.model) if run.mode == "train" else None

    @property
    def _model_flops(self) -> Flops:
        assert self._sequence is not None, "only training has model FLOPs"
        return self._sequence.of_step(self.compiled.run.global_batch_size or 0)

    @cached_property
    def _executed_flops(self) -> Flops:
        return executed_flops(self.compiled.program, self._sequence)

    def _utilization(self, flops: float) -> float:
        peak = peak_flops(self.machine.hardware, PRECISIONS[self.compiled.run.precision].product)
        return flops / (self.seconds * peak * self.machine.gpus)

    def _execution(self) -> dict[str, Any]:
        """Settings of the execution, as the framework of the run completes them."""
        execution = self.timeline.execution
        return asdict(execution) | {
            "launch_mode": launch_mode(self.compiled.run, execution, self.machine.hardware),
            "no_overlap": sorted(execution.no_overlap),
            "cuda_graph_modules": sorted(execution.cuda_graph_modules),
        }

    def expense(self, price: float | None = None) -> Expense:
        """Energy and cost of the step; `price` in USD per GPU and hour.

        None: the price or the file of costs of the machine, or else the hardware's price.
        """
        running, drawn = self._running_and_power
        return expense(
            self.machine.hardware, gpus=self.machine.gpus, seconds=self.seconds,
            tokens=self.tokens, running=running, drawn=drawn,
            price=self.price if price is None else price,
        )  # fmt: skip

    @cached_property
    def price(self) -> float | None:
        """USD per GPU and hour: of the machine, of its file of costs, or else of the hardware."""
        hardware = self.machine.hardware
        if self.cluster is not None and self.cluster.price is not None:
            return self.cluster.price
        if self.cluster is not None and self.cluster.costs is not None:
            watts = float(watts_per_gpu(hardware, *self._running_and_power))
            return load_costs(self.cluster.costs).usd_per_gpu_hour(watts)
        return hardware.price_usd_per_gpu_hour

    @cached_property
    def _running_and_power(self) -> tuple[float, float]:
        return running_and_power(self.timeline, self.mean, self.machine)

    @cached_property
    def power_over_time(self) -> PowerOverTime:
        """Watts of the mean GPU, of a node and of all GPUs over the step."""
        return power_over_time(self.timeline, self.machine)

    @cached_property
    def job(self) -> Job | None:
        """Whole job that repeats this step, if the cluster names its tokens."""
        if self.cluster is None:
            return None
        return job_of(
            self.cluster, self.machine.hardware, self.goodput.useful_share if self.goodput else 1.0,
            tokens_per_second=self.tokens_per_second, gpus=self.machine.gpus,
            watts_per_gpu=self.expense().watts_per_gpu, price=self.price,
        )  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """Assumptions about what the machine does not support, and coverage by measurements."""
        hardware = self.machine.hardware
        measured = [] if self.durations is None else [str(self.durations)]
        return measured + [
            f"{hardware.name} has no matrix products in {dtype}: weights are read in few bits, and "
            "products take the time of bf16, as those of vLLM's Marlin kernels"
            for dtype in without_rates(self.compiled, hardware)
        ]

    def to_dict(self) -> dict[str, Any]:
        """All results as one object for JSON; times in seconds, sizes in bytes.

        `lanes` are ranks with equal timing; `timeline` samples their memory over time: pairs of a
        time and the bytes from then on, at the peak of each short span.
        """
        run, training = self.compiled.run, self.compiled.run.mode == "train"
        return {
            "model": self.compiled.model.name,
            "run": run.describe(),
            "hardware": self.machine.hardware.name,
            "machine": str(self.machine),
            "world_size": self.machine.gpus,
            "microbatches": run.microbatches,
            "step_seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.machine.gpus,
            **({"mfu": self.mfu, "mfu_causal": self.mfu_causal} if training else {}),
            "hfu": self.hfu,
            "hfu_causal": self.hfu_causal,
            **self._serving(),
            "memory": self.fit.entry(),
            "power": self.expense()._asdict() | {"over_time": self.power_over_time.to_dict()},
            **({"goodput": self.goodput.to_dict()} if self.goodput else {}),
            **({"job": asdict(self.job)} if self.job else {}),
            "execution": self._execution(),
            "mean": asdict(self.mean),
            "critical_path": self.critical_path,
            "lanes": [
                {
                    "pipeline_rank": lane.rank_class.pipeline_rank,
                    "ranks": lane.ranks.tolist(),
                    **asdict(part),
                    "memory": {
                        "capacity": self._device_memory,
                        "at_peak": {
                            "seconds": at_peak.seconds or 0.0,
                            "peak": at_peak.size,
                            **at_peak.by_category,
                        },
                        "timeline": memory.sampled(_POINTS).pairs(),
                    },
                }
                for lane, part, memory, at_peak in zip(
                    self.timeline.lanes,
                    self.parts,
                    self.memory_over_time,
                    self.memory_peaks,
                    strict=True,
                )
            ],
        }


def simulate(
    compiled: CompiledRun,
    machine: Machine,
    execution: Execution | None = None,
    slowdowns: Mapping[int, float] | None = None,
    progress: Progress | None = None,
) -> SimulatedStep:
    """Simulate one step. `slowdowns` by rank multiply the durations of its kernels: stragglers."""
    execution = execution or Execution()
    timeline = timeline_of_step(compiled, machine, execution, slowdowns, progress)
    return SimulatedStep(compiled, machine, timeline)


def timeline_of_step(
    compiled: CompiledRun,
    machine: Machine,
    execution: Execution,
    slowdowns: Mapping[int, float] | None = None,
    progress: Progress | None = None,
) -> Timeline:
    """Timeline of one step; raises UserError where the execution's settings exclude the run.

    A step of decode on a pipeline is one of many (`steady`), unless `execution` drains the
    pipeline.
    """
    run, model = compiled.run, compiled.model
    overlaps_dispatch, engine = execution.overlap_moe_expert_parallel_comm, execution.serving_engine
    serves = run.mode != "train"
    if overlaps_dispatch:
        ep_overlap.check(run)
    if serves:
        machine = served_machine(run, model, machine, engine)
    if not (model.num_experts and loops_over_experts(run, execution, machine.hardware)):
        machine = replace(machine, hardware=machine.hardware.with_grouped_experts())
    if run.mode == "train" and run.fp8_recipe == "rowwise":
        machine = replace(machine, hardware=machine.hardware.with_rowwise_scales())
    missing = without_rates(compiled, machine.hardware)
    if missing:
        machine = replace(machine, hardware=machine.hardware.with_rates_of_bf16(missing))
    if execution.moe_flex_dispatcher:
        dispatch = DispatchKernels.of(run, model, overlapped=overlaps_dispatch)
    else:
        dispatch = DispatchKernels.in_engine(run, model, engine) if serves else None

    def simulate_program(program: Program) -> Timeline:
        overlap = execution.tp_comm_overlap
        seconds = task_seconds(program, machine, tp_comm_overlap=overlap, dispatch=dispatch)
        if serves:
            seconds = [
                engine_seconds(c.work.actions.tasks, isolated, run, model, engine, machine.hardware)
                for c, isolated in zip(program.classes, seconds, strict=True)
            ]
        hosts = host_work(program, run, model, execution, machine.hardware)
        return timeline_of(program, seconds, execution, slowdowns, progress, hosts)

    if not in_flight(run) or execution.pipeline_drain:
        return simulate_program(compiled.program)
    batches = run.dp * run.microbatches
    tokens = math.ceil(sum(g.count * (g.new_tokens or 0) for g in groups(run)) / batches)
    return steady_step(compiled.program, tokens, simulate_program)
