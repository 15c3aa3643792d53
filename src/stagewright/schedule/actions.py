r"""A pipeline schedule is, per pipeline rank, an ordered list of actions such as `2F0`.

Idle slots, sends and receives are not stored: all three follow from what an action needs.

>>> order = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1")
>>> print(text(order))
rank 0  0F0 0F1 .   .   0B0---- 0B1----
rank 1  .   1F0 1B0---- 1F1 1I1 1W1 .
>>> play(order, {"F": 1, "B": 3, "I": 2, "W": 1})[order[1][-1]]
(8, 9)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.files import read_text

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time slots of an action in pictures and bubble fractions: a backward costs two forwards."""

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")
_ALIVE = {"F": 1, "B": -1, "I": 0, "W": -1}  # change in the microbatches held by a stage
MOST_BYTES = 1 << 26  # of a CSV file
_LINKS = 6  # of a circle of waiting ranks, in an error


class Action(NamedTuple):
    """One unit of work: what is done (`kind`), for which virtual stage and microbatch.

    The kinds are `F` forward, `B` full backward, `I` the half of backward that makes the gradient
    of the stage's input, and `W` the half that makes the gradients of its weights.
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        """`2F0`: what `parse` reads."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` prints.

        >>> Action.parse("2F0").stage
        2
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise UserError(
                f"{text!r} is not a pipeline action; wanted stage, kind (F, B, I or W) and "
                "microbatch, such as 2F0; correct it"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))


class Overlap(NamedTuple):
    """A forward and a backward of two microbatches that run at once (DeepSeek-V3, section 3.2.1).

    Each computes while the other communicates: their kernels take turns on the rank.
    """

    forward: Action
    backward: Action

    def __repr__(self) -> str:
        """As in torch's files: `(0F3;3B1)OVERLAP_F_B`."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap

Order = tuple[tuple[Step, ...], ...]
"""What each pipeline rank does, in order. Which stages a rank holds follows from it."""


def parts(step: Step) -> tuple[Action, ...]:
    """The actions of a step."""
    return (step.forward, step.backward) if isinstance(step, Overlap) else (step,)


def flat(steps: Iterable[Step]) -> list[Action]:
    """The actions of all steps.

    >>> flat(from_csv("0F0,(0F1;0B0)OVERLAP_F_B")[0])
    [0F0, 0F1, 0B0]
    """
    return [action for step in steps for action in parts(step)]


# ---- who holds which stage -----------------------------------------------------------------------


class Place(NamedTuple):
    """A stage on a rank, and the ranks of the stages around it; None at the model's ends."""

    stage: int
    rank: int
    before: int | None
    after: int | None


def places(order: Order) -> list[Place]:
    """Where the stages are, by rank and stage.

    A stage may be on several ranks, each with microbatches of its own, as in DualPipe; all
    microbatches that it has on one rank come from one rank and go on to one.

    >>> [tuple(p)[:3] for p in places(from_csv("0F0,3F0,3B0,0B0\\n1F0,2F0,2B0,1B0"))]
    [(0, 0, None), (3, 0, 1), (1, 1, 0), (2, 1, 1)]
    """
    home = {(a.stage, a.microbatch): rank for rank, steps in enumerate(order) for a in flat(steps)}
    found: dict[tuple[int, int], tuple[Place, int]] = {}
    for (stage, microbatch), rank in home.items():
        around = home.get((stage - 1, microbatch)), home.get((stage + 1, microbatch))
        here, other = found.setdefault((rank, stage), (Place(stage, rank, *around), microbatch))
        if here != (stage, rank, *around):
            raise UserError(
                f"pipeline order: microbatches {other} and {microbatch} both pass through stage "
                f"{stage} on rank {rank}, but come from or go on to different ranks; wanted one "
                "way through the ranks for all microbatches of a stage on a rank"
            )
    return [found[key][0] for key in sorted(found)]


