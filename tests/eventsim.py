"""The slow truth for timelines: every rank by itself, event by event, in exact fractions.

Nothing here is shared with `stagewright.time.simulate` but the program: rules are written again, as
a framework's user would say them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from stagewright.algebra.layout import MIRROR
from stagewright.arrays import Bool, Int
from stagewright.program.columns import COLLECTIVES, PHASES, Program, TaskKind, Tasks
from stagewright.run.sections.execution import Execution


@dataclass
class Rank:
    """What one rank has to do, and how far it is."""

    kind: list[TaskKind]
    duration: list[int]
    queues: list[list[int]]  # per stream its rows, in order
    needs: list[set[int]]
    partner: list[object]  # group, or (sender, receiver, axis, tag)
    factor: Fraction
    head: list[int] = field(default_factory=list)
    stream: dict[int, int] = field(default_factory=dict)
    launches: list[int] = field(default_factory=list)  # rows in the order of the host
    cost: list[int] = field(default_factory=list)  # of launching a row
    joined: list[bool] = field(default_factory=list)  # rows whose end the host waits for
    launching: int = 0  # of launches


def simulate(
    program: Program,
    ticks: Sequence[Int],
    how: Execution,
    factors: Mapping[int, float],
    hosts: Sequence[tuple[Int, Bool]] | None = None,
) -> list[tuple[list[Fraction], list[Fraction]]]:
    """Start and end of every row of every rank.

    `hosts`: by class and row the ticks of a launch, and whether the host waits for the row's end.
    """
    ranks: list[Rank] = [None] * program.mesh.world_size  # type: ignore[list-item]
    for nth, (of, duration) in enumerate(zip(program.classes, ticks, strict=True)):
        queues, needs, rows, of_weights = issued(program, of.tasks, how)
        cost, joined = hosts[nth] if hosts else ([], [])
        for r in of.ranks.tolist():
            ranks[r] = Rank(
                [TaskKind(k) for k in of.tasks.kind],
                duration.tolist(),
                queues,
                needs,
                _partners(program, of.tasks, r, of_weights),
                Fraction(factors.get(r, 1)),
                [0] * len(queues),
                {row: s for s, queue in enumerate(queues) for row in queue},
                launches=rows if hosts else [],
                cost=[int(ticks) for ticks in cost],
                joined=[bool(flag) for flag in joined],
            )
    return Clock(ranks).run()


class Clock:
    """The event loop."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.start = [[Fraction(-1)] * len(r.kind) for r in ranks]
        self.end = [[Fraction(-1)] * len(r.kind) for r in ranks]
        self.missing = [[len(n) + bool(r.launches) for n in r.needs] for r in ranks]
        self.users: list[list[list[int]]] = []
        for r in ranks:
            users: list[list[int]] = [[] for _ in r.kind]
            for row, needs in enumerate(r.needs):
                for need in needs:
                    users[need].append(row)
            self.users.append(users)
        self.events: list[tuple[Fraction, int, str, int, int]] = []
        self.count = itertools.count()
        self.here: dict[object, list[tuple[int, int]]] = defaultdict(list)  # waiting at a group
        self.size: dict[object, int] = defaultdict(int)
        for r in ranks:
            for group in {
                p for k, p in zip(r.kind, r.partner, strict=True) if k == TaskKind.COLLECTIVE
            }:
                self.size[group] += 1
        self.sent: dict[object, list[Fraction]] = defaultdict(list)  # arrivals not yet received
        self.posted: dict[object, list[tuple[int, int, Fraction]]] = defaultdict(list)
        self.begun: set[tuple[int, int]] = set()
        self.receives = [[i for i, k in enumerate(r.kind) if k == TaskKind.RECV] for r in ranks]

    def run(self) -> list[tuple[list[Fraction], list[Fraction]]]:
        now = Fraction(0)
        for r in range(len(self.ranks)):
            self.launch(r, now)
            self.look(r, now)
        while self.events:
            now, _, what, r, row = heapq.heappop(self.events)
            rank = self.ranks[r]
            if what == "launch":
                self.missing[r][row] -= 1
                if not rank.joined[row]:
                    self.launch(r, now)
                self.look(r, now)
                continue
            if rank.kind[row] == TaskKind.SEND:
                self.arrive(rank.partner[row], now)
            self.finish(r, row, now)
        for r, ends in enumerate(self.end):
            assert min(ends) >= 0, f"rank {r} never ends row {ends.index(Fraction(-1))}"
        return list(zip(self.start, self.end, strict=True))

    def push(self, at: Fraction, what: str, r: int, row: int) -> None:
        heapq.heappush(self.events, (at, next(self.count), what, r, row))

    def finish(self, r: int, row: int, now: Fraction) -> None:
        self.end[r][row] = now
        rank = self.ranks[r]
        if row in rank.stream:
            rank.head[rank.stream[row]] += 1
        for user in self.users[r][row]:
            self.missing[r][user] -= 1
        if rank.launches and rank.joined[row]:
            self.launch(r, now)
        self.look(r, now)

    def launch(self, r: int, now: Fraction) -> None:
        """The host begins its next launch."""
        rank = self.ranks[r]
        if rank.launching < len(rank.launches):
            row = rank.launches[rank.launching]
            rank.launching += 1
            self.push(now + rank.cost[row], "launch", r, row)

    def look(self, r: int, now: Fraction) -> None:
        """Begin all that can."""
        rank = self.ranks[r]
        for s, queue in enumerate(rank.queues):
            if rank.head[s] < len(queue):
                row = queue[rank.head[s]]
                if (r, row) not in self.begun and not self.missing[r][row]:
                    self.begun.add((r, row))
                    self.begin(r, row, now)
        for row in [x for x in self.receives[r] if not self.missing[r][x]]:
            self.receives[r].remove(row)
            self.start[r][row] = now
            key = rank.partner[row]
            if self.sent[key]:
                self.sent[key].pop(0)
                self.push(now, "receive", r, row)
            else:
                self.posted[key].append((r, row, now))

    def begin(self, r: int, row: int, now: Fraction) -> None:
        rank = self.ranks[r]
        if rank.kind[row] == TaskKind.COMPUTE:
            self.start[r][row] = now
            self.push(now + round(rank.duration[row] * rank.factor), "kernel", r, row)
        elif rank.kind[row] in (TaskKind.SEND, TaskKind.LOAD, TaskKind.STORE):
            self.start[r][row] = now
            self.push(now + rank.duration[row], "send", r, row)
        else:
            group = rank.partner[row]
            self.here[group].append((r, row))
            if len(self.here[group]) == self.size[group]:
                for member, at in self.here.pop(group):
                    self.start[member][at] = now
                    self.push(now + self.ranks[member].duration[at], "collective", member, at)

    def arrive(self, key: object, now: Fraction) -> None:
        if self.posted[key]:
            r, row, _ = self.posted[key].pop(0)
            self.push(now, "receive", r, row)
        else:
            self.sent[key].append(now)


