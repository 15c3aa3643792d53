"""Schedules in which all ranks share the embedding and the output layer: vocabulary parallelism.

The vocabulary is split over the pipeline's ranks (arXiv 2411.05288). All ranks run the stages
before and behind those of layers (`SharedEnds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stagewright.schedule.actions import Action, Order, ScheduleStep, flat, parts
from stagewright.schedule.controllable_memory import v_half
from stagewright.schedule.generators import one_f_one_b
from stagewright.schedule.play import play


class SharedEnds(NamedTuple):
    """The stages that all ranks of a pipeline share, each by its blocks.

    A stage without blocks hands on what it gets: what one rank has, it brings to all of them, as an
    action of its own, so that this takes place while ranks work on layers.
    """

    before: tuple[str, ...]
    """The block of each stage before those of layers; empty: none."""
    behind: tuple[str, ...]
    """The same behind them."""

    def stages(self, of_layers: int) -> frozenset[int]:
        """Their numbers, where so many stages of layers stand between them."""
        first, last = len(self.before), len(self.behind)
        return frozenset({*range(first), *range(first + of_layers, first + of_layers + last)})


STOPS = SharedEnds(("embedding",), ("head",))
"""Ranks stop for the output layer, and go on together."""
TWO_BARRIERS = SharedEnds(("embedding", ""), ("", "output", "loss"))
"""Ranks do the output layer in two passes, and layers while their results are added up."""
ONE_BARRIER = SharedEnds(("embedding", ""), ("", "output_with_gradient", "loss"))
"""As `TWO_BARRIERS`, but the first pass makes all that the gradient of hidden states needs."""


def interlaced(pp: int, microbatches: int) -> Order:
    """All ranks stop for the output layer of each microbatch, and go on together.

    Embedding and output layer are stages 0 and pp + 1. The interlaced pipeline of nnScaler (OSDI
    2024), as `--use-interlaced-schedule` of sail-sg/VocabularyParallelism has it (arXiv 2411.05288,
    section 6.1): between two stops every rank does one forward and one backward of its layers, and
    neighbours by turns begin with either. Then no rank waits for another where a backward takes as
    long as two forwards, and a microbatch is alive for half as many stops more than in 1F1B: rank 0
    keeps 1.5 pp microbatches.

    >>> interlaced(2, 1)[0]
    (0F0, 1F0, 3F0, 3B0, 1B0, 0B0)
    """
    # A rank that begins with its forward hands it on to a neighbour that has not begun its own.
    begins = [(pp - 1 - rank) % 2 == 1 for rank in range(pp)]
    forward = [0] * pp  # stops before the forward of microbatch 0
    for rank in range(1, pp):
        at_once = begins[rank - 1] and not begins[rank]
        forward[rank] = forward[rank - 1] + (0 if at_once else 1)
    backward = [forward[-1] + pp - rank for rank in range(pp)]
    return tuple(
        tuple(
            action
            for stop in range(microbatches + backward[0] + 1)
            for action in (
                *_ends(pp, microbatches, stop, forward[-1] + 1, backward[0] + 1),
                *_layers(rank + 1, microbatches, stop, forward[rank], backward[rank], begins[rank]),
            )
        )
        for rank in range(pp)
    )


def _ends(pp: int, microbatches: int, stop: int, output: int, last: int) -> list[Action]:
    """What all ranks do at a stop: the output layer, and the embedding in both directions."""
    wanted = [(pp + 1, "F", stop - output), (pp + 1, "B", stop - output)]
    wanted += [(0, "B", stop - last), (0, "F", stop)]
    return [Action(*action) for action in wanted if 0 <= action[2] < microbatches]


def _layers(
    stage: int, microbatches: int, stop: int, forward: int, backward: int, begins: bool
) -> list[Action]:
    """What a rank does with its layers between two stops, the forward first or last."""
    wanted = [Action(stage, "F", stop - forward), Action(stage, "B", stop - backward)]
    ordered = wanted if begins else wanted[::-1]
    return [action for action in ordered if 0 <= action.microbatch < microbatches]


# ---- without stops -------------------------------------------------------------------------------

_INTERVAL = 3  # forwards between a microbatch and the next, where a backward takes two
_LONGEST = 2  # action of layers
_WINDOW = 6  # slots of V-Half between a microbatch and the next


def vocab_1(pp: int, microbatches: int) -> Order:
    """1F1B with the output layer in two passes, each followed by a sum over all ranks.

    Vocab-1 of arXiv 2411.05288 (sections 4 and 5). All ranks do pass S of a microbatch and pass T
    of the one before together, at the first pause after the last layer's forward; while the sums
    are under way they do layers. The last rank's backward waits for two sums: two microbatches more
    than in 1F1B are alive.

    >>> vocab_1(2, 1)[0]
    (0F0, 1F0, 2F0, 4F0, 5F0, 6F0, 6B0, 5B0, 4B0, 2B0, 1B0, 0B0)
    """
    return _without_stops(pp, microbatches, barriers=2)


def vocab_2(pp: int, microbatches: int) -> Order:
    """As vocab-1 with one sum: pass S makes the gradients of hidden states, pass T of the table.

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
    """Actions that all ranks run once they have begun, or ended, what begins or ends by a time.

    What an action needs has ended when the action begins. So what ranks do before a meeting needs
    nothing from behind it, and ranks cannot wait for each other in a circle.
    """

    time: float
    ended: bool
    actions: tuple[Action, ...]

    def is_behind(self, begin: float, end: float) -> bool:
        """Whether ranks run an action of these times before."""
        return (end if self.ended else begin) <= self.time


