"""Options that commands share; those of settings are made of their declarations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagewright.cli import runs
from stagewright.cli.command import SectionOption
from stagewright.cli.option_types import RealNumber, WholeNumber, Word
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.run.sections.declare import Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")

ALLOW_OOM = click.option(
    "--allow-oom",
    is_flag=True,
    expose_value=False,
    callback=runs.kept,
    help="Exit with 0, not 3, if the run does not fit into the memory of a device.",
)

GROUP_FILE = click.option(
    "--comm-group", metavar="FILE", help="File of the communicator groups. [beside the traces]"
)

OUT_DIRECTORY = click.option(
    "-o", "--out", required=True, metavar="DIR", help="Directory of the traces."
)
RANKS = click.option("--ranks", metavar="LIST", help="Only these ranks, such as 0-7,12. [all]")
WORKERS = click.option(
    "--workers", type=WholeNumber(1), metavar="N", help="Threads or processes. [one per core]"
)
ADDRESS = click.option(
    "--address", metavar="ADDRESS", help="Address of the Ray cluster: host:port, or auto."
)

# ---- files that are written ----------------------------------------------------------------------

_OUTPUTS = "stagewright.outputs"

FORCE = click.option(
    "--force",
    is_flag=True,
    is_eager=True,  # known when the names of files are checked
    expose_value=False,
    callback=runs.kept,
    help="Replace the output of an earlier run.",
)


def forced() -> bool:
    """True if the command may replace existing outputs."""
    return bool(runs.option_kept("force"))


def _check_file(
    context: click.Context, parameter: click.Parameter, given: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Check a file, or several, before any work; raises UserError if it cannot be written."""
    if given is not None and not context.resilient_parsing:
        outputs: dict[str, str] = context.meta.setdefault(_OUTPUTS, {})
        for path in (given,) if isinstance(given, str) else given:
            check_output(path, outputs)
    return given


def check_output(path: str, outputs: dict[str, str]) -> None:
    """Raise a UserError for a file that cannot be written, or is one of the other outputs.

    `outputs`: those checked before, by their real paths; this one is added.
    """
    from stagewright.files import check_output_file

    if path == "-":
        raise UserError("-: is no file; give a name such as ./out (results alone go to stdout)")
    check_output_file(path, force=forced())
    real = os.path.realpath(path)
    if (first := outputs.get(real)) is not None:
        same = "" if first == path else f", as {first}, too"
        raise UserError(f"{path}: would be written twice{same}; choose another name")
    outputs[real] = path


def output_file(*names: str, **more: Any) -> Callable[[_Command], _Command]:
    """Option of a file that the command writes; such a command has `FORCE`, too."""
    return click.option(*names, metavar="FILE", callback=_check_file, **more)


# ---- settings ------------------------------------------------------------------------------------

_OF_RUNS = frozenset({
    "hardware", "gpus", "nodes", "mode", "layers", "tp", "cp", "dp", "pp", "ep", "vpp", "zero",
    "sequence_parallel", "seq_length", "micro_batch_size", "global_batch_size", "schedule",
    "recompute", "batch_size", "context_length", "prompt_length", "precision", "framework",
})  # fmt: skip
"""Settings in the short help of a command on a run."""

_OF_SERVING = frozenset({
    "hardware", "tp", "pp", "dp", "ep", "requests", "rate", "concurrency", "isl", "osl",
    "num_requests", "turns", "classes", "ttft", "tpot", "e2e", "instances", "router",
    "scheduler", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization",
    "prefill_instances", "prefill", "pools", "precision", "weight_precision", "kv_cache_dtype",
})  # fmt: skip
"""Settings in the short help of `serve`."""

_OF_SEARCHES = (_OF_RUNS - {"mode", "batch_size", "context_length", "prompt_length", "gpus"}) | {
    *("requests", "rate", "concurrency", "isl", "output_length", "num_requests", "scheduler"),
    *("ttft", "tpot", "e2e"),
}
"""Settings in the short help of `search`; `--osl` is a name of `output_length`."""

_METAVARS = {int: "N", float: "X", tuple: "LIST", frozenset: "LIST"}


def _with_settings(make: Callable[[], list[click.Parameter]]) -> Callable[[_Command], _Command]:
    """Note what makes the options of settings, for `cli.command.Command`."""

    def note(command: _Command) -> _Command:
        command.__dict__["settings"] = make
        return command

    return note


def experiment_options(*common: str) -> Callable[[_Command], _Command]:
    """Add the model, the run file, and every setting of a run, its machine and its execution.

    `common`: settings in the short help, besides those of all commands.
    """
    return _with_settings(partial(_of_experiment, _OF_RUNS | {*common}, option_of))


def _of_experiment(
    common: frozenset[str], option_of: Callable[[Setting], SectionOption]
) -> list[click.Parameter]:
    from stagewright.launch.names import OTHERS, Without
    from stagewright.run.other_names import SWITCHES
    from stagewright.run.sections import EXPERIMENT, SETTINGS

    machine = [option_of(of) for name, of in EXPERIMENT.items() if name not in SETTINGS]
    options = [*machine, *map(option_of, SETTINGS.values())]
    for name, (setting, value) in SWITCHES.items():
        text = f"Stands for {setting.flag} {value}."
        if isinstance(value, Without) or value == setting.default:
            text = f"Accepted: the default of {setting.flag}."
        options.append(_other_option(["--" + name.replace("_", "-"), name], text, bool))
    for of in OTHERS.values():
        names = [of.flag, *(f"--{name}" for name in of.names), of.name]
        options.append(_other_option(names, of.help, of.kind))
    for option in options:
        option.common = option.name in common
    text = "Run file (YAML), launch script, or an earlier run's manifest; options override it."
    return [
        click.Argument(["model"], required=False),
        click.Option(["--config"], metavar="FILE", help=text),
        *_of_launch_files(),
        *options,
    ]


