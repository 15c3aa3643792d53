"""Host times of serving engines."""

import pytest

import stagewright as sw
from stagewright.serving.batch import DecodeRun
from stagewright.serving.host import HOSTS, HostTimes

HOST = HostTimes(
    per_step=1.0, per_request_step=0.01, max_requests=100, overlaps_gpu=True,
    exposed_per_step=0.5, exposed_per_request=0.001,
)  # fmt: skip


def test_a_host_takes_no_longer_beyond_the_requests_that_were_measured():
    assert HOST.step(50) == 1.5
    assert HOST.step(100) == HOST.step(1000) == 2.0


def test_what_is_hidden_counts_where_it_is_longer_than_the_gpu():
    assert HOST.step_interval(1.0, 10) == pytest.approx(1.1 + 0.51)
    assert HOST.step_interval(3.0, 10) == pytest.approx(3.0 + 0.51)


def test_a_run_ends_where_the_gpu_takes_longer_than_the_host():
    hosted = HOST.run_with_host(DecodeRun(100, 1.0, 0.25), 100)
    assert hosted == (4, pytest.approx(2.6), 0.0)
    hosted = HOST.run_with_host(DecodeRun(100, 2.5, 0.25), 100)
    assert hosted == (100, pytest.approx(3.1), 0.25)


@pytest.mark.parametrize(("ahead", "users", "noted"), [(True, 200, True), (True, 100, False),
                                                       (False, 200, True)])  # fmt: skip
def test_steps_with_more_requests_than_measured_are_noted(ahead: bool, users: int, noted: bool):
    found = sw.serve(
        "llama3.1-8b", "h100-sxm", layers=1, isl=16, osl=4, concurrency=users, num_requests=users,
        async_scheduling=ahead,
    )  # fmt: skip
    note = f"measured with up to {HOSTS['vllm'].max_requests}"
    assert any(note in text for text in found.notes()) == noted
