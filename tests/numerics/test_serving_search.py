"""The fewest instances that a search finds are the fewest; what it leaves out could not serve."""

import json
import random
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stagewright as sw
from stagewright.api.searched_serving import asked_serving, searched_serving
from stagewright.cli.main import main
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.serving import EngineSection
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.instance import instance
from stagewright.serving.metrics import RequestLimits, RequestTimes, Slo
from stagewright.serving.schedulers.named import batch_limits, scheduler_of
from stagewright.serving.search import answer
from stagewright.serving.search.bounds import LoadTotals, ReadyLayout, layout_bounds
from stagewright.serving.search.pairs import CountTry, LayoutPair, simulate_pair
from stagewright.serving.search.simulated import simulate_load
from stagewright.serving.workload import RequestClass, Workload, in_classes
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

CLASSES = (
    RequestClass(name="chat", ttft=0.005),
    RequestClass(name="batch", ttft=9, tpot=9),
    RequestClass(name="as all"),
)

pytestmark = pytest.mark.numerics
MODEL = model_of("llama3.1-8b").with_overrides(num_layers=2)


@pytest.fixture(scope="module")
def group() -> InstanceGroup:
    hardware, asked = hardware_of("h100-sxm"), EngineSection(num_gpu_blocks=600)
    limits = batch_limits(asked, hardware)
    run = sw.Run(model="llama3.1-8b", mode="decode", layers=2)
    made = instance(run, MODEL, Machine.of(hardware, gpus=1), most_requests=limits.requests)
    return InstanceGroup(made, asked, limits, scheduler_of(asked, limits))


def drawn(draw: random.Random) -> Workload:
    count, rate = draw.randint(30, 120), draw.choice((20, 200, 2000))
    at, arrival = 0.0, array("d")
    for _ in range(count):
        arrival.append(at)
        at += draw.expovariate(rate)
    prompt = array("i", (draw.randint(1, 3000) for _ in range(count)))
    return Workload("random", arrival, prompt, array("i", draw.choices(range(1, 60), k=count)))


def test_the_fewest_instances_are_not_below_the_bound(group: InstanceGroup):
    stopped = bounded = 0
    for seed in range(12):
        draw = random.Random(seed)
        work, share = drawn(draw), draw.choice((0.5, 0.9, 1.0))
        slo = Slo(ttft=draw.choice((0.008, 0.02, 0.5)), tpot=draw.choice((2e-4, 1e-3, 4e-3)))
        load = LoadTotals.of(work, share)
        if seed % 2:
            work = in_classes(work, CLASSES, seed)
        bounds = layout_bounds(group, load, RequestLimits.of(work, slo).loosest)
        for count in (1, 2, 5):
            several = replace(group, engines=replace(group.engines, instances=count))
            whole = several.serve(work, slo).summary
            meets = whole.good >= share - 1e-12
            found = simulate_load(Deployment((several,)), work, load, slo, count).load
            assert found.meets == meets
            if not found.stopped:
                assert found.good == pytest.approx(whole.good)
                assert found.output_rate == pytest.approx(whole.output_rate)
                assert found.ttft.p99 == pytest.approx(whole.ttft.p99)
                assert found.user_rate == pytest.approx(whole.user_rate, nan_ok=True)
            assert not meets or not bounds.why
            assert not meets or count >= bounds.least
            stopped += found.stopped
            bounded += bool(bounds.why) or bounds.least > count
    assert stopped
    assert bounded


