"""Candidates of a search: runs that differ in some settings, as a column for each of these.

>>> import numpy as np
>>> from stagewright.run.settings import Run
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2"), ClusterSection(), Execution())
>>> columns = {
...     "tp": Column.of([1, 2, 4, 4]),
...     "recompute": Column.of(["none", "full", "none", "none"]),
...     "no_overlap": Column.of([frozenset(), frozenset(), frozenset(), frozenset({"tp"})]),
... }
>>> found = Candidates.of(base, resolve("h100-sxm"), columns)
>>> len(found), found.numbers("tp").tolist(), found.numbers("dp").tolist()
(4, [1, 2, 4, 4], [1, 1, 1, 1])
>>> found.run(1).describe(), found.execution(3).no_overlap
('gpt2 tp=2 recompute=full', frozenset({'tp'}))
>>> found.distinct("tp", "recompute").first.tolist(), found.distinct("tp").of.tolist()
([0, 1, 2], [0, 1, 2, 2])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int, distinct_numbers
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.requests import read_bytes
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import setting_in_words
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine

Codes = NDArray[np.unsignedinteger[Any]]
"""Which of a column's values each candidate has."""

ABSENT = -1
"""In columns of numbers: the setting is None, so that its default follows from the others."""

_PLAIN = frozenset({int, float, str, bool, tuple, type(None)})
"""Types of figures that are no block of figures."""

HARDWARE = "hardware"
"""The column of systems; its values are of `Hardware`, not names."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One setting of all candidates: values without repetition, and for each candidate which."""

    codes: Codes
    """[candidates]."""
    values: tuple[Any, ...]
    """By code: of any type that the setting has; None: its default follows from the others."""

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Int | Bool | slice) -> Column:
        """The column of some candidates."""
        codes = self.codes[rows]
        if len(self.values) == 1:
            return Column.constant(self.values[0], len(codes))
        return Column(codes, self.values)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Self:
        """A column of one value for each candidate, which must be hashable."""
        known: dict[Any, int] = {}
        # 1, 1.0 and True are equal, but no setting has more than one of them.
        codes = [known.setdefault(value, len(known)) for value in values]
        return cls(np.array(codes, dtype=code_type(len(known))), tuple(known))

    @classmethod
    def constant(cls, value: Any, count: int) -> Self:
        """A column of one value, which takes no memory."""
        return cls(np.broadcast_to(np.uint8(0), count), (value,))

    def at(self, row: int) -> Any:
        """The value of one candidate."""
        return self.values[int(self.codes[row])]

    def numbers(self) -> Int:
        """Whole numbers [candidates]: None is `ABSENT`, true and false are 1 and 0."""
        table = [ABSENT if value is None else int(value) for value in self.values]
        return np.array(table, dtype=np.int64)[self.codes]

    def is_one_of(self, *values: Any) -> Bool:
        """Which candidates have one of these values."""
        return np.array([value in values for value in self.values], dtype=bool)[self.codes]


