"""Launch files in commands and in the API; what is no launch file, and what must not be opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stagewright as sw
from helpers import cases
from stagewright.cli import main as cli
from stagewright.errors import UserError
from stagewright.launch import files

SCRIPT = """#!/bin/bash
# A small model that is trained on one node.
SIZE=${SIZE:-tiny}
if [ "$SIZE" = tiny ]; then HIDDEN=256; else HIDDEN=512; fi
MODEL=(
  --num-layers 2 --hidden-size $HIDDEN --num-attention-heads 4 --swiglu --disable-bias-linear
  --normalization RMSNorm --position-embedding-type rope  # as Llama has them
  --vocab-size 1000 --max-position-embeddings 512
)
torchrun --nproc_per_node 4 --nnodes ${NODES:-1} pretrain_gpt.py "${MODEL[@]}" \\
  --tensor-model-parallel-size 2 --seq-length 512 --micro-batch-size 1 --global-batch-size 8 \\
  --bf16 --lr 1e-4 --save $(touch {canary})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("{canary}", str(tmp_path / "canary")))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(each) for each in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


def test_a_script_is_a_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MODEL, --config and the API give the same step; nothing of the script is run."""
    code, out, err = run(capsys, "simulate", script, "--hardware", "h100-sxm", "--json")
    assert (code, "Megatron-LM" in err) == (0, True)
    seconds = json.loads(out)["step_seconds"]
    _, out, _ = run(capsys, "simulate", "--config", script, "--hardware", "h100-sxm", "--json")
    assert json.loads(out)["step_seconds"] == seconds
    assert sw.simulate(script, "h100-sxm").seconds == seconds
    assert sw.load_run(script).dp == 2
    assert not (script.parent / "canary").exists()


def test_settings_and_variables(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", script, "--set", "SIZE=large", "--set", "NODES=2", "--json")
    large = json.loads(out)
    assert large["world_size"] == 8
    _, out, _ = run(capsys, "show", script, "--tp", "4", "--layers", "1", "--json")
    assert json.loads(out)["world_size"] == 4
    code, _, err = run(capsys, "show", script, "--set", "SISE=large")
    assert (code, "has no variable SISE" in err) == (2, True)
    code, _, err = run(capsys, "show", "gpt2", "--set", "A=1")
    assert (code, "of a launch file" in err) == (2, True)


def test_what_was_read(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", script, "--launch")
    assert code == 0
    assert "--tensor-model-parallel-size 2" in out
    assert "learning rate" in out
    _, out, _ = run(capsys, "show", script, "--launch", "--json")
    reading = json.loads(out)
    assert {"flag": "--lr", "value": "1e-4"}.items() <= reading["ignored"][-2].items() | set()
    assert reading["settings"]["tp"] == 2
    code, _, err = run(capsys, "show", "gpt2", "--launch")
    assert (code, "of a launch file" in err) == (2, True)


def test_other_commands(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "traces"
    assert run(capsys, "generate", script, "-o", out)[0] == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["run"]["tp"] == 2
    assert sw.load_run(out / "manifest.json").tp == 2
    page = tmp_path / "page.html"
    assert run(capsys, "report", script, "-o", page)[0] == 0
    assert run(capsys, "report", script, script, "-o", tmp_path / "both.html")[0] == 0


def test_a_search_finds_another_layout(script: Path) -> None:
    """The model, the batch and the number of GPUs are the file's; the layout is open."""
    found = sw.search(script, "h100-sxm", most=4, top=4)
    settings = [str(row["settings"]) for row in found.table("best").rows]
    assert any("tp=" not in text for text in settings)
    assert found.table("best").rows[0]["settings"] != "tp=2 dp=2"
    path = script.parent / "best.yaml"
    found.write(path)
    assert sw.load_run(path).describe() == found.run().describe()


def test_a_model_in_a_run_file(script: Path, tmp_path: Path) -> None:
    """A run file may name the model of a script, whose settings are not taken.

    A file without the layout and the batch that the script gives would be another run.
    """
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {script}?SIZE=large\ntp: 1\n")
    with pytest.raises(UserError, match=r"sizes of the model alone; add .* seq_length: \d+, glob"):
        sw.load_run(config)
    batch = "seq_length: 64\nglobal_batch_size: 8\n"
    config.write_text(config.read_text() + batch)
    loaded = sw.load_run(config)
    assert (loaded.tp, loaded.dp) == (1, 1)
    assert sw.resolve(loaded.model).hidden_size == 512
    config.write_text(f"model: {script}\n{batch}")
    with pytest.raises(UserError, match=r"sizes of the model alone; add .* such as tp: 2, or name"):
        sw.load_run(config)


