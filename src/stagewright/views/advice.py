"""Advice on a run, as remarks in words: memory that does not fit, waiting, errors that are known.

Each rule looks at one subject and gives remarks with their figures and remedies. The thresholds of
rules are named constants here: a matter of taste, which changes no number.

>>> from stagewright.lower.compile import compile
>>> from stagewright.run.settings import Run
>>> for remark in remarks(compile(Run(model="llama3-8b", pp=4, global_batch_size=8))):
...     print(remark)
warning: The pipeline: ranks are idle 27.3% of the step by the schedule alone: 8 microbatches \
pass through 4 stages. More microbatches (global_batch_size), virtual stages (vpp) or another \
schedule shorten the idle time.
warning: Balance: stage 3 computes 18% more FLOPs than the mean stage, and the others wait for it; \
layers_per_stage moves layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagewright.arrays import exact_sum
from stagewright.blocks.recipe import PRECISIONS
from stagewright.lower import weight_storage
from stagewright.lower.compiled_run import CompiledRun
from stagewright.lower.routing import POPULARITY_EXPONENT
from stagewright.model.config import ModelConfig
from stagewright.numbers import duration, plural, quantity, side_by_side, spans
from stagewright.program.columns import Program, RankClass
from stagewright.program.fit import NEARLY_FULL, Fit
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.schedule.actions import flat
from stagewright.schedule.play import bubble
from stagewright.time.hardware import names, resolve
from stagewright.time.network import Machine, placements
from stagewright.time.roofline import peak_flops
from stagewright.time.simulate.step import SimulatedStep
from stagewright.views.deviations import known
from stagewright.views.tables import stage_name

LEVELS = ("problem", "warning", "note")

MUCH_IDLE = 0.1
"""Share of the step in which ranks are idle."""
MUCH_EXPOSED = 0.1
"""Share of the step that communication along one axis is exposed."""
FASTEST_NIC = 100.0
"""GB/s of a ConnectX-8 SuperNIC, 800 Gb/s, which a B300 has (`stagewright hardware b300`)."""
NEARLY_BUSY = 0.75
"""Share of the step in which hidden communication occupies its network."""
LITTLE = 0.01
"""Share of the step below which no waiting explains a low MFU."""
LOW_MFU = 0.35
"""Llama 3 405B reached 38% to 43% on 8,192 and 16,384 H100 (arXiv 2407.21783, table 4)."""
MUCH_UNEVEN = 0.1
"""Work of the busiest rank or stage beyond that of the mean, as a share of the mean."""


class Remark(NamedTuple):
    """Severity, subject, and a sentence or two."""

    level: str
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.about}: {self.text}"


def remarks(compiled: CompiledRun, step: SimulatedStep | None = None) -> list[Remark]:
    """Remarks on a run, and on its simulation where there is one; the most severe come first."""
    fit, device = compiled.fit, "the device"
    if step is not None:
        fit, device = step.fit, step.machine.hardware.name
    all_remarks = [
        *(_memory(fit, compiled, device) if fit else ()),
        *(_crossings(compiled.program, step.machine) if step else ()),
        *(_rates(step.machine) if step else ()),
        *(_speed(step) if step else ()),
        *(_exposed(step) if step else ()),
        *_idle(compiled, step),
        *_stages(compiled),
        *_lost_gradients(compiled),
        *_experts(compiled),
        *_layers(compiled),
        *(Remark("note", "Precision", f"{text}.") for text in (step.notes if step else ())),
        *(Remark("note", "Accuracy", sentence) for sentence in (known(step) if step else ())),
    ]
    return sorted(all_remarks, key=lambda remark: LEVELS.index(remark.level))


def _lost_gradients(compiled: CompiledRun) -> Iterator[Remark]:
    """A remark on gradients that `torch.distributed.pipelining` of PyTorch 2.13 does not compute.

    `stage_backward_input` looks for the graph of the parameters, which are sharded then.
    """
    run = compiled.run
    fsdp = run.zero == 3 and run.fsdp_root_unit and run.pipeline_caches
    if not (_trains(run) and fsdp and run.reshard_after_forward):
        return
    if any(action.kind == "I" for steps in compiled.order for action in flat(steps)):
        yield Remark(
            "warning",
            "Gradients",
            f"with schedule={run.schedule}, PyTorch 2.13 loses gradients of weights that are "
            "sharded when their backward begins: its weight half skips them. Set "
            "reshard_after_forward=false, which torchtitan does with pp.",
        )


def _how_to_reduce(category: str, run: Run) -> str:
    """The settings that reduce a category of memory, as a sentence that begins with a blank."""
    sharded = {"optimizer": 1, "gradients": 2, "parameters": 3}
    if category in sharded:
        zero = sharded[category]
        if run.zero < zero and run.mode == "train":
            over = "dp" if run.dp > 1 else "dp, which is 1 here"
            return f" To reduce it: zero={zero}, which shards it over {over}, or larger tp or pp."
        return " To reduce it: larger tp or pp" + (" or dp." if run.zero else ".")
    if category == "activations" and run.mode == "train":
        return " To reduce it: recompute, larger tp with sequence_parallel, or larger cp."
    return ""


def _how_to_serve(compiled: CompiledRun, parts: Mapping[str, int]) -> str:
    """The settings of inference that reduce memory, as a sentence that begins with a blank."""
    run, most = compiled.run, compiled.capacity
    ways: list[str] = []
    if parts.get("kv_cache") and (most is None or most.requests):
        ways.append("fewer or shorter requests")
    if parts.get("kv_cache") and run.kv_cache_dtype != "fp8":
        ways.append("kv_cache_dtype=fp8")
    if (
        run.precision == "bf16"
        and run.weight_precision in (None, "bf16")
        and not _in_few_bits(compiled)
    ):
        ways.append("weight_precision=fp8 or nvfp4")
    ways.append("larger tp, pp or dcp" if parts.get("kv_cache") else "larger tp or pp")
    return f" To reduce memory: {_listed(ways)}."


def _in_few_bits(compiled: CompiledRun) -> bool:
    stored = weight_storage.checkpoint(compiled.run, compiled.model)
    return stored is not None and bool(stored.formats)


def _remedy(compiled: CompiledRun, parts: Mapping[str, int]) -> str:
    """The settings that reduce memory, as a sentence that begins with a blank."""
    if _trains(compiled.run):
        return _how_to_reduce(max(parts, key=lambda category: parts[category]), compiled.run)
    return _how_to_serve(compiled, parts)


def _memory(fit: Fit, compiled: CompiledRun, device: str) -> Iterator[Remark]:
    size, parts = fit.peak, fit.fullest.by_category
    stage = stage_name(compiled.program, fit.fullest.rank_class)
    held, room = side_by_side(size, fit.device_memory, "B")
    if not fit.fits:
        largest = max(parts, key=lambda k: parts[k])
        advice = _remedy(compiled, parts)
        most = compiled.capacity
        holds = f" {room} hold {most.requests:,} such requests." if most else ""
        others = ""
        if fit.num_classes > 1:
            others = f" ({fit.num_exceeding} of {fit.num_classes} groups of ranks are over)"
        verdict = (
            f"the run may fit all the same, as this is an upper bound without {fit.left_out}"
            if fit.left_out else "the run does not fit"
        )  # fmt: skip
        yield Remark(
            "problem" if fit.cannot_fit else "warning",
            "Memory",
            f"ranks of {stage} need {'up to ' * bool(fit.left_out)}{held}, but {device} has "
            f"{room}: {verdict}{others}. The largest part is {largest.replace('_', ' ')}, "
            f"{quantity(parts[largest], 'B')}.{advice}{holds}",
        )
    elif size > NEARLY_FULL * fit.device_memory:
        what = "tensors take"
        besides = "the context, workspaces of libraries and fragmentation need memory as well."
        if "allowance" in parts:
            what = "tensors and the allowance take"
            besides = "the allowance is all there is for context, workspaces and fragmentation."
        yield Remark(
            "warning",
            "Memory",
            f"{what} {held} of {room} on ranks of {stage}; {besides}{_remedy(compiled, parts)}",
        )


def _crossings(program: Program, machine: Machine) -> Iterator[Remark]:
    """Groups of tensor, context and expert parallelism that do not lie within the fast links."""
    if len(machine.tiers) < 2:
        return
    near, far = machine.tiers[0], machine.tiers[1]
    domain = "NVLink domain" if machine.hardware.vendor == "NVIDIA" else "scale-up domain"
    reported: set[str] = set()
    for slot in range(len(program.communicators)):
        first, *others = program.degrees_of(slot) or ((),)
        kind = next((k for k in ("tp", "cp", "ep", "etp") if k in first), "")
        if not kind or kind in reported or others:  # fused groups reduce gradients
            continue
        groups = program.members(slot, np.arange(program.group_count(slot), dtype=np.int64))
        crossing = [p for p in placements(machine, groups) if p.counts[0] < p.ranks]
        if crossing:
            reported.add(kind)
            ranks, near_ranks = crossing[0].ranks, crossing[0].counts[0]
            yield Remark(
                "note" if kind == "cp" else "warning",
                "Network",
                f"{kind}={ranks} crosses the {domain} of {near.size} GPUs: its groups lie in "
                f"{ranks // near_ranks} of them, {near_ranks} ranks in each, so that "
                f"its collectives pass the network, at {far.bandwidth_gb_s:.3g} GB/s for each GPU "
                f"instead of {near.bandwidth_gb_s:.3g} GB/s. {kind} of at most {near.size} can "
                "stay within it.",
            )


def _rates(machine: Machine) -> Iterator[Remark]:
    """A remark on a network between nodes that is faster than any NIC: bits given as bytes."""
    hardware = machine.hardware
    rate = hardware.scale_out.bandwidth_gb_s
    if len(machine.tiers) < 2 or rate <= FASTEST_NIC:
        return
    if hardware.name in names() and resolve(hardware.name).scale_out == hardware.scale_out:
        return  # of the package, with a source
    yield Remark(
        "warning",
        "Network",
        f"scale_out.bandwidth_gb_s is {rate:g} GB/s for each GPU, which is {8 * rate:,.0f} Gb/s; "
        f"a ConnectX-8 has {8 * FASTEST_NIC:.0f}. If {rate:g} is in Gb/s, write {rate / 8:g}.",
    )


_LARGER_KERNELS = " A larger micro_batch_size or lower tp makes kernels larger."
_SPEED_REMEDIES = {
    "waiting for the host's launches": (
        " launch_mode=compile or cuda_graph, or a larger micro_batch_size, saves launches."
    ),
    "recomputation": " {less} recomputes less, for more memory.",
}
"""Sentences by the largest loss; communication and the pipeline have remarks of their own."""


def _speed(step: SimulatedStep) -> Iterator[Remark]:
    run, hardware = step.compiled.run, step.machine.hardware
    if run.mode != "train":
        return
    product = PRECISIONS[run.precision].product
    in_bf16 = step.mfu * peak_flops(hardware, product) / peak_flops(hardware, "bf16")
    if in_bf16 >= LOW_MFU:
        return
    of_peak = "" if product == "bf16" else f" of the peak in {product}, {in_bf16:.1%} of bf16's"
    mean, seconds = step.mean, step.seconds
    parts = {f"{axis} communication": s for axis, s in mean.exposed.items()}
    parts["the pipeline's bubble and waiting"] = mean.bubble
    parts["waiting for the host's launches"] = mean.launches
    recomputed = mean.kernels.get("recompute", 0.0)
    if recomputed:
        parts["recomputation"] = recomputed
    largest = max(parts, key=lambda k: parts[k])
    kernels = sum(mean.kernels.values()) / seconds
    lost = f"most of the rest is lost to {largest}: {parts[largest] / seconds:.1%}"
    less = "recompute=none" if run.recompute == "selective" else "recompute=selective or none"
    remedy = _SPEED_REMEDIES.get(largest, "").format(less=less)
    if parts[largest] < LITTLE * seconds:
        lost, remedy = "kernels of this size do not reach the peak", _LARGER_KERNELS
    yield Remark(
        "warning",
        "Speed",
        f"MFU is {step.mfu:.1%}{of_peak}, which is low (large dense models reach 38% to 43% in "
        f"bf16: Llama 3, arXiv 2407.21783, table 4). Kernels run {kernels:.1%} of the step of the "
        f"mean GPU; {lost}.{remedy}",
    )


def _always(run: Run, execution: Execution) -> bool:
    return True


_REMEDIES: Sequence[tuple[str, str, Callable[[Run, Execution], bool]]] = (
    ("tp", "lower tp", _always),
    ("tp", "sequence_parallel", lambda run, _: not run.sequence_parallel and _trains(run)),
    (
        "tp", "overlap with matrix products (tp_comm_overlap)",
        lambda run, execution: bool(run.sequence_parallel) and not execution.tp_comm_overlap,
    ),
    ("cp", "lower cp", _always),
    (
        "cp", "a ring that overlaps with attention (cp_comm_type=p2p)",
        lambda run, _: run.cp_comm_type != "p2p",
    ),
    ("ep", "lower ep", _always),
    (
        "ep", "each token sent once to a rank (moe_flex_dispatcher)",
        lambda _, execution: not execution.moe_flex_dispatcher,
    ),
    (
        "ep", "overlap with another microbatch (overlap_moe_expert_parallel_comm)",
        lambda run, execution: (
            not execution.overlap_moe_expert_parallel_comm and _trains(run)
        ),
    ),
    ("dp", "overlap (no dp in no_overlap)", lambda _, execution: "dp" in execution.no_overlap),
    ("dp", "more tokens per step (global_batch_size)", lambda run, _: _trains(run)),
    (
        "dp", "gathering parameters in the forward pass (overlap_param_gather)",
        lambda run, execution: (
            run.zero in (1, 2) and _trains(run) and not execution.overlap_param_gather
        ),
    ),
    ("dp", "zero=1 or 2, which gathers weights once per step", lambda run, _: run.zero == 3),
    ("pp", "fewer stages (lower pp or vpp)", _always),
)  # fmt: skip
"""Changes that shorten exposed communication along an axis, and when they apply."""


def _trains(run: Run) -> bool:
    return run.mode == "train"


def _listed(words: Sequence[str]) -> str:
    """Alternatives as a phrase: `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def _exposed(step: SimulatedStep) -> Iterator[Remark]:
    run, execution = step.compiled.run, step.timeline.execution
    for label, seconds in step.mean.exposed.items():
        if seconds > MUCH_EXPOSED * step.seconds:
            axes = label.rpartition(" ")[2].split("+")  # without prefill or decode before them
            remedies = [
                remedy
                for axis, remedy, applies in _REMEDIES
                if axis in axes and applies(run, execution)
            ]
            yield Remark(
                "warning",
                "Communication",
                f"communication along {label} is exposed, not hidden by kernels, for "
                f"{duration(seconds)} of each step ({seconds / step.seconds:.1%})."
                + (f" To shorten it: {_listed(remedies)}." if remedies else ""),
            )
    for label, busy in step.mean.communication.items():
        nearly = NEARLY_BUSY * step.seconds < busy <= step.seconds  # more: several at a time
        if nearly and busy > 2 * step.mean.exposed.get(label, 0.0):
            share = busy / step.seconds
            yield Remark(
                "warning",
                "Communication",
                f"communication along {label} is hidden, but occupies its network for {share:.0%} "
                f"of the step: on a network slower by more than {1 - share:.0%} it "
                "determines the step. Compare layouts with less of it on such a network (--vary "
                "scale_out.bandwidth_fraction of a search).",
            )


def _idle(compiled: CompiledRun, step: SimulatedStep | None) -> Iterator[Remark]:
    run = compiled.run
    if run.pp < 2 or run.mode != "train":
        return
    idle = of_schedule = bubble(compiled.order)
    so = "by the schedule alone"
    if step is not None:
        idle, so = step.mean.bubble / step.seconds, "in the simulation"
    if idle <= MUCH_IDLE:
        return
    if idle > 2 * of_schedule:
        reason = (
            f", {of_schedule:.1%} by the schedule if all stages took equal time: the rest is "
            "waiting for stages that take longer, such as that of the head, and for messages. "
            "layers_per_stage and last_stage_less_layers move layers (--space stages of a search "
            "tries them)."
        )
    else:
        stages = plural(run.virtual_stages, "stage", "stages")
        reason = (
            f": {run.microbatches} microbatches pass through {stages}. More microbatches "
            "(global_batch_size), virtual stages (vpp) or another schedule shorten the idle time."
        )
    yield Remark("warning", "The pipeline", f"ranks are idle {idle:.1%} of the step {so}{reason}")


def _work(of: RankClass) -> int:
    return exact_sum(of.tasks.flops)


def _mean(work: Sequence[tuple[int, int]]) -> float:
    """The mean work of a rank, from pairs of the work of each rank and the number of ranks."""
    return sum(of_rank * ranks for of_rank, ranks in work) / sum(ranks for _, ranks in work)


def _stages(compiled: CompiledRun) -> Iterator[Remark]:
    """A remark if one stage computes much more than the mean: it sets the pace of the pipeline."""
    work: dict[int, list[tuple[int, int]]] = {}
    for of in compiled.program.classes:
        work.setdefault(of.pipeline_rank, []).append((_work(of), len(of.ranks)))
    mean = {stage: _mean(of_stage) for stage, of_stage in work.items()}
    if len(mean) < 2 or compiled.run.prefill is not None:
        return
    overall = sum(mean.values()) / len(mean)
    busiest = max(mean, key=lambda stage: mean[stage])
    if overall and mean[busiest] > (1 + MUCH_UNEVEN) * overall:
        yield Remark(
            "warning",
            "Balance",
            f"stage {busiest} computes {mean[busiest] / overall - 1:.0%} more FLOPs than the mean "
            "stage, and the others wait for it; layers_per_stage moves layers.",
        )


def _fewer_is_busiest(compiled: CompiledRun) -> bool:
    """True if a rank with fewer layers than others computes, or reads and writes, the most."""
    classes = compiled.program.classes
    layers = [len(np.unique(of.tasks.layer[of.tasks.layer >= 0])) for of in classes]
    by_flops = [_work(of) for of in classes]
    by_traffic = [exact_sum(of.tasks.traffic) for of in classes]
    measures = [by_flops] if compiled.run.mode == "train" else [by_flops, by_traffic]
    return any(layers[work.index(max(work))] < max(layers) for work in measures)


def _assumed_load(run: Run, model: ModelConfig) -> str:
    """Tokens that experts are assumed to get, in words."""
    if run.mode == "train":
        return (
            "every expert is assumed to get the same number of tokens, as where a benchmark forces "
            "its router to balance (Megatron-LM's --moe-router-force-load-balancing). Where "
            "nothing balances ranks, the busiest was measured to get 1.3 to 4 times the mean "
            "(arXiv 2606.04101): expert_load=1.3, or a file of loads, and that rank sets the pace."
        )
    if run.num_redundant_experts or model.top_k == model.num_experts:
        return (
            "every rank is assumed to get the same number of tokens, since redundant experts, or a "
            "router that chooses all, even out the load."
        )
    ratio = model.num_experts**POPULARITY_EXPONENT
    return (
        f"the most popular expert is assumed to get {ratio:.0f} times the tokens of the least, as "
        "fitted to published servers, and the busiest rank sets the pace; expert_load=1 is even."
    )


def _experts(compiled: CompiledRun) -> Iterator[Remark]:
    run, model = compiled.run, compiled.model
    if not model.num_experts:
        return
    if compiled.load is None:
        if run.ep > 1 and run.expert_load is None:
            yield Remark("note", "Experts", _assumed_load(run, model))
        return
    by_stage = itertools.groupby(compiled.program.classes, key=lambda of: of.pipeline_rank)
    worst, where = 0.0, 0
    for stage, classes in by_stage:
        work = [(_work(of), len(of.ranks)) for of in classes]
        mean = _mean(work)
        most = max(of_rank for of_rank, _ in work)
        if mean and most / mean > worst:
            worst, where = most / mean, stage
    if worst > 1 + MUCH_UNEVEN:
        yield Remark(
            "warning",
            "Experts",
            f"loads are uneven: the busiest rank of stage {where} computes {worst - 1:.0%} more "
            "FLOPs than the stage's mean rank, and the others wait in each all-to-all. A router "
            "that balances loads, or lower ep, evens them.",
        )


def _layers(compiled: CompiledRun) -> Iterator[Remark]:
    """A remark if stages differ in their number of layers, unless one with fewer is the busiest.

    The output projection and the loss lie in the last stage, which fewer layers make up for.
    """
    counts = compiled.run.layers_per_stage
    if counts and min(counts) < max(counts) and not _fewer_is_busiest(compiled):
        fewer = [stage for stage, count in enumerate(counts) if count < max(counts)]
        yield Remark(
            "note",
            "Balance",
            f"stages hold {min(counts)} to {max(counts)} layers; fewer than the most: "
            f"stage{'s' * (len(fewer) > 1)} {spans(fewer)}.",
        )
