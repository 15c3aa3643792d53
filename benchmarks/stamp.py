"""How fast ranks are stamped: a file per rank, with its checksum, beside dd writing as many bytes.

    python benchmarks/stamp.py [--ranks 128] [--rounds 3] [--scratch DIR]

dd writes one file of the same total size, in turn with ours. A second case has many small files,
beside a plain loop that creates such files. Memory is of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measure import MB, at_least, at_most, python, run

LARGE = {
    "model": "llama3.1-70b", "tp": 8, "pp": 4, "sequence_parallel": True, "seq_length": 8192,
}  # fmt: skip
SMALL = {"model": "llama3.1-70b", "tp": 8, "pp": 4, "layers": 8, "seq_length": 8192}

CODE = """
import json, resource, sys, time
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace.write import write
program = compile(Run(**json.loads(sys.argv[1]))).program
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before, began = cpu(), time.perf_counter()
told = write(program, sys.argv[2], manifest={})
wall = time.perf_counter() - began
size = sum(file["bytes"] for file in told["files"].values())
print(json.dumps({"wall": wall, "cpu": cpu() - before, "bytes": size}))
"""


def dd(path: Path, size: int) -> float:
    """Bytes per second of dd."""
    block = 4 << 20
    began = time.perf_counter()
    line = ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={-(-size // block)}"]
    run([*line, "status=none"])
    return size / (time.perf_counter() - began)


def loop(folder: Path, count: int, size: int) -> float:
    """Files per second of a plain loop."""
    folder.mkdir()
    data = os.urandom(size)
    began = time.perf_counter()
    for nth in range(count):
        with open(folder / f"{nth}", "wb") as file:
            file.write(data)
    return count / (time.perf_counter() - began)


def large(scratch: Path, ranks: int, rounds: int) -> None:
    """Files of some ten megabytes."""
    settings = LARGE | {"dp": max(1, ranks // 32), "global_batch_size": 128 * max(1, ranks // 32)}
    ours: list[float] = []
    plain: list[float] = []
    peak = 0.0
    for nth in range(rounds):
        cost = python(CODE, json.dumps(settings), scratch / f"large{nth}")
        told = json.loads(cost.out)
        size, peak = told["bytes"], max(peak, cost.peak)
        ours.append(size / told["wall"])
        plain.append(dd(scratch / f"plain{nth}", size))
        print(
            f"round {nth + 1}: {size / MB:,.0f} MB; ours {ours[-1] / MB:,.0f} MB/s "
            f"({size / told['cpu'] / MB:,.0f} per CPU-second), dd {plain[-1] / MB:,.0f} MB/s",
            flush=True,
        )
        shutil.rmtree(scratch / f"large{nth}")
        (scratch / f"plain{nth}").unlink()
    ratio = 100 * statistics.median(ours) / statistics.median(plain)
    at_least("ours beside dd", ratio, 60, "percent")
    at_most("peak memory", peak / MB, 400, "MB")


def small(scratch: Path, ranks: int) -> None:
    """Files of some ten kilobytes."""
    settings = SMALL | {"dp": max(1, ranks // 32), "global_batch_size": max(1, ranks // 32)}
    cost = python(CODE, json.dumps(settings), scratch / "small")
    told = json.loads(cost.out)
    count = max(1, ranks // 32) * 32
    each = told["bytes"] // count
    rate = loop(scratch / "loop", count, each)
    print(
        f"{count:,} files of {each / 1e3:.0f} kB: ours {count / told['wall']:,.0f} files/s, "
        f"{1e6 * told['cpu'] / count:.0f} CPU-us each; a plain loop {rate:,.0f} files/s; {cost}"
    )
    at_least("ours beside the loop", 100 * count / told["wall"] / rate, 60, "percent")
    at_most("peak memory", cost.peak / MB, 400, "MB")


def main() -> None:
    """Run both cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=128, help="of large files")
    parser.add_argument("--small-ranks", type=int, default=8192, help="of small files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", help="where files are written and removed again")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=args.scratch))
    try:
        large(scratch, args.ranks, args.rounds)
        small(scratch, args.small_ranks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
