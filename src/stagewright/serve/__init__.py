"""Requests over time on engines whose steps take what `simulate` says of each batch."""
