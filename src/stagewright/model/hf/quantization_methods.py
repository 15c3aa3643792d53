"""The ways in which checkpoints are quantized: what each method's keys say of modules.

Read are fp8 (DeepSeek, Qwen, fbgemm), mxfp4, modelopt, compressed-tensors, AWQ, GPTQ and
bitsandbytes. Modules that are left out are named in full or in part, with wildcards or by regular
expressions (`quantization_modules.Modules`).

Sources: transformers 5.23 (`quantizers/`, `utils/quantization_config.py`), vLLM 0.11
(`model_executor/layers/quantization/`), compressed-tensors 0.12 (`quantization/quant_args.py`), and
modelopt 0.37 (`torch/export/quant_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from stagewright.model.hf.keys import Json, whole_name
from stagewright.model.hf.quantization_modules import EVERY, EXPERTS, Modules
from stagewright.stored import Stored

FP8 = Stored("fp8", 32, 0, 0, "fp8")
"""One scale of fp32 for a matrix, and inputs that are cast to fp8."""
NVFP4 = Stored("fp4", 8, 1, 16, "fp4")
"""A scale in fp8 for 16 values of a row; the second one, in fp32 for a matrix, is not counted."""
MXFP4 = Stored("fp4", 8, 1, 32)
"""An exponent of 8 bits for 32 values of a row (OCP MX 1.0)."""
BLOCK = (128, 128)

_ALGORITHMS: Mapping[str, Stored] = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8._replace(rows=1),
    "FP8_PB_REAL": FP8._replace(rows=128, columns=128),
    "FP8_PB_WO": FP8._replace(rows=128, columns=128, product=""),
    "MXFP8": Stored("fp8", 8, 1, 32, "fp8"),
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4._replace(product=""),
    "NVFP4_W4A16": NVFP4._replace(product=""),
    "MXFP4": MXFP4,
    "W4A8_NVFP4_FP8": NVFP4._replace(product="fp8"),
    "W4A8_MXFP4_FP8": MXFP4._replace(product="fp8"),
    "W4A16_AWQ": Stored("int4", 16, 1, 128),
    "W4A8_AWQ": Stored("int4", 16, 1, 128, "fp8"),
    "INT4_AWQ": Stored("int4", 16, 1, 128),
    "W8A16": Stored("int8", 16, 1, 0),
    "INT8_SQ": Stored("int8", 32, 1, 0, "int8"),
    "W8A8_SQ_PER_CHANNEL": Stored("int8", 32, 1, 0, "int8"),
}
"""modelopt's names of algorithms (`quant_algo`)."""


