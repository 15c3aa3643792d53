"""The machines of a search: hardware, figures of it that are varied, and how many GPUs.

>>> from stagewright.time.hardware import resolve
>>> [of.memory_gb for of in varied(resolve("h100-sxm"), {"memory.gb": "80:96:16"})]
[80.0, 96.0]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from stagewright.errors import UserError, did_you_mean
from stagewright.searching.lists import values_of
from stagewright.time.constants import wanted_of
from stagewright.time.hardware import Hardware

MOST_SYSTEMS = 100_000
"""Combinations of figures of hardware."""

_SAME = {"size": "gpus"}
"""Last words of figures that stand for others: the size of a scale-up domain is its GPUs."""
_DOCUMENTED = {
    "memory_gb": "memory.gb",
    "memory_bandwidth_gb_s": "memory.bandwidth_gb_s",
    "scale_up.gpus": "scale_up.size",
}
"""What the documentation calls figures, by path, where that is another name."""


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Hardware, and how many GPUs of it."""

    hardware: Hardware
    gpus: int | None
    """None: as many as the degrees make."""


def divisors_of(n: int) -> list[int]:
    """The numbers that divide n, ascending.

    >>> divisors_of(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(max(n, 0) ** 0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def figures_of(hardware: Hardware) -> dict[str, float]:
    """All numbers of a hardware file by their paths: keys with dots between."""

    def walk(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(cast("dict[str, Any]", value), f"{prefix}{key}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{prefix}{key}", value

    return dict(walk(hardware.model_dump(exclude={"sources"}), ""))


def path_of(name: str, hardware: Hardware) -> str:
    """The path of a figure as people write it; UserError for what the hardware has not.

    >>> from stagewright.time.hardware import resolve
    >>> path_of("scale-up.size", resolve("h100-sxm")), path_of("memory.gb", resolve("h100-sxm"))
    ('scale_up.gpus', 'memory_gb')
    """
    known = figures_of(hardware)
    path = known_path(name, known)
    if path is not None:
        return path
    hint = did_you_mean(
        name.replace("-", "_"), [_DOCUMENTED.get(p, p) for p in known]
    ).removesuffix("?")
    see = f"see `stagewright hardware {hardware.name}`"
    raise UserError(
        f"--vary {name}: neither a setting nor a figure of {hardware.name}"
        + (f"{hint}? {see[0].upper()}{see[1:]}" if hint else f"; {see}")
    )


def known_path(name: str, known: Collection[str]) -> str | None:
    """The path of a figure as people write it, of those that are known; None: of none."""
    written = name.replace("-", "_")
    *head, last = written.split(".")
    ways = written, ".".join([*head, _SAME.get(last, last)]), written.replace(".", "_")
    return next((path for path in ways if path in known), None)


def with_figure(hardware: Hardware, path: str, value: float) -> Hardware:
    """The hardware with another value of a figure; UserError where no hardware has such a one."""
    return _with_figures(hardware, {path: value}, {})


def varied(hardware: Hardware, figures: Mapping[str, object]) -> list[Hardware]:
    """The hardware with every combination of the values of some figures.

    `figures`: lists or ranges (`listed`) by name. Each system is named after its figures.
    """
    lists: dict[str, tuple[float, ...]] = {}
    names: dict[str, str] = {}
    for name, values in figures.items():
        path = path_of(name, hardware)
        if path in lists:
            raise UserError(
                f"--vary {name}: {path} is given twice, also as --vary {names[path]}; give one "
                "list of both"
            )
        names[path] = name
        found = values_of(float, values, f"--vary {name}")
        lists[path] = tuple(value for value in found if value is not None)
        if len(lists[path]) < len(found):
            raise UserError(
                f"--vary {name}: got none, wanted numbers; for the value that {hardware.name} has "
                f"say {figures_of(hardware)[path]:g}"
            )
    count = math.prod(map(len, lists.values()))
    if count > MOST_SYSTEMS:
        raise UserError(
            f"--vary makes {count:,} systems of {hardware.name}, wanted at most {MOST_SYSTEMS:,}; "
            "give fewer values, or steps"
        )
    if not lists:
        return [hardware]
    whole = figures_of(hardware)
    for path, values in lists.items():
        lists[path] = _read(hardware, path, values, names, is_count=isinstance(whole[path], int))
    return [
        _replaced(hardware, dict(zip(lists, each, strict=True)), names)
        for each in itertools.product(*lists.values())
    ]


def _read(
    hardware: Hardware,
    path: str,
    values: Iterable[float],
    names: Mapping[str, str],
    *,
    is_count: bool,
) -> tuple[float, ...]:
    """The values of a figure as the hardware has them; UserError for one that no hardware has.

    What a figure may be is a range, and each figure is checked by itself: the least and the largest
    value decide for all.
    """
    every = tuple(values)
    for value in every if is_count else ():
        if value % 1:
            raise UserError(f"--vary {names.get(path, path)}: got {value:g}, wanted a whole number")
    for value in {min(every): None, max(every): None}:
        _with_figures(hardware, {path: value}, names)
    return tuple(map(int, every)) if is_count else every


def _replaced(
    hardware: Hardware, figures: Mapping[str, float], names: Mapping[str, str]
) -> Hardware:
    """The hardware with other figures that have been checked, by path."""

    def replaced(block: Any, path: Sequence[str], value: float) -> Any:
        first, *rest = path
        if isinstance(block, Mapping):
            inner = cast("Mapping[str, Any]", block)
            return {**inner, first: replaced(inner[first], rest, value) if rest else value}
        new = replaced(getattr(block, first), rest, value) if rest else value
        return block.model_copy(update={first: new})

    for path, value in figures.items():
        hardware = replaced(hardware, path.split("."), value)
    return hardware.model_copy(update={"name": _named(hardware.name, figures, names)})


def _named(name: str, figures: Mapping[str, float], names: Mapping[str, str]) -> str:
    """What hardware with other figures is called: by the figures, as the user names them."""
    said = ", ".join(f"{names.get(path, path)}={value:.12g}" for path, value in figures.items())
    return f"{name} {said}"


def _with_figures(
    hardware: Hardware, figures: Mapping[str, float], names: Mapping[str, str]
) -> Hardware:
    """The hardware with other figures, by path; `names` are what the user calls some of them."""
    values = hardware.model_dump()
    whole = figures_of(hardware)
    for path, value in figures.items():
        *places, last = path.split(".")
        block = values
        for place in places:
            block = block[place]
        block[last] = int(value) if isinstance(whole[path], int) and not value % 1 else value
    values["name"] = _named(hardware.name, figures, names)
    try:
        return Hardware.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        wanted = wanted_of(first["msg"])
        raise UserError(
            f"--vary {names.get(path, path)}: got {first['input']:g}, {wanted}"
        ) from None
