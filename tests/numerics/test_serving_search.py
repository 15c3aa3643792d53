"""The fewest instances that a search finds are the fewest; what it leaves out could not serve."""

import json
import random
import re
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stagewright as sw
from helpers import cases
from stagewright.api.searched_serving import asked_serving, searched_serving
from stagewright.cli.main import main
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.serving import EngineSection
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.metrics import RequestLimits, RequestTimes, Slo
from stagewright.serving.search import search as searching
from stagewright.serving.search.bounds import LoadTotals, ReadyLayout, layout_bounds
from stagewright.serving.search.load import ServingLoad, simulate_load
from stagewright.serving.search.pairs import LayoutPair, pair_deployment
from stagewright.serving.workload import RequestClass, Workload, with_classes
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
    run = sw.Run(model="llama3.1-8b", mode="decode", layers=2)
    return InstanceGroup.of(run, MODEL, Machine.of(hardware, gpus=1), asked)


def drawn(draw: random.Random) -> Workload:
    count, rate = draw.randint(30, 120), draw.choice((20, 200, 2000))
    at, arrival = 0.0, array("d")
    for _ in range(count):
        arrival.append(at)
        at += draw.expovariate(rate)
    prompt = array("i", (draw.randint(1, 3000) for _ in range(count)))
    return Workload("random", arrival, prompt, array("i", draw.choices(range(1, 60), k=count)))


def test_what_bounds_exclude_misses_the_limits(group: InstanceGroup):
    stopped = bounded = 0
    for seed in range(12):
        draw = random.Random(seed)
        work, share = drawn(draw), draw.choice((0.5, 0.9, 1.0))
        slo = Slo(ttft=draw.choice((0.008, 0.02, 0.5)), tpot=draw.choice((2e-4, 1e-3, 4e-3)))
        load = LoadTotals.of(work, share)
        if seed % 2:
            work = with_classes(work, CLASSES, seed)
        bounds = layout_bounds(group, load, RequestLimits.of(work, slo).loosest)
        for count in (1, 2, 5):
            several = replace(group, settings=replace(group.settings, instances=count))
            whole = several.serve(work, slo).summary
            keeps = whole.good >= share - 1e-9
            meets = keeps and not whole.steadiness.overloaded
            found = simulate_load(Deployment((several,)), ServingLoad(work, load), slo)
            assert found.meets == meets
            assert not found.stopped or not keeps
            assert found.good >= whole.good - 1e-9
            if not found.stopped:
                assert found.summary == whole
            assert not meets or not bounds.reason
            stopped += found.stopped
            bounded += bool(bounds.reason)
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
    of = model_of(model).with_overrides(num_layers=2)
    run = sw.Run(model=model, mode="decode", layers=2, **layout)
    machine = Machine.of(hardware, gpus=layout.get("dp", 1))
    group = InstanceGroup.of(run, of, machine, asked)
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
        assert np.nanmin(times.tpot) > bounds.min_tpot * (1 - 1e-9)
        longest = work.prompt.index(max(work.prompt))
        assert times.ttft[longest] > bounds.min_ttft * (1 - 1e-9)


