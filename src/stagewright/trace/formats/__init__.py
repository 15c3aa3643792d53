"""File formats that a program is written in; `stagewright.trace.templates` makes the files.

In: a program, and ranks. Out: batches of ranks whose files share a template. A module here with a
`plan` is a format, called by the module's name; `FILE` is the name of a rank's file.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def planning_modules() -> dict[str, ModuleType]:
    """The formats of ranks' files by name, the default first."""
    names = sorted((each.name for each in pkgutil.iter_modules(__path__)), key=_default_first)
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "plan")}


def _default_first(name: str) -> tuple[bool, str]:
    return name != "chakra", name
