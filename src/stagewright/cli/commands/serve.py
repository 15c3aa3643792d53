"""The command that serves requests over time."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import click

from stagewright.cli import output, runs
from stagewright.cli.command import command
from stagewright.cli.options import FORCE, JSON, forced, output_file, serving_options
from stagewright.cli.progress import shown
from stagewright.errors import UserError


@command(
    45,
    "stagewright serve llama3.1-8b --hardware h100-sxm --rate 10 --isl 1024 --osl 256",
    "stagewright serve llama3.1-70b --tp 4 --hardware h100-sxm --concurrency 32 --isl 2048 "
    "--osl 512 --num-requests 320 --ttft 500 --tpot 30",
)
@serving_options
@output_file(
    "-o",
    "--out",
    multiple=True,
    help="Write the requests (.csv), numbers and requests (.json), or a page (.html); may be "
    "repeated.",
)
@output_file("--perfetto", help="Write the run for ui.perfetto.dev.")
@FORCE
@click.option(
    "--compare",
    metavar="LOG",
    help="Serve the requests of a log (a trace with ttft, and e2e or latency; or a result of "
    "vLLM's, SGLang's or AIPerf's client), and print errors.",
)
@click.option(
    "--step-trace",
    nargs=2,
    metavar="S[:INSTANCE] DIR",
    help="Write the traces of the step that runs at a second, with caches in transfer.",
)
@click.option(
    "--astra-sim",
    is_flag=True,
    help="With --step-trace: also write the files with which ASTRA-sim runs the traces.",
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
    of the hub in its local cache. Requests are a trace (--requests), arrive at a rate (--rate) or
    come from users who wait for their answers (--concurrency). `--as vllm`, sglang or trtllm prints
    the engine's command line, too. Ctrl-C prints the results so far.
    """
    from stagewright.api.experiments import with_launch_file
    from stagewright.api.result import OF_SERVING, check_suffix
    from stagewright.api.served import ServingSections, served
    from stagewright.files import replaced_together
    from stagewright.launch import files
    from stagewright.run.files import launched
    from stagewright.run.sections.serving import SERVING
    from stagewright.serving.command_lines import check_engine
    from stagewright.serving.schedulers.named import ENGINES
    from stagewright.time.hardware import resolve
    from stagewright.trace.staging import check_output

    for path in out:
        check_suffix(path, OF_SERVING)
    if astra_sim and step_trace is None:
        raise UserError("--astra-sim is of traces; add --step-trace S DIR")
    seconds, instance = 0.0, 0
    if step_trace is not None:
        seconds, instance = _time_and_instance(step_trace[0])
        check_output(Path(step_trace[1]), forced())
    if engine := runs.tool_of(model, settings["as_family"], ENGINES):
        settings["as_family"] = None
    given = {name: value for name, value in settings.items() if value is not None}
    named = given if model is None else {"model": model} | given
    script, own = launched(config, named)
    if files.find(script or ""):
        model, given = with_launch_file(script, own, serves=True)
        model, config = given.pop("model", model), None
    of_serving = {name: given.pop(name) for name in [*given] if name in SERVING}
    if compare is not None:
        if "requests" in of_serving:
            raise UserError("--compare and --requests both say which requests come; give one")
        of_serving["requests"] = compare
    sections = ServingSections.of(of_serving)
    if engine:
        check_engine(engine, [sections.engines.scheduler])
    # The mode stands for inference here: that of each step follows from its batch.
    experiment = runs.load_experiment(model, config, given | {"mode": "decode"})
    hardware = runs.hardware_of(experiment)
    with shown("requests") as bar:
        result = served(experiment, resolve(hardware), sections, progress=bar, instance=instance)
    output.show_notes(result.notes())
    lines = {} if engine is None else {"flags": result.commands(engine)}
    names = () if compare is None else ("compared", "compared_rates")
    tables = {name: result.table(name, log=compare) for name in names}
    if as_json:
        rows = {name: table.rows for name, table in tables.items()}
        output.print_json(result.to_dict() | rows | lines)
    else:
        alarm = result.summary.verdict if result.summary.steadiness.overloaded else ""
        texts = [*result.text(), *filter(len, tables.values())]
        output.print_result(lambda: texts, alarm, to_stderr=engine is not None)
        output.print_texts(lines.values())
    if result.outcome.stopped:
        unwritten = (*out, perfetto, None if step_trace is None else step_trace[1])
        output.show_notes([f"stopped: {path} was not written" for path in unwritten if path])
        return runs.INTERRUPTED
    with replaced_together():
        for path in out:
            replace(result, log=compare).write(path)
        if perfetto is not None:
            result.perfetto(perfetto)
    if step_trace is None:
        return 0
    from stagewright.api.generated import generate

    step = result.step(seconds, instance=instance)
    if astra_sim and step.program.mesh.world_size != step.run.world_size:
        raise UserError(
            f"--astra-sim: at {seconds:g} s a cache is on its way between two instances, whose "
            "hardware is two machines; choose another time"
        )
    written = generate(
        step,
        step_trace[1],
        cluster=experiment.cluster,
        force=forced(),
        astra_sim=hardware if astra_sim else None,
    )
    output.show_notes(written.get("astra_sim", {}).get("notes", ()))
    return 0


def _time_and_instance(text: str) -> tuple[float, int]:
    """`12.5:2` as seconds and the number of an instance."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?::([0-9]{1,9}))?", text.strip())
    if match is None:
        raise UserError(f"--step-trace: got {shortened(text)}, wanted seconds:instance, as 12.5:2")
    return float(match[1]), int(match[2] or 0)
