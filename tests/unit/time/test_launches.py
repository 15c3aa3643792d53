"""What the host of a rank launches, what for it waits, and what a step waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.program.columns import PHASES, TaskKind, Tasks
from stagewright.run.sections.execution import Execution
from stagewright.time.hardware import resolve
from stagewright.time.simulate.launches import (
    COLLECTIVE_CHECK,
    LAUNCH_COSTS,
    PRODUCT_LAUNCH,
    HostWork,
    host_work,
    launch_mode,
)
from timed import by_row

H100 = resolve("h100-sxm")


def launched(how: Execution | None = None, **settings: Any) -> tuple[Tasks, HostWork]:
    """The rows of the actions of the first rank class, and what its host does."""
    compiled = sw.compile(**settings)
    work = host_work(compiled.program, compiled.run, compiled.model, how or Execution(), H100)
    assert work is not None
    return compiled.program.classes[0].work.actions.tasks, work[0]


SMALL = {"model": "llama3-8b", "layers": 2, "seq_length": 64}
EXPERTS = {"model": "qwen3-30b-a3b", "layers": 1, "seq_length": 64, "dp": 8, "ep": 8}


def test_a_kernel_of_a_framework_that_runs_eagerly_is_a_call() -> None:
    tasks, work = launched(**SMALL, joint_projections=False)
    kernels = tasks.phase != PHASES.index("optimizer")
    assert np.allclose(work.seconds[kernels], LAUNCH_COSTS["eager"].call * 1e-6)


def test_parts_of_a_joint_product_are_one_kernel() -> None:
    apart, joint = (
        launched(**SMALL, joint_projections=on)[1].seconds.sum() / LAUNCH_COSTS["eager"].call * 1e6
        for on in (False, True)
    )
    # Per layer: of q, k, v two parts, of gate, up one; forward, and both products of backward.
    assert apart - joint == pytest.approx(2 * 3 * 3)


def test_megatron_launches_a_kernel_for_each_expert() -> None:
    tasks, work = launched(**EXPERTS)
    gemm = np.array([s.kernel == "gemm" and dict(s.extents)["batch"] == 16 for s in tasks.shapes])
    experts = gemm[tasks.shape] & (tasks.kind == TaskKind.COMPUTE)
    cost = LAUNCH_COSTS["eager"]
    assert set(np.round(work.seconds[experts] * 1e6, 3)) == {0.0, cost.call + 15 * PRODUCT_LAUNCH}
    _, compiled = launched(**EXPERTS, framework="torchtitan")
    assert compiled.seconds.max() < 1e-4


@pytest.mark.parametrize(("recipe", "launches"), [("tensorwise", 4), ("blockwise", 2)])
def test_scales_of_today_are_made_by_kernels_of_their_own(recipe: str, launches: int) -> None:
    """Transformer Engine's current scaling: zero, maximum, scale, cast, for each expert."""
    t, work = launched(**EXPERTS, precision="fp8", fp8_recipe=recipe)
    casts = np.array([op == "cast" for op in t.ops])[t.op] & (t.phase == PHASES.index("forward"))
    of = LAUNCH_COSTS["eager"]
    assert work.seconds[casts].max() == pytest.approx(
        1e-6 * (of.call + (launches * 16 - 1) * of.kernel)
    )


def test_the_host_waits_for_the_tokens_of_experts_and_the_norm_of_gradients() -> None:
    tasks, work = launched(**EXPERTS)
    names = [tasks.names[int(tasks.name[row])] for row in np.flatnonzero(work.waits)]
    assert names == ["layer0.splits_known.all_gather", "clip_scale"]
    _, dropped = launched(**EXPERTS, moe_expert_capacity_factor=1.0)
    assert dropped.waits.sum() == 1


@pytest.mark.parametrize(
    ("schedule", "waits"), [("1f1b", True), ("zb-h1", False), ("zb-h2", False)]
)
def test_the_host_waits_for_messages_in_the_loop_of_1f1b_alone(schedule: str, waits: bool) -> None:
    """The runtime of zero bubble leaves messages to its stream; Megatron-LM's 1F1B synchronizes."""
    tasks, work = launched(**SMALL, pp=2, global_batch_size=4, schedule=schedule)
    received = tasks.kind == TaskKind.RECV
    assert received.any()
    assert work.waits[received].any() == (schedule == "1f1b")


