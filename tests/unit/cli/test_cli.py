import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import stagewright as sw
from helpers import Command, Outcome, cases
from stagewright.cli import main as cli
from stagewright.cli import runs
from stagewright.model.presets import PRESETS
from stagewright.run.sections import SETTINGS
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.trace.templates import FORMATS
from stagewright.trace.write import BUNDLE

SMALL = ["gpt2", "--layers", "4", "--seq-length", "64"]


# ---- options are the fields of Run ---------------------------------------------------------------


def plain(annotation: Any) -> Any:
    """The kind of option that a field's type asks for."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return plain(annotation.__origin__)
    return get_origin(annotation) or annotation


def test_options_are_the_fields_of_run():
    fields = {name: plain(of.annotation) for name, of in Run.model_fields.items()}

    assert fields.pop("model") is str
    assert [(setting.name, setting.kind) for setting in SETTINGS.values()] == list(fields.items())


def test_help_names_the_defaults():
    for setting in SETTINGS.values():
        match Run.model_fields[setting.name].default:
            case None:
                continue
            case bool(default):
                word = "on" if default else "off"
            case tuple() as default:
                word = ",".join(default)
            case default:
                word = str(default)
        assert setting.text.endswith(f"[{word}]"), setting.name


def test_every_option_reaches_the_run(monkeypatch: pytest.MonkeyPatch, command: Command):
    seen: list[Run] = []
    monkeypatch.setattr(runs, "compile_run", lambda run, *_: seen.append(run) or 1 / 0)
    settings: dict[str, Any] = {}
    arguments: list[str] = []
    for setting in SETTINGS.values():
        default = Run.model_fields[setting.name].default
        match setting.kind:
            case type() if setting.kind is bool:
                settings[setting.name] = not default
                arguments.append(("--no-" if default else "--") + setting.flag[2:])
                continue
            case type() if setting.kind is int:
                value = 3
            case type() if setting.kind is float:
                value = 0.25
            case type() if setting.kind is str:
                value = "x"
            case type():
                others = {"layers_per_stage": (4, 5), "recompute_save": ("context", "mlpwi")}
                value = others.get(setting.name, ("norm", "activation"))
            case choices:
                value = next(each for each in choices if each != default)
        settings[setting.name] = value
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += [setting.flag, text]
    command("show", "toy", *arguments)

    assert seen == [Run(model="toy", **settings)]


# ---- show and models -----------------------------------------------------------------------------


@cases
def test_a_command_says(
    line: str, code: int, out: tuple[str, ...], err: tuple[str, ...], command: Command
) -> None:
    found = command(line)
    assert found.code == code
    for words, printed in ((out, found.out), (err, found.err)):
        assert all(each in printed for each in words), printed
        assert words or not printed


def test_show_json(command: Command):
    result = command("show", *SMALL, "--tp", "2", "--pp", "2", "--json")
    summary = json.loads(result.out)
    assert summary["world_size"] == 4
    assert [each["ranks"] for each in summary["rank_classes"]] == [[0, 1], [2, 3]]
    assert [each["layers"] for each in summary["rank_classes"]] == [2, 2]
    for each in summary["rank_classes"]:
        assert all(each["flops"][phase] > 0 for phase in ("forward", "backward"))
        assert {row["axis"] for row in each["sends"]} == {"pp"}


def test_a_long_word_is_cut(command: Command):
    for setting in ("--schedule", "--framework", "--hardware"):
        error = command("simulate", "gpt2", setting, "x" * 3000).err
        assert len(error) < 700, setting
    assert len(command("show", "x" * 3000).err) < 700
    assert len(command("show", "gpt2", "--" + "x" * 3000).err) < 700


@pytest.mark.numerics
def test_models_json(command: Command):
    result = command("models", "--json")

    found = json.loads(result.out)
    assert found["llama3.1-70b"]["num_query_groups"] == 8
    assert found["deepseek-v3"]["kind"] == "MoE"
    assert found["deepseek-v3"]["parameters"]["total"] == 671_026_404_352
    assert list(found) == list(PRESETS)


# ---- generate ------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_help_names_the_formats(command: Command):
    text = command("generate", "--help").out
    assert f"{', '.join(FORMATS)}, {BUNDLE} or kineto. [chakra]" in " ".join(text.split())


def test_generate_some_ranks(command: Command, tmp_path: Path):
    out = tmp_path / "traces"
    assert command("generate", *SMALL, "--dp", "4", "--ranks", "0-1,3", "-o", out).code == 0
    assert len(list(out.glob("*.et"))) == 3


@pytest.mark.numerics
def test_a_manifest_repeats_a_simulation_and_files_for_astra_sim(command: Command, tmp_path: Path):
    machine = ("--hardware", "h100-sxm", "--nodes", "2", "--prefetch", "2", "--straggler", "3=1.5")
    asked = (*SMALL, "--zero", "3", *machine, "--no-overlap", "dp")
    first, second = tmp_path / "first", tmp_path / "second"
    assert command("generate", *asked, "--astra-sim", "-o", first).code == 0
    result = command("generate", "--config", first / "manifest.json", "--astra-sim", "-o", second)

    assert (result.code, result.err) == (0, "")
    assert files(first) == files(second)
    again = command("simulate", "--config", first / "manifest.json", "--json")
    assert again == command("simulate", *asked, "--json")
    bundle = tmp_path / "a.bundle"
    assert command("generate", *asked, "--format", "bundle", "-o", bundle).code == 0
    assert command("simulate", "--config", bundle, "--json") == again


def test_nodes_of_a_run_file_are_filled_in_every_command(command: Command, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nlayers: 2\ntp: 2\nseq_length: 64\nnodes: 2\nhardware: h100-sxm\n")
    assert json.loads(command("show", "--config", path, "--json").out)["world_size"] == 16
    assert command("generate", "--config", path, "-o", tmp_path / "out").code == 0
    assert len(list((tmp_path / "out").glob("*.et"))) == 16
    assert sw.load_run(path).dp == 8
    assert sw.compile("gpt2", layers=2, tp=2, hardware="h100-sxm", nodes=2).run.dp == 8
    other = command("show", "--config", path, "--dp", "3")
    assert "nodes 2 means 16 GPUs" in other.err
    path.write_text("model: gpt2\nnodes: 2\n")
    assert "--nodes is for --hardware; add that" in command("show", "--config", path).err


def test_a_manifest_brings_its_model(command: Command, tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA), encoding="utf-8")
    first, second = tmp_path / "first", tmp_path / "second"
    assert command("generate", config, "-o", first).code == 0
    config.unlink()
    result = command("generate", "--config", first / "manifest.json", "-o", second)

    assert (result.code, result.err) == (0, "")
    assert files(first) == files(second)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


# ---- what users get wrong: one line, exit code 2 -------------------------------------------------


@cases
def test_wrong_input_is_one_line(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    for word, names in (("<schedules>", SCHEDULES), ("<commands>", cli.commands.commands)):
        message = message.replace(word, ", ".join(names))

    assert command(*arguments) == Outcome(2, "", f"stagewright: error: {message}\n")
    assert not list(tmp_path.iterdir())


@cases
def test_wrong_input_that_others_find_is_one_line_too(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
):
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)

    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("stagewright: error: ")
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- the ends of a run ---------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def compile(*_: Any) -> None:
        raise error

    monkeypatch.setattr(runs, "compile_run", compile)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, command: Command):
    fail(monkeypatch, KeyboardInterrupt())
    result = command("show", "gpt2")

    assert result.code == 130
    assert result.err.strip() == "stopped; nothing was written"


def test_a_bug_asks_to_be_reported(monkeypatch: pytest.MonkeyPatch, command: Command):
    monkeypatch.delenv("STAGEWRIGHT_DEBUG", raising=False)
    fail(monkeypatch, ValueError("two\nlines"))

    assert command("show", "gpt2") == Outcome(
        1,
        "",
        "stagewright: error: this is a bug, please report it with the command you ran: "
        "ValueError: two lines (STAGEWRIGHT_DEBUG=1 shows where)\n",
    )


def test_a_bug_shows_where_if_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STAGEWRIGHT_DEBUG", "1")
    fail(monkeypatch, ValueError("here"))

    with pytest.raises(ValueError, match="here"):
        cli.main(["show", "gpt2"])


def test_what_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, command: Command):
    fail(monkeypatch, PermissionError(13, "Permission denied", "/x"))

    assert command("show", "gpt2") == Outcome(2, "", "stagewright: error: /x: Permission denied\n")


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, command: Command):
    fail(monkeypatch, MemoryError())

    assert command("show", "gpt2").code == 2


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
    )


@pytest.mark.slow
def test_as_a_module():
    result = shell("-m", "stagewright", "show", "gpt2", "--tp", "5")

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "stagewright: error: tp=5 does not divide the 12 attention heads of gpt2; "
        "use 1, 2, 3, 4, 6 or 12\n"
    )


def test_help_imports_nothing_slow():
    result = shell("-X", "importtime", "-m", "stagewright", "generate", "--help")
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 0
    assert "click" in imported
    assert not imported & {"numpy", "pydantic", "yaml", "rich", "google.protobuf"}


@cases
def test_importing_is_light(code: str):
    code += "; import sys; print({'numpy', 'click'} & set(sys.modules))"
    assert shell("-c", code).stdout == "set()\n"


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.numerics
@cases
def test_tables_fit_80_columns(
    line: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    wide = command(*line).out.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    narrow = command(*line).out.splitlines()

    tables = [n for n, row in enumerate(narrow) if row.startswith("───")]
    assert tables
    for start in tables:
        for row in narrow[start - 1 :]:
            if not row:
                break
            assert len(row) <= 80, row
    words = {word for row in wide for word in row.split() if word[0].isdigit()}
    assert words <= {word for row in narrow for word in row.split()}  # no number is broken


@cases
def test_what_contradicts_itself_is_refused(
    command: Command, options: tuple[str, ...], message: str
):
    assert command("show", *options) == Outcome(2, "", f"stagewright: error: {message}\n")


def test_search_says_on_stderr_what_has_no_flag(command: Command):
    asked = "--gpus 2 --hardware h100-sxm --tp 1 --pp 1 --cp 1 --zero 1 --recompute none"
    asked += " --micro-batch-size 8 --global-batch-size 16 --as torchtitan"
    found = command("search", "gpt2", *asked.split())
    assert found.out.startswith("from recipes import")  # the file alone; the report is on stderr
    assert "# zero=1 has no flag: dp shards parameters, " in found.out
    assert "tokens/s" in found.err
    assert "note: 2 settings have no flag in torchtitan: zero, launch_mode\n" in found.err
    megatron = command("search", "gpt2", *asked.split(), "--framework", "megatron").err
    assert "note: figures are with the habits of Megatron-LM; " in megatron


def test_a_search_without_a_terminal_says_when_it_estimates(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stagewright.searching.search.SMALL", 0)
    settings = "--gpus 2 --tp 1 --pp 1 --cp 1 --zero 1 --recompute none --global-batch-size 16"
    found = command("search", *SMALL, *settings.split(), "--hardware", "h100-sxm", "--workers", "1")
    lines = found.err.splitlines()
    begin = next(n for n, line in enumerate(lines) if "estimating 4 candidates" in line)
    assert lines[begin + 1] == "stagewright: estimated 4 candidates; simulating the best"


def test_a_simulation_names_the_batch_that_it_assumes(command: Command):
    run = ("simulate", *SMALL, "--hardware", "h100-sxm", "--gpus", "4")
    assumed = "global batch 4 sequences, assumed: micro-batch-size 1 x dp 4 x 1 microbatch, the "
    assert command(*run).out.splitlines()[1].startswith(assumed)
    for given in ("4", "8"):
        assert "assumed" not in command(*run, "--global-batch-size", given).out


LOAD = [
    *(*SMALL[:3], "--hardware", "h100-sxm", "--rate", "9"),
    *("--isl", "8", "--osl", "4", "--num-requests", "4"),
]


def test_times_take_units(command: Command):
    load = (*LOAD, "--turns", "2", "--json")
    served = [command("serve", *load, "--think-time", time).out for time in ("2", "2s", "2000ms")]
    assert len({*served}) == 1


def test_a_closed_stdout_is_no_bug():
    run = shlex.join([sys.executable, "-m", "stagewright", "hardware"])
    done = subprocess.run(
        f"{run} >&-; echo $? >&2; {run} | true; echo ${{PIPESTATUS[0]}} >&2",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stderr.split() == ["0", "141"]


def test_no_columns_are_eighty(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "0")
    none = command("hardware").out
    monkeypatch.setenv("COLUMNS", "80")
    assert none == command("hardware").out


# ---- results in Python ---------------------------------------------------------------------------


def test_a_result_prints_what_its_command_prints(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")  # room for all columns
    settings: dict[str, Any] = {"layers": 4, "seq_length": 64, "tp": 2}
    line = (*SMALL, "--tp", "2")
    compiled = sw.compile("gpt2", **settings)
    step = sw.simulate("gpt2", "h100-sxm", **settings)
    for result, words in (
        (compiled, ("show", *line)),
        (step, ("simulate", *line, "--hardware", "h100-sxm")),
    ):
        told, printed = (
            [word for word in text.split() if not word.startswith("─")]
            for text in (str(result), command(*words).out)
        )
        assert told == printed
        assert json.loads(command(*words, "--json").out) == json.loads(json.dumps(result.to_dict()))
        (path,) = result.write(tmp_path / "result.html")
        assert Path(path).read_text().startswith("<!doctype html>")
        with pytest.raises(sw.UserError, match="no table 'task'; wanted"):
            result.table("task")
        with pytest.raises(sw.UserError, match=r"wanted a name that ends in \.json or \.html"):
            result.write("result.txt")
    assert step.fits
    assert step.peak_memory == max(peak.size for peak in step.memory_peaks)
    assert compiled.fits is None
    assert compiled.peak_memory >= step.peak_memory


def test_the_package_lists_public_names_alone():
    assert dir(sw) == [*sw.__all__]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sw.load_run(0),  # pyright: ignore[reportArgumentType]
        lambda: sw.load_run(10**30),  # pyright: ignore[reportArgumentType]
        lambda: sw.compile(7),  # pyright: ignore[reportArgumentType]
        lambda: sw.simulate(None, "h100-sxm"),  # pyright: ignore[reportArgumentType]
        lambda: sw.simulate("gpt2", 3),  # pyright: ignore[reportArgumentType]
        lambda: sw.search(b"gpt2", "h100-sxm", gpus=2),  # pyright: ignore[reportArgumentType]
        lambda: sw.serve("gpt2", None, rate=1),  # pyright: ignore[reportArgumentType]
        lambda: sw.serve(3.5, "h100-sxm", rate=1),  # pyright: ignore[reportArgumentType]
        lambda: sw.report(object()),  # pyright: ignore[reportArgumentType]
        lambda: sw.generate("gpt2", "out"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_values_of_other_types_are_errors_of_the_user(wrong: Callable[[], object]):
    with pytest.raises(sw.UserError, match=r"wanted|known: "):
        wrong()
