"""How measured servers were started, by source."""

from dataclasses import replace

import pytest

from stagewright.evidence import servers
from stagewright.evidence.inference import (
    REQUESTS_PER_USER,
    ServedRow,
    client_of,
    entries,
    rows,
)
from stagewright.evidence.servers import closed_loops
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.schedulers.named import ENGINES

ROW = ServedRow(
    source="aiconfigurator, vLLM", row="a row", hardware="h100-sxm", quantity="ttft_ms",
    measured=1.0, engine="vllm", concurrency=32.0, request_rate=None,
    isl=1024, cached=0, osl=256, shortest=1.0, chunk=8192, checkpoint="",
    settings={"model": "qwen3-32b"},
)  # fmt: skip


def test_a_generated_server_has_room_for_a_prompt_beside_its_users():
    client = client_of(ROW)
    assert client.requests_per_user == 20
    assert client.options["max_num_batched_tokens"] == 1024 + 32 + 1500
    assert not client.options["async_scheduling"]
    drawn = client_of(replace(ROW, shortest=0.8))
    assert (drawn.requests_per_user, drawn.options) == (
        REQUESTS_PER_USER,
        {"max_num_batched_tokens": 8192},
    )


def test_entries_differ_by_users_and_by_day():
    some = replace(ROW, source="InferenceX", hardware="b200", settings={"model": "deepseek-r1"})
    polled = [
        client_of(replace(some, engine="sglang", concurrency=users)).options
        for users in (4.0, 16.0)
    ]
    assert [of["scheduler_recv_interval"] for of in polled] == [10, 30]
    days = [
        client_of(replace(some, engine="trtllm", row=f"x4, {day}", isl=100)).options
        for day in ("2025-12-15", "2026-02-03")
    ]
    assert [of["max_num_batched_tokens"] for of in days] == [100 + 32 + 64, 8192]


def test_the_first_step_takes_longer_where_no_request_came_before():
    some = replace(ROW, engine="trtllm", settings={"model": "deepseek-r1"}, shortest=0.8)
    served = [
        replace(some, hardware=hardware, row=f"x4{day}")
        for hardware, day in (("h200", ""), ("h200", ", 2026-05-18"), ("b200", ", 2025-12-15"))
    ]
    assert [client_of(row).first_step for row in served] == [1.6, 0.0, 0.0]


def test_prompts_wait_where_the_script_says_so():
    some = replace(ROW, engine="trtllm", settings={"model": "llama3.1-70b", "tp": 4}, shortest=0.8)
    steps = [
        client_of(row).options.get("batch_wait_timeout_iters")
        for row in (
            replace(some, osl=1024),
            replace(some, osl=8192),
            replace(some, osl=1024, settings={"model": "llama3.1-70b", "tp": 8}),
        )
    ]
    assert steps == [20, None, None]


def test_every_entry_is_cited_and_of_several_rows(monkeypatch: pytest.MonkeyPatch):
    # Those that the package carries, on hardware that is not compared, too.
    monkeypatch.setattr(servers, "HARDWARE", {row.hardware for row in rows()})
    loops = closed_loops()
    for entry in entries():
        assert entry.cited
        assert len({of.experiment for of in loops if entry.fits(of.served)}) > 1
    for of in loops:
        EngineSection(scheduler=ENGINES[of.served.engine], **client_of(of.served).options)
