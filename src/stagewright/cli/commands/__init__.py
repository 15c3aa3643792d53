"""Commands, one module each: a function with `@command` is all that adding one takes.

Of runs: `show`, `generate`, `simulate`, `search`, `serve`, `report`. Of traces: `inspect`,
`verify`, `diff`, `expand`. Of recorded steps: `replay`, `compare`, `calibrate`. Of data and the
installation: `models`, `hardware`, `validate`, `doctor`. `import_model` is `stagewright import`.
"""

from __future__ import annotations

import importlib
import pkgutil

from stagewright.cli.command import Command


def all_commands() -> list[Command]:
    """The commands of the modules, in the order of use."""
    names = [each.name for each in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    commands = [x for module in modules for x in vars(module).values() if isinstance(x, Command)]
    return sorted(commands, key=lambda command: command.order)
