"""Records what transformers' hybrids compute: logits of toy models.

Needs torch and transformers (2.13 and 5.23 have made the file), and no GPU:
`python tools/pytorch/record_hybrids.py` writes `tests/conformance/hybrids.json`. Weights are
numbers by name (`weights.py` beside it), so that the test makes the same ones. The base of the
rotary angles is that of our interpreter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

CONFORMANCE = Path(__file__).parents[2] / "tests" / "conformance"
sys.path.append(str(CONFORMANCE))
from weights import weight  # noqa: E402

OUT = CONFORMANCE / "hybrids.json"
ROPE = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
COMMON: dict[str, Any] = {
    **{"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
    **{"mamba_d_state": 6, "mamba_d_conv": 4, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "attention_dropout": 0.0} | ROPE,
}
ZAMBA2 = COMMON | {
    "architectures": ["Zamba2ForCausalLM"],
    **{"num_hidden_layers": 5, "num_mem_blocks": 2, "adapter_rank": 3, "n_mamba_heads": 4},
    **{"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"], "chunk_size": 4},
    **{"mamba_ngroups": 2, "use_shared_attention_adapter": True, "use_mem_rope": True},
}
FALCON_H1 = COMMON | {
    "architectures": ["FalconH1ForCausalLM"],
    **{"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 6, "mamba_d_ssm": 24},
    **{"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_chunk_size": 4},
    **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "zamba2": ZAMBA2,
    "zamba2, plain": ZAMBA2
    | {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False},
    "falcon-h1": FALCON_H1,
    "falcon-h1, no norm": FALCON_H1 | {"mamba_rms_norm": False, "num_key_value_heads": 4},
}
TOKENS = [[3, 17, 5, 0, 11, 23, 8, 8], [9, 1, 14, 20, 2, 6, 19, 7]]


def logits(config: dict[str, Any]) -> Any:
    """What transformers' class computes in fp64, but for norms, which it always does in fp32."""
    name = config["architectures"][0]
    kind = getattr(transformers, name.replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(kind(**config)).double().eval()
    for key, p in model.named_parameters():
        p.data = torch.from_numpy(weight(key, tuple(p.shape)))
    with torch.no_grad():
        return model(torch.tensor(TOKENS), logits_to_keep=0).logits.numpy()


if __name__ == "__main__":
    versions = {m.__name__: m.__version__ for m in (torch, transformers)}
    found = {
        name: {"config": config, "logits": np.round(logits(config), 7).tolist()}
        for name, config in MODELS.items()
    }
    lines = [f' "{name}": {json.dumps(each)}' for name, each in found.items()]
    head = f'"versions": {json.dumps(versions)},\n"tokens": {json.dumps(TOKENS)},\n"models": {{\n'
    OUT.write_text("{" + head + ",\n".join(lines) + "\n}}\n")
