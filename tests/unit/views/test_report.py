"""The page of `stagewright report`, and what it remarks on."""

from __future__ import annotations

import csv
import dataclasses
import html
import re
import shlex
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import stagewright as sw
from helpers import cases, pairs
from pages import check
from stagewright.cli.main import main
from stagewright.numbers import duration
from stagewright.time.hardware import resolve
from stagewright.views.advice import Remark, remarks
from stagewright.views.pages.charts import CHARTS, memory_over_time
from stagewright.views.pages.html import Details, PageSection, Paragraph, Tabs, render
from stagewright.views.pages.report import cards

from .test_pictures import RUNS, SMALL

pytestmark = pytest.mark.numerics  # whole pages of compiled and simulated runs take seconds


@pytest.mark.numerics
@pytest.mark.parametrize(("name", "hardware"), pairs(RUNS, [None, "h100-sxm"]))
def test_a_page_stands_alone(name: str, hardware: str | None):
    run = sw.Run(**RUNS[name])
    text = sw.report(sw.simulate(run, hardware)) if hardware else sw.report(run)
    page = check(text)
    sections = [attrs["id"] for tag, attrs in page.elements if tag == "section"]
    timed = ["time"] if hardware else []
    rest = ["memory", "compute", "communication", "schedule", "run", "about"]
    assert sections == ["remarks", *timed, *rest]
    again = sw.simulate(run, hardware) if hardware else sw.compile(run)
    assert text == sw.report(again)


def test_one_rank_and_inference_have_pages_too():
    check(sw.report("gpt2", layers=2, seq_length=64))
    check(sw.report("llama3-8b", mode="prefill", tp=2, hardware="h100-sxm"))
    check(sw.report("mixtral-8x7b", mode="decode", ep=8, dp=8, hardware="h100-sxm"))


@pytest.mark.numerics
def test_sixteen_thousand_gpus_are_one_small_page():
    began = time.perf_counter()
    settings: dict[str, Any] = {"tp": 8, "pp": 16, "dp": 128, "sequence_parallel": True}
    text = sw.report("llama3.1-405b", hardware="h100-sxm", global_batch_size=4096, **settings)
    assert len(text.encode()) < 2_000_000
    assert time.perf_counter() - began < 60  # takes 3 s; the machine may be busy
    check(text)


HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'\n{{ 7 * 7 }}{% raw %} $(touch x)"


def test_names_of_strangers_are_text():
    """Names of models and hardware are escaped in HTML, SVG, CSS and the script's data."""
    found = sw.simulate("gpt2", "h100-sxm", layers=1, seq_length=16, tp=2)
    compiled = dataclasses.replace(
        found.compiled, model=dataclasses.replace(found.compiled.model, name=HOSTILE)
    )
    hardware = found.machine.hardware.model_copy(update={"name": HOSTILE})
    machine = dataclasses.replace(found.machine, hardware=hardware)
    hostile = dataclasses.replace(found, compiled=compiled, machine=machine)
    page = check(sw.report(hostile))
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "{{ 7 * 7 }}" in sw.report(hostile)  # no template in what a template is given
    data: dict[str, Any] = {HOSTILE: HOSTILE}
    legend, panels = memory_over_time(compiled, None, data)
    tabs = Tabs("over-time", HOSTILE, {HOSTILE + title: panels[title] for title in panels})
    head = [HOSTILE, legend, Paragraph(HOSTILE, tag="pre"), Details(HOSTILE, [HOSTILE], "x")]
    check(render(HOSTILE, head, [PageSection("memory", HOSTILE, [tabs])], data))


def test_both_sides_of_a_disaggregated_step_have_names():
    run = sw.Run(**RUNS["across"])
    text = sw.report(sw.simulate(run, "h100-sxm"))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert any(each.startswith("prefill stage 0") for each in words)
    assert any(each.startswith("decode stage 0") for each in words)
    assert "stages 0, 0" not in text
    assert not any(each.startswith("stage 0") for each in words)


