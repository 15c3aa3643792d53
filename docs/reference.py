"""Writes docs/reference/ out of the code, pages and a JSON schema: `python docs/reference.py`.

Sphinx runs it before it reads the pages, so that they are never older than the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from stagewright.graph.node import Node
    from stagewright.launch.names import OtherName
    from stagewright.run.sections.declare import Setting

HERE = Path(__file__).parent / "reference"


def write() -> None:
    """All pages, and no others."""
    HERE.mkdir(exist_ok=True)
    for old in HERE.glob("*.md"):
        if old.stem not in PAGES:
            old.unlink()
    for name, page in PAGES.items():
        (HERE / f"{name}.md").write_text(page(), encoding="utf-8")
    (HERE / "run.schema.json").write_text(run_schema(), encoding="utf-8")


# ---- text ----------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [list(heads), ["---"] * len(heads), *([_cell(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def first(of: object) -> str:
    """The first paragraph of a docstring."""
    text = " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
    return text.removesuffix(":").removesuffix(".") + "."


def prose(doc: str | None) -> str:
    """A docstring as Markdown: without its doctests."""
    text = inspect.cleandoc(doc or "")
    return re.sub(r"^>>>.*?(?:\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).strip()


# ---- the command line ----------------------------------------------------------------------------


def cli() -> str:
    """Every command, its arguments, options and examples."""
    from stagewright.cli import main as cli
    from stagewright.cli.main import EXAMPLES
    from stagewright.launch.names import OTHERS
    from stagewright.run.other_names import SWITCHES
    from stagewright.run.sections import EXPERIMENT

    shared = {*EXPERIMENT, *SWITCHES, *OTHERS}
    parts = [
        "# Command line\n\nEvery command takes `--help`. Commands on a run (`show`, `generate`, "
        "`simulate` and others) take every [setting](settings.md) besides their own options.\n"
    ]
    for name, command in cli.commands.commands.items():
        context = click.Context(command, info_name=f"stagewright {name}")
        help_, _, more = inspect.cleandoc(command.help or "").partition("\n\n")
        rows = [
            (_flags(p), (p.help or "").replace("<", "&lt;"))
            for p in command.params
            if isinstance(p, click.Option) and p.name not in shared
        ]
        asks = any(p.name in shared for p in command.params)
        words = " ".join(p.make_metavar(context) for p in command.params if _argument(p))
        parts.append(f"## {name}\n\n{help_}\n\n{more}".rstrip() + "\n")
        parts.append(f"`stagewright {name} {words} [OPTIONS]`\n".replace("  ", " "))
        if asks:
            parts.append("Takes every [setting](settings.md), and:\n")
        parts.append(table(("option", "what it does"), rows))
        parts.append("```bash\n" + "\n".join(EXAMPLES[name]) + "\n```\n")
    return "\n".join(parts)


def _argument(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument)


def _flags(option: click.Option) -> str:
    names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    takes = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    if isinstance(option.type, click.Choice):
        takes = " " + ", ".join(f"`{word}`" for word in option.type.choices)
    return ", ".join(names) + takes


def settings() -> str:
    """Fields of a run, of the machine and of the execution: options, and keys of run files."""
    from stagewright.run.sections import SECTIONS
    from stagewright.run.sections.declare import settings_of

    parts = [
        "# Settings\n\nFields of `stagewright.Run`; keys of run files (YAML), flat or under the name "
        "of their section; options of the command line, with dashes for underscores, and `--no-` to "
        "turn off what is on. Options win over the file. More: [command line](../guides/command-line.md).\n"
    ]
    for key, (title, section) in SECTIONS.items():
        rows = [
            (f"`{s.name}`", _values(s), s.help, s.default_text, _more(s))
            for s in settings_of(section, key)
        ]
        heads = ("setting", "values", "meaning", "default", "more")
        parts.append(f"## {title}\n\nSection `{key}`: {first(section)}\n\n{table(heads, rows)}")
    return "\n".join(parts)


def _values(setting: Setting) -> str:
    kind = setting.kind
    return ", ".join(f"`{w}`" for w in kind) if isinstance(kind, tuple) else kind.__name__


def _more(setting: Setting) -> str:
    """Modes, needs, habits of frameworks and other names of a setting."""
    from stagewright.run.sections.declare import ALL_MODES, describe_need, text_of

    parts = [] if setting.modes == ALL_MODES else [f"{' and '.join(setting.modes)} only"]
    parts += [f"needs {describe_need(*need)}" for need in setting.needs.items()]
    parts += [f"{name}: {text_of(value)}" for name, value in setting.habits.items()]
    parts += [f"also `--{name}`" for name in setting.names]
    parts += [f"`--{name}`: {text_of(value)}" for name, value in setting.switches.items()]
    return "; ".join(parts)


# ---- the schema of run files ---------------------------------------------------------------------


def run_schema() -> str:
    """JSON schema of run files: settings flat or by section, by our names or those of other tools.

    Draft 7, which editors know. Types and ranges are those that pydantic reads of the settings.
    """
    from stagewright.launch.names import OTHERS
    from stagewright.run.sections import EXPERIMENT, SECTIONS

    settings, definitions = _settings_schema()
    flat = _object(("model", *EXPERIMENT), "Run file of Stagewright")
    sections = {
        key: _object((name for name, of in EXPERIMENT.items() if of.section == key), title)
        for key, (title, _) in SECTIONS.items()
    }
    sections["model"]["properties"]["model"] = {"$ref": "#/definitions/model"}

    def add(names: Sequence[str], section: str, value: Mapping[str, Any]) -> None:
        """Spellings of a name: flat, in its section, or in a section of torchtitan."""
        if not names:
            return
        for place in (flat, sections[section]) if section else (flat,):
            place["patternProperties"][_spellings(names)] = value
        for theirs, dot, key in (name.rpartition(".") for name in names):
            if dot:
                place = sections.setdefault(theirs, _object((), "A section of torchtitan"))
                place["patternProperties"][_spellings([key])] = value

    for name, of in EXPERIMENT.items():
        own = [name] if "_" in name else []
        add([*own, *of.names], of.section, {"$ref": f"#/definitions/{name}"})
        add([*of.switches], of.section, {"type": ["boolean", "null"]})
    for of in OTHERS.values():
        add([of.name, *of.names], "", _other_schema(of))
    for key, section in sections.items():
        of_both = key in flat["properties"]  # a setting has the name of its section
        either = {"anyOf": [{"$ref": f"#/definitions/{key}"}, section]}
        flat["properties"][key] = either if of_both else section
    head = {"$schema": "http://json-schema.org/draft-07/schema#"}
    return json.dumps(head | flat | {"definitions": settings | definitions}, indent=1) + "\n"


def _object(names: Iterable[str], title: str) -> dict[str, Any]:
    """Schema of settings by name, and of nothing else."""
    return {
        "title": title,
        "type": "object",
        "properties": {name: {"$ref": f"#/definitions/{name}"} for name in names},
        "patternProperties": {},
        "additionalProperties": False,
    }


def _spellings(names: Iterable[str]) -> str:
    """A pattern of names, in which dashes, underscores and dots are equal."""
    each = dict.fromkeys(re.sub("[-_.]", "[-_.]", name) for name in names)
    return f"^({'|'.join(each)})$"


def _settings_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of each setting, and the definitions that these name."""
    from pydantic import TypeAdapter

    from stagewright.run.sections import EXPERIMENT
    from stagewright.run.sections.cluster import ClusterSection
    from stagewright.run.sections.execution import Execution
    from stagewright.run.settings import Run

    settings: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for of_class in (Run, ClusterSection, Execution):
        whole = TypeAdapter(of_class).json_schema(ref_template="#/definitions/{model}")
        definitions |= whole.get("$defs", {})
        for name, of in whole["properties"].items():
            if name in EXPERIMENT:
                settings[name] = _setting_schema(EXPERIMENT[name], of)
    settings["expert_load"] = {
        "description": EXPERIMENT["expert_load"].text
    }  # numbers, lists, a path
    text = "Preset (see `stagewright models`), path of a config.json, or id of the hub."
    settings["model"] = {"type": "string", "description": text}
    definitions["Group"] = {"type": "object"}  # a row of requests, whose keys have other names, too
    return settings, definitions


