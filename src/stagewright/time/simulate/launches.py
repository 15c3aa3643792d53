"""How long the host of a rank takes to launch its tasks, and for which results it waits.

A framework calls an operator for each kernel, in Python or from its autograd engine. What a call
costs depends on how the framework runs a step (`Execution.launch_mode`) and on the CPU
(`Hardware.host_factor`). How many kernels a task stands for follows from the task:

- a bias that the product before it adds has none (`time.fused_products`);
- the parts of a joint product (query, key and value) are one kernel together;
- Megatron-LM goes through the experts of a rank one by one: a product or a quantization of a
  grouped linear layer is a kernel for each of them (`GroupedLinear` of Transformer Engine);
- a quantization is two kernels: of one scale per tensor the maximum and the cast, of blocks the
  cast and the order of the scales that products want;
- where operators are PyTorch's own (`operators` is eager), `EAGER_KERNELS` says how many kernels
  make an op that others have as one;
- `torch.compile` makes one kernel of element-wise operators that follow each other in a graph, and
  enters a compiled graph for each pass through a block;
- tasks of the optimizer are launched in a loop over all tensors (multi-tensor apply);
- a captured CUDA graph is launched at once.

With `Execution.collective_checks` the hosts of a group meet before each of its collectives, for a
time that grows with the group (`COLLECTIVE_CHECK`).

The host waits where a framework reads a result: the norm that clips gradients and the number of
tokens of each expert (Megatron-LM), and messages of its 1F1B pipeline (`batch_p2p_sync`). With
CUDA_LAUNCH_BLOCKING=1 (`blocking`) a framework that runs eagerly waits for all that it launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Bool, Float, Int
from stagewright.graph.table import OPS, Timing
from stagewright.program.columns import (
    COLLECTIVES,
    PHASES,
    Program,
    RankClass,
    TaskKind,
    Tasks,
)
from stagewright.program.shapes import GEMM, ops_of
from stagewright.run.requests import groups
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.cost import timing_of
from stagewright.time.fused_products import joint_rows, within_products
from stagewright.time.hardware import Hardware
from stagewright.time.simulate.host import HostWork

_FORWARD, _OPTIMIZER = PHASES.index("forward"), PHASES.index("optimizer")


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
    # Megatron-LM. Fitted to the rows of mixtures of experts in Megatron-Bridge that may be fitted
    # to: 13.9% off, 14.0% with a call of 70 (docs/time.md, "The host"). torch.nn.Linear alone takes
    # 13.5 us (github.com/NVIDIA/TransformerEngine, issue 2053): modules, autograd's functions, and
    # collectives take more. A captured part of a layer is called like an operator.
    "eager": LaunchCost(call=60.0, kernel=25.0, graph=60.0),
    # Steps with prompts of SGLang and TensorRT-LLM, without autograd. Fitted to medians of first
    # tokens of 17 of InferenceX' closed loops of DeepSeek-R1: 20% off, 24% where the steps were
    # compiled; 3 that are held out: 22% and 27%.
    "serving": LaunchCost(call=35.0, kernel=17.0, graph=35.0),
    # PyTorch's operators one by one, where no framework fuses them (`fuse` is off). Fitted to the
    # rows of nanotron on one to four nodes of H100 whose collectives were not checked: 5.9% off,
    # 6.6% on those held out (benchmarks/fit_host.py).
    "operators": LaunchCost(call=70.0, kernel=25.0, graph=70.0),
    # An Inductor kernel of 19 arguments, and what it takes to enter a compiled graph: 9.1 and 33 us
    # (github.com/meta-pytorch/tritonbench, pull requests 1017 and 1016).
    "compile": LaunchCost(call=9.1, kernel=9.1, graph=33.0),
    # A graph without branches: 2.5 us (NVIDIA, "Constant time launch for straight-line CUDA
    # graphs", CUDA 12.6).
    "cuda_graph": LaunchCost(call=0.0, kernel=0.0, graph=2.5),
}
"""By launch mode; `operators`: eager, where PyTorch's operators are called one by one; `serving`:
eager, in steps of inference."""

TENSOR_LAUNCH = 1.3
"""Microseconds of each further launch in a loop in C++: `cuLaunchKernel` on a host with an x86 CPU
(github.com/meta-pytorch/tritonbench, pull request 1016)."""

PART_COPY = 13.5
"""Microseconds to copy a part of a parameter from a buffer that holds those of one rank, called
from Python: as an operator of PyTorch on DGX H100 (`torch.nn.Linear`: Transformer Engine, issue
2053). Rows of nanotron with 6,000 parts and more miss 8 to 18 us for each without it."""

COLLECTIVE_CHECK: Mapping[str, float] = {"node": 192.0, "network": 284.0}
"""Microseconds for each rank of its group that a collective's check takes on every host of the
group (`Execution.collective_checks`), for groups within a node and for others. Hosts meet one by
one at a barrier over TCP, and then compare what they are about to run. From the collectives of
1 GiB with which the jobs of nanotron's sweep began, those that checked beside those that did not,
over 1 to 64 nodes (`benchmarks/fit_host.py`); no step time is in it."""

UNFUSED_KERNELS: Mapping[str, int] = {
    "glu": 2,  # act, mul
    "glu_bwd": 4,  # mul, mul, act's gradient, cat
    "norm_bwd": 2,  # gradients of the input, sums of those of the weight
    "attention_bwd": 3,  # of FlashAttention: sums of rows, gradients, cast of the query's
}
"""How many kernels make an op where no compiler or fused kernel joins them (`fuse` is off)."""

CAST_KERNELS: Mapping[str, int] = {"tensorwise": 4}
"""Launches of a quantization by recipe, two where nothing is said: the maximum and the cast. With
scales of today Transformer Engine zeroes the maximum, finds it, makes a scale of it
(`nvte_compute_scale_from_amax`) and casts (`Float8CurrentScalingQuantizer`)."""

EAGER_KERNELS: Mapping[str, int] = {
    **UNFUSED_KERNELS,
    "rope": 5,  # rotate_half: neg, cat; mul, mul, add
    "mean_square": 2,  # pow, mean
    "mean_square_bwd": 3,  # div, pow, mul
    "rms_scale": 3,  # add, rsqrt, mul
    "rms_scale_bwd": 5,  # mul, mul, sum, pow, mul
}
"""How many kernels make an op where operators are PyTorch's own; of all others: one."""


