"""Fit what an engine's host takes for a step, and for a request until the queue; print held-out
errors.

    python benchmarks/fit_requests.py steps|queue [vllm|trtllm|sglang ...]

Both are fitted to closed loops (`evidence.servers`), simulated request by request: the host of a
step, a constant and a time per request, to times per output token of dense models; it is added to
the GPU's step, or hidden behind it where the server schedules ahead. The host of a request, a
constant and a time per 1,024 tokens of its prompt, to times to the first token. Of the
configurations, 70% fit and 30% are held out, by a hash. The sum of the logarithms of the errors is
least on a grid, so that single runs that are far off do not count.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from fit_kernels import held_out
from stagewright.errors import UserError
from stagewright.evidence import servers
from stagewright.evidence.servers import ClosedLoopRow
from stagewright.model.catalog import resolve
from stagewright.run.sections.execution import ServingEngine
from stagewright.serving import deployment
from stagewright.serving.host import HOSTS

STEP_GRID = (range(0, 2001, 400), range(0, 61, 10))
"""Microseconds of a step, and of a request in it."""
QUEUE_GRID = (range(0, 31, 5), range(0, 13, 3))
"""Milliseconds of a request until it is in the queue, and of 1,024 tokens of its prompt."""

MOST_USERS = 128
"""Users of closed loops to whose first tokens hosts are fitted."""


def key(row: ClosedLoopRow) -> tuple[object, ...]:
    """The configuration of a row."""
    return (
        row.engine,
        row.hardware,
        row.isl,
        row.osl,
        row.checkpoint,
        *sorted(row.settings.items()),
    )


def steps(engine: ServingEngine) -> None:
    """The host of a step, of dense models."""
    loops = closed_loops(engine, {"tpot_ms"})
    loops = [row for row in loops if not resolve(str(row.settings["model"])).num_experts]
    names = {"per_step": 1e-6, "per_request_step": 1e-6}
    fit(f"{engine}, us of a step, and of a request in it", engine, loops, STEP_GRID, names)


def queue(engine: ServingEngine) -> None:
    """The host of a request until the queue."""
    # Servers that stream to more users wait for their own process that sends tokens.
    loops = closed_loops(engine, {"ttft_ms", "ttft_p50_ms"})
    loops = [row for row in loops if row.users <= MOST_USERS]
    names = {"per_request": 1e-3, "per_prompt_token": 1e-3 / 1024}
    fit(f"{engine}, ms of a request, and of 1,024 tokens", engine, loops, QUEUE_GRID, names)


def closed_loops(engine: ServingEngine, quantities: set[str]) -> list[ClosedLoopRow]:
    """Rows of an engine that can be simulated and were not overloaded."""
    rows = (row for row in servers.closed_loops() if row.quantity in quantities)
    return [row for row in rows if row.engine == engine and not row.reason and _fits(row)]


def _fits(row: ClosedLoopRow) -> bool:
    try:
        row.simulate()
    except UserError:
        return False
    return True


def predicted(loops: Sequence[ClosedLoopRow]) -> np.ndarray:
    """Figures of rows with the host that is set."""
    outcomes = {row.experiment: row for row in loops}
    figures = {experiment: row.simulate() for experiment, row in outcomes.items()}
    return np.array([row.predict(figures[row.experiment]) for row in loops])


def fit(
    label: str,
    engine: ServingEngine,
    loops: Sequence[ClosedLoopRow],
    grid: tuple[range, range],
    units: Mapping[str, float],
) -> None:
    """Print the constants of a grid with the least errors of the rows to fit, and their errors."""
    measured = np.array([row.measured for row in loops])
    errors: dict[tuple[int, ...], np.ndarray] = {}
    for constants in itertools.product(*grid):
        fields = dict(zip(units, np.multiply(constants, [*units.values()]).tolist(), strict=True))
        deployment.HOSTS = {**HOSTS, engine: replace(HOSTS[engine], **fields)}
        errors[constants] = predicted(loops) / measured - 1
    test = np.array([held_out(*key(row)) for row in loops])
    best = min(errors, key=lambda c: float(np.abs(np.log1p(errors[c][~test])).sum()))
    print(f"{label}: {best}")
    for rows, some in (("fitted to", ~test), ("held out", test)):
        for name, constants in (("alone", (0, 0)), ("with the host", best)):
            error = errors[constants][some]
            size = np.abs(error)
            print(f"#   {rows}, {name}: {len(size)} rows, mean {size.mean():.1%}, median "
                  f"{np.median(size):.1%}, bias {np.median(error):+.1%}")  # fmt: skip


if __name__ == "__main__":
    for name in cast("list[ServingEngine]", sys.argv[2:]) or HOSTS:
        {"steps": steps, "queue": queue}[sys.argv[1]](name)
