"""The issue order of a rank: which task comes when, on which stream, and after which tasks.

A framework puts kernels on one stream of the GPU and the collectives of each communicator on a
stream of their own (NCCL), messages to each peer on another. A task starts when the task
before it on its stream and all tasks that it depends on have ended; a task without dependencies,
such as a gather of weights or a posted receive, waits for the kernel issued before it.

A kernel that names a communicator runs on that communicator's stream: the program says so. Kernels
wait for a transfer that frees memory once the next one is issued (`_pending`).

The order is that of the program, except for three habits of frameworks:

- sums of gradients that arrived reduced are added on the communication stream (FSDP2's
  `foreach_reduce` in its reduce-scatter stream), so that no kernel of the model waits for them;
- a gradient reduced a second time (norms of a sequence-parallel model over tp) waits until the
  backward pass is over (Megatron-LM's `finalize_model_grads`);
- where data parallelism does not overlap, so does every reduction that happens once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int, is_any
from stagewright.program.along import TasksAlong, along
from stagewright.program.columns import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    LOAD,
    PHASES,
    RECV,
    SEND,
    STORE,
    Program,
    Tasks,
)
from stagewright.run.sections.execution import Execution
from stagewright.time.simulate import ep_overlap

_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(p) for p in ("forward", "backward", "optimizer"))


@dataclass(frozen=True, slots=True, eq=False)
class Issue:
    """The tasks of a rank in issue order; place `i` holds row `rows[i]` of its `Tasks`.

    `stream` is 0 for kernels and otherwise any number; receives have none, -1. Place `i` waits for
    the places `needs[pointer[i]:pointer[i + 1]]`, all before it; implied dependencies are omitted.
    """

    rows: Int
    stream: Int
    pointer: Int
    needs: Int

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Transfers:
    """What is known of a rank's communication, however it is executed."""

    program: Program
    tasks: Tasks

    @cached_property
    def along(self) -> TasksAlong:
        """Along which degrees the tasks communicate."""
        return along(self.program, self.tasks)

    @cached_property
    def settles(self) -> Bool:
        """Which tasks are kernels that only add up gradients reduced by a collective."""
        return _settles(self.tasks, *self.tasks.reads)

    @cached_property
    def reductions(self) -> Bool:
        """Which tasks reduce the gradients of a microbatch along dp, whose memory they then free.

        Where dp is 1, they do so along cp. Other reductions along cp are of gradients of keys and
        values, which kernels of backward read.
        """
        tasks, of = self.tasks, self.along
        found = (tasks.phase == _BACKWARD) & (tasks.microbatch >= 0)
        found &= tasks.kind == COLLECTIVE
        if not found.any():
            return found
        reduces = [COLLECTIVES[collective] in _REDUCTIONS for *_, collective in of.keys]
        every = [*zip(reduces, of.degrees, strict=True)]
        dp, cp = (
            found & of.of_tasks([yes and degree == one for yes, degree in every])
            for one in ("dp", "cp")
        )
        if cp.any():
            cp &= ~_read_on(tasks, self.settles, *tasks.reads)
        return dp | cp


def issue(program: Program, tasks: Tasks, how: Execution, known: Transfers | None = None) -> Issue:
    """The issue order of a rank class; `known`: what is known of its communication."""
    known = known or Transfers(program, tasks)
    owner, needed = tasks.reads
    if how.streams == "one":
        aside = _none(tasks)
    elif how.overlap_param_gather:
        owner, needed = _gathered_next(tasks, owner, needed)
        aside = _settles(tasks, owner, needed)
    else:
        aside = known.settles
    rows = _order(tasks, owner, needed, aside, how)
    place = np.empty_like(rows)
    place[rows] = np.arange(len(rows))
    reads = owner, needed
    owner, needed = place[owner], place[needed]
    kind, slot = tasks.kind[rows], tasks.slot[rows].astype(np.int64)
    stream = _stream(program, kind, slot, how)
    kernel = (stream == 0) & ~aside[rows]
    if aside.any():
        followed = place[_followed(aside, *reads)[rows]]
        stream = np.where(aside[rows], stream[followed], stream)
    blocking = _blocking(known, how)[rows]
    pairs = [(owner, needed), *_chains(stream, blocking)]
    # A load from the host does not start with its store, but when it is issued.
    ahead = (np.bincount(owner, minlength=len(rows)) == 0) | (kind == LOAD)
    before = _before(kernel)
    waits = np.flatnonzero(ahead & (kind != COMPUTE) & (before >= 0))
    pairs.append((waits, before[waits]))
    if how.streams == "separate":
        for frees in (known.reductions[rows], kind == STORE):
            pairs += _pending(frees, kernel, waits, stream)
    owner, needed = (np.concatenate(column) for column in zip(*pairs, strict=True))
    owner, needed = _without_implied(owner, needed, stream, kernel)
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))])
    return Issue(rows, stream, pointer.astype(np.int64), needed)


