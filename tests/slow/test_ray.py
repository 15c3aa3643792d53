"""A real Ray cluster on this machine: the bytes of the local engine, though a node is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extras import needed
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run
from stagewright.trace import templates
from stagewright.trace.write import write

ray = needed("ray", "ray")
cluster_utils = needed("ray.cluster_utils", "ray")

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = {"model": "llama3-8b", "layers": 8, "seq_length": 64, "vocab": 128}
WORLD = 64


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(Run(**RUN, tp=2, dp=8, pp=4, global_batch_size=64)).program


@pytest.fixture(scope="module")
def whole(program: Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    write(program, out, manifest={})
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


def test_the_bytes_of_the_local_engine(
    cluster: Any, program: Program, whole: dict[str, bytes], tmp_path: Path
):
    seen: list[tuple[int, ...]] = []
    write(
        program,
        tmp_path / "out",
        manifest={},
        engine="ray",
        address=cluster.address,
        progress=lambda *told: seen.append(told),
    )
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(seen) > 4
    assert seen[-1][:2] == (WORLD, WORLD)
    assert not ray.is_initialized()


def test_shares_straight_to_a_store(
    cluster: Any, program: Program, whole: dict[str, bytes], tmp_path: Path
):
    needed("fsspec", "remote")
    for nth in (1, 2):
        write(
            program,
            f"local://{tmp_path}/out",
            manifest={},
            engine="ray",
            address=cluster.address,
            shard=(nth, 2),
        )
    assert contents(tmp_path / "out") == whole


def test_errors_of_other_machines(cluster: Any, program: Program, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    needed("fsspec", "remote")
    with pytest.raises(UserError, match=r"cannot be written: "):
        write(
            program,
            f"local://{tmp_path}/file/out",
            manifest={},
            engine="ray",
            address=cluster.address,
        )


def test_what_cannot_be_done(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="did you mean 'ray'"):
        write(program, out, manifest={}, engine="rai")
    with pytest.raises(UserError, match="add --engine ray"):
        write(program, out, manifest={}, address="auto")
    with pytest.raises(UserError, match="written at once"):
        write(program, out, manifest={}, format="bundle", engine="ray")
    with pytest.raises(UserError, match=r"address 127.0.0.1:1: no Ray cluster answers"):
        write(program, out, manifest={}, engine="ray", address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"install stagewright\[ray\]"):
        write(program, out, manifest={}, engine="ray")
    assert not list(tmp_path.iterdir())


def test_a_machine_is_killed_half_way(
    cluster: Any,
    program: Program,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(templates, "SHARE", 1)  # a rank a task
    doomed = sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0]
    killed: list[int] = []

    def kill(done: int, *_: int) -> None:
        if not killed and done >= WORLD // 4:
            killed.append(done)
            cluster.remove_node(doomed, allow_graceful=False)

    write(
        program, tmp_path / "out", manifest={}, engine="ray", address=cluster.address, progress=kill
    )
    assert killed
    assert killed[0] < WORLD
    assert contents(tmp_path / "out") == whole
