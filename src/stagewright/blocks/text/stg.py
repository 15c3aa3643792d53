"""Modules that users write, in the paper's notation: `.stg` files (docs/guides/own-model.md).

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
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.algebra.index import parse as parse_spec
from stagewright.algebra.notation import DEGREES, NotationError, Tensor, parts, tensor, where
from stagewright.algebra.size import Size, size
from stagewright.blocks.text.operators import WRITTEN
from stagewright.blocks.text.statements import (
    COLLECTIVES,
    OPS_OF_TEXTS,
    PARTS,
    Call,
    Draft,
    Reference,
    Statement,
)
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text
from stagewright.graph.node import BYTES
from stagewright.graph.table import choose
from stagewright.model.architecture import LIMITS
from stagewright.model.checks import kinds
from stagewright.model.config import ModelConfig
from stagewright.model.fields import rules
from stagewright.model.layers import ChainLink, Module
from stagewright.model.presets import PRESETS

MOST_DEPTH = 100  # of calls in calls
RUN_SIZES = ("B", "S")
MODEL_SIZES = ("M", "A", "G", "D", "F", "V")
"""Sizes that a module may use undeclared: those of the run, and of the model that it is part of."""


class File(NamedTuple):
    """Contents of a file: modules by name, and the model."""

    modules: Mapping[str, Module]
    model: ModelConfig


Resolve = Callable[[str], ModelConfig]
"""The model that a name stands for; raises UserError for an unknown name."""


def preset(name: str) -> ModelConfig:
    """The preset of this name, for a text that is read without the catalog of models."""
    if name not in PRESETS:
        raise UserError(f"model {name} is no preset{did_you_mean(name, PRESETS)}")
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


_BLANK = re.compile(r"(?:[ \t]+|\\\n|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*[*']?")
_WORD = re.compile(r"[^\s#]+")
"""Anything without blanks: names of models have dots and dashes."""
_REST = re.compile(r"[^\n#]*")
_KEYWORDS = ("module", "model", "size", "input", "param", "output", "scope")
_LINE_ENDS = ("", "\n")
_KINDS = ("mixers", "mlps")
_MANY = (*_KINDS, "chain")
_FIELDS = sorted({*ModelConfig.__dataclass_fields__} - {"name", "source", "modules", "bare"})


class _Parser:
    """One pass over the text; `at` is where it stands."""

    def __init__(self, text: str, file: str, resolve: Resolve) -> None:
        self.text, self.path, self.resolve, self.at = text, file, resolve, 0
        self.modules: dict[str, Module] = {}
        self.draft: Draft | None = None
        self.described = re.search(r"^[ \t]*model[ \t]", text, re.MULTILINE) is not None
        self.sizes = RUN_SIZES + (MODEL_SIZES if self.described else ())
        self.model: tuple[Reference, Reference | None] | None = None
        self.settings: dict[str, Any] = {}
        self.places: dict[str, int] = {}  # of the settings
        self.words: list[tuple[str, Reference]] = []  # of the settings `mixers` and `mlps`

    # ---- characters ------------------------------------------------------------------------------

    def peek(self) -> str:
        """The next character, past blanks and comments; the end of a line counts."""
        blank = _BLANK.match(self.text, self.at)
        self.at = blank.end() if blank else self.at
        return self.text[self.at : self.at + 1]

    def expected(self, wanted: str) -> NotationError:
        """The error about what stands here instead."""
        got = self.peek()
        shown = "the end of the line" if got in _LINE_ENDS else repr(got)
        return NotationError(f"got {shown}, wanted {wanted}", self.at)

    def take(self, wanted: str, why: str) -> None:
        if self.peek() != wanted:
            raise self.expected(f"{wanted!r} {why}")
        self.at += 1

    def match(self, what: str, pattern: re.Pattern[str] = _NAME) -> Reference:
        self.peek()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.expected(what)
        self.at = match.end()
        return Reference(match.group(), match.start())

    def bracket(self) -> Reference:
        """`[...]` as it stands, brackets and all."""
        start = self.at
        end, line = self.text.find("]", start), self.text.find("\n", start)
        if end < 0 or (0 <= line < end):
            raise NotationError("this [ has no ] on its line", start)
        self.at = end + 1
        return Reference(self.text[start : self.at], start)

    # ---- lines -----------------------------------------------------------------------------------

    def file(self) -> File:
        while self.at < len(self.text):
            if self.peek() in _LINE_ENDS:
                self.at += 1
                continue
            self.statement(self.match("a statement such as: param w[M, F/tp]"))
            if self.peek() not in _LINE_ENDS:
                got = self.text[self.at : self.at + 20].split("\n")[0]
                raise NotationError(
                    f"got {got!r} after the end of a statement, wanted the end of the line", self.at
                )
        self.end_module()
        return File(self.modules, self.config())

    def statement(self, first: Reference) -> None:
        if self.peek() not in ("[", "=", "*", "'"):
            match first.name:
                case "module":
                    return self.begin_module(self.match("the name of a module"))
                case "model":
                    return self.begin_model()
                case "size" | "input" | "param" | "output":
                    return self.declare(first.name)
                case "scope":
                    self.current().scope = self.match("a part of a layer, such as attention").name
                    return None
                case _:
                    raise NotationError(
                        f"cannot read {first.name!r}; wanted name = op(values), or one of "
                        f"{', '.join(_KEYWORDS)}{did_you_mean(first.name, _KEYWORDS)}",
                        first.at,
                    )
        return self.setting(first) if self.model and not self.draft else self.assign(first)

    def begin_module(self, name: Reference) -> None:
        self.end_module()
        if name.name in self.modules:
            raise NotationError(f"module {name.name} comes twice; rename one", name.at)
        if not name.name.isidentifier():
            raise NotationError(f"{name.name} is no name of a module; use letters", name.at)
        self.draft = Draft(name.name, self.text, self.path)

    def current(self) -> Draft:
        if self.draft is None:
            stem = re.sub(r"\W", "_", Path(self.path).stem) or "module"
            name = stem if stem.isidentifier() else f"_{stem}"
            self.draft = Draft(name, self.text, self.path)
        return self.draft

    def declare(self, kind: str) -> None:
        draft = self.current()
        name = self.match("the value that the module yields" if kind == "output" else f"a {kind}")
        if kind == "output":
            draft.output = self.known(name)
            while self.peek() == ",":
                self.at += 1
                draft.hands.append(self.known(self.match("a further value that the module yields")))
            return
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
            draft.statements.append(Statement(name.name, name.at, None, draft.scope))
            if self.peek() not in _LINE_ENDS:
                word = self.match("shared, or the end of the line")
                if word.name != "shared":
                    raise NotationError(f"got {word.name!r}, wanted shared or nothing", word.at)
                draft.shared.append(name.name)
            return
        dtype = None if self.peek() in _LINE_ENDS else self.match("a data type")
        if dtype and dtype.name not in BYTES:
            hint = did_you_mean(dtype.name, BYTES) or f"; use one of {', '.join(BYTES)}"
            raise NotationError(f"{dtype.name!r} is no data type{hint}", dtype.at)
        draft.inputs.append((name.name, shape, dtype.name if dtype else ""))

    def size(self, draft: Draft, name: Reference) -> None:
        if name.name in draft.sizes or name.name in DEGREES or not name.name.isidentifier():
            why = "is a parallel degree" if name.name in DEGREES else "comes twice, or is no name"
            raise NotationError(f"size {name.name} {why}; rename it", name.at)
        self.take("=", f"and a number after size {name.name}")
        text, at = self.match("a size", _REST)
        value = self.read_size(draft, text.strip(), at)
        if value.is_number:
            number = _number(value)
            if number is None or not 1 <= number <= 2**40:
                wanted = f"a whole number from 1 to {2**40}"
                raise NotationError(f"size {name.name} is {text.strip()}, wanted {wanted}", at)
            # In a model, a size of one's own may have the name of one of the model's.
            symbol = f"{draft.name}_{name.name}" if self.described else name.name
            draft.numbers[symbol] = number
            value = size(symbol)
        draft.sizes[name.name] = value

    def assign(self, name: Reference) -> None:
        draft = self.current()
        placed = self.tensor(draft) if self.peek() == "[" else None
        self.take("=", f"and what {name.name} is")
        value = self.expression(shaped=placed is not None)
        self.new(draft, name)
        if placed:
            draft.place(name.name, *placed)
        draft.statements.append(Statement(name.name, name.at, value, draft.scope))

    def new(self, draft: Draft, name: Reference) -> None:
        if name.name in draft.known:
            raise NotationError(f"{name.name} is there already; values never change", name.at)
        draft.known.add(name.name)

    def known(self, name: Reference) -> str:
        values = self.current().known
        if name.name not in values:
            hint = did_you_mean(name.name, values)
            raise NotationError(f"no value {name.name!r} so far{hint}", name.at)
        return name.name

    def tensor(self, draft: Draft) -> tuple[Tensor, tuple[Size, ...]]:
        """`[B/dp, S]`: the layout, and the shape in sizes that are known."""
        text, at = self.bracket()
        layout = tensor(text, at)
        places = [at + 1 + nth for nth, _ in parts(text[1:], ",")]
        dims = zip(layout.dims, places, strict=False)
        return layout, tuple(self.read_size(draft, dim, place) for dim, place in dims)

    def read_size(self, draft: Draft, text: str, at: int) -> Size:
        known = {*draft.sizes, *self.sizes}
        try:
            found = size(text)
            if unknown := sorted(found.symbols - known):
                example = f"say: size {unknown[0]} = 128{did_you_mean(unknown[0], known)}"
                raise NotationError(f"no size {unknown[0]!r}; {example}", at)
            return found.subs(draft.sizes)
        except NotationError:
            raise
        except ValueError as error:
            raise NotationError(str(error), at) from None
        except (ZeroDivisionError, RecursionError, OverflowError) as error:
            raise NotationError(f"cannot read the size {text!r}: {error}", at) from None

    # ---- values ----------------------------------------------------------------------------------

    def expression(self, *, shaped: bool = False, depth: int = 0) -> Reference | Call:
        """A value or a call; `shaped`: the text says the shape of its result."""
        if depth > MOST_DEPTH:
            raise NotationError("calls nest too deep; name some of them", self.at)
        name = self.match("a value or an op")
        bracket = self.bracket() if self.peek() == "[" else Reference("[]", self.at)
        if self.peek() != "(":
            if len(bracket.name) > 2:
                raise NotationError(f"{name.name} is given nothing; wanted (values)", self.at)
            return Reference(self.known(name), name.at)
        if name.name not in {*COLLECTIVES, *OPS_OF_TEXTS, *PARTS}:
            hint = did_you_mean(name.name, (*OPS_OF_TEXTS, *COLLECTIVES, *PARTS))
            hint = hint or "; docs/reference/ops.md lists those that there are"
            raise NotationError(f"no op {name.name!r}{hint}", name.at)
        self.take("(", "")
        arguments: list[Reference | Call] = []
        while self.peek() != ")":
            arguments.append(self.expression(depth=depth + 1))
            if self.peek() != ")":
                self.take(",", "or ')' after a value")
        self.take(")", "")
        if not arguments:
            raise NotationError(f"{name.name} is given nothing; wanted values", name.at)
        inner = Reference(bracket.name[1:-1], bracket.at + 1)
        if name.name in COLLECTIVES:
            if len(arguments) != 1:
                raise NotationError(f"{name.name} moves one value, got {len(arguments)}", name.at)
            return Call(*name, "", {}, _read_degrees(inner), tuple(arguments))
        if name.name in PARTS:
            return Call(*name, inner.name.strip(), {}, (), tuple(arguments))
        spec, semicolon, more = inner.name.partition(";" if "->" in inner.name else "\n")
        if "->" not in inner.name:
            spec, more = "", inner.name
        start = inner.at + len(spec) + len(semicolon)
        sized, more = _split_letters(spec, Reference(more, start))
        if spec:
            _check_spec(name.name, Reference(spec, inner.at), shaped=shaped, sized={*sized})
        attributes = _read_attributes(name, Reference(more, start))
        draft = self.current()
        letters = {x: self.read_size(draft, *of) for x, of in sized.items()}
        return Call(*name, spec.strip(), attributes, (), tuple(arguments), letters)

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
        draft.output = draft.output or made[-1].name
        self.modules[draft.name] = Module(
            draft.name, draft.build, tuple(draft.inputs), draft.numbers, draft.table,
            draft.output, tuple(draft.hands), tuple(draft.shared), self.text,
        )  # fmt: skip

    # ---- the model -------------------------------------------------------------------------------

    def begin_model(self) -> None:
        self.end_module()
        if self.model is not None:
            raise NotationError("a file describes one model", self.at)
        name, like = self.match("the name of the model", _WORD), None
        if self.peek() not in _LINE_ENDS:
            word = self.match("like and the name of a preset")
            if word.name != "like":
                raise NotationError(f"got {word.name!r}, wanted like and a preset", word.at)
            like = self.match("the name of a preset", _WORD)
        self.model = name, like

    def setting(self, key: Reference) -> None:
        if key.name not in _FIELDS:
            hint = did_you_mean(key.name, _FIELDS)
            raise NotationError(f"a model has no {key.name!r}{hint}", key.at)
        if key.name in self.settings:
            raise NotationError(f"{key.name} comes twice; keep one", key.at)
        self.take("=", f"and the value of {key.name}")
        text, at = self.match("a value", _REST)
        places = [(word, at + nth) for nth, word in parts(text, ",")]
        if key.name in _KINDS:
            self.words += [(key.name, Reference(*place)) for place in places]
        words = [_read_value(word) for word, _ in places]
        many = len(words) > 1 or key.name in _MANY
        self.settings[key.name] = tuple(words) if many else words[0]
        self.places[key.name] = key.at

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
        for field, (kind, at) in self.words:
            if kind not in (known := kinds(field, modules)):
                hint = did_you_mean(kind, known) or f"; use one of {', '.join(known)}"
                raise NotationError(f"{field}: no module or kind {kind!r}{hint}", at)
        name, like = self.model
        at = like.at if like else name.at
        try:
            base = self.resolve(like.name) if like else ModelConfig(name=name.name, **_ONES)
            base = replace(base, name=name.name, modules=modules, source=self.path)
            if "chain" in self.settings:
                layers = sum(_layers(text) for text in self.settings["chain"])
                self.settings.setdefault("num_layers", max(layers, 1))
            for key, value in self.settings.items():
                at = self.places.get(key, self.places.get("chain", name.at))
                if rules(ModelConfig)[key].wanted(value):
                    replace(base, **{key: value})
            at = name.at
            return replace(base, **self.settings)
        except UserError as error:
            raise NotationError(str(error), at) from None


_ONES: Mapping[str, Any] = dict.fromkeys(LIMITS, 1) | {
    "max_position_embeddings": 2**31,
    "position": "none",
}
"""Sizes of a model that is one module and nothing else."""


def _number(value: Size) -> int | None:
    try:
        return value.value({})
    except ValueError:
        return None


def _layers(text: str) -> int:
    """Layers of a link of a chain; 0 if it cannot be read, which a check refuses."""
    try:
        return ChainLink.read(str(text)).layers
    except ValueError:
        return 0


# ---- brackets of calls ---------------------------------------------------------------------------

_DTYPE = choose(*BYTES)._replace(required=False)
"""Data type of a result, an attribute of every op."""


def _read_degrees(text: Reference) -> tuple[str, ...]:
    """The degrees that a collective names."""
    degrees = tuple(word.strip() for word in text.name.split(",") if word.strip())
    for degree in degrees:
        if degree not in DEGREES:
            hint = did_you_mean(degree, DEGREES)
            raise NotationError(f"{degree!r} is no parallel degree{hint}", text.at)
    return degrees


def _split_letters(spec: str, text: Reference) -> tuple[dict[str, Reference], str]:
    """Sizes of letters of the result, as in `bsaD->bsaN; N=Plain, first=true`, and the rest."""
    letters = {x for x in spec.partition("->")[2] if x.isalpha()}
    sized: dict[str, Reference] = {}
    rest: list[str] = []
    for nth, part in parts(text.name, ","):
        key, equals, word = (piece.strip() for piece in part.partition("="))
        if equals and key in letters:
            sized[key.lower()] = Reference(word, text.at + nth + part.index("=") + 1)
        else:
            rest.append(part)
    return sized, ", ".join(rest) if sized else text.name


def _check_spec(
    op: str, text: Reference, *, shaped: bool, sized: Container[str] = frozenset()
) -> None:
    """An index expression that can be read, of which the operands, or `sized`, give every size."""
    try:
        spec = parse_spec(text.name.strip())
    except ValueError as error:
        raise NotationError(f"{op}: {error}", text.at) from None
    known = {x for dims in spec.ins for dim in dims for x in dim}
    for unknown in (x for dim in spec.out for x in dim if x not in known and x not in sized):
        if not shaped:
            place = text.name.lower().index(unknown, text.name.index("->"))
            raise NotationError(
                f"{op}: no operand has the index {unknown!r} of the result; use one of "
                f"{', '.join(sorted(known))}, or name the value and its shape: "
                f"y[B/dp, S, M] = ..., or say its size: "
                f"{op}[{text.name.strip()}; {unknown.upper()}=128]",
                text.at + place,
            )


def _read_attributes(op: Reference, text: Reference) -> dict[str, Any]:
    """The attributes in a bracket, and those that are implied."""
    declared = {**OPS_OF_TEXTS[op.name].attrs, **WRITTEN.get(op.name, {}), "dtype": _DTYPE}
    given = {name: of.implied for name, of in declared.items() if of.implied is not None}
    said = set[str]()
    for nth, part in parts(text.name, ","):
        if not part:
            continue
        key, equals, word = (piece.strip() for piece in part.partition("="))
        at = text.at + nth
        if key not in declared:
            hint = did_you_mean(key, declared) or f"; use one of {', '.join(declared)}"
            raise NotationError(f"{op.name} has no attribute {key!r}{hint}", at)
        if key in said:
            raise NotationError(f"{op.name}: {key} comes twice; keep one", at)
        said.add(key)
        given[key] = _read_value(word) if equals else True
        if not declared[key].accepts(given[key]):
            hint = did_you_mean(word, declared[key].choices)
            raise NotationError(f"{op.name}: {key} is {word!r}, wanted {declared[key]}{hint}", at)
    for key, of in declared.items():
        if of.asked and key not in given:
            raise NotationError(f"{op.name} needs {key}: write {op.name}[{key}=...], {of}", op.at)
    return given


def _read_value(word: str) -> Any:
    """Value of a word: a number, true or false, or the word itself."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word) if len(word) < 40 else word
        except ValueError:
            pass
    return word
