"""Commands that start servers of vLLM, SGLang and TensorRT-LLM, with the line of their client.

Flags are rows of `vllm.csv`, `sglang.csv` and `trtllm.csv`, keys of their YAML and JSON, too; those
of the client are rows of `clients.csv`. Here is what follows from several: which ranks hold what,
and the step of decode that the load amounts to, for `simulate`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError
from stagewright.files import from_yaml, read_text
from stagewright.launch import shell
from stagewright.launch.reading import (
    Flag,
    LaunchFile,
    LaunchSource,
    Tool,
    apply,
    data_flags,
    parse,
)
from stagewright.launch.shell import ShellCommand, shown, unknown, unknown_names
from stagewright.launch.tables import canonical, table
from stagewright.model.presets import PRESETS

_CLIENT = re.compile(
    r"(?:^|[ /])(?:vllm bench serve|(?:sglang\.)?bench(?:mark)?_serving(?:\.py)?|genai-perf"
    r"|aiperf profile|run_benchmark_serving)(?= |$)"
)
"""Program of a client and its first words, which may follow those of a container."""
_FILES = ("config", "extra_llm_api_options")
"""Flags whose value is a file of more flags."""
_STORED = {"nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8", "int4": "int4",
           "awq": "int4", "gptq": "int4", "w4a16": "int4"}  # fmt: skip
"""How weights are stored, by the word of a checkpoint's name."""
_MODELS = ("model", "model_path", "model-path")


class Server(NamedTuple):
    """A server: how its command begins, and what follows from its settings together."""

    name: str
    table: str
    starts: re.Pattern[str]
    """Program and its first word, one space between."""
    scheduler: str
    layout: Callable[[LaunchFile, bool], None]
    """Settings of ranks and of limits; the second argument: the model has experts."""


def _start(server: Server, words: Sequence[str]) -> int | None:
    """Position behind the words that start the server; None: they do not."""
    for i in range(len(words)):
        pair = f"{PurePath(words[i]).name} {words[i + 1] if i + 1 < len(words) else ''}"
        if match := server.starts.match(pair):
            return i + match[0].rstrip().count(" ") + 1
    return None


def _command(source: LaunchSource, server: Server) -> ShellCommand | None:
    return source.first(lambda command: _start(server, command.words) is not None)


def _read(source: LaunchSource, command: ShellCommand, server: Server) -> LaunchFile:
    reading = LaunchFile(source.path, server.name)
    rows, clients = table(server.table), table("clients")
    words, stray = command.words[_start(server, command.words) :], list[str]()
    given = [*_expanded(reading, source, parse(words, [rows], stray), server.table)]
    given += parse(source.more, [rows, clients])
    named = [flag for flag in given if canonical(flag.name) in _MODELS]
    positional = [*words[:1], *stray] if words and words[0][:1] != "-" else stray
    model = "".join(positional[:1] or (named[-1].values if named else ()))
    sends = source.first(lambda command: _CLIENT.search(" ".join(command.words)))
    client = sends.words if sends else ()
    sent = [flag for flag in parse(client, [clients]) if flag.row]
    flags = [flag for flag in given if flag not in named]
    _ask(reading, [*flags, *sent])
    apply(reading, flags, ignore_unknown=source.ignore_unknown)
    apply(reading, sent, ignore_unknown=True)
    preset = _model(reading, model)
    settings = reading.settings
    experts = bool(preset and PRESETS[preset].num_experts)
    settings |= {"scheduler": server.scheduler, "mode": "decode"}
    settings.setdefault("tp", 1)
    server.layout(reading, experts)
    _lengths(settings, " ".join(client))
    _step(reading)
    return reading


# ---- flags ---------------------------------------------------------------------------------------


