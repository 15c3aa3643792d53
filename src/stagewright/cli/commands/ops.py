"""The command that lists the ops of `.stg` files."""

from __future__ import annotations

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON


@command
@JSON
def ops(as_json: bool) -> None:
    """List the ops that a module in a .stg file may use, with their attributes."""
    from stagewright.blocks.text.statements import COLLECTIVES, OPS_OF_TEXTS

    # A text can write numbers and words, no tuples.
    attributes = {
        name: {key: of for key, of in op.attrs.items() if of.types != (tuple,)}
        for name, op in OPS_OF_TEXTS.items()
    }
    if as_json:
        found = {
            name: {
                "computes": op.sentence,
                "attributes": {k: of.to_json() for k, of in own.items()},
            }
            for (name, op), own in zip(OPS_OF_TEXTS.items(), attributes.values(), strict=True)
        }
        shared.print_json({"ops": found, "collectives": list(COLLECTIVES)})
        return
    from stagewright.texttable import Table, print_table

    columns = {
        "op": [*OPS_OF_TEXTS],
        "attributes": [
            ", ".join(key if of.asked else f"[{key}]" for key, of in own.items())
            for own in attributes.values()
        ],
        "computes": [op.sentence for op in OPS_OF_TEXTS.values()],
    }
    print_table(Table("", columns), shared.console())
    click.echo("An attribute in [] may be left out; dtype=bf16 may be said of every op. Words:")
    for name, own in attributes.items():
        for key, of in own.items():
            if of.choices:
                click.echo(f"  {name}[{key}=...]: {of}")
    click.echo(f"Collectives, which layouts have to agree with: {', '.join(COLLECTIVES)}")


ENTRY = Entry(
    25,
    ops,
    (
        "stagewright ops",
        "stagewright ops --json",
    ),
)
