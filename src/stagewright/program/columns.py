"""The program of every rank, as columns: the seam between the graph and all its readers.

Ranks that differ only in their partners form a class and share the work of their pipeline rank
(`rank_work.RankWork`). A task names its partners by *slot*: an index into `Program.communicators`
for a collective, into `Program.peers` for a send or receive. Which group or rank a slot means to
one rank is arithmetic on the mesh (`communicators`), so one more rank costs a row of arithmetic
and not a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int, sorted_values
from stagewright.program.communicators import Communication, Communicator, Peer, Users
from stagewright.program.rank_work import RankWork
from stagewright.program.tables import (
    BACKWARD_PHASE,
    CATEGORIES,
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    FORWARD_PHASE,
    LOAD,
    NO_VALUES,
    OPTIMIZER_PHASE,
    PHASES,
    RECV,
    SEND,
    STORE,
    Shape,
    TaskKind,
    Tasks,
    Values,
)

__all__ = [
    "BACKWARD_PHASE",
    "CATEGORIES",
    "COLLECTIVE",
    "COLLECTIVES",
    "COMPUTE",
    "FORWARD_PHASE",
    "LOAD",
    "NO_VALUES",
    "OPTIMIZER_PHASE",
    "PHASES",
    "RECV",
    "SEND",
    "STORE",
    "Program",
    "RankClass",
    "Shape",
    "TaskKind",
    "Tasks",
    "Values",
    "groups_of_ranks",
    "intersect",
]


@dataclass(frozen=True, slots=True, eq=False)
class RankClass:
    """Ranks that run the same tasks: those of one pipeline rank whose experts have equal loads."""

    ranks: Int  # ascending
    pipeline_rank: int
    work: RankWork
    allowance: int = 0
    """Bytes reserved on each rank in addition to its tensors (`memory_allowance`)."""

    def __repr__(self) -> str:
        tasks = int(self.work.order.begin[-1])
        return f"<pipeline rank {self.pipeline_rank}: {len(self.ranks)} ranks, {tasks} tasks>"

    @property
    def tasks(self) -> Tasks:
        """Rows of all copies of the actions, in program order."""
        return self.work.tasks

    @property
    def values(self) -> Values:
        """Values in memory, with their live ranges."""
        return self.work.values

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes per rank at the peak in issue order: by category, their sum `peak`, `allowance`."""
        memory = self.work.memory
        return {**memory, "allowance": self.allowance} if self.allowance else memory

    @property
    def users(self) -> Users:
        """Ranks of the class, and the communicators they use."""
        slots = np.unique(self.tasks.slot[self.tasks.kind == TaskKind.COLLECTIVE])
        return Users(self.ranks, tuple(slots.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Program(Communication):
    """Work of every rank in one step."""

    mesh: Mesh
    classes: tuple[RankClass, ...]
    communicators: tuple[Communicator, ...]
    """By slot; all are used by some task and have at least two ranks."""
    peers: tuple[Peer, ...]
    """By slot."""

    def __repr__(self) -> str:
        classes, world = len(self.classes), self.mesh.world_size
        return f"<program of {world} ranks in {classes} classes, mesh {dict(self.mesh.axes)}>"

    def group_chunks(
        self, users: Sequence[Users] | None = None, size: int = 4096
    ) -> Iterator[tuple[Int, list[Int]]]:
        """Groups that some rank uses, in chunks of ascending ids: ids, and the ranks of each.

        `users`: users of all classes, where this program has only some of the classes. `size`:
        groups of each communicator in a chunk.
        """
        users = [c.users for c in self.classes] if users is None else users
        slots = range(len(self.communicators))
        used = [self.used_groups(slot, users) for slot in slots]
        max_groups = max((self.group_count(slot) for slot in slots), default=0)
        for begin in range(0, max_groups, size):
            ids: list[Int] = []
            ranks: list[Int] = []
            for slot in slots:
                end = min(begin + size, self.group_count(slot))
                index = np.arange(begin, end, dtype=np.int64)[used[slot][begin : begin + size]]
                ids.append(self.group_ids(slot, index))
                ranks.extend(self.members(slot, index))
            chunk = np.concatenate(ids)
            order = np.argsort(chunk)
            yield chunk[order], [ranks[i] for i in order]

    def groups(self) -> dict[int, list[int]]:
        """Ranks of every group that some rank uses, by ascending group id."""
        return {
            int(group): members.tolist()
            for ids, ranks in self.group_chunks()
            for group, members in zip(ids, ranks, strict=True)
        }


def groups_of_ranks(ids: Int, ranks: Int) -> Int:
    """Members of each group that some of the ranks belong to: [groups, ranks].

    `ids`: group of each rank of the world, 0: none. All groups have one size.

    >>> groups_of_ranks(np.array([7, 9, 7, 9, 0]), np.array([1, 4]))
    array([[1, 3]])
    """
    members = ranks[ids[ranks] > 0]
    groups = sorted_values(ids[members])
    if len(members) < len(groups) * np.count_nonzero(ids == groups[0]):  # of other ranks, too
        members = np.flatnonzero(np.isin(ids, groups))
    members = members[np.argsort(ids[members], kind="stable")]
    return members.reshape(len(groups), -1).astype(np.int64)


def intersect(ranks: Int, selected: Int) -> Int:
    """Ranks in both arrays; both ascend.

    >>> intersect(np.array([1, 2, 5]), np.array([2, 3, 5, 8]))
    array([2, 5])
    """
    if not len(selected):
        return selected
    index = np.minimum(np.searchsorted(selected, ranks), len(selected) - 1)
    return ranks[selected[index] == ranks]
