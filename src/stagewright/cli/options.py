"""Options of the command line, made of the declarations of settings, and those commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagewright.cli import shared
from stagewright.cli.help import SectionOption, Word
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.run.sections.declare import Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")

ALLOW_OOM = click.option(
    "--allow-oom",
    is_flag=True,
    expose_value=False,
    callback=shared.note_allow_oom,
    help="Exit with 0, not with 3, where the run does not fit into the memory of a device.",
)

GROUP_FILE = click.option(
    "--comm-group", metavar="FILE", help="File of the communicator groups. [beside the traces]"
)

_METAVARS = {int: "N", float: "X", tuple: "LIST", frozenset: "LIST"}


def run_options(command: _Command) -> _Command:
    """Give a command the model, the run file and every setting of a run."""
    return _with_settings(command, experiment=False)


def experiment_options(command: _Command) -> _Command:
    """Give a command those, and every setting of the machine and of the execution."""
    return _with_settings(command, experiment=True)


def _with_settings(command: _Command, *, experiment: bool) -> _Command:
    """Note which settings a command has; `cli.help.Command` makes their options when it is used."""
    command.__dict__["settings"] = partial(_parameters, experiment=experiment)
    return command


def _parameters(*, experiment: bool) -> list[click.Parameter]:
    from stagewright.cli.other_names import DERIVED, SWITCHES
    from stagewright.run.sections import EXPERIMENT, SETTINGS

    others = [setting for name, setting in EXPERIMENT.items() if name not in SETTINGS]
    settings = [*(others if experiment else ()), *SETTINGS.values()]
    text = "Run file (YAML), or an earlier run's manifest; options override it."
    parameters: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--config"], metavar="FILE", help=text),
        *map(option_of, settings),
    ]
    for name, (setting, value) in SWITCHES.items():
        if setting in settings:
            text = f"Stands for {setting.flag} {value}."
            if value == setting.default:
                text = f"Accepted: the default of {setting.flag}."
            parameters.append(_other_option(name, text, {"is_flag": True}))
    for name, text in DERIVED.items():
        kind = {"type": int, "metavar": "N"} if name.startswith("num_") else {"is_flag": True}
        parameters.append(_other_option(name, text, kind))
    return parameters


def _other_option(name: str, text: str, kind: dict[str, Any]) -> SectionOption:
    return SectionOption(
        ["--" + name.replace("_", "-"), name],
        section="Options of other tools",
        rare=True,
        default=None,
        help=text,
        **kind,
    )


def option_of(setting: Setting) -> SectionOption:
    """The option of a setting; the command gets None where the option is not given."""
    from stagewright.run.sections import SECTIONS

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
    return SectionOption(
        [*flags, setting.name],
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
