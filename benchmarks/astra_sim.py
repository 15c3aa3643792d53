"""Our simulator beside ASTRA-sim, under its own assumptions: the end of every rank of some runs.

    python benchmarks/astra_sim.py AstraSim_Analytical_Congestion_Unaware [--record VERSIONS]

The cases, and what ASTRA-sim said of them when they were recorded, are in
`tests/data/astra_sim.json`, which the tests hold ours against without ASTRA-sim. `--record` writes
the new results there, under the versions given as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import astra_clock
import stagewright as sw
from stagewright.run.sections.execution import Execution
from stagewright.time import astra_sim
from stagewright.time.simulate.timeline import timeline
from stagewright.trace.formats import wire

TESTS = Path(__file__).parent.parent / "tests"
DATA = TESTS / "data" / "astra_sim.json"

sys.path.insert(0, str(TESTS))
handmade = importlib.import_module("handmade")


def system_of(case: dict[str, Any], machine: dict[str, float]) -> astra_sim.AstraSim:
    """The system of a case."""
    dimensions = tuple(astra_sim.Dimension(*each) for each in case["dimensions"])
    names = {op: tuple(each) for op, each in case["implementation"].items()}
    return astra_sim.AstraSim(dimensions, machine["peak_tflops"], machine["memory_gb_s"], names)


def ours(case: dict[str, Any], machine: dict[str, float]) -> tuple[list[float], float]:
    """When each rank ends, in ns; and CPU seconds, the program compiled."""
    program = sw.compile(sw.Run(**case["run"])).program
    began = time.process_time()
    seconds = astra_clock.task_seconds(program, system_of(case, machine))
    factors = {int(rank): by for rank, by in case["factors"].items()}
    line = timeline(program, seconds, Execution(streams="one"), factors)
    ends = np.zeros(program.mesh.world_size)
    for lane in line.lanes:
        ends[lane.ranks] = lane.end.max() / 1000
    return ends.tolist(), time.process_time() - began


def theirs(case: dict[str, Any], machine: dict[str, float], binary: str) -> tuple[list[int], float]:
    """When each rank ends, in ns; and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces"
        sw.generate(sw.compile(sw.Run(**case["run"])), str(path))
        for rank, by in case["factors"].items():
            slow_down(path / f"workload.{rank}.et", by)
        system = system_of(case, machine)
        (path / "system.json").write_text(system.system_json())
        (path / "network.yml").write_text(system.network_yml())
        (path / "remote_memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
        began = time.perf_counter()
        done = subprocess.run(
            [
                binary,
                "--workload-configuration=workload",
                "--comm-group-configuration=comm_group.json",
                "--system-configuration=system.json",
                "--network-configuration=network.yml",
                "--remote-memory-configuration=remote_memory.json",
            ],
            cwd=path,
            capture_output=True,
            text=True,
        )
        took = time.perf_counter() - began
    found = re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", done.stdout)
    ends = {int(rank): int(end) for rank, end in found}
    if len(ends) != system.world_size:
        raise SystemExit(f"{case['name']}: {len(ends)} of {system.world_size} ranks finished")
    return [ends[rank] for rank in range(system.world_size)], took


def slow_down(path: Path, by: float) -> None:
    """Give the kernels of a trace `by` times the work."""
    metadata, nodes = handmade.read_messages(path)
    messages: list[Any] = [metadata]
    for node in nodes:
        for attribute in node.attr:
            if attribute.name in ("num_ops", "tensor_size"):
                kind = str(attribute.WhichOneof("value"))
                setattr(attribute, kind, round(getattr(attribute, kind) * by))
        messages.append(node)
    texts = [message.SerializeToString() for message in messages]
    path.write_bytes(b"".join(wire.varint(len(text)) + text for text in texts))


def main() -> None:
    """Print a row per case."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("binary")
    arguments.add_argument("--record", type=json.loads, metavar="JSON")
    given = arguments.parse_args()
    binary = str(Path(given.binary).resolve()) if "/" in given.binary else given.binary
    data = json.loads(DATA.read_text())
    row = "{:34} {:>5} {:>12} {:>12} {:>9} {:>9} {:>9} {:>9}"
    print(row.format("case", "GPUs", "ASTRA ms", "ours ms", "step", "worst", "ASTRA s", "ours s"))
    for case in data["cases"]:
        mine, my_time = ours(case, data["machine"])
        other, their_time = theirs(case, data["machine"], binary)
        case["rank_ns"] = other
        error = max(mine) / max(other) - 1
        worst = max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))
        print(
            row.format(
                case["name"], len(other), f"{max(other) / 1e6:.4f}", f"{max(mine) / 1e6:.4f}",
                f"{error:+.3%}", f"{worst:.3%}", f"{their_time:.2f}", f"{my_time:.2f}",
            ),
            flush=True,
        )  # fmt: skip
    if given.record is not None:
        data["versions"] = given.record
        lines = ",\n".join("  " + json.dumps(case) for case in data.pop("cases"))
        head = json.dumps(data, indent=1).removesuffix("\n}")
        DATA.write_text(head + f',\n "cases": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