def _partners(program: Program, tasks: Tasks, rank: int, of_weights: set[int]) -> list[object]:
    result: list[object] = []
    for row, kind in enumerate(tasks.kind.tolist()):
        slot = int(tasks.slot[row])
        if kind == TaskKind.COLLECTIVE:
            group = int(program.group_of(slot)[rank])
            result.append(("group", group, row in of_weights))
        elif kind not in (TaskKind.SEND, TaskKind.RECV):
            result.append(None)
        else:
            peer = int(program.peer_of(slot)[rank])
            ends = (rank, peer) if kind == TaskKind.SEND else (peer, rank)
            result.append((*ends, program.peers[slot].axis, int(tasks.tag[row])))
    return result


def issued(
    program: Program, tasks: Tasks, how: Execution
) -> tuple[list[list[int]], list[set[int]], list[int], set[int]]:
    """Streams, each a list of rows, kernels first; what each row needs; all rows in order.

    Also collectives of weights and gradients, which have communicators of their own where they
    share ranks with activations.
    """
    size = len(tasks)
    needs = [
        set(tasks.data[tasks.data_ptr[i] : tasks.data_ptr[i + 1]].tolist()) for i in range(size)
    ]
    one = how.streams == "one"
    moved, casts = set[int](), dict[int, list[int]]()
    if how.overlap_param_gather and not one:
        moved, casts = _next_forward(tasks, needs)
    data = [set(n) for n in needs]
    empty = [not n for n in needs]
    users: list[list[int]] = [[] for _ in range(size)]
    for row, some in enumerate(needs):
        for need in some:
            users[need].append(row)
    kind = [TaskKind(k) for k in tasks.kind]
    phase = [PHASES[p] for p in tasks.phase]

    def reduction(row: int) -> bool:
        return (
            kind[row] == TaskKind.COLLECTIVE
            and phase[row] == "backward"
            and COLLECTIVES[tasks.collective[row]] in ("all_reduce", "reduce_scatter")
        )

    once = [phase[r] == "backward" and tasks.microbatch[r] < 0 for r in range(size)]
    again = {r for r in range(size) if once[r] and kind[r] == TaskKind.COLLECTIVE}

    # Sums of reduced gradients: no kernel of the model reads them.
    def gradient(r: int) -> bool:
        return all(u in aside or u in again or phase[u] == "optimizer" for u in users[r])

    aside = {
        r
        for r in range(size)
        if kind[r] == TaskKind.COMPUTE and phase[r] == "backward" and needs[r]
    }
    changed = True
    while changed and not one:
        bad = {
            r
            for r in aside
            if not all(reduction(n) or n in aside for n in needs[r]) or not gradient(r)
        }
        changed = bool(bad)
        aside -= bad
    if one:
        aside = set()
    reduced = again | aside | {r for r in range(size) if reduction(r) and gradient(r)}
    late: set[int] = set()
    for r in range(size):
        # Sums over copies of a tensor, which only the optimizer reads.
        of_copies = reduction(r) and _degree(program, tasks, r) in ("tp", "pp")
        of_copies &= all(u in aside or phase[u] == "optimizer" for u in users[r])
        after = of_copies or data[r] & (reduced | late) or "dp" in how.no_overlap
        if once[r] and not one and after:
            late.add(r)
    early = [r for r in range(size) if phase[r] != "optimizer" and r not in late]
    rows = early + sorted(late) + [r for r in range(size) if phase[r] == "optimizer"]
    if not one:
        rows = _prefetched(tasks, kind, phase, needs, aside, rows, how, moved, casts)

    def of_microbatch(r: int) -> bool:
        """A gradient of a weight, not one of keys and values, that a microbatch reduces."""
        along = _degree(program, tasks, r)
        return along == "dp" or (along == "cp" and gradient(r))

    collectives = [r for r in range(size) if kind[r] == TaskKind.COLLECTIVE]
    of_weights = {
        r
        for r in collectives
        if r in again
        or (reduction(r) and of_microbatch(r))
        or (
            COLLECTIVES[tasks.collective[r]] == "all_gather"
            and (phase[r] == "optimizer" or tasks.data_ptr[r] == tasks.data_ptr[r + 1])
        )
    }
    shared = {int(tasks.slot[r]) for r in collectives if r not in of_weights}
    of_weights = {r for r in of_weights if int(tasks.slot[r]) in shared and not one}

    def stream(r: int) -> object:
        if kind[r] == TaskKind.COMPUTE and r not in aside and (one or tasks.slot[r] < 0):
            return "kernels"
        if kind[r] == TaskKind.RECV:
            return None
        if one:
            return "communication"
        if r in aside:
            return stream(min(data[r]))
        if r in of_weights:
            return "weights", int(tasks.slot[r])
        if kind[r] == TaskKind.COMPUTE:  # a small kernel on the stream of a communicator
            return TaskKind.COLLECTIVE, int(tasks.slot[r])
        return kind[r], int(tasks.slot[r])

    queues: dict[object, list[int]] = {"kernels": []}
    last = -1
    main = -1  # the last of the kernels and of what blocks them
    # Of reductions and of stores: the last one of each stream behind the last kernel, those before
    # that, and what kernels wait for, since others are to begin.
    lots: list[dict[object, int]] = [{}, {}]
    done: list[dict[object, int]] = [{}, {}]
    awaited = [set[int](), set[int]()]
    for r in rows:
        s = stream(r)
        reduces = reduction(r) and tasks.microbatch[r] >= 0
        reduces = reduces and of_microbatch(r)
        if (reduces or kind[r] == TaskKind.STORE) and not one:
            if not lots[reduces]:
                awaited[reduces] = set(done[reduces].values())
            lots[reduces][s] = r
        if s is not None:
            queues.setdefault(s, []).append(r)
        blocks = kind[r] != TaskKind.COMPUTE and _blocks(program, tasks, r, how)
        if s == "kernels" or blocks:
            if main >= 0:
                needs[r].add(main)
            main = r
        if s == "kernels":
            last = r
            needs[r] |= awaited[0] | awaited[1]
            done = [before | lot for before, lot in zip(done, lots, strict=True)]
            lots = [{}, {}]
        elif kind[r] != TaskKind.COMPUTE and (empty[r] or kind[r] == TaskKind.LOAD) and last >= 0:
            needs[r] |= {last, *awaited[0], *awaited[1]}
    return [*queues.values()], needs, rows, of_weights


