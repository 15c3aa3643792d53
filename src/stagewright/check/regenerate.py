"""Compiles the run in a manifest again, to compare the program with the traces beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stagewright.check.files.reader import TraceReader
from stagewright.check.files.templates import TraceClass
from stagewright.errors import UserError
from stagewright.files import open_regular
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, TaskKind
from stagewright.time.astra_sim import with_least_bytes
from stagewright.trace.formats.chakra import encode
from stagewright.trace.formats.et_def import values
from stagewright.trace.recorded import least_bytes, load_experiment, recorded_model


def program_of(manifest: Path, nodes: int) -> Program | str:
    """The program of the run in a manifest, or why there is none.

    `nodes` is the number in the traces: a run that would make far more nodes is not compiled.
    """
    try:
        run, model = load_experiment(manifest).run, recorded_model(manifest)
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


def difference(program: Program, classes: Sequence[TraceClass]) -> str:
    """The first difference between traces and program, in words; empty if they agree."""
    for traces in classes:
        rank = traces.ranks[0]
        if rank >= program.mesh.world_size:
            return f"rank {rank} is not in the run of the manifest"
        path = traces.first.path
        with open_regular(path) as file:
            same = file.read() == encode(program, rank, _provenance(path))
        if not same:
            return f"{path.name} is not what this version makes of the manifest's run"
        other = _wrong_partner(program, traces)
        if other is not None:
            return f"rank {other} has other partners than the manifest's run gives it"
    return ""


def _provenance(path: Path) -> dict[str, str | int]:
    """The origin in a trace's metadata, without the entry that the writer adds itself."""
    reader = TraceReader(path)
    reader.close()
    entries = {name: value for name, (_, value) in values(reader.metadata).items()}
    entries.pop("pipeline_rank", None)
    return entries


def _wrong_partner(program: Program, traces: TraceClass) -> int | None:
    """A rank with other partners than in the program; the first rank of the class is right."""
    if traces.first.exchange is None:
        return None
    rank = traces.ranks[0]
    ranks = np.array(traces.ranks)
    (rank_class,) = (rank_class for rank_class in program.classes if rank in rank_class.ranks)
    if not np.isin(ranks, rank_class.ranks).all():
        return int(ranks[~np.isin(ranks, rank_class.ranks)][0])
    events, partner = traces.first.exchange.events, np.stack(traces.partner)
    pairs = np.stack([events.slot, rank_class.tasks.slot[events.row].astype(np.int64)], axis=1)
    for slot, planned in np.unique(pairs, axis=0).tolist():
        collective = traces.first.exchange.slot_kind[slot] == TaskKind.COLLECTIVE
        wanted = (program.group_of if collective else program.peer_of)(planned, ranks)
        wrong = np.flatnonzero(wanted != partner[:, slot])
        if len(wrong):
            return int(ranks[wrong[0]])
    return None
