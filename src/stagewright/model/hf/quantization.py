"""Quantization of a checkpoint: what its config.json says of the storage of each matrix.

Read are fp8 (DeepSeek, Qwen, fbgemm), mxfp4, modelopt, compressed-tensors, AWQ, GPTQ and
bitsandbytes, from `quantization_config` or from the `hf_quant_config.json` that modelopt writes
beside the config.json. A `Scheme` names modules in full or in part, with wildcards or by regular
expressions; `MODULES` says which of these a matrix of ours is part of.

Sources: transformers 5.23 (`quantizers/`, `utils/quantization_config.py`), vLLM 0.11
(`model_executor/layers/quantization/`), compressed-tensors 0.12 (`quantization/quant_args.py`), and
modelopt 0.37 (`torch/export/quant_utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stagewright.model.architecture import Architecture
from stagewright.model.hf.keys import Json, whole_name
from stagewright.model.layers import ATTENTIONS, SIDE_BY_SIDE, Layer
from stagewright.stored import Quantization, Storage, Stored

# ---- modules of a layer, in the words of transformers --------------------------------------------

SCOPES = {
    "attention": ("self_attn", "attention", "attn", "self_attention", "mixer"),
    "mixer": ("linear_attn", "self_attn", "mamba", "mixer", "attention"),
    "mlp": ("mlp", "feed_forward", "mixer", "ffn"),
}
"""The modules that the matrices of a scope are in, in one family or another."""

EXPERTS = (*SCOPES["mlp"], "block_sparse_moe", "moe")
"""The modules that experts are in."""

ROUTED = ("we_up", "we_gate", "we_down")

_SHARED = ("shared_experts", "shared_expert", "share_expert", "shared_mlp")
_UP = ("up_proj", "gate_up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "v1")
_GATE = ("gate_proj", "gate_up_proj", "w1")
_DOWN = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h")
_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "W_pack")
_STATE_IN = ("in_proj", "in_proj_qkvz")


def _in(parents: Iterable[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{parent}.{name}" for parent in parents for name in names)


def _expert(*names: str, parents: Sequence[str] = EXPERTS) -> tuple[str, ...]:
    """Modules of experts: one by one, of which the first stands for all, or all in one tensor."""
    return _in(parents, *_in(("experts.0", "experts"), *names))


def _shared(*names: str) -> tuple[str, ...]:
    return _in((*_in(EXPERTS, *_SHARED), *_SHARED[1:]), *names)


_DENSE = {
    "w_up": _in(SCOPES["mlp"], *_UP),
    "w_gate": _in(SCOPES["mlp"], *_GATE),
    "w_down": _in(SCOPES["mlp"], *_DOWN),
}
_EXPERTS = {
    "we_up": _expert(*_UP),
    "we_gate": _expert(*_GATE),
    "we_down": _expert(*_DOWN),
    "ws_up": _shared(*_UP),
    "ws_gate": _shared(*_GATE),
    "ws_down": _shared(*_DOWN),
    "w_latent": _in(EXPERTS, "fc1_latent_proj"),
    "w_latent_out": _in(EXPERTS, "fc2_latent_proj"),
}
_ATTENTION = {
    "wq": ("q_proj", *_QKV),
    "wk": ("k_proj", *_QKV),
    "wv": ("v_proj", *_QKV),
    "wg": ("g_proj", "gate_proj", "q_proj"),
    "wo": ("o_proj", "out_proj", "dense", "c_proj"),
    "w_dq": ("q_a_proj", "wq_a"),
    "w_uq": ("q_b_proj", "wq_b"),
    **dict.fromkeys(("w_dkv", "w_kr"), ("kv_a_proj_with_mqa", "wkv_a")),
    **dict.fromkeys(("w_uk", "w_uv"), ("kv_b_proj", "wkv_b")),
    "w_index_q": ("indexer.wq_b", "index_q_proj"),
    "w_index_k": ("indexer.wk", "index_k_proj"),
}
_MIXER = {
    **dict.fromkeys(("mamba.w_x", "mamba.w_z"), _STATE_IN),
    "mamba.w_out": ("out_proj",),
    **{f"mamba2.w_{name}": _STATE_IN for name in ("z", "x", "b", "c", "dt")},
    "mamba2.w_out": ("out_proj",),
    **{f"lightning.w_{name}": _QKV for name in "qkv"},
    "lightning.w_z": ("output_gate",),
    "lightning.w_out": ("out_proj",),
    **{f"delta.w_{name}": (f"{name}_proj", "in_proj_qkv", "in_proj_qkvz") for name in "qkv"},
    "delta.w_z": ("in_proj_z", "in_proj_qkvz"),
    "delta.w_beta": ("in_proj_b", "in_proj_ba", "b_proj"),
    "delta.w_dt": ("in_proj_a", "in_proj_ba"),
    "delta.w_out": ("out_proj", "o_proj"),
}
MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention": {name: _in(SCOPES["attention"], *at) for name, at in _ATTENTION.items()},
    "mixer": {name: _in(SCOPES["mixer"], *at) for name, at in _MIXER.items()},
    "dense": _DENSE,
    "experts": _EXPERTS,
    # Beside an MLP, experts are no part of it: `layers.3.experts` (Gemma 4).
    "dense+experts": _DENSE
    | {
        name: _in(("experts.0", "experts"), *at)
        for name, at in zip(ROUTED, (_UP, _GATE, _DOWN), strict=True)
    },
    "none": {},
}
"""The modules that each matrix may be in, by scope; those of an MLP by its kind."""

# ---- modules that a file names -------------------------------------------------------------------

_PREFIX = re.compile(
    r"(?:(?:model|language_model|text_model|backbone|transformer|llm|thinker|base_model)\.)+"
)
"""Prefixes of layers in the names of modules."""

_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")

_NUMBERED = re.compile(r"layers\.(\d+)(?:\.(.+))?\Z")
"""A module of one layer: the layer's index and the module within."""


