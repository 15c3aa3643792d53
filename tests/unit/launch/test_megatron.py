"""ShellCommand lines of Megatron-LM as runs and models, against published shapes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import DATA, ROOT, cases
from stagewright.errors import UserError
from stagewright.evidence.memory import STATES
from stagewright.launch import files
from stagewright.launch.megatron import pattern_of
from stagewright.launch.reading import LaunchFile
from stagewright.launch.tables import canonical, table
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.presets import PRESETS
from stagewright.program.columns import RankClass

LLAMA = """--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
  --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights"""
MLA = """--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
  --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm"""
MOE = "--group-query-attention --num-experts {experts} --moe-router-topk {k} --moe-ffn-hidden-size"

DATA_OF_TOOLS = ROOT / "src" / "stagewright" / "data" / "launch"

PUBLISHED = {
    "llama3-8b": f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --group-query-attention --num-query-groups 8
        --max-position-embeddings 8192 --vocab-size 128256""",
    "llama3-70b": f"""{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
        --num-attention-heads 64 --group-query-attention --num-query-groups 8
        --max-position-embeddings 8192 --vocab-size 128256""",
    "llama2-7b": f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
        --num-attention-heads 32 --max-position-embeddings 4096 --tokenizer-type Llama2Tokenizer""",
    "mixtral-8x7b": f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 {MOE.format(experts=8, k=2)} 14336 --num-query-groups 8
        --max-position-embeddings 32768 --vocab-size 32000""",
    "qwen3-30b-a3b": f"""{LLAMA} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
        --num-attention-heads 32 {MOE.format(experts=128, k=8)} 768 --num-query-groups 4
        --kv-channels 128 --qk-layernorm --max-position-embeddings 40960 --vocab-size 151936""",
    "deepseek-v3": f"""{LLAMA} {MLA} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
        --num-attention-heads 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)
        --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-num-groups 8
        --moe-router-group-topk 4 --moe-router-enable-expert-bias --vocab-size 129280
        --max-position-embeddings 163840""",
    "gpt3-175b": """--num-layers 96 --hidden-size 12288 --num-attention-heads 96
        --max-position-embeddings 2048 --tokenizer-type GPT2BPETokenizer""",
    "nemotron-h-8b": """--hybrid-layer-pattern
        M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096
        --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --squared-relu --disable-bias-linear
        --normalization RMSNorm --position-embedding-type none --mamba-num-heads 128
        --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights
        --vocab-size 131072 --max-position-embeddings 8192""",
    "gpt-oss-20b": """--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --kv-channels 64
        --num-attention-heads 64 --group-query-attention --num-query-groups 8
        --normalization RMSNorm --untie-embeddings-and-output-weights --enable-gpt-oss
        --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --vocab-size 201088
        --hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 131072""",
}

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a training script with these flags."""

    def write(flags: str, before: str = "", launcher: str = "torchrun --nproc_per_node 8") -> Path:
        program = "pretrain_t5.py" if "--encoder-num-layers" in flags else "pretrain_gpt.py"
        path = tmp_path / "train.sh"
        line = " ".join(flags.split()).replace("(", r"\(").replace(")", r"\)")
        path.write_text(f"#!/bin/bash\n{before}\n{launcher} {program} {line}\n")
        return path

    return write


SMALL = PUBLISHED["llama2-7b"].replace("--num-layers 32", "--num-layers 2")
BATCH = "--seq-length 512 --micro-batch-size 1 --global-batch-size 16"


def read(path: Path, **variables: str) -> LaunchFile:
    return files.read(files.with_variables(str(path), variables))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str, script: Script) -> None:
    """The model of the flags is the published one, field by field."""
    preset = PRESETS[name]
    model = read(script(PUBLISHED[name])).model
    assert model is not None
    same = {"name": name, "source": preset.source, "quantization": preset.quantization}
    assert replace(model, **same) == preset


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gpt3-175b", "nemotron-h-8b"])
def test_parameters_of_published_models(name: str, script: Script) -> None:
    """The parameters that the graph counts are the published model's."""
    path = script(f"{PUBLISHED[name]} --make-vocab-size-divisible-by 1 --bf16")
    assert sw.compile(path, dp=8, gpus=None).parameters == sw.compile(name).parameters


PAGE = (ROOT / "docs" / "guides" / "launch-scripts.md").read_text(encoding="utf-8")


