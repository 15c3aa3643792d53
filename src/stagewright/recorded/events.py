"""Events of one trace: what is kept of them, how they belong together, and the window of a step.

A kernel and the call that launched it have one correlation number. A call and the op that made it
share a thread, and the op's time encloses the call's: nesting holds in all versions of Kineto, the
numbers called External id do not.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from stagewright.errors import UserError, did_you_mean
from stagewright.numbers import plural
from stagewright.recorded.rank import Annotation, Kernel, RankTrace, RuntimeCall, Sync, TorchOp

MOST_EVENTS = 4_000_000
"""Events kept of a file: they take about 2 GB."""
MOST_RANKS = 1 << 22
"""Ranks of a job; a larger number is none of a rank, a group or a GPU."""
LARGEST = 1 << 62
"""Numbers of a trace are smaller: nanoseconds, bytes, and elements of a tensor."""

# Categories of events in Kineto's versions, and on devices of several makers.
_CALLS = (
    *("cuda_runtime", "cuda_driver", "Runtime", "Driver", "xpu_runtime", "xpu_driver"),
    *("privateuse1_runtime", "privateuse1_driver", "mtia_runtime"),
)
_KERNELS = ("kernel", "Kernel", "concurrent_kernel")
_COPIES = {"gpu_memcpy": "copy", "Memcpy": "copy", "gpu_memset": "memset", "Memset": "memset"}
_KEPT = {
    **dict.fromkeys(_CALLS, "call"),
    **dict.fromkeys(_KERNELS, "kernel"),
    **_COPIES,
    **dict.fromkeys(("cpu_op", "Operator"), "op"),
    **{"user_annotation": "annotation", "cuda_sync": "sync"},
}
_SYNC_KINDS = {
    **{"Event Sync": "event", "Event Synchronize": "event", "Stream Wait Event": "wait"},
    **{"Stream Sync": "stream", "Stream Synchronize": "stream"},
    **{"Context Sync": "device", "Context Synchronize": "device", "Device Sync": "device"},
}
_WAITS = re.compile(r"Synchronize|Memcpy|EventRecord|StreamWaitEvent")
"""Calls that may wait, or that say what others wait for; they are kept without a kernel, too."""

_WITH_ARGS = re.compile(
    r"nccl|rccl|record_param_comms|msccl|all_?reduce|device_reduce|multimem|attention", re.I
)
"""Kernels and ops whose arguments are kept: those that communicate, and attention."""

_DTYPES = {
    **{"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"},
    **{"int": "int32", "long int": "int64", "long": "int64", "long long": "int64"},
    **{"signed char": "int8", "unsigned char": "uint8", "bool": "uint8"},
    **{"Float": "fp32", "Double": "fp64", "Half": "fp16", "BFloat16": "bf16", "Int": "int32"},
    **{"Long": "int64", "Byte": "uint8", "Char": "int8", "Bool": "uint8"},
}


def dtype_of(name: str) -> str:
    """The name of a data type of PyTorch in `graph.node.BYTES` and fp16, fp64; "": unknown.

    >>> dtype_of("c10::BFloat16"), dtype_of("Float8_e4m3fn"), dtype_of("Scalar")
    ('bf16', 'fp8', '')
    """
    return _DTYPES.get(name) or ("fp8" if "Float8" in name else "")


@dataclass(slots=True, eq=False)
class TraceEvents:
    """What is kept of the events of one file."""

    label: str
    header: Mapping[str, Any]
    """Entries of the file beside the events."""
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    calls: list[RuntimeCall] = field(default_factory=list[RuntimeCall])
    ops: dict[str, list[TorchOp]] = field(
        default_factory=lambda: defaultdict[str, list[TorchOp]](list)
    )
    """By thread."""
    annotations: list[Annotation] = field(default_factory=list[Annotation])
    syncs: dict[int, Sync] = field(default_factory=dict[int, Sync])
    """By correlation."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Events that cannot be used, by what is wrong."""
    _count: int = 0

    @staticmethod
    def of(label: str, header: Mapping[str, Any], events: Iterator[dict[str, Any]]) -> TraceEvents:
        """Keep what is needed of a stream of events."""
        kept = TraceEvents(label, header)
        for event in events:
            kept.add(event)
        return kept

    def add(self, event: dict[str, Any]) -> None:
        """Keep an event, if it is of a kind that is needed."""
        if event.get("ph") != "X":
            return
        kind = _KEPT.get(str(event.get("cat")))
        if kind is None:
            return
        try:
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            if max(abs(start), abs(end)) > LARGEST:
                raise OverflowError
            args = cast("dict[str, Any]", event.get("args") or {})
            correlation = int(args.get("correlation", -1))
            name = str(event["name"])
            thread = f"{event.get('pid')}/{event.get('tid')}"
            if end < start:
                self.skipped["a negative duration"] += 1
                return
            if kind in ("kernel", "copy", "memset"):
                stream, device = args.get("stream", event.get("tid")), args.get("device", 0)
                device, stream = int(cast("int", device)), int(cast("int", stream))
                kernel = Kernel(name, start, end, device, stream, correlation)
                if kind != "kernel":
                    kernel.family, kernel.bytes = kind, integer(int(args.get("bytes", 0)))
                elif _WITH_ARGS.search(name):
                    kernel.args = args
                self.kernels.append(kernel)
            elif kind == "call":
                self.calls.append(RuntimeCall(name, thread, start, end, correlation))
            elif kind == "sync":
                self._add_sync(args, correlation)
            else:
                self._add_op(kind, name, thread, start, end, args)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            self.skipped["no time, or an argument of another type than Kineto's"] += 1
            return
        self._count += 1
        if self._count > MOST_EVENTS:
            raise UserError(
                f"{self.label}: over {MOST_EVENTS:,} kernels, calls and ops; wanted fewer steps"
            )

    def _add_op(
        self, kind: str, name: str, thread: str, start: int, end: int, args: dict[str, Any]
    ) -> None:
        if kind == "annotation" or name.startswith("ProfilerStep#"):
            self.annotations.append(Annotation(name, start, end))
            if not name.startswith("nccl:"):
                return
        op = TorchOp(name, start, end)
        sizes = cast("list[Any]", args.get("Input Dims") or args.get("Input dims") or [])
        if sizes:
            types = cast("list[Any]", args.get("Input type") or [])
            op.dims, op.dtypes = _inputs(sizes, types)
        if _WITH_ARGS.search(name):
            op.args = args
        self.ops[thread].append(op)

    def _add_sync(self, args: dict[str, Any], correlation: int) -> None:
        kind = _SYNC_KINDS.get(str(args.get("cuda_sync_kind")))
        if kind is not None:
            self.syncs[correlation] = Sync(
                kind,
                int(args.get("stream", -1)),
                int(args.get("wait_on_cuda_event_record_corr_id", -1)),
                int(args.get("wait_on_stream", -1)),
            )

    def trace(self, window: str | None = None) -> RankTrace:
        """The linked trace, cut to the first annotation of a name if one is given."""
        notes = [
            f"{plural(number, 'event', 'events')} left out: {why}"
            for why, number in self.skipped.items()
        ]
        call_of: dict[int, RuntimeCall] = {}
        for call in self.calls:
            call_of.setdefault(call.correlation, call)
        for kernel in self.kernels:
            kernel.call = call_of.get(kernel.correlation) if kernel.correlation >= 0 else None
        for call in self.calls:
            call.sync = self.syncs.get(call.correlation)
        launching = {id(kernel.call) for kernel in self.kernels}
        calls = [
            call
            for call in self.calls
            if id(call) in launching or call.sync or _WAITS.search(call.name)
        ]
        calls.sort(key=lambda call: call.start)
        kernels = sorted(self.kernels, key=lambda kernel: kernel.start)
        if window is not None:
            calls, kernels = self._cut(window, calls, kernels, notes)
        self._link_ops(calls)
        if not any(op.dims for call in calls if call.op for op in call.op.with_parents()):
            notes.append("no shapes: products have no m, n, k (record_shapes=True)")
        distributed = self.header.get("distributedInfo")
        distributed = cast("dict[str, Any]", distributed) if isinstance(distributed, dict) else {}
        return RankTrace(
            path=self.label,
            rank=_number(distributed.get("rank"), _rank_in(self.label)),
            world_size=_number(distributed.get("world_size"), 0),
            device=self._device(),
            kernels=kernels,
            calls=calls,
            annotations=sorted(self.annotations, key=lambda annotation: annotation.start),
            groups=_groups(distributed),
            notes=notes,
        )

    def _cut(
        self, window: str, calls: list[RuntimeCall], kernels: list[Kernel], notes: list[str]
    ) -> tuple[list[RuntimeCall], list[Kernel]]:
        """The calls that begin in an annotation, and their kernels."""
        named = [annotation for annotation in self.annotations if annotation.name == window]
        if not named:
            names = list(dict.fromkeys(annotation.name for annotation in self.annotations))
            hint = did_you_mean(window, names)
            steps = [name for name in names if name.startswith("ProfilerStep#")]
            has = ", ".join((steps or names)[:5]) or "no annotations"
            raise UserError(f"{self.label}: no annotation {window!r}; has {has}{hint}")
        chosen = min(named, key=lambda annotation: annotation.start)
        if len(named) > 1:
            notes.append(f"the first of {len(named)} annotations {window!r} is taken")
        calls = [call for call in calls if chosen.start <= call.start <= chosen.end]
        launching = set(map(id, calls))
        kernels = [kernel for kernel in kernels if id(kernel.call) in launching]
        return calls, kernels

    def _link_ops(self, calls: list[RuntimeCall]) -> None:
        """Find the innermost op around each call."""
        by_thread: dict[str, list[RuntimeCall]] = defaultdict(list)
        for call in calls:
            by_thread[call.thread].append(call)
        for thread, thread_calls in by_thread.items():
            ops = sorted(self.ops.get(thread, ()), key=lambda op: (op.start, -op.end))
            stack: list[TorchOp] = []
            position = 0
            for call in thread_calls:
                while position < len(ops) and ops[position].start <= call.start:
                    op = ops[position]
                    position += 1
                    while stack and stack[-1].end <= op.start:
                        stack.pop()
                    op.parent = stack[-1] if stack else None
                    stack.append(op)
                while stack and stack[-1].end < call.start:
                    stack.pop()
                call.op = stack[-1] if stack else None

    def _device(self) -> str:
        """Name of the GPU that most kernels ran on."""
        properties = self.header.get("deviceProperties")
        if not isinstance(properties, list):
            return ""
        entries = cast("list[Any]", properties)
        devices = [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
        used = Counter(kernel.device for kernel in self.kernels)
        names = {_number(d.get("id"), -1): str(d.get("name") or "") for d in devices}
        ((device, _),) = used.most_common(1) or [(0, 0)]
        return names.get(device) or next(iter(names.values()), "")


Dims = tuple[tuple[int, ...], ...]


def _inputs(sizes: list[Any], types: list[Any]) -> tuple[Dims, tuple[str, ...]]:
    """Shapes and data types of the inputs of an op, lists of tensors flattened."""
    dims: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    for index, size in enumerate(sizes):
        dtype = dtype_of(str(types[index])) if index < len(types) else ""
        several = bool(size) and isinstance(size[0], list)
        for shape in size if several else [size]:
            dims.append(tuple(int(extent) for extent in shape))
            if math.prod(dims[-1]) > LARGEST:
                raise OverflowError
            dtypes.append(dtype)
    return tuple(dims), tuple(dtypes)


def integer(value: object) -> int:
    """A size or a count; 0: it is none."""
    return value if isinstance(value, int) and 0 < value < LARGEST else 0


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value <= MOST_RANKS else default


def _rank_in(label: str) -> int:
    """The rank in the name of a file, -1: none.

    >>> _rank_in("traces/rank-3.json.gz"), _rank_in("worker12_step_4.json"), _rank_in("a.json")
    (3, 12, -1)
    """
    found = re.search(r"(?:rank|worker)[-_.]?(\d+)", label.rsplit("/", 1)[-1], re.I)
    return int(found[1]) if found else -1


def _groups(distributed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Ranks by name of process group."""
    groups: dict[str, tuple[int, ...]] = {}
    entries = distributed.get("pg_config")
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            named = cast("dict[str, Any]", entry)
            ranks = named.get("ranks")
            members = cast("list[Any]", ranks) if isinstance(ranks, list) else []
            if members and all(_number(member, -1) >= 0 for member in members):
                groups[str(named.get("pg_name"))] = tuple(members)
    return groups
