"""Issue order: in which order a rank issues the tasks of a unit.

Tasks are issued in program order, with these exceptions:

- Weight all-gathers are prefetched, `Execution.prefetch` blocks ahead of their first reader.
- With `overlap_param_gather`, blocks wait for their updated parameters in the next step's forward
  pass, and once-per-step casts of weights are issued at the first forward of their block.
- Gradients of one tensor's copies on ranks of tp or pp (layer norms with sequence parallelism, tied
  embeddings), and gradients that are reduced a second time, are reduced after the backward pass
  (Megatron-LM's `finalize_model_grads`). Without data-parallel overlap, all once-per-step
  reductions are.
- With `overlap_moe_expert_parallel_comm`, two microbatches take turns (`ep_overlap`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int, is_any
from stagewright.program.columns import (
    BACKWARD_PHASE,
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    FORWARD_PHASE,
    OPTIMIZER_PHASE,
    Program,
    Tasks,
)
from stagewright.program.comm_axes import comm_axes
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate import ep_overlap
from stagewright.time.simulate.units import Units

_ALL_GATHER = COLLECTIVES.index("all_gather")
_REDUCTIONS = (COLLECTIVES.index("reduce_scatter"), COLLECTIVES.index("all_reduce"))


class Edges(NamedTuple):
    """Dependencies: task `waiter[i]` starts after task `dep[i]` has ended."""

    waiter: Int
    dep: Int


NO_EDGES = Edges(np.zeros(0, np.int64), np.zeros(0, np.int64))


def issue_positions(
    units: Units, local: Edges, casts: Edges, on_comm_stream: Bool, token_exchanges: Bool | None,
    execution: Execution,
) -> Int:  # fmt: skip
    """Rows of units in issue order, by sort keys that start as the program order.

    `casts`: kernels that move to just before another kernel. `token_exchanges`: tasks that
    exchange experts' tokens, where two microbatches take turns.
    """
    size = len(units.row)
    if execution.streams == "one":
        return np.arange(size)
    tasks, row = units.tasks, units.row
    sort_key = np.arange(size, dtype=np.float64)
    if token_exchanges is not None:
        turns = ep_overlap.order(tasks, row, units.unit, units.member, token_exchanges)
        sort_key[turns] = np.arange(size)
    sort_key[casts.waiter] = sort_key[casts.dep] - 0.25
    has_input = np.zeros(size, dtype=bool)
    has_input[local.waiter] = True
    has_input[units.carried.waiter] = True
    gathers = _gathers(tasks)[row] & ~has_input
    if execution.prefetch == 1:
        # The program has all other gathers one block ahead already.
        gathers &= tasks.phase[row] == OPTIMIZER_PHASE
    if gathers.any():
        is_kernel = (tasks.kind[row] == COMPUTE) & ~on_comm_stream
        is_kernel[casts.waiter] = False
        _prefetch(units, local, is_kernel, gathers, execution.prefetch, sort_key)
    deferred = units.deferred[row]
    optimizer = np.flatnonzero(tasks.phase[row] == OPTIMIZER_PHASE)
    begin = np.searchsorted(units.unit, np.arange(int(units.unit.max(initial=0)) + 2))
    for u in np.unique(units.unit[deferred]).tolist():
        first = optimizer[np.searchsorted(optimizer, begin[u]) :][:1]
        before = sort_key[first[0]] if len(first) and first[0] < begin[u + 1] else begin[u + 1]
        sort_key[deferred & (units.unit == u)] = before - 0.5
    return np.argsort(sort_key, kind="stable")


def _prefetch(
    units: Units, local: Edges, is_kernel: Bool, gathers: Bool, depth: int, sort_key: Float
) -> None:
    """Move all-gathers `depth` blocks ahead of their first reader, within its action.

    Writes `sort_key`.
    """
    size = len(units.row)
    kernels = np.flatnonzero(is_kernel)
    starts_action, starts_block = _action_and_block_starts(units.tasks, units.row[kernels])
    first_kernel_of_block = kernels[starts_block]
    block = np.cumsum(starts_block) - 1  # of each kernel
    first_block_of_action = np.maximum.accumulate(np.where(starts_action, block, 0))

    first_reader = np.full(size, size, dtype=np.int64)
    np.minimum.at(first_reader, local.dep, np.where(is_kernel[local.waiter], local.waiter, size))
    moved = np.flatnonzero(gathers & (first_reader < size))
    reader = np.searchsorted(kernels, first_reader[moved])
    target_block = np.maximum(block[reader] - depth, first_block_of_action[reader])
    sort_key[moved] = sort_key[first_kernel_of_block[target_block]] - 0.5


def deferred_past_backward(program: Program, tasks: Tasks, execution: Execution) -> Bool:
    """Mask of once-per-step backward tasks that are issued just before the optimizer.

    All of them without data-parallel overlap; otherwise reductions over tp or pp alone, second
    reductions, of gradients that are reduced once already, and what follows them.
    """
    once_per_step = (tasks.microbatch < 0) & (tasks.phase == BACKWARD_PHASE)
    if execution.streams == "one":
        return np.zeros(len(tasks), dtype=bool)
    if "dp" in execution.no_overlap:
        return once_per_step
    reads = Edges(*tasks.reads)
    once_reduced = _reduces_once_per_step(tasks) | accumulates_grads(tasks, reads)
    of_microbatch = _reduces(tasks) & (tasks.microbatch >= 0)
    once_reduced |= of_microbatch & ~_read_before_optimizer(tasks, reads, ignored=once_reduced)
    deferred = once_per_step & _has_dependency_in(once_reduced, reads)
    axes = comm_axes(program, tasks)
    of_copies = axes.of_tasks([degree in ("tp", "pp") for degree in axes.degrees])
    deferred |= (
        of_copies
        & _reduces(tasks)
        & once_per_step
        & ~_read_before_optimizer(tasks, reads, ignored=accumulates_grads(tasks, reads))
    )
    while True:
        more = deferred | (once_per_step & _has_dependency_in(deferred, reads))
        if np.array_equal(more, deferred):
            return deferred
        deferred = more


def crosses_actions(tasks: Tasks, execution: Execution) -> bool:
    """True if gathers move to other actions: a rank's rows are then one unit."""
    if execution.streams == "one":
        return False
    if execution.overlap_param_gather and gathers_params(tasks).any():
        return True
    gathers = _gathers(tasks) & (np.diff(tasks.data_ptr) == 0)
    return execution.prefetch != 1 and bool(gathers.any())


