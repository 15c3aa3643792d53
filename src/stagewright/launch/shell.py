"""Shell scripts read, never run: which commands they would start, with which words.

Variables, arrays, patterns, whole-number arithmetic, `if`, `case`, loops, functions, subshells,
sourced files beside the script, `bash -c` and the here-documents of `sbatch` are followed. Other
commands are recorded and count as successful. A variable whose value is not followed is unknown.
The environment is empty: a variable from outside, an argument of the script and the output of a
command stand in words as `unknown`; tests take them for empty text.

>>> script = read("TP=8\\nA=(--tp $TP)\\ntorchrun train.py ${A[@]} --lr ${LR:-1e-4} --pp $PP")
>>> [shown(word) for word in script.commands[0].words[2:]]
['--tp', '8', '--lr', '1e-4', '--pp', '$PP']
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.launch.arithmetic import Undecided, evaluate
from stagewright.launch.lexer import ASSIGNMENT, DEEPEST, Lexer, Token, braces

MOST_BYTES = 1 << 19
"""Size limit of a script, and of each file that it sources."""
_MOST_STEPS = 40_000
"""Commands, words and turns of loops that are followed."""
_MOST_TEXT = 1 << 22
"""Characters that expansions may make together."""

_MARK = re.compile("\0([^\0]*)\0")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))", re.DOTALL)
_REDIRECTIONS = frozenset({"&>>", "&>", ">>", ">&", "<<<", "<&", "<>", ">|", "<", ">"})
_ENDS = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", ")", ";;", ";&", ";;&"})
_CLASSES = {"[:digit:]": "0-9", "[:alpha:]": "a-zA-Z", "[:alnum:]": "a-zA-Z0-9",
            "[:space:]": " \t\n", "[:upper:]": "A-Z", "[:lower:]": "a-z"}  # fmt: skip
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_STARTS = ("sbatch", "srun", "bash", "sh", "/bin/bash", "/bin/sh")
"""Commands that run what a here-document has."""
_QUIET = frozenset(
    {"echo", "printf", "cat", "mkdir", "cd", "set", "trap", "sleep", "pkill", "true", ":"}
)


def unknown(name: str) -> str:
    """Text that stands for a value from outside; `$(` begins the name of a command's output."""
    return "\0" + name.replace(" ", "\1") + "\0"


def unknown_names(text: str) -> list[str]:
    """Variables and commands whose values a word would need."""
    return [name.replace("\1", " ") for name in _MARK.findall(text)]


def shown(text: str) -> str:
    """A word as the script has it: unknown values by their names."""
    text = _MARK.sub(lambda mark: mark[1] if mark[1].startswith("$") else f"${mark[1]}", text)
    return text.replace("\1", " ")


class ShellCommand(NamedTuple):
    """A command of a script with its words, those of `srun` and the like before it included."""

    words: tuple[str, ...]
    line: int


@dataclass
class Script:
    """What a script would start, and what its reader had to assume."""

    commands: list[ShellCommand] = field(default_factory=list[ShellCommand])
    variables: dict[str, str | list[str]] = field(default_factory=dict[str, "str | list[str]"])
    headers: list[str] = field(default_factory=list[str])
    """Options of `#SBATCH` lines."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Texts that `cat` writes into files from here-documents, by path."""
    missing: list[str] = field(default_factory=list[str])
    """Files that are sourced and are not beside the script."""
    notes: list[str] = field(default_factory=list[str])
    """Tests that could not be decided."""


def read(text: str, path: str = "script", given: Mapping[str, str] | None = None) -> Script:
    """The commands of a script; `given` are values of variables, which assignments do not change.

    Raises UserError for text that no shell could read, and for more work than a script needs.
    """
    if strange := re.search("[\0-\x08\x0e-\x1f]", text):
        line = text.count("\n", 0, strange.start()) + 1
        raise UserError(f"{path}: line {line}: holds control characters; wanted a script")
    reader = _Reader(path, given or {})
    try:
        reader.run_text(text)
    except _Exit as end:
        if end.code not in ("", "0"):
            named = " and ".join(f"--set {name}=..." for name in sorted(reader.tested)[:3])
            hint = f"; give what is tested there: {named}" if named else ""
            where = f"{path}: line {end.line}"
            raise UserError(f"{where}: the script exits with {shown(end.code)}{hint}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deep for a launch script") from None
    if unused := sorted({*reader.given} - reader.used):
        raise UserError(f"{path}: has no variable {unused[0]} that --set could give")
    return reader.script


def beside(folder: str, name: str) -> Path | None:
    """The file that a script in a folder names; None: none in its repository.

    Neither `..` nor a link leads out of it, so that a script of others opens nothing else. Without
    a repository it is the working folder, for scripts elsewhere their own.
    """
    if not name or unknown_names(name) or os.path.isabs(name):
        return None
    try:
        start, path, here = Path(folder).resolve(), Path(folder, name).resolve(), Path.cwd()
        roots = (up for up in (start, *start.parents) if (up / ".git").exists())
        root = next(roots, here if start.is_relative_to(here) else start)
        inside = path.is_relative_to(root) and ".git" not in path.relative_to(root).parts
        return path if inside and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that is too long, links in a circle
        return None


class _Exit(Exception):
    """`exit` in a script."""

    def __init__(self, code: str, line: int) -> None:
        self.code, self.line = code, line


class _Unfollowed(Exception):
    """A command or an assumption inside `$( )` that leaves its output unknown."""


class _Jump(Exception):
    """`break`, `continue` or `return`."""

    def __init__(self, kind: str, count: int = 1) -> None:
        self.kind, self.count = kind, count


# ---- commands ------------------------------------------------------------------------------------


