"""The README and the pages of docs/ are true: commands run, print what they show, and exist.

`pytest tests/test_documents.py --bless` writes what commands print now into the pages.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import stagewright
from documents import PAGES, ROOT, Block, blessed, blocks, exchanges, printed, same, spoken
from stagewright.cli import main as cli
from stagewright.graph.table import OPS
from stagewright.model.presets import PRESETS
from stagewright.run.experiment import Experiment
from stagewright.run.sections import EXPERIMENT
from stagewright.schedule.schedules import SCHEDULES
from stagewright.time import hardware

DOCS = ROOT / "docs"
WITH_OUTPUT = [page for page in PAGES if blocks(page, "console")]


def name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_OUTPUT, ids=name)
def test_commands_print_what_pages_show(page: Path, tmp_path: Path, request: pytest.FixtureRequest):
    folder = tmp_path / "clone"
    folder.mkdir()
    for shared in ("examples", "src"):
        (folder / shared).symlink_to(ROOT / shared)
    got: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for block in blocks(page, "console"):
        for each in exchanges(block.text):
            wanted[each.command] = each.output
            got[each.command] = printed(each.command, folder)
    if request.config.getoption("--bless"):
        new = {of: wanted[of] if same(got[of], wanted[of]) else got[of] for of in got}
        page.write_text(blessed(page, new), encoding="utf-8")
        return
    for command, output in wanted.items():
        assert same(got[command], output), (
            f"$ {command}\n{got[command]}\n-- where the page has --\n{output}"
        )


SPOKEN = [page for page in PAGES if blocks(page, "python")]
NEEDS = {
    "bundle.md": "stagewright generate palm-540b --tp 8 --pp 64 --dp 2048 --format bundle "
    "-o palm.bundle"
}


@pytest.mark.slow
@pytest.mark.parametrize("page", SPOKEN, ids=name)
def test_python_of_pages_prints_what_they_show(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "here"
    folder.mkdir()
    if page.name in NEEDS:
        printed(NEEDS[page.name], folder)
    monkeypatch.chdir(folder)
    said = spoken(page)
    if request.config.getoption("--bless"):
        text = page.read_text(encoding="utf-8")
        for block, got, told in said:
            before = f"{block.text}```\n\n```text\n"
            text = text.replace(f"{before}{told}```", f"{before}{got}```")
        page.write_text(text, encoding="utf-8")
        return
    for block, got, told in said:
        assert got == (told or ""), block


def runnable(page: Path) -> Iterator[tuple[str, str]]:
    """Files and commands of a page in order: (name, text) of a run file, ("", command line).

    A block of YAML that begins with a comment such as `# run.yaml: why` is a file of that name. A
    command that names a place which only its reader has (`path/to/...`, `~/...`) is left out.
    """
    for block in blocks(page, "bash", "yaml"):
        if block.language == "yaml":
            named = re.match(r"# ([\w-]+\.yaml)\b", block.text)
            if named:
                yield named[1], block.text
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("stagewright ") and not re.search(r"path/to|~/", line):
                yield "", line


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not name for name, _ in runnable(page))], ids=name
)
def test_commands_of_pages_run_in_order(page: Path, tmp_path: Path):
    """As somebody would type them, one after the other in a fresh folder; each ends with 0."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for shared in ("examples", "src"):
        (folder / shared).symlink_to(ROOT / shared)
    for file, text in runnable(page):
        if file:
            (folder / file).write_text(text, encoding="utf-8")
            continue
        output = printed(f"({text}) >/dev/null && echo done", folder)
        assert output.splitlines()[-1:] == ["done"], f"$ {text}\n{output}"


def test_the_tour_is_as_long_as_it_says():
    text = "".join(block.text for block in blocks(DOCS / "internals/tour.md", "python"))
    assert 250 < sum(bool(line.strip()) for line in text.splitlines()) < 350


