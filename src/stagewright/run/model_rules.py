"""Rules of the model: degrees that divide its heads, widths and experts, and its routing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from stagewright.errors import UserError, divisors, either
from stagewright.model.config import ModelConfig
from stagewright.run.rule import Divide, Refuse, RunCheck, apply, require_divides
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run

MODEL = (
    Divide(
        "tp",
        lambda model: model.num_attention_heads,
        "attention heads of {model.name}",
        when=lambda run, model: model.attends,
    ),
    Divide(
        "tp",
        lambda model: model.o_groups,
        "groups of attention heads of {model.name}",
    ),
    Divide(
        "tp",
        lambda model: model.ffn_hidden_size,
        "channels of the MLP of {model.name}",
        when=lambda run, model: "dense" in model.parts,
        fit=lambda model: math.gcd(model.num_attention_heads, model.ffn_hidden_size),
    ),
    Refuse(
        lambda run, model: model.shared_blocks and model.shared_blocks.adapter_rank % run.tp,
        "tp={run.tp} does not divide the adapters' rank {model.shared_blocks.adapter_rank} of "
        "{model.name}; use {fit}",
        lambda run, model: {
            "fit": divisors(
                math.gcd(
                    model.num_attention_heads,
                    model.shared_blocks.adapter_rank if model.shared_blocks else 0,
                )
            )
        },
    ),
    # Ranks share key-value heads evenly: several each, or several ranks hold one.
    Refuse(
        lambda run, model: (
            model.attends
            and model.shared_query_groups % run.tp
            and run.tp % model.shared_query_groups
        ),
        "tp={run.tp} neither divides the {model.shared_query_groups} key-value heads of "
        "{model.name} nor is a multiple of them; use {fit}",
        lambda run, model: {
            "fit": either(_shared(model.num_attention_heads, model.shared_query_groups))
        },
    ),
    # Some layers may have sizes of their own.
    Refuse(
        lambda run, model: any(
            size % run.tp
            for of in model.own_sizes
            for size in (of.num_attention_heads or 0, of.ffn_hidden_size or 0)
        ),
        "tp={run.tp} does not divide the heads and the channels of the MLP of each layer of "
        "{model.name}, whose layers have sizes of their own; use {fit}",
        lambda run, model: {"fit": divisors(_common_divisor(model))},
    ),
    Refuse(
        lambda run, model: model.own_sizes and not _splits_queries(model, run.tp),
        "tp={run.tp} splits the key-value heads of {model.name} as the layers with the fewest of "
        "them allow, and then not the query heads of the others; use {fit}",
        lambda run, model: {
            "fit": either(n for n in range(1, run.tp) if _splits_queries(model, n))
        },
    ),
)


def _common_divisor(model: ModelConfig) -> int:
    """Greatest divisor of the heads and of the MLP's width in all layers."""
    pairs = [(of.num_attention_heads or 0, of.ffn_hidden_size or 0) for of in model.own_sizes]
    sizes = [size for pair in pairs for size in pair]
    return math.gcd(model.num_attention_heads, model.ffn_hidden_size, *sizes)


