"""The class of Hugging Face's transformers that a config.json names, without weights."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.imports.trace.record import record, torch
from stagewright.imports.trace.recording import Recording

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
        made: Any = importlib.import_module("transformers")
    except ImportError:
        raise UserError("--via torch needs transformers; run: pip install transformers") from None
    try:
        values: Any = json.loads(text)
        config = made.AutoConfig.for_model(
            **{key: value for key, value in values.items() if key not in _CODE_KEYS}
        )
        names: list[str] = values.get("architectures") or []
        built: Any = getattr(made, names[0], None) if names else None
        is_model = isinstance(built, type) and issubclass(built, made.PreTrainedModel)
        with pt.device("meta"):
            module = built(config) if is_model else made.AutoModelForCausalLM.from_config(config)
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
