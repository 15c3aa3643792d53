"""Layouts of values that a user sets: collected from modules, files and the caller."""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.algebra import notation
from stagewright.algebra.layout import Mesh
from stagewright.algebra.notation import Tensor
from stagewright.errors import UserError, did_you_mean
from stagewright.lower.blocks import build_block
from stagewright.lower.parameters import mark_trained
from stagewright.lower.recipe import recipe_of
from stagewright.lower.variants import place_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.placement import names_in_table
from stagewright.parallel.plan import Plan
from stagewright.run.settings import Run


def table_of(run: Run, model: ModelConfig, overrides: Mapping[str, str]) -> dict[str, Tensor]:
    """Layout of each named value: rows of modules, then of the run's file, then `overrides`.

    Later rows replace earlier ones. Raises UserError for a row that cannot be parsed.
    """
    rows: dict[str, Tensor] = {}
    for module in model.modules:
        rows |= module.table
        if model.bare:
            inputs = [f"{module.name}.{name}" for name, _, _ in module.inputs]
            same_as = {f"d_{name}": name for name in inputs}
            same_as |= {"x": inputs[0], "dx": inputs[0], "dy": f"{module.name}.{module.output}"}
            rows |= {name: rows[other] for name, other in same_as.items() if other in rows}
    if run.strategy is not None:
        rows |= notation.table(run.strategy)
    for name, layout in overrides.items():
        try:
            rows[name] = notation.tensor(layout)
        except notation.NotationError as error:
            raise UserError(f"table: {name}: {error}") from None
    return rows


def check_table(
    plan: Plan, mesh: Mesh, run: Run, model: ModelConfig, sizes: Mapping[str, int]
) -> None:
    """Raise UserError for rows of the plan's table that name no value, or do not fit it."""
    if not plan.table:
        return
    recipe = recipe_of(run, model)
    names: set[str] = set()
    placed: set[str] = set()
    stages = place_blocks(run, model)
    if run.mode == "train":
        stages = mark_trained(stages, run, model, recipe)
    for variant in {variant for stage in stages for variant, _ in stage}:
        graph = build_block(variant, model, recipe).graph
        names |= {n.binding.name or n.name for n in graph if n.phase != "optimizer"}
        placed |= names_in_table(graph, plan, mesh, sizes, model.name)
    of_modules = {name for module in model.modules for name in module.table}
    # Rows of modules may be unused.
    of_modules |= {"x", "dx", "dy", *(f"d_{name}" for name in of_modules)}
    unknown = sorted(set(plan.table) - placed - of_modules)
    if unknown:
        hint = did_you_mean(unknown[0], names) or "; see `stagewright show --graph` for the names"
        raise UserError(f"strategy: {model.name} has no value {unknown[0]!r}{hint}")
