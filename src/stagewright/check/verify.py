"""Checks traces, whoever wrote them, or a bundle: each file, and all ranks together.

Files are read once, by several processes. In `check.files`, `rules` has the rules of one file,
`traces` keeps thousands of ranks of one program cheap, and `world` and `matching` check all ranks
together. With a manifest of Stagewright's beside the traces, checksums must match, and the files
must be what this version makes of the manifest's run.

A bundle is checked by its rank classes, and nothing is expanded, so a million ranks cost as a
thousand: the file's checksum and form, the program's rules (`check.program`), and that the program
is what this version makes of the run in the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from stagewright.arrays import Int
from stagewright.check.files.groups import check_ids, default_groups, read_groups
from stagewright.check.files.hang import explain
from stagewright.check.files.matching import ALL, check_world
from stagewright.check.files.traces import TraceClass, TraceFiles, digest_of, find, parts_of, read
from stagewright.check.files.world import Match, World, WorldPart, runs_in_order
from stagewright.check.program import Unsound, check_program
from stagewright.check.regenerate import changed_file, difference, program_of
from stagewright.check.report import Finding, Findings, Report
from stagewright.errors import UserError
from stagewright.program.columns import Program, TaskKind
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.manifest import GROUPS, MANIFEST, counts
from stagewright.version import __version__

MOST_EXPLAINED = 20_000_000  # nodes of the dependency run that looks for a deadlock
MOST_MISSING = 1 << 22  # ranks that may lack a file in a directory checked as a whole

UNMET = ("collectives-differ", "idle-member", "not-member", "no-group", "no-send")


def verify(
    directory: Path | str, comm_group: Path | str | None = None, *, workers: int | None = None
) -> Report:
    """Check all traces of a directory, or those of `directory/prefix`, or one file, or a bundle.

    `comm_group` is the file of communicator groups, by default the one beside the traces. `workers`
    is the number of processes, by default one per core. What is wrong with the traces is in the
    report; UserError says that the path holds no traces.
    """
    directory = str(directory).removeprefix("file://")  # as `generate` takes it
    began = time.perf_counter()
    report, findings = Report(directory), Findings()
    if is_bundle(directory):
        _check_bundle(Path(directory), report, findings)
    else:
        files = find(Path(directory))
        classes = read(files, workers, digests=bool(files.manifest))
        _TraceCheck(files, classes, report, findings).run(comm_group)
    report.findings = sorted(findings, key=lambda found: found.level != "error")
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def _check_bundle(path: Path, report: Report, findings: Findings) -> None:
    report.bytes = path.stat().st_size
    try:
        source = Bundle(path)
        program = source.program()
    except UserError as error:
        findings.error("damaged", str(error))
        return
    report.checks += ["checksum", "columns"]
    report.ranks = report.world_size = source.world_size
    report.kinds = len(program.classes)
    report.nodes = sum(len(of.tasks) * len(of.ranks) for of in program.classes)
    try:
        report.checks += [str(what) for what in check_program(program)["passed"]]  # pyright: ignore
    except (Unsound, UserError) as error:
        findings.error("unsound", str(error))
        return
    manifest = source.manifest
    nodes = counts(program, np.arange(source.world_size))
    if manifest.get("nodes") != nodes or manifest.get("world_size") != source.world_size:
        findings.error("manifest", "the manifest tells of another program")
    rows = sum(len(rank_class.tasks) for rank_class in program.classes)
    remade = _remade(path, manifest, rows, "the program", report)
    # The file of measured durations may be gone.
    if remade is not None and (differing := difference(program, remade, but="duration")):
        findings.warn("not-as-made", f"{differing} is not what this version makes of the run")


def _remade(
    path: Path, manifest: Mapping[str, Any], nodes: int, what: str, report: Report
) -> Program | None:
    """The program of the run in a manifest; None, with a note in the report, if there is none."""
    if manifest.get("stagewright") != __version__ or "run" not in manifest:
        report.skipped.append(f"making {what} again: of another version, or without its run")
        return None
    program = program_of(path, nodes)
    if isinstance(program, str):
        report.skipped.append(f"making {what} again: {program}")
        return None
    report.checks.append("made again from the manifest's run")
    return program


@dataclass(slots=True)
class _TraceCheck:
    """The check of files that have been read."""

    files: TraceFiles
    classes: Sequence[TraceClass]
    report: Report
    findings: Findings

    def run(self, comm_group: Path | str | None) -> None:
        files, report = self.files, self.report
        report.ranks, report.kinds = len(files.traces), len(self.classes)
        report.nodes = sum(of.first.nodes * len(of.ranks) for of in self.classes)
        report.bytes = sum(traces.sizes for traces in self.classes)
        report.checks.append("files")
        for traces in self.classes:
            self.findings.update(traces.findings())
        if files.damage:
            text = f"{files.damage}: the checksums of these files are unknown"
            self.findings.error("manifest", text)
        if files.manifest:
            self.check_manifest()
        if files.single or (len(files.traces) == 1 and not files.manifest):
            report.world_size = 1
            report.skipped.append("groups, messages and the run: this is one rank")
        else:
            self.check_together(comm_group)

    # ---- Stagewright's manifest ------------------------------------------------------------------

    def check_manifest(self) -> None:
        """The checksums hold, and the files are what the run in the manifest makes."""
        files, findings = self.files, self.findings
        listed = files.manifest.get("files")
        if not isinstance(listed, dict):
            findings.error("manifest", f"{MANIFEST} lists no files")
            return
        entries = cast("dict[str, Any]", listed)
        digests = {name: digest for of in self.classes for name, digest in of.digests.items()}
        if GROUPS in entries:
            digests |= digest_of(files.folder / GROUPS)
        wrong: list[str] = []
        for name, entry in entries.items():
            wanted = cast("dict[str, Any]", entry).get("sha256") if isinstance(entry, dict) else ""
            if name in digests and digests[name] != wanted:
                wrong.append(name)
        self.report_files("checksum", wrong, "is not as it was written: its checksum differs")
        traces = {rank: path.name for rank, path in files.traces.items()}
        # Users may change the configuration files that a simulator reads.
        known = {*digests, *traces.values()}
        known |= {path.name for path in files.folder.iterdir() if path.suffix != ".et"}
        self.report_files("missing-file", [n for n in entries if n not in known], "is missing")
        extra = [name for name in traces.values() if name not in entries]
        text = f"is not of this run: {MANIFEST} does not list it"
        self.report_files("extra-file", extra, text)
        self.report.checks.append("checksums")
        if wrong or not digests.keys() >= {*traces.values()}:
            return
        nodes = sum(of.first.nodes for of in self.classes)
        path = files.folder / MANIFEST
        program = _remade(path, files.manifest, nodes, "the traces", self.report)
        if program and (other := changed_file(program, files.manifest, traces, digests)):
            findings.warn("not-as-made", other)

    def report_files(self, code: str, names: Sequence[str], text: str) -> None:
        if names:
            shown = names[0] if len(names[0]) < 100 else names[0][:97] + "..."
            self.findings.error(code, f"{shown!a} {text}", len(names))

    # ---- all ranks -------------------------------------------------------------------------------

    def check_together(self, comm_group: Path | str | None) -> None:
        """Check groups, messages and the run of all ranks."""
        files, findings, report = self.files, self.findings, self.report
        size = max(files.traces) + 1
        world_size = files.manifest.get("world_size")
        partial = (
            isinstance(world_size, int)
            and size <= world_size <= 1 << 24
            and world_size > len(files.traces)
        )
        if partial:
            size = cast("int", world_size)
        report.world_size = size
        missing = 0 if partial else size - len(files.traces)
        if missing:
            first = next(
                expected for expected, rank in enumerate((*files.traces, -1)) if expected != rank
            )
            text = f"rank {first} has no file, but rank {size - 1} has"
            findings.error("missing-rank", text, missing)
        if missing > MOST_MISSING:
            report.skipped.append("groups, messages and the run: nearly all ranks are missing")
            return
        groups = self.groups(comm_group, size)
        parts = parts_of(self.classes)
        if not parts:
            report.skipped.append("groups, messages and the run: no rank could be read whole")
            return
        if groups is None and any(_names_groups(part) for part in parts):
            findings.warn(
                "no-groups",
                f"there is no {GROUPS} (see --comm-group): groups are taken to be who uses them",
            )
        world = World(parts, size, groups, findings)
        match = check_world(world)
        report.checks += ["groups", "messages"]
        _check_order(world)
        if groups is not None:
            check_ids(world, groups)
        _check_run(world, match, len(files.traces), report)

    def groups(self, comm_group: Path | str | None, size: int) -> dict[int, Int] | None:
        """The communicator groups; None if there is no file of them."""
        if comm_group is None:
            default = default_groups(next(iter(self.files.traces.values())))
            return None if default is None else read_groups(default, size, self.findings)
        if not Path(comm_group).exists():
            raise UserError(f"{comm_group}: no such file")
        return read_groups(Path(comm_group), size, self.findings)


def _names_groups(part: WorldPart) -> bool:
    """True if a trace has collectives on a group smaller than all ranks."""
    return bool((part.partner[:, part.exchange.slot_kind == TaskKind.COLLECTIVE] != ALL).any())


def _check_run(world: World, match: Match, files: int, report: Report) -> None:
    """Check that all ranks run to their end; report a deadlock otherwise."""
    findings = world.findings
    if not world.whole:
        present = int((world.part_of >= 0).sum())
        why = "could be read whole" if present < files else "are here"
        report.skipped.append(f"the run: only {present} of {world.size} ranks {why}")
        return
    report.checks.append("run")
    if runs_in_order(world, match) and not any(code in findings for code in UNMET):
        return
    if sum(part.exchange.events.row.max(initial=0) for part in world.parts) > MOST_EXPLAINED:
        findings.error("hang", "it does not run to its end; it is too large to say why")
        return
    why = explain(world, match)
    if why is not None:
        findings.error("hang", f"it never ends: {why}")


def _check_order(world: World) -> None:
    """Report ranks in which dependencies leave the order of communication open."""
    unordered = [part for part in world.parts if part.exchange.breaks.pairs]
    if not unordered:
        return
    part = unordered[0]
    pairs, one, two = part.exchange.breaks
    text = (
        f"rank {part.ranks[0]}: nothing orders {part.source.label(one)} and "
        f"{part.source.label(two)}{f', nor {pairs - 1} more pairs' if pairs > 1 else ''}: ranks "
        "that run one communication at a time may choose differently, and then wait for ever"
    )
    count = sum(len(part.ranks) for part in unordered)
    world.findings.add(Finding("warning", "order-left-to-timing", text, nodes=pairs, ranks=count))
