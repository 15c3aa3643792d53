"""What tests ask of pipeline orders."""

from stagewright.schedule.actions import Order, flat

_ALIVE = {"F": 1, "B": -1, "I": 0, "W": -1}  # change in the microbatches held by a stage


def in_flight(order: Order) -> list[dict[int, int]]:
    """Per rank and stage, the most microbatches whose activations are alive at once.

    Activations live from the start of F to the end of B, or of W where the backward is in halves.
    The maxima of two stages of a rank need not fall together.
    """
    most: list[dict[int, int]] = []
    for steps in order:
        alive: dict[int, int] = {}
        peak: dict[int, int] = {}
        for stage, kind, _ in flat(steps):
            alive[stage] = alive.get(stage, 0) + _ALIVE[kind]
            peak[stage] = max(peak.get(stage, 0), alive[stage])
        most.append(peak)
    return most
