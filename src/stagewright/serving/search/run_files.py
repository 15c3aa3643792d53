"""Files of a choice for `stagewright serve`: the layout that decodes, and all groups of instances.

`serve --config best.yaml --pools best.pools.yaml`, with the options of the load, serves as the
search did. Other commands take the first file alone: `simulate --config best.yaml` is a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from stagewright.files import write_text
from stagewright.run.sections.declare import plain
from stagewright.run.sections.serving import EngineSection
from stagewright.searching.candidates import Candidates
from stagewright.searching.run_file import (
    beside,
    hardware_file,
    is_packaged,
    printed_run_file,
    write_run_file,
)
from stagewright.serving.search.search import ServingChoice

_OF_ALL = ("model", "mode", "max_model_len", "kv_block_size")
"""Settings of a run in which groups of instances cannot differ."""


def write_run_files(rows: Candidates, choice: ServingChoice, path: str | Path) -> list[str]:
    """Write the files of a choice; returns their names."""
    pools, hardware = beside(path, "pools"), beside(path, "prefill.hardware")
    first = choice.layouts[0]
    other = first != choice.layout and not is_packaged(rows.hardware(first))
    written = write_run_file(rows, choice.layout, path)
    if other:
        write_text(hardware, hardware_file(rows, first))
        written.append(str(hardware))
    write_text(
        pools,
        f"# stagewright serve --config {path} --pools {pools}, and the options of the load\n"
        + _groups(rows, choice, str(hardware) if other else None),
    )
    return [*written, str(pools)]


def printed_run_files(rows: Candidates, choice: ServingChoice) -> str:
    """Run file of the layout that decodes; groups of instances, a file for --pools, as comments."""
    groups = _groups(rows, choice, None).splitlines()
    commented = "".join(f"# {line}\n" for line in ("--pools of stagewright serve:", *groups))
    return printed_run_file(rows, choice.layout) + commented


def _groups(rows: Candidates, choice: ServingChoice, prefill_hardware: str | None) -> str:
    """Rows of `--pools`: role, instances, hardware, and settings in which layouts differ."""
    runs = [rows.run(layout).unresolved() for layout in choice.layouts]
    names = {name for run in runs for name in run.given()}.difference(_OF_ALL)
    text = ""
    for group, layout, run in zip(choice.deployment.groups, choice.layouts, runs, strict=True):
        row: dict[str, Any] = {"serves": group.role, "instances": group.settings.instances}
        if layout != choice.layout:
            row["hardware"] = prefill_hardware or rows.hardware(layout).name
        for name in sorted(names):
            if any(getattr(other, name) != getattr(run, name) for other in runs):
                row[name] = plain(getattr(run, name))
        text += f"- {_flow(row | _engine_settings(group.settings))}"
    return text


def _engine_settings(settings: EngineSection) -> dict[str, Any]:
    """Settings of engines that are not defaults."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "instances"}
    default = EngineSection()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _flow(row: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(row), default_flow_style=True, sort_keys=False, width=10**6)
