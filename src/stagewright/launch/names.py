"""Names of other tools that are options here, too: for options, run files and keywords.

They are rows of the tables of these tools. `OTHERS` set other settings than one of their name, with
help; `FOREIGN` says why an option sets nothing. Names are spelled as `canonical` has them.
`run.other_names` translates values with them; `written` finds the flag of a tool for a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from stagewright.launch.tables import FlagRow, canonical, table, value_of

TABLES = ("megatron", "vllm", "torchtitan", "common")
"""Tables whose names are options here; of two rows of a name `common` has the one that counts."""


class OtherName(NamedTuple):
    """An option of another tool whose setting follows from its value and from other settings."""

    name: str
    """Name as a keyword, with underscores."""
    flag: str
    help: str
    kind: type | tuple[str, ...]
    """bool, int, str, or the words to choose from."""
    makes: tuple[str, ...]
    """The settings that follow."""
    names: tuple[str, ...] = ()
    """Other spellings of the option, without the dashes before them."""


def _other(
    flag: str, help: str, kind: type | tuple[str, ...], *makes: str, names: tuple[str, ...] = ()
) -> OtherName:
    return OtherName(canonical(flag), "--" + flag, help, kind, makes, names)


_DOTS = ("qkv_proj", "out_proj", "mlpwi", "mlpwo")
REMAT_POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "none": None,
    "minimal": _DOTS,
    "minimal_with_context": ("context", *_DOTS),
    "save_dot_with_context_except_mlp": ("qkv_proj", "context", "out_proj"),
    "save_dot_except_mlpwi": ("qkv_proj", "out_proj", "mlpwo"),
    "save_dot_except_mlp": ("qkv_proj", "out_proj"),
    "save_qkv_proj": ("qkv_proj",),
    "save_out_proj": ("out_proj",),
    "full": (),
    "minimal_offloaded": _DOTS,
    "qkv_proj_offloaded": ("qkv_proj",),
}
"""MaxText's policies (`Decoder.get_remat_policy`) and what each keeps; None: everything."""
OFFLOADED_POLICIES = ("minimal_offloaded", "qkv_proj_offloaded")
"""Policies that keep it in host memory."""

OTHERS: Mapping[str, OtherName] = {
    of.name: of
    for of in (
        _other(
            "enable-expert-parallel",
            "vLLM: ep over all ranks of tp, cp and dp, with etp=1.",
            bool,
            *("ep", "etp"),
        ),
        _other(
            "num-layers-per-virtual-pipeline-stage",
            "Megatron-LM: layers / (pp * vpp), which gives vpp.",
            int,
            "vpp",
        ),
        _other(
            "parallelism.pipeline_parallel_layers_per_stage",
            "torchtitan: the most layers of a virtual stage, which gives vpp.",
            int,
            "vpp",
            names=("pipeline-parallel-layers-per-stage",),
        ),
        _other(
            "decoder-first-pipeline-num-layers",
            "Megatron-LM: layers of the first rank of pp; the others share the rest.",
            int,
            "layers_per_stage",
        ),
        _other(
            "decoder-last-pipeline-num-layers",
            "Megatron-LM: layers of the last rank of pp; the others share the rest.",
            int,
            "layers_per_stage",
        ),
        _other(
            "pipeline-model-parallel-layout",
            "Megatron-LM: virtual stages such as Et*3|(tt|)*29,t*3L, which give vpp, too.",
            str,
            *("vpp", "layers_per_stage"),
        ),
        _other(
            "data-parallel-sharding-strategy",
            "Megatron-LM's FSDP: stands for --zero 0, 1, 2 and 3.",
            ("no_shard", "optim", "optim_grads", "optim_grads_params"),
            "zero",
        ),
        _other(
            "recompute-method",
            "Megatron-LM: block recomputes the first --recompute-num-layers, uniform all layers.",
            ("uniform", "block"),
            "recompute_num_layers",
        ),
        _other(
            "remat-policy",
            "MaxText: stands for --recompute, --recompute-save and --recompute-save-on-host.",
            tuple(REMAT_POLICIES),
            *("recompute", "recompute_save", "recompute_save_on_host", "recompute_early_stop"),
        ),
        _other(
            "isl",
            "Input sequence length. Prefill: --prompt-length. Decode: --context-length is isl + "
            "osl / 2, the mean while a request gets its tokens; with --prefill isl.",
            int,
            *("prompt_length", "context_length"),
        ),
        _other(
            "num-distributed-optimizer-instances",
            "Megatron-LM: copies of what is sharded over dp; --dp-shard is dp / copies.",
            int,
            "dp_shard",
        ),
        _other(
            "parallelism.data_parallel_shard_degree",
            "torchtitan: ranks of dp that share the parameters (zero=3); -1: all that are left.",
            int,
            *("dp", "dp_shard", "zero"),
            names=("data-parallel-shard-degree",),
        ),
        _other(
            "parallelism.data_parallel_replicate_degree",
            "torchtitan: copies of the parameters, which multiply dp.",
            int,
            *("dp", "dp_shard"),
            names=("data-parallel-replicate-degree",),
        ),
    )
}
"""Options of other tools by name."""

