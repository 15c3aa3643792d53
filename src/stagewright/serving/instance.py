"""Instance: a model in a layout on a machine, with its step times and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.lower.serving_step import ServingMemory, ServingStep
from stagewright.model.config import ModelConfig
from stagewright.numbers import quantity
from stagewright.run.lengths import Group
from stagewright.run.requests import allowance_of, loads, read_bytes
from stagewright.run.rules import check
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.speculative import Drafter
from stagewright.serving.steps.step_times import (
    DraftingTimes,
    StepTimes,
    batch_run,
    step_times,
)
from stagewright.time.network import Machine

ENGINE_BYTES = 1_000_000_000
"""Bytes of a GPU that a server holds besides tensors: CUDA contexts, communicators, captured
graphs. vLLM 0.19 had 2,588 blocks for Llama-3.1-8B on an RTX 4090 of 25.25 GB (the log of
casys-kaist/LLMServingSim@5daddb21), where weights and our activations would leave 3,084."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """KV cache of one replica."""

    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Number of blocks that fit beside weights and activations."""
    bytes_per_token: float
    """Bytes on all GPUs of the replica, of layers that keep all tokens.

    Ranks of tp that hold the same keys count once."""
    blocks_per_request: int
    """Blocks as large as what a request holds whatever its length: states, windows of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A copy of a model on its own GPUs, and how long its steps take.

    Each of its replicas has an engine."""

    run: Run
    """Run as the user gave it, not resolved: prefill and decode resolve differently.

    Ignore `run.mode` here: `batch_run` sets it for each step."""
    model: ModelConfig
    machine: Machine
    times: StepTimes
    cache: KvCapacity
    drafter: Drafter | None = None
    """Drafter of speculative decoding that takes GPU time."""
    execution: Execution | None = None
    """Execution of its steps; None: as the engine has it."""

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
        """True if all replicas' steps begin together, since they share experts."""
        return self.run.dp > 1 and self.model.num_experts > 0


def make_instance(
    run: Run,
    model: ModelConfig,
    machine: Machine,
    execution: Execution | None = None,
    *,
    max_tokens: int = 8192,
    max_requests: int = 1024,
    gpu_memory_utilization: float = 0.9,
    free_gpu_memory_fraction: float | None = None,
    drafter: Drafter | None = None,
) -> Instance:
    """Create an instance with the layout of an unresolved run on a machine.

    `max_tokens` and `max_requests` of a step are vLLM's `max_num_batched_tokens` and
    `max_num_seqs`; `gpu_memory_utilization` is the share of memory that the instance takes, or
    `free_gpu_memory_fraction` that of the cache in what is left beside weights and activations. The
    passes of a `drafter` follow each step. Raises UserError where the run is not possible, its
    steps have no table, or no request fits beside the weights.
    """
    if model.encoder_num_layers:
        raise UserError(
            f"serve: {model.name} has an encoder, too: its steps have no table of times; "
            "`stagewright simulate --mode prefill` and `--mode decode` time single steps"
        )
    memory = machine.hardware.memory if run.device_memory is None else read_bytes(run.device_memory)
    free = free_gpu_memory_fraction
    memory = int(memory * gpu_memory_utilization) if free is None else memory
    cache = kv_capacity(run, model, memory, max_tokens, drafter, free or 1.0)
    limits = {"max_tokens": max_tokens, "max_requests": max_requests}
    times = step_times(run, model, machine, execution, **limits)
    if drafter is not None:
        times = drafted_times(times, drafter, machine, execution)
    return Instance(run, model, machine, times, cache, drafter, execution)


def drafted_times(
    times: StepTimes, drafter: Drafter, machine: Machine, execution: Execution | None = None
) -> StepTimes:
    """Step times of a model with those of its drafter on the same machine."""

    def drafter_times(tokens: int, model: ModelConfig, logits: int | None) -> StepTimes:
        run = drafter.run.model_copy(update={"num_speculative_tokens": tokens})
        return step_times(
            run, model, machine, execution,
            max_tokens=times.max_tokens, max_requests=times.max_requests, logits=logits,
        )  # fmt: skip

    first = drafter_times(drafter.number + drafter.extra_tokens, drafter.model, 1)
    later = first if drafter.number == 1 else drafter_times(0, drafter.later, None)
    return replace(
        times, drafting=DraftingTimes(first, later, drafter.number, drafter.extra_tokens)
    )


