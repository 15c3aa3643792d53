"""The journal of an output under construction: which files of ranks are written.

Every process that writes the output notes now and then, in files of its own, which files are done
and their checksums. So a run that was stopped can be gone on with, and several processes can share
an output.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress

from stagewright.trace.manifest import WrittenRanks
from stagewright.trace.storage import Storage

PREFIX = ".part-"  # of the names of all notes
MOST_BYTES = 1 << 28  # of a note: of more than two million files
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RuntimeError)
"""What reading a note raises that is none: whatever a stranger has put in its place."""
INTERVAL = 1.0  # seconds between notes, at first


class Journal:
    """The notes of all processes that write one output."""

    def __init__(self, storage: Storage, output: str) -> None:
        """`output`: the name of the output, as `manifest.identity` makes it."""
        self._storage = storage
        self._prefix = f"{PREFIX}{output}-"
        self._token = secrets.token_hex(4)
        self._unwritten: list[WrittenRanks] = []
        self._parts = 0
        self._began = self._flushed = time.monotonic()

    def note(self, written: WrittenRanks) -> None:
        """Note files that are written. Notes are flushed at growing intervals."""
        self._unwritten.append(written)
        now = time.monotonic()
        if now - self._flushed >= max(INTERVAL, 0.02 * INTERVAL * (now - self._began)):
            self.flush()

    def flush(self, *, empty: bool = False) -> None:
        """Write the notes for other processes to read; if `empty`, even where there are none."""
        if self._unwritten or empty:
            text = json.dumps(WrittenRanks.merge(self._unwritten).to_json())
            self._storage.write(f"{self._prefix}{self._token}-{self._parts}.json", [text.encode()])
            self._parts += 1
            self._unwritten = []
        self._flushed = time.monotonic()

    def read(self) -> WrittenRanks:
        """The notes of all processes; a note that cannot be read is skipped."""
        notes: list[WrittenRanks] = []
        for name, size in sorted(self._storage.sizes().items()):
            if name.startswith(self._prefix) and name.endswith(".json") and size <= MOST_BYTES:
                with suppress(
                    OSError, ValueError, KeyError, TypeError, ArithmeticError, RuntimeError
                ):
                    notes.append(WrittenRanks.from_json(json.loads(self._storage.read(name))))
        return WrittenRanks.merge(notes)
