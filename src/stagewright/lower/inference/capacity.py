"""Number and length of requests that fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.run import lengths
from stagewright.run.requests import allowance_of, read_bytes
from stagewright.run.settings import Run


class Capacity(NamedTuple):
    """Limits of device memory, with ideal allocation and the run's `memory_allowance`."""

    device_memory: int
    fits: bool
    """True if the step fits."""
    requests: int
    """Max requests in a step of all ranks, equal numbers per dp rank, in the step's proportions."""
    tokens: int | None
    """Max length of each request (context and new tokens); None: lengths differ, or length takes no
    memory (layers that carry a state)."""


def capacity(run: Run, peak: Callable[[Run], int]) -> Capacity:
    """Vary a resolved inference run; `peak`: max bytes of tensors on one of its ranks.

    A step fits if the peak and the run's `memory_allowance` are at most the memory of a device, as
    in `program.fit.fit_of`, which needs programs; the steps tried here have only peaks.
    """
    assert run.device_memory is not None
    memory = read_bytes(run.device_memory)
    room = memory - allowance_of(run)

    def fits(**settings: int) -> bool:
        try:
            return peak(run.model_copy(update=settings)) <= room
        except UserError:  # exceeds a bound of the run's settings
            return False

    requests = run.dp * _largest(lambda n: fits(batch_size=n * run.dp))
    return Capacity(memory, peak(run) <= room, requests, _longest(run, fits))


def _longest(run: Run, fits: Callable[..., bool]) -> int | None:
    if run.requests is not None:
        return None
    varied, fixed = "context_length", 1 + run.num_speculative_tokens
    if run.mode == "prefill":
        varied, fixed = "prompt_length", run.context_length or 0
    # A contiguous cache reserves the longest request.
    room = ("max_model_len",) if run.kv_cache == "contiguous" else ()
    length = _largest(lambda n: fits(**{varied: n - fixed}, **dict.fromkeys(room, n)), fixed + 1)
    return None if length > lengths.LARGEST // 2 else length


def _largest(fits: Callable[[int], bool], lowest: int = 1) -> int:
    """Largest number that fits, by bisection; 0 if `lowest` does not.

    >>> _largest(lambda n: n * n < 1000)
    31
    """
    if not fits(lowest):
        return 0
    low, high = lowest, lowest + 1
    while high <= lengths.LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
