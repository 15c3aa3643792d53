"""Bytes of a rank in an inference step: weights, KV cache, live values.

Allocation is ideal: a value is live from the kernel that makes it to the last that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagewright.graph.node import Graph, Node
from stagewright.graph.roles import Role
from stagewright.lower.kernels.extent import Extent, bytes_of
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import carried, outputs
from stagewright.lower.variants import BlockVariant, PlacedVariant


class ServedFootprint(NamedTuple):
    """Bytes of one block on one rank, in inference."""

    parameters: int
    tables: Mapping[str, int]  # parameters that blocks of a rank share
    kv_cache: int  # of the requests of one microbatch
    peak: int  # peak of other live values


@dataclass(slots=True, eq=False)
class ServingMemory:
    """Memory of each pipeline rank, for any batches; footprints of blocks are cached."""

    stages: Sequence[Sequence[PlacedVariant]]
    graphs: Mapping[BlockVariant, Graph]
    kernels: Mapping[BlockVariant, Sequence[Kernel]]
    """By block, for any sizes: reads and writes of kernels do not depend on sizes."""
    extent: Callable[[Mapping[str, int]], Extent]
    _footprints: dict[tuple[int, ...], dict[BlockVariant, ServedFootprint]] = field(
        default_factory=dict[tuple[int, ...], dict[BlockVariant, ServedFootprint]]
    )
    _live: dict[BlockVariant, tuple[dict[str, Node], frozenset[str]]] = field(init=False)
    """By block, its inputs other than the stream, and its outputs."""

    def __post_init__(self) -> None:
        """Find the values that blocks exchange."""
        self._live = {
            variant: (carried(graph), frozenset(value.name for value in outputs(graph)))
            for variant, graph in self.graphs.items()
        }

    def by_category(self, rank: int, batches: Iterable[Mapping[str, int]]) -> dict[str, int]:
        """Bytes of a pipeline rank by category, and their peak; `batches` by microbatch.

        The requests of all microbatches have their keys and values in the cache at once.
        """
        microbatches = [self._on_rank(rank, sizes) for sizes in batches]
        tables = {name: size for block in microbatches[0] for name, size in block.tables.items()}
        parameters = sum(block.parameters for block in microbatches[0])
        bytes_by_category = {
            "parameters": parameters + sum(tables.values()),
            "kv_cache": sum(block.kv_cache for blocks in microbatches for block in blocks),
            "activations": max(block.peak for blocks in microbatches for block in blocks),
        }
        return bytes_by_category | {"peak": sum(bytes_by_category.values())}

    def _on_rank(self, rank: int, sizes: Mapping[str, int]) -> list[ServedFootprint]:
        """Footprints of a pipeline rank's blocks, including values that are live across them."""
        footprints, passing = self._of_blocks(sizes), self._passing(rank, sizes)
        return [
            footprints[variant]._replace(peak=footprints[variant].peak + size)
            for (variant, _), size in zip(self.stages[rank], passing, strict=True)
        ]

    def _of_blocks(self, sizes: Mapping[str, int]) -> dict[BlockVariant, ServedFootprint]:
        key = tuple(sizes.values())
        if key not in self._footprints:
            extent = self.extent(sizes)
            self._footprints[key] = {
                variant: served_footprint(graph, self.kernels[variant], extent)
                for variant, graph in self.graphs.items()
            }
        return self._footprints[key]

    def _passing(self, rank: int, sizes: Mapping[str, int]) -> list[int]:
        """Bytes of the values other than the stream that are live across each block of a rank.

        This block or a later one reads them, and an earlier one made them.
        """
        extent = self.extent(sizes)
        passing: list[int] = []
        live: dict[str, int] = {}
        for r in range(len(self.stages) - 1, rank - 1, -1):
            for variant, _ in reversed(self.stages[r]):
                reads, made = self._live[variant]
                live |= {name: bytes_of(n, extent) for name, n in reads.items()}
                live = {name: size for name, size in live.items() if name not in made}
                if r == rank:
                    passing.append(sum(live.values()))
        return passing[::-1]


def served_footprint(graph: Graph, kernels: Sequence[Kernel], extent: Extent) -> ServedFootprint:
    """Footprint of a block in inference."""
    params = {n for n in graph if n.op == "param"}
    caches = {n for n in graph if n.op == "state"}
    # Caches are written in place; values that blocks exchange outlive a block.
    written = {n for n in graph if n.op == "cache" or n.role is Role.CACHE}
    static = {*params, *caches, *written, *carried(graph).values()}
    return ServedFootprint(
        sum(bytes_of(n, extent) for n in params if not n.binding.tied),
        {n.binding.tied: bytes_of(n, extent) for n in params if n.binding.tied},
        sum(bytes_of(n, extent) for n in caches),
        _peak([t for t in kernels if t.part is TaskPart.FORWARD], static, extent),
    )


def _peak(kernels: Sequence[Kernel], static: set[Node], extent: Extent) -> int:
    """Peak bytes while the kernels run, without the `static` values."""
    values = [[n for n in dict.fromkeys((*t.reads, *t.made)) if n not in static] for t in kernels]
    last_use = {n: i for i, used in enumerate(values) for n in used}
    alive: set[Node] = set()
    now = peak = 0
    for i, used in enumerate(values):
        for n in used:
            if n not in alive:
                alive.add(n)
                now += bytes_of(n, extent)
        peak = max(peak, now)
        for n in used:
            if last_use[n] == i:
                alive.discard(n)
                now -= bytes_of(n, extent)
    return peak
