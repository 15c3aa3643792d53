"""Command lines of engines have every setting that was timed."""

import random
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import stagewright as sw
from helpers import cases
from stagewright.errors import UserError
from stagewright.model.catalog import resolve as model_of
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.serving import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.batch import StepBatch
from stagewright.serving.command_lines import command_lines
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.engine import Engine
from stagewright.serving.host import HOSTS, HostTimes
from stagewright.serving.schedulers.named import ENGINES
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

MODEL = "qwen3-30b-a3b"
RUN = Run(
    model=MODEL, mode="decode", layers=2, tp=2, dp=2, ep=4, kv_cache_dtype="fp8", kv_block_size=32,
    max_model_len=4096,
)  # fmt: skip


def group(engine: str, **settings: Any) -> InstanceGroup:
    engines = EngineSection(scheduler=ENGINES[engine], max_num_seqs=64, **settings)
    hardware = hardware_of("h200")
    model = model_of(MODEL).with_overrides(num_layers=2)
    return InstanceGroup.of(RUN, model, Machine.of(hardware, gpus=4), engines)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_read_as_the_same_run(engine: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    both = [(2, 2), (4, 2)] if engine != "trtllm" else [(1, 4)]
    tp, dp = draw.choice([(1, 1), (2, 1), (1, 2), *both])
    ep = draw.choice([1, tp * dp])
    run = Run(
        model=MODEL, mode="decode", tp=tp, dp=dp, ep=ep, etp=tp * dp // ep,
        kv_cache_dtype=draw.choice(["fp8", "bf16"]), kv_block_size=draw.choice([16, 64]),
        weight_precision=draw.choice([None, "fp8", "nvfp4", "int4"]), max_model_len=4096,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "scheduler": ENGINES[engine], "max_num_seqs": draw.choice([8, 64]),
        "enable_prefix_caching": draw.random() < 0.5, "async_scheduling": draw.random() < 0.5,
    }  # fmt: skip
    settings |= {
        "vllm": {"max_num_batched_tokens": draw.choice([512, 4096]), "gpu_memory_utilization": 0.8,
                 "scheduling_policy": draw.choice(["fcfs", "priority"])},
        "sglang": {"chunked_prefill_size": draw.choice([512, 4096]), "schedule_policy": "lpm",
                   "scheduler_recv_interval": draw.choice([1, 8]),
                   "schedule_conservativeness": draw.choice([0.5, 1.0])},
        "trtllm": {"max_num_batched_tokens": draw.choice([512, 4096]),
                   "capacity_scheduler_policy": draw.choice(["guaranteed_no_evict",
                                                             "max_utilization"]),
                   "batch_wait_timeout_iters": draw.choice([0, 4])},
    }[engine]  # fmt: skip
    machine = Machine.of(hardware_of("h200"), gpus=tp * dp)
    execution = Execution(launch_mode=draw.choice([None, "eager"]))
    of = InstanceGroup.of(run, model_of(MODEL), machine, EngineSection(**settings), execution)
    path = tmp_path / "serve.sh"
    path.write_text("\n".join(command_lines(Deployment((of,)), engine)))
    read = sw.read_launch(path).settings
    assert read.get("launch_mode") == execution.launch_mode
    assert {name: read.get(name, getattr(EngineSection(), name)) for name in settings} == settings
    found = sw.load_run(path)
    names = ["model", "tp", "dp", "ep", "kv_cache_dtype", "kv_block_size", "weight_precision"]
    if engine == "trtllm":  # of the checkpoint, as a comment says
        names.remove("weight_precision")
    assert {name: getattr(found, name) for name in names} == {n: getattr(run, n) for n in names}
    assert (found.etp or found.tp) == run.etp


class OneByOne:
    def schedule(self, engine: Engine) -> StepBatch:
        raise NotImplementedError


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduler_given_as_an_object_is_named_by_its_class(engine: str):
    of = group(engine)
    assert of.scheduler_name == ENGINES[engine]
    other = replace(of, own_scheduler=OneByOne())
    assert other.scheduler_name == "OneByOne"
    assert replace(of.host, overlaps_gpu=False) == HOSTS[engine]
    assert of.host.overlaps_gpu
    assert not replace(of, settings=replace(of.settings, async_scheduling=False)).host.overlaps_gpu
    assert other.host == HostTimes()


def options(line: str) -> dict[str, str]:
    words = shlex.split(line)
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


def test_vllm():
    engines = {"gpu_memory_utilization": 0.8, "enable_prefix_caching": False}
    of = group("vllm", max_num_batched_tokens=4096, **engines)
    comment, line = command_lines(Deployment((of,)), "vllm")
    assert comment == "# 1 x 4 x h200"
    assert line.startswith("vllm serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 ")
    wanted = {
        "--data-parallel-size": "2", "--enable-expert-parallel": "", "--kv-cache-dtype": "fp8",
        "--block-size": "32", "--max-model-len": "4096", "--max-num-batched-tokens": "4096",
        "--max-num-seqs": "64", "--gpu-memory-utilization": "0.8", "--no-enable-prefix-caching": "",
        "--enable-chunked-prefill": "", "--async-scheduling": "",
    }  # fmt: skip
    found = options(line)
    assert {name: found[name] for name in wanted} == wanted
    assert "--pipeline-parallel-size" not in found
    assert "--kv-transfer-config" not in found


def test_sglang_counts_ranks_of_attention_data_parallelism_in_tp():
    _, line = command_lines(Deployment((group("sglang", chunked_prefill_size=2048),)), "sglang")
    wanted = {
        "--model-path": "Qwen/Qwen3-30B-A3B", "--tp-size": "4", "--dp-size": "2", "--ep-size": "4",
        "--enable-dp-attention": "", "--kv-cache-dtype": "fp8_e4m3", "--page-size": "32",
        "--chunked-prefill-size": "4096", "--max-running-requests": "128",
    }  # fmt: skip
    found = options(line)
    assert {name: found[name] for name in wanted} == wanted


def test_tensorrt_llm():
    of = group("trtllm", capacity_scheduler_policy="max_utilization")
    _, without, cat, *config, end, line = command_lines(Deployment((of,)), "trtllm")
    assert without.startswith("# tp=2 in each of dp=2 has no option")
    assert (cat, end) == ("cat > config.yaml <<'END'", "END")
    fields = yaml.safe_load("\n".join(config))
    assert fields["enable_attention_dp"] is True
    assert fields["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert fields["kv_cache_config"]["dtype"] == "fp8"
    assert fields["kv_cache_config"]["max_tokens"] == of.num_blocks * 32
    wanted = {"--tp_size": "4", "--ep_size": "4", "--max_batch_size": "64", "--max_seq_len": "4096"}
    found = options(line)
    assert {name: found[name] for name in wanted} == wanted


def test_another_engine_than_the_one_that_was_timed_is_refused():
    with pytest.raises(UserError, match="timed with --scheduler vllm"):
        command_lines(Deployment((group("vllm"),)), "sglang")


@cases
def test_instances_for_prefill_and_for_decode_need_ports_and_a_proxy(engine: str, proxy: str):
    of = group(engine)
    both = Deployment((replace(of, role="prefill"), replace(of, role="decode")))
    *_, ports, clients = command_lines(both, engine)
    assert "need a --port" in ports
    assert proxy in clients
    assert not any(proxy in line for line in command_lines(Deployment((of,)), engine))
