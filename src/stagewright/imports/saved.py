"""Reads programs that `torch.export.save` wrote, without running anything that the file holds.

A `.pt2` file is a program. `torch.export.load` unpickles members of the archive, loads compiled
libraries, evaluates the expressions of sizes as Python, and compiles the names of the graph as
source code; each of these runs whatever the author of the file wants. `load_program` reads only
what an import needs (the graph, the parameters and the buffers), tensors with `weights_only=True`,
and refuses a graph with names, sizes or operations that an exported model cannot have.
"""

# torch has partial types: what comes from it is Any here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any, cast

from stagewright.errors import UserError

CALLED_GRAPHS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast", "hints_wrapper",
                           "tag_activation_checkpoint", "invoke_subgraph"})  # fmt: skip
"""Operations that run a graph once, whatever the values are."""

_CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "associative_scan", "map", "map_impl",
                           "flex_attention"})  # fmt: skip
"""Operations that run a graph as values say; the recorder refuses them by name."""

_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le",
     "gt", "ge", "and_", "or_", "not_", "getitem"}
)  # fmt: skip
"""Functions of Python's `operator` that graphs apply to sizes and to results of operations."""

_FILE_OPERATIONS = frozenset({"from_file", "save"})
"""Operations of aten that open a file by name."""

_SIZE_FUNCTIONS = frozenset(
    {"Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Abs", "Mod",
     "floor", "ceiling", "Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan",
     "StrictGreaterThan", "And", "Or", "Not", "FloorDiv", "ModularIndexing", "Where", "PythonMod",
     "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural",
     "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt",
     "RoundDecimal", "ToFloat", "Identity"}
)  # fmt: skip
"""Functions in expressions of sizes, as sympy and torch write them."""

_SIZE_SYNTAX = (
    ast.Expression, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop,
    ast.keyword, ast.Load,
)  # fmt: skip

_SIZE_TEXT = re.compile(r"[A-Za-z0-9_ (),=.+*/<>!%'-]*")
"""Characters of sizes. Without line ends, comments and escapes sympy reads what `ast` reads."""
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
_MAX_EXPONENT = 64

_WORD = re.compile(r"[A-Za-z0-9_.:+-]*")
"""Names of values, parameters, data types and devices: no characters that can form a call."""
_KEPT_METADATA = ("stack_trace", "nn_module_stack")


def load_program(pt: Any, path: str, *, trust: bool) -> Any:
    """The exported program of a file; `trust`: by `torch.export.load`, whatever the file holds.

    Raises UserError for a file that holds more than the graph and tensors of a module, and whatever
    torch raises for one that holds less.
    """
    if trust:
        return pt.export.load(path)
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("serialized_exported_program.json") for name in archive.namelist()):
            raise _untrusted(path, "the archive is of PyTorch 2.7 or older")
    package = importlib.import_module("torch.export.pt2_archive._package")
    serialize = importlib.import_module("torch._export.serde.serialize")
    reader = package.PT2ArchiveReader(path)
    document = json.loads(reader.read_string("models/model.json"))
    _reduce(document)
    for what in _unsafe(document):
        raise _untrusted(path, what)
    _call_by_position(document["graph_module"])
    program = serialize._dict_to_dataclass(serialize.ExportedProgram, document)
    weights = _tensors(pt, package, reader, package.WEIGHTS_DIR, path)
    constants = _tensors(pt, package, reader, package.CONSTANTS_DIR, path)
    return serialize.ExportedProgramDeserializer().deserialize(program, weights, constants)


def _untrusted(path: str, what: str) -> UserError:
    return UserError(
        f"{path}: {what}: loading it could run commands; give --trust if you trust its author"
    )


def _tensors(pt: Any, package: Any, reader: Any, folder: str, path: str) -> dict[str, Any]:
    """The weights or constants of an archive, by name; tensors that shared memory share it here."""
    names: list[str] = reader.get_file_names()

    def unpickled(member: str) -> Any:
        try:
            content = io.BytesIO(reader.archive_file.get_record(member))
            return pt.load(content, weights_only=True, map_location="cpu")
        except Exception:
            raise _untrusted(path, f"{member} holds more than tensors") from None

    if f"{folder}model.pt" in names:  # archives of the first versions with this format
        return dict(unpickled(f"{folder}model.pt"))
    weights = folder == package.WEIGHTS_DIR
    file = package.WEIGHTS_CONFIG_FILENAME_FORMAT if weights else (
        package.CONSTANTS_CONFIG_FILENAME_FORMAT
    )  # fmt: skip
    config = package._load_payload_config(reader, file.format("model"))
    kinds = (package.WEIGHT_FILENAME_PREFIX, package.TENSOR_CONSTANT_FILENAME_PREFIX)
    for name, payload in config.config.items():
        if not payload.path_name.startswith(kinds):
            raise _untrusted(path, f"{name} is an object ({folder}{payload.path_name})")
    raw = package._build_file_map(reader, config, folder)
    tensors: dict[str, Any] = {}
    for name, payload in config.config.items():
        if payload.use_pickle:
            tensor = unpickled(f"{folder}{payload.path_name}")
        else:
            meta = payload.tensor_meta
            tensor = pt.as_strided(
                raw[payload.path_name],
                package.deserialize_size(meta.sizes),
                package.deserialize_stride(meta.strides),
                package.deserialize_storage_offset(meta.storage_offset),
            )
        if payload.is_param and not isinstance(tensor, pt.nn.Parameter):
            trained = bool(payload.tensor_meta and payload.tensor_meta.requires_grad)
            tensor = pt.nn.Parameter(tensor, requires_grad=trained)
        tensors[name] = tensor
    return tensors


