"""Defaults of settings in each training framework: its *profile*.

`Run.framework` names a profile. A setting that a run gives goes before its profile; a setting that
neither gives has the default of `Run`, which is Megatron-LM's habit. Each setting declares its
habits itself (`Setting.habits`). docs/internals/frameworks.md shows them, with sources.

>>> from stagewright.run.settings import Run
>>> run = Run(model="llama3-8b", framework="torchtitan", recompute_early_stop=False)
>>> run.operators, run.recompute_early_stop
('eager', False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.run.sections import SETTINGS


def profile(framework: str) -> dict[str, Any]:
    """Defaults of a framework that replace those of `Run`; an unknown framework has none."""
    return {s.name: s.habits[framework] for s in SETTINGS.values() if framework in s.habits}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, completed with the defaults of the framework that they name."""
    return {**profile(_framework(values)), **values}


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its framework does not imply; another may be named instead."""
    implied = profile(_framework(values))
    return {k: v for k, v in values.items() if k not in implied or implied[k] != v}


def _framework(values: Mapping[str, Any]) -> str:
    return str(values.get("framework", SETTINGS["framework"].default))
