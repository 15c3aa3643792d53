"""TracedNode PyTorch modules as models: the same parameters, FLOPs and communication as presets."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import DATA, cases, table_of
from stagewright.blocks.text import stg
from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.imports.recording import Recording, Ref, TracedNode
from stagewright.imports.sources import model_of, recorded
from stagewright.imports.translate import translate
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS
from stagewright.run.settings import Run
from stagewright.views.summary import summary

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 32}
LATENT: dict[str, Any] = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "kv_channels": 24, "num_query_groups": 8,
}  # fmt: skip
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3-8b", TINY | {"num_layers": 2, "num_query_groups": 4, "kv_channels": 8}),
    "qwen3-moe": (
        "qwen3-30b-a3b",
        TINY | MOE | {"num_layers": 2, "num_query_groups": 4, "kv_channels": 16},
    ),
    "deepseek-v3": (
        "deepseek-v3",
        TINY | MOE | LATENT | {
            "num_layers": 3, "first_dense_layers": 1, "mtp_num_layers": 0,
            "shared_ffn_hidden_size": 32, "num_expert_groups": 4, "topk_groups": 2,
            "max_position_embeddings": 4096,
        },
    ),
    "gpt2": ("gpt2", {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 8,
        "num_query_groups": 8, "kv_channels": 8, "vocab_size": 512, "max_position_embeddings": 128,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0,
    }),
}  # fmt: skip


def recording(name: str) -> Recording:
    return recorded(str(DATA / "imports" / f"{name}.json"))


@cache
def imported(name: str) -> sw.ModelConfig:
    return model_of(translate(recording(name)), name)


def like(name: str) -> sw.ModelConfig:
    preset, fields = LIKE[name]
    return replace(PRESETS[preset], **fields)


def figures(model: sw.ModelConfig, **settings: Any) -> list[Any]:
    """FLOPs and communication of every class of ranks."""
    run = Run(model=model.name, seq_length=64, **settings)
    classes: Any = summary(sw.compile(run, model))["rank_classes"]
    moved = ("collectives", "messages", "sends", "flops")
    return [{key: each.get(key) for key in moved} for each in classes]


@pytest.mark.parametrize("name", LIKE)
def test_parameters_are_those_of_the_module(name: str):
    assert parameters(imported(name))[0] == recording(name).parameters
    assert parameters(imported(name)) == parameters(like(name))


@pytest.mark.parametrize("name", LIKE)
def test_layers_are_folded(name: str):
    _, *layers, _ = imported(name).chain
    assert sum(int(link.split()[0]) for link in layers) == like(name).num_layers


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = table_of("test_translate", "settings")


@pytest.mark.numerics
@pytest.mark.parametrize("what", SETTINGS)
def test_flops_and_communication_are_those_of_the_preset(what: str):
    name, settings = SETTINGS[what]
    ours, presets = figures(imported(name), **settings), figures(like(name), **settings)
    for got, wanted in zip(ours, presets, strict=True):
        # Queries of latents are two products here, whose gradients are not joined by an addition.
        work = got.pop("flops"), wanted.pop("flops")
        assert work[0] == pytest.approx(work[1], rel=1e-3 if "latent" in what else 0)
        assert got == wanted


def as_presets_write_it(name: str) -> sw.ModelConfig:
    """The imported model, without what its text says of how the module's own code is written."""
    text = imported(name).modules[0].text
    plain = re.sub(r"(, )?\b(operators=true|fused=\w+)", "", text)
    plain = re.sub(r"\bexperts\[[^]]*\]", "experts", plain)
    return stg.parse(plain.replace("; ]", "]"), f"{name}.stg").model


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2"])
def test_what_a_framework_does_not_fuse_is_not_fused_here_either(name: str):
    """RMSNorm, gates and shared keys as operators: kernel by kernel those of the preset."""
    found: list[Any] = []
    for model in (as_presets_write_it(name), like(name)):
        settings: dict[str, Any] = {"framework": "torchtitan", "tp": 2, "sequence_parallel": True}
        (of,) = sw.compile(Run(model=model.name, seq_length=64, **settings), model).program.classes
        t = of.tasks
        names = [t.ops[i] for i in t.op], t.phase.tolist(), t.traffic.tolist(), t.flops.tolist()
        found.append((Counter(zip(*names, strict=True)), dict(of.memory)))
    assert found[0] == found[1]


def einsum(spec: str, *shapes: tuple[int, ...], out: tuple[int, ...]) -> Recording:
    """The sum of an einsum of parameters."""
    leaves = [TracedNode(f"w{i}", "param", n, "fp32", path=f"w{i}") for i, n in enumerate(shapes)]
    refs = tuple(Ref(n.name) for n in leaves)
    nodes = (
        *leaves,
        TracedNode("x", "input", (out[0],), "fp32"),
        TracedNode("made", "aten.einsum.default", out, "fp32", (spec, refs), source="m.py:3"),
        TracedNode("scaled", "aten.add.Tensor", out, "fp32", (Ref("made"), 1.0)),
        TracedNode("loss", "aten.sum.default", (), "fp32", (Ref("scaled"),)),
    )
    return Recording("einsum", nodes, ("loss",))


