"""Token copies that each rank dispatches to experts, and that its experts receive.

The load is even unless a file of expert loads says otherwise (`--expert-load`). In training, the
work of a rank then depends on its experts, and ranks with equal work in all layers form a class.
The work of a rank is linear: its work without copies, plus a term per copy sent and per copy
received. In inference, all ranks have the work of the busiest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.algebra.layout import Mesh
from stagewright.algebra.size import Size, size
from stagewright.arrays import Float, Int
from stagewright.errors import UserError
from stagewright.lower.assembly.work import assembled
from stagewright.model.config import ModelConfig
from stagewright.model.layers import ROUTED
from stagewright.parallel.plan import Plan
from stagewright.program.columns import COLLECTIVES, Program, RankClass, Shape, TaskKind
from stagewright.program.communicators import place_along
from stagewright.run.expert_load import lines_of, times_mean
from stagewright.run.settings import Run

ROWS = size("R")
"""Dim of token copies (rows) of an expert."""


class ExpertRows(NamedTuple):
    """Mean rows of an expert, in total on the ranks that split the rows.

    Before dispatch these are all ranks with different tokens; after dispatch, those that also have
    the expert.
    """

    moving: frozenset[str]
    """Axes of expert parallelism that split tokens."""
    before: Fraction
    after: Fraction

    def __call__(self, axes: tuple[str, ...]) -> Fraction:
        """Mean rows where `axes` split them."""
        dispatched = not self.moving or not self.moving <= set(axes)
        return self.after if dispatched else self.before


@dataclass(frozen=True)
class Routing:
    """Exchange of token copies in a run: ranks, experts and copies per rank."""

    mesh: Mesh
    experts: int
    expert: tuple[str, ...]  # axes that split the experts, outermost first
    tokens: tuple[str, ...]  # axes that split tokens
    copies: int  # token copies that a rank sends in a microbatch
    capacity: int | None  # max copies that an expert receives from one rank
    padded: bool

    @classmethod
    def of(cls, run: Run, model: ModelConfig, mesh: Mesh, plan: Plan, tokens: int) -> Routing:
        """Routing of a resolved run; `tokens`: tokens of all ranks in a microbatch."""
        copies = tokens // mesh.size(*plan.tokens) * model.top_k
        factor = run.moe_expert_capacity_factor
        # As Megatron-LM's get_capacity rounds.
        capacity = None if factor is None else math.ceil(copies / model.num_experts * factor)
        padded = run.moe_pad_expert_input_to_capacity
        return cls(mesh, model.num_experts, plan.expert, plan.tokens, copies, capacity, padded)

    @property
    def positions(self) -> int:
        """Number of ranks that the experts are split over."""
        return self.mesh.size(*self.expert)

    @property
    def held(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.positions

    @property
    def senders(self) -> int:
        """Number of ranks with different tokens among those that split the experts."""
        return self.mesh.size(*(a for a in self.expert if a in self.tokens))

    def taken(self, share: Fraction) -> Fraction:
        """Copies that an expert receives from one rank; `share`: its fraction of all copies."""
        if self.padded and self.capacity is not None:
            return Fraction(self.capacity)
        copies = share * self.copies
        return copies if self.capacity is None else min(copies, Fraction(self.capacity))

    def rows(self, sent: Fraction | int, got: Fraction | int) -> ExpertRows:
        """ExpertRows of the experts on a rank that sends `sent` copies and receives `got`."""
        moving = frozenset(a for a in self.expert if a in self.tokens)
        parts = self.mesh.size(*self.tokens)
        before = Fraction(sent * parts, self.experts)
        after = Fraction(got * parts, self.senders * self.held)
        return ExpertRows(moving, before, after)

    def even(self) -> ExpertRows:
        """ExpertRows with equal numbers of copies for all experts."""
        copies = self.taken(Fraction(1, self.experts))
        return self.rows(self.experts * copies, self.held * self.senders * copies)


@dataclass(frozen=True, eq=False)
class Load:
    """Token copies per microbatch and layer, sent and received, the latter per expert rank."""

    routing: Routing
    lines: Sequence[tuple[float, ...]]  # the file's: a row per layer with experts, or one for all
    sent: Int  # [layers]; 0 in layers without experts
    got: Int  # [layers, positions]

    @classmethod
    def read(
        cls, given: str | Sequence[Sequence[object]], routing: Routing, model: ModelConfig
    ) -> Load:
        """Read the load from a file, rows, or the ratio of the busiest rank to the mean.

        Rows: one per layer with experts, or one for all.
        """
        if not set(routing.expert) <= set(routing.tokens):
            raise UserError(
                "expert_load: ep spans ranks of tp, and without sequence parallelism these hold "
                "identical tokens; set sequence_parallel"
            )
        layers = _routed_layers(model)
        lines = lines_of(given, model, layers, routing.positions)
        sent = np.zeros(model.num_layers, np.int64)
        got = np.zeros((model.num_layers, routing.positions), np.int64)
        memo: dict[tuple[float, ...], tuple[int, list[int]]] = {}
        for layer, line in zip(layers, lines * (len(layers) // len(lines)), strict=True):
            if line not in memo:
                total, held = sum(map(Fraction, line)), routing.held
                taken = [routing.taken(Fraction(number) / total) for number in line]
                by_rank = [taken[i : i + held] for i in range(0, len(taken), held)]
                received = [round(sum(experts) * routing.senders) for experts in by_rank]
                memo[line] = round(sum(taken)), received
            sent[layer], got[layer] = memo[line]
        return cls(routing, lines, sent, got)

    def position(self) -> Int:
        """Index of every rank among the ranks that the experts are split over."""
        return place_along(self.routing.mesh, self.routing.expert)

    def programs(self, make: Callable[[ExpertRows], Program]) -> Program:
        """Build the program of all ranks at this load; `make` compiles it at equal rows.

        Every column is linear in the rows, so it follows from programs at zero rows, at one row
        sent per expert, and at one row received per expert.
        """
        routing = self.routing
        cases = ((0, 0), (routing.experts, 0), (0, routing.held))
        none, sent, received = (make(routing.rows(*case)) for case in cases)
        classes: list[RankClass] = []
        for three in zip(none.classes, sent.classes, received.classes, strict=True):
            classes += self._split(_LinearClass(routing, three))
        return replace(none, classes=tuple(classes))

    def _split(self, linear: _LinearClass) -> list[RankClass]:
        """Split a rank class into classes of equal work."""
        ranks, maximum = linear.base.ranks, self.got.max(axis=1)
        position = self.position()[ranks]
        # Layers whose actions are shared have equal loads.
        received = self.got[np.unique(linear.layer)][:, position]
        work = np.concatenate([np.zeros((1, len(position)), np.int64), received])
        _, first, index = np.unique(work, axis=1, return_index=True, return_inverse=True)
        index = np.argsort(np.argsort(first))[index.ravel()]  # classes by their first rank
        return [
            linear.with_load(ranks[index == i], self.sent, self.got[:, position[example]], maximum)
            for i, example in enumerate(np.sort(first).tolist())
        ]

    @property
    def of_layers(self) -> Mapping[int, Hashable]:
        """Key of the load of each layer."""
        loads = zip(self.sent.tolist(), self.got, strict=True)
        return {layer: (sent, got.tobytes()) for layer, (sent, got) in enumerate(loads)}


_COLUMNS = ("flops", "traffic", "comm_bytes")


class _LinearClass:
    """Rank class whose numbers are linear in the copies sent and received per layer."""

    def __init__(self, routing: Routing, classes: Sequence[RankClass]) -> None:
        """`classes`: at zero rows, at one row sent per expert, and at one row received."""
        self.base = classes[0]
        self.per_row = (routing.experts, routing.held)
        """Copies of one row per expert: sent, received."""
        works = [assembled(rank_class) for rank_class in classes]
        tables, rows = [work.actions.tasks for work in works], works[0].rows
        self.shape_tables = [tasks.shapes for tasks in tables]
        shapes = np.stack([tasks.shape[rows] for tasks in tables], axis=1)
        growth = {c: self._growth([getattr(t, c)[rows] for t in tables]) for c in _COLUMNS}
        changes = np.any([column.any(axis=1) for column in growth.values()], axis=0)
        changes |= np.array([len({*self._extents(*three)}) > 1 for three in shapes.tolist()], bool)
        self.rows = rows[changes]
        """Rows of the actions of the class that depend on the copies."""
        self.layer = tables[0].layer[self.rows].astype(np.int64)
        self.growth = {c: column[changes] for c, column in growth.items()}
        """By column, growth of each row per copy sent and per copy received."""
        self.shapes = shapes[changes]
        """Index of the shape of each row in each of `shape_tables`."""
        stages = zip(*(work.stage_bytes for work in works), strict=True)
        self.stage_bytes = [(three[0], self._growth([s.size for s in three])) for three in stages]

    def _growth(self, columns: Sequence[Int]) -> Int:
        """Growth of each entry per copy sent and per copy received."""
        base, *others = columns
        growth = [(x - base) // n for x, n in zip(others, self.per_row, strict=True)]
        return np.stack(growth, axis=1)

    def _extents(self, *shapes: int) -> list[tuple[tuple[str, int], ...]]:
        """Extents of the shape of a row in each of the three classes."""
        tables = zip(self.shape_tables, shapes, strict=True)
        return [table[shape].extents if shape >= 0 else () for table, shape in tables]

    def with_load(self, ranks: Int, sent: Int, received: Int, maximum: Int) -> RankClass:
        """Class of ranks that send and receive these copies per layer, at most `maximum`.

        An exchange lasts as long as its busiest rank needs. All members must have one size, so
        `comm_bytes` is that of an even exchange of equal duration; `uneven_bytes` is the size of
        this rank.
        """
        work = assembled(self.base)
        tasks, rows = work.actions.tasks, self.rows
        copies = np.stack([sent[self.layer], received[self.layer]], axis=1)
        columns = {c: getattr(tasks, c).copy() for c in _COLUMNS}
        for c, growth in self.growth.items():
            columns[c][rows] += (growth * copies).sum(axis=1)
        size = columns["comm_bytes"].copy()
        exchanges = tasks.collective[rows] == COLLECTIVES.index("all_to_all")
        width = self.growth["comm_bytes"][exchanges].sum(axis=1)
        size[rows[exchanges]] = width * np.maximum(sent, maximum)[self.layer[exchanges]]
        kernels = tasks.kind[rows] == TaskKind.COMPUTE
        # A launch without rows has a byte; ASTRA-sim hangs on a collective without bytes.
        columns["traffic"][rows[kernels]] = np.maximum(columns["traffic"][rows[kernels]], 1)
        size[rows[~kernels]] = np.maximum(size[rows[~kernels]], 1)
        shape, shapes = self._shapes_at(copies)
        loaded = replace(
            tasks, flops=columns["flops"], traffic=columns["traffic"], comm_bytes=size,
            uneven_bytes=columns["comm_bytes"], shape=shape, shapes=shapes,
        )  # fmt: skip
        sizes = {
            stage: size + (growth * np.stack([sent[layer], received[layer]], axis=1)).sum(axis=1)
            for (stage, layer, size), growth in self.stage_bytes
        }
        return replace(self.base, ranks=ranks, work=work.with_numbers(loaded, sizes))

    def _shapes_at(self, copies: Int) -> tuple[NDArray[np.int32], tuple[Shape, ...]]:
        """Column of shapes and table of shapes, with the copies of each row."""
        tasks = assembled(self.base).actions.tasks
        index = {shape: i for i, shape in enumerate(tasks.shapes)}
        keys, of = np.unique(np.hstack([self.shapes, copies]), axis=0, return_inverse=True)
        new: list[int] = []
        distinct: list[list[int]] = keys.tolist()
        for key in distinct:
            three, (sent, received) = key[:3], key[3:]
            if three[0] >= 0:
                shape = tasks.shapes[three[0]]
                extents = tuple(
                    (name, base + self._rounded_up(x - base, y - base, sent, received))
                    for (name, base), (_, x), (_, y) in zip(*self._extents(*three), strict=True)
                )
                new.append(index.setdefault(Shape(shape.kernel, extents, shape.joint), len(index)))
            else:
                new.append(-1)
        column = tasks.shape.copy()
        column[self.rows] = np.array(new, np.int32)[of.ravel()]
        return column, tuple(index)

    def _rounded_up(self, by_sent: int, by_received: int, sent: int, received: int) -> int:
        """Growth of an extent, given that at one row sent, and at one row received."""
        experts, held = self.per_row
        return math.ceil(Fraction(by_sent * sent, experts) + Fraction(by_received * received, held))


# ---- inference -----------------------------------------------------------------------------------

SHARE_UNITS = 2**32
"""Shares are integer multiples of 1 / `SHARE_UNITS`: equal on all machines."""

POPULARITY_EXPONENT = 0.7
"""Tokens of the most popular expert over those of the least, in inference: experts to this power.

