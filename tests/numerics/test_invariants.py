"""Programs of many parallelizations are sound and run to their end, on any hardware.

The checker itself is tested last: it finds what is broken, and says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helpers import cases, rows_of, some, times
from invariants import COLLECTIVE, RECV, SEND, Broken, World, check
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program, RankClass
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES

BASE = {"model": "llama3.1-8b", "layers": 4, "seq_length": 64}
GPT = BASE | {"model": "gpt2"}

GRID = [BASE | row["settings"] for row in rows_of("test_invariants", "test_grid")]
FSDP2 = GPT | {"framework": "torchtitan", "zero": 3, "dp": 2, "pp": 2, "global_batch_size": 4}


def checked(run: Run) -> Program:
    """The program of a run, all invariants checked."""
    program = compile(run).program
    # Ranks with several stages need sends that do not wait for their receiver: test_rendezvous.
    several = run.vpp > 1 or program.mesh.mirror or bool(SCHEDULES[run.schedule or "1f1b"].ends)
    meets = (False,) if several else (False, True)
    check(program, streams=run.streams, rendezvous=meets)
    return program


@pytest.mark.parametrize("settings", some(GRID, 4), ids=lambda s: Run(**s).describe())
def test_grid(settings: dict[str, Any]) -> None:
    checked(Run(**settings))


@cases
def test_torchtitan(settings: dict[str, Any]) -> None:
    """Each was unsound once: all are tried."""
    checked(Run(**(FSDP2 | settings)))


@pytest.mark.parametrize("settings", some(GRID[13::3]), ids=lambda s: Run(**s).describe())
def test_separate_streams(settings: dict[str, Any]) -> None:
    checked(Run(**settings, streams="separate"))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Runs of at most 64 ranks, most of them valid."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    model = one(
        "llama3.1-8b", "gpt2", "gemma2-2b", "palm-8b", "falcon-7b", "bert-base", "qwen3-0.6b"
    )
    tp = one(1, 2, 4) if model != "falcon-7b" else 1
    cp, pp, dp = one(1, 2, 3), one(1, 2, 3, 4), one(1, 2, 3, 4)
    assume(tp * cp * pp * dp <= 32)
    layers = draw(st.integers(2, 8))
    schedule = one(*(
        name for name, s in SCHEDULES.items()
        if (s.chunks == 1 or (pp > 1 and layers >= 2 * pp)) and (name != "dualpipe" or pp % 2 == 0)
    ))  # fmt: skip
    chunks = SCHEDULES[schedule].chunks
    vpp = chunks or draw(st.integers(2, layers // pp))
    microbatches = one(1, 2, 3) * (pp if vpp > 1 else 1)
    microbatches = next(m for m in range(microbatches, 99) if SCHEDULES[schedule].takes(pp, m))
    size = one(1, 2)
    zero = one(0, 1, 2, 3)
    recompute = one("none", "selective", "full")
    return Run(
        model=model, layers=layers, tp=tp, cp=cp, pp=pp, dp=dp, vpp=vpp, zero=zero,
        schedule=schedule, seq_length=2 * cp * tp * one(1, 2, 4), micro_batch_size=size,
        global_batch_size=size * dp * microbatches,
        dp_shard=one(None, *(d for d in (1, 2, 3) if dp % d == 0)) if zero else None,
        reshard_after_forward=zero != 3 or one(True, False),
        sequence_parallel=tp > 1 and one(True, False),
        cp_comm_type=one("p2p", "all_gather", "a2a"),
        recompute=recompute,
        recompute_modules=one(("core_attn",), ("norm",), ("norm", "activation", "core_attn"))
        if recompute == "selective" else ("core_attn",),
        recompute_num_layers=one(None, 1, 2) if recompute == "full" else None,
        precision=one("bf16", "fp32", "fp8"), optimizer=one("adamw", "sgd"),
        flash_attention=one(True, False), fuse=one(True, False), dropout=one(True, False),
        clip_grad=one(True, False), grad_reduce=one("step", "microbatch"),
        activation_gather=one("again", "keep"), bucket=one("layer", "parameter"),
        vocab=one(None, 1000), order=one("tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep"),
        streams=one("one", "separate"),
    )  # fmt: skip


@settings(
    max_examples=times(10),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(runs())
def test_random_runs(run: Run) -> None:
    try:
        checked(run)
    except UserError:
        assume(False)  # what a run refuses is tested with runs


# ---- the checker ---------------------------------------------------------------------------------


def broken(program: Program, change: Callable[[RankClass], RankClass], rank: int = 0) -> Program:
    """The program with one class changed."""
    classes = [change(c) if c.pipeline_rank == rank else c for c in program.classes]
    return replace(program, classes=tuple(classes))


def column(name: str, row: Callable[[Any], int], value: Any) -> Callable[[RankClass], RankClass]:
    """Set one value of a column."""

    def change(c: RankClass) -> RankClass:
        new = getattr(c.tasks, name).copy()
        at = row(c.tasks)
        new[at] = value(new[at]) if callable(value) else value
        return replace(c, work=c.work.with_tasks(replace(c.tasks, **{name: new})))

    return change


def first(kind: int, nth: int = 0) -> Callable[[Any], int]:
    return lambda t: int(np.flatnonzero(t.kind == kind)[nth])


def named(name: str) -> Callable[[Any], int]:
    return lambda t: int(np.flatnonzero(t.name == t.names.index(name))[-1])


def without_order(row: Callable[[Any], int]) -> Callable[[RankClass], RankClass]:
    """Forget what a row waits for besides data."""

    def change(c: RankClass) -> RankClass:
        t, at = c.tasks, row(c.tasks)
        start, end = t.order_ptr[at], t.order_ptr[at + 1]
        pointer = t.order_ptr.copy()
        pointer[at + 1 :] -= end - start
        order = np.delete(t.order, range(start, end))
        tasks = replace(t, order_ptr=pointer, order=order)
        return replace(c, work=c.work.with_tasks(tasks))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (column("data", lambda t: 0, 10_000), "needs a later row"),
        (column("traffic", first(0), 0), "moves nothing"),
        (column("comm_bytes", first(SEND), 0), "less than a byte"),
        (column("comm_bytes", first(SEND), lambda n: n + 1), "4 sends without a receive"),
        (column("tag", first(RECV), lambda n: n + 1), "receives without a send"),
        (column("tag", first(SEND), -1), "tag out of range"),
        (column("slot", first(COLLECTIVE), -1), "no partner"),
        (column("comm_bytes", first(COLLECTIVE), 8), None),  # the whole class, so still equal
        (column("collective", first(COLLECTIVE, -1), 2), "issue different collectives"),
        (column("microbatch", lambda t: 5, 3), "another microbatch"),
        (without_order(named("layer0.d_mlp_norm_out.all_reduce")), "does not wait for"),
        (without_order(first(0, 20)), "kernels not in one chain"),
    ],
)  # fmt: skip
def test_faults_are_found(change: Callable[[RankClass], RankClass], message: str | None) -> None:
    program = compile(Run(**GPT, tp=2, pp=2, dp=2)).program
    if message is None:
        check(broken(program, change))
        return
    with pytest.raises(Broken, match=message):
        check(broken(program, change))


def test_a_deadlock_says_who_waits_for_whom() -> None:
    """A receive that nobody sends."""
    program = compile(Run(**GPT, tp=2, pp=2)).program
    lost = broken(program, column("tag", first(RECV), 999), rank=1)
    with pytest.raises(Broken) as error:
        World(lost).run()
    story = str(error.value)
    assert "rows never end" in story
    assert "RECV forward.recv (forward microbatch 0) waits for its partner on rank ?" in story
    assert story.endswith("which is never sent")


def test_order_that_only_time_decides_is_found() -> None:
    """Separate streams need a slot each: a simulator with one for all may hang."""
    run = GPT | {"layers": 2, "pp": 4, "layers_per_stage": (0, 1, 1, 0), "streams": "separate"}
    program = compile(Run(**run)).program
    check(program, streams="separate")
    with pytest.raises(Broken, match="not in one chain"):
        check(program, streams="one")
    ends = [why(World(program, "one"), seed) for seed in range(8)]
    assert any("is ready, but its slot is taken" in end for end in ends)


def why(world: World, seed: int) -> str:
    """How a run with one slot for all communication ends."""
    try:
        world.run(jitter=seed, slots=True)
    except Broken as error:
        return str(error)
    return ""


def test_rendezvous() -> None:
    """Interleaved ranks send to each other at once: they need sends that do not wait (eager)."""
    program = compile(Run(**GPT | {"layers": 8}, tp=2, pp=4, vpp=2, global_batch_size=8)).program
    world = World(program)
    world.run()
    with pytest.raises(
        Broken, match=r"SEND .* waits for its partner on rank [0-7]\n(.*\n)*.*circle"
    ):
        world.run(rendezvous=True)
