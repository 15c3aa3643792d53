"""The model, what a step of it is, and what replaces sizes of the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import Count, Factor, Text, of_training, setting, whole


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model and the kind of step."""

    model: Text
    """A preset, the path of a Hugging Face config.json, or an id of the hub in its local cache."""

    mode: Literal["train", "prefill", "decode"] = setting(
        "train", "Step to simulate: training, prefill of prompts, or one decode step."
    )
    as_family: Text | None = setting(
        None,
        "Read a config.json as this family: a model type such as llama.",
        option="as",
        metavar="FAMILY",
        of_requests=True,
    )
    layers: Count | None = setting(
        None, "Number of layers, in place of the model's.", of_requests=True
    )
    vocab: Count | None = setting(
        None, "Vocabulary size, in place of the model's.", of_requests=True
    )
    make_vocab_size_divisible_by: Count = setting(
        1, "Pad the vocabulary to a multiple of this times tp.", of_requests=True
    )
    mtp_num_layers: Annotated[int, whole(0, 16)] | None = of_training(
        None,
        "Multi-token prediction layers, each of which predicts one more token.",
        unset="the model's",
        elsewhere="drafts are num_speculative_tokens",
    )
    mtp_loss_scaling_factor: Factor = of_training(
        0.1,
        "Weight of the mean loss of multi-token prediction layers.",
        elsewhere="there is no loss",
    )
