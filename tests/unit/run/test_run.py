import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import cases
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.files import read_settings
from stagewright.run.pipeline_split import compute_split, even_split
from stagewright.run.rules import check
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.cluster import ClusterSection
from stagewright.run.sections.execution import Execution
from stagewright.run.sections.parallelism import ParallelismSection
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES
from stagewright.trace.run_manifest import load_model

SIZES: dict[str, Any] = {
    "name": "toy",
    "num_layers": 16,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 24,
    "num_query_groups": 8,
    "kv_channels": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
TOY = ModelConfig(**SIZES)
LEARNED = ModelConfig(**SIZES | {"position": "learned"})
ENCODER = ModelConfig(**SIZES | {"causal": False, "encoder": True})


def run(**settings: Any) -> Run:
    return Run(model="toy", **settings)


def test_microbatches_pass_through_chunks_in_groups_as_in_the_framework():
    """torch: `microbatches // pp` equal rounds (ScheduleInterleaved1F1B); Megatron-LM: of pp."""
    of = {"pp": 4, "vpp": 2, "global_batch_size": 10}

    assert run(**of).microbatch_group is None
    assert run(**of, microbatch_group_size_per_vp_stage=6).microbatch_group == 6
    assert run(**of, framework="torchtitan").microbatch_group == 5
    assert run(**of | {"global_batch_size": 9}, framework="torchtitan").microbatch_group is None
    assert run(**of, framework="torchtitan", schedule="zb-h1").microbatch_group is None


def test_resolved_fills_in_the_defaults():
    of = run(pp=4, dp=2, vpp=2, micro_batch_size=3).resolved(TOY)

    assert of.seq_length == 4096
    assert of.global_batch_size == 24
    assert of.schedule == "interleaved"
    assert of.layers_per_stage == (2,) * 8
    assert of.resolved(TOY) == of


def test_asked_takes_back_what_resolved_filled_in():
    of = run(pp=4, dp=2, vpp=2, zero=1, seq_length=64)

    assert of.resolved(TOY).unresolved() == of
    assert of.resolved(TOY).describe() == "toy dp=2 pp=4 seq_length=64 vpp=2 zero=1"


def test_state_is_sharded_over_all_of_dp_unless_told():
    assert run(dp=4).resolved(TOY).dp_shard is None
    assert run(dp=4, zero=1).resolved(TOY).dp_shard == 4
    assert run(dp=4, zero=1, dp_shard=2).resolved(TOY).dp_shard == 2


def test_long_models_are_not_trained_at_full_length_unless_told():
    assert run().resolved(resolve("llama3.1-8b")).seq_length == 8192


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_split(layers: int, stages: int):
    split = even_split(layers, stages)

    assert sum(split) == layers
    assert len(split) == stages
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


def test_declarations_contradict_nothing():
    names = [name for of in EXPERIMENT.values() for name in (*of.names, *of.switches)]
    for of in EXPERIMENT.values():
        assert of.help.endswith("."), of.name
        assert len(of.help) < 130, of.name
        assert bool(of.elsewhere) <= (of.modes == ("train",)), of.name
        assert all(other in EXPERIMENT for other in of.needs), of.name
    assert len(names) == len({*names})
    assert not {name.replace("-", "_") for name in names} & EXPERIMENT.keys()


# ---- what can be done ----------------------------------------------------------------------------


def test_rotary_positions_may_be_exceeded_and_learned_ones_not():
    check(run(seq_length=8192), TOY)
    with pytest.raises(UserError, match="longer than the 4096 learned positions"):
        check(run(seq_length=8192), LEARNED)


# ---- what cannot: the whole message --------------------------------------------------------------


@cases
def test_check_refuses(settings: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        check(run(**settings), TOY)

    assert str(caught.value) == message.replace("<schedules>", ", ".join(SCHEDULES))


def test_a_schedule_gets_the_microbatches_it_needs():
    for name, vpp, wanted in (("1f1b", 1, 4), ("dualpipe", 1, 8), ("dualpipev", 2, 8)):
        of = run(pp=4, vpp=vpp, dp=3, schedule=name).resolved(TOY)
        check(of, TOY)
        assert (of.microbatches, of.global_batch_size) == (wanted, 3 * wanted)
        assert of.unresolved().global_batch_size is None


def test_the_error_names_the_published_model():
    with pytest.raises(UserError) as caught:
        check(Run(model="llama3.1-70b", tp=6), resolve("llama3.1-70b"))

    assert str(caught.value) == (
        "tp=6 does not divide the 64 attention heads of llama3.1-70b; use 1, 2, 4, 8, 16, 32 or 64"
    )


def test_tp_must_divide_the_mlp_too():
    narrow = ModelConfig(**SIZES | {"ffn_hidden_size": 1000})

    with pytest.raises(UserError) as caught:
        check(run(tp=3), narrow)

    assert str(caught.value) == (
        "tp=3 does not divide the 1000 channels of the MLP of toy; use 1, 2, 4 or 8"
    )


# ---- run files -----------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_load_reads_every_kind_of_setting(run_file: Callable[[str], Path]):
    path = run_file(
        "# a comment\nmodel: toy\ntp: 8\nfuse: no\nrecompute: selective\n"
        "recompute_modules: [norm, core_attn]\npp: 2\nlayers_per_stage:\n- 7\n- 9\nseq_length:\n"
    )

    assert Run.load(path) == run(
        tp=8,
        pp=2,
        fuse=False,
        recompute="selective",
        recompute_modules=("norm", "core_attn"),
        layers_per_stage=(7, 9),
    )


def test_a_list_may_be_given_as_text(run_file: Callable[[str], Path]):
    text = "model: toy\nrecompute: selective\nrecompute_modules: norm\nlayers_per_stage: 9,7\n"
    run = Run.load(run_file(text))
    assert (run.recompute_modules, run.layers_per_stage) == (("norm",), (9, 7))
    assert Experiment.of({"model": "toy", "no_overlap": "dp, tp"}).execution.no_overlap == {
        "dp",
        "tp",
    }


def test_a_manifest_is_a_run_file(tmp_path: Path):
    path = tmp_path / "manifest.json"
    of = run(tp=2, pp=2, layers_per_stage=(9, 7), recompute_modules=("core_attn",))
    path.write_text(json.dumps({"stagewright": "0.1.0", "run": of.model_dump(), "model": {}}))

    assert Run.load(path) == of
    assert Run.load(path, {"tp": 4}).tp == 4


def test_a_manifest_brings_its_model(tmp_path: Path):
    path = tmp_path / "manifest.json"
    fields = {name: getattr(LEARNED, name) for name in LEARNED.__dataclass_fields__}
    path.write_text(json.dumps({"stagewright": "0.1.0", "run": {"model": "x"}, "model": fields}))

    assert load_model(path) == LEARNED


def test_a_run_file_may_be_grouped_by_section(run_file: Callable[[str], Path]):
    path = run_file(
        "model:\n  model: toy\n  layers: 4\nparallelism:\n  tp: 8\n  zero: 1\nmicro_batch_size: 2\n"
    )

    assert Run.load(path) == run(layers=4, tp=8, zero=1, micro_batch_size=2)
    assert Run.load(path).section(ParallelismSection) == ParallelismSection(tp=8, zero=1)


@cases
def test_options_of_other_tools_stand_in_run_files(
    text: str, wanted: dict[str, Any], run_file: Callable[[str], Path]
):
    assert Run.load(run_file("model: toy\n" + text)) == run(**wanted)


def test_what_is_given_replaces_what_follows_from_the_file(run_file: Callable[[str], Path]):
    path = run_file("model: toy\nmode: decode\ntp: 4\nenable_expert_parallel: true\n")
    assert Run.load(path, {"ep": 2}).ep == 2
    path = run_file("model: toy\nmode: decode\ntp: 4\nep: 2\n")
    assert Run.load(path, {"enable_expert_parallel": True}).ep == 4


def test_a_run_file_may_hold_an_experiment(run_file: Callable[[str], Path]):
    path = run_file(
        "model: toy\ntp: 8\nhardware: h100-sxm\nnodes: 2\n"
        "execution:\n  no_overlap: [dp]\n  prefetch: 2\nstragglers:\n  5: 1.5\n"
    )
    found = Experiment.of(read_settings(path), {"prefetch": 3}, path)

    assert found.run == Run.load(path) == run(tp=8)
    assert found.cluster == ClusterSection(hardware="h100-sxm", nodes=2, stragglers={5: 1.5})
    assert found.execution == Execution(no_overlap=frozenset({"dp"}), prefetch=3)


@cases
def test_an_experiment_is_refused(run_file: Callable[[str], Path], text: str, message: str):
    path = run_file("model: toy\n" + text)

    with pytest.raises(UserError) as caught:
        Experiment.of(read_settings(path), path=path)

    assert str(caught.value) == message.format(path=path)


@cases
def test_load_refuses(run_file: Callable[[str], Path], text: str, message: str):
    path = run_file(text)

    with pytest.raises(UserError) as caught:
        Run.load(path)

    assert str(caught.value) == message.format(path=path)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"a: \x00", b"[" * 100_000, b"a: " + b"9" * 5000]
)
def test_load_refuses_what_is_not_yaml(tmp_path: Path, content: bytes):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)

    with pytest.raises(UserError, match=r"run\.yaml"):
        Run.load(path)


