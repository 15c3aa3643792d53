"""Matrix products that a framework fuses into one GEMM, and biases that a GEMM adds.

Query, key and value are one product, and so are gate and up: Megatron-LM's `linear_qkv` and
`linear_fc1`, and vLLM's `QKVParallelLinear`, hold the weights side by side. The graph keeps the
products apart, as papers and checkpoints do; here they are timed as one: with a longer sum for the
gradient of the input, which then needs no additions, and with more columns for the forward product
and the gradient of the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float, Int, distinct_numbers, distinct_rows
from stagewright.graph.node import BYTES
from stagewright.program.columns import Tasks
from stagewright.program.shapes import GEMM, op_mask, shape_mask
from stagewright.time.hardware import Hardware
from stagewright.time.roofline import bytes_per_second, gemm_seconds


class Gemms(NamedTuple):
    """Matrix products as they run, one per row, and the row's share of each."""

    batch: Float
    m: Float
    n: Float
    k: Float
    traffic: Float
    """Bytes."""
    dtype: Int
    """Index into `dtypes` of the tasks."""
    share: Float
    """Of the FLOPs."""


class JointRows(NamedTuple):
    """Rows that are parts of larger products."""

    rows: Int
    whole: Int
    """Index of the product of each row."""
    summed: Bool
    """True if the product is the sum of its parts: a gradient of the input."""


def joint_rows(tasks: Tasks) -> JointRows:
    """All rows fused into larger products, except rows whose own duration was measured."""
    number: dict[tuple[str, ...], int] = {(): 0}
    names = [number.setdefault(shape.joint, len(number)) for shape in tasks.shapes]
    label = np.array([*names, 0], np.int64)[tasks.shape]  # the last: tasks without a shape
    rows = np.flatnonzero(label)
    if tasks.duration is not None:
        rows = rows[tasks.duration[rows] == 0]
    columns = (label, tasks.stage, tasks.layer, tasks.microbatch, tasks.phase)
    keys = [column[rows].astype(np.int64) for column in columns]
    _, whole = distinct_numbers([key - key.min(initial=0) for key in keys], len(rows))
    several = np.bincount(whole) > 1
    is_part = several[whole]
    rows, whole = rows[is_part], (np.cumsum(several) - 1)[whole[is_part]]
    summed = np.array([name[-1:] == ("input",) for name in number])[label[rows]]
    return JointRows(rows, whole, summed)


def gemms_of(tasks: Tasks, rows: Int) -> Gemms:
    """Products of `rows`; a row of a fused product yields the fused product."""
    joint, gemms = joint_rows(tasks), _separate_gemms(tasks, rows)
    fused, _ = _fused_gemms(tasks, joint)
    index = np.full(len(tasks), -1)
    index[joint.rows] = np.arange(len(joint.rows))
    product = index[rows]
    is_part = product >= 0
    for column, fused_column in zip(gemms, fused, strict=True):
        column[is_part] = fused_column[product[is_part]]
    return gemms


def _separate_gemms(tasks: Tasks, rows: Int) -> Gemms:
    extents = [
        tuple(map(float, dict(shape.extents).values())) if shape.kernel == GEMM else (0.0,) * 4
        for shape in tasks.shapes
    ]
    batch, m, n, k = np.array(extents or [(0.0,) * 4])[tasks.shape[rows]].T.copy()
    traffic, dtype = tasks.traffic[rows].astype(float), tasks.dtype[rows].astype(np.int64)
    return Gemms(batch, m, n, k, traffic, dtype, np.ones(len(rows)))


