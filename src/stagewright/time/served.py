"""Kernels of a served step as an engine runs them: those without a separate launch.

A program has a kernel for each group of element-wise operators that its graph joins within a block
of the model. Engines join more, and the tables to which the constants of attention and of products
were fitted contain kernels that a program has by themselves:

- keys and values are written to the cache within attention's rows of all engines' tables, the keys
  rotated with the queries by one kernel (`collect_attn.py` of vLLM, SGLang and TensorRT-LLM in
  github.com/ai-dynamo/aiconfigurator@095f58a5);
- operands of products are cast within rows of products in few bits, or by the kernel before;
- the sum that ends a layer and the norm that begins the next one are one kernel
  (`fused_add_rms_norm` of vLLM and of SGLang's kernels, FlashInfer's in TensorRT-LLM);
- TensorRT-LLM rotates queries and keys within attention (`support_fused_rope` of its backends), and
  has one kernel for an all_reduce, the sum, the norm and the cast behind it
  (`AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8`, tensorrt_llm/_torch/distributed/ops.py): its
  decoder layers of Llama, DeepSeek-V3 and Qwen3's experts ask for that, those of dense Qwen3, whose
  queries have a norm, do not (tensorrt_llm/_torch/models/modeling_qwen3.py@010bb95f). Without an
  all_reduce its cast to one scale per tensor is a kernel behind the norm.

Their bytes are moved all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bool, Float
from stagewright.lower.weight_storage import in_blocks
from stagewright.model.config import ModelConfig
from stagewright.program.columns import COLLECTIVES, TaskKind, Tasks
from stagewright.program.shapes import ops_of
from stagewright.run.settings import Run
from stagewright.time.experts.beside import beside_routed
from stagewright.time.hardware import Hardware
from stagewright.time.mixed_steps import with_prompts_tiles
from stagewright.time.network import Machine

Ops = frozenset[str]


def served_machine(run: Run, model: ModelConfig, machine: Machine, engine: str | None) -> Machine:
    """The machine with the kernels of an engine, in steps of inference."""
    if run.mode == "train":
        return machine
    blocks, cache = in_blocks(run, model), run.kv_cache_dtype or "bf16"
    return machine.for_inference(blocks=blocks, engine=engine, cache=cache)


class InEngine(NamedTuple):
    """A step of inference in an engine, on hardware."""

    run: Run
    model: ModelConfig
    engine: str | None
    on: Hardware

    def seconds(self, tasks: Tasks, alone: Float) -> Float:
        """Durations of a rank's tasks, given those of all kernels alone; of training, these."""
        run = self.run
        if run.mode == "train":
            return alone
        blocks = in_blocks(run, self.model)
        alone = with_prompts_tiles(run, self.model, tasks, alone, self.on)
        joined = without_joined_launches(tasks, alone, self.engine, self.on, blocks=blocks)
        return beside_routed(tasks, joined, self.on) if run.mode == "decode" else joined


def without_joined_launches(
    tasks: Tasks, seconds: Float, engine: str | None, on: Hardware, *, blocks: bool = False
) -> Float:
    """Durations of a served step's tasks, in which joined kernels are not launched.

    `blocks`: products in fp8 are of weights that are scaled by blocks; their rows contain the cast.
    """
    if on.inference is None:
        return seconds
    computes = tasks.kind == TaskKind.COMPUTE
    names = [frozenset(ops_of(name)) for name in tasks.ops]

    def mask(predicate: Callable[[Ops], bool]) -> Bool:
        return np.array([predicate(ops) for ops in names])[tasks.op] & computes

    writes = mask(lambda ops: "cache" in ops and ops <= {"bias", "norm", "rope", "cache"})
    casts = mask(lambda ops: ops <= {"cast"})
    sums = mask(lambda ops: "add" in ops and ops <= {"bias", "add"})
    norms = mask(lambda ops: "norm" in ops and ops <= {"bias", "add", "norm", "cast"})
    fused = writes | casts | (sums & _followed(tasks, norms))
    launch = on.kernel_launch_us * 1e-6
    if engine == "trtllm":
        fused |= mask(lambda ops: "rope" in ops and ops <= {"bias", "rope"})
        after_all_reduce = (sums | norms) & _behind_all_reduce(tasks, sums)
        if any({"norm", "rope"} <= ops for ops in names) and not any("topk" in o for o in names):
            after_all_reduce[:] = False
        fused |= after_all_reduce
        unfused_casts = norms & ~after_all_reduce & mask(lambda ops: "cast" in ops)
        if not blocks:
            seconds = seconds + launch * unfused_casts
    return np.maximum(seconds - launch * fused, 0.0)


def _followed(tasks: Tasks, by: Bool) -> Bool:
    """Mask of kernels whose next kernel of the microbatch and stage is in `by`."""
    result = np.zeros(len(tasks), dtype=bool)
    kernels = np.flatnonzero(tasks.kind == TaskKind.COMPUTE)
    previous, following = kernels[:-1], kernels[1:]
    same = tasks.microbatch[previous] == tasks.microbatch[following]
    same &= tasks.stage[previous] == tasks.stage[following]
    result[previous] = by[following] & same
    return result


def _behind_all_reduce(tasks: Tasks, sums: Bool) -> Bool:
    """Mask of rows after an all-reduce, or after a sum that is after one."""
    reduces = (tasks.kind == TaskKind.COLLECTIVE) & (
        tasks.collective == COLLECTIVES.index("all_reduce")
    )
    follows = np.append(False, reduces[:-1])
    return follows | np.append(False, (follows & sums)[:-1])
