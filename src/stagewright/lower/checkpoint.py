"""Bytes of a training checkpoint: every parameter and every state of the optimizer, once.

A restart needs the parameters as they are stored and the optimizer's states: moments, and master
copies where the optimizer keeps some. That is 14 bytes per parameter with bf16 parameters and
fp32 master copies and moments (Megatron-LM), 12 with fp32 parameters (FSDP). Copies on other
ranks (of data parallelism, of tied tables, of what tensor parallelism does not split) are written
once; adapters count, and so do frozen weights, which a restart could also take from elsewhere.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> compiled = compile(Run(model="llama3.1-8b", tp=2, pp=2, dp=4, zero=1, layers=4))
>>> of = checkpoint(compiled)
>>> of.bytes == 14 * compiled.parameters == sum(of.by_category.values())
True
>>> of.by_category["parameters"] == 2 * compiled.parameters
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.graph.node import BYTES, Graph
from stagewright.graph.roles import Role
from stagewright.graph.table import LEAVES
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.recipe import sizes_of
from stagewright.lower.training import stages_of
from stagewright.lower.variants import BlockVariant, labels
from stagewright.schedule.places import mirrored, places

CATEGORY = {Role.PARAMETER: "parameters", Role.STATE: "optimizer"}
"""Roles of what a checkpoint holds, and the categories of memory that they count in."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Sizes of a checkpoint in bytes."""

    by_category: Mapping[str, int]
    """Of the whole checkpoint: `parameters` and `optimizer`."""
    by_pipeline_rank: tuple[float, ...]
    """Written by one GPU of each pipeline rank, whose GPUs share the work equally (Megatron-LM's
    `--ckpt-fully-parallel-save`, PyTorch's distributed checkpoint)."""

    @property
    def bytes(self) -> int:
        """Size of the whole checkpoint."""
        return sum(self.by_category.values())

    def to_dict(self) -> dict[str, Any]:
        """Entry of JSON: bytes."""
        return {
            "bytes": self.bytes,
            "by_category": dict(self.by_category),
            "bytes_per_gpu_by_pipeline_rank": [*self.by_pipeline_rank],
        }


def checkpoint(compiled: CompiledRun) -> Checkpoint:
    """Size of a checkpoint of a training run."""
    run, model, order = compiled.run, compiled.model, compiled.order
    sizes = sizes_of(run, model, replicas=1 + mirrored(order))
    stages = stages_of(run, model, order)
    names = labels(dict.fromkeys(variant for stage in stages for variant, _ in stage))
    of_variant = {v: _stored(v, compiled.blocks[label], sizes) for v, label in names.items()}
    total = dict.fromkeys(CATEGORY.values(), 0)
    holders: list[list[int]] = [[] for _ in stages]
    for place in places(order):
        holders[place.stage].append(place.rank)
    by_rank = [0.0] * len(order)
    for stage, ranks in zip(stages, holders, strict=True):
        for variant, _ in stage:
            for category, size in of_variant[variant].items():
                total[category] += size
                for rank in ranks:
                    by_rank[rank] += size / len(ranks)
    gpus = compiled.program.mesh.world_size // len(order)
    return Checkpoint(total, tuple(size / gpus for size in by_rank))


def _stored(variant: BlockVariant, graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a block in a checkpoint by category, without copies of tables of earlier blocks."""
    copies = {tie.name for tie in variant.ties if not tie.first}
    elsewhere = {leaf.binding.name for leaf in graph if leaf.binding.tied in copies}
    stored = dict.fromkeys(CATEGORY.values(), 0)
    for leaf in graph:
        if leaf.op in LEAVES and leaf.role in CATEGORY and leaf.binding.name not in elsewhere:
            number = math.prod(d.value(sizes) for d in leaf.shape)
            stored[CATEGORY[leaf.role]] += math.ceil(number * BYTES[leaf.dtype])
    return stored
