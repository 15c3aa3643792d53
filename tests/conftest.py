"""What all tests share: tiers, `--bless`, and how many draws hypothesis makes.

A test is of the tier whose folder it lies in, or that it is marked with; one that lies in no folder
of a tier, or is a doctest of the package, is of the unit tier. `pytest` alone runs that tier.
"""

import gc
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from helpers import Command, Outcome, times
from stagewright.cli.main import main

HERE = Path(__file__).parent

TIERS = ("unit", "numerics", "slow")
FOLDERS = {HERE / tier: tier for tier in TIERS} | {HERE / "conformance": "numerics"}
"""Where the tests of a tier lie, but for those that are marked otherwise."""

# Tests keep graphs and programs in caches: many objects, of which hardly any is part of a cycle.
gc.set_threshold(10_000, 10, 10)

# Machines that run tests are busy: no deadline for one draw.
settings.register_profile("effort", settings.default, max_examples=times(100), deadline=None)
settings.load_profile("effort")

# A shell's background jobs are started deaf to Ctrl-C, and so would be what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the golden files")


def pytest_configure(config: pytest.Config) -> None:
    """Without a path and an expression, the unit tier."""
    option = config.option
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if not (named or option.markexpr or option.keyword or getattr(option, "lf", False)):
        option.markexpr = "unit"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of which nothing would be run are not read: that takes longer than the unit tier."""
    tier = FOLDERS.get(collection_path)
    return True if config.option.markexpr == "unit" and tier not in (None, "unit") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(next((FOLDERS[p] for p in item.path.parents if p in FOLDERS), "unit"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays; the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with `tests/golden/<name>`, or write it there with --bless."""

    def compare(name: str, text: str) -> None:
        path = HERE / "golden" / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert text + "\n" == path.read_text(encoding="utf-8"), f"{path.name}; see pytest --bless"

    return compare


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line as one would type it, but for the name of the program."""

    def run(*words: object) -> Outcome:
        given = shlex.split(str(words[0])) if len(words) == 1 else [str(word) for word in words]
        with pytest.raises(SystemExit) as end:
            main(given)
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return run
