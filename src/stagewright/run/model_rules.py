"""Rules of the model: degrees that divide its heads, widths and experts, and its sequences."""

from __future__ import annotations

import math

from stagewright.errors import divisors, either
from stagewright.model.config import ModelConfig
from stagewright.run.rule import Errors, RunRule, nearest, not_divided, rule
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run

_EXPERTS = tuple(of.name for of in SETTINGS.values() if of.section == "experts")
_SEQUENCE = ("seq_length", "cp", "tp", "sequence_parallel", "cp_comm_type")


def rules_of_model(model: ModelConfig, whose: str = "") -> tuple[RunRule, ...]:
    """Degrees divide what they split of a model, and nothing routes tokens without experts.

    `whose` prefixes the names of the rules. They check against this `model`, whatever model their
    `check` is given.
    """

    def bound(of: RunRule) -> RunRule:
        return RunRule(whose + of.name, of.reads, lambda run, _: of.errors(run, model))

    experts = (_experts, _routing) if model.num_experts else (_dense,)
    return tuple(map(bound, (_heads, _state_heads, *experts)))


# ---- heads, channels and experts -----------------------------------------------------------------


@rule("heads and channels are split evenly by tp", "tp")
def _heads(run: Run, model: ModelConfig) -> Errors:
    tp, heads, groups = run.tp, model.num_attention_heads, model.shared_query_groups
    if model.attends:
        yield from not_divided("tp", tp, heads, f"attention heads of {model.name}")
    yield from not_divided("tp", tp, model.o_groups, f"groups of attention heads of {model.name}")
    width = model.ffn_hidden_size
    if "dense" in model.parts:
        fit = math.gcd(heads, width)
        yield from not_divided("tp", tp, width, f"channels of the MLP of {model.name}", fit)
    if (shared := model.shared_blocks) and shared.adapter_rank % tp:
        yield (
            f"tp={tp} does not divide the adapters' rank {shared.adapter_rank} of {model.name}; "
            f"use {divisors(math.gcd(heads, shared.adapter_rank))}"
        )
    # Ranks share key-value heads evenly: several each, or several ranks hold one.
    if model.attends and groups % tp and tp % groups:
        yield (
            f"tp={tp} neither divides the {groups} key-value heads of {model.name} nor is a "
            f"multiple of them; use {either(_shared(heads, groups))}"
        )
    # Some layers may have sizes of their own.
    own = [n or 0 for of in model.own_sizes for n in (of.num_attention_heads, of.ffn_hidden_size)]
    if any(size % tp for size in own):
        yield (
            f"tp={tp} does not divide the heads and the channels of the MLP of each layer of "
            f"{model.name}, whose layers have sizes of their own; "
            f"use {divisors(math.gcd(heads, width, *own))}"
        )
    if own and not _splits_queries(model, tp):
        fit = either(n for n in range(1, tp) if _splits_queries(model, n))
        yield (
            f"tp={tp} splits the key-value heads of {model.name} as the layers with the fewest of "
            f"them allow, and then not the query heads of the others; use {fit}"
        )


