"""The command line. Slow imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import click

import stagewright
from stagewright.cli import doctor as cli_doctor
from stagewright.cli import help as cli_help
from stagewright.cli import report as cli_report
from stagewright.cli import reproduce as cli_reproduce
from stagewright.cli import simulate as cli_simulate
from stagewright.cli import time as cli_time
from stagewright.cli import trace as cli_trace
from stagewright.cli import write as cli_write
from stagewright.cli.progress import shown, told
from stagewright.errors import Stopped, UserError, did_you_mean

if TYPE_CHECKING:
    from stagewright.lower.training import Compiled
    from stagewright.run.settings import Run
    from stagewright.views.summary import Recorded

USER_ERROR = 2
BUG = 1
INTERRUPTED = 130


class Setting(NamedTuple):
    """A field of `Run` as an option.

    `kind` is int, float, bool, str, tuple or the words to choose.
    """

    name: str
    kind: type | tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        """The option's name, with dashes."""
        return "--" + self.name.replace("_", "-")


# The fields of `Run` other than `model`, in its order. Written out, since building them from `Run`
# would import pydantic for every `--help`; a test asserts that the two agree.
SETTINGS = (
    Setting("mode", ("train", "prefill", "decode"), "What a step is. [train]"),
    Setting("tp", int, "Tensor parallelism: ranks that split every layer. [1]"),
    Setting("cp", int, "Context parallelism: ranks that split the sequence. [1]"),
    Setting("dp", int, "Data parallelism: ranks that split the batch. [1]"),
    Setting("pp", int, "Pipeline parallelism: ranks that split the layers. [1]"),
    Setting("dcp", int, "Inference: ranks of cp and tp that share a cache by tokens. [cp]"),
    Setting("ep", int, "Expert parallelism, over ranks of tp, cp and dp. [1]"),
    Setting("etp", int, "Tensor parallelism inside an expert. [as tp]"),
    Setting("vpp", int, "Virtual stages of each pipeline rank. [1]"),
    Setting(
        "dp_shard", int, "Ranks of dp that share one copy of sharded state (HSDP). [all of dp]"
    ),
    Setting("zero", int, "Shard over dp: 1 optimizer, 2 +gradients, 3 +parameters (FSDP). [0]"),
    Setting(
        "reshard_after_forward", bool, "With --zero 3: gather parameters again in backward. [on]"
    ),
    Setting("sequence_parallel", bool, "Split norms and dropout over tp along the sequence. [off]"),
    Setting(
        "cp_comm_type", ("p2p", "all_gather", "a2a"), "How cp works: ring, gather, Ulysses. [p2p]"
    ),
    Setting("seq_length", int, "Tokens per sequence. [the model's longest, at most 8192]"),
    Setting("decoder_seq_length", int, "Encoder-decoder: tokens of the decoder. [seq-length]"),
    Setting("micro_batch_size", int, "Sequences per microbatch. [1]"),
    Setting("global_batch_size", int, "Sequences per step. [micro-batch-size * dp * pp or more]"),
    Setting(
        "schedule",
        str,
        "1f1b, gpipe, interleaved, looped-bfs, zb-h1, zbv, dualpipev, dualpipe, or a .csv file.",
    ),
    Setting("layers_per_stage", tuple, "Layers of each virtual stage, such as 9,10,10,9. [even]"),
    Setting("batch_size", int, "Inference: requests in a step, of all ranks. [dp * pp]"),
    Setting(
        "prompt_length",
        int,
        "Prefill: new tokens of a request. Decode: a prompt's chunk besides, on each rank of dp.",
    ),
    Setting("context_length", int, "Inference: tokens of a request in the cache before the step."),
    Setting("source_length", int, "Inference, encoder-decoder: tokens of the encoder. [longest]"),
    Setting("requests", str, "Inference: a .csv of count, context_length, new_tokens."),
    Setting("num_speculative_tokens", int, "Decode: draft tokens that are verified. [0]"),
    Setting(
        "weight_precision",
        ("bf16", "fp8", "int4", "fp4", "mxfp4"),
        "Inference: how layers' matrices are stored. [that of the computation]",
    ),
    Setting("kv_cache_dtype", ("bf16", "fp8", "fp32"), "[that of the computation]"),
    Setting("kv_cache", ("paged", "contiguous"), "How the cache keeps requests. [paged]"),
    Setting("kv_block_size", int, "Tokens of a block of the paged cache. [16]"),
    Setting("max_model_len", int, "Contiguous: tokens a request has room for. [the longest's]"),
    Setting("prefill", str, "Decode: other ranks compute and send the context, as tp=4,pp=2."),
    Setting("num_redundant_experts", int, "Inference: experts that are there once more. [0]"),
    Setting("mla", ("naive", "absorb"), "Latent attention. [prefill: naive, decode: absorb]"),
    Setting("device_memory", str, "Inference: bytes of a rank, such as 80e9 or 80GiB."),
    Setting("framework", ("megatron", "torchtitan"), "Whose habits settings have. [megatron]"),
    Setting(
        "params_dtype", ("bf16", "fp32"), "Parameters, gradients, states. [mixed, with a master]"
    ),
    Setting("grad_reduce_dtype", ("bf16", "fp32"), "Of gradients on their way. [as held]"),
    Setting("operators", ("fused", "eager"), "Kernels, or chains of PyTorch operators. [fused]"),
    Setting("joint_projections", bool, "Query, key, value timed as one product. [on]"),
    Setting("repeat_kv", bool, "Copy key-value heads for their query heads. [off]"),
    Setting("set_grads_to_none", bool, "Gradients are held from when they are made. [off]"),
    Setting("pipeline_caches", bool, "Stages keep buffers and outputs. [off]"),
    Setting("optimizer_step_tensors", bool, "AdamW counts steps for each parameter. [off]"),
    Setting("recompute_early_stop", bool, "Recompute no more than backward needs. [off]"),
    Setting("fsdp_root_unit", bool, "With --zero 3: one unit of all that is in no layer. [off]"),
    Setting(
        "fsdp_reduce", ("microbatch", "last"), "With --zero 3: gradients are reduced. [microbatch]"
    ),
    Setting("fsdp_shard_dim", ("best", "first"), "With --zero 3: dim that is split. [best]"),
    Setting("ddp_bucket_cap_mb", int, "With --zero 0: MiB of a bucket of gradients. [a layer's]"),
    Setting("loss_parallel", bool, "With --tp: loss of logits split over the vocabulary. [on]"),
    Setting("input_grad_reduce", ("shared", "linear"), "With --tp: gradients of inputs. [shared]"),
    Setting("whole_embedding_grad", bool, "With --tp: each rank makes all of it. [off]"),
    Setting(
        "sequence_parallel_grads", ("step", "dtensor"), "When norms' gradients are summed. [step]"
    ),
    Setting("clip_grad_norm", ("total", "vector"), "What ranks exchange to clip. [total]"),
    Setting(
        "cp_grad_comm_type",
        ("reduce_scatter", "ring"),
        "How gradients of gathered keys come home. [reduce_scatter]",
    ),
    Setting("recompute", ("none", "selective", "full"), "What backward computes again. [none]"),
    Setting("recompute_modules", tuple, "For selective: core_attn,norm,activation. [core_attn]"),
    Setting("recompute_num_layers", int, "For full: the first layers of each virtual stage. [all]"),
    Setting(
        "moe_token_dispatcher_type",
        ("alltoall", "allgather"),
        "How tokens and experts meet. [alltoall]",
    ),
    Setting(
        "moe_apply_probs",
        ("experts", "input", "output"),
        "Where the router's weights are multiplied. [as the model]",
    ),
    Setting(
        "moe_expert_capacity_factor", float, "Drop copies beyond this times an even share. [none]"
    ),
    Setting("moe_pad_expert_input_to_capacity", bool, "Pad every expert's input to it. [off]"),
    Setting("moe_router_dtype", ("fp32",), "Data type of the router. [as all else]"),
    Setting(
        "moe_router_load_balancing_type",
        ("aux_loss", "seq_aux_loss", "global_aux_loss"),
        "What the loss that balances experts is over. [aux_loss]",
    ),
    Setting("moe_aux_loss_coeff", float, "Coefficient of that loss; 0: without it. [0.0]"),
    Setting("moe_z_loss_coeff", float, "Coefficient of the router's z-loss. [0.0]"),
    Setting(
        "moe_router_enable_expert_bias", bool, "Balance experts by a bias. [as the model trained]"
    ),
    Setting("expert_load", str, "File (CSV or JSON) of the tokens of each expert. [all equal]"),
    Setting("cpu_offloading_num_layers", int, "Layers with activations on the host."),
    Setting("optimizer_cpu_offload", bool, "Optimizer states and update on the host. [off]"),
    Setting("optimizer_offload_fraction", float, "Of each stage's blocks, for the former. [1]"),
    Setting("memory_allowance", str, "Bytes besides tensors, such as 2GiB. [none]"),
    Setting("precision", ("bf16", "fp32", "fp8"), "Data type of the training. [bf16]"),
    Setting("optimizer", ("adamw", "sgd"), "[adamw]"),
    Setting("flash_attention", bool, "One kernel for attention. [on]"),
    Setting("fuse", bool, "Fuse element-wise kernels. [on]"),
    Setting("dropout", bool, "Dropout as the model's family trains. [on]"),
    Setting("clip_grad", bool, "Clip gradients by their global norm. [on]"),
    Setting("grad_reduce", ("step", "microbatch"), "How often gradients are reduced. [step]"),
    Setting("activation_gather", ("again", "keep"), "Sequence parallelism, in backward. [again]"),
    Setting("bucket", ("layer", "parameter"), "What one collective over dp carries. [layer]"),
    Setting("mtp_num_layers", int, "Layers for multi-token prediction. [as the model]"),
    Setting("mtp_loss_scaling_factor", float, "The weight of their loss. [0.1]"),
    Setting("layers", int, "Replaces the model's number of layers."),
    Setting("vocab", int, "Replaces the model's vocabulary size."),
    Setting("make_vocab_size_divisible_by", int, "Pad the vocabulary to this times tp. [1]"),
    Setting("strategy", str, "File of rows that say where values live: wq [M, A/tp, D]."),
    Setting("order", str, "Rank numbering, fastest axis first. [tp-cp-ep-dp-pp]"),
    Setting(
        "streams", ("one", "separate"), "Communication: one chain, or one per communicator. [one]"
    ),
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _words(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """`9,10,9` or `norm,activation` as a tuple."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if parameter.name != "layers_per_stage":
        return tuple(words)
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise UserError(f"--layers-per-stage: got {text!r}, wanted numbers such as 9,10,10,9")
    return tuple(int(word) for word in words)


def _settings(command: _Command) -> _Command:
    """Give a command the model, the run file and every setting."""
    for setting in reversed(SETTINGS):
        kind, flag = setting.kind, setting.flag
        more: dict[str, Any] = {}
        if kind is bool:
            flag += "/--no-" + flag[2:]
        elif kind is tuple:
            more = {"callback": _words, "metavar": "LIST"}
        elif isinstance(kind, tuple):
            more = {"type": cli_help.Word(kind)}
        else:
            more = {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}
        command = click.option(flag, setting.name, default=None, help=setting.help, **more)(command)
    command = click.option(
        "--config", metavar="FILE", help="Run file (YAML), or an earlier run; options override it."
    )(command)
    return click.argument("model", required=False)(command)


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not (name.startswith("-") or ctx.resilient_parsing):
            known = ", ".join(self.commands)
            hint = did_you_mean(name, self.commands)
            raise UserError(f"unknown command {name!r}; wanted one of {known}{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(stagewright.__version__, prog_name="stagewright")
@click.pass_context
def commands(context: click.Context) -> None:
    """What every GPU of a distributed LLM training or inference step will do, without GPUs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@commands.command()
@_settings
@click.option("-o", "--out", required=True, metavar="DIR", help="Directory of the traces.")
@click.option(
    "--format",
    "format_",
    default="chakra",
    metavar="NAME",
    help="chakra, json, dot or bundle. [chakra]",
)
@click.option("--durations", metavar="FILE", help="CSV of measured kernels (see show --kernels).")
@click.option(
    "--astra-sim", is_flag=True, help="Also what ASTRA-sim needs to run them on --hardware."
)
@click.option("--hardware", metavar="NAME", help="For --astra-sim: GPU, or a .yaml file of one.")
@click.option("--ranks", metavar="LIST", help="Only these ranks, such as 0-7,12. [all]")
@cli_write.writing
def generate(
    model: str | None,
    config: str | None,
    out: str,
    format_: str,
    durations: str | None,
    astra_sim: bool,
    hardware: str | None,
    ranks: str | None,
    **settings: Any,
) -> None:
    """Write the trace of every rank.

    MODEL is a preset (see `stagewright models`) or the path of a Hugging Face config.json.
    """
    started = time.perf_counter()
    how = {name: settings.pop(name) for name in cli_write.HOW}
    run = _load(model, config, settings)
    chosen = None if ranks is None else parse_ranks(ranks, run.world_size)
    if not astra_sim and hardware is not None:
        raise UserError("--hardware is for --astra-sim; add that, or leave it out")
    if astra_sim and (hardware is None or format_ != "chakra" or chosen is not None):
        raise UserError("--astra-sim needs --hardware, and all ranks in --format chakra")
    with shown() as bar:
        bar.say("working out what ranks do")
        compiled = _compile(run, model, config)
        bar.say("checking it")
        written = stagewright.generate(
            compiled,
            out,
            format=format_,
            durations=durations,
            astra_sim=hardware,
            ranks=chosen,
            progress=bar,
            **how,
        )
    click.echo(told(written, out, time.perf_counter() - started))
    if durations is not None:
        from stagewright.time import measured

        click.echo(measured.describe(written["durations"]))


@commands.command()
@_settings
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object.")
@click.option("--graph", is_flag=True, help="The sharded graph, as text.")
@click.option("--kernels", is_flag=True, help="The distinct kernels, as CSV to fill in durations.")
@click.option("--schedule-picture", is_flag=True, help="The pipeline schedule, as a picture.")
@click.option("--memory-plot", metavar="FILE", help="Memory over the step, as an HTML page.")
def show(
    model: str | None,
    config: str | None,
    as_json: bool,
    graph: bool,
    kernels: bool,
    schedule_picture: bool,
    memory_plot: str | None,
    **settings: Any,
) -> None:
    """Print what the ranks compute, communicate and hold.

    MODEL is a preset (see `stagewright models`), the path of a Hugging Face config.json, or a
    bundle, which is shown as it is: without settings.
    """
    from stagewright.trace.formats.bundle import is_bundle
    from stagewright.views.summary import recorded

    chosen = (as_json, graph, kernels, schedule_picture, memory_plot is not None)
    if sum(chosen) > 1:
        raise UserError(
            "--json, --graph, --kernels, --schedule-picture and --memory-plot exclude each other; "
            "use one"
        )
    if model is not None and is_bundle(model):
        if config is not None or any(value is not None for value in settings.values()):
            raise UserError(
                f"{model}: a bundle is shown as it is; for other settings: --config {model}"
            )
        if as_json or not any(chosen):
            _show_summary(recorded(model), as_json)
            return
        model, config = None, model
    compiled = _compile(_load(model, config, settings), model, config)
    if memory_plot is not None:
        from stagewright.files import write_text
        from stagewright.views.pages import memory as plot

        write_text(memory_plot, plot.page(compiled))
        click.echo(f"{memory_plot}: memory of {len(compiled.program.classes)} classes of ranks")
    elif graph:
        click.echo(compiled.graph_text())
    elif kernels:
        from stagewright.time.measured import to_csv

        click.echo(to_csv(compiled.program), nl=False)
    elif schedule_picture:
        from stagewright.schedule.schedules import text

        columns = _terminal_width() if sys.stdout.isatty() else None
        click.echo(text(compiled.order, columns))
    else:
        _show_summary(compiled, as_json)


def _show_summary(of: Compiled | Recorded, as_json: bool) -> None:
    from stagewright.views.summary import summary, tables

    result = summary(of)
    if as_json:
        _print_json(result)
    else:
        tables(result, _console())


_MODEL_COLUMNS = (
    ("layers", "num_layers"),
    ("hidden", "hidden_size"),
    ("MLP", "ffn_hidden_size"),
    ("heads", "num_attention_heads"),
    ("KV heads", "num_query_groups"),
    ("vocabulary", "vocab_size"),
    ("longest", "max_position_embeddings"),
)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, with every field.")
def models(as_json: bool) -> None:
    """List the models known by name."""
    import dataclasses

    from stagewright.model.presets import PRESETS

    if as_json:
        _print_json({name: dataclasses.asdict(PRESETS[name]) for name in PRESETS})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", overflow="fold")
    for title, _ in _MODEL_COLUMNS:
        table.add_column(title, justify="right")
    for name, preset in PRESETS.items():
        table.add_row(name, *(str(getattr(preset, field)) for _, field in _MODEL_COLUMNS))
    _console().print(table)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks such as `0-7,12`, ascending and each once.

    >>> parse_ranks("12, 0-3,2", 16)
    [0, 1, 2, 3, 12]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not dash:
            last = first
        if not all(
            word.isdecimal() and word.isascii() and len(word) < 10 for word in (first, last)
        ):
            raise UserError(f"--ranks: cannot read {part.strip()!r}; wanted ranks such as 0-7,12")
        if int(first) > int(last):
            raise UserError(f"--ranks: {part.strip()!r} runs backwards; use {last}-{first}")
        if int(last) >= world_size:
            raise UserError(f"--ranks: there is no rank {int(last)}; use 0 to {world_size - 1}")
        found.update(range(int(first), int(last) + 1))
    return sorted(found)


def _load(model: str | None, config: str | None, settings: dict[str, Any]) -> Run:
    from stagewright.trace.recorded import load_run

    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = model
    return load_run(config, given)


def _compile(run: Run, model: str | None, config: str | None) -> Compiled:
    """Compile; a manifest of an earlier run brings its model along unless another is named."""
    from stagewright.lower.training import compile
    from stagewright.trace.recorded import recorded_model

    recorded = recorded_model(config) if config is not None and model is None else None
    return compile(run, recorded)


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=2))


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _console() -> Any:
    from rich.console import Console

    # A pipe or a file has no width of its own: rich would take 80 and cut the tables.
    return Console(width=None if sys.stdout.isatty() else 160)


