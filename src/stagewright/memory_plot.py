"""Memory over a step as a page: drawn by hand, one file, no network, readable on paper.

Every class of ranks is a picture in SVG. A script adds a cursor, for the mouse and for the keys,
and a table of what is held where it stands; without it the pictures and the tables of the peaks
remain.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stagewright import memory
from stagewright.errors import UserError
from stagewright.program import CATEGORIES, PHASES, RankClass
from stagewright.report import alive_in_words, quantity, spans

if TYPE_CHECKING:
    from stagewright.compiler import Compiled

POINTS = 500
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 260, 70, 12, 36

# Okabe and Ito's colours, which people with any colour vision tell apart; bottom to top.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#999999",
    "gathered_parameters": "#CC79A7",
    "activations": "#E69F00",
    "communication": "#009E73",
    "workspace": "#D55E00",
}


class _Plot(NamedTuple):
    """One class of ranks, in few points."""

    of: RankClass
    rows: list[int]
    held: list[list[int]]  # by category
    peak: int  # a point


def page(compiled: Compiled) -> str:
    """The page for a compiled training run."""
    if compiled.run.mode != "train":
        raise UserError(
            f"--memory-plot is for training, got mode={compiled.run.mode}, where all is held all "
            "the time; drop it"
        )
    plots = [_plot(of) for of in compiled.program.classes]
    most = max(max(map(sum, zip(*p.held, strict=True))) for p in plots)
    used = [n for i, n in enumerate(CATEGORIES) if any(any(p.held[i]) for p in plots)]
    title = html.escape(compiled.run.describe())
    keys = "".join(
        f'<span class="key"><svg width="14" height="14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{COLOURS[n]}"/></svg> {n.replace("_", " ")}</span>'
        for n in used
    )
    body = "".join(_section(nth, p, most) for nth, p in enumerate(plots))
    data = json.dumps([_data(p) for p in plots], separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Memory: {title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>Memory of a rank over one step</h1><p>{title}</p>"
        f"<p>Bytes held while each task runs, in the order of issue, with ideal allocation. "
        f"Focus a picture and use the arrow keys, Home, End, or P for the peak.</p>"
        f'<p class="keys">{keys}</p>{body}'
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _plot(of: RankClass) -> _Plot:
    rows, held = memory.samples(of, POINTS)
    peak = int(np.argmax(held.sum(axis=0)))
    return _Plot(of, rows.tolist(), held.tolist(), peak)


def _data(p: _Plot) -> dict[str, Any]:
    tasks = p.of.tasks
    return {
        "x": [round(LEFT + i * _step(p), 2) for i in range(len(p.rows) + 1)],
        "peak": p.peak,
        "held": {n: by for n, by in zip(CATEGORIES, p.held, strict=True) if any(by)},
        "task": [
            f"{tasks.names[tasks.name[r]]} ({PHASES[tasks.phase[r]]}"
            + (f", microbatch {tasks.microbatch[r]}" if tasks.microbatch[r] >= 0 else "")
            + ")"
            for r in p.rows
        ],
    }


def _step(p: _Plot) -> float:
    return (WIDTH - LEFT - 10) / len(p.rows)


def _section(nth: int, p: _Plot, most: int) -> str:
    of, row = p.of, p.rows[p.peak]
    tasks = of.tasks
    ranks = spans([int(r) for r in of.ranks])
    where = int(tasks.microbatch[row])
    during = f"{tasks.names[tasks.name[row]]}" + (f" of microbatch {where}" if where >= 0 else "")
    rows = "".join(
        f"<tr><td>{html.escape(g.category.replace('_', ' '))}</td>"
        f"<td>{html.escape(alive_in_words(g._asdict()))}</td><td class=n>{g.bytes:,}</td></tr>"
        for g in memory.groups(of.values, row)[:12]
    )
    peak = quantity(of.memory["peak"], "B")
    return (
        f"<section><h2>Stage {of.pipeline_rank}: ranks {ranks}</h2>"
        f"<p>Peak {peak} ({of.memory['peak']:,} bytes) during {html.escape(during)}.</p>"
        f"{_picture(nth, p, most)}"
        f'<div class="at" id="at{nth}" aria-live="polite"></div>'
        f"<details><summary>What is alive at the peak</summary><table><thead><tr><th>category"
        f"<th>values<th>bytes</tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def _picture(nth: int, p: _Plot, most: int) -> str:
    step, bottom = _step(p), HEIGHT - BOTTOM
    scale = (bottom - TOP) / most if most else 0.0
    below = [0] * len(p.rows)
    areas: list[str] = []
    for name, by in zip(CATEGORIES, p.held, strict=True):
        if not any(by):
            continue
        above = [a + b for a, b in zip(below, by, strict=True)]
        edge = " ".join(_stairs(above, step, bottom, scale, range(len(above))))
        back = " ".join(_stairs(below, step, bottom, scale, reversed(range(len(below)))))
        areas.append(
            f'<polygon points="{edge} {back}" fill="{COLOURS[name]}"><title>'
            f"{name.replace('_', ' ')}</title></polygon>"
        )
        below = above
    ticks = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{quantity(value, "B")}</text>'
        for value, y in ((v, bottom - v * scale) for v in _ticks(most))
    )
    x = LEFT + (p.peak + 0.5) * step
    label = f"stage {p.of.pipeline_rank}: peak {quantity(p.of.memory['peak'], 'B')}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" data-nth="{nth}" '
        f'aria-label="Memory over the tasks of {label}">{ticks}{"".join(areas)}'
        f'<path d="M{x:.1f} {TOP}V{bottom}" class="peak"/>'
        f'<text x="{x:.1f}" y="{TOP - 2}" text-anchor="{"end" if x > WIDTH / 2 else "start"}">'
        f'peak</text><path class="cursor" d=""/>'
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"tasks in the order of issue (0 to {len(p.of.tasks):,})</text></svg>"
    )


def _stairs(values: list[int], step: float, bottom: int, scale: float, order: Any) -> list[str]:
    """Corners of a line that is level while a point lasts; those that add nothing left out."""
    order = list(order)
    forward = len(order) < 2 or order[0] < order[-1]
    corners: list[str] = []
    last = None
    for n, i in enumerate(order):
        ends = n == len(order) - 1
        y = f"{bottom - values[i] * scale:.1f}"
        if y != last or ends:
            x0, x1 = (i, i + 1) if forward else (i + 1, i)
            if last is not None:
                corners.append(f"{LEFT + x0 * step:.1f},{last}")
            corners.append(f"{LEFT + x0 * step:.1f},{y}")
            if ends:
                corners.append(f"{LEFT + x1 * step:.1f},{y}")
            last = y
    return corners


def _ticks(most: int) -> list[int]:
    """Round numbers up to the largest: three to six of them.

    >>> _ticks(81_000_000_000)
    [0, 20000000000, 40000000000, 60000000000, 80000000000]
    """
    each = 1
    for factor in (1, 2, 5):
        unit = factor
        while most // unit > 5:
            unit *= 10
        each = unit if each == 1 else min(each, unit)
    return list(range(0, most + 1, each))


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:1.5em auto;padding:0 1em;
color:#111;background:#fff}h1{font-size:1.4em}h2{font-size:1.1em;margin:1.4em 0 .2em}
svg{width:100%;height:auto}.key svg{width:14px;height:14px;vertical-align:-2px}
.key{margin-right:1.2em;white-space:nowrap}text{font-size:12px;fill:#111}
.grid{stroke:#ccc;stroke-width:.6}polygon{stroke:#fff;stroke-width:.5}
.peak{stroke:#111;stroke-dasharray:4 3;fill:none}.cursor{stroke:#111;stroke-width:1.4;fill:none}
svg:focus{outline:3px solid #0072B2;outline-offset:2px}table{border-collapse:collapse}
td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}.n{text-align:right}
.at{min-height:1.5em;font-variant-numeric:tabular-nums}
@media print{details{display:block}details>*{display:block}section{break-inside:avoid}
polygon{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

_SCRIPT = (
    """
