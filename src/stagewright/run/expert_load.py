"""Files of expert loads: how many tokens go to each expert of each layer, CSV or JSON.

CSV: a line for each layer with experts, in order, or one line for all of them; a number for each
expert, tokens or parts, of which only the ratios count; lines that begin with `#` are skipped.
JSON: the same as a list of numbers or of lists, or an object from the index of each such layer to
its list.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown  # short whatever the file holds
from typing import cast

from stagewright.errors import UserError
from stagewright.files import from_json, read_text
from stagewright.model.config import ModelConfig

MOST_BYTES = 16_000_000
"""No larger file is read: 1,000 layers of 1,000 experts have 7 MB."""


def read_lines(
    given: str | Sequence[Sequence[object]], model: ModelConfig, layers: Sequence[int]
) -> list[tuple[float, ...]]:
    """Loads of experts, of which only the ratios count: a row for each of the layers, or for all.

    `given` is the path of a file, or the rows.
    """
    file = given if isinstance(given, str) else "expert_load"
    lines = _read(Path(given), layers) if isinstance(given, str) else given
    if len(lines) not in (1, len(layers)):
        raise UserError(
            f"{file}: has {len(lines)} lines, wanted one for each of the {len(layers)} layers of "
            f"{model.name} with experts, or one for all"
        )
    alone = len(lines) == 1
    return [
        _numbers(f"{file}: {'all layers' if alone else f'layer {layer}'}", line, model)
        for line, layer in zip(lines, layers, strict=not alone)
    ]


def lines_of(
    given: str | Sequence[Sequence[object]], model: ModelConfig, layers: Sequence[int], ranks: int
) -> list[tuple[float, ...]]:
    """Loads of experts in the order of `layers`, a row for each or one for all: from a file, from
    rows, or from how many times the mean of so many `ranks` the busiest one gets."""
    times = times_mean(given)
    if times is None:
        return read_lines(given, model, layers)
    return [one_busy_rank(times, model, ranks)]


def times_mean(given: str | Sequence[Sequence[object]]) -> float | None:
    """How many times the mean of ranks the busiest rank gets, where that is all that is given.

    >>> times_mean("1.3"), times_mean("loads.csv")
    (1.3, None)
    """
    try:
        return float(given) if isinstance(given, str) else None
    except ValueError:
        return None


def one_busy_rank(times: float, model: ModelConfig, ranks: int) -> tuple[float, ...]:
    """Loads of experts of which one of the ranks gets `times` the mean; 1: all get as much.

    One rank alone has the mean, whatever `times`. Raises UserError where no rank can get as much.
    """
    if 1 in (times, ranks):
        return (1.0,) * model.num_experts
    # No expert gets more than one copy of a token.
    most = min(ranks, model.num_experts / model.top_k)
    if not 1 <= times <= most:
        raise UserError(
            f"expert_load={times:g}, wanted how many times the mean of the ranks the busiest one "
            f"gets, here from 1 to {most:g}; or a file of the load of each expert"
        )
    held = model.num_experts // ranks
    rest = (ranks - times) / (ranks - 1)
    return (times,) * held + (rest,) * (model.num_experts - held)


def _numbers(where: str, line: Sequence[object], model: ModelConfig) -> tuple[float, ...]:
    if len(line) != model.num_experts:
        raise UserError(
            f"{where}: has {len(line)} numbers, wanted one for each of the {model.num_experts} "
            f"experts of {model.name}"
        )
    numbers = tuple(_number(where, nth, value) for nth, value in enumerate(line))
    total = sum(numbers)
    if not total:
        raise UserError(f"{where}: all experts get 0 tokens; wanted some above 0")
    most = max(range(len(numbers)), key=numbers.__getitem__)
    if numbers[most] * model.top_k > total * (1 + 1e-6):
        raise UserError(
            f"{where}: expert {most} gets {numbers[most] / total:.4g} of all copies, but of each "
            f"token's {model.top_k} it gets at most one, so at most {1 / model.top_k:.4g} of all"
        )
    return numbers


def _number(where: str, nth: int, value: object) -> float:
    try:
        number = float(cast("float", value)) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1e18:
        raise UserError(f"{where}: expert {nth} is {shown(value)}, wanted a number from 0 to 1e18")
    return number


def _read(file: Path, layers: Sequence[int]) -> list[Sequence[object]]:
    text = read_text(file, _WANTED, MOST_BYTES)
    if text.lstrip()[:1] in ("[", "{"):
        return _from_json(file, from_json(text, file), layers)
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    if not lines:
        raise UserError(f"{file}: is empty; wanted a line of numbers, one for each expert")
    if len(lines) > max(1, len(layers)):
        return [lines] * len(lines)  # too many for the layers, whatever the lines hold
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO("\n".join(lines)))]
    except csv.Error as error:
        raise UserError(f"{file}: not CSV: {error}; check the file") from None
    return cast("list[Sequence[object]]", rows)


_WANTED = "the loads of experts in CSV or JSON"


def _from_json(file: Path, data: object, layers: Sequence[int]) -> list[Sequence[object]]:
    if isinstance(data, dict):
        named = cast("Mapping[str, object]", data)
        strange = sorted(set(named) - {str(layer) for layer in layers})
        if strange:
            raise UserError(
                f"{file}: {shown(strange[0])} is no layer with experts; "
                f"wanted {_describe_layers(layers)}"
            )
        absent = [layer for layer in layers if str(layer) not in named]
        if absent:
            raise UserError(f"{file}: has no layer {absent[0]}; wanted {_describe_layers(layers)}")
        return _lists(file, [named[str(layer)] for layer in layers])
    values = _items(data)
    return [values] if values and not isinstance(values[0], list) else _lists(file, data)


def _items(data: object) -> list[object]:
    return cast("list[object]", data) if isinstance(data, list) else []


def _describe_layers(layers: Sequence[int]) -> str:
    return f"all of {layers[0]} to {layers[-1]} that have experts ({len(layers)})"


def _lists(file: Path, data: object) -> list[Sequence[object]]:
    lists = _items(data)
    if not lists or not all(isinstance(row, list) for row in lists):
        raise UserError(f"{file}: holds {shown(data)}, wanted a list of numbers for each layer")
    return cast("list[Sequence[object]]", lists)