ASYNCHRONOUS = ("zb-h1", "zb-h2", "interlaced", "vocab-1", "vocab-2")
"""Schedules of one stage per rank that do not run in Megatron-LM's loop of 1F1B: the runtime of
zero bubble posts messages of its own, for which streams wait and not the host
(github.com/sail-sg/zero-bubble-pipeline-parallelism, pipeline_parallel/zerobubble/runtime.py), and
with `enable_vocab_parallel` messages are not synchronized with the host, either
(github.com/sail-sg/VocabularyParallelism, pipeline_parallel/p2p_communication.py)."""

_WHOLE_PROGRAMS = ("Google", "AWS")
"""Vendors whose compilers (XLA, Neuron) make one program of a step."""


def launch_mode(run: Run, how: Execution, hardware: Hardware) -> str:
    """How the framework of a run launches kernels, where `how` does not say so.

    Megatron-LM runs eagerly, torchtitan compiles its blocks; servers capture steps of decode as
    CUDA graphs. vLLM compiles steps with prompts; TensorRT-LLM (`torch_compile_config` is off) and
    SGLang before 0.5.10 run them eagerly. SGLang 0.5.10 captures them in pieces
    (`--disable-piecewise-cuda-graph` turns that off), which is not modelled. A step of a TPU is one
    program.
    """
    if how.launch_mode is not None:
        return how.launch_mode
    if hardware.vendor in _WHOLE_PROGRAMS:
        return "ahead"
    if run.mode == "train":
        return {"megatron": "eager", "torchtitan": "compile"}[run.framework]
    # Graphs are captured for steps that decode alone: vLLM's whole ones (`FULL_AND_PIECEWISE`), and
    # those of SGLang and TensorRT-LLM. A chunk of a prompt beside the tokens is launched.
    if run.mode == "decode" and not _computes_prompts(run):
        return "cuda_graph"
    return "eager" if how.serving_engine in ("sglang", "trtllm") else "compile"


def _computes_prompts(run: Run) -> bool:
    """Whether a resolved decode step computes chunks of prompts besides."""
    tokens = 1 + run.num_speculative_tokens
    return any((group.new_tokens or 0) > tokens for group in groups(run))