(function(){
'use strict';
var data=JSON.parse(document.getElementById('data').textContent);
var units=['B','kB','MB','GB','TB','PB'];
function size(n){
  var u=0;while(n>=999.5&&u<5){n/=1000;u++}
  return Number(n.toPrecision(3))+' '+units[u];
}
document.querySelectorAll('svg[data-nth]').forEach(function(svg){
  var nth=+svg.dataset.nth,d=data[nth],at=d.peak,out=document.getElementById('at'+nth);
  var cursor=svg.querySelector('.cursor'),names=Object.keys(d.held);
  function show(i){
    at=Math.max(0,Math.min(d.task.length-1,i));
    var x=(d.x[at]+d.x[at+1])/2,total=0;
    cursor.setAttribute('d','M'+x+' %TOP%V%BOTTOM%');
    var parts=names.map(function(n){var b=d.held[n][at];total+=b;
      return b?n.replace('_',' ')+' '+size(b):''}).filter(Boolean);
    out.textContent=size(total)+' during '+d.task[at]+': '+parts.join(', ');
  }
  svg.addEventListener('mousemove',function(e){
    var box=svg.getBoundingClientRect(),x=(e.clientX-box.left)/box.width*%WIDTH%;
    show(Math.floor((x-d.x[0])/(d.x[d.x.length-1]-d.x[0])*d.task.length));
  });
  svg.addEventListener('focus',function(){show(at)});
  svg.addEventListener('keydown',function(e){
    var by=e.shiftKey?10:1,to={ArrowLeft:at-by,ArrowRight:at+by,Home:0,End:d.task.length-1,
      p:d.peak,P:d.peak}[e.key];
    if(to!==undefined){show(to);e.preventDefault()}
  });
});
})();
""".replace("%TOP%", str(TOP))
    .replace("%BOTTOM%", str(HEIGHT - BOTTOM))
    .replace("%WIDTH%", str(WIDTH))
)
