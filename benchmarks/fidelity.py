"""Writes docs/fidelity.md: every comparison with what others measured, computed or published.

    python benchmarks/fidelity.py

Step times are those of docs/step-times.csv, which `benchmarks/step_times.py` writes in some
minutes. A test holds the sections against the page.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import stage_paper as paper
from stagewright.evidence import kernels as kernel_rows
from stagewright.evidence.rows import Prediction, compare
from stagewright.evidence.statistics import grouped
from stagewright.evidence.training import sources
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "fidelity.md"

INTRODUCTION = """\
# Fidelity

Everything that this project compares with something outside it: our number, theirs, the error.
Rows are never left out because they are far off; what is known of the reason stands beside them.
Errors are ours / theirs - 1; means and medians are of their sizes. Written by
`python benchmarks/fidelity.py`.
"""


class Part(NamedTuple):
    """A section: lines of the page, and what stands of it in the table at its head."""

    lines: list[str]
    glance: list[tuple[str, ...]]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Of Markdown; titles that end with `:` are of columns of numbers."""
    align = ["---:" if t.endswith(":") else "---" for t in titles]
    head = [f"| {' | '.join(t.rstrip(':') for t in titles)} |", f"|{'|'.join(align)}|"]
    return [*head, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def module(path: Path) -> ModuleType | None:
    """A module of the tests; None if there is no such file."""
    if not path.exists():
        return None
    sys.path[:0] = [str(TESTS), str(path.parent)]
    spec = importlib.util.spec_from_file_location(f"fidelity_{path.stem}", path)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


def errors(some: Sequence[float]) -> tuple[str, str, str]:
    """Mean, median and worst, as text."""
    sizes = np.abs(some)
    worst = max(some, key=abs)
    return f"{sizes.mean():.1%}", f"{np.median(sizes):.1%}", f"{worst:+.1%}"


EXACT = ("0", "0", "0")

# ---- sections ------------------------------------------------------------------------------------


def stage_paper() -> Part:
    """Tables VII, V and I of STAGE's paper."""
    cases = list(paper.stage_paper())
    lines = [*paper.summary(cases, ""), "", *paper.differing(cases, "VII")]
    glance: list[tuple[str, ...]] = []
    for name, what in (("VII", "volumes"), ("V", "peak memory"), ("I", "operations")):
        rows = [r for _, some in cases for r in some if r.table == name and r.error is not None]
        told = errors([0.0 if r.same else r.error or 0.0 for r in rows])
        same = sum(r.same for r in rows)
        glance.append((f"{what}, Table {name}; {same} to the last digit", "STAGE's paper",
                       str(len(rows)), *told))  # fmt: skip
    return Part(lines, glance)


def conformance() -> Part:
    """Programs of PyTorch, of docs/reference/conformance/pytorch.md, which a test keeps current."""
    page = (ROOT / "docs" / "reference" / "conformance" / "pytorch.md").read_text(encoding="utf-8")
    found = page[page.index("| case | mesh |") :].split("\n## ")[0].rstrip().split("\n")
    names, *rows = [line.strip("|").split("|") for line in found if line.startswith("| ")]
    glance: list[tuple[str, ...]] = []
    for column, name in [*enumerate(names)][2:]:
        cells = [row[column].strip() for row in rows if row[column].strip()]
        off = [float(cell.split("%")[0]) / 100 for cell in cells if "%" in cell]
        equal = sum(cell == "=" for cell in cells)
        off += [0.0] * equal
        what = f"{name.strip()}; {equal} equal" if equal else name.strip()
        told = errors(off) if len(off) == len(cells) else ("", "", "")
        glance.append((what, "PyTorch 2.13", str(len(cells)), *told))
    lines = [
        "Programs of PyTorch 2.13 on one rank under a fake process group (`tests/conformance/`), "
        "under `--framework torchtitan`; [frameworks](internals/frameworks.md) has the columns.",
        "",
        *found,
    ]
    return Part(lines, glance)


def flops() -> Part:
    """Products and attention against torch's FlopCounterMode."""
    of: Any = module(TESTS / "conformance" / "test_flops.py")
    assert of
    rows: list[Sequence[object]] = []
    for case in of.OURS:
        ours = of.counted(case)
        for phase in ("forward", "backward"):
            for kind, torchs in of.CASES[case][phase].items():
                flops, moved = ours[phase, kind]
                rows.append((case, phase, kind, f"{flops:,}", f"{torchs['flops']:,}",
                             f"{moved:,}", f"{torchs['bytes']:,}"))  # fmt: skip
    lines = [
        "Small models on one rank, each operation by itself. torch counts masked pairs of causal "
        "flash attention, twice ours; and products of grouped queries in parts read heads of keys "
        "and values once for each query's head.",
        "",
        *table(("case", "phase", "kind", "FLOPs, ours:", "torch:", "bytes, ours:", "torch:"), rows),
    ]
    return Part(lines, [("FLOPs and bytes of kernels", "torch's FlopCounterMode",
                         str(len(rows)), *EXACT)])  # fmt: skip


def schedules() -> Part:
    """Orders of pipeline actions."""
    of: Any = module(TESTS / "unit/schedule/test_pipeline.py")
    assert of
    found: dict[str, list[bool]] = {}
    for row in of.RECORDED:
        order = of.make(*of.recorded(row))
        same = [" ".join(map(str, steps)) for steps in order] == row["ranks"]
        found.setdefault(row["schedule"], []).append(same)
    for p, m in ((4, 8), (8, 20)):
        text = (of.PUBLISHED / f"deepseek-dualpipe-pp{p}-m{m}.csv").read_text()
        found.setdefault("DualPipe (deepseek-ai)", []).append(of.to_csv(of.dualpipe(p, m)) == text)
    lines = [
        "Action by action, on every rank: what torch 2.13's schedule classes execute, and "
        "DeepSeek's published DualPipe. Bubbles equal the closed forms of 1F1B, (p-1)(F+B), ZB1P, "
        "(p-1)(F+B-2W), and DualPipe, (p/2-1)(F&B+B-3W), for many sizes and costs "
        "(`tests/unit/schedule/test_pipeline.py`).",
        "",
        *table(("schedule", "orders:", "equal:"),
               [(name, len(some), sum(some)) for name, some in found.items()]),
    ]  # fmt: skip
    n = sum(map(len, found.values()))
    equal = sum(map(sum, found.values()))
    return Part(lines, [(f"orders of actions; {equal} equal", "torch 2.13, DeepSeek", str(n),
                         *EXACT)])  # fmt: skip


def published_parameters() -> Part:
    """Parameters of presets."""
    text = (TESTS / "data" / "published_parameters.csv").read_text(encoding="utf-8")
    rows: list[Sequence[object]] = []
    off: list[float] = []
    for row in csv.DictReader(text.splitlines()):
        if row["model"] in PRESETS:
            ours, theirs = parameters(PRESETS[row["model"]])[0], int(row["parameters"])
            off.append(ours / theirs - 1)
            rounded = "" if ours == theirs else f"{off[-1]:+.2%}"
            rows.append((row["model"], f"{ours:,}", f"{theirs:,}", rounded, row["source"]))
    lines = table(("model", "ours:", "published:", "error:", "source"), rows)
    same = sum(not x for x in off)
    return Part(lines, [(f"parameters; {same} equal, others are published rounded", "see there",
                         str(len(rows)), *errors(off))])  # fmt: skip


def memory() -> Part:
    """Peaks of memory, of docs/memory.md, which a test keeps current."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    start = page.index("| source | rows |")
    lines = page[start:].rstrip().replace("\n## ", "\n### ").split("\n")
    glance: list[tuple[str, ...]] = []
    for line in lines[2:]:
        if not line:
            break
        source, n, mean, median, _, worst = (cell.strip() for cell in line.strip("|").split("|"))
        glance.append(("peak memory", source, n, mean, median, worst))
    ratios = [float(line.split("|")[5]) - 1 for line in lines if line.startswith("| megatron-")]
    glance.append(("activations of layers", "Korthikanti et al., equations", str(len(ratios)),
                   *errors(ratios)))  # fmt: skip
    lines = ["[memory.md](memory.md) says what is compared.", "", *lines]
    return Part(lines, glance)


def step_times() -> Part:
    """Training measurements: what each source assumes, rows with a reason of their own."""
    of: Any = module(ROOT / "benchmarks" / "step_times.py")
    assert of
    rows: list[Prediction] = of.predictions()
    lines = [
        "Every published training run that settings express, a line each in "
        "[step-times.csv](step-times.csv); [time.md](time.md#how-good-it-is) has the errors by "
        "accelerator, precision, GPUs and tokens, and rows that are not compared. Errors are those "
        "of the time of a step; rows under a tenth of the peak stand by themselves.",
    ]
    for name, source in sources().items():
        entries = [f"`{k}` {each.value}: {each.reason}" for k, each in source.assumed.items()]
        lines += ["", f"### {name}", "", *(f"- {text}" for text in (*entries, *source.notes))]
        told = [line(o) for o in rows if o.source == name and (o.reason or o.fitted)]
        if told:
            titles = ("row", "quantity", "ours:", "measured:", "error of time:", "fitted", "why")
            lines += ["", *table(titles, told)]
    glance = [("time of a step", g.group, str(g.every.rows), f"{g.every.mape:.1%}",
               f"{g.every.median:.1%}", f"{g.every.worst[1]:+.1%}")
              for g in grouped(rows, "source")]  # fmt: skip
    return Part(lines, glance)


def line(o: Prediction) -> tuple[str, ...]:
    """A measurement's cells."""
    numbers = f"{o.predicted:.4g}", f"{o.measured:.4g}", f"{o.error_of_time:+.1%}"
    return (o.row, o.quantity, *numbers, o.fitted, o.reason)


def kernels() -> Part:
    """Kernels and collectives: residuals by source and hardware."""
    by: dict[tuple[str, str, str], list[float]] = {}
    glance: dict[str, list[float]] = {}
    for o in compare(kernel_rows.rows()):
        assert isinstance(o, Prediction)
        hardware, kernel, dtype = o.row.split()[:3]
        by.setdefault((o.source, hardware, f"{kernel} {dtype}"), []).append(o.error)
        glance.setdefault(o.source, []).append(o.error)
    rows = [(*key, len(some), *errors(some), f"{np.mean(some):+.1%}") for key, some in by.items()]
    lines = [
        "Rows that no constant was fitted to. `stagewright validate --source aiconfigurator` and "
        "`--source nccl-tests` list each.",
        "",
        *table(("source", "hardware", "kernel", "rows:", "mean:", "median:", "worst:", "bias:"),
               rows),
    ]  # fmt: skip
    return Part(lines, [("time of a kernel", source, str(len(some)), *errors(some))
                        for source, some in glance.items()])  # fmt: skip


def astra_sim() -> Part:
    """Our simulator and ASTRA-sim's, under its assumptions."""
    of: Any = module(ROOT / "benchmarks" / "astra_sim.py")
    assert of
    data = json.loads(of.DATA.read_text(encoding="utf-8"))
    rows: list[Sequence[object]] = []
    off: list[float] = []
    for case in data["cases"]:
        recorded, mine = np.array(case["rank_ns"]), np.array(of.ours(case, data["machine"])[0])
        off.append(mine.max() / recorded.max() - 1)
        worst = np.abs(mine / recorded - 1).max()
        ends = f"{mine.max() / 1e6:.4f}", f"{recorded.max() / 1e6:.4f}"
        rows.append((case["name"], len(recorded), *ends, f"{off[-1]:+.3%}", f"{worst:.3%}"))
    told = "; ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        f"The end of a step, with ASTRA-sim's assumptions: {told}. [astra-sim.md](astra-sim.md).",
        "",
        *table(("case", "GPUs:", "ours, ms:", "ASTRA-sim, ms:", "step:", "worst rank:"), rows),
    ]
    return Part(lines, [("time of a step", "ASTRA-sim", str(len(rows)), *errors(off))])


SECTIONS: dict[str, Callable[[], Part]] = {
    "STAGE's tables": stage_paper,
    "FLOPs and bytes of kernels": flops,
    "Pipeline schedules": schedules,
    "Parameters": published_parameters,
    "Kernels and collectives": kernels,
    "ASTRA-sim": astra_sim,
    "Memory": memory,
    "PyTorch programs": conformance,
    "Step times": step_times,
}


TITLES = ("what", "source", "rows:", "mean:", "median:", "worst:")


def section(title: str, part: Part) -> str:
    """As it stands on the page; first what the table at its head has of it."""
    return "\n".join([f"## {title}", "", *table(TITLES, part.glance), "", *part.lines]).rstrip()


def page() -> str:
    """The whole page."""
    sections = [section(title, make()) for title, make in SECTIONS.items()]
    head = table(TITLES, ())
    rows = [line for text in sections for line in text.split("\n\n")[1].split("\n")[2:]]
    return "\n".join([INTRODUCTION, *head, *rows, ""]) + "\n" + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