def _runs(name: str) -> list[str]:
    """The parts of a dotted name that stand behind each other.

    >>> _runs("a.b")
    ['a', 'a.b', 'b']
    """
    words = name.split(".")
    ends = range(len(words) + 1)
    return [".".join(words[i:j]) for i in ends for j in ends[i + 1 :]]


def _expression(pattern: str) -> str:
    """A regular expression of a pattern with wildcards; what is inside a module is meant, too."""
    text = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return rf"{text}(?:\..*)?\Z"


def _compiled(text: str) -> list[re.Pattern[str]]:
    """A user's regular expression; none where it is wrong."""
    try:
        return [re.compile(text)]
    except (re.error, OverflowError, RecursionError):
        return []


@dataclass(slots=True, eq=False)
class Modules:
    """Modules that are named by words in a row, with wildcards, or by regular expressions.

    >>> some = Modules.of(["lm_head", "model.layers.1.*", "gate", r"re:.*mlp\\.(up|down)_proj.*"])
    >>> some.has(1, "mlp.gate_proj"), some.has(12, "mlp.gate_proj"), some.has(2, "mlp.gate")
    (True, False, True)
    >>> some.has(2, "mlp.experts.0.up_proj"), some.has(2, "mlp.up_proj"), some.has(-1, "lm_head")
    (False, True, True)
    """

    every: bool = False
    """All modules are named."""
    words: set[str] = field(default_factory=set[str])
    """Names without wildcards that are of no one layer."""
    wildcards: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    """Names with wildcards, which may begin at any word of a name."""
    expressions: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    """Regular expressions, which begin at the beginning of a name."""
    of_layers: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """By layer, names of modules within; empty: the whole layer."""
    numbered: bool = False
    """Some expression names layers by number."""

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Modules:
        """The modules that some patterns name; what begins with `re:` is a regular expression."""
        modules = cls()
        for pattern in patterns:
            is_regex = pattern.startswith(("re:", ".*", "^")) or re.search(r"[\\$(|+\[]", pattern)
            prefix = _PREFIX.match(pattern)
            name = pattern[prefix.end() :] if prefix else pattern
            if is_regex:
                modules.expressions += _compiled(pattern.removeprefix("re:"))
                modules.numbered |= "layers" in pattern
            elif match := _NUMBERED.match(name):
                modules.of_layers.setdefault(int(match[1]), set()).add(match[2] or "")
            elif "*" in name or "?" in name:
                modules.wildcards.append(re.compile(rf"(?:.*\.)?{_expression(name)}"))
                modules.numbered |= "layers" in name
            else:
                modules.words.add(name)
        return modules

    def key(self, layer: int) -> object:
        """Equal for layers of which equal modules are named."""
        return frozenset(self.of_layers.get(layer, ())), layer if self.numbered else -1

    def has(self, layer: int, module: str) -> bool:
        """True if a module of a layer is named; layer -1: a module outside of all layers."""
        name = f"layers.{layer}.{module}" if layer >= 0 else module
        if self.every or (self.words and not self.words.isdisjoint(_runs(name))):
            return True
        if any(pattern.match(name) for pattern in self.wildcards):
            return True
        if any(x.match(prefix + name) for x in self.expressions for prefix in _PREFIXES):
            return True
        inside = self.of_layers.get(layer)
        if not inside:
            return False
        words = module.split(".")
        if any(".".join(words[:n]) in inside for n in range(len(words) + 1)):
            return True
        return any(re.match(_expression(x), module) for x in inside if "*" in x or "?" in x)


