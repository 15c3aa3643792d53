"""Options of a command line that click would misread: repeated, mistyped and of other tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import click

from stagewright.errors import UserError, did_you_mean

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_TRUTH = frozenset(("true", "false", "yes", "no", "on", "off"))


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by each of their names."""
    return {
        name: option
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }


def read_words(
    words: Sequence[str], command: click.Command, *, of_runs: bool
) -> tuple[list[str], list[str]]:
    """The words that click shall parse, and names of options that were left out.

    With `of_runs`, options of training scripts and servers that change nothing here are left out
    with their values, and `--model NAME` is the argument MODEL. Raises UserError for options of
    other tools that are refused (all at once), for two names of one setting with different values,
    and for words that can be neither options nor arguments. An option that is repeated by the same
    name replaces its first value, since scripts append to a common line; but not in a search,
    where both values may be meant.
    """
    from stagewright.launch.names import FOREIGN, IGNORED, canonical

    options = options_of(command)
    searches = "--vary" in options  # its settings take lists
    remaining, kept = list(words), list[str]()
    given, refused = dict[str, tuple[str, str]](), dict[str, str]()
    ignored = dict[str, None]()
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            kept += [word, *remaining]
            break
        name, equals, value = word.partition("=")
        if name not in options and word[:2] in options:  # -oDIR
            name, equals, value = word[:2], "=", word[2:]
        option, key = options.get(name), canonical(name)
        if option is None and of_runs and word.startswith("--"):
            if name == "--model" and (equals or remaining):
                kept.append(value if equals else remaining.pop(0))
                continue
            if key in IGNORED:
                ignored[name] = None
                del remaining[: 0 if equals else _count_values(remaining, IGNORED[key])]
                continue
            if key in FOREIGN:
                refused[name] = FOREIGN[key]
        kept.append(word)
        if option is None:
            _check_argument(word, command)
            continue
        if option.is_flag:
            value = "on" if name in option.opts else "off"
            _check_takes_no_value(name, option, remaining, searches=searches)
        elif not equals:
            values, remaining = remaining[: option.nargs], remaining[option.nargs :]
            kept += values
            value = " ".join(values)
        if option.nargs == 1 and not option.multiple:
            _check_once(name, value, option, given, searches=searches)
    if len(refused) > 1:
        raise UserError("no such options " + _describe_refused(refused))
    return kept, list(ignored)


def _count_values(words: Sequence[str], limit: int | None) -> int:
    """Number of words after an option that are its values, negative numbers among them."""
    for count, word in enumerate(words[:limit]):
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            return count
    return len(words[:limit])


def _check_once(
    name: str,
    value: str,
    option: click.Option,
    given: dict[str, tuple[str, str]],
    *,
    searches: bool,
) -> None:
    """Raise a UserError if an option was given before with another value."""
    setting = str(option.name)
    before, old = given.get(setting, (name, value))
    given[setting] = name, value
    if old == value:
        return
    if before != name:
        texts = [(before, old), (name, value)]
        both = " and ".join(text if option.is_flag else f"{text} {of}" for text, of in texts)
        raise UserError(f"{both} contradict each other; keep one")
    if searches:
        from stagewright.searching.space import is_searched

        hint = f"; a list is {name} {old},{value}" if is_searched(setting) else ""
        raise UserError(f"{name} is given twice, as {old} and {value}; give it once{hint}")


def _check_takes_no_value(
    name: str, option: click.Option, remaining: Sequence[str], *, searches: bool
) -> None:
    """Raise a UserError if a value follows a switch."""
    word = remaining[0] if remaining else ""
    truths = {*word.lower().split(",")} <= _TRUTH
    if not truths and not _NUMBER.fullmatch(word):
        return
    opposite = option.secondary_opts if name in option.opts else option.opts
    use = f"use {' or '.join([name, *_first(opposite)])} alone"
    if "," in word:
        use = f"say --vary {option.name}={word}" if searches else f"use {name} alone"
    raise UserError(f"{name} takes no value, got {word}; {use}")


def _check_argument(word: str, command: click.Command) -> None:
    """Raise a UserError for a word that cannot be an argument: `-ep`, `tp=8`."""
    if re.fullmatch(r"-[A-Za-z][\w-]+", word):
        raise UserError(no_such_option(word, command))
    name, equals, value = word.partition("=")
    option = nearest_option("--" + name, command) if equals and not word.startswith("-") else None
    if option is not None and "/" not in name and "?" not in name:
        raise UserError(f"{word}: a setting is an option here: {option} {value}")


def _describe_refused(refused: Mapping[str, str]) -> str:
    """Refused options with what to use instead; those of the model together."""
    from stagewright.launch.names import OF_MODEL

    of_model = [name for name, text in refused.items() if text == OF_MODEL]
    texts = [f"{name}: {text}" for name, text in refused.items() if text != OF_MODEL]
    if of_model:
        subject = "it belongs" if len(of_model) == 1 else "they belong"
        texts.insert(0, f"{', '.join(of_model)}: {OF_MODEL.replace('it belongs', subject)}")
    return ". ".join(texts)


def note_of_ignored(names: Sequence[str]) -> str:
    """Note on options that were left out."""
    dropout = any(name.endswith("-dropout") for name in names)
    more = "; where dropout is 0, use --no-dropout" if dropout else ""
    return f"ignored, as Stagewright computes nothing from: {', '.join(names)}{more}"


# ---- options that a command lacks ----------------------------------------------------------------


def no_such_option(
    name: str, command: click.Command, group: Mapping[str, click.Command] | None = None
) -> str:
    """Error for an option that a command lacks; other commands of `group` may have it."""
    from stagewright.launch.names import FOREIGN, canonical

    if owners := [title for title, of in (group or {}).items() if name in options_of(of)]:
        return f"no such option {name}; it is an option of {', '.join(owners)}"
    if canonical(name) in FOREIGN:
        return f"no such option {name}: {FOREIGN[canonical(name)]}"
    option = nearest_option(name, command)
    return f"no such option {name}" + (f"; did you mean {option!r}?" if option else "; see --help")


def nearest_option(name: str, command: click.Command) -> str | None:
    """The option that is meant: by its initials, by its beginning in any tool, or by its letters.

    >>> @click.command()
    ... @click.option("--tp", "--tensor-parallel-size")
    ... @click.option("--sequence-parallel")
    ... def show(): ...
    >>> [nearest_option(name, show) for name in ("--sp", "--tensor-parallel", "--tpp", "--lr")]
    ['--sequence-parallel', '--tp', '--tp', None]
    """
    firsts = {
        name.removeprefix("--"): first
        for option in command.params
        for names in (option.opts, option.secondary_opts)
        for first in _first(names)
        for name in names
        if name.startswith("--")
    }
    word = name.lstrip("-").replace("_", "-")
    of_initials = [
        text
        for text in firsts
        if "-" in text and word == "".join(part[:1] for part in text.split("-"))
    ]
    longer = [text for text in firsts if len(word) > 2 and text.startswith(word)]
    hint = did_you_mean(word, firsts)
    alike = [text for text in firsts if repr(text) in hint]
    match = next(iter([word] * (word in firsts) + of_initials + longer + alike), None)
    return None if match is None else firsts[match]


def _first(names: Iterable[str]) -> list[str]:
    """The first long name of an option, if it has one."""
    return [name for name in names if name.startswith("--")][:1]
