"""Schedules by name, and the sizes that each accepts: rows of `SCHEDULES`, or a file of actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
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
from stagewright.schedule.play import validate
from stagewright.schedule.text import MAX_BYTES, from_csv
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
    """Generator of a schedule, and the sizes that it accepts."""

    order: Callable[..., Order]  # (pp, microbatches), and vpp where `chunks` is None
    chunks: int | None = 1  # stages per rank; None: vpp
    rule: str = ""  # condition on microbatches, in words
    fits: Callable[[int, int], bool] | None = None  # the same as a function of pp, microbatches
    instead: str = ""  # schedule to use with one stage per rank, where several are needed
    pairs_ranks: bool = False  # ranks r and pp - 1 - r have the same stages: pp is even
    in_groups: bool = False  # the size of the groups that pass through the chunks can be set
    fills: int = 1
    """With this many times pp microbatches the pipeline has been full: each further microbatch adds
    nearly the same time."""
    forwards_first: bool = False
    """True if a rank runs the forwards of all microbatches before its first backward."""
    asynchronous: bool = False
    """True if the host does not wait for messages; in Megatron-LM's 1F1B it does.

    Read where a rank has one stage. In the runtime of zero bubble streams wait
    (github.com/sail-sg/zero-bubble-pipeline-parallelism, pipeline_parallel/zerobubble/runtime.py),
    and with `enable_vocab_parallel` messages are not synchronized with the host, either
    (github.com/sail-sg/VocabularyParallelism, pipeline_parallel/p2p_communication.py)."""
    ends: SharedEnds | None = None
    """Stages before and after the layers that all ranks share; None: no stage is shared."""

    def takes(self, pp: int, microbatches: int, group: int | None = None) -> bool:
        """Return True if the schedule accepts these microbatches on `pp` ranks, in such groups.

        Groups as in Megatron-LM's `forward_backward_pipelining_with_interleaving`: pp or more
        microbatches, also in the last group; or one group of all.
        """
        if group is not None:
            in_last = microbatches % group
            return group == microbatches or (pp <= group < microbatches and not 0 < in_last < pp)
        return self.fits is None or self.fits(pp, microbatches)


def _divisible_by_pp(pp: int, microbatches: int) -> bool:
    return microbatches % pp == 0


def _in_equal_groups(pp: int, microbatches: int) -> bool:
    return microbatches % equal_group(pp, microbatches) == 0


def _twice_pp(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp


def _even_and_twice_pp(pp: int, microbatches: int) -> bool:
    return microbatches >= 2 * pp and microbatches % 2 == 0


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, forwards_first=True),
    "1f1b": Schedule(one_f_one_b),
    # Groups of Megatron-LM have pp microbatches unless their size is set; torch accepts any equal
    # groups.
    "interleaved": Schedule(
        interleaved, None, "be divisible by pp", _divisible_by_pp, instead="1f1b", in_groups=True
    ),
    "looped-bfs": Schedule(looped_bfs, None, forwards_first=True),
    "zb-h1": Schedule(
        zb_h1,
        None,
        "pass in equal groups of pp or few more",
        _in_equal_groups,
        fills=2,
        asynchronous=True,
    ),
    "zb-h2": Schedule(zb_h2, fills=3, asynchronous=True),
    "zbv": Schedule(zbv, 2, fills=2),
    "v-half": Schedule(v_half, 2, fills=2),
    "v-min": Schedule(v_min, 2),
    "dualpipev": Schedule(dualpipev, 2, "be 2 x pp or more", _twice_pp, fills=2),
    "dualpipe": Schedule(
        dualpipe, 1, "be even and 2 x pp or more", _even_and_twice_pp, pairs_ranks=True, fills=2
    ),
    "interlaced": Schedule(interlaced, ends=STOPS, fills=2, asynchronous=True),
    "vocab-1": Schedule(vocab_1, ends=TWO_BARRIERS, fills=3, asynchronous=True),
    "vocab-2": Schedule(vocab_2, ends=ONE_BARRIER, fills=3, asynchronous=True),
    "v-half-vocab-1": Schedule(v_half_vocab_1, 2, ends=TWO_BARRIERS, fills=3),
}


def check_name(name: str) -> None:
    """Raise UserError unless `name` is that of a schedule or of a file."""
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
    """Raise UserError unless there is a schedule of this name that accepts the sizes.

    An order from a file is validated by `make` alone. `group`: microbatches that pass through the
    chunks together; None: the schedule's own number. `sequences`: sequences of a microbatch over
    all ranks, with which the advice of an error names the global batch size.
    """
    for size_name, size in {"pp": pp, "microbatches": microbatches, "vpp": vpp}.items():
        if size < 1:
            raise UserError(
                f"schedule {name}: got {size_name}={size}, wanted 1 or more; set {size_name}"
            )
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
        stages = "one stage" if schedule.chunks == 1 else f"{schedule.chunks} stages"
        others = either(other for other, s in SCHEDULES.items() if s.chunks in (None, vpp))
        raise UserError(
            f"schedule {name} has {stages} per rank, got vpp={vpp}; "
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
    if schedule.takes(pp, microbatches, group):
        return
    if group is not None:
        near = _nearest(
            lambda n: schedule.takes(pp, microbatches, n), group, range(group + 1, microbatches + 1)
        )
        raise UserError(
            f"microbatch_group_size_per_vp_stage={group} does not suit {microbatches} microbatches "
            f"and pp={pp}: groups, and what is left for the last one, must have pp or more; "
            f"use {either(near)}"
        )
    near = _nearest(
        lambda n: schedule.takes(pp, n), microbatches, itertools.count(microbatches + 1)
    )
    advice = f"use {either(near)} microbatches"
    if sequences:
        advice = f"set global_batch_size to {either(n * sequences for n in near)}"
    if schedule.in_groups and pp < microbatches:
        smallest = next(n for n in itertools.count(pp) if schedule.takes(pp, microbatches, n))
        advice += f", or set microbatch_group_size_per_vp_stage to {smallest}"
    raise UserError(
        f"schedule {name}: microbatches must {schedule.rule}, got {microbatches} microbatches "
        f"and pp={pp}; {advice}"
    )


def _nearest(accepts: Callable[[int], bool], number: int, larger: Iterable[int]) -> list[int]:
    """Nearest accepted numbers below `number`, and among the `larger` ones."""
    nearest = (next(filter(accepts, ns), 0) for ns in (range(number - 1, 0, -1), larger))
    return [n for n in nearest if n]


def make(name: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None) -> Order:
    """Order of a schedule by name, or from a file if `name` ends in `.csv`.

    `group` as in `check`. Equal arguments return the same object, except for files.

    >>> make("1f1b", pp=2, microbatches=1)
    ((0F0, 0B0), (1F0, 1B0))
    """
    if name.endswith(".csv"):
        check(name, pp, microbatches, vpp, group=group)
        return _load(name, pp, microbatches, vpp)
    return _generate(name, pp, microbatches, vpp, group)


@lru_cache(maxsize=64)
def _generate(name: str, pp: int, microbatches: int, vpp: int, group: int | None) -> Order:
    check(name, pp, microbatches, vpp, group=group)
    schedule = SCHEDULES[name]
    chunked = (vpp,) if schedule.chunks is None else ()
    grouped = {"group": group or pp} if schedule.in_groups else {}
    return schedule.order(pp, microbatches, *chunked, **grouped)


def _load(path: str, pp: int, microbatches: int, vpp: int) -> Order:
    # At most three kinds of actions, besides idle slots and torch's cells of communication.
    order = from_csv(path, min(MAX_BYTES, (1 << 20) + 500 * pp * vpp * microbatches))
    if len(order) != pp:
        raise UserError(
            f"{path}: got {len(order)} rows, wanted one per rank with pp={pp}; change either"
        )
    try:
        validate(order, pp * vpp, microbatches)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return order


def shared_ends(name: str | None) -> SharedEnds | None:
    """Stages that all ranks share in the schedule of this name; None: no stage is shared."""
    return SCHEDULES[name].ends if name in SCHEDULES else None


def fewest(name: str, pp: int, group: int | None = None) -> int:
    """Smallest number of microbatches, of pp or more, that a schedule accepts.

    With groups of a given size, one group.

    >>> fewest("1f1b", 4), fewest("dualpipe", 4), fewest("interleaved", 4, 6)
    (4, 8, 6)
    """
    if group is not None:
        return group
    schedule = SCHEDULES.get(name)
    return next(m for m in itertools.count(pp) if schedule is None or schedule.takes(pp, m))
