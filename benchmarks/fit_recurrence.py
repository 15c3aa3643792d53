"""Derive `recurrence_tflops`, the speed of Mamba-2's kernels, from published training steps.

    python benchmarks/fit_recurrence.py

github.com/state-spaces/mamba, issue 904, has whole steps of Mamba-2 on one A100, H200 and GB200.
What is left of them, without all that is predicted but the recurrence, is the recurrence's time;
the speed is its FLOPs over that time. Steps are counted with six FLOPs per parameter and token. No
row of `stagewright validate` takes part: those of Nemotron-H and of Nemotron 3 are held out.
"""

from __future__ import annotations

import numpy as np

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


if __name__ == "__main__":
    main()
