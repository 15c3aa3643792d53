"""The sizes of a model's dims: `M` is its hidden size, `A` its attention heads."""

from __future__ import annotations

from dataclasses import replace

from stagewright.model.config import ModelConfig
from stagewright.model.layers import Vision


def sizes(config: ModelConfig) -> dict[str, int]:
    """The numbers behind the dims of a model's blocks, without those that a run decides.

    A run decides B sequences, S positions, V, the padded vocabulary, R token copies per expert, the
    number of data-parallel parts of B, `dp_parts`, and the number of all parts of B x S, `parts`.
    """
    numbers = {
        "M": config.hidden_size,
        "A": config.num_attention_heads,
        "G": config.num_query_groups,  # key-value heads
        "D": config.kv_channels,  # width of a head
        "F": config.ffn_hidden_size,
        "P": config.max_position_embeddings + config.position_offset,
        "T": config.token_types,
        "W": config.embedding_size or config.hidden_size,
        "E": config.num_experts,
        "X": config.moe_ffn_hidden_size,
        "Latent": config.moe_latent_size,  # width of the experts' rows where it is not M
        "Y": config.shared_ffn_hidden_size,
        "Q": config.q_lora_rank,
        "C": config.kv_lora_rank,
        "N": config.kv_channels - config.qk_rope_head_dim,  # of a head, without rotary position
        "Z": config.qk_rope_head_dim,
        "U": config.v_head_dim or config.kv_channels,
        "IndexHeads": config.index_n_heads,
        "IndexWidth": config.index_head_dim,
        "Streams": config.residual_streams,
        "StreamWeights": config.residual_streams * (config.residual_streams + 2),
        "Groups": config.o_groups,  # of heads that are projected together
        "Low": config.o_lora_rank,
        "Top": config.index_topk // config.index_block_size,
        "Rank": config.shared_blocks.adapter_rank if config.shared_blocks else 0,
        "Buckets": config.relative_buckets,
    } | _state_sizes(config)
    for number in range(1, len(config.own_sizes) + 1):
        numbers |= {
            f"{name}_of{number}": size for name, size in own_numbers(config, number).items()
        }
    if config.vision:
        numbers |= _vision_sizes(config.vision, config.max_position_embeddings)
    if config.tower:
        numbers |= {f"tower_{name}": number for name, number in sizes(config.tower).items()}
    return numbers


def own_numbers(config: ModelConfig, number: int) -> dict[str, int]:
    """The sizes in which layers with sizes of their own differ from the model's other layers."""
    of_model = sizes(replace(config, own_sizes=(), layers_with_own_sizes=(0,)))
    of_layers = sizes(config.with_own_sizes(number))
    return {name: size for name, size in of_layers.items() if size != of_model[name]}


def _state_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes of state-space layers."""
    state = config.state_space
    if state is None:
        return {}
    return {
        "Inner": state.inner,
        "Group": state.groups,
        "Head": state.heads // state.groups,  # heads of a group
        "Width": state.head_width,
        "State": state.state,
        "Taps": state.conv,
        "Chunk": state.chunk,
        "DtRank": state.dt_rank,
        "Selection": state.dt_rank + 2 * state.state,  # what time steps, B and C are made of
        "GateRank": state.gate_rank,
    }


def _vision_sizes(v: Vision, positions: int) -> dict[str, int]:
    pixels = v.channels * v.patch_size**2
    return {"Patches": v.patches, "Pixels": pixels, "Classes": v.classes, "S": positions}
