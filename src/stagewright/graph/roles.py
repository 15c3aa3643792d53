"""Roles of nodes in the model, besides what they compute, and what they are bound to.

Ops compute the same whatever a node stands for. Placement reads roles to say where a value lives,
the lowering to tell parameters, gradients, caches and optimizer states apart.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from stagewright.graph.parameter import Parameter


class Role(Enum):
    """The part that a value plays in a step; the value of a member begins names of collectives.

    Most roles mark the places where a strategy may move a parameter, its gradient or its states.
    """

    # Parameters, on their way from where they are stored to the computation.
    PARAMETER = "param"
    """A parameter as it is stored."""
    SENT = "sent"
    """A parameter in the precision of the computation, in which it is gathered."""
    USED = "used"
    """A parameter as the computation sees it: gathered over the ranks that store shards."""
    DEQUANTIZED = "dequantized"
    """A frozen parameter that is stored in few bits, in the precision of the computation: made
    where it is read, in forward and again in backward."""
    LOW_PRECISION = "low"
    """A used parameter, cast once more for products in a lower precision."""

    # Gradients of parameters, on their way from one microbatch to the optimizer.
    WHOLE_GRADIENT = "whole"
    """The gradient of a table of which every rank computes all rows."""
    OWN_ROWS = "own"
    """The rows of such a gradient that belong to the rank's shard of the table."""
    SUM_OVER_MODEL = "made"
    """A gradient complete over the ranks that share one model, partial over data parallelism."""
    MICROBATCH_GRADIENT = "micro"
    """One microbatch's gradient, reduced here where gradients are reduced each microbatch."""
    ACCUMULATED = "grad"
    """The sum of gradients over microbatches."""
    STEP_GRADIENT = "synced"
    """The step's gradient, reduced once over data parallelism: to shards with ZeRO."""
    REDUCED = "reduced"
    """The step's gradient, complete over every axis before the optimizer reads it."""
    READ = "read"
    """The same, reduced anew by each read of the optimizer."""
    TABLE_GRADIENT = "tied_grad"
    """The gradient of a table with copies, handed to the block that owns the rank's tensor."""
    TIED = "tied"
    """The sum of a table's gradients over the pipeline ranks that hold copies."""

    # The optimizer.
    STATE = "state"
    """A state of the optimizer: a moment, or the master copy of a parameter."""
    MASTER = "self"
    """A parameter that is its own master copy, as the optimizer reads it."""
    UPDATED = "updated"
    """A parameter after its update, gathered here where every rank stores all of it."""
    SQUARED_NORM = "norm2"
    """One parameter's share of the squared norm of the gradients."""

    # Buffers: parameters that counts update, and no gradient.
    COUNT = "count"
    """Sums over a rank's tokens of a step."""
    COUNTED = "counted"
    """The same over all ranks."""

    # Activations.
    CORE = "core"
    """The result of attention's core, or of a recurrence: what a flash kernel writes."""
    KEYS = "keys"
    """Keys or values, where context parallelism gathers or exchanges them."""
    REMADE = "remade"
    """A value that a fused kernel makes again in backward instead of keeping it."""
    LOGITS = "logits"
    """Scores over the vocabulary: what a model returns before its loss."""
    CACHE = "cache"
    """State that a layer keeps of each request between steps of inference."""


STREAM, TABLE, MEMORY, CLIP = "x", "wte", "memory", "clip_scale"
"""Live values that every model may have: the residual stream, the table of embeddings (as gradients
that copies hand on), what an encoder has made, and the factor that clips gradients."""
GATHERED = "gathered"
"""Begins the names of outputs that hand a gathered table to the other copies of its stage."""
CHOSEN = "chosen"
"""The live value with the keys that the last indexer has chosen, which layers behind may use."""


SUMS = "head.sums"
"""The scope of what ranks that share the output layer add up between its two passes: frameworks run
these small kernels on the stream of the collectives that they stand between."""


class Asked(NamedTuple):
    """A collective that a user's module names: checked against the layouts, and placed there."""

    collective: str
    degrees: tuple[str, ...]
    where: str
    """Line and column, for errors."""


class Binding(NamedTuple):
    """Names in the model that a value is bound to; empty if to nothing."""

    param: Parameter | None = None
    """The parameter that the value is, or whose copy, gradient or state it is."""
    tied: str = ""
    """Table of which a parameter is one of several copies."""
    buffer: bool = False
    """True for a buffer, which no gradient reaches and all ranks hold whole."""
    live_in: str = ""
    """Value, or gradient, that other blocks pass to an input."""
    split_as: Parameter | None = None
    """Declaration of the last dims of a state per request, like a parameter's."""
    like: str = ""
    """Value whose row in the strategy's table an input shares."""
    asked: Asked | None = None

    @property
    def name(self) -> str:
        """The name of the parameter, or nothing."""
        return self.param.name if self.param else ""


UNBOUND = Binding()
