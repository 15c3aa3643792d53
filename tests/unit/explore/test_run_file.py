"""Flags of frameworks: every name is one that the framework's parser has."""

import pytest

from stagewright.explore.answer.run_file import flags
from stagewright.explore.candidates import Candidates, Column
from stagewright.run.experiment import Experiment
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.time.hardware import resolve

MEGATRON = frozenset({
    "--bf16", "--context-parallel-size", "--cp-comm-type", "--data-parallel-sharding-strategy",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--fp8-format",
    "--global-batch-size", "--micro-batch-size",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--moe-token-dispatcher-type",
    "--num-virtual-stages-per-pipeline-rank", "--overlap-moe-expert-parallel-comm",
    "--overlap-param-gather", "--pipeline-model-parallel-size", "--recompute-granularity",
    "--recompute-method", "--recompute-modules", "--recompute-num-layers", "--seq-length",
    "--sequence-parallel", "--tensor-model-parallel-size", "--tp-comm-overlap",
    "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-tp-pp-dp-mapping",
})  # fmt: skip
"""Of the parser of Megatron-LM d98e8a64, whose options of parallelism, recomputation and overlap
these are (megatron/training/arguments.py and the configurations that it makes options of)."""
TORCHTITAN = frozenset({
    "--activation_checkpoint.mode", "--parallelism.context_parallel_degree",
    "--parallelism.data_parallel_shard_degree", "--parallelism.enable_async_tensor_parallel",
    "--parallelism.expert_parallel_degree", "--parallelism.pipeline_parallel_degree",
    "--parallelism.pipeline_parallel_first_stage_less_layers",
    "--parallelism.pipeline_parallel_last_stage_less_layers",
    "--parallelism.pipeline_parallel_microbatch_size", "--parallelism.pipeline_parallel_schedule",
    "--parallelism.tensor_parallel_degree", "--training.dtype", "--training.global_batch_size",
    "--training.seq_len",
})  # fmt: skip
"""Of torchtitan's JobConfig at 000204a4 (torchtitan/config/job_config.py); less layers on the first
and the last stage, and a data type, since then (torchtitan/config/configs.py at b5bcd76c)."""


def lines(tool, how=None, **settings):
    base = Experiment(Run(model="mixtral-8x7b"), ClusterSection(), how or Execution())
    columns = {name: Column.of([value]) for name, value in settings.items()}
    return flags(Candidates.of(base, resolve("h100-sxm"), columns), 0, tool)


EVERYTHING = {
    "tp": 2, "cp": 2, "pp": 4, "ep": 8, "dp": 8, "vpp": 2, "schedule": "interleaved",
    "sequence_parallel": True, "cp_comm_type": "a2a", "micro_batch_size": 2,
    "global_batch_size": 512, "seq_length": 8192, "order": "tp-cp-ep-pp-dp",
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"zero": 0, "recompute": "none", "precision": "bf16"},
        {"zero": 1, "etp": 2, "recompute": "full", "precision": "fp8"},
        {"zero": 2, "recompute": "selective", "recompute_modules": ("core_attn",)},
        {"zero": 3, "dp_shard": 4, "moe_token_dispatcher_type": "alltoall"},
    ],
)
def test_megatron_knows_every_flag(more):
    how = Execution(tp_comm_overlap=True, overlap_param_gather=True, moe_flex_dispatcher=True)
    found = [line for line in lines("megatron", how, **EVERYTHING, **more) if line[0] != "#"]
    names = {word for line in found for word in line.split() if word.startswith("--")}
    assert names <= MEGATRON
    assert {"--tensor-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"} <= names
    assert ("--use-megatron-fsdp" in names) == (more["zero"] > 1)
    assert ("--use-distributed-optimizer" in names) == (more["zero"] == 1)


def test_what_megatron_has_no_flag_for_is_said():
    assert "# dp_shard=4 has no flag" in lines("megatron", dp=8, zero=1, dp_shard=4)


def test_torchtitan_knows_every_flag():
    settings = {**EVERYTHING, "recompute": "full", "framework": "torchtitan", "zero": 3}
    found = [line for line in lines("torchtitan", **settings) if line[0] != "#"]
    names = {word for line in found for word in line.split() if word.startswith("--")}
    assert names <= TORCHTITAN
