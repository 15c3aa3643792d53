"""Writes the pages on accuracy from the tables of docs/accuracy/data.

    python benchmarks/accuracy.py

Writes the tables of docs/accuracy/*.md between their marks, a page for each source under
docs/reference/errors, and the figures that the package shows beside its answers
(`stagewright/data/accuracy.csv`). Nothing is simulated: `benchmarks/predictions.py` does that.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import choices
import predictions
import regret
from stagewright.evidence.kernels import KernelRow
from stagewright.evidence.memory import BETWEEN_STEPS
from stagewright.evidence.rows import Prediction, Row
from stagewright.evidence.servers import ClosedLoopRow, StageRow, model_of_row
from stagewright.evidence.statistics import GROUPS, SWEEP, errors_by_group
from stagewright.evidence.training import BEYOND, Measurement, not_compared, sources
from stagewright.model.catalog import resolve as model_of
from stagewright.model.presets import family
from stagewright.serving.schedulers.named import ENGINES
from stagewright.time.hardware import resolve
from stagewright.time.simulate.launches import launch_mode
from stagewright.views.accuracy import ExpectedError, inferred

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "accuracy"
ERRORS = ROOT / "docs" / "reference" / "errors"
SUMMARY = ROOT / "src" / "stagewright" / "data" / "accuracy.csv"

LISTED = 40
"""Rows of a page of a source; of larger sources, those with the largest errors."""
EQUAL = 0.05
"""Published layouts within this share of the predicted best count as equal to it."""
GPT_OSS = "gpt-oss-120b on H200"
FEW_USERS = 4
"""Users of a server whose prompts hardly wait for each other."""
FAR = 0.1
"""Mean error of step times beyond which a source is named on the page."""


class Compared(NamedTuple):
    """A prediction, the published row that it belongs to (None: not in the package), its error."""

    row: Row | None
    prediction: Prediction
    error: float

    @property
    def source(self) -> str:
        """The name of the source."""
        return self.prediction.source

    @property
    def quantity(self) -> str:
        """What was measured."""
        return self.prediction.quantity


def statistics(signed: Sequence[float], sources: tuple[str, ...] = ()) -> ExpectedError:
    """Statistics of at least one signed error."""
    sizes = np.abs(signed)
    return ExpectedError(
        len(signed), float(sizes.mean()), float(np.median(sizes)),
        float(np.quantile(sizes, 0.9)), float(np.mean(signed)), min(signed), max(signed), sources,
    )  # fmt: skip


@cache
def table(name: str) -> tuple[Compared, ...]:
    """All rows of a table."""
    return tuple(Compared(row, p, predictions.error(name, p)) for row, p in predictions.read(name))


# ---- the answers ---------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A kind of answer, and the rows whose errors are to be expected of it."""

    key: str
    errors: Callable[[], list[tuple[str, float]]]
    """Source and signed error of each row."""
    asked: str
    source: str = ""
    """Where the rows are from; empty: the answer is one of some steps, in docs/accuracy/limits.md,
    and no row of the table of docs/accuracy/index.md."""
    caution: str = ""
    """What not to trust."""


def _of(name: str, holds: Callable[[Compared], bool]) -> Callable[[], list[tuple[str, float]]]:
    return lambda: [(c.source, c.error) for c in table(name) if holds(c)]


def kind(c: Compared) -> str:
    """Dense, sweep (dense, nanotron), MoE, LoRA or low: the kinds of step times."""
    traits = c.prediction.traits
    assert traits is not None
    if traits.low_utilization:
        return "low"
    if traits.adapters:
        return "LoRA"
    if traits.experts:
        return "MoE"
    return "sweep" if c.source == SWEEP else "dense"


def _steps(name: str) -> Callable[[], list[tuple[str, float]]]:
    return _of("training", lambda c: kind(c) == name)


def _host_limited(c: Compared) -> bool:
    """Eager steps of few tokens on up to eight nodes, whose collectives are not checked."""
    m, traits = c.row, c.prediction.traits
    assert isinstance(m, Measurement)
    assert traits is not None
    few = traits.tokens <= 1024 and traits.gpus <= 64
    return c.source == SWEEP and few and m.run.pp == 1 and not m.execution.collective_checks


def _b200(c: Compared) -> bool:
    return c.source == "SimuMax"


def _short_kernels(c: Compared) -> bool:
    assert isinstance(c.row, Measurement)
    return _b200(c) and c.row.run.tp == 8 and c.row.model.hidden_size < 16384


