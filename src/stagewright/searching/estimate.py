"""Estimates of candidates: their schedule simulated on the costs of single blocks.

A stage's forward pass takes as long as its blocks (`block_costs`). Each distinct pipeline's order
of actions is simulated once, on arrays over all candidates that have it (`pipelines`). After the
last backward pass follow the remaining reductions, the optimizer, and the gather of updated
parameters. With ZeRO-2/3 a block takes the longest of its kernels, its gathers and its reductions,
since they overlap; without overlap, their sum.

Memory is that of the fullest pipeline rank: states as ZeRO shards them, and for each microbatch in
flight the bytes that blocks save for backward.

Candidates that agree in the settings that matter share a row ("tuple") of a table; `tuple_of` has
the index of each candidate's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.algebra.layout import MIRROR
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
    PER_LAYER_SETTINGS,
    BlockCosts,
    blocks_of,
    input_bytes,
    pass_costs,
    state_costs,
)
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates, Column
from stagewright.searching.figures import Figures
from stagewright.searching.pipelines import (
    ActionCosts,
    Pipeline,
    PipelineTimes,
    occupancies,
    pairs_ranks,
    pipelines,
    simulate_order,
)
from stagewright.searching.simulated import simulate_all
from stagewright.searching.tiny_step import USES, WEIGHTS
from stagewright.time.collectives import collective_seconds, message_seconds
from stagewright.time.network import Machine, Placement, placements, tier_of
from stagewright.time.power import RUNNING_FRACTION, watts_per_gpu
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.utilization import sequence_flops

OPTIMIZER_POWER = 0.7
"""Power over TDP of an optimizer's kernels, which stream bytes."""
_SHARDED_FROM_ZERO = {"parameters": 3, "gradients": 2, "optimizer": 1}
"""Minimum ZeRO stage that shards each category of states."""


def estimate(candidates: Candidates, executor: Executor | None = None) -> Figures:
    """Estimated metrics of candidates; NaN without an estimate."""
    if candidates.base.run.mode != "train":
        return _extrapolate_layers(candidates, executor)
    blocks = blocks_of(candidates)
    same_pipeline = list(pipelines(candidates, blocks))
    halves = any(halved(pipeline.order(counts[0])) for pipeline, counts, _ in same_pipeline)
    per_layer = any((candidates.numbers(name) > 0).any() for name in PER_LAYER_SETTINGS)
    merged = candidates.merge_memory_sizes()
    passes = pass_costs(merged, blocks, halves=halves, per_layer=per_layer)
    states = state_costs(merged, blocks, per_layer=per_layer)
    estimates = _Estimates.of(candidates, passes, states)
    for pipeline, counts, at in same_pipeline:
        part = _SamePipeline(estimates, pipeline, counts, at)
        part.write_times()
        part.write_memory()
    return estimates.figures()


def _extrapolate_layers(candidates: Candidates, executor: Executor | None) -> Figures:
    """Estimates of inference: each candidate simulated with few layers and with twice as many."""
    depth = candidates.model.num_layers
    few = np.minimum(blocks_of(candidates).layers * candidates.numbers("pp"), depth)
    twice = np.minimum(2 * few, depth)

    def simulated(layers: Int) -> Figures:
        column = Column.of(layers.tolist())
        shorter = replace(candidates, columns={**candidates.columns, "layers": column})
        results = simulate_all(shorter, executor)
        if results.stopped:
            raise KeyboardInterrupt
        return results.figures

    first, second = simulated(few), simulated(twice)
    times = np.where(twice > few, (depth - few) / np.maximum(twice - few, 1), 0.0)
    return first.extrapolated(second, times)


