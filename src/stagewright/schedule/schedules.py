"""Pipeline schedules by name: functions from sizes to an `Order`. What an order is: `actions`.

>>> print(text(one_f_one_b(pp=2, microbatches=3)))
rank 0  0F0 0F1 .   .   0B0---- 0F2 0B1---- .   0B2----
rank 1  .   1F0 1B0---- 1F1 1B1---- 1F2 1B2---- .   .
>>> print(text(zb_h1(pp=2, microbatches=3)))
rank 0  0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2
rank 1  .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from stagewright.errors import UserError, did_you_mean, either
from stagewright.schedule.actions import (
    MOST_BYTES,
    SLOTS,
    Action,
    Cost,
    Order,
    Overlap,
    Place,
    Step,
    bubble,
    flat,
    from_csv,
    halved,
    idle,
    in_flight,
    mirrored,
    needs,
    parts,
    places,
    play,
    text,
    to_csv,
    validate,
)

__all__ = [
    "SCHEDULES", "SLOTS", "Action", "Cost", "Order", "Overlap", "Place", "Schedule", "Step",
    "bubble", "check", "dualpipe", "dualpipev", "fewest", "flat", "forward_only", "from_csv",
    "gpipe", "halved", "idle", "in_flight", "interleaved", "looped_bfs", "make", "mirrored",
    "needs", "one_f_one_b", "parts", "places", "play", "text", "to_csv", "validate", "zb_h1", "zbv",
]  # fmt: skip


# ---- one stage per rank --------------------------------------------------------------------------


def gpipe(pp: int, microbatches: int) -> Order:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    >>> gpipe(2, 2)
    ((0F0, 0F1, 0B0, 0B1), (1F0, 1F1, 1B0, 1B1))
    """
    return tuple(
        tuple(Action(rank, kind, m) for kind in "FB" for m in range(microbatches))
        for rank in range(pp)
    )


def forward_only(pp: int, microbatches: int) -> Order:
    """Each microbatch through the pipeline once, as in inference.

    >>> forward_only(2, 2)
    ((0F0, 0F1), (1F0, 1F1))
    """
    return tuple(tuple(Action(rank, "F", m) for m in range(microbatches)) for rank in range(pp))


def one_f_one_b(pp: int, microbatches: int) -> Order:
    """One forward, one backward, after a warm-up (PipeDream-flush, arXiv 2006.09503).

    As fast as GPipe, but rank r keeps only min(pp - r, microbatches) microbatches alive.

    >>> one_f_one_b(2, 2)
    ((0F0, 0F1, 0B0, 0B1), (1F0, 1B0, 1F1, 1B1))
    """

    def rank_actions(rank: int) -> tuple[Step, ...]:
        forwards = [Action(rank, "F", m) for m in range(microbatches)]
        backwards = [Action(rank, "B", m) for m in range(microbatches)]
        return _alternate(forwards, backwards, warmup=pp - rank - 1)

    return tuple(rank_actions(rank) for rank in range(pp))


# ---- chunks: stage = chunk * pp + rank -----------------------------------------------------------


def looped_bfs(pp: int, microbatches: int, vpp: int) -> Order:
    """A chunk does all microbatches before the next begins (breadth-first, arXiv 2211.05953).

    Backward takes the microbatches from the last to the first, as torch does.

    >>> looped_bfs(2, 2, vpp=2)[1]
    (1F0, 1F1, 3F0, 3F1, 3B1, 3B0, 1B1, 1B0)
    """
    numbers = [(chunk, m) for chunk in range(vpp) for m in range(microbatches)]
    return tuple(
        tuple(
            Action(chunk * pp + rank, kind, m)
            for kind, some in (("F", numbers), ("B", numbers[::-1]))
            for chunk, m in some
        )
        for rank in range(pp)
    )


