"""Pictures show what there is: as many boxes as actions, none upon another, within the frame."""

from __future__ import annotations

import itertools
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.program import traffic
from stagewright.program.columns import COLLECTIVES, Program, TaskKind
from stagewright.schedule.actions import flat
from stagewright.schedule.schedules import make
from stagewright.views.pages import charts
from stagewright.views.pictures import bars, colours, memory, scales, schedule, svg, timeline

SMALL: dict[str, Any] = {"model": "llama3-8b", "layers": 4, "seq_length": 64}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {**SMALL, "tp": 2, "pp": 2, "dp": 2, "cp": 2, "zero": 1, "sequence_parallel": True},
    "fsdp": {**SMALL, "dp": 8, "zero": 3},
    "experts": {"model": "mixtral-8x7b", "layers": 4, "seq_length": 64, "ep": 4, "dp": 4, "pp": 2},
    "both ends": {**SMALL, "pp": 4, "schedule": "dualpipe", "global_batch_size": 8, "tp": 2},
    "tied": {"model": "gpt2", "layers": 4, "seq_length": 64, "pp": 2, "dp": 2},
    "across": {
        "model": "llama3-8b", "layers": 4, "mode": "decode", "tp": 2, "context_length": 64,
        "prefill": "tp=4", "dp": 2, "batch_size": 4,
    },
}  # fmt: skip


def root(text: str) -> ElementTree.Element:
    found = ElementTree.fromstring(text)
    assert found.tag == "svg"
    return found


# ---- schedules -----------------------------------------------------------------------------------


@cases
def test_a_schedule_has_a_box_for_each_action(name: str, pp: int, microbatches: int, vpp: int):
    order = make(name, pp, microbatches, vpp)
    picture = root(schedule.picture(order))
    boxes = [p.attrib["d"] for p in picture if p.tag == "path" and p.get("fill") != "none"]
    assert sum(d.count("M") for d in boxes) == sum(len(flat(steps)) for steps in order)
    for d in boxes:
        assert all(0 <= float(x) <= svg.WIDTH for x in re.findall(r"M([0-9.]+)", d))


@pytest.mark.numerics
def test_a_long_schedule_says_what_it_does_not_show():
    text = schedule.picture(make("1f1b", 40, 500, 1))
    assert "Not shown: 24 ranks in the middle; slots" in text
    assert len(text) < 400_000
    root(text)


# ---- who sends to whom ---------------------------------------------------------------------------


def exact(program: Program, axis: str | None = None) -> np.ndarray:
    """Bytes from rank to rank, task by task."""
    world = program.mesh.world_size
    found = np.zeros((world, world))
    groups = program.groups()
    for of in program.classes:
        tasks = of.tasks
        for row in range(len(tasks)):
            slot, kind = int(tasks.slot[row]), TaskKind(tasks.kind[row])
            for rank in of.ranks.tolist():
                one = np.array([rank])
                if kind == TaskKind.SEND and axis in (None, program.peers[slot].axis):
                    found[rank, program.peer_of(slot, one)[0]] += tasks.comm_bytes[row]
                if kind == TaskKind.COLLECTIVE and axis in (None, program.label_of(slot)):
                    members = groups[int(program.group_of(slot, one)[0])]
                    size, what = tasks.local_bytes[row], COLLECTIVES[tasks.collective[row]]
                    each = {"all_gather": size, "all_reduce": 2 * size / len(members)}.get(
                        what, size / len(members)
                    )
                    for other in members:
                        found[rank, other] += each * (other != rank)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_traffic_is_what_tasks_send(name: str):
    program = sw.compile(sw.Run(**RUNS[name])).program
    whole = exact(program)
    assert whole.any()
    np.testing.assert_allclose(traffic.matrix(program).bytes, whole)
    parts = [traffic.matrix(program, axis).bytes for axis in traffic.axes(program)]
    np.testing.assert_allclose(sum(parts), whole)
    for axis, part in zip(traffic.axes(program), parts, strict=True):
        np.testing.assert_allclose(part, exact(program, axis))
    edges = traffic.blocks(program, 4)
    assert len(edges) <= 5
    assert edges[0] == 0
    assert edges[-1] == len(whole)
    summed = np.add.reduceat(np.add.reduceat(whole, edges[:-1], 0), edges[:-1], 1)
    np.testing.assert_allclose(traffic.matrix(program, edges=edges).bytes, summed)


def test_the_largest_exchanges_are_those_of_the_matrix():
    compiled = sw.compile(sw.Run(**RUNS["dense"]))
    whole = exact(compiled.program).round()
    table = charts.largest_exchanges(compiled)
    assert 3 < len(table) <= charts.MAX_PAIRS
    assert table.columns["bytes"] == sorted(table.columns["bytes"], reverse=True)
    assert table.columns["bytes"][0] == whole.max()
    for row in table.rows:
        sent = whole[int(row["from"]), int(row["to"])]
        assert row["bytes"] == sent
        assert row["equal pairs"] <= np.count_nonzero(whole == sent)
    listed = sum(table.columns["equal pairs"])
    assert listed == np.count_nonzero(whole >= table.columns["bytes"][-1])


