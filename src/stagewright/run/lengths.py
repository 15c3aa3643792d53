"""The requests that an inference step serves, dealt to data-parallel ranks and microbatches.

A request has tokens whose keys and values are in the cache (`context_length`), and new tokens that
the step computes: the prompt or a chunk of it in prefill, one token in decode, one more than the
draft tokens in speculative decode. A step with both kinds is chunked prefill. So one rule serves
them all: new token j of a request with c cached ones sees c + j + 1 keys, or a window of these.

>>> chunk, decode = Group(1, context_length=512, new_tokens=256), Group(64, 4096, 1)
>>> dict(zip(COLUMNS, attention_sums([chunk, decode], Cache(block_size=16)).T.tolist()))["pairs"]
[163968, 4097]
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple, cast

import numpy as np

from stagewright.arrays import Int, compressed_pairs
from stagewright.errors import UserError, either
from stagewright.files import read_text
from stagewright.model.layers import Reach
from stagewright.run.sections.declare import LARGEST
from stagewright.run.sections.inference import Group

MOST_ROWS = 1_000_000
MOST_BYTES = 64_000_000


class Cache(NamedTuple):
    """Storage of the cache: in blocks, as vLLM's paged cache, or in contiguous places."""

    block_size: int
    """Tokens of a block; 0: not paged."""
    reserved: int = 0
    """Not paged: tokens that each request's place has room for."""
    stripes: int = 1
    """Ranks that share the tokens of a request: token t is with rank t % stripes (the
    `cp_kv_cache_interleave_size` of 1 that is vLLM's default)."""


Groups = tuple[Group, ...]
ALL = Reach()


# ---- reading -------------------------------------------------------------------------------------

_LEAST = {"count": 1, "context_length": 0, "new_tokens": 1}
_NAMES = either(_LEAST)


