"""Graphs of one rank that PyTorch traced, beside our own synthesis of the same model, op for op.

`graphs/` has forward, loss and backward of a Llama and of a mixture of experts as one FX graph each
(`record_graphs.py`). The graph becomes a program of its own; collectives of each axis have to be
those of our program in kind, type, bytes and order, and products and attention those in FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from stagewright.api.simulated import simulate_traced
from stagewright.errors import UserError
from stagewright.imports.recording import Recording
from stagewright.lower.compile import compile
from stagewright.lower.traced_graph import program_of
from stagewright.model.config import ModelConfig
from stagewright.program.columns import COLLECTIVES, PHASES, Program, TaskKind
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.traced_bundle import read_traced, write_traced
from stagewright.trace.write import expand
from stagewright.views.summary import traced_summary

GRAPHS = Path(__file__).parent / "graphs"
SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 176, "num_attention_heads": 8,
    "num_query_groups": 4, "kv_channels": 8, "vocab_size": 256, "max_position_embeddings": 32,
    "tied_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 48, "apply_probs": "output",
}  # fmt: skip
EAGER: dict[str, Any] = {
    "framework": "torchtitan", "precision": "fp32", "params_dtype": "fp32", "seq_length": 32,
    "micro_batch_size": 2, "dropout": False, "repeat_kv": True, "clip_grad": False,
    "input_grad_reduce": "shared", "loss_parallel": False,
}  # fmt: skip
KEPT = {"zero": 3, "reshard_after_forward": False}
RUNS: dict[str, dict[str, Any]] = {
    "llama_tp4": {"tp": 4, "sequence_parallel": True},
    "llama_fsdp4": {"dp": 4, "global_batch_size": 8, **KEPT},
    "llama_fsdp2_tp2": {
        "dp": 2, "tp": 2, "sequence_parallel": True, "global_batch_size": 4, **KEPT,
    },
    "moe_ep4": {"dp": 4, "ep": 4, "global_batch_size": 8},
}  # fmt: skip


class Moved(NamedTuple):
    """A collective, and the bytes of its local input."""

    phase: str
    kind: str
    dtype: str
    bytes: int


NORM = SIZES["hidden_size"] * 4
PLACE = (
    "sums of the gradients of norms' weights over tp: autograd makes them where each gradient is "
    "done, FSDP2 before the unit is reduced, and AdamW on DTensors three times in the optimizer"
)
COUNTS = "routing was taken as balanced: ranks do not tell each other how many copies they send"
DATA = "the recorded ranks keep gradients of their own: they are in no data parallelism"


def elsewhere(axis: str, moved: Moved) -> bool:
    """What the two do at other places, or only one of them: PLACE, COUNTS, DATA."""
    of_norm = axis == "tp" and moved.kind == "all_reduce" and moved.bytes == NORM
    return of_norm or (axis == "ep" and (moved.dtype == "int64" or moved.kind == "all_reduce"))


def collectives(program: Program) -> Iterator[tuple[str, Moved]]:
    t = program.classes[0].tasks
    for i in np.flatnonzero(t.kind == TaskKind.COLLECTIVE):
        axis = program.label_of(int(t.slot[i])).replace("dp/ep", "ep")
        what = COLLECTIVES[t.collective[i]], t.dtypes[t.dtype[i]], int(t.comm_bytes[i])
        yield axis, Moved(PHASES[t.phase[i]], *what)


def products(program: Program) -> dict[str, list[int]]:
    """FLOPs of each product and attention, by phase, ascending."""
    t = program.classes[0].tasks
    kernels = [t.shapes[i].kernel if i >= 0 else "" for i in t.shape]
    found: dict[str, list[int]] = {}
    for i, kernel in enumerate(kernels):
        if kernel in ("gemm", "attention", "attention_bwd"):
            found.setdefault(PHASES[t.phase[i]], []).append(int(t.flops[i]))
    return {phase: sorted(flops) for phase, flops in found.items()}


def traced(name: str) -> Program:
    return program_of(Recording.from_json((GRAPHS / f"{name}.json").read_text()))


def synthesized(name: str) -> Program:
    model = ModelConfig(name=name, **SIZES, **(EXPERTS if name.startswith("moe") else {}))
    return compile(Run(model=name, **EAGER, **RUNS[name]), model).program


@pytest.mark.parametrize("name", RUNS)
def test_op_for_op(name: str) -> None:
    theirs, ours = traced(name), synthesized(name)
    assert theirs.mesh.world_size == ours.mesh.world_size
    assert products(theirs) == products(ours)
    found = [*collectives(theirs)], [*collectives(ours)]
    axes = {axis for side in found for axis, _ in side}
    for axis in axes:
        one, two = ([m for a, m in side if a == axis and not elsewhere(a, m)] for side in found)
        assert one == two, axis
    left = [Counter((a, m.kind) for a, m in side if elsewhere(a, m)) for side in found]
    if name == "llama_fsdp2_tp2":  # at other places only
        assert left[0] == left[1] == {("tp", "all_reduce"): 5}
    elif name == "llama_tp4":
        assert [sum(side.values()) for side in left] == [5, 15]
    elif name == "moe_ep4":
        assert left == [{}, {("ep", "all_to_all"): 2, ("ep", "all_reduce"): 1}]
    else:
        assert left == [{}, {}]


def test_every_graph_that_is_recorded() -> None:
    assert sorted(RUNS) == sorted(path.stem for path in GRAPHS.glob("*.json"))


def test_memory_is_that_of_tensors_with_storage_of_their_own() -> None:
    of = traced("llama_fsdp4").classes[0]
    parameters = 2 * 256 * 64 + 5 * 64 + 2 * 64 * (64 + 32 + 32 + 64 + 3 * 176)
    assert of.memory["parameters"] == parameters  # a fourth, of four bytes each
    assert of.memory["peak"] == sum(size for what, size in of.memory.items() if what != "peak")
    table = 256 * 64 * 4  # of embeddings, which backward does not read
    assert of.memory["gathered_parameters"] == 4 * parameters - table


def test_a_bundle_of_it_is_read_back(tmp_path: Path) -> None:
    recording = Recording.from_json((GRAPHS / "llama_tp4.json").read_text())
    path = str(tmp_path / "rank.bundle")
    program = write_traced(recording, path)
    back = read_traced(Bundle(path))
    assert back is not None
    assert (back.rank, back.parameters) == (1, recording.parameters)
    assert [*collectives(back.program)] == [*collectives(program)]
    assert traced_summary(back)["rank_classes"][0]["tasks"] == len(program.classes[0].tasks)
    machine = Machine.of(resolve("h100-sxm"), gpus=4)
    step = simulate_traced(back.program, back.name, machine)
    assert step.seconds == pytest.approx(step.mean.total)
    assert step.fit.fits
    expand(Bundle(path), str(tmp_path / "expanded"))
    assert (tmp_path / "expanded" / "workload.3.et").is_file()


def test_a_recording_of_a_module_is_no_program() -> None:
    with pytest.raises(UserError, match="of a whole module and not of one rank"):
        program_of(Recording("module", (), ()))
