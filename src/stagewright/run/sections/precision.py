"""Data types, kernels and the optimizer."""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import TRAINING, Switch, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """What is computed in which data type, and by which kernels."""

    precision: Literal["bf16", "fp32", "fp8"] = setting(
        "bf16",
        "Data type of the computation.",
        switches={"bf16": "bf16"},
        of_requests=True,
    )
    optimizer: Literal["adamw", "sgd"] = setting(
        "adamw", "The optimizer.", modes=TRAINING, elsewhere="there is no optimizer"
    )
    flash_attention: Switch = setting(
        True,
        "Compute attention as one kernel.",
        modes=TRAINING,
        elsewhere="attention over a cache is one kernel",
        names=("use-flash-attn",),
    )
    fuse: Switch = setting(
        True,
        "Run consecutive element-wise operations as one kernel.",
        habits={"torchtitan": False},
        of_requests=True,
    )
    dropout: Switch = setting(
        True,
        "Dropout as the model's family trains; off: none anywhere.",
        modes=TRAINING,
        elsewhere="there is none",
    )
    clip_grad: Switch = setting(
        True,
        "Clip gradients by their global norm.",
        modes=TRAINING,
        elsewhere="there are no gradients",
    )
