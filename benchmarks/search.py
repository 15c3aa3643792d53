"""Searches of default spaces: CPU-seconds, candidates simulated, and how far estimates were off.

    python benchmarks/search.py [--only CASE] [--objective NAME] [--page]

`--page` writes the page and a CSV of all candidates as well. Calculon (Isaev et al., SC23;
github.com/calculon-ai/calculon) evaluates 181 to 342 configurations per CPU-second on the machine
of its authors.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stagewright as sw

CASES: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "7b": ("llama2-7b", "h100-sxm", 64, {}),
    "70b": ("llama3.1-70b", "h100-sxm", 512, {"seq_length": 32768}),
    "405b": ("llama3.1-405b", "h100-sxm", 16384, {}),
    "175b": ("gpt3-175b", "a100-sxm-80gb", 4096, {"seq_length": 2048, "global_batch_size": 4096}),
    "mixtral": ("mixtral-8x7b", "h100-sxm", 64, {}),
    "gpt-oss": ("gpt-oss-120b", "h100-sxm", 256, {}),
    "deepseek": ("deepseek-v3", "h800", 2048, {}),
}
"""Model, hardware, GPUs and further settings by name."""


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--objective", default="time")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    for name in [given.only] if given.only else CASES:
        model, hardware, gpus, settings = CASES[name]
        begin = time.process_time()
        found = sw.search(model, hardware, gpus=gpus, objective=given.objective, **settings)
        if given.page:
            with tempfile.TemporaryDirectory() as folder:
                found.write(Path(folder, "page.html"))
                found.write(Path(folder, "all.csv"))
        seconds, ranking = time.process_time() - begin, found.ranking
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        errors = ranking.errors("time") - 1
        print(
            f"{name:9}{len(ranking):9,} candidates {seconds:7.1f} CPU-s {peak:6,.0f} MB "
            f"{ranking.simulated:4} simulated, off by {errors.min():+.1%} to {errors.max():+.1%}: "
            f"{found.describe()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
