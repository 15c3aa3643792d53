"""What candidates must satisfy: the checks of a run, made once for each distinct tuple.

A constraint is one of `run.rules.checks`, or of what compiling and executing ask for, with the
settings that it reads. For all candidates with the same values there the check itself is made
once, by the run of one of them, so that a candidate is refused if, and with the words with which,
its run is.
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
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import parallelization
from stagewright.run.rule import ALL, EACH, RunCheck
from stagewright.run.rules import AS_GIVEN, BATCH_CHECK, checks
from stagewright.run.settings import Run
from stagewright.run.training_rules import AXES_ONCE
from stagewright.schedule.schedules import check_name
from stagewright.searching.candidates import ABSENT, HARDWARE, Candidates
from stagewright.time.experts.dispatch import Routed
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate import ep_overlap

MOST_CHECKS = 300_000
"""Distinct tuples of settings that one constraint is asked about: of more it would take minutes."""
_MANY = 1000
"""Tuples from which on a constraint that can do so looks at whole columns."""


class TooManyChecks(Exception):
    """A constraint would have to be asked about more tuples than `MOST_CHECKS`."""

    def __init__(self, reads: Iterable[str], count: int) -> None:
        """`reads` are the settings that vary."""
        super().__init__()
        self.reads, self.count = tuple(reads), count

    def as_user_error(self, combinations: float) -> UserError:
        """What is said of a space of so many combinations."""
        return UserError(
            f"the space has up to {combinations:.2g} combinations: {' x '.join(self.reads)} alone "
            f"are {self.count:,}, wanted at most {MOST_CHECKS:,}; give fewer values"
        )


@dataclass(slots=True, eq=False)
class Constraint:
    """A check of candidates, with what it has found so far."""

    name: str
    """What it asks for, in words."""
    reads: tuple[str, ...]
    """The columns that decide it; `ALL`: any."""
    check: Callable[[Candidates, int], None]
    """Raises a UserError if a candidate, by its row, is refused."""
    refuses_rows: Callable[[Candidates], Bool] | None = None
    """The same as `check` of all candidates at once; None: nothing is quicker than `check`."""
    examples: list[str] = field(default_factory=list[str])
    """What the first run was told that was refused in these words, whatever their numbers."""
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])

    def refused(self, rows: Candidates) -> Int:
        """Which candidates it refuses: the number of their example, -1 of those that may be had.

        Raises `TooManyChecks`.
        """
        reads = tuple(rows.columns) if self.reads == ALL else self.reads
        names = [name for name in reads if name in rows.columns]
        tuples = rows.distinct(*names)
        if self.refuses_rows is not None and len(tuples) > _MANY:
            refused = self.refuses_rows(rows)
            example = self._refuses(rows, int(np.argmax(refused))) if refused.any() else -1
            return np.where(refused, example, -1)
        if len(tuples) > MOST_CHECKS:
            vary = (name for name in names if len(rows.columns[name].values) > 1)
            raise TooManyChecks(vary, len(tuples))
        codes = [rows.columns[name].codes[tuples.first].tolist() for name in names]
        keys = list(zip(*codes, strict=True)) if codes else [()] * len(tuples)
        bad = np.full(len(tuples), -1)
        for nth, (key, row) in enumerate(zip(keys, tuples.first.tolist(), strict=True)):
            if key not in self._known:
                self._known[key] = self._refuses(rows, row)
            bad[nth] = self._known[key]
        return bad[tuples.of]

    def _refuses(self, rows: Candidates, row: int) -> int:
        try:
            self.check(rows, row)
        except UserError as error:
            text = str(error)
            for nth, known in enumerate(self.examples):
                if same_words(known, text):
                    return nth
            self.examples.append(text)
            return len(self.examples) - 1
        return -1


def same_words(one: str, other: str) -> bool:
    """Whether two messages differ in numbers only.

    >>> same_words("vpp=2 splits stages", "vpp=3 splits stages"), same_words("tp=2", "pp=2")
    (True, False)
    """
    return _without_numbers(one) == _without_numbers(other)


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "", text)


def constraints(mode: str, model: ModelConfig) -> list[Constraint]:
    """All that a candidate must satisfy, in the order in which a run is checked.

    Checks that look at each setting by itself are not among them (`check_value`).
    """
    given = [_of_given(check) for check in AS_GIVEN]
    unresolved = [_of_run(check) for check in checks(mode, model) if check.reads != EACH]
    return given + unresolved + _beyond_runs(mode, model)


def check_value(run: Run, model: ModelConfig) -> None:
    """Raise a UserError for a run with a setting that its mode lacks, or with a value that no mode
    allows: an unknown schedule, or an order that does not list the axes."""
    if run.schedule is not None:
        check_name(run.schedule)
    AXES_ONCE.check(run, model)
    for check in checks(run.mode, model):
        if check.reads == EACH:
            check.check(run.unresolved(), model)


def _of_given(check: RunCheck) -> Constraint:
    return Constraint(
        check.name, check.reads, lambda rows, row: check.check(rows.run(row), rows.model)
    )


def _of_run(check: RunCheck) -> Constraint:
    def of(rows: Candidates, row: int) -> None:
        check.check(rows.run(row).unresolved(), rows.model)

    quick = _splits_no_batch if check is BATCH_CHECK else None
    return Constraint(check.name, check.reads, of, quick)


def _splits_no_batch(rows: Candidates) -> Bool:
    """Which candidates have a batch that their microbatches do not make."""
    batch = rows.numbers("global_batch_size")
    rest = batch % (rows.numbers("micro_batch_size") * rows.numbers("dp"))
    return (batch != ABSENT) & (rest != 0)


def _beyond_runs(mode: str, model: ModelConfig) -> list[Constraint]:
    """What compiling and executing a run ask for beyond its checks."""
    shared = ("tp", "cp", "dp", "ep", "etp", "order", "zero", "dp_shard", "dcp")
    found = [
        Constraint(
            "axes of experts and heads fit the ranks",
            shared if model.num_experts else ("tp", "cp", "dcp"),
            _check_mesh,
        ),
        Constraint(
            "overlap_moe_expert_parallel_comm is possible",
            (
                *("overlap_moe_expert_parallel_comm", "ep", "moe_token_dispatcher_type"),
                *("pp", "vpp", "recompute"),
            ),
            _check_expert_overlap,
        ),
        Constraint(
            "moe_flex_dispatcher is possible",
            ("moe_flex_dispatcher", "ep", "moe_token_dispatcher_type"),
            _check_flex_dispatcher,
        ),
        Constraint(
            "cuda_graph_modules are captured",
            ("launch_mode", "cuda_graph_modules"),
            lambda rows, row: _ignore(rows.execution(row)),
        ),
    ]
    if mode == "train":
        found.append(
            Constraint("the hardware has the precision", (HARDWARE, "precision"), _check_precision)
        )
    return found


def _ignore(value: object) -> None:
    """What was made to see whether it can be made is not needed."""


def _check_mesh(rows: Candidates, row: int) -> None:
    parallelization(rows.run(row).resolved(rows.model), rows.model)


def _check_expert_overlap(rows: Candidates, row: int) -> None:
    if rows.execution(row).overlap_moe_expert_parallel_comm:
        ep_overlap.check(rows.run(row))


def _check_flex_dispatcher(rows: Candidates, row: int) -> None:
    if rows.execution(row).moe_flex_dispatcher:
        Routed.of(rows.run(row).resolved(rows.model), rows.model)


def _check_precision(rows: Candidates, row: int) -> None:
    peak_flops(rows.hardware(row), PRECISIONS[rows.run(row).precision].product)


SAME_RUN: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "schedule": ({"pp": 1},),
    "microbatch_group_size_per_vp_stage": ({"pp": 1}, {"vpp": 1}),
    "first_stage_less_layers": ({"pp": 1},),
    "last_stage_less_layers": ({"pp": 1},),
}
"""Values of other settings with which these change nothing, beside what they declare (`idle`)."""
