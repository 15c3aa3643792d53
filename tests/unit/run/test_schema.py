"""The JSON schema of run files: takes what `load_run` takes, and refuses what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import stagewright as sw
from documents import PAGES, blocks
from helpers import DOCS, EXAMPLES, cases, needed

jsonschema = needed("jsonschema", "dev")
SCHEMA = json.loads((DOCS / "reference/run.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def errors(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_schema_is_one():
    VALIDATOR.check_schema(SCHEMA)


RUN_FILES = [
    *(path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.rglob("*.yaml"))),
    *(b.text for page in PAGES for b in blocks(page, "yaml") if "model:" in b.text),
    "{model: gpt2, parallelism: {tp: 2, zero: 1}, batch: {micro_batch_size: 2}}",
    "{model: {model: gpt2, layers: 2}, precision: {precision: fp8}}",
    "{model: gpt2, tensor-model-parallel-size: 2, use_distributed_optimizer: true}",
    "{model: gpt2, training: {seq_len: 64}, parallelism: {tensor_parallel_degree: 2}}",
    "{model: gpt2, parallelism.tensor_parallel_degree: 2}",
    "{model: gpt2, recompute_modules: 'norm, activation', recompute: selective}",
    "{model: gpt2, precision: bfloat16, no_overlap: [dp], layers_per_stage: [6, 6], pp: 2}",
    "{model: gpt2, tokens: 15T, detect: 60s, checkpoint: 30min, price: 2}",
    "{model: gpt2, mode: decode, requests: [{context_length: 512}], device_memory: 80GB}",
    "{model: gpt2, mode: decode, device_memory: 80000000000}",
    "{model: gpt2, mode: decode, prefill: {tp: 2}, isl: 512}",
    "{model: gpt2, recompute_method: block, recompute: full, recompute_num_layers: 2}",
    "{model: mixtral-8x7b, ep: 2, dp: 2, expert_load: 1.5}",
]


@pytest.mark.parametrize("text", RUN_FILES)
def test_run_files_validate(text: str, tmp_path: Path):
    assert errors(text) == []
    (tmp_path / "run.yaml").write_text(text)
    sw.load_run(tmp_path / "run.yaml")


@cases
def test_mistakes_do_not_validate(text: str, tmp_path: Path):
    assert errors(text)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(sw.UserError):
        sw.load_run(tmp_path / "run.yaml")


def test_written_run_files_validate(tmp_path: Path):
    """Of a search of steps, and of a search of servers."""
    for name, found in {
        "step.yaml": sw.search("gpt2", "h100-sxm", gpus=2, global_batch_size=8, seq_length=64),
        "serve.yaml": sw.search_serving(
            "llama3.1-8b", "h100-sxm", rate=1, isl=64, osl=8, e2e=9000, tp=[1]
        ),
    }.items():
        found.write(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "hardware: h100-sxm" in text
        assert errors(text) == []


def test_settings_are_described():
    def described(value: dict[str, Any]) -> bool:
        return bool(value.get("description"))

    tp = SCHEMA["definitions"]["tp"]
    assert tp == {
        "description": tp["description"],
        "maximum": 2**31,
        "minimum": 1,
        "type": "integer",
    }
    of_runs = [of for name, of in SCHEMA["definitions"].items() if name in sw.Run.model_fields]
    assert len(of_runs) > 100
    assert all(map(described, of_runs))
    assert SCHEMA["definitions"]["recompute"]["enum"] == ["none", "selective", "full"]
