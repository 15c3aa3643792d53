"""Schedules by name, and what each asks of the sizes: rows of `SCHEDULES`, or a file of actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from stagewright.errors import UserError, did_you_mean, either
from stagewright.schedule.actions import Order
from stagewright.schedule.controllable_memory import v_half, v_min
from stagewright.schedule.generators import (
    dualpipe,
    dualpipev,
    equal_group,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zbv,
)
from stagewright.schedule.text import MOST_BYTES, from_csv
from stagewright.schedule.validate import validate
from stagewright.schedule.vocabulary import (
    ONE_BARRIER,
    STOPS,
    TWO_BARRIERS,
    SharedEnds,
    interlaced,
    v_half_vocab_1,
    vocab_1,
    vocab_2,
)


class Schedule(NamedTuple):
    """The generator of a schedule, and the sizes that the schedule accepts."""

    order: Callable[..., Order]  # (pp, microbatches), and vpp where `chunks` is None
    chunks: int | None = 1  # stages per rank; None: vpp says
    rule: str = ""  # what microbatches must do, in words
    fits: Callable[[int, int], bool] | None = None  # and in numbers: pp, microbatches
    instead: str = ""  # the schedule to use with one stage per rank, where several are needed
    pairs_ranks: bool = False  # ranks r and pp - 1 - r have the same stages: pp is even
    in_groups: bool = False  # microbatches pass through the chunks in groups whose size can be set
    one_stage: bool = False
    """Whether PyTorch's class of the schedule has one stage on a rank and a loop of its own."""
    fills: int = 1
    """With this many times pp microbatches the pipeline has been full: each further microbatch adds
    nearly the same time."""
    forwards_first: bool = False
    """Whether a rank goes through the forwards of all microbatches before the first backward."""
    ends: SharedEnds | None = None
    """The stages before and behind layers that all ranks share; None: they share none."""
    holds_sent_gradients: bool = False
    """Whether PyTorch's class of the schedule waits for the send of a gradient only at the next
    one, and so holds the gradient until then. Schedules with several stages, and orders from files,
    run in its general loop, which does not."""

    def takes(self, pp: int, microbatches: int, group: int | None = None) -> bool:
        """Whether the schedule accepts this number of microbatches on `pp` ranks, in such groups.

        Groups are as large as Megatron-LM's `forward_backward_pipelining_with_interleaving` wants
        them: pp or more, and so many are left for the last one, too. All microbatches may be one.
        """
        if group is not None:
            left = microbatches % group
            return group == microbatches or (pp <= group < microbatches and not 0 < left < pp)
        return self.fits is None or self.fits(pp, microbatches)


def _groups_of_pp(pp: int, microbatches: int) -> bool:
    return microbatches % pp == 0


def _equal_groups(pp: int, microbatches: int) -> bool:
    return microbatches % equal_group(pp, microbatches) == 0


def _full(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp


def _full_both_ways(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp and microbatches % 2 == 0


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, one_stage=True, forwards_first=True),
    "1f1b": Schedule(one_f_one_b, one_stage=True, holds_sent_gradients=True),
    # Megatron-LM's groups are of pp unless their size is given; torch takes any equal groups.
    "interleaved": Schedule(
        interleaved, None, "be divisible by pp", _groups_of_pp, instead="1f1b", in_groups=True
    ),
    "looped-bfs": Schedule(looped_bfs, None, forwards_first=True),
    "zb-h1": Schedule(
        zb_h1, None, "pass in equal groups of pp or few more", _equal_groups, fills=2
    ),
    "zb-h2": Schedule(zb_h2, fills=3),
    "zbv": Schedule(zbv, 2, fills=2),
    "v-half": Schedule(v_half, 2, fills=2),
    "v-min": Schedule(v_min, 2),
    "dualpipev": Schedule(dualpipev, 2, "be 2 x pp or more", _full, fills=2),
    "dualpipe": Schedule(
        dualpipe, 1, "be even and 2 x pp or more", _full_both_ways, pairs_ranks=True, fills=2
    ),
    "interlaced": Schedule(interlaced, ends=STOPS, fills=2),
    "vocab-1": Schedule(vocab_1, ends=TWO_BARRIERS, fills=3),
    "vocab-2": Schedule(vocab_2, ends=ONE_BARRIER, fills=3),
    "v-half-vocab-1": Schedule(v_half_vocab_1, 2, ends=TWO_BARRIERS, fills=3),
}


def check_name(name: str) -> None:
    """Raise a UserError unless there is a schedule of this name, or the name is a file's."""
    if name not in SCHEDULES and not name.endswith(".csv"):
        raise UserError(
            f"unknown schedule {name!r}; wanted {', '.join(SCHEDULES)} or a path ending in .csv"
            + did_you_mean(name.lower(), SCHEDULES)
        )


