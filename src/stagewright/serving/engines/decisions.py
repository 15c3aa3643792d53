"""What schedulers decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FOREVER = 1 << 60


class Decision(NamedTuple):
    """What a step computes, and how long that decision stands."""

    chunks: Sequence[tuple[int, int]] = ()
    """Requests whose prompts go on, and so many tokens of each."""
    decodes: bool = True
    """Whether decoding requests get a token."""
    repeats: int = FOREVER
    """Without chunks: so many steps are decided alike if nothing arrives or ends."""
    open: bool = True
    """Whether an arrival could change that."""
    skipped: Sequence[int] = ()
    """Decoding requests that get no token in this one step."""
    stands: bool = False
    """Whether the decision also stands when requests end, while all that run decode, nobody waits
    and blocks suffice: the scheduler is then not asked again."""


ONLY_DECODES = Decision(stands=True)
FULL = Decision(open=False)


class BlockRules(NamedTuple):
    """How a scheduler takes and names blocks of prompts; by default as vLLM."""

    takes_whole_prompts: bool = False
    """Whether a request that is admitted takes the blocks of its whole prompt at once."""
    names_late: bool = False
    """Whether others find blocks of a prompt when these are computed, not when taken."""
    merges_copies: bool = False
    """Whether of blocks that two have computed in the same step one copy is kept."""


class PlainRules(NamedTuple):
    """All of a scheduler's rules, where blocks suffice: who runs goes on, then who waits begins.

    Each decoding request takes a token of the `budget` of a step, then the prompt that has been
    begun takes what it lacks; then prompts begin, first come, first served, the last in part.
    """

    budget: int
    """Tokens of a step."""
    seats: int
    """Requests that run at a time."""
    chunked: bool
    """Whether a prompt may begin in part."""
    whole_prompts: bool
    """Whether blocks must suffice for the whole prompt of who begins."""
