"""Parameters of a model: their number, and those that train, by name or pattern, or as adapters.

A block whose input depends on no trained parameter needs no gradient of it. The graphs of earlier
blocks say which live values these are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from stagewright import blocks as model_blocks
from stagewright.blocks.adapters import LINEARS
from stagewright.errors import UserError, did_you_mean
from stagewright.graph.roles import Role
from stagewright.graph.table import LEAVES
from stagewright.lower.blocks import build_block
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import BlockVariant, PlacedVariant, place_blocks, tie_tables
from stagewright.lower.weight_storage import SCOPES
from stagewright.model.config import ModelConfig
from stagewright.run.requests import FROZEN
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run
from stagewright.schedule.schedules import make as make_order

Stages = Sequence[Sequence[PlacedVariant]]

# ---- number of parameters ------------------------------------------------------------------------


class TrainedParameters(NamedTuple):
    """Number of trained parameters, and of adapters, which a model's own count excludes."""

    trainable: int
    adapters: int = 0


@lru_cache(maxsize=16)
def parameters(model: ModelConfig) -> tuple[int, int]:
    """Number of parameters as published: all, and those that one token uses.

    Without padding; tied weights count once. Of a layer's experts, a token uses `top_k`.
    """
    run, sizes = Run(model=model.name), _published_sizes(model)
    one_stage = run.model_copy(update={"layers_per_stage": (model.depth,)})
    (stage,) = tie_tables(place_blocks(one_stage, model), make_order("1f1b", 1, 1, 1), model)
    recipe = replace(recipe_of(run, model), parameters_alone=True)
    total = active = 0
    for variant, count in Counter(variant for variant, _ in stage).items():
        for n in build_block(variant, model, recipe).graph:
            number = count * math.prod(d.value(sizes) for d in n.shape)
            total += number
            routed = n.binding.param is not None and n.binding.param.of_expert
            active += number * model.top_k // model.num_experts if routed else number
    return total, active


def count_trained(stages: Stages, run: Run, model: ModelConfig) -> TrainedParameters | None:
    """Number of trained parameters, with tied ones once; None: all of the model's."""
    if trains_all(run):
        return None
    recipe, sizes = recipe_of(run, model), _published_sizes(model)
    trainable = adapters = 0
    for (variant, _), times in Counter(chain.from_iterable(stages)).items():
        factors = {name for a in variant.training.adapters for name in a.factors}
        copies = {tie.name for tie in variant.ties if not tie.first}
        for p in build_block(variant, model, recipe).graph:
            if p.op != "param" or p.binding.buffer or p.binding.tied in copies:
                continue
            number = times * math.prod(d.value(sizes) for d in p.shape)
            trainable += number if p.name not in variant.training.frozen else 0
            adapters += number if p.name in factors else 0
    return TrainedParameters(trainable, adapters)


def _published_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes of a model's parameters as published: without padding."""
    seq_length = model.max_position_embeddings if model.vision else 1
    return sizes_of(Run(model=model.name).model_copy(update={"seq_length": seq_length}), model)


# ---- trained parameters --------------------------------------------------------------------------

WHAT_TRAINS = ("trainable", "freeze", "lora_rank", "lora_target_modules")
"""Settings that select trained parameters and adapters."""


def trains_all(run: Run) -> bool:
    """True if all parameters train, without adapters."""
    return run.trainable is None and run.freeze is None and run.lora_rank is None


def mark_trained(
    stages: Stages, run: Run, model: ModelConfig, recipe: model_blocks.Recipe
) -> list[list[PlacedVariant]]:
    """Mark the trained parameters of each block.

    Raises UserError for a name or pattern without a match, and where nothing trains.
    """
    if trains_all(run):
        return [[*stage] for stage in stages]
    selection = _Selection(stages, run, model, recipe)
    marked: list[list[PlacedVariant]] = []
    constant = frozenset[str]()  # live values that depend on no trained parameter
    for stage in stages:
        marked.append([])
        for variant, layer in stage:
            graph = build_block(variant, model, recipe).graph
            inputs = {n.binding.live_in for n in graph if n.op == "input" and n.phase == "forward"}
            training = selection.training(variant, layer)._replace(constant=constant & inputs)
            variant = variant._replace(training=training)
            outputs = build_block(variant, model, recipe).trained
            constant -= {name for name, trained in outputs.items() if trained}
            constant |= {name for name, trained in outputs.items() if not trained}
            marked[-1].append((variant, layer))
    selection.check()
    return marked


