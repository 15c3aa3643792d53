"""The command that writes a PyTorch module as the text of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.option_types import WholeNumber
from stagewright.cli.options import FORCE, check_output, forced, output_file
from stagewright.errors import UserError

if TYPE_CHECKING:
    from stagewright.imports.recording import Recording


@command(
    28,
    "stagewright import model.py:factory -o model.stg",
    "stagewright import exported.pt2 -o model.stg --approximate",
    "stagewright import trace.json.gz --step 6 -o chakra",
    name="import",
)
@click.argument("source", metavar="FILE.py:FACTORY")
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="FILE",
    help="The file to write: FILE.stg for a module, FILE.bundle for the graph of one rank; for "
    "traces of the profiler a directory.",
)
@FORCE
@click.option("--static", is_flag=True, help="Keep the example's sizes, all but the batch.")
@click.option(
    "--dims",
    multiple=True,
    metavar="INPUT=B,S",
    help="Names of an input's dims, where more dims than batch (B) and sequence (S) vary; "
    "repeatable.",
)
@click.option(
    "--approximate",
    is_flag=True,
    help="Count unknown operations by the bytes that they read and write.",
)
@click.option(
    "--loss/--no-loss",
    default=None,
    help="Add the cross-entropy of the output. [if the output is a product with a parameter]",
)
@output_file(
    "--recording",
    help="Also write the traced graph, as FILE.json; import reads it in place of FACTORY, without "
    "PyTorch.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Load a .pt2 file that holds more than a graph and tensors. Loading it may run commands "
    "of its author.",
)
@click.option("--step", type=WholeNumber(0), metavar="N", help="Of a trace: only ProfilerStep#N.")
@click.option("--annotation", metavar="NAME", help="Of a trace: only this record_function.")
def import_(
    source: str,
    out: str,
    static: bool,
    dims: tuple[str, ...],
    approximate: bool,
    loss: bool | None,
    recording: str | None,
    trust: bool,
    step: int | None,
    annotation: str | None,
) -> None:
    """Write a PyTorch module as a model in text, which any command takes as MODEL.

    FACTORY is a function of FILE.py that returns an nn.Module and its example inputs; both may be
    on the meta device. In place of FILE.py:FACTORY may stand a program saved with torch.export.save
    (.pt2), a recording that --recording has written (.json), or hf:path/to/config.json, whose
    model transformers builds. FACTORY may also return an FX graph that was traced under a process
    group (and its DeviceMesh, if there is one): the graph of one rank, which is written as a bundle
    that show, simulate, diff and expand read. FILE.py runs as any Python file. A .pt2 file is a
    program too: import reads its graph and tensors only, and refuses files that need more unless
    --trust is given. Needs PyTorch, except for recordings and traces: pip install
    'stagewright[torch]'.

    A trace of PyTorch's profiler (Kineto's JSON; an archive or a folder of these, one per rank) is
    written as a directory of Chakra traces, a file per rank, with measured durations.
    """
    from stagewright.files import write_text
    from stagewright.imports.sources import model_of, recorded
    from stagewright.imports.translate import translate
    from stagewright.recorded.read import is_trace

    if is_trace(source):
        _write_trace(source, out, step, annotation)
        return
    if step is not None or annotation is not None:
        raise UserError(
            f"{source}: is no trace of PyTorch's profiler; drop --step and --annotation"
        )
    check_output(out, {})
    if not out.endswith((".stg", ".bundle")):
        raise UserError(f"--out is {out!r}, expected a file that ends with .stg or .bundle")
    traced = recorded(source, static=static, trust=trust)
    if recording:
        write_text(recording, traced.to_json())
    if traced.process is not None or out.endswith(".bundle"):
        _write_rank(traced, out)
        return
    translated = translate(traced, _parse_dims(dims), approximate=approximate, loss=loss)
    model = model_of(translated, traced.name)
    write_text(out, translated.text)
    for note in translated.notes:
        output.say(f"note: {note}")
    modules = ", ".join(model.chain)
    output.say(f"{out}: {translated.parameters:,} parameters; {modules}")


def _parse_dims(dims: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names of dims, by input."""
    names_of: dict[str, tuple[str, ...]] = {}
    for text in dims:
        name, equals, words = text.partition("=")
        names = tuple(word.strip() for word in words.split(","))
        if not equals or not name or not all(word.isidentifier() for word in names):
            raise UserError(f"--dims is {text!r}, wanted INPUT=NAME,NAME, such as ids=B,S")
        names_of[name.strip()] = names
    return names_of


def _write_rank(traced: Recording, out: str) -> None:
    """Write the program of the rank whose graph was recorded."""
    from stagewright.trace.traced_bundle import write_traced

    if not out.endswith(".bundle"):
        raise UserError(
            f"--out is {out!r}, but {traced.name} is the graph of one rank: wanted a file that "
            "ends with .bundle"
        )
    program = write_traced(traced, out, force=True)
    (rank,) = program.classes
    axes = ", ".join(f"{name} {size}" for name, size in program.mesh.axes)
    output.say(
        f"{out}: {len(rank.tasks):,} tasks of each of {program.mesh.world_size} ranks ({axes}); "
        f"{traced.parameters:,} parameters on a rank"
    )


def _write_trace(source: str, out: str, step: int | None, annotation: str | None) -> None:
    """Write a recorded step as Chakra traces."""
    from stagewright.numbers import plural
    from stagewright.recorded.read import read_traces
    from stagewright.recorded.to_program import program_of
    from stagewright.time.astra_sim import BYTES_PER_NS, with_least_bytes
    from stagewright.trace.write import write

    if step is not None and annotation is not None:
        raise UserError("both --step and --annotation are given; wanted one of them")
    traces = read_traces([source], step, annotation)
    program, notes = program_of(traces)
    program = with_least_bytes(program, BYTES_PER_NS)  # else a first kernel takes no time there
    origin = {"files": [trace.path for trace in traces], "step": step, "annotation": annotation}
    write(program, out, manifest={"profiler": origin}, force=forced())
    output.show_notes(notes)
    tasks = sum(len(rank_class.tasks) for rank_class in program.classes)
    recorded = plural(len(traces), "recorded rank", "recorded ranks")
    ranks = plural(program.mesh.world_size, "rank", "ranks")
    output.say(f"{out}: {plural(tasks, 'task', 'tasks')} of {recorded}, written as {ranks}")
