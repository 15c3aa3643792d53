"""Programs of recorded graphs: the mesh of process groups, and what nodes cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from helpers import cases, table_of
from stagewright.errors import UserError
from stagewright.imports.recording import (
    Process,
    ProcessGroup,
    Recording,
    Ref,
    TracedNode,
)
from stagewright.lower.traced_graph import costs_of, mesh_of, program_of


def groups_of(sizes: dict[str, int], rank: int, joint: tuple[str, ...]) -> dict[str, ProcessGroup]:
    """The groups of a rank along each dim of a mesh (outermost first), and along some together."""
    grid = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    names, at = [*sizes], np.argwhere(grid == rank)[0]
    found: dict[str, ProcessGroup] = {}
    for nth, dims in enumerate([*((n,) for n in names), joint]):
        index = tuple(slice(None) if n in dims else int(i) for n, i in zip(names, at, strict=True))
        found[str(nth)] = ProcessGroup(tuple(grid[index].ravel().tolist()), "+".join(dims))
    return found


@cases
def test_groups_are_found_on_the_mesh(sizes: dict[str, int], joint: tuple[str, ...]):
    for rank in range(math.prod(sizes.values())):
        groups = groups_of(sizes, rank, joint)
        mesh, communicators = mesh_of(Process(rank, math.prod(sizes.values()), groups))
        assert mesh.axes == tuple(reversed(sizes.items()))
        for name, group in groups.items():
            axes = communicators[name].axes
            assert axes == tuple(group.dim.split("+"))
            coords = mesh.coords(rank)
            same = [
                r for r in range(mesh.world_size)
                if all(mesh.coords(r)[n] == coords[n] for n in sizes if n not in axes)
            ]  # fmt: skip
            assert same == sorted(group.ranks)


@pytest.mark.parametrize("ranks", [(0, 1, 3), (0, 3), (1, 2), (0, 5)])
def test_groups_along_no_mesh_are_refused(ranks: tuple[int, ...]):
    with pytest.raises(UserError, match="process group of ranks"):
        mesh_of(Process(ranks[0], 4, {"odd": ProcessGroup(ranks, "odd")}))


SHAPES = {
    "a": (6, 4), "b": (4, 10), "x": (3, 6, 4), "y": (3, 4, 10), "rows": (12, 4), "q": (2, 8, 16, 4),
    "k": (2, 2, 32, 4), "v": (2, 2, 32, 6), "image": (2, 4, 9, 9), "kernel": (8, 2, 3, 3),
}  # fmt: skip
COSTS: Any = table_of("test_traced_graph", "costs")


@pytest.mark.parametrize(("kind", "args", "shape", "flops"), COSTS)
def test_flops_of_a_node(kind: str, args: tuple[Any, ...], shape: tuple[int, ...], flops: int):
    given = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    node = TracedNode("n", f"aten.{kind}.default", shape, "bf16", given)
    assert costs_of(node, kind, lambda ref: SHAPES[ref.name]).flops == flops


def graph(*more: TracedNode, outputs: tuple[str, ...] = ("loss",)) -> Recording:
    """The product of a gathered parameter, and its sum."""
    nodes = (
        TracedNode("w", "param", (4, 8), "bf16"),
        TracedNode("x", "param", (2, 16), "bf16"),
        TracedNode("g", "_c10d_functional.all_gather_into_tensor.default", (16, 8), "bf16",
                   (Ref("w"), 4, "0")),
        TracedNode("g_done", "_c10d_functional.wait_tensor.default", (16, 8), "bf16", (Ref("g"),)),
        TracedNode("y", "aten.mm.default", (2, 8), "bf16", (Ref("x"), Ref("g_done"))),
        TracedNode("loss", "aten.sum.default", (), "bf16", (Ref("y"),)),
        *more,
    )  # fmt: skip
    process = Process(1, 4, {"0": ProcessGroup((0, 1, 2, 3), "dp")})
    return Recording("graph", nodes, outputs, process=process)


def test_a_reader_waits_for_the_collective_and_not_for_its_wait():
    (of,) = program_of(graph()).classes
    t = of.tasks
    assert [t.names[i] for i in t.name] == ["g", "y", "loss"]
    assert t.data[t.data_ptr[1] : t.data_ptr[2]].tolist() == [0]
    assert t.comm_bytes.tolist() == [4 * 8 * 2, 0, 0]
    assert t.traffic[1] == 2 * (2 * 16 + 16 * 8 + 2 * 8)
    assert of.memory["gathered_parameters"] == 16 * 8 * 2


def test_a_collective_that_is_unknown_is_refused_by_name():
    odd = TracedNode("odd", "_c10d_functional.scatter.default", (4,), "bf16", (Ref("x"), "0"))
    with pytest.raises(UserError, match=r"the collective _c10d_functional\.scatter\.default"):
        program_of(graph(odd))


def test_a_graph_is_kept_as_text():
    kept = graph()
    back = Recording.from_json(kept.to_json())
    assert back.process == kept.process
    assert back.to_json() == kept.to_json()
