"""Which launch files of a folder can be read: a line each, and totals.

    python tools/launch_files.py FOLDER

Verdicts: `read`; `asks` for a value from outside; `refused`, what would change the step is not
modelled; `other`, the file starts no training step.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from stagewright.errors import UserError
from stagewright.launch import files

_ASKS = ("--set", "name a model")
_OTHER = ("runs no training step", "starts nothing")


def verdict(path: Path) -> tuple[str, str]:
    """The verdict on a file, and the reason."""
    try:
        if files.find(path) is None:
            return "other", "is no launch file"
        reading = files.read(path)
    except UserError as error:
        text = str(error).removeprefix(f"{path}: ")
        if any(words in text for words in _OTHER):
            return "other", text
        return ("asks" if any(words in text for words in _ASKS) else "refused"), text
    for why in reading.needs.values():
        return "asks", why
    count = len(reading.lines)
    return "read", f"{reading.tool}, {count} of {count + len(reading.ignored)} flags count"


def main(folder: str) -> None:
    """Print the table."""
    totals: Counter[str] = Counter()
    for path in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
        what, why = verdict(path)
        totals[what] += 1
        print(f"{what:8}{path.name}: {why}")
    print(", ".join(f"{count} {what}" for what, count in totals.most_common()))


if __name__ == "__main__":
    main(sys.argv[1])
