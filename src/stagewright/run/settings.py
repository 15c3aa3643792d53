"""`Run`: all that a result depends on, as one frozen value; `check` says whether it can be done.

What an inference step serves is in `serving`.

>>> run = Run(model="llama3.1-70b", tp=8, pp=4, dp=2, global_batch_size=64)
>>> run.world_size, run.microbatches
(64, 32)
>>> print(run.describe())
llama3.1-70b tp=8 dp=2 pp=4 global_batch_size=64
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as shown  # short whatever the value
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from stagewright.errors import UserError, did_you_mean, divisors, either
from stagewright.files import from_yaml, manifest_head, read_text
from stagewright.model import json as record
from stagewright.model.config import LIMITS, ModelConfig
from stagewright.run import frameworks
from stagewright.run import lengths as batch
from stagewright.run import requests as serving
from stagewright.schedule import schedules as pipeline

LARGEST = 2**31
"""No setting is larger: columns of the program index with 32 bits."""

AXES = ("tp", "cp", "ep", "dp", "pp")

Count = Annotated[StrictInt, Field(ge=1, le=LARGEST)]
Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=True)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True)]
Layers = Annotated[StrictInt, Field(ge=0, le=LARGEST)]


class PrefillRanks(BaseModel):
    """A second group of ranks, for the prompts of a decode step's requests: settings by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: Count = 1
    dp: Count = 1
    pp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    sequence_parallel: StrictBool = False
    layers_per_stage: tuple[Layers, ...] | None = None
    num_redundant_experts: Annotated[StrictInt, Field(ge=0, le=LARGEST)] = 0
    mla: Literal["naive", "absorb"] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        given = self.model_dump(exclude_defaults=True)
        return ",".join(f"{name}={value}" for name, value in given.items()) or "tp=1"


def _read_prefill(value: Any) -> Any:
    """The setting `prefill`: text as it is, a mapping as settings."""
    if not isinstance(value, Mapping):
        return value
    try:
        return PrefillRanks.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"prefill: {_explain(first, PrefillRanks.model_fields)}") from None


