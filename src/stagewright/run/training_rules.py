"""Rules of training runs: batch, stages, sharded state, recomputation and size.

Rows are `rule.Refuse`; what takes more arithmetic than a row holds is a function.
"""

from __future__ import annotations

from stagewright.errors import UserError, divisors
from stagewright.model.config import ModelConfig
from stagewright.run.pipeline_split import compute_split
from stagewright.run.rule import MOST_FLOPS, Refuse, nearest
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import DEGREES, text_of
from stagewright.run.settings import Run
from stagewright.schedule import schedules

MOST_RANKS = 2**22
MOST_LAYER_PASSES = 2**20
"""Microbatches times layers: this many make a program of about 5 GB."""


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

PIPELINE_SPLIT = (
    Refuse(
        lambda run, model: (
            run.pipeline_split == "compute"
            and run.layers_per_stage is not None
            and run.layers_per_stage != compute_split(model, run.virtual_stages)
        ),
        "layers_per_stage contradicts pipeline_split=compute, which makes it {split}; drop either",
        lambda run, model: {"split": text_of(compute_split(model, run.virtual_stages))},
    ),
    Refuse(
        lambda run, model: run.pipeline_split == "compute" and model.num_experts,
        "pipeline_split=compute is nanotron's rule for dense layers, and {model.name} has experts; "
        "use layers_per_stage",
    ),
)

DEGREES_ONCE = Refuse(
    lambda run, model: sorted(run.order.split("-")) != sorted(DEGREES),
    "order is {run.order!r}, wanted each of {degrees} once, such as tp-cp-ep-dp-pp",
    lambda run, model: {"degrees": ", ".join(DEGREES)},
)

RANKS = (
    DEGREES_ONCE,
    Refuse(
        lambda run, model: run.world_size > MOST_RANKS,
        "tp={run.tp} x cp={run.cp} x dp={run.dp} x pp={run.pp} makes {run.world_size} ranks, "
        "wanted at most {most}; lower one of them",
        lambda run, model: {"most": MOST_RANKS},
    ),
)

