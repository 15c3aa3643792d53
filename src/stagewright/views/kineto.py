"""A simulated step in the JSON of PyTorch's profiler (Kineto): a file for each rank.

Tools that read traces of real jobs read this one: Perfetto, HTA, TensorBoard, and `compare`. Of
each task there are the operator with its `Input Dims`, the launch by the host, and the kernel, with
one `correlation`; of collectives also the arguments of `record_param_comms`.

- A collective's kernel runs from when the rank is ready, as NCCL's does: waiting for other ranks is
  part of it.
- Query, key and value are one product (`time.fused_gemms`), which runs where its first part did.
- `cuda_sync` events hold what streams and the host wait for. Each kernel has a call, also those of
  a CUDA graph: calls after its first take no time.
- A kernel that no operator of PyTorch stands for is `stagewright::` and the names of its ops, on a
  tensor whose reading and writing takes the bytes of the kernel.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Bool, Int, offsets
from stagewright.graph.node import BYTES
from stagewright.graph.table import Timing
from stagewright.program.columns import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    LOAD,
    RECV,
    SEND,
    STORE,
    Program,
    intersect,
)
from stagewright.program.shapes import GEMM
from stagewright.time.fused_gemms import gemms_of, joint_rows
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import timing_of
from stagewright.time.simulate.launches import HostWork
from stagewright.time.simulate.timeline import Lane, Timeline
from stagewright.trace.formats.json import TextBatch
from stagewright.trace.templates import Format
from stagewright.views.perfetto import event, micro, nanoseconds, thread_of

FILE = "rank.{rank}.pt.trace.json.gz"
"""Name of a rank's file; the profiler of PyTorch ends its own so."""
_APART = 2
"""Nanoseconds between launches that take no time: of parts of a kernel, or of a CUDA graph. The
operator of each encloses its call, which is how readers find it."""
EVENT_BYTES = 1500
"""Text of a task's events, about."""

TYPES = {
    "fp32": ("float", "Float"),
    "bf16": ("c10::BFloat16", "BFloat16"),
    "fp8": ("c10::Float8_e4m3fn", "Float8_e4m3fn"),
    "mxfp8": ("c10::Float8_e4m3fn", "Float8_e4m3fn"),
    "int64": ("long int", "Long"),
    "int32": ("int", "Int"),
    "int8": ("signed char", "Char"),
    "fp4": ("c10::Float4_e2m1fn_x2", "Float4_e2m1fn_x2"),
}
"""Data types as operators name them, and as collectives do; others are bytes."""
_BYTE = ("unsigned char", "Byte")

