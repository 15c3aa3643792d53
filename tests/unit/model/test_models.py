"""Presets against published parameter counts, and the config.json importer against the world.

`data/published_parameters.csv` says where each count is from. Counts of the Hugging Face hub were
read from public code that quotes them. Tables of cases are in `data/models`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
from ast import literal_eval
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers import DATA, ROOT, cases, times
from stagewright.errors import UserError
from stagewright.lower.parameters import parameters
from stagewright.model import hub
from stagewright.model.architecture import LIMITS
from stagewright.model.catalog import from_config, resolve
from stagewright.model.config import ModelConfig
from stagewright.model.hf import keys as hf_keys
from stagewright.model.hf import read as hf
from stagewright.model.layers import ATTENTIONS, RECURRENCES, SIDE_BY_SIDE, StateSpace
from stagewright.model.presets import PRESETS

RECORDED: list[dict[str, Any]] = [
    json.loads(line)
    for line in (DATA / "family_parameters.jsonl").read_text(encoding="utf-8").splitlines()
]
"""Small models with the parameters that transformers 5.23 makes of their config.json, without
biases that only balance the load of experts (`e_score_correction_bias`)."""

OTHERWISE = {
    "ApertusForCausalLM",  # without two numbers for the activation of each layer
    # Classes of their own repositories, which transformers does not have.
    *("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneForCausalLM", "YiForCausalLM"),
    *("InternLM2ForCausalLM", "MiniCPMForCausalLM", "MiniMaxM1ForCausalLM", "Phi4MMForCausalLM"),
    "CwmForCausalLM",  # small ones cannot be made by transformers 5.23; as Mistral
    "MiMoForCausalLM",  # not in transformers
    "PhiMoEForCausalLM",  # Microsoft's own name of PhimoeForCausalLM
    "MinistralForCausalLM",  # cannot be made by transformers 5.23; as Mistral
    "Step3p7FlashForCausalLM",  # a class of its own repository
}
"""Families whose counts are compared elsewhere or not at all."""

CONFIGS = sorted((DATA / "configs").glob("*.json"))
SHIPPED = ROOT / "src/stagewright/data/configs"
TABLES = DATA / "models"


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def json_rows(name: str) -> list[list[Any]]:
    """The rows of a table of cases, JSON in each line."""
    return [json.loads(line) for line in (TABLES / name).read_text("utf-8").splitlines()]


PUBLISHED = rows_of(DATA / "published_parameters.csv")
FILES = rows_of(TABLES / "files.csv")
"""Published files (some of them shipped), the preset that each comes out as, and the fields that
differ: OPT's files say 0 where its paper says that it was trained with 0.1, and the base model of
Qwen2.5 was trained for longer sequences than its instruct sibling states."""
ALONE = {"all-minilm-l6-v2", "phi-4-mini-instruct"}  # published files without a preset

LANGUAGE = {name for name, c in PRESETS.items() if not (c.vision or c.tower)}
"""The others are in tests/numerics/test_flops.py."""


ACTIVE = {row["model"]: row for row in rows_of(TABLES / "active.csv")}
"""Billions of parameters that a token activates, as published; what is left out of the count (the
tables of the vocabulary: 1 the embedding, 2 also the output); how far rounding goes; and where."""


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / "configs" / f"{name}.json").read_text(encoding="utf-8"))


def imported(folder: Path, config: object) -> ModelConfig:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return from_config(file)


def error_of(folder: Path, config: object) -> str:
    with pytest.raises(UserError) as info:
        imported(folder, config)
    text = str(info.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


class TestPresets:
    @pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
    def test_has_the_published_number_of_parameters(self, row: dict[str, str]) -> None:
        name = row["model"]
        path = DATA / "configs" / name
        config = from_config(path) if path.suffix == ".json" else PRESETS[name]
        got, published = parameters(config)[0], int(row["parameters"])
        assert abs(got - published) <= int(row["tolerance"]), f"{got:,} is not {published:,}"

    @pytest.mark.parametrize("name", ACTIVE)
    def test_activates_the_published_number_of_parameters(self, name: str) -> None:
        row, c = ACTIVE[name], PRESETS[name]
        got = parameters(c)[1] - int(row["tables_left_out"]) * c.vocab_size * c.hidden_size
        wrong = abs(got - float(row["billions"]) * 1e9) > float(row["rounding"]) * 1e9
        assert not wrong, f"{got:,} is not {row['billions']}B: {row['source']}"

    def test_what_a_token_activates_is_published_for_every_mixture_but_one(self) -> None:
        # xAI published a share alone: 25% of Grok-1's weights, which is 2 of 8 experts.
        assert {name for name, c in PRESETS.items() if c.num_experts} == {
            *ACTIVE,
            *("grok-1", "gpt-1.8t"),  # published in all alone
        }
        held, active = parameters(PRESETS["grok-1"])
        assert active / held == pytest.approx(0.25, abs=0.02)

    def test_every_preset_has_a_published_count_and_a_source(self) -> None:
        assert {row["model"] for row in PUBLISHED if row["model"][-5:] != ".json"} == LANGUAGE
        assert all(row["source"] for row in PUBLISHED)
        for name, config in PRESETS.items():
            assert config.name == name == name.lower()
            assert config.source

    def test_bert_backbone_with_pooler_has_its_published_count(self) -> None:
        change = {"mlm_transform": False, "lm_head_bias": False, "pooler": True}
        counts = {
            name: parameters(dataclasses.replace(PRESETS[name], **change))[0]
            for name in ("bert-base", "bert-large")
        }
        assert counts == {"bert-base": 109_482_240, "bert-large": 335_141_888}  # keras-hub 0.32

    def test_stage_gpt3_5b_is_as_its_paper_says(self) -> None:
        c = PRESETS["gpt3-5b"]
        assert (c.num_layers, c.hidden_size, c.num_attention_heads) == (24, 4096, 32)
        assert (c.vocab_size, c.position, c.max_position_embeddings) == (51200, "learned", 2048)

    def test_dropout_only_where_the_family_trains_with_it(self) -> None:
        rates = {
            name.split("-")[0]: (c.hidden_dropout, c.attention_dropout, c.embedding_dropout)
            for name, c in PRESETS.items()
            if name in LANGUAGE
        }
        with_dropout = {family: rate for family, rate in rates.items() if any(rate)}
        assert with_dropout == {
            **dict.fromkeys(("gpt2", "gpt3", "megatron", "bert"), (0.1, 0.1, 0.1)),
            "opt": (0.1, 0.1, 0.0),
            "t5": (0.1, 0.1, 0.1),
        }

    def test_local_and_global_layers_are_where_the_families_put_them(self) -> None:
        def globals_of(name: str) -> list[int]:
            c = PRESETS[name]
            return [i for i in range(c.num_layers) if c.layer(i).mixer == "global"]

        assert globals_of("gemma3-1b") == [5, 11, 17, 23]
        assert globals_of("gemma2-2b") == list(range(1, 26, 2))
        assert globals_of("mistral-7b-v0.1") == []
        assert globals_of("mistral-7b-v0.3") == list(range(32))


class TestModelConfig:
    def test_overrides(self) -> None:
        c = PRESETS["gemma3-1b"]
        assert c.with_overrides() == c
        small = c.with_overrides(num_layers=2, vocab_size=1000)
        assert (small.num_layers, small.vocab_size, small.name) == (2, 1000, "gemma3-1b")
        assert [small.layer(i).mixer for i in range(2)] == ["local", "local"]
        with pytest.raises(UserError, match="num_layers is 0, wanted a whole number from 1"):
            c.with_overrides(num_layers=0)

    @pytest.mark.parametrize("row", rows_of(TABLES / "impossible.csv"), ids=str)
    def test_refuses(self, row: dict[str, str]) -> None:
        self.refuses(row["preset"], {row["field"]: literal_eval(row["value"])}, row["wanted"])

    @cases
    def test_refuses_state_spaces(self, preset: str, sizes: dict[str, int], wanted: str) -> None:
        self.refuses(preset, {"state_space": StateSpace(**sizes)}, wanted)

    def test_refuses_what_is_no_number(self) -> None:
        self.refuses("llama3-8b", {"rotary_fraction": math.nan}, "above 0 and at most 1")
        self.refuses("llama3-8b", {"attention_softcap": 10**400}, "None or a number above 0")

    def refuses(self, preset: str, change: dict[str, Any], wanted: str) -> None:
        with pytest.raises(UserError) as info:
            dataclasses.replace(PRESETS[preset], **change)
        text = str(info.value)
        assert wanted in text
        assert "\n" not in text
        assert len(text) < 300


def hub_folder(home: Path, name: str, commit: str = "0f3c") -> Path:
    """A model of the hub in its cache, laid out as huggingface_hub does."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    shutil.copy(DATA / "configs/qwen3-32b.json", folder / "blobs/1234")
    (folder / "refs/main").write_text(commit)
    (folder / f"snapshots/{commit}/config.json").symlink_to("../../blobs/1234")
    return folder


