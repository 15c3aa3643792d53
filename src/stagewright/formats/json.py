"""The program of a rank as JSON for people: `rank.<rank>.json`, a list of nodes, one a line.

Ids count from 1, as in the Chakra trace of the same rank. What a node has no use for is left out:
`layer` outside the layers, `microbatch` of what happens once per step. `bytes` are what a compute
node reads and writes in device memory, and what the others communicate (`Tasks.comm_bytes`). The
ranks of a group are in comm_group.json.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from stagewright.formats.wire import Int
from stagewright.program import COLLECTIVES, PHASES, Kind, Program, RankClass, Tasks


def plan(program: Program, ranks: Int, provenance: Mapping[str, str | int]) -> list[Batch]:
    """The batches that write the files of `ranks`; files hold no provenance, the manifest does."""
    groups = [program.group_of(slot) for slot in range(len(program.communicators))]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    found = [(of, np.intersect1d(of.ranks, ranks)) for of in program.classes]
    return [Batch(of, mine, groups, peers) for of, mine in found if len(mine)]


class Batch:
    """Ranks of one class. It is its own template: this format is for few ranks and has no haste."""

    at_most = size = None  # bytes of a file: not known before it is made

    def __init__(self, of: RankClass, ranks: Int, groups: list[Int], peers: list[Int]) -> None:
        """`groups`, `peers`: by slot, of every rank of the world."""
        self.ranks: Sequence[int] = [int(rank) for rank in ranks]
        self._tasks = of.tasks
        self._groups = groups
        self._peers = peers

    def template(self) -> Batch:
        """What makes the files of these ranks."""
        return self

    @contextmanager
    def stamped(self, rank: int) -> Generator[memoryview]:
        """The file of one rank."""
        lines = [json.dumps(node) for node in self.nodes_of(rank)]
        yield memoryview(("[\n" + ",\n".join(lines) + "\n]\n").encode())

    def nodes_of(self, rank: int) -> Iterator[dict[str, object]]:
        """The nodes of one rank."""
        groups = [int(ids[rank]) for ids in self._groups]
        peers = [int(ranks[rank]) for ranks in self._peers]
        return nodes(self._tasks, groups, peers)


def nodes(tasks: Tasks, groups: Sequence[int], peers: Sequence[int]) -> Iterator[dict[str, object]]:
    """The nodes of a rank, whose groups and peers are given by slot."""
    for row, kind in enumerate(map(Kind, tasks.kind.tolist())):
        node: dict[str, object] = {
            "id": row + 1,
            "name": tasks.names[tasks.name[row]],
            "kind": kind.name.lower(),
            "op": tasks.ops[tasks.op[row]],
            "phase": PHASES[tasks.phase[row]],
            "stage": int(tasks.stage[row]),
        }
        if tasks.layer[row] >= 0:
            node["layer"] = int(tasks.layer[row])
        if tasks.microbatch[row] >= 0:
            node["microbatch"] = int(tasks.microbatch[row])
        node["dtype"] = tasks.dtypes[tasks.dtype[row]]
        if kind is Kind.COMPUTE:
            node |= {"flops": int(tasks.flops[row]), "bytes": int(tasks.traffic[row])}
        else:
            node["bytes"] = int(tasks.comm_bytes[row])
        if kind is Kind.COLLECTIVE:
            node["collective"] = COLLECTIVES[tasks.collective[row]]
            node["group"] = groups[tasks.slot[row]]
        elif kind in (Kind.SEND, Kind.RECV):
            node |= {"peer": peers[tasks.slot[row]], "tag": int(tasks.tag[row])}
        node["deps"] = (tasks.data[tasks.data_ptr[row] : tasks.data_ptr[row + 1]] + 1).tolist()
        node["order"] = (tasks.order[tasks.order_ptr[row] : tasks.order_ptr[row + 1]] + 1).tolist()
        yield node
