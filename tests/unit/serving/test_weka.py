"""Conversations of agents: who waits for whom, and what their prompts have in common."""

import json

import pytest

from helpers import cases
from stagewright.api.workloads import workload_of
from stagewright.errors import UserError
from stagewright.run.sections.serving import WorkloadSection
from stagewright.serving.workloads.traces import NO_TOKENS
from stagewright.serving.workloads.weka import NO_PARENT


def asked(path, **settings):
    return workload_of(WorkloadSection(requests=str(path), **settings))


def call(t: float, tokens: int, output: int, ids: list[int], api_time: float = 1.0, kind="n"):
    return {
        "t": t, "type": kind, "model": "m", "in": tokens, "out": output, "hash_ids": ids,
        "input_types": ["text"], "stop": "end_turn", "api_time": api_time, "think_time": 0.0,
    }  # fmt: skip


def subagent(t: float, name: str, *requests: dict) -> dict:
    return {
        "t": t, "type": "subagent", "agent_id": name, "subagent_type": "Explore",
        "duration_ms": 1000, "total_tokens": 5, "requests": [*requests],
    }  # fmt: skip


def conversation(*requests: dict, **more) -> dict:
    return {
        "id": "c", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
        "requests": [*requests], **more,
    }  # fmt: skip


FAN_OUT = conversation(
    call(0, 130, 10, [1, 2, 3], api_time=2),
    subagent(2.5, "a", call(2.5, 64, 5, [9], 1), call(4, 128, 6, [9, 10], 1, kind="s")),
    subagent(3, "b", call(3, 70, 7, [1, 8], 4)),
    subagent(3, "background", call(3, 64, 90, [7], 60)),
    call(8, 200, 11, [1, 2, 3, 4], 1),
    call(100, 300, 12, [1, 2, 3, 4, 5], 1),
)


@pytest.fixture
def written(tmp_path):
    def write(*values: dict, name: str = "trace.json"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, values)))
        return path

    return write


def test_subagents_run_in_parallel_and_join(written):
    work = asked(written(FAN_OUT))
    # 0 main, 1 and 2 subagent a, 3 subagent b, 4 in the background, 5 and 6 main
    assert list(work.prompt) == [130, 64, 128, 70, 64, 200, 300]
    assert list(work.output) == [10, 5, 6, 7, 90, 11, 12]
    assert work.predecessor is not None
    assert list(work.predecessor) == [-1, 0, 1, 0, 0, 0, 5]
    assert work.further_predecessors == {5: (2, 3), 6: (4,)}
    # From the end of the last of those before, at most 10 s: 7 to 8 s, 63 to 100 s.
    assert list(work.arrival) == [0, 0.5, 0.5, 1, 1, 1, 10]
    assert work.session is not None
    assert {*work.session} == {0}
    capped = asked(written(FAN_OUT), idle_gap_cap=0.75, speed=2.0)
    assert list(capped.arrival) == [0, 0.25, 0.25, 0.375, 0.375, 0.375, 0.375]


def test_ids_name_blocks_of_a_conversation(written):
    work = asked(written(FAN_OUT))
    assert work.chains is not None
    (keys, ends), (_, of_b) = work.chains[0], work.chains[3]
    assert ends == (64, 130)  # one block with b's first, three with the main ones behind
    assert of_b == (64,)
    assert work.chains[5][0][: len(keys)] == keys
    assert work.chains[4] == ((), ())  # nobody else has it
    twice = asked(written(FAN_OUT), num_requests=3, concurrency=1)
    assert (len(twice), twice.concurrency) == (21, 1)
    assert twice.chains is not None
    seen = [{key for keys, _ in twice.chains[n : n + 7] for key in keys} for n in (0, 7, 14)]
    assert sum(map(len, seen)) == len(set.union(*seen))
    assert twice.further_predecessors[7 + 5] == (7 + 2, 7 + 3)


def test_the_first_of_each_lane_begins_in_the_middle(written):
    lanes = {"num_requests": 40, "concurrency": 30}
    work = asked(written(FAN_OUT), trajectory_start_max_ratio=0.3, **lanes)
    assert work.session is not None
    assert work.predecessor is not None
    first = [list(work.session).index(n) for n in range(40)]
    assert {work.predecessor[n] for n in first} == {-1}
    # Turns 0, 5 and 6 of 7 were sent at 0, 8 and 100 s.
    lengths = [list(work.session).count(n) for n in range(40)]
    assert {*lengths[:30]} == {7, 2}
    assert {*lengths[30:]} == {7}
    short = first[lengths.index(2)]
    assert list(work.prompt[short : short + 2]) == [200, 300]
    assert list(work.predecessor[short : short + 2]) == [-1, short]
    assert work.further_predecessors.get(short + 1, ()) == ()
    assert work.arrival[short] == 0
    again = asked(written(FAN_OUT), trajectory_start_max_ratio=0.3, **lanes)
    assert again.prompt == work.prompt


def test_a_folder_of_conversations(written, tmp_path):
    for name in ("b.json", "a.json"):
        written(conversation(call(0, ord(name[0]), 1, [1, 2])), name=name)
    work = asked(tmp_path, rate=5.0)
    assert list(work.prompt) == [ord("a"), ord("b")]
    assert work.arrival[0] == 0 < work.arrival[1]


def test_rows_that_are_no_requests_are_counted(written):
    early = subagent(0, "a", call(0, 64, 5, [1]))
    work = asked(written(conversation(early, call(1, 64, 5, [1]), call(2, 64, 0, [1]))))
    assert work.rejected == {NO_PARENT: 1, NO_TOKENS: 1}
    assert len(work) == 1


@cases
def test_bad_conversations_are_one_line(written, values, says):
    with pytest.raises(UserError) as error:
        asked(written(*values))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_no_name_is_no_folder(written, tmp_path, monkeypatch):
    written(FAN_OUT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        asked("")


def test_lengths_beside_conversations_are_refused(written):
    with pytest.raises(UserError, match="--requests and --isl both say"):
        asked(written(FAN_OUT), isl=5)
    with pytest.raises(UserError, match="--idle-gap-cap is of conversations"):
        workload_of(WorkloadSection(rate=1.0, isl=5, osl=5, idle_gap_cap=3.0))
