"""The part of a page that says which run it is of, and how to repeat it."""

from __future__ import annotations

import dataclasses
import html
import shlex
from typing import TYPE_CHECKING, Any, cast

from stagewright.run.settings import Run
from stagewright.texttable import Table
from stagewright.views.pages.shell import Section, details, table

if TYPE_CHECKING:
    from stagewright.lower.training import Compiled


def settings(compiled: Compiled) -> Section:
    """The command, all settings, and all fields of the model."""
    run, model = compiled.run, compiled.model
    asked = run.unresolved()
    given = {
        name: getattr(run, name)
        for name in type(run).model_fields
        if getattr(run, name) is not None
    }
    chosen = {n for n in given if getattr(asked, n) != type(run).model_fields[n].default}
    rows = Table(
        "Settings",
        {
            "setting": list(given),
            "value": [_value(value) for value in given.values()],
            "": ["asked for" if name in chosen else "default" for name in given],
        },
    )
    fields = {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.name not in ("name", "modules") and getattr(model, f.name) not in (None, (), "", 0)
    }
    of_model = Table(
        f"Model {model.name}",
        {"field": list(fields), "value": [_value(value) for value in fields.values()]},
    )
    again = command(run)
    repeat = f"<pre><code>{html.escape(again)}</code></pre>" if again else ""
    return Section(
        "run",
        "Run",
        f"<p>Once more:</p>{repeat}"
        + details("All settings", table(rows))
        + details("The model", table(of_model)),
    )


def _value(value: Any) -> str:
    told = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore
    return told if len(told) <= 120 else told[:117] + "..."


def command(run: Run) -> str:
    """The command line that shows this run; empty where settings are no options but a file.

    >>> command(Run(model="gpt2", dp=2, sequence_parallel=True, layers_per_stage=(3, 4)))
    'stagewright show gpt2 --dp 2 --sequence-parallel --layers-per-stage 3,4'
    """
    words = ["stagewright", "show", run.model]
    asked = run.unresolved()
    for name, field in type(run).model_fields.items():
        value = getattr(asked, name)
        if name == "model" or value == field.default:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            items = cast("tuple[object, ...]", value)
            if not all(isinstance(item, int | str) for item in items):
                return ""
            words += [flag, ",".join(map(str, items))]
        else:
            words += [flag, str(value)]
    return shlex.join(words)
