"""Communicator groups: the file beside traces, and ids that ASTRA-sim confuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.rules import group_id
from stagewright.check.files.world import World
from stagewright.check.report import Findings
from stagewright.errors import UserError
from stagewright.files import from_json, read_bytes
from stagewright.program.columns import TaskKind
from stagewright.trace.manifest import GROUPS

MOST_JSON = 1 << 24  # bytes granted to a file of groups or a manifest, and bytes per rank on top:
JSON_PER_RANK = 1 << 10
MOST_RANKS = 1 << 18  # for which that is granted


def read_json(path: Path, ranks: int) -> Any:
    """A JSON file for `ranks` ranks; UserError if it is no JSON, or far too large for them."""
    limit = MOST_JSON + JSON_PER_RANK * min(ranks, MOST_RANKS)
    return from_json(read_bytes(path, f"JSON about {ranks} ranks", limit), path.name)


def default_groups(trace: Path) -> Path | None:
    """The file of groups beside a trace, if any: Stagewright's, or STAGE's `workload.json`."""
    if not trace.name:  # a path such as "."
        return None
    names = (GROUPS, trace.name.rsplit(".", 2)[0] + ".json")
    return next((trace.with_name(n) for n in names if trace.with_name(n).exists()), None)


def read_groups(path: Path, size: int, findings: Findings) -> dict[int, Int]:
    """The groups in a file; an entry that is no group is reported and left out."""
    groups: dict[int, Int] = {}
    try:
        content = read_json(path, size)
    except UserError as error:
        findings.error("group-file", str(error))
        return groups
    if not isinstance(content, dict):
        text = f'{path.name}: wanted {{"1": [0, 1], ...}}, ids and their ranks'
        findings.error("group-file", text)
        return groups
    for name, members in cast("dict[str, Any]", content).items():
        number, ranks = group_id(name), _ranks(members)
        text = f"{path.name}: group {name[:40]!a}"
        if not number:
            findings.error("group-file", f"{text}: no positive number, at which ASTRA-sim aborts")
            continue
        if number in groups:
            text += f" and another are both {number}, of which ASTRA-sim takes one"
            findings.error("group-file", text)
            continue
        outside = [rank for rank in ranks or () if not 0 <= rank < size]
        if ranks is None:
            findings.error("group-file", f"{text} is no list of ranks")
        elif outside:
            findings.error("group-file", f"{text} has rank {outside[0]}, of {size} ranks")
        elif len(set(ranks)) < len(ranks):
            findings.error("group-file", f"{text} has a rank twice, at which ASTRA-sim hangs")
        groups[number] = np.array(sorted(set(ranks or ()) - set(outside)), np.int64)
    return groups


def _ranks(members: Any) -> list[int] | None:
    if not isinstance(members, list):
        return None
    ranks = cast("list[object]", members)
    return cast("list[int]", ranks) if all(type(rank) is int for rank in ranks) else None


def check_ids(world: World, groups: Mapping[int, Int]) -> None:
    """ASTRA-sim confuses groups of equal id modulo 500 if they share two ranks."""
    used = np.unique(world.pairs(TaskKind.COLLECTIVE)[1])
    unused = len(set(groups) - set(used.tolist())) if world.whole else 0
    if unused:
        world.findings.warn(
            "unused-groups",
            f"{unused} groups that no rank uses; ASTRA-sim builds each of them on every rank",
            unused,
        )
    for one, two in _confused(sorted(set(groups) & set(used.tolist())), groups):
        world.findings.warn(
            "group-ids",
            f"groups {one} and {two} have the same id modulo 500 and share ranks: ASTRA-sim may "
            "take messages of the one for the other's",
        )


def _confused(ids: Sequence[int], groups: Mapping[int, Int]) -> Iterator[tuple[int, int]]:
    for _, members_of_id in groupby(sorted(ids, key=lambda i: i % 500), key=lambda i: i % 500):
        same_id = list(members_of_id)
        if len(same_id) < 2:
            continue
        member = np.concatenate([groups[i] for i in same_id])
        group = np.repeat(np.array(same_id), [len(groups[i]) for i in same_id])
        ranks, count = np.unique(member, return_counts=True)
        shared = np.isin(member, ranks[count > 1])
        pairs: dict[tuple[int, int], int] = {}
        for rank in np.unique(member[shared]).tolist():
            of_rank = sorted(group[shared & (member == rank)].tolist())
            for nth, one in enumerate(of_rank):
                for two in of_rank[nth + 1 :]:
                    pairs[one, two] = pairs.get((one, two), 0) + 1
        yield from (pair for pair, count in pairs.items() if count > 1)
