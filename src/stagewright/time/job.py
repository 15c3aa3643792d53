"""A whole job of training: checkpoints, failures and spares, and the time to a number of tokens.

Settings of the machine (`ClusterSection`) say what happens, a simulated step how fast it would go,
and the compiled run how large a checkpoint is. No rate and no time is assumed: published ones are
in docs/guides/goodput.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.errors import UserError
from stagewright.lower.checkpoint import Checkpoint, checkpoint
from stagewright.lower.compiled_run import CompiledRun
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.declare import read_time
from stagewright.time import goodput
from stagewright.time.goodput import DAY, Failures, Saving
from stagewright.time.hardware import Hardware

LEAST_FAILURES = 1e-3
"""Fewest interruptions per 1,000 node-days that are meant."""
MOST_SECONDS = 1e8
"""Longest time of a checkpoint, or between two: three years."""
MOST_SHORTAGE = 0.01
"""Share of time without a machine that `spares_needed` accepts."""


@dataclass(frozen=True, slots=True)
class Spares:
    """Nodes that replace broken ones."""

    spares: int
    in_repair: float
    """Mean number of nodes in repair."""
    shortage: float
    """Share of time in which more nodes are in repair than there are spares: the job waits."""
    spares_needed: int
    """Fewest with which it waits 1% of the time at most."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Useful share of the time of a job, and what takes the rest. Times in seconds."""

    useful_share: float
    """Share of time that computes steps which are kept."""
    nodes: int
    per_1000_node_days: float
    interruption_seconds: float
    """Mean time between two interruptions of the job."""
    detect: float
    """Until a failure is known and its node replaced."""
    restart: float
    """Until the first step."""
    checkpoint: Checkpoint
    saving: Saving | None
    """None where replicas fail alone: no checkpoint is on the path of a recovery."""
    period: float | None
    """Time between the starts of two checkpoints: given, or the best."""
    best_period: float | None
    young: float | None
    daly: float | None
    spares: Spares | None

    @property
    def interruptions_per_day(self) -> float:
        """Mean number of interruptions of the job in a day."""
        return DAY / self.interruption_seconds

    def to_dict(self) -> dict[str, Any]:
        """Entry of JSON: seconds, bytes, shares of 1."""
        values = asdict(self) | {"checkpoint": self.checkpoint.to_dict()}
        return values | {"interruptions_per_day": self.interruptions_per_day}


@dataclass(frozen=True, slots=True)
class Job:
    """Time, cost and energy of training on a number of tokens."""

    tokens: float
    days: float
    days_without_failures: float
    usd: float | None
    """Of all GPUs and spares; None without a price."""
    price: float | None
    """USD per GPU and hour."""
    mwh: float
    """At the mean power of a step, all the time."""


def goodput_of(
    compiled: CompiledRun, cluster: ClusterSection, hardware: Hardware
) -> Goodput | None:
    """Goodput of a run on a cluster; None if the cluster says nothing of failures.

    Raises UserError for what is missing, and for settings that mean nothing without the others.
    """
    check_job(cluster, compiled.run.mode)
    if not cluster.failures:
        return None
    gpus, replicas = compiled.program.mesh.world_size, compiled.run.dp
    return goodput_with(cluster, hardware, checkpoint(compiled), gpus=gpus, replicas=replicas)


def goodput_with(
    cluster: ClusterSection, hardware: Hardware, size: Checkpoint, *, gpus: int, replicas: int
) -> Goodput:
    """Goodput of a job with failures on a number of GPUs, whose checkpoints have this size."""
    assert cluster.failures, "the cluster says nothing of failures"
    detect, restart = _needed(cluster, "detect"), _needed(cluster, "restart")
    nodes = math.ceil(gpus / hardware.gpus_per_node)
    mean = goodput.interruption_seconds(nodes, cluster.failures)
    failures = Failures(mean, detect, restart)
    spares = _spares(cluster, nodes)
    waits = spares.shortage if spares else 0.0
    common = nodes, cluster.failures, mean, detect, restart, size
    if cluster.replica_recovery is not None:
        share = goodput.replicated_share(failures, replicas, cluster.replica_recovery)
        return Goodput(share * (1 - waits), *common, None, None, None, None, None, spares)
    saving = _saving(cluster, hardware, size)
    best = goodput.best_period(failures, saving)
    period = _period(cluster, saving) or best
    share = goodput.useful_share(period, failures, saving)
    estimates = goodput.young(failures, saving.stall), goodput.daly(failures, saving.stall)
    return Goodput(share * (1 - waits), *common, saving, period, best, *estimates, spares)


