"""Machines, where groups lie in them, and collectives against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.time import hardware
from stagewright.time.collectives import (
    collective_seconds,
    message_seconds,
)
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine, Placement, Tier, placements, tier_of
from stagewright.time.torus import Pod, Ring, rings
from timed import algorithm_of

H100 = hardware.resolve("h100-sxm")
GB = 10**9


def ideal(*tiers: Tier, algorithm: str = "best") -> Machine:
    """Links without latency that reach their bandwidth."""
    gpus = math.prod(d.size for d in tiers)
    return Machine(H100, gpus, tiers, algorithm)  # pyright: ignore


NODE = Tier("switch", 8, 400.0, 0.0)
OUT = Tier("fat_tree", 4, 50.0, 0.0)


def whole(machine: Machine) -> Placement:
    return placements(machine, np.arange(machine.gpus).reshape(1, -1))[0]


@pytest.mark.parametrize(
    ("op", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)]
)
def test_a_ring_moves_each_byte_once_or_twice(op: str, passes: int) -> None:
    """Patarasuk and Yuan, 2009: passes * (n - 1) / n * bytes / bandwidth."""
    machine = ideal(NODE, algorithm="ring")
    local = GB // 8 if op == "all_gather" else GB
    seconds = collective_seconds(op, local, whole(machine), machine)
    assert algorithm_of(op, local, whole(machine), machine) == "ring"
    assert seconds == pytest.approx(passes * 7 / 8 * GB / 400e9)


def test_rings_leave_a_node_by_all_its_adapters() -> None:
    """As many rings as GPUs of the group in a node: 8 x 50 GB/s, not one adapter's 50."""
    machine = ideal(NODE, OUT, algorithm="ring")
    seconds = collective_seconds("all_reduce", GB, whole(machine), machine)
    assert seconds == pytest.approx(2 * 31 / 32 * GB / 400e9)
    strided = placements(machine, np.arange(32).reshape(4, 8).T)[0]
    assert (strided.ranks, strided.counts) == (4, (1, 4))
    seconds = collective_seconds("all_reduce", GB, strided, machine)
    assert seconds == pytest.approx(2 * 3 / 4 * GB / 50e9)


def test_what_leaves_a_node_bounds_all_to_all() -> None:
    machine = ideal(NODE, OUT)
    seconds = collective_seconds("all_to_all", GB, whole(machine), machine)
    assert algorithm_of("all_to_all", GB, whole(machine), machine) == "direct"
    assert seconds == pytest.approx(GB * 24 / 32 / 50e9)


def test_all_to_all_on_a_ring_goes_a_quarter_of_it() -> None:
    machine = ideal(Tier("ring", 8, 100.0, 0.0))
    seconds = collective_seconds("all_to_all", GB, whole(machine), machine)
    assert seconds == pytest.approx(GB * 7 / 8 * 8 / 4 / 100e9)


