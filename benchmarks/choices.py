"""Predicts the layouts that published runs could have chosen.

    python benchmarks/choices.py [--only TEXT]

Writes docs/accuracy/data/choices.csv, a line for each layout. Degrees, interleaving and
microbatches differ; all else is as in the published run: batch, precision, recomputation, ZeRO,
overlaps. All layouts take a quarter of an hour. `benchmarks/accuracy.py` writes tables of them.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.evidence import training
from stagewright.evidence.training import Measurement, machine_of, step_seconds
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as resolve_model
from stagewright.program.fit import peak_in_program_order
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "accuracy" / "data" / "choices.csv"

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "dp", "micro_batch_size")
"""What a layout chooses; dp fills the GPUs."""
COLUMNS = ("source", "row", *DEGREES, "seconds", "bytes", "published")


class Choices(NamedTuple):
    """The layouts beside a published one."""

    source: str
    row: str
    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 4, 8, 16)
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    micro_batch_size: tuple[int, ...] = (1, 2, 4)
    interleaved: bool = False
    """Whether stages may be interleaved; otherwise as in the published run, not."""
    unmeasured: Mapping[str, Any] | None = None
    """The settings of a run whose layout is published and whose step is not.

    Tokens are sent once to each rank, which DeepSeek's dispatcher (DeepEP) does."""


_SC21, _NVIDIA, _MEGASCALE = "Megatron-LM SC21", "Megatron-Bridge and NeMo", "MegaScale 2024"
JOBS = (
    Choices(_SC21, "7.5B, 128 GPUs (Table 1)", pp=(1, 2, 4), micro_batch_size=(2, 4)),
    Choices(_NVIDIA, "llama3-70b, 64 h100-sxm, fp8, tp4 pp8 cp1, batch 256 x 8192 (26.02.01)",
            tp=(2, 4, 8), pp=(4, 8), interleaved=True, micro_batch_size=(1,)),
    Choices(_MEGASCALE, "175B, 256 GPUs, batch 768, Megatron-LM (Table 2)", tp=(4, 8),
            pp=(4, 8, 16), interleaved=True, micro_batch_size=(1,)),
    Choices("Llama 3 herd", "405B, 16384 GPUs, 8192 tokens (Table 4)", tp=(4, 8), pp=(8, 16),
            interleaved=True, micro_batch_size=(1,), cp=(1, 2)),
    Choices(_SC21, "39.1B, 512 GPUs (Table 1)", tp=(4, 8), pp=(1, 2, 4)),
    Choices(_NVIDIA, "llama3-70b, 64 gb200-nvl72, mxfp8, tp2 pp4 cp1, batch 256 x 8192 (26.02.01)",
            tp=(1, 2, 4), pp=(2, 4), interleaved=True, micro_batch_size=(1,)),
    Choices(_NVIDIA, "qwen3-235b-a22b, 256 gb200-nvl72, mxfp8, tp1 pp8 cp1 ep32, batch 8192 x 4096 "
            "(26.06)", tp=(1,), pp=(4, 8), ep=(16, 32), interleaved=True, micro_batch_size=(1,)),
    Choices("DeepSeek-V3", "2,048 H800, batch 15360 x 4096 (arXiv 2412.19437)", tp=(1, 2),
            pp=(8, 16), ep=(32, 64), micro_batch_size=(1,), unmeasured={
                "hardware": "h800", "model": "deepseek-v3", "pp": 16, "ep": 64, "dp": 128,
                "zero": 1, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 15360,
                "precision": "fp8", "fp8_recipe": "blockwise", "schedule": "dualpipe",
                "recompute": "selective", "recompute_modules": ("norm", "activation"),
                "layers_per_stage": (3, *(4,) * 14, 2),
            }),
    Choices(_SC21, "145.6B, 1536 GPUs (Table 1)", tp=(4, 8), pp=(4, 8, 16),
            micro_batch_size=(1, 2)),
    Choices(_NVIDIA, "llama3.1-405b, 1024 h100-sxm, fp8, tp8 pp8 cp2, batch 512 x 8192 (25.09)",
            tp=(4, 8), pp=(8, 16), cp=(1, 2), interleaved=True, micro_batch_size=(1,)),
    Choices(_MEGASCALE, "175B, 12288 GPUs, batch 6144, Megatron-LM (Table 2)", tp=(4, 8),
            pp=(4, 8, 16), interleaved=True, micro_batch_size=(1,)),
    Choices(_NVIDIA, "nemotron4-340b, 128 h100-sxm, fp8 delayed, tp8 pp8 cp1, batch 32 x 4096 "
            "(24.07 vboost/final (r2.0.0))", tp=(4, 8), pp=(8, 16), interleaved=True,
            micro_batch_size=(1,)),
    Choices(_SC21, "529.6B, 2520 GPUs (Table 1)", tp=(4, 8), pp=(15, 21, 35),
            micro_batch_size=(1, 2)),
    Choices(_SC21, "1008.0B, 3072 GPUs (Table 1)", tp=(4, 8), pp=(32, 64), micro_batch_size=(1, 2)),
)  # fmt: skip


