"""Steps of a pipeline in which prompts are computed beside requests that decode, in one call."""

from __future__ import annotations

from stagewright.serving.engines.times import StepSeconds
from stagewright.serving.hosts import HostTimes
from stagewright.serving.steps.plain import PlainTable, ways_by_count
from stagewright.serving.steps.terms import Attention


def through_pipeline(
    steps: PlainTable, host: HostTimes | None, otherwise: StepSeconds
) -> StepSeconds:
    """Seconds of a step with prompts and what the engine's host adds, for a pipeline.

    It is `StepTimes._general` where the only term is attention to everything, of sums alone, and a
    request that decodes has one token: the event loop calls it for every step with prompts. Ranks
    with equal tables are looked at once. Anything else, and steps of more tokens than tables have,
    are asked for `otherwise`.
    """
    host = host or HostTimes()
    if not steps.of_sums or len(steps.terms) != 1 or (steps.new, steps.logits) != (1, 1):
        return otherwise
    (of,) = steps.terms
    if not isinstance(of, Attention):
        return otherwise
    every = [([*ways_by_count(rank.ways).items()], rank.head) for rank in steps.ranks]
    ranks = [rank for nth, rank in enumerate(every) if rank not in every[:nth]]
    place = [ranks.index(rank) for rank in every]
    most_tokens = min(len(seconds) for ways, _ in ranks for _, seconds in ways)
    most_logits = min(len(head) for _, head in ranks)
    messages = [*map(sum, zip(*(rank.message for rank in steps.ranks), strict=True))]
    behind, pipeline = not host.beside, len(every)

    def seconds_of(tokens: int, value: float, logits: int) -> list[float]:
        """By distinct rank, of a batch whose term takes so long."""
        found: list[float] = []
        for ways, head in ranks:
            most = 0.0
            for count, seconds in ways:
                way = seconds[tokens] + count * value
                if way > most:
                    most = way
            found.append(most + head[logits])
        return found

    def step_seconds(
        tokens: int, pairs: int, keys: int, requests: int, decoding: int, decoding_keys: int
    ) -> float:
        batches = min(pipeline, requests)
        rest, part = 1 - 1 / batches, decoding / batches
        part_keys = decoding_keys / batches
        full = tokens - decoding * rest
        rows = round(part)
        logits = max(1, requests - decoding + rows)
        whole = int(full)
        if not decoding or whole >= most_tokens or logits >= most_logits:
            return otherwise(tokens, pairs, keys, requests, decoding, decoding_keys)
        few = seconds_of(int(part), of(part, part, part_keys, part_keys), max(1, rows))
        full_pairs = max(pairs - part_keys * (batches - 1), 1.0)
        full_requests = requests - decoding * rest
        value = of(full, full_requests, full_pairs, keys - decoding_keys * rest)
        much = seconds_of(whole, value, logits)
        found = sum([much[nth] for nth in place]) + messages[whole]
        for a, b in zip(much, few, strict=True):
            found = max(found, a + (batches - 1) * b)
        launched = host.step(requests)
        return found + launched if behind else max(found, launched)

    return step_seconds
