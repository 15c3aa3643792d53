"""Matches the collectives of groups and the messages of pairs; mismatches become findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.check.files.world import Match, World
from stagewright.program.columns import TaskKind

ALL = 0  # the group of all ranks


def check_world(world: World) -> Match:
    """Check groups and messages; errors go into the world's findings."""
    barrier, arrivals = _check_groups(world)
    send, recv = _check_messages(world)
    return Match(send, recv, barrier, arrivals)


# ---- groups --------------------------------------------------------------------------------------


class _Members:
    """The (rank, slot) pairs that use each group."""

    def __init__(self, world: World) -> None:
        rank, group, slot = world.pairs(TaskKind.COLLECTIVE)
        by_group = np.argsort(group, kind="stable")
        self.rank, self.group, self.slot = rank[by_group], group[by_group], slot[by_group]
        self.used, self.begin = np.unique(self.group, return_index=True)

    def of(self, group: int) -> tuple[Int, Int]:
        """Ranks that use a group, and their slots."""
        rows = slice(*np.searchsorted(self.group, [group, group + 1]).tolist())
        return self.rank[rows], self.slot[rows]

    def differ(self, values: Int) -> Int:
        """Indices of the groups in which members have different values."""
        if not len(values):
            return np.zeros(0, np.int64)
        lowest, highest = (f.reduceat(values, self.begin) for f in (np.minimum, np.maximum))
        return np.flatnonzero(lowest != highest)


def _check_groups(world: World) -> tuple[Int, Int]:
    """Check that members of groups agree; returns `barrier` and `arrivals` of Match."""
    members = _Members(world)
    if world.groups is None:
        groups = {group: np.sort(members.of(group)[0]) for group in members.used.tolist()}
    else:
        groups = dict(world.groups)
    groups[ALL] = np.arange(world.size)
    _check_members(world, groups, members)
    exact, unordered, loose = _sequences(world)
    for nth in members.differ(exact[members.slot]).tolist():
        group = int(members.used[nth])
        rank, slot = members.of(group)
        if loose[slot].any() and len(np.unique(unordered[slot])) == 1:
            world.findings.warn(
                "loose-group",
                f"group {group}: nothing orders its collectives on rank {rank[loose[slot]][0]}: "
                "which of them meet is left to timing",
            )
        else:
            _report_difference(world, group, rank, slot, exact[slot])
    return _barriers(world, members, loose)


