"""Two hundred random programs of PyTorch and ours: the share that is exact, and the other programs.

`tests/data/random_programs.jsonl` holds what programs of PyTorch 2.13 did under a fake process
group, a line each, in the form of `compare.py`, and every collective of the rank in order: `order`
are numbers of `kinds` (kind, mesh dim, group size, dtype, bytes in, bytes out). A seeded generator
made the programs before ours was compared (from s1000 on: `tools/pytorch/random_programs.py`):
dense and with experts, FSDP2 and HSDP, DDP, tensor, sequence, context and expert parallelism, seven
pipeline schedules, checkpoints, microbatches, tied and uneven tables, grouped queries, data types,
SGD. `python tests/conformance/random_programs.py [FILE...]` prints the programs that differ;
`page.py` writes the table of shares.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import compare
import numpy as np

from stagewright.lower.compiled_run import CompiledRun
from stagewright.program.columns import COLLECTIVES, TaskKind

LINES = (Path(__file__).parents[1] / "data" / "random_programs.jsonl").read_text().splitlines()
CASES: dict[str, compare.Case] = {c["name"]: c for c in map(json.loads, LINES)}

ONE_MESH = "with tensor parallelism alone, clip_grad_norm_ reduces norms of DTensors one by one"

LOST = (
    "PyTorch loses gradients: the input half of a backward looks for the weights that its weight "
    "half needs among parameters that are sharded where `reshard_after_forward` is on"
)
LAST_ROWS = (
    "the last rank of tp has fewer rows of a vocabulary that tp does not divide; ours has as many "
    "as the others"
)
TEMPORARIES = (
    "temporaries of one layer's backward: ours holds one gathered tensor more (not traced)"
)

DIFFERENT: dict[str, str] = {
    "r096_tp2": ONE_MESH,
    "s1069_tp4": TEMPORARIES,
    "s1077_pp2dp3_ZBVZeroBubble": LOST,
    "s1089_tp4": LAST_ROWS,
}
"""Programs that are not exact, and the reason."""


class Result(NamedTuple):
    """Comparison of one program."""

    collectives: bool
    """Kind, group, dtype, number, bytes in and out by phase."""
    order: bool
    """The order of the collectives of each group."""
    flops: bool
    """FLOPs of matrix products and attention by phase."""
    state: bool
    """Bytes of parameters, gradients and optimizer states."""
    peak: float
    """Ours / PyTorch's - 1."""

    @property
    def exact(self) -> bool:
        """Collectives, their order, FLOPs and state are equal, and the peak is within 2%."""
        equal = self.collectives and self.order and self.flops and self.state
        return equal and abs(self.peak) <= compare.TOLERANCE


def by_group(events: list[tuple[Any, ...]]) -> dict[Any, list[tuple[Any, ...]]]:
    """Collectives in order, by group; messages by direction, too."""
    found: dict[Any, list[tuple[Any, ...]]] = {}
    for e in events:
        kind, dim, ranks, *_ = e
        way = kind if kind in ("send", "recv") else ""
        found.setdefault((dim, ranks, way), []).append(e)
    return found


def recorded(case: compare.Case) -> list[tuple[Any, ...]]:
    return [tuple(case["kinds"][int(i)]) for i in case["order"].split()]


def ours(case: compare.Case, compiled: CompiledRun) -> list[tuple[Any, ...]]:
    """Our collectives and messages in the order of the program."""
    t, program = compare.rank_of(case, compiled).tasks, compiled.program
    named = compare.axes_of(dict(case["mesh"]))
    found: list[tuple[Any, ...]] = []
    for i in np.flatnonzero(t.kind != TaskKind.COMPUTE):
        if t.kind[i] == TaskKind.COLLECTIVE:
            axes = program.communicators[t.slot[i]].axes
            kind = COLLECTIVES[t.collective[i]]
        else:
            axes, kind = (program.peers[t.slot[i]].axis,), t.ops[t.op[i]]
            if axes == ("cp",):  # torch's ring steps are an all_to_all with one peer
                if kind == "recv":
                    continue
                kind = "all_to_all"
        label, ranks = program.mesh.label(axes), program.mesh.size(*axes)
        size = compare.in_out(("", kind, "", ranks), int(t.comm_bytes[i]))
        dtype = compare.DTYPES[t.dtypes[t.dtype[i]]]
        found.append((kind, named.get(label, label), ranks, dtype, *size))
    return found


def result(case: compare.Case) -> Result:
    compiled = compare.compiled_of(case)
    alike = compare.recorded_collectives(case) == compare.collectives(case, compiled)
    ordered = by_group(recorded(case)) == by_group(ours(case, compiled))
    state = compare.state(case, compiled) == compare.recorded_state(case)
    peak = compare.peak(case, compiled) / compare.recorded_live(case, "peak") - 1
    counted = compare.recorded_flops(case) == compare.flops(case, compiled)
    return Result(alike, ordered, counted, state, peak)


def table() -> str:
    """Shares of equal programs, and reasons of differences."""
    results = {name: result(case) for name, case in CASES.items()}
    n, of = len(results), results.values()
    rows = [
        ("collectives: phase, kind, group, dtype, number, bytes", sum(r.collectives for r in of)),
        ("also the order within each group", sum(r.collectives and r.order for r in of)),
        ("FLOPs of matrix products and attention by phase", sum(r.flops for r in of)),
        ("bytes of parameters, gradients and optimizer states", sum(r.state for r in of)),
        ("peak within 2%", sum(abs(r.peak) <= compare.TOLERANCE for r in of)),
        ("peak within 0.2%", sum(abs(r.peak) <= 0.002 for r in of)),
        ("collectives, order, FLOPs, state, and peak within 2%", sum(r.exact for r in of)),
    ]
    lines = [f"| comparison, {n} random programs | equal |", "|---|---:|"]
    lines += [f"| {what} | {count} |" for what, count in rows]
    lines += ["", "| reason of a difference | programs |", "|---|---:|"]
    lines += [f"| {why} | {count} |" for why, count in Counter(DIFFERENT.values()).most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    files = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    for name, case in {c["name"]: c for c in map(json.loads, files or LINES)}.items():
        if not (r := result(case)).exact:
            print(name, r, DIFFERENT.get(name, "NOT LISTED"))
