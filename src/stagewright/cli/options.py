"""Options of the command line, made of the declarations of settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stagewright.cli.help import Word
from stagewright.errors import UserError
from stagewright.run.sections.declare import Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])

_METAVARS = {int: "N", float: "X", tuple: "LIST", frozenset: "LIST"}


def option_of(setting: Setting) -> Callable[[_Command], _Command]:
    """The option of a setting; the command gets None where the option is not given."""
    flag = setting.flag
    more: dict[str, Any] = {"metavar": setting.metavar or None}
    match setting.kind:
        case tuple() as words:
            more |= {"type": Word(words), "metavar": None}
        case type() as kind if kind is bool:
            flag += "/--no-" + flag[2:]
            more = {}
        case type() as kind if kind in (tuple, frozenset):
            more["callback"] = _read_list
        case type() as kind if kind is dict:
            more |= {"multiple": True, "callback": _read_factors}
        case kind:
            more["type"] = kind
    if "metavar" in more and more["metavar"] is None and isinstance(setting.kind, type):
        more["metavar"] = _METAVARS.get(setting.kind, "TEXT")
    names = [f"--{name}" for name in setting.names if setting.kind is dict]
    return click.option(*names or [flag], setting.name, default=None, help=setting.text, **more)


def _read_list(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """`9,10,9` or `norm,activation` as a tuple."""
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip() or text.strip())
    if parameter.name != "layers_per_stage":
        return words
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise UserError(f"--layers-per-stage: got {text!r}, wanted numbers such as 9,10,10,9")
    return tuple(int(word) for word in words)


def _read_factors(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, float] | None:
    """`5=1.2` and others as factors by rank."""
    return dict(map(straggler, texts)) or None


def straggler(text: str) -> tuple[int, float]:
    """A rank and its factor.

    >>> straggler("5=1.2")
    (5, 1.2)
    """
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise UserError(f"--straggler: got {text!r}, wanted RANK=FACTOR such as 5=1.2") from None