def layouts(choices: Choices, m: Measurement) -> Iterator[Run]:
    """The published run, then the same run in the other layouts, as far as they are possible."""
    yield m.run
    world, layers = m.run.world_size, m.run.layers or m.model.num_layers
    axes = (choices.tp, choices.cp, choices.pp, choices.ep, choices.micro_batch_size)
    for tp, cp, pp, ep, micro in product(*axes):
        dp, left = divmod(world, tp * cp * pp)
        if left or (m.run.global_batch_size or 0) % (dp * micro):
            continue
        for vpp in interleavings(layers, pp) if choices.interleaved else (1,):
            changed = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "micro_batch_size": micro, "dp": dp}
            if run := possible(m, changed | {"vpp": vpp}):
                yield run


def interleavings(layers: int, pp: int) -> tuple[int, ...]:
    """No interleaving, some, and that of the shortest stages."""
    most = -(-layers // pp)
    return (1,) if pp == 1 else tuple(sorted({1, max(1, most // 2), most}))


def possible(m: Measurement, changed: Mapping[str, Any]) -> Run | None:
    """The run in another layout; None where its settings cannot be combined."""
    values = {k: getattr(m.run, k) for k in m.run.model_fields_set} | dict(changed)
    if changed["tp"] == 1:
        values.pop("sequence_parallel", None)
    layers = m.run.layers or m.model.num_layers
    even = layers % (changed["pp"] * changed["vpp"]) == 0
    same = all(getattr(m.run, name) == changed[name] for name in ("pp", "vpp"))
    if not same:
        values.pop("layers_per_stage", None)
        if not even:
            values["layers_per_stage"] = near_even(layers, changed["pp"] * changed["vpp"])
    try:
        run = Run.load(None, values)
        return None if run == m.run or run.resolved(m.model).microbatches < 1 else run
    except UserError:
        return None


def published(choices: Choices) -> Measurement:
    """The published run; of one whose step is not published, the measured time is infinite."""
    if choices.unmeasured is None:
        return next(m for m in training.rows(choices.source) if m.row == choices.row)
    settings = dict(choices.unmeasured)
    hardware = settings.pop("hardware")
    run = Run.load(None, settings)
    return Measurement(
        source=choices.source,
        row=choices.row,
        hardware=hardware,
        quantity="step_s",
        measured=math.inf,
        execution=Execution(moe_flex_dispatcher=True),
        run=run,
        model=resolve_model(run.model),
    )


def near_even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be; the ends have fewer.

    >>> near_even(10, 4)
    (2, 3, 3, 2)
    """
    least, more = divmod(layers, stages)
    first = (stages - more) // 2
    return tuple(least + (first <= n < first + more) for n in range(stages))


def held(run: Run, m: Measurement) -> int:
    """Bytes of the fullest GPU; UserError where the settings cannot be combined."""
    run = run.resolved(m.model)
    few = min(run.microbatches, 2 * run.pp)
    batch = {"global_batch_size": few * run.micro_batch_size * run.dp}
    compiled = compile(run.model_copy(update=batch), m.model)
    return max(peak_in_program_order(of).size for of in compiled.program.classes)


def evaluated(choices: Choices) -> Iterator[dict[str, Any]]:
    """A line for each layout that fits: into the GPU, or into what the published one holds."""
    m = published(choices)
    machine = machine_of(m)
    limit = float(machine.hardware.memory)
    for nth, run in enumerate(layouts(choices, m)):
        try:
            size = held(run, m)
            limit = max(limit, size) if nth == 0 else limit
            if size > limit:
                continue
            seconds = step_seconds(replace(m, run=run), machine)
        except UserError as error:
            print(f"  {error}", flush=True)
            continue
        degrees = {name: getattr(run, name) for name in DEGREES}
        figures = {"seconds": f"{seconds:.6g}", "bytes": size, "published": int(nth == 0)}
        yield {"source": m.source, "row": m.row, **degrees, **figures}


def lines() -> list[dict[str, str]]:
    """The lines of the file."""
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    return list(csv.DictReader(text.splitlines()))


def by_run() -> dict[str, list[dict[str, str]]]:
    """The layouts of each published run, by its name."""
    runs: dict[str, list[dict[str, str]]] = {}
    for line in lines():
        runs.setdefault(f"{line['source']}: {line['row']}", []).append(line)
    return runs


def words(line: Mapping[str, str]) -> str:
    """A layout in words."""
    short = {"micro_batch_size": "mbs"}
    plain = (name for name in DEGREES if name != "dp" and line[name] != "1")
    return " ".join(f"{short.get(name, name)}{line[name]}" for name in plain) or "dp alone"


def written(rows: Iterable[Mapping[str, Any]]) -> str:
    """The file of all layouts."""
    out = io.StringIO()
    file = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    file.writeheader()
    file.writerows(rows)
    return out.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="Runs whose name contains it.")
    given = parser.parse_args()
    for job in JOBS:
        if given.only in f"{job.source} {job.row}":
            print(job.source, job.row, flush=True)
            evaluated_layouts = [*evaluated(job)]
            others = [o for o in lines() if (o["source"], o["row"]) != (job.source, job.row)]
            FILE.write_text(written([*others, *evaluated_layouts]), encoding="utf-8")