for each in (
    *(*cli_write.COMMANDS, *cli_trace.COMMANDS, *cli_time.COMMANDS, *cli_reproduce.COMMANDS),
):
    commands.add_command(each)
for made in (cli_simulate.command, cli_report.command):
    commands.add_command(made(_settings, _load, _compile))
for each in (cli_doctor.doctor, cli_help.completion):
    commands.add_command(each)
cli_help.add_examples(commands)
cli_help.add_completion(commands)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 2 for what the user can mend, 1 for a bug, 130 for Ctrl-C."""
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        code = commands.main(arguments, prog_name="stagewright", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error))
    except click.NoSuchOption as error:
        return _complain(cli_help.no_such_option(error, commands))
    except click.ClickException as error:
        return _complain(error.format_message())
    except click.Abort as stop:
        why = stop.__cause__
        print(why if isinstance(why, Stopped) else "stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        return _complain(
            ": ".join(str(x) for x in (error.filename, error.strerror) if x) or str(error)
        )
    except MemoryError:
        return _complain("out of memory; try fewer microbatches, layers or workers")
    except Exception as error:
        if os.environ.get("STAGEWRIGHT_DEBUG"):
            raise
        _complain(
            f"this is a bug, please report it with the command you ran: {type(error).__name__}: "
            f"{error} (STAGEWRIGHT_DEBUG=1 shows where)"
        )
        return BUG


def _complain(message: str) -> int:
    line = " ".join(message.split())
    print(f"stagewright: error: {line}", file=sys.stderr)
    return USER_ERROR