class TestHub:
    """Ids of the Hugging Face hub are looked up in its local cache; nothing is fetched."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        return tmp_path

    def test_an_id(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = hub_folder(home, "Qwen/Qwen3-32B")
        model = resolve("Qwen/Qwen3-32B")
        assert (model.name, model.num_layers) == ("Qwen3-32B", 64)
        assert resolve(str(folder / "snapshots/0f3c")).name == "Qwen3-32B"
        (folder / "refs/main").unlink()  # only one snapshot is there
        assert resolve("Qwen/Qwen3-32B").num_layers == 64
        (folder / "refs/main").write_text("../../elsewhere")
        with pytest.raises(UserError):
            resolve("Qwen/Qwen3-32B")
        monkeypatch.setenv("HF_HUB_CACHE", str(home / "other"))
        assert hub.cache_folder() == home / "other"
        monkeypatch.delenv("HF_HUB_CACHE")
        monkeypatch.delenv("HF_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert hub.cache_folder() == home / "huggingface/hub"

    def test_a_folder_wins(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub_folder(home, "Qwen/Qwen3-32B")
        monkeypatch.chdir(home)
        Path("Qwen/Qwen3-32B").mkdir(parents=True)
        with pytest.raises(UserError, match="no such file"):
            resolve("Qwen/Qwen3-32B")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("Qwen/Qwen3-32B", "the preset qwen3-32b is this model"),
            ("Qwen/Qwen3-33B", "did you mean 'qwen3-32b'?"),
            ("someone/else", "neither a path nor in the cache"),
        ],
    )
    def test_what_is_not_there(self, name: str, words: str) -> None:
        with pytest.raises(UserError) as info:
            resolve(name)
        assert words in str(info.value)
        assert f"`hf download {name} config.json` fetches its config" in str(info.value)


class TestResolve:
    def test_knows_presets_files_and_directories(self, tmp_path: Path) -> None:
        assert resolve("gpt2") is PRESETS["gpt2"]
        folder = tmp_path / "my-model"
        folder.mkdir()
        assert imported(folder, load("gpt2")).name == "my-model"
        for path in (folder, folder / "config.json"):
            c = resolve(str(path))
            assert (c.name, c.source) == ("my-model", str(folder / "config.json"))
        assert resolve(str(DATA / "configs" / "qwen3-32b.json")).name == "qwen3-32b"

    def test_takes_the_folder_name_from_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        imported(tmp_path, load("gpt2"))
        monkeypatch.chdir(tmp_path)
        assert resolve("config.json").name == resolve(".").name == tmp_path.name

    @pytest.mark.parametrize("name", ["lama3.1-70b", "Llama3.1-70b", "llama-3.1-70b"])
    def test_suggests_a_preset(self, name: str) -> None:
        with pytest.raises(UserError, match=r"did you mean 'llama3.1-70b'\?.*`stagewright models`"):
            resolve(name)

    @pytest.mark.parametrize("name", ["", "meta/llama/3", "x" * 100_000, "a\0b", "no/config.json"])
    def test_unknown_is_an_error_of_one_short_line(self, name: str) -> None:
        with pytest.raises(UserError) as info:
            resolve(name)
        assert "neither a preset nor a path to a config.json" in str(info.value)
        assert len(str(info.value)) < 400

    def test_directory_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"config\.json: no such file"):
            resolve(str(tmp_path))

    def test_path_that_cannot_be_one(self) -> None:
        for path in ("x" * 5000, "a\0b", "config.json/config.json"):
            with pytest.raises(UserError, match=r"no such file|cannot be read"):
                from_config(path)

    def test_device_is_no_config(self) -> None:
        with pytest.raises(UserError, match="/dev/zero: cannot be read: Is a device, not a file"):
            resolve("/dev/zero")


def test_merges_in_the_packages_data_name_one_mapping() -> None:
    """PyYAML 6.0.4 takes the last of several mappings with a key, others and YAML the first."""
    files = (ROOT / "src/stagewright/data").rglob("*.yaml")
    found = [file.name for file in files if re.search(r"<<:\s*\[", file.read_text("utf-8"))]
    assert found == []


class TestPublishedFiles:
    @pytest.mark.parametrize("row", FILES, ids=lambda row: row["file"])
    def test_comes_out_as_the_preset(self, row: dict[str, str]) -> None:
        folder = SHIPPED if row["folder"] else DATA / "configs"
        file = folder / f"{row['file']}.json"
        differences = {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in json.loads(row["differences"] or "{}").items()
        }
        own = {"name": file.stem, "source": str(file)}
        assert from_config(file) == dataclasses.replace(
            PRESETS[row["preset"]], **own, **differences
        )

    def test_all_files_and_all_architectures_are_covered(self) -> None:
        stems = {file.stem for file in CONFIGS}
        assert stems == {row["file"] for row in FILES if not row["folder"]} | ALONE
        named = [load(stem)["architectures"][0] for stem in stems]
        decoders = {name.replace("ForConditionalGeneration", "ForCausalLM") for name in named}
        counted = {row["config"]["architectures"][0] for row in RECORDED}
        assert set(hf.FAMILIES) <= {*named, *decoders, *counted, *OTHERWISE}

    def test_the_readme_names_a_source_of_every_file(self) -> None:
        for folder in (DATA / "configs", SHIPPED):
            readme = (folder / "README.md").read_text(encoding="utf-8")
            assert [f.name for f in folder.glob("*.json") if f.name not in readme] == []

    def test_phi4_mini_turns_part_of_each_head(self) -> None:
        c = from_config(DATA / "configs" / "phi-4-mini-instruct.json")
        assert (c.rotary_fraction, c.tied_embeddings, c.num_query_groups) == (0.75, True, 8)

    def test_bert_backbone(self) -> None:
        c = from_config(DATA / "configs" / "all-minilm-l6-v2.json")
        assert (c.pooler, c.mlm_transform, c.lm_head_bias, c.encoder) == (True, False, False, True)


class TestKeys:
    """What single keys do, as transformers 4.57 and 5 read them."""

    @pytest.mark.parametrize(("name", "change", "expected"), json_rows("keys.jsonl"))
    def test_sets_fields(
        self, tmp_path: Path, name: str, change: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        c = imported(tmp_path, load(name) | change)
        fields = {field: getattr(c, field) for field in expected}
        assert json.loads(json.dumps(fields)) == expected

    @pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
    def test_number_formats_are_left_to_the_run(self, tmp_path: Path, file: Path) -> None:
        config = load(file.stem)
        config.pop("torch_dtype", None)
        without = imported(tmp_path, config)
        for key in ("dtype", "torch_dtype"):
            assert imported(tmp_path, config | {key: "float8_e4m3fn"}) == without

    @pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
    def test_model_type_alone_is_enough(self, tmp_path: Path, file: Path) -> None:
        config = load(file.stem)
        if config.pop("architectures") == ["BertModel"]:
            config["architectures"] = []  # a bert without more is one with its MLM head
            assert imported(tmp_path, config).mlm_transform
        else:
            expected = dataclasses.replace(
                from_config(file), name=tmp_path.name, source=str(tmp_path / "config.json")
            )
            assert imported(tmp_path, config) == expected

    def test_keys_of_the_first_llama_files(self, tmp_path: Path) -> None:
        """They had neither key/value heads nor biases nor positions."""
        config = load("llama-3.2-1b-instruct")
        for key in (
            *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
            *("max_position_embeddings", "tie_word_embeddings", "attention_dropout"),
        ):
            del config[key]
        c = imported(tmp_path, config)
        assert (c.num_query_groups, c.max_position_embeddings) == (32, 2048)
        assert (c.tied_embeddings, c.qkv_bias, c.kv_channels) == (False, False, 64)

    @pytest.mark.parametrize(
        "row", RECORDED, ids=lambda row: f"{row['config']['model_type']}-{row['parameters']}"
    )
    def test_parameters_are_those_of_transformers(self, row: dict[str, Any]) -> None:
        like, fields, _ = hf.read("config.json", row["config"])
        c = dataclasses.replace(PRESETS[like], name="small", **fields)
        assert parameters(c)[0] == row["parameters"]

    def test_biases_that_cannot_be_counted_are_refused(self, tmp_path: Path) -> None:
        """Of an ERNIE mixture shared experts have biases and routed experts have none."""
        kind = "ernie4_5_moe"
        config = next(r["config"] for r in RECORDED if r["config"]["model_type"] == kind)
        assert "use_bias is true, wanted false" in error_of(tmp_path, config | {"use_bias": True})


class TestWrappers:
    """Files of models with more than text are read through their text part."""

    @pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
    def test_the_text_part_is_read(self, tmp_path: Path, part: str) -> None:
        text = load("qwen3-32b")
        del text["architectures"], text["tie_word_embeddings"]
        outer = {
            "architectures": ["BrandNewVLForConditionalGeneration"],
            "model_type": "brand_new",
            "tie_word_embeddings": True,
            part: text | {"model_type": "qwen3_vl_text"},
            "vision_config": {"hidden_size": 1152},
        }
        c = imported(tmp_path, outer)
        assert (c.num_layers, c.qk_norm, c.tied_embeddings) == (64, True, True)
        assert f"only the text part ({part}) is counted" in c.notes[0]
        assert "vision_config" in c.notes[0]

    def test_a_part_in_a_part(self, tmp_path: Path) -> None:
        text = load("qwen3-32b")
        inner = {"text_config": text, "audio_config": {"d_model": 8}}
        c = imported(tmp_path, {"model_type": "omni", "thinker_config": inner})
        assert c.num_layers == 64
        assert "thinker_config.audio_config" in c.notes[0]

    def test_the_class_of_a_wrapper_names_its_decoder(self, tmp_path: Path) -> None:
        text = load("qwen3-32b")
        del text["architectures"], text["model_type"]
        for name in ("Qwen3ForConditionalGeneration", "Qwen3ForCausalLM"):
            assert imported(tmp_path, {"architectures": [name], "text_config": text}).qk_norm


class TestUnknownClasses:
    SIZES: ClassVar[dict[str, Any]] = {
        "architectures": ["BrandNewForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
    }

    def test_common_names_are_read_with_a_note(self, tmp_path: Path) -> None:
        c = imported(tmp_path, self.SIZES | {"use_qk_norm": True})
        assert (c.hidden_size, c.num_query_groups, c.kv_channels, c.qk_norm) == (64, 2, 16, True)
        assert c.notes[0].startswith("BrandNewForCausalLM is not known: ")
        assert "at most 4096 positions" in c.notes[0]
        assert "--as FAMILY" in c.notes[0]

    def test_experts_and_latents(self, tmp_path: Path) -> None:
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        more = {"n_shared_experts": 2, "first_k_dense_replace": 1, "scoring_func": "sigmoid"}
        latents = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        c = imported(tmp_path, self.SIZES | experts | more | latents | {"v_head_dim": 16})
        assert (c.num_experts, c.top_k, c.shared_ffn_hidden_size) == (8, 2, 64)
        assert (c.first_dense_layers, c.router, c.kv_channels) == (1, "sigmoid", 24)

    def test_as_a_known_family(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(self.SIZES | {"max_position_embeddings": 64}))
        for name in ("qwen3", "Qwen3ForCausalLM"):
            c = resolve(str(file), name)
            assert (c.qk_norm, c.kv_channels) == (True, 128)  # as Qwen3 without a key of its own
        with pytest.raises(UserError, match="names no family; did you mean 'qwen3'"):
            resolve(str(file), "qwen3x")
        with pytest.raises(UserError, match="leave --as out"):
            resolve("gpt2", "qwen3")


class TestNotes:
    def test_keys_that_nobody_reads_and_that_may_matter_are_named(self, tmp_path: Path) -> None:
        harmless = {"sep_token_id": 3, "rope_theta": 5, "some_dropout": 0.1, "new_thing": False}
        c = imported(tmp_path, load("qwen3-32b") | harmless)
        assert c.notes == ()
        c = imported(tmp_path, load("qwen3-32b") | {"new_thing": 3})
        assert c.notes[0].endswith("may change parameters, FLOPs or memory: new_thing")

    def test_multi_token_prediction_is_said_to_be_left_out(self, tmp_path: Path) -> None:
        (note,) = imported(tmp_path, load("glm-4.5")).notes
        assert "(num_nextn_predict_layers) are left out" in note
        assert "--mtp-num-layers" in note

    def test_published_files_ask_for_nothing_unknown(self) -> None:
        asked = {f.stem: n for f in CONFIGS for n in from_config(f).notes if "not understood" in n}
        quantized = {k for k, note in asked.items() if note.endswith("memory: quantization_config")}
        assert asked.keys() - quantized == set()


class TestRefusals:
    @cases
    def test_says_what_is_missing(self, tmp_path: Path, architecture: str, missing: str) -> None:
        text = error_of(tmp_path, {"architectures": [architecture]})
        assert text.startswith(f"{architecture} has {missing}, which is not supported: ")
        assert "--as FAMILY" in text
        assert "model NAME like PRESET" in text

    def test_says_what_a_wrapper_is_missing(self, tmp_path: Path) -> None:
        text = load("kimi-linear-48b-a3b")
        wrapper = "KimiK3ForConditionalGeneration"
        got = error_of(tmp_path, {"architectures": [wrapper], "text_config": text})
        assert got.startswith(f"{wrapper} has residual sums that attend to the layers before")

    def test_says_what_is_missing_for_a_model_type(self, tmp_path: Path) -> None:
        text = error_of(tmp_path, {"model_type": "phi3small"})
        assert text.startswith("phi3small has block-sparse attention, which is not supported: ")

    def test_a_class_that_is_no_decoder_is_named_whole(self, tmp_path: Path) -> None:
        name = "SomeNewImageTextThing3_5ForConditionalGeneration"
        text = error_of(tmp_path, {"architectures": [name], "image_size": 3})
        assert text.startswith(f"{name} is not known, and its keys are not those of a decoder: ")
        assert "num_hidden_layers is missing" in text
        assert "--as FAMILY" in text

    def test_suggests_an_architecture(self, tmp_path: Path) -> None:
        text = error_of(tmp_path, {"architectures": ["LLamaForCausalLM"]})
        assert "did you mean 'LlamaForCausalLM'?" in text

    @cases
    def test_unclear_architecture(self, tmp_path: Path, config: object, expected: str) -> None:
        assert expected in error_of(tmp_path, config)

    @pytest.mark.parametrize(("name", "key", "value", "expected"), json_rows("errors.jsonl"))
    def test_names_the_key(
        self, tmp_path: Path, name: str, key: str, value: object, expected: str | None
    ) -> None:
        config = load(name) | {key: value}
        if expected is None:
            imported(tmp_path, config)
        else:
            text = error_of(tmp_path, config)
            assert expected in text
            assert key in text or "model " in text

    @cases
    def test_requires_the_sizes(self, tmp_path: Path, name: str, required: tuple[str, ...]) -> None:
        for key in required:
            config = load(name)
            del config[key]
            assert " is missing, wanted " in error_of(tmp_path, config), key

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("model: llama", "not JSON"),
            ("[1, 2]", "holds [1, 2], wanted a JSON object"),
            ("null", "holds None, wanted a JSON object"),
            ("[" * 200_000, "nested too deep"),
            ('{"a":' * 200_000, "nested too deep"),
            ('{"hidden_size": ' + "9" * 5000 + "}", "not JSON"),
            ('{"model_type": "llama", "num_hidden_layers": 1e309}', "num_hidden_layers is inf"),
            ('{"model_type": "\\ud800"}', "half of a character"),
            (json.dumps({"model_type": "x" * 100_000}), "xxxx' is not known"),
            (json.dumps({"pad": "x" * 10_000_000}), "over 10000000 bytes"),
        ],
        ids=range(12),
    )
    def test_what_is_no_config(self, tmp_path: Path, content: str, expected: str) -> None:
        text = error_of(tmp_path, content)
        assert expected in text
        assert len(text) < 1000 + len(str(tmp_path))

    def test_values_nested_to_the_limit_are_shown_short(self, tmp_path: Path) -> None:
        for depth in range(0, 1200, 50):
            value = "[" * depth + "1" + "]" * depth
            deep = f'{{"model_type": "llama", "num_hidden_layers": {value}}}'
            assert len(error_of(tmp_path, deep)) < 300 + len(str(tmp_path))

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(b"\xff\xfe\x00{")
        with pytest.raises(UserError, match="not JSON"):
            from_config(file)

    def test_duplicated_keys_and_a_byte_order_mark_are_fine(self, tmp_path: Path) -> None:
        text = json.dumps(load("gpt2"))[:-1] + ', "n_layer": 3}'
        file = tmp_path / "config.json"
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert from_config(file).num_layers == 3

    def test_longest_pattern_is_found_quickly(self, tmp_path: Path) -> None:
        layers = LIMITS["num_layers"]
        window = {"use_sliding_window": True, "max_window_layers": layers - 1}
        config = load("qwen2.5-7b-instruct") | window | {"num_hidden_layers": layers}
        assert len(imported(tmp_path, config).mixers) == layers


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 70),
    st.sampled_from([2**k for k in range(40)]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(sorted(hf_keys.ACTIVATIONS)),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = sorted({key for file in CONFIGS for key in load(file.stem)} | {"layer_types"})
FUZZ = settings(
    max_examples=times(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def accepts_or_refuses(folder: Path, config: object) -> None:
    """The one property of any input: a valid model, or an error of one line that names the file."""
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        c = from_config(file)
    except UserError as error:
        text = str(error)
        assert str(file) in text
        assert "\n" not in text
        assert len(text) < 1500 + 2 * len(str(file))
    else:
        assert dataclasses.replace(c) == c
        mixers = {c.layer(i).mixer for i in range(c.num_layers)}
        assert mixers <= {*ATTENTIONS, "none", *RECURRENCES, *SIDE_BY_SIDE}


@pytest.mark.slow
class TestFuzz:
    @FUZZ
    @given(config=JSON)
    def test_any_json(self, tmp_path: Path, config: object) -> None:
        accepts_or_refuses(tmp_path, config)

    @FUZZ
    @given(
        architecture=st.sampled_from(sorted(hf.FAMILIES)),
        values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=len(KEYS)),
    )
    def test_any_values_of_the_known_keys(
        self, tmp_path: Path, architecture: str, values: dict[str, Any]
    ) -> None:
        values |= {"architectures": [architecture]}
        values.pop("model_type", None)
        accepts_or_refuses(tmp_path, values)

    @FUZZ
    @given(
        file=st.sampled_from(CONFIGS),
        changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3),
        dropped=st.sets(st.sampled_from(KEYS), max_size=2),
        inside=st.booleans(),
    )
    @example(CONFIGS[0], {"num_attention_heads": 10**6}, set(), False)
    def test_published_files_with_changes(
        self,
        tmp_path: Path,
        file: Path,
        changes: dict[str, Any],
        dropped: set[str],
        inside: bool,
    ) -> None:
        config = load(file.stem)
        target = config["text_config"] if inside and "text_config" in config else config
        target |= changes
        for key in dropped:
            target.pop(key, None)
        accepts_or_refuses(tmp_path, config)