Fitted by `benchmarks/fit_routing.py` to 70% of the times per token of published servers of mixtures
of 128 to 512 experts; the eight of Mixtral get 5% to 25% of the tokens of a layer, a ratio of 5
(arXiv 2401.04088, figure 7). NVIDIA's aiconfigurator times experts under loads of the same kind, by
power laws (collector/helper.py, github.com/ai-dynamo/aiconfigurator@095f58a5)."""


@dataclass(frozen=True, eq=False)
class BusiestRanks:
    """Experts of the rank that gets most copies of tokens in each layer.

    Their load is that of `expert_load`, or as uneven as in published servers; redundant experts
    (EPLB) make it even. The ranks of expert parallelism wait for each other after every layer with
    experts, so each is assumed to have the work of the busiest one: its mean over layers.
    """

    chosen: Sequence[Float]
    """By layer, the share of tokens that choose each of the rank's experts, 0 to 1."""
    top_k: int

    @classmethod
    def of(cls, run: Run, model: ModelConfig, mesh: Mesh, plan: Plan) -> Self | None:
        """Busiest ranks of a resolved run; None: all experts get equal numbers of tokens."""
        ranks = mesh.size(*plan.expert)
        of_several = run.expert_load is not None and times_mean(run.expert_load) not in (None, 1)
        if run.expert_load is None or (ranks == 1 and of_several):
            even = not model.top_k < model.num_experts or run.num_redundant_experts
            return None if even else cls([_popular_experts(model, ranks)], model.top_k)
        chosen: list[Float] = []
        for line in lines_of(run.expert_load, model, _routed_layers(model), ranks):
            by_rank = np.array(line).reshape(ranks, -1) * (model.top_k / sum(line))
            chosen.append(np.minimum(by_rank[by_rank.sum(axis=1).argmax()], 1.0))
        return cls(chosen, model.top_k)

    def rows(self, ranks: int) -> Fraction:
        """Copies that the busiest of the ranks gets, over the mean of all."""
        mean = sum(float(x.sum()) for x in self.chosen) / len(self.chosen) / self.top_k
        return _share(ranks * mean)

    def touched(self, tokens: float) -> float:
        """Share of the rank's experts that any of the tokens chooses, 0 to 1."""
        return float(1 - np.mean([np.mean((1 - x) ** tokens) for x in self.chosen]))


