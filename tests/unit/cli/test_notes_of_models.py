"""What was assumed of a config.json is said on stderr, and nothing but the result on stdout."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from stagewright.cli.main import commands

SIZES = {
    "architectures": ["BrandNewForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def test_notes_go_to_stderr(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES | {"vision_depth": 3}))
    done = CliRunner().invoke(commands, ["show", str(file), "--json"])
    assert json.loads(done.stdout)
    first, second = done.stderr.splitlines()
    assert first.startswith("stagewright: note: BrandNewForCausalLM is not known")
    assert second.endswith("may change parameters, FLOPs or memory: vision_depth")


def test_as_reads_a_file_as_a_known_family(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    done = CliRunner().invoke(commands, ["show", str(file), "--as", "qwen3", "--json"])
    assert json.loads(done.stdout)
    assert done.stderr == ""


def test_a_name_that_says_a_quantization_which_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "Some-Llama-NVFP4.json"
    file.write_text(json.dumps(SIZES | {"architectures": ["LlamaForCausalLM"]}))
    serve = ["show", str(file), "--mode", "decode"]
    done = CliRunner().invoke(commands, serve)
    assert "hf_quant_config.json" in done.stderr
    assert "--weight-precision" in done.stderr
    assert "weights in bf16, KV cache in bf16" in done.stdout
    done = CliRunner().invoke(commands, [*serve, "--weight-precision", "nvfp4"])
    assert "hf_quant_config" not in done.stderr
    assert "weights in nvfp4 and bf16, KV cache in bf16" in done.stdout
    assert "hf_quant" not in CliRunner().invoke(commands, ["show", str(file)]).stderr


def test_sequences_beyond_the_positions_of_the_model_are_noted() -> None:
    model = ["show", "llama3-8b", "--layers", "1"]
    for length in (["--seq-length", "8193"], ["--mode", "decode", "--context-length", "8192"]):
        said = CliRunner().invoke(commands, [*model, *length])
        assert said.exit_code == 0
        assert "longer than the 8,192 positions" in said.stderr
    assert CliRunner().invoke(commands, [*model, "--seq-length", "8192"]).stderr == ""


def test_durations_of_another_run_are_refused_once(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("kernel,shape,dtype,duration_us\nnothing,m=1,bf16,5\n")
    run = ["simulate", "llama3-8b", "--layers", "1", "--hardware", "h100-sxm"]
    done = CliRunner().invoke(commands, [*run, "--durations", str(file)])
    assert done.exit_code != 0
    assert "no row has the kernel, shape and dtype" in str(done.exception) + done.output
