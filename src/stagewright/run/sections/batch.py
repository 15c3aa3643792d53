"""Sequences, batches and the pipeline's schedule of a training step."""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import (
    Count,
    Number,
    Switch,
    Text,
    idle_axes,
    of_training,
    setting,
)

_LENGTHS = "use prompt_length and context_length"


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """Settings of the batch, and of the order in which stages process microbatches."""

    seq_length: Count | None = of_training(
        None, "Tokens of a sequence.", unset="the model's longest, at most 8192", elsewhere=_LENGTHS
    )
    decoder_seq_length: Count | None = of_training(
        None,
        "Encoder-decoder: tokens of the decoder; seq_length is the encoder's.",
        unset="seq-length",
        elsewhere=_LENGTHS,
    )
    document_length: Count | None = of_training(
        None,
        "Tokens of a document in packed sequences; attention stays within a document.",
        unset="one document",
        elsewhere=_LENGTHS,
    )
    """A block-diagonal causal mask, as of torchtitan's `block_causal`, NeMo's packed sequences and
    Megatron-LM's `--reset-attention-mask`. Of documents of unequal lengths: the sum of the squares
    over the sum of the lengths."""
    micro_batch_size: Count = of_training(
        1, "Sequences of a microbatch on each rank of dp.", elsewhere="use batch_size"
    )
    global_batch_size: Count | None = of_training(
        None,
        "Sequences of a step.",
        unset="micro-batch-size * dp * pp, or twice that if the schedule needs it",
        elsewhere="use batch_size",
    )
    schedule: Text | None = of_training(
        None,
        "1f1b, gpipe, interleaved, looped-bfs, zb-h1, zb-h2, zbv, v-half, v-min, dualpipe(v), "
        "interlaced, (v-half-)vocab-1, vocab-2, .csv.",
        unset="1f1b; with vpp, interleaved",
        elsewhere="a pipeline runs its microbatches in turn",
        metavar="NAME",
    )
    microbatch_group_size_per_vp_stage: Count | None = of_training(
        None,
        "With schedule=interleaved: microbatches that pass through the chunks of a rank"
        " as a group.",
        unset="pp; torchtitan: equal groups of pp or a few more",
        elsewhere="a pipeline rank holds one stage",
    )
    layers_per_stage: tuple[Number, ...] | None = setting(
        None,
        "Layers of each virtual stage, such as 9,10,10,9.",
        unset="by pipeline-split",
        metavar="LIST",
    )
    pipeline_split: Literal["layers", "compute"] = of_training(
        "layers",
        "Without layers-per-stage: equal numbers of layers, or equal compute (nanotron).",
        elsewhere="layers are split evenly",
    )
    first_stage_less_layers: Number = of_training(
        0,
        "With pipeline-split=layers: layers that the embedding counts as.",
        idle=(idle_axes("pp"),),
        elsewhere="layers are split evenly",
        habits={"torchtitan": 1},
    )
    last_stage_less_layers: Number = of_training(
        0,
        "With pipeline-split=layers: layers that the output head counts as.",
        idle=(idle_axes("pp"),),
        elsewhere="layers are split evenly",
        habits={"torchtitan": 1},
    )
    scatter_gather_tensors_in_pipeline: Switch = of_training(
        False,
        "Ranks of tp each send a part of a message between stages, and gather it again.",
        idle=(idle_axes("pp"), idle_axes("tp"), {"sequence_parallel": True}),
        elsewhere="messages of inference are sent whole",
    )
    """Megatron-LM's name: its default from February 2021 (72e4230b) until it moved the pipeline to
    its core in March 2023 (3c92fa93)."""
    streams: Literal["one", "separate"] = setting(
        "one",
        "Order of communication in traces: one chain (ASTRA-sim), or one per communicator.",
        of_requests=True,
    )
    """Orders the communication of traces; `Execution.streams` orders that of the simulation."""
