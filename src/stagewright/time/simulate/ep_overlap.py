"""Overlap of expert all-to-alls with the kernels of another microbatch.

Megatron-LM's `--overlap-moe-expert-parallel-comm`: once the pipeline is full, a rank interleaves
the backward pass of one microbatch with the forward pass of a later one, layer by layer. The parts
between all-to-alls alternate: while tokens of one microbatch are in flight, the other computes.
"""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.errors import UserError
from stagewright.program.columns import FORWARD_PHASE, OPTIMIZER_PHASE, Tasks
from stagewright.run.settings import Run


def order(tasks: Tasks, row: Int, unit: Int, member: Int, token_exchanges: Bool) -> Int:
    """Order in which units issue rows: each backward action and the forward after it take turns.

    `row`, `unit` and `member` are those of `units.Units`; pairs are within a unit. A turn ends with
    an all-to-all of tokens; the much smaller all-to-alls of routing weights end none.
    `token_exchanges`: tasks that are either.
    """
    microbatch, phase, stage = (
        column[row].astype(np.int64) for column in (tasks.microbatch, tasks.phase, tasks.stage)
    )
    direction = np.where(phase == OPTIMIZER_PHASE, 2, phase != FORWARD_PHASE)
    copy = np.append(True, (np.diff(unit) != 0) | (np.diff(member) != 0))[: len(row)]
    # Rows once per step join the action before them.
    has_action = (microbatch >= 0) | (direction != 1) | copy
    latest = np.maximum.accumulate(np.where(has_action, np.arange(len(row)), 0))
    columns = np.stack([stage[latest], microbatch[latest], direction[latest], unit, member])
    action = np.cumsum(np.append(False, (np.diff(columns, axis=1) != 0).any(axis=0)))

    first = np.flatnonzero(np.diff(action, prepend=-1))
    forward = direction[first] == 0
    paired = (microbatch[first] >= 0) & (direction[first] != 2)
    # A forward next to a backward joins it.
    second = np.zeros(len(first), dtype=bool)
    second[1:] = forward[1:] & ~forward[:-1] & paired[1:] & paired[:-1]
    second[1:] &= unit[first[1:]] == unit[first[:-1]]
    group = np.cumsum(~second) - 1

    ends_turn = token_exchanges[row]
    size = tasks.comm_bytes[row]
    ends_turn &= 2 * size >= size[ends_turn].max(initial=0)
    before = np.cumsum(ends_turn) - ends_turn
    turn = before - before[first][action]
    return np.lexsort((np.arange(len(row)), second[action], turn, group[action]))


def check(run: Run) -> None:
    """Raise UserError for settings that Megatron-LM refuses with this overlap."""
    name = "overlap_moe_expert_parallel_comm"
    if run.mode != "train":
        raise UserError(f"{name} is for training, not for mode={run.mode}; leave it off")
    if run.ep == 1:
        raise UserError(f"{name} needs experts on several ranks; ep is 1")
    if run.moe_token_dispatcher_type != "alltoall":
        got = run.moe_token_dispatcher_type
        raise UserError(f"{name} needs moe_token_dispatcher_type=alltoall, got {got}")
    if run.pp > 1 and run.vpp == 1:
        raise UserError(f"{name} with pp={run.pp} needs several virtual stages; set vpp")
    if run.recompute == "full":
        raise UserError(f"{name} and recompute=full exclude each other")
    if run.recompute == "selective" and "moe" in run.recompute_modules:
        raise UserError(f"{name} and recompute_modules=moe exclude each other")
    if (run.mtp_num_layers or 0) > 1:
        got = run.mtp_num_layers
        raise UserError(f"{name} needs mtp_num_layers of 1 or none, got {got}")
