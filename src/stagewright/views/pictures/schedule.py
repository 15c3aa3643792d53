"""A pipeline schedule: ranks down, time across, an action a box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagewright.schedule.actions import SLOTS, Action, Order, parts
from stagewright.schedule.play import play
from stagewright.views.pictures import svg
from stagewright.views.pictures.colours import ACTIONS

NAMES = {
    "F": "F forward",
    "B": "B backward",
    "I": "I gradient of the input",
    "W": "W gradient of the weights",
}
LEFT, ROW = 62, 18
MAX_BOXES = 6000
"""Boxes in a picture; of more, the picture shows the beginning and the end."""
MAX_RANKS = 16
"""Rows in a picture; of more, the picture shows the first and the last."""
_FINE = 0.7
"""Size of the names of actions, which a phone leaves out, as a share of other text."""


class _Box(NamedTuple):
    start: float
    end: float
    actions: tuple[Action, ...]


def picture(order: Order) -> svg.Picture:
    """The actions of each pipeline rank over time; a backward takes two slots, all others one."""
    every = _rows(order)
    rows = every
    if len(every) > MAX_RANKS:
        rows = every[: MAX_RANKS // 2] + every[-MAX_RANKS // 2 :]
    end = max(row[-1].end for _, row in every)
    busy = sum(box.end - box.start for _, row in every for box in row)
    shown = _window(rows, end)
    kinds = [k for k in ACTIONS if any(k == a.kind for _, r in every for b in r for a in b.actions)]
    fills = svg.Fills("schedule", {NAMES[k]: ACTIONS[k] for k in kinds})
    heading, top = fills.heading([NAMES[k] for k in kinds])
    gap = 26.0 if len(shown) > 1 else 0.0
    scale = (svg.WIDTH - LEFT - gap - 4) / sum(last - first for first, last in shown)
    name_of = _names([a for _, row in rows for box in row for a in box.actions], scale)
    drawn = [heading]
    x = float(LEFT)
    for first, last in shown:
        for index, (_, row) in enumerate(rows):
            boxes = [b for b in row if b.start >= first and b.end <= last]
            at = x - first * scale, top + 6 + index * ROW
            drawn.append(_boxes(boxes, fills, at, scale, name_of))
        x += (last - first) * scale + gap
    bottom = top + 6 + len(rows) * ROW
    for index, (rank, _) in enumerate(rows):
        y = top + 6 + index * ROW + 12
        drawn.append(svg.text(LEFT - 6, y, f"rank {rank}", "end", f'font-size="{svg.SMALL}em"'))
    if gap:
        middle = LEFT + (shown[0][1] - shown[0][0]) * scale + gap / 2
        drawn.append(svg.text(middle, (top + bottom) / 2 + 4, "...", "middle"))
    missing = _missing(len(every) - len(rows), shown, end)
    if missing:
        bottom += 18
        drawn.append(svg.text(0, bottom - 4, missing))
    label = (
        f"Pipeline schedule of {len(order)} ranks in {end:g} slots; ranks are idle "
        f"{1 - busy / (end * len(every)):.1%} of the time"
    )
    return svg.figure(bottom + 4, label, drawn)


def _missing(ranks: int, shown: Sequence[tuple[float, float]], end: float) -> str:
    """The ranks and slots that the picture leaves out, in words; empty if it shows all."""
    omitted = [f"{ranks} ranks in the middle"] if ranks else []
    if len(shown) > 1:
        omitted.append(f"slots {shown[0][1]:g} to {shown[1][0]:g} of {end:g}")
    return "Not shown: " + "; ".join(omitted) if omitted else ""


def _rows(order: Order) -> list[tuple[int, list[_Box]]]:
    """Pipeline ranks and their boxes."""
    times = play(order, SLOTS)
    return [
        (rank, [_Box(*times[parts(step)[0]], parts(step)) for step in steps])
        for rank, steps in enumerate(order)
    ]


def _window(rows: Sequence[tuple[int, list[_Box]]], end: float) -> list[tuple[float, float]]:
    """The spans of slots that the picture shows: all, or as many at the start as at the end."""
    # A box narrower than three units cannot be read.
    slots = min((svg.WIDTH - LEFT) / 3, MAX_BOXES / len(rows))
    if end <= slots:
        return [(0.0, end)]
    half = slots // 2
    return [(0.0, half), (end - half, end)]


_Names = Callable[[Action], str]


def _names(actions: Sequence[Action], slot: float) -> _Names:
    """The names of boxes, all in one form: the longest that fits into a slot."""
    forms: list[_Names] = [str, lambda a: f"{a.kind}{a.microbatch}", lambda a: str(a.microbatch)]
    for form in forms:
        if svg.text_width("0" * max(len(form(a)) for a in actions), _FINE * 0.8) < slot:
            return form
    return lambda action: ""


def _boxes(
    boxes: Sequence[_Box], fills: svg.Fills, at: tuple[float, float], scale: float, name_of: _Names
) -> str:
    """The boxes of each kind as one path, and their names."""
    paths: dict[str, list[str]] = {}
    words: list[str] = []
    for start, end, actions in boxes:
        width = (end - start) * scale / len(actions)
        for index, action in enumerate(actions):
            x, y = at[0] + start * scale + index * width, at[1]
            box = svg.box(x, y, max(width - 0.8, 0.6), ROW - 3)
            paths.setdefault(action.kind, []).append(box)
            if name := name_of(action):
                looks = f'font-size="{_FINE}em" dy=".35em" fill="{ACTIONS[action.kind].ink}"'
                middle = x + width / 2 - 0.4, y + (ROW - 3) / 2
                words.append(svg.text(*middle, name, "middle", f'class="fine" {looks}'))
    drawn = [svg.shape(path, fills[NAMES[kind]]) for kind, path in paths.items()]
    return "".join(drawn + words)
