"""The GitHub action: its step runs in a repository with two commits, beside a `gh` of ours."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
SCRIPT = """\
#!/bin/bash
source sizes.sh
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers $LAYERS --hidden-size 256 \\
  --num-attention-heads 4 --vocab-size 1024 --seq-length 128 --max-position-embeddings 128 \\
  --micro-batch-size 1 --global-batch-size 8 --bf16 --tensor-model-parallel-size 1 --lr 3e-4
"""
GH = """\
#!{python}
import json, pathlib, sys
words, here = sys.argv[1:], pathlib.Path(__file__).parent
body = next((pathlib.Path(word[6:]).read_text() for word in words if word.startswith("body=@")), "")
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([words, body]) + "\\n")
if "--jq" in words:
    print((here / "earlier").read_text(), end="")
"""
PROGRAM = """\
#!{python}
from stagewright.cli.main import main
main()
"""


def test_the_action_is_one():
    assert ACTION["runs"]["using"] == "composite"
    assert all(of["description"] for of in ACTION["inputs"].values())
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # no text of a pull request becomes part of a script
        named = re.findall(r"inputs\.(\w+)", " ".join(step.get("env", {}).values()))
        assert set(named) <= set(ACTION["inputs"])
    named = " ".join(ACTION["runs"]["steps"][1]["env"].values())
    assert all(f"inputs.{name}" in named for name in ACTION["inputs"])


class Repository:
    """A checkout of a pull request, and what ran beside it."""

    def __init__(self, place: Path) -> None:
        self.bin, self.root = place / "stagewright/bin", place / "checkout"
        self.summary = place / "summary.md"
        self.bin.mkdir(parents=True)
        self.root.mkdir()
        (self.bin / "earlier").write_text("")
        for name, text in {"gh": GH, "stagewright": PROGRAM}.items():
            (self.bin / name).write_text(text.format(python=sys.executable))
            (self.bin / name).chmod(0o755)
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words: str) -> None:
        user = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *user, *words], cwd=self.root, check=True)

    def commit(self, **files: str | None) -> None:
        """Commit files by name, `_` for a dot; None deletes one."""
        for name, text in files.items():
            path = self.root / "launch" / name.replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the step that comments."""
        (self.bin / "calls").write_text("")
        return subprocess.run(
            ["bash", "-c", ACTION["runs"]["steps"][1]["run"]],
            cwd=self.root, capture_output=True, text=True,
            env={
                "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "HOME": str(self.root),
                "RUNNER_TEMP": str(self.bin.parent.parent), "GITHUB_ACTION_PATH": str(ROOT),
                "GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_REPOSITORY": "team/models",
                "FILES": "launch/**/*.sh\n", "HARDWARE": "h100-sxm", "OPTIONS": "",
                "BASE": "before", "PULL_REQUEST": "7", **environment,
            },
        )  # fmt: skip

    def calls(self) -> list[tuple[list[str], str]]:
        """Words of each call of `gh`, and the body of its comment."""
        lines = (self.bin / "calls").read_text().splitlines()
        return [(words, body) for words, body in map(json.loads, lines)]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.commit(train_sh=SCRIPT, sizes_sh="LAYERS=2\n", gone_sh="echo\n", notes_txt="a")
    made.git("branch", "before")
    return made


def test_comment(repository: Repository):
    wide = SCRIPT.replace("parallel-size 1", "parallel-size 2")
    repository.commit(train_sh=wide, gone_sh=None, more_sh=wide + "# added\n", notes_txt="b")
    done = repository.run()
    assert (done.returncode, done.stderr) == (0, "")
    (asked, _), (posted, body) = repository.calls()
    assert "repos/team/models/issues/7/comments" in asked
    assert posted[:2] == ["api", "repos/team/models/issues/7/comments"]
    assert body == repository.summary.read_text()
    parts = dict(re.findall(r"### `launch/(\w+\.\w+)`\n\n(.*?)(?=\n### |\Z)", body, re.DOTALL))
    assert sorted(parts) == ["gone.sh", "more.sh", "train.sh"]  # and no notes
    assert parts["gone.sh"] == "Deleted.\n"
    assert "| tp | 1 | 2 |" in parts["train.sh"]
    assert "head/launch/more.sh tp=2" in parts["more.sh"]
    assert str(repository.root) not in body
    assert repository.bin.parent.name not in body.split("\n", 1)[1]


