"""Nothing executes input, and nothing is written but where it was asked for."""

from __future__ import annotations

import ast
import builtins
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stagewright
from helpers import cases, table_of
from stagewright.check.verify import verify
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.run.settings import Run

pytestmark = pytest.mark.numerics  # every reader with every hostile file

SOURCE = Path(stagewright.__file__).parent

# What no module imports: what runs or unpacks code, starts programs or talks to others.
NO_IMPORTS = {
    *("pickle", "cPickle", "dill", "joblib", "cloudpickle", "marshal", "shelve", "code", "codeop"),
    *("subprocess", "pty", "socket", "urllib", "http", "requests", "ftplib", "smtplib", "xmlrpc"),
    *("ctypes", "cffi", "runpy", "imp", "pydoc", "webbrowser", "tempfile"),
}
ALLOWED = {
    "cli/commands/show.py tempfile",  # the text that a PyTorch module is imported as
    "trace/write.py tempfile",  # ranks of a bundle for those who read files
    "executors.py socket",  # whether a cluster answers at the address given
}
NO_CALLS = {
    *("eval", "exec", "compile", "__import__", "input", "breakpoint"),
    *(f"yaml.{part}{load}" for part in ("unsafe_", "full_", "") for load in ("load", "load_all")),
    *("builtins.eval", "builtins.exec", "numpy.load", "numpy.fromfile"),
    *("np.load", "np.fromregex", "np.genfromtxt", "np.fromfile", "np.loadtxt", "np.memmap"),
    *(f"os.{name}" for name in ("system", "popen", "startfile", "putenv", "chmod", "chown")),
    *(f"os.exec{way}" for way in ("v", "ve", "vp", "l", "lp")),
    *("os.spawnv", "os.spawnl", "os.spawnvp", "os.posix_spawn", "os.posix_spawnp", "os.symlink"),
}
# The only modules that write, rename or remove files.
WRITERS = {"trace/staging.py", "files.py", "views/perfetto.py"}
WRITES = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "rename", "replace", "rmdir", "unlink"),
    *("rmtree", "remove", "touch", "symlink_to", "hardlink_to", "tofile", "savez", "save"),
}
OF_VALUES = {"replace", "remove", "rename", "touch"}  # also what strings, lists and nodes do
# What opens a file, which `files.open_regular` does for all others: pipes and devices never end.
OPENS = {"open", "read_text", "read_bytes"}
OPENERS = {
    "files.py",
    *("trace/staging.py", "views/perfetto.py"),  # to write, or to lock
    *("time/hardware.py", "views/pages/templates.py", "model/presets.py", "model/hf/keys.py"),
    "evidence/rows.py",
}  # and the package's own data


def faults(tree: ast.Module, name: str) -> Iterator[str]:
    """What a module may not do."""
    nodes = list(ast.walk(tree))
    bound = {a.asname or a.name.split(".")[0] for a in nodes if isinstance(a, ast.alias)}
    bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            first = node.module if isinstance(node, ast.ImportFrom) else None
            for module in [first or "", *(alias.name for alias in node.names if not first)]:
                root = module.split(".")[0]
                if root in NO_IMPORTS and f"{name} {root}" not in ALLOWED:
                    yield f"{name}:{node.lineno}: imports {module}"
        elif isinstance(node, ast.Call):
            yield from (f"{name}:{node.lineno}: {fault}" for fault in _call(node, name, bound))


def _call(node: ast.Call, name: str, bound: set[str]) -> Iterator[str]:
    called = ast.unparse(node.func)
    owner, _, method = called.rpartition(".")
    if called in NO_CALLS - bound and not (called == "yaml.load" and "Loader" in ast.unparse(node)):
        yield f"calls {called}"
    if method == "import_module":
        module = node.args[0]
        if not (
            isinstance(module, ast.Constant) or ast.unparse(module).startswith("f'{__name__}.")
        ):
            yield "imports what somebody names"
    files = method not in OF_VALUES or owner in ("os", "shutil", "path", "folder")
    if owner and method in WRITES and files and name not in WRITERS:
        yield f"writes ({called})"
    opens = method in OPENS if owner else method == "open"
    given = "files('stagewright" in called or any(word.arg == "fileobj" for word in node.keywords)
    if opens and name not in OPENERS and not given:
        yield f"opens a file past files.open_regular ({called})"
    words = [*node.args[0 if owner else 1 :], *(k.value for k in node.keywords if k.arg == "mode")]
    modes = {w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)}
    if method == "open" and {*"".join(modes)} & {*"wax+"} and name not in WRITERS:
        yield "opens a file to write"


def test_modules_keep_off():
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += faults(tree, path.relative_to(SOURCE).as_posix())
    assert found == []


