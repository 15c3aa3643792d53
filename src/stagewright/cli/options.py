"""Options of the command line, made of the declarations of settings, and those commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from stagewright.cli.help import SectionOption, Word
from stagewright.cli.other_names import DERIVED, SWITCHES
from stagewright.errors import UserError
from stagewright.run.sections import EXPERIMENT, SECTIONS, SETTINGS
from stagewright.run.sections.declare import Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")

GROUP_FILE = click.option(
    "--comm-group", metavar="FILE", help="File of the communicator groups. [beside the traces]"
)

_METAVARS = {int: "N", float: "X", tuple: "LIST", frozenset: "LIST"}


def run_options(command: _Command) -> _Command:
    """Give a command the model, the run file and every setting of a run."""
    return _with_settings(command, SETTINGS.values())


def experiment_options(command: _Command) -> _Command:
    """Give a command those, and every setting of the machine and of the execution."""
    others = [setting for name, setting in EXPERIMENT.items() if name not in SETTINGS]
    return _with_settings(command, [*others, *SETTINGS.values()])


def _with_settings(command: _Command, settings: Iterable[Setting]) -> _Command:
    settings = [*settings]
    for name, help in reversed(DERIVED.items()):
        kind = {"type": int, "metavar": "N"} if name.startswith("num_") else {"is_flag": True}
        command = _other_option("--" + name.replace("_", "-"), name, help, kind)(command)
    for name, (setting, value) in reversed(SWITCHES.items()):
        if setting in settings:
            text = f"Stands for {setting.flag} {value}."
            if value == setting.default:
                text = f"Accepted: the default of {setting.flag}."
            flag = "--" + name.replace("_", "-")
            command = _other_option(flag, name, text, {"is_flag": True})(command)
    for setting in reversed(settings):
        command = option_of(setting)(command)
    command = click.option(
        "--config",
        metavar="FILE",
        help="Run file (YAML), or an earlier run's manifest; options override it.",
    )(command)
    return click.argument("model", required=False)(command)


def _other_option(
    flag: str, name: str, text: str, kind: dict[str, Any]
) -> Callable[[_Command], _Command]:
    return click.option(
        flag,
        name,
        cls=SectionOption,
        section="Options of other tools",
        rare=True,
        default=None,
        help=text,
        **kind,
    )


def option_of(setting: Setting) -> Callable[[_Command], _Command]:
    """The option of a setting; the command gets None where the option is not given."""
    flags = [setting.flag, *(f"--{name}" for name in setting.names)]
    more: dict[str, Any] = {}
    if isinstance(setting.kind, tuple):
        more["type"] = Word(setting.kind)
    elif setting.kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    else:
        more["metavar"] = setting.metavar or _METAVARS.get(setting.kind, "TEXT")
        if setting.kind in (tuple, frozenset):
            more["callback"] = _read_list
        elif setting.kind is dict:
            more |= {"multiple": True, "callback": _read_factors}
        else:
            more["type"] = setting.kind
    return click.option(
        *flags,
        setting.name,
        cls=SectionOption,
        section=SECTIONS[setting.section][0],
        rare=setting.rare,
        default=None,
        help=setting.text,
        **more,
    )


def _read_list(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """`9,10,9` or `norm,activation` as a tuple."""
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if text.strip())
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
