"""Memory over a step as a page: a picture for each class of ranks, one file, no network.

A script adds a cursor, moved by mouse or keys, and describes the memory at the cursor; without a
script the pictures and the tables of the peaks remain.
"""

from __future__ import annotations

from typing import Any

from stagewright.errors import UserError
from stagewright.lower.compiled_run import CompiledRun
from stagewright.numbers import quantity, spans
from stagewright.program import memory
from stagewright.program.columns import RankClass
from stagewright.texttable import Table
from stagewright.views.pages.shell import Section, details, page_of, paragraph, picture, table
from stagewright.views.pictures import memory as pictures
from stagewright.views.tables import alive_in_words

POINTS = 500
_SHOWN = 12  # groups of values alive at the peak


def page(compiled: CompiledRun) -> str:
    """The page of a compiled training run; UserError for inference, whose memory is constant."""
    if compiled.run.mode != "train":
        raise UserError(
            f"--memory-plot is for training, got mode={compiled.run.mode}, where all is held all "
            "the time; drop it"
        )
    classes = compiled.program.classes
    levels = [pictures.over_rows(of, POINTS) for of in classes]
    most = max(max(of_class.total) for of_class in levels)
    head = (
        paragraph(compiled.run.describe())
        + paragraph(
            "Bytes held while each task runs, in the order of issue, with ideal allocation. Focus "
            "a picture and use the arrow keys, Home, End, or P for the peak."
        )
        + pictures.legend(levels, "legend")
    )
    data: dict[str, Any] = {}
    sections: list[Section] = []
    for nth, (of, shown) in enumerate(zip(classes, levels, strict=True)):
        data[f"held{nth}"] = pictures.data(shown)
        drawn = pictures.picture(shown, f"held{nth}", label(of, shown), most)
        title = f"Stage {of.pipeline_rank}: ranks {spans(of.ranks.tolist())}"
        body = paragraph(peak_in_words(of)) + picture(drawn, live=f"held{nth}") + alive(of)
        sections.append(Section(f"class{nth}", title, body))
    return page_of("Memory of a rank over one step", head, sections, data)


def label(of: RankClass, levels: pictures.Levels) -> str:
    """The picture of a rank class described in words."""
    peak = quantity(max(levels.total), "B")
    return f"Memory of stage {of.pipeline_rank} over a step: peak {peak}"


def peak_in_words(of: RankClass) -> str:
    """The bytes at the peak and the task that runs then, as a sentence."""
    tasks = of.tasks
    row = memory.peak_row(of.values, len(tasks))
    microbatch = int(tasks.microbatch[row])
    during = tasks.names[int(tasks.name[row])]
    if microbatch >= 0:
        during += f" of microbatch {microbatch}"
    peak = of.memory["peak"]
    return f"Peak {quantity(peak, 'B')} ({peak:,} bytes) during {during}."


def alive(of: RankClass) -> str:
    """A table, to be opened, of the values alive at the peak, the largest first."""
    groups = memory.groups_alive(of.values, memory.peak_row(of.values, len(of.tasks)))[:_SHOWN]
    columns = {
        "category": [g.category.replace("_", " ") for g in groups],
        "values": [alive_in_words(g._asdict()) for g in groups],
        "bytes": [f"{g.bytes:,}" for g in groups],
    }
    rows = Table("Alive at the peak", columns, {"bytes": ""})
    return details("What is alive at the peak", table(rows))
