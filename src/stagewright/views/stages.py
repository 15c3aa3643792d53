"""What the ranks of a class are called: their stage, and their side of a disaggregated step.

>>> import stagewright as sw
>>> program = sw.compile("gpt2", layers=2, mode="decode", prefill="tp=2").program
>>> [stage_name(program, of) for of in program.classes]
['prefill stage 0', 'decode stage 0']
"""

from __future__ import annotations

from stagewright.lower.disaggregated import SIDES, Meshes
from stagewright.program.columns import Program, RankClass


def stage_kind(program: Program, of: RankClass) -> str:
    """`stage`, or in a disaggregated step `prefill stage` or `decode stage`."""
    mesh, first = program.mesh, int(of.ranks[0])
    if isinstance(mesh, Meshes):
        for side, part in zip(SIDES, mesh.parts, strict=True):
            if first < part.world_size:
                return f"{side} stage"
            first -= part.world_size
    return "stage"


def stage_name(program: Program, of: RankClass) -> str:
    """The kind of a class's stage with its number, which is its pipeline rank."""
    return f"{stage_kind(program, of)} {of.pipeline_rank}"
