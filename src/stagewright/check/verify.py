"""Checks a directory of Chakra traces, whoever wrote them: each file, and all ranks together.

Files are read once, by several processes. In `check.files`, `rules` has the rules of one file,
`templates` keeps thousands of ranks of one program cheap, and `world` and `matching` check all
ranks together. With a manifest of Stagewright's beside the traces, checksums must match, and the
files must be what this version makes of the manifest's run.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.arrays import Int
from stagewright.check.bundle import check_bundle
from stagewright.check.files.findings import Finding, Findings
from stagewright.check.files.groups import check_ids, default_groups, read_groups, read_json
from stagewright.check.files.hang import explain
from stagewright.check.files.matching import ALL, check_world
from stagewright.check.files.templates import (
    MOST_COMPARED,
    ReadTask,
    TraceClass,
    TraceSource,
    check_files,
    merge_classes,
)
from stagewright.check.files.world import Match, World, WorldPart, runs_in_order
from stagewright.check.regenerate import difference, program_of
from stagewright.check.report import Report
from stagewright.errors import UserError
from stagewright.executors import cores
from stagewright.files import open_regular
from stagewright.program.columns import TaskKind
from stagewright.trace.formats.archive import is_bundle
from stagewright.trace.manifest import GROUPS, MANIFEST
from stagewright.version import __version__

MOST_EXPLAINED = 20_000_000  # nodes of the dependency run that looks for a deadlock
MOST_MISSING = 1 << 22  # ranks that may lack a file in a directory checked as a whole
FEW_BYTES = 16_000_000  # bytes up to which no further processes are started
TASK_FILES = (
    64  # files of a task at least: to read the first node by node takes as long as to compare these
)

UNMET = ("collectives-differ", "idle-member", "not-member", "no-group", "no-send")

NAME = re.compile(r"(?P<prefix>.+)\.(?P<rank>0|[1-9][0-9]{0,8})\.et")


class TraceFiles(NamedTuple):
    """The traces of a directory, and its manifest."""

    folder: Path
    traces: dict[int, Path]  # by rank, ascending
    manifest: dict[str, Any]  # empty: no manifest of Stagewright's
    damage: str = ""  # why the manifest cannot be read


def verify(
    directory: Path | str, comm_group: Path | str | None = None, *, workers: int | None = None
) -> Report:
    """Check all traces of a directory, or those of `directory/prefix`, or one file, or a bundle.

    `comm_group` is the file of communicator groups, by default the one beside the traces. `workers`
    is the number of processes, by default one per core. What is wrong with the traces is in the
    report; UserError says that the path holds no traces.
    """
    directory = str(directory).removeprefix("file://")  # as `generate` takes it
    if is_bundle(directory):
        return check_bundle(directory)
    began = time.perf_counter()
    files = find(Path(directory))
    report = Report(str(directory), ranks=len(files.traces))
    findings = Findings()
    classes = read(files, workers, digests=bool(files.manifest))
    report.kinds = len(classes)
    report.nodes = sum(traces.first.nodes * len(traces.ranks) for traces in classes)
    report.bytes = sum(traces.sizes for traces in classes)
    report.checks.append("files")
    for traces in classes:
        findings.update(traces.findings())
    if files.damage:
        findings.error("manifest", f"{files.damage}: the checksums of these files are unknown")
    if files.manifest:
        _check_manifest(files, classes, findings, report)
    if Path(directory).is_file() or (len(files.traces) == 1 and not files.manifest):
        report.world_size = 1
        report.skipped.append("groups, messages and the run: this is one rank")
    else:
        _check_together(files, comm_group, classes, findings, report)
    report.findings = sorted(findings, key=lambda found: found.level != "error")
    report.seconds = round(time.perf_counter() - began, 3)
    return report


# ---- files ---------------------------------------------------------------------------------------


def find(path: Path) -> TraceFiles:
    """The traces of a directory, or of `directory/prefix`, or one file."""
    if path.is_file():
        match = NAME.fullmatch(path.name)
        return TraceFiles(path.parent, {int(match["rank"]) if match else 0: path}, {})
    folder, wanted = (path, None) if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir():
        raise UserError(f"{path}: no such directory")
    if wanted is not None and path.exists():
        try:
            open_regular(path).close()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read: {error.strerror}; wanted a directory of traces, a trace "
                "or a bundle"
            ) from None
    by_prefix: dict[str, dict[int, Path]] = {}
    try:
        for entry in folder.iterdir():
            match = NAME.fullmatch(entry.name)
            if match and wanted in (None, match["prefix"]):
                by_prefix.setdefault(match["prefix"], {})[int(match["rank"])] = entry
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not by_prefix:
        raise UserError(f"{path}: holds no traces, that is files such as workload.0.et")
    if len(by_prefix) > 1:
        prefixes = ", ".join(str(folder / prefix) for prefix in sorted(by_prefix)[:4])
        raise UserError(f"{path}: holds traces of several runs; name one of {prefixes}")
    (traces,) = by_prefix.values()
    manifest = folder / MANIFEST
    content: Any = None
    damage = ""
    if manifest.is_file():
        try:
            content = read_json(manifest, len(traces))
        except UserError as error:
            damage = str(error)
    is_ours = isinstance(content, dict) and "stagewright" in content
    listed = cast("dict[str, Any]", content) if is_ours else {}
    return TraceFiles(folder, dict(sorted(traces.items())), listed, damage)


def read(files: TraceFiles, workers: int | None, *, digests: bool) -> list[TraceClass]:
    """Read and check every file."""
    sizes = {rank: _size(path) for rank, path in files.traces.items()}
    by_size = sorted(files.traces, key=lambda rank: (-sizes[rank], rank))
    processes = workers or cores()
    if sum(sizes.values()) < FEW_BYTES or not _may_fork():
        processes = 1
    tasks: list[ReadTask] = []
    for size, ranks in groupby(by_size, key=sizes.__getitem__):
        equal_size = list(ranks)
        fewest = TASK_FILES if size <= MOST_COMPARED else 1
        parts = max(1, min(processes, len(equal_size) // fewest))
        for part in np.array_split(equal_size, parts):
            paths = tuple((rank, files.traces[rank]) for rank in part.tolist())
            tasks.append(ReadTask(paths, digests))
    processes = min(processes, len(tasks))
    results = _in_processes(tasks, processes) if processes > 1 else map(check_files, tasks)
    classes = merge_classes(list(chain.from_iterable(results)))
    return sorted(classes, key=lambda traces: min(traces.ranks))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _may_fork() -> bool:
    # Other ways to start processes import the caller's main program again, which may not expect it;
    # and a fork is safe only while no other thread holds a lock.
    return sys.platform == "linux" and threading.active_count() == 1


def _in_processes(tasks: Sequence[ReadTask], processes: int) -> list[list[TraceClass]]:
    """`check_files` of all tasks, in processes."""
    with warnings.catch_warnings():
        # Python counts the idle threads of numpy's BLAS.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = ProcessPoolExecutor(
            processes, get_context("fork"), initializer=_begin, initargs=(os.getpid(),)
        )
        try:
            return list(pool.map(check_files, tasks))
        except BrokenProcessPool:
            raise UserError(
                "a process that read traces was killed; if memory is short, use one worker"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """Set up a reading process, which ignores Ctrl-C and ends with its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