def host_work(
    program: Program, run: Run, how: Execution, hardware: Hardware
) -> list[HostWork] | None:
    """Launches of each rank class, by row of its actions; None: the host is never waited for."""
    mode = launch_mode(run, how, hardware)
    if mode == "ahead":
        return None
    # The ranks that compute prompts come first.
    prompts = run.model_copy(update={"mode": "prefill"})
    first = run.prefill_ranks.world_size if run.prefill_ranks else 0
    checks = _checks(program, hardware) if how.collective_checks else None
    sizes = np.array([*(group.size for group in _groups(program)), 0])
    copies = PART_COPY * 1e-6 * hardware.host_factor * sizes
    known: dict[tuple[int, str], HostWork] = {}
    work: list[HostWork] = []
    for of in program.classes:
        tasks = of.work.actions.tasks
        launched = launch_mode(prompts, how, hardware) if of.ranks[0] < first else mode
        key = id(tasks), launched
        if key not in known:
            made = _of_tasks(program, tasks, launched, run, how, hardware)
            if checks is not None:
                made = made._replace(seconds=made.seconds + _of_collectives(tasks, checks))
            known[key] = made
        each = known[key]
        if run.bucket == "rank" and run.zero:
            each = each._replace(seconds=each.seconds + _of_parts(of, copies, run.microbatches))
        work.append(each)
    return work


def _groups(program: Program) -> list[Int]:
    """By communicator the ranks of the group of rank 0."""
    first = np.zeros(1, np.int64)
    return [program.members(slot, first) for slot in range(len(program.communicators))]


def _of_parts(of: RankClass, by_slot: Float, microbatches: int) -> Float:
    """The seconds of copying what one gather of all updated parameters brings.

    nanotron's `all_gather_coalesced` copies the part that each rank of the group has of each
    parameter. Weights that are one product are one parameter.
    """
    tasks, order = of.work.actions.tasks, of.work.order
    gathers = tasks.collective == COLLECTIVES.index("all_gather")
    updates = np.array(["adamw" in ops_of(op) or "sgd" in ops_of(op) for op in tasks.ops])[tasks.op]
    joint = joint_rows(_unmeasured(tasks))
    forward = (tasks.phase[joint.rows] == _FORWARD) & (tasks.microbatch[joint.rows] >= 0)
    _, first = np.unique(joint.whole[forward], return_index=True)
    merged = np.zeros(len(tasks), np.int64)
    merged[joint.rows[forward]] = 1
    merged[joint.rows[forward][first]] = 0
    before = np.cumsum([updates.astype(np.int64), merged], axis=1)
    before = np.concatenate([np.zeros((2, 1), np.int64), before], axis=1)
    of_action = np.diff(before[:, of.work.actions.begin], axis=1)
    updated, joined = of_action[:, order.action].sum(axis=1).tolist()
    parameters = updated - joined // microbatches  # each passes through all products
    inside = gathers & (tasks.phase == _OPTIMIZER)
    return _of_collectives(tasks, by_slot) * np.where(inside, parameters, 0)


def _of_collectives(tasks: Tasks, by_slot: Float) -> Float:
    """The seconds of each collective's communicator, the last of `by_slot` (0) for other tasks.

    Slots of messages are those of peers, of which there may be more.
    """
    return by_slot[np.where(tasks.kind == TaskKind.COLLECTIVE, tasks.slot, -1)]


