"""Launches by the host of a rank: their cost, and results that it waits for.

A framework calls an operator for each kernel, in Python or from its autograd engine. The cost of a
call depends on `Execution.launch_mode` and on the CPU (`Hardware.host_factor`). The number of
kernels of a task follows from the task:

- a bias that the product before it adds has none (`time.fused_gemms`);
- the parts of a joint product (query, key and value) are one kernel;
- Megatron-LM loops over the experts of a rank: a product or a quantization of a grouped linear
  layer is a kernel per expert (`GroupedLinear` of Transformer Engine), and the loop over products
  is in C++;
- a quantization is two kernels: with one scale per tensor the maximum and the cast, with blocks the
  cast and the reordering of scales;
- unfused PyTorch operators (`operators` is eager) take `EAGER_KERNELS` kernels per op;
- `torch.compile` fuses element-wise operators that follow each other in a graph, and enters a
  compiled graph for each pass through a block;
- tasks of the optimizer are launched in a loop over all tensors (multi-tensor apply);
- an operator of TensorRT-LLM is one call, with all its kernels (`_within_operators`);
- a captured CUDA graph is one launch.

With `Execution.collective_checks` the hosts of a group synchronize before each of its collectives,
for a time that grows with the group (`COLLECTIVE_CHECK`).

The host waits where a framework reads a result: the norm that clips gradients and the number of
tokens of each expert (Megatron-LM), and messages of its 1F1B pipeline (`batch_p2p_sync`). With
CUDA_LAUNCH_BLOCKING=1 (`blocking`) an eager framework waits for every launch.

The host is one thread that launches tasks in issue order, without a gap, ahead of the GPU; a task
starts once it is launched and all its dependencies have ended. Where the host needs a result, it
waits for the end of that task before it launches the next one.

>>> waits = np.array([False, True, False])
>>> launched, last_wait = launch_times(np.array([2, 2, 2]), waits, np.array([12, 22, 34]))
>>> launched.tolist(), last_wait.issue_index.tolist(), last_wait.end.tolist()
([2, 4, 24], [-1, -1, 1], [0, 0, 22])
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.graph.table import OPS, Timing
from stagewright.lower.weight_storage import expert_weights
from stagewright.model.config import ModelConfig
from stagewright.program.columns import (
    COLLECTIVES,
    FORWARD_PHASE,
    OPTIMIZER_PHASE,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)
from stagewright.program.shapes import GEMM, ops_of, shape_mask
from stagewright.run.requests import groups, microbatches
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time.fused_gemms import joint_rows, within_products
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import timing_of


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Microseconds of a host with an x86 CPU."""

    call: float
    """To call an operator that launches one kernel."""
    kernel: float
    """For each further kernel of the same operator."""
    graph: float
    """To enter a compiled graph, or to launch a captured one."""


LAUNCH_COSTS: Mapping[str, LaunchCost] = {
    # Megatron-LM, and steps with prompts of servers. Fitted to the training rows of mixtures of
    # experts: 12.4% off, as much with a call of 70, 13.1% with 35 for a further kernel.
    # torch.nn.Linear takes 13.5 us (github.com/NVIDIA/TransformerEngine, issue 2053): modules,
    # autograd's functions, and collectives take more. A captured part of a layer is called like an
    # operator. Nothing was fitted to servers: 89 TTFTs of mixtures of experts that AIConfigurator
    # published (H100, H200, B200 and B300, up to 32 users) are 31% off on average, 38% with 35 us.
    "eager": LaunchCost(call=60.0, kernel=25.0, graph=60.0),
    # Unfused operators of PyTorch (`fuse` is off). Fitted to the rows of nanotron on one to four
    # nodes of H100 without collective checks: 5.9% off, 6.6% on those held out
    # (benchmarks/fit_host.py).
    "operators": LaunchCost(call=70.0, kernel=25.0, graph=70.0),
    # An Inductor kernel of 19 arguments, and the entry of a compiled graph: 9.1 and 33 us
    # (github.com/meta-pytorch/tritonbench, pull requests 1017 and 1016).
    "compile": LaunchCost(call=9.1, kernel=9.1, graph=33.0),
    # A graph without branches: 2.5 us (NVIDIA, "Constant time launch for straight-line CUDA
    # graphs", CUDA 12.6).
    "cuda_graph": LaunchCost(call=0.0, kernel=0.0, graph=2.5),
}
"""By launch mode; `operators`: eager, unfused operators of PyTorch."""

