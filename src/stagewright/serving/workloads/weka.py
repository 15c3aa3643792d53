"""Conversations of coding agents in Weka's trace format, replayed as AgentX does.

An object of JSON holds one conversation: requests with their times, lengths and ids of blocks, and
subagents with requests of their own (callanjfox/kv-cache-tester; ai-dynamo/aiperf,
`docs/tutorials/weka-trace.md`). AgentX (`docs/benchmark-modes/semianalysis-agentx-faq.md` there)
sends a request when its predecessor has ended, after the recorded pause from end to start, which
is capped. Subagents begin after the request before them and run in parallel. A request waits for
the subagents that had ended when it was recorded; for others nobody waits. Ids name blocks within
a conversation (`hash_id_scope: local`), each time that it is replayed.

AgentX begins its first conversations somewhere in the middle, after a warm-up; here all begin with
their first request. AIPerf finds agents among requests without a subagent's marker by their ids;
here these requests follow each other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.serving.workload import NO_CHAIN, Chain, Workload, folded
from stagewright.serving.workloads.synthetic import Arrivals, check_count
from stagewright.serving.workloads.traces import NO_TOKENS, block_ids, objects, seconds, tokens

BLOCK = 64
"""Tokens of a block where a conversation does not say it."""
NO_PARENT = "a subagent before the first request of its conversation"


@dataclass
class Conversation:
    """Requests of a conversation, a place in each list for each; a predecessor stands earlier."""

    prompt: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    chains: list[Chain] = field(default_factory=list[Chain])
    pause: list[float] = field(default_factory=list[float])
    """Seconds after the last of the requests before it is done."""
    after: list[int] = field(default_factory=list[int])
    joins: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


def is_agentic(path: str | Path) -> bool:
    """True for a file of conversations, or a folder."""
    return Path(path).is_dir() or any(
        is_conversation(entry) for _, entry in islice(objects(path), 1)
    )


def is_conversation(entry: Mapping[str, Any]) -> bool:
    """True for a conversation in Weka's format."""
    return isinstance(entry.get("requests"), list) and bool(
        {"block_size", "hash_id_scope"} & entry.keys()
    )


