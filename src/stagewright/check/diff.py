"""Compares two traces, directories of traces, or bundles: by content, not by bytes.

Ids, names and tags do not count, nor does the order of messages in the files. Compared are ranks,
nodes, dependencies, the longest path, FLOPs and bytes by type, phase, op and group size, who sends
to whom, and, node by node, the structure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stagewright.arrays import Int, exact_sum
from stagewright.check.files.findings import Findings
from stagewright.check.files.groups import default_groups, read_groups
from stagewright.check.files.profile import Key, Profile, Totals, profile, summed
from stagewright.check.files.templates import TraceClass
from stagewright.check.inspect import group_sizes, readable
from stagewright.check.verify import find, read
from stagewright.errors import UserError
from stagewright.printable import printable
from stagewright.program.columns import TaskKind
from stagewright.texttable import Table, print_table
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.write import traces

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class DiffSide:
    """One of the two sides, with all of its ranks."""

    path: str
    ranks: int
    numbers: dict[str, int]
    totals: dict[Key, Totals]
    groups: dict[tuple[int, ...], tuple[int, int]]  # ranks of a group -> collectives, bytes
    pairs: Pairs
    structure: list[tuple[Int, str]]  # ranks of one structure, and which


class Pairs(NamedTuple):
    """Messages from rank to rank: who to whom as `source << 32 | target`, ascending, how many."""

    who: Int
    times: Int

    @staticmethod
    def of(pieces: Iterable[tuple[Int, Int, int]]) -> Pairs:
        """Join sources, targets and messages between each two of them."""
        empty = np.zeros(0, np.int64)
        keys, counts = [empty], [empty]
        for source, target, count in pieces:
            keys.append(source << 32 | (target & 0xFFFFFFFF))
            counts.append(np.full(len(source), count))
        who, which = np.unique(np.concatenate(keys), return_inverse=True)
        times = np.zeros(len(who), np.int64)
        np.add.at(times, which, np.concatenate(counts))
        return Pairs(who, times)

    def beyond(self, other: Pairs) -> list[tuple[int, int]]:
        """The first pair of ranks with more messages than in `other`; empty if there is none."""
        at = np.searchsorted(other.who, self.who)
        at = np.minimum(at, max(0, len(other.who) - 1))
        other_times = np.zeros(len(self.who), np.int64)
        if len(other.who):
            other_times = np.where(other.who[at] == self.who, other.times[at], 0)
        return [(int(k >> 32), int(k & 0xFFFFFFFF)) for k in self.who[self.times > other_times][:1]]


@dataclass(slots=True)
class Difference:
    """Differences between two sides; empty if there is none."""

    one: DiffSide
    two: DiffSide
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    totals: dict[Key, tuple[Totals, Totals]] = field(
        default_factory=dict[Key, tuple[Totals, Totals]]
    )
    notes: list[str] = field(default_factory=list[str])

    @property
    def same(self) -> bool:
        """True if there is no difference."""
        return not (self.numbers or self.totals or self.notes)

    def to_json(self) -> dict[str, Any]:
        """The difference as one JSON object; pairs are of the first and the second side."""
        return {
            "same": self.same,
            "a": self.one.path,
            "b": self.two.path,
            "numbers": {name: list(pair) for name, pair in self.numbers.items()},
            "totals": [
                {**key._asdict(), "a": one._asdict(), "b": two._asdict()}
                for key, (one, two) in sorted(self.totals.items())
            ],
            "notes": self.notes,
        }


def diff(one: Path | str, two: Path | str) -> Difference:
    """Compare two traces or directories. Raises UserError where one cannot be read."""
    a, b = _side(Path(one)), _side(Path(two))
    difference = Difference(a, b)
    for name in a.numbers:
        if a.numbers[name] != b.numbers[name]:
            difference.numbers[name] = a.numbers[name], b.numbers[name]
    for key in a.totals.keys() | b.totals.keys():
        pair = a.totals.get(key, Totals()), b.totals.get(key, Totals())
        if pair[0] != pair[1]:
            difference.totals[key] = pair
    for here, there, name in ((a, b, "A"), (b, a, "B")):
        only = here.groups.keys() - there.groups.keys()
        if only:
            difference.notes.append(
                f"{len(only)} groups are only in {name}, such as {_example(only)}"
            )
    changed_groups = [key for key in a.groups if b.groups.get(key, a.groups[key]) != a.groups[key]]
    if changed_groups:
        first = min(changed_groups)
        (count_a, size_a), (count_b, size_b) = a.groups[first], b.groups[first]
        difference.notes.append(
            f"{len(changed_groups)} groups carry other collectives, such as "
            f"{_example(changed_groups)}: {count_a:,} of {size_a:,} bytes -> {count_b:,} of "
            f"{size_b:,} bytes"
        )
    only_a, only_b = a.pairs.beyond(b.pairs), b.pairs.beyond(a.pairs)
    if only_a or only_b:
        difference.notes.append(
            f"messages differ in who sends to whom: A has {_example(only_a)} that B has not, B has "
            f"{_example(only_b)} that A has not"
        )
    changed = _changed(a, b)
    if len(changed):
        difference.notes.append(
            f"{len(changed)} of {a.ranks} ranks have other nodes or dependencies, the first of "
            f"them rank {changed[0]}"
        )
    return difference


def _changed(a: DiffSide, b: DiffSide) -> Int:
    """The ranks, ascending, that are on both sides and differ in structure."""
    structures: dict[str, int] = {}
    sides: list[tuple[Int, Int]] = []
    for side in (a, b):
        ranks = np.concatenate([class_ranks for class_ranks, _ in side.structure])
        codes = [
            structures.setdefault(structure, len(structures)) for _, structure in side.structure
        ]
        code = np.repeat(codes, [len(class_ranks) for class_ranks, _ in side.structure])
        order = np.argsort(ranks)
        sides.append((ranks[order], code[order]))
    (ranks_a, codes_a), (ranks_b, codes_b) = sides
    both, here, there = np.intersect1d(ranks_a, ranks_b, assume_unique=True, return_indices=True)
    return both[codes_a[here] != codes_b[there]]


def _example(keys: Collection[tuple[int, ...]]) -> str:
    if not keys:
        return "none"
    first = min(keys)
    shown = ", ".join(map(str, first[:8])) + (", ..." if len(first) > 8 else "")
    return f"[{shown}]"


def _side(path: Path) -> DiffSide:
    return _bundle(path) if is_bundle(path) else _traces(path)


def _bundle(path: Path) -> DiffSide:
    """The side of a bundle: a rank of each class is expanded and counted for all of its ranks."""
    program = Bundle(path).program()
    with traces(path, [int(rank_class.ranks[0]) for rank_class in program.classes]) as files:
        sizes = group_sizes(files[0])
        profiles = [
            (profile(file, sizes), len(rank_class.ranks))
            for file, rank_class in zip(files, program.classes, strict=True)
        ]
    groups_used: dict[int, tuple[int, int]] = {}
    pairs: list[tuple[Int, Int, int]] = []
    for rank_class in program.classes:
        tasks = rank_class.tasks
        for slot in range(len(program.communicators)):
            selected = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.slot == slot)
            if selected.any():
                traffic = int(selected.sum()), exact_sum(tasks.comm_bytes[selected])
                groups_used |= dict.fromkeys(
                    np.unique(program.group_of(slot, rank_class.ranks)).tolist(), traffic
                )
        for slot in range(len(program.peers)):
            count = int(((tasks.kind == TaskKind.SEND) & (tasks.slot == slot)).sum())
            if count:
                pairs.append((rank_class.ranks, program.peer_of(slot, rank_class.ranks), count))
    groups = program.groups()
    return DiffSide(
        str(path),
        program.mesh.world_size,
        _numbers(profiles),
        summed(profiles),
        {tuple(groups[group]): traffic for group, traffic in groups_used.items()},
        Pairs.of(pairs),
        [
            (rank_class.ranks, class_profile.structure)
            for rank_class, (class_profile, _) in zip(program.classes, profiles, strict=True)
        ],
    )


def _traces(path: Path) -> DiffSide:
    files = find(path)
    classes = read(files, None, digests=False)
    for trace_class in classes:
        for found in trace_class.findings():
            if found.code == "damaged":
                raise UserError(found.message)
    if path.is_file():
        sizes = group_sizes(path)
    else:
        sizes = group_sizes(next(iter(files.traces.values())))
        sizes[0] = len(files.traces)
    profiles = [
        (profile(trace_class.first.path, sizes), len(trace_class.ranks)) for trace_class in classes
    ]
    return DiffSide(
        str(path),
        len(files.traces),
        _numbers(profiles),
        summed(profiles),
        _groups(path, classes, next(iter(files.traces.values()))),
        _pairs(classes),
        [
            (np.array([0] if path.is_file() else trace_class.ranks), one.structure)
            for trace_class, (one, _) in zip(classes, profiles, strict=True)
        ],
    )


def _numbers(profiles: list[tuple[Profile, int]]) -> dict[str, int]:
    def total(name: str) -> int:
        return sum(getattr(one, name) * times for one, times in profiles)

    return {
        "ranks": sum(times for _, times in profiles),
        "nodes": total("nodes"),
        "data dependencies": total("data_deps"),
        "ctrl dependencies": total("ctrl_deps"),
        "nodes of the longest path of a rank": max(one.depth for one, _ in profiles),
        "flops": sum(t.flops * n for one, n in profiles for t in one.totals.values()),
    }


def _groups(
    path: Path, classes: list[TraceClass], trace: Path
) -> dict[tuple[int, ...], tuple[int, int]]:
    """Ranks of each group in use -> collectives and bytes of one member."""
    file = default_groups(trace)
    if path.is_file() or file is None:
        return {}
    groups = read_groups(file, 1 << 31, Findings())
    groups_used: dict[int, tuple[int, int]] = {}
    for trace_class in classes:
        if trace_class.first.exchange is None:
            continue
        events, kind = trace_class.first.exchange.events, trace_class.first.exchange.slot_kind
        partner = np.stack(trace_class.partner)
        for slot in np.flatnonzero(kind == TaskKind.COLLECTIVE).tolist():
            selected = events.slot == slot
            traffic = int(selected.sum()), int(events.size[selected].sum())
            groups_used |= dict.fromkeys(np.unique(partner[:, slot]).tolist(), traffic)
    return {tuple(groups[g].tolist()): t for g, t in groups_used.items() if g in groups}


def _pairs(classes: list[TraceClass]) -> Pairs:
    pieces: list[tuple[Int, Int, int]] = []
    for trace_class in classes:
        if trace_class.first.exchange is None:
            continue
        events, kind = trace_class.first.exchange.events, trace_class.first.exchange.slot_kind
        count = np.bincount(events.slot, minlength=len(kind)).tolist()
        ranks, partner = np.array(trace_class.ranks), np.stack(trace_class.partner)
        for slot in np.flatnonzero(kind == TaskKind.SEND).tolist():
            pieces.append((ranks, partner[:, slot], count[slot]))
    return Pairs.of(pieces)


def print_difference(difference: Difference, console: Console) -> None:
    """A difference as tables."""
    from rich.text import Text

    console.print(Text(f"A {printable(difference.one.path)}\nB {printable(difference.two.path)}"))
    if difference.same:
        console.print("the same content")
        return
    for name, (one, two) in difference.numbers.items():
        console.print(f"{name}: {one:,} -> {two:,} ({two - one:+,})")
    for note in difference.notes:
        console.print(Text(printable(note)))
    if not difference.totals:
        return
    keys = sorted(difference.totals)
    columns: dict[str, list[Any]] = {
        "type": [key.type for key in keys],
        "phase": [readable(key.phase) for key in keys],
        "op": [readable(key.op) for key in keys],
        "ranks": [key.group or None for key in keys],
    }
    for nth, title in enumerate(("nodes", "FLOPs", "bytes")):
        for side, name in enumerate("AB"):
            columns[f"{title} {name}"] = [difference.totals[key][side][nth] or None for key in keys]
    print_table(Table("", columns, dict.fromkeys([*columns][3:], "count")), console)
