"""What one engine runs on: step times of a model, a layout and a machine, and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stagewright.errors import UserError
from stagewright.lower.inference.serving import ServingStep
from stagewright.lower.inference.serving_memory import ServingMemory
from stagewright.model.config import ModelConfig
from stagewright.run.lengths import Group
from stagewright.run.requests import allowance_of, loads, read_bytes
from stagewright.run.rules import check
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.steps.batches import BatchSums
from stagewright.serving.steps.step_times import StepTimes, batch_run, step_times
from stagewright.time.network import Machine

ENGINE_BYTES = 1_000_000_000
"""Bytes of a GPU that an engine holds besides tensors: CUDA contexts, communicators, captured
graphs. vLLM 0.19 had 2,588 blocks for Llama-3.1-8B on an RTX 4090 of 25.25 GB (the log of
casys-kaist/LLMServingSim@5daddb21), where weights and our activations would leave 3,084."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The KV cache of one replica: a rank of attention data parallelism."""

    block_size: int
    """Tokens of a block."""
    blocks: int
    """That fit beside weights and activations."""
    bytes_per_token: float
    """On all GPUs of the replica, of layers that keep all tokens; ranks of tp that hold the same
    keys count once."""
    blocks_per_request: int
    """Blocks as large as what a request holds whatever its length: states, windows of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An engine, and how long its steps take."""

    run: Run
    """Not resolved, as the user gave it: prompts and decode resolve differently."""
    model: ModelConfig
    machine: Machine
    times: StepTimes
    cache: KvCapacity

    @property
    def gpus(self) -> int:
        """GPUs of all ranks."""
        return self.machine.gpus

    @property
    def replicas(self) -> int:
        """Ranks of attention data parallelism: each has a scheduler, a cache and a batch."""
        return self.run.dp

    @property
    def barrier(self) -> bool:
        """Whether all replicas' steps begin together, since experts are shared among them."""
        return self.run.dp > 1 and self.model.num_experts > 0


def instance(
    run: Run,
    model: ModelConfig,
    machine: Machine,
    how: Execution | None = None,
    *,
    most_tokens: int = 8192,
    most_requests: int = 1024,
    gpu_memory_utilization: float = 0.9,
) -> Instance:
    """An engine with the layout of a run, which is not resolved, on a machine of as many GPUs.

    `most_tokens` and `most_requests` of a step, and the share of memory that the engine takes, are
    vLLM's `max_num_batched_tokens`, `max_num_seqs` and `gpu_memory_utilization`. Raises UserError
    where the run cannot be had, its steps have no table, or no request fits beside the weights.
    """
    if model.encoder_num_layers:
        raise UserError(
            f"serve: {model.name} has an encoder, too: its steps have no table of times; "
            "`stagewright simulate --mode prefill` and `--mode decode` time single steps"
        )
    memory = machine.hardware.memory if run.device_memory is None else read_bytes(run.device_memory)
    cache = kv_capacity(run, model, int(memory * gpu_memory_utilization), most_tokens)
    times = step_times(
        run, model, machine, how, most_tokens=most_tokens, most_requests=most_requests
    )
    return Instance(run, model, machine, times, cache)


def kv_capacity(run: Run, model: ModelConfig, memory: int, most_tokens: int) -> KvCapacity:
    """The blocks that fit in so many bytes of each GPU, beside a step of `most_tokens`."""
    longest = most_tokens
    if model.position == "learned":
        longest = min(most_tokens, model.max_position_embeddings)
    count = -(-most_tokens // longest)
    prompts = batch_run(run, [Group(run.dp * count, 0, longest)]).resolved(model)
    prompts = prompts.model_copy(update={"max_model_len": None})
    check(prompts, model)
    load = loads(prompts, model)
    step = ServingStep.of(prompts, model, {}, load.sizes)
    one = np.array([1], dtype=np.int64)
    sums = BatchSums.of_equal_requests(prompts, model, count * one, 0 * one, longest * one)
    base = {name: int(column[0]) for name, column in sums.sizes(prompts, model).items()}
    kernels = {v: block.tasks for v, block in step.lower_blocks(base).items()}
    memory_of = ServingMemory(step.stages, step.graphs, kernels, step.extent)
    block = prompts.kv_block_size

    def held(rank: int, **changed: int) -> Mapping[str, int]:
        return memory_of.by_category(rank, [{**base, **changed}])

    blocks: list[int] = []
    token_bytes = 0.0
    fixed = 0
    local = [reach.kind for reach in model.reaches if reach.kind]
    for rank in range(prompts.pp):
        here = held(rank)
        few = held(rank, L=block, I=1)["kv_cache"]
        of_block = held(rank, L=2 * block, I=2)["kv_cache"] - few
        nothing = dict.fromkeys(("L", *(f"L{kind}" for kind in local)), 0)
        seen = {
            f"L{reach.kind}": _kept(reach.window or reach.chunk, block)
            for reach in model.reaches
            if reach.window or reach.chunk
        }
        of_request = held(rank, **nothing, requests=2)["kv_cache"]
        of_request -= held(rank, **nothing, requests=1)["kv_cache"]
        of_request += held(rank, **{**nothing, **seen})["kv_cache"]
        of_request -= held(rank, **nothing)["kv_cache"]
        room = memory - here["parameters"] - here["activations"]
        room -= max(allowance_of(run), ENGINE_BYTES)
        blocks.append(room // (of_block or of_request or 1))
        token_bytes += of_block / block
        fixed = max(fixed, -(-of_request // of_block) if of_block else 1)
    if min(blocks) < 1:
        raise UserError(
            f"serve: {run.describe()}: weights and activations of {most_tokens} tokens leave no "
            "room for a block of the cache; use more ranks (--tp), fewer tokens "
            "(--max-num-batched-tokens), fewer bits or more memory (--gpu-memory-utilization)"
        )
    shared = _copies(step, model)
    return KvCapacity(block, min(blocks), token_bytes * prompts.tp / shared, fixed)


def _kept(window: int, block: int) -> int:
    """Places that a request's last `window` tokens take, which begin anywhere in a block."""
    return -(-(window + block - 1) // block) * block


def _copies(step: ServingStep, model: ModelConfig) -> int:
    """Ranks of tp that hold the same keys."""
    heads = 1 if model.kv_lora_rank else model.num_query_groups
    return max(1, step.run.tp // heads) if heads else 1
