"""Storage formats of a served model's matrices: those of the run, or of its checkpoint."""

from __future__ import annotations

import re

from stagewright.blocks.recipe import stored_as
from stagewright.model.config import ModelConfig
from stagewright.run.requests import STORED
from stagewright.run.settings import Run
from stagewright.stored import Quantization, Storage, Stored

SCOPES = ("attention", "mlp", "mixer", "mtp")
"""Scopes of `weight_precision`: all matrices but the output projection and the embedding."""


def storage(run: Run, model: ModelConfig, block: str, layer: int) -> Storage:
    """Storage of the matrices of a block; `layer`: its index, -1 outside the layers.

    By `weight_precision`, or else by the checkpoint (`ModelConfig.quantization`).
    """
    if run.weight_precision is not None:
        stored = STORED[run.weight_precision]
        return tuple((scope, stored) for scope in SCOPES) if stored else ()
    quantization = checkpoint(run, model)
    if quantization is None:
        return ()
    if block == "head":
        return quantization.head
    return quantization.of_layer(layer if layer >= 0 else model.num_layers - 1)


def checkpoint(run: Run, model: ModelConfig) -> Quantization | None:
    """Quantization of the model if the run uses it, else None."""
    ignored = run.mode == "train" or run.weight_precision is not None or run.precision != "bf16"
    return None if ignored else model.quantization


def in_blocks(run: Run, model: ModelConfig) -> bool:
    """True if an inference run has fp8 products with block-scaled weights, as DeepSeek-V3's.

    These have separate kernels.
    """
    quantization = checkpoint(run, model)
    stored = STORED[run.weight_precision] if run.weight_precision else None
    formats = quantization.formats if quantization else (stored,) if stored else ()
    return any(x.product == "fp8" and x.rows > 1 and x.columns > 1 for x in formats)


def expert_weights(run: Run, model: ModelConfig) -> str:
    """Storage of experts whose inputs are in the data type of the computation, such as `mxfp4`."""
    if run.mode == "train" or not model.num_experts:
        return ""
    last = storage(run, model, "block", model.num_layers - 1)
    stored = stored_as(last, "we_up", "mlp")
    return name(stored) if stored and not stored.product else ""


_QUANTIZED = re.compile(
    r"(?<![a-z0-9])(?:(?:nv|mx)fp4|(?:mx)?fp8|fp4|awq|gptq|int[48]|w[48]a(?:4|8|16))(?![a-z0-9])",
    re.IGNORECASE,
)
"""Quantization formats in names of models."""


def notes(run: Run, model: ModelConfig) -> list[str]:
    """Notes about a quantization that a run ignores: of a config.json, or of the model's name."""
    quantization = model.quantization
    if quantization is None:
        format_name = _QUANTIZED.search(model.name)
        if format_name is None or run.mode == "train" or run.weight_precision is not None:
            return []
        return [
            f"the name {model.name} says {format_name[0]}, but no quantization is known of the "
            f"model: weights count in {run.precision}; put the checkpoint's hf_quant_config.json "
            "beside its config.json, or use --weight-precision"
        ]
    source = f"the quantization_config ({quantization.method}) of {quantization.file}"
    if quantization.file and run.mode == "train":
        start = run.params_dtype or ("fp32" if run.precision == "fp32" else "bf16")
        return [
            f"training starts from weights in {start}: {source} counts where the model is served"
        ]
    if quantization.file and run.precision != "bf16":
        return [f"precision={run.precision}: {source} is passed over"]
    return []


def weight_formats(run: Run, model: ModelConfig) -> list[str]:
    """Data types of the weights of an inference run, most specific first.

    `weight_precision` leaves the embedding and the output projection in that of the computation.
    """
    quantization = checkpoint(run, model)
    formats: list[str] = []
    if run.weight_precision is not None:
        formats = [run.weight_precision]
    elif quantization is not None:
        formats = [name(stored) for stored in quantization.formats]
    return list(dict.fromkeys([*formats, run.precision]))


def name(stored: Stored) -> str:
    """Usual name of a storage format.

    >>> name(Stored("fp4", 8, 1, 32)), name(Stored("int4", 16, 1, 128)), name(Stored("fp8", 32))
    ('mxfp4', 'int4', 'fp8')
    """
    nvidia = stored.values == "fp4" and stored.columns == 16
    microscaling = stored.columns == 32 and stored.scale_bits == 8
    return f"{'nv' if nvidia else 'mx' if microscaling else ''}{stored.values}"


def describe(weights: Storage) -> str:
    """Storage formats by matrix as text, scopes first.

    >>> describe((("mlp", Stored("fp4", 8, 1, 32)), ("w_up", None)))
    'mlp mxfp4, w_up bf16'
    """
    return ", ".join(f"{scope} {name(stored) if stored else 'bf16'}" for scope, stored in weights)
