"""How often Python looks for cyclic garbage, where most objects that are made live on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

_MADE = 10_000
"""Objects that are made between two looks at the youngest ones; Python's own number is 700."""


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Let cyclic garbage lie until the end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def seldom_collected() -> Generator[None]:
    """Look for cyclic garbage more rarely: graphs and rows of programs are many objects, of which
    hardly any is part of a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _MADE) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
