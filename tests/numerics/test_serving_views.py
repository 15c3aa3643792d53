"""The page, the Perfetto trace and the expense of a serving run."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import stagewright as sw
from stagewright.api import served
from stagewright.api.served import Serving
from stagewright.cli import main as cli
from stagewright.numbers import duration

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def found() -> Serving:
    return sw.serve(
        "llama3.1-8b", "h100-sxm", rate=200, isl=300, osl=12, num_requests=150, instances=2,
        layers=2, ttft=20, price=2.0,
    )  # fmt: skip


def test_the_page_has_every_chart(found: Serving):
    page = found.page()
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert page == found.page()  # same bytes
    assert "USD" in page
    assert " J" in page


def test_the_page_says_overload_in_red_and_limits_in_numbers():
    load = {"layers": 4, "isl": 2000, "osl": 60, "num_requests": 300, "ttft": 50, "tpot": 9}
    calm, busy = (sw.serve("llama3.1-8b", "h100-sxm", **load, rate=rate) for rate in (20, 5000))
    for of in (calm, busy):
        page, summary = of.page(), of.summary
        alarm = f'<p class="verdict"><b>{summary.verdict}</b></p>'
        assert (alarm in page) == summary.steadiness.overloaded
        assert summary.verdict in page
        assert summary.measured_span in page
        assert "limit 50.00 ms" in page
        assert f"{summary.good:.1%} of requests keep the limits" in page
        assert f"TTFT p90: {duration(summary.ttft.p90)}" in page
        assert f"TPOT p99: {duration(summary.tpot.p99)}" in page
        assert 'class="problem"' in page if of is busy else 'class="problem"' not in page
    assert busy.summary.steadiness.overloaded
    assert f"{busy.summary.binding} binds" in busy.page()
    assert "Shaded: before and after the measured window" in calm.page()


def test_perfetto_has_the_requests_and_the_state_of_engines(found: Serving, tmp_path):
    found.perfetto(tmp_path / "run.json")
    found.perfetto(tmp_path / "again.json")
    assert (tmp_path / "run.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    begins = [each for each in events if each["ph"] == "b"]
    assert len(begins) == len([each for each in events if each["ph"] == "e"])
    assert len({each["id"] for each in begins}) == 150
    assert {each["pid"] for each in begins} == {0, 1}
    assert {each["name"] for each in events if each["ph"] == "C"} == {
        "running", "waiting", "KV cache",
    }  # fmt: skip


def test_gpus_draw_no_more_than_they_can(found: Serving):
    """Nor where requests are preempted, whose tokens are late by many steps."""
    crowded = sw.serve("llama3.1-8b", "h100-sxm", rate=900, isl=2048, osl=256, num_requests=200,
                       layers=2, device_memory="6.5GB")  # fmt: skip
    assert crowded.summary.preemptions > 0
    for of in (found, crowded):
        hardware = of.group.instance.machine.hardware
        most = hardware.tdp_w + hardware.node_overhead_w
        assert hardware.tdp_w * 0.2 <= of.expense().watts_per_gpu <= most


def test_the_expense_adds_up(found: Serving):
    spent, seconds = found.expense(), found.summary.window.seconds
    tokens = found.summary.output_rate * seconds
    assert spent.joules == pytest.approx(spent.joules_per_token * tokens)
    assert spent.joules == pytest.approx(spent.watts_per_gpu * 2 * seconds)
    usd = 2.0 * 2 * seconds / 3600 / tokens * 1e6
    assert spent.usd_per_million_tokens == pytest.approx(usd)
    assert json.dumps(found.to_dict())


def test_joules_and_dollars_are_those_of_a_longer_run():
    """Ramp and drain, in which GPUs are paid that do little, are no part of them."""
    load = {"layers": 2, "rate": 100, "isl": 500, "osl": 300, "price": 2.0}
    short, long = (
        sw.serve("llama3.1-8b", "h100-sxm", **load, num_requests=count).expense()
        for count in (1200, 4000)
    )
    assert short.joules_per_token == pytest.approx(long.joules_per_token, rel=0.05)
    assert short.usd_per_million_tokens == pytest.approx(long.usd_per_million_tokens, rel=0.05)


FEW = {"rate": 5.0, "isl": 64, "osl": 8, "num_requests": 20, "layers": 2}


def test_what_is_stopped_is_not_written_as_if_whole(monkeypatch, capsys, tmp_path):
    of = sw.serve("llama3.1-8b", "h100-sxm", **FEW)
    of = replace(of, outcome=replace(of.outcome, stopped=True))
    monkeypatch.setattr(served, "served", lambda *_, **__: of)
    files = [tmp_path / "requests.csv", tmp_path / "run.json"]
    asked = f"serve llama3.1-8b --hardware h100-sxm --rate 5 --isl 64 --osl 8 -o {files[0]}"
    with pytest.raises(SystemExit) as caught:
        cli.main([*asked.split(), "--perfetto", str(files[1])])
    assert caught.value.code == 130
    said = capsys.readouterr()
    assert "20 requests in" in said.out
    for path in files:
        assert f"stopped: {path} was not written" in said.err
        assert not path.exists()


def test_classes_have_a_table_and_requests_their_limits():
    rows = [{"name": "chat", "share": 3, "ttft": "1us"}, {"name": "batch"}]
    of = sw.serve("llama3.1-8b", "h100-sxm", **FEW, classes=rows)
    table = of.table("classes")
    assert [row["class"] for row in table.rows] == ["chat", "batch"]
    assert [row["keep limits"] for row in table.rows] == [0, 1]
    measured = [row["good"] for row in of.table("requests").rows if row["measured"]]
    assert sum(measured) == table.rows[1]["requests"] == of.summary.good * len(measured)
    with pytest.raises(sw.UserError, match=r"classes, row 1: unknown 'tttf'"):
        sw.serve("llama3.1-8b", "h100-sxm", **FEW, classes=[{"name": "a", "tttf": 3}])
    with pytest.raises(sw.UserError, match="did you mean 'num_requests'"):
        sw.serve("llama3.1-8b", "h100-sxm", rate=1.0, isl=1, osl=1, num_request=5)


def test_learned_positions_are_of_requests_not_of_steps():
    of = sw.serve("gpt2", "h100-sxm", rate=50, isl=900, osl=200, num_requests=20)
    assert (of.summary.requests, of.summary.shortened) == (20, 20)
    assert set(of.outcome.workload.output) == {1024 - 900}
    run = sw.Run(model="gpt2", mode="prefill", batch_size=4, prompt_length=900)
    seconds = sw.simulate(sw.compile(run), "h100-sxm", serving_engine="vllm").seconds
    tokens, pairs = 4 * 900, 4 * 900 * 901 // 2
    assert of.group.instance.times.step(tokens, pairs, tokens, 4) == pytest.approx(
        seconds, rel=0.02
    )
    with pytest.raises(sw.UserError, match="t5-base has an encoder"):
        sw.serve("t5-base", "h100-sxm", rate=50, isl=9, osl=2, num_requests=2)