EVERY = Modules(every=True)

# ---- methods: what the keys of each say ----------------------------------------------------------

FP8 = Stored("fp8", 32, 0, 0, "fp8")
"""One scale of fp32 for a matrix, and inputs that are cast to fp8."""
NVFP4 = Stored("fp4", 8, 1, 16, "fp4")
"""A scale in fp8 for 16 values of a row; the second one, in fp32 for a matrix, is not counted."""
MXFP4 = Stored("fp4", 8, 1, 32)
"""An exponent of 8 bits for 32 values of a row (OCP MX 1.0)."""

_ALGORITHMS: Mapping[str, Stored] = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8._replace(rows=1),
    "FP8_PB_REAL": FP8._replace(rows=128, columns=128),
    "FP8_PB_WO": FP8._replace(rows=128, columns=128, product=""),
    "MXFP8": Stored("fp8", 8, 1, 32, "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ"), NVFP4),
    **dict.fromkeys(("W4A16_NVFP4", "NVFP4_W4A16"), NVFP4._replace(product="")),
    "MXFP4": MXFP4,
    "W4A8_NVFP4_FP8": NVFP4._replace(product="fp8"),
    "W4A8_MXFP4_FP8": MXFP4._replace(product="fp8"),
    **dict.fromkeys(("W4A16_AWQ", "INT4_AWQ"), Stored("int4", 16, 1, 128)),
    "W4A8_AWQ": Stored("int4", 16, 1, 128, "fp8"),
    "W8A16": Stored("int8", 16, 1, 0),
    **dict.fromkeys(("INT8_SQ", "W8A8_SQ_PER_CHANNEL"), Stored("int8", 32, 1, 0, "int8")),
}
"""modelopt's names of algorithms (`quant_algo`)."""