def _expanded(
    reading: LaunchFile, source: LaunchSource, flags: Iterator[Flag], tool: str
) -> Iterator[Flag]:
    """Flags with those of files and of JSON values in their place; later ones win."""
    from_command, from_files = list[Flag](), list[Flag]()
    for flag in flags:
        text, name = "".join(flag.values), canonical(flag.name)
        if name in _FILES and flag.row is None:
            from_files += _with_marks(data_flags(_file(reading, source, text), tool))
        elif tool == "vllm" and (level := re.fullmatch(r"-O=?(\d)=?", f"{flag.name}={text}")):
            row = table(tool)["optimization_level"]
            from_command.append(Flag("--optimization-level", (level[1],), row))
        elif flag.row is None and text.startswith("{"):
            values = _mapping(text, f"{source.path}: {flag.name}")
            from_command += _with_marks(data_flags(values, tool, f"{flag.name}."))
        else:
            from_command.append(flag)
    if tool == "trtllm":
        of_file = {flag.row.flag: flag for flag in from_files if flag.row}
        reading.notes += [
            f"{flag.name} {flag.text} replaces {other.text} of the file of options; TensorRT-LLM "
            "of before June 2026 takes the file's"
            for flag in from_command
            if flag.row and (other := of_file.get(flag.row.flag)) and other.values != flag.values
        ]
    yield from [*from_files, *from_command]


def _file(reading: LaunchFile, source: LaunchSource, name: str) -> dict[str, Any]:
    """Keys of a file that the script writes, or that is beside it."""
    assert source.script is not None
    text = source.script.files.get(name)
    if text is None and (path := shell.beside(os.path.dirname(source.path), name)):
        text = read_text(path, "options of a server", shell.MOST_BYTES)
    if text is None:
        reading.notes.append(f"{shown(name)}, a file of options, is not here: they are not read")
        return {}
    return _mapping(text, f"{source.path}: {shown(name)}")


def _mapping(text: str, where: str) -> dict[str, Any]:
    """YAML or JSON in which values from outside are `$NAME`."""
    values = from_yaml(shown(text), where)
    if not isinstance(values, dict):
        raise UserError(f"{where} is {shown(text)[:40]!r}, wanted options by name")
    return cast("dict[str, Any]", values)


def _with_marks(flags: Iterator[Flag]) -> Iterator[Flag]:
    """Flags with `$NAME` as a value from outside again."""
    for flag in flags:
        values = (re.sub(r"\$(\w+)", lambda m: unknown(m[1]), text) for text in flag.values)
        yield flag._replace(values=tuple(values))


def _ask(reading: LaunchFile, flags: Sequence[Flag]) -> None:
    """Raise UserError for values from outside that count, all at once."""
    names: dict[str, None] = {}
    for flag in flags:
        if flag.row and (flag.row.setting or flag.row.words):
            names |= dict.fromkeys(name for text in flag.values for name in unknown_names(text))
    plain = [name for name in names if not name.startswith("$")]
    if plain:
        texts = " ".join(f"--set {name}=VALUE" for name in plain)
        verb = "are" if len(plain) > 1 else "is"
        raise reading.fail(f"{', '.join(plain)} {verb} not set in the file; give: {texts}")


def _model(reading: LaunchFile, text: str) -> str | None:
    """Set the preset of the model that the command names; without one the user has to."""
    name = PurePath(text).name.lower()
    stored = next((word for word in _STORED if re.search(rf"[-_]{word}(?![a-z0-9])", name)), "")
    base = re.sub(r"[-_]\d{4}$", "", re.split(rf"[-_]{stored}", name)[0] if stored else name)
    preset = reading.name_model("model", text, base)
    if preset and stored and reading.settings.setdefault("weight_precision", _STORED[stored]):
        given = reading.settings["weight_precision"]
        reading.notes.append(f"weights are {given}, after {shown(text)}")
    return preset


# ---- what follows from several -------------------------------------------------------------------


def _vllm(reading: LaunchFile, experts: bool) -> None:
    """Without expert parallelism, experts are split over the ranks of tp and dp."""
    settings = reading.settings
    dp = settings.get("dp", 1)
    if experts and dp > 1 and not settings.get("enable_expert_parallel"):
        settings["etp"] = settings["tp"] * dp


