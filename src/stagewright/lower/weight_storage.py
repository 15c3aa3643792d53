"""Storage formats of a served model's matrices: those of the run, or of its checkpoint."""

from __future__ import annotations

import re

from stagewright.model.config import ModelConfig
from stagewright.model.quantization import Quantization
from stagewright.run.requests import STORED
from stagewright.run.settings import Run
from stagewright.stored import Storage, Stored

SCOPES = ("attention", "mlp", "mixer", "mtp")
"""Scopes of `weight_precision`: all matrices but the output projection and the embedding."""


def storage(run: Run, model: ModelConfig, block: str, layer: int) -> Storage:
    """Storage of the matrices of a block; `layer`: its index, -1 outside the layers.

    By `weight_precision`, or else by the checkpoint (`ModelConfig.quantization`).
    """
    if run.weight_precision is not None:
        stored = STORED[run.weight_precision]
        return tuple((scope, stored) for scope in SCOPES) if stored else ()
    given = checkpoint(run, model)
    if given is None:
        return ()
    if block == "head":
        return given.head
    return given.of_layer(layer if layer >= 0 else model.num_layers - 1)


def checkpoint(run: Run, model: ModelConfig) -> Quantization | None:
    """Quantization of the model if the run uses it, else None."""
    asked = run.mode == "train" or run.weight_precision is not None or run.precision != "bf16"
    return None if asked else model.quantization


def in_blocks(run: Run, model: ModelConfig) -> bool:
    """True if an inference run has fp8 products with block-scaled weights, as DeepSeek-V3's.

    These have separate kernels.
    """
    given = checkpoint(run, model)
    asked = STORED[run.weight_precision] if run.weight_precision else None
    formats = given.formats if given else (asked,) if asked else ()
    return any(x.product == "fp8" and x.rows > 1 and x.columns > 1 for x in formats)


def notes(run: Run, model: ModelConfig) -> list[str]:
    """Notes about quantization in a config.json that a run ignores."""
    given = model.quantization
    if given is None:
        return _unread(run, model)
    if not given.file:
        return []
    if run.mode == "train":
        start = run.params_dtype or ("fp32" if run.precision == "fp32" else "bf16")
        return [
            f"training starts from weights in {start}: the quantization_config ({given.method}) of "
            f"{given.file} counts where the model is served"
        ]
    if run.precision != "bf16":
        return [
            f"precision={run.precision}: the quantization_config ({given.method}) of {given.file} "
            "is passed over"
        ]
    return []


_QUANTIZED = re.compile(
    r"(?<![a-z0-9])(?:(?:nv|mx)fp4|(?:mx)?fp8|fp4|awq|gptq|int[48]|w[48]a(?:4|8|16))(?![a-z0-9])",
    re.IGNORECASE,
)
"""Quantization formats in names of models."""


def _unread(run: Run, model: ModelConfig) -> list[str]:
    """Note about a quantization in the model's name for which no file was read."""
    said = _QUANTIZED.search(model.name)
    if said is None or run.mode == "train" or run.weight_precision is not None:
        return []
    return [
        f"the name {model.name} says {said[0]}, but no quantization is known of the model: weights "
        f"count in {run.precision}; put the checkpoint's hf_quant_config.json beside its "
        "config.json, or use --weight-precision"
    ]


def weight_formats(run: Run, model: ModelConfig) -> list[str]:
    """Data types of the weights of an inference run, most specific first.

    `weight_precision` leaves the embedding and the output projection in that of the computation.
    """
    given = checkpoint(run, model)
    formats: list[str] = []
    if run.weight_precision is not None:
        formats = [run.weight_precision]
    elif given is not None:
        formats = [name(stored) for stored in given.formats]
    return list(dict.fromkeys([*formats, run.precision]))


def name(stored: Stored) -> str:
    """Usual name of a storage format.

    >>> name(Stored("fp4", 8, 1, 32)), name(Stored("int4", 16, 1, 128)), name(Stored("fp8", 32))
    ('mxfp4', 'int4', 'fp8')
    """
    of_16 = stored.values == "fp4" and stored.columns == 16
    of_32 = stored.columns == 32 and stored.scale_bits == 8
    return f"{'nv' if of_16 else 'mx' if of_32 else ''}{stored.values}"


def describe(weights: Storage) -> str:
    """Storage formats by matrix as text, scopes first.

    >>> describe((("mlp", Stored("fp4", 8, 1, 32)), ("w_up", None)))
    'mlp mxfp4, w_up bf16'
    """
    return ", ".join(f"{what} {name(stored) if stored else 'bf16'}" for what, stored in weights)
