"""Prefill and decode on ranks of their own: two programs side by side, and the cache sent across.

A second group of ranks, with degrees of its own, computes the prompts of a decode step's requests.
When a prompt is done, every decode rank receives the keys and values of its requests, layers and
heads from the prefill ranks that hold them (as with vLLM's NixlConnector, where decode ranks read
from prefill ranks): one message per layer and sender. A layer's attention waits for its messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.inference.serving import compile_serving
from stagewright.model.config import ModelConfig
from stagewright.model.layers import Reach
from stagewright.parallel.degrees import parallelization
from stagewright.program.columns import Program, RankClass, TaskKind, Tasks
from stagewright.program.communicators import Communicator, Peer, place_along
from stagewright.program.shapes import ops_of
from stagewright.run import lengths
from stagewright.run.lengths import Group
from stagewright.run.requests import cache_of, groups
from stagewright.run.rules import check
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.inference import PrefillRanks
from stagewright.run.settings import Run

SIDES = ("prefill", "decode")
ACROSS = "cache"
"""The name of the transfer between both groups where other communication names mesh axes."""


@dataclass(frozen=True, slots=True)
class Meshes(Mesh):
    """Meshes numbered one after the other: the ranks of the first, then those of the second."""

    parts: tuple[Mesh, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(part.world_size for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Joined(Program):
    """A program of several meshes, whose groups and peers are tables instead of mesh arithmetic."""

    group_index: tuple[Int, ...] = ()  # [communicators, ranks]: number of the group, or -1
    partners: tuple[Int, ...] = ()  # [peers, ranks]; the rank itself where it has no such peer

    def group_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Id of the group that each of `ranks` is in for `slot`; 0 where it is in none."""
        index = self.group_index[slot] if ranks is None else self.group_index[slot][ranks]
        return np.where(index < 0, 0, self.group_ids(slot, index))

    def group_count(self, slot: int) -> int:
        """How many groups communicator `slot` has."""
        return 1 + int(self.group_index[slot].max())

    def members(self, slot: int, index: Int) -> Int:
        """Ranks of the groups number `index` of communicator `slot`: a row each, ascending."""
        ranks = np.argsort(self.group_index[slot], kind="stable")
        ranks = ranks[np.count_nonzero(self.group_index[slot] < 0) :]
        return ranks.reshape(self.group_count(slot), -1)[index]

    def peer_of(self, slot: int, ranks: Int | None = None) -> Int:
        """The rank that each of `ranks` exchanges with on peer `slot`."""
        return self.partners[slot] if ranks is None else self.partners[slot][ranks]


class Message(NamedTuple):
    """Part of a layer's KV cache that a prefill rank sends to a decode rank."""

    layer: int
    source: int
    target: int  # each counts the ranks of its own group
    size: int  # bytes


