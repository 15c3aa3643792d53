"""Estimates of candidates: their schedule is played on the costs of single blocks.

A stage's forward pass takes as long as its blocks (`block_costs`). For each distinct pipeline the
order of its schedule is played once, on arrays over all candidates that have it (`schedule.play`).
What follows the last backward pass is added: gradients that are still exchanged, the optimizer, and
the gather of updated parameters. With ZeRO-2 and 3, blocks take at least as long as their gathers
and reductions.

Memory is that of the fullest pipeline rank: states as ZeRO shards them, and for each microbatch in
flight the bytes that blocks save for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers, latest
from stagewright.blocks.recipe import PRECISIONS
from stagewright.executors import Executor
from stagewright.lower.variants import place_blocks
from stagewright.parallel.degrees import parallelization, reduces_each_microbatch
from stagewright.program.communicators import place_along
from stagewright.run.requests import allowance_of
from stagewright.schedule.actions import Action, Order, Overlap, ScheduleStep, flat, halved
from stagewright.schedule.play import ends, plan
from stagewright.schedule.schedules import SCHEDULES, known_order
from stagewright.searching.block_costs import (
    GROUPS,
    PIPELINE,
    Blocks,
    PassCosts,
    StateCosts,
    pass_costs,
    state_costs,
)
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates, Column
from stagewright.searching.figures import Figures
from stagewright.searching.simulated import simulate_all
from stagewright.time.collectives import collectives_seconds, messages_seconds
from stagewright.time.expense.power import RUNNING_FRACTION, watts_per_gpu
from stagewright.time.network import Machine, Placement, placements, tier_of
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import sequence_flops

_AT_ONCE = 1 << 24
"""Numbers of an array over actions and candidates that is made at once."""
BACKWARD = "BIW"


# ---- what follows from a pipeline, whatever its blocks cost --------------------------------------


class Pipeline(NamedTuple):
    """A schedule with its sizes, and the kind of each block on each stage."""

    schedule: str
    pp: int
    vpp: int
    group: int | None
    stages: tuple[tuple[int, ...], ...]

    def order(self, microbatches: int) -> Order:
        """Actions of each rank."""
        return known_order(self.schedule, self.pp, microbatches, self.vpp, self.group)

    def played(self, microbatches: int) -> tuple[int, ...]:
        """Microbatches to play: all; or of many two numbers, between which a full pipeline takes
        one more round."""
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return (microbatches,)
        unit = self.round
        filled = (schedule.fills + 2) * unit
        if microbatches <= filled + 2 * unit:
            return (microbatches,)
        first = filled + microbatches % unit
        return (first, first + unit)

    @property
    def round(self) -> int:
        """Microbatches after which the order of actions repeats."""
        paired = self.schedule in SCHEDULES and SCHEDULES[self.schedule].pairs_ranks
        return self.group or (2 * self.pp if paired else self.pp)

    def counts(self, kinds: int) -> Float:
        """Blocks of each kind on each stage: [stages, kinds]."""
        return np.array([np.bincount(stage, minlength=kinds) for stage in self.stages], dtype=float)


class Occupancy(NamedTuple):
    """Microbatches in flight on each stage of a rank while it runs a backward pass."""

    rank: int
    stage: int
    """The stage of that pass."""
    stages: tuple[int, ...]
    """The stages of the rank."""
    counts: tuple[int, ...]
    """Microbatches of each of them whose activations are saved, that of the pass included."""


@lru_cache(maxsize=256)
def occupancies(order: Order) -> tuple[Occupancy, ...]:
    """The situations of all ranks in which most is in flight."""
    found: list[Occupancy] = []
    for rank, steps in enumerate(order):
        stages = tuple(sorted({action.stage for action in flat(steps)}))
        counts = dict.fromkeys(stages, 0)
        most: dict[int, set[tuple[int, ...]]] = {}
        for action in flat(steps):
            if action.kind == "F":
                counts[action.stage] += 1
                continue
            now = tuple(counts.values())
            others = most.setdefault(action.stage, set())
            if not any(_covers(other, now) for other in others):
                others -= {other for other in others if _covers(now, other)}
                others.add(now)
            if action.kind != "I":
                counts[action.stage] -= 1
        found += [Occupancy(rank, s, stages, now) for s, all_ in most.items() for now in all_]
    return tuple(found)


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


# ---- exchanges along dp --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Exchanges:
    """Seconds of exchanges along dp by block, for `dense` and `expert` weights: [tuples, kinds].

    The two groups have a stream each.
    """

    of: Int
    """Tuple of each candidate."""
    forward: Sequence[Float]
    """Of each microbatch: gathers."""
    backward: Sequence[Float]
    """Of each microbatch: gathers, and reductions where each microbatch has some."""
    gathered: Sequence[Float]
    """Of each microbatch: gathers of the backward pass."""
    reduce: Sequence[Float]
    """Of a whole microbatch's gradients, once per step."""
    update: Sequence[Float]
    """Gathers of updated parameters."""
    shards: Int
    """Ranks that shard states."""
    every: np.ndarray
    """Whether each microbatch reduces its gradients: [tuples]."""
    level: Int
    """Tier of the network that messages between stages cross: [tuples]."""

    @classmethod
    def of_candidates(cls, rows: Candidates, states: StateCosts) -> Exchanges:
        """The exchanges of candidates with these states."""
        places = rows.distinct(
            *("tp", "cp", "dp", "pp", "ep", "etp", "order", "dp_shard", HARDWARE, "topology"),
            *("algorithm", "zero"),
        )
        first, of = distinct_numbers([places.of, states.of], len(rows))
        kinds = states.optimizer.shape[1]
        tables = np.zeros((5, len(GROUPS), len(first), kinds))
        shards, level = np.ones((2, len(first)), dtype=np.int64)
        every = np.zeros(len(first), dtype=bool)
        known: dict[int, _Groups] = {}
        for n, row in enumerate(first.tolist()):
            place = int(places.of[row])
            if place not in known:
                known[place] = _Groups.of(rows, row)
            groups = known[place]
            shards[n], level[n], every[n] = groups.shards, groups.level, groups.each_microbatch
            tuple_ = int(states.of[row])
            for g, group in enumerate(GROUPS):
                def seconds(use: str) -> Float:
                    sizes = states.exchanged.get((group, use))
                    return np.zeros(kinds) if sizes is None else groups.seconds(
                        group, use, sizes[tuple_])
                backward = seconds("gather_backward") + seconds("gather_recompute")
                reduce = seconds("reduce")
                tables[:, g, n] = (
                    seconds("gather_forward"), backward + reduce * every[n], backward, reduce,
                    seconds("update"),
                )
        return cls(of, *tables, shards, every, level)