def test_fills_of_axes_are_the_same_in_all_charts():
    text = sw.report(sw.simulate(sw.Run(**RUNS["across"]), "h100-sxm"))
    fills: dict[str, set[str]] = {}
    for fill, name in re.findall(
        r'<rect [^>]*fill="([^"]*)" stroke[^>]*><text[^>]*>([^<]*)</text>', text.replace("/>", ">")
    ):
        colour = re.sub(r"url\(#[a-z]+\d*-", "#", fill).partition("-")[0].strip(")")
        fills.setdefault(name.removesuffix(" exposed"), set()).add(colour.upper())
    assert {"forward", "cache", "prefill tp", "kv cache"} <= set(fills)
    assert all(len(colours) == 1 for colours in fills.values()), fills
    assert fills["cache"] == fills["kv cache"]


def test_inference_has_the_words_of_serving():
    few: dict[str, Any] = {"layers": 2, "tp": 2}
    for mode, words in (("prefill", "TTFT"), ("decode", "TPOT")):
        found = sw.simulate("llama3-8b", "h100-sxm", mode=mode, **few)
        first = cards(found.compiled, found)[2]
        assert (first.name, first.value) == (words, duration(found.seconds))
    across = sw.simulate(sw.Run(**RUNS["across"]), "h100-sxm")
    names = [card.name for card in cards(across.compiled, across)]
    assert {"Prefill: TTFT", "Decode: TPOT"} <= set(names)


# ---- what does not fit ---------------------------------------------------------------------------


DECODE: dict[str, Any] = {"mode": "decode"}


@cases
def test_a_run_that_does_not_fit_says_so_first(settings: dict[str, Any], hardware: str | None):
    run = sw.Run(**settings)
    found = sw.simulate(run, hardware) if hardware else None
    compiled = found.compiled if found else sw.compile(run)
    first, second, *others = cards(compiled, found)
    assert (first.name, first.state) == ("Peak memory per GPU", "problem")
    assert (second.name, second.state) == ("Parameters", "")
    assert {card.state for card in others} <= {"moot"}
    assert f"<h1>{compiled.model.name} does not fit on " in sw.report(found or compiled)


def test_a_run_that_fits_has_no_grey():
    found = sw.simulate("gpt2", "h100-sxm", layers=2, seq_length=64)
    assert {card.state for card in cards(found.compiled, found)} == {""}
    assert 'class="moot"' not in sw.report(found)


def test_the_price_is_named():
    text = sw.report("gpt2", layers=1, seq_length=64, hardware="h100-sxm", price=3.21)
    assert "per million tokens, at 3.21 USD per GPU-hour" in text
    known = resolve("h100-sxm").price_usd_per_gpu_hour
    text = sw.report("gpt2", layers=1, seq_length=64, hardware="h100-sxm")
    assert f"at {known:g} USD per GPU-hour" in text


# ---- remarks -------------------------------------------------------------------------------------


def said(what: Any, about: str, hardware: str | None = None, **settings: Any) -> list[Remark]:
    if hardware is None:
        found = remarks(sw.compile(what, **settings))
    else:
        simulation = sw.simulate(what, hardware, **settings)
        found = remarks(simulation.compiled, simulation)
    return [remark for remark in found if remark.about == about]


def test_groups_that_leave_the_fast_links_are_named():
    few: dict[str, Any] = {"layers": 2, "seq_length": 256}
    (remark,) = said("llama3.1-70b", "Network", "h100-sxm", tp=16, **few)
    assert remark.level == "warning"
    assert remark.text.startswith("tp=16 crosses the NVLink domain of 8 GPUs: its groups lie in 2 ")
    assert not said("llama3.1-70b", "Network", "h100-sxm", tp=8, dp=2, **few)
    assert not said("llama3.1-70b", "Network", "gb200-nvl72", tp=16, **few)
    (remark,) = said("llama3.1-70b", "Network", "mi300x", tp=16, **few)
    assert "scale-up domain" in remark.text
    (remark,) = said("mixtral-8x7b", "Network", "h100-sxm", ep=8, dp=8, tp=2, **few)
    assert remark.text.startswith("ep=8 crosses the NVLink domain of 8 GPUs: its groups lie in 2 ")


