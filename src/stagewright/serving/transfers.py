"""The KV cache of a request on its way from the instance that computed it to the one that decodes.

Decode ranks read from the prefill ranks that hold the keys and values of their layers and heads
(`lower.inference.disaggregated`): every pair of ranks has bytes of its own, and all go at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.inference.disaggregated import in_replica, messages
from stagewright.lower.inference.joined import Message
from stagewright.model.config import ModelConfig
from stagewright.run.lengths import Group
from stagewright.run.settings import Run
from stagewright.serving.steps.step_times import batch_run
from stagewright.time.collectives import message_seconds
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine, tier_of

_TOKENS = (1 << 17, 1 << 18)
"""Two lengths beyond all windows: bytes are linear between them, and taken to be so below."""
_ALONE = {"dp": 1, "ep": 1, "etp": None, "dcp": None, "batch_size": None}
"""A replica by itself."""


def not_sent(model: ModelConfig) -> str:
    """Why the cache of a model is not sent from an instance to another; empty: it can be.

    >>> from stagewright.model.catalog import resolve
    >>> not_sent(resolve("mamba2-2.7b")), not_sent(resolve("llama3.1-8b"))
    ('layers of mamba2-2.7b keep states', '')
    """
    if model.state_space:
        return f"layers of {model.name} keep states"
    if model.o_groups:
        return f"{model.name} keeps compressed keys and states of unfinished ones"
    return ""


class _Pair(NamedTuple):
    """Bytes from one prefill rank to one decode rank."""

    fixed: float
    """Of windows, whatever the length."""
    per_token: float


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A request's cache on its way; a rank's link is shared by all its messages."""

    fixed: float
    """Bytes of all ranks whatever the length: windows."""
    per_token: float
    """Bytes of a token on all ranks."""
    links: tuple[_Pair, ...]
    """Of the ranks that send or receive most."""
    machines: tuple[Machine, ...]
    """Both sides' networks: the slower one counts."""
    level: int
    """The tier in which both sides meet, from the GPU outwards."""

    @classmethod
    def between(
        cls,
        prefill: Run,
        decode: Run,
        model: ModelConfig,
        hardware: tuple[Hardware, Hardware],
    ) -> Self:
        """From an instance that computes prompts to one that decodes, on nodes of their own.

        Runs are not resolved. Raises UserError where they cannot be had, and for models whose
        caches are not keys and values of single tokens.
        """
        why = not_sent(model)
        if why:
            raise UserError(
                f"instances for prompts only send keys and values, but {why}; compute prompts "
                "where they decode (without --prefill-instances or `serves`)"
            )
        first, second = (run.model_copy(update=_ALONE) for run in (prefill, decode))
        short, long = (_pairs(first, second, model, tokens) for tokens in _TOKENS)
        pairs = {key: _line(short[key], long[key]) for key in short}
        links: dict[tuple[int, int], _Pair] = {}
        for ends, pair in pairs.items():
            for side, rank in enumerate(ends):
                old = links.get((side, rank), _Pair(0.0, 0.0))
                links[side, rank] = _Pair(old.fixed + pair.fixed, old.per_token + pair.per_token)
        most = {max(links.values(), key=lambda link, n=n: link[n]) for n in (0, 1)}
        node = max(of.gpus_per_node for of in hardware)
        begins = -(-first.tp * first.pp // node) * node
        gpus = begins + -(-second.tp * second.pp // node) * node
        distinct = {of.name: of for of in hardware}
        machines = tuple(Machine.of(of, gpus=gpus) for of in distinct.values())
        level = int(tier_of(machines[0], np.array([0]), np.array([begins]))[0])
        return cls(
            sum(pair.fixed for pair in pairs.values()),
            sum(pair.per_token for pair in pairs.values()),
            tuple(sorted(most)), machines, level,
        )  # fmt: skip

    def beside(self, other: KvTransfer) -> KvTransfer:
        """The caches of two models of the same request, sent as one between the same instances."""
        links = {
            _Pair(a.fixed + b.fixed, a.per_token + b.per_token)
            for a in self.links
            for b in other.links
        }
        return replace(
            self,
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            links=tuple(sorted(links)),
        )

    def bytes(self, tokens: int, last: bool = True) -> int:
        """Bytes of so many tokens of a request, on all ranks.

        `last`: windows go with the last tokens of a prompt, so that they are sent once.
        """
        return round(self.fixed * last + self.per_token * tokens)

    def seconds(self, tokens: int, last: bool = True, *, parts: int = 1) -> float:
        """Seconds of `bytes` of so many tokens alone on the links, or of one of equal parts."""
        return max(
            message_seconds(
                round((link.fixed * last + link.per_token * tokens) / parts), self.level, machine
            )
            for link in self.links
            for machine in self.machines
        )


def _messages(
    first: Run, second: Run, model: ModelConfig, tokens: int
) -> tuple[tuple[Run, Run], list[Message]]:
    """Both sides' resolved runs, and the messages of one request with so many tokens."""
    new = 1 + second.num_speculative_tokens
    sides = (
        batch_run(first, [Group(1, 0, tokens)]).resolved(model),
        batch_run(second, [Group(1, tokens, new)]).resolved(model),
    )
    return sides, messages(*sides, model)


class TransferEnd(NamedTuple):
    """One end of a transfer."""

    run: Run
    """Of the instance; not resolved."""
    step: CompiledRun
    """A step of the instance."""
    replica: int


def cache_messages(
    prefill: TransferEnd, decode: TransferEnd, tokens: int, upto: int
) -> list[Message]:
    """What ranks that computed a request's prompt send those that decode it, by whole instances.

    Layers with windows send what they keep of `upto` tokens, the others so many `tokens`.
    """
    model, ends = decode.step.model, (prefill, decode)
    first, second = (of.run.model_copy(update=_ALONE) for of in ends)
    sides, found = _messages(first, second, model, tokens)
    if upto != tokens:
        windows = _messages(first, second, model, upto)[1] if upto else []
        reaches = [model.reach(model.layer(n).mixer) for n in range(model.num_layers)]
        local = {n for n, reach in enumerate(reaches) if reach.window or reach.chunk}
        found = [m for m in found if m.layer not in local]
        found += [m for m in windows if m.layer in local]
        found.sort(key=lambda message: message.layer)
    ranks = [
        in_replica(alone, of.step.run, model, of.replica)
        for alone, of in zip(sides, ends, strict=True)
    ]
    return [m._replace(source=ranks[0][m.source], target=ranks[1][m.target]) for m in found]


def _pairs(
    first: Run, second: Run, model: ModelConfig, tokens: int
) -> Mapping[tuple[int, int], int]:
    """Bytes by prefill rank and decode rank, for one request with so many tokens."""
    found: dict[tuple[int, int], int] = {}
    for one in _messages(first, second, model, tokens)[1]:
        key = one.source, one.target
        found[key] = found.get(key, 0) + one.size
    return found


def _line(short: int, long: int) -> _Pair:
    per_token = (long - short) / (_TOKENS[1] - _TOKENS[0])
    return _Pair(short - per_token * _TOKENS[0], per_token)
