"""Schedules as functions from sizes (ranks, microbatches, chunks per rank) to an `Order`.

>>> from stagewright.schedule.text import text
>>> print(text(one_f_one_b(pp=2, microbatches=3)))
rank 0  0F0 0F1 .   .   0B0---- 0F2 0B1---- .   0B2----
rank 1  .   1F0 1B0---- 1F1 1B1---- 1F2 1B2---- .   .
>>> print(text(zb_h1(pp=2, microbatches=3)))
rank 0  0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2
rank 1  .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stagewright.schedule.actions import Action, Order, Overlap, ScheduleStep, flat, parts

# ---- one forward, one backward: stage = chunk * pp + rank ----------------------------------------


def _alternating(
    pp: int,
    microbatches: int,
    warmup: Sequence[int],
    *,
    vpp: int = 1,
    group: int | None = None,
    postponed: Sequence[int] = (),
) -> Order:
    """Forwards of the warm-up, then a forward and a backward by turns, then the other backwards.

    `warmup`: number of forwards before a rank's first backward, by rank. `group` as in
    `interleaved`. `postponed`: split backwards, and do each weight gradient this number of
    backwards later, by rank.
    """
    group, backward_kind = group or microbatches, "I" if postponed else "B"
    order: list[tuple[Action, ...]] = []
    for rank, ahead in enumerate(warmup):
        forwards = _passes("F", pp, microbatches, vpp, rank, group)
        backwards = _passes(backward_kind, pp, microbatches, vpp, rank, group)
        weights = [a._replace(kind="W") for a in backwards] if postponed else []
        actions, due = forwards[:ahead], 0
        for i, backward in enumerate(backwards):
            actions += [*forwards[ahead + i : ahead + i + 1], backward]
            if postponed and i >= postponed[rank]:
                actions.append(weights[due])
                due += 1
        order.append((*actions, *weights[due:]))
    return tuple(order)


def _passes(kind: str, pp: int, microbatches: int, vpp: int, rank: int, group: int) -> list[Action]:
    """Forwards or backwards of a rank: groups of microbatches pass through its chunks in turn."""
    chunks = range(vpp) if kind == "F" else range(vpp - 1, -1, -1)
    return [
        Action(chunk * pp + rank, kind, m)
        for first in range(0, microbatches, group)
        for chunk in chunks
        for m in range(first, min(first + group, microbatches))
    ]


def equal_group(pp: int, microbatches: int) -> int:
    """Size of equal groups of microbatches: pp, or a few more."""
    return microbatches // max(1, microbatches // pp)


def forward_only(pp: int, microbatches: int) -> Order:
    """One pass of each microbatch through the pipeline, as in inference.

    >>> forward_only(2, 2)
    ((0F0, 0F1), (1F0, 1F1))
    """
    return tuple(tuple(Action(rank, "F", m) for m in range(microbatches)) for rank in range(pp))


def gpipe(pp: int, microbatches: int) -> Order:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    >>> gpipe(2, 2)
    ((0F0, 0F1, 0B0, 0B1), (1F0, 1F1, 1B0, 1B1))
    """
    return _alternating(pp, microbatches, [microbatches] * pp)


def one_f_one_b(pp: int, microbatches: int) -> Order:
    """One forward, one backward, after a warm-up (PipeDream-flush, arXiv 2006.09503).

    As fast as GPipe, but rank r keeps only min(pp - r, microbatches) microbatches alive.

    >>> one_f_one_b(2, 2)
    ((0F0, 0F1, 0B0, 0B1), (1F0, 1B0, 1F1, 1B1))
    """
    return _alternating(pp, microbatches, range(pp - 1, -1, -1))


def looped_bfs(pp: int, microbatches: int, vpp: int) -> Order:
    """All microbatches in a chunk before the next chunk begins (breadth-first, arXiv 2211.05953).

    Backward takes the microbatches from the last to the first, as torch does.

    >>> looped_bfs(2, 2, vpp=2)[1]
    (1F0, 1F1, 3F0, 3F1, 3B1, 3B0, 1B1, 1B0)
    """
    forwards = [_passes("F", pp, microbatches, vpp, rank, microbatches) for rank in range(pp)]
    return tuple((*fs, *(a._replace(kind="B") for a in reversed(fs))) for fs in forwards)


