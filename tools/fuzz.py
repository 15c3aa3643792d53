"""Fuzzing of everything that reads what others wrote: one row of `PARSERS` per parser.

A parser may read what it is given or refuse it with a `UserError`; anything else is a bug: another
exception, more than `SECONDS`, or more memory than `MEMORY`.

To add a parser, add a row: its name, the name of its file, the function that reads a path, files
that it accepts, and how such a file is changed (`havoc` suits everything, `lines`, `data` and
`frames` know text, JSON or YAML, and traces). `tests/slow/test_fuzz.py` then runs some hundred
changed files in CI, and this a campaign as long as you like:

    python tools/fuzz.py run.yaml --seconds 600

It prints each failure with its traceback and keeps the file. With `--coverage`, atheris (if
installed) looks for files that reach new code. Add the file that failed to `hostile` of the row.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import io
import itertools
import json
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import stagewright
from stagewright.errors import UserError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

SECONDS = 10  # of a core, for one file
MEMORY = 3 << 30  # of address space, in a process of its own

Dice = random.Random
Mutator = Callable[[bytes, Dice], bytes]


class Parser(NamedTuple):
    """What reads a file that somebody else wrote."""

    name: str
    file: str  # its name, which may say what it is
    read: Callable[[Path], object]
    seeds: Callable[[], Sequence[bytes]]  # files that it accepts
    mutate: Mutator
    hostile: Sequence[bytes] = ()  # files that have been, or might be, too much for it
    around: Callable[[Path], object] = lambda folder: None  # puts other files beside it


# ---- how files are changed -----------------------------------------------------------------------

NUMBERS = (
    "0", "-0", "-1", "1", "2", "3", "255", "65536", "2147483647", "2147483648", "4294967296",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809",
    "1000000000000", "1" + "0" * 400, "0.5", "1e9", "1e309", "-1e309", "1e-400", "NaN", "nan",
    "Infinity", "inf", "0x10", "0b1", "1_000", "017", "1:30", "٣", "½",
)  # fmt: skip
WORDS = (
    "", "null", "~", "true", "false", "yes", "True", "[]", "{}", "''", '"', "'", "/", "..", "../x",
    "a/b", "/etc/passwd", "CON", "\0", "a\0b", "\n", "\r\n", "\t", "\ufeff", "\u202e", "é", "日本",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "\U0001f600", "x" * 5000, "%s%n",
    "{0}", "$(id)", "`id`", "; ls", "-", "--", "&a", "*a", "<<", "!!python/object:os.system",
    "!!set {a}", "!!binary aGk=", "2001-01-01", "2001-13-45", "? [a]", "|", ">", "#", ":", ",", ";",
)  # fmt: skip


def havoc(data: bytes, dice: Dice) -> bytes:
    """Changes of bytes, whatever they mean."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        at = dice.randrange(len(found) + 1)
        to = min(len(found), at + dice.choice((1, 1, 2, 4, 8, 64)))
        how = dice.randrange(7)
        if how == 0 and found:
            found[min(at, len(found) - 1)] ^= 1 << dice.randrange(8)
        elif how == 1:
            found[at:to] = dice.randbytes(dice.randrange(9))
        elif how == 2:
            del found[at:to]
        elif how == 3:
            found[at:at] = found[at:to] * dice.choice((1, 2, 100))
        elif how == 4:
            found[at:to] = dice.choice((b"\0", b"\xff", b"\x80", b"\x7f", b"\r", b"\n")) * (to - at)
        elif how == 5:
            other = dice.randrange(len(found) + 1)
            found[at:at] = found[min(at, other) : max(at, other)][:4096]
        elif dice.random() < 0.3:
            del found[at:]
    return bytes(found)


def lines(data: bytes, dice: Dice) -> bytes:
    """Changes of lines and words."""
    rows = data.decode("utf-8", "replace").split("\n")
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(rows))
        how = dice.randrange(6)
        if how == 0:
            rows.insert(at, rows[dice.randrange(len(rows))])
        elif how == 1 and len(rows) > 1:
            del rows[at]
        elif how == 2:
            rows[at] = dice.choice(("  ", "\t", "- ", "", "# ")) + rows[at]
        elif how == 3:
            rows[at] += dice.choice(NUMBERS + WORDS)
        else:
            rows[at] = _one_word(rows[at], dice)
    return "\n".join(rows).encode("utf-8", "surrogatepass")


