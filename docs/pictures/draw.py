"""Draws the pictures of the README and of these pages: `python docs/pictures/draw.py`.

Each is cut from the page of a command that stands beside it here, not drawn by hand; a test asserts
that the files are current.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1] / "src"))

MEMORY = (
    "stagewright show llama3.1-70b --tp 8 --pp 4 --dp 4 --sequence-parallel --zero 1 "
    "--global-batch-size 32"
)
STAGES = (0, 3)
WIDTH, HEIGHT, TITLE, LEGEND = 960, 260, 26, 30


def memory() -> str:
    """What GPUs of the first and of the last stage hold over a step."""
    page = _page(f"{MEMORY} --memory-plot memory.html", "memory.html")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    pictures = re.findall(r'<svg viewBox[^>]*>(.*?)</svg>(?=<div class="at")', page, re.DOTALL)
    heads = re.findall(r"<h2>(.*?)</h2><p>(.*?)</p>", page)
    keys = re.findall(r'fill="(#\w+)"/></svg> ([\w ]+)</span>', page)
    parts: list[str] = []
    for nth, stage in enumerate(STAGES):
        top = LEGEND + nth * (TITLE + HEIGHT)
        title = f"{heads[stage][0]}. {heads[stage][1].split(' (')[0]}"
        parts.append(f'<text x="8" y="{top + 16}" class="title">{title}</text>')
        parts.append(f'<g transform="translate(0 {top + TITLE})">{pictures[stage]}</g>')
    for nth, (colour, name) in enumerate(keys):
        x = 70 + 140 * nth
        parts.append(f'<rect x="{x}" y="8" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="20">{name}</text>')
    rules = "".join(re.findall(r"(?:text|\.grid|polygon|\.peak)\{[^}]*\}", style))
    height = LEGEND + len(STAGES) * (TITLE + HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>Memory of a GPU over a step: {MEMORY}</title>"
        f"<style>text{{font-family:system-ui,sans-serif}}{rules}.title{{font-size:15px}}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _page(command: str, name: str) -> str:
    """The page that a command writes."""
    from stagewright import cli

    with tempfile.TemporaryDirectory() as place:
        words = [f"{place}/{name}" if word == name else word for word in shlex.split(command)[1:]]
        cli.commands.main(words, prog_name="stagewright", standalone_mode=False)
        return Path(place, name).read_text(encoding="utf-8")


PICTURES = {"memory.svg": memory}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
