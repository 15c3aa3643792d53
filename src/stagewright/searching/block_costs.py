"""Costs of single blocks: seconds and bytes of a layer, the embedding and the head.

They are read off *tiny runs*: the model with its first few layers, in one pipeline stage with two
microbatches, compiled and simulated like any other run. Candidates that differ only in their
pipeline, in dp, in ZeRO or in the batch share a tiny run: what these add is the estimate's part.

There are two kinds of tiny runs. `pass_costs` has what a microbatch takes: seconds of the forward
and backward pass, and bytes saved for backward. `state_costs` has what a step takes once: bytes of
parameters, gradients and optimizer states, bytes exchanged along dp, and seconds of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, distinct_numbers
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.variants import PlacedVariant, place_blocks
from stagewright.model.layers import Layer
from stagewright.program.along import along
from stagewright.program.columns import CATEGORIES, COLLECTIVES, PHASES, TaskKind
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.searching.candidates import Candidates
from stagewright.time.expense.power import kernel_energies
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.step import SimulatedStep, simulate
from stagewright.time.simulate.timeline import TICK, table_rows

PIPELINE = (
    *("pp", "vpp", "schedule", "microbatch_group_size_per_vp_stage", "layers_per_stage"),
    *("first_stage_less_layers", "last_stage_less_layers", "pipeline_split", "global_batch_size"),
    *("recompute_num_layers", "cpu_offloading_num_layers"),
)
"""Settings that decide which blocks run where and when, and nothing of a block."""
PARTLY = ("recompute_num_layers", "cpu_offloading_num_layers")
"""Those of them that hold for some layers of a stage."""
STATES = (
    *("dp", "zero", "dp_shard", "optimizer_cpu_offload", "optimizer_offload_fraction", "order"),
    *("overlap_param_gather", "grad_reduce", "overlap_moe_expert_parallel_comm"),
)
"""Settings of a step, without effect on a pass of one microbatch."""
PASSES = (
    *("micro_batch_size", "cp", "cp_comm_type", "recompute", "recompute_modules"),
    *("moe_flex_dispatcher", "tp_comm_overlap"),
)
"""Settings of a pass, without effect on the states of a model."""
LIMITS = ("device_memory", "memory_allowance")
"""Settings that change no cost."""
EXPERTS = ("ep", "etp", "moe_token_dispatcher_type", "moe_flex_dispatcher")
ATTENTION = ("cp_comm_type",)
RECOMPUTE = ("recompute", "recompute_modules")
"""Settings whose effects on a pass add up: tiny runs do not cross them."""


class BlockKind(NamedTuple):
    """Blocks of one kind cost the same."""

    block: str
    """A name in `blocks.BLOCKS`: embedding, layer, head, ..."""
    layer: Layer


class Blocks(NamedTuple):
    """The blocks of a model by kind."""

    kinds: tuple[BlockKind, ...]
    layers: int
    """Layers of a tiny run: as many as have a block of each kind, and two."""
    are_layers: tuple[bool, ...]
    """Kinds that are layers, which may be recomputed."""

    @classmethod
    def of(cls, rows: Candidates) -> Self:
        """The blocks of candidates."""
        run = rows.run(0)
        unsplit = run.model_copy(update=_defaults(PIPELINE, run) | {"pp": 1, "vpp": 1, "dp": 1})
        (placed,) = place_blocks(unsplit.resolved(rows.model), rows.model)
        first: dict[BlockKind, int] = {}
        for variant, layer in placed:
            first.setdefault(BlockKind(variant.block, variant.layer), layer)
        layers = max(2, 1 + max(first.values(), default=0))
        are_layers = tuple(layer >= 0 or kind.layer.ahead > 0 for kind, layer in first.items())
        return cls(tuple(first), min(layers, rows.model.num_layers), are_layers)

    def kind(self, placed: PlacedVariant) -> int:
        """Number of the kind of a block of a stage."""
        return self.kinds.index(BlockKind(placed[0].block, placed[0].layer))


@dataclass(frozen=True, slots=True, eq=False)
class BlockCosts:
    """Costs of blocks, a table [tuples of settings, kinds of blocks] for each name.

    NaN where a tiny run was refused. Names of `pass_costs`:

    - `F`, `B`, and `I` and `W` where some schedule has halves of backward passes: seconds of an
      action, communication that the block waits for included; of these `F kernels` and `B kernels`,
      and `F experts` and `B experts` for exchanges between experts. `F host` and `B host`: seconds
      in which the host launches. `drawn`: seconds at TDP in which a GPU draws as much energy as the
      kernels of both passes.
    - `saved`: bytes saved for backward. `transient`: bytes beyond these at the peak of a backward
      pass.

    Names of `state_costs`:

    - `parameters`, `gradients`, `optimizer`: bytes on a rank of the tiny run, which has `shards`.
    - `optimizer seconds`: of kernels, and of what is sent to the host, in the tiny run.
    - `F kernels` and the like: what ZeRO-2 and 3 add to a pass.
    - `dense reduce` and the like: bytes of whole tensors exchanged over the ranks that have the
      same weights, by group (`GROUPS`) and use (`USES`).
    """

    of: Int
    """Tuple of each candidate."""
    tables: Mapping[str, Float]
    shards: Int
    """Ranks of dp in the tiny run, over which ZeRO shards states: [tuples]."""

    def __getitem__(self, name: str) -> Float:
        return self.tables[name]

    def with_kinds(self, other: Mapping[str, Float]) -> Self:
        """The costs with further columns."""
        tables = {name: np.hstack([table, other[name]]) for name, table in self.tables.items()}
        return replace(self, tables=tables)


# ---- tuples of settings and their tiny runs ------------------------------------------------------


def pass_costs(
    rows: Candidates, blocks: Blocks, *, halves: bool = False, variants: bool = False
) -> BlockCosts:
    """Costs of passes; `halves`: also of the halves of backward passes.

    What attention, experts and recomputation change adds up. With `variants`, the kinds of blocks
    are followed by what they cost without recomputation, and then by both with their saved bytes on
    the host.
    """
    names = {*rows.columns} - {*PIPELINE, *STATES, *LIMITS}
    core = names - {*ATTENTION, *EXPERTS, *RECOMPUTE}
    within = _ranks_within(rows)
    _, base = _distinct(rows, core, within)
    lead = np.unique(base, return_index=True)[1][base]  # the first candidate with the same core
    first, of = _distinct(rows, names, within)
    simulated = _TinyRuns(rows, blocks)

    def tables(group: Iterable[str], heads: Int | None = None) -> dict[str, Float]:
        """Costs of each tuple with its settings of one group, and those of its lead in others."""
        each, at = _distinct(rows, core | {*group}, within)
        runs = [_pass_run(rows, row, int(lead[row]), group) for row in each.tolist()]
        found = _read(simulated, runs, halves=halves)
        return {name: table[at[first if heads is None else heads]] for name, table in found.items()}

    attention = tables(ATTENTION)
    start = tables(ATTENTION, lead[first])
    stored = attention
    if rows.model.num_experts:
        experts = tables(EXPERTS)
        stored = {name: attention[name] + experts[name] - start[name] for name in start}
    found = stored
    if not rows.column("recompute").is_one_of("none").all():
        partial = tables(RECOMPUTE)
        full = rows.column("recompute").is_one_of("full")[first] & _recomputes_all(rows)
        whole = _with_forward(stored, blocks, input_bytes(rows)[first])
        found = {
            name: np.where(full[:, None], whole[name], stored[name] + partial[name] - start[name])
            for name in start
        }
    costs = BlockCosts(of, found, np.ones(len(first), dtype=np.int64))
    return _with_variants(costs, stored, rows, first) if variants else costs


def _recomputes_all(rows: Candidates) -> bool:
    """True if full recomputation computes a block's whole forward pass again."""
    return not rows.base.run.recompute_early_stop


