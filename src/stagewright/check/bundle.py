"""Checks a bundle by its rank classes: nothing is expanded, so a million ranks cost as a thousand.

The file's checksum and form, the program's rules (`program_check`), and that the program is what
this version makes of the run in the manifest.
"""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

import numpy as np

from stagewright.check.files.findings import Findings
from stagewright.check.program import Unsound, check_program
from stagewright.check.regenerate import program_of
from stagewright.check.report import Report
from stagewright.errors import UserError
from stagewright.program.columns import Program, Tasks, Values
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.manifest import counts
from stagewright.version import __version__


def check_bundle(path: Path | str) -> Report:
    """Check a bundle; whatever is wrong with it is in the report."""
    began = time.perf_counter()
    report, findings = Report(str(path), bytes=Path(path).stat().st_size), Findings()
    try:
        source = Bundle(path)
        program = source.program()
    except UserError as error:
        findings.error("damaged", str(error))
    else:
        report.checks += ["checksum", "columns"]
        _check(source, program, report, findings)
    report.findings = sorted(findings, key=lambda finding: finding.level != "error")
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def _check(source: Bundle, program: Program, report: Report, findings: Findings) -> None:
    report.ranks = report.world_size = source.world_size
    report.kinds = len(program.classes)
    report.nodes = sum(
        len(rank_class.tasks) * len(rank_class.ranks) for rank_class in program.classes
    )
    try:
        report.checks += [str(what) for what in check_program(program)["passed"]]  # pyright: ignore
    except (Unsound, UserError) as error:
        findings.error("unsound", str(error))
        return
    manifest = source.manifest
    nodes = counts(program, np.arange(source.world_size))
    if manifest.get("nodes") != nodes or manifest.get("world_size") != source.world_size:
        findings.error("manifest", "the manifest tells of another program")
    if manifest.get("stagewright") != __version__ or "run" not in manifest:
        report.skipped.append("making the program again: of another version, or without its run")
        return
    remade = program_of(source.path, sum(len(rank_class.tasks) for rank_class in program.classes))
    if isinstance(remade, str):
        report.skipped.append(f"making the program again: {remade}")
        return
    # The file of measured durations may be gone.
    differing = difference(program, remade, but="duration")
    if differing:
        findings.warn("not-as-made", f"{differing} is not what this version makes of the run")
    report.checks.append("made again from the manifest's run")


def difference(one: Program, two: Program, *, but: str = "") -> str:
    """The first difference between programs, in words; column `but` is not compared."""
    for name in ("mesh", "communicators", "peers"):
        if getattr(one, name) != getattr(two, name):
            return name
    if len(one.classes) != len(two.classes):
        return "the number of rank classes"
    for a, b in zip(one.classes, two.classes, strict=True):
        compared = [
            (a, b, ("ranks", "pipeline_rank", "memory")),
            (a.tasks, b.tasks, tuple(field.name for field in fields(Tasks))),
            (a.values, b.values, tuple(field.name for field in fields(Values))),
        ]
        for x, y, names in compared:
            for name in names:
                if name != but and not _same(getattr(x, name), getattr(y, name)):
                    return f"{name} of pipeline rank {a.pipeline_rank}"
    return ""


def _same(one: object, two: object) -> bool:
    """True if two fields are equal."""
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return np.array_equal(one, two)  # pyright: ignore
    return one == two
