"""Bundles of 32 thousand to a million ranks: cost follows classes, not ranks.

    python benchmarks/bundle.py [--scratch DIR]

PaLM-540B, tp=8 pp=64, one microbatch per pipeline stage. Whole processes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from measure import MB, at_most, stagewright

AIMS = {32_768: 20, 131_072: 20, 1_048_576: 60}  # ranks: CPU-seconds


def main() -> None:
    """Write, check and expand a bundle of each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", help="where bundles are written and removed again")
    scratch = Path(tempfile.mkdtemp(dir=parser.parse_args().scratch))
    try:
        for ranks, aim in AIMS.items():
            out = scratch / f"{ranks}.bundle"
            degrees = ("--tp", 8, "--pp", 64, "--dp", ranks // 512)
            cost = stagewright("generate", "palm-540b", *degrees, "--format", "bundle", "-o", out)
            print(f"{ranks:,} ranks: {cost}")
            at_most("bundle", cost.cpu, aim, "CPU-s")
            at_most("size", out.stat().st_size / MB, 50, "MB")
            at_most("peak memory", cost.peak / MB, 400, "MB")
            print(f"    verify: {stagewright('verify', out)}")
            some = f"0-7,{ranks - 1}"
            more = stagewright("expand", out, "--ranks", some, "-o", scratch / f"{ranks}")
            print(f"    expand --ranks {some}: {more}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
