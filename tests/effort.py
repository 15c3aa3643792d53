"""How far random searches go: `EFFORT=10 pytest -m slow` tries ten times as many draws."""

import os

EFFORT = int(os.environ.get("EFFORT", "1"))


def times(count: int) -> int:
    """So many draws, times the effort that is asked for."""
    return count * EFFORT
