"""Records PyTorch modules; the only module of the package that imports torch, and only when used.

`torch.export` runs the forward pass once on tensors without values, with symbols for the sizes that
vary, and keeps the operations as the user's code calls them (attention and norms in one piece).
What depends on shapes alone (positions, masks) is a constant; a mask of attention is computed for a
small size, to see whether it is causal or a window.
"""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.imports.masks import Mask, kind_of_mask
from stagewright.imports.recording import Extent, Recording, Ref, TracedNode, first_of, reachable
from stagewright.imports.saved import CALLED_GRAPHS, load_program


def torch() -> Any:
    """PyTorch, or a UserError that says how to get it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise UserError(
            "importing a module needs PyTorch; run: pip install 'stagewright[torch]'"
        ) from None


def record(
    module: Any, inputs: Sequence[Any] | Mapping[str, Any], *, name: str = "", static: bool = False
) -> Recording:
    """The forward pass of an `nn.Module` on example inputs, positional or by name.

    All dims of inputs vary but those that the module's code fixes, or all are fixed if `static`.
    Raises UserError where the module cannot be traced, with the reason that PyTorch gives.
    """
    pt = torch()
    args = () if isinstance(inputs, Mapping) else tuple(inputs)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    check_examples(pt, module, (*args, *kwargs.values()))
    notes: list[str] = []
    program = None
    kinds = ("batch", "static") if static else ("dynamic", "auto", "batch", "static")
    reasons: list[str] = []
    for kind in kinds:
        try:
            program = export_program(pt, module, args, kwargs, kind)
        except Exception as error:
            reasons.append(error_text(error))
            continue
        if kind in ("batch", "static"):
            but = ", but for their first dims" if kind == "batch" else ""
            why = f": {reasons[0]}" if reasons else ""
            notes.append(f"sizes of inputs are fixed as in the example{but}{why}")
        else:
            notes += note_fixed_dims(pt, program)
        break
    if program is None:
        raise UserError(
            f"cannot trace {type(module).__name__}: {reasons[-1]}{control_flow_hint(reasons[-1])}"
        )
    named = name or type(module).__name__
    return record_program(program, program.state_dict, name=named, notes=notes)


def load(path: str, *, trust: bool = False) -> Recording:
    """The recording of a program that `torch.export.save` has written.

    `trust`: load whatever the file holds, which may run commands of its author.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give what torch.export.save has written")
    pt = torch()
    try:
        with quiet():
            program = load_program(pt, path, trust=trust)
        return _record_saved(program, re.sub(r"\.pt2$", "", path.rpartition("/")[2]))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: no saved torch.export program: {error_text(error)}") from None


def _record_saved(program: Any, name: str) -> Recording:
    notes: list[str] = []
    with_values = {n: t for n, t in program.state_dict.items() if t.device.type != "meta"}
    if len(with_values) < len(program.state_dict):
        notes.append(
            "the program was saved without values (on the meta device), where PyTorch does not "
            "keep which parameters are tied: each counts by itself"
        )
    return record_program(program, with_values, name=name, notes=notes)


def record_program(
    program: Any, tensors: Mapping[str, Any], *, name: str, notes: Sequence[str] = ()
) -> Recording:
    """The recording of an exported program; `tensors` that share memory are tied."""
    with quiet():
        plain = functionalize(program)
    return _Recorder(plain, _tied(tensors), name, list(notes)).recording()


