"""Commands with arguments of Hugging Face's Trainer, and the files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.api.experiments import load_experiment
from stagewright.errors import UserError

FLAGS = ("--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --output_dir out "
         "--gradient_accumulation_steps 8 --max_length 2048")  # fmt: skip
AUTO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
"""


def script(folder: Path, command: str) -> Path:
    (folder / "ds.json").write_text(json.dumps(AUTO))
    (folder / "a.yaml").write_text(FSDP)
    (folder / "list.yaml").write_text("deepspeed_config: 3\nfsdp_config: []\n1: 2\n")
    path = folder / "train.sh"
    path.write_text(f"#!/bin/bash\n{command}\n")
    return path


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (f"torchrun --nproc_per_node 4 run_clm.py {FLAGS} --block_size 4096 "
         "--gradient_checkpointing",
         {"model": "qwen3-8b", "dp": 4, "zero": 0, "precision": "fp32", "micro_batch_size": 2,
          "global_batch_size": 64, "seq_length": 4096, "recompute": "full"}),
        ("python run.py --model_name_or_path Qwen/Qwen3-8B --bf16 True --max_length 64 --seed 1",
         {"micro_batch_size": 8, "dp": 1, "precision": "bf16", "recompute": "none"}),
        (f"torchrun --nproc_per_node 4 x.py {FLAGS} --bf16 --fsdp 'full_shard auto_wrap' "
         "--fsdp_config '{\"activation_checkpointing\": true}' --optim adamw_torch_fused",
         {"zero": 3, "recompute": "full", "optimizer": "adamw"}),
        (f"accelerate launch --config_file a.yaml run.py {FLAGS}",
         {"zero": 3, "dp": 8, "precision": "bf16", "reshard_after_forward": False,
          "recompute": "full", "global_batch_size": 128}),
        (f"accelerate launch --config_file a.yaml --num_processes 16 --mixed_precision no "
         f"--fsdp_reshard_after_forward true run.py {FLAGS}",
         {"dp": 16, "precision": "fp32", "reshard_after_forward": True}),
        (f"accelerate launch --use_deepspeed --num_processes 16 --num_machines 2 "
         f"--deepspeed_config_file ds.json run.py {FLAGS} --bf16 --dtype bfloat16",
         {"dp": 16, "zero": 2, "clip_grad": False, "params_dtype": None, "precision": "bf16"}),
        (f"deepspeed --num_gpus 8 run.py {FLAGS} --fp16 --deepspeed ds.json",
         {"dp": 8, "zero": 2, "precision": "bf16", "global_batch_size": 128}),
        (f"deepspeed --num_gpus 8 run.py {FLAGS} --lora_r 8", {"lora_rank": None}),
        ("accelerate launch --multi_gpu --num_processes 2 sft.py --use_peft --load_in_4bit "
         "--per_device_train_batch_size 4 --model_name_or_path Qwen/Qwen3-8B --lora_r 8",
         {"lora_rank": 8, "lora_target_modules": ("q_proj", "v_proj"), "quantize_base": "nf4",
          "seq_length": 1024, "precision": "bf16", "recompute": "full", "dp": 2}),
        (f"torchrun --nproc-per-node 2 sft.py {FLAGS} --bf16 False --gradient_checkpointing False "
         "--use_peft --lora_target_modules all-linear",
         {"precision": "fp32", "recompute": "none", "lora_target_modules": (
             "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}),
        (f"torchrun run.py {FLAGS} --deepspeed other.json", "other.json is not in the script's"),
        (f"torchrun run.py {FLAGS} --deepspeed list.yaml", "1 2 is not known here"),
        (f"accelerate launch --config_file list.yaml run.py {FLAGS}", "is not known here"),
        (f"torchrun run.py {FLAGS} --fsdp 'hybrid_shard auto_wrap'", "_shard is not modelled"),
        (f"torchrun run.py {FLAGS} --optim adamw_bnb_8bit", "adamw_bnb_8bit is not modelled"),
        (f"torchrun run.py {FLAGS} --load_in_8bit", "--load_in_8bit true is not modelled"),
        (f"torchrun run.py {FLAGS} --surprise 1", "--surprise 1 is not known here"),
        (f"torchrun run.py {FLAGS} --bf16", "steps is 8; give --global-batch-size, 16 x dp"),
        ("torchrun run.py --per_device_train_batch_size 2 --bf16 --seed 1", "give --seq-length"),
        (f"torchrun --nproc_per_node 2 run.py {FLAGS} --model_name_or_path me/mine", "no preset"),
        (f"deepspeed --num_gpus 2 run.py {FLAGS} --deepspeed "
         "'{\"train_micro_batch_size_per_gpu\": 4}'", "is 4 in {"),
    ],
)  # fmt: skip
def test_commands(command: str, wanted: str | dict[str, Any], tmp_path: Path) -> None:
    path = script(tmp_path, command)
    if isinstance(wanted, str):
        with pytest.raises(UserError) as error:
            sw.load_run(path)
        assert wanted in str(error.value)
    else:
        run = load_experiment(path).run
        assert {name: getattr(run, name) for name in wanted} == wanted


def test_options_beside_the_script(tmp_path: Path) -> None:
    path = script(tmp_path, f"torchrun --nproc_per_node $N run.py {FLAGS} --deepspeed other.json")
    run = sw.load_run(f"{path}?N=4&per-device-train-batch-size=1&ignore-unknown", {"zero": 1})
    assert (run.micro_batch_size, run.dp, run.global_batch_size, run.zero) == (1, 4, 32, 1)