Times = dict[Action, tuple[float, float]]


def _without_stops(pp: int, microbatches: int, *, barriers: int) -> Order:
    """1F1B of a pipeline with a stage more for each barrier, with passes of the vocabulary."""
    longer = one_f_one_b(pp + barriers, microbatches)
    return _with_passes(longer[:pp], pp, microbatches, _INTERVAL, barriers=barriers)


def _with_passes(
    order: Order, stages: int, microbatches: int, interval: int, *, barriers: int
) -> Order:
    """An order of `stages` of layers, with passes of the vocabulary between two actions of these.

    A barrier is a further stage that takes as long as all ranks need to come to a pause: an
    interval between microbatches. Ranks of their own let microbatches through in both directions.
    """
    lengths = {"F": 1, "B": 2, "I": 1, "W": 1}
    barrier = {"F": interval, "B": 0}
    ways = tuple(
        tuple(Action(stages + nth, kind, m) for m in range(microbatches))
        for nth in range(barriers)
        for kind in "FB"
    )

    def seconds(step: ScheduleStep) -> float:
        return sum((lengths if a.stage < stages else barrier)[a.kind] for a in parts(step))

    times = play((*order, *ways), seconds)
    meetings = _meetings(stages, microbatches, times, barriers=barriers)
    shift = len(TWO_BARRIERS.before)
    return tuple(
        tuple(_with_meetings(flat(steps), times, meetings, shift=shift)) for steps in order
    )


def _meetings(stages: int, microbatches: int, times: Times, *, barriers: int) -> list[_Rendezvous]:
    """When ranks do which passes, from the `times` of stages of layers, and of those behind them.

    Stages of layers are numbered from 0. The first stage behind them begins when pass S may, the
    second one when pass T may.
    """
    first = len(TWO_BARRIERS.before)
    embedding, found = range(first)
    handed, output, loss = range(first + stages, first + stages + len(TWO_BARRIERS.behind))
    every = range(microbatches)
    back = "B" if Action(0, "B", 0) in times else "I"
    starts = [times[Action(0, "F", m)][0] for m in every]
    ends = [times[Action(0, back, m)][1] for m in every]
    of_s = {times[Action(stages, "F", m)][0]: m for m in every}
    of_t: dict[float, list[int]] = {}
    for time, m in of_s.items():
        ready = times[Action(stages + 1, "F", m)][0] if barriers == 2 else time + _INTERVAL
        near = (other for other in of_s if ready <= other < ready + _LONGEST)
        of_t.setdefault(next(near, ready), []).append(m)
    moments = sorted({*of_s, *of_t})
    while moments[-1] < ends[-1]:  # ranks meet until the last microbatch has come back
        moments.append(moments[-1] + _INTERVAL)
    # Embeddings are made an interval ahead of the first layer, the first ones before all.
    until = [time + _INTERVAL for time in (*moments[1:], moments[-1] + _INTERVAL)]
    ahead = [sum(start < time for start in starts) for time in until]

    def actions(of: Iterable[tuple[int, str]], some: Iterable[int]) -> list[Action]:
        return [Action(stage, kind, m) for m in some for stage, kind in of]

    embed = [(embedding, "F"), (found, "F")]
    # Pass T; of one barrier, the gradient of hidden states follows the sums.
    gradient = [(output, "B"), (handed, "B")] if barriers == 2 else [(output, "W")]
    sums = [(output, "F"), (loss, "F"), (loss, "B")]
    sums += [(output, "I"), (handed, "B")] if barriers == 1 else []
    meetings = [_Rendezvous(-1, True, tuple(actions(embed, range(ahead[0]))))]
    made, returned, before = ahead[0], 0, -_INTERVAL
    for time, further in zip(moments, ahead, strict=True):
        passes = [of_s[time]] if time in of_s else []
        now = actions(gradient, of_t.get(time, ())) + actions(sums, passes)
        if time >= before + _LONGEST:  # what had begun then has ended
            done = sum(end <= time for end in ends)
            some = range(returned, done)
            sent = actions([(handed, "F")], passes) + actions([(found, "B")], some)
            meetings.append(_Rendezvous(time, True, tuple(sent)))
            now += actions([(embedding, "B")], some)
            returned = done
        meetings.append(_Rendezvous(time, False, (*now, *actions(embed, range(made, further)))))
        made, before = further, time
    return meetings


def _with_meetings(
    actions: Iterable[Action], times: Times, meetings: Iterable[_Rendezvous], *, shift: int
) -> Iterator[Action]:
    """The actions of a rank's layers, their stages renumbered, with those of meetings between."""
    left = [*actions][::-1]
    for meeting in meetings:
        while left and meeting.is_behind(*times[left[-1]]):
            yield _later(left.pop(), shift)
        yield from meeting.actions
    yield from (_later(action, shift) for action in reversed(left))


def _later(action: Action, shift: int) -> Action:
    return action._replace(stage=action.stage + shift)
