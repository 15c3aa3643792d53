"""What was read of a file of another tool: settings, a model, and what was left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError, either
from stagewright.launch.shell import Script, ShellCommand, shown, unknown_names
from stagewright.launch.tables import NUMBER, FlagRow, canonical, dotted, row_of, table, value_of
from stagewright.model.config import ModelConfig
from stagewright.model.presets import PRESETS
from stagewright.texttable import Table


class Flag(NamedTuple):
    """A flag of a command line with its values; no row: a flag that the table lacks."""

    name: str
    values: tuple[str, ...]
    row: FlagRow | None

    @property
    def text(self) -> str:
        """The values as the script has them."""
        return " ".join(map(shown, self.values))


class Bound(NamedTuple):
    """A flag whose effect is left out, which would reduce memory."""

    flag: str
    settings: tuple[str, ...]
    """Settings: with another value of one of them, the flag has no effect."""


class Line(NamedTuple):
    """A flag, its value in the file, and what it means here or why it means nothing."""

    flag: str
    value: str
    meaning: str


@dataclass
class LaunchFile:
    """Settings and model of a file; `lines` and `ignored` say how each flag was understood."""

    path: str
    tool: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """By our names, or by names that `other_names.translate` knows."""
    model: ModelConfig | None = None
    """The model whose sizes the file gives; None: `settings` may name one."""
    lines: list[Line] = field(default_factory=list[Line])
    """Flags that count, with their settings."""
    ignored: list[Line] = field(default_factory=list[Line])
    """Flags that do not, with the reason."""
    left_out: list[str] = field(default_factory=list[str])
    """Those that do change the step, in a way that the figures do not have."""
    notes: list[str] = field(default_factory=list[str])
    """Assumptions, a sentence each."""
    moot: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Settings by note: with another value of one of them, the note is left out."""
    memory_bounds: list[Bound] = field(default_factory=list[Bound])
    """Why memory is an upper bound."""
    assumed: set[str] = field(default_factory=set[str])
    """Settings that the file does not give; the value that was taken holds until the user's."""
    needs: dict[str, str] = field(default_factory=dict[str, str])
    """Settings that the file lacks, and why: the user has to give them."""

    def summary(self, given: Mapping[str, Any] | None = None) -> list[str]:
        """A line on the file, and its assumptions beside the settings that the user gives."""
        count = len(self.lines) + len(self.ignored)
        name = PurePath(self.path).name
        verb = "does" if len(self.ignored) == 1 else "do"
        head = (
            f"{name} is {self.tool}'s: {len(self.lines)} of {count} flags count, "
            f"{len(self.ignored)} {verb} not; `stagewright show {name} --launch` lists them"
        )
        replaced = given or {}
        return [head, *(note for note in self.notes
                        if not self.differ(self.moot.get(note, ()), replaced))]  # fmt: skip

    def differ(self, names: Iterable[str], given: Mapping[str, Any]) -> bool:
        """True if one of these settings is given, with another value than the file's."""
        defaults = {"recompute": "none"}
        return any(
            given.get(name) is not None
            and (name in self.assumed
                 or given[name] != self.settings.get(name, defaults.get(name)))
            for name in names
        )  # fmt: skip

    def tables(self) -> list[Table]:
        """What the flags mean, and which mean nothing here and why."""
        parts = {"what counts": (self.lines, "setting"), "what does not": (self.ignored, "reason")}
        return [
            Table(
                f"{self.tool}: {title}",
                {"flag": [_shortened(line) for line in lines],
                 name: [line.meaning for line in lines]},
            )
            for title, (lines, name) in parts.items()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "file": self.path,
            "tool": self.tool,
            "settings": self.settings,
            "flags": [line._asdict() for line in self.lines],
            "ignored": [line._asdict() for line in self.ignored],
            "notes": self.notes,
        }

    def fail(self, message: str) -> UserError:
        """An error about the file."""
        return UserError(f"{self.path}: {message}")

    def need_model(self, why: str) -> None:
        """Leave the model to the user."""
        self.needs.setdefault("model", f"{why}; name a model: MODEL --config {self.path}")

    def name_model(self, flag: str, text: str, *others: str) -> str | None:
        """Set the preset of a checkpoint, or of other spellings of it; leave it to the user."""
        preset = next(filter(None, map(preset_of, (text, *others))), None)
        if preset is not None:
            self.settings["model"] = preset
            self.lines.append(Line(flag, shown(text), f"model {preset}"))
        else:
            is_none = f"the model is {shown(text)[:60]}, which is no preset"
            if names := [name for name in unknown_names(text) if not name.startswith("$")]:
                is_none = f"{names[0]} is not set in the file; give --set {names[0]}=VALUE"
            self.need_model(is_none if text else "names no model")
        return preset


