"""Records what torch counts: FLOPs and bytes of matrix products, a convolution and attention.

Needs torch (2.13 has made `tests/conformance/flops.json`): `python tools/pytorch/record_flops.py`.
The models are our own, as plain as can be, on the meta device; FLOPs are those of torch's
FlopCounterMode, bytes those of the operands and results of each call that it counts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry

OUT = Path(__file__).parents[2] / "tests" / "conformance" / "flops.json"
KINDS = {"mm": "products", "bmm": "products", "convolution": "products"}

# Sizes that tell all dims apart; named as fields of our configuration.
DENSE = {
    "num_layers": 2, "hidden_size": 96, "ffn_hidden_size": 272, "num_attention_heads": 6,
    "num_query_groups": 2, "kv_channels": 16, "vocab_size": 208,
}  # fmt: skip
MULTI = DENSE | {"num_query_groups": 6}
LATENT = DENSE | {
    "num_query_groups": 6, "kv_channels": 24, "q_lora_rank": 40, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
EXPERTS = DENSE | {
    "num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 48, "shared_ffn_hidden_size": 80,
}  # fmt: skip
TOKENS = {"batch": 3, "sequence": 64}


class Counts(TorchDispatchMode):
    """Per kind of operation: calls, FLOPs and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            name = packet.__name__
            kind = KINDS.get(name.removesuffix("_backward"))
            kind = kind or ("attention_bwd" if name.endswith("backward") else "attention")
            used = args
            if name == "convolution_backward" and not args[-1][0]:
                used = args[:2]  # a gradient of the kernel only: of the kernel, its shape
            moved = [t for t in tree_leaves((used, out)) if isinstance(t, Tensor)]
            row = self.found[kind]
            row[0] += 1
            row[1] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            row[2] += sum(t.numel() * t.itemsize for t in moved if t.is_floating_point())
        return out


# ---- models --------------------------------------------------------------------------------------


def parameter(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[b, heads, s, d]; by name, since the meta device would not choose it."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    return op(q, k, v, 0.0, causal, return_debug_mask=False)[0]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The whole square of scores, whatever is masked."""
    more = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(more, 1) if more > 1 else x for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def attend(m: dict[str, int], core: Callable[..., Tensor], causal: bool) -> Any:
    h, d, a, g = (m[x] for x in ("hidden_size", "kv_channels", "num_attention_heads",
                                 "num_query_groups"))  # fmt: skip
    if "kv_lora_rank" in m:
        return latent(m, core)
    wq, wk, wv, wo = (parameter(h, n * d) for n in (a, g, g, a))

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(x @ w, d) for w in (wq, wk, wv))
        return core(q, k, v, causal).transpose(1, 2).flatten(2) @ wo.T

    return run