def _popular_experts(model: ModelConfig, ranks: int) -> Float:
    """Share of tokens that choose each expert of the busiest rank, where no load is given.

    Popularities of experts are evenly spread on a logarithmic scale, and experts on ranks by
    chance. The busiest of several ranks gets the expected maximum of as many normal variables
    (Blom 1958).
    """
    experts, held = model.num_experts, model.num_experts // ranks

    def popularity(count: int) -> Float:
        ratio = experts**POPULARITY_EXPONENT
        values = ratio ** ((np.arange(count) + 0.5) / count)
        return values / values.mean()

    busiest = 1.0
    if ranks > 1:
        of_rank = popularity(experts).std() * math.sqrt((experts - held) / (experts - 1) / held)
        busiest += NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * float(of_rank)
    return np.minimum(popularity(held) * busiest * model.top_k / experts, 1.0)


def mean_expert_sizes(
    run: Run,
    model: ModelConfig,
    mesh: Mesh,
    plan: Plan,
    routed: int,
    busiest: BusiestRanks | None = None,
) -> dict[Size, Fraction]:
    """Means of the sizes that routing decides in an inference step of `routed` tokens on all ranks.

    `R`: rows of each expert; `touched`: experts with any token. A token leaves out an expert with
    probability p = 1 - top_k / experts, and n tokens all leave it out with probability p^n. Tokens
    are spread as on the `busiest` ranks; None: evenly.
    """
    if not model.num_experts:
        return {}
    experts = model.num_experts + run.num_redundant_experts
    # Ranks with the same experts share the tokens; those that split an expert have the same.
    expert_axes = plan.expert + plan.expert_tensor
    tokens = routed / mesh.size(*(a for a in plan.tokens if a not in expert_axes))
    share = Fraction(1)
    rows = routed * model.top_k * Fraction(1, experts)
    if busiest is not None:
        share = _share(busiest.touched(tokens))
        rows = rows * busiest.rows(mesh.size(*plan.expert))
    elif model.top_k < experts:
        share = _share(-math.expm1(tokens * math.log1p(-model.top_k / experts)))
    return {ROWS: rows, size("touched"): experts * share}


def _share(share: float) -> Fraction:
    return Fraction(round(share * SHARE_UNITS), SHARE_UNITS)


def _routed_layers(model: ModelConfig) -> list[int]:
    """Layers with experts."""
    return [i for i in range(model.num_layers) if model.layer(i).mlp in ROUTED]
