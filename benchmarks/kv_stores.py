"""Serves with HERMES' five KV cache stores, and writes the table of docs/studies/kv-stores.md.

    python benchmarks/kv_stores.py

HERMES gives every read of a store its whole bandwidth; the rows "one read at a time" do not.
128 instances of Llama-3.1-70B on two H100, 240 requests/s for 10 s; figures of the stores are those
of MIST-Simulator/SC_Paper_Charts@1b4cf624 `mist_charts/memory_configs.py` (arXiv 2504.09775, table
2), its results those of `results/reference/T4/summary.csv` ("private").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from stagewright.api.served import serve
from stagewright.api.stages import stages_of
from stagewright.arrays import Float
from stagewright.serving.deployment import Deployment
from stagewright.serving.metrics import RequestTimes, Slo
from stagewright.serving.workload import with_past
from stagewright.serving.workloads.synthetic import Arrivals, Lengths, open_loop

PAGE = Path(__file__).parent.parent / "docs" / "studies" / "kv-stores.md"
MARKS = ("<!-- stores -->", "<!-- end of stores -->")
STORES: dict[str, dict[str, float] | None] = {
    "A": {"bandwidth_gb_s": 128, "capacity_gb": 1000, "latency_ms": 0.1, "shared_by": 1,
              "network_gb_s": 128, "network_latency_ms": 0.5},
    "B": {"bandwidth_gb_s": 32, "capacity_gb": 4000, "latency_ms": 0.1, "shared_by": 4,
              "network_gb_s": 16, "network_latency_ms": 1},
    "C": {"bandwidth_gb_s": 2, "capacity_gb": 32000, "latency_ms": 2, "shared_by": 32,
              "network_gb_s": 8, "network_latency_ms": 5},
    "D": {"bandwidth_gb_s": 2, "capacity_gb": 32000, "latency_ms": 2, "shared_by": 128,
              "network_gb_s": 1, "network_latency_ms": 20},
    "E": None,
}  # fmt: skip
THEIRS = {
    4096: {"A": (1625, 6279), "B": (1641, 6293), "C": (1952, 6595), "D": (2512, 7115),
           "E": (2067, 4554)},
    24576: {"A": (2017, 4407), "B": (2233, 4468), "C": (4128, 5516), "D": (7280, 8222),
            "E": (5745, 7667)},
}  # fmt: skip
"""p50 and p90 in ms, by tokens of past context."""


def instances(clients: int = 128) -> Deployment:
    """Clients with tensor parallelism over two GPUs, 8-bit weights and caches."""
    return serve(
        "llama3.1-70b", "h100-sxm", tp=2, weight_precision="fp8", kv_cache_dtype="fp8",
        max_num_batched_tokens=512, max_num_seqs=128, isl=1, osl=1, num_requests=1, rate=1,
        pools=[{"instances": clients}],
    ).deployment  # fmt: skip


def end_to_end(
    deployment: Deployment, store: dict[str, float] | None, past: int, queued: bool = False
) -> Float:
    """Seconds from arrivals to last tokens, of the requests of 10 s.

    240 a second for 128 clients, lengths as long in the mean as those of Azure's conversations.
    """
    clients = deployment.groups[0].num_engines
    rate, lengths = 240 * clients / 128, Lengths(isl=2100, osl=384, range_ratio=0.1)
    work = open_loop(round(10 * rate), Arrivals(rate=rate), lengths, seed=259)
    rows = [{"stage": "store", "reads": int(queued), "preloaded": True, **(store or {})}]
    stages = None if store is None else stages_of(rows, 259)
    served = replace(deployment, stages=stages).serve(with_past(work, past), Slo())
    return RequestTimes.of(served.outcome).e2e


def table() -> Iterator[str]:
    """Median seconds end to end, by past context and store."""
    deployment = instances()

    def medians(past: int, queued: bool) -> list[str]:
        seconds = [end_to_end(deployment, store, past, queued) for store in STORES.values()]
        values = [float(np.median(of_store)) for of_store in seconds]
        return [f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in values]

    yield f"| past context | | {' | '.join(STORES)} |"
    yield f"|---|---|{'---:|' * len(STORES)}"
    for past, theirs in THEIRS.items():
        hermes = [f"{p50 / 1e3:.2f}" for p50, _ in theirs.values()]
        yield f"| {past:,} tokens | Stagewright | {' | '.join(medians(past, queued=False))} |"
        yield f"| | HERMES | {' | '.join(hermes)} |"
        yield f"| | one read at a time | {' | '.join(medians(past, queued=True))} |"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = (text.split(mark) for mark in MARKS)
    written = "\n".join(["", "", *table(), "", ""])
    PAGE.write_text(f"{before[0]}{MARKS[0]}{written}{MARKS[1]}{after[1]}", encoding="utf-8")
