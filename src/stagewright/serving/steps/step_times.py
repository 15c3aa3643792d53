"""Seconds of the steps of a server: functions of the batch, for an event loop.

One replica's batch is described by sums over its requests: new tokens, pairs of a query and a key
that it sees, keys in the cache after the step, and the number of requests. All numbers that go in
and out are plain ints and floats; a call takes a few microseconds.
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
from stagewright.serving.steps.hosted import GpuTimes
from stagewright.serving.steps.rows import Known, StepRows
from stagewright.serving.steps.step_table import StepTable
from stagewright.serving.steps.table_builder import Chain, at_each, step_table
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
    how: Execution | None = None,
    *,
    most_tokens: int = 8192,
    most_requests: int = 1024,
    logits: int | None = None,
) -> StepTimes:
    """The step times of a layout on a machine of as many GPUs.

    `run` is not resolved: what it leaves open is as in steps of decode or of prompts. So many
    `logits` of a request that decodes are computed; None: those of its next token and its drafts.
    Numbers beyond `most_tokens` in a step and `most_requests` go on as at the end of the tables.
    Raises UserError where the run cannot be had, or its steps have no table.
    """
    how = how or Execution()
    known: Known = {}
    # Lengths of tables are not of requests.
    run = run.model_copy(update={"max_model_len": None})
    new = 1 + run.num_speculative_tokens
    most = max(most_tokens, most_requests * new)

    def rows(*groups: Group) -> StepRows:
        # As many requests as replicas have at least one in every batch of a pipeline.
        many = run.dp * run.pp
        of = batch_run(run, [Group(many, g.context_length, g.new_tokens) for g in groups])
        return StepRows.of(of.resolved(model), model, machine, how, most, known)

    half = min(1024, (model.max_position_embeddings - new) // 2)  # of learned positions
    context = half if model.position == "learned" else 1024
    decoding, chunk = Group(1, context, new), Group(1, context, min(512, context))
    logits, most_logits = logits or new, most_requests * new
    decode = step_table(rows(decoding), most_requests * new, most_logits, new, logits)
    mixed = None
    if model.state_space is None:  # as `run.serving_rules` has it
        mixed = step_table(rows(decoding, chunk), most_tokens, most_logits, new, logits)
    of_prompts = rows(chunk)
    prompts = fresh = step_table(of_prompts, most_tokens, most_requests, 1, 1)
    if model.kv_lora_rank:
        of_fresh = rows(replace(chunk, context_length=0))
        fresh = step_table(of_fresh, most_tokens, most_requests, 1, 1)
    shared = _shared_experts(of_prompts, most_tokens)
    return StepTimes(most_tokens, most_requests, decode, mixed, prompts, fresh, shared)


def _shared_experts(of: StepRows, most_tokens: int) -> list[float] | None:
    """`StepTimes.shared`, counted from the seconds of one token on."""
    run, model = of.step.run, of.step.model
    if run.dp == 1 or run.ep == 1 or run.pp > 1 or not model.num_experts:
        return None
    octaves = np.arange(0, np.log2(most_tokens) + 0.25, 0.25)
    grid = np.unique(np.rint(np.exp2(octaves)).astype(np.int64))
    (rows,), (seconds,) = of.timed.ranks, of.with_routed(grid)
    chain = Chain.of(rows.block, of.kept[0])
    total = chain.total(seconds)
    if of.gathers:
        sent = rows.tasks.collective == COLLECTIVES.index("all_to_all")
        exchanges = chain.total(of.seconds[0] * sent[:, None])
        total = total + np.interp(grid.astype(np.float64), of.grid.astype(np.float64), exchanges)
    return at_each(most_tokens, grid, total - total[0])


class Pieces(NamedTuple):
    """Seconds of decode steps of some number of requests: piecewise linear in keys."""

    edges: list[float]
    """Keys at which the next piece begins; the first piece begins at no keys."""
    at_none: list[float]
    per_key: list[float]


@dataclass(eq=False)
class StepTimes(GpuTimes):
    """Seconds of the steps of one replica; with a pipeline, of all its batches together."""

    most_tokens: int
    most_requests: int
    decoding: StepTable
    """Steps in which requests decode."""
    mixed: StepTable | None
    """Prompts beside requests that decode; None: there are no such steps."""
    prompts: StepTable
    """Prompts alone."""
    fresh: StepTable
    """Prompts alone of which no token is in the cache."""
    shared: list[float] | None
    """Seconds of experts by tokens of a replica, if all replicas have equal numbers of tokens.

    None: replicas share no experts."""
    _pieces: dict[int, Pieces] = field(default_factory=dict[int, Pieces])

    @property
    def share_experts(self) -> bool:
        """True if experts get the tokens of all replicas."""
        return self.shared is not None

    def step(
        self,
        tokens: int,
        pairs: int,
        keys: int,
        requests: int,
        num_decodes: int = 0,
        decode_keys: int = 0,
    ) -> float:
        """Seconds of any step: chunks of prompts, and `num_decodes` of the requests beside them.

        tokens: new ones; pairs: of a query and a key that it sees, context and new ones; keys: in
        the cache after the step; requests: all; each summed over all requests, those that decode
        included. decode_keys: the part of keys that belongs to these.
        """
        if num_decodes == requests:
            return self.linear_run(num_decodes, decode_keys or keys)[0]
        if not num_decodes:
            table = self.prompts if keys > tokens else self.fresh
            return table.seconds(tokens, pairs, keys, requests)
        together = math.inf
        if self.mixed is not None:
            together = self.mixed.seconds(tokens, pairs, keys, requests, num_decodes, decode_keys)
            if self.fresh is self.prompts:
                return together
        # One after the other, if that is faster: latent attention has another form for prompts.
        new = self.decoding.new
        own = decode_keys * new - num_decodes * new * (new - 1) // 2
        alone = self.step(
            tokens - num_decodes * new,
            max(pairs - own, 1),
            keys - decode_keys,
            requests - num_decodes,
        )
        return min(together, alone + self.linear_run(num_decodes, decode_keys)[0])

    # ---- decode ----------------------------------------------------------------------------------

    def linear_run(self, requests: int, keys: int) -> tuple[float, float, int]:
        """Like `BatchTimes.linear_run`."""
        edges, at_none, per_key = self._pieces.get(requests) or self._decode_pieces(requests)
        n = bisect_right(edges, keys)
        slope = per_key[n]
        steps = -int((keys - edges[n]) // requests) if n < len(edges) else 1 << 60
        return at_none[n] + slope * keys, slope * requests, steps

    def _decode_pieces(self, requests: int) -> Pieces:
        """Pieces of decode steps of `requests` with equal contexts, between the table's knots."""
        table, knots = self.decoding, self.decoding.knots
        new, values = table.new, list[float]()
        for keys in knots.tolist():
            pairs = keys * new - new * (new - 1) / 2
            batch = requests * new, requests * pairs, requests * keys, requests
            values.append(table.seconds(*batch, requests, requests * keys))
        slope = np.diff(values) / np.diff(knots)
        at_none = np.array(values[:-1]) - slope * knots[:-1]
        edges = knots[1:-1] * requests
        pieces = Pieces(edges.tolist(), at_none.tolist(), (slope / requests).tolist())
        self._pieces[requests] = pieces
        return pieces

    def in_group(self, seconds: float, tokens: int, mean_tokens: float) -> float:
        """Like `GpuTimes.in_group`.

        `seconds`: of the step where all have as many.
        """
        if self.shared is None:
            return seconds
        last = len(self.shared) - 1
        of_all = self.shared[min(round(mean_tokens), last)]
        found = seconds - self.shared[min(tokens, last)] + of_all
        # The table of experts is of prompts: where other paths make decode shorter than their
        # difference, the step is one of a single token, and never of no length.
        return found if found > 0.0 else min(seconds, self.decode(1, self.decoding.new))