Rows = tuple[tuple[Modules, Stored], ...]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage of modules by a quantization_config."""

    method: str
    rows: Rows
    """Modules and their storage; the first row that names a module counts."""
    ignored: Modules
    head: bool = False
    """The output projection is one of the modules."""
    routed_only: bool = False
    """No matrices but those of routed experts are quantized."""
    kv_cache: str = ""
    notes: tuple[str, ...] = ()

    def key(self, layer: int) -> object:
        """Equal for layers whose modules are stored in equal ways."""
        return tuple(modules.key(layer) for modules in (self.ignored, *(m for m, _ in self.rows)))

    def of(self, layer: int, names: Sequence[str]) -> Stored | None:
        """The storage of a matrix that is in one of these modules of a layer."""
        if any(self.ignored.has(layer, name) for name in names):
            return None
        return next(
            (how for some, how in self.rows if any(some.has(layer, name) for name in names)), None
        )


class Unreadable(Exception):
    """Raised for a quantization_config that is not understood."""


def scheme_of(config: Json) -> Scheme:
    """The scheme of a quantization_config or of what an hf_quant_config.json holds."""
    inner = config.get("quantization")
    if isinstance(inner, dict):  # hf_quant_config.json
        config = {"quant_method": "modelopt", **cast(Json, inner)}
    method, producer = config.get("quant_method"), config.get("producer")
    by_modelopt = isinstance(producer, dict) and cast(Json, producer).get("name") == "modelopt"
    if not isinstance(method, str):
        method = "modelopt" if "quant_algo" in config or by_modelopt else ""
    if not method and "config_groups" in config:
        method = "compressed-tensors"
    if not method and ("load_in_4bit" in config or "load_in_8bit" in config):
        method = "bitsandbytes"
    reader = _METHODS.get(method.lower().replace("_", "-"))
    if reader is None:
        named = f"the quant_method {whole_name(method)} of " if method else "the method of "
        raise Unreadable(f"{named}quantization_config is not known")
    return reader(config, method)


def _named(config: Json, *keys: str) -> Modules:
    """The modules under some keys."""
    return Modules.of(name for key in keys for name in _texts(config.get(key)))


def _texts(value: object) -> list[str]:
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return [name for name in listed if isinstance(name, str) and name]


def _object(value: object) -> Json:
    return cast(Json, value) if isinstance(value, dict) else {}


def _number(config: Json, key: str, usual: int | None = None) -> int:
    value = config.get(key, usual)
    if type(value) is not int or not -1 <= value <= 2**20:
        raise Unreadable(f"{key} of quantization_config is {value!r:.40}, wanted a whole number")
    return value


def _integers(bits: int, scale_bits: int, group: int) -> Stored:
    if bits not in (2, 3, 4, 8):
        raise Unreadable(f"quantization_config has {bits} bits, wanted 2, 3, 4 or 8")
    return Stored(f"int{bits}", scale_bits, 1, max(0, group))


def _pair(value: object, key: str) -> tuple[int, int]:
    """The sides of a block."""
    sides = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sides) != 2 or not all(type(n) is int and 1 <= n <= 2**20 for n in sides):
        raise Unreadable(f"{key} of quantization_config is no pair of sizes")
    return sides[0], sides[1]


def _fp8(config: Json, method: str) -> Scheme:
    """fp8 in blocks with scales of fp32, or with one scale; rows of fbgemm have one each."""
    stored = FP8._replace(rows=1) if method.startswith("fbgemm") else FP8
    if (block := config.get("weight_block_size")) is not None:
        rows, columns = _pair(block, "weight_block_size")
        stored = stored._replace(rows=rows, columns=columns)
    modules: Rows = ((EVERY, stored),)
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4: experts in MXFP4, their inputs in fp8
        modules = ((Modules.of(_in(EXPERTS, "experts")), MXFP4._replace(product="fp8")), *modules)
    return Scheme(method, modules, _named(config, "modules_to_not_convert", "ignored_layers"))


def _mxfp4(config: Json, method: str) -> Scheme:
    ignored = _named(config, "modules_to_not_convert")
    return Scheme(method, ((EVERY, MXFP4),), ignored, routed_only=True)


def _awq(config: Json, method: str) -> Scheme:
    bits = _number(config, "w_bit" if "w_bit" in config and "bits" not in config else "bits")
    old = "q_group_size" in config and "group_size" not in config
    group = _number(config, "q_group_size" if old else "group_size", 128)
    zero = bits if config.get("zero_point", True) else 0
    rows = ((EVERY, _integers(bits, 16 + zero, group)),)
    return Scheme(method, rows, _named(config, "modules_to_not_convert"))


def _gptq(config: Json, method: str) -> Scheme:
    """Scales in fp16 and zero points, which are there for symmetric values, too (`qzeros`)."""
    bits, group = _number(config, "bits"), _number(config, "group_size", 128)
    ignored = _texts(config.get("modules_to_not_convert"))
    rows: list[tuple[Modules, Stored]] = []
    for name, changes in _object(config.get("dynamic")).items():
        if name.startswith("-:"):
            ignored.append(f"re:{name[2:]}")
        elif isinstance(changes, dict):
            usual: Json = {"bits": bits, "group_size": group, **cast(Json, changes)}
            few, size = _number(usual, "bits"), _number(usual, "group_size")
            modules = Modules.of([f"re:{name.removeprefix('+:')}"])
            rows.append((modules, _integers(few, 16 + few, size)))
    rows.append((EVERY, _integers(bits, 16 + bits, group)))
    return Scheme(method, tuple(rows), Modules.of(ignored), head=config.get("lm_head") is True)


def _bitsandbytes(config: Json, method: str) -> Scheme:
    """NF4 and FP4: a scale for 64 values, in fp32 or in 8 bits with another in fp32 for 256 of
    these (arXiv 2305.14314, section 3); LLM.int8: a scale for a row (arXiv 2208.07339)."""
    ignored = _named(config, "llm_int8_skip_modules")
    if config.get("load_in_8bit") is True:
        return Scheme(method, ((EVERY, Stored("int8", 32, 1, 0, "int8")),), ignored)
    if config.get("load_in_4bit") is not True:
        raise Unreadable("quantization_config has neither load_in_4bit nor load_in_8bit")
    twice = config.get("bnb_4bit_use_double_quant") is True
    # 256 scales of 8 bits share one of 32: groups of 64 x 256 values.
    stored = Stored("int4", 256 * 8 + 32, 1, 64 * 256) if twice else Stored("int4", 32, 1, 64)
    return Scheme(method, ((EVERY, stored),), ignored)


def _modelopt(config: Json, method: str) -> Scheme:
    """A name of an algorithm for all modules, or for each; newer files have groups as well."""
    ignored = _named(config, "exclude_modules", "ignore", "modules_to_not_convert")
    kv_cache, notes = _kv_cache(config)
    rows: Rows
    if isinstance(config.get("config_groups"), dict):
        rows = _groups(config)
    elif isinstance(layers := config.get("quantized_layers"), dict):
        names: dict[Stored, list[str]] = {}
        for name, of_module in cast(Json, layers).items():
            if isinstance(of_module, dict):
                names.setdefault(_algorithm(cast(Json, of_module)), []).append(name)
        rows = tuple((Modules.of(modules), stored) for stored, modules in names.items())
    elif kv_cache and not config.get("quant_algo"):
        rows = ()  # the cache alone
    else:
        rows = ((EVERY, _algorithm(config)),)
    return Scheme(method, rows, ignored, head=True, kv_cache=kv_cache, notes=notes)


def _algorithm(config: Json) -> Stored:
    name = config.get("quant_algo")
    stored = _ALGORITHMS.get(name.upper()) if isinstance(name, str) else None
    if stored is None:
        raise Unreadable(f"quant_algo {whole_name(str(name))} of quantization_config is not known")
    if stored.columns and "group_size" in config and config["group_size"]:
        return stored._replace(columns=_number(config, "group_size"))
    return stored


def _compressed(config: Json, method: str) -> Scheme:
    kv_cache, notes = _kv_cache(config)
    ignored = _named(config, "ignore")
    return Scheme(method, _groups(config), ignored, head=True, kv_cache=kv_cache, notes=notes)


def _groups(config: Json) -> Rows:
    """The rows of `config_groups`; those that name modules go before those of all linear layers."""
    named: list[tuple[Modules, Stored]] = []
    general: list[tuple[Modules, Stored]] = []
    for group in map(_object, _object(config.get("config_groups")).values()):
        if not isinstance(group.get("weights"), dict):
            continue
        stored = _arguments(group, str(group.get("format") or config.get("format") or ""))
        targets = _texts(group.get("targets")) or ["Linear"]
        if "Linear" in targets:
            general.append((EVERY, stored))
        else:
            named.append((Modules.of(targets), stored))
    if not named and not general:
        raise Unreadable("config_groups of quantization_config has no weights")
    return (*named, *general)


def _arguments(group: Json, form: str) -> Stored:
    """The storage of a group's weights, by compressed-tensors' `QuantizationArgs`."""
    args, inputs = _object(group.get("weights")), group.get("input_activations")
    bits = _number(args, "num_bits", 8)
    product = _dtype(cast(Json, inputs)) if isinstance(inputs, dict) else ""
    size, block = args.get("group_size"), args.get("block_structure")
    strategy = args.get("strategy") or ("group" if size else "block" if block else "tensor")
    rows, columns, scale = 0, 0, 32
    if strategy == "channel":
        rows, scale = 1, 16
    elif strategy in ("group", "tensor_group"):
        rows, columns = 1, max(0, _number(args, "group_size"))
        small = _dtype(args) == "fp4" or "mxfp" in form or args.get("scale_dtype") == "torch.uint8"
        scale = 8 if small else 16
    elif strategy == "block":
        sides: object = cast(object, block) if isinstance(block, list) else [128, 128]
        rows, columns = _pair(sides, "block_structure")
    zero = bits if args.get("symmetric") is False else 0
    return Stored(_dtype(args), scale + zero, rows, columns, product)


def _dtype(args: Json) -> str:
    """The data type of compressed-tensors' `QuantizationArgs`."""
    bits, kind = _number(args, "num_bits", 8), args.get("type", "int")
    name = f"fp{bits}" if kind == "float" else f"int{bits}"
    if name not in ("fp8", "fp4", "int8", "int4", "int3", "int2"):
        raise Unreadable(f"quantization_config has {bits} bits of type {kind}")
    return name


