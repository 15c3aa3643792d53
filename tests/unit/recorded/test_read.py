"""Reading: files, archives, windows, links, and input that is no trace."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from recorded_steps import OTHER_THREAD, Step
from stagewright.errors import UserError
from stagewright.recorded import read
from stagewright.recorded.rank import RankTrace
from stagewright.recorded.read import is_trace, read_traces

pytestmark = pytest.mark.unit


def product(rank: int = 0, world_size: int = 1, **header: object) -> Step:
    """A product, launched by an op inside another."""
    step = Step(rank, world_size, **header)
    step.op("aten::linear", 0, 30)
    step.op("aten::addmm", 5, 20, [[64], [128, 32], [32, 64]])
    step.kernel("sm90_xmma_gemm_bf16", 20, 10, launched=10)
    return step


def only(path: Path, **window: object) -> RankTrace:
    (trace,) = read_traces([path], **window)  # pyright: ignore
    return trace


def test_links_kernels_to_calls_and_ops(tmp_path: Path) -> None:
    trace = only(product().write(tmp_path / "a.json"))
    (kernel,) = trace.kernels
    assert kernel.call is not None
    assert kernel.call.start == 10_000
    assert [op.name for op in kernel.op.with_parents()] == ["aten::addmm", "aten::linear"]
    assert str(kernel.shape) == "gemm batch=1 m=128 n=64 k=32"
    assert (kernel.family, kernel.dtype, trace.device) == ("gemm", "bf16", "NVIDIA H100")
    assert (trace.end - trace.start, trace.notes) == (10_000, [])


@pytest.mark.parametrize("piece", [64, 1000])
def test_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(read, "PIECE", piece)
    assert only(product().write(tmp_path / "a.json")).kernels[0].shape is not None


def test_compressed_files_archives_and_folders(tmp_path: Path) -> None:
    data = [product(rank, 2).text().encode() for rank in range(2)]
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, content in enumerate(data):
        (folder / f"r{rank}.json.gz").write_bytes(gzip.compress(content))
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for rank, content in enumerate(data):
            entry = tarfile.TarInfo(f"x/r{rank}.json")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    for path in (folder, archive):
        assert [trace.rank for trace in read_traces([path])] == [0, 1]
        assert is_trace(path)


def test_window_of_a_step(tmp_path: Path) -> None:
    step = Step()
    for number in range(3):
        at = 100 * number
        step.add("user_annotation", f"ProfilerStep#{number}", at, 90)
        step.kernel("gemm", at + 80, 60, launched=at + 10)
        step.kernel("gemm", at + 140, 10, launched=at + 20, tid=OTHER_THREAD)
    path = step.write(tmp_path / "a.json")
    assert [kernel.start for kernel in only(path, step=1).kernels] == [180_000, 240_000]
    with pytest.raises(UserError, match=r"no annotation 'ProfilerStep#7'; has ProfilerStep#0, Pr"):
        only(path, step=7)


def test_negative_durations_are_counted(tmp_path: Path) -> None:
    step = product()
    step.add("kernel", "gemm", 5, -3, args={"correlation": 1})
    step.add("kernel", "gemm", 5, 3, args={"correlation": 1, "stream": "seven"})
    first, second = only(step.write(tmp_path / "a.json")).notes
    assert first == "1 event left out: a negative duration"
    assert second.startswith("1 event left out: no time, or an argument of another type")


def test_values_of_other_types_are_left_out(tmp_path: Path) -> None:
    huge = 10**400
    step = product(deviceProperties=[5, {"id": huge, "name": "A"}])
    for category in ([], {}):
        step.events.append({"ph": "X", "cat": category, "name": "a", "ts": 1, "dur": 1})
    step.add("kernel", "gemm", 5, huge, args={"correlation": 1})
    step.add("cpu_op", "aten::mm", 5, 1, args={"Input Dims": [[huge, 2]]})
    step.op("aten::_flash_attention_forward", 40, 20, [[1, 8, 4, 16]] * 3)
    step.events[-1]["args"]["Concrete Inputs"] = 5
    step.kernel("flash_fwd", 60, 10, launched=50)
    step.collective(80, 10, launched=70, elements=huge)
    trace = only(step.write(tmp_path / "a.json"))
    assert trace.device == "A"
    assert "causal=0" in str(trace.kernels[1].shape)
    notes = " ".join(trace.notes)
    assert "2 events left out: no time, or an argument of another type" in notes
    assert "1 transfer of unknown size" in notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\x0a", "nothing but blanks"),
        (b"\x1f\x8b", "cannot be decompressed"),
        (b'{"traceEvents": [' + b"9" * 5000 + b"]}", "thousands of digits"),
        (b"[1, 2", "the file is cut"),
        (product().text().encode()[:-40], "the file is cut"),
        (gzip.compress(product().text().encode())[:-30], "cannot be decompressed"),
        (b'{"schema": "1.1", "nodes": []}', "it is an execution trace"),
        (b'{"traceEvents": []}', "no kernels"),
        (b"hello", "is no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\x0a\x05hello", "needs the package perfetto|refuses it"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "no kernels"),
    ],
)
def test_other_content_is_refused_in_a_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_traces([path])
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MOST_BYTES", 1 << 20)
    bomb = tmp_path / "a.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (4 << 20) + b"]}"))
    with pytest.raises(UserError, match="over 0 GiB of JSON; wanted fewer steps"):
        read_traces([bomb])
    monkeypatch.setattr(read, "MOST_VALUE", 1 << 18)
    bomb.write_bytes(gzip.compress(b'{"traceEvents": ["' + b"a" * (4 << 18)))
    with pytest.raises(UserError):
        read_traces([bomb])


def test_ranks_of_different_jobs(tmp_path: Path) -> None:
    first, second = (product(0, size).write(tmp_path / f"{size}.json") for size in (2, 4))
    with pytest.raises(UserError, match="both are rank 0"):
        read_traces([first, second])
    second = product(1, 4).write(tmp_path / "4.json")
    with pytest.raises(UserError, match="jobs of 2 and of 4 ranks"):
        read_traces([first, second])


def test_events_alone_and_text_in_strings(tmp_path: Path) -> None:
    step = product()
    step.events[0]["name"] = 'tab\t, "quoted", ünï'
    path = tmp_path / "a.json"
    path.write_text("\n" + json.dumps(step.events, ensure_ascii=False).replace("\\t", "\t"))
    assert len(only(path).kernels) == 1


class Processor:
    """A trace processor that knows one kernel and its call."""

    def __init__(self, trace: object) -> None:
        assert trace is not None

    def __enter__(self) -> Processor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self, text: str) -> list[SimpleNamespace]:
        if "from args" in text:
            numbers = [(1, "args.correlation", 5), (2, "args.correlation", 5)]
            numbers += [(2, "args.stream", 7)]
            none = {"string_value": None, "real_value": None}
            return [SimpleNamespace(id=i, key=k, int_value=v, **none) for i, k, v in numbers]
        call = SimpleNamespace(
            name="cudaLaunchKernel", cat="cuda_runtime", ts=1000, dur=500, args=1
        )
        kernel = SimpleNamespace(name="gemm", cat="kernel", ts=9000, dur=2000, args=2)
        for slice_ in (call, kernel):
            slice_.pid, slice_.tid = 1, 1
        return [call, kernel]


def test_perfetto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("perfetto.trace_processor")
    module.TraceProcessor = Processor  # pyright: ignore
    monkeypatch.setitem(sys.modules, "perfetto", ModuleType("perfetto"))
    monkeypatch.setitem(sys.modules, "perfetto.trace_processor", module)
    path = tmp_path / "a.pftrace"
    path.write_bytes(b"\x0a\x08messages")
    (kernel,) = only(path).kernels
    assert kernel.call is not None
    assert (kernel.start, kernel.stream, kernel.call.start) == (9000, 7, 1000)
