"""Machines of a search: hardware, specs of it that vary, and the number of GPUs.

>>> from stagewright.time.hardware import resolve
>>> [hardware.memory_gb for hardware, _ in varied(resolve("h100-sxm"), {"memory.gb": "80:96:16"})]
[80.0, 96.0]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from stagewright.errors import UserError, did_you_mean
from stagewright.launch.tables import dotted
from stagewright.searching.lists import values_of
from stagewright.time.hardware import Hardware, smaller_shares, wanted_of

MOST_SYSTEMS = 100_000
"""Limit of combinations of specs."""

Specs = Mapping[str, float]
"""Numbers of a hardware file by path: keys joined by dots."""

_ALIASES = {"size": "gpus"}
"""Aliases of the last key of a path: the size of a scale-up domain is its GPUs."""
_DOCUMENTED = {
    "memory_gb": "memory.gb",
    "memory_bandwidth_gb_s": "memory.bandwidth_gb_s",
    "scale_up.gpus": "scale_up.size",
}
"""Documented names of specs, where these differ from their paths."""


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Hardware, and how many GPUs of it."""

    hardware: Hardware
    gpus: int | None
    """None: as many as the degrees make."""
    varied: Specs = field(default_factory=dict[str, float])
    """Specs that `--vary` changed."""


def divisors_of(n: int) -> list[int]:
    """Divisors of n, ascending.

    >>> divisors_of(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(max(n, 0) ** 0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def specs_of(hardware: Hardware) -> dict[str, float]:
    """All numbers of a hardware file by path."""
    values = dotted(hardware.model_dump(exclude={"sources"}))
    return {path: x for path, x in values if type(x) in (int, float)}


def path_of(name: str, hardware: Hardware) -> str:
    """Path of a spec by its name in `--vary`; UserError if the hardware lacks it.

    >>> from stagewright.time.hardware import resolve
    >>> path_of("scale-up.size", resolve("h100-sxm")), path_of("memory.gb", resolve("h100-sxm"))
    ('scale_up.gpus', 'memory_gb')
    """
    paths: Collection[str] = specs_of(hardware)
    written = name.replace("-", "_")
    *head, last = written.split(".")
    spellings = written, ".".join([*head, _ALIASES.get(last, last)]), written.replace(".", "_")
    for path in spellings:
        if path in paths:
            return path
    hint = did_you_mean(written, [_DOCUMENTED.get(p, p) for p in paths]).removesuffix("?")
    see = f"see `stagewright hardware {hardware.name}`"
    raise UserError(
        f"--vary {name}: neither a setting nor a figure of {hardware.name}"
        + (f"{hint}? {see[0].upper()}{see[1:]}" if hint else f"; {see}")
    )


def varied(hardware: Hardware, axes: Mapping[str, object]) -> list[tuple[Hardware, Specs]]:
    """Hardware with every combination of some specs' values, and these specs.

    `axes`: lists or ranges (`lists`) by name. Each system is named after its specs.
    """
    values_by_path: dict[str, tuple[float, ...]] = {}
    names: dict[str, str] = {}
    defaults = specs_of(hardware)
    for name, text in axes.items():
        path = path_of(name, hardware)
        if path in names:
            raise UserError(
                f"--vary {name}: {path} is given twice, also as --vary {names[path]}; give one "
                "list of both"
            )
        names[path] = name
        values = values_of(float, text, f"--vary {name}")
        if None in values:
            raise UserError(
                f"--vary {name}: got none, wanted numbers; for the value that {hardware.name} has "
                f"say {defaults[path]:g}"
            )
        if isinstance(defaults[path], int):
            fractions = [value for value in values if value % 1]
            if fractions:
                raise UserError(f"--vary {name}: got {fractions[0]:g}, wanted a whole number")
            values = tuple(map(int, values))
        for value in (min(values), max(values)):  # valid numbers are a range
            _check_spec(hardware, path, value, names)
        values_by_path[path] = values
    count = math.prod(map(len, values_by_path.values()))
    if count > MOST_SYSTEMS:
        raise UserError(
            f"--vary makes {count:,} systems of {hardware.name}, wanted at most {MOST_SYSTEMS:,}; "
            "give fewer values, or steps"
        )
    if not values_by_path:
        return [(hardware, {})]
    combinations = itertools.product(*values_by_path.values())
    systems = [dict(zip(values_by_path, values, strict=True)) for values in combinations]
    return [(with_specs(hardware, specs, names), specs) for specs in systems]


def with_specs(
    hardware: Hardware, specs: Specs, names: Mapping[str, str] | None = None
) -> Hardware:
    """Replace specs, which are not checked, and name the hardware after them.

    Shares of smaller messages follow a link's `bandwidth_fraction`, unless `specs` have them.
    `names`: names of specs in the command, by path.
    """

    def replaced(block: Any, path: Sequence[str], value: float) -> Any:
        first, *rest = path
        if isinstance(block, Mapping):
            inner = cast("Mapping[str, Any]", block)
            return {**inner, first: replaced(inner[first], rest, value) if rest else value}
        new = replaced(getattr(block, first), rest, value) if rest else value
        return block.model_copy(update={first: new})

    all_specs = dict(specs)
    for path, value in specs.items():
        link, _, name = path.rpartition(".")
        if name == "bandwidth_fraction" and link in ("scale_up", "scale_out"):
            shares = smaller_shares(getattr(hardware, link).model_dump(), value)
            all_specs |= {f"{link}.{n}": x for n, x in shares.items() if f"{link}.{n}" not in specs}
    for path, value in all_specs.items():
        hardware = replaced(hardware, path.split("."), value)
    text = ", ".join(f"{(names or {}).get(p, p)}={value:.12g}" for p, value in specs.items())
    return hardware.model_copy(update={"name": f"{hardware.name} {text}"})


def _check_spec(hardware: Hardware, path: str, value: float, names: Mapping[str, str]) -> None:
    """Raise a UserError for a value that no hardware may have."""
    try:
        Hardware.model_validate(with_specs(hardware, {path: value}).model_dump(warnings=False))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(key) for key in first["loc"])
        raise UserError(
            f"--vary {names.get(path, path)}: got {first['input']:g}, {wanted_of(first['msg'])}"
        ) from None
