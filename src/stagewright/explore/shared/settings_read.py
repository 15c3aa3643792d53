"""Results of functions of a run, kept for all runs that agree in every setting that was read.

Which settings decide about a graph, or about the blocks of a stage, is nowhere written down: it is
whatever the functions that make them read of the run on their way, as `varying.Cases` has it of
numbers.

>>> shared = BySettingsRead()
>>> runs = Run(model="gpt2", tp=2), Run(model="gpt2", tp=2, zero=1), Run(model="gpt2", pp=4)
>>> a, b, c = [shared.of("ranks", run, lambda run: [run.world_size]) for run in runs]
>>> a is b, c
(True, [4])
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from types import MethodType
from typing import Any, TypeVar, cast

from stagewright.errors import UserError
from stagewright.run.settings import Run
from stagewright.varying import Varying

_Made = TypeVar("_Made")
_SETTINGS = frozenset(Run.model_fields)


class BySettingsRead:
    """What was made of runs, by what that is and by the settings that were read for it."""

    def __init__(self) -> None:
        """Nothing was made yet."""
        self._made: dict[Hashable, dict[tuple[str, ...], dict[Hashable, Any]]] = {}
        self._runs: list[Run] = []
        """Of which something was made: while these are kept, no other number has the id of one of
        theirs."""

    def __len__(self) -> int:
        """How much was made."""
        return len(self._runs)

    def of(self, what: Hashable, run: Run, make: Callable[[Run], _Made]) -> _Made:
        """What `make` makes of a run, or has made of one that agrees in all that was read of it.

        `what` is equal for functions that make the same of the same settings. What is made must not
        hand on the run, whose other settings may differ. A UserError counts as made.
        """
        by_names = self._made.setdefault(what, {})
        for names, known in by_names.items():
            key = _values(run, names)
            if key in known:
                return _given(known[key])
        self._runs.append(run)
        read = _RunRead(run, set())
        try:
            found: Any = make(cast("Run", read))
        except UserError as error:
            found = copy(error)  # without the frames that it has come through, and what they hold
        names = (*sorted(read.names),)
        by_names.setdefault(names, {})[_values(run, names)] = found
        return _given(found)


class _RunRead:
    """A run, and the names of the settings that were read of it or of its copies."""

    def __init__(self, run: Run, names: set[str]) -> None:
        self.run, self.names = run, names

    def __getattr__(self, name: str) -> Any:
        """What is read for the first time: it then is an attribute, which Python finds itself."""
        if name in _SETTINGS:
            self.names.add(name)
            found = self.__dict__[name] = getattr(self.run, name)
            return found
        of: Any = getattr(Run, name)  # reads settings in its turn
        if not isinstance(of, property):
            return MethodType(of, self)
        found = self.__dict__[name] = of.__get__(self)
        return found

    def model_copy(self, *, update: Mapping[str, Any]) -> _RunRead:
        """The run with other settings."""
        return _RunRead(self.run.model_copy(update=update), self.names)


def _values(run: Run, names: tuple[str, ...]) -> Hashable:
    """What is equal for runs with equal settings; numbers of many configurations, for the same."""
    values = (getattr(run, name) for name in names)
    return (*((Varying, id(of)) if isinstance(of, Varying) else of for of in values),)


def _given(made: Any) -> Any:
    if isinstance(made, UserError):
        raise copy(made)
    return made
