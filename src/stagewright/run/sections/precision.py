"""Data types, kernels and the optimizer."""

from dataclasses import dataclass
from typing import Any, Literal

from stagewright.run.sections.declare import Share, Switch, of_training, setting

_USUAL_MOMENTS = "params_dtype, else fp32"
_MOMENT: dict[str, Any] = {
    "elsewhere": "there is no optimizer",
    "needs": {"optimizer": ("adamw",), "zero": (1, 2, 3)},
}


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Settings of data types and kernels."""

    precision: Literal["bf16", "fp32", "fp8", "nvfp4", "int8"] = setting(
        "bf16",
        "Data type of the computation; fp8, nvfp4 and int8 apply to the layers' matrix products.",
        of_requests=True,
    )
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] | None = (
        of_training(
            None,
            "Scaling of fp8 operands, which decides what their casts read and write.",
            elsewhere="weights have a precision of their own",
            unset="delayed, as in Megatron-LM",
            needs={"precision": ("fp8",)},
        )
    )
    fp8_dot_product_attention: Switch = of_training(
        False,
        "Compute fused attention in fp8.",
        elsewhere="the cache has a precision of its own",
        needs={"precision": ("fp8",), "flash_attention": (True,)},
    )
    """Megatron-LM's `TransformerConfig` has this name; Transformer Engine's `fp8_dpa`."""
    optimizer: Literal["adamw", "sgd"] = of_training(
        "adamw", "Optimizer.", elsewhere="there is no optimizer"
    )
    sgd_momentum: Share = of_training(
        0.9,
        "With optimizer=sgd: momentum, a state of each parameter; 0: no state.",
        elsewhere="there is no optimizer",
        needs={"optimizer": ("sgd",)},
        habits={"torchtitan": 0.0},
    )
    """Megatron-LM's `--sgd-momentum` is 0.9, `momentum` of torch.optim.SGD is 0."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp8"] | None = of_training(
        None, "Data type of AdamW's average of gradients.", unset=_USUAL_MOMENTS, **_MOMENT
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] | None = of_training(
        None, "Data type of AdamW's average of squared gradients.", unset=_USUAL_MOMENTS, **_MOMENT
    )
    """Both are options of Megatron-LM's precision-aware optimizer (`--exp-avg-dtype`,
    `--exp-avg-sq-dtype`), which asks for AdamW and the distributed optimizer (`OptimizerConfig` in
    megatron/core/optimizer/optimizer_config.py). What is held is counted: fp8 without its one scale
    per tensor, and without the copies in fp32 that Transformer Engine's FusedAdam makes while it
    updates."""
    flash_attention: Switch = of_training(
        True, "Compute attention as one kernel.", elsewhere="attention over a cache is one kernel"
    )
    fuse: Switch = setting(
        True,
        "Run consecutive element-wise operations as one kernel.",
        habits={"torchtitan": False},
        of_requests=True,
    )
    dropout: Switch = of_training(
        True, "Dropout as in the model's family; off: no dropout.", elsewhere="there is none"
    )
    clip_grad: Switch = of_training(
        True, "Clip gradients by their global norm.", elsewhere="there are no gradients"
    )