def _fused_gemms(tasks: Tasks, joint: JointRows) -> tuple[Gemms, Float]:
    """Fused product of each joint row, and bytes of the row's separate result."""
    gemms, summed = _separate_gemms(tasks, joint.rows), joint.summed
    width = np.array([float(BYTES.get(x, 0)) for x in tasks.dtypes])[gemms.dtype]

    def total(column: Float) -> Float:
        return np.bincount(joint.whole, column).astype(float)[joint.whole]

    # The input is read once, or its gradient written once.
    result = gemms.batch * gemms.m * gemms.n * np.where(width < 2, 2, width)
    shared_bytes = np.where(summed, result, gemms.batch * gemms.m * gemms.k * width)
    work = gemms.batch * gemms.m * gemms.n * gemms.k + 1  # experts may have no rows
    fused = gemms._replace(
        n=np.where(summed, gemms.n, total(gemms.n)),
        k=np.where(summed, total(gemms.k), gemms.k),
        traffic=total(gemms.traffic - shared_bytes) + shared_bytes,
        share=work / total(work),
    )
    return fused, result


def gemms_seconds(gemms: Gemms, dtypes: tuple[str, ...], hardware: Hardware) -> Float:
    """Seconds of each row within a step: its share of the seconds of the product."""
    hardware = hardware.sustained()
    first, inverse = distinct_rows(gemms[:-1])
    dtype, seconds = gemms.dtype[first], np.zeros(len(first))
    for index in {int(number) for number in dtype}:
        selected = dtype == index
        batch, m, n, k, traffic = (column[first[selected]] for column in gemms[:-2])
        seconds[selected] = gemm_seconds(
            batch, m, n, k, traffic=traffic, dtype=dtypes[index], hardware=hardware
        )
    return gemms.share * seconds[inverse]


def with_fused_gemms(tasks: Tasks, seconds: Float, hardware: Hardware) -> Float:
    """Durations with products of one input fused.

    Additions that this makes needless take no time: they read several parts of one sum. Of further
    operands they read, the sum is read once.
    """
    joint = joint_rows(tasks)
    if not len(joint.rows):
        return seconds
    fused, result_bytes = _fused_gemms(tasks, joint)
    seconds = seconds.copy()
    seconds[joint.rows] = gemms_seconds(fused, tasks.dtypes, hardware)

    product = np.full(len(tasks), -1)
    product[joint.rows[joint.summed]] = joint.whole[joint.summed]
    size = np.zeros(len(tasks))
    size[joint.rows] = result_bytes
    waiter, dep = tasks.reads
    reads_sum = product[dep] >= 0
    waiter, dep = waiter[reads_sum], dep[reads_sum]
    first, inverse = distinct_rows([waiter, product[dep]])
    count = np.bincount(inverse, minlength=len(first))
    # Of the sums that a row reads, the first.
    order = np.lexsort((product[dep[first]], waiter[first]))
    order = order[np.diff(waiter[first[order]], append=-1) != 0]
    first, count = first[order], count[order]
    rows = waiter[first]
    remaining = seconds[rows] - (count - 1) * size[dep[first]] / bytes_per_second(hardware)
    inputs = np.diff(tasks.data_ptr)[rows]
    seconds[rows] = np.where((count > 1) & (count == inputs), 0.0, remaining)
    return seconds


def within_products(tasks: Tasks) -> Bool:
    """Mask of biases that the product they read adds, where operators run unfused.

    cuBLASLt adds the bias of a `torch.nn.Linear` to a tile of the product before it is written
    (`at::cuda::blas::gemm_and_bias`, aten/src/ATen/native/cuda/Blas.cpp, since PyTorch 1.11).
    Megatron-LM's linear layers multiply and then add, or join the bias with the operators after
    it, as a program does whose `fuse` is on. A bias after a reduction is a kernel in any case.
    """
    result = np.zeros(len(tasks), dtype=bool)
    biases = op_mask(tasks, lambda ops: ops == {"bias"})
    if not biases.any() or op_mask(tasks, lambda ops: ops > {"bias"}).any():
        return result
    products = shape_mask(tasks, lambda shape: shape.kernel == GEMM and not shape.head)
    waiter, dep = tasks.reads
    result[waiter[biases[waiter] & products[dep]]] = True
    return result
