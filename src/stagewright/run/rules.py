"""What a run cannot be: `check` says what to change where it contradicts itself or its model.

Rows are `rule.Refuse` and `rule.Divide`; what takes more arithmetic than a row holds is a function.
Modes and needs of settings are declared with them, in `sections`. Rules of inference:
`serving_rules`.
"""

from __future__ import annotations

import math

from stagewright.errors import UserError, divisors, either
from stagewright.model.config import ModelConfig
from stagewright.run import serving_rules
from stagewright.run.rule import MOST_FLOPS, Divide, Refuse, apply, nearest, require_divides
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import AXES, describe_need, describe_value
from stagewright.run.settings import Run
from stagewright.schedule import schedules

MOST_RANKS = 2**22
MOST_LAYER_PASSES = 2**20
"""Microbatches times layers: this many make a program of about 5 GB."""


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError that says what to change if the run contradicts itself or the model."""
    model = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    apply(LAYERS_ADD_UP, run, model)  # `unresolved` keeps no split that is even
    run = run.unresolved()
    check_modes(run)
    if run.mode != "train":
        apply(serving_rules.MODELS, run, model)
    apply(RANKS, run, model)
    if model.tower:
        _check_model(run, model.tower)
        _check_images(run, model)
    if model.recommendation:
        _check_tables(run, model)
    _check_decoder_sequence(run, model)
    apply(DIFFUSION, run, model)
    _check_model(run, model)
    if run.mode != "train":
        _check_layers(run, model)
        serving_rules.check(run.resolved(model), model)
        return
    _check_sequence(run, model)
    apply(BATCH, run, model)
    _check_stages(run, model)
    _check_layers(run, model)
    apply(STATE, run, model)
    check_needs(run)
    apply(RECOMPUTE_AND_OFFLOAD, run, model)
    _check_size(run, model)


# ---- what the declarations of settings say -------------------------------------------------------


def check_modes(run: Run) -> None:
    """Refuse settings of training in inference, and those of inference in training."""
    for setting in SETTINGS.values():
        if run.mode in setting.modes or getattr(run, setting.name) == setting.default:
            continue
        if run.mode == "train":
            raise UserError(
                f"{setting.name} is a setting of inference, got mode=train; "
                "set mode to prefill or decode, or drop it"
            )
        if "train" in setting.modes:
            raise UserError(
                f"{setting.name} is a setting of training, got mode={run.mode}: "
                f"{setting.elsewhere}; drop it"
            )


def check_needs(run: Run) -> None:
    """Refuse settings without those that they need, unless a framework's habit implies them."""
    for setting in SETTINGS.values():
        value = getattr(run, setting.name)
        if value in (setting.default, setting.default_of(run.framework)):
            continue
        for other, values in setting.needs.items():
            got = getattr(run, other)
            if got not in values:
                raise UserError(
                    f"{describe_value(setting.name, value)} needs {describe_need(other, values)}, "
                    f"got {other}={got}; set it, or drop {setting.name}"
                )


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


# ---- rows ----------------------------------------------------------------------------------------

LAYERS_ADD_UP = (
    Refuse(
        lambda run, model: (
            run.layers_per_stage is not None
            and len(run.layers_per_stage) == run.virtual_stages
            and sum(run.layers_per_stage) != model.depth
        ),
        "layers_per_stage adds up to {sum}, wanted the {model.depth} layers of {model.name}",
        lambda run, model: {"sum": sum(run.layers_per_stage or ())},
    ),
)

RANKS = (
    Refuse(
        lambda run, model: sorted(run.order.split("-")) != sorted(AXES),
        "order is {run.order!r}, wanted each of {axes} once, such as tp-cp-ep-dp-pp",
        lambda run, model: {"axes": ", ".join(AXES)},
    ),
    Refuse(
        lambda run, model: run.world_size > MOST_RANKS,
        "tp={run.tp} x cp={run.cp} x dp={run.dp} x pp={run.pp} makes {run.world_size} ranks, "
        "wanted at most {most}; lower one of them",
        lambda run, model: {"most": MOST_RANKS},
    ),
)

DIFFUSION = (
    Refuse(
        lambda run, model: model.diffusion and (run.sequence_parallel or run.cp > 1),
        "{model.name}: its sequences of {model.max_position_embeddings} positions, one of which "
        "modulates the others, are not split; use no sequence_parallel, and cp=1",
    ),
)

MODEL = (
    Divide(
        "tp",
        lambda model: model.num_attention_heads,
        "attention heads of {model.name}",
        when=lambda run, model: model.attends,
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
            model.attends and model.num_query_groups % run.tp and run.tp % model.num_query_groups
        ),
        "tp={run.tp} neither divides the {model.num_query_groups} key-value heads of {model.name} "
        "nor is a multiple of them; use {fit}",
        lambda run, model: {
            "fit": either(_shared(model.num_attention_heads, model.num_query_groups))
        },
    ),
)

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

