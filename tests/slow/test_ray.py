"""A real Ray cluster on this machine: the bytes that threads write, though a node is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import needed
from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.executors import ray_cluster
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace import templates
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.write import expand, write

ray = needed("ray", "ray")
cluster_utils = needed("ray.cluster_utils", "ray")

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = {"model": "llama3-8b", "layers": 8, "seq_length": 64, "vocab": 128}
WORLD = 64


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("bundle") / "a.bundle"
    program = compile(Run(**RUN, tp=2, dp=8, pp=4, global_batch_size=64)).program
    write(program, path, format="bundle", manifest={})
    return Bundle(path)


@pytest.fixture(scope="module")
def whole(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    expand(bundle, out)
    return contents(out)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs no tasks, and two machines of one core."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    head = {"num_cpus": 0, "object_store_memory": 100_000_000, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=100_000_000)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def test_the_bytes_of_threads(
    cluster: Any, bundle: Bundle, whole: dict[str, bytes], tmp_path: Path
):
    seen: list[tuple[int, ...]] = []
    with ray_cluster(cluster.address) as machines:
        expand(
            bundle,
            tmp_path / "out",
            cluster=machines,
            progress=lambda *told: seen.append(told),
        )
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(seen) > 4
    assert seen[-1][:2] == (WORLD, WORLD)
    assert not ray.is_initialized()


def test_a_range_of_ranks(cluster: Any, bundle: Bundle, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "out"
    line = ["expand", str(bundle.path), "-o", str(out), "--ranks", "3-9", "--engine", "ray"]
    with pytest.raises(SystemExit) as end:
        main([*line, "--address", cluster.address])
    assert end.value.code == 0
    found = contents(out)
    assert len(found) == 7 + 2
    assert all(whole[name] == data for name, data in found.items() if name != "manifest.json")


def test_errors_of_other_machines(
    cluster: Any, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A machine that does not see the directory says so, and nothing is left."""
    monkeypatch.setattr(
        "stagewright.trace.write.RangeWriter",
        lambda program, folder, *more: templates.RangeWriter(program, folder / "no", *more),
    )
    with (
        ray_cluster(cluster.address) as machines,
        pytest.raises(UserError, match=r"cannot be written: .* name a directory that all share"),
    ):
        expand(bundle, tmp_path / "out", cluster=machines)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_done(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def refused(*options: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["expand", str(bundle.path), "-o", str(tmp_path / "out"), *options])
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "ray" in refused("--engine", "rai")
    assert "add --engine ray" in refused("--address", "auto")
    address = ("--engine", "ray", "--address", "127.0.0.1:1")
    assert "address 127.0.0.1:1: no Ray cluster answers" in refused(*address)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "install stagewright[ray]" in refused("--engine", "ray")
    assert not list(tmp_path.iterdir())


def test_a_machine_is_killed_half_way(
    cluster: Any,
    bundle: Bundle,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(templates, "RANGE_BYTES", 1)  # a rank a task
    doomed = sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0]
    killed: list[int] = []

    def kill(done: int, *_: int) -> None:
        if not killed and done >= WORLD // 4:
            killed.append(done)
            cluster.remove_node(doomed, allow_graceful=False)

    with ray_cluster(cluster.address) as machines:
        expand(bundle, tmp_path / "out", cluster=machines, progress=kill)
    assert killed
    assert killed[0] < WORLD
    assert contents(tmp_path / "out") == whole
