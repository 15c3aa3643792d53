"""A simulated step with its views: what `stagewright.simulate` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagewright.api.compiled import Asked, run_of, with_views
from stagewright.errors import UserError
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.experiment import filled, with_settings
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.other_names import setting_of, translate
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.measured import Coverage, load, measured
from stagewright.time.network import Machine
from stagewright.time.ownership import costs_of
from stagewright.time.simulate.execute import Progress
from stagewright.time.simulate.step import SimulatedStep
from stagewright.time.simulate.step import simulate as simulate_step
from stagewright.views import step_tables
from stagewright.views.advice import Remark, remarks
from stagewright.views.pages.report import simulation_html


class Simulation(SimulatedStep):
    """A simulated step, with its views: tables, and HTML in notebooks."""

    def _repr_html_(self) -> str:
        return simulation_html(self)

    def remarks(self) -> list[Remark]:
        """What to know of the step, the most severe first; known errors of predictions included."""
        return remarks(self.compiled, self)

    def summary(self) -> dict[str, Any]:
        """Everything as one object for JSON, the remarks included; see `SimulatedStep.summary`."""
        return super().summary() | {"remarks": [remark._asdict() for remark in self.remarks()]}

    def where(self) -> Table:
        """Where the time goes, as shares of the step: of the mean GPU and of each kind of ranks."""
        return step_tables.parts(self)

    def transfers(self) -> Table:
        """How long the mean GPU communicates along each axis, and how much of it is hidden."""
        return step_tables.transfers(self)

    def tasks(self, lane: int = 0) -> Table:
        """When the tasks of a lane (an index into the lanes of `timeline`) run, in seconds."""
        return step_tables.tasks_in_time(self, lane)


def simulate(
    what: Asked | CompiledRun,
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection,
    *,
    execution: Execution | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Simulation:
    """One step on a machine: its time, where it goes, memory over time.

    `hardware` is a name (`stagewright hardware` lists them), a YAML file, or a `Machine`, which has
    a topology and an algorithm of its own; a `ClusterSection` says all of the machine at once.
    `settings` are those of the run, of the machine (`nodes`, `topology`, `algorithm`, `stragglers`:
    `stagewright.run.sections.cluster`) and of the execution, which go before `execution`
    (`no_overlap`, `prefetch`, ...: `stagewright.run.sections.execution`). With `nodes` and without
    `dp`, dp fills the nodes. `durations` is a CSV of measured kernels and collectives
    (`stagewright.time.measured`).
    """
    cluster, how, settings = _sections(hardware, execution, settings)
    costs_of(cluster.price, cluster.costs)
    of = hardware.hardware if isinstance(hardware, Machine) else _known(hardware)
    if isinstance(what, CompiledRun):
        if settings:
            name = next(iter(settings))
            raise UserError(f"{name} cannot change what is compiled; give it to compile")
        compiled = what
    else:
        nodes = {} if cluster.nodes is None else {"nodes": cluster.nodes}
        run = run_of(what, settings | nodes, lambda _: of.gpus_per_node)
        compiled = with_views(compile_run(run, device_memory=of.memory))
    if cluster.nodes is not None:
        filled(compiled.run, cluster.nodes, of.gpus_per_node)
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
    step = simulate_step(compiled, machine, how, cluster.stragglers, progress)
    asked = None if cluster.hardware is None else cluster
    return Simulation(step.compiled, step.machine, step.timeline, asked, coverage)


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