def test_what_does_not_fit_is_a_problem():
    (remark,) = said("llama3.1-70b", "Memory", "h100-sxm", tp=8)
    assert remark.level == "problem"
    assert "but h100-sxm has 80 GB: the run does not fit" in remark.text
    assert "optimizer" in remark.text
    assert not said("llama3-8b", "Memory", "h100-sxm", tp=8)
    (remark,) = said("llama3-8b", "Memory", mode="decode", batch_size=400, device_memory="30GB")
    assert (remark.level, "does not fit" in remark.text) == ("problem", True)


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 8), (2, 16), (8, 80), (8, 16)])
def test_the_bubble_is_that_of_the_formula(pp: int, microbatches: int):
    """(p - 1) / (m + p - 1), arXiv 2104.04473, section 2.2, as a part of the whole step."""
    found = said("llama3-8b", "The pipeline", pp=pp, global_batch_size=microbatches)
    idle = (pp - 1) / (microbatches + pp - 1)
    assert bool(found) == (idle > 0.1)
    for remark in found:
        assert f"idle {idle:.1%} of the step by the schedule alone" in remark.text


def test_uneven_experts_are_told(tmp_path: Path):
    load = tmp_path / "load.csv"
    load.write_text("2,2,2,2,2,2,2,6\n")
    settings: dict[str, Any] = {"ep": 8, "dp": 8, "layers": 2, "seq_length": 512}
    (note,) = said("mixtral-8x7b", "Experts", **settings)
    assert note.level == "note"
    (remark,) = said("mixtral-8x7b", "Experts", expert_load=str(load), **settings)
    assert remark.level == "warning"
    compiled = sw.compile("mixtral-8x7b", expert_load=str(load), **settings)
    work = [(int(of.tasks.flops.sum()), len(of.ranks)) for of in compiled.program.classes]
    mean = sum(w * n for w, n in work) / sum(n for _, n in work)
    assert f"computes {max(w for w, _ in work) / mean - 1:.0%} more" in remark.text


def test_exposed_communication_and_low_mfu_are_told():
    found = said("llama3-8b", "Communication", "h100-sxm", tp=8, layers=4)
    assert [remark.text.split(" is ")[0] for remark in found] == ["communication along tp"]
    (remark,) = said("gpt2", "Speed", "h100-sxm", dp=8)
    simulation = sw.simulate("gpt2", "h100-sxm", dp=8)
    assert f"MFU is {simulation.mfu:.1%}" in remark.text


def test_remarks_carry_remedies():
    """Those that apply: what is on already is not advised."""
    few: dict[str, Any] = {"tp": 8, "layers": 4}
    (remark,) = said("llama3-8b", "Communication", "h100-sxm", **few)
    assert remark.text.endswith("To shorten it: lower tp or sequence_parallel.")
    (remark,) = said("llama3-8b", "Communication", "h100-sxm", sequence_parallel=True, **few)
    assert "overlap with matrix products (tp_comm_overlap)" in remark.text
    assert "lower tp" in remark.text
    for remark in said(
        "llama3-8b", "Communication", "h100-sxm",
        sequence_parallel=True, tp_comm_overlap=True, **few,
    ):  # fmt: skip
        assert "tp_comm_overlap" not in remark.text
    experts = {"ep": 32, "dp": 32, "layers": 5, "zero": 1, "global_batch_size": 32}
    text = " ".join(r.text for r in said("deepseek-v3", "Communication", "h100-sxm", **experts))
    assert "lower ep" in text
    assert "moe_flex_dispatcher" in text


