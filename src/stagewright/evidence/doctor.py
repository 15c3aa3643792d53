"""What a machine has for Stagewright, what is missing, and how fast it writes traces."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.lower.training import compile
from stagewright.run.settings import Run
from stagewright.trace.recorded import manifest
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
"""What each extra is for."""

_NEED = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*extra\s*==\s*['\"](.+)['\"])?"
)
_FILE = 16_000_000  # bytes, as large as files of traces are
_FILES = 16


class Package(NamedTuple):
    """A package that is needed; `version` is empty where it is not installed."""

    name: str
    wanted: str  # such as >=1.26
    version: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast traces are made and written in a directory."""

    directory: str
    free_bytes: int
    compile_seconds: float
    """From a run to the programs of its ranks."""
    nodes_per_second: float
    """Of all ranks, encoded, summed and written."""
    bytes_per_second: float
    """Likewise, of their files."""
    sha256_bytes_per_second: float
    """By one core."""
    write_bytes_per_second: float
    """Of plain files, by all cores, as far as the system says that they are written."""
    sync_bytes_per_second: float
    """Until they are on the disk."""


@dataclass(slots=True)
class Examination:
    """What `examine` finds; `problems` are what stands in the way, in words."""

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
        """One object with everything."""
        return {
            **{name: getattr(self, name) for name in ("stagewright", "location", "python")},
            **{"system": self.system, "cores": self.cores},
            "packages": [each._asdict() for each in self.packages],
            "extras": {
                name: {"for": USES.get(name, ""), "packages": [each._asdict() for each in some]}
                for name, some in self.extras.items()
            },
            "speed": asdict(self.speed) if self.speed else None,
            "problems": self.problems,
            "notes": self.notes,
        }


def examine(directory: Path | str = ".", *, speed: bool = True) -> Examination:
    """Look at this machine; with `speed`, write some 300 MB into a directory and remove them."""
    packages, extras = _packages()
    found = Examination(
        stagewright=__version__,
        location=str(Path(__file__).parents[1]),
        python=f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=cores(),
        packages=packages,
        extras=extras,
    )
    if not packages:
        found.notes.append("not installed, but run from its source: what it needs is not known")
    for each in packages:
        if not each.ok:
            what = f"is {each.version}" if each.version else "is not installed"
            found.problems.append(
                f"{each.name} {what}, wanted {each.wanted or 'any version'}; "
                f"pip install '{each.name}{each.wanted}'"
            )
    runtime = _protobuf()
    if runtime == "python":
        found.notes.append(
            "protobuf runs in plain Python, so that reading traces is slow: unset "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION, or install a wheel of protobuf"
        )
    if speed:
        found.speed = measure(Path(directory))
    return found


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- packages ------------------------------------------------------------------------------------


def _packages() -> tuple[list[Package], dict[str, list[Package]]]:
    """What is needed, and what each extra needs; nothing where Stagewright is not installed."""
    try:
        texts = importlib.metadata.requires("stagewright") or []
    except importlib.metadata.PackageNotFoundError:
        return [], {}
    return needed(texts)


def needed(texts: Sequence[str]) -> tuple[list[Package], dict[str, list[Package]]]:
    """The same, from the requirements of a package.

    >>> needed(["numpy>=1.26", 'nosuch>=2; extra == "more"'])[1]
    {'more': [Package(name='nosuch', wanted='>=2', version='', ok=False)]}
    """
    packages: list[Package] = []
    extras: dict[str, list[Package]] = {}
    for text in texts:
        match = _NEED.fullmatch(text.strip())
        if match is None or match[1] == "stagewright":
            continue
        name, wanted, extra = match.groups()
        version = _version(name)
        ok = bool(version) and _satisfies(version, wanted)
        package = Package(name, wanted.strip(), version, ok)
        (extras.setdefault(extra, []) if extra else packages).append(package)
    return packages, extras


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version is at least, or below, what is wanted: `>=5,<8`."""
    got = _numbers(version)
    for part in filter(None, (text.strip() for text in wanted.split(","))):
        limit = _numbers(part.lstrip("<>=!~"))
        if (part.startswith(">=") and got < limit) or (part.startswith("<") and got >= limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _protobuf() -> str:
    """Which of protobuf's runtimes is used: upb, cpp or python."""
    try:
        from google.protobuf.internal import api_implementation
    except ImportError:
        return ""
    return str(api_implementation.Type())  # pyright: ignore


# ---- speed ---------------------------------------------------------------------------------------


def measure(directory: Path) -> Speed:
    """Make and write traces in a directory, and plain files; all is removed again."""
    with _scratch(directory) as folder:
        began = time.perf_counter()
        compiled = compile(Run(model="llama3.1-70b", tp=8, pp=4, dp=2, global_batch_size=32))
        made = time.perf_counter()
        record = {**manifest(compiled), "checks": check_program(compiled.program)}
        written = write(compiled.program, str(folder / "traces"), manifest=record)
        seconds = time.perf_counter() - made
        nodes = sum(len(of.tasks) * len(of.ranks) for of in compiled.program.classes)
        size = sum(file["bytes"] for file in written["files"].values())
        plain, sync = _plain(folder)
        return Speed(
            directory=str(directory),
            free_bytes=shutil.disk_usage(directory).free,
            compile_seconds=made - began,
            nodes_per_second=nodes / seconds,
            bytes_per_second=size / seconds,
            sha256_bytes_per_second=_hashed(),
            write_bytes_per_second=plain,
            sync_bytes_per_second=sync,
        )


@contextmanager
def _scratch(directory: Path) -> Generator[Path]:
    """A directory that vanishes."""
    try:
        folder = Path(mkdtemp(prefix=".stagewright-doctor-", dir=directory))
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {error.strerror}; name a directory that can"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hashed() -> float:
    data = bytes(4 * _FILE)
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return len(data) / (time.perf_counter() - began)


def _plain(folder: Path) -> tuple[float, float]:
    """Bytes per second of files, as written and as on the disk."""
    data = os.urandom(_FILE)

    def write(nth: int) -> int:
        file = os.open(folder / str(nth), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, data)
        return file

    began = time.perf_counter()
    with ThreadPoolExecutor(cores()) as pool:
        files = list(pool.map(write, range(_FILES)))
        seconds = time.perf_counter() - began
        list(pool.map(os.fsync, files))
    until = time.perf_counter() - began
    for file in files:
        os.close(file)
    return _FILES * _FILE / seconds, _FILES * _FILE / until
