"""Flags of frameworks: names that their parsers have, and what their parsers assert.

The rule is that a framework which is given these flags does what was timed: whatever differs from
the framework's own defaults is printed, and what it has no flag for is said.
"""

import random
import re
import shlex

import pytest

from columns import candidates_of
from helpers import cases, table_of
from stagewright.api.experiments import load_experiment
from stagewright.errors import UserError
from stagewright.run import tool_files
from stagewright.run.experiment import Experiment
from stagewright.run.sections import EXPERIMENT, SETTINGS
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.settings import Run
from stagewright.run.tool_files import TOOLS
from stagewright.searching.candidates import Column
from stagewright.searching.request import search_request
from stagewright.time.hardware import resolve
from stagewright.time.simulate import ep_overlap


def flags(candidates, index, tool):
    return tool_files.text_lines(candidates.trained(index), tool)


def notes(candidates, index, tool):
    return tool_files.notes(candidates.trained(index), tool)


MEGATRON = frozenset({
    "--attention-backend", "--attention-dropout", "--bf16", "--ckpt-format", "--clip-grad",
    "--context-parallel-size", "--cp-comm-type", "--cpu-offloading-num-layers",
    "--cross-entropy-fusion-impl", "--cross-entropy-loss-fusion", "--cuda-graph-impl",
    "--cuda-graph-modules", "--data-parallel-sharding-strategy", "--decoder-seq-length",
    "--defer-embedding-wgrad-compute", "--exp-avg-dtype",
    "--exp-avg-sq-dtype", "--expert-model-parallel-size", "--expert-tensor-parallel-size",
    "--fp4-format", "--fp8-format", "--fp8-recipe", "--global-batch-size", "--hidden-dropout",
    "--make-vocab-size-divisible-by", "--megatron-fsdp-grad-comm-dtype", "--micro-batch-size",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--moe-apply-probs-on-input",
    "--moe-aux-loss-coeff", "--moe-expert-capacity-factor", "--moe-grouped-gemm",
    "--moe-pad-expert-input-to-capacity", "--moe-router-dtype", "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type", "--moe-token-dispatcher-type", "--moe-z-loss-coeff",
    "--mtp-loss-scaling-factor", "--mtp-num-layers", "--no-check-for-nan-in-loss-and-grad",
    "--no-overlap-p2p-communication", "--num-distributed-optimizer-instances", "--num-layers",
    "--wgrad-deferral-limit",
    "--num-virtual-stages-per-pipeline-rank", "--optimizer", "--optimizer-cpu-offload",
    "--optimizer-offload-fraction", "--overlap-grad-reduce", "--overlap-moe-expert-parallel-comm",
    "--overlap-param-gather", "--pipeline-model-parallel-layout", "--pipeline-model-parallel-size",
    "--recompute-granularity", "--recompute-method", "--recompute-modules",
    "--recompute-num-layers", "--seq-length", "--sequence-parallel", "--sgd-momentum",
    "--tensor-model-parallel-size", "--tp-comm-overlap", "--use-distributed-optimizer",
    "--use-megatron-fsdp", "--use-precision-aware-optimizer", "--use-tp-pp-dp-mapping",
    "--vocab-size",
})  # fmt: skip
"""Of the parser of Megatron-LM d98e8a64: `add_argument` of megatron/training/arguments.py, and the
fields of the configurations that it makes options of (megatron/core/transformer/
transformer_config.py, megatron/core/model_parallel_config.py and megatron/training/config)."""
MEGATRON_WORDS = {
    "--attention-backend": {"flash", "fused", "unfused", "local", "auto"},
    "--ckpt-format": {"torch", "torch_dist", "torch_dcp", "fsdp_dtensor"},
    "--cp-comm-type": {"p2p", "a2a", "all_gather", "a2a+p2p"},
    "--cuda-graph-impl": {"none", "local", "transformer_engine", "full_iteration"},
    "--data-parallel-sharding-strategy": {"no_shard", "optim", "optim_grads", "optim_grads_params"},
    "--fp8-format": {"e4m3", "hybrid"},
    "--fp8-recipe": {"tensorwise", "delayed", "mxfp8", "blockwise", "custom"},
    "--moe-token-dispatcher-type": {"allgather", "alltoall", "flex"},
    "--optimizer": {"adam", "sgd"},
    "--recompute-granularity": {"full", "selective"},
    "--recompute-method": {"uniform", "block"},
    "--recompute-modules": {
        *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
    },
}
"""Values that its options take, where these are words."""
TORCHTITAN = frozenset({
    "--activation_checkpoint", "--compile.enable", "--compile.enable_async_tensor_parallel",
    "--parallelism.context_parallel_degree", "--parallelism.data_parallel_replicate_degree",
    "--parallelism.data_parallel_shard_degree", "--parallelism.enable_sequence_parallel",
    "--parallelism.expert_parallel_degree", "--parallelism.fsdp_reshard_after_forward",
    "--parallelism.num_pp_microbatches", "--parallelism.pipeline_parallel_degree",
    "--parallelism.pipeline_parallel_first_stage_less_layers",
    "--parallelism.pipeline_parallel_last_stage_less_layers",
    "--parallelism.pipeline_parallel_layers_per_stage", "--parallelism.pipeline_parallel_schedule",
    "--parallelism.tensor_parallel_degree", "--training.disable_cuda_graphs", "--training.dtype",
    "--training.max_context_length", "--training.max_norm",
    "--training.mixed_precision_param",
    "--training.num_tokens_per_microbatch_per_dp_rank", "--training.num_tokens_per_train_step",
})  # fmt: skip
"""Of torchtitan's `Trainer.Config` at b5bcd76c (torchtitan/config/configs.py; its test
tests/unit_tests/test_no_new_cli_options.py lists all)."""


