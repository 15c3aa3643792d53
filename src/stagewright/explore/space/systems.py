"""The machines of a search: hardware, figures of it that are varied, and how many GPUs.

>>> from stagewright.time.hardware import resolve
>>> [of.memory_gb for of in varied(resolve("h100-sxm"), {"memory.gb": "80:96:16"})]
[80.0, 96.0]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from stagewright.errors import UserError, did_you_mean
from stagewright.explore.space.listed import values_of
from stagewright.time.hardware import Hardware

MOST_SYSTEMS = 100_000
"""Combinations of figures of hardware."""

_SAME = {"size": "gpus"}
"""Last words of figures that stand for others: the size of a scale-up domain is its GPUs."""


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
    written = name.replace("-", "_")
    *head, last = written.split(".")
    for path in (written, ".".join([*head, _SAME.get(last, last)]), written.replace(".", "_")):
        if path in known:
            return path
    raise UserError(
        f"--vary {name}: neither a setting nor a figure of {hardware.name}"
        f"{did_you_mean(written, known)}; see `stagewright hardware {hardware.name}`"
    )


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
            raise UserError(f"--vary {name}: {path} is given twice; give one list of both")
        names[path] = name
        found = values_of(float, values, f"--vary {name}")
        lists[path] = tuple(value for value in found if value is not None)
        if len(lists[path]) < len(found):
            raise UserError(
                f"--vary {name}: got none, wanted numbers; for the value that {hardware.name} has "
                f"say {figures_of(hardware)[path]:g}"
            )
    count = 1
    for values in lists.values():
        count *= len(values)
    if count > MOST_SYSTEMS:
        raise UserError(
            f"--vary makes {count:,} systems of {hardware.name}, wanted at most {MOST_SYSTEMS:,}; "
            "give fewer values, or steps"
        )
    return [
        _with_figures(hardware, dict(zip(lists, each, strict=True)), names)
        for each in itertools.product(*lists.values())
    ]


def _with_figures(
    hardware: Hardware, figures: Mapping[str, float], names: Mapping[str, str]
) -> Hardware:
    """The hardware with other figures, by path; `names` are what the user calls some of them."""
    if not figures:
        return hardware
    values = hardware.model_dump()
    whole = figures_of(hardware)
    for path, value in figures.items():
        *places, last = path.split(".")
        block = values
        for place in places:
            block = block[place]
        is_count = isinstance(whole[path], int)
        if is_count and value % 1:
            raise UserError(f"--vary {names.get(path, path)}: got {value:g}, wanted a whole number")
        block[last] = int(value) if is_count else value
    said = ", ".join(f"{path}={value:.12g}" for path, value in figures.items())
    values["name"] = f"{hardware.name} {said}"
    try:
        return Hardware.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        wanted = first["msg"].removeprefix("Input should be ")
        raise UserError(
            f"--vary {names.get(path, path)}: got {first['input']:g}, wanted a number {wanted}"
        ) from None
