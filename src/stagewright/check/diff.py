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
from stagewright.trace.unbundle import traces

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
        """The first pair with more messages than in `other`, in words; empty if there is none."""
        at = np.searchsorted(other.who, self.who)
        at = np.minimum(at, max(0, len(other.who) - 1))
        there = np.zeros(len(self.who), np.int64)
        if len(other.who):
            there = np.where(other.who[at] == self.who, other.times[at], 0)
        return [(int(k >> 32), int(k & 0xFFFFFFFF)) for k in self.who[self.times > there][:1]]


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
    found = Difference(a, b)
    for name in a.numbers:
        if a.numbers[name] != b.numbers[name]:
            found.numbers[name] = a.numbers[name], b.numbers[name]
    for key in a.totals.keys() | b.totals.keys():
        pair = a.totals.get(key, Totals()), b.totals.get(key, Totals())
        if pair[0] != pair[1]:
            found.totals[key] = pair
    for here, there, name in ((a, b, "A"), (b, a, "B")):
        only = here.groups.keys() - there.groups.keys()
        if only:
            found.notes.append(f"{len(only)} groups are only in {name}, such as {_some(only)}")
    other = [key for key in a.groups if b.groups.get(key, a.groups[key]) != a.groups[key]]
    if other:
        (count, size), (then, more) = a.groups[min(other)], b.groups[min(other)]
        found.notes.append(
            f"{len(other)} groups carry other collectives, such as {_some(other)}: {count:,} of "
            f"{size:,} bytes -> {then:,} of {more:,} bytes"
        )
    more, less = a.pairs.beyond(b.pairs), b.pairs.beyond(a.pairs)
    if more or less:
        found.notes.append(
            f"messages differ in who sends to whom: A has {_some(more)} that B has not, B has "
            f"{_some(less)} that A has not"
        )
    changed = _changed(a, b)
    if len(changed):
        found.notes.append(
            f"{len(changed)} of {a.ranks} ranks have other nodes or dependencies, the first of "
            f"them rank {changed[0]}"
        )
    return found


def _changed(a: DiffSide, b: DiffSide) -> Int:
    """The ranks, ascending, that are on both sides and differ in structure."""
    known: dict[str, int] = {}
    sides: list[tuple[Int, Int]] = []
    for side in (a, b):
        ranks = np.concatenate([some for some, _ in side.structure])
        codes = [known.setdefault(which, len(known)) for _, which in side.structure]
        code = np.repeat(codes, [len(some) for some, _ in side.structure])
        order = np.argsort(ranks)
        sides.append((ranks[order], code[order]))
    (ranks, one), (others, two) = sides
    both, here, there = np.intersect1d(ranks, others, assume_unique=True, return_indices=True)
    return both[one[here] != two[there]]


def _some(keys: Collection[tuple[int, ...]]) -> str:
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
    with traces(path, [int(of.ranks[0]) for of in program.classes]) as files:
        sizes = group_sizes(files[0])
        profiles = [
            (profile(file, sizes), len(of.ranks))
            for file, of in zip(files, program.classes, strict=True)
        ]
    used: dict[int, tuple[int, int]] = {}
    pairs: list[tuple[Int, Int, int]] = []
    for of in program.classes:
        tasks = of.tasks
        for slot in range(len(program.communicators)):
            mine = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.slot == slot)
            if mine.any():
                what = int(mine.sum()), exact_sum(tasks.comm_bytes[mine])
                used |= dict.fromkeys(np.unique(program.group_of(slot, of.ranks)).tolist(), what)
        for slot in range(len(program.peers)):
            count = int(((tasks.kind == TaskKind.SEND) & (tasks.slot == slot)).sum())
            if count:
                pairs.append((of.ranks, program.peer_of(slot, of.ranks), count))
    groups = program.groups()
    return DiffSide(
        str(path),
        program.mesh.world_size,
        _numbers(profiles),
        summed(profiles),
        {tuple(groups[group]): what for group, what in used.items()},
        Pairs.of(pairs),
        [(of.ranks, one.structure) for of, (one, _) in zip(program.classes, profiles, strict=True)],
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
    used: dict[int, tuple[int, int]] = {}
    for trace_class in classes:
        if trace_class.first.exchange is None:
            continue
        events, kind = trace_class.first.exchange.events, trace_class.first.exchange.slot_kind
        partner = np.stack(trace_class.partner)
        for slot in np.flatnonzero(kind == TaskKind.COLLECTIVE).tolist():
            mine = events.slot == slot
            what = int(mine.sum()), int(events.size[mine].sum())
            used |= dict.fromkeys(np.unique(partner[:, slot]).tolist(), what)
    return {tuple(groups[g].tolist()): what for g, what in used.items() if g in groups}


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


def print_difference(found: Difference, console: Console) -> None:
    """A difference as tables."""
    from rich.text import Text

    console.print(Text(f"A {printable(found.one.path)}\nB {printable(found.two.path)}"))
    if found.same:
        console.print("the same content")
        return
    for name, (one, two) in found.numbers.items():
        console.print(f"{name}: {one:,} -> {two:,} ({two - one:+,})")
    for note in found.notes:
        console.print(Text(printable(note)))
    if not found.totals:
        return
    keys = sorted(found.totals)
    columns: dict[str, list[Any]] = {
        "type": [key.type for key in keys],
        "phase": [readable(key.phase) for key in keys],
        "op": [readable(key.op) for key in keys],
        "ranks": [key.group or None for key in keys],
    }
    for nth, title in enumerate(("nodes", "FLOPs", "bytes")):
        for side, name in enumerate("AB"):
            columns[f"{title} {name}"] = [found.totals[key][side][nth] or None for key in keys]
    print_table(Table("", columns, dict.fromkeys([*columns][3:], "count")), console)
