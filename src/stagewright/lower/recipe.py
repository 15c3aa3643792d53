"""Translate a run's settings for the builders of blocks: a recipe, and the sizes of dims."""

from __future__ import annotations

import math
from dataclasses import replace

from stagewright import blocks as model_blocks
from stagewright.model.config import ModelConfig
from stagewright.parallel.degrees import reduces_each_microbatch
from stagewright.run import requests
from stagewright.run.settings import Run
from stagewright.schedule.schedules import shared_ends

OPTIMIZER_READS = {"adamw": 3, "sgd": 1}
"""Number of reads of a gradient by PyTorch's optimizers: `lerp_` 1, `addcmul_` 2; `add_` 1."""


def recipe_of(run: Run, model: ModelConfig) -> model_blocks.Recipe:
    """Recipe of a run on a single device."""
    freed = run.reshard_after_forward or (run.reshard_after_backward and run.pp == 1)
    gathered_once = run.zero == 3 and not freed
    dtensor = run.sequence_parallel_grads == "dtensor" and run.sequence_parallel_ranks > 1
    inference = None
    if run.mode != "train":
        inference = model_blocks.Inference(
            cache_dtype=run.kv_cache_dtype or "bf16",
            redundant_experts=run.num_redundant_experts,
            decode=run.mode == "decode",
            striped=requests.stripes(run, model) > 1,
            prefix=requests.prefixed(run),
        )
    return model_blocks.Recipe(
        experts=_experts(run, model),
        precision=_precision(run),
        optimizer=run.optimizer,
        flash_attention=run.flash_attention,
        document=run.document_length or 0,
        dropout=run.dropout and run.mode == "train",
        clip_grad=run.clip_grad,
        # Without buffers that gradients are added to, autograd adds those of one tensor first.
        sum_tied=reduces_each_microbatch(run) or run.set_grads_to_none,
        # Weights held in fp32 are cast in each microbatch, and so are the copies made of the casts.
        cast_once=gathered_once or (run.zero < 3 and run.params_dtype != "fp32"),
        gather_once=gathered_once,
        # As PyTorch's pipelines have it: the root is never freed after forward.
        gather_root_once=run.fsdp_root_unit and run.pp > 1,
        mtp_loss=run.mtp_loss_scaling_factor,
        index_loss=1.0,
        absorb=run.mla == "absorb",
        inference=inference,
        # Layout of the logits that the loss reads; with tp=1 nothing is split.
        logits="" if run.tp == 1 else "split" if run.loss_parallel else "gathered",
        operators=model_blocks.OperatorHabits(
            run.operators == "eager", run.joint_projections, run.repeat_kv
        ),
        gradients=model_blocks.GradientHabits(
            of_each_linear=run.input_grad_reduce == "linear" and run.tp > 1,
            whole_embedding=run.whole_embedding_grad and run.tp > 1,
            sum_as_made=dtensor and run.zero == 3,
            accumulated_as_reduced=run.zero == 3 and not reduces_each_microbatch(run),
        ),
        updates=model_blocks.OptimizerHabits(
            step_tensors=run.optimizer_step_tensors and run.optimizer == "adamw",
            momentum=run.sgd_momentum > 0,
            partial_reads=OPTIMIZER_READS[run.optimizer] if dtensor and run.zero < 3 else 0,
        ),
    )


def _precision(run: Run) -> model_blocks.Precision:
    """Number formats of a run."""
    moments = {"exp_avg": run.exp_avg_dtype, "exp_avg_sq": run.exp_avg_sq_dtype}
    default = model_blocks.PRECISIONS[run.precision]
    precision = replace(
        default,
        attention="fp8" if run.fp8_dot_product_attention else "",
        reduce=run.grad_reduce_dtype or "",
        gradient=(run.grad_reduce_dtype if run.zero < 2 else None) or default.gradient,
        moments=tuple((name, dtype) for name, dtype in moments.items() if dtype),
    )
    if run.precision == "fp8" and run.fp8_recipe:
        casts = model_blocks.FP8_RECIPES[run.fp8_recipe]
        precision = replace(
            precision,
            gemm="mxfp8" if run.fp8_recipe == "mxfp8" else precision.gemm,
            rescaling=casts.scales + casts.second_copy,
            second_copy=casts.second_copy,
            norms_cast=run.fp8_recipe == "delayed",
        )
    dtype = run.params_dtype
    if dtype is not None:
        precision = replace(precision, param=dtype, gradient=dtype, moment=dtype, master="")
    return precision


def _experts(run: Run, model: ModelConfig) -> model_blocks.ExpertRecipe:
    ranks = run.ep * run.expert_tensor_parallel_size
    exchanged = ranks > 1 and not run.moe_pad_expert_input_to_capacity
    bias, trains = run.moe_router_enable_expert_bias, run.mode == "train"
    return model_blocks.ExpertRecipe(
        dispatcher=run.moe_token_dispatcher_type,
        apply_probs=run.moe_apply_probs or model.apply_probs,
        exchange_counts=trains and exchanged and run.moe_token_dispatcher_type == "alltoall",
        router_fp32=run.moe_router_dtype == "fp32",
        load_balancing_type=run.moe_router_load_balancing_type,
        aux_loss=run.moe_aux_loss_coeff,
        z_loss=run.moe_z_loss_coeff,
        expert_bias=model.expert_bias if bias is None else bias,
    )


# ---- sizes ---------------------------------------------------------------------------------------


def sizes_of(run: Run, model: ModelConfig, *, replicas: int = 1) -> dict[str, int]:
    """Size of each named dim.

    The vocabulary is padded so that tp divides it, and pp where all ranks share the embedding and
    the output layer; DTensor's rows need not divide, and the first ranks have one more. In
    inference, sizes that depend on a batch are omitted. `replicas`: number of
    replicas of each stage in the schedule, each with another microbatch.
    """
    parts = run.tp * (run.pp if shared_ends(run.schedule) else 1)
    multiple = run.make_vocab_size_divisible_by * parts
    padded = -(-model.vocab_size // multiple) * multiple
    if run.whole_embedding_grad and multiple == run.tp:
        padded = model.vocab_size
    sizes = model_blocks.sizes(model) | {"V": padded, "VocabularyGroups": parts}
    of_modules = {name: number for m in model.modules for name, number in m.sizes.items()}
    if run.mode != "train":
        experts = model.num_experts + run.num_redundant_experts
        stripes = requests.stripes(run, model)
        return sizes | {"B": run.dp, "H": experts, "Stripes": stripes} | of_modules
    seq_length = run.seq_length or 0
    # An indexer selects keys, or blocks of keys, for a query.
    selected_keys = min(model.index_topk, seq_length // (model.compress_rate_csa or 1))
    if model.tower and model.tower.vision:  # its patches precede the text in the sequence
        sizes["Text"] = seq_length - model.tower.vision.patches
    rows = 0
    if model.num_experts:  # copies of tokens per expert, an equal number from every rank
        ranks = run.tp * run.cp * run.dp
        copies = run.micro_batch_size * run.dp * seq_length * model.top_k
        rows = ranks * math.ceil(copies / (model.num_experts * ranks))
    return sizes | {
        "B": run.micro_batch_size * run.dp * replicas,
        "S": (run.decoder_seq_length if model.encoder_num_layers else seq_length) or 0,
        "Source": seq_length,
        "R": rows * replicas,
        "dp_parts": run.dp * replicas,
        "Top": -(-selected_keys // model.index_block_size),
        "parts": run.dp * run.cp * run.sequence_parallel_ranks * replicas,
        **of_modules,
    }