def run_on(script: Script, flags: str, gpus: int) -> CompiledRun:
    return sw.compile(script(flags, launcher=f"torchrun --nproc_per_node 8 --nnodes {gpus // 8}"))


def held(of: RankClass) -> int:
    """Bytes of weights, gradients and optimizer."""
    return sum(of.memory[category] for category in STATES)


@cases
def test_scripts_of_megatron(
    name: str,
    gpus: int,
    flags: str,
    published: int,
    within: float,
    source: str,
    formula: int | None,
    script: Script,
) -> None:
    """Its examples have the published parameters, and the bytes of its own formula (NVIDIA/
    Megatron-LM@d98e8a64, megatron/training/theoretical_memory_usage.py), as the page says."""
    compiled = run_on(script, flags, gpus)
    most = max(map(held, compiled.program.classes))
    assert compiled.parameters == pytest.approx(published, rel=within, abs=0)
    assert formula is None or most == pytest.approx(formula, rel=0.015)
    theirs = f"{formula / 1e9:.2f} GB" if formula else ""
    count = f"{published:,}" if not within else f"{published / 1e9:g}B ({source})"
    cells = (f"`{name}`", gpus, f"{compiled.parameters:,}", count, f"{most / 1e9:.2f} GB", theirs)
    assert "| " + " | ".join(map(str, cells)).rstrip() + " |" in PAGE


@cases
def test_memory_of_measured_scripts(
    name: str, gpus: int, flags: str, between: int, peak: int | None, source: str, script: Script
) -> None:
    """Bytes that torch counted on the last pipeline rank, between steps and at the peak."""
    last = run_on(script, flags, gpus).program.classes[-1]
    most = last.memory["peak"]
    assert held(last) == pytest.approx(between, rel=0.1)
    assert peak is None or most == pytest.approx(peak, rel=0.07)
    cells = [gpus, *(f"{size / 1e9:.2f} GB" for size in (between, held(last)))]
    cells += [f"{size / 1e9:.2f} GB" if peak else "" for size in (peak or 0, most)]
    (row,) = (
        line for line in PAGE.splitlines() if line.startswith(f"| `{name}`") and source in line
    )
    assert row.endswith(" | ".join(["", *map(str, cells), ""]).rstrip())


def test_settings(script: Script) -> None:
    """Flags that say one thing each, and the number of GPUs."""
    flags = f"""{SMALL} {BATCH} --tensor-model-parallel-size 2 --sequence-parallel --bf16
        --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1 --clip-grad 1.0 --lr 1e-4"""
    run = sw.load_run(script(flags, launcher="srun -N 2 torchrun --nproc-per-node=8 --nnodes 2"))
    given = {"tp": 2, "dp": 8, "zero": 1, "sequence_parallel": True, "recompute": "full",
             "precision": "bf16", "seq_length": 512, "global_batch_size": 16,
             "make_vocab_size_divisible_by": 128}  # fmt: skip
    assert {name: getattr(run, name) for name in given} == given


def test_overrides_win(script: Script) -> None:
    """Settings given beside the file go before it, its number of GPUs included."""
    path = script(f"{SMALL} {BATCH} --bf16")
    assert sw.load_run(path).dp == 8
    assert sw.load_run(path, {"dp": 4}).dp == 4
    assert sw.load_run(path, {"gpus": 16, "tensor_model_parallel_size": 4}).dp == 4


def test_other_defaults_of_megatron(script: Script) -> None:
    """What Megatron-LM does without a flag: fp32, no overlap, tokens of all experts gathered."""
    reading = read(script(f"{PUBLISHED['mixtral-8x7b']} {BATCH}"))
    assert reading.settings["precision"] == "fp32"
    assert reading.settings["no_overlap"] == ["dp"]
    assert reading.settings["moe_token_dispatcher_type"] == "allgather"


def test_the_order_of_flags_does_not_matter(script: Script) -> None:
    """fp8 stands beside bf16, and FSDP beside the distributed optimizer, before or after it."""
    flags = ["--fp8-format hybrid", "--bf16", "--use-megatron-fsdp", "--use-distributed-optimizer",
             "--recompute-activations", "--recompute-granularity full"]  # fmt: skip
    for order in (flags, flags[::-1]):
        settings = read(script(f"{SMALL} {BATCH} {' '.join(order)}")).settings
        assert (settings["precision"], settings["zero"]) == ("fp8", 3)
        assert settings["recompute"] == "selective"