def _kv_cache(config: Json) -> tuple[str, tuple[str, ...]]:
    """The data type of the cache, and a note where it is none that we have."""
    scheme: Any = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if not scheme or scheme in ("none", "None", "auto"):
        return "", ()
    name = _dtype(cast(Json, scheme)) if isinstance(scheme, dict) else str(scheme).lower()
    if name == "fp8":
        return "fp8", ()
    return "", (f"a KV cache in {whole_name(name)} is not known; use --kv-cache-dtype",)


_METHODS: Mapping[str, Callable[[Json, str], Scheme]] = {
    **dict.fromkeys(("fp8", "fbgemm-fp8", "finegrained-fp8"), _fp8),
    "mxfp4": _mxfp4,
    **dict.fromkeys(("awq", "awq-marlin"), _awq),
    **dict.fromkeys(("gptq", "gptq-marlin", "auto-round", "intel/auto-round"), _gptq),
    **dict.fromkeys(("bitsandbytes", "bitsandbytes-4bit", "bitsandbytes-8bit"), _bitsandbytes),
    **dict.fromkeys(("modelopt", "modelopt-fp4", "modelopt-mixed"), _modelopt),
    **dict.fromkeys(("compressed-tensors", "sparseml"), _compressed),
}
"""Readers by the value of `quant_method`, with dashes for underscores."""

