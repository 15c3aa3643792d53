"""Step times of serving: the gaps of their tables to `simulate`, and how long all of it takes.

    python benchmarks/serve_steps.py [--batches N] [--seed S] [--only CASE] [--no-gaps]

Batches are drawn at random: requests that decode (up to 256, contexts up to 8,192), prompts of up
to 2,048 tokens with and without a cached prefix, and both at once. A table is made from nothing, in
one process; calls are timed in a loop of their own, which is taken off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.steps.step_times import StepTimes, batch_run, step_times
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

CASES = {
    "8b": ("h100-sxm", {"model": "llama3.1-8b"}),
    "70b-tp8": ("h100-sxm", {"model": "llama3.1-70b", "tp": 8}),
    "drafts": ("h200", {"model": "llama3.1-70b", "tp": 4, "num_speculative_tokens": 3}),
    "windows": ("h100-sxm", {"model": "gpt-oss-120b"}),
    "mixtral": ("b200", {"model": "mixtral-8x7b", "tp": 2}),
    "deepseek-tp": ("h200", {"model": "deepseek-v3", "tp": 8, "ep": 8}),
    "deepseek-dp": ("h200", {"model": "deepseek-v3", "dp": 16, "ep": 16}),
    "states": ("h200", {"model": "qwen3-next-80b-a3b", "tp": 2}),
    "pipeline": ("h200", {"model": "llama3.1-70b", "tp": 2, "pp": 2}),
    "one-kernel": ("rtx-pro-6000", {"model": "llama3.1-8b", "serving_engine": "vllm"}),
    "eager": ("h200", {"model": "qwen3-30b-a3b", "serving_engine": "sglang"}),
    "fp8": ("b200", {"model": "qwen3-32b", "tp": 4, "weight_precision": "fp8"}),
}
"""Hardware and settings by name; `serving_engine` is of the execution."""
KINDS = ("decode", "both", "prompts")
CALLS = 100_000


class Drawn(NamedTuple):
    """A batch of one replica."""

    decoding: list[Group]
    prompts: list[Group]


def draw(kind: str, seed: random.Random, run: Run) -> Drawn:
    """A batch of a kind. A pipeline's batches hold requests in turn: its requests are alike."""
    new = 1 + run.num_speculative_tokens
    decoding: list[Group] = []
    prompts: list[Group] = []
    if kind != "prompts":
        many = round(2 ** seed.uniform(0, 8))
        longest = round(2 ** seed.uniform(4, 13))
        decoding = [Group(1, seed.randint(1, longest), new) for _ in range(many)]
    if kind != "decode":
        cached = seed.choice((0, seed.randint(1, 8192)))
        tokens = max(new + 1, round(2 ** seed.uniform(3, 11)))
        many = 1 if kind == "both" else seed.randint(1, 4)
        prompts = [Group(1, cached, tokens) for _ in range(many)]
    return Drawn(decoding, prompts)


def sums(groups: Sequence[Group]) -> tuple[int, int, int, int]:
    """New tokens, pairs, keys and requests."""
    each = [(g.count, g.context_length or 0, g.new_tokens or 0) for g in groups]
    return (
        sum(n * new for n, _, new in each),
        sum(n * (new * context + new * (new + 1) // 2) for n, context, new in each),
        sum(n * (context + new) for n, context, new in each),
        sum(n for n, _, _ in each),
    )


def simulated(
    run: Run, model: ModelConfig, machine: Machine, execution: Execution, batch: Drawn
) -> float:
    """Seconds of a step by `simulate`; every replica has the same batch."""

    def alone(groups: Sequence[Group]) -> float:
        every = [Group(g.count * run.dp, g.context_length, g.new_tokens) for g in groups]
        return simulate(compile(batch_run(run, every), model), machine, execution).seconds

    both = alone([*batch.decoding, *batch.prompts])
    if batch.decoding and batch.prompts and model.kv_lora_rank:
        return min(both, alone(batch.decoding) + alone(batch.prompts))
    return both


def micros(call: Callable[[int], object]) -> float:
    """CPU microseconds of a call."""
    began = time.process_time()
    for n in range(CALLS):
        call(n)
    took = time.process_time() - began
    began = time.process_time()
    for n in range(CALLS):
        _nothing(n)
    return (took - (time.process_time() - began)) / CALLS * 1e6


def _nothing(_: int) -> None:
    return None


def speed(times: StepTimes, new: int) -> str:
    """CPU microseconds of each kind of call."""
    decode = times.decode
    tokens = 64 * new + 512
    calls: dict[str, Callable[[int], object]] = {
        "decode": lambda n: decode(64, 64_000 + n),
        "step": lambda n: times.step(tokens, 600_000 + n, 70_000, 65, 64, 64_000),
        "prompts": lambda n: times.step(512, 200_000 + n, 2_048, 1),
        "run": lambda n: times.linear_run(64, 64_000 + n),
    }
    return ", ".join(f"{name} {micros(call):.2f}" for name, call in calls.items())


def case(name: str, batches: int, seed: int, *, gaps: bool) -> None:
    """Print the figures of a case."""
    hardware, settings = CASES[name]
    settings = dict(settings)
    execution = Execution(serving_engine=settings.pop("serving_engine", None))
    run = Run.model_validate({"mode": "decode", **settings})
    model = model_of(str(run.model))
    machine = Machine.of(resolve(hardware), gpus=run.tp * run.dp * run.pp)
    began = time.process_time()
    times = step_times(run, model, machine, execution)
    took = time.process_time() - began
    print(f"{name}: {run.describe()} on {hardware}: table {took:.2f} CPU-s")
    print(f"  us a call: {speed(times, 1 + run.num_speculative_tokens)}")
    drawn = random.Random(seed)
    for kind in KINDS if gaps else ():
        if kind == "both" and model.state_space is not None:
            continue  # `simulate` refuses such steps
        found: list[float] = []
        for _ in range(batches):
            batch = draw(kind, drawn, run)
            every = [*batch.decoding, *batch.prompts]
            mine = times.step(*sums(every), len(batch.decoding), sums(batch.decoding)[2])
            found.append(mine / simulated(run, model, machine, execution, batch) - 1)
        sizes = sorted(map(abs, found))
        print(
            f"  {kind}: gap to simulate of {batches} random batches: median "
            f"{statistics.median(sizes):.3%}, largest {sizes[-1]:.3%}"
        )


def main() -> None:
    """Print the figures of all cases."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--batches", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=CASES)
    options.add_argument("--no-gaps", action="store_true")
    asked = options.parse_args()
    for name in [asked.only] if asked.only else CASES:
        case(name, asked.batches, asked.seed, gaps=not asked.no_gaps)


if __name__ == "__main__":
    main()
