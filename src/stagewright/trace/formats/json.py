"""The program of a rank as JSON for people: `rank.<rank>.json`, a list of nodes, one a line.

Ids count from 1, as in the Chakra trace of the same rank. Nodes outside the layers have no `layer`,
and nodes that run once per step no `microbatch`. `bytes` of a compute node are its reads and writes
of device memory; of other nodes, the communicated bytes (`Tasks.comm_bytes`), with `local_bytes`
where the rank's own part of these differs. The ranks of a group are in comm_group.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from stagewright.arrays import Int
from stagewright.program.columns import (
    COLLECTIVES,
    PHASES,
    Program,
    TaskKind,
    Tasks,
    intersect,
)

FILE = "rank.{rank}.json"
"""Name of a rank's file."""


def plan(program: Program, ranks: Int, provenance: Mapping[str, str | int]) -> list[TextBatch]:
    """The batches that write the files of `ranks`, ascending; only the manifest has provenance."""

    def text(tasks: Tasks, rank: int) -> str:
        lines = [json.dumps(node) for node in nodes(program, tasks, rank)]
        return "[\n" + ",\n".join(lines) + "\n]\n"

    return text_batches(program, ranks, text)


def text_batches(
    program: Program, ranks: Int, text: Callable[[Tasks, int], str]
) -> list[TextBatch]:
    """A batch for each class of some ranks; `text` makes a file of the class's tasks and a rank."""
    by_class = [(of.tasks, intersect(of.ranks, ranks)) for of in program.classes]
    return [
        TextBatch(class_ranks, 400 * len(tasks), partial(text, tasks))
        for tasks, class_ranks in by_class
        if len(class_ranks)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class TextBatch:
    """Ranks whose files are made one by one, as text: formats for few ranks that have no haste.

    The batch is its own template.
    """

    ranks: Int
    memory: int
    """Bytes that making a file takes, some hundreds a node."""
    text: Callable[[int], str | bytes]
    """The file of a rank."""
    at_most: None = None  # bytes of a file: not known before it is made
    size: None = None

    def template(self) -> TextBatch:
        """The batch."""
        return self

    @contextmanager
    def stamped(self, rank: int) -> Generator[memoryview]:
        """The file of one rank."""
        text = self.text(rank)
        yield memoryview(text if isinstance(text, bytes) else text.encode())


def nodes(program: Program, tasks: Tasks, rank: int) -> Iterator[dict[str, object]]:
    """The nodes of a rank; `tasks` are those of its class."""
    rank_array = np.array([rank], np.int64)
    groups = [
        int(program.group_of(slot, rank_array)[0]) for slot in range(len(program.communicators))
    ]
    peers = [int(program.peer_of(slot, rank_array)[0]) for slot in range(len(program.peers))]
    for row, kind in enumerate(map(TaskKind, tasks.kind.tolist())):
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
        if kind is TaskKind.COMPUTE:
            node |= {"flops": int(tasks.flops[row]), "bytes": int(tasks.traffic[row])}
        else:
            node["bytes"] = int(tasks.comm_bytes[row])
            if tasks.local_bytes[row] != tasks.comm_bytes[row]:
                node["local_bytes"] = int(tasks.local_bytes[row])
        if kind is TaskKind.COLLECTIVE:
            node["collective"] = COLLECTIVES[tasks.collective[row]]
            node["group"] = groups[tasks.slot[row]]
        elif kind in (TaskKind.SEND, TaskKind.RECV):
            node |= {"peer": peers[tasks.slot[row]], "tag": int(tasks.tag[row])}
        node["deps"] = (tasks.data[tasks.data_ptr[row] : tasks.data_ptr[row + 1]] + 1).tolist()
        node["order"] = (tasks.order[tasks.order_ptr[row] : tasks.order_ptr[row + 1]] + 1).tolist()
        yield node