def latent(m: dict[str, int], core: Callable[..., Tensor]) -> Any:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1, with keys and values made of the latents."""
    h, a, r = m["hidden_size"], m["num_attention_heads"], m["qk_rope_head_dim"]
    c, cq, u, d = m["kv_lora_rank"], m["q_lora_rank"], m["v_head_dim"], m["kv_channels"] - r
    down_q, up_q = parameter(h, cq), parameter(cq, a * (d + r))
    down, rope = parameter(h, c), parameter(h, r)
    up_k, up_v, wo = parameter(c, a * d), parameter(c, a * u), parameter(a * u, h)

    def run(x: Tensor) -> Tensor:
        q = heads(x @ down_q @ up_q, d + r)
        z = x @ down
        shared = (x @ rope)[:, None].expand(-1, a, -1, -1)
        k = torch.cat([heads(z @ up_k, d), shared], -1)
        return core(q, k, heads(z @ up_v, u), True).transpose(1, 2).flatten(2) @ wo

    return run


def mlp(h: int, f: int, gated: bool) -> Any:
    up, gate, down = parameter(h, f), parameter(h, f), parameter(f, h)
    if gated:
        return lambda x: (F.silu(x @ gate) * (x @ up)) @ down
    return lambda x: F.gelu(x @ up) @ down


def experts(m: dict[str, int]) -> Any:
    """Evenly loaded: every expert gets as many rows; which ones changes no count."""
    h, n = m["hidden_size"], m["num_experts"]
    router, shared = parameter(h, n), mlp(h, m["shared_ffn_hidden_size"], True)
    each = [mlp(h, m["moe_ffn_hidden_size"], True) for _ in range(n)]

    def run(x: Tensor) -> Tensor:
        gates = torch.softmax(x @ router, -1)
        copies = x.flatten(0, 1).repeat(m["top_k"], 1).chunk(n)
        routed = torch.cat([f(rows) for f, rows in zip(each, copies, strict=True)])
        routed = routed.unflatten(0, (m["top_k"], *x.shape[:2])).sum(0)
        return routed * gates.sum(-1, keepdim=True) + shared(x)

    return run


def language(
    m: dict[str, int], core: Callable[..., Tensor], *, gated: bool = True, tied: bool = False,
    again: bool = False,
) -> Callable[[], Tensor]:  # fmt: skip
    """A decoder; `again`: layers are computed again in backward."""
    h, v = m["hidden_size"], m["vocab_size"]
    table = parameter(v, h)
    head = table if tied else parameter(v, h)

    def layer() -> Callable[[Tensor], Tensor]:
        mix = attend(m, core, True)
        work = experts(m) if "num_experts" in m else mlp(h, m["ffn_hidden_size"], gated)

        def run(x: Tensor) -> Tensor:
            x = x + mix(F.rms_norm(x, (h,)))
            return x + work(F.rms_norm(x, (h,)))

        return run

    layers = [layer() for _ in range(m["num_layers"])]

    def run() -> Tensor:
        words = torch.zeros(*TOKENS.values(), dtype=torch.int64, device="meta")
        x = F.embedding(words, table)
        for one in layers:
            x = checkpoint(one, x, use_reentrant=False) if again else one(x)  # pyright: ignore
        logits = F.rms_norm(x, (h,)) @ head.T
        return F.cross_entropy(logits.flatten(0, 1).float(), words.flatten())

    return run


def vision(m: dict[str, int]) -> Callable[[], Tensor]:
    """ViT, arXiv 2010.11929: patches by a convolution, a class position, all see all."""
    h, patch, image, classes = m["hidden_size"], 8, 64, 10
    kernel, head = parameter(h, 3, patch, patch), parameter(classes, h)
    first = parameter(1, 1, h)
    layers = [(attend(m, flash, False), mlp(h, m["ffn_hidden_size"], False))
              for _ in range(m["num_layers"])]  # fmt: skip

    def run() -> Tensor:
        images = torch.empty(TOKENS["batch"], 3, image, image, device="meta", dtype=torch.bfloat16)
        x = F.conv2d(images, kernel, stride=patch).flatten(2).transpose(1, 2)
        x = torch.cat([first.expand(len(x), -1, -1), x], 1)
        for mix, work in layers:
            x = x + mix(F.layer_norm(x, (h,)))
            x = x + work(F.layer_norm(x, (h,)))
        logits = F.layer_norm(x[:, 0], (h,)) @ head.T
        return F.cross_entropy(
            logits.float(), torch.zeros(len(x), dtype=torch.int64, device="meta")
        )

    return run


CASES: dict[str, tuple[dict[str, int], Callable[[], Tensor]]] = {
    "grouped-query, flash": (DENSE, language(DENSE, flash)),
    "grouped-query, in parts": (DENSE, language(DENSE, plain)),
    "multi-head, flash": (MULTI, language(MULTI, flash, gated=False, tied=True)),
    "multi-head, in parts": (MULTI, language(MULTI, plain, gated=False, tied=True)),
    "computed again": (DENSE, language(DENSE, flash, again=True)),
    "latent": (LATENT, language(LATENT, plain)),
    "experts": (EXPERTS, language(EXPERTS, flash)),
    "vision": (MULTI, vision(MULTI)),
}


def counted(program: Callable[[], Tensor]) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}
    with Counts() as forward, set_checkpoint_early_stop(False):
        loss = program()
    # What is computed again is all of a layer, not only as far as something of it was kept.
    with Counts() as backward, set_checkpoint_early_stop(False):
        loss.backward()
    for phase, counts in (("forward", forward), ("backward", backward)):
        found[phase] = {
            kind: dict(zip(("calls", "flops", "bytes"), row, strict=True))
            for kind, row in sorted(counts.found.items())
        }
    return found


if __name__ == "__main__":
    recorded = {
        name: {"sizes": sizes, **TOKENS, **counted(program)}
        for name, (sizes, program) in CASES.items()
    }
    text = json.dumps({"torch": torch.__version__, "cases": recorded}, indent=1)
    OUT.write_text(text + "\n", encoding="utf-8")