def read(path: str | Path) -> Groups:
    """Groups from a CSV file with a header: any of `count`, `context_length` and `new_tokens`.

    A row is `count` requests (1 where there is no such column). Raises UserError with the line.
    """
    text = read_text(path, "a CSV file of requests", MOST_BYTES)
    lines = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = [(row, lines.line_num) for row in lines]
    except csv.Error as error:
        raise UserError(f"{path}: is not a CSV file: {error}") from None
    rows = [(row, line) for row, line in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise UserError(f"{path}: is empty; wanted a header such as count,context_length, and rows")
    if len(rows) > MOST_ROWS:
        raise UserError(f"{path}: has {len(rows)} rows, wanted at most {MOST_ROWS}; use count")
    head, line = rows[0]
    names = [name.strip() for name in head]
    for at, name in enumerate(names):
        if name not in _LEAST:
            raise UserError(f"{path}, line {line}: unknown column {shown(name)}; wanted {_NAMES}")
        if name in names[:at]:
            raise UserError(f"{path}, line {line}: column {name} comes twice; keep one")
    groups: list[Group] = []
    for row, line in rows[1:]:
        where = f"{path}, line {line}"
        if len(row) != len(names):
            raise UserError(f"{where}: has {len(row)} cells, wanted {len(names)}, as the header")
        cells = [cell.strip() for cell in row]
        numbers = [int(x) if x.isdecimal() and x.isascii() and len(x) <= 10 else x for x in cells]
        groups.append(_group(dict(zip(names, numbers, strict=True)), where))
    return merge_groups(groups, str(path))


def groups_of_rows(rows: Sequence[Any]) -> Groups:
    """Groups from the rows of a run file; a UserError names the row that is none."""
    groups: list[Group] = []
    for i, row in enumerate(rows):
        where = f"requests, row {i + 1}"
        row = asdict(row) if isinstance(row, Group) else row
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: got {shown(row)}, wanted such as context_length: 4096")
        groups.append(_group(cast("Mapping[object, object]", row), where))
    return merge_groups(groups, "requests")


def _group(row: Mapping[Any, object], where: str) -> Group:
    """A row as a group; None says nothing."""
    values: dict[str, int] = {}
    for name, value in row.items():
        if name not in _LEAST:
            raise UserError(f"{where}: unknown key {shown(name)}; wanted {_NAMES}")
        if value is None:
            continue
        if type(value) is not int:
            raise UserError(f"{where}: {name} is {shown(value)}, wanted a whole number")
        if not _LEAST[name] <= value <= LARGEST:
            raise UserError(
                f"{where}: {name} is {value}, wanted a number from {_LEAST[name]} to {LARGEST}"
            )
        values[name] = value
    return Group(**values)


def merge_groups(groups: Sequence[Group], where: str) -> Groups:
    """Neighbours that are alike as one."""
    merged: list[Group] = []
    for group in groups:
        if merged and replace(merged[-1], count=group.count) == group:
            merged[-1] = replace(group, count=merged[-1].count + group.count)
        else:
            merged.append(group)
    if not merged:
        raise UserError(f"{where}: has no requests; wanted at least one row")
    requests = count_requests(merged)
    if requests > LARGEST:
        raise UserError(f"{where}: has {requests} requests, wanted at most {LARGEST}")
    return tuple(merged)


def count_requests(groups: Sequence[Group]) -> int:
    """Number of requests in the groups."""
    return sum(g.count for g in groups)


def length(group: Group) -> int:
    """Tokens of one request of the group after the step: cached and new ones."""
    return (group.context_length or 0) + (group.new_tokens or 0)


def describe(groups: Sequence[Group], most: int = 4) -> str:
    """Groups of requests in one word: count x context length + new tokens of each.

    >>> describe([Group(64, 4096), Group(1, 0, 512)])
    '64x4096,1x0+512'
    """

    def word(g: Group) -> str:
        context = "" if g.context_length is None else str(g.context_length)
        return f"{g.count}x{context}" + ("" if g.new_tokens is None else f"+{g.new_tokens}")

    return ",".join([*map(word, groups[:most]), *(["..."] if len(groups) > most else [])])


def apportion(groups: Sequence[Group], requests: int) -> Groups:
    """Groups in the same proportions with this many requests: by largest remainder, then by row.

    >>> apportion([Group(1, 100), Group(2, 200)], 4)
    (Group(count=1, context_length=100, new_tokens=None), \
Group(count=3, context_length=200, new_tokens=None))
    """
    whole_of = count_requests(groups)
    shares = [divmod(g.count * requests, whole_of) for g in groups]
    left = requests - sum(whole for whole, _ in shares)
    order = sorted(range(len(groups)), key=lambda i: -shares[i][1])
    more = set(order[:left])
    counts = (whole + (i in more) for i, (whole, _) in enumerate(shares))
    return tuple(replace(g, count=n) for g, n in zip(groups, counts, strict=True) if n)


# ---- sums ----------------------------------------------------------------------------------------

COLUMNS = (
    *("requests", "tokens", "pairs", "keys", "slots", "blocks", "logits"),
    *("stored", "prefix"),
)


def attention_sums(
    groups: Sequence[Group],
    cache: Cache,
    reach: Reach = ALL,
    logits: int = 0,
    *,
    stripe: int = 0,
    multiple: int = 1,
) -> Int:
    """Sums that attention over one request of each group takes: a row per group, exact.

    The columns: `requests`, 1; `tokens` that are new; `pairs` of a query and a key it sees; `keys`
    that any query sees; `slots` of the cache that hold its tokens after the step, and `blocks` of
    these; `logits`: tokens of which the next one is predicted, all new ones where there are at most
    `logits`, otherwise the last; `stored`: new tokens that are written; `prefix`: places for the
    cached ones, as many on every stripe. What lies before the window or the chunk of `reach` is not
    kept (vLLM's managers of such layers free these blocks when the step begins). Where an indexer
    chooses the `top` ones, a query sees so many at most and all tokens are kept; the keys that any
    query sees are then at most all, and as many as there are pairs. Where several positions have
    one key, keys, slots, blocks and `stored` count such keys.

    Where the tokens of a request are shared, pairs, keys and stored are those of one `stripe`;
    blocks are as many on each. New tokens are padded to a `multiple`.
    """
    context = np.array([g.context_length for g in groups], np.int64)
    new = np.array([g.new_tokens for g in groups], np.int64)
    before, pairs = context, _in_stripe(context + new, cache.stripes, stripe)
    pairs = pairs - _in_stripe(context, cache.stripes, stripe)
    if reach.compress > 1:
        return _compressed_sums(context, new, cache, reach, logits, multiple)
    window, chunk, top, block, _ = reach
    assert cache.stripes == 1 or not reach.kind
    if chunk:
        before = context % chunk
        pairs = _in_chunks(context + new, chunk) - _in_chunks(context, chunk)
    if window:
        before = np.minimum(context, window - 1)
        rising = np.clip(window - context, 0, new)  # tokens that still see all before them
        pairs = rising * context + rising * (rising + 1) // 2 + (new - rising) * window
    if top:
        pairs = _chosen(context + new, top, block) - _chosen(context, top, block)
    shared = cache.block_size * cache.stripes  # tokens of a block of all
    if cache.block_size:
        blocks = -(-(context + new) // shared) - (context - before) // shared
        slots = blocks * cache.block_size
    else:
        blocks = np.ones_like(new)
        slots = np.full_like(new, -(-cache.reserved // cache.stripes))
        kept = window or chunk
        slots = np.minimum(slots, kept - 1 + new) if kept else slots
    rows = np.where(new <= logits, new, 1)
    keys, old = (_tokens_of_stripe(n, cache.stripes, stripe) for n in (before + new, before))
    stored = keys - old
    keys = np.minimum(keys, pairs) if top else keys  # tokens that nobody chooses are not read
    padded = -(-new // multiple) * multiple
    columns = (
        *(np.ones_like(new), padded, pairs, keys, slots, blocks, rows),
        *(stored, -(-before // cache.stripes)),
    )
    return np.stack(columns, axis=1)


def _compressed_sums(
    context: Int, new: Int, cache: Cache, reach: Reach, logits: int, multiple: int
) -> Int:
    """The same where several positions have one key: `keys`, slots and blocks count such keys, and
    `stored` those that new tokens complete."""
    _, _, top, _, each = reach
    old, keys = context // each, (context + new) // each
    pairs = compressed_pairs(context + new, each, top) - compressed_pairs(context, each, top)
    reserved = np.full_like(new, -(-cache.reserved // each))
    blocks = -(-keys // cache.block_size) if cache.block_size else np.ones_like(new)
    slots = blocks * cache.block_size if cache.block_size else reserved
    columns = (
        *(np.ones_like(new), -(-new // multiple) * multiple, pairs, np.minimum(keys, pairs)),
        *(slots, blocks, np.where(new <= logits, new, 1), keys - old, old),
    )
    return np.stack(columns, axis=1)


SOURCE = ("source", "squares", "crossed", "slots", "blocks")


def sources(groups: Sequence[Group], tokens: int, cache: Cache) -> Int:
    """The same sums for an encoder of `tokens` tokens per request, which all see each other.

    `squares`: pairs of these; `crossed`: of each new token with all of them; `slots` and `blocks`
    of the cache that holds them (vLLM's CrossAttentionManager).
    """
    new = np.array([g.new_tokens for g in groups], np.int64)
    width = cache.block_size or tokens
    blocks = -(-tokens // width)
    numbers = (tokens, tokens**2, blocks * width, blocks)
    source, squares, slots, taken = (np.full_like(new, number) for number in numbers)
    return np.stack([source, squares, new * tokens, slots, taken], axis=1)


def _tokens_of_stripe(tokens: Int, stripes: int, stripe: int) -> Int:
    """Tokens of a request that one stripe holds.

    >>> [int(_tokens_of_stripe(np.int64(10), 4, stripe)) for stripe in range(4)]
    [3, 3, 2, 2]
    """
    return (tokens + stripes - 1 - stripe) // stripes


def _in_stripe(tokens: Int, stripes: int, stripe: int) -> Int:
    """Pairs of a query among the first `tokens` and a key of one stripe that the query sees.

    >>> [int(_in_stripe(np.int64(3), 2, stripe)) for stripe in range(2)]
    [4, 2]
    """
    whole, rest = np.divmod(tokens + stripes - 1 - stripe, stripes)
    return stripes * (whole * (whole - 1) // 2) + whole * (rest + 1)


def _in_chunks(tokens: Int, chunk: int) -> Int:
    """Pairs of a query among the first `tokens` and a key of its chunk that it sees."""
    whole, rest = np.divmod(tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def _chosen(tokens: Int, top: int, block: int) -> Int:
    """Pairs of a query among the first `tokens` and a key before it that an indexer chooses.

    Of the query's own block, which is among the chosen ones, it sees the part before it.

    >>> int(_chosen(np.int64(5), 2, 1)), int(_chosen(np.int64(7), 4, 2))
    (9, 20)
    """
    first = np.minimum(tokens, top)
    whole, rest = np.divmod(tokens - first, block)
    own = whole * (block * (block + 1) // 2) + rest * (rest + 1) // 2
    return first * (first + 1) // 2 + (tokens - first) * (top - block) + own


def deal(groups: Sequence[Group], values: Int, places: int) -> Int:
    """Sums of `values` over the requests that each place gets; requests are dealt in turn.

    >>> groups = [Group(3, 10, 1), Group(2, 20, 1)]
    >>> deal(groups, attention_sums(groups, Cache(16)), 2)[:, :4].tolist()
    [[3, 3, 43, 43], [2, 2, 32, 32]]
    """
    counts = np.array([g.count for g in groups], np.int64)
    bound = np.abs(values.astype(float)).T @ counts
    if bound.max(initial=0) > 2**62:
        raise UserError(
            "the requests of a step see more than 2**62 keys; use fewer or shorter ones"
        )
    result = np.zeros((places + 1, values.shape[1]), np.int64)
    start = (np.cumsum(counts) - counts) % places
    over = start + counts % places
    # What is left of each group goes to the places from `start` on, round to the first ones.
    for at, sign in ((start, 1), (np.minimum(over, places), -1)):
        np.add.at(result, at, sign * values)
    result[0] += values[over > places].sum(axis=0)
    np.add.at(result, np.maximum(over - places, 0), -values * (over > places)[:, None])
    return np.cumsum(result, axis=0)[:places] + (counts // places) @ values
