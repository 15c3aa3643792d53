"""Modules that users write, in the paper's notation: `.stg` files (docs/own-models.md).

A module is parsed once into statements, which make nodes wherever a model uses the module; backward
and collectives follow from the graph as for every other part of a model.

>>> file = parse('''
...     size H = 64
...     input x[B/dp, S]
...     param w[S, H/tp]
...     y[B/dp, H/tp] = einsum[bs,sh->bh](x, w)
... ''', "fold.stg")
>>> file.modules["fold"].inputs[0][0], sorted(file.modules["fold"].table)
('x', ['fold.w', 'fold.x', 'fold.y'])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.algebra.notation import DEGREES, NotationError, Tensor, tensor, where
from stagewright.algebra.size import Size, size
from stagewright.blocks.text.statements import (
    COLLECTIVES,
    Call,
    Draft,
    Reference,
    Statement,
    build,
    read_value,
)
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text
from stagewright.graph.node import BYTES
from stagewright.graph.table import LEAVES, OPS
from stagewright.model.architecture import LIMITS
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Module
from stagewright.model.presets import PRESETS

DTYPES = tuple(BYTES)
MOST_DEPTH = 100  # of calls in calls
RUN_SIZES = ("B", "S")
MODEL_SIZES = ("M", "A", "G", "D", "F", "V")
"""Sizes that a module may use undeclared: those of the run, and of the model that it is part of."""


class File(NamedTuple):
    """What a file defines: modules by name, and the model it describes."""

    modules: Mapping[str, Module]
    model: ModelConfig


Resolve = Callable[[str], ModelConfig]
"""The model that a name stands for; raises UserError for an unknown name."""


def preset(name: str) -> ModelConfig:
    """The preset of this name, for a text that is read without the catalog of models."""
    if name not in PRESETS:
        raise UserError(f"model {name[:60]} is no preset{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def load(path: str | Path, resolve: Resolve = preset) -> ModelConfig:
    """The model of a `.stg` file; every error is a UserError with line and column."""
    text = read_text(path, "modules in the paper's notation")
    return parse(text.replace("\r\n", "\n"), str(path), resolve).model


def parse(text: str, file: str, resolve: Resolve = preset) -> File:
    """Read a file's text: `file` names it in errors, and its stem names an unnamed module.

    `resolve` finds the model that a text names after `like`.
    """
    try:
        return _Parser(text, file, resolve).file()
    except NotationError as error:
        raise UserError(f"{file}, {where(text, error.at)}: {error}") from None


_TOKEN = re.compile(r"[ \t]+|\\\n|#[^\n]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*[*']?")
_WORD = re.compile(r"[^\s#]+")
_REST = re.compile(r"[^\n#]*")
_KEY = re.compile(r"([a-z_]+)[ \t]*=[ \t]*([^\n#]*)")


class _Parser:
    """One pass over the text; `at` is where it stands."""

    def __init__(self, text: str, file: str, resolve: Resolve) -> None:
        self.text, self.path, self.resolve, self.at = text, file, resolve, 0
        self.modules: dict[str, Module] = {}
        self.draft: Draft | None = None
        self.described = re.search(r"^[ \t]*model[ \t]", text, re.MULTILINE) is not None
        self.sizes = RUN_SIZES + (MODEL_SIZES if self.described else ())
        self.model: tuple[Reference, Reference | None, dict[str, Any]] | None = None

    # ---- characters ------------------------------------------------------------------------------

    def skip(self) -> None:
        """Go past blanks and comments, not past the end of the line."""
        while found := _TOKEN.match(self.text, self.at):
            self.at = found.end()

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def expected(self, wanted: str) -> NotationError:
        """The error about what stands here instead."""
        got = self.peek()
        shown = "the end of the line" if got in ("", "\n") else repr(got)
        return NotationError(f"got {shown}, wanted {wanted}", self.at)

    def take(self, wanted: str, why: str) -> None:
        if self.peek() != wanted:
            raise self.expected(f"{wanted!r} {why}")
        self.at += 1

    def match(self, pattern: re.Pattern[str], what: str) -> Reference:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.expected(what)
        self.at = match.end()
        return Reference(match.group(), match.start())

    def name(self, what: str) -> Reference:
        return self.match(_NAME, what)

    def word(self, what: str) -> Reference:
        """Anything without blanks: names of models have dots and dashes."""
        return self.match(_WORD, what)

    def bracket(self) -> tuple[str, int]:
        """`[...]` as it stands, brackets and all, and where it begins."""
        start = self.at
        end = self.text.find("]", start)
        line = self.text.find("\n", start)
        if end < 0 or (0 <= line < end):
            raise NotationError("this [ has no ] on its line", start)
        self.at = end + 1
        return self.text[start : self.at], start

    # ---- lines -----------------------------------------------------------------------------------

    def file(self) -> File:
        while self.at < len(self.text):
            if self.peek() in ("", "\n"):
                self.at += 1
                continue
            start = self.name("a statement such as: param w[M, F/tp]")
            self.statement(start)
            if self.peek() not in ("", "\n"):
                raise NotationError(
                    f"got {self.text[self.at : self.at + 20].split(chr(10))[0]!r} after the end of "
                    "a statement, wanted the end of the line",
                    self.at,
                )
        self.end_module()
        return File(self.modules, self.config())

    def statement(self, first: Reference) -> None:
        if self.peek() not in ("[", "=", "*", "'"):
            match first.name:
                case "module":
                    return self.begin_module(self.name("the name of a module"))
                case "model":
                    return self.begin_model()
                case "size" | "input" | "param" | "output":
                    return self.declare(first.name)
                case _:
                    words = ("module", "model", "size", "input", "param", "output")
                    raise NotationError(
                        f"cannot read {first.name!r}; wanted name = op(values), or one of "
                        f"{', '.join(words)}{did_you_mean(first.name, words)}",
                        first.at,
                    )
        if self.model is not None and self.draft is None:
            return self.setting(first)
        self.assign(first)
        return None

    def begin_module(self, name: Reference) -> None:
        self.end_module()
        if name.name in self.modules:
            raise NotationError(f"module {name.name} comes twice; rename one", name.at)
        if not name.name.isidentifier():
            raise NotationError(f"{name.name} is no name of a module; use letters", name.at)
        self.draft = Draft(name.name)

    def current(self) -> Draft:
        if self.draft is None:
            stem = re.sub(r"\W", "_", Path(self.path).stem) or "module"
            self.draft = Draft(stem if stem.isidentifier() else f"_{stem}")
        return self.draft

    def declare(self, kind: str) -> None:
        draft = self.current()
        if kind == "output":
            name = self.name("the value that the module yields")
            if name.name not in draft.known:
                raise NotationError(_unknown(name.name, draft.known), name.at)
            draft.output = name.name
            return
        name = self.name(f"the name of a {kind}")
        if kind == "size":
            return self.size(draft, name)
        self.new(draft, name)
        if self.peek() != "[":
            wanted = f"such as {kind} {name.name}[B/dp, S, M/tp]"
            raise NotationError(f"{kind} {name.name} has no shape; wanted {wanted}", self.at)
        at = self.at
        layout, shape = self.tensor(draft)
        if layout.partial:
            raise NotationError(f"{kind} {name.name} is a sum of nothing; leave out the @", at)
        draft.place(name.name, layout, shape)
        if kind == "param":
            if not shape:
                raise NotationError(f"parameter {name.name} has no dims; use [1]", at)
            draft.statements.append(Statement(name.name, name.at, None))
            return
        dtype = ""
        if self.peek() not in ("", "\n"):
            word = self.name("a data type")
            if word.name not in DTYPES:
                hint = did_you_mean(word.name, DTYPES) or f"; use one of {', '.join(DTYPES)}"
                raise NotationError(f"{word.name!r} is no data type{hint}", word.at)
            dtype = word.name
        draft.inputs.append((name.name, shape, dtype))

    def size(self, draft: Draft, name: Reference) -> None:
        if name.name in draft.sizes or name.name in DEGREES or not name.name.isidentifier():
            why = "is a parallel degree" if name.name in DEGREES else "comes twice, or is no name"
            raise NotationError(f"size {name.name} {why}; rename it", name.at)
        self.take("=", f"and a number after size {name.name}")
        text, at = self.match(_REST, "a size")
        text = text.strip()
        value = self.read_size(draft, text, at)
        if value.is_number:
            number = _number(value)
            if number is None or not 1 <= number <= 2**40:
                wanted = f"a whole number from 1 to {2**40}"
                raise NotationError(f"size {name.name} is {text[:60]}, wanted {wanted}", at)
            # In a model, a size of one's own may have the name of one of the model's.
            symbol = f"{draft.name}_{name.name}" if self.described else name.name
            draft.numbers[symbol] = number
            value = size(symbol)
        draft.sizes[name.name] = value

    def assign(self, name: Reference) -> None:
        draft = self.current()
        placed = self.tensor(draft) if self.peek() == "[" else None
        self.take("=", f"and what {name.name} is")
        value = self.expression(draft, 0)
        self.new(draft, name)
        if placed:
            draft.place(name.name, *placed)
        draft.statements.append(Statement(name.name, name.at, value))

    def new(self, draft: Draft, name: Reference) -> None:
        if name.name in draft.known:
            raise NotationError(f"{name.name} is there already; values never change", name.at)
        draft.known.add(name.name)

    def tensor(self, draft: Draft) -> tuple[Tensor, tuple[Size, ...]]:
        """`[B/dp, S]`: the layout, and the shape in sizes that are known."""
        text, at = self.bracket()
        layout = tensor(text, at)
        return layout, tuple(self.read_size(draft, dim, at) for dim in layout.dims)

    def read_size(self, draft: Draft, text: str, at: int) -> Size:
        try:
            found = size(text)
            known = {*draft.sizes, *self.sizes}
            for symbol in sorted(found.symbols):
                if symbol not in known:
                    raise NotationError(f"no size {symbol!r}; {_declare(symbol, known)}", at)
            return found.subs(draft.sizes)
        except NotationError:
            raise
        except (ValueError, ZeroDivisionError, RecursionError, OverflowError) as error:
            raise NotationError(f"cannot read the size {text[:60]!r}: {error}", at) from None

    def expression(self, draft: Draft, depth: int) -> Reference | Call:
        if depth > MOST_DEPTH:
            raise NotationError("calls nest too deep; name some of them", self.at)
        name = self.name("a value or an op")
        bracket, at = "", self.at
        if self.peek() == "[":
            bracket, at = self.bracket()
        if self.peek() != "(":
            if bracket:
                raise NotationError(f"{name.name} is given nothing; wanted (values)", self.at)
            if name.name not in draft.known:
                raise NotationError(_unknown(name.name, draft.known), name.at)
            return name
        if name.name not in COLLECTIVES and name.name not in _OPS:
            hint = did_you_mean(name.name, (*_OPS, *COLLECTIVES))
            raise NotationError(f"no op {name.name!r}{hint}", name.at)
        self.take("(", "")
        arguments: list[Reference | Call] = []
        while self.peek() != ")":
            arguments.append(self.expression(draft, depth + 1))
            if self.peek() != ")":
                self.take(",", "or ')' after a value")
        self.take(")", "")
        if not arguments:
            raise NotationError(f"{name.name} is given nothing; wanted values", name.at)
        return Call(name.name, name.at, bracket[1:-1], at + 1, tuple(arguments))

    def end_module(self) -> None:
        draft, self.draft = self.draft, None
        if draft is None:
            return
        made = [s for s in draft.statements if s.value is not None]
        at = self.at if not draft.statements else draft.statements[-1].at
        if not draft.inputs:
            raise NotationError(f"module {draft.name} has no input", at)
        if not made:
            raise NotationError(f"module {draft.name} computes nothing", at)
        output = draft.output or made[-1].name
        make = partial(build, draft, output, self.text, self.path)
        self.modules[draft.name] = Module(
            draft.name, make, tuple(draft.inputs), draft.numbers, draft.table, output, self.text
        )

    # ---- the model -------------------------------------------------------------------------------

    def begin_model(self) -> None:
        self.end_module()
        if self.model is not None:
            raise NotationError("a file describes one model", self.at)
        name, like = self.word("the name of the model"), None
        if self.peek() not in ("", "\n"):
            word = self.name("like and the name of a preset")
            if word.name != "like":
                raise NotationError(f"got {word.name!r}, wanted like and a preset", word.at)
            like = self.word("the name of a preset")
        self.model = name, like, {}

    def setting(self, key: Reference) -> None:
        assert self.model is not None
        found = _KEY.match(self.text, key.at)
        fields = ModelConfig.__dataclass_fields__
        known = sorted(set(fields) - {"name", "source", "modules", "bare"})
        if found is None or key.name not in known:
            hint = did_you_mean(key.name, known)
            raise NotationError(f"a model has no {key.name!r}{hint}", key.at)
        if key.name in self.model[2]:
            raise NotationError(f"{key.name} comes twice; keep one", key.at)
        self.at = found.end()
        words = [read_value(word.strip()) for word in found.group(2).strip().split(",")]
        many = key.name in ("mixers", "mlps")
        self.model[2][key.name] = tuple(words) if many else words[0] if len(words) == 1 else words

    def config(self) -> ModelConfig:
        """The model that is described; a file that describes none is its one module by itself."""
        if not self.modules:
            raise NotationError("no module here; wanted such as: input x[B/dp, S, M]", 0)
        modules = tuple(self.modules.values())
        if self.model is None:
            only, *more = modules
            if more:
                raise NotationError(
                    "several modules and no model; say which uses them, such as: model mine like "
                    "llama3-8b",
                    len(self.text),
                )
            return ModelConfig(
                name=only.name, modules=modules, bare=True, mixers=(only.name,),
                mlps=("none",), source=self.path, **_ONES,
            )  # fmt: skip
        name, like, settings = self.model
        try:
            base = self.resolve(like.name) if like else ModelConfig(name=name.name, **_ONES)
            return replace(base, name=name.name, modules=modules, source=self.path, **settings)
        except UserError as error:
            raise NotationError(str(error), name.at) from None


_ONES: Mapping[str, Any] = dict.fromkeys(LIMITS, 1) | {
    "max_position_embeddings": 2**31,
    "position": "none",
}
"""Sizes of a model that is one module and nothing else."""

_OPS = tuple(name for name, row in OPS.items() if (row.vjp or name == "sum") and name not in LEAVES)


def _number(value: Size) -> int | None:
    try:
        return value.value({})
    except ValueError:
        return None


def _unknown(name: str, known: set[str]) -> str:
    return f"no value {name!r} so far{did_you_mean(name, known)}"


def _declare(symbol: str, known: set[str]) -> str:
    return f"say: size {symbol} = 128{did_you_mean(symbol, known)}"
