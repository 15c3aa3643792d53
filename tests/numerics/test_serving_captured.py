"""The batch of a moment as a run: its step takes as long as the engine's, and has a trace."""

from collections import Counter

import pytest

import stagewright as sw
from stagewright.check.verify import verify
from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.program.columns import TaskKind
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

pytestmark = pytest.mark.numerics


def test_steps_of_a_run_are_runs(tmp_path):
    done = sw.serve("llama3.1-8b", "h100-sxm", layers=2, rate=40, isl=300, osl=60, num_requests=80)
    machine = Machine.of(resolve("h100-sxm"), gpus=1)
    for at in (0.4, 1.0, 1.7):
        found = done.step(at)
        groups = found.run.requests
        assert all(g.context_length + g.new_tokens <= 360 for g in groups)
        assert 0 < simulate(found, machine).seconds < 0.1
    written = sw.generate(done.step(1.0), str(tmp_path / "trace"))
    assert written
    with pytest.raises(UserError, match="runs no step"):
        done.step(-1.0)
    with pytest.raises(sw.UserError, match="wanted seconds since the run began"):
        done.step(float("inf"))


def test_an_idle_engine_has_the_step_that_it_ran_last():
    done = sw.serve("llama3.1-8b", "h100-sxm", layers=2, rate=5, isl=300, osl=60, num_requests=1)
    for at in (done.outcome.records.finish[0] - 1e-6, 1e3):
        (group,) = done.step(at).run.requests
        assert (group.context_length, group.new_tokens) == (300 + 58, 1)


def test_a_moment_without_requests_has_the_step_before_it():
    """Not one of a decode that goes on without end."""
    done = sw.serve(
        "llama3-8b", "h100-sxm", layers=2, rate=1, isl=100, osl=4, num_requests=3,
        arrival="constant",
    )  # fmt: skip
    for at in (0.5, 10):
        (group,) = done.step(at).run.requests
        assert (group.context_length, group.new_tokens) == (102, 1)
    first, second = done.outcome.records.first[1], done.outcome.records.finish[1]
    for share, tokens in ((0.1, 100), (0.5, 101), (0.9, 102)):
        (group,) = done.step(first + share * (second - first)).run.requests
        assert group.context_length == tokens


LOAD = {"layers": 2, "isl": 1500, "osl": 30, "num_requests": 60}


def sent(step) -> tuple[Counter, Counter]:
    """Bytes that ranks send, and that they receive, by the pair of ranks; of caches only."""
    found = Counter(), Counter()
    program = step.program
    for each in program.classes:
        tasks = each.tasks
        for way, kind in enumerate((TaskKind.SEND, TaskKind.RECV)):
            rows = (tasks.kind == kind).nonzero()[0]
            for row in rows.tolist():
                if ".cache." in tasks.names[tasks.name[row]]:
                    whom = program.peer_of(int(tasks.slot[row]), each.ranks)
                    for rank, other in zip(each.ranks.tolist(), whom.tolist(), strict=True):
                        pair = (rank, other) if way == 0 else (other, rank)
                        found[way][pair] += int(tasks.comm_bytes[row])
    return found