def candidates(model="mixtral-8x7b", how=None, framework="megatron", **settings):
    run = Run(model=model, framework=framework)
    base = Experiment(run, ClusterSection(), how or Execution())
    columns = {name: Column.of([value]) for name, value in settings.items()}
    return candidates_of(base, columns)


def lines(tool, *args, **settings):
    return stripped(candidates(*args, **settings), tool)


def stripped(found, tool):
    return [line.strip() for line in flags(found, 0, tool)]


def options(found):
    """Flags by name, each with its values; words of their own left out."""
    words = [shlex.split(line) for line in found if line.startswith("--")]
    words += [[f"--{m[1]}", m[2].strip('"')] for line in found
              if (m := re.fullmatch(r"config\.(\S+) = (.*)", line))]  # fmt: skip
    named = {name: values for name, *values in words}
    assert len(named) == len(words), "a flag is printed twice"
    return named


def megatron(*args, **settings):
    return options(lines("megatron", *args, **settings))


def torchtitan(*args, **settings):
    return options(lines("torchtitan", *args, **settings))


# ---- rules that hold for any run -----------------------------------------------------------------

RUN_CHOICES = table_of("test_flags", "run_choices")
HOW_CHOICES = {
    "no_overlap": [frozenset(), frozenset({"dp"}), frozenset({"pp", "tp"})],
    "overlap_param_gather": [False, True],
    "tp_comm_overlap": [False, True],
    "overlap_moe_expert_parallel_comm": [False, True],
    "moe_flex_dispatcher": [False, True],
    "launch_mode": [None, "eager", "compile", "cuda_graph", "blocking"],
}


def any_run(seed):
    """A run of random settings, also of some that a search would not take."""
    draw = random.Random(seed)
    chosen = {name: draw.choice(values) for name, values in RUN_CHOICES.items()}
    chosen |= dict(zip(("pp", "vpp", "schedule"), chosen.pop("pp,vpp,schedule"), strict=True))
    if chosen["model"] in ("llama3-8b", "gpt2"):
        chosen["ep"] = 1
    if chosen["dp"] == 1:
        chosen["dp_shard"] = None
    for name in [*chosen]:
        needs = EXPERIMENT[name].needs if name in EXPERIMENT else {}
        if any(chosen.get(need, values[0]) not in values for need, values in needs.items()):
            del chosen[name]
    how = {name: draw.choice(values) for name, values in HOW_CHOICES.items()}
    try:
        ep_overlap.check(Run(**chosen))
    except UserError:  # as for candidates of a search
        how["overlap_moe_expert_parallel_comm"] = False
    return candidates(chosen.pop("model"), Execution(**how), chosen.pop("framework"), **chosen)


SEEDS = range(200)


