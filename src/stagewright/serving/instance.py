"""Instance: step times of a model, a layout and a machine, and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.lower.inference.serving import ServingStep
from stagewright.lower.inference.serving_memory import ServingMemory
from stagewright.model.config import ModelConfig
from stagewright.numbers import quantity
from stagewright.run.lengths import Group
from stagewright.run.requests import allowance_of, loads, read_bytes
from stagewright.run.rules import check
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.speculative import Drafter
from stagewright.serving.steps.drafted import DraftedTimes
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
    """Number of blocks that fit next to weights and activations."""
    bytes_per_token: float
    """Bytes on all GPUs of the replica, of layers that keep all tokens.

    Ranks of tp that hold the same keys count once."""
    blocks_per_request: int
    """Blocks as large as what a request holds whatever its length: states, windows of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An engine, and how long its steps take."""

    run: Run
    """Run as the user gave it, not resolved: prefill and decode resolve differently."""
    model: ModelConfig
    machine: Machine
    times: StepTimes | DraftedTimes
    cache: KvCapacity
    drafter: Drafter | None = None
    """Drafter of speculative decoding that takes GPU time."""

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
    """Create an instance with the layout of an unresolved run on a machine.

    `most_tokens` and `most_requests` of a step are vLLM's `max_num_batched_tokens` and
    `max_num_seqs`; `gpu_memory_utilization` is the share of memory that the engine takes. Raises
    UserError where the run cannot be had, its steps have no table, or no request fits beside the
    weights.
    """
    if model.encoder_num_layers:
        raise UserError(
            f"serve: {model.name} has an encoder, too: its steps have no table of times; "
            "`stagewright simulate --mode prefill` and `--mode decode` time single steps"
        )
    cache = kv_capacity(run, model, _memory(run, machine, gpu_memory_utilization), most_tokens)
    limits = {"most_tokens": most_tokens, "most_requests": most_requests}
    return Instance(run, model, machine, step_times(run, model, machine, how, **limits), cache)


def _memory(run: Run, machine: Machine, share: float) -> int:
    memory = machine.hardware.memory if run.device_memory is None else read_bytes(run.device_memory)
    return int(memory * share)


def with_drafter(
    of: Instance,
    drafter: Drafter | None,
    how: Execution | None = None,
    *,
    gpu_memory_utilization: float = 0.9,
) -> Instance:
    """Add a drafter, whose passes follow each step; None: no change.

    `how` and `gpu_memory_utilization` as in `instance`.
    """
    if drafter is None:
        return of
    assert isinstance(of.times, StepTimes)
    memory = _memory(of.run, of.machine, gpu_memory_utilization)
    cache = kv_capacity(of.run, of.model, memory, of.times.most_tokens, drafter)
    times = drafted_times(of.times, drafter, of.machine, how)
    return replace(of, times=times, cache=cache, drafter=drafter)


def drafted_times(
    times: StepTimes, drafter: Drafter, machine: Machine, how: Execution | None = None
) -> DraftedTimes:
    """The step times of a model with those of its drafter on the same machine."""
    limits = {"most_tokens": times.most_tokens, "most_requests": times.most_requests}
    new = drafter.number + drafter.more
    layout = drafter.run.model_copy(update={"num_speculative_tokens": new})
    first = step_times(layout, drafter.model, machine, how, **limits, logits=1)
    one_token = drafter.run.model_copy(update={"num_speculative_tokens": 0})
    later = (
        first if drafter.number == 1 else step_times(one_token, drafter.own, machine, how, **limits)
    )
    return DraftedTimes(times, first, later, drafter.number, drafter.more)


def kv_capacity(
    run: Run, model: ModelConfig, memory: int, most_tokens: int, drafter: Drafter | None = None
) -> KvCapacity:
    """KV blocks that fit into `memory` bytes of each GPU, next to a step of `most_tokens`.

    A block of a request's tokens is one of the model and one of what drafts for it (vLLM: one block
    table, and a cache for the layers of both). A head uses the model's embedding and output
    projection (`_maybe_share_embeddings` of vLLM's `llm_base_proposer.py`).
    """
    stages = _held(run, model, most_tokens)
    if drafter is not None:
        shared = frozenset({"embedding", "head"} if drafter.head else ())
        (drafts,) = _held(drafter.run, drafter.model, most_tokens, shared)
        stages = [held.beside(drafts) for held in stages]
    spare = max(allowance_of(run), ENGINE_BYTES)
    blocks = [
        (memory - of.parameters - of.activations - spare) // (of.block or of.request or 1)
        for of in stages
    ]
    if min(blocks) < 1:
        fullest = max(stages, key=lambda of: of.parameters + of.activations)
        raise UserError(
            f"serve: {run.describe()}: weights ({quantity(fullest.parameters, 'B')}) and "
            f"activations of {most_tokens} tokens ({quantity(fullest.activations, 'B')}) leave no "
            f"room for a block of the cache in {quantity(memory, 'B')} of a GPU, of which the "
            f"engine takes {quantity(spare, 'B')}; use more ranks (--tp), fewer tokens "
            "(--max-num-batched-tokens), fewer bits or more memory (--gpu-memory-utilization)"
        )
    fixed = max(-(-of.request // of.block) if of.block else 1 for of in stages)
    token_bytes = sum(of.once for of in stages)
    return KvCapacity(run.kv_block_size, min(blocks), token_bytes, fixed)


class RankBytes(NamedTuple):
    """Bytes of a rank of a pipeline stage."""

    parameters: int
    activations: int
    block: int
    """Bytes of a block of the cache."""
    request: int
    """Bytes of a request, whatever its length."""
    once: float
    """Bytes of a token in the cache on all ranks of tp, without copies."""

    def beside(self, other: RankBytes) -> RankBytes:
        """Add the bytes of a second model, whose steps follow the first one's."""
        return RankBytes(
            self.parameters + other.parameters,
            max(self.activations, other.activations),
            self.block + other.block,
            self.request + other.request,
            self.once + other.once,
        )


def _held(
    run: Run, model: ModelConfig, most_tokens: int, shared: frozenset[str] = frozenset()
) -> list[RankBytes]:
    """Bytes of the ranks of each stage in a prefill step, without `shared` blocks."""
    longest = most_tokens
    if model.position == "learned":
        longest = min(most_tokens, model.max_position_embeddings)
    count = -(-most_tokens // longest)
    prompts = batch_run(run, [Group(run.dp * count, 0, longest)]).resolved(model)
    prompts = prompts.model_copy(update={"max_model_len": None})
    check(prompts, model)
    load = loads(prompts, model)
    step = ServingStep.of(prompts, model, {}, load.sizes)
    # All requests of a replica at once, whatever the pipeline makes of them.
    base = loads(prompts.model_copy(update={"pp": 1}), model).sizes[0]
    kernels = {v: block.tasks for v, block in step.lower_blocks(base).items()}
    stages = [
        [placed for placed in stage if placed[0].block not in shared] for stage in step.stages
    ]
    memory_of = ServingMemory(stages, step.graphs, kernels, step.extent)
    block = prompts.kv_block_size
    ranks = prompts.tp / _copies(step, model)

    def held(rank: int, **changed: int) -> Mapping[str, int]:
        return memory_of.by_category(rank, [{**base, **changed}])

    stages_bytes: list[RankBytes] = []
    local = [reach.kind for reach in model.reaches if reach.kind]
    # Layers whose queries choose keys keep all tokens, too.
    all_tokens = ["", *(reach.kind for reach in model.reaches if reach.top)]
    for rank in range(prompts.pp):
        usage = held(rank)
        one_block, two_blocks = (
            {
                f"{name}{kind}": n * many
                for kind in all_tokens
                for name, many in (("L", block), ("I", 1))
            }
            for n in (1, 2)
        )
        of_block = held(rank, **two_blocks)["kv_cache"] - held(rank, **one_block)["kv_cache"]
        nothing = dict.fromkeys(("L", *(f"L{kind}" for kind in local)), 0)
        in_windows = {
            f"L{reach.kind}": _kept(reach.window or reach.chunk, block)
            for reach in model.reaches
            if reach.window or reach.chunk
        }
        of_request = held(rank, **nothing, requests=2)["kv_cache"]
        of_request -= held(rank, **nothing, requests=1)["kv_cache"]
        of_request += held(rank, **{**nothing, **in_windows})["kv_cache"]
        of_request -= held(rank, **nothing)["kv_cache"]
        stages_bytes.append(
            RankBytes(
                usage["parameters"], usage["activations"], of_block, of_request,
                of_block / block * ranks,
            )
        )  # fmt: skip
    return stages_bytes


def _kept(window: int, block: int) -> int:
    """Places that a request's last `window` tokens take, which begin anywhere in a block."""
    return -(-(window + block - 1) // block) * block


def _copies(step: ServingStep, model: ModelConfig) -> int:
    """Ranks of tp that hold the same keys."""
    heads = 1 if model.kv_lora_rank else model.num_query_groups
    return max(1, step.run.tp // heads) if heads else 1
