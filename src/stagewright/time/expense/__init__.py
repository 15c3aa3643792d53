"""What a step costs: the power that kernels draw, and what a GPU-hour costs its owner."""
