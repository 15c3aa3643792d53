"""Checks a program before it is written: the same rules as for traces, on columns in memory.

Work is per rank class: rows are checked once per class, and partners once per rank. A large world
is checked by a folded one, in which ranks meet in all the same ways; a small one also runs rank by
rank.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> check_program(compile(Run(model="gpt2", pp=2, layers=2, seq_length=8)).program)["communication"]
'one order per rank'
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.dependency_graph import DependencyGraph, graph_of_lists
from stagewright.check.files.hang import explain
from stagewright.check.files.matching import check_world
from stagewright.check.files.world import (
    Events,
    Exchange,
    Match,
    Nodes,
    World,
    WorldPart,
    arranged,
    runs_in_order,
)
from stagewright.check.report import Findings
from stagewright.errors import UserError
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind, Tasks
from stagewright.program.fold import fold
from stagewright.trace.formats.chakra import COMM_TYPES

SMALL = 50_000  # events of all ranks up to which a world also runs rank by rank
LARGE = 4096  # ranks above which a world is folded


class Unsound(Exception):
    """A program that breaks a rule: a defect of Stagewright, not of the user's settings."""


def check_program(program: Program) -> dict[str, object]:
    """Check a program; returns what has been checked, for the manifest.

    Raises UserError where the schedule can never end, and `Unsound` where anything else is wrong.
    """
    ranks = np.concatenate([rank_class.ranks for rank_class in program.classes])
    size = program.mesh.world_size
    inside = ((ranks >= 0) & (ranks < size)).all()
    if not inside or (np.bincount(ranks, minlength=size) != 1).any():
        raise Unsound("the classes do not hold every rank once")
    for rank_class in program.classes:
        _check_columns(rank_class)
    large = size > LARGE
    if large:
        program = fold(program)
    groups = {group: np.array(members) for group, members in program.groups().items()}
    parts = [part_of(program, rank_class) for rank_class in program.classes]
    findings = Findings()
    world = World(parts, program.mesh.world_size, groups, findings)
    match = check_world(world)
    _raise(findings)
    _check_ids(program)
    _must_end(world, match)
    single = not large and _rank_by_rank(world)
    loose = any(part.exchange.breaks.pairs for part in parts)
    return {
        "passed": ["dependencies", "partners", "collectives", "messages", "runs to the end"],
        "run": "rank by rank" if single else "by rank class",
        "communication": "one order per communicator" if loose else "one order per rank",
    }


def _rank_by_rank(world: World) -> bool:
    """Run a small world rank by rank."""
    if sum(len(p.ranks) * len(p.exchange.events.row) for p in world.parts) > SMALL:
        return False
    single = world.rank_by_rank()
    match = check_world(single)
    _raise(single.findings)
    _must_end(single, match)
    return True


def _must_end(world: World, match: Match) -> None:
    if runs_in_order(world, match):
        return
    why = explain(world, match)
    if why is not None:
        raise UserError(f"this schedule never ends: {why}; change the schedule or its placement")


def _raise(findings: Findings) -> None:
    for found in findings:
        raise Unsound(f"{found.message} ({found.nodes} of {found.code})")


def _check_columns(rank_class: RankClass) -> None:
    """Dependencies point to earlier rows, numbers are in range."""
    tasks = rank_class.tasks
    compute, collective = tasks.kind == TaskKind.COMPUTE, tasks.kind == TaskKind.COLLECTIVE
    message = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
    rules = {
        "a kernel with negative FLOPs or no traffic": compute
        & ((tasks.flops < 0) | (tasks.traffic < 1)),
        "less than a byte to send": ~compute & (tasks.comm_bytes < 1),
        "no such collective": collective
        & ((tasks.collective < 0) | (tasks.collective >= len(COLLECTIVES))),
        "a message without a tag": message & (tasks.tag < 0),
        "no partner": (collective | message) & (tasks.slot < 0),
    }
    for text, wrong in rules.items():
        _fault(rank_class, text, np.flatnonzero(wrong))
    for ptr, needed in ((tasks.data_ptr, tasks.data), (tasks.order_ptr, tasks.order)):
        counts = np.diff(ptr)
        if len(ptr) != len(tasks) + 1 or ptr[0] or ptr[-1] != len(needed) or (counts < 0).any():
            raise Unsound("the pointers of the dependencies do not cover the rows")
        rows = np.flatnonzero(counts)
        if len(rows):
            late = np.maximum.reduceat(needed, ptr[rows]) >= rows
            early = np.minimum.reduceat(needed, ptr[rows]) < 0
            _fault(rank_class, "needs a row that is not before it", rows[late | early])


