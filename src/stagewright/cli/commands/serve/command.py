"""The command that serves requests over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import click

from stagewright.cli import shared
from stagewright.cli.help import Entry, command
from stagewright.cli.options import JSON, serving_options
from stagewright.cli.progress import shown
from stagewright.cli.writing import forced, output_file
from stagewright.errors import UserError
from stagewright.numbers import duration, plural, quantity

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.api.served import Serving
    from stagewright.serving.deployment import InstanceGroup
    from stagewright.texttable import Table


MOST_ROWS = 64
"""Engines that are printed one by one."""


@command
@serving_options
@output_file(
    "-o",
    "--out",
    multiple=True,
    help="Write the requests (.csv), numbers and requests (.json), or a page (.html); may be "
    "repeated.",
)
@output_file("--perfetto", forces=False, help="Write the run for ui.perfetto.dev.")
@click.option(
    "--compare",
    metavar="LOG",
    help="Serve the requests of a log (a trace with ttft, and e2e or latency), or those of a "
    "result of vLLM's, SGLang's or AIPerf's client, and print errors.",
)
@click.option(
    "--step-trace",
    nargs=2,
    metavar="S[:INSTANCE] DIR",
    help="Write the traces of the step that runs then, with caches on their way.",
)
@click.option(
    "--astra-sim",
    is_flag=True,
    help="With --step-trace: also write what ASTRA-sim needs to run the traces.",
)
@JSON
def serve(
    model: str | None,
    config: str | None,
    out: tuple[str, ...],
    perfetto: str | None,
    compare: str | None,
    step_trace: tuple[str, str] | None,
    astra_sim: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Serve requests over time: TTFT, TPOT, goodput, queues and use of the cache.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or an id
    of the hub that is in its local cache. Requests are a trace (--requests), arrive at a rate
    (--rate) or come from users who wait for their answers (--concurrency). Ctrl-C prints what is
    known so far.
    """
    from stagewright.api.endings import OF_SERVING, check_ending
    from stagewright.api.served import sections_of, served
    from stagewright.run.sections.serving import SERVING
    from stagewright.time.hardware import resolve

    for path in out:
        check_ending(path, OF_SERVING)
    if astra_sim and step_trace is None:
        raise UserError("--astra-sim is of traces; add --step-trace S DIR")
    seconds, instance = (0.0, 0) if step_trace is None else _step_asked(*step_trace)
    given = {name: value for name, value in settings.items() if value is not None}
    own = {name: given.pop(name) for name in [*given] if name in SERVING}
    if compare is not None:
        if "requests" in own:
            raise UserError("--compare and --requests both say which requests come; give one")
        own["requests"] = compare
    asked = sections_of(own)
    experiment = shared.load_experiment(model, config, given | {"mode": "decode"})
    if experiment.cluster.hardware is None:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    with shown("requests") as bar:
        hardware = resolve(experiment.cluster.hardware)
        result = served(experiment, hardware, asked, progress=bar, instance=instance)
    shared.show_notes(_notes(result))
    tables: dict[str, Table] = {}
    if compare is not None:
        tables["compared"] = result.compare(compare)
        tables["compared_rates"] = result.compare_rates(compare)
    if as_json:
        shared.print_json(result.values() | {name: table.rows for name, table in tables.items()})
    else:
        report(result, [table for table in tables.values() if len(table)], shared.console())
    if result.outcome.stopped:
        asked_for = (*out, perfetto, None if step_trace is None else step_trace[1])
        shared.show_notes([f"stopped: {path} was not written" for path in asked_for if path])
        return shared.INTERRUPTED
    for path in out:
        result.write(path)
    if perfetto is not None:
        result.perfetto(perfetto)
    if step_trace is not None:
        from stagewright.api.generated import generate

        step = result.step(seconds, instance=instance)
        machine = experiment.cluster.hardware if astra_sim else None
        if astra_sim and step.program.mesh.world_size != step.run.world_size:
            raise UserError(
                f"--astra-sim: at {seconds:g} s a cache is on its way between two instances, whose "
                "hardware is two machines; choose another moment"
            )
        written = generate(
            step, step_trace[1], cluster=experiment.cluster, force=forced(), astra_sim=machine
        )
        shared.show_notes(written.get("astra_sim", {}).get("notes", ()))
    return 0


def _step_asked(moment: str, directory: str) -> tuple[float, int]:
    """Second and instance of the step whose trace is wanted in a directory that may be written."""
    from stagewright.trace.staging import check_output

    found = _moment(moment)
    check_output(Path(directory), forced())
    return found


