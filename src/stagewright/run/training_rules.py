"""Rules of training runs: batch, stages, sharded state, recomputation and size."""

from __future__ import annotations

from stagewright.errors import divisors
from stagewright.model.config import ModelConfig
from stagewright.run.model_rules import sequence
from stagewright.run.pipeline_split import compute_split
from stagewright.run.rule import MOST_FLOPS, Errors, nearest, rule
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.declare import DEGREES, text_of
from stagewright.run.settings import Run
from stagewright.schedule import schedules

MOST_RANKS = 2**22
MOST_LAYER_PASSES = 2**20
"""Microbatches times layers: this many make a program of about 5 GB."""


# ---- of a run as it is given: `Run.unresolved` drops what these read -----------------------------


@rule("layers_per_stage adds up to the layers", "pp", "vpp", "layers_per_stage")
def _layers_add_up(run: Run, model: ModelConfig) -> Errors:
    split = run.layers_per_stage or ()
    if len(split) == run.virtual_stages and sum(split) != model.depth:
        yield (
            f"layers_per_stage adds up to {sum(split)}, wanted the {model.depth} layers of "
            f"{model.name}"
        )


@rule("pipeline_split allows the split", "pp", "vpp", "layers_per_stage", "pipeline_split")
def _pipeline_split(run: Run, model: ModelConfig) -> Errors:
    if run.pipeline_split != "compute":
        return
    split = compute_split(model, run.virtual_stages)
    if run.layers_per_stage not in (None, split):
        yield (
            "layers_per_stage contradicts pipeline_split=compute, which makes it "
            f"{text_of(split)}; drop either"
        )
    if model.num_experts:
        yield (
            "pipeline_split=compute is nanotron's rule for dense layers, and "
            f"{model.name} has experts; use layers_per_stage"
        )


# ---- ranks and stages ----------------------------------------------------------------------------


@rule("order names each degree once", "order")
def degrees_once(run: Run, model: ModelConfig) -> Errors:
    """Ranks are numbered by all degrees."""
    if sorted(run.order.split("-")) != sorted(DEGREES):
        yield (
            f"order is {run.order!r}, wanted each of {', '.join(DEGREES)} once, such as "
            "tp-cp-ep-dp-pp"
        )


@rule("ranks are not too many", "tp", "cp", "dp", "pp", "order")
def ranks(run: Run, model: ModelConfig) -> Errors:
    """The world size is within limits."""
    yield from degrees_once.errors(run, model)
    if run.world_size > MOST_RANKS:
        yield (
            f"tp={run.tp} x cp={run.cp} x dp={run.dp} x pp={run.pp} makes {run.world_size} ranks, "
            f"wanted at most {MOST_RANKS}; lower one of them"
        )


@rule(
    "the schedule takes the stages and microbatches",
    *("pp", "vpp", "schedule", "global_batch_size", "micro_batch_size", "dp"),
    "microbatch_group_size_per_vp_stage",
)
def _stages(run: Run, model: ModelConfig) -> Errors:
    schedule = run.resolved(model).schedule
    assert schedule is not None
    if run.vpp > 1 and run.pp == 1:
        yield f"vpp={run.vpp} splits pipeline stages, got pp=1; raise pp, or use vpp=1"
    step, group = run.micro_batch_size * run.dp, run.microbatch_group
    schedules.check(schedule, run.pp, run.microbatches, run.vpp, group=group, sequences=step)
    if schedule.endswith(".csv"):
        schedules.make(schedule, run.pp, run.microbatches, run.vpp)


@rule("ranks can share the vocabulary", "pp", "schedule", "framework")
def _shared_vocabulary(run: Run, model: ModelConfig) -> Errors:
    if schedules.shared_ends(run.schedule) is None:
        return
    shares = f"schedule={run.schedule} splits the vocabulary over the ranks of the pipeline, "
    if run.pp == 1:
        yield shares + "got pp=1; raise pp, or use schedule=1f1b"
    if run.framework != "megatron":
        yield (f"{shares}as a loop of Megatron-LM's, got framework={run.framework}; drop either")
    if model.tied_embeddings:
        yield (
            f"{shares}of a table of the embedding and another of the output, and {model.name} has "
            "one for both; use another schedule"
        )
    more = model.tower or model.mtp_num_layers or model.shared_blocks or model.residual_streams > 1
    if more or not model.predicts_tokens:
        yield (
            f"{shares}which is modelled where there is an embedding, layers and an output alone, "
            f"and {model.name} has more; use another schedule"
        )


