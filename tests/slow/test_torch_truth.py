"""Eleven models of transformers and five modules of users' kinds beside PyTorch: parameters, FLOPs,
and the bytes that autograd keeps for backward.

`python tests/slow/test_torch_truth.py` prints docs/accuracy/data/imported-modules.csv. Three layers
each, on the CPU in fp32; `--framework torchtitan`, whose operators are PyTorch's own. Not compared
are inputs, and what follows from shapes alone (positions, masks).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest

import stagewright as sw
from stagewright.lower.parameters import parameters
from stagewright.model.config import ModelConfig
from stagewright.program.columns import CATEGORIES, PHASES, RankClass
from stagewright.program.shapes import GEMM
from stagewright.run.settings import Run

torch: Any = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
hf: Any = pytest.importorskip("transformers", reason="compares with Hugging Face's models")
own: Any = pytest.importorskip("torch_modules")
counter: Any = pytest.importorskip("torch.utils.flop_counter")
dispatch: Any = pytest.importorskip("torch.utils._python_dispatch")
leaves_of: Any = torch.utils._pytree.tree_leaves
aten: Any = torch.ops.aten

pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.filterwarnings("ignore")]

BATCH, POSITIONS = 2, 16
BASE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
DENSE: dict[str, Any] = BASE | {
    "num_hidden_layers": 3, "num_key_value_heads": 2, "intermediate_size": 80,
    "max_position_embeddings": 256,
}  # fmt: skip
LATENT: dict[str, Any] = DENSE | {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
"""Keys and values of one width: PyTorch's fused attention on the CPU knows no other."""
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**DENSE),
    "Qwen3": lambda: hf.Qwen3Config(**DENSE, head_dim=8),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(
        **DENSE, head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True),
    "Mixtral": lambda: hf.MixtralConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(**LATENT),
    "Gemma-2": lambda: hf.Gemma2Config(
        **DENSE, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "GPT-2": lambda: hf.GPT2Config(
        vocab_size=96, n_embd=32, n_head=4, n_layer=3, n_positions=256, n_inner=80, **ENDS),
    "Phi-3": lambda: hf.Phi3Config(**DENSE, **ENDS),
    "Mamba-2": lambda: hf.Mamba2Config(
        vocab_size=96, hidden_size=32, num_heads=8, head_dim=8, state_size=16, n_groups=2,
        num_hidden_layers=3, chunk_size=8, **ENDS),
    "Whisper": lambda: hf.WhisperConfig(
        vocab_size=96, num_mel_bins=16, encoder_layers=3, decoder_layers=3, d_model=32,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=80,
        decoder_ffn_dim=80, max_source_positions=24, max_target_positions=64,
        decoder_start_token_id=1, **ENDS),
    "ViT": lambda: hf.ViTConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=80, num_hidden_layers=3,
        image_size=16, patch_size=4, num_labels=10),
}  # fmt: skip
KINDS = {"ViT": "AutoModelForImageClassification", "Whisper": "AutoModelForSpeechSeq2Seq"}

SAVED_OFF = {"Qwen3-MoE": 0.02, "Mixtral": 0.02, "DeepSeek-V3": 0.02, "Mamba-2": 0.08,
             "custom op": 1.0}  # fmt: skip
"""Largest relative error of the saved bytes, where they differ: docs/pytorch.md says why."""


class Scores(torch.nn.Module):
    """A model of transformers that returns its scores alone."""

    def __init__(self, model: Any, *names: str) -> None:
        super().__init__()
        self.model, self.names = model.eval(), names

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


@dataclass(frozen=True)
class Made:
    """A module, its example inputs, and how it is imported."""

    module: Any
    inputs: tuple[Any, ...]
    options: dict[str, Any]


def made(name: str) -> Made:
    torch.manual_seed(0)
    if name in own.CASES:
        kind, inputs, options = own.CASES[name]
        given = [x() for x in inputs]
        real = [
            torch.randn(x.shape) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)
            for x in given
        ]
        return Made(kind(), tuple(real), options)
    auto = getattr(hf, KINDS.get(name, "AutoModelForCausalLM"))
    config = CONFIGS[name]()
    config.use_cache = False
    model = auto.from_config(config)
    ids = torch.randint(0, 96, (BATCH, POSITIONS))
    if name == "ViT":
        return Made(Scores(model, "pixel_values"), (torch.randn(BATCH, 3, 16, 16),), {})
    if name == "Whisper":
        heard = torch.randn(BATCH, 16, 48)
        return Made(Scores(model, "input_features", "decoder_input_ids"), (heard, ids), {})
    return Made(Scores(model, "input_ids"), (ids,), {"static": name == "Mamba-2"})


# ---- PyTorch's -----------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What is compared."""

    parameters: int
    flops: int
    saved: int


def storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


