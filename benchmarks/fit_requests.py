"""Fit what an engine's host takes for a request until its first token; print held-out errors.

    python benchmarks/fit_requests.py

Rows are the times to the first token of at most four users that the package carries
(`data/measured/inference.csv`). A request takes a constant and a time per 1,024 tokens of its
prompt, besides the steps that `evidence.inference` predicts; of the configurations, 70% fit and 30%
are held out, by a hash. The sum of the logarithms of the errors is least on a grid, so that single
runs that are far off do not count.
"""

from __future__ import annotations

import itertools

import numpy as np
from fit_kernels import held_out

from stagewright.evidence import inference
from stagewright.evidence.inference import HOST_MS, ServedRow

GRID = (range(0, 201, 5), range(0, 41, 2))
"""Milliseconds of a request, and of 1,024 tokens of a prompt."""


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


def fit(table: np.ndarray) -> tuple[float, ...]:
    """The constants of the grid with the least errors."""
    return min(
        itertools.product(*GRID), key=lambda c: float(np.abs(np.log1p(errors(table, c))).sum())
    )


def main() -> None:
    """The fit of each engine, and the errors without and with the host."""
    rows = [row for row in inference.rows() if row.quantity == "ttft_ms"]
    for engine in sorted({row.engine for row in rows}):
        mine = [row for row in rows if row.engine == engine]
        prompt = np.array([row.isl * (1 + row.shortest) / 2 / 1024 for row in mine])
        carried = HOST_MS[engine][0] + HOST_MS[engine][1] * prompt
        steps = np.array([inference.loaded(row).ttft * 1e3 for row in mine]) - carried
        table = np.array([steps, prompt, [row.measured for row in mine]])
        test = np.array([held_out(*key(row)) for row in mine])
        best = fit(table[:, ~test])
        print(f"{engine}: {best} ms, carried {HOST_MS[engine]}")
        for label, some in (("fitted to", ~test), ("held out", test)):
            for name, constants in (("steps alone", (0.0, 0.0)), ("with the host", best)):
                error = errors(table[:, some], constants)
                size = np.abs(error)
                print(f"#   {label}, {name}: {len(size)} rows, median {np.median(size):.1%}, "
                      f"bias {np.median(error):+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