ADAPTERS = (
    Refuse(
        lambda run, model: run.lora_rank and run.lora_rank % run.tp,
        "tp={run.tp} does not divide lora_rank={run.lora_rank}, the channels of adapters; {fit}",
        lambda run, model: {"fit": nearest(run.lora_rank or 1, run.tp)},
    ),
    Refuse(
        lambda run, model: run.lora_rank and model.shared_blocks,
        "lora_rank: {model.name} has layers that share weights, beside which adapters are not "
        "modelled; drop it",
    ),
    Refuse(
        lambda run, model: run.quantize_base and not (run.lora_rank or run.freeze or run.trainable),
        "quantize_base={run.quantize_base} is about frozen matrices, and all parameters train; set "
        "lora_rank or freeze, or drop it",
    ),
    Refuse(
        lambda run, model: (
            run.quantize_base
            and run.precision not in ("bf16", *(["fp8"] if run.quantize_base == "fp8" else []))
        ),
        "quantize_base={run.quantize_base} needs precision=bf16, got {run.precision}; drop either",
    ),
    Refuse(
        lambda run, model: run.quantize_base and run.fp8_recipe == "mxfp8",
        "quantize_base={run.quantize_base} is stored with a scale for each matrix, and "
        "fp8_recipe=mxfp8 multiplies blocks with scales of their own; drop either",
    ),
    *(
        Refuse(
            lambda run, model, name=name: (
                run.lora_rank is None and getattr(run, name) != SETTINGS[name].default
            ),
            f"{name} is about adapters, which lora_rank asks for; set lora_rank, or drop {name}",
        )
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_all_to_all")
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
    Refuse(
        lambda run, model: run.bucket == "rank" and run.zero > 1,
        "bucket=rank sums whole gradients when all microbatches are done, of which zero={run.zero} "
        "keeps parts; use zero=0 or 1",
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
        lambda run, model: run.recompute_save_on_host and not run.recompute_save,
        "recompute_save_on_host is about what recompute_save names, which is nothing; name some",
    ),
    Refuse(
        lambda run, model: (
            run.optimizer_cpu_offload
            and run.sequence_parallel_grads == "dtensor"
            and run.sequence_parallel_size > 1
            and run.zero < 3
        ),
        "optimizer_cpu_offload makes the update on the host, where sequence_parallel_grads=dtensor "
        "would have gradients summed over tp; use zero=3, or sequence_parallel_grads=step",
    ),
)


def _shares(run: Run) -> bool:
    return schedules.shared_ends(run.schedule) is not None


_SHARES = "schedule={run.schedule} splits the vocabulary over the ranks of the pipeline, "

SHARED_VOCABULARY = (
    Refuse(
        lambda run, model: _shares(run) and run.pp == 1,
        _SHARES + "got pp=1; raise pp, or use schedule=1f1b",
    ),
    Refuse(
        lambda run, model: _shares(run) and run.framework != "megatron",
        _SHARES + "as a loop of Megatron-LM's, got framework={run.framework}; drop either",
    ),
    Refuse(
        lambda run, model: _shares(run) and model.tied_embeddings,
        _SHARES + "of a table of the embedding and another of the output, and {model.name} has one "
        "for both; use another schedule",
    ),
    Refuse(
        lambda run, model: _shares(run) and not _is_chain_of_layers(model),
        _SHARES + "which is modelled where there is an embedding, layers and an output alone, and "
        "{model.name} has more; use another schedule",
    ),
)


def _is_chain_of_layers(model: ModelConfig) -> bool:
    more = model.tower or model.mtp_num_layers or model.shared_blocks or model.residual_streams > 1
    return model.predicts_tokens and not more


# ---- stages and size -----------------------------------------------------------------------------


def check_stages(run: Run, model: ModelConfig) -> None:
    """Refuse a schedule that does not take the stages and microbatches."""
    schedule = run.resolved(model).schedule
    assert schedule is not None
    if run.vpp > 1 and run.pp == 1:
        raise UserError(f"vpp={run.vpp} splits pipeline stages, got pp=1; raise pp, or use vpp=1")
    step = run.micro_batch_size * run.dp
    schedules.check(
        schedule, run.pp, run.microbatches, run.vpp, group=run.microbatch_group, sequences=step
    )
    if schedule.endswith(".csv"):
        schedules.make(schedule, run.pp, run.microbatches, run.vpp)


def check_layers(run: Run, model: ModelConfig) -> None:
    """Refuse stages without layers, and splits for another number of stages."""
    layers, stages = model.depth, run.virtual_stages
    split = run.layers_per_stage
    if split is None and run.pipeline_split == "layers":
        less = run.first_stage_less_layers + run.last_stage_less_layers
        if run.resolved(model).layers_per_stage is None:
            counted = f" (and {less} for its ends)" if less and run.mode == "train" else ""
            raise UserError(
                f"pp={run.pp} x vpp={run.vpp} makes {stages} stages, but {model.name} has "
                f"{layers} layers{counted}; lower pp or vpp"
            )
        return
    if split is None:
        split = compute_split(model, stages)
    if len(split) != stages:
        raise UserError(
            f"layers_per_stage has {len(split)} numbers, wanted one for each of the {stages} "
            f"stages of pp={run.pp} x vpp={run.vpp}"
        )
    empty = [stage for stage in range(1, stages - 1) if not split[stage]]
    if empty and run.pipeline_split != "compute":  # nanotron leaves such ranks, which hand on
        raise UserError(
            f"layers_per_stage leaves stage {empty[0]} without layers; only the first and the "
            "last, which hold the embedding and the output, may have none"
        )


def check_passes(run: Run, model: ModelConfig) -> None:
    """Refuse more microbatches than a program may hold."""
    passes = run.microbatches * model.depth
    if passes > MOST_LAYER_PASSES:
        raise UserError(
            f"{run.microbatches} microbatches x {model.depth} layers are {passes} layer "
            f"passes, wanted at most {MOST_LAYER_PASSES}; lower global_batch_size, or raise "
            "micro_batch_size or dp"
        )


def check_kernels(run: Run, model: ModelConfig) -> None:
    """Refuse a kernel whose FLOPs would not add up within 64 bits."""
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
