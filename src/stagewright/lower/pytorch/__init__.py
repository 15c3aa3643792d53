"""Lowering as in PyTorch: units of FSDP2, and the ring of context parallelism.

Each is a habit (`lower.habits`).
"""
