"""Estimates of candidates: their schedule is played on the costs of single blocks.

A stage's forward pass takes as long as its blocks (`block_costs`). For each distinct pipeline the
order of its schedule is played once, on arrays over all candidates that have it (`pipelines`). What
follows the last backward pass is added: gradients that are still exchanged, the optimizer, and the
gather of updated parameters. With ZeRO-2 and 3, blocks take at least as long as their gathers and
reductions.

Memory is that of the fullest pipeline rank: states as ZeRO shards them, and for each microbatch in
flight the bytes that blocks save for backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers, latest
from stagewright.blocks.recipe import PRECISIONS
from stagewright.executors import Executor
from stagewright.lower.variants import place_blocks
from stagewright.parallel.degrees import parallelization, reduces_each_microbatch
from stagewright.program.columns import Program
from stagewright.program.communicators import Communicator
from stagewright.run.requests import allowance_of
from stagewright.schedule.actions import flat, halved
from stagewright.searching.block_costs import (
    GROUPS,
    PARTLY,
    BlockCosts,
    Blocks,
    input_bytes,
    pass_costs,
    state_costs,
)
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates, Column
from stagewright.searching.figures import Figures
from stagewright.searching.pipelines import (
    Pipeline,
    Played,
    occupancies,
    pairs_ranks,
    pipelines,
    play_order,
    work,
)
from stagewright.searching.simulated import simulate_all
from stagewright.time.collectives import collective_seconds, message_seconds
from stagewright.time.expense.power import RUNNING_FRACTION, watts_per_gpu
from stagewright.time.network import Machine, Placement, placements, tier_of
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import sequence_flops

OPTIMIZER_POWER = 0.7
"""Power over TDP of an optimizer's kernels, which stream bytes."""
_STATES = {"parameters": 3, "gradients": 2, "optimizer": 1}
"""Least ZeRO stage that shards each category of states."""


def estimate(rows: Candidates, executor: Executor | None = None) -> Figures:
    """The figures of candidates as estimates; NaN where there is none."""
    if rows.base.run.mode != "train":
        return _of_fewer_layers(rows, executor)
    blocks = Blocks.of(rows)
    groups = list(pipelines(rows, blocks))
    halves = any(halved(pipeline.order(played[0])) for pipeline, played, _ in groups)
    variants = any((rows.numbers(name) > 0).any() for name in PARTLY)
    alike = rows.regardless_of_memory()
    passes = pass_costs(alike, blocks, halves=halves, variants=variants)
    states = state_costs(alike, blocks, variants=variants)
    estimates = _Estimates.of(rows, passes, states)
    for pipeline, played, at in groups:
        estimates.add(_SamePipeline(estimates, pipeline, played, at))
    return estimates.figures()


def _of_fewer_layers(rows: Candidates, executor: Executor | None) -> Figures:
    """Estimates of inference: each candidate simulated with few layers and with twice as many."""
    depth = rows.model.num_layers
    few = np.minimum(Blocks.of(rows).layers * rows.numbers("pp"), depth)
    more = np.minimum(2 * few, depth)
    found: list[Figures] = []
    for layers in (few, more):
        shorter = replace(rows, columns={**rows.columns, "layers": Column.of(layers.tolist())})
        simulated = simulate_all(shorter, executor)
        if simulated.stopped:
            raise KeyboardInterrupt
        found.append(simulated.figures)
    first, second = Figures.concatenated(found).halves()
    times = np.where(more > few, (depth - few) / np.maximum(more - few, 1), 0.0)
    return first.extrapolated(second, times)


def lower_bounds(rows: Candidates) -> Float:
    """Seconds that steps take at least: kernels of layers, on the mean rank of a full pipeline."""
    blocks = Blocks.of(rows)
    passes = pass_costs(rows, blocks)
    run = rows.run(0).model_copy(update={"pp": 1, "vpp": 1, "dp": 1, "schedule": None})
    (placed,) = place_blocks(run.resolved(rows.model), rows.model)
    kinds = [blocks.kind(each) for each in placed if each[1] >= 0]
    layers = np.bincount(kinds, minlength=len(blocks.kinds))
    of_microbatch = (passes["F kernels"] + passes["B kernels"]) @ layers
    return of_microbatch[passes.of] * rows.microbatches / rows.numbers("pp")


