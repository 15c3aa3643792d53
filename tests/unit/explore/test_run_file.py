"""Flags of frameworks: every name is one that the framework's parser has."""

import pytest

from stagewright.explore.answer.flags import flags
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
    "--compile.enable", "--parallelism.context_parallel_degree",
    "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree",
    "--compile.enable_async_tensor_parallel", "--parallelism.expert_parallel_degree",
    "--parallelism.fsdp_reshard_after_forward", "--parallelism.no-enable-sequence-parallel",
    "--parallelism.num_pp_microbatches", "--parallelism.pipeline_parallel_degree",
    "--parallelism.pipeline_parallel_first_stage_less_layers",
    "--parallelism.pipeline_parallel_last_stage_less_layers",
    "--parallelism.pipeline_parallel_layers_per_stage", "--parallelism.pipeline_parallel_schedule",
    "--parallelism.tensor_parallel_degree", "--training.dtype", "--training.max_context_length",
    "--training.num_tokens_per_microbatch_per_dp_rank", "--training.num_tokens_per_train_step",
})  # fmt: skip
"""Of torchtitan's `Trainer.Config` at b5bcd76c (torchtitan/config/configs.py)."""


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


def test_uneven_stages_are_a_layout_of_megatron():
    found = lines("megatron", pp=2, vpp=2, layers_per_stage=(7, 9, 9, 7))
    assert "--pipeline-model-parallel-layout Et*7|t*9|t*9|t*7L" in found
    assert not any("virtual" in line for line in found)
    assert lines("megatron", pp=2, first_stage_less_layers=1) == [
        "--pipeline-model-parallel-size 2", "--account-for-embedding-in-pipeline-split"
    ]  # fmt: skip


def test_torchtitan_knows_every_flag():
    settings = {**EVERYTHING, "framework": "torchtitan", "etp": 1, "recompute": "full", "zero": 3}
    found = lines("torchtitan", Execution(tp_comm_overlap=True), **settings, dp_shard=4)
    known = {line.split()[0]: line.split()[-1] for line in found if line.startswith("--")}
    assert known.keys() <= TORCHTITAN
    assert found[-1] == "activation-checkpoint:full"
    words = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "num_pp_microbatches")
    assert [known[f"--parallelism.{word}"] for word in words] == ["2", "4", "32"]
    assert known["--training.num_tokens_per_microbatch_per_dp_rank"] == str(2 * 8192)
    assert known["--training.num_tokens_per_train_step"] == str(512 * 8192)
    assert "# cp_comm_type=a2a has no flag" in found


def test_torchtitan_replicates_without_zero():
    found = lines("torchtitan", tp=2, dp=4, framework="torchtitan", zero=0)
    assert "--parallelism.data_parallel_replicate_degree 4" in found
    assert "--parallelism.no-enable-sequence-parallel" in found
    assert "# zero=1 has no flag" in lines("torchtitan", dp=4, framework="torchtitan", zero=1)
