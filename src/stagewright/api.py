"""The public functions, one for each command, and the objects with views that they return.

>>> import stagewright as sw
>>> compiled = sw.compile("llama3-8b", tp=8, seq_length=4096)
>>> found = sw.simulate(compiled, "h100-sxm")
>>> found.seconds == sw.simulate("llama3-8b", "h100-sxm", tp=8, seq_length=4096).seconds
True

A run is given as the name of a model with settings (the fields of `Run`), as a `Run`, or as the
result of `compile`. Errors are `UserError`s that say what to change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.lower.compile import compile as compile_run
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import with_settings
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.time.astra_sim import beside
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.measured import load, measured
from stagewright.time.network import Machine
from stagewright.time.simulate.step import SimulatedStep
from stagewright.time.simulate.step import simulate as simulate_step
from stagewright.time.simulate.timeline import Progress
from stagewright.trace.recorded import manifest
from stagewright.trace.write import write
from stagewright.views import tables
from stagewright.views.pages import notebook
from stagewright.views.pages.report import page
from stagewright.views.summary import summary

Asked = str | os.PathLike[str] | Run


class Compiled(CompiledRun):
    """A compiled run, with its views: tables, text, and HTML in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return notebook.of_compiled(self)

    def summary(self) -> dict[str, Any]:
        """What the ranks compute, exchange and hold: the object that `show --json` prints."""
        return summary(self)

    def compute(self) -> Table:
        """Layers, tasks and FLOPs by phase of a rank of each stage."""
        return tables.compute(self.summary())

    def memory(self) -> Table:
        """Bytes by category at the peak of memory, of a rank of each stage."""
        return tables.memory(self.summary())

    def communication(self) -> Table:
        """Collectives and messages of a rank of each stage, by phase, kind and axis."""
        return tables.communication(self.summary(), merged=False)

    def tasks(self, rank: int = 0) -> Table:
        """All tasks of one rank, a row each, in the order of issue."""
        return tables.tasks(self.program, rank)


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


def compile(
    model: Asked,
    config: ModelConfig | None = None,
    *,
    table: Mapping[str, str] | None = None,
    **settings: Any,
) -> Compiled:
    """All that a run implies: graphs, schedule and the program of every rank.

    `model` is a preset, the path of a Hugging Face config.json, or a `Run`; `settings` replace
    those of a run. `config` replaces the configuration that the model's name stands for. `table`
    gives layouts of named values, such as `{"wq": "[M, A/tp, D]"}`, in place of the strategy's.
    """
    compiled = compile_run(_run(model, settings), config, table=table)
    return Compiled(**{f.name: getattr(compiled, f.name) for f in fields(compiled)})


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
        compiled = compile(fill_nodes(_run(what, settings), hardware, cluster.nodes))
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


def generate(
    compiled: CompiledRun,
    out: str,
    *,
    format: str = "chakra",
    durations: str | None = None,
    astra_sim: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write the trace of every rank into a directory; returns what its manifest.json holds.

    Options are `ranks` (default: all) and those of `stagewright.trace.write.How`. `durations` is a
    CSV of measured kernels (`stagewright.time.measured`). `astra_sim` is the hardware on which
    ASTRA-sim shall run the traces: its configuration and a script are written beside them. The
    manifest has all that repeats the run, and what was checked of the program before it was
    written.
    """
    program = compiled.program
    record = {**manifest(compiled), "checks": check_program(program)}
    if durations is not None:
        program, matched = measured(program, load(durations))
        record["durations"] = {"file": durations, **matched.entry()}
    if astra_sim is not None:
        options["beside"] = beside(compiled.run, astra_sim)
        record["astra_sim"] = {"hardware": astra_sim}
    return write(program, out, format=format, manifest=record, **options)


def report(
    what: Asked | CompiledRun | SimulatedStep,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> str:
    """The page of `stagewright report` as HTML, written to `out` if that is given.

    With a `hardware` among the settings, or of a simulation, it tells of time, too.
    """
    found = None
    if isinstance(what, SimulatedStep):
        found, what = what, what.compiled
    elif "hardware" in settings:
        found = simulate(what, settings.pop("hardware"), **settings)
        what = found.compiled
    compiled = what if isinstance(what, CompiledRun) else compile(what, **settings)
    text = page(compiled, found)
    if out is not None:
        write_text(os.fspath(out), text)
    return text


def _run(model: Asked, settings: Mapping[str, Any]) -> Run:
    if isinstance(model, Run):
        if not settings:
            return model
        return Run.load(None, {**model.model_dump(exclude_unset=True), **settings})
    return Run.load(None, {"model": os.fspath(model), **settings})


def _known(hardware: str | os.PathLike[str] | Hardware | ClusterSection) -> Hardware:
    if isinstance(hardware, ClusterSection):
        if hardware.hardware is None:
            raise UserError("no hardware given; name one (see `stagewright hardware`) or a .yaml")
        hardware = hardware.hardware
    return hardware if isinstance(hardware, Hardware) else hardware_of(hardware)
