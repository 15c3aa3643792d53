"""Errors of pydantic in the words of settings: what is wrong, what was got, what is wanted."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from reprlib import repr as shown  # short whatever the value

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stagewright.errors import UserError, did_you_mean, hint_of_thousands
from stagewright.launch.names import FOREIGN, canonical
from stagewright.run.other_names import SAME
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import BYTES
from stagewright.run.sections.serving import SERVING


def invalid(
    error: ValidationError,
    known: Iterable[str],
    path: str | Path | None = None,
    overrides: Container[object] = (),
) -> UserError:
    """The first of the errors; `path` is named where the setting is not one of the `overrides`."""
    first = error.errors(include_url=False)[0]
    from_file = path is not None and first["loc"][:1] != () and first["loc"][0] not in overrides
    where = f"{path}: " if from_file and first["type"] != "missing" else ""
    return UserError(where + describe_error(first, known))


def describe_error(error: ErrorDetails, known: Iterable[str]) -> str:
    """One error in a sentence; `known` are the names of all settings."""
    name = ".".join(str(part) for part in error["loc"])
    context, got = error.get("ctx", {}), shown(error["input"])
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"unknown setting {name!r}{hint_of_setting(name, known)}"
        case "missing":
            return "no model given; name a preset (see `stagewright models`) or a config.json"
        case "literal_error":
            expected = context["expected"]
            words = expected.replace("'", "").replace(" or ", ", ").split(", ")
            hint = did_you_mean(str(error["input"]), words)
            return f"{name} is {got}, wanted {expected}{hint}"
        case "greater_than_equal":
            wanted = f"{_without_point(context['ge'])} or more"
        case "less_than_equal":
            wanted = f"at most {_without_point(context['le'])}"
        case "greater_than":
            wanted = f"more than {_without_point(context['gt'])}"
        case "finite_number":
            wanted = "a finite number"
        case "float_type" | "float_parsing":
            wanted = "a number"
            setting = EXPERIMENT.get(name) or SERVING.get(name)
            if setting is not None and setting.metavar == "TIME":
                wanted = "seconds, or a time such as 50ms or 2s"
        case "int_type":
            wanted = f"a whole number{hint_of_thousands(str(error['input']))}"
        case "bool_type":
            wanted = "true or false"
        case "string_type":
            wanted = "text"
        case "tuple_type" | "frozen_set_type":
            wanted = "a list"
        case _:
            return f"{name} is {got}: {error['msg']}"
    return f"{name} is {got}, wanted {wanted}{_unit(name)}"


def _without_point(end: float) -> str:
    """An end of a range; a whole number without its decimal point."""
    return str(int(end)) if end == int(end) else str(end)


def _unit(name: str) -> str:
    """Unit of a setting's number, in brackets."""
    unit = EXPERIMENT[name].unit if name in EXPERIMENT else ""
    return f" ({unit})" if unit and unit != BYTES else ""


def hint_of_setting(name: str, known: Iterable[str] = EXPERIMENT) -> str:
    """Suggestion for an unknown name, or the place of all names."""
    said = FOREIGN.get(canonical(name))
    if said is not None:
        return f": {said}"
    if canonical(name) in SERVING:
        option = f"--{name.replace('_', '-')}"
        return f": {option} is of requests over time; give it to `stagewright serve`, not in a file"
    names = [*known, *SAME]
    hint = did_you_mean(canonical(name), names)
    meant = next((each for each in names if repr(each) in hint), None)
    if meant is None:
        return "; see `stagewright show --help`"
    return f"; did you mean {SAME.get(meant, meant)!r}?"
