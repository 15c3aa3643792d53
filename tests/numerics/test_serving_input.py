"""What people bring to `stagewright serve`: files, names and limits of other tools."""

import json

import numpy as np
import pytest

import stagewright as sw
from stagewright.cli import main as cli
from stagewright.errors import UserError

pytestmark = pytest.mark.numerics

LLAMA = ("serve", "llama3.1-8b", "--hardware", "h100-sxm", "--layers", "2")


def printed(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*LLAMA, *words])
    assert (ended.value.code or 0) == code
    out, err = capfd.readouterr()
    return out if not code else err


def test_a_line_of_a_client(capfd):
    theirs = printed(
        capfd, "--request-rate", "inf", "--max-concurrency", "4", "--random-input-len", "300",
        "--random-output-len", "20", "--num-prompts", "30", "--ttft", "2s", "--tpot", "500us",
    )  # fmt: skip
    ours = printed(
        capfd, "--concurrency", "4", "--isl", "300", "--osl", "20", "--num-requests", "30",
        "--ttft", "2000", "--tpot", "0.5ms",
    )  # fmt: skip
    assert theirs == ours


def test_a_search_takes_the_names_of_clients():
    words = ["llama3.1-8b", "--serve", "--request-rate", "5", "--random-input-len", "300",
             "--random-output-len", "20", "--num-prompts", "30", "--ttft", "2s"]  # fmt: skip
    given = cli.commands.commands["search"].make_context("search", words).params
    assert (given["rate"], given["isl"], given["output_length"]) == (5.0, 300, "20")
    assert (given["num_requests"], given["ttft"]) == (30, "2s")


def test_limits_that_none_keeps_say_what_came_closest(capfd):
    words = ("--rate", "50", "--isl", "300", "--osl", "20", "--num-requests", "30", "--tpot")
    assert "the least of all requests: TPOT " in printed(capfd, *words, "1us")
    assert "the fastest" not in printed(capfd, *words, "1s")
    error = printed(capfd, *words, "0.05", code=2)
    assert "were seconds meant? Write 0.05s, or 0.05ms" in error


def test_a_share_of_each_prompt_is_cached():
    load = {"rate": 5.0, "isl": 1600, "osl": 5, "num_requests": 60, "layers": 2}
    cold = sw.serve("llama3.1-8b", "h100-sxm", **load).summary
    warm = sw.serve("llama3.1-8b", "h100-sxm", prefix_cache_hit_rate=0.5, **load).summary
    assert cold.hit_rate == 0
    assert warm.hit_rate == pytest.approx(0.5 * 59 / 60, abs=0.02)
    assert warm.ttft.p50 < cold.ttft.p50
    with pytest.raises(sw.UserError, match="--prefix-cache-hit-rate is for prompts of which"):
        sw.serve("llama3.1-8b", "h100-sxm", prefix_cache_hit_rate=0.5, turns=2, **load)


def test_a_result_of_a_client_beside_the_same_load(capfd, tmp_path):
    result = {
        "num_prompts": 24, "request_rate": "inf", "max_concurrency": 3, "completed": 24,
        "total_input_tokens": 24 * 300, "total_output_tokens": 24 * 20, "mean_ttft_ms": 5.0,
        "median_ttft_ms": 5.0, "p99_ttft_ms": 6.0, "mean_tpot_ms": 1.0, "mean_e2el_ms": 30.0,
        "request_throughput": 100.0,
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    page = tmp_path / "run.html"
    found = json.loads(printed(capfd, "--compare", str(path), "--json", "-o", str(page)))
    text = page.read_text()
    assert "Compared with the measured log" in text
    assert f'<td class="n">{found["compared"][0]["error"]:+.1%}</td>' in text
    assert found["workload"] == "result.json: 3 users, 300 and 20 tokens"
    rows = [(row["time"], row["figure"]) for row in found["compared"]]
    assert rows == [
        ("TTFT", "mean"), ("TTFT", "p50"), ("TTFT", "p99"), ("TPOT", "mean"), ("E2E", "mean"),
    ]  # fmt: skip
    alone = sw.serve(
        "llama3.1-8b", "h100-sxm", layers=2, concurrency=3, isl=300, osl=20, num_requests=24
    )
    assert found["compared"][0]["predicted"] == alone.summary.ttft.mean
    (rate,) = found["compared_rates"]
    seconds = max(alone.outcome.records.finish) - min(alone.outcome.records.arrival)
    assert (rate["rate"], rate["measured"]) == ("requests/s", 100.0)
    assert rate["predicted"] == pytest.approx(24 / seconds)
    assert rate["error"] == pytest.approx(0.24 / seconds - 1)


def test_conversations_of_agents_hold_their_lanes(capfd, tmp_path):
    def call(t: float, tokens: int, ids: int, kind: str = "n") -> dict:
        blocks = [*range(ids)]
        return {"t": t, "type": kind, "in": tokens, "out": 9, "hash_ids": blocks, "api_time": 1}

    helper = {"type": "subagent", "t": 1.5, "requests": [call(1.5, 640, 10), call(3, 700, 10, "s")]}
    other = {"type": "subagent", "t": 1.2, "requests": [call(1.2, 320, 5)]}
    trace = {
        "id": "a", "block_size": 64, "hash_id_scope": "local",
        "requests": [call(0, 640, 10), helper, other, call(4.1, 960, 15), call(90, 1280, 20)],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(trace))
    found = sw.serve(
        "llama3.1-8b", "h100-sxm", layers=2, requests=str(tmp_path), concurrency=2, num_requests=5
    )
    arrival, finish = (np.array(column).reshape(5, 6) for column in
                       (found.outcome.records.arrival, found.outcome.records.finish))  # fmt: skip
    # 0 main, 1 and 2 the helper's, 3 the other's, 4 and 5 main
    assert arrival[:, 4] == pytest.approx(finish[:, 1:4].max(axis=1) + 0.1)
    assert arrival[:, 5] == pytest.approx(finish[:, 4] + 10)
    assert sorted(arrival[:, 0])[2:] == pytest.approx(sorted(finish.max(axis=1))[:3])
    assert found.summary.hit_rate > 0.5
    output, e2e = 9, finish.ravel() - arrival.ravel()
    assert found.interactivity == pytest.approx(1 / np.quantile(e2e / output, 0.9))
    text = printed(capfd, "--requests", str(tmp_path), "--concurrency", "1")
    assert f"{tmp_path.name}, 1 conversation, at most 1 in flight" in text
    assert "interactivity: " in text


def test_a_cached_share_needs_the_prefix_cache():
    with pytest.raises(UserError, match="--prefix-cache-hit-rate needs the prefix cache"):
        sw.serve(
            "gpt2", "h100-sxm", rate=5, isl=100, osl=4, num_requests=3,
            prefix_cache_hit_rate=0.5, enable_prefix_caching=False,
        )  # fmt: skip