def _check_members(world: World, groups: Mapping[int, Int], members: _Members) -> None:
    """Check that every group in use exists, has the rank, and is used by all its members."""
    rank, group, slot = members.rank, members.group, members.slot
    known_groups = np.array(sorted(g for g in members.used.tolist() if g in groups), np.int64)

    def first(index: int) -> str:
        return (
            f"{world.describe(int(world.of_slot[int(slot[index])][0]))} is on group {group[index]}"
        )

    exists = np.isin(group, known_groups)
    world.report(
        "no-group",
        np.flatnonzero(~exists),
        lambda index: f"rank {rank[index]}: {first(index)}, which the file of groups does not have",
    )
    if not len(known_groups):
        return
    lists = [groups[g] for g in known_groups.tolist()]
    place = np.repeat(np.arange(len(known_groups)), [len(member_ranks) for member_ranks in lists])
    listed = np.unique(place * world.size + np.concatenate(lists))
    world.report(
        "one-member",
        known_groups[np.bincount(listed // world.size, minlength=len(known_groups)) < 2],
        lambda group_id: f"group {group_id} has one member, at which a collective on it hangs",
    )
    using = np.searchsorted(known_groups, group) * world.size + rank
    world.report(
        "not-member",
        np.flatnonzero(exists & ~np.isin(using, listed)),
        lambda index: f"rank {rank[index]}: {first(index)}, which does not have this rank",
    )
    idle: Int = np.setdiff1d(listed, using[exists])

    def who_waits(key: int) -> str:
        group_id = int(known_groups[key // world.size])
        ranks, slots = members.of(group_id)
        return (
            f"group {group_id}: rank {key % world.size} is a member but issues nothing on it, "
            f"while rank {ranks[0]} waits in {world.describe(int(world.of_slot[int(slots[0])][0]))}"
        )

    world.report("idle-member", idle[world.part_of[idle % world.size] >= 0], who_waits)


def _sequences(world: World) -> tuple[Int, Int, Bool]:
    """Three columns by slot: a number for its sequence of collectives, a number for the same in any
    order, and the mask of slots whose order dependencies leave open (loose)."""
    exact, unordered = np.zeros((2, len(world.of_slot)), np.int64)
    numbers: dict[bytes, int] = {}
    for slot_number, events in enumerate(world.of_slot):
        if len(events) and world.kind[events[0]] == TaskKind.COLLECTIVE:
            rows = np.stack([world.op[events], world.bytes[events]])
            exact[slot_number] = numbers.setdefault(rows.tobytes(), len(numbers))
            rows = rows[:, np.lexsort(rows)]
            unordered[slot_number] = numbers.setdefault(rows.tobytes(), len(numbers))
    loose = np.zeros(len(world.of_slot), bool)
    for part, first in zip(world.parts, world.first_slot[:-1].tolist(), strict=True):
        loose[[first + slot for slot in part.exchange.loose]] = True
    return exact, unordered, loose


def _report_difference(world: World, group: int, rank: Int, slot: Int, sequence: Int) -> None:
    """Report the first collective in which a member differs from most members."""
    most_common = np.bincount(sequence).argmax()
    examples = [
        int(np.flatnonzero(mask)[0]) for mask in (sequence == most_common, sequence != most_common)
    ]
    one, two = (world.of_slot[int(slot[index])] for index in examples)
    common_length = min(len(one), len(two))
    columns = (world.op, world.bytes)
    differing = np.flatnonzero(
        np.any([c[one[:common_length]] != c[two[:common_length]] for c in columns], axis=0)
    )
    at = int(differing[0]) if len(differing) else common_length
    texts = [
        f"{world.describe(int(events[at]))} on rank {rank[index]}"
        if at < len(events)
        else f"missing on rank {rank[index]}, which issues only {len(events)}"
        for index, events in zip(examples, (one, two), strict=True)
    ]
    text = f"group {group}: its collective {at + 1} is {texts[0]}, but {texts[1]}"
    world.findings.error("collectives-differ", text)


def _barriers(world: World, members: _Members, loose: Bool) -> tuple[Int, Int]:
    """`barrier` and `arrivals` of Match; slots whose groups share slots form one barrier.

    Where the groups of a part's ranks reach into different parts, more events wait for each other
    than have to: if this run completes, so does every run.
    """
    barrier = np.full(len(world.slot), -1)
    heads = np.repeat(members.slot[members.begin], np.diff([*members.begin, len(members.slot)]))
    root = list(range(len(world.of_slot)))
    for one, two in np.unique(np.stack([heads, members.slot], axis=1), axis=0).tolist():
        a, b = _root(root, one), _root(root, two)
        root[max(a, b)] = min(a, b)
    together: dict[int, list[int]] = {}
    for slot in np.unique(members.slot).tolist():
        together.setdefault(_root(root, slot), []).append(slot)
    arrivals: list[int] = []
    for slots in together.values():
        if len(slots) == 1:  # all members run the same program, in step
            continue
        number, any_order = len(arrivals), loose[slots].any()
        for slot in slots:
            events = world.of_slot[slot]
            if any_order:  # equal collectives match, in their order
                events = events[np.lexsort((events, world.bytes[events], world.op[events]))]
            barrier[events] = number + np.arange(len(events))
        arrivals += [len(slots)] * max(len(world.of_slot[slot]) for slot in slots)
    return barrier, np.array(arrivals, np.int64)


def _root(root: list[int], slot: int) -> int:
    while root[slot] != slot:
        root[slot] = slot = root[root[slot]]
    return slot


# ---- messages ------------------------------------------------------------------------------------


def _check_messages(world: World) -> tuple[Int, Int]:
    """Pairs of sends and receives that match."""
    (sent, send_slot), (received, recv_slot) = (
        _ends(world, k) for k in (TaskKind.SEND, TaskKind.RECV)
    )
    _report_unanswered(world, sent, send_slot, received, TaskKind.SEND)
    _report_unanswered(world, received, recv_slot, sent, TaskKind.RECV)
    both = np.intersect1d(sent, received)
    faces = np.stack(
        [send_slot[np.searchsorted(sent, both)], recv_slot[np.searchsorted(received, both)]]
    )
    channels, example = np.unique(faces, axis=1, return_index=True)
    return _check_channels(world, channels, both[example])


def _ends(world: World, kind: TaskKind) -> tuple[Int, Int]:
    """Pairs of source and target as one ascending number each, and the slot of the present rank."""
    rank, partner, slot = world.pairs(kind)

    def text(index: int) -> str:
        what = world.describe(int(world.of_slot[int(slot[index])][0]))
        return (
            f"rank {rank[index]}: {what}: there is no rank {partner[index]}, of {world.size} ranks"
        )

    inside = partner < world.size
    world.report("no-rank", np.flatnonzero(~inside), text)
    inside[inside] = world.part_of[partner[inside]] >= 0
    rank, partner, slot = rank[inside], partner[inside], slot[inside]
    ends = (rank, partner) if kind is TaskKind.SEND else (partner, rank)
    key = ends[0] * world.size + ends[1]
    order = np.argsort(key)
    return key[order], slot[order]


def _report_unanswered(world: World, keys: Int, slot: Int, others: Int, kind: TaskKind) -> None:
    """Report pairs of ranks that only send, or only receive; `keys`, `others` as in `_ends`."""
    sends = kind is TaskKind.SEND

    def text(index: int) -> str:
        source, target = divmod(int(keys[index]), world.size)
        rank, other = (source, target) if sends else (target, source)
        what = world.describe(int(world.of_slot[int(slot[index])][0]))
        back = "receives nothing from it" if sends else "sends it nothing"
        return f"rank {rank}: {what} {'to' if sends else 'from'} rank {other}, which {back}"

    unanswered = np.flatnonzero(~np.isin(keys, others))
    world.report("lost-send" if sends else "no-send", unanswered, text)


def _check_channels(world: World, channels: Int, example: Int) -> tuple[Int, Int]:
    """Messages between two slots that name each other, matched by tag and size, in order."""
    send, sent = _table(world, channels[0])
    recv, received = _table(world, channels[1])
    if np.array_equal(sent, received):
        return send, recv
    for channel, slots in enumerate(channels.T.tolist()):
        if not np.array_equal(sent[1:, sent[0] == channel], received[1:, received[0] == channel]):
            source, target = divmod(int(example[channel]), world.size)
            sends, recvs = world.of_slot[int(slots[0])], world.of_slot[int(slots[1])]
            _report_unmatched(world, source, target, sends, recvs)
    waiting: dict[tuple[int, ...], list[int]] = {}
    for event, key in zip(recv.tolist()[::-1], received.T.tolist()[::-1], strict=True):
        waiting.setdefault(tuple(key), []).append(event)
    pairs = [
        (event, waiting[tuple(key)].pop())
        for event, key in zip(send.tolist(), sent.T.tolist(), strict=True)
        if waiting.get(tuple(key))
    ]
    matched = np.array(pairs, np.int64).reshape(-1, 2)
    return matched[:, 0], matched[:, 1]


def _table(world: World, slots: Int) -> tuple[Int, Int]:
    """The events of some slots, and their (nth slot, tag, size) as rows; ascending by these."""
    lists = [world.of_slot[int(slot)] for slot in slots]
    events = np.concatenate((np.zeros(0, np.int64), *lists))
    channel = np.repeat(np.arange(len(lists)), [len(slot_events) for slot_events in lists])
    order = np.lexsort((events, world.bytes[events], world.tag[events], channel))
    events = events[order]
    return events, np.stack([channel[order], world.tag[events], world.bytes[events]])


def _report_unmatched(world: World, source: int, target: int, sends: Int, recvs: Int) -> None:
    """Report sends and receives between two ranks that differ in tag or size."""

    def keys(events: Int) -> list[tuple[int, int]]:
        return list(zip(world.tag[events].tolist(), world.bytes[events].tolist(), strict=True))

    sent, received = Counter(keys(sends)), Counter(keys(recvs))
    lost, missing = sent - received, received - sent
    unmatched = [int(e) for e, key in zip(sends, keys(sends), strict=True) if lost[key]]
    if not missing:
        first = world.describe(unmatched[0])
        text = f"rank {source}: {first} to rank {target}, which receives no such one"
        world.findings.error("lost-send", text, lost.total())
        return
    event = next(int(e) for e, key in zip(recvs, keys(recvs), strict=True) if missing[key])
    text = f"rank {target}: {world.describe(event)} from rank {source}, which sends no such message"
    similar = [e for e in unmatched if world.tag[e] == world.tag[event]]
    similar += [e for e in unmatched if world.bytes[e] == world.bytes[event]]
    if similar:
        text += f", but a {world.describe(similar[0])}"
    world.findings.error("no-send", text, missing.total())
