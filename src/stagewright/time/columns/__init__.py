"""Durations of many configurations at once: of kernels, and of collectives by where groups lie."""
