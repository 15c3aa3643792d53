"""What a quantization_config makes of weights, caches and products, against published sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from helpers import DATA, cases
from stagewright.lower import weight_storage
from stagewright.model import json as model_json
from stagewright.model.catalog import from_config, resolve
from stagewright.model.config import ModelConfig
from stagewright.model.hf.quantization import MXFP4, NVFP4, Modules, read_quantization, scheme_of
from stagewright.model.presets import PRESETS
from stagewright.stored import Stored

STEP: dict[str, Any] = {"mode": "decode", "batch_size": 1, "context_length": 16}
BLOCKS = Stored("fp8", 32, 128, 128, "fp8")
CASES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (DATA / "models/quantization.jsonl").read_text("utf-8").splitlines()
]


def rows_with(*keys: str) -> list[tuple[Any, ...]]:
    """The rows of the table with these keys."""
    return [tuple(row[key] for key in keys) for row in CASES if {*keys} <= row.keys()]


def held(model: str | Path, **settings: Any) -> int:
    """Bytes of all weights."""
    run = sw.Run(model=str(model), **{**STEP, **settings})
    return sum(of.memory["parameters"] for of in sw.compile(run).program.classes)


def with_quantization(folder: Path, like: str, config: object, **others: Any) -> Path:
    """A copy of a published config.json, with this quantization_config."""
    data = json.loads((DATA / f"configs/{like}.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(data | {"quantization_config": config} | others))
    return path


@cases
def test_weights_are_as_large_as_the_checkpoint(model: str, published: int) -> None:
    assert held(model) == published
    assert held(DATA / f"configs/{model}.json") == published


def test_minimax_is_in_fp8() -> None:
    """A byte for a parameter, and another for those of embeddings and of the head."""
    assert 1.005 < held("minimax-m2.5") / 228_689_748_992 < 1.007


def test_gpt_oss_fits_one_gpu() -> None:
    run = sw.Run(
        model="gpt-oss-120b", mode="decode", batch_size=32, context_length=4096,
        device_memory="80GB",
    )  # fmt: skip
    fitting = sw.compile(run).capacity
    assert fitting is not None
    assert fitting.fits
    assert fitting.requests > 64


def test_a_setting_goes_before_the_checkpoint() -> None:
    total = 116_829_156_672
    assert held("gpt-oss-120b", weight_precision="bf16") == 2 * total
    assert held("gpt-oss-120b", precision="fp32") == 4 * total
    kept = sw.compile(sw.Run(model="gpt-oss-120b", dp=8, seq_length=128))
    assert kept.program.classes[0].memory["parameters"] == 2 * total


def test_experts_alone_are_in_mxfp4() -> None:
    given = PRESETS["gpt-oss-120b"].quantization
    assert given is not None
    assert given.kinds == ((("we_up", MXFP4), ("we_gate", MXFP4), ("we_down", MXFP4)),)
    assert given.layers == (0,) * 36
    # Products are of bf16: no input is cast.
    tasks = sw.compile(sw.Run(model="gpt-oss-120b", layers=1, **STEP)).program.classes[0].tasks
    assert {tasks.dtypes[i] for i in tasks.dtype[tasks.op == tasks.ops.index("einsum")]} == {"bf16"}


def test_deepseek_in_blocks() -> None:
    """85 GB a rank of tp=8; products in fp8 but for routers, the head and absorbed matrices."""
    for model in ("deepseek-r1", DATA / "configs/deepseek-r1.json"):
        run = sw.Run(model=str(model), tp=8, **STEP)
        of_rank = sw.compile(run).program.classes[0].memory["parameters"]
        assert of_rank == pytest.approx(85.3e9, 1e-3)


ALL = ("attention", "mlp")


@pytest.mark.parametrize(("config", "stored"), rows_with("config", "stored"))
def test_methods(config: dict[str, Any], stored: list[Any]) -> None:
    model = PRESETS["qwen3-8b"]
    found, notes = read_quantization("file", config, model)
    assert not notes
    assert found is not None
    assert found.kinds == (tuple((scope, Stored(*stored)) for scope in ALL),)


def layers_of(config: dict[str, Any], model: ModelConfig) -> list[dict[str, Stored | None]]:
    found, _ = read_quantization("file", config, model)
    assert found is not None
    return [dict(found.of_layer(index)) for index in range(model.num_layers)]


MOE = PRESETS["qwen3-30b-a3b"]


@pytest.mark.parametrize(("ignored", "out"), rows_with("ignore", "left out"))
def test_modules_that_are_left_out(ignored: list[str] | str, out: list[str] | None) -> None:
    """`out`: matrices of every layer; None: all of layer 7, and of no other."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignored}
    names = {"attention": ("wq", "wk", "wv", "wo"), "mlp": ("we_up", "we_gate", "we_down")}
    for index, rows in enumerate(layers_of(config, MOE)):
        usual = {scope: rows.get(scope) for scope in names}
        left = {n for scope in names for n in names[scope] if rows.get(n, usual[scope]) is None}
        every = {n for scope in names for n in names[scope]}
        assert left == ({*out} if out is not None else every if index == 7 else set())


