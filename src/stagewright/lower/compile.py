"""Compile a run: check it, and call the pipeline of its mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.disaggregated import compile_disaggregated
from stagewright.lower.serving_step import compile_serving
from stagewright.lower.training import compile_training
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.program.columns import Program
from stagewright.run.requests import allowance_of, read_bytes
from stagewright.run.rules import check
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run


def compile(
    run: Run,
    model: ModelConfig | None = None,
    *,
    table: Mapping[str, str] | None = None,
    device_memory: int | None = None,
) -> CompiledRun:
    """Compile a run; raises UserError for an invalid one.

    `model` replaces the configuration that `run.model` names. `table`: layouts of values and
    parameters by name, such as `{"wq": "[M, A/tp, D]"}`; its rows override those of `run.strategy`
    and those that the degrees imply. `device_memory`: bytes of the hardware, if the run has none.
    """
    model = (model or resolve(run.model, run.as_family or "")).with_overrides(
        num_layers=run.layers, vocab_size=run.vocab, mtp_num_layers=run.mtp_num_layers
    )
    asked, run = run, run.resolved(model)
    check(run, model)
    limited = run
    if run.device_memory is None and device_memory is not None:
        limited = run.model_copy(update={"device_memory": device_memory})
    compiled = _compile_mode(limited, model, table or {})
    return replace(
        compiled,
        run=run,  # without the memory of the hardware, which is no setting of the run
        program=_with_allowance(compiled.program, run),
        device_memory=limited.device_memory and read_bytes(limited.device_memory),
        assumed=frozenset(name for name in SETTINGS if getattr(asked, name) is None),
    )


def _compile_mode(run: Run, model: ModelConfig, table: Mapping[str, str]) -> CompiledRun:
    if run.mode == "train":
        return compile_training(run, model, table)
    if run.prefill is not None:
        return compile_disaggregated(run, model, table)
    return compile_serving(run, model, table)


def _with_allowance(program: Program, run: Run) -> Program:
    """Add the run's `memory_allowance` to every class."""
    allowance = allowance_of(run)
    if not allowance:
        return program
    classes = [replace(c, allowance=allowance) for c in program.classes]
    return replace(program, classes=tuple(classes))