def _one_word(text: str, dice: Dice) -> str:
    """Another word, or number, instead of one of the words."""
    ends = [n for n in range(1, len(text)) if text[n - 1].isalnum() != text[n].isalnum()]
    cuts = [0, *ends, len(text)]
    nth = dice.randrange(len(cuts) - 1) if len(cuts) > 1 else 0
    begin, end = cuts[nth], cuts[min(nth + 1, len(cuts) - 1)]
    return text[:begin] + dice.choice(dice.choice((NUMBERS, WORDS))) + text[end:]


class _Twice(dict[str, Any]):
    """An object whose first key comes twice when it is written."""


def data(load: Callable[[bytes], Any], dump: Callable[[Any], str]) -> Mutator:
    """Changes of a JSON or YAML value, by its structure."""

    def mutate(source: bytes, dice: Dice) -> bytes:
        if dice.random() < 0.25:
            return dice.choice((havoc, lines))(source, dice)
        root = [load(source)]
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            _change(dice, *dice.choice(list(_places(root))))
        text = dump(root[0])
        return text.encode("utf-8", "surrogatepass")

    return mutate


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = range(len(value)) if isinstance(value, list) else ()
    keys = list(value) if isinstance(value, dict) else keys
    for key in list(keys)[:200]:
        yield value, key
        yield from _places(value[key])


def _change(dice: Dice, where: Any, key: Any) -> None:
    old, how = where[key], dice.randrange(10)
    if how < 3:
        where[key] = _value(dice)
    elif how == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        where[key] = dice.choice(
            (old + 1, -old, old * 2, old * 10**12, float(old), str(old), [old])
        )
    elif how == 4 and isinstance(where, dict):
        del where[key]
    elif how == 5 and isinstance(where, dict):
        where[dice.choice((f"{key}s", str(key).upper(), *WORDS[:40]))] = where.pop(key)
    elif how == 6 and isinstance(where, dict):
        others = [k for k in where if k != key]
        if others:
            where[key] = copy.deepcopy(where[dice.choice(others)])
    elif how == 7:
        for _ in range(dice.choice((1, 50, 3000))):
            old = [old] if dice.random() < 0.5 else {"a": old}
        where[key] = old
    elif how == 8 and isinstance(old, list):
        where[key] = old * dice.choice((0, 2, 1000))
    else:
        where[key] = dice.choice(([], {}, [old, old], {"1": old}))


def _value(dice: Dice) -> Any:
    return dice.choice(
        (
            *(0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**12, 10**400, -(10**30)),
            *(0.0, 0.5, -1.5, 1e308, float("inf"), float("-inf"), float("nan")),
            *(None, True, False, [], {}, [[]], *WORDS, *NUMBERS),
        )
    )


def _json(value: Any) -> str:
    with suppress(RecursionError):
        return json.dumps(value)
    return "[" * 100_000


def _yaml(value: Any) -> str:
    with suppress(RecursionError, yaml.YAMLError):
        return yaml.safe_dump(value, allow_unicode=True)
    return "{a: " * 100_000


json_data = data(json.loads, _json)
yaml_data = data(yaml.safe_load, _yaml)


def members(source: bytes, dice: Dice) -> bytes:
    """Changes of an archive's members, sealed again, so that what is behind the seal is reached."""
    if dice.random() < 0.1:
        return havoc(source, dice)
    found, head = unsealed(source)
    for _ in range(dice.choice((1, 1, 2))):
        name = dice.choice([*found, *["contents.json"] * len(found)])
        how = dice.randrange(6)
        if how == 0 and len(found) > 1:
            del found[name]
            break
        if name.endswith(".json"):
            found[name] = json_data(found[name], dice)
        else:
            found[name] = havoc(found[name], dice) if how < 4 else found[dice.choice([*found])]
    return sealed(found, head)


def unsealed(source: bytes) -> tuple[dict[str, bytes], bytes]:
    """Members of a bundle, and what stands before its checksum."""
    with zipfile.ZipFile(io.BytesIO(source)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}, archive.comment[:-64]


