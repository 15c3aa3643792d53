"""Disaggregated prefill and decode: two joined programs, and the KV cache sent between them.

A second group of ranks, with separate degrees, computes the prompts of a decode step's requests.
After a prompt, every decode rank receives the keys and values of its requests, layers and heads
from the prefill ranks that have them (as with vLLM's NixlConnector, where decode ranks read
from prefill ranks): one message per layer and sender. A layer's attention waits for its messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from stagewright.algebra.layout import Mesh
from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.graph.node import BYTES
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.serving_step import compile_serving
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
from stagewright.run.settings import Run

SIDES = ("prefill", "decode")
ACROSS = "cache"
"""Name of the transfer between both groups, in place of mesh axes."""

Waiting = Literal["both", "sender", "nobody"]
"""Steps that wait for a message from prefill to decode.

- `both`: a message waits for the kernels that write its layer's cache, and attention of that layer
  in the decode step waits for the message.
- `sender`: a message waits for these kernels; its request decodes in later steps, so the decode
  step does not wait.
- `nobody`: the cache was computed in earlier steps, so a message is sent at once, and its request
  decodes in later steps.
"""


class Message(NamedTuple):
    """Part of a layer's KV cache that a prefill rank sends to a decode rank."""

    layer: int
    source: int
    target: int  # ranks of either group are numbered from 0
    size: int  # bytes


