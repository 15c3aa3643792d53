"""Rows of settings in YAML files, or from a caller: instances, stages and classes of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from stagewright.errors import UserError, either
from stagewright.files import from_yaml, read_text
from stagewright.run.validation import describe_error

LARGEST = 1e15


def _number(value: object) -> object:
    """A number that YAML reads as text, such as `3e8`; a whole one as an integer."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


_AnyNumber = BeforeValidator(_number)
Seconds = Annotated[float, Field(strict=True, ge=0, le=LARGEST), _AnyNumber]
Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST), _AnyNumber]
Whole = Annotated[int, Field(strict=True, ge=1, le=LARGEST), _AnyNumber]
WholeOrZero = Annotated[int, Field(strict=True, ge=0, le=LARGEST), _AnyNumber]


class YamlRow(BaseModel, extra="forbid", strict=True):
    """A row; `given` has the values that it names."""

    def given(self) -> dict[str, Any]:
        """The values that the row names."""
        return self.model_dump(exclude_unset=True)


def read_rows(
    source: str | Sequence[Any] | None, what: str, example: str
) -> tuple[str, list[Mapping[Any, Any]]]:
    """Where rows come from, for errors, and the rows of a file or of a caller.

    `what` names the rows, such as `stages`; `example` is one of them in YAML.
    """
    where, values = what, cast("object", source)
    if isinstance(source, str):
        where, values = source, from_yaml(read_text(source, f"{what} in YAML"), source)
    rows = cast("Sequence[object]", values) if isinstance(values, list | tuple) else ()
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        got = shown(cast("object", values))
        raise UserError(f"{where}: got {got}, wanted a list of {what}, such as {example}")
    return where, [cast("Mapping[Any, Any]", row) for row in rows]


def read_row(kind: type[YamlRow], row: Mapping[Any, Any], where: str) -> Any:
    """A row with its values checked; raises a UserError that begins with `where`."""
    known = [*kind.model_fields]
    try:
        for name in row:
            if name not in known:
                raise UserError(f"{where}: unknown {shown(name)}, wanted {either(known)}")
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        lacks = f"lacks {first['loc'][0]}" if first["type"] == "missing" else ""
        raise UserError(f"{where}: {lacks or describe_error(first, known)}") from None


def refuse_without_effect(section: object, **uses: tuple[bool, str]) -> None:
    """Raise a UserError for a setting of a section that has no effect.

    `uses`: by setting, whether it has an effect, and what it is a setting of.
    """
    default = type(section)()
    for name, (has_effect, use) in uses.items():
        if not has_effect and getattr(section, name) != getattr(default, name):
            raise UserError(f"--{name.replace('_', '-')} is of {use}; give that, or leave it out")
