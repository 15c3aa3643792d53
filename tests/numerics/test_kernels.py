"""Fusion, joint kernels, buckets and rings: what one kernel does and what one message carries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from helpers import cases, evaluated
from stagewright.lower.compile import compile
from stagewright.program.columns import PHASES, TaskKind, Tasks
from stagewright.run.settings import Run

LLAMA = {"model": "llama3.1-8b", "layers": 2, "seq_length": 96}
GPT = LLAMA | {"model": "gpt2"}
GEMMA = LLAMA | {"model": "gemma2-2b"}
BERT = LLAMA | {"model": "bert-base"}
SP = {"sequence_parallel": True}
SPLITS = [{}, {"tp": 2, **SP, "cp": 2}, {"dp": 2, "zero": 3, "pp": 2}]


def tasks(**settings: Any) -> Tasks:
    """The rows of the first pipeline rank."""
    return compile(Run(**settings)).program.classes[0].tasks


def op(t: Tasks, row: int) -> str:
    return t.ops[t.op[row]]


def find(t: Tasks, name: str, phase: str = "forward") -> int:
    """The one row of layer 0 and the first microbatch with this name."""
    rows = [
        i
        for i in np.flatnonzero((t.layer == 0) & (t.microbatch <= 0))
        if t.names[t.name[i]] == f"layer0.{name}" and PHASES[t.phase[i]] == phase
    ]
    assert len(rows) == 1, [op(t, i) for i in rows]
    return rows[0]


def of_layer(t: Tasks, kind: TaskKind, phase: str) -> np.ndarray:
    """Rows of layer 0."""
    return np.flatnonzero((t.kind == kind) & (t.phase == PHASES.index(phase)) & (t.layer == 0))


# ---- fusion --------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("model", [LLAMA, GPT, GEMMA, BERT], ids=lambda m: m["model"])
def test_fusion_saves_traffic_and_nothing_else(
    model: dict[str, Any], split: dict[str, Any]
) -> None:
    one, many = tasks(**model, **split), tasks(**model, **split, fuse=False)
    for phase in range(len(PHASES)):
        a, b = one.phase == phase, many.phase == phase
        assert one.flops[a].sum() == many.flops[b].sum()
        assert (one.kind[a] == TaskKind.COMPUTE).sum() <= (many.kind[b] == TaskKind.COMPUTE).sum()
        assert one.traffic[a].sum() <= many.traffic[b].sum()
    assert one.traffic.sum() < many.traffic.sum()
    for t in (one, many):
        moves = t.kind != TaskKind.COMPUTE
        assert sorted(t.comm_bytes[moves]) == sorted(one.comm_bytes[one.kind != TaskKind.COMPUTE])


def test_products_stay_alone_but_for_their_epilogue() -> None:
    t = tasks(**LLAMA)
    found = {op(t, i) for i in range(len(t)) if "einsum" in op(t, i)}
    assert found == {"einsum", "einsum+cast+accumulate"}


def test_accumulation_is_absorbed() -> None:
    """A weight's product adds to its fp32 gradient at its end: Megatron-LM's fused wgrad."""
    tokens, wide = 96, 14336
    fused, plain = tasks(**LLAMA), tasks(**LLAMA, fuse=False)
    assert "accumulate" not in {op(fused, i) for i in range(len(fused))}
    both = find(fused, "d_w_down+w_down.grad", "backward")
    read = 2 * tokens * (wide + 4096)
    size = wide * 4096
    assert fused.traffic[both] == read + 2 * 4 * size  # the sum is read and written
    assert fused.flops[both] == (2 * tokens + 2) * size
    # Alone: the product written in bf16, cast to fp32, added.
    rows = [find(plain, n, "backward") for n in ("d_w_down",)]
    rows += [i for i in range(rows[0] + 1, rows[0] + 3) if op(plain, i) in ("cast", "accumulate")]
    assert plain.traffic[rows].tolist() == [
        read + 2 * size,
        2 * size + 4 * size,
        4 * size + 8 * size,
    ]


def test_what_stays_in_a_kernel_is_not_counted() -> None:
    """gpt2: bias, dropout, residual sum and norm after attention, as one kernel."""
    t = tasks(**GPT)
    rows = of_layer(t, TaskKind.COMPUTE, "forward")
    (row,) = (i for i in rows if op(t, i) == "bias+random_mask+dropout+add+norm")
    x, h = 96 * 768, 768
    reads = 2 * x + 2 * x + 2 * h + 2 * h + 2 * h  # product, residual, bias, norm's weight and bias
    assert t.traffic[row] == reads + 2 * x + 2 * x + x  # residual, norm's output, mask of bytes


# ---- joint kernels -------------------------------------------------------------------------------


def test_gradients_of_attention_are_one_kernel() -> None:
    t = tasks(**LLAMA)
    rows = [i for i in range(len(t)) if op(t, i) == "attention_bwd"]
    assert len(rows) == 2
    s, q, kv, pairs = 96, 32 * 128, 8 * 128, 96 * 96 // 2
    assert t.flops[rows].tolist() == [10 * pairs * q] * 2  # five products
    # Reads dO, Q, K, V, O once and a sum for each row of scores, writes dQ, dK, dV.
    read = 2 * s * (3 * q + 2 * kv) + 4 * 32 * s
    assert t.traffic[rows].tolist() == [read + 2 * s * (q + 2 * kv)] * 2


def test_gradients_of_a_gate_are_one_kernel() -> None:
    t = tasks(**LLAMA)
    rows = [i for i in range(len(t)) if op(t, i) == "glu_bwd"]
    assert t.traffic[rows].tolist() == [2 * 96 * 14336 * (3 + 2)] * 2


def test_look_up_touches_rows_not_the_table() -> None:
    t = tasks(**LLAMA)
    (row,) = (i for i in range(len(t)) if op(t, i) == "embedding")
    assert t.traffic[row] == 8 * 96 + 2 * 2 * 96 * 4096


# ---- buckets -------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda m: m["model"])
def test_buckets_carry_the_same_bytes(model: dict[str, Any], split: dict[str, Any]) -> None:
    volumes: list[Counter[tuple[Any, ...]]] = []
    counts: list[Counter[tuple[Any, ...]]] = []
    for bucket in ("layer", "parameter"):
        program = compile(Run(**model, **split, bucket=bucket, global_batch_size=8)).program
        t = program.classes[0].tasks
        volume: Counter[tuple[Any, ...]] = Counter()
        count: Counter[tuple[Any, ...]] = Counter()
        for i in np.flatnonzero(t.kind == TaskKind.COLLECTIVE):
            who = program.communicators[t.slot[i]]
            key = (who, op(t, i), PHASES[t.phase[i]], int(t.layer[i]), int(t.microbatch[i]))
            volume[key] += int(t.comm_bytes[i])
            count[key] += 1
        volumes.append(volume)
        counts.append(count)
    assert volumes[0] == volumes[1]
    weights = [k for k in counts[0] if set(k[0].axes) & {"dp", "dp_shard"} and k[2] == "backward"]
    assert weights
    for key in weights:
        assert counts[0][key] <= counts[1][key]
        if key[3] >= 0:
            assert counts[0][key] == 1, key


@cases
def test_data_parallel_volume(
    zero: int, scatter: tuple[str, int, int], gather: tuple[str, int, int] | None
) -> None:
    """ZeRO, arXiv 1910.02054, section 7, for the layers; gathers count the input shard."""
    t = tasks(**LLAMA, dp=4, zero=zero, global_batch_size=12)
    layer = 218_112_000  # parameters
    found: Counter[str] = Counter()
    for i in np.flatnonzero((t.kind == TaskKind.COLLECTIVE) & (t.layer >= 0)):
        found[op(t, i)] += int(t.comm_bytes[i])
    wanted = {scatter[0]: 2 * layer * scatter[1] * scatter[2]}
    if gather:
        wanted[gather[0]] = 2 * layer * gather[1] * gather[2] // 4
    assert found == wanted


# ---- rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_ring(cp: int, tp: int) -> None:
    """Keys take cp - 1 steps; in backward again, and their gradients one more to come home."""
    t = tasks(**LLAMA, cp=cp, tp=tp)
    block = 2 * (96 // cp) * 2 * 8 * 128 // tp  # K and V of a rank in bf16
    for kind in (TaskKind.SEND, TaskKind.RECV):
        forward, backward = of_layer(t, kind, "forward"), of_layer(t, kind, "backward")
        assert t.comm_bytes[forward].tolist() == [block] * (cp - 1)
        assert t.comm_bytes[backward].tolist() == [block] * (cp - 1 + cp)
    whole = tasks(**LLAMA, tp=tp)
    for phase, name in (("forward", "attention"), ("backward", "attention_bwd")):
        steps = [i for i in of_layer(t, TaskKind.COMPUTE, phase) if op(t, i) == name]
        assert len(steps) == cp
        (alone,) = (i for i in of_layer(whole, TaskKind.COMPUTE, phase) if op(whole, i) == name)
        assert t.flops[steps].sum() * cp == whole.flops[alone]
        assert np.ptp(t.flops[steps]) <= 1  # zigzag order: all steps do alike


def test_a_step_waits_for_its_keys_and_no_more() -> None:
    """The first needs no message; the next keys travel while it runs."""
    t = tasks(**LLAMA, cp=4)
    steps = [i for i in of_layer(t, TaskKind.COMPUTE, "forward") if op(t, i) == "attention"]
    received = of_layer(t, TaskKind.RECV, "forward").tolist()
    for n, step in enumerate(steps):
        reads = set(t.data[t.data_ptr[step] : t.data_ptr[step + 1]].tolist())
        assert reads & set(received) == set(received[n - 1 : n] if n else [])
    sent = of_layer(t, TaskKind.SEND, "forward").tolist()
    assert sent[0] < steps[0]
    for n, send in enumerate(sent):  # what came is passed on
        reads = set(t.data[t.data_ptr[send] : t.data_ptr[send + 1]].tolist())
        assert reads & set(received) == set(received[n - 1 : n] if n else [])


@cases
def test_context_parallel_collectives(
    kind: str, bucket: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    t = tasks(**LLAMA, cp=4, cp_comm_type=kind, bucket=bucket)
    own = t.comm_bytes < 2**20  # not the gradients of weights
    for phase, wanted in (("forward", forward), ("backward", backward)):
        rows = of_layer(t, TaskKind.COLLECTIVE, phase)
        rows = [i for i in rows if own[i] and "weight.grad" not in t.names[t.name[i]]]
        assert Counter(op(t, i) for i in rows) == wanted
    sends = (t.kind == TaskKind.SEND) | (t.kind == TaskKind.RECV)
    assert sends.any() == (kind == "p2p")


@cases
def test_context_parallel_volume(kind: str, elements: str) -> None:
    t = tasks(**LLAMA, cp=4, cp_comm_type=kind)
    mine = (t.layer == 0) & (t.phase == 0) & (t.kind != TaskKind.RECV)
    assert t.comm_bytes[mine].sum() == 2 * evaluated(elements)


# ---- collectives of tensor parallelism -----------------------------------------------------------


@cases
@pytest.mark.parametrize("model", [LLAMA, GPT, GEMMA, BERT], ids=lambda m: m["model"])
def test_tensor_parallel_collectives(
    model: dict[str, Any],
    settings: dict[str, Any],
    forward: dict[str, int],
    backward: dict[str, int],
) -> None:
    t = tasks(**model, tp=2, **settings)
    for phase, wanted in (("forward", forward), ("backward", backward)):
        rows = [
            i for i in of_layer(t, TaskKind.COLLECTIVE, phase) if t.comm_bytes[i] >= 2 * 48 * 768
        ]
        assert Counter(op(t, i) for i in rows) == wanted


def test_parallel_block_needs_half_the_collectives() -> None:
    """And, once, a sum of the gradients of the one head of keys and values, which ranks share."""
    t = tasks(**LLAMA | {"model": "palm-8b"}, tp=2)
    found = [
        [(op(t, i), int(t.comm_bytes[i])) for i in of_layer(t, TaskKind.COLLECTIVE, phase)]
        for phase in ("forward", "backward")
    ]
    one = ("all_reduce", 2 * 96 * 4096)
    assert found == [[one], [one, ("all_reduce", 4 * 2 * 4096 * 256)]]


# ---- shapes --------------------------------------------------------------------------------------


def shape(t: Tasks, name: str, phase: str = "forward") -> str:
    return str(t.shapes[t.shape[find(t, name, phase)]])


def test_shapes_are_those_of_one_rank() -> None:
    # Llama 3.1 8B: hidden 4096, 32 heads of 128, 8 key-value heads, MLP 14336; 96 tokens.
    t = tasks(**LLAMA, tp=2, **SP, cp=2)
    assert shape(t, "q") == "gemm batch=1 m=48 n=2048 k=4096"
    assert shape(t, "k") == "gemm batch=1 m=48 n=512 k=4096"
    assert shape(t, "mlp_out") == "gemm batch=1 m=48 n=4096 k=7168"
    assert shape(t, "d_w_down+w_down.grad", "backward") == "gemm batch=1 m=7168 n=4096 k=48"
    assert shape(t, "attn_norm_out") == "norm b=1 s=24 m=4096"
    ring = "batch=1 heads=16 kv_heads=4 q=48 k=48 d=128 v=128 causal=1 window=0"
    assert shape(t, "core.step1") == f"attention {ring}"
    assert shape(t, "d_q_core+d_v_core.step0", "backward") == f"attention_bwd {ring}"
    t = tasks(model="deepseek-v3", layers=4, seq_length=64, dp=8, ep=8)
    # 64 tokens on each of 8 ranks, 8 of 256 experts each: 16 rows for each of 32 local experts.
    assert "gemm batch=32 m=16 n=2048 k=7168" in map(str, t.shapes)
    core = "batch=1 heads=128 kv_heads=128 q=64 k=64 d=192 v=128 causal=1 window=0"
    assert shape(t, "core") == f"attention {core}"


@cases
def test_shapes_explain_the_flops(run: dict[str, Any]) -> None:
    t = tasks(**run)
    seen = Counter[str]()
    for row in np.flatnonzero(t.kind == TaskKind.COMPUTE):
        if t.shape[row] < 0:
            continue
        shape = t.shapes[t.shape[row]]
        kernel, extents = shape.kernel, shape.extents
        of = dict(extents)
        seen[kernel] += 1
        if kernel == "gemm":
            expected = 2 * of["batch"] * of["m"] * of["n"] * of["k"]
            epilogue = t.flops[row] - expected  # casts and adds elements of the result
            assert 0 <= epilogue <= 2 * of["batch"] * of["m"] * of["n"]
        elif kernel in ("attention", "attention_bwd"):
            window = min(of["window"] or of["k"], of["k"])
            pairs = of["q"] * (2 * window * of["k"] - window**2) // (2 * of["k"])
            d, v = of["d"], of["v"]
            width = d + v if kernel == "attention" else 3 * d + 2 * v
            assert t.flops[row] == 2 * of["batch"] * of["heads"] * pairs * width
    assert seen["gemm"]
    assert seen["attention"] == (0 if "flash_attention" in run else run["layers"])
    assert (t.shape[t.kind != TaskKind.COMPUTE] == -1).all()
