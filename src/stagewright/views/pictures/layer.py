"""A sharded block as a graph: operations from top to bottom, with layouts where values flow.

Boxes are kernels, rounded boxes collectives. Parameters stand in the box that reads them. Layers
of the drawing are those of the longest path; within one, nodes are ordered by the mean place of
their neighbours (Sugiyama, Tagawa, Toda 1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagewright.algebra.layout import Mesh
from stagewright.graph.node import Graph, Node
from stagewright.program.columns import COLLECTIVES
from stagewright.views.pictures import chart, svg

WIDE, LINE, STUB, BELOW, SIDE = 190, 14, 16, 40, 16
SWEEPS = 12
MOST = 400
"""Nodes of a picture."""

_LEAVES = ("param", "state", "input")
FILLS = {
    "kernel": svg.Fill("#cfe8f7"),
    "collective": svg.Fill("#f3c96b", "/"),
    "input": svg.Fill("#e4e4e4"),
}


@dataclass(eq=False)
class _Spot:
    """A node of the graph, or a point in a row that a long edge passes through."""

    node: Node | None
    level: int
    lines: tuple[str, ...] = ()
    into: list[_Spot] = field(default_factory=list["_Spot"])
    out: list[_Spot] = field(default_factory=list["_Spot"])
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the top
    high: float = 0.0

    @property
    def wide(self) -> float:
        return WIDE if self.node else 12


def picture(
    graph: Graph, mesh: Mesh, name: str = "layer", phases: Sequence[str] = ("forward",)
) -> svg.Picture:
    """The nodes of a block in the given phases; of more than `MOST`, the first ones."""
    chosen = [n for n in graph if n.phase in phases][:MOST]
    rows = _levels(chosen, mesh)
    _order_rows(rows)
    wide = _place_spots(rows)
    y = 34.0
    for row in rows:
        high = max(LINE * len(spot.lines) + 8 for spot in row)
        for spot in row:
            spot.y = y
            spot.high = LINE * len(spot.lines) + 8 if spot.node else high
        y += high + BELOW
    fills = svg.Fills(name, FILLS)
    kinds = [k for k in FILLS if any(_kind(s.node) == k for row in rows for s in row if s.node)]
    heading, _ = fills.heading(kinds)
    spots = [s for row in rows for s in row]
    edges = [_edge(s, t) for s in spots for t in s.out]
    boxes = [_box(s, fills) for s in spots if s.node]
    label = f"Graph of {len(chosen)} values, phase {' and '.join(phases)}, with their layouts"
    parts = [heading, *edges, *boxes]
    return svg.figure(y, label, parts, width=max(wide, chart.SCREENS[0].width))


def _kind(n: Node) -> str:
    if n.op in COLLECTIVES:
        return "collective"
    return "input" if n.op in _LEAVES else "kernel"


def _levels(chosen: Sequence[Node], mesh: Mesh) -> list[list[_Spot]]:
    """Rows of spots; a parameter that is only read is part of the box that reads it."""
    inside = set(chosen)
    spots: dict[Node, _Spot] = {}
    for n in chosen:
        if n.op in ("param", "state"):
            continue
        given = [s for s in n.srcs if s.op in ("param", "state") or s not in inside]
        sources = [spots[s] for s in n.srcs if s in spots]
        level = 1 + max((s.level for s in sources), default=-1)
        spots[n] = _Spot(n, level, _lines(n, given, mesh))
        for s in dict.fromkeys(sources):
            _connect(s, spots[n])
    # A node that reads nothing stands just above its first reader, not at the top.
    for spot in reversed(spots.values()):
        if not spot.into and spot.out:
            spot.level = min(t.level for t in spot.out) - 1
    rows: list[list[_Spot]] = [[] for _ in range(1 + max(s.level for s in spots.values()))]
    for spot in spots.values():
        rows[spot.level].append(spot)
    for spot in [*spots.values()]:
        for target in [*spot.out]:
            _bend(spot, target, rows)
    return [row for row in rows if row]


def _connect(source: _Spot, target: _Spot) -> None:
    source.out.append(target)
    target.into.append(source)


def _bend(source: _Spot, target: _Spot, rows: list[list[_Spot]]) -> None:
    """Lead an edge that is longer than a row through a spot in each row between."""
    if target.level - source.level < 2:
        return
    source.out.remove(target)
    target.into.remove(source)
    before = source
    for level in range(source.level + 1, target.level):
        spot = _Spot(None, level)
        rows[level].append(spot)
        _connect(before, spot)
        before = spot
    _connect(before, target)


def _lines(n: Node, given: Sequence[Node], mesh: Mesh) -> tuple[str, ...]:
    axes: tuple[str, ...] = n.get("axes", ())  # pyright: ignore
    what = f"{n.op} over {mesh.label(axes)}" if n.op in COLLECTIVES and axes else n.op
    once = " (once per step)" if n.once else ""
    head = f"{n.name}: {what}" if n.name and n.name != n.op and n.op not in COLLECTIVES else what
    spec = [str(n.get("spec"))] if n.get("spec") else []
    read = [f"{s.name or s.op} {_layout(s)}" for s in dict.fromkeys(given)]
    return (head + once, *spec, *(f"reads {r}" for r in read[:3]))


def _layout(n: Node) -> str:
    return n.layout.show(tuple(map(str, n.shape)))


def _order_rows(rows: list[list[_Spot]]) -> None:
    """Order each row by the mean place of its neighbours, in sweeps down and up."""
    place = {id(s): float(nth) for row in rows for nth, s in enumerate(row)}

    def mean(spots: Sequence[_Spot], otherwise: float) -> float:
        return sum(place[id(s)] for s in spots) / len(spots) if spots else otherwise

    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            keys = {id(s): mean(s.into if down else s.out, place[id(s)]) for s in row}
            row.sort(key=lambda s: keys[id(s)])
            for nth, s in enumerate(row):
                place[id(s)] = nth - (len(row) - 1) / 2


def _place_spots(rows: list[list[_Spot]]) -> float:
    """Set `x` of each spot near the mean of its neighbours, without overlap; returns the width."""
    for row in rows:
        x = 0.0
        for spot in row:
            spot.x = x + spot.wide / 2
            x += spot.wide + SIDE
        for spot in row:
            spot.x -= x / 2
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [_wanted(s, down=sweep % 2 == 0) for s in row]
            _separate(row, wanted)
    left = min(s.x - s.wide / 2 for row in rows for s in row) - SIDE
    for row in rows:
        for spot in row:
            spot.x -= left
    return max(s.x + s.wide / 2 for row in rows for s in row) + SIDE


def _wanted(spot: _Spot, down: bool) -> float:
    near = (spot.into if down else spot.out) or spot.into or spot.out
    return sum(s.x for s in near) / len(near) if near else spot.x


def _separate(row: list[_Spot], wanted: Sequence[float]) -> None:
    """Set `x` of spots near the wanted places, side by side: blocks that touch move together."""
    blocks: list[tuple[float, float, list[_Spot]]] = []  # sum of starts, width, spots
    for spot, at in zip(row, wanted, strict=True):
        block = (at - spot.wide / 2, spot.wide + SIDE, [spot])
        while blocks and _start(blocks[-1]) + blocks[-1][1] > _start(block):
            sums, width, spots = blocks.pop()
            block = (sums + block[0] - width * len(block[2]), width + block[1], spots + block[2])
        blocks.append(block)
    for block in blocks:
        x = _start(block)
        for spot in block[2]:
            spot.x = x + spot.wide / 2
            x += spot.wide + SIDE


def _start(block: tuple[float, float, list[_Spot]]) -> float:
    return block[0] / len(block[2])


def _edge(source: _Spot, target: _Spot) -> str:
    """A line from below a box, beside its layout, to the top of the box that reads it."""
    n = svg.number
    x0, x1, y1 = source.x, target.x, target.y
    start = y1 - BELOW + STUB  # rows are as high as their highest
    middle = (start + y1) / 2
    path = f"M{n(x0)} {n(source.y + source.high)}V{n(start)}"
    path += f"C{n(x0)} {n(middle)} {n(x1)} {n(middle)} {n(x1)} {n(y1)}"
    if target.node is None:
        path += f"V{n(y1 + target.high)}"
    else:
        path += f"M{n(x1 - 3)} {n(y1 - 6)}L{n(x1)} {n(y1)}L{n(x1 + 3)} {n(y1 - 6)}"
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".7"/>'


def _box(spot: _Spot, fills: svg.Fills) -> str:
    n = spot.node
    assert n is not None
    kind = _kind(n)
    left, radius = spot.x - WIDE / 2, 12 if kind == "collective" else 2
    paint = f'rx="{radius}" fill="{fills[kind]}" stroke="currentColor"'
    parts = [svg.rect(left, spot.y, WIDE, spot.high, paint, repr(n))]
    for nth, words in enumerate(spot.lines):
        size = 11 if nth == 0 else 10
        most = int(WIDE / (0.57 * size)) - 1
        line = words if len(words) <= most else words[: most - 1] + "\u2026"
        more = f'font-size="{size}" fill="#000"' + (' font-weight="600"' if nth == 0 else "")
        parts.append(svg.text(spot.x, spot.y + 14 + nth * LINE, line, "middle", more))
    if spot.out:
        layout = _layout(n) + ("" if n.dtype == "bf16" else f" {n.dtype}")
        more = 'font-size="10" class="layout"'
        parts.append(svg.text(spot.x + 6, spot.y + spot.high + 12, layout, "start", more))
    return "".join(parts)