def _experts_in_nvfp4(c: Compared) -> bool:
    if not isinstance(c.row, ClosedLoopRow):
        return False
    experts = model_of(str(c.row.settings["model"])).num_experts > 0
    return c.quantity == "tpot_ms" and experts and "nvfp4" in c.row.checkpoint


def _racks(c: Compared) -> bool:
    assert isinstance(c.row, KernelRow)
    words = dict(word.split("=") for word in c.row.shape.split())
    return int(words.get("gpus", 0)) == 20 * 72 and int(words["bytes"]) < 4e9


def overlap_gains() -> list[tuple[float, float]]:
    """Measured and predicted gain of async TP, by pair of torchtitan's rows."""
    steps = {c.prediction.row: c.prediction for c in table("training") if c.source == "torchtitan"}
    gains: list[tuple[float, float]] = []
    for name, without in steps.items():
        twin = name.replace("async_tp=0", "async_tp=1").replace("2D,", "2D+AsyncTP,")
        if "async_tp=0" in name:
            overlapped = steps[twin]
            gains.append(
                (overlapped.measured / without.measured - 1,
                 overlapped.predicted / without.predicted - 1)
            )  # fmt: skip
    return gains


@cache
def jobs(*, only_held_out: bool = False, low: bool = False) -> tuple[regret.Regret, ...]:
    """The choices of layouts by prediction, of jobs above a tenth of the peak, or of those below"""
    pairs = [(c.row, c.prediction) for c in table("training") if isinstance(c.row, Measurement)]
    choices_by_job = regret.regrets(pairs, only_held_out=only_held_out)
    return tuple(job for job in choices_by_job if job.low_utilization == low)


def _has_few_users(c: Compared) -> bool:
    """Check whether a row has so few users that first tokens are a step of prompts and the host."""
    return isinstance(c.row, ClosedLoopRow) and c.row.users <= FEW_USERS


def _engine_rows(
    quantity: str, holds: Callable[[Compared], bool] = lambda c: True
) -> Callable[[], list[tuple[str, float]]]:
    """Errors of AIConfigurator's servers, simulated request by request."""
    return _of(
        "serving",
        lambda c: c.source.startswith("aiconfigurator") and c.quantity == quantity and holds(c),
    )


ANSWERS = (
    Answer("train-dense", _steps("dense"), "Step time, dense models", "{sources} sources",
           "ZeRO-3 whose gathers are exposed"),
    Answer("train-nanotron", _steps("sweep"), "Step time, nanotron's dense models",
           "1.3 to 80 billion parameters, AWS's H100", "a nearly full memory"),
    Answer("train-moe", _steps("MoE"), "Step time, MoE", "Megatron-Bridge, dgxc-benchmarking, "
           "NeMo Automodel", "B300, gpt-oss, single rows"),
    Answer("train-lora", _steps("LoRA"), "Step time, LoRA", "MLPerf, dgxc-benchmarking, "
           "Megatron-Bridge", "single rows"),
    Answer("train-low", _steps("low"), "Step time below a tenth of the peak", "nearly all nanotron",
           "context parallelism over long sequences"),
    Answer("layout", lambda: [(job.source, job.regret) for job in jobs()],
           "Choice of a layout: time that it loses", "jobs with three measured layouts or more",
           "differences below 2%"),
    Answer("memory", _of("memory", lambda c: c.quantity in ("allocated", "reported")),
           "Peak memory, allocated", "Megatron-LM's tests, two papers", "compiled cross entropy"),
    Answer("memory-reserved", _of("memory", lambda c: c.quantity == "reserved"),
           "Peak memory, reserved", "torchtitan", "single rows"),
    Answer("serve-tpot", _engine_rows("tpot_ms"), "Serving: time per output token",
           "AIConfigurator: vLLM, SGLang, TensorRT-LLM", "DeepSeek in TensorRT-LLM"),
    Answer("serve-ttft", _engine_rows("ttft_ms"), "Serving: time to the first token",
           "AIConfigurator", "MoE, p99"),
    Answer("first-token", _engine_rows("ttft_ms", _has_few_users),
           f"The same with up to {FEW_USERS} users", "AIConfigurator", "single rows"),
    Answer("serve-rate", _of("serving", lambda c: c.quantity == "output_tokens_s_gpu"),
           "Serving: output tokens per second", "InferenceX, DeepSeek-R1",
           "data-parallel attention"),
    Answer("serve-drafts", _of("drafts", lambda c: c.quantity == "tpot_ms"),
           "Serving with multi-token prediction: time per output token", "InferenceX, DeepSeek-R1",
           "acceptance rates that you guess"),
    Answer("power", _of("serving", lambda c: c.quantity == "watts"), "Power of a GPU",
           "gpt-oss-120b on H200", "other GPUs"),
    Answer("kernels", _of("kernels", lambda c: c.source == "aiconfigurator, matrix products"),
           "Time of one matrix product", "AIConfigurator", "products of few rows"),
    Answer("flops", _of("programs", lambda c: c.quantity == "flops"), "FLOPs of kernels",
           "PyTorch's FLOP counter", ""),
    Answer("racks", _of("kernels", _racks), "All-reduces of 0.5 to 2 GB over twenty NVL72 racks"),
    Answer("host-limited", _of("training", _host_limited), "Eager steps of at most 1,024 tokens "
           "per rank and microbatch, on up to eight nodes"),
    Answer("b200", _of("training", _b200), "Dense models in bf16 on eight B200"),
    Answer("b200-short", _of("training", _short_kernels), "The same, tp=8, kernels of a few "
           "microseconds"),
    Answer("sinks", _of("training", lambda c: kind(c) == "MoE" and "gpt-oss" in _model(c)),
           "Training of gpt-oss"),
    Answer("decode", _engine_rows("tpot_ms"), "Decode: time per output token of a server"),
    Answer("nvfp4-experts", _of("serving", _experts_in_nvfp4), "Decode of experts in nvfp4"),
    Answer("zero3", _of("training", lambda c: c.source.startswith("DeepSpeed ZeRO-3")),
           "ZeRO-3 of DeepSpeed in 2021 on A100"),
    Answer("overlap", lambda: [("torchtitan", ours - theirs) for theirs, ours in overlap_gains()],
           "Gain of asynchronous tensor parallelism (points)"),
)  # fmt: skip
"""Kinds of answers. Those of some steps are in sentences that the package shows beside a step."""


