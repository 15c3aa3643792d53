"""What a compiled run holds, in numbers: one JSON-able object, and the same as tables to read.

`summary` has the keys `model`, `run` (what was asked for, as text), `world_size`, `microbatches`,
`parameters` (`total`, `active` per token; where not all train also `trainable`, and `adapters`,
which `total` leaves out) and `rank_classes`. Ranks of a class run the same
program; each class has

- `ranks`: every rank of the class, ascending; `stage`: its pipeline rank, which several classes
  have where experts have loads of their own; `layers`: how many layers it holds; `tasks`: the rows
  of its program
- `flops`: per phase (forward, recompute, backward, optimizer), 2 per multiply-add, of one rank
- `collectives`: what one rank takes part in, one entry per phase, kind, communicator and data type:
  `axis` (the mesh axes of the group, `+` between them), `group_size`, `dtype`, `count` and `bytes`,
  summed over the step; bytes of the local input (all_gather: the shard that a rank gives)
- `sends` and `receives`: one entry per phase and mesh axis, with `count` and `bytes`; with offload
  also `stores` and `loads`, to and from the memory of the host, by phase
- `memory`: bytes of one rank by category (`program.columns.CATEGORIES`) while most is held, and
  their sum, `peak`; with `memory_allowance`, beside them `allowance`
- `memory_peak`: that moment: `row`, `task`, `phase`, `layer` (-1: none), `microbatch` (-1: once per
  step), and `alive`, what is there: values of one name together, the largest first, each with
  `category`, `name`, `layers`, `microbatches`, `instances` and `bytes`
- `memory_timeline`: bytes by category over the rows of the program in few points, the largest of
  each stretch of rows: `rows`, and `bytes`, a list for each category

All bytes and FLOPs are exact integers of one step.

In inference there are also `mode`; `batch`: `requests` of the step, their new `tokens`, and the
`cached_tokens` that were there before (and `source_tokens` of their encoder); and, where
`device_memory` is given, `capacity`: whether the step `fits`, the most `requests` that do, and how
many `tokens` each of the step's may have.

Where the checkpoint decides how matrices are stored there is also `weights`: its `quant_method`,
and `formats`, the data types besides that of the computation. `stored` has in every run of
inference the data types of `weights`, and that of the `kv_cache` (null where there is none).

Where `device_memory` or hardware is given there is also `fit`: whether the step `fits`,
`device_memory`, the `peak` of the fullest rank, its `pipeline_rank`, and its bytes `by_category`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stagewright.arrays import Int, exact_sum
from stagewright.lower import weight_storage
from stagewright.lower.compiled_run import Capacity, CompiledRun
from stagewright.numbers import plural, quantity, side_by_side
from stagewright.program import memory
from stagewright.program.columns import (
    CATEGORIES,
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)
from stagewright.run import lengths
from stagewright.run.requests import groups
from stagewright.texttable import Table
from stagewright.trace.traced_bundle import TracedBundle
from stagewright.views.tables import communication, compute, peak
from stagewright.views.tables import memory as held

Summary = dict[str, Any]


def summary(compiled: CompiledRun) -> Summary:
    """What the ranks of a run compute, exchange and hold; the keys are described above."""
    program = compiled.program
    return {
        "model": compiled.model.name,
        "run": compiled.run.describe(),
        "world_size": program.mesh.world_size,
        "microbatches": compiled.run.microbatches,
        "parameters": {
            "total": compiled.parameters,
            "active": compiled.active_parameters,
            **(compiled.trained._asdict() if compiled.trained else {}),
        },
        **(_served(compiled) if compiled.run.mode != "train" else {}),
        **({"fit": compiled.fit.entry()} if compiled.fit else {}),
        "rank_classes": [rank_class(program, of) for of in program.classes],
    }


def traced_summary(traced: TracedBundle) -> Summary:
    """The same of a recorded graph of one rank, which `import` wrote as a bundle."""
    program = traced.program
    return {
        "model": traced.name,
        "run": traced.describe(),
        "world_size": program.mesh.world_size,
        "microbatches": 1,
        "parameters": {"total": traced.parameters, "active": traced.parameters},
        "rank_classes": [rank_class(program, of) for of in program.classes],
    }


def _served(compiled: CompiledRun) -> Summary:
    asked, source = groups(compiled.run), compiled.run.source_length
    return {
        "mode": compiled.run.mode,
        "batch": {
            "requests": lengths.count_requests(asked),
            "tokens": sum(g.count * (g.new_tokens or 0) for g in asked),
            "cached_tokens": sum(g.count * (g.context_length or 0) for g in asked),
            **({"source_tokens": lengths.count_requests(asked) * source} if source else {}),
        },
        **_weights(compiled),
        **held_in_memory(compiled),
    }


def held_in_memory(compiled: CompiledRun) -> Summary:
    """What an inference step says of memory: `stored`, and `capacity` where a device is known."""
    fitting = compiled.capacity
    capacity = {"capacity": fitting._asdict()} if fitting else {}
    return {"stored": _stored(compiled), **capacity}


def _stored(compiled: CompiledRun) -> Summary:
    """The data types of weights and, where there is one, of the KV cache."""
    cached = any(of.memory.get("kv_cache") for of in compiled.program.classes)
    return {
        "weights": weight_storage.weight_formats(compiled.run, compiled.model),
        "kv_cache": compiled.run.kv_cache_dtype if cached else None,
    }


def stored_line(compiled: CompiledRun) -> str:
    """In which precision a run of inference stores weights and its KV cache."""
    return _stored_line(_stored(compiled), _weights(compiled).get("weights"))


def _stored_line(stored: Summary, checkpoint: Summary | None) -> str:
    line = f"weights in {' and '.join(stored['weights'])}"
    if checkpoint is not None:
        line += f", as the checkpoint ({checkpoint['quant_method']}) has them"
    return line + (f", KV cache in {stored['kv_cache']}" if stored["kv_cache"] else "")


def _weights(compiled: CompiledRun) -> Summary:
    """How the checkpoint stores matrices, where it decides that; nothing where all are alike."""
    given = weight_storage.checkpoint(compiled.run, compiled.model)
    if given is None or not given.formats:
        return {}
    formats = list(dict.fromkeys(weight_storage.name(stored) for stored in given.formats))
    return {"weights": {"quant_method": given.method, "formats": formats}}


def rank_class(program: Program, of: RankClass) -> dict[str, Any]:
    """An entry of `rank_classes`."""
    tasks = of.tasks
    return {
        "ranks": [int(rank) for rank in of.ranks],
        "stage": of.pipeline_rank,
        "layers": len(np.unique(tasks.layer[tasks.layer >= 0])),
        "tasks": len(tasks),
        "flops": {
            phase: exact_sum(tasks.flops[tasks.phase == index])
            for index, phase in enumerate(PHASES)
        },
        "collectives": _collectives(program, tasks),
        "sends": _exchanges(program, tasks, TaskKind.SEND),
        "receives": _exchanges(program, tasks, TaskKind.RECV),
        **_copies(tasks),
        "memory": {category: int(size) for category, size in of.memory.items()},
        **_over_time(of),
    }


POINTS = 64
"""Of a timeline in JSON."""


def _over_time(of: RankClass) -> dict[str, Any]:
    """The timeline and the peak; nothing in inference, where all is held all the time."""
    tasks, values = of.tasks, of.values
    if not len(values.value):
        return {}
    row = of.work.changes.peak_row
    points = memory.samples(of, POINTS)
    held = {name: by.tolist() for name, by in zip(CATEGORIES, points.held, strict=True) if by.any()}
    return {
        "memory_peak": {
            "row": row,
            "task": tasks.names[tasks.name[row]],
            "phase": PHASES[tasks.phase[row]],
            "layer": int(tasks.layer[row]),
            "microbatch": int(tasks.microbatch[row]),
            "alive": [
                g._asdict() | {"layers": list(g.layers), "microbatches": list(g.microbatches)}
                for g in memory.groups_alive(values, row)
            ],
        },
        "memory_timeline": {"rows": points.rows.tolist(), "bytes": held},
    }


def _collectives(program: Program, tasks: Tasks) -> list[dict[str, Any]]:
    rows = np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE)
    keys = (tasks.phase, tasks.collective, tasks.slot, tasks.dtype)
    found: list[dict[str, Any]] = []
    for (phase, kind, slot, dtype), count, size in _grouped(rows, keys, tasks.local_bytes):
        who = program.communicators[slot]
        found.append(
            {
                "phase": PHASES[phase],
                "kind": COLLECTIVES[kind],
                "axis": program.label_of(slot),
                "group_size": program.mesh.size(*who.axes) if who.only is None else len(who.only),
                "dtype": tasks.dtypes[dtype],
                "count": count,
                "bytes": size,
            }
        )
    return found


def _copies(tasks: Tasks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (("stores", TaskKind.STORE), ("loads", TaskKind.LOAD)):
        rows = np.flatnonzero(tasks.kind == kind)
        if len(rows):
            found[name] = [
                {"phase": PHASES[phase], "count": count, "bytes": size}
                for (phase,), count, size in _grouped(rows, (tasks.phase,), tasks.comm_bytes)
            ]
    return found


def _exchanges(program: Program, tasks: Tasks, kind: TaskKind) -> list[dict[str, Any]]:
    rows = np.flatnonzero(tasks.kind == kind)
    # Peers of one axis (the next and the previous rank) are one line of a report.
    axes = sorted({peer.axis for peer in program.peers})
    axis_of = np.array([axes.index(peer.axis) for peer in program.peers] or [0], dtype=np.int64)
    axis = axis_of[np.where(tasks.kind == kind, tasks.slot, 0)]
    return [
        {"phase": PHASES[phase], "axis": axes[at], "count": count, "bytes": size}
        for (phase, at), count, size in _grouped(rows, (tasks.phase, axis), tasks.comm_bytes)
    ]


def _grouped(
    rows: Int, keys: Sequence[np.ndarray[Any, Any]], sizes: Int
) -> Iterable[tuple[tuple[int, ...], int, int]]:
    """For each combination of keys among `rows`, ascending: the keys, how many rows, all bytes."""
    if not len(rows):
        return
    table = np.stack([key[rows].astype(np.int64) for key in keys])
    order = np.lexsort(table[::-1])
    table, rows = table[:, order], rows[order]
    starts = [0, *(np.flatnonzero(np.any(table[:, 1:] != table[:, :-1], axis=0)) + 1)]
    for first, last in zip(starts, [*starts[1:], len(rows)], strict=True):
        key = tuple(int(value) for value in table[:, first])
        yield key, int(last - first), exact_sum(sizes[rows[first:last]])


# ---- tables --------------------------------------------------------------------------------------


def summary_text(of: Summary) -> Iterator[str | Table]:
    """Lines and tables of a summary: numbers of one rank and one step."""
    parameters = of["parameters"]
    active = f" ({parameters['active']:,} active per token)"
    sparse = parameters["active"] != parameters["total"]
    yield of["run"]
    yield (
        f"{parameters['total']:,} parameters{active if sparse else ''}{_trained(parameters)}, "
        f"{plural(of['world_size'], 'rank', 'ranks')}, "
        f"{plural(of['microbatches'], 'microbatch', 'microbatches')} per step; "
        "every number below is of one rank and one step"
    )
    if "batch" in of:
        yield _batch_line(of)
    if "fit" in of and "capacity" not in of:
        yield _fit_line(of["fit"])
    yield from filter(len, (table(of) for table in (compute, held, peak, communication)))


def _trained(parameters: Summary) -> str:
    """How many parameters train, of the model's and those of adapters, where not all do."""
    if "trainable" not in parameters:
        return ""
    trainable, adapters = parameters["trainable"], parameters["adapters"]
    share = trainable / (parameters["total"] + adapters)
    beside = f" and {adapters:,} of adapters" if adapters else ""
    return f"{beside}, of which {trainable:,} train ({share:.4%})"


