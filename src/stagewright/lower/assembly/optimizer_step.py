"""The rows after all actions: gradients of tied tables, the global norm, then the updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stagewright.graph.node import BYTES
from stagewright.graph.roles import CLIP
from stagewright.lower.assembly.buckets import merge_messages, one_by_one
from stagewright.lower.assembly.segments import STEP, Segment, SegmentBuilder
from stagewright.lower.assembly.stages import Stage
from stagewright.lower.kernels.kernel import Kernel, TaskPart
from stagewright.lower.kernels.live_values import LiveValue
from stagewright.program.columns import TaskKind


class ClipNorm(NamedTuple):
    """How ranks exchange what gradients are clipped by: the norm of the gradients of all ranks."""

    axes: tuple[str, ...] = ()
    """The norm is a sum over the ranks of these axes."""
    gradient_axes: Sequence[tuple[str, ...]] = ()
    """Groups of axes over which ranks exchange the norm of each gradient, one after the other."""
    dtype: str = "fp32"

    def exchanges(self, gradients: int) -> list[tuple[tuple[str, ...], int]]:
        """Axes and bytes of each all-reduce, for the norms of so many gradients.

        Ranks without gradients, whose stages are frozen, take part in that of the total only.
        """
        size = int(BYTES[self.dtype])
        groups = [tuple(sorted(axes)) for axes in self.gradient_axes if axes]
        total = tuple(a for a in self.axes if not any(a in axes for axes in groups))
        each = [(axes, size * gradients) for axes in groups if gradients]
        return each + ([(total, size)] if total else [])


def optimizer_step(stages: Sequence[Stage], clip: ClipNorm | None) -> Segment:
    """The rows of the stages of one rank; `clip` is None where gradients are not clipped.

    A rank on which nothing trains takes part in the exchange of norms, as all others do.
    """
    segment = SegmentBuilder(stages[0].tables)
    row_of: dict[tuple[int, int, Kernel], int] = {}
    norms: list[int] = []
    clip_row = -1
    for part in (TaskPart.TIE, TaskPart.NORM, TaskPart.UPDATE):
        if part is TaskPart.UPDATE and clip is not None:
            blocks = Counter(p.block for s in stages for p in s.blocks)
            gradients = sum(count * block.norms for block, count in blocks.items())
            clip_row = _clip(segment, norms, clip.exchanges(gradients), clip.dtype)
        work = [
            (c, s, i, s.blocks[i].block.by_part.get(part, ()))
            for c, s in enumerate(stages)
            for i in range(len(s.blocks))
        ]
        items = [(n, t) for n, (*_, tasks) in enumerate(work) for t in tasks]
        if part is TaskPart.TIE:  # ranks that hold several tables reduce them in one order
            items.sort(key=lambda item: item[1].axes)
        updates = part is TaskPart.UPDATE
        rows = stages[0].habits.arrange_updates(items) if updates else None
        if rows is None:
            rows = one_by_one(items)
        for merged in rows:
            _, s, i, _ = work[merged[0][0]]
            block = s.blocks[i]
            label, layer = ("", -1) if len(merged) > 1 else (block.label, block.layer)
            row = segment.add(merge_messages(merged), label, layer, s.stage)
            for n, t in merged:
                c, s, i, tasks = work[n]
                row_of[c, i, t] = row
                s.values.touch(i, t, (STEP, -1, row))
                for d in t.deps:
                    if isinstance(d, LiveValue):
                        if d.name == CLIP and clip_row >= 0:
                            segment.deps.append((row, STEP, -1, clip_row))
                    elif (c, i, d) in row_of:
                        segment.deps.append((row, STEP, -1, row_of[c, i, d]))
                    else:
                        segment.deps.append(s.once_per_step(row, i, d))
                if part is TaskPart.NORM and t is tasks[-1]:
                    norms.append(row)
    return segment.finish((STEP, -1))


def _clip(
    segment: SegmentBuilder,
    norms: list[int],
    exchanges: Sequence[tuple[tuple[str, ...], int]],
    dtype: str,
) -> int:
    """Clipping by the global norm: add up, all-reduce one number or many, scale; the last row."""
    size = len(norms)
    add = Kernel("grad_norm", "add", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
                 flops=size, traffic=4 * (size + 1), dtype="fp32")  # fmt: skip
    row = segment.add(add, "", -1, -1)
    segment.deps += [(row, STEP, -1, n) for n in norms]
    for axes, width in exchanges:
        t = Kernel("grad_norm.all_reduce", "all_reduce", TaskKind.COLLECTIVE, "optimizer",
                   TaskPart.NORM, axes=axes, comm_bytes=width, dtype=dtype)  # fmt: skip
        reduced = segment.add(t, "", -1, -1)
        segment.deps.append((reduced, STEP, -1, row))
        row = reduced
    scale = Kernel("clip_scale", "divide", TaskKind.COMPUTE, "optimizer", TaskPart.NORM,
                   flops=3, traffic=8, dtype="fp32")  # fmt: skip
    last = segment.add(scale, "", -1, -1)
    segment.deps.append((last, STEP, -1, row))
    return last
