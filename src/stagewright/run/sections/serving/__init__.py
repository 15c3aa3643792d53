"""Requests over time, and the engines that serve them: settings of `stagewright serve`.

`workload`: requests and limits. `engines`: schedulers and their limits. `pools`: instances of
several kinds. `operation`: full queues, failures, autoscaling.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stagewright.errors import UserError
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


_SAME: Mapping[str, str] = MappingProxyType(
    {name.replace("-", "_"): of.name for of in SERVING.values() for name in of.names}
)
"""Settings by the names that mean the same in other tools, as keywords."""


def by_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by our names of settings; raises UserError where two names say the same setting.

    >>> by_own_names({"request_rate": 4.0, "num_prompts": 100, "tp": 2})
    {'rate': 4.0, 'num_requests': 100, 'tp': 2}
    """
    names: dict[str, str] = {}
    for name in values:
        first = names.setdefault(_SAME.get(name, name), name)
        if first != name:
            raise UserError(f"{first} and {name} say the same setting; keep one")
    return {setting: values[name] for setting, name in names.items()}
