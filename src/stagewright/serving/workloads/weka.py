"""Conversations of coding agents in Weka's trace format, replayed as AgentX does.

An object of JSON holds one conversation: requests with their times, lengths and ids of blocks, and
subagents with requests of their own (callanjfox/kv-cache-tester; ai-dynamo/aiperf,
`docs/tutorials/weka-trace.md`). AgentX (`docs/benchmark-modes/semianalysis-agentx-faq.md` there)
sends a request when its predecessor has ended, after the recorded pause from end to start, which
is capped. Subagents begin after the request before them and run in parallel. A request waits for
the subagents that had ended when it was recorded; for others nobody waits. Ids name blocks within
a conversation (`hash_id_scope: local`), each time that it is replayed.

AgentX begins the first conversation of each slot at a random time of its recording, with the last
request before it as a warm-up. AIPerf finds agents among requests without a subagent's marker by
their ids; here these requests follow each other.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from reprlib import repr as shown
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.serving.workload import NO_CHAIN, Chain, Workload, fold
from stagewright.serving.workloads.synthetic import Arrivals, check_count
from stagewright.serving.workloads.traces import NO_TOKENS, block_ids, objects, tokens

BLOCK = 64
"""Tokens of a block where a conversation does not say it."""
NO_PARENT = "a subagent before the first request of its conversation"


@dataclass
class Conversation:
    """Requests of a conversation as columns; each stands after those that it waits for."""

    block_size: int
    idle_gap_cap: float
    """Longest pause (s)."""
    rejected: Counter[str]
    """Number of entries that are left out, by reason."""
    prompt: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    chains: list[Chain] = field(default_factory=list[Chain])
    pause: list[float] = field(default_factory=list[float])
    """Seconds after the last of its predecessors is done."""
    predecessor: list[int] = field(default_factory=list[int])
    further_predecessors: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    turns: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Recorded times of the requests of no subagent, and their places."""
    segments: dict[int, int] = field(default_factory=dict[int, int])
    """Segments of chains, numbered from 0, by the ids of blocks."""

    @classmethod
    def of(
        cls, entry: Mapping[str, Any], where: str, idle_gap_cap: float, rejected: Counter[str]
    ) -> Conversation:
        """Read a conversation; `rejected` counts what is left out."""
        size: Any = entry.get("block_size", BLOCK)
        if type(size) is not int or size < 1:
            raise UserError(f"{where}: block_size is {shown(size)}, wanted a number of tokens")
        conversation = cls(size, idle_gap_cap, rejected)
        conversation.add_thread(entry["requests"], where, -1, 0.0, conversation.turns)
        conversation.chains = fold(conversation.chains)
        return conversation

    def add_thread(
        self,
        requests: Any,
        where: str,
        previous: int,
        previous_end: float,
        turns: list[tuple[float, int]],
    ) -> tuple[int, float]:
        """Add requests that follow each other, after request `previous`, and their subagents.

        Returns the last one and its recorded end (s since the conversation began); `turns` gets
        time and place of each.
        """
        if not isinstance(requests, list):
            raise UserError(f"{where}: requests is {shown(requests)}, wanted a list")
        running: list[tuple[float, int]] = []  # recorded ends of subagents, and their last requests
        for number, request in enumerate(cast("list[Any]", requests), 1):
            place = f"{where}, request {number}"
            if not isinstance(request, dict):
                raise UserError(f"{place}: got {shown(request)}, wanted an object of JSON")
            cells = cast("dict[str, Any]", request)
            kind: Any = cells.get("type", "n")
            if kind not in ("n", "s", "subagent"):
                raise UserError(f"{place}: type is {shown(kind)}, wanted n, s or subagent")
            if kind == "subagent" and previous < 0:
                self.rejected[NO_PARENT] += 1
            elif kind == "subagent":
                nested = cells.get("requests")
                last, end = self.add_thread(nested, place, previous, previous_end, [])
                if last != previous:
                    running.append((end, last))
            elif min(tokens(cells, "in", place), tokens(cells, "out", place)) < 1:
                self.rejected[NO_TOKENS] += 1
            else:
                begin = _seconds(cells, "t", place)
                ended = [(end, last) for end, last in running if end <= begin]
                running = [(end, last) for end, last in running if end > begin]
                if ended:
                    self.further_predecessors[len(self.prompt)] = tuple(last for _, last in ended)
                known_end = max([previous_end, *(end for end, _ in ended)])
                self._add(cells, place, previous, begin - known_end)
                previous, previous_end = len(self.prompt) - 1, begin
                turns.append((begin, previous))
                if cells.get("api_time") is not None:
                    previous_end += _seconds(cells, "api_time", place)
        return previous, previous_end

    def _add(self, cells: Mapping[str, Any], where: str, previous: int, pause: float) -> None:
        """Add a request that is sent some seconds after those before it have ended."""
        self.prompt.append(tokens(cells, "in", where))
        self.output.append(tokens(cells, "out", where))
        self.pause.append(0.0 if previous < 0 else min(max(0.0, pause), self.idle_gap_cap))
        self.predecessor.append(previous)
        self.chains.append(self._chain(cells.get("hash_ids"), self.prompt[-1], where))

    def _chain(self, hashes: Any, prompt: int, where: str) -> Chain:
        """Blocks of a prompt; tokens that no id names are private."""
        if hashes is None:
            return NO_CHAIN
        size = self.block_size
        ids = block_ids(hashes, where)[: -(-prompt // size)]
        ends = (min(size * number, prompt) for number in range(1, len(ids) + 1))
        return tuple(self.segments.setdefault(key, len(self.segments)) for key in ids), tuple(ends)

    def from_time(self, share: float) -> Conversation:
        """The conversation from its last turn in this share of its recorded time.

        Subagents that ran beside that turn are left out.
        """
        begins, ends = self.turns[0][0], self.turns[-1][0]
        start = begins + share * (ends - begins)
        first = max(place for time, place in self.turns if time <= start or place == 0)
        return replace(
            self,
            prompt=self.prompt[first:],
            output=self.output[first:],
            chains=self.chains[first:],
            pause=self.pause[first:],
            predecessor=[-1, *(before - first for before in self.predecessor[first + 1 :])],
            further_predecessors={
                request - first: tuple(other - first for other in others if other >= first)
                for request, others in self.further_predecessors.items()
                if request > first
            },
        )


def _seconds(cells: Mapping[str, Any], key: str, where: str) -> float:
    """A number of seconds since the conversation began; raises UserError for anything else."""
    value: Any = cells.get(key)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"{where}: {key} is {shown(value)}, wanted a number of seconds, 0 or more")
    return float(value)


def is_agentic(path: str | Path) -> bool:
    """True for a file of conversations, or a folder."""
    if str(path) and Path(path).is_dir():
        return True
    return any(is_conversation(entry) for _, entry in islice(objects(path), 1))


def is_conversation(entry: Mapping[str, Any]) -> bool:
    """True for a conversation in Weka's format."""
    return isinstance(entry.get("requests"), list) and bool(
        {"block_size", "hash_id_scope"} & entry.keys()
    )


def read_conversations(
    path: str | Path,
    *,
    arrivals: Arrivals,
    count: int | None = None,
    started: int = 0,
    start_share: float = 0.0,
    idle_gap_cap: float = 10.0,
    speed: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Replay the conversations of a file, or of all .json files of a folder.

    `count` conversations are replayed, in order and over again where there are fewer; by default,
    each once. The `started` first ones begin at a random time up to `start_share` of their
    recording. They begin as `arrivals` says, and their pauses are at most `idle_gap_cap` seconds;
    with `speed` 2 they are half as long. Raises UserError for what is no conversation, with its
    place.
    """
    rejected: Counter[str] = Counter()
    conversations = [
        Conversation.of(entry, where, idle_gap_cap, rejected) for where, entry in _entries(path)
    ]
    recorded = [each for each in conversations if each.prompt]
    if not recorded:
        why = "; ".join(f"{number} x {what}" for what, number in rejected.items())
        raise UserError(f"{path}: has no conversations{': ' + why if why else ''}")
    when, prompt, output = array("d"), array("i"), array("i")
    predecessor, session, chains = array("i"), array("i"), list[Chain]()
    further_predecessors: dict[int, tuple[int, ...]] = {}
    random, draw_start, begin, new_segment = Random(seed), Random(f"starts {seed}"), 0.0, 0
    for replay in range(len(recorded) if count is None else check_count(count)):
        conversation, first = recorded[replay % len(recorded)], len(prompt)
        if replay < started and start_share:
            conversation = conversation.from_time(draw_start.random() * start_share)
        if replay and replay % arrivals.burst_size == 0:
            begin += arrivals.gap(random)
        when.extend([begin, *(pause / speed for pause in conversation.pause[1:])])
        prompt.extend(conversation.prompt)
        output.extend(conversation.output)
        session.extend([replay] * len(conversation.prompt))
        predecessor.extend(
            -1 if before < 0 else first + before for before in conversation.predecessor
        )
        for request, others in conversation.further_predecessors.items():
            further_predecessors[first + request] = tuple(first + other for other in others)
        chains += [
            (tuple(new_segment + segment for segment in segments), ends)
            for segments, ends in conversation.chains
        ]
        new_segment += len(conversation.segments)
    replays = session[-1] + 1
    return Workload(
        f"{Path(path).name}, {replays} conversation{'s' * (replays > 1)}",
        *(when, prompt, output, chains, predecessor, session),
        rejected=dict(rejected),
        further_predecessors=further_predecessors,
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
