"""Examples in every help, which run as they stand; completion; what a mistyped word is told."""

import gzip
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

import stagewright as sw
from helpers import ROOT, cases
from recorded_steps import two_ranks
from stagewright.cli import main as cli
from stagewright.cli import runs
from stagewright.cli.main import EXAMPLES
from stagewright.errors import UserError
from stagewright.run.sections import EXPERIMENT, RUN_SECTIONS
from stagewright.run.settings import Run

CONFIG = ROOT / "src/stagewright/data/configs/llama-3.1-70b.json"
SLOW = {
    "stagewright validate --source korthikanti --json",  # some 20 s
    "stagewright search llama3-8b --gpus 8 --hardware h100-sxm --zero 1 --pp 1",  # 20 s
    "stagewright search llama3.1-8b --serve --hardware h100-sxm --rate 60 --isl 1024 --osl 128 "
    "--ttft 300 --tpot 12",  # 20 s
    "stagewright import model.py:factory -o model.stg",  # these need PyTorch
    "stagewright import exported.pt2 -o model.stg --approximate",
}


def code(line: str) -> int:
    """Run what one would type; where it writes with `>`, the file is not asked for."""
    words = shlex.split(line)
    cut = next((n for n, word in enumerate(words) if word in (">", ">>")), len(words))
    with pytest.raises(SystemExit) as caught:
        cli.main(words[1:cut])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_every_command_has_examples_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert set(EXAMPLES) == {"", *cli.commands.commands}
    for name, lines in EXAMPLES.items():
        assert any(shlex.split(line)[1] == name for line in lines) or not name
        assert code(f"stagewright {name} --help") == 0
        told = capsys.readouterr().out
        for line in lines:
            assert f"\n    {line}\n" in told, line


@pytest.mark.slow
def test_examples_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("path/to").mkdir(parents=True)
    shutil.copy(CONFIG, "path/to/config.json")
    Path("trace.json.gz").write_bytes(gzip.compress(two_ranks()[0].text().encode()))
    Path("ranks").mkdir()
    for rank, step in enumerate(two_ranks()):
        step.write(Path(f"ranks/rank{rank}.json"))
    done: set[str] = set()
    for lines in EXAMPLES.values():
        for line in lines:
            if line in SLOW | done:
                continue
            assert code(line) == 0, (line, capsys.readouterr().err)
            done.add(line)


def test_slow_examples_are_understood():
    for line in SLOW:
        assert any(line in lines for lines in EXAMPLES.values())
        _, name, *arguments = shlex.split(line)
        cli.commands.commands[name].make_context(name, arguments)


# ---- completion ----------------------------------------------------------------------------------


def offered(*words: str) -> list[str]:
    """What the shell offers for the last word."""
    of = ShellComplete(cli.commands, {}, "stagewright", "_STAGEWRIGHT_COMPLETE")
    return [item.value for item in of.get_completions(list(words[:-1]), words[-1])]


@cases
def test_completion(words: tuple[str, ...], wanted: tuple[str, ...]):
    assert tuple(offered(*words)) == wanted


@pytest.mark.numerics
def test_a_shell_asks_and_is_answered():
    """As the script of bash does it: the words in variables, a line for each answer."""
    words = {"COMP_WORDS": "stagewright simulate gpt2 --hardware mi3", "COMP_CWORD": "4"}
    answer = asked({"_STAGEWRIGHT_COMPLETE": "bash_complete", **words})
    assert "plain,mi300x" in answer.splitlines()


