"""Default space: values of settings that the user leaves open.

Training searches degrees, microbatch sizes, schedules, ZeRO stages, sequence parallelism, context
parallelism, recomputation and the dispatcher of experts; inference the degrees. `--space` adds
families of settings that few clusters use (`FAMILIES`), and multiplies candidates.

>>> families_of("offload,stages"), families_of("full") == FAMILIES
(('offload', 'stages'), True)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.errors import UserError, did_you_mean
from stagewright.model.config import ModelConfig
from stagewright.run.sections import EXPERIMENT
from stagewright.run.settings import Run
from stagewright.run.tool_files import megatron_recompute_modules
from stagewright.searching.candidates import HARDWARE, Candidates
from stagewright.searching.constraints import Constraint
from stagewright.searching.machines import Fleet, divisors_of
from stagewright.searching.space import idle_conditions

Axes = dict[str, Sequence[Any]]
"""Values to try by setting."""

MIN_TOKENS_PER_CP_RANK = 4096
"""Minimum tokens of a sequence per rank of cp."""
MOST_MICRO_BATCH = 16
"""Largest micro_batch_size."""
FINE_GRAINED = 4
"""Minimum top-k of a fine-grained MoE.

Megatron-LM's recipes send a token once per rank for DeepSeek-V3 and Qwen3 (top-k 8), not for
Mixtral (top-k 2)."""
MOST_CHUNKS = 8
"""Virtual stages per rank that are tried whether or not they divide the layers."""
HEADROOM = 0.05
"""Share of device memory for the CUDA context and NCCL: excludes nothing that might run.

Plans leave more free (`fit.RESERVED_SHARE`), which the answer says."""

SCHEDULES = {
    "megatron": ("1f1b", "interleaved"),
    "torchtitan": ("1f1b", "interleaved", "zbv", "dualpipev"),
}
"""Default schedules of frameworks."""
PUBLISHED_RECIPE = "blockwise"
"""Scaling of fine-grained MoEs that are published in fp8: DeepSeek-V3's, section 3.3 there."""
FINE_GRAINED_SCHEDULES = ("dualpipe",)
"""Default schedules of fine-grained MoEs: DeepSeek-V3's, arXiv 2412.19437, section 3.2.1."""


def default_axes(run: Run, model: ModelConfig, fleets: Sequence[Fleet]) -> Axes:
    """Default values by setting; dp is left out, since it fills the GPUs."""
    gpus = max((fleet.gpus or 1 for fleet in fleets), default=1)
    counts = {fleet.gpus for fleet in fleets if fleet.gpus}
    domain = max(fleet.hardware.scale_up.gpus for fleet in fleets)
    divisors = sorted({d for count in counts or {1} for d in divisors_of(count)})
    layers, heads = model.depth, model.num_attention_heads if model.attends else 0
    axes: Axes = {
        "tp": [d for d in divisors if d <= domain and heads % d == 0],
        "pp": [d for d in divisors if d <= layers],
    }
    if model.num_experts:
        axes["ep"] = [d for d in divisors_of(model.num_experts) if d <= gpus]
        axes["etp"] = sorted({1, *axes["tp"]})
    if run.mode != "train":
        return axes
    length = run.resolved(model).seq_length or 1
    axes["cp"] = [
        d for d in _powers_of_two(gpus) if length // d >= MIN_TOKENS_PER_CP_RANK or d == 1
    ]
    chunks = {*range(1, MOST_CHUNKS + 1), *divisors_of(layers)}
    axes["vpp"] = sorted(d for d in chunks if 2 * d <= layers or d == 1)
    axes["micro_batch_size"] = list(_powers_of_two(MOST_MICRO_BATCH))
    axes["schedule"] = SCHEDULES.get(run.framework, SCHEDULES["megatron"])
    axes["zero"] = (0, 1, 2, 3)
    axes["sequence_parallel"] = (False, True)
    # The run's first, which is the one that remains where the setting has no effect.
    axes["cp_comm_type"] = (run.cp_comm_type, "p2p", "all_gather", "a2a")
    axes["recompute"] = ("none", "selective", "full")
    fp8 = _published_in_fp8(model) and all(of.hardware.rate_of("fp8") is not None for of in fleets)
    if run.flash_attention:
        recipe = run.fp8_recipe or (PUBLISHED_RECIPE if fp8 else None)
        scaled = run.model_copy(update={"fp8_recipe": recipe})
        axes["recompute_modules"] = (run.recompute_modules, _selective_modules(scaled, model))
    if model.top_k >= FINE_GRAINED:
        axes["schedule"] = (*axes["schedule"], *FINE_GRAINED_SCHEDULES)
        if run.moe_token_dispatcher_type == "alltoall":
            axes["moe_flex_dispatcher"] = (False, True)
        if fp8:
            axes |= {"precision": ("fp8",), "fp8_recipe": (PUBLISHED_RECIPE,)}
    return axes