class _Selection:
    """Parameters that the names and patterns of a run select; collects those that match."""

    def __init__(
        self, stages: Stages, run: Run, model: ModelConfig, recipe: model_blocks.Recipe
    ) -> None:
        self.run, self.model, self.recipe = run, model, recipe
        self.matched: set[str] = set()
        """Names and patterns with a match."""
        self.names: set[str] = set()
        """Names of all parameters."""
        self.any_trains = False
        self.tables: dict[str, set[str]] = {}
        """Names of all copies of each tied table."""
        for variant, layer in chain.from_iterable(stages):
            for name, table in self._weights(variant).items():
                if table:
                    self.tables.setdefault(table, set()).update(_names(variant, layer, name))

    def _weights(self, variant: BlockVariant) -> dict[str, str]:
        """Parameters of a block that may have a gradient, and the tied table of each.

        An earlier block may pass a gathered table.
        """
        graph = build_block(variant, self.model, self.recipe).graph
        leaves = (n for n in graph if n.op in LEAVES and not n.binding.buffer)
        weights = (n for n in leaves if n.role in (Role.PARAMETER, Role.USED))
        return {n.binding.name: n.binding.tied or n.binding.live_in for n in weights}

    def training(self, variant: BlockVariant, layer: int) -> model_blocks.Training:
        """Frozen parameters and adapters of a block; its constant inputs follow later."""
        weights = self._weights(variant)
        adapters = tuple(self._adapters(variant, layer, frozenset(weights)))
        factors = [name for adapter in adapters for name in adapter.factors]
        frozen = {
            name
            for name, table in weights.items()
            if not self._trains(
                _names(variant, layer, name) | self.tables.get(table, set()), of_adapter=False
            )
        }
        frozen |= {
            name
            for name in factors
            if not self._trains(_names(variant, layer, name), of_adapter=True)
        }
        self.any_trains |= len(frozen) < len(weights) + len(factors)
        stored = FROZEN[self.run.quantize_base] if self.run.quantize_base else None
        return model_blocks.Training(
            frozenset(frozen),
            adapters=adapters,
            stored=tuple((scope, stored) for scope in SCOPES) if stored else (),
        )

    def _trains(self, names: set[str], *, of_adapter: bool) -> bool:
        """True if the parameter with these names trains."""
        run = self.run
        self.names |= names
        frozen = self._matches(run.freeze or (), names)
        selected = self._matches(run.trainable or (), names)
        by_default = of_adapter or (run.trainable is None and run.lora_rank is None)
        return (by_default or selected) and not frozen

    def _matches(self, patterns: Iterable[str], names: set[str]) -> bool:
        """True if a pattern matches one of the names."""
        matches = {p for p in patterns if any(fnmatchcase(name, p) for name in names)}
        self.matched |= matches
        return bool(matches)

    def _adapters(
        self, variant: BlockVariant, layer: int, weights: frozenset[str]
    ) -> Iterator[model_blocks.Adapter]:
        """Adapters of a block."""
        run = self.run
        if run.lora_rank is None:
            return
        target_of: dict[str, str] = {}
        for target in run.lora_target_modules:
            for linear in _linears(target, variant, layer, weights):
                self.matched.add(target)
                if both := [w for w in linear if w in target_of]:
                    raise UserError(
                        f"lora_target_modules: {both[0]} is part of {target_of[both[0]]} and of "
                        f"{target}; drop either"
                    )
                target_of |= dict.fromkeys(linear, target)
                alpha = run.lora_alpha or run.lora_rank
                yield model_blocks.Adapter(
                    linear, run.lora_rank, alpha / run.lora_rank, run.lora_dropout
                )
        self.names |= weights

    def check(self) -> None:
        """Raise UserError for patterns without a match, and where nothing trains."""
        run, name = self.run, self.model.name
        for setting in ("trainable", "freeze", "lora_target_modules"):
            targets = setting == "lora_target_modules"
            if targets and run.lora_rank is None:
                continue
            patterns: tuple[str, ...] = getattr(run, setting) or ()
            unknown = [p for p in patterns if p not in self.matched]
            if targets and patterns == SETTINGS[setting].default:
                unknown = unknown if len(unknown) == len(patterns) else []
            if unknown:
                known = [*sorted(self.names), *(LINEARS if targets else ())]
                hint = did_you_mean(unknown[0], known)
                hint = hint or "; see `stagewright show --graph` for the names"
                raise UserError(f"{setting}: {name} has no {unknown[0]!r}{hint}")
        if not self.any_trains:
            raise UserError(
                f"no parameter of {name} trains; drop freeze, or name some in trainable"
            )


def _names(variant: BlockVariant, layer: int, name: str) -> set[str]:
    """Names of a parameter: alone, with its block's name, and with its block's kind."""
    return {name, f"{variant.name_at(layer)}.{name}", f"{variant.block}.{name}"}


def _linears(
    target: str, variant: BlockVariant, layer: int, weights: frozenset[str]
) -> Iterator[tuple[str, ...]]:
    """Linear layers of a block that a target selects: by module, or weights by pattern."""

    def matches(name: str) -> bool:
        return any(fnmatchcase(x, target) for x in _names(variant, layer, name))

    if modules := [*filter(matches, LINEARS)]:
        for module in modules:
            yield from filter(None, (linear.of(weights) for linear in LINEARS[module]))
        return
    matrices = {w for linear in LINEARS["all-linear"] for w in linear.weights} & weights
    yield from ((weight,) for weight in sorted(matrices) if matches(weight))
