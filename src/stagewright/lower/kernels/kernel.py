"""A task of a block before it is a row of a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stagewright.graph.node import Node
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import Shape, TaskKind

TIED = "tied"  # not an axis: the pipeline ranks with a tied table, whose name follows


class BlockSection(Enum):
    """Section of a block's tasks, by when in a step they are issued."""

    GATHER_ONCE = "gather_once"
    """Once per step, before the first forward: weights that stay gathered."""
    GATHER = "gather"
    """Before each forward: weights of one microbatch's pass."""
    FORWARD = "forward"
    GATHER_AGAIN = "gather_again"
    """Before each backward: weights that forward has freed."""
    RELOAD = "reload"
    """Before each backward: activations that forward has stored on the host."""
    BACKWARD = "backward"
    REDUCE_ONCE = "reduce_once"
    """After the last backward: gradients over data parallelism."""
    TIE = "tie"
    """Gradients of a table, between the pipeline ranks that hold copies."""
    NORM = "norm"
    """The norm of the gradients."""
    UPDATE = "update"

    @property
    def gathers(self) -> bool:
        """True for sections that gather or cast weights."""
        return self in (BlockSection.GATHER_ONCE, BlockSection.GATHER, BlockSection.GATHER_AGAIN)

    @property
    def ahead(self) -> bool:
        """True if the task is issued a block ahead of the kernels that wait for it."""
        return self.gathers or self is BlockSection.RELOAD


@dataclass(slots=True, eq=False)
class LoweredTask:
    """A kernel, a collective or one end of a message, before it is a row."""

    name: str
    op: str
    kind: TaskKind
    phase: str
    section: BlockSection
    flops: int = 0
    traffic: int = 0
    # COLLECTIVE: outermost first; SEND, RECV: the single axis; COMPUTE: axes of the communicator on
    # whose stream the kernel runs, empty on the stream of the model
    axes: tuple[str, ...] = ()
    shift: int = 0  # SEND, RECV: distance to the peer along the axis
    # RECV: the matching SEND of this rank, in the other direction
    twin: LoweredTask | None = field(default=None, repr=False)
    comm_bytes: int = 0
    dtype: str = ""
    shape: Shape | None = None  # COMPUTE
    # tasks, or values of other blocks
    deps: list[Dependency] = field(default_factory=list["Dependency"], repr=False)
    made: list[Node] = field(default_factory=list[Node], repr=False)  # values that others read
    reads: list[Node] = field(default_factory=list[Node], repr=False)  # values of other kernels


Dependency = LoweredTask | LiveValue