def _named_ranks(text: str) -> PrefillRanks:
    """Settings from text such as `tp=4,pp=2`."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, number in pairs:
        number = number.strip()
        if not (equals and number.isdecimal() and number.isascii() and len(number) < 12):
            raise UserError(f"prefill: {shown(name)} is no setting; wanted such as tp=4,pp=2")
    found = _read_prefill({name.strip(): int(number) for name, _, number in pairs})
    assert isinstance(found, PrefillRanks)
    return found


def _read_load(value: Any) -> Any:
    """The numbers of expert loads, a list for each layer or one for all."""
    if not isinstance(value, list | tuple):
        return value
    rows = cast("list[object]", [*value])
    listed = [cast("list[object]", row) for row in rows if isinstance(row, list | tuple)]
    if len(listed) not in (0, len(rows)) or not rows:
        raise UserError(f"expert_load: holds {shown(rows)}, wanted a list for each layer")
    return tuple(tuple(row) for row in listed or [rows])


class Run(BaseModel):
    """A model and how it is trained or served: settings by name, `None` where a default follows.

    The names are those of Megatron-LM where it has one, then vLLM's. `world_size` is tp * cp * dp *
    pp.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: StrictStr
    """A preset, or the path of a Hugging Face config.json."""

    mode: Literal["train", "prefill", "decode"] = "train"
    """What a step is: of training; of prompts; of one new token for each request (decode)."""

    tp: Count = 1
    cp: Count = 1
    dp: Count = 1
    pp: Count = 1
    dcp: Count | None = None
    """Inference: ranks that share the cache of a request, token by token (vLLM's
    `decode_context_parallel_size`): those of cp, then ranks of tp that would have copies. It does
    not add to the world size. None: cp."""
    ep: Count = 1
    """Expert parallelism, over ranks of tp, cp and dp: it does not add to the world size."""
    etp: Count | None = None
    """Tensor parallelism inside an expert. None: as tp."""
    vpp: Count = 1
    """Virtual stages that each pipeline rank holds."""
    dp_shard: Count | None = None
    """Ranks of dp that share one copy of the sharded state (HSDP). None: all of dp."""

    zero: Annotated[StrictInt, Field(ge=0, le=3)] = 0
    """Sharded over dp: 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)."""
    reshard_after_forward: StrictBool = True
    """With zero=3: drop gathered parameters after forward and gather them again in backward."""
    sequence_parallel: StrictBool = False
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How attention sees other ranks' tokens: p2p a ring, all_gather of K and V, a2a Ulysses."""

    seq_length: Count | None = None
    """None: the model's longest, but at most 8192."""
    decoder_seq_length: Count | None = None
    """Encoder-decoder: tokens of the decoder; seq_length is that of the encoder. None: as that."""
    micro_batch_size: Count = 1
    global_batch_size: Count | None = None
    """None: as many microbatches as pipeline ranks, micro_batch_size * dp * pp, or twice as many
    where the schedule needs that."""
    schedule: StrictStr | None = None
    """A name of `pipeline.SCHEDULES` or the path of a .csv. None: interleaved if vpp > 1, else
    1f1b."""
    layers_per_stage: tuple[Layers, ...] | None = None
    """One number per virtual stage. None: as even as possible, the first stages take the rest."""

    batch_size: Count | None = None
    """Inference: requests in a step, over all of dp and the pipeline. None: dp * pp, or as many as
    `requests` names."""
    prompt_length: Count | None = None
    """Prefill: new tokens of each request; None: the model's longest, but at most 8192. Decode: a
    chunk of a prompt that every rank of dp computes besides (chunked prefill); None: no chunk. Of a
    decoder with an encoder, whose prompt is its source, None: the one token that it starts with."""
    context_length: Annotated[StrictInt, Field(ge=0, le=LARGEST)] | None = None
    """Tokens of each request in the cache before the step. None: in prefill 0; in decode as many as
    make the new token the last of the model's longest sequence, but at most the 8192nd."""
    source_length: Count | None = None
    """Inference, encoder-decoder: tokens of each request that the encoder sees. None: the model's
    longest sequence, but at most 8192."""
    requests: Annotated[
        StrictStr | tuple[batch.Group, ...] | None, BeforeValidator(serving.read_requests)
    ] = None
    """A .csv of requests, or its rows: how many (`count`), their `context_length`, `new_tokens`."""
    num_speculative_tokens: Annotated[StrictInt, Field(ge=0, le=1024)] = 0
    """Decode: draft tokens of each request that the step verifies, besides its new token."""
    weight_precision: Literal["bf16", "fp8", "int4", "fp4", "mxfp4"] | None = None
    """Inference: how the matrices of layers are stored, with scales. None: as computed with, in
    `precision`. With fp8, products are of fp8 too; with 4 bit, of `precision`."""
    kv_cache_dtype: Literal["bf16", "fp8", "fp32"] | None = None
    """None: that of the computation."""
    kv_cache: Literal["paged", "contiguous"] = "paged"
    kv_block_size: Count = 16
    """Tokens of a block of the paged cache: every request fills its last one up."""
    max_model_len: Count | None = None
    """Contiguous cache: tokens each request has room for. None: as many as the longest has."""
    prefill: Annotated[StrictStr | PrefillRanks | None, BeforeValidator(_read_prefill)] = None
    """Decode: another group of ranks computes the context of the requests and sends it over
    (disaggregated serving); its `tp`, `dp`, `pp`, ... None: it is in the cache."""
    num_redundant_experts: Annotated[StrictInt, Field(ge=0, le=LARGEST)] = 0
    """Inference: experts that are there once more, so that ep divides all, or that share a load."""
    mla: Literal["naive", "absorb"] | None = None
    """Latent attention, inference: naive makes keys and values of heads from the cached latents,
    absorb works on the latents themselves. None: naive in prefill, absorb in decode."""
    device_memory: StrictStr | Count | None = None
    """Bytes that a rank may use, such as 80e9 or 80GiB: how many requests fit is then told."""

    framework: Literal["megatron", "torchtitan"] = "megatron"
    """Whose habits the following settings, `fuse`, `activation_gather` and `cp_comm_type` have
    where they are not given: `frameworks.PROFILES`."""
    params_dtype: Literal["bf16", "fp32"] | None = None
    """What parameters, gradients and optimizer states are held in, with no master copy besides
    (torchtitan's `training.dtype`). None: parameters as computed with, all else in fp32 with a
    master copy (Megatron-LM's mixed precision)."""
    grad_reduce_dtype: Literal["bf16", "fp32"] | None = None
    """What gradients that are reduced in each microbatch are reduced in (`reduce_dtype` of FSDP2's
    MixedPrecisionPolicy). None: as they are held."""
    operators: Literal["fused", "eager"] = "fused"
    """RMSNorm, gated activation and loss as kernels of their own, or as the chains of operators
    that PyTorch runs, with what autograd keeps of them. Each of these is a kernel with `fuse` off.
    """
    joint_projections: StrictBool = True
    """Query, key and value are timed as one matrix product, gate and up as one: `linear_qkv` and
    `linear_fc1` of Megatron-LM, `QKVParallelLinear` of vLLM. Off: each as its own."""
    repeat_kv: StrictBool = False
    """Key-value heads are copied for each of their query heads before attention."""
    set_grads_to_none: StrictBool = False
    """Gradients are there from when they are made until the step is done
    (`zero_grad(set_to_none=True)`), not as buffers all the time (Megatron-LM's `main_grad`)."""
    pipeline_caches: StrictBool = False
    """Messages of all microbatches have buffers all the time, and what a stage sends stays until
    its backward (`torch.distributed.pipelining`)."""
    optimizer_step_tensors: StrictBool = False
    """AdamW counts steps in an fp32 number for each parameter (`torch.optim.AdamW`, `step`)."""
    recompute_early_stop: StrictBool = False
    """Recompute ends with the last value that backward needs: not with the block's last product
    and its reduction (`torch.utils.checkpoint.set_checkpoint_early_stop`)."""
    fsdp_root_unit: StrictBool = False
    """With zero=3: what is in no layer (embedding, last norm, output) is gathered together, stays
    until backward is done, and is reduced together: FSDP2's `fully_shard(model)`."""
    fsdp_reduce: Literal["microbatch", "last"] = "microbatch"
    """With zero=3: gradients are reduced in every microbatch, or added up whole and reduced in the
    last one (FSDP2's `set_requires_gradient_sync`, as PyTorch's pipeline schedules call it)."""
    fsdp_shard_dim: Literal["best", "first"] = "best"
    """With zero=3: weights are split in a dim that divides, or in the rows of PyTorch's tensors,
    padded to a multiple of the ranks (FSDP2)."""
    ddp_bucket_cap_mb: Count | None = None
    """With zero=0: gradients are reduced in buckets of so many MiB or more, across layers, the
    first of 1 MiB (`DistributedDataParallel`, `bucket_cap_mb`). None: as `bucket`."""
    loss_parallel: StrictBool = True
    """With tp: the loss is of logits split over the vocabulary. Off: of gathered logits
    (torchtitan's `disable_loss_parallel`, Megatron-LM's `parallel_output=False`)."""
    input_grad_reduce: Literal["shared", "linear"] = "shared"
    """With tp, without sequence_parallel: linears with one input add up its gradient before it is
    reduced (`PrepareModuleInput`), or each reduces its own (`ColwiseParallel` alone)."""
    whole_embedding_grad: StrictBool = False
    """With tp: every rank makes the gradient of the whole embedding, as DTensor does, and keeps it
    where no FSDP shards it."""
    sequence_parallel_grads: Literal["step", "dtensor"] = "step"
    """With sequence_parallel: gradients of norms are summed over tp once per step (Megatron-LM's
    `finalize_model_grads`); or as DTensor does where a value is needed: in each microbatch before
    FSDP reduces them, else in the optimizer, each time that it reads one."""
    clip_grad_norm: Literal["total", "vector"] = "total"
    """Ranks exchange the norm of all their gradients, or the norm of each of them."""
    cp_grad_comm_type: Literal["reduce_scatter", "ring"] = "reduce_scatter"
    """With cp_comm_type=all_gather: how gradients of keys and values come home. PyTorch sends them
    round the ring in fp32, and gathers keys and values again in backward; its ring (p2p) has
    gradients in fp32, too."""

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[Literal["core_attn", "norm", "activation"], ...] = ("core_attn",)
    """With recompute=selective: what is computed again in backward."""
    recompute_num_layers: Count | None = None
    """With recompute=full: only the first layers of each virtual stage. None: all."""

    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Copies of tokens go to their experts; or all tokens to all experts."""
    moe_apply_probs: Literal["experts", "input", "output"] | None = None
    """Where the router's weights are multiplied: what experts compute, their input or their output.
    None: as the model, or else experts."""
    moe_expert_capacity_factor: Factor | None = None
    """Copies beyond this times an even share are dropped, by each rank and expert. None: none."""
    moe_pad_expert_input_to_capacity: StrictBool = False
    moe_router_dtype: Literal["fp32"] | None = None
    """None: as everything else is computed."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = (
        "aux_loss"
    )
    """What the loss that balances the load is over: a microbatch of a rank of dp, a sequence, or a
    microbatch of all."""
    moe_aux_loss_coeff: Weight = 0.0
    moe_z_loss_coeff: Weight = 0.0
    moe_router_enable_expert_bias: StrictBool | None = None
    """None: as the model was trained."""
    expert_load: Annotated[
        StrictStr | tuple[tuple[Any, ...], ...] | None, BeforeValidator(_read_load)
    ] = None
    """File of the tokens that each expert gets, by layer, or its numbers. None: all get as many."""
    cpu_offloading_num_layers: Count | None = None
    """The first layers of each virtual stage keep activations in the memory of the host."""
    optimizer_cpu_offload: StrictBool = False
    """Optimizer states are on the host, which makes the update."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """With optimizer_cpu_offload: of the blocks of each virtual stage, the first. None: all."""

    memory_allowance: StrictStr | Count | None = None
    """Bytes that a rank holds besides its tensors, such as 2e9 or 2GiB: the context, workspace of
    libraries, fragmentation. Shown beside the peak, and no part of it."""

    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    flash_attention: StrictBool = True
    fuse: StrictBool = True
    """Consecutive element-wise operations run as one kernel."""
    dropout: StrictBool = True
    """As the model's family trains; False: none anywhere."""
    clip_grad: StrictBool = True
    grad_reduce: Literal["step", "microbatch"] = "step"
    """Gradients are reduced over data parallelism once per step, or after every microbatch; always
    so with zero=2 and 3, which keep no whole gradient."""
    activation_gather: Literal["again", "keep"] = "again"
    """With sequence_parallel: gather again in backward (Megatron) or keep what was (DTensor)."""
    bucket: Literal["layer", "parameter"] = "layer"
    """How much one collective of data parallelism carries."""

    mtp_num_layers: Annotated[StrictInt, Field(ge=0, le=16)] | None = None
    """Layers that predict one more token each (multi-token prediction). None: as the model."""
    mtp_loss_scaling_factor: Factor = 0.1
    """The weight of their mean loss."""
    layers: Count | None = None
    """Replaces the model's number of layers."""
    vocab: Count | None = None
    """Replaces the model's vocabulary size."""
    make_vocab_size_divisible_by: Count = 1
    """The vocabulary is padded to a multiple of this times tp."""

    strategy: StrictStr | None = None
    """A file that says where values and parameters live, in rows such as `wq [M, A/tp, D]`; they
    go before what the degrees imply."""
    order: StrictStr = "tp-cp-ep-dp-pp"
    """How ranks are numbered: mesh axes, the fastest first."""
    streams: Literal["one", "separate"] = "one"
    """All communication of a rank in one chain, as ASTRA-sim needs it, or a chain per communicator,
    for simulators that have a stream for each."""

    @model_validator(mode="before")
    @classmethod
    def _habits(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return frameworks.with_defaults(cast("Mapping[str, Any]", values))

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Self:
        """A run from a YAML file, or an earlier run's manifest; overrides replace.

        Every error is a UserError that names the setting, and the file if it came from there.
        `stagewright.trace.recorded.load_run` reads bundles, too.
        """
        return cls.of({} if path is None else read_settings(path), overrides, path)

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
    ) -> Self:
        """A run from settings by name or a manifest; `path` is where they stood, for errors."""
        overrides = dict(overrides or {})
        try:
            if _is_manifest(values):
                values = cls.model_validate(values["run"]).asked().model_dump()
                if overrides.get("framework", values["framework"]) != values["framework"]:
                    values = frameworks.without_defaults(values)
            return cls.model_validate({**values, **overrides})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            from_file = path is not None and first["loc"][0] not in overrides
            where = f"{path}: " if from_file and first["type"] != "missing" else ""
            raise UserError(where + _explain(first, cls.model_fields)) from None

    def resolved(self, model: ModelConfig) -> Self:
        """The same run with every `None` that has a default replaced by it."""
        defaults = self._defaults(model.with_overrides(self.layers).depth)
        longest = min(model.max_position_embeddings, 8192)
        if self.mode == "train":
            defaults["seq_length"] = longest
            if model.encoder_num_layers:
                defaults["decoder_seq_length"] = self.seq_length or longest
        else:
            sources = model.encoder_num_layers > 0
            latent = model.kv_lora_rank > 0
            defaults |= serving.defaults(self, longest, latent=latent, sources=sources)
        absent = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if isinstance(self.requests, str):
            absent["requests"] = batch.read(self.requests)
        if self.prefill is not None:
            absent["prefill"] = self.prefill_ranks
        return self.model_copy(update=absent)

    def asked(self) -> Self:
        """The other way: settings that are what their default would be are `None` again.

        A resolved run with another pp contradicts itself; one that is asked anew does not.
        """
        defaults = self._defaults(sum(self.layers_per_stage or ()))
        same = [name for name, value in defaults.items() if getattr(self, name) == value]
        return self.model_copy(update=dict.fromkeys(same))

    def _defaults(self, layers: int) -> dict[str, Any]:
        # More stages than layers, or than any model has, are refused by `check`.
        can_split = self.virtual_stages <= min(layers, LIMITS["num_layers"])
        split: dict[str, Any] = {
            "layers_per_stage": even_split(layers, self.virtual_stages) if can_split else None
        }
        if self.mode != "train":
            split["kv_cache_dtype"] = "fp32" if self.precision == "fp32" else "bf16"
            split["dcp"] = self.cp
            return split if self.requests else split | {"batch_size": self.dp * self.pp}
        return split | {
            "dp_shard": self.dp if self.zero else None,
            "global_batch_size": self.micro_batch_size * self.dp * self._fewest,
            "schedule": "interleaved" if self.vpp > 1 else "1f1b",
        }

    @property
    def world_size(self) -> int:
        """Number of ranks, with those of `prefill`; ep is part of dp."""
        others = self.prefill_ranks
        mine = self.tp * self.cp * self.dp * self.pp
        return mine + (others.world_size if others else 0)

    @property
    def prefill_ranks(self) -> PrefillRanks | None:
        """The setting `prefill`, read."""
        return _named_ranks(self.prefill) if isinstance(self.prefill, str) else self.prefill

    @property
    def microbatches(self) -> int:
        """Microbatches that pass through a pipeline per step."""
        if self.mode != "train":
            return serving.microbatches(self)
        if self.global_batch_size is None:
            return self._fewest
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def _fewest(self) -> int:
        return pipeline.fewest(self.schedule or "1f1b", self.pp)

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages, counting each chunk of a rank."""
        return self.pp * self.vpp

    def describe(self) -> str:
        """The model, the degrees above 1 and every other setting that is not its default.

        >>> Run(model="gpt2", dp=2, sequence_parallel=True, layers_per_stage=(3, 4)).describe()
        'gpt2 dp=2 layers_per_stage=3,4 sequence_parallel'
        """
        words = [self.model]
        asked = self.asked()
        fields = [*AXES, *sorted(set(type(self).model_fields) - {"model", *AXES})]
        for name in fields:
            value = getattr(asked, name)
            own = type(self).model_fields[name].default
            if value == frameworks.default(self.framework, name, own):
                continue
            if isinstance(value, bool):
                words.append(name if value else f"no {name}")
            elif name == "requests" and not isinstance(value, str):
                words.append(f"requests={batch.told(value)}")
            elif name == "expert_load" and not isinstance(value, str):
                words.append("expert_load=...")
            elif isinstance(value, tuple):
                words.append(f"{name}={','.join(map(str, value))}")  # pyright: ignore
            else:
                words.append(f"{name}={value}")
        return " ".join(words)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per virtual stage, as even as possible; the first stages take what is left over.

    The embedding and the output projection, on the first and the last stage, count for nothing
    here: name `layers_per_stage` to give those stages fewer layers.

    >>> even_split(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


# ---- run files -----------------------------------------------------------------------------------


def recorded_model(values: Mapping[str, Any], path: str | Path) -> ModelConfig | None:
    """The model in an earlier run's manifest; None for a run file, which names it."""
    if not _is_manifest(values):
        return None
    try:
        return record.from_json(values.get("model"), values.get("modules", {}))
    except TypeError as error:
        raise UserError(f"{path}: cannot read the model of this manifest: {error}") from None


