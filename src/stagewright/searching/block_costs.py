"""Costs of single blocks: seconds and bytes of a layer, the embedding and the head.

They are read off *tiny runs* (`tiny_step`): the model's first few layers, in one pipeline stage
with two microbatches, compiled and simulated like any run. Candidates that differ only in their
pipeline, dp, ZeRO or batch share a tiny run; `estimate` adds the effects of these.

There are two sorts of tiny runs. `pass_costs` has costs per microbatch: seconds of the forward and
backward pass, and bytes saved for backward. `state_costs` has costs per step: bytes of parameters,
gradients and optimizer states, bytes of dp communication, and seconds of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, distinct_numbers
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.variants import place_blocks
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Candidates
from stagewright.searching.tiny_step import (
    ALL_ACTIONS,
    COSTS,
    BlockKind,
    Blocks,
    forward_seconds,
    tiny_step_costs,
)
from stagewright.time.simulate.launches import host_work, launch_mode
from stagewright.time.simulate.step import simulate

PIPELINE_SETTINGS = (
    *("pp", "vpp", "schedule", "microbatch_group_size_per_vp_stage", "layers_per_stage"),
    *("first_stage_less_layers", "last_stage_less_layers", "pipeline_split", "global_batch_size"),
    *("recompute_num_layers", "cpu_offloading_num_layers"),
)
"""Settings that decide which blocks run where and when, without effect on a block."""
PER_LAYER_SETTINGS = ("recompute_num_layers", "cpu_offloading_num_layers")
"""Those of `PIPELINE_SETTINGS` that apply to some layers of a stage."""
STATE_SETTINGS = (
    *("dp", "zero", "dp_shard", "optimizer_cpu_offload", "optimizer_offload_fraction", "order"),
    *("overlap_param_gather", "grad_reduce", "overlap_moe_expert_parallel_comm"),
)
"""Settings of a step, without effect on a pass of one microbatch."""
PASS_SETTINGS = (
    *("micro_batch_size", "cp", "cp_comm_type", "recompute", "recompute_modules"),
    *("moe_flex_dispatcher", "tp_comm_overlap"),
)
"""Settings of a pass, without effect on the states of a model."""
LIMIT_SETTINGS = ("device_memory", "memory_allowance")
"""Settings without effect on costs."""
EXPERTS = ("ep", "etp", "moe_token_dispatcher_type", "moe_flex_dispatcher")
ATTENTION = ("cp_comm_type",)
RECOMPUTE = ("recompute", "recompute_modules")
"""Groups of settings of a pass; tiny runs do not cross `ATTENTION` with the others."""


def blocks_of(candidates: Candidates) -> Blocks:
    """Blocks of the candidates' model."""
    run = candidates.run(0)
    unsplit = run.model_copy(
        update=_defaults(PIPELINE_SETTINGS, run) | {"pp": 1, "vpp": 1, "dp": 1}
    )
    (placed,) = place_blocks(unsplit.resolved(candidates.model), candidates.model)
    first: dict[BlockKind, int] = {}
    for variant, layer in placed:
        first.setdefault(BlockKind(variant.block, variant.layer), layer)
    layers = max(2, 1 + max(first.values(), default=0))
    are_layers = tuple(layer >= 0 or kind.layer.ahead > 0 for kind, layer in first.items())
    return Blocks(tuple(first), min(layers, candidates.model.num_layers), are_layers)


@dataclass(frozen=True, slots=True, eq=False)
class BlockCosts:
    """Costs of blocks by name: [tuples of settings, kinds of blocks] each.

    NaN where a tiny run was refused. Names of `pass_costs`:

    - `F`, `B`, and if a schedule halves backward passes `I`, `W`: seconds of an action with the
      communication it waits for, without launches unless these wait for kernels. `F kernels`,
      `F experts` (communication over ep) and the same of `B`: parts of these.
    - `F host` and others: seconds of launches. `F waits`: how often a forward pass's launches wait
      for kernels.
    - `overlap exposed`: overlapped passes take from the least they can (0) to both in turn (1).
    - `energy over TDP`: energy of both passes over TDP, in seconds.
    - `saved`: bytes saved for backward. `transient`: bytes beyond these at the peak of a backward
      pass.

    Names of `state_costs`:

    - `parameters`, `gradients`, `optimizer`: bytes on a rank of the tiny run, which has `shards`.
    - `optimizer seconds`: of kernels and of stores to the host, in the tiny run.
    - `F kernels`, `F host` and the same of `B`: seconds that ZeRO-2 and 3 add to a pass.
    - `dense reduce` and others: bytes of unsharded tensors in dp communication, by kind of weights
      (`WEIGHTS`) and use (`USES`).
    - `expert to dense reduce`: share of a backward pass's kernels between these reductions.
    """

    tuple_of: Int
    """Index of each candidate's row in the tables: [candidates]."""
    tables: Mapping[str, Float]
    shards: Int
    """Ranks of dp in the tiny run, over which ZeRO shards states: [tuples]."""

    def __getitem__(self, name: str) -> Float:
        return self.tables[name]

    def with_kinds(self, other: Mapping[str, Float]) -> Self:
        """Append columns of other costs."""
        tables = {name: np.hstack([table, other[name]]) for name, table in self.tables.items()}
        return replace(self, tables=tables)


