"""What it costs to build, differentiate, shard and schedule a model, before there are ranks.

    python benchmarks/symbolic.py

Whole processes, the start of Python included. The symbolic part is the whole less the lowering to
columns, which grows with layers and microbatches. It must not grow with ranks or microbatches, nor
with layers that are like others. What a layer costs that is like no other, the last cases tell:
they build each of them anew, which has no aim but to be linear.
"""

from __future__ import annotations

import argparse
import json
import sys

from measure import at_most, python

RUN = {"model": "llama3.1-405b", "tp": 8, "cp": 2, "pp": 16, "sequence_parallel": True}

WHOLE = """
import json, sys, time
from stagewright.lower import training
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
spent, lower = [0.0], training.assemble
def timed(*arguments, **options):
    began = time.process_time()
    program = lower(*arguments, **options)
    spent[0] += time.process_time() - began
    return program
training.assemble = timed
compiled = compile(Run(**json.loads(sys.argv[1])))
nodes = sum(len(of.tasks) for of in compiled.program.classes)
print(json.dumps({"symbolic": time.process_time() - spent[0], "nodes": nodes}))
"""

ANEW = """
import json, sys, time
from stagewright.lower import blocks
from stagewright.lower.compile import compile
from stagewright.lower.recipe import recipe_of, sizes_of
from stagewright.lower.variants import place_blocks
from stagewright.model.catalog import resolve
from stagewright.run.settings import Run
from stagewright.parallel.degrees import parallelization
run = Run(**json.loads(sys.argv[1]))
compile(run)  # and everything is imported
model = resolve(run.model)
run = run.resolved(model)
mesh, plan = parallelization(run, model)
sizes = sizes_of(run, model)
recipe = recipe_of(run, model)
layer = next(v for stage in place_blocks(run, model) for v, i in stage if i >= 0)
began = time.process_time()
for _ in range(int(sys.argv[2])):
    blocks.build_for_one_device.cache_clear()
    blocks.sharded.cache_clear()
    blocks.shard_block(layer, run, model, mesh, plan, sizes, recipe)
print(json.dumps({"symbolic": time.process_time() - began}))
"""


def main() -> None:
    """Run every case and print its figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    cases = {
        "126 layers, 256 ranks, 16 microbatches": ({}, 2.0),
        "the same on 262,144 ranks": ({"dp": 1024}, 2.0),
        "the same with 512 microbatches": ({"global_batch_size": 512}, 2.0),
        "1000 layers": ({"layers": 1000}, 10.0),
    }
    print("Llama-3.1-405B, tp=8 cp=2 pp=16")
    for name, (more, aim) in cases.items():
        cost = python(WHOLE, json.dumps(RUN | more))
        found = json.loads(cost.out)
        print(f"{name}: the whole {cost}; {found['nodes']:,} nodes")
        at_most("symbolic part", found["symbolic"], aim, "CPU-s")
    for layers in (126, 1000):
        cost = python(ANEW, json.dumps(RUN), layers)
        each = 1000 * json.loads(cost.out)["symbolic"] / layers
        print(f"{layers} layers, each built anew: {each:.1f} CPU-ms a layer; the whole {cost}")


if __name__ == "__main__":
    sys.exit(main())
