"""Cost of a step: power of kernels, and cost of ownership per GPU-hour."""