# ---- matrices of a model -------------------------------------------------------------------------


def given(data: Json, text_parts: Iterable[str]) -> Json | None:
    """The quantization_config of a config.json, or of an object that describes its text part.

    None where there is none.
    """
    holder: Any = data
    while isinstance(holder, dict):
        keys = cast(Json, holder)
        for key in ("quantization_config", "compression_config"):
            if value := keys.get(key):
                return {**_object(value), "expert_dtype": keys.get("expert_dtype")}
        holder = next((keys[part] for part in text_parts if part in keys), None)
    return None


def read_quantization(
    file: str, config: Json, model: Architecture
) -> tuple[Quantization | None, tuple[str, ...]]:
    """The storage of the matrices of a config.json's model, and notes on what is not understood.

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
    mixers = {*pairs.get(layer.mixer, (layer.mixer,))} - {"none"}
    present = {
        "attention": mixers & ATTENTIONS or layer.block,
        "mixer": mixers - ATTENTIONS,
        "mlp": layer.mlp != "none" or layer.block,
    }
    rows: list[tuple[str, Stored | None]] = []
    for scope, parents in SCOPES.items():
        if not present[scope]:
            continue
        usual = None if scheme.routed_only else scheme.of(index, parents)
        if usual:
            rows.append((scope, usual))
        matrices = MODULES.get(layer.mlp if scope == "mlp" else scope, {})
        for name, modules in matrices.items():
            if scheme.routed_only and name not in ROUTED:
                continue
            stored = scheme.of(index, modules)
            if stored != usual:
                rows.append((name, stored))
    return tuple(rows)
