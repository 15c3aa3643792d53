"""Requests over time, and the engines that serve them: settings of `stagewright serve`."""

from collections.abc import Mapping
from types import MappingProxyType

from stagewright.run.sections.declare import Setting, settings_of
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.sections.serving.operation import OperationSection
from stagewright.run.sections.serving.pools import PoolSection
from stagewright.run.sections.serving.workload import WorkloadSection

SERVING_SECTIONS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {
        "workload": ("Requests", WorkloadSection),
        "engines": ("Engines", EngineSection),
        "pools": ("Pools of instances", PoolSection),
        "operation": ("Operation", OperationSection),
    }
)
"""Title and class by key."""

SERVING: Mapping[str, Setting] = MappingProxyType(
    {of.name: of for key, (_, each) in SERVING_SECTIONS.items() for of in settings_of(each, key)}
)
"""Settings of serving by name, in order."""

OF_ONE_STEP = frozenset(
    {"mode", "batch_size", "prompt_length", "context_length", "output_length", "source_length"}
    | {"requests", "prefill", "nodes"}
)
"""Settings of a run that the requests over time decide, or that `instances` does."""
