"""Parts of a model: kinds of layers and their patterns, users' modules, and the nested sizes of
states, shared blocks and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

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
    """The kinds of a layer: its mixer of positions, and the MLP that works on each position.

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
    """The chain with this number of layers: the first, and more of the last kind if it has fewer.

    >>> shortened(("embed", "3 dense", "58 moe", "head"), 5)
    ('embed', '3 dense', '2 moe', 'head')
    """
    links = [ChainLink.read(text) for text in chain]
    last = max((i for i, link in enumerate(links) if link.layers), default=-1)
    kept: list[str] = []
    for i, link in enumerate(links):
        count = layers if i == last else min(link.layers, layers)
        layers -= count if link.layers else 0
        if count or not link.layers:
            kept.append(str(link._replace(layers=count) if link.layers else link))
    return tuple(kept)


class Reach(NamedTuple):
    """Positions before it that a query sees: all, those of a window, or of its chunk."""

    window: int = 0
    """Positions of the sliding window, the query's own included; 0: there is no window."""
    chunk: int = 0
    """Positions of a chunk, outside which a query sees nothing; 0: there are no chunks."""
    top: int = 0
    """Positions that an indexer chooses for each query, of all before it; 0: there is none."""
    block: int = 1
    """Positions of a block; whole blocks are chosen, the query's own among them."""
    compress: int = 1
    """Positions that have one key together, which a query after the last of them sees."""

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


# ---- nested sizes --------------------------------------------------------------------------------

InnerNorms = Literal["none", "plain", "weighted"]
Width = Annotated[int, Count(0, 2**24)]
HeadWidth = Annotated[int, Count(1, 2**16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Widths of one kind of state layer; a model has one kind, named in its `mixers`.

    The state of a head is `state` x `head_width` numbers. Keys and queries (of a state-space model,
    B and C) are shared by the heads of a group. Mamba-1's channels are heads of width 1.
    """

    heads: Annotated[int, Count(1)]
    """Value heads."""
    head_width: HeadWidth = 1
    """Width of a value head."""
    state: HeadWidth
    """Width of keys and queries: the state size N of a state-space model."""
    groups: Annotated[int, Count(1)] = 1
    """Key and query heads, each shared by heads / groups value heads."""
    conv: Annotated[int, Count(0, 64)] = 4
    """Taps of the causal convolution before the recurrence; 0: there is none."""
    conv_bias: bool = True
    dt_rank: Width = 0
    """Mamba-1: rank of the projection that makes time steps."""
    inner_norms: InnerNorms = "none"
    """Mamba-1: RMSNorms of the inputs of time steps, B and C (Jamba; plain: without weights)."""
    gated_norm: bool = True
    """Mamba-2: an RMSNorm, over the heads of a group, of the gated output."""
    gate_rank: Width = 0
    """Kimi's delta attention: rank of the projections that make decays and output gates."""
    chunk: Annotated[int, Count(1)] = 256
    """Tokens per chunk of the kernel (Mamba-1's kernel goes token by token)."""

    @property
    def inner(self) -> int:
        """Width of all value heads together."""
        return self.heads * self.head_width


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Transformer blocks whose weights several layers share (Zamba2, arXiv 2411.15242, section II).

    A block reads the residual stream and, beside it, the embedded tokens. Its output is multiplied
    by a matrix of the layer and added to the input of the layer's mixer. Layers may have narrow
    adapters of their own beside the shared weights (LoRA, arXiv 2106.09685).
    """

    layers: Annotated[
        tuple[int, ...], Count(0, 10_000, "the number of a block for each layer, or 0")
    ]
    """The block of each layer, counted from 1 and repeated over the layers; 0: none."""
    adapter_rank: Annotated[int, Count(0, 2**24)] = 0
    """Rank of the adapters beside gate and up of the MLP; 0: there are none."""
    attention_adapter: bool = False
    """Queries, keys and values have such adapters, too."""


@dataclass(frozen=True, slots=True)
class Vision:
    """Images as a sequence of square patches (ViT, arXiv 2010.11929)."""

    image_size: Annotated[int, Count(1)]
    patch_size: Annotated[int, Count(1)]
    channels: Annotated[int, Count(1)] = 3
    patch_bias: bool = True
    classes: Annotated[int, Count(0)] = 0
    """Classes of the classifier on the first position; 0: there is no classifier, as in a tower."""

    @property
    def patches(self) -> int:
        """Positions of an image, besides the one that stands before them for all of it."""
        return (self.image_size // self.patch_size) ** 2


# ---- patterns of layers --------------------------------------------------------------------------

_Kind = TypeVar("_Kind", str, int)

LETTERS = {
    "M": ("mamba2", "none"),
    "*": ("global", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
"""Letters of Nemotron-H's `hybrid_override_pattern`: a layer has a mixer or an MLP, not both."""


def from_letters(letters: str) -> dict[str, Any]:
    """The fields of a model with these layers, a letter each.

    >>> from_letters("M-*-")["mixers"]
    ('mamba2', 'none', 'global', 'none')
    """
    mixers, mlps = zip(*(LETTERS[x] for x in letters), strict=True)
    return {"mixers": mixers, "mlps": mlps}


def every(period: int, offset: int, kind: str) -> tuple[str, ...]:
    """One period of layers, all of one kind but for global attention at `offset`.

    >>> every(3, 1, "mamba")
    ('mamba', 'global', 'mamba')
    """
    return tuple("global" if i == offset else kind for i in range(period))


def shortest(kinds: Sequence[_Kind]) -> tuple[_Kind, ...]:
    """The shortest pattern that repeats into these layers.

    >>> shortest(["mamba", "global", "mamba"])
    ('mamba', 'global')
    """
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if kinds[p:] == kinds[: n - p])
    return tuple(kinds[:period])
