"""KV cache of one engine: blocks that requests hold, and prompt prefixes kept for later requests.

*Segments* are the parts of prompts that requests share, and are numbered: two requests whose chains
begin with equal segments have equal tokens up to the end of the last equal one. A block belongs to
the segment of its last token, so a segment stands for the blocks whose hashes it determines in vLLM
(`vllm/v1/core/kv_cache_utils.py`, `hash_block_tokens`: the hash of a full block covers its parent
and its own tokens). Blocks of a segment are cached from its beginning and evicted from its end.

Rules of vllm-project/vllm@00024d31 `vllm/v1/core/block_pool.py`: blocks without a holder stay in a
queue; a request's blocks enter at its tail, last block first (`free_blocks`); new blocks come from
its head (`get_new_blocks`), and their contents are forgotten then; a hit takes blocks out of the
middle (`touch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

NO_OWNER = -(1 << 40)
"""Number for blocks that only finished requests had, and that no request can reuse."""


class CachedSegment:
    """Cached blocks of one segment."""

    __slots__ = ("blocks", "holders", "number", "stale")

    def __init__(self, number: int, blocks: int, holders: int) -> None:
        """Segment of `blocks` blocks that is not in the queue of evictable blocks."""
        self.number, self.blocks, self.holders = number, blocks, holders
        self.stale = 0
        """Queue positions that no longer count, since a request holds the segment again."""


class CacheHit(NamedTuple):
    """Cached beginning of a request's chain."""

    segments: list[CachedSegment]
    blocks: int
    evictable: int
    """Blocks without a holder: they stop being free when the request holds them."""


NO_HIT = CacheHit([], 0, 0)
"""Hit of a request without a chain; its list stays empty."""