def _shortened(line: Line) -> str:
    """A flag with its value, in a line of a table."""
    text = f"{line.flag} {line.value}".rstrip()
    return text if len(text) <= 48 else f"{text[:45]}..."


class LaunchSource(NamedTuple):
    """A file of which some tool may know what it says."""

    path: str
    text: str
    script: Script | None
    """Commands of a shell script; None for a file of data."""
    data: Mapping[str, Any] | None
    """Content of a YAML, TOML or JSON file."""
    more: tuple[str, ...] = ()
    """Flags that the user gives besides those of the file."""
    ignore_unknown: bool = False
    format: str = "shell"
    """Of the text: shell, toml, json, yaml or python."""

    def first(self, starts: Callable[[ShellCommand], object]) -> ShellCommand | None:
        """The first command of the script for which this is true."""
        return next(filter(starts, self.script.commands if self.script else ()), None)

    def first_with(self, *words: str) -> ShellCommand | None:
        """The first command that has a word with one of these in it."""
        return self.first(lambda c: any(part in word for word in c.words for part in words))


NO_COMMAND = ShellCommand((), 1)
"""What a file of data starts."""


class Tool(NamedTuple):
    """A tool whose files can be read."""

    name: str
    claim: Callable[[LaunchSource], ShellCommand | None]
    """The command of a source that starts this tool; for data an empty one. None: not its file."""
    read: Callable[[LaunchSource, ShellCommand], LaunchFile]
    marks: tuple[str, ...] = ()
    """Words of which a file of data has one; empty: the tool has no such files."""


def parse(
    words: Sequence[str], tables: Iterable[Mapping[str, FlagRow]], stray: list[str] | None = None
) -> Iterator[Flag]:
    """Flags of a command line; words that belong to none are passed over, or put into `stray`.

    A flag that no table has takes the words up to the next one. A word from outside that may be
    flags is one without a name.
    """
    rows: dict[str, FlagRow] = {}
    for table_ in tables:
        rows = {**table_, **rows}
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        if not _is_flag(word):
            if unknown_names(word):
                yield Flag("", (word,), None)
            elif stray is not None:
                stray.append(word)
            continue
        name, equals, value = word.partition("=")
        row = row_of(rows, canonical(name))
        if equals:
            yield switched(Flag(name, (value,), row))
            continue
        limit, count = row.limit if row else None, 0
        while i + count < len(words) and count != limit:
            following = words[i + count]
            if _is_flag(following) and not (row and row.values == "1" and count == 0 and
                                            NUMBER.fullmatch(following)):  # fmt: skip
                break
            count += 1
        yield Flag(name, tuple(words[i : i + count]), row)
        i += count


def data_flags(data: Mapping[str, Any], tool: str, prefix: str = "") -> Iterator[Flag]:
    """Keys of nested mappings as flags with dots; null, without a word, and `auto` say nothing."""
    for name, value in dotted(data, prefix):
        row = row_of(table(tool), canonical(name))
        if value is None:
            if row and row.setting and "null" in row.words:
                yield Flag(name, ("null",), row)
        elif value not in ("auto", ""):
            items = cast("list[object]", value) if isinstance(value, list) else [value]
            texts = [str(x).lower() if isinstance(x, bool) else str(x) for x in items]
            yield switched(Flag(name, tuple(texts), row))