# ---- the graph -----------------------------------------------------------------------------------


def _reduce(document: Any) -> None:
    """Drop what an import does not need: guards, calling conventions and most metadata."""
    document["guards_code"] = []
    document["graph_module"] |= {"metadata": {}, "module_call_graph": []}
    for item in _dicts(document):
        metadata = item.get("metadata")
        if "target" in item and isinstance(metadata, dict):
            known = cast("dict[str, Any]", metadata)
            item["metadata"] = {k: known[k] for k in _KEPT_METADATA if k in known}


def _call_by_position(module: Any) -> None:
    """Give a graph a calling convention: all inputs by position, a tuple of all outputs."""
    specs = module["signature"]
    names = [*filter(None, map(_name_of_input, specs["input_specs"]))]
    outputs = sum("user_output" in s for s in specs["output_specs"])
    leaf = {"type": None, "context": None, "children_spec": []}
    positional = _tuple([leaf] * len(names))
    named = {"type": "builtins.dict", "context": "[]", "children_spec": []}
    signature = {
        "inputs": [],
        "outputs": [],
        "in_spec": json.dumps([1, _tuple([positional, named])]),
        "out_spec": json.dumps([1, _tuple([leaf] * outputs)]),
        "forward_arg_names": names,
    }
    module["module_call_graph"] = [{"fqn": "", "signature": signature}]


def _name_of_input(spec: Any) -> str:
    """Name of an input of the user; empty for parameters, buffers and constants."""
    if "constant_input" in spec:
        return str(spec["constant_input"]["name"])
    argument = spec["user_input"]["arg"] if "user_input" in spec else {}
    known = next(iter(argument.values()), {})
    return str(known.get("name") or known.get("as_name") or "")


def _tuple(children: list[Any]) -> dict[str, Any]:
    return {"type": "builtins.tuple", "context": "null", "children_spec": children}


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON document, the outer ones first."""
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield cast("dict[str, Any]", item)
            stack += cast("dict[str, Any]", item).values()
        elif isinstance(item, list):
            stack += cast("list[Any]", item)


def _unsafe(document: Any) -> Iterator[str]:
    """Descriptions of what no exported model has: operations, sizes or names."""
    for item in _dicts(document):
        for key, value in item.items():
            if not _WORD.fullmatch(key):
                yield f"the graph has the name {key[:60]!r}"
            values = cast("list[Any]", value) if isinstance(value, list) else [value]
            for text in values:
                if not isinstance(text, str) or key in (*_KEPT_METADATA, "as_string", "as_strings"):
                    continue
                if key in ("target", "as_operator"):
                    if not _is_operation(text):
                        yield f"the graph calls {text[:60]!r}"
                elif key == "expr_str":
                    if not _is_size(text):
                        yield f"the graph has the size {text[:60]!r}"
                elif not _WORD.fullmatch(text):
                    yield f"the graph has the name {text[:60]!r}"


def _is_operation(target: str) -> bool:
    """True for operations on tensors and sizes that neither read nor write files."""
    match = re.fullmatch(r"torch\.ops\.(aten|prims|higher_order)\.(\w+)(\.\w+)?", target)
    if match:
        library, name, overload = match.groups()
        if library == "higher_order":
            return not overload and name in CALLED_GRAPHS | _CONTROL_FLOW
        return bool(overload) and name not in _FILE_OPERATIONS
    if target.startswith("_operator."):
        return target.removeprefix("_operator.") in _ARITHMETIC
    return re.fullmatch(r"torch\._?sym_\w+|math\.[a-z]\w*", target) is not None


def _is_size(text: str) -> bool:
    """True for sums, products and known functions of numbers and symbols such as `s77`.

    torch writes `Mul(Integer(2), Symbol('s77', positive=True))`, and sympy evaluates it as Python.
    Powers are of symbols, with small exponents: those of numbers may take for ever.
    """
    if not _SIZE_TEXT.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            allowed = name in _SIZE_FUNCTIONS
            if name in _POWERS:
                allowed = len(node.args) == 2 and _is_small_power(*node.args)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            allowed = _is_small_power(node.left, node.right)
        elif isinstance(node, ast.LShift | ast.RShift):
            allowed = False
        elif isinstance(node, ast.Name):
            allowed = re.fullmatch(r"[A-Za-z]\w*", node.id) is not None
        elif isinstance(node, ast.Constant):
            allowed = not isinstance(node.value, str) or _WORD.fullmatch(node.value) is not None
        else:
            allowed = isinstance(node, _SIZE_SYNTAX)
        if not allowed:
            return False
    return True


def _is_small_power(base: ast.expr, exponent: ast.expr) -> bool:
    """True for a power of an expression with symbols, whose exponent is a small number."""
    names = {node.id for node in ast.walk(base) if isinstance(node, ast.Name)}
    if not names - (_SIZE_FUNCTIONS - {"Symbol"}):
        return False
    numbers = [node for node in ast.walk(exponent) if not isinstance(node, ast.Load)]
    plain = (ast.Constant, ast.Call, ast.Name, ast.UnaryOp, ast.USub)
    if not all(isinstance(node, plain) for node in numbers):
        return False
    constants = [node.value for node in numbers if isinstance(node, ast.Constant)]
    return all(isinstance(value, int) and value <= _MAX_EXPONENT for value in constants)
