"""Accelerators and their systems as data: one YAML file each, a source per number.

>>> h100 = resolve("h100-sxm")
>>> h100.peak_bf16_tflops, h100.scale_up.gpus
(989.4, 8)

A file may build upon another (`base: h100-sxm`) and name only what differs. A number is written
`[value, source]`, where the source is a key of the file's `sources`; a plain number has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from reprlib import repr as shown  # short whatever the value
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, ValidationError, field_validator

from stagewright.errors import UserError, did_you_mean, either
from stagewright.files import from_yaml, own_yaml, read_text
from stagewright.time.constants import AttentionFit, ExpertFit, FigureBlock, GemmFit, wanted_of
from stagewright.time.inference_fits import InferenceFit

Topology = Literal["switch", "fully_connected", "ring", "torus"]
Fabric = Literal["rail_optimized", "fat_tree", "dragonfly"]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that are not printable; wanted one line of text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
"""A name or a description: one printable line, which goes to terminals and into scripts."""


class _Link(FigureBlock):
    """Figures per GPU. A message starts within `latency_us` and passes slowly, or, where that takes
    longer, somewhat later and faster: as NCCL's protocols LL, LL128 and Simple do."""

    bandwidth_gb_s: float = Field(gt=0)
    """One direction, all links of a GPU together."""
    bandwidth_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that large messages reach."""
    medium_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that medium messages reach."""
    low_latency_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that small messages reach."""
    latency_us: float = Field(ge=0)
    medium_us: float = Field(ge=0)
    """Time to start a medium message, beyond `latency_us`."""
    hop_us: float = Field(ge=0)
    """Time of each further step of a collective."""
    bulk_us: float = Field(ge=0)
    """Time to start a large message, beyond `latency_us`."""
    in_network_reduction: bool = False
    """Whether switches reduce (NVLink SHARP, SHARP)."""
    in_network_fraction: float = Field(gt=0, le=1, default=1)
    """Share of the bandwidth that all_reduce reaches where switches reduce."""
    in_network_us: float = Field(ge=0, default=0)
    """Time per GPU to start a reduction in switches."""


class ScaleUp(_Link):
    """The fast links between the GPUs of a node, rack or pod."""

    topology: Topology
    gpus: int = Field(ge=1)
    """GPUs that these links join."""
    shape: tuple[int, ...] = ()
    """Torus: GPUs along each dimension; their product is `gpus`."""
    cube: int = Field(ge=0, default=0)
    """Torus: a slice whose sides are multiples of this is closed along all of them, by switches;
    0: only a side as long as the torus is."""


class ScaleOut(_Link):
    """The network between nodes."""

    fabric: Fabric
    oversubscription: float = Field(ge=1, default=1.0)
    """Bandwidth below the top of the tree, or within a dragonfly group, over that above it."""
    gpus_per_leaf: int | None = Field(ge=1, default=None)
    """GPUs below one switch of the oversubscribed level."""
    all_reduce_adapters: int | None = Field(ge=1, default=None)
    """Adapters of a scale-up domain that an all_reduce over several domains uses at most."""


class Hardware(FigureBlock):
    """An accelerator and its system. TFLOP/s are dense, GB are 1e9 bytes, bandwidths are GB/s."""

    name: Line
    vendor: Line
    description: Line = ""

    peak_bf16_tflops: float = Field(gt=0)
    peak_fp8_tflops: float | None = Field(gt=0, default=None)
    peak_fp4_tflops: float | None = Field(gt=0, default=None)
    peak_int8_tflops: float | None = Field(gt=0, default=None)
    peak_fp32_tflops: float = Field(gt=0)
    """Peak of the vector units."""

    compute_units: int = Field(ge=1)
    """Units over which the tiles of a kernel spread: streaming multiprocessors, compute units."""
    memory_gb: float = Field(gt=0)
    memory_bandwidth_gb_s: float = Field(gt=0)
    host_bandwidth_gb_s: float = Field(gt=0)
    """Bandwidth to the memory of the host, one direction."""
    host_factor: float = Field(gt=0, default=1.0)
    """How many times as long the host takes to launch a kernel as one with an x86 CPU."""

    gemm: Mapping[Line, GemmFit]
    """By precision; a precision without constants takes those of bf16."""
    attention: AttentionFit
    attention_kernels: Mapping[Line, AttentionFit] = Field(default_factory=dict)
    """Other attention kernels that frameworks run, by name, such as `fa2`."""
    experts: ExpertFit | None = None
    """None: not measured; copies run at the speed of streams, and routing takes its launches."""
    inference: InferenceFit | None = None
    """None: not measured; inference takes the constants of training."""
    memory_bandwidth_fraction: float = Field(gt=0, le=1)
    """Share of the bandwidth that a large element-wise kernel reaches."""
    kernel_launch_us: float = Field(ge=0)
    """Time of the shortest kernel within a stream of kernels."""
    recurrence_tflops: float | None = Field(gt=0, default=None)
    """Speed of the kernels of a chunked recurrence, such as Mamba-2, written in Triton, which
    wait for exponentials and masks; None: as products in bf16."""
    unaligned_heads_tflops: float | None = Field(gt=0, default=None)
    """Speed of the products of an attention that no kernel fuses, where the width of a head is no
    multiple of 16 bytes, in a long run; None: as products of aligned operands."""
    sustained_fraction: Mapping[Line, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=lambda: {"bf16": 1.0}
    )
    """By precision the clock of the compute units in a long run, whose power is limited, over that
    in a benchmark that runs for a moment; a plain number is that of all precisions, and a precision
    without one takes that of bf16. Memory and launches are as fast as in a benchmark."""

    gpus_per_node: int = Field(ge=1)
    scale_up: ScaleUp
    scale_out: ScaleOut

    tdp_w: float = Field(gt=0)
    """Thermal design power of one GPU."""
    idle_w: float | None = Field(ge=0, default=None)
    """Power of one GPU that waits; None: a fifth of the TDP (`power.IDLE_FRACTION`)."""
    node_overhead_w: float = Field(ge=0, default=0)
    """Power of host, network and cooling inside the node, per GPU."""
    price_usd_per_gpu_hour: float | None = Field(ge=0, default=None)

    sources: Mapping[Line, Line] = Field(default_factory=dict)
    """The source of each number, by key, with dots for nesting."""

    @field_validator("sustained_fraction", mode="before")
    @classmethod
    def _of_all_precisions(cls, value: Any) -> Any:
        return {"bf16": value} if isinstance(value, int | float) else value

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return round(self.memory_gb * 1e9)

    def rate_of(self, dtype: str) -> float | None:
        """Dense peak of matrix products in TFLOP/s; vector units for fp32; None: unsupported."""
        return PRODUCTS[dtype](self) if dtype in PRODUCTS else None

    def clock_of(self, dtype: str) -> float:
        """Clock of compute units in a step, over that of a benchmark."""
        like = _LIKE.get(dtype, dtype)
        known = [d for d in (dtype, like, "bf16") if d in self.sustained_fraction]
        return self.sustained_fraction[known[0]] if known else 1.0

    def sustained(self) -> Hardware:
        """Hardware at the clocks of a step: compute is slower, memory is not.

        The constants of kernels are those of a benchmark (`benchmarks/fit_kernels.py`).
        """
        products, grouped = (
            {d: self.products(d, grouped=g).slowed(self.clock_of(d)) for d in PRODUCTS}
            for g in (False, True)
        )
        experts = self.experts and self.experts.model_copy(update={"gemm": grouped})
        attention = self.attention
        if attention.fraction > FULL_POWER:
            attention = attention.slowed(self.clock_of("bf16"))
        return self.model_copy(
            update={
                **{"gemm": products, "experts": experts, "attention": attention},
                "sustained_fraction": {"bf16": 1.0},
            }
        )

    def products(self, dtype: str, *, grouped: bool = False) -> GemmFit:
        """Constants of matrix products in one precision; `grouped`: several in one kernel."""
        like = _LIKE.get(dtype, dtype)
        grouped_fit = self.experts.gemm.get(like) if grouped and self.experts else None
        return grouped_fit or self.gemm.get(dtype) or self.gemm.get(like) or self.gemm["bf16"]

    def with_rates_of_bf16(self, dtypes: Iterable[str]) -> Hardware:
        """Hardware with bf16's rate for data types without matrix products.

        Such kernels read weights in few bits and multiply in bf16, as vLLM's Marlin kernels do
        where a GPU lacks fp8 or fp4.
        """
        rate = self.peak_bf16_tflops
        rates = {f"peak_{dtype}_tflops": self.rate_of(dtype) or rate for dtype in dtypes}
        return self.model_copy(update=rates)

    def with_attention(self, kernel: str) -> Hardware:
        """This hardware with another default attention kernel, by name; UserError if unknown."""
        if kernel not in self.attention_kernels:
            known = either(self.attention_kernels) if self.attention_kernels else "none"
            raise UserError(
                f"{self.name} has no attention kernel {kernel!r}"
                f"{did_you_mean(kernel, self.attention_kernels)}; known: {known}"
            )
        return self.model_copy(update={"attention": self.attention_kernels[kernel]})


FULL_POWER = 0.28
"""Share of the peak of products at which a GPU draws all of its TDP: (1 - 0.498) / 1.792, of
`benchmarks/fit_power.py`. Attention that never reaches it leaves the clock as it is."""

PRODUCTS: Mapping[str, Callable[[Hardware], float | None]] = {
    "bf16": lambda of: of.peak_bf16_tflops,
    "fp8": lambda of: of.peak_fp8_tflops,
    "mxfp8": lambda of: of.peak_fp8_tflops,
    "int8": lambda of: of.peak_int8_tflops,
    "fp4": lambda of: of.peak_fp4_tflops,
    "fp32": lambda of: of.peak_fp32_tflops,
}
"""Data types of matrix products, and the peak of each on some hardware."""

_LIKE = {"mxfp8": "fp8"}
"""Data types that take the constants of others where they have none of their own."""


def names() -> list[str]:
    """Names of the hardware in the package."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir())


