"""Simulates the systems of the FullFlat study and writes the tables of docs/studies/fullflat.md.

    python benchmarks/fullflat.py [--layouts]

Figures of the study, arXiv 2506.15006, are what its tool prints (github.com/HanjiangWu313/
calculon-MoE@e3eb609, Apache-2.0) for models/gpt-1.8T.json, examples/gpt_1.8_training_4096.json and
the files of systems/. What the tool assumes is switched on in our settings, one assumption after
the other. `--layouts` simulates the layouts of docs/studies/fullflat-layouts.csv again, which takes
minutes.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import stagewright as sw
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.ownership import HOURS_PER_YEAR
from stagewright.time.ownership import load as load_costs

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "docs" / "studies"
PAGE = STUDIES / "fullflat.md"
COSTS = STUDIES / "fullflat-costs.yaml"
LAYOUTS = STUDIES / "fullflat-layouts.csv"
GPUS = 4096
BATCHES = (128, 1024)
LAYOUT = {
    "tp": 8, "pp": 4, "ep": 16, "etp": 8, "dp": 128, "zero": 1, "sequence_parallel": True,
    "micro_batch_size": 1, "seq_length": 4096, "recompute": "selective", "flash_attention": False,
}  # fmt: skip
"""The execution of the study: TP 8, PP 4, DP 128, EP 16, ES 8 (expert slices: our etp)."""


class System(NamedTuple):
    """A system of the study, and the seconds per batch of 128 and of 1,024 that its tool gives."""

    file: str
    fixed: tuple[float, float]
    searched: float | None
    """Seconds of the best layout that its tool finds at a batch of 1,024."""
    layout: tuple[int, int, int, int] | None = None
    """tp, pp, dp and vpp of that layout."""


SYSTEMS = {
    "fullflat-h100": System("H100_80g", (2.5917, 6.6430), None),
    "fullflat-hbd8": System("TwoTiered_HBD8", (2.6702, 6.9836), 3.9846, (4, 8, 128, 15)),
    "fullflat-hbd64-sw": System(
        "TwoTiered_HBD64_SW_COLLECTIVE", (0.6085, 1.4662), 0.6645, (4, 8, 128, 15)
    ),
    "fullflat-hbd128-sw": System(
        "TwoTiered_HBD128_SW_COLLECTIVE", (0.6085, 1.4662), 0.6645, (4, 8, 128, 15)
    ),
    "fullflat-hbd64": System("TwoTiered_HBD64", (0.5310, 1.3300), 0.6323, (4, 4, 256, 30)),
    "fullflat-sw": System("Fullflat_SW_COLLECTIVE", (0.4367, 1.1987), 0.5839, (4, 1, 1024, 1)),
    "fullflat": System("Fullflat", (0.4028, 1.1062), 0.5723, (4, 1, 1024, 1)),
}
PARTS = {
    "fullflat-h100": (0.9652, 0.1936, 1.7282, 0.9550, 0.7835, 1.7363, 0.2764),
    "fullflat": (0.1743, 0.0242, 0.3253, 0.2355, 0.0443, 0.3014, 0.0009),
}
"""Seconds per batch of 1,024 that the tool prints: kernels forward, recomputed and backward,
collectives of tensor parallelism with those of expert slices, all-to-alls, pipeline bubble, exposed
communication of data parallelism."""
TOOL_MEMORY = 24.53e9
"""Bytes of a GPU that the tool prints, at both batches."""


# ---- assumptions of the tool as settings ---------------------------------------------------------


class Setup(NamedTuple):
    """A simulation: hardware, settings of the execution, and those of the run."""

    hardware: Hardware
    execution: Mapping[str, Any] = {"launch_mode": "ahead"}
    run: Mapping[str, Any] = {}


def with_link(setup: Setup, link: str, *, slower: float = 1.0, **figures: Any) -> Setup:
    """The setup with other figures of `scale_up` or `scale_out`, `slower` times as slow."""
    of = getattr(setup.hardware, link)
    shares = ("bandwidth_fraction", "medium_fraction", "low_latency_fraction")
    figures |= {name: getattr(of, name) / slower for name in shares}
    return with_figures(setup, **{link: of.model_copy(update=figures)})


def with_figures(setup: Setup, **figures: Any) -> Setup:
    """The setup with other figures of the hardware."""
    return setup._replace(hardware=setup.hardware.model_copy(update=figures))


def waiting(setup: Setup) -> Setup:
    """Kernels wait for all communication but that of data parallelism."""
    waits = frozenset({"tp", "ep", "pp"})
    return setup._replace(execution={**setup.execution, "no_overlap": waits})


def tiers_by_hand(setup: Setup) -> Setup:
    """Tensor parallelism and expert slices use the inner links, all else the outer network."""
    return with_link(setup, "scale_up", gpus=LAYOUT["tp"])


def messages_in_turn(setup: Setup) -> Setup:
    """An all-to-all of 16 is 15 messages, each of which starts when the one before has ended."""
    of = setup.hardware.scale_out
    return with_link(setup, "scale_out", latency_us=(LAYOUT["ep"] - 1) * of.latency_us)


def memory_beside_links(setup: Setup) -> Setup:
    """Bytes of a collective are also read and written in memory, before it and as a kernel."""
    hardware, link = setup.hardware, setup.hardware.scale_up
    through_link = 1 / (link.bandwidth_gb_s * link.bandwidth_fraction)
    through_memory = 4 / (hardware.memory_bandwidth_gb_s * hardware.memory_bandwidth_fraction)
    return with_link(setup, "scale_up", slower=1 + through_memory / through_link)


def whole_parts(setup: Setup) -> Setup:
    """With sums in switches, a rank of n sends and receives all n parts, its own included."""
    if not setup.hardware.scale_up.in_network_reduction:
        return setup
    return with_link(setup, "scale_up", slower=LAYOUT["tp"] / (LAYOUT["tp"] - 1))


def sums_in_software(setup: Setup) -> Setup:
    """Without sums in switches, a reduce_scatter or all_gather moves half as much again."""
    if setup.hardware.scale_up.in_network_reduction:
        return setup
    return with_link(setup, "scale_up", slower=1.5)


def gathered_saved(setup: Setup) -> Setup:
    """Inputs that expert slices gather in forward are saved for backward."""
    return setup._replace(run={**setup.run, "activation_gather": "keep"})


def no_vocabulary(setup: Setup) -> Setup:
    """The tool has layers alone: neither embedding nor output layer nor loss."""
    return setup._replace(run={**setup.run, "vocab": 64})


ASSUMED: Mapping[str, Callable[[Setup], Setup]] = {
    "waits": waiting,
    "tiers": tiers_by_hand,
    "messages": messages_in_turn,
    "memory": memory_beside_links,
    "own part": whole_parts,
    "software": sums_in_software,
    "saved": gathered_saved,
    "no ends": no_vocabulary,
}
"""Assumptions of the tool in the order of the tables' columns."""