def test_flags_are_those_of_the_parsers():
    for seed in SEEDS:
        named = options(flags(any_run(seed), 0, "megatron"))
        assert named.keys() <= MEGATRON, seed
        for name, words in MEGATRON_WORDS.items():
            assert {*named.get(name, ())} <= words, (seed, name)
        named = options(stripped(any_run(seed), "torchtitan"))
        assert named.keys() <= TORCHTITAN, seed


def test_what_megatron_asserts_holds():
    """`validate_args` and the checks of configurations, for what these flags can break."""
    for seed in SEEDS:
        run = any_run(seed)
        named = options(flags(run, 0, "megatron"))
        of = run.run(0).resolved(run.model)
        assert {"--micro-batch-size", "--global-batch-size", "--seq-length"} <= named.keys()
        needs = {
            "--overlap-param-gather": {"--overlap-grad-reduce"},
            "--use-megatron-fsdp": {"--ckpt-format", "--data-parallel-sharding-strategy"},
            "--tp-comm-overlap": {"--sequence-parallel"},
            "--exp-avg-dtype": {"--use-precision-aware-optimizer"},
            "--optimizer-cpu-offload": {"--use-precision-aware-optimizer"},
            "--recompute-method": {"--recompute-num-layers"},
            "--fp8-format": {"--bf16"},
        }
        for name, needed in needs.items():
            assert name not in named or needed <= named.keys(), (seed, name)
        sharded = {"--use-distributed-optimizer", "--use-megatron-fsdp"}
        assert "--overlap-param-gather" not in named or sharded & named.keys(), seed
        if "--use-precision-aware-optimizer" in named:
            assert "--optimizer" not in named, seed  # adam is the default
        full = named.get("--recompute-granularity") == ["full"]
        assert full == ("--recompute-method" in named), seed
        layouts = {"--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"}
        assert len(layouts & named.keys()) <= 1, seed
        if "--pipeline-model-parallel-layout" not in named and of.pp > 1:
            layers = run.model.num_layers
            assert layers % (of.pp * of.vpp) == 0, seed
        if "--overlap-moe-expert-parallel-comm" in named:
            assert of.ep > 1, seed
            assert not full, seed
            assert of.pp == 1 or of.vpp > 1, seed
            assert named["--moe-token-dispatcher-type"] != ["allgather"], seed


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v2-lite"])
def test_a_search_for_a_tool_tries_what_it_has_a_flag_for(tool, model):
    """Settings that the user gives stay, and are said to have no flag."""
    given = {"model": model, "global_batch_size": 64, "zero": 1}
    request = search_request(
        given, hardware=["h100-sxm"], gpus=8, tool=tool, families="offload,overlap"
    )
    found = request.space.enumerate().candidates
    for index in random.Random(1).sample(range(len(found)), min(40, len(found))):
        lacks = {line.missing for line in tool_files.flag_lines(found.trained(index), tool)}
        assert not lacks & request.space.axes.keys() - {"global_batch_size"}, found.describe(index)


OTHER_FORMS = {"torchtitan": ".py", "deepspeed": ".json", "accelerate": ".yaml"}
NOT_WRITTEN = {
    "megatron": {"operators", "fuse"},  # of its kernels
    "torchtitan": {"microbatch_group_size_per_vp_stage"},
    "deepspeed": {"schedule", "vpp"},
    "accelerate": {"schedule", "vpp"},
}
"""Settings that follow from others, and have no flag."""


def read_again(candidates, tool, folder):
    """The run of a file with a candidate's flags, and settings that are said to have none."""
    printed, run = flags(candidates, 0, tool), candidates.run(0)
    path = folder / f"run{OTHER_FORMS.get(tool, '.sh')}"
    text = "\n".join(printed)
    if tool == "megatron":
        launcher = f"torchrun --nproc_per_node {run.world_size} pretrain_gpt.py"
        text = " ".join([launcher, *(x for x in printed if not x.startswith("#"))])
    path.write_text(text)
    given = {"model": run.model}
    if tool == "deepspeed":  # of the launcher and of the program
        given["gpus"] = run.world_size // run.pp
    said = [x for x in notes(candidates, 0, tool) if f"no flag in {tool}: " in x]
    without = {*said[0].split(": ")[1].split(", ")} if said else set()
    return load_experiment(path, given), without


