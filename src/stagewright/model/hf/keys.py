"""The keys of a config.json file, and the maps that say which fields of a model they are.

A map has the fields of a `ModelConfig`, in the order in which they are read. Each comes from a key
(or the first of several names of one key that the file has), from a function of the keys, or is
`Fixed`, as True and False are. A dotted key lies in an object of the file. Errors name the file and
the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from reprlib import repr as shown  # short and shallow whatever the file holds
from typing import Any, NoReturn, cast, get_args

from stagewright.errors import UserError
from stagewright.files import own_yaml
from stagewright.model.architecture import LIMITS, Activation, Router
from stagewright.model.config import ModelConfig
from stagewright.model.fields import PROBABILITY, rules

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' names of the activations, and ours."""

_ROUTERS = {name: name for name in get_args(Router)}
_WORDS: Mapping[str, Mapping[str, str]] = {"activation": ACTIVATIONS, "router": _ROUTERS}
"""Words of files, and ours; our words for routers are DeepSeek's."""

Json = dict[str, object]
Fields = dict[str, Any]
"""Fields of `ModelConfig`."""


def whole_name(name: str) -> str:
    """A name out of a file as it is, so that one can search for it; cut only where it is no name.

    >>> whole_name("Qwen3_5ForConditionalGeneration")
    'Qwen3_5ForConditionalGeneration'
    """
    return name if len(name) <= 120 and name.isprintable() and name else shown(name)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A field that is the same in all files of a family, whatever the preset says.

    A switch is written as True or False itself.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file. A value that is not as it must be is an error that names its key."""

    file: str
    values: Json
    prefix: str = ""
    fields: Fields = field(default_factory=dict[str, Any])
    """Fields of the model that have been read so far."""
    seen: set[str] = field(default_factory=set[str])
    """Keys of the file that some reader has asked for, by their first word."""

    def _find(self, key: str) -> tuple[bool, object]:
        """The presence of a value for a key, and the value; a dotted key lies in an object."""
        *outer, last = key.split(".")
        self.seen.update((key, (outer or [last])[0]))
        node = self.values
        for word in outer:
            inner = node.get(word)
            if word in node and not isinstance(inner, dict):
                return False, None
            node = cast(Json, inner or {})
        if last in node:
            return True, node[last]
        return key in self.values, self.values.get(key)

    def has(self, key: str) -> bool:
        """True if the file has a key, or its family a default for it."""
        return self._find(key)[0]

    def get(self, key: str) -> object:
        """The value of a key, None where it is missing."""
        return self._find(key)[1]

    def reject(self, key: str, wanted: str) -> NoReturn:
        """Raise the error about a key."""
        has, value = self._find(key)
        outer = key.rpartition(".")[0]
        if not has and outer and not isinstance(self.get(outer), dict):
            self.reject(outer, "an object")
        if not has:
            got = "missing"
        elif value is None or isinstance(value, bool):
            got = json.dumps(value)
        else:
            got = shown(value)
        raise UserError(f"{self.file}: {self.prefix}{key} is {got}, wanted {wanted}")

    def used(self, *keys: str) -> str:
        """The one of several names of a key that the file uses."""
        return next((key for key in keys if self.has(key)), keys[0])

    def integer(self, key: str, least: int, most: int) -> int:
        """A whole number within limits."""
        value = self.get(key)
        if type(value) is not int or not least <= value <= most:
            self.reject(key, f"a whole number from {least} to {most}")
        return value

    def size(self, name: str, *keys: str) -> int:
        """A size that a field of this name may have, under one of these keys."""
        return self.integer(self.used(*keys), 1, LIMITS[name])

    def optional(self, name: str, *keys: str) -> int | None:
        """A size, or None where the key is null or missing."""
        key = self.used(*keys)
        return None if self.get(key) is None else self.size(name, key)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            self.reject(key, "true or false")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        """Any number within limits."""
        value = self.get(key)
        if isinstance(value, int | float) and type(value) is not bool and least <= value <= most:
            return float(value)
        self.reject(key, f"a number from {least} to {most}")

    def word(self, key: str, known: Mapping[str, str]) -> str:
        """One of the known words, in our vocabulary."""
        value = self.get(key)
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"one of {', '.join(known)}")
        return known[value]

    def text(self, key: str) -> str:
        """A text."""
        value = self.get(key)
        if not isinstance(value, str):
            self.reject(key, "text")
        return value

    def items(self, key: str) -> list[object]:
        """The items of a list; none where the key holds no list."""
        value = self.get(key)
        return cast("list[object]", value) if isinstance(value, list) else []

    def inside(self, key: str, defaults: Json) -> Keys:
        """The keys of an object in the file."""
        value = self.get(key)
        if not isinstance(value, dict):
            self.reject(key, "an object")
        return Keys(self.file, defaults | cast(Json, value), f"{self.prefix}{key}.")

    def only(self, key: str, value: bool | float | str) -> None:
        """Refuse a key that asks for something that no `ModelConfig` is."""
        got = self.get(key)
        if got is not None and (type(got) is not type(value) or got != value):
            self.reject(key, f"{json.dumps(value)}; nothing else is supported")

    def read_all(self, fields: Map) -> Fields:
        """The fields of a map, each added to the keys' `fields` as soon as it is read."""
        read: Fields = {}
        for name, entry in fields.items():
            value = self._read(name, entry)
            several = cast(Fields, value) if isinstance(value, dict) else {name: value}
            self.fields.update(several)
            read |= several
        return read

    def _read(self, name: str, entry: Entry) -> object:
        """The value of a field: of a key, by the type and the limits of the field."""
        if isinstance(entry, Fixed):
            return entry.value
        if isinstance(entry, bool):
            return entry
        if callable(entry):
            return entry(self)
        key = self.used(*((entry,) if isinstance(entry, str) else entry))
        rule = rules(ModelConfig)[name]
        if rule.type is bool:
            return self.flag(key)
        if name in _WORDS:
            return self.word(key, _WORDS[name])
        if rule.number is PROBABILITY:  # null means none, as in transformers
            return 0.0 if self.get(key) is None else self.number(key, 0, 0.999)
        if rule.optional and self.get(key) is None:
            return None
        if rule.count:
            return self.integer(key, max(1, rule.count.least), rule.count.most)
        return self.number(key, 1e-3, 1e6)


