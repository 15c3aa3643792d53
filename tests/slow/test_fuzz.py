"""Some hundred hostile files for each parser: read or refused, in little time and memory.

The parsers, and how to add one, are in `fuzz`; campaigns beyond CI too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz
from helpers import times

FILES = 100  # for each parser: its seeds, the hostile ones, and changed ones
SLOW = {"traces": 40, "groups": 30, "beside a manifest": 30, "config.json, compiled": 40}


@pytest.mark.parametrize("name", [parser.name for parser in fuzz.PARSERS])
def test_fuzz(name: str, tmp_path: Path):
    most = times(SLOW.get(name, FILES))
    done = subprocess.run(
        [sys.executable, fuzz.__file__, name, "--most", str(most), "--seconds", "600"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert f"{name}: " in done.stdout


def test_seeds_are_read(tmp_path: Path):
    """What is changed from is something that the parser accepts, or little is found."""
    for parser in fuzz.PARSERS:
        folder = tmp_path / parser.name.replace(" ", "-")
        folder.mkdir()
        counts, failed = fuzz.campaign(parser, folder, most=len(parser.seeds()))
        assert not failed, failed
        assert counts["read"] > 0, parser.name
        assert counts["refused"] == 0, parser.name


def test_what_fails_is_told(tmp_path: Path):
    def read(path: Path) -> object:
        data = path.read_bytes()
        if b"slow" in data:
            while True:
                pass
        return data.decode()  # which is no UserError

    parser = fuzz.Parser("p", "file", read, lambda: [b"a"], fuzz.havoc, (b"\xff", b"\xfe", b"slow"))
    fuzz.SECONDS, before = 1, fuzz.SECONDS
    try:
        counts, failed = fuzz.campaign(parser, tmp_path, most=4)
    finally:
        fuzz.SECONDS = before
    assert counts == {"read": 1, "refused": 0}
    assert len(failed) == 2  # the second of one kind is not told again
    assert "UnicodeDecodeError" in failed[0][1]
    assert "TooSlow" in failed[1][1]