def _published_in_fp8(model: ModelConfig) -> bool:
    quantization = model.quantization
    fine_grained = model.top_k >= FINE_GRAINED
    return fine_grained and quantization is not None and quantization.method == "fp8"


def _selective_modules(run: Run, model: ModelConfig) -> tuple[str, ...]:
    """Modules that `selective` recomputes with flash attention, which saves no scores.

    These are norms and activations, in Megatron-LM those for which it has a flag, and what latent
    attention makes of its latents.
    """
    latent = ("mla_up_proj",) if model.kv_lora_rank else ()
    if run.framework != "megatron":
        return ("norm", "activation", *latent)
    names = megatron_recompute_modules(run, model)
    modules = ("norm", *(("moe_act",) if model.num_experts else ()), *latent)
    return tuple(module for module in modules if names[module]) or modules


def _all_but_attention(model: ModelConfig) -> tuple[str, ...]:
    """Modules that leave little of a layer's activations but those of attention's core."""
    present = {
        "mla_up_proj": model.kv_lora_rank,
        "mlp": "dense" in model.parts,
        "moe": model.num_experts,
    }
    return ("norm", *(name for name, has in present.items() if has))


def not_tried(run: Run, axes: Mapping[str, Sequence[Any]], model: ModelConfig) -> list[str]:
    """Sentence that names settings of MoE recipes that no axis covers."""
    if run.mode != "train" or not model.num_experts:
        return []
    missing: list[str] = []
    if "fp8" not in (run.precision, *axes.get("precision", ())):
        missing.append("fp8 (--precision fp8)")
    if "overlap_moe_expert_parallel_comm" not in axes:
        missing.append("overlap_moe_expert_parallel_comm (--space overlap)")
    return [f"not tried: {', '.join(missing)}"] if missing else []


def without_effect(names: Iterable[str], values: Mapping[str, Sequence[Any]]) -> set[str]:
    """Settings that have no effect in any combination of `values`.

    >>> values = {"pp": (1,), "tp": (1, 2), "recompute": ("none",)}
    >>> sorted(without_effect(["schedule", "sequence_parallel", "recompute_modules"], values))
    ['recompute_modules', 'schedule']
    """

    def has_no_effect(name: str) -> bool:
        needs = EXPERIMENT[name].needs
        idle = any(
            all(tuple(values.get(other, ())) == (value,) for other, value in condition.items())
            for condition in idle_conditions(name)
        )
        lacks = any(
            not {*values.get(other, allowed)} & {*allowed} for other, allowed in needs.items()
        )
        single_stage = name == "vpp" and tuple(values.get("pp", ())) == (1,)  # refused there
        return idle or lacks or single_stage

    return set(filter(has_no_effect, names))


def default_constraints(fixed: Collection[str]) -> list[Constraint]:
    """Constraints of default values, for settings that the user did not fix."""
    by_setting = {
        "etp": Constraint("by default etp is 1 or tp", ("etp", "tp"), _check_etp),
        "recompute_modules": Constraint(
            "by default selective recomputation saves memory",
            ("recompute", "recompute_modules", "flash_attention"),
            _check_modules,
        ),
        "dp_shard": Constraint(
            "by default each shard group of HSDP fills whole scale-up domains",
            ("dp_shard", "tp", "cp", "dp", HARDWARE),
            _check_hsdp,
        ),
    }
    return [of for name, of in by_setting.items() if name not in fixed]