SEQUENCE = (
    Refuse(
        lambda run, model: (
            (model.vision or model.diffusion) and run.seq_length != model.max_position_embeddings
        ),
        "seq_length={run.seq_length} is not the {model.max_position_embeddings} positions of an "
        "image of {model.name}; leave it out",
    ),
    Refuse(
        lambda run, model: (
            model.position == "learned" and (run.seq_length or 0) > model.max_position_embeddings
        ),
        "seq_length={run.seq_length} is longer than the {model.max_position_embeddings} learned "
        "positions of {model.name}; use at most {model.max_position_embeddings}",
    ),
)

BATCH = (
    Refuse(
        lambda run, model: (
            run.global_batch_size is not None
            and run.global_batch_size % (run.micro_batch_size * run.dp)
        ),
        "global_batch_size={run.global_batch_size} is not divisible by micro_batch_size="
        "{run.micro_batch_size} x dp={run.dp}; {use}",
        lambda run, model: {
            "use": nearest(run.global_batch_size or 0, run.micro_batch_size * run.dp)
        },
    ),
)

STATE = (
    Refuse(
        lambda run, model: run.dp_shard is not None and run.dp % run.dp_shard,
        "dp_shard={run.dp_shard} does not divide dp={run.dp}; use {fit}",
        lambda run, model: {"fit": divisors(run.dp)},
    ),
    Refuse(
        lambda run, model: run.dp_shard is not None and not run.zero,
        "dp_shard={run.dp_shard} says how far to shard, but zero=0 shards nothing; "
        "set zero to 1, 2 or 3, or drop dp_shard",
    ),
    Refuse(
        lambda run, model: not run.reshard_after_forward and run.zero != 3,
        "reshard_after_forward=False is about the parameters that zero=3 gathers, got "
        "zero={run.zero}; set zero=3, or drop it",
    ),
)

RECOMPUTE_AND_OFFLOAD = (
    Refuse(
        lambda run, model: run.precision == "fp32" and run.params_dtype == "bf16",
        "params_dtype=bf16 is less than precision=fp32, which parameters are computed with; "
        "use precision=bf16, or params_dtype=fp32",
    ),
    Refuse(
        lambda run, model: (run.recompute_num_layers or 0) > model.depth,
        "recompute_num_layers={run.recompute_num_layers} is more than the {model.depth} layers of "
        "{model.name}; use fewer, or drop it for all",
    ),
    Refuse(
        lambda run, model: not run.recompute_modules,
        "recompute_modules is empty; name some, or use recompute=none",
    ),
    Refuse(
        lambda run, model: (
            run.optimizer_cpu_offload
            and run.sequence_parallel_grads == "dtensor"
            and run.sequence_parallel
            and run.zero < 3
        ),
        "optimizer_cpu_offload makes the update on the host, where sequence_parallel_grads=dtensor "
        "would have gradients summed over tp; use zero=3, or sequence_parallel_grads=step",
    ),
)


# ---- the model -----------------------------------------------------------------------------------


