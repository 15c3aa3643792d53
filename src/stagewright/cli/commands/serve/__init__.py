"""The command that serves requests over time."""

from stagewright.cli.commands.serve.command import ENTRY

__all__ = ["ENTRY"]
