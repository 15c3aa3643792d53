"""Settings of what trains: frozen weights, and low-rank adapters."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from stagewright.run.sections.declare import (
    TRAINING,
    Count,
    Factor,
    Switch,
    Text,
    real,
    setting,
)

Rate = Annotated[float, real(ge=0, lt=1, strict=False)]
_ADAPTER: dict[str, Any] = {"modes": TRAINING, "elsewhere": "adapters are merged into the weights"}


@dataclass(frozen=True, kw_only=True)
class AdapterSection:
    """Frozen weights and adapters."""

    trainable: tuple[Text, ...] | None = setting(
        None,
        "Parameters that train, by name or pattern, such as 'head.*,*norm*'; with "
        "lora_rank, besides adapters.",
        unset="all; with lora_rank the adapters alone",
        modes=TRAINING,
        elsewhere="nothing trains",
        names=("modules-to-save",),
        metavar="LIST",
    )
    freeze: tuple[Text, ...] | None = setting(
        None,
        "Parameters that do not train, by name or pattern; overrides trainable.",
        unset="none",
        modes=TRAINING,
        elsewhere="nothing trains",
        metavar="LIST",
    )
    quantize_base: Literal["fp8", "nf4", "nf4-double"] | None = setting(
        None,
        "Storage of the layers' frozen matrices, dequantized when read (QLoRA).",
        unset="as other parameters",
        modes=TRAINING,
        elsewhere="use weight_precision",
        metavar="FORMAT",
    )
    """`nf4` is bitsandbytes' `bnb_4bit_quant_type`, `nf4-double` with `bnb_4bit_use_double_quant`;
    the name is torchtune's. With precision=fp8, matrices in fp8 are multiplied as they are stored,
    as with NeMo's `fp8_params`."""
    lora_rank: Count | None = setting(
        None,
        "Rank of low-rank adapters (LoRA); the weights of the model are frozen.",
        unset="no adapters",
        names=("lora-r", "peft-dim"),
        **_ADAPTER,
    )
    lora_alpha: Factor | None = setting(
        None,
        "Scale of adapters: lora_alpha / lora_rank.",
        unset="lora_rank",
        names=("peft-alpha",),
        **_ADAPTER,
    )
    lora_dropout: Rate = setting(
        0.0,
        "Dropout on the input of adapters.",
        names=("peft-dropout",),
        **_ADAPTER,
    )
    lora_target_modules: tuple[Text, ...] = setting(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "Linear layers with adapters, in names of Megatron-LM or Hugging Face; linear_qkv is one, "
        "q_proj,k_proj,v_proj are three.",
        names=("target-modules",),
        metavar="LIST",
        **_ADAPTER,
    )
    lora_all_to_all: Switch = setting(
        False,
        "Row-parallel adapters exchange results by all-to-all instead of all-gather.",
        names=("a2a-experimental",),
        **_ADAPTER,
    )
    """`a2a_experimental` of Megatron-Bridge's LoRA (src/megatron/bridge/peft/lora.py)."""
