"""Execution graphs of every rank of a distributed LLM training step, synthesized without GPUs.

>>> import stagewright as sw
>>> sw.Run(model="llama3-8b", tp=8, dp=2).world_size
16
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.api import compile, report, simulate
    from stagewright.errors import UserError
    from stagewright.lower.training import Compiled
    from stagewright.model.config import ModelConfig, resolve
    from stagewright.run.settings import Run
    from stagewright.texttable import Table
    from stagewright.trace.formats.bundle import Bundle

__version__ = "0.1.0"
__all__ = [
    "Bundle",
    "Compiled",
    "ModelConfig",
    "Run",
    "Table",
    "UserError",
    "__version__",
    "compile",
    "generate",
    "report",
    "resolve",
    "simulate",
]

# Names are imported when first used: `import stagewright` and `stagewright --help` stay quick.
_HOME = {
    "Bundle": "trace.formats.bundle",
    "Compiled": "lower.training",
    "ModelConfig": "model.config",
    "Run": "run.settings",
    "Table": "texttable",
    "UserError": "errors",
    "compile": "api",
    "report": "api",
    "resolve": "model.config",
    "simulate": "api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def generate(
    compiled: Compiled,
    out: str,
    *,
    format: str = "chakra",
    durations: str | None = None,
    astra_sim: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write the trace of every rank into a directory; returns what its manifest.json holds.

    Options are `ranks` (default: all) and those of `stagewright.trace.write.How`. `durations` is a
    CSV of measured kernels (`stagewright.time.measured`). `astra_sim` is the hardware on which
    ASTRA-sim shall run the traces: its configuration and a script are written beside them. The
    manifest has all that repeats the run, and what was checked of the program before it was
    written.
    """
    from stagewright.check.program import check_program
    from stagewright.trace.write import write
    from stagewright.views.summary import manifest

    program = compiled.program
    told = {**manifest(compiled), "checks": check_program(program)}
    if durations is not None:
        from stagewright.time.measured import load, measured

        program, matched = measured(program, load(durations))
        told["durations"] = {"file": durations, **matched.entry()}
    if astra_sim is not None:
        from stagewright.time.astra_sim import beside

        options["beside"] = beside(compiled.run, astra_sim)
        told["astra_sim"] = {"hardware": astra_sim}
    return write(program, out, format=format, manifest=told, **options)