def mirrored(order: Order) -> bool:
    """Whether each stage is on two ranks, r and pp - 1 - r, as in DualPipe.

    Such pairs reduce gradients together, so they must do the same in the same order, each with its
    own microbatches; any other way to hold a stage twice is a UserError.
    """
    holders: dict[int, list[int]] = {}
    for place in places(order):
        holders.setdefault(place.stage, []).append(place.rank)
    if all(len(ranks) == 1 for ranks in holders.values()):
        return False
    last = len(order) - 1
    for stage, ranks in holders.items():
        if len(ranks) != 2 or sum(ranks) != last:
            raise UserError(
                f"pipeline order: stage {stage} is on rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))}; wanted every stage on one rank, or every stage on "
                f"two, r and {last} - r, as in DualPipe"
            )
    for rank in range(len(order) // 2):
        if _pattern(order[rank]) != _pattern(order[last - rank]):
            raise UserError(
                f"pipeline order: ranks {rank} and {last - rank} hold the same stages but do not "
                "do the same in the same order; make their rows equal but for the microbatches"
            )
    return True


def _pattern(steps: Iterable[Step]) -> list[list[tuple[int, str, int]]]:
    """Steps with the microbatches of each stage numbered as they are met."""
    met: dict[int, dict[int, int]] = {}

    def number(a: Action) -> int:
        own = met.setdefault(a.stage, {})
        return own.setdefault(a.microbatch, len(own))

    return [[(a.stage, a.kind, number(a)) for a in parts(step)] for step in steps]


# ---- dependencies, and time ----------------------------------------------------------------------


def needs(
    action: Action, stages: int, halves: Container[tuple[int, int]] | None = None
) -> list[Action]:
    """What must have ended, here or on another rank, before `action` can start.

    Where an order mixes full backwards with halves, the gradient that a backward waits for comes
    from either: pass `halved(order)` to get the one that is there. Without it, the other stage is
    taken to do as this one does.

    >>> needs(Action.parse("1F3"), stages=4), needs(Action.parse("1B3"), stages=4)
    ([0F3], [1F3, 2B3])
    >>> needs(Action.parse("1B3"), 4, halves={(2, 3)}), needs(Action.parse("1W3"), 4)
    ([1F3, 2I3], [1I3])
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    forward = Action(stage, "F", microbatch)
    if stage == stages - 1:
        return [forward]
    if halves is not None:
        kind = "I" if (stage + 1, microbatch) in halves else "B"
    return [forward, Action(stage + 1, kind, microbatch)]


def halved(order: Order) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs whose backward is done in halves."""
    return frozenset((a.stage, a.microbatch) for s in order for a in flat(s) if a.kind == "I")


Cost = Mapping[str, float] | Callable[[Action], float]
"""Time of an action: by kind, `{"F": 1, "B": 2}`, or by a function of the action.

A forward and a backward that overlap take as long as both, or what the mapping has for `"F&B"`.
"""


def play(order: Order, cost: Cost) -> dict[Action, tuple[float, float]]:
    """Start and end of every action if each rank works through its list as soon as it can.

    Communication takes no time here. Two that overlap start and end together. An order that cannot
    complete is a UserError that says who waits for whom. Linear in the number of actions.

    >>> play(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    {0F0: (0, 1), 1F0: (1, 2), 1B0: (2, 4), 0B0: (4, 6)}
    """

    def price(step: Step) -> float:
        if isinstance(step, Overlap) and not callable(cost) and "F&B" in cost:
            return cost["F&B"]
        return sum(cost(a) if callable(cost) else cost[a.kind] for a in parts(step))

    stages = _stages(order)
    halves = halved(order)
    times: dict[Action, tuple[float, float]] = {}
    reached = [0] * len(order)
    clock: list[float] = [0] * len(order)
    waiting: dict[Action, list[int]] = {}  # an action not done yet -> the ranks that wait for it
    runnable = list(reversed(range(len(order))))
    while runnable:
        rank = runnable.pop()
        steps, at, now = order[rank], reached[rank], clock[rank]
        while at < len(steps):
            step = steps[at]
            required = [need for a in parts(step) for need in needs(a, stages, halves)]
            missing = [need for need in required if need not in times]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            start = max([now, *[times[need][1] for need in required]])
            now = start + price(step)
            for action in parts(step):
                times[action] = (start, now)
                runnable += waiting.pop(action, ())
            at += 1
        reached[rank], clock[rank] = at, now
    if waiting:
        raise UserError(_deadlock(order, reached, waiting))
    return times


def _deadlock(order: Order, reached: list[int], waiting: dict[Action, list[int]]) -> str:
    """Who waits for whom, from one standing rank to the next until the circle closes."""
    needed_by = {rank: need for need, ranks in waiting.items() for rank in ranks}
    runs = {action: rank for rank, at in enumerate(reached) for action in flat(order[rank][at:])}
    head = {rank: order[rank][reached[rank]] for rank in needed_by}
    chain: list[int] = []
    rank = min(needed_by)
    while rank not in chain:
        chain.append(rank)
        need = needed_by[rank]
        if need not in runs:
            return (
                f"deadlock in the pipeline order: rank {rank} waits at {head[rank]} for {need}, "
                f"which no rank runs; add {need} to the rank that holds stage {need.stage}"
            )
        rank = runs[need]
    circle = chain[chain.index(rank) :]
    # Of the actions waited for, the one that no other must precede is what its rank put too late.
    late = min(
        (needed_by[rank] for rank in circle),
        key=lambda a: (a.kind != "F", a.microbatch, a.stage if a.kind == "F" else -a.stage),
    )
    start = circle.index(runs[late])
    circle = circle[start:] + circle[:start]
    rank = circle[0]
    story = f"rank {rank} waits at {head[rank]} for {needed_by[rank]}"
    for before, after in itertools.pairwise(circle[:_LINKS]):
        if needed_by[before] == head[after]:
            story += f", which rank {after} cannot start: it waits for {needed_by[after]}"
        else:
            story += f", which rank {after} has not reached: it waits at {head[after]} "
            story += f"for {needed_by[after]}"
    if len(circle) > _LINKS:
        story += f", and so on round {len(circle)} ranks"
    elif len(circle) > 1:
        story += f", which rank {rank} has not reached"
    else:
        story += ", which comes later on the same rank"
    advice = f"move {late} before {head[rank]} on rank {rank}"
    return f"deadlock in the pipeline order: {story}; {advice}"


def _stages(order: Order) -> int:
    return 1 + max((a.stage for steps in order for a in flat(steps)), default=-1)


def validate(order: Order, stages: int, microbatches: int) -> None:
    """Raise a UserError unless `order` does every stage's work once and can run to its end.

    For every stage and microbatch there must be, on one rank, one F, and either one B or one I and
    one W; no rank may wait for ever; and ranks that hold the same stage must be in step.
    """
    home: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, steps in enumerate(order):
        if not steps:
            raise UserError(
                f"pipeline order: rank {rank} has no actions, wanted at least one stage on every "
                "rank; remove the rank, or move a stage to it"
            )
        for action in flat(steps):
            pair = action.stage, action.microbatch
            if home.setdefault(pair, rank) != rank:
                raise UserError(
                    f"pipeline order: {action} is on rank {rank}, but {found[pair][0]} is on rank "
                    f"{home[pair]}; wanted one rank for a stage and microbatch; move it there"
                )
            found.setdefault(pair, []).append(action)
    sizes = f"{stages} stages and {microbatches} microbatches, both counted from 0"
    advice = "; correct the order, or change pp, vpp or the batch sizes"
    for stage, microbatch in itertools.product(range(stages), range(microbatches)):
        actions = found.pop((stage, microbatch), [])
        if sorted(a.kind for a in actions) not in (["B", "F"], ["F", "I", "W"]):
            raise UserError(
                f"pipeline order: stage {stage}, microbatch {microbatch} has "
                f"{', '.join(map(str, actions)) or 'no actions'}; wanted F and B, or F, I and W, "
                f"once for each of {sizes}{advice}"
            )
    if found:
        extra = next(iter(found.values()))[0]
        raise UserError(f"pipeline order: got {extra}, wanted only {sizes}{advice}")
    play(order, SLOTS)
    mirrored(order)


def in_flight(order: Order) -> list[dict[int, int]]:
    """Per rank and stage, the most microbatches whose activations are alive at once.

    They live from the start of F to the end of B (of W, where the backward is in halves). The
    maxima of two stages of a rank need not fall together.

    >>> in_flight(from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1"))
    [{0: 2}, {1: 1}]
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


def idle(order: Order, cost: Cost) -> list[float]:
    """Per rank, the time of the step in which it does nothing: its bubble.

    >>> idle(from_csv("0F0,0B0\\n1F0,1B0"), {"F": 1, "B": 2})
    [3, 3]
    """
    times = play(order, cost)
    end = max((end for _, end in times.values()), default=0)
    spans = [[times[parts(step)[0]] for step in steps] for steps in order]
    return [end - sum(stop - start for start, stop in some) for some in spans]


def bubble(order: Order) -> float:
    """The fraction of all ranks' time that is idle if a backward costs two forwards.

    >>> bubble(from_csv("0F0,0B0\\n1F0,1B0"))
    0.5
    """
    end = max((end for _, end in play(order, SLOTS).values()), default=0)
    return sum(idle(order, SLOTS)) / (end * len(order)) if end else 0.0


# ---- text forms ----------------------------------------------------------------------------------


def text(order: Order, columns: int | None = None) -> str:
    """A picture: ranks down, time slots across; F, I and W one slot, B two, idle slots as dots.

    Lines longer than `columns` are cut and end in `...`, so that a terminal does not wrap them.
    """
    times = play(order, SLOTS)
    end = max((int(end) for _, end in times.values()), default=0)
    width = max((len(str(a)) for a in times), default=0)
    lines: list[str] = []
    for rank, steps in enumerate(order):
        cells: list[str] = []
        now = 0
        for step in steps:
            start, stop = (int(t) for t in times[parts(step)[0]])
            cells += [".".ljust(width)] * (start - now)
            label = "+".join(map(str, parts(step)))
            cells.append(label.ljust((stop - start) * (width + 1) - 1, "-"))
            now = stop
        cells += [".".ljust(width)] * (end - now)
        line = f"rank {rank:<{len(str(len(order) - 1))}}  {' '.join(cells)}".rstrip()
        if columns is not None and len(line) > columns:
            line = line[: max(columns - 3, 0)] + "..."
        lines.append(line)
    return "\n".join(lines)


def to_csv(order: Order) -> str:
    """One row per rank, one step per cell, the form of torch's files; `from_csv` reads it."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in order)


def from_csv(source: str | Path, most: int = MOST_BYTES) -> Order:
    """Read an order from a file (a Path, or a str ending in `.csv`) or from the CSV text itself.

    Written to take torch's files too: empty cells (idle slots) and communication cells such as
    `0SEND_F1` or `0UNSHARD` are dropped since they follow from the rest. Call `validate` on the
    result.

    >>> from_csv("0F0,,0B0")
    ((0F0, 0B0),)
    """
    where = "schedule"
    if isinstance(source, Path) or source.endswith(".csv"):
        where = str(source)
        source = read_text(source, "a schedule as CSV, in UTF-8", most)
    rows = source.rstrip().splitlines()
    if not rows:
        raise UserError(f"{where}: is empty; wanted one row of actions such as 2F0 per rank")
    return tuple(
        tuple(
            step
            for column, cell in enumerate(row.split(","), start=1)
            for step in _read_cell(cell.strip(), f"{where}, row {number}, column {column}")
        )
        for number, row in enumerate(rows, start=1)
    )


def _read_cell(cell: str, where: str) -> list[Step]:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return []
    overlap = _OVERLAP.fullmatch(cell)
    try:
        if overlap is None:
            return [Action.parse(cell)]
        forward, backward = (Action.parse(part) for part in overlap.groups())
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if (forward.kind, backward.kind) != ("F", "B"):
        raise UserError(f"{where}: {cell}: wanted a forward (F) and then a backward (B)")
    return [Overlap(forward, backward)]
