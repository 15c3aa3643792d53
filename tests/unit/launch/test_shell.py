"""Shell scripts as commands: what a shell would make of them, and hostile ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.launch.shell import read, shown


def words(text: str, **given: str) -> list[str]:
    """Words of the last command."""
    return [shown(word) for word in read(text, given=given).commands[-1].words]


@cases
def test_words(text: str, wanted: str) -> None:
    assert words(text) == wanted.split("|" if "|" in wanted else " ")


@cases
def test_as_bash_has_it(script: str, words: tuple[str, ...]) -> None:
    commands = [command.words for command in read(script).commands]
    runs = ["|".join(map(shown, rest)) for name, *rest in commands if name == "run"]
    assert runs == [*words]


@cases
def test_what_is_not_followed_is_said(script: str, words: str, note: str) -> None:
    """A variable is asked for, or a note says what was assumed."""
    result = read(script)
    assert [shown(word) for word in result.commands[-1].words[1:]] == [words]
    assert result.notes == [note] * bool(note)


def test_values_given_win() -> None:
    assert words("SIZE=7b\nrun $SIZE ${N:-1}", SIZE="8b", N="2") == ["run", "8b", "2"]
    with pytest.raises(UserError, match="no variable NO"):
        read("run $SIZE", given={"NO": "1"})


def test_a_guard_for_something_from_outside_is_passed() -> None:
    """A script that would stop because a path is missing is read as if it were there."""
    assert words('if [ -z "$DATA" ]; then echo "set DATA"; exit 1; fi\nrun $DATA') == [
        "run",
        "$DATA",
    ]
    with pytest.raises(UserError, match=r"line 1: the script exits with 1.*--set A=\.\.\."):
        read("A=; if [ -z $A ]; then exit 1; fi")


def test_headers_and_sourced_files(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("LAYERS=3\n")
    path = tmp_path / "train.sh"
    path.write_text(
        "#SBATCH --nodes=4\nsource ./sizes.sh\n. /etc/profile\nsource no.sh\nrun $LAYERS"
    )
    script = read(path.read_text(), str(path))
    assert script.headers == ["--nodes=4"]
    assert script.commands[-1].words == ("run", "3")
    assert script.missing == ["/etc/profile", "no.sh"]


def test_a_script_opens_nothing_outside_its_repository(tmp_path: Path) -> None:
    """Links and `..` lead to files of the repository, and to nothing else."""
    folder, outside = tmp_path / "repository" / "launch", tmp_path / "sizes.sh"
    folder.mkdir(parents=True)
    for place in (outside, folder.parent / "sizes.sh"):
        place.write_text("LAYERS=3\n")
    (folder / "link.sh").symlink_to(outside)
    text = "source ../sizes.sh\nsource ../../sizes.sh\nsource link.sh\nrun ${LAYERS:-1}"
    script = read(text, str(folder / "train.sh"))
    assert script.missing == ["../sizes.sh", "../../sizes.sh", "link.sh"]
    (folder.parent / ".git").mkdir()
    (folder.parent / ".git" / "config").write_text("LAYERS=4\n")
    script = read(f"{text}\nsource ../.git/config", str(folder / "train.sh"))
    assert script.missing == ["../../sizes.sh", "link.sh", "../.git/config"]
    assert script.commands[-1].words == ("run", "3")


DOUBLED = "A=aaaaaaaa\n" + "A=$A$A\n" * 60
HOSTILE = {
    "expansion": DOUBLED + "run $A",
    "array": "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
    "recursion": "f() { f; }\nf",
    "evaluation": "X='eval $X'\neval $X",
    "loop": "for ((i=0; i>=0; i++)); do run; done",
    "while": "while [ 1 -eq 1 ]; do X=$X.; done",
    "nested quotes": "run " + '"$(echo ' * 2000 + "x",
    "braces": "run " + "{" * 200_000,
    "nested braces": "run " + "${A:-" * 5000 + "}" * 5000,
    "parentheses": "(" * 5000,
    "arithmetic": "run $((" + "9**" * 60 + "9))\nrun $((" + "(" * 400 + "))",
    "open quote": "run 'a",
    "open if": "if true; then run",
    "stray": "run )",
    "nul": "run \0A\0",
    "dollars": "run " + "$" * 500_000,
    "backquotes": "run " + "`" * 500_000,
    "glob": "X=" + "a" * 4000 + "\nrun ${X##" + "*a" * 90 + "b}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_scripts_end_quickly(kind: str) -> None:
    """One line of error, or words; never a loop, a lot of memory, or a command that is run."""
    started, message = time.process_time(), "train.sh"
    try:
        read(HOSTILE[kind], "train.sh")
    except UserError as error:
        message = str(error)
    assert message.startswith("train.sh")
    assert "\n" not in message
    assert time.process_time() - started < 5


def test_files_that_are_written() -> None:
    """Here-documents that `cat` writes are kept with their variables; others are not."""
    text = "N=3\ncat > a.yml << EOF\nn: $N\nEOF\ncat << EOF >> a.yml\nm: ${M:-1}\nEOF\n"
    assert read(text + "cat << EOF\nx\nEOF\n").files == {"a.yml": "n: 3\nm: 1\n"}
