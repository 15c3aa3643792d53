"""Schedules with vocabulary parallelism: all pipeline ranks share embedding and output layer.

The vocabulary is split over the pipeline's ranks (arXiv 2411.05288). All ranks run the stages
before and after those of the layers (`SharedEnds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stagewright.schedule.actions import SLOTS, Action, Order, ScheduleStep, flat, parts
from stagewright.schedule.controllable_memory import v_half
from stagewright.schedule.generators import one_f_one_b
from stagewright.schedule.play import play


class SharedEnds(NamedTuple):
    """Stages that all ranks of a pipeline share: the block of each.

    An empty name is a stage without a block, which passes on its input: it broadcasts the value of
    one rank to all, as a separate action that overlaps with layers.
    """

    before: tuple[str, ...]
    """Blocks before the stages of layers."""
    after: tuple[str, ...]
    """Blocks after the stages of layers."""


STOPS = SharedEnds(("embedding",), ("head",))
"""Ranks stop for the output layer."""
TWO_BARRIERS = SharedEnds(("embedding", ""), ("", "output", "loss"))
"""The output layer has two passes; ranks compute layers during the all-reduce after each."""
ONE_BARRIER = SharedEnds(("embedding", ""), ("", "output_with_gradient", "loss"))
"""Like `TWO_BARRIERS`, but the first pass computes all inputs of the hidden states' gradient."""


def interlaced(pp: int, microbatches: int) -> Order:
    """All ranks stop for the output layer of each microbatch, and continue together.

    Embedding and output layer are stages 0 and pp + 1. The interlaced pipeline of nnScaler (OSDI
    2024), as in `--use-interlaced-schedule` of sail-sg/VocabularyParallelism (arXiv 2411.05288,
    section 6.1): between two stops every rank does one forward and one backward of its layers; of
    two neighbours, one begins with the forward and the other with the backward. No rank waits where
    a backward takes as long as two forwards. Rank 0 keeps 1.5 pp microbatches alive.

    >>> interlaced(2, 1)[0]
    (0F0, 1F0, 3F0, 3B0, 1B0, 0B0)
    """
    # A rank that begins with its forward sends to a neighbour that has not begun its own.
    forward_first = [(pp - 1 - rank) % 2 == 1 for rank in range(pp)]
    forward = [0] * pp  # stops before the forward of microbatch 0
    for rank in range(1, pp):
        at_once = forward_first[rank - 1] and not forward_first[rank]
        forward[rank] = forward[rank - 1] + (0 if at_once else 1)
    backward = [forward[-1] + pp - rank for rank in range(pp)]

    def layers(rank: int, stop: int) -> list[Action]:
        """Actions of a rank's layers after a stop."""
        actions = [
            Action(rank + 1, "F", stop - forward[rank]),
            Action(rank + 1, "B", stop - backward[rank]),
        ]
        return actions if forward_first[rank] else actions[::-1]

    return tuple(
        tuple(
            action
            for stop in range(microbatches + backward[0] + 1)
            for action in (
                # All ranks at the stop: the output layer, and the embedding in both directions.
                Action(pp + 1, "F", stop - forward[-1] - 1),
                Action(pp + 1, "B", stop - forward[-1] - 1),
                Action(0, "B", stop - backward[0] - 1),
                Action(0, "F", stop),
                *layers(rank, stop),
            )
            if 0 <= action.microbatch < microbatches
        )
        for rank in range(pp)
    )


# ---- without stops -------------------------------------------------------------------------------

_INTERVAL = 3  # time between two microbatches of 1F1B: a forward, and a backward of two
_LONGEST = 2  # time of the longest action of layers
_WINDOW = 6  # slots between two microbatches of V-Half


def vocab_1(pp: int, microbatches: int) -> Order:
    """1F1B with the output layer in two passes, each followed by an all-reduce of all ranks.

    Vocab-1 of arXiv 2411.05288 (sections 4 and 5). All ranks do pass S of a microbatch and pass T
    of the previous one at the first pause after the last layer's forward; they compute layers
    during the all-reduces. The last rank's backward waits for two of them: two microbatches more
    than in 1F1B are alive.

    >>> vocab_1(2, 1)[0]
    (0F0, 1F0, 2F0, 4F0, 5F0, 6F0, 6B0, 5B0, 4B0, 2B0, 1B0, 0B0)
    """
    return _without_stops(pp, microbatches, barriers=2)


def vocab_2(pp: int, microbatches: int) -> Order:
    """Vocab-1 with one all-reduce: pass S computes gradients of hidden states, pass T the table's.

    Vocab-2 of arXiv 2411.05288: one microbatch more than in 1F1B is alive.

    >>> vocab_2(2, 1)[0]
    (0F0, 1F0, 2F0, 4F0, 5F0, 6F0, 6B0, 5I0, 4B0, 5W0, 2B0, 1B0, 0B0)
    """
    return _without_stops(pp, microbatches, barriers=1)


def v_half_vocab_1(pp: int, microbatches: int) -> Order:
    """V-Half with the output layer in two passes, as in vocab-1 (arXiv 2411.05288, section 6.4).

    Two microbatches more than in V-Half are alive.
    """
    return _with_passes(v_half(pp, microbatches, late=2), 2 * pp, microbatches, _WINDOW, barriers=2)