def test_limits_of_classes_hold_in_place_of_those_of_all(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text("- {name: chat, ttft: 300}\n")
    found = sw.search_serving(
        "llama3.1-8b", "h100-sxm", classes=str(path), ttft="0.001us", tpot=20, rate=20, isl=512,
        osl=8, num_requests=10, layers=1, tp=1, pp=1, gpus=2, pairs=1,
    )  # fmt: skip
    assert {found.ranking.choices[index].prompts for index in found.ranking.best} == {None, 0}


def test_the_answer_is_that_of_simulating_everything(group: InstanceGroup):
    asked = {"rate": 700, "isl": 700, "osl": 30, "num_requests": 400, "layers": 2}
    question = asked_serving(
        {"model": "llama3.1-8b", "ttft": 25, "tpot": 2.5, "tp": 1, "pp": 1, "gpus": 5, **asked},
        hardware=["h100-sxm"],
    )
    work, slo = question.loads[0].workload, question.target.slo
    found = searched_serving(question).ranking
    alone = replace(group, settings=EngineSection())
    several = [replace(alone, settings=EngineSection(instances=count)) for count in range(1, 6)]
    served = [each.serve(work, slo).summary.good >= 0.9 for each in several]
    (cheapest,) = found.aggregated
    assert found.choices[cheapest].simulated.gpus == served.index(True) + 1
    pairs = [each for each in found.choices if each.prompts is not None]
    assert len(pairs) > 1
    for each in pairs:
        if each.simulated.summary.requests > len(work):
            continue  # a winner that was dropped
        whole = each.deployment.serve(work, slo).summary
        assert (whole.good >= 0.9) == each.simulated.meets
        assert each.simulated.stopped or whole.ttft == each.simulated.summary.ttft


LONG = {"hardware": ["h200"], "rate": 10, "isl": 4096, "osl": 512, "ttft": 2000, "tpot": 50}


def test_a_fleet_is_the_same_however_many_requests_are_asked_for():
    """Requests take 20 s: 300 of them come in 30 s, and four instances kept the limits of these."""
    layout = {"tp": 8, "dp": 1, "ep": 8, "etp": 1, "pairs": 0}
    answers = set[str]()
    for count in (300, 1000, 3000):
        found = sw.search_serving("deepseek-v3", num_requests=count, **LONG, **layout)
        answers.add(found.describe().partition(";")[0])
        winner = found.ranking.best[0]
        assert found.ranking.choices[winner].simulated.too_short <= 1
        assert winner in found.ranking.confirmed
        assert found.ranking.choices[winner].simulated.meets
        assert found.ranking.choices[winner].simulated.summary.requests >= 5 * 2000
        smaller = found.ranking.smaller[winner].simulated
        assert smaller.good < 0.9
        assert smaller.binding == "TPOT"
        assert "keep" in found.describe().partition(";")[2]
    assert len(answers) == 1
    four = sw.serve(
        "deepseek-v3", "h200", **{k: v for k, v in LONG.items() if k != "hardware"},
        num_requests=300, instances=4, tp=8, ep=8, etp=1,
    )  # fmt: skip
    assert not four.summary.steadiness.steady


def test_a_winner_that_fails_when_more_come_is_dropped(monkeypatch):
    asked = {"rate": 700, "isl": 700, "osl": 30, "num_requests": 400, "layers": 2}
    asked |= {"ttft": 25, "tpot": 2.5, "tp": 1, "pp": 1, "gpus": 9, "pairs": 0}
    first = sw.search_serving("llama3.1-8b", "h100-sxm", **asked).ranking
    count = first.choices[first.best[0]].deployment.groups[0].settings.instances
    real, much = searching.simulate_load, first.choices[first.best[0]].simulated.summary.requests

    def failing(deployment, load, slo):
        found = real(deployment, load, slo)
        few = deployment.groups[0].settings.instances == count
        return replace(found, meets=False) if few and len(load.workload) >= much else found

    monkeypatch.setattr(searching, "simulate_load", failing)
    found = sw.search_serving("llama3.1-8b", "h100-sxm", **asked)
    of = found.ranking
    (dropped,) = of.dropped
    assert dropped.deployment.groups[0].settings.instances == count
    assert of.choices[of.best[0]].deployment.groups[0].settings.instances == count + 1
    assert any(remark.startswith("dropped: ") for remark in found.to_dict()["remarks"])


def test_settings_of_engines_may_be_lists():
    found = sw.search_serving(
        "llama3.1-8b", "h100-sxm", layers=4, rate=150, isl=900, osl=40, num_requests=150, ttft=60,
        tpot=3, tp=1, pp=1, pairs=0, max_num_batched_tokens="512,4096", kv_cache_dtype="bf16,fp8",
        scheduler=["vllm", "sglang"],
    )  # fmt: skip
    kinds = {each.kind for each in found.ranking.choices}
    tokens = {engines.max_num_batched_tokens for _, engines in kinds}
    assert tokens == {512, 4096}
    assert {engines.scheduler for _, engines in kinds} == {"vllm", "sglang"}
    assert len(kinds) == 8
    for engine in ("vllm", "sglang"):
        rows = [
            row for row, index in enumerate(found.ranking.best, 1)
            if found.ranking.choices[index].deployment.groups[0].settings.scheduler == engine
        ]  # fmt: skip
        if rows:
            (count, line) = found.commands(engine, rows[0])
            assert count.startswith("# ")
            assert "meta-llama" in line
        else:
            with pytest.raises(sw.UserError, match="timed with --scheduler"):
                found.commands(engine)
    with pytest.raises(sw.UserError, match="wanted vllm, sglang or trtllm"):
        found.commands("megatron")


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
    for table in (found["aggregated"], found["disaggregated"]):
        gpus, rates = ([row[name] for row in table] for name in ("GPUs", "tokens/s per user"))
        assert gpus == sorted(gpus)
        assert rates == sorted(rates)
        assert all(row["keep limits"] >= 0.9 for row in table)
    assert sorted(row["#"] for row in (*found["aggregated"], *found["disaggregated"])) == [
        *range(1, 1 + len(found["aggregated"]) + len(found["disaggregated"]))
    ]
    assert len(out[0].read_text().splitlines()) == found["simulated"] + 1
    assert found["answer"] in out[1].read_text()
    for words in (("--concurrency", "1,8", "--tp", "1", *limits), ("--concurrency", "1,8")):
        assert not code(*words, "--tp", "1", "--pp", "1", "--json", "--top", "1", "--as", "vllm")
        found = json.loads(capfd.readouterr().out)
        rates = [row["tokens/s per user"] for row in found["aggregated"]]
        assert rates == sorted(rates)
        assert "vllm serve" in found["flags"][1]


def test_the_answer_is_a_sentence_with_what_an_instance_less_would_keep(capfd):
    words = ("--rate", "1500", "--tp", "1", "--pp", "1", "--ttft", "60", "--tpot", "3")
    assert not code(*words, "--pairs", "0", "--as", "vllm")
    out, err = capfd.readouterr()
    line = next(line for line in err.splitlines() if line.startswith("best: "))
    assert re.fullmatch(
        r"best: [0-9]+ instances of tp=1, [0-9]+ GPUs, [0-9.]+ USD/h; [0-9]+ keeps? [0-9.]+%"
        r"(, overloaded)?, (TTFT|TPOT) binds", line
    )  # fmt: skip
    assert "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 1 " in out
    assert "best: " not in out


def test_limits_that_nothing_keeps(capfd, tmp_path):
    never = ("--rate", "50", "--ttft", "1ms", "--tpot", "3", "--num-requests", "20", "--tp", "1")
    assert code(*never, "--pp", "1", f"-o{tmp_path / 'page.html'}") == 3
    assert "nothing with up to 256 GPUs keeps the limits" in capfd.readouterr().out
    assert "a prompt alone takes longer" in (tmp_path / "page.html").read_text()
    assert code(*never, "--pp", "1", "--run", "1", "--json") == 3
    assert json.loads(capfd.readouterr().out)["removed"]


def test_the_closest_is_ranked_by_shares_that_are_known():
    question = asked_serving(
        {
            "model": "llama3.1-8b", "layers": 4, "gpus": 4, "rate": 300, "isl": 2048, "osl": 64,
            "ttft": 60, "tpot": 3, "num_requests": 300, "pairs": 0,
        },
        hardware=["h100-sxm"],
    )  # fmt: skip
    found = searched_serving(question).ranking
    assert not found.best
    assert found.closest is not None
    assert not found.closest.simulated.stopped
    slo = question.target.slo
    good = [
        each.deployment.serve(question.loads[0].workload, slo).summary.good
        for each in found.choices
    ]
    served = found.closest.deployment.serve(question.loads[0].workload, slo).summary
    assert served.good == max(good)
    assert any(each.simulated.stopped for each in found.choices)


def test_what_was_simulated_until_somebody_stops_it(capfd, tmp_path, monkeypatch):
    runs, real = [], searching.simulate_long_enough

    def stopping(*of):
        if runs:
            raise KeyboardInterrupt
        runs.append(real(*of))
        return runs[-1]

    monkeypatch.setattr(searching, "simulate_long_enough", stopping)
    page = tmp_path / "page.html"
    words = ("--rate", "150", "--tp", "1,2", "--pp", "1", "--ttft", "60", "--tpot", "6")
    assert code(*words, "--num-requests", "50", f"-o{page}") == 130
    out, err = capfd.readouterr()
    assert "stopped: the best of what was simulated until then" in out
    assert "1 of them simulated" in out
    assert "page.html, as far as the search had come" in err
    assert "Stopped: the best of what was simulated until then." in page.read_text()


@cases
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
        prefill, decode = (group.settings.instances for group in each.deployment.groups)
        more = {"prefill_instances": prefill, "instances": decode}
        load["num_requests"] = each.simulated.summary.requests
        whole = sw.serve("llama3.1-8b", "h100-sxm", ttft=60, tpot=3, **more, **load)
        assert whole.summary == each.simulated.summary


@pytest.mark.parametrize("blocks", [600, 15])
def test_pairs_do_not_count_tokens_of_requests_that_wait(group: InstanceGroup, blocks: int):
    """Their prompts are done, but nobody has seen a token: they are not slow yet. Also
    where blocks are few."""
    few = replace(group.settings, num_gpu_blocks=blocks, max_num_seqs=4)
    last = InstanceGroup(group.instance, few)
    many = 40
    work = Workload("at once", *(array(t, [n] * many) for t, n in (("d", 0), ("i", 70), ("i", 40))))
    slo, load = Slo(ttft=2, tpot=4e-3), LoadTotals.of(work, 0.9)
    ready = [
        ReadyLayout(row, each, layout_bounds(each, load, slo))
        for row, each in enumerate((group, last))
    ]
    deployment = pair_deployment(LayoutPair(*ready, (1, 1)), 1, 1)
    found = simulate_load(deployment, ServingLoad(work, load), slo)
    assert found.meets
    assert found.good == 1


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
            assert found["aggregated"][0]["keep limits"] == 0.6


def test_classes_of_requests_are_a_list_of_rows_or_a_file(tmp_path: Path):
    rows = [{"name": "chat", "share": 0.7, "ttft": 50}, {"name": "batch", "share": 0.3}]
    (path := tmp_path / "classes.yaml").write_text(json.dumps(rows))
    asked = {"model": "llama3.1-8b", "ttft": 25, "tpot": 2.5, "rate": 9, "isl": 8, "osl": 8}
    of_list, of_file = (
        asked_serving({**asked, "classes": classes}, hardware=["h100-sxm"]).loads
        for classes in (rows, str(path))
    )
    assert [of.name for of in of_list[0].workload.classes] == ["chat", "batch"]
    assert of_list[0].workload.classes == of_file[0].workload.classes


@pytest.mark.parametrize("specs", [{}, {"memory_gb": 79}])
def test_written_files_serve_as_the_choice_did(specs, tmp_path: Path, capfd):
    """Prompts on one machine and decode on another: the files name both, and all instances."""
    load = {"rate": 100, "isl": 900, "osl": 40, "num_requests": 150, "layers": 4}
    limits = {"ttft": 60, "tpot": 3, "max_num_batched_tokens": 4096, "objective": "cost"}
    systems = ["h100-sxm", "b200"]
    if specs:
        (tmp_path / "mine.yaml").write_text(
            json.dumps({"base": "h100-sxm", "name": "mine"} | specs)
        )
        systems[0] = str(tmp_path / "mine.yaml")
    found = sw.search_serving(
        "llama3.1-8b", systems, tp="1,2", pp=1, gpus=8, pairs=40, **limits, **load
    )
    ranking = found.ranking
    mixed = next(
        each
        for each in ranking.choices
        if each.prompts is not None
        and ranking.rows.hardware(each.prompts) != ranking.rows.hardware(each.layout)
    )
    ranking.choices[:] = [mixed._replace(simulated=replace(mixed.simulated, meets=True))]
    files = found.write(tmp_path / "best.yaml")
    assert str(tmp_path / "best.pools.yaml") in files
    assert "# - {serves: prefill, instances: " in found.run_file()
    words = [f"--{name.replace('_', '-')}={value}" for name, value in load.items()]
    words = [word for word in words if "layers" not in word and "requests" not in word]
    words += [f"--num-requests={mixed.simulated.summary.requests}", "--ttft=60ms", "--tpot=3ms"]
    config = ["--config", str(tmp_path / "best.yaml"), "--pools", str(tmp_path / "best.pools.yaml")]
    with pytest.raises(SystemExit):
        main(["serve", *config, *words, "--json"])
    served = json.loads(capfd.readouterr().out)
    assert served["gpus"] == mixed.simulated.gpus
    assert served["ttft"] == pytest.approx(mixed.simulated.summary.values()["ttft"])
    assert [row["hardware"] for row in served["pools"]] == [
        group.instance.machine.hardware.name for group in mixed.deployment.groups
    ]
