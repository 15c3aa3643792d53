"""How a model is trained or served, as far as one device can tell.

`lower.recipe.recipe_of` makes a recipe of a run's settings; the builders of blocks read nothing
else of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a recipe; `master` is empty where the parameter is its own master copy.

    Megatron-LM's mixed precision keeps bf16 parameters, accumulates gradients in fp32 and holds an
    fp32 master copy and fp32 moments: 18 bytes per parameter with AdamW (arXiv 1910.02054,
    section 3.1, counts the gradient in 16 bit: 16 bytes).
    """

    compute: str = "bf16"
    gemm: str = ""  # operands of the layers' matrix products, where not `compute`
    gradient: str = "fp32"
    master: str = "fp32"
    moment: str = "fp32"
    moments: tuple[tuple[str, str], ...] = ()  # by name, those that are not held in `moment`
    param: str = ""  # what parameters are stored in, where not `compute`
    reduce: str = ""  # gradients of a microbatch on their way, where not `gradient`

    def dtype_of(self, moment: str) -> str:
        """The number format in which the optimizer holds one of its moments, such as `exp_avg`."""
        return dict(self.moments).get(moment, self.moment)


PRECISIONS = {
    "bf16": Precision(),
    "fp8": Precision(gemm="fp8"),
    "fp32": Precision(compute="fp32", master=""),
}


@dataclass(frozen=True, slots=True)
class ExpertRecipe:
    """How a mixture of experts is trained: Megatron-LM's options, as far as one device can tell."""

    dispatcher: str = "alltoall"  # or "allgather": copies go to their experts, or all tokens do
    apply_probs: str = "experts"  # the gates weigh the experts' "input", inner values or "output"
    exchange_counts: bool = False  # ranks tell each other how many copies they will send
    router_fp32: bool = False
    load_balancing_type: str = "aux_loss"
    aux_loss: float = 0.0  # coefficients; 0: without
    z_loss: float = 0.0
    expert_bias: bool = False  # that balances the load, and is updated once per step


@dataclass(frozen=True, slots=True)
class Inference:
    """How a model is served, as far as one device can tell."""

    cache_dtype: str = "bf16"
    weights: str = ""  # how matrices of layers are stored, where not as computed with
    redundant_experts: int = 0  # that are there once more
    decode: bool = False  # one new token of each request
    striped: bool = False  # the tokens of a request are in `Stripes` caches
    prefix: bool = False  # some request has tokens in the cache before the step


class Tie(NamedTuple):
    """What a block has to know of a table that other blocks have a copy of."""

    name: str
    first: bool = True  # of all copies: the one whose norm counts
    owner: bool = True  # of the copies on its rank, which are one tensor
    away: bool = True  # other pipeline ranks have copies, too
    later: bool = False  # a block behind it on its stage uses this rank's tensor
    leads: bool = True  # of the copies on its stage

    @property
    def words(self) -> str:
        """Which of the copies it is.

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


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained, or served, as far as one device can tell."""

    precision: Precision = PRECISIONS["bf16"]
    optimizer: str = "adamw"
    flash_attention: bool = True
    dropout: bool = True
    clip_grad: bool = True
    cast_once: bool = True  # low-precision copies of weights are made once per step
    gather_once: bool = False  # parameters that are gathered stay so for the whole step
    experts: ExpertRecipe = ExpertRecipe()
    absorb: bool = False  # latent attention in the space of the latents, as for decoding
    sum_tied: bool = False  # gradients of a rank's one tensor are added before they are reduced
    ties: tuple[Tie, ...] = ()
    begins: frozenset[str] = (
        frozenset()
    )  # values that the block makes though it might be handed them
    ends: frozenset[str] = frozenset()  # values that no block behind it uses
    mtp_loss: float = 0.1  # the weight of multi-token prediction in the loss
    inference: Inference | None = None  # None: training
    joint_projections: bool = True  # query, key and value are one product; gate and up, too
    # What PyTorch does that Megatron-LM does not; see the options of `Run`.
    eager: bool = False
    repeat_kv: bool = False
    split_loss: bool = False  # over the vocabulary
    step_tensors: bool = False
    loss_parallel: bool = True
    own_input_grads: bool = False
    whole_embedding_grad: bool = False
    # Gradients that are sums over ranks of a model are added up before they are reduced,
    sum_as_made: bool = False
    sum_as_read: int = 0  # or each of so many times that the optimizer reads one.

    def tie(self, name: str, *, first: bool) -> Tie:
        """What is known of a table; by itself, that of the embedding is the first copy."""
        return next((t for t in self.ties if t.name == name), Tie(name, first=first))
