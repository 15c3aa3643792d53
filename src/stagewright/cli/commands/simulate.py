"""The command that simulates a step on a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import stagewright
from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.options import ALLOW_OOM, FORCE, JSON, experiment_options, output_file
from stagewright.cli.progress import shown
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.api.simulated import Simulation
    from stagewright.run.experiment import Experiment


@command(
    40,
    "stagewright simulate llama3.1-70b --tp 8 --pp 8 --dp 2 --hardware h200",
    "stagewright simulate llama3.1-8b --dp 8 --zero 3 --hardware a100-sxm-80gb --json",
)
@experiment_options()
@output_file("--perfetto", help="Write the timeline for ui.perfetto.dev.")
@FORCE
@ALLOW_OOM
@JSON
def simulate(
    model: str | None, config: str | None, perfetto: str | None, as_json: bool, **settings: Any
) -> int:
    """Simulate a step on a machine: its time, and where it goes.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, an id of
    the hub in its local cache, a launch script of another tool, or the bundle of a graph from
    `import`, which takes --hardware alone. The exit code is 3 if the step does not fit into the
    memory of a device.
    """
    from stagewright.trace.formats.archive import is_bundle
    from stagewright.views import perfetto as timeline
    from stagewright.views.step import title

    if model is not None and is_bundle(model):
        return _simulate_graph(model, config, settings, perfetto, as_json)
    experiment = runs.load_experiment(model, config, settings)
    runs.hardware_of(experiment)
    simulation = run_experiment(experiment, model, config)
    if perfetto is not None:
        timeline.write(simulation.timeline, perfetto, title(simulation))
    output.print_result(simulation.to_dict if as_json else simulation.text)
    return runs.code_of(simulation.fit)


def run_experiment(experiment: Experiment, model: str | None, config: str | None) -> Simulation:
    """A run on its hardware, with progress shown."""
    compiled = runs.compile_run(experiment.run, model, config, experiment.cluster.hardware)
    with shown("tasks") as bar:
        simulation = stagewright.simulate(
            compiled, experiment.cluster, execution=experiment.execution, progress=bar
        )
    output.show_notes(simulation.notes)
    return simulation


def _simulate_graph(
    path: str, config: str | None, settings: dict[str, Any], perfetto: str | None, as_json: bool
) -> int:
    """Simulate a step of a recorded graph of PyTorch."""
    from stagewright.api.simulated import simulate_traced
    from stagewright.time.hardware import resolve
    from stagewright.time.network import Machine
    from stagewright.trace.formats.bundle import Bundle
    from stagewright.trace.traced_bundle import read_traced
    from stagewright.views import perfetto as timeline
    from stagewright.views.step import traced_text

    traced = read_traced(Bundle(path))
    if traced is None:
        raise UserError(f"{path}: is a bundle of a run; simulate the run: --config {path}")
    given = [name for name, value in settings.items() if value is not None and name != "hardware"]
    if given or config is not None:
        named = ", ".join(["--config"] * (config is not None) + given)
        raise UserError(f"{path}: a recorded graph is as it is; drop all but --hardware: {named}")
    if settings.get("hardware") is None:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    machine = Machine.of(resolve(settings["hardware"]), gpus=traced.program.mesh.world_size)
    with shown("tasks") as bar:
        step = simulate_traced(traced.program, traced.name, machine, bar)
    if perfetto is not None:
        timeline.write(step.timeline, perfetto, f"{traced.describe()}; on {machine}")
    description = traced.describe()
    output.print_result(step.to_dict if as_json else lambda: traced_text(step, description))
    return runs.code_of(step.fit)
