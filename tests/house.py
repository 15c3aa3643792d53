"""How the package is built, in figures: cycles, lazy imports, names that occur twice.

    python tests/house.py             # how many of each
    python tests/house.py lazy twice  # and where, of these

`tests/test_house.py` holds what must be zero at zero, and lets no other figure grow.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "stagewright"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module of the package, read and parsed."""

    name: str
    """With dots, as it is imported."""
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """Its path inside the package."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def may_be_lazy(self) -> bool:
        """Whether it imports when it is used, so that commands start quickly."""
        return self.path.name == "__init__.py" or self.place.startswith("cli/")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Those of its tree, in any order."""
        return list(ast.walk(self.tree))

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (n for n in self.nodes if isinstance(n, Function))


@cache
def modules() -> dict[str, Module]:
    """The modules of the package by name."""
    found: dict[str, Module] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path, text, ast.parse(text))
    return found


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and module of every import of the package among nodes of a tree."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name if name in modules() else node.module for name in inside]
        else:
            continue
        for name in sorted(set(names)):
            if name in modules():
                yield node.lineno, name


# ---- figures -------------------------------------------------------------------------------------


def lazy() -> Iterator[str]:
    """Imports of the package inside functions, but for the command line and packages' names."""
    for module in modules().values():
        if not module.may_be_lazy:
            spans = [(f.lineno, f.end_lineno or f.lineno) for f in module.functions()]
            for line, _ in imports(module.nodes):
                if any(first < line <= last for first, last in spans):
                    yield f"{module.place}:{line}"


def root() -> Iterator[str]:
    """Imports of the whole package by one of its rooms."""
    for module in modules().values():
        if not module.may_be_lazy:
            yield from (
                f"{module.place}:{n}" for n, to in imports(module.nodes) if to == "stagewright"
            )


def cycles() -> Iterator[str]:
    """Modules that import each other in a circle: imports for types and in functions count."""
    graph = {
        module.name: {to for _, to in imports(module.nodes)} - {module.name}
        for module in modules().values()
        if module.name != "stagewright" and not module.place.startswith("cli/")
    }
    for circle in _strongly_connected(graph):
        if len(circle) > 1:
            yield " ".join(sorted(name.removeprefix("stagewright.") for name in circle))


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of names that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for name in graph.get(todo.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    todo.append(name)
        reached[start] = seen
    circles: list[set[str]] = []
    for name, seen in reached.items():
        if name in seen and not any(name in circle for circle in circles):
            circles.append({other for other in seen if name in reached.get(other, ())})
    return circles


def twice() -> Iterator[str]:
    """Class names that stand for two things; a leading underscore makes no other name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{module.place}:{node.lineno}")
    yield from (f"{name}: {' '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1)


def riddles() -> Iterator[str]:
    """Functions whose names do not say what they do."""
    of = {"told", "joined", "found", "alike", "own", "whole"}
    for module in modules().values():
        for f in module.functions():
            if f.name.strip("_") in of:
                yield f"{module.place}:{f.lineno} {f.name}"


def roles() -> Iterator[str]:
    """Places that say `"role"`, which is a field."""
    return _lines(re.compile(r'"role"'))


def meaning() -> Iterator[str]:
    """Decisions by a part of a name, in the rooms that decide."""
    pattern = re.compile(r'\.split\("[+/\[]"\)|\.name ==|startswith\("gather')
    return _lines(pattern, ("graph/", "lower/", "time/"))


def unnamed() -> Iterator[str]:
    """Modules and packages that the docstring of their package does not name."""
    for module in modules().values():
        parent, _, name = module.name.rpartition(".")
        if parent and not name.startswith("_"):
            package = modules()[parent]
            text = ast.get_docstring(package.tree) or ""
            words = re.findall(r"\w+", " ".join(re.findall("`([^`]+)`", text)))
            if parent != "stagewright" and name not in words:
                yield f"{package.place}: {name}"


def _lines(pattern: re.Pattern[str], rooms: tuple[str, ...] = ("",)) -> Iterator[str]:
    for module in modules().values():
        if module.place.startswith(rooms):
            for number, line in enumerate(module.text.splitlines(), 1):
                if pattern.search(line):
                    yield f"{module.place}:{number} {line.strip()}"


FIGURES: dict[str, Callable[[], Iterable[str]]] = {
    "lazy": lazy,
    "root": root,
    "cycles": cycles,
    "twice": twice,
    "riddles": riddles,
    "roles": roles,
    "meaning": meaning,
    "unnamed": unnamed,
}


def main(names: list[str]) -> int:
    """Print each figure, and the places of those that are named."""
    if unknown := set(names) - set(FIGURES):
        print(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
        return 2
    for name in names or FIGURES:
        places = list(FIGURES[name]())
        about = (FIGURES[name].__doc__ or "").split("\n")[0].rstrip(".")
        print(f"{name:8} {len(places):4}  {about}")
        if names:
            print("".join(f"    {place}\n" for place in places), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
