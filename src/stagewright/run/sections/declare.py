"""Declaration of a setting: one field of a section, with all that follows from it.

A section is a dataclass whose fields are made by `setting`. `Run` inherits from the sections and
validates them; the command line, the checks of modes and needs, the profiles of frameworks, run
files and the documentation read the same declarations. This module and the sections import neither
pydantic nor numpy, so that `stagewright --help` answers at once.

>>> from stagewright.run.sections import SETTINGS
>>> of = SETTINGS["tp"]
>>> of.kind, of.flag, of.text
(<class 'int'>, '--tp', 'Tensor parallelism: ranks that split every layer. [1]')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from stagewright.errors import either
from stagewright.launch.names import other_names

LARGEST = 2**31
"""No setting is larger: columns of the program index with 32 bits."""

BYTES = "bytes"
"""The unit of settings that are sizes, which text may give with a prefix: `80GB`."""

DEGREES = ("tp", "cp", "ep", "dp", "pp")
"""Parallel degrees, in the order in which they are shown."""

TRAINING = ("train",)
INFERENCE = ("prefill", "decode")
ALL_MODES = (*TRAINING, *INFERENCE)

NO_BACKWARD = "there is no backward pass"
WHOLE_WEIGHTS = "weights are not sharded over dp"
"""Why settings mean nothing in inference."""

_Value = TypeVar("_Value")


# ---- types, which tell pydantic what is valid without importing it ------------------------------


class Exactly:
    """A value of this type (`bool`, `str`) and of no other that could be converted."""

    def __init__(
        self, type: str, read: Callable[[object], object] | None = None, **rule: object
    ) -> None:
        """`read` makes text a value first; `rule`: more of what pydantic asks of the value."""
        self.kind = None if read is None else str
        """Type that the command line reads; None: the type of the field."""
        self._schema: dict[str, object] = {"type": type, "strict": True, **rule}
        if read is not None:
            function = {"type": "no-info", "function": read}
            self._schema = {"type": "function-before", "function": function, "schema": self._schema}

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, object]:
        """The rule as pydantic reads it."""
        return self._schema


def whole(least: int, most: int = LARGEST) -> Exactly:
    """A whole number in a range; neither text nor a boolean is converted."""
    return Exactly("int", ge=least, le=most)


def real(*, strict: bool = True, **ends: object) -> Exactly:
    """A finite number in a range with pydantic's names: `gt`, `ge`, `le`; `strict` refuses text."""
    return Exactly("float", None, strict=strict, allow_inf_nan=False, **ends)


_TIME = re.compile(r"\s*([0-9]+\.?[0-9]*(?:e-?[0-9]+)?|\.[0-9]+)\s*(us|ms|s|min|h|)\s*")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def read_time(value: object) -> tuple[float, str] | None:
    """A number and its unit as seconds; without a unit, the number as it is; None: no time.

    >>> read_time("50ms"), read_time(3), read_time("soon")
    ((0.05, 'ms'), (3.0, ''), None)
    """
    if isinstance(value, str) and (match := _TIME.fullmatch(value)):
        return float(match[1]) * _UNITS.get(match[2], 1.0), match[2]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), ""
    return None


def duration(least: float = 0.0, most: float = 1e9) -> Exactly:
    """Seconds in a range, or text with a unit: `50ms`, `2s`, `10min`."""

    def read(value: object) -> object:
        time = read_time(value)
        return value if time is None else time[0]

    return Exactly("float", read, ge=least, le=most, allow_inf_nan=False)


_COUNT = re.compile(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?|\.[0-9]+)\s*([kKMBGT]|)\s*")
_THOUSANDS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}


def amount() -> Exactly:
    """A positive number, or text with a unit of thousands: `15T`, `300B`."""

    def read(value: object) -> object:
        match = _COUNT.fullmatch(value) if isinstance(value, str) else None
        return float(match[1]) * 1000.0 ** _THOUSANDS[match[2]] if match else value

    return Exactly("float", read, gt=0, allow_inf_nan=False)


Seconds = Annotated[float, duration()]
Amount = Annotated[float, amount()]
Count = Annotated[int, whole(1)]
Number = Annotated[int, whole(0)]
Bytes = Annotated[int, whole(1, 2**63)]
Factor = Annotated[float, real(gt=0, le=1e6)]
Weight = Annotated[float, real(ge=0, le=1e6)]
Share = Annotated[float, real(ge=0, le=1, strict=False)]
Switch = Annotated[bool, Exactly("bool")]
Text = Annotated[str, Exactly("str")]


