"""Example inputs: which of their dims vary."""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.imports.trace.read import shape_of


def check_examples(pt: Any, module: Any, values: Sequence[Any]) -> None:
    """Refuse an example of one sequence: PyTorch takes a size of 1 for no size that varies."""
    first = next((v for v in values if isinstance(v, pt.Tensor) and v.dim()), None)
    if first is not None and first.shape[0] < 2:
        raise UserError(
            f"the first input of {type(module).__name__} is {list(first.shape)}, whose first dim "
            "is the batch: tracing would fix a size of 1; give an example with a batch of 2 or more"
        )


def fixed_dims(pt: Any, program: Any) -> list[str]:
    """A note on dims of inputs that the module's code fixes, or that are 1 in the example."""
    own = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"}
    shown: list[str] = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in own and isinstance(value, pt.Tensor):
            fixed = [f"dim {i} of {node.name} is {n}" for i, n in enumerate(shape_of(value))
                     if isinstance(n, int)]  # fmt: skip
            shown += fixed
    if not shown:
        return []
    return [f"fixed as in the example, by the module's code or for being 1: {', '.join(shown)}"]