class _Recorder:
    """One pass over the graph of a program."""

    def __init__(self, program: Any, tied: Mapping[str, str], name: str, notes: list[str]) -> None:
        self.pt, self.program, self.name, self.notes = torch(), program, name, notes
        self.nodes: list[TracedNode] = []
        self.constants: set[str] = set()
        self.used: set[str] = set()
        self.names: dict[Any, str] = {}
        """Recorded names of nodes that have another one: those of inlined graphs."""
        self.returned: dict[Any, list[Any]] = {}
        """The nodes that an inlined graph returns."""
        self.masks: dict[str, Mask] = {}
        self.parameters: dict[str, str] = {}
        """The node of each parameter, by the first of its names."""
        self.buffers: dict[str, Any] = {}
        """The values of buffers, by their nodes."""
        self.tied = tied

    def recording(self) -> Recording:
        graph = self.program.graph_module.graph
        leaves = self._leaves()
        for node in graph.nodes:
            if node.op == "placeholder":
                self._leaf(node, *leaves.get(node.name, ("input", node.name)))
            elif node.op == "call_function":
                self._call(node, self.program.graph_module, "")
        returned = [*graph.nodes][-1].args[0]
        made = {
            spec.arg.name
            for spec in self.program.graph_signature.output_specs
            if spec.kind.name == "USER_OUTPUT" and hasattr(spec.arg, "name")
        }
        self._add_note_of_frozen()
        outputs = [self._name(n) for n in _flat(returned) if n.name in made]
        if not any(n.name not in self.constants for n in _flat(returned) if n.name in made):
            raise UserError(
                f"{self.name}: forward returns no tensor that depends on its inputs; wanted a loss "
                "or scores"
            )
        return Recording(self.name, self._needed(outputs), tuple(outputs), tuple(self.notes))

    def _add_note_of_frozen(self) -> None:
        """Add a note on parameters without a gradient, which the run does not know of."""
        tensors = self.program.state_dict
        paths = [n.path for n in self.nodes if n.op == "param" and n.path in tensors]
        frozen = [path for path in paths if not tensors[path].requires_grad]
        if frozen:
            self.notes.append(
                "frozen in the module (requires_grad is false), but here only if the run says so "
                f"with --freeze or --trainable: {first_of(frozen, 3)}"
            )

    def _name(self, node: Any) -> str:
        return self.names.get(node) or str(node.name)

    def _leaves(self) -> dict[str, tuple[str, str]]:
        """Kind of each placeholder, and its name in the module."""
        kinds = {"PARAMETER": "param", "BUFFER": "buffer", "CONSTANT_TENSOR": "buffer"}
        leaves: dict[str, tuple[str, str]] = {}
        for spec in self.program.graph_signature.input_specs:
            kind = kinds.get(spec.kind.name, "input")
            leaves[spec.arg.name] = kind, str(spec.target or spec.arg.name)
        return leaves

    def _leaf(self, node: Any, kind: str, target: str) -> None:
        value = node.meta.get("val")
        if not isinstance(value, self.pt.Tensor):
            self.constants.add(node.name)
            return
        if kind == "buffer":
            self.constants.add(node.name)
            values = {**self.program.constants, **self.program.state_dict}
            self.buffers[node.name] = values.get(target)
        first = self.tied.get(target, target)
        if kind == "param" and first in self.parameters:
            self.names[node] = self.parameters[first]
            return
        self.parameters[first] = node.name
        shape, attrs = shape_of(value), dict[str, Any]()
        if kind == "input" and any(isinstance(n, str) for n in shape):
            attrs = {"example": tuple(int(n.node.hint) if hasattr(n, "node") else int(n)
                                    for n in value.shape)}  # fmt: skip
        self.nodes.append(TracedNode(node.name, kind, shape, dtype_of(value), (), attrs, target))

    def _call(self, node: Any, owner: Any, inside: str) -> None:
        """Record a call, or note that it is a constant; `inside` begins names of inlined nodes."""
        target, name = str(node.target), inside + node.name
        self.names[node] = name
        if target.startswith(("aten._assert", "aten.sym_")):
            self.constants.add(name)
            return
        if "getitem" in target and node.args[0] in self.returned:
            self.names[node] = self._name(self.returned[node.args[0]][node.args[1]])
            return
        operands = [self._name(n) for n in node.all_input_nodes if n.op != "get_attr"]
        value = node.meta.get("val")
        tensor = isinstance(value, self.pt.Tensor)
        if all(n in self.constants for n in operands) and "rand" not in target:
            self.constants.add(name)
            if tensor:
                self.nodes.append(
                    TracedNode(
                        name, "constant", shape_of(value), dtype_of(value), path=path_of(node)
                    )
                )
            return
        graphs = [a for a in node.args if getattr(a, "op", "") == "get_attr"]
        if graphs:
            if target not in CALLED_GRAPHS:
                where = source_of(node) or path_of(node) or self.name
                raise UserError(
                    f"{where}: {target} runs a function that it is given as often, or where, as "
                    "values say, which has no counterpart here; write it out in Python, with "
                    "counts that shapes decide"
                )
            self._inline(node, getattr(owner, graphs[0].target), name)
            return
        target = "getitem" if "getitem" in target else target
        self.nodes.append(
            TracedNode(
                name,
                target,
                shape_of(value) if tensor else (),
                dtype_of(value) if tensor else "",
                tuple(self._argument(a) for a in node.args),
                {k: self._argument(v) for k, v in node.kwargs.items() if k in _KEYWORDS},
                path_of(node),
                source_of(node),
            )
        )
        if "scaled_dot_product_attention" in target:
            self._mask(node)
            return
        if target.split(".")[1:2] in (["add"], ["masked_fill"], ["where"]):
            for operand in node.all_input_nodes:
                self._note_mask(operand, hides="masked_fill" in target)

    def _inline(self, node: Any, inner: Any, name: str) -> None:
        """The calls of a graph that runs under `torch.no_grad` or autocast, in its place."""
        operands = [a for a in node.args if hasattr(a, "op") and a.op != "get_attr"]
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, outer in zip(placeholders, operands, strict=True):
            self.names[placeholder] = self._name(outer)
        for node_inside in inner.graph.nodes:
            if node_inside.op == "call_function":
                self._call(node_inside, inner, f"{name}.")
            elif node_inside.op == "output":
                self.returned[node] = _flat(node_inside.args[0])

    def _argument(self, value: Any) -> Any:
        if hasattr(value, "op") and hasattr(value, "name"):
            example = value.meta.get("val")
            tensor = isinstance(example, self.pt.Tensor | tuple | list)
            return Ref(self._name(value)) if tensor else number_of(example)
        if isinstance(value, list | tuple):
            return tuple(self._argument(each) for each in value)
        if isinstance(value, int | float | str | bool | type(None)):
            return value
        if isinstance(value, self.pt.dtype):
            return str(value).rpartition(".")[2]
        return number_of(value)

    def _mask(self, node: Any) -> None:
        """Add the kind of a constant mask to the call of attention."""
        call_node = self.nodes[-1]
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout", "is_causal"), node.args,
                        strict=False)) | node.kwargs  # fmt: skip
        mask = call.get("attn_mask")
        kind_of_mask = Mask("causal" if call.get("is_causal") else "all")
        if mask is not None and self._name(mask) in self.constants:
            kind_of_mask = self.masks.get(self._name(mask)) or self._kind_of_mask(mask, hides=False)
            self.masks[self._name(mask)] = kind_of_mask
        elif mask is not None:
            kind_of_mask = Mask("given")
        kind = "other" if kind_of_mask.hides else kind_of_mask.kind  # true is what is seen, here
        kwargs = {**call_node.kwargs, "mask": kind, "window": kind_of_mask.window}
        if _copied(node):
            kwargs["copied"] = True
        self.nodes[-1] = replace(call_node, kwargs=kwargs)

    def _note_mask(self, node: Any, *, hides: bool) -> None:
        """Add its kind to a constant [..., n, n], which may mask attention written in parts."""
        name, value = self._name(node), node.meta.get("val")
        if (
            name not in self.constants
            or name in self.masks
            or not isinstance(value, self.pt.Tensor)
        ):
            return
        if value.dim() < 2 or str(value.shape[-1]) != str(value.shape[-2]) or value.shape[-1] == 1:
            return
        self.masks[name] = kind = self._kind_of_mask(node, hides=hides)
        index = next(i for i, n in enumerate(self.nodes) if n.name == name)
        self.nodes[index] = replace(
            self.nodes[index],
            kwargs={"mask": kind.kind, "window": kind.window, "hides": kind.hides},
        )

    def _kind_of_mask(self, mask: Any, *, hides: bool) -> Mask:
        """Kind of a mask; causal, with a note, if it cannot be computed."""
        try:
            return kind_of_mask(self.pt, mask, self.buffers)
        except Exception as error:
            why = f"could not be computed ({error_text(error)}): taken as causal"
            if not any(why in note for note in self.notes):
                self.notes.append(f"the mask of attention in {path_of(mask) or mask.name} {why}")
            return Mask("causal", 0, hides)

    def _needed(self, outputs: Sequence[str]) -> tuple[TracedNode, ...]:
        """The nodes that the outputs depend on, in order, and all inputs and parameters."""
        by_name = {node.name: node for node in self.nodes}
        needed = reachable(outputs, lambda n: by_name[n].operands() if n in by_name else ())
        nodes = [n for n in self.nodes if n.name in needed or n.op in ("param", "input")]
        return tuple(nodes)