def asked(variables: dict[str, str]) -> str:
    """What the command prints for a shell that sets such variables."""
    done = subprocess.run(
        [sys.executable, "-m", "stagewright"],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


# ---- mistyped words ------------------------------------------------------------------------------


def choices() -> "list[tuple[str, str, click.Choice[str]]]":
    return [
        (name, parameter.opts[0], parameter.type)
        for name, command in cli.commands.commands.items()
        for parameter in command.params
        if isinstance(parameter.type, click.Choice) and parameter.opts[0].startswith("--")
        if len(parameter.type.choices) > 1  # of one, the message names it
    ]


@pytest.mark.parametrize(("command", "option", "kind"), choices(), ids=str)
def test_a_mistyped_choice_is_told_the_one_that_is_meant(
    command: str, option: str, kind: "click.Choice[str]", capsys: pytest.CaptureFixture[str]
):
    word = max(kind.choices, key=len)
    assert code(f"stagewright {command} {option} {word[:-1]}_") == 2
    assert f"; did you mean {word!r}?" in capsys.readouterr().err


@cases
def test_a_mistyped_word_is_told_its_neighbour(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
):
    assert code(f"stagewright {line}") == 2
    assert f"; did you mean {meant!r}?" in capsys.readouterr().err


# ---- help in sections, and the names of other tools ----------------------------------------------


def test_help_is_in_sections_and_most_options_are_on_demand(capsys: pytest.CaptureFixture[str]):
    assert code("stagewright simulate --help") == 0
    short = capsys.readouterr().out
    assert code("stagewright simulate --help-all") == 0
    long = capsys.readouterr().out

    heads = ["Options:", "Machine:", "Execution:", *(f"{t}:" for t, _ in RUN_SECTIONS.values())]
    words = long.replace(",", " ").replace(")", " ").split()
    places = [long.index(f"\n{head}\n") for head in heads]
    assert places == sorted(places)
    for setting in EXPERIMENT.values():
        flag = setting.flag.replace("--", "--[no-]") if setting.kind is bool else setting.flag
        assert flag in long.split(), flag
        assert all(f"--{name}" in words for name in (*setting.names, *setting.switches))
    assert "more options" in short
    assert len(short.splitlines()) < 100
    assert {"--tp", "--hardware", "--seq-length", "--zero"} <= {*short.split()}
    assert "--tensor-model-parallel-size" not in short


@cases
def test_names_of_other_tools(line: str, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    seen: list[Run] = []
    monkeypatch.setattr(runs, "compile_run", lambda run, *_: seen.append(run) or 1 / 0)
    code(f"stagewright show gpt2 {line}")
    assert [of.unresolved() for of in seen] == [Run(model="gpt2", **run).unresolved()]


@cases
def test_names_of_other_tools_may_contradict(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert code(f"stagewright show gpt2 {line}") == 2
    assert message in capsys.readouterr().err


@cases
def test_words_of_vllm_that_mean_the_same_are_taken(
    line: str, run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Run] = []
    monkeypatch.setattr(runs, "compile_run", lambda run, *_: seen.append(run) or 1 / 0)
    code(f"stagewright show gpt2 --mode decode {line}")
    name, value = line.removeprefix("--").split()
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\nmode: decode\n{name}: {value}\n")
    code(f"stagewright show --config {path}")
    assert [of.given() for of in seen] == [Run(model="gpt2", mode="decode", **run).given()] * 2


def test_a_word_of_vllm_replaces_what_a_file_says(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nmode: decode\nkv_cache_dtype: fp8\n")
    assert Run.load(path, {"kv_cache_dtype": "auto"}).kv_cache_dtype is None


@cases
def test_options_that_change_nothing_are_left_out_with_one_note(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[Run] = []
    monkeypatch.setattr(runs, "compile_run", lambda run, *_: seen.append(run) or 1 / 0)
    code(f"stagewright show {line}")
    assert seen == [Run(model="gpt2", tp=2)]
    notes = [text for text in capsys.readouterr().err.splitlines() if "note: ignored" in text]
    assert len(notes) == 1
    named = notes[0].partition("from: ")[2].split(", ")
    assert sorted(named) == ["--data-path", "--lr", "--min-lr", "--moe-grouped-gemm", "--seed"]


def test_ignored_options_are_of_commands_that_have_a_run(capsys: pytest.CaptureFixture[str]):
    assert code("stagewright inspect trace.et --lr 1e-4") == 2
    assert "no such option --lr" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["local_batch_size", "training.local_batch_size"])
def test_a_local_batch_in_a_run_file_names_what_to_use(key: str):
    for values in ({key: 8}, {"training": {"local_batch_size": 8}}):
        with pytest.raises(UserError, match="use --global-batch-size, which is local_batch_size x"):
            Run.of({"model": "gpt2", **values}, path="run.yaml")


def test_the_degree_of_shards_may_lack_its_section():
    for key in ("data_parallel_shard_degree", "data-parallel-shard-degree"):
        run = Run.of({"model": "gpt2", key: 8})
        assert (run.dp, run.zero) == (8, 3)
    with pytest.raises(UserError, match="shard_degree comes twice; keep one"):
        Run.of({key: 8, "parallelism": {"data_parallel_shard_degree": 4}, "model": "gpt2"})


def test_a_degree_that_fills_needs_nodes():
    fills = {"model": "gpt2", "parallelism.data_parallel_shard_degree": -1}
    with pytest.raises(UserError, match=r"run.yaml: .* is -1, .* needs --nodes and --hardware"):
        Run.of(fills, path="run.yaml")
    assert Run.of(fills, {"nodes": 2, "hardware": "h200"}).zero == 3
    assert Run.of(fills, {"dp": 4}).dp == 4


@cases
def test_a_run_file_in_toml_is_told_to_be_yaml(name: str, text: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match="looks like TOML, wanted a run file in YAML") as error:
        Run.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "torchtitan's names" in str(error.value)


@pytest.mark.parametrize(("text", "counts"), [("8k", "8192 or 8000"), ("1K", "1024 or 1000")])
def test_a_number_with_k_is_told_to_be_written_out(
    text: str, counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wanted = f"is {text!r}, wanted a whole number; write {counts}, since k may be either"
    for name in ("--context-length", "--batch-size", "--isl"):
        assert code(f"stagewright show gpt2 --mode decode {name} {text}") == 2
        assert f"{name} {wanted}" in capsys.readouterr().err
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\nmode: decode\ncontext_length: {text}\n")
    with pytest.raises(UserError, match=f"context_length {wanted}"):
        Run.load(path)


def test_a_directory_of_traces_names_what_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert code("stagewright generate gpt2 --layers 1 --tp 2 -o out") == 0
    assert code("stagewright show out") == 2
    assert "--config out/manifest.json" in capsys.readouterr().err
    assert code("stagewright inspect out") == 2
    assert "wanted one trace, such as out/workload.0.et" in capsys.readouterr().err
    assert code("stagewright show --config out/manifest.json") == 0
    assert code("stagewright inspect out/workload.0.et") == 0


def test_the_price_of_hardware_files_is_price_in_run_files():
    with pytest.raises(UserError, match="price_usd_per_gpu_hour': use price, in USD"):
        Run.of({"model": "gpt2", "price_usd_per_gpu_hour": 3})


def test_a_word_of_another_tool_names_what_to_use_in_run_files_and_keywords():
    settings = {"model": "mixtral-8x7b", "moe-token-dispatcher-type": "flex"}
    with pytest.raises(UserError, match="; use alltoall, and --moe-flex-dispatcher") as error:
        Run.of(settings, path="run.yaml")
    assert str(error.value).startswith("run.yaml: moe_token_dispatcher_type is 'flex', wanted")
    with pytest.raises(UserError, match="; use alltoall, and --moe-flex-dispatcher"):
        sw.simulate("mixtral-8x7b", "h100-sxm", ep=8, dp=8, moe_token_dispatcher_type="flex")


def test_a_run_file_needs_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model: llama3-8b, layers: 2}\nparallelism: {tp: 2}\nseq_length: 512\n"
        "hardware: h100-sxm\nnodes: 1\nprice: 4\nexecution: {no_overlap: [dp], prefetch: 2}\n"
    )
    assert code(f"stagewright simulate --config {path} --json") == 0
    of_file = capsys.readouterr().out
    line = (
        "stagewright simulate llama3-8b --layers 2 --tp 2 --seq-length 512 --hardware h100-sxm "
        "--nodes 1 --price 4 --no-overlap dp --prefetch 2 --json"
    )
    assert code(line) == 0
    assert capsys.readouterr().out == of_file
    assert code(f"stagewright show --config {path} --json") == 0
    assert code(f"stagewright report --config {path} -o {tmp_path}/run.html") == 0
    page = (tmp_path / "run.html").read_text()
    assert "stagewright report llama3-8b --layers 2 --tp 2 --dp 4" in page
    assert "--hardware h100-sxm --nodes 1 --price 4.0 --no-overlap dp --prefetch 2" in page