@cases
def test_what_is_looked_for_is_found(line: str):
    assert list(faults(ast.parse(line), "module.py"))


def test_safe_loader_only():
    """The one YAML loader is a SafeLoader without ways to make objects."""
    import yaml

    from stagewright import files

    assert issubclass(files._Loader, yaml.SafeLoader)  # pyright: ignore
    plain = set(yaml.SafeLoader.yaml_constructors)
    assert set(files._Loader.yaml_constructors) == plain  # pyright: ignore
    assert hasattr(builtins, "eval")


# ---- where it writes -----------------------------------------------------------------------------

WATCH = """
import json, os, sys
touched = []
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.exec",
           "os.truncate", "os.chmod", "shutil.rmtree", "os.system", "subprocess.Popen")
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        mode, flags = args[1] or "", args[2] or 0
        if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            touched.append(os.path.realpath(os.fsdecode(args[0])))
    elif event in CHANGES:
        paths = [a for a in args[:2] if isinstance(a, (str, bytes))]
        touched.extend(os.path.realpath(os.fsdecode(path)) for path in paths)
sys.dont_write_bytecode = True
sys.addaudithook(hook)
from stagewright.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps([end.code, touched]))
"""


def watched(place: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code, and every path that a command has changed or opened to write."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *arguments],
        cwd=place,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    code, touched = json.loads(done.stdout.splitlines()[-1])
    return code, touched


TOY = ("--layers", "1", "--seq-length", "8", "--vocab", "64", "--tp", "2")


@pytest.mark.slow
def test_output_stays_in_its_directory(tmp_path: Path):
    """Whatever a model is called: `..`, control characters, a path, words of a shell."""
    config = (SOURCE / "data" / "configs" / "llama-3.1-70b.json").read_bytes()
    for nth, name in enumerate(("..", "$(id)", "a\nb\x1b[31m", "%s{0}", "-o", "é\u202e")):
        folder = tmp_path / "models" / str(nth) / (name if name != ".." else "a")
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(config)
        given = str(folder) if name != ".." else f"{folder}/../a/../a"
        for format_ in ("chakra", "json", "dot") if name == ".." else ("chakra",):
            out = tmp_path / f"out-{nth}-{format_}"
            code, touched = watched(
                tmp_path, "generate", given, *TOY, "--format", format_, "-o", str(out)
            )
            assert code == 0
            assert touched
            hidden = str(tmp_path / f".{out.name}.")
            assert [
                path for path in touched if path != str(out) and not path.startswith(hidden)
            ] == []
            assert {path.parent for path in out.rglob("*")} == {out}


@pytest.mark.slow
def test_reading_commands_write_nothing(tmp_path: Path):
    stagewright.generate(compile(Run(model="gpt2", layers=1, seq_length=8, tp=2)), tmp_path / "out")
    for command in (
        ("show", "gpt2", *TOY),
        ("models",),
        ("verify", "out"),
        ("inspect", "out/workload.0.et"),
        ("diff", "out", "out"),
    ):
        assert watched(tmp_path, *command) == (0, [])


def test_force_removes_links_and_not_what_they_lead_to(tmp_path: Path):
    compiled = compile(Run(model="gpt2", layers=1, seq_length=8, vocab=64))
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    stagewright.generate(compiled, out)
    (out / "workload.0.et").unlink()
    (out / "workload.0.et").symlink_to(precious / "thesis.txt")
    (out / "comm_group.json").unlink()
    (out / "comm_group.json").symlink_to(precious)
    stagewright.generate(compiled, out, force=True)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert not any(path.is_symlink() for path in out.iterdir())

    # The directory itself as a link: what it leads to is replaced, and the link is not.
    link = tmp_path / "link"
    link.symlink_to(out)
    stagewright.generate(compiled, link, force=True)
    assert link.is_symlink()
    assert (out / "workload.0.et").is_file()


def test_force_refuses_what_is_not_ours(tmp_path: Path):
    compiled = compile(Run(model="gpt2", layers=1, seq_length=8, vocab=64))
    out = tmp_path / "out"
    stagewright.generate(compiled, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt, which Stagewright did not write"):
        stagewright.generate(compiled, out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    (out / "results").mkdir()
    with pytest.raises(UserError, match="holds results, which Stagewright did not write"):
        stagewright.generate(compiled, out, force=True)
    (out / "results").rmdir()
    stagewright.generate(compiled, out, force=True)
    for text in ("{}", "[", "[" * 100_000, '{"stagewright": 1}'):
        (out / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="remove it yourself"):
            stagewright.generate(compiled, out, force=True)


# ---- what it reads -------------------------------------------------------------------------------

# Each `{}` is a place where there is no regular file, whose name goes on as the command needs.
READERS = table_of("test_safety", "readers")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"stood still for {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("kind", ["named pipe", "device", "directory"])
@pytest.mark.parametrize("how", READERS)
def test_only_regular_files_are_read(
    how: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A named pipe without a writer would be waited for, and `/dev/zero` has no end."""
    from stagewright.cli.main import USER_ERROR, main

    monkeypatch.chdir(tmp_path)
    for ending in ("", ".stg", ".json", ".yaml", ".csv"):
        place = Path(f"x{ending}")
        if kind == "named pipe":
            os.mkfifo(place)
        elif kind == "device":
            place.symlink_to("/dev/zero")
        else:
            place.mkdir()
    words = [word.replace("{}", "x") for word in READERS[how]]
    with within(20), pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("stagewright: error: ")
    assert kind == "directory" or f"Is a {kind}, not a file" in said
    assert not Path("out").exists()


def test_pipes_beside_traces_are_told(tmp_path: Path):
    """Whatever of an output is a pipe: the manifest's checksums are looked at, too."""
    compiled = compile(Run(model="gpt2", layers=1, seq_length=8, tp=2))
    for name in ("workload.1.et", "comm_group.json", "manifest.json"):
        out = tmp_path / name / "out"
        out.parent.mkdir()
        stagewright.generate(compiled, out)
        (out / name).unlink()
        os.mkfifo(out / name)
        with within(20):
            report = verify(out)
        told = {found.code for found in report.findings}
        wanted = {"workload.1.et": "damaged", "comm_group.json": "group-file"}
        assert name not in wanted or wanted[name] in told
        if name != "manifest.json":
            with within(20):
                stagewright.generate(compiled, out, force=True)
            assert verify(out).findings == []


# ---- what it says --------------------------------------------------------------------------------

# Names that a stranger gives: to a terminal, a shell, a page, a drawing.
NAMES = (
    "a\x1b]0;owned\x07\x1b[2Jb", "a\rb\nstagewright: error: c", "$(touch PWNED)", "`touch PWNED`",
    "'\"; touch PWNED; #", "a\u2028b\u202ec\x85d", "</script><img src=x onerror=alert(1)>",
    "[/bold][link=http://x]:smile:", "\udcff", "-- ]]> <!--", "a & b < c", "\x9b31m",
)  # fmt: skip
SOME_NAMES = [  # one in the unit tier, with a newline
    pytest.param(name, marks=() if name == NAMES[1] else pytest.mark.slow) for name in NAMES
]
CONFIG = (SOURCE / "data" / "configs" / "llama-3.1-70b.json").read_bytes()


@pytest.fixture(name="run_it")
def _run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., int]:
    """Runs a command in a folder; what it says is text for any terminal, and it is no bug."""
    from stagewright.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        with pytest.raises(SystemExit) as end:
            main([*words])
        said = capsys.readouterr()
        for line in (said.out + said.err).split("\n"):
            assert line.isprintable(), (words, line)
        assert "this is a bug" not in said.err, (words, said.err)
        return int(end.value.code or 0)

    return run


@pytest.mark.parametrize("name", SOME_NAMES)
def test_names_of_folders_and_files(name: str, run_it: Callable[..., int], tmp_path: Path):
    """A model's folder, an output, a page, a drawing: whatever they are called."""
    safe = name.replace("/", "_")
    (tmp_path / safe).mkdir()
    (tmp_path / safe / "config.json").write_bytes(CONFIG)
    if name == "\udcff":  # a name in another encoding than UTF-8, which no manifest can hold
        assert run_it("show", f"./{safe}", *TOY) == 2
        safe = "named"
        (tmp_path / safe).mkdir()
        (tmp_path / safe / "config.json").write_bytes(CONFIG)
    assert run_it("show", f"./{safe}", *TOY) == 0
    out = f"{name.replace('/', '_')}.out"
    assert run_it("show", f"./{safe}", *TOY, "--json") == 0
    assert run_it("generate", f"./{safe}", *TOY, "-o", f"./{out}") == 0
    assert run_it("generate", f"./{safe}", *TOY, "-o", f"./{out}") == 2
    assert run_it("generate", f"./{safe}", *TOY, "-o", f"./{safe}.b", "--format", "bundle") == 0
    assert run_it("generate", f"./{safe}", *TOY, "-o", f"./{safe}.dot", "--format", "dot") == 0
    assert run_it("verify", f"./{out}") == 0
    assert run_it("inspect", f"./{out}/workload.0.et") == 0
    assert run_it("diff", f"./{out}", f"./{safe}.b") == 0
    assert run_it("show", f"./{safe}.b") == 0
    assert run_it("verify", f"./{safe}.b") == 0
    assert run_it("simulate", f"./{safe}", *TOY, "--hardware", "h100-sxm") == 0
    for page in ("a.html", f"./{safe}.html"):
        assert run_it("report", f"./{safe}", *TOY, "--hardware", "h100-sxm", "-o", page) == 0
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert "<img" not in text
        assert "\x1b" not in text
    for command in ("show", "verify", "inspect", "diff", "expand"):
        run_it(command, f"./{safe}.none", *((f"./{safe}.none",) if command == "diff" else ()))
    for option in ("--strategy", "--schedule", "--config", "--framework", "--recompute"):
        assert run_it("show", "gpt2", option, f"./{safe}.none") == 2


@pytest.mark.parametrize("name", SOME_NAMES)
def test_words_in_files(name: str, run_it: Callable[..., int], tmp_path: Path):
    """Words in run files, models, hardware, tables, requests and manifests."""
    if "\udcff" in name:
        name = "\ud800"
    quoted = json.dumps(name)
    files = {
        "model.yaml": f"model: {quoted}\n",
        "framework.yaml": f"model: gpt2\nframework: {quoted}\n",
        "key.yaml": f"{quoted}: 1\nmodel: gpt2\n",
        "section.yaml": f"model: gpt2\nparallelism: {{{quoted}: 1}}\n",
        "hardware.yaml": f"base: h100-sxm\nname: {quoted}\n",
        "description.yaml": f"base: h100-sxm\ndescription: {quoted}\n",
        "hardware-key.yaml": f"base: h100-sxm\n{quoted}: 1\n",
        "kernels.yaml": f"base: h100-sxm\nattention_kernels: {{{quoted}: 1}}\n",
        "sources.yaml": f"base: h100-sxm\nsources: {{{quoted}: {quoted}}}\n",
        "base.yaml": f"base: {quoted}\n",
    }
    for file, text in files.items():
        (tmp_path / file).write_text(text)
        run_it("show", "--config", file)
        run_it("simulate", "gpt2", *TOY, "--hardware", file)
        code = run_it("report", "gpt2", *TOY, "--hardware", file, "-o", "page.html")
        assert code == 2 or "<img" not in (tmp_path / "page.html").read_text()
        run_it("hardware", file)
    config = json.loads(CONFIG)
    for key in ("_name_or_path", "model_type", "torch_dtype", "hidden_act", "x" + name):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: name}))
        run_it("show", "config.json", *TOY)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    run_it("show", "config.json", *TOY)
    text = name.encode("utf-8", "replace").decode()
    for line in (f"model {text} like gpt2", f"module {text}", f"module a\nparam {text}[M]", text):
        (tmp_path / "mine.stg").write_text(line + "\n")
        run_it("show", "mine.stg")
    for row in (f"{text} [M, F]", f"w_gate [{text}]", text):
        (tmp_path / "rows.txt").write_text(row + "\n")
        run_it("show", "gpt2", "--strategy", "rows.txt")
    for option in ("--schedule", "--requests", "--expert-load", "--durations"):
        (tmp_path / "rows.csv").write_text(f"{text},{text}\n1,{text}\n")
        run_it("show" if option != "--durations" else "generate", "gpt2", option, "rows.csv")


