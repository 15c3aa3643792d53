"""Routing of tokens to the experts of a mixture; none of it means anything in a dense model."""

from dataclasses import dataclass
from typing import Any, Literal

from stagewright.run.sections.declare import Factor, Switch, Text, Weight, of_training, setting

_NO_LOSS = "there is no loss"


@dataclass(frozen=True, kw_only=True)
class ExpertSection:
    """The dispatcher, the router and the loads of experts; names are Megatron-LM's."""

    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = of_training(
        "alltoall",
        "Dispatch tokens to experts by all-to-all, or all-gather all tokens.",
        elsewhere="copies go to their experts",
    )
    moe_apply_probs: Literal["experts", "input", "output"] | None = of_training(
        None,
        "Where router weights are multiplied: inside experts, or on their input or output.",
        unset="the model's, else experts",
        elsewhere="gates weigh results where the tokens are",
    )
    moe_expert_capacity_factor: Factor | None = of_training(
        None,
        "Drop tokens of an expert beyond this times an even share, on each rank.",
        unset="none dropped",
        elsewhere="no token is dropped",
    )
    moe_pad_expert_input_to_capacity: Switch = setting(
        False, "Pad every expert's input to its capacity."
    )
    moe_router_dtype: Literal["fp32"] | None = setting(
        None, "Data type of the router.", unset="precision"
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = (
        setting(
            "aux_loss",
            "Tokens that the load-balancing loss averages over: a rank's microbatch, a "
            "sequence, or the microbatch of all ranks.",
        )
    )
    moe_aux_loss_coeff: Weight = of_training(
        0.0, "Coefficient of the load-balancing loss; 0: no loss.", elsewhere=_NO_LOSS
    )
    moe_z_loss_coeff: Weight = of_training(
        0.0, "Coefficient of the router's z-loss.", elsewhere=_NO_LOSS
    )
    moe_router_enable_expert_bias: Switch | None = of_training(
        None,
        "Balance the load by a bias on each expert's score (aux-loss-free).",
        unset="the model's",
        elsewhere="it is part of the model",
    )
    expert_load: Text | tuple[tuple[Any, ...], ...] | None = setting(
        None,
        "Tokens of each expert by layer (CSV, JSON); or the load of the busiest rank over the "
        "mean, such as 1.3; 1: equal.",
        unset="equal in training, uneven in inference",
        metavar="FILE|X",
    )
