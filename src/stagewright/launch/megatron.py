"""Megatron-LM's command line, and slime's, as a run and a model.

A flag that says one thing alone is a row of `data/launch/megatron.csv`; here is what follows from
several. Defaults and derived values are those of NVIDIA/Megatron-LM@d98e8a64
`megatron/training/arguments.py` (`validate_args`) and `core/transformer/transformer_config.py`.
slime's flags are THUDM/slime@624b824a `slime/utils/arguments.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import PurePath
from typing import Any

from stagewright.errors import UserError, either
from stagewright.launch import reading as reads
from stagewright.launch.reading import Flag, LaunchFile, LaunchSource, Line, Tool, parse, program_of
from stagewright.launch.shell import ShellCommand, shown
from stagewright.launch.tables import canonical, table, value_of
from stagewright.model.config import ModelConfig
from stagewright.model.layers import LETTERS, StateSpace, Vision, shortest
from stagewright.model.presets import PRESETS
from stagewright.numbers import plural

_OTHER_PROGRAMS = re.compile(
    r"text_generation|generate|inference|eval|convert|export|mmlu|quantize|validate|preprocess|"
    r"offline_feature|prune|server|tasks/|checkpoint|tools/"
)
"""Programs that take Megatron-LM's flags and run no training step."""

_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000,
                 "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}  # fmt: skip
"""Sizes of the published vocabularies of tokenizer types that have one."""

_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"num_layers": 24, "num_attention_heads": 16, "hidden_size": 1024,
             "ffn_hidden_size": 4096, "kv_channels": 64, "activation": "quick_gelu"},
    "siglip": {"num_layers": 27, "num_attention_heads": 16, "hidden_size": 1152,
               "ffn_hidden_size": 4304, "kv_channels": 72, "activation": "gelu_tanh"},
    "internvit": {"num_layers": 45, "num_attention_heads": 25, "hidden_size": 3200,
                  "ffn_hidden_size": 12800, "kv_channels": 128, "activation": "gelu"},
    "internvit300M": {"num_layers": 24, "num_attention_heads": 16, "hidden_size": 1024,
                      "ffn_hidden_size": 4096, "kv_channels": 64, "activation": "gelu"},
    "radio": {"num_layers": 32, "num_attention_heads": 16, "hidden_size": 1280,
              "ffn_hidden_size": 5120, "kv_channels": 80, "activation": "gelu"},
    "radio-g": {"num_layers": 40, "num_attention_heads": 24, "hidden_size": 1536,
                "ffn_hidden_size": 4096, "kv_channels": 64, "gated": True},
    "cradio-g": {"num_layers": 40, "num_attention_heads": 24, "hidden_size": 1536,
                 "ffn_hidden_size": 6144, "kv_channels": 64, "activation": "gelu"},
}  # fmt: skip
"""Vision models of examples/multimodal/config.py (`get_vision_model_config`)."""


# ---- the tools -----------------------------------------------------------------------------------


def _command(source: LaunchSource, flag: str) -> ShellCommand | None:
    """The command with most of Megatron-LM's flags; a program that trains goes first."""
    if source.script is None:
        return None
    rows = {**table("megatron"), **(table("slime") if flag else {})}
    counts: list[tuple[bool, int, int]] = []
    for index, command in enumerate(source.script.commands):
        names = {canonical(word.split("=")[0]) for word in command.words if word.startswith("--")}
        count = sum(name in rows and rows[name].ours[0] not in "-?" for name in names)
        if count >= 3 and command.words[0].startswith("--"):
            raise UserError(
                f"{source.path}: line {command.line}: a command begins with {command.words[0]}; "
                "is a \\ missing at the end of the line before?"
            )
        if count >= 3 and (not flag or canonical(flag) in names):
            program = program_of(command)[1]
            counts.append((not _OTHER_PROGRAMS.search(program), count, -index))
    if not counts:
        return _loose(source, flag)
    *others, chosen = sorted(counts)
    command = source.script.commands[-chosen[2]]
    lines = [source.script.commands[-index].line for trains, _, index in others if trains]
    if chosen[0] and lines:
        note = (
            f"the command of line {command.line} is read, the one with most flags; also started: "
            f"line {', '.join(map(str, sorted(lines)))}"
        )
        source.script.notes += [note] * (note not in source.script.notes)
    return command


_ARGUMENTS = "arguments.py"
"""Program of a file that has flags and starts nothing."""


