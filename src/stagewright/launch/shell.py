"""Shell scripts read, never run: which commands they would start, with which words.

Variables, arrays, defaults, whole-number arithmetic, `if`, `case`, `for`, functions, sourced files
beside the script, `bash -c` and the here-documents of `sbatch` are followed. Other commands are
recorded and count as successful. The environment is empty: a variable from outside, an argument of
the script and the output of a command stand in words as `unknown`; tests take them for empty text.

>>> script = read("TP=8\\nA=(--tp $TP)\\ntorchrun train.py ${A[@]} --lr ${LR:-1e-4} --pp $PP")
>>> [shown(word) for word in script.commands[0].words[2:]]
['--tp', '8', '--lr', '1e-4', '--pp', '$PP']
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, NoReturn

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.launch.lexer import ASSIGNMENT, DEEPEST, Lexer, Token

MOST_BYTES = 1 << 19
"""Size limit of a script, and of each file that it sources."""
_MOST_STEPS = 40_000
"""Commands, words and turns of loops that are followed."""
_MOST_TEXT = 1 << 22
"""Characters that expansions may make together."""

_MARK = re.compile("\0([^\0]*)\0")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARITHMETIC = re.compile(r"[\w\s+*/%()<>=!-]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_CHOICE = re.compile(r"\s*\[\[?\s(.+)\s\]\]?\s*&&\s*echo (\S+)\s*\|\|\s*echo (\S+)\s*")
"""A test that chooses between two words: `[ $A = 1 ] && echo x || echo y`."""
_REDIRECTIONS = frozenset({"&>>", "&>", ">>", ">&", "<<<", "<&", "<>", ">|", "<", ">"})
_ENDS = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", ")", ";;", ";&", ";;&"})
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_QUIET = frozenset(
    {"echo", "printf", "cat", "mkdir", "cd", "set", "shift", "trap", "sleep", "pkill"}
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


class _Exit(Exception):
    """`exit` in a script."""

    def __init__(self, code: str, line: int) -> None:
        self.code, self.line = code, line


# ---- commands ------------------------------------------------------------------------------------


class _Reader:
    """Follows a script; commands that are skipped are parsed with `run` False."""

    def __init__(self, path: str, given: Mapping[str, str]) -> None:
        self.path, self.folder = os.path.basename(path), os.path.dirname(path)
        self.script = Script(variables={**given})
        self.given, self.used = given, set[str]()
        self.computed: set[str] = set()
        """Variables that hold the output of commands."""
        self.read_outside = False
        """A test has read a variable from outside."""
        self.tested: set[str] = set()
        """Variables that the last test has read."""
        self.functions: dict[str, tuple[list[Token], int]] = {}
        self.arguments: list[str] = []
        self.before: tuple[str, ...] = ()
        """Words of the launcher whose `-c` is being read."""
        self.depth = self.steps = self.made = 0
        self.status: bool | None = True
        self.assumed = False
        """A command counts as successful since a loop began."""
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
            i += 1
            while self._is(i, "\n"):
                i += 1
            i, status = self._pipeline(i, takes)
            ok = status if takes else ok
        self.status = ok
        return i

    def _pipeline(self, i: int, run: bool) -> tuple[int, bool | None]:
        negated = self._is(i, "!")
        i, ok = self._command(i + negated, run)
        while self._is(i, "|", "|&"):
            i += 1
            while self._is(i, "\n"):
                i += 1
            i, ok = self._command(i, run)
        return i, (not ok if negated and ok is not None else ok)

    def _command(self, i: int, run: bool) -> tuple[int, bool | None]:
        self._count()
        if i >= len(self.tokens):
            self._unexpected(i)
        token, ok = self.tokens[i], True
        if not token.is_word and token.text != "(":
            return self._simple(i, run)
        match token.text:
            case "if":
                return self._if(i + 1, run), True
            case "case":
                return self._redirected(self._case(i + 1, run)), True
            case "for" | "select":
                return self._redirected(self._for(i + 1, run)), True
            case "while" | "until":
                return self._redirected(self._while(i, run)), True
            case "{":
                i = self._list(i + 1, frozenset({"}"}), run)
                return self._redirected(self._expect(i, "}")), ok
            case "(":
                i = self._list(i + 1, frozenset(), run)
                return self._redirected(self._expect(i, ")")), ok
            case "[[":
                end = i
                while not self._is(end, "]]"):
                    if end >= len(self.tokens):
                        self._unexpected(end)
                    end += 1
                words = [*self.tokens[i + 1 : end]]
                return self._redirected(end + 1), self._test(words) if run else None
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
        start, i = i, self._list(i, frozenset({stop}), run)
        if run:
            self.tested = {name for name in self.used if _NAME.fullmatch(name)}
        self.used |= used
        decided = self.status
        if run and decided is None:
            words = " ".join(token.text for token in self.tokens[start:i]).strip("\n ;")
            test = words if len(words) <= 60 else f"{words[:57]}..."
            self.script.notes.append(f"line {line}: {test!r} is not decided and counts as false")
        return self._expect(i, stop), decided

    def _if(self, i: int, run: bool) -> int:
        done = False
        while True:
            i, ok = self._condition(i, "then", run and not done)
            takes = run and not done and bool(ok)
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
        i, done = self._expect(i, "in"), False
        while True:
            while self._is(i, "\n"):
                i += 1
            if self._is(i, "esac"):
                return i + 1
            i += self._is(i, "(")
            matches = False
            while not self._is(i, ")"):
                if i >= len(self.tokens):
                    self._unexpected(i)
                token = self.tokens[i]
                if token.is_word and run and not done:
                    pattern = self._text(token.text)[:500]
                    matches = matches or fnmatchcase(_MARK.sub("", subject)[:2000], pattern)
                i += 1
            takes = run and not done and matches
            i = self._block(i + 1, {"esac"}, takes, outside)
            done = done or takes
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

        def turns() -> Iterator[None]:
            self.assumed = False
            while run and self._condition(start, "do", True)[1] is (not until):
                yield
                if self.assumed:  # that a command succeeds, which it does not for ever
                    break

        return self._loop(end, turns())

    def _loop(self, start: int, turns: Iterator[object]) -> int:
        stops = frozenset({"done"})
        for _ in turns:
            self._count()
            self._list(start, stops, True)
        return self._expect(self._list(start, stops, False), "done")

    # -- simple commands

    def _simple(self, i: int, run: bool) -> tuple[int, bool | None]:
        raw, body, line = list[Token](), None, self.tokens[i].line
        start, target = i, ""
        while i < len(self.tokens):
            token = self.tokens[i]
            if token.body is not None:
                body = token.body
            elif token.is_word:
                raw.append(token)
            elif token.text in _REDIRECTIONS:
                i += 1
                if token.text in (">", ">>") and i < len(self.tokens):
                    target = token.text + self.tokens[i].text
            elif token.text in _ENDS:
                break
            else:
                self._unexpected(i)
            i += 1
        if i == start:
            self._unexpected(i)
        if run and body is not None and len(raw) > 0:
            self._keep(raw, body, target)
        return i, self._run(raw, body, line) if run else True

    def _keep(self, raw: list[Token], body: str, target: str) -> None:
        """Keep a here-document that `cat` writes into a file, or `read` into a variable."""
        pieces = (piece for _, piece in self._pieces(body, True))
        if raw[0].text == "cat" and target:
            name, files = self._text(target.lstrip(">")), self.script.files
            old = files.get(name, "") if target.startswith(">>") else ""
            text = "".join(p if isinstance(p, str) else " ".join(p) for p in pieces)
            files[name] = self._count(old + text)
        elif raw[0].text == "read" and len(raw) > 1:
            text = "".join(p if isinstance(p, str) else " ".join(p) for p in pieces)
            self._assign(raw[-1].text, text)

    def _run(self, raw: list[Token], body: str | None, line: int) -> bool | None:
        while raw and (match := ASSIGNMENT.match(raw[0].text)):
            self._assign_raw(match, raw.pop(0).text)
        if not raw:
            return True
        if raw[0].text in _DECLARATIONS:
            for token in raw[1:]:
                if match := ASSIGNMENT.match(token.text):
                    self._assign_raw(match, token.text)
            return True
        if raw[0].text in ("[", "test"):
            return self._test(raw[1 : -1 if raw[0].text == "[" else None])
        words = [word for token in raw for word in self._fields(token.text)]
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
            case "false" | "read":  # there is nothing to read
                return False
            case "unset":
                for variable in rest:
                    self.script.variables.pop(variable, None)
            case "eval":
                self.run_text(" ".join(rest), line)
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                self._assign(rest[1], _formatted(rest[2], rest[3:]))
            case _:
                self._record(words, body, line)
        return True

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
        elif body is not None and words[0] in ("sbatch", "srun", "bash", "sh"):
            self.before, text = (*before, *words), body
        if text is None:
            self.script.commands.append(ShellCommand((*before, *words), line))
            return
        try:
            self.run_text(text, line)
        finally:
            self.before = before

    def _call(self, name: str, arguments: list[str]) -> bool:
        if self.depth > DEEPEST:
            raise UserError(f"{self.path}: {name} calls itself without end")
        outer, given = self.tokens, self.arguments
        (self.tokens, i), self.arguments = self.functions[name], arguments
        self.depth += 1
        try:
            self._command(i, True)
        finally:
            self.tokens, self.arguments, self.depth = outer, given, self.depth - 1
        return True

    def _source(self, name: str, line: int) -> None:
        """Follow a file beside the script; a path that is absolute or unknown is not opened."""
        path = Path(self.folder, name)
        if unknown_names(name) or not name or os.path.isabs(name) or not path.is_file():
            self.script.missing.append(shown(name))
            return
        text = read_text(path, "a script that is sourced", MOST_BYTES)
        outer, self.path = self.path, name
        try:
            self.run_text(text)
        finally:
            self.path = outer

    # -- variables

    def _assign_raw(self, match: re.Match[str], raw: str) -> None:
        name, value = match[1], raw[match.end() :]
        if value.startswith("(") and value.endswith(")"):
            lexer = Lexer(value[1:-1], self.path)
            words = [token.text for token in lexer.tokens() if token.is_word]
            items = [item for word in words for item in self._fields(word)]
            old = self.script.variables.get(name, []) if match[2] else []
            self._assign(name, [*([old] if isinstance(old, str) else old), *items])
            return
        text = self._text(value)
        old = self.script.variables.get(name, "") if match[2] else ""
        if isinstance(old, list):
            self._assign(name, [*old, text])
            return
        if text.startswith("\0$(") and len(_MARK.sub("", text)) == 0:
            text = unknown(name)  # --set can give it
            self.computed.add(name)
        self._assign(name, old + text)

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

    def _text(self, raw: str) -> str:
        """A word as one text."""
        return self._count("".join(
            " ".join(piece) if isinstance(piece, list) else piece
            for _, piece in self._pieces(raw)
        ))  # fmt: skip

    def _fields(self, raw: str) -> list[str]:
        """A word as the words that it expands to."""
        fields: list[str] = []
        open_: str | None = None
        for splits, piece in self._pieces(raw):
            if isinstance(piece, list):
                for number, item in enumerate(piece):
                    if number:
                        fields += [] if open_ is None else [open_]
                        open_ = None
                    open_ = (open_ or "") + item
            elif not splits:
                open_ = (open_ or "") + piece
            else:
                parts = piece.split()
                if open_ is not None and piece[:1].isspace():
                    fields.append(open_)
                    open_ = None
                for number, part in enumerate(parts):
                    if number:
                        fields += [] if open_ is None else [open_]
                        open_ = None
                    open_ = (open_ or "") + part
                if open_ is not None and parts and piece[-1:].isspace():
                    fields.append(open_)
                    open_ = None
        fields += [] if open_ is None else [open_]
        self._count(" ".join(fields))
        return fields

    def _pieces(self, raw: str, quoted: bool = False) -> Iterator[tuple[bool, str | list[str]]]:
        """Parts of a word, and if white space splits them; a list has a word for each item."""
        lexer, i = Lexer(raw, self.path), 0
        while i < len(raw):
            self._count()
            c = raw[i]
            end = i + 1 if quoted and c in "'\"" else lexer.unit_end(i, 0)
            unit = raw[i:end]
            if c == "\\":
                plain = unit[1:] if not quoted or unit[1:] in '$`"\\\n' else unit
                yield False, "" if unit == "\\\n" else plain
            elif c == "'" and not quoted:
                yield False, unit[1:-1]
            elif c == '"' and not quoted:
                yield False, ""
                yield from ((False, piece) for _, piece in self._pieces(unit[1:-1], True))
            elif c in "'\"":
                yield False, c
            elif c == "`":
                yield not quoted, self._output(unit[1:-1])
            elif unit.startswith("$(("):
                yield not quoted, self._arithmetic(unit[3:-2])
            elif unit.startswith("$("):
                yield not quoted, self._output(unit[2:-1])
            elif unit.startswith("${"):
                yield from self._parameter(unit[2:-1], quoted)
            elif c == "$" and (name := _PARAMETER.match(raw, i + 1)):
                end = name.end()
                yield from self._parameter(name[0], quoted)
            elif c == "$" and raw.startswith("$'", i):
                end = lexer.unit_end(i + 1, 0)
                yield False, raw[i + 2 : end - 1]
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
            key = f"[{self._text(index)}]="
            if named := [item for item in value if item.startswith("[")]:  # declare -A
                found = (item.removeprefix(key) for item in named if item.startswith(key))
                value, place = next(found, None), None
            else:
                place = self._number(index)
                value = value[place] if place is not None and place < len(value) else None
        if length and not rest:
            yield False, str(len(value or ""))
            return
        if rest:
            value = self._changed(name, value, rest)
        everything = index in ("@", "*") or name in ("@", "*")
        if isinstance(value, list):
            if not everything and name not in ("@", "*"):
                value = value[0] if value else ""
            elif "*" in (index, name) and quoted:
                separator = self._value("IFS")
                value = (separator[:1] if isinstance(separator, str) else " ").join(value)
            elif quoted:
                yield False, value
                return
            else:
                value = " ".join(value)
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
                value = "".join(
                    " ".join(p) if isinstance(p, list) else p for _, p in self._pieces(word)
                )
                if sign[-1] == "=":
                    self._assign(name, value)
            return value
        if sign in (":+", "+"):
            return "" if absent or not plain else self._text(word)
        if not isinstance(value, str) or unknown_names(value) or len(value) > 4000:
            return value if value is None else unknown(name)
        if sign in ("^", "^^", ",", ",,"):
            change: Callable[[str], str] = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) > 1 else change(value[:1]) + value[1:]
        if sign in ("/", "//"):
            old, _, new = word.partition("/")
            old, new = self._text(old), self._text(new)
            return value.replace(old, new, -1 if sign == "//" else 1) if old else value
        if sign == ":":
            first, _, count = word.partition(":")
            begin = self._number(first) or 0
            wanted = self._number(count) if count else None
            return value[begin:][:wanted]
        pattern = self._text(word)[:200]
        cuts = range(len(value) + 1)
        if sign[0] == "#":
            ends = [n for n in cuts if fnmatchcase(value[:n], pattern)]
            return value[(ends[-1] if sign == "##" else ends[0]) :] if ends else value
        ends = [n for n in cuts if fnmatchcase(value[n:], pattern)]
        return value[: (ends[0] if sign == "%%" else ends[-1])] if ends else value

    def _output(self, text: str) -> str:
        """Output of a command that only shapes text: echo, dirname, basename, pwd, seq."""
        if self.depth > DEEPEST:
            raise UserError(f"{self.path}: nested too deep for a launch script")
        result = unknown(f"$({' '.join(text.split())[:60]})")
        if match := _CHOICE.fullmatch(text):
            tokens = Lexer(match[1], self.path).tokens()
            which = self._test(tokens)
            return result if which is None else self._text(match[2 if which else 3])
        try:
            tokens = Lexer(text, self.path).tokens()
        except UserError:
            return result
        self.depth += 1
        try:
            return self._shaped(tokens, result)
        finally:
            self.depth -= 1

    def _shaped(self, tokens: list[Token], result: str) -> str:
        commands: list[list[str]] = [[]]
        skips = False
        for token in tokens:
            if skips:
                skips = False
            elif token.is_word:
                if match := ASSIGNMENT.match(token.text):
                    self._assign_raw(match, token.text)
                else:
                    commands[-1] += self._fields(token.text)
            elif token.text in _REDIRECTIONS:
                skips = True
            elif token.text in ("&&", ";", "\n"):
                commands.append([])
            else:
                return result
        self.script.variables.pop("IFS", None)
        place = "."
        for name, *rest in filter(None, commands):
            words = [word for word in rest if word != "--" and not re.fullmatch("-[a-zA-Z]+", word)]
            first = words[0] if words else ""
            match name:
                case "cd":
                    place = os.path.normpath(os.path.join(place, first)) if first else place
                case "pwd":
                    return place
                case "echo":
                    return " ".join(words)
                case "dirname" if words:
                    return os.path.dirname(first) or "."
                case "basename" if words:
                    return os.path.basename(first).removesuffix(words[1] if words[1:] else "")
                case "readlink" | "realpath" if words:
                    return first
                case _:
                    return result
        return result

    # -- numbers and tests

    def _number(self, text: str) -> int | None:
        result = self._arithmetic(text)
        return int(result) if re.fullmatch(r"-?\d{1,18}", result) else None

    def _truth(self, text: str) -> bool | None:
        number = self._number(text)
        return None if number is None else number != 0

    def _arithmetic(self, text: str) -> str:
        """Value of whole-number arithmetic; unknown if a variable is."""
        self._count(text)
        source = "".join(
            " ".join(p) if isinstance(p, list) else p for _, p in self._pieces(text.strip(), True)
        )
        if names := unknown_names(source):
            return unknown(names[0])
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/%]?=(?!=))(.*)", source, re.DOTALL)
        if match:
            name, sign, right = match.groups()
            right = "1" if sign in ("++", "--") else right
            text = right if sign == "=" else f"{name} {sign[0]} ({right})"
            result = self._arithmetic(text)
            self._assign(name, result)
            return result
        if choice := re.fullmatch(r"([^?:]*)\?([^?:]*):([^?:]*)", source):
            which = self._arithmetic(choice[1])
            return which if unknown_names(which) else self._arithmetic(choice[2 + (which == "0")])
        source = re.sub(r"&&", " and ", re.sub(r"\|\|", " or ", source))
        source = re.sub(r"!(?!=)", " not ", source).strip()
        if not source:
            return "0"
        if not _ARITHMETIC.fullmatch(source) or re.search(r"\b\d+[A-Za-z_]", source):
            return unknown(f"$(({source[:40]}))")
        try:
            tree = ast.parse(source, mode="eval") if len(source) <= 400 else None
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            tree = None
        if tree is None:
            return unknown(f"$(({source[:40]}))")
        value = self._evaluated(tree.body)
        return value if isinstance(value, str) else str(value)

    def _evaluated(self, node: ast.AST) -> int | str:
        """A number, or unknown text."""
        match node:
            case ast.Constant(value=int() as value):
                return int(value)
            case ast.Name(id=name):
                value = self._value(name)
                text = value if isinstance(value, str) else unknown(name)
                plain = re.fullmatch(r"\s*(-?\d{1,18})\s*", text)
                return int(plain[1]) if plain else unknown((unknown_names(text) or [name])[0])
            case ast.UnaryOp(op=op, operand=operand):
                value = self._evaluated(operand)
                if isinstance(value, str):
                    return value
                return int(not value) if isinstance(op, ast.Not) else -value
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(left, right, _BINARY.get(type(op)))
            case ast.BoolOp(op=op, values=nodes):
                values = [self._evaluated(each) for each in nodes]
                if strange := next((v for v in values if isinstance(v, str)), None):
                    return strange
                return int(all(values) if isinstance(op, ast.And) else any(values))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._combined(left, right, _BINARY.get(type(op)))
            case _:
                return unknown("$(( ))")

    def _combined(
        self, left: ast.AST, right: ast.AST, combine: Callable[[int, int], int] | None
    ) -> int | str:
        a, b = self._evaluated(left), self._evaluated(right)
        if isinstance(a, str):
            return a
        if isinstance(b, str):
            return b
        if combine is None or abs(a) >= 1 << 62 or abs(b) >= 1 << 62:
            return unknown("$(( ))")
        try:
            return int(combine(a, b))
        except (ArithmeticError, ValueError):
            return unknown("$(( ))")

    def _test(self, tokens: list[Token]) -> bool | None:
        """Truth of a test; None: it depends on the output of a command."""
        words = [self._text(t.text) if t.is_word else t.text for t in tokens]
        return self._any(words)

    def _any(self, words: list[str]) -> bool | None:
        for sign, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if sign in words:
                place = words.index(sign)
                left, right = self._any(words[:place]), self._any(words[place + 1 :])
                if decides in (left, right):
                    return decides
                return None if None in (left, right) else not decides
        if words[:1] == ["!"]:
            ok = self._any(words[1:])
            return None if ok is None else not ok
        if words[:1] == ["("] and words[-1:] == [")"]:
            return self._any(words[1:-1])
        return self._one(words)

    def _one(self, words: list[str]) -> bool | None:
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
                same = fnmatchcase(left[:2000], right[:200])
                return same if sign != "!=" else not same
            case [left, sign, right] if sign in _NUMERIC:
                a, b = self._number(left or "0"), self._number(right or "0")
                return None if a is None or b is None else _NUMERIC[sign](a, b)
            case _:
                return None


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _power(a: int, b: int) -> int:
    if not 0 <= b <= 64 or abs(a) > 1 << 20:
        raise ValueError
    return a**b


_BINARY: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
    ast.Mod: lambda a, b: a - _divide(a, b) * b, ast.Pow: _power, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip

_NUMERIC: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def _formatted(pattern: str, values: list[str]) -> str:
    """`printf` of texts and numbers."""
    rest = iter(values)
    return re.sub(r"%[sd]", lambda _: next(rest, ""), pattern)