def test_a_step_of_pools_has_the_caches_that_are_on_their_way(tmp_path):
    done = sw.serve(
        "llama3.1-8b", "h100-sxm", **LOAD, rate=60, prefill_instances=2, instances=2,
        prefill="tp=2,pp=2", tp=4,
    )  # fmt: skip
    way, size = done.outcome.handover, done.group.instance.cache.block_size
    for request in (5, 58):
        at = (way.begins[request] + way.arrives[request]) / 2
        ends = way.engine[request], done.outcome.records.engine[request]
        for instance in ends:
            step = done.step(at, instance=instance)
            sends, receives = sent(step)
            assert sends == receives
            assert {rank for pair in sends for rank in pair} <= set(range(8))
            assert all(a < 4 <= b for a, b in sends)
            tokens = round(way.bytes[request] / (sum(sends.values()) / (-(-1500 // size) * size)))
            assert abs(tokens - 1500) < size
    manifest = sw.generate(step, str(tmp_path / "step"))
    assert {"messages", "partners"} <= {*manifest["checks"]["passed"]}
    assert sw.simulate(step, "h100-sxm").seconds > 0
    quiet = way.arrives[0] - 1e-3 + 60
    alone = done.step(quiet, instance=3)
    assert alone.program.mesh.world_size == 4
    with pytest.raises(UserError, match="wanted one of 0 to 3"):
        done.step(1.0, instance=4)


def test_a_cache_of_windows_only_is_on_its_way():
    done = sw.serve(
        "mistral-7b-v0.1", "h100-sxm", layers=1, rate=20, isl=4992, osl=2, num_requests=3,
        prefill_instances=1, instances=1,
    )  # fmt: skip
    way = done.outcome.handover
    sends, receives = sent(done.step((way.begins[2] + way.arrives[2]) / 2))
    assert sends == receives
    assert sum(sends.values()) == way.bytes[2]


@pytest.mark.parametrize("part", ["layer", "chunk"])
def test_parts_of_caches_leave_while_prompts_are_computed(part, tmp_path):
    done = sw.serve(
        "llama3.1-8b", "h100-sxm", layers=2, tp=2, rate=20, isl=5000, osl=2, num_requests=2,
        prefill_instances=1, instances=1, max_num_batched_tokens=2048, kv_transfer=part,
    )  # fmt: skip
    way = done.outcome.handover
    assert [push.tokens for push in way.pushes if push.request == 1] == [2048, 2048, 904]
    push = [push for push in way.pushes if push.request == 1][1]
    step = done.step((push.begins + (push.step_end if part == "layer" else push.arrives)) / 2)
    assert sent(step)[0] == sent(step)[1]
    for of in step.program.classes:
        tasks = of.tasks
        names = [tasks.names[n] for n in tasks.name]
        sends = [n for n, name in enumerate(names) if name.endswith("cache.send")]
        needs = [tasks.data[tasks.data_ptr[n] : tasks.data_ptr[n + 1]] for n in sends]
        if part == "chunk":
            assert sends == [*range(len(sends))]
            assert not any(map(len, needs))
            continue
        for n, rows in zip(sends, needs, strict=True):
            assert len(rows)
            assert all(tasks.layer[row] == tasks.layer[n] for row in rows)
            assert any(tasks.layer[row] == tasks.layer[n] + 1 for row in range(n, len(names))) or (
                tasks.layer[n] == 1
            )
    assert sw.simulate(step, "h100-sxm").seconds > 0
    sw.generate(step, str(tmp_path / "step"))
    assert {found.code for found in verify(tmp_path / "step").findings} <= {"order-left-to-timing"}
    with pytest.raises(UserError, match="is a manifest without a run"):
        sw.load_run(tmp_path / "step" / "manifest.json")


@pytest.mark.parametrize(("model", "layers"), [("gemma3-27b", 6), ("mistral-7b-v0.1", 2)])
def test_windows_are_on_their_way_with_the_last_part_of_a_prompt(model, layers):
    done = sw.serve(
        model, "h100-sxm", layers=layers, rate=20, isl=9008, osl=2, num_requests=1,
        prefill_instances=1, instances=1, max_num_batched_tokens=4096, kv_transfer="chunk",
    )  # fmt: skip
    way = done.outcome.handover
    seen = []
    for push in way.pushes:
        step = done.step((push.begins + push.arrives) / 2)
        sends, receives = sent(step)
        assert sends == receives
        seen.append(sum(sends.values()))
    assert [push.last for push in way.pushes] == [False, False, True]
    assert seen[0] == seen[1]
    assert sum(seen) == way.bytes[0]
    growing = {"gemma3-27b": 4096 * 2 * 16 * 128 * 2, "mistral-7b-v0.1": 0}
    assert seen[0] == growing[model]


def test_steps_of_mixed_instances_and_of_priorities():
    pools = [{"instances": 1, "tp": 2}, {"instances": 2, "tp": 1, "dp": 2}]
    done = sw.serve("llama3.1-8b", "h100-sxm", **LOAD, rate=60, pools=pools)
    assert [done.step(0.5, instance=n).run.tp for n in range(3)] == [2, 1, 1]
    assert done.step(0.5, instance=2).run.dp == 2
    first = sw.serve("llama3.1-8b", "h100-sxm", **LOAD, rate=60, scheduling_policy="priority")
    assert first.step(0.5).run.tp == 1


def test_the_command_writes_a_step(capfd, tmp_path):
    words = ["serve", "llama3.1-8b", "--hardware", "h100-sxm", "--layers", "2", "--rate", "40"]
    words += ["--isl", "300", "--osl", "20", "--num-requests", "30"]

    def code(*more: str):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        return end.value.code

    assert not code("--step-trace", "0.4:0", str(tmp_path / "a"))
    assert (tmp_path / "a" / "manifest.json").exists()
    capfd.readouterr()
    assert code("--step-trace", "0.4:0", str(tmp_path / "a")) == 2
    said = capfd.readouterr()
    assert not said.out
    assert "exists already" in said.err
    assert not code("--step-trace", "0.4:0", str(tmp_path / "a"), "--force")
    capfd.readouterr()
    assert code("--step-trace", "x", str(tmp_path / "b")) == 2
    assert len(capfd.readouterr().err.strip().splitlines()) == 1
    assert code("--step-trace", "0.4:7", str(tmp_path / "b")) == 2
    said = capfd.readouterr()
    assert not said.out  # before anything is served
    assert "instance 7: wanted one of 0 to 0" in said.err


def test_joined_steps_of_two_instances_are_verified_without_a_run_that_makes_them(tmp_path):
    for part in ("prompt", "layer"):
        done = sw.serve(
            "llama3.1-8b", "h100-sxm", layers=2, tp=2, rate=20, isl=5000, osl=2, num_requests=2,
            prefill_instances=1, instances=1, max_num_batched_tokens=2048, kv_transfer=part,
        )  # fmt: skip
        way = done.outcome.handover
        moments = [(push.begins + push.step_end) / 2 for push in way.pushes if push.request == 1]
        moments = moments or [(way.begins[1] + way.arrives[1]) / 2]
        manifest = sw.generate(done.step(moments[0]), str(tmp_path / part))
        assert "run" not in manifest
        assert manifest["decode_run"]["mode"] == "decode"
        report = verify(str(tmp_path / part))
        assert "not-as-made" not in {finding.code for finding in report.findings}
        assert any("without its run" in skipped for skipped in report.skipped)


SERVED = [
    "serve",
    "llama3-8b",
    "--layers",
    "2",
    "--rate",
    "20",
    "--isl",
    "4000",
    "--osl",
    "20",
    "--num-requests",
    "20",
]


def test_a_captured_step_with_what_astra_sim_needs(tmp_path, capsys):
    out = tmp_path / "step"
    main_ends(
        [
            *SERVED,
            "--hardware",
            "h100-sxm",
            "--tp",
            "2",
            "--astra-sim",
            "--step-trace",
            "0.3",
            str(out),
        ]
    )
    assert {"astra-sim.sh", "system.json", "network.yml", "workload.1.et"} <= {
        path.name for path in out.iterdir()
    }
    for words, says in (
        (["--astra-sim"], "add --step-trace S DIR"),
        (
            [
                "--prefill-instances",
                "1",
                "--astra-sim",
                "--step-trace",
                "0.1141",
                str(tmp_path / "b"),
            ],
            "choose another time",
        ),
    ):
        capsys.readouterr()
        main_ends([*SERVED, "--hardware", "h100-sxm", *words], 2)
        assert says in capsys.readouterr().err


def test_estimated_constants_of_hardware_are_noted(capsys):
    for hardware, noted in (("mi300x", True), ("h100-sxm", False)):
        main_ends([*SERVED, "--hardware", hardware])
        assert ("are estimates but for the peaks" in capsys.readouterr().out) == noted


def main_ends(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert (end.value.code or 0) == code
