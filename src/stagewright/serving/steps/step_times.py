"""Seconds of an engine's steps as functions of its batch, for an event loop.

A replica's batch is described by sums over its requests: new tokens, pairs of a query and a key
that it sees, keys in the cache after the step, and the number of requests. Arguments and results
are plain ints and floats; a call takes a few microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stagewright.model.config import ModelConfig
from stagewright.program.columns import COLLECTIVES
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.batch import UNLIMITED, BatchPlan, DecodeRun
from stagewright.serving.host import NO_HOST, HostTimes
from stagewright.serving.steps.rows import StepRows
from stagewright.serving.steps.step_table import (
    BatchSums,
    StepTable,
    step_table,
    tabulate,
    total_seconds,
)
from stagewright.time.network import Machine


def batch_run(run: Run, groups: Sequence[Group]) -> Run:
    """Run of one step with these requests, in the layout of an unresolved run.

    A request that has tokens in the cache and gets one token (and its drafts) decodes. A step with
    any such request is one of decode, beside which others' prompts are computed.
    """
    new = 1 + run.num_speculative_tokens
    decodes = any(g.context_length and g.new_tokens == new for g in groups)
    changed = {
        "mode": "decode" if decodes else "prefill",
        "requests": tuple(groups),
        "batch_size": None, "prompt_length": None, "context_length": None, "output_length": None,
        "num_speculative_tokens": run.num_speculative_tokens if decodes else 0,
    }  # fmt: skip
    return run.model_copy(update=changed)


def step_times(
    run: Run,
    model: ModelConfig,
    machine: Machine,
    execution: Execution | None = None,
    *,
    max_tokens: int = 8192,
    max_requests: int = 1024,
    logits: int | None = None,
) -> StepTimes:
    """Step times of a layout on a machine with its number of GPUs.

    `run` is not resolved: settings that it leaves open resolve as in steps of decode or of prompts.
    `logits`: output positions per decoding request; None: 1 + drafts. Steps with more than
    `max_tokens` or `max_requests` are extrapolated. Raises UserError where the run is not
    possible, or its steps have no table.
    """
    execution = execution or Execution()
    run = run.model_copy(update={"max_model_len": None})  # lengths of tables are not of requests
    new = 1 + run.num_speculative_tokens
    logits = logits or new
    half = min(1024, (model.max_position_embeddings - new) // 2)  # of learned positions
    context = half if model.position == "learned" else 1024
    decoding, chunk = Group(1, context, new), Group(1, context, min(512, context))

    def resolved(*groups: Group) -> Run:
        # dp x pp requests: one in every batch of every replica.
        count = run.dp * run.pp
        return batch_run(run, [replace(g, count=count) for g in groups]).resolved(model)

    timed: list[StepRows] = []

    def rows(step: Run) -> StepRows:
        """Rows of a step; steps of equal blocks have the same."""
        for other in timed:
            if (equal := other.of_run(step)) is not None:
                return equal
        limit = max(max_tokens, max_requests * new)
        timed.append(StepRows(step, model, machine, execution, limit))
        return timed[-1]

    decode_step, prompt_step = resolved(decoding), resolved(chunk)
    decode_rows, prompt_rows = rows(decode_step), rows(prompt_step)
    max_decoding = max_requests * new
    decode = step_table(decode_rows, decode_step, max_decoding, max_decoding, new, logits)
    mixed = None
    if model.state_space is None:  # as `run.serving_rules` has it
        mixed_step = resolved(decoding, chunk)
        mixed = step_table(decode_rows, mixed_step, max_tokens, max_decoding, new, logits)
    prompts = uncached_prompts = step_table(prompt_rows, prompt_step, max_tokens, max_requests)
    if model.kv_lora_rank:
        uncached_step = resolved(replace(chunk, context_length=0))
        uncached_prompts = step_table(rows(uncached_step), uncached_step, max_tokens, max_requests)
    shared = _shared_experts(prompt_rows, max_tokens)
    return StepTimes(max_tokens, max_requests, decode, mixed, prompts, uncached_prompts, shared)


def _shared_experts(rows: StepRows, max_tokens: int) -> list[float] | None:
    """Seconds of experts for `StepTimes.shared`, beyond those of one token."""
    run, model = rows.step.run, rows.step.model
    if run.dp == 1 or run.ep == 1 or run.pp > 1 or not model.num_experts:
        return None
    octaves = np.arange(0, np.log2(max_tokens) + 0.25, 0.25)
    grid = np.unique(np.rint(np.exp2(octaves)).astype(np.int64))
    (rank,), (seconds,) = rows.ranks, rows.seconds_with_routed(grid)
    total = total_seconds(seconds, rank.block, rows.kept[0])
    if rows.gathers:
        sent = rank.tasks.collective == COLLECTIVES.index("all_to_all")
        exchanges = total_seconds(rows.seconds()[0] * sent[:, None], rank.block, rows.kept[0])
        total = total + np.interp(grid.astype(np.float64), rows.grid.astype(np.float64), exchanges)
    return tabulate(max_tokens, grid, total - total[0])


class DecodePieces(NamedTuple):
    """Seconds of decode steps of some number of requests: piecewise linear in keys."""

    edges: list[float]
    """Keys at which each piece after the first begins."""
    intercept: list[float]
    """Seconds of a piece, extrapolated to no keys."""
    slope: list[float]
    """Seconds per key."""


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Seconds between two step starts of a replica; with pp, one round of all batches.

    `keys`: tokens in the KV cache after the step, context and new ones, summed over requests.
    `pairs`: pairs of a query and a key, `new * context + new * (new + 1) / 2` of each request.
    """

    max_tokens: int
    max_requests: int
    decoding: StepTable
    """Steps in which requests decode."""
    mixed: StepTable | None
    """Steps with prompts and decoding requests; None: there are no such steps."""
    prompts: StepTable
    """Steps with prompts alone."""
    uncached_prompts: StepTable
    """Steps with prompts alone, of which no token is in the cache."""
    shared: list[float] | None
    """Seconds of experts by tokens of a replica, if all replicas have equal numbers of tokens.

    None: replicas share no experts."""
    drafting: DraftingTimes | None = None
    """Passes of a drafter after each step; None: drafts take no time."""
    host: HostTimes = NO_HOST
    """Host overhead of each step."""
    host_in_group: bool = False
    """Host time is added by `group_runs`, not by `step` and `linear_run`.

    The GPU's time, which the host's overlaps, depends on the tokens of all replicas."""
    _pieces: dict[int, DecodePieces] = field(default_factory=dict[int, DecodePieces])

    def with_host(self, host: HostTimes) -> StepTimes:
        """Step times with the host overhead of an engine."""
        return replace(self, host=host)

    def of_replica(self, host: HostTimes) -> StepTimes:
        """Step times of one engine, of a lockstep group if replicas share experts."""
        return replace(self, host=host, host_in_group=self.shared is not None and host.overlaps_gpu)

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Seconds of a step with any batch, of which `num_decodes` requests decode.

        `decode_keys`: the part of `keys` that belongs to these.
        """
        batch = BatchSums(tokens, pairs, keys, requests, num_decodes, decode_keys)
        if not num_decodes:
            seconds = (self.prompts if keys > tokens else self.uncached_prompts).seconds(batch)
        elif num_decodes < requests:
            seconds = self._mixed_seconds(batch)
        else:
            seconds = self._decode(requests, decode_keys).seconds
        if self.drafting is not None:
            seconds += self.drafting.step(batch)
        return seconds if self.host_in_group else self.host.step_interval(seconds, requests)

    def _mixed_seconds(self, batch: BatchSums) -> float:
        """Seconds of a step with prompts and requests that decode, without drafts."""
        together = math.inf
        if self.mixed is not None:
            together = self.mixed.seconds(batch)
            if self.uncached_prompts is self.prompts:
                return together
        # One after the other, if that is faster: latent attention has another form for prompts.
        prompts = self.decoding.prompts_of(batch)
        table = self.prompts if prompts.keys > prompts.tokens else self.uncached_prompts
        decode = self._decode(int(batch.num_decodes), int(batch.decode_keys))
        return min(together, table.seconds(prompts) + decode.seconds)

    # ---- decode ----------------------------------------------------------------------------------

    def linear_run(self, requests: int, keys: int) -> DecodeRun:
        """Run of the next decode steps, as long as their durations are a series (at least 1)."""
        host = self.host
        if self.drafting is None and not host.overlaps_gpu:  # without copies of runs: most steps
            return self._decode(requests, keys, host.exposed(requests))
        run = self._decode(requests, keys)
        if self.drafting is not None:
            run = self.drafting.linear_run(run, requests, keys)
        return run if self.host_in_group else host.run_with_host(run, requests)

    def decode(self, requests: int, keys: int) -> float:
        """Seconds of one decode step; `keys` in the cache after it, summed over requests."""
        return self.linear_run(requests, keys).seconds

    def _decode(self, requests: int, keys: int, host: float = 0.0) -> DecodeRun:
        """Run of the next decode steps with `host` seconds in each, without a drafter."""
        edges, intercepts, slopes = self._pieces.get(requests) or self._decode_pieces(requests)
        n = bisect_right(edges, keys)
        slope, steps = slopes[n], UNLIMITED
        if n < len(edges):
            # Rounded up: each step adds a key per request.
            steps = -int((keys - edges[n]) // requests)
        return DecodeRun(steps, intercepts[n] + slope * keys + host, slope * requests)

    def _decode_pieces(self, requests: int) -> DecodePieces:
        """Seconds of decode steps of `requests` with equal contexts.

        They are computed at the knots of the table, and linear in the context between these.
        """
        table, knots = self.decoding, self.decoding.knots
        new, seconds = table.new, list[float]()
        for keys in knots.tolist():
            pairs = keys * new - new * (new - 1) / 2
            sums = requests * new, requests * pairs, requests * keys, requests
            seconds.append(table.seconds(BatchSums(*sums, requests, requests * keys)))
        slopes = np.diff(seconds) / np.diff(knots)
        intercepts = np.array(seconds[:-1]) - slopes * knots[:-1]
        edges = knots[1:-1] * requests
        pieces = DecodePieces(edges.tolist(), intercepts.tolist(), (slopes / requests).tolist())
        self._pieces[requests] = pieces
        return pieces

    # ---- lockstep groups -------------------------------------------------------------------------

    def group_runs(self, plans: Sequence[BatchPlan], mean_tokens: float) -> list[DecodeRun]:
        """Runs of the replicas of a lockstep group, whose experts get the tokens of all.

        `mean_tokens`: tokens of a replica's step on average.
        """
        runs: list[DecodeRun] = []
        for run, tokens, requests in plans:
            in_group = run._replace(seconds=self.in_group(run.seconds, tokens, mean_tokens))
            if self.host_in_group:
                in_group = self.host.run_with_host(in_group, requests)
            runs.append(in_group)
        return runs

    def in_group(self, seconds: float, tokens: int, mean_tokens: float) -> float:
        """Seconds of a step with `tokens` where replicas have `mean_tokens` on average.

        `seconds`: of the step if all replicas had equal numbers of tokens. Drafts take as long as
        then.
        """
        if self.shared is None:
            return seconds
        last = len(self.shared) - 1
        of_all = self.shared[min(round(mean_tokens), last)]
        with_all = seconds - self.shared[min(tokens, last)] + of_all
        if with_all > 0.0:
            return with_all
        # The table of experts is of prompts: where other paths make decode shorter than their
        # difference, the step is one of a single token, and never of no length.
        return min(seconds, self._decode(1, self.decoding.new).seconds)


@dataclass(frozen=True, slots=True, eq=False)
class DraftingTimes:
    """Seconds of a drafter's passes, which follow each step: as many as there are drafts.

    As in vllm-project/vllm@82720b1e `vllm/v1/spec_decode/llm_base_proposer.py` (`propose`): a first
    pass over all tokens of the step, prompts and wrong drafts included, samples one draft of each
    request; then each further draft is a pass with one token of each request. `draft_extend` and
    `draft_forward` of SGLang (python/sglang/srt/speculative/eagle_worker.py) and `MTPEagleWorker`
    of TensorRT-LLM (tensorrt_llm/_torch/speculative/mtp.py) run the same passes.

    The drafter reads the tokens that the step sampled on the GPU and does not wait for the host
    (`GPUModelRunner.sample_tokens` of vLLM, vllm/v1/worker/gpu_model_runner.py, calls
    `propose_draft_token_ids` before `_bookkeeping_sync`): a host that works beside the GPU works
    beside both, the step and its drafts.
    """

    first: StepTimes
    """Step times of the pass over all tokens."""
    later: StepTimes
    """Step times of a pass with one token of each request."""
    number: int
    """Drafts of a request."""
    extra_tokens: int
    """Further tokens of each request in the first pass: a separate model reads the token that the
    step sampled, too; a head reads it in place of the step's first one."""

    def linear_run(self, run: DecodeRun, requests: int, keys: int) -> DecodeRun:
        """Decode run of the model, and of all passes after its steps."""
        keys += self.extra_tokens * requests
        passes = [(1, run), (1, self.first.linear_run(requests, keys))]
        if self.number > 1:
            passes.append((self.number - 1, self.later.linear_run(requests, keys)))
        return DecodeRun(
            min(each.steps for _, each in passes),
            sum(count * each.seconds for count, each in passes),
            sum(count * each.growth for count, each in passes),
        )

    def step(self, batch: BatchSums) -> float:
        """Seconds of the passes after a step of the model."""
        tokens, pairs, keys, requests, num_decodes, decode_keys = map(int, batch)
        extra = self.extra_tokens
        keys += extra * requests
        first = self.first.step(
            tokens + extra * requests,
            pairs + extra * keys,
            keys,
            requests,
            num_decodes,
            decode_keys + extra * num_decodes,
        )
        return first + (self.number - 1) * self.later.decode(requests, keys)
