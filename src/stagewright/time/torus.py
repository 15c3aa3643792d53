"""A slice of a torus: its shape, and the rings of a group of ranks.

Chips of a TPU are joined to their neighbours along two or three dimensions. A job gets a slice of a
pod; an axis of the mesh lies along separate dimensions, so that all its groups have whole rings
(JAX's create_device_mesh in mesh_utils, which takes as many dimensions as fit).

>>> pod = Pod((16, 20, 28), cube=4)
>>> pod.slice(512)
(8, 8, 8)
>>> rings(pod.slice(512), pod.closed(pod.slice(512)), count=64, stride=8)  # dp, where tp is 8
(Ring(size=8, closed=True, groups=1), Ring(size=8, closed=True, groups=1))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

Shape = tuple[int, ...]


class Ring(NamedTuple):
    """A dimension of a torus, as a group has it."""

    size: int
    """Members of the group along the dimension."""
    closed: bool
    """True if the ends are joined; else the members lie on a line."""
    groups: int
    """Groups that share the links, one between the other."""

    @property
    def share(self) -> float:
        """The share of the links along the dimension that the group has for its rings."""
        return (1.0 if self.closed else 0.5) / self.groups


class Pod(NamedTuple):
    """The chips that links join."""

    shape: Shape
    cube: int = 0
    """Switches close slices whose dimensions are multiples of this; 0: only a whole dimension of
    the pod is closed."""

    def slice(self, chips: int) -> Shape:
        """The shape of a slice: of the possible ones, that with the shortest longest side.

        Slices of a cube and more consist of cubes, where the number of chips allows that. A number
        of chips that no shape has becomes a line.
        """
        if chips == math.prod(self.shape):
            return self.shape
        shapes = list(_shapes(chips, tuple(sorted(self.shape))))
        cubes = [s for s in shapes if self.cube and all(side % self.cube == 0 for side in s)]
        return min(cubes or shapes, key=lambda s: (s[-1], -s[0]), default=(chips,))

    def closed(self, shape: Shape) -> tuple[bool, ...]:
        """Return True for each dimension of a slice whose ends are joined."""
        if self.cube and all(side % self.cube == 0 for side in shape):
            return (True,) * len(shape)
        whole = math.prod(shape) == math.prod(self.shape)
        return tuple(whole or side in self.shape for side in shape)


def _shapes(chips: int, limits: Shape) -> Iterator[Shape]:
    """Shapes of `chips` chips, sides ascending, within the limits of `limits`."""
    if len(limits) == 1:
        if chips <= limits[0]:
            yield (chips,)
        return
    for last in range(1, limits[-1] + 1):
        if chips % last == 0:
            for inner in _shapes(chips // last, limits[:-1]):
                if inner[-1] <= last:
                    yield (*inner, last)


@cache
def rings(shape: Shape, closed: tuple[bool, ...], count: int, stride: int) -> tuple[Ring, ...]:
    """The rings of a group of `count` ranks, `stride` apart, in a slice.

    The ranks between two members belong to inner axes of the mesh, which have separate dimensions
    where sizes allow that. Otherwise the group shares dimensions with them.
    """
    separate = [
        tuple(Ring(shape[i], closed[i], 1) for i, part in enumerate(parts) if part == _GROUP)
        for parts in product((_INNER, _GROUP, _OUTER), repeat=len(shape))
        if _points(shape, parts, _INNER) == stride and _points(shape, parts, _GROUP) == count
    ]
    layouts = separate or [
        _walk([(shape[i], closed[i]) for i in order], count, stride)
        for order in permutations(range(len(shape)))
    ]
    used = [tuple(ring for ring in layout if ring.size > 1) for layout in layouts]
    return max(used, key=lambda layout: sum(ring.share for ring in layout))


_INNER, _GROUP, _OUTER = range(3)


def _points(shape: Shape, parts: tuple[int, ...], part: int) -> int:
    return math.prod(side for side, role in zip(shape, parts, strict=True) if role == part)


def _walk(sides: list[tuple[int, bool]], count: int, stride: int) -> tuple[Ring, ...]:
    """The rings of a group where ranks fill dimension after dimension, the first one fastest."""
    result: list[Ring] = []
    step, remaining = stride, count
    for side, closed in sides:
        if remaining > 1 and step < side:
            size = min(remaining, -(-side // step))
            result.append(Ring(size, closed and size * step >= side, step))
            remaining, step = -(-remaining // size), 1
        else:
            step = max(1, step // side)
    return tuple(result)