@cache
def errors(key: str) -> ExpectedError:
    """The errors to expect of an answer."""
    (answer,) = (answer for answer in ANSWERS if answer.key == key)
    return _of_pairs(answer.errors())


def _of_pairs(pairs: Iterable[tuple[str, float]]) -> ExpectedError:
    sources, signed = zip(*pairs, strict=True)
    return statistics(signed, tuple(sorted(set(sources), key=str.lower)))


# ---- groups of an answer -------------------------------------------------------------------------

Group = tuple[str, ...]


def _trained(*kinds: str) -> Iterator[tuple[Group, Compared]]:
    for c in table("training"):
        if kind(c) in kinds:
            assert c.prediction.traits is not None
            yield (c.prediction.traits.hardware, c.prediction.traits.precision), c


def _served_rows(*quantities: str) -> Iterator[tuple[Group, Compared]]:
    """Servers whose requests are simulated, but for those that were overloaded."""
    for c in table("serving"):
        if c.quantity not in quantities or c.source.endswith("overloaded"):
            continue
        if isinstance(c.row, ClosedLoopRow):
            server, checkpoint = c.row, c.row.checkpoint
        else:
            assert isinstance(c.row, StageRow)
            server, checkpoint = c.row.server, ""
        group = inferred(*model_of_row(server.settings, checkpoint), server.hardware)
        yield (ENGINES[server.engine], *group), c


def _inferred(
    quantity: str, holds: Callable[[Compared], bool] = lambda c: True
) -> Iterator[tuple[Group, Compared]]:
    """Servers of any engine."""
    return ((group[1:], c) for group, c in _served_rows(quantity) if holds(c))


def _drafted() -> Iterator[tuple[Group, Compared]]:
    """Servers of DeepSeek-R1, whose source ends with the scheduler and row begins as the group."""
    for c in table("drafts"):
        if c.quantity == "tpot_ms":
            hardware, stored, *_ = c.prediction.row.split()
            precision = {"fp4": "nvfp4"}.get(stored, stored)
            scheduler = c.source.split(", ")[-1]
            yield (scheduler, hardware, family("deepseek-r1"), precision), c


GROUPED: dict[str, Callable[[], Iterator[tuple[Group, Compared]]]] = {
    "train-dense": lambda: _trained("dense", "sweep"),
    "train-moe": lambda: _trained("MoE"),
    "train-lora": lambda: _trained("LoRA"),
    "decode": lambda: _inferred("tpot_ms"),
    "first-token": lambda: _inferred("ttft_ms", _has_few_users),
    "serve-tpot": lambda: _served_rows("tpot_ms"),
    "serve-ttft": lambda: _served_rows("ttft_ms", "ttft_p50_ms"),
    "serve-rate": lambda: _served_rows("output_tokens_s_gpu"),
    "serve-drafts": _drafted,
}
"""Answers whose errors differ by group: rows by accelerator and precision of training; by
accelerator, family and precision of a step of inference; by these and the engine of a server. A
group also has rows of sources that the answer leaves out: nanotron's, load stages, InferenceX."""