Reader = Callable[[Keys], Any]
"""Reads one field, or several that depend on each other as a dictionary."""
Entry = str | tuple[str, ...] | Reader | Fixed | bool
Map = Mapping[str, Entry]
"""Where each field of a model comes from."""


@cache
def _defaults() -> dict[str, Json]:
    text = files("stagewright").joinpath("data", "config_defaults.yaml").read_text("utf-8")
    return own_yaml(text)


@dataclass(frozen=True, slots=True)
class Family:
    """Reader of the files of one architecture."""

    model_types: tuple[str, ...]
    """The model types of the files, in the words of transformers; the first one is the family's."""
    like: str
    """The preset that says what the files do not."""
    fields: Map
    only: Mapping[str, bool | float | str]
    """Keys that are refused unless they have these values."""
    unused: tuple[str, ...]
    """Keys that files of the family have although the model does not read them."""
    remark: str
    """The difference between the family and what is counted, a clause for a note."""

    def defaults(self, model_type: object) -> Json:
        """The keys that files of a model type may leave out, or of the family's first type.

        Keys that mean none where they are left out (dropouts, windows) are not among them.
        """
        known = _defaults()
        if isinstance(model_type, str) and model_type in known:
            return known[model_type]
        return known.get(self.model_types[0], {})

    def read(self, keys: Keys) -> Fields:
        """The fields of the model of a file; a UserError for a key that is not understood."""
        for key, value in self.only.items():
            keys.only(key, value)
        return keys.read_all(self.fields)


def family(
    model_types: str,
    *maps: Map,
    like: str = "llama2-7b",
    only: Mapping[str, bool | float | str] | None = None,
    unused: str = "",
    remark: str = "",
    **fields: Entry,
) -> Family:
    """A family whose fields are those of the maps, then `fields`; later entries replace earlier.

    `model_types` and `unused` are words with spaces between them.
    """
    entries: dict[str, Entry] = {}
    for part in (*maps, fields):
        entries |= part
    types = tuple(model_types.split())
    return Family(types, like, entries, only or {}, tuple(unused.split()), remark)
