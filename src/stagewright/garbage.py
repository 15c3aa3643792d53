"""How often Python looks for cyclic garbage, where most objects that are made live on."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class _Seldom:
    """How many threads are in `seldom_collected`, and the thresholds before the first one was."""

    users: int = 0
    before: tuple[int, int, int] = (0, 0, 0)
    lock: threading.Lock = field(default_factory=threading.Lock)


_SELDOM = _Seldom()


@contextlib.contextmanager
def seldom_collected() -> Generator[None]:
    """Look for cyclic garbage more rarely: graphs and rows of programs are many objects, of which
    hardly any is part of a cycle.

    Thresholds are those of all threads: the last thread that leaves puts them back.
    """
    with _SELDOM.lock:
        if not _SELDOM.users:
            _SELDOM.before = before = gc.get_threshold()
            gc.set_threshold(max(before[0], _MADE) if before[0] else 0, *before[1:])
        _SELDOM.users += 1
    try:
        yield
    finally:
        with _SELDOM.lock:
            _SELDOM.users -= 1
            if not _SELDOM.users:
                gc.set_threshold(*_SELDOM.before)