def test_streams_wait_for_messages_of_ring_attention() -> None:
    tasks, work = launched(**SMALL, cp=2, cp_comm_type="p2p", pp=2, global_batch_size=4)
    received = np.flatnonzero(tasks.kind == TaskKind.RECV)
    attention = tasks.layer[received] >= 0
    assert attention.any()
    assert not attention.all()
    assert not work.waits[received[attention]].any()
    assert work.waits[received[~attention]].all()


def test_captured_modules_are_launched_at_once() -> None:
    graphs = {"launch_mode": "cuda_graph"}
    _, eager = launched(**EXPERTS)
    _, parts = launched(
        Execution(**graphs, cuda_graph_modules=frozenset({"attn", "moe_router"})), **EXPERTS
    )
    _, whole = launched(Execution(**graphs), **EXPERTS)
    assert whole.seconds.sum() < parts.seconds.sum() < eager.seconds.sum()
    assert not whole.waits.any()


@cases
def test_frameworks_have_a_launch_mode(settings: dict[str, Any], hardware: str, mode: str) -> None:
    run = sw.Run(model="llama3-8b", **settings)
    assert launch_mode(run, Execution(), resolve(hardware)) == mode
    assert launch_mode(run, Execution(launch_mode="eager"), resolve(hardware)) == "eager"


@pytest.mark.parametrize(("engine", "mode"), [("vllm", "compile"), ("sglang", "eager"),
                                              ("trtllm", "eager")])  # fmt: skip
def test_engines_that_compile_no_steps_with_prompts_call_each_kernel(
    engine: Any, mode: str
) -> None:
    how = Execution(serving_engine=engine)
    chunk = [{"context_length": 512, "new_tokens": 64}, {"context_length": 512, "new_tokens": 1}]
    alone = {"mode": "prefill", "prompt_length": 64, "batch_size": 1, "context_length": 0}
    for settings in (alone, {"mode": "decode", "requests": chunk}):
        compiled = sw.compile(model="llama3-8b", layers=2, **settings)
        assert launch_mode(compiled.run, how, H100) == mode
    long = sw.compile(model="llama3-8b", layers=2, **alone | {"prompt_length": 513})
    assert launch_mode(long.run, how, H100) == ("piecewise" if engine == "vllm" else mode)
    tasks, work = launched(Execution(launch_mode="eager"), model="llama3-8b", layers=2, **alone)
    kernels = (tasks.kind == TaskKind.COMPUTE) & (work.seconds > 0)
    assert np.allclose(work.seconds[kernels], LAUNCH_COSTS["eager"].call * 1e-6)
    run = sw.Run(model="llama3-8b", mode="decode")
    assert launch_mode(run, how, H100) == "cuda_graph"


def test_small_kernels_wait_for_the_host() -> None:
    compiled = sw.compile("gpt2", layers=2, seq_length=64)
    steps = {
        mode: sw.simulate(compiled, "h100-sxm", launch_mode=mode)
        for mode in ("ahead", "cuda_graph", "compile", "eager")
    }
    assert steps["ahead"].mean.launches == 0
    assert steps["cuda_graph"].seconds == pytest.approx(steps["ahead"].seconds, rel=1e-2)
    assert steps["ahead"].seconds < steps["compile"].seconds < steps["eager"].seconds
    eager = steps["eager"]
    assert eager.mean.launches > 0.3 * eager.seconds
    assert eager.mean.total == pytest.approx(eager.seconds)
    assert eager.critical_path["launches"] > 0.3 * eager.seconds
    assert "launches" in str(eager.table("parts"))
    assert eager.to_dict()["mean"]["launches"] == eager.mean.launches