Rows = tuple[tuple[Modules, Stored], ...]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a quantization_config says of modules."""

    method: str
    rows: Rows
    """Which modules are stored how; the first row that names a module counts."""
    ignored: Modules
    head: bool = False
    """Whether the output projection is one of the modules."""
    routed_only: bool = False
    """Whether no matrices but those of routed experts are quantized."""
    kv_cache: str = ""
    notes: tuple[str, ...] = ()

    def key(self, layer: int) -> object:
        """Equal for layers of which equal modules are stored alike."""
        return tuple(modules.key(layer) for modules in (self.ignored, *(m for m, _ in self.rows)))

    def of(self, layer: int, names: Sequence[str]) -> Stored | None:
        """How a matrix is stored that is in one of these modules of a layer."""
        if any(self.ignored.has(layer, name) for name in names):
            return None
        return next(
            (how for some, how in self.rows if any(some.has(layer, name) for name in names)), None
        )


class Unreadable(Exception):
    """What is not understood of a quantization_config."""


def scheme_of(config: Json) -> Scheme:
    """The scheme of a quantization_config or of what an hf_quant_config.json holds."""
    inner = config.get("quantization")
    if isinstance(inner, dict):  # hf_quant_config.json
        config = {"quant_method": "modelopt", **cast(Json, inner)}
    method = config.get("quant_method")
    if not isinstance(method, str):
        method = "modelopt" if "quant_algo" in config or _producer(config) else ""
    if not method and "config_groups" in config:
        method = "compressed-tensors"
    if not method and ("load_in_4bit" in config or "load_in_8bit" in config):
        method = "bitsandbytes"
    reader = _METHODS.get(method.lower().replace("_", "-"))
    if reader is None:
        named = f"the quant_method {whole_name(method)} of " if method else "the method of "
        raise Unreadable(f"{named}quantization_config is not known")
    return reader(config, method)


def _producer(config: Json) -> bool:
    producer = config.get("producer")
    return isinstance(producer, dict) and cast(Json, producer).get("name") == "modelopt"


def _names(config: Json, *keys: str) -> list[str]:
    """The names of modules under some keys."""
    found: list[str] = []
    for key in keys:
        value = config.get(key)
        listed = cast("list[object]", value) if isinstance(value, list) else [value]
        found += [name for name in listed if isinstance(name, str) and name]
    return found


def _number(config: Json, key: str, usual: int | None = None) -> int:
    value = config.get(key, usual)
    if type(value) is not int or not -1 <= value <= 2**20:
        raise Unreadable(f"{key} of quantization_config is {value!r:.40}, wanted a whole number")
    return value


def _fp8(config: Json, method: str) -> Scheme:
    """fp8 in blocks with scales of fp32, or with one scale; rows of fbgemm have one each."""
    stored = FP8._replace(rows=1) if method.startswith("fbgemm") else FP8
    block = config.get("weight_block_size")
    if block is not None:
        sides = cast("list[object]", block) if isinstance(block, list) else []
        rows, columns = sides if len(sides) == 2 else (None, None)
        if not all(type(n) is int and 1 <= n <= 2**20 for n in (rows, columns)):
            raise Unreadable("weight_block_size of quantization_config is no pair of sizes")
        stored = stored._replace(rows=cast(int, rows), columns=cast(int, columns))
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    rows_: list[tuple[Modules, Stored]] = [(EVERY, stored)]
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4: experts in MXFP4, their inputs in fp8
        experts = Modules.of([f"{parent}.experts" for parent in EXPERTS])
        rows_.insert(0, (experts, MXFP4._replace(product="fp8")))
    return Scheme(method, tuple(rows_), Modules.of(ignored))


def _mxfp4(config: Json, method: str) -> Scheme:
    ignored = Modules.of(_names(config, "modules_to_not_convert"))
    return Scheme(method, ((EVERY, MXFP4),), ignored, routed_only=True)


def _awq(config: Json, method: str) -> Scheme:
    bits, group = _number(config, _first(config, "bits", "w_bit")), 128
    group = _number(config, _first(config, "group_size", "q_group_size"), 128)
    zero = bits if config.get("zero_point", True) else 0
    return Scheme(
        method,
        ((EVERY, _integers(bits, 16 + zero, group)),),
        Modules.of(_names(config, "modules_to_not_convert")),
    )


def _gptq(config: Json, method: str) -> Scheme:
    """Scales in fp16 and zero points, which are there for symmetric values, too (`qzeros`)."""
    bits, group = _number(config, "bits"), _number(config, "group_size", 128)
    ignored = _names(config, "modules_to_not_convert")
    dynamic = config.get("dynamic")
    rows: list[tuple[Modules, Stored]] = []
    for name, own in (cast(Json, dynamic) if isinstance(dynamic, dict) else {}).items():
        if name.startswith("-:"):
            ignored.append(f"re:{name[2:]}")
        elif isinstance(own, dict):
            of_own: Json = {"bits": bits, "group_size": group, **cast(Json, own)}
            few, size = _number(of_own, "bits"), _number(of_own, "group_size")
            rows.append(
                (Modules.of([f"re:{name.removeprefix('+:')}"]), _integers(few, 16 + few, size))
            )
    rows.append((EVERY, _integers(bits, 16 + bits, group)))
    return Scheme(method, tuple(rows), Modules.of(ignored), head=config.get("lm_head") is True)


def _integers(bits: int, scale_bits: int, group: int) -> Stored:
    if bits not in (2, 3, 4, 8):
        raise Unreadable(f"quantization_config has {bits} bits, wanted 2, 3, 4 or 8")
    return Stored(f"int{bits}", scale_bits, 1, max(0, group))


def _first(config: Json, *keys: str) -> str:
    return next((key for key in keys if key in config), keys[0])


def _bitsandbytes(config: Json, method: str) -> Scheme:
    """NF4 and FP4: a scale for 64 values, in fp32 or in 8 bits with another in fp32 for 256 of
    these (arXiv 2305.14314, section 3); LLM.int8: a scale for a row (arXiv 2208.07339)."""
    ignored = Modules.of(_names(config, "llm_int8_skip_modules"))
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
    ignored = Modules.of(_names(config, "exclude_modules", "ignore", "modules_to_not_convert"))
    kv_cache, notes = _kv_cache(config)
    each = config.get("quantized_layers")
    rows: Rows
    if isinstance(config.get("config_groups"), dict):
        rows = _groups(config)
    elif isinstance(each, dict):
        rows = _by_module(cast(Json, each))
    elif kv_cache and not config.get("quant_algo"):
        rows = ()  # the cache alone
    else:
        rows = ((EVERY, _algorithm(config)),)
    return Scheme(method, rows, ignored, head=True, kv_cache=kv_cache, notes=notes)


def _by_module(each: Json) -> Rows:
    names: dict[Stored, list[str]] = {}
    for name, own in each.items():
        if isinstance(own, dict):
            names.setdefault(_algorithm(cast(Json, own)), []).append(name)
    return tuple((Modules.of(listed), stored) for stored, listed in names.items())


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
    ignored = Modules.of(_names(config, "ignore"))
    return Scheme(method, _groups(config), ignored, head=True, kv_cache=kv_cache, notes=notes)


def _groups(config: Json) -> Rows:
    """The rows of `config_groups`; those that name modules go before those of all linear layers."""
    groups = config.get("config_groups")
    named: list[tuple[Modules, Stored]] = []
    general: list[tuple[Modules, Stored]] = []
    for group in (cast(Json, groups) if isinstance(groups, dict) else {}).values():
        if not isinstance(group, dict):
            continue
        own = cast(Json, group)
        stored = _arguments(own, str(own.get("format") or config.get("format") or ""))
        targets = _names(own, "targets") or ["Linear"]
        if stored is None:
            continue
        if "Linear" in targets:
            general.append((EVERY, stored))
        else:
            named.append((Modules.of(targets), stored))
    if not named and not general:
        raise Unreadable("config_groups of quantization_config has no weights")
    return (*named, *general)


class _Arguments(NamedTuple):
    bits: int
    kind: str

    @classmethod
    def of(cls, value: object) -> _Arguments | None:
        if not isinstance(value, dict):
            return None
        args = cast(Json, value)
        return cls(_number(args, "num_bits", 8), str(args.get("type", "int")))

    @property
    def dtype(self) -> str:
        known = f"fp{self.bits}" if self.kind == "float" else f"int{self.bits}"
        if known not in ("fp8", "fp4", "int8", "int4", "int3", "int2"):
            raise Unreadable(f"quantization_config has {self.bits} bits of type {self.kind}")
        return known


def _arguments(group: Json, form: str) -> Stored | None:
    """How a group of compressed-tensors stores weights (`QuantizationArgs`)."""
    weights = _Arguments.of(group.get("weights"))
    if weights is None:
        return None
    args = cast(Json, group["weights"])
    inputs = _Arguments.of(group.get("input_activations"))
    product = inputs.dtype if inputs else ""
    size = args.get("group_size")
    block = args.get("block_structure")
    strategy = args.get("strategy") or ("group" if size else "block" if block else "tensor")
    zero = weights.bits if args.get("symmetric") is False else 0
    rows, columns, scale = 0, 0, 32
    match strategy:
        case "channel":
            rows, scale = 1, 16
        case "group" | "tensor_group":
            rows, columns = 1, max(0, _number(args, "group_size"))
            scale = 16
            if weights.dtype == "fp4" or "mxfp" in form or args.get("scale_dtype") == "torch.uint8":
                scale = 8
        case "block":
            sides = cast("list[object]", block) if isinstance(block, list) else [*BLOCK]
            if len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
                raise Unreadable("block_structure of quantization_config is no pair of sizes")
            rows, columns = cast("list[int]", sides)
        case _:
            pass
    return Stored(weights.dtype, scale + zero, rows, columns, product)


def _kv_cache(config: Json) -> tuple[str, tuple[str, ...]]:
    """The data type of the cache, and a note where it is none that we have."""
    scheme: Any = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if not scheme or scheme in ("none", "None", "auto"):
        return "", ()
    arguments = _Arguments.of(scheme)
    name = arguments.dtype if arguments else str(scheme).lower()
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
