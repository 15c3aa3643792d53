"""Structures held against runs compiled alone: every kernel, number by number.

The draws are those of `sweep.py`, each with neighbours that differ in numbers. For more, with
another seed:

    python tests/structures.py 10000 7
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import sweep
from stagewright.errors import UserError
from stagewright.explore.candidates import Candidates, Column
from stagewright.explore.structures import Structure, structures
from stagewright.lower.kernels import Kernel
from stagewright.lower.training import TrainingStep
from stagewright.model.catalog import resolve
from stagewright.run.experiment import Experiment
from stagewright.run.rules import check
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve as hardware_of

NEIGHBOURS = 8


def neighbours(dice: random.Random) -> Candidates | None:
    """A drawn run and others that differ from it in numbers; None: the run cannot be had."""
    settings = sweep.draw(dice)
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        run = Run(**settings)
        model = resolve(run.model).with_overrides(run.layers, run.vocab, run.mtp_num_layers)
        if run.mode != "train":
            return None
        check(run.resolved(model), model)
    except UserError:
        return None
    step = (run.global_batch_size or 1) // (run.micro_batch_size * run.dp)
    rows: list[dict[str, int]] = []
    for nth in range(NEIGHBOURS):
        times = [dice.choice((1, 1, 2, 3)) if nth else 1 for _ in range(4)]
        row = {
            "tp": run.tp * times[0],
            "cp": run.cp * times[1],
            "dp": run.dp * times[2],
            "micro_batch_size": run.micro_batch_size * times[3],
            "seq_length": (run.seq_length or 1) * times[0] * times[1] * dice.choice((1, 2)),
        }
        row["global_batch_size"] = row["micro_batch_size"] * row["dp"] * step
        if run.dp_shard is not None:
            row["dp_shard"] = run.dp_shard * dice.choice((1, times[2]))
        other = run.model_copy(update=row)
        try:
            check(other.resolved(model), model)
        except UserError:
            continue
        rows.append(row)
    columns = {name: Column.of([row[name] for row in rows]) for name in rows[0]}
    base = Experiment(run, ClusterSection(), Execution())
    return Candidates.of(base, hardware_of("h100-sxm"), columns, model)


def differences(candidates: Candidates, structure: Structure) -> Iterator[str]:
    """Where the kernels of a structure are not those of its candidates compiled alone."""
    for candidate, at in zip(structure.candidates, structure.index, strict=True):
        run = candidates.run(int(candidate)).resolved(candidates.model)
        step = TrainingStep.of(run, candidates.model, {})
        routing = step.routing
        extent = step.extent(routing.even() if routing else None)
        for variant in step.variants:
            alone = step.lower_block(variant, step.shard(variant), extent)
            late = structure.variants[variant].block
            where = f"{run.describe()}: {variant.block}"
            if len(alone.tasks) != len(late.tasks):
                yield f"{where}: {len(alone.tasks)} tasks, not {len(late.tasks)}"
                continue
            number = {t: i for i, t in enumerate(alone.tasks)}
            late_number = {t: i for i, t in enumerate(late.tasks)}
            for a, b in zip(alone.tasks, late.tasks, strict=True):
                one, other = facts(a, number, 0), facts(b, late_number, int(at))
                for name, value in one.items():
                    if value != other[name]:
                        yield f"{where} {a.name}: {name} is {value}, not {other[name]}"
            for n, m in zip(alone.graph, late.graph, strict=True):
                if alone.size[n] != at_tuple(late.size[m], int(at)):
                    yield f"{where} {n}: {alone.size[n]} bytes, not {late.size[m]}"
            one = dict(alone.permanent)
            other = {k: at_tuple(v, int(at)) for k, v in late.permanent.items()}
            if one != other:
                yield f"{where}: permanent bytes are {one}, not {other}"


def facts(t: Kernel, number: Mapping[Kernel, int], at: int) -> dict[str, Any]:
    """All that is known of a kernel, with the numbers of one tuple."""
    extents = t.shape and tuple((x, at_tuple(size, at)) for x, size in t.shape.extents)
    return {
        "name": t.name, "op": t.op, "kind": t.kind, "phase": t.phase, "part": t.part,
        "flops": at_tuple(t.flops, at), "traffic": at_tuple(t.traffic, at),
        "comm_bytes": at_tuple(t.comm_bytes, at), "axes": t.axes, "shift": t.shift,
        "dtype": t.dtype, "shape": t.shape and (t.shape.kernel, extents, t.shape.joint),
        "deps": [number.get(d, d) if isinstance(d, Kernel) else d for d in t.deps],
        "made": [n.name or n.op for n in t.made], "reads": [n.name or n.op for n in t.reads],
    }  # fmt: skip


def at_tuple(number: Any, at: int) -> Any:
    """The number of one tuple."""
    array = np.asarray(number)
    return array[at].item() if array.ndim else array.item()


def compare(runs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many candidates went which way, and all differences."""
    dice = random.Random(seed)
    count: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(runs):
        candidates = neighbours(dice)
        if candidates is None:
            continue
        count["candidates"] += len(candidates)
        found, refused = structures(candidates)
        for one in refused:
            count[one.reason if one.possible else f"refused: {one.reason}"] += len(one.candidates)
        for structure in found:
            count["structures"] += 1
            count["in columns"] += len(structure.candidates)
            wrong += differences(candidates, structure)
    return count, wrong


if __name__ == "__main__":
    counted, found_wrong = compare(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    for reason, number in counted.most_common():
        print(f"{number:7} {reason}")
    print("\n".join(found_wrong[:40]), len(found_wrong), "differences")
    sys.exit(bool(found_wrong))