def test_blocking_launches_stand_between_all_kernels() -> None:
    """CUDA_LAUNCH_BLOCKING=1: a launch begins when what was launched before has ended."""
    compiled = sw.compile("gpt2", layers=1, seq_length=256)
    blocking = sw.simulate(compiled, "h100-sxm", launch_mode="blocking")
    ahead = sw.simulate(compiled, "h100-sxm", launch_mode="ahead")
    work = host_work(
        compiled.program, compiled.run, compiled.model, Execution(launch_mode="blocking"), H100
    )
    assert work is not None
    (launches,) = by_row(compiled.program, [work[0].seconds])
    assert blocking.seconds == pytest.approx(ahead.seconds + launches.sum(), rel=1e-3)


def test_a_slower_cpu_launches_more_slowly() -> None:
    compiled = sw.compile(**SMALL)
    grace = H100.model_copy(update={"host_factor": 1.5})
    ours = host_work(compiled.program, compiled.run, compiled.model, Execution(), H100)
    theirs = host_work(compiled.program, compiled.run, compiled.model, Execution(), grace)
    assert ours is not None
    assert theirs is not None
    assert np.allclose(theirs[0].seconds, 1.5 * ours[0].seconds)


def test_graphs_of_modules_need_graphs() -> None:
    with pytest.raises(UserError, match="cuda_graph_modules needs launch_mode=cuda_graph"):
        Execution(cuda_graph_modules=frozenset({"attn"}))
    with pytest.raises(UserError, match="there is no module 'attention'"):
        Execution(launch_mode="cuda_graph", cuda_graph_modules=frozenset({"attention"}))


def test_a_collective_that_is_checked_takes_the_host_as_long_as_its_group_has_ranks() -> None:
    """Hosts meet one by one (TORCH_DISTRIBUTED_DEBUG=DETAIL), over the network more slowly."""
    settings = {**SMALL, "dp": 4, "tp": 4, "sequence_parallel": True}
    tasks, free = launched(**settings)
    _, checked = launched(Execution(collective_checks=True), **settings)
    more = (checked.seconds - free.seconds) * 1e6
    collective = tasks.kind == TaskKind.COLLECTIVE
    assert not more[~collective].any()
    tp, dp = 4 * COLLECTIVE_CHECK["node"], 4 * COLLECTIVE_CHECK["network"]
    assert set(np.round(more[collective], 3)) == {tp, dp}


@cases
def test_compiled_graphs_launch_kernels_of_their_own(settings: dict[str, Any]) -> None:
    """No kernel is fused with one of another block, microbatch, or direction."""
    how, cost = Execution(launch_mode="compile"), LAUNCH_COSTS["compile"]
    t, work = launched(how, model="gpt2", layers=4, global_batch_size=8, **settings)
    columns = np.stack([t.stage, t.layer, t.microbatch, t.phase.astype(np.int32)])
    first = np.append(True, (np.diff(columns) != 0).any(axis=0))
    first &= (t.kind == TaskKind.COMPUTE) & (t.phase != PHASES.index("optimizer"))
    assert first.any()
    assert (work.seconds[first] * 1e6 > cost.graph + cost.kernel - 1e-6).all()


def test_a_layer_of_a_compiled_engine_ends_in_the_graph_of_the_next() -> None:
    """One kernel adds the residual and normalizes for the next layer."""
    t, work = launched(model="llama3-8b", layers=4, mode="prefill", prompt_length=64)
    names = np.array(t.names)[t.name]
    ends = np.flatnonzero(names == "layer1.mlp_residual")
    assert names[ends + 1].tolist() == ["layer2.attn_norm_out"]
    graph = LAUNCH_COSTS["compile"].graph
    assert np.allclose(work.seconds[ends + 1] * 1e6, graph)


def test_messages_are_not_checked_though_there_are_more_peers_than_groups() -> None:
    settings = {**SMALL, "layers": 3, "pp": 3, "clip_grad": False, "global_batch_size": 6}
    compiled = sw.compile(**settings)
    assert len(compiled.program.communicators) + 1 < len(compiled.program.peers)
    works = [
        host_work(
            compiled.program, compiled.run, compiled.model, Execution(collective_checks=on), H100
        )
        for on in (False, True)
    ]
    for free, checked in zip(*(work or [] for work in works), strict=True):
        assert np.array_equal(free.seconds, checked.seconds)