def test_einsum_with_dots_and_of_several_operands():
    dots = translate(einsum("...i,ij->...j", (4, 3, 5), (5, 7), out=(4, 3, 7))).text
    assert "= einsum[zyx,xw->zyw](" in dots
    three = translate(einsum("ab,bc,cd->ad", (4, 5), (5, 6), (6, 7), out=(4, 7))).text
    assert three.count("= einsum[") == 2
    with pytest.raises(UserError, match=r"m\.py:3: einsum 'aa->a' takes a diagonal"):
        translate(einsum("aa->a", (4, 4), out=(4,)))


def test_sizes_that_data_decides_are_refused_where_they_arise():
    odd = _with("aten.tanh.default")
    nodes = [replace(n, shape=("u0", 8)) if n.name == "b" else n for n in odd.nodes]
    with pytest.raises(UserError, match=r"model\.py:7: values of tensors decide how many"):
        translate(replace(odd, nodes=tuple(nodes)))


def test_a_step_takes_as_long_as_that_of_the_preset():
    run: dict[str, Any] = {"tp": 2, "seq_length": 64}
    times = [
        sw.simulate(sw.compile(Run(model=model.name, **run), model), "h100-sxm").seconds
        for model in (imported("llama"), like("llama"))
    ]
    assert times[0] == times[1]


def test_a_recording_is_kept_as_text():
    kept = recording("llama")
    assert Recording.from_json(kept.to_json()).to_json() == kept.to_json()


def _changed(**parts: Any) -> str:
    known: dict[str, Any] = {"version": 2, "name": "x", "outputs": ["y"], "notes": []}
    known["nodes"] = [
        ["x", "input", [2, 4], "fp32", [], {}, "", ""],
        ["y", "aten.relu.default", [2, 4], "fp32", [{"ref": "x"}], {}, "", ""],
    ]
    return json.dumps(known | parts)


@cases
def test_what_is_no_recording_is_refused(text: str, reason: str):
    with pytest.raises(UserError, match=re.escape(reason)):
        Recording.from_json(text)


def test_an_operation_with_other_arguments_than_pytorch_gives_is_refused():
    odd = _with("aten.permute.default")
    with pytest.raises(UserError, match=r"model\.py:7: no row for aten\.permute\.default with"):
        translate(odd)


def test_recordings_of_many_layers_are_read(tmp_path: Path):
    kept = recording("llama")
    path = tmp_path / "large.json"
    path.write_text(replace(kept, notes=("x" * 300_000,)).to_json())
    assert recorded(str(path)).nodes[-1].name == kept.nodes[-1].name


def test_files_are_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = str(DATA / "imports" / "gpt2.json"), tmp_path / "x.stg"
    codes: list[object] = []
    for more in ((), (), ("--force",)):
        with pytest.raises(SystemExit) as stop:
            main(["import", source, "-o", str(out), *more])
        codes.append(stop.value.code)
    assert codes == [0, 2, 0]
    assert "exists already; choose another name, or --force" in capsys.readouterr().err


def _with(op: str) -> Recording:
    """A model of one unknown operation between two products."""
    nodes = (
        TracedNode("w", "param", (8, 8), "fp32", path="lin.weight"),
        TracedNode("x", "input", ("s0", 8), "fp32"),
        TracedNode("a", "aten.linear.default", ("s0", 8), "fp32", (Ref("x"), Ref("w")), path="lin"),
        TracedNode("b", op, ("s0", 8), "fp32", (Ref("a"),), path="odd", source="model.py:7"),
        TracedNode("c", "aten.sum.default", (), "fp32", (Ref("b"),)),
    )
    return Recording("odd", nodes, ("c",))


def test_an_operation_without_a_row_is_refused_or_counted_by_its_bytes():
    with pytest.raises(UserError, match=r"model.py:7: no row for mine\.odd\.default \(in odd\)"):
        translate(_with("mine.odd.default"))
    made = translate(_with("mine.odd.default"), approximate=True)
    assert "without a row" in made.notes[0]
    assert parameters(model_of(made, "odd"))[0] == 64


def test_a_dim_that_nothing_names_is_asked_for():
    odd = _with("aten.tanh.default")
    nodes = [replace(n, shape=("s0", "s1", "s2", 8)) if n.name == "x" else n for n in odd.nodes]
    with pytest.raises(UserError, match=r"dim 2 of input x \[B, S, \?, 8\] varies, besides"):
        translate(replace(odd, nodes=tuple(nodes)))
    example = {"example": (2, 16, 12, 8)}
    wide = {"x": example, "a": {}, "b": {}}
    nodes = [replace(n, shape=("s0", "s1", "s2", 8), kwargs=wide[n.name]) if n.name in wide else n
             for n in odd.nodes]  # fmt: skip
    named = {"x": ("B", "S", "T", "C")}
    assert "\nsize T = 12\n" in translate(replace(odd, nodes=tuple(nodes)), named).text


def test_show_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["show", str(DATA / "imports" / "llama.json"), "--via", "torch", "--json"])
    assert not [*tmp_path.iterdir()]