@pytest.mark.parametrize(
    "model", [None, [], {"name": "x"}, {"name": "x", "colour": 3}, {"num_layers": "x"}]
)
def test_a_manifest_with_a_broken_model(tmp_path: Path, model: object):
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"stagewright": "9", "run": {"model": "toy"}, "model": model}))

    with pytest.raises(UserError, match="cannot read the model of this manifest"):
        load_model(path)


@pytest.mark.parametrize("model", [TOY, LEARNED, ENCODER])
def test_models_of_manifests_come_back(tmp_path: Path, model: ModelConfig):
    path = tmp_path / "manifest.json"
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    path.write_text(json.dumps({"stagewright": "9", "run": {"model": "toy"}, "model": fields}))

    assert load_model(path) == model


def test_ranks_share_key_value_heads_evenly():
    wanted = "tp=12 neither divides the 8 key-value heads of toy nor is a multiple of them; "
    with pytest.raises(UserError, match=f"^{wanted}use 1, 2, 4, 8 or 24$"):
        check(run(tp=12), TOY)


def test_a_section_may_be_empty_but_is_no_value(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nparallelism:\n  # tp: 2\n")
    assert Run.load(path) == Run(model="gpt2")
    path.write_text("model: gpt2\nparallelism: [tp, 2]\n")
    with pytest.raises(UserError, match=r"parallelism is a section, got \['tp', 2\], wanted its"):
        Run.load(path)


@cases
def test_torchtitan_counts_the_ends_as_layers(layers: int, stages: int, split: tuple[int, ...]):
    assert even_split(layers, stages, 1, 1) == split
    of = run(framework="torchtitan", pp=stages, layers=layers, seq_length=64)
    resolved = of.resolved(TOY)
    assert resolved.layers_per_stage == split
    assert resolved.unresolved() == of
    check(of, TOY)


def test_a_split_by_compute_follows_from_the_model():
    of = run(pp=4, pipeline_split="compute", seq_length=64)
    resolved = of.resolved(TOY)
    assert resolved.layers_per_stage == compute_split(TOY, 4)
    assert resolved.unresolved() == of
    assert sum(of.model_copy(update={"layers": 7}).resolved(TOY).layers_per_stage or ()) == 7
    check(resolved, TOY)
    with pytest.raises(UserError, match="contradicts pipeline_split=compute, which makes it "):
        check(run(pp=2, pipeline_split="compute", layers_per_stage=(15, 1)), TOY)


def test_a_split_by_compute_may_leave_ranks_between_others_without_layers():
    """nanotron's ranks that get no block hand activations on; a split of one's own may not."""
    settings = {"pp": 8, "layers": 8, "vocab": 131072, "seq_length": 64, "global_batch_size": 8}
    model = resolve("llama3.2-1b")
    of = Run(model="llama3.2-1b", pipeline_split="compute", **settings)
    split = of.resolved(model).layers_per_stage
    assert split
    assert 0 in split[1:-1]
    check(of.resolved(model), model)
    assert len(compile(of, model).program.classes) == 8
    with pytest.raises(UserError, match="leaves stage 5 without layers"):
        check(Run(model="llama3.2-1b", layers_per_stage=split, **settings), model)


def test_hardware_beside_the_run_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "best.hardware.yaml").write_text("name: mine\n")
    (tmp_path / "best.yaml").write_text("model: gpt2\nhardware: elsewhere/best.hardware.yaml\n")
    found = read_settings(tmp_path / "best.yaml")
    assert found["hardware"] == str(tmp_path / "best.hardware.yaml")
    (tmp_path / "best.yaml").write_text("model: gpt2\nhardware: other.yaml\n")
    assert read_settings(tmp_path / "best.yaml")["hardware"] == "other.yaml"
