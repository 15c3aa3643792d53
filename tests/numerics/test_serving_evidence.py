"""A server under load, request by request, beside what its clients measured."""

from dataclasses import replace
from statistics import mean

import pytest

import replayed
from stagewright.evidence.rows import Prediction, compare
from stagewright.evidence.servers import STAGE_QUANTITIES, closed_loops, stages
from stagewright.serving.workloads.synthetic import LoadStage

pytestmark = pytest.mark.numerics


def test_every_stage_has_every_quantity():
    by_stage: dict[tuple[str, int], set[str]] = {}
    for row in stages():
        by_stage.setdefault((row.server.name, row.stage), set()).add(row.quantity)
        assert row.server.stages[0].rate > 0
    assert all(quantities == STAGE_QUANTITIES.keys() for quantities in by_stage.values())


def test_a_minute_of_a_server_is_as_measured():
    first = stages()[0].server
    minute = replace(first, stages=(LoadStage(first.stages[0].rate, 60),))
    rows = [replace(row, server=minute) for row in stages() if row.experiment == repr(first)]
    rows = [row for row in rows if row.stage == 0]
    found = {p.quantity: p.error for p in compare(rows) if isinstance(p, Prediction)}
    assert abs(found["tpot_ms"]) < 0.1
    assert abs(found["e2e_ms"]) < 0.1
    assert abs(found["ttft_ms"]) < 0.3  # nothing is cached at first


def test_users_in_a_closed_loop_are_as_measured():
    rows = [row for row in closed_loops() if row.engine == "vllm" and row.hardware == "h100-sxm"]
    found = [p for p in compare(rows) if isinstance(p, Prediction)]
    for quantity, within in ("tpot_ms", 0.1), ("ttft_ms", 0.25):
        errors = [abs(p.error) for p in found if p.quantity == quantity]
        assert len(errors) > 30
        assert mean(errors) < within


def test_a_recorded_workload_is_replayed():
    server = next(s for s in replayed.replayed_servers() if s.hardware == "rtx-4090")
    found = {p.quantity: p.error for p in replayed.predictions(server)}
    assert found.keys() == server.measured.keys()
    assert all(-0.1 < error < 0.3 for error in found.values())
