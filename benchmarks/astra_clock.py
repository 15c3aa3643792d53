"""An oracle of times: how long ASTRA-sim's analytical, congestion-unaware backend takes.

It repeats the arithmetic of that backend, so that our simulator can be compared with ASTRA-sim
under equal assumptions: run `task_seconds` with `Execution(streams="one")`.

>>> node = Dimension("Switch", 8, 400.0, 936.25)
>>> system = AstraSim((node,), peak_tflops=900, memory_gb_s=3350)
>>> collective_ns(system, "all_reduce", 2**20, np.array([[0, 1, 2, 3]]))
15664
"""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Float, Int
from stagewright.errors import UserError
from stagewright.program.columns import COLLECTIVES, Program, RankClass, TaskKind
from stagewright.time.astra_sim import ENDPOINT_NS, GIB_PER_S, AstraSim, Dimension


def task_seconds(program: Program, system: AstraSim) -> list[Float]:
    """Per rank class the duration of each row of its actions."""
    if program.mesh.world_size != system.world_size:
        raise UserError(
            f"the program is for {program.mesh.world_size} ranks and the network has "
            f"{system.world_size}; make them equal"
        )
    groups = [program.group_of(slot) for slot in range(len(program.communicators))]
    peers = [program.peer_of(slot) for slot in range(len(program.peers))]
    return [_class_seconds(of, system, groups, peers) for of in program.classes]


def _class_seconds(of: RankClass, system: AstraSim, groups: list[Int], peers: list[Int]) -> Float:
    tasks = of.work.actions.tasks
    ns = np.zeros(len(tasks), dtype=np.int64)
    kernel = tasks.kind == TaskKind.COMPUTE
    ns[kernel] = kernel_ns(system, tasks.flops[kernel], tasks.traffic[kernel])
    rows = np.flatnonzero(~kernel)
    columns = (tasks.kind, tasks.collective, tasks.slot, tasks.comm_bytes)
    table = np.stack([c[rows].astype(np.int64) for c in columns], axis=1)
    different, which = np.unique(table, axis=0, return_inverse=True)
    durations: list[int] = []
    for kind, collective, slot, size in ((int(x) for x in row) for row in different):
        if kind == TaskKind.COLLECTIVE:
            ids = groups[slot]
            ranks = np.flatnonzero(np.isin(ids, ids[of.ranks]))
            ranks = ranks[np.argsort(ids[ranks], kind="stable")]
            members = ranks.reshape(len(np.unique(ids[of.ranks])), -1)
            durations.append(collective_ns(system, COLLECTIVES[collective], size, members))
        elif kind in (TaskKind.LOAD, TaskKind.STORE):
            raise UserError(
                "copies to the host are remote memory in ASTRA-sim, whose configuration is not "
                "read here; drop cpu_offloading_num_layers and optimizer_cpu_offload"
            )
        elif kind == TaskKind.SEND:
            durations.append(message_ns(system, size, of.ranks, peers[slot][of.ranks]))
        else:
            durations.append(message_ns(system, size, peers[slot][of.ranks], of.ranks))
    if durations:
        ns[rows] = np.array(durations)[which.ravel()]
    return ns.astype(np.float64) * 1e-9


# ---- kernels and messages ------------------------------------------------------------------------


def kernel_ns(system: AstraSim, flops: Int, traffic: Int) -> Int:
    """Durations of kernels: the roofline, in whole ns."""
    work, moved = np.maximum(flops, 1).astype(float), np.maximum(traffic, 1).astype(float)
    peak = np.minimum(system.memory_gb_s * 1e9 * (work / moved), system.peak_tflops * 1e12)
    return (work / peak * 1e9).astype(np.int64)


def message_ns(system: AstraSim, size: int, source: Int, target: Int) -> int:
    """Duration of a message, for the pair of ranks that it takes longest."""
    links = {(int(d), int(h)) for d, h in zip(*_links(system, source, target), strict=True)}
    return max(_link_ns(system.dimensions[d], size, hops) for d, hops in links)


def _link_ns(dimension: Dimension, size: int, hops: int) -> int:
    """Duration of a message of `size` bytes over some hops of a dimension."""
    return int(hops * dimension.latency + size / (dimension.bandwidth * GIB_PER_S))


def _hops(dimension: Dimension, one: Int, other: Int) -> Int:
    """Links between positions of a dimension."""
    if dimension.topology == "Ring":
        distance = np.abs(one - other)
        return np.minimum(distance, dimension.npus - distance)
    return np.full(np.shape(one), 2 if dimension.topology == "Switch" else 1)


def _most_hops(dimension: Dimension, groups: Int) -> list[int]:
    """Most hops to the n-th next of a group, for all n; `groups`: rows of positions."""
    ranks = groups.shape[1]
    shifted = [np.roll(groups, -n, axis=1) for n in range(1, ranks)]
    return [int(_hops(dimension, groups, other).max()) for other in shifted]


def _links(system: AstraSim, source: Int, target: Int) -> tuple[Int, Int]:
    """The dimension and the hops that a message between pairs of ranks is charged.

    It is charged in one dimension, the innermost in which the two ranks differ, though they may
    differ in others as well.
    """
    dimension = np.full(source.shape, -1)
    hops = np.zeros(source.shape, dtype=np.int64)
    stride = 1
    for nth, level in enumerate(system.dimensions):
        one, other = source // stride % level.npus, target // stride % level.npus
        here = (dimension < 0) & (one != other)
        dimension[here] = nth
        hops[here] = _hops(level, one[here], other[here])
        stride *= level.npus
    return dimension, hops


# ---- collectives ---------------------------------------------------------------------------------


