"""Speculative decoding: how many drafts of a step are accepted, and which model drafts.

A step gives a request the tokens up to the first rejected draft, and one after them: 1 to K + 1
tokens of K drafts. Their mean number is the *acceptance length*. Two models of it:

* a length, as engines force it for benchmarks (vLLM's `synthetic_acceptance_length`, SGLang's
  `SGLANG_SIMULATE_ACC_LEN`, TensorRT-LLM's `TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`): with
  length 3.78, two drafts are always accepted and a third with probability 0.78, the least variance;
* a rate, the probability that a draft is accepted if those before it are (Leviathan et al., ICML
  2023, arXiv 2211.17192, section 3.1): the length is (1 - a^(K + 1)) / (1 - a).

SemiAnalysisAI/InferenceX@843c6254 `golden_al_distribution/` has measured lengths.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stagewright.errors import UserError
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.model.layers import RECURRENCES, SIDE_BY_SIDE, DraftHead
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run

DRAWS = 1 << 14


@dataclass(frozen=True)
class Drafts:
    """Drafts of each request in a step, and how often they are accepted."""

    number: int
    """Number of drafts of a step."""
    accepted_up_to: tuple[float, ...]
    """Probability, for each draft, that it and all before it are accepted."""
    slots: int
    """Cache positions that a step has beyond the tokens computed before it."""
    _tokens: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sample the tokens of steps: exact frequencies in a random order."""
        tokens = [1] * DRAWS
        for share in self.accepted_up_to:
            for index in range(round(share * DRAWS)):
                tokens[index] += 1
        random.Random(0).shuffle(tokens)
        object.__setattr__(self, "_tokens", tokens)

    @classmethod
    def of_length(cls, number: int, length: float, slots: int) -> Drafts:
        """Drafts of an acceptance length, with the least variance.

        >>> Drafts.of_length(4, 2.75, slots=5).accepted_up_to
        (1.0, 0.75, 0.0, 0.0)
        """
        if not 1 <= length <= number + 1:
            raise UserError(
                f"--acceptance-length is {length:g}, wanted 1 to {number + 1}: of "
                f"{number} drafts at most as many are right, and one token comes behind them"
            )
        return cls(number, tuple(min(max(length - 1 - n, 0.0), 1.0) for n in range(number)), slots)

    @classmethod
    def of_rate(cls, number: int, rate: float, slots: int) -> Drafts:
        """Drafts that are accepted with a probability if those before them are.

        >>> Drafts.of_rate(2, 0.5, slots=3).length
        1.75
        """
        return cls(number, tuple(rate ** (n + 1) for n in range(number)), slots)

    @property
    def length(self) -> float:
        """Mean tokens of a step."""
        return 1 + sum(self.accepted_up_to)

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a step."""
        return 1 + sum(share > 0 for share in self.accepted_up_to)

    def tokens_of_step(self, request: int, output_tokens: int) -> int:
        """Tokens of a step of a request that has `output_tokens`."""
        return self._tokens[(request * 7919 + output_tokens * 10007) % DRAWS]


# ---- drafters -----------------------------------------------------------------------------------

HEADS: Mapping[str, DraftHead] = {"eagle": "eagle", "eagle3": "eagle3"}
"""Draft heads by vLLM's method (vllm-project/vllm@82720b1e `vllm/config/speculative.py`)."""
_OF_THE_MODEL: Mapping[str, Any] = {"layers": None, "vocab": None, "layers_per_stage": None}


@dataclass(frozen=True, slots=True, eq=False)
class Drafter:
    """Model that drafts, and its layout."""

    run: Run
    """Run that is not resolved; `num_speculative_tokens` as of the verifying model."""
    model: ModelConfig
    """Model of the pass over all tokens of a step."""
    later: ModelConfig
    """Model of later passes, which read the drafter's own hidden states."""
    head: bool
    """The drafter uses the model's embedding and output projection."""

    @property
    def number(self) -> int:
        """Drafts of a request in a step."""
        return self.run.num_speculative_tokens

    @property
    def extra_tokens(self) -> int:
        """Further tokens of each request in the first pass (`DraftingTimes.extra_tokens`)."""
        return 0 if self.head else 1


def drafter_of(engines: EngineSection, run: Run, model: ModelConfig) -> Drafter | None:
    """Drafter of a model in a layout; None if drafts take no GPU time.

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
        layer = mtp_of(model)
        return Drafter(run.model_copy(update=_OF_THE_MODEL), layer, layer, head=True)
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
    if model.own_sizes or last.block or model.residual_streams > 1 or model.chain:
        raise UserError(
            f"--speculative-method mtp: the layer of {model.name} for multi-token prediction is "
            "not known; leave out the method for drafts that take no time"
        )
    stored = model.quantization
    if stored is not None and stored.layers:
        stored = replace(stored, layers=(stored.layers[-1],))
    mixer = "indexed" if last.mixer == "index_shared" else last.mixer
    return replace(
        model,
        name=f"{model.name} (mtp)",
        num_layers=1,
        mtp_num_layers=0,
        first_dense_layers=0,
        moe_layer_freq=1,
        mixers=(mixer,),
        mlps=(last.mlp,),
        quantization=stored,
        draft_head="mtp",
        state_space=model.state_space if mixer in {*RECURRENCES, *SIDE_BY_SIDE} else None,
        sliding_window=model.sliding_window if mixer == "local" else None,
        attention_chunk_size=model.attention_chunk_size if mixer == "chunked" else None,
    )
