"""What is kept on the host: closed forms of the bytes, traces, time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright
from stagewright.check.verify import verify
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.program.columns import CATEGORIES, TaskKind, Tasks
from stagewright.run.settings import Run
from stagewright.time.durations import task_seconds
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine

LAYERS = 4
GPT: dict[str, Any] = {"model": "megatron-22b", "layers": LAYERS, "seq_length": 512}
SBH = 512 * 6144
ACTIVATIONS: dict[str, Any] = {"cpu_offloading_num_layers": LAYERS}
STATES: dict[str, Any] = {"optimizer_cpu_offload": True}


def run(**settings: Any) -> CompiledRun:
    return compile(Run(**{**GPT, **settings}))


def copies(t: Tasks, kind: TaskKind, phase: str) -> list[int]:
    phases = ("forward", "recompute", "backward", "optimizer")
    mine = (t.kind == kind) & (t.phase == phases.index(phase))
    return t.comm_bytes[mine].tolist()


def test_activations_go_and_come_back() -> None:
    """34 s b h a layer (Korthikanti et al., with flash attention), once each way per microbatch."""
    (of,) = run(**ACTIVATIONS, global_batch_size=3).program.classes
    for kind, phase in ((TaskKind.STORE, "forward"), (TaskKind.LOAD, "backward")):
        assert copies(of.tasks, kind, phase) == [34 * SBH] * LAYERS * 3
    (some,) = run(cpu_offloading_num_layers=1).program.classes
    assert copies(some.tasks, TaskKind.STORE, "forward") == [34 * SBH]


def test_activations_of_two_layers_are_there_at_a_time() -> None:
    """In backward, those of the layer that it is at and of the one behind it."""
    (of,) = run(layers=8, cpu_offloading_num_layers=8).program.classes
    held = of.work.changes.in_use[CATEGORIES.index("activations")]
    t = of.tasks
    inside = (t.phase == 2) & (t.layer >= 1) & (t.layer <= 5)
    assert 34 * SBH < held[inside].max() <= 2 * 34 * SBH + 8 * SBH
    (kept,) = run(layers=8).program.classes
    assert kept.memory["activations"] > 8 * 34 * SBH


def test_recomputed_layers_offload_their_input() -> None:
    (of,) = run(**ACTIVATIONS, recompute="full").program.classes
    assert copies(of.tasks, TaskKind.STORE, "forward") == [2 * SBH] * LAYERS


def test_the_optimizer_is_on_the_host() -> None:
    """fp32 gradients there, bf16 parameters back; no update on the device, no states."""
    on, off = run(**STATES), run()
    (of,), (other,) = on.program.classes, off.program.classes
    assert sum(copies(of.tasks, TaskKind.STORE, "optimizer")) == 4 * on.parameters
    assert sum(copies(of.tasks, TaskKind.LOAD, "optimizer")) == 2 * on.parameters
    assert of.memory["optimizer"] == 0
    assert other.memory["optimizer"] == 12 * on.parameters
    assert "adamw" not in {of.tasks.ops[i] for i in np.unique(of.tasks.op)}
    assert "adamw" in other.tasks.ops


def test_a_fraction_of_the_optimizer() -> None:
    """The first blocks of each stage; under ZeRO a rank copies its shard."""
    (of,) = run(**STATES, optimizer_offload_fraction=0.5, dp=2, zero=1).program.classes
    (all_,) = run(**STATES, dp=2, zero=1).program.classes
    (none,) = run(**STATES, optimizer_offload_fraction=0.0, dp=2, zero=1).program.classes
    assert all_.memory["optimizer"] == 0 < of.memory["optimizer"] < none.memory["optimizer"]
    stored = sum(copies(of.tasks, TaskKind.STORE, "optimizer"))
    assert stored * 3 == none.memory["optimizer"] - of.memory["optimizer"]


def test_traces(tmp_path: Path) -> None:
    """MEM_LOAD and MEM_STORE nodes with their bytes; checked, and read back."""
    compiled = run(
        cpu_offloading_num_layers=4, optimizer_cpu_offload=True, dp=2, zero=3, tp=2,
        sequence_parallel=True,
    )  # fmt: skip
    written = stagewright.generate(compiled, tmp_path / "et")
    t = compiled.program.classes[0].tasks
    assert (
        written["nodes"][0]["load"] == int((t.kind == TaskKind.LOAD).sum()) == LAYERS + LAYERS + 2
    )
    assert verify(tmp_path / "et").ok
    stagewright.generate(compiled, tmp_path / "json", format="json")
    (path,) = (tmp_path / "json").glob("*.0.json")
    nodes = json.loads(path.read_text())
    for kind, name in ((TaskKind.LOAD, "load"), (TaskKind.STORE, "store")):
        mine = [n for n in nodes if n["kind"] == name]
        assert [n["bytes"] for n in mine] == t.comm_bytes[t.kind == kind].tolist()


def test_time() -> None:
    """A copy takes its bytes over the host's link."""
    compiled = run(**ACTIVATIONS)
    hardware = resolve("h100-sxm")
    (seconds,) = task_seconds(compiled.program, Machine.of(hardware, gpus=1))
    t = compiled.program.classes[0].tasks
    mine = (t.kind == TaskKind.LOAD) | (t.kind == TaskKind.STORE)
    link = hardware.host_bandwidth_gb_s * 1e9
    assert np.allclose(seconds[mine], t.comm_bytes[mine] / link)


def test_errors() -> None:
    with pytest.raises(UserError, match="needs optimizer_cpu_offload"):
        run(optimizer_offload_fraction=0.5)
