"""What an import assumed or left out, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from stagewright.imports.calls import OpCall
from stagewright.imports.rows.translation import Translation
from stagewright.imports.trace.recording import Recording


def left_out(recording: Recording, calls: Mapping[str, OpCall]) -> list[str]:
    """A note on parameters that the result does not depend on, which the text lacks."""
    out = [n for n in recording.nodes if n.op == "param" and n.name not in calls]
    if not out:
        return []
    count = sum(prod(int(extent) for extent in n.shape) for n in out)
    more = f" and {len(out) - 6} more" if len(out) > 6 else ""
    paths = ", ".join(n.path for n in out[:6]) + more
    return [f"left out: {count:,} parameters that the result does not depend on: {paths}"]


def counted(translation: Translation, calls: Mapping[str, OpCall]) -> list[str]:
    """Notes on operations that are counted by their bytes; `calls` are those of the text."""
    counts = {
        "by their bytes": _kept(translation.as_bytes, translation.calls, calls),
        "without a row, by their bytes": translation.unknown,
    }
    return [
        f"operations counted {kind}: {', '.join(f'{n} {op}' for op, n in found.most_common())}"
        for kind, found in counts.items()
        if found
    ]


def _kept(
    counted: Counter[str], before: Mapping[str, OpCall], after: Mapping[str, OpCall]
) -> Counter[str]:
    """What is counted by its bytes, without what became a part of attention."""
    was, now = (
        Counter(str(call.attrs.get("fn")) for call in calls.values() if call.op == "opaque")
        for calls in (before, after)
    )
    return Counter(
        {fn: n for fn, count in counted.items() if (n := now[fn] if fn in was else count)}
    )