@cases
def test_no_launch_files(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert files.find(path) is None


def test_refusals(tmp_path: Path) -> None:
    """A line each: other commands, nothing, too much, and a shell's error."""
    path = tmp_path / "x.sh"
    cases = {
        "#!/bin/bash\nrsync --archive a b": "starts rsync --archive a b; wanted a command of",
        "accelerate launch --config_file a.yaml run.py --bf16": "use the file that it names: MODEL "
        "--config a.yaml, with --seq-length",
        "#!/bin/bash\nX=1": "starts nothing",
        "#!/bin/bash\nif true; then": "cannot read the end",
        "#!/bin/bash\n#" + "x" * 10_000_000: "over 524288 bytes",
        "python tools/convert.py --num-layers 2 --hidden-size 8 --num-attention-heads 2":
            "runs no training step",
    }  # fmt: skip
    for text, said in cases.items():
        path.write_text(text)
        with pytest.raises(UserError) as error:
            sw.load_run(path)
        assert said in str(error.value)


LARGE = """#!/bin/bash
{start} pretrain_gpt.py --num-layers 64 --hidden-size 8192 --num-attention-heads 64 \\
  --hidden-dropout 0 --attention-dropout 0 --vocab-size 32000 --max-position-embeddings 4096 \\
  --num-experts 8 --moe-ffn-hidden-size 8192 --expert-model-parallel-size 8 \\
  --seq-length 4096 --micro-batch-size 8 --global-batch-size 512 --bf16 \\
  --recompute-granularity selective --recompute-modules layernorm mhc
"""


def test_an_assumed_dp_gives_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.sh"
    path.write_text(LARGE.format(start="python"))
    _, out, err = run(capsys, "show", path, "--json")
    assert (json.loads(out)["world_size"], "dp is 8, the least" in err) == (8, True)
    for given in (("--gpus", "64"), ("--nodes", "8", "--hardware", "h100-sxm"), ("--dp", "64")):
        _, out, err = run(capsys, "show", path, *given, "--json")
        assert (json.loads(out)["world_size"], "the least" in err) == (64, False)
    assert sw.simulate(path, "h100-sxm", gpus=16, layers=1).machine.gpus == 16


def test_an_upper_bound_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recomputation of modules that is left out makes memory a bound; another one replaces it."""
    path = tmp_path / "large.sh"
    path.write_text(LARGE.format(start="torchrun --nproc_per_node 8"))
    code, out, err = run(capsys, "simulate", path, "--hardware", "h100-sxm")
    assert (code, "does not fit" in out + err) == (0, False)
    assert "an upper bound, so it may fit (without --recompute-modules mhc)" in out
    full = ("--recompute", "full", "--hardware", "h100-sxm")
    code, out, err = run(capsys, "simulate", path, *full)
    assert (code, "it does not fit" in out, "--recompute-modules" in out + err) == (3, True, False)
    assert sw.simulate(path, "h100-sxm", recompute="full").fit.cannot_fit
    same = ("--recompute", "selective", "--hardware", "h100-sxm")
    code, out, err = run(capsys, "simulate", path, *same)
    assert (code, "--recompute-modules mhc" in err, "modules=norm" in out) == (0, True, True)


def test_too_few_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.sh"
    path.write_text(LARGE.format(start="torchrun --nproc_per_node 8 --nnodes ${NODES:-1}"))
    said = "the file starts 1 node of 8 GPUs, but its layout needs a multiple of 16 GPUs: --gpus 16"
    pipelined = ("--set", "pipeline-model-parallel-size=2")
    code, _, err = run(capsys, "show", path, *pipelined)
    assert (code, said in err) == (2, True)
    code, _, err = run(capsys, "show", path, *pipelined, "--gpus", "16")
    assert (code, "its layout needs" in err) == (0, False)


def test_notes_have_the_name_of_the_file(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "show", script)
    assert "note: train.sh is Megatron-LM's" in err
    assert str(script.parent) not in err