# ---- simulations ---------------------------------------------------------------------------------


@cache
def compiled(batch: int, changed: tuple[tuple[str, Any], ...]) -> sw.Compiled:
    """The run of the study at a batch, with some settings changed."""
    settings = LAYOUT | {"global_batch_size": batch} | dict(changed)
    return sw.compile("gpt-1.8t", **settings)


def step(setup: Setup, batch: int) -> Any:
    """The simulated step of a setup."""
    run = compiled(batch, tuple(sorted(setup.run.items())))
    return sw.simulate(run, setup.hardware, **setup.execution)


def ladder(system: str, batch: int) -> list[float]:
    """Seconds as simulated, then with one assumption of the tool after the other."""
    setup = Setup(resolve(system))
    seconds = [step(setup, batch).seconds]
    for assumed in ASSUMED.values():
        setup = assumed(setup)
        seconds.append(step(setup, batch).seconds)
    return seconds


def assuming_all(system: str) -> Setup:
    """The system with all that the tool assumes."""
    setup = Setup(resolve(system))
    for assumed in ASSUMED.values():
        setup = assumed(setup)
    return setup


# ---- tables --------------------------------------------------------------------------------------

Rows = Iterator[Sequence[str]]


def systems() -> Rows:
    """The figures of the systems."""
    yield (
        "system",
        "its file",
        "TFLOP/s",
        "HBM",
        "HBM GB/s",
        "inner links",
        "GB/s",
        "network GB/s",
    )
    for name, system in SYSTEMS.items():
        of = resolve(name)
        up = of.scale_up
        yield (
            f"`{name}`", system.file, f"{of.peak_bf16_tflops:g}", f"{of.memory_gb:g} GB",
            f"{of.memory_bandwidth_gb_s:g}", f"{up.gpus} GPUs",
            f"{up.bandwidth_gb_s * up.bandwidth_fraction:g}",
            f"{of.scale_out.bandwidth_gb_s * of.scale_out.bandwidth_fraction:g}",
        )  # fmt: skip