def compile_disaggregated(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    """Compile a decode step with the prefill step that fills its cache (`run.prefill` is set)."""
    first = prefill_run(run).resolved(model)
    try:
        check(first, model)
    except UserError as error:
        raise UserError(f"{error} (ranks of prefill: {run.prefill})") from None
    prefill, decode = compile_serving(first, model, table), compile_serving(run, model, table)
    return _join(prefill, decode, messages(first, run, model), "both")


def concurrent_steps(
    prefill: CompiledRun, decode: CompiledRun, sent: Sequence[Message], *, computed: bool = True
) -> CompiledRun:
    """Join concurrent steps of two instances, and caches that one sends the other meanwhile.

    The caches are of requests that decode in later steps, so the decode step does not wait for
    them. If `computed`, their prompts were computed in earlier steps and they wait for nothing;
    otherwise the prefill step computes them and sends each layer's after it. All else is that of
    the decode step.
    """
    return _join(prefill, decode, sent, "nobody" if computed else "sender")


def _join(
    prefill: CompiledRun, decode: CompiledRun, sent: Sequence[Message], waiting: Waiting
) -> CompiledRun:
    """Join two compiled steps; the settings are those of the decode step."""
    sides = dict(zip(SIDES, (prefill, decode), strict=True))
    blocks = {f"{name} {k}": g for name, side in sides.items() for k, g in side.blocks.items()}
    dtype = str(decode.run.kv_cache_dtype)
    program = joined((prefill.program, decode.program), sent, dtype, waiting=waiting)
    return replace(decode, blocks=blocks, program=program)


def prefill_run(run: Run) -> Run:
    """Prefill run that computes the prompts of a resolved decode run's requests."""
    ranks = run.prefill_ranks
    assert ranks is not None
    requests = groups(run)
    if any(not g.context_length for g in requests):
        raise UserError(
            "prefill computes the context of each request, but some have context_length=0; give "
            "all at least one token"
        )
    prompts = [Group(group.count, 0, group.context_length) for group in requests]
    shared = [name for name, setting in SETTINGS.items() if setting.of_requests]
    # With ep on both sides, etp is that of the decode ranks unless it is set.
    degrees: dict[str, Any] = {"etp": run.etp} if run.ep > 1 and ranks.ep > 1 else {}
    return Run(
        model=run.model,
        mode="prefill",
        requests=lengths.merge_groups(prompts, "requests"),
        **{name: getattr(run, name) for name in shared},
        **(degrees | ranks.settings()),
    )


# ---- messages ------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """Ranks of one group by their coordinates along dp, tp and pp."""

    run: Run
    coordinates: Sequence[tuple[int, int, int]]
    """By rank."""
    rank: Mapping[tuple[int, int, int], int]

    @classmethod
    def of(cls, run: Run, model: ModelConfig) -> _Side:
        mesh, plan = parallelization(run, model)
        axes = plan.data, plan.tensor, ["pp"]
        coordinates = [*zip(*(place_along(mesh, along).tolist() for along in axes), strict=True)]
        return cls(run, coordinates, {at: rank for rank, at in enumerate(coordinates)})

    def stage_of(self, layers: int) -> list[int]:
        ends = list(accumulate(self.run.layers_per_stage or (layers,)))
        return [next(s for s, end in enumerate(ends) if layer < end) for layer in range(layers)]


def ranks_of_replica(
    single: Run, replicated: Run, model: ModelConfig, replica: int
) -> dict[int, int]:
    """Map each rank of a single replica to its rank in a layout with data parallelism.

    Both runs are resolved; they differ in `dp` and the axes along it.
    """
    rank_of = _Side.of(replicated, model).rank
    ranks = _Side.of(single, model).rank
    return {rank: rank_of[replica, tp, pp] for (_, tp, pp), rank in ranks.items()}


def messages(first: Run, second: Run, model: ModelConfig) -> list[Message]:
    """List all messages, ordered by layer, target and source.

    Both groups assign requests round-robin to their dp ranks. tp splits the key-value heads, or has
    copies of them (or of latents); decode ranks take copies round-robin.
    """
    prefill, decode = _Side.of(first, model), _Side.of(second, model)
    latents = model.kv_lora_rank and model.kv_lora_rank + model.qk_rope_head_dim
    dtype = str(second.kv_cache_dtype)
    index_bytes = model.index_head_dim * BYTES["fp8_r128" if model.kv_lora_rank else dtype]
    tokens_of = {reach: _tokens(first.dp, second, reach) for reach in model.reaches}
    from_stage, to_stage = prefill.stage_of(model.num_layers), decode.stage_of(model.num_layers)
    sent: list[Message] = []
    for layer in range(model.num_layers):
        sizes, mixer = model.with_own_sizes(model.layer(layer).sizes), model.layer(layer).mixer
        heads = 1 if latents else sizes.num_query_groups
        width = latents or sizes.kv_channels + (sizes.v_head_dim or sizes.kv_channels)
        head_bytes = width * BYTES[dtype]
        senders = [heads_held_by(heads, first.tp, t, second.tp) for t in range(second.tp)]
        for target, (dp, tp, pp) in enumerate(decode.coordinates):
            if pp != to_stage[layer]:
                continue
            for (sender, receiver), tokens in tokens_of[model.reach(mixer)].items():
                if receiver != dp or not tokens:
                    continue
                for i, (sender_tp, num_heads) in enumerate(senders[tp]):
                    per_token = num_heads * head_bytes
                    per_token += index_bytes if mixer == "indexed" and i == 0 else 0
                    source = prefill.rank[sender, sender_tp, from_stage[layer]]
                    sent.append(Message(layer, source, target, math.ceil(tokens * per_token)))
    return sent


def _tokens(ranks: int, run: Run, reach: Reach) -> dict[tuple[int, int], int]:
    """[prefill dp, decode dp] tokens of the requests of both dp ranks.

    Counted in full blocks of a paged cache; layers with a window or chunks count attended tokens.
    """
    requests = [Group(g.count, g.context_length, 0) for g in groups(run)]
    period = math.lcm(ranks, run.dp)
    column = lengths.COLUMNS.index("slots" if run.kv_cache == "paged" else "keys")
    sums = lengths.attention_sums(requests, cache_of(run), reach)
    tokens = lengths.deal(requests, sums, period)[:, column]
    by_pair: dict[tuple[int, int], int] = {}
    for i, count in enumerate(tokens.tolist()):
        pair = i % ranks, i % run.dp
        by_pair[pair] = by_pair.get(pair, 0) + count
    return by_pair


def heads_held_by(heads: int, ranks: int, target: int, targets: int) -> list[tuple[int, int]]:
    """(sending tp rank, number of key-value heads) for tp rank `target` of `targets`.

    Where ranks have copies of a head, neighbouring targets take copies round-robin, so the numbers
    of targets per copy differ by at most one: below, ranks 4 to 7 have head 1; of the targets that
    need it, 2 takes rank 6 and 3 takes rank 7.

    >>> heads_held_by(8, 4, 0, 2), heads_held_by(8, 2, 3, 4), heads_held_by(2, 8, 3, 4)
    ([(0, 2), (1, 2)], [(1, 2)], [(7, 1)])
    """
    copies = max(1, ranks // heads)
    first = target * heads // targets
    count: dict[int, int] = {}
    for head in range(first, max((target + 1) * heads // targets, first + 1)):
        sender = head * ranks // heads + target % copies
        count[sender] = count.get(sender, 0) + 1
    return list(count.items())


# ---- the joined program --------------------------------------------------------------------------


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
    """Program of several meshes; groups and peers are tables instead of mesh arithmetic."""

    group_index: tuple[Int, ...] = ()  # [communicators, ranks]: number of the group, or -1
    partners: tuple[Int, ...] = ()  # [peers, ranks]; the rank itself where it has no such peer

    def group_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Group id of each of `ranks` in communicator `slot`; 0: in none."""
        index = self.group_index[slot] if ranks is None else self.group_index[slot][ranks]
        return np.where(index < 0, 0, self.group_ids(slot, index))

    def group_count(self, slot: int) -> int:
        """Number of groups of communicator `slot`."""
        return 1 + int(self.group_index[slot].max())

    def members(self, slot: int, index: Int) -> Int:
        """Ascending ranks of the groups `index` of communicator `slot`, a row each."""
        ranks = np.argsort(self.group_index[slot], kind="stable")
        ranks = ranks[np.count_nonzero(self.group_index[slot] < 0) :]
        return ranks.reshape(self.group_count(slot), -1)[index]

    def peer_of(self, slot: int, ranks: Int | None = None) -> Int:
        """Rank with which each of `ranks` exchanges messages as peer `slot`."""
        return self.partners[slot] if ranks is None else self.partners[slot][ranks]


Row = tuple[int, int, int]
"""Layer, slot and bytes of a message."""


def joined(
    programs: Sequence[Program], sent: Sequence[Message], dtype: str, *, waiting: Waiting = "both"
) -> Joined:
    """Join the programs of both groups, with messages from the first to the second."""
    starts = (0, programs[0].mesh.world_size)
    world = starts[1] + programs[1].mesh.world_size
    group_index: list[Int] = []
    partners: list[Int] = []
    communicators: list[Communicator] = []
    peers: list[Peer] = []
    for name, start, program in zip(SIDES, starts, programs, strict=True):
        end = start + program.mesh.world_size
        for slot, communicator in enumerate(program.communicators):
            ids = program.group_of(slot)
            index = np.full(world, -1, np.int64)
            index[start:end] = np.where(
                ids > 0, np.unique(ids, return_inverse=True)[1] - bool((ids == 0).any()), -1
            )
            group_index.append(index)
            axes = tuple(f"{name}.{a}" for a in communicator.axes)
            communicators.append(communicator._replace(axes=axes))
        for slot, peer in enumerate(program.peers):
            partner_rank = np.arange(world)
            partner_rank[start:end] = program.peer_of(slot) + start
            partners.append(partner_rank)
            peers.append(peer._replace(axis=f"{name}.{peer.axis}"))
    classes: list[RankClass] = []
    for side, (start, program) in enumerate(zip(starts, programs, strict=True)):
        ends = [(m.source, m.target) if side == 0 else (m.target, m.source) for m in sent]
        partners_of: dict[int, list[int]] = {}
        for rank, partner in sorted({*ends}):
            partners_of.setdefault(rank, []).append(partner)
        first_slot = len(peers)
        for i in range(max(map(len, partners_of.values()), default=0)):
            partner_rank = np.arange(world)
            for rank, of_rank in partners_of.items():
                if i < len(of_rank):
                    partner_rank[start + rank] = of_rank[i] + starts[1 - side]
            partners.append(partner_rank)
            peers.append(Peer(ACROSS, i + 1 if side == 0 else -i - 1))
        rows_of: dict[int, list[Row]] = {}
        for (rank, partner), m in zip(ends, sent, strict=True):
            slot = first_slot + partners_of[rank].index(partner)
            rows_of.setdefault(rank, []).append((m.layer, slot, m.size))
        for c in program.classes:
            tasks = c.tasks
            if side == 1:
                tasks = _shifted(tasks, len(programs[0].communicators), len(programs[0].peers))
            ranks_with: dict[tuple[Row, ...], list[int]] = {}
            for rank in c.ranks.tolist():
                rows = tuple(sorted(rows_of.get(rank, ())))
                ranks_with.setdefault(rows, []).append(rank + start)
            add = _with_sends if side == 0 else _with_receives
            for rows, ranks in ranks_with.items():
                extended = add(tasks, rows, dtype, waiting) if rows else tasks
                work = c.work if extended is c.tasks else c.work.with_tasks(extended)
                classes.append(replace(c, ranks=np.array(ranks, np.int64), work=work))
    return Joined(
        _joined_meshes(dict(zip(SIDES, (p.mesh for p in programs), strict=True))),
        tuple(classes), tuple(communicators), tuple(peers), tuple(group_index), tuple(partners),
    )  # fmt: skip


def _joined_meshes(meshes: Mapping[str, Mesh]) -> Meshes:
    labels = [
        (f"{name} {label}", label, tuple(f"{name}.{a}" for a in axes))
        for name, mesh in meshes.items()
        for label, axes in mesh.groups
    ]
    return Meshes(
        tuple((f"{name}.{axis}", n) for name, mesh in meshes.items() for axis, n in mesh.axes),
        tuple((full_label, axes) for full_label, _, axes in labels),
        parts=tuple(meshes.values()),
        stands_for=tuple((full_label, label) for full_label, label, _ in labels),
    )


def _shifted(tasks: Tasks, communicators: int, peers: int) -> Tasks:
    """Shift the slots of tasks by the communicators and peers of the other program."""
    shift = np.where(tasks.kind == TaskKind.COLLECTIVE, communicators, peers)
    slot = np.where(tasks.slot < 0, -1, tasks.slot + shift).astype(np.int16)
    return replace(tasks, slot=slot)


def _with_sends(tasks: Tasks, rows: Sequence[Row], dtype: str, waiting: Waiting) -> Tasks:
    """Insert the sends in one chain: all ranks have one order.

    If the decode step waits for them they come after this step's collectives, each when the kernels
    that write its layer's cache have run; otherwise after the rows of their layers, or first of all
    if they wait for nothing.
    """
    n = len(tasks)
    layers = [layer for layer, _, _ in rows]
    if waiting == "sender":
        last_rows = [1 + int(np.flatnonzero(tasks.layer == layer)[-1]) for layer in layers]
        at = np.maximum.accumulate(np.array(last_rows))
    else:
        at = np.full(len(rows), n if waiting == "both" else 0)
    new = at + np.arange(len(rows))
    moved_to = np.arange(n) + np.searchsorted(at, np.arange(n), side="right")
    data = [
        (int(new[i]), int(moved_to[row]))
        for i, layer in enumerate(layers)
        for row in (_rows_of(tasks, "cache", layer) if waiting != "nobody" else ())
    ]
    chain = new.tolist()
    if waiting == "both":
        moves = np.flatnonzero((tasks.kind == TaskKind.COLLECTIVE) | (tasks.kind == TaskKind.SEND))
        chain = [*moved_to[moves[-1:]].tolist(), *chain]
    order = [*zip(chain[1:], chain, strict=False)]
    return _insert(tasks, TaskKind.SEND, rows, dtype, at, data, order)


def _with_receives(tasks: Tasks, rows: Sequence[Row], dtype: str, waiting: Waiting) -> Tasks:
    """Prepend the receives, which wait for nothing.

    If the step waits for messages, a layer's attention waits for those of its layer.
    """
    data = [
        (len(rows) + row, i)
        for i, (layer, _, _) in enumerate(rows)
        for row in (_rows_of(tasks, "cached_attention", layer) if waiting == "both" else ())
    ]
    return _insert(tasks, TaskKind.RECV, rows, dtype, np.zeros(len(rows), np.int64), data, [])


def _rows_of(tasks: Tasks, op: str, layer: int) -> list[int]:
    """Rows of a layer's kernels that contain an op."""
    fused = [i for i, ops in enumerate(tasks.ops) if op in ops_of(ops)]
    return np.flatnonzero((tasks.layer == layer) & np.isin(tasks.op, fused)).tolist()


def _insert(
    tasks: Tasks, kind: TaskKind, rows: Sequence[Row], dtype: str, at: Int,
    data: Iterable[tuple[int, int]], order: Iterable[tuple[int, int]],
) -> Tasks:  # fmt: skip
    """Insert messages before rows `at`; `data` and `order` are pairs of row numbers after that.

    A message's tag is its layer, since two ranks exchange one message per layer.
    """
    verb = kind.name.lower()
    layer, slot, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    labels = [f"layer{i}.cache.{verb}" for i in layer.tolist()]
    names = tuple(dict.fromkeys((*tasks.names, *labels)))
    ops = tuple(dict.fromkeys((*tasks.ops, verb)))
    stage_of = dict(zip(tasks.layer.tolist(), tasks.stage.tolist(), strict=True))
    inserted: dict[str, Any] = {
        "kind": kind, "name": [names.index(label) for label in labels], "op": ops.index(verb),
        "phase": 0, "stage": [stage_of[i] for i in layer.tolist()], "layer": layer,
        "microbatch": -1, "flops": 0, "traffic": 0, "collective": -1,
        "dtype": tasks.dtypes.index(dtype), "comm_bytes": size, "slot": slot, "tag": layer,
        "shape": -1,
    }  # fmt: skip
    columns: dict[str, Any] = {
        name: np.insert(getattr(tasks, name), at, values) for name, values in inserted.items()
    }
    moved_to = np.arange(len(tasks)) + np.searchsorted(at, np.arange(len(tasks)), side="right")
    total = len(tasks) + len(rows)
    data_ptr, data_rows = _linked(tasks.data_ptr, tasks.data, moved_to, total, data)
    order_ptr, order_rows = _linked(tasks.order_ptr, tasks.order, moved_to, total, order)
    return replace(
        tasks, **columns, names=names, ops=ops,
        data_ptr=data_ptr, data=data_rows, order_ptr=order_ptr, order=order_rows,
    )  # fmt: skip


def _linked(
    ptr: Int, deps: Any, moved_to: Int, total: int, added: Iterable[tuple[int, int]]
) -> tuple[Int, Any]:
    """Dependencies (CSR) with each row moved, and pairs (row, dependency) added."""
    pairs = np.array(list(added), np.int64).reshape(-1, 2)
    row = np.concatenate([np.repeat(moved_to, np.diff(ptr)), pairs[:, 0]])
    dep = np.concatenate([moved_to[deps], pairs[:, 1]])
    counts = np.bincount(row, minlength=total)
    by_row = np.argsort(row, kind="stable")
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), dep[by_row].astype(np.int32)
