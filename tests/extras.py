"""Modules of the package's extras: without one, the tests that need it are skipped and say so.

`.ci/run` installs the extras and sets EXTRAS=required, so that none is skipped there in silence.
"""

import importlib
import os
from typing import Any

import pytest


def needed(module: str, extra: str) -> Any:
    """The module that an extra brings."""
    if os.environ.get("EXTRAS") == "required":
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"needs the extra: pip install -e '.[{extra}]'")
