"""Shows a trace: its sums, and its nodes with all their attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.check.files import reader
from stagewright.check.files.groups import default_groups, read_groups
from stagewright.check.files.profile import TYPES, Key, Profile, json_value, profile
from stagewright.check.report import Findings
from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.printable import printable
from stagewright.texttable import Table, print_table
from stagewright.trace.formats import et_def

if TYPE_CHECKING:
    from rich.console import Console


def inspect(path: Path | str, comm_group: Path | str | None = None) -> Profile:
    """Add up a trace; the file of groups, by default the one beside it, gives their sizes."""
    path = Path(path)
    return profile(path, group_sizes(path, comm_group))


def group_sizes(path: Path, comm_group: Path | str | None = None) -> dict[int, int]:
    """Ranks of each group in the file that goes with a trace."""
    file = Path(comm_group) if comm_group is not None else default_groups(path)
    if file is None:
        return {}
    try:
        open_regular(file).close()
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}; wanted a file of groups"
        ) from None
    groups = read_groups(file, 1 << 31, Findings())
    return {group: len(ranks) for group, ranks in groups.items()}


def nodes(path: Path | str, first: int = 0, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Nodes number `first` to `last` (from 0, both included) in the order of the file."""
    end = None if last is None else last + 1
    for node in islice(reader.nodes(Path(path)), first, end):
        type_name = TYPES[node.type] if 0 <= node.type < len(TYPES) else f"type {node.type}"
        entry: dict[str, Any] = {
            "id": node.id,
            "name": node.name,
            "type": type_name,
            "data_deps": list(node.data_deps),
            "ctrl_deps": list(node.ctrl_deps),
        }
        if node.duration_micros:
            entry["duration_micros"] = node.duration_micros
        entry["attributes"] = {
            name: {"type": kind, "value": json_value(value)}
            for name, (kind, value) in et_def.values(node).items()
        }
        yield entry


def print_profile(result: Profile, console: Console) -> None:
    """A profile as tables."""
    from rich.text import Text

    counts = (
        f": {result.nodes:,} nodes, {result.data_deps:,} data and {result.ctrl_deps:,} ctrl "
        f"dependencies, {result.bytes:,} bytes"
    )
    console.print(Text.assemble((printable(result.path), "bold"), counts))
    words = (f"{name}={readable(value)}" for name, value in result.metadata.items() if value)
    console.print(Text("metadata: " + (", ".join(words) or "none")))
    keys = sorted(result.totals)
    numbers = {
        title: [result.totals[key][nth] or None for key in keys]
        for nth, title in enumerate(NUMBERS)
    }
    print_totals(keys, numbers, console)
    types = ", ".join(f"{count:,} {name}" for name, count in result.path_types.items())
    path = f"{result.depth:,} nodes ({types})" if result.depth else "none: dependencies in a circle"
    console.print(f"critical path: {path}")


NUMBERS = ("nodes", "FLOPs", "bytes")
"""Titles of the numbers in `Totals`."""


def print_totals(
    keys: Sequence[Key], numbers: Mapping[str, Sequence[int | None]], console: Console
) -> None:
    """A table with a row for each key, and numbers in columns."""
    columns: dict[str, Sequence[Any]] = {
        "type": [key.type for key in keys],
        "phase": [readable(key.phase) for key in keys],
        "op": [readable(key.op) for key in keys],
        "ranks": [key.group or None for key in keys],
        **numbers,
    }
    print_table(Table("", columns, dict.fromkeys([*columns][3:], "count")), console)


def print_nodes(nodes: Iterator[dict[str, Any]], console: Console) -> None:
    """Nodes as a table."""

    rows: list[tuple[str, ...]] = []
    for node in nodes:
        attributes = {name: one["value"] for name, one in node["attributes"].items()}
        if "duration_micros" in node:
            attributes["duration_micros"] = node["duration_micros"]
        shown = " ".join(f"{readable(name)}={readable(v)}" for name, v in attributes.items())
        deps = (" ".join(map(str, node[name])) for name in ("data_deps", "ctrl_deps"))
        rows.append((str(node["id"]), node["type"], readable(node["name"]), *deps, shown))
    heads = ("id", "type", "name", "data_deps", "ctrl_deps", "attributes")
    columns = {head: [row[nth] for row in rows] for nth, head in enumerate(heads)}
    print_table(Table("", columns, {"id": ""}), console)


def readable(value: Any) -> str:
    """A value that a terminal may be given: the text in a file may be anything, and long."""
    return printable(value, 2000)