def _gathers(tasks: Tasks) -> Bool:
    """Mask of all-gathers."""
    return (tasks.kind == COLLECTIVE) & (tasks.collective == _ALL_GATHER)


def gathers_params(tasks: Tasks) -> Bool:
    """Mask of all-gathers of updated parameters."""
    return _gathers(tasks) & (tasks.phase == OPTIMIZER_PHASE)


def gathers_weights(tasks: Tasks) -> Bool:
    """Mask of all-gathers of weights: they wait for no kernel of the pass, or for their update."""
    return _gathers(tasks) & ((np.diff(tasks.data_ptr) == 0) | (tasks.phase == OPTIMIZER_PHASE))


def gather_params_before_forward(tasks: Tasks, reads: Edges) -> tuple[Edges, Edges]:
    """Move parameter all-gathers from the optimizer to the forward pass (overlap_param_gather).

    They no longer wait for the optimizer: in a steady state they gather what the previous step
    has updated. The first forward kernel of a block waits for the block's all-gather. Kernels and
    all-gathers visit the blocks of a stage in the same order, so one pass matches them.

    Casts of weights, once per step with fp8, wait for the all-gathers of their block, too. They
    move to its first forward (Transformer Engine's `is_first_microbatch`). Returns dependencies,
    and each cast with the kernel that it precedes.
    """
    forward = (tasks.kind == COMPUTE) & (tasks.phase == FORWARD_PHASE)
    kernels = np.flatnonzero(forward & (tasks.microbatch >= 0))
    _, starts_block = _action_and_block_starts(tasks, kernels)
    block_starts: dict[int, list[int]] = {}  # by stage: block starts of its first forward action
    for row in kernels[starts_block].tolist():
        starts = block_starts.setdefault(int(tasks.stage[row]), [])
        if not starts or tasks.microbatch[starts[0]] == tasks.microbatch[row]:
            starts.append(row)
    casts = _casts_before(kernels, starts_block, forward & (tasks.microbatch < 0), reads)

    gathers = gathers_params(tasks)
    moved: list[tuple[int, int]] = []  # (kernel, all-gather)
    for stage, starts in block_starts.items():
        block = 0
        for gather in np.flatnonzero(gathers & (tasks.stage == stage)).tolist():
            same_layer = tasks.layer[starts[block:]] == tasks.layer[gather]
            if same_layer.any():
                block += int(same_layer.argmax())
                readers = [starts[block], *casts.waiter[casts.dep == starts[block]].tolist()]
                moved += [(reader, gather) for reader in readers]
    waiters, moved_gathers = np.array(moved, dtype=np.int64).reshape(-1, 2).T
    unmoved = ~np.isin(reads.waiter, moved_gathers)
    return Edges(
        np.concatenate([reads.waiter[unmoved], waiters]),
        np.concatenate([reads.dep[unmoved], moved_gathers]),
    ), casts


