"""The dispatch of tokens by DeepEP and HybridEP, beside what their authors measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time import hardware
from stagewright.time.collectives import collective_seconds
from stagewright.time.dispatch import (
    MULTIPROCESSORS,
    DispatchKernels,
    destinations,
    dispatch_seconds,
    exchanges_tokens,
    slowdown_by_dispatch,
)
from stagewright.time.durations import task_seconds
from stagewright.time.network import Machine, Placement, placements
from stagewright.time.simulate.step import simulate

H100 = hardware.resolve("h100-sxm")
DEEPSEEK = DispatchKernels(256, 8, 8, 4)


@cases
def test_distinct_ranks_of_a_token(
    experts: int, parts: int, top_k: int, groups: int, top_groups: int
) -> None:
    """Against all choices there are, of groups and then of experts within them."""
    held, grouped = experts // parts, experts // groups
    counts: list[int] = []
    for chosen in itertools.combinations(range(groups), top_groups):
        pool = [e for e in range(experts) if e // grouped in chosen]
        counts += [len({e // held for e in some}) for some in itertools.combinations(pool, top_k)]
    dispatch = DispatchKernels(experts, top_k, groups, top_groups)
    assert destinations(dispatch, parts) == pytest.approx(np.mean(counts))


def test_groups_that_ranks_cut_apart_count_as_none() -> None:
    assert destinations(DispatchKernels(12, 2, 3, 1), 2) == destinations(DispatchKernels(12, 2), 2)


def _group(gpu: str, ep: int) -> tuple[Machine, Placement]:
    machine = Machine.of(hardware.resolve(gpu), gpus=max(ep, 8))
    return machine, placements(machine, np.arange(ep).reshape(1, -1))[0]


@pytest.mark.parametrize(
    ("gpu", "ep", "width", "gb_s", "within"),
    [
        *(("h800", 8, 1, 153, 0.04), ("h800", 8, 2, 158, 0.04)),
        *(("h800", 16, 1, 43, 0.3), ("h800", 16, 2, 43, 0.3)),  # its kernels wait for each other
        *(("h800", 32, 1, 58, 0.04), ("h800", 32, 2, 57, 0.04)),
        *(("h800", 64, 1, 51, 0.04), ("h800", 64, 2, 50, 0.04)),
        *(("b200", 8, 2, 726, 0.12), ("b200", 8, 2, 643, 0.12), ("b200", 16, 2, 90, 0.12)),
        *(("h100-sxm", 16, 2, 81, 0.12), ("h100-sxm", 32, 2, 61, 0.12)),
    ],
)
def test_tokens_sent_once_beside_deepep(
    gpu: str, ep: int, width: int, gb_s: float, within: float
) -> None:
    """DeepEP's README: GB/s of the copies of 4096 tokens of 7168 values of `width` bytes, one copy
    for each rank of a node, or for each node; on H800 version 1, elsewhere version 2."""
    machine, group = _group(gpu, ep)
    size = 4096 * 7168 * width
    seconds = dispatch_seconds(8 * size, group, machine, DEEPSEEK)
    copies = destinations(DEEPSEEK, 8 if ep == 8 else ep // 8)
    assert size * copies / seconds / 1e9 == pytest.approx(gb_s, rel=within)
    assert seconds < collective_seconds("all_to_all", 8 * size, group, machine)


@pytest.mark.parametrize(
    ("gpu", "ep", "us", "dispatch"),
    [
        ("gb200-nvl72", 8, 391, DispatchKernels(256, 8)),
        ("gb200-nvl72", 64, 675, DispatchKernels(256, 8)),
        ("h100-sxm", 16, 1485, DEEPSEEK),
        ("h100-sxm", 64, 4626, DEEPSEEK),
    ],
)
def test_tokens_sent_once_beside_hybridep(
    gpu: str, ep: int, us: float, dispatch: DispatchKernels
) -> None:
    """NVIDIA's figures for 4096 tokens of 7168 in bf16."""
    machine, group = _group(gpu, ep)
    seconds = dispatch_seconds(4096 * 7168 * 2 * 8, group, machine, dispatch)
    assert seconds * 1e6 == pytest.approx(us, rel=0.2)


@cases
def test_few_tokens_beside_deepep(ep: int, dispatch: float, combine: float) -> None:
    """Low-latency kernels in DeepEP's README: us of 128 tokens, in fp8 there and in bf16 back."""
    machine, group = _group("h800", ep)
    kernels = DEEPSEEK._replace(low_latency=True)
    for width, us in ((1, dispatch), (2, combine)):
        seconds = dispatch_seconds(128 * 7168 * 8 * width, group, machine, kernels)
        assert seconds * 1e6 == pytest.approx(us, rel=0.1)