def _none(tasks: Tasks) -> Bool:
    return np.zeros(len(tasks), dtype=bool)


def _any(owner: Int, flag: Bool, size: int) -> Bool:
    """For each of `size` rows, whether `flag` holds for any of its dependencies."""
    result = np.zeros(size, dtype=bool)
    result[owner[flag]] = True
    return result


def _settles(tasks: Tasks, owner: Int, needed: Int) -> Bool:
    """Which tasks are kernels that only add up gradients reduced by a collective."""
    size = len(tasks)
    backward = tasks.phase == _BACKWARD
    reduces = backward & (tasks.kind == COLLECTIVE)
    reduces &= is_any(tasks.collective, [COLLECTIVES.index(c) for c in _REDUCTIONS])
    settles = backward & (tasks.kind == COMPUTE) & (np.diff(tasks.data_ptr) > 0)
    while True:
        other = _any(owner, ~(reduces | settles)[needed], size)
        fewer = settles & ~other & ~_read_on(tasks, settles, owner, needed)
        if np.array_equal(fewer, settles):
            return settles
        settles = fewer


def _read_on(tasks: Tasks, settles: Bool, owner: Int, needed: Int) -> Bool:
    """Which tasks have results that are read by more than the optimizer and kernels that settle."""
    result = _none(tasks)
    result[needed[~settles[owner] & (tasks.phase[owner] != _OPTIMIZER)]] = True
    return result


_REDUCTIONS = ("reduce_scatter", "all_reduce")


def _pending(frees: Bool, kernel: Bool, waits: Int, stream: Int) -> list[tuple[Int, Int]]:
    """Dependencies that bound what waits for transfers which then free memory: two lots at most.

    Transfers without a kernel between them are a lot. Once one is issued, the kernels behind it
    wait for the lots before, so that memory cannot pile up behind a slow network:

    - reductions of gradients: FSDP2's `post_backward` (torch 2.13, `_fsdp_param_group.py`) lets
      kernels wait for the event of `reduce_scatter_state` before each `foreach_reduce`; DeepSpeed's
      `average_tensor` (`stage_1_and_2.py`) for its reduction stream, since it fills two buckets in
      turn; Megatron-FSDP's `wait_for_previous_grad_reduce` (`param_and_grad_buffer.py`) before
      `mark_bucket_ready`;
    - activations that go to the host: Transformer Engine's `synchronize_on_group_commit_forward`
      (`cpu_offload.py`) lets kernels wait for `d2h_stream` before it stores another group.

    `waits`: places that otherwise start behind the kernel before them.
    """
    places = np.flatnonzero(frees)
    if len(places) < 2:
        return []
    lot = np.cumsum(kernel)[places]
    lot = np.cumsum(np.append(0, np.diff(lot) != 0))
    kernels = np.flatnonzero(kernel)
    first = np.flatnonzero(np.append(True, np.diff(lot) != 0))  # of each lot
    pairs: list[tuple[Int, Int]] = []
    for nth in np.unique(stream[places]).tolist():
        mine = np.flatnonzero(stream[places] == nth)
        before = np.searchsorted(lot[mine], np.arange(len(first)))  # those of earlier lots
        some = before > 0
        awaited, issued = places[mine[before[some] - 1]], places[first[some]]
        at = np.searchsorted(kernels, issued)
        there = at < len(kernels)
        pairs.append((kernels[at[there]], awaited[there]))
        # What starts behind a kernel starts behind what its stream waits for, too.
        latest = np.searchsorted(issued, waits) - 1
        some = latest >= 0
        pairs.append((waits[some], awaited[latest[some]]))
    return pairs