def _splits_queries(model: ModelConfig, tp: int) -> bool:
    """True if `tp` ranks split the query heads of a key-value head in every kind of layer."""
    copies = tp // math.gcd(tp, model.shared_query_groups)
    return all(heads % tp == 0 == heads // groups % copies for heads, groups in model.head_counts)


ROUTING = (
    Refuse(
        lambda run, model: run.moe_router_enable_expert_bias and model.router != "sigmoid",
        "moe_router_enable_expert_bias balances sigmoid scores, but {model.name} has "
        "{model.router}; use moe_aux_loss_coeff, or drop moe_router_enable_expert_bias",
    ),
    Refuse(
        lambda run, model: (
            run.moe_token_dispatcher_type == "allgather"
            and run.moe_expert_capacity_factor is not None
        ),
        "moe_expert_capacity_factor={run.moe_expert_capacity_factor} needs copies that go to their "
        "experts, got moe_token_dispatcher_type=allgather; use alltoall, or drop the factor",
    ),
    Refuse(
        lambda run, model: (
            run.moe_pad_expert_input_to_capacity and run.moe_expert_capacity_factor is None
        ),
        "moe_pad_expert_input_to_capacity pads to moe_expert_capacity_factor; set it, or drop "
        "moe_pad_expert_input_to_capacity",
    ),
    Refuse(
        lambda run, model: (
            run.moe_apply_probs in ("input", "output")
            and run.moe_token_dispatcher_type != "alltoall"
        ),
        "moe_apply_probs={run.moe_apply_probs} needs moe_token_dispatcher_type=alltoall, got "
        "{run.moe_token_dispatcher_type}; use alltoall, or moe_apply_probs=experts",
    ),
    Refuse(
        lambda run, model: (
            run.moe_router_load_balancing_type != "aux_loss" and not run.moe_aux_loss_coeff
        ),
        "moe_router_load_balancing_type={run.moe_router_load_balancing_type} does nothing with "
        "moe_aux_loss_coeff=0; set moe_aux_loss_coeff, such as 0.01, or drop it",
    ),
    Refuse(
        lambda run, model: run.expert_load is not None and model.mtp_num_layers,
        "expert_load has no lines for the mtp_num_layers={model.mtp_num_layers} layers behind the "
        "model's; drop either",
    ),
)


def checks_of_model(model: ModelConfig, whose: str = "") -> tuple[RunCheck, ...]:
    """Degrees divide what they split of a model, and nothing routes tokens without experts.

    `whose` stands before what the checks ask for; their runs are checked against `model` whatever
    model they are given.
    """

    def of(
        name: str, reads: tuple[str, ...], check: Callable[[Run, ModelConfig], None]
    ) -> RunCheck:
        return RunCheck(whose + name, reads, lambda run, _: check(run, model))

    found = [
        of("heads and channels are split evenly by tp", ("tp",), partial(apply, MODEL)),
        of("state layers are split evenly by tp and cp", ("tp", "cp"), _check_state_heads),
    ]
    if not model.num_experts:
        return (*found, of("a dense model has no experts", ("ep", "etp", *_EXPERTS), _check_dense))
    shared = ("tp", "cp", "dp", "ep", "etp", "num_redundant_experts")
    return (
        *found,
        of("experts are split evenly by ep and etp", shared, _check_experts),
        of("tokens can be routed so", _EXPERTS, partial(apply, ROUTING)),
    )


_EXPERTS = tuple(of.name for of in SETTINGS.values() if of.section == "experts")


def _shared(heads: int, groups: int) -> list[int]:
    """Divisors of the heads that divide the groups or are multiples of them."""
    degrees = [d for d in range(1, heads + 1) if heads % d == 0]
    return [d for d in degrees if groups % d == 0 or d % groups == 0]


def _check_state_heads(run: Run, model: ModelConfig) -> None:
    """Layers that carry a state split whole heads, and over cp too: as Megatron-LM's Mamba does."""
    state = model.state_space
    if state is None:
        return
    heads, groups = state.heads, state.groups
    what = "channels" if model.recurrence == "mamba" else "heads"
    require_divides("tp", run.tp, heads, f"{what} of the state layers of {model.name}")
    if what == "heads" and groups % run.tp and run.tp % groups:
        raise UserError(
            f"tp={run.tp} neither divides the {groups} groups of heads in the state layers of "
            f"{model.name} nor is a multiple of them; use {either(_shared(heads, groups))}"
        )
    require_divides(
        "cp",
        run.cp,
        heads // run.tp,
        f"{what} of a rank in the state layers of {model.name} (tp={run.tp}), which has whole "
        f"sequences of fewer {what} there",
    )
    groups_of_rank = groups // math.gcd(run.tp, groups)
    heads_of_group = heads // groups // (run.tp // math.gcd(run.tp, groups))
    if what == "heads" and groups_of_rank % run.cp and heads_of_group % run.cp:
        raise UserError(
            f"cp={run.cp} divides neither the {groups_of_rank} groups of a rank in the state "
            f"layers of {model.name} (tp={run.tp}) nor the heads of a group; "
            f"use {divisors(groups_of_rank)}"
        )


def _check_experts(run: Run, model: ModelConfig) -> None:
    redundant = run.num_redundant_experts
    more = f" and num_redundant_experts={redundant}" if redundant else ""
    experts = model.num_experts + redundant
    if experts % run.ep:
        raise UserError(
            f"ep={run.ep} does not divide the {model.num_experts} experts of {model.name}{more}; "
            f"use {divisors(experts)}"
        )
    etp, ranks = run.expert_tensor_parallel_size, run.tp * run.cp * run.dp
    if ranks % (etp * run.ep):
        default = " (as tp)" if run.etp is None else ""
        raise UserError(
            f"etp={etp}{default} x ep={run.ep} does not divide the {ranks} ranks of tp={run.tp} x "
            f"cp={run.cp} x dp={run.dp}, which share the experts; use {_experts_that_fit(run)}"
        )
    for name, degree, width, of in (
        ("tp", run.tp, model.shared_ffn_hidden_size, "the shared experts"),
        ("etp", etp, model.moe_ffn_hidden_size, "an expert"),
    ):
        if width % degree:
            raise UserError(
                f"{name}={degree} does not divide the width {width} of {of} of {model.name}; "
                f"use {divisors(width)}"
            )


def _experts_that_fit(run: Run) -> str:
    """Degrees with which the experts of a run spread evenly over its ranks."""
    etp, others = run.expert_tensor_parallel_size, run.tp * run.cp
    dp = etp * run.ep // math.gcd(etp * run.ep, others)
    nested = run.ep % run.tp == 0 or run.tp % run.ep == 0
    whole = ["etp=1"] if etp > 1 and others * run.dp % run.ep == 0 and nested else []
    return either([*whole, f"dp={dp} or a multiple"])


def _check_dense(run: Run, model: ModelConfig) -> None:
    """Refuse degrees and routing of experts where there are none."""
    for degree, size in (("ep", run.ep), ("etp", run.etp or 1)):
        if size > 1:
            raise UserError(
                f"{model.name} is a dense model; {degree}={size} needs a mixture-of-experts "
                f"model; use {degree}=1"
            )
    for setting in SETTINGS.values():
        value = getattr(run, setting.name)
        if setting.section == "experts" and value != setting.default:
            raise UserError(
                f"{model.name} is a dense model; {setting.name}={value} needs a "
                f"mixture-of-experts model; drop {setting.name}"
            )