def _fit_line(fit: Summary) -> str:
    held, room = side_by_side(fit["peak"], fit["device_memory"], "B")
    left_out = fit.get("upper_bound_without")
    verdict = f"an upper bound without {left_out}" if left_out else "this step does not fit"
    return f"at most {held} of {room}" + ("" if fit["fits"] else f": {verdict}")


def _batch_line(of: Summary) -> str:
    step, fitting = of["batch"], of.get("capacity")
    line = (
        f"{of['mode']}: {plural(step['requests'], 'request', 'requests')}, "
        f"{step['tokens']:,} new tokens, {step['cached_tokens']:,} in the cache before"
    )
    if "source_tokens" in step:
        line += f", {step['source_tokens']:,} of their sources"
    line += f"\n{_stored_line(of['stored'], of.get('weights'))}"
    if fitting is None:
        return line
    fits = "" if fitting["fits"] else ": this step does not fit"
    return f"{line}\n{hold_line(Capacity(**fitting))}{fits}"


def hold_line(of: Capacity) -> str:
    """How many requests such as those of a step fit, and how long those of the step may be."""
    most = f"{quantity(of.device_memory, 'B')} hold {of.requests:,} such requests"
    return most + (f", or these with up to {of.tokens:,} tokens each" if of.tokens else "")