@rule(
    "every stage has layers",
    *("pp", "vpp", "layers_per_stage", "pipeline_split"),
    *("first_stage_less_layers", "last_stage_less_layers"),
)
def layers(run: Run, model: ModelConfig) -> Errors:
    """Only the ends of a pipeline may have no layers."""
    depth, stages, split = model.depth, run.virtual_stages, run.layers_per_stage
    if split is None and run.pipeline_split == "layers":
        less = run.first_stage_less_layers + run.last_stage_less_layers
        if run.resolved(model).layers_per_stage is None:
            counted = f" (and {less} for its ends)" if less and run.mode == "train" else ""
            yield (
                f"pp={run.pp} x vpp={run.vpp} makes {stages} stages, but {model.name} has "
                f"{depth} layers{counted}; lower pp or vpp"
            )
        return
    split = compute_split(model, stages) if split is None else split
    if len(split) != stages:
        yield (
            f"layers_per_stage has {len(split)} numbers, wanted one for each of the {stages} "
            f"stages of pp={run.pp} x vpp={run.vpp}"
        )
    empty = [stage for stage in range(1, stages - 1) if not split[stage]]
    if empty and run.pipeline_split != "compute":  # nanotron leaves such ranks, which hand on
        yield (
            f"layers_per_stage leaves stage {empty[0]} without layers; only the first and the "
            "last, which hold the embedding and the output, may have none"
        )


# ---- batch and size ------------------------------------------------------------------------------


@rule(
    "micro_batch_size x dp divides the global batch",
    *("global_batch_size", "micro_batch_size", "dp"),
)
def _batch(run: Run, model: ModelConfig) -> Errors:
    batch, step = run.global_batch_size or 0, run.micro_batch_size * run.dp
    if batch % step:
        yield (
            f"global_batch_size={batch} is not divisible by micro_batch_size="
            f"{run.micro_batch_size} x dp={run.dp}; {nearest(batch, step)}"
        )


@rule(
    "the program is not too large",
    *("global_batch_size", "micro_batch_size", "dp", "pp", "schedule"),
)
def _passes(run: Run, model: ModelConfig) -> Errors:
    passes = run.microbatches * model.depth
    if passes > MOST_LAYER_PASSES:
        yield (
            f"{run.microbatches} microbatches x {model.depth} layers are {passes} layer "
            f"passes, wanted at most {MOST_LAYER_PASSES}; lower global_batch_size, or raise "
            "micro_batch_size or dp"
        )


@rule("no kernel is too large", "micro_batch_size", "seq_length", "tp", "cp")
def _kernels(run: Run, model: ModelConfig) -> Errors:
    length = run.resolved(model).seq_length
    assert length is not None
    inner = model.state_space.inner if model.state_space else 0
    widest = max(
        model.hidden_size * max(model.vocab_size, model.ffn_hidden_size, inner),
        model.num_attention_heads * model.kv_channels * max(length, model.hidden_size),
    )
    if 2 * run.micro_batch_size * length * widest // (run.tp * run.cp) > MOST_FLOPS:
        yield (
            f"micro_batch_size={run.micro_batch_size} x seq_length={length} makes a kernel of more "
            f"than {MOST_FLOPS} FLOPs on one rank; lower one of them, or raise tp or cp"
        )


# ---- state, adapters, recomputation --------------------------------------------------------------


