"""The block variants of a model, and where each of its blocks stands in the pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stagewright import blocks as nn
from stagewright.blocks.chain import MADE_ON_EACH_STAGE, live_ins, tied_tables
from stagewright.errors import UserError
from stagewright.lower.pytorch.root_unit import RootUnit
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
    """All that makes two blocks of a model differ: equal variants share one graph."""

    block: str  # a name in `blocks.BLOCKS`: embedding, layer, head, ...
    layer: Layer = Layer()
    recomputed: bool = False  # backward computes all of its forward pass again
    states_on_host: bool = False  # its optimizer step runs on the host
    activations_on_host: bool = False  # what it keeps for backward waits in the host's memory
    root: bool = False  # outside of all layers: may gather weights together with other such blocks
    ties: tuple[nn.Tie, ...] = ()  # tables that other blocks have copies of
    begins: frozenset[str] = frozenset()  # values that it is the first of its stage to use
    ends: frozenset[str] = frozenset()  # values that it is the last to use
    shared: bool = False  # every pipeline rank holds a part of its vocabulary
    weights: Storage = ()  # how its matrices are stored where the model is served
    training: nn.Training = nn.EVERYTHING  # what of it trains

    def name_at(self, layer: int) -> str:
        """The name of this block at a layer index, such as `layer3`; -1: `head` and the like."""
        if layer >= 0:
            return f"layer{layer}"
        return f"{self.block}{self.layer.ahead or ''}"


PlacedVariant = tuple[BlockVariant, int]
"""A block of a stage: its variant, and which layer of the model it is; -1: none."""


def labels(variants: Iterable[BlockVariant]) -> dict[BlockVariant, str]:
    """A name for each variant: its block, and in words what the variants of a block differ in."""
    by_block: dict[str, list[BlockVariant]] = {}
    for variant in variants:
        by_block.setdefault(variant.block, []).append(variant)
    return {v: _label(v, alternatives) for alternatives in by_block.values() for v in alternatives}


def _label(variant: BlockVariant, alternatives: Sequence[BlockVariant]) -> str:
    def differ(property_of: Callable[[BlockVariant], object]) -> bool:
        return len({property_of(v) for v in alternatives}) > 1

    layer, words = variant.layer, [variant.block]
    if differ(lambda v: v.layer.mixer):
        words.append(layer.mixer)
    if differ(lambda v: v.layer.mlp):
        words.append(layer.mlp)
    if differ(lambda v: v.layer.ahead):
        words.append(str(layer.ahead))
    if differ(lambda v: v.layer.block) and layer.block:
        words.append(f"block {layer.block}")
    if differ(lambda v: (v.begins, v.ends)):
        words += [f"first with {name}" for name in sorted(variant.begins)]
        words += [f"last with {name}" for name in sorted(variant.ends)]
    if differ(lambda v: v.ties):
        words += [tie.words for tie in variant.ties[:1]]
    if differ(lambda v: v.weights):
        words.append(_stored(variant))
    if differ(lambda v: v.training):
        words += _trained(variant, alternatives)
    if differ(lambda v: v.recomputed):
        words.append("recomputed" if variant.recomputed else "kept")
    if differ(lambda v: v.activations_on_host):
        words.append("offloaded" if variant.activations_on_host else "on device")
    if differ(lambda v: v.states_on_host):
        words.append("updated on host" if variant.states_on_host else "updated on device")
    return " ".join(words)


def _trained(variant: BlockVariant, alternatives: Sequence[BlockVariant]) -> list[str]:
    """What of a block trains, in the words in which it differs from others."""
    words: list[str] = []
    if len({v.training.constant for v in alternatives}) > 1:
        words.append("last of backward" if variant.training.constant else "with gradient of input")
    if len({v.training.frozen for v in alternatives}) > 1:
        words.append(f"{len(variant.training.frozen)} frozen")
    if len({v.training.adapters for v in alternatives}) > 1:
        words.append(f"{len(variant.training.adapters)} adapters")
    return words


def _stored(variant: BlockVariant) -> str:
    """How the matrices of a block are stored, in words."""
    return f"in {describe(variant.weights) or 'full precision'}"


# ---- which block stands where --------------------------------------------------------------------


def place_blocks(run: Run, model: ModelConfig) -> list[list[PlacedVariant]]:
    """The blocks of each virtual stage of a resolved run, in order.

    A block that is no layer goes with the layer after it, or before it
    (`blocks.chain.PlacedBlock.behind`); those before all layers are on the first stage, those after
    them on the last.
    """
    counts = run.layers_per_stage
    assert counts is not None
    ends = list(itertools.accumulate(counts))
    stages: list[list[PlacedVariant]] = [[] for _ in counts]
    between: list[PlacedVariant] = []
    stage = 0
    for name, index, layer, behind in nn.chain(model):
        if index < 0:
            recomputed = run.recompute == "full" and layer.ahead > 0
            root = RootUnit.applies(run)
            variant = BlockVariant(name, layer, recomputed, root=root)
            (stages[stage] if behind else between).append((variant, -1))
            continue
        while index >= ends[stage]:
            stage += 1
        stages[stage if index else 0] += between
        between = []
        nth = index - ends[stage] + counts[stage]  # of the layers of its stage
        recomputed = run.recompute == "full" and nth < (run.recompute_num_layers or counts[stage])
        offloaded = nth < (run.cpu_offloading_num_layers or 0)
        variant = BlockVariant(name, layer, recomputed, activations_on_host=offloaded)
        stages[stage].append((variant, index))
    stages[-1] += between
    if run.mode != "train":
        return [
            [(v._replace(weights=storage(run, model, v.block, i)), i) for v, i in stage]
            for stage in stages
        ]
    ends = shared_ends(run.schedule)
    if ends is not None:
        stages = _share_ends(stages, ends)
    return [_move_states(run, stage) for stage in _mark_first_and_last_users(stages, model)]


def _share_ends(
    stages: Sequence[Sequence[PlacedVariant]], ends: SharedEnds
) -> list[list[PlacedVariant]]:
    """The embedding and the output layer in stages that all ranks share, without their neighbours.

    Positions, and the last norm, stay on the first and on the last rank.
    """
    blocks = [placed for stage in stages for placed in stage]
    inner = [[p for p in stage if p not in (blocks[0], blocks[-1])] for stage in stages]
    first, last = [(BlockVariant("positions"), -1)], [(BlockVariant("final_norm"), -1)]
    inner = [first + inner[0], *inner[1:]]
    inner = [*inner[:-1], inner[-1] + last]
    before, behind = (
        [[(of._replace(block=name, shared=True), -1)] if name else [] for name in names]
        for (of, _), names in ((blocks[0], ends.before), (blocks[-1], ends.behind))
    )
    return [*before, *inner, *behind]


def _mark_first_and_last_users(
    stages: Sequence[Sequence[PlacedVariant]], model: ModelConfig
) -> list[list[PlacedVariant]]:
    """The blocks, with the values beside the stream that each is the first or the last to use.

    The first user on a stage makes a value that every stage makes for itself; only the last user
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


