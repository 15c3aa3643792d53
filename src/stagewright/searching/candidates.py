"""Candidates of a search: runs that differ in some settings, stored as a column per setting.

>>> from stagewright.model.catalog import resolve as preset
>>> from stagewright.run.settings import Run
>>> from stagewright.time.hardware import resolve
>>> base = Experiment(Run(model="gpt2"), ClusterSection(), Execution())
>>> columns = {
...     "hardware": Column.constant(resolve("h100-sxm"), 4),
...     "tp": Column.of([1, 2, 4, 4]),
...     "recompute": Column.of(["none", "full", "none", "none"]),
...     "no_overlap": Column.of([frozenset(), frozenset(), frozenset(), frozenset({"tp"})]),
... }
>>> candidates = Candidates(base, preset("gpt2"), columns, count=4)
>>> len(candidates), candidates.numbers("tp").tolist(), candidates.numbers("dp").tolist()
(4, [1, 2, 4, 4], [1, 1, 1, 1])
>>> candidates.run(1).describe(), candidates.execution(3).no_overlap
('gpt2 tp=2 recompute=full', frozenset({'tp'}))
>>> candidates.distinct("tp", "recompute").first.tolist()
[0, 1, 2]
>>> candidates.distinct("tp").tuple_of.tolist()
[0, 1, 2, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Int, distinct_numbers
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment, describe
from stagewright.run.requests import read_bytes
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.run.tool_files import TrainedRun
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine

Codes = NDArray[np.integer[Any]]
"""Index into `Column.values`: [candidates]."""

ABSENT = -1
"""None in columns of numbers: the default follows from other settings."""

HARDWARE = "hardware"
"""The column of systems; its values are of `Hardware`, not names."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One setting of all candidates, dictionary-encoded; a single value takes no memory."""

    codes: Codes
    values: tuple[Any, ...]
    """Values by code, without repetition; None: the default follows from other settings."""

    def __post_init__(self) -> None:
        if len(self.values) == 1:
            object.__setattr__(self, "codes", np.broadcast_to(np.uint8(0), len(self.codes)))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, indices: Int | Bool | slice) -> Column:
        """Column of the selected candidates."""
        return Column(self.codes[indices], self.values)

    @classmethod
    def of(cls, values: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Self:
        """Column from one value per candidate; `key`: hashable, equal for equal values."""
        values = [*values]
        # 1, 1.0 and True are equal, but no setting has more than one of them.
        keys = values if key is None else [key(value) for value in values]
        number = {item: n for n, item in enumerate(dict.fromkeys(keys))}
        first = dict(zip(reversed(keys), reversed(values), strict=True))
        codes = np.array([number[item] for item in keys], dtype=_code_type(len(number)))
        return cls(codes, tuple(first[item] for item in number))

    @classmethod
    def constant(cls, value: Any, count: int) -> Self:
        """Column of one value."""
        return cls(np.broadcast_to(np.uint8(0), count), (value,))

    def at(self, index: int) -> Any:
        """Value of one candidate."""
        return self.values[int(self.codes[index])]

    def numbers(self) -> Int:
        """Integers [candidates]: None is `ABSENT`, true and false are 1 and 0."""
        table = [ABSENT if value is None else int(value) for value in self.values]
        return np.array(table, dtype=np.int64)[self.codes]

    def is_one_of(self, *values: Any) -> Bool:
        """Mask of candidates that have one of these values."""
        return np.array([value in values for value in self.values], dtype=bool)[self.codes]

    def compact(self) -> Column:
        """Drop values that no candidate has."""
        used: Bool = np.zeros(len(self.values), dtype=bool)
        used[self.codes] = True
        if used.all():
            return self
        values = tuple(self.values[code] for code in np.flatnonzero(used).tolist())
        numbers = (np.cumsum(used) - 1).astype(_code_type(len(values)))
        return Column(numbers[self.codes], values)


def _code_type(num_values: int) -> type[np.unsignedinteger[Any]]:
    """Smallest dtype of codes for `num_values` values."""
    return np.uint8 if num_values <= 1 << 8 else np.uint16 if num_values <= 1 << 16 else np.uint32


class Distinct(NamedTuple):
    """Distinct tuples of some columns, numbered in the order of their codes."""

    first: Int
    """First candidate of each tuple: [tuples]."""
    tuple_of: Int
    """Index of the tuple of each candidate: [candidates]."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Runs of one model with their execution and hardware; some settings differ."""

    base: Experiment
    """Settings that all share. Its run is not resolved."""
    model: ModelConfig
    """Model of all candidates, with the overrides of the base's run (`layers`, `vocab`)."""
    columns: Mapping[str, Column]
    """Settings of the run, the machine and the execution by name; `hardware` is always one."""
    count: int
    varied: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    """Specs that `--vary` changed, by name of hardware and path."""

    def __len__(self) -> int:
        return self.count

    def column(self, name: str) -> Column:
        """Column of a setting, also of one that all candidates share."""
        if name in self.columns:
            return self.columns[name]
        return Column.constant(self.base.value(name), self.count)

    def numbers(self, name: str) -> Int:
        """Integers of a setting [candidates]; `ABSENT` where it is None."""
        return self.column(name).numbers()

    @property
    def world_size(self) -> Int:
        """Ranks [candidates]: tp * cp * dp * pp."""
        degrees = [self.numbers(name) for name in ("tp", "cp", "dp", "pp")]
        return np.prod(np.stack(degrees), axis=0)

    @property
    def prefill_gpus(self) -> int:
        """GPUs of `prefill`, which no degree counts."""
        prefill = self.base.run.prefill_ranks
        return prefill.world_size if prefill else 0

    @property
    def seq_length(self) -> Int:
        """Tokens of a sequence [candidates]."""
        return self.map_distinct(
            ("seq_length",), lambda index: self.run(index).resolved(self.model).seq_length or 1
        )

    @property
    def microbatches(self) -> Int:
        """Microbatches of a training step [candidates].

        Without a global batch size as few as the schedule takes, like in a run.
        """
        batch = self.numbers("global_batch_size")
        counts = batch // (self.numbers("micro_batch_size") * self.numbers("dp"))
        absent = np.flatnonzero(batch == ABSENT)
        if len(absent):
            unsized = self.take(absent)
            counts[absent] = unsized.map_distinct(
                ("schedule", "pp", "microbatch_group_size_per_vp_stage"),
                lambda index: unsized.run(index).microbatches,
            )
        return counts

    @property
    def machine_ids(self) -> Int:
        """Number of each distinct (hardware, cluster, execution, world size): [candidates]."""
        names = {HARDWARE, *names_in("cluster"), *names_in("execution")}
        systems = self.distinct(*(name for name in self.columns if name in names)).tuple_of
        return distinct_numbers([systems, self.world_size], self.count)[1]

    @property
    def device_memory(self) -> Int:
        """Bytes that a rank may use [candidates]."""

        def usable(index: int) -> int:
            setting = self.column("device_memory").at(index)
            return self.hardware(index).memory if setting is None else read_bytes(setting)

        return self.map_distinct((HARDWARE, "device_memory"), usable)

    def merge_memory_sizes(self) -> Candidates:
        """Merge hardware that differs in memory size only.

        A step takes the same time on each, and the same bytes.
        """
        column, ignored = self.columns[HARDWARE], {"name", "description", "sources", "memory_gb"}
        if len(column.values) == 1:
            return self
        merged = Column.of(column.values, lambda of: of.model_dump_json(exclude=ignored))
        return self.with_column(HARDWARE, Column(merged.codes[column.codes], merged.values))

    def with_column(self, name: str, column: Column) -> Candidates:
        """Candidates with other values of a setting."""
        return replace(self, columns={**self.columns, name: column})

    @classmethod
    def concatenated(cls, parts: Sequence[Candidates]) -> Candidates:
        """Candidates of parts that have the same columns, with the same values."""
        columns = {
            name: Column(np.concatenate([part.columns[name].codes for part in parts]), of.values)
            for name, of in parts[0].columns.items()
        }
        return replace(parts[0], columns=columns, count=sum(map(len, parts)))

    def crossed(self, name: str, values: tuple[Any, ...]) -> Candidates:
        """Each candidate with each of the values, in order."""
        columns = {
            other: Column(np.repeat(column.codes, len(values)), column.values)
            for other, column in self.columns.items()
        }
        codes = np.tile(np.arange(len(values), dtype=_code_type(len(values))), len(self))
        columns[name] = Column(codes, values)
        return replace(self, columns=columns, count=len(codes))

    def take(self, indices: Int | Bool | slice) -> Candidates:
        """Selected candidates, in the order of `indices`."""
        columns = {name: column[indices] for name, column in self.columns.items()}
        return replace(self, columns=columns, count=len(next(iter(columns.values()))))

    def distinct(self, *names: str) -> Distinct:
        """Distinct tuples of settings, and the tuple of each candidate."""
        columns = [self.column(name) for name in names]
        codes = [column.codes for column in columns if len(column.values) > 1]
        return Distinct(*distinct_numbers(codes, self.count))

    def map_distinct(self, names: Iterable[str], compute: Callable[[int], Any]) -> NDArray[Any]:
        """Array [candidates] of `compute`, called once per distinct tuple of settings.

        `compute` takes the index of the tuple's first candidate.
        """
        first, tuple_of = self.distinct(*names)
        return np.array([compute(index) for index in first.tolist()])[tuple_of]

    def run(self, index: int) -> Run:
        """Run of one candidate, not resolved."""
        return self.base.run.model_copy(update=self._values(index, SETTINGS))

    def execution(self, index: int) -> Execution:
        """Execution of one candidate."""
        return replace(self.base.execution, **self._values(index, names_in("execution")))

    def trained(self, index: int) -> TrainedRun:
        """Run of one candidate with its execution, to be written as a file of another tool."""
        hardware = self.hardware(index)
        return TrainedRun.of(
            self.run(index), self.model, self.execution(index),
            before_blackwell=hardware.is_before_blackwell,
        )  # fmt: skip

    def describe(self, index: int) -> str:
        """Run of one candidate, and non-default settings of its execution."""
        return describe(self.run(index), self.execution(index))

    def cluster(self, index: int) -> ClusterSection:
        """Settings of one candidate's machine, except `hardware`."""
        return replace(self.base.cluster, **self._values(index, names_in("cluster") - {HARDWARE}))

    def hardware(self, index: int) -> Hardware:
        """Hardware of one candidate."""
        return self.columns[HARDWARE].at(index)

    def machine(self, index: int, *, gpus: int | None = None) -> Machine:
        """Machine of one candidate; `gpus`: another number of GPUs."""
        cluster = self.cluster(index)
        return Machine.of(
            self.hardware(index),
            gpus=gpus or self.run(index).world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )

    def _values(self, index: int, names: Iterable[str]) -> dict[str, Any]:
        selected = set(names)
        return {name: col.at(index) for name, col in self.columns.items() if name in selected}


def names_in(section: str) -> set[str]:
    """Names of the settings of a section."""
    return {setting.name for setting in EXPERIMENT.values() if setting.section == section}
