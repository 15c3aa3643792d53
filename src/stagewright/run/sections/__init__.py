"""Sections of a run: what may be set, each setting declared once, in groups that are read alone.

In: nothing. Out: `SETTINGS`, from which `Run`, the command line, checks and documentation follow.
Neither pydantic nor numpy is imported here. `declare` has the declaration of a setting.

A run has `model`, `parallelism`, `batch` (with the schedule), `memory` (recomputation, offload),
`experts`, `adapters`, `inference`, `precision` and the `habits` of frameworks. An experiment adds
`cluster` and `execution`, and `serving` the requests over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stagewright.run.sections.adapters import AdapterSection
from stagewright.run.sections.batch import BatchSection
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import Setting, settings_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.experts import ExpertSection
from stagewright.run.sections.habits import HabitSection
from stagewright.run.sections.inference import InferenceSection
from stagewright.run.sections.memory import MemorySection
from stagewright.run.sections.model import ModelSection
from stagewright.run.sections.parallelism import ParallelismSection
from stagewright.run.sections.precision import PrecisionSection


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Settings(  # pydantic and dataclasses read the fields of the last base first
    HabitSection,
    PrecisionSection,
    InferenceSection,
    AdapterSection,
    ExpertSection,
    MemorySection,
    BatchSection,
    ParallelismSection,
    ModelSection,
):
    """All settings of a run, by name; `Run` validates them."""


RUN_SECTIONS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {
        "model": ("Model", ModelSection),
        "parallelism": ("Parallelism", ParallelismSection),
        "batch": ("Batch and schedule", BatchSection),
        "memory": ("Recomputation and offload", MemorySection),
        "experts": ("Experts", ExpertSection),
        "adapters": ("Frozen weights and adapters", AdapterSection),
        "inference": ("Inference", InferenceSection),
        "precision": ("Precision and kernels", PrecisionSection),
        "habits": ("Habits of frameworks", HabitSection),
    }
)
"""Sections of `Run` in order: their title and class, by the key that run files use."""

SECTIONS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {**RUN_SECTIONS, "cluster": ("Machine", ClusterSection), "execution": ("Execution", Execution)}
)
"""Sections of an experiment: of a run, its cluster and its execution."""


def _declared(sections: Mapping[str, tuple[str, type]]) -> Mapping[str, Setting]:
    return MappingProxyType(
        {of.name: of for key, (_, each) in sections.items() for of in settings_of(each, key)}
    )


SETTINGS = _declared(RUN_SECTIONS)
"""Settings of a run by name, in order, without the model itself."""

EXPERIMENT = _declared(SECTIONS)
"""Settings of a run, of the machine and of the execution."""