def test_every_block_of_the_readme_is_run():
    """By the test above, or by `.ci/run`, which reads those with a mark."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for block in blocks(ROOT / "README.md"):
        if block.language == "console":
            continue
        assert block.language == "bash", block
        assert f"run {block.mark.removeprefix('ci: ')}" in script, block


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) < 900  # three minutes at 300 a minute


# ---- what is named exists ------------------------------------------------------------------------


def commands(block: Block) -> list[str]:
    """Command lines of ours in a block: continued ones put together, without what is piped."""
    text = block.text.replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ").strip() for line in text.splitlines()]
    found = [re.split(r"[|>;]| && |  #", line)[0] for line in lines]
    return [line.strip() for line in found if re.match(r"(\S*/)?stagewright ", line)]


def understood(line: str) -> None:
    """Raise if the command line does not know a word of this."""
    words = [word for word in shlex.split(line)[1:] if word != "..."]
    if words[0].startswith("-"):
        cli.commands.make_context("stagewright", words, resilient_parsing=True)
        return
    cli.commands.commands[words[0]].make_context(words[0], words[1:])


BLOCKS = [b for page in PAGES for b in blocks(page, "bash", "console", "") if commands(b)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_of_pages_are_understood(block: Block):
    for line in commands(block):
        if "$" in line:
            continue  # variables of a loop that is run, above
        understood(line)


ELSEWHERE = {
    "--rendezvous-protocol",  # ASTRA-sim's
    *(
        "--overlap-grad-reduce",
        "--use-flash-attn",
        "--bf",
        "--fp",
        "--transformer-impl",
    ),  # Megatron-LM's
    *("--cross-entropy-fusion-impl", "--no-create-attention-mask-in-dataloader"),
    "--grad-reduce-in-bf",
    *("--rollout-max-response-len", "--hf-checkpoint"),  # slime's
    *("--data-parallel-size", "--enable-expert-parallel", "--speculative-config"),  # vLLM's
    "--speculative-eagle-topk",  # SGLang's
    *("--bless", "--strict", "--help", "--version"),
    *("--peer", "--seconds", "--most", "--follow-tags", "--search"),  # of scripts
    *("--check", "--only"),  # of tools/record.py
    *("--save-detailed", "--output-details"),  # of clients of vLLM and SGLang
}


def flags() -> set[str]:
    of: set[str] = set()
    for command in cli.commands.commands.values():
        for parameter in command.params:
            of |= {*parameter.opts, *parameter.secondary_opts}
    return of


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_of_pages_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", text)
    named = {flag for part in inline for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)}
    assert named <= flags() | ELSEWHERE


THEIRS = {"token_dispatcher.py", "vllm/v1/attention/backends/mla/common.py"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_of_pages_exist(page: Path):
    """They are named as in the package, or by their path in the repository."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`([\w./-]+\.py)(?:[:;][^`]*)?`", text):
        if path in THEIRS:
            continue
        assert (ROOT / path).exists() or (ROOT / "src/stagewright" / path).exists(), path


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page, "yaml") if "model:" in b.text], ids=str
)
def test_run_files_of_pages_are_run_files(block: Block):
    Experiment.of(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


# ---- pictures ------------------------------------------------------------------------------------


def module(path: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_pictures_are_current(request: pytest.FixtureRequest):
    for picture, of in module("docs/pictures/draw.py").PICTURES.items():
        file = ROOT / "docs/pictures" / picture
        if request.config.getoption("--bless"):
            file.write_text(of(), encoding="utf-8")
        assert of() == file.read_text(encoding="utf-8"), "run python docs/pictures/draw.py"


# ---- the reference, which Sphinx has made out of the code ----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("cli", list(cli.commands.commands)),
        ("python", [f"## {name}" for name in stagewright.__all__ if not name.startswith("_")]),
        ("settings", [f"`{setting}`" for setting in EXPERIMENT]),
        ("models", [f"`{preset}`" for preset in PRESETS]),
        ("hardware", [f"`{each}`" for each in hardware.names()]),
        ("schedules", [f"## {schedule}" for schedule in SCHEDULES]),
        ("strategies", ["`tp.kv`", "`tp.groups`", "`tp.heads`", "`tp.caches`"]),
        ("ops", [f"| `{op}` |" for op in OPS]),
        ("json", ["`step_seconds`", "`rank_classes[].memory.peak`", "`capacity.fits`"]),
    ],
)
def test_the_reference_has_everything(page: str, names: list[str]):
    text = module("docs/reference.py").PAGES[page]()
    assert [each for each in names if each not in text] == []


@pytest.mark.slow
def test_the_reference_is_current(request: pytest.FixtureRequest):
    reference = module("docs/reference.py")
    if request.config.getoption("--bless"):
        reference.write()
    old = [
        name
        for name, page in reference.PAGES.items()
        if (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8") != page()
    ]
    assert old == [], "run python docs/reference.py"


def test_the_schema_of_run_files_is_current():
    text = (ROOT / "docs/reference/run.schema.json").read_text(encoding="utf-8")
    assert module("docs/reference.py").run_schema() == text, "run python docs/reference.py"


def test_the_reference_has_the_ops_of_texts():
    page = module("docs/reference.py")._ops_of_texts()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert {"einsum", "act", "attention", "pscan"} <= listed
    assert not {name for name in listed if name.endswith("_bwd")}
    assert "| `norm` |  | `fn`: one of rmsnorm, layernorm [rmsnorm] |" in page
    assert "| `act` | `fn`: one of gelu" in page


@pytest.mark.slow
def test_the_reference_has_every_weight_that_a_degree_splits():
    reference = module("docs/reference.py")
    page = reference.PAGES["strategies"]()
    weights = {name for name, _ in reference.declared(PRESETS)}
    assert {"wq", "wk", "w_down", "we_up", "wte", "mamba2.w_out"} <= weights
    assert sorted(name for name in weights if f"`{name}`" not in page) == []


def test_every_page_is_in_the_contents():
    """All but the steps of a release, to which CONTRIBUTING.md leads; each is listed once."""
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES if DOCS in page.parents}
    contents = [block for block in blocks(DOCS / "index.md") if block.language == "{toctree}"]
    lines = [line for block in contents for line in block.text.splitlines()]
    listed = [line for line in lines if line and not line.startswith((":", "reference/"))]
    assert sorted(listed) == sorted(pages - {"index", "release"})


SOURCES = [DOCS / "internals", DOCS / "release.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_of_users_name_no_source_file(page: Path):
    if any(place == page or place in page.parents for place in SOURCES):
        return
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([\w./-]+\.py)(?:[:;][^`]*)?`", text)
    assert [path for path in named if (ROOT / "src/stagewright" / path).exists()] == []
    assert [path for path in named if path.startswith(("src/", "tests/"))] == []


def test_every_page_has_one_title():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page