def test_a_table_says_what_every_flag_means(script: Script) -> None:
    reading = read(script(f"{SMALL} --lr 1e-4 --bf16 --fp8-param-gather"))
    assert ("--lr", "1e-4") in [line[:2] for line in reading.ignored]
    assert ("--bf16", "", "precision bf16") in reading.lines
    assert any("upper bounds" in note for note in reading.notes)
    given = {line.flag for line in (*reading.lines, *reading.ignored)}
    assert given >= {word for word in SMALL.split() if word.startswith("--")}


@cases
def test_refusals_name_the_flag(flags: str, said: str, script: Script) -> None:
    path = script("")
    path.write_text(f"torchrun pretrain_gpt.py {' '.join(SMALL.split())} {flags}\n")
    with pytest.raises(UserError) as error:
        sw.load_run(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_from_outside_are_taken_as_none(script: Script) -> None:
    reading = read(script(f"{SMALL} {BATCH} --bf16 ${{EXTRA_ARGS}}"))
    assert "$EXTRA_ARGS is not set in the file and taken as empty" in reading.notes
    path = script(f"{SMALL} {BATCH} --bf16 ${{EXTRA_ARGS}}")
    assert read(path, EXTRA_ARGS="--tensor-model-parallel-size 2").settings["tp"] == 2


def test_what_the_program_would_refuse_or_ignore_is_noted(script: Script) -> None:
    reading = read(script(f"{SMALL} {BATCH} --tensor-model-parallel-size 2 3"))
    assert "'3' belongs to no flag and is left out; the program would refuse it" in reading.notes
    reading = read(script(f"{SMALL} {BATCH} --num-query-groups 4"))
    assert any("--num-query-groups has no effect" in note for note in reading.notes)


def test_unknown_flags_can_be_ignored(script: Script) -> None:
    path = script(f"{SMALL} {BATCH} --bf16 --no-such-flag 3")
    reading = sw.read_launch(path, ignore_unknown=True)
    assert "--no-such-flag is ignored, though it may change the step" in reading.notes
    assert reading.settings["precision"] == "bf16"


def test_a_vocabulary_of_a_tokenizer_is_asked_for(script: Script) -> None:
    path = script(SMALL.replace("--tokenizer-type Llama2Tokenizer", "--tokenizer-model $1"))
    with pytest.raises(UserError, match="--set vocab-size=N"):
        sw.read_launch(path)
    model = sw.read_launch(path, {"vocab-size": "50000"}).model
    assert model is not None
    assert model.vocab_size == 50000


def test_slime(tmp_path: Path) -> None:
    """Megatron-LM's flags in arrays, a sourced file of sizes, and the batch of the update."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(
        f"N=2\nMODEL_ARGS=(\n --num-layers $N # layers\n {SMALL.replace('--num-layers 2', '')}\n)\n"
    )
    path = tmp_path / "run.sh"
    path.write_text("""
        DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
        source "${DIR}/models/tiny.sh"
        ROLLOUT=(--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4
          --rollout-max-response-len 1024 --hf-checkpoint /root/Tiny)
        ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 2 \\
          --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} ${ROLLOUT[@]} --use-dynamic-batch-size \\
          --max-tokens-per-gpu 4096 --tensor-model-parallel-size 2
    """)
    run = sw.load_run(path)
    assert (run.tp, run.dp, run.zero, run.precision) == (2, 8, 1, "bf16")
    assert (run.global_batch_size, run.micro_batch_size, run.seq_length) == (64, 4, 1024)


def test_notes_on_what_is_read(tmp_path: Path) -> None:
    """Of slime's step, of tests that are not decided, and of several commands that train."""
    path = tmp_path / "run.sh"
    path.write_text(f"""
        COUNT=$(nvidia-smi | wc -l)
        if [ "$COUNT" -gt 0 ]; then A=1; fi
        python train.py --actor-num-nodes 1 {" ".join(SMALL.split())} --ref-load R \\
          --advantage-estimator grpo --rollout-max-response-len 1024 --num-query-groups 2
    """)
    reading = sw.read_launch(path)
    notes = "\n".join(reading.notes)
    assert """line 3: '[ "$COUNT" -gt 0 ]' is not decided and counts as false""" in notes
    assert "not part: forward passes of the reference model (--ref-load)" in notes
    assert "1024 tokens, the longest allowed: time is an upper bound" in notes
    assert "--num-query-groups has no effect without --group-query-attention" in notes
    assert all(line.meaning for line in reading.ignored)
    small = f"torchrun --nproc_per_node 8 pretrain_gpt.py {' '.join(SMALL.split())}"
    path.write_text(f"{small} --tensor-model-parallel-size 2\n{small} --pp 2\n")
    assert "line 1 is read" in "".join(sw.read_launch(path, ignore_unknown=True).notes)


