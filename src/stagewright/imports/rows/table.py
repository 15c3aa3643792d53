"""The table from operations of PyTorch to ops of Stagewright.

A row is a function that says what one recorded node is: `ROWS["aten.linear"]` for all overloads of
`aten.linear`. Element-wise operations that compute a function of ours have it in `FUNCTIONS`; those
of `AS_BYTES` are counted by the bytes that they read and write, which costs no product.
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.imports.rows import elements, layers, products, shapes
from stagewright.imports.rows.translation import Row, Translation
from stagewright.imports.trace.kept import AS_BYTES
from stagewright.imports.trace.nodes import TracedNodes

FUNCTIONS: dict[str, str] = {
    "gelu": "gelu", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
    "softplus": "softplus", "exp": "exp", "rsqrt": "rsqrt", "sqrt": "sqrt", "log": "log",
    "sin": "sin", "cos": "cos", "abs": "abs", "square": "square", "reciprocal": "reciprocal",
    "erf": "erf",
}  # fmt: skip
"""Operations of one value, and the function of our op `act`."""


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
