"""The figures of models whose layers carry a state: Mamba, hybrids, linear attention.

Rows as in `presets.py`; a model without attention or dense MLPs has zeros there, and one that has
no longest sequence 2^20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.model.shared_blocks import SharedBlocks
from stagewright.model.state_space import StateSpace

Style = dict[str, Any]

# As state-spaces/mamba: models without MLPs and without positions. Its README has layers and
# widths, its configurations pad the vocabulary to a multiple of 8 and, with Mamba-2, of 16.
_MAMBA: Style = {"mixers": ("mamba",), "mlps": ("none",), "position": "none"}
_MAMBA2: Style = _MAMBA | {"mixers": ("mamba2",)}
_TIED: Style = {"tied_embeddings": True}


def _channels(hidden: int, **fields: Any) -> Style:
    """Mamba's usual sizes: twice as wide inside, time steps made of a sixteenth."""
    rank = -(-hidden // 16)
    return {"state_space": StateSpace(heads=2 * hidden, state=16, dt_rank=rank, **fields)}


def _heads(heads: int, width: int, state: int, groups: int, chunk: int, **fields: Any) -> Style:
    sizes = {"heads": heads, "head_width": width, "state": state, "groups": groups, "chunk": chunk}
    return {"state_space": StateSpace(**sizes, **fields)}


def _experts(count: int, top_k: int, width: int, shared: int = 0, dense: int = 0) -> Style:
    return {
        "num_experts": count,
        "top_k": top_k,
        "moe_ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared,
        "first_dense_layers": dense,
    }


_BALANCED: Style = {"router": "sigmoid", "expert_bias": True}
PATTERN = {
    "M": ("mamba2", "none"),
    "*": ("global", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
"""Letters of Nemotron-H's `hybrid_override_pattern`: a layer has a mixer or an MLP, not both."""


def pattern(letters: str) -> Style:
    """Mixers and MLPs of Nemotron-H's layers, a letter each."""
    mixers, mlps = zip(*(PATTERN[x] for x in letters), strict=True)
    return {"mixers": mixers, "mlps": mlps}


def every(period: int, offset: int, kind: str, otherwise: str = "global") -> tuple[str, ...]:
    """A period of layers of one kind but for one of another."""
    return tuple(otherwise if i == offset else kind for i in range(period))


# An attention layer in eight, experts in every second layer (arXiv 2403.19887, section 2).
_JAMBA: Style = {
    "mixers": every(8, 4, "mamba"),
    "moe_layer_freq": 2,
    "norm_topk_prob": False,
    "position": "none",
}
_BAMBA: Style = _heads(128, 64, 128, 1, 256) | {
    "mixers": (*every(10, 9, "mamba2"), *every(9, 8, "mamba2"), *every(9, 8, "mamba2")),
    "rotary_fraction": 0.5,
}
# Mamba-2 alone, but that some layers have a shared transformer block before it.
_ZAMBA2: Style = _MAMBA2 | {"activation": "gelu", "tied_embeddings": True}


def _shared(layers: int, first: Sequence[int], blocks: int, **fields: Any) -> Style:
    """Shared blocks in turn: in these layers, and from the last of them on in every sixth."""
    at = (*first, *range(first[-1] + 6, layers - 2, 6))
    turn = {layer: n % blocks + 1 for n, layer in enumerate(at)}
    places = tuple(turn.get(i, 0) for i in range(layers))
    return {"shared_blocks": SharedBlocks(layers=places, adapter_rank=128, **fields)}


_FALCON_H1: Style = {"mixers": ("global+mamba2",)}
_GRANITE4: Style = {"mixers": every(10, 5, "mamba2"), "position": "none", "tied_embeddings": True}
# Patterns of layers: NVIDIA-NeMo/Megatron-Bridge, nemotron_h_provider.py.
_NEMOTRON_H: Style = {"gated": False, "activation": "relu2", "position": "none"}
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_H_47B = (
    "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
    "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
)
_NEMOTRON_H_56B = "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"
_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NANO_12B = "M-M-M-M*" + "-M-M-M-M*" * 5 + "-M-M-M-M-"
_NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_MINIMAX: Style = _heads(64, 128, 128, 64, 256, conv=0) | {
    "mixers": every(8, 7, "lightning"),
    "rotary_fraction": 0.5,
}

# Every fourth layer is latent attention without positions, and the last (arXiv 2510.26692).
_KIMI_LINEAR: Style = _heads(32, 128, 128, 32, 64, conv_bias=False, gate_rank=128) | {
    "mixers": (*every(4, 3, "kimi_delta") * 6, *every(3, 2, "kimi_delta")),
    "position": "none",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **_BALANCED,
}
_QWEN3_NEXT: Style = _heads(32, 128, 128, 16, 64, conv_bias=False) | {
    "mixers": every(4, 3, "gated_delta"),
    "rotary_fraction": 0.25,
    "qk_norm": True,
    "attention_gate": True,
    "shared_expert_gate": True,
}

STATE_FAMILIES: list[tuple[Style, str]] = [
    *(
        (_MAMBA | _TIED | _channels(hidden), row)
        for hidden, row in (
            (768, "mamba-130m 24 768 0 0 0 0 50280 1048576 state-spaces/mamba-130m-hf"),
            (1024, "mamba-370m 48 1024 0 0 0 0 50280 1048576 state-spaces/mamba-370m-hf"),
            (1536, "mamba-790m 48 1536 0 0 0 0 50280 1048576 state-spaces/mamba-790m-hf"),
            (2048, "mamba-1.4b 48 2048 0 0 0 0 50280 1048576 state-spaces/mamba-1.4b-hf"),
            (2560, "mamba-2.8b 64 2560 0 0 0 0 50280 1048576 state-spaces/mamba-2.8b-hf"),
        )
    ),
    (
        _MAMBA | _channels(4096, inner_norms="plain"),
        "falcon-mamba-7b 64 4096 0 0 0 0 65024 1048576 tiiuae/falcon-mamba-7b",
    ),
    *(
        (_MAMBA2 | _TIED | _heads(heads, 64, 128, 1, 256), row)
        for heads, row in (
            (24, "mamba2-130m 24 768 0 0 0 0 50288 1048576 state-spaces/mamba2-130m"),
            (32, "mamba2-370m 48 1024 0 0 0 0 50288 1048576 state-spaces/mamba2-370m"),
            (48, "mamba2-780m 48 1536 0 0 0 0 50288 1048576 state-spaces/mamba2-780m"),
            (64, "mamba2-1.3b 48 2048 0 0 0 0 50288 1048576 state-spaces/mamba2-1.3b"),
            (80, "mamba2-2.7b 64 2560 0 0 0 0 50288 1048576 state-spaces/mamba2-2.7b"),
        )
    ),
    (
        _MAMBA2 | _heads(128, 64, 128, 8, 256),
        "mamba-codestral-7b 64 4096 0 0 0 0 32768 1048576 mistralai/Mamba-Codestral-7B-v0.1",
    ),
    (
        _JAMBA | _channels(4096, inner_norms="weighted") | _experts(16, 2, 14336, dense=1),
        """
jamba-v0.1       32   4096  14336   32    8  128   65536  262144  ai21labs/Jamba-v0.1
jamba-1.5-mini   32   4096  14336   32    8  128   65536  262144  ai21labs/AI21-Jamba-1.5-Mini
""",
    ),
    (
        _JAMBA | _channels(8192, inner_norms="weighted") | _experts(16, 2, 24576, dense=1),
        """
jamba-1.5-large  72   8192  24576   64    8  128   65536  262144  ai21labs/AI21-Jamba-1.5-Large
""",
    ),
    (
        _BAMBA,
        """
bamba-9b         32   4096  14336   32    8  128  128256  262144  ibm-ai-platform/Bamba-9B-v1
""",
    ),
    (
        _ZAMBA2
        | _heads(64, 64, 128, 1, 256)
        | _shared(38, (5,), 1, attention_adapter=True)
        | {"position": "rope"},
        """
zamba2-1.2b      38   2048   8192   32   32  128   32000    4096  Zyphra/Zamba2-1.2B
""",
    ),
    (
        _ZAMBA2 | _heads(80, 64, 64, 1, 256) | _shared(54, (6, 12, 18, 24, 30, 36, 42, 47, 51), 2),
        """
zamba2-2.7b      54   2560  10240   32   32  160   32000    4096  Zyphra/Zamba2-2.7B
""",
    ),
    (
        _ZAMBA2 | _heads(112, 64, 64, 2, 256) | _shared(81, (6, 11), 2) | {"position": "rope"},
        """
zamba2-7b        81   3584  14336   32   32  224   32000    4096  Zyphra/Zamba2-7B
""",
    ),
    (
        _FALCON_H1 | _heads(24, 64, 128, 1, 128, gated_norm=False),
        """
falcon-h1-0.5b   36   1024   2048    8    2   64   32784   16384  tiiuae/Falcon-H1-0.5B-Base
""",
    ),
    (
        _FALCON_H1 | _heads(48, 64, 256, 1, 128),
        """
falcon-h1-1.5b   24   2048   4608    8    2  128   65537  131072  tiiuae/Falcon-H1-1.5B-Base
""",
    ),
    (
        _FALCON_H1 | _heads(24, 128, 256, 1, 128),
        """
falcon-h1-7b     44   3072  12288   12    2  128  130048  262144  tiiuae/Falcon-H1-7B-Base
""",
    ),
    (
        _GRANITE4 | _heads(64, 64, 128, 1, 256),
        """
granite-4.0-h-micro 40 2048  8192   32    8   64  100352  131072  ibm-granite/granite-4.0-h-micro
""",
    ),
    (
        _GRANITE4 | _heads(48, 64, 128, 1, 256) | _experts(64, 6, 512, shared=1024),
        """
granite-4.0-h-tiny  40 1536   512   12    4  128  100352  131072  ibm-granite/granite-4.0-h-tiny
""",
    ),
    (
        _GRANITE4 | _heads(128, 64, 128, 1, 256) | _experts(72, 10, 768, shared=1536),
        """
granite-4.0-h-small 40 4096   768   32    8  128  100352  131072  ibm-granite/granite-4.0-h-small
""",
    ),
    (
        _NEMOTRON_H | pattern(_NEMOTRON_H_8B) | _heads(112, 64, 128, 8, 128),
        """
nemotron-h-4b    52   3072  12288   32    8  128  131072    8192  nvidia/Nemotron-H-4B-Base-8K
""",
    ),
    (
        _NEMOTRON_H | pattern(_NEMOTRON_H_8B) | _heads(128, 64, 128, 8, 128),
        """
nemotron-h-8b    52   4096  21504   32    8  128  131072    8192  nvidia/Nemotron-H-8B-Base-8K
""",
    ),
    (
        _NEMOTRON_H | pattern(_NEMOTRON_H_47B) | _heads(256, 64, 256, 8, 128),
        """
nemotron-h-47b   98   8192  30720   64    8  128  131072    8192  nvidia/Nemotron-H-47B-Base-8K
""",
    ),
    (
        _NEMOTRON_H | pattern(_NEMOTRON_H_56B) | _heads(256, 64, 256, 8, 128),
        """
nemotron-h-56b  118   8192  32768   64    8  128  131072    8192  nvidia/Nemotron-H-56B-Base-8K
""",
    ),
    (
        _NEMOTRON_H | pattern(_NANO_9B) | _heads(128, 80, 128, 8, 128),
        """
nemotron-nano-9b-v2  56 4480 15680  40    8  128  131072  131072  nvidia/NVIDIA-Nemotron-Nano-9B-v2
""",
    ),
    (
        _NEMOTRON_H | pattern(_NANO_12B) | _heads(128, 80, 128, 8, 128),
        """
nemotron-nano-12b-v2 62 5120 20480  40    8  128  131072  131072  nvidia/NVIDIA-Nemotron-Nano-12B-v2
""",
    ),
    (
        _NEMOTRON_H
        | pattern(_NANO_30B)
        | _heads(64, 64, 128, 8, 128)
        | _experts(128, 6, 1856, shared=3712)
        | _BALANCED,
        """
nemotron3-nano-30b-a3b 52 2688 0 32 2 128 131072 262144 nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
""",
    ),
    (
        _MINIMAX | _experts(32, 2, 9216),
        """
minimax-text-01  80   6144   9216   64    8  128  200064 10240000 MiniMaxAI/MiniMax-Text-01
""",
    ),
    (
        _QWEN3_NEXT | _experts(512, 10, 512, shared=512),
        """
qwen3-next-80b-a3b 48  2048   5120   16    2  256  151936  262144  Qwen/Qwen3-Next-80B-A3B-Instruct
""",
    ),
    (
        _KIMI_LINEAR | _experts(256, 8, 1024, shared=1024, dense=1),
        """
kimi-linear-48b-a3b 27 2304  9216  32   32  192  163840 1048576 moonshotai/Kimi-Linear-48B-A3B-Base
""",
    ),
]
