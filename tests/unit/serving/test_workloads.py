"""Traces that are read, and requests that are drawn."""

import gzip
import hashlib
from array import array
from dataclasses import replace

import pytest

from helpers import cases
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError
from stagewright.run.sections.serving import WorkloadSection
from stagewright.serving.workload import (
    NEVER_FITS,
    PROMPT_EXCEEDS_STEP,
    TOO_LONG,
    Workload,
    accept,
    with_past,
)
from stagewright.serving.workloads import traces
from stagewright.serving.workloads.synthetic import (
    Arrivals,
    Conversations,
    Lengths,
    LoadStage,
    SharedPrefix,
    closed_loop,
    load_in_stages,
    open_loop,
    sessions,
)

LENGTHS = Lengths(isl=100, osl=10)


def written(tmp_path, text: str, name: str = "trace.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake(tmp_path):
    text = (
        '{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'
        '{"timestamp": 1000, "input_length": 512, "output_length": 3, "hash_ids": [7]}\n'
    )
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (written(tmp_path, text), packed):
        of = traces.read(path)
        assert list(of.arrival) == [0.0, 1.0]
        assert list(of.prompt) == [512, 600]
        assert of.chains == [((7,), (512,)), ((7,), (512,))]  # the rest is its own
    assert list(traces.read(packed, speed=2).arrival) == [0.0, 0.5]


def test_azure(tmp_path):
    of = traces.read(
        written(
            tmp_path,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
            "azure.csv",
        )
    )
    assert list(of.arrival) == pytest.approx([0, 4.314579], abs=1e-6)
    assert (list(of.prompt), list(of.output)) == ([374, 396], [44, 109])


def test_rows_that_are_no_requests_are_counted(tmp_path):
    rows = ["arrival,isl,osl,session", "1,0,5,a", "-1,5,5,a", "3,5,5,b", "2,5,1,a"]
    of = traces.read(written(tmp_path, "\n".join(rows), "t.csv"))
    assert of.rejected == {traces.NO_TOKENS: 1, traces.NEGATIVE: 1}
    assert list(of.arrival) == [0, 1]
    assert of.session is not None
    assert list(of.session) == [0, 1]


def test_all_members_of_a_gzip_file_are_read(tmp_path):
    path = tmp_path / "two.csv.gz"
    path.write_bytes(gzip.compress(b"arrival,isl,osl\n1,5,5\n") + gzip.compress(b"2,6,5\n"))
    assert list(traces.read(path).prompt) == [5, 6]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="is cut off"):
        traces.read(path)


@cases
def test_bad_traces_are_one_line(tmp_path, text: str, says: str):
    with pytest.raises(UserError) as error:
        traces.read(written(tmp_path, text))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_dates_have_zones(tmp_path):
    dates = ["2026-11-30T12:00:00Z", "2026-11-30 13:00:00.5+01:00", "2026-11-30 12:00:02.25"]
    rows = "\n".join(["arrival,isl,osl", *(f"{date},5,3" for date in dates)])
    assert list(traces.read(written(tmp_path, rows)).arrival) == [0.0, 0.5, 2.25]


def test_a_seed_gives_the_same_bytes():
    def drawn(seed: int) -> str:
        work = open_loop(
            500,
            Arrivals(rate=3, process="gamma", burstiness=0.3),
            Lengths(isl=100, osl=50, range_ratio=0.8),
            seed,
        )
        of = work.arrival.tobytes() + work.prompt.tobytes() + work.output.tobytes()
        return hashlib.sha256(of).hexdigest()[:12]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_rates(process):
    work = open_loop(4000, Arrivals(rate=5, process=process, burst_size=2), LENGTHS)
    assert 4000 / work.arrival[-1] == pytest.approx(5, rel=0.1)
    assert work.arrival[0] == work.arrival[1]


def test_lengths_of_a_closed_loop():
    work = closed_loop(2000, 8, Lengths(isl=1000, osl=100, range_ratio=0.8))
    assert (min(work.prompt), max(work.prompt)) == (800, 1000)
    assert work.concurrency == 8