def resolve(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Hardware of a name in `names()`, or of a YAML file: its path or lines.

    Raises UserError.
    """
    if "\n" in (name := str(name_or_path)):
        return _load(from_yaml(name, "hardware"), "hardware")
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        return _load(from_yaml(read_text(name, "hardware in YAML"), name), name)
    if name not in names():
        raise UserError(
            f"unknown hardware {name!r}{did_you_mean(name.lower(), names())}; "
            f"known: {', '.join(names())}; or the path of a .yaml file"
        )
    return _known(name)


@cache
def _known(name: str) -> Hardware:
    return _load(own_yaml((_folder() / f"{name}.yaml").read_text("utf-8")), name)


def _folder() -> Any:
    return files("stagewright") / "data" / "hardware"


def _load(raw: Any, where: str) -> Hardware:
    values, sources = _with_base(raw, where, (os.path.normpath(where),))
    try:
        hardware = Hardware(**values, sources=sources)
    except ValidationError as error:
        raise UserError(f"{where}: {_describe_error(error)}") from None
    by_precision = {"gemm": hardware.gemm, "sustained_fraction": hardware.sustained_fraction}
    if hardware.experts:
        by_precision["experts.gemm"] = hardware.experts.gemm
    for key, constants in by_precision.items():
        for name in sorted(constants.keys() - PRODUCTS.keys()):
            known = either(PRODUCTS)
            raise UserError(
                f"{where}: unknown key '{key}.{name}'{did_you_mean(name, PRODUCTS)}; wanted {known}"
            )
    if "bf16" not in hardware.gemm:
        raise UserError(
            f"{where}: gemm.bf16 is missing, whose constants all data types take that have none"
        )
    return hardware


def _with_base(
    raw: Any, where: str, seen: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a file and their sources, merged with those of its base."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: got {shown(raw)}, wanted keys such as peak_bf16_tflops: 989.4")
    own_values = {str(key): value for key, value in cast("dict[object, Any]", raw).items()}
    base = own_values.pop("base", None)
    texts: Any = own_values.pop("sources", {})
    if not isinstance(texts, dict):
        raise UserError(f"{where}: sources is {shown(texts)}, wanted names and where they lead")
    texts = {str(name): text for name, text in cast("dict[object, Any]", texts).items()}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    _split_sources(own_values, texts, where, "", values, sources)
    if base is None:
        return values, sources
    path = _file_of_base(base, where)
    if (path is None and base not in names()) or (path or base) in seen:
        raise UserError(
            f"{where}: base is {base!r}{did_you_mean(str(base), names())}; wanted "
            f"{either(n for n in names() if n not in seen)}, or the path of another .yaml file"
        )
    if path is None:
        base_raw, name = own_yaml((_folder() / f"{base}.yaml").read_text("utf-8")), str(base)
    else:
        text = read_text(path, f"hardware in YAML, the base of {where}")
        base_raw, name = from_yaml(text, path), path
    base_values, base_sources = _with_base(base_raw, name, (*seen, name))
    for key in [k for k in base_sources if k.split(".")[0] in values and "." not in k]:
        del base_sources[key]
    return _overlay(base_values, values), base_sources | sources


def _file_of_base(base: object, where: str) -> str | None:
    """Path of a base that is a file, relative to the file `where`; None for a name."""
    if not (isinstance(base, str) and (base.endswith((".yaml", ".yml")) or os.sep in base)):
        return None
    return os.path.normpath(Path(where).parent / base)


def _overlay(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in values.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _overlay(base[key], cast("dict[str, Any]", value)) if nested else value
    return result


def _split_sources(
    given: Mapping[str, Any],
    texts: Mapping[str, str],
    where: str,
    prefix: str,
    values: dict[str, Any],
    sources: dict[str, str],
) -> None:
    """Split `[value, source]` at every depth; `source: x` holds for its block."""
    common = given.get("source") if prefix else None
    for key, value in given.items():
        path = f"{prefix}{key}"
        if prefix and key == "source":
            continue
        if isinstance(value, dict):
            values[key] = {}
            _split_sources(
                cast("dict[str, Any]", value), texts, where, f"{path}.", values[key], sources
            )
        elif isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):  # pyright: ignore
            number, source = cast("list[Any]", value)
            values[key], sources[path] = number, _source(str(source), path, texts, where)
        else:
            values[key] = value
            if common is not None:
                sources[path] = _source(str(common), path, texts, where)


def _source(key: str, path: str, texts: Mapping[str, str], where: str) -> str:
    if key not in texts:
        raise UserError(
            f"{where}: the source {key!r} of {path} is not under sources{did_you_mean(key, texts)}"
        )
    return texts[key]


def _describe_error(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    known: Iterable[str] = {
        "scale_up": ScaleUp.model_fields,
        "scale_out": ScaleOut.model_fields,
    }.get(path[0] if len(path) > 1 else "", Hardware.model_fields)
    name = ".".join(path)
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key {name!r}{did_you_mean(path[-1], known)}"
        case "missing":
            hint = "" if len(path) > 1 else "; give it, or a base to start from: base: h100-sxm"
            return f"{name} is missing{hint}"
        case "literal_error":
            choices = Topology if path[-1] == "topology" else Fabric
            return f"{name} is {shown(first['input'])}, wanted {either(get_args(choices))}"
        case "float_parsing" | "float_type":
            return f"{name} is {shown(first['input'])}, wanted a number"
        case _:
            return f"{name} is {shown(first['input'])}: {wanted_of(first['msg'])}"
