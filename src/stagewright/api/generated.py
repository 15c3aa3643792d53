"""Traces of a compiled run: what `stagewright.generate` writes."""

from __future__ import annotations

import os
from typing import Any, cast

from stagewright.api.result import path_text
from stagewright.api.simulated import simulate
from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.time.astra_sim import adapted, configuration_files
from stagewright.time.measured import load, measured
from stagewright.trace.run_manifest import manifest
from stagewright.trace.write import write
from stagewright.views import kineto


def generate(
    compiled: CompiledRun,
    out: str | os.PathLike[str],
    *,
    format: str = "chakra",
    durations: str | None = None,
    astra_sim: str | None = None,
    cluster: ClusterSection | None = None,
    execution: Execution | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write the trace of every rank into a directory; returns what its manifest.json holds.

    Options are those of `stagewright generate`, such as `ranks` (default: all), `workers`, `force`.
    The format `kineto` is a step simulated on the hardware of `cluster`, as the profiler of PyTorch
    records one; its `ranks` are by default one of each timing.
    `durations` is the path of a CSV of measured kernels. `astra_sim` is the
    hardware on which ASTRA-sim shall run the traces: its configuration and a script are written
    beside them. The manifest has all that repeats the run, and what was checked of the program
    before it was written. Raises `UserError` if `out` exists or cannot be written; nothing is left
    then.

    >>> import stagewright as sw, tempfile
    >>> compiled = sw.compile("gpt2", layers=2, seq_length=8, tp=2)
    >>> manifest = sw.generate(compiled, tempfile.mkdtemp() + "/traces")
    >>> manifest["world_size"], len(manifest["files"])
    (2, 3)
    """
    if not isinstance(cast("object", compiled), CompiledRun):
        raise UserError(f"got {compiled!r}, wanted the result of compile")
    out, program = path_text(out, "the path of a folder"), compiled.program
    record = {**manifest(compiled, cluster, execution), "checks": check_program(program)}
    if format == "kineto":
        step = simulate(compiled, cluster or ClusterSection(), execution=execution)
        if options.get("ranks") is None:
            options["ranks"] = [int(lane.ranks[0]) for lane in step.timeline.lanes]
        custom = kineto.format_of(step.timeline, step.machine.hardware)
        return write(program, out, format=format, manifest=record, custom=custom, **options)
    if durations is not None:
        program, coverage = measured(program, load(durations))
        record["durations"] = {"file": durations, **coverage.entry()}
    if astra_sim is not None:
        options["extra_files"] = configuration_files(compiled.run, astra_sim)
        program, record["astra_sim"] = adapted(program, astra_sim)
    return write(program, out, format=format, manifest=record, **options)