@cache
def groups(key: str) -> Mapping[Group, ExpectedError]:
    """The errors of each group of an answer, and of each beginning of a group."""
    pairs: dict[Group, list[tuple[str, float]]] = {}
    for group, c in GROUPED[key]():
        for length in range(1, len(group) + 1):
            pairs.setdefault(group[:length], []).append((c.source, c.error))
    return {group: _of_pairs(pairs[group]) for group in sorted(pairs)}


def summary() -> str:
    """The text of the file of the package, with what its views show."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("answer", "group", *ExpectedError._fields))
    for answer in ANSWERS:
        of_groups = groups(answer.key) if answer.key in GROUPED else {}
        for group, (count, *figures, names) in [((), errors(answer.key)), *of_groups.items()]:
            cells = count, *(f"{value:.6f}" for value in figures), "; ".join(names)
            lines.writerow((answer.key, ", ".join(group), *cells))
    return out.getvalue()


# ---- tables of the written pages -----------------------------------------------------------------

Line = Sequence[str]


def markdown(titles: str, lines: Iterable[Line]) -> list[str]:
    """A table of Markdown. Titles are separated by `|`; columns of numbers begin with `>`."""
    names = [title.strip() for title in titles.split("|")]
    align = ["---:" if name.startswith(">") else "---" for name in names]
    head = [name.removeprefix(">") for name in names]
    return [f"| {' | '.join(cells)} |" for cells in (head, align, *lines)]


def share(value: float) -> str:
    """An absolute error in words.

    >>> share(0.0123), share(0.0), share(0.0001)
    ('1.2%', '0', '0.0%')
    """
    return f"{value:.1%}" if value else "0"


def signed(value: float) -> str:
    """A signed error in words."""
    return f"{value:+.1%}" if value else "0"


FIGURES = ">Rows | >Error | >Median | >p90 | >Bias | >Lowest | >Highest"


def figures(e: ExpectedError) -> list[str]:
    """The cells of `FIGURES`."""
    return [f"{e.rows:,}", *map(share, (e.error, e.median, e.p90)), *map(signed, e[4:7])]


def rows_by(compared: Iterable[Compared], by: Callable[[Compared], str]) -> list[Line]:
    """Figures of each group, in the order of the names."""
    groups: dict[str, list[float]] = {}
    for c in compared:
        groups.setdefault(by(c), []).append(c.error)
    return [[name, *figures(statistics(groups[name]))] for name in sorted(groups, key=str.lower)]


def answers() -> list[str]:
    """The table of docs/accuracy/index.md."""
    lines: list[Line] = []
    for answer in ANSWERS:
        if answer.source:
            e, loss = errors(answer.key), answer.key == "layout"
            count = len({c.source for c in table("training") if kind(c) == "dense"})
            where = answer.source.format(sources=count)
            cells = share(e.error), share(e.p90), "" if loss else signed(e.bias)
            lines.append((answer.asked, *cells, f"{e.rows:,} ({where})", answer.caution))
    return markdown("You ask | >Error | >p90 | >Bias | Rows, and where from | Do not trust", lines)


def known() -> list[str]:
    """Steps whose errors the package shows beside them."""
    chosen = [answer for answer in ANSWERS if not answer.source]
    lines = [(answer.asked, *figures(errors(answer.key))) for answer in chosen]
    return markdown(f"Steps | {FIGURES}", lines)


STEPS = {
    "dense": "Dense models",
    "sweep": "Dense models of nanotron",
    "MoE": "MoE",
    "LoRA": "LoRA",
    "low": "Below a tenth of the peak",
}
"""The kinds of step times in words."""


def held_out() -> list[str]:
    """Errors of step times by kind, of all rows and of those to which no constant was fitted."""
    lines: list[Line] = []
    for name, words in STEPS.items():
        chosen = [c for c in table("training") if kind(c) == name]
        held = [c.error for c in chosen if c.prediction.traits and c.prediction.traits.held_out]
        every, some = statistics([c.error for c in chosen]), statistics(held)
        lines.append(
            (words, *figures(every), f"{some.rows:,}", share(some.error), signed(some.bias))
        )
    return markdown(f"Steps | {FIGURES} | >Held out | >Their error | >Their bias", lines)


class Grouped(NamedTuple):
    """A table of the errors of some rows by group."""

    title: str
    tables: tuple[str, ...]
    group: Callable[[Compared], str]
    holds: Callable[[Compared], bool] = lambda c: True

    def __call__(self) -> list[str]:
        """The table as Markdown."""
        chosen = [c for name in self.tables for c in table(name) if self.holds(c)]
        return markdown(f"{self.title} | {FIGURES}", rows_by(chosen, self.group))


def _hardware(c: Compared) -> str:
    assert c.prediction.traits is not None
    return c.prediction.traits.hardware


def _precision(c: Compared) -> str:
    assert c.prediction.traits is not None
    return f"{_hardware(c)}, {c.prediction.traits.precision}"


def _model(c: Compared) -> str:
    return c.prediction.row.split(",")[0]


def _launches(c: Compared) -> str:
    """How the host launches kernels."""
    assert isinstance(c.row, Measurement)
    execution = c.row.execution
    if launch_mode(c.row.run, execution, resolve(c.row.hardware)) != "cuda_graph":
        return "kernel by kernel"
    return "parts as CUDA graphs" if execution.cuda_graph_modules else "one CUDA graph"


def _engine(c: Compared) -> str:
    assert isinstance(c.row, ClosedLoopRow)
    return f"{ENGINE_NAMES[c.row.engine]}, {c.row.hardware}"


ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
QUANTITIES = {
    "tpot_ms": "time per token",
    "ttft_ms": "first token",
    "ttft_p50_ms": "first token, median",
    "ttft_p99_ms": "first token, p99",
    "e2e_ms": "last token",
    "output_tokens_s_gpu": "tokens per second",
    "watts": "power",
}


def _served(c: Compared) -> str:
    """Source and quantity of a server whose requests are simulated."""
    source = c.source
    if source == "aiconfigurator, first tokens":
        assert isinstance(c.row, ClosedLoopRow)
        source = f"aiconfigurator, {ENGINE_NAMES[c.row.engine]}"
    elif "multi-token" in source:
        source = "InferenceX, multi-token prediction"
    return f"{source}: {QUANTITIES[c.quantity]}"


def kernels_in_traces() -> list[str]:
    """Errors of kernels of published traces; and of their time, where each kernel counts."""
    groups: dict[str, list[tuple[KernelRow, Prediction]]] = {}
    for c in table("kernels"):
        if c.source.startswith("TraceLens") and isinstance(c.row, KernelRow):
            name = f"{c.source.split(', ')[1]}, {c.row.hardware}"
            groups.setdefault(name, []).append((c.row, c.prediction))
    lines: list[Line] = []
    for name, rows in sorted(groups.items()):
        e = statistics([prediction.error for _, prediction in rows])
        measured, predicted = (
            sum(row.count * us for row, us in zip((r for r, _ in rows), times, strict=True))
            for times in zip(*((p.measured, p.predicted) for _, p in rows), strict=True)
        )
        cells = (
            f"{e.rows}",
            f"{sum(row.count for row, _ in rows):,}",
            share(e.error),
            signed(e.bias),
        )
        lines.append((name, *cells, f"{measured / 1000:.1f} ms", signed(predicted / measured - 1)))
    return markdown(
        "Kernel, GPU | >Shapes | >Kernels | >Error | >Bias | >Their time | >Error of their time",
        lines,
    )


def _memory(c: Compared) -> str:
    quantity = c.quantity if c.quantity == BETWEEN_STEPS else f"peak, {c.quantity}"
    return f"{c.source.split(', ')[0]}: {quantity}"


def releases() -> list[str]:
    """Spread of the measured steps of one MoE job over releases of Megatron-Bridge."""
    steps: dict[tuple[object, ...], list[float]] = {}
    for c in table("training"):
        if kind(c) == "MoE" and c.source.startswith("Megatron-Bridge"):
            assert isinstance(c.row, Measurement)
            run = c.row.run
            sizes = run.global_batch_size, run.seq_length, run.world_size
            key = (_model(c), _precision(c), *sizes, c.quantity)
            steps.setdefault(key, []).append(c.prediction.measured)
    ratios = [max(values) / min(values) for values in steps.values() if len(values) > 1]
    cells = str(len(ratios)), f"{np.median(ratios):.1f}x", f"{max(ratios):.1f}x"
    return markdown(">Jobs in several releases | >Slowest / fastest, median | >Largest", [cells])


def far_sources() -> list[str]:
    """Sources of step times whose mean error is beyond 10%."""
    by_source: dict[str, list[float]] = {}
    for c in table("training"):
        if kind(c) != "low":
            by_source.setdefault(c.source, []).append(c.error)
    summaries = {name: statistics(by_source[name]) for name in sorted(by_source, key=str.lower)}
    lines = [(name, *figures(e)) for name, e in summaries.items() if e.error > FAR]
    return markdown(f"Source | {FIGURES}", lines)


def beyond() -> list[str]:
    """Sources with step times that are far off, and the reasons as far as they were checked."""
    rows = [c for c in table("training") if abs(c.error) > BEYOND]
    lines = [
        (source, number, lowest, highest, escaped(sources()[source].beyond))
        for source, number, *_, lowest, highest in rows_by(rows, lambda c: c.source)
    ]
    return markdown("Source | >Rows | >Lowest | >Highest | Reason", lines)


def layouts() -> list[str]:
    """Time that a choice by prediction loses, by source."""
    held = dict(regret.by_source(jobs(only_held_out=True)))
    lines: list[Line] = []
    for name, some in regret.by_source(jobs()):
        s = regret.summary(some)
        h = regret.summary(held[name]) if name in held else None
        cells = f"{s.first:.0%}", share(s.mean), share(s.worst), f"{s.spearman:.2f}"
        count = f"{sum(job.layouts for job in some):,}"
        lines.append(
            (name, str(s.jobs), count, *cells, str(h.jobs if h else 0), share(h.mean) if h else "")
        )
    return markdown(
        "Source | >Jobs | >Layouts | >Best picked | >Time lost | >Worst | >Rank correlation | "
        ">Held out | >Time lost there",
        lines,
    )


class Published(NamedTuple):
    """A published layout beside the predicted best."""

    run: str
    layouts: int
    layout: str
    best: str
    longer: float
    """Predicted step of the published layout over that of the best - 1."""


def published() -> list[Published]:
    """All published layouts."""
    result: list[Published] = []
    for run, lines in choices.by_run().items():
        theirs = next(line for line in lines if line["published"] == "1")
        best = min(lines, key=lambda line: float(line["seconds"]))
        longer = float(theirs["seconds"]) / float(best["seconds"]) - 1
        result.append(
            Published(run, len(lines), choices.words(theirs), choices.words(best), longer)
        )
    return result


def near_published() -> list[str]:
    """How many published layouts are near the predicted best."""
    longer = [p.longer for p in published()]
    counts = len(longer), longer.count(0), sum(value <= EQUAL for value in longer)
    return markdown(
        ">Published | >Equal to the best | >Within 5% of it | >Farthest",
        [(*map(str, counts), share(max(longer)))],
    )


def recorded() -> list[str]:
    """Recorded workloads that are replayed: the error of each figure."""
    lines: dict[str, dict[str, str]] = {}
    for c in table("replayed"):
        lines.setdefault(c.prediction.row, {})[c.quantity] = signed(c.error)
    quantities = list(dict.fromkeys(c.quantity for c in table("replayed")))
    titles = " | >".join(("Server", *(name.removesuffix("_ms") for name in quantities)))
    return markdown(
        titles, [(row, *(cells[name] for name in quantities)) for row, cells in lines.items()]
    )


def gpt_oss() -> list[str]:
    """Times of gpt-oss-120b on one H200, by load."""
    times: dict[str, dict[str, Compared]] = {}
    for c in table("serving"):
        load, _, users = c.prediction.row.removeprefix("h200 ").partition(" x")
        if c.source == GPT_OSS and users:
            times.setdefault(f"{load.replace('/', ' and ')} tokens | {users}", {})[c.quantity] = c
    lines = [
        (
            load,
            *(
                cell
                for quantity in ("ttft_ms", "tpot_ms")
                for p in (of[quantity].prediction,)
                for cell in (
                    f"{p.measured:,.1f}",
                    f"{p.predicted:,.1f}",
                    signed(of[quantity].error),
                )
            ),
        )
        for load, of in times.items()
    ]
    return markdown(
        "Prompt and output at most | >Users | >First token (ms) | >Predicted | >Error | "
        ">Per token (ms) | >Predicted | >Error",
        lines,
    )


def programs() -> list[str]:
    """Other programs that compute the same figure."""
    lines: list[Line] = []
    for source, rows, *_, lowest, highest in rows_by(table("programs"), lambda c: c.source):
        equal = sum(c.source == source and not c.error for c in table("programs"))
        lines.append((source, rows, str(equal), lowest, highest))
    return markdown("Program | >Rows | >Equal | >Lowest error | >Highest error", lines)


def refused() -> list[str]:
    """Published rows of training that no settings express."""
    why = Counter((row.source, row.reason) for row in not_compared())
    lines = [(source, str(count), reason) for (source, reason), count in why.most_common()]
    return markdown("Source | >Rows | Why they are not compared", lines)


TABLES: dict[str, Callable[[], list[str]]] = {
    "answers": answers,
    "held-out": held_out,
    "dense": Grouped(
        "Accelerator, precision", ("training",), _precision, lambda c: kind(c) == "dense"
    ),
    "moe": Grouped("Accelerator", ("training",), _hardware, lambda c: kind(c) == "MoE"),
    "moe-models": Grouped("Model", ("training",), _model, lambda c: kind(c) == "MoE"),
    "moe-launches": Grouped("Launches", ("training",), _launches, lambda c: kind(c) == "MoE"),
    "releases": releases,
    "lora": Grouped("Accelerator", ("training",), _hardware, lambda c: kind(c) == "LoRA"),
    "far-sources": far_sources,
    "beyond": beyond,
    "layouts": layouts,
    "near-published": near_published,
    "served-hardware": Grouped(
        "Engine, GPU, quantity",
        ("serving",),
        lambda c: f"{_engine(c)}, {QUANTITIES[c.quantity]}",
        lambda c: c.source.startswith("aiconfigurator"),
    ),
    "served": Grouped("Source, quantity", ("serving", "drafts"), _served),
    "gpt-oss": gpt_oss,
    "recorded": recorded,
    "memory": Grouped("Source, what was measured", ("memory",), _memory),
    "kernels": Grouped("Kernel", ("kernels",), lambda c: c.source),
    "kernels-in-traces": kernels_in_traces,
    "programs": programs,
    "known": known,
    "refused": refused,
}
"""Tables of the written pages by name: each stands between two comments."""
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text of a written page with today's tables."""

    def of(match: re.Match[str]) -> str:
        return "\n".join([match[1], *TABLES[match[2]](), "", match[3]])

    return _MARKED.sub(of, text)