def code_type(values: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type of codes for so many values."""
    return np.uint8 if values <= 1 << 8 else np.uint16 if values <= 1 << 16 else np.uint32


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The distinct tuples of some columns, numbered in the order of their codes."""

    first: Int
    """[tuples]: the first candidate that has each."""
    of: Int
    """[candidates]: the tuple that each has."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Runs of one model with their execution and hardware, of which some settings differ."""

    base: Experiment
    """What all have in common. Its run is not resolved: what is None follows from the others."""
    model: ModelConfig
    """The model of all, with the overrides of the base's run (`layers`, `vocab`)."""
    columns: Mapping[str, Column]
    """Settings of a run, of the machine and of the execution by name, and `hardware`."""
    count: int

    @classmethod
    def of(
        cls,
        base: Experiment,
        hardware: Hardware,
        columns: Mapping[str, Column],
        model: ModelConfig | None = None,
    ) -> Self:
        """Candidates from columns of one length; `hardware` is that of all without such a column.

        `model` replaces the configuration that the model's name stands for.
        """
        run = base.run
        of = model or resolve(run.model, run.as_family or "")
        of = of.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        counts = {len(column) for column in columns.values()} or {1}
        if len(counts) > 1:
            raise ValueError(f"columns of candidates have {sorted(counts)} rows, wanted one number")
        (count,) = counts
        every = {HARDWARE: Column.constant(hardware, count), **columns}
        return cls(base, of, every, count)

    def __len__(self) -> int:
        return self.count

    def column(self, name: str) -> Column:
        """The values of a setting, also of one that all candidates have in common."""
        if name in self.columns:
            return self.columns[name]
        setting = EXPERIMENT[name]
        homes = {"cluster": self.base.cluster, "execution": self.base.execution}
        value = getattr(homes.get(setting.section, self.base.run), name)
        return Column.constant(value, self.count)

    def numbers(self, name: str) -> Int:
        """The whole numbers of a setting [candidates]; `ABSENT` where it is None."""
        return self.column(name).numbers()

    @property
    def world_size(self) -> Int:
        """Ranks [candidates]: tp * cp * dp * pp."""
        degrees = [self.numbers(name) for name in ("tp", "cp", "dp", "pp")]
        return np.prod(np.stack(degrees), axis=0)

    @property
    def microbatches(self) -> Int:
        """Microbatches of a training step [candidates]; without a global batch size, those that a
        run then has: as few as its schedule takes."""
        batch = self.numbers("global_batch_size")
        found = batch // (self.numbers("micro_batch_size") * self.numbers("dp"))
        absent = np.flatnonzero(batch == ABSENT)
        if len(absent):
            some = self.take(absent)
            pipelines = some.distinct("schedule", "pp", "microbatch_group_size_per_vp_stage")
            fewest = [some.run(first).microbatches for first in pipelines.first.tolist()]
            found[absent] = np.array(fewest)[pipelines.of]
        return found

    @property
    def machines(self) -> Int:
        """Numbers that are equal for candidates with equal machines and ways to execute:
        [candidates]."""
        names = {HARDWARE, *_named("cluster"), *_named("execution")}
        alike = self.distinct(*(name for name in self.columns if name in names))
        return distinct_numbers([alike.of, self.world_size], self.count)[1]

    @property
    def device_memory(self) -> Int:
        """Bytes that a rank may use [candidates]."""
        alike = self.distinct(HARDWARE, "device_memory")
        found: list[int] = []
        for row in alike.first.tolist():
            asked = self.column("device_memory").at(row)
            found.append(self.hardware(row).memory if asked is None else read_bytes(asked))
        return np.array(found, dtype=np.int64)[alike.of]

    def regardless_of_memory(self) -> Candidates:
        """The same runs, where of machines that differ in the size of their memory alone the first
        stands for all: a step takes the same time on each, and holds the same bytes."""
        column = self.columns[HARDWARE]
        if len(column.values) == 1:
            return self
        known: dict[tuple[object, ...], int] = {}
        blocks: dict[int, object] = {}
        number = [
            known.setdefault(_apart_from_memory(of, blocks), len(known)) for of in column.values
        ]
        if len(known) == len(column.values):
            return self
        first = dict(zip(number[::-1], column.values[::-1], strict=True))
        values = tuple(first[code] for code in range(len(known)))
        codes = np.array(number, dtype=code_type(len(known)))[column.codes]
        return replace(self, columns={**self.columns, HARDWARE: Column(codes, values)})

    def take(self, rows: Int | Bool | slice) -> Candidates:
        """Some of the candidates, in the order of `rows`."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, columns=columns, count=len(next(iter(columns.values()))))

    def distinct(self, *names: str) -> Distinct:
        """The distinct tuples of settings, and which of them each candidate has.

        Whatever depends on these settings alone is computed for the candidates `first`, and
        gathered by `of`.
        """
        return distinct([self.column(name) for name in names], self.count)

    def run(self, row: int) -> Run:
        """One candidate as an ordinary run, not resolved."""
        return self.base.run.model_copy(update=self._given(row, SETTINGS))

    def execution(self, row: int) -> Execution:
        """How one candidate is executed."""
        return replace(self.base.execution, **self._given(row, _named("execution")))

    def describe(self, row: int) -> str:
        """The run of one candidate, and what of its execution is not the default."""
        run, how = self.run(row), self.execution(row)
        values = {name: getattr(how, name) for name in sorted(_named("execution"))}
        differ = [
            setting_in_words(name, value)
            for name, value in values.items()
            if value != EXPERIMENT[name].default_of(run.framework)
        ]
        return " ".join([run.describe(), *differ])

    def cluster(self, row: int) -> ClusterSection:
        """The machine of one candidate by its settings; `hardware` says which hardware it has."""
        return replace(self.base.cluster, **self._given(row, _named("cluster") - {HARDWARE}))

    def hardware(self, row: int) -> Hardware:
        """The hardware of one candidate."""
        return self.columns[HARDWARE].at(row)

    def machine(self, row: int) -> Machine:
        """The machine of one candidate, as large as its world size."""
        cluster = self.cluster(row)
        return Machine.of(
            self.hardware(row),
            gpus=self.run(row).world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )

    def _given(self, row: int, names: Iterable[str]) -> dict[str, Any]:
        known = set(names)
        return {name: of.at(row) for name, of in self.columns.items() if name in known}


def _apart_from_memory(hardware: Hardware, blocks: dict[int, object]) -> tuple[object, ...]:
    """All figures of hardware but the size of its memory, and not its name.

    `blocks` are blocks of figures that have been seen, which variants share, by their identity.
    """

    def figures(of: object) -> object:
        if type(of) in _PLAIN:
            return of
        block = id(of)
        if block not in blocks:
            inner = cast("Mapping[str, Any]", of if isinstance(of, Mapping) else vars(of))
            blocks[block] = tuple([(name, figures(value)) for name, value in inner.items()])
        return blocks[block]

    own = vars(hardware).items()
    return tuple([figures(of) for name, of in own if name not in ("name", "memory_gb")])


def _named(section: str) -> set[str]:
    return {of.name for of in EXPERIMENT.values() if of.section == section}


def distinct(columns: Sequence[Column], count: int) -> Distinct:
    """The distinct tuples of some columns of `count` rows."""
    return Distinct(*distinct_numbers([of.codes for of in columns if len(of.values) > 1], count))
