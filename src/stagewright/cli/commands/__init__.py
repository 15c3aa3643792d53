"""Commands, one module each: its `ENTRY` is all that adding a command takes.

Of runs: `show`, `generate`, `simulate`, `search`, `serve`, `report`. Of traces: `inspect`,
`verify`, `diff`, `expand`. Of recorded steps: `replay`, `compare`, `calibrate`. Of data and the
installation: `models`, `hardware`, `validate`, `doctor`. `import_model` is `stagewright import`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagewright.cli.command import Entry


def entries() -> list[Entry]:
    """What the modules of commands declare, in the order of use."""
    names = [each.name for each in pkgutil.iter_modules(__path__)]
    declared = [importlib.import_module(f"{__name__}.{name}").ENTRY for name in names]
    return sorted(declared, key=lambda entry: entry.order)
