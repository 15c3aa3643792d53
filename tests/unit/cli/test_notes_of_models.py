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