def read_settings(path: str | Path) -> dict[str, Any]:
    """What a run file in YAML or an earlier run's manifest holds."""
    # A manifest lists every file: json reads in a second what yaml reads in a minute.
    if Path(path).suffix == ".json":
        values = manifest_head(path, "a run file, or the manifest of an earlier run")
    else:
        values = from_yaml(read_text(path, "a run file in YAML"), path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: got {shown(values)}, wanted settings, one per line, such as tp: 8"
        )
    return {str(key): value for key, value in values.items()}  # pyright: ignore


def _is_manifest(values: Mapping[str, Any]) -> bool:
    return "stagewright" in values and isinstance(values.get("run"), dict)


def _explain(error: ErrorDetails, fields: Iterable[str]) -> str:
    """One of pydantic's errors in our words."""
    name = ".".join(str(part) for part in error["loc"])
    context, got = error.get("ctx", {}), shown(error["input"])
    match error["type"]:
        case "extra_forbidden":
            hint = did_you_mean(name.replace("-", "_"), fields) or "; see `stagewright show --help`"
            return f"unknown setting {name!r}{hint}"
        case "missing":
            return "no model given; name a preset (see `stagewright models`) or a config.json"
        case "literal_error":
            known = context["expected"]
            hint = did_you_mean(
                str(error["input"]), known.replace("'", "").replace(" or ", ", ").split(", ")
            )
            return f"{name} is {got}, wanted {known}{hint}"
        case "greater_than_equal":
            wanted = f"{context['ge']} or more"
        case "less_than_equal":
            wanted = f"at most {context['le']}"
        case "int_type":
            wanted = "a whole number"
        case "bool_type":
            wanted = "true or false"
        case "string_type":
            wanted = "text"
        case "tuple_type":
            wanted = "a list"
        case _:
            return f"{name} is {got}: {error['msg']}"
    return f"{name} is {got}, wanted {wanted}"


