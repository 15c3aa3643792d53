"""Settings of recomputation, of offload, and of memory besides tensors."""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import (
    BYTES,
    NO_BACKWARD,
    Bytes,
    Count,
    Share,
    Switch,
    Text,
    of_training,
    setting,
)

Module = Literal[
    "core_attn", "norm", "activation", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts"
]


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """Recomputation and offload."""

    recompute: Literal["none", "selective", "full"] = of_training(
        "none", "Activations that the backward pass recomputes.", elsewhere=NO_BACKWARD
    )
    recompute_modules: tuple[Module, ...] = of_training(
        ("core_attn",),
        "With recompute=selective: modules that are recomputed.",
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("selective",)},
        metavar="LIST",
    )
    """`activation`: all activation functions of MLPs, `moe_act`: those of routed experts;
    `mla_up_proj`: from the latents of attention to queries, keys and values. `lower.blocks.MODULES`
    says what each holds."""
    recompute_num_layers: Count | None = of_training(
        None,
        "With recompute=full: number of layers of each virtual stage that are "
        "recomputed, the first ones.",
        unset="all",
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
    )
    recompute_save: (
        tuple[Literal["qkv_proj", "context", "out_proj", "mlpwi", "mlpwo"], ...] | None
    ) = of_training(
        None,
        "With recompute=full: results that are saved for backward, by MaxText's names.",
        unset="none",
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
        metavar="LIST",
    )
    """`qkv_proj`: what attention reads; `context`: its result; `out_proj`: its output projection's;
    `mlpwi`: the first products' of the MLP or the experts; `mlpwo`: the last one's."""
    recompute_save_on_host: Switch = of_training(
        False,
        "Hold the results of recompute-save in host memory.",
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
    )
    cpu_offloading_num_layers: Count | None = setting(
        None,
        "Layers of each virtual stage that hold activations in host memory, the first ones.",
        unset="none",
    )
    optimizer_cpu_offload: Switch = setting(
        False, "Hold optimizer states in host memory, and update on the host."
    )
    optimizer_offload_fraction: Share | None = setting(
        None,
        "With optimizer_cpu_offload: share of each stage's blocks that are offloaded.",
        unset="1",
        needs={"optimizer_cpu_offload": (True,)},
    )
    memory_allowance: Text | Bytes | None = setting(
        None,
        "Bytes a rank holds besides tensors (context, workspaces, fragmentation), such as 2GiB.",
        unit=BYTES,
        unset="none",
        metavar="SIZE",
    )
    """The peak of memory counts tensors; the allowance stands beside the peak, and both together
    are compared with the memory of a device."""
    device_memory: Text | Bytes | None = setting(
        None,
        "Bytes a rank may use, such as 80e9 or 80GiB. In inference, also shows the "
        "number of requests that fit.",
        unit=BYTES,
        unset="the hardware's",
        metavar="SIZE",
    )
