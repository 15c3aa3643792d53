"""The trace of one rank: kernels, the calls that launched them, and ops of PyTorch.

Times are whole nanoseconds on the clock of the file, as recorded. `read` makes a `RankTrace`,
`kernels` fills in what each kernel is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.program.columns import Shape

FAMILIES = (
    "gemm",  # a product: shape gemm (batch, m, n, k)
    "grouped_gemm",  # products of experts
    "conv",
    "attention",  # fused, forward or backward
    "norm",
    "elementwise",  # whatever moves bytes: activations, casts, sums, copies by kernels
    "copy",  # memory copies, also to and from the host
    "memset",
    "collective",
    "message",  # send, receive, or several of both
    "other",
)
"""Families of kernels."""


_CHIP = re.compile(r"[a-z]{1,2}\d{1,4}[a-z]?")


def chips_differ(device: str, hardware: str) -> bool:
    """Return True if names of devices name different chips; False if one names none.

    >>> chips_differ("Tesla V100-SXM2-32GB", "h100-sxm"), chips_differ("NVIDIA H200", "h200")
    (True, False)
    >>> chips_differ("NVIDIA H100 80GB HBM3", "my-cluster")
    False
    """
    words = (set(re.split(r"[^a-z0-9]+", name.lower())) for name in (device, hardware))
    one, other = ({word for word in named if _CHIP.fullmatch(word)} for named in words)
    return bool(one and other) and one.isdisjoint(other)


@dataclass(slots=True, eq=False)
class TorchOp:
    """An op of PyTorch on a thread of the host, with its inputs."""

    name: str
    start: int
    end: int
    dims: tuple[tuple[int, ...], ...] = ()
    """Shape of each input; () for a number. Lists of tensors are flattened."""
    dtypes: tuple[str, ...] = ()
    """Data type of each of `dims`, in the names of `graph.node.BYTES`; "": none known."""
    parent: TorchOp | None = None
    """The op that called it."""
    args: Mapping[str, Any] | None = None
    """Of an op that communicates, and of attention: its arguments as the profiler wrote them."""

    def with_parents(self) -> Iterator[TorchOp]:
        """The op, then those that it was called by, outwards."""
        op: TorchOp | None = self
        while op is not None:
            yield op
            op = op.parent


@dataclass(slots=True, eq=False)
class RuntimeCall:
    """A call of the CUDA or HIP runtime or driver that launches, copies, records or waits."""

    name: str
    thread: str
    start: int
    end: int
    correlation: int
    op: TorchOp | None = None
    """The innermost op that made the call."""
    sync: Sync | None = None
    """What it waits for, if the profiler recorded that (`enable_cuda_sync_events`)."""


@dataclass(slots=True, eq=False)
class Sync:
    """A recorded wait: of the host, or of a stream, for an event or a stream."""

    kind: str
    """`event`, `stream` or `device`: the host waits for it; `wait`: a stream waits for an event."""
    stream: int
    """The stream that is waited for, or with `wait` the one that waits; -1: all."""
    record: int = -1
    """Correlation of the call that recorded the event; -1: none."""
    source: int = -1
    """Stream on which the event was recorded."""


@dataclass(slots=True, eq=False)
class CommOp:
    """What a communication kernel sends, and to whom."""

    kind: str
    """A name of `COLLECTIVES`, or `reduce`, `gather`, `scatter`, `barrier`; `send`, `recv`; or
    `send_recv`: several messages in one kernel."""
    bytes: int
    """Local input of a collective, as `Tasks.comm_bytes`; bytes of a message; 0: unknown."""
    dtype: str
    group: str
    """Name of the process group; "": not recorded."""
    size: int
    """Ranks of the group; 0: unknown."""
    ranks: tuple[int, ...] = ()
    """The group's ranks; (): unknown."""
    peer: int = -1
    """The other rank of a message; -1: none, or unknown."""
    index: int = -1
    """The kernel is the n-th one of its group on this rank; kernels of other ranks with this
    index belong to the same collective."""
    transfer: int = -1
    """Least duration of the collective over its ranks (ns): the rest of each is waiting. -1: the
    other ranks were not read, so the kernel's duration is an upper bound."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A kernel, copy or memset on a stream of a device."""

    name: str
    start: int
    end: int
    device: int
    stream: int
    correlation: int
    call: RuntimeCall | None = None
    """The call that launched it; None: it was made before the window, or not recorded."""
    family: str = "other"
    """One of `FAMILIES`."""
    shape: Shape | None = None
    """Kind and extents as simulated steps have them, where the op's inputs tell."""
    dtype: str = ""
    bytes: int = 0
    """Of a copy or memset: its bytes. Of `norm` and `elementwise`: the inputs of the op, and an
    output as large as the largest of them; 0: unknown."""
    comm: CommOp | None = None
    args: Mapping[str, Any] | None = None
    """Of a kernel that communicates: its arguments as the profiler wrote them."""

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.start

    @property
    def op(self) -> TorchOp | None:
        """The op that launched it."""
        return self.call.op if self.call else None


@dataclass(slots=True, eq=False)
class Annotation:
    """A named range of the host: a step of the profiler, or `record_function`."""

    name: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class RankTrace:
    """What one rank did, as its profiler saw it."""

    path: str
    """The file, for errors and tables."""
    rank: int
    world_size: int
    """Ranks of the job; 0: not recorded."""
    device: str
    """Name of the GPU; "": not recorded."""
    kernels: list[Kernel]
    """By start, those of one start in the order of the file."""
    calls: list[RuntimeCall]
    """By start. Calls that neither launch nor wait are left out."""
    annotations: list[Annotation]
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Ranks of each process group by name, where the file lists them."""
    clock_offset: int = 0
    """Nanoseconds to add to its times for the clock of the first rank."""
    notes: list[str] = field(default_factory=list[str])
    """What the file lacks, and what was left out."""

    @property
    def start(self) -> int:
        """Start of the first kernel."""
        return self.kernels[0].start

    @property
    def end(self) -> int:
        """End of the last kernel."""
        return max(kernel.end for kernel in self.kernels)