ENGINES = {
    "long and short prompts": ("llama3.1-8b", {}, {}),
    "blocks that are shared": ("llama3.1-8b", {}, {"num_gpu_blocks": 600}),
    "drafts": ("llama3.1-8b", {"num_speculative_tokens": 3}, {"acceptance_length": 2.5}),
    "lockstep": (
        "qwen3-30b-a3b",
        {"dp": 2, "ep": 2, "etp": 1},
        {"scheduler": "tensorrt-llm", "async_scheduling": True},
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_played_beats_its_bounds(name):
    hardware, (model, layout, engine) = hardware_of("h100-sxm"), ENGINES[name]
    asked = EngineSection(**engine)
    limits, of = batch_limits(asked, hardware), model_of(model).with_overrides(num_layers=2)
    run = sw.Run(model=model, mode="decode", layers=2, **layout)
    machine = Machine.of(hardware, gpus=layout.get("dp", 1))
    made = instance(run, of, machine, most_tokens=limits.tokens, most_requests=limits.requests)
    group = InstanceGroup(made, asked, limits, scheduler_of(asked, limits))
    for seed in range(8):
        draw = random.Random(seed)
        work = drawn(draw)
        if seed % 2:
            work = replace(work, arrival=array("d", bytes(8 * len(work))))
        if name == "blocks that are shared":
            every = range(len(work))
            chains = [
                ((draw.randint(0, 3), 10 + n), (work.prompt[n] * 15 // 16, 8192)) for n in every
            ]
            work = replace(work, chains=chains)
        load = LoadTotals.of(work, 1.0)
        bounds = layout_bounds(group, load, Slo())
        outcome, _ = Deployment((group,)).run(work)
        times = RequestTimes.of(outcome)
        assert len(times.number) == len(work)
        assert np.nanmin(times.tpot) > bounds.least_tpot * (1 - 1e-9)
        longest = work.prompt.index(max(work.prompt))
        assert times.ttft[longest] > bounds.least_ttft * (1 - 1e-9)
        busy = max(outcome.records.finish) * made.replicas
        assert busy > bounds.per_prompt_token * sum(work.prompt)
        assert busy > bounds.per_token * (sum(work.output) - len(work))


def test_limits_of_classes_hold_in_place_of_those_of_all(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text("- {name: chat, ttft: 300}\n")
    found = sw.search_serving(
        "llama3.1-8b", "h100-sxm", classes=str(path), ttft="0.001us", tpot=20, rate=20, isl=512,
        osl=8, num_requests=10, layers=1, tp=1, pp=1, gpus=2, pairs=1,
    )  # fmt: skip
    assert {found.ranking.choices[nth].prompts for nth in found.ranking.best} == {None, 0}


def test_the_answer_is_that_of_playing_everything(group: InstanceGroup):
    load = {"rate": 700, "isl": 700, "osl": 30, "num_requests": 90, "layers": 2}
    question = asked_serving(
        {"model": "llama3.1-8b", "ttft": 25, "tpot": 1.2, "tp": 1, "pp": 1, "gpus": 5, **load},
        hardware=["h100-sxm"],
    )
    (work,), slo = question.workloads, question.target.slo
    found = searched_serving(question).ranking
    alone = replace(group, engines=EngineSection())
    several = [replace(alone, engines=EngineSection(instances=count)) for count in range(1, 6)]
    served = [each.serve(work, slo).summary.good >= 0.9 for each in several]
    best = [found.choices[nth] for nth in found.best]
    assert [of.simulated.gpus for of in best if of.prompts is None] == [served.index(True) + 1]
    pairs = [of.simulated for of in found.choices if of.prompts is not None]
    assert len(pairs) > 1
    for of in pairs:
        counts = (of.prefill_instances, "prefill"), (of.instances, "decode")
        groups = (replace(several[count - 1], role=role) for count, role in counts)
        whole = Deployment(tuple(groups)).serve(work, slo).summary
        assert (whole.good >= 0.9) == of.meets
        assert of.stopped or whole.ttft == of.ttft


COMMON = ("--serve", "--hardware", "h100-sxm", "--layers", "4", "--isl", "900", "--osl", "40")


def code(*words: str):
    with pytest.raises(SystemExit) as end:
        main(["search", "llama3.1-8b", *COMMON, *words])
    return end.value.code


def test_the_command(capfd, tmp_path):
    limits = ("--ttft", "60", "--tpot", "3", "--num-requests", "150", "--pp", "1")
    out = tmp_path / "all.csv", tmp_path / "page.html"
    assert not code(
        "--rate", "150", "--tp", "1,2", *limits, "--json", *(f"-o{path}" for path in out)
    )
    found = json.loads(capfd.readouterr().out)
    best, gpus = found["best"][0], [each["GPUs"] for each in found["best"]]
    assert gpus == sorted(gpus)
    assert best["keep limits"] >= 0.9
    assert len(out[0].read_text().splitlines()) == found["played"] + 1
    assert "tokens/s per user" in out[1].read_text()
    assert not code("--concurrency", "1,8", "--tp", "1", *limits, "--json")
    front = json.loads(capfd.readouterr().out)["front"]
    assert [each["tokens/s per user"] for each in front] == sorted(
        each["tokens/s per user"] for each in front
    )


def test_limits_that_nothing_keeps(capfd, tmp_path):
    never = ("--rate", "50", "--ttft", "1ms", "--tpot", "3", "--num-requests", "20", "--tp", "1")
    assert code(*never, "--pp", "1", f"-o{tmp_path / 'page.html'}") == 3
    assert "nothing with up to 256 GPUs keeps the limits" in capfd.readouterr().out
    assert "a prompt alone takes longer" in (tmp_path / "page.html").read_text()
    assert code(*never, "--pp", "1", "--run", "1", "--json") == 3
    assert json.loads(capfd.readouterr().out)["removed"]


def test_what_was_played_until_somebody_stops_it(capfd, tmp_path, monkeypatch):
    plays, real = [], answer.simulate_load

    def stopping(*of):
        if plays:
            raise KeyboardInterrupt
        plays.append(real(*of))
        return plays[-1]

    monkeypatch.setattr(answer, "simulate_load", stopping)
    page = tmp_path / "page.html"
    words = ("--rate", "150", "--tp", "1,2", "--pp", "1", "--ttft", "60", "--tpot", "3")
    assert code(*words, "--num-requests", "50", f"-o{page}") == 130
    out, err = capfd.readouterr()
    assert "stopped: the best of what was played until then" in out
    assert "1 were played" in out
    assert "page.html, as far as the search had come" in err
    assert "stopped: the best of what was played until then" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rate", "1"), "give --ttft and --tpot"),
        (("--rate", "1", "--ttft", "9", "--tpot", "9", "--attainment", "2"), "--attainment"),
        (("--rate", "1", "--ttft", "9", "--tpot", "9", "--objective", "mfu"), "gpus or cost"),
        (("--rate", "1", "--ttft", "9", "--tpot", "9", "--batch-size", "3"), "of one step"),
        (("--rate", "1", "--ttft", "9", "--tpot", "9", "--top", "3"), "--top"),
    ],
)
def test_bad_options_are_one_line(capfd, words, says):
    assert code(*words) == 2
    out, err = capfd.readouterr()
    assert not out
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_pairs_of_layouts_are_what_pools_do():
    load = {"rate": 150, "isl": 900, "osl": 40, "num_requests": 120, "layers": 4}
    found = sw.search_serving(
        "llama3.1-8b", "h100-sxm", ttft=60, tpot=3, tp=1, pp=1, pairs=1, objective="cost", **load
    )
    choices = [each for each in found.ranking.choices if each.prompts is not None]
    assert choices
    for each in choices[:2]:
        counts = {
            "instances": each.simulated.instances,
            "prefill_instances": each.simulated.prefill_instances,
        }
        whole = sw.serve("llama3.1-8b", "h100-sxm", ttft=60, tpot=3, **counts, **load)
        assert whole.summary.good == pytest.approx(each.simulated.good)
        assert whole.summary.gpus == each.simulated.gpus


@pytest.mark.parametrize("blocks", [600, 15])
def test_pairs_do_not_count_tokens_of_requests_that_wait(group: InstanceGroup, blocks: int):
    """Their prompts are done, but nobody has seen a token: they are not slow yet. Also
    where blocks are few."""
    few = replace(group.engines, num_gpu_blocks=blocks, max_num_seqs=4)
    limits = batch_limits(few, group.instance.machine.hardware)
    last = InstanceGroup(group.instance, few, limits, scheduler_of(few, limits))
    many = 40
    work = Workload("at once", *(array(t, [n] * many) for t, n in (("d", 0), ("i", 70), ("i", 40))))
    slo, load = Slo(ttft=1, tpot=2e-3), LoadTotals.of(work, 0.9)
    ready = [
        ReadyLayout(row, each, layout_bounds(each, load, slo))
        for row, each in enumerate((group, last))
    ]
    found = simulate_pair(LayoutPair(*ready, (1, 1)), CountTry(1, 1), work, load, slo)
    deployment = Deployment((replace(group, role="prefill"), replace(last, role="decode")))
    assert found.meets
    assert deployment.serve(work, slo).summary.good == found.good == 1


def test_requests_that_never_fit_are_counted(capfd, tmp_path):
    trace = tmp_path / "trace.csv"
    rows = ["0,100,10", "1,100,10", "2,300000,10", "3,100,10", "4,0,10"]
    trace.write_text("\n".join(["arrival,prompt,output", *rows]))
    words = [
        "search",
        "llama3.1-8b",
        "--serve",
        "--hardware",
        "h100-sxm",
        "--layers",
        "2",
        "--json",
    ]
    words += ["--requests", str(trace), "--ttft", "9000", "--tpot", "900", "--tp", "1", "--pp", "1"]
    for share, ended in (("0.9", 3), ("0.6", 0)):
        with pytest.raises(SystemExit) as end:
            main([*words, "--attainment", share])
        out, err = capfd.readouterr()
        assert end.value.code == ended
        assert "1 request rejected: no prompt tokens, or no output tokens; counted as" in err
        found = json.loads(out)
        if ended:
            (why,) = found["removed"]
            assert "an instance can never serve 1 request" in str(why)
        else:
            assert found["best"][0]["keep limits"] == 0.6


def test_classes_of_requests_are_a_list_of_rows_or_a_file(tmp_path: Path):
    rows = [{"name": "chat", "share": 0.7, "ttft": 50}, {"name": "batch", "share": 0.3}]
    (path := tmp_path / "classes.yaml").write_text(json.dumps(rows))
    asked = {"model": "llama3.1-8b", "ttft": 25, "tpot": 1.2, "rate": 9, "isl": 8, "osl": 8}
    of_list, of_file = (
        asked_serving({**asked, "classes": classes}, hardware=["h100-sxm"]).workloads
        for classes in (rows, str(path))
    )
    assert [of.name for of in of_list[0].classes] == ["chat", "batch"]
    assert of_list[0].classes == of_file[0].classes
