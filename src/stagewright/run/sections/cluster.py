"""The machine that a step runs on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import Count, Text, Weight, setting

Topology = Literal["two_tier", "fullflat"]
Algorithm = Literal["best", "ring", "tree", "hierarchical", "direct", "in_network"]


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """Hardware by name, how much of it, and how its GPUs are connected."""

    hardware: Text | None = setting(
        None,
        "GPU by name (see `stagewright hardware`), or a .yaml file of one.",
        metavar="NAME",
    )
    nodes: Count | None = setting(None, "Nodes; without dp, dp fills them.")
    topology: Topology = setting(
        "two_tier", "fullflat: the links within a node join the GPUs of all nodes."
    )
    algorithm: Algorithm = setting("best", "Algorithm of collectives.")
    price: Weight | None = setting(
        None, "USD per GPU-hour.", unset="the hardware's", metavar="USD", unit="USD per GPU-hour"
    )
    costs: Text | None = setting(
        None,
        "YAML file of what GPUs, network and power cost who owns them.",
        unset="rented at --price",
        metavar="FILE",
    )
    """Gives the price of a GPU-hour: `time.ownership.Ownership` has the keys."""
    stragglers: Mapping[int, float] | None = setting(
        None,
        "Kernels of a rank take F times as long; may be repeated.",
        names=("straggler",),
        metavar="RANK=F",
    )
    durations: Text | None = setting(
        None,
        "CSV of measured kernels and collectives (see show --kernels).",
        unset="none",
        metavar="FILE",
    )
