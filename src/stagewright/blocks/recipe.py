"""Recipe of training or serving a model, as far as one device can tell.

`lower.recipe.recipe_of` makes a recipe of a run's settings; the builders of blocks read nothing
else of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from stagewright.stored import Storage, Stored


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a recipe; `master` is empty where the parameter is its own master copy.

    Megatron-LM's mixed precision keeps bf16 parameters, accumulates gradients in fp32 and holds an
    fp32 master copy and fp32 moments: 18 bytes per parameter with AdamW (arXiv 1910.02054,
    section 3.1, counts the gradient in 16 bit: 16 bytes).
    """

    compute: str = "bf16"
    """Activations, and the copies of parameters that are computed with."""
    gemm: str = ""
    """Operands of the layers' matrix products, where these are not in `compute`."""
    attention: str = ""
    """Operands and results of fused attention, where these are not in `compute`."""
    rescaling: Fraction | None = None
    """Bytes per value that a cast of such an operand moves besides its two bytes read and its value
    written; such a cast is a kernel of its own. None: one with those that make the operand."""
    second_copy: Fraction = Fraction(0)
    """Bytes of these for the copy that only the gradient of a weight reads."""
    norms_cast: bool = False
    """Norms write such operands themselves, though `rescaling` is not None."""
    gradient: str = "fp32"
    """Gradients that microbatches accumulate in."""
    master: str = "fp32"
    """The optimizer's master copy of a parameter."""
    moment: str = "fp32"
    """The moments of the optimizer, but for `moments`."""
    moments: tuple[tuple[str, str], ...] = ()
    """Names and formats of moments that are not held in `moment`."""
    param: str = ""
    """Stored parameters, where these are not in `compute`."""
    reduce: str = ""
    """A microbatch's gradients while they are reduced, where these are not in `gradient`."""

    @property
    def product(self) -> str:
        """The number format of operands of the layers' matrix products."""
        return self.gemm or self.compute

    def dtype_of(self, moment: str) -> str:
        """The number format in which the optimizer holds one of its moments, such as `exp_avg`."""
        return dict(self.moments).get(moment, self.moment)


PRECISIONS: Mapping[str, Precision] = {
    "bf16": Precision(),
    "fp8": Precision(gemm="fp8", rescaling=Fraction(1), second_copy=Fraction(1), norms_cast=True),
    "nvfp4": Precision(
        gemm="fp4",
        rescaling=2 + Fraction(1, 2) + Fraction(2, 16),
        second_copy=Fraction(1, 2) + Fraction(1, 16),
    ),
    "int8": Precision(gemm="int8"),
    "fp32": Precision(compute="fp32", master=""),
}
"""Number formats by `precision`. NVFP4 (Transformer Engine's NVFP4BlockScaling): a read for the
scale of a tensor, then one for both copies, along rows and columns, each with an fp8 scale of 16
values; all layers are in NVFP4, as in Megatron-Bridge's recipes of Llama. int8 (MaxText with AQT):
XLA casts where an operand is made or read."""


class Rescaling(NamedTuple):
    """Bytes per value that casts of an fp8 recipe move, besides reading and writing it."""

    scales: Fraction
    """To find or to store scales."""
    second_copy: Fraction
    """To write the copy that only the gradient of a weight reads, none where a weight is frozen."""


FP8_RECIPES: Mapping[str, Rescaling] = {
    "delayed": Rescaling(Fraction(0), Fraction(1)),
    "tensorwise": Rescaling(Fraction(2), Fraction(1)),
    "rowwise": Rescaling(Fraction(0), Fraction(2 + 1)),
    "blockwise": Rescaling(Fraction(4, 128), 1 + Fraction(4, 128)),
    "mxfp8": Rescaling(Fraction(0), 1 + Fraction(1, 32)),
}
"""By recipe of fp8, from the kernels of Transformer Engine
(transformer_engine/common/cast, recipe/current_scaling.cu) and torchao (float8_linear.py).

`delayed`: the scale comes from former steps: one kernel casts, and writes the transposed copy that
gradients of weights need on GPUs before Blackwell (`fp8_cast_transpose_fused`). A norm in
front of a product casts by itself (`TELayerNormColumnParallelLinear`). An activation does not, for
Megatron-LM runs it between two linear layers; neither does what makes a gradient. `tensorwise`: the
operand is read before for the scale of today. `rowwise` (torchao): once more in backward, with
scales along the other axis. `blockwise`: rows and columns written together, with an fp32 scale of
128 values; `mxfp8`: with one byte of 32 values, of which the data type counts that of the rows.
Blackwell needs no transposed copy of `delayed` and `tensorwise`, one byte less than is counted.
"""