# ---- a page for each source ----------------------------------------------------------------------

TITLES = {
    "training": "Step times of training",
    "serving": "Servers",
    "replayed": "Recorded workloads",
    "drafts": "Servers with multi-token prediction",
    "memory": "Memory",
    "kernels": "Kernels and collectives",
    "programs": "Other programs",
}
"""What the tables of predictions hold."""


def slug(name: str) -> str:
    """The name of the page of a source.

    >>> slug("IBM fms-fsdp")
    'ibm-fms-fsdp'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def of_source(source: str) -> Iterator[tuple[str, list[Compared]]]:
    """The tables in which a source has rows."""
    for name in TITLES:
        if rows := [c for c in table(name) if c.source == source]:
            yield name, rows


def group(c: Compared) -> str:
    """What rows of a source are grouped by."""
    if c.prediction.traits is not None:
        names = {"low": "below a tenth of the peak", "sweep": "dense"}
        return f"{names.get(kind(c), kind(c))}, {_precision(c)}"
    if isinstance(c.row, KernelRow):
        return f"{c.row.hardware}, {c.row.kernel}, {c.row.dtype}"
    hardware = "" if c.row is None else f", {c.row.hardware}"
    return f"{c.quantity}{hardware}"


def source_page(source: str) -> str:
    """What is assumed of a source, and its rows."""
    lines = [f"# {source}"]
    parts = [*of_source(source)]
    urls = {c.row.url for _, rows in parts for c in rows if c.row is not None}
    if len(urls) == 1:
        lines += ["", f"Published at <{urls.pop()}>."]
    if entry := sources().get(source):
        assumed = [f"`{name}` {a.value}: {a.reason}" for name, a in entry.assumed.items()]
        texts = [" ".join(text.split()) for text in (*assumed, *entry.notes)]
        lines += [
            "",
            "Assumptions, and known reasons for errors:",
            "",
            *(f"- {text}" for text in texts),
        ]
    for name, rows in parts:
        ordered = sorted(rows, key=lambda c: -abs(c.error))
        file = f"[{name}.csv](../../accuracy/data/{name}.csv)"
        largest = f"The {LISTED} rows with the largest errors; {file} has all."
        listed = "All rows." if len(rows) <= LISTED else largest
        lines += ["", f"## {TITLES[name]}", ""]
        lines += markdown(f"Group | {FIGURES}", rows_by(rows, group))
        lines += ["", listed, ""]
        reasons = len({c.prediction.reason for c in rows}) > 1
        titles = "Row | Quantity | >Measured | >Predicted | >Error" + " | Assumed, or why" * reasons
        lines += markdown(
            titles,
            (
                (
                    escaped(c.prediction.row), c.quantity, f"{c.prediction.measured:.4g}",
                    f"{c.prediction.predicted:.4g}", signed(c.error),
                    *([escaped(c.prediction.reason)] * reasons),
                )
                for c in ordered[:LISTED]
            ),
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text of a cell."""
    return text.replace("|", "\\|")