def interleaved(pp: int, microbatches: int, vpp: int, group: int | None = None) -> Order:
    """1F1B over `vpp` chunks per rank: the bubble shrinks by vpp (Megatron-LM, arXiv 2104.04473).

    Microbatches pass through the chunks in groups of `group`; the last group has the remaining
    ones. That is Megatron-LM's `microbatch_group_size_per_vp_stage`. None: equal groups as in
    torch, of pp where pp divides the number of microbatches. (With exactly pp microbatches,
    Megatron-LM up to core 0.9 ran all forwards first: as fast, with more microbatches alive. From
    core 0.10 on, and in torch, the warm-up is the same for any number, as here.)

    >>> interleaved(2, 2, vpp=2)[1]
    (1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1)
    >>> [a for a in flat(interleaved(2, 5, vpp=2, group=3)[0]) if a.kind == "F"]
    [0F0, 0F1, 0F2, 2F0, 2F1, 2F2, 0F3, 0F4, 2F3, 2F4]
    """
    group = group or equal_group(pp, microbatches)
    warmup = [(pp - rank - 1) * 2 + (vpp - 1) * group for rank in range(pp)]
    return _alternating(pp, microbatches, warmup, vpp=vpp, group=group)


def zb_h1(pp: int, microbatches: int, vpp: int = 1) -> Order:
    """1F1B with backward in halves: weight gradients fill the bubble (arXiv 2401.10241).

    ZB-H1 there, ZB1P in the table of DeepSeek-V3; with chunks, torch's InterleavedZeroBubble. Rank
    r does each weight gradient r backwards later, so all ranks keep as much alive as 1F1B's first.

    >>> zb_h1(2, 3)[1]
    (1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2)
    """
    group = equal_group(pp, microbatches)
    warmup = [pp - rank - 1 + (vpp - 1) * group for rank in range(pp)]
    return _alternating(pp, microbatches, warmup, vpp=vpp, group=group, postponed=range(pp))


def zb_h2(pp: int, microbatches: int) -> Order:
    """ZB-H1 with twice the microbatches in flight: no rank waits (arXiv 2401.10241, section 2.2).

    The result of the authors' search with twice the memory of 1F1B (their ZB-2p) if F, I and W take
    equally long. Each rank then works from its first action to its last.

    >>> zb_h2(2, 3)
    ((0F0, 0F1, 0F2, 0I0, 0W0, 0I1, 0W1, 0I2, 0W2), (1F0, 1I0, 1F1, 1I1, 1F2, 1I2, 1W0, 1W1, 1W2))
    """
    ahead, later = range(2 * pp - 2, -1, -2), range(0, 2 * pp, 2)
    return _alternating(pp, microbatches, ahead, postponed=later)


# ---- V: rank r has stages r and 2 pp - 1 - r -----------------------------------------------------


def zbv(pp: int, microbatches: int) -> Order:
    """ZB-V: no bubble where F, I and W take equally long (arXiv 2401.10241, section 6).

    A rank's second stage takes over where its first one's microbatches come back.

    >>> zbv(1, 2)
    ((0F0, 1F0, 1I0, 1W0, 0F1, 0I0, 0W0, 1F1, 1I1, 1W1, 0I1, 0W1),)
    """
    # With fewer microbatches, some of those that fill the pipeline are omitted.
    filled = max(2 * pp - 1, microbatches)
    order: list[tuple[Action, ...]] = []
    for rank in range(pp):
        v = _Vee(pp, rank)
        v.do("F0", times=2 * (pp - rank) - 1)
        v.do("F1 F0", times=rank)
        v.do("F1 I1 W1", times=pp - rank)
        while v.done["F0"] < filled:
            v.do("F0 I0 W0 F1 I1 W1")
        while v.done["F1"] < filled:
            v.do("I0 W0 F1 I1 W1")
        v.do("I0 I1", times=rank)
        v.do("I0 W0", times=pp - rank)
        v.do("W1", times=v.done["I1"] - v.done["W1"])
        v.do("W0", times=v.done["I0"] - v.done["W0"])
        order.append(tuple(a for a in flat(v.steps) if a.microbatch < microbatches))
    return tuple(order)


