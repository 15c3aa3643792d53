"""How fast sharded graphs become columns, and columns become Chakra's bytes.

    python benchmarks/lowering.py

Per CPU-second, of real programs: lowering from the sharded graphs of the blocks to the finished
columns of every rank class, memory over time included; encoding from columns to one file per class.
"""

from __future__ import annotations

import argparse
import json
import sys

from measure import at_least, python

CASES = {
    "Llama-3.1-70B, 4 stages, 128 microbatches": {
        "model": "llama3.1-70b", "tp": 8, "pp": 4, "global_batch_size": 128,
        "sequence_parallel": True,
    },
    "Llama-3.1-405B, 16 stages, 256 microbatches": {
        "model": "llama3.1-405b", "tp": 8, "pp": 16, "global_batch_size": 256,
        "sequence_parallel": True,
    },
    "DeepSeek-V3, 16 stages, 64 microbatches": {
        "model": "deepseek-v3", "pp": 16, "dp": 8, "ep": 8, "global_batch_size": 512,
    },
}  # fmt: skip

CODE = """
import json, sys, time
import numpy as np
from stagewright.lower import training
from stagewright.lower.compile import compile
from stagewright.trace.formats import chakra
from stagewright.run.settings import Run
spent = [0.0]
def timed(function):
    def call(*arguments, **options):
        began = time.process_time()
        result = function(*arguments, **options)
        spent[0] += time.process_time() - began
        return result
    return call
training.assemble, training.lower_block = timed(training.assemble), timed(training.lower_block)
program = compile(Run(**json.loads(sys.argv[1]))).program
firsts = np.sort([of.ranks[0] for of in program.classes])
batches = chakra.plan(program, firsts, {})
began = time.process_time()
size = sum(batch.template().memory for batch in batches)
encoding = time.process_time() - began
nodes = sum(len(of.tasks) for of in program.classes)
print(json.dumps({"nodes": nodes, "lowering": spent[0], "encoding": encoding, "size": size}))
"""


def main() -> None:
    """Run every case and print its figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name, settings in CASES.items():
        cost = python(CODE, json.dumps(settings))
        found = json.loads(cost.out)
        nodes = found["nodes"]
        print(f"{name}: {nodes:,} nodes of {found['size'] / nodes:.0f} bytes; the whole {cost}")
        for what in ("lowering", "encoding"):
            rate = nodes / found[what] / 1e6
            at_least(what, rate, 1.0, "million nodes per CPU-second")


if __name__ == "__main__":
    sys.exit(main())
