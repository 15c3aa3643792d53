"""The machine that a step runs on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import Count, Factor, Text, Weight, setting

Topology = Literal["two_tier", "fullflat"]
Algorithm = Literal["best", "ring", "tree", "hierarchical", "direct", "in_network"]


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """Hardware by name, how much of it, and how its GPUs are connected."""

    hardware: Text | None = setting(
        None,
        "GPU by name (see `stagewright hardware`), or a .yaml file.",
        metavar="NAME",
    )
    nodes: Count | None = setting(None, "Number of nodes; without dp, dp fills them.")
    gpus: Count | None = setting(None, "Number of GPUs; without dp, dp fills them.")
    topology: Topology = setting(
        "two_tier", "Network: two tiers, or one in which node links join all GPUs (fullflat)."
    )
    algorithm: Algorithm = setting("best", "Algorithm of collectives.")
    price: Weight | None = setting(
        None, "USD per GPU-hour.", unset="the hardware's", metavar="USD", unit="USD per GPU-hour"
    )
    costs: Text | None = setting(
        None,
        "YAML file of the costs of owning GPUs, network and power.",
        unset="rented at --price",
        metavar="FILE",
    )
    """Gives the price of a GPU-hour: `time.ownership.Ownership` has the keys."""
    stragglers: Mapping[int, Factor] | None = setting(
        None,
        "Slow rank: its kernels take F times as long; may be repeated.",
        names=("straggler",),
        metavar="RANK=F",
    )
    durations: Text | None = setting(
        None,
        "CSV of measured kernels and collectives (see show --kernels).",
        unset="none",
        metavar="FILE",
    )
