"""How far the estimates of a search are off: time and memory of random candidates, simulated.

    python benchmarks/estimates.py [--candidates N] [--seed S] [--worst N]

prints a row for each space: how many of N random candidates run, for how many of them there is no
estimate, and quantiles of the error of time and of memory (positive: the estimate is too large).
`--worst` lists the worst estimates of each space.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Float
from stagewright.searching.candidates import Candidates
from stagewright.searching.estimate import estimate
from stagewright.searching.request import search_request
from stagewright.searching.simulated import simulate_all

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)

SPACES: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama2-7b, 64 H100": ("llama2-7b", "h100-sxm", 64, {}),
    "llama3.1-70b, 512 H100": ("llama3.1-70b", "h100-sxm", 512, {}),
    "llama3.1-405b, 2,048 H100": ("llama3.1-405b", "h100-sxm", 2048, {}),
    "mixtral-8x7b, 64 H100": ("mixtral-8x7b", "h100-sxm", 64, {}),
    "qwen3-30b-a3b, 64 B200": ("qwen3-30b-a3b", "b200", 64, {}),
    "deepseek-v3, 1,024 H800": ("deepseek-v3", "h800", 1024, {}),
    "schedules": ("llama3-8b", "h100-sxm", 32, {"space": "schedules"}),
    "offload": ("llama3-8b", "h100-sxm", 16, {"space": "offload"}),
    "hsdp": ("llama3-8b", "h100-sxm", 64, {"space": "hsdp"}),
    "recompute, stages": ("llama3-8b", "h100-sxm", 32, {"space": "recompute,stages"}),
    "overlap": ("mixtral-8x7b", "h100-sxm", 32, {"space": "overlap"}),
    "torchtitan": ("llama3-8b", "h100-sxm", 32, {"framework": "torchtitan"}),
}
"""Model, hardware, GPUs and further settings by name."""


class Errors(NamedTuple):
    """Random candidates that run, and their estimates over what was simulated."""

    rows: Candidates
    seconds: Float
    peak: Float

    def line(self, name: str) -> str:
        """A row of the table."""
        known = np.isfinite(self.seconds)
        cells = [
            f"{value - 1:+8.1%}"
            for column in (self.seconds[known], self.peak[known])
            for value in np.quantile(column, QUANTILES)
        ]
        return f"{name:26}{known.sum():5}{(~known).sum():5} {' '.join(cells)}"

    def worst(self, count: int) -> list[str]:
        """The candidates whose time, and whose memory, is estimated worst."""
        found = [np.argsort(-np.abs(np.log(each)))[:count] for each in (self.seconds, self.peak)]
        return [
            f"    {self.seconds[row]:.3f} {self.peak[row]:.3f} {self.rows.describe(row)}"
            for row in dict.fromkeys(np.concatenate(found).tolist())
        ]


def errors(name: str, count: int, random: np.random.Generator) -> Errors:
    """Errors of random candidates of a space."""
    model, hardware, gpus, given = SPACES[name]
    settings = {"model": model, **given}
    families = settings.pop("space", None)
    request = search_request(settings, hardware=[hardware], gpus=gpus, families=families)
    rows = request.space.enumerate().candidates
    rows = rows.take(np.sort(random.choice(len(rows), min(count, len(rows)), replace=False)))
    exact = simulate_all(rows).figures
    ran = np.isfinite(exact.seconds)
    rows, exact = rows.take(ran), exact.take(ran)
    found = estimate(rows)
    return Errors(rows, found.seconds / exact.seconds, found.peak / exact.peak)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--candidates", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worst", type=int, default=0)
    given = parser.parse_args()
    begin, random = time.process_time(), np.random.default_rng(given.seed)
    header = " ".join(f"{quantile:>8.0%}" for quantile in QUANTILES)
    print(f"{'':26} runs  not {header} {header}\n{'':37}time{'':42}memory")
    found: list[Errors] = []
    for name in SPACES:
        found.append(errors(name, given.candidates, random))
        print(found[-1].line(name), *found[-1].worst(given.worst), sep="\n", flush=True)
    zero = np.concatenate([each.rows.numbers("zero") for each in found])
    seconds = np.concatenate([each.seconds for each in found])
    peak = np.concatenate([each.peak for each in found])
    for name, mask in {"ZeRO 0, 1": zero <= 1, "ZeRO 2": zero == 2, "ZeRO 3": zero == 3,
                       "all": zero >= 0}.items():  # fmt: skip
        print(Errors(found[0].rows, seconds[mask], peak[mask]).line(name))
    print(f"{time.process_time() - begin:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
