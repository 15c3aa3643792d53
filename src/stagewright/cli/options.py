"""Options of the command line, made of the declarations of settings, and those commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagewright.cli import shared
from stagewright.cli.help import SectionOption, WholeNumber, Word
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


def experiment_options(*shown: str, lists: bool = False) -> Callable[[_Command], _Command]:
    """Give a command the model, the run file and every setting of a whole experiment.

    With `lists`, settings take lists and ranges as text (`searching.lists`). Of the settings
    of the machine and of the execution, help shows those that are named, and with --help-all the
    others. Without names it shows them all, and before those of the run.
    """

    def note(command: _Command) -> _Command:
        # `cli.help.Command` makes the options when the command is used.
        command.__dict__["settings"] = partial(
            _parameters, shown, option_of_lists if lists else option_of
        )
        return command

    return note


def serving_options(command: _Command) -> _Command:
    """Give a command the settings of requests over time, of engines, and of a run in inference."""
    command.__dict__["settings"] = _serving_parameters
    return command


def search_settings(command: _Command) -> _Command:
    """Give a command every setting, as a list or a range; those of serving for `search --serve`."""
    command.__dict__["settings"] = _search_parameters
    return command


_SEARCHED = frozenset({"rate", "concurrency", "num_requests", "ttft", "tpot", "e2e", "scheduler"})
"""Settings of serving that the help of a search shows."""


def _search_parameters() -> list[click.Parameter]:
    """Where an option of a run has the name of one of serving, `--serve` decides what it means."""
    from stagewright.run.sections.serving import SERVING

    rest = _parameters(("hardware", "nodes"), option_of_lists)
    taken = {flag for each in rest for flag in (*each.opts, *each.secondary_opts)}
    own: list[SectionOption] = []
    for setting in SERVING.values():
        engines = setting.section == "engines"
        option = option_of_lists(setting) if engines else option_of(setting)
        for each in rest:
            if {*option.opts} & {*each.opts}:
                each.opts += [flag for flag in option.opts if flag not in taken]
            if setting.name == "requests" and "--requests" in each.opts:
                each.help = f"{each.help} With --serve: {option.help}"
        found = setting.name == "instances" or setting.section == "pools"
        if found or taken & {*option.opts, *option.secondary_opts}:
            continue
        if setting.name == "concurrency":
            option.type, option.metavar = click.STRING, "LIST"
        option.section = f"{option.section} (with --serve)"
        option.rare = setting.name not in _SEARCHED
        own.append(option)
    return [*rest, *own]


def _serving_parameters() -> list[click.Parameter]:
    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.declare import INFERENCE
    from stagewright.run.sections.serving import OF_ONE_STEP, SERVING

    own = [option_of(of) for of in SERVING.values()]
    taken = {flag for option in own for flag in (*option.opts, *option.secondary_opts)}
    trains = {name for name, of in EXPERIMENT.items() if not {*of.modes} & {*INFERENCE}}
    rest = [
        parameter
        for parameter in _parameters(("hardware",), option_of)
        if parameter.name not in OF_ONE_STEP | trains and not taken & {*parameter.opts}
    ]
    return [*rest[:3], *own, *rest[3:]]


def _parameters(
    shown: Sequence[str], option_of: Callable[[Setting], SectionOption]
) -> list[click.Parameter]:
    from stagewright.run.sections import EXPERIMENT, SETTINGS
    from stagewright.run.sections.declare import Without
    from stagewright.run.sections.foreign import OTHERS
    from stagewright.run.sections.other_names import SWITCHES

    run = list(map(option_of, SETTINGS.values()))
    more = [option_of(of) for name, of in EXPERIMENT.items() if name not in SETTINGS]
    for option in more:
        option.rare = option.rare or (bool(shown) and option.name not in shown)
    text = "Run file (YAML), or an earlier run's manifest; options override it."
    parameters: list[click.Parameter] = [
        click.Argument(["model"], required=False),
        click.Option(["--config"], metavar="FILE", help=text),
        *(more if not shown else ()),
        *run,
        *(more if shown else ()),
    ]
    for name, (setting, value) in SWITCHES.items():
        text = f"Stands for {setting.flag} {value}."
        if isinstance(value, Without) or value == setting.default:
            text = f"Accepted: the default of {setting.flag}."
        parameters.append(_other_option("--" + name.replace("_", "-"), name, text, bool))
    parameters += [
        _other_option(of.flag, of.name, of.help, of.kind, of.names) for of in OTHERS.values()
    ]
    return parameters


def _other_option(
    flag: str, name: str, text: str, kind: type | tuple[str, ...], also: Sequence[str] = ()
) -> SectionOption:
    more: dict[str, Any] = {"is_flag": True}
    if isinstance(kind, tuple):
        more = {"type": Word(kind)}
    elif kind is int:
        more = {"type": WholeNumber(), "metavar": "N"}
    elif kind is str:
        more = {"type": str, "metavar": "TEXT"}
    return SectionOption(
        [flag, *(f"--{each}" for each in also), name],
        section="Options of other tools",
        rare=True,
        default=None,
        help=text,
        **more,
    )


def option_of(setting: Setting) -> SectionOption:
    """The option of a setting; the command gets None where the option is not given."""
    from stagewright.run.sections import SECTIONS
    from stagewright.run.sections.serving import SERVING_SECTIONS

    own = setting.flag[2:]
    flags = [setting.flag, *(f"--{name}" for name in setting.names if name != own)]
    more: dict[str, Any] = {}
    if isinstance(setting.kind, tuple):
        more["type"] = Word(setting.kind, setting.words, setting.same_words)
    elif setting.kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    else:
        more["metavar"] = setting.metavar or _METAVARS.get(setting.kind, "TEXT")
        if setting.kind in (tuple, frozenset):
            more["callback"] = _read_list
        elif setting.kind is dict:
            more |= {"multiple": True, "callback": _read_factors}
        else:
            more["type"] = WholeNumber() if setting.kind is int else setting.kind
    short = [setting.short] if setting.short else []
    return SectionOption(
        [*flags, *short, setting.name],
        section={**SECTIONS, **SERVING_SECTIONS}[setting.section][0],
        rare=setting.rare,
        default=None,
        help=setting.text,
        **more,
    )


def option_of_lists(setting: Setting) -> SectionOption:
    """The option of a setting that takes a list or a range; a switch stays one."""
    if setting.kind in (bool, dict):
        return option_of(setting)
    of = option_of(setting)
    of.type, of.callback = click.STRING, None
    if setting.name == "hardware":
        of.multiple, of.default = True, ()
        of.help = f"{(of.help or '').removesuffix('.')}; may be repeated."
    if isinstance(setting.kind, tuple):
        of.metavar = "|".join(setting.kind)
    return of


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