# ---- costs of passes -----------------------------------------------------------------------------


def pass_costs(
    candidates: Candidates, blocks: Blocks, *, halves: bool = False, per_layer: bool = False
) -> BlockCosts:
    """Costs of passes; `halves`: also of the halves of backward passes, and of overlapped passes.

    Settings of passes are of four groups: `ATTENTION`, `EXPERTS`, `RECOMPUTE`, and the core, which
    is all others. The base of a core is its first candidate. Effects of attention are added to
    those of experts and recomputation, so that their product is never run: cost(attention, experts)
    = cost(attention, base) + cost(base, experts) - cost(base, base). With two values each, p2p and
    a2a of `cp_comm_type`, ep=1 and ep=8, three runs give four costs: (p2p, 1), the base, (a2a, 1)
    and (p2p, 8); (a2a, 8) is the sum of these two less the base. Weight gradients and overlap are
    measured without recomputation.

    Columns are kinds of blocks; with `per_layer` four sets of them: as the run recomputes, without
    recomputation, and both with saved bytes on the host.
    """
    names = {*candidates.columns} - {*PIPELINE_SETTINGS, *STATE_SETTINGS, *LIMIT_SETTINGS}
    core = names - {*ATTENTION, *EXPERTS, *RECOMPUTE}
    tp_stride = _tp_stride(candidates)
    _, core_of = _distinct(candidates, core, tp_stride)
    base = np.unique(core_of, return_index=True)[1][core_of]  # first candidate of the same core
    examples, row_of = _distinct(candidates, names, tp_stride)
    tiny_runs = _TinyRuns(candidates, blocks)

    def tables(group: Iterable[str], indices: Int = examples) -> dict[str, Float]:
        """Costs with the core and `group` of each candidate, and else settings of its base."""
        first, tuple_of = _distinct(candidates, core | {*group}, tp_stride)
        runs = [_pass_run(candidates, n, int(base[n]), group, halves) for n in first.tolist()]
        costs = tiny_runs.costs(runs)
        return {name: table[tuple_of[indices]] for name, table in costs.items()}

    attention = tables(ATTENTION)
    base_costs = tables(ATTENTION, base[examples])

    def with_attention(costs: Mapping[str, Float]) -> dict[str, Float]:
        """Costs measured with the base's attention, for the attention of each candidate."""
        return {name: attention[name] + (costs[name] - base_costs[name]) for name in base_costs}

    of_experts = tables(EXPERTS)
    costs = without_recompute = with_attention(of_experts)
    recompute = candidates.column("recompute")
    if not recompute.is_one_of("none").all():
        costs = with_attention(tables((*EXPERTS, *RECOMPUTE)))
        full = recompute.is_one_of("full")[examples] & _recomputes_all(candidates)
        full_recompute = _with_forward(without_recompute, blocks, input_bytes(candidates)[examples])
        costs = {name: np.where(full[:, None], full_recompute[name], costs[name]) for name in costs}
    for name in ("W", "W host", "overlap exposed"):
        costs[name] = without_recompute[name] = of_experts[name]
    if halves:
        for part in ("", " host"):
            for table in (costs, without_recompute):
                table[f"I{part}"] = table[f"B{part}"] - costs[f"W{part}"]
    result = BlockCosts(row_of, costs, np.ones(len(examples), dtype=np.int64))
    if not per_layer:
        return result
    rates = [candidates.hardware(n).host_bandwidth_gb_s * 1e9 for n in examples.tolist()]
    return _with_offload(result.with_kinds(without_recompute), np.array(rates))


def _recomputes_all(candidates: Candidates) -> bool:
    """True if full recomputation repeats a block's whole forward pass."""
    return not candidates.base.run.recompute_early_stop


def _with_forward(costs: Mapping[str, Float], blocks: Blocks, inputs: Float) -> dict[str, Float]:
    """Costs of layers whose backward pass repeats the forward pass from their input."""
    layers = np.array(blocks.are_layers)
    kernels = costs["F kernels"] + costs["B kernels"]
    share = np.divide(costs["F kernels"], kernels, out=np.zeros_like(kernels), where=kernels > 0)
    result = dict(costs)
    for name in ("B", "B kernels", "B experts", "B host"):
        result[name] = costs[name] + layers * costs[f"F{name[1:]}"]
    result["energy over TDP"] = costs["energy over TDP"] * (1 + layers * share)
    saved = np.where(layers, inputs[:, None], costs["saved"])
    result["transient"] = costs["transient"] + costs["saved"] - saved
    result["saved"] = saved
    return result