def _loose(source: LaunchSource, flag: str) -> ShellCommand | None:
    """Flags of a file that starts nothing itself, in variables or alone: a file of arguments."""
    assert source.script is not None
    words: list[str] = []
    commands = source.script.commands
    if all(command.words[0].startswith("--") for command in commands):
        words += (word for command in commands for word in command.words)
    rows = table("megatron")
    for value in source.script.variables.values():
        items = value if isinstance(value, list) else value.split()
        names = [canonical(item.split("=")[0]) for item in items if item.startswith("--")]
        if len(names) >= 3 and sum(name in rows for name in names) * 2 > len(names):
            words += items
    return None if flag or not words else ShellCommand((_ARGUMENTS, *words), 1)


def _read(source: LaunchSource, command: ShellCommand, tool: str) -> LaunchFile:
    reading = LaunchFile(source.path, tool)
    before, program, words = program_of(command)
    names = ["slime", "megatron"] if tool == "slime" else ["megatron"]
    names += ["slime"] if program == _ARGUMENTS else []
    stray: list[str] = []
    flags = [*parse((*words, *source.more), map(table, names), stray)]
    reading.notes += [
        f"{text[:40]!r} belongs to no flag and is left out; the program would refuse it"
        for text in stray[:3]
    ]
    if _OTHER_PROGRAMS.search(program):
        raise reading.fail(f"starts {program}, which runs no training step; wanted one that trains")
    given = reads.apply(reading, flags, ignore_unknown=source.ignore_unknown)
    present = {flag.row.flag for flag in flags if flag.row}
    if tool == "slime":
        reading.settings = MEGATRON_DEFAULTS | reading.settings
        follow(reading, given, present)
        update(reading)
    else:
        _gpus(reading, source, before)
        follow(reading, given, present)
    _model(reading, source, given, program)
    reading.notes += [_other_passes(present)] if tool == "slime" else []
    return reading


MEGATRON_DEFAULTS = {"precision": "bf16", "zero": 1, "moe_token_dispatcher_type": "alltoall"}
"""Settings of Megatron-LM that tools above it set themselves: slime in
backends/megatron_utils/arguments.py, verl, NeMo-RL and Megatron-Bridge in their configurations."""
MEGATRON = Tool("Megatron-LM", partial(_command, flag=""), partial(_read, tool="Megatron-LM"))
SLIME = Tool("slime", partial(_command, flag="actor-num-nodes"), partial(_read, tool="slime"))


# ---- the machine and the batch -------------------------------------------------------------------


