"""The command that lists models."""

from __future__ import annotations

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command

_COLUMNS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "MLP": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "KV": "num_query_groups",
    "vocab": "vocab_size",
    "longest": "max_position_embeddings",
}
"""Fields of a model by the heads of their columns."""


@command
@click.option(
    "--json", "as_json", is_flag=True, help="The models as one JSON object, with every field."
)
def models(as_json: bool) -> None:
    """List the models known by name."""
    import dataclasses

    from stagewright.model.presets import PRESETS

    if as_json:
        shared.print_json({name: dataclasses.asdict(PRESETS[name]) for name in PRESETS})
        return
    from stagewright.texttable import Table, print_table

    columns = {
        title: [getattr(preset, field) for preset in PRESETS.values()]
        for title, field in _COLUMNS.items()
    }
    table = Table("", {"name": list(PRESETS), **columns}, dict.fromkeys(columns, ""))
    print_table(table, shared.console())


ENTRY = Entry(
    10,
    models,
    (
        "stagewright models",
        "stagewright models --json",
    ),
)