def test_flags_alone_are_a_file(tmp_path):
    """Flags, one a line, are read beside the model that they do not name."""
    path = tmp_path / "flags.sh"
    path.write_text("\n".join(lines("megatron", "llama3-8b", tp=2, pp=2, zero=1, dp=2)))
    read = load_experiment(path, {"model": "llama3-8b", "gpus": 8}).run
    assert (read.tp, read.pp, read.dp, read.zero) == (2, 2, 2, 1)
    with pytest.raises(UserError, match="name a model"):
        load_experiment(path)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_written_is_read_as_the_same_run(tool, tmp_path):
    """A file with the flags of a run has its settings, but for those said to have no flag."""
    count = 0
    for seed in SEEDS:
        candidates = any_run(seed)
        model, wanted = candidates.model, candidates.run(0).resolved(candidates.model)
        if wanted.framework != ("torchtitan" if tool == "torchtitan" else "megatron"):
            continue  # whose habits have no flags
        read, without = read_again(candidates, tool, tmp_path)
        without |= NOT_WRITTEN[tool] | {"layers_per_stage"}  # splits derive
        without |= set() if wanted.zero and wanted.dp > 1 else {"dp_shard"}
        without |= set() if wanted.zero == 3 else {"reshard_after_forward"}
        without |= set() if model.num_experts else {of for of in SETTINGS if of.startswith("moe_")}
        without |= set() if model.hidden_dropout else {"dropout"}
        got = read.run.resolved(model)
        for of in SETTINGS.values():
            needs = ((getattr(wanted, need), values) for need, values in of.needs.items())
            if of.name in without or of.is_idle(wanted) or any(x not in y for x, y in needs):
                continue
            count += 1
            values = [run.etp or run.tp if of.name == "etp" else getattr(run, of.name)
                      for run in (got, wanted)]  # fmt: skip
            assert values[0] == values[1], (seed, of.name)
        how = candidates.execution(0)
        if wanted.dp > 1 and "no_overlap" not in without and wanted.zero < 2:
            assert ("dp" in read.execution.no_overlap) == ("dp" in how.no_overlap), seed
        if "launch_mode" not in without:
            default = "compile" if tool == "torchtitan" else "eager"
            assert (read.execution.launch_mode or default) == (how.launch_mode or default), seed
        if "overlap_param_gather" not in without and wanted.zero and wanted.dp > 1:
            assert read.execution.overlap_param_gather == how.overlap_param_gather, seed
    assert count > 3000


def test_every_setting_is_a_flag_or_said_to_have_none():
    """What changes a run changes what is printed for it."""
    base = {"dp": 4, "tp": 2, "cp": 2, "ep": 4, "zero": 3, "pp": 2, "sequence_parallel": True}
    apart = {"model", "framework", "pp,vpp,schedule", *base}
    needed = {
        "recompute_modules": {"recompute": "selective"},
        "recompute_num_layers": {"recompute": "full"},
        "fp8_recipe": {"precision": "fp8"}, "fp8_dot_product_attention": {"precision": "fp8"},
    }  # fmt: skip
    for tool in ("megatron", "torchtitan"):
        for name in RUN_CHOICES.keys() - apart:
            more = base | needed.get(name, {})
            printed = {
                tuple(lines(tool, **more, **{name: value})) for value in RUN_CHOICES[name][:2]
            }
            # The model has no dropout, so that turning it off changes nothing.
            assert len(printed) == 2 or name == "dropout", (tool, name)


# ---- Megatron-LM ---------------------------------------------------------------------------------


def test_what_megatron_leaves_off_by_default_is_turned_on():
    named = megatron(dp=4, ep=4, zero=1)
    assert named["--moe-token-dispatcher-type"] == ["alltoall"]
    on = ("--moe-grouped-gemm", "--overlap-grad-reduce", "--bf16", "--cross-entropy-loss-fusion")
    assert {*on} <= named.keys()
    assert named["--micro-batch-size"] == ["1"]
    assert named["--seq-length"] == ["8192"]
    assert named["--global-batch-size"] == ["4"]
    assert named["--hidden-dropout"] == ["0.0"]
    assert named["--attention-dropout"] == ["0.0"]
    assert named["--make-vocab-size-divisible-by"] == ["1"]
    of_gpt2 = megatron("gpt2", make_vocab_size_divisible_by=128)
    assert not {"--hidden-dropout", "--make-vocab-size-divisible-by"} & of_gpt2.keys()
    assert "--moe-token-dispatcher-type" not in of_gpt2


