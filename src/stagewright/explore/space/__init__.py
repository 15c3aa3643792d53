"""The space of a search: what settings, lists and machines ask for, as candidates that can run."""