def check(
    name: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    group: int | None = None,
    sequences: int = 0,
) -> None:
    """Raise a UserError unless there is a schedule of this name that accepts the sizes.

    An order from a file is validated by `make` alone. `group` is the number of microbatches that
    pass through the chunks together; None: what the schedule does. Given the number of `sequences`
    of a microbatch over all ranks, the advice of an error names the global batch size.
    """
    for what, size in {"pp": pp, "microbatches": microbatches, "vpp": vpp}.items():
        if size < 1:
            raise UserError(f"schedule {name}: got {what}={size}, wanted 1 or more; set {what}")
    if group is not None and not (name in SCHEDULES and SCHEDULES[name].in_groups):
        raise UserError(
            f"microbatch_group_size_per_vp_stage={group} is about schedule interleaved, got "
            f"schedule {name}; drop it"
        )
    check_name(name)
    if name.endswith(".csv"):
        return
    schedule = SCHEDULES[name]
    if schedule.chunks not in (None, vpp):
        others = either(known for known, s in SCHEDULES.items() if s.chunks in (None, vpp))
        raise UserError(
            f"schedule {name} has {_stages_of(schedule.chunks)} per rank, got vpp={vpp}; "
            f"use vpp={schedule.chunks}, or schedule {others}"
        )
    if schedule.instead and vpp == 1:
        raise UserError(
            f"schedule {name}: got vpp=1, wanted 2 or more; set vpp, or use {schedule.instead}"
        )
    if schedule.pairs_ranks and pp % 2:
        raise UserError(
            f"schedule {name} pairs ranks r and pp - 1 - r, got pp={pp}; use pp={pp + 1}"
        )
    if group is not None:
        _check_group(schedule, pp, microbatches, group)
    elif not schedule.takes(pp, microbatches):
        raise UserError(
            f"schedule {name}: microbatches must {schedule.rule}, got {microbatches} microbatches "
            f"and pp={pp}; {_other_microbatches(schedule, pp, microbatches, sequences)}"
        )


def _other_microbatches(schedule: Schedule, pp: int, microbatches: int, sequences: int) -> str:
    """What to do where a schedule does not take so many microbatches; see `check`."""
    below, above = range(microbatches - 1, 0, -1), itertools.count(microbatches + 1)
    near = [next((m for m in way if schedule.takes(pp, m)), 0) for way in (below, above)]
    advice = f"use {either(m for m in near if m)} microbatches"
    if sequences:
        advice = f"set global_batch_size to {either(m * sequences for m in near if m)}"
    if schedule.in_groups and pp < microbatches:
        least = next(n for n in itertools.count(pp) if schedule.takes(pp, microbatches, n))
        advice += f", or set microbatch_group_size_per_vp_stage to {least}"
    return advice


def _check_group(schedule: Schedule, pp: int, microbatches: int, group: int) -> None:
    """Raise a UserError that names the nearest sizes unless groups of this size pass."""
    if schedule.takes(pp, microbatches, group):
        return
    ways = range(min(group - 1, microbatches), 0, -1), range(group + 1, microbatches + 1)
    near = [next((n for n in way if schedule.takes(pp, microbatches, n)), 0) for way in ways]
    raise UserError(
        f"microbatch_group_size_per_vp_stage={group} does not suit {microbatches} microbatches "
        f"and pp={pp}: groups, and what is left for the last one, must have pp or more; "
        f"use {either(n for n in near if n)}"
    )


def make(name: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None) -> Order:
    """The order of a schedule given by name, or read from a file if `name` ends in `.csv`.

    `group` as in `check`.

    >>> make("1f1b", pp=2, microbatches=1)
    ((0F0, 0B0), (1F0, 1B0))
    """
    check(name, pp, microbatches, vpp, group=group)
    if name.endswith(".csv"):
        return _load(name, pp, microbatches, vpp)
    schedule = SCHEDULES[name]
    chunked = (vpp,) if schedule.chunks is None else ()
    grouped = {"group": group or pp} if schedule.in_groups else {}
    return schedule.order(pp, microbatches, *chunked, **grouped)


def known_order(name: str, pp: int, microbatches: int, vpp: int, group: int | None) -> Order:
    """As `make`; an order that was asked for before is the same object, unless a file has it."""
    if name.endswith(".csv"):
        return make(name, pp, microbatches, vpp, group=group)
    return _known_order(name, pp, microbatches, vpp, group)


@lru_cache(maxsize=64)
def _known_order(name: str, pp: int, microbatches: int, vpp: int, group: int | None) -> Order:
    return make(name, pp, microbatches, vpp, group=group)


def shared_ends(name: str | None) -> SharedEnds | None:
    """The stages that all ranks share in the schedule of this name; None: they share none."""
    return SCHEDULES[name].ends if name in SCHEDULES else None


def fewest(name: str, pp: int, group: int | None = None) -> int:
    """The least number of microbatches, of pp or more, that a schedule takes; of groups of a given
    size, one.

    >>> fewest("1f1b", 4), fewest("dualpipe", 4), fewest("interleaved", 4, 6)
    (4, 8, 6)
    """
    if group is not None:
        return group
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
