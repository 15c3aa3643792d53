"""Derive `recurrence_tflops`, the speed of Mamba-2's kernels, from published training steps.

    python benchmarks/fit_recurrence.py CHECKOUT

github.com/state-spaces/mamba, issue 904, has whole steps of Mamba-2 on one A100, H200 and GB200.
What is left of them, without all that is predicted but the recurrence, is the recurrence's time;
the speed is its FLOPs over that time. Steps are counted with six FLOPs per parameter and token. No
row of `stagewright validate` takes part: those of Nemotron-H and of Nemotron 3 are held out.

CHECKOUT is a copy of github.com/ai-dynamo/aiconfigurator@095f58a5, whose table of B200 has the
forward scan of Nemotron 3 in TensorRT-LLM. Its speed on Nano's shapes, over that of both passes, is
the ratio of the forward pass; the other models' shapes check it. The backward pass has what is left
of the steps. Needs pyarrow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

import stagewright as sw
from stagewright.model.catalog import resolve as resolve_model
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate
from stagewright.time.simulate.timeline import table_rows

STEPS = {"a100-sxm-80gb": 102.5, "h200": 239.2, "gb200-nvl72": 360.4}
"""TFLOP/s of a model of 48 layers of 2,048 channels, four sequences of 4,096 tokens in bf16."""
PARAMETERS = 1.344e9
TOKENS = 4 * 4096


def scan_speeds(checkout: Path) -> dict[str, np.ndarray]:
    """TFLOP/s of the forward scan on B200 of at least 2,048 tokens, by model."""
    run = sw.Run(model="nemotron3-nano-30b-a3b", layers=1, seq_length=4096,
                 micro_batch_size=1, global_batch_size=1)  # fmt: skip
    tasks = sw.compile(run).program.classes[0].tasks
    kernels = [tasks.shapes[i].kernel for i in tasks.shape]
    of_head = tasks.flops[kernels.index("linear_attention")] / 4096 / 64
    folder = checkout / "aic-core/src/aiconfigurator_core/systems/data/b200_sxm/linear_attention"
    table = parquet.read_table(folder / "trtllm/1.3.0rc15/mamba2_perf.parquet").to_pylist()
    speeds: dict[str, list[float]] = {"Nano": [], "Super": [], "Ultra": []}
    for row in table:
        tokens = row["batch_size"] * row["seq_len"]
        is_scan = row["kernel_source"] == "mamba_chunk_scan_combined"
        if is_scan and tokens >= 2048 and row["seq_len"] >= row["chunk_size"]:
            model = next(name for name in speeds if name in row["model_name"])
            speeds[model].append(of_head * row["nheads"] * tokens / row["latency"] / 1e9)
    return {model: np.array(rates) for model, rates in speeds.items()}


def main() -> None:
    """Print the speed on each GPU, and what share of the step is left for the recurrence."""
    run = sw.Run(model="mamba2-1.3b", seq_length=4096, micro_batch_size=4, global_batch_size=4)
    compiled = sw.compile(run, resolve_model("mamba2-1.3b"))
    (rank_class,) = compiled.program.classes
    tasks = rank_class.tasks
    kernels = [shape.kernel for shape in tasks.shapes]
    mine = np.array([*(k.startswith("linear_attention") for k in kernels), False])[tasks.shape]
    for name, published in STEPS.items():
        machine = Machine.of(resolve(name), gpus=1)
        (by_action,) = task_seconds(compiled.program, machine)
        seconds = by_action[table_rows(rank_class.work)]
        others = simulate(compiled, machine).seconds - seconds[mine].sum()
        step = 6 * PARAMETERS * TOKENS / published / 1e12
        rate = tasks.flops[mine].sum() / (step - others) / 1e12
        print(f"{name:15} step {step:.3f} s, others {others:.3f} s: {rate:.1f} TFLOP/s")
    speeds = scan_speeds(Path(sys.argv[1]))
    fitted, whole = float(np.median(speeds["Nano"])), resolve("b200").recurrence_tflops
    assert whole is not None
    forward = mine & np.array([kernels[i] == "linear_attention" for i in tasks.shape])
    share = tasks.flops[mine & ~forward].sum() / tasks.flops[forward].sum()
    ratio = fitted / whole
    print(f"forward {ratio:.2f}, backward {share / (1 + share - 1 / ratio):.3f} of both")
    for model, rates in speeds.items():
        error = rates / fitted - 1
        print(f"{model}: {len(rates)} rows, median {np.median(np.abs(error)):.1%}, "
              f"bias {np.median(error):+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
