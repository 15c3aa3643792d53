"""PyTorch's ring attention: memory of its backward while keys and gradients circulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from stagewright.algebra.index import parse
from stagewright.graph.node import BYTES, Node
from stagewright.graph.table import COLLECTIVE_OPS
from stagewright.lower.assembly.habit import Habit
from stagewright.lower.kernels.kernel import Kernel
from stagewright.run.settings import Run
from stagewright.schedule.actions import Order


@dataclass(frozen=True, slots=True)
class RingAttention(Habit):
    """The tensors of `_templated_ring_attention_backward`, with balanced causal halves."""

    ranks: int
    gathered: bool
    """True if keys are gathered, rather than sent from rank to rank."""

    @classmethod
    def of(cls, run: Run, order: Order) -> Self | None:
        """By `cp_grad_comm_type`."""
        if run.cp == 1 or run.cp_grad_comm_type != "ring" or run.cp_comm_type == "a2a":
            return None
        return cls(run.cp, run.cp_comm_type == "all_gather")

    def scratch(self, t: Kernel, size: Mapping[Node, int]) -> int:
        """Bytes of the last rank in its second step, without operands and results of the kernel.

        Sums are in fp32. With the bytes q of a rank's queries and k of its keys, and f fp32 values
        for one of the computation: gradients of the queries (f q) and of this step (q, and k for
        half of the keys and half of the values), keys and values to send (2 k) and those that came,
        and four tensors with gradients of keys and values: their sum, its two parts, joined, and
        what is exchanged (2 f k each). Or earlier, when gradients of two steps are live at once.
        """
        made = {n.get("wrt"): n for n in t.made if n.op == "attention_bwd"}
        if "q" not in made or "k" not in made:
            return 0
        q, keys = size[made["q"]], made["k"]
        whole = size[keys]
        k = whole // self.ranks if self.gathered else whole
        f = int(BYTES["fp32"]) // int(BYTES[keys.dtype])
        came = 2 * self.ranks * k if self.gathered else 2 * k * min(2, self.ranks - 1)
        copied = 0 if _contiguous(made["q"]) else 2 * k
        late = f * q + q + k + 8 * f * k
        early = f * q + 2 * q + 3 * k + 6 * f * k
        total = max(late, early) + came + 2 * k + copied
        counted = q + 2 * whole + (2 * self.ranks * k if self.gathered else 0)
        return max(0, total - counted)


def _contiguous(attention: Node) -> bool:
    """True if keys are contiguous for the ring: copied heads, not a view."""
    spec = parse(str(attention["spec"]))
    operands = zip(attention.srcs, spec.ins, strict=True)
    keys = next(s for s, dims in operands if ("k",) in dims)
    while keys.op in COLLECTIVE_OPS:
        (keys,) = keys.srcs
    return keys.op == "repeat"