def _gpus(reading: LaunchFile, source: LaunchSource, before: Sequence[str]) -> None:
    """Number of GPUs; dp is the least that can be where nobody says how many there are."""
    started = reads.started_gpus(reading, source, before)
    if "gpus" in started:
        _check_gpus(reading, started.get("nodes", 1))
        return
    settings = reading.settings
    shared = settings.get("tp", 1) * settings.get("cp", 1)
    experts = settings.get("ep", 1) * settings.get("etp", settings.get("tp", 1))
    settings["dp"] = max(1, -(-experts // shared))
    reading.assumed.add("dp")
    note = (
        f"the file does not say how many GPUs there are: dp is {settings['dp']}, the least that "
        "can be; give --gpus, --nodes or --dp"
    )
    reading.notes.append(note)
    reading.moot[note] = ("dp", *_SIZES)


_SIZES = ("gpus", "nodes")
_LAYOUT = ("dp", "tp", "cp", "pp", "ep", "etp")


def _check_gpus(reading: LaunchFile, nodes: int) -> None:
    """Note that the layout needs another number of GPUs than the file starts."""
    settings = reading.settings
    gpus, tp, cp = settings.get("gpus"), settings.get("tp", 1), settings.get("cp", 1)
    experts = settings.get("ep", 1) * settings.get("etp", tp)
    least = settings.get("pp", 1) * lcm(tp * cp, experts)
    if not gpus or gpus % nodes or not least or gpus % least == 0:
        return
    per_node, wanted = gpus // nodes, -(-gpus // least) * least
    note = (
        f"the file starts {plural(nodes, 'node', 'nodes')} of {plural(per_node, 'GPU', 'GPUs')}, "
        f"but its layout needs a multiple of {least} GPUs: --gpus {wanted}"
    )
    reading.notes.append(note)
    reading.moot[note] = (*_SIZES, *_LAYOUT)


def follow(reading: LaunchFile, given: Mapping[str, Flag], names: set[str]) -> None:
    """Settings that follow from several flags, or from one that is absent.

    `given`: flags of the model; `names`: all flags of the command.
    """
    settings = reading.settings
    settings["framework"] = "megatron"
    _sharding(reading, names)
    _overlap(settings)
    settings.setdefault("precision", "fp32")
    for name, precision in (("fp8-format", "fp8"), ("fp8-hybrid", "fp8"), ("fp4-format", "nvfp4")):
        if name in names:  # beside --bf16, in any order
            settings["precision"] = precision
    if settings["precision"] != "fp8":
        settings.pop("fp8_recipe", None)
    _recomputation(settings, names)
    if "cross-entropy-loss-fusion" in names:  # natively, unless its other flag says otherwise
        settings.setdefault("compiled_loss", True)
    else:
        settings.pop("compiled_loss", None)
    if "num-experts" in given:
        settings.setdefault("moe_token_dispatcher_type", "allgather")
    elif "hidden-size" in given:
        settings.pop("moe_token_dispatcher_type", None)
    if isinstance(settings.get("moe_aux_loss_coeff"), list):
        settings["moe_aux_loss_coeff"] = sum(settings["moe_aux_loss_coeff"])
    for name in ("moe_router_load_balancing_type", "cp_comm_type"):
        if isinstance(settings.get(name), list):
            settings[name] = settings[name][0]
    if settings.pop("freeze", False):
        parts = {"freeze-ViT": ["tower.*"], "freeze-LM": ["layer.*", "head.*", "wte"]}
        settings["freeze"] = [name for flag in parts if flag in names for name in parts[flag]]
    if "padded-vocab-size" in given:
        settings["make_vocab_size_divisible_by"] = 1
    settings.setdefault("make_vocab_size_divisible_by", 128)


def _sharding(reading: LaunchFile, names: set[str]) -> None:
    """ZeRO's stage: the largest that a flag names, or that of Megatron-FSDP's strategy."""
    settings = reading.settings
    fsdp = {"use-megatron-fsdp", "use-torch-fsdp2"} & names
    settings["zero"] = max(settings.get("zero", 0), 3 if fsdp else 0)
    strategy = settings.pop("data_parallel_sharding_strategy", None)
    if strategy is not None and "use-megatron-fsdp" in names:
        strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        if strategy not in strategies:
            raise reading.fail(f"sharding strategy is {strategy!r}, wanted {either(strategies)}")
        settings["zero"] = strategies.index(strategy)


def _overlap(settings: dict[str, Any]) -> None:
    """Axes that are not overlapped: dp unless a flag says so, pp with virtual stages if one does.

    Megatron-FSDP always overlaps dp.
    """
    not_overlapped = {settings.pop("no_overlap", "dp")} - {"dp"}
    if settings.get("vpp", 1) == 1 and "num_layers_per_virtual_pipeline_stage" not in settings:
        not_overlapped = set[str]()  # without virtual stages there is nothing to switch off
    if "dp" not in settings.pop("no_overlap-", []) and settings["zero"] < 2:
        not_overlapped.add("dp")
    settings["no_overlap"] = sorted(not_overlapped)
    if settings.get("overlap_param_gather") and settings["zero"] == 0:
        del settings["overlap_param_gather"]


def _recomputation(settings: dict[str, Any], names: set[str]) -> None:
    if "recompute-activations" in names:  # beside --recompute-granularity, in any order
        settings["recompute"] = "selective"
    if "moe-layer-recompute" in names:
        settings["recompute_modules"] = [*settings.get("recompute_modules", ["core_attn"]), "moe"]
    if settings.get("recompute") != "full":
        settings.pop("recompute_method", None)
        settings.pop("recompute_num_layers", None)
    if settings.get("recompute") != "selective":
        settings.pop("recompute_modules", None)


def update(reading: LaunchFile) -> None:
    """Batch of an update: samples of a rollout, packed up to a number of tokens."""
    settings = reading.settings
    nodes, per_node = settings.pop("nodes", 1), settings.pop("gpus_per_node", 8)
    settings["gpus"] = nodes * per_node
    _check_gpus(reading, nodes)
    samples = settings.pop("rollout_batch_size", 0) * settings.pop("n_samples_per_prompt", 1)
    steps = settings.pop("num_steps_per_rollout", None)
    if steps and samples:
        settings["global_batch_size"] = samples // steps
    prompt = settings.pop("rollout_max_prompt_len", 0)
    longest = settings.pop("rollout_max_response_len", 0)
    longest = settings.pop("rollout_max_context_len", 0) or longest + prompt
    tokens = settings.pop("max_tokens_per_gpu", 0) * settings.get("cp", 1)
    packs = settings.pop("use_dynamic_batch_size", False)
    if not packs or not tokens:
        if longest and "seq_length" not in settings:
            settings["seq_length"] = longest
            _at_most(reading, f"every sample is taken as {longest} tokens, the longest allowed")
        return
    length = min(longest or tokens, tokens)
    settings["seq_length"] = length
    others = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("cp", 1)
    of_rank = settings.get("global_batch_size", 1) // max(settings["gpus"] // others, 1)
    packed = next((n for n in range(tokens // length, 1, -1) if of_rank % n == 0), 1)
    settings["micro_batch_size"] = packed
    _at_most(
        reading,
        f"every sample is taken as {length} tokens, the longest allowed; {packed} are packed into "
        f"a microbatch of at most {tokens}",
    )


def _at_most(reading: LaunchFile, text: str) -> None:
    """Note a length that is the longest allowed."""
    note = f"{text}: time is an upper bound; --seq-length takes another length"
    reading.notes.append(note)
    reading.moot[note] = ("seq_length",)


def _other_passes(names: set[str]) -> str:
    """Work of slime's training step besides the update, by the flags that ask for it."""
    models = {
        "the reference model (--ref-load)": "ref-load" in names,
        "the older policy, where the update lacks its probabilities":
            "use-rollout-logprobs" not in names,
        "the teacher (--opd-teacher-load)": "opd-teacher-load" in names,
    }  # fmt: skip
    passes = "".join(f"forward passes of {model}; " for model, runs in models.items() if runs)
    return f"the update step is read; not part: {passes}generation; weight transfer"


# ---- the model -----------------------------------------------------------------------------------


def _model(
    reading: LaunchFile, source: LaunchSource, given: Mapping[str, Flag], program: str
) -> None:
    """The model of the flags; without sizes, the one whose checkpoint is named."""
    assert source.script is not None
    checkpoint = "".join(given["hf-checkpoint"].values) if "hf-checkpoint" in given else ""
    spec = given.get("spec")
    foreign = spec is not None and not spec.text.startswith("megatron.")
    if foreign or "hidden-size" not in given:
        _of_named_model(reading, given)
        why = (
            f"the model is Python code ({spec.text})" if foreign and spec else _why_no_sizes(source)
        )
        if not (preset := reads.preset_of(checkpoint)):
            reading.need_model(why)
            return
        reading.settings["model"] = preset
        reading.notes.append(
            f"{why}: the model is {preset}, after --hf-checkpoint {shown(checkpoint)}"
        )
        for name in given:
            reading.lines.append(Line(given[name].name, given[name].text, f"(of {preset})"))
        return
    reader = _ModelReader(reading, given, program)
    try:
        reading.model = reader.model()
    except UserError as error:
        raise reading.fail(str(error)) from None
    for flag in given.values():
        assert flag.row is not None
        field = flag.row.ours.removeprefix("model.")
        meaning = f"model: {field} {getattr(reading.model, field, '')}"
        reading.lines.append(Line(flag.name, flag.text, meaning[:60]))


_DEPTH = ("num-layers", "hybrid-layer-pattern", "hybrid-override-pattern", "decoder-num-layers")


def _why_no_sizes(source: LaunchSource) -> str:
    assert source.script is not None
    missing = source.script.missing
    files = f" ({', '.join(missing[:2])} is not here)" if missing else ""
    return f"the file has no --hidden-size{files}"


def _of_named_model(reading: LaunchFile, given: Mapping[str, Flag]) -> None:
    """Settings of flags of a model that is named and not described."""
    reader, settings = _ModelReader(reading, given, ""), reading.settings
    sizes = {"num-layers": "layers", "vocab-size": "vocab", "mtp-num-layers": "mtp_num_layers"}
    if "hidden-size" not in given:
        settings |= {ours: reader.size(name) for name, ours in sizes.items() if name in given}
    rates = [reader.number(name, 0.1) for name in ("hidden-dropout", "attention-dropout")]
    if not any(rates):
        settings["dropout"] = False


class _ModelReader:
    """Reads a model from flags: numbers and words of single flags, then groups of fields."""

    def __init__(self, reading: LaunchFile, given: Mapping[str, Flag], program: str) -> None:
        self.reading, self.given, self.program = reading, given, PurePath(program).name

    def has(self, name: str) -> bool:
        return name in self.given

    def size(self, name: str, default: int | None = None) -> int:
        """Whole number of a flag; without a default it has to be there."""
        if name in self.given:
            return reads.integer(self.reading, self.given[name])
        if default is None:
            raise UserError(f"has no --{name}, which a model needs")
        return default

    def number(self, name: str, default: float) -> float:
        if name not in self.given:
            return default
        flag = self.given[name]
        value = value_of(reads.known(self.reading, flag, flag.text and flag.values[0]))
        if not isinstance(value, int | float):
            raise UserError(f"{flag.name} is {flag.text!r}, wanted a number")
        return value

    def word(self, name: str, default: str, *allowed: str) -> str:
        if name not in self.given:
            return default
        return reads.choice(self.reading, self.given[name], allowed)

    def text(self, name: str) -> str:
        flag = self.given[name]
        return reads.known(self.reading, flag, "".join(flag.values))

    def model(self) -> ModelConfig:
        """All of it."""
        hidden = self.size("hidden-size")
        fields: dict[str, Any] = {"hidden_size": hidden, "name": PurePath(self.reading.path).stem}
        fields |= {"source": self.reading.path}
        fields |= self._mlp(hidden) | self._attention(hidden) | self._layers() | self._norms()
        fields |= self._experts(fields["ffn_hidden_size"])
        fields |= self._mixers(fields)
        hidden_dropout = self.number("hidden-dropout", 0.1)
        fields |= {
            "hidden_dropout": hidden_dropout,
            "embedding_dropout": hidden_dropout,
            "attention_dropout": self.number("attention-dropout", 0.1),
            "tied_embeddings": not self.has("untie-embeddings-and-output-weights"),
        }
        if self.has("mtp-num-layers"):
            fields["mtp_num_layers"] = self.size("mtp-num-layers")
        fields["vocab_size"] = 1
        fields |= self._family(fields)
        model = ModelConfig(**fields)
        return replace(model, vocab_size=self._vocabulary(model), tower=self._tower())

    def _family(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What BERT and T5 have besides, by the program that trains them."""
        if "bert" in self.program:
            return {"causal": False, "encoder": True, "token_types": 2, "mlm_transform": True,
                    "lm_head_bias": True, "pooler": True}  # fmt: skip
        if "t5" not in self.program:
            return {}
        learned = fields["position"] == "learned"
        if learned:
            self.reading.notes.append("the tables of learned positions are left out")
        layers = self.size("encoder-num-layers", fields["num_layers"])
        position = "none" if learned else fields["position"]
        return {"position": position, "encoder_num_layers": layers}

    def _layers(self) -> dict[str, Any]:
        pattern = next((n for n in ("hybrid-layer-pattern", "hybrid-override-pattern")
                        if self.has(n)), None)  # fmt: skip
        longest = self.reading.settings.get("seq_length", 4096)
        fields: dict[str, Any] = {
            "max_position_embeddings": self.size("max-position-embeddings", longest)
        }
        if pattern is None:
            depth = next((name for name in _DEPTH if self.has(name)), _DEPTH[0])
            return fields | {"num_layers": self.size(depth)}
        main = self.text(pattern).split("/")[0]
        stages = main.split("|")
        letters = "".join(stages)
        if strange := {*letters} - {*LETTERS}:
            raise UserError(f"--{pattern}: {sorted(strange)[0]!r} is no layer that is known here")
        if not 0 < len(letters) <= 10_000:
            raise UserError(f"--{pattern}: {len(letters)} layers, wanted 1 to 10000")
        if len(stages) > 1:
            pp = self.reading.settings.get("pp", 1)
            self.reading.settings["layers_per_stage"] = [len(stage) for stage in stages]
            self.reading.settings["vpp"] = max(1, len(stages) // pp)
        mixers, mlps = zip(*(LETTERS[letter] for letter in letters), strict=True)
        return fields | {"num_layers": len(letters), "mixers": mixers, "mlps": mlps}

    def _mlp(self, hidden: int) -> dict[str, Any]:
        default = int(4 * hidden * 2 / 3 / 64) * 64 if self.has("swiglu") else 4 * hidden
        fields: dict[str, Any] = {"ffn_hidden_size": self.size("ffn-hidden-size", default)}
        oss = self.has("enable-gpt-oss")
        activation = (
            "silu" if self.has("swiglu") else "relu2" if self.has("squared-relu")
            else "quick_gelu" if self.has("quick-geglu") or oss
            else "gelu_tanh"
        )  # fmt: skip
        fields |= {"activation": activation, "gated": activation in ("silu", "quick_gelu")}
        fields["mlp_bias"] = not self.has("disable-bias-linear")
        if self.has("glu-linear-offset") or oss:
            fields["glu_linear_offset"] = self.number("glu-linear-offset", 1.0)
        if self.has("activation-func-clamp-value") or oss:
            fields["activation_func_clamp_value"] = self.number("activation-func-clamp-value", 7.0)
        return fields

    def _attention(self, hidden: int) -> dict[str, Any]:
        heads = self.size("num-attention-heads")
        grouped = self.has("group-query-attention")
        if self.has("num-query-groups") and not grouped:  # core_transformer_config_from_args
            self.reading.notes.append(
                "--num-query-groups has no effect without --group-query-attention"
            )
        biased = not self.has("disable-bias-linear")
        fields: dict[str, Any] = {
            "num_attention_heads": heads,
            "num_query_groups": self.size("num-query-groups", 1) if grouped else heads,
            "kv_channels": self.size("kv-channels", max(hidden // max(heads, 1), 1)),
            "qkv_bias": biased or self.has("add-qkv-bias"),
            "attention_output_bias": biased,
            "qk_norm": self.has("qk-layernorm"),
            "qk_l2_norm": self.has("qk-l2-norm") or self.has("export-qk-l2-norm"),
            "attention_gate": self.has("attention-output-gate"),
            "position": self._position(),
        }
        if fields["position"] == "rope":
            fields["rotary_fraction"] = self.number("rotary-percent", 1.0)
        if self.has("enable-gpt-oss") or self.word("softmax-type", "vanilla", "vanilla",
                                                   "learnable") == "learnable":  # fmt: skip
            fields["attention_sinks"] = True
        if fields["qk_l2_norm"]:
            fields["qk_norm"] = False
        if self.has("multi-latent-attention"):
            turned = self.size("qk-pos-emb-head-dim", 64)
            fields |= {
                "num_query_groups": heads,
                "kv_channels": self.size("qk-head-dim", 128) + turned,
                "qk_rope_head_dim": turned,
                "v_head_dim": self.size("v-head-dim", 128),
                "kv_lora_rank": self.size("kv-lora-rank", 32),
                "q_lora_rank": self.size("q-lora-rank", 0),
                "rotary_fraction": 1.0,
                "qk_norm": False,  # of the latents, which are always normalized here
                "qkv_bias": False,  # as megatron/core/transformer/multi_latent_attention.py
            }
        return fields

    def _position(self) -> str:
        words = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope",
                 "none": "none"}  # fmt: skip
        kind = self.word("position-embedding-type", "learned_absolute", *words)
        rotary = self.has("use-rotary-position-embeddings") or self.has("enable-gpt-oss")
        turned = self.has("rotary-percent") and self.has("no-position-embedding")
        if kind == "learned_absolute" and (rotary or turned):
            return "rope"
        return (
            "none"
            if kind == "learned_absolute" and self.has("no-position-embedding")
            else words[kind]
        )

    def _norms(self) -> dict[str, Any]:
        norm = self.word("normalization", "LayerNorm", "LayerNorm", "RMSNorm").lower()
        after = self.has("post-self-attn-layernorm") or self.has("post-mlp-layernorm")
        placement = {"norm_placement": "sandwich"} if after else {}
        return {"norm": norm, "norm_bias": norm == "layernorm", **placement}

    def _experts(self, ffn: int) -> dict[str, Any]:
        if not self.has("num-experts"):
            return {}
        sigmoid = self.word("moe-router-score-function", "softmax", "softmax", "sigmoid",
                            "sqrtsoftplus")  # fmt: skip
        fields: dict[str, Any] = {
            "num_experts": self.size("num-experts"),
            "top_k": self.size("moe-router-topk", 2),
            "moe_ffn_hidden_size": self.size("moe-ffn-hidden-size", ffn),
            "shared_ffn_hidden_size": self.size("moe-shared-expert-intermediate-size", 0),
            "moe_latent_size": self.size("moe-latent-size", 0),
            "router": sigmoid,
            "norm_topk_prob": sigmoid != "softmax" or not self.has("moe-router-pre-softmax"),
            "num_expert_groups": self.size("moe-router-num-groups", 1),
            "topk_groups": self.size("moe-router-group-topk", 1),
            "shared_expert_gate": self.has("moe-shared-expert-gate"),
            "expert_bias": bool(self.reading.settings.get("moe_router_enable_expert_bias")),
            "router_bias": self.has("enable-gpt-oss"),
        }
        if self.has("enable-gpt-oss") or fields["shared_ffn_hidden_size"] == 0:
            return fields | self._frequency()
        return fields | self._frequency() | {"mlp_bias": False}

    def _frequency(self) -> dict[str, Any]:
        """Layers with experts: every n-th, or a list such as [0]*3+[1]*58."""
        if not self.has("moe-layer-freq"):
            return {}
        text = self.text("moe-layer-freq")
        pattern = pattern_of(text)
        if pattern is None:
            raise UserError(f"--moe-layer-freq is {text[:60]!r}, wanted 2 or [0]*3+[1]*58")
        if isinstance(pattern, int):
            return {"moe_layer_freq": pattern} if pattern > 1 else {}
        first = pattern.index(1) if 1 in pattern else len(pattern)
        if all(pattern[first:]):
            return {"first_dense_layers": first} if first else {}
        return {"mlps": shortest(["experts" if x else "dense" for x in pattern])}

    def _mixers(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        mixers = fields.get("mixers", ())
        if "mamba2" in mixers:
            width = self.size("mamba-head-dim", 64)
            heads = self.size("mamba-num-heads", 2 * fields["hidden_size"] // width)
            return {"state_space": StateSpace(
                heads=heads, head_width=width, state=self.size("mamba-state-dim", 128),
                groups=self.size("mamba-num-groups", 8), chunk=128,
                conv=self.size("linear-conv-kernel-dim", 4),
            )}  # fmt: skip
        if mixers:
            return {}
        if self.has("experimental-attention-variant"):
            return self._variant()
        if self.has("no-rope-freq"):
            pattern = pattern_of(self.text("no-rope-freq"))
            if isinstance(pattern, int):
                return {"mixers": (*["global"] * (pattern - 1), "nope")}
            if pattern:
                return {"mixers": shortest(["nope" if x else "global" for x in pattern])}
        if self.has("window-size") or self.has("enable-gpt-oss"):
            text = self.text("window-size") if self.has("window-size") else "127,0"
            before = re.match(r"\(?\s*(\d{1,9})\s*,", text)
            if not before:
                raise UserError(f"--window-size is {text!r}, wanted two numbers such as 127,0")
            every = self.has("window-attn-skip-freq") or self.has("enable-gpt-oss")
            skip = self.text("window-attn-skip-freq") if self.has("window-attn-skip-freq") else "2"
            pattern = _period_of(skip) if every else [1]
            kinds = ["local" if x else "global" for x in pattern]
            return {"sliding_window": int(before[1]) + 1, "mixers": shortest(kinds)}
        return {}

    def _variant(self) -> dict[str, Any]:
        variant = self.word("experimental-attention-variant", "", "dsa", "gated_delta_net", "gdn")
        if variant == "dsa":
            return {"mixers": ("indexed",), "index_topk": self.size("dsa-indexer-topk"),
                    "index_n_heads": self.size("dsa-indexer-n-heads"),
                    "index_head_dim": self.size("dsa-indexer-head-dim")}  # fmt: skip
        freq = "linear-attention-freq"
        pattern = _period_of(self.text(freq) if self.has(freq) else "4")
        return {
            "mixers": shortest(["gated_delta" if x else "global" for x in pattern]),
            "state_space": StateSpace(
                heads=self.size("linear-num-value-heads", 32),
                head_width=self.size("linear-value-head-dim", 128),
                state=self.size("linear-key-head-dim", 128),
                groups=self.size("linear-num-key-heads", 16),
                conv=self.size("linear-conv-kernel-dim", 4), conv_bias=False, chunk=64,
            ),
        }  # fmt: skip

    def _vocabulary(self, model: ModelConfig) -> int:
        for name in ("padded-vocab-size", "vocab-size"):
            if self.has(name):
                return self.size(name)
        notes, tokenizer = self.reading.notes, self.given.get("tokenizer-model")
        named = "".join(tokenizer.values) if tokenizer else ""
        if (preset := reads.preset_of(named)) is not None:
            size = PRESETS[preset].vocab_size
            notes.append(
                f"the vocabulary is {size}, as {preset} has it (--tokenizer-model {named})"
            )
            return size
        given = self.given.get("tokenizer-type")
        bert, merges = not model.causal, self.has("merge-file")
        default = "BertWordPieceLowerCase" if bert else "GPT2BPETokenizer" if merges else ""
        kind = "".join(given.values) if given else default
        if size := _VOCABULARIES.get(kind):
            notes.append(f"the vocabulary is {size}, that of {kind}")
            return size
        same = {name: other.vocab_size for name, other in PRESETS.items()
                if _same_sizes(model, other)}  # fmt: skip
        if len({*same.values()}) == 1:
            name, size = next(iter(same.items()))
            notes.append(f"the vocabulary is {size}, as {name} has it, whose sizes these are")
            return size
        raise UserError(
            "the vocabulary is that of a tokenizer, which is not read; give its size: "
            "--set vocab-size=N"
        )

    def _tower(self) -> ModelConfig | None:
        """The vision model of examples/multimodal, whose output stands before the text."""
        if not self.has("vision-model-type") and not self.has("img-h"):
            return None
        kind = self.word("vision-model-type", "clip", *_TOWERS)
        side, patch = self.size("img-h", 224), self.size("patch-dim", 16)
        if not 0 < patch <= side:
            raise UserError(f"--patch-dim is {patch}, wanted 1 to --img-h {side}")
        tower: dict[str, Any] = {"gated": False, **_TOWERS[kind]}
        tp, settings = self.reading.settings.get("tp", 1), self.reading.settings
        if kind == "internvit":  # heads are padded to a multiple of tp
            tower["num_attention_heads"] = (24 // tp + 1) * tp
        # --seq-length is the image's, --decoder-seq-length that of image and text together.
        settings["seq_length"] = settings.pop("decoder_seq_length", settings.get("seq_length"))
        self.reading.notes.append(
            f"a sample is taken as one image of {(side // patch) ** 2} positions before the text, "
            "without pixel shuffle; how tiles and frames are mixed is in the data"
        )
        return replace(
            PRESETS["clip-vit-l-336"], name=kind, source=self.reading.path, **tower,
            num_query_groups=tower["num_attention_heads"],
            max_position_embeddings=(side // patch) ** 2 + 1,
            vision=Vision(image_size=side, patch_size=patch),
        )  # fmt: skip


def _same_sizes(model: ModelConfig, other: ModelConfig) -> bool:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "causal",
             "num_query_groups", "kv_channels", "num_experts", "gated", "norm")  # fmt: skip
    return all(getattr(model, name) == getattr(other, name) for name in names)


def pattern_of(text: str) -> int | list[int] | None:
    """A period, or a list as Megatron-LM evaluates it; None for anything else.

    >>> pattern_of("2"), pattern_of("([0]*2+[1]*3)"), pattern_of("__import__('os')")
    (2, [0, 0, 1, 1, 1], None)
    """
    if len(text) > 40_000 or not re.fullmatch(r"[\d\s\[\],+*()]+", text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value = _list_of(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if isinstance(value, int):
        return value if 0 < value <= 10_000 else None
    return value if value and all(x in (0, 1) for x in value) else None


def _period_of(text: str) -> list[int]:
    """A pattern as a list, of which the last layer of a period is 0.

    >>> _period_of("4"), _period_of("[1,0]")
    ([1, 1, 1, 0], [1, 0])
    """
    pattern = pattern_of(text)
    return [*[1] * (pattern - 1), 0] if isinstance(pattern, int) else pattern or [1]


def _list_of(node: ast.AST) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.List(elts=items):
            values = [_list_of(item) for item in items]
            return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _list_of(left), _list_of(right)
            if isinstance(a, list) and isinstance(b, list) and len(a) + len(b) <= 10_000:
                return a + b
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = _list_of(left), _list_of(right)
            a, b = (b, a) if isinstance(a, int) else (a, b)
            if isinstance(a, list) and isinstance(b, int) and len(a) * b <= 10_000:
                return a * b
        case _:
            pass
    raise ValueError
