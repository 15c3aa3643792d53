"""Side by side with the peer generator, astra-sim/stage: the same model, degrees and microbatches.

    python benchmarks/peer.py [--peer CHECKOUT] [--peer-python PYTHON] [--long] [--scratch DIR]

Llama-70B's dimensions, tp=8 pp=4, whole processes. The peer is run from a checkout of one's own,
with an interpreter that has what it needs (numpy, sympy, pandas, graphviz, tqdm, protobuf); without
one, its figures are those of an earlier run on a machine of this kind. `--long` runs its 128
microbatches too, for half an hour. At the margin: what a rank more costs, from 512 to 2048 ranks.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from measure import Cost, at_least, run, stagewright


class Case(NamedTuple):
    """Degrees and batch, and the CPU-seconds that the peer was known to take."""

    dp: int
    microbatches: int
    known: float
    aim: float | None = None
    long: bool = False


CASES = {
    "32 GPUs, 1 microbatch": Case(1, 1, 20),
    "512 GPUs, 1 microbatch": Case(16, 1, 32, 20),
    "2048 GPUs, 1 microbatch": Case(64, 1, 63),
    "32 GPUs, 8 microbatches": Case(1, 8, 128),
    "32 GPUs, 128 microbatches": Case(1, 128, 1900, 100, long=True),
}


def ours(case: Case, out: Path) -> Cost:
    """Our run."""
    return stagewright(
        "generate", "llama3-70b", "--tp", 8, "--pp", 4, "--dp", case.dp, "--sequence-parallel",
        "--global-batch-size", case.dp * case.microbatches, "-o", out,
    )  # fmt: skip


def theirs(case: Case, out: Path, checkout: str, interpreter: str) -> Cost:
    """The peer's run; it builds a Llama with mixed precision only."""
    dims = "--dvocal 128256 --dmodel 8192 --dff 28672 --head 64 --kvhead 8 --num_stacks 80"
    batch = case.dp * case.microbatches
    line = [interpreter, "main.py", "--output_dir", str(out), "--output_name", "workload.%d.et"]
    line += ["--model_type", "llama", "--mixed_precision", "true", *dims.split(), "--seq", "8192"]
    line += ["--tp", "8", "--pp", "4", "--dp", str(case.dp)]
    line += ["--batch", str(batch), "--micro_batch", str(case.dp)]
    return run(line, cwd=checkout)


def main() -> None:
    """Run every case on both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="CHECKOUT", help="a checkout of astra-sim/stage")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--long", action="store_true", help="run the peer's longest case, too")
    parser.add_argument("--scratch", help="where traces are written and removed again")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=args.scratch))
    found: dict[str, tuple[float, float]] = {}
    try:
        for nth, (name, case) in enumerate(CASES.items()):
            # Nothing is deleted in between: file systems are slow to reuse what was just freed.
            cost, known, how = ours(case, scratch / f"ours{nth}"), case.known, "known"
            if args.peer and (args.long or not case.long):
                peer = theirs(case, scratch / f"peer{nth}", args.peer, args.peer_python)
                known, how = peer.cpu, str(peer)
            print(f"{name}: ours {cost}; the peer {known:.0f} CPU-s ({how})", flush=True)
            found[name] = cost.cpu, known
            if case.aim is None:
                print(f"    {known / cost.cpu:.0f} times less")
            else:
                at_least("ratio", known / cost.cpu, case.aim, "times less")
        some, many = found["512 GPUs, 1 microbatch"], found["2048 GPUs, 1 microbatch"]
        own, other = ((many[side] - some[side]) / (2048 - 512) for side in (0, 1))
        print(f"at the margin: ours {1e3 * own:.2f}, the peer {1e3 * other:.1f} CPU-ms a rank")
        at_least("ratio", other / own, 100, "times less")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
