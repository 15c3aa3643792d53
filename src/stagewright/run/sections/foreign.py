"""Options of other tools that are no settings here: what follows from them, or what to say.

`OTHERS` say settings in other terms; of `FOREIGN` nothing follows. Names are spelled as `canonical`
has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OtherName(NamedTuple):
    """An option of another tool whose setting follows from its value and from other settings."""

    name: str
    """Name as a keyword, with underscores."""
    flag: str
    help: str
    kind: type | tuple[str, ...]
    """bool, int, str, or the words to choose from."""
    makes: tuple[str, ...]
    """The settings that follow."""
    names: tuple[str, ...] = ()
    """Other spellings of the option, without the dashes before them."""


def canonical(name: str) -> str:
    """A name as a keyword: `--micro-batch-size` and `training.seq_len` have no dashes and dots.

    >>> canonical("micro-batch-size"), canonical("training.seq_len")
    ('micro_batch_size', 'training_seq_len')
    """
    return name.removeprefix("--").replace("-", "_").replace(".", "_")


def _other(
    flag: str, help: str, kind: type | tuple[str, ...], *makes: str, names: tuple[str, ...] = ()
) -> OtherName:
    return OtherName(canonical(flag), "--" + flag, help, kind, makes, names)


_DOTS = ("qkv_proj", "out_proj", "mlpwi", "mlpwo")
REMAT_POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "none": None,
    "minimal": _DOTS,
    "minimal_with_context": ("context", *_DOTS),
    "save_dot_with_context_except_mlp": ("qkv_proj", "context", "out_proj"),
    "save_dot_except_mlpwi": ("qkv_proj", "out_proj", "mlpwo"),
    "save_dot_except_mlp": ("qkv_proj", "out_proj"),
    "save_qkv_proj": ("qkv_proj",),
    "save_out_proj": ("out_proj",),
    "full": (),
    "minimal_offloaded": _DOTS,
    "qkv_proj_offloaded": ("qkv_proj",),
}
"""MaxText's policies (`Decoder.get_remat_policy`) and what each keeps; None: everything."""
OFFLOADED_POLICIES = ("minimal_offloaded", "qkv_proj_offloaded")
"""Policies that keep it in host memory."""

OTHERS: Mapping[str, OtherName] = {
    of.name: of
    for of in (
        _other(
            "enable-expert-parallel",
            "vLLM: ep over all ranks of tp, cp and dp, with etp=1.",
            bool,
            *("ep", "etp"),
        ),
        _other(
            "num-layers-per-virtual-pipeline-stage",
            "Megatron-LM: layers / (pp * vpp), which gives vpp.",
            int,
            "vpp",
        ),
        _other(
            "parallelism.pipeline_parallel_layers_per_stage",
            "torchtitan: the most layers of a virtual stage, which gives vpp.",
            int,
            "vpp",
            names=("pipeline-parallel-layers-per-stage",),
        ),
        _other(
            "decoder-first-pipeline-num-layers",
            "Megatron-LM: layers of the first rank of pp; the others share the rest.",
            int,
            "layers_per_stage",
        ),
        _other(
            "decoder-last-pipeline-num-layers",
            "Megatron-LM: layers of the last rank of pp; the others share the rest.",
            int,
            "layers_per_stage",
        ),
        _other(
            "pipeline-model-parallel-layout",
            "Megatron-LM: virtual stages such as Et*3|(tt|)*29,t*3L, which give vpp, too.",
            str,
            *("vpp", "layers_per_stage"),
        ),
        _other(
            "data-parallel-sharding-strategy",
            "Megatron-LM's FSDP: stands for --zero 0, 1, 2 and 3.",
            ("no_shard", "optim", "optim_grads", "optim_grads_params"),
            "zero",
        ),
        _other(
            "recompute-method",
            "Megatron-LM: block recomputes the first --recompute-num-layers, uniform all layers.",
            ("uniform", "block"),
            "recompute_num_layers",
        ),
        _other(
            "remat-policy",
            "MaxText: stands for --recompute, --recompute-save and --recompute-save-on-host.",
            tuple(REMAT_POLICIES),
            *("recompute", "recompute_save", "recompute_save_on_host", "recompute_early_stop"),
        ),
        _other(
            "isl",
            "Input sequence length. Prefill: --prompt-length. Decode: --context-length is isl + "
            "osl / 2, the mean while a request gets its tokens; with --prefill isl.",
            int,
            *("prompt_length", "context_length"),
        ),
        _other(
            "parallelism.data_parallel_shard_degree",
            "torchtitan: ranks of dp that share the parameters (zero=3); -1: all that are left.",
            int,
            *("dp", "dp_shard", "zero"),
            names=("data-parallel-shard-degree",),
        ),
        _other(
            "parallelism.data_parallel_replicate_degree",
            "torchtitan: copies of the parameters, which multiply dp.",
            int,
            *("dp", "dp_shard"),
            names=("data-parallel-replicate-degree",),
        ),
    )
}
"""Options of other tools by name."""

# ---- options of which nothing follows ------------------------------------------------------------

_SWITCHES = """
    async_save bias_swiglu_fusion calculate_per_token_loss disable_bias_linear
    disable_log_requests enable_auto_tool_choice finetune log_throughput
    log_timers_to_tensorboard manual_gc mock_data moe_grouped_gemm moe_permute_fusion
    no_bias_dropout_fusion no_gradient_accumulation_fusion no_load_optim no_load_rng
    no_masked_softmax_fusion no_save_optim no_save_rng profile trust_remote_code
    use_checkpoint_args use_mcore_models
"""
"""Options without a value of training scripts and servers, which change no step."""