def _order(tasks: Tasks, owner: Int, needed: Int, aside: Bool, how: Execution) -> Int:
    """Rows in issue order."""
    size = len(tasks)
    if how.streams == "one":
        return np.arange(size)
    key = np.arange(size, dtype=np.float64)
    if how.overlap_moe_expert_parallel_comm:
        key[ep_overlap.order(tasks)] = np.arange(size)
    gathers = (tasks.kind == COLLECTIVE) & (np.bincount(owner, minlength=size) == 0)
    if how.prefetch == 1:
        gathers &= tasks.phase == _OPTIMIZER  # the other gathers are in place already
    if gathers.any():
        _prefetch(tasks, owner, needed, aside, gathers, how.prefetch, key)
    once = (tasks.microbatch < 0) & (tasks.phase == _BACKWARD)
    if "dp" in how.no_overlap:
        late = once
    else:
        first = once & (tasks.kind == COLLECTIVE)
        late = once & _any(owner, first[needed], size)
        while not np.array_equal(more := late | (once & _any(owner, late[needed], size)), late):
            late = more
    step = np.flatnonzero(tasks.phase == _OPTIMIZER)
    key[late] = (key[step[0]] if len(step) else size) - 0.5
    return np.argsort(key, kind="stable")


def _prefetch(
    tasks: Tasks,
    owner: Int,
    needed: Int,
    aside: Bool,
    gathers: Bool,
    depth: int,
    key: Float,
) -> None:
    """Set the sort keys of gathers to `depth` blocks before the block that needs them."""
    size = len(tasks)
    kernel = (tasks.kind == COMPUTE) & ~aside
    at = np.flatnonzero(kernel)
    new_action, new_block = _blocks(tasks, at)
    begins = at[new_block]  # first kernel of each block
    block = np.cumsum(new_block) - 1  # of each kernel
    first_block = np.maximum.accumulate(np.where(new_action, block, 0))
    user = np.full(size, size, dtype=np.int64)
    np.minimum.at(user, needed, np.where(kernel[owner], owner, size))
    mine = np.flatnonzero(gathers & (user < size))
    nth = np.searchsorted(at, user[mine])
    key[mine] = key[begins[np.maximum(block[nth] - depth, first_block[nth])]] - 0.5


def _blocks(tasks: Tasks, kernels: Int) -> tuple[Bool, Bool]:
    """Which kernels begin an action, and which a block of the model within one.

    Halves of a microbatch's backward with nothing between them are one action, as the whole is.
    """
    backward = tasks.phase[kernels] != _FORWARD
    action = np.stack([tasks.stage[kernels], tasks.microbatch[kernels], backward.astype(np.int32)])
    new_action = np.append(True, (np.diff(action, axis=1) != 0).any(axis=0))
    return new_action, new_action | np.append(True, np.diff(tasks.layer[kernels]) != 0)


def _gathered_next(tasks: Tasks, owner: Int, needed: Int) -> tuple[Int, Int]:
    """Dependencies in which a block's first forward kernel needs the optimizer's gather for it.

    Kernels and gathers go through the blocks of a stage in the same order.
    """
    gathers = (tasks.kind == COLLECTIVE) & (tasks.phase == _OPTIMIZER)
    gathers &= tasks.collective == COLLECTIVES.index("all_gather")
    kernels = np.flatnonzero((tasks.kind == COMPUTE) & (tasks.phase == _FORWARD))
    first = kernels[_blocks(tasks, kernels)[1]]
    blocks: dict[int, list[int]] = {}  # of each stage: first kernels of its first forward action
    for row in first.tolist():
        rows = blocks.setdefault(int(tasks.stage[row]), [])
        if not rows or tasks.microbatch[rows[0]] == tasks.microbatch[row]:
            rows.append(row)
    moved: list[tuple[int, int]] = []  # kernel, gather
    for stage, rows in blocks.items():
        at = 0
        for gather in np.flatnonzero(gathers & (tasks.stage == stage)).tolist():
            layers = tasks.layer[rows[at:]] == tasks.layer[gather]
            if layers.any():
                at += int(layers.argmax())
                moved.append((rows[at], gather))
    users, gone = np.array(moved, dtype=np.int64).reshape(-1, 2).T
    kept = ~np.isin(owner, gone)
    return np.concatenate([owner[kept], users]), np.concatenate([needed[kept], gone])