@pytest.mark.parametrize("name", SOME_NAMES)
def test_words_in_a_bundle(name: str, run_it: Callable[..., int], tmp_path: Path):
    """Names of kernels, phases, models in a bundle that a stranger made."""
    import fuzz

    name = name.replace("\udcff", "\ud800")
    compiled = compile(Run(model="gpt2", layers=1, seq_length=8, tp=2))
    stagewright.generate(compiled, tmp_path / "plain", format="bundle")
    members, head = fuzz.unsealed((tmp_path / "plain").read_bytes())
    found = json.loads(members["contents.json"])
    for table in found["tables"]:
        table["names"] = [name + each for each in table["names"]]
        table["ops"] = [name + each for each in table["ops"]]
    found["manifest"]["stagewright"] = name
    found["manifest"]["model"]["name"] = name
    found["manifest"]["mesh"] = {name: 2}
    members["contents.json"] = json.dumps(found).encode()
    (tmp_path / "b").write_bytes(fuzz.sealed(members, head))
    for words in (
        ("show", "b"), ("show", "b", "--json"), ("verify", "b"), ("inspect", "b"),
        ("inspect", "b", "--nodes", "0-9"), ("diff", "b", "plain"), ("expand", "b", "-o", "out"),
        ("expand", "b", "-o", "drawn", "--format", "dot"), ("verify", "out"),
        ("show", "b", "--graph"), ("report", "b", "-o", "page.html"),
        ("generate", "--config", "b", "-o", "again"),
    ):  # fmt: skip
        run_it(*words)
    for page in tmp_path.glob("*.html"):
        assert "<img" not in page.read_text()
    for drawing in tmp_path.glob("drawn/*.dot"):
        assert all(line.isprintable() for line in drawing.read_text().split("\n"))
