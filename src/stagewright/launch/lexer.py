"""Words and operators of shell scripts."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from stagewright.errors import UserError

DEEPEST = 30
"""Nested quotes and substitutions."""

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]=]{1,200})\])?(\+?)=")
_OPERATORS = ("&&", "||", ";;&", ";&", ";;", "&>>", "&>", ">>", ">&", "<<<", "<&", "<>", ">|", "|&",
              ";", "&", "|", "(", ")", "<", ">")  # fmt: skip


class Token(NamedTuple):
    """A word with its quotes, or an operator, and the line where it begins."""

    text: str
    line: int
    is_word: bool
    body: str | None = None
    """Text of a here-document that follows the word."""
    plain: bool = False
    """The here-document is not expanded: its delimiter is quoted."""


class Lexer:
    """Words of a text with their quotes, and operators."""

    def __init__(self, text: str, path: str, line: int = 1) -> None:
        """`path` and the number of the first `line` are for errors."""
        self.text, self.path, self.line = text, path, line
        self.headers: list[str] = []
        """Options of `#SBATCH` lines, which end with the first command."""

    def fail(self, what: str, at: int) -> NoReturn:
        """Raise a UserError about the text at a position."""
        line = self.line + self.text.count("\n", 0, at)
        raise UserError(f"{self.path}: line {line}: {what}")

    def tokens(self) -> list[Token]:
        """All words and operators, with new lines; comments are left out."""
        text, tokens, i, line = self.text, list[Token](), 0, self.line
        awaited: list[tuple[int, str, bool]] = []  # here-documents: token, delimiter, dash
        while i < len(text):
            c = text[i]
            if c == "\n":
                tokens.append(Token("\n", line, False))
                i, line = i + 1, line + 1
                for index, delimiter, dash in awaited:
                    start, i, body_lines = self._here_document(i, delimiter, dash)
                    tokens[index] = tokens[index]._replace(body=start)
                    line += body_lines
                awaited.clear()
            elif c in " \t\r":
                i += 1
            elif text.startswith("\\\n", i):
                i, line = i + 2, line + 1
            elif c == "#":
                end = text.find("\n", i)
                end = len(text) if end < 0 else end
                if text.startswith("#SBATCH", i) and all(t.text == "\n" for t in tokens):
                    self.headers.append(text[i + 7 : end].strip())
                i = end
            elif text.startswith(("<<-", "<<"), i) and not text.startswith("<<<", i):
                dash = text.startswith("<<-", i)
                i += 3 if dash else 2
                while i < len(text) and text[i] in " \t":
                    i += 1
                end = self.word_end(i)
                delimiter = text[i:end].strip("'\"").replace("\\", "")
                plain = delimiter != text[i:end]
                tokens.append(Token(delimiter, line, False, "", plain))
                awaited.append((len(tokens) - 1, delimiter, dash))
                i = end
            elif text.startswith(("((", "<(", ">("), i):
                end = self._paren_end(i + (c != "("), 0)
                tokens.append(Token(text[i:end], line, True))
                line += text.count("\n", i, end)
                i = end
            elif operator_ := next((o for o in _OPERATORS if text.startswith(o, i)), ""):
                before = tokens[-1] if tokens and text[i - 1].isdigit() else None
                if before and before.is_word and before.text.isdigit() and operator_[0] in "<>":
                    tokens.pop()  # 2>&1
                tokens.append(Token(operator_, line, False))
                i += len(operator_)
            else:
                end = self.word_end(i)
                tokens.append(Token(text[i:end], line, True))
                line += text.count("\n", i, end)
                i = end
        return tokens

    def _here_document(self, start: int, delimiter: str, dash: bool) -> tuple[str, int, int]:
        """Body, position behind its last line, and number of lines."""
        i, lines = start, 0
        while i < len(self.text):
            end = self.text.find("\n", i)
            end = len(self.text) if end < 0 else end
            row = self.text[i:end]
            lines += 1
            if (row.lstrip("\t") if dash else row) == delimiter:
                return self.text[start:i], min(end + 1, len(self.text)), lines
            i = end + 1
        return self.text[start:], len(self.text), lines

    def word_end(self, i: int, depth: int = 0) -> int:
        """Position behind the word that begins at `i`."""
        text, start = self.text, i
        while i < len(text):
            c = text[i]
            if c == "(" and ASSIGNMENT.fullmatch(text[start:i][-200:]):
                i = self._paren_end(i, depth)
            elif c in " \t\r\n;&|<>()":
                break
            else:
                i = self.unit_end(i, depth)
        return max(i, start + 1)

    def unit_end(self, i: int, depth: int) -> int:
        """Position behind a quoted text, a substitution or a character."""
        text, c = self.text, self.text[i]
        if depth > DEEPEST:
            self.fail("nested too deep", i)
        if c == "\\":
            return min(i + 2, len(text))
        if c == "'":
            return self._find("'", i)
        if c == '"':
            j = i + 1
            while j < len(text) and text[j] != '"':
                literal = text[j] == "'" or text.startswith("$'", j)
                j = j + 1 if literal else self.unit_end(j, depth + 1)
            if j >= len(text):
                self.fail("a quote is never closed", i)
            return j + 1
        if c == "`" or text.startswith("$'", i):
            return self._escaped_end(i + (c == "$"))
        if c == "$" and text.startswith("(", i + 1):
            return self._paren_end(i + 1, depth + 1)
        if c == "$" and text.startswith("{", i + 1):
            j = i + 2
            while j < len(text) and text[j] != "}":
                j = self.unit_end(j, depth + 1)
            if j >= len(text):
                self.fail("${ is never closed", i)
            return j + 1
        return i + 1

    def _find(self, quote: str, i: int) -> int:
        end = self.text.find(quote, i + 1)
        if end < 0:
            self.fail("a quote is never closed", i)
        return end + 1

    def _escaped_end(self, i: int) -> int:
        """Position behind the next quote of the kind at `i` that has no backslash before it."""
        end = re.compile(rf"(?:[^\\{self.text[i]}]|\\.)*+{self.text[i]}", re.DOTALL)
        if (match := end.match(self.text, i + 1)) is None:
            self.fail("a quote is never closed", i)
        return match.end()

    def _paren_end(self, i: int, depth: int) -> int:
        """Position behind the parenthesis that closes the one at `i`."""
        text, j, level = self.text, i, 0
        while j < len(text):
            c = text[j]
            if c == "#" and text[j - 1] in " \t\n(":
                end = text.find("\n", j)
                j = len(text) if end < 0 else end
                continue
            level += (c == "(") - (c == ")")
            if level == 0:
                return j + 1
            j = j + 1 if c in "()" else self.unit_end(j, depth + 1)
        self.fail("( is never closed", i)


def braces(raw: str, path: str) -> list[str]:
    """Words of `a{b,c}d` and `{1..3}`; a word without such braces stays as it is.

    >>> braces("a{b,c}{1..3..2}", "script"), braces("${A[@]} '{a,b}'", "script")
    (['ab1', 'ab3', 'ac1', 'ac3'], ["${A[@]} '{a,b}'"])
    """
    lexer, i, tried = Lexer(raw, path), 0, 0
    if "{" not in raw:
        return [raw]
    while i < len(raw):
        tried += raw[i] == "{"
        if tried * len(raw) > 1_000_000:
            lexer.fail("braces make too many words", i)
        if raw[i] == "{" and (found := _choices(lexer, i)):
            choices, end = found
            rest = braces(raw[end:], path)
            if len(choices) * len(rest) > 10_000:
                lexer.fail("braces make too many words", i)
            return [raw[:i] + choice + tail for choice in choices for tail in rest]
        i = lexer.unit_end(i, 0)
    return [raw]


def _choices(lexer: Lexer, start: int) -> tuple[list[str], int] | None:
    """Words of the brace at a position, and where it ends."""
    text, i, parts, begin, level = lexer.text, start + 1, list[str](), start + 1, 0
    while i < len(text):
        c = text[i]
        if c == "}" and level == 0:
            break
        if c == "," and level == 0:
            parts.append(text[begin:i])
            begin = i + 1
        level += (c == "{") - (c == "}")
        i = i + 1 if c in "{}," else lexer.unit_end(i, 0)
    else:
        return None
    if parts:
        parts.append(text[begin:i])
        return [word for part in parts for word in braces(part, lexer.path)], i + 1
    match = re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?", text[begin:i])
    if match is None:
        ends = re.fullmatch(r"([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z])", text[begin:i])
        if ends is None:
            return None
        low, high = (ord(letter) for letter in ends.groups() if letter)
        codes = range(low, high + 1) if low <= high else range(low, high - 1, -1)
        return [chr(code) for code in codes], i + 1
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    if abs(last - first) // step > 10_000:
        lexer.fail("braces make too many words", start)
    width = max((len(word) for word in match.groups()[:2] if re.match("-?0\\d", word)), default=0)
    down = -step if first > last else step
    numbers = range(first, last + (1 if down > 0 else -1), down)
    return [f"{number:0{width}d}" for number in numbers], i + 1