def _checks(program: Program, hardware: Hardware) -> Float:
    """By communicator the seconds that its hosts compare a collective before it runs."""
    groups = _groups(program)
    nodes = [group // hardware.gpus_per_node for group in groups]
    micros = [
        group.size * COLLECTIVE_CHECK["node" if np.ptp(at) == 0 else "network"]
        for group, at in zip(groups, nodes, strict=True)
    ]
    return np.array([*micros, 0.0]) * 1e-6


def _of_tasks(
    program: Program, tasks: Tasks, mode: str, run: Run, how: Execution, hardware: Hardware
) -> HostWork:
    waits = _waits(program, tasks, run)
    captured = np.zeros(len(tasks), dtype=bool)
    if mode == "blocking":
        mode, waits = "eager", np.ones(len(tasks), dtype=bool)
    if mode == "cuda_graph":
        captured = _captured(tasks, how.cuda_graph_modules)
        mode = "eager" if how.cuda_graph_modules else mode
        waits &= ~captured
    eager = "operators" if not run.fuse else "eager" if run.mode == "train" else "serving"
    cost = LAUNCH_COSTS[eager if mode == "eager" else mode]
    kernels = _kernels(tasks, run)
    if mode == "compile":
        kernels[_follows_fusable(tasks, run)] = 0
    loop = (tasks.kind == TaskKind.COMPUTE) & (tasks.phase == _OPTIMIZER)
    further = np.maximum(kernels - 1, 0)
    micros = np.where(kernels > 0, cost.call, 0.0) + further * cost.kernel
    micros[loop] = min(cost.call, TENSOR_LAUNCH)
    messages = (tasks.kind == TaskKind.SEND) | (tasks.kind == TaskKind.RECV)
    micros[messages] += how.p2p_metadata_s * 1e6 / hardware.host_factor
    micros[captured] = 0.0
    if captured.any():
        micros[_first_of_runs(tasks, captured)] += cost.graph
    elif mode == "compile":
        micros[_first_of_runs(tasks, tasks.kind == TaskKind.COMPUTE)] += cost.graph
    return HostWork(micros * 1e-6 * hardware.host_factor, waits)


# ---- counts --------------------------------------------------------------------------------------


def _kernels(tasks: Tasks, run: Run) -> Float:
    """By row the kernels that a framework launches for the task, as it calls operators."""
    count = _kernels_of_shapes(tasks, run)
    joint = joint_rows(_unmeasured(tasks))  # measured or not, one kernel
    _, first = np.unique(joint.whole, return_index=True)
    rest = np.ones(len(joint.rows), dtype=bool)
    rest[first] = False
    count[joint.rows[rest]] = 0
    if run.mode == "train":
        count[within_products(tasks)] = 0
    return count


def _unmeasured(tasks: Tasks) -> Tasks:
    return tasks if tasks.duration is None else replace(tasks, duration=None)


def _kernels_of_shapes(tasks: Tasks, run: Run) -> Float:
    """Kernels by row, as the shape of the task says."""
    one_by_one = run.mode == "train" and run.framework == "megatron"
    known, products = [1.0], [1.0]  # of rows without a shape
    for shape in tasks.shapes:
        extents, ops = shape.sizes(), ops_of(shape.kernel)
        count = 1
        if "cast" in ops and run.precision not in ("bf16", "fp32"):
            casts = CAST_KERNELS.get(run.fp8_recipe or "", 2)
            count = casts * (extents.get("e", 1) if one_by_one else 1)
        elif not run.fuse and shape.kernel != GEMM:
            table = EAGER_KERNELS if run.operators == "eager" else UNFUSED_KERNELS
            count = max(table.get(op, 1) for op in ops)
        known.append(max(count, 1.0))
        products.append(max(extents["batch"], 1.0) if shape.kernel == GEMM else 1.0)
    counts = np.array(known)[tasks.shape + 1]
    if one_by_one and max(products) > 1:
        # Heads of attention that no kernel fuses are one product (torch.baddbmm), experts many.
        counts *= np.where(_modules(tasks) == "moe", np.array(products)[tasks.shape + 1], 1.0)
    return counts


def _follows_fusable(tasks: Tasks, run: Run) -> Bool:
    """Mask of element-wise kernels that a compiler fuses with the row before.

    Both are rows of one graph. Training compiles each block by itself, forward and backward apart
    (torchtitan's `apply_compile`). An engine compiles the model and splits it at attention (vLLM's
    `splitting_ops`), so that the end of a layer and the head of the next are one graph.
    """
    known = [all(OPS[op].fuses for op in ops_of(name) if op in OPS) for name in tasks.ops]
    fusable = np.array(known)[tasks.op] & (tasks.kind == TaskKind.COMPUTE)
    columns = (tasks.stage, tasks.microbatch)
    graph = _passes(tasks) if run.mode == "train" else _numbered_runs(*columns)
    follows = fusable[1:] & fusable[:-1] & (np.diff(graph) == 0)
    return np.append(False, follows)


def _passes(tasks: Tasks) -> Int:
    """By row the number of the pass through a block of the model that the row belongs to."""
    return _numbered_runs(tasks.stage, tasks.layer, tasks.microbatch, tasks.phase)


def _numbered_runs(*columns: NDArray[np.integer]) -> Int:
    """By row the number of the run of rows, one after another, that are equal in all columns."""
    new = [np.diff(column.astype(np.int64)) != 0 for column in columns]
    return np.cumsum(np.append(True, np.any(new, axis=0)))


def _first_of_runs(tasks: Tasks, inside: Bool) -> Bool:
    """The first row of each run of rows inside, in each pass through a block."""
    number = np.where(inside, _passes(tasks), 0)
    return inside & (np.diff(number, prepend=0) != 0)


# ---- CUDA graphs ---------------------------------------------------------------------------------

_ROUTER = frozenset({"topk", "topk_bwd", "scores", "scores_bwd", "count", "aux_loss",
                     "aux_loss_bwd", "z_loss", "z_loss_bwd"})  # fmt: skip
_PREPROCESS = frozenset({"splits", "routes"})
_MIXERS = frozenset({"attn", "mlp", "mamba"})


def _captured(tasks: Tasks, modules: frozenset[str]) -> Bool:
    """Which rows are part of captured graphs: those of `modules`, or all where there are none."""
    if not modules:
        return np.ones(len(tasks), dtype=bool)
    named = set(modules) - _MIXERS
    if modules & _MIXERS:
        named.add("attn")
    found = np.isin(_modules(tasks), sorted(named)) & (tasks.microbatch >= 0)
    return found & (tasks.phase != _OPTIMIZER)


def _modules(tasks: Tasks) -> NDArray[np.str_]:
    """The module of a layer that each row belongs to, in Megatron-LM's words; "": in none."""
    names = [frozenset(ops_of(name)) for name in tasks.ops]
    router = np.array([bool(ops & _ROUTER) for ops in names])[tasks.op]
    counts = np.array([bool(ops & _PREPROCESS) for ops in names])[tasks.op]
    moves = {Timing.TO_EXPERTS, Timing.FROM_EXPERTS}
    kernels = [timing_of(shape.kernel) in moves for shape in tasks.shapes]
    edge = np.array([*kernels, False])[tasks.shape]
    # Between the first and the last copy of tokens of a pass lie the experts.
    block = _passes(tasks)
    before = np.cumsum(edge)
    begin = np.searchsorted(block, block)
    end = np.searchsorted(block, block, side="right") - 1
    ahead = before - before[begin] + edge[begin]  # copies up to here, of this pass
    left = before[end] - before + edge  # from here on
    experts = (ahead > 0) & (left > 0)
    module = np.where(tasks.layer >= 0, "attn", "")
    module = np.where(experts, "moe", module)
    module = np.where(router & ~experts, "moe_router", module)
    return np.where(counts & ~router, "moe_preprocess", module)


# ---- waits ---------------------------------------------------------------------------------------


def _waits(program: Program, tasks: Tasks, run: Run) -> Bool:
    """Rows whose results the host reads before it launches the next.

    Of messages only those between stages: Megatron-LM's `_communicate` ends in
    `torch.cuda.synchronize()`, whereas for messages of ring attention streams wait
    (`flash_attn_p2p_communicate` of Transformer Engine, whose requests are NCCL's).
    """
    waits = np.zeros(len(tasks), dtype=bool)
    if run.mode != "train":
        return waits
    if run.moe_expert_capacity_factor is None:
        # Rows of experts are as many as tokens chose them: the host sizes buffers by the counts.
        told = (tasks.kind == TaskKind.COLLECTIVE) & (tasks.phase == _FORWARD)
        told &= np.array([dtype == "int64" for dtype in tasks.dtypes])[tasks.dtype]
        chosen = np.array(["topk" in ops_of(name) for name in tasks.ops])[tasks.op]
        waits |= told if told.any() else chosen & (tasks.kind == TaskKind.COMPUTE)
    if run.framework == "megatron":
        clip = np.array(["divide" in ops_of(name) for name in tasks.ops])[tasks.op]
        waits |= clip & (tasks.phase == _OPTIMIZER) & (tasks.kind == TaskKind.COMPUTE)
        if run.vpp == 1 and run.schedule not in ASYNCHRONOUS:
            between_stages = np.array([peer.axis == "pp" for peer in program.peers] + [False])
            messages = tasks.kind == TaskKind.RECV
            waits |= messages & between_stages[np.where(messages, tasks.slot, -1)]
    return waits