_VALUES = """
    adam_beta1 adam_beta2 adam_eps api_key attention_backend attention_dropout ckpt_format
    data_cache_path dataloader_type dist_ckpt_format distributed_backend
    distributed_executor_backend distributed_timeout_minutes download_dir eval_interval
    eval_iters exit_duration_in_mins exit_interval hidden_dropout host init_method_std
    initial_loss_scale load load_format local_rank log_interval loss_scale lr lr_decay_iters
    lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters
    lr_warmup_samples manual_gc_interval master_addr master_port merge_file min_lr
    moe_aux_loss_coeff moe_z_loss_coeff node_rank num_workers optimizer_lr port profile_step_end
    profile_step_start rdzv_backend rdzv_endpoint save save_interval seed split tensorboard_dir
    tensorboard_log_interval tokenizer tokenizer_mode tokenizer_model tokenizer_type train_iters
    train_samples training_steps transformer_impl vocab_file wandb_entity wandb_exp_name
    wandb_project wandb_save_dir weight_decay weight_decay_incr_style
"""
"""Options with a value: how long, from where and to where, at which rate."""

_LISTS = """
    data_path rampup_batch_size served_model_name train_data_path valid_data_path
"""
"""Options with as many values as follow."""

_MODEL = """
    add_qkv_bias apply_layernorm_1p ffn_hidden_size group_query_attention
    hidden_size kv_channels kv_lora_rank max_position_embeddings moe_ffn_hidden_size
    moe_layer_freq moe_router_score_function moe_router_topk moe_shared_expert_intermediate_size
    multi_latent_attention norm_epsilon normalization num_attention_heads num_experts
    num_query_groups position_embedding_type q_lora_rank qk_head_dim qk_layernorm
    qk_pos_emb_head_dim rotary_base rotary_percent squared_relu swiglu
    untie_embeddings_and_output_weights use_rotary_position_embeddings v_head_dim vocab_size
"""
"""Sizes and kinds of layers."""

_LOCAL_BATCH = (
    "use --global-batch-size, which is local_batch_size x dp, and --micro-batch-size, which is "
    "local_batch_size without pp"
)

_MEANT: Mapping[str, str] = {
    "accumulate_allreduce_grads_in_fp32": "gradients are held and reduced in fp32 here; drop it",
    "activation_checkpoint_mode": "use --recompute none, selective or full",
    "checkpoint_activations": "use --recompute full",
    "concurrency": "use --batch-size, the requests of a step",
    "devices": "use --gpus",
    "fp16": "use --precision bf16, which takes the time and the bytes of fp16",
    "fp8": "use --precision fp8",
    "fp4": "use --precision nvfp4",
    "fp4_format": "use --precision nvfp4",
    "fp4_recipe": "use --precision nvfp4",
    "fp8_format": "use --precision fp8",
    "fp8_hybrid": "use --precision fp8",
    "fsdp": "use --zero 3",
    "goodput": "use --ttft, --tpot and --e2e, the limits of a good request",
    "gpu_memory_utilization": "use --device-memory, such as 72GB of 80GB",
    "gradient_accumulation_steps": "use --global-batch-size: micro-batch-size x dp x steps",
    "local_batch_size": _LOCAL_BATCH,
    "isl": "use --prompt-length in --mode prefill, --context-length in --mode decode",
    "model": "MODEL is the word after the command, such as `stagewright show llama3-8b`",
    "model_name_or_path": "MODEL is the word after the command",
    "max_num_batched_tokens": "use --batch-size and --prompt-length",
    "max_num_seqs": "use --batch-size, the requests of a step",
    "nnodes": "use --nodes",
    "nproc_per_node": "use --nodes with --hardware, whose nodes have so many GPUs, or --dp",
    "num_gpus": "use --gpus",
    "num_nodes": "use --nodes",
    "osl": "a step of --mode decode computes one token of each request; use --context-length",
    "per_device_train_batch_size": "use --micro-batch-size",
    "price_usd_per_gpu_hour": "use price, in USD per GPU-hour",
    "recompute": "use --recompute none, selective or full",
    "speculative_config": "use --num-speculative-tokens",
    "training_local_batch_size": _LOCAL_BATCH,
    "tpot": "it is the time of a step of --mode decode, which simulate prints",
    "ttft": "it is the time of a step of --mode prefill, which simulate prints",
    "virtual_pipeline_model_parallel_size": "use --vpp",
    "world_size": "the world is tp x cp x dp x pp; use --gpus, which dp fills",
    "zero3": "use --zero 3",
}

IGNORED: Mapping[str, int | None] = {
    **dict.fromkeys(_SWITCHES.split(), 0),
    **dict.fromkeys(_VALUES.split(), 1),
    **dict.fromkeys(_LISTS.split(), None),
}
"""Options that change nothing that is computed here, and how many values each takes; None: any.

A command line may have them; in run files and keywords they are refused."""

OF_MODEL = "it belongs to the model; name a preset or a config.json"

FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(IGNORED, "it changes nothing that Stagewright computes; drop it"),
    **dict.fromkeys(_MODEL.split(), OF_MODEL),
    **_MEANT,
}
"""Advice on an option, by name."""
