"""Requests per CPU-second of `stagewright serve`, and memory for a million of them.

    python benchmarks/serve.py TRACE.jsonl    # Mooncake's conversation trace, may be .gz
    python benchmarks/serve.py                # 1024/256 at 100 requests/s on 8 engines only
    python benchmarks/serve.py --million      # a million requests: seconds and peak memory
    python benchmarks/serve.py --search       # candidates per CPU-second of `search --serve`

Step times are those of Llama-3.1-8B on an H100, made before the clock starts.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace

from stagewright.api.searched_serving import asked_serving, searched_serving
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.serving import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.metrics import Slo
from stagewright.serving.workload import Workload
from stagewright.serving.workloads import traces
from stagewright.serving.workloads.synthetic import Arrivals, Lengths, open_loop
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine


def main(arguments: list[str]) -> None:
    """Print a line for each workload and router."""
    if "--search" in arguments:
        searched()
        return
    hardware = resolve("h100-sxm")
    begin = time.process_time()
    group = InstanceGroup.of(
        Run(model="llama3.1-8b", mode="decode"),
        model_of("llama3.1-8b"),
        Machine.of(hardware, gpus=1),
        EngineSection(),
    )
    print(f"step times and cache: {time.process_time() - begin:.2f} CPU-s")
    lengths = Lengths(isl=1024, osl=256)
    if "--million" in arguments:
        measured(group, open_loop(1_000_000, Arrivals(rate=100), lengths), 8)
        return
    for path in arguments:
        for router in ("round_robin", "least_loaded", "kv_aware"):
            measured(group, traces.read(path), 16, router)
    for router in ("round_robin", "least_loaded"):
        measured(group, open_loop(20_000, Arrivals(rate=100), lengths), 8, router)


def measured(
    group: InstanceGroup, workload: Workload, instances: int, router: str = "round_robin"
) -> None:
    """Serve a workload and print how fast that went."""
    engines = replace(group.settings, instances=instances, router=router)
    begin = time.process_time()
    found = replace(group, settings=engines).serve(workload, Slo())
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{workload.name}, {instances} engines, {router}: {len(workload) / seconds:,.0f} requests "
        f"per CPU-second ({seconds:.2f} s; TTFT p50 {found.summary.ttft.p50:.3f} s, "
        f"{found.summary.preemptions} preemptions); peak memory {peak:,.0f} MB"
    )


def searched() -> None:
    """Search layouts for 10,000 requests and print how fast that went."""
    for model, rate in (("llama3.1-8b", 100.0), ("llama3.1-70b", 20.0), ("qwen3-30b-a3b", 50.0)):
        question = asked_serving(
            {"model": model, "rate": rate, "isl": 2048, "osl": 256, "ttft": 1000, "tpot": 30}
            | {"num_requests": 10_000},
            hardware=["h100-sxm"],
        )
        begin = time.process_time()
        found = searched_serving(question)
        seconds = time.process_time() - begin
        of = found.ranking
        stopped = sum(each.simulated.stopped for each in of.choices)
        print(
            f"{model} at {rate:g}/s: {found.describe()}; {of.candidates:,} candidates of "
            f"{len(of.rows)} layouts in {seconds:.2f} CPU-s, {of.candidates / seconds:,.0f} per "
            f"CPU-second; {len(of.choices)} of them simulated ({stopped} not to the end), "
            f"{len(of.choices) / seconds:.1f} per CPU-second"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