def test_modules_by_name() -> None:
    """Mixed precision: modelopt names each module, and groups name theirs."""
    fp8 = {
        "weights": {"num_bits": 8, "type": "float"},
        "input_activations": {"num_bits": 8, "type": "float"},
        "targets": ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.o_proj"],
    }
    fp4 = {"weights": {"num_bits": 4, "type": "float", "group_size": 16},
           "targets": ["lm_head", "model.layers.3.mlp.experts"]}  # fmt: skip
    config = {"quant_method": "modelopt", "config_groups": {"a": fp8, "b": fp4}}
    rows = layers_of(config, MOE)
    of_8, of_4 = Stored("fp8", 32, 0, 0, "fp8"), NVFP4._replace(product="")
    experts = dict.fromkeys(("we_up", "we_gate", "we_down"), of_4)
    rows[3].pop("wg")  # of models whose queries bring their gates along
    assert rows[3] == {"wq": of_8, "wo": of_8, **experts}
    assert not any(row for index, row in enumerate(rows) if index != 3)
    found, _ = read_quantization("file", config, MOE)
    assert found is not None
    assert found.head == (("lm_head", of_4),)
    each = {
        "model.layers.3.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.3.self_attn.q_proj": {"quant_algo": "MXFP8"},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": each}
    mx = Stored("fp8", 8, 1, 32, "fp8")
    assert layers_of(config, MOE)[3] == {"wq": mx, "wg": mx, "we_up": NVFP4}


def test_experts_of_deepseek_v4(tmp_path: Path) -> None:
    """`expert_dtype`: MXFP4 for routed experts, whose inputs are in fp8."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = with_quantization(tmp_path, "deepseek-v3", config, expert_dtype="fp4")
    given = from_config(path).quantization
    assert given is not None
    rows = dict(given.of_layer(10))
    assert rows["attention"] == BLOCKS
    assert rows["we_up"] == rows["we_down"] == MXFP4._replace(product="fp8")


def test_experts_beside_an_mlp() -> None:
    """Gemma 4: `layers.3.experts` stands beside `layers.3.mlp`, which alone is left out."""
    layer = {"mlps": ("dense+experts",)}
    model = replace(PRESETS["qwen3-30b-a3b"], ffn_hidden_size=2112, **layer)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ignored = ["model.language_model.layers.*.mlp*", "*self_attn*"]
    rows = layers_of(config | {"ignore": ignored}, model)[5]
    assert rows == dict.fromkeys(("we_up", "we_gate", "we_down"), NVFP4)


def test_a_head_in_few_bits() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": []}
    found, _ = read_quantization("file", config, PRESETS["llama3.1-8b"])
    assert found is not None
    assert [name for name, _ in found.head] == ["lm_head"]
    left, _ = read_quantization("file", config | {"ignore": ["lm_head"]}, PRESETS["llama3.1-8b"])
    assert left is not None
    assert left.head == ()


@cases
def test_the_cache(tmp_path: Path, config: dict[str, Any], cache: str) -> None:
    own = {"quant_method": "modelopt", "quant_algo": "FP8", **config}
    path = with_quantization(tmp_path, "qwen3-32b", own)
    assert sw.compile(sw.Run(model=str(path), **STEP)).run.kv_cache_dtype == cache
    other = sw.compile(sw.Run(model=str(path), kv_cache_dtype="bf16", **STEP))
    assert other.run.kv_cache_dtype == "bf16"


def test_a_cache_alone() -> None:
    config: dict[str, Any] = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    found, notes = read_quantization("file", config, PRESETS["qwen3-8b"])
    assert not notes
    assert found is not None
    assert (found.kv_cache, found.formats) == ("fp8", ())


def test_a_cache_that_is_not_known_is_named() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}
    found, notes = read_quantization("file", config, PRESETS["qwen3-8b"])
    assert found is not None
    assert found.kv_cache == ""
    assert notes == ("file: a KV cache in nvfp4 is not known; use --kv-cache-dtype",)


@pytest.mark.parametrize(("config", "words"), rows_with("config", "not understood"))
def test_what_is_not_understood_is_said(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    model = from_config(with_quantization(tmp_path, "qwen3-32b", config or {"x": 1}))
    assert model.quantization is None
    (note,) = model.notes
    assert words in note
    assert "--weight-precision" in note


def test_a_file_beside(tmp_path: Path) -> None:
    """hf_quant_config.json of modelopt, where the config.json itself says nothing."""
    path = tmp_path / "config.json"
    path.write_text((DATA / "configs/qwen3-32b.json").read_text())
    assert from_config(path).quantization is None
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": inner}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    given = from_config(path).quantization
    assert given is not None
    assert given.kv_cache == "fp8"
    assert given.formats == (Stored("fp8", 32, 0, 0, "fp8"),)


def test_scales_are_counted_whole(tmp_path: Path) -> None:
    """Rows, 32 values of a row, and whole matrices have scales of their own; a rank has its own."""
    rows = 40 * (2 * 5120 + 2 * 1024 + 2 * 17408 + 5120)  # of qwen3-14b: outputs of all matrices
    matrices = 14_768_307_200 - 2 * 151936 * 5120 - (40 * (2 * 5120 + 2 * 128) + 5120)
    plain = 2 * (14_768_307_200 - matrices)
    for bits, group, scales in ((8, -1, rows), (4, 32, matrices // 32)):
        config = {"quant_method": "gptq", "bits": bits, "group_size": group}
        data = json.loads((DATA / "configs/qwen3-32b.json").read_text())
        changes = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17408,
                   "num_attention_heads": 40}  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data | changes | {"quantization_config": config}))
        wanted = plain + matrices * bits // 8 + scales * (16 + bits) / 8
        assert held(path) == pytest.approx(wanted, abs=400)
        assert held(path, tp=1, pp=2) == pytest.approx(wanted, abs=400)


def test_products_run_in_the_format_of_their_inputs(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    path = with_quantization(tmp_path, "qwen3-32b", config)
    compiled = sw.compile(sw.Run(model=str(path), layers=2, **STEP))
    tasks = compiled.program.classes[0].tasks
    products = tasks.dtype[tasks.op == tasks.ops.index("einsum")]
    assert {tasks.dtypes[i] for i in products} == {"fp4", "bf16"}
    on_b200, on_h100 = (sw.simulate(compiled, name) for name in ("b200", "h100-sxm"))
    assert on_b200.notes == []
    (note,) = on_h100.notes
    assert "h100-sxm has no matrix products in fp4" in note


@pytest.mark.numerics
def test_prefill_is_faster_where_the_gpu_has_the_format(tmp_path: Path) -> None:
    """Where a GPU lacks fp8, products take the time of bf16; in training fp8 is an error there."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = str(with_quantization(tmp_path, "qwen3-32b", config))
    step: dict[str, Any] = {"mode": "prefill", "prompt_length": 4096, "layers": 2}
    for gpu, faster in (("h100-sxm", True), ("a100-sxm-80gb", False)):
        low = sw.simulate(path, gpu, **step).seconds
        plain = sw.simulate(path, gpu, **step, weight_precision="bf16").seconds
        assert (low < 0.8 * plain) == faster
        assert faster or low == pytest.approx(plain, rel=0.1)
    with pytest.raises(sw.UserError, match="a100-sxm-80gb has no matrix products in fp8"):
        sw.simulate("gpt2", "a100-sxm-80gb", precision="fp8")


def test_notes_in_training(tmp_path: Path) -> None:
    path = with_quantization(tmp_path, "qwen3-32b", {"quant_method": "fp8"})
    model = from_config(path)
    (note,) = weight_storage.notes(sw.Run(model=str(path)), model)
    assert note.startswith("training starts from weights in bf16: the quantization_config (fp8)")
    assert not weight_storage.notes(sw.Run(model=str(path), **STEP), model)
    assert not weight_storage.notes(sw.Run(model="deepseek-v3"), resolve("deepseek-v3"))


def test_a_manifest_keeps_the_storage() -> None:
    for name in ("gpt-oss-20b", "deepseek-v3"):
        fields = json.loads(json.dumps(model_json.to_json(PRESETS[name])))
        assert model_json.from_json(fields, {}) == PRESETS[name]
    fields["quantization"]["layers"] = [5]
    with pytest.raises(sw.UserError, match="wanted indices of kinds"):
        model_json.from_json(fields, {})


def test_ten_thousand_names_are_read_at_once() -> None:
    """A name for each module of each layer, as MiniMax-M3 has them."""
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(48) for e in range(300)]
    modules = Modules.of(names)
    assert modules.has(47, "mlp.experts.299.up_proj")
    assert not modules.has(47, "mlp.experts.299.down_proj")
    assert scheme_of({"quant_method": "fp8", "modules_to_not_convert": names}).key(3) is not None
