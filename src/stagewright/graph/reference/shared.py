"""Helpers of several families; a `Context` says where in an op a rank is."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Context(Protocol):
    """A rank's place in a sharded op, and the node's attributes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape of the result."""
        ...

    @property
    def count(self) -> int:
        """Points of the whole index space that the result sums over."""
        ...

    def start(self, letter: str) -> int:
        """The global index at which the rank's part of an index begins."""
        ...

    def size(self, letter: str) -> int:
        """The whole size of an index."""
        ...

    def shape_of(self, letter: str) -> int:
        """The size of the rank's part of an index."""
        ...

    def value(self, attr: str) -> int:
        """An attribute that is a size, as a number."""
        ...

    def leads(self, axes: tuple[str, ...]) -> bool:
        """True for the first rank along some axes: of equal copies, one counts."""
        ...

    def __getitem__(self, attr: str) -> Any:
        """An attribute of the node."""
        ...

    def get(self, attr: str, default: Any = None) -> Any:
        """An attribute of the node, or `default`."""
        ...


def same(ctx: Context, x: Any) -> Any:
    return x


def first(ctx: Context, x: Any, *_: Any) -> Any:
    return x


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def probabilities(scores: Any, sinks: Any = None) -> Any:
    """Softmax over the last dim; `sinks`, one score more per head, take what is missing to 1."""
    most = scores.max(-1, keepdims=True)
    if sinks is None:
        e = np.exp(scores - most)
        return e / e.sum(-1, keepdims=True)
    most = np.maximum(most, sinks)
    e = np.exp(scores - most)
    return e / (e.sum(-1, keepdims=True) + np.exp(sinks - most))
