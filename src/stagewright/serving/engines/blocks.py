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

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Hit(NamedTuple):
    """What of a request is in the cache."""

    segments: list[Segment]
    """Leading segments of which blocks are there."""
    blocks: int
    idle: int
    """Blocks that nobody holds, and that are free no longer once the request holds them."""


Segment = list[int]
"""Of a segment that is cached: its blocks, the requests that hold them, the places in the queue of
idle ones that it has left, and its key."""
PlainHit = tuple[list[Segment], int, int]
"""As `Hit`."""
NO_HIT = Hit([], 0, 0)
"""Of what has nothing in common with others; its list stays empty."""
NOBODYS = -(1 << 40)
"""The key of blocks that only requests held that are done."""


class KvBlocks:
    """Blocks of one cache, in numbers; the blocks themselves are alike.

    A segment of a chain counts as held until the last request lets go that holds a block of it, or
    a copy of one. vLLM and others free blocks one by one, which differs where requests hold parts
    of a segment, or copies of blocks that others have let go.

    >>> cache = KvBlocks(100)
    >>> cache.take(7); cache.extend(0, (5, 6), (4, 8), 7)
    >>> segments, blocks, idle = cache.find((5, 6), (4, 8), 6)
    >>> len(segments), blocks, idle
    (2, 6, 0)
    >>> cache.release(0, 7)
    >>> segments, blocks, idle = cache.find((5, 7), (4, 8), 7)
    >>> cache.free, len(segments), blocks, idle
    (100, 1, 4, 4)
    """

    __slots__ = (
        *("_held", "_idle", "_idle_blocks", "_nobodys", "resident"),
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
        self.resident: dict[int, Segment] = {}
        """Segments that are cached, by key; of those that nobody holds some blocks may have been
        handed out since, which `forget` finds out."""
        # Segments in the order in which nobody held them any more, oldest first. The first places
        # of a segment are those that it has left, since somebody held it again.
        self._idle: deque[Segment] = deque()
        self._idle_blocks = 0
        self._nobodys: Segment = []  # the last blocks that nobody will ask for
        # By request: segments, blocks of these, copies.
        self._held: dict[int, tuple[list[Segment], int, int]] = {}

    # ---- looking ---------------------------------------------------------------------------------

    def find(self, keys: Sequence[int], ends: Sequence[int], most: int) -> Hit:
        """The longest beginning of a chain that is cached, of at most `most` blocks.

        `ends` are the blocks up to the end of each segment.
        """
        return Hit(*self.look(keys, ends, most))

    def look(self, keys: Sequence[int], ends: Sequence[int], most: int) -> PlainHit:
        """As `find`, as a plain tuple: that takes the event loop a tenth of the time."""
        if not self.caching:
            return [], 0, 0
        if self._idle_blocks > self.free:
            self.forget()
        get = self.resident.get
        found: list[Segment] = []
        blocks = idle = 0
        for key, end in zip(keys, ends, strict=False):
            segment = get(key)
            if segment is None:
                break
            here = segment[0]
            if blocks + here > most:
                if blocks == most:
                    break
                here = most - blocks
            found.append(segment)
            if not segment[1]:
                idle += segment[0]
            blocks += here
            if blocks < end:
                break
            blocks = end
        return found, blocks, idle

    def cached_blocks(self, keys: Sequence[int], ends: Sequence[int], most: int) -> int:
        """The blocks that `find` would hit."""
        resident = self.resident
        if not self.caching or keys[0] not in resident:
            return 0
        if self._idle_blocks > self.free:
            self.forget()
        blocks = 0
        for key, end in zip(keys, ends, strict=True):
            segment = resident.get(key)
            if segment is None:
                break
            here = segment[0]
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
        own = self.resident.pop(~request, None)
        if own is None:
            return 0
        own[2] = 1
        self._idle_blocks -= own[0]
        found = min(own[0], most)
        self.free -= found
        return found

    def kept(self, request: int) -> int:
        """Blocks that `resume` would find at most."""
        own = self.resident.get(~request)
        return 0 if own is None else own[0]

    # ---- taking ----------------------------------------------------------------------------------

    def hold(self, request: int, hit: PlainHit) -> None:
        """Hold what a request has hit; the list of `hit` is the cache's from now on."""
        segments, blocks, was_idle = hit
        for segment in segments:
            if not segment[1]:
                segment[2] += 1
            segment[1] += 1
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
        held = self._held.get(request)
        segments, blocks, copies = ([], 0, 0) if held is None else held
        resident = self.resident
        nth = before = len(segments)
        if nth and blocks < ends[nth - 1]:
            nth -= 1
        count = len(keys)
        while blocks < done and nth < count:
            end = ends[nth]
            if end > done:
                end = done
            key = keys[nth]
            segment = resident.get(key)
            if segment is None:
                resident[key] = segment = [end - blocks, 1, 0, key]
                segments.append(segment)
            else:
                if nth >= before:
                    self._join(segment)
                    segments.append(segment)
                start = ends[nth - 1] if nth else 0
                there = segment[0] if segment[0] > blocks - start else blocks - start
                added = end - start - there if end - start > there else 0
                copies += end - blocks - added
                segment[0] += added
            blocks = end
            nth += 1
        if merge and copies:
            self.forget()
            self.free += copies
            copies = 0
        self._held[request] = segments, blocks, copies

    def _join(self, segment: Segment) -> None:
        """Count one more holder of a segment; what was cached of it without its beginning goes."""
        if not segment[1]:
            self._idle_blocks -= segment[0]
            segment[0] = 0
            segment[2] += 1
        segment[1] += 1

    # ---- giving back -----------------------------------------------------------------------------

    def release(self, request: int, blocks: int, *, again: bool = True, loose: int = 0) -> None:
        """Give back a request's `blocks`.

        Where it may run `again`, those of its own can be found by `resume`. What is in the last
        `loose` ones is forgotten at once.
        """
        self.free += self.per_request
        if not self.caching:
            self.free += blocks
            return
        held = self._held.pop(request, None)
        segments, span, copies = NO_HIT if held is None else held
        freed = blocks - span + copies - loose
        if loose:
            self.forget()
            self.free += loose
        idle = self._idle
        if freed:
            if again:
                self.resident[~request] = own = [freed, 0, 0, ~request]
                idle.append(own)
            elif idle and idle[-1] is self._nobodys:
                self._nobodys[0] += freed
            else:
                self._nobodys = own = [freed, 0, 0, NOBODYS]
                idle.append(own)
        for segment in reversed(segments):
            holders = segment[1] = segment[1] - 1
            if not holders:
                idle.append(segment)
                freed += segment[0]
        self._idle_blocks += freed
        self.free += freed

    def leave(self, blocks: int) -> None:
        """Blocks of requests that are done, free already, are idle: nobody will ask for them."""
        if not self.caching:
            return
        if not self._idle or self._idle[-1] is not self._nobodys:
            self._nobodys = [0, 0, 0, NOBODYS]
            self._idle.append(self._nobodys)
        self._nobodys[0] += blocks
        self._idle_blocks += blocks

    def lose(self, request: int, blocks: int) -> None:
        """Forget the last `blocks` of a request that may run again, as far as they are its own."""
        self.forget()
        own = self.resident.get(~request)
        if own is None:
            return
        lost = min(blocks, own[0])
        own[0] -= lost
        self._idle_blocks -= lost
        if not own[0]:
            del self.resident[~request]
            own[2] = 1

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
        idle, leave = self._idle, self._idle.popleft
        while True:
            segment = leave()
            if segment[2]:
                segment[2] -= 1
                continue
            here = segment[0]
            if here > over:
                segment[0] = here - over
                idle.appendleft(segment)
                return
            self.resident.pop(segment[3], None)
            over -= here
            if not over:
                return
