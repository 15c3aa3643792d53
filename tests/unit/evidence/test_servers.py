"""How measured servers were started, by source."""

from dataclasses import replace

import pytest

from stagewright.evidence.servers import (
    LOOP_QUANTITIES,
    REQUESTS_PER_USER,
    ClosedLoopRow,
    client_of,
    closed_loops,
    entries,
    model_of_row,
)
from stagewright.lower.compile import compile
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.schedulers.named import ENGINES

ROW = ClosedLoopRow(
    source="aiconfigurator, vLLM", row="a row", hardware="h100-sxm", quantity="ttft_ms",
    measured=1.0, engine="vllm", users=32, isl=1024, osl=256, shortest=1.0,
    max_num_batched_tokens=8192, checkpoint="", settings={"model": "qwen3-32b"}, busy=1.0,
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
    polled = [client_of(replace(some, engine="sglang", users=users)).options for users in (4, 16)]
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


def test_every_entry_is_cited_and_of_several_rows():
    loops = closed_loops()
    for entry in entries():
        assert entry.cited
        assert len({of.experiment for of in loops if entry.fits(of)}) > 1
    for of in loops:
        EngineSection(scheduler=ENGINES[of.engine], **client_of(of).options)


def test_rows_that_the_package_carries_can_be_read():
    every = closed_loops()
    assert len(every) > 600
    assert {row.quantity for row in every} == set(LOOP_QUANTITIES)
    assert all(row.url.startswith("https://") and row.measured > 0 for row in every)


def test_power_of_a_run_is_that_of_its_busy_and_its_idle_time():
    """An idle H100 draws a fifth of its TDP."""
    row = replace(ROW, quantity="watts", users=1, isl=256, osl=16, settings={"model": "gpt2"})
    outcome = row.simulate()
    busy, half = row.predict(outcome), replace(row, busy=0.5).predict(outcome)
    assert half == pytest.approx((busy + 140) / 2)


def test_checkpoints_are_stored_as_published():
    """NVIDIA's checkpoint of DeepSeek-R1 has experts and `wo` in four bits, else bf16."""
    settings = {"model": "deepseek-r1", "layers": 4, "tp": 8, "mode": "decode", "batch_size": 8}
    tasks = compile(*model_of_row(settings, "deepseek-r1-nvfp4-v2")).program.classes[0].tasks
    data_types = {
        tasks.names[name]: tasks.dtypes[dtype]
        for name, dtype in zip(tasks.name.tolist(), tasks.dtype.tolist(), strict=True)
    }
    assert data_types["layer3.q"] == data_types["layer3.latent"] == "bf16"
    assert data_types["layer3.attn_out"] == data_types["layer3.mlp_out"] == "fp4"
