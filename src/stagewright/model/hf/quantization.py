"""What a config.json says of the numbers its checkpoint holds: `quantization_config`.

The same is read of an `hf_quant_config.json`, which modelopt writes beside the config.json.
`quantization_methods` has the methods, `quantization_modules` the names of modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from stagewright.model.architecture import Architecture
from stagewright.model.hf.keys import Json
from stagewright.model.hf.quantization_methods import Scheme, Unreadable, scheme_of
from stagewright.model.hf.quantization_modules import EXPERTS_ALONE, MODULES, ROUTED, SCOPES
from stagewright.model.layers import ATTENTIONS, SIDE_BY_SIDE, Layer
from stagewright.model.quantization import Quantization
from stagewright.stored import Storage, Stored


def given(data: Json, text_parts: Iterable[str]) -> Json | None:
    """The quantization_config of a config.json, or of an object that describes its text part.

    None where there is none.
    """
    holder: Any = data
    while isinstance(holder, dict):
        keys = cast(Json, holder)
        for key in ("quantization_config", "compression_config"):
            if value := keys.get(key):
                found = cast(Json, value) if isinstance(value, dict) else {}
                return {**found, "expert_dtype": keys.get("expert_dtype")}
        holder = next((keys[part] for part in text_parts if part in keys), None)
    return None


def read_quantization(
    file: str, config: Json, model: Architecture
) -> tuple[Quantization | None, tuple[str, ...]]:
    """How the matrices of a config.json's model are stored, and notes on what is not understood.

    None where the file says nothing of quantization, or nothing that is understood.
    """
    try:
        scheme = scheme_of(config)
    except Unreadable as problem:
        note = (
            f"{file}: {problem}; weights count as those of the computation where the model is "
            "served; --weight-precision says otherwise"
        )
        return None, (note,)
    known: dict[object, Storage] = {}
    storages: list[Storage] = []
    for index in range(model.num_layers):
        key = scheme.key(index), model.layer(index)
        if key not in known:
            known[key] = _of_layer(scheme, model.layer(index), index)
        storages.append(known[key])
    kinds = tuple(dict.fromkeys(storages))
    head = scheme.of(-1, ("lm_head",)) if scheme.head and not scheme.routed_only else None
    quantization = Quantization(
        method=scheme.method,
        kinds=kinds,
        layers=tuple(kinds.index(storage) for storage in storages),
        head=(("lm_head", head),) if head else (),
        kv_cache=scheme.kv_cache,
    )
    return quantization, tuple(f"{file}: {note}" for note in scheme.notes)


def _of_layer(scheme: Scheme, layer: Layer, index: int) -> Storage:
    """The storage of a layer's matrices: of all in a scope, and of those that differ from it."""
    pairs: Mapping[str, tuple[str, ...]] = {**SIDE_BY_SIDE}
    parts = pairs.get(layer.mixer, (layer.mixer,))
    attends = any(part in ATTENTIONS for part in parts) or layer.block
    scopes = {
        "attention": bool(attends),
        "mixer": any(part not in ATTENTIONS and part != "none" for part in parts),
        "mlp": layer.mlp != "none" or bool(layer.block),
    }
    rows: list[tuple[str, Stored | None]] = []
    for scope in (name for name, there in scopes.items() if there):
        usual: Stored | None = None
        if not scheme.routed_only:
            usual = scheme.of(index, SCOPES[scope])
            if usual:
                rows.append((scope, usual))
        matrices = MODULES[scope] if scope != "mlp" else _FEED_FORWARDS.get(layer.mlp, {})
        for name, modules in matrices.items():
            if scheme.routed_only and name not in ROUTED:
                continue
            stored = scheme.of(index, modules)
            if stored != usual:
                rows.append((name, stored))
    return tuple(rows)


_DENSE = {name: MODULES["mlp"][name] for name in ("w_up", "w_gate", "w_down")}
_MIXTURE = {name: of for name, of in MODULES["mlp"].items() if name not in _DENSE}
_FEED_FORWARDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dense": _DENSE,
    "experts": _MIXTURE,
    # Beside an MLP, experts are no part of it: `layers.3.experts` (Gemma 4).
    "dense+experts": _DENSE | {name: EXPERTS_ALONE[name] for name in ROUTED},
}
