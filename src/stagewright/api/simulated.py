"""A simulated step, and its page: `stagewright.simulate` and `stagewright.report`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

from stagewright.api.compiled import Asked, compile, run_of, with_views
from stagewright.api.experiments import with_launch_file
from stagewright.api.result import PublicResult, check_type, path_text
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.program.columns import Program
from stagewright.run.experiment import filled, with_settings
from stagewright.run.other_names import setting_of, translate
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.texttable import Table
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.job import goodput_of
from stagewright.time.measured import Coverage, load, measured
from stagewright.time.network import Machine
from stagewright.time.ownership import costs_of
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.step import SimulatedStep, TracedStep
from stagewright.time.simulate.step import simulate as simulate_step
from stagewright.time.simulate.timeline import timeline
from stagewright.views import step as views
from stagewright.views.accuracy import GroupError, error_of_step
from stagewright.views.advice import Remark, remarks
from stagewright.views.pages.charts import of_step
from stagewright.views.pages.html import Chart
from stagewright.views.pages.report import page as html_page
from stagewright.views.step import step_text
from stagewright.views.summary import held_in_memory


class Simulation(SimulatedStep, PublicResult):
    """A simulated step: how long it takes, where the time goes, and whether it fits.

    Attributes (times in seconds, sizes in bytes):

    * `seconds`: duration of the step.
    * `tokens`, `tokens_per_second`: of all GPUs.
    * `mfu`, `hfu`: model and hardware FLOPs utilization, shares of 1; `mfu_causal` and `hfu_causal`
      count attention without masked pairs.
    * `fits`: whether every rank fits into the memory of a device; `peak_memory`: bytes of the
      fullest rank; `memory_peaks`: bytes of each lane at its peak, by category.
    * `critical_path`: seconds by phase of kernels and axis of communication.
    * `goodput`: useful share of the time of a job with failures; `job`: its days, USD and MWh.
    * `power_over_time`: watts of a GPU, a node and all GPUs over the step.
    * `served`: TTFT, TPOT and rates of a step of inference.
    * `compiled`, `machine`, `timeline`: the run, the machine, and all tasks in time.

    Tables: `parts` (where the time of a GPU goes), `transfers` (communication by axis), `power`
    (watts over the step), and `tasks` of one `lane` in time.
    """

    suffixes = (".json", ".html")

    def _charts(self) -> list[Chart]:
        return of_step(self)

    @property
    def fits(self) -> bool:
        """True if every rank fits into the memory of a device."""
        return self.fit.fits

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest rank at its peak, any allowance included."""
        return self.fit.peak

    def remarks(self) -> list[Remark]:
        """Remarks on the step, the most severe first, with known errors of predictions."""
        return remarks(self.compiled, self)

    def accuracy(self) -> list[GroupError]:
        """Errors to expect of the time, from published steps like this one."""
        return [error_of_step(self)]

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {
            "parts": lambda: views.parts(self),
            "transfers": lambda: views.transfers(self),
            "power": lambda: views.power(self),
            "tasks": partial(views.tasks_in_time, self, lane=0),
        }

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright simulate`."""
        return step_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The object of `simulate --json`: seconds, bytes, shares of 1."""
        serves = self.compiled.run.mode != "train"
        memory = held_in_memory(self.compiled) if serves else {}
        known = {
            "remarks": [of._asdict() for of in self.remarks()],
            "accuracy": [of.to_dict() for of in self.accuracy()],
        }
        return super().to_dict() | known | memory

    def page(self) -> str:
        """The page that `write` writes as `.html`."""
        return html_page(self.compiled, self)


def simulate(
    what: Asked | CompiledRun,
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection,
    *,
    execution: Execution | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Simulation:
    """Simulate one step on a machine: its time, where it goes, memory.

    `what` is the name of a model, a `Run`, or the result of `compile`. `hardware` is a name
    (`stagewright hardware` lists them) or the path of a YAML file. `settings` are those of the run
    (fields of `Run`), of the machine (`nodes`, `gpus`, `topology`, `algorithm`, `stragglers`,
    `price`, ...) and of the execution (`no_overlap`, `prefetch`, ...): the options of `stagewright
    simulate` by their names, with `_` for `-`. With `nodes` or `gpus` and without `dp`, dp fills
    them. `durations` is the path of a CSV of measured kernels and collectives. `progress` is called
    with the number of finished tasks, and of all. Raises `UserError` for settings that cannot be
    combined.

    >>> import stagewright as sw
    >>> step = sw.simulate("gpt2", "h100-sxm", layers=2, seq_length=8, tp=2)
    >>> step.fits, step.tokens
    (True, 8)
    """
    check_type(execution, "execution as an Execution", Execution, NoneType)
    what, settings = with_launch_file(what, settings)
    cluster, how, settings = _sections(hardware, execution, settings)
    costs_of(cluster.price, cluster.costs)
    of = hardware.hardware if isinstance(hardware, Machine) else _known(hardware)
    if isinstance(what, CompiledRun):
        if settings:
            name = next(iter(settings))
            raise UserError(f"{name} cannot change what is compiled; give it to compile")
        compiled = what
    else:
        size = {"nodes": cluster.nodes, "gpus": cluster.gpus}
        size = {name: count for name, count in size.items() if count is not None}
        run = run_of(what, settings | size, lambda _: of.gpus_per_node)
        compiled = with_views(compile_run(run, device_memory=of.memory))
    filled(compiled.run, cluster, lambda _: of.gpus_per_node)
    coverage: Coverage | None = None
    if cluster.durations is not None:
        table = load(cluster.durations)
        program, coverage = measured(compiled.program, table, with_collectives=True)
        if not coverage.measured_kernels + coverage.measured_collectives:
            raise UserError(
                f"{cluster.durations}: no row has the kernel, shape and dtype of a task of this "
                "run; `stagewright show --kernels` prints the rows to fill in"
            )
        compiled = replace(compiled, program=program)
    machine = hardware
    if not isinstance(machine, Machine):
        machine = Machine.of(
            of,
            gpus=compiled.program.mesh.world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )
    goodput = goodput_of(compiled, cluster, machine.hardware)
    step = simulate_step(compiled, machine, how, cluster.stragglers, progress)
    return Simulation(step.compiled, step.machine, step.timeline, cluster, coverage, goodput)


def _sections(
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection,
    execution: Execution | None,
    settings: Mapping[str, Any],
) -> tuple[ClusterSection, Execution, dict[str, Any]]:
    """The machine, the execution and what is left of settings that are given by name."""
    cluster = hardware if isinstance(hardware, ClusterSection) else ClusterSection()
    ours = EXPERIMENT.keys() - SETTINGS
    given = {name: value for name, value in settings.items() if setting_of(name) in ours}
    others, _ = translate(given)
    if isinstance(hardware, str | os.PathLike):
        others["hardware"] = os.fspath(hardware)
    return (
        with_settings(cluster, others),
        with_settings(execution or Execution(), others),
        {name: value for name, value in settings.items() if name not in given},
    )


def _known(hardware: str | os.PathLike[str] | Hardware | ClusterSection) -> Hardware:
    if isinstance(hardware, ClusterSection):
        if hardware.hardware is None:
            raise UserError("no hardware given; name one (see `stagewright hardware`) or a .yaml")
        hardware = hardware.hardware
    return hardware if isinstance(hardware, Hardware) else hardware_of(hardware)


def simulate_traced(
    program: Program, name: str, machine: Machine, progress: Progress | None = None
) -> TracedStep:
    """Simulate the program of a recorded graph; the machine has a GPU for each rank."""
    seconds = task_seconds(program, machine)
    return TracedStep(name, machine, timeline(program, seconds, progress=progress))


def report(
    what: Asked | CompiledRun | SimulatedStep,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> str:
    """The page of `stagewright report` as HTML, written to `out` if that is given.

    With a `hardware` among the settings, or of a simulation, the page has times as well.

    >>> import stagewright as sw
    >>> page = sw.report("gpt2", layers=2, seq_length=8, tp=2, hardware="h100-sxm")
    >>> page.startswith("<!doctype html>")
    True
    """
    out = None if out is None else path_text(out)
    step = what if isinstance(what, SimulatedStep) else None
    if isinstance(what, SimulatedStep):
        what = what.compiled
    elif "hardware" in settings:
        step = simulate(what, settings.pop("hardware"), **settings)
        what = step.compiled
    compiled = what if isinstance(what, CompiledRun) else compile(what, **settings)
    text = html_page(compiled, step)
    if out is not None:
        write_text(out, text)
    return text