def _move_states(run: Run, stage: Sequence[PlacedVariant]) -> list[PlacedVariant]:
    """The blocks of a stage, the first of them with their optimizer states on the host."""
    if not run.optimizer_cpu_offload:
        return [*stage]
    fraction = run.optimizer_offload_fraction
    moved = len(stage) if fraction is None else round(fraction * len(stage))
    return [
        (variant._replace(states_on_host=nth < moved), layer)
        for nth, (variant, layer) in enumerate(stage)
    ]


# ---- tables of which several blocks have copies --------------------------------------------------


def tie_tables(
    stages: Sequence[Sequence[PlacedVariant]], order: Order, model: ModelConfig
) -> list[list[PlacedVariant]]:
    """The blocks, each with what it has to know of the other copies of its tables.

    Copies on one rank are one tensor; copies on several ranks exchange their gradients. Raises
    UserError where an order of a rank completes a tensor's gradient too late.
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
    ranks: dict[int, frozenset[int]] = {}  # stage -> pipeline ranks that hold it
    for place in places(order):
        ranks[place.stage] = ranks.get(place.stage, frozenset()) | {place.rank}
    ties: dict[tuple[int, int], list[nn.Tie]] = {}
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
) -> dict[tuple[int, int], nn.Tie]:
    """The tie of each copy of a table; a copy is a stage and the number of a block on it."""
    numbered = list(enumerate(copies))
    first_on_ranks = {ranks[s]: n for n, (s, _) in reversed(numbered)}
    first_on_stage = {s: n for n, (s, _) in reversed(numbered)}
    last_on_stage = {s: n for n, (s, _) in numbered}
    return {
        (s, i): nn.Tie(
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
    """A tensor that several stages of a rank share is complete with the first stage's gradient."""
    for rank in ranks if len(stages) > 1 else ():
        backwards = [a for a in flat(order[rank]) if a.kind in "BW" and a.stage in stages]
        if backwards[-1].stage != stages[0]:
            raise UserError(
                f"pipeline order: on rank {rank}, {backwards[-1]} comes after all backwards of "
                f"stage {stages[0]}, which shares {name} with it; move one of stage {stages[0]} "
                "behind it"
            )
