"""The presets as a list: parameters, kind and context of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from stagewright.lower.parameters import parameters
from stagewright.model.architecture import Architecture
from stagewright.model.presets import PRESETS
from stagewright.texttable import Table

KINDS = (
    *("dense", "MoE", "hybrid", "hybrid MoE", "state space", "encoder", "encoder-decoder"),
    *("vision", "images and text"),
)
"""Sorts of models. Hybrids have layers with attention and layers that carry a state."""


def kind_of(model: Architecture) -> str:
    """The sort of a model: one of `KINDS`."""
    others = {
        "images and text": model.tower,
        "vision": model.vision,
        "encoder-decoder": model.encoder_num_layers,
        "encoder": model.encoder,
    }
    if special := next((name for name, applies in others.items() if applies), ""):
        return special
    experts = model.num_experts > 0
    if model.recurrence is None:
        return "MoE" if experts else "dense"
    if not model.attends:
        return "state space"
    return "hybrid MoE" if experts else "hybrid"


def listed(words: Iterable[str] = ()) -> list[str]:
    """The presets whose name or kind has each of some words, in the order of their families.

    >>> listed(["qwen3", "dense"])[:2]
    ['qwen3-0.6b', 'qwen3-1.7b']
    """
    words = [word.lower() for word in words]
    if not words:
        return [*PRESETS]
    texts = {name: f"{name} {kind_of(model)}".lower() for name, model in PRESETS.items()}
    return [name for name, text in texts.items() if all(word in text for word in words)]


def details(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Every field of some presets, with their kind and parameters (`total`, `active`), for JSON."""
    entries: dict[str, dict[str, Any]] = {}
    for name in names:
        total, active = parameters(PRESETS[name])
        more = {"kind": kind_of(PRESETS[name]), "parameters": {"total": total, "active": active}}
        entries[name] = asdict(PRESETS[name]) | more
    return entries


def table(names: Sequence[str]) -> Table:
    """Some presets by kind, in each the smallest first."""
    counts = {name: parameters(PRESETS[name]) for name in names}
    names = sorted(names, key=lambda name: (KINDS.index(kind_of(PRESETS[name])), counts[name]))
    models = [PRESETS[name] for name in names]
    columns: dict[str, list[Any]] = {
        "kind": [kind_of(model) for model in models],
        "name": names,
        "total": [counts[name][0] for name in names],
        "active": [counts[name][1] for name in names],
        "layers": [model.depth for model in models],
        "hidden": [model.hidden_size for model in models],
        "context": [model.max_position_embeddings for model in models],
    }
    units = {"total": "parameters", "active": "parameters", "layers": "", "hidden": ""}
    return Table("", columns, units | {"context": ""}, grouped="kind")