def _check_etp(candidates: Candidates, index: int) -> None:
    run = candidates.run(index)
    if run.etp not in (None, 1, run.tp):
        raise UserError(f"etp={run.etp} is neither 1 nor tp={run.tp}; list it with --etp to try it")


def _check_modules(candidates: Candidates, index: int) -> None:
    run = candidates.run(index)
    fused = run.mode == "train" and run.flash_attention
    if fused and run.recompute == "selective" and run.recompute_modules == ("core_attn",):
        raise UserError(
            "recompute_modules=core_attn saves nothing with flash attention; list it with "
            "--recompute-modules to try it"
        )


def _check_hsdp(candidates: Candidates, index: int) -> None:
    run, domain = candidates.run(index), candidates.hardware(index).scale_up.gpus
    if run.dp_shard is None:
        return
    if run.dp_shard == run.dp:
        raise UserError(f"dp_shard={run.dp_shard} is all of dp: the same as without dp_shard")
    ranks = run.tp * run.cp * run.dp_shard
    if ranks % domain:
        raise UserError(
            f"tp={run.tp} x cp={run.cp} x dp_shard={run.dp_shard} are {ranks} ranks, no multiple "
            f"of the {domain} GPUs of a domain; list it with --dp-shard to try it"
        )


def _powers_of_two(limit: int) -> Iterator[int]:
    n = 1
    while n <= limit:
        yield n
        n *= 2


# ---- families that --space adds ------------------------------------------------------------------

DEFAULT, FULL = "default", "full"
FAMILIES = ("hsdp", "offload", "placement", "stages", "overlap", "recompute", "schedules")


def families_of(text: str | None) -> tuple[str, ...]:
    """Families in the text of `--space`; UserError for another word."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    allowed = (DEFAULT, FULL, *FAMILIES)
    for word in words:
        wanted = f"wanted {', '.join(allowed)}, or several of these"
        if not word:
            raise UserError(f"--space: got {text!r}, in which a word is empty; {wanted}")
        if word not in allowed:
            raise UserError(f"--space {word}: {wanted}{did_you_mean(word, allowed)}")
    return FAMILIES if FULL in words else tuple(dict.fromkeys(w for w in words if w != DEFAULT))


def family_axes(
    names: Iterable[str], run: Run, model: ModelConfig, fleets: Sequence[Fleet]
) -> Axes:
    """Values by setting that families add; UserError in inference, which has no families."""
    names, depth = [*names], model.depth
    if names and run.mode != "train":
        raise UserError(f"--space {names[0]} adds settings of training, got mode={run.mode}")
    gpus = max((fleet.gpus or 1 for fleet in fleets), default=1)
    orders = itertools.permutations(("tp", "cp", "ep-dp", "pp"))  # ep is the innermost part of dp
    overlaps = ("tp_comm_overlap", "overlap_param_gather", "overlap_moe_expert_parallel_comm")
    families: Mapping[str, Axes] = {
        "hsdp": {"dp_shard": [None, *(n for n in _powers_of_two(gpus // 2) if n > 1)]},
        "offload": {
            "optimizer_cpu_offload": (False, True),
            "cpu_offloading_num_layers": [None, *(n for n in _powers_of_two(8) if n < depth)],
        },
        "placement": {"order": [run.order, *map("-".join, orders)]},
        "stages": {
            "first_stage_less_layers": (run.first_stage_less_layers, 0, 1),
            "last_stage_less_layers": (run.last_stage_less_layers, 0, 1),
        },
        "overlap": dict.fromkeys(overlaps if model.num_experts else overlaps[:2], (False, True)),
        "recompute": {
            "recompute_num_layers": [None, *(n for n in _powers_of_two(depth) if n < depth)],
            "recompute_modules": (
                *(("core_attn",), ("norm", "activation")),
                *(("core_attn", "norm", "activation"), _all_but_attention(model)),
            ),
        },
        "schedules": {
            "schedule": (
                *("1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min"),
                *("dualpipe", "dualpipev"),
            )
        },
    }
    axes: Axes = {}
    for name in names:
        axes |= families[name]
    return {name: tuple(dict.fromkeys(values)) for name, values in axes.items()}
