"""The machine that a step runs on, and the job that repeats the step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import (
    TRAINING,
    Amount,
    Count,
    Factor,
    Number,
    Seconds,
    Switch,
    Text,
    Weight,
    setting,
)

Topology = Literal["two_tier", "fullflat"]
Algorithm = Literal["best", "ring", "tree", "hierarchical", "direct", "in_network"]


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """Hardware by name, how much of it, and how its GPUs are connected."""

    hardware: Text | None = setting(
        None, "GPU by name (see `stagewright hardware`), or a .yaml file.", metavar="NAME"
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
        None, "Slow rank: its kernels take F times as long; may be repeated.", metavar="RANK=F"
    )
    durations: Text | None = setting(
        None,
        "CSV of measured kernels and collectives (see show --kernels).",
        unset="none",
        metavar="FILE",
    )
    tokens: Amount | None = setting(
        None,
        "Tokens to train on, such as 15T: days, cost and energy of the whole job.",
        modes=TRAINING,
        metavar="TOKENS",
    )
    failures: Weight | None = setting(
        None,
        "Interruptions of the job per 1,000 node-days.",
        unset="no failures",
        modes=TRAINING,
        metavar="RATE",
    )
    checkpoint: Text = setting(
        "auto",
        "Minutes between two checkpoints, or a time such as 30min; auto: the best.",
        modes=TRAINING,
        metavar="TIME",
    )
    storage_gb_s: Factor | None = setting(
        None,
        "Bandwidth of the storage for checkpoints, of all nodes together (GB/s).",
        modes=TRAINING,
        metavar="GB/S",
    )
    detect: Seconds | None = setting(
        None,
        "Time until a failure is detected and its node replaced, such as 60s.",
        modes=TRAINING,
        metavar="TIME",
    )
    restart: Seconds | None = setting(
        None,
        "Time from then until the first step, reading a checkpoint included, such as 5min.",
        modes=TRAINING,
        metavar="TIME",
    )
    async_checkpoint: Switch = setting(
        False,
        "Train on while a checkpoint is stored, after its copy to the memory of the host.",
        modes=TRAINING,
    )
    replica_recovery: Seconds | None = setting(
        None,
        "Replicas of dp fail alone: time for which the others wait, such as 30s.",
        unset="a failure stops all",
        modes=TRAINING,
        metavar="TIME",
    )
    spares: Number | None = setting(
        None, "Spare nodes, which replace nodes in repair.", unset="always enough", modes=TRAINING
    )
    repair: Seconds | None = setting(
        None,
        "Time until a failed node is back, such as 24h; for spares.",
        modes=TRAINING,
        metavar="TIME",
    )