def index_page() -> str:
    """All sources, with a link to the page of each."""
    lines = [
        "# Errors by source",
        "",
        "Every published figure beside its prediction, a page for each source. "
        "[How far to trust it](../../accuracy/index.md) reads them.",
    ]
    for name, title in TITLES.items():
        by_source = rows_by(table(name), lambda c: c.source)
        linked = [[f"[{line[0]}]({slug(line[0])}.md)", *line[1:]] for line in by_source]
        lines += ["", f"## {title}", "", *markdown(f"Source | {FIGURES}", linked)]
    lines += ["", "## By group", "", "- [Errors by group](by-group.md)"]
    lines += ["- [Choices of layouts](layouts.md)", "", "```{toctree}", ":hidden:", ":glob:", ""]
    return "\n".join([*lines, "*", "```", ""])


def groups_page() -> str:
    """Step times by accelerator, precision, GPUs and tokens; times of servers."""
    steps = [c.prediction for c in table("training")]
    lines = ["# Errors by group", "", *_ABOUT_GROUPS]
    for by in GROUPS:
        columns = errors_by_group(steps, by)
        lines += ["", f"## By {by}", ""]
        lines += markdown(" | >".join(columns.columns), columns.text_rows())
    for key, (title, grouping) in SERVED.items():
        lines += ["", f"## {title}, by {grouping}", ""]
        whole = max(map(len, groups(key)))
        listed = [
            (", ".join(group), *figures(e), ", ".join(e.sources))
            for group, e in groups(key).items()
            if len(group) == whole
        ]
        lines += markdown(f"{grouping} | {FIGURES} | Sources", listed)
    return "\n".join([*lines, ""])


