"""Trained parameters of a run's blocks: by name or pattern, and adapters of frozen ones.

A block whose input depends on no trained parameter needs no gradient of it. The graphs of earlier
blocks say which live values these are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

from stagewright import blocks as nn
from stagewright.blocks.adapters import LINEARS
from stagewright.errors import UserError, did_you_mean
from stagewright.graph.roles import Role
from stagewright.graph.table import LEAVES
from stagewright.lower.blocks import build_block
from stagewright.lower.parameters import published_sizes
from stagewright.lower.recipe import recipe_of
from stagewright.lower.variants import BlockVariant, PlacedVariant
from stagewright.lower.weight_storage import SCOPES
from stagewright.model.config import ModelConfig
from stagewright.run.requests import FROZEN
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run

Stages = Sequence[Sequence[PlacedVariant]]


class TrainedParameters(NamedTuple):
    """Parameters that train, and those of adapters, which a model's own count leaves out."""

    trainable: int
    adapters: int = 0


WHAT_TRAINS = ("trainable", "freeze", "lora_rank", "lora_target_modules")
"""Settings that select trained parameters and adapters."""


def trains_all(run: Run) -> bool:
    """True if all parameters train, without adapters."""
    return run.trainable is None and run.freeze is None and run.lora_rank is None


def mark_trained(
    stages: Stages, run: Run, model: ModelConfig, recipe: nn.Recipe
) -> list[list[PlacedVariant]]:
    """Mark the trained parameters of each block.

    Raises UserError for a name or pattern without a match, and where nothing trains.
    """
    if trains_all(run):
        return [[*stage] for stage in stages]
    rows = _Rows(stages, run, model, recipe)
    marked: list[list[PlacedVariant]] = []
    constant = frozenset[str]()  # live values that depend on no trained parameter
    for stage in stages:
        marked.append([])
        for variant, layer in stage:
            graph = build_block(variant, model, recipe).graph
            taken = {n.binding.live_in for n in graph if n.op == "input" and n.phase == "forward"}
            training = rows.training(variant, layer)._replace(constant=constant & taken)
            variant = variant._replace(training=training)
            made = build_block(variant, model, recipe).trained
            constant -= {name for name, trained in made.items() if trained}
            constant |= {name for name, trained in made.items() if not trained}
            marked[-1].append((variant, layer))
    rows.check()
    return marked


