"""Who drafts the tokens of speculative decoding: a head on the model, or a smaller model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stagewright.errors import UserError
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.model.layers import DraftHead
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run

HEADS: Mapping[str, DraftHead] = {"mtp": "mtp", "eagle": "eagle", "eagle3": "eagle3"}
"""By method, in vLLM's words (vllm-project/vllm@82720b1e `vllm/config/speculative.py`)."""
_OF_THE_MODEL: Mapping[str, Any] = {"layers": None, "vocab": None, "layers_per_stage": None}


@dataclass(frozen=True, slots=True, eq=False)
class Drafter:
    """A model that drafts, and the layout in which it runs."""

    run: Run
    """Not resolved, `num_speculative_tokens` as of the model that verifies."""
    model: ModelConfig
    """In the pass over all tokens of a step."""
    own: ModelConfig
    """In later passes, which read the drafter's own hidden states."""
    head: bool
    """Whether embedding and output projection are the model's."""

    @property
    def number(self) -> int:
        """Drafts of a request in a step."""
        return self.run.num_speculative_tokens

    @property
    def more(self) -> int:
        """As `DraftedTimes.more`."""
        return 0 if self.head else 1


def drafter_of(engines: EngineSection, run: Run, model: ModelConfig) -> Drafter | None:
    """Who drafts for a model in a layout; None: nobody who takes time of the GPUs.

    Raises UserError where what is asked for is not known.
    """
    method, name = engines.speculative_method, engines.speculative_model
    if method is None and name is not None:
        kind = model_of(name).draft_head
        method = "draft_model" if kind == "none" else kind
    if method is None:
        return None
    if not run.num_speculative_tokens:
        raise UserError(
            f"--speculative-method {method} drafts nothing without --num-speculative-tokens; give "
            "that, or leave it out"
        )
    if method == "ngram":
        if name is not None:
            raise UserError(
                "--speculative-method ngram has no model; leave out --speculative-model"
            )
        return None
    if run.pp > 1:
        raise UserError(
            f"--speculative-method {method} with pp={run.pp}: drafts are computed by one stage, "
            "which is not modelled; use pp=1, or leave out the method for drafts that take no time"
        )
    if method == "mtp":
        if name is not None:
            raise UserError(
                "--speculative-method mtp is a layer of the model itself; leave out "
                "--speculative-model"
            )
        made = mtp_of(model)
        return Drafter(run.model_copy(update=_OF_THE_MODEL), made, made, head=True)
    if name is None:
        raise UserError(
            f"--speculative-method {method} needs --speculative-model: a model's name or its "
            "config.json"
        )
    drafts, head = model_of(name), HEADS.get(method)
    _check(drafts, head, name, model)
    changed = {**_OF_THE_MODEL, "model": name, "weight_precision": None}
    if not drafts.num_experts:
        changed |= {"ep": 1, "etp": None, "expert_load": None, "num_redundant_experts": 0}
    layout = run.model_copy(update=changed)
    if head is None:
        return Drafter(layout, drafts, drafts, head=False)
    first = replace(drafts, draft_head=head, final_norm=head != "eagle")
    later = replace(first, draft_head="eagle3_own") if head == "eagle3" else first
    return Drafter(layout, first, later, head=True)


def _check(drafts: ModelConfig, head: DraftHead | None, name: str, model: ModelConfig) -> None:
    """Raise UserError where this head, or this model (None), drafts nothing for a model."""
    if drafts.draft_head not in ("none", head):
        raise UserError(
            f"--speculative-model {name} is a head of {drafts.draft_head}; give "
            f"--speculative-method {drafts.draft_head}"
        )
    if head is not None and drafts.hidden_size != model.hidden_size:
        raise UserError(
            f"--speculative-model {name} is {drafts.hidden_size} wide, but a head reads hidden "
            f"states of {model.name}, which is {model.hidden_size} wide; use a head made for it"
        )
    if head is None and drafts.vocab_size != model.vocab_size:
        raise UserError(
            f"--speculative-model {name} has a vocabulary of {drafts.vocab_size:,}, "
            f"{model.name} one of {model.vocab_size:,}: a draft model has the same tokens (vLLM: "
            "verify_equal_vocab_size_if_draft_model)"
        )


def mtp_of(model: ModelConfig) -> ModelConfig:
    """The layer of a model that predicts the token after the next: like the model's last layer."""
    last = model.layer(model.num_layers - 1)
    if last.sizes or last.block or model.residual_streams > 1 or model.chain:
        raise UserError(
            f"--speculative-method mtp: the layer of {model.name} for multi-token prediction is "
            "not known; leave out the method for drafts that take no time"
        )
    stored = model.quantization
    if stored is not None and stored.layers:
        stored = replace(stored, layers=(stored.layers[-1],))
    return replace(
        model,
        name=f"{model.name} (mtp)",
        num_layers=1,
        mtp_num_layers=0,
        first_dense_layers=0,
        moe_layer_freq=1,
        mixers=("indexed" if last.mixer == "index_shared" else last.mixer,),
        mlps=(last.mlp,),
        quantization=stored,
        draft_head="mtp",
    )