def fixed() -> Rows:
    """Fixed executions, and the error of ours with each further assumption."""
    yield ("system", "batch", "study", "ours", "all assumed", "none", *ASSUMED)
    for name, system in SYSTEMS.items():
        for batch, theirs in zip(BATCHES, system.fixed, strict=True):
            found = ladder(name, batch)
            errors = (f"{seconds / theirs - 1:+.1%}" for seconds in found)
            yield (
                f"`{name}`", f"{batch:,}", f"{theirs:.4f} s", f"{found[0]:.4f} s",
                f"{found[-1]:.4f} s", *errors,
            )  # fmt: skip


def parts() -> Rows:
    """Parts of a batch of 1,024, the tool's beside ours with all of its assumptions."""
    of = ("forward", "recompute", "backward", "tp and slices", "all-to-all", "bubble", "dp")
    yield ("system", "", *of)
    for name, theirs in PARTS.items():
        mean = step(assuming_all(name), BATCHES[1]).mean
        exposed = mean.exposed
        ours = (
            *(mean.kernels[phase] for phase in of[:3]), exposed.get("tp", 0.0),
            exposed.get("ep", 0.0) + exposed.get("ep+tp", 0.0), mean.bubble,
            exposed.get("dp", 0.0) + exposed.get("edp", 0.0),
        )  # fmt: skip
        yield (f"`{name}`", "study", *(f"{seconds:.3f}" for seconds in theirs))
        yield ("", "ours", *(f"{seconds:.3f}" for seconds in ours))


def memory() -> Rows:
    """Bytes of the fullest GPU by category, as our run holds them."""
    yield ("batch", "recomputation", "parameters", "gradients", "optimizer", "activations", "all")
    for batch, recompute in ((128, "selective"), (1024, "selective"), (1024, "full")):
        held = compiled(batch, (("recompute", recompute),)).table("memory").rows[0]
        names = ("parameters", "gradients", "optimizer", "activations", "peak")
        yield (f"{batch:,}", recompute, *(f"{held[name] / 1e9:.1f} GB" for name in names))


OMITTED: Mapping[str, Callable[[Setup], Setup]] = {
    "as the file says": lambda setup: setup,
    "kernels launched one by one": lambda s: s._replace(execution={}),
    "CUDA graphs": lambda s: s._replace(execution={"launch_mode": "cuda_graph"}),
    "fused attention": lambda s: s._replace(run={"flash_attention": True}),
    "busiest rank gets 1.3 x the tokens": lambda s: s._replace(run={"expert_load": "1.3"}),
    "busiest rank gets 2 x the tokens": lambda s: s._replace(run={"expert_load": "2"}),
    "dense products at 0.99 of the peak": lambda s: with_gemm(s, 0.99),
    "dense products at 0.6 of the peak": lambda s: with_gemm(s, 0.6),
    "interleaved, vpp 15": lambda s: s._replace(run={"vpp": 15}),
    "zero bubble (zb-h1)": lambda s: s._replace(run={"schedule": "zb-h1"}),
    "whole experts (etp 1)": lambda s: s._replace(run={"etp": 1}),
    "parameters gathered in the next step": lambda s: s._replace(
        execution={**s.execution, "overlap_param_gather": True}
    ),
    "tokens sent once to each rank": lambda s: s._replace(
        execution={**s.execution, "moe_flex_dispatcher": True}
    ),
    "optimizer on the host": lambda s: s._replace(run={"optimizer_cpu_offload": True}),
}
"""Effects that the tool leaves out, one at a time."""


def with_gemm(setup: Setup, fraction: float) -> Setup:
    """The setup with another share of the peak that dense products reach."""
    fit = setup.hardware.gemm["bf16"].model_copy(update={"fraction": fraction})
    return with_figures(setup, gemm={"bf16": fit})


def omitted() -> Rows:
    """Seconds of a batch of 1,024 with effects that the tool leaves out."""
    names = ("fullflat-h100", "fullflat-hbd64", "fullflat")
    yield ("", *(f"`{name}`" for name in names))
    plain = [step(Setup(resolve(name)), BATCHES[1]).seconds for name in names]
    for words, change in OMITTED.items():
        found = [step(change(Setup(resolve(name))), BATCHES[1]).seconds for name in names]
        pairs = zip(found, plain, strict=True)
        first = words == next(iter(OMITTED))
        cells = (f"{one:.4f} s" if first else f"{one / other - 1:+.1%}" for one, other in pairs)
        yield (words, *cells)