@rule(
    "dp_shard divides dp, and something is sharded",
    *("dp", "dp_shard", "zero", "reshard_after_forward", "bucket"),
)
def _state(run: Run, model: ModelConfig) -> Errors:
    if run.dp_shard is not None and run.dp % run.dp_shard:
        yield f"dp_shard={run.dp_shard} does not divide dp={run.dp}; use {divisors(run.dp)}"
    if run.dp_shard is not None and not run.zero:
        yield (
            f"dp_shard={run.dp_shard} says how far to shard, but zero=0 shards nothing; "
            "set zero to 1, 2 or 3, or drop dp_shard"
        )
    if not run.reshard_after_forward and run.zero != 3:
        yield (
            "reshard_after_forward=False is about the parameters that zero=3 gathers, got "
            f"zero={run.zero}; set zero=3, or drop it"
        )
    if run.bucket == "rank" and run.zero > 1:
        yield (
            "bucket=rank sums whole gradients when all microbatches are done, of which "
            f"zero={run.zero} keeps parts; use zero=0 or 1"
        )


@rule(
    "adapters are split evenly",
    *("tp", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("lora_all_to_all", "quantize_base", "precision", "fp8_recipe", "freeze", "trainable"),
)
def _adapters(run: Run, model: ModelConfig) -> Errors:
    rank, base = run.lora_rank, run.quantize_base
    if rank and rank % run.tp:
        yield (
            f"tp={run.tp} does not divide lora_rank={rank}, the channels of adapters; "
            f"{nearest(rank, run.tp)}"
        )
    if rank and model.shared_blocks:
        yield (
            f"lora_rank: {model.name} has layers that share weights, beside which adapters are not "
            "modelled; drop it"
        )
    if base and not (rank or run.freeze or run.trainable):
        yield (
            f"quantize_base={base} is about frozen matrices, and all parameters train; set "
            "lora_rank or freeze, or drop it"
        )
    if base and run.precision not in ("bf16", *(["fp8"] if base == "fp8" else [])):
        yield f"quantize_base={base} needs precision=bf16, got {run.precision}; drop either"
    if base and run.fp8_recipe == "mxfp8":
        yield (
            f"quantize_base={base} is stored with a scale for each matrix, and fp8_recipe=mxfp8 "
            "multiplies blocks with scales of their own; drop either"
        )
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_all_to_all"):
        if rank is None and getattr(run, name) != SETTINGS[name].default:
            yield (
                f"{name} is about adapters, which lora_rank asks for; set lora_rank, or drop {name}"
            )


@rule(
    "recomputation and offload exclude nothing",
    *("precision", "params_dtype", "recompute_num_layers", "recompute_modules"),
    *("recompute_save", "recompute_save_on_host", "optimizer_cpu_offload", "tp"),
    *("sequence_parallel_grads", "sequence_parallel", "zero"),
)
def _recompute_and_offload(run: Run, model: ModelConfig) -> Errors:
    if run.precision == "fp32" and run.params_dtype == "bf16":
        yield (
            "params_dtype=bf16 is less than precision=fp32, which parameters are computed with; "
            "use precision=bf16, or params_dtype=fp32"
        )
    if (run.recompute_num_layers or 0) > model.depth:
        yield (
            f"recompute_num_layers={run.recompute_num_layers} is more than the {model.depth} "
            f"layers of {model.name}; use fewer, or drop it for all"
        )
    if not run.recompute_modules:
        yield "recompute_modules is empty; name some, or use recompute=none"
    if "mla_up_proj" in run.recompute_modules and not model.kv_lora_rank:
        yield (
            f"recompute_modules=mla_up_proj is a part of latent attention, which {model.name} does "
            "not have; drop it"
        )
    if run.recompute_save_on_host and not run.recompute_save:
        yield (
            "recompute_save_on_host is about what recompute_save names, which is nothing; name some"
        )
    dtensor = run.sequence_parallel_grads == "dtensor" and run.sequence_parallel_ranks > 1
    if run.optimizer_cpu_offload and dtensor and run.zero < 3:
        yield (
            "optimizer_cpu_offload makes the update on the host, where "
            "sequence_parallel_grads=dtensor would have gradients summed over tp; use zero=3, or "
            "sequence_parallel_grads=step"
        )


# ---- all of them, in order -----------------------------------------------------------------------

AS_GIVEN = (_layers_add_up, _pipeline_split)
"""Rules of a run before `Run.unresolved`, which drops what they read."""

TRAINING = (
    *(sequence, _batch, _stages, _shared_vocabulary, layers, _state, _adapters),
    *(_recompute_and_offload, _passes, _kernels),
)
"""Rules of training beside those of the model and of single settings."""