def _casts_before(kernels: Int, starts_block: Bool, is_cast: Bool, reads: Edges) -> Edges:
    """Each cast, and the first of the kernels of the block that reads it first."""
    first_reader = np.full(len(is_cast), len(is_cast), dtype=np.int64)
    by_kernel = np.isin(reads.waiter, kernels)
    np.minimum.at(first_reader, reads.dep[by_kernel], reads.waiter[by_kernel])
    casts = np.flatnonzero(is_cast & (first_reader < len(is_cast)))
    starts = kernels[starts_block]
    block = np.searchsorted(starts, first_reader[casts], side="right") - 1
    return Edges(casts, starts[block])


def _action_and_block_starts(tasks: Tasks, kernels: Int) -> tuple[Bool, Bool]:
    """Masks over kernels: first of an action, and first of a block within one."""
    backward = tasks.phase[kernels] != FORWARD_PHASE
    action = np.stack([tasks.stage[kernels], tasks.microbatch[kernels], backward.astype(np.int32)])
    starts_action = np.append(True, (np.diff(action, axis=1) != 0).any(axis=0))
    return starts_action, starts_action | np.append(True, np.diff(tasks.layer[kernels]) != 0)


# ---- gradients -----------------------------------------------------------------------------------


def microbatch_reductions(program: Program, tasks: Tasks, accumulates_grads: Bool) -> Bool:
    """Mask of per-microbatch gradient reductions over dp, or over cp where dp is 1.

    Each frees the unreduced gradient when it ends. Reductions over cp of key and value gradients
    are not among them: kernels of the backward pass read their results.
    """
    reductions = _reduces(tasks) & (tasks.microbatch >= 0)
    if not reductions.any():
        return reductions
    axes = comm_axes(program, tasks)
    over_dp, over_cp = (
        reductions & axes.of_tasks([degree == axis for degree in axes.degrees])
        for axis in ("dp", "cp")
    )
    if over_cp.any():
        reads = Edges(*tasks.reads)
        over_cp &= ~_read_before_optimizer(tasks, reads, ignored=accumulates_grads)
    return over_dp | over_cp


def reduces_gradients(program: Program, tasks: Tasks) -> Bool:
    """Mask of reductions of gradients of weights, once per step or in each microbatch."""
    sums = accumulates_grads(tasks, Edges(*tasks.reads))
    return _reduces_once_per_step(tasks) | microbatch_reductions(program, tasks, sums)


def accumulates_grads(tasks: Tasks, reads: Edges) -> Bool:
    """Mask of kernels that only add reduced gradients to each other.

    Greatest fixed point: kernels of the backward pass that read only reductions or each other,
    and that nothing but each other, second reductions and the optimizer reads.
    """
    reductions, second = _reduces(tasks), _reduces_once_per_step(tasks)
    accumulates = (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COMPUTE)
    accumulates &= np.diff(tasks.data_ptr) > 0
    while True:
        reads_others = _has_dependency_in(~(reductions | accumulates), reads)
        is_read = _read_before_optimizer(tasks, reads, ignored=accumulates | second)
        fewer = accumulates & ~reads_others & ~is_read
        if np.array_equal(fewer, accumulates):
            return accumulates
        accumulates = fewer


def _reduces(tasks: Tasks) -> Bool:
    """Mask of reduce-scatters and all-reduces of the backward pass."""
    collective = (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COLLECTIVE)
    return collective & is_any(tasks.collective, _REDUCTIONS)


def _reduces_once_per_step(tasks: Tasks) -> Bool:
    """Mask of collectives of gradients after their last microbatch."""
    return (tasks.phase == BACKWARD_PHASE) & (tasks.kind == COLLECTIVE) & (tasks.microbatch < 0)


def _read_before_optimizer(tasks: Tasks, reads: Edges, ignored: Bool) -> Bool:
    """Mask of tasks whose result is read outside the optimizer, by a task not `ignored`."""
    counts = ~ignored[reads.waiter] & (tasks.phase[reads.waiter] != OPTIMIZER_PHASE)
    is_read = np.zeros(len(tasks), dtype=bool)
    is_read[reads.dep[counts]] = True
    return is_read


def _has_dependency_in(mask: Bool, reads: Edges) -> Bool:
    """Mask of tasks with at least one dependency in `mask`."""
    result = np.zeros(len(mask), dtype=bool)
    result[reads.waiter[mask[reads.dep]]] = True
    return result