COLLECTIVE_NAMES = {
    "all_reduce": ("allreduce", "AllReduce"),
    "all_gather": ("_allgather_base", "AllGather"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter"),
    "all_to_all": ("all_to_all", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
}
"""Names of collectives in `ProcessGroupNCCL`, and in NCCL's kernels."""


def format_of(line: Timeline, hardware: Hardware) -> Format:
    """Format of a simulated step, for `trace.write`."""

    def plan(program: Program, ranks: Int, provenance: object) -> list[TextBatch]:
        return [
            TextBatch(
                chosen, EVENT_BYTES * len(lane.issue), partial(compressed, line, lane, hardware)
            )
            for lane in line.lanes
            if len(chosen := intersect(lane.ranks, ranks))
        ]

    return Format(FILE, plan)


def compressed(line: Timeline, lane: Lane, hardware: Hardware, rank: int) -> bytes:
    """The file of a rank."""
    return gzip.compress(trace(line, lane, hardware, rank).encode(), mtime=0)


def trace(line: Timeline, lane: Lane, hardware: Hardware, rank: int) -> str:
    """The trace of a rank as JSON with an event a line."""
    head, events = head_and_events(line, lane, hardware, rank)
    return json.dumps(head)[:-1] + ',"traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def head_and_events(
    line: Timeline, lane: Lane, hardware: Hardware, rank: int
) -> tuple[dict[str, Any], Iterator[str]]:
    """Header of the trace of a rank, and its events as JSON."""
    groups, device = _Groups.of(line.program, rank), rank % hardware.gpus_per_node
    properties = {
        "id": device,
        "name": hardware.name,
        "totalGlobalMem": hardware.memory,
        "numSms": hardware.compute_units,
    }
    head = {
        "schemaVersion": 1,
        "deviceProperties": [properties],
        "distributedInfo": groups.info(line.program.mesh.world_size),
        "record_shapes": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": FILE.format(rank=rank).removesuffix(".gz"),
    }
    return head, _events(line, lane, groups, device)


class _Groups(NamedTuple):
    """Communicators and peers of one rank, by slot."""

    rank: int
    names: list[str]
    labels: list[str]
    ranks: list[list[int]]
    """Empty for a communicator that the rank is not in."""
    peers: list[int]

    @classmethod
    def of(cls, program: Program, rank: int) -> _Groups:
        """The groups of a rank."""
        slots = range(len(program.communicators))
        ids = [int(program.group_of(slot, np.array([rank]))[0]) for slot in slots]
        members = [
            np.flatnonzero(program.group_of(slot) == group).tolist() if group else []
            for slot, group in zip(slots, ids, strict=True)
        ]
        peers = [int(program.peer_of(s, np.array([rank]))[0]) for s in range(len(program.peers))]
        return cls(
            rank, [str(group) for group in ids], [*map(program.label_of, slots)], members, peers
        )

    def info(self, world_size: int) -> dict[str, object]:
        """The block `distributedInfo`."""
        config = [
            {
                "pg_name": name, "pg_desc": label, "backend_config": "cuda:nccl",
                "pg_size": len(ranks), "ranks": ranks,
            }
            for name, label, ranks in zip(self.names, self.labels, self.ranks, strict=True)
            if ranks
        ]  # fmt: skip
        return {
            "backend": "nccl", "rank": self.rank, "world_size": world_size,
            "pg_count": len(config), "pg_config": config,
        }  # fmt: skip


class _KernelEvent(NamedTuple):
    """An operator and its kernel: names and arguments."""

    name: str
    kernel: str
    of_operator: dict[str, Any]
    of_kernel: dict[str, Any]
    category: str = "kernel"


class _Times(NamedTuple):
    """Times of a lane in nanoseconds, by issue index."""

    launch: Int
    """Begin of the operator on the host."""
    launched: Int
    begin: Int
    end: Int


def _events(line: Timeline, lane: Lane, groups: _Groups, device: int) -> Iterator[str]:
    """Every event as JSON."""
    host, tid = groups.rank + 1000, thread_of(line, lane)
    yield from _names(device, host, np.unique(tid).tolist())
    yield event(
        ph="X", cat="user_annotation", name="ProfilerStep#0", pid=host, tid=host, ts=0,
        dur=float(nanoseconds(np.array(line.ticks))) / 1000, args={"External id": 0},
    )  # fmt: skip
    products, costs = [*_parts(lane)], _host_work(line, lane)
    times = _times(lane, tid, products, costs)
    # A task that takes no time, or is a further part of a product, is part of another kernel.
    runs = (lane.end > lane.begin) | (lane.kind != COMPUTE)
    for parts in products:
        runs[parts[1:]] = False
    calls = times.launched - times.launch > _APART
    joined = (lane.end > lane.begin) & ~runs
    of_other_step = line.steady & (times.end == times.begin) & ~joined
    awaited = _awaited(lane, tid, of_other_step)
    recorded = {dep for deps in awaited.values() for dep in deps}
    operators = _KernelEvents(lane, groups, products)
    number = len(lane.issue)
    records: dict[int, int] = {}
    waits = np.zeros(len(lane.issue), bool) if costs is None else costs.waits[lane.row]
    for i in range(len(lane.issue)):
        launch, launched, begin, end = (int(column[i]) for column in times)
        if of_other_step[i]:
            continue
        thread, stream = f'"pid":{host},"tid":{host}', int(tid[i])
        start = launched - 1
        on_device = f'"pid":{device},"tid":{stream}'
        where = {"device": device, "context": 1, "stream": stream}
        if runs[i] or calls[i]:  # else it is part of another, which others may wait for
            operator = operators.of(i)
            for dep in awaited.get(i, ()):
                number += 1
                yield _host_call("cudaStreamWaitEvent", thread, start, start, number)
                args = {
                    "cuda_sync_kind": "Stream Wait Event", "wait_on_stream": int(tid[dep]),
                    "wait_on_cuda_event_record_corr_id": records[dep],
                    "wait_on_cuda_event_id": dep, "correlation": number, **where,
                }  # fmt: skip
                yield _slice("cuda_sync", "Stream Wait Event", on_device, start, start, args)
            args = {"External id": i + 1, **operator.of_operator}
            yield _slice("cpu_op", operator.name, thread, launch, launched, args)
            name = "cudaMemcpyAsync" if operator.category == "gpu_memcpy" else "cudaLaunchKernel"
            yield _host_call(name, thread, start, launched, i + 1)
            if runs[i]:
                args = {"External id": i + 1, **where, "correlation": i + 1, **operator.of_kernel}
                yield _slice(operator.category, operator.kernel, on_device, begin, end, args)
                flow = f'"id":{i + 1},"cat":"ac2g","name":"ac2g"'
                yield f'{{"ph":"s",{flow},{thread},"ts":{micro(start)}}}'
                yield f'{{"ph":"f","bp":"e",{flow},{on_device},"ts":{micro(begin)}}}'
        if i in recorded:
            number += 1
            records[i] = number
            yield _host_call("cudaEventRecord", thread, launched, launched, number)
        if waits[i]:
            number += 1
            yield _host_call("cudaStreamSynchronize", thread, launched, max(launched, end), number)
            args = {"cuda_sync_kind": "Stream Sync", "correlation": number, **where}
            end = max(launched, end)
            yield _slice("cuda_sync", "Stream Sync", on_device, launched, end, args)


def _names(device: int, host: int, streams: list[int]) -> Iterator[str]:
    """Names of the processes and threads."""
    for pid, label, index in ((host, "CPU", 0), (device, f"GPU {device}", 1 << 24)):
        yield event(ph="M", name="process_name", pid=pid, tid=0, args={"name": "stagewright"})
        yield event(ph="M", name="process_labels", pid=pid, tid=0, args={"labels": label})
        yield event(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": index})
    for stream in streams:
        name = f"stream {stream} "
        yield event(ph="M", name="thread_name", pid=device, tid=stream, args={"name": name})


def _slice(cat: str, name: str, where: str, begin: int, end: int, args: dict[str, Any]) -> str:
    return (
        f'{{"ph":"X","cat":"{cat}","name":{json.dumps(name)},{where},"ts":{micro(begin)},'
        f'"dur":{micro(end - begin)},"args":{json.dumps(args)}}}'
    )


def _host_call(name: str, thread: str, begin: int, end: int, correlation: int) -> str:
    args = {"External id": correlation, "correlation": correlation}
    return _slice("cuda_runtime", name, thread, begin, end, args)


# ---- times ---------------------------------------------------------------------------------------


def _host_work(line: Timeline, lane: Lane) -> HostWork | None:
    """What the host does for the tasks of a lane; None: launches were not simulated."""
    classes = enumerate(line.program.classes)
    of_class = next(i for i, c in classes if c is lane.rank_class)
    return None if line.hosts is None else line.hosts[of_class]


def _times(lane: Lane, tid: Int, products: Sequence[Int], costs: HostWork | None) -> _Times:
    """Times of a lane: collectives from when the rank is ready, receives once they are posted."""
    lane_launch = launched = nanoseconds(lane.launched)
    cost = np.zeros_like(launched)
    if costs is not None:
        cost = np.rint(costs.seconds[lane.row] * 1e9).astype(np.int64)
    begin, end = nanoseconds(lane.begin), nanoseconds(lane.end)
    waiting = (lane.kind == COLLECTIVE) | (lane.kind == RECV)
    begin = np.where(waiting, nanoseconds(lane.ready), begin)
    for stream in np.unique(tid[lane.kind == RECV]):  # one runs after the other
        posted = np.flatnonzero((tid == stream) & (lane.kind == RECV))
        begin[posted[1:]] = np.maximum(begin[posted[1:]], end[posted[:-1]])
        end[posted] = np.maximum(end[posted], begin[posted])
    _join_products(lane, products, begin, end)
    # Tasks that are launched together are launched one after the other.
    position = np.arange(len(launched))
    together = np.searchsorted(launched, launched, side="right") - position - 1
    launched = np.maximum(launched - _APART * together, _APART * (position + 1))
    before = np.append(0, launched[:-1])
    launch = np.minimum(np.maximum(lane_launch - cost, before), launched - 1)
    return _Times(launch, launched, begin, end)


def _parts(lane: Lane) -> Iterator[Int]:
    """Issue indices of the parts of each product that runs as one kernel.

    Kernels between the parts run after the product: those that another stream waits for stay where
    they are, and the parts are kernels of their own.
    """
    tasks, kernels = lane.rank_class.work.actions.tasks, np.flatnonzero(lane.is_kernel)
    joint = joint_rows(tasks)
    if not len(joint.rows):
        return
    whole = np.full(len(tasks), -1)
    whole[joint.rows] = joint.whole
    of_kernel = whole[lane.row[kernels]]
    is_part = of_kernel >= 0
    waiter = np.repeat(np.arange(len(lane.issue)), np.diff(lane.issue.pointer))
    awaited = lane.issue.deps[lane.issue.stream[waiter] != lane.issue.stream[lane.issue.deps]]
    num_awaited = offsets(np.isin(kernels, awaited).astype(np.int64))  # before each kernel
    # Copies of an action repeat its rows: a row that comes again begins another product.
    open_products: dict[int, list[int]] = {}
    rows: dict[int, set[int]] = {}
    finished: list[list[int]] = []
    for at in np.flatnonzero(is_part).tolist():
        product, row = int(of_kernel[at]), int(lane.row[kernels[at]])
        if product not in open_products or row in rows[product]:
            open_products[product], rows[product] = [], set()
            finished.append(open_products[product])
        open_products[product].append(at)
        rows[product].add(row)
    for parts in finished:
        first, last = parts[0], parts[-1]
        if len(parts) > 1 and num_awaited[last] == num_awaited[first]:
            yield kernels[first : last + 1][np.isin(np.arange(first, last + 1), parts)]


def _join_products(lane: Lane, products: Sequence[Int], begin: Int, end: Int) -> None:
    """Let each product run at once; kernels between its parts run after it."""
    kernels = np.flatnonzero(lane.is_kernel)
    for parts in products:
        duration = int((end[parts] - begin[parts]).sum())
        first, last = np.searchsorted(kernels, parts[[0, -1]])
        until = begin[parts[0]] + duration
        end[parts[0]] = until
        for i in kernels[first + 1 : last + 1].tolist():
            if i in parts:
                begin[i] = end[i] = until
            else:
                length = end[i] - begin[i]
                begin[i] = max(begin[i], until)
                until = end[i] = begin[i] + length


def _awaited(lane: Lane, tid: Int, of_other_step: Bool) -> dict[int, list[int]]:
    """Dependencies of tasks on tasks of the step on other streams, by issue index."""
    issue = lane.issue
    waiter = np.repeat(np.arange(len(issue)), np.diff(issue.pointer))
    crosses = (tid[waiter] != tid[issue.deps]) & ~of_other_step[issue.deps]
    awaited: dict[int, list[int]] = {}
    for at, dep in zip(waiter[crosses].tolist(), issue.deps[crosses].tolist(), strict=True):
        awaited.setdefault(at, []).append(dep)
    return awaited


# ---- operators -----------------------------------------------------------------------------------


class _KernelEvents:
    """Operators of a lane's tasks."""

    def __init__(self, lane: Lane, groups: _Groups, products: Sequence[Int]) -> None:
        self.tasks = lane.rank_class.work.actions.tasks
        self.lane, self.groups = lane, groups
        self._products: dict[int, tuple[int, ...]] = {}
        rows = np.array(sorted({int(lane.row[parts[0]]) for parts in products}), np.int64)
        if len(rows):
            fused = gemms_of(self.tasks, rows)
            sizes = zip(*(fused[x].astype(int).tolist() for x in range(4)), strict=True)
            self._products = dict(zip(rows.tolist(), sizes, strict=True))
        self._cache: dict[int, _KernelEvent] = {}

    def of(self, index: int) -> _KernelEvent:
        """Operator of the task with an issue index."""
        row = int(self.lane.row[index])
        if row not in self._cache:
            kind = int(self.lane.kind[index])
            make = {COMPUTE: self._compute, COLLECTIVE: self._collective}
            copies = {SEND: self._message, RECV: self._message}
            self._cache[row] = (make | copies).get(kind, self._copy)(row, kind)
        return self._cache[row]

    def _compute(self, row: int, _: int) -> _KernelEvent:
        tasks = self.tasks
        dtype, ops = tasks.dtypes[int(tasks.dtype[row])], tasks.ops[int(tasks.op[row])]
        shape = tasks.shapes[int(tasks.shape[row])] if tasks.shape[row] >= 0 else None
        sizes: dict[str, int] = shape.sizes() if shape else {}
        timing = timing_of(shape.kernel) if shape else Timing.MEMORY
        kind = TYPES.get(dtype, _BYTE)[0]
        concrete: list[str] = []
        dims: list[list[int]]
        if shape and shape.kernel == GEMM:
            own = tuple(sizes[x] for x in ("batch", "m", "n", "k"))
            batch, m, n, k = self._products.get(row, own)
            stack = [batch] if batch > 1 else []
            dims, name = [[*stack, m, k], [*stack, k, n]], "aten::bmm" if stack else "aten::mm"
            kernel = f"grouped_gemm_{dtype}" if stack and not sizes.get("head") else f"gemm_{dtype}"
        elif timing in (Timing.ATTENTION, Timing.ATTENTION_BACKWARD):
            b, h, kv = sizes["batch"], sizes["heads"], sizes["kv_heads"]
            q = [b, sizes["q"], h, sizes["d"]]
            dims = [q, [b, sizes["k"], kv, sizes["d"]], [b, sizes["k"], kv, sizes["v"]]]
            causal, window = str(bool(sizes["causal"])), str((sizes["window"] or 0) - 1)
            name, kernel = "aten::_flash_attention_forward", f"flash_fwd_{dtype}"
            if timing is Timing.ATTENTION_BACKWARD:
                name, kernel = "aten::_flash_attention_backward", f"flash_bwd_{dtype}"
                out = [*q[:-1], sizes["v"]]
                dims = [out, *dims, out, [b, h, sizes["q"]]]
            tensors = len(dims)
            # cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
            # window_size_left, window_size_right; backward has two tensors in place of the mask.
            concrete = [*[""] * (tensors + 2), str(sizes["q"]), str(sizes["k"]), "0.", causal]
            concrete += [*(["False"] if tensors == 3 else ["", ""]), "", window, "0"]
            dims = [*dims, *([] for _ in concrete[tensors:])]
        else:
            item = float(BYTES.get(dtype, 1))
            dims = [[round(int(tasks.traffic[row]) / 2 / item)]]
            name, kernel = f"stagewright::{ops}", f"{ops}_{dtype}"
            if timing is Timing.MEMORY and "norm" not in ops:
                kernel = f"elementwise_{kernel}"
        of_operator = {
            "Input Dims": dims,
            "Input type": [kind if each else "Scalar" for each in dims],
            "Concrete Inputs": concrete or [""] * len(dims),
        }
        work = {"name": tasks.names[int(tasks.name[row])], "bytes": int(tasks.traffic[row])}
        return _KernelEvent(name, kernel, of_operator, work | {"flops": int(tasks.flops[row])})

    def _collective(self, row: int, _: int) -> _KernelEvent:
        tasks, groups, slot = self.tasks, self.groups, int(self.tasks.slot[row])
        collective, ranks = COLLECTIVES[int(tasks.collective[row])], groups.ranks[slot]
        name, kernel = COLLECTIVE_NAMES[collective]
        # All members count, where the groups of a class differ in what they are part of.
        dtype, count = self._elements(row, int(tasks.comm_bytes[row]))
        out = {"all_gather": count * len(ranks), "reduce_scatter": count // max(1, len(ranks))}
        return self._communicates(
            name, kernel, dtype, (count, out.get(collective, count)),
            {
                "Process Group Name": groups.names[slot],
                "Process Group Description": groups.labels[slot],
                "Process Group Ranks": str(ranks),
                "Group size": len(ranks),
            },
            tasks.names[int(tasks.name[row])],
        )  # fmt: skip

    def _message(self, row: int, kind: int) -> _KernelEvent:
        tasks, groups = self.tasks, self.groups
        peer, name = groups.peers[int(tasks.slot[row])], "send" if kind == SEND else "recv"
        dtype, count = self._elements(row, int(tasks.comm_bytes[row]))
        pair = sorted((groups.rank, peer))
        source, target = (groups.rank, peer) if kind == SEND else (peer, groups.rank)
        return self._communicates(
            name, "SendRecv", dtype, (count, count),
            {
                "Process Group Name": f"p2p {pair[0]} {pair[1]}",
                "Process Group Description": "p2p",
                "Process Group Ranks": str(pair),
                "Group size": 2,
                "Src Rank": pair.index(source),
                "Dst Rank": pair.index(target),
            },
            tasks.names[int(tasks.name[row])],
        )  # fmt: skip

    def _elements(self, row: int, size: int) -> tuple[str, int]:
        """Data type of what is sent, in the words of collectives, and number of elements."""
        dtype = self.tasks.dtypes[int(self.tasks.dtype[row])]
        item = BYTES.get(dtype, 1)
        if dtype not in TYPES or size % item:
            return _BYTE[1], size
        return TYPES[dtype][1], int(size // item)

    def _communicates(
        self, name: str, kernel: str, dtype: str, elements: tuple[int, int], group: dict[str, Any],
        label: str,
    ) -> _KernelEvent:  # fmt: skip
        args = {
            "Collective name": name, "dtype": dtype, "In msg nelems": elements[0],
            "Out msg nelems": elements[1], "In split size": "[]", "Out split size": "[]", **group,
        }  # fmt: skip
        return _KernelEvent(
            "record_param_comms", f"ncclDevKernel_{kernel}_{dtype}", args, {**args, "name": label}
        )

    def _copy(self, row: int, kind: int) -> _KernelEvent:
        assert kind in (LOAD, STORE)
        size, dtype = int(self.tasks.comm_bytes[row]), _BYTE[0]
        name = (
            "Memcpy HtoD (Pinned -> Device)" if kind == LOAD else "Memcpy DtoH (Device -> Pinned)"
        )
        dims = {"Input Dims": [[size], [size]], "Input type": [dtype, dtype]}
        return _KernelEvent("aten::copy_", name, dims, {"bytes": size}, "gpu_memcpy")
