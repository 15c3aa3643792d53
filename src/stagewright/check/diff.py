"""Compares two traces, directories of traces, or bundles: by content, not by bytes.

Ids, names and tags do not count, nor does the order of messages in the files. Compared are ranks,
nodes, dependencies, the longest path, FLOPs and bytes by type, phase, op and group size, who sends
to whom, and, node by node, the structure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stagewright.arrays import Int, exact_sum
from stagewright.check.files.groups import default_groups, read_groups
from stagewright.check.files.profile import Key, Profile, Totals, profile, summed
from stagewright.check.files.traces import find, parts_of, read
from stagewright.check.files.world import WorldPart
from stagewright.check.inspect import NUMBERS, group_sizes, print_totals
from stagewright.check.program import part_of
from stagewright.check.report import Findings
from stagewright.errors import UserError
from stagewright.printable import printable
from stagewright.program.columns import TaskKind
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
    if is_bundle(path):
        program = Bundle(path).program()
        ranks = [rank_class.ranks for rank_class in program.classes]
        parts = [part_of(program, rank_class) for rank_class in program.classes]
        groups = {group: np.array(members) for group, members in program.groups().items()}
        # A rank of each class is expanded, and counted for all of its ranks.
        with traces(path, [int(of[0]) for of in ranks]) as files:
            return _sum_up(path, ranks, files, parts, groups, group_sizes(files[0]))
    found = find(path)
    classes = read(found, None, digests=False)
    for finding in (finding for of in classes for finding in of.findings()):
        if finding.code == "damaged":
            raise UserError(finding.message)
    first = next(iter(found.traces.values()))
    file, sizes, groups = default_groups(first), group_sizes(first), dict[int, Int]()
    if not found.single:
        sizes[0] = len(found.traces)
        groups = read_groups(file, 1 << 31, Findings()) if file is not None else {}
    ranks = [np.array([0] if found.single else of.ranks) for of in classes]
    return _sum_up(path, ranks, [of.first.path for of in classes], parts_of(classes), groups, sizes)


def _sum_up(
    path: Path,
    ranks: Sequence[Int],
    files: Sequence[Path],
    parts: Sequence[WorldPart],
    groups: Mapping[int, Int],
    sizes: Mapping[int, int],
) -> DiffSide:
    """A side of ranks by class, of each class one file and one part; `sizes` are those of groups.

    Of each group in use: collectives and bytes of one member.
    """
    profiles = [(profile(file, sizes), len(of)) for file, of in zip(files, ranks, strict=True)]
    used: dict[int, tuple[int, int]] = {}
    messages: list[tuple[Int, Int, int]] = []
    for part in parts:
        events = part.exchange.events
        for slot, kind in enumerate(part.exchange.slot_kind.tolist()):
            selected, partner = events.slot == slot, part.partner[:, slot]
            if kind == TaskKind.COLLECTIVE:
                traffic = int(selected.sum()), exact_sum(events.size[selected])
                used |= dict.fromkeys(np.unique(partner).tolist(), traffic)
            elif kind == TaskKind.SEND:
                messages.append((part.ranks, partner, int(selected.sum())))
    return DiffSide(
        str(path),
        sum(map(len, ranks)),
        _numbers(profiles),
        summed(profiles),
        {tuple(groups[g].tolist()): traffic for g, traffic in used.items() if g in groups},
        Pairs.of(messages),
        [(of, one.structure) for of, (one, _) in zip(ranks, profiles, strict=True)],
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
    numbers = {
        f"{title} {name}": [difference.totals[key][side][nth] or None for key in keys]
        for nth, title in enumerate(NUMBERS)
        for side, name in enumerate("AB")
    }
    print_totals(keys, numbers, console)
