"""What `torch.export` makes of a module and its example inputs, and which of their dims vary."""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import io
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Generator, Sequence
from typing import Any

from stagewright.errors import UserError
from stagewright.imports.trace.read import own_line, shape_of


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


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Let nothing be logged, nor warned of: what PyTorch raises is told in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def exported(pt: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
    """The program that `torch.export` makes of a module."""
    dynamic = pt.export.Dim.DYNAMIC
    dim = {"dynamic": dynamic, "batch": dynamic, "auto": pt.export.Dim.AUTO}.get(kind)

    def sizes(value: Any) -> Any:
        if isinstance(value, pt.Tensor):
            return {
                i: dim for i, n in enumerate(value.shape[: 1 if kind == "batch" else None]) if n > 1
            }
        if isinstance(value, list | tuple):
            return type(value)(sizes(each) for each in value)
        return {k: sizes(v) for k, v in value.items()} if isinstance(value, dict) else None

    shapes = None if dim is None else (*map(sizes, args), *map(sizes, kwargs.values()))
    if kwargs and shapes is not None:
        shapes = {key: sizes(value) for key, value in kwargs.items()}
    # PyTorch prints the graph so far, and logs, where it cannot go on.
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), quiet():
        return pt.export.export(module, args, kwargs or None, dynamic_shapes=shapes, strict=False)


def reason(error: BaseException) -> str:
    """The first sentence of an error of PyTorch, and the user's line that it names or passed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    passed = [(f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)]
    standard = sysconfig.get_paths()["stdlib"]
    others = [p for p in passed if "/stagewright/" not in p[0]
              and ("site-packages" in p[0] or not p[0].startswith(standard))]  # fmt: skip
    where = own_line(named) or own_line(others)
    first = (lines[0] if lines else type(error).__name__)[:300]
    return f"{where}: {first}" if where else first


def hint(why: str) -> str:
    """What else to say of a reason: whether it is control flow that depends on values."""
    words = ("data-dependent", "dependent expression", "unbacked", "Could not guard")
    decides = any(word in why for word in words)
    return "; control flow that depends on values of tensors cannot be recorded" if decides else ""
