"""Megatron-Bridge, and update steps of verl, NeMo-RL and OpenRLHF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.api.experiments import load_experiment
from stagewright.errors import UserError

VERL = """
MEGATRON="actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \\
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
  actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True"
FSDP="actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\
  actor_rollout_ref.actor.fsdp_config.fsdp_size=4 actor_rollout_ref.actor.grad_clip=1.0"
if [ $BACKEND = megatron ]; then
  set_all="$MEGATRON --config-name=ppo_megatron_trainer.yaml"
else
  set_all=$FSDP
fi
python3 -m verl.trainer.main_ppo $set_all \\
  data.max_prompt_length=1024 data.max_response_length=3072 data.train_batch_size=512 \\
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.model.path=$HOME/models/Qwen3-30B-A3B \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 trainer.logger='["console"]' \\
  trainer.n_gpus_per_node=8 trainer.nnodes=2 algorithm.kl_ctrl.kl_coef=0.001 $@
"""

BASE = """
defaults: ../../grpo.yaml
cluster: {gpus_per_node: 8, num_nodes: 3}
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 4}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  max_total_sequence_length: 4096
  train_micro_batch_size: 2
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    sequence_parallel: true
    optimizer: {lr: 5.0e-7}
  generation:
    colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}
    vllm_cfg: {tensor_parallel_size: 4}
"""

OPENRLHF = """
read -r -d '' commands <<EOF
openrlhf.cli.train_dpo --train.batch_size 128 --train.micro_batch_size 2 \\
  --model.model_name_or_path meta-llama/Llama-3.1-8B --ds.param_dtype bf16 --ds.zero_stage 3 \\
  --data.max_len 2048 --model.gradient_checkpointing_enable --ds.lora.rank 16 --adam.lr 1e-6
EOF
deepspeed --module $commands
"""


def check(path: Path, wanted: dict[str, Any], variables: dict[str, str] | None = None) -> None:
    reading = sw.read_launch(path, variables)
    assert {name: reading.settings.get(name) for name in wanted} == wanted


def test_verl(tmp_path: Path) -> None:
    """Samples of an update are prompts times answers; Megatron-LM's keys are its flags."""
    path = tmp_path / "train.sh"
    path.write_text(VERL)
    common = {"model": "qwen3-30b-a3b", "gpus": 16, "seq_length": 4096, "global_batch_size": 512}
    check(path, common | {
        "framework": "megatron", "tp": 2, "ep": 4, "etp": 1, "zero": 1, "recompute": "full",
        "moe_token_dispatcher_type": "alltoall", "micro_batch_size": 2, "vpp": None,
    }, {"BACKEND": "megatron"})  # fmt: skip
    check(path, common | {
        "framework": None, "cp": 2, "cp_comm_type": "a2a", "zero": 3, "dp_shard": 4,
        "recompute": "full", "precision": "bf16", "micro_batch_size": 4, "clip_grad": True,
    })  # fmt: skip
    assert sw.load_run(path).dp == 8


def test_verl_errors(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(VERL.replace("$@", "actor_rollout_ref.actor.new_way=True"))
    with pytest.raises(UserError, match=r"actor\.new_way true is not known here"):
        sw.read_launch(path)
    sw.read_launch(path, ignore_unknown=True)


def test_nemo_rl(tmp_path: Path) -> None:
    """Defaults beside the recipe are below it; those elsewhere are named and not opened."""
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "defaults: ./base.yaml\npolicy: {megatron_cfg: {pipeline_model_parallel_size: 2}}\n"
        "cluster: {gpus_per_node: 4}\n"
    )
    check(path, {
        "model": "llama3.1-8b", "gpus": 8, "tp": 2, "pp": 2, "seq_length": 4096, "zero": 1,
        "micro_batch_size": 2, "global_batch_size": 128, "recompute": "full", "lora_rank": None,
        "sequence_parallel": True, "framework": "megatron",
    })  # fmt: skip
    notes = sw.read_launch(path).notes
    assert any("defaults ../../grpo.yaml are not beside the file" in note for note in notes)
    assert sw.load_run(path).dp == 2
    grpo = BASE.replace("../../grpo.yaml", "../../../grpo_math_1B.yaml").replace(
        "    enabled: true\n", "    enabled: true\n    expert_model_parallel_size: 8\n"
    )
    path.write_text(grpo.replace("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"))
    check(path, {"gpus": 16, "ep": 8, "etp": 1, "global_batch_size": 512, "micro_batch_size": 2})
    experiment = load_experiment(path)
    assert not experiment.execution.no_overlap
    assert "gradients are held and reduced in fp32 here" in str(sw.read_launch(path).notes)
    other = BASE.replace("enabled: false, tensor", "enabled: true, tensor")
    path.write_text(other.replace("defaults: ../../grpo.yaml", "defaults: recipe.yaml"))
    check(path, {"tp": 8, "zero": 3, "framework": None})


