"""One small run, from settings to a step's time: read this first, and run it first.

What it asserts can be counted by hand; the tests of each room say why.
"""

from pathlib import Path

import stagewright as sw
from stagewright.check.verify import verify

SETTINGS = {"layers": 4, "seq_length": 64, "vocab": 1024}
DEGREES = {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "global_batch_size": 4}


def test_a_run_is_compiled_written_verified_and_simulated(tmp_path: Path):
    compiled = sw.compile("llama3-8b", **SETTINGS, **DEGREES)
    program = compiled.program

    assert program.mesh.world_size == 2 * 2 * 2
    assert len(program.classes) == 2  # ranks of one pipeline stage have the same tasks
    first, last = (sum(of.tasks.flops.tolist()) for of in program.classes)
    assert last > first  # the head multiplies, the embedding looks up

    sw.generate(compiled, tmp_path / "traces")
    report = verify(tmp_path / "traces")
    assert report.ok
    assert report.ranks == 8

    step = sw.simulate(compiled, "h100-sxm")
    assert step.seconds > last / 989e12  # bf16 FLOP/s that NVIDIA states
    assert step.seconds == sw.simulate(compiled, "h100-sxm").seconds