def _check_model(run: Run, model: ModelConfig) -> None:
    apply(MODEL, run, model)
    _check_state_heads(run, model)
    if model.num_experts:
        _check_experts(run, model)
    else:
        _check_dense(run, model)


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
    etp, ranks = run.etp or run.tp, run.tp * run.cp * run.dp
    if ranks % (etp * run.ep):
        raise UserError(
            f"etp={etp} * ep={run.ep} does not divide tp * cp * dp = {ranks}: experts spread over "
            "the ranks of these; use a smaller ep, or more dp"
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
    apply(ROUTING, run, model)


def _check_tables(run: Run, model: ModelConfig) -> None:
    """Tables are split over dp by columns; nothing else splits this kind of model."""
    for name in ("tp", "cp", "pp"):
        if getattr(run, name) > 1:
            raise UserError(
                f"{name}={getattr(run, name)} splits layers that {model.name} does not have; use dp"
            )
    assert model.recommendation is not None
    width = model.recommendation.bottom[-1]
    if width % run.dp:
        raise UserError(
            f"dp={run.dp} does not divide the width {width} of the tables of {model.name}; "
            f"use {divisors(width)}"
        )


# ---- sequences -----------------------------------------------------------------------------------


def _check_images(run: Run, model: ModelConfig) -> None:
    """A tower's sequence is what its images make it, and the text comes after that."""
    assert model.tower is not None
    positions = model.tower.max_position_embeddings
    length = run.resolved(model).seq_length or 0
    if length < positions:
        raise UserError(
            f"seq_length={length} has no room for text behind the {positions - 1} patches of an "
            f"image of {model.name}; use {positions} or more"
        )
    of = f"positions of an image of {model.name}"
    for name, ranks in (
        ("sequence_parallel with tp", run.tp * run.sequence_parallel),
        ("cp", run.cp),
    ):
        if ranks > 1:
            require_divides(name, ranks, positions, of, end=", or none")


def _check_decoder_sequence(run: Run, model: ModelConfig) -> None:
    """What an encoder and a decoder allow."""
    if not model.encoder_num_layers:
        if run.decoder_seq_length is not None:
            raise UserError(
                f"decoder_seq_length={run.decoder_seq_length} is of an encoder and a decoder, but "
                f"{model.name} has no encoder; use seq_length"
            )
        return
    length = run.resolved(model).decoder_seq_length
    if length is None:
        return
    pieces = 2 * run.cp if run.cp > 1 and run.cp_comm_type != "a2a" else run.cp
    ranks = f"cp x tp={run.cp * run.tp}" if run.cp > 1 else f"tp={run.tp}"
    _check_pieces("decoder_seq_length", length, pieces, run, ranks)


def _check_sequence(run: Run, model: ModelConfig) -> None:
    run = run.resolved(model)
    apply(SEQUENCE, run, model)
    length = run.seq_length
    assert length is not None
    if run.cp_comm_type == "a2a" and model.attends:
        _check_ulysses(run, model)
    causal = model.causal and not model.encoder_num_layers  # whose sequence this is
    balanced = run.cp > 1 and causal and model.attends and run.cp_comm_type != "a2a"
    pieces = 2 * run.cp if balanced else run.cp
    _check_pieces("seq_length", length, pieces, run, f"cp x tp={run.cp * run.tp}")
    apply(serving_rules.SEQUENCE_PARALLEL, run, model)


def _check_ulysses(run: Run, model: ModelConfig) -> None:
    """All-to-alls over cp leave each rank whole heads."""
    heads = model.num_attention_heads // run.tp
    groups = max(1, model.num_query_groups // run.tp)
    for count, what in ((heads, "attention"), (groups, "key-value")):
        if count % run.cp and (what == "attention" or count > 1):
            raise UserError(
                f"cp={run.cp} does not divide the {count} {what} heads of a rank ({model.name} "
                f"with tp={run.tp}), which cp_comm_type=a2a needs; use cp={divisors(count)}, or p2p"
            )


def _check_pieces(name: str, length: int, pieces: int, run: Run, ranks: str) -> None:
    """A sequence is split into pieces over cp, and with sequence parallelism over tp."""
    if length % pieces:
        why = f"2 x cp={pieces} (causal load balance)" if pieces > run.cp else f"cp={run.cp}"
        raise UserError(f"{name}={length} is not divisible by {why}; {nearest(length, pieces)}")
    step = math.lcm(pieces, run.cp * run.tp)
    if run.sequence_parallel and length % step:
        raise UserError(
            f"{name}={length} is not divisible by {ranks}, which sequence_parallel needs; "
            f"{nearest(length, step)}"
        )


# ---- stages and size -----------------------------------------------------------------------------


def _check_stages(run: Run, model: ModelConfig) -> None:
    schedule = run.resolved(model).schedule
    assert schedule is not None
    if run.vpp > 1 and run.pp == 1:
        raise UserError(f"vpp={run.vpp} splits pipeline stages, got pp=1; raise pp, or use vpp=1")
    step = run.micro_batch_size * run.dp
    schedules.check(schedule, run.pp, run.microbatches, run.vpp, sequences=step)
    if schedule.endswith(".csv"):
        schedules.make(schedule, run.pp, run.microbatches, run.vpp)


def _check_layers(run: Run, model: ModelConfig) -> None:
    layers, stages = model.depth, run.virtual_stages
    split = run.layers_per_stage
    if split is None:
        if layers < stages:
            raise UserError(
                f"pp={run.pp} x vpp={run.vpp} makes {stages} stages, but {model.name} has "
                f"{layers} layers; lower pp or vpp"
            )
        return
    if len(split) != stages:
        raise UserError(
            f"layers_per_stage has {len(split)} numbers, wanted one for each of the {stages} "
            f"stages of pp={run.pp} x vpp={run.vpp}"
        )
    empty = [stage for stage in range(1, stages - 1) if not split[stage]]
    if empty:
        raise UserError(
            f"layers_per_stage leaves stage {empty[0]} without layers; only the first and the "
            "last, which hold the embedding and the output, may have none"
        )


def _check_size(run: Run, model: ModelConfig) -> None:
    passes = run.microbatches * model.depth
    if passes > MOST_LAYER_PASSES:
        raise UserError(
            f"{run.microbatches} microbatches x {model.depth} layers are {passes} layer "
            f"passes, wanted at most {MOST_LAYER_PASSES}; lower global_batch_size, or raise "
            "micro_batch_size or dp"
        )
    length = run.resolved(model).seq_length
    assert length is not None
    tokens = run.micro_batch_size * length
    inner = model.state_space.inner if model.state_space else 0
    widest = max(
        model.hidden_size * max(model.vocab_size, model.ffn_hidden_size, inner),
        model.num_attention_heads * model.kv_channels * max(length, model.hidden_size),
    )
    if 2 * tokens * widest // (run.tp * run.cp) > MOST_FLOPS:
        raise UserError(
            f"micro_batch_size={run.micro_batch_size} x seq_length={length} makes a kernel of more "
            f"than {MOST_FLOPS} FLOPs on one rank; lower one of them, or raise tp or cp"
        )
