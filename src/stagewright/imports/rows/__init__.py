"""The table from operations of PyTorch to ops of Stagewright: a function for each operation."""