def _of_launch_files() -> list[click.Parameter]:
    section = "Launch files of other tools"
    of_set = SectionOption(
        ["--set"],
        section=section,
        common=False,
        multiple=True,
        expose_value=False,
        metavar="NAME=VALUE",
        callback=runs.kept,
        help="A variable of the file, or a flag that it lacks (vocab-size=32000); may be repeated.",
    )
    ignore = SectionOption(
        ["--ignore-unknown"],
        section=section,
        common=False,
        is_flag=True,
        expose_value=False,
        callback=runs.kept,
        help="Read a file without flags that change the step and are not modelled.",
    )
    return [of_set, ignore]


def _of_serving() -> list[click.Parameter]:
    """Settings of requests over time, of engines, and of a run in inference."""
    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.declare import INFERENCE
    from stagewright.run.sections.serving import OF_ONE_STEP, SERVING

    own = [option_of(of) for of in SERVING.values()]
    for option in own:
        option.common = option.name in _OF_SERVING
    taken = _names(own)
    excluded = OF_ONE_STEP | {
        name for name, of in EXPERIMENT.items() if not {*of.modes} & {*INFERENCE}
    }
    others = [
        parameter
        for parameter in _of_experiment(_OF_SERVING, option_of)
        if parameter.name not in excluded and not taken & {*parameter.opts}
    ]
    return [*others[:3], *own, *others[3:]]


def _of_diff() -> list[click.Parameter]:
    """Every setting of a run and of serving, without a model and a run file."""
    from stagewright.run.sections.serving import SERVING

    load = [option_of(of) for of in SERVING.values()]
    taken = _names(load)
    common = frozenset({"hardware", "gpus", "nodes", "price", "costs", "tokens"})
    _, _, *others = _of_experiment(common, option_of)  # without MODEL and --config
    for option in (*load, *others):
        if isinstance(option, SectionOption) and not option.common:
            named = ("set", "ignore_unknown", "rate", "concurrency", "isl", "osl")
            option.common = option.name in named
    return [*(of for of in others if not taken & {*of.opts}), *load]


def _of_searches() -> list[click.Parameter]:
    """Every setting, as a list or a range; those of serving are for `search --serve`.

    Where two share a name, `--serve` decides which one is meant.
    """
    from stagewright.run.sections.serving import SERVING

    options = _of_experiment(_OF_SEARCHES, option_of_lists)
    options = [option for option in options if option.name != "gpus"]  # the search's own
    taken = _names(options)
    for setting in SERVING.values():
        if setting.name == "instances" or setting.section == "pools":
            continue  # which the search finds
        make = option_of_lists if setting.section == "engines" else option_of
        option = make(setting)
        section = f"{option.section} (with --serve)"
        shared = {*option.opts} & taken
        for other in options if shared else ():
            if isinstance(other, SectionOption) and {*other.opts} & {*option.opts}:
                other.opts += [name for name in option.opts if name not in taken]
                if other.common:
                    first = setting.flag
                    other.opts = [first, *(name for name in other.opts if name != first)]
                    other.help = option.help
                    other.section = section
        if shared or taken & {*option.secondary_opts}:
            continue
        if setting.name == "concurrency":
            option.type, option.metavar = click.STRING, "LIST"
        option.section, option.common = section, setting.name in _OF_SEARCHES
        options.append(option)
    return options


serving_options = _with_settings(_of_serving)
diff_settings = _with_settings(_of_diff)
search_settings = _with_settings(_of_searches)


def _names(options: Iterable[click.Parameter]) -> set[str]:
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def _other_option(names: list[str], text: str, kind: type | tuple[str, ...]) -> SectionOption:
    """An option of another tool that says settings in other terms."""
    more: dict[str, Any] = {"is_flag": True}
    if isinstance(kind, tuple):
        more = {"type": Word(kind)}
    elif kind is not bool:
        number = kind is int
        more = {"type": WholeNumber() if number else str, "metavar": "N" if number else "TEXT"}
    section = "Options of other tools"
    return SectionOption(names, section=section, common=False, default=None, help=text, **more)


def option_of(setting: Setting) -> SectionOption:
    """The option of a setting; the command gets None if the option is not given."""
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
            numbers = {int: WholeNumber(), float: RealNumber()}
            more["type"] = numbers.get(setting.kind, setting.kind)
    short = [setting.short] if setting.short else []
    return SectionOption(
        [*flags, *short, setting.name],
        section={**SECTIONS, **SERVING_SECTIONS}[setting.section][0],
        common=False,
        default=None,
        help=setting.text,
        **more,
    )


def option_of_lists(setting: Setting) -> SectionOption:
    """The option of a setting that takes a list or a range; a switch stays one."""
    option = option_of(setting)
    if setting.kind in (bool, dict):
        return option
    option.type, option.callback = click.STRING, None
    if setting.name == "hardware":
        option.multiple, option.default = True, ()
        option.help = f"{setting.text.removesuffix('.')}; may be repeated."
    if isinstance(setting.kind, tuple):
        option.metavar = "|".join(setting.kind)
    return option


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
        if not text.isascii() or "_" in text:
            raise ValueError
        return int(rank), float(factor)
    except ValueError:
        raise UserError(f"--straggler: got {text!r}, wanted RANK=FACTOR such as 5=1.2") from None