# ---- declarations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with everything that follows from its declaration."""

    help: str
    """One sentence: what the setting says."""
    default: Any = None
    unset: str = ""
    """Meaning of None."""
    modes: tuple[str, ...] = ALL_MODES
    """Modes in which the setting means something."""
    elsewhere: str = ""
    """Why the setting means nothing in other modes, or what to use there."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Values of other settings, one of which each must have for this setting to mean anything."""
    idle: tuple[Mapping[str, Any], ...] = ()
    """Values of other settings; where a run has all of one mapping, this setting does nothing."""
    unit: str = ""
    """Unit of the setting's number, for errors about its size."""
    habits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of frameworks that differ from `default`, by framework."""
    names: tuple[str, ...] = ()
    """Names of the same setting in Megatron-LM, vLLM and torchtitan."""
    short: str = ""
    """Its option of one dash in vLLM."""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of these tools that stand for one value of this setting, or a `Without`."""
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values that these tools have and this setting has not, and what to use for each."""
    same_words: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of these tools that mean a value of this setting; None: what follows where it is not
    given."""
    metavar: str = ""
    option: str = ""
    """The option's name where that is another than the setting's, which is a word of Python."""
    of_requests: bool = False
    """With `prefill`: both groups of ranks have the same value."""
    name: str = ""
    kind: type | tuple[str, ...] = str
    """int, float, bool, str, tuple, frozenset, dict, or the words to choose from."""
    section: str = ""

    @property
    def flag(self) -> str:
        """The option's name, with dashes; the singular where it is repeated."""
        name = self.name.removesuffix("s") if self.kind is dict else self.option or self.name
        return "--" + name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.default is None:
            return self.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return text_of(self.default)

    @property
    def text(self) -> str:
        """Help with the default in brackets, as the command line prints it."""
        default = self.default_text
        return f"{self.help} [{default}]" if default else self.help

    @property
    def read_too(self) -> set[str]:
        """Other settings that say whether this one means something."""
        return {*self.needs, *(name for condition in self.idle for name in condition)}

    def default_of(self, framework: str) -> Any:
        """The value where none is given, in the habits of a framework."""
        return self.habits.get(framework, self.default)

    def is_idle(self, run: object) -> bool:
        """True if the setting does nothing in a run."""
        return any(
            all(getattr(run, name) == value for name, value in condition.items())
            for condition in self.idle
        )


def setting(default: _Value, help: str, **declared: Any) -> _Value:
    """Declare a field of a section; `declared` are the other fields of `Setting`."""
    return field(default=default, metadata={"setting": Setting(help, default, **declared)})


def of_training(default: _Value, help: str, **declared: Any) -> _Value:
    """Declare a field that means something in training alone."""
    return setting(default, help, modes=TRAINING, **declared)


def of_inference(default: _Value, help: str, **declared: Any) -> _Value:
    """Declare a field that means something in prefill and decode alone."""
    return setting(default, help, modes=INFERENCE, **declared)


def settings_of(section: type, key: str) -> tuple[Setting, ...]:
    """The settings that a section declares, in order; `key` is the section's name in run files."""
    return tuple(
        replace(
            of.metadata["setting"],
            name=of.name,
            kind=_kind(of.type),
            section=key,
            **other_names(of.name),
        )
        for of in fields(section)
        if "setting" in of.metadata
    )


def _kind(annotation: Any) -> type | tuple[str, ...]:
    """The type of a field without its range and without None; of a Literal, its words."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _kind(get_args(annotation)[0])
    if origin is Annotated:
        return annotation.__metadata__[0].kind or _kind(annotation.__origin__)
    if origin is Literal:
        return get_args(annotation)
    if origin is Mapping:
        return dict
    return origin or annotation


def describe_value(name: str, value: object) -> str:
    """A setting with its value, as errors name it: `zero=3`, `recompute_modules=norm`.

    >>> describe_value("recompute_modules", ("norm", "activation"))
    'recompute_modules=norm,activation'
    """
    return f"{name}={text_of(value)}"


def setting_in_words(name: str, value: object) -> str:
    """A setting with its value, a switch by its name alone.

    >>> setting_in_words("sequence_parallel", True), setting_in_words("fuse", False)
    ('sequence_parallel', 'no fuse')
    """
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return describe_value(name, value)


def text_of(value: object) -> str:
    """A value as an option takes it: the items of a list between commas.

    >>> text_of((9, 10, 9)), text_of(0.5)
    ('9,10,9', '0.5')
    """
    if isinstance(value, frozenset):
        return ",".join(sorted(map(str, cast("frozenset[object]", value))))
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", value)))
    return str(value)


def plain(value: Any) -> Any:
    """A value of YAML's and JSON's types: sorted lists for sets, lists for tuples."""
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[Any]", value))
    return [plain(x) for x in cast("tuple[Any]", value)] if isinstance(value, tuple) else value


def items_of(text: str) -> tuple[Any, ...]:
    """Items between commas: the reverse of `text_of`; whole numbers if all are.

    >>> items_of("9,10,9"), items_of("norm, activation"), items_of("")
    ((9, 10, 9), ('norm', 'activation'), ())
    """
    words = tuple(word.strip() for word in text.split(",") if text.strip())
    numbers = all(word.isdecimal() and word.isascii() for word in words)
    return tuple(map(int, words)) if numbers else words


def as_lists(values: Mapping[str, Any], declared: Mapping[str, Setting]) -> dict[str, Any]:
    """The values, where a list may be given as text: `norm`, or `norm,activation`."""
    lists = {
        name: items_of(value)
        for name, value in values.items()
        if isinstance(value, str) and name in declared and declared[name].kind in (tuple, frozenset)
    }
    return {**values, **lists}


def idle_axes(*axes: str) -> Mapping[str, int]:
    """The values of degrees with which there is nothing to exchange along any of these axes.

    >>> idle_axes("dp", "cp")
    {'dp': 1, 'cp': 1}
    """
    return dict.fromkeys(axes, 1)


def describe_need(name: str, values: tuple[Any, ...]) -> str:
    """Values that a setting must have, in words.

    >>> describe_need("zero", (2, 3)), describe_need("sequence_parallel", (False,))
    ('zero=2 or 3', 'no sequence_parallel')
    """
    if len(values) == 1 and isinstance(values[0], bool):
        return setting_in_words(name, values[0])
    return f"{name}={either(values)}"