def compile_disaggregated(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a decode step with the prefill step that fills its cache (`run.prefill` is set)."""
    first = prefill_run(run).resolved(model)
    try:
        check(first, model)
    except UserError as error:
        raise UserError(f"{error} (ranks of prefill: {run.prefill})") from None
    sides = compile_serving(first, model, table), compile_serving(run, model, table)
    found = messages(first, run, model)
    program = joined([side.program for side in sides], found, str(run.kv_cache_dtype))
    blocks = {f"{name} {k}": g for name, s in zip(SIDES, sides, strict=True)
              for k, g in s.blocks.items()}  # fmt: skip
    return replace(sides[1], blocks=blocks, program=program)


def prefill_run(run: Run) -> Run:
    """The prefill run that computes the prompts of a resolved decode run's requests."""
    others = run.prefill_ranks
    assert others is not None
    asked = groups(run)
    if any(not g.context_length for g in asked):
        raise UserError(
            "prefill computes the context of each request, but some have context_length=0; give "
            "all at least one token"
        )
    prompts = [Group(group.count, 0, group.context_length) for group in asked]
    shared = [name for name, setting in SETTINGS.items() if setting.of_requests]
    return Run(
        model=run.model,
        mode="prefill",
        requests=lengths.merge_groups(prompts, "requests"),
        **{name: getattr(run, name) for name in shared},
        **_degrees(others, run),
    )


def _degrees(ranks: PrefillRanks, run: Run) -> dict[str, Any]:
    """The degrees of the prefill ranks; with ep on both sides, etp is that of the decode ranks."""
    inherited = {"etp": run.etp} if run.ep > 1 and ranks.ep > 1 else {}
    return inherited | ranks.settings()


# ---- who sends what to whom ----------------------------------------------------------------------


class _Side(NamedTuple):
    """The ranks of one group by their coordinates along dp, tp and pp."""

    run: Run
    dp: list[int]
    tp: list[int]
    pp: list[int]
    rank: Mapping[tuple[int, int, int], int]

    @classmethod
    def of(cls, run: Run, model: ModelConfig) -> _Side:
        mesh, plan = parallelization(run, model)
        stage = place_along(mesh, ["pp"])
        places = [place_along(mesh, plan.data), place_along(mesh, plan.tensor), stage]
        dp, tp, pp = (place.tolist() for place in places)
        return cls(run, dp, tp, pp, {at: r for r, at in enumerate(zip(dp, tp, pp, strict=True))})

    def stage_of(self, layers: int) -> list[int]:
        ends = list(accumulate(self.run.layers_per_stage or (layers,)))
        return [next(s for s, end in enumerate(ends) if layer < end) for layer in range(layers)]


def messages(first: Run, second: Run, model: ModelConfig) -> list[Message]:
    """All messages, ordered by layer, target and source.

    Both groups assign requests round-robin to their dp ranks. tp splits the key-value heads, or
    holds copies of them (or of latents); among copies the decode ranks ask different ones in turn.
    """
    one, two = _Side.of(first, model), _Side.of(second, model)
    latents = model.kv_lora_rank and model.kv_lora_rank + model.qk_rope_head_dim
    dtype = str(second.kv_cache_dtype)
    of_index = model.index_head_dim * BYTES["fp8_r128" if model.kv_lora_rank else dtype]
    tokens = {reach: _tokens(first.dp, second, reach) for reach in model.reaches}
    from_stage, to_stage = one.stage_of(model.num_layers), two.stage_of(model.num_layers)
    found: list[Message] = []
    for layer in range(model.num_layers):
        own = model.with_own_sizes(model.layer(layer).sizes)
        heads = 1 if model.kv_lora_rank else own.num_query_groups
        of_head = (latents or own.kv_channels + (own.v_head_dim or own.kv_channels)) * BYTES[dtype]
        overlaps = [heads_held_by(heads, first.tp, t, second.tp) for t in range(second.tp)]
        kept = tokens[model.reach(model.layer(layer).mixer)]
        beside = of_index * (model.layer(layer).mixer == "indexed")
        for target, (dp, tp, pp) in enumerate(zip(two.dp, two.tp, two.pp, strict=True)):
            if pp != to_stage[layer]:
                continue
            for (sender, receiver), held in kept.items():
                if receiver == dp and held:
                    found += [
                        Message(
                            layer,
                            one.rank[sender, at, from_stage[layer]],
                            target,
                            math.ceil(held * (many * of_head + beside * (not nth))),
                        )
                        for nth, (at, many) in enumerate(overlaps[tp])
                    ]
    return found


def _tokens(ranks: int, run: Run, reach: Reach) -> dict[tuple[int, int], int]:
    """[prefill dp, decode dp] tokens of the requests that both dp ranks hold.

    Counted in whole blocks of a paged cache; layers with a window or chunks count what they reach.
    """
    asked = [Group(g.count, g.context_length, 0) for g in groups(run)]
    turns = math.lcm(ranks, run.dp)
    column = lengths.COLUMNS.index("slots" if run.kv_cache == "paged" else "keys")
    sums = lengths.attention_sums(asked, cache_of(run), reach)
    tokens = lengths.deal(asked, sums, turns)[:, column]
    found: dict[tuple[int, int], int] = {}
    for turn, held in enumerate(tokens.tolist()):
        pair = turn % ranks, turn % run.dp
        found[pair] = found.get(pair, 0) + held
    return found


def heads_held_by(heads: int, ranks: int, place: int, places: int) -> list[tuple[int, int]]:
    """(sending tp rank, key-value heads) for the target tp rank `place` of `places`.

    Where ranks hold copies of a head, neighbouring targets ask different copies in turn, so that
    the copies' numbers of targets differ by at most one: below, ranks 4 to 7 have head 1, and of
    the targets that want it, 2 asks rank 6 and 3 asks rank 7.

    >>> heads_held_by(8, 4, 0, 2), heads_held_by(8, 2, 3, 4), heads_held_by(2, 8, 3, 4)
    ([(0, 2), (1, 2)], [(1, 2)], [(7, 1)])
    """
    copies = max(1, ranks // heads)
    mine = range(place * heads // places, max((place + 1) * heads // places,
                                              place * heads // places + 1))  # fmt: skip
    count: dict[int, int] = {}
    for head in mine:
        holder = head * ranks // heads + place % copies
        count[holder] = count.get(holder, 0) + 1
    return list(count.items())


# ---- two programs as one -------------------------------------------------------------------------


def joined(programs: Sequence[Program], across: Sequence[Message], dtype: str) -> Joined:
    """One program of the ranks of both, with the messages from the first to the second."""
    first, second = programs
    world = first.mesh.world_size + second.mesh.world_size
    starts = (0, first.mesh.world_size)
    group_index: list[Int] = []
    partners: list[Int] = []
    communicators: list[Communicator] = []
    peers: list[Peer] = []
    classes: list[RankClass] = []
    here = [len(programs[0].communicators), len(programs[0].peers)]
    for name, start, program in zip(SIDES, starts, programs, strict=True):
        end = start + program.mesh.world_size
        for slot, who in enumerate(program.communicators):
            ids = program.group_of(slot)
            index = np.full(world, -1, np.int64)
            index[start:end] = np.where(
                ids > 0, np.unique(ids, return_inverse=True)[1] - bool((ids == 0).any()), -1
            )
            group_index.append(index)
            communicators.append(who._replace(axes=tuple(f"{name}.{a}" for a in who.axes)))
        for slot, peer in enumerate(program.peers):
            whom = np.arange(world)
            whom[start:end] = program.peer_of(slot) + start
            partners.append(whom)
            peers.append(peer._replace(axis=f"{name}.{peer.axis}"))
    for start, program, way in zip(starts, programs, (1, -1), strict=True):
        by_rank: dict[int, list[Message]] = {}
        for m in across:
            by_rank.setdefault(m.source if way == 1 else m.target, []).append(m)
        others = {r: sorted({m.target if way == 1 else m.source for m in some})
                  for r, some in by_rank.items()}  # fmt: skip
        slot = len(peers)
        for nth in range(max(map(len, others.values()), default=0)):
            whom = np.arange(world)
            for r, some in others.items():
                if nth < len(some):
                    whom[start + r] = some[nth] + starts[1 if way == 1 else 0]
            partners.append(whom)
            peers.append(Peer(ACROSS, way * (nth + 1)))
        for c in program.classes:
            tasks = c.tasks if way == 1 else _shifted(c.tasks, *here)
            alike: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
            for r in c.ranks.tolist():
                rows = tuple(sorted(
                    (m.layer, slot + others[r].index(m.target if way == 1 else m.source), m.size)
                    for m in by_rank.get(r, ())
                ))  # fmt: skip
                alike.setdefault(rows, []).append(r + start)
            add = _with_sends if way == 1 else _with_receives
            for rows, ranks in alike.items():
                more = add(tasks, rows, dtype) if rows else tasks
                classes.append(replace(c, ranks=np.array(ranks, np.int64), tasks=more))
    return Joined(
        _side_by_side([p.mesh for p in programs]),
        tuple(classes), tuple(communicators), tuple(peers), tuple(group_index), tuple(partners),
    )  # fmt: skip


def _side_by_side(meshes: Sequence[Mesh]) -> Meshes:
    named = list(zip(SIDES, meshes, strict=True))
    return Meshes(
        tuple((f"{name}.{axis}", n) for name, mesh in named for axis, n in mesh.axes),
        tuple(
            (f"{name} {label}", tuple(f"{name}.{a}" for a in axes))
            for name, mesh in named
            for label, axes in mesh.groups
        ),
        parts=tuple(meshes),
        stands_for=tuple(
            (f"{name} {label}", label) for name, mesh in named for label, _ in mesh.groups
        ),
    )


def _shifted(tasks: Tasks, communicators: int, peers: int) -> Tasks:
    """Tasks whose slots of communicators and peers are shifted by those of the other program."""
    more = np.where(tasks.kind == TaskKind.COLLECTIVE, communicators, peers)
    slot = np.where(tasks.slot < 0, -1, tasks.slot + more).astype(np.int16)
    return replace(tasks, slot=slot)


Row = tuple[int, int, int]  # layer, slot, bytes


def _with_sends(tasks: Tasks, rows: Sequence[Row], dtype: str) -> Tasks:
    """Append the sends in one chain; each waits for the kernels that write its layer's cache."""
    n = len(tasks)
    data = [
        (n + i, at)
        for i, (layer, _, _) in enumerate(rows)
        for at in _rows_of(tasks, "cache", layer)
    ]
    moves = np.flatnonzero((tasks.kind == TaskKind.COLLECTIVE) | (tasks.kind == TaskKind.SEND))
    chain = [*moves[-1:].tolist(), *range(n, n + len(rows))]
    order = list(zip(range(n + len(rows) - len(chain) + 1, n + len(rows)), chain, strict=False))
    return _more(tasks, TaskKind.SEND, rows, dtype, n, data, order)


def _with_receives(tasks: Tasks, rows: Sequence[Row], dtype: str) -> Tasks:
    """Prepend the receives, which wait for nothing; a layer's attention waits for its receives."""
    data = [
        (len(rows) + at, i)
        for i, (layer, _, _) in enumerate(rows)
        for at in _rows_of(tasks, "cached_attention", layer)
    ]
    return _more(tasks, TaskKind.RECV, rows, dtype, 0, data, [])


def _rows_of(tasks: Tasks, op: str, layer: int) -> list[int]:
    """Rows of a layer's kernels that contain one of the ops."""
    fused = [i for i, ops in enumerate(tasks.ops) if op in ops_of(ops)]
    return np.flatnonzero((tasks.layer == layer) & np.isin(tasks.op, fused)).tolist()


def _more(
    tasks: Tasks, kind: TaskKind, rows: Sequence[Row], dtype: str, at: int,
    data: Iterable[tuple[int, int]], order: Iterable[tuple[int, int]],
) -> Tasks:  # fmt: skip
    """Insert messages at row `at`; `data` and `order` are pairs of row numbers after that.

    A message's tag is its layer, since two ranks exchange one message per layer.
    """
    verb = kind.name.lower()
    layer, slot, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    labels = [f"layer{i}.cache.{verb}" for i in layer.tolist()]
    names = tuple(dict.fromkeys((*tasks.names, *labels)))
    ops = tuple(dict.fromkeys((*tasks.ops, verb)))
    place = {name: i for i, name in enumerate(names)}
    zero, none = np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    stages = dict(zip(tasks.layer.tolist(), tasks.stage.tolist(), strict=True))
    new: dict[str, Any] = {
        "kind": zero + kind, "name": np.array([place[x] for x in labels]),
        "op": zero + ops.index(verb), "phase": zero,
        "stage": np.array([stages[i] for i in layer.tolist()]), "layer": layer,
        "microbatch": none, "flops": zero, "traffic": zero, "collective": none,
        "dtype": zero + tasks.dtypes.index(dtype), "comm_bytes": size, "slot": slot, "tag": layer,
        "shape": none,
    }  # fmt: skip
    columns = {
        name: np.insert(column, at, values.astype(column.dtype))
        for name, values in new.items()
        for column in [getattr(tasks, name)]
    }
    shift = len(rows) if at == 0 else 0
    total = len(tasks) + len(rows)
    data_ptr, data_rows = _linked(tasks.data_ptr, tasks.data, shift, total, data)
    order_ptr, order_rows = _linked(tasks.order_ptr, tasks.order, shift, total, order)
    return replace(
        tasks, **columns, names=names, ops=ops,
        data_ptr=data_ptr, data=data_rows, order_ptr=order_ptr, order=order_rows,
    )  # fmt: skip


def _linked(
    ptr: Int, needed: Any, shift: int, total: int, more: Iterable[tuple[int, int]]
) -> tuple[Int, Any]:
    """Dependencies as CSR after rows moved by `shift`, with further dependencies."""
    pairs = np.array(list(more), np.int64).reshape(-1, 2)
    row = np.concatenate([np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)) + shift, pairs[:, 0]])
    on = np.concatenate([needed + shift, pairs[:, 1]])
    turn = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=total)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), on[turn].astype(np.int32)
