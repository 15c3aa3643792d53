"""ASTRA-sim: what it said of recorded runs, and the files it is given."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import stagewright as sw
from astra_clock import collective_ns, task_seconds
from helpers import DATA, cases
from stagewright.check import inspect
from stagewright.check.verify import verify
from stagewright.errors import UserError
from stagewright.program.columns import TaskKind
from stagewright.run.sections.execution import Execution
from stagewright.time.astra_sim import (
    OPS,
    AstraSim,
    Dimension,
    adapted,
    configuration_files,
)
from stagewright.time.collectives import collective_seconds
from stagewright.time.hardware import names, resolve
from stagewright.time.network import Machine, placements
from stagewright.time.simulate.timeline import timeline

pytestmark = pytest.mark.numerics  # whole steps, written for another simulator

RECORDED = json.loads((DATA / "astra_sim.json").read_text())
CASES = {case["name"]: case for case in RECORDED["cases"]}
SMALL = {"model": "llama3-8b", "layers": 2, "seq_length": 64}


@pytest.mark.numerics
@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_when_it_does_in_astra_sim(name: str) -> None:
    # What was recorded is of the programs of then: where they change for good, run
    # benchmarks/astra_sim.py --record.
    case = CASES[name]
    program = sw.compile(sw.Run(**case["run"])).program
    dimensions = tuple(Dimension(*each) for each in case["dimensions"])
    implementation = {op: tuple(each) for op, each in case["implementation"].items()}
    system = AstraSim(dimensions, **RECORDED["machine"], implementation=implementation)
    factors = {int(rank): by for rank, by in case["factors"].items()}
    seconds = task_seconds(program, system)
    line = timeline(program, seconds, Execution(streams="one"), factors)
    recorded = np.array(case["rank_ns"])
    assert line.seconds * 1e9 == pytest.approx(recorded.max(), rel=0.05)
    for lane in line.lanes:
        assert lane.end.max() / 1000 == pytest.approx(recorded[lane.ranks], rel=0.05)


# One collective of 1 MiB after a kernel, minus the kernel; Switch of 8, 400 GiB/s, 936.25 ns, and
# 3350 GB/s of memory: ASTRA-sim 518bd513, congestion-unaware.
ALONE = {  # (how, ranks): all_reduce, all_gather, reduce_scatter, all_to_all
    ("ring", 4): (15664, 12979, 8188, 14962),
    ("ring", 8): (31447, 30271, 16138, 61246),
    ("direct", 2): (6684, 4333, 3581, 3113),
    ("direct", 4): (5462, 4333, 2736, 2502),
    ("direct", 8): (4501, 4333, 2314, 2197),
    ("halvingDoubling", 2): (6216, 4333, 3113, None),
    ("halvingDoubling", 4): (11434, 11098, 5839, None),
    ("halvingDoubling", 8): (15925, 22746, 8143, None),
    ("direct1", 4): (None, None, None, 7486),
    ("direct1", 8): (None, None, None, 15319),
}


@pytest.mark.parametrize(("how", "ranks"), ALONE)
def test_collectives_take_as_long_as_in_astra_sim(how: str, ranks: int) -> None:
    for op, ns in zip(OPS, ALONE[how, ranks], strict=True):
        if ns is None:
            continue
        switch = Dimension("Switch", 8, 400.0, 936.25)
        system = AstraSim((switch,), 900, 3350, {op: (how,)})
        assert collective_ns(system, op, 2**20, np.arange(ranks)[None]) == ns


def test_collectives_of_all_ranks_go_dimension_by_dimension() -> None:
    # Recorded as above; 4 x 2, 400 and 50 GiB/s, 936 and 1000 ns.
    system = AstraSim(
        (Dimension("Switch", 4, 400.0, 936.0), Dimension("Switch", 2, 50.0, 1000.0)), 900, 3350
    )
    world = np.arange(8)[None]
    recorded = {
        "all_reduce": 24703, "all_gather": 41853, "reduce_scatter": 12766, "all_to_all": 26747
    }  # fmt: skip
    assert {op: collective_ns(system, op, 2**20, world) for op in OPS} == recorded
    # A smaller group is one ring; a link is charged in the first dimension in which it differs.
    apart, mixed = np.array([[0, 4]]), np.array([[0, 1, 4, 5]])
    assert collective_ns(system, "all_reduce", 2**20, apart) == 24028
    assert collective_ns(system, "all_reduce", 2**20, mixed) == 15664


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("whole", [False, True])
def test_files_for_all_hardware(name: str, whole: bool) -> None:
    # The rules that ASTRA-sim's sources make: what breaks one aborts, hangs, or is silently wrong.
    hardware = resolve(name)
    gpus = 4 * hardware.scale_up.gpus if whole else 2
    machine = Machine.of(hardware, gpus=gpus)
    system = AstraSim.of(machine)
    network = yaml.safe_load(system.network_yml())
    assert set(network) == {"topology", "npus_count", "bandwidth", "latency"}
    dimensions = len(network["topology"])
    assert all(len(each) == dimensions for each in network.values())
    assert np.prod(network["npus_count"]) == gpus
    assert min(network["npus_count"]) > 1
    assert min(network["bandwidth"]) > 0 <= min(network["latency"])
    settings = json.loads(system.system_json())
    for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert len(settings[f"{op}-implementation"]) == dimensions
    assert settings["scheduling-policy"] in ("LIFO", "FIFO")
    assert settings["preferred-dataset-splits"] >= 1
    assert settings["active-chunks-per-dimension"] == 1
    assert settings["collective-optimization"] in ("localBWAware", "baseline")
    assert settings["roofline-enabled"] == 1
    assert 0 < settings["local-mem-bw"] <= machine.hardware.memory_bandwidth_gb_s
    assert 0 < settings["peak-perf"] <= machine.hardware.peak_bf16_tflops


def test_an_all_reduce_takes_as_long_as_on_the_machine() -> None:
    machine = Machine.of(resolve("h100-sxm"), gpus=8, algorithm="ring")
    system = AstraSim.of(machine)
    everyone = np.arange(8)[None]
    for size in (2**27, 2**30):
        ours = collective_seconds("all_reduce", size, placements(machine, everyone)[0], machine)
        theirs = collective_ns(system, "all_reduce", size, everyone) * 1e-9
        # Theirs also adds what it reduces, from memory, after each step.
        adding = 7 * 3 * size / 8 / (system.memory_gb_s * 1e9)
        assert theirs - adding == pytest.approx(ours, rel=0.05)


HOSTILE = (
    "x\ntouch PWNED\n#", "x\r\ntouch PWNED", "$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '",
    '"; touch PWNED; "', "x\\", "%s {0} {ranks}", "a\u2028touch PWNED", "EOF\ntouch PWNED",
    "\x1b[2J", "</script>", "[/bold]",
)  # fmt: skip


@pytest.mark.numerics
@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_others_run_nothing(name: str, tmp_path: Path) -> None:
    """Neither the name of a hardware, which may be refused, nor that of the directory."""
    out = tmp_path / name.replace("/", "-")
    compiled = sw.compile(sw.Run(**SMALL, tp=2))
    (tmp_path / "mine.yaml").write_text(json.dumps({"base": "h100-sxm", "name": name}))
    if name.isprintable():
        sw.generate(compiled, str(out), astra_sim=str(tmp_path / "mine.yaml"))
    else:
        with pytest.raises(UserError, match=r"name is .* not printable; wanted one line of text"):
            sw.generate(compiled, str(out), astra_sim=str(tmp_path / "mine.yaml"))
        sw.generate(compiled, str(out), astra_sim="h100-sxm")
    (out / "sim").mkdir()
    program = fake(out / "sim" / "sim", 2)
    for where, script, simulator in (
        (tmp_path, f"{out.name}/astra-sim.sh", f"{out.name}/sim/sim"),
        (out, "astra-sim.sh", "./sim/sim"),
        (tmp_path, str(out / "astra-sim.sh"), str(program)),
    ):
        done = subprocess.run(
            ["sh", script, simulator], cwd=where, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert not [*tmp_path.rglob("PWNED")]


def test_force_replaces_what_a_run_has_left(tmp_path: Path) -> None:
    compiled, out = sw.compile(sw.Run(**SMALL, tp=2)), tmp_path / "out"
    sw.generate(compiled, str(out), astra_sim="h100-sxm")
    subprocess.run(["sh", out / "astra-sim.sh", fake(tmp_path / "sim", 2)], check=True)
    (out / "log").mkdir()
    for name in ("log.log", "err.log", "log.1.log"):
        (out / "log" / name).touch()
    sw.generate(compiled, str(out), astra_sim="h100-sxm", force=True)
    assert not (out / "log").exists()
    (out / "log").mkdir()
    (out / "log" / "mine.txt").touch()
    with pytest.raises(UserError, match="holds log, which Stagewright did not write"):
        sw.generate(compiled, str(out), force=True)
    (out / "log" / "mine.txt").unlink()
    sw.generate(compiled, str(out), force=True)
    (out / "astra-sim.log").touch()
    with pytest.raises(UserError, match=r"holds astra-sim\.log"):  # of traces without the script
        sw.generate(compiled, str(out), force=True)


def test_first_kernels_take_a_nanosecond(tmp_path: Path) -> None:
    run = {"model": "llama3-8b", "layers": 4, "seq_length": 64, "pp": 2, "dp": 16, "zero": 3}
    compiled = sw.compile(sw.Run(**run, framework="torchtitan"))
    sw.generate(compiled, str(tmp_path / "plain"))
    assert [found.code for found in verify(tmp_path / "plain").findings] == ["short-first"]
    for hardware in ("h100-sxm", "b200"):
        sw.generate(compiled, str(tmp_path / "out"), astra_sim=hardware, force=True)
        report = verify(tmp_path / "out")
        assert report.findings == []
        assert "made again from the manifest's run" in report.checks
        entry = json.loads((tmp_path / "out" / "manifest.json").read_text())["astra_sim"]
        assert entry["least_bytes"] >= resolve(hardware).memory_bandwidth_gb_s
        nodes = [*inspect.nodes(tmp_path / "out" / "workload.16.et", 0, 3)]
        first = next(node for node in nodes if node["type"] == "comp")
        assert int(first["attributes"]["tensor_size"]["value"]) == entry["least_bytes"]


def test_host_memory_for_offloaded_tensors() -> None:
    run = sw.Run(**SMALL, tp=2, cpu_offloading_num_layers=1)
    memory = json.loads(configuration_files(run, "h100-sxm")["remote_memory.json"])
    assert memory["memory-type"] == "PER_NPU_MEMORY_EXPANSION"
    assert memory["remote-mem-bw"] == round(resolve("h100-sxm").host_bandwidth_gb_s)
    assert memory["remote-mem-latency"] > 0


def test_collectives_that_rendezvous_cannot_count_are_told() -> None:
    compiled = sw.compile("llama3-8b", layers=1, seq_length=8, dp=2)
    assert adapted(compiled.program, "h100-sxm")[1]["notes"] == []
    (of,) = compiled.program.classes
    sizes = np.where(of.tasks.kind == TaskKind.COLLECTIVE, 2**31, of.tasks.comm_bytes)
    large = replace(of, work=of.work.with_tasks(replace(of.tasks, comm_bytes=sizes)))
    program = replace(compiled.program, classes=(large,))
    (note,) = adapted(program, "h100-sxm")[1]["notes"]
    assert "--rendezvous-protocol counts bytes in 32 bits" in note
    assert "2,147,483,648 bytes" in note


def test_broadcasts_are_told() -> None:
    compiled = sw.compile("llama3-8b", layers=4, seq_length=8, pp=2, schedule="vocab-1")
    (note,) = adapted(compiled.program, "h100-sxm")[1]["notes"]
    assert "does not simulate broadcasts: up to 4 of a rank" in note


def fake(path: Path, finish: int, exit_code: int = 0) -> Path:
    """A simulator that says that some ranks finish, if it was called with what it needs."""
    path.write_text(
        "#!/bin/sh\n"
        "for name in workload comm-group system network remote-memory; do\n"
        '  case "$*" in *"--$name-configuration="*) ;; *) exit 3 ;; esac\n'
        "done\n"
        "[ -w workload.0.et ] && [ -f comm_group.json ] && [ -f network.yml ] || exit 3\n"
        f'for i in $(seq {finish}); do echo "sys[$i] finished, 12 cycles, exposed"; done\n'
        f"exit {exit_code}\n"
    )
    path.chmod(0o755)
    return path


def test_script_runs_the_traces_and_counts_ranks(tmp_path: Path) -> None:
    """A crash is no rank that did not finish: the congestion-aware backend ends so on some
    networks, and loses lines by chance."""
    sw.generate(sw.compile(sw.Run(**SMALL, tp=2, dp=2)), f"{tmp_path}/out", astra_sim="h100-sxm")
    script = tmp_path / "out" / "astra-sim.sh"

    def ended(program: Path | str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", script, program], capture_output=True, text=True, check=False)

    for finish, exit_code, code in (
        *((4, 0, 0), (3, 0, 1), (0, 0, 1)),
        *((4, 134, 0), (3, 134, 2), (3, 1, 1)),
    ):
        done = ended(fake(tmp_path / "sim", finish, exit_code))
        assert done.returncode == code, done.stderr
        assert done.stdout.count("finished, 12 cycles") == finish
        assert ("crashed (134) when 3 of 4 ranks" in done.stderr) == (code == 2)
    twice = tmp_path / "twice"
    twice.write_text(
        '#!/bin/sh\nfor i in 0 1 2 2; do echo "sys[$i] finished, 12 cycles, exposed"; done\n'
    )
    twice.chmod(0o755)
    assert "3 of 4 ranks finished" in ended(twice).stderr
    assert ended("no-such-program").returncode == 127
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {"system.json", "network.yml", "remote_memory.json"} <= manifest["files"].keys()


@cases
def test_what_it_cannot_have(run: dict[str, Any], hardware: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        configuration_files(sw.Run(**SMALL, **run), hardware)


def test_halving_that_would_hang_or_abort() -> None:
    half = {"all_reduce": ("halvingDoubling",)}
    system = AstraSim((Dimension("Switch", 8, 400.0, 936.25),), 900, 3350, half)
    with pytest.raises(UserError, match="power of two"):
        collective_ns(system, "all_reduce", 2**20, np.arange(6)[None])
    with pytest.raises(UserError, match="clip_grad"):
        collective_ns(system, "all_reduce", 4, np.arange(4)[None])


@pytest.mark.skipif("ASTRA_SIM" not in os.environ, reason="needs ASTRA_SIM=its analytical binary")
def test_with_astra_sim_itself(tmp_path: Path) -> None:
    compiled = sw.compile(sw.Run(**SMALL, tp=4, pp=2, dp=2))
    sw.generate(compiled, str(tmp_path / "out"), astra_sim="h100-sxm")
    script = tmp_path / "out" / "astra-sim.sh"
    done = subprocess.run(["sh", script, os.environ["ASTRA_SIM"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 16
