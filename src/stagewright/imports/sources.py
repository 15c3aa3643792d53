"""Sources of an import: a module, a Python file that makes one, a saved program, a recording, or a
config.json of Hugging Face."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from stagewright.blocks.text import stg
from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.imports.rank_graph import is_graph_of_rank, record_graph
from stagewright.imports.record import load, record, torch
from stagewright.imports.recording import Recording
from stagewright.imports.translate import Translated, translate
from stagewright.model.config import ModelConfig

Dims = Mapping[str, Sequence[str]]

MAX_RECORDING_BYTES = 1 << 28
"""Size limit of recordings: a layer of a language model takes some 10,000 bytes."""


def from_torch(
    module_or_factory: Any,
    example_inputs: Any = None,
    *,
    dims: Dims | None = None,
    name: str = "",
    static: bool = False,
    approximate: bool = False,
    loss: bool | None = None,
) -> ModelConfig:
    """The model of a PyTorch module. No weight is read: the module may be on the meta device.

    `module_or_factory` is an `nn.Module`, or a function that returns one with its example inputs.
    `example_inputs` are a tensor, a tuple of tensors, or a mapping by the names of `forward`;
    `dims` names the dims of inputs, as in `{"input_ids": ("B", "S")}`. The text of the model, as in
    a `.stg` file, is `model.modules[0].text`.

    `static` keeps all sizes of the inputs but the batch as they are in the example. `approximate`
    counts operations without a row in the table by their bytes; without it they raise an error.
    `loss` adds the cross-entropy of the output (None: if the output is a product with a parameter).
    Raises UserError if the module cannot be traced or has an operation that cannot be written as
    text.
    """
    if is_graph_of_rank(module_or_factory):
        raise UserError(
            "this is the graph of one rank, with collectives, and not a whole model; "
            "stagewright import file.py:factory -o rank.bundle reads it"
        )
    result: Any = module_or_factory
    if not hasattr(result, "forward"):
        if not callable(result):
            raise UserError(f"got {type(result).__name__}, wanted an nn.Module or a function")
        result = result()
    module, inputs = _module_and_inputs(result, example_inputs)
    recording = record(module, inputs, name=name, static=static)
    translated = translate(recording, dims, approximate=approximate, loss=loss)
    return model_of(translated, recording.name)


def model_of(translated: Translated, name: str) -> ModelConfig:
    """The model that a text describes, with the notes of its import."""
    model = stg.parse(translated.text, f"{name}.stg").model
    return replace(model, notes=(*model.notes, *translated.notes))


def recorded(source: str, *, static: bool = False, trust: bool = False) -> Recording:
    """The recording of `file.py:factory`, of a saved program (`.pt2`) or in a file (`.json`).

    `trust`: load a saved program whatever it holds, which may run commands of its author.
    """
    if source.startswith(HF):
        return record_config(source.removeprefix(HF), static=static)
    path, colon, factory = source.rpartition(":")
    if source.endswith(".pt2"):
        return load(source, trust=trust)
    if source.endswith(".json"):
        text = read_text(source, "a recording of a module", MAX_RECORDING_BYTES)
        return Recording.from_json(text, source)
    if not colon or not path.endswith(".py"):
        raise UserError(
            f"cannot import {source!r}; wanted file.py:factory, where the function factory returns "
            "a module and its example inputs, a program saved as .pt2, a recording as .json, or "
            "hf:path/to/config.json"
        )
    torch()
    result = _run_factory(path, factory)
    graph, *mesh = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
    if is_graph_of_rank(graph):
        return record_graph(graph, *mesh[:1], name=factory)
    module, inputs = _module_and_inputs(result, None)
    return record(module, inputs, name=factory, static=static)


def _module_and_inputs(result: Any, inputs: Any) -> tuple[Any, Any]:
    """Module and example inputs of a module, or of what a factory returned."""
    is_pair = isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2
    module: Any = result
    if is_pair:
        module, inputs = result
    if not hasattr(module, "forward"):
        raise UserError(
            f"the factory returned {type(module).__name__}, wanted a module and its example inputs"
        )
    if inputs is None:
        names = ", ".join(inspect.signature(module.forward).parameters)
        raise UserError(f"no example inputs; wanted tensors for {names or 'forward'}")
    if isinstance(inputs, Mapping | tuple | list):
        return module, inputs if isinstance(inputs, Mapping) else tuple(inputs)
    return module, (inputs,)


def _run_factory(path: str, name: str) -> Any:
    """Run a function of a user's Python file, which may import files of its folder."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        return _load_function(path, name)()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: {name}() raises {_error_in_a_line(error, path)}") from None
    finally:
        sys.path.remove(folder)


def _error_in_a_line(error: BaseException, path: str) -> str:
    """Error of a user's code in one line, with the line of the file that it passed."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}{where}"


def _load_function(path: str, name: str) -> Any:
    """A function of a user's Python file."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give a Python file and a function: {path}:{name}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: cannot be imported: {_error_in_a_line(error, path)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"{path} has no function {name!r}; wanted one that returns a module and inputs"
        )
    return function


HF = "hf:"
"""Begins the source of an import that is a config.json."""

_CODE_KEYS = ("auto_map", "attn_implementation", "_attn_implementation")
"""Keys of a config.json that name code to load: classes of a repository, kernels of the hub."""


def record_config(path: str, *, static: bool = False) -> Recording:
    """The forward pass of the model of a config.json, or of the directory that holds one.

    The class is that of `architectures`, else a causal language model; it reads token ids.
    """
    pt = torch()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    text = read_text(file, "a config.json or its directory")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UserError("--via torch needs transformers; run: pip install transformers") from None
    try:
        values: Any = json.loads(text)
        config = transformers.AutoConfig.for_model(
            **{key: value for key, value in values.items() if key not in _CODE_KEYS}
        )
        names: list[str] = values.get("architectures") or []
        model_class: Any = getattr(transformers, names[0], None) if names else None
        is_model = isinstance(model_class, type) and issubclass(
            model_class, transformers.PreTrainedModel
        )
        with pt.device("meta"):
            module = (
                model_class(config)
                if is_model
                else transformers.AutoModelForCausalLM.from_config(config)
            )
    except Exception as error:
        raise UserError(f"{file}: transformers cannot build it: {str(error)[:200]}") from None
    ids = pt.zeros(2, 64, dtype=pt.long, device="meta")
    inputs = {"input_ids": ids, "use_cache": False}
    return record(_scores(pt, module), inputs, name=file.parent.name, static=static)


def _scores(pt: Any, module: Any) -> Any:
    """A module that yields the scores of a language model, and nothing else of its output."""

    class Scores(pt.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module.eval()

        def forward(self, input_ids: Any, use_cache: Any = False) -> Any:
            return self.model(input_ids=input_ids, use_cache=use_cache).logits

    return Scores()
