"""Programs of PyTorch that nobody has seen, recorded now, beside ours."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT

pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
sys.path.insert(0, str(ROOT / "tests" / "conformance"))
import random_programs as ours

pytestmark = [pytest.mark.slow, pytest.mark.extra]

SEEDS = (1105, 1107, 1112)
"""Two pipelines, FSDP2 with tensor parallelism; none is in `tests/data/random_programs.jsonl`."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_is_exact(seed: int) -> None:
    command = [sys.executable, str(ROOT / "tools" / "pytorch" / "random_programs.py")]
    done = subprocess.run([*command, str(seed), "1"], capture_output=True, text=True, check=True)
    found = ours.result(json.loads(done.stdout))
    assert found.exact, found