class _Reader:
    """Follows a script; commands that are skipped are parsed with `run` False."""

    def __init__(self, path: str, given: Mapping[str, str]) -> None:
        self.path, self.folder = os.path.basename(path), os.path.dirname(path)
        self.script = Script(variables={**given})
        self.given, self.used = given, set[str]()
        self.computed: set[str] = set()
        """Variables that hold the output of commands."""
        self.read_outside: bool = False
        """A test has read a variable from outside."""
        self.tested: set[str] = set()
        """Variables that the last test has read."""
        self.functions: dict[str, tuple[list[Token], int]] = {}
        self.arguments: list[str] = []
        self.locals: list[dict[str, str | list[str] | None]] = []
        """Values that `local` hides, by function that is running."""
        self.attributes: dict[str, str] = {}
        """Letters of `declare` that change what a variable takes: i, u, l, n."""
        self.maps: set[str] = set()
        """Associative arrays; their items are `[KEY]=VALUE`."""
        self.before: tuple[str, ...] = ()
        """Words of the launcher whose `-c` is being read."""
        self.depth = self.steps = self.made = self.sourced = self.loops = 0
        self.status: bool | None = True
        self.assumed: bool = False
        """A command counts as successful since a loop began."""
        self.printed: list[str] | None = None
        """Text that the `$( )` which is being read has printed; None: outside of one."""
        self.place: str = "."
        """The folder of `cd` in a `$( )`."""
        self.tokens: list[Token] = []

    # -- limits

    def _count(self, text: str = "") -> str:
        self.steps += 1
        self.made += len(text)
        if self.steps > _MOST_STEPS or self.made > _MOST_TEXT:
            raise UserError(f"{self.path}: expands to more than a launch script would; simplify it")
        return text

    def run_text(self, text: str, line: int = 1) -> None:
        """Follow a text of commands."""
        if self.depth > DEEPEST:
            raise UserError(f"{self.path}: line {line}: nested too deep for a launch script")
        self._count(text)
        lexer = Lexer(text.replace("\r\n", "\n"), self.path, line)
        outer, self.depth = self.tokens, self.depth + 1
        self.tokens = lexer.tokens()
        if self.depth == 1 or "sbatch" in self.before:
            self.script.headers += lexer.headers
        try:
            i = self._list(0, frozenset(), True)
            if i < len(self.tokens):
                self._unexpected(i)
        finally:
            self.tokens, self.depth = outer, self.depth - 1

    def _unexpected(self, i: int) -> NoReturn:
        token = self.tokens[min(i, len(self.tokens) - 1)]
        what = "the end" if i >= len(self.tokens) else repr(token.text[:40])
        raise UserError(f"{self.path}: line {token.line}: cannot read {what} here")

    # -- structure

    def _is(self, i: int, *texts: str) -> bool:
        return i < len(self.tokens) and self.tokens[i].text in texts

    def _expect(self, i: int, text: str) -> int:
        if not self._is(i, text):
            self._unexpected(i)
        return i + 1

    def _list(self, i: int, stops: frozenset[str], run: bool) -> int:
        """Commands up to one of the words in `stops`, or an operator that closes."""
        while i < len(self.tokens):
            token = self.tokens[i]
            if token.text in ("\n", ";", "&"):
                i += 1
            elif token.text in stops or (not token.is_word and token.text in _ENDS):
                break
            else:
                i = self._and_or(i, run)
        return i

    def _and_or(self, i: int, run: bool) -> int:
        i, ok = self._pipeline(i, run)
        while self._is(i, "&&", "||"):
            takes = run and (ok is not False) == (self.tokens[i].text == "&&")
            if run and ok is None:
                self._note(self.tokens[i].line, "a test that is not decided counts as true")
            i += 1
            while self._is(i, "\n"):
                i += 1
            i, status = self._pipeline(i, takes)
            ok = status if takes else ok
        if run:
            self.status = ok
        return i

    def _note(self, line: int, text: str) -> None:
        if self.printed is not None:
            raise _Unfollowed
        if (note := f"line {line}: {text}") not in self.script.notes:
            self.script.notes.append(note)

    def _pipeline(self, i: int, run: bool) -> tuple[int, bool | None]:
        negated = self._is(i, "!")
        before = self._snapshot()
        i, ok = self._command(i + negated, run)
        while self._is(i, "|", "|&"):
            if run and self.printed is not None:
                raise _Unfollowed
            self._restore(before)
            i += 1
            while self._is(i, "\n"):
                i += 1
            i, ok = self._command(i, run)
            self._restore(before)
        return i, (not ok if negated and ok is not None else ok)

    def _snapshot(self) -> tuple[dict[str, str | list[str]], dict[str, Any], list[str]]:
        return dict(self.script.variables), dict(self.functions), self.arguments

    def _restore(
        self, before: tuple[dict[str, str | list[str]], dict[str, Any], list[str]]
    ) -> None:
        """End a subshell, whose variables, functions and arguments are its own."""
        self.script.variables, self.functions = dict(before[0]), dict(before[1])
        self.arguments = before[2]

    def _subshell(self, i: int, run: bool) -> int:
        before = self._snapshot()
        try:
            return self._list(i, frozenset(), run)
        except _Exit as end:
            if end.code not in ("", "0"):
                raise
            return self._list(i, frozenset(), False)
        finally:
            self._restore(before)

    def _command(self, i: int, run: bool) -> tuple[int, bool | None]:
        self._count()
        if i >= len(self.tokens):
            self._unexpected(i)
        token = self.tokens[i]
        if not token.is_word and token.text != "(":
            return self._simple(i, run)
        match token.text:
            case "if":
                return self._if(i + 1, run), self.status
            case "case":
                return self._redirected(self._case(i + 1, run)), self.status
            case "for" | "select":
                return self._redirected(self._for(i + 1, run)), self.status
            case "while" | "until":
                return self._redirected(self._while(i, run)), True
            case "{":
                i = self._list(i + 1, frozenset({"}"}), run)
                return self._redirected(self._expect(i, "}")), self.status
            case "(":
                i = self._subshell(i + 1, run)
                return self._redirected(self._expect(i, ")")), self.status
            case "[[":
                end = i
                while not self._is(end, "]]"):
                    if end >= len(self.tokens):
                        self._unexpected(end)
                    end += 1
                words = [*self.tokens[i + 1 : end]]
                return self._redirected(end + 1), self._test(words, True) if run else None
            case "function":
                name, i = self.tokens[i + 1].text if i + 1 < len(self.tokens) else "", i + 2
                i += 2 if self._is(i, "(") else 0
                return self._define(name, i), True
            case _:
                pass
        if token.text.startswith("((") and token.text.endswith("))"):
            return i + 1, self._truth(token.text[2:-2]) if run else None
        if self._is(i + 1, "(") and self._is(i + 2, ")"):
            return self._define(token.text, i + 3), True
        return self._simple(i, run)

    def _redirected(self, i: int) -> int:
        while i < len(self.tokens) and not self.tokens[i].is_word:
            if self.tokens[i].body is not None:
                i += 1
            elif self.tokens[i].text in _REDIRECTIONS:
                i += 2
            else:
                break
        return i

    def _define(self, name: str, i: int) -> int:
        while self._is(i, "\n"):
            i += 1
        self.functions[name] = self.tokens, i
        return self._command(i, False)[0]

    def _block(self, i: int, stops: set[str], run: bool, guard: bool) -> int:
        """A branch; one that ends the script because something from outside is missing is left."""
        if not run or not guard:
            return self._list(i, frozenset(stops), run)
        variables, commands = dict(self.script.variables), len(self.script.commands)
        try:
            return self._list(i, frozenset(stops), True)
        except _Exit as end:
            if end.code in ("", "0"):
                raise
            self.script.variables = variables
            del self.script.commands[commands:]
            return self._list(i, frozenset(stops), False)

    def _begin_test(self) -> set[str]:
        """Forget what the last test read; returns the variables that were used so far."""
        self.read_outside, self.status, used, self.used = False, True, self.used, set[str]()
        return used

    def _condition(self, i: int, stop: str, run: bool) -> tuple[int, bool | None]:
        used = self._begin_test()
        line = self.tokens[min(i, len(self.tokens) - 1)].line
        assumed, self.assumed = self.assumed, False
        start, i = i, self._list(i, frozenset({stop}), run)
        words = " ".join(token.text for token in self.tokens[start:i]).strip("\n ;")
        test = words if len(words) <= 60 else f"{words[:57]}..."
        if run and self.assumed and stop == "then":
            self._note(line, f"{test!r} counts as successful")
        self.assumed = assumed or self.assumed
        if run:
            self.tested = {name for name in self.used if _NAME.fullmatch(name)}
        self.used |= used
        decided = self.status
        if run and decided is None:
            self._note(line, f"{test!r} is not decided and counts as false")
        return self._expect(i, stop), decided

    def _if(self, i: int, run: bool) -> int:
        done = False
        while True:
            i, ok = self._condition(i, "then", run and not done)
            takes = run and not done and bool(ok)
            self.status = True if run and not done else self.status
            i = self._block(i, {"elif", "else", "fi"}, takes, self.read_outside)
            done = done or takes
            if self._is(i, "elif"):
                i += 1
                continue
            if self._is(i, "else"):
                guard = self.read_outside
                i = self._block(i + 1, {"fi"}, run and not done, guard)
            return self._redirected(self._expect(i, "fi"))

    def _case(self, i: int, run: bool) -> int:
        self.read_outside = False
        subject = self._text(self.tokens[i].text) if run and i < len(self.tokens) else ""
        outside = self._outside(subject)
        i += 1
        while self._is(i, "\n"):
            i += 1
        i, done, matches = self._expect(i, "in"), False, False
        self.status = True if run else self.status
        while True:
            while self._is(i, "\n"):
                i += 1
            if self._is(i, "esac"):
                return i + 1
            i += self._is(i, "(")
            while not self._is(i, ")"):
                if i >= len(self.tokens):
                    self._unexpected(i)
                token = self.tokens[i]
                if token.is_word and run and not done:
                    pattern = self._pattern(token.text)[:500]
                    matches = matches or fnmatchcase(_MARK.sub("", subject)[:2000], pattern)
                i += 1
            takes = run and not done and matches
            i = self._block(i + 1, {"esac"}, takes, outside)
            matches = takes and self._is(i, ";&")
            done = done or (takes and not self._is(i, ";&", ";;&"))
            i += self._is(i, ";;", ";&", ";;&")

    def _for(self, i: int, run: bool) -> int:
        head = self.tokens[i].text if i < len(self.tokens) else ""
        if head.startswith("(("):
            parts = [*head[2:-2].split(";"), "", ""][:3]
            if run:
                self._arithmetic(parts[0])
            turns: Iterator[object] = self._turns(parts[1], parts[2]) if run else iter(())
            i += 1
        else:
            i, words = i + 1, list[str]()
            if self._is(i, "in"):
                i += 1
                while i < len(self.tokens) and self.tokens[i].is_word:
                    words += self._fields(self.tokens[i].text) if run else []
                    i += 1
            elif run:
                words = self.arguments
            turns = (self._assign(head, word) for word in words)
        while self._is(i, ";", "\n"):
            i += 1
        return self._loop(self._expect(i, "do"), turns)

    def _turns(self, condition: str, step: str) -> Iterator[None]:
        while self._truth(condition or "1"):
            yield
            self._arithmetic(step)

    def _while(self, i: int, run: bool) -> int:
        until, start = self.tokens[i].text == "until", i + 1
        end, _ = self._condition(start, "do", False)
        if run and any(token.text == "read" for token in self.tokens[start:end]):
            self._note(self.tokens[i].line, "a loop over lines that are read is not followed")

        def turns() -> Iterator[None]:
            while run:
                self.assumed = False
                if self._condition(start, "do", True)[1] is not (not until):
                    break
                waits, self.assumed, tested = self.assumed, False, {*self.tested}
                before = [self.arguments, *map(self.script.variables.get, tested)]
                yield
                same = before == [self.arguments, *map(self.script.variables.get, tested)]
                if waits or (same and self.assumed):  # commands do not succeed for ever
                    break

        return self._loop(end, turns())

    def _loop(self, start: int, turns: Iterator[object]) -> int:
        stops, tokens = frozenset({"done"}), self.tokens
        for _ in turns:
            self._count()
            self.loops += 1
            try:
                self._list(start, stops, True)
            except _Jump as jump:
                self.tokens = tokens
                if jump.kind == "return":
                    raise
                if jump.count > 1:
                    raise _Jump(jump.kind, jump.count - 1) from None
                if jump.kind == "break":
                    break
            finally:
                self.loops -= 1
        return self._expect(self._list(start, stops, False), "done")

    # -- simple commands

    def _simple(self, i: int, run: bool) -> tuple[int, bool | None]:
        raw, line = list[Token](), self.tokens[i].line
        start, target, source = i, "", None
        while i < len(self.tokens):
            token = self.tokens[i]
            if token.body is not None:
                source = token
            elif token.is_word:
                raw.append(token)
            elif token.text in _REDIRECTIONS:
                i += 1
                if token.text in (">", ">>") and i < len(self.tokens):
                    target = token.text + self.tokens[i].text
                elif token.text == "<<<" and i < len(self.tokens):
                    source = self.tokens[i]
            elif token.text in _ENDS:
                break
            else:
                self._unexpected(i)
            i += 1
        if i == start:
            self._unexpected(i)
        body = self._input(raw, source) if run and source else None
        name = next((token.text for token in raw if not ASSIGNMENT.match(token.text)), "")
        if body is not None and name == "cat" and target:
            path, files = self._text(target.lstrip(">")), self.script.files
            old = files.get(path, "") if target.startswith(">>") else ""
            files[path] = self._count(old + body)
        elif body is not None and name == "read":
            self._read(raw, body)
            return i, True
        return i, self._run(raw, body, line) if run else True

    def _input(self, raw: list[Token], source: Token) -> str | None:
        """Text of a here-document, or of a word behind `<<<`, for commands that are followed."""
        if not {token.text for token in raw} & {"cat", "read", *_STARTS}:
            return None
        if source.body is None:
            return self._text(source.text) + "\n"
        if source.plain:
            return source.body
        # Quotes have no meaning in it: a backslash before one stays.
        body = re.sub(r"\\(.)", lambda m: "\\" * (m[1] == '"') + m[0], source.body, flags=re.DOTALL)
        return self._text(body, quoted=True)

    def _read(self, raw: list[Token], text: str) -> None:
        """`read` of a text: the first line, or with `-d ''` all of it, split among variables."""
        separators, names, array, whole = " \t\n", list[str](), "", False
        words = iter(token.text for token in raw)
        for word in words:
            match = ASSIGNMENT.match(word)
            if match and match[1] == "IFS" and not names:
                separators = self._text(word[match.end() :])
            elif re.fullmatch("-[a-zA-Z]*a", word):
                array = next(words, "")
            elif re.fullmatch("-[a-zA-Z]*[dinNptu]", word):
                whole = self._text(next(words, "")) == "" and word[-1] == "d"
            elif _NAME.fullmatch(word) and word != "read":
                names.append(word)
        text = text if whole else text.partition("\n")[0]
        text = text if separators.strip() else text.strip()
        if not array and len(names) < 2:
            for name in names:
                self._assign(name, text)
            return
        if unknown_names(text):
            self._hide([*names, array])
            return
        split = f"[{re.escape(separators)}]" if separators.strip() else "[ \t\n]+"
        items = re.split(split, text, maxsplit=0 if array else len(names) - 1)
        items = items[:-1] if items[-1] == "" else items
        if array:
            self._assign(array, [*items])
        for name, item in zip(names, [*items, *[""] * len(names)], strict=False):
            self._assign(name, item)

    def _run(self, raw: list[Token], body: str | None, line: int) -> bool | None:
        assignments: list[tuple[re.Match[str], str]] = []
        while raw and (match := ASSIGNMENT.match(raw[0].text)):
            assignments.append((match, raw.pop(0).text))
        if not raw:
            for match, text in assignments:
                self._assign_raw(match, text)
            return True
        if raw[0].text in _DECLARATIONS:
            self._declare(raw)
            return True
        if raw[0].text in ("[", "test"):
            return self._test(raw[1 : -1 if raw[0].text == "[" else None])
        words = [word for token in raw for word in self._fields(token.text)]
        if not assignments:
            return self._start(words, body, line)
        # A=2 before a command holds for that command; its words have the old value.
        names = {match[1] for match, _ in assignments}
        old = {name: self.script.variables.get(name) for name in names}
        for match, text in assignments:
            self._assign_raw(match, text)
        try:
            return self._start(words, body, line)
        finally:
            for name, value in old.items():
                self._put_back(name, value)

    def _put_back(self, name: str, value: str | list[str] | None) -> None:
        if value is None:
            self.script.variables.pop(name, None)
        else:
            self.script.variables[name] = value

    def _declare(self, raw: list[Token]) -> None:
        """`declare`, `export`, `local` and `readonly`: scope, attributes and values."""
        letters = "".join(
            token.text[1:] for token in raw[1:] if re.fullmatch("-[a-zA-Z]+", token.text)
        )
        inside = raw[0].text in ("local", "declare", "typeset") and "g" not in letters
        for token in raw[1:]:
            match = ASSIGNMENT.match(token.text)
            name = match[1] if match else token.text
            if not _NAME.fullmatch(name):
                continue
            if inside and self.locals and name not in self.locals[-1]:
                self.locals[-1][name] = self.script.variables.get(name)
                if name not in self.given:
                    self.script.variables.pop(name, None)
                    self.attributes.pop(name, None)
            if "A" in letters:
                self.maps.add(name)
            if change := "".join(letter for letter in letters if letter in "iuln"):
                self.attributes[name] = change
            if match:
                self._assign_raw(match, token.text)
            elif inside and self.locals and name not in self.script.variables:
                self._assign(name, [] if {*letters} & {*"aA"} else "")

    def _hide(self, words: list[str]) -> None:
        """Variables get values that are not followed."""
        for name in words:
            if _NAME.fullmatch(name):
                self.computed.add(name)
                self._assign(name, unknown(name))

    def _start(self, words: list[str], body: str | None, line: int) -> bool | None:
        """Run a builtin or a function, or record a command."""
        if not words:
            return True
        name, *rest = words
        if name in self.functions:
            return self._call(name, rest)
        match name:
            case "source" | ".":
                self._source(rest[0] if rest else "", line)
            case "exit":
                raise _Exit(rest[0] if rest else "0", line)
            case "break" | "continue" if self.loops:
                count = int(rest[0]) if rest and re.fullmatch(r"\d{1,9}", rest[0]) else 1
                raise _Jump(name, min(count, self.loops))
            case "return" if self.locals or self.sourced:
                if rest:
                    self.status = None if unknown_names(rest[0]) else rest[0] == "0"
                raise _Jump(name)
            case "break" | "continue" | "return":
                pass
            case "shift":
                count = (self._number(rest[0]) if rest else 1) or 0
                self.arguments = self.arguments[count if count <= len(self.arguments) else 0 :]
            case "set" if "--" in rest:
                self.arguments = rest[rest.index("--") + 1 :]
            case "set" if rest and rest[0][:1] not in "-+":
                self.arguments = rest
            case "false":
                return False
            case "read":  # there is nothing to read
                if body is None:
                    self._hide(rest)
                return body is not None
            case "mapfile" | "readarray":
                self._hide(rest[-1:] or ["MAPFILE"])
            case "let":
                values = [self._truth(text) for text in rest]
                return values[-1] if values else False
            case "unset":
                self._unset(rest)
            case "eval":
                self.run_text(" ".join(rest), line)
                return self.status
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                text = _formatted(rest[2], rest[3:])
                self._assign(rest[1], unknown(rest[1]) if text is None else text)
            case _ if self.printed is not None:
                self._print(name, rest, body)
            case _:
                self._record(words, body, line)
        return True

    def _unset(self, names: list[str]) -> None:
        for name in names:
            match = re.fullmatch(r"([A-Za-z_]\w*)\[(.+)\]", name)
            if match is None:
                self.script.variables.pop(name, None)
                self.functions.pop(name, None) if names[0] == "-f" else None
                continue
            old = self.script.variables.get(match[1])
            if match[1] in self.maps and isinstance(old, list):
                key = f"[{match[2]}]="
                self._assign(match[1], [item for item in old if not item.startswith(key)])
            elif isinstance(old, list) and self._number(match[2]) == len(old) - 1:
                self._assign(match[1], old[:-1])
            else:
                self._hide([match[1]])

    def _record(self, words: list[str], body: str | None, line: int) -> None:
        """Note a command, or follow the commands that it is given as text."""
        shells = [
            i for i, word in enumerate(words) if word in ("bash", "sh", "/bin/bash", "/bin/sh")
        ]
        texts = [
            (i, words[j + 1])
            for i in shells
            for j in range(i + 1, len(words) - 1)
            if re.fullmatch(r"-\w*c", words[j])
        ]
        if words[0] in _QUIET:
            return
        self.assumed = True
        before, text = self.before, None
        if texts:
            self.before, text = (*before, *words[: texts[0][0]]), texts[0][1]
        elif body is not None and words[0] in _STARTS:
            self.before, text = (*before, *words), self._with_variables(body)
        if text is None:
            self.script.commands.append(ShellCommand((*before, *words), line))
            return
        try:
            self.run_text(text, line)
        finally:
            self.before = before

    def _with_variables(self, text: str) -> str:
        """A text in which values from outside are variables, to be read as commands."""

        def variable(mark: re.Match[str]) -> str:
            name = mark[1]
            if not _PARAMETER.fullmatch(name):
                name = f"_OUTPUT{len(self.script.variables)}"
                self._assign(name, mark[0])
            return f"${{{name}}}"

        return _MARK.sub(variable, text)

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        if self.depth > DEEPEST:
            raise UserError(f"{self.path}: {name} calls itself without end")
        outer, given = self.tokens, self.arguments
        (self.tokens, i), self.arguments = self.functions[name], arguments
        self.depth += 1
        loops, self.loops = self.loops, 0
        self.locals.append({})
        try:
            self.status = self._command(i, True)[1]
        except _Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.tokens, self.arguments, self.depth = outer, given, self.depth - 1
            self.loops = loops
            for variable, value in self.locals.pop().items():
                if variable not in self.given:
                    self._put_back(variable, value)
        return self.status

    def _source(self, name: str, line: int) -> None:
        """Follow a file beside the script; a path that is absolute or unknown is not opened."""
        if (path := beside(self.folder, name)) is None:
            self.script.missing.append(shown(name))
            return
        text = read_text(path, "a script that is sourced", MOST_BYTES)
        outer, self.path = self.path, name
        self.sourced += 1
        try:
            self.run_text(text)
        except _Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.path, self.sourced = outer, self.sourced - 1

    # -- variables

    def _assign_raw(self, match: re.Match[str], raw: str) -> None:
        name, index, adds, value = match[1], match[2], match[3], raw[match.end() :]
        if value.startswith("(") and value.endswith(")"):
            lexer = Lexer(value[1:-1], self.path)
            words = [token.text for token in lexer.tokens() if token.is_word]
            items = [item for word in words for item in self._fields(word)]
            if name not in self.maps and any(re.match(r"\[[^\]]*\]=", item) for item in items):
                self._hide([name])
                return
            old = self.script.variables.get(name, []) if adds else []
            self._assign(name, [*([old] if isinstance(old, str) else old), *items])
            return
        text = self._text(value)
        if index is not None:
            self._assign_item(name, index, bool(adds), text)
            return
        change = self.attributes.get(name, "")
        old = self.script.variables.get(name, "")
        if isinstance(old, list):  # its first item
            if change or name in self.maps:
                self._hide([name])
            else:
                self._assign(name, [("".join(old[:1]) if adds else "") + text, *old[1:]])
            return
        old = old if adds else ""
        if "i" in change:
            text = self._arithmetic(f"({old or 0}) + ({text or 0})" if adds else text)
            self._assign(name, text)
            return
        if "n" in change:
            self._hide([name])
            return
        if text.startswith("\0$(") and len(_MARK.sub("", text)) == 0:
            text = unknown(name)  # --set can give it
            self.computed.add(name)
        text = old + text
        text = text.upper() if "u" in change else text.lower() if "l" in change else text
        self._assign(name, text)

    def _assign_item(self, name: str, index: str, adds: bool, text: str) -> None:
        """`NAME[INDEX]=text`; an array with holes is not followed."""
        old = self.script.variables.get(name, [])
        items = [old] if isinstance(old, str) else [*old]
        if name in self.maps:
            key = f"[{self._text(index)}]="
            place = next((n for n, item in enumerate(items) if item.startswith(key)), len(items))
        else:
            key, number = "", self._number(index)
            place = -1 if number is None or number > len(items) else number
        if place < 0 or (any(map(unknown_names, items)) and isinstance(old, str)):
            self._hide([name])
            return
        before = items[place] if adds and place < len(items) else key
        items[place : place + 1] = [before + text]
        self._assign(name, items)

    def _assign(self, name: str, value: str | list[str]) -> None:
        if name in self.given:
            self.used.add(name)
            return
        self._count(value if isinstance(value, str) else " ".join(value))
        self.script.variables[name] = value

    def _value(self, name: str) -> str | list[str] | None:
        """Value of a variable or a parameter; None: it is not set."""
        self.used.add(name)
        if name in self.script.variables:
            return self.script.variables[name]
        match name:
            case "@" | "*":
                return self.arguments
            case "#":
                return str(len(self.arguments))
            case "0" | "BASH_SOURCE":
                return self.path
            case "PWD":
                return "."
            case "IFS":
                return " \t\n"
            case "?" | "$" | "!" | "RANDOM" | "SECONDS" | "HOSTNAME":
                return unknown(f"$({name})")
            case "-":
                return ""
            case _:
                index = int(name) if name.isdigit() and len(name) < 4 else 0
                return self.arguments[index - 1] if 0 < index <= len(self.arguments) else None

    def _outside(self, text: str) -> bool:
        """True for text that holds something from outside; such a test is a guard of the script."""
        self.read_outside = self.read_outside or bool(unknown_names(text))
        return self.read_outside

    # -- expansion

    def _separators(self) -> str:
        """Characters of IFS, at which words are split."""
        value = self.script.variables.get("IFS")
        return value if isinstance(value, str) and not unknown_names(value) else " \t\n"

    def _text(self, raw: str, quoted: bool = False) -> str:
        """A word as one text."""
        return self._count("".join(
            " ".join(piece) if isinstance(piece, list) else piece
            for _, piece in self._pieces(raw, quoted)
        ))  # fmt: skip

    def _fields(self, raw: str) -> list[str]:
        """A word as the words that it expands to."""
        if (words := braces(raw, self.path)) != [raw]:
            return [field for word in words for field in self._fields(word)]
        if raw.startswith(("<(", ">(")):
            return [raw]
        fields: list[str | None] = [None]
        separators = self._separators()
        for splits, piece in self._pieces(raw):
            parts: list[str | None] = [*piece] if isinstance(piece, list) else [piece]
            if splits and {*separators} != {*" \t\n"}:
                text = piece if isinstance(piece, str) else " ".join(piece)
                pattern = f"[{re.escape(separators)}]" + "+" * (not separators.strip())
                parts = [*re.split(pattern, text)] if separators else [text]
                parts[-1] = parts[-1] or None
            elif splits and isinstance(piece, str):  # white space at an end begins a word
                before, after = ([None] * end.isspace() for end in (piece[:1], piece[-1:]))
                parts = [*before, *piece.split(), *after]
            for number, part in enumerate(parts):
                fields += [None] * (number > 0)
                fields[-1] = fields[-1] if part is None else (fields[-1] or "") + part
        words = [field for field in fields if field is not None]
        self._count(" ".join(words))
        return words

    def _pieces(self, raw: str, quoted: bool = False) -> Iterator[tuple[bool, str | list[str]]]:
        """Parts of a word, and if white space splits them; a list has a word for each item."""
        lexer, i = Lexer(raw, self.path), 0
        while i < len(raw):
            self._count()
            c = raw[i]
            ansi = raw.startswith("$'", i)
            end = i + 1 if quoted and (c in "'\"" or ansi) else lexer.unit_end(i, 0)
            unit = raw[i:end]
            if c == "\\":
                plain = unit[1:] if not quoted or unit[1:] in '$`"\\\n' else unit
                yield False, "" if unit == "\\\n" else plain
            elif c == "'" and not quoted:
                yield False, unit[1:-1]
            elif c == '"' and not quoted:
                pieces = [piece for _, piece in self._pieces(unit[1:-1], True)]
                if not pieces or any(piece != [] for piece in pieces):  # "$@" may be no word
                    yield False, ""
                yield from ((False, piece) for piece in pieces)
            elif c in "'\"":
                yield False, c
            elif c == "`":
                yield not quoted, self._output(re.sub(r"\\([`\\$])", r"\1", unit[1:-1]))
            elif unit.startswith("$(("):
                yield not quoted, self._arithmetic(unit[3:-2])
            elif unit.startswith("$("):
                yield not quoted, self._output(unit[2:-1])
            elif unit.startswith("${"):
                yield from self._parameter(unit[2:-1], quoted)
            elif c == "$" and (name := _PARAMETER.match(raw, i + 1)):
                end = name.end()
                yield from self._parameter(name[0], quoted)
            elif ansi and not quoted:
                text = re.sub(_ESCAPE, _unescaped, raw[i + 2 : end - 1])
                yield False, re.sub("[\0-\x08\x0e-\x1f]", "", text)
            else:
                while end < len(raw) and raw[end] not in "\\'\"`$":
                    end += 1
                yield False, raw[i:end]
            i = end

    def _parameter(self, text: str, quoted: bool) -> Iterator[tuple[bool, str | list[str]]]:
        """`NAME`, `NAME[@]`, `NAME:-word`, `#NAME` and others, without the braces."""
        match = re.match(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]{0,200})\])?", text)
        if not match:
            yield not quoted, unknown("${" + text[:40] + "}")
            return
        length, name, index = match.groups()
        rest, value = text[match.end() :], self._value(name)
        if index not in (None, "@", "*") and isinstance(value, list):
            if name in self.maps:
                key = f"[{self._text(index)}]="
                values = (item.removeprefix(key) for item in value if item.startswith(key))
                value = next(values, None)
            else:
                place = self._number(index)
                inside = place is not None and -len(value) <= place < len(value)
                value = value[place] if place is not None and inside else None
        elif name in self.maps and isinstance(value, list):
            value = [item.partition("]=")[2] for item in value]
        everything, joins = {index, name} & {"@", "*"}, "*" in (index, name)
        if isinstance(value, list) and not everything:
            value = value[0] if value else None if rest else ""
        if length and not rest:
            names = unknown_names(value) if isinstance(value, str) else []
            yield False, unknown(names[0]) if names else str(len(value or ""))
            return
        if rest:
            value = self._changed(name, value, rest)
        if everything and quoted and not joins and not isinstance(value, str):
            yield False, value or []
            return
        if isinstance(value, list):
            separator = self._separators()[:1]
            value = (separator if quoted else separator or " ").join(value)
        elif value is None:
            value = "" if everything else unknown(name)
        yield not quoted, value

    def _changed(
        self, name: str, value: str | list[str] | None, rest: str
    ) -> str | list[str] | None:
        """A value behind an operator: defaults, removed ends, replaced parts, letters."""
        match = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
        if match is None:
            return unknown("${" + name + rest[:40] + "}")
        sign, word = match[0], rest[match.end() :]
        plain = _MARK.sub("", " ".join(value) if isinstance(value, list) else value or "")
        absent = value is None or (sign[0] == ":" and not plain and value != unknown(name))
        if sign in (":-", "-", ":=", "=", ":?", "?"):
            if absent and sign[-1] != "?" and (word or value is not None):
                value = self._text(word)
                if sign[-1] == "=":
                    self._assign(name, value)
            return value
        if sign in (":+", "+"):
            if value is not None and not plain and value and not isinstance(value, list):
                return value  # set by what is not followed
            return "" if value is None or (sign == ":+" and not plain) else self._text(word)
        if value is None:
            return None
        if isinstance(value, str) and (unknown_names(value) or len(value) > 4000):
            return unknown(name)
        if sign == ":":
            first, _, count = word.partition(":")
            begin = self._number(first)
            length = self._number(count) if count else len(value)
            if begin is None or length is None:
                return unknown(name)
            if isinstance(value, str):
                return value[begin:][:length] if -begin <= len(value) else ""
            from_one = name in "@*"
            if min(begin, length) < from_one:
                return unknown(name)
            return value[begin - from_one :][:length]
        if isinstance(value, list):
            changed = [self._changed(name, item, rest) for item in value]
            texts = [item for item in changed if isinstance(item, str)]
            return texts if len(texts) == len(value) else unknown(name)
        if sign in ("^", "^^", ",", ",,"):
            if word:
                return unknown(name)
            change: Callable[[str], str] = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) > 1 else change(value[:1]) + value[1:]
        if sign in ("/", "//"):
            changed = self._replaced(value, word, sign == "//")
            return unknown(name) if changed is None else changed
        pattern = self._pattern(word)[:200]
        cuts = range(len(value) + 1)
        if sign[0] == "#":
            ends = [n for n in cuts if fnmatchcase(value[:n], pattern)]
            return value[(ends[-1] if sign == "##" else ends[0]) :] if ends else value
        ends = [n for n in cuts if fnmatchcase(value[n:], pattern)]
        return value[: (ends[0] if sign == "%%" else ends[-1])] if ends else value

    def _replaced(self, value: str, word: str, every: bool) -> str | None:
        """`${NAME/pattern/text}`; None: a pattern that is not followed."""
        lexer, end = Lexer(word, self.path), 0
        while end < len(word) and word[end] != "/":
            end = lexer.unit_end(end, 0)
        old, new = word[:end], self._text(word[end + 1 :])
        anchor = old[:1] if old[:1] in ("#", "%") and not every else ""
        pattern = self._pattern(old[len(anchor) :])[:200]
        if not pattern and not anchor:
            return value
        if "*" in re.sub(r"\[\*\]", "", pattern) or "&" in new:
            return None  # the longest match; & is a setting of the shell
        source = re.sub(r"\\[zZ]$", "", translate(pattern))
        source = {"#": "^(?:%s)", "%": "(?:%s)$"}.get(anchor, "(?:%s)") % source
        return re.sub(source, lambda _: new, value, count=0 if every else 1)

    def _pattern(self, raw: str) -> str:
        """A word as a pattern of `fnmatch`; what is quoted stands for itself."""
        lexer, i, plain, parts = Lexer(raw, self.path), 0, 0, list[str]()
        while i <= len(raw):
            if i < len(raw) and raw[i] not in "\\'\"":
                i = lexer.unit_end(i, 0)
                continue
            text = self._text(raw[plain:i])
            for sign, ours in _CLASSES.items():
                text = text.replace(sign, ours)
            parts.append(text.replace("[^", "[!"))
            if i == len(raw):
                break
            plain = lexer.unit_end(i, 0)
            parts.append(re.sub(r"[*?\[]", r"[\g<0>]", self._text(raw[i:plain])))
            i = plain
        return "".join(parts)

    def _output(self, text: str) -> str:
        """Output of commands that only shape text, as `_print` follows them; otherwise unknown."""
        if self.depth > DEEPEST:
            raise UserError(f"{self.path}: nested too deep for a launch script")
        state = self.printed, self.place, self.read_outside, self.tested, self.assumed, self.status
        before, self.printed = self._snapshot(), list[str]()
        try:
            self.run_text(text)
            return "".join(self.printed).rstrip("\n")
        except _Exit:
            return "".join(self.printed).rstrip("\n")
        except (_Unfollowed, _Jump, UserError):  # limits raise again with the next command
            return unknown(f"$({' '.join(text.split())[:60]})")
        finally:
            (self.printed, self.place, self.read_outside, self.tested, self.assumed,
             self.status) = state  # fmt: skip
            self._restore(before)

    def _print(self, name: str, words: list[str], body: str | None) -> None:
        """Add what a command prints to the output that is read; raises _Unfollowed for others."""
        assert self.printed is not None
        options = [word for word in words if re.fullmatch("-[a-zA-Z]+", word)]
        plain = [word for word in words if word != "--" and word not in options]
        first, text = plain[0] if plain else "", None
        match name:
            case "cd":
                self.place = os.path.normpath(os.path.join(self.place, first)) if first else "."
                return
            case "echo":
                begin = next((n for n, word in enumerate(words) if word not in ("-n", "-E")), 0)
                text = " ".join(words[begin:])
            case "printf" if words:
                text = _formatted(words[0].removesuffix("\\n"), words[1:])
            case "cat" if body is not None and not words:
                text = body.removesuffix("\n")
            case "pwd":
                text = self.place
            case "dirname" if plain:
                text = os.path.dirname(first) or "."
            case "basename" if plain:
                text = os.path.basename(first).removesuffix(plain[1] if plain[1:] else "")
            case "readlink" | "realpath" if plain:
                text = first
            case _ if name in _QUIET - {"echo", "printf", "cat"}:
                return
            case _:
                pass
        if text is None:
            raise _Unfollowed
        ends = name == "printf" or (name == "echo" and "-n" in words[:1])
        self.printed.append(self._count(text if ends else text + "\n"))

    # -- numbers and tests

    def _number(self, text: str) -> int | None:
        result = self._arithmetic(text)
        return int(result) if re.fullmatch(r"-?\d{1,18}", result) else None

    def _truth(self, text: str) -> bool | None:
        number = self._number(text)
        return None if number is None else number != 0

    def _arithmetic(self, text: str) -> str:
        """Value of whole-number arithmetic; unknown if a variable is, or if it is not followed."""
        source = self._text(text.strip(), quoted=True)
        if names := unknown_names(source):
            return unknown(names[0])
        changed: set[str] = set()

        def assign(name: str, value: int) -> None:
            changed.add(name)
            if match := ASSIGNMENT.match(f"{name}="):
                self._assign_raw(match, f"{name}={value}")

        try:
            return str(evaluate(source, self._operand, assign))
        except Undecided as problem:
            targets = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^<>]*=(?!=))", source)
            self._hide([*targets, *re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", source)])
            return unknown(str(problem) or f"$(({source[:40]}))")

    def _operand(self, name: str, depth: int = 0) -> int:
        """Value of a variable in arithmetic, which may be an expression itself."""
        _, piece = next(self._parameter(name, True))
        text = piece if isinstance(piece, str) else " ".join(piece)
        if (names := unknown_names(text)) or depth > 8:
            raise Undecided((names or [name])[0])

        def refuse(*_: object) -> NoReturn:
            raise Undecided(name)

        return evaluate(text, lambda other: self._operand(other, depth + 1), refuse)

    def _test(self, tokens: list[Token], double: bool = False) -> bool | None:
        """Truth of a test; None: it depends on the output of a command."""
        words: list[str] = []
        i = 0
        while i < len(tokens):
            sign = words[-1] if double and words else ""
            end = i + 1
            if sign == "=~":
                while end < len(tokens) and tokens[end].text not in ("&&", "||"):
                    end += 1
                words.append("".join(token.text for token in tokens[i:end]))
            elif sign in ("==", "=", "!=") and tokens[i].is_word:
                words.append(self._pattern(tokens[i].text))
            elif double or not tokens[i].is_word:
                words.append(self._text(tokens[i].text) if tokens[i].is_word else tokens[i].text)
            else:
                words += self._fields(tokens[i].text)
            i = end
        return self._any(words, double)

    def _any(self, words: list[str], double: bool) -> bool | None:
        for sign, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            level, place = 0, -1
            for number, word in enumerate(words):
                level += (word == "(") - (word == ")")
                if word == sign and level == 0:
                    place = number
                    break
            if place > 0:
                left = self._any(words[:place], double)
                if left is decides:
                    return decides
                right = self._any(words[place + 1 :], double)
                if right is decides:
                    return decides
                return None if None in (left, right) else not decides
        if words[:1] == ["!"] and len(words) > 1:
            ok = self._any(words[1:], double)
            return None if ok is None else not ok
        if words[:1] == ["("] and words[-1:] == [")"]:
            return self._any(words[1:-1], double)
        return self._one(words, double)

    def _one(self, words: list[str], double: bool) -> bool | None:
        names = {name for word in words for name in unknown_names(word)}
        self.read_outside = self.read_outside or bool(names)
        if any(name.startswith("$") or name in self.computed for name in names):
            return None
        words = [_MARK.sub("", word) for word in words]
        match words:
            case []:
                return False
            case [word]:
                return word != ""
            case ["-z", word]:
                return word == ""
            case ["-n", word]:
                return word != ""
            case ["-v", word]:
                return self._value(word) is not None
            case ["-z" | "-n" as sign]:  # [ -z $UNSET ]
                return sign == "-z"
            case ["-f" | "-d" | "-e" | "-s" | "-r" | "-w" | "-x" | "-L", _]:
                return True  # a script is started where its files are
            case [left, "==" | "=" | "!=" as sign, right]:
                same = fnmatchcase(left[:2000], right[:200]) if double else left == right
                return same if sign != "!=" else not same
            case [left, "<" | ">" as sign, right]:
                return left < right if sign == "<" else left > right
            case [left, "=~", right]:
                return _finds(left, right)
            case [left, sign, right] if sign in _NUMERIC:
                if double:
                    a, b = self._number(left or "0"), self._number(right or "0")
                else:  # 010 is ten
                    a, b = (int(x) if re.fullmatch(r"[-+]?\d{1,18}", x) else None
                            for x in (left.strip() or "0", right.strip() or "0"))  # fmt: skip
                return None if a is None or b is None else _NUMERIC[sign](a, b)
            case _:
                return None


_NUMERIC: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def _finds(text: str, pattern: str) -> bool | None:
    """`text =~ pattern`; None: an expression that is not followed, or that could take long."""
    plain = re.sub(r"\[\^?\]?[^\]\[]*\]", "x", pattern)
    if re.search(r"""[\0{\\'"$][^)]|\)[*+?]""", plain) or len(re.findall("[*+?]", plain)) > 3:
        return None
    try:
        return re.search(pattern, text[:200]) is not None
    except (re.error, RecursionError):
        return None


def _unescaped(match: re.Match[str]) -> str:
    """A character of `$'...'` by its escape."""
    hexadecimal, octal, letter = match.groups()
    if letter is None:
        return chr(int(hexadecimal, 16) if hexadecimal else int(octal, 8) & 255)
    return {"n": "\n", "t": "\t", "r": "\r"}.get(letter, letter)


def _formatted(pattern: str, values: list[str]) -> str | None:
    """`printf` of texts and numbers; None: a format that is not followed."""
    if pattern.count("%") != len(values) or re.search(r"%[^sd]|%$|\\", pattern):
        return None
    rest = iter(values)
    return re.sub(r"%[sd]", lambda _: next(rest), pattern)
