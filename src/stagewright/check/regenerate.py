"""Compiles the run in a manifest again, to compare the program with the traces or the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.errors import UserError
from stagewright.executors import Threads
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, Tasks, Values
from stagewright.time.astra_sim import with_least_bytes
from stagewright.trace.formats import chakra
from stagewright.trace.run_manifest import least_bytes, load_model, read_experiment
from stagewright.trace.templates import Share, most_at_once, shares
from stagewright.trace.write import provenance


def program_of(manifest: Path, nodes: int) -> Program | str:
    """The program of the run in a manifest, or why there is none.

    `nodes` is the number in the traces: a run that would make far more nodes is not compiled.
    """
    try:
        run, model = read_experiment(manifest).run, load_model(manifest)
        if model is not None:
            run = run.resolved(model)
            if run.microbatches * (run.layers or model.num_layers) > 64 * nodes:
                return "the manifest is of a larger run"
        program = compile(run, model).program
        least = least_bytes(manifest)
        return with_least_bytes(program, least) if least else program
    except UserError as error:
        return str(error)
    except Exception as error:  # a damaged manifest may hold any numbers
        return f"the manifest's run cannot be compiled: {type(error).__name__}: {error}"


def changed_file(
    program: Program,
    manifest: Mapping[str, Any],
    names: Mapping[int, str],
    digests: Mapping[str, str],
) -> str:
    """The first file that is not what a program makes, in words; empty if all files are.

    `names` of the files by rank, and their checksums.
    """
    if max(names) >= program.mesh.world_size:
        return f"rank {max(names)} is not in the run of the manifest"
    made: dict[int, str] = {}
    batches = chakra.plan(program, np.array(sorted(names)), provenance(program, manifest))
    Threads(most_at_once=most_at_once).run(_digests, shares(batches), made.update)
    for rank, name in sorted(names.items()):
        if made[rank] != digests[name]:
            return f"{name} is not what this version makes of the manifest's run"
    return ""


def _digests(share: Share) -> dict[int, str]:
    """Checksums of the files of a share, by rank."""
    digests: dict[int, str] = {}
    for rank in share.ranks.tolist():
        with share.template.stamped(rank) as data:
            digests[rank] = hashlib.sha256(data).hexdigest()
    return digests


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
