"""Types of kernels: families, extents of products, bytes, and what collectives send to whom.

The family follows from the kernel's name, extents and bytes from the inputs of the op that launched
it. NCCL and RCCL give kind, bytes and group of a collective with the kernel (since 2024), with the
op `record_param_comms`, or in the name of the kernel only (`ncclKernel_AllReduce_RING_LL_Sum_...`);
names such as `ncclDevKernel_Generic` do not tell the kind.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from stagewright.graph.node import BYTES
from stagewright.numbers import plural
from stagewright.program.columns import Shape
from stagewright.recorded.events import MOST_RANKS, dtype_of, integer
from stagewright.recorded.rank import CommOp, Kernel, RankTrace, TorchOp

_NAMES = (
    ("attention", r"fmha"),
    ("elementwise", r"kv_?cache|flashinfer_kv|reshape_and_cache|act_and_mul|rotary"),
    ("attention", r"flash|fmha|attn|attention|_mha|aotriton|\bmla_|paged"),
    ("norm", r"norm(?!al)|bn_fw|bn_bw"),
    ("grouped_gemm", r"group(ed)?_?gemm|grouped_mm|moe|matmul_ogs"),
    ("conv", r"conv(?!ert)|winograd|implicit_gemm|_wgrad|_dgrad|_scudnn_|im2col|col2im|miopen"),
    ("gemm", r"(?<!fb)gemm|Cijk_|nvjet|cutlass|xmma|split_?k|gemv|matmul|cublas|LLMM|triton_tem"),
    (
        "elementwise",
        r"elementwise|at::native|triton_|reduce|softmax|cat|copy|index|scatter|gather|embed|silu"
        r"|gelu|fill|cast|quant|topk|sort|cub::|rocprim|multi_tensor|dropout|pool|transpose|permute"
        r"|foreach|nchw|vectorized|fbgemm",
    ),
)
"""Families by what the name of a kernel has, the first that fits."""
_FAMILY = [(family, re.compile(pattern, re.I)) for family, pattern in _NAMES]
_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|cross_device_reduce|multimem_all|allreduce_|all_reduce_|one_shot_all|two_shot_all",
    re.I,
)
_SECOND = re.compile(r"split_?k_?reduce|reduce_?split_?k|PostGSU|_postprocess", re.I)
"""The second kernel of a product: it adds up the parts of the first."""

_KINDS = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "crossdevicereduce": "all_reduce",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
MESSAGES = ("send", "recv", "send_recv")
_SIZES = {**{name: float(size) for name, size in BYTES.items()}, "fp16": 2.0, "fp64": 8.0}

# Ops of attention: number of the argument `is_causal`; dims are [batch, heads, length, width], or
# [batch, length, heads, width] where True.
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": (4, False),
    "aten::_scaled_dot_product_efficient_attention": (6, False),
    "aten::_scaled_dot_product_cudnn_attention": (6, False),
    "aten::_flash_attention_forward": (8, True),
    "aten::scaled_dot_product_attention": (5, False),
}


def describe_kernels(trace: RankTrace) -> RankTrace:
    """Fill in family, shape, bytes and communication of every kernel; returns the trace."""
    families: dict[str, str] = {}
    for kernel in trace.kernels:
        if kernel.family != "other":  # copies, memsets
            continue
        if kernel.name not in families:
            families[kernel.name] = _family(kernel.name)
        kernel.family = families[kernel.name]
        op = kernel.op
        if kernel.family == "collective":
            kernel.comm = _comm(kernel, trace)
            kernel.family = "message" if kernel.comm.kind in MESSAGES else "collective"
        elif op is not None:
            _describe(kernel, op)
    _number(trace)
    return trace


def _family(name: str) -> str:
    if _COMMUNICATION.search(name):
        return "collective"
    return next((family for family, pattern in _FAMILY if pattern.search(name)), "other")


def _describe(kernel: Kernel, op: TorchOp) -> None:
    """Shape and bytes of a kernel that computes."""
    family = kernel.family
    if family == "gemm" and any("convolution" in each.name for each in op.with_parents()):
        kernel.family = "conv"
    elif family == "gemm":
        if not _SECOND.search(kernel.name):
            kernel.shape, kernel.dtype = _product(op)
    elif family == "attention":
        kernel.shape, kernel.dtype = _attention(op)
    elif family in ("norm", "elementwise"):
        kernel.bytes, kernel.dtype = _moved(op)


def _product(op: TorchOp) -> tuple[Shape | None, str]:
    """Extents of the product that an op, or one that called it, makes."""
    for each in op.with_parents():
        matrices = [
            (dims, dtype)
            for dims, dtype in zip(each.dims, each.dtypes, strict=True)
            if len(dims) >= 2
        ]
        if "add" in each.name and len(matrices) > 2:  # addmm, baddbmm: the sum comes first
            matrices = matrices[1:]
        if len(matrices) < 2:
            continue
        (a, dtype), (b, _) = matrices[:2]
        transposed = a[-1] == b[-1] and (a[-1] != b[-2] or "linear" in each.name)
        if not transposed and a[-1] != b[-2]:
            continue
        k, n = a[-1], b[-2] if transposed else b[-1]
        batch = math.prod(b[:-2])
        m = math.prod(a[:-1]) // max(batch, 1)
        return Shape("gemm", (("batch", batch), ("m", m), ("n", n), ("k", k))), dtype
    return None, ""


def _attention(op: TorchOp) -> tuple[Shape | None, str]:
    """Extents of fused attention."""
    for each in op.with_parents():
        backward = "backward" in each.name
        name = each.name.replace("_flash_attention_backward", "_flash_attention_forward")
        if "_scaled_dot_product" in name:
            name = each.name.removesuffix("_backward")
        at, lengths_first = _ATTENTION.get(name, (-1, False))
        inputs = each.dims[1:] if backward else each.dims  # the gradient comes first
        if at < 0 or len(inputs) < 3 or any(len(dims) != 4 for dims in inputs[:3]):
            continue
        query, key, value = (
            (b, h, s, d) if not lengths_first else (b, s, h, d)
            for b, s, h, d in (
                dims if lengths_first else (dims[0], dims[2], dims[1], dims[3])
                for dims in cast("Sequence[tuple[int, int, int, int]]", inputs[:3])
            )
        )
        values = (each.args or {}).get("Concrete Inputs")
        concrete = cast("list[Any]", values) if isinstance(values, list) else []
        if backward:  # after the gradient, the result and its sums, seeds or lengths
            at = 14 if "cudnn" in name else 11
        causal = int(len(concrete) > at and str(concrete[at]) == "True")
        b, q, heads, d = query[0], query[1], query[2], query[3]
        extents = (
            *(("batch", b), ("heads", heads), ("kv_heads", key[2]), ("q", q), ("k", key[1])),
            *(("d", d), ("v", value[3]), ("causal", causal), ("window", 0)),
        )
        return Shape("attention_bwd" if backward else "attention", extents), each.dtypes[0]
    return None, ""


_WRITTEN = {"copy_": 0.0, **dict.fromkeys(("mean", "sum", "all", "any", "amax"), 0.0)}
"""Bytes of an op's output over those of its largest input, where these are not equal: a copy names
its output as an input, a reduction has a small one; `cat` writes all that it reads."""


def _moved(op: TorchOp) -> tuple[int, str]:
    """Bytes that an op reads, and as many as its largest input has for the output; data type."""
    for each in op.with_parents():
        sizes = [
            (math.prod(dims) * _SIZES.get(dtype, 0.0), dtype)
            for dims, dtype in zip(each.dims, each.dtypes, strict=True)
            if dims and dtype
        ]
        if sizes:
            largest, dtype = max(sizes)
            name, read = each.name.removeprefix("aten::"), sum(size for size, _ in sizes)
            written = read if name == "cat" else largest * _WRITTEN.get(name, 1.0)
            return round(read + written), dtype
    return 0, ""


# ---- communication -------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """The kind of a collective by a name of PyTorch, NCCL or RCCL; "": it does not tell.

    >>> kind_of("_allgather_base"), kind_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL")
    ('all_gather', 'reduce_scatter')
    >>> kind_of("all_to_allv"), kind_of("nccl:send 0->1"), kind_of("ncclDevKernel_Generic")
    ('all_to_all', 'send', '')
    """
    letters = name.lower().replace("_", "").replace(" ", "")
    return next((kind for word, kind in _KINDS.items() if word in letters), "")


def _comm(kernel: Kernel, trace: RankTrace) -> CommOp:
    """What a communication kernel sends: from its arguments, its ops, or its name."""
    ops = list(kernel.op.with_parents()) if kernel.op else []
    sources: list[Mapping[str, Any]] = [kernel.args or {}, *(op.args or {} for op in ops)]
    nothing: Mapping[str, Any] = {}
    args = next((source for source in sources if "Collective name" in source), nothing)
    named = [op for op in ops if op.args is not None and "attention" not in op.name]
    kind = kind_of(str(args.get("Collective name", ""))) or kind_of(kernel.name)
    if not args and kind in ("", "send_recv"):
        kind = next((k for op in named if (k := kind_of(op.name))), kind)
    dtype = dtype_of(str(args.get("dtype", ""))) or _dtype_in(kernel.name, kind)
    size = integer(args.get("Out msg nelems" if kind == "recv" else "In msg nelems"))
    if args:
        size = round(size * _SIZES.get(dtype, 0.0))
    else:
        size, dtype = _sent(named, dtype)
    group = str(args.get("Process Group Name", ""))
    ranks = _ranks(args) or trace.groups.get(group, ())
    members = integer(args.get("Group size")) or len(ranks)
    if not args and trace.world_size > 1 and kind not in MESSAGES:
        group, members, ranks = "", trace.world_size, tuple(range(trace.world_size))
    return CommOp(kind, size, dtype, group, members, ranks, _peer(kind, args, ranks, trace.rank))


def _sent(ops: Iterable[TorchOp], dtype: str) -> tuple[int, str]:
    """Bytes of the tensors that an op of the profiler names as input, and their data type."""
    for op in ops:
        tensors = [
            math.prod(dims) * _SIZES.get(each, 0.0)
            for dims, each in zip(op.dims, op.dtypes, strict=True)
            if dims and each
        ]
        if tensors:
            sent = next(
                each for dims, each in zip(op.dims, op.dtypes, strict=True) if dims and each
            )
            return round(sum(tensors)), sent
    return 0, dtype


def _dtype_in(name: str, kind: str) -> str:
    """The data type in a kernel's name; messages have bytes (`int8_t`) whatever they send."""
    if kind in (*MESSAGES, "all_to_all"):
        return ""
    words = {"float": "fp32", "f32": "fp32", "half": "fp16", "f16": "fp16", "bfloat16": "bf16"}
    words |= {"bf16": "bf16", "double": "fp64", "f64": "fp64", "int8": "int8", "u8": "uint8"}
    found = re.findall(r"_(float|half|bfloat16|double|bf16|f16|f32|f64|u8|int8)(?=_|\(|<|$)", name)
    return words[found[0]] if found else ""


