"""`stagewright diff` of runs: what differs, figures of both, exit codes."""

import json
from pathlib import Path

import pytest

import stagewright as sw
from helpers import Command, cases

SCRIPT = """\
#!/bin/bash
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 256 \\
  --num-attention-heads 4 --ffn-hidden-size 1024 --vocab-size 1024 --seq-length 128 \\
  --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --bf16 \\
  --tensor-model-parallel-size ${TP:-1} --lr 3e-4 --attention-dropout 0 --hidden-dropout 0
"""
SERVER = """\
vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --max-num-seqs 8 &
vllm bench serve --random-input-len 128 --random-output-len 16 --max-concurrency $CONC \\
  --num-prompts 16
"""


@pytest.fixture
def call(command: Command) -> Command:
    return lambda *words: command("diff", *words, "--hardware", "h100-sxm")


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old.sh").write_text(SCRIPT)
    Path("serve.sh").write_text(SERVER)
    return tmp_path


def edited(name: str, old: str, new: str) -> str:
    """A copy of a file with another text in one place."""
    text = Path(name).read_text()
    assert old in text
    Path("new.sh").write_text(text.replace(old, new))
    return "new.sh"


def test_figures_are_those_of_simulate(scripts: Path, call: Command):
    code, out, _ = call("old.sh", edited("old.sh", "${TP:-1}", "2"), "--json")
    found = json.loads(out)
    assert code == 0
    assert [(row["setting"], row["old"], row["new"]) for row in found["settings"]] == [
        ("tp", 1, 2),
        ("dp", 4, 2),
    ]
    assert not found["model"]
    old, new = (sw.simulate(name, "h100-sxm") for name in ("old.sh", "new.sh"))
    figures = {row["figure"]: row for row in found["figures"]}
    for name, of in {
        "step": lambda step: step.seconds,
        "MFU": lambda step: step.mfu,
        "peak memory": lambda step: step.peak_memory,
        "USD per million tokens": lambda step: step.expense().usd_per_million_tokens,
    }.items():
        assert (figures[name]["old"], figures[name]["new"]) == (of(old), of(new))
    assert figures["step"]["change"] == pytest.approx(new.seconds / old.seconds - 1)
    assert found["slowdown"] == pytest.approx(new.seconds / old.seconds - 1)  # of equal batches


def test_nothing_changes(scripts: Path, call: Command):
    Path("old.sh").write_text(SCRIPT.replace("#!/bin/bash", "#!/bin/bash\n# a comment"))
    code, out, _ = call("old.sh", edited("old.sh", "--lr 3e-4", "--lr 1e-4"))
    assert code == 0
    assert "no change in what the step is; 1 flag differs without effect" in out
    assert "--lr  3e-4  1e-4" in out
    assert "step  " not in out  # nothing is simulated
    assert call("old.sh", "old.sh")[1].startswith("no change in what the step is\n")


def test_parts_of_the_model(scripts: Path):
    found = sw.diff("old.sh", edited("old.sh", "--num-layers 2", "--num-layers 4"), "h100-sxm")
    assert found.table("model").rows == [{"part": "num_layers", "old": "2", "new": "4"}]
    assert found.verdict.endswith(", of another model")
    assert found.slowdown > 0.5


@cases
def test_exit_codes(scripts: Path, call: Command, words: tuple[str, ...], code: int, said: str):
    got, _, err = call(*words)
    assert got == code
    assert said in err


def test_small_difference(scripts: Path, call: Command):
    out = call("old.sh", "old.sh", "--lr-decay-iters", "3")[1]
    assert "no change" in out
    found = sw.diff("llama3-8b?micro_batch_size=1", "llama3-8b?micro_batch_size=2", "h100-sxm",
                    layers=2, global_batch_size=2)  # fmt: skip
    assert abs(found.slowdown) < 0.02
    assert "below 2% does not say which is faster" in found.verdict


def test_effects_that_are_left_out(scripts: Path, call: Command):
    """A flag that changes the step, and is not modelled, is no flag without effect."""
    verdict = "leave out what --delay-wgrad-compute would change"
    out = call("old.sh", "old.sh?delay-wgrad-compute&lr-decay-iters=3")[1]
    others = "1 flag differs without effect on the figures"
    assert out.splitlines()[0] == f"no change in the figures, which {verdict}; {others}"
    out = call("old.sh", "old.sh?TP=4&delay-wgrad-compute")[1]
    assert out.splitlines()[0].endswith(f"; the figures {verdict}")