def switched(flag: Flag) -> Flag:
    """A switch that has a truth value, as in YAML: on is the switch alone, off says so or nothing.

    >>> row = table("vllm")["enforce_eager"]
    >>> off = switched(Flag("enforce-eager", ("false",), row))
    >>> switched(Flag("enforce-eager", ("true",), row)).values, off.row.ours, off.row.note
    ((), '-', 'off')
    """
    row, text = flag.row, "".join(flag.values).lower()
    if row is None or row.values != "0" or text not in ("true", "false"):
        return flag
    if text == "true":
        return flag._replace(values=())
    if row.ours == row.setting:
        return flag._replace(values=("false",))
    return flag._replace(row=row._replace(flag=f"no-{row.flag}", ours="-", note="off"))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not NUMBER.fullmatch(word)


def known(reading: LaunchFile, flag: Flag, text: str) -> str:
    """Text of a value that matters; raises UserError if it comes from outside the file."""
    if not (names := unknown_names(text)):
        return text
    name = names[0]
    if name.startswith("$"):
        raise reading.fail(
            f"{flag.name} is {shown(text)}, the output of a command, which is not run; write the "
            "value into the file"
        )
    raise reading.fail(
        f"{flag.name} is {shown(text)}, which is not set in the file; give it: --set {name}=VALUE"
    )


def apply(reading: LaunchFile, flags: Sequence[Flag], *, ignore_unknown: bool) -> dict[str, Flag]:
    """Settings of all flags whose rows name one; the flags of the model, by name.

    A flag that comes twice has its last value. Raises UserError for flags that change the step and
    are not known, all at once, unless they are to be ignored.
    """
    empty = dict.fromkeys(flag.text for flag in flags if not flag.name)
    reading.notes += [f"{text} is not set in the file and taken as empty" for text in empty]
    last = {(flag.row.flag if flag.row else flag.name): flag for flag in flags if flag.name}
    of_model: dict[str, Flag] = {}
    strange: list[Line] = []
    for flag in last.values():
        row = flag.row
        if row is None:
            strange.append(Line(flag.name, flag.text, "is not known here"))
        elif row.ours == "-":
            words = {row.effect_of(known(reading, flag, text)) for text in flag.values if row.words}
            if "?" in words:
                strange.append(Line(flag.name, flag.text, "is not modelled"))
            elif "~" in words:
                _approximate(reading, flag, flag.text, row)
            else:
                reading.ignored.append(Line(flag.name, flag.text, row.note))
        elif row.ours == "?":
            strange.append(Line(flag.name, flag.text, row.note))
        elif row.ours == "~":
            _approximate(reading, flag, flag.text, row)
        elif row.ours == "!":
            raise reading.fail(f"{flag.name}: {row.note}")
        elif row.ours.startswith("model."):
            of_model[row.flag] = flag
        else:
            strange += _set(reading, flag, row)
    if strange and not ignore_unknown:
        texts = [f"{line.flag}{' ' * bool(line.value)}{line.value[:40]} {line.meaning}"
                 for line in strange[:6]]  # fmt: skip
        more = f" and {len(strange) - 6} more" if len(strange) > 6 else ""
        raise reading.fail(
            f"what these change in the step is not modelled: {'; '.join(texts)}{more}; "
            "--ignore-unknown reads the file without them"
        )
    reading.ignored += [line._replace(meaning=f"not modelled: {line.meaning}") for line in strange]
    reading.left_out += [line.flag for line in strange]
    reading.notes += [f"{line.flag} is ignored, though it may change the step" for line in strange]
    _check_numbers(reading)
    if "clip_grad" in reading.settings:  # the largest norm; 0 clips nothing
        reading.settings["clip_grad"] = bool(reading.settings["clip_grad"])
    return of_model