def test_links_out_of_the_checkout_are_not_read(repository: Repository, tmp_path: Path):
    (tmp_path / "secret").write_text("password 1\n")
    for name, target in (
        ("out.sh", "../../secret"),
        ("git.sh", "../.git/config"),
        ("in.sh", "train.sh"),
    ):
        (repository.root / "launch" / name).symlink_to(target)
    repository.commit(**{"a?tp=2_sh": SCRIPT})
    assert repository.run().returncode == 2
    body = repository.calls()[1][1]
    assert body.count("Not read: ") == 3
    assert "head/launch/in.sh" in body
    assert "password" not in body


@pytest.mark.slow
def test_later_pushes_update_the_comment(repository: Repository):
    repository.commit(train_sh=SCRIPT.replace("3e-4", "1e-4"))
    (repository.bin / "earlier").write_text("41\n42\n")
    assert repository.run().returncode == 0
    (_, _), (posted, body) = repository.calls()
    assert "repos/team/models/issues/comments/41" in posted
    assert "no change in what the step is; 1 flag differs" in body
    repository.commit(train_sh=SCRIPT)
    assert repository.run().returncode == 0
    assert "No launch script changes" in repository.calls()[1][1]


@pytest.mark.slow
def test_nothing_to_say(repository: Repository):
    repository.commit(notes_txt="b")
    assert repository.run().returncode == 0
    assert len(repository.calls()) == 1  # nothing is posted


@pytest.mark.slow
def test_exit_codes_and_errors(repository: Repository):
    repository.commit(train_sh=SCRIPT.replace("--lr", "--not-a-flag 3 --lr"))
    done = repository.run(PULL_REQUEST="")
    assert done.returncode == 2
    assert "    stagewright: error: new: head/launch/train.sh: " in repository.summary.read_text()
    assert repository.calls() == []
    slow = SCRIPT.replace("parallel-size 1", "parallel-size 4")
    repository.commit(train_sh=slow)
    assert repository.run(OPTIONS="--max-slowdown 5").returncode == 1
    assert repository.run(OPTIONS="--max-slowdown 5000").returncode == 0
    repository.git("branch", "--force", "before")
    assert repository.run(FILES=" \n").returncode == 2
    done = repository.run(BASE="origin/absent")
    assert (done.returncode, "::error::" in done.stdout) == (2, True)


@pytest.mark.slow
def test_old_file_that_cannot_be_read(repository: Repository):
    repository.commit(train_sh="torchrun train.py\n")
    repository.git("branch", "--force", "before")
    repository.commit(train_sh=SCRIPT)
    assert repository.run().returncode == 0
    body = repository.calls()[1][1]
    assert "    stagewright: error: old: base/launch/train.sh" in body
    assert "The new file alone:" in body
    assert "where the time of a GPU goes" in body


@pytest.mark.slow
def test_files_of_several_kinds(repository: Repository):
    """A variable of one script is none of the others; a script that starts nothing is no error."""
    run = "model: gpt2\nnodes: 1\nbatch: {global_batch_size: 64}\n"
    repository.commit(train_sh=SCRIPT, run_yaml=run, job_sh=SCRIPT.replace("--lr 3e-4", "--lr $LR"))
    repository.git("branch", "--force", "before")
    changed = SCRIPT.replace("global-batch-size 8", "global-batch-size ${BATCH:-4}")
    repository.commit(train_sh=SCRIPT.replace("3e-4", "1e-4"), job_sh=changed,
                      run_yaml=run.replace("64", "32"), sizes_sh="export LAYERS=2\n")  # fmt: skip
    done = repository.run(
        FILES="launch/*", OPTIONS="--set BATCH=16 --set=OTHER=1 --max-slowdown 50"
    )
    assert (done.returncode, done.stderr) == (0, ""), repository.summary.read_text()
    body = repository.summary.read_text()
    assert body.count("Starts nothing that is compared.\n") == 1
    assert "| global_batch_size | 64 | 32 |" in body
    assert "| global_batch_size | 8 | 16 |" in body
    repository.commit(train_sh="echo\n")
    assert repository.run().returncode == 2  # it started something before
