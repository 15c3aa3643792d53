"""What every program must satisfy whoever reads it; `check` raises `Broken` and says where.

Two parts: the columns of each rank class by themselves, and all ranks together. The latter *run*
the program: by its dependencies alone, and under ASTRA-sim's rule (one kernel and one collective
or send at a time, lowest row first among those that are ready) with random durations.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from stagewright.program.columns import (
    CATEGORIES,
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)

MAX_TAG = 500_000_000
SMALL_WORLD = 64
COMPUTE, COLLECTIVE, SEND, RECV, LOAD, STORE = (int(k) for k in TaskKind)


class Broken(AssertionError):
    """An invariant does not hold."""


def check(
    program: Program,
    *,
    streams: str = "one",
    seeds: Iterable[int] = (0, 1),
    rendezvous: Sequence[bool] = (False, True),
) -> None:
    """All invariants; the ones that take a row per rank only where the world is small."""
    for c in program.classes:
        check_columns(c)
        check_order(c, streams)
        check_microbatches(c)
        check_values(c)
    check_ranks(program)
    check_groups(program)
    check_messages(program)
    if program.mesh.world_size <= SMALL_WORLD:
        world = World(program, streams)
        for meet in rendezvous:
            world.run(rendezvous=meet)
        for seed in seeds:
            world.run(jitter=seed, slots=True)


def check_values(c: RankClass) -> None:
    """Values are there while rows that exist run; bytes are those that `memory` has."""
    v, rows = c.values, len(c.tasks)
    if not len(v.value):
        return
    stays = v.first < 0
    if not ((v.last[stays] == rows).all() and (v.last[~stays] < rows).all()):
        raise Broken("a value neither stays nor goes")
    if not ((v.first <= v.last).all() and (v.size >= 0).all()):
        raise Broken("a value that goes before it comes")
    held = [0] * (rows + 2)
    for value, first, last in zip(v.value, v.first, v.last, strict=True):
        held[max(int(first), 0)] += int(v.size[value])
        held[int(last) + 1] -= int(v.size[value])
    if max(itertools.accumulate(held[:rows])) != c.memory["peak"]:
        raise Broken("the peak is another")
    for category in ("parameters", "gradients", "optimizer"):
        of = v.category[v.value] == CATEGORIES.index(category)
        mine = stays & of
        if category == "gradients" and (of & ~stays).any():
            continue  # they come with backward: `set_grads_to_none`
        if v.size[v.value[mine]].sum() != c.memory[category]:
            raise Broken(f"{category} that do not stay")


def describe(t: Tasks, row: int) -> str:
    """A row as people speak of it."""
    where = f" microbatch {t.microbatch[row]}" if t.microbatch[row] >= 0 else ""
    kind = TaskKind(t.kind[row]).name
    return f"#{row} {kind} {t.names[t.name[row]]} ({PHASES[t.phase[row]]}{where})"


def edges(t: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """All dependencies as (row, the earlier row that it needs)."""
    rows = np.arange(len(t))
    row = np.concatenate(
        [np.repeat(rows, np.diff(t.data_ptr)), np.repeat(rows, np.diff(t.order_ptr))]
    )
    return row, np.concatenate([t.data, t.order]).astype(np.int64)


# ---- one rank class ------------------------------------------------------------------------------


def check_columns(c: RankClass) -> None:
    """Columns are of one length, values in range, dependencies point to earlier rows."""
    t, n = c.tasks, len(c.tasks)
    columns = (
        *("kind", "name", "op", "phase", "stage", "layer", "microbatch", "flops", "traffic"),
        *("collective", "dtype", "comm_bytes", "slot", "tag"),
    )
    for column in columns:
        if len(getattr(t, column)) != n:
            raise Broken(f"column {column} has {len(getattr(t, column))} rows, wanted {n}")
    for pointer, values in ((t.data_ptr, t.data), (t.order_ptr, t.order)):
        if len(pointer) != n + 1 or pointer[0] != 0 or pointer[-1] != len(values):
            raise Broken(f"dependency pointers do not cover the {n} rows")
        if (np.diff(pointer) < 0).any():
            raise Broken("dependency pointers fall")
    row, need = edges(t)
    fault(c, "needs a later row", row[(need >= row) | (need < 0)])
    kind = t.kind
    compute, moves = kind == COMPUTE, kind != COMPUTE
    message, copies = (kind == SEND) | (kind == RECV), (kind == LOAD) | (kind == STORE)
    rules = {
        "negative FLOPs": t.flops < 0,
        "a kernel that moves nothing": compute & (t.traffic < 1),
        "a kernel with bytes to send": compute & (t.comm_bytes != 0),
        "a message with FLOPs or traffic": moves & ((t.flops != 0) | (t.traffic != 0)),
        "less than a byte to send": moves & (t.comm_bytes < 1),
        "no such collective": (kind == COLLECTIVE)
        & ~np.isin(t.collective, range(len(COLLECTIVES))),
        "a collective where there is none": (kind != COLLECTIVE) & (t.collective != -1),
        "a tag out of range": message & ((t.tag < 0) | (t.tag >= MAX_TAG)),
        "a tag where none belongs": ~message & (t.tag != -1),
        "a partner where none belongs": copies & (t.slot != -1),
        "a kernel on no stream": compute & ~np.isin(t.slot, [-1, *t.slot[kind == COLLECTIVE]]),
        "no partner": moves & ~copies & (t.slot < 0),
    }
    for text, bad in rules.items():
        fault(c, text, np.flatnonzero(bad))


def check_order(c: RankClass, streams: str) -> None:
    """Kernels form one chain; so does what moves bytes, or a chain for each separate stream."""
    t = c.tasks
    for label, rows in chains(t, streams).items():
        place = np.full(len(t), -1)
        place[rows] = np.arange(len(rows))
        row, need = edges(t)
        by_row = np.argsort(row, kind="stable")
        parents = np.split(need[by_row], np.cumsum(np.bincount(row, minlength=len(t)))[:-1])
        # The last of the chain among the ancestors; if it is the one before, so are all earlier.
        seen = [-1] * len(t)
        own = place.tolist()
        for i, found in enumerate(parents):
            latest = max((seen[p] for p in found.tolist()), default=-1)
            if own[i] >= 0:
                if latest != own[i] - 1:
                    before = describe(t, int(rows[own[i] - 1]))
                    fault(c, f"does not wait for {before} ({label} not in one chain)", [i])
                latest = own[i]
            seen[i] = latest


def chains(t: Tasks, streams: str) -> dict[str, np.ndarray]:
    """The rows that must be totally ordered by dependencies, by what they are."""
    moves = np.isin(t.kind, (COLLECTIVE, SEND, LOAD, STORE))
    kernels = t.kind == COMPUTE
    if streams == "one":
        moved = {"collectives, sends and copies": np.flatnonzero(moves)}
        return {"kernels": np.flatnonzero(kernels)} | moved
    found = {"kernels": np.flatnonzero(kernels & (t.slot < 0))}
    for label, kind in (("sends", SEND), ("loads", LOAD), ("stores", STORE)):
        found[label] = np.flatnonzero(t.kind == kind)
    for slot in np.unique(t.slot[t.kind == COLLECTIVE]):
        mine = ((t.kind == COLLECTIVE) | kernels) & (t.slot == slot)
        found[f"collectives of communicator {slot}"] = np.flatnonzero(mine)
    return found


def check_microbatches(c: RankClass) -> None:
    """What a row reads belongs to its own microbatch; only weights come from elsewhere."""
    t = c.tasks
    row = np.repeat(np.arange(len(t)), np.diff(t.data_ptr))
    within = t.microbatch[row] >= 0
    stranger = within & (t.microbatch[t.data] >= 0) & (t.microbatch[row] != t.microbatch[t.data])
    # FSDP2's pipelines gather again only what a forward has freed since the last backward.
    stranger &= ~makes_weights(t)[t.data]
    fault(c, "reads a value of another microbatch", row[stranger])
    # The stage before or after this one may be on the same rank: then nothing is sent. Stages
    # without tasks of a phase hand on what they get.
    forward = t.phase == PHASES.index("forward")
    low, high = np.sort([t.stage[row], t.stage[t.data]], axis=0)
    for phase in (forward, ~forward):
        there = np.unique(t.stage[phase])
        far = np.searchsorted(there, high) > np.searchsorted(there, low, "right")
        fault(c, "reads a value of another stage", row[within & far & phase[t.data]])
    step = t.phase == PHASES.index("optimizer")
    fault(c, "is of a microbatch", np.flatnonzero(step & (t.microbatch >= 0)))


def makes_weights(t: Tasks) -> np.ndarray:
    """Casts, gathers and slices that wait for no other tasks but such ones: of parameters."""
    ops = np.array([t.ops[i] for i in t.op])
    row = np.repeat(np.arange(len(t)), np.diff(t.data_ptr))
    found = np.isin(ops, ("cast", "all_gather", "slice"))
    while True:  # as many times as such tasks wait for each other in turn
        waits = np.bincount(row[~found[t.data]], minlength=len(t)) > 0
        if not (found & waits).any():
            return found
        found &= ~waits


def fault(c: RankClass, text: str, rows: Sequence[int] | np.ndarray) -> None:
    """Raise if there are such rows."""
    if len(rows):
        raise Broken(f"pipeline rank {c.pipeline_rank}: {describe(c.tasks, int(rows[0]))}: {text}")


# ---- all ranks, by class -------------------------------------------------------------------------


def check_ranks(program: Program) -> None:
    """Every rank is in one class."""
    ranks = np.concatenate([c.ranks for c in program.classes])
    if not np.array_equal(np.sort(ranks), np.arange(program.mesh.world_size)):
        raise Broken("the classes do not hold every rank once")


def check_groups(program: Program) -> None:
    """Groups are what their axes say, and their members issue the same collectives in one order."""
    groups = program.groups()
    if len({len(str(i)) for i in groups}) > 1:
        raise Broken("group ids differ in length")
    home = {int(r): nth for nth, c in enumerate(program.classes) for r in c.ranks}
    sequences: dict[tuple[int, int], bytes] = {}
    for nth, c in enumerate(program.classes):
        t = c.tasks
        for slot in range(len(program.communicators)):
            mine = np.flatnonzero((t.kind == COLLECTIVE) & (t.slot == slot))
            rows = np.stack([t.collective[mine], t.comm_bytes[mine], t.dtype[mine]])
            sequences[nth, slot] = rows.astype(np.int64).tobytes()
            here = program.group_of(slot)[c.ranks]
            if len(mine) and not np.isin(here, list(groups)).all():
                fault(c, "no group for a rank of this class", mine[:1])
            if not len(mine) and np.isin(here, list(groups)).any():
                raise Broken(
                    f"pipeline rank {c.pipeline_rank} is in groups of communicator "
                    f"{program.communicators[slot]} but issues nothing on it"
                )
    all_ids = [program.group_of(slot) for slot in range(len(program.communicators))]
    for slot, (who, ids) in enumerate(zip(program.communicators, all_ids, strict=True)):
        outside = others(program, who.axes)
        inside = ids > 0
        if who.only is None and not inside.all():
            raise Broken(f"communicator {who} leaves ranks out")
        for group in np.unique(ids[inside]):
            if int(group) not in groups:
                members = np.flatnonzero(ids == group)
                if any(sequences[home[r], slot] for r in members.tolist()):
                    raise Broken(f"group {group} ({who}) is used and not listed")
                continue
            members = groups[int(group)]
            if members != np.flatnonzero(ids == group).tolist() or len(members) < 2:
                raise Broken(f"group {group} ({who}) has members {members}")
            if members != np.flatnonzero(inside & (outside == outside[members[0]])).tolist():
                raise Broken(f"group {group} is not the ranks along {who}: {members}")
            if len({sequences[home[r], slot] for r in members}) > 1:
                raise Broken(f"members of group {group} ({who}) issue different collectives on it")
    for one, two in itertools.combinations(all_ids, 2):
        # ASTRA-sim tells the groups of a rank apart by their ids modulo 500 only.
        if ((one > 0) & (two > 0) & (one % 500 == two % 500)).any():
            raise Broken("two groups of a rank have the same id modulo 500")


def others(program: Program, axes: Sequence[str]) -> np.ndarray:
    """A number for each rank, equal for those that share all coordinates but those of `axes`."""
    rest = np.arange(program.mesh.world_size)
    found = np.zeros_like(rest)
    for name, size in program.mesh.axes:
        if name not in axes:
            at = rest % size
            if name == program.mesh.mirror and "mirror" in axes:
                at = np.minimum(at, size - 1 - at)  # replicas count as one
            found = found * size + at
        rest //= size
    return found


def check_messages(program: Program) -> None:
    """Sends and receives match one to one, and no two are alike."""
    keys: dict[int, np.ndarray] = {}
    for kind in (SEND, RECV):
        found = [np.empty((0, 4), dtype=np.int64)]
        for c in program.classes:
            t = c.tasks
            rows = np.flatnonzero(t.kind == kind)
            for slot in np.unique(t.slot[rows]):
                mine = rows[t.slot[rows] == slot]
                peers = program.peer_of(int(slot))[c.ranks]
                if (peers == c.ranks).any():
                    fault(c, "a message to itself", mine)
                ends = (c.ranks, peers) if kind == SEND else (peers, c.ranks)
                shape = (len(c.ranks), len(mine))
                tag, size = (
                    np.broadcast_to(t.tag[mine], shape),
                    np.broadcast_to(t.comm_bytes[mine], shape),
                )
                both = [np.broadcast_to(e[:, None], shape) for e in ends]
                found.append(np.stack([tag, *both, size], axis=-1).reshape(-1, 4).astype(np.int64))
        table = np.concatenate(found)
        keys[kind] = table[np.lexsort(table.T[::-1])]
    if not np.array_equal(keys[SEND], keys[RECV]):
        sent, received = (Counter(map(tuple, keys[k].tolist())) for k in (SEND, RECV))
        lost, missing = sent - received, received - sent
        raise Broken(
            f"(tag, from, to, bytes): {len(lost)} sends without a receive such as "
            f"{next(iter(lost), None)}, {len(missing)} receives without a send such as "
            f"{next(iter(missing), None)}"
        )
    labels = keys[SEND][:, :3]
    if len(labels) != len(np.unique(labels, axis=0)):
        raise Broken("two messages between the same ranks carry the same tag")


# ---- all ranks, running --------------------------------------------------------------------------

Node = tuple[int, int]  # rank, row
Key = tuple[str | int, ...]  # what rows that meet have in common


class World:
    """Every row of every rank, to be run."""

    def __init__(self, program: Program, streams: str = "one") -> None:
        self.program = program
        self.streams = streams
        self.tasks: list[Tasks] = [None] * program.mesh.world_size  # type: ignore[list-item]
        self.parents: list[list[list[int]]] = [[]] * program.mesh.world_size
        self.children: list[list[list[int]]] = [[]] * program.mesh.world_size
        self.kind: list[list[int]] = [[]] * program.mesh.world_size
        for c in program.classes:
            parents: list[list[int]] = [[] for _ in range(len(c.tasks))]
            children: list[list[int]] = [[] for _ in range(len(c.tasks))]
            for row, need in {(int(a), int(b)) for a, b in zip(*edges(c.tasks), strict=True)}:
                parents[row].append(need)
                children[need].append(row)
            kind = c.tasks.kind.tolist()
            for r in c.ranks.tolist():
                self.tasks[r], self.kind[r] = c.tasks, kind
                self.parents[r], self.children[r] = parents, children
        self.key: dict[Node, Key] = {}
        self.partners: dict[Key, list[Node]] = defaultdict(list)
        for node, key in self._keys():
            self.key[node] = key
            self.partners[key].append(node)
        sizes = {i: len(ranks) for i, ranks in program.groups().items()}
        self.needed = {k: sizes[k[1]] if k[0] == "group" else 2 for k in self.partners}

    def _keys(self) -> Iterator[tuple[Node, Key]]:
        """What the two or more rows that meet have in common."""
        p = self.program
        groups = [p.group_of(s).tolist() for s in range(len(p.communicators))]
        peers = [p.peer_of(s).tolist() for s in range(len(p.peers))]
        for c in p.classes:
            t = c.tasks
            moves = np.flatnonzero(np.isin(t.kind, (COLLECTIVE, SEND, RECV))).tolist()
            kind, slot, tag, size = (x.tolist() for x in (t.kind, t.slot, t.tag, t.comm_bytes))
            for r in c.ranks.tolist():
                count: Counter[int] = Counter()
                for i in moves:
                    if kind[i] == COLLECTIVE:
                        yield (r, i), ("group", groups[slot[i]][r], count[slot[i]])
                        count[slot[i]] += 1
                    else:
                        other = peers[slot[i]][r]
                        ends = (r, other) if kind[i] == SEND else (other, r)
                        yield (r, i), ("message", tag[i], *ends, size[i])

    def run(
        self, *, rendezvous: bool = False, jitter: int | None = None, slots: bool = False
    ) -> float:
        """Run to the end; the time it takes. Without `jitter` nothing takes time.

        With `slots` each rank has one for kernels and one for collectives and sends (one per stream
        where streams are separate): what is ready waits for its slot, the lowest row first.
        """
        return _Running(self, rendezvous, jitter, slots).run()


class _Running:
    def __init__(self, world: World, rendezvous: bool, jitter: int | None, slots: bool) -> None:
        self.world, self.rendezvous, self.slots = world, rendezvous, slots
        self.random = random.Random(jitter) if jitter is not None else None
        self.pending = [[len(p) for p in parents] for parents in world.parents]
        self.ready: list[dict[object, list[int]]] = [defaultdict(list) for _ in world.tasks]
        self.busy: dict[tuple[int, object], int] = {}
        self.issued: set[Node] = set()
        self.done: set[Node] = set()
        self.arrived: Counter[Key] = Counter()
        self.events: list[tuple[float, int, list[Node]]] = []
        self.now = 0.0

    def run(self) -> float:
        for rank, pending in enumerate(self.pending):
            for row, n in enumerate(pending):
                if not n:
                    heapq.heappush(self.ready[rank][self.slot(rank, row)], row)
            self.issue(rank)
        while self.events:
            self.now, _, nodes = heapq.heappop(self.events)
            for node in nodes:
                self.complete(node)
            for rank in {r for r, _ in nodes}:
                self.issue(rank)
        total = sum(len(t) for t in self.world.tasks)
        if len(self.done) < total:
            raise Broken(
                f"deadlock: {total - len(self.done)} of {total} rows never end\n{self.why()}"
            )
        return self.now

    def slot(self, rank: int, row: int) -> object:
        """What the row holds while it runs; receives hold nothing."""
        kind = self.world.kind[rank][row]
        if not self.slots or kind == RECV:
            return None
        if kind == COMPUTE or self.world.streams == "one":
            return min(kind, COLLECTIVE)
        return ("stream", int(self.world.tasks[rank].slot[row]) if kind == COLLECTIVE else -1)

    def issue(self, rank: int) -> None:
        """Start all that can start on a rank."""
        for slot, rows in self.ready[rank].items():
            while rows and (slot is None or (rank, slot) not in self.busy):
                row = heapq.heappop(rows)
                if slot is not None:
                    self.busy[rank, slot] = row
                self.start((rank, row))

    def start(self, node: Node) -> None:
        self.issued.add(node)
        rank, row = node
        kind = self.world.kind[rank][row]
        if kind in (COMPUTE, LOAD, STORE) or (kind == SEND and not self.rendezvous):
            self.end_later([node])
            return
        key = self.world.key[node]
        self.arrived[key] += 1
        if self.arrived[key] == self.world.needed[key]:
            # An eager send has long ended when it counts as arrived; only the receive is left.
            late = kind == RECV and not self.rendezvous
            self.end_later([node] if late else self.world.partners[key])

    def end_later(self, nodes: list[Node]) -> None:
        duration = 0.0
        if self.random:
            duration = self.random.choice((1, 10, 100)) * (0.01 + self.random.random())
        heapq.heappush(self.events, (self.now + duration, len(self.issued), nodes))

    def complete(self, node: Node) -> None:
        rank, row = node
        self.done.add(node)
        slot = self.slot(rank, row)
        if slot is not None:
            del self.busy[rank, slot]
        if self.world.kind[rank][row] == SEND and not self.rendezvous:
            key = self.world.key[node]
            self.arrived[key] += 1
            if self.arrived[key] == self.world.needed[key]:
                self.end_later([n for n in self.world.partners[key] if n != node])
        pending = self.pending[rank]
        for child in self.world.children[rank][row]:
            pending[child] -= 1
            if not pending[child]:
                heapq.heappush(self.ready[rank][self.slot(rank, child)], child)

    def why(self) -> str:
        """Who waits for whom, from one row to the next until the circle closes."""
        node = next(
            (rank, row)
            for rank, t in enumerate(self.world.tasks)
            for row in range(len(t))
            if (rank, row) not in self.done
        )
        lines: list[str] = []
        seen: set[Node] = set()
        while True:
            text, other = self.blame(node)
            lines.append(f"  rank {node[0]}: {describe(self.world.tasks[node[0]], node[1])} {text}")
            seen.add(node)
            if other is None or other in seen:
                end = (
                    "which is never sent" if other is None else f"and so in a circle of {len(seen)}"
                )
                return "\n".join([*lines, f"  {end}"])
            node = other

    def blame(self, node: Node) -> tuple[str, Node | None]:
        """What a row that has not ended waits for."""
        rank, row = node
        if node in self.issued:
            partners = self.world.partners[self.world.key[node]]
            other = next((n for n in partners if n not in self.issued), None)
            return f"waits for its partner on rank {other[0] if other else '?'}", other
        parent = next(
            (p for p in sorted(self.world.parents[rank][row]) if (rank, p) not in self.done), None
        )
        if parent is not None:
            return "waits for an earlier row", (rank, parent)
        return "is ready, but its slot is taken", (rank, self.busy[rank, self.slot(rank, row)])