def test_servers(scripts: Path, call: Command):
    _, out, _ = call("serve.sh", "serve.sh?tensor-parallel-size=2", "--set", "CONC=4", "--json")
    found = json.loads(out)
    assert [row["setting"] for row in found["settings"]] == ["tp"]
    one = sw.serve("serve.sh?CONC=4", "h100-sxm").summary
    two = sw.serve("serve.sh?CONC=4", "h100-sxm", tp=2).summary
    figures = {row["figure"]: (row["old"], row["new"]) for row in found["figures"]}
    assert figures["requests/s"] == (one.request_rate, two.request_rate)
    assert figures["TTFT, mean"] == (one.ttft.mean, two.ttft.mean)
    assert found["slowdown"] == pytest.approx(two.e2e.mean / one.e2e.mean - 1)
    assert "output tokens/s per GPU" in found["verdict"]  # of another number of GPUs


def test_new_file_alone(scripts: Path, call: Command):
    _, out, _ = call("/dev/null", "old.sh", "--json")
    assert json.loads(out) == json.loads(json.dumps(sw.simulate("old.sh", "h100-sxm").to_dict()))


def test_markdown(scripts: Path, call: Command):
    name = edited("old.sh", "--lr 3e-4", "--lr '@team|<b>'")
    _, out, _ = call("old.sh", f"{name}?TP=2", "--markdown")
    assert out.startswith("new is ")
    assert "\n| tp | 1 | 2 |\n" in out
    assert "| @&#8203;team\\|\\<b\\> |" in out
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert {line.count("|") - line.count("\\|") for line in tables} == {4, 5, 8}


@cases
def test_errors(scripts: Path, call: Command, words: tuple[str, ...], said: str):
    Path("empty.sh").write_text("#!/bin/bash\necho nothing\n")
    Path("bare.sh").write_text("echo nothing\n")
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_run_files(scripts: Path):
    Path("run.yaml").write_text("model: gpt2\nparallelism: {tp: 2}\nhardware: h100-sxm\n")
    found = sw.diff("run.yaml", "run.yaml?tp=4", layers=4, seq_length=64)
    assert [(row["setting"], row["old"], row["new"]) for row in found.table("settings").rows] == [
        ("tp", "2", "4")
    ]


@cases
def test_values_of_all_types_are_json(call: Command, old: str, new: str, value: object):
    _, out, _ = call(old, new, "--layers", "4", "--seq-length", "64", "--json")
    (row,) = json.loads(out)["settings"]
    assert [row["old"], row["new"]] == json.loads(json.dumps(value))


def test_parts_of_other_models_are_json(call: Command):
    _, out, _ = call("mamba2-1.3b", "deepseek-v3", "--layers", "2", "--seq-length", "64", "--json",
                     "--allow-oom")  # fmt: skip
    rows = {row["part"]: row for row in json.loads(out)["model"]}
    assert rows["state_space"]["old"]["heads"] == 64
    assert rows["state_space"]["new"] is None


def test_settings_behind_names_of_files(scripts: Path):
    """The model of a file that names none, and the load of a server."""
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": '
                               '{"stage": 3}, "bf16": {"enabled": true}}')  # fmt: skip
    found = sw.diff("ds.json?model=gpt2", "ds.json?model=gpt2&zero=1", "h100-sxm", gpus=2,
                    layers=2, global_batch_size=4)  # fmt: skip
    assert found.new.model.name == "gpt2"
    assert found.table("settings").columns["setting"] == ["zero"]
    found = sw.diff("serve.sh?CONC=4", "serve.sh?CONC=4&concurrency=8", "h100-sxm")
    assert found.table("settings").rows == [{"setting": "concurrency", "old": "4", "new": "8"}]
    assert found.verdict.endswith(", under another load")


def test_values_of_one_side_alone(scripts: Path, call: Command):
    """`--set` gives a variable to the file that has it; what stands behind a name wins."""
    new = edited("old.sh", "${TP:-1}", "$SIZE")
    _, out, _ = call("old.sh?TP=4", new, "--set", "SIZE=2", "--set", "TP=8", "--json")
    assert [json.loads(out)["settings"][0][side] for side in ("old", "new")] == [4, 2]
