"""What fits into the memory of a device: how many requests, and how long ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run import lengths
from stagewright.run.requests import allowance_of, read_bytes
from stagewright.run.settings import Run


class Capacity(NamedTuple):
    """How far memory goes, by the same accounting as the report's: ideal allocation, and of what is
    no tensor only the run's `memory_allowance`."""

    device_memory: int
    fits: bool
    """Whether the step does, as it is."""
    requests: int
    """The most in a step of all ranks: as many for each of dp, in the step's proportions."""
    tokens: int | None
    """The longest that each of the step's requests may be (context and new tokens); None where they
    differ in length, or where length takes no memory: layers that carry a state."""


def capacity(run: Run, peak: Callable[[Run], int]) -> Capacity:
    """Vary a resolved inference run; `peak` is the most bytes of tensors on one of its ranks.

    A step fits where `program.fit.fit_of` says so: the peak and the run's `memory_allowance` are at
    most the memory of a device. `fit_of` is not called here: it names the fullest class of ranks,
    and the many steps that are tried have no programs, only their peaks.
    """
    assert run.device_memory is not None
    memory = read_bytes(run.device_memory)
    room = memory - allowance_of(run)

    def fits(**settings: int) -> bool:
        try:
            return peak(run.model_copy(update=settings)) <= room
        except UserError:  # beyond all bounds
            return False

    requests = run.dp * _most(lambda n: fits(batch_size=n * run.dp))
    return Capacity(memory, peak(run) <= room, requests, _longest(run, fits))


def _longest(run: Run, fits: Callable[..., bool]) -> int | None:
    if run.requests is not None:
        return None
    varied, fixed = "context_length", 1 + run.num_speculative_tokens
    if run.mode == "prefill":
        varied, fixed = "prompt_length", run.context_length or 0
    # A contiguous cache makes room for the longest request, whatever that is.
    room = ("max_model_len",) if run.kv_cache == "contiguous" else ()
    found = _most(lambda n: fits(**{varied: n - fixed}, **dict.fromkeys(room, n)), fixed + 1)
    return None if found > lengths.LARGEST // 2 else found


def _most(fits: Callable[[int], bool], least: int = 1) -> int:
    """The largest number that fits, 0 if the least does not; what is above one that does not is
    taken not to fit either.

    >>> _most(lambda n: n * n < 1000)
    31
    """
    if not fits(least):
        return 0
    low, high = least, least + 1
    while high <= lengths.LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
