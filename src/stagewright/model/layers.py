"""What a layer is made of: kinds of mixers and MLPs, reach of attention, modules, own sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args

from stagewright.algebra.notation import Tensor
from stagewright.model.fields import FRACTION, Count

Attention = Literal[
    "global",
    "local",
    "chunked",
    "nope",
    "indexed",
    "index_shared",
    "compressed",
    "compressed_indexed",
]
Recurrence = Literal["mamba", "mamba2", "lightning", "gated_delta", "kimi_delta"]
SideBySide = Literal["global+mamba2"]
FeedForward = Literal["dense", "experts", "dense+experts", "none"]
DraftHead = Literal["none", "mtp", "eagle", "eagle3", "eagle3_own"]
"""Heads that draft tokens of another model (`blocks.families.drafts`)."""
ROUTED = frozenset({"experts", "dense+experts"})
"""The kinds of MLPs with experts; one has a dense MLP beside them."""
ATTENTIONS = frozenset(get_args(Attention))
INDEXED: frozenset[Attention] = frozenset({"indexed", "index_shared"})
"""Attention to the keys that an indexer chooses: the layer's own, or that of a layer before it."""
COMPRESSED: frozenset[Attention] = frozenset({"compressed", "compressed_indexed"})
"""Attention to the positions of a window, and to compressed keys of all positions before a query:
to all of these, or to those that an indexer chooses."""
RECURRENCES: tuple[Recurrence, ...] = get_args(Recurrence)
SIDE_BY_SIDE: Mapping[SideBySide, tuple[Attention, Recurrence]] = {
    "global+mamba2": ("global", "mamba2")
}
"""Mixers that are two: both read the layer's input, and their outputs are summed."""


class Layer(NamedTuple):
    """What a layer is made of: how positions mix, and the MLP that works on each position.

    Mixer and MLP are kinds that Stagewright has, or names of the model's `modules`.
    """

    mixer: str = "global"
    mlp: str = "dense"
    ahead: int = 0
    """In multi-token prediction: how many tokens after the next one the layer predicts."""
    block: int = 0
    """The shared block before the mixer, counted from 1; 0: there is no shared block."""
    sizes: int = 0
    """The layer's own sizes, counted from 1 in the model's `own_sizes`; 0: those of the model."""
    module: str = ""
    """The module that is all of the block, in a model that is a chain of modules."""


class ChainLink(NamedTuple):
    """A module in a model that is a chain of modules, and how many layers are made of it.

    >>> ChainLink.read("32 layer"), str(ChainLink("head"))
    (ChainLink(module='layer', layers=32), 'head')
    """

    module: str
    layers: int = 0
    """0: the module stands there once, and is no layer."""

    @classmethod
    def read(cls, text: str) -> ChainLink:
        """`32 layer` or `head`; a ValueError for anything else."""
        *count, name = text.split()
        if len(count) > 1 or not name.isidentifier() or (count and not count[0].isdecimal()):
            raise ValueError(text)
        return cls(name, int(count[0]) if count else 0)

    def __str__(self) -> str:
        return f"{self.layers} {self.module}" if self.layers else self.module


def module_of(chain: tuple[str, ...], index: int) -> str:
    """The module that a layer of a chain of modules is; nothing where there is no chain.

    >>> module_of(("embed", "3 dense", "58 moe", "head"), 3)
    'moe'
    """
    for link in map(ChainLink.read, chain):
        if index < link.layers:
            return link.module
        index -= link.layers
    return ""


def shortened(chain: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """The chain with so many layers: the first ones, and more of the last kind where it has fewer.

    >>> shortened(("embed", "3 dense", "58 moe", "head"), 5)
    ('embed', '3 dense', '2 moe', 'head')
    """
    links = [ChainLink.read(text) for text in chain]
    last = max((i for i, link in enumerate(links) if link.layers), default=-1)
    made: list[str] = []
    for i, link in enumerate(links):
        count = layers if i == last else min(link.layers, layers)
        layers -= count if link.layers else 0
        if count or not link.layers:
            made.append(str(link._replace(layers=count) if link.layers else link))
    return tuple(made)


class Reach(NamedTuple):
    """Which of the positions before it a query sees: all, those of a window, or of its chunk."""

    window: int = 0
    """Positions of the sliding window, the query's own included; 0: there is no window."""
    chunk: int = 0
    """Positions of a chunk, outside which a query sees nothing; 0: there are no chunks."""
    top: int = 0
    """Positions that an indexer chooses for each query, of all before it; 0: there is none."""
    block: int = 1
    """These are chosen in blocks of so many, the query's own among them."""
    compress: int = 1
    """So many positions have one key, which a query behind the last of them sees."""

    @property
    def kind(self) -> str:
        """Suffix of this reach's cache and size names: `_local`, `_chunked`, `_top` or none; that
        of compressed keys ends with how many positions have one."""
        kind = "_local" if self.window else "_chunked" if self.chunk else "_top" if self.top else ""
        return f"{kind or '_by'}{self.compress}" if self.compress > 1 else kind


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A part of a layer that a user has written, as a `.stg` file or as a Python function.

    `build(builder, inputs by name)` makes the nodes of the module, whose parameters and values are
    called `MODULE.name`. The first input is the hidden state; all others come from outside.
    """

    name: str
    build: Callable[[Any, Mapping[str, Any]], Any]
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = (("x", ("B", "S", "M"), ""),)
    """Name, sizes of the dims and data type ("": that of the run)."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Numbers of the sizes that the module declares itself."""
    table: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Layouts of the module's values and parameters, by full name."""
    output: str = "y"
    hands: tuple[str, ...] = ()
    """Further values that it makes for modules behind it in a chain, whose inputs have the names.
    """
    shared: tuple[str, ...] = ()
    """Parameters that other modules of a chain have, too: one tensor, by its name."""
    text: str = ""
    """The text of the `.stg` file that defines the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSizes:
    """Sizes in which some layers differ from the model's others; None: as the model has it.

    >>> OwnSizes(num_query_groups=4, kv_channels=512).given
    {'num_query_groups': 4, 'kv_channels': 512}
    """

    num_attention_heads: Annotated[int | None, Count(1, 2**16)] = None
    num_query_groups: Annotated[int | None, Count(1, 2**16)] = None
    kv_channels: Annotated[int | None, Count(1, 2**16)] = None
    ffn_hidden_size: Annotated[int | None, Count(1, 2**26)] = None
    rotary_fraction: Annotated[float | None, FRACTION] = None
    keys_are_values: bool | None = None
    attention_sinks: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are replaced."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
