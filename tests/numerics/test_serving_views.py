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


def test_the_expense_is_within_what_gpus_draw(found: Serving):
    spent = found.expense()
    hardware = found.service.instance.machine.hardware
    assert hardware.tdp_w * 0.2 <= spent.watts_per_gpu <= hardware.tdp_w + hardware.node_overhead_w
    tokens = sum(found.outcome.workload.output)
    assert spent.joules == pytest.approx(spent.joules_per_token * tokens)
    assert spent.joules == pytest.approx(spent.watts_per_gpu * 2 * found.summary.seconds)
    usd = 2.0 * 2 * found.summary.seconds / 3600 / tokens * 1e6
    assert spent.usd_per_million_tokens == pytest.approx(usd)
    assert json.dumps(found.values())
