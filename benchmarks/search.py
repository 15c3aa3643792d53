"""A search in columns: the configurations that a CPU-second evaluates, and the gaps to `simulate`.

    python benchmarks/search.py [--runs N] [--seed S] [--only CASE] [--sample N] [--whole]
                                [--no-gaps] [--no-rate] [--batches LIST]
                                [--calculon CHECKOUT] [--calculon-python PYTHON]

A search decides every candidate: most by lower bounds of their time and memory, the others by their
figures in columns, and the best 20 by simulation; `--whole` evaluates all of them in columns.

Cases are the default spaces of models on machines; `calculon` is that of GPT-3 175B on the machine
of Calculon's study. Two more run only when `--only` names them. `calculon-own` is Calculon's own
space of 7,126,368 configurations as far as settings say it (`calculon.yaml`, which says what has no
counterpart): 1,130,448 of ours, of which none is counted twice. `calculon-batches` is that space
with the global batch free, evaluated whole, lot by lot as a search does, from the space to the
fastest that fits: sixteen batches from 512 to 98,304 sequences, or those of `--batches`, a list or
a range as settings take it. The gap is taken over N runs of each, drawn at random. `--sample N`
takes N of the candidates at random: fewer of them share a structure, so that each costs more.
Calculon (Isaev et al., SC23; github.com/calculon-ai/calculon) evaluates 181 to 342 configurations
per CPU-second, AIConfigurator 24 points, each on the machine of its authors.
`--calculon` runs Calculon's own search from a checkout of one's own on this machine as well, with
an interpreter that has what it needs (pandas, psutil), so that both rates are of one machine.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import run
from stagewright.explore.answer.search import search
from stagewright.explore.evaluate import Evaluated, evaluate
from stagewright.explore.lots import in_lots

from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as model_of
from stagewright.run.experiment import Experiment
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Candidates
from stagewright.searching.defaults import default_axes, default_batch
from stagewright.searching.machines import Fleet
from stagewright.searching.request import asked
from stagewright.searching.space import Space
from stagewright.time.hardware import resolve
from stagewright.time.simulate.step import simulate

CASES = {
    "7b": ("llama2-7b", "h100-sxm", 64, {}),
    "70b": ("llama3-70b", "h100-sxm", 512, {}),
    "experts": ("mixtral-8x7b", "h100-sxm", 64, {}),
    "175b": ("gpt3-175b", "a100-sxm-80gb", 1024, {"seq_length": 2048}),
    "405b": ("llama3.1-405b", "h100-sxm", 16384, {}),
    "calculon": (
        "gpt3-175b", "a100-sxm-80gb", 4096, {"seq_length": 2048, "global_batch_size": 4096},
    ),
}  # fmt: skip
"""Model, hardware, GPUs and further settings by name."""
OWN = "calculon-own"
BATCHES = "calculon-batches"
SEQUENCES = ",".join(str(each << octave) for octave in range(8) for each in (512, 768))
"""The batches of `calculon-batches`, in sequences: two in each octave."""
CALCULON = (181, 342)
"""Configurations per CPU-second (Isaev et al., SC23, and its companion studies)."""


def peak_megabytes() -> float:
    """The most memory that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def space(model: str, hardware: str, gpus: int, settings: dict[str, object]) -> Candidates:
    """The default space of a model on a machine."""
    run = Run(model=model).model_copy(update=settings)
    of = model_of(model)
    batch = run.global_batch_size or default_batch(run, of, [gpus])
    run = run.model_copy(update={"global_batch_size": batch})
    fleets = [Fleet(resolve(hardware), gpus)]
    base = Experiment(run, ClusterSection(), Execution())
    return Space.of(base, fleets, default_axes(run, of, fleets)).candidates().rows


def calculon(batches: str | None = None) -> Candidates:
    """Calculon's own space on 4,096 GPUs, with its global batch or with several."""
    given: dict[str, object] = {} if batches is None else {"global_batch_size": batches}
    path = Path(__file__).with_name("calculon.yaml")
    return asked(given, path, gpus=4096).space.candidates().rows


def gaps(rows: Candidates, columns: Evaluated) -> tuple[list[float], list[float]]:
    """Relative gaps in seconds and in peak memory of candidates to each simulated alone."""
    figures = columns.figures
    peak = figures.peak if figures.memory else None
    seconds: list[float] = []
    memory: list[float] = []
    for row in range(len(rows)):
        if np.isnan(figures.seconds[row]):
            continue
        step = simulate(compile(rows.run(row), rows.model), rows.machine(row), rows.execution(row))
        seconds.append(float(figures.seconds[row] / step.seconds - 1))
        if peak is not None:
            memory.append(float(peak[row] / step.fit.peak - 1))
        if abs(seconds[-1]) > 0.02:
            print(f"    {100 * seconds[-1]:+.1f}% {rows.run(row).describe()}", flush=True)
    return seconds, memory


def show(what: str, found: list[float]) -> None:
    """The distribution of gaps, in percent."""
    if not found:
        return
    size = 100 * np.abs(found)
    parts = " ".join(f"{name} {np.quantile(size, q):.3f}" for name, q in
                     (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("worst", 1.0)))  # fmt: skip
    limit = 2 if what == "seconds" else 1
    print(f"  gap in {what}, %: {parts}; {100 * np.mean(size <= limit):.1f}% within {limit}%")


