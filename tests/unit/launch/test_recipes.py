"""Files of torchtitan, DeepSpeed and Accelerate as runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import cases
from stagewright.api.experiments import load_experiment
from stagewright.errors import UserError
from stagewright.launch import files

TOML = """# A job configuration.
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 4096
max_norm = 1.0
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "gradient_clipping": 0,
}  # fmt: skip

ACCELERATE = """
distributed_type: FSDP
fsdp_config: {fsdp_activation_checkpointing: true, fsdp_reshard_after_forward: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 8}
"""


def settings(run: sw.Run, wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(run, name) for name in wanted}


def test_torchtitan(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(TOML)
    wanted = {"model": "llama3-8b", "framework": "torchtitan", "tp": 2, "dp": 4, "zero": 3,
              "micro_batch_size": 2, "seq_length": 4096, "recompute": "full",
              "sequence_parallel": True, "clip_grad": True}  # fmt: skip
    assert settings(sw.load_run(path), wanted) == wanted
    assert sw.load_run(path, {"parallelism.tensor_parallel_degree": 4}).tp == 4
    path.write_text(TOML.replace("= 4\n", "= -1\n"))
    assert sw.load_run(path, {"gpus": 16}).dp == 8


@pytest.mark.parametrize(
    ("name", "text", "query", "wanted"),
    [
        ("a.toml", TOML, "activation_checkpoint.mode=none&training.seq_len=2048",
         {"recompute": "none", "seq_length": 2048}),
        ("a.toml", TOML, "parallelism.tensor-parallel-degree=1", {"tp": 1}),
        ("a.toml", TOML, "training.sequences=2048", "training.sequences 2048 is not known here"),
        ("a.toml", TOML, "CONC=16", "has no variable CONC that --set could give"),
        ("a.json", json.dumps(DEEPSPEED), "zero_optimization.stage=1&train_batch_size=16",
         {"zero": 1, "dp": 2, "optimizer_cpu_offload": True}),
        ("a.yaml", ACCELERATE, "mixed_precision=fp8&num_processes=8",
         {"precision": "fp8", "dp": 4}),
        ("a.sh", "torchrun run.py --training.seq_len 64 --model.name llama3 --model.flavor 8B",
         "training.seq_len=128", {"seq_length": 128}),
    ],
)  # fmt: skip
def test_keys_are_replaced(
    name: str, text: str, query: str, wanted: dict[str, Any] | str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    given = {"model": "gpt2"} if name != "a.toml" else {}
    if isinstance(wanted, str):
        with pytest.raises(UserError) as error:
            sw.load_run(f"{path}?{query}", given)
        assert wanted in str(error.value)
    else:
        assert settings(sw.load_run(f"{path}?{query}", given), wanted) == wanted


def test_torchtitan_on_a_command_line(tmp_path: Path) -> None:
    """Options replace what the file that they name says; torchrun says how many GPUs there are."""
    (tmp_path / "llama.toml").write_text(TOML.replace("shard_degree = 4", "shard_degree = -1"))
    path = tmp_path / "run.sh"
    command = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file ./llama.toml"
    path.write_text(f"{command} --parallelism.tensor_parallel_degree 4 --training.seq_len=2048\n")
    run = sw.load_run(path)
    assert (run.tp, run.dp, run.seq_length) == (4, 2, 2048)


def test_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    with pytest.raises(UserError, match=r"names no model; name a model: MODEL --config"):
        sw.load_run(path)
    with pytest.raises(UserError, match="give --global-batch-size, 8 x dp"):
        sw.load_run(path, {"model": "gpt2"})
    given = {"model": "gpt2", "dp": 4, "global_batch_size": 32}
    wanted = {"zero": 2, "micro_batch_size": 2, "optimizer_cpu_offload": True,
              "precision": "bf16", "clip_grad": False, **given}  # fmt: skip
    experiment = load_experiment(path, given)
    assert settings(experiment.run, wanted) == wanted
    assert experiment.execution.no_overlap == {"dp"}  # overlap_comm is off but in stage 3


@cases
def test_batches_and_precision_of_deepspeed(
    keys: dict[str, Any], given: dict[str, Any], wanted: str | dict[str, Any], tmp_path: Path
) -> None:
    """Batches follow from one another; what the program has instead of `auto` is asked for."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | keys))
    if isinstance(wanted, str):
        with pytest.raises(UserError) as error:
            sw.load_run(path, {"model": "gpt2", **given})
        assert wanted in str(error.value)
    else:
        assert settings(sw.load_run(path, {"model": "gpt2", **given}), wanted) == wanted


def test_defaults_of_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: DEEPSPEED\nmixed_precision: no\nnum_processes: 4\n")
    wanted = {"zero": 2, "precision": "fp32", "dp": 4}
    assert settings(sw.load_run(path, {"model": "gpt2"}), wanted) == wanted
    path.write_text("distributed_type: FSDP\nnum_processes: eight\n")
    with pytest.raises(UserError, match="num_processes is 'eight', wanted a whole number from 1"):
        sw.load_run(path, {"model": "gpt2"})


def test_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(ACCELERATE)
    wanted = {"model": "gpt2", "tp": 2, "dp": 8, "zero": 3, "recompute": "full",
              "precision": "bf16", "reshard_after_forward": True}  # fmt: skip
    assert settings(sw.load_run(path, {"model": "gpt2"}), wanted) == wanted


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.toml", TOML + "[surprise]\nkey = 1\n", "surprise.key 1 is not known here"),
        ("x.toml", TOML.replace('"full"', '"some"'), "'some'"),
        ("x.json", json.dumps(DEEPSPEED | {"amp": {"enabled": True}}), "amp.enabled true"),
        ("x.yaml", ACCELERATE.replace("FSDP", "TPU", 1), "distributed_type is TPU"),
        ("x.yaml", ACCELERATE + "megatron_lm_config: {tp: 2}\n", "through Accelerate"),
    ],
)
def test_refusals(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as error:
        sw.load_run(path, {"model": "gpt2"})
    assert said in str(error.value)


def test_a_run_file_with_names_of_torchtitan_is_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nparallelism:\n  tensor_parallel_degree: 2\n")
    assert files.find(path) is None
    assert sw.load_run(path).tp == 2


CONFIGURATIONS = """
from torchtitan.models.llama3.config_registry import llama3_8b

def full() -> Trainer.Config:
    spec = model_registry("8B", converters=[
        Float8LinearConverter.Config(emulate=False), Float8GroupedExpertsConverter.Config(),
    ])
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=10
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        checkpoint=CheckpointManager.Config(interval=500),
    )

def longer() -> Trainer.Config:
    config = full()
    config.training.max_context_length = 8192
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    config.parallelism.num_pp_microbatches = 8
    return config

def other() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.data_parallel_shard_degree = 8
    return config
"""


def test_configurations_of_torchtitan_in_python(tmp_path: Path) -> None:
    """A function is read after the one of the file that it begins with; others are a model's."""
    path = tmp_path / "recipes.py"
    path.write_text(CONFIGURATIONS)
    with pytest.raises(UserError, match="has full, longer, other; give one: --set CONFIG=full"):
        sw.load_run(path)
    wanted = {"model": "llama3.1-8b", "framework": "torchtitan", "tp": 2, "dp": 4, "zero": 3,
              "micro_batch_size": 2, "seq_length": 4096, "recompute": "full", "precision": "fp8",
              "fp8_recipe": "rowwise", "sequence_parallel": True}  # fmt: skip
    experiment = load_experiment(f"{path}?CONFIG=full")
    assert settings(experiment.run, wanted) == wanted
    assert experiment.execution.launch_mode == "cuda_graph"  # its default
    longer = {"pp": 2, "vpp": 2, "schedule": "zbv", "seq_length": 8192, "micro_batch_size": 1,
              "reshard_after_forward": False, "global_batch_size": 32}  # fmt: skip
    with pytest.raises(UserError, match="num_pp_microbatches is 8; give --global-batch-size, 8 x"):
        sw.load_run(f"{path}?CONFIG=longer")
    run = sw.load_run(f"{path}?CONFIG=longer", {"global_batch_size": 32})
    assert settings(run, longer) == longer
    reading = sw.read_launch(f"{path}?CONFIG=other")
    assert reading.settings["model"] == "llama3-8b"
    assert any("what llama3.llama3_8b sets itself" in note for note in reading.notes)


def test_a_module_without_a_configuration_is_no_launch_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text('"""Starts with --tensor-model-parallel-size 2."""\n')
    assert files.find(path) is None
    path.write_text("def broken() -> Trainer.Config:\n    return (\n")
    assert files.find(path) is None


def test_hostile_configurations(tmp_path: Path) -> None:
    """Neither deep nesting nor functions that call one another take long."""
    path = tmp_path / "recipes.py"
    path.write_text("\n".join(
        f"def f{n}() -> Trainer.Config:\n    a = f{n + 1}()\n    b = f{n + 2}()\n    return b"
        for n in range(60)
    ))  # fmt: skip
    assert files.read(f"{path}?CONFIG=f0").tool == "torchtitan"
    product = "2*" * 3000
    path.write_text(
        f"def f() -> Trainer.Config:\n    c = g()\n    c.a = {product}2\n    return c\n"
    )
    assert files.find(path) is None or files.read(path)
    (tmp_path / "x.toml").write_text(f"[model]\nname = 'x'\n[training]\na.{'a.' * 2000}a = 1\n")
    with pytest.raises(UserError):
        sw.load_run(tmp_path / "x.toml")


def test_a_converter_of_torchtitan_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipes.py"
    path.write_text(CONFIGURATIONS.replace("Float8GroupedExpertsConverter", "LoRAConverter"))
    with pytest.raises(UserError, match=r"model_spec.converters LoRAConverter is not modelled"):
        sw.load_run(f"{path}?CONFIG=full")