def _copied(node: Any) -> bool:
    """True if the result of attention is copied to have positions before heads.

    PyTorch's kernels leave it in the order in which queries lie (`empty_like`); a `reshape` of what
    lies with heads before positions copies.
    """
    given = node.args[0].meta["val"].stride()
    strides = [getattr(getattr(n, "node", None), "hint", n) for n in given]
    if len(strides) < 4 or strides[-3] <= strides[-2]:
        return False
    while len(node.users) == 1:
        (node,) = node.users
        name = str(node.target).split(".")[1:2]
        if name in (["reshape"], ["contiguous"], ["flatten"], ["clone"]):
            return True
        if name not in (["transpose"], ["permute"], ["view"], ["slice"], ["alias"]):
            return False
    return False


_KEYWORDS = frozenset({"scale", "is_causal", "enable_gqa", "dtype", "attn_mask", "dropout_p",
                       "alpha", "approximate", "rounding_mode", "offs", "reduction"})  # fmt: skip
"""Keywords of calls that say what is computed; the others say where."""


def _tied(tensors: Mapping[str, Any]) -> dict[str, str]:
    """By name of a parameter, the first name of the same tensor."""
    first: dict[Any, str] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)
        names[name] = first.setdefault(key, name)
    return names


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [n for each in value for n in _flat(each)]
    if isinstance(value, dict):
        return [n for each in value.values() for n in _flat(each)]
    return [value] if hasattr(value, "name") else []