_COUNTS = (
    *("tp", "pp", "cp", "ep", "etp", "vpp", "dp", "dp_shard", "nodes", "gpus", "gpus_per_node"),
    "num_distributed_optimizer_instances",
    *("shard_size", "replicate_size", "seq_length", "decoder_seq_length", "micro_batch_size"),
    *("mini_batch_size", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"),
    *("rollout_max_prompt_len", "rollout_max_response_len", "rollout_max_context_len"),
    *("max_tokens_per_gpu", "tokens_of_microbatch", "pp_microbatches", "max_num_seqs"),
    *("gradient_accumulation_steps", "max_total_tokens", "kv_block_size", "concurrency"),
)
"""Settings with which rules of the tools compute: whole numbers from 1."""
_INTEGERS = ("global_batch_size", "tokens_of_step", "zero", "generation_nodes", "fsdp_size",
             "lora_rank", "chunked_prefill_size")  # fmt: skip
"""Others that may be 0 or -1."""
_NUMBERS = ("moe_aux_loss_coeff", "schedule_conservativeness", "range_ratio", "isl", "osl")


def _check_numbers(reading: LaunchFile) -> None:
    """Raise UserError for a value that is no number of its kind."""
    for names, wanted in ((_COUNTS, "a whole number from 1"), (_INTEGERS, "a whole number"),
                          (_NUMBERS, "a number")):  # fmt: skip
        for name in names:
            given: Any = reading.settings.get(name, 1)
            for value in cast("list[Any]", given if type(given) is list else [given]):
                if names is _NUMBERS:
                    right = type(value) in (int, float) and isfinite(value)
                else:
                    right = type(value) is int and (value > 0 or names is _INTEGERS)
                if not right:
                    flag = _flag_of(reading, name)
                    raise reading.fail(f"{flag} is {value!r}, wanted {wanted}")


def _approximate(reading: LaunchFile, flag: Flag, value: str, row: FlagRow) -> None:
    """Note a flag whose effect is left out, with what that does to the figures."""
    reading.ignored.append(Line(flag.name, value, row.note))
    reading.left_out.append(flag.name)
    text = f"{flag.name}{' ' * bool(value)}{value}"
    note = f"{text}: {row.note}"
    reading.notes.append(note)
    settings = ("recompute",) if "recompute" in row.flag or row.setting == "recompute" else ()
    if settings:
        reading.moot[note] = settings
    if row.bounds_memory:
        reading.memory_bounds.append(Bound(text, settings))


def _set(reading: LaunchFile, flag: Flag, row: FlagRow) -> list[Line]:
    """Put a flag's settings into the reading; a value that is not known is returned."""
    setting, constant = row.setting, row.ours[len(row.setting) :]
    if constant.startswith("-"):
        reading.settings.setdefault(f"{setting}-", []).append(constant[1:])
        reading.lines.append(Line(flag.name, "", f"{setting} without {constant[1:]}"))
        return []
    if constant and not row.words:
        given = {setting: value_of(constant[1:])}
    elif not flag.values:
        given = {setting: True}
    else:
        given = dict[str, Any]()
        left_out: list[str] = []
        for text in flag.values:
            value = known(reading, flag, text)
            word = row.words.get(value, value)
            if word == "?" or (row.values == "*" and row.words and value not in row.words):
                return [Line(flag.name, value, "is not modelled")]
            if word == "~":
                left_out.append(value)
            elif word.startswith("!"):
                reading.notes.append(f"{flag.name} {value} is taken as {word[1:]}")
                given[setting] = word[1:].partition(",")[0]
            elif word in ("-", ""):
                reading.ignored.append(Line(flag.name, value, row.note or "the default"))
            elif "=" in word:
                given |= {k: value_of(v) for k, v in (p.split("=") for p in word.split("&"))}
            elif row.values in "+*":
                given[setting] = [*given.get(setting, ()), value_of(word)]
            else:
                given[setting] = value_of(word)
        if left_out:
            _approximate(reading, flag, " ".join(left_out), row)
    reading.settings |= given
    for name, value in given.items():
        text = str(value).strip("[]").replace("'", "") if row.values in "+*" else str(value)
        reading.lines.append(Line(flag.name, flag.text, f"{name} {text}"))
    if row.note and given and not row.words:
        reading.notes.append(f"{flag.name}: {row.note}")
    return []


def program_of(command: ShellCommand) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Words before the training program, the program, and its own words."""
    words = command.words
    for i, word in enumerate(words):
        module = words[i - 1] == "-m" if i else False
        if (word.endswith(".py") and not word.startswith("-")) or (
            module and not word.startswith("torch.distributed")
        ):
            return words[:i], shown(word), words[i + 1 :]
    return (), "", words


_ELASTIC = re.compile(r"torchrun$|torch\.distributed\.|accelerate$|deepspeed$")
"""Launchers that start the processes of a node themselves: Slurm's tasks are theirs."""


def started_gpus(
    reading: LaunchFile, source: LaunchSource, before: Sequence[str]
) -> Mapping[str, int]:
    """Read `nodes`, `gpus_per_node` and `gpus` as torchrun, srun or sbatch start them.

    Without `gpus`, nobody says how many there are.
    """
    headers = source.script.headers if source.script else []
    words = [*(word for line in headers for word in line.split()), *before]
    attached = [(word, re.fullmatch("(-[NnG])([0-9]+)", word)) for word in words]  # -N2
    words = [part for word, match in attached for part in (match.groups() if match else (word,))]
    flags: dict[str, Flag] = {}
    counts: dict[str, int] = {}
    for flag in parse(words, [table("launchers")]):
        if flag.row and flag.row.ours != "-" and flag.values:
            texts = flag.values[0].split(",")  # gpu:h100:8,nvme:1
            text = next((part for part in texts if part.startswith("gpu")), texts[0])
            if number := re.search("(?:^|[:-])([1-9][0-9]{0,8})$", text):
                flags[flag.row.ours], counts[flag.row.ours] = flag, int(number[1])
    if any(map(_ELASTIC.search, before)):
        tasks = counts.pop("tasks_per_node", 1)
        counts.pop("tasks", None)
        if "gpus_per_task" in counts:
            counts.setdefault("gpus_per_node", counts["gpus_per_task"] * tasks)
    per_node = next((name for name in ("processes_per_node", "tasks_per_node", "gpus_per_node")
                     if name in counts), "")  # fmt: skip
    total = "tasks" if "tasks" in counts else "gpus"
    started = {"nodes": counts["nodes"]} if "nodes" in counts else {}
    if per_node and not ("tasks" in counts and "nodes" not in counts):
        started |= {"gpus_per_node": counts[per_node]}
        started["gpus"] = counts[per_node] * started.get("nodes", 1)
        total = ""
    elif total in counts:
        started["gpus"] = counts[total]
    for name, ours in (("nodes", "nodes"), (per_node, "gpus_per_node"), (total, "gpus")):
        if name in flags and ours in started:
            flag = flags[name]
            reading.lines.append(Line(flag.name, flag.text, f"{ours} {started[ours]}"))
    reading.settings |= {"gpus": started["gpus"]} if "gpus" in started else {}
    return started


def integer(reading: LaunchFile, flag: Flag) -> int:
    """Whole number of a flag."""
    text = known(reading, flag, flag.values[0] if flag.values else "")
    value = value_of(text)
    if not isinstance(value, int) or isinstance(value, bool):
        raise reading.fail(f"{flag.name} is {shown(text)!r}, wanted a whole number")
    return value


def _flag_of(reading: LaunchFile, setting: str) -> str:
    """The flag of the file that gives a setting."""
    return next((x.flag for x in reading.lines if x.meaning.startswith(f"{setting} ")), setting)


def choice(reading: LaunchFile, flag: Flag, allowed: Sequence[str]) -> str:
    """Word of a flag, one of those that are known here."""
    text = known(reading, flag, flag.values[0] if flag.values else "")
    if text not in allowed:
        raise reading.fail(f"{flag.name} is {text!r}, wanted {either(allowed)}")
    return text


# ---- models by name ------------------------------------------------------------------------------


def preset_of(checkpoint: str) -> str | None:
    """The preset of a checkpoint, by the name of its folder."""
    name = PurePath(checkpoint).name
    return None if not name or unknown_names(name) else _repositories().get(_stem(name))


@cache
def _repositories() -> Mapping[str, str]:
    """Presets by their names and by those of their repositories; the first one counts."""
    presets: dict[str, str] = {}
    for name, model in PRESETS.items():
        presets.setdefault(_stem(name), name)
        if model.source.startswith("https://huggingface.co/"):
            presets.setdefault(_stem(model.source.split("/")[4]), name)
    return presets


def _stem(name: str) -> str:
    """A checkpoint's name without what says how it was trained or stored."""
    words = re.split(r"[-_]", name.lower())
    variants = {"instruct", "it", "chat", "base", "hf", "fp8", "int4", "bf16", "2507", "thinking",
                "meta", "rl"}  # fmt: skip
    return "-".join(word for word in words if word not in variants)