def sealed(found: dict[str, bytes], head: bytes) -> bytes:
    """A bundle of such members, with a right checksum."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = head + b"0" * 64
        for name, content in found.items():
            archive.writestr(name, content)
    whole = out.getvalue()[:-64]
    return whole + hashlib.sha256(whole).hexdigest().encode()


def frames(source: bytes, dice: Dice) -> bytes:
    """Changes of a trace: of its framing, of whole nodes, of their fields, of bytes in them."""
    from stagewright.trace.formats import wire

    if dice.random() < 0.2:
        return havoc(source, dice)
    bodies = list(_frames(source))
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at, how = dice.randrange(len(bodies)), dice.randrange(8)
        if how == 0:
            bodies.insert(at, bodies[dice.randrange(len(bodies))])
        elif how == 1 and len(bodies) > 1:
            del bodies[at]
        elif how == 2:
            other = dice.randrange(len(bodies))
            bodies[at], bodies[other] = bodies[other], bodies[at]
        elif how == 3:
            bodies[at] = havoc(bodies[at], dice)
        else:
            with suppress(ValueError):
                bodies[at] = _changed_node(bodies[at], len(bodies), dice)
    written = [wire.varint(len(body)) + body for body in bodies]
    if dice.random() < 0.1:
        at = dice.randrange(len(written))
        size = dice.choice((0, 1, 127, 2**20, 2**26, 2**31, 2**60, 2**63, 2**64 - 1))
        written[at] = wire.varint(size) + bodies[at]
    return b"".join(written)


def _frames(source: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(source):
        size = shift = 0
        while True:
            byte, at = source[at], at + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        yield source[at : at + size]
        at += size


def _changed_node(body: bytes, count: int, dice: Dice) -> bytes:
    """A field of a node, or an attribute, set to something else."""
    from stagewright.trace.formats import et_def

    node = et_def.parse("Node", body)
    number = dice.choice((0, 1, 2, 3, count, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1))
    how = dice.randrange(8)
    if how == 0:
        node.id = dice.choice((number, dice.randrange(count + 1)))
    elif how == 1:
        node.type = dice.choice((*range(9), 127, -1, 2**31 - 1))
    elif how == 2:
        getattr(node, dice.choice(("data_deps", "ctrl_deps"))).append(dice.randrange(count + 2))
    elif how == 3:
        for name in ("data_deps", "ctrl_deps"):
            del getattr(node, name)[:]
    elif how == 4:
        node.name = dice.choice(WORDS[:24]) * dice.choice((1, 100))
    elif node.attr:
        attr = dice.choice(node.attr)
        if dice.random() < 0.2:
            attr.name = dice.choice((dice.choice(node.attr).name, "pg_name", "", "x" * 300))
        elif dice.random() < 0.2:
            node.attr.remove(attr)
        else:
            _set_attribute(attr, number, dice)
    return node.SerializeToString()


def _set_attribute(attr: Any, number: int, dice: Dice) -> None:
    from stagewright.trace.formats import et_def

    kind = dice.choice(
        (attr.WhichOneof("value") or "int64_val", *(f"{k}_val" for k in et_def.VALUES))
    )
    with suppress(ValueError, TypeError):
        if kind.endswith("_list"):
            attr.ClearField(kind)
            getattr(attr, kind).values.extend([dice.random() < 0.5] * dice.choice((0, 1, 4)))
        elif kind == "string_val":
            attr.string_val = dice.choice(NUMBERS + WORDS[:24])
        elif kind == "bytes_val":
            attr.bytes_val = dice.randbytes(4)
        elif kind == "bool_val":
            attr.bool_val = not attr.bool_val
        else:
            setattr(attr, kind, dice.choice((number, -number, 1, 2, 3, 64)))


# ---- the parsers ---------------------------------------------------------------------------------


def _config(path: Path) -> object:
    from stagewright.model.catalog import from_config

    return from_config(path)


def _config_compiled(path: Path) -> object:
    """What a config.json says can be compiled or is refused."""
    from stagewright.lower.compile import compile
    from stagewright.model.catalog import from_config
    from stagewright.run.settings import Run

    model = from_config(path)
    return compile(Run(model=str(path), layers=min(2, model.num_layers), seq_length=8), model)


def _run_file(path: Path) -> object:
    from stagewright.api.experiments import load_run
    from stagewright.model.catalog import resolve
    from stagewright.parallel.degrees import parallelization
    from stagewright.run.rules import check
    from stagewright.trace.run_manifest import load_model

    run = load_run(path)
    run.describe()
    model = load_model(path) or resolve(run.model)
    model = model.with_overrides(num_layers=run.layers, vocab_size=run.vocab)
    check(run, model)
    return parallelization(run.resolved(model), model)


def _schedule(path: Path) -> object:
    from stagewright.schedule.schedules import make

    return make(str(path), pp=2, microbatches=3)


def _hardware(path: Path) -> object:
    from stagewright.time import hardware

    return hardware.resolve(path)


def _modules(path: Path) -> object:
    """A .stg file, and what it describes compiled."""
    from stagewright.blocks.text.stg import load
    from stagewright.lower.compile import compile
    from stagewright.run.settings import Run

    model = load(path)
    return compile(Run(model=str(path), layers=min(2, model.num_layers), seq_length=8), model)


def _strategy(path: Path) -> object:
    from stagewright.algebra.notation import table

    return table(path)


def _durations(path: Path) -> object:
    from stagewright.time.measured import load

    return load(path)


def _loads(path: Path) -> object:
    from stagewright.model.presets import PRESETS
    from stagewright.run.expert_load import read_lines

    return read_lines(str(path), PRESETS["mixtral-8x7b"].with_overrides(3), range(3))


def _requests(path: Path) -> object:
    from stagewright.run.lengths import read

    return read(path)


def _measurements(path: Path) -> object:
    from stagewright.evidence.training import load

    return load(path)


def _bundle(path: Path) -> object:
    """Everything that reads a bundle."""
    from stagewright.check.verify import verify
    from stagewright.trace.formats.bundle import Bundle

    json.dumps(verify(path, workers=1).to_json())
    bundle = Bundle(path)
    bundle.program()
    return list(itertools.islice(bundle.nodes(0), 20))


def _trace(path: Path) -> object:
    """Everything that reads one trace."""
    from stagewright.check import inspect as inspect_trace
    from stagewright.check.verify import verify

    report = verify(path, workers=1)
    json.dumps(report.to_json())
    json.dumps(inspect_trace.inspect(path).to_json())
    return list(inspect_trace.nodes(path, 0, 20))


def _world(path: Path) -> object:
    """Everything that reads a directory of traces."""
    from stagewright.check.diff import diff
    from stagewright.check.verify import verify

    report = verify(path.parent, workers=1)
    json.dumps(report.to_json())
    return diff(path.parent, path.parent).to_json()


def _arguments(path: Path) -> object:
    """A command line, a word per line."""
    from stagewright.cli.main import BUG, _status  # pyright: ignore[reportPrivateUsage]

    words = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    said = StringIO()
    with redirect_stderr(said), redirect_stdout(StringIO()):
        status = _status(words)
    if status == BUG and "this is a bug" in said.getvalue():
        raise AssertionError(said.getvalue())
    return status


CONFIGS = ROOT / "src" / "stagewright" / "data" / "configs"


def _configs() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CONFIGS.glob("*.json"))]


def _machines() -> list[bytes]:
    found = sorted((CONFIGS.parent / "hardware").glob("*.yaml"))
    return [path.read_bytes() for path in found if path.stat().st_size < 3000]


def _examples() -> list[bytes]:
    return [path.read_bytes() for path in sorted(EXAMPLES.glob("*.stg"))]


RUNS = (
    b"model: llama3.1-8b\ntp: 2\npp: 2\nlayers: 4\nlayers_per_stage: [1, 3]\nseq_length: 64\n",
    b"model: gpt2\ndp: 4\ncp: 2\nzero: 3\nreshard_after_forward: false\nprecision: fp8\n",
    b"model: mixtral-8x7b\nep: 2\ndp: 2\nrecompute: selective\nrecompute_modules: [core_attn]\n",
    b"model: gpt2\nschedule: interleaved\nvpp: 2\npp: 2\norder: pp-tp-cp-ep-dp\n",
)
SCHEDULE = b"0F0,0F1,,0B0,0F2,0B1,,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
TORCH_SCHEDULE = (
    b"0F0,0SEND_F0,0F1,0UNSHARD,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,(1F1;1B0)OVERLAP_F_B,1B1,1F2,1B2\n"
)
STRATEGY = b"# comment\nwq [M, A/tp, D]\nx [B/dp, S/cp, M @ 1/tp]\nwo [A/tp, D, M]\n"
DURATIONS = (
    b"kernel,shape,dtype,count,duration_us\ngemm,batch=1 m=16 n=64 k=64,bf16,2,12.5\n"
    b"norm,b=1 s=16 m=64,bf16,3,\n"
)
LOADS = (b"# tokens\n1,2,3,4,5,6,7,8\n", b"1,2,3,4,5,6,7,8\n" * 3)
LOADS_JSON = (b"[1, 2, 3, 4, 5, 6, 7, 8]", b"[%s]" % b",".join([b"[1, 2, 3, 4, 5, 6, 7, 0.5]"] * 3))
REQUESTS = b"count,context_length,new_tokens\n4,4096,1\n1,128,16\n"
MEASURED = (
    b"source,row,hardware,quantity,measured,model,tp,layers\nmine,1,h100-sxm,step_s,12.5,gpt2,2,4\n"
)
ARGUMENTS = (
    b"show\ngpt2\n--tp\n2\n--layers\n2\n--seq-length\n16\n--json",
    b"show\nllama3.1-8b\n--pp\n2\n--layers-per-stage\n1,1\n--layers\n2\n--schedule-picture",
    b"generate\ngpt2\n--layers\n1\n--seq-length\n8\n--dp\n2\n-o\nout\n--ranks\n0-1\n--force",
    b"verify\nout\n--json\n--strict", b"inspect\nout/workload.0.et\n--nodes\n0-3",
    b"diff\nout\nout",
    b"models\n--json", b"--help", b"generate\n--config\nrun.yaml\n-o\nout2\n--format\njson",
)  # fmt: skip


@cache
def _traces() -> dict[str, bytes]:
    from handmade import generated

    with tempfile.TemporaryDirectory() as place:
        folder = generated(Path(place) / "w", tp=2, pp=2, layers=2, dp=1)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@cache
def _bundled() -> bytes:
    import stagewright as sw

    toy: dict[str, Any] = {"model": "gpt2", "layers": 2, "seq_length": 16, "vocab": 64}
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/run.bundle"
        sw.generate(sw.compile(sw.Run(**toy, tp=2, pp=2)), path, format="bundle")
        return Path(path).read_bytes()


@cache
def _recorded() -> bytes:
    """The manifest of a run."""
    import stagewright as sw

    toy: dict[str, Any] = {"model": "gpt2", "layers": 2, "seq_length": 16, "vocab": 64}
    with tempfile.TemporaryDirectory() as place:
        sw.generate(sw.compile(sw.Run(**toy, tp=2, pp=2)), Path(place) / "w")
        return (Path(place) / "w" / "manifest.json").read_bytes()


def _beside(folder: Path) -> None:
    for name, content in _traces().items():
        if name != "manifest.json":
            (folder / name).write_bytes(content)


def _with_manifest(folder: Path) -> None:
    import stagewright as sw

    toy: dict[str, Any] = {"model": "gpt2", "layers": 2, "seq_length": 16, "vocab": 64}
    sw.generate(sw.compile(sw.Run(**toy, tp=2, pp=2)), folder, force=True)


def _bomb(levels: int) -> bytes:
    """Billion laughs: each level has the one before nine times."""
    rows = ["a0: &a0 [x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)
    ]
    return "\n".join(rows).encode()


def _merge_bomb(levels: int) -> bytes:
    rows = ["a0: &a0 {x: 1}"] + [
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)
    ]
    return "\n".join(rows).encode()


NOT_TEXT = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x1f\x8b\x08",
    bytes(range(256)),
    b"\n" * 9999,
)
DEEP_JSON = (b"[" * 200_000, b'{"a":' * 200_000, b"[" * 999 + b"]" * 999, b"9" * 9_000_000)
DEEP_YAML = (b"[" * 20_000, b"{a: " * 20_000, b"- " * 20_000, b"? " * 5000, b"&a " * 9, b"a: *a")

PARSERS = (
    Parser(
        "config.json", "config.json", _config, _configs, json_data,
        (*NOT_TEXT, *DEEP_JSON, b'{"model_type": ["llama"]}', b'{"model_type": "llama"}', b"[]"),
    ),
    Parser("config.json, compiled", "config.json", _config_compiled, _configs, json_data),
    Parser(
        "run.yaml", "run.yaml", _run_file, lambda: RUNS, yaml_data,
        (
            *NOT_TEXT, *DEEP_YAML, _bomb(12), _merge_bomb(9), b"model: gpt2\npp: 2147483648\n",
            b"model: gpt2\npp: 2\nvpp: 2147483648\n", b"model: [gpt2]", b"model: gpt2\n1: 2\n",
            b"stagewright: 1\nrun: {1: 2}\n", b"stagewright: 1\nrun: {model: gpt2, <<: 3}\n",
            "\n".join(f"a{n}: {n}" for n in range(20_000)).encode(),
            b"layers_per_stage: [" + b"1, " * 80_000 + b"1]\nmodel: gpt2\n",
            b"model: gpt2\nlayers_per_stage: " + b"9" * 50_000,
        ),
    ),
    Parser("manifest.json", "manifest.json", _run_file, lambda: [_recorded()], json_data,
           (*NOT_TEXT, *DEEP_JSON)),
    Parser("schedule.csv", "order.csv", _schedule, lambda: [SCHEDULE, TORCH_SCHEDULE], lines,
           (*NOT_TEXT, b"," * 9_000_000, b"0F0," * 1_000_000, b"999999999F999999999\n0F0\n")),
    Parser("hardware.yaml", "mine.yaml", _hardware, _machines, yaml_data,
           (*NOT_TEXT, *DEEP_YAML, _bomb(12), b"sources: [1]", b"base: [1]", b"sources: {1: 2}")),
    Parser("model.stg", "model.stg", _modules, _examples, lines,
           (*NOT_TEXT, b"(" * 100_000, b"module a\n" * 20_000)),
    Parser("strategy table", "table.txt", _strategy, lambda: [STRATEGY], lines,
           (*NOT_TEXT, b"x [" + b"A, " * 50_000 + b"A]", b"x [" + b"(" * 50_000)),
    Parser("durations.csv", "kernels.csv", _durations, lambda: [DURATIONS], lines,
           (*NOT_TEXT, b'"' * 99_999, b"kernel,shape,duration_us\n" + b'a,"' + b"m=1 " * 99_999)),
    Parser("requests.csv", "requests.csv", _requests, lambda: [REQUESTS], lines,
           (*NOT_TEXT, b'"' * 99_999, b"count\n" + b"1\n" * 200_000)),
    Parser("loads.csv", "loads.csv", _loads, lambda: LOADS, lines,
           (*NOT_TEXT, b'"' * 99_999, b"1,2,3,4,5,6,7,8\n" * 500_000, b"1," * 4_000_000)),
    Parser("loads.json", "loads.json", _loads, lambda: LOADS_JSON, json_data,
           (*NOT_TEXT, *DEEP_JSON, b"[[]," * 3_000_000, b'{"0": [1]}', b"[true]", b"[1e999]")),
    Parser("measurements.csv", "mine.csv", _measurements, lambda: [MEASURED], lines,
           (*NOT_TEXT, b'"' * 99_999, MEASURED.replace(b",2,", b"," + b"9" * 5000 + b","))),
    Parser("bundle", "run.bundle", _bundle, lambda: [_bundled()], members,
           (*NOT_TEXT, b"PK\x03\x04", b"PK\x03\x04" + bytes(9999))),
    Parser("one trace", "workload.0.et", _trace, lambda: [_traces()["workload.0.et"]], frames,
           (*NOT_TEXT, b"\x80" * 99, b"\xff" * 9 + b"\x0f", b"\x0a\x0a", b"\x00" * 9999)),
    Parser("traces", "workload.1.et", _world, lambda: [_traces()["workload.1.et"]], frames,
           NOT_TEXT, _beside),
    Parser("groups", "comm_group.json", _world, lambda: [_traces()["comm_group.json"]], json_data,
           (*NOT_TEXT, *DEEP_JSON, b'{"1": [0, 1], "01": [2, 3]}', b"[[]," * 3_000_000), _beside),
    Parser("beside a manifest", "manifest.json", _world, lambda: [_recorded()], json_data,
           (*NOT_TEXT, *DEEP_JSON), _with_manifest),
    Parser("command line", "arguments", _arguments, lambda: ARGUMENTS, lines,
           (b"show\ngpt2\n--pp\n2147483648", b"show\ngpt2\n--vpp\n2147483648\n--pp\n2",
            b"show\n\0", b"verify\n\0", b"generate\ngpt2\n-o\n", b"inspect\n",
            b"show\n" + b"x" * 99999)),
)  # fmt: skip


# ---- running them --------------------------------------------------------------------------------


class TooSlow(BaseException):
    """Nothing that a parser could catch."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow(f"took more than {SECONDS} s of a core, or stood still for {6 * SECONDS} s")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS),)
    timers += ((signal.ITIMER_REAL, signal.SIGALRM, 6 * SECONDS),)
    for timer, number, seconds in timers:
        signal.signal(number, stop)
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)