class OfParameters(dispatch.TorchDispatchMode):
    """Follows which tensors depend on parameters."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.known = {storage(p) for p in module.parameters()}
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, torch.Tensor)]
        depends = any(storage(x) in self.known for x in tensors)
        for x in leaves_of(out):
            if isinstance(x, torch.Tensor):
                self.held.append(x.untyped_storage())
                if depends:
                    self.known.add(storage(x))
        return out


def grouped(a: Any, b: Any, *rest: Any, **more: Any) -> int:
    """Of products of each expert's rows with its matrix, of which the counter knows nothing."""
    return 2 * prod(a) * b[-1]


COUNTED = {
    aten._grouped_mm: grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: (
        counter.sdpa_flop_count(q, k, v)
    ),
}
"""Formulas that FlopCounterMode lacks on the CPU; the second is its own of other devices."""


def pytorch(case: Made, *, loss: bool) -> Figures:
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        kept.setdefault(storage(tensor), tensor.untyped_storage())
        return tensor

    followed = OfParameters(case.module)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, followed:
        out = case.module(*case.inputs)
        if loss:
            labels = torch.zeros(prod(out.shape[:-1]), dtype=torch.long)
            torch.nn.functional.cross_entropy(out.flatten(0, -2), labels)
    outside = (*case.module.parameters(), *case.module.buffers(), *case.inputs)
    given = {storage(x) for x in outside}
    saved = sum(
        # Cross-entropy keeps the weight of all labels together: one number.
        kept[key].nbytes() for key in kept
        if key not in given and key in followed.known and kept[key].nbytes() > 4
    )  # fmt: skip
    with counter.FlopCounterMode(display=False, custom_mapping=COUNTED) as counts:
        case.module(*case.inputs)
    numbers = sum(p.numel() for p in case.module.parameters())
    return Figures(numbers, counts.get_total_flops(), saved)


# ---- ours ----------------------------------------------------------------------------------------


def products(of: RankClass) -> int:
    """FLOPs of forward's products and attention, whose masked pairs are counted, too."""
    total = 0
    for row in np.flatnonzero(of.tasks.phase == PHASES.index("forward")):
        if of.tasks.shape[row] < 0:
            continue
        shape = of.tasks.shapes[of.tasks.shape[row]]
        n = dict(shape.extents)
        if shape.kernel == GEMM:
            total += 2 * n["batch"] * n["m"] * n["n"] * n["k"]
        elif shape.kernel == "attention":
            total += 2 * n["batch"] * n["heads"] * n["q"] * n["k"] * (n["d"] + n["v"])
    return total


def saved(of: RankClass, model: ModelConfig) -> int:
    """Bytes of forward that backward reads, without inputs."""
    text = model.modules[0].text
    handed = {n for line in re.findall(r"^output (.*)", text, re.M) for n in line.split(", ")}
    given = {*re.findall(r"^input (\w+)", text, re.M)} - handed
    v, last = of.values, int(np.flatnonzero(of.tasks.phase == PHASES.index("forward"))[-1])
    there = v.value[(v.first <= last) & (v.last > last)]
    kept = there[v.category[there] == CATEGORIES.index("activations")]
    names = [v.names[v.name[i]].rpartition(".")[2] for i in kept]
    return sum(int(v.size[i]) for i, name in zip(kept, names, strict=True) if name not in given)


def stagewright(case: Made, model: ModelConfig) -> Figures:
    ids = case.inputs[-1]
    run: dict[str, Any] = {
        "micro_batch_size": ids.shape[0], "global_batch_size": ids.shape[0], "precision": "fp32",
        "seq_length": ids.shape[1] if ids.dim() == 2 and not ids.is_floating_point() else 1,
        "framework": "torchtitan", "dropout": False, "repeat_kv": False,
    }  # fmt: skip
    (of,) = sw.compile(Run(model=model.name, **run), model).program.classes
    return Figures(parameters(model)[0], products(of), saved(of, model))


def both(name: str) -> tuple[Figures, Figures]:
    case = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words = re.sub(r"\W+", "-", name)
        model = sw.from_torch(case.module, case.inputs, name=words, **case.options)
        loss = any("cross-entropy is added" in note for note in model.notes)
        return stagewright(case, model), pytorch(case, loss=loss)


ALL = (*CONFIGS, *own.CASES)


@pytest.mark.parametrize("name", ALL)
def test_figures_are_those_of_pytorch(name: str):
    ours, theirs = both(name)
    assert ours.parameters == theirs.parameters
    assert ours.flops == theirs.flops
    assert ours.saved == pytest.approx(theirs.saved, rel=SAVED_OFF.get(name, 0))


def main() -> None:
    figures = ("parameters", "forward_flops", "saved_bytes")
    print(",".join(("module", *figures, *(f"{figure}_error" for figure in figures))))
    for name in ALL:
        ours, theirs = both(name)
        errors = [f"{a / b - 1:.4f}" for a, b in zip(ours, theirs, strict=True)]
        print(",".join((name, *map(str, theirs), *errors)), flush=True)


if __name__ == "__main__":
    main()