def test_half_of_a_full_mesh_has_half_of_its_links() -> None:
    machine = ideal(Tier("fully_connected", 8, 448.0, 0.0), algorithm="ring")
    seconds = collective_seconds("all_gather", GB // 2, Placement(2, (2,), (1,)), machine)
    assert seconds == pytest.approx(GB / 2 / (448e9 / 7))


def test_two_gpus_of_a_full_mesh_have_one_of_its_links() -> None:
    """A job of two GPUs does not get the links to the six that it does not have."""
    two, eight = (Machine.of(hardware.resolve("mi300x"), gpus=gpus) for gpus in (2, 8))
    group = Placement(2, (2,), (1,))
    assert collective_seconds("all_gather", GB, group, two) == pytest.approx(
        collective_seconds("all_gather", GB, group, eight)
    )
    assert message_seconds(GB, 0, two) == pytest.approx(message_seconds(GB, 0, eight))


def test_switches_that_add_need_one_pass() -> None:
    """NVLS: (n + 1) / n of the bytes where a ring moves 2 (n - 1) / n."""
    machine = ideal(Tier("switch", 8, 400.0, 0.0, in_network_gb_s=400.0))
    seconds = collective_seconds("all_reduce", GB, whole(machine), machine)
    assert algorithm_of("all_reduce", GB, whole(machine), machine) == "in_network"
    assert seconds == pytest.approx(9 / 8 * GB / 400e9)
    off = H100.scale_up.model_copy(update={"in_network_reduction": False})
    plain = Machine.of(H100.model_copy(update={"scale_up": off}), gpus=8)
    assert algorithm_of("all_reduce", GB, whole(plain), plain) != "in_network"


def test_oversubscription_slows_what_passes_the_top() -> None:
    out = H100.scale_out.model_copy(update={"gpus_per_leaf": 32, "oversubscription": 4.0})
    tapered = Machine.of(H100.model_copy(update={"scale_out": out}), gpus=128)
    assert [d.size for d in tapered.tiers] == [8, 4, 4]
    even = Machine.of(H100, gpus=128)
    group = placements(tapered, np.arange(128).reshape(1, -1))[0]
    slow = collective_seconds("all_to_all", GB, group, tapered)
    fast = collective_seconds("all_to_all", GB, whole(even), even)
    assert 2 < slow / fast < 4  # 96 of 127 partners are beyond the top, at a quarter


def test_one_flat_domain_is_as_fast_as_a_node() -> None:
    flat = Machine.of(H100, gpus=128, topology="fullflat")
    assert [d.size for d in flat.tiers] == [128]
    assert flat.tiers[0].bandwidth_gb_s == Machine.of(H100, gpus=8).tiers[0].bandwidth_gb_s


def test_a_message_takes_the_links_it_passes() -> None:
    machine = Machine.of(H100, gpus=32)
    a, b = np.array([0, 0, 7]), np.array([1, 8, 8])
    assert tier_of(machine, a, b).tolist() == [0, 1, 1]
    near, far = (message_seconds(GB, level, machine) for level in (0, 1))
    assert far / near == pytest.approx(369 / 46, rel=0.06)  # but for the latency


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("name", hardware.names())
def test_more_bytes_take_longer(name: str, op: str) -> None:
    on = hardware.resolve(name)
    machine = Machine.of(on, gpus=4 * on.gpus_per_node)
    group = whole(machine)
    times = [collective_seconds(op, 2**i, group, machine) for i in range(10, 34, 3)]
    assert times == sorted(times)
    assert times[0] > 0


def test_the_order_of_ranks_says_where_a_group_lies() -> None:
    """tp inside a node is fast; numbered last, its ranks are in different nodes."""
    settings = {"model": "llama3-8b", "layers": 1, "tp": 8, "dp": 4, "seq_length": 2048}
    machine = Machine.of(H100, gpus=32)
    slow, fast = (
        task_time(Run(**settings, order=order), machine)
        for order in ("dp-tp-cp-ep-pp", "tp-cp-ep-dp-pp")
    )
    assert slow > 3 * fast


def task_time(run: Run, machine: Machine) -> float:
    """Seconds of all collectives over tp."""
    program = compile(run).program
    tasks = program.classes[0].tasks
    (seconds,) = task_seconds(program, machine)
    over = [program.label_of(i) == "tp" for i in range(len(program.communicators))]
    mine = (tasks.kind == TaskKind.COLLECTIVE) & np.array([*over, False])[tasks.slot]
    return float(seconds[mine].sum())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="wanted best, ring"):
        Machine.of(H100, gpus=8, algorithm="rng")  # pyright: ignore
    with pytest.raises(UserError, match="no attention kernel 'fa3'; did you mean 'fa2'"):
        H100.with_attention("fa3")
    program = compile(Run(model="gpt2", dp=2, layers=1)).program
    with pytest.raises(UserError, match="2 ranks and the machine has 8 GPUs"):
        task_seconds(program, Machine.of(H100, gpus=8))


def test_copies_to_experts_move_slowly_and_are_sorted_first() -> None:
    """Against the figures: rows copied by index at 0.68 of 3.35 TB/s, after 16.6 us and 0.09 ns for
    each of 8 x 2048 choices."""
    program = compile(Run(model="qwen3-30b-a3b", layers=1, seq_length=2048)).program
    (t,) = (c.tasks for c in program.classes)
    (seconds,) = task_seconds(program, Machine.of(H100, gpus=1))
    op = np.array(t.ops)[t.op]
    forth, back = np.flatnonzero(op == "dispatch")
    copies, row = 8 * 2048, 2048 * 2
    moved = 2.5e-6 + 2 * copies * row / (0.6818 * 3350e9)
    sorting = 16.63e-6 + 0.09108e-9 * copies
    assert seconds[forth] == pytest.approx(moved + sorting)
    assert seconds[back] == pytest.approx(moved)
    (first, _) = np.flatnonzero(op == "combine")
    assert seconds[first] == pytest.approx(2.5e-6 + t.traffic[first] / (0.6818 * 3350e9))


@cases
def test_all_reduce_over_racks_beside_nccl_tests(gpus: int, gb: float, ms: float) -> None:
    """CoreWeave's GB200 NVL72: two racks, and twenty. Messages of other collectives, which nobody
    measured, leave a rack by the adapter of each GPU."""
    machine = Machine.of(hardware.resolve("gb200-nvl72"), gpus=gpus)
    (group,) = placements(machine, np.arange(gpus).reshape(1, -1))
    size = round(gb * 1e9)
    reduced = collective_seconds("all_reduce", size, group, machine)
    assert reduced * 1e3 == pytest.approx(ms, rel=0.1)
    scattered = collective_seconds("reduce_scatter", size, group, machine)
    assert scattered < 0.8 * reduced