def sensitivity() -> Rows:
    """Change of the step of a batch of 1,024 while one figure of `fullflat-hbd64` changes."""
    yield ("figure of `fullflat-hbd64`", "value and change of the step")
    base = Setup(resolve("fullflat-hbd64"))
    unchanged = step(base, BATCHES[1]).seconds
    for figure, group in groupby(varied(base), key=itemgetter(0)):
        changes = (
            f"{value} {step(setup, BATCHES[1]).seconds / unchanged - 1:+.1%}"
            for _, value, setup in group
        )
        yield (figure, "; ".join(changes))


def varied(base: Setup) -> Iterator[tuple[str, str, Setup]]:
    """The setups of `sensitivity`: the figure, its value, the setup."""
    of = base.hardware
    for gpus in (8, 16, 32, 64, 128, 256, 1024, 4096):
        yield "scale-up domain", f"{gpus:,} GPUs", with_link(base, "scale_up", gpus=gpus)
    for gb_s in (450, 900, 1600, 3200):
        yield "inner links", f"{gb_s:,} GB/s", with_link(base, "scale_up", bandwidth_gb_s=gb_s)
    for gb_s in (50, 100, 200, 400, 800, 1600):
        yield "network", f"{gb_s:,} GB/s", with_link(base, "scale_out", bandwidth_gb_s=gb_s)
    for gb_s in (3350, 8000, 15000, 30000, 60000):
        yield "HBM", f"{gb_s:,} GB/s", with_figures(base, memory_bandwidth_gb_s=gb_s)
    for tflops in (1000, 2300, 4600, 9200):
        yield "products", f"{tflops:,} TFLOP/s", with_figures(base, peak_bf16_tflops=tflops)
    for factor in (0.1, 10):
        up, out = of.scale_up.latency_us * factor, of.scale_out.latency_us * factor
        slow = with_link(with_link(base, "scale_up", latency_us=up), "scale_out", latency_us=out)
        yield "latencies", f"{factor:g} x", slow
    no_sp = base._replace(run={"sequence_parallel": False})
    off = with_link(no_sp, "scale_up", in_network_reduction=False)
    yield "sums in switches, without sequence_parallel", "yes", no_sp
    yield "sums in switches, without sequence_parallel", "no", off
    for axes in ("tp", "ep", "dp", "tp, ep, dp and pp"):
        waits = frozenset(axes.replace(",", " ").replace("and", " ").split())
        how = {**base.execution, "no_overlap": waits}
        yield "kernels wait for", axes, base._replace(execution=how)


def costs() -> Rows:
    """Costs of a batch of 1,024 by the file of costs, and the price of a faster network."""
    owned = load_costs(COSTS)
    names = [name for name in SYSTEMS if name not in ("fullflat-h100", "fullflat-hbd8")]
    steps = {name: step(Setup(resolve(name)), BATCHES[1]) for name in names}
    usd = {
        name: owned.usd_per_gpu_hour(found.expense().watts_per_gpu) * GPUS * found.seconds / 3600
        for name, found in steps.items()
    }
    base = "fullflat-hbd64"
    yield ("system", "step", "MFU", "W per GPU", "J per token", "USD per M tokens", "break-even")
    for name, found in steps.items():
        spent = found.expense(1.0)
        # The network may cost so much more that a token costs as much as on the base.
        hours = GPUS * found.seconds / 3600
        spare = (usd[base] - usd[name]) / hours * owned.years * HOURS_PER_YEAR * owned.utilization
        spare /= 1 + owned.upkeep * owned.years
        yield (
            f"`{name}`", f"{found.seconds:.4f} s", f"{found.mfu:.1%}",
            f"{spent.watts_per_gpu:,.0f}", f"{spent.joules_per_token:.3g}",
            f"{usd[name] / found.tokens * 1e6:.3f}", f"{spare:+,.0f} USD",
        )  # fmt: skip


# ---- layouts -------------------------------------------------------------------------------------

COLUMNS = ("system", "tp", "pp", "dp", "vpp", "etp", "recompute", "seconds", "bytes")