def lower_bounds(candidates: Candidates) -> Float:
    """Lower bound of step seconds: layer kernels over pp ranks."""
    blocks = blocks_of(candidates)
    passes = pass_costs(candidates, blocks)
    run = candidates.run(0).model_copy(update={"pp": 1, "vpp": 1, "dp": 1, "schedule": None})
    (placed,) = place_blocks(run.resolved(candidates.model), candidates.model)
    kinds = [blocks.kind(block) for block in placed if block[1] >= 0]
    layers = np.bincount(kinds, minlength=len(blocks.kinds))
    per_microbatch = (passes["F kernels"] + passes["B kernels"]) @ layers
    return per_microbatch[passes.tuple_of] * candidates.microbatches / candidates.numbers("pp")


# ---- dp communication ----------------------------------------------------------------------------


class _DpGroup(NamedTuple):
    """Ranks of a candidate that have the same weights, and how they communicate."""

    machine: Machine
    shard: Placement | None
    """Ranks that shard dense states; without ZeRO those that replicate them."""
    replicas: Placement | None
    """Ranks with the same shard, with HSDP."""
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
    """True if communication overlaps kernels."""
    level: int
    """Tier of the network that messages between stages cross."""

    @classmethod
    def of(cls, candidates: Candidates, index: int) -> Self:
        """Group of one candidate."""
        run, machine = candidates.run(index).resolved(candidates.model), candidates.machine(index)
        execution = candidates.execution(index)
        mirrored = pairs_ranks(str(run.schedule))
        mesh, plan = parallelization(run, candidates.model, mirrored=mirrored)

        def place(axes: Sequence[str]) -> Placement | None:
            if mesh.size(*axes) < 2:
                return None
            program = Program(mesh, (), (Communicator(tuple(axes)),), ())
            return placements(machine, program.members(0, np.zeros(1, dtype=np.int64)))[0]

        data = (*plan.data, *plan.context)
        mirror = (MIRROR,) if mirrored else ()  # replicates experts, too
        shard = plan.zero_axes if run.zero else data
        level = 0
        if run.pp > 1:
            ranks = np.arange(mesh.world_size)
            ranks = ranks[ranks // mesh.stride("pp") % run.pp < run.pp - 1]
            level = int(tier_of(machine, ranks, ranks + mesh.stride("pp")).max())
        return cls(
            machine=machine,
            shard=place(shard),
            replicas=place([axis for axis in data if axis not in shard]),
            experts=place((*mirror, *plan.axes_of("edp"))),
            zero=run.zero,
            shards=mesh.size(*shard),
            reduces=reduces_each_microbatch(run),
            # PyTorch's pipelines keep gathered parameters (`reshard_after_backward`).
            gathers=not (run.pipeline_caches and run.pp > 1),
            updates=not execution.overlap_param_gather,
            overlaps="dp" not in execution.no_overlap and execution.streams != "one",
            level=level,
        )

    def seconds(self, weights: str, use: str, sizes: Float) -> Float:
        """Seconds to communicate unsharded tensors of `sizes` bytes."""
        place = self.shard if weights == "dense" else self.experts
        if place is None or (use == "update" and not self.updates):
            return np.zeros_like(sizes)
        if use != "reduce":
            if use != "update" and not self.gathers:
                return np.zeros_like(sizes)
            return collective_seconds("all_gather", sizes / place.ranks, place, self.machine)
        op = "reduce_scatter" if self.zero else "all_reduce"
        seconds = collective_seconds(op, sizes, place, self.machine)
        if self.replicas is not None and weights == "dense":
            shard = sizes / place.ranks
            seconds = seconds + collective_seconds("all_reduce", shard, self.replicas, self.machine)
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class _DpComm:
    """Seconds of dp communication by block: [kinds of weights, tuples, kinds of blocks] each.

    Each kind of weights (`WEIGHTS`) has a stream of its own.
    """

    tuple_of: Int
    """Index of each candidate's tuple: [candidates]."""
    group_of_tuple: Sequence[_DpGroup]
    forward: Float
    """Gathers of a microbatch's forward pass."""
    backward: Float
    """Gathers of a microbatch's backward pass."""
    reduce: Float
    """Reductions of gradients, per microbatch or per step."""
    update: Float
    """Gathers of updated parameters, per step."""

    @classmethod
    def of(cls, candidates: Candidates, states: BlockCosts) -> Self:
        """Communication of candidates with these states."""
        names = (
            *("tp", "cp", "dp", "pp", "ep", "etp", "order", "dp_shard", "zero", "schedule"),
            *("overlap_param_gather", "no_overlap", "grad_reduce"),
            *(HARDWARE, "topology", "algorithm"),
        )
        placed = candidates.distinct(*names)
        first, tuple_of = distinct_numbers([placed.tuple_of, states.tuple_of], len(candidates))
        by_tuple = [_DpGroup.of(candidates, index) for index in placed.first.tolist()]
        numbers: list[int] = placed.tuple_of[first].tolist()
        group_of_tuple = [by_tuple[n] for n in numbers]
        tables = np.zeros((4, len(WEIGHTS), len(first), states["optimizer"].shape[1]))
        for n, (group, state) in enumerate(
            zip(group_of_tuple, states.tuple_of[first].tolist(), strict=True)
        ):
            for w, weights in enumerate(WEIGHTS):
                forward, recompute, backward, reduce, update = (
                    group.seconds(weights, use, states[f"{weights} {use}"][state]) for use in USES
                )
                tables[:, w, n] = forward, recompute + backward, reduce, update
        return cls(tuple_of, group_of_tuple, *tables)

    def flags(self, name: str) -> Int:
        """Field of `_DpGroup` per tuple."""
        return np.array([int(getattr(group, name)) for group in self.group_of_tuple])


# ---- estimates of training -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Estimates:
    """Estimates that `_SamePipeline` fills in: [candidates] each."""

    candidates: Candidates
    passes: BlockCosts
    states: BlockCosts
    dp_comm: _DpComm
    message: Float
    """Seconds of a message from stage to stage."""
    sent: Float
    """Bytes of such a message."""
    seconds: Float
    bubble: Float
    exposed_dp: Float
    """Seconds after the last backward pass in which GPUs wait for dp communication."""
    exposed_layers: Float
    """Seconds in which the mean GPU waits for communication within layers."""
    kernels: Float
    energy_over_tdp: Float
    """Energy of kernels over TDP, in seconds."""
    memory: dict[str, Float]

    @classmethod
    def of(cls, candidates: Candidates, passes: BlockCosts, states: BlockCosts) -> Self:
        """Estimates of zero."""
        dp_comm = _DpComm.of(candidates, states)
        sent = input_bytes(candidates)
        message = np.zeros(len(candidates))
        level = dp_comm.flags("level")[dp_comm.tuple_of]
        first, tuple_of = distinct_numbers([candidates.machine_ids, level], len(candidates))
        for n, index in enumerate(first.tolist()):
            mask = tuple_of == n
            machine = candidates.machine(index)
            message[mask] = message_seconds(sent[mask], int(level[index]), machine)
        categories = (
            *_SHARDED_FROM_ZERO,
            "gathered_parameters",
            "activations",
            "workspace",
            "communication",
        )
        memory = {name: np.zeros(len(candidates)) for name in categories}
        zeros = np.zeros((6, len(candidates)))
        return cls(candidates, passes, states, dp_comm, message, sent, *zeros, memory=memory)

    def figures(self) -> Figures:
        """Estimates as figures."""
        candidates = self.candidates
        memory = {n: np.ceil(v).astype(np.int64) for n, v in self.memory.items() if v.any()}
        allowance = candidates.map_distinct(
            ("memory_allowance",), lambda index: allowance_of(candidates.run(index))
        )
        if allowance.any():
            memory["allowance"] = allowance
        gpus, batch = candidates.world_size, candidates.numbers("global_batch_size")
        sequences = candidates.microbatches * candidates.numbers("micro_batch_size")
        batch = np.where(batch == ABSENT, sequences * candidates.numbers("dp"), batch)
        exposed = self.exposed_dp + self.exposed_layers
        running = np.minimum((self.kernels + exposed) / self.seconds, 1.0)
        power_over_tdp = (self.energy_over_tdp + RUNNING_FRACTION * exposed) / self.seconds
        full, causal, peak_rate, watts, usd = np.zeros((5, len(candidates)))
        first, tuple_of = candidates.distinct("seq_length", HARDWARE, "precision")
        for n, index in enumerate(first.tolist()):
            mask, hardware = tuple_of == n, candidates.hardware(index)
            run = candidates.run(index).resolved(candidates.model)
            full[mask], causal[mask] = sequence_flops(run, candidates.model).of_step(1)
            peak_rate[mask] = peak_flops(hardware, PRECISIONS[run.precision].product)
            watts[mask] = watts_per_gpu(hardware, running[mask], power_over_tdp[mask])
            price = candidates.cluster(index).price
            price = hardware.price_usd_per_gpu_hour if price is None else price
            usd[mask] = np.nan if price is None else price / 3600
        rate = batch / (self.seconds * gpus)
        return Figures(
            seconds=np.where(self.seconds > 0, self.seconds, np.nan),
            memory=memory,
            device_memory=candidates.device_memory,
            exposed={"dp": self.exposed_dp, "layers": self.exposed_layers},
            bubble=self.bubble,
            tokens=batch * candidates.seq_length,
            mfu=full * rate / peak_rate,
            mfu_causal=causal * rate / peak_rate,
            tflops=full * rate / 1e12,
            joules=watts * gpus * self.seconds,
            usd=usd * gpus * self.seconds,
            useful=np.ones(len(candidates)),
            simulated=np.zeros(len(candidates), dtype=bool),
        )


class _SamePipeline:
    """Candidates with one pipeline and one tuple of simulated microbatch counts."""

    def __init__(
        self, estimates: _Estimates, pipeline: Pipeline, counts: tuple[int, ...], at: Int
    ) -> None:
        """`counts`: simulated microbatches; `at`: indices among all candidates."""
        self.estimates, self.pipeline, self.counts, self.at = estimates, pipeline, counts, at
        self.order = pipeline.order(counts[-1])
        kinds = estimates.passes["F"].shape[1]
        self.blocks = np.array([np.bincount(s, minlength=kinds) for s in pipeline.stages], float)
        """Blocks of each kind on each stage: [stages, kinds]."""
        self.blocks_of_ranks = [
            self.blocks[sorted({action.stage for action in flat(steps)})].sum(axis=0)
            for steps in self.order
        ]
        """Blocks of each kind on each rank."""
        self.microbatches = estimates.candidates.microbatches[at]
        self.zero = estimates.candidates.numbers("zero")[at]
        self.passes = estimates.passes.tuple_of[at]
        self.states = estimates.states.tuple_of[at]
        self.comm = estimates.dp_comm.tuple_of[at]

    def flags(self, name: str) -> Int:
        """Field of `_DpGroup` per candidate."""
        return self.estimates.dp_comm.flags(name)[self.comm]

    # ---- time ------------------------------------------------------------------------------------

    def write_times(self) -> None:
        """Simulate the order once per distinct set of costs, and add the end of the step."""
        estimates, at, microbatches = self.estimates, self.at, self.microbatches
        comm, passes = estimates.dp_comm, estimates.passes
        message = estimates.message[at]
        overlaps_passes = comm.forward.any(axis=(0, 2)) | (comm.flags("reduces") > 0)
        message_id = np.unique(message, return_inverse=True)[1]
        comm_id = np.where(overlaps_passes[self.comm], self.comm + 1, 0)
        first, tuple_of = distinct_numbers([self.passes, comm_id, message_id], len(at))
        costs = self._costs(first)
        simulated = [
            simulate_order(self.pipeline.order(count), costs, message[first])
            for count in self.counts
        ]
        times, count = simulated[-1], self.counts[-1]
        ends = times.rank_ends[:, tuple_of]
        if len(simulated) > 1:
            periods = (microbatches - count) / self.pipeline.period
            ends = ends + periods * (times.rank_ends - simulated[0].rank_ends).max(axis=0)[tuple_of]
        span, step = (
            ends.max(axis=0),
            self._reduction_ends(times, costs.seconds, tuple_of, ends).max(axis=0),
        )
        work = np.array([costs.of_rank(steps) for steps in self.order])
        mean = work.mean(axis=0)[tuple_of] * (microbatches / count)
        optimizer, update = self._optimizer_and_update()
        per_rank = self.blocks.sum(axis=0) / self.pipeline.pp
        kernel_seconds = (passes["F kernels"] + passes["B kernels"])[self.passes] @ per_rank
        estimates.seconds[at] = step + optimizer + update
        estimates.bubble[at] = np.maximum(span - mean, 0.0)
        estimates.exposed_dp[at] = step - span + update
        estimates.kernels[at] = kernel_seconds * microbatches + optimizer
        estimates.exposed_layers[at] = np.maximum(mean + optimizer - estimates.kernels[at], 0.0)
        energy = passes["energy over TDP"][self.passes] @ per_rank * microbatches
        estimates.energy_over_tdp[at] = energy + OPTIMIZER_POWER * optimizer

    def _costs(self, first: Int) -> ActionCosts:
        """Seconds of actions of candidates."""
        estimates = self.estimates
        passes, states, comm = estimates.passes, estimates.states, estimates.dp_comm
        pass_of, state_of, comm_of = self.passes[first], self.states[first], self.comm[first]
        overlaps = self.flags("overlaps")[first, None] > 0
        ep_overlap = estimates.candidates.column("overlap_moe_expert_parallel_comm")
        hides_experts = ep_overlap.is_one_of(True)[self.at][first, None]
        stragglers = estimates.candidates.base.cluster.stragglers or {}
        slowdown = max(max(stragglers.values(), default=1.0), 1.0)
        reduce = comm.reduce[:, comm_of] * self.flags("reduces")[first, None]
        stages = [stage or (0,) for stage in self.pipeline.stages]
        first_kind, last_kind = (np.array([stage[n] for stage in stages]) for n in (0, -1))
        costs: dict[str, Float] = {}
        gathers: dict[str, Float] = {}
        for kind in "FBIW" if "I" in passes.tables else "FB":
            compute = passes[kind][pass_of] * slowdown
            host = passes[f"{kind} host"][pass_of]
            if kind in "FB":  # what ZeRO adds, and what overlap of experts hides
                host = host + states[f"{kind} host"][state_of]
                compute = compute + states[f"{kind} kernels"][state_of]
                hidden = np.minimum(passes[f"{kind} experts"][pass_of], compute)
                compute = np.where(hides_experts, compute - hidden, compute)
            if kind == "F":  # launches that wait for kernels are not ahead of them
                waits = passes["F waits"][pass_of] > 0
                compute = np.where(waits, np.maximum(compute, host), compute)
            gather = comm.forward[:, comm_of] if kind == "F" else comm.backward[:, comm_of]
            if kind == "W":
                gather = np.zeros_like(gather)
            begin, end = (first_kind, last_kind) if kind == "F" else (last_kind, first_kind)
            first_gather = gather.max(axis=0)[:, begin]
            per_block, overlapped = gather, compute
            if kind in "BW":
                per_block = gather + reduce
                kernels = passes["B kernels"][pass_of]
                overlapped = compute + self._outstanding(reduce, compute, kernels, state_of)
            block = np.where(
                overlaps, latest([overlapped, *per_block]), compute + per_block.sum(axis=0)
            )
            exposed = np.minimum(compute[:, end], first_gather).T
            if kind == "F":  # gathers wait for the last reduction of the backward pass before
                last = reduce[0] + (reduce[0] == 0) * reduce[1]  # dense weights come after experts
                exposed = exposed + ((gather > 0).any(axis=0) * last)[:, begin].T
            gathers[kind] = exposed * overlaps.T
            launches = self.blocks @ host.T
            costs[kind] = np.maximum(self.blocks @ block.T, launches) + gathers[kind]

        def total(name: str) -> Float:
            return self.blocks @ (passes[name][pass_of] + states[name][state_of]).T

        kernels, launches = (
            {kind: total(f"{kind} {n}") for kind in "FB"} for n in ("kernels", "host")
        )
        exposed = passes["overlap exposed"][pass_of, 0]
        return ActionCosts(costs, gathers, kernels, launches, exposed)

    def _outstanding(self, reduce: Float, compute: Float, kernels: Float, states: Int) -> Float:
        """Seconds that kernels of a block wait for reductions: [candidates, kinds].

        Two reductions may be outstanding (`_limit_outstanding` in `time.simulate.rules`): when the
        next is issued, kernels wait for the one before.
        """
        dense, expert = reduce
        to_dense = self.estimates.states["expert to dense reduce"][states] * kernels
        to_dense = np.where((dense > 0) & (expert > 0), to_dense, 0.0)
        to_expert = compute - to_dense
        expert_wait = np.maximum(expert - np.where(dense > 0, to_dense, to_expert), 0.0)
        return expert_wait + np.maximum(dense - to_expert, 0.0)

    def _reduction_ends(
        self, times: PipelineTimes, costs: Mapping[str, Float], tuple_of: Int, ends: Float
    ) -> Float:
        """End of the last gradient reduction of each rank: [ranks, candidates].

        Reductions queue on one stream per group.
        """
        finished = ends.copy()
        once_per_step = self.flags("reduces") == 0
        overlaps = self.flags("overlaps") > 0
        for of_weights in self.estimates.dp_comm.reduce:
            reduce = of_weights[self.comm]
            if not reduce.any():
                continue
            of_stages = self.blocks @ reduce.T
            for rank, stages in enumerate(times.last):
                queue_end = np.full(len(self.at), -np.inf)
                for stage, kind, end in stages:
                    blocks = self.pipeline.stages[stage]
                    if not blocks:
                        continue
                    pass_end: Float = ends[rank] - times.rank_ends[rank][tuple_of] + end[tuple_of]
                    # The first block in the order of backward passes ends before the others.
                    begin: Float = pass_end - costs[kind][stage][tuple_of] * (1 - 1 / len(blocks))
                    begin[~overlaps] = ends[rank][~overlaps]
                    all_blocks = np.maximum(queue_end, begin) + of_stages[stage]
                    last_block = pass_end + reduce[:, blocks[0]]
                    queue_end = np.maximum(np.where(once_per_step, all_blocks, 0.0), last_block)
                finished[rank] = np.maximum(finished[rank], queue_end)
        return finished

    def _optimizer_and_update(self) -> tuple[Float, Float]:
        """Seconds of the optimizer, and of gathers of updated parameters beyond these."""
        states, comm = self.estimates.states, self.estimates.dp_comm
        seconds = states["optimizer seconds"][self.states]
        scale = np.where(self.zero > 0, self._shard, 1.0)
        optimizer, total = np.zeros((2, len(self.at)))
        for blocks in self.blocks_of_ranks:
            of_rank = seconds @ blocks * scale
            optimizer = np.maximum(optimizer, of_rank)
            total = np.maximum(total, of_rank)
            for update in comm.update[:, self.comm]:
                begin = of_rank / max(blocks.sum(), 1.0)  # after the first block
                last_block = np.where(update.any(axis=1), of_rank + update.max(axis=1), 0)
                total = latest([total, update @ blocks + begin, last_block])
        return optimizer, total - optimizer

    @property
    def _shard(self) -> Float:
        """States of a rank with ZeRO, over those in the tiny run."""
        return self.estimates.states.shards[self.states] / self.flags("shards")

    # ---- memory ----------------------------------------------------------------------------------

    def write_memory(self) -> None:
        """Memory of the fullest rank."""
        estimates, at, stages = self.estimates, self.at, self.pipeline.stages
        states, passes, sent = estimates.states, estimates.passes, estimates.sent[at]
        state_bytes = [
            {
                name: states[name][self.states] @ blocks * np.where(self.zero >= n, self._shard, 1)
                for name, n in _SHARDED_FROM_ZERO.items()
            }
            for blocks in self.blocks_of_ranks
        ]
        saved = self.blocks @ passes["saved"][self.passes].T
        buffers = self._torch_buffers(sent)
        if len(stages) > 1:
            saved[0] -= np.minimum(sent, saved[0])  # what is sent is not saved
        if buffers is not None:
            saved[:-1] += sent  # PyTorch's stages save it
        by_stage = {
            stage: {
                "gathered_parameters": self._gathered(stage),
                "workspace": np.maximum(self._transient(stage), 0.0),
                "communication": self._largest(stage, "reduce", 1) * self.flags("reduces") / 2,
            }
            for stage in {*stages}
        }
        scale = self.microbatches / self.counts[-1] if self.pipeline.forwards_first else 1.0
        peak, fullest = np.full(len(at), -1.0), dict.fromkeys(estimates.memory, np.zeros(len(at)))
        for rank, stage, rank_stages, counts in occupancies(self.order):
            in_flight = np.array(counts, dtype=float)
            activations = np.einsum("s,sn->n", in_flight, saved[list(rank_stages)]) * scale
            sizes = state_bytes[rank] | by_stage[stages[stage]] | {"activations": activations}
            if buffers is not None:
                sizes["communication"] = sizes["communication"] + buffers[rank]
            total = sum(sizes.values())
            larger = total > peak
            peak = np.where(larger, total, peak)
            fullest = {n: np.where(larger, sizes[n], size) for n, size in fullest.items()}
        for name, size in fullest.items():
            estimates.memory[name][at] = size

    def _transient(self, stage: Sequence[int]) -> Float:
        """Bytes beyond those saved at the peak of a stage's backward pass."""
        passes, tuples = self.estimates.passes, self.passes
        peak = np.zeros(len(tuples))
        for kind in {*stage}:
            position = len(stage) - 1 - stage[::-1].index(kind)
            freed = np.bincount(stage[position + 1 :], minlength=passes["saved"].shape[1])
            transient = passes["transient"][tuples, kind] - passes["saved"][tuples] @ freed
            peak = np.maximum(peak, transient)
        return peak

    def _bytes(self, use: str) -> Float:
        """Bytes of dp communication of each kind of block: [candidates, kinds]."""
        states = self.estimates.states
        return np.sum([states[f"{weights} {use}"] for weights in WEIGHTS], axis=0)[self.states]

    def _largest(self, stage: Sequence[int], use: str, num_blocks: int) -> Float:
        """Maximum bytes of dp communication of `num_blocks` adjacent blocks of a stage."""
        sizes = self._bytes(use)
        last = max(len(stage) - num_blocks + 1, 1)
        windows = {tuple(stage[n : n + num_blocks]) for n in range(last)}
        sums = (sizes[:, [*window]].sum(axis=1) for window in windows)
        return latest([np.zeros(len(sizes)), *sums])

    def _gathered(self, stage: Sequence[int]) -> Float:
        """Bytes of gathered parameters: of two blocks, or of all in PyTorch's pipelines."""
        pair = self._largest(stage, "gather_forward", 2)
        blocks = max(self.blocks_of_ranks, key=lambda counts: counts.sum())
        return np.where(self.flags("gathers") > 0, pair, self._bytes("gather_forward") @ blocks)

    def _torch_buffers(self, sent: Float) -> list[Float] | None:
        """Bytes of each rank's message buffers in PyTorch's pipelines (`pipeline_caches`)."""
        if not self.estimates.candidates.run(int(self.at[0])).pipeline_caches:
            return None
        last = len(self.pipeline.stages) - 1
        buffers: list[Float] = []
        for steps in self.order:
            stages = {action.stage for action in flat(steps)}
            messages = sum((stage > 0) + (stage < last) for stage in stages)
            buffers.append(sent * self.microbatches * messages)
        return buffers
