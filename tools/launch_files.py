"""Which launch files of a folder can be read: a line each, and totals.

    python tools/launch_files.py FOLDER

Verdicts: `read`; `asked`, read with values in place of those from outside, which the line names;
`refused`, what would change the step is not modelled, or the file is broken; `other`, it neither
trains nor serves.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from stagewright.errors import UserError
from stagewright.launch import files

_OTHER = ("runs no training step", "starts ", "is no launch file")
_ASK = re.compile(r"--set ([\w-]+)=")
_SIZES = {"vocab-size": "32000", "TP": "8", "EP_SIZE": "8", "CONC": "64", "ISL": "1024",
          "OSL": "1024", "MAX_MODEL_LEN": "4096", "MAX_NUM_TOKENS": "8192"}  # fmt: skip
"""Values of what is asked for; all others are 1."""


def verdict(path: Path) -> tuple[str, str]:
    """The verdict on a file, and the reason."""
    given: dict[str, str] = {}
    while True:
        try:
            if files.find(path) is None:
                return "other", "is no launch file"
            reading = files.read(files.with_variables(str(path), given))
            break
        except UserError as error:
            text = str(error).partition(": ")[2]
            ask = _ASK.search(text)
            if ask is None or ask[1] in given:
                return "other" if any(words in text for words in _OTHER) else "refused", text
            given[ask[1]] = _SIZES.get(ask[1], "1")
    asks = [*given, *reading.needs]
    count = len(reading.lines)
    text = f"{reading.tool}, {count} of {count + len(reading.ignored)} flags count"
    return ("asked", f"{text}; given {', '.join(asks)}") if asks else ("read", text)


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
