"""The whole pipeline: stages, padding, rank order, and the same program from the same run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import fields
from itertools import chain, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve
from stagewright.program.columns import Program, TaskKind, Tasks
from stagewright.program.communicators import Communicator
from stagewright.run.settings import Run
from stagewright.schedule.generators import one_f_one_b
from stagewright.schedule.text import to_csv

GPT = {"model": "gpt2", "layers": 4, "seq_length": 64}
LLAMA = GPT | {"model": "llama3.1-8b"}


def layers_of(t: Tasks) -> list[int]:
    return sorted({int(n) for n in t.layer} - {-1})


def digest(program: Program) -> str:
    """Of every column of every class, of groups and of memory."""
    found = hashlib.sha256(repr((program.mesh, program.communicators, program.peers)).encode())
    for c in program.classes:
        found.update(c.ranks.tobytes() + repr(dict(c.memory)).encode())
        for f in fields(c.tasks):
            value = getattr(c.tasks, f.name)
            found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return found.hexdigest()


# ---- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"layers": 10, "pp": 4}, [3, 3, 2, 2]),
        ({"layers": 7, "pp": 2, "vpp": 2}, [2 + 2, 2 + 1]),
        ({"layers": 4, "pp": 3, "layers_per_stage": (2, 2, 0)}, [2, 2, 0]),
        ({"layers": 4, "pp": 3, "layers_per_stage": (0, 1, 3)}, [0, 1, 3]),
    ],
    ids=str,
)
def test_layers_of_a_rank(settings: dict[str, Any], wanted: list[int]) -> None:
    program = compile(Run(**GPT | settings)).program
    found = [layers_of(c.tasks) for c in program.classes]
    assert [len(x) for x in found] == wanted
    assert sorted(chain(*found)) == list(range(settings["layers"]))
    for c in program.classes:
        names = {c.tasks.names[n].split(".")[0] for n in c.tasks.name}
        assert ("embedding" in names) == (c.pipeline_rank == 0)
        assert ("head" in names) == (c.pipeline_rank == settings["pp"] - 1)


def test_chunks() -> None:
    """Interleaved: a rank's stages are pp apart."""
    program = compile(Run(**GPT | {"layers": 8}, pp=2, vpp=2)).program
    assert [layers_of(c.tasks) for c in program.classes] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_kinds_of_layers() -> None:
    """Blocks are built once per kind."""
    assert set(compile(Run(**GPT)).blocks) == {"embedding", "layer", "head"}
    gemma = compile(Run(**GPT | {"model": "gemma2-2b"}))
    assert set(gemma.blocks) == {"embedding", "layer local", "layer global", "head"}
    text = gemma.graph_text()
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        f"# {kind}" for kind in gemma.blocks
    ]


def test_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(to_csv(one_f_one_b(2, 4)), encoding="utf-8")
    run = {**GPT, "pp": 2, "global_batch_size": 4}
    named, read = (compile(Run(**run, schedule=s)).program for s in ("1f1b", str(path)))
    assert digest(named) == digest(read)


# ---- sizes ---------------------------------------------------------------------------------------


@cases
def test_vocabulary_is_padded(settings: dict[str, Any], rows: int) -> None:
    """So that each rank of tp has as many; the count of parameters is the published one."""
    c = compile(Run(**GPT, **settings))
    t = c.program.classes[0].tasks
    (product,) = (i for i in range(len(t)) if t.names[t.name[i]] == "head.logits")
    tp = settings.get("tp", 1)
    assert t.flops[product] == 2 * 64 * 768 * rows // tp
    assert c.parameters == compile(Run(**GPT, vocab=settings.get("vocab"))).parameters