def _setting_schema(setting: Setting, read: Mapping[str, Any]) -> dict[str, Any]:
    """What a run file may say of a setting: what pydantic reads, and text that stands for it."""
    ways = [dict(way) for way in read.get("anyOf", [read])]
    for way in ways:
        way.pop("title", None)
        way.pop("default", None)
        if "enum" in way:
            way["enum"] = [*dict.fromkeys([*way["enum"], *setting.same_words])]
    if setting.kind in (str, tuple, frozenset) and {"type": "string"} not in ways:
        ways.append({"type": "string"})  # `15T`, `50ms`, or the items of a list between commas
    value = ways[0] if len(ways) == 1 else {"anyOf": ways}
    return {"description": setting.text, **value}


def _other_schema(of: OtherName) -> dict[str, Any]:
    """What a run file may say of an option of another tool."""
    if isinstance(of.kind, tuple):
        return {"description": of.help, "enum": [*of.kind]}
    kinds = {bool: ["boolean", "null"], int: "integer", str: "string"}
    return {"description": of.help, "type": kinds[of.kind]}


# ---- Python --------------------------------------------------------------------------------------


def python() -> str:
    """The public names of the package: signatures, docstrings with their examples, members."""
    import stagewright as sw

    parts = [
        "# Python\n\nEverything public is an attribute of the package: `import stagewright as sw`. Sizes are "
        "bytes, times seconds, and numbers are of one rank and one step unless a name says otherwise. "
        "What users can mend is raised as `sw.UserError`, whose text is the line that the command line "
        "prints.\n"
    ]
    public = {name: getattr(sw, name) for name in sw.__all__ if not name.startswith("_")}
    functions = {name: of for name, of in public.items() if inspect.isfunction(of)}
    for name, of in (functions | public).items():
        signature = inspect.signature(of) if name in functions else ""
        shown = f"```python\nsw.{name}{signature}\n```\n\n".replace("'", "") if signature else ""
        parts.append(f"## {name}\n\n{shown}{_with_examples(of)}\n")
        if inspect.isclass(of) and (rows := list(_members(of))):
            parts.append(table(("member", "what it is"), rows))
        if name == "Run":
            parts.append("Its settings, with their units and defaults: [settings](settings.md).\n")
    return "\n".join(parts)


