"""Words of a command line that click would misread: repeated, foreign and mistyped options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import click

from stagewright.errors import UserError, did_you_mean

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_TRUTH = ("true", "false", "yes", "no", "on", "off")


class GivenOption(NamedTuple):
    """An option as it stands on the command line."""

    parameter: click.Parameter
    name: str
    """As it is spelled."""
    value: object
    """Text, or for a switch whether it is on."""

    def __str__(self) -> str:
        return self.name if isinstance(self.value, bool) else f"{self.name} {self.value}"


def check_words(words: Sequence[str], command: click.Command) -> None:
    """Refuse names of one setting that contradict each other, and words that are no options.

    An option that is repeated by the same name replaces its first value, as elsewhere: scripts
    append to a common line. Two names of one setting with two values are a mistake. To a search,
    where a setting takes a list, two values by the same name may mean either.
    """
    once = any(parameter.name == "vary" for parameter in command.params)
    by_name = _parameters(command)
    seen: dict[str, GivenOption] = {}
    for word in _words(words, by_name, command):
        before = seen.get(str(word.parameter.name), word)
        several = word.parameter.nargs != 1 or getattr(word.parameter, "multiple", False)
        if before.name != word.name and before.value != word.value and not several:
            raise UserError(f"{before} and {word} contradict each other; keep one")
        if once and before.value != word.value and not several:
            raise _given_twice(before, word)
        seen[str(word.parameter.name)] = word


def _given_twice(before: GivenOption, word: GivenOption) -> UserError:
    """What is said of an option of a search that has two values."""
    from stagewright.searching.space import is_searched

    name = word.name
    use = "give it once"
    if is_searched(str(word.parameter.name)):
        use += f"; a list is {name} {before.value},{word.value}"
    return UserError(f"{name} is given twice, as {before.value} and {word.value}; {use}")


class Sorted(NamedTuple):
    """Words of a command line, without those that change nothing here."""

    kept: list[str]
    ignored: list[str]
    """Names of options that were left out, in order, each once."""


def sort_words(words: Sequence[str], command: click.Command) -> Sorted:
    """Leave out options of training scripts and servers that change nothing, with their values.

    Raises a UserError that names all options that other tools have and that are refused here.
    """
    from stagewright.run.sections.foreign import FOREIGN, IGNORED, canonical

    by_name = _parameters(command)
    left, kept = list(words), list[str]()
    ignored, refused = dict[str, None](), dict[str, str]()
    while left:
        text = left.pop(0)
        name, equals, _ = text.partition("=")
        key, own = canonical(name), by_name.get(name)
        if text == "--":
            kept += [text, *left]
            break
        if own is None and text.startswith("--") and key in IGNORED:
            ignored[name] = None
            del left[: 0 if equals else _count_values(left, IGNORED[key])]
            continue
        kept.append(text)
        if isinstance(own, click.Option):
            if not (own.is_flag or equals):
                kept += left[:1]
                del left[:1]
        elif text.startswith("--") and key in FOREIGN:
            refused[name] = FOREIGN[key]
    if len(refused) > 1:
        raise UserError("no such options " + _say_refused(refused))
    return Sorted(kept, list(ignored))


def _count_values(left: Sequence[str], most: int | None) -> int:
    """How many words that follow an option are its values: numbers may be negative."""
    words = left if most is None else left[:most]
    count = 0
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            break
        count += 1
    return count


def _say_refused(refused: Mapping[str, str]) -> str:
    """Options by what is said of them: those of the model at once."""
    from stagewright.run.sections.foreign import OF_MODEL

    of_model = [name for name, said in refused.items() if said == OF_MODEL]
    told = [f"{name}: {said}" for name, said in refused.items() if said != OF_MODEL]
    if of_model:
        subject = "it belongs" if len(of_model) == 1 else "they belong"
        said = OF_MODEL.replace("it belongs", subject)
        told.insert(0, f"{', '.join(of_model)}: {said}")
    return ". ".join(told)


def note_of_ignored(names: Sequence[str]) -> str:
    """What is said of options that were left out."""
    dropout = any(name.endswith("-dropout") for name in names)
    more = "; where dropout is 0, use --no-dropout" if dropout else ""
    return f"ignored, as Stagewright computes nothing from: {', '.join(names)}{more}"


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    return {
        name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def _words(
    words: Sequence[str], by_name: Mapping[str, click.Parameter], command: click.Command
) -> Iterator[GivenOption]:
    left = list(words)
    last: GivenOption | None = None
    while left:
        text = left.pop(0)
        if text == "--":
            return
        name, equals, value = text.partition("=")
        parameter = by_name.get(name)
        if parameter is None and text[:2] in by_name and not text.startswith("--"):
            name, equals, value = text[:2], text[2:], text[2:]  # -oDIR
            parameter = by_name[name]
        if parameter is None:
            _check_other(text, last, command)
            last = None
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            last = GivenOption(parameter, name, name in parameter.opts)
            yield last
        else:
            yield GivenOption(parameter, name, value if equals or not left else left.pop(0))
            last = None


def _check_other(text: str, before: GivenOption | None, command: click.Command) -> None:
    """Refuse a word that is no option and cannot be an argument."""
    if before is not None and (_NUMBER.fullmatch(text) or text.lower() in _TRUTH):
        other = "" if before.parameter.secondary_opts == [] else f" or {_opposite(before)}"
        raise UserError(f"{before} takes no value, got {text}; use {before.name}{other} alone")
    if before is not None and {*text.lower().split(",")} <= {*_TRUTH}:
        use = f"use {before.name} alone"
        if any(parameter.name == "vary" for parameter in command.params):
            use = f"say --vary {before.parameter.name}={text}"
        raise UserError(f"{before} takes no value, got {text}; {use}")
    if re.fullmatch(r"-[A-Za-z][\w-]+", text):
        raise UserError(no_such_option(text, command))
    name, equals, value = text.partition("=")
    meant = nearest_flag("--" + name, command) if equals and not text.startswith("-") else None
    if meant is not None and "/" not in name:
        raise UserError(f"{text}: a setting is an option here: {meant} {value}")


def _opposite(word: GivenOption) -> str:
    parameter = word.parameter
    names = parameter.secondary_opts if word.value else parameter.opts
    return next(name for name in names if name.startswith("--"))


# ---- options that a command lacks ----------------------------------------------------------------


def no_such_option(name: str, command: click.Command, others: Iterable[str] = ()) -> str:
    """What to say of an option that a command does not have; `others` are commands that have it."""
    from stagewright.run.sections.foreign import FOREIGN, canonical

    if owners := ", ".join(others):
        return f"no such option {name}; it is an option of {owners}"
    said = FOREIGN.get(canonical(name))
    if said is not None:
        return f"no such option {name}: {said}"
    meant = nearest_flag(name, command)
    return f"no such option {name}" + (f"; did you mean {meant!r}?" if meant else "; see --help")


def nearest_flag(name: str, command: click.Command) -> str | None:
    """The option that is meant: by its initials, by its beginning in any tool, or by its letters.

    >>> @click.command()
    ... @click.option("--tp", "--tensor-parallel-size")
    ... @click.option("--sequence-parallel")
    ... def show(): ...
    >>> [nearest_flag(name, show) for name in ("--sp", "--tensor-parallel", "--tpp", "--lr")]
    ['--sequence-parallel', '--tp', '--tp', None]
    """
    known = flags(command)
    word = name.lstrip("-").replace("_", "-")
    if f"--{word}" in known:
        return known[f"--{word}"]
    for flag in known:
        if word == "".join(part[:1] for part in flag[2:].split("-")) and "-" in flag[2:]:
            return known[flag]
    for flag in known:
        if len(word) > 2 and flag[2:].startswith(word):
            return known[flag]
    # Without dashes, which all have: short words would be alike by these alone.
    hint = did_you_mean(word, [flag[2:] for flag in known])
    return next((own for flag, own in known.items() if repr(flag[2:]) in hint), None)


def flags(command: click.Command) -> Mapping[str, str]:
    """The first name of each option of a command, by all names of the option."""
    by_name: dict[str, str] = {}
    for parameter in command.params:
        for names in (parameter.opts, parameter.secondary_opts):
            by_name |= {name: _first(names) for name in names if name.startswith("--")}
    return by_name


def _first(names: Iterable[str]) -> str:
    return next(name for name in names if name.startswith("--"))


def takers(name: str, commands: Mapping[str, click.Command]) -> list[str]:
    """The commands that have an option."""
    return [title for title, each in commands.items() if name in flags(each)]
