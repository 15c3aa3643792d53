"""A simulated step with its views: what `stagewright.simulate` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stagewright.api.compiled import Asked, compile, run_of
from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.experiment import with_settings
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine
from stagewright.time.simulate.step import SimulatedStep
from stagewright.time.simulate.step import simulate as simulate_step
from stagewright.time.simulate.timeline import Progress
from stagewright.views import tables
from stagewright.views.pages import notebook


class Simulation(SimulatedStep):
    """A simulated step, with its views: tables, and HTML in notebooks."""

    def _repr_html_(self) -> str:
        return notebook.of_simulation(self)

    def where(self) -> Table:
        """Where the time goes, as shares of the step: of the mean GPU and of each kind of ranks."""
        return tables.parts(self)

    def transfers(self) -> Table:
        """How long the mean GPU communicates along each axis, and how much of it is hidden."""
        return tables.transfers(self)

    def tasks(self, lane: int = 0) -> Table:
        """When the tasks of a lane (an index into `line.lanes`) run, in seconds."""
        return tables.tasks_in_time(self, lane)


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
    `dp`, dp fills the nodes.
    """
    cluster, how, settings = _sections(hardware, execution, settings)
    if isinstance(what, CompiledRun):
        if settings or cluster.nodes is not None:
            name = next(iter(settings), "nodes")
            raise UserError(f"{name} cannot change what is compiled; give it to compile")
        compiled = what
    else:
        compiled = compile(fill_nodes(run_of(what, settings), hardware, cluster.nodes))
    machine = hardware
    if not isinstance(machine, Machine):
        machine = Machine.of(
            _known(machine),
            gpus=compiled.program.mesh.world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )
    step = simulate_step(compiled, machine, how, cluster.stragglers, progress)
    asked = None if cluster.hardware is None else cluster
    return Simulation(step.compiled, step.machine, step.line, asked)


def _sections(
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection,
    execution: Execution | None,
    settings: Mapping[str, Any],
) -> tuple[ClusterSection, Execution, dict[str, Any]]:
    """The machine, the execution and what is left of settings that are given by name."""
    cluster = hardware if isinstance(hardware, ClusterSection) else ClusterSection()
    others = {name: settings[name] for name in settings if name in EXPERIMENT.keys() - SETTINGS}
    if isinstance(hardware, str | os.PathLike):
        others["hardware"] = os.fspath(hardware)
    return (
        with_settings(cluster, others),
        with_settings(execution or Execution(), others),
        {name: value for name, value in settings.items() if name not in others},
    )


def fill_nodes(
    run: Run,
    hardware: str | os.PathLike[str] | Hardware | Machine | ClusterSection,
    nodes: int | None,
) -> Run:
    """The run on so many nodes of some hardware: dp as large as they hold, unless it is given."""
    of = hardware.hardware if isinstance(hardware, Machine) else _known(hardware)
    if nodes is None:
        return run
    gpus = nodes * of.gpus_per_node
    others = run.world_size // run.dp
    if "dp" not in run.model_fields_set and gpus % others == 0:
        run = run.model_copy(update={"dp": gpus // others})
    if run.world_size != gpus:
        raise UserError(
            f"--nodes {nodes} means {gpus} GPUs, but tp={run.tp} x cp={run.cp} x dp={run.dp} x "
            f"pp={run.pp} makes {run.world_size} ranks; make them equal, or leave out --nodes"
        )
    return run


def _known(hardware: str | os.PathLike[str] | Hardware | ClusterSection) -> Hardware:
    if isinstance(hardware, ClusterSection):
        if hardware.hardware is None:
            raise UserError("no hardware given; name one (see `stagewright hardware`) or a .yaml")
        hardware = hardware.hardware
    return hardware if isinstance(hardware, Hardware) else hardware_of(hardware)