@dataclass(frozen=True, slots=True)
class ExpertRecipe:
    """Training of a mixture of experts: Megatron-LM's options, as far as one device can tell."""

    dispatcher: str = "alltoall"
    """`alltoall`: copies of tokens go to the ranks of their experts. `allgather`: every rank gets
    all tokens."""
    apply_probs: str = "experts"
    """Values that the gates multiply: the `input` of experts, those inside, or their `output`."""
    exchange_counts: bool = False
    """Ranks exchange the numbers of copies before they send these."""
    router_fp32: bool = False
    load_balancing_type: str = "aux_loss"
    """Tokens over which the load of experts is balanced: a key of `experts.COUNTED`."""
    aux_loss: float = 0.0
    """The coefficient of the load balancing loss; 0: there is no such loss."""
    z_loss: float = 0.0
    """The coefficient of the loss of the logits' sizes; 0: there is no such loss."""
    expert_bias: bool = False
    """A bias of the scores, which is updated once per step, balances the load."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Serving of a model, as far as one device can tell."""

    cache_dtype: str = "bf16"
    weights: Storage = ()
    """Storage of matrices that are not stored in the data type of the computation."""
    redundant_experts: int = 0
    """Further copies of experts that ranks hold, to balance the load (EPLB)."""
    decode: bool = False
    """The step decodes: new tokens of requests whose prompts are in the cache."""
    striped: bool = False
    """The tokens of a request are spread over the caches of `Stripes` ranks."""
    prefix: bool = False
    """Some request has tokens in the cache before the step."""


def stored_as(storage: Storage, name: str, scope: str) -> Stored | None:
    """Storage of the matrix of a name and a scope; None: the data type of the computation."""
    rows = dict(storage)
    return rows[name] if name in rows else rows.get(scope)


class Tie(NamedTuple):
    """A block's copy of a table that other blocks have copies of, too: an embedding, for example.

    Copies on one rank are one tensor; copies on several pipeline ranks are summed once a step.
    """

    name: str
    first: bool = True
    """It is the first copy in the model, whose gradient counts in the global norm."""
    owner: bool = True
    """It is the first copy on its rank: the tensor's gradient and update are made here."""
    away: bool = True
    """Other pipeline ranks have copies."""
    later: bool = False
    """A later block of its stage uses the same tensor."""
    leads: bool = True
    """It is the first copy on its stage."""

    @property
    def words(self) -> str:
        """The place of the copy among all copies, in words.

        >>> Tie("wte").words, Tie("wte", first=False, owner=False, leads=False).words
        ('first and alone with wte', 'last here with wte')
        """
        if self.leads:
            ranked = "first here" if self.owner else "first of its stage"
            place = "first" if self.first else ranked
            place += "" if self.later else " and alone"
        else:
            place = "again" if self.later else "last here"
        return f"{place} with {self.name}"


class Adapter(NamedTuple):
    """A low-rank adapter (LoRA, arXiv 2106.09685) of one linear layer.

    The layer may be several weights that read one input, such as `wq`, `wk` and `wv`: these share
    the first factor.
    """

    weights: tuple[str, ...]
    rank: int
    scale: float = 1.0
    """Factor of the adapter's result: alpha / rank."""
    dropout: float = 0.0
    """Dropout rate of the adapter's input."""

    @property
    def first(self) -> str:
        """The name of the first factor, which leads from the layer's inputs to `rank` channels."""
        return f"{self.weights[0]}.lora_A"

    def second(self, weight: str) -> str:
        """The name of the second factor, which leads to the outputs of one of the weights."""
        return f"{weight}.lora_B"

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the adapter's parameters."""
        return self.first, *map(self.second, self.weights)


class Training(NamedTuple):
    """The parts of a block that train: all but those that are frozen."""

    frozen: frozenset[str] = frozenset()
    """The block's parameters that do not train."""
    constant: frozenset[str] = frozenset()
    """Live values that come to the block and depend on nothing that trains."""
    adapters: tuple[Adapter, ...] = ()
    stored: Storage = ()
    """Storage of frozen matrices that are not stored in the data type of the computation."""

    def adapter(self, weight: str) -> Adapter | None:
        """The adapter that trains beside a weight."""
        return next((a for a in self.adapters if weight in a.weights), None)


