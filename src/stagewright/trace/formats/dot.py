"""The program of a rank as a Graphviz drawing, `rank.<rank>.dot`: small graphs, to look at.

Boxes are kernels, ellipses collectives, arrows messages; a solid edge is data, a dashed one
order alone. Actions of the schedule are clusters. Draw with `dot -Tsvg rank.0.dot -o rank.0.svg`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.program.columns import Program
from stagewright.trace.formats.json import TextBatch, nodes, text_batches

FILE = "rank.{rank}.dot"
"""Name of a rank's file."""

MOST = 3000
"""Largest number of nodes in a drawing: Graphviz takes minutes for more."""

_LOOKS = {
    "compute": 'shape=box, fillcolor="#dbe9f6"',
    "collective": 'shape=ellipse, fillcolor="#fde0c5"',
    "send": 'shape=rarrow, fillcolor="#d9efd4"',
    "recv": 'shape=larrow, fillcolor="#d9efd4"',
    "load": 'shape=cds, fillcolor="#eeeeee"',
    "store": 'shape=cds, fillcolor="#eeeeee"',
}


def plan(program: Program, ranks: Int, provenance: Mapping[str, str | int]) -> list[TextBatch]:
    """The batches that write the drawings of `ranks`; a rank with too many nodes is a UserError."""
    most = max(len(of.tasks) for of in program.classes)
    if most > MOST:
        raise UserError(
            f"a rank has {most} nodes, a dot drawing at most {MOST}: use fewer layers (--layers 2) "
            "and microbatches (--global-batch-size), or --format json"
        )
    return text_batches(
        program, ranks, lambda tasks, rank: text(rank, list(nodes(program, tasks, rank)))
    )


def text(rank: int, drawn: Sequence[Mapping[str, Any]]) -> str:
    """A drawing of the nodes of a rank, in the dot language."""
    lines = [f'digraph "rank {rank}" {{', "  rankdir=LR; node [style=filled, fontname=Helvetica];"]
    for i, ((phase, microbatch), group) in enumerate(itertools.groupby(drawn, _action)):
        title = phase if microbatch is None else f"{phase}, microbatch {microbatch}"
        lines.append(f'  subgraph cluster_{i} {{ label="{title}"; color=gray;')
        lines += [f"    {n['id']} [label={_label(n)}, {_LOOKS[n['kind']]}];" for n in group]
        lines.append("  }")
    for n in drawn:
        lines += [f"  {d} -> {n['id']};" for d in n["deps"]]
        data = set(n["deps"])
        lines += [f"  {d} -> {n['id']} [style=dashed];" for d in n["order"] if d not in data]
    return "\n".join([*lines, "}", ""])


def _action(n: Mapping[str, Any]) -> tuple[str, int | None]:
    """Phase and microbatch of the cluster of a node; recomputation belongs to backward."""
    phase = "backward" if n["phase"] == "recompute" else n["phase"]
    return phase, n.get("microbatch")


def _label(n: Mapping[str, Any]) -> str:
    what = f"{n['flops']:.3g} FLOP" if n["kind"] == "compute" else f"{n['bytes']:,} B"
    who = f"group {n['group']}" if "group" in n else f"rank {n['peer']}" if "peer" in n else ""
    return json.dumps("\n".join(filter(None, (n["name"], what, who))))
