"""Candidates as files of other tools: `search --as`."""

from __future__ import annotations

from stagewright.run import tool_files
from stagewright.run.tool_files import TrainedRun
from stagewright.searching.candidates import Candidates


def _trained(candidates: Candidates, index: int) -> TrainedRun:
    hardware = candidates.hardware(index)
    return TrainedRun.of(
        candidates.run(index), candidates.model, candidates.execution(index),
        before_blackwell=hardware.is_before_blackwell,
    )  # fmt: skip


def flags(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Lines of a file, or flags, with which a tool trains as a candidate does."""
    return tool_files.text_lines(_trained(candidates, index), tool)


def notes(candidates: Candidates, index: int, tool: str) -> list[str]:
    """Sentences on the settings that a tool lacks."""
    return tool_files.notes(_trained(candidates, index), tool)