def test_low_mfu_in_fp8_is_measured_by_the_peak_of_bf16():
    """A step at 38% of the peak of bf16 is not slow because it is at 19% of that of fp8."""
    run: dict[str, Any] = {
        "seq_length": 512,
        "layers": 2,
        "precision": "fp8",
        "fp8_recipe": "tensorwise",
    }
    (remark,) = said("llama3-8b", "Speed", "h100-sxm", tp=8, **run)
    mfu = sw.simulate("llama3-8b", "h100-sxm", tp=8, **run).mfu
    assert f"MFU is {mfu:.1%} of the peak in fp8, {2 * mfu:.1%} of bf16's" in remark.text


def test_idle_ranks_that_wait_for_longer_stages_are_told_so():
    """The head of a small model takes longer than its layers: more microbatches do not help."""
    run: dict[str, Any] = {"layers": 4, "pp": 4, "seq_length": 512}
    (few,) = said("llama3-8b", "The pipeline", "h100-sxm", global_batch_size=4, **run)
    assert "More microbatches" in few.text
    (many,) = said("llama3-8b", "The pipeline", "h100-sxm", global_batch_size=256, **run)
    assert "waiting for stages that take longer" in many.text
    assert f"{3 / 259:.1%} by the schedule" in many.text


def test_thresholds_cite_what_was_reached():
    """LOW_MFU is below what Llama 3 reached: 380 to 430 TFLOP/s of 989.4 (table 4)."""
    from stagewright.views.advice import LOW_MFU

    assert resolve("h100-sxm").peak_bf16_tflops * LOW_MFU < 380


# ---- the command ---------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run.html"
    settings = ("--layers", "2", "--seq-length", "64", "--tp", "2")
    assert run("report", "llama3-8b", *settings, "-o", str(out)) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    told = sw.report("llama3-8b", layers=2, seq_length=64, tp=2)
    assert out.read_text(encoding="utf-8") == told
    again = ("-o", str(out), "--force")
    assert run("report", "llama3-8b", *settings, *again, "--hardware", "h100-sxm") == 0
    timed = sw.report("llama3-8b", layers=2, seq_length=64, tp=2, hardware="h100-sxm")
    assert out.read_text(encoding="utf-8") == timed


def test_command_reads_bundles(tmp_path: Path):
    settings = ("--layers", "2", "--seq-length", "64", "--tp", "2")
    bundle, out = str(tmp_path / "run.bundle"), tmp_path / "run.html"
    assert run("generate", "llama3-8b", *settings, "--format", "bundle", "-o", bundle) == 0
    assert run("report", bundle, "-o", str(out)) == 0
    assert out.read_text(encoding="utf-8") == sw.report(
        "llama3-8b", layers=2, seq_length=64, tp=2, global_batch_size=1
    )