def interleaved(pp: int, microbatches: int, vpp: int) -> Order:
    """1F1B over `vpp` chunks per rank: the bubble shrinks by vpp (Megatron-LM, arXiv 2104.04473).

    Microbatches pass through the chunks in equal groups, of pp where pp divides their number. (With
    exactly pp microbatches, Megatron-LM up to core 0.9 ran all forwards first: as fast, with more
    microbatches alive. From core 0.10 on, and in torch, the warm-up is the same as always, as here.
    Groups of more than pp are `microbatch_group_size_per_vp_stage` there.)

    >>> interleaved(2, 2, vpp=2)[1]
    (1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1)
    """

    def rank_actions(rank: int) -> tuple[Step, ...]:
        forwards, backwards = (_passes(k, pp, microbatches, vpp, rank) for k in "FB")
        warmup = (pp - rank - 1) * 2 + (vpp - 1) * _group(pp, microbatches)
        return _alternate(forwards, backwards, warmup)

    return tuple(rank_actions(rank) for rank in range(pp))


def zb_h1(pp: int, microbatches: int, vpp: int = 1) -> Order:
    """1F1B with backward in halves: weight gradients fill the bubble (arXiv 2401.10241).

    ZB-H1 there, ZB1P in the table of DeepSeek-V3; with chunks, torch's InterleavedZeroBubble. Rank
    r puts each weight gradient off by r backwards, so all ranks keep as much alive as 1F1B's first.

    >>> zb_h1(2, 3)[1]
    (1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2)
    """

    def rank_actions(rank: int) -> tuple[Step, ...]:
        forwards, inputs = (_passes(k, pp, microbatches, vpp, rank) for k in "FI")
        weights = [a._replace(kind="W") for a in inputs]
        warmup = min(pp - rank - 1 + (vpp - 1) * _group(pp, microbatches), len(forwards))
        actions = forwards[:warmup]
        for i, action in enumerate(inputs):
            actions += [*forwards[warmup + i : warmup + i + 1], action]
            actions += weights[i - rank : i - rank + 1] if i >= rank else []
        return (*actions, *weights[max(len(weights) - rank, 0) :])

    return tuple(rank_actions(rank) for rank in range(pp))


# ---- V: rank r has stages r and 2 pp - 1 - r -----------------------------------------------------


def zbv(pp: int, microbatches: int) -> Order:
    """ZB-V: no bubble where F, I and W take equally long (arXiv 2401.10241, section 6).

    A rank's second stage takes over where its first one's microbatches come back.

    >>> zbv(1, 2)
    ((0F0, 1F0, 1I0, 1W0, 0F1, 0I0, 0W0, 1F1, 1I1, 1W1, 0I1, 0W1),)
    """
    many = max(2 * pp - 1, microbatches)  # with fewer, some of what fills the pipeline is left out

    def rank_actions(rank: int) -> tuple[Step, ...]:
        v = _Vee(pp, rank)
        v.do("F0", times=2 * (pp - rank) - 1)
        v.do("F1 F0", times=rank)
        v.do("F1 I1 W1", times=pp - rank)
        while v.done["F0"] < many:
            v.do("F0 I0 W0 F1 I1 W1")
        while v.done["F1"] < many:
            v.do("I0 W0 F1 I1 W1")
        v.do("I0 I1", times=rank)
        v.do("I0 W0", times=pp - rank)
        v.do("W1", times=v.done["I1"] - v.done["W1"])
        v.do("W0", times=v.done["I0"] - v.done["W0"])
        return tuple(a for a in flat(v.steps) if a.microbatch < microbatches)

    return tuple(rank_actions(rank) for rank in range(pp))


