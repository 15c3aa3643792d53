"""The result of a search is the same, whoever simulates its candidates."""

from collections.abc import Iterator
from typing import Any

import pytest

import stagewright as sw
from helpers import needed
from stagewright.executors import Processes
from stagewright.searching import search as searching

pytestmark = pytest.mark.numerics

ASKED: dict[str, Any] = {
    "gpus": 4, "layers": 2, "seq_length": 256, "global_batch_size": 16, "micro_batch_size": [1, 4],
    "tp": [1, 2], "pp": [1, 2], "vpp": 1, "schedule": "1f1b", "recompute": ["none", "full"],
    "zero": 1, "cp": 1, "top": 3,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """The space counts as a large one, whose candidates are estimated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "SMALL", 0)
        yield


@pytest.fixture(scope="module", name="found")
def search_of_one_process(large: None) -> sw.Search:
    return sw.search("gpt2", "h100-sxm", **ASKED)


@pytest.mark.slow
def test_processes_find_what_one_process_finds(found: sw.Search):
    shared = sw.search("gpt2", "h100-sxm", executor=Processes(2, worth=0), **ASKED)
    assert shared.table("candidates").rows == found.table("candidates").rows
    assert shared.run_file() == found.run_file()
    assert 3 <= found.ranking.simulated < len(found.ranking)


@pytest.mark.slow
def test_the_answer_is_that_of_simulating_all(found: sw.Search):
    proven = sw.search("gpt2", "h100-sxm", exact=True, **ASKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "SMALL", 100)
        every = sw.search("gpt2", "h100-sxm", **ASKED)
    assert every.ranking.simulated == len(every.ranking)
    assert found.run() == proven.run() == every.run()
    assert proven.ranking.proven
    assert sw.simulate(found.run(), "h100-sxm").seconds == found.seconds


@pytest.mark.extra
def test_all_candidates_as_parquet(tmp_path: Any, found: sw.Search):
    polars: Any = needed("polars", "polars")
    found.write(tmp_path / "found.parquet")
    read = polars.read_parquet(tmp_path / "found.parquet")
    assert read["seconds"].to_list() == found.table("candidates").columns["seconds"]


def test_sensitivities_are_those_of_the_simulation(tmp_path: Any, found: sw.Search):
    path = tmp_path / "page.html"
    found.write(path)
    text = path.read_text()
    assert "memory_bandwidth_gb_s" in text
    assert f'id="run-{found.index(1)}"' in text
    for ending in ("csv", "json", "yaml"):
        found.write(tmp_path / f"found.{ending}")
    again = sw.load_run(tmp_path / "found.yaml")
    assert sw.simulate(again, "h100-sxm").seconds == found.seconds
