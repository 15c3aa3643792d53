"""The colours of all charts by meaning: one colour means one thing on every page.

Hues are families. Blue is work of kernels, warm is communication, green is the model's weights,
violet is what a token leaves behind, grey is the optimizer, teal is decode, red is a limit or a
problem. Time in which nothing runs is a faint shade of the text's colour. Within a family, and
for readers who do not see colours, patterns distinguish fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stagewright.views.pictures.svg import Fill

WORK: Mapping[str, Fill] = {
    "forward": Fill("#0072B2"),
    "recompute": Fill("#9CBFE0", "x"),
    "backward": Fill("#56B4E9", "/"),
    "optimizer": Fill("#8C8F94", "-"),
    "decode": Fill("#12A3A3", "."),
}
"""Kernels by phase. Prefill is a forward pass: prompts and TTFT have its colour, TPOT has decode's.
States of the optimizer have the colour of its step."""

ACTIONS: Mapping[str, Fill] = {
    "F": WORK["forward"],
    "B": WORK["backward"],
    "I": Fill("#7FC8F0", "-"),
    "W": Fill("#2E86C1", "\\"),
}
"""Actions of a schedule: a backward may be split into gradients of inputs and of weights."""

WAITING: Mapping[str, Fill] = {
    "bubble": Fill("currentColor", ".", 0.1),
    "launches": Fill("currentColor", "-", 0.25),
}
"""Time in which a GPU waits for other ranks, and for its host: fainter than any work."""

AXES: Mapping[str, Fill] = {
    "tp": Fill("#E69F00", "."),
    "dp": Fill("#A6611A", "|"),
    "pp": Fill("#F0C987", "\\"),
    "ep": Fill("#CC79A7", "+"),
    "cp": Fill("#F0E442", "/"),
}
"""Communication by mesh axis."""
FUSED_AXES = (
    *(Fill("#E8A3C4", "x"), Fill("#B98A4E", "-"), Fill("#D9B26F", "/"), Fill("#7A5230", ".")),
)
"""Communication along several axes at once; of more than four such groups, fills repeat."""

MEMORY: Mapping[str, Fill] = {
    "parameters": Fill("#009E73"),
    "gradients": Fill("#66C2A5", "/"),
    "optimizer": WORK["optimizer"],
    "gathered_parameters": Fill("#2F7F5F", "x"),
    "activations": Fill("#B59BE0", "."),
    "communication": Fill("#DDBB8E", "\\"),
    "workspace": Fill("#B5B36B", "|"),
    "allowance": Fill("#DCDCCB", "+"),
    "kv_cache": Fill("#7A5FC0", "/"),
}
"""Memory by category."""

LIMIT = "#D0021B"
"""A limit: of memory, of a latency; and whatever is beyond it."""
CANDIDATE, FRONT = "#9AA5B1", "#34699A"
"""Candidates of a search, and those that no other beats."""

CURVES: Mapping[str, tuple[str, str]] = {
    "TTFT": (WORK["forward"].colour, ""),
    "TPOT": (WORK["decode"].colour, ""),
    "E2E": ("currentColor", ""),
    "waiting": ("#A08060", "7 3"),
    "running": ("#66A61E", ""),
    "cache": (MEMORY["kv_cache"].colour, ""),
    "fullest cache": (MEMORY["kv_cache"].colour, "7 3"),
    "power": ("#5B6BBF", ""),
    "limit": (LIMIT, "9 4"),
}
"""Colour and dashes of curves."""


def of_axes(names: Iterable[str]) -> dict[str, Fill]:
    """Fills of communication along axes; in a disaggregated step, those of decode have bars.

    >>> [fill.colour for fill in of_axes(["tp", "prefill tp", "decode tp"]).values()]
    ['#E69F00', '#E69F00', '#E69F00']
    """
    fills: dict[str, Fill] = {}
    for name in names:
        side, _, axis = name.rpartition(" ")
        if axis == "cache":
            fill = MEMORY["kv_cache"]
        elif axis in AXES:
            fill = AXES[axis]
        else:  # the same name has the same fill on every page, unless the page has another one
            start = sum(map(ord, axis))
            fused = [FUSED_AXES[(start + i) % len(FUSED_AXES)] for i in range(len(FUSED_AXES))]
            fill = next((each for each in fused if each not in fills.values()), fused[0])
        fills[name] = fill._replace(pattern="|") if side == "decode" else fill
    return fills