# ---- what cannot be done -------------------------------------------------------------------------

ROUTING = (
    *("moe_token_dispatcher_type", "moe_apply_probs", "moe_expert_capacity_factor"),
    *("moe_pad_expert_input_to_capacity", "moe_router_dtype", "moe_router_load_balancing_type"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias", "expert_load"),
)
"""Settings that mean nothing in a dense model."""
MOST_RANKS = 2**22
MOST_LAYER_PASSES = 2**20
"""Microbatches times layers: this many make a program of about 5 GB."""
MOST_FLOPS = 2**56
"""Of one kernel: sums over a step then stay within 64 bits."""


def check(run: Run, model: ModelConfig) -> None:
    """Raise a UserError that says what to change if the run contradicts itself or the model."""
    model = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    _check_split(run, model)  # of which `asked` keeps nothing where it is even
    run = run.asked()
    serving.check_mode(run)
    if run.mode != "train":
        serving.check_model(model)
    _check_mesh(run)
    if model.tower:
        _check_model(run, model.tower)
        _check_images(run, model)
    if model.recommendation:
        _check_tables(run, model)
    _check_two_sequences(run, model)
    if model.diffusion and (run.sequence_parallel or run.cp > 1):
        raise UserError(
            f"{model.name}: its sequences of {model.max_position_embeddings} positions, one of "
            "which modulates the others, are not split; use no sequence_parallel, and cp=1"
        )
    _check_model(run, model)
    if run.mode != "train":
        _check_layers(run, model)
        serving.check(run.resolved(model), model)
        return
    _check_sequence(run, model)
    _check_batch(run, model)
    _check_stages(run, model)
    _check_layers(run, model)
    _check_state(run)
    _check_habits(run)
    _check_recompute(run, model)
    _check_offload(run)
    _check_size(run, model)


def _check_mesh(run: Run) -> None:
    if sorted(run.order.split("-")) != sorted(AXES):
        raise UserError(
            f"order is {run.order!r}, wanted each of {', '.join(AXES)} once, such as tp-cp-ep-dp-pp"
        )
    if run.world_size > MOST_RANKS:
        raise UserError(
            f"tp={run.tp} x cp={run.cp} x dp={run.dp} x pp={run.pp} makes {run.world_size} ranks, "
            f"wanted at most {MOST_RANKS}; lower one of them"
        )


def _check_model(run: Run, model: ModelConfig) -> None:
    heads, ffn = model.num_attention_heads, model.ffn_hidden_size
    if model.attends and heads % run.tp:
        raise UserError(
            f"tp={run.tp} does not divide the {heads} attention heads of {model.name}; "
            f"use {divisors(heads)}"
        )
    if "dense" in model.parts and ffn % run.tp:
        raise UserError(
            f"tp={run.tp} does not divide the {ffn} channels of the MLP of {model.name}; "
            f"use {divisors(math.gcd(heads, ffn))}"
        )
    rank = model.shared_blocks.adapter_rank if model.shared_blocks else 0
    if rank % run.tp:
        raise UserError(
            f"tp={run.tp} does not divide the adapters' rank {rank} of {model.name}; "
            f"use {divisors(math.gcd(heads, rank))}"
        )
    if model.attends:
        _check_key_value_heads(run, model)
    _check_state_heads(run, model)
    _check_experts(run, model)


def _check_key_value_heads(run: Run, model: ModelConfig) -> None:
    heads = model.num_attention_heads
    kv = model.num_query_groups
    if kv % run.tp and run.tp % kv:
        # Ranks share key-value heads evenly: several each, or several ranks hold one.
        fit = [d for d in range(1, heads + 1) if heads % d == 0 and (kv % d == 0 or d % kv == 0)]
        raise UserError(
            f"tp={run.tp} neither divides the {kv} key-value heads of {model.name} nor is a "
            f"multiple of them; use {either(fit)}"
        )


def _check_state_heads(run: Run, model: ModelConfig) -> None:
    """Layers that carry a state split whole heads, and over cp too: as Megatron-LM's Mamba does."""
    state = model.state_space
    if state is None:
        return
    heads, groups = state.heads, state.groups
    what = "channels" if model.recurrence == "mamba" else "heads"
    if heads % run.tp:
        raise UserError(
            f"tp={run.tp} does not divide the {heads} {what} of the state layers of {model.name}; "
            f"use {divisors(heads)}"
        )
    if what == "heads" and groups % run.tp and run.tp % groups:
        fit = [d for d in range(1, heads + 1) if heads % d == 0 and not min(groups % d, d % groups)]
        raise UserError(
            f"tp={run.tp} neither divides the {groups} groups of heads in the state layers of "
            f"{model.name} nor is a multiple of them; use {either(fit)}"
        )
    if heads // run.tp % run.cp:
        raise UserError(
            f"cp={run.cp} does not divide the {heads // run.tp} {what} of a rank in the state "
            f"layers of {model.name} (tp={run.tp}), which has whole sequences of fewer {what} "
            f"there; use {divisors(heads // run.tp)}"
        )
    held = groups // math.gcd(run.tp, groups)  # groups of a rank
    if (
        what == "heads"
        and held % run.cp
        and heads // groups // (run.tp // math.gcd(run.tp, groups)) % run.cp
    ):
        raise UserError(
            f"cp={run.cp} divides neither the {held} groups of a rank in the state layers of "
            f"{model.name} (tp={run.tp}) nor the heads of a group; use {divisors(held)}"
        )


def _check_images(run: Run, model: ModelConfig) -> None:
    """A tower's sequence is what its images make it, and the text comes after that."""
    assert model.tower is not None
    seen = model.tower.max_position_embeddings
    length = run.resolved(model).seq_length or 0
    if length < seen:
        raise UserError(
            f"seq_length={length} has no room for text behind the {seen - 1} patches of an image "
            f"of {model.name}; use {seen} or more"
        )
    for name, ranks in (
        ("sequence_parallel with tp", run.tp * run.sequence_parallel),
        ("cp", run.cp),
    ):
        if ranks > 1 and seen % ranks:
            raise UserError(
                f"{name}={ranks} does not divide the {seen} positions of an image of {model.name}; "
                f"use {divisors(seen)}, or none"
            )


def _check_two_sequences(run: Run, model: ModelConfig) -> None:
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
    if length % pieces:
        why = f"2 x cp={pieces} (causal load balance)" if pieces > run.cp else f"cp={run.cp}"
        raise UserError(
            f"decoder_seq_length={length} is not divisible by {why}; {_nearest(length, pieces)}"
        )
    ranks = math.lcm(pieces, run.cp * run.tp)
    if run.sequence_parallel and length % ranks:
        of = f"cp x tp={run.cp * run.tp}" if run.cp > 1 else f"tp={run.tp}"
        raise UserError(
            f"decoder_seq_length={length} is not divisible by {of}, which sequence_parallel "
            f"needs; {_nearest(length, ranks)}"
        )


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


def _check_experts(run: Run, model: ModelConfig) -> None:
    if not model.num_experts:
        for degree, size in (("ep", run.ep), ("etp", run.etp or 1)):
            if size > 1:
                raise UserError(
                    f"{model.name} is a dense model; {degree}={size} needs a mixture-of-experts "
                    f"model; use {degree}=1"
                )
        _check_dense(run, model)
        return
    redundant = run.num_redundant_experts
    if (model.num_experts + redundant) % run.ep:
        more = f" and num_redundant_experts={redundant}" if redundant else ""
        raise UserError(
            f"ep={run.ep} does not divide the {model.num_experts} experts of {model.name}{more}; "
            f"use {divisors(model.num_experts + redundant)}"
        )
    etp, ranks = run.etp or run.tp, run.tp * run.cp * run.dp
    if ranks % (etp * run.ep):
        raise UserError(
            f"etp={etp} * ep={run.ep} does not divide tp * cp * dp = {ranks}: experts spread over "
            "the ranks of these; use a smaller ep, or more dp"
        )
    if model.shared_ffn_hidden_size % run.tp:
        raise UserError(
            f"tp={run.tp} does not divide the width {model.shared_ffn_hidden_size} of the shared "
            f"experts of {model.name}; use {divisors(model.shared_ffn_hidden_size)}"
        )
    if model.moe_ffn_hidden_size % etp:
        raise UserError(
            f"etp={etp} does not divide the width {model.moe_ffn_hidden_size} of an expert of "
            f"{model.name}; use {divisors(model.moe_ffn_hidden_size)}"
        )
    _check_routing(run, model)
    if run.expert_load is not None and model.mtp_num_layers:
        raise UserError(
            f"expert_load has no lines for the mtp_num_layers={model.mtp_num_layers} layers behind "
            "the model's; drop either"
        )


def _check_dense(run: Run, model: ModelConfig) -> None:
    for name in ROUTING:
        if getattr(run, name) != Run.model_fields[name].default:
            raise UserError(
                f"{model.name} is a dense model; {name}={getattr(run, name)} needs a "
                f"mixture-of-experts model; drop {name}"
            )


def _check_routing(run: Run, model: ModelConfig) -> None:
    """What the options of a mixture of experts need of one another, and of the model."""
    if run.moe_router_enable_expert_bias and model.router != "sigmoid":
        raise UserError(
            f"moe_router_enable_expert_bias balances sigmoid scores, but {model.name} has "
            f"{model.router}; use moe_aux_loss_coeff, or drop moe_router_enable_expert_bias"
        )
    kind, factor = run.moe_token_dispatcher_type, run.moe_expert_capacity_factor
    if kind == "allgather" and factor is not None:
        raise UserError(
            f"moe_expert_capacity_factor={factor} needs copies that go to their experts, got "
            "moe_token_dispatcher_type=allgather; use alltoall, or drop the factor"
        )
    if run.moe_pad_expert_input_to_capacity and factor is None:
        raise UserError(
            "moe_pad_expert_input_to_capacity pads to moe_expert_capacity_factor; set it, or drop "
            "moe_pad_expert_input_to_capacity"
        )
    if run.moe_apply_probs in ("input", "output") and kind != "alltoall":
        raise UserError(
            f"moe_apply_probs={run.moe_apply_probs} needs moe_token_dispatcher_type=alltoall, got "
            f"{kind}; use alltoall, or moe_apply_probs=experts"
        )
    balance = run.moe_router_load_balancing_type
    if balance != "aux_loss" and not run.moe_aux_loss_coeff:
        raise UserError(
            f"moe_router_load_balancing_type={balance} does nothing with moe_aux_loss_coeff=0; "
            "set moe_aux_loss_coeff, such as 0.01, or drop it"
        )


def _check_sequence(run: Run, model: ModelConfig) -> None:
    length = run.resolved(model).seq_length
    assert length is not None
    if (model.vision or model.diffusion) and length != model.max_position_embeddings:
        raise UserError(
            f"seq_length={length} is not the {model.max_position_embeddings} positions of an image "
            f"of {model.name}; leave it out"
        )
    if model.position == "learned" and length > model.max_position_embeddings:
        raise UserError(
            f"seq_length={length} is longer than the {model.max_position_embeddings} learned "
            f"positions of {model.name}; use at most {model.max_position_embeddings}"
        )
    ulysses = run.cp_comm_type == "a2a" and model.attends
    if ulysses and model.num_attention_heads // run.tp % run.cp:
        local = model.num_attention_heads // run.tp
        raise UserError(
            f"cp={run.cp} does not divide the {local} attention heads of a rank ({model.name} with "
            f"tp={run.tp}), which cp_comm_type=a2a needs; use cp={divisors(local)}, or p2p"
        )
    held = max(1, model.num_query_groups // run.tp)  # key-value heads of a rank
    if ulysses and held > 1 and held % run.cp:
        raise UserError(
            f"cp={run.cp} does not divide the {held} key-value heads of a rank ({model.name} with "
            f"tp={run.tp}), which cp_comm_type=a2a needs; use cp={divisors(held)}, or p2p"
        )
    causal = model.causal and not model.encoder_num_layers  # whose sequence this is
    balanced = run.cp > 1 and causal and model.attends and run.cp_comm_type != "a2a"
    pieces = 2 * run.cp if balanced else run.cp
    if length % pieces:
        why = f"2 x cp={pieces} (causal load balance)" if balanced else f"cp={run.cp}"
        raise UserError(
            f"seq_length={length} is not divisible by {why}; {_nearest(length, pieces)}"
        )
    if not run.sequence_parallel:
        return
    if run.tp == 1:
        raise UserError("sequence_parallel splits over tp, got tp=1; raise tp, or turn it off")
    if length % math.lcm(pieces, run.cp * run.tp):
        raise UserError(
            f"seq_length={length} is not divisible by cp x tp={run.cp * run.tp}, which "
            f"sequence_parallel needs; {_nearest(length, math.lcm(pieces, run.cp * run.tp))}"
        )


def _nearest(got: int, step: int) -> str:
    below = got // step * step
    return f"use {below} or {below + step}" if below else f"use {step}"


def _check_batch(run: Run, model: ModelConfig) -> None:
    batch, step = run.global_batch_size, run.micro_batch_size * run.dp
    if batch is not None and batch % step:
        raise UserError(
            f"global_batch_size={batch} is not divisible by micro_batch_size="
            f"{run.micro_batch_size} x dp={run.dp}; {_nearest(batch, step)}"
        )


def _check_stages(run: Run, model: ModelConfig) -> None:
    schedule = run.resolved(model).schedule
    assert schedule is not None
    if run.vpp > 1 and run.pp == 1:
        raise UserError(f"vpp={run.vpp} splits pipeline stages, got pp=1; raise pp, or use vpp=1")
    step = run.micro_batch_size * run.dp
    pipeline.check(schedule, run.pp, run.microbatches, run.vpp, sequences=step)
    if schedule.endswith(".csv"):
        pipeline.make(schedule, run.pp, run.microbatches, run.vpp)


def _check_split(run: Run, model: ModelConfig) -> None:
    split = run.layers_per_stage
    if split is not None and len(split) == run.virtual_stages and sum(split) != model.depth:
        raise UserError(
            f"layers_per_stage adds up to {sum(split)}, wanted the {model.depth} layers of "
            f"{model.name}"
        )


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


def _check_state(run: Run) -> None:
    if run.dp_shard is not None and run.dp % run.dp_shard:
        raise UserError(
            f"dp_shard={run.dp_shard} does not divide dp={run.dp}; use {divisors(run.dp)}"
        )
    if run.dp_shard is not None and not run.zero:
        raise UserError(
            f"dp_shard={run.dp_shard} says how far to shard, but zero=0 shards nothing; "
            "set zero to 1, 2 or 3, or drop dp_shard"
        )
    if not run.reshard_after_forward and run.zero != 3:
        raise UserError(
            f"reshard_after_forward=False is about the parameters that zero=3 gathers, got "
            f"zero={run.zero}; set zero=3, or drop it"
        )


_NEEDS = {
    **dict.fromkeys(("fsdp_root_unit", "fsdp_reduce", "fsdp_shard_dim"), ("zero=3", "zero", (3,))),
    "ddp_bucket_cap_mb": ("zero=0", "zero", (0,)),
    "grad_reduce_dtype": ("zero=2 or 3", "zero", (2, 3)),
    "input_grad_reduce": ("no sequence_parallel", "sequence_parallel", (False,)),
    "sequence_parallel_grads": ("sequence_parallel", "sequence_parallel", (True,)),
    "cp_grad_comm_type": ("cp_comm_type=p2p or all_gather", "cp_comm_type", ("p2p", "all_gather")),
}
"""Settings that mean something only where another one has some value, in words and by name."""


def _check_habits(run: Run) -> None:
    """A framework's habits may mean nothing in a run; what a run asks for itself may not."""
    for name, (wanted, other, values) in _NEEDS.items():
        value, own = getattr(run, name), Run.model_fields[name].default
        asked = value not in (own, frameworks.default(run.framework, name, own))
        if asked and getattr(run, other) not in values:
            got = f"{other}={getattr(run, other)}"
            raise UserError(f"{name}={value} needs {wanted}, got {got}; set it, or drop {name}")
    if run.precision == "fp32" and run.params_dtype == "bf16":
        raise UserError(
            "params_dtype=bf16 is less than precision=fp32, which parameters are computed with; "
            "use precision=bf16, or params_dtype=fp32"
        )


def _check_offload(run: Run) -> None:
    if run.optimizer_offload_fraction is not None and not run.optimizer_cpu_offload:
        raise UserError(
            f"optimizer_offload_fraction={run.optimizer_offload_fraction} needs "
            "optimizer_cpu_offload; set it, or drop optimizer_offload_fraction"
        )
    summed_there = run.sequence_parallel_grads == "dtensor" and run.sequence_parallel
    if run.optimizer_cpu_offload and summed_there and run.zero < 3:
        raise UserError(
            "optimizer_cpu_offload makes the update on the host, where sequence_parallel_grads="
            "dtensor would have gradients summed over tp; use zero=3, or "
            "sequence_parallel_grads=step"
        )


def _check_recompute(run: Run, model: ModelConfig) -> None:
    if run.recompute_num_layers is not None:
        if run.recompute != "full":
            raise UserError(
                f"recompute_num_layers={run.recompute_num_layers} needs recompute=full, got "
                f"recompute={run.recompute}; set it, or drop recompute_num_layers"
            )
        if run.recompute_num_layers > model.depth:
            raise UserError(
                f"recompute_num_layers={run.recompute_num_layers} is more than the "
                f"{model.depth} layers of {model.name}; use fewer, or drop it for all"
            )
    default = Run.model_fields["recompute_modules"].default
    if run.recompute_modules != default and run.recompute != "selective":
        raise UserError(
            f"recompute_modules={','.join(run.recompute_modules)} needs recompute=selective, got "
            f"recompute={run.recompute}; set it, or drop recompute_modules"
        )
    if not run.recompute_modules:
        raise UserError("recompute_modules is empty; name some, or use recompute=none")


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
