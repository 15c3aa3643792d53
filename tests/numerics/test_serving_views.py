"""The page, the Perfetto trace and the expense of a serving run."""

import json
import re
from xml.etree import ElementTree

import pytest

import stagewright as sw
from stagewright.api.served import Serving

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
    assert len(pictures) == 3 * 6  # three layouts of six charts
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert page == found.page()  # same bytes
    assert "USD" in page
    assert " J" in page


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
        hardware = of.service.instance.machine.hardware
        most = hardware.tdp_w + hardware.node_overhead_w
        assert hardware.tdp_w * 0.2 <= of.expense().watts_per_gpu <= most


def test_the_expense_adds_up(found: Serving):
    spent = found.expense()
    tokens = sum(found.outcome.workload.output)
    assert spent.joules == pytest.approx(spent.joules_per_token * tokens)
    assert spent.joules == pytest.approx(spent.watts_per_gpu * 2 * found.summary.seconds)
    usd = 2.0 * 2 * found.summary.seconds / 3600 / tokens * 1e6
    assert spent.usd_per_million_tokens == pytest.approx(usd)
    assert json.dumps(found.values())
