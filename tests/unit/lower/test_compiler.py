"""The whole pipeline: stages, padding, rank order, and the same program from the same run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Program
from stagewright.run.settings import Run

GPT = {"model": "gpt2", "layers": 4, "seq_length": 64}
LLAMA = GPT | {"model": "llama3.1-8b"}


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


def test_refused() -> None:
    with pytest.raises(UserError, match="tp=5 does not divide the 12 attention heads"):
        compile(Run(**GPT, tp=5))


# ---- ranks ---------------------------------------------------------------------------------------


def test_hybrid_sharding() -> None:
    """States are split within dp_shard neighbours, and gradients summed across their copies."""
    program = compile(Run(**LLAMA, dp=8, dp_shard=4, zero=2, tp=2)).program
    found = {
        program.communicators[s].axes: program.groups()[int(program.group_of(s)[0])]
        for s in range(len(program.communicators))
    }
    assert found[("dp_shard",)] == [0, 2, 4, 6]
    assert found[("dp_replicate",)] == [0, 8]


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
