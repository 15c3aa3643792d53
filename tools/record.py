"""Record what a change of the engine must not change, or compare with a record.

    python tools/record.py OUT [--only steps,traces,searches,validate,serving]
    python tools/record.py OUT --check [--only PARTS]

`OUT` is a folder with a file for each part (`tests/data/recorded` in this repository):

- `steps.jsonl`: steps of random runs and of cases of usual size, one a line: end of the step in
  ticks of 1e-12 s, of each kind of ranks, shares as `simulate --json` has them, bytes at the peak
  in issue order and over time. A record that is written again keeps its runs; without one, runs
  are drawn (`recorded_runs.py`).
- `traces.jsonl`: digests of the traces of the runs in `tests/golden/runs`, and of traces expanded
  from bundles of some of the steps' runs.
- `searches.jsonl`: the best of searches, and the figures of all candidates that were simulated.
- `validate.jsonl`: what `stagewright validate` predicts, by row of the measurements.
- `serving.jsonl`: sums over requests of serving runs (`recorded_serving.py`), and choices of
  searches for serving.

Whole numbers and texts are compared exactly, others to 1e-9 of their value: sums may be added up in
another order. `--check` prints every difference, and exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import goldens
import recorded_runs as runs
import recorded_serving
import stagewright as sw
from stagewright.errors import UserError
from stagewright.program.fit import peak_in_program_order
from stagewright.time.simulate.timeline import TICK
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.write import expand

STEPS = 200
"""Steps in a record: all cases, the rest drawn at random."""
EXPANDED = 20
"""Runs of the steps whose bundles are expanded, and how far these lie from each other."""
STRIDE = 6
SEED = "recorded steps"
DIGITS = 12
"""Significant digits of the numbers in a record."""
CLOSE = 1e-9

Lines = Iterable[Any]


# ---- steps ---------------------------------------------------------------------------------------


def step_record(step: runs.Step) -> dict[str, Any]:
    """One line of `steps.jsonl`; UserError where the run cannot be."""
    settings, execution = dict(step.settings), dict(step.execution)
    compiled = sw.compile(settings.pop("model"), **_hashable(settings))
    if stragglers := execution.pop("stragglers", None):
        execution["stragglers"] = {int(rank): factor for rank, factor in stragglers.items()}
    for name in ("no_overlap", "cuda_graph_modules"):
        if name in execution:
            execution[name] = frozenset(execution[name])
    simulated = sw.simulate(compiled, step.hardware, **execution)
    printed = simulated.to_dict()
    names = ("tokens_per_second", "mfu", "mfu_causal", "hfu", "hfu_causal", "serving", "power",
             "mean", "critical_path")  # fmt: skip
    parts = ("kernels", "exposed", "bubble", "communication", "launches")
    return step._asdict() | {
        "run": compiled.run.describe(),
        "ticks": simulated.timeline.ticks,
        "issue_order": [
            dict(peak_in_program_order(of).by_category) for of in compiled.program.classes
        ],
        "lanes": [
            {
                "ranks": _ranges(lane["ranks"]),
                "end": int(timed.end.max(initial=0)),
                "peak": lane["memory"]["at_peak"],
                **{name: lane[name] for name in parts},
            }
            for lane, timed in zip(printed["lanes"], simulated.timeline.lanes, strict=True)
        ],
        **{name: printed[name] for name in names if name in printed},
    }


def steps(known: Sequence[Any] | None) -> Lines:
    """The steps of a record, or of a new one: all cases, and random runs that can be."""
    if known is not None:
        asked = (runs.Step(*(line[name] for name in runs.Step._fields)) for line in known)
        yield from map(step_record, asked)
        return
    count = 0
    for step in chain(runs.cases(), runs.random_steps(SEED)):
        try:
            yield step_record(step)
        except UserError as error:
            if count < len(runs.CASES):
                error.add_note(f"case {[*runs.CASES][count]}")
                raise
            continue
        count += 1
        if count == STEPS:
            return


def _hashable(value: Any) -> Any:
    """Settings of JSON as Python has them: lists are tuples."""
    if isinstance(value, dict):
        return {name: _hashable(each) for name, each in value.items()}
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _ranges(ranks: list[int]) -> str:
    """Ranks in words: each first rank of consecutive ones, and how many follow."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([rank, 1])
    words = [f"{first}+{count}" for first, count in found]
    return ",".join(words) if len(words) < 8 else f"{len(ranks)} from {ranks[0]} to {ranks[-1]}"


# ---- traces --------------------------------------------------------------------------------------


def traces(known: Sequence[Any]) -> Lines:
    """Digests of traces of golden runs, and of those expanded from bundles of recorded steps."""
    with tempfile.TemporaryDirectory() as place:
        for name, settings in goldens.RUNS.items():
            asked = dict(settings)
            compiled = sw.compile(asked.pop("model"), **asked)
            sw.generate(compiled, f"{place}/{name}", workers=1)
            yield {"golden": name, "sha256": _digest(Path(place, name))}
        drawn = known[len(runs.CASES) :: STRIDE][:EXPANDED]
        for nth, line in enumerate(drawn):
            settings = _hashable(line["settings"])
            compiled = sw.compile(settings.pop("model"), **settings)
            bundle, out = f"{place}/{nth}.bundle", Path(place, str(nth))
            sw.generate(compiled, bundle, format="bundle", workers=1)
            expand(Bundle(bundle), out, workers=1)
            yield {"run": line["run"], "sha256": _digest(out)}