def functionalize(program: Any) -> Any:
    """Rewrite operations in place: `y[..., :8].add_(z)` becomes a new value of y.

    PyTorch's own functionalization, which no other decomposition accompanies: attention and norms
    stay in one piece. A program without such operations stays as it is. Counters of steps, which
    batch norm keeps, are no operation of the model.
    """
    if not any(map(_writes, _calls(program.graph_module))):
        return program
    return program.run_decompositions({})


def _calls(graph_module: Any) -> Iterator[Any]:
    """The calls of a graph and of the graphs that it calls."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            yield node
        elif node.op == "get_attr" and hasattr(getattr(graph_module, node.target, None), "graph"):
            yield from _calls(getattr(graph_module, node.target))


def _writes(node: Any) -> bool:
    """True if a call writes to a tensor in place, other than a counter of batch norm."""
    if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    changed = node.args[0] if node.args else None
    shape = getattr(getattr(changed, "meta", {}).get("val"), "shape", None)
    counter = getattr(changed, "op", "") == "placeholder" and shape is not None and not len(shape)
    return not counter


def check_examples(pt: Any, module: Any, values: Sequence[Any]) -> None:
    """Refuse an example of one sequence: PyTorch takes a size of 1 for no size that varies."""
    first = next((v for v in values if isinstance(v, pt.Tensor) and v.dim()), None)
    if first is not None and first.shape[0] < 2:
        raise UserError(
            f"the first input of {type(module).__name__} is {list(first.shape)}, whose first dim "
            "is the batch: tracing would fix a size of 1; give an example with a batch of 2 or more"
        )


def note_fixed_dims(pt: Any, program: Any) -> list[str]:
    """A note on dims of inputs that the module's code fixes, or that are 1 in the example."""
    inputs = {
        s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"
    }
    fixed = [
        f"dim {i} of {node.name} is {n}"
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs
        if isinstance(node.meta.get("val"), pt.Tensor)
        for i, n in enumerate(shape_of(node.meta["val"]))
        if isinstance(n, int)
    ]
    if not fixed:
        return []
    return [f"fixed as in the example, by the module's code or for being 1: {', '.join(fixed)}"]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence logs and warnings of PyTorch; its errors become one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def export_program(
    pt: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str
) -> Any:
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
    # PyTorch prints the graph so far, and logs, if it fails.
    ignored = io.StringIO()
    with contextlib.redirect_stdout(ignored), contextlib.redirect_stderr(ignored), quiet():
        return pt.export.export(module, args, kwargs or None, dynamic_shapes=shapes, strict=False)


def error_text(error: BaseException) -> str:
    """First line of an error of PyTorch, after the user's line that it names or passed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    mentioned = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    traceback_lines = [
        (f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)
    ]
    standard = sysconfig.get_paths()["stdlib"]
    outside = [p for p in traceback_lines if "/stagewright/" not in p[0]
              and ("site-packages" in p[0] or not p[0].startswith(standard))]  # fmt: skip
    line_of_user = user_line(mentioned) or user_line(outside)
    first = (lines[0] if lines else type(error).__name__)[:300]
    return f"{line_of_user}: {first}" if line_of_user else first


def control_flow_hint(why: str) -> str:
    """Addition to an error that control flow on values causes; else empty."""
    words = ("data-dependent", "dependent expression", "unbacked", "Could not guard")
    decides = any(word in why for word in words)
    return "; control flow that depends on values of tensors cannot be recorded" if decides else ""


def user_line(places: Sequence[tuple[str, str]]) -> str:
    """The innermost line outside PyTorch, as `file.py:12`."""
    own = [(file, line) for file, line in places if "/torch/" not in file and file[0] != "<"]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def number_of(value: Any) -> Any:
    """A number, or the text of an expression in symbols."""
    node = getattr(value, "node", None)
    expr = getattr(node, "expr", value)
    try:
        return int(expr) if float(expr) == int(expr) else float(expr)
    except (TypeError, ValueError, OverflowError):
        return str(expr)


def shape_of(value: Any) -> tuple[Extent, ...]:
    """The dims of a tensor: numbers, or expressions in symbols."""
    return tuple(number_of(dim) for dim in value.shape)


_SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64",
          "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}  # fmt: skip


def dtype_of(value: Any) -> str:
    """The short name of a tensor's data type."""
    name = str(value.dtype).rpartition(".")[2]
    return _SHORT.get(name, name)


def path_of(node: Any) -> str:
    """The module that made a node; empty where that is not known."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_") else path


def source_of(node: Any) -> str:
    """The innermost line of the user's code, as `file.py:12`."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return user_line(lines)