def test_both_sides_of_disaggregated_serving_send_by_kernels_of_their_own() -> None:
    """Ranks that prefill send a token once, ranks that decode send each copy straight."""
    run = Run(
        model="deepseek-v3", layers=4, mode="decode", tp=1, dp=16, ep=16,
        batch_size=16,
        context_length=512, prefill="dp=16,ep=16",
    )  # fmt: skip
    program = compile(run).program
    machine = Machine.of(H100, gpus=32)
    dispatch = DEEPSEEK._replace(low_latency=True)
    seconds = task_seconds(program, machine, dispatch=dispatch)
    plain = task_seconds(program, machine)
    group = placements(machine, np.arange(16).reshape(1, -1))[0]
    for which, took, before in zip(program.classes, seconds, plain, strict=True):
        tasks = which.tasks
        (sent, *_) = np.flatnonzero(
            (tasks.kind == TaskKind.COLLECTIVE) & (tasks.comm_bytes > 4096) & (took != before)
        )
        mine = dispatch._replace(low_latency=bool(which.ranks[0] >= 16))
        expected = dispatch_seconds(int(tasks.comm_bytes[sent]), group, machine, mine)
        assert took[sent] == pytest.approx(expected)


def test_flex_dispatcher_is_for_experts_on_several_ranks() -> None:
    compiled = compile(Run(model="mixtral-8x7b", layers=1, seq_length=64))
    with pytest.raises(UserError, match="moe_flex_dispatcher needs experts on several ranks"):
        simulate(compiled, Machine.of(H100, gpus=1), Execution(moe_flex_dispatcher=True))
    settings = {"model": "mixtral-8x7b", "layers": 1, "seq_length": 4096, "ep": 8, "dp": 8}
    compiled = compile(Run(**settings, zero=1))
    machine = Machine.of(H100, gpus=8)
    once, each = (simulate(compiled, machine, Execution(moe_flex_dispatcher=x)).seconds
                  for x in (True, False))  # fmt: skip
    assert once < each


@pytest.mark.parametrize("cp", [1, 2])
def test_dispatches_beside_kernels_keep_multiprocessors(cp: int) -> None:
    """16 of 132: kernels of a microbatch lose so much of the time of its dispatches in all.

    All-to-alls of attention (cp) are none.
    """
    settings = {"dp": 8 // cp, "ep": 8 // cp, "cp": cp, "cp_comm_type": "a2a"}
    run = Run(model="qwen3-30b-a3b", layers=2, zero=1, seq_length=1024, **settings)
    program = compile(run).program
    tasks = program.classes[0].tasks
    machine = Machine.of(H100, gpus=8)
    (alone,), (beside,) = (
        task_seconds(program, machine, dispatch=DispatchKernels(128, 8, overlapped=overlapped))
        for overlapped in (False, True)
    )
    moves = tasks.kind == TaskKind.COLLECTIVE
    assert (beside[moves] == alone[moves]).all()
    exchanged = alone[exchanges_tokens(program, tasks)].sum()
    assert (beside - alone).sum() == pytest.approx(exchanged * 16 / 132)
    assert not (beside - alone)[tasks.microbatch < 0].any()


def test_engines_gather_tokens_between_ranks_of_attention() -> None:
    """vLLM's default `allgather_reducescatter`: a token travels once to each other rank."""
    run = Run(model="qwen3-30b-a3b", mode="decode", batch_size=64, context_length=512, dp=2, ep=2)
    compiled = compile(run)
    dispatch = DispatchKernels.in_engine(compiled.run, compiled.model, "vllm")
    assert dispatch is not None
    machine = Machine.of(H100, gpus=2)
    (group,) = placements(machine, np.arange(2).reshape(1, -1))
    copies = 32 * 8 * 2048 * 2
    found = dispatch_seconds(copies, group, machine, dispatch)
    assert found == collective_seconds("all_gather", copies // 8, group, machine)
    for engine, dp in ((None, 2), ("vllm", 1)):
        of = compiled.run.model_copy(update={"dp": dp})
        assert DispatchKernels.in_engine(of, compiled.model, engine) is None
    gathered = simulate(compiled, machine, Execution(serving_engine="vllm")).seconds
    assert gathered < simulate(compiled, machine, Execution()).seconds


def test_slowdown_is_that_of_the_step_whether_rows_are_repeated_or_counted() -> None:
    random = np.random.default_rng(1)
    kernels, dispatches = random.random(700) * 1e-4, random.random(30) * 1e-3
    copies = random.integers(0, 200, 700), random.integers(0, 200, 30)
    repeated = [np.repeat(each, n) for each, n in zip((kernels, dispatches), copies, strict=True)]
    for each in repeated:
        random.shuffle(each)
    counted = slowdown_by_dispatch(
        kernels, dispatches, H100, kernel_copies=copies[0], dispatch_copies=copies[1]
    )
    assert slowdown_by_dispatch(*repeated, H100) == counted  # to the bit
    share = MULTIPROCESSORS / H100.compute_units
    assert counted == pytest.approx(1 + share * repeated[1].sum() / repeated[0].sum())
    assert slowdown_by_dispatch(np.zeros(3), dispatches, H100) == 1
