"""The command that lists hardware."""

from __future__ import annotations

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON


@command
@click.argument("name", required=False)
@JSON
def hardware(name: str | None, as_json: bool) -> None:
    """List the hardware known by name, or print all figures of one with their sources.

    NAME is one of the list, or the path of a YAML file.
    """
    from stagewright.time import hardware

    if name is not None:
        found = hardware.resolve(name).model_dump(mode="json", exclude_none=True)
        if as_json:
            shared.print_json(found)
        else:
            _print_figures(found)
        return
    all_ = [hardware.resolve(n) for n in hardware.names()]
    if as_json:
        shared.print_json([h.model_dump(mode="json") for h in all_])
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("name", "bf16 TFLOP/s", "GB", "GB/s", "scale-up", "GB/s", "NIC GB/s", "W"):
        table.add_column(title, justify="left" if title in ("name", "scale-up") else "right")
    for h in all_:
        up = f"{h.scale_up.topology} of {h.scale_up.gpus}"
        numbers = (h.peak_bf16_tflops, h.memory_gb, h.memory_bandwidth_gb_s)
        links = (h.scale_up.bandwidth_gb_s, h.scale_out.bandwidth_gb_s, h.tdp_w)
        table.add_row(h.name, *(f"{x:g}" for x in numbers), up, *(f"{x:g}" for x in links))
    shared.console().print(table)


def _print_figures(found: dict[str, object], prefix: str = "") -> None:
    sources = found.pop("sources", {})
    assert isinstance(sources, dict)

    def walk(values: dict[str, object], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")  # pyright: ignore
            else:
                source = sources.get(prefix + key, "")  # pyright: ignore
                click.echo(f"{prefix}{key}: {value}" + (f"  # {source}" if source else ""))

    walk(found, prefix)


ENTRY = Entry(
    20,
    hardware,
    (
        "stagewright hardware",
        "stagewright hardware h100-sxm --json",
    ),
)