def _ranks(args: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks of a group: listed, or by first rank and stride where the list was cut."""
    text = str(args.get("Process Group Ranks", ""))
    size = integer(args.get("Group size"))
    if re.fullmatch(r"\[\d{1,7}(, ?\d{1,7})*\]", text):
        ranks = tuple(int(rank) for rank in text[1:-1].split(","))
        if not size or len(ranks) == size:
            return ranks
    start, stride = args.get("Global rank start"), args.get("Global rank stride")
    if isinstance(start, int) and isinstance(stride, int) and stride > 0 and size:
        ranks = range(start, start + size * stride, stride)
        return tuple(ranks) if start >= 0 and ranks[-1] <= MOST_RANKS else ()
    return ()


def _peer(kind: str, args: Mapping[str, Any], ranks: Sequence[int], rank: int) -> int:
    """The other rank of a message, -1: not recorded."""
    if kind not in ("send", "recv"):
        return -1
    peer = args.get("Dst Rank" if kind == "send" else "Src Rank")
    if isinstance(peer, int) and 0 <= peer < len(ranks):
        return ranks[peer]
    others = [member for member in ranks if member != rank]
    return others[0] if len(others) == 1 else -1


def _number(trace: RankTrace) -> None:
    """Number the collectives of each group, and say what is not known of them."""
    count: Counter[object] = Counter()
    unknown, assumed = 0, 0
    for kernel in trace.kernels:
        comm = kernel.comm
        if comm is None:
            continue
        unknown += not comm.bytes
        assumed += not comm.group and comm.size > 0
        key = (comm.group, comm.ranks, comm.kind if comm.kind in MESSAGES else "", comm.peer)
        comm.index = count[key]
        count[key] += 1
    if assumed:
        trace.notes.append(
            f"no process groups recorded: {plural(assumed, 'collective is', 'collectives are')} "
            f"taken to be of all {trace.world_size} ranks"
        )
    if unknown:
        trace.notes.append(f"{plural(unknown, 'transfer', 'transfers')} of unknown size")