class _Groups(NamedTuple):
    """The ranks of a candidate that have the same weights."""

    machine: Machine
    shard: Placement | None
    """Ranks that shard dense states."""
    replicas: Placement | None
    """Ranks that have the same shard, with HSDP."""
    experts: Placement | None
    zero: int
    shards: int
    each_microbatch: bool
    level: int

    @classmethod
    def of(cls, rows: Candidates, row: int) -> _Groups:
        """The groups of one candidate."""
        run, machine = rows.run(row).resolved(rows.model), rows.machine(row)
        mesh, plan_ = parallelization(run, rows.model)

        def place(axes: Sequence[str]) -> Placement | None:
            if mesh.size(*axes) < 2:
                return None
            ranks = np.arange(mesh.world_size)
            index = place_along(mesh, axes)
            others = ranks - sum(
                mesh.stride(a) * (ranks // mesh.stride(a) % mesh.size(a)) for a in axes
            )
            return placements(machine, np.flatnonzero(others == 0)[None])[-1]

        data = (*plan_.data, *plan_.context)
        shard = plan_.shard if run.zero else data
        experts = dict(mesh.groups).get("edp", ())
        level = 0
        if run.pp > 1:
            ranks = np.arange(mesh.world_size)
            ranks = ranks[ranks // mesh.stride("pp") % run.pp < run.pp - 1]
            level = int(tier_of(machine, ranks, ranks + mesh.stride("pp")).max())
        return cls(
            machine,
            place(shard),
            place([axis for axis in data if axis not in shard]),
            place(experts),
            run.zero,
            mesh.size(*shard),
            reduces_each_microbatch(run),
            level,
        )

    def seconds(self, group: str, use: str, sizes: Float) -> Float:
        """Seconds of exchanges of whole tensors of these bytes."""
        place = self.shard if group == "dense" else self.experts
        if place is None:
            return np.zeros_like(sizes)
        if use != "reduce":
            return collectives_seconds("all_gather", sizes / place.ranks, place, self.machine)
        op = "reduce_scatter" if self.zero else "all_reduce"
        found = collectives_seconds(op, sizes, place, self.machine)
        if self.replicas is not None and group == "dense":
            part = sizes / place.ranks
            found = found + collectives_seconds("all_reduce", part, self.replicas, self.machine)
        return found


# ---- estimates -----------------------------------------------------------------------------------


def lower_bounds(rows: Candidates) -> Float:
    """Seconds that steps take at least: kernels of layers, on the mean rank of a full pipeline."""
    blocks = Blocks.of(rows)
    passes = pass_costs(rows, blocks)
    run = rows.run(0).model_copy(update={"pp": 1, "vpp": 1, "dp": 1, "schedule": None})
    (placed,) = place_blocks(run.resolved(rows.model), rows.model)
    layers = np.bincount(
        [blocks.kind(each) for each in placed if each[1] >= 0], minlength=len(blocks.kinds)
    )
    of_microbatch = (passes.kernels["F"] + passes.kernels["B"]) @ layers
    return of_microbatch[passes.of] * rows.microbatches / rows.numbers("pp")


def estimate(rows: Candidates, executor: Executor | None = None) -> Figures:
    """The figures of candidates as estimates; NaN where there is none."""
    if rows.base.run.mode != "train":
        return _of_fewer_layers(rows, executor)
    return _Estimates.of(rows).figures()


def _of_fewer_layers(rows: Candidates, executor: Executor | None) -> Figures:
    """Estimates of inference: each candidate simulated with few layers and with twice as many."""
    depth = rows.model.num_layers
    few = np.minimum(Blocks.of(rows).layers * rows.numbers("pp"), depth)
    more = np.minimum(2 * few, depth)
    found: list[Figures] = []
    for layers in (few, more):
        column = Column.of(layers.tolist())
        shorter = replace(rows, columns={**rows.columns, "layers": column})
        part = simulate_all(shorter, executor)
        if part.stopped:
            raise KeyboardInterrupt
        found.append(part.figures)
    first, second = Figures.concatenated(found).halves()
    times = np.where(more > few, (depth - few) / np.maximum(more - few, 1), 0.0)
    return first.extrapolated(second, times)


@dataclass(slots=True, eq=False)
class _Estimates:
    """Estimates while they are made: arrays over candidates."""

    rows: Candidates
    blocks: Blocks
    passes: PassCosts
    states: StateCosts
    exchanges: Exchanges
    seconds: Float
    bubble: Float
    exposed: dict[str, Float]
    kernels: Float
    drawn: Float
    sent: Float
    memory: dict[str, Float]

    @classmethod
    def of(cls, rows: Candidates) -> _Estimates:
        """All estimates."""
        blocks = Blocks.of(rows)
        groups = list(_pipelines(rows, blocks))
        halves = any(halved(pipeline.order(played[0])) for pipeline, played, _ in groups)
        passes = pass_costs(rows, blocks, halves=halves)
        states = state_costs(rows, blocks)
        exchanges = Exchanges.of_candidates(rows, states)
        columns = np.zeros((7, len(rows)))
        names = ("parameters", "gradients", "optimizer", "gathered_parameters", "activations",
                 "workspace", "communication")  # fmt: skip
        memory = {name: np.zeros(len(rows)) for name in names}
        made = cls(rows, blocks, passes, states, exchanges, columns[0], columns[1],
                   {"dp": columns[2], "layers": columns[3]}, columns[4], columns[5], columns[6], memory)  # fmt: skip
        messages = made._messages()
        for pipeline, played, at in groups:
            made._play(pipeline, played, at, messages[at])
            made._hold(pipeline, played, at)
        return made

    def _messages(self) -> Float:
        """Seconds of a message from stage to stage."""
        rows = self.rows
        tokens = rows.numbers("micro_batch_size") * np.maximum(self._lengths(), 1)
        tokens = tokens // rows.numbers("cp")
        tokens = tokens // np.where(rows.numbers("sequence_parallel") > 0, rows.numbers("tp"), 1)
        size = 2.0 * rows.model.hidden_size * tokens
        self.sent = size
        found = np.zeros(len(rows))
        machines = rows.machines
        level = self.exchanges.level[self.exchanges.of]
        first, of = distinct_numbers([machines, level], len(rows))
        for n, row in enumerate(first.tolist()):
            mine = np.flatnonzero(of == n)
            found[mine] = messages_seconds(size[mine], int(level[row]), rows.machine(row))
        return found

    def _lengths(self) -> Int:
        """Tokens of a sequence."""
        lengths = self.rows.distinct("seq_length")
        runs = [self.rows.run(row).resolved(self.rows.model) for row in lengths.first.tolist()]
        return np.array([run.seq_length or 1 for run in runs])[lengths.of]

    def _play(self, pipeline: Pipeline, played: tuple[int, ...], at: Int, message: Float) -> None:
        """Step time of candidates of one pipeline."""
        passes, exchanges = self.passes, self.exchanges
        tuples, groups = passes.of[at], exchanges.of[at]
        busy = np.stack([*exchanges.forward, *exchanges.backward]).any(axis=(0, 2))
        first, of = distinct_numbers([tuples, np.where(busy[groups], groups + 1, 0)], len(at))
        _, of = distinct_numbers([of, np.unique(message, return_inverse=True)[1]], len(at))
        first = np.unique(of, return_index=True)[1]
        t, x = tuples[first], groups[first]
        counts = pipeline.counts(len(self.blocks.kinds))

        y = self.states.of[at][first]
        costs: dict[str, Float] = {}
        setup: dict[str, Float] = {}
        for kind in passes.seconds:
            each = passes.seconds[kind][t]
            if kind in self.states.added:
                host = passes.host[kind][t] + self.states.added[f"{kind} host"][y]
                each = np.maximum(each + self.states.added[kind][y], host)
            gathers = exchanges.forward if kind == "F" else exchanges.gathered
            limits = exchanges.forward if kind == "F" else exchanges.backward
            entered = [stage[-1 if kind == "F" else 0] if stage else 0 for stage in pipeline.stages]
            left = [stage[0 if kind == "F" else -1] if stage else 0 for stage in pipeline.stages]
            wait = latest([group[x] for group in gathers])
            setup[kind] = np.minimum(each[:, entered], wait[:, left]).T
            if kind == "F":  # gathers wait for the last reduction of the backward pass before
                setup[kind] = setup[kind] + latest(
                    [np.where(group[x] > 0, reduce[x], 0.0)[:, left] * exchanges.every[x, None]
                     for group, reduce in zip(gathers, exchanges.reduce, strict=True)]).T
            costs[kind] = counts @ latest([each, *(group[x] for group in limits)]).T + setup[kind]
        paired = {kind: counts @ passes.kernels[kind][t].T for kind in "FB"}
        order = pipeline.order(played[-1])
        played_ends = [
            _played(pipeline.order(count), costs, paired, message[first], setup) for count in played
        ]
        rank_ends = played_ends[-1].ranks
        rounds = (self.rows.microbatches[at] - played[-1]) / pipeline.round
        ends_ = rank_ends[:, of]
        if len(played) > 1:
            ends_ = ends_ + rounds * (rank_ends - played_ends[0].ranks).max(axis=0)[of]
        span = ends_.max(axis=0)
        finished = self._reduced(pipeline, played_ends[-1], costs, of, at, ends_)
        step, after = finished.max(axis=0), self._after(pipeline, order, at)
        m = self.rows.microbatches[at]
        work = _work(order, costs, paired) / played[-1]
        mean = work.mean(axis=0)[of] * m
        total = step + after.sum(axis=0)
        self.seconds[at] = total
        self.bubble[at] = np.maximum(span - mean, 0.0)
        self.exposed["dp"][at] = step - span + after[1]
        own = counts.sum(axis=0) / pipeline.pp
        kernels = (passes.kernels["F"] + passes.kernels["B"])[tuples] @ own * m + after[0]
        self.exposed["layers"][at] = np.maximum(mean + after[0] - kernels, 0.0)
        self.kernels[at] = kernels
        self.drawn[at] = passes.drawn[tuples] @ own * m + 0.7 * after[0]

    def _reduced(
        self,
        pipeline: Pipeline,
        played: _Played,
        costs: dict[str, Float],
        of: Int,
        at: Int,
        ends_: Float,
    ) -> Float:
        """When all gradients of each rank are reduced: [ranks, candidates]."""
        groups = self.exchanges.of[at]
        counts = pipeline.counts(len(self.blocks.kinds))
        finished = ends_.copy()
        every = self.exchanges.every[groups]
        for reduce in self.exchanges.reduce:
            if not reduce[groups].any():
                continue
            of_stage = counts @ reduce[groups].T
            for rank, stages in enumerate(played.last):
                queue = np.full(len(at), -np.inf)
                for stage, end in stages:
                    blocks = pipeline.stages[stage]
                    if not blocks:
                        continue
                    tail = reduce[groups][:, blocks[0]]
                    late = (ends_[rank] - played.ranks[rank][of]) + end[of]
                    last = "W" if "W" in costs and stage in played.halved else "B"
                    begin = late - costs[last][stage][of] * (1 - 1 / len(blocks))
                    whole = np.maximum(queue, begin) + of_stage[stage]
                    queue = np.maximum(np.where(every, 0.0, whole), late + tail)
                finished[rank] = np.maximum(finished[rank], queue)
        return finished

    def _after(self, pipeline: Pipeline, order: Order, at: Int) -> Float:
        """Seconds of the optimizer, and beyond these of gathers of parameters: [2, candidates]."""
        counts = pipeline.counts(len(self.blocks.kinds))
        states, exchanges = self.states, self.exchanges
        t, x = states.of[at], exchanges.of[at]
        zero = self.rows.numbers("zero")[at] > 0
        scale = np.where(zero, states.shards[t] / exchanges.shards[x], 1.0)
        found = np.zeros((2, len(at)))
        for steps in order:
            held = counts[sorted({a.stage for a in flat(steps)})].sum(axis=0)
            optimizer = states.optimizer[t] @ held * scale
            blocks = max(held.sum(), 1.0)
            gathers = [
                np.maximum(update[x] @ held + optimizer / blocks, optimizer + update[x].max(axis=1))
                for update in exchanges.update
            ]
            both = latest([optimizer, *gathers])
            found[0] = np.maximum(found[0], optimizer)
            found[1] = np.maximum(found[1], both)
        found[1] -= found[0]
        return found

    def _hold(self, pipeline: Pipeline, played: tuple[int, ...], at: Int) -> None:
        """Memory of the fullest rank of candidates of one pipeline."""
        states, passes, exchanges = self.states, self.passes, self.exchanges
        t, p, x = states.of[at], passes.of[at], exchanges.of[at]
        counts = pipeline.counts(len(self.blocks.kinds))
        order = pipeline.order(played[-1])
        zero = self.rows.numbers("zero")[at]
        shard = states.shards[t] / exchanges.shards[x]
        scale = {
            name: np.where(zero >= least, shard, 1.0)
            for name, least in (("parameters", 3), ("gradients", 2), ("optimizer", 1))
        }
        fixed: list[list[Float]] = []
        for steps in order:
            held = counts[sorted({a.stage for a in flat(steps)})].sum(axis=0)
            fixed.append([states.memory[n][t] @ held * scale[n] for n in scale])
        saved = counts @ passes.saved[p].T
        if len(saved) > 1:  # what the first stage sends, it does not save
            saved[0] -= np.minimum(self.sent[at], saved[0])
        transient = _transients(pipeline, passes, p)
        gathered = [self._adjacent(blocks, t, "gather_forward") for blocks in pipeline.stages]
        each_microbatch = exchanges.every[x]
        reducing = [self._adjacent(b, t, "reduce") / 2 * each_microbatch for b in pipeline.stages]
        schedule = SCHEDULES.get(pipeline.schedule)
        more = 1.0
        if schedule is not None and schedule.forwards_first:
            more = self.rows.microbatches[at] / played[-1]
        most = np.full(len(at), -1.0)
        for rank, stage, stages, in_flight in occupancies(order):
            kept = np.einsum("s,sn->n", np.array(in_flight, dtype=float), saved[list(stages)]) * more
            extra = np.maximum(transient[stage], 0.0)
            whole = sum(fixed[rank]) + kept + extra + gathered[stage] + reducing[stage]
            larger = whole > most
            most = np.where(larger, whole, most)
            parts_ = dict(zip(scale, fixed[rank], strict=True)) | {
                "gathered_parameters": gathered[stage], "activations": kept, "workspace": extra,
                "communication": reducing[stage],
            }  # fmt: skip
            for name, size in parts_.items():
                column = self.memory[name]
                column[at] = np.where(larger, size, column[at])

    def _adjacent(self, blocks: Sequence[int], t: Int, use: str) -> Float:
        """Bytes exchanged for two blocks in a row: [candidates]."""
        sizes = sum(self.states.exchanged[group, use] for group in GROUPS)[t]
        pairs = {*zip(blocks, blocks[1:], strict=False)} or {(b,) for b in blocks}
        return latest([np.zeros(len(t)), *(sizes[:, [*pair]].sum(axis=1) for pair in pairs)])

    def figures(self) -> Figures:
        """The estimates as figures."""
        rows = self.rows
        memory = {n: np.ceil(v).astype(np.int64) for n, v in self.memory.items() if v.any()}
        allowance = rows.distinct("memory_allowance")
        sizes = [allowance_of(rows.run(row)) for row in allowance.first.tolist()]
        if any(sizes):
            memory["allowance"] = np.array(sizes)[allowance.of]
        gpus = rows.world_size
        batch = rows.numbers("global_batch_size")
        batch = np.where(
            batch == ABSENT,
            rows.microbatches * rows.numbers("micro_batch_size") * rows.numbers("dp"),
            batch,
        )
        flops, causal, peak, watts, usd = np.zeros((5, len(rows)))
        alike = rows.distinct("seq_length")
        for n, row in enumerate(alike.first.tolist()):
            run = rows.run(row).resolved(rows.model)
            flops[alike.of == n], causal[alike.of == n] = sequence_flops(run, rows.model).of_step(1)
        running = np.minimum(
            (self.kernels + sum(self.exposed.values())) / self.seconds, 1.0
        )
        exposed = sum(self.exposed.values())
        share = (self.drawn + RUNNING_FRACTION * exposed) / self.seconds
        alike = rows.distinct(HARDWARE, "precision")
        for n, row in enumerate(alike.first.tolist()):
            mine = alike.of == n
            hardware, run = rows.hardware(row), rows.run(row)
            peak[mine] = peak_flops(hardware, PRECISIONS[run.precision].product)
            watts[mine] = watts_per_gpu(hardware, running[mine], share[mine])
            price = rows.cluster(row).price
            price = hardware.price_usd_per_gpu_hour if price is None else price
            usd[mine] = np.nan if price is None else price / 3600
        return Figures(
            seconds=self.seconds,
            memory=memory,
            device_memory=rows.device_memory,
            exposed=self.exposed,
            bubble=self.bubble,
            tokens=batch * self._lengths(),
            mfu=flops * batch / (self.seconds * peak * gpus),
            mfu_causal=causal * batch / (self.seconds * peak * gpus),
            tflops=flops * batch / (self.seconds * gpus) / 1e12,
            joules=watts * gpus * self.seconds,
            usd=usd * gpus * self.seconds,
            exact=np.zeros(len(rows), dtype=bool),
        )


class _Played(NamedTuple):
    """An order in time: [candidates] each."""

    ranks: Float
    """End of the last action of each rank: [ranks, candidates]."""
    last: list[list[tuple[int, Float]]]
    """Stages of each rank in the order of their last backward passes, with the ends of these."""
    halved: frozenset[int]
    """Stages whose last backward pass is in halves."""


def _played(
    order: Order,
    costs: dict[str, Float],
    kernels: dict[str, Float],
    message: Float,
    setup: dict[str, Float],
) -> _Played:
    planned = plan(order)
    halves = halved(order)
    count = len(message)
    ranks = np.zeros((len(order), count))
    last: list[dict[int, int]] = [{} for _ in order]
    own: list[int] = [0] * len(order)
    for n, of in enumerate(planned):
        for rank in of.ranks:
            own[rank] = n
            for action in flat([of.step]):
                if action.kind in "BW":
                    last[rank].pop(action.stage, None)
                    last[rank][action.stage] = n
    ended: dict[int, Float] = {n: np.zeros(count) for n in {*own, *(n for r in last for n in r.values())}}
    step = max(1, _AT_ONCE // len(planned))
    for begin in range(0, count, step):
        part = slice(begin, begin + step)

        def cost(step_: ScheduleStep) -> Float:
            return _seconds(step_, costs, kernels, part)

        def delay(step_: ScheduleStep) -> Float:
            first_ = step_.forward if isinstance(step_, Overlap) else step_
            return message[part] - setup[first_.kind][first_.stage, part]

        found = ends(planned, cost, delay)
        for n, column in ended.items():
            column[part] = found[n]
    for rank, n in enumerate(own):
        ranks[rank] = ended[n]
    return _Played(
        ranks,
        [[(stage, ended[n]) for stage, n in of_rank.items()] for of_rank in last],
        frozenset(stage for stage, _ in halves),
    )


def _seconds(
    step: ScheduleStep, costs: dict[str, Float], kernels: dict[str, Float], part: slice
) -> Float:
    """Seconds of a step; two that overlap take turns with their kernels, and hide communication."""
    if not isinstance(step, Overlap):
        return costs[step.kind][step.stage, part]
    f, b = step.forward.stage, step.backward.stage
    forward, backward = costs["F"][f, part], costs[step.backward.kind][b, part]
    busy = kernels["F"][f, part] + kernels["B"][b, part]
    return latest([busy, forward, backward])


def _work(order: Order, costs: dict[str, Float], kernels: dict[str, Float]) -> Float:
    """Seconds of all steps of each rank: [ranks, candidates]."""
    every = slice(None)
    tallies: list[dict[tuple[object, ...], tuple[ScheduleStep, int]]] = []
    for steps in order:
        tally: dict[tuple[object, ...], tuple[ScheduleStep, int]] = {}
        for step in steps:
            key = tuple((a.kind, a.stage) for a in flat([step]))
            tally[key] = (step, tally.get(key, (step, 0))[1] + 1)
        tallies.append(tally)
    return np.array(
        [sum(n * _seconds(step, costs, kernels, every) for step, n in tally.values())
         for tally in tallies]
    )  # fmt: skip


def _transients(pipeline: Pipeline, passes: PassCosts, p: Int) -> list[Float]:
    """Bytes beyond those saved at the peak of each stage's backward pass."""
    found: list[Float] = []
    for stage in pipeline.stages:
        most = np.zeros(len(p))
        for kind in {*stage}:
            place = len(stage) - 1 - stage[::-1].index(kind)
            freed = np.bincount(stage[place + 1 :], minlength=passes.saved.shape[1])
            most = np.maximum(most, passes.transient[p, kind] - passes.saved[p] @ freed)
        found.append(most)
    return found


def _pipelines(
    rows: Candidates, blocks: Blocks
) -> Iterator[tuple[Pipeline, tuple[int, ...], Int]]:
    """Candidates by pipeline and by the numbers of microbatches that are played of it."""
    names = [name for name in PIPELINE if name != "global_batch_size"]
    placed = rows.distinct(*names)
    pipelines: list[Pipeline] = []
    for row in placed.first.tolist():
        run = rows.run(row).resolved(rows.model)
        stages = place_blocks(run, rows.model)
        kinds = tuple(tuple(blocks.kind(each) for each in stage) for stage in stages)
        pipelines.append(
            Pipeline(str(run.schedule), run.pp, run.vpp, run.microbatch_group, kinds)
        )
    known: dict[tuple[Pipeline, tuple[int, ...]], int] = {}
    first, of = distinct_numbers([placed.of, rows.microbatches], len(rows))
    number = np.zeros(len(first), dtype=np.int64)
    for n, row in enumerate(first.tolist()):
        pipeline = pipelines[int(placed.of[row])]
        key = pipeline, pipeline.played(int(rows.microbatches[row]))
        number[n] = known.setdefault(key, len(known))
    group = number[of]
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(known) + 1))
    for n, (pipeline, played) in enumerate(known):
        yield pipeline, played, order[bounds[n] : bounds[n + 1]]
