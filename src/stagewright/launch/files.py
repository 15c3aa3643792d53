"""Files of other tools, recognised by their content: `find` and `read`.

`train.sh?MODEL_SIZE=8b&vocab-size=32000&ignore-unknown` is a file with a value of a variable, and
with a flag that it lacks: flags have a dash or a dot in their names, variables of a shell have
none. In a file of data, `?training.seq_len=4096` replaces the value of a key.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from stagewright.errors import UserError, either
from stagewright.files import from_json, from_yaml, open_regular, read_text
from stagewright.launch import (
    alignment,
    megatron,
    recipe_functions,
    recipes,
    servers,
    shell,
    trainer,
)
from stagewright.launch.reading import LaunchFile, LaunchSource, Tool
from stagewright.launch.shell import ShellCommand, shown
from stagewright.launch.tables import put
from stagewright.model.config import ModelConfig
from stagewright.model.presets import PRESETS

TOOLS: tuple[Tool, ...] = (
    megatron.SLIME,
    alignment.BRIDGE,
    trainer.TRAINER,
    megatron.MEGATRON,
    recipes.TORCHTITAN,
    recipes.DEEPSPEED,
    recipes.ACCELERATE,
    alignment.VERL,
    alignment.NEMO_RL,
    alignment.OPENRLHF,
    *servers.TOOLS,
)
"""All tools; the first one that knows a file reads it."""

_IGNORE = "ignore-unknown"
_OTHERS = (".stg", ".etb", ".csv", ".md", ".rst", ".html")
"""Ends of names of files that may quote flags and are no launch files."""
_FLAG = re.compile(r"(?:^|[\s(\"'])--?[A-Za-z][\w.-]*(?=[\s=\"')\\]|$)")
_DATA = re.compile(r"""---|[\[{]|["']?[\w.-]+["']?\s*:(\s|$)|["']?[\w.-]+["']?\s+=\s""")
"""The first line of YAML, JSON or TOML."""
_SHEBANG = re.compile(r"#! ?\S*/(env )?(ba|z|da|k)?sh\b")


def with_variables(path: str, variables: dict[str, str], *, ignore_unknown: bool = False) -> str:
    """A path with values of the file's variables, as `--set` and `--ignore-unknown` give them.

    >>> with_variables("train.sh", {"SIZE": "8b"}, ignore_unknown=True)
    'train.sh?SIZE=8b&ignore-unknown'
    """
    values = {
        name: text.replace("%", "%25").replace("&", "%26") for name, text in variables.items()
    }
    parts = [f"{name}={text}" for name, text in values.items()]
    parts += [_IGNORE] * ignore_unknown
    separator = "&" if "?" in path else "?"
    return path + separator * bool(parts) + "&".join(parts)


def names_variable(text: str, name: str) -> bool:
    """True for a script that reads or sets a variable.

    >>> names_variable("run --tp ${TP:-8}", "TP"), names_variable("run --http $HTTP", "TP")
    (True, False)
    """
    word = re.escape(name)
    uses = rf"\$\{{?{word}\b|(?<![\w-]){word}=|\(\([^)]*\b{word}\b"
    return re.search(uses, text) is not None


def find(name: str | os.PathLike[str]) -> str | None:
    """The path of a launch file that a name stands for; None: it stands for something else."""
    path = os.fspath(name).partition("?")[0]
    if not path or path.endswith(_OTHERS):
        return None
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    is_file = stat.S_ISREG(status.st_mode)
    return path if is_file and _is_launch_file(path, status.st_mtime_ns) else None


@lru_cache(maxsize=64)
def _is_launch_file(path: str, _: int) -> bool:
    try:
        with open_regular(path) as stream:
            text = stream.read(shell.MOST_BYTES + 1).decode("utf-8", "replace")
    except OSError:
        return False
    if not path.endswith(".py") and _is_script(text):
        return True
    marks = (mark for tool in TOOLS for mark in tool.marks)
    if len(text) > shell.MOST_BYTES or not any(mark in text for mark in marks):
        return False
    format_, data = _data(path, text, None)
    return _claimed(LaunchSource(path, text, None, data, format=format_)) is not None


def _is_script(text: str) -> bool:
    """True for text of a shell: by its first line, or by flags outside comments.

    YAML and TOML begin with a key or a section, JSON with a brace.
    """
    if _SHEBANG.match(text):
        return True
    if "\0" in text:
        return False
    lines = [line.strip()[:2000] for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or _DATA.match(lines[0]):
        return False
    return any(_FLAG.search(line.partition(" #")[0]) for line in lines)


def _data(
    path: str, text: str, variables: Mapping[str, str] | None
) -> tuple[str, dict[str, Any] | None]:
    """Format and content of a file of data, None for no mapping; without variables of a part."""
    format_ = "yaml"
    if path.endswith(".py"):
        return "python", recipe_functions.keys_of(text, path, variables)
    try:
        if text.lstrip().startswith("{"):
            format_, value = "json", from_json(text, path)
        elif re.search(r"^\s*\[[\w.]+\]\s*(#|$)", text, re.MULTILINE):
            format_, value = "toml", tomllib.loads(text)
        else:
            value = from_yaml(text, path)
    except (UserError, tomllib.TOMLDecodeError, RecursionError):
        return format_, None
    return format_, cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _claimed(source: LaunchSource) -> tuple[Tool, ShellCommand] | None:
    """The first tool whose file it is."""
    pairs = ((tool, tool.claim(source)) for tool in TOOLS)
    return next(((tool, command) for tool, command in pairs if command is not None), None)


def settings(name: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of a launch file, as a run file has them; the model is the file, or is named."""
    reading = read(name)
    # The file stays the model if it bounds memory, even where it names a preset: `memory_bounds`
    # opens the file by that name.
    is_model = reading.model is not None or ("model" in reading.settings and reading.memory_bounds)
    return reading.settings | ({"model": os.fspath(name)} if is_model else {})


def complete(path: str, values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a launch file, without those that options of the user replace.

    `nodes`, `gpus` or `dp` replace its number of GPUs and an assumed dp; another `recompute`
    replaces all that it says of recomputation. Raises UserError for what the file lacks and the
    user has not given.
    """
    reading = read(path)
    for name, why in reading.needs.items():
        if name not in given:
            raise UserError(f"{path}: {why}")
    replaced: set[str] = set()
    if {"nodes", "gpus", "dp"} & given.keys():
        replaced |= {"gpus", *reading.assumed}
    if reading.differ(["recompute"], given):
        replaced |= {name for name in values if name.startswith("recompute_")}
    return {k: v for k, v in values.items() if k not in replaced}


def memory_bounds(name: str | None, settings: Mapping[str, Any]) -> str:
    """Flags of a launch file without which memory is an upper bound; empty: it is none.

    `settings` are those of the run, which may leave some of the flags without a meaning.
    """
    if not name or find(name) is None:
        return ""
    reading = read(name)
    bounds = reading.memory_bounds
    return ", ".join(b.flag for b in bounds if not reading.differ(b.settings, settings))


def model_of(name: str) -> ModelConfig:
    """The model whose sizes a launch file gives."""
    reading = read(name)
    if (preset := PRESETS.get(str(reading.settings.get("model")))) is not None:
        return preset
    if reading.model is None:
        raise UserError(f"{name}: gives no sizes of a model; use it as --config")
    return reading.model


def read(name: str | os.PathLike[str]) -> LaunchFile:
    """What a launch file says; `find` has found it."""
    full = os.fspath(name)
    path, _, query = full.partition("?")
    pairs = (part.partition("=") for part in query.split("&") if part)
    given = {name: text.replace("%26", "&").replace("%25", "%") for name, _, text in pairs}
    ignores = given.pop(_IGNORE, None) is not None
    return _read(path, tuple(given.items()), ignores, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: str, given: tuple[tuple[str, str], ...], ignores: bool, _: int) -> LaunchFile:
    text = read_text(path, "a launch script", shell.MOST_BYTES)
    script, data, format_ = None, None, "shell"
    more: list[str] = []
    if not path.endswith(".py") and _is_script(text):
        flags = [(k, v) for k, v in given if {*"-."} & {*k}]
        more = [part for k, v in flags for part in ("--" + k.lstrip("-"), v) if part]
        script = shell.read(text, path, {k: v for k, v in given if (k, v) not in flags})
    else:
        format_, data = _data(path, text, dict(given))
        if data is not None:
            _replace(data, dict(given), path, is_python=format_ == "python")
    source = LaunchSource(path, text, script, data, tuple(more), ignores, format_)
    if (claimed := _claimed(source)) is None:
        raise UserError(f"{path}: {_why_not(script)}")
    tool, command = claimed
    try:
        reading = tool.read(source, command)
    except RecursionError:
        raise UserError(f"{path}: nested too deep for a file of {tool.name}") from None
    reading.notes[:0] = script.notes if script else []
    return reading


def _replace(data: dict[str, Any], given: Mapping[str, str], path: str, *, is_python: bool) -> None:
    """Set keys of a file of data; its variables in capitals are those of Python alone."""
    for key, value in given.items():
        if is_python and key == "CONFIG":
            continue
        if key.isupper() and key not in data:
            raise UserError(f"{path}: has no variable {key} that --set could give")
        put(data, key.lstrip("-").replace("-", "_"), value)


def _why_not(script: shell.Script | None) -> str:
    """What a script does that no tool knows."""
    commands = script.commands if script else []
    missing = f"; {script.missing[0]} is not here" if script and script.missing else ""
    starts = next((" ".join(map(shown, c.words))[:80] for c in commands), "nothing")
    pairs = [pair for c in commands for pair in zip(c.words, c.words[1:], strict=False)]
    named = next((shown(b) for a, b in pairs if a in ("--deepspeed", "--config_file")), None)
    if named is not None:
        return (
            f"starts {starts}, whose arguments are not read; use the file that it names: MODEL "
            f"--config {named}, with --seq-length, --micro-batch-size and --global-batch-size"
        )
    names = either([tool.name for tool in TOOLS])
    return f"starts {starts}{missing}; wanted a command of {names}"