def _digest(folder: Path) -> str:
    """One digest of all files of a folder but its manifest: names and bytes, in order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---- searches ------------------------------------------------------------------------------------


def search_record(name: str) -> dict[str, Any]:
    """One line of `searches.jsonl`: the winner, and the candidates that were simulated."""
    asked = dict(runs.SEARCHES[name])
    if stragglers := asked.pop("stragglers", None):
        asked["stragglers"] = {int(rank): factor for rank, factor in stragglers.items()}
    try:
        found = sw.search(asked.pop("model"), asked.pop("hardware"), **asked)
    except UserError as error:
        return {"search": name, "refused": str(error)}
    ranking = found.ranking
    figures = ranking.figures
    columns = ("seconds", "bubble", "mfu", "joules", "usd")
    return {
        "search": name,
        "best": [found.describe(row) for row in range(1, len(ranking.listed) + 1)],
        "ticks": round(found.seconds / TICK),
        "candidates": len(ranking),
        "simulated": ranking.simulated,
        "open": len(ranking.open),
        "simulations": [
            {
                "run": f"{ranking.candidates.describe(row)} on {ranking.candidates.machine(row)}",
                "ticks": round(float(figures.seconds[row]) / TICK),
                "tokens": int(figures.tokens[row]),
                "memory": {key: int(size[row]) for key, size in figures.memory.items()
                           if size[row]},
                "exposed": {key: float(part[row]) for key, part in figures.exposed.items()
                            if part[row]},
                **{key: float(getattr(figures, key)[row]) for key in columns[1:]},
                "launches": ranking.launches[row],
            }
            for row in figures.simulated.nonzero()[0].tolist() if row in ranking.launches
        ],
    }  # fmt: skip


def searches() -> Lines:
    """All searches, the long ones last."""
    names = sorted(runs.SEARCHES, key=lambda name: name in runs.LONG)
    for name in names:
        if name in runs.LONG:
            os.nice(max(0, 10 - os.nice(0)))
        begin = time.process_time()
        yield search_record(name)
        print(f"  {name}: {time.process_time() - begin:.0f} CPU-s", file=sys.stderr, flush=True)


# ---- measurements --------------------------------------------------------------------------------


def validate() -> Lines:
    """A line for each source: quantity and prediction of its rows; and what is not compared."""
    command = [sys.executable, "-m", "stagewright", "validate", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    by_source: dict[str, list[Any]] = {}
    for row in found["rows"]:
        by_source.setdefault(row["source"], []).append(
            [row["row"], row["quantity"], row["predicted"]]
        )
    for source, rows in by_source.items():
        yield {"source": source, "rows": rows}
    yield {"source": "not compared", "rows": [[*each.values()] for each in found["not_compared"]]}


# ---- records -------------------------------------------------------------------------------------

PARTS = {
    "steps": "steps.jsonl",
    "traces": "traces.jsonl",
    "searches": "searches.jsonl",
    "validate": "validate.jsonl",
    "serving": "serving.jsonl",
}


def read(folder: Path, part: str) -> list[Any] | None:
    """The lines of a part; None where there is no record of it."""
    path = folder / PARTS[part]
    if not path.exists():
        return None
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def made(part: str, known_steps: Sequence[Any] | None) -> Iterator[Any]:
    """The lines of a part as the code makes them now."""
    if part == "traces":
        assert known_steps is not None, "traces are those of recorded steps; record these first"
    make: dict[str, Callable[[], Lines]] = {
        "steps": lambda: steps(known_steps),
        "traces": lambda: traces(known_steps or ()),
        "searches": searches,
        "validate": validate,
        "serving": recorded_serving.records,
    }
    return map(as_written, make[part]())


def as_written(value: Any) -> Any:
    """A line as its file has it: numbers of `DIGITS` digits, None for those that are not finite."""
    if isinstance(value, dict):
        return {str(name): as_written(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What differs between two lines, each with the way to it."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from differences(old.get(name), new.get(name), f"{where}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        for nth, (one, other) in enumerate(zip_longest(old, new)):
            yield from differences(one, other, f"{where}[{nth}]")
    elif {type(old), type(new)} in ({float}, {float, int}):
        if not math.isclose(old, new, rel_tol=CLOSE, abs_tol=1e-15):
            yield f"{where}: {old!r} is now {new!r} ({new / old - 1 if old else math.inf:+.3g})"
    elif old != new:
        yield f"{where}: {old!r} is now {new!r}"


def name_of(line: Any) -> str:
    """A line in words."""
    names = ("search", "golden", "run", "source", "serving")
    return next(str(line[key]) for key in names if key in line)


def main() -> int:
    """Write or check the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the record")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    asked = parser.parse_args()
    chosen = asked.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    changed = 0
    for part in (part for part in PARTS if part in chosen):
        begin, count = time.process_time(), 0
        known = read(asked.out, part)
        known_steps = read(asked.out, "steps")
        if asked.check and known is None:
            parser.error(f"{asked.out} has no record of {part}")
        path = asked.out / f"{PARTS[part]}.new"
        with open(os.devnull if asked.check else path, "w", encoding="utf-8") as file:
            for old, new in zip_longest(known or (), made(part, known_steps)):
                count += 1
                text = json.dumps(new, separators=(",", ":"), ensure_ascii=False)
                print(text, file=file, flush=True)
                for each in () if known is None else differences(old, new):
                    changed += 1
                    print(f"{part} {count} ({name_of(old or new)}) {each}", flush=True)
        if not asked.check:
            path.replace(asked.out / PARTS[part])
        spent = time.process_time() - begin
        print(f"{part}: {count} lines in {spent:.0f} CPU-s", file=sys.stderr, flush=True)
    print(f"{changed} differences", file=sys.stderr)
    return int(asked.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
