"""Settings of recomputation, of offload, and of memory besides tensors."""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import (
    BYTES,
    NO_BACKWARD,
    TRAINING,
    Count,
    Share,
    Switch,
    Text,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """Recomputation and offload."""

    recompute: Literal["none", "selective", "full"] = setting(
        "none",
        "Activations that backward computes again.",
        modes=TRAINING,
        elsewhere=NO_BACKWARD,
        names=("recompute-granularity",),
        switches={"recompute-activations": "selective"},
    )
    recompute_modules: tuple[Literal["core_attn", "norm", "activation"], ...] = setting(
        ("core_attn",),
        "With recompute=selective: the modules that are computed again.",
        modes=TRAINING,
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("selective",)},
        metavar="LIST",
    )
    recompute_num_layers: Count | None = setting(
        None,
        "With recompute=full: the first layers of each virtual stage that are computed again.",
        unset="all",
        modes=TRAINING,
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
    )
    recompute_save: (
        tuple[Literal["qkv_proj", "context", "out_proj", "mlpwi", "mlpwo"], ...] | None
    ) = setting(
        None,
        "With recompute=full: results that are kept all the same, by MaxText's names.",
        unset="none",
        modes=TRAINING,
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
        metavar="LIST",
    )
    """`qkv_proj`: what attention reads; `context`: its result; `out_proj`: its output projection's;
    `mlpwi`: the first products' of the MLP or the experts; `mlpwo`: the last one's."""
    recompute_save_on_host: Switch = setting(
        False,
        "Keep in the host's memory what recompute-save names.",
        modes=TRAINING,
        elsewhere=NO_BACKWARD,
        needs={"recompute": ("full",)},
    )
    cpu_offloading_num_layers: Count | None = setting(
        None,
        "The first layers of each virtual stage that keep activations in the host's memory.",
        unset="none",
    )
    optimizer_cpu_offload: Switch = setting(
        False, "Hold optimizer states on the host, which makes the update."
    )
    optimizer_offload_fraction: Share | None = setting(
        None,
        "With optimizer_cpu_offload: fraction of each stage's blocks whose optimizer states are "
        "offloaded.",
        unset="1",
        needs={"optimizer_cpu_offload": (True,)},
    )
    memory_allowance: Text | Count | None = setting(
        None,
        "Bytes a rank holds besides tensors (context, workspaces, fragmentation), such as 2GiB.",
        unit=BYTES,
        unset="none",
        metavar="SIZE",
    )
    """The peak of memory counts tensors; the allowance stands beside the peak, and both together
    are compared with the memory of a device."""
    device_memory: Text | Count | None = setting(
        None,
        "Bytes a rank may use, such as 80e9 or 80GiB, in place of the hardware's. Inference: the "
        "number of requests that fit is shown.",
        unit=BYTES,
        unset="the hardware's",
        metavar="SIZE",
    )
