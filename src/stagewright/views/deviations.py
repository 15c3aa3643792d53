"""Where predictions of time are known to be off, and by how much: a table, a row for each.

Each row says for which simulated steps it holds, and what was measured; its figures are those of
`accuracy.expected`. Text, JSON and the page show the rows of a step beside its time, after the
errors of all steps like it, as notes of `advice.remarks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.host import HOSTS
from stagewright.time.hardware import Hardware
from stagewright.time.simulate.launches import launch_mode
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.accuracy import error_of_step, errors_of_serving, expected

SOURCE = "docs/accuracy/limits.md"
"""The page that has the figures, with the rows that they are of."""

FEW_TOKENS = 1024
"""Tokens of a microbatch on a rank of tp and cp, below which the host limits steps."""
MUCH_LAUNCHING = 0.02
"""The share of a step from which on the host limits it."""
RACK = 72
"""GPUs of an NVL72 rack."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A condition on a simulated step, and what is known of the error of such steps."""

    holds: Callable[[SimulatedStep], bool]
    text: str
    """Names an answer of `accuracy.expected` as `{e[ANSWER]}`."""

    @property
    def sentence(self) -> str:
        """The text with its figures."""
        return self.text.format(e=expected())


ESTIMATED = (
    "Constants of hardware of AMD, Google, Intel and AWS are estimates but for the peaks, and for "
    "the kernels of MI300X and MI355X."
)
"""Note on a step, or on serving, on hardware without measured constants."""


def is_estimated(hardware: Hardware) -> bool:
    """True if constants of the hardware besides its peaks were not measured."""
    return hardware.vendor != "NVIDIA"


def known(step: SimulatedStep) -> Iterator[str]:
    """The errors to expect of a simulated step, and the sentences that hold for it."""
    yield error_of_step(step).sentence
    yield from known_deviations(step)


def known_deviations(step: SimulatedStep) -> Iterator[str]:
    """The sentences that hold for a simulated step, each with its source."""
    for row in DEVIATIONS:
        if row.holds(step):
            yield f"{row.sentence} ({SOURCE})"


def known_of_serving(groups: Sequence[InstanceGroup]) -> Iterator[str]:
    """The errors to expect of requests served over time, and what was never measured."""
    yield from (errors.sentence for errors in errors_of_serving(groups))
    if any(group.role == "prefill" for group in groups):
        yield (
            "Separate prefill and decode instances were never compared with a measurement. "
            f"({SOURCE})"
        )
    if any(is_estimated(group.instance.machine.hardware) for group in groups):
        yield f"{ESTIMATED} ({SOURCE})"


# ---- conditions ----------------------------------------------------------------------------------


def _trains(step: SimulatedStep) -> bool:
    return step.compiled.run.mode == "train"


def _decodes(step: SimulatedStep) -> bool:
    return step.compiled.run.mode == "decode"


def _experts(step: SimulatedStep) -> bool:
    return step.compiled.model.num_experts > 0


def _blackwell(step: SimulatedStep) -> bool:
    hardware = step.machine.hardware
    return hardware.vendor == "NVIDIA" and hardware.peak_fp4_tflops is not None


def _fp4_weights(step: SimulatedStep) -> bool:
    return step.compiled.run.weight_precision in ("fp4", "nvfp4")


def _tensor_ranks(step: SimulatedStep) -> int:
    run = step.compiled.run
    prefill = run.prefill_ranks
    return max(run.tp, prefill.tp if prefill else 1)


def _several_racks(step: SimulatedStep) -> bool:
    near = step.machine.tiers[0]
    return near.size == RACK and step.machine.gpus > near.size


def _tokens_of_a_microbatch(step: SimulatedStep) -> float:
    run = step.compiled.run
    return run.micro_batch_size * (run.seq_length or 0) / (run.tp * run.cp)


# ---- the table -----------------------------------------------------------------------------------

_HOST_OF_REQUESTS = ", ".join(
    f"{host.per_request * 1e3:g} ms in {engine}" for engine, host in HOSTS.items()
)
DEVIATIONS = (
    Deviation(
        lambda step: _experts(step) and step.compiled.run.ep > 1 and _several_racks(step),
        "All-reduces of 0.5 to 2 GB over twenty NVL72 racks are predicted {e[racks].fast:.0%} "
        "fast, larger ones are not; all-to-alls over racks have no published measurement.",
    ),
    Deviation(
        lambda step: (
            _trains(step)
            and launch_mode(step.compiled.run, step.timeline.execution, step.machine.hardware)
            == "eager"
            and _tokens_of_a_microbatch(step) <= FEW_TOKENS
            and step.mean.launches > MUCH_LAUNCHING * step.seconds
        ),
        "Microbatches of at most 1,024 tokens on a rank of tp are off by "
        "{e[host-limited].error:.0%} on one to eight nodes of nanotron, whose host launches "
        "kernels one by one; hosts of others differ.",
    ),
    Deviation(
        lambda step: (
            _trains(step)
            and not _experts(step)
            and _blackwell(step)
            and step.machine.tiers[0].size <= 8
            and step.compiled.run.precision == "bf16"
        ),
        "Published steps of dense models on B200 in bf16 are of one machine: off by "
        "{e[b200].error:.0%}, and {e[b200-short].fast:.0%} fast where eight ranks of tp leave "
        "kernels of few microseconds.",
    ),
    Deviation(
        lambda step: _trains(step) and step.compiled.model.attention_sinks,
        "Steps of gpt-oss are predicted {e[sinks].fast:.0%} fast on average: Megatron-LM clamps "
        "its experts' values by operators of their own, whose time is not predicted.",
    ),
    Deviation(
        lambda step: _decodes(step) and _experts(step) and _fp4_weights(step),
        "Times per output token of experts in nvfp4 are off by {e[nvfp4-experts].median:.0%} in "
        "the median; checkpoints that keep attention in bf16 take other kernels than this format.",
    ),
    Deviation(
        lambda step: not _trains(step) and not _decodes(step),
        "Measured times to the first token are longer by what the engine's host takes for a "
        f"request ({_HOST_OF_REQUESTS}) and by its wait; `stagewright serve` has both.",
    ),
    Deviation(
        lambda step: (
            _trains(step)
            and step.compiled.run.zero == 3
            and step.machine.hardware.peak_fp8_tflops is None
            and len(step.machine.tiers) > 1
        ),
        "Six rows of DeepSpeed's ZeRO-3 on A100 are predicted {e[zero3].fast:.0%} fast: what that "
        "run reached of the network is not stated.",
    ),
    Deviation(
        lambda step: step.timeline.execution.tp_comm_overlap and _tensor_ranks(step) > 1,
        "The gain of overlapping tp's collectives, of four pairs of torchtitan's runs, is off by "
        "{e[overlap].error:.0%} of the step on average.",
    ),
    Deviation(
        lambda step: step.timeline.execution.moe_flex_dispatcher,
        "Tokens that are sent once to each rank arrive within 12% of the tables of DeepEP and "
        "HybridEP on H100; over two nodes, DeepEP's first version is predicted 22% fast.",
    ),
    Deviation(
        lambda step: is_estimated(step.machine.hardware),
        ESTIMATED,
    ),
)
