"""Execution graphs of every rank of a distributed LLM training step, synthesized without GPUs.

>>> import stagewright as sw
>>> sw.Run(model="llama3-8b", tp=8, dp=2).world_size
16
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stagewright.version import __version__

if TYPE_CHECKING:
    from stagewright.api.calibrated import Calibration, calibrate
    from stagewright.api.changes import Changes, diff
    from stagewright.api.compared import Comparison, compare
    from stagewright.api.compiled import Compiled, compile
    from stagewright.api.experiments import load_run, read_launch
    from stagewright.api.generated import generate
    from stagewright.api.replayed import Replay, replay
    from stagewright.api.searched import Search, search
    from stagewright.api.searched_serving import ServingSearch, search_serving
    from stagewright.api.served import Serving, serve
    from stagewright.api.simulated import Simulation, report, simulate
    from stagewright.errors import UserError
    from stagewright.imports.sources import from_torch
    from stagewright.model.catalog import resolve
    from stagewright.model.config import ModelConfig
    from stagewright.run.settings import Run
    from stagewright.texttable import Table
    from stagewright.trace.formats.bundle import Bundle

__all__ = [
    "Bundle",
    "Calibration",
    "Changes",
    "Comparison",
    "Compiled",
    "ModelConfig",
    "Replay",
    "Run",
    "Search",
    "Serving",
    "ServingSearch",
    "Simulation",
    "Table",
    "UserError",
    "__version__",
    "calibrate",
    "compare",
    "compile",
    "diff",
    "from_torch",
    "generate",
    "load_run",
    "read_launch",
    "replay",
    "report",
    "resolve",
    "search",
    "search_serving",
    "serve",
    "simulate",
]

# Names are imported when first used: `import stagewright` and `stagewright --help` stay quick.
_HOME = {
    "Bundle": "trace.formats.bundle",
    "Calibration": "api.calibrated",
    "Changes": "api.changes",
    "Comparison": "api.compared",
    "Compiled": "api.compiled",
    "ModelConfig": "model.config",
    "Replay": "api.replayed",
    "Run": "run.settings",
    "Search": "api.searched",
    "Serving": "api.served",
    "ServingSearch": "api.searched_serving",
    "Simulation": "api.simulated",
    "Table": "texttable",
    "UserError": "errors",
    "calibrate": "api.calibrated",
    "compare": "api.compared",
    "compile": "api.compiled",
    "diff": "api.changes",
    "from_torch": "imports.sources",
    "generate": "api.generated",
    "load_run": "api.experiments",
    "read_launch": "api.experiments",
    "replay": "api.replayed",
    "report": "api.simulated",
    "resolve": "model.catalog",
    "search": "api.searched",
    "search_serving": "api.searched_serving",
    "serve": "api.served",
    "simulate": "api.simulated",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
