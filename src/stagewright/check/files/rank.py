"""Checks one Chakra trace by itself, and collects its communication with other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int
from stagewright.check.files.dependency_graph import DependencyGraph, graph_of_ids
from stagewright.check.files.reader import STRING, Damaged, NodeBlock, TraceReader
from stagewright.check.files.rules import (
    COLL,
    COMM,
    LOAD,
    RECV,
    SEND,
    STORE,
    NodeRows,
    check_attributes,
    check_dims,
    check_exchanges,
    check_kernels,
    check_repeated,
    check_types,
    group_id,
    label,
)
from stagewright.check.files.world import Events, Exchange, Spots, arranged, slots
from stagewright.check.report import Finding, Findings, Level
from stagewright.trace.formats.et_def import MetadataMessage, NodeType
from stagewright.trace.formats.wire import Words

MOST_NODES = 1 << 26  # of one file, at some 100 bytes of memory each


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
    check = _Check(path, rank)
    structure: tuple[Exchange, Spots | None] | None = None
    try:
        reader = TraceReader(path)
        check.size = reader.size
        check.metadata(reader.metadata)
        for block in reader:
            check.block(block, reader.texts)
            if check.count > MOST_NODES:
                raise Damaged(f"{path}: more than {MOST_NODES} nodes")
        check.durations()
        structure = check.structure()
    except Damaged as error:
        check.findings.error("damaged", str(error))
    findings = tuple(check.findings)
    return Checked(path, rank, check.size, check.count, findings, *(structure or (None, None)))


class _NodeColumns(NamedTuple):
    """Columns of all nodes; dependencies are a count per node, and all needed ids in a row."""

    id: Words
    type: NDArray[np.int16]
    cpu: Bool
    ctrl_count: Int
    ctrl: Words
    data_count: Int
    data: Words


class _EventColumns(NamedTuple):
    """Columns of collectives, sends and receives; places are -2 where an attribute is missing."""

    row: Int
    kind: Int
    op: Int
    size: Int
    tag: Int
    partner: Int
    at: Int  # byte of the file where the partner's value begins; -1: unknown
    end: Int
    own_at: Int  # likewise of the rank itself
    own_end: Int


@dataclass(slots=True)
class _Check:
    """The check of one file: its findings, and the columns of the blocks read so far."""

    path: Path
    rank: int | None
    size: int = 0
    count: int = 0
    timed: bool = False
    comparable: bool = True
    findings: Findings = field(init=False)
    nodes: list[_NodeColumns] = field(default_factory=list[_NodeColumns])  # of each block
    events: list[_EventColumns] = field(default_factory=list[_EventColumns])

    def __post_init__(self) -> None:
        self.findings = Findings(self.rank)

    def metadata(self, metadata: MetadataMessage) -> None:
        if not metadata.version and not metadata.attr:
            self.findings.warn(
                "empty-metadata", "the metadata are empty, at which Chakra's Python tools stop"
            )

    # ---- block by block -------------------------------------------------------------------------

    def block(self, block: NodeBlock, texts: list[str]) -> None:
        """Check the attributes of a block of nodes, and keep the columns for `structure`."""

        def report(level: Level, code: str, mask: Bool, text: str) -> None:
            rows_found = np.flatnonzero(mask)
            if len(rows_found):
                if code not in self.findings:  # else only the number counts
                    text = f"{label(block.nodes[int(rows_found[0])])}: {text}"
                self.findings.add(Finding(level, code, text, self.rank, len(rows_found)))

        rows = NodeRows(
            block.type,
            block.duration,
            (np.diff(block.ctrl.ptr) == 0) & (np.diff(block.data.ptr) == 0),
            block.attributes,
            report,
        )
        check_types(rows)
        for name, column in block.attributes.items():
            if column.again.any():
                check_repeated(rows, name, column)
        check_attributes(rows)
        group, named = _groups(rows, texts)
        check_dims(rows, group)
        good = check_exchanges(rows, self.rank) & named
        self.timed |= bool(rows.duration.any())
        check_kernels(rows)
        self.comparable &= bool(good.all())
        self.events.append(_event_columns(block, rows, group, self.count))
        ctrl, data = block.ctrl, block.data
        self.nodes.append(
            _NodeColumns(
                block.id,
                np.clip(rows.type, -1, 100).astype(np.int16),
                rows.cpu,
                np.diff(ctrl.ptr),
                ctrl.values,
                np.diff(data.ptr),
                data.values,
            )
        )
        self.count += len(block)

    # ---- once all nodes are there ---------------------------------------------------------------

    def durations(self) -> None:
        """A kernel without num_ops needs a duration; 0 counts as one if any node has a duration."""
        bare = self.findings.take("only-duration")
        if bare is not None and self.timed:
            text = f"{bare.message}: runs by its duration, with ASTRA-sim's roofline off only"
            self.findings.add(bare._replace(message=text))
        elif bare is not None:
            text = f"{bare.message}, and nothing has a duration"
            self.findings.add(bare._replace(level="error", code="no-work", message=text))

    def structure(self) -> tuple[Exchange, Spots | None] | None:
        """Check ids and dependencies; returns the communication in order."""
        if not self.count:
            self.findings.error("no-nodes", "there are no nodes, at which ASTRA-sim aborts")
            return None
        nodes = _NodeColumns(*map(np.concatenate, zip(*self.nodes, strict=True)))
        self.nodes.clear()
        graph = self._graph(nodes)
        if graph is None:
            return None
        order = graph.order(nodes.id)
        if len(order) < self.count:
            self._report_cycle(graph.cycle(order), nodes)
            return None
        if not self.comparable:
            return None
        columns = _EventColumns(*map(np.concatenate, zip(*self.events, strict=True)))
        turns = np.isin(nodes.type, (COLL, SEND, LOAD, STORE)) & ~nodes.cpu
        kind, partner, slot = slots(columns.kind, columns.partner)
        events = Events(*columns[:5], slot)
        events, loose, breaks = arranged(graph, order, events, np.flatnonzero(turns))
        exchange = Exchange(events, kind.astype(np.uint8), partner, loose, breaks)
        return exchange, _spots(columns, slot)

    def _graph(self, nodes: _NodeColumns) -> DependencyGraph | None:
        ids = np.sort(nodes.id)
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        if len(twice):
            text = f"two nodes have id {ids[twice[0]]}"
            self.findings.error("duplicate-id", text, len(twice))
            return None
        rows = np.arange(self.count)
        child = np.concatenate([np.repeat(rows, n) for n in (nodes.ctrl_count, nodes.data_count)])
        needs = np.concatenate([nodes.ctrl, nodes.data])
        graph, exists = graph_of_ids(nodes.id, child, needs)
        if not exists.all():
            first = int(np.flatnonzero(~exists)[0])
            name = "ctrl_deps" if first < len(nodes.ctrl) else "data_deps"
            text = f"node {nodes.id[child[first]]} needs node {needs[first]} ({name})"
            text += ", which does not exist"
            self.findings.error("dangling", text, int((~exists).sum()))
        return graph

    def _report_cycle(self, circle: list[int], nodes: _NodeColumns) -> None:
        listed = circle if len(circle) <= 9 else circle[:8]
        words = [f"node {nodes.id[row]}" for row in listed]
        if len(circle) > len(listed):
            words.append(f"{len(circle) - len(listed)} more")
        shown = " needs ".join([*words, f"node {nodes.id[circle[0]]}"])
        child = np.repeat(np.arange(self.count), nodes.data_count)
        both = set(zip(circle, [*circle[1:], circle[0]], strict=True))
        inside = np.isin(child, circle)
        data = set(zip(child[inside].tolist(), nodes.data[inside].tolist(), strict=True))
        by_data = all((one, int(nodes.id[two])) in data for one, two in both)
        why = "" if by_data else "; not by data_deps alone, all that MLCommons' feeder knows"
        self.findings.error("cycle", f"dependencies in a circle, which never runs: {shown}{why}")


def _groups(rows: NodeRows, texts: list[str]) -> tuple[Int, Bool]:
    """The group of each node, 0 for all ranks, and the mask of nodes without a wrong name."""
    name = rows.columns["pg_name"]
    named = rows.communicates & (rows.type == COLL) & (name.kind == STRING)
    group, good = np.zeros(len(rows.type), np.int64), np.ones(len(rows.type), bool)
    for index in np.unique(name.value[named]).tolist():
        text = texts[int(index)]
        has_name, number = named & (name.value == index), group_id(text)
        group[has_name] = number or 0
        if number is None:
            good &= ~has_name
            text = f"pg_name is {text[:40]!a}, wanted a positive number"
            rows.report("error", "group-name", has_name, text)
    return group, good


def _event_columns(block: NodeBlock, rows: NodeRows, group: Int, before: int) -> _EventColumns:
    """Columns of the nodes that communicate; `before`: number of nodes in earlier blocks."""
    selected = np.flatnonzero(rows.communicates)
    type_ = rows.type[selected]
    is_send, is_coll = type_ == SEND, type_ == COLL

    def value(name: str) -> Int:
        return rows.value(name)[selected]

    kind = np.zeros(len(selected), np.int64)
    for node_type, event_kind in COMM.items():
        kind[type_ == node_type] = event_kind
    return _EventColumns(
        selected + before,
        kind,
        np.where(is_coll, value("comm_type"), -1),
        value("comm_size"),
        np.where(is_coll, -1, value("comm_tag")),
        np.where(is_coll, group[selected], np.where(is_send, value("comm_dst"), value("comm_src"))),
        *_places(block, selected),
    )


def _places(block: NodeBlock, selected: Int) -> Int:
    """Four columns of `_EventColumns`: places of the partner's and the own rank's value."""
    columns = np.full((4, len(selected)), -2)
    names = {SEND: ("comm_dst", "comm_src"), RECV: ("comm_src", "comm_dst"), COLL: ("pg_name",)}
    for index, row in enumerate(selected.tolist()):
        places = block.value_places(row)
        for end_id, name in enumerate(names[NodeType(int(block.type[row]))]):
            if block.attributes[name].present[row]:
                columns[2 * end_id : 2 * end_id + 2, index] = places.get(name, (-1, -1))
    return columns


def _spots(columns: _EventColumns, slot: Int) -> Spots | None:
    """Bytes of the file that name partners and the rank itself; None if unknown."""
    if (columns.at == -1).any() or (columns.own_at == -1).any():
        return None
    has_partner, has_own = columns.at != -2, columns.own_at != -2
    return Spots(
        np.concatenate([columns.at[has_partner], columns.own_at[has_own]]),
        np.concatenate([columns.end[has_partner], columns.own_end[has_own]]),
        np.concatenate([slot[has_partner], np.full(int(has_own.sum()), -1)]),
    )