def kv_capacity(
    run: Run,
    model: ModelConfig,
    memory: int,
    max_tokens: int,
    drafter: Drafter | None = None,
    share: float = 1.0,
) -> KvCapacity:
    """KV blocks that fit into `memory` bytes of each GPU, next to a step of `max_tokens`.

    The cache takes a `share` of what is left.

    A block of a request's tokens is one of the model and one of its drafter (vLLM: one block table,
    and a cache for the layers of both). A head uses the model's embedding and output projection
    (`_maybe_share_embeddings` of vLLM's `llm_base_proposer.py`).
    """
    stages = _rank_bytes(run, model, max_tokens)
    if drafter is not None:
        shared = frozenset({"embedding", "head"} if drafter.head else ())
        (drafts,) = _rank_bytes(drafter.run, drafter.model, max_tokens, shared)
        stages = [stage.with_drafter(drafts) for stage in stages]
    spare = max(allowance_of(run), ENGINE_BYTES)
    blocks = [
        int((memory - stage.parameters - stage.activations - spare) * share)
        // (stage.block or stage.request or 1)
        for stage in stages
    ]
    if min(blocks) < 1:
        fullest = max(stages, key=lambda stage: stage.parameters + stage.activations)
        raise UserError(
            f"serve: {run.describe()}: weights ({quantity(fullest.parameters, 'B')}) and "
            f"activations of {max_tokens} tokens ({quantity(fullest.activations, 'B')}) leave no "
            f"room for a block of the cache in {quantity(memory, 'B')} of a GPU, of which the "
            f"engine takes {quantity(spare, 'B')}; use more ranks (--tp), fewer tokens "
            "(--max-num-batched-tokens), fewer bits or more memory (--gpu-memory-utilization)"
        )
    per_request = max(-(-stage.request // stage.block) if stage.block else 1 for stage in stages)
    token_bytes = sum(stage.token for stage in stages)
    return KvCapacity(run.kv_block_size, min(blocks), token_bytes, per_request)


class RankBytes(NamedTuple):
    """Bytes of a rank of a pipeline stage."""

    parameters: int
    activations: int
    block: int
    """Bytes of a block of the cache."""
    request: int
    """Bytes of a request, whatever its length."""
    token: float
    """Bytes of a token in the cache on all ranks of tp, without copies."""

    def with_drafter(self, drafter: RankBytes) -> RankBytes:
        """Add the bytes of a drafter, whose passes follow the steps of the model."""
        return RankBytes(
            self.parameters + drafter.parameters,
            max(self.activations, drafter.activations),
            self.block + drafter.block,
            self.request + drafter.request,
            self.token + drafter.token,
        )


def _rank_bytes(
    run: Run, model: ModelConfig, max_tokens: int, shared: frozenset[str] = frozenset()
) -> list[RankBytes]:
    """Bytes of the ranks of each stage in a prefill step, without `shared` blocks."""
    longest = max_tokens
    if model.position == "learned":
        longest = min(max_tokens, model.max_position_embeddings)
    prompts = batch_run(run, [Group(run.dp * -(-max_tokens // longest), 0, longest)])
    prompts = prompts.resolved(model).model_copy(update={"max_model_len": None})
    check(prompts, model)
    step = ServingStep.of(prompts, model, {}, loads(prompts, model).sizes)
    # All requests of a replica at once, whatever the pipeline makes of them.
    batch = loads(prompts.model_copy(update={"pp": 1}), model).sizes[0]
    kernels = {v: block.tasks for v, block in step.lower_blocks(batch).items()}
    stages = [
        [placed for placed in stage if placed[0].block not in shared] for stage in step.stages
    ]
    memory = ServingMemory(stages, step.graphs, kernels, step.extent)
    block = prompts.kv_block_size
    heads = 1 if model.kv_lora_rank else model.num_query_groups
    copies = max(1, prompts.tp // heads) if heads else 1  # ranks of tp that hold the same keys
    ranks = prompts.tp / copies
    windows = {
        f"L{reach.kind}": _window_positions(reach.window or reach.chunk, block)
        for reach in model.reaches
        if reach.window or reach.chunk
    }
    # Layers whose queries choose keys keep all tokens, too.
    all_tokens = ["", *(reach.kind for reach in model.reaches if reach.top)]
    no_tokens = {f"L{kind}": 0 for kind in ("", *(reach.kind for reach in model.reaches))}

    def cached(rank: int, sizes: Mapping[str, int]) -> int:
        """Bytes of the cache of a batch."""
        return memory.by_category(rank, [{**batch, **sizes}])["kv_cache"]

    def blocks(count: int) -> dict[str, int]:
        """Sizes of a batch whose tokens take some blocks."""
        of_kinds = ((f"L{kind}", f"I{kind}") for kind in all_tokens)
        return {n: size for a, b in of_kinds for n, size in ((a, count * block), (b, count))}

    bytes_of_ranks: list[RankBytes] = []
    for rank in range(prompts.pp):
        used = memory.by_category(rank, [batch])
        of_block = cached(rank, blocks(2)) - cached(rank, blocks(1))
        of_request = cached(rank, no_tokens | {"requests": 2})
        of_request -= cached(rank, no_tokens | {"requests": 1})
        of_request += cached(rank, no_tokens | windows) - cached(rank, no_tokens)
        bytes_of_ranks.append(
            RankBytes(
                used["parameters"], used["activations"], of_block, of_request,
                of_block / block * ranks,
            )
        )  # fmt: skip
    return bytes_of_ranks


def _window_positions(window: int, block: int) -> int:
    """Cache positions of a request's last `window` tokens, which begin anywhere in a block."""
    return -(-(window + block - 1) // block) * block
