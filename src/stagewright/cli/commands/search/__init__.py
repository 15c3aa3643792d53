"""The command that searches the best execution of a model on a machine."""

from stagewright.cli.commands.search.command import ENTRY

__all__ = ["ENTRY"]
