"""Files of other tools, recognised by their content: `find` and `read`.

`train.sh?MODEL_SIZE=8b&vocab-size=32000&ignore-unknown` is a file with a value of a variable, and
with a flag that it lacks: flags have a dash in their names, variables of a shell have none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.launch import megatron, shell
from stagewright.launch.reading import Reading, Source, Tool
from stagewright.launch.shell import shown
from stagewright.model.config import ModelConfig

TOOLS: tuple[Tool, ...] = (megatron.SLIME, megatron.MEGATRON)
"""All tools; the first one that knows a file reads it."""

_IGNORE = "ignore-unknown"
_FLAG = re.compile(r"(?:^|[\s(\"'])--?[A-Za-z][\w.-]*(?=[\s=\"')\\]|$)")
_SHEBANG = re.compile(r"#! ?\S*/(env )?(ba|z|da|k)?sh\b")


def with_variables(path: str, variables: dict[str, str], *, ignore_unknown: bool = False) -> str:
    """A path with values of the file's variables, as `--set` and `--ignore-unknown` give them.

    >>> with_variables("train.sh", {"SIZE": "8b"}, ignore_unknown=True)
    'train.sh?SIZE=8b&ignore-unknown'
    """
    parts = [f"{name}={quote(value, safe='/:,')}" for name, value in variables.items()]
    parts += [_IGNORE] * ignore_unknown
    separator = "&" if "?" in path else "?"
    return path + separator * bool(parts) + "&".join(parts)


def find(name: str | os.PathLike[str]) -> str | None:
    """The path of a launch file that a name stands for; None: it stands for something else."""
    path = os.fspath(name).partition("?")[0]
    if not path or path.endswith((".json", ".stg", ".etb", ".csv")) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as stream:
            head = stream.read(shell.MOST_BYTES + 1)
    except OSError:
        return None
    return path if _is_script(head.decode("utf-8", "replace")) else None


def _is_script(text: str) -> bool:
    """True for text of a shell: by its first line, or by flags outside comments."""
    if _SHEBANG.match(text):
        return True
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return any(len(_FLAG.findall(line[:2000])) > 0 for line in lines)


def settings(name: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of a launch file, as a run file has them; the model is the file, or is named."""
    reading = read(name)
    named = {"model": os.fspath(name)} if reading.model is not None else {}
    return named | reading.settings


def complete(path: str, values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a launch file beside those that the user gives.

    The file's number of GPUs gives way to `nodes`, `gpus` or `dp`. Raises UserError for what the
    file lacks and the user has not given.
    """
    for name, why in read(path).needs.items():
        if name not in given:
            raise UserError(f"{path}: {why}")
    sized = {"nodes", "gpus", "dp"} & given.keys()
    return {k: v for k, v in values.items() if not (sized and k == "gpus")}


def model_of(name: str) -> ModelConfig:
    """The model whose sizes a launch file gives."""
    reading = read(name)
    if reading.model is None:
        raise UserError(f"{name}: gives no sizes of a model; use it as --config")
    return reading.model


def read(name: str | os.PathLike[str]) -> Reading:
    """What a launch file says; `find` has found it."""
    full = os.fspath(name)
    path, _, query = full.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    ignores = given.pop(_IGNORE, None) is not None
    return _read(path, tuple(given.items()), ignores, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: str, given: tuple[tuple[str, str], ...], ignores: bool, _: int) -> Reading:
    text = read_text(path, "a launch script", shell.MOST_BYTES)
    script = shell.read(text, path, {k: v for k, v in given if "-" not in k})
    more = [part for k, v in given if "-" in k for part in ("--" + k.lstrip("-"), v) if part]
    source = Source(path, text, script, None, tuple(more), ignores)
    for tool in TOOLS:
        if (command := tool.command(source)) is not None:
            reading = tool.read(source, command)
            reading.notes[:0] = script.notes
            return reading
    names = " or ".join(tool.name for tool in TOOLS)
    starts = next((" ".join(map(shown, c.words))[:80] for c in script.commands), "nothing")
    missing = f"; {script.missing[0]} is not here" if script.missing else ""
    raise UserError(f"{path}: starts {starts}{missing}; wanted a command of {names}")
