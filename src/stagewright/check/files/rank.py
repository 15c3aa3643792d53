"""Checks one Chakra trace by itself, and collects its communication with other ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.dependency_graph import DependencyGraph, graph_of_ids
from stagewright.check.files.reader import (
    COLL,
    COMM,
    LOAD,
    SEND,
    STORE,
    Damaged,
    Trace,
    nodes,
    read_trace,
)
from stagewright.check.files.rules import (
    NEEDED,
    attribute_rules,
    exchange_rules,
    group_rules,
    groups,
    kernel_rules,
    label,
    repeat_rules,
    type_rules,
)
from stagewright.check.files.world import Events, Exchange, Spots, arranged, slots
from stagewright.check.report import Finding, Findings


@dataclass(frozen=True, slots=True)
class Checked:
    """A file, read and checked."""

    path: Path
    rank: int | None
    size: int  # bytes
    nodes: int
    findings: tuple[Finding, ...]
    exchange: Exchange | None = None  # None: the errors rule out a comparison with other ranks
    spots: Spots | None = None


def check_trace(path: Path, rank: int | None = None) -> Checked:
    """Read and check the file of a rank; without `rank`, rules about the own rank are skipped."""
    findings = Findings(rank)
    try:
        trace = read_trace(path, partial=True)
    except Damaged as error:
        findings.error("damaged", str(error))
        return Checked(path, rank, 0, 0, tuple(findings))
    if not trace.metadata.version and not trace.metadata.attr:
        text = "the metadata are empty, at which Chakra's Python tools stop"
        findings.warn("empty-metadata", text)
    communication = [*attribute_rules(trace), *group_rules(trace), *exchange_rules(trace, rank)]
    rules = (*type_rules(trace), *repeat_rules(trace), *communication, *kernel_rules(trace))
    broken = [(rule, np.flatnonzero(rule.nodes)) for rule in rules if rule.nodes.any()]
    labels = _labels(path, {int(rows[0]) for _, rows in broken})
    for (level, code, _, text), rows in broken:
        text = f"{labels[int(rows[0])]}: {text}"
        findings.add(Finding(level, code, text, rank, len(rows)))
    structure: tuple[Exchange, Spots | None] | None = None
    if trace.damage is not None:
        findings.error("damaged", str(trace.damage))
    elif order := _order(trace, findings):
        wrong = (rule.nodes & trace.communicates for rule in communication if rule.level == "error")
        if not any(nodes.any() for nodes in wrong):
            structure = _exchange(trace, *order)
    exchange, spots = structure or (None, None)
    return Checked(path, rank, trace.size, len(trace), tuple(findings), exchange, spots)


def _labels(path: Path, rows: Collection[int]) -> dict[int, str]:
    """Some nodes of a file in words."""
    found = islice(nodes(path), max(rows) + 1) if rows else ()
    return {row: label(node) for row, node in enumerate(found) if row in rows}


def _order(trace: Trace, findings: Findings) -> tuple[DependencyGraph, Int] | None:
    """Check ids and dependencies; the dependencies, and the rows in an order that they allow."""
    if not len(trace):
        findings.error("no-nodes", "there are no nodes, at which ASTRA-sim aborts")
        return None
    ids = np.sort(trace.id)
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        findings.error("duplicate-id", f"two nodes have id {ids[twice[0]]}", len(twice))
        return None
    child, needed = trace.dependencies()
    graph, exists = graph_of_ids(trace.id, child, needed)
    if not exists.all():
        first = int(np.flatnonzero(~exists)[0])
        name = "ctrl_deps" if first < len(trace.ctrl.values) else "data_deps"
        text = f"node {trace.id[child[first]]} needs node {needed[first]} ({name})"
        findings.error("dangling", f"{text}, which does not exist", int((~exists).sum()))
    order = graph.order(trace.id)
    if len(order) < len(trace):
        findings.error("cycle", _cycle(trace, graph.cycle(order)))
        return None
    return graph, order


def _cycle(trace: Trace, circle: list[int]) -> str:
    """A cycle of dependencies in words."""
    listed = circle if len(circle) <= 9 else circle[:8]
    words = [f"node {trace.id[row]}" for row in listed]
    if len(circle) > len(listed):
        words.append(f"{len(circle) - len(listed)} more")
    shown = " needs ".join([*words, f"node {trace.id[circle[0]]}"])
    child = np.repeat(np.arange(len(trace)), np.diff(trace.data.ptr))
    both = set(zip(circle, [*circle[1:], circle[0]], strict=True))
    inside = np.isin(child, circle)
    data = set(zip(child[inside].tolist(), trace.data.values[inside].tolist(), strict=True))
    by_data = all((one, int(trace.id[two])) in data for one, two in both)
    why = "" if by_data else "; not by data_deps alone, all that MLCommons' feeder knows"
    return f"dependencies in a circle, which never runs: {shown}{why}"


def _exchange(trace: Trace, graph: DependencyGraph, order: Int) -> tuple[Exchange, Spots | None]:
    """The communication of a rank, and the bytes of the file that name its partners."""
    row = np.flatnonzero(trace.communicates)
    type_, value = trace.type[row], {name: trace.value(name)[row] for name in NEEDED}
    is_send, is_coll = type_ == SEND, type_ == COLL
    event_kind = np.zeros(len(row), np.int64)
    for node_type, of in COMM.items():
        event_kind[type_ == node_type] = of
    partner = np.where(is_send, value["comm_dst"], value["comm_src"])
    partner = np.where(is_coll, groups(trace)[row], partner)
    kind, partner, slot = slots(event_kind, partner)
    op = np.where(is_coll, value["comm_type"], -1)
    tag = np.where(is_coll, -1, value["comm_tag"])
    events = Events(row, event_kind, op, value["comm_size"], tag, slot)
    turns = np.flatnonzero(trace.is_a(COLL, SEND, LOAD, STORE) & ~trace.on_cpu)
    events, loose, breaks = arranged(graph, order, events, turns)
    exchange = Exchange(events, kind.astype(np.uint8), partner, loose, breaks)
    return exchange, _spots(trace.places[row], slot)


def _spots(places: Int, slot: Int) -> Spots | None:
    """Bytes of the file that name partners and the rank itself; None if unknown."""
    if (places == -1).any():
        return None
    at, end, own_at, own_end = places.T
    has_partner, has_own = at != -2, own_at != -2
    return Spots(
        np.concatenate([at[has_partner], own_at[has_own]]),
        np.concatenate([end[has_partner], own_end[has_own]]),
        np.concatenate([slot[has_partner], np.full(int(has_own.sum()), -1)]),
    )