EVERYTHING = Training()
"""All parameters train."""


@dataclass(frozen=True, slots=True)
class OperatorHabits:
    """Operators of the forward pass, where frameworks differ."""

    eager: bool = False
    """RMSNorm, gated activation and loss are chains of operators."""
    joint_projections: bool = True
    """Query, key and value are timed as one product; gate and up, too."""
    repeat_kv: bool = False
    """Key-value heads are copied for each of their query heads."""


@dataclass(frozen=True, slots=True)
class GradientHabits:
    """Where gradients are added up, if a plan leaves them as sums over the ranks of a model."""

    of_each_linear: bool = False
    """The gradient of an input is reduced for each linear layer that reads it."""
    whole_embedding: bool = False
    """Every rank of tp makes the gradient of the whole embedding."""
    sum_as_made: bool = False
    """Gradients that are partial sums over tp are reduced as soon as they are made."""
    accumulated_as_reduced: bool = False
    """Gradients of microbatches are added up in the data type in which the sum is reduced."""


@dataclass(frozen=True, slots=True)
class OptimizerHabits:
    """State and reads of the optimizer, where frameworks differ."""

    step_tensors: bool = False
    """It holds a tensor with the number of steps for each parameter."""
    momentum: bool = True
    """`sgd` has a momentum."""
    partial_reads: int = 0
    """Number of reads that each reduce gradients which are partial over tp; 0: reduced before."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training or serving of a model, as far as one device can tell."""

    precision: Precision = PRECISIONS["bf16"]
    optimizer: str = "adamw"
    """An op with moments, such as `adamw`."""
    flash_attention: bool = True
    document: int = 0
    """Positions of a document, beyond which causal attention sees nothing; 0: of the sequence."""
    dropout: bool = True
    clip_grad: bool = True
    cast_once: bool = True
    """Low-precision copies of weights are made once per step, not in each microbatch."""
    gather_once: bool = False
    """Gathered parameters stay gathered for the whole step."""
    experts: ExpertRecipe = ExpertRecipe()
    absorb: bool = False
    """Latent attention computes in the space of the latents, as for decoding."""
    sum_tied: bool = False
    """Gradients of one tensor's copies on a rank are added before they are reduced."""
    root: bool = False
    """The block's parameters are gathered in one unit with those of other blocks."""
    gather_root_once: bool = False
    """The parameters of that unit stay gathered for the whole step."""
    ties: tuple[Tie, ...] = ()
    """The block's copies of tables that other blocks have copies of."""
    shared_vocabulary: bool = False
    """The ranks of a pipeline share the embedding and the output layer. These blocks then consist
    of a table only; norms and positions are separate blocks."""
    begins: frozenset[str] = frozenset()
    """Live values that the block makes itself, rather than take them from a block before it."""
    ends: frozenset[str] = frozenset()
    """Live values that no block behind this one uses."""
    parameters_alone: bool = False
    """Blocks are built for their parameters only: without gradients, to count them."""
    mtp_loss: float = 0.1
    """The weight of multi-token prediction in the loss."""
    index_loss: float = 0.0
    """The weight of the loss by which an indexer learns what attention attends to."""
    inference: Inference | None = None
    """Options of serving; None: the model is trained."""
    training: Training = EVERYTHING
    """The parts of the block that train."""
    logits: str = ""
    """Logits as the loss reads them: "split" over the vocabulary, "gathered"; "": unsharded."""
    operators: OperatorHabits = OperatorHabits()
    gradients: GradientHabits = GradientHabits()
    updates: OptimizerHabits = OptimizerHabits()

    def stored(self, name: str, scope: str) -> Stored | None:
        """Storage of a matrix that is served or frozen; None: the data type of the computation."""
        if self.inference:
            return stored_as(self.inference.weights, name, scope)
        frozen = name in self.training.frozen
        return stored_as(self.training.stored, name, scope) if frozen else None

    def gathered_with(self, name: str) -> Tie | None:
        """The block's copy of a table that the copies of its stage gather once; None: no such."""
        return next((t for t in self.ties if self.root and t.name == name), None)

    def tie(self, name: str, *, first: bool) -> Tie:
        """The block's copy of a table; a block that is built alone has its `first` copy or not."""
        return next((t for t in self.ties if t.name == name), Tie(name, first=first))
