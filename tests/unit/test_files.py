"""What users' files may not do: grow, nest, repeat or refer to themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers import cases
from stagewright.errors import UserError
from stagewright.files import (
    MOST_BYTES,
    MOST_HEAD,
    atomic,
    from_json,
    from_yaml,
    manifest_head,
    open_regular,
    read_text,
    replaced_together,
    write_text,
)


def test_what_cannot_be_read(tmp_path: Path):
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(tmp_path / "pipe")  # nobody writes
    (tmp_path / "latin").write_bytes(b"mod\xe8le: gpt2")
    for name, message in (
        ("none", "none: cannot be read: No such file or directory; wanted a run file"),
        (".", "cannot be read: Is a directory"),
        ("a\0b", r"'.*a\\x00b': cannot be read: .*embedded null .*; wanted"),
        ("x" * 300, "File name too long"),
        ("sparse", f"sparse: over {MOST_BYTES} bytes; wanted a run file"),
        ("/dev/zero", "/dev/zero: cannot be read: Is a device, not a file; wanted a run file"),
        ("pipe", "pipe: cannot be read: Is a named pipe, not a file; wanted a run file"),
        ("latin", "latin: is not text in UTF-8; wanted a run file"),
    ):
        with pytest.raises(UserError, match=message):
            read_text(tmp_path / name, "a run file")


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path: Path):
    """As in `--config <(...)`."""
    here, there = os.pipe()
    if not os.path.exists(f"/dev/fd/{here}"):
        pytest.skip("no /dev/fd here")
    child = os.fork()
    if not child:
        os.close(here)
        for _ in range(3):
            os.write(there, b"tp: 8\n" * 1000)
        os._exit(0)
    os.close(there)
    assert read_text(f"/dev/fd/{here}", "a run file") == "tp: 8\n" * 3000
    os.close(here)
    os.waitpid(child, 0)


def test_open_regular(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"
    os.mkfifo(tmp_path / "pipe")
    here, there = os.pipe()
    others = {"pipe": "named pipe", ".": "directory", "/dev/null": "device"}
    for name, words in (others | {f"/dev/fd/{here}": "not a file"}).items():
        with pytest.raises(OSError, match=words):
            open_regular(tmp_path / name)
    os.close(here)
    os.close(there)


@cases
def test_json_that_is_refused(text: str, message: str):
    with pytest.raises(UserError, match=message):
        from_json(text, "f.json")


@cases
def test_yaml_that_is_refused(text: str, message: str):
    with pytest.raises(UserError, match=message):
        from_yaml(text, "f.yaml")


def test_deep_and_long_texts_are_refused():
    with pytest.raises(UserError, match=r"f\.json: nested too deep"):
        from_json("[" * 200_000, "f.json")
    with pytest.raises(UserError, match="not JSON: Exceeds the limit"):
        from_json("9" * 5000, "f.json")
    with pytest.raises(UserError, match=r"f\.yaml: nested too deep"):
        from_yaml("[" * 20_000, "f.yaml")


def test_numbers_with_colons_are_text():
    text = "tp: 1:8\nnodes: 190:20:30\nx: [+1:4, 1:30.5]\ny: [0x10, -2, 1.5, .5, 1.0e+5, .inf]"
    assert from_yaml(text, "f.yaml") == {
        "tp": "1:8",
        "nodes": "190:20:30",
        "x": ["+1:4", "1:30.5"],
        "y": [16, -2, 1.5, 0.5, 1e5, float("inf")],
    }


def test_head_of_a_manifest(tmp_path: Path):
    path = tmp_path / "manifest.json"
    files = ",\n".join(f'    "workload.{n}.et": {{"bytes": 1}}' for n in range(3))
    path.write_text(f'{{\n  "stagewright": "1",\n  "files": {{\n{files}\n  }}\n}}\n')
    assert len(manifest_head(path, "a manifest")["files"]) == 3
    files *= 30_000
    path.write_text(f'{{\n  "stagewright": "1",\n  "files": {{\n{files}\n  }}\n}}\n')
    assert manifest_head(path, "a manifest") == {"stagewright": "1"}
    path.write_text('{"x": 1' + " " * MOST_HEAD + "}")
    with pytest.raises(UserError, match="over 1048576 bytes; wanted a manifest"):
        manifest_head(path, "a manifest")


def test_a_file_is_whole_or_not_there(tmp_path: Path):
    page = tmp_path / "page.html"
    write_text(page, "one")

    def half() -> None:
        with atomic(page) as place:
            place.write_text("half", encoding="utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert page.read_text(encoding="utf-8") == "one"
    assert [*tmp_path.iterdir()] == [page]
    with pytest.raises(UserError, match=r"page.html/x: cannot be written: Not a directory"):
        write_text(page / "x", "two")
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        write_text(tmp_path, "two")


def test_files_are_replaced_together_or_not_at_all(tmp_path: Path):
    names = ("a.csv", "b.json")
    for name in names:
        (tmp_path / name).write_text("old")

    def fail_after_the_first() -> None:
        with replaced_together():
            write_text(tmp_path / "a.csv", "new")
            raise UserError("b.json: not written")

    with pytest.raises(UserError, match="not written"):
        fail_after_the_first()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        names, "old"
    )
    with replaced_together():
        for name in names:
            write_text(tmp_path / name, "new")
        assert (tmp_path / "a.csv").read_text() == "old"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        names, "new"
    )