TENSOR_LAUNCH = 1.3
"""Microseconds of each further launch in a loop in C++: `cuLaunchKernel` on a host with an x86 CPU
(github.com/meta-pytorch/tritonbench, pull request 1016)."""

PRODUCT_LAUNCH = 9.2
"""Microseconds of each further product of a grouped linear layer, launched in a loop in C++.

80 to 256 experts of few rows take 9.2 to 9.4 us each in Transformer Engine's `GroupedLinear` on
B200, whatever their sizes (configs/system/b200_bf16_ceperm.json of github.com/MooreThreads/SimuMax,
Apache-2.0)."""

SHARD_COPY = 13.5
"""Microseconds of a copy of a parameter's shard out of the buffer of one rank, called from Python:
as an operator of PyTorch on DGX H100 (`torch.nn.Linear`: Transformer Engine, issue 2053). Without
it, rows of nanotron with at least 6,000 shards lack 8 to 18 us per shard."""

COLLECTIVE_CHECK: Mapping[str, float] = {"node": 192.0, "network": 284.0}
"""Microseconds per rank of the group that a collective's check takes on every host
(`Execution.collective_checks`), for groups within a node and for others. Hosts enter a barrier over
TCP one by one, then compare their collectives. From the collectives of 1 GiB at the start of the
jobs of nanotron's sweep, with and without checks, on 1 to 64 nodes (`benchmarks/fit_host.py`); not
from step times."""

UNFUSED_KERNELS: Mapping[str, int] = {
    "glu": 2,  # act, mul
    "glu_bwd": 4,  # mul, mul, act's gradient, cat
    "norm_bwd": 2,  # gradients of the input, sums of those of the weight
    "attention_bwd": 3,  # of FlashAttention: sums of rows, gradients, cast of the query's
}
"""Kernels per op where no compiler or fused kernel joins them (`fuse` is off)."""

CAST_KERNELS: Mapping[str, int] = {"tensorwise": 4}
"""Launches of a quantization by recipe; default two: the maximum and the cast. With current scaling
Transformer Engine zeroes the maximum, computes it, computes a scale
(`nvte_compute_scale_from_amax`) and casts (`Float8CurrentScalingQuantizer`)."""

EAGER_KERNELS: Mapping[str, int] = {
    **UNFUSED_KERNELS,
    "rope": 5,  # rotate_half: neg, cat; mul, mul, add
    "mean_square": 2,  # pow, mean
    "mean_square_bwd": 3,  # div, pow, mul
    "rms_scale": 3,  # add, rsqrt, mul
    "rms_scale_bwd": 5,  # mul, mul, sum, pow, mul
}
"""Kernels per unfused op of PyTorch; one for all other ops."""

MAX_GRAPH_TOKENS = 512
"""Tokens of a step with prompts up to which vLLM replays graphs of the pieces of its compiled model
(`max_cudagraph_capture_size` in the log of a server of vLLM 0.19,
casys-kaist/LLMServingSim@5daddb21)."""

_WHOLE_PROGRAMS = ("Google", "AWS")
"""Vendors whose compilers (XLA, Neuron) compile a step to one program."""


class HostWork(NamedTuple):
    """Launches of the host of a rank class, by row of its tasks."""

    seconds: Float  # of the launch
    waits: Bool  # the host waits for the end of the task before it launches the next one


def launch_mode(
    run: Run, execution: Execution, hardware: Hardware, tokens: int | None = None
) -> str:
    """Launch mode of an execution, or else the default of the run's framework.

    Megatron-LM runs eagerly, torchtitan compiles its blocks; servers capture steps of decode as
    CUDA graphs. vLLM has graphs of the pieces of a step with prompts, too, up to
    `MAX_GRAPH_TOKENS`; in larger ones (`piecewise`) it calls all but element-wise kernels one by
    one: attention, experts, collectives and products in few bits are custom operators.
    TensorRT-LLM (`torch_compile_config` is off) and SGLang before 0.5.10 run steps with prompts
    eagerly. The piecewise graphs of SGLang 0.5.10 (`--disable-piecewise-cuda-graph`) are not
    modelled. A step of a TPU is one program.

    `tokens`: tokens of a rank in a step of inference; None: those of the run.
    """
    if execution.launch_mode is not None:
        return execution.launch_mode
    if hardware.vendor in _WHOLE_PROGRAMS:
        return "ahead"
    if run.mode == "train":
        return {"megatron": "eager", "torchtitan": "compile"}[run.framework]
    # Full graphs are captured for steps without prompts: by vLLM (`FULL_AND_PIECEWISE`), SGLang and
    # TensorRT-LLM. Steps with a chunk of a prompt are launched kernel by kernel.
    if run.mode == "decode" and not _computes_prompts(run):
        return "cuda_graph"
    if execution.serving_engine == "vllm":
        tokens = _rank_tokens(run) if tokens is None else tokens
        return "compile" if tokens <= MAX_GRAPH_TOKENS else "piecewise"
    return "eager" if execution.serving_engine in ("sglang", "trtllm") else "compile"


