"""Experts: how tokens get to them and back, and the kernels beside their products."""
