"""Schedules in which all ranks share the embedding and the output layer: vocabulary parallelism.

The vocabulary is split over the pipeline's ranks (arXiv 2411.05288). The embedding is stage 0, the
layers are stages 1 to pp, the output layer is stage pp + 1: all ranks run the first and the last.
"""

from __future__ import annotations

from stagewright.schedule.actions import Action, Order


def shared_ends(pp: int) -> frozenset[int]:
    """The stages that all ranks share."""
    return frozenset({0, pp + 1})


def interlaced(pp: int, microbatches: int) -> Order:
    """All ranks stop for the output layer of each microbatch, and go on together.

    The interlaced pipeline of nnScaler (OSDI 2024), as `--use-interlaced-schedule` of
    sail-sg/VocabularyParallelism has it (arXiv 2411.05288, section 6.1): between two stops every
    rank does one forward and one backward of its layers, and neighbours by turns begin with either.
    Then no rank waits for another where a backward takes as long as two forwards, and a microbatch
    is alive for half as many stops more than in 1F1B: rank 0 keeps 1.5 pp microbatches.

    >>> interlaced(2, 1)[0]
    (0F0, 1F0, 3F0, 3B0, 1B0, 0B0)
    """
    # A rank that begins with its forward hands it on to a neighbour that has not begun its own.
    begins = [(pp - 1 - rank) % 2 == 1 for rank in range(pp)]
    forward = [0] * pp  # stops before the forward of microbatch 0
    for rank in range(1, pp):
        at_once = begins[rank - 1] and not begins[rank]
        forward[rank] = forward[rank - 1] + (0 if at_once else 1)
    backward = [forward[-1] + pp - rank for rank in range(pp)]
    return tuple(
        tuple(
            action
            for stop in range(microbatches + backward[0] + 1)
            for action in (
                *_ends(pp, microbatches, stop, forward[-1] + 1, backward[0] + 1),
                *_layers(rank + 1, microbatches, stop, forward[rank], backward[rank], begins[rank]),
            )
        )
        for rank in range(pp)
    )


def _ends(pp: int, microbatches: int, stop: int, output: int, last: int) -> list[Action]:
    """What all ranks do at a stop: the output layer, and the embedding in both directions."""
    wanted = [(pp + 1, "F", stop - output), (pp + 1, "B", stop - output)]
    wanted += [(0, "B", stop - last), (0, "F", stop)]
    return [Action(*action) for action in wanted if 0 <= action[2] < microbatches]


def _layers(
    stage: int, microbatches: int, stop: int, forward: int, backward: int, begins: bool
) -> list[Action]:
    """What a rank does with its layers between two stops, the forward first or last."""
    wanted = [Action(stage, "F", stop - forward), Action(stage, "B", stop - backward)]
    ordered = wanted if begins else wanted[::-1]
    return [action for action in ordered if 0 <= action.microbatch < microbatches]
