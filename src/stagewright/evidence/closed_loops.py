"""Servers whose users send the next request when one is done, played request by request.

Rows are those of `data/measured/inference.csv` that have a number of users, and of `serving.csv`
beside it. Each is a closed loop: ten requests for each user (or as many as the client's source
says, `evidence.servers`), all of whom begin at once, lengths uniform between the shortest and the
longest, and no shared prefixes. Of hosts, `serving.host` says what was fitted. Where the first
step of a server took longer, the first request of each user waited for that: a share of the mean
that is 1 over its requests. Both clients measure whole runs, from the first request to the last
token, and so are these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.evidence.inference import SCHEDULERS, ServedRow, model_of_row, rows, rows_of
from stagewright.evidence.measurements import NotCompared
from stagewright.evidence.predictions import Prediction
from stagewright.evidence.servers import client_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import Instance, instance
from stagewright.serving.metrics import ServingSummary, Slo
from stagewright.serving.schedulers.named import batch_limits, scheduler_of
from stagewright.serving.workloads.synthetic import Lengths, closed_loop
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

QUANTITIES = {
    "tpot_ms": "mean milliseconds per token behind the first",
    "ttft_ms": "mean milliseconds to the first token",
    "ttft_p50_ms": "median of these",
    "output_tokens_s_gpu": "output tokens per second and GPU",
}
MOST_TOKENS = 8192
"""Of a step, at least, so that servers which differ in nothing else have one table of times."""
HARDWARE = ("h100-sxm", "h200")
"""Of the rows of AIConfigurator that are played."""


class ClosedLoop(NamedTuple):
    """A server and its users, and what was measured of it."""

    row: ServedRow
    measured: tuple[ServedRow, ...]
    """A row for each quantity."""


def closed_loops(source: str | None = None) -> list[ClosedLoop]:
    """The loads that the package carries, each once."""
    found: dict[object, list[ServedRow]] = {}
    for row in (*rows(), *rows_of("serving.csv")):
        known = row.quantity in QUANTITIES and row.concurrency is not None
        if not known or row.cached or (source and source.lower() not in row.source.lower()):
            continue
        if "InferenceX" not in row.source and row.hardware not in HARDWARE:
            continue
        settings = tuple(sorted(row.settings.items()))
        key = row.hardware, row.engine, row.checkpoint, settings, row.chunk
        found.setdefault((*key, row.concurrency, row.isl, row.osl, row.url), []).append(row)
    return [ClosedLoop(some[0], tuple(some)) for some in found.values()]


def validate(
    source: str | None = None,
    *,
    every: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Prediction | NotCompared]:
    """Predictions of all loads, or of those whose source contains the text `source`; or why not."""
    chosen = closed_loops(source)[::every]
    for nth, each in enumerate(sorted(chosen, key=_by_server)):
        try:
            yield from predictions(each)
        except UserError as error:
            for row in each.measured:
                yield NotCompared(row.source, row.row, str(error))
        if progress is not None:
            progress(nth + 1, len(chosen))


def _by_server(of: ClosedLoop) -> str:
    return (
        f"{of.row.hardware} {of.row.engine} {of.row.checkpoint} {sorted(of.row.settings.items())}"
    )


def predictions(of: ClosedLoop) -> list[Prediction]:
    """What the users of a load would see."""
    summary, client = played(of.row), client_of(of.row)
    late = client.first_step / client.requests_per_user
    slower = summary.seconds / (summary.seconds + client.first_step)
    values = {
        "tpot_ms": summary.tpot.mean * 1e3,
        "ttft_ms": (summary.ttft.mean + late) * 1e3,
        "ttft_p50_ms": summary.ttft.p50 * 1e3,
        "output_tokens_s_gpu": summary.output_rate * slower / summary.gpus,
    }
    found: list[Prediction] = []
    for row in of.measured:
        value = values[row.quantity]
        name = f"{row.hardware} {row.row}" if row.hardware not in row.row else row.row
        found.append(
            Prediction(
                row.source, name, row.quantity, row.measured, value, value / row.measured - 1,
                "", row.reason,
            )
        )  # fmt: skip
    return found


def played(row: ServedRow) -> ServingSummary:
    """What comes out of a load."""
    assert row.concurrency is not None
    client = client_of(row)
    settings = {**row.settings, **client.settings}
    group = _service(
        _Server(
            row.hardware, row.engine, _sorted(settings), _sorted(client.options), row.checkpoint
        )
    )
    users = round(row.concurrency)
    lengths = Lengths(isl=row.isl, osl=row.osl, range_ratio=row.shortest)
    work = closed_loop(client.requests_per_user * users, users, lengths)
    return group.serve(work, Slo(), whole_run=True).summary


class _Server(NamedTuple):
    hardware: str
    engine: str
    settings: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    checkpoint: str


def _sorted(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


@cache
def _instance(of: _Server, tokens: int, requests: int) -> Instance:
    """The instance of a server; its table of step times is kept."""
    run, model = model_of_row(dict(of.settings), of.checkpoint)
    run = run.model_copy(update={"mode": "decode"})
    return instance(
        run, model, Machine.of(hardware_of(of.hardware), gpus=run.world_size),
        Execution(serving_engine=of.engine),  # pyright: ignore[reportArgumentType]
        most_tokens=tokens, most_requests=requests,
    )  # fmt: skip


def _service(of: _Server) -> InstanceGroup:
    # Both clients ask for all tokens: `--ignore-eos`, `ignore_eos:true`.
    options: dict[str, Any] = {"ignore_eos": True, **dict(of.options)}
    options["scheduler"] = SCHEDULERS[of.engine]
    engines = EngineSection(enable_prefix_caching=False, **options)
    limits = batch_limits(engines, hardware_of(of.hardware))
    most = max(limits.tokens, MOST_TOKENS)
    made = _instance(of._replace(options=()), most, limits.requests)
    ahead = replace(engines, async_scheduling=engines.async_scheduling and made.run.pp == 1)
    return InstanceGroup(made, engines, limits, scheduler_of(ahead, limits))


def sources(of: Sequence[ClosedLoop]) -> list[str]:
    """Names of the sources of loads, each once."""
    return [*dict.fromkeys(row.source for each in of for row in each.measured)]
