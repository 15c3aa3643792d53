"""A server under load, request by request, beside what its clients measured."""

from dataclasses import replace

import pytest

import replayed
from stagewright.evidence import closed_loops
from stagewright.evidence.serving import QUANTITIES, predictions, servers
from stagewright.serving.workloads.synthetic import LoadStage

pytestmark = pytest.mark.numerics


def test_every_stage_has_every_quantity():
    for server in servers():
        assert all(stage.times.keys() == QUANTITIES.keys() for stage in server.stages)
        assert server.stages[0].load.rate > 0


def test_a_minute_of_a_server_is_as_measured():
    server = servers()[0]
    stage = server.stages[0]
    minute = stage._replace(load=LoadStage(stage.load.rate, 60))
    found = {p.quantity: p.error for p in predictions(replace(server, stages=(minute,)))}
    assert abs(found["tpot_ms"]) < 0.1
    assert abs(found["e2e_ms"]) < 0.1
    assert abs(found["ttft_ms"]) < 0.3  # nothing is cached at first


def test_users_in_a_closed_loop_are_as_measured():
    loops = closed_loops.closed_loops()
    assert all(each.measured for each in loops)
    some = next(each for each in loops if "llama3.1-8b bf16 tp=1" in each.row.row)
    found = {p.quantity: p.error for p in closed_loops.predictions(some)}
    assert abs(found["tpot_ms"]) < 0.2


def test_a_recorded_workload_is_replayed():
    server = next(s for s in replayed.replayed_servers() if s.hardware == "rtx-4090")
    found = {p.quantity: p.error for p in replayed.predictions(server)}
    assert found.keys() == server.measured.keys()
    assert all(-0.1 < error < 0.3 for error in found.values())