def dualpipev(pp: int, microbatches: int) -> Order:
    """DualPipe cut in half: a V, in which forwards and backwards overlap (DeepSeek's DualPipeV).

    The eight parts of the published schedule, github.com/deepseek-ai/DualPipe.

    >>> from stagewright.schedule.text import text
    >>> print(text(dualpipev(1, 3)))
    rank 0  0F0 1F0 0F1 1B0---- 1F1+0B0---- 0F2+1B1---- 1F2+0B1---- 1B2---- 0I2 0W2
    """
    order: list[tuple[ScheduleStep, ...]] = []
    for rank in range(pp):
        v, away = _Vee(pp, rank), pp - rank - 1
        v.do("F0", times=2 * away)
        v.do("F0 F1", times=rank + 1)
        v.do("I1 W F1", times=away)
        for i in range(microbatches - 2 * pp + rank + 1):
            # The first two of the rank where the V turns are apart, which makes its bubble smaller.
            v.do("F0 B1 F1&B0" if i == away == 0 else "F0&B1 F1&B0")
        v.do("B1 F1&B0", times=away)
        final = rank + 1  # pairs of backwards at the end; later ones are split into I and W
        v.do("B1 B0", times=final // 2)
        v.do("I1 I0" if rank % 2 else "B1 I0")
        v.do("I1 I0", times=final - final // 2 - 1)
        v.do("W I0", times=away)
        v.do("W", times=rank + 1)
        order.append(tuple(v.steps))
    return tuple(order)


def dualpipe(pp: int, microbatches: int) -> Order:
    """Microbatches enter at both ends of the pipeline (DeepSeek-V3, arXiv 2412.19437, 3.2.1).

    The first half of the microbatches runs up the ranks, the other half down, so that ranks r and
    pp - 1 - r both hold stages r and pp - 1 - r. Each does what rank min(r, pp - 1 - r) of
    `dualpipev` does on half the ranks, whose V is unfolded here.

    >>> from stagewright.schedule.places import places
    >>> [(place.stage, place.rank) for place in places(dualpipe(2, 4))[:2]]
    [(0, 0), (1, 0)]
    """
    half = microbatches // 2
    vee = dualpipev(pp // 2, half)

    def unfold(step: ScheduleStep, rank: int) -> ScheduleStep:
        return _step([a._replace(microbatch=a.microbatch + half * (a.stage != rank))
                      for a in parts(step)])  # fmt: skip

    return tuple(
        tuple(unfold(step, rank) for step in vee[min(rank, pp - 1 - rank)]) for rank in range(pp)
    )


def _step(actions: Sequence[Action]) -> ScheduleStep:
    return Overlap(*actions) if len(actions) == 2 else actions[0]


class _Vee:
    """Steps of one rank of a V, written as words such as `F0 I1 F1&B0`.

    The digit of a word is that of the rank's two stages; each stage's microbatches come in order.
    `W` alone is the weight gradient that was postponed the longest.
    """

    def __init__(self, pp: int, rank: int) -> None:
        self.stages = rank, 2 * pp - 1 - rank
        self.steps: list[ScheduleStep] = []
        self.done: Counter[str] = Counter()  # by word
        self.postponed: list[Action] = []

    def do(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            self.steps.append(_step([self.action(w) for w in word.split("&")]))

    def action(self, word: str) -> Action:
        if word == "W":
            return self.postponed.pop(0)._replace(kind="W")
        kind, stage = word
        # A full backward counts as both of its halves.
        counted = f"I{stage}" if kind == "B" else word
        action = Action(self.stages[int(stage)], kind, self.done[counted])
        self.done[counted] += 1
        if kind == "I":
            self.postponed.append(action)
        return action
