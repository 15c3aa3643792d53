"""Commands that start servers, with the line of their client, as settings of serving and decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import cases
from stagewright.cli import main as cli
from stagewright.errors import UserError
from stagewright.launch import files, servers
from stagewright.launch.tables import table

CLIENT = "vllm bench serve --random-input-len 1000 --random-output-len 200 --max-concurrency 64 "

VLLM = f"""#!/bin/bash
vllm serve deepseek-ai/DeepSeek-R1 --port $PORT -tp $TP --data-parallel-size=2 \\
  --enable-expert-parallel --max-num-seqs 128 --no-enable-prefix-caching --no-async-scheduling \\
  --kv-cache-dtype fp8_e4m3 --block-size 64 --gpu-memory-utilization .85 --max-model-len auto \\
  --speculative-config '{{"method": "deepseek_mtp", "num_speculative_tokens": '$DRAFTS'}}' \\
  -cc.cudagraph_mode NONE --no-enable-flashinfer-autotune > log 2>&1 &
{CLIENT} --num-prompts $((TP * 100)) --seed 3
"""

SGLANG = f"""
MODEL=nvidia/DeepSeek-R1-0528-FP4-v2
CONC=64
python3 -m sglang.launch_server --model-path $MODEL --tp 8 --dp-size 4 --enable-dp-attention \\
  --ep-size 8 --quantization modelopt_fp4 --kv-cache-dtype fp8_e4m3 --disable-radix-cache \\
  --chunked-prefill-size 32768 --max-running-requests 256 --page-size 64 \\
  --max-total-tokens 65536 --schedule-conservativeness 0.5 --mem-fraction-static 0.8 \\
  --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 \\
  --scheduler-recv-interval $([[ $CONC -gt 4 ]] && echo 30 || echo 10) --log-level info
{CLIENT.replace("vllm bench serve", "python3 -m sglang.bench_serving --random-range-ratio 0.5")}
"""

TRTLLM = """
MAX_BATCH=$((64 > 16 ? 64 : 16))
declare -A DRAFTS_OF=([8:64]=2 [4:64]=1)
N=8
cat > options.yml << EOF
enable_attention_dp: $ATTENTION
kv_cache_config:
  dtype: fp8
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.8
cuda_graph_config: {enable_padding: true, max_batch_size: $MAX_BATCH}
EOF
if [ "$ATTENTION" = true ]; then
cat << EOF >> options.yml
speculative_config:
  decoding_type: MTP
  num_nextn_predict_layers: ${DRAFTS_OF[${N}:64]:-3}
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}
EOF
fi
while read -r line; do unset $line; done < <(env)
mpirun -n 1 trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size=$N --ep_size 8 \\
  --max_batch_size $MAX_BATCH --max_num_tokens 2048 --backend pytorch \\
  --extra_llm_api_options options.yml