def streams_of(program: Program) -> int:
    """The number of streams of a rank: kernels, communicators, peers, and loads and stores.

    Streams are numbered in this order.
    """
    return 1 + len(program.communicators) + len(program.peers) + 2


def _stream(program: Program, kind: NDArray[np.uint8], slot: Int, how: Execution) -> Int:
    """The stream of each task, -1 for receives."""
    if how.streams == "one":
        stream = np.ones(len(kind), dtype=np.int64)
    else:
        stream = 1 + slot + np.where(kind == SEND, len(program.communicators), 0)
        stream[kind == LOAD] = streams_of(program) - 2
        stream[kind == STORE] = streams_of(program) - 1
    compute = kind == COMPUTE
    stream[compute if how.streams == "one" else compute & (slot < 0)] = 0
    stream[kind == RECV] = -1
    return stream


def _followed(aside: Bool, owner: Int, needed: Int) -> Int:
    """By row the collective whose stream it runs on, if it is a kernel aside: the first it needs.

    A sum of sums follows the collective of the first of these.
    """
    size = len(aside)
    first = np.full(size, size)
    np.minimum.at(first, owner, needed)
    followed = np.where(aside, first, np.arange(size))
    while aside[followed].any():
        followed = followed[followed]
    return followed


def _blocking(known: Transfers, how: Execution) -> Bool:
    """Which tasks are communication that does not overlap with kernels."""
    if not how.no_overlap or how.streams == "one":
        return _none(known.tasks)
    of = known.along
    return of.of_tasks([degree in how.no_overlap for degree in of.degrees])


def _chains(stream: Int, blocking: Bool) -> list[tuple[Int, Int]]:
    """Dependencies of each task on the one before it on its stream; blocking tasks join kernels."""
    pairs: list[tuple[Int, Int]] = []
    for nth in range(int(stream.max(initial=-1)) + 1):
        mine = np.flatnonzero((stream == nth) | (blocking if nth == 0 else False))
        pairs.append((mine[1:], mine[:-1]))
    return pairs


def _before(kernel: Bool) -> Int:
    """The kernel before each place, -1 if there is none."""
    at = np.maximum.accumulate(np.where(kernel, np.arange(len(kernel)), -1))
    return np.concatenate([[-1], at[:-1]]) if len(kernel) else at


def _without_implied(owner: Int, needed: Int, stream: Int, kernel: Bool) -> tuple[Int, Int]:
    """Sorted dependencies without those that the chain of kernels implies.

    Kernels run in order, so a task that waits for kernel k also waits for all kernels before k, and
    for everything that these waited for.
    """
    size = len(stream)
    places = np.arange(size)
    # The first kernel that is after the end of each place, and the last one before its start.
    after = np.full(size, size, dtype=np.int64)
    np.minimum.at(after, needed, np.where(kernel[owner], owner, size))
    after[kernel] = places[kernel]
    before = np.full(size, -1, dtype=np.int64)
    np.maximum.at(before, owner, np.where(kernel[needed], needed, -1))
    for nth in range(1, int(stream.max(initial=0)) + 1):
        mine = np.flatnonzero(stream == nth)
        before[mine] = np.maximum.accumulate(before[mine])
    np.maximum.at(before, owner, before[needed])
    needful = (after[needed] > before[owner]) | (needed == before[owner])
    keys = np.sort(owner[needful] * size + needed[needful])
    keys = keys[np.diff(keys, prepend=-1) > 0]
    return keys // size, keys % size


def with_needs(order: Issue, owner: Int, needed: Int) -> Issue:
    """The issue order with more dependencies: places `owner` wait for places `needed`, too."""
    if not len(owner):
        return order
    size = len(order)
    before = np.repeat(np.arange(size), np.diff(order.pointer))
    keys = np.concatenate([before, owner]) * size + np.concatenate([order.needs, needed])
    keys = np.sort(keys, kind="stable")  # two parts, each in order already or short
    keys = keys[np.diff(keys, prepend=-1) > 0]
    pointer = np.concatenate([[0], np.cumsum(np.bincount(keys // size, minlength=size))])
    return Issue(order.rows, order.stream, pointer.astype(np.int64), keys % size)
