"""Plan of a parallelization: the use of each axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagewright.algebra.layout import Layout
from stagewright.algebra.notation import Tensor
from stagewright.graph.parameter import Parameter

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
"""Axes that split each dim of a value, outermost first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Axes of a mesh by their use, and the choices between strategies.

    A plan has no sizes: runs with equal choices and the same axes of more than one rank have equal
    plans, and so equal graphs.
    """

    groups: tuple[tuple[str, Axes], ...] = ()
    """Axes of each degree, as in `Mesh.groups`."""
    data: Axes = ()
    """Split the batch."""
    context: Axes = ()
    """Split the sequence."""
    stripes: Axes = ()
    """Inference: split the tokens of a request in the cache."""
    tensor: Axes = ()
    """Split heads, the width of feed-forwards and the vocabulary."""
    vocabulary: Axes = ()
    """Split the vocabulary if pipeline ranks share it; else those of `tensor` do."""
    key_value: Axes = ()
    """Axes of `tensor`, and of `context` in Ulysses, that split key-value heads."""
    inner: frozenset[str] = frozenset()
    """Axes that split the query heads of one key-value head."""
    state_groups: Axes = ()
    """Axes of `tensor` and `context` that split groups of the heads of state-space layers;
    other axes of the two split the heads of a group."""
    expert: Axes = ()
    """Split the experts of a layer; elsewhere these axes split tokens."""
    expert_tensor: Axes = ()
    """Split each expert."""
    dispatcher: str = "alltoall"
    """Megatron-LM's `moe_token_dispatcher_type`."""
    counts_to_owners: bool = False
    """Counts of copies go to the ranks that have the experts, not to all."""
    combined: Axes = ()
    """Inference: axes of `expert_tensor` whose ranks all have the tokens of their experts: they
    combine partial sums of copies to partial sums of tokens, which are reduced."""
    zero_axes: Axes = ()
    """Axes over which ZeRO splits optimizer states, and by its stage gradients and parameters."""
    zero: int = 0
    sequence_parallel: bool = False
    cp_comm_type: str = "p2p"
    reduce_each_microbatch: bool = False
    sum_as_read: bool = False
    """Gradients stay partial sums over `tensor` until the optimizer reads them."""
    shard_rows: bool = False
    """ZeRO splits the rows of a parameter, not the dim that suits it best."""
    shard_few_experts: bool = False
    """With `shard_rows`, ranks that outnumber the experts split the rows of each."""
    embedding_all_reduce: bool = False
    """Word embeddings are all-reduced before positions are added, then scattered (Megatron-LM)."""
    gather_adapters: bool = True
    """Results of row-parallel adapters are gathered before they are added, not exchanged."""
    table: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], hash=False)
    """Placements by name that the user sets; they have precedence over all others."""

    @property
    def sequence(self) -> Axes:
        """Axes that split the sequence in the residual stream."""
        return (*self.context, *(self.tensor if self.sequence_parallel else ()))

    @property
    def tokens(self) -> Axes:
        """Axes whose ranks have different tokens in the residual stream."""
        return (*self.data, *self.sequence)

    @property
    def model_axes(self) -> Axes:
        """Axes over which some parameter (or its optimizer state) is split."""
        split_by = self.vocabulary + self.tensor + self.expert
        split_by += self.zero_axes if self.zero else ()
        by_table = [a for t in self.table.values() for axes in self.layout(t).dims for a in axes]
        everywhere = {*self.data, *self.context}
        return tuple(dict.fromkeys((*split_by, *(a for a in by_table if a not in everywhere))))

    def axes_of(self, degree: str) -> Axes:
        """Axes of a degree of the notation, or of a part of one; none of a degree of 1."""
        match degree:
            case "tp":
                return self.tensor
            case "tp.kv":
                return tuple(a for a in self.tensor if a in self.key_value)
            case "tp.groups":
                return self.of_heads(self.tensor)[0]
            case "tp.heads":
                return self.of_heads(self.tensor)[1]
            case "tp.caches":
                return tuple(a for a in self.tensor if a not in self.stripes)
            case "ep":
                return self.expert
            case "etp":
                return self.expert_tensor
            case _:
                return dict(self.groups).get(degree, ())

    def of_heads(self, axes: Axes) -> tuple[Axes, Axes]:
        """Axes that split groups of the heads of a state-space layer; axes within a group."""
        groups = tuple(a for a in axes if a in self.state_groups)
        return groups, tuple(a for a in axes if a not in groups)

    def layout(self, placement: Tensor) -> Layout:
        """Layout of a placement in the paper's notation, on this mesh."""

        def axes(degrees: tuple[str, ...]) -> Axes:
            return tuple(a for degree in degrees for a in self.axes_of(degree))

        dims = [axes(by) for by in placement.axes]
        if self.vocabulary:
            rows = zip(placement.dims, placement.axes, dims, strict=True)
            dims = [
                self.vocabulary if (d, by) == ("V", ("tp",)) else declared
                for d, by, declared in rows
            ]
        return Layout(tuple(dims), frozenset(axes(placement.partial)))

    def parameter_dims(self, parameter: Parameter, ndim: int) -> Dims:
        """Layout in which a parameter of `ndim` dims is read: by the table, or as declared."""
        row = self.table.get(parameter.name)
        return self.layout(row if row and len(row.dims) == ndim else parameter.placement).dims
