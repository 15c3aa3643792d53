"""The table from operations of PyTorch to ops of Stagewright.

A row is a function that says what one recorded node is: `ROWS["aten.linear"]` for all overloads of
`aten.linear`. Element-wise operations that compute a function of ours have it in `FUNCTIONS`; those
of `AS_BYTES` are counted by the bytes that they read and write, which costs no product.
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.imports.rows import elements, layers, products, shapes
from stagewright.imports.rows.translation import Row, Translation
from stagewright.imports.trace.nodes import TracedNodes

FUNCTIONS: dict[str, str] = {
    "gelu": "gelu", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
    "softplus": "softplus", "exp": "exp", "rsqrt": "rsqrt", "sqrt": "sqrt", "log": "log",
    "sin": "sin", "cos": "cos", "abs": "abs", "square": "square", "reciprocal": "reciprocal",
    "erf": "erf",
}  # fmt: skip
"""Operations of one value, and the function of our op `act`."""

_BY_WHAT_IS_KEPT: dict[str, str] = {
    "nothing": (
        "cumsum roll flip tril triu pad constant_pad_nd repeat repeat_interleave "
        "upsample_nearest1d upsample_nearest2d upsample_bilinear2d unfold unfold_copy diff "
        "slice_scatter copy lerp remainder pixel_shuffle pixel_unshuffle channel_shuffle "
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
    "1": "masked_fill scatter scatter_add index index_put index_select _unsafe_index",
    "0&1": (
        "gather maximum minimum prelu smooth_l1_loss huber_loss mse_loss kl_div "
        "binary_cross_entropy binary_cross_entropy_with_logits logaddexp grid_sampler"
    ),
    "1&2": "index_add addcmul addcdiv",
    "result": "log_softmax pairwise_distance",
    "0&result": "amax amin norm logsumexp std prod normalize cosine_similarity",
    "0&1&result": "dist",
}
"""What autograd keeps for backward: operands by number, the result, or the numbers of what was
chosen (derivatives.yaml of PyTorch 2.13; `tests/slow/test_torch_table.py` asks PyTorch)."""

AS_BYTES: dict[str, str] = {
    name: kept for kept, names in _BY_WHAT_IS_KEPT.items() for name in names.split()
}
"""Operations without products that are counted by their bytes, and what is kept of each."""


ROWS: dict[str, Row] = {
    # Products.
    "aten.linear": products.linear,
    "aten.addmm": products.addmm,
    "aten.mm": products.matmul,
    "aten.bmm": products.matmul,
    "aten.matmul": products.matmul,
    "aten.mv": products.matmul,
    "aten.dot": products.matmul,
    "aten.baddbmm": products.baddbmm,
    "aten.einsum": products.einsum,
    **dict.fromkeys(
        ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv_transpose1d",
         "aten.conv_transpose2d"), products.convolution),
    # Attention, norms, tables, losses.
    "aten.scaled_dot_product_attention": layers.attention,
    "aten.layer_norm": layers.layer_norm,
    "aten.rms_norm": layers.layer_norm,
    "aten.group_norm": layers.group_norm,
    "aten.embedding": layers.embedding,
    "aten.softmax": layers.softmax,
    "aten._softmax": layers.softmax,
    "aten.cross_entropy_loss": layers.cross_entropy,
    "our.norm": layers.norm,
    "our.rope": layers.rope,
    "our.act": elements.act,
    "our.glu": elements.glu,
    "our.experts": layers.experts,
    # Element-wise.
    "aten.add": elements.sum,
    "aten.sub": elements.difference,
    "aten.rsub": lambda t, node: elements.difference(t, replace(node, args=node.args[1::-1])),
    "aten.mul": elements.product,
    "aten.div": elements.quotient,
    "aten.true_divide": elements.quotient,
    "aten.pow": elements.power,
    "aten.neg": elements.negative,
    "aten.gelu": elements.gelu,
    "aten.to": elements.cast,
    "aten._to_copy": elements.cast,
    "aten.type_as": elements.cast,
    "aten.dropout": elements.dropout,
    # Sums.
    "aten.mean": elements.mean,
    "aten.sum": elements.total,
    # Changes of shape.
    "getitem": shapes.getitem,
    **dict.fromkeys(
        ("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten._unsafe_view",
         "aten.unsqueeze", "aten.squeeze"), shapes.reshape),
    "aten.transpose": shapes.transpose,
    "aten.t": shapes.transpose,
    "aten.numpy_T": shapes.transpose,
    "aten.permute": shapes.permute,
    "aten.expand": shapes.expand,
    "aten.expand_as": shapes.expand,
    **dict.fromkeys(
        ("aten.contiguous", "aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy"),
        shapes.same),
    "aten.slice": shapes.slice,
    "aten.narrow": lambda t, node: shapes.slice(t, node),
    "aten.select": shapes.select,
    "aten.cat": shapes.cat,
    "aten.concat": shapes.cat,
    "aten.stack": shapes.stack,
    **dict.fromkeys(shapes.PIECES, shapes.pieces),
}  # fmt: skip
"""By operation, without its overload, what it is in ops of the table."""


def calls_of(nodes: TracedNodes, *, approximate: bool) -> Translation:
    """The calls of a recording's nodes; `approximate` counts operations without a row by bytes."""
    made = Translation(nodes, ROWS, FUNCTIONS, AS_BYTES, approximate=approximate)
    made.run()
    return made
