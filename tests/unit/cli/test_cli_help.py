"""Examples in every help, which run as they stand; completion; what a mistyped word is told."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from paths import ROOT
from stagewright.cli import main as cli
from stagewright.cli.help import EXAMPLES, SHELLS

CONFIG = ROOT / "src/stagewright/data/configs/llama-3.1-70b.json"
SLOW = {"stagewright validate --source korthikanti --json"}  # some 20 s


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


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("gen",), ["generate"]),
        (("show", "llama3.1-7"), ["llama3.1-70b"]),
        (("show", "gpt2", "--recompute-n"), ["--recompute-num-layers"]),
        (("show", "gpt2", "--recompute", "s"), ["selective"]),
        (("show", "gpt2", "--schedule", "dualpipe"), ["dualpipe", "dualpipev"]),
        (("simulate", "gpt2", "--hardware", "h100-s"), ["h100-sxm"]),
        (("hardware", "b200"), ["b200"]),
        (("generate", "gpt2", "--format", "b"), ["bundle"]),
        (("completion", "z"), ["zsh"]),
        (("show", "./co"), ["./co"]),  # and the shell looks for files that begin so
    ],
    ids=str,
)
def test_completion(words: tuple[str, ...], wanted: list[str]):
    assert offered(*words) == wanted


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]):
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    assert code(f"stagewright completion {shell}") == 0
    script = capsys.readouterr().out
    assert f"_STAGEWRIGHT_COMPLETE={shell}_complete" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_shell_asks_and_is_answered():
    """As the script of bash does it: the words in variables, a line for each answer."""
    asked = {
        "_STAGEWRIGHT_COMPLETE": "bash_complete",
        "COMP_WORDS": "stagewright simulate gpt2 --hardware mi3",
        "COMP_CWORD": "4",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "stagewright"],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "plain,mi300x" in done.stdout.splitlines()
    assert done.stderr == ""


def test_no_shell_is_guessed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert code("stagewright completion") == 2
    assert "no completion for shell 'tcsh'; name one of bash, zsh, fish" in capsys.readouterr().err


# ---- mistyped words ------------------------------------------------------------------------------


def choices() -> "list[tuple[str, str, click.Choice[str]]]":
    return [
        (name, parameter.opts[0], parameter.type)
        for name, command in cli.commands.commands.items()
        for parameter in command.params
        if isinstance(parameter.type, click.Choice) and parameter.opts[0].startswith("--")
    ]


@pytest.mark.parametrize(("command", "option", "kind"), choices(), ids=str)
def test_a_mistyped_choice_is_told_the_one_that_is_meant(
    command: str, option: str, kind: "click.Choice[str]", capsys: pytest.CaptureFixture[str]
):
    word = max(kind.choices, key=len)
    assert code(f"stagewright {command} {option} {word[:-1]}_") == 2
    assert f"; did you mean {word!r}?" in capsys.readouterr().err
