"""The step times of layouts of a model on machines, from the tables of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stagewright.model.config import ModelConfig
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.serving.steps.batches import BatchSums, TimedBatches
from stagewright.serving.steps.known import KnownSteps
from stagewright.serving.steps.means import mean_sums
from stagewright.serving.steps.plain import PlainTable
from stagewright.serving.steps.shared_experts import shared_seconds
from stagewright.serving.steps.step_times import StepTimes, batch_run
from stagewright.serving.steps.tables import StepTable, TableSize, table
from stagewright.time.network import Machine

MANY = 256
"""Requests with which terms of decode are computed: they are proportional to requests."""


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
    """The step times of a layout; as `StepTables.times`, which makes those of several layouts."""
    return StepTables(model, most_tokens, most_requests).times(run, machine, how, logits)


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """Makes step times of layouts of one model; what layouts have in common is timed once.

    Numbers beyond `most_tokens` in a step and `most_requests` go on as at the end of the tables.
    """

    model: ModelConfig
    most_tokens: int = 8192
    most_requests: int = 1024
    known: KnownSteps = field(default_factory=KnownSteps.none)

    def times(
        self, run: Run, machine: Machine, how: Execution | None = None, logits: int | None = None
    ) -> StepTimes:
        """The step times of a layout on a machine of as many GPUs.

        `run` is not resolved: what it leaves open is as in steps of decode or of prompts. So many
        `logits` of a request that decodes are computed; None: those of its next token and its
        drafts. Raises UserError where the run cannot be had, or its steps have no table.
        """
        how, model, known = how or Execution(), self.model, self.known.of_layout()
        most_tokens, most_requests = self.most_tokens, self.most_requests
        # Lengths of tables are not of requests.
        run = run.model_copy(update={"max_model_len": None})
        drafts, latent = run.num_speculative_tokens, bool(model.kv_lora_rank)
        new = 1 + drafts
        timed = TableSize(max(most_tokens, most_requests * new), most_requests * new)

        def steps(
            groups: Sequence[Group], drafts: int, tokens: int
        ) -> tuple[PlainTable, StepTable]:
            # As many requests as replicas have at least one in every batch of a pipeline.
            many = run.dp * run.pp
            of = batch_run(run, [Group(many, g.context_length, g.new_tokens) for g in groups])
            batches = TimedBatches.of(of.resolved(model), model, machine, how, known)
            made = table(batches, TableSize(tokens, most_requests * (1 + drafts)), timed)
            return PlainTable(made, drafts, logits if drafts else None), made

        half = min(1024, (model.max_position_embeddings - new) // 2)  # of learned positions
        context = half if model.position == "learned" else 1024
        decoding, chunk = Group(1, context, new), Group(1, context, min(512, context))
        decode, of_decode = steps([decoding], drafts, most_requests * new)
        beside = None
        if model.state_space is None:  # as `run.serving_rules` has it
            beside, _ = steps([decoding, chunk], drafts, most_tokens)
        prompts, of_prompts = steps([chunk], 0, most_tokens)
        fresh = steps([Group(1, 0, min(512, context))], 0, most_tokens)[0] if latent else prompts
        knots, values = _decode_terms(of_decode, new)
        apart = latent or beside is None
        shared = shared_seconds(of_prompts.batches, most_tokens)
        return StepTimes(
            most_tokens, most_requests, decode, beside, prompts, fresh, knots, values, apart,
            _shared=None if shared is None else shared.tolist(),
        )  # fmt: skip


MOST_KEYS = 1 << 21
"""Of a request; beyond, decode steps go on as up to here."""


def _decode_terms(of: StepTable, new: int) -> tuple[list[float], list[list[float]]]:
    """Keys of a request, and each term's seconds of one request with so many, beside many others.

    Launches are not in them.
    """
    model = of.batches.step.model
    geometric = np.rint(np.exp2(np.arange(4, 21.01, 0.5)))
    edges = [reach.window or reach.chunk or reach.top for reach in model.reaches]
    near = [e + d for e in edges if e for d in (0, 1)]
    keys = np.unique([new, new + 1, *geometric.astype(int).tolist(), *near, MOST_KEYS])
    keys = keys[keys >= new].astype(np.int64)
    many = np.full(len(keys), MANY, dtype=np.int64)
    each = {
        reach: np.array([mean_sums(reach, float(k - new), float(new)) for k in keys.tolist()])
        for reach in model.reaches
    }
    sums = BatchSums(
        many, many * new, many * new,
        {reach: np.rint(MANY * x[:, 0]).astype(np.int64) for reach, x in each.items()},
        {reach: np.rint(MANY * x[:, 1]).astype(np.int64) for reach, x in each.items()},
    )  # fmt: skip
    values = [
        ((seconds - term.least) / MANY).tolist()
        for seconds, (term, _) in zip(of.exact_terms(sums), of.terms, strict=True)
    ]
    return keys.astype(float).tolist(), values
