"""The version of this package, which traces, manifests and reports name as their writer."""

__version__ = "0.1.0"
