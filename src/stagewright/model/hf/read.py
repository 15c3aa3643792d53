"""Read a model from the config.json that Hugging Face publishes with its weights.

Each architecture has a row in `families.FAMILIES`: a map from the fields of a model to keys, a
preset of the family for what its files do not say (norms, gates). `data/config_defaults.yaml` has
the keys that may be left out, with their defaults; all other keys of a map are required. Number
formats (`torch_dtype`, `dtype`, quantization) belong to a run and are not read; neither are losses
that balance experts, factors that scale values without adding any (of experts' weights, multipliers
of Granite, MiniMax and Falcon-H1, limits of time steps), nor layers for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from stagewright.errors import did_you_mean
from stagewright.model.hf.families import FAMILIES, MISSING
from stagewright.model.hf.keys import Family, Fields, Json, Keys


def read(file: str, data: Json) -> tuple[str, Fields]:
    """The preset that a file's model is like, and the fields in which the file says otherwise."""
    family = _family(Keys(file, data))
    return family.like, family.read(file, data)


def _family(c: Keys) -> Family:
    """The family of this file, by its architecture or else its model_type."""
    listed = c.values.get("architectures")
    if not listed:  # missing, null or empty
        model_type = c.text("model_type")
        for row in FAMILIES.values():
            if model_type in row.model_types:
                return row
        known = [name for row in FAMILIES.values() for name in row.model_types]
        c.reject("model_type", _one_of(model_type, known))
    name = cast("list[object]", listed)[0] if isinstance(listed, list) else None
    if not isinstance(name, str):
        c.reject("architectures", "a list of names")
    if name not in FAMILIES:
        c.reject("architectures", _one_of(name, FAMILIES))
    row = FAMILIES[name]
    if c.values.get("model_type") is not None and c.text("model_type") not in row.model_types:
        c.reject("model_type", f"{' or '.join(row.model_types)}, as architectures names {name}")
    return row


def _one_of(got: str, known: Collection[str]) -> str:
    """The known names, and what is missing for this one or else a name like it."""
    names = f"one of {', '.join(dict.fromkeys(known))}"
    if got in MISSING:
        return f"{names}; missing for {got}: {MISSING[got]}"
    return names + did_you_mean(got[:80], known)
