"""The KV cache of an engine: blocks that requests hold, and prefixes kept for the next ones.

What requests have in common is named by *segments*: two requests whose chains begin with equal keys
have equal tokens up to the end of the last of these. A block belongs to the segment that has its
last token, and so a segment stands for the blocks of vLLM whose hashes it determines
(`vllm/v1/core/kv_cache_utils.py`, `hash_block_tokens`: the hash of a full block is that of its
parent and its own tokens). Blocks of a segment are cached from its beginning, and leave from its
end.

Rules, of vllm-project/vllm@00024d31 `vllm/v1/core/block_pool.py`: blocks that nobody holds stay in
a queue; a request's blocks enter at its tail, last block first (`free_blocks`); new blocks come
from its head (`get_new_blocks`), which is when their contents are forgotten; a hit takes blocks out
of the middle (`touch`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Hit(NamedTuple):
    """What of a request is in the cache."""

    segments: int
    """Leading segments of which blocks are there."""
    blocks: int
    idle: int
    """Blocks that nobody holds, and that are free no longer once the request holds them."""


NO_HIT = Hit(0, 0, 0)
NOBODYS = -(1 << 40)
"""Keys from here downwards are of blocks that only requests held that are done."""


class KvBlocks:
    """Blocks of one cache, in numbers; the blocks themselves are alike.

    A segment of a chain counts as held until the last request lets go that holds a block of it, or
    a copy of one. vLLM and others free blocks one by one, which differs where requests hold parts
    of a segment, or copies of blocks that others have let go.

    >>> cache = KvBlocks(100)
    >>> cache.take(7); cache.extend(0, (5, 6), (4, 8), 7)
    >>> cache.find((5, 6), (4, 8), 6)
    Hit(segments=2, blocks=6, idle=0)
    >>> cache.release(0, (5, 6), (4, 8), 7)
    >>> cache.free, cache.find((5, 7), (4, 8), 7)
    (100, Hit(segments=1, blocks=4, idle=4))
    """

    __slots__ = (
        *("_held", "_idle", "_idle_blocks", "_nobodys", "_resident"),
        *("block_size", "caching", "free", "per_request", "size"),
    )

    def __init__(
        self, size: int, block_size: int = 16, caching: bool = True, per_request: int = 0
    ) -> None:
        """`size` blocks of so many tokens; with `caching`, their contents outlive a request.

        `per_request` blocks more are each running request's, however long (states, windows).
        """
        self.per_request = per_request
        self.size, self.free, self.block_size, self.caching = size, size, block_size, caching
        self._resident: dict[int, list[int]] = {}  # by key: blocks, requests that hold them
        self._idle: OrderedDict[int, None] = OrderedDict()  # keys nobody holds, oldest first
        self._idle_blocks = 0
        self._nobodys = NOBODYS  # the key of the last blocks that nobody will ask for
        # By request: segments, blocks of these, copies.
        self._held: dict[int, tuple[int, int, int]] = {}

    # ---- looking ---------------------------------------------------------------------------------

    def find(self, keys: Sequence[int], ends: Sequence[int], most: int) -> Hit:
        """The longest beginning of a chain that is cached, of at most `most` blocks.

        `ends` are the blocks up to the end of each segment.
        """
        return Hit(*self.look(keys, ends, most))

    def look(self, keys: Sequence[int], ends: Sequence[int], most: int) -> tuple[int, int, int]:
        """As `find`, as a plain tuple: that takes the event loop a tenth of the time."""
        if not self.caching:
            return NO_HIT
        if self._idle_blocks > self.free:
            self.forget()
        resident = self._resident
        segments = blocks = idle = 0
        for key in keys:
            entry = resident.get(key)
            if entry is None:
                break
            here, holders = entry
            if blocks + here > most:
                if blocks == most:
                    break
                here = most - blocks
            segments += 1
            end = ends[segments - 1]
            if not holders:
                idle += entry[0]
            if blocks + here < end:
                blocks += here
                break
            blocks = end
        return segments, blocks, idle

    def cached_blocks(self, keys: Sequence[int], ends: Sequence[int], most: int) -> int:
        """The blocks that `find` would hit."""
        resident = self._resident
        if not self.caching or keys[0] not in resident:
            return 0
        if self._idle_blocks > self.free:
            self.forget()
        blocks = 0
        for key, end in zip(keys, ends, strict=True):
            entry = resident.get(key)
            if entry is None:
                break
            here = entry[0]
            if blocks + here > most:
                return most
            blocks += here
            if blocks < end:
                break
            blocks = end
        return blocks

    def resume(self, request: int, most: int) -> int:
        """Blocks of a preempted request's own that are still there; they are its own again.

        They are taken from the free ones.
        """
        entry = self._resident.pop(~request, None)
        if entry is None:
            return 0
        del self._idle[~request]
        self._idle_blocks -= entry[0]
        found = min(entry[0], most)
        self.free -= found
        return found

    def kept(self, request: int) -> int:
        """Blocks that `resume` would find at most."""
        entry = self._resident.get(~request)
        return 0 if entry is None else entry[0]

    # ---- taking ----------------------------------------------------------------------------------

    def hold(self, request: int, keys: Sequence[int], hit: tuple[int, int, int]) -> None:
        """Hold what a request has hit."""
        segments, blocks, was_idle = hit
        resident = self._resident
        for key in keys[:segments]:
            entry = resident[key]
            if not entry[1]:
                del self._idle[key]
            entry[1] += 1
        if was_idle:
            self._idle_blocks -= was_idle
            self.free -= was_idle
        self._held[request] = segments, blocks, 0

    def take(self, blocks: int) -> None:
        """Take free blocks; the caller has seen that there are so many."""
        self.free -= blocks

    def extend(
        self,
        request: int,
        keys: Sequence[int],
        ends: Sequence[int],
        done: int,
        *,
        merge: bool = False,
    ) -> None:
        """Name the blocks that a request has computed, up to `done`, so that others may hit them.

        Blocks that others have named already are the request's own copies; with `merge` the copies
        are freed, and the request holds those of the others.

        vLLM names blocks when they are allocated (`KVCacheManager.allocate_slots`, which calls
        `cache_blocks`): a request that is admitted later in the same step can hit them.
        """
        if not self.caching or not keys:
            return
        segments, blocks, copies = self._held.get(request, NO_HIT)
        resident = self._resident
        nth = segments - 1 if segments and blocks < ends[segments - 1] else segments
        count = len(keys)
        while blocks < done and nth < count:
            end = ends[nth]
            if end > done:
                end = done
            key = keys[nth]
            entry = resident.get(key)
            if entry is None:
                resident[key] = [end - blocks, 1]
            else:
                if nth >= segments:
                    self._join(key, entry)
                start = ends[nth - 1] if nth else 0
                there = entry[0] if entry[0] > blocks - start else blocks - start
                added = end - start - there if end - start > there else 0
                copies += end - blocks - added
                entry[0] += added
            blocks = end
            nth += 1
        if merge and copies:
            self.forget()
            self.free += copies
            copies = 0
        self._held[request] = nth if nth > segments else segments, blocks, copies

    def _join(self, key: int, entry: list[int]) -> None:
        """Count one more holder of a segment; what was cached of it without its beginning goes."""
        if not entry[1]:
            del self._idle[key]
            self._idle_blocks -= entry[0]
            entry[0] = 0
        entry[1] += 1

    # ---- giving back -----------------------------------------------------------------------------

    def release(
        self,
        request: int,
        keys: Sequence[int],
        ends: Sequence[int],
        blocks: int,
        *,
        again: bool = True,
        loose: int = 0,
    ) -> None:
        """Give back a request's `blocks`.

        Where it may run `again`, those of its own can be found by `resume`. What is in the last
        `loose` ones is forgotten at once.
        """
        self.free += self.per_request
        if not self.caching:
            self.free += blocks
            return
        segments, span, copies = self._held.pop(request, NO_HIT) if keys else NO_HIT
        own = blocks - span + copies - loose
        if loose:
            self.forget()
            self.free += loose
        idle = self._idle
        freed = own
        if own:
            if again:
                self._resident[~request] = [own, 0]
                idle[~request] = None
            elif idle and next(reversed(idle)) is self._nobodys:
                self._resident[self._nobodys][0] += own
            else:
                self._nobodys -= 1
                self._resident[self._nobodys] = [own, 0]
                idle[self._nobodys] = None
        if segments:
            resident = self._resident
            for key in keys[segments - 1 :: -1]:
                entry = resident[key]
                here, holders = entry
                entry[1] = holders - 1
                if holders == 1:
                    idle[key] = None
                    freed += here
        self._idle_blocks += freed
        self.free += freed

    def leave(self, blocks: int) -> None:
        """Blocks of requests that are done, free already, are idle: nobody will ask for them."""
        if not self.caching:
            return
        idle = self._idle
        if not idle or next(reversed(idle)) is not self._nobodys:
            self._nobodys -= 1
            self._resident[self._nobodys] = [0, 0]
            idle[self._nobodys] = None
        self._resident[self._nobodys][0] += blocks
        self._idle_blocks += blocks

    def lose(self, request: int, blocks: int) -> None:
        """Forget the last `blocks` of a request that may run again, as far as they are its own."""
        self.forget()
        entry = self._resident.get(~request)
        if entry is None:
            return
        lost = min(blocks, entry[0])
        entry[0] -= lost
        self._idle_blocks -= lost
        if not entry[0]:
            del self._resident[~request], self._idle[~request]

    def forget(self, spare: int = 0) -> None:
        """Forget what blocks held that have been handed out since, oldest first, and more of what
        idle blocks hold until so many free ones hold nothing."""
        most = self.free - spare
        if most < 0:
            most = 0
        over = self._idle_blocks - most
        if over <= 0:
            return
        self._idle_blocks = most
        resident, idle = self._resident, self._idle
        gone: list[int] = []
        for key in idle:
            entry = resident[key]
            here = entry[0]
            if here > over:
                entry[0] = here - over
                break
            over -= here
            gone.append(key)
            if not over:
                break
        for key in gone:
            del resident[key], idle[key]
