"""Fit what an engine's host takes for a request until its first token, and for a step; print
held-out errors.

    python benchmarks/fit_requests.py first|steps|queue [vllm|trtllm|sglang ...]

Rows of first tokens are those of at most four users that the package carries
(`data/measured/inference.csv`). A request takes a constant and a time per 1,024 tokens of its
prompt, besides the steps that `evidence.inference` predicts. The host of a step is a constant and a
time per request, fitted to times per output token of dense models in closed loops
(`evidence.servers`); it is added to the GPU's step, or hidden behind it where the server schedules
ahead. Of the configurations, 70% fit and 30% are held out, by a hash. The sum of the logarithms of
the errors is least on a grid, so that single runs that are far off do not count.

`queue`: what hosts take until a request is in the queue, of requests that are served one by one
(`serving.host`), fitted to the times to first tokens of closed loops (`evidence.servers`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from fit_kernels import held_out
from stagewright.errors import UserError
from stagewright.evidence import inference, servers
from stagewright.evidence.inference import HOST_MS, ServedRow
from stagewright.model.catalog import resolve
from stagewright.serving import deployment
from stagewright.serving import host as hosts

STEP_GRID = (range(0, 2001, 400), range(0, 61, 10))
"""Microseconds of a step, and of a request in it."""
GRID = (range(0, 201, 5), range(0, 41, 2))
"""Milliseconds of a request, and of 1,024 tokens of a prompt."""
QUEUE_GRID = (range(0, 31, 5), range(0, 13, 3))
"""As `GRID`, until a request is in the queue."""

MOST_USERS = 128
"""Users of closed loops to whose first tokens hosts are fitted."""

Found = Callable[[tuple[float, ...]], np.ndarray]
"""Errors of rows by constants."""


def key(row: ServedRow) -> tuple[object, ...]:
    """The configuration of a row."""
    return (
        row.engine,
        row.hardware,
        row.isl,
        row.osl,
        row.checkpoint,
        *sorted(row.settings.items()),
    )


def errors(table: np.ndarray, constants: tuple[float, ...]) -> np.ndarray:
    """Errors of rows of steps, thousands of tokens and measured time."""
    steps, prompt, measured = table
    return (steps + constants[0] + constants[1] * prompt) / measured - 1


def fit(table: np.ndarray, grid: tuple[range, range]) -> tuple[float, ...]:
    """The constants of a grid with the least errors."""
    return min(
        itertools.product(*grid), key=lambda c: float(np.abs(np.log1p(errors(table, c))).sum())
    )


def told(label: str, found: Found, test: np.ndarray, best: tuple[float, ...]) -> None:
    """Print the errors without and with the host; `found` gives those of all rows."""
    for rows, some in (("fitted to", ~test), ("held out", test)):
        for name, constants in (("alone", (0, 0)), ("with the host", best)):
            error = found(constants)[some]
            size = np.abs(error)
            print(f"#   {label}, {rows}, {name}: {len(size)} rows, mean {size.mean():.1%}, median "
                  f"{np.median(size):.1%}, bias {np.median(error):+.1%}")  # fmt: skip


def first_tokens() -> None:
    """The host of a request, by engine."""
    rows = [row for row in inference.rows() if row.quantity == "ttft_ms"]
    for engine in sorted({row.engine for row in rows}):
        mine = [row for row in rows if row.engine == engine]
        prompt = np.array([row.isl * (1 + row.shortest) / 2 / 1024 for row in mine])
        carried = HOST_MS[engine][0] + HOST_MS[engine][1] * prompt
        steps = np.array([inference.steady_state(row).ttft * 1e3 for row in mine]) - carried
        table = np.array([steps, prompt, [row.measured for row in mine]])
        test = np.array([held_out(*key(row)) for row in mine])
        best = fit(table[:, ~test], GRID)
        print(f"{engine}: {best} ms, carried {HOST_MS[engine]}")
        told("first tokens", partial(errors, table), test, best)


def steps() -> None:
    """The host of a step, by engine."""
    loops = [of for of in servers.closed_loops() if of.quantity == "tpot_ms" and not of.reason]
    loops = [of for of in loops if not resolve(str(of.served.settings["model"])).num_experts]
    for engine, (every, test) in _by_engine(loops, STEP_GRID, _of_steps).items():
        best = min(every, key=lambda c: float(np.abs(np.log1p(every[c][~test])).sum()))
        print(f"{engine}: {best} us of a step, and of a request in it")
        told("steps of dense models", every.__getitem__, test, best)


def queue() -> None:
    """The host of a request until the queue, by engine; of vLLM see `serving.host`."""
    rows = [of for of in servers.closed_loops() if "ttft" in of.quantity and not of.reason]
    rows = [of for of in rows if of.served.engine != "vllm"]
    # Servers that stream to more users wait for their own process that sends tokens.
    rows = [of for of in rows if (of.served.concurrency or 0) <= MOST_USERS]
    loops = {of.experiment: of for of in reversed(rows)}.values()
    for engine, (every, test) in _by_engine(loops, QUEUE_GRID, _of_requests).items():
        best = min(every, key=lambda c: float(np.abs(np.log1p(every[c][~test])).sum()))
        print(f"{engine}: {best} ms of a request and of 1,024 tokens")
        told("first tokens", every.__getitem__, test, best)


def _of_steps(constants: tuple[int, ...]) -> dict[str, float]:
    return {"per_step": constants[0] / 1e6, "per_request_step": constants[1] / 1e6}


def _of_requests(constants: tuple[int, ...]) -> dict[str, float]:
    return {"per_request": constants[0] / 1e3, "per_prompt_token": constants[1] / 1.024e6}


def _by_engine(
    loops: Iterable[servers.ClosedLoopRow],
    grid: tuple[range, range],
    fields: Callable[[tuple[int, ...]], dict[str, float]],
) -> dict[str, tuple[dict[tuple[float, ...], np.ndarray], np.ndarray]]:
    """Errors by constants, and which rows are held out, of each engine."""
    carried = dict(hosts.HOSTS)
    result: dict[str, tuple[dict[tuple[float, ...], np.ndarray], np.ndarray]] = {}
    for engine in sys.argv[2:] or hosts.HOSTS:
        mine = [of for of in loops if of.served.engine == engine and _fits(of)]
        every: dict[tuple[float, ...], np.ndarray] = {}
        for constants in itertools.product(*grid) if mine else ():
            hosts.HOSTS = {**carried, engine: replace(carried[engine], **fields(constants))}
            deployment.HOSTS = hosts.HOSTS
            every[constants] = np.array(
                [of.predict(of.simulate()) / of.measured - 1 for of in mine]
            )
        if mine:
            result[engine] = every, np.array([held_out(*key(of.served)) for of in mine])
    return result


def _fits(of: servers.ClosedLoopRow) -> bool:
    try:
        of.simulate()
    except UserError:
        return False
    return True


if __name__ == "__main__":
    {"first": first_tokens, "steps": steps, "queue": queue}[sys.argv[1]]()
