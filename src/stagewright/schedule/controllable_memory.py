"""V-Half and V-Min: a building block, repeated and pushed together (arXiv 2405.15362).

A rank runs four passes of each microbatch, forward and backward of its two stages, and two weight
gradients: six slots of time if all take equally long. A building block has the slots of one
microbatch's passes on every rank; each further microbatch has the same slots, six later. The number
of slots between a forward and the weight gradient of its stage gives the microbatches alive.

Slots are free before the first microbatch returns, and after the last has entered: passes move
there as long as no rank holds more than before. The orders are those of the authors' program
(github.com/sail-sg/zero-bubble 3fd87fd, zbv_greedy.py) for passes that take equally long.

>>> from stagewright.schedule.text import text
>>> print(text(v_min(pp=2, microbatches=2)))
rank 0  0F0 0F1 .   3F0 3I0 3W0 .   0I0 0W0 3F1 3I1 3W1 .   0I1 0W1
rank 1  .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from stagewright.schedule.actions import Action, Order

_PERIOD = 6
_PASSES = ("F", "F", "I", "I")  # of the first stage, twice of the second, of the first
_FIRST_FORWARD, _SECOND_FORWARD, _SECOND_BACKWARD, _FIRST_BACKWARD, _WEIGHT = range(5)

_Rank = list[list[int]]  # slots by pass and microbatch; after the passes, those of all W


def v_half(pp: int, microbatches: int, *, late: int = 0) -> Order:
    """V-Half: about half the memory of 1F1B's first rank, on all ranks (arXiv 2405.15362, 4.1).

    `late`: further microbatches between the last stage's forward and backward of a microbatch.

    >>> v_half(1, 2)
    ((0F0, 1F0, 1I0, 1W0, 0I0, 0W0, 0F1, 1F1, 1I1, 0I1, 1W1, 0W1),)
    """
    gap = (0 if pp % 2 else 3) + late * _PERIOD
    return _repeat(
        [
            (2 * r, 3 * pp - 2 - r, 3 * pp - 1 + gap + 2 * r, 6 * pp - 2 + gap - r)
            for r in range(pp)
        ],
        microbatches,
        late,
    )


def v_min(pp: int, microbatches: int) -> Order:
    """V-Min: about a third of what 1F1B's first rank holds, on all ranks (arXiv 2405.15362, 4.1).

    A pass follows at once that of the neighbouring rank: where passes do not take equally long,
    ranks wait in every microbatch.

    >>> v_min(1, 2)
    ((0F0, 1F0, 1I0, 0I0, 1W0, 0W0, 0F1, 1F1, 1I1, 0I1, 1W1, 0W1),)
    """
    gap = 0 if pp % 3 else 2
    return _repeat(
        [(r, 2 * pp - 1 - r, 2 * pp + gap + r, 4 * pp + gap - 1 - r) for r in range(pp)],
        microbatches,
    )


def _repeat(block: Sequence[Sequence[int]], microbatches: int, late: int = 0) -> Order:
    """Order of a building block (slots by rank and pass) for all microbatches.

    In the middle every rank repeats the same actions, from its first stage's forward on. So long
    orders are short ones in which these are repeated.
    """
    middle = 2 * (len(block) + late)
    short = middle + len(block) + 4
    if microbatches <= short:
        return _squeeze(block, microbatches, late)
    repeats = microbatches - short
    order: list[tuple[Action, ...]] = []
    for rank, steps in enumerate(_squeeze(block, short, late)):
        begin, end = (steps.index(Action(rank, "F", m)) for m in (middle, middle + 1))
        repeated = [_shift(steps[begin:end], n) for n in range(repeats)]
        order.append((*steps[:begin], *chain(*repeated), *_shift(steps[begin:], repeats)))
    return tuple(order)


def _shift(steps: Sequence[Action], microbatches: int) -> list[Action]:
    return [a._replace(microbatch=a.microbatch + microbatches) for a in steps]


def _squeeze(
    block: Sequence[Sequence[int]], microbatches: int, late: int
) -> tuple[tuple[Action, ...], ...]:
    """Repeat a building block for each microbatch, and move the passes at both ends together."""
    span = range(0, _PERIOD * microbatches, _PERIOD)
    ranks = [[[slot + shift for shift in span] for slot in passes] for passes in block]
    with_weights = [_with_weights(rank) for rank in ranks]
    _move_earlier(with_weights, max(map(_alive, with_weights)), late)
    ranks = _as_soon_as_possible(with_weights, late)
    # Then the weight gradients at the end make room for other passes.
    _move_earlier(ranks, max(_alive(_with_weights(rank)) for rank in ranks), late)
    ranks = _as_soon_as_possible([_with_weights(rank) for rank in ranks], late)
    return tuple(_actions(ranks, rank) for rank in range(len(ranks)))


def _move_earlier(ranks: list[_Rank], limit: int, late: int) -> None:
    """Move passes before the end of the first backward, or after the last forward, to free slots.

    No rank may hold more than `limit` microbatches. Where `ranks` have no slots of weight gradients
    only the end is changed, and the weight gradients are in the first free slots.
    """
    moves_weights = len(ranks[0]) > _WEIGHT
    busy = [{slot for slots in rank for slot in slots} for rank in ranks]
    filling, draining = True, False
    for old, rank, pass_index, m in _in_order_of_time(ranks):
        filling = filling and (rank, pass_index) != (0, _FIRST_BACKWARD)
        if not filling and not draining:
            draining = (pass_index, m) == (_FIRST_FORWARD, len(ranks[0][0]) - 1)
            continue
        if filling and not moves_weights:
            continue
        slots = ranks[rank][pass_index]
        for new in range(_ready(ranks, rank, pass_index, m, late), old):
            if new in busy[rank]:
                continue
            slots[m] = new
            passes = ranks[rank] if moves_weights else _with_weights(ranks[rank])
            # Where weight gradients have slots, only a forward adds to the microbatches alive.
            if (moves_weights and pass_index > _SECOND_FORWARD) or _alive(passes) <= limit:
                busy[rank] ^= {old, new}
                break
        else:
            slots[m] = old


def _in_order_of_time(ranks: Sequence[_Rank]) -> list[tuple[int, int, int, int]]:
    """Slot, rank, pass and microbatch of all passes."""
    return sorted(
        (slot, rank, pass_index, m)
        for rank, passes in enumerate(ranks)
        for pass_index, slots in enumerate(passes)
        for m, slot in enumerate(slots)
    )


def _ready(ranks: Sequence[_Rank], rank: int, pass_index: int, m: int, late: int) -> int:
    """First slot in which the needs of a pass have ended."""
    slots = ranks[rank]
    needed = [slots[pass_index][m - 1]] if m else []  # the microbatches of a pass keep their order
    if pass_index == _WEIGHT:
        needed.append(sorted(slots[_SECOND_BACKWARD] + slots[_FIRST_BACKWARD])[m])
    elif pass_index:
        turns = pass_index == _SECOND_BACKWARD and rank == 0
        needed.append(slots[pass_index - 1][m] + (late * _PERIOD if turns else 0))
    if pass_index in (_FIRST_FORWARD, _SECOND_BACKWARD) and rank:
        needed.append(ranks[rank - 1][pass_index][m])
    if pass_index in (_SECOND_FORWARD, _FIRST_BACKWARD) and rank < len(ranks) - 1:
        needed.append(ranks[rank + 1][pass_index][m])
    return 1 + max(needed, default=-1)


def _weight_slots(passes: _Rank) -> list[int]:
    """Slots of weight gradients: the first free one after each backward."""
    busy = {slot for slots in passes for slot in slots}
    free: list[int] = []
    for slot in sorted(passes[_SECOND_BACKWARD] + passes[_FIRST_BACKWARD]):
        slot = max(slot, *free[-1:]) + 1 if free else slot + 1
        while slot in busy:
            slot += 1
        free.append(slot)
    return free


def _with_weights(passes: _Rank) -> _Rank:
    """Add the slots of weight gradients to those of the passes."""
    return [*passes, _weight_slots(passes)]


def _alive(rank: _Rank) -> int:
    """Maximum number of microbatches alive at once on a rank, of both stages."""
    change = dict.fromkeys(rank[_FIRST_FORWARD] + rank[_SECOND_FORWARD], 1)
    change |= dict.fromkeys(rank[_WEIGHT], -1)
    return max(accumulate(change[slot] for slot in sorted(change)))


def _as_soon_as_possible(ranks: Sequence[_Rank], late: int) -> list[_Rank]:
    """Slots of the passes if each rank keeps its order and every pass starts when it can."""
    microbatches = len(ranks[0][0])
    soon = [[[0] * microbatches for _ in _PASSES] for _ in ranks]
    clock = [0] * len(ranks)
    for _, rank, pass_index, m in _in_order_of_time(ranks):
        if pass_index != _WEIGHT:
            clock[rank] = max(clock[rank], _ready(soon, rank, pass_index, m, late))
            soon[rank][pass_index][m] = clock[rank]
        clock[rank] += 1
    return soon


def _actions(ranks: Sequence[_Rank], rank: int) -> tuple[Action, ...]:
    """Actions of a rank, in order; of two weight gradients, the second stage's comes first."""
    passes, first, second = ranks[rank], rank, 2 * len(ranks) - 1 - rank
    stages = (first, second, second, first)
    actions = [
        (slot, Action(stage, kind, m))
        for stage, kind, slots in zip(stages, _PASSES, passes, strict=True)
        for m, slot in enumerate(slots)
    ]
    backwards = {second: passes[_SECOND_BACKWARD], first: passes[_FIRST_BACKWARD]}
    done = dict.fromkeys(backwards, 0)
    for slot in _weight_slots(passes):
        stage = next(
            s for s, slots in backwards.items() if done[s] < len(slots) and slots[done[s]] < slot
        )
        actions.append((slot, Action(stage, "W", done[stage])))
        done[stage] += 1
    return tuple(action for _, action in sorted(actions))
