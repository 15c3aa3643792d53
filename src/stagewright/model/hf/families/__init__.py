"""The architectures of config.json files that can be read, by maker: a row each.

A row names the model types of the files, the map of their fields, and the preset that says what the
files do not. The keys that files of a model type may leave out are in `data/config_defaults.yaml`.
To add a family of known layers, add a row, and its defaults. Modules: `ai2`, `deepseek`, `glm`,
`google`, `gpt`, `ibm`, `meta`, `microsoft`, `minimax`, `mistral`, `nvidia`, `qwen`, `tii`, and
`others`, of makers with one or two.
"""

from __future__ import annotations

from stagewright.model.hf.families import (
    ai2,
    deepseek,
    glm,
    google,
    gpt,
    ibm,
    meta,
    microsoft,
    minimax,
    mistral,
    nvidia,
    others,
    qwen,
    tii,
)
from stagewright.model.hf.keys import Family

_MAKERS = (
    *(meta, mistral, qwen, deepseek, glm, minimax, gpt, google, microsoft),
    *(nvidia, ibm, tii, ai2, others),
)
FAMILIES: dict[str, Family] = {
    name: row for maker in _MAKERS for name, row in maker.FAMILIES.items()
}
"""The architectures that can be read. Where a file names none, its model_type's first counts."""

_MISSING = {
    "Mamba-1 in heads that have a B and a C each": "ZambaForCausalLM zamba",
    "block-sparse attention": "Phi3SmallForCausalLM phi3small",
    "an encoder with learned positions": "BartForConditionalGeneration bart",
    "residual sums that attend to the layers before (attention residuals)": (
        "KimiK3ForConditionalGeneration KimiK3ForCausalLM kimi_k3"
    ),
    "short convolutions": "Lfm2ForCausalLM lfm2 Lfm2MoeForCausalLM lfm2_moe Lfm3ForCausalLM lfm3",
    "two attentions in each layer and experts that do nothing": "LongcatFlashForCausalLM "
    "LongcatFlashNgramForCausalLM longcat_flash",
    "attention that is a mixture of experts": "JetMoeForCausalLM jetmoe",
    "a recurrence of gated linear units": "RecurrentGemmaForCausalLM recurrent_gemma",
    "a recurrence of RWKV": "RwkvForCausalLM rwkv RWKV7ForCausalLM rwkv7",
    "a recurrence of xLSTM": "xLSTMForCausalLM xlstm",
    "an embedding for each layer": "Gemma3nForCausalLM Gemma3nForConditionalGeneration "
    "gemma3n_text gemma3n",
    "norms inside attention and MLP": "BitNetForCausalLM bitnet",
    "differences of two attentions": "DiffLlamaForCausalLM diffllama",
    "attention to images inside the decoder": "MllamaForConditionalGeneration MllamaForCausalLM "
    "mllama mllama_text_model",
    "norms of queries and keys with a bias": "PersimmonForCausalLM persimmon",
    "a norm behind its experts": "AXK1ForCausalLM axk1 AXK1",
    "lightning attention beside latent attention": "BailingHybridForCausalLM bailing_hybrid "
    "BailingMoeV2_5ForCausalLM",
    "layers that are run several times": "HrmTextForCausalLM hrm_text",
    "retrieved keys as experts": "DogeForCausalLM doge",
    "gated delta nets with other norms and gates": "OlmoHybridForCausalLM olmo_hybrid",
    "parts that no other family has": "AXK2ForCausalLM axk2 BeamForCausalLM beam "
    "BioGptForCausalLM biogpt "
    "Cohere2MoeForCausalLM cohere2_moe Dots3NoteForCausalLM dots3_note "
    "Dots3NoteForConditionalGeneration dots3_note_text FlintForCausalLM flint "
    "Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration gemma4_unified "
    "gemma4_unified_text GraniteSWAForCausalLM granite_swa GraniteMoeSWAForCausalLM "
    "granitemoe_swa HYV4ForCausalLM hy_v4 ModernBertDecoderForCausalLM "
    "modernbert-decoder",
}
MISSING = {name: lacking for lacking, names in _MISSING.items() for name in names.split()}
"""Mechanisms that other architectures and model types need and a `ModelConfig` lacks."""