def job_of(
    cluster: ClusterSection, hardware: Hardware, share: float, *,
    tokens_per_second: float, gpus: int, watts_per_gpu: float, price: float | None,
) -> Job | None:  # fmt: skip
    """Whole job of a step; None if the cluster names no tokens.

    `share`: useful share of the time. `price`: USD per GPU and hour.
    """
    if cluster.tokens is None:
        return None
    ideal = cluster.tokens / tokens_per_second
    seconds = ideal / share if share else math.inf
    paid = gpus + (cluster.spares or 0) * hardware.gpus_per_node
    usd = None if price is None else price * paid * seconds / 3600
    mwh = watts_per_gpu * gpus * seconds / 3600 / 1e6
    return Job(cluster.tokens, seconds / DAY, ideal / DAY, usd, price, mwh)


_WITH_FAILURES = (
    *("checkpoint", "storage_gb_s", "detect", "restart", "async_checkpoint", "replica_recovery"),
    *("spares", "repair"),
)


def check_job(cluster: ClusterSection, mode: str) -> None:
    """Raise UserError for settings of a job that miss another, or mean nothing here."""
    values = {name: getattr(cluster, name) for name in _WITH_FAILURES}
    given = [n for n, of in values.items() if of is not None and of is not False and of != "auto"]
    if mode != "train" and (cluster.failures or cluster.tokens or given):
        raise UserError("tokens, failures and checkpoints are of a training job; leave them out")
    if not cluster.failures:
        if given:
            raise UserError(
                f"{given[0]} means nothing without failures; give --failures, interruptions per "
                "1,000 node-days, such as 3.8 (Llama 3 on 16,384 H100)"
            )
        return
    if cluster.failures < LEAST_FAILURES:
        raise UserError(
            f"failures is {cluster.failures:g} interruptions per 1,000 node-days, wanted at least "
            f"{LEAST_FAILURES:g}; leave it out for none"
        )
    alone = cluster.replica_recovery is not None
    needed = ("detect", "restart", *(() if alone else ("storage_gb_s",)))
    if missing := [name for name in needed if getattr(cluster, name) is None]:
        flags = " ".join(f"--{name.replace('_', '-')} {_EXAMPLES[name]}" for name in missing)
        raise UserError(f"failures need {', '.join(missing)}; give them, such as {flags}")
    if alone and (unused := {*given} & {"checkpoint", "storage_gb_s", "async_checkpoint"}):
        raise UserError(
            f"{min(unused)} means nothing with replica_recovery: a failure loses no work, and "
            "checkpoints are not counted; leave one of them out"
        )
    if (cluster.spares is None) != (cluster.repair is None):
        given_one, other = ("spares", "repair") if cluster.repair is None else ("repair", "spares")
        raise UserError(f"{given_one} needs {other}; give --{other}, such as {_EXAMPLES[other]}")


_EXAMPLES: Mapping[str, str] = {
    "detect": "60s",
    "restart": "5min",
    "storage_gb_s": "100",
    "repair": "24h",
    "spares": "2",
}


def _needed(cluster: ClusterSection, name: str) -> float:
    value = getattr(cluster, name)
    assert value is not None, "check_job asks for it"
    return value


def _saving(cluster: ClusterSection, hardware: Hardware, size: Checkpoint) -> Saving:
    write = size.bytes / (_needed(cluster, "storage_gb_s") * 1e9)
    if write > MOST_SECONDS:
        raise UserError(
            f"storage_gb_s is {cluster.storage_gb_s:g}: a checkpoint of {size.bytes / 1e9:,.0f} GB "
            "would take years; wanted GB/s of the storage, such as 100"
        )
    if not cluster.async_checkpoint:
        return Saving(write, write)
    copy = max(size.by_pipeline_rank) / (hardware.host_bandwidth_gb_s * 1e9)
    return Saving(copy, write, asynchronous=True)


def _period(cluster: ClusterSection, saving: Saving) -> float | None:
    """Period that the cluster asks for, in seconds; None: the best."""
    if cluster.checkpoint == "auto":
        return None
    text = cluster.checkpoint.strip()
    time = read_time(text)
    if time is None or not 0 < time[0] <= MOST_SECONDS:
        raise UserError(f"checkpoint: got {text!r}, wanted minutes, a time such as 30min, or auto")
    period = time[0] if time[1] else time[0] * 60
    if period <= saving.shortest_period:
        raise UserError(
            f"checkpoint: one every {period:,.0f} s, but one takes "
            f"{saving.shortest_period:,.0f} s; give a longer time, or more --storage-gb-s"
        )
    return period


def _spares(cluster: ClusterSection, nodes: int) -> Spares | None:
    if cluster.spares is None:
        return None
    assert cluster.failures is not None
    broken = goodput.broken_machines(nodes, cluster.failures, _needed(cluster, "repair") / 3600)
    if broken > nodes:
        raise UserError(
            f"repair: {broken:,.0f} nodes would be in repair on average, of a job on {nodes:,}; "
            "give a shorter time"
        )
    return Spares(
        cluster.spares, broken, goodput.shortage(broken, cluster.spares),
        goodput.spares_needed(broken, MOST_SHORTAGE),
    )  # fmt: skip