def test_parts_of_a_gather_of_all_parameters_are_copied_one_by_one() -> None:
    """Those of four ranks, of six weights of a layer, the table, the last norm and the head."""
    settings = {**SMALL, "dp": 4, "zero": 1}
    (t, one), (_, each) = (launched(bucket=bucket, **settings) for bucket in ("rank", "layer"))
    gather = (t.kind == TaskKind.COLLECTIVE) & (t.phase == PHASES.index("optimizer"))
    gather &= np.array([op == "all_gather" for op in t.ops])[t.op]
    assert gather.sum() == 1
    parameters = 2 * 6 + 3
    assert one.seconds[gather][0] == pytest.approx(60e-6 + 4 * parameters * 13.5e-6)
    assert each.seconds.max() < 1e-3


def test_hosts_that_send_metadata_take_the_time_for_each_message() -> None:
    settings = {**SMALL, "pp": 2, "global_batch_size": 4}
    tasks, free = launched(**settings)
    _, slow = launched(Execution(p2p_metadata_s=0.3), **settings)
    messages = np.isin(tasks.kind, (TaskKind.SEND, TaskKind.RECV))
    assert messages.any()
    assert np.allclose(slow.seconds - free.seconds, np.where(messages, 0.3, 0.0))
    with pytest.raises(UserError, match="p2p_metadata_s"):
        Execution(p2p_metadata_s=-1.0)


def test_heads_of_attention_that_no_kernel_fuses_are_one_kernel() -> None:
    """torch.baddbmm: not a kernel for each head, as grouped products have for each expert."""
    tasks, work = launched(**SMALL, flash_attention=False)
    heads = np.array([dict(s.extents).get("batch", 1) > 1 for s in tasks.shapes])
    products = heads[tasks.shape] & (tasks.kind == TaskKind.COMPUTE)
    assert products.sum() == 2 * 6  # scores and their product, and both gradients of each
    assert np.allclose(work.seconds[products], LAUNCH_COSTS["eager"].call * 1e-6)


def test_operators_that_no_framework_fuses_have_a_cost_of_their_own() -> None:
    tasks, work = launched(**SMALL, joint_projections=False, fuse=False)
    forward = (tasks.phase == PHASES.index("forward")) & (tasks.kind == TaskKind.COMPUTE)
    assert work.seconds[forward].min() == pytest.approx(LAUNCH_COSTS["operators"].call * 1e-6)


def test_an_operator_of_tensorrt_llm_is_one_call() -> None:
    """Per layer: four products, attention, glu and two all-reduces with the norms after them."""
    prompts = {
        "mode": "prefill",
        "prompt_length": 64,
        "batch_size": 1,
        "tp": 2,
        "precision": "bf16",
    }
    trtllm, sglang = (Execution(serving_engine=engine) for engine in ("trtllm", "sglang"))
    calls = [
        [np.count_nonzero(launched(how, model="llama3-8b", layers=n, **prompts)[1].seconds)
         for n in (2, 3)]
        for how in (trtllm, sglang)
    ]  # fmt: skip
    assert [more - few for few, more in calls] == [8, 14]


def test_experts_of_tensorrt_llm_are_one_call_but_those_of_triton() -> None:
    """`triton_kernels` of mxfp4 on GPUs without products in four bits are called from Python."""
    prompts = {"mode": "prefill", "prompt_length": 64, "batch_size": 1}
    how = Execution(serving_engine="trtllm")
    compiled = sw.compile(model="gpt-oss-20b", layers=2, **prompts)
    hopper, blackwell = (
        host_work(compiled.program, compiled.run, compiled.model, how, resolve(name))
        for name in ("h200", "b200")
    )
    assert hopper is not None
    assert blackwell is not None
    more = np.count_nonzero(hopper[0].seconds) - np.count_nonzero(blackwell[0].seconds)
    assert more == 2 * 6  # all but one of two copies, two products and three kernels between them
