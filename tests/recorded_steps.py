"""Small traces in the form of PyTorch's profiler, made call by call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOST, OTHER_THREAD = 100, 101


class Step:
    """A trace that grows by calls and their kernels; times in microseconds."""

    def __init__(self, rank: int = 0, world_size: int = 1, **header: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
            **header,
        }
        self._correlation = 0

    def add(self, cat: str, name: str, ts: float, dur: float, **more: Any) -> None:
        """Add an event; `more` are fields, of which `args` is a mapping."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": HOST}
        self.events.append({**event, "ts": ts, "dur": dur, **more})

    def op(
        self,
        name: str,
        ts: float,
        dur: float,
        dims: Sequence[Any] = (),
        dtype: str = "c10::BFloat16",
        **args: Any,
    ) -> None:
        """Add an op of PyTorch."""
        shapes = {"Input Dims": list(dims), "Input type": [dtype] * len(dims)} if dims else {}
        self.add("cpu_op", name, ts, dur, args={**shapes, **args})

    def call(self, name: str, ts: float, dur: float, *, tid: int = HOST) -> int:
        """Add a call of the runtime; returns its correlation."""
        self._correlation += 1
        args = {"correlation": self._correlation}
        self.add("cuda_runtime", name, ts, dur, tid=tid, args=args)
        return self._correlation

    def kernel(
        self,
        name: str,
        ts: float,
        dur: float,
        *,
        launched: float | None = None,
        correlation: int | None = None,
        stream: int = 7,
        tid: int = HOST,
        **args: Any,
    ) -> None:
        """Add a kernel, and a call at `launched` unless the correlation is given."""
        if correlation is None:
            assert launched is not None
            correlation = self.call("cudaLaunchKernel", launched, 3, tid=tid)
        cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split(" ")[0], "kernel")
        args = {"device": 0, "stream": stream, "correlation": correlation, **args}
        self.add(cat, name, ts, dur, pid=0, tid=stream, args=args)

    def collective(
        self,
        ts: float,
        dur: float,
        *,
        launched: float,
        kind: str = "allreduce",
        elements: int = 1 << 20,
        ranks: Sequence[int] = (0, 1),
        name: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        **args: Any,
    ) -> None:
        """Add a kernel of NCCL with its arguments."""
        described = {
            **{"Collective name": kind, "dtype": "BFloat16", "Group size": len(ranks)},
            **{"In msg nelems": elements, "Out msg nelems": elements},
            **{"Process Group Name": "0", "Process Group Ranks": str(list(ranks)), **args},
        }
        self.kernel(name, ts, dur, launched=launched, stream=20, **described)

    def text(self) -> str:
        """The trace as JSON."""
        return json.dumps({**self.header, "traceEvents": self.events})

    def write(self, path: Path) -> Path:
        """Write the trace; returns the path."""
        path.write_text(self.text())
        return path


def two_ranks() -> tuple[Step, Step]:
    """Step 6 of two ranks: a product, an all-reduce that the second rank is late for, a sum."""
    steps = Step(0, 2), Step(1, 2)
    for step, late in zip(steps, (0, 200), strict=True):
        step.add("user_annotation", "ProfilerStep#6", 0, 900)
        step.op("aten::mm", 5, 20, [[4096, 1024], [1024, 512]])
        step.kernel("sm90_xmma_gemm_bf16", 15, 100 + late, launched=10)
        step.collective(120 + late, 380 - late, launched=30)
        step.kernel("vectorized_elementwise_kernel", 502, 40, launched=60, stream=20)
        step.call("cudaDeviceSynchronize", 80, 470)
    return steps