class _Rows:
    """Names and patterns of a run, and their matches so far."""

    def __init__(self, stages: Stages, run: Run, model: ModelConfig, recipe: nn.Recipe) -> None:
        self.run, self.model, self.recipe = run, model, recipe
        self.matched: set[str] = set()
        self.any_trains = False
        self.names: set[str] = set()
        self.tables: dict[str, set[str]] = {}  # names of all copies of each table
        for variant, layer in chain.from_iterable(stages):
            for name, tied in self.parameters(variant).items():
                if tied:
                    names = _names(variant, layer, name)
                    self.tables.setdefault(tied, set()).update(names)

    def parameters(self, variant: BlockVariant) -> dict[str, str]:
        """Parameters of a block that may have a gradient, and the tied table of each.

        An earlier block may pass a gathered table.
        """
        graph = build_block(variant, self.model, self.recipe).graph
        leaves = (n for n in graph if n.op in LEAVES and not n.binding.buffer)
        weights = (n for n in leaves if n.role in (Role.PARAMETER, Role.USED))
        return {n.binding.name: n.binding.tied or n.binding.live_in for n in weights}

    def training(self, variant: BlockVariant, layer: int) -> nn.Training:
        """Frozen parameters and adapters of a block; its inputs follow later."""
        parameters = self.parameters(variant)
        adapters = tuple(self.adapters(variant, layer, frozenset(parameters)))
        frozen: set[str] = set()
        for name, tied in parameters.items():
            names = _names(variant, layer, name) | self.tables.get(tied, set())
            if not self.trains(names, of_adapter=False):
                frozen.add(name)
        for adapter in adapters:
            for name in adapter.factors:
                if not self.trains(_names(variant, layer, name), of_adapter=True):
                    frozen.add(name)
        self.any_trains |= len(frozen) < len(parameters) + sum(len(a.factors) for a in adapters)
        stored = FROZEN[self.run.quantize_base] if self.run.quantize_base else None
        return nn.Training(
            frozenset(frozen),
            adapters=adapters,
            stored=tuple((scope, stored) for scope in SCOPES) if stored else (),
        )

    def trains(self, names: set[str], *, of_adapter: bool) -> bool:
        """True if the parameter with these names trains."""
        run = self.run
        self.names |= names
        frozen = self.matches(run.freeze or (), names)
        chosen = self.matches(run.trainable or (), names)
        implied = of_adapter or (run.trainable is None and run.lora_rank is None)
        return (implied or chosen) and not frozen

    def adapters(
        self, variant: BlockVariant, layer: int, weights: frozenset[str]
    ) -> Iterator[nn.Adapter]:
        """Adapters of a block."""
        run = self.run
        if run.lora_rank is None:
            return
        adapted: dict[str, str] = {}
        for target in run.lora_target_modules:
            for linear in _targets(target, variant, layer, weights):
                self.matched.add(target)
                if both := [w for w in linear if w in adapted]:
                    raise UserError(
                        f"lora_target_modules: {both[0]} is part of {adapted[both[0]]} and of "
                        f"{target}; drop either"
                    )
                adapted |= dict.fromkeys(linear, target)
                rank, alpha = run.lora_rank, run.lora_alpha or run.lora_rank
                yield nn.Adapter(linear, rank, alpha / rank, run.lora_dropout)
        self.names |= weights

    def matches(self, patterns: Iterable[str], names: set[str]) -> bool:
        """True if a pattern matches one of the names."""
        matches = {p for p in patterns if any(fnmatchcase(name, p) for name in names)}
        self.matched |= matches
        return bool(matches)

    def check(self) -> None:
        """Raise UserError for patterns without a match, and where nothing trains."""
        run, name = self.run, self.model.name
        for setting in ("trainable", "freeze", "lora_target_modules"):
            if setting == "lora_target_modules" and run.lora_rank is None:
                continue
            patterns: tuple[str, ...] = getattr(run, setting) or ()
            unknown = [p for p in patterns if p not in self.matched]
            if setting == "lora_target_modules" and patterns == SETTINGS[setting].default:
                unknown = unknown if len(unknown) == len(patterns) else []
            if unknown:
                layers = [*LINEARS] if setting == "lora_target_modules" else []
                hint = did_you_mean(unknown[0], [*sorted(self.names), *layers])
                hint = hint or "; see `stagewright show --graph` for the names"
                raise UserError(f"{setting}: {name} has no {unknown[0]!r}{hint}")
        if not self.any_trains:
            raise UserError(
                f"no parameter of {name} trains; drop freeze, or name some in trainable"
            )


def _names(variant: BlockVariant, layer: int, name: str) -> set[str]:
    """Names of a parameter: alone, with its block's name, and with its block's kind."""
    return {name, f"{variant.name_at(layer)}.{name}", f"{variant.block}.{name}"}


def _targets(
    target: str, variant: BlockVariant, layer: int, weights: frozenset[str]
) -> Iterator[tuple[str, ...]]:
    """Linear layers of a block that a target selects: by module, or weights by pattern."""
    modules = [m for m in LINEARS if any(fnmatchcase(x, target) for x in _names(variant, layer, m))]
    if modules:
        for module in modules:
            yield from filter(None, (linear.of(weights) for linear in LINEARS[module]))
        return
    matrices = {w for of in LINEARS["all-linear"] for w in of.weights} & weights
    for weight in sorted(matrices):
        if any(fnmatchcase(x, target) for x in _names(variant, layer, weight)):
            yield (weight,)


def count(stages: Stages, run: Run, model: ModelConfig) -> TrainedParameters | None:
    """Number of trained parameters, with tied ones once; None: all of the model's."""
    if trains_all(run):
        return None
    recipe, sizes = recipe_of(run, model), published_sizes(model)
    trainable = adapters = 0
    for (variant, _), times in Counter(chain.from_iterable(stages)).items():
        adapted = {name for a in variant.training.adapters for name in a.factors}
        copies = {tie.name for tie in variant.ties if not tie.first}
        for p in build_block(variant, model, recipe).graph:
            if p.op != "param" or p.binding.buffer or p.binding.tied in copies:
                continue
            number = times * math.prod(d.value(sizes) for d in p.shape)
            trainable += number if p.name not in variant.training.frozen else 0
            adapters += number if p.name in adapted else 0
    return TrainedParameters(trainable, adapters)
