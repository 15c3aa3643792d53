"""Record random programs of PyTorch: `random_programs.py SEED COUNT`, a JSON line for each.

Needs `pip install stagewright[torch]`. The seed of a program decides all of it: sizes of the model,
mesh, rank, schedule, microbatches, precision, recomputation, tied and uneven tables. Each runs in a
process of its own, as DTensor remembers groups. Programs that PyTorch refuses are named on stderr
and left out. `tests/conformance/random_programs.py` compares the lines with ours:

    python tools/pytorch/random_programs.py 1000 100 > programs.jsonl
    python tests/conformance/random_programs.py programs.jsonl
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCHEDULES = (
    *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)
SPLIT = SCHEDULES[4:]
"""Schedules whose backward has two halves."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SEVERAL_STAGES = SCHEDULES[2:]
"""Schedules of two stages and more on a rank."""


def spec_of(seed: int) -> dict[str, Any]:
    """The specification of a program, in the form of `record_programs.py`."""
    pick = random.Random(seed)
    kind = pick.choice(("data", "data", "tensor", "context", "experts", "pipeline", "pipeline"))
    mesh = _mesh(pick, kind)
    size = dict(mesh)
    tp, cp = size.get("tp", 1), size.get("cp", 1)
    data = not {"dp", "dp_rep", "efsdp"}.isdisjoint(size)
    o: dict[str, Any] = {"rank": pick.randrange(math.prod(size.values()))}
    alone = set(size) == {"dp"}
    if alone and pick.random() < 0.2:
        o["ddp"] = True
    sharded = data and not o.get("ddp")
    if sharded:
        o["mp"] = pick.choice((None, ["bf16", "fp32"], ["bf16", "fp32"], ["bf16", "bf16"]))
        o["reshard"] = pick.random() < 0.7
    if not sharded or (o["mp"] is None and pick.random() < 0.5):
        o["params"] = pick.choice(("fp32", "bf16"))
    if tp > 1:
        o["sp"] = pick.random() < 0.5
        o["shared_input"] = pick.random() < 0.7 or o["sp"]
        o["loss_parallel"] = "pp" not in size and pick.random() < 0.4
    if cp > 1:
        o["cp_rotate"] = pick.choice(("allgather", "alltoall"))
    o["attn"] = pick.choice(("flash_op", "flash_gqa") if cp > 1 else ("sdpa", "sdpa", "flash_gqa"))
    o["optimizer"] = pick.choice(("adamw", "adamw", "adamw", "sgd"))
    o["ac"] = pick.random() < 0.3
    layers = pick.randint(2, 5)
    if "pp" in size:
        schedule = pick.choice(SCHEDULES if cp == 1 else SCHEDULES[:4])
        o["schedule"] = schedule
        o["vpp"] = 2 if schedule in SEVERAL_STAGES else 1
        o["style"] = "v" if schedule in V_SHAPED else "loop"
        stages = o["vpp"] * size["pp"]
        o["n_mb"] = stages * pick.randint(1, 2) + pick.choice((0, 0, 2)) * (o["vpp"] == 1)
        if schedule == "DualPipeV":
            o["n_mb"] = stages + pick.randint(0, 3)
        layers = stages + pick.randint(0, 2)
        o["ac"] = o["ac"] and schedule not in SPLIT
    else:
        o["accum"] = pick.choice((1, 1, 2, 3))
        o["tied"] = pick.random() < 0.3 and tp == 1
        one_mesh = data and tp == 1 and "efsdp" not in size
        o["clip"] = one_mesh and pick.random() < 0.3
    head_dim, heads = pick.choice((16, 32)), pick.choice((4, 8))
    vocab = pick.choice((512, 1000, 1024, 4096, 16384))
    uneven = pick.random() < 0.3
    model = {
        "hidden": pick.choice((128, 192, 256, 320)), "heads": heads,
        "kv_heads": heads // pick.choice((1, 1, 2)) if tp < 4 else heads, "head_dim": head_dim,
        "ffn": pick.choice((256, 352, 512, 704)), "vocab": vocab + pick.randint(1, 7) * uneven,
    }  # fmt: skip
    if kind == "experts":
        o["moe"] = True
        model |= {"experts": pick.choice((4, 8)), "topk": pick.choice((1, 2))}
        model["ffn"] = pick.choice((128, 256))
    return {
        "name": f"s{seed}_" + "".join(f"{axis}{n}" for axis, n in mesh) + _suffix(o),
        "model": model, "layers": layers, "mesh": mesh, **o,
        "batch": pick.choice((1, 2)), "seq": pick.choice((32, 64, 128, 256)) * cp,
    }  # fmt: skip


def _mesh(pick: random.Random, kind: str) -> list[list[Any]]:
    if kind == "experts":
        if pick.random() < 0.5:
            return [["dp", pick.choice((2, 4, 8))]]
        return [["efsdp", pick.choice((2, 4))], ["ep", pick.choice((2, 4))]]
    if kind == "data":
        if pick.random() < 0.3:
            return [["dp_rep", 2], ["dp", pick.choice((2, 3, 4))]]
        return [["dp", pick.choice((2, 3, 4, 6, 8))]]
    mesh: list[list[Any]] = []
    if kind == "pipeline":
        mesh.append(["pp", pick.choice((2, 2, 4))])
    if kind == "context" or pick.random() < 0.7:
        mesh.append(["dp", pick.choice((2, 3, 4))])
    if kind == "context" or (kind == "pipeline" and pick.random() < 0.15 and len(mesh) > 1):
        mesh.append(["cp", pick.choice((2, 4))])
    if kind == "tensor" or pick.random() < 0.4:
        mesh.append(["tp", pick.choice((2, 2, 4))])
    return mesh


def _suffix(o: dict[str, Any]) -> str:
    return (f"_{o['schedule']}" if "schedule" in o else "") + ("_moe" if "moe" in o else "")


def recorded(spec: dict[str, Any]) -> str | None:
    """A line of JSON from a process of its own; None if PyTorch refuses the program."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(spec)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
        print(f"{spec['name']}: left out: {reason}", file=sys.stderr, flush=True)
        return None
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        warnings.filterwarnings("ignore")
        sys.path.insert(0, str(Path(__file__).parent))
        import record_programs

        print(json.dumps(record_programs.record(json.loads(sys.argv[1]))))
    else:
        first, count = map(int, sys.argv[1:])
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(recorded, map(spec_of, range(first, first + count))):
                if line is not None:
                    print(line, flush=True)
