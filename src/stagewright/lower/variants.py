"""Block variants of a model, and the placement of its blocks in the pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stagewright import blocks as model_blocks
from stagewright.blocks.chain import MADE_ON_EACH_STAGE, live_ins, tied_tables
from stagewright.errors import UserError
from stagewright.lower.fsdp import FsdpUnits
from stagewright.lower.weight_storage import describe, storage
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Layer
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order, flat
from stagewright.schedule.places import places
from stagewright.schedule.schedules import shared_ends
from stagewright.schedule.vocabulary import SharedEnds
from stagewright.stored import Storage


class BlockVariant(NamedTuple):
    """Key of a block's graph: equal variants share one."""

    block: str  # a name in `blocks.BLOCKS`: embedding, layer, head, ...
    layer: Layer = Layer()
    recomputed: bool = False  # backward recomputes its forward pass
    states_on_host: bool = False  # its optimizer step runs on the host
    activations_on_host: bool = False  # values saved for backward are in host memory
    root: bool = False  # outside of all layers: may gather weights with other root blocks
    ties: tuple[model_blocks.Tie, ...] = ()  # tables of which other blocks have copies
    begins: frozenset[str] = frozenset()  # values of which it is the first user on its stage
    ends: frozenset[str] = frozenset()  # values of which it is the last user
    shared: bool = False  # every pipeline rank has a shard of its vocabulary
    weights: Storage = ()  # storage of its matrices in inference
    training: model_blocks.Training = model_blocks.EVERYTHING  # its trained parameters

    def name_at(self, layer: int) -> str:
        """Name of this block at a layer index, such as `layer3`; -1: `head` and the like."""
        if layer >= 0:
            return f"layer{layer}"
        return f"{self.block}{self.layer.ahead or ''}"


PlacedVariant = tuple[BlockVariant, int]
"""Variant of a block of a stage, and its layer of the model; -1: none."""


def labels(variants: Iterable[BlockVariant]) -> dict[BlockVariant, str]:
    """Label each variant: its block, and the properties in which variants of a block differ."""
    by_block: dict[str, list[BlockVariant]] = {}
    for variant in variants:
        by_block.setdefault(variant.block, []).append(variant)
    return {v: _label(v, alternatives) for alternatives in by_block.values() for v in alternatives}


def _label(variant: BlockVariant, alternatives: Sequence[BlockVariant]) -> str:
    layer, training = variant.layer, variant.training
    first = [f"first with {name}" for name in sorted(variant.begins)]
    last = [f"last with {name}" for name in sorted(variant.ends)]
    properties: tuple[tuple[Callable[[BlockVariant], object], Sequence[str]], ...] = (
        (lambda v: v.layer.mixer, [layer.mixer]),
        (lambda v: v.layer.mlp, [layer.mlp]),
        (lambda v: v.layer.ahead, [str(layer.ahead)]),
        (lambda v: v.layer.block, [f"block {layer.block}"] if layer.block else []),
        (lambda v: (v.begins, v.ends), [*first, *last]),
        (lambda v: v.ties, [tie.words for tie in variant.ties[:1]]),
        (lambda v: v.weights, [f"in {describe(variant.weights) or 'full precision'}"]),
        (lambda v: v.training.constant,
         ["last of backward" if training.constant else "with gradient of input"]),
        (lambda v: v.training.frozen, [f"{len(training.frozen)} frozen"]),
        (lambda v: v.training.adapters, [f"{len(training.adapters)} adapters"]),
        (lambda v: v.recomputed, ["recomputed" if variant.recomputed else "kept"]),
        (lambda v: v.activations_on_host,
         ["offloaded" if variant.activations_on_host else "on device"]),
        (lambda v: v.states_on_host,
         ["updated on host" if variant.states_on_host else "updated on device"]),
    )  # fmt: skip
    words = [variant.block]
    for property_of, value_words in properties:
        if len({property_of(v) for v in alternatives}) > 1:
            words += value_words
    return " ".join(words)


# ---- placement -----------------------------------------------------------------------------------


def place_blocks(run: Run, model: ModelConfig) -> list[list[PlacedVariant]]:
    """Place the blocks of a resolved run on its virtual stages, in order.

    A block that is no layer is placed with the layer after it, or before it
    (`blocks.chain.PlacedBlock.behind`); blocks before all layers are on the first stage, those
    after them on the last.
    """
    counts = run.layers_per_stage
    assert counts is not None
    ends = list(itertools.accumulate(counts))
    stages: list[list[PlacedVariant]] = [[] for _ in counts]
    between: list[PlacedVariant] = []
    stage = 0
    for name, index, layer, behind in model_blocks.chain(model):
        if index < 0:
            recomputed = run.recompute == "full" and layer.ahead > 0
            variant = BlockVariant(name, layer, recomputed, root=FsdpUnits.applies(run))
            (stages[stage] if behind else between).append((variant, -1))
            continue
        while index >= ends[stage]:
            stage += 1
        stages[stage if index else 0] += between
        between = []
        on_stage = index - ends[stage] + counts[stage]
        num_recomputed = run.recompute_num_layers or counts[stage]
        recomputed = run.recompute == "full" and on_stage < num_recomputed
        offloaded = on_stage < (run.cpu_offloading_num_layers or 0)
        variant = BlockVariant(name, layer, recomputed, activations_on_host=offloaded)
        stages[stage].append((variant, index))
    stages[-1] += between
    if run.mode != "train":
        return [
            [(v._replace(weights=storage(run, model, v.block, i)), i) for v, i in stage]
            for stage in stages
        ]
    if shared := shared_ends(run.schedule):
        stages = _share_ends(stages, shared)
    stages = _mark_first_and_last_users(stages, model)
    if run.optimizer_cpu_offload:
        stages = [_move_states(run.optimizer_offload_fraction, stage) for stage in stages]
    return stages


