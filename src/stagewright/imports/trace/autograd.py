"""What autograd keeps of an operation that no table has: PyTorch is asked."""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import Any


def kept_of(pt: Any, node: Any) -> str | None:
    """What backward reads of a call of an FX graph, in the words of the table: `0&result`.

    The operation runs on tensors without values (the meta device), its gradient as its author has
    registered it. None where the operation cannot run so.
    """
    tensors: dict[Any, Any] = {}

    def given(value: Any) -> Any:
        if hasattr(value, "meta") and hasattr(value, "op"):
            shown = value.meta.get("val")
            if isinstance(shown, pt.Tensor):
                return tensors.setdefault(value, _without_values(pt, shown))
            return _number(shown)
        if isinstance(value, list | tuple):
            return type(value)(given(each) for each in value)
        return value

    kept: list[Any] = []

    def pack(tensor: Any) -> Any:
        kept.append(tensor)
        return tensor

    try:
        args = [given(each) for each in node.args]
        kwargs = {name: given(each) for name, each in node.kwargs.items()}
        hooks = pt.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with pt.enable_grad(), hooks:
            made = node.target(*args, **kwargs)
    except Exception:
        return None
    results = [x for x in pt.utils._pytree.tree_leaves(made) if isinstance(x, pt.Tensor)]
    if not any(x.requires_grad for x in results):
        return None
    names = {_storage(x): str(i) for i, x in enumerate(tensors.values())}
    names |= {_storage(x): "result" for x in results[:1]}
    words = dict.fromkeys(names[_storage(x)] for x in kept if _storage(x) in names)
    return "&".join(sorted(words)) or "nothing"


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _without_values(pt: Any, like: Any) -> Any:
    shape = [_number(n) for n in like.shape]
    return pt.empty(shape, dtype=like.dtype, device="meta", requires_grad=like.is_floating_point())


def _number(value: Any) -> Any:
    """A size as it is in the example, where it varies."""
    return getattr(getattr(value, "node", None), "hint", value)
