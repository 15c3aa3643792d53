"""Candidates for tests, from columns of settings."""

from collections.abc import Mapping

from stagewright.model.catalog import resolve as preset
from stagewright.run.experiment import Experiment
from stagewright.searching.candidates import HARDWARE, Candidates, Column
from stagewright.time.hardware import resolve


def candidates_of(base: Experiment, columns: Mapping[str, Column]) -> Candidates:
    """Candidates of a preset on H100, from columns of equal length."""
    run = base.run
    model = preset(run.model).with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    (count,) = {len(column) for column in columns.values()} or {1}
    hardware = {HARDWARE: Column.constant(resolve("h100-sxm"), count)}
    return Candidates(base, model, {**hardware, **columns}, count)
