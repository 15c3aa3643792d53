"""A checked model: `Architecture` that satisfies the rules of `checks`, and changes of it.

A `ModelConfig` says nothing of parallelism, number formats or batch; it counts no parameters
either, the graph does. `presets` has published models, `catalog.resolve` reads others.

>>> from stagewright.model.presets import PRESETS
>>> PRESETS["llama3.1-70b"].num_query_groups
8
>>> [PRESETS["gemma2-9b"].layer(i).mixer for i in range(3)]
['local', 'global', 'local']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from stagewright.model.architecture import Architecture
from stagewright.model.checks import check
from stagewright.model.fields import Excludes
from stagewright.model.layers import Module, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Architecture):
    """A transformer on one device. Sizes count elements; the defaults are Llama's choices.

    >>> from stagewright.model.presets import PRESETS
    >>> tiny = PRESETS["llama2-7b"].with_overrides(num_layers=2)
    >>> tiny.num_layers, tiny.hidden_size
    (2, 4096)
    """

    tower: Annotated[ModelConfig | None, Excludes("shared blocks")] = None
    """A vision model whose output stands before the text (LLaVA, arXiv 2310.03744)."""

    def __post_init__(self) -> None:
        """Refuse what no model can be."""
        check(self)

    def with_module(
        self, function: Callable[[Any, Any], Any], *, mixers: bool = False, mlps: bool = False
    ) -> ModelConfig:
        """The same model with a Python function for each layer's mixer, or for its MLP, or both.

        `function(builder, h)` maps the hidden state [B, S, M] to what is added to it; `builder` is
        a `blocks.builder.Builder`.
        """
        name = function.__name__
        module = Module(name, lambda builder, values: function(builder, *values.values()))
        return replace(
            self,
            modules=(*self.modules, module),
            mixers=(name,) if mixers else self.mixers,
            mlps=(name,) if mlps else self.mlps,
        )

    def with_own_sizes(self, number: int) -> ModelConfig:
        """The model with entry `number` of `own_sizes`, from 1, in all layers; 0: itself."""
        if not number:
            return self
        given = self.own_sizes[number - 1].given
        return replace(self, **given, own_sizes=(), layers_with_own_sizes=(0,))

    def with_overrides(
        self,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        mtp_num_layers: int | None = None,
    ) -> ModelConfig:
        """The same model with fewer or more layers, another vocabulary, more tokens predicted."""
        given = {"num_layers": num_layers, "vocab_size": vocab_size}
        given["mtp_num_layers"] = mtp_num_layers
        others: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
        if self.chain and num_layers is not None:
            others["chain"] = shortened(self.chain, num_layers)
        return replace(self, **others) if others else self
