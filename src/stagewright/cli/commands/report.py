"""The command that writes a page about a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import stagewright
from stagewright.cli import output, runs
from stagewright.cli.command import Entry, command
from stagewright.cli.commands.simulate import run_experiment
from stagewright.cli.options import ALLOW_OOM, FORCE, experiment_options, output_file
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.run.experiment import Experiment


@command
@experiment_options()
@output_file("-o", "--out", required=True, help="The page, such as run.html.")
@FORCE
@ALLOW_OOM
def report(model: str | None, config: str | None, out: str, **settings: Any) -> int:
    """Write a page about a run: memory, communication, pipeline, graph; with --hardware, time.

    One file of HTML that needs no network. MODEL is a preset (see `stagewright models`), the path
    of a Hugging Face config.json, an id of the hub that is in its local cache, or a bundle. The
    exit code is 3 if the run does not fit into the memory of the hardware, or into --device-memory.
    """
    from stagewright.numbers import quantity
    from stagewright.trace.formats.archive import is_bundle

    if model is not None and config is None and is_bundle(model):
        model, config = None, model
    experiment = runs.load_experiment(model, config, settings)
    if experiment.cluster.hardware is None:
        _check_no_machine(experiment)
        compiled = runs.compile_run(experiment.run, model, config)
        fit, text = compiled.fit, stagewright.report(compiled, out)
    else:
        simulation = run_experiment(experiment, model, config)
        fit, text = simulation.fit, stagewright.report(simulation, out)
    output.say(f"{out}: {quantity(len(text.encode()), 'B')}")
    return runs.code_of(fit)


def _check_no_machine(experiment: Experiment) -> None:
    """Refuse options that say how a step runs on hardware that is not named."""
    from stagewright.run.sections import EXPERIMENT

    sections = {"cluster": experiment.cluster, "execution": experiment.execution}
    for setting in EXPERIMENT.values():
        home = sections.get(setting.section)
        if home is not None and getattr(home, setting.name) != setting.default:
            flag = setting.flag
            raise UserError(f"{flag} is for --hardware; add that, or leave {flag} out")


ENTRY = Entry(
    50,
    report,
    (
        "stagewright report llama3.1-70b --tp 8 --pp 4 --dp 2 -o run.html",
        "stagewright report llama3-8b --dp 8 --zero 3 --hardware h100-sxm -o step.html",
    ),
)
