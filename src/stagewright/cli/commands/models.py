"""The command that lists models."""

from __future__ import annotations

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.errors import UserError, did_you_mean


@command(10, "stagewright models", "stagewright models qwen MoE", "stagewright models --json")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option(
    "--json", "as_json", is_flag=True, help="The models as one JSON object, with every field."
)
def models(words: tuple[str, ...], as_json: bool) -> None:
    """List the known models, or those whose name or kind has every WORD.

    By kind, the smallest first: total and active parameters, layers, their width, and the longest
    sequence (context) in tokens.
    """
    from stagewright.views.models import details, listed, table

    names = listed(words)
    if not names:
        from stagewright.model.presets import PRESETS

        raise UserError(
            f"no model has {' and '.join(map(repr, words))} in its name or kind"
            f"{did_you_mean(words[0].lower(), PRESETS)}; run `stagewright models` for all"
        )
    if as_json:
        output.print_json(details(names))
        return
    from stagewright.texttable import print_table

    print_table(table(names), output.console())