def _shared(reading: LaunchFile, experts: bool, attention: bool) -> None:
    """Ranks of SGLang and TensorRT-LLM: tp is of both where attention is data-parallel."""
    settings = reading.settings
    ranks, ep = settings["tp"], settings.get("ep", 1)
    if attention:
        dp = settings["dp"]
        if ranks % dp or dp < 1:
            raise reading.fail(f"{dp} replicas of attention do not divide {ranks} ranks of tp")
        settings["tp"] = ranks // dp
    if ep == 1 and not experts:
        settings.pop("ep", None)
    elif ranks % ep == 0 and (ep > 1 or attention):
        settings.setdefault("etp", ranks // ep)


def _blocks(settings: dict[str, Any], block_size: int) -> None:
    """A cache of so many tokens in blocks."""
    settings.setdefault("kv_block_size", block_size)
    if (tokens := settings.pop("max_total_tokens", None)) is not None:
        settings["num_gpu_blocks"] = tokens // settings["kv_block_size"]


def _sglang(reading: LaunchFile, experts: bool) -> None:
    settings = reading.settings
    attention = settings.pop("enable_dp_attention", False) and settings.get("dp", 1) > 1
    if not attention and (replicas := settings.pop("dp", 1)) > 1:
        settings["instances"] = replicas
    backend = settings.pop("moe_a2a_backend", "none")
    if backend != "none" and (experts or "model" not in settings):  # overrides.py, _a2a_ep_size
        settings["ep"] = settings["tp"]
        reading.notes.append(f"experts are spread over all ranks of tp, as {backend} has it")
    _shared(reading, experts, attention)
    if attention:  # server_args.py, _handle_data_parallelism; pool_configurator.py
        dp = settings["dp"]
        for name in ("max_num_seqs", "chunked_prefill_size"):
            settings |= {name: max(settings[name] // dp, 1)} if settings.get(name, 0) > 0 else {}
        waits = settings.get("schedule_conservativeness", 1.0)
        settings["schedule_conservativeness"] = round(waits * 0.3, 9)
    if settings.get("chunked_prefill_size", 1) < 1:  # -1: whole prompts
        settings["chunked_prefill_size"] = 1_000_000
    _blocks(settings, 1)
    if settings.get("speculative_method") == "eagle" and "speculative_model" not in settings:
        settings["speculative_method"] = "mtp"  # of the model itself


def _trtllm(reading: LaunchFile, experts: bool) -> None:
    settings = reading.settings
    attention = bool(settings.pop("enable_attention_dp", False)) and settings["tp"] > 1
    settings |= {"dp": settings["tp"]} if attention else {}
    _shared(reading, experts, attention)
    settings.setdefault("max_num_seqs", 2048)  # llm_args.py
    settings.setdefault("max_num_batched_tokens", max(8192, settings["max_num_seqs"]))
    if "max_total_tokens" not in settings:
        settings.setdefault("free_gpu_memory_fraction", 0.9)
    _blocks(settings, 32)


def _lengths(settings: dict[str, Any], client: str) -> None:
    """Lengths of random prompts: of vLLM's client around a mean, of others up to a longest."""
    if "vllm bench serve" in client:
        spread = settings.pop("range_ratio", 0)
        if spread and isinstance(spread, int | float) and 0 < spread < 1:
            settings["range_ratio"] = (1 - spread) / (1 + spread)
            for name in ("isl", "osl"):
                settings |= {name: int(settings[name] * (1 + spread))} if name in settings else {}
    elif "bench_serving" in client and "isl" in settings:
        settings.setdefault("range_ratio", 1e-9)  # SGLang's default: from one token on


def _step(reading: LaunchFile) -> None:
    """The step of decode under the client's load: requests in flight, and their mean length."""
    settings = reading.settings
    shortest = settings.get("range_ratio", 1.0)
    isl, osl = (settings.get(name, 0) * (1 + shortest) / 2 for name in ("isl", "osl"))
    if isl and osl:
        settings |= {"context_length": int(isl + osl / 2), "output_length": max(int(osl), 1)}
    replicas = settings.get("dp", 1) * settings.get("instances", 1)
    if (users := settings.get("concurrency")) is not None:
        per_replica = min(-(-users // replicas), settings.get("max_num_seqs", users))
        settings["batch_size"] = per_replica * settings.get("dp", 1) * settings.get("pp", 1)
    if settings.get("rate") == "inf":
        settings["rate"] = float("inf")


SERVERS = (
    Server("vLLM", "vllm", re.compile(
        r"vllm serve$|vllm\.entrypoints\.\S*api_server|vllm-openai[\w.-]*(:\S+)? (?=-|\S+/)"
    ), "vllm", _vllm),
    Server("SGLang", "sglang", re.compile(r"sglang\.launch_server|sglang serve$"), "sglang",
           _sglang),
    Server("TensorRT-LLM", "trtllm", re.compile(r"trtllm-serve( serve$)?(?! disaggregated)"),
           "tensorrt-llm", _trtllm),
)  # fmt: skip

TOOLS = tuple(
    Tool(server.name, partial(_command, server=server), partial(_read, server=server))
    for server in SERVERS
)