def dualpipev(pp: int, microbatches: int) -> Order:
    """DualPipe cut in half: a V, in which forwards and backwards overlap (DeepSeek's DualPipeV).

    The eight parts of the published schedule, github.com/deepseek-ai/DualPipe.

    >>> print(text(dualpipev(1, 3)))
    rank 0  0F0 1F0 0F1 1B0---- 1F1+0B0---- 0F2+1B1---- 1F2+0B1---- 1B2---- 0I2 0W2
    """

    def rank_actions(rank: int) -> tuple[Step, ...]:
        v, away = _Vee(pp, rank), pp - rank - 1
        v.do("F0", times=2 * away)
        v.do("F0 F1", times=rank + 1)
        v.do("I1 W F1", times=away)
        for i in range(microbatches - 2 * pp + rank + 1):
            # The first two of the rank where the V turns are apart, which makes its bubble smaller.
            v.do("F0 B1 F1&B0" if i == away == 0 else "F0&B1 F1&B0")
        v.do("B1 F1&B0", times=away)
        whole = rank + 1  # of the last backwards; the second half of these is done in halves
        v.do("B1 B0", times=whole // 2)
        v.do("I1 I0" if rank % 2 else "B1 I0")
        v.do("I1 I0", times=whole - whole // 2 - 1)
        v.do("W I0", times=away)
        v.do("W", times=rank + 1)
        return tuple(v.steps)

    return tuple(rank_actions(rank) for rank in range(pp))


def dualpipe(pp: int, microbatches: int) -> Order:
    """Microbatches enter at both ends of the pipeline (DeepSeek-V3, arXiv 2412.19437, 3.2.1).

    The first half of the microbatches runs up the ranks, the other half down, so that ranks r and
    pp - 1 - r both hold stages r and pp - 1 - r. Each does what rank min(r, pp - 1 - r) of
    `dualpipev` does on half the ranks, whose V is unfolded here.

    >>> places(dualpipe(2, 4))[:2]
    [Place(stage=0, rank=0, before=None, after=1), Place(stage=1, rank=0, before=1, after=None)]
    """
    half = dualpipev(pp // 2, microbatches // 2)

    def turned(action: Action, rank: int) -> Action:
        down = action.stage != rank
        return action._replace(microbatch=action.microbatch + down * (microbatches // 2))

    def rank_actions(rank: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        for step in half[min(rank, pp - 1 - rank)]:
            here = [turned(a, rank) for a in parts(step)]
            steps.append(Overlap(*here) if len(here) == 2 else here[0])
        return tuple(steps)

    return tuple(rank_actions(rank) for rank in range(pp))


class _Vee:
    """The steps of one rank of a V, written down as words such as `F0 I1 F1&B0`.

    The digit says which of its two stages; microbatches are counted. `W` alone is the weight
    gradient that has been put off longest.
    """

    def __init__(self, pp: int, rank: int) -> None:
        self.stages = rank, 2 * pp - 1 - rank
        self.steps: list[Step] = []
        self.done: Counter[str] = Counter()  # by word
        self.put_off: list[Action] = []

    def do(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            here = [self.action(w) for w in word.split("&")]
            self.steps.append(Overlap(*here) if len(here) == 2 else here[0])

    def action(self, word: str) -> Action:
        if word == "W":
            return self.put_off.pop(0)._replace(kind="W")
        kind, which = word
        # A full backward counts as both of its halves.
        counted = f"I{which}" if kind == "B" else word
        found = Action(self.stages[int(which)], kind, self.done[counted])
        self.done[counted] += 1
        if kind == "I":
            self.put_off.append(found)
        return found


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Step, ...]:
    """`warmup` forwards, then a forward and a backward by turns, then the other backwards."""
    warmup = min(warmup, len(forwards))
    steady = (action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair)
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _passes(kind: str, pp: int, microbatches: int, vpp: int, rank: int) -> list[Action]:
    """A rank's forwards or backwards: group after group of microbatches through its chunks."""
    chunks = range(vpp) if kind == "F" else range(vpp - 1, -1, -1)
    size = _group(pp, microbatches)
    return [
        Action(chunk * pp + rank, kind, m)
        for first in range(0, microbatches, size)
        for chunk in chunks
        for m in range(first, first + size)
    ]


def _group(pp: int, microbatches: int) -> int:
    """Microbatches that pass through the chunks together: all alike, pp or few more."""
    return microbatches // max(1, microbatches // pp)


# ---- by name -------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """A schedule, and what it asks of the sizes."""

    order: Callable[..., Order]  # (pp, microbatches), and vpp where `chunks` is None
    chunks: int | None = 1  # stages per rank; None: vpp says
    rule: str = ""  # what microbatches must do, in words
    fits: Callable[[int, int], bool] | None = None  # and in numbers: pp, microbatches

    def takes(self, pp: int, microbatches: int) -> bool:
        """Whether the number of microbatches is such as it needs."""
        return self.fits is None or self.fits(pp, microbatches)


def _groups_of_pp(pp: int, microbatches: int) -> bool:
    return microbatches % pp == 0


def _equal_groups(pp: int, microbatches: int) -> bool:
    return microbatches % _group(pp, microbatches) == 0


def _full(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp


def _full_both_ways(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp and microbatches % 2 == 0


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    # Megatron-LM's rule, with groups of pp; torch and the function itself take any equal groups.
    "interleaved": Schedule(interleaved, None, "be divisible by pp", _groups_of_pp),
    "looped-bfs": Schedule(looped_bfs, None),
    "zb-h1": Schedule(zb_h1, None, "pass in equal groups of pp or few more", _equal_groups),
    "zbv": Schedule(zbv, 2),
    "dualpipev": Schedule(dualpipev, 2, "be 2 x pp or more", _full),
    "dualpipe": Schedule(dualpipe, 1, "be even and 2 x pp or more", _full_both_ways),
}


def check(name: str, pp: int, microbatches: int, vpp: int = 1, *, sequences: int = 0) -> None:
    """Raise a UserError unless there is a schedule of this name and the sizes are such as it needs.

    An order from a file is only looked at by `make`. With the number of `sequences` of a microbatch
    on all ranks, advice is about the global batch size.
    """
    for what, size in {"pp": pp, "microbatches": microbatches, "vpp": vpp}.items():
        if size < 1:
            raise UserError(f"schedule {name}: got {what}={size}, wanted 1 or more; set {what}")
    if name.endswith(".csv"):
        return
    if name not in SCHEDULES:
        raise UserError(
            f"unknown schedule {name!r}; wanted {', '.join(SCHEDULES)} or a path ending in .csv"
            + did_you_mean(name.lower(), SCHEDULES)
        )
    schedule = SCHEDULES[name]
    if schedule.chunks not in (None, vpp):
        others = either(known for known, s in SCHEDULES.items() if s.chunks in (None, vpp))
        raise UserError(
            f"schedule {name} has {_stages_of(schedule.chunks)} per rank, got vpp={vpp}; "
            f"use vpp={schedule.chunks}, or schedule {others}"
        )
    if name == "interleaved" and vpp == 1:
        raise UserError("schedule interleaved: got vpp=1, wanted 2 or more; set vpp, or use 1f1b")
    if name == "dualpipe" and pp % 2:
        raise UserError(
            f"schedule dualpipe pairs ranks r and pp - 1 - r, got pp={pp}; use pp={pp + 1}"
        )
    if not schedule.takes(pp, microbatches):
        below, above = range(microbatches - 1, 0, -1), itertools.count(microbatches + 1)
        near = [next((m for m in some if schedule.takes(pp, m)), 0) for some in (below, above)]
        advice = f"use {either(m for m in near if m)} microbatches"
        if sequences:
            advice = f"set global_batch_size to {either(m * sequences for m in near if m)}"
        raise UserError(
            f"schedule {name}: microbatches must {schedule.rule}, got {microbatches} microbatches "
            f"and pp={pp}; {advice}"
        )


def make(name: str, pp: int, microbatches: int, vpp: int = 1) -> Order:
    """The order of a schedule given by name, or read from a file if `name` ends in `.csv`.

    >>> make("1f1b", pp=2, microbatches=1)
    ((0F0, 0B0), (1F0, 1B0))
    """
    check(name, pp, microbatches, vpp)
    if name.endswith(".csv"):
        return _load(name, pp, microbatches, vpp)
    schedule = SCHEDULES[name]
    chunked = (vpp,) if schedule.chunks is None else ()
    return schedule.order(pp, microbatches, *chunked)


def fewest(name: str, pp: int) -> int:
    """The least number of microbatches, of pp or more, that a schedule takes.

    >>> fewest("1f1b", 4), fewest("dualpipe", 4)
    (4, 8)
    """
    schedule = SCHEDULES.get(name)
    return next(m for m in itertools.count(pp) if schedule is None or schedule.takes(pp, m))


def _stages_of(chunks: int | None) -> str:
    return "one stage" if chunks == 1 else f"{chunks} stages"


def _load(path: str, pp: int, microbatches: int, vpp: int) -> Order:
    # Each of at most three kinds of actions, with idle slots and what torch writes beside them.
    order = from_csv(path, min(MOST_BYTES, (1 << 20) + 500 * pp * vpp * microbatches))
    if len(order) != pp:
        raise UserError(
            f"{path}: got {len(order)} rows, wanted one per rank with pp={pp}; change either"
        )
    try:
        validate(order, pp * vpp, microbatches)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return order
