"""The command that lists hardware."""

from __future__ import annotations

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.options import JSON


@command(20, "stagewright hardware", "stagewright hardware h100-sxm --json")
@click.argument("name", required=False)
@JSON
def hardware(name: str | None, as_json: bool) -> None:
    """List the known hardware, or print all figures of one with their sources.

    NAME is a name of the list, or the path of a YAML file.
    """
    from stagewright.launch.tables import dotted
    from stagewright.time import hardware

    if name is not None:
        figures = hardware.resolve(name).model_dump(mode="json", exclude_none=True)
        if as_json:
            output.print_json(figures)
        else:
            sources = figures.pop("sources", {})
            for path, value in dotted(figures):
                source = sources.get(path, "")
                output.say(f"{path}: {value}" + (f"  # {source}" if source else ""))
        return
    all_ = [hardware.resolve(n) for n in hardware.names()]
    if as_json:
        output.print_json([h.model_dump(mode="json") for h in all_])
        return
    from stagewright.texttable import Table, print_table

    columns = {
        "TFLOP/s": [h.peak_bf16_tflops for h in all_],
        "GB": [h.memory_gb for h in all_],
        "GB/s": [h.memory_bandwidth_gb_s for h in all_],
        "scale-up": [f"{h.scale_up.topology} {h.scale_up.gpus}" for h in all_],
        "GB/s up": [h.scale_up.bandwidth_gb_s for h in all_],
        "NIC GB/s": [h.scale_out.bandwidth_gb_s for h in all_],
        "W": [h.tdp_w for h in all_],
    }
    units = dict.fromkeys(columns.keys() - {"scale-up"}, "exact")
    print_table(Table("", {"name": [h.name for h in all_], **columns}, units), output.console())