def attack(parser: Parser, content: bytes, folder: Path) -> str:
    """`read` or `refused`, or how it failed: a traceback."""
    path = folder / parser.file
    path.write_bytes(content)
    try:
        with _limited():
            parser.read(path)
    except UserError as error:
        return "refused" if str(error).strip() else "an error without words"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc(limit=-12)
    return "read"


def examples(parser: Parser, seed: int) -> Iterator[bytes]:
    """The row's own files, then changed ones for ever."""
    dice = random.Random(f"{parser.name} {seed}")
    seeds = list(parser.seeds())
    yield from seeds
    yield from parser.hostile
    while True:
        found = dice.choice(seeds)
        for _ in range(dice.choice((1, 1, 2, 3))):
            with suppress(Exception):  # of a change that cannot be made
                found = parser.mutate(found, dice)
        yield found


def campaign(
    parser: Parser, folder: Path, *, seed: int = 0, most: int | None = None, seconds: float = 1e9
) -> tuple[dict[str, int], list[tuple[bytes, str]]]:
    """How many files were read and refused, and those at which it failed, one of a kind."""
    parser.around(folder)
    counts = {"read": 0, "refused": 0}
    failed: dict[str, tuple[bytes, str]] = {}
    end = time.monotonic() + seconds
    with chdir(folder):  # where command lines write
        for content in itertools.islice(examples(parser, seed), most):
            if time.monotonic() > end:
                break
            said = attack(parser, content, folder)
            if said in counts:
                counts[said] += 1
            else:
                where = "\n".join(row for row in said.splitlines() if row.startswith("  File"))
                failed.setdefault(where, (content, said))
    return counts, list(failed.values())


