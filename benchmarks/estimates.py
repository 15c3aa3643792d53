"""How far the estimates of a search are off: time and memory of random candidates, simulated.

    python benchmarks/estimates.py [candidates of each space] [seed]

prints a row for each kind of candidates: quantiles of the estimate over the simulated figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.searching.candidates import Candidates
from stagewright.searching.estimate import estimate
from stagewright.searching.request import asked
from stagewright.searching.simulated import simulate_all

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


class Drawn(NamedTuple):
    """Random candidates of a space, with their estimates over what was simulated."""

    name: str
    rows: Candidates
    seconds: Float
    peak: Float


SPACES: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama2-7b, 64 H100": ("llama2-7b", "h100-sxm", 64, {}),
    "llama3.1-70b, 512 H100": ("llama3.1-70b", "h100-sxm", 512, {}),
    "llama3.1-405b, 2,048 H100": ("llama3.1-405b", "h100-sxm", 2048, {}),
    "mixtral-8x7b, 64 H100": ("mixtral-8x7b", "h100-sxm", 64, {}),
    "qwen3-30b-a3b, 64 B200": ("qwen3-30b-a3b", "b200", 64, {}),
    "deepseek-v3, 1,024 H800": ("deepseek-v3", "h800", 1024, {}),
    "schedules": ("llama3-8b", "h100-sxm", 32, {"families": "schedules"}),
    "offload": ("llama3-8b", "h100-sxm", 16, {"families": "offload"}),
    "hsdp": ("llama3-8b", "h100-sxm", 64, {"families": "hsdp"}),
    "recompute, stages": ("llama3-8b", "h100-sxm", 32, {"families": "recompute,stages"}),
    "overlap": ("mixtral-8x7b", "h100-sxm", 32, {"families": "overlap"}),
    "torchtitan": ("llama3-8b", "h100-sxm", 32, {"framework": "torchtitan"}),
}


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    """Candidates of each space that run."""
    random = np.random.default_rng(seed)
    for name, (model, hardware, gpus, settings) in SPACES.items():
        options = dict(settings)
        families = options.pop("families", None)
        request = asked({"model": model, **options}, hardware=[hardware], gpus=gpus,
                        families=families)  # fmt: skip
        rows = request.space.candidates().rows
        rows = rows.take(np.sort(random.choice(len(rows), min(count, len(rows)), replace=False)))
        found = simulate_all(rows)
        rows, exact = rows.take(found.rows), found.figures
        estimates = estimate(rows)
        ran = np.isfinite(exact.seconds)
        rows, exact, estimates = rows.take(ran), exact.take(ran), estimates.take(ran)
        yield Drawn(name, rows, estimates.seconds / exact.seconds, estimates.peak / exact.peak)


def line(name: str, ratios: Float, peaks: Float) -> str:
    """A row of the table."""
    known = np.isfinite(ratios)
    cells = [
        f"{value - 1:+8.1%}"
        for column in (ratios[known], peaks[known])
        for value in np.quantile(column, QUANTILES)
    ]
    return f"{name:28} {known.sum():4} {(~known).sum():3} {' '.join(cells)}"


def main() -> None:
    """Print the table."""
    count, seed = (
        (int(text) for text in (*sys.argv[1:], "25", "1")[:2])
        if len(sys.argv) < 3
        else map(int, sys.argv[1:3])
    )
    begin = time.process_time()
    header = " ".join(f"{q:>8.0%}" for q in QUANTILES)
    print(f"{'':28} runs not {header} (time) {header} (memory)")
    every = []
    for each in drawn(count, seed):
        every.append(each)
        print(line(each.name, each.seconds, each.peak), flush=True)
        worst = np.argsort(-np.abs(np.log(each.seconds)))[:2] if "-v" in sys.argv else []
        for row in worst:
            print(
                "   ", f"{each.seconds[row]:.3f} {each.peak[row]:.3f}", each.rows.describe(int(row))
            )
        worst = np.argsort(-np.abs(np.log(each.peak)))[:2] if "-v" in sys.argv else []
        for row in worst:
            print(
                "   ", f"{each.seconds[row]:.3f} {each.peak[row]:.3f}", each.rows.describe(int(row))
            )
    zero = np.concatenate([each.rows.numbers("zero") for each in every])
    seconds = np.concatenate([each.seconds for each in every])
    peak = np.concatenate([each.peak for each in every])
    for name, mask in (
        ("ZeRO 0, 1", zero <= 1),
        ("ZeRO 2", zero == 2),
        ("ZeRO 3", zero == 3),
        ("all", zero >= 0),
    ):
        print(line(name, seconds[mask], peak[mask]))
    print(f"{time.process_time() - begin:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
