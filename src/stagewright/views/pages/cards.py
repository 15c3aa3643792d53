"""What a page says first: whether the run fits, and its key figures."""

from __future__ import annotations

from typing import NamedTuple

from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import count, duration, plural, quantity
from stagewright.program.fit import Fit
from stagewright.time.simulate.serving import Served, ServingGroup
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.pages.charts import peaks


class Card(NamedTuple):
    """A key figure: its name, its value, and a line below in small letters."""

    name: str
    value: str
    more: str = ""
    state: str = ""
    """`problem`: the figure is why the run does not fit; `moot`: it is of a run that does not."""


def fit_shown(compiled: CompiledRun, found: SimulatedStep | None) -> Fit | None:
    """Whether the run fits into a device; None where nothing says which device it is."""
    return compiled.fit if found is None else found.fit


def heading(compiled: CompiledRun, found: SimulatedStep | None) -> str:
    """The model and the machine, and that the run does not fit where it does not."""
    world = compiled.program.mesh.world_size
    where = plural(world, "rank", "ranks") if world < 1000 else f"{world:,} ranks"
    if found:
        where = f"{world:,} x {found.machine.hardware.name}"
    fit = fit_shown(compiled, found)
    if fit is not None and not fit.fits:
        return f"{compiled.model.name} does not fit on {where}"
    return f"{compiled.model.name} on {where}"


def cards(compiled: CompiledRun, found: SimulatedStep | None) -> list[Card]:
    """The key figures; those of a run that does not fit are moot, memory comes first."""
    fit = fit_shown(compiled, found)
    fits = fit is None or fit.fits
    peak = max(sum(parts.values()) for _, parts in peaks(compiled, found))
    beside = "on the fullest rank" if fit is None else f"of {quantity(fit.device_memory, 'B')}"
    state = "" if fits else "problem"
    memory = Card("Peak memory per GPU", quantity(peak, "B"), beside, state)
    active = compiled.active_parameters
    few = f"{count(active)} active per token" if active != compiled.parameters else ""
    if compiled.trained:
        few = f"{count(compiled.trained.trainable)} of them, or of adapters, train"
    size = Card("Parameters", count(compiled.parameters), few)
    others = _timed(compiled, found) if found else _asked(compiled)
    if fits:
        return [size, memory, *others]
    return [memory, size, *(card._replace(state="moot") for card in others)]


def _asked(compiled: CompiledRun) -> list[Card]:
    run = compiled.run
    if run.mode != "train":
        return []
    many = plural(run.microbatches, "microbatch per rank", "microbatches per rank")
    return [Card("Global batch size", f"{run.global_batch_size:,}", many)]


def _served(of: Served) -> list[Card]:
    """The figures of a step of inference, in the words of serving."""
    if of.ttft_seconds is not None:
        return [
            Card("TTFT", duration(of.ttft_seconds), f"{of.requests:,} prompts of {of.isl:,.0f}"),
            Card(
                "Throughput",
                _rate(of.input_tokens_per_second),
                f"input tokens/s; {_rate(of.tokens_per_second_per_gpu)} per GPU",
            ),
        ]
    shown: list[Card] = []
    if of.tpot_seconds is not None and of.output_tokens_per_second_per_user is not None:
        user = f"{_rate(of.output_tokens_per_second_per_user)} tokens/s per user"
        shown.append(Card("TPOT", duration(of.tpot_seconds), user))
    shown.append(
        Card(
            "Throughput",
            _rate(of.output_tokens_per_second),
            f"output tokens/s; {_rate(of.tokens_per_second_per_gpu)} per GPU",
        )
    )
    if of.requests_per_second is not None:
        shown.append(Card("Requests", f"{of.requests_per_second:.3g}/s", f"OSL {of.osl:,}"))
    return shown


def _of_group(group: ServingGroup) -> list[Card]:
    """The figures of one of the two groups of a disaggregated step, by itself."""
    name = group.name.capitalize()
    gpus = plural(group.gpus, "GPU", "GPUs")
    first, *others = _served(group.served)
    first = first._replace(more=f"{first.more}; {gpus}")
    return [card._replace(name=f"{name}: {card.name}") for card in (first, *others)]


def _rate(per_second: float) -> str:
    return count(round(per_second)) if per_second >= 100 else f"{per_second:.3g}"


def _timed(compiled: CompiledRun, found: SimulatedStep) -> list[Card]:
    if found.served is not None:
        shown = _served(found.served)
    elif found.groups:
        # HFU and cost of both in turn are of no server, which runs the groups side by side.
        return [card for group in found.groups for card in _of_group(group)]
    else:
        rate = found.tokens_per_second
        shown = [
            Card("Step time", duration(found.seconds), f"{found.tokens:,} tokens"),
            Card(
                "Throughput", _rate(rate), f"tokens/s; {_rate(rate / found.machine.gpus)} per GPU"
            ),
        ]
    if compiled.run.mode == "train":
        shown.append(Card("MFU", f"{found.mfu:.1%}", f"causal attention {found.mfu_causal:.1%}"))
    causal = f"causal attention {found.hfu_causal:.1%}"
    counted = causal if compiled.run.mode == "train" else "of FLOPs that kernels execute"
    shown.append(Card("HFU", f"{found.hfu:.1%}", counted))
    asked = found.cluster.price if found.cluster else None
    spent = found.expense(asked)
    if spent.usd_per_million_tokens is not None:
        price = asked if asked is not None else found.machine.hardware.price_usd_per_gpu_hour
        shown.append(
            Card(
                "Cost",
                f"{spent.usd_per_million_tokens:.3g} USD",
                f"per million tokens, at {price:g} USD per GPU-hour",
            )
        )
    return [*shown, Card("Energy", f"{spent.joules_per_token:.3g} J", "per token")]
