"""Examines a machine: the packages that Stagewright needs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.executors import cores
from stagewright.version import __version__

USES = {
    "ray": "search --engine ray, expand --engine ray: the machines of a cluster",
    "torch": "tests/conformance/record*.py: record what programs of PyTorch do",
    "browser": "tests of pages in a Chromium that is installed",
    "docs": "the pages of docs/, by Sphinx",
    "pandas": "the example notebook",
    "polars": "search -o FILE.parquet",
    "perfetto": "replay FILE.pftrace",
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

    @property
    def problem(self) -> str:
        """Problem and remedy."""
        what = f"is {self.version}" if self.version else "is not installed"
        remedy = f"pip install '{self.name}{self.wanted}'"
        return f"{self.name} {what}, wanted {self.wanted or 'any version'}; {remedy}"


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of `examine`; `problems` are sentences that say what is wrong and what to do."""

    stagewright: str
    location: str
    python: str
    system: str
    cores: int
    packages: list[Package]
    extras: dict[str, list[Package]]
    problems: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The examination as one JSON object."""
        extras = {
            name: {"for": USES.get(name, ""), "packages": [p._asdict() for p in packages]}
            for name, packages in self.extras.items()
        }
        packages = [package._asdict() for package in self.packages]
        return {**asdict(self), "packages": packages, "extras": extras}


def examine() -> Examination:
    """Examine this machine."""
    try:
        packages, extras = needed(importlib.metadata.requires("stagewright") or [])
    except importlib.metadata.PackageNotFoundError:
        packages, extras = [], {}
    notes: list[str] = []
    if not packages:
        notes.append("not installed, but run from its source: what it needs is not known")
    if _protobuf_runtime() == "python":
        notes.append(
            "protobuf runs in plain Python, so that reading traces is slow: unset "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION, or install a wheel of protobuf"
        )
    return Examination(
        stagewright=__version__,
        location=str(Path(__file__).parents[1]),
        python=f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=cores(),
        packages=packages,
        extras=extras,
        problems=[package.problem for package in packages if not package.ok],
        notes=notes,
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
        ok = bool(version) and all(_satisfies(version, bound) for bound in wanted.split(","))
        package = Package(name, wanted.strip(), version, ok)
        (extras.setdefault(extra, []) if extra else packages).append(package)
    return packages, extras


def _satisfies(version: str, bound: str) -> bool:
    """True if a version satisfies a bound such as `>=5` or `<8`; other bounds are ignored."""
    got, limit = (tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (version, bound))
    match bound.strip()[:2]:
        case ">=":
            return got >= limit
        case text if text[:1] == "<":
            return got < limit
        case _:
            return True


def _protobuf_runtime() -> str:
    """The runtime that protobuf uses: upb, cpp or python."""
    try:
        from google.protobuf.internal import api_implementation
    except ImportError:
        return ""
    return str(api_implementation.Type())  # pyright: ignore
