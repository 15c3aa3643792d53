"""Several ranks: clocks, and transfer and waiting of collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded_steps import Step
from stagewright.errors import UserError
from stagewright.recorded.read import read_traces

pytestmark = pytest.mark.unit


def write_two(folder: Path, skew: float = 0, kind: str = "allreduce") -> list[Path]:
    """Two ranks, the second of which comes late to a collective, early to another."""
    paths: list[Path] = []
    for rank, (first, second) in enumerate([(100, 400), (150, 300)]):
        step, shift = Step(rank, 2), skew * rank
        step.kernel("gemm", 20 + shift, 50, launched=10 + shift)
        for start, end in ((first, 200), (second, 450)):
            name = kind if rank else "allreduce"
            step.collective(start + shift, end - start, launched=start - 20 + shift, kind=name)
        paths.append(step.write(folder / f"{rank}.json"))
    return paths


def test_clocks_and_waiting(tmp_path: Path) -> None:
    traces = read_traces(write_two(tmp_path, skew=1e6))
    assert [trace.clock_offset for trace in traces] == [0, -1_000_000_000]
    transfers = [[k.comm.transfer for k in t.kernels if k.comm] for t in traces]
    assert transfers == [[50_000, 50_000]] * 2
    comm = traces[0].kernels[1].comm
    assert comm is not None
    assert (comm.kind, comm.bytes, comm.ranks) == ("all_reduce", 2 << 20, (0, 1))


def test_other_collectives_are_of_another_job(tmp_path: Path) -> None:
    paths = write_two(tmp_path, kind="_allgather_base")
    with pytest.raises(UserError, match="all_reduce of 2,097,152 bytes on rank 0, all_gather of"):
        read_traces(paths)


def test_one_rank_knows_no_transfer(tmp_path: Path) -> None:
    (trace,) = read_traces(write_two(tmp_path)[:1])
    assert [k.comm.transfer for k in trace.kernels if k.comm] == [-1, -1]


def test_windows_that_begin_at_other_collectives(tmp_path: Path) -> None:
    paths: list[Path] = []
    for rank, sizes in enumerate([(1, 2, 3, 4), (2, 3, 4, 5)]):
        step = Step(rank, 2)
        for size in sizes:
            step.collective(100 * size + 10 * rank, 50, launched=100 * size, elements=size << 20)
        paths.append(step.write(tmp_path / f"{rank}.json"))
    first, second = read_traces(paths)
    assert [k.comm.transfer for k in first.kernels if k.comm] == [-1, 50_000, 50_000, 50_000]
    assert second.clock_offset == -10_000
