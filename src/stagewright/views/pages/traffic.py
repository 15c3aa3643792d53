"""Who sends to whom, as tabs of a page: a matrix of all axes together, and one of each axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import quantity
from stagewright.program import traffic
from stagewright.views.pages.charts import Chart, chart
from stagewright.views.pictures import matrix


class TrafficMatrices(NamedTuple):
    """The matrices, and how to read them."""

    panels: list[tuple[str, Chart]]
    about: str
    left_out: str


def exchange(compiled: CompiledRun, data: dict[str, Any]) -> TrafficMatrices:
    """TrafficMatrices of bytes between ranks; what the script reads of them is added to `data`."""
    program = compiled.program
    edges = traffic.blocks(program)
    size = int(edges[1])
    every = [traffic.matrix(program, axis, edges) for axis in traffic.axes(program)]
    most = max(float(each.bytes.max(initial=0)) for each in every)
    busy = [
        each for each in every if matrix.is_worth_drawing(float(each.bytes.max(initial=0)), most)
    ]
    parts = {each.axis: each.bytes for each in every}
    panels: list[tuple[str, Chart]] = []
    if len(busy) > 1:
        total = np.sum([each.bytes for each in every], axis=0)
        panels.append(_panel(traffic.Matrix("all axes", edges, total), 0, data, parts))
    panels += [_panel(each, nth + 1, data) for nth, each in enumerate(busy)]
    small = [each for each in every if each not in busy]
    left_out = ""
    if small:
        sent = max(float(each.bytes.max()) for each in small)
        left_out = (
            f"Not drawn, at most {quantity(max(1, round(sent)), 'B')} per square: "
            f"{', '.join(each.axis for each in small)}."
        )
    blocks = (
        f"A square is {size} x {size} ranks that are neighbours in rank order; traffic within "
        "a block is on the diagonal. "
        if size > 1
        else ""
    )
    about = (
        f"{blocks}A collective counts as if its ranks exchanged data directly, each sending the "
        "same amount to every other; rings and trees move as many bytes between other pairs."
    )
    return TrafficMatrices(panels, about, left_out)


def _panel(
    along: traffic.Matrix, nth: int, data: dict[str, Any], parts: dict[str, Any] | None = None
) -> tuple[str, Chart]:
    name = f"matrix{nth}"
    data[name] = matrix.data(along)
    label = f"Bytes from each rank to each other along {along.axis}"
    drawn = chart(
        lambda _, width: matrix.picture(along, name, label, parts, width), name, live=name
    )
    return along.axis, drawn
