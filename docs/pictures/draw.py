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
WIDTH = 760
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1] / "src"))

MEMORY: dict[str, Any] = {
    **{"model": "llama3.1-70b", "tp": 8, "pp": 4, "dp": 4, "sequence_parallel": True},
    **{"zero": 1, "global_batch_size": 32},
}
STAGES = (0, 3)
POINTS = 500
TITLE = 26


def memory() -> str:
    """What GPUs of the first and of the last stage hold over a step."""
    from stagewright import compile
    from stagewright.pages.memory import label, peak_in_words
    from stagewright.pictures import memory as pictures
    from stagewright.run import Run

    run = Run(**MEMORY)
    classes = [compile(run).program.classes[stage] for stage in STAGES]
    levels = [pictures.over_rows(of, POINTS) for of in classes]
    most = max(max(each.total) for each in levels)
    drawn = [("", pictures.legend(levels, "keys"))]
    for of, each in zip(classes, levels, strict=True):
        peak = peak_in_words(of).split(" (")[0]
        title = f"Stage {of.pipeline_rank}: ranks {of.ranks[0]}-{of.ranks[-1]}. {peak}"
        name = f"stage{of.pipeline_rank}"
        drawn.append((title, pictures.picture(each, name, label(of, each), most)))
    return _file(f"Memory of a GPU over a step: {run.describe()}", drawn)


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
            re.sub(r'^<svg (.*?) style="[^"]*"', rf'<svg y="{top:g}" height="{high}" \1', picture)
        )
        top += float(high)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" role="img" '
        f'color="#000" font-family="system-ui,sans-serif"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{top:g}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


PICTURES = {"memory.svg": memory}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