# ---- bars, areas, strips -------------------------------------------------------------------------


def test_bars_are_as_long_as_what_they_show():
    some = [
        bars.StackedBar("one", {"parameters": 30, "activations": 10}),
        bars.StackedBar("two", {"other": 20}),
    ]
    picture = root(bars.picture(some, colours.MEMORY, "b", "x", scales.BYTES))
    wide = [float(r.attrib["width"]) for r in picture.iter("rect") if r.find("title") is not None]
    assert wide[0] == pytest.approx(3 * wide[1], rel=1e-2)
    assert wide[2] == pytest.approx(2 * wide[1], rel=1e-2)


def test_a_colour_means_one_thing():
    """On all pages: only what is the same has the same colour."""
    fills = {
        **colours.WORK, **colours.ACTIONS, **colours.AXES, **colours.MEMORY,
        **dict(enumerate(colours.FUSED_AXES)),
    }  # fmt: skip
    meanings: dict[str, set[str]] = {}
    for meaning, fill in fills.items():
        meanings.setdefault(fill.colour, set()).add(str(meaning))
    for meaning, (colour, _) in colours.CURVES.items():
        meanings.setdefault(colour, set()).add(meaning)
    for meaning in ("LIMIT", "CANDIDATE", "FRONT"):
        meanings.setdefault(getattr(colours, meaning), set()).add(meaning)
    shared = {frozenset(names) for names in meanings.values() if len(names) > 1}
    assert shared == {
        frozenset({"forward", "F", "TTFT"}),
        frozenset({"backward", "B"}),
        frozenset({"decode", "TPOT"}),
        frozenset({"kv_cache", "cache", "fullest cache"}),
        frozenset({"LIMIT", "limit"}),
    }


def test_waiting_is_fainter_than_work():
    """On light and on dark: a tenth of the text's colour, where work has its own."""
    bubble = colours.WAITING["bubble"]
    assert (bubble.colour, bubble.opacity <= 0.15) == ("currentColor", True)
    assert all(f.opacity == 1 for f in (*colours.WORK.values(), *colours.MEMORY.values()))


def test_areas_reach_as_high_as_what_is_held():
    levels = memory.Levels([0, 1, 3], {"parameters": [50, 100], "activations": [0, 100]}, "ab", "x")
    assert (levels.total, levels.peak) == ([50, 200], 1)
    picture = root(memory.picture(levels, "m", "x"))
    tops = {
        str(p.findtext("title")).split(",")[0]: [
            memory.HEIGHT - memory.BOTTOM - float(y)
            for y in re.findall(r"V([0-9.]+)", p.attrib["d"])
        ]
        for p in picture.iter("path")
        if p.get("class") == "area"
    }
    high = memory.HEIGHT - memory.BOTTOM - memory.TOP
    assert tops["parameters"] == pytest.approx([high / 4, high / 2, 0], abs=0.1)
    assert tops["activations"] == pytest.approx([high / 4, high, 0], abs=0.1)


def test_a_strip_is_filled_as_much_as_time_is():
    found = sw.simulate("llama3-8b", "h100-sxm", layers=4, seq_length=512, tp=2, pp=2)
    lane = found.timeline.lanes[0]
    edges = np.linspace(0, found.timeline.ticks, 18)
    mine = lane.is_kernel
    strip = timeline.Strip("kernels", lane.begin[mine], lane.end[mine])
    shares = timeline._busy(strip, edges)
    pairs = list(zip(lane.begin[mine].tolist(), lane.end[mine].tolist(), strict=True))
    for low, high, share in zip(edges, edges[1:], shares, strict=False):
        inside = sum(max(0.0, min(end, high) - max(begin, low)) for begin, end in pairs)
        assert share == pytest.approx(inside / (high - low), abs=1e-6)
    root(timeline.picture(found.timeline))


@pytest.mark.parametrize(("most", "about"), [(1, 5), (81e9, 5), (3e-5, 6), (7.0, 8), (1e-12, 5)])
def test_ticks_are_round_and_few(most: float, about: int):
    found = scales.ticks(most, about)
    assert found[0] == 0
    assert 2 <= len(found) <= about + 1
    assert found[-1] <= most * (1 + 1e-9)
    assert len({float(f"{b - a:.9g}") for a, b in itertools.pairwise(found)}) == 1


def test_logarithmic_axes_have_round_ticks_inside():
    for low, high in ((3.0, 40.0), (1.2, 1.9), (2e-3, 9e3), (5e9, 90e9)):
        found = scales.log_ticks(low, high)
        assert 2 <= len(found) <= 9
        assert low <= found[0] < found[-1] <= high
        across = scales.Across(0, 100, high, scales.BYTES, low, log=True)
        assert across.at(low) == pytest.approx(0)
        assert across.at(high) == pytest.approx(100)
        assert across.at((low * high) ** 0.5) == pytest.approx(50)
