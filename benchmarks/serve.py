"""Requests per CPU-second of `stagewright serve`, and memory for a million of them.

    python benchmarks/serve.py TRACE.jsonl    # Mooncake's conversation trace, may be .gz
    python benchmarks/serve.py                # 1024/256 at 100 requests/s on 8 engines only
    python benchmarks/serve.py --million      # a million requests: seconds and peak memory

Step times are those of Llama-3.1-8B on an H100, made before the clock starts.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace

from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.serving import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.instances import instance
from stagewright.serving.metrics import Slo
from stagewright.serving.requests import Workload
from stagewright.serving.schedulers.named import batch_limits, scheduler_of
from stagewright.serving.service import Service
from stagewright.serving.workloads import traces
from stagewright.serving.workloads.synthetic import Arrivals, Lengths, open_loop
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine


def main(arguments: list[str]) -> None:
    """Print a line for each workload and router."""
    hardware = resolve("h100-sxm")
    begin = time.process_time()
    asked = EngineSection()
    limits = batch_limits(asked, hardware)
    made = instance(
        Run(model="llama3.1-8b", mode="decode"),
        model_of("llama3.1-8b"),
        Machine.of(hardware, gpus=1),
        most_tokens=limits.tokens,
        most_requests=limits.requests,
    )
    service = Service(made, asked, limits, scheduler_of(asked, limits))
    print(f"step times and cache: {time.process_time() - begin:.2f} CPU-s")
    lengths = Lengths(isl=1024, osl=256)
    if "--million" in arguments:
        measured(service, open_loop(1_000_000, Arrivals(rate=100), lengths), 8)
        return
    for path in arguments:
        for router in ("round_robin", "least_loaded", "kv_aware"):
            measured(service, traces.read(path), 16, router)
    for router in ("round_robin", "least_loaded"):
        measured(service, open_loop(20_000, Arrivals(rate=100), lengths), 8, router)


def measured(
    service: Service, workload: Workload, instances: int, router: str = "round_robin"
) -> None:
    """Serve a workload and print how fast that went."""
    engines = replace(service.engines, instances=instances, router=router)
    begin = time.process_time()
    found = replace(service, engines=engines).serve(workload, Slo())
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{workload.name}, {instances} engines, {router}: {len(workload) / seconds:,.0f} requests "
        f"per CPU-second ({seconds:.2f} s; TTFT p50 {found.summary.ttft.p50:.3f} s, "
        f"{found.summary.preemptions} preemptions); peak memory {peak:,.0f} MB"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
