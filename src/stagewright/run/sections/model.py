"""The model, what a step of it is, and what replaces sizes of the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import (
    TRAINING,
    Count,
    Factor,
    Text,
    Whole,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model and the kind of step."""

    model: Text
    """A preset, the path of a Hugging Face config.json, or an id of the hub in its local cache."""

    mode: Literal["train", "prefill", "decode"] = setting(
        "train",
        "The step: of training, over prompts, or one new token for each request (decode).",
    )
    as_family: Text | None = setting(
        None,
        "Reads a config.json as this family, a model type such as llama, whatever the file says.",
        option="as",
        metavar="FAMILY",
        of_requests=True,
    )
    layers: Count | None = setting(
        None, "Replaces the model's number of layers.", names=("num-layers",), of_requests=True
    )
    vocab: Count | None = setting(
        None, "Replaces the model's vocabulary size.", names=("vocab-size",), of_requests=True
    )
    make_vocab_size_divisible_by: Count = setting(
        1,
        "The vocabulary is padded to a multiple of this times tp.",
        of_requests=True,
    )
    mtp_num_layers: Annotated[int, Whole(0, 16)] | None = setting(
        None,
        "Layers that predict one more token each (multi-token prediction).",
        unset="as the model",
        modes=TRAINING,
        elsewhere="drafts are num_speculative_tokens",
    )
    mtp_loss_scaling_factor: Factor = setting(
        0.1,
        "Weight of the mean loss of the multi-token prediction layers.",
        modes=TRAINING,
        elsewhere="there is no loss",
    )