def _splits_queries(model: ModelConfig, tp: int) -> bool:
    """True if `tp` ranks split the query heads of a key-value head in every kind of layer."""
    copies = tp // math.gcd(tp, model.shared_query_groups)
    return all(heads % tp == 0 == heads // groups % copies for heads, groups in model.head_counts)


def _shared(heads: int, groups: int) -> list[int]:
    """Divisors of the heads that divide the groups or are multiples of them."""
    degrees = [d for d in range(1, heads + 1) if heads % d == 0]
    return [d for d in degrees if groups % d == 0 or d % groups == 0]


@rule("state layers are split evenly by tp and cp", "tp", "cp")
def _state_heads(run: Run, model: ModelConfig) -> Errors:
    """Layers that carry a state split whole heads, and over cp too: as Megatron-LM's Mamba does."""
    state = model.state_space
    if state is None:
        return
    heads, groups = state.heads, state.groups
    what = "channels" if model.recurrence == "mamba" else "heads"
    yield from not_divided("tp", run.tp, heads, f"{what} of the state layers of {model.name}")
    if what == "heads" and groups % run.tp and run.tp % groups:
        yield (
            f"tp={run.tp} neither divides the {groups} groups of heads in the state layers of "
            f"{model.name} nor is a multiple of them; use {either(_shared(heads, groups))}"
        )
    yield from not_divided(
        "cp",
        run.cp,
        heads // run.tp,
        f"{what} of a rank in the state layers of {model.name} (tp={run.tp}), which has whole "
        f"sequences of fewer {what} there",
    )
    groups_of_rank = groups // math.gcd(run.tp, groups)
    heads_of_group = heads // groups // (run.tp // math.gcd(run.tp, groups))
    if what == "heads" and groups_of_rank % run.cp and heads_of_group % run.cp:
        yield (
            f"cp={run.cp} divides neither the {groups_of_rank} groups of a rank in the state "
            f"layers of {model.name} (tp={run.tp}) nor the heads of a group; "
            f"use {divisors(groups_of_rank)}"
        )


@rule(
    "experts are split evenly by ep and etp",
    *("tp", "cp", "dp", "ep", "etp", "num_redundant_experts"),
)
def _experts(run: Run, model: ModelConfig) -> Errors:
    redundant = run.num_redundant_experts
    more = f" and num_redundant_experts={redundant}" if redundant else ""
    experts = model.num_experts + redundant
    if experts % run.ep:
        copies = "" if run.mode == "train" else f", or num_redundant_experts={-experts % run.ep}"
        yield (
            f"ep={run.ep} does not divide the {model.num_experts} experts of {model.name}{more}; "
            f"use {divisors(experts)}{copies}"
        )
    etp, others = run.expert_tensor_parallel_size, run.tp * run.cp
    ranks = others * run.dp
    if ranks % (etp * run.ep):
        default = " (as tp)" if run.etp is None else ""
        dp = etp * run.ep // math.gcd(etp * run.ep, others)
        nested = run.ep % run.tp == 0 or run.tp % run.ep == 0
        whole = ["etp=1"] if etp > 1 and ranks % run.ep == 0 and nested else []
        yield (
            f"etp={etp}{default} x ep={run.ep} does not divide the {ranks} ranks of tp={run.tp} x "
            f"cp={run.cp} x dp={run.dp}, which share the experts; "
            f"use {either([*whole, f'dp={dp} or a multiple'])}"
        )
    for name, degree, width, of in (
        ("tp", run.tp, model.shared_ffn_hidden_size, "the shared experts"),
        ("etp", etp, model.moe_ffn_hidden_size, "an expert"),
    ):
        if width % degree:
            yield (
                f"{name}={degree} does not divide the width {width} of {of} of {model.name}; "
                f"use {divisors(width)}"
            )


@rule("tokens can be routed so", *_EXPERTS)
def _routing(run: Run, model: ModelConfig) -> Errors:
    factor, dispatcher = run.moe_expert_capacity_factor, run.moe_token_dispatcher_type
    if run.moe_router_enable_expert_bias and model.router != "sigmoid":
        yield (
            f"moe_router_enable_expert_bias balances sigmoid scores, but {model.name} has "
            f"{model.router}; use moe_aux_loss_coeff, or drop moe_router_enable_expert_bias"
        )
    if dispatcher == "allgather" and factor is not None:
        yield (
            f"moe_expert_capacity_factor={factor} needs copies that go to their experts, got "
            "moe_token_dispatcher_type=allgather; use alltoall, or drop the factor"
        )
    if run.moe_pad_expert_input_to_capacity and factor is None:
        yield (
            "moe_pad_expert_input_to_capacity pads to moe_expert_capacity_factor; set it, or drop "
            "moe_pad_expert_input_to_capacity"
        )
    if run.moe_apply_probs in ("input", "output") and dispatcher != "alltoall":
        yield (
            f"moe_apply_probs={run.moe_apply_probs} needs moe_token_dispatcher_type=alltoall, got "
            f"{dispatcher}; use alltoall, or moe_apply_probs=experts"
        )
    if run.moe_router_load_balancing_type != "aux_loss" and not run.moe_aux_loss_coeff:
        yield (
            f"moe_router_load_balancing_type={run.moe_router_load_balancing_type} does nothing "
            "with moe_aux_loss_coeff=0; set moe_aux_loss_coeff, such as 0.01, or drop it"
        )
    if run.expert_load is not None and model.mtp_num_layers:
        yield (
            f"expert_load has no lines for the mtp_num_layers={model.mtp_num_layers} layers behind "
            "the model's; drop either"
        )


@rule("a dense model has no experts", "ep", "etp", *_EXPERTS)
def _dense(run: Run, model: ModelConfig) -> Errors:
    for degree, size in (("ep", run.ep), ("etp", run.etp or 1)):
        if size > 1:
            yield (
                f"{model.name} is a dense model; {degree}={size} needs a mixture-of-experts "
                f"model; use {degree}=1"
            )
    for name in _EXPERTS:
        value = getattr(run, name)
        if value != SETTINGS[name].default:
            yield (
                f"{model.name} is a dense model; {name}={value} needs a mixture-of-experts model; "
                f"drop {name}"
            )


# ---- sequences -----------------------------------------------------------------------------------


@rule("the sequence is split evenly", *_SEQUENCE, "document_length")
def sequence(run: Run, model: ModelConfig) -> Errors:
    """A sequence of training has positions in the model, and pieces over cp and tp."""
    run = run.resolved(model)
    length, most = run.seq_length or 0, model.max_position_embeddings
    if model.vision and length != most:
        yield (
            f"seq_length={length} is not the {most} positions of an image of {model.name}; leave "
            "it out"
        )
    if model.position == "learned" and length > most:
        yield (
            f"seq_length={length} is longer than the {most} learned positions of {model.name}; "
            f"use at most {most}"
        )
    if document := run.document_length:
        if document > length:
            yield (
                f"document_length={document} is longer than seq_length={length}, which documents "
                "are packed into; use at most that"
            )
        if not (model.causal and model.attends and not model.encoder_num_layers):
            yield (
                f"document_length={document} is about causal attention, which {model.name} has "
                "none of; drop it"
            )
    if run.cp > 1 and (model.index_topk or model.o_groups) and run.cp_comm_type != "all_gather":
        reads = "compressed keys of the whole sequence"
        if model.index_topk:
            reads = "keys anywhere in the sequence, which an indexer chooses among all"
        yield (
            f"cp_comm_type={run.cp_comm_type}: each query of {model.name} reads {reads}; use "
            "cp_comm_type=all_gather"
        )
    if length % model.positions_of_a_key:
        yield (
            f"seq_length={length} is no multiple of the {model.positions_of_a_key} positions that "
            f"have one compressed key in {model.name}; {nearest(length, model.positions_of_a_key)}"
        )
    if run.cp_comm_type == "a2a" and model.attends:
        yield from _ulysses(run, model)
    causal = model.causal and not model.encoder_num_layers  # whose sequence this is
    balanced = run.cp > 1 and causal and model.attends and run.cp_comm_type != "a2a"
    pieces = 2 * run.cp if balanced else run.cp
    yield from _pieces("seq_length", length, pieces, run, f"cp x tp={run.cp * run.tp}")


@rule("the sequence holds an image", *_SEQUENCE)
def images(run: Run, model: ModelConfig) -> Errors:
    """A tower's sequence is what its images make it, and the text comes after that."""
    assert model.tower is not None
    positions = model.tower.max_position_embeddings
    length = run.resolved(model).seq_length or 0
    if length < positions:
        yield (
            f"seq_length={length} has no room for text behind the {positions - 1} patches of an "
            f"image of {model.name}; use {positions} or more"
        )
    of = f"positions of an image of {model.name}"
    split = {"sequence_parallel with tp": run.sequence_parallel_ranks, "cp": run.cp}
    for name, ranks in split.items():
        yield from not_divided(name, ranks, positions, of, end=", or none")


@rule("the decoder's sequence is split evenly", *_SEQUENCE, "decoder_seq_length")
def decoder_sequence(run: Run, model: ModelConfig) -> Errors:
    """A decoder behind an encoder has a sequence of its own."""
    if not model.encoder_num_layers:
        if run.decoder_seq_length is not None:
            yield (
                f"decoder_seq_length={run.decoder_seq_length} is of an encoder and a decoder, but "
                f"{model.name} has no encoder; use seq_length"
            )
        return
    length = run.resolved(model).decoder_seq_length
    if length is not None:
        pieces = 2 * run.cp if run.cp > 1 and run.cp_comm_type != "a2a" else run.cp
        ranks = f"cp x tp={run.cp * run.tp}" if run.cp > 1 else f"tp={run.tp}"
        yield from _pieces("decoder_seq_length", length, pieces, run, ranks)


def _ulysses(run: Run, model: ModelConfig) -> Errors:
    """All-to-alls over cp leave each rank whole heads."""
    heads = model.num_attention_heads // run.tp
    groups = max(1, model.num_query_groups // run.tp)
    for count, what in ((heads, "attention"), (groups, "key-value")):
        if count % run.cp and (what == "attention" or count > 1):
            yield (
                f"cp={run.cp} does not divide the {count} {what} heads of a rank ({model.name} "
                f"with tp={run.tp}), which cp_comm_type=a2a needs; use cp={divisors(count)}, or p2p"
            )


def _pieces(name: str, length: int, pieces: int, run: Run, ranks: str) -> Errors:
    """A sequence is split into pieces over cp, and with sequence parallelism over tp."""
    if length % pieces:
        why = f"2 x cp={pieces} (causal load balance)" if pieces > run.cp else f"cp={run.cp}"
        yield f"{name}={length} is not divisible by {why}; {nearest(length, pieces)}"
    step = math.lcm(pieces, run.cp * run.tp)
    if run.sequence_parallel and length % step:
        yield (
            f"{name}={length} is not divisible by {ranks}, which sequence_parallel needs; "
            f"{nearest(length, step)}"
        )
