"""What PyTorch's autograd keeps for backward, operation by operation, and of a part of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from stagewright.algebra.size import Size, product, size
from stagewright.graph.node import BYTES
from stagewright.graph.reference.dense import SLOPES_OF_RESULTS
from stagewright.imports.trace.nodes import PLAIN, TracedNodes, operation
from stagewright.imports.trace.recording import Ref, TracedNode

_BY_WHAT_IS_KEPT: dict[str, str] = {
    "nothing": (
        "cumsum roll flip tril triu pad constant_pad_nd repeat repeat_interleave "
        "upsample_nearest1d upsample_nearest2d upsample_bilinear2d unfold unfold_copy diff "
        "slice_scatter select_scatter diagonal_scatter fill zero copy lerp remainder "
        "pixel_shuffle pixel_unshuffle channel_shuffle "
        "argsort argmax eq ne lt le gt ge logical_and logical_or logical_not bitwise_not "
        "bitwise_and __and__ __or__ isinf isnan any all one_hot floor_divide floor ceil round "
        "sign unique_dim histc bincount searchsorted bucketize"
    ),
    "constant": (
        "rand_like randn_like zeros_like ones_like full_like new_zeros new_ones new_full zeros "
        "ones full empty_like"
    ),
    "indices": "sort topk max min",
    "0": (
        "where clamp clamp_min clamp_max pow leaky_relu elu selu celu hardtanh hardswish mish "
        "glu threshold nan_to_num avg_pool1d avg_pool2d adaptive_avg_pool1d "
        "adaptive_avg_pool2d group_norm native_group_norm batch_norm instance_norm var "
        "l1_loss"
    ),
    "0&indices": "max_pool1d max_pool2d",
    "1": (
        "masked_fill masked_scatter scatter scatter_add index index_put index_select "
        "index_fill _unsafe_index"
    ),
    "0&1": (
        "gather maximum minimum prelu smooth_l1_loss huber_loss mse_loss kl_div "
        "binary_cross_entropy binary_cross_entropy_with_logits logaddexp grid_sampler"
    ),
    "1&2": "index_add index_copy addcmul addcdiv",
    "result": "log_softmax pairwise_distance",
    "0&result": "amax amin norm logsumexp std prod normalize cosine_similarity",
    "0&1&result": "dist",
    "0&1&2&result": "scatter_reduce",
}
"""What autograd keeps for backward: operands by number, the result, or the numbers of what was
chosen (derivatives.yaml of PyTorch 2.13; `tests/slow/test_torch_table.py` asks PyTorch)."""

AS_BYTES: dict[str, str] = {
    name: kept for kept, names in _BY_WHAT_IS_KEPT.items() for name in names.split()
}
"""Operations without products that are counted by their bytes, and what is kept of each."""


GROUPED = ("_grouped_mm", "grouped_mm_fallback")
"""Products of sorted rows with the matrices of all experts: PyTorch's, and what transformers calls
where PyTorch's has no kernel for the data type."""

_FACTORS = ("mul", "div")
_RESULTS = frozenset({"softmax", "_softmax", *SLOPES_OF_RESULTS})
_OPERANDS = frozenset({"silu", "gelu", "softplus", "log", "sin", "cos", "abs", "square", "pow"})
_VIEWS = frozenset({*PLAIN, "slice", "select", "split", "chunk", "unbind", "detach"})


class KeptBytes(NamedTuple):
    """Bytes for each token, and besides, whatever the number of tokens."""

    each: int
    once: int


def kept_bytes(
    graph: TracedNodes, nodes: Iterable[TracedNode], source: TracedNode, without: set[str]
) -> KeptBytes | None:
    """What autograd keeps of `nodes` between parameters or `source` and their end.

    Tokens are what `source`, [.., width], has before its width. The tensors named in `without` are
    left out. None where sizes are no multiple of the number of tokens.
    """
    active, kept = {source.name}, dict[str, TracedNode]()
    for node in nodes:
        own = {name for name in node.operands() if name in active or _is_weight(graph.of[name])}
        if own and (_is_real(node) or not node.dtype) and operation(node) != "detach":
            active.add(node.name)
        for each in _kept_of(graph, node, own) if own else ():
            base = _base(graph, each)
            kept[base.name] = base
    tokens = _elements(source) / size(source.shape[-1])
    each = once = 0
    for node in kept.values():
        if node.name in without or node.op in ("param", "buffer", "constant", "input"):
            continue
        bytes_ = _elements(node) * (1 if node.dtype == "bool" else int(BYTES.get(node.dtype, 0)))
        if not bytes_.symbols:
            once += bytes_.value({})
            continue
        share = bytes_ / tokens
        if share.symbols:
            return None
        each += share.value({})
    return KeptBytes(each, once)


def _is_weight(node: TracedNode) -> bool:
    return node.op == "param"


def _is_real(node: TracedNode) -> bool:
    return node.dtype in ("fp32", "bf16", "fp16", "fp64")


def _elements(node: TracedNode) -> Size:
    return product(size(extent) for extent in node.shape)


def _base(graph: TracedNodes, node: TracedNode) -> TracedNode:
    """The tensor whose memory a view shows."""
    while operation(node) in _VIEWS:
        source = graph.arg(node, 0)
        if source is None or source.dtype != node.dtype:
            break
        node = source
    return node


def _kept_of(graph: TracedNodes, node: TracedNode, active: set[str]) -> list[TracedNode]:
    """The values that are kept of one operation."""
    if "indices" in AS_BYTES.get(operation(node), ""):
        return _chosen(graph, node)
    return [graph.of[name] for name in _names_of_kept(node, active)]


def _chosen(graph: TracedNodes, node: TracedNode) -> list[TracedNode]:
    """The numbers of what was chosen: the second result, as large as the first."""
    results = [n for n in graph.of.values() if n.op == "getitem" and n.args[0] == Ref(node.name)]
    second = [n for n in results if n.args[1] == 1]
    unread = [replace(n, name=f"{n.name}.indices", op="indices", dtype="int64") for n in results]
    return (second or unread)[:1]


def _names_of_kept(node: TracedNode, active: set[str]) -> list[str]:
    kind, tensors = operation(node), [a.name for a in node.args if isinstance(a, Ref)]
    if kind in _FACTORS:
        pair = tensors[:2]
        if len(pair) < 2:
            return []
        others = [b for a, b in (pair, pair[::-1]) if a in active]
        return [*others, *([pair[0]] if kind == "div" and pair[1] in active else [])]
    if kind in GROUPED:
        return [*node.operands()]
    if kind in _RESULTS:
        return [node.name]
    if kind in _OPERANDS:
        return tensors[:1]
    words = {str(i): name for i, name in enumerate(node.operands())} | {"result": node.name}
    return [words[word] for word in AS_BYTES.get(kind, "").split("&") if word in words]
