"""What one asks of a run, from Python: a function for each command.

>>> import stagewright as sw
>>> compiled = sw.compile("llama3-8b", tp=8, seq_length=4096)
>>> found = sw.simulate(compiled, "h100-sxm")
>>> found.seconds == sw.simulate("llama3-8b", "h100-sxm", tp=8, seq_length=4096).seconds
True

Where a run is wanted, that is the name of a model with settings (the fields of `Run`), a `Run`, or
what `compile` gave. Errors are `UserError`s that say what to change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.lower import training as compiler
from stagewright.lower.training import Compiled
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import with_settings
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.astra_sim import beside
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.measured import load, measured
from stagewright.time.network import Machine
from stagewright.time.simulate.step import Simulation
from stagewright.time.simulate.step import simulate as run_on
from stagewright.trace.recorded import manifest
from stagewright.trace.write import write
from stagewright.views.pages.report import page

if TYPE_CHECKING:
    from stagewright.time.simulate.timeline import Progress

Asked = str | os.PathLike[str] | Run


def compile(
    model: Asked,
    config: ModelConfig | None = None,
    *,
    table: Mapping[str, str] | None = None,
    **settings: Any,
) -> Compiled:
    """All that a run implies: graphs, schedule and the program of every rank.

    `model` is a preset, the path of a Hugging Face config.json, or a `Run`; settings go before
    those of a run. `config` replaces the configuration that the model's name stands for. `table` is
    a strategy of one's own: where values live, such as `{"wq": "[M, A/tp, D]"}`.
    """
    return compiler.compile(_run(model, settings), config, table=table)


def simulate(
    what: Asked | Compiled,
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
    if isinstance(what, Compiled):
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
    simulation = run_on(compiled, machine, how, cluster.stragglers, progress)
    return simulation if cluster.hardware is None else replace(simulation, cluster=cluster)


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
    compiled: Compiled,
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
    what: Asked | Compiled | Simulation,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> str:
    """The page of `stagewright report` as HTML, written to `out` if that is given.

    With a `hardware` among the settings, or of a simulation, it tells of time, too.
    """
    found = None
    if isinstance(what, Simulation):
        found, what = what, what.compiled
    elif "hardware" in settings:
        found = simulate(what, settings.pop("hardware"), **settings)
        what = found.compiled
    compiled = what if isinstance(what, Compiled) else compile(what, **settings)
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
