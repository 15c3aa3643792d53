"""Steps of random batches from the tables of serving, beside each of them simulated alone."""

import json
import random
from dataclasses import replace

import pytest

from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve as model_of
from stagewright.run.lengths import Group
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving.engines import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.batch import BatchPlan, DecodeRun, series_sum, steps_to_reach
from stagewright.serving.host import HostTimes
from stagewright.serving.instance import drafted_times, kv_capacity
from stagewright.serving.speculative import drafter_of, mtp_of
from stagewright.serving.steps.step_table import BatchSums
from stagewright.serving.steps.step_times import batch_run, step_times
from stagewright.time.hardware import resolve
from stagewright.time.network import Machine
from stagewright.time.simulate.step import simulate

pytestmark = pytest.mark.numerics


def sums(groups):
    new = sum(g.count * g.new_tokens for g in groups)
    keys = sum(g.count * (g.context_length + g.new_tokens) for g in groups)
    pairs = sum(
        g.count * (g.new_tokens * g.context_length + g.new_tokens * (g.new_tokens + 1) // 2)
        for g in groups
    )
    return new, pairs, keys, sum(g.count for g in groups)


def batch(draw, new=1):
    """Requests that decode, chunks of prompts, or both."""
    kind = draw.choice(("decode", "prompts", "both"))
    decoding, prompts = [], []
    if kind != "prompts":
        longest = draw.choice((100, 1000, 9000))
        decoding = [Group(1, draw.randint(1, longest), new) for _ in range(draw.randint(1, 90))]
    if kind != "decode":
        prompts = [
            Group(1, draw.choice((0, draw.randint(1, 5000))), draw.randint(new + 1, 1500))
            for _ in range(draw.randint(1, 3))
        ]
    return decoding, prompts


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "llama3.1-8b", "layers": 6},
        {"model": "llama3.1-70b", "layers": 5, "tp": 8, "num_speculative_tokens": 2},
        {"model": "llama3.1-8b", "layers": 4, "hardware": "rtx-pro-6000", "engine": "vllm"},
        {
            "model": "llama3.1-8b",
            "layers": 4,
            "hardware": "rtx-pro-6000",
            "engine": "vllm",
            "num_speculative_tokens": 3,
        },
        pytest.param({"model": "gpt-oss-120b", "layers": 6}, marks=pytest.mark.slow),
        pytest.param(
            {"model": "deepseek-v3", "layers": 5, "dp": 8, "ep": 8, "hardware": "h200"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense", "drafts", "one-kernel", "one-kernel-drafts", "windows", "latent"],
)
def test_random_batches_take_as_long_as_simulated(settings):
    settings = dict(settings)
    hardware = settings.pop("hardware", "h100-sxm")
    how = Execution(serving_engine=settings.pop("engine", None))
    run = Run(mode="decode", **settings)
    model = compile(batch_run(run, [Group(run.dp, 100, 1 + run.num_speculative_tokens)])).model
    machine = Machine.of(resolve(hardware), gpus=run.tp * run.dp)
    times = step_times(run, model, machine, how, max_tokens=4096, max_requests=128)

    def simulated(groups):
        every = [Group(g.count * run.dp, g.context_length, g.new_tokens) for g in groups]
        return simulate(compile(batch_run(run, every), model), machine, how).seconds

    draw = random.Random(5)
    for _ in range(6):
        decoding, prompts = batch(draw, 1 + run.num_speculative_tokens)
        groups = decoding + prompts
        wanted = simulated(groups)
        if decoding and prompts and model.kv_lora_rank:
            wanted = min(wanted, simulated(decoding) + simulated(prompts))
        keys = sum(g.context_length + g.new_tokens for g in decoding)
        found = times.step(*sums(groups), len(decoding), keys)
        assert found == pytest.approx(wanted, rel=0.01), groups


def eagle3(path):
    """The config.json of a head for Llama-3.1-8B, as EAGLE-3's authors publish it."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "vocab_size": 128256, "draft_vocab_size": 32000,
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(
    "method",
    [
        "eagle3",
        pytest.param("mtp", marks=pytest.mark.slow),
        pytest.param("draft_model", marks=pytest.mark.slow),
    ],
)
def test_passes_that_draft_take_as_long_as_simulated(method, tmp_path):
    run = Run(mode="decode", model="llama3.1-8b", layers=2, num_speculative_tokens=3)
    model = model_of(run.model).with_overrides(num_layers=2)
    names = {"eagle3": eagle3(tmp_path / "config.json"), "draft_model": "llama3.2-1b"}
    asked = EngineSection(speculative_method=method, speculative_model=names.get(method))
    drafter = drafter_of(asked, run, model)
    machine = Machine.of(resolve("h100-sxm"), gpus=1)
    alone = step_times(run, model, machine, max_tokens=768, max_requests=16)
    blocks, fewer = (kv_capacity(run, model, int(8e9), 768, of) for of in (None, drafter))
    if drafter.head:  # of one layer, beside the two of the model
        assert fewer.bytes_per_token == blocks.bytes_per_token * 3 / 2
        assert fewer.num_blocks < blocks.num_blocks * 2 / 3
    times = drafted_times(alone, drafter, machine)
    # A step of prompts has the logits of one token of each request, as the first pass has.
    prompts = drafter.run.model_copy(update={"mode": "prefill", "num_speculative_tokens": 0})
    later = prompts.model_copy(update={"mode": "decode"})

    def simulated(of, groups, model, launched=None):
        how = Execution(launch_mode=launched)
        return simulate(compile(batch_run(of, groups), model), machine, how).seconds

    for groups, decoding in (
        ([Group(1, 700, 4), Group(1, 90, 4), Group(3, 2000, 4)], 5),
        ([Group(1, 300, 4), Group(1, 512, 700)], 1),
    ):
        more = [replace(g, new_tokens=g.new_tokens + drafter.extra_tokens) for g in groups]
        graph = "cuda_graph" if decoding == 5 else None
        wanted = simulated(prompts, more, drafter.model, graph)
        ends = [Group(g.count, g.context_length + g.new_tokens - 1, 1) for g in more]
        wanted += 2 * simulated(later, ends, drafter.later)
        keys = sum(g.count * (g.context_length + g.new_tokens) for g in groups[: 1 + decoding // 2])
        whole = sums(groups)
        found = times.drafting.step(BatchSums(*whole, decoding, keys))
        assert found == pytest.approx(wanted, rel=0.01), groups
        assert times.step(*whole, decoding, keys) == found + alone.step(*whole, decoding, keys)
        if decoding == whole[3]:
            assert times.linear_run(decoding, keys).seconds == pytest.approx(
                times.decode(decoding, keys)
            )


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "llama4-scout", "nemotron-h-8b", "qwen3.5-397b-a17b"]
)
def test_the_layer_that_predicts_ahead_is_like_the_last_of_several_kinds(name):
    model = model_of(name)
    ahead, last = mtp_of(model), model.layer(model.num_layers - 1)
    assert (ahead.num_layers, ahead.layer(0).mixer, ahead.layer(0).mlp) == (1, last.mixer, last.mlp)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_host_beside_the_gpu_works_beside_drafts_too(ep):
    """Whether or not replicas share experts, the longer of host and all passes counts."""
    run = Run(
        mode="decode", model="qwen3-30b-a3b", layers=1, num_speculative_tokens=2, dp=ep, ep=ep
    )
    model = model_of(run.model).with_overrides(num_layers=1)
    drafter = drafter_of(EngineSection(speculative_method="mtp"), run, model)
    machine = Machine.of(resolve("h100-sxm"), gpus=ep)
    alone = step_times(run, model, machine, max_tokens=512, max_requests=32)
    gpu = drafted_times(alone, drafter, machine)
    n, keys = 16, 16 * 900
    mixed = (n * 3 + 200, n * 3 * 900 + 200 * 100, keys + 200, n + 1, n, keys)
    decode, prompts = gpu.decode(n, keys), gpu.step(*mixed)
    for wait in (0.0, 0.5 * decode, 0.99 * decode, 1.01 * decode, 1.01 * prompts):
        host = HostTimes(per_step=wait, overlaps_gpu=True)
        times = gpu.of_replica(host)
        planned = times.group_runs([BatchPlan(times.linear_run(n, keys), 3 * n, n)], 3 * n)[0]
        assert planned[1] == pytest.approx(max(decode, wait))
        last = planned[1] + min(planned[0] - 1, 900) * planned[2]
        more = gpu.decode(n, keys + n * min(planned[0] - 1, 900))
        assert last == pytest.approx(max(more, wait))
        step = BatchPlan(DecodeRun(1, times.step(*mixed), 0.0), mixed[0], n + 1)
        assert times.group_runs([step], mixed[0])[0].seconds == pytest.approx(max(prompts, wait))
        whole = gpu.with_host(host)
        assert whole.decode(n, keys) == pytest.approx(whole.step(3 * n, 9, keys, n, n, keys))
        assert whole.decode(n, keys) == pytest.approx(max(decode, wait))


def test_runs_of_decode_steps_are_sums_of_steps():
    run = Run(model="llama3.1-8b", layers=2, mode="decode", tp=2)
    machine = Machine.of(resolve("h100-sxm"), gpus=2)
    model = compile(batch_run(run, [Group(1, 100, 1)])).model
    times = step_times(run, model, machine, max_tokens=64, max_requests=64)
    for requests, keys, steps in [(1, 2, 5000), (7, 900, 700), (64, 64000, 333)]:
        each = [times.decode(requests, keys + requests * n) for n in range(steps)]
        total, done = 0.0, 0
        while done < steps:
            linear, seconds, growth = times.linear_run(requests, keys + requests * done)
            count = min(linear, steps - done)
            total += series_sum(seconds, growth, count)
            run = each[done : done + count]
            for share in (0.5, 1 / 3, 2):
                wanted = share * sum(run)
                found = steps_to_reach(seconds, growth, wanted, count)
                enough = [n for n in range(1, count + 1) if sum(run[:n]) >= wanted * (1 + 1e-12)]
                assert found == (enough[0] if enough else count)
            done += count
        assert total == pytest.approx(sum(each), rel=1e-12)


def test_an_engines_host_runs_behind_a_step_or_beside_it():
    run = Run(model="llama3.1-8b", layers=2, mode="decode")
    model = compile(batch_run(run, [Group(1, 100, 1)])).model
    machine = Machine.of(resolve("h100-sxm"), gpus=1)
    alone = step_times(run, model, machine, max_tokens=64, max_requests=64)
    some = (9, 81, 900, 9), (40, 40 * 41 // 2, 40, 1), (48, 5000, 3000, 9, 8, 2900)
    for beside in (False, True):
        host = HostTimes(per_step=0.001, per_request_step=1e-5, overlaps_gpu=beside)
        hosted = alone.with_host(host)
        for batch in some:
            gpu, wait = alone.step(*batch), 0.001 + 1e-5 * batch[3]
            wanted = max(gpu, wait) if beside else gpu + wait
            assert hosted.step(*batch) == pytest.approx(wanted, rel=1e-12)
            n, keys = batch[3], batch[2]
            wanted = max(alone.decode(n, keys), wait) if beside else alone.decode(n, keys) + wait
            assert hosted.decode(n, keys) == pytest.approx(wanted, rel=1e-12)


def test_vllm_has_graphs_of_steps_of_few_tokens():
    run = Run(model="llama3.1-8b", layers=4, mode="prefill", tp=8)
    machine, how = Machine.of(resolve("h100-sxm"), gpus=8), Execution(serving_engine="vllm")
    model = model_of(run.model).with_overrides(num_layers=4)
    times = step_times(run, model, machine, how, max_tokens=2048, max_requests=64)
    for tokens in (256, 512, 513, 900, 2048):
        compiled = compile(batch_run(run, [Group(1, 0, tokens)]))
        wanted = simulate(compiled, machine, how).seconds
        pairs = tokens * (tokens + 1) // 2
        assert times.step(tokens, pairs, tokens, 1) == pytest.approx(wanted, rel=0.02)
    assert times.step(513, 513 * 257, 513, 1) > 1.5 * times.step(512, 256 * 513, 512, 1)


def test_steps_of_a_pipeline_take_as_long_as_simulated():
    run = Run(mode="decode", model="llama3.1-8b", layers=16, pp=2)
    model = model_of(run.model).with_overrides(num_layers=16)
    machine = Machine.of(resolve("h100-sxm"), gpus=2)
    times = step_times(run, model, machine, max_tokens=2048, max_requests=64)
    for decoding, prompts in (
        ([Group(40, 900, 1)], []),
        ([Group(7, 3000, 1)], []),
        ([], [Group(2, 512, 700)]),
        ([Group(40, 900, 1)], [Group(1, 0, 1024)]),
    ):
        groups = decoding + prompts
        wanted = simulate(compile(batch_run(run, groups), model), machine).seconds
        new, pairs, keys, requests = sums(groups)
        found = times.step(new, pairs, keys, requests, *sums(decoding)[3:], sums(decoding)[2])
        assert found == pytest.approx(wanted, rel=0.02), groups


def test_steps_without_a_table_are_refused():
    run = Run(model="llama3.1-8b", layers=2, mode="decode", kv_cache="contiguous")
    with pytest.raises(UserError, match="have no table of times"):
        step_times(run, model_of("llama3.1-8b"), Machine.of(resolve("h100-sxm"), gpus=1))