def _share_ends(
    stages: Sequence[Sequence[PlacedVariant]], ends: SharedEnds
) -> list[list[PlacedVariant]]:
    """Move the embedding and the output layer to stages that all ranks share.

    Positions, and the last norm, stay on the first and on the last rank.
    """
    blocks = [placed for stage in stages for placed in stage]
    inner = [[p for p in stage if p not in (blocks[0], blocks[-1])] for stage in stages]
    first, last = [(BlockVariant("positions"), -1)], [(BlockVariant("final_norm"), -1)]
    inner = [first + inner[0], *inner[1:]]
    inner = [*inner[:-1], inner[-1] + last]
    before, after = (
        [[(variant._replace(block=name, shared=True), -1)] if name else [] for name in names]
        for (variant, _), names in ((blocks[0], ends.before), (blocks[-1], ends.after))
    )
    return [*before, *inner, *after]


def _mark_first_and_last_users(
    stages: Sequence[Sequence[PlacedVariant]], model: ModelConfig
) -> list[list[PlacedVariant]]:
    """Mark the first and last users of values other than the stream.

    The first user on a stage makes a value that is computed on every stage; only the last user
    starts its gradient.
    """
    users: dict[tuple[str, int], list[tuple[int, int]]] = {}  # value, stage -> stage, block
    for s, stage in enumerate(stages):
        for i, (variant, _) in enumerate(stage):
            for name in live_ins(model, variant.block, variant.layer):
                made_on = s if name in MADE_ON_EACH_STAGE else -1
                users.setdefault((name, made_on), []).append((s, i))
    marked = [[*stage] for stage in stages]

    def mark(at: tuple[int, int], field: str, name: str) -> None:
        s, i = at
        variant, layer = marked[s][i]
        marked[s][i] = variant._replace(**{field: getattr(variant, field) | {name}}), layer

    for (name, made_on), blocks in users.items():
        if made_on >= 0:
            mark(blocks[0], "begins", name)
        mark(blocks[-1], "ends", name)
    return marked


def _move_states(fraction: float | None, stage: Sequence[PlacedVariant]) -> list[PlacedVariant]:
    """Move optimizer states of the first blocks of a stage to the host; None: of all blocks."""
    moved = len(stage) if fraction is None else round(fraction * len(stage))
    return [
        (variant._replace(states_on_host=i < moved), layer)
        for i, (variant, layer) in enumerate(stage)
    ]


# ---- tied tables ---------------------------------------------------------------------------------


def tie_tables(
    stages: Sequence[Sequence[PlacedVariant]], order: Order, model: ModelConfig
) -> list[list[PlacedVariant]]:
    """Set the ties of blocks with copies of a table.

    Copies on one rank are one tensor; copies on several ranks exchange their gradients. Raises
    UserError if the order of a rank completes a tensor's gradient too late.
    """
    copies_of: dict[str, list[tuple[int, int]]] = {}  # table -> stage, block
    distinct = {variant for stage in stages for variant, _ in stage}
    tables = {v: tied_tables(model, v.block, v.layer, v.begins) for v in distinct}
    if not any(tables.values()):
        return [[*stage] for stage in stages]
    for s, stage in enumerate(stages):
        for i, (variant, _) in enumerate(stage):
            for name in tables[variant]:
                copies_of.setdefault(name, []).append((s, i))
    ranks: dict[int, frozenset[int]] = {}  # stage -> its pipeline ranks
    for place in places(order):
        ranks[place.stage] = ranks.get(place.stage, frozenset()) | {place.rank}
    ties: dict[tuple[int, int], list[model_blocks.Tie]] = {}
    for name, copies in copies_of.items():
        for at, tie in _ties(name, copies, ranks).items():
            ties.setdefault(at, []).append(tie)
        for holders in {ranks[s] for s, _ in copies}:
            sharing = sorted({s for s, _ in copies if ranks[s] == holders})
            _check_order(order, holders, name, sharing)
    return [
        [
            (variant._replace(ties=tuple(ties[s, i])) if (s, i) in ties else variant, layer)
            for i, (variant, layer) in enumerate(stage)
        ]
        for s, stage in enumerate(stages)
    ]


def _ties(
    name: str, copies: Sequence[tuple[int, int]], ranks: Mapping[int, frozenset[int]]
) -> dict[tuple[int, int], model_blocks.Tie]:
    """Tie of each copy of a table: a stage and the index of a block on it."""
    numbered = list(enumerate(copies))
    first_on_ranks = {ranks[s]: n for n, (s, _) in reversed(numbered)}
    first_on_stage = {s: n for n, (s, _) in reversed(numbered)}
    last_on_stage = {s: n for n, (s, _) in numbered}
    return {
        (s, i): model_blocks.Tie(
            name,
            first=n == 0,
            owner=n == first_on_ranks[ranks[s]],
            away=len(first_on_ranks) > 1,
            later=n < last_on_stage[s],
            leads=n == first_on_stage[s],
        )
        for n, (s, i) in numbered
    }


def _check_order(order: Order, ranks: Iterable[int], name: str, stages: Sequence[int]) -> None:
    """Raise UserError unless the first stage's gradient completes a shared tensor's."""
    for rank in ranks if len(stages) > 1 else ():
        backwards = [a for a in flat(order[rank]) if a.kind in "BW" and a.stage in stages]
        if backwards[-1].stage != stages[0]:
            raise UserError(
                f"pipeline order: on rank {rank}, {backwards[-1]} comes after all backwards of "
                f"stage {stages[0]}, which shares {name} with it; move one of stage {stages[0]} "
                "behind it"
            )
