"""Constraints of candidates: the checks of a run, called once per distinct tuple.

A constraint is one of `run.rules.rules`, or a check of compiling and executing. Each distinct
tuple of the settings that it reads is checked once, on one run. Errors are those of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.arrays import Int
from stagewright.blocks.recipe import PRECISIONS
from stagewright.errors import UserError
from stagewright.lower.routing import BusiestRanks, Load, Routing
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.run.rule import ALL, EACH
from stagewright.run.rules import rules
from stagewright.run.settings import Run
from stagewright.run.tool_files import Rule, rules_of
from stagewright.run.training_rules import AS_GIVEN, degrees_once
from stagewright.schedule.schedules import check_name
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.time.dispatch import DispatchKernels
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate import ep_overlap

MOST_CHECKS = 300_000
"""Limit of distinct tuples per constraint; more would take minutes."""
Check = Callable[[Candidates, int], object]
"""Raises a UserError for a refused candidate, by its index."""


@dataclass(slots=True, eq=False)
class Constraint:
    """Check of candidates, with a cache of its results."""

    requirement: str
    """Name of the rule of runs, or of the check; `wanted` in JSON."""
    reads: tuple[str, ...]
    """Columns that decide the check; `ALL`: any."""
    check: Check
    errors: dict[str, int] = field(default_factory=dict[str, int])
    """Error messages of refused candidates, numbered by first occurrence."""
    _cache: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])

    def reads_any_of(self, settings: Set[str]) -> bool:
        """True if some of these settings decide the check."""
        return bool(settings if self.reads == ALL else settings & {*self.reads})

    def refused(self, candidates: Candidates, combinations_left: int = 1) -> Int:
        """Number of the error that refuses each candidate, or -1.

        UserError for too many checks, of candidates that stand for `combinations_left` each.
        """
        reads = tuple(candidates.columns) if self.reads == ALL else self.reads
        names = [name for name in reads if name in candidates.columns]
        first, of = candidates.distinct(*names)
        if len(first) > MOST_CHECKS:
            vary = [name for name in names if len(candidates.columns[name].values) > 1]
            raise UserError(
                f"the space has up to {len(candidates) * combinations_left:.2g} combinations: "
                f"{' x '.join(vary)} alone are {len(first):,}, wanted at most {MOST_CHECKS:,}; "
                "give fewer values"
            )
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
            return self.errors.setdefault(str(error), len(self.errors))
        return -1


def check_value(run: Run, model: ModelConfig) -> None:
    """Raise a UserError for a setting that the mode lacks, or a value that no mode allows."""
    if run.schedule is not None:
        check_name(run.schedule)
    degrees_once.check(run, model)
    for rule in rules(run.mode, model):
        if rule.reads == EACH:
            rule.check(run.unresolved(), model)


def constraints(mode: str, model: ModelConfig) -> list[Constraint]:
    """Constraints of candidates, in the order in which a run is checked.

    Checks of single settings are left out (`check_value`).
    """
    as_given = [Constraint(of.name, of.reads, _on_run(of.check)) for of in AS_GIVEN]
    unresolved = [
        Constraint(of.name, of.reads, _on_run(of.check, Run.unresolved))
        for of in rules(mode, model)
        if of.reads != EACH
    ]
    mesh = ("tp", "cp", "dp", "ep", "etp", "order", "zero", "dp_shard", "dcp")
    beyond_runs = [
        Constraint(
            "axes of experts and heads fit the ranks",
            mesh if model.num_experts else ("tp", "cp", "dcp"),
            lambda candidates, n: parallelization(candidates.run(n).resolved(model), model),
        ),
        Constraint(
            "expert_load suits the ranks of experts",
            ("expert_load", "sequence_parallel", "tp", "cp", "dp", "ep", "etp", "order"),
            _expert_load_check(),
        ),
        Constraint(
            "overlap_moe_expert_parallel_comm is possible",
            (
                *("overlap_moe_expert_parallel_comm", "ep", "moe_token_dispatcher_type"),
                *("pp", "vpp", "recompute"),
            ),
            _check_ep_overlap,
        ),
        Constraint(
            "moe_flex_dispatcher is possible",
            ("moe_flex_dispatcher", "ep", "moe_token_dispatcher_type"),
            _check_flex_dispatcher,
        ),
        Constraint(
            "cuda_graph_modules are captured",
            ("launch_mode", "cuda_graph_modules"),
            lambda candidates, n: candidates.execution(n),
        ),
    ]
    if mode == "train":  # in inference weights are converted where the hardware lacks a precision
        beyond_runs.append(
            Constraint("the hardware has the precision", (HARDWARE, "precision"), _check_precision)
        )
    return as_given + unresolved + beyond_runs


def tool_constraints(tool: str, settings: Set[str]) -> list[Constraint]:
    """Constraints that a tool has a flag for some settings: `search --as`."""

    def has_flag(rule: Rule) -> Check:
        def check(candidates: Candidates, index: int) -> None:
            for line in rule(candidates.trained(index)):
                if line.missing in settings:
                    raise UserError(line.comment)

        return check

    return [
        Constraint(f"{tool} has a flag for it", reads, has_flag(rule))
        for reads, rule in rules_of(tool, settings)
    ]


def _on_run(
    check: Callable[[Run, ModelConfig], None], prepare: Callable[[Run], Run] = lambda run: run
) -> Check:
    return lambda candidates, n: check(prepare(candidates.run(n)), candidates.model)


def _expert_load_check() -> Check:
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
        DispatchKernels.of(candidates.run(index).resolved(candidates.model), candidates.model)


def _check_precision(candidates: Candidates, index: int) -> None:
    precision = PRECISIONS[candidates.run(index).precision]
    peak_flops(candidates.hardware(index), precision.product)
