"""The numeric program of every rank, as columns: the seam between the graph and all its readers.

Ranks that differ only in who their partners are form a class and share the work of their pipeline
rank (`step.RankWork`). A task names its partners by *slot*: an index into `Program.communicators`
for a collective, into `Program.peers` for a send or receive. Which group or rank a slot means to
one rank is arithmetic on the mesh (`communicators`), so that one more rank costs a row of
arithmetic and not a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int, sorted_values
from stagewright.graph.node import PHASES as PHASES
from stagewright.program.communicators import Communication, Communicator, Peer, Users
from stagewright.program.step import RankWork
from stagewright.program.tables import (
    CATEGORIES as CATEGORIES,
)
from stagewright.program.tables import (
    COLLECTIVE as COLLECTIVE,
)
from stagewright.program.tables import (
    COLLECTIVES as COLLECTIVES,
)
from stagewright.program.tables import (
    COMPUTE as COMPUTE,
)
from stagewright.program.tables import (
    LOAD as LOAD,
)
from stagewright.program.tables import (
    NO_VALUES as NO_VALUES,
)
from stagewright.program.tables import (
    RECV as RECV,
)
from stagewright.program.tables import (
    SEND as SEND,
)
from stagewright.program.tables import (
    STORE as STORE,
)
from stagewright.program.tables import (
    Shape as Shape,
)
from stagewright.program.tables import (
    TaskKind as TaskKind,
)
from stagewright.program.tables import (
    Tasks as Tasks,
)
from stagewright.program.tables import (
    Values as Values,
)


@dataclass(frozen=True, slots=True, eq=False)
class RankClass:
    """Ranks that run the same tasks: those of one pipeline rank whose experts have equal loads."""

    ranks: Int  # ascending
    pipeline_rank: int
    work: RankWork
    allowance: int = 0
    """Bytes that are set aside on each rank beside its tensors (`memory_allowance`)."""

    def __repr__(self) -> str:
        return f"<stage {self.pipeline_rank}: {len(self.ranks)} ranks, {len(self.tasks)} tasks>"

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
        """Bytes per rank at the peak in issue order, by category, and their sum, `peak`.

        With `allowance` beside them where there is one.
        """
        held = self.work.memory
        return {**held, "allowance": self.allowance} if self.allowance else held

    @property
    def users(self) -> Users:
        """The ranks of the class, and the communicators they use."""
        slots = np.unique(self.tasks.slot[self.tasks.kind == TaskKind.COLLECTIVE])
        return Users(self.ranks, tuple(slots.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Program(Communication):
    """What every rank does in one step."""

    mesh: Mesh
    classes: tuple[RankClass, ...]
    communicators: tuple[
        Communicator, ...
    ]  # by slot; all are used by some task and have >= 2 ranks
    peers: tuple[Peer, ...]  # by slot

    def __repr__(self) -> str:
        classes, world = len(self.classes), self.mesh.world_size
        return f"<program of {world} ranks in {classes} classes, mesh {dict(self.mesh.axes)}>"

    def blocks_of_groups(
        self, users: Sequence[Users] | None = None, block: int = 4096
    ) -> Iterator[tuple[Int, list[Int]]]:
        """All groups that some rank uses, in blocks of ascending ids: ids, and the ranks of each.

        `users`: the users of all classes, where this program holds only some of the classes.
        """
        users = [of.users for of in self.classes] if users is None else users
        slots = range(len(self.communicators))
        used = [self.used_groups(slot, users) for slot in slots]
        most = max((self.group_count(slot) for slot in slots), default=0)
        for at in range(0, most, block):
            ids: list[Int] = []
            ranks: list[Int] = []
            for slot in slots:
                index = np.arange(at, min(at + block, self.group_count(slot)), dtype=np.int64)
                index = index[used[slot][at : at + block]]
                ids.append(self.group_ids(slot, index))
                ranks.extend(self.members(slot, index))
            block_ids = np.concatenate(ids)
            order = np.argsort(block_ids)
            yield block_ids[order], [ranks[nth] for nth in order]

    def groups(self) -> dict[int, list[int]]:
        """The ranks of every group that some rank uses, by ascending group id."""
        return {
            int(group): members.tolist()
            for ids, ranks in self.blocks_of_groups()
            for group, members in zip(ids, ranks, strict=True)
        }


def groups_met(ids: Int, ranks: Int) -> Int:
    """The members of each group that some ranks are in: [groups, ranks].

    `ids`: by rank of the world the group that it is in, 0: none; groups are of one size.

    >>> groups_met(np.array([7, 9, 7, 9, 0]), np.array([1, 4]))
    array([[1, 3]])
    """
    own = ranks[ids[ranks] > 0]
    wanted = sorted_values(ids[own])
    if len(own) < len(wanted) * np.count_nonzero(ids == wanted[0]):  # others are members
        own = np.flatnonzero(np.isin(ids, wanted))
    return own[np.argsort(ids[own], kind="stable")].reshape(len(wanted), -1).astype(np.int64)


def among(ranks: Int, wanted: Int) -> Int:
    """Those of `ranks` that are also in `wanted`; both ascend.

    >>> among(np.array([1, 2, 5]), np.array([2, 3, 5, 8]))
    array([2, 5])
    """
    if not len(wanted):
        return wanted
    at = np.minimum(np.searchsorted(wanted, ranks), len(wanted) - 1)
    return ranks[wanted[at] == ranks]
