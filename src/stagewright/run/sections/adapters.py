"""Settings of what trains: frozen weights, and low-rank adapters."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from stagewright.run.sections.declare import Count, Factor, Switch, Text, of_training, real

Rate = Annotated[float, real(ge=0, lt=1, strict=False)]
_ADAPTER: dict[str, Any] = {"elsewhere": "adapters are merged into the weights"}


@dataclass(frozen=True, kw_only=True)
class AdapterSection:
    """Frozen weights and adapters."""

    trainable: tuple[Text, ...] | None = of_training(
        None,
        "Parameters that train, by name or pattern, such as 'head.*,*norm*'; with "
        "lora_rank, besides adapters.",
        unset="all; with lora_rank the adapters alone",
        elsewhere="nothing trains",
        metavar="LIST",
    )
    freeze: tuple[Text, ...] | None = of_training(
        None,
        "Parameters that do not train, by name or pattern; overrides trainable.",
        unset="none",
        elsewhere="nothing trains",
        metavar="LIST",
    )
    quantize_base: Literal["fp8", "nf4", "nf4-double"] | None = of_training(
        None,
        "Storage of the layers' frozen matrices, dequantized when read (QLoRA).",
        unset="as other parameters",
        elsewhere="use weight_precision",
        metavar="FORMAT",
    )
    """`nf4` is bitsandbytes' `bnb_4bit_quant_type`, `nf4-double` with `bnb_4bit_use_double_quant`;
    the name is torchtune's. With precision=fp8, matrices in fp8 are multiplied as they are stored,
    as with NeMo's `fp8_params`."""
    lora_rank: Count | None = of_training(
        None,
        "Rank of low-rank adapters (LoRA); the weights of the model are frozen.",
        unset="no adapters",
        **_ADAPTER,
    )
    lora_alpha: Factor | None = of_training(
        None, "Scale of adapters: lora_alpha / lora_rank.", unset="lora_rank", **_ADAPTER
    )
    lora_dropout: Rate = of_training(0.0, "Dropout on the input of adapters.", **_ADAPTER)
    lora_target_modules: tuple[Text, ...] = of_training(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "Linear layers with adapters, in names of Megatron-LM or Hugging Face; linear_qkv is one, "
        "q_proj,k_proj,v_proj are three.",
        metavar="LIST",
        **_ADAPTER,
    )
    lora_all_to_all: Switch = of_training(
        False,
        "Row-parallel adapters exchange results by all-to-all instead of all-gather.",
        **_ADAPTER,
    )
    """`a2a_experimental` of Megatron-Bridge's LoRA (src/megatron/bridge/peft/lora.py)."""