def _with_examples(of: object) -> str:
    """A docstring as Markdown, whose doctests are blocks of code."""
    doc = inspect.cleandoc(inspect.getdoc(of) or "")
    return re.sub(r"^>>>.*?(?=\n\n|\Z)", r"```python\n\g<0>\n```", doc, flags=re.M | re.S)


def _members(of: type) -> Iterable[tuple[str, str]]:
    """Public fields, methods and properties that the package itself defines, with their first
    sentence."""
    if dataclasses.is_dataclass(of):
        yield from _fields(of)
    for name in dir(of):
        member = inspect.getattr_static(of, name)
        function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        home = getattr(function, "__module__", "") or getattr(
            getattr(function, "func", None), "__module__", ""
        )
        if name.startswith("_") or not home.startswith("stagewright"):
            continue
        if isinstance(member, property) or not callable(function):
            yield f"`{name}`", first(getattr(of, name) if function is member else function)
        else:
            kept = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
            yield f"`{name}({', '.join(kept)})`", first(function)


def _fields(of: type) -> Iterable[tuple[str, str]]:
    """Fields of a dataclass, as the texts below them say what they are."""
    body = ast.parse(inspect.getsource(of)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in itertools.pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            words = " ".join(str(text.value.value).partition("\n\n")[0].split())
            yield f"`{field.target.id}`", words.removesuffix(".") + "."


# ---- what is known by name -----------------------------------------------------------------------


def models() -> str:
    """Presets and their sizes."""
    from stagewright.model.presets import PRESETS

    columns = {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "MLP": "ffn_hidden_size",
        "heads": "num_attention_heads",
        "KV heads": "num_query_groups",
        "experts": "num_experts",
        "vocabulary": "vocab_size",
        "longest": "max_position_embeddings",
    }
    rows = [
        (f"`{name}`", *(_count(getattr(model, field)) for field in columns.values()))
        for name, model in PRESETS.items()
    ]
    return (
        f"# Models\n\n{len(rows)} presets; also any `config.json` of their kinds, and "
        "[text files](../guides/own-model.md). `stagewright models --json` has every field.\n\n"
        + table(("name", *columns), rows)
    )


def _count(value: int) -> str:
    return f"{value:,}" if value else ""


def hardware() -> str:
    """Accelerators and their figures."""
    from stagewright.time import hardware

    all_ = [hardware.resolve(name) for name in hardware.names()]
    rows = [
        (
            f"`{h.name}`",
            *(f"{x:g}" for x in (h.peak_bf16_tflops, h.memory_gb, h.memory_bandwidth_gb_s)),
            f"{h.scale_up.topology} of {h.scale_up.gpus}",
            *(f"{x:g}" for x in (h.scale_up.bandwidth_gb_s, h.scale_out.bandwidth_gb_s, h.tdp_w)),
        )
        for h in all_
    ]
    heads = ("name", "bf16 TFLOP/s", "memory GB", "GB/s", "inner links", "GB/s", "outer GB/s", "W")
    return (
        "# Hardware\n\nDense peaks. `stagewright hardware NAME` prints every figure with its source; "
        "a file of your own may build upon one (`base: NAME`).\n\n" + table(heads, rows)
    )


def schedules() -> str:
    """Pipeline schedules and their pictures."""
    from stagewright.schedule.schedules import SCHEDULES, make
    from stagewright.schedule.text import text

    parts = [
        "# Schedules\n\nWhat they are for, and how long they idle: [parallelism](../guides/parallelism.md).\n"
    ]
    for name, schedule in SCHEDULES.items():
        vpp = schedule.chunks or (2 if schedule.chunks is None else 1)
        needs = f" Microbatches must {schedule.rule}." if schedule.rule else ""
        microbatches = next(m for m in (4, 8) if schedule.takes(4, m))
        picture = text(make(name, 4, microbatches, vpp))
        parts.append(f"## {name}\n\n{first(schedule.order)}{needs}\n\n```text\n{picture}\n```\n")
    return "\n".join(parts)


def ops() -> str:
    """The op table, a section for each family."""
    from stagewright.graph import ops
    from stagewright.graph import table as op_table

    nodes = _nodes()
    parts = [
        "# Ops\n\n" + prose(op_table.__doc__).partition("\n\n")[2] + "\n\n"
        "*FLOPs* are per point of the index space; *sum* says whether a value that is still a sum "
        "over an axis may pass (*all*: if all operands are; *one*: if one is); *fused*: joins its "
        "neighbours in one kernel. The example is of a model here.\n"
    ]
    heads = ("op", "computes", "index expression, for example", "FLOPs", "sum", "fused", "gradient")
    for family in ops.FAMILIES:
        rows: list[Sequence[object]] = []
        for name, op in family.ROWS.items():
            node = nodes.get(name)
            cost = f"{op.flops:g}" if isinstance(op.flops, int | float) else "of its chunks"
            if node is not None and node.get("products") is not None:
                cost = "of pairs attended"
            sums = "all" if op.linear else "one" if op.multilinear else ""
            spec = "" if node is None else f"`{node['spec']}`"
            fused, gradient = ("yes" if of else "" for of in (op.fuses, op.vjp))
            rows.append((f"`{name}`", op.sentence, spec, cost, sums, fused, gradient))
        parts.append(f"## {first(family)[:-1]}\n\n{table(heads, rows)}")
    return "\n".join([*parts, _ops_of_texts()])


def _ops_of_texts() -> str:
    """The ops that a .stg file may name, with their attributes."""
    from stagewright.blocks.text.statements import COLLECTIVES, OPS_OF_TEXTS

    rows: list[Sequence[object]] = []
    for name, op in OPS_OF_TEXTS.items():
        # A text can write numbers and words, no tuples.
        attributes = {key: of for key, of in op.attrs.items() if of.types != (tuple,)}
        required = [f"`{key}`: {of}" for key, of in attributes.items() if of.asked]
        optional = [
            f"`{key}`: {of}" + (f" [{of.implied}]" if of.implied is not None else "")
            for key, of in attributes.items()
            if not of.asked
        ]
        rows.append((f"`{name}`", "; ".join(required), "; ".join(optional)))
    return (
        "## Ops of .stg files\n\nThe ops that a module in a [.stg file](../guides/own-model.md) may use, with their "
        "attributes and, in brackets, the value of an attribute that is left out. `dtype=bf16` may be said of every "
        f"op. Collectives, which layouts have to agree with: {', '.join(COLLECTIVES)}.\n\n"
        + table(("op", "required attributes", "optional attributes"), rows)
    )


def _nodes() -> dict[str, Node]:
    """For every op that some models use, a node whose index expression says most."""
    import stagewright as sw
    from stagewright.graph.node import toposort

    runs = [sw.Run(model=name, seq_length=512, tp=2, dp=2) for name in EXAMPLES]
    runs.append(sw.Run(model="llama3.1-8b", mode="decode", context_length=1024, tp=2))
    found: dict[str, Node] = {}
    for run in runs:
        for block in sw.compile(run).blocks.values():
            for node in toposort(block.outputs.values()):
                if node.get("spec") is None:
                    continue
                most = found.get(node.op)
                if most is None or len(str(node["spec"])) > len(str(most["spec"])):
                    found[node.op] = node
    return found


EXAMPLES = (
    *("gpt2", "llama3.1-8b", "bert-base", "mixtral-8x7b", "deepseek-v3", "jamba-v0.1"),
    *("mamba2-2.7b", "minimax-text-01", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "gpt-oss-20b"),
)


PLACED = (
    *("bert-base", "opt-350m", "t5-small", "deepseek-v2", "gpt-oss-20b", "jamba-v0.1"),
    *("zamba2-1.2b", "minimax-text-01", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "olmoe-1b-7b"),
    *("minimax-m3", "deepseek-v4-pro"),
)
"""Models whose blocks have, together, every weight that some degree splits."""


def declared(models: Iterable[str]) -> dict[tuple[str, str], None]:
    """The weights of some models that a degree splits: names, and placements as declared."""
    from stagewright import blocks
    from stagewright.model.catalog import resolve

    rows: dict[tuple[str, str], None] = {}
    for model in map(resolve, models):
        for block, layer in dict.fromkeys((x.block, x.layer) for x in blocks.chain(model)):
            for n in blocks.BLOCKS[block](model, blocks.Recipe(), layer).graph:
                parameter = n.binding.param if n.op == "param" else None
                if parameter is not None and any(parameter.placement.axes):
                    rows[parameter.name, str(parameter.placement)] = None
    return rows


def strategies() -> str:
    """Which dims the degrees split."""
    from stagewright.algebra.notation import PARTS
    from stagewright.parallel import placement

    weights = [(f"`{name}`", f"`{where}`") for name, where in sorted(declared(PLACED))]
    parts = [(f"`{part}`", what) for part, what in PARTS.items()]
    return (
        "# Strategies\n\n"
        + prose(placement.__doc__)
        + "\n\nA table of your own comes before these: "
        "[own model](../guides/own-model.md#a-strategy-for-any-model). `stagewright show MODEL --graph` has "
        "the names, and the layouts that follow.\n\n"
        "## Weights\n\nWhat each weight declares where its block creates it, in the paper's notation; "
        "a weight that is not named is whole on every rank.\n\n"
        + table(("weight", "placement"), weights)
        + "\n## Parts of tp\n\nA dim that tp does not divide is split by a part of tp.\n\n"
        + table(("part", "what it is"), parts)
        + "\n## The rows of a run\n\n"
        + prose(placement.strategy.__doc__)
        + "\n"
    )


# ---- keys of JSON --------------------------------------------------------------------------------


RUN = "llama3.1-8b --tp 2 --pp 2 --dp 2 --sequence-parallel --seq-length 4096"
DECODE = "llama3.1-8b --mode decode --tp 2 --context-length 4096 --device-memory 80GB"
PRINTED = {
    "show": f"show {RUN} --json",
    "show, in inference": f"show {DECODE} --json",
    "simulate": f"simulate {RUN} --hardware h100-sxm --json",
    "models": "models --json",
    "hardware": "hardware h100-sxm --json",
    "verify": "verify traces --json",
    "inspect": "inspect traces/workload.0.et --json",
    "diff, of traces": "diff traces again --json",
    "diff, of runs": "diff 'gpt2?tp=1' 'gpt2?tp=2' --gpus 2 --seq-length 64 --hardware h100-sxm --json",
    "replay": "replay recorded --link x2 --json",
    "compare": "compare recorded gpt2 --layers 2 --seq-length 64 --tp 2 --hardware h100-sxm --json",
    "calibrate": "calibrate recorded --base h100-sxm --json",
    "validate": "validate --source nccl-tests --json",
}
"""What prints JSON that is alike on every machine."""


def keys() -> str:
    """Paths of what the commands print with --json, with examples."""
    from click.testing import CliRunner

    from stagewright.cli import main as cli
    from stagewright.trace.run_manifest import manifest as manifest_of_run
    from stagewright.views import summary

    def printed(line: str) -> str:
        done = CliRunner().invoke(cli.commands, shlex.split(line), standalone_mode=False)
        if done.exception:
            raise done.exception
        return done.stdout

    parts = [
        "# JSON\n\nKeys of what is printed with `--json`, and of `manifest.json`. `[]` is an element of "
        "a list, `*` any name.\n\n## Words\n\n" + prose(summary.__doc__).partition("\n\n")[2]
    ]
    with tempfile.TemporaryDirectory() as place, chdir(place):
        toy = "generate gpt2 --layers 2 --seq-length 64 --tp 2"
        printed(f"{toy} -o traces")
        printed(f"{toy} --no-fuse -o again")
        printed(f"{toy} --format kineto --hardware h100-sxm --ranks 0-1 -o recorded")
        for title, line in PRINTED.items():
            found = json.loads(printed(line))
            if title == "models":
                found = {"*": found["llama3.1-8b"]}
            if title == "verify":
                found["seconds"] = 0.1  # of the machine that makes this page
            parts += [f"## {title}\n\n`stagewright {line}`", _paths(found)]
        manifest = json.loads(Path("traces/manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {"*": next(iter(manifest["files"].values()))}
    parts += ["## manifest.json\n\n" + prose(manifest_of_run.__doc__), _paths(manifest)]
    return "\n\n".join(parts) + "\n"


# ---- columns of a search -------------------------------------------------------------------------


def search_columns() -> str:
    """What the files of all candidates hold."""
    from stagewright.views.search import COLUMNS

    rows = [(f"`{name}`", of.unit, of.meaning) for name, of in COLUMNS.items()]
    return (
        "# Columns of a search\n\n"
        "`stagewright search -o` writes a row for each candidate. These are the columns of `.csv` and "
        "`.parquet`, and the keys of each of the `rows` of `.json` and of `best` of `--json`, which "
        'leave out what is unknown. In Python, `Search.table("candidates")` is the same table. More: '
        "[search](../guides/search.md).\n\n"
        "All figures of rows whose `simulated` is false are estimates, `bubble`, `exposed_...` and "
        "`memory_...` among them. Bytes are of the fullest rank; joules and USD of a step over all "
        "GPUs.\n\n" + table(("column", "unit", "meaning"), rows) + "\n"
        "There is an `exposed_AXIS` for each axis, and a `memory_CATEGORY` for each category, that "
        "some candidate has.\n"
    )


def _paths(value: Mapping[str, Any]) -> str:
    """A row for every leaf, lists by all their elements."""
    rows: dict[str, tuple[str, str, str]] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, inside in value.items():
                walk(inside, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
            for inside in value[:MOST]:
                walk(inside, f"{path}[]")
        else:
            text = json.dumps(value)
            shown = text if len(text) <= 40 else text[:37] + "..."
            kind = "null" if value is None else type(value).__name__
            rows.setdefault(path, (f"`{path}`", kind, f"`{shown}`"))

    walk(value, "")
    return table(("key", "type", "for example"), rows.values())


MOST = 100
"""Elements of a list that are looked at."""

PAGES = {
    "cli": cli,
    "python": python,
    "settings": settings,
    "models": models,
    "hardware": hardware,
    "schedules": schedules,
    "strategies": strategies,
    "ops": ops,
    "json": keys,
    "search-columns": search_columns,
}

if __name__ == "__main__":
    write()