def _rank_tokens(run: Run) -> int:
    """New tokens of a rank in one batch of a resolved step of inference."""
    tokens = sum(group.count * (group.new_tokens or 0) for group in groups(run))
    return -(-tokens // (run.dp * microbatches(run)))


def loops_over_experts(run: Run, execution: Execution, hardware: Hardware) -> bool:
    """True if the products of a rank's experts are launched one by one.

    Megatron-LM's grouped linear layers (`GroupedLinear` of Transformer Engine). Whole steps can be
    captured without dropping tokens only if one kernel reads the numbers of rows from memory
    (docs/training/moe-optimization.md of Megatron-Bridge).
    """
    if run.mode != "train" or run.framework != "megatron":
        return False
    graph = launch_mode(run, execution, hardware) == "cuda_graph"
    drops = run.moe_expert_capacity_factor is not None
    return drops or not graph or bool(execution.cuda_graph_modules)


def _computes_prompts(run: Run) -> bool:
    """True if a resolved decode step also computes chunks of prompts."""
    tokens = 1 + run.num_speculative_tokens
    return any((group.new_tokens or 0) > tokens for group in groups(run))


def host_work(
    program: Program,
    run: Run,
    model: ModelConfig,
    execution: Execution,
    hardware: Hardware,
    tokens: int | None = None,
) -> list[HostWork] | None:
    """Launches of each rank class, by row of its actions; None: they take no time.

    `tokens`: as `launch_mode`.
    """
    mode = launch_mode(run, execution, hardware, tokens)
    if mode == "ahead":
        return None
    # Ranks that compute prompts are first.
    prefill = run.model_copy(update={"mode": "prefill"})
    num_prefill_ranks = run.prefill_ranks.world_size if run.prefill_ranks else 0
    prefill_mode = launch_mode(prefill, execution, hardware, tokens) if num_prefill_ranks else mode
    checks = _checks(program, hardware) if execution.collective_checks else None
    sizes = np.array([*(group.size for group in _groups(program)), 0])
    copies = SHARD_COPY * 1e-6 * hardware.host_factor * sizes
    cache: dict[tuple[int, str], HostWork] = {}
    work: list[HostWork] = []
    for rank_class in program.classes:
        tasks = rank_class.work.actions.tasks
        class_mode = prefill_mode if rank_class.ranks[0] < num_prefill_ranks else mode
        key = id(tasks), class_mode
        if key not in cache:
            launches = _launches(program, tasks, class_mode, run, model, execution, hardware)
            if checks is not None:
                seconds = launches.seconds + _by_communicator(tasks, checks)
                launches = launches._replace(seconds=seconds)
            cache[key] = launches
        launches = cache[key]
        if run.bucket == "rank" and run.zero:
            copy_seconds = _shard_copy_seconds(rank_class, copies, run.microbatches)
            launches = launches._replace(seconds=launches.seconds + copy_seconds)
        work.append(launches)
    return work


def _groups(program: Program) -> list[Int]:
    """Ranks of the group of rank 0, by communicator."""
    first = np.zeros(1, np.int64)
    return [program.members(slot, first) for slot in range(len(program.communicators))]


def _shard_copy_seconds(rank_class: RankClass, by_slot: Float, microbatches: int) -> Float:
    """Seconds of copies after one gather of all updated parameters.

    nanotron's `all_gather_coalesced` copies the shard of each parameter of each rank of the group.
    Weights that are one product are one parameter.
    """
    tasks, order = rank_class.work.actions.tasks, rank_class.work.order
    gathers = tasks.collective == COLLECTIVES.index("all_gather")
    updates = _computes(tasks, {"adamw", "sgd"})
    joint = joint_rows(_unmeasured(tasks))
    forward = (tasks.phase[joint.rows] == FORWARD_PHASE) & (tasks.microbatch[joint.rows] >= 0)
    _, first = np.unique(joint.whole[forward], return_index=True)
    merged = np.zeros(len(tasks), np.int64)
    merged[joint.rows[forward]] = 1
    merged[joint.rows[forward][first]] = 0
    before = np.cumsum([updates.astype(np.int64), merged], axis=1)
    before = np.concatenate([np.zeros((2, 1), np.int64), before], axis=1)
    by_action = np.diff(before[:, rank_class.work.actions.begin], axis=1)
    num_updated, num_merged = by_action[:, order.action].sum(axis=1).tolist()
    parameters = num_updated - num_merged // microbatches
    in_optimizer = gathers & (tasks.phase == OPTIMIZER_PHASE)
    return _by_communicator(tasks, by_slot) * np.where(in_optimizer, parameters, 0)


def _by_communicator(tasks: Tasks, by_slot: Float) -> Float:
    """Seconds of each collective's communicator; the last of `by_slot` (0) for other tasks."""
    return by_slot[np.where(tasks.kind == TaskKind.COLLECTIVE, tasks.slot, -1)]


def _checks(program: Program, hardware: Hardware) -> Float:
    """Seconds of the check of a collective, by communicator."""
    groups = _groups(program)
    nodes = [group // hardware.gpus_per_node for group in groups]
    micros = [
        group.size * COLLECTIVE_CHECK["node" if np.ptp(node) == 0 else "network"]
        for group, node in zip(groups, nodes, strict=True)
    ]
    return np.array([*micros, 0.0]) * 1e-6


def _launches(
    program: Program,
    tasks: Tasks,
    mode: str,
    run: Run,
    model: ModelConfig,
    execution: Execution,
    hardware: Hardware,
) -> HostWork:
    """Launches of tasks without checks and copies of shards."""
    waits = _waits(program, tasks, run)
    captured = np.zeros(len(tasks), dtype=bool)
    if mode == "blocking":
        mode, waits = "eager", np.ones(len(tasks), dtype=bool)
    if mode == "cuda_graph":
        captured = _captured(tasks, execution.cuda_graph_modules)
        mode = "eager" if execution.cuda_graph_modules else mode
        waits &= ~captured
    eager = "eager" if run.fuse else "operators"
    cost = LAUNCH_COSTS[eager if mode in ("eager", "piecewise") else mode]
    kernels, further = _kernels(tasks, run), np.full(len(tasks), cost.kernel)
    if loops_over_experts(run, execution, hardware):
        products = shape_mask(tasks, lambda shape: shape.kernel == GEMM)
        further[products & (_modules(tasks) == "moe")] = min(cost.kernel, PRODUCT_LAUNCH)
    if mode in ("compile", "piecewise"):
        kernels[_follows_fusable(tasks, run)] = 0
    elif run.mode != "train" and execution.serving_engine == "trtllm":
        triton = expert_weights(run, model) == "mxfp4" and hardware.peak_fp4_tflops is None
        kernels = np.minimum(kernels, 1)
        kernels[_within_operators(tasks, experts=not triton)] = 0
    micros = np.where(kernels > 0, cost.call, 0.0) + np.maximum(kernels - 1, 0) * further
    in_loop = (tasks.kind == TaskKind.COMPUTE) & (tasks.phase == OPTIMIZER_PHASE)
    micros[in_loop] = min(cost.call, TENSOR_LAUNCH)
    messages = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
    micros[messages] += execution.p2p_metadata_s * 1e6 / hardware.host_factor
    micros[captured] = 0.0
    if captured.any():
        micros[_first_of_runs(tasks, captured)] += cost.graph
    elif mode == "compile":
        micros[_first_of_runs(tasks, tasks.kind == TaskKind.COMPUTE)] += cost.graph
    return HostWork(micros * 1e-6 * hardware.host_factor, waits)


def _computes(tasks: Tasks, names: Set[str]) -> Bool:
    """Mask of rows with one of some ops, alone or fused with others."""
    return np.array([not names.isdisjoint(ops_of(op)) for op in tasks.ops], dtype=bool)[tasks.op]


# ---- counts --------------------------------------------------------------------------------------


def _kernels(tasks: Tasks, run: Run) -> Float:
    """Number of kernels that a framework launches for each task."""
    count = _kernels_by_shape(tasks, run)
    joint = joint_rows(_unmeasured(tasks))  # measured or not, one kernel
    _, first = np.unique(joint.whole, return_index=True)
    count[np.delete(joint.rows, first)] = 0
    if run.mode == "train":
        count[within_products(tasks)] = 0
    return count


def _unmeasured(tasks: Tasks) -> Tasks:
    return tasks if tasks.duration is None else replace(tasks, duration=None)


def _kernels_by_shape(tasks: Tasks, run: Run) -> Float:
    """Number of kernels of each task, from its shape."""
    loops_over_experts = run.mode == "train" and run.framework == "megatron"
    kernels, products = [1.0], [1.0]  # of rows without a shape
    for shape in tasks.shapes:
        extents, ops = shape.sizes(), ops_of(shape.kernel)
        count = 1
        if "cast" in ops and run.precision not in ("bf16", "fp32"):
            casts = CAST_KERNELS.get(run.fp8_recipe or "", 2)
            count = casts * (extents.get("e", 1) if loops_over_experts else 1)
        elif not run.fuse and shape.kernel != GEMM:
            table = EAGER_KERNELS if run.operators == "eager" else UNFUSED_KERNELS
            count = max(table.get(op, 1) for op in ops)
        kernels.append(max(count, 1.0))
        products.append(max(extents["batch"], 1.0) if shape.kernel == GEMM else 1.0)
    counts = np.array(kernels)[tasks.shape + 1]
    if loops_over_experts and max(products) > 1:
        # Heads of unfused attention are one product (torch.baddbmm), experts many.
        counts *= np.where(_modules(tasks) == "moe", np.array(products)[tasks.shape + 1], 1.0)
    return counts


def _follows_fusable(tasks: Tasks, run: Run) -> Bool:
    """Mask of element-wise kernels that a compiler fuses with the row before.

    Both are rows of one graph. Training compiles each block separately, and forward and backward
    separately (torchtitan's `apply_compile`). An engine compiles the model and splits it at
    attention (vLLM's `splitting_ops`), so that the end of a layer and the start of the next are one
    graph.
    """
    fuses = [all(OPS[op].fuses for op in ops_of(name) if op in OPS) for name in tasks.ops]
    fusable = np.array(fuses)[tasks.op] & (tasks.kind == TaskKind.COMPUTE)
    columns = (tasks.stage, tasks.microbatch)
    graph = _passes(tasks) if run.mode == "train" else _numbered_runs(*columns)
    follows = fusable[1:] & fusable[:-1] & (np.diff(graph) == 0)
    return np.append(False, follows)


def _within_operators(tasks: Tasks, *, experts: bool) -> Bool:
    """Mask of rows that an operator of TensorRT-LLM computes with another row.

    Attention also rotates, writes its cache and quantizes its result; an all-reduce adds and
    normalizes; `experts`: one operator computes them, with the copies of tokens. They are operators
    of NVIDIA/TensorRT-LLM `tensorrt_llm/_torch`: attention with `RopeParams`, all-reduces with
    `AllReduceFusionOp.RESIDUAL_RMS_NORM`, a fused mixture of experts, which Triton's backend lacks.
    Nothing was fitted.
    """
    within = np.zeros(len(tasks), dtype=bool)
    attention = _computes(tasks, {"rope", "cache", "cached_attention"})
    attention[1:] |= attention[:-1] & _computes(tasks, {"cast"})[1:]
    routed = (_modules(tasks) == "moe") & experts
    for operator in (attention, routed):
        rows = np.flatnonzero(operator)
        _, first = np.unique(_passes(tasks)[rows], return_index=True)
        within[np.delete(rows, first)] = True
    reduces = tasks.collective == COLLECTIVES.index("all_reduce")
    adds, norms = _computes(tasks, {"add"}), _computes(tasks, {"norm"})
    within[1:] |= adds[1:] & reduces[:-1]
    within[1:] |= norms[1:] & adds[:-1]
    return within


def _passes(tasks: Tasks) -> Int:
    """Number of the pass through a block of the model, by row."""
    return _numbered_runs(tasks.stage, tasks.layer, tasks.microbatch, tasks.phase)


def _numbered_runs(*columns: NDArray[np.integer]) -> Int:
    """Number of the run of successive rows with equal columns, by row."""
    new = [np.diff(column.astype(np.int64)) != 0 for column in columns]
    return np.cumsum(np.append(True, np.any(new, axis=0)))


def _first_of_runs(tasks: Tasks, mask: Bool) -> Bool:
    """Mask of first rows of runs within `mask`, in each pass through a block."""
    number = np.where(mask, _passes(tasks), 0)
    return mask & (np.diff(number, prepend=0) != 0)


# ---- CUDA graphs ---------------------------------------------------------------------------------

_ROUTER = frozenset({"topk", "topk_bwd", "scores", "scores_bwd", "count", "aux_loss",
                     "aux_loss_bwd", "z_loss", "z_loss_bwd"})  # fmt: skip
_PREPROCESS = frozenset({"splits", "routes"})
_MIXERS = frozenset({"attn", "mlp", "mamba"})


def _captured(tasks: Tasks, modules: frozenset[str]) -> Bool:
    """Mask of rows in captured graphs: those of `modules`, or all if it is empty."""
    if not modules:
        return np.ones(len(tasks), dtype=bool)
    names = set(modules) - _MIXERS
    if modules & _MIXERS:
        names.add("attn")
    captured = np.isin(_modules(tasks), sorted(names)) & (tasks.microbatch >= 0)
    return captured & (tasks.phase != OPTIMIZER_PHASE)


def _modules(tasks: Tasks) -> NDArray[np.str_]:
    """Module of a layer that each row belongs to, by Megatron-LM's name; "": none."""
    router, counts = _computes(tasks, _ROUTER), _computes(tasks, _PREPROCESS)
    copies = {Timing.TO_EXPERTS, Timing.FROM_EXPERTS}
    kernels = [timing_of(shape.kernel) in copies for shape in tasks.shapes]
    is_copy = np.array([*kernels, False])[tasks.shape]
    # Experts are between the first and the last copy of tokens of a pass.
    block = _passes(tasks)
    total = np.cumsum(is_copy)
    begin = np.searchsorted(block, block)
    end = np.searchsorted(block, block, side="right") - 1
    copies_before = total - total[begin] + is_copy[begin]
    copies_after = total[end] - total + is_copy
    experts = (copies_before > 0) & (copies_after > 0)
    module = np.where(tasks.layer >= 0, "attn", "")
    module = np.where(experts, "moe", module)
    module = np.where(router & ~experts, "moe_router", module)
    return np.where(counts & ~router, "moe_preprocess", module)


# ---- waits ---------------------------------------------------------------------------------------


def _waits(program: Program, tasks: Tasks, run: Run) -> Bool:
    """Mask of rows whose results the host reads before it launches the next.

    Megatron-LM's `_communicate` between stages ends in `torch.cuda.synchronize()`. For messages of
    ring attention streams wait, not the host (`flash_attn_p2p_communicate` of Transformer Engine,
    whose requests are NCCL's).
    """
    waits = np.zeros(len(tasks), dtype=bool)
    if run.mode != "train":
        return waits
    if run.moe_expert_capacity_factor is None:
        # The host sizes buffers of experts by the counts of their tokens.
        counts_exchange = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.phase == FORWARD_PHASE)
        counts_exchange &= np.array([dtype == "int64" for dtype in tasks.dtypes])[tasks.dtype]
        chooses = _computes(tasks, {"topk"}) & (tasks.kind == TaskKind.COMPUTE)
        waits |= counts_exchange if counts_exchange.any() else chooses
    if run.framework == "megatron":
        clips = _computes(tasks, {"divide"})
        waits |= clips & (tasks.phase == OPTIMIZER_PHASE) & (tasks.kind == TaskKind.COMPUTE)
        schedule = SCHEDULES.get(run.schedule or "")
        if run.vpp == 1 and not (schedule and schedule.asynchronous):
            between_stages = np.array([peer.axis == "pp" for peer in program.peers] + [False])
            messages = tasks.kind == TaskKind.RECV
            waits |= messages & between_stages[np.where(messages, tasks.slot, -1)]
    return waits


# ---- times ---------------------------------------------------------------------------------------


class LastHostWait(NamedTuple):
    """Last task that the host waited for before each launch, by issue index."""

    issue_index: Int  # of the task, -1 for none
    end: Int  # of the task: ticks


def launch_times(cost: Int, waits: Bool, ends: Int) -> tuple[Int, LastHostWait]:
    """End of each launch, and the last wait before it.

    Arrays are by issue index, times in ticks. `ends`: of the tasks that are launched.
    """
    total = cost.cumsum()
    delay = np.zeros_like(ends)
    delay[1:] = np.where(waits[:-1], ends[:-1] - total[:-1], 0)
    latest = np.maximum.accumulate(np.maximum(delay, 0))
    increases = np.diff(latest, prepend=0) > 0
    index = np.where(increases, np.arange(-1, len(ends) - 1), -1)
    index = np.maximum.accumulate(index)
    end = np.where(index == -1, 0, latest + total[index])
    return total + latest, LastHostWait(index, end)
