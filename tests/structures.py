"""Structures held against runs compiled alone: every kernel, number by number; and memory.

The draws are those of `sweep.py`, each with neighbours that differ in numbers. For more, with
another seed:

    python tests/structures.py 10000 7
"""

from __future__ import annotations

import dataclasses
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
from stagewright.search.candidates import Candidates, Column
from stagewright.explore.evaluate import evaluate
from stagewright.explore.structures import Structure, structures
from stagewright.lower.compile import compile
from stagewright.lower.kernels.kernel import Kernel
from stagewright.lower.training import TrainingStep
from stagewright.model.catalog import resolve
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.program.columns import RankClass, TaskKind
from stagewright.program.memory import live
from stagewright.run.experiment import Experiment
from stagewright.run.rules import check
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time.cost import needless
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.simulate.step import simulate

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
            late = structure.variants[variant]
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


# ---- memory --------------------------------------------------------------------------------------

MODELS = ("llama3.1-8b", "llama3.1-405b", "gpt3-175b", "qwen3-32b")
HALVED = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipev", "dualpipe")
"""Schedules that do backwards in halves."""
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def real(dice: random.Random) -> Run | None:
    """A run in the sizes of real ones, but for its layers; None: it cannot be had."""
    name = dice.choice(MODELS + EXPERTS)
    model = resolve(name)
    tp, pp = dice.choice((1, 2, 4, 8)), dice.choice((1, 2, 3, 4, 8))
    vpp = dice.choice((1, 1, 2, 3)) if pp > 1 else 1
    plain = dice.choice(("1f1b", "1f1b", "gpipe"))
    schedule = "interleaved" if vpp > 1 else plain
    if pp > 1 and dice.random() < 0.4:
        schedule = dice.choice(HALVED)
        vpp = SCHEDULES[schedule].chunks or 2
    settings: dict[str, Any] = {
        "model": name, "tp": tp, "pp": pp, "vpp": vpp,
        "layers": pp * vpp * dice.choice((2, 2, 3)) + model.first_dense_layers,
        "cp": dice.choice((1, 1, 2, 4)), "dp": dice.choice((1, 2, 4, 8, 16)),
        "zero": dice.choice((0, 1, 2, 3)), "recompute": dice.choice(("none", "selective", "full")),
        "sequence_parallel": tp > 1 and dice.random() < 0.7,
        "micro_batch_size": dice.choice((1, 2)), "seq_length": dice.choice((2048, 8192)),
        "cp_comm_type": dice.choice(("p2p", "all_gather", "a2a")),
        "precision": dice.choice(("bf16", "bf16", "fp8")),
        "schedule": schedule,
    }  # fmt: skip
    if name in EXPERTS:
        settings |= {"ep": dice.choice((1, 2, 4, 8)), "etp": dice.choice((1, tp))}
    size = settings["micro_batch_size"] * settings["dp"] * pp * dice.choice((1, 2, 4))
    settings["global_batch_size"] = size
    try:
        run = Run(**settings)
        check(run.resolved(model.with_overrides(run.layers)), model.with_overrides(run.layers))
    except UserError:
        return None
    return run


def _peak(of: RankClass) -> int:
    """The most bytes in the order of issue, but for rows that take no time; what a collective makes
    is there from behind the last row that the collective waits for."""
    tasks = of.tasks
    since = of.values.first.copy()
    for nth, row in enumerate(since.tolist()):
        if row >= 0 and tasks.kind[row] == TaskKind.COLLECTIVE:
            data = tasks.data[tasks.data_ptr[row] : tasks.data_ptr[row + 1]]
            order = tasks.order[tasks.order_ptr[row] : tasks.order_ptr[row + 1]]
            since[nth] = 1 + max([*data, *order], default=row - 1)
    held = live(dataclasses.replace(of.values, first=since), len(tasks))
    return int(held[~needless(of.tasks)].max())


def memory_gaps(runs: int, seed: int) -> tuple[list[tuple[float, str]], int]:
    """The memory of runs in columns beside that of the runs alone: how much more it is, in the sum
    of all categories; and how many have none in columns.

    Where gradients of every microbatch are reduced, and in schedules with backwards in halves,
    columns count memory over time (`explore.timing`), and are held against the simulated step. Of
    all others that `real` draws they count it in the order of issue but for what collectives make,
    and are held against the compiled program. Kernels whose work others do hold nothing, as in
    `simulate`.
    """
    dice = random.Random(seed)
    gaps: list[tuple[float, str]] = []
    left = 0
    while len(gaps) + left < runs:
        run = real(dice)
        if run is None:
            continue
        columns = {"tp": Column.of([run.tp])}
        base = Experiment(run, ClusterSection(), Execution())
        candidates = Candidates.of(base, hardware_of("h100-sxm"), columns)
        evaluated = evaluate(candidates)
        if evaluated.left:
            left += 1
            continue
        compiled = compile(run)
        if run.schedule in HALVED or reduces_each_microbatch(run.resolved(candidates.model)):
            peak = simulate(compiled, candidates.machine(0), candidates.execution(0)).fit.peak
        else:
            peak = max(_peak(of) for of in compiled.program.classes)
        gaps.append((int(evaluated.figures.peak[0]) / peak - 1, run.describe()))
    return gaps, left


if __name__ == "__main__":
    number, chosen = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    found, none = memory_gaps(number, chosen)
    sizes = np.abs([gap for gap, _ in found])
    half, many, most = np.quantile(sizes, (0.5, 0.95, 1))
    print(f"memory of {len(found)} runs, {none} not in columns: equal {(sizes == 0).mean():.1%},")
    print(f"within 1% {(sizes <= 0.01).mean():.1%}; {half:.2%}, {many:.2%} in 95%, {most:.2%}")
    for gap, which in sorted(found, key=lambda found: -abs(found[0]))[:10]:
        print(f"{gap:8.2%} {which}")
    counted, wrong = compare(number, chosen)
    for reason, times in counted.most_common():
        print(f"{times:7} {reason}")
    print("\n".join(wrong[:40]), len(wrong), "differences")
    sys.exit(bool(wrong))