# ---- Stagewright's manifest ----------------------------------------------------------------------


def _check_manifest(
    files: TraceFiles, classes: Sequence[TraceClass], findings: Findings, report: Report
) -> None:
    """The checksums hold, and the files are what the run in the manifest makes."""
    listed = files.manifest.get("files")
    if not isinstance(listed, dict):
        findings.error("manifest", f"{MANIFEST} lists no files")
        return
    entries = cast("dict[str, Any]", listed)
    digests = {name: digest for traces in classes for name, digest in traces.digests.items()}
    if GROUPS in entries:
        digests |= _digests(files.folder / GROUPS)
    wrong: list[str] = []
    for name, entry in entries.items():
        wanted = cast("dict[str, Any]", entry).get("sha256") if isinstance(entry, dict) else None
        if name in digests and digests[name] != wanted:
            wrong.append(name)
    _report_files(findings, "checksum", wrong, "is not as it was written: its checksum differs")
    # Users may change the configuration files that a simulator reads.
    known = digests.keys() | {path.name for path in files.folder.iterdir() if path.suffix != ".et"}
    known |= {path.name for path in files.traces.values()}
    _report_files(findings, "missing-file", [n for n in entries if n not in known], "is missing")
    extra = [path.name for path in files.traces.values() if path.name not in entries]
    _report_files(findings, "extra-file", extra, f"is not of this run: {MANIFEST} does not list it")
    report.checks.append("checksums")
    if not wrong and digests.keys() >= {path.name for path in files.traces.values()}:
        _check_reproduced(files, classes, findings, report)


def _digests(path: Path) -> dict[str, str]:
    try:
        with open_regular(path) as file:
            return {path.name: hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError:
        return {}


def _report_files(findings: Findings, code: str, names: Sequence[str], text: str) -> None:
    if names:
        shown = names[0] if len(names[0]) < 100 else names[0][:97] + "..."
        findings.error(code, f"{shown!a} {text}", len(names))


def _check_reproduced(
    files: TraceFiles, classes: Sequence[TraceClass], findings: Findings, report: Report
) -> None:
    """The files are what this version makes of the run that the manifest names."""
    if files.manifest.get("stagewright") != __version__ or "run" not in files.manifest:
        report.skipped.append("making the traces again: of another version, or without its run")
        return
    nodes = sum(traces.first.nodes for traces in classes)
    program = program_of(files.folder / MANIFEST, nodes)
    if isinstance(program, str):
        report.skipped.append(f"making the traces again: {program}")
        return
    other = difference(program, classes)
    if other:
        findings.warn("not-as-made", other)
    report.checks.append("made again from the manifest's run")


# ---- all ranks -----------------------------------------------------------------------------------


def _check_together(
    files: TraceFiles,
    comm_group: Path | str | None,
    classes: Sequence[TraceClass],
    findings: Findings,
    report: Report,
) -> None:
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
    groups = _groups(files, comm_group, size, findings)
    parts = parts_of(classes)
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


def parts_of(classes: Sequence[TraceClass]) -> list[WorldPart]:
    """The parts of a world: the trace classes that have no error which prevents a comparison."""
    return [
        WorldPart(
            np.array(traces.ranks),
            traces.first.exchange,
            np.stack(traces.partner),
            TraceSource(traces.first.path),
        )
        for traces in classes
        if traces.first.exchange is not None
    ]


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


def _groups(
    files: TraceFiles, comm_group: Path | str | None, size: int, findings: Findings
) -> dict[int, Int] | None:
    """The communicator groups; None if there is no file of them."""
    if comm_group is not None:
        path = Path(comm_group)
        if not path.exists():
            raise UserError(f"{path}: no such file")
        return read_groups(path, size, findings)
    default = default_groups(next(iter(files.traces.values())))
    return None if default is None else read_groups(default, size, findings)


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
