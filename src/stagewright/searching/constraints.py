"""Constraints of candidates: the checks of a run, called once per distinct tuple.

A constraint is one of `run.rules.checks`, or a check of compiling and executing. Each distinct
tuple of the settings that it reads is checked once, on one run. Errors are those of that run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.arrays import Bool, Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.lower.routing import BusiestRanks, Load, Routing
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.run.rule import ALL, EACH, RunCheck
from stagewright.run.rules import AS_GIVEN, BATCH_CHECK, checks
from stagewright.run.settings import Run
from stagewright.run.training_rules import AXES_ONCE
from stagewright.schedule.schedules import check_name
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates
from stagewright.time.dispatch import Routed
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate import ep_overlap

MOST_CHECKS = 300_000
"""Limit of distinct tuples per constraint; more would take minutes."""
_VECTORIZE_ABOVE = 1000
"""Number of tuples above which a vectorized check is faster."""


class TooManyChecks(Exception):
    """A constraint would check more tuples than `MOST_CHECKS`."""

    def __init__(self, reads: Iterable[str], count: int) -> None:
        """`reads`: the settings that vary."""
        super().__init__()
        self.reads, self.count = tuple(reads), count

    def as_user_error(self, combinations: float) -> UserError:
        """Error of a space with this number of combinations."""
        return UserError(
            f"the space has up to {combinations:.2g} combinations: {' x '.join(self.reads)} alone "
            f"are {self.count:,}, wanted at most {MOST_CHECKS:,}; give fewer values"
        )


@dataclass(slots=True, eq=False)
class Constraint:
    """Check of candidates, with a cache of its results."""

    requirement: str
    reads: tuple[str, ...]
    """Columns that decide the check; `ALL`: any."""
    check: Callable[[Candidates, int], None]
    """Raises a UserError for a refused candidate, by its index."""
    vectorized: Callable[[Candidates], Bool] | None = None
    """Mask of refused candidates, if that is faster than `check`."""
    examples: list[str] = field(default_factory=list[str])
    """First error of each wording, numbers ignored."""
    _cache: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])

    def refused(self, candidates: Candidates) -> Int:
        """Index of the example that refuses each candidate, or -1; raises `TooManyChecks`."""
        reads = tuple(candidates.columns) if self.reads == ALL else self.reads
        names = [name for name in reads if name in candidates.columns]
        first, of = candidates.distinct(*names)
        if self.vectorized is not None and len(first) > _VECTORIZE_ABOVE:
            mask = self.vectorized(candidates)
            example = self._check_one(candidates, int(np.argmax(mask))) if mask.any() else -1
            return np.where(mask, example, -1)
        if len(first) > MOST_CHECKS:
            vary = (name for name in names if len(candidates.columns[name].values) > 1)
            raise TooManyChecks(vary, len(first))
        codes = [candidates.columns[name].codes[first].tolist() for name in names]
        keys = list(zip(*codes, strict=True)) if codes else [()] * len(first)
        for key, index in zip(keys, first.tolist(), strict=True):
            if key not in self._cache:
                self._cache[key] = self._check_one(candidates, index)
        return np.array([self._cache[key] for key in keys], dtype=np.int64)[of]

    def _check_one(self, candidates: Candidates, index: int) -> int:
        try:
            self.check(candidates, index)
        except UserError as error:
            text = str(error)
            for number, example in enumerate(self.examples):
                if same_words(example, text):
                    return number
            self.examples.append(text)
            return len(self.examples) - 1
        return -1


def same_words(text: str, other: str) -> bool:
    """True if two messages differ in numbers only.

    >>> same_words("vpp=2 splits stages", "vpp=3 splits stages"), same_words("tp=2", "pp=2")
    (True, False)
    """
    return re.sub(r"[0-9]+", "", text) == re.sub(r"[0-9]+", "", other)


def constraints(mode: str, model: ModelConfig) -> list[Constraint]:
    """Constraints of candidates, in the order in which a run is checked.

    Checks of single settings are left out (`check_value`).
    """
    explicit = [_of_explicit(check) for check in AS_GIVEN]
    unresolved = [_of_unresolved(check) for check in checks(mode, model) if check.reads != EACH]
    return explicit + unresolved + _beyond_runs(mode, model)


def check_value(run: Run, model: ModelConfig) -> None:
    """Raise a UserError for a setting that the mode lacks, or a value that no mode allows."""
    if run.schedule is not None:
        check_name(run.schedule)
    AXES_ONCE.check(run, model)
    for check in checks(run.mode, model):
        if check.reads == EACH:
            check.check(run.unresolved(), model)


def _of_explicit(check: RunCheck) -> Constraint:
    def check_one(candidates: Candidates, index: int) -> None:
        check.check(candidates.run(index), candidates.model)

    return Constraint(check.name, check.reads, check_one)


def _of_unresolved(check: RunCheck) -> Constraint:
    def check_one(candidates: Candidates, index: int) -> None:
        check.check(candidates.run(index).unresolved(), candidates.model)

    vectorized = _batch_is_not_divisible if check is BATCH_CHECK else None
    return Constraint(check.name, check.reads, check_one, vectorized)


def _batch_is_not_divisible(candidates: Candidates) -> Bool:
    """Mask of candidates whose batch is no multiple of their microbatches."""
    batch = candidates.numbers("global_batch_size")
    remainder = batch % (candidates.numbers("micro_batch_size") * candidates.numbers("dp"))
    return (batch != ABSENT) & (remainder != 0)


def _beyond_runs(mode: str, model: ModelConfig) -> list[Constraint]:
    """Constraints of compiling and executing a run."""
    mesh = ("tp", "cp", "dp", "ep", "etp", "order", "zero", "dp_shard", "dcp")
    ep_overlap_reads = (
        *("overlap_moe_expert_parallel_comm", "ep", "moe_token_dispatcher_type"),
        *("pp", "vpp", "recompute"),
    )
    result = [
        Constraint(
            "axes of experts and heads fit the ranks",
            mesh if model.num_experts else ("tp", "cp", "dcp"),
            _check_mesh,
        ),
        Constraint(
            "expert_load suits the ranks of experts",
            ("expert_load", "sequence_parallel", "tp", "cp", "dp", "ep", "etp", "order"),
            _expert_load_check(),
        ),
        Constraint(
            "overlap_moe_expert_parallel_comm is possible", ep_overlap_reads, _check_ep_overlap
        ),
        Constraint(
            "moe_flex_dispatcher is possible",
            ("moe_flex_dispatcher", "ep", "moe_token_dispatcher_type"),
            _check_flex_dispatcher,
        ),
        Constraint(
            "cuda_graph_modules are captured",
            ("launch_mode", "cuda_graph_modules"),
            _check_execution,
        ),
    ]
    if mode == "train":
        result.append(
            Constraint("the hardware has the precision", (HARDWARE, "precision"), _check_precision)
        )
    return result


def _check_execution(candidates: Candidates, index: int) -> None:
    candidates.execution(index)


def _check_mesh(candidates: Candidates, index: int) -> None:
    parallelization(candidates.run(index).resolved(candidates.model), candidates.model)


def _expert_load_check() -> Callable[[Candidates, int], None]:
    """Check of expert loads; a file is read once per division of experts and tokens."""
    errors: dict[tuple[Any, ...], str] = {}

    def check(candidates: Candidates, index: int) -> None:
        load, model = candidates.column("expert_load").at(index), candidates.model
        if load is None or not model.num_experts:
            return
        run = candidates.run(index).resolved(model)
        mesh, plan = parallelization(run, model)
        routing = Routing.of(run, model, mesh, plan, tokens=0)
        key = load, routing.positions, routing.expert, routing.tokens
        if key not in errors:
            errors[key] = ""
            try:
                if run.mode == "train":
                    Load.read(load, routing, model)
                else:
                    BusiestRanks.of(run, model, mesh, plan)
            except UserError as error:
                errors[key] = str(error)
        if errors[key]:
            raise UserError(errors[key])

    return check


def _check_ep_overlap(candidates: Candidates, index: int) -> None:
    if candidates.execution(index).overlap_moe_expert_parallel_comm:
        ep_overlap.check(candidates.run(index))


def _check_flex_dispatcher(candidates: Candidates, index: int) -> None:
    if candidates.execution(index).moe_flex_dispatcher:
        Routed.of(candidates.run(index).resolved(candidates.model), candidates.model)


def _check_precision(candidates: Candidates, index: int) -> None:
    precision = PRECISIONS[candidates.run(index).precision]
    peak_flops(candidates.hardware(index), precision.product)


SAME_RUN: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "schedule": ({"pp": 1},),
    "microbatch_group_size_per_vp_stage": ({"pp": 1}, {"vpp": 1}),
    "first_stage_less_layers": ({"pp": 1},),
    "last_stage_less_layers": ({"pp": 1},),
}
"""Values of other settings that cancel a setting's effect, besides those it declares (`idle`)."""