"""


def read(folder: Path, text: str, variables: dict[str, str] | None = None) -> Any:
    (folder / "serve.sh").write_text(text)
    return sw.read_launch(folder / "serve.sh", variables)


def check(reading: Any, wanted: dict[str, Any]) -> None:
    assert {name: reading.settings.get(name) for name in wanted} == wanted


def test_vllm(tmp_path: Path) -> None:
    reading = read(tmp_path, VLLM, {"TP": "4", "DRAFTS": "2"})
    check(reading, {
        "model": "deepseek-r1", "scheduler": "vllm", "mode": "decode", "tp": 4, "dp": 2,
        "enable_expert_parallel": True, "max_num_seqs": 128, "enable_prefix_caching": False,
        "async_scheduling": False, "kv_cache_dtype": "fp8", "kv_block_size": 64,
        "gpu_memory_utilization": 0.85, "max_model_len": None, "launch_mode": "eager",
        "speculative_method": "mtp", "num_speculative_tokens": 2, "isl": 1000, "osl": 200,
        "concurrency": 64, "num_requests": 400, "batch_size": 64, "context_length": 1100,
        "seed": None,
    })  # fmt: skip


def test_sglang(tmp_path: Path) -> None:
    """Attention in parallel over dp: of tp, of the chunk and of the requests each has its part."""
    check(read(tmp_path, SGLANG), {
        "model": "deepseek-r1", "scheduler": "sglang", "tp": 2, "dp": 4, "ep": 8, "etp": 1,
        "weight_precision": "nvfp4", "kv_cache_dtype": "fp8", "enable_prefix_caching": False,
        "chunked_prefill_size": 8192, "max_num_seqs": 64, "num_gpu_blocks": 1024,
        "schedule_conservativeness": 0.15, "gpu_memory_utilization": 0.8, "range_ratio": 0.5,
        "speculative_method": "mtp", "num_speculative_tokens": 3, "scheduler_recv_interval": 30,
        "context_length": 825, "output_length": 150,
    })  # fmt: skip
    plain = (
        SGLANG.replace("--enable-dp-attention", "")
        .replace("--ep-size 8", "")
        .replace("32768", "-1")
    )
    check(read(tmp_path, plain.replace("EAGLE", "EAGLE --speculative-draft-model-path x")), {
        "tp": 8, "dp": None, "instances": 4, "ep": None, "max_num_seqs": 256,
        "chunked_prefill_size": 1_000_000, "speculative_method": "eagle", "batch_size": 16,
    })  # fmt: skip


def test_tensorrt_llm(tmp_path: Path) -> None:
    """Its YAML is what the script writes, by the parts that it writes."""
    reading = read(tmp_path, TRTLLM, {"ATTENTION": "true"})
    check(reading, {
        "scheduler": "tensorrt-llm", "tp": 1, "dp": 8, "ep": 8, "etp": 1, "max_num_seqs": 64,
        "max_num_batched_tokens": 2048, "kv_cache_dtype": "fp8", "enable_prefix_caching": False,
        "num_speculative_tokens": 2, "capacity_scheduler_policy": "max_utilization",
        "kv_block_size": 32, "isl": None, "batch_size": None,
    })  # fmt: skip
    assert reading.settings["free_gpu_memory_fraction"] == 0.8
    check(read(tmp_path, TRTLLM, {"ATTENTION": "false"}), {"tp": 8, "dp": None, "etp": 1})
    beside = TRTLLM.replace("cat > options.yml", "cat > other.yml")
    (tmp_path / "options.yml").write_text("stream_interval: 10\nenable_attention_dp: true\n")
    check(read(tmp_path, beside), {"dp": 8, "enable_prefix_caching": None})
    (tmp_path / "options.yml").unlink()
    assert "options.yml, a file of options, is not here" in str(read(tmp_path, beside).notes)


@cases
def test_errors(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    given = {} if change == ("", "") else {"TP": "4", "DRAFTS": "2"}
    text = VLLM.replace(*change)
    if not message:
        assert "name a model: MODEL --config" in read(tmp_path, text, given).needs["model"]
        return
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, given)
    assert message in str(caught.value)


def test_commands_and_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve` and `simulate` take the script; options replace what it says."""
    path = tmp_path / "serve.sh"
    path.write_text(
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-num-seqs 8\n"
        + CLIENT + "--num-prompts 32\n"
    )  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(["serve", str(path), "--hardware", "h100-sxm", "--num-prompts", "16", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["max_num_seqs"] == 8, err
    served = sw.serve(path, "h100-sxm", num_prompts=16)
    assert served.summary.values().items() <= json.loads(out).items()
    step = sw.simulate(path, "h100-sxm")
    same = sw.simulate("llama3.1-8b", "h100-sxm", mode="decode", tp=2, batch_size=8,
                       context_length=1100, output_length=200)  # fmt: skip
    assert step.seconds == same.seconds
    assert sw.simulate(path, "h100-sxm", tp=1).seconds > step.seconds


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search keeps the model, the engine and the load, which options replace."""
    path = tmp_path / "serve.sh"
    path.write_text(f"vllm serve {LLAMA} -tp 4 --max-num-seqs 8\n{CLIENT} --num-prompts 32\n")
    limits = {"tp": "1,2", "pp": 1, "layers": 2, "ttft": 9000, "tpot": 50, "pairs": 0}
    same = sw.search_serving("llama3.1-8b", "h100-sxm", max_num_seqs=8, isl=1000, osl=200, rate=4,
                             range_ratio=1.0, num_requests=32, **limits)  # fmt: skip
    found = sw.search_serving(path, "h100-sxm", rate=4, **limits)
    assert found.to_dict()["aggregated"] == same.to_dict()["aggregated"]
    options = [f"--{name}={value}" for name, value in limits.items()]
    with pytest.raises(SystemExit) as ended:
        cli.main(["search", str(path), "--serve", "--hardware", "h100-sxm", *options])
    assert (ended.value.code, "64 users" in capsys.readouterr().out) == (0, True)


def test_containers(tmp_path: Path) -> None:
    """The image of vLLM starts the server; clients run in containers, too."""
    text = "docker run -e A=$B --gpus all -v /a:/b reg.io/vllm/vllm-openai:v0.11.0 "
    client = f"docker exec -it --workdir /w --user me vllm {CLIENT}"
    wanted = {"tp": 2, "model": "llama3.1-8b", "isl": 1000, "concurrency": 64}
    for words in (f"--model {LLAMA}-Instruct -tp 2", f"{LLAMA}-Instruct -tp 2"):
        check(read(tmp_path, f"{text}{words} --port 8000\n{client}\n"), wanted)
    check(read(tmp_path, f"{text}vllm serve {LLAMA} -tp 2\n{client}\n"), wanted)
    assert "give --set MODEL=VALUE" in read(tmp_path, "vllm serve $MODEL -tp 2\n").needs["model"]


LLAMA = "meta-llama/Llama-3.1-8B"
SGLANG_SERVES = "sglang serve --tp 8 --model-path deepseek-ai/DeepSeek-V3"
TRTLLM_SERVES = f"trtllm-serve {LLAMA} --tp_size 2 --config c.yaml"


@pytest.mark.parametrize(
    ("command", "options", "wanted"),
    [
        (f"vllm serve {LLAMA} --config c.yaml", "enforce-eager: false", {"launch_mode": None}),
        (f"vllm serve {LLAMA} --config c.yaml", "enforce-eager: true", {"launch_mode": "eager"}),
        (f"vllm serve {LLAMA} --config c.yaml", "enable-prefix-caching: false",
         {"enable_prefix_caching": False}),
        (f"vllm serve {LLAMA} --config c.yaml", "model: x/y\ntensor-parallel-size: 4",
         {"model": "llama3.1-8b", "tp": 4}),
        (f"vllm serve -tp 2 {LLAMA}", "", {"model": "llama3.1-8b", "tp": 2}),
        (f"vllm serve {LLAMA} -O0", "", {"launch_mode": "eager"}),
        (f"vllm serve {LLAMA} -O 2", "", {"launch_mode": None}),
        (f"vllm serve {LLAMA} --cpu-offload-gb 0.0", "", {"tp": 1}),
        (f"vllm serve {LLAMA} --cpu-offload-gb 10", "", "--cpu-offload-gb 10 is not modelled"),
        (f"vllm serve {LLAMA} -pcp 32", "", "-pcp 32 is not modelled"),
        (f"vllm serve {LLAMA} --cpu-offload-gb $GB", "", "give: --set GB=VALUE"),
        (f"{SGLANG_SERVES} --config c.yaml", "disable-cuda-graph: false", {"launch_mode": None}),
        (f"{SGLANG_SERVES} --moe-a2a-backend deepep", "", {"ep": 8, "etp": 1}),
        (f"{SGLANG_SERVES} --moe-a2a-backend none", "", {"ep": None}),
        (f"{SGLANG_SERVES} --enable-ep-moe", "", {"ep": 8}),
        (f"{TRTLLM_SERVES} --max_batch_size 512", "max_batch_size: 64", {"max_num_seqs": 512}),
        (f"vllm serve {LLAMA} --max-num-seqs x", "", "--max-num-seqs is 'x', wanted"),
        (f"{SGLANG_SERVES} --chunked-prefill-size x", "", "is 'x', wanted a whole number"),
        (f"{SGLANG_SERVES} --ep 0", "", "--ep is 0, wanted a whole number from 1"),
        (f"vllm serve {LLAMA}\nvllm bench serve --input-len 1e400", "", "is inf, wanted a number"),
        (TRTLLM_SERVES, "cuda_graph_config: null", {"launch_mode": "eager"}),
        (TRTLLM_SERVES, "cuda_graph_config: {enable_padding: true}", {"launch_mode": None}),
        (TRTLLM_SERVES, "kv_cache_config: {host_cache_size: 100}", "host_cache_size 100 is not"),
    ],
)  # fmt: skip
def test_values_of_options(
    command: str, options: str, wanted: str | dict[str, Any], tmp_path: Path
) -> None:
    """Switches may be off, and a value that is not harmless is refused."""
    (tmp_path / "c.yaml").write_text(options)
    if isinstance(wanted, str):
        with pytest.raises(UserError) as error:
            read(tmp_path, command)
        assert wanted in str(error.value)
        return
    reading = read(tmp_path, command)
    check(reading, wanted)
    assert ("takes the file's" in str(reading.notes)) == (wanted == {"max_num_seqs": 512})


@pytest.mark.parametrize("tool", [*(server.table for server in servers.SERVERS), "clients"])
def test_tables(tool: str) -> None:
    """Settings are settings of `serve` or of a run, or are read by a rule."""
    from stagewright.run.other_names import is_setting_name
    from stagewright.run.sections.serving import SERVING

    rules = {"enable_dp_attention", "enable_attention_dp", "max_total_tokens", "moe_a2a_backend"}
    for row in table(tool).values():
        name = row.setting
        assert not name or name in SERVING or is_setting_name(name) or name in rules, row
        assert row.note or row.setting, row


@pytest.mark.parametrize(
    ("client", "wanted"),
    [
        ("vllm bench serve --random-range-ratio 0.5", (1500, 1 / 3, 1000)),
        ("python -m sglang.bench_serving", (1000, 1e-9, 500)),
        ("run_benchmark_serving --random-range-ratio 0.5", (1000, 0.5, 750)),
    ],
)
def test_lengths(tmp_path: Path, client: str, wanted: tuple[int, float, int]) -> None:
    """What clients call a ratio of lengths differs; the mean is the context without outputs."""
    text = f"vllm serve gpt2\n{client} --input-len 1000 --output-len 2 --max-concurrency 1"
    settings = read(tmp_path, text.replace("gpt2", "meta-llama/Llama-3.1-8B")).settings
    assert (settings["isl"], settings["range_ratio"]) == wanted[:2]
    assert abs(settings["context_length"] - wanted[2]) <= 2


def test_not_a_server(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("trtllm-serve disaggregated -c config.yaml\n")
    with pytest.raises(UserError, match="starts trtllm-serve disaggregated"):
        files.read(str(path))