def test_batch() -> None:
    """Kernels see the sequences of a microbatch; there are as many as the batch says."""
    for size, batch in ((1, 8), (2, 8), (4, 16)):
        c = compile(Run(**LLAMA, dp=2, micro_batch_size=size, global_batch_size=batch))
        t = c.program.classes[0].tasks
        assert set(t.microbatch.tolist()) == {-1, *range(batch // size // 2)}
        look_ups = [i for i in range(len(t)) if t.ops[t.op[i]] == "embedding"]
        assert t.traffic[look_ups].tolist() == [size * 64 * (8 + 4 * 4096)] * (batch // size // 2)


def test_defaults_are_filled_in() -> None:
    run = compile(Run(**LLAMA, pp=2)).run
    assert (run.global_batch_size, run.schedule, run.layers_per_stage) == (2, "1f1b", (2, 2))


def test_a_given_model() -> None:
    """Instead of the one that the run names."""
    model = resolve("gpt2-medium")
    c = compile(Run(model="anything", layers=2, seq_length=64), model)
    assert (c.model.hidden_size, c.model.num_layers) == (1024, 2)


def test_refused() -> None:
    with pytest.raises(UserError, match="tp=5 does not divide the 12 attention heads"):
        compile(Run(**GPT, tp=5))


# ---- ranks ---------------------------------------------------------------------------------------

DEGREES = {"tp": 2, "cp": 3, "ep": 1, "dp": 2, "pp": 2}


@pytest.mark.numerics
@pytest.mark.parametrize("axes", list(permutations(("tp", "cp", "dp", "pp"))), ids="-".join)
def test_order_of_ranks(axes: tuple[str, ...]) -> None:
    """It changes who is where and nothing of what is done."""
    settings = {**LLAMA, **DEGREES, "seq_length": 96, "zero": 1}
    run = Run(**settings, order="-".join([*axes, "ep"]))
    program, plain = compile(run).program, compile(Run(**settings)).program
    for a, b in zip(program.classes, plain.classes, strict=True):
        for f in fields(Tasks):
            one, two = getattr(a.tasks, f.name), getattr(b.tasks, f.name)
            assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, f.name
    stride = {a: int(np.prod([DEGREES[x] for x in axes[:i]])) for i, a in enumerate(axes)}
    groups = program.groups()
    for slot, who in enumerate(program.communicators):
        mine = [groups[g] for g in np.unique(program.group_of(slot)) if g]
        if len(who.axes) == 1:
            (axis,) = who.axes
            steps = {b - a for ranks in mine for a, b in pairwise(ranks)}
            assert steps == {stride[axis]}
        assert sorted(chain(*mine)) == list(range(24))
    for c in program.classes:
        assert c.ranks.tolist() == [
            r for r in range(24) if r // stride["pp"] % 2 == c.pipeline_rank
        ]


def test_hybrid_sharding() -> None:
    """States are split within dp_shard neighbours, and gradients summed across their copies."""
    program = compile(Run(**LLAMA, dp=8, dp_shard=4, zero=2, tp=2)).program
    found = {
        program.communicators[s].axes: program.groups()[int(program.group_of(s)[0])]
        for s in range(len(program.communicators))
    }
    assert found[("dp_shard",)] == [0, 2, 4, 6]
    assert found[("dp_replicate",)] == [0, 8]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_over_one_rank(zero: int) -> None:
    """dp_shard=1 shards nothing: no group has one member."""
    program = compile(Run(**LLAMA, dp=4, dp_shard=1, zero=zero)).program
    assert {len(ranks) for ranks in program.groups().values()} == {4}


@pytest.mark.parametrize("settings", [{"pp": 4}, {"pp": 2, "tp": 2, "dp": 4}], ids=str)
def test_classes(settings: dict[str, Any]) -> None:
    """A class per pipeline rank, whatever the number of ranks."""
    run = Run(**LLAMA, **settings)
    program = compile(run).program
    assert [c.pipeline_rank for c in program.classes] == list(range(run.pp))
    assert sum(len(c.ranks) for c in program.classes) == run.world_size


def test_many_ranks() -> None:
    """131,072 ranks are no more work than 32."""
    few, many = (compile(Run(**LLAMA, tp=8, pp=4, dp=dp)).program for dp in (1, 4096))
    assert sum(len(c.ranks) for c in many.classes) == 131_072
    for a, b in zip(few.classes, many.classes, strict=True):
        kernels = [t.kind == TaskKind.COMPUTE for t in (a.tasks, b.tasks)]
        assert np.array_equal(a.tasks.flops[kernels[0]], b.tasks.flops[kernels[1]])
    assert Communicator(("dp",)) in many.communicators


# ---- the same again ------------------------------------------------------------------------------

AGAIN = [
    {**LLAMA, "tp": 2, "dp": 2, "pp": 2, "cp": 2, "zero": 3, "sequence_parallel": True},
    {**GPT, "pp": 2, "vpp": 2, "dp": 2, "zero": 1, "bucket": "parameter", "recompute": "full"},
    {"model": "gemma2-2b", "layers": 4, "seq_length": 64, "tp": 8, "flash_attention": False},
]
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
from test_compiler import AGAIN, Run, compile, digest
for settings in AGAIN[::-1]:
    print(digest(compile(Run(**settings)).program))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_fresh_process_makes_the_same_columns(seed: str) -> None:
    """Whatever order sets have there, and whatever was compiled before."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths],
        env={"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[::-1] == [digest(compile(Run(**s)).program) for s in AGAIN]