@cases
def test_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
):
    out = tmp_path / "run.html"
    assert run("report", "llama3-8b", *arguments, "-o", str(out)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("name", RUNS)
def test_the_command_on_the_page_writes_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page = sw.report(sw.Run(**RUNS[name]))
    assert run(*shlex.split(command_of(page))[1:]) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page


def test_the_command_on_the_page_has_the_machine_and_the_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page = sw.report(
        "llama3-8b", layers=2, seq_length=64, tp=2, dp=2, zero=3,
        hardware="h100-sxm", topology="fullflat", price=3.5,
        no_overlap=["dp", "tp"], prefetch=2, stragglers={1: 1.5},
    )  # fmt: skip
    for words in ("<td>topology</td><td>fullflat</td><td>set", "<td>prefetch</td><td>2</td>"):
        assert words in page
    assert re.search(r"<td>seq_length</td><td>64</td><td>set", page)
    assert run(*shlex.split(command_of(page))[1:]) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page


def test_the_command_of_a_run_file_with_nodes_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("nodes.yaml").write_text(
        "model: gpt2\nlayers: 1\nseq_length: 64\nhardware: h100-sxm\nnodes: 1\n"
    )
    assert run("report", "--config", "nodes.yaml", "-o", "first.html") == 0
    page = Path("first.html").read_text(encoding="utf-8")
    assert "--nodes 1 " in command_of(page)
    assert run(*shlex.split(command_of(page))[1:]) == 0
    assert Path("run.html").read_text(encoding="utf-8") == page


def test_settings_that_no_option_says_are_a_run_file(tmp_path: Path):
    requests = [{"count": 3, "context_length": 100}, {"context_length": 50, "new_tokens": 2}]
    page = sw.report("llama3-8b", mode="decode", layers=2, requests=requests, hardware="b200")
    file = re.fullmatch(r"cat > run.yaml <<'END'\n(.*?)END\n(.*)", command_of(page), re.DOTALL)
    assert file is not None
    path = tmp_path / "run.yaml"
    path.write_text(file[1], encoding="utf-8")
    assert file[2] == "stagewright report --config run.yaml -o run.html"
    assert run("report", "--config", str(path), "-o", str(tmp_path / "run.html")) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page


def test_lengths_that_nobody_gave_are_defaults():
    for settings in ({}, {"mode": "decode"}, {"mode": "prefill"}):
        page = sw.report("llama3-8b", layers=2, **settings)
        rows = re.findall(r"<td>(\w*_length)</td><td>\d+</td><td>(\w+)", page)
        assert rows
        assert {mark for _, mark in rows} == {"default"}


def command_of(page: str) -> str:
    found = re.search(r'<pre class="command"><code>(.*?)</code></pre>', page, re.S)
    assert found is not None
    return html.unescape(found[1])


def test_settings_of_a_compiled_run_cannot_change():
    compiled = sw.compile("llama3-8b", **{k: v for k, v in SMALL.items() if k != "model"})
    with pytest.raises(sw.UserError, match="tp cannot change what is compiled"):
        sw.simulate(compiled, "h100-sxm", tp=2)


def test_the_price_is_the_one_that_is_asked_for():
    """Of two prices of a GPU's hour, the cost of a million tokens is in the same proportion."""
    run = {"layers": 1, "seq_length": 64, "hardware": "h100-sxm"}
    usd = [
        float(re.search(r"Cost</dt><dd>([\d.e-]+) USD", sw.report("gpt2", **run, price=p))[1])
        for p in (2.0, 20.0)
    ]
    assert usd[1] == pytest.approx(10 * usd[0], rel=0.02)


# ---- several runs, and single charts -------------------------------------------------------------


@pytest.fixture
def run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = "model: llama3-8b\nlayers: 4\nseq_length: 64\nglobal_batch_size: 8\npp: 2\n"
    Path("short.yaml").write_text(text + "hardware: h100-sxm\n")
    Path("long.yaml").write_text(text.replace("pp: 2", "tp: 2") + "hardware: h200\n")
    Path("untimed.yaml").write_text(text)
    return tmp_path


def test_runs_are_compared_on_one_page(run_files: Path):
    names = ("short.yaml", "long.yaml", "untimed.yaml")
    assert run("report", *names, "-o", "all.html") == 0
    text = Path("all.html").read_text(encoding="utf-8")
    page = check(text)
    sections = [attrs["id"] for tag, attrs in page.elements if tag == "section"]
    assert sections == ["settings", "figures", "time", "memory", "runs"]
    settings = re.search(r'id="settings-title".*?</section>', text, re.DOTALL)[0]
    assert "<td>hardware</td><td>h100-sxm</td><td>h200</td><td></td>" in settings
    assert "<td>tp</td><td>1</td><td>2</td><td>1</td>" in settings
    assert "seq_length" not in settings
    steps = [
        sw.simulate("llama3-8b", hardware, layers=4, seq_length=64, global_batch_size=8, **degree)
        for hardware, degree in (("h100-sxm", {"pp": 2}), ("h200", {"tp": 2}))
    ]
    change = f"{steps[1].seconds / steps[0].seconds - 1:+.1%}"
    assert f"{duration(steps[1].seconds)} ({change})" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert run("report", *names, "-o", "all.html", "--force") == 0
    assert Path("all.html").read_text(encoding="utf-8") == text


def test_timelines_of_compared_runs_have_one_scale(run_files: Path):
    assert run("report", "short.yaml", "long.yaml", "-o", "both.html") == 0
    pictures = re.findall(
        r'<svg[^>]*class="timeline".*?</svg>', Path("both.html").read_text(), re.DOTALL
    )
    axes = [re.findall(r'text-anchor="middle">([^<]*)</text>', picture) for picture in pictures]
    assert len(axes) == 2
    assert axes[0] == axes[1]


def test_equal_names_are_numbered_and_bundles_are_compared(run_files: Path):
    bundle = ("generate", "--config", "short.yaml", "--format", "bundle", "-o", "short.bundle")
    assert run(*bundle) == 0
    assert run("report", "short.yaml", "short.bundle", "-o", "both.html") == 0
    assert (
        "2 runs of llama3-8b on h100-sxm compared: short 1, short 2"
        in Path("both.html").read_text()
    )
    assert run("report", "short.yaml", "gpt2", "--config", "long.yaml", "-o", "x.html") == 2


@pytest.mark.parametrize("name", CHARTS)
def test_each_chart_is_a_file_of_its_own_with_numbers(run_files: Path, name: str):
    assert run("report", "short.yaml", "--picture", name, "-o", "chart.svg") == 0
    drawn = ElementTree.fromstring(Path("chart.svg").read_text(encoding="utf-8"))
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert run("report", "short.yaml", "--picture", name, "-o", "chart.csv") == 0
    first, *rows = csv.reader(Path("chart.csv").read_text(encoding="utf-8").splitlines())
    assert rows
    assert all(len(row) == len(first) for row in rows)


def test_numbers_of_charts_are_those_of_the_run(run_files: Path):
    assert run("report", "short.yaml", "long.yaml", "--picture", "time", "-o", "time.csv") == 0
    rows = list(csv.DictReader(Path("time.csv").read_text().splitlines()))
    step = sw.simulate("llama3-8b", "h100-sxm", layers=4, seq_length=64, global_batch_size=8, pp=2)
    assert [row["run"] for row in rows] == ["short", "long"]
    assert sum(float(v) for k, v in rows[0].items() if k != "run") == pytest.approx(step.seconds)
    assert run("report", "short.yaml", "long.yaml", "--picture", "memory", "-o", "memory.csv") == 0
    rows = list(csv.DictReader(Path("memory.csv").read_text().splitlines()))
    assert sum(int(v) for k, v in rows[0].items() if k != "run") == step.fit.peak


@cases
def test_wrong_charts_are_one_line(
    run_files: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
):
    assert run("report", "short.yaml", *arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert run("report", "untimed.yaml", "--picture", "time", "-o", "x.svg") == 2
    assert "--picture time is of a timed step; add --hardware" in capsys.readouterr().err


def test_a_network_in_bits_is_noticed(tmp_path: Path):
    """A NIC of 400 Gb/s has 50 GB/s; hardware of the package has sources and is not doubted."""
    few: dict[str, Any] = {"layers": 2, "seq_length": 256, "dp": 16}
    own = tmp_path / "own.yaml"
    own.write_text("base: h100-sxm\nname: own\nscale_out: {bandwidth_gb_s: 400}\n")
    (remark,) = said("gpt2", "Network", str(own), **few)
    assert remark.text.endswith("If 400 is in Gb/s, write 50.")
    assert not said("gpt2", "Network", "b300", **few)