# ---- exchanges along dp --------------------------------------------------------------------------


class _Ranks(NamedTuple):
    """Ranks of a candidate that have the same weights, and how they exchange these."""

    machine: Machine
    shard: Placement | None
    """Ranks that shard dense states, or without ZeRO have the same."""
    replicas: Placement | None
    """Ranks that have the same shard, with HSDP."""
    experts: Placement | None
    zero: int
    shards: int
    """Number of ranks that shard states."""
    reduces: bool
    """True if each microbatch reduces its gradients."""
    gathers: bool
    """True if each microbatch gathers parameters."""
    updates: bool
    """True if updated parameters are gathered at the end of the step."""
    overlaps: bool
    """True if exchanges run beside kernels."""
    level: int
    """Tier of the network that messages between stages cross."""

    @classmethod
    def of(cls, rows: Candidates, row: int) -> Self:
        """The ranks of one candidate."""
        run, machine = rows.run(row).resolved(rows.model), rows.machine(row)
        execution = rows.execution(row)
        mesh, plan = parallelization(run, rows.model, mirrored=pairs_ranks(str(run.schedule)))

        def place(axes: Sequence[str]) -> Placement | None:
            if mesh.size(*axes) < 2:
                return None
            groups = Program(mesh, (), (Communicator(tuple(axes)),), ())
            return placements(machine, groups.members(0, np.zeros(1, dtype=np.int64)))[0]

        data = (*plan.data, *plan.context)
        shard = plan.shard if run.zero else data
        level = 0
        if run.pp > 1:
            ranks = np.arange(mesh.world_size)
            ranks = ranks[ranks // mesh.stride("pp") % run.pp < run.pp - 1]
            level = int(tier_of(machine, ranks, ranks + mesh.stride("pp")).max())
        return cls(
            machine,
            place(shard),
            place([axis for axis in data if axis not in shard]),
            place(dict(mesh.groups).get("edp", ())),
            run.zero,
            mesh.size(*shard),
            reduces_each_microbatch(run),
            # PyTorch's pipelines keep what they have gathered (`reshard_after_backward`).
            not (run.pipeline_caches and run.pp > 1),
            not execution.overlap_param_gather,
            "dp" not in execution.no_overlap and execution.streams != "one",
            level,
        )

    def seconds(self, group: str, use: str, sizes: Float) -> Float:
        """Seconds of exchanges of whole tensors of these bytes."""
        place = self.shard if group == "dense" else self.experts
        if place is None or (use == "update" and not self.updates):
            return np.zeros_like(sizes)
        if use != "reduce":
            if use != "update" and not self.gathers:
                return np.zeros_like(sizes)
            return collective_seconds("all_gather", sizes / place.ranks, place, self.machine)
        op = "reduce_scatter" if self.zero else "all_reduce"
        found = collective_seconds(op, sizes, place, self.machine)
        if self.replicas is not None and group == "dense":
            shard = sizes / place.ranks
            found = found + collective_seconds("all_reduce", shard, self.replicas, self.machine)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Exchanges:
    """Seconds of exchanges along dp by block: [groups of ranks, tuples, kinds] each.

    Dense and expert weights (`GROUPS`) are exchanged on a stream each.
    """

    of: Int
    """Tuple of each candidate."""
    ranks: Sequence[_Ranks]
    """By tuple."""
    forward: Float
    """Gathers of each microbatch's forward pass."""
    backward: Float
    """The same of its backward pass."""
    reduce: Float
    """Reductions of gradients, of each microbatch or once."""
    update: Float
    """Gathers of updated parameters, once."""

    @classmethod
    def of_candidates(cls, rows: Candidates, states: BlockCosts) -> Self:
        """The exchanges of candidates with these states."""
        names = (
            *("tp", "cp", "dp", "pp", "ep", "etp", "order", "dp_shard", "zero", "schedule"),
            *("overlap_param_gather", "no_overlap", "grad_reduce"),
            *(HARDWARE, "topology", "algorithm"),
        )
        places = rows.distinct(*names)
        first, of = distinct_numbers([places.of, states.of], len(rows))
        by_place = {n: _Ranks.of(rows, row) for n, row in enumerate(places.first.tolist())}
        ranks = [by_place[place] for place in places.of[first].tolist()]
        tables = np.zeros((4, len(GROUPS), len(first), states["optimizer"].shape[1]))
        for n, (mine, state) in enumerate(zip(ranks, states.of[first].tolist(), strict=True)):
            for g, group in enumerate(GROUPS):
                uses = ("gather_forward", "gather_recompute", "gather_backward", "reduce", "update")
                forward, again, backward, reduce, update = (
                    mine.seconds(group, use, states[f"{group} {use}"][state]) for use in uses
                )
                tables[:, g, n] = forward, again + backward, reduce, update
        return cls(of, ranks, *tables)

    def flags(self, name: str) -> Int:
        """A figure of `_Ranks` for each tuple."""
        return np.array([int(getattr(mine, name)) for mine in self.ranks])


# ---- estimates of training -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Estimates:
    """Estimates while they are made: arrays over candidates."""

    rows: Candidates
    passes: BlockCosts
    states: BlockCosts
    exchanges: _Exchanges
    message: Float
    """Seconds of a message from stage to stage."""
    sent: Float
    """Bytes of such a message."""
    seconds: Float
    bubble: Float
    after: Float
    """Seconds after the last backward pass in which GPUs wait for exchanges along dp."""
    waits: Float
    """Seconds in which the mean GPU waits for communication within layers."""
    kernels: Float
    drawn: Float
    """Seconds at TDP, as `BlockCosts` has it."""
    memory: dict[str, Float]

    @classmethod
    def of(cls, rows: Candidates, passes: BlockCosts, states: BlockCosts) -> Self:
        """Nothing is estimated yet."""
        exchanges = _Exchanges.of_candidates(rows, states)
        sent = input_bytes(rows)
        message = np.zeros(len(rows))
        level = exchanges.flags("level")[exchanges.of]
        first, of = distinct_numbers([rows.machines, level], len(rows))
        for n, row in enumerate(first.tolist()):
            mine = of == n
            message[mine] = message_seconds(sent[mine], int(level[row]), rows.machine(row))
        categories = (*_STATES, "gathered_parameters", "activations", "workspace", "communication")
        memory = {name: np.zeros(len(rows)) for name in categories}
        seconds, bubble, after, waits, kernels, drawn = np.zeros((6, len(rows)))
        return cls(
            rows, passes, states, exchanges, message, sent, seconds, bubble, after, waits, kernels,
            drawn, memory,
        )  # fmt: skip

    def add(self, group: _SamePipeline) -> None:
        """Write the estimates of candidates with one pipeline."""
        group.write_times()
        group.write_memory()

    def figures(self) -> Figures:
        """The estimates as figures."""
        rows = self.rows
        memory = {n: np.ceil(v).astype(np.int64) for n, v in self.memory.items() if v.any()}
        allowance = rows.distinct("memory_allowance")
        sizes = [allowance_of(rows.run(row)) for row in allowance.first.tolist()]
        if any(sizes):
            memory["allowance"] = np.array(sizes)[allowance.of]
        gpus, batch = rows.world_size, rows.numbers("global_batch_size")
        sequences = rows.microbatches * rows.numbers("micro_batch_size") * rows.numbers("dp")
        batch = np.where(batch == ABSENT, sequences, batch)
        exposed = self.after + self.waits
        running = np.minimum((self.kernels + exposed) / self.seconds, 1.0)
        drawn = (self.drawn + RUNNING_FRACTION * exposed) / self.seconds
        full, causal, peak, watts, usd = np.zeros((5, len(rows)))
        alike = rows.distinct("seq_length", HARDWARE, "precision")
        for n, row in enumerate(alike.first.tolist()):
            mine, hardware = alike.of == n, rows.hardware(row)
            run = rows.run(row).resolved(rows.model)
            full[mine], causal[mine] = sequence_flops(run, rows.model).of_step(1)
            peak[mine] = peak_flops(hardware, PRECISIONS[run.precision].product)
            watts[mine] = watts_per_gpu(hardware, running[mine], drawn[mine])
            price = rows.cluster(row).price
            price = hardware.price_usd_per_gpu_hour if price is None else price
            usd[mine] = np.nan if price is None else price / 3600
        rate = batch / (self.seconds * gpus)
        return Figures(
            seconds=np.where(self.seconds > 0, self.seconds, np.nan),
            memory=memory,
            device_memory=rows.device_memory,
            exposed={"dp": self.after, "layers": self.waits},
            bubble=self.bubble,
            tokens=batch * _lengths(rows),
            mfu=full * rate / peak,
            mfu_causal=causal * rate / peak,
            tflops=full * rate / 1e12,
            joules=watts * gpus * self.seconds,
            usd=usd * gpus * self.seconds,
            exact=np.zeros(len(rows), dtype=bool),
        )


def _lengths(rows: Candidates) -> Int:
    """Tokens of a sequence [candidates]."""
    alike = rows.distinct("seq_length")
    runs = [rows.run(row).resolved(rows.model) for row in alike.first.tolist()]
    return np.array([run.seq_length or 1 for run in runs])[alike.of]


class _SamePipeline:
    """Candidates of one pipeline of which the same microbatches are played."""

    def __init__(
        self, estimates: _Estimates, pipeline: Pipeline, played: tuple[int, ...], at: Int
    ) -> None:
        """`at`: their numbers among all candidates."""
        self.estimates, self.pipeline, self.played, self.at = estimates, pipeline, played, at
        self.order = pipeline.order(played[-1])
        kinds = estimates.passes["F"].shape[1]
        self.counts = np.array([np.bincount(s, minlength=kinds) for s in pipeline.stages], float)
        """Blocks of each kind on each stage: [stages, kinds]."""
        self.microbatches = estimates.rows.microbatches[at]
        self.zero = estimates.rows.numbers("zero")[at]
        self.passes = estimates.passes.of[at]
        self.states = estimates.states.of[at]
        self.exchanged = estimates.exchanges.of[at]

    def flags(self, name: str) -> Int:
        """A figure of `_Ranks` for each candidate."""
        return self.estimates.exchanges.flags(name)[self.exchanged]

    @property
    def on_ranks(self) -> list[Float]:
        """Blocks of each kind on each rank."""
        return [self.counts[sorted({a.stage for a in flat(steps)})].sum(axis=0)
                for steps in self.order]  # fmt: skip

    # ---- time ------------------------------------------------------------------------------------

    def write_times(self) -> None:
        """Play the order once for each distinct set of costs, and add what follows."""
        whole, at, m = self.estimates, self.at, self.microbatches
        message = whole.message[at]
        busy = whole.exchanges.forward.any(axis=(0, 2)) | (whole.exchanges.flags("reduces") > 0)
        times = np.unique(message, return_inverse=True)[1]
        host = np.where(busy[self.exchanged], self.exchanged + 1, 0)
        first, of = distinct_numbers([self.passes, host, times], len(at))
        costs, gathers = self._costs(first)
        kernels, launches = (
            {
                kind: self.counts @ whole.passes[f"{kind} {part}"][self.passes[first]].T
                for kind in "FB"
            }
            for part in ("kernels", "host")
        )
        played = [
            play_order(self.pipeline.order(n), costs, kernels, launches, message[first], gathers)
            for n in self.played
        ]
        ends = played[-1].ranks[:, of]
        if len(played) > 1:
            rounds = (m - self.played[-1]) / self.pipeline.round
            ends = ends + rounds * (played[-1].ranks - played[0].ranks).max(axis=0)[of]
        span, step = ends.max(axis=0), self._reduced(played[-1], costs, of, ends).max(axis=0)
        mean = work(self.order, costs, kernels, launches).mean(axis=0)[of] * (m / self.played[-1])
        optimizer, update = self._after()
        per_rank = self.counts.sum(axis=0) / self.pipeline.pp
        running = whole.passes["F kernels"] + whole.passes["B kernels"]
        whole.seconds[at] = step + optimizer + update
        whole.bubble[at] = np.maximum(span - mean, 0.0)
        whole.after[at] = step - span + update
        whole.kernels[at] = running[self.passes] @ per_rank * m + optimizer
        whole.waits[at] = np.maximum(mean + optimizer - whole.kernels[at], 0.0)
        drawn = whole.passes["drawn"][self.passes] @ per_rank * m
        whole.drawn[at] = drawn + OPTIMIZER_POWER * optimizer

    def _costs(self, first: Int) -> tuple[dict[str, Float], dict[str, Float]]:
        """Seconds of actions by kind on each stage, for some candidates: [stages, candidates].

        And those of gathers before their first block: no block hides these.
        """
        whole = self.estimates
        passes, states, exchanges = whole.passes, whole.states, whole.exchanges
        t, y, x = self.passes[first], self.states[first], self.exchanged[first]
        overlaps = self.flags("overlaps")[first, None] > 0
        hidden = whole.rows.column("overlap_moe_expert_parallel_comm").is_one_of(True)
        hidden = hidden[self.at][first, None]
        slowest = max((whole.rows.base.cluster.stragglers or {}).values(), default=1.0)
        reduce = exchanges.reduce[:, x] * self.flags("reduces")[first, None]
        ends = [(stage[0], stage[-1]) if stage else (0, 0) for stage in self.pipeline.stages]
        head, tail = (np.array(kinds) for kinds in zip(*ends, strict=True))
        costs: dict[str, Float] = {}
        gathers: dict[str, Float] = {}
        for kind in (kind for kind in "FBIW" if kind in passes.tables):
            each = passes[kind][t] * max(slowest, 1.0)
            waits = np.zeros_like(exchanges.forward[:, x])
            if kind in "FB":  # what ZeRO adds, and what experts hide
                host = passes[f"{kind} host"][t] + states[f"{kind} host"][y]
                each = np.maximum(each + states[f"{kind} kernels"][y], host)
                exchanged = np.minimum(passes[f"{kind} experts"][t], each)
                each = np.where(hidden, np.maximum(each - exchanged, host), each)
            if kind == "F":
                waits = exchanges.forward[:, x]
            elif kind in "BI":
                waits = exchanges.backward[:, x]
            begin, end = (head, tail) if kind == "F" else (tail, head)
            first_gather = waits.max(axis=0)[:, begin]
            hold = waits if kind == "F" else waits + reduce
            longer = np.where(overlaps, latest([each, *hold]), each + hold.sum(axis=0))
            gathers[kind] = np.minimum(each[:, end], first_gather).T
            if kind == "F":  # gathers wait for the last reduction of the backward pass before
                gathers[kind] = (
                    gathers[kind] + np.where(waits > 0, reduce, 0.0).max(axis=0)[:, begin].T
                )
            gathers[kind] = gathers[kind] * overlaps.T
            costs[kind] = self.counts @ longer.T + gathers[kind]
        return costs, gathers

    def _reduced(self, played: Played, costs: Mapping[str, Float], of: Int, ends: Float) -> Float:
        """Seconds until all gradients of each rank are reduced: [ranks, candidates]."""
        finished = ends.copy()
        once = self.flags("reduces") == 0
        overlaps = self.flags("overlaps") > 0
        for group in self.estimates.exchanges.reduce:
            reduce = group[self.exchanged]
            if not reduce.any():
                continue
            on_stages = self.counts @ reduce.T
            for rank, stages in enumerate(played.last):
                queue = np.full(len(self.at), -np.inf)
                for stage, kind, end in stages:
                    blocks = self.pipeline.stages[stage]
                    if not blocks:
                        continue
                    late: Float = ends[rank] - played.ranks[rank][of] + end[of]
                    # The first block in order of backward passes is done before the others.
                    hidden: Float = costs[kind][stage][of] * (1 - 1 / len(blocks))
                    begin = late - hidden
                    begin[~overlaps] = ends[rank][~overlaps]
                    whole = np.maximum(queue, begin) + on_stages[stage]
                    queue = np.maximum(np.where(once, whole, 0.0), late + reduce[:, blocks[0]])
                finished[rank] = np.maximum(finished[rank], queue)
        return finished

    def _after(self) -> tuple[Float, Float]:
        """Seconds of the optimizer, and beyond these of gathers of updated parameters."""
        states, exchanges = self.estimates.states, self.estimates.exchanges
        seconds = states["optimizer seconds"][self.states]
        scale = np.where(self.zero > 0, self._shard, 1.0)
        optimizer, both = np.zeros((2, len(self.at)))
        for held in self.on_ranks:
            mine = seconds @ held * scale
            optimizer = np.maximum(optimizer, mine)
            both = np.maximum(both, mine)
            for update in exchanges.update[:, self.exchanged]:
                begun = mine / max(held.sum(), 1.0)  # after the first block
                last = mine + update.max(axis=1)
                both = latest([both, update @ held + begun, np.where(update.any(axis=1), last, 0)])
        return optimizer, both - optimizer

    @property
    def _shard(self) -> Float:
        """States of a rank where ZeRO shards them, over those in the tiny run."""
        return self.estimates.states.shards[self.states] / self.flags("shards")

    # ---- memory ----------------------------------------------------------------------------------

    def write_memory(self) -> None:
        """Memory of the fullest rank."""
        whole, at, stages = self.estimates, self.at, self.pipeline.stages
        states, passes, sent = whole.states, whole.passes, whole.sent[at]
        held = [
            {
                name: states[name][self.states] @ blocks * np.where(self.zero >= n, self._shard, 1)
                for name, n in _STATES.items()
            }
            for blocks in self.on_ranks
        ]
        saved = self.counts @ passes["saved"][self.passes].T
        caches = self._torch_buffers(sent)
        if len(stages) > 1:
            saved[0] -= np.minimum(sent, saved[0])  # what is sent is not saved
        if caches is not None:
            saved[:-1] += sent  # by PyTorch's stages it is
        beside = {
            stage: {
                "gathered_parameters": self._gathered(stage),
                "workspace": np.maximum(self._transient(stage), 0.0),
                "communication": self._largest(stage, "reduce", 1) * self.flags("reduces") / 2,
            }
            for stage in {*stages}
        }
        scale = self.microbatches / self.played[-1] if self.pipeline.forwards_first else 1.0
        most = np.full(len(at), -1.0)
        for rank, stage, own, counts in occupancies(self.order):
            kept = np.einsum("s,sn->n", np.array(counts, dtype=float), saved[list(own)]) * scale
            parts = held[rank] | beside[stages[stage]] | {"activations": kept}
            if caches is not None:
                parts["communication"] = parts["communication"] + caches[rank]
            total = sum(parts.values())
            larger = total > most
            most = np.where(larger, total, most)
            for name, size in parts.items():
                column = whole.memory[name]
                column[at] = np.where(larger, size, column[at])

    def _transient(self, stage: Sequence[int]) -> Float:
        """Bytes beyond those saved at the peak of a stage's backward pass."""
        passes, p = self.estimates.passes, self.passes
        found = np.zeros(len(p))
        for kind in {*stage}:
            place = len(stage) - 1 - stage[::-1].index(kind)
            freed = np.bincount(stage[place + 1 :], minlength=passes["saved"].shape[1])
            found = np.maximum(found, passes["transient"][p, kind] - passes["saved"][p] @ freed)
        return found

    def _bytes(self, use: str) -> Float:
        """Bytes that each kind of block exchanges: [candidates, kinds]."""
        states = self.estimates.states
        return np.sum([states[f"{group} {use}"] for group in GROUPS], axis=0)[self.states]

    def _largest(self, stage: Sequence[int], use: str, blocks: int) -> Float:
        """Most bytes exchanged for as many blocks in a row, of a stage."""
        sizes = self._bytes(use)
        runs = {tuple(stage[n : n + blocks]) for n in range(max(len(stage) - blocks + 1, 1))}
        return latest([np.zeros(len(sizes)), *(sizes[:, [*run]].sum(axis=1) for run in runs)])

    def _gathered(self, stage: Sequence[int]) -> Float:
        """Bytes of gathered parameters: of two blocks, or all that PyTorch's pipelines keep."""
        pair = self._largest(stage, "gather_forward", 2)
        blocks = max(self.on_ranks, key=lambda counts: counts.sum())
        return np.where(self.flags("gathers") > 0, pair, self._bytes("gather_forward") @ blocks)

    def _torch_buffers(self, sent: Float) -> list[Float] | None:
        """Bytes of each rank's buffers, one for each message of a step (`pipeline_caches`); None:
        there are none."""
        if not self.estimates.rows.run(int(self.at[0])).pipeline_caches:
            return None
        last = len(self.pipeline.stages) - 1
        found: list[Float] = []
        for steps in self.order:
            stages = {action.stage for action in flat(steps)}
            messages = sum((stage > 0) + (stage < last) for stage in stages)
            found.append(sent * self.microbatches * messages)
        return found
