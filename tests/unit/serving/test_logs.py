"""Logs of servers: what their users saw, beside what is served here."""

from array import array

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.serving.compare_log import compare, measured_run
from stagewright.serving.simulation import Outcome
from stagewright.serving.workload import Records
from stagewright.serving.workloads import traces

LOG = """arrival,prompt,output,ttft_ms,latency
1.5,100,11,250,1.25
1.0,50,1,100,0.1
2.0,10,5,,
"""


def test_a_log_is_a_workload_and_times(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    work, log = traces.read(path), measured_run(path)
    assert list(work.arrival) == [0.0, 0.5, 1.0]
    assert list(work.prompt) == [50, 100, 10]
    assert log.times["ttft"][:2] == pytest.approx([0.1, 0.25])
    assert log.times["tpot"][1] == pytest.approx(0.1)
    assert np.isnan(log.times["tpot"][[0, 2]]).all()  # one token; no answer


def test_errors_are_of_the_requests_that_were_answered(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    work, log = traces.read(path), measured_run(path)
    records = Records.of(3)
    records.arrival[:] = array("d", [0.0, 0.5, 1.0])
    records.first[:] = array("d", [0.2, 1.0, 9.0])
    records.finish[:] = array("d", [0.2, 3.0, 9.5])
    found = {(each.name, each.figure): each for each in compare(log, Outcome(work, records, []), 3)}
    assert found["ttft", "mean"].measured == pytest.approx(0.175)
    assert found["ttft", "mean"].predicted == pytest.approx(0.35)
    assert found["ttft", "mean"].error == pytest.approx(1.0)
    assert found["tpot", "p50"].error == pytest.approx(1.0)
    assert found["e2e", "p99"].predicted == pytest.approx(0.2 + 0.99 * 2.3)
    with pytest.raises(UserError, match="the log has 3 requests, 2 were served; leave out --num"):
        compare(log, Outcome(work, records, []), 2)


@cases
def test_what_is_no_log_is_refused(tmp_path, text, says):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        measured_run(path)