def test_layouts_have_the_layers_that_predict_more_tokens():
    named = megatron("deepseek-v3", pp=2, mtp_num_layers=1)
    assert named["--pipeline-model-parallel-layout"] == ["Et*31|t*30mL"]
    assert megatron("llama3-8b", pp=2, vpp=2)["--num-virtual-stages-per-pipeline-rank"] == ["2"]


def test_patterns_of_layers_say_their_stages_themselves():
    found = lines("megatron", "nemotron-h-8b", pp=4, vpp=2)
    assert any("--hybrid-layer-pattern" in line for line in found if line[0] == "#")
    assert not any("pipeline-model-parallel-layout" in line for line in found)


def test_megatron_captures_graphs():
    whole = Execution(launch_mode="cuda_graph")
    assert "--no-check-for-nan-in-loss-and-grad" in megatron("llama3-8b", whole)
    some = Execution(launch_mode="cuda_graph", cuda_graph_modules=frozenset({"mlp", "attn"}))
    named = megatron("llama3-8b", some)
    assert named["--cuda-graph-impl"] == ["transformer_engine"]
    assert named["--cuda-graph-modules"] == ["attn", "mlp"]
    found = lines("megatron", "llama3-8b", Execution(launch_mode="compile"))
    assert "# launch_mode=compile has no flag" in found


# ---- torchtitan ----------------------------------------------------------------------------------


def test_torchtitan_splits_layers_as_the_run():
    less = "--parallelism.pipeline_parallel_first_stage_less_layers"
    assert torchtitan("llama3-8b", pp=4)[less] == ["0"]
    assert torchtitan("llama3-8b", pp=4, framework="torchtitan")[less] == ["1"]
    assert less not in torchtitan("llama3-8b")
    found = lines("torchtitan", "llama3-8b", pp=2, layers_per_stage=(15, 17))
    assert "# layers_per_stage=15,17 has no flag" in found


# ---- what is said beside -------------------------------------------------------------------------


def test_notes_count_what_has_no_flag():
    found = candidates("llama3-8b", dp=4, zero=1, framework="torchtitan", pp=4, schedule="zb-h2")
    assert "3 settings have no flag in torchtitan: zero, schedule, launch_mode" in notes(
        found, 0, "torchtitan"
    )
    assert notes(candidates("llama3-8b", pp=4, schedule="zbv", vpp=2), 0, "megatron") == [
        "1 setting has no flag in megatron: schedule"
    ]
    assert notes(candidates("llama3-8b", dp=4), 0, "megatron") == []


@pytest.mark.parametrize(
    ("tool", "other"), [("megatron", "torchtitan"), ("torchtitan", "megatron")]
)
def test_figures_of_another_framework_are_said_to_be_so(tool, other):
    found = candidates("llama3-8b", dp=4, framework=other)
    said = [line for line in stripped(found, tool) if line.startswith("# figures are with")]
    assert len(said) == 1
    assert f"--framework {tool}" in said[0]
    assert said[0].removeprefix("# ") in notes(found, 0, tool)
    assert not any("figures" in line for line in lines(tool, "llama3-8b", framework=tool))


def test_what_is_timed_is_no_setting_of_a_framework():
    found = lines("megatron", "llama3-8b", device_memory="80GB", memory_allowance="2GiB")
    assert not any(line[0] == "#" for line in found)
    assert "# grad_reduce=microbatch has no flag" in lines(
        "megatron", "llama3-8b", dp=2, grad_reduce="microbatch"
    )


@cases
def test_megatron_fsdp_with_tp_or_cp_is_noted(
    hardware: str, settings: dict[str, int], warned: bool
):
    columns = {name: Column.of([value]) for name, value in {"dp": 2, **settings}.items()}
    columns["hardware"] = Column.constant(resolve(hardware), 1)
    base = Experiment(Run(model="llama3-8b"), ClusterSection(), Execution())
    said = notes(candidates_of(base, columns), 0, "megatron")
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in said) == warned