def test_openrlhf(tmp_path: Path) -> None:
    path = tmp_path / "dpo.sh"
    path.write_text(OPENRLHF)
    check(path, {
        "model": "llama3.1-8b", "zero": 3, "global_batch_size": 256, "micro_batch_size": 4,
        "seq_length": 2048, "recompute": "full", "lora_rank": 16, "no_overlap": ["dp"],
    })  # fmt: skip
    assert sw.load_run(path, {"dp": 8}).lora_rank == 16


BRIDGE = """
srun torchrun --nproc_per_node 8 --nnodes 2 scripts/training/run_recipe.py \\
  --recipe RECIPE --mode pretrain --dataset mock -sl 8192 -mb 1 -tp 2 \\
  model.sequence_parallel=true train.global_batch_size=128 ddp.overlap_param_gather=false \\
  model.recompute_granularity=selective 'model.recompute_modules=[core_attn]' logger.log_interval=1
"""
BRIDGE_YAML = """
dataset: {seq_length: 4096}
train: {train_iters: 100, global_batch_size: 8, micro_batch_size: 1}
model: {tensor_model_parallel_size: 2, virtual_pipeline_model_parallel_size: null}
ddp: {overlap_grad_reduce: false, grad_reduce_in_fp32: false}
mixed_precision: bf16_with_mxfp8_mixed
"""


def test_megatron_bridge(tmp_path: Path) -> None:
    """Overrides of a recipe, whose name has the model and more."""
    path = tmp_path / "train.sh"
    path.write_text(BRIDGE.replace("RECIPE", "llama31_8b_pretrain_32gpu_h100_fp8mx_config"))
    wanted = {"model": "llama3.1-8b", "tp": 2, "dp": 8, "seq_length": 8192, "micro_batch_size": 1,
              "global_batch_size": 128, "sequence_parallel": True, "recompute": "selective",
              "zero": 1, "precision": "fp8", "fp8_recipe": "mxfp8"}  # fmt: skip
    experiment = load_experiment(path)
    assert {name: getattr(experiment.run, name) for name in wanted} == wanted
    assert not experiment.execution.overlap_param_gather
    assert not experiment.execution.no_overlap
    assert "taken as pp 1, cp 1" in str(sw.read_launch(path).notes)
    path.write_text(path.read_text().replace("-sl 8192", "dataset.sequence_length=8192"))
    assert sw.load_run(path).seq_length == 8192
    assert sw.load_run(f"{path}?model.tensor_model_parallel_size=4").tp == 4
    path.write_text(path.read_text().replace("torchrun --nproc_per_node 8 --nnodes 2", "python"))
    assert sw.load_run(path).dp == 16  # 32 GPUs, after the recipe's name
    path.write_text(BRIDGE.replace("RECIPE", "llama3_8b_peft_config"))
    with pytest.raises(UserError, match="the recipe trains adapters; give --lora-rank"):
        sw.load_run(path)
    path.write_text(BRIDGE.replace("RECIPE", "llama3_8b model.hidden_size=1024"))
    with pytest.raises(UserError, match=r"model.hidden_size change sizes of the recipe's model"):
        sw.load_run(path)


def test_megatron_bridge_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(BRIDGE_YAML)
    experiment = load_experiment(path, {"model": "llama3.2-1b", "gpus": 8})
    wanted = {"tp": 2, "dp": 4, "vpp": 1, "zero": 1, "grad_reduce_dtype": "bf16",
              "precision": "fp8", "fp8_recipe": "mxfp8", "global_batch_size": 8}  # fmt: skip
    assert {name: getattr(experiment.run, name) for name in wanted} == wanted
    assert experiment.execution.no_overlap == {"dp"}
