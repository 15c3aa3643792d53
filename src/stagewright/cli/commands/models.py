"""The command that lists models."""

from __future__ import annotations

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command

_MODEL_COLUMNS = (
    ("layers", "num_layers"),
    ("hidden", "hidden_size"),
    ("MLP", "ffn_hidden_size"),
    ("heads", "num_attention_heads"),
    ("KV heads", "num_query_groups"),
    ("vocabulary", "vocab_size"),
    ("longest", "max_position_embeddings"),
)


@command
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, with every field.")
def models(as_json: bool) -> None:
    """List the models known by name."""
    import dataclasses

    from stagewright.model.presets import PRESETS

    if as_json:
        shared.print_json({name: dataclasses.asdict(PRESETS[name]) for name in PRESETS})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", overflow="fold")
    for title, _ in _MODEL_COLUMNS:
        table.add_column(title, justify="right")
    for name, preset in PRESETS.items():
        table.add_row(name, *(str(getattr(preset, field)) for _, field in _MODEL_COLUMNS))
    shared.console().print(table)


ENTRY = Entry(
    10,
    models,
    (
        "stagewright models",
        "stagewright models --json",
    ),
)
