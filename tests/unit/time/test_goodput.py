"""Goodput: closed forms beside published figures and a simulation of failures; checkpoints."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.checkpoint import checkpoint
from stagewright.time.goodput import (
    Failures,
    Saving,
    best_period,
    daly,
    interruption_seconds,
    replicated_share,
    useful_share,
    young,
)
from stagewright.time.ownership import Ownership, load

DATA = Path(__file__).parents[2] / "data"


def _published_periods() -> list[dict[str, str]]:
    lines = (DATA / "checkpoint_periods.csv").read_text().splitlines()
    return [*csv.DictReader(line for line in lines if not line.startswith("#"))]


@pytest.mark.parametrize("row", _published_periods(), ids=lambda row: row["processors"])
def test_best_periods_are_the_published_ones(row: dict[str, str]) -> None:
    fleet = Failures(float(row["mtbf"]), detect=60, restart=600)
    assert young(fleet, 600) == pytest.approx(float(row["young"]), abs=1)
    assert daly(fleet, 600) == pytest.approx(float(row["daly"]), abs=1)
    # The paper's optimum is of simulated traces: 0.13% off at most.
    assert best_period(fleet, Saving(600, 600)) == pytest.approx(float(row["optimal"]), rel=0.0014)


def _simulated_share(period: float, failures: Failures, saving: Saving, periods: int) -> float:
    """Useful share of a job that is simulated failure by failure."""
    draw = random.Random(7)
    mean = failures.interruption_seconds
    clock, kept, fails_at = 0.0, 0, draw.expovariate(1 / mean)
    at = 0.0  # progress within the period of index `kept`, stall first
    while kept < periods:
        end = clock + period - at
        if end <= fails_at:
            clock, at, kept = end, 0.0, kept + 1
            continue
        at += fails_at - clock
        # The checkpoint at the start of this period is stored `write` after it was taken.
        if saving.asynchronous and kept and at < saving.write:
            kept -= 1
        at = 0.0
        clock = fails_at + failures.detect
        while True:  # a restart may fail as well
            fails_at = clock + draw.expovariate(1 / mean)
            if clock + failures.restart <= fails_at:
                clock += failures.restart
                break
            clock = fails_at + failures.detect
    return kept * (period - saving.stall) / clock


@cases
def test_the_closed_form_is_that_of_a_job_simulated_failure_by_failure(
    failures: tuple[float, ...], saving: dict[str, Any], period: float, within: float
) -> None:
    fleet, saves = Failures(*failures), Saving(**saving)
    simulated = _simulated_share(period, fleet, saves, 60_000)
    assert useful_share(period, fleet, saves) == pytest.approx(simulated, rel=within)


def test_no_period_is_better_than_the_best() -> None:
    draw = random.Random(3)
    for _ in range(200):
        failures = Failures(10 ** draw.uniform(2.5, 6), draw.uniform(0, 900), draw.uniform(0, 900))
        write = 10 ** draw.uniform(0, 3)
        saving = Saving(write * draw.choice((1, 0.02)), write, asynchronous=draw.random() < 0.5)
        best = best_period(failures, saving)
        share = useful_share(best, failures, saving)
        assert best >= saving.shortest_period
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2, 10):
            other = max(best * factor, saving.shortest_period * 1.0001)
            assert useful_share(other, failures, saving) <= share * (1 + 1e-9)


def test_published_jobs() -> None:
    """Interruptions and useful shares that reports name; assumptions in docs/guides/goodput.md."""
    # Llama 3 405B (arXiv 2407.21783, 3.3.4): 419 unexpected interruptions of 2,048 nodes in 54
    # days, more than 90% useful.
    mean = interruption_seconds(2048, 1000 * 419 / (54 * 2048))
    assert mean * 419 == pytest.approx(54 * 86_400)
    fleet = Failures(mean, detect=60, restart=300)  # assumed, as is a stall of 6 s every 6 minutes
    assert useful_share(360, fleet, Saving(6, 6)) > 0.9
    # FT-HSDP (arXiv 2602.00277) on 100,000 GPUs: 44% useful where a failure takes 10 minutes, which
    # is one every 18 minutes; 80% where replicas fail alone and each stalls the others for 3.
    fleet = Failures(600 / (1 - 0.44), detect=0, restart=600)
    assert useful_share(360, fleet, Saving(6, 6)) == pytest.approx(0.44, abs=0.06)
    assert replicated_share(fleet, replicas=100, stall=180) == pytest.approx(0.80, abs=0.04)
    # ByteRobust (arXiv 2509.16293): 97% of three months on 9,600 GPUs. At Llama 3's rate that takes
    # at most 9 minutes a failure in all.
    mean = interruption_seconds(1200, 3.79)
    fleet = Failures(mean, detect=30, restart=300)
    assert useful_share(120, fleet, Saving(0.5, 0.5)) == pytest.approx(0.97, abs=0.01)


@cases
def test_a_checkpoint_holds_each_parameter_and_state_once(settings: dict[str, object]) -> None:
    compiled = sw.compile(**settings)  # pyright: ignore
    of = checkpoint(compiled)
    biases = 0  # of the routers of DeepSeek-V3, which count as no parameters: fp32
    if settings["model"] == "deepseek-v3":
        biases = 4 * 256 * 5
    assert of.by_category["parameters"] == 2 * compiled.parameters + biases
    assert of.by_category["optimizer"] == 12 * compiled.parameters  # master copy, two moments
    gpus = compiled.program.mesh.world_size / len(of.by_pipeline_rank)
    assert sum(of.by_pipeline_rank) * gpus == pytest.approx(of.bytes)


JOB = {
    "hardware": "h100-sxm", "nodes": 2, "failures": 3.8, "storage_gb_s": 10, "detect": 60,
    "restart": 300, "tokens": "100B",
}  # fmt: skip


def _simulate(**changes: object) -> sw.Simulation:
    settings = {**JOB, "layers": 4, "tp": 8, **changes}
    given = {name: value for name, value in settings.items() if value is not None}
    return sw.simulate("llama3-8b", **given)  # pyright: ignore


def test_a_job_says_what_it_assumes() -> None:
    step = _simulate()
    of, job = step.goodput, step.job
    assert of is not None
    assert job is not None
    assert of.saving is not None
    assert of.nodes == 2
    assert of.interruption_seconds == pytest.approx(86_400 * 1000 / 7.6)
    assert of.saving.stall == pytest.approx(of.checkpoint.bytes / 10e9)
    assert job.days == pytest.approx(job.days_without_failures / of.useful_share)
    assert job.days_without_failures == pytest.approx(1e11 / step.tokens_per_second / 86_400)
    entry = step.to_dict()
    assert entry["goodput"]["checkpoint"]["bytes"] == of.checkpoint.bytes
    assert entry["job"]["tokens"] == 1e11
    text = "\n".join(map(str, step.text()))
    assert "goodput 99" in text
    assert "100 billion tokens in steps of " in text
    assert "interruptions a day" in step.page()


def test_stalls_end_with_asynchronous_checkpoints_and_independent_replicas() -> None:
    synchronous, asynchronous, replicas = (
        _simulate(failures=3000, **more).goodput
        for more in (
            {},
            {"async_checkpoint": True},
            {"replica_recovery": 30, "storage_gb_s": None},
        )
    )
    assert synchronous
    assert asynchronous
    assert replicas
    assert synchronous.useful_share < asynchronous.useful_share < replicas.useful_share
    assert replicas.saving is None
    assert replicas.period is None


def test_spares_are_paid_and_their_shortage_waits() -> None:
    without, few, many = (
        _simulate(failures=300, **more) for more in ({}, {"spares": 0, "repair": "24h"},
                                                     {"spares": 3, "repair": "24h"})
    )  # fmt: skip
    assert without.goodput
    assert few.goodput
    assert many.goodput
    assert few.goodput.spares
    assert few.goodput.spares.in_repair == pytest.approx(0.6)
    waits = 1 - math.exp(-0.6)
    assert few.goodput.useful_share == pytest.approx(without.goodput.useful_share * (1 - waits))
    assert many.goodput.useful_share == pytest.approx(without.goodput.useful_share, rel=0.005)
    assert without.job
    assert many.job
    assert without.job.usd
    assert many.job.usd
    assert many.job.usd / many.job.days == pytest.approx(without.job.usd / without.job.days * 2.5)


@cases
def test_what_is_missing_is_asked_for(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        _simulate(**changes)


# ---- what a GPU-hour costs who owns the machine --------------------------------------------------


def test_each_part_of_the_costs() -> None:
    """Capital over all hours, upkeep on top of capital, power through the building's overhead."""
    capital = Ownership(gpu_usd=8766, years=1, usd_per_kwh=0)
    assert capital.usd_per_gpu_hour(1000) == pytest.approx(1)
    more = {"network_usd": 4383, "building_usd_per_kw": 4383, "upkeep": 0.5}
    whole = capital.model_copy(update=more | {"utilization": 0.5})
    assert whole.usd_per_gpu_hour(1000) == pytest.approx(2 * 1.5 / 0.5)
    power = Ownership(gpu_usd=0, years=4, usd_per_kwh=0.1, pue=1.5)
    assert power.usd_per_gpu_hour(500) == pytest.approx(0.5 * 0.1 * 1.5)


@cases
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        load(path)


def test_a_step_with_a_file_of_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("gpu_usd: 30000\nyears: 4\nusd_per_kwh: 0.1\n")
    step = sw.simulate("llama3-8b", "h100-sxm", layers=1, seq_length=512, costs=str(path))
    spent = step.expense()
    price = 30000 / (4 * 8766) + 0.1 * spent.watts_per_gpu / 1000
    usd = price * step.seconds / 3600 / step.tokens * 1e6
    assert spent.usd_per_million_tokens == pytest.approx(usd)
    with pytest.raises(UserError, match="price and costs both say"):
        sw.simulate("llama3-8b", "h100-sxm", layers=1, costs=str(path), price=2)
