"""A row of a program to be: a kernel, a collective or one end of a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stagewright.graph.node import Node
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import Shape, TaskKind

TIED = "tied"  # not an axis: the pipeline ranks that hold a table, whose name follows


class TaskPart(Enum):
    """When a task of a block runs within a step."""

    GATHER_ONCE = "gather_once"
    """Once per step, before the first forward: weights that stay gathered."""
    GATHER = "gather"
    """Before each forward: weights of one microbatch's pass."""
    FORWARD = "forward"
    GATHER_AGAIN = "gather_again"
    """Before each backward: weights that forward has let go."""
    RELOAD = "reload"
    """Before each backward: activations that forward has put on the host."""
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
        """Whether weights are gathered here, and nothing is computed but their casts."""
        return self in (TaskPart.GATHER_ONCE, TaskPart.GATHER, TaskPart.GATHER_AGAIN)

    @property
    def ahead(self) -> bool:
        """Whether the task is issued a block ahead of the kernels that wait for it."""
        return self.gathers or self is TaskPart.RELOAD


@dataclass(slots=True, eq=False)
class Kernel:
    """A row to be: a kernel, a collective or one end of a message."""

    name: str
    op: str
    kind: TaskKind
    phase: str
    part: TaskPart
    flops: int = 0
    traffic: int = 0
    # COLLECTIVE: outermost first; SEND, RECV: the one axis; COMPUTE: those of the communicator on
    # whose stream the kernel runs, none for kernels on the stream of the model
    axes: tuple[str, ...] = ()
    shift: int = 0  # SEND, RECV: distance to the peer along the axis
    twin: Kernel | None = field(
        default=None, repr=False
    )  # RECV: the SEND that a rank the other way issues for it
    comm_bytes: int = 0
    dtype: str = ""
    shape: Shape | None = None  # COMPUTE
    # what it waits for: tasks, or what others hand on
    deps: list[Dependency] = field(default_factory=list["Dependency"], repr=False)
    made: list[Node] = field(default_factory=list[Node], repr=False)  # values that others see
    reads: list[Node] = field(default_factory=list[Node], repr=False)  # values of others


Dependency = Kernel | LiveValue