def read_conversations(
    path: str | Path,
    *,
    count: int | None = None,
    arrivals: Arrivals,
    idle_gap_cap: float = 10.0,
    speed: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Replay the conversations of a file, or of all .json files of a folder.

    `count` conversations are replayed, in order and over again where there are fewer; by default,
    each once. They begin as `arrivals` says. Raises UserError for what is
    no conversation, with its place.
    """
    rejected: Counter[str] = Counter()
    conversations = [
        _conversation(entry, where, idle_gap_cap, rejected) for where, entry in _entries(path)
    ]
    recorded = [of for of in conversations if of.prompt]
    if not recorded:
        why = "; ".join(f"{number} x {what}" for what, number in rejected.items())
        raise UserError(f"{path}: has no conversations{': ' + why if why else ''}")
    when, prompt, output = array("d"), array("i"), array("i")
    after, session, chains = array("i"), array("i"), list[Chain]()
    joins: dict[int, tuple[int, ...]] = {}
    random, begin, new_key = Random(seed), 0.0, 0
    for replay in range(len(recorded) if count is None else check_count(count)):
        of, first = recorded[replay % len(recorded)], len(prompt)
        if replay and replay % arrivals.burst_size == 0:
            begin += arrivals.gap(random)
        when.extend([begin, *(pause / speed for pause in of.pause[1:])])
        prompt.extend(of.prompt)
        output.extend(of.output)
        session.extend([replay] * len(of.prompt))
        after.extend(-1 if before < 0 else first + before for before in of.after)
        joins |= {
            first + n: tuple(first + other for other in others) for n, others in of.joins.items()
        }
        chains += [(tuple(new_key + key for key in keys), ends) for keys, ends in of.chains]
        new_key += 1 + max((key for keys, _ in of.chains for key in keys), default=-1)
    replays = session[-1] + 1
    return Workload(
        f"{Path(path).name}, {replays} conversation{'s' * (replays > 1)}",
        *(when, prompt, output, chains, after, session),
        rejected=dict(rejected),
        joins=joins,
    )


def _entries(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each conversation of a file or a folder, and where it is."""
    folder = Path(path).is_dir()
    for file in sorted(Path(path).glob("*.json")) if folder else [path]:
        for where, entry in objects(file):
            if not is_conversation(entry):
                raise UserError(
                    f"{where}: is no conversation in Weka's format; wanted requests and block_size"
                )
            yield where, entry


def _conversation(
    entry: Mapping[str, Any], where: str, idle_gap_cap: float, rejected: Counter[str]
) -> Conversation:
    """The requests of a conversation, with pauses of at most `idle_gap_cap` seconds."""
    size: Any = entry.get("block_size", BLOCK)
    if type(size) is not int or size < 1:
        raise UserError(f"{where}: block_size is {shown(size)}, wanted a whole number of tokens")
    of, keys = Conversation(), dict[int, int]()

    def add_thread(
        requests: Any, where: str, previous: int, previous_end: float
    ) -> tuple[int, float]:
        """Add requests that follow each other; return the last one and its recorded end."""
        if not isinstance(requests, list):
            raise UserError(f"{where}: requests is {shown(requests)}, wanted a list")
        running: list[tuple[float, int]] = []  # recorded ends of subagents, and their last requests
        for number, request in enumerate(cast("list[Any]", requests), 1):
            place = f"{where}, request {number}"
            if not isinstance(request, dict):
                raise UserError(f"{place}: got {shown(request)}, wanted an object of JSON")
            cells = cast("dict[str, Any]", request)
            kind: Any = cells.get("type", "n")
            if kind == "subagent":
                if previous < 0:
                    rejected[NO_PARENT] += 1
                    continue
                last, end = add_thread(cells.get("requests"), place, previous, previous_end)
                if last != previous:
                    running.append((end, last))
                continue
            if kind not in ("n", "s"):
                raise UserError(f"{place}: type is {shown(kind)}, wanted n, s or subagent")
            prompt, output = tokens(cells, "in", place), tokens(cells, "out", place)
            if prompt < 1 or output < 1:
                rejected[NO_TOKENS] += 1
                continue
            begin = seconds(cells.get("t"), "t", place)
            joined = [last for end, last in running if end <= begin]
            known_end = max([previous_end, *(end for end, _ in running if end <= begin)])
            running = [pair for pair in running if pair[0] > begin]
            pause = 0.0 if previous < 0 else max(0.0, begin - known_end)
            of.prompt.append(prompt)
            of.output.append(output)
            of.chains.append(_chain(cells, prompt, size, keys, place))
            of.pause.append(min(pause, idle_gap_cap))
            of.after.append(previous)
            if joined:
                of.joins[len(of.prompt) - 1] = tuple(joined)
            api_time = cells.get("api_time")
            duration = 0.0 if api_time is None else seconds(api_time, "api_time", place)
            previous, previous_end = len(of.prompt) - 1, begin + max(0.0, duration)
        return previous, previous_end

    add_thread(entry["requests"], where, -1, 0.0)
    of.chains = folded(of.chains)
    return of


def _chain(
    cells: Mapping[str, Any], prompt: int, size: int, keys: dict[int, int], where: str
) -> Chain:
    """Blocks of a prompt by their places in `keys`; what no id names is private."""
    if cells.get("hash_ids") is None:
        return NO_CHAIN
    ids = block_ids(cells["hash_ids"], where)[: -(-prompt // size)]
    ends: Sequence[int] = [*range(size, size * len(ids), size), min(prompt, size * len(ids))]
    return tuple(keys.setdefault(key, len(keys)) for key in ids), tuple(ends[: len(ids)])
