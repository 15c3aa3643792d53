"""Recorded steps as Chakra traces: links, groups, messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from recorded_steps import Step, two_ranks
from stagewright.check.verify import verify
from stagewright.cli.main import commands
from stagewright.errors import UserError
from stagewright.recorded.read import read_traces
from stagewright.recorded.to_program import program_of
from stagewright.trace.write import write

pytestmark = pytest.mark.unit
SEND_RECV = "ncclDevKernel_SendRecv"


def written(folder: Path, steps: list[Step]) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Nodes of each rank, and notes; the Chakra traces are sound."""
    folder.mkdir(exist_ok=True)
    paths = [step.write(folder / f"rank{rank}.json") for rank, step in enumerate(steps)]
    program, notes = program_of(read_traces(paths))
    write(program, folder / "json", format="json", manifest={})
    write(program, folder / "et", manifest={})
    report = verify(folder / "et", None)
    assert report.ok, report.findings
    names = [f"rank.{rank}.json" for rank in range(program.mesh.world_size)]
    return [json.loads((folder / "json" / name).read_text()) for name in names], notes


def test_a_step_of_two_ranks(tmp_path: Path) -> None:
    ranks, notes = written(tmp_path, [*two_ranks()])
    assert notes == []
    for nodes in ranks:
        names = [node["name"] for node in nodes]
        assert names == [
            "aten::mm sm90_xmma_gemm_bf16",
            "idle",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "idle",
            "vectorized_elementwise_kernel",
        ]
        assert [node["deps"] for node in nodes] == [[], [1], [1, 2], [2, 3], [3, 4]]
        assert nodes[0]["flops"] == 2 * 4096 * 1024 * 512
        assert (nodes[2]["collective"], nodes[2]["bytes"]) == ("all_reduce", 2 << 20)
    assert ranks[0][2]["group"] == ranks[1][2]["group"]


def test_the_host_waits_for_the_device_between_kernels(tmp_path: Path) -> None:
    step = Step()
    step.kernel("gemm", 15, 100, launched=10)
    step.kernel("gemm", 15, 40, launched=11, stream=9)
    step.call("cudaDeviceSynchronize", 20, 100)
    step.kernel("gemm", 121, 10, launched=120, stream=24)
    ((*_, last),), _ = written(tmp_path, [step])
    assert last["deps"] == [1, 2, 3]  # both streams, and the time of the host


def test_groups_of_a_mesh_and_messages(tmp_path: Path) -> None:
    steps: list[Step] = []
    for rank in range(4):
        step = Step(rank, 4)
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        step.collective(20, 50, launched=10, ranks=pair, **{"Process Group Name": str(rank // 2)})
        kind, other = ("send", rank + 2) if rank < 2 else ("recv", rank - 2)
        step.collective(
            100, 10, launched=90, kind=kind, ranks=sorted((rank, other)), name=SEND_RECV
        )
        steps.append(step)
    ranks, notes = written(tmp_path, steps)
    assert notes == []
    groups = json.loads((tmp_path / "et/comm_group.json").read_text())
    assert sorted(groups.values()) == [[0, 1], [2, 3]]
    sent, received = ranks[1][-1], ranks[3][-1]
    assert (sent["kind"], sent["peer"], sent["bytes"]) == ("send", 3, 2 << 20)
    assert (received["kind"], received["peer"], received["tag"]) == ("recv", 1, sent["tag"])


def test_one_rank_stands_for_all(tmp_path: Path) -> None:
    step = Step(0, 4)
    step.collective(20, 50, launched=10, ranks=(0, 2))
    step.collective(80, 5, launched=11, kind="send", ranks=(0, 1), name=SEND_RECV)
    ranks, notes = written(tmp_path, [step])
    assert len(ranks) == 4
    assert json.loads((tmp_path / "et/comm_group.json").read_text()) == {"1": [0, 2], "2": [1, 3]}
    assert notes[0].startswith("1 transfer became kernels of their duration")
    assert notes[1].startswith("rank 0 alone was read: all 4 ranks")


def test_some_ranks_are_refused(tmp_path: Path) -> None:
    paths: list[Path] = []
    for rank in range(2):
        step = Step(rank, 4)
        step.collective(20, 50, launched=10, ranks=(0, 1, 2, 3))
        paths.append(step.write(tmp_path / f"{rank}.json"))
    with pytest.raises(UserError, match=r"ranks 2-3 of 4 were not given; wanted the traces of all"):
        program_of(read_traces(paths))


def test_import_knows_a_trace_by_its_content(tmp_path: Path) -> None:
    source = two_ranks()[0].write(tmp_path / "anything.json")
    line = ["import", str(source), "--step", "6", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(commands, line)
    assert result.exit_code == 0, result.output
    assert "out: 5 tasks of 1 recorded rank, written as 2 ranks" in result.output
    assert verify(tmp_path / "out", None).findings == []
    again = CliRunner().invoke(commands, [*line, "--force"])
    assert again.exit_code == 0
    wrong = CliRunner().invoke(commands, ["import", "a.py:f", "--step", "6", "-o", "x.stg"])
    assert isinstance(wrong.exception, UserError)