def _moment(text: str) -> tuple[float, int]:
    """`12.5:2` as seconds and the number of an instance."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?::([0-9]{1,9}))?", text.strip())
    if match is None:
        raise UserError(f"--step-trace: got {shortened(text)}, wanted seconds:instance, as 12.5:2")
    return float(match[1]), int(match[2] or 0)


def _notes(of: Serving) -> list[str]:
    """Notes on requests left out or cut short, and on assumptions."""
    found = of.summary
    left = plural(found.unfinished, "request was", "requests were")
    notes = [
        f"{plural(n, 'request', 'requests')} rejected: {why}" for why, n in found.rejected.items()
    ]
    if found.shortened:
        most = of.group.max_model_len
        notes.append(f"{plural(found.shortened, 'output', 'outputs')} cut at max_model_len {most}")
    notes += _about_drafts(of.group)
    notes += _about_constants(of)
    if of.outcome.stopped:
        notes.append(
            f"stopped: {left} not done; the numbers are of the others, and engines may have come "
            "to different moments"
        )
    elif found.unfinished:
        scheduler = of.group.scheduler
        pauses = getattr(scheduler, "capacity_scheduler_policy", "") == "max_utilization"
        whole = not getattr(scheduler, "enable_chunked_prefill", True)
        why = (
            "; TensorRT-LLM computes a paused request of more than "
            f"{of.group.limits.tokens:,} tokens again only with --enable-chunked-prefill"
        )
        notes.append(
            f"{left} never done: the scheduler left them waiting" + why * (pauses and whole)
        )
    return notes


def _about_constants(of: Serving) -> list[str]:
    """What is known of the errors of step times on this hardware."""
    from stagewright.views.deviations import ESTIMATED, SOURCE, is_estimated

    if any(is_estimated(group.instance.machine.hardware) for group in of.groups):
        return [f"{ESTIMATED} ({SOURCE})"]
    return []


def _about_drafts(of: InstanceGroup) -> list[str]:
    """Notes on assumptions about the drafter."""
    model, drafter = of.instance.model, of.instance.drafter
    if of.settings.speculative_method == "mtp":
        return [f"drafts come from a layer like the last one of {model.name}, used for each draft"]
    if of.drafts is None or drafter is not None or of.settings.speculative_method == "ngram":
        return []
    return ["drafts take no time; --speculative-method says who drafts"]


def report(of: Serving, compared: Sequence[Table], out: Console) -> None:
    """Print what came out, for people."""
    from stagewright.texttable import print_table

    found, group = of.summary, of.group
    out.print(of.describe())
    blocks = group.num_blocks
    size = group.instance.cache.block_size
    out.print(
        f"KV cache of an engine: {quantity(blocks * size, 'tokens')} ({blocks:,} blocks of {size});"
        f" a step: at most {group.limits.tokens:,} tokens, {group.limits.requests:,} requests"
    )
    out.print(
        f"{plural(found.requests, 'request', 'requests')} in {duration(found.seconds)}, "
        f"{found.measured_span}"
    )
    out.print(found.verdict, style="red" if found.steadiness.overloaded else None)
    out.print(
        f"throughput: {found.request_rate:,.2f} requests/s, "
        f"{found.output_rate:,.1f} output tokens/s, "
        f"{found.output_rate / found.gpus:,.1f} per GPU"
        + (f", {found.user_rate:,.1f} per user" if found.user_rate == found.user_rate else "")
    )
    print_table(of.latencies(), out)
    if limits := _limits(of):
        out.print(
            f"goodput: {found.goodput:,.2f} requests/s; {found.good:.1%} of requests keep {limits}"
            + (f"; {found.binding} binds" if found.binding and not found.classes else "")
        )
        if closest := of.closest():
            out.print(closest)
    if found.classes:
        print_table(of.classes(), out)
    if of.outcome.workload.predecessor is not None:
        out.print(
            f"interactivity: {of.interactivity:,.1f} tokens/s per user, end to end (1 / p90 of E2E "
            "per output token)"
        )
    out.print(
        f"queue: {found.mean_waiting:,.2f} requests wait and {found.mean_running:,.2f} run, on "
        f"average; {plural(found.preemptions, 'preemption', 'preemptions')}"
    )
    out.print(
        f"KV cache: {found.kv_mean:.1%} in use on average, {found.kv_peak:.1%} at most; "
        f"{found.hit_rate:.1%} of prompt tokens were in it"
    )
    spent = of.expense()
    usd = spent.usd_per_million_tokens
    cost = "" if usd is None else f"; {usd:,.4g} USD per million output tokens"
    out.print(
        f"power: {spent.watts_per_gpu:,.0f} W per GPU, {spent.joules_per_token:,.4g} J per output "
        f"token{cost}"
    )
    if 1 < len(of.outcome.engines) <= MOST_ROWS:
        print_table(of.engines(), out)
    for table in compared:
        print_table(table, out)


def _limits(of: Serving) -> str:
    """Latency limits in words; empty if there are none."""
    if any(each.limited for each in of.outcome.workload.classes):
        return "the limits of their class"
    limits = {"TTFT": of.slo.ttft, "TPOT": of.slo.tpot, "E2E": of.slo.e2e}
    return ", ".join(f"{name} <= {duration(s)}" for name, s in limits.items() if s is not None)


ENTRY = Entry(
    45,
    serve,
    (
        "stagewright serve llama3.1-8b --hardware h100-sxm --rate 10 --isl 1024 --osl 256",
        "stagewright serve llama3.1-70b --tp 4 --hardware h100-sxm --concurrency 32 --isl 2048 "
        "--osl 512 --num-requests 320 --ttft 500 --tpot 30",
    ),
)