def collective_ns(system: AstraSim, op: str, size: int, groups: Int) -> int:
    """Duration of a collective, for the group (a row of ranks) that it takes longest.

    `size` as in `Tasks.comm_bytes`. A group of all ranks goes through the dimensions one by one;
    any other is one flat ring, or what is configured if there is one dimension only.
    """
    ranks = groups.shape[1]
    if len(system.dimensions) > 1 and ranks == system.world_size:
        return _by_dimension(system, op, size)
    if len(system.dimensions) > 1 or system.implementation_of(op, 0) == "ring":
        dimension, hops = _links(system, groups, np.roll(groups, -1, axis=1))
        rings = np.unique(np.stack([dimension, hops], axis=2), axis=0)
        return _ring(system, op, size, [[(int(d), int(h)) for d, h in ring] for ring in rings])
    return _flat(system, op, size, groups, 0, all_ranks=ranks == system.world_size)


def _by_dimension(system: AstraSim, op: str, size: int) -> int:
    phases = [(op, d) for d in range(len(system.dimensions))]
    if op == "all_gather":
        phases.reverse()
    if op == "all_reduce":
        inner = phases[:-1]
        phases = [("reduce_scatter", d) for _, d in inner] + phases[-1:]
        phases += [("all_gather", d) for _, d in reversed(inner)]
    total = 0
    for phase, nth in phases:
        dimension = system.dimensions[nth]
        positions = np.arange(dimension.npus)
        if system.implementation_of(phase, nth) == "ring":
            hops = _hops(dimension, positions, np.roll(positions, -1))
            total += _ring(system, phase, size, [[(nth, int(h)) for h in hops]])
        else:
            total += _flat(system, phase, size, positions[None], nth, all_ranks=True)
        if phase == "reduce_scatter":
            size //= dimension.npus
        elif phase == "all_gather":
            size *= dimension.npus
    return total


def _add_ns(system: AstraSim, size: int) -> int:
    """To add what has come: two reads and a write, each in whole ns."""
    return 3 * int(size / system.memory_gb_s)


def _ring(system: AstraSim, op: str, size: int, rings: list[list[tuple[int, int]]]) -> int:
    """The longest of some rings, each given by the (dimension, hops) of its links.

    The message that a rank gets last has passed as many links as there are steps, the last of them
    into this rank.
    """
    ranks = len(rings[0])
    message = size if op == "all_gather" else size // ranks
    steps = {"all_reduce": 2 * (ranks - 1), "all_to_all": ranks * (ranks - 1) // 2}
    rounds, rest = divmod(steps.get(op, ranks - 1), ranks)
    longest = 0
    for ring in rings:
        link = np.array([_link_ns(system.dimensions[d], message, h) for d, h in ring])
        sums = np.cumsum([0, *link, *link])
        partial = sums[rest : rest + ranks] - sums[:ranks]
        longest = max(longest, int(rounds * link.sum() + partial.max()))
    adds = ranks - 1 if op in ("all_reduce", "reduce_scatter") else 0
    sent = rounds * ranks + rest
    return longest + (sent + 1) * ENDPOINT_NS + adds * _add_ns(system, message)


def _flat(system: AstraSim, op: str, size: int, groups: Int, nth: int, *, all_ranks: bool) -> int:
    """Direct, or by halves, within one dimension; `groups`: rows of positions in it.

    `all_ranks`: the group is the whole world.
    """
    ranks, dimension = groups.shape[1], system.dimensions[nth]
    how = system.implementation_of(op, nth)
    if how == "direct1":
        return ENDPOINT_NS + sum(
            ENDPOINT_NS + _link_ns(dimension, size // ranks, hops)
            for hops in _most_hops(dimension, groups)
        )
    if how == "direct":
        message = size if op == "all_gather" else size // ranks
        once = _link_ns(dimension, message, max(_most_hops(dimension, groups)))
        if op == "all_reduce":
            # Groups of less than all ranks are charged the sums of what is only gathered, too.
            adds = 2 if ranks > 2 and not all_ranks else 1
            return 2 * once + 3 * ENDPOINT_NS + adds * _add_ns(system, message)
        added = _add_ns(system, message) if op == "reduce_scatter" else 0
        return once + 2 * ENDPOINT_NS + added
    return _halving_doubling(system, op, size, groups, dimension)


def _halving_doubling(
    system: AstraSim, op: str, size: int, groups: Int, dimension: Dimension
) -> int:
    ranks = groups.shape[1]
    halvings = ranks.bit_length() - 1
    if ranks != 1 << halvings:
        raise UserError(
            f"ASTRA-sim: halvingDoubling of {ranks} ranks never ends; take a power of two, or ring"
        )
    if op != "all_gather" and size < 2 * ranks:
        raise UserError(
            f"ASTRA-sim: halvingDoubling of {size} bytes over {ranks} ranks aborts; use ring, "
            "or leave out what is so small (the norm of the gradients: clip_grad)"
        )
    # The n-th halving exchanges size / 2^n with the rank 2^(n - 1) away, doubling goes back.
    sizes = [size >> n for n in range(1, halvings + 1)]
    steps = [(part, 1 << n) for n, part in enumerate(sizes)]
    adds = sum(_add_ns(system, part) for part in sizes[1:])
    if op == "all_reduce":
        steps += steps[::-1]
    elif op == "all_gather":
        steps = [(size << n, ranks >> (n + 1)) for n in range(halvings)]
        adds = 0
    total = 0
    for part, distance in steps:
        other = groups[:, np.arange(ranks) ^ distance]
        total += _link_ns(dimension, part, int(_hops(dimension, groups, other).max()))
    return total + (len(steps) + 1) * ENDPOINT_NS + adds