class PagedKvCache:
    """Block counts of one cache; single blocks have no identity.

    A segment is held while any request holds one of its blocks, or a copy of one. vLLM frees single
    blocks; that differs where requests hold parts of a segment, or copies of blocks that other
    requests have released.

    >>> cache = PagedKvCache(100)
    >>> cache.take(7); cache.extend(0, (5, 6), (4, 8), 7)
    >>> segments, blocks, evictable = cache.find((5, 6), (4, 8), 6)
    >>> len(segments), blocks, evictable
    (2, 6, 0)
    >>> cache.release(0, 7)
    >>> segments, blocks, evictable = cache.find((5, 7), (4, 8), 7)
    >>> cache.free, len(segments), blocks, evictable
    (100, 1, 4, 4)
    """

    __slots__ = (
        *("_evictable", "_evictable_blocks", "_held", "_unowned", "resident"),
        *("block_size", "caching", "free", "per_request", "size"),
    )

    def __init__(
        self, size: int, block_size: int = 16, caching: bool = True, per_request: int = 0
    ) -> None:
        """Empty cache of `size` blocks of `block_size` tokens.

        `caching`: contents outlive their requests. `per_request`: further blocks of each running
        request, whatever its length (states, attention windows).
        """
        self.per_request = per_request
        self.size, self.free, self.block_size, self.caching = size, size, block_size, caching
        self.resident: dict[int, CachedSegment] = {}
        """Cached segments by number; `forget` removes blocks that were handed out since."""
        # Segments without a holder, least recently used first. The first positions of a segment
        # are stale: some request held it again after them.
        self._evictable: deque[CachedSegment] = deque()
        self._evictable_blocks = 0
        self._unowned = CachedSegment(NO_OWNER, 0, 0)  # the most recent blocks without an owner
        # By request: segments, blocks of these, copies of blocks that other requests named first.
        self._held: dict[int, tuple[list[CachedSegment], int, int]] = {}

    # ---- lookup ----------------------------------------------------------------------------------

    def find(self, segments: Sequence[int], ends: Sequence[int], limit: int) -> CacheHit:
        """Longest cached beginning of a chain, of at most `limit` blocks.

        `ends`: blocks up to the end of each segment.
        """
        get = self.resident.get
        if not self.caching:
            return CacheHit([], 0, 0)
        if self._evictable_blocks > self.free:
            self.forget()
        hits: list[CachedSegment] = []
        blocks = evictable = 0
        for number, end in zip(segments, ends, strict=False):
            segment = get(number)
            if segment is None:
                break
            cached = segment.blocks
            if blocks + cached > limit:
                if blocks == limit:
                    break
                cached = limit - blocks
            hits.append(segment)
            if not segment.holders:
                evictable += segment.blocks
            blocks += cached
            if blocks < end:
                break
            blocks = end
        return CacheHit(hits, blocks, evictable)

    def resume(self, request: int, limit: int) -> int:
        """Take a preempted request's private blocks back, at most `limit`; return their number."""
        private = self.resident.pop(~request, None)
        if private is None:
            return 0
        private.stale = 1
        self._evictable_blocks -= private.blocks
        blocks = min(private.blocks, limit)
        self.free -= blocks
        return blocks

    def resumable(self, request: int) -> int:
        """Private blocks of a preempted request that are still cached."""
        private = self.resident.get(~request)
        return 0 if private is None else private.blocks

    # ---- allocation ------------------------------------------------------------------------------

    def hold(self, request: int, hit: CacheHit) -> None:
        """Hold the blocks of a hit; its list of segments belongs to the cache from now on."""
        for segment in hit.segments:
            if not segment.holders:
                segment.stale += 1
            segment.holders += 1
        if hit.evictable:
            self._evictable_blocks -= hit.evictable
            self.free -= hit.evictable
        self._held[request] = hit.segments, hit.blocks, 0

    def take(self, blocks: int) -> None:
        """Take free blocks; the caller has checked their number."""
        self.free -= blocks

    def extend(
        self,
        request: int,
        segments: Sequence[int],
        ends: Sequence[int],
        computed: int,
        *,
        merge: bool = False,
    ) -> None:
        """Name a request's blocks up to `computed`, so that other requests can reuse them.

        Blocks that another request has named are private copies; `merge` frees the copies and holds
        the named blocks instead. vLLM names blocks when they are allocated
        (`KVCacheManager.allocate_slots` calls `cache_blocks`): a request that is admitted later in
        the same step can hit them.
        """
        if not self.caching or not segments:
            return
        held = self._held.get(request)
        held_segments, blocks, copies = ([], 0, 0) if held is None else held
        resident = self.resident
        index = num_held = len(held_segments)
        if index and blocks < ends[index - 1]:
            index -= 1
        count = len(segments)
        if (blocks >= computed or index >= count) and not (merge and copies):
            return
        while blocks < computed and index < count:
            end = ends[index]
            if end > computed:
                end = computed
            number = segments[index]
            segment = resident.get(number)
            if segment is None:
                resident[number] = segment = CachedSegment(number, end - blocks, 1)
                held_segments.append(segment)
            else:
                if index >= num_held:
                    self._join(segment)
                    held_segments.append(segment)
                start = ends[index - 1] if index else 0
                named = max(segment.blocks, blocks - start)
                added = max(end - start - named, 0)
                copies += end - blocks - added
                segment.blocks += added
            blocks = end
            index += 1
        if merge and copies:
            self.forget()
            self.free += copies
            copies = 0
        self._held[request] = held_segments, blocks, copies

    def _join(self, segment: CachedSegment) -> None:
        """Add a holder; blocks that were cached without their beginning are dropped."""
        if not segment.holders:
            self._evictable_blocks -= segment.blocks
            segment.blocks = 0
            segment.stale += 1
        segment.holders += 1

    # ---- release ---------------------------------------------------------------------------------

    def release(
        self, request: int, blocks: int, *, resumable: bool = True, partial_blocks: int = 0
    ) -> None:
        """Give back a request's `blocks`.

        `resumable`: the request may run again and `resume` its private blocks. The contents of its
        last `partial_blocks` are forgotten at once.
        """
        self.free += self.per_request
        if not self.caching:
            self.free += blocks
            return
        held = self._held.pop(request, None)
        segments, span, copies = NO_HIT if held is None else held
        freed = blocks - span + copies - partial_blocks
        if partial_blocks:
            self.forget()
            self.free += partial_blocks
        evictable = self._evictable
        if freed:
            if resumable:
                self.resident[~request] = private = CachedSegment(~request, freed, 0)
                evictable.append(private)
            elif evictable and evictable[-1] is self._unowned:
                self._unowned.blocks += freed
            else:
                self._unowned = CachedSegment(NO_OWNER, freed, 0)
                evictable.append(self._unowned)
        for segment in reversed(segments):
            segment.holders -= 1
            if not segment.holders:
                evictable.append(segment)
                freed += segment.blocks
        self._evictable_blocks += freed
        self.free += freed

    def drop_last(self, request: int, blocks: int) -> None:
        """Forget the last `blocks` of a preempted request, as far as they are private."""
        self.forget()
        private = self.resident.get(~request)
        if private is None:
            return
        dropped = min(blocks, private.blocks)
        private.blocks -= dropped
        self._evictable_blocks -= dropped
        if not private.blocks:
            del self.resident[~request]
            private.stale = 1

    def forget(self, spare: int = 0) -> None:
        """Forget contents of blocks that were handed out, least recently used first.

        Further contents are forgotten until `spare` free blocks are empty.
        """
        limit = max(self.free - spare, 0)
        excess = self._evictable_blocks - limit
        if excess <= 0:
            return
        self._evictable_blocks = limit
        evictable = self._evictable
        while True:
            segment = evictable.popleft()
            if segment.stale:
                segment.stale -= 1
                continue
            if segment.blocks > excess:
                segment.blocks -= excess
                evictable.appendleft(segment)
                return
            self.resident.pop(segment.number, None)
            excess -= segment.blocks
            if not excess:
                return
