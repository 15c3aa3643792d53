"""Draws the pictures of the README and of these pages: `python docs/pictures/draw.py`.

Each is what Stagewright draws for the settings that stand beside it here; a test asserts that the
files are current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH = 600
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1] / "src"))

HARDWARE = "h100-sxm"
STEP: dict[str, Any] = {
    **{"model": "llama3.1-70b", "tp": 8, "pp": 4, "dp": 4, "sequence_parallel": True},
    **{"zero": 1, "global_batch_size": 64},
}
POINTS = 500
TITLE = 26


def step() -> str:
    """When GPUs of each stage compute and communicate, and what those of the first hold."""
    from stagewright import compile, simulate
    from stagewright.run.settings import Run
    from stagewright.views.pictures import memory, timeline

    run = Run(**STEP)
    found = simulate(compile(run), HARDWARE)
    levels = memory.over_seconds(found.memory_over_time[0], found.seconds, POINTS)
    scale = memory.Scale(capacity=round(found.machine.hardware.memory_gb * 1e9))
    drawn = [
        ("Kernels and communication of a GPU of each stage", timeline.picture(found.timeline)),
        ("Memory of a GPU of the first", memory.legend([levels], "keys")),
        ("", memory.picture(levels, "held", "Memory over the step", scale)),
    ]
    return _file(f"One step of {run.describe()} on {found.machine}", drawn)


def _file(title: str, drawn: Sequence[tuple[str, str]]) -> str:
    """Pictures below each other as a file, on white; each under its title."""
    parts: list[str] = []
    top = 8.0
    for name, picture in drawn:
        if name:
            parts.append(f'<text x="8" y="{top + 16:g}" font-size="15">{name}</text>')
            top += TITLE
        (high,) = re.findall(r'^<svg viewBox="0 0 [\d.]+ ([\d.]+)"', picture)
        parts.append(
            re.sub(
                r'^<svg (.*?) width="\d+" (.*?) style="[^"]*"',
                rf'<svg y="{top:g}" width="{WIDTH}" height="{high}" \1 \2',
                picture,
            )
        )
        top += float(high)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" role="img" '
        f'color="#000" font-family="system-ui,sans-serif"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{top:g}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


PICTURES = {"step.svg": step}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