DEGREES = {
    "dp": ("dp", "edp", MIRROR), "pp": ("pp",), "ep": ("ep",), "cp": ("cp",), "tp": ("tp", "etp"),
}  # fmt: skip
"""What tasks communicate along, and the groups of these; the first that a task has part in.
`MIRROR`: replicas of a stage."""


def _blocks(program: Program, tasks: Tasks, row: int, how: Execution) -> bool:
    return how.streams != "one" and _degree(program, tasks, row) in how.no_overlap


def _degree(program: Program, tasks: Tasks, row: int) -> str:
    """The degree along which a task communicates."""
    slot = int(tasks.slot[row])
    if tasks.kind[row] in (TaskKind.COMPUTE, TaskKind.LOAD, TaskKind.STORE):
        return ""
    exchange = False
    if tasks.kind[row] == TaskKind.COLLECTIVE:
        groups = program.degrees_of(slot)
        exchange = COLLECTIVES[tasks.collective[row]] == "all_to_all"
    else:
        groups = program.mesh.degrees((program.peers[slot].axis,))
    # Ranks may be a group of dp and one of ep: tokens are exchanged along ep.
    names = ["ep" if exchange and "ep" in same else same[0] for same in groups]
    own = {program.mesh.degree_of(name) for name in names}  # `decode tp` is a tp
    return next((degree for degree, parts in DEGREES.items() if own & {*parts}), "")