class _Rendezvous(NamedTuple):
    """Actions that all ranks run at once, at a time of the simulated layers.

    Each rank runs before it the actions of its layers that begin (`ended`: that end) by that time.
    An action begins after its needs have ended, so actions before a rendezvous need nothing that
    comes after it, and ranks cannot deadlock.
    """

    time: float
    ended: bool
    actions: tuple[Action, ...]

    def comes_after(self, begin: float, end: float) -> bool:
        """Return True if an action of layers with these times runs before it."""
        return (end if self.ended else begin) <= self.time


Times = dict[Action, tuple[float, float]]


def _without_stops(pp: int, microbatches: int, *, barriers: int) -> Order:
    """1F1B of a pipeline that is a stage longer for each barrier, with the passes of both ends."""
    longer = one_f_one_b(pp + barriers, microbatches)
    return _with_passes(longer[:pp], pp, microbatches, _INTERVAL, barriers=barriers)


def _with_passes(
    order: Order, stages: int, microbatches: int, interval: int, *, barriers: int
) -> Order:
    """Insert the passes of the output layer into an order of `stages` stages of layers.

    The order is simulated with a further stage for each barrier, on additional ranks, one for each
    direction. Its forward takes an `interval` between two microbatches: the time in which all ranks
    reach a pause.
    """
    barrier_slots = {"F": interval, "B": 0}
    barrier_ranks = tuple(
        tuple(Action(stages + barrier, kind, m) for m in range(microbatches))
        for barrier in range(barriers)
        for kind in "FB"
    )

    def duration(step: ScheduleStep) -> int:
        return sum((SLOTS if a.stage < stages else barrier_slots)[a.kind] for a in parts(step))

    times = play((*order, *barrier_ranks), duration)
    meetings = _meetings(stages, microbatches, times, barriers=barriers)
    shift = len(TWO_BARRIERS.before)
    return tuple(
        tuple(_with_meetings(flat(steps), times, meetings, shift=shift)) for steps in order
    )


def _meetings(stages: int, microbatches: int, times: Times, *, barriers: int) -> list[_Rendezvous]:
    """Rendezvous for the passes, from the `times` of layers and of the barriers after them.

    Stages of layers are numbered from 0. Pass S can run when the first barrier begins, pass T when
    the second one does.
    """
    first = len(TWO_BARRIERS.before)
    embedding, embedded = range(first)
    hidden, output, loss = range(first + stages, first + stages + len(TWO_BARRIERS.after))
    backward = "B" if Action(0, "B", 0) in times else "I"
    starts = [times[Action(0, "F", m)][0] for m in range(microbatches)]
    ends = [times[Action(0, backward, m)][1] for m in range(microbatches)]
    pass_s = {times[Action(stages, "F", m)][0]: m for m in range(microbatches)}
    pass_t: dict[float, list[int]] = {}
    for time, m in pass_s.items():
        ready = times[Action(stages + 1, "F", m)][0] if barriers == 2 else time + _INTERVAL
        near = (other for other in pass_s if ready <= other < ready + _LONGEST)
        pass_t.setdefault(next(near, ready), []).append(m)
    meeting_times = sorted({*pass_s, *pass_t})
    while meeting_times[-1] < ends[-1]:  # until the last backward of the first stage
        meeting_times.append(meeting_times[-1] + _INTERVAL)
    # Embeddings are computed an interval before the first layer needs them.
    until = [time + _INTERVAL for time in (*meeting_times[1:], meeting_times[-1] + _INTERVAL)]
    num_embedded = [sum(start < time for start in starts) for time in until]

    def actions(steps: Iterable[tuple[int, str]], numbers: Iterable[int]) -> list[Action]:
        return [Action(stage, kind, m) for m in numbers for stage, kind in steps]

    embed = [(embedding, "F"), (embedded, "F")]
    # Pass T; with one barrier, the gradient of hidden states follows the all-reduce of pass S.
    steps_t = [(output, "B"), (hidden, "B")] if barriers == 2 else [(output, "W")]
    steps_s = [(output, "F"), (loss, "F"), (loss, "B")]
    steps_s += [(output, "I"), (hidden, "B")] if barriers == 1 else []
    meetings = [_Rendezvous(-1, True, tuple(actions(embed, range(num_embedded[0]))))]
    embeddings, returned, previous = num_embedded[0], 0, -_INTERVAL
    for time, next_embeddings in zip(meeting_times, num_embedded, strict=True):
        passes = [pass_s[time]] if time in pass_s else []
        joint = actions(steps_t, pass_t.get(time, ())) + actions(steps_s, passes)
        if time >= previous + _LONGEST:  # actions of the previous meeting have ended
            done = sum(end <= time for end in ends)
            arrived = range(returned, done)
            sent = actions([(hidden, "F")], passes) + actions([(embedded, "B")], arrived)
            meetings.append(_Rendezvous(time, True, tuple(sent)))
            joint += actions([(embedding, "B")], arrived)
            returned = done
        joint += actions(embed, range(embeddings, next_embeddings))
        meetings.append(_Rendezvous(time, False, tuple(joint)))
        embeddings, previous = next_embeddings, time
    return meetings


def _with_meetings(
    actions: Iterable[Action], times: Times, meetings: Iterable[_Rendezvous], *, shift: int
) -> Iterator[Action]:
    """Merge the actions of a rank's layers, their stages shifted, with those of meetings."""
    remaining = [*actions][::-1]
    for meeting in meetings:
        while remaining and meeting.comes_after(*times[remaining[-1]]):
            action = remaining.pop()
            yield action._replace(stage=action.stage + shift)
        yield from meeting.actions
    yield from (a._replace(stage=a.stage + shift) for a in reversed(remaining))