def test_stages_with_shared_prefixes():
    prefix = SharedPrefix(
        num_unique_system_prompts=3, num_users_per_system_prompt=2,
        system_prompt_len=100, question_len=50, output_len=7,
    )  # fmt: skip
    work = load_in_stages((LoadStage(2, 10), LoadStage(4, 10)), prefix)
    assert len(work) == 60
    assert work.stages == (0, 10)
    assert [work.arrival[19], work.arrival[59]] == pytest.approx([10, 20])
    assert 10 < work.arrival[20] < work.arrival[21] < work.arrival[22]
    assert work.chains is not None
    assert {chain[0][0] for chain in work.chains} == {0, 1, 2}
    assert work.chains[0] == work.chains[6]


def test_a_session_is_one_segment_however_many_turns_it_has():
    work = sessions(1, Arrivals(rate=1), LENGTHS, Conversations(turns=2000, system_prompt=9))
    assert {len(keys) for keys, _ in work.chains} == {2}
    ends = [end for _, (_, end) in work.chains]
    assert ends == [p + o for p, o in zip(work.prompt, work.output, strict=True)]
    assert all(p > end for p, end in zip(work.prompt[1:], ends, strict=False))


def test_what_no_engine_can_serve():
    work = sessions(2, Arrivals(rate=1), LENGTHS, Conversations(turns=3))
    assert list(work.prompt) == [100, 210, 320] * 2
    found = accept(work, max_model_len=215, kv_tokens=10_000)
    assert found.rejected == {TOO_LONG: 2}
    assert found.shortened == 2
    assert list(found.workload.output) == [10, 5] * 2
    assert found.workload.predecessor is not None
    assert list(found.workload.predecessor) == [-1, 0, -1, 2]
    found = accept(work, max_model_len=1000, kv_tokens=215)
    assert found.rejected == {NEVER_FITS: 4}
    uneven = accept(work, max_model_len=1000, kv_tokens=10_000)
    assert uneven.rejected == {}
    assert uneven.workload.prompt is work.prompt
    assert accept(work, 1000, 10_000, 250).rejected == {PROMPT_EXCEEDS_STEP: 2}
    for late in (2e9, float("nan"), -1.0):
        off = replace(work, arrival=array("d", [*work.arrival[:-1], late]))
        with pytest.raises(UserError, match="requests arrive"):
            accept(off, 1000, 10_000)
    short = closed_loop(2, 1, Lengths(isl=5, osl=5))
    assert accept(short, 1000, 10_000).rejected == {}


@cases
def test_a_setting_that_would_say_nothing_is_refused(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "arrival,isl,osl\n1,2,3\n", "trace.csv")
    values = {"isl": 5, "osl": 5, **more}
    with pytest.raises(UserError, match=f"--{next(iter(more)).replace('_', '-')} is of"):
        workload_of(WorkloadSection(**values))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(rate=0),
        lambda: Arrivals(rate=float("nan")),
        lambda: with_past(open_loop(1, Arrivals(rate=1), LENGTHS), 2**31 - 50),
        lambda: Lengths(isl=0, osl=1),
        lambda: Lengths(isl=1, osl=2**31),
        lambda: Lengths(isl=1, osl=1, range_ratio=2),
        lambda: open_loop(0, Arrivals(rate=1), LENGTHS),
        lambda: closed_loop(5, 0, LENGTHS),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(UserError):
        make()


def test_joins_do_not_wait_for_what_was_left_out():
    work = Workload(
        "fan-out", array("d", [0.0] * 5), array("i", [10, 10, 99, 10, 10]), array("i", [1] * 5),
        predecessor=array("i", [-1, 0, 0, 0, 0]), further_predecessors={3: (1, 2), 4: (2,)},
    )  # fmt: skip
    found = accept(work, max_model_len=50, kv_tokens=1000)
    assert found.rejected == {TOO_LONG: 1}
    assert list(found.workload.predecessor) == [-1, 0, 0, 0]
    assert found.workload.further_predecessors == {2: (1,), 3: ()}