def test_a_part_passes_every_link_between_nodes_of_a_ring_through_them() -> None:
    """Of n links a part skips one, which for most parts is a link within a node."""
    node, out = NODE._replace(hop_us=1.0), OUT._replace(hop_us=300.0)
    machine = ideal(node, out, algorithm="ring")
    seconds = collective_seconds("reduce_scatter", 1, whole(machine), machine)
    assert seconds == pytest.approx((4 * 300 + 27 * 1) * 1e-6, rel=1e-3)
    strided = placements(machine, np.arange(32).reshape(4, 8).T)[0]  # one rank in each node
    seconds = collective_seconds("reduce_scatter", 1, strided, machine)
    assert seconds == pytest.approx(3 * 300e-6, rel=1e-3)


def test_one_rank_of_each_node_reduces_by_a_tree() -> None:
    machine = ideal(NODE, OUT._replace(size=64, hop_us=300.0), algorithm="tree")
    strided = placements(machine, np.arange(512).reshape(64, 8).T)[0]
    seconds = collective_seconds("all_reduce", 1, strided, machine)
    assert algorithm_of("all_reduce", 1, strided, machine) == "tree"
    assert seconds == pytest.approx(2 * 6 * 300e-6, rel=1e-3)
    inside = placements(machine, np.arange(512).reshape(64, 8))[0]
    assert algorithm_of("all_reduce", 1, inside, machine) != "tree"


def test_nccl_goes_through_no_tier_after_the_other() -> None:
    machine = ideal(NODE, OUT._replace(hop_us=300.0))
    assert algorithm_of("all_gather", 1, whole(machine), machine) == "ring"
    tpus = Machine(hardware.resolve("tpu-v5p"), 32, machine.tiers)
    assert algorithm_of("all_gather", 1, whole(tpus), tpus) == "hierarchical"


def test_efa_takes_as_long_as_its_users_measured() -> None:
    """all_gather of 1 GiB over 64 nodes: 24 ms (nanotron's jobs on AWS p5), with two copies."""
    machine = Machine.of(hardware.resolve("h100-p5-sxm"), gpus=512)
    seconds = collective_seconds("all_gather", 2**30 // 512, whole(machine), machine)
    assert 0.0219 < seconds + 0.0007 < 0.0265


# ---- slices of a torus, and the rings of groups in them ------------------------------------------


V5P = Pod((16, 20, 28), cube=4)
V5E = Pod((16, 16))


@cases
def test_a_job_has_a_slice_of_a_published_shape(
    pod: str, chips: int, shape: tuple[int, ...]
) -> None:
    assert {"V5P": V5P, "V5E": V5E}[pod].slice(chips) == shape


def test_a_slice_is_closed_by_switches_between_cubes_or_where_it_spans_the_pod() -> None:
    assert V5P.closed((4, 4, 8)) == (True, True, True)
    assert V5P.closed((2, 2, 4)) == (False, False, False)
    assert V5E.closed((8, 16)) == (False, True)


def test_an_axis_has_dimensions_of_its_own() -> None:
    closed = (True, True, True)
    assert rings((8, 8, 8), closed, 8, 1) == (Ring(8, True, 1),)
    assert rings((8, 8, 8), closed, 64, 8) == (Ring(8, True, 1),) * 2
    assert rings((8, 8, 8), closed, 512, 1) == (Ring(8, True, 1),) * 3
    # tp takes half of a dimension, and dp the other half and the other dimension
    found = rings((4, 4), (True, True), 8, 2)
    assert math.prod(ring.size for ring in found) == 8
    assert sorted(ring.groups for ring in found) == [1, 2]


def test_groups_with_a_stride_use_the_dimensions_that_are_left() -> None:
    machine = Machine.of(resolve("tpu-v5p"), gpus=512)
    size = 2**30
    whole = collective_seconds("all_gather", size // 512, Placement(512, (512,), (1,)), machine)
    dp = collective_seconds("all_gather", size // 64, Placement(64, (64,), (8,)), machine)
    tp = collective_seconds("all_gather", size // 8, Placement(8, (8,), (1,)), machine)
    assert dp == pytest.approx(whole * 3 / 2, rel=0.03)
    assert tp == pytest.approx(whole * 3 * 7 / 8, rel=0.03)


def test_a_line_lacks_the_way_back() -> None:
    closed, line = (rings((16,), (way,), 16, 1)[0].share for way in (True, False))
    assert closed == 2 * line
