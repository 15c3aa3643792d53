"""The command that writes a page about a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import stagewright
from stagewright.cli.simulate import MACHINE, on_machine, simulated, taken
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.lower.training import Compiled
    from stagewright.run.settings import Run


def _needs_hardware(context: click.Context) -> None:
    """Refuse options that say how a step runs on hardware that is not named."""
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name)
        if option.name in MACHINE and given is ParameterSource.COMMANDLINE:
            flag = option.opts[0]
            raise UserError(f"{flag} is for --hardware; add that, or leave {flag} out")


def command(
    settings: Callable[[Callable[..., None]], Callable[..., None]],
    load: Callable[[str | None, str | None, dict[str, Any]], Run],
    compile: Callable[[Run, str | None, str | None], Compiled],
) -> click.Command:
    """`stagewright report`, given what all commands on a run share."""

    @settings
    @on_machine(required=False)
    @click.option("-o", "--out", required=True, metavar="FILE", help="The page, such as run.html.")
    def report(
        model: str | None, config: str | None, hardware: str | None, out: str, **given: Any
    ) -> None:
        """Write a page about a run: memory, communication, pipeline, graph; with --hardware, time.

        One file of HTML that needs no network. MODEL is a preset (see `stagewright models`), the
        path of a Hugging Face config.json, or a bundle.
        """
        from stagewright.numbers import quantity
        from stagewright.trace.formats.bundle import is_bundle

        if model is not None and config is None and is_bundle(model):
            model, config = None, model
        if hardware is None:
            _needs_hardware(click.get_current_context())
        how = taken(given)
        run = load(model, config, given)

        def compiled(run: Run) -> Compiled:
            return compile(run, model, config)

        if hardware is None:
            text = stagewright.report(compiled(run), out)
        else:
            text = stagewright.report(simulated(run, compiled, hardware, how), out)
        click.echo(f"{out}: {quantity(len(text.encode()), 'B')}")

    return click.command()(report)
