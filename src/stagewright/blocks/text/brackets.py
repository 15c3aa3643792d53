"""Reads the bracket of a call: index expression, attributes or degrees."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from stagewright.algebra.index import parse as parse_spec
from stagewright.algebra.notation import DEGREES, NotationError, parts
from stagewright.blocks.text.operators import WRITTEN
from stagewright.blocks.text.statements import OPS_OF_TEXTS, Reference
from stagewright.errors import did_you_mean
from stagewright.graph.node import BYTES
from stagewright.graph.table import choose

_DTYPE = choose(*BYTES)._replace(required=False)
"""Data type of a result, an attribute of every op."""


def read_degrees(text: Reference) -> tuple[str, ...]:
    """The degrees that a collective names."""
    degrees = tuple(word.strip() for word in text.name.split(",") if word.strip())
    for degree in degrees:
        if degree not in DEGREES:
            hint = did_you_mean(degree, DEGREES)
            raise NotationError(f"{degree!r} is no parallel degree{hint}", text.at)
    return degrees


def split_letters(spec: str, text: Reference) -> tuple[dict[str, Reference], str]:
    """Sizes of letters of the result, as in `bsaD->bsaN; N=Plain, first=true`, and the rest."""
    letters = {x for x in spec.partition("->")[2] if x.isalpha()}
    sized: dict[str, Reference] = {}
    rest: list[str] = []
    for nth, part in parts(text.name, ","):
        key, equals, word = (piece.strip() for piece in part.partition("="))
        if equals and key in letters:
            sized[key.lower()] = Reference(word, text.at + nth + part.index("=") + 1)
        else:
            rest.append(part)
    return sized, ", ".join(rest) if sized else text.name


def check_spec(
    op: str, text: Reference, *, shaped: bool, sized: Container[str] = frozenset()
) -> None:
    """An index expression that can be read, of which the operands, or `sized`, give every size."""
    try:
        spec = parse_spec(text.name.strip())
    except ValueError as error:
        raise NotationError(f"{op}: {error}", text.at) from None
    known = {x for dims in spec.ins for dim in dims for x in dim}
    for unknown in (x for dim in spec.out for x in dim if x not in known and x not in sized):
        if not shaped:
            place = text.name.lower().index(unknown, text.name.index("->"))
            raise NotationError(
                f"{op}: no operand has the index {unknown!r} of the result; use one of "
                f"{', '.join(sorted(known))}, or name the value and its shape: "
                f"y[B/dp, S, M] = ..., or say its size: "
                f"{op}[{text.name.strip()}; {unknown.upper()}=128]",
                text.at + place,
            )


def read_attributes(op: Reference, text: Reference) -> dict[str, Any]:
    """The attributes in a bracket, and those that are implied."""
    declared = {**OPS_OF_TEXTS[op.name].attrs, **WRITTEN.get(op.name, {}), "dtype": _DTYPE}
    given = {name: of.implied for name, of in declared.items() if of.implied is not None}
    said = set[str]()
    for nth, part in parts(text.name, ","):
        if not part:
            continue
        key, equals, word = (piece.strip() for piece in part.partition("="))
        at = text.at + nth
        if key not in declared:
            hint = did_you_mean(key, declared) or f"; use one of {', '.join(declared)}"
            raise NotationError(f"{op.name} has no attribute {key!r}{hint}", at)
        if key in said:
            raise NotationError(f"{op.name}: {key} comes twice; keep one", at)
        said.add(key)
        given[key] = read_value(word) if equals else True
        if not declared[key].accepts(given[key]):
            hint = did_you_mean(word, declared[key].choices)
            raise NotationError(f"{op.name}: {key} is {word!r}, wanted {declared[key]}{hint}", at)
    for key, of in declared.items():
        if of.asked and key not in given:
            raise NotationError(f"{op.name} needs {key}: write {op.name}[{key}=...], {of}", op.at)
    return given


def read_value(word: str) -> Any:
    """Value of a word: a number, true or false, or the word itself."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word) if len(word) < 40 else word
        except ValueError:
            pass
    return word