def _fault(rank_class: RankClass, text: str, rows: Int) -> None:
    if len(rows):
        task = label(rank_class.tasks, int(rows[0]))
        raise Unsound(
            f"pipeline rank {rank_class.pipeline_rank}: {task}: {text} ({len(rows)} such)"
        )


def part_of(program: Program, rank_class: RankClass) -> WorldPart:
    """A rank class as a part of the world."""
    tasks = rank_class.tasks
    rows = np.flatnonzero(np.isin(tasks.kind, (TaskKind.COLLECTIVE, TaskKind.SEND, TaskKind.RECV)))
    kind = tasks.kind[rows].astype(np.int64)
    planned, slot = np.unique(kind << 32 | tasks.slot[rows], return_inverse=True)
    slot_kind = planned >> 32
    partner = np.zeros((len(rank_class.ranks), len(planned)), np.int64)
    planned_slots = (planned & 0xFFFF).tolist()
    for column, (kind_of_slot, at) in enumerate(zip(slot_kind, planned_slots, strict=True)):
        partners = program.group_of if kind_of_slot == TaskKind.COLLECTIVE else program.peer_of
        partner[:, column] = partners(at, rank_class.ranks)
    # Slots with the same partners, such as both directions of a ring of two, are merged.
    numbers: dict[tuple[int, bytes], int] = {}
    keys = [(int(k), of.tobytes()) for k, of in zip(slot_kind, partner.T, strict=True)]
    merged = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    first = [keys.index(key) for key in numbers]
    slot_kind, partner = slot_kind[first], partner[:, first]
    collective = kind == TaskKind.COLLECTIVE
    number = np.array([COMM_TYPES[name] for name in COLLECTIVES])
    op = np.where(collective, number[tasks.collective[rows]], -1)
    tag = np.where(collective, -1, tasks.tag[rows].astype(np.int64))
    events = Events(rows, kind, op, tasks.comm_bytes[rows], tag, merged[slot])
    needed = tasks.data.astype(np.int64), tasks.order.astype(np.int64)
    graph = graph_of_lists((tasks.data_ptr, tasks.order_ptr), needed)
    # Ordered rows are linked directly; to search all dependencies would cost a second.
    events, loose, breaks = arranged(
        graph, np.arange(graph.count), events, rows[kind != TaskKind.RECV], exact=False
    )
    exchange = Exchange(events, slot_kind.astype(np.uint8), partner[0], loose, breaks)
    return WorldPart(rank_class.ranks, exchange, partner, TaskSource(tasks, graph))


def _check_ids(program: Program) -> None:
    """ASTRA-sim tells the groups of a rank apart by their ids modulo 500 only."""
    if len(program.communicators) < 2:
        return
    ids = np.stack([program.group_of(slot) for slot in range(len(program.communicators))])
    residues = np.sort(np.where(ids > 0, ids % 500, -1 - np.arange(len(ids))[:, None]), axis=0)
    if (residues[1:] == residues[:-1]).any():
        raise Unsound("two groups of a rank have the same id modulo 500")


@dataclass(slots=True)
class TaskSource:
    """The tasks of a rank class."""

    tasks: Tasks
    graph: DependencyGraph

    def label(self, row: int) -> str:
        """A task in words."""
        return label(self.tasks, row)

    def nodes(self) -> Nodes:
        """All tasks and their dependencies."""
        count = self.graph.count
        return Nodes(self.graph, np.arange(count), np.zeros(count, bool))


def label(tasks: Tasks, row: int) -> str:
    """A task in words, with its id in the trace."""
    text = f'node {row + 1} "{tasks.names[tasks.name[row]]}"'
    where = int(tasks.microbatch[row])
    return text if where < 0 else f"{text}, microbatch {where}"