def covered(parser: Parser, folder: Path, seconds: float) -> None:
    """A campaign of atheris, which looks for files that reach new code; it exits by itself."""
    import atheris  # pyright: ignore

    with atheris.instrument_imports(include=["stagewright"]):
        for module in pkgutil.walk_packages(stagewright.__path__, "stagewright."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    parser.around(folder)
    corpus = folder.parent / "corpus"
    corpus.mkdir()
    for nth, content in enumerate(itertools.islice(examples(parser, 0), 300)):
        (corpus / str(nth)).write_bytes(content[:100_000])

    def one(content: bytes) -> None:
        said = attack(parser, content, folder)
        if said not in ("read", "refused"):
            print(said, flush=True)
            raise RuntimeError(said)

    def mutate(content: bytes, size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        if dice.random() < 0.5:
            return atheris.Mutate(content, size)
        with suppress(Exception):  # of a change that cannot be made
            return parser.mutate(content, dice)[:size]
        return content

    options = [f"-max_total_time={int(seconds)}", "-timeout=60", "-rss_limit_mb=4096"]
    keep = [f"-artifact_prefix={folder.parent}/", "-max_len=100000", "-ignore_crashes=0"]
    atheris.Setup([sys.argv[0], *options, *keep, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """One parser, or all."""
    names = [parser.name for parser in PARSERS]
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("parser", nargs="*", help=f"of {', '.join(names)}; default: all")
    options.add_argument("--seconds", type=float, default=60, help="for each parser")
    options.add_argument("--most", type=int, help="files for each parser")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--coverage", action="store_true", help="by atheris")
    asked = options.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    bad = 0
    for parser in PARSERS:
        if asked.parser and parser.name not in asked.parser:
            continue
        place = Path(tempfile.mkdtemp(prefix="fuzz-"))
        folder = place / "a" / "folder"
        folder.mkdir(parents=True)
        if asked.coverage:
            covered(parser, folder, asked.seconds)
        limits = {"seed": asked.seed, "most": asked.most, "seconds": asked.seconds}
        began = time.monotonic()
        counts, failed = campaign(parser, folder, **limits)
        print(f"{parser.name}: {counts}, {len(failed)} failures, {time.monotonic() - began:.1f} s")
        for nth, (content, said) in enumerate(failed):
            kept = place / f"failed-{nth}"
            kept.write_bytes(content)
            print(f"{kept} ({len(content)} bytes: {content[:100]!r})\n{said}", flush=True)
        bad += len(failed)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