def _show_search(rows: Candidates, enumerated: float) -> None:
    """The CPU time of a search from the space to the answer, by what it goes to.

    A candidate is decided if it is bounded out, which says that it is not among the best and no
    more, or evaluated, which gives its time and memory.
    """
    spent: dict[str, float] = {"columns": 0.0}

    def columns(some: Candidates) -> Evaluated:
        begin = time.process_time()
        spent.setdefault("bounds", begin - start)
        found = in_lots(some)
        spent["columns"] += time.process_time() - begin
        return found

    start = time.process_time()
    found = search(rows, evaluate=columns)
    searched = time.process_time() - start
    whole = enumerated + searched
    bounds = spent.get("bounds", 0.0)
    simulated = searched - bounds - spent["columns"]
    print(f"  decided: {len(rows) / whole:.0f} configurations per CPU-second, all in {whole:.1f} "
          f"CPU-s and {peak_megabytes():.0f} MB (Calculon evaluates {CALCULON[0]} to "
          f"{CALCULON[1]})\n"
          f"  of these only bounded out: {found.bounded_out}, bounds of all in {bounds:.1f} CPU-s\n"
          f"  evaluated with time and memory: {found.evaluated} in {spent['columns']:.1f} CPU-s, "
          f"{found.evaluated / max(spent['columns'], 1e-9):.0f} per CPU-second\n"
          f"  simulated: {found.simulated} in {simulated:.1f} CPU-s", flush=True)  # fmt: skip


def _show_whole(rows: Candidates) -> None:
    """The rate at which all candidates are evaluated."""
    begin = time.process_time()
    found = evaluate(rows)
    spent = time.process_time() - begin
    left = sum(len(of.candidates) for of in found.left)
    print(f"  evaluated whole: {(len(rows) - left) / spent:.0f} configurations per CPU-second, "
          f"{spent:.1f} CPU-s, {left} left, {peak_megabytes():.0f} MB", flush=True)  # fmt: skip


def _show_calculon(checkout: str, interpreter: str) -> None:
    """The rate of Calculon's own search on this machine: of GPT-3 175B on 4,096 A100 with a global
    batch of 4, the smallest that there is, for which it evaluates fewest configurations."""
    line = [interpreter, "bin/calculon", "llm-optimal-execution", "models/gpt3-175B.json"]
    with tempfile.TemporaryDirectory() as scratch:
        line += ["4096", "4", "float16", "systems/a100_80g.json", f"{scratch}/best.json"]
        cost = run(
            [*line, "--cpus", "1", "--noneok"], environment={"PYTHONPATH": "."}, cwd=checkout
        )
    count = int(cost.out.split("Total executions:")[1].split()[0])
    print(f"Calculon on this machine: {count} configurations in {cost.cpu:.1f} CPU-s, "
          f"{count / cost.cpu:.0f} per CPU-second (published: {CALCULON[0]} to {CALCULON[1]})",
          flush=True)  # fmt: skip


def _show_batches(batches: str) -> None:
    """The rate at which Calculon's space of several batches is evaluated whole, from its
    enumeration to the candidate that handles most tokens per second of those that fit."""
    begin = time.process_time()
    rows = calculon(batches)
    enumerated = time.process_time() - begin
    found = in_lots(rows)
    figures = found.figures
    best = int(np.nanargmax(np.where(figures.fits, figures.tokens_per_second, 0.0)))
    spent = time.process_time() - begin
    left = sum(len(of.candidates) for of in found.left)
    print(f"{BATCHES}: {len(rows)} candidates enumerated in {enumerated:.2f} CPU-s\n"
          f"  evaluated whole, in lots: {(len(rows) - left) / spent:.0f} configurations per "
          f"CPU-second, all in {spent:.1f} CPU-s, {left} left, {peak_megabytes():.0f} MB\n"
          f"  best: {rows.run(best).describe()}, {figures.tokens_per_second[best]:.0f} tokens/s",
          flush=True)  # fmt: skip


def main() -> None:
    """Print the rate and the gaps of each case."""
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=[*CASES, OWN, BATCHES])
    options.add_argument("--sample", type=int)
    options.add_argument("--whole", action="store_true")
    options.add_argument("--no-gaps", action="store_true")
    options.add_argument("--no-rate", action="store_true")
    options.add_argument("--batches", default=SEQUENCES, metavar="LIST")
    options.add_argument("--calculon", metavar="CHECKOUT", help="a checkout of Calculon")
    options.add_argument("--calculon-python", default=sys.executable, metavar="PYTHON")
    given = options.parse_args()
    if given.calculon:
        _show_calculon(given.calculon, given.calculon_python)
    if given.only == BATCHES:
        _show_batches(given.batches)
        return
    draw = np.random.default_rng(given.seed)
    every: tuple[list[float], list[float]] = [], []
    for name in [*CASES, OWN]:
        if given.only != name and (given.only or name == OWN):
            continue
        begin = time.process_time()
        rows = calculon() if name == OWN else space(*CASES[name])
        spent = time.process_time() - begin
        print(f"{name}: {rows.model.name} on {rows.machine(0)}: {len(rows)} candidates "
              f"enumerated in {spent:.2f} CPU-s", flush=True)  # fmt: skip
        if given.sample is not None:
            rows = rows.take(np.sort(draw.permutation(len(rows))[: given.sample]))
        if not given.no_rate:
            _show_search(rows, spent)
            if given.whole:
                _show_whole(rows)
        if not given.no_gaps:
            some = rows.take(np.sort(draw.permutation(len(rows))[: given.runs]))
            for kept, got in zip(every, gaps(some, evaluate(some)), strict=True):
                kept.extend(got)
    for what, got in zip(("seconds", "memory"), every, strict=True):
        show(what, got)


if __name__ == "__main__":
    main()
