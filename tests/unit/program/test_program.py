"""Groups and peers of ranks as arithmetic, against what coordinates say; worlds folded small."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import times
from stagewright.algebra.layout import MIRROR, Mesh
from stagewright.check.program import Unsound, check_program
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import (
    Program,
    RankClass,
    RankWork,
    TaskKind,
    Tasks,
)
from stagewright.program.communicators import Communicator, Peer
from stagewright.program.fold import fold
from stagewright.run.settings import Run
from stagewright.trace.formats import chakra

AXES = ("tp", "cp", "dp", "pp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = tuple((a, draw(st.integers(1, 6))) for a in draw(st.permutations(AXES)))
    even = dict(axes)["pp"] % 2 == 0
    return Mesh(axes, mirror="pp" if even and draw(st.booleans()) else "")


@st.composite
def worlds(draw: st.DrawFn) -> Program:
    """A mesh with communicators and peers, and no tasks."""
    mesh = draw(meshes())
    names = [*AXES, *((MIRROR,) if mesh.mirror else ())]
    some = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    some = some.filter(lambda axes: not {"pp", MIRROR} <= set(axes))
    who = [Communicator(tuple(sorted(axes))) for axes in draw(st.lists(some, max_size=6))]
    size = mesh.size("pp")
    if size > 2:
        who.append(Communicator(("pp",), (0, size - 1)))
    peers = [Peer(draw(st.sampled_from(AXES)), draw(st.integers(-3, 3))) for _ in range(2)]
    return Program(mesh, (), tuple(dict.fromkeys(who)), tuple(peers))


@pytest.mark.numerics
@given(worlds())
def test_groups_are_the_ranks_that_differ_along_their_axes_only(program: Program):
    mesh = program.mesh
    groups = program.groups()
    assert list(groups) == sorted(groups)
    assert len({len(str(group)) for group in groups}) <= 1
    assert min(groups, default=1) >= 1
    found = 0
    for slot, (axes, only) in enumerate(program.communicators):
        ids = program.group_of(slot)
        families: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.world_size):
            at = mesh.coords(rank)
            if only is None or at["pp"] in only:
                if MIRROR in axes:
                    at["pp"] = min(at["pp"], mesh.size("pp") - 1 - at["pp"])
                families.setdefault(tuple(at[a] for a in AXES if a not in axes), []).append(rank)
            else:
                assert ids[rank] == 0
        for ranks in families.values():
            assert {tuple(groups[int(ids[rank])]) for rank in ranks} == {tuple(ranks)}
        assert len(families) == program.group_count(slot)
        found += len(families)
    assert found == len(groups)


@pytest.mark.numerics
@given(worlds(), st.integers(0, 2**32))
def test_some_ranks_have_the_partners_that_they_have_among_all(program: Program, seed: int):
    size = program.mesh.world_size
    ranks = np.random.default_rng(seed).integers(0, size, 5)
    for slot in range(len(program.communicators)):
        assert np.array_equal(program.group_of(slot, ranks), program.group_of(slot)[ranks])
    for slot, (axis, shift) in enumerate(program.peers):
        assert np.array_equal(program.peer_of(slot, ranks), program.peer_of(slot)[ranks])
        for rank in ranks.tolist():
            here = program.mesh.coords(rank)
            there = program.mesh.coords(int(program.peer_of(slot)[rank]))
            assert there == here | {axis: (here[axis] + shift) % program.mesh.size(axis)}


@pytest.mark.numerics
@given(worlds(), st.integers(1, 7))
def test_groups_come_in_blocks_of_any_size(program: Program, block: int):
    blocks = list(program.group_chunks(size=block))
    ids = [group for some, _ in blocks for group in some.tolist()]
    ranks = [members.tolist() for _, some in blocks for members in some]
    assert dict(zip(ids, ranks, strict=True)) == program.groups()
    assert ids == sorted(ids)


# ---- folding -------------------------------------------------------------------------------------


def talking(kinds: list[tuple[TaskKind, int, int]]) -> Tasks:
    """Tasks of (kind, slot, tag), each after the one before."""
    n = len(kinds)
    kind = np.array([k for k, _, _ in kinds], np.uint8)
    moves = kind != TaskKind.COMPUTE
    zero, none = np.zeros(n, np.int64), np.full(n, -1)
    columns: dict[str, Any] = {
        "kind": kind, "name": zero, "op": zero, "phase": zero, "stage": zero, "layer": none,
        "microbatch": none, "flops": zero, "traffic": np.where(moves, 0, 8),
        "collective": np.where(kind == TaskKind.COLLECTIVE, 0, -1), "dtype": zero,
        "comm_bytes": np.where(moves, 64, 0), "slot": np.array([s for _, s, _ in kinds]),
        "tag": np.array([t for _, _, t in kinds]), "shape": none,
        "data_ptr": np.zeros(n + 1, np.int64), "data": zero[:0],
        "order_ptr": np.maximum(np.arange(-1, n), 0), "order": np.arange(max(0, n - 1)),
    }  # fmt: skip
    return Tasks(**columns, names=("work",), ops=("work",), dtypes=("bf16",), shapes=())


@st.composite
def rings(draw: st.DrawFn) -> Program:
    """Ranks that send along axes and receive; some as they should, some not."""
    mesh = draw(meshes())
    peers = [Peer(draw(st.sampled_from(AXES)), draw(st.integers(-2, 2))) for _ in range(2)]
    back = [Peer(axis, -shift + draw(st.sampled_from([0, 0, 0, 1]))) for axis, shift in peers]
    moves = [
        (TaskKind.SEND, 0, 1),
        (TaskKind.SEND, 1, 2),
        (TaskKind.RECV, 2, 1),
        (TaskKind.RECV, 3, 2),
    ]
    who = (Communicator(("dp",)), Communicator(("tp", "pp")))
    collectives = [(TaskKind.COLLECTIVE, slot, -1) for slot in (0, 1)]
    classes: list[RankClass] = []
    for stage in range(mesh.size("pp")):
        rows = [(TaskKind.COMPUTE, -1, -1), *draw(st.permutations(collectives)), *moves]
        if draw(st.booleans()):
            rows.append((TaskKind.COLLECTIVE, 0, -1))
        at = np.arange(mesh.world_size) // mesh.stride("pp") % mesh.size("pp") == stage
        classes.append(
            RankClass(np.flatnonzero(at), stage, RankWork.from_tables(talking(rows), {}))
        )
    return Program(mesh, tuple(classes), who, (*peers, *back))


def verdict(program: Program) -> str:
    """What the check says, without the ranks that it names as examples."""
    try:
        return f"{check_program(program)['passed']}"
    except Unsound as error:
        return str(error).rsplit("of ", 1)[-1]
    except UserError as error:
        return str(error).split(":")[0]


@pytest.mark.numerics
@settings(max_examples=times(150))
@given(rings())
def test_a_folded_world_is_sound_if_and_only_if_the_whole_is(program: Program):
    small = fold(program)
    assert small.mesh.world_size <= program.mesh.world_size
    assert verdict(small) == verdict(program)


@pytest.mark.numerics
def test_a_million_ranks():
    """What is done of all ranks is done in arrays, and what need not be done of all is not."""
    toy = {"model": "gpt2", "layers": 4, "seq_length": 16, "vocab": 64}
    program = compile(Run(**toy, tp=4, pp=4, dp=65536)).program
    assert check_program(program)["run"] == "by rank class"
    assert fold(program).mesh.world_size == 16
    batches = chakra.plan(program, np.arange(program.mesh.world_size), {})
    assert sum(len(batch.ranks) for batch in batches) == 1 << 20
    assert len(batches) < 16
    size, lines = 0, 0
    for piece in chakra.comm_group(program):
        size, lines = size + len(piece), lines + piece.count(b"\n")
    counts = [program.group_count(slot) for slot in range(len(program.communicators))]
    assert lines == sum(counts) + 2
    # A group's ranks have at most 7 digits and a comma each, and its name some ten.
    ranks = sum(
        count * program.members(slot, np.zeros(1, np.int64)).size
        for slot, count in enumerate(counts)
    )
    assert size < 8 * ranks + 13 * lines


def test_groups_that_no_rank_uses_are_not_listed():
    """A stage without layers has none of theirs."""
    toy = {"model": "gpt2", "layers": 4, "seq_length": 16, "vocab": 64}
    split = {"cp": 2, "cp_comm_type": "a2a", "layers_per_stage": (0, 2, 2)}
    program = compile(Run(**toy, dp=2, pp=3, **split)).program
    slots = range(len(program.communicators))
    idle = [slot for slot in slots if slot not in program.classes[0].users.communicators]
    assert idle
    for slot in idle:
        used = {int(g) for of in program.classes[1:] for g in program.group_of(slot, of.ranks)}
        assert not {int(g) for g in program.group_of(slot, program.classes[0].ranks)} & set(
            program.groups()
        )
        assert used <= set(program.groups())


@pytest.mark.numerics
def test_no_group_of_one_and_none_unused():
    toy = {"model": "gpt2", "layers": 4, "seq_length": 16, "vocab": 64}
    degrees = ({"tp": t, "dp": d, "pp": p} for t, d, p in itertools.product((1, 2), repeat=3))
    for some in degrees:
        program = compile(Run(**toy, **some)).program
        assert all(len(ranks) > 1 for ranks in program.groups().values())
        used = {
            int(slot)
            for of in program.classes
            for slot in of.tasks.slot[of.tasks.kind == TaskKind.COLLECTIVE]
        }
        assert used == set(range(len(program.communicators)))