def layouts() -> Iterator[dict[str, Any]]:
    """Layouts beside those that the study's search finds: settings that differ from `LAYOUT`."""
    for tp, pp, slices, recompute in product(
        (4, 8), (1, 4, 8), (False, True), ("selective", "full")
    ):
        for vpp in sorted({1, 120 // pp if pp > 1 else 1}):
            dp = GPUS // (tp * pp)
            degrees = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "etp": tp if slices else 1}
            yield {**degrees, "recompute": recompute}


def simulated_layouts() -> Iterator[dict[str, Any]]:
    """A line for each layout on each system: seconds of a batch of 1,024, and bytes of a GPU."""
    for layout in layouts():
        run = sw.compile("gpt-1.8t", **(LAYOUT | {"global_batch_size": BATCHES[1]} | layout))
        for name in SYSTEMS:
            found = sw.simulate(run, name, launch_mode="ahead")
            size = found.fit.fullest.size
            yield {"system": name, **layout, "seconds": f"{found.seconds:.6g}", "bytes": size}


def write_layouts() -> None:
    """Writes the file of layouts."""
    out = io.StringIO()
    file = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    file.writeheader()
    file.writerows(simulated_layouts())
    LAYOUTS.write_text(out.getvalue(), encoding="utf-8")


def searched() -> Rows:
    """The layouts that the study's search finds, as ours, and our best among the file's."""
    every = [*csv.DictReader(LAYOUTS.read_text(encoding="utf-8").splitlines())]
    yield ("system", "study's best", "study", "ours", "our best of the same", "ours", "longer")
    for name, system in SYSTEMS.items():
        if system.layout is None:
            continue
        memory = resolve(name).memory
        of = [line for line in every if line["system"] == name]
        tp, pp, dp, vpp = map(str, system.layout)
        theirs = min((o for o in of if (o["tp"], o["pp"], o["vpp"]) == (tp, pp, vpp)), key=_seconds)
        best = min((o for o in of if int(o["bytes"]) <= memory), key=_seconds)
        yield (
            f"`{name}`", f"TP {tp}, PP {pp}, DP {dp}, vpp {vpp}", f"{system.searched:.4f} s",
            _with_memory(theirs, memory), f"TP {best['tp']}, PP {best['pp']}, DP {best['dp']}, "
            f"vpp {best['vpp']}, ES {best['etp']}, {best['recompute']}",
            _with_memory(best, memory), f"{_seconds(theirs) / _seconds(best) - 1:+.1%}",
        )  # fmt: skip


def capacities() -> Rows:
    """The best of the file's layouts by the bytes that a GPU of `fullflat-hbd64` has."""
    every = [*csv.DictReader(LAYOUTS.read_text(encoding="utf-8").splitlines())]
    of = [line for line in every if line["system"] == "fullflat-hbd64"]
    yield ("HBM", "layouts that fit", "the best of them", "recomputation", "holds", "step")
    for size in (32, 48, 64, 80, 96, 141, 192, 288, 464):
        fitting = [line for line in of if int(line["bytes"]) <= size * 1e9]
        if not fitting:
            yield (f"{size} GB", "0", "", "", "", "")
            continue
        best = min(fitting, key=_seconds)
        layout = f"TP {best['tp']}, PP {best['pp']}, vpp {best['vpp']}, ES {best['etp']}"
        held = f"{int(best['bytes']) / 1e9:.1f} GB"
        row = (f"{size} GB", f"{len(fitting)} of {len(of)}", layout, best["recompute"], held)
        yield (*row, f"{_seconds(best):.4f} s")


def _seconds(line: Mapping[str, str]) -> float:
    return float(line["seconds"])


def _with_memory(line: Mapping[str, str], memory: int) -> str:
    """Seconds of a layout, and its bytes where they do not fit."""
    size = int(line["bytes"])
    over = f" ({size / 1e9:.0f} GB do not fit)" if size > memory else ""
    return f"{_seconds(line):.4f} s{over}"


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; its first column, and those of words, are aligned left."""
    title, *lines = rows
    numbers = [
        all(line[n][:1] in "+-0123456789" for line in lines if line[n]) for n in range(len(title))
    ]
    align = ["---:" if number else "---" for number in numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (title, align, *lines))


TABLES: Mapping[str, Callable[[], Rows]] = {
    "systems": systems,
    "fixed": fixed,
    "parts": parts,
    "memory": memory,
    "omitted": omitted,
    "sensitivity": sensitivity,
    "costs": costs,
    "searched": searched,
    "capacities": capacities,
}
"""Tables of the page by the name in their marks."""
OF_FILE = ("searched", "capacities")
"""Tables that simulate nothing: they follow from the file of layouts."""


def page(text: str, names: Iterable[str] = tuple(TABLES)) -> str:
    """The page with these tables as of now."""
    for name in names:
        rows = TABLES[name]
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{table(rows())}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--layouts", action="store_true")
    if asked.parse_args().layouts:
        write_layouts()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
