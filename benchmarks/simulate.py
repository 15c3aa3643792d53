"""How long it takes to simulate a step: whole processes, CPU seconds, peak memory.

    python benchmarks/simulate.py

The main case is a step of Llama-3.1-405B on 1,024 H100s, 256 microbatches of each rank: the aim is
less than 10 CPU-seconds, from the command's start to its report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

LLAMA = "llama3.1-405b --tp 8 --pp 16 --sequence-parallel --hardware h100-sxm"
CASES = {
    "405B, 1,024 GPUs, 256 microbatches": f"{LLAMA} --nodes 128 --global-batch-size 2048",
    "the same, one slow GPU": f"{LLAMA} --nodes 128 --global-batch-size 2048 --straggler 77=1.1",
    "405B, 16,384 GPUs, 16 microbatches": f"{LLAMA} --nodes 2048 --global-batch-size 2048",
    "70B, 512 GPUs, ZeRO-3": (
        "llama3.1-70b --zero 3 --recompute full --hardware h100-sxm --nodes 64 "
        "--global-batch-size 512"
    ),
    "8B, 8 GPUs": "llama3-8b --tp 8 --hardware h100-sxm --global-batch-size 8",
}


def main() -> None:
    """Run every case and print its figures."""
    row = "{:46} {:>10} {:>8} {:>8} {:>9}"
    print(row.format("case", "step (s)", "CPU (s)", "wall (s)", "MiB"))
    for name, arguments in CASES.items():
        began = time.perf_counter()
        command = [sys.executable, "-m", "stagewright", "simulate", *arguments.split(), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            step = json.loads(process.stdout.read())["step_seconds"]
            _, _, usage = os.wait4(process.pid, 0)
            process.returncode = 0
        figures = (
            f"{step:.3f}",
            f"{usage.ru_utime + usage.ru_stime:.2f}",
            f"{time.perf_counter() - began:.2f}",
            f"{usage.ru_maxrss / 1024:.0f}",
        )
        print(row.format(name, *figures), flush=True)


if __name__ == "__main__":
    main()
