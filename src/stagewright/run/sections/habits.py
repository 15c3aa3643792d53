"""Settings of habits of training frameworks; `framework` chooses the defaults of all.

The default is Megatron-LM's habit; `habits` has those of other frameworks.
docs/internals/frameworks.md shows both, with sources.
"""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import (
    NO_BACKWARD,
    WHOLE_WEIGHTS,
    Count,
    Number,
    Switch,
    idle_axes,
    of_training,
    setting,
)

_NO_GRADIENTS = "there are no gradients"

Framework = Literal["megatron", "torchtitan"]


@dataclass(frozen=True, kw_only=True)
class HabitSection:
    """Habits of frameworks; `torchtitan` is PyTorch 2.13's FSDP2, DDP, DTensor and AdamW."""

    framework: Framework = of_training(
        "megatron",
        "Framework that sets the defaults of other settings.",
        elsewhere="its habits are those of training",
    )
    params_dtype: Literal["bf16", "fp32"] | None = of_training(
        None,
        "Data type of parameters, gradients and optimizer states, without a master copy.",
        unset="mixed precision with a master copy in fp32",
        elsewhere="use weight_precision",
        habits={"torchtitan": "fp32"},
    )
    """torchtitan's `training.dtype`. None: parameters as computed with, all else in fp32 with a
    master copy (Megatron-LM's mixed precision)."""
    grad_reduce_dtype: Literal["bf16", "fp32"] | None = of_training(
        None,
        "Data type in which gradients are reduced; below ZeRO-2, microbatches are added up in it.",
        unset="as held",
        elsewhere=_NO_GRADIENTS,
    )
    """`reduce_dtype` of FSDP2's MixedPrecisionPolicy; Megatron-LM's `--grad-reduce-in-bf16`, whose
    buffers of gradients (`main_grad`) have the type in which they are reduced."""
    operators: Literal["fused", "eager"] = of_training(
        "fused",
        "RMSNorm, gated activation and loss: fused kernels, or PyTorch's chains of operators.",
        elsewhere="there is no autograd",
        habits={"torchtitan": "eager"},
    )
    """Chains hold what autograd keeps of them; each operator is a kernel with `fuse` off."""
    compiled_loss: Switch = of_training(
        False,
        "Compile the loss: one more fp32 copy of the logits in backward.",
        elsewhere="there is no loss",
        needs={"operators": ("fused",)},
    )
    """Megatron-LM's `cross_entropy_loss_fusion` with `cross_entropy_fusion_impl=native`; its loss
    in place and Transformer Engine's kernel hold equal bytes."""
    transposed_attention: Switch = of_training(
        False,
        "Save attention's output twice where a microbatch has several sequences: Transformer "
        "Engine with flash-attn, as before Hopper.",
        elsewhere=NO_BACKWARD,
        needs={"flash_attention": (True,)},
    )
    """flash-attn saves its output by sequence, the next product that by token. From Hopper on,
    Transformer Engine prefers cuDNN, which writes it by token (`get_attention_backend`)."""
    defer_embedding_wgrad_compute: Switch = of_training(
        False,
        "With pp: hold gradients of logits until the pipeline drains (Megatron-LM).",
        elsewhere=_NO_GRADIENTS,
        idle=(idle_axes("pp"),),
    )
    wgrad_deferral_limit: Number = of_training(
        0,
        "Microbatches whose gradients of logits are held; 0: all.",
        elsewhere=_NO_GRADIENTS,
        needs={"defer_embedding_wgrad_compute": (True,)},
    )
    joint_projections: Switch = setting(
        True,
        "Time query, key and value as one matrix product, gate and up as another.",
        habits={"torchtitan": False},
    )
    """`linear_qkv` and `linear_fc1` of Megatron-LM, `QKVParallelLinear` of vLLM. Off: each
    projection as its own product."""
    repeat_kv: Switch = of_training(
        False,
        "Copy key-value heads for each of their query heads before attention.",
        elsewhere="keys are cached as they are",
        habits={"torchtitan": True},
    )
    set_grads_to_none: Switch = of_training(
        False,
        "Free gradients after each step, instead of holding permanent buffers.",
        elsewhere=_NO_GRADIENTS,
        habits={"torchtitan": True},
    )
    """`zero_grad(set_to_none=True)`; off: Megatron-LM's `main_grad`."""
    pipeline_caches: Switch = of_training(
        False,
        "Keep P2P buffers of all microbatches and sent activations allocated (PyTorch pipelining).",
        elsewhere=NO_BACKWARD,
        habits={"torchtitan": True},
    )
    optimizer_step_tensors: Switch = of_training(
        False,
        "AdamW keeps an fp32 step count for each parameter (`torch.optim.AdamW`).",
        elsewhere="there is no optimizer",
        habits={"torchtitan": True},
    )
    recompute_early_stop: Switch = of_training(
        False,
        "End recomputation at the last value that backward needs.",
        elsewhere=NO_BACKWARD,
        habits={"torchtitan": True},
    )
    """`torch.utils.checkpoint.set_checkpoint_early_stop`: not with the block's last product and its
    reduction."""
    fsdp_root_unit: Switch = of_training(
        False,
        "With zero=3: gather and reduce parameters outside the layers as one unit.",
        elsewhere=WHOLE_WEIGHTS,
        needs={"zero": (3,)},
        habits={"torchtitan": True},
    )
    """FSDP2's `fully_shard(model)`: embedding, last norm and output stay gathered until backward is
    done."""
    fsdp_reduce: Literal["microbatch", "last"] = of_training(
        "microbatch",
        "With zero=3: reduce-scatter gradients after every microbatch, or after the last.",
        elsewhere=_NO_GRADIENTS,
        needs={"zero": (3,)},
        habits={"torchtitan": "last"},
    )
    """`last`: whole gradients are added up before (FSDP2's `set_requires_gradient_sync`, as
    PyTorch's pipeline schedules call it)."""
    reshard_after_backward: Switch = of_training(
        False,
        "Without reshard_after_forward: free gathered parameters after each backward, "
        "and gather them for the next.",
        elsewhere=WHOLE_WEIGHTS,
        idle=(idle_axes("dp", "cp"),),
        needs={"reshard_after_forward": (False,)},
        habits={"torchtitan": True},
    )
    """FSDP2's `set_reshard_after_backward`, which PyTorch's pipeline schedules turn off until the
    last backward: with pp, parameters stay gathered for the step whatever this says."""
    fsdp_shard_dim: Literal["best", "first", "few_experts_second"] = of_training(
        "best",
        "With zero=3: split weights along a dim that divides, or along padded rows (FSDP2).",
        elsewhere=WHOLE_WEIGHTS,
        needs={"zero": (3,)},
        habits={"torchtitan": "first"},
    )
    """`few_experts_second`: as `first`, but where ranks outnumber experts, each expert's rows."""
    ddp_bucket_cap_mb: Count | None = of_training(
        None,
        "With zero=0: MiB of a gradient bucket across layers; the first bucket has 1 MiB.",
        unset="as bucket",
        elsewhere=_NO_GRADIENTS,
        needs={"zero": (0,), "bucket": ("layer", "parameter")},
        habits={"torchtitan": 25},
    )
    """`bucket_cap_mb` of `DistributedDataParallel`."""
    loss_parallel: Switch = of_training(
        True,
        "With tp: compute the loss from logits split over the vocabulary; off: gather them.",
        idle=(idle_axes("tp"),),
        elsewhere="there is no loss",
    )
    """Off: torchtitan's `disable_loss_parallel`, Megatron-LM's `parallel_output=False`."""
    input_grad_reduce: Literal["shared", "linear"] = of_training(
        "shared",
        "With tp: all-reduce input gradients once per shared input, or once per linear.",
        idle=(idle_axes("tp"),),
        elsewhere=_NO_GRADIENTS,
        needs={"sequence_parallel": (False,)},
    )
    """`shared`: `PrepareModuleInput`; `linear`: `ColwiseParallel` alone."""
    whole_embedding_grad: Switch = of_training(
        False,
        "With tp: compute the full embedding gradient on every tp rank (DTensor).",
        idle=(idle_axes("tp"),),
        elsewhere=_NO_GRADIENTS,
        habits={"torchtitan": True},
    )
    """The gradient is kept whole where no FSDP shards it."""
    sequence_parallel_grads: Literal["step", "dtensor"] = of_training(
        "step",
        "With sequence_parallel: sum norms' gradients over tp once a step, or where DTensor does.",
        elsewhere=_NO_GRADIENTS,
        needs={"sequence_parallel": (True,)},
        habits={"torchtitan": "dtensor"},
    )
    """`step`: Megatron-LM's `finalize_model_grads`. `dtensor`: in each microbatch before FSDP
    reduces them, else in the optimizer each time that it reads one."""
    clip_grad_norm: Literal["total", "vector"] = of_training(
        "total",
        "Norms that ranks exchange to clip: one of all gradients, or one of each.",
        elsewhere=_NO_GRADIENTS,
        habits={"torchtitan": "vector"},
    )
    moe_counts_exchange: Literal["all_gather", "all_to_all"] = of_training(
        "all_gather",
        "With ep or tp: exchange of the token counts before dispatch.",
        idle=(idle_axes("ep", "tp"),),
        elsewhere="engines choose by themselves",
        needs={"moe_token_dispatcher_type": ("alltoall",)},
        habits={"torchtitan": "all_to_all"},
    )
    """`all_gather`: all ranks learn all counts (Megatron-LM's `MoEAlltoAllTokenDispatcher`);
    `all_to_all`: ranks learn what they get (torchtitan's `ExpertParallel`)."""
    cp_grad_comm_type: Literal["reduce_scatter", "ring"] = of_training(
        "reduce_scatter",
        "With cp: collective that returns gradients of gathered keys and values.",
        idle=(idle_axes("cp"),),
        elsewhere=_NO_GRADIENTS,
        needs={"cp_comm_type": ("p2p", "all_gather")},
        habits={"torchtitan": "ring"},
    )
    """`ring`: PyTorch sends them round the ring in fp32, and gathers keys and values again in
    backward; its ring (p2p) has gradients in fp32, too."""
    grad_reduce: Literal["step", "microbatch"] = of_training(
        "step",
        "Reduce gradients over dp after every microbatch or once; zero=2 and 3: every microbatch.",
        idle=(idle_axes("dp", "cp"),),
        elsewhere=_NO_GRADIENTS,
    )
    activation_gather: Literal["again", "keep"] = of_training(
        "again",
        "With sequence_parallel: gather activations again in backward, or save them (DTensor).",
        idle=({"sequence_parallel": False}, idle_axes("tp")),
        elsewhere=NO_BACKWARD,
        habits={"torchtitan": "keep"},
    )
    bucket: Literal["layer", "parameter", "rank"] = of_training(
        "layer",
        "Gradients in one collective over dp: of a layer, of one parameter, or of a rank.",
        idle=(idle_axes("tp", "dp", "cp"),),
        elsewhere=_NO_GRADIENTS,
    )
    """`rank`: gradients are summed whole when backward is done, and updated parameters are gathered
    at once, as nanotron's ZeRO-1 has it: `FP32GradientAccumulator` all-reduces one buffer
    (`reduce_scatter=False` in src/nanotron/trainer.py), and `_all_gather_params` of
    `ZeroDistributedOptimizer` flattens the parts of all parameters."""
