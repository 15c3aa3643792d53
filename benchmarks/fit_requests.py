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
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from fit_kernels import held_out
from stagewright.errors import UserError
from stagewright.evidence import servers
from stagewright.evidence.servers import ClosedLoopRow
from stagewright.model.catalog import resolve
from stagewright.serving import deployment
from stagewright.serving import host as hosts

STEP_GRID = (range(0, 2001, 400), range(0, 61, 10))
"""Microseconds of a step, and of a request in it."""
QUEUE_GRID = (range(0, 31, 5), range(0, 13, 3))
"""Milliseconds of a request until it is in the queue, and of 1,024 tokens of its prompt."""

MOST_USERS = 128
"""Users of closed loops to whose first tokens hosts are fitted."""

Found = Callable[[tuple[float, ...]], np.ndarray]
"""Errors of rows by constants."""


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


def told(label: str, found: Found, test: np.ndarray, best: tuple[float, ...]) -> None:
    """Print the errors without and with the host; `found` gives those of all rows."""
    for rows, some in (("fitted to", ~test), ("held out", test)):
        for name, constants in (("alone", (0, 0)), ("with the host", best)):
            error = found(constants)[some]
            size = np.abs(error)
            print(f"#   {label}, {rows}, {name}: {len(size)} rows, mean {size.mean():.1%}, median "
                  f"{np.median(size):.1%}, bias {np.median(error):+.1%}")  # fmt: skip


def steps() -> None:
    """The host of a step, by engine."""
    loops = [of for of in servers.closed_loops() if of.quantity == "tpot_ms" and not of.reason]
    loops = [of for of in loops if not resolve(str(of.settings["model"])).num_experts]
    for engine, (every, test) in _by_engine(loops, STEP_GRID, _of_steps).items():
        best = min(every, key=lambda c: float(np.abs(np.log1p(every[c][~test])).sum()))
        print(f"{engine}: {best} us of a step, and of a request in it")
        told("steps of dense models", every.__getitem__, test, best)


def queue() -> None:
    """The host of a request until the queue, by engine; of vLLM see `serving.host`."""
    rows = [of for of in servers.closed_loops() if "ttft" in of.quantity and not of.reason]
    rows = [of for of in rows if of.engine != "vllm"]
    # Servers that stream to more users wait for their own process that sends tokens.
    rows = [of for of in rows if (of.users) <= MOST_USERS]
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
    loops: Iterable[ClosedLoopRow],
    grid: tuple[range, range],
    fields: Callable[[tuple[int, ...]], dict[str, float]],
) -> dict[str, tuple[dict[tuple[float, ...], np.ndarray], np.ndarray]]:
    """Errors by constants, and which rows are held out, of each engine."""
    carried = dict(hosts.HOSTS)
    result: dict[str, tuple[dict[tuple[float, ...], np.ndarray], np.ndarray]] = {}
    for engine in sys.argv[2:] or hosts.HOSTS:
        mine = [of for of in loops if of.engine == engine and _fits(of)]
        every: dict[tuple[float, ...], np.ndarray] = {}
        for constants in itertools.product(*grid) if mine else ():
            hosts.HOSTS = {**carried, engine: replace(carried[engine], **fields(constants))}
            deployment.HOSTS = hosts.HOSTS
            every[constants] = np.array(
                [of.predict(of.simulate()) / of.measured - 1 for of in mine]
            )
        if mine:
            result[engine] = every, np.array([held_out(*key(of)) for of in mine])
    return result


def _fits(of: ClosedLoopRow) -> bool:
    try:
        of.simulate()
    except UserError:
        return False
    return True


if __name__ == "__main__":
    {"steps": steps, "queue": queue}[sys.argv[1]]()
