"""The command that writes a PyTorch module as the text of a model."""

from stagewright.cli.commands.import_.command import ENTRY

__all__ = ["ENTRY"]