def test_a_checkpoint_names_the_model(tmp_path: Path) -> None:
    """Without sizes the model is the preset of the checkpoint; without that, it is asked for."""
    path = tmp_path / "run.sh"
    flags = "--actor-num-nodes 1 --global-batch-size 8 --tensor-model-parallel-size 2"
    path.write_text(f"source models/x.sh\npython train.py {flags} --hf-checkpoint $D/Qwen3-4B-FP8")
    assert sw.load_run(path).model == "qwen3-4b"
    path.write_text(f"source models/x.sh\npython train.py {flags}")
    with pytest.raises(UserError, match=r"models/x.sh is not here\); name a model"):
        sw.load_run(path)
    assert sw.load_run(path, {"model": "gpt2", "seq_length": 64}).model == "gpt2"


@cases
def test_launchers(tmp_path: Path, headers: str, launcher: str, gpus: int) -> None:
    """Tasks of Slurm are processes, or start torchrun; headers end with the first command."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"#!/bin/bash\n#SBATCH {headers}\n{launcher} pretrain_gpt.py {' '.join(SMALL.split())}"
    )
    assert sw.read_launch(path).settings["gpus"] == gpus


def test_copies_of_shards_follow_the_number_of_gpus(script: Callable[..., Path]) -> None:
    flags = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    path = script(f"{SMALL} {flags} --tensor-model-parallel-size 2 --global-batch-size 64")
    assert sw.load_run(path, {"gpus": 16}).dp_shard == 4
    assert sw.load_run(path, {"dp": 4}).dp_shard == 2
    assert sw.load_run(path, {"dp": 4, "dp_shard": 4}).dp_shard == 4
    with pytest.raises(UserError, match="instances 2 does not divide dp=1; give more GPUs"):
        sw.load_run(path, {"gpus": 2})
    assert sw.search(path, "h100-sxm", gpus=4, top=1).table("best").rows


@cases
def test_values_of_another_kind(script: Callable[..., Path], flags: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        sw.load_run(script(f"{SMALL} {flags}"))
    assert said in str(error.value)


def test_a_script_without_layers(script: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="has no --num-layers, which a model needs"):
        sw.load_run(script("--hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16"))


def test_every_flag_of_published_scripts_is_in_a_table() -> None:
    """Flags of two or more of 114 published scripts: each has a meaning or a reason."""
    rows = {**table("megatron"), **table("launchers")}
    with open(DATA / "launch" / "megatron_flags.csv") as stream:
        flags = [row["flag"] for row in csv.DictReader(stream)]
    assert [flag for flag in flags if canonical(flag) not in rows] == []


def test_tables_are_consistent() -> None:
    """Rows name settings that there are, or say why there is none."""
    from stagewright.model.architecture import Architecture
    from stagewright.run.other_names import is_setting_name
    from stagewright.run.sections import EXPERIMENT

    fields = {*Architecture.__dataclass_fields__, "name"}
    for row in table("megatron").values():
        if row.ours.startswith("model."):
            assert row.ours[6:] in fields, row
        elif row.setting:
            assert row.setting in EXPERIMENT or is_setting_name(row.setting), row
        else:
            assert row.note, row


@pytest.mark.parametrize(
    "tool", [path.name.removesuffix(".csv") for path in sorted(DATA_OF_TOOLS.glob("*.csv"))]
)
def test_a_flag_has_one_row(tool: str) -> None:
    """A second row of a flag, or of a spelling of it, would be ignored."""
    lines = (DATA_OF_TOOLS / f"{tool}.csv").read_text(encoding="utf-8").splitlines()
    rows = [*csv.reader(line for line in lines if not line.startswith("#"))][1:]
    rows_of = Counter(name for row in rows for name in {*map(canonical, row[0].split())})
    assert [name for name, count in rows_of.items() if count > 1] == []


def test_patterns() -> None:
    many = "[0]*1" + "+[1]*1" * 2000
    cases: dict[str, Any] = {"[0, 1]*2": [0, 1, 0, 1], "3": 3, "[1]*10**9": None, "0": None,
                             "[1" * 5000: None, "[2]": None, many: None}  # fmt: skip
    for text, value in cases.items():
        assert pattern_of(text) == value or (text == many), text[:40]