def input_bytes(candidates: Candidates) -> Float:
    """Bytes of the hidden states that a layer reads, in bf16 [candidates]."""
    tokens = candidates.numbers("micro_batch_size") * candidates.seq_length
    tokens //= candidates.numbers("cp")
    tp = candidates.numbers("tp")
    split = np.where(candidates.numbers("sequence_parallel") > 0, tp, 1)
    hidden_size = candidates.model.hidden_size
    return np.asarray(2.0 * hidden_size * (tokens // split), dtype=np.float64)


def _with_offload(costs: BlockCosts, host_bandwidth: Float) -> BlockCosts:
    """Append columns of blocks that offload their saved bytes to the host."""
    transfer = costs["saved"] / host_bandwidth[:, None]
    offloaded = dict(costs.tables) | {kind: np.maximum(costs[kind], transfer) for kind in "FB"}
    offloaded["transient"] = costs["transient"] + costs["saved"]
    offloaded["saved"] = np.zeros_like(costs["saved"])
    return costs.with_kinds(offloaded)


def _pass_run(
    candidates: Candidates, index: int, base: int, group: Iterable[str], halves: bool
) -> _TinyRun:
    """Tiny run of a pass; with `halves` and a group with `EXPERTS` also of halves and overlap.

    Settings of `group` come from the candidate, other groups from the base. Only a group with
    `RECOMPUTE` recomputes, except full recomputation, which `_with_forward` derives.
    """
    run, execution = candidates.run(index), candidates.execution(index)
    update: dict[str, Any] = _defaults((*PIPELINE_SETTINGS, *STATE_SETTINGS, *LIMIT_SETTINGS), run)
    derived = run.recompute == "full" and _recomputes_all(candidates)
    if "recompute" not in group or derived:
        update |= _defaults(RECOMPUTE, run) | {"recompute": "none"}
    for name in {*candidates.columns} & {*ATTENTION, *EXPERTS} - {*group}:
        value = candidates.column(name).at(base)
        if name in Execution.__dataclass_fields__:
            execution = replace(execution, **{name: value})
        else:
            update[name] = value
    run = run.model_copy(update=update)
    tp_stride = int(_tp_stride(candidates.take(slice(index, index + 1)))[0])
    dp = tp_stride * _min_dp_of_experts(run, run.cp)
    all_actions = halves and "ep" in group and run.recompute == "none"
    batch = (4 if all_actions else 2) * dp * run.micro_batch_size
    update = {"dp": dp, "global_batch_size": batch, "zero": 0}
    if all_actions:
        update["schedule"] = ALL_ACTIONS
    if tp_stride > 1:
        update["order"] = "ep-dp-tp-cp-pp"
    execution = replace(execution, overlap_moe_expert_parallel_comm=False)
    return _TinyRun(run.model_copy(update=update), execution, index)


def _tp_stride(candidates: Candidates) -> Int:
    """Stride of tp in ranks, in units of dp and pp [candidates]."""
    column = candidates.column("order")
    stride = np.ones(len(candidates), dtype=np.int64)
    if all(order.startswith(("tp-cp", "cp-tp")) for order in column.values):
        return stride
    for axis in ("dp", "pp"):
        before = [o.split("-").index(axis) < o.split("-").index("tp") for o in column.values]
        stride *= np.where(np.array(before)[column.codes], candidates.numbers(axis), 1)
    return stride


def _min_dp_of_experts(run: Run, cp: int) -> int:
    """Minimum dp over which the experts of a run can be spread."""
    ranks = run.expert_tensor_parallel_size * run.ep
    return ranks // int(np.gcd(ranks, run.tp * cp))


# ---- costs of states -----------------------------------------------------------------------------


def state_costs(candidates: Candidates, blocks: Blocks, *, per_layer: bool = False) -> BlockCosts:
    """Costs of states; with `per_layer` in the four sets of columns of `pass_costs`."""
    excluded = {
        *PIPELINE_SETTINGS,
        *PASS_SETTINGS,
        *LIMIT_SETTINGS,
        "dp",
        "dp_shard",
        "sequence_parallel",
    }
    first, tuple_of = _distinct(candidates, {*candidates.columns} - excluded)
    runs = [_state_run(candidates, index) for index in first.tolist()]
    unsharded = [
        tiny._replace(run=tiny.run.model_copy(update={"zero": 0})) if tiny.run.zero >= 2 else tiny
        for tiny in runs
    ]
    tiny_runs = _TinyRuns(candidates, blocks)
    costs, without_zero = tiny_runs.costs(runs), tiny_runs.costs(unsharded)
    for name in ("F kernels", "F host", "B kernels", "B host"):
        costs[name] = costs[name] - without_zero[name]
    result = BlockCosts(tuple_of, costs, np.array([tiny.run.dp for tiny in runs]))
    if per_layer:  # states depend neither on recomputation nor on offloading
        twice = result.with_kinds(result.tables)
        result = twice.with_kinds(twice.tables)
    return result


def _state_run(candidates: Candidates, index: int) -> _TinyRun:
    """Tiny run of the states of one candidate."""
    run = candidates.run(index)
    run = run.model_copy(
        update=_defaults(
            (*PIPELINE_SETTINGS, *PASS_SETTINGS, *LIMIT_SETTINGS, "dp_shard", "order"), run
        )
    )
    dp = 2 * _min_dp_of_experts(run, 1)
    update = {"dp": dp, "global_batch_size": 2 * dp, "recompute": "none", "micro_batch_size": 1}
    execution = replace(
        candidates.execution(index),
        overlap_moe_expert_parallel_comm=False,
        moe_flex_dispatcher=False,
    )
    return _TinyRun(run.model_copy(update=update), execution, index)


# ---- tiny runs -----------------------------------------------------------------------------------


class _TinyRun(NamedTuple):
    """Run with its execution, and the candidate on whose machine it runs."""

    run: Run
    execution: Execution
    candidate: int


class _TinyRuns:
    """Simulated tiny runs; machines share compiled runs."""

    def __init__(self, candidates: Candidates, blocks: Blocks) -> None:
        self.candidates, self.blocks = candidates, blocks
        self.compiled: dict[Run, CompiledRun | None] = {}
        self.cache: dict[tuple[Run, Execution, str], dict[str, Float]] = {}

    def costs(self, runs: Sequence[_TinyRun]) -> dict[str, Float]:
        """Tables [runs, kinds] of all costs by name; NaN where a run is refused."""
        by_run = [self._read(tiny) for tiny in runs]
        missing = np.full(len(self.blocks.kinds), np.nan)
        return {name: np.array([costs.get(name, missing) for costs in by_run]) for name in COSTS}

    def _read(self, tiny: _TinyRun) -> dict[str, Float]:
        """Costs by name: [kinds] each; none if the run is refused."""
        cluster = self.candidates.cluster(tiny.candidate)
        system = self.candidates.hardware(tiny.candidate).name
        key = tiny.run, tiny.execution, f"{system} {cluster.topology} {cluster.algorithm}"
        if key not in self.cache:
            self.cache[key] = self._simulate(tiny)
        return self.cache[key]

    def _simulate(self, tiny: _TinyRun) -> dict[str, Float]:
        layers = self.blocks.layers
        if tiny.run.schedule == ALL_ACTIONS:  # the overlap of layers, not that of the head
            layers = min(2 * layers, self.candidates.model.num_layers)
        run = tiny.run.model_copy(update={"pp": 1, "layers": layers})
        memory = self.candidates.hardware(tiny.candidate).memory
        try:
            if run not in self.compiled:
                self.compiled[run] = None
                self.compiled[run] = compile(run, self.candidates.model, device_memory=memory)
            program = self.compiled[run]
            if program is None:
                return {}
            machine = self.candidates.machine(tiny.candidate, gpus=program.run.world_size)
            hosts = host_work(
                program.program, program.run, program.model, tiny.execution, machine.hardware
            )
            execution = tiny.execution
            if launch_mode(program.run, execution, machine.hardware) != "blocking":
                execution = replace(execution, launch_mode="ahead", cuda_graph_modules=frozenset())
            costs = tiny_step_costs(simulate(program, machine, execution), hosts, self.blocks)
            if costs["F waits"].any() and execution != tiny.execution:  # the host is not ahead
                with_launches = simulate(program, machine, tiny.execution)
                costs["F"] = forward_seconds(with_launches, self.blocks)
        except UserError:
            return {}
        return costs


def _defaults(names: Iterable[str], run: Run) -> dict[str, Any]:
    """Defaults of those settings that a run has."""
    fields = type(run).model_fields
    return {n: EXPERIMENT[n].default_of(run.framework) for n in names if n in fields}


def _distinct(candidates: Candidates, names: Iterable[str], *numbers: Int) -> tuple[Int, Int]:
    """First candidate of each distinct tuple of settings, and the tuple of each candidate."""
    selected = {*names}
    ordered = [name for name in candidates.columns if name in selected]
    return distinct_numbers([candidates.distinct(*ordered).tuple_of, *numbers], len(candidates))
