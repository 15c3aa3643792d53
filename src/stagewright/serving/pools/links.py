"""Links between instances: each has a queue, in the order in which transfers were asked for."""

from __future__ import annotations


class Links:
    """The link of each engine to the network, which sends or receives one cache at a time.

    A transfer waits until the links of both of its ends are free of all that were asked for before.

    >>> links = Links(3)
    >>> links.send(0, 1, now=0.0, seconds=2.0), links.send(0, 2, now=1.0, seconds=2.0)
    (0.0, 2.0)
    """

    __slots__ = ("_free",)

    def __init__(self, engines: int) -> None:
        """All links are free."""
        self._free = [0.0] * engines

    def send(self, source: int, target: int, now: float, seconds: float) -> float:
        """When a transfer that takes so many seconds on its links begins."""
        begins = max(now, self._free[source], self._free[target])
        self._free[source] = self._free[target] = begins + seconds
        return begins

    def hold(self, source: int, target: int, until: float) -> None:
        """Both links are busy up to a moment at least."""
        self._free[source] = max(self._free[source], until)
        self._free[target] = max(self._free[target], until)
