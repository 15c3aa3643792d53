"""Examines a machine: packages that Stagewright needs, and how fast traces are written."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from stagewright.errors import UserError
from stagewright.executors import cores
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from stagewright.trace.write import write
from stagewright.version import __version__

USES = {
    "ray": "generate --engine ray: write with the machines of a cluster",
    "remote": "generate -o s3://..., gs://...: write to object stores",
    "torch": "tests/conformance/record*.py: record what programs of PyTorch do",
    "browser": "tests of pages in a Chromium that is installed",
    "docs": "the pages of docs/, by Sphinx",
    "pandas": "tables as data frames: Table.to_pandas",
    "polars": "tables as data frames: Table.to_polars",
    "dev": "tests, lint and types, to work on Stagewright",
}
"""The purpose of each extra."""

_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*extra\s*==\s*['\"](.+)['\"])?"
)


class Package(NamedTuple):
    """A required package; `version` is empty where the package is not installed."""

    name: str
    wanted: str  # such as >=1.26
    version: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast traces of 64 ranks are made and written in a directory."""

    directory: str
    free_bytes: int
    compile_seconds: float
    """From a run to the programs of its ranks."""
    nodes_per_second: float
    """Nodes of all ranks, encoded, with checksums, and written."""
    bytes_per_second: float
    """Bytes of their files, likewise."""


@dataclass(slots=True)
class Examination:
    """The result of `examine`; `problems` are sentences that say what is wrong and what to do."""

    stagewright: str
    location: str
    python: str
    system: str
    cores: int
    packages: list[Package]
    extras: dict[str, list[Package]]
    speed: Speed | None = None
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        """The examination as one JSON object."""
        extras = {
            name: {"for": USES.get(name, ""), "packages": [p._asdict() for p in packages]}
            for name, packages in self.extras.items()
        }
        packages = [package._asdict() for package in self.packages]
        return {**asdict(self), "packages": packages, "extras": extras}


def examine(directory: Path | str = ".", *, speed: bool = True) -> Examination:
    """Examine this machine; with `speed`, write traces into a directory and remove them again."""
    try:
        requirements = importlib.metadata.requires("stagewright") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    packages, extras = needed(requirements)
    examination = Examination(
        stagewright=__version__,
        location=str(Path(__file__).parents[1]),
        python=f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=cores(),
        packages=packages,
        extras=extras,
    )
    if not packages:
        examination.notes.append(
            "not installed, but run from its source: what it needs is not known"
        )
    for package in packages:
        if not package.ok:
            what = f"is {package.version}" if package.version else "is not installed"
            examination.problems.append(
                f"{package.name} {what}, wanted {package.wanted or 'any version'}; "
                f"pip install '{package.name}{package.wanted}'"
            )
    if _protobuf_runtime() == "python":
        examination.notes.append(
            "protobuf runs in plain Python, so that reading traces is slow: unset "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION, or install a wheel of protobuf"
        )
    if speed:
        examination.speed = measure(Path(directory))
    return examination


def measure(directory: Path) -> Speed:
    """Compile and write traces of 64 ranks in a directory, which is left as it was.

    Raises UserError where the directory cannot be written.
    """
    try:
        scratch = TemporaryDirectory(prefix=".stagewright-doctor-", dir=directory)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {error.strerror}; name a directory that can"
        ) from None
    with scratch as folder:
        began = time.perf_counter()
        run = Run(model="llama3.1-70b", tp=8, pp=4, dp=2, global_batch_size=32)
        program = compile(run).program
        compiled = time.perf_counter()
        written = write(program, f"{folder}/traces", manifest={})
        seconds = time.perf_counter() - compiled
        nodes = sum(len(of.tasks) * len(of.ranks) for of in program.classes)
        return Speed(
            directory=str(directory),
            free_bytes=shutil.disk_usage(directory).free,
            compile_seconds=compiled - began,
            nodes_per_second=nodes / seconds,
            bytes_per_second=written["files"].size / seconds,
        )


def needed(requirements: Sequence[str]) -> tuple[list[Package], dict[str, list[Package]]]:
    """The packages that requirements name, and the packages of each extra.

    >>> needed(["numpy>=1.26", 'nosuch>=2; extra == "more"'])[1]
    {'more': [Package(name='nosuch', wanted='>=2', version='', ok=False)]}
    """
    packages: list[Package] = []
    extras: dict[str, list[Package]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement.strip())
        if match is None or match[1] == "stagewright":
            continue
        name, wanted, extra = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        ok = bool(version) and _satisfies(version, wanted)
        package = Package(name, wanted.strip(), version, ok)
        (extras.setdefault(extra, []) if extra else packages).append(package)
    return packages, extras


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version satisfies all bounds, such as `>=5,<8`."""
    got = _numbers(version)
    for part in filter(None, (text.strip() for text in wanted.split(","))):
        limit = _numbers(part.lstrip("<>=!~"))
        if (part.startswith(">=") and got < limit) or (part.startswith("<") and got >= limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _protobuf_runtime() -> str:
    """The runtime that protobuf uses: upb, cpp or python."""
    try:
        from google.protobuf.internal import api_implementation
    except ImportError:
        return ""
    return str(api_implementation.Type())  # pyright: ignore