def _next_forward(tasks: Tasks, needs: list[set[int]]) -> tuple[set[int], dict[int, list[int]]]:
    """Gathers of updated parameters, to be waited for by the kernels that use these first.

    Also by kernel the casts of weights that it comes after: weights are cast once they are there.
    """
    forward = [
        r
        for r in range(len(tasks))
        if tasks.kind[r] == TaskKind.COMPUTE and PHASES[tasks.phase[r]] == "forward"
    ]
    moved = set[int]()
    casts: dict[int, list[int]] = defaultdict(list)
    for stage in {int(tasks.stage[r]) for r in forward}:
        mine = [r for r in forward if tasks.stage[r] == stage and tasks.microbatch[r] >= 0]
        mine = [r for r in mine if tasks.microbatch[r] == tasks.microbatch[mine[0]]]
        block: list[int] = []  # of each of mine, the first of its block
        for before, r in zip([-1, *mine], mine, strict=False):
            same = before >= 0 and tasks.layer[before] == tasks.layer[r]
            block.append(block[-1] if same else r)
        for cast in forward:
            if tasks.stage[cast] == stage and tasks.microbatch[cast] < 0:
                first = next(i for i, r in enumerate(mine) if cast in needs[r])
                casts[block[first]].append(cast)
        begin = 0
        for row in range(len(tasks)):
            if (
                tasks.stage[row] != stage
                or PHASES[tasks.phase[row]] != "optimizer"
                or COLLECTIVES[tasks.collective[row]] != "all_gather"
                or tasks.kind[row] != TaskKind.COLLECTIVE
            ):
                continue
            layers = [tasks.layer[r] for r in mine[begin:]]
            if tasks.layer[row] not in layers:
                continue  # nothing computes with these
            begin += layers.index(tasks.layer[row])
            for user in (mine[begin], *casts.get(mine[begin], ())):
                needs[user].add(row)
            needs[row].clear()
            moved.add(row)
    return moved, casts


def _prefetched(tasks, kind, phase, needs, aside, rows, how, moved, casts):  # type: ignore[no-untyped-def]
    cast = {c for some in casts.values() for c in some}
    kernels = [r for r in rows if kind[r] == TaskKind.COMPUTE and r not in aside and r not in cast]
    gathers = [
        r
        for r in rows
        if kind[r] == TaskKind.COLLECTIVE
        and COLLECTIVES[tasks.collective[r]] == "all_gather"
        and not needs[r]
        and (how.prefetch != 1 or r in moved)
        and any(r in needs[k] for k in kernels)
    ]
    rest = [r for r in rows if r not in gathers and r not in cast]
    blocks: list[tuple[object, object, int]] = []  # (action, block, first kernel)
    for r in kernels:
        action = (tasks.stage[r], tasks.microbatch[r], phase[r] != "forward")
        if not blocks or blocks[-1][:2] != (action, tasks.layer[r]):
            blocks.append((action, tasks.layer[r], r))
    before: dict[int, list[int]] = defaultdict(list)
    for g in gathers:
        user = rest.index(next(r for r in rest if r in kernels and g in needs[r]))
        nth = max(i for i, b in enumerate(blocks) if rest.index(b[2]) <= user)
        to = nth
        while to > nth - how.prefetch and to > 0 and blocks[to - 1][0] == blocks[nth][0]:
            to -= 1
        before[blocks[to][2]].append(g)
    return [x for r in rest for x in (*before.get(r, ()), *casts.get(r, ()), r)]