# ---- settings by other names ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Without:
    """Said of a set by a switch: that it lacks this item."""

    item: str

    def __str__(self) -> str:
        return f"without {self.item}"


class OtherNames(NamedTuple):
    """What other tools call a setting and its values."""

    names: tuple[str, ...]
    short: str
    """Its option of one dash in vLLM."""
    switches: Mapping[str, Any]
    """Options without a value that stand for one value, or a `Without`."""
    words: Mapping[str, str]
    """Values that a tool has and the setting has not, and what to use for each."""
    same_words: Mapping[str, Any]
    """Values of a tool, and the value of the setting that each means; None: its default."""


@cache
def _by_setting() -> Mapping[str, list[FlagRow]]:
    rows: dict[str, list[FlagRow]] = {}
    for tool in TABLES:
        for row in {id(row): row for row in table(tool).values()}.values():
            if row.setting and not row.note:
                rows.setdefault(row.setting, []).append(row)
    return rows


def other_names(setting: str) -> OtherNames:
    """Names of a setting in other tools.

    >>> other_names("tp").names
    ('tensor-model-parallel-size', 'tensor-parallel-size', 'parallelism.tensor_parallel_degree')
    """
    names: list[str] = []
    shorts: list[str] = []
    switches: dict[str, Any] = {}
    words: dict[str, str] = {}
    same: dict[str, Any] = {}
    for row in _by_setting().get(setting, ()):
        constant = row.ours[len(setting) :]
        if constant:
            if row.values == "0":
                given = Without(constant[1:]) if constant[0] == "-" else value_of(constant[1:])
                switches[row.flag] = given
            continue
        ours = {value for value in row.words.values() if not value.startswith("!")}
        if ours & {"true", "false", "-"}:
            continue
        first, *others = row.spellings
        shorts += [name for name in others if name.startswith("-")]
        if canonical(first) != setting:
            names.append(first)
        for theirs, value in row.words.items():
            if value.startswith("!"):
                words[theirs] = value[1:]
            elif value not in ("?", "~", theirs) and "=" not in value:
                same[theirs] = value or None
    return OtherNames(tuple(names), "".join(shorts[:1]), switches, words, same)


def written(tool: str, setting: str, value: str) -> tuple[str, ...] | None:
    """Flag of a tool with its value that says a setting has this value; None: it has none.

    >>> written("megatron", "tp", "8"), written("megatron", "recompute_modules", "norm")
    (('tensor-model-parallel-size', '8'), ('recompute-modules', 'layernorm'))
    >>> written("megatron", "order", "tp-cp-ep-pp-dp"), written("megatron", "schedule", "zbv")
    (('use-tp-pp-dp-mapping',), None)
    """
    rows = [row for row in {id(r): r for r in table(tool).values()}.values()
            if row.setting == setting]  # fmt: skip
    ranked = sorted(rows, key=lambda row: (bool(row.note), row.ours != setting))
    wanted = value_of(value)
    for row in sorted(ranked, key=lambda row: canonical(row.flag) != setting):
        constant = row.ours[len(setting) + 1 :]
        if row.values == "0":
            if wanted == value_of(constant or "true"):
                return (row.flag,)
            if wanted is False and not constant:
                return (f"no-{row.flag}",)
        elif not constant:
            pairs = [*row.words.items()][::-1]
            words = {value_of(ours): theirs for theirs, ours in pairs if _is_value(ours)}
            if wanted in words:
                return row.flag, words[wanted]
            is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
            if is_number or not (words or any("=" in word for word in row.words.values())):
                return row.flag, value
    return None


def _is_value(word: str) -> bool:
    """True for a value of ours, which a row gives for a word of theirs."""
    return word != "" and word[0] not in "!?~-" and "=" not in word


# ---- options of which nothing follows ------------------------------------------------------------

OF_MODEL = "it belongs to the model; name a preset or a config.json"
_NOTHING = "it changes nothing that Stagewright computes; drop it"


@cache
def _merged() -> Mapping[str, FlagRow]:
    rows: dict[str, FlagRow] = {}
    for tool in ("common", *TABLES):
        rows = {**table(tool), **rows}
    return rows


def _ignored() -> Mapping[str, int | None]:
    """Options that change nothing that is computed, and how many values each takes; None: any.

    A command line may have them; in run files and keywords they are refused.
    """
    return {name: row.limit for name, row in _merged().items() if row.ours == "-"}


def _advice() -> Mapping[str, str]:
    """What to say about an option that is none here, by name."""
    texts: dict[str, str] = {}
    for name, row in _merged().items():
        if row.ours == "-":
            texts[name] = _NOTHING
        elif row.ours == "!":
            texts[name] = row.note
        elif row.ours.startswith("model."):
            texts[name] = OF_MODEL
    return texts


IGNORED = _ignored()
FOREIGN = _advice()