def _with_forward(costs: Mapping[str, Float], blocks: Blocks, inputs: Float) -> dict[str, Float]:
    """Costs of layers whose backward pass computes the forward pass again, from their input."""
    layers = np.array(blocks.are_layers)
    kernels = costs["F kernels"] + costs["B kernels"]
    share = np.divide(costs["F kernels"], kernels, out=np.zeros_like(kernels), where=kernels > 0)
    found = dict(costs)
    for kind in ("B", "I"):
        for name in (kind, f"{kind} kernels", f"{kind} experts", f"{kind} host"):
            if name in costs:
                found[name] = costs[name] + layers * costs[f"F{name[1:]}"]
    found["drawn"] = costs["drawn"] * (1 + layers * share)
    saved = np.where(layers, inputs[:, None], costs["saved"])
    found["transient"] = costs["transient"] + costs["saved"] - saved
    found["saved"] = saved
    return found


def input_bytes(rows: Candidates) -> Float:
    """Bytes of the hidden states that a layer reads, in bf16 [candidates]."""
    lengths = rows.distinct("seq_length")
    runs = [rows.run(row).resolved(rows.model) for row in lengths.first.tolist()]
    length = np.array([run.seq_length or 1 for run in runs])[lengths.of]
    tokens = rows.numbers("micro_batch_size") * length // rows.numbers("cp")
    split = np.where(rows.numbers("sequence_parallel") > 0, rows.numbers("tp"), 1)
    return np.asarray(2.0 * rows.model.hidden_size * (tokens // split), dtype=np.float64)


def _with_variants(
    costs: BlockCosts, stored: Mapping[str, Float], rows: Candidates, first: Int
) -> BlockCosts:
    """Costs with further kinds; see `pass_costs`."""
    costs = costs.with_kinds(stored)
    rates = [rows.hardware(row).host_bandwidth_gb_s * 1e9 for row in first.tolist()]
    moved = costs["saved"] / np.array(rates)[:, None]
    on_host = dict(costs.tables) | {kind: np.maximum(costs[kind], moved) for kind in "FB"}
    on_host["transient"] = costs["transient"] + costs["saved"]
    on_host["saved"] = np.zeros_like(costs["saved"])
    return costs.with_kinds(on_host)


class _TinyRun(NamedTuple):
    """A run, the way to execute it, and the candidate whose machine it runs on."""

    run: Run
    execution: Execution
    row: int


def _pass_run(rows: Candidates, row: int, lead: int, own: Iterable[str]) -> _TinyRun:
    """The tiny run of a pass of one candidate, with settings of another one.

    Of attention, experts and recomputation, it has its `own` settings of one of these groups, and
    those of the lead else; nothing is recomputed unless it is that group. Where recomputation has
    the whole forward pass in it, nothing is recomputed either (`_with_forward`).
    """
    run, execution = rows.run(row), rows.execution(row)
    update: dict[str, Any] = _defaults((*PIPELINE, *STATES, *LIMITS), run)
    whole = run.recompute == "full" and _recomputes_all(rows)
    if "recompute" not in own or whole:
        update |= _defaults(RECOMPUTE, run) | {"recompute": "none"}
    for name in {*rows.columns} & {*ATTENTION, *EXPERTS} - {*own}:
        value = rows.column(name).at(lead)
        if name in Execution.__dataclass_fields__:
            execution = replace(execution, **{name: value})
        else:
            update[name] = value
    run = run.model_copy(update=update)
    inner = int(_ranks_within(rows.take(slice(row, row + 1)))[0])
    dp = inner * _fewest_ranks(run, run.cp)
    batch = 2 * dp * run.micro_batch_size
    update = {"dp": dp, "global_batch_size": batch, "zero": 0}
    if inner > 1:
        update["order"] = "ep-dp-tp-cp-pp"
    execution = replace(execution, overlap_moe_expert_parallel_comm=False)
    return _TinyRun(run.model_copy(update=update), execution, row)


def _ranks_within(rows: Candidates) -> Int:
    """Ranks of dp and pp between neighbours in tp: 1 unless `order` says otherwise [candidates]."""
    column = rows.column("order")
    if all(order.startswith(("tp-cp", "cp-tp")) for order in column.values):
        return np.ones(len(rows), dtype=np.int64)
    found = np.ones(len(rows), dtype=np.int64)
    for axis in ("dp", "pp"):
        before = [o.split("-").index(axis) < o.split("-").index("tp") for o in column.values]
        found *= np.where(np.array(before)[column.codes], rows.numbers(axis), 1)
    return found


def _fewest_ranks(run: Run, cp: int) -> int:
    """Fewest ranks of dp that the experts of a run can be spread over."""
    experts = run.expert_tensor_parallel_size * run.ep
    return experts // int(np.gcd(experts, run.tp * cp))


def state_costs(rows: Candidates, blocks: Blocks, *, variants: bool = False) -> BlockCosts:
    """Costs of states; `variants` as in `pass_costs`."""
    names = {*rows.columns} - {*PIPELINE, *PASSES, *LIMITS, "dp", "dp_shard", "sequence_parallel"}
    first, of = _distinct(rows, names)
    runs = [_state_run(rows, row) for row in first.tolist()]
    unsharded = [
        tiny._replace(run=tiny.run.model_copy(update={"zero": 0})) if tiny.run.zero >= 2 else tiny
        for tiny in runs
    ]
    simulated = _TinyRuns(rows, blocks)
    found, plain = _read(simulated, runs), _read(simulated, unsharded)
    for name in (f"{kind} {part}" for kind in "FB" for part in ("kernels", "host")):
        found[name] = found[name] - plain[name]
    costs = BlockCosts(of, found, np.array([tiny.run.dp for tiny in runs]))
    if not variants:
        return costs
    costs = costs.with_kinds(costs.tables)
    return costs.with_kinds(costs.tables)


def _state_run(rows: Candidates, row: int) -> _TinyRun:
    """The tiny run of the states of one candidate."""
    run = rows.run(row)
    run = run.model_copy(update=_defaults((*PIPELINE, *PASSES, *LIMITS, "dp_shard", "order"), run))
    dp = 2 * _fewest_ranks(run, 1)
    update = {"dp": dp, "global_batch_size": 2 * dp, "recompute": "none", "micro_batch_size": 1}
    execution = replace(
        rows.execution(row), overlap_moe_expert_parallel_comm=False, moe_flex_dispatcher=False
    )
    return _TinyRun(run.model_copy(update=update), execution, row)


def _defaults(names: Iterable[str], run: Run) -> dict[str, Any]:
    """Defaults of those of some settings that a run has."""
    fields = type(run).model_fields
    return {n: EXPERIMENT[n].default_of(run.framework) for n in names if n in fields}


def _distinct(rows: Candidates, names: Iterable[str], *numbers: Int) -> tuple[Int, Int]:
    """First candidate of each distinct tuple of settings, and the tuple of each candidate."""
    ordered = [name for name in rows.columns if name in {*names}]
    return distinct_numbers([rows.distinct(*ordered).of, *numbers], len(rows))


def _read(
    simulated: _TinyRuns, runs: Sequence[_TinyRun], *, halves: bool = False
) -> dict[str, Float]:
    """What is read off tiny runs: tables [runs, kinds] by name, NaN where a run is refused."""
    found = [simulated.read(tiny) for tiny in runs]
    if halves:
        for of, tiny in zip(found, runs, strict=True):
            split = tiny.run.model_copy(update={"schedule": "zb-h2"})
            halved = simulated.read(tiny._replace(run=split))
            of |= {kind: halved[kind] for kind in "IW" if kind in halved}
    names = dict.fromkeys(name for of in found for name in of)
    unknown = np.full(len(simulated.blocks.kinds), np.nan)
    return {name: np.array([of.get(name, unknown) for of in found]) for name in names}


class _TinyRuns:
    """Tiny runs that were simulated; machines share compiled runs."""

    def __init__(self, rows: Candidates, blocks: Blocks) -> None:
        self.rows, self.blocks = rows, blocks
        self.compiled: dict[Run, CompiledRun | None] = {}
        self.found: dict[tuple[Run, Execution, str], dict[str, Float]] = {}

    def read(self, tiny: _TinyRun) -> dict[str, Float]:
        """Costs by name, [kinds] each; none where the run is refused."""
        cluster, hardware = self.rows.cluster(tiny.row), self.rows.hardware(tiny.row)
        key = tiny.run, tiny.execution, f"{hardware.name} {cluster.topology} {cluster.algorithm}"
        if key not in self.found:
            self.found[key] = self._simulate(tiny, hardware)
        return dict(self.found[key])

    def _simulate(self, tiny: _TinyRun, hardware: Hardware) -> dict[str, Float]:
        cluster = self.rows.cluster(tiny.row)
        run = tiny.run.model_copy(update={"pp": 1, "layers": self.blocks.layers})
        try:
            if run not in self.compiled:
                self.compiled[run] = None
                self.compiled[run] = compile(run, self.rows.model, device_memory=hardware.memory)
            program = self.compiled[run]
            if program is None:
                return {}
            machine = Machine.of(
                hardware,
                gpus=program.run.world_size,
                topology=cluster.topology,
                algorithm=cluster.algorithm,
            )
            step = simulate(program, machine, tiny.execution)
        except UserError:
            return {}
        rows = table_rows(step.line.program.classes[0].work)
        hosts = step.line.hosts
        launches = np.zeros(len(rows)) if hosts is None else hosts[0].seconds[rows]
        return _costs(_TinyStep(step, self.blocks), hardware, launches)


# ---- reading a tiny run --------------------------------------------------------------------------

GROUPS = ("dense", "expert")
"""Ranks that have the same dense weights, and the same experts."""
USES = ("reduce", "gather_forward", "gather_recompute", "gather_backward", "update")
"""Exchanges of gradients, of parameters for a pass, and of parameters that were updated."""
_STATE_CATEGORIES = ("parameters", "gradients", "optimizer")
_FORWARD, _OPTIMIZER = PHASES.index("forward"), PHASES.index("optimizer")


def _sums(keys: Int, amounts: Float, count: int) -> Float:
    """Sums of amounts by key."""
    return np.bincount(keys, amounts, count).astype(np.float64)


class _TinyStep:
    """A simulated tiny run, its tasks by block; arrays are by row of its tasks."""

    def __init__(self, step: SimulatedStep, blocks: Blocks) -> None:
        stages = place_blocks(step.compiled.run, step.compiled.model)
        placed = [each for stage in stages for each in stage]
        self.names = {variant.name_at(layer): n for n, (variant, layer) in enumerate(placed)}
        self.kinds = np.array([blocks.kind(each) for each in placed])
        self.count = len(blocks.kinds)
        self.program, lane = step.line.program, step.line.lanes[0]
        self.tasks, self.values = lane.rank_class.tasks, lane.rank_class.values
        self.block = self.numbers(self.tasks.names)[self.tasks.name]
        self.begin, self.end = np.zeros((2, len(self.tasks)), dtype=np.int64)
        rows = lane.issue.rows
        self.begin[rows], self.end[rows] = lane.begin, lane.end
        self.main = np.zeros(len(self.tasks), dtype=bool)
        self.main[rows] = lane.main
        self.span = np.zeros(len(self.tasks))
        """Seconds from the end of the kernel before to that of each kernel."""
        kernels = rows[lane.main]
        self.span[kernels] = np.diff(self.end[kernels], prepend=0) * TICK

    @property
    def seconds(self) -> Float:
        """Duration of each task."""
        return np.asarray((self.end - self.begin) * TICK, dtype=np.float64)

    def numbers(self, names: Sequence[str]) -> Int:
        """The block that each name begins with, by number; -1: none."""
        return np.array([self.names.get(n.partition(".")[0], -1) for n in names], dtype=np.int64)

    def value_blocks(self, value: NDArray[np.int32]) -> Int:
        """The block that each of some values belongs to, by number; -1: none."""
        values = self.values
        layers: list[int] = values.layer[value].tolist()
        rows: list[int] = values.name[value].tolist()
        pairs = zip(layers, rows, strict=True)
        names = [f"layer{layer}" if layer >= 0 else values.names[row] for layer, row in pairs]
        return self.numbers(names)

    def last_of_kind(self, of_block: Float, *, backward: bool = False) -> Float:
        """What the last block of each kind in the order of a pass has: the first may wait for
        launches."""
        found = np.zeros(self.count)
        step = -1 if backward else 1
        found[self.kinds[::step]] = of_block[::step]
        return found

    def spans(self, rows: Bool, *, backward: bool = True) -> Float:
        """Seconds of a pass by kind of block: from the end of the block before to its own."""
        of_block = _sums(self.block[rows], self.span[rows], len(self.kinds))
        return self.last_of_kind(of_block, backward=backward)

    def mean_of_kind(self, block: Int, amounts: Float) -> Float:
        """Sums over rows of some blocks, for the mean block of each kind."""
        blocks = np.bincount(self.kinds, minlength=self.count).clip(1)
        return _sums(self.kinds[block], amounts, self.count) / blocks


def _costs(tiny: _TinyStep, hardware: Hardware, launches: Float) -> dict[str, Float]:
    """All costs by name, [kinds] each; `launches`: seconds of the host by row."""
    return _passes(tiny, hardware, launches) | _activations(tiny) | _states(tiny) | _exchanges(tiny)


def _passes(tiny: _TinyStep, hardware: Hardware, launches: Float) -> dict[str, Float]:
    """Seconds of passes, of kernels and of exchanges between experts within, and energy.

    The first microbatch waits for launches; the last one reduces the gradients of the step.
    """
    phase, microbatch = tiny.tasks.phase, tiny.tasks.microbatch
    within = tiny.block >= 0
    forward = within & (phase == _FORWARD) & (microbatch == 1)
    backward = within & (phase != _FORWARD) & (phase != _OPTIMIZER) & (microbatch == 0)
    main, exchanged = tiny.main, _along(tiny, "ep")
    weights = _after_first_half(tiny, backward & main)

    def total(rows: Bool, amounts: Float) -> Float:
        return tiny.mean_of_kind(tiny.block[rows], amounts[rows])

    drawn = np.zeros(len(tiny.tasks))
    kernels = np.flatnonzero((tiny.tasks.kind == TaskKind.COMPUTE) & (tiny.end > tiny.begin))
    drawn[kernels] = kernel_energies(tiny.tasks, kernels, tiny.seconds[kernels], hardware)
    return {
        "F": tiny.spans(forward, backward=False),
        "B": tiny.spans(backward),
        "I": tiny.spans(backward & ~weights),
        "W": tiny.spans(backward & weights),
        "F kernels": total(forward & main, tiny.seconds),
        "B kernels": total(backward & main, tiny.seconds),
        "F experts": total(forward & exchanged, tiny.seconds),
        "B experts": total(backward & exchanged, tiny.seconds),
        "F host": total(forward, launches),
        "B host": total(backward, launches),
        "drawn": total((forward | backward) & main, drawn),
    }


def _along(tiny: _TinyStep, degree: str) -> Bool:
    """Tasks that communicate along one parallel degree."""
    axes = along(tiny.program, tiny.tasks)
    return axes.of_tasks([of == degree for of in axes.degrees])


def _after_first_half(tiny: _TinyStep, backward: Bool) -> Bool:
    """Rows from the first one on that returns to a block: the weights' half of a backward pass."""
    rows = np.flatnonzero(backward)
    block = tiny.block[rows]
    entered = np.flatnonzero(np.diff(block, prepend=-1))
    known, repeated = np.unique(block[entered], return_index=True), np.ones(len(entered), bool)
    repeated[known[1]] = False
    begin = rows[entered[repeated][0]] if repeated.any() else len(backward)
    return np.arange(len(backward)) >= begin


def _activations(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes saved for backward, and beyond these at the peak of a block's backward pass."""
    values, tasks = tiny.values, tiny.tasks
    of_microbatch = values.microbatch == 0
    value, first, last = (c[of_microbatch] for c in (values.value, values.first, values.last))
    block, size = tiny.value_blocks(value), values.size[value].astype(np.float64)
    turn = int(np.argmax(tasks.phase != _FORWARD))
    crossing = (first < turn) & (last >= turn) & (block >= 0)
    saved = _sums(block[crossing], size[crossing], len(tiny.kinds))
    live = np.zeros(len(tasks) + 2)
    np.add.at(live, np.maximum(first, 0), size)
    np.add.at(live, last + 1, -size)
    live = np.cumsum(live)[: len(tasks)]
    backward = (tasks.phase != _OPTIMIZER) & (tasks.phase != _FORWARD) & (tasks.microbatch == 0)
    rows = np.flatnonzero((tiny.block >= 0) & backward)
    beyond = np.zeros(len(saved))
    np.maximum.at(beyond, tiny.block[rows], live[rows] - np.cumsum(saved)[tiny.block[rows]])
    return {"saved": tiny.last_of_kind(saved), "transient": tiny.last_of_kind(beyond)}


def _states(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes of states by category, and seconds of the optimizer."""
    values = tiny.values
    value = values.value[values.microbatch < 0]
    block, category = tiny.value_blocks(value), values.category[value]
    found: dict[str, Float] = {}
    for name in _STATE_CATEGORIES:
        rows = (category == CATEGORIES.index(name)) & (block >= 0)
        found[name] = tiny.mean_of_kind(block[rows], values.size[value[rows]].astype(np.float64))
    updates = tiny.main | (tiny.tasks.kind == TaskKind.STORE)  # to the host, which then updates
    updates &= (tiny.block >= 0) & (tiny.tasks.phase == _OPTIMIZER)
    found["optimizer seconds"] = tiny.mean_of_kind(tiny.block[updates], tiny.seconds[updates])
    return found


def _exchanges(tiny: _TinyStep) -> dict[str, Float]:
    """Bytes of whole tensors exchanged along dp, by group and use."""
    program, tasks = tiny.program, tiny.tasks
    axes = along(program, tasks)
    found = {f"{group} {use}": np.zeros(tiny.count) for group in GROUPS for use in USES}
    collectives = (tasks.kind == TaskKind.COLLECTIVE) & (tiny.block >= 0) & (tasks.microbatch != 0)
    for (_, slot, collective), axis, degree in zip(axes.keys, axes.axes, axes.degrees, strict=True):
        if degree != "dp":
            continue
        group = "expert" if "edp" in axis.degrees else "dense"
        gathers = COLLECTIVES[collective] == "all_gather"
        ranks = program.mesh.size(*program.communicators[slot].axes) if gathers else 1
        of_key = collectives & (tasks.slot == slot) & (tasks.collective == collective)
        for phase, name in enumerate(PHASES):
            rows = of_key & (tasks.phase == phase)
            use = ("update" if name == "optimizer" else f"gather_{name}") if gathers else "reduce"
            sizes = tasks.comm_bytes[rows].astype(np.float64) * ranks
            found[f"{group} {use}"] += tiny.mean_of_kind(tiny.block[rows], sizes)
    return found