_ABOUT_GROUPS = (
    "`simulate`, `search` and `serve` print the errors of the group of their answer: a",
    "step of training by accelerator, precision and kind, a step of inference by accelerator,",
    "family of the model and precision of its weights, requests also by engine. If there are no",
    "rows of that group, they say so, and print the errors of the longest beginning of its name",
    "that has rows, such as engine and accelerator, and without one those of all rows of the kind",
    "(*all others*). Rows of training below a tenth of the peak are a group of their own, and",
    "times per output token with multi-token prediction, too.",
)
_ENGINE = "engine, accelerator, family, precision"
SERVED = {
    "decode": ("Time per token", "accelerator, family, precision"),
    "first-token": ("First token with few users", "accelerator, family, precision"),
    "serve-tpot": ("Time per token of requests", _ENGINE),
    "serve-ttft": ("First token of requests", _ENGINE),
    "serve-rate": ("Output tokens per second", _ENGINE),
    "serve-drafts": ("Time per token with multi-token prediction", _ENGINE),
}
"""Answers of inference whose groups are listed, with their titles."""


def layouts_page() -> str:
    """Each job whose layouts were measured, and each published layout."""
    lines = ["# Choices of layouts", ""]
    lines += ["Jobs that were measured in three layouts or more; models are layers x hidden size."]
    for title, low in (("Above a tenth of the peak", False), ("Below a tenth of the peak", True)):
        listed = regret.listed(jobs(low=low))
        lines += ["", f"## {title}", ""]
        lines += markdown(" | >".join(listed.columns), listed.text_rows())
    titles = "Run | >Layouts | Published | Predicted best | >Published is longer by"
    cells = [(p.run, str(p.layouts), p.layout, p.best, share(p.longer)) for p in published()]
    lines += ["", "## Published layouts", "", *markdown(titles, cells)]
    return "\n".join([*lines, ""])


def pages() -> dict[Path, str]:
    """All generated texts by file."""
    written = {path: with_tables(path.read_text("utf-8")) for path in sorted(PAGES.glob("*.md"))}
    names = dict.fromkeys(c.source for name in TITLES for c in table(name))
    by_source = {ERRORS / f"{slug(name)}.md": source_page(name) for name in names}
    return {
        SUMMARY: summary(),
        **written,
        ERRORS / "index.md": index_page(),
        ERRORS / "by-group.md": groups_page(),
        ERRORS / "layouts.md": layouts_page(),
        **by_source,
    }


def write(texts: Mapping[Path, str]) -> None:
    """Write all generated texts, and delete pages of sources that are gone."""
    ERRORS.mkdir(exist_ok=True)
    for old in {*ERRORS.glob("*.md")} - texts.keys():
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(pages())
