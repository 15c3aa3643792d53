"""Request of a search: fixed settings, axes, machines and default values.

Option values arrive as text by setting name; a list or a range becomes an axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stagewright.errors import UserError
from stagewright.launch import files as launch
from stagewright.launch.names import canonical
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.files import flat, is_manifest, launched, model_of_manifest, read_settings
from stagewright.run.other_names import is_setting_name, setting_of
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.habits import Framework
from stagewright.run.settings import usual_batch
from stagewright.run.training_rules import MOST_RANKS
from stagewright.searching.constraints import check_value, tool_constraints
from stagewright.searching.defaults import (
    HEADROOM,
    PUBLISHED_RECIPE,
    default_axes,
    default_constraints,
    families_of,
    family_axes,
    not_tried,
    without_effect,
)
from stagewright.searching.lists import is_listed, values_of
from stagewright.searching.machines import MOST_SYSTEMS, Fleet, Specs, path_of, varied
from stagewright.searching.space import Space, check_searched
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.job import check_job
from stagewright.time.ownership import costs_of


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Space of a search, and notes on assumptions."""

    space: Space
    notes: tuple[str, ...]


def search_request(
    settings: Mapping[str, Any],
    path: str | Path | None = None,
    *,
    hardware: Sequence[str | Hardware] = (),
    gpus: object = None,
    vary: Mapping[str, Any] | None = None,
    model: ModelConfig | None = None,
    families: str | None = None,
    tool: str | None = None,
) -> SearchRequest:
    """Space of some settings, any of which may be a list or a range (`lists`).

    `settings` override those of the run file at `path`. `gpus`: numbers of GPUs; without it the
    setting `nodes` counts, then `gpus` in the run file. `vary`: lists of settings and of hardware
    specs by name; the run file may have specs, too. Open settings take default values (`defaults`),
    to which `families` add; those for which `tool` has no flag are left out. Raises UserError.
    """
    path, settings = launched(path, settings)
    where = "" if path is None else f"{path}: "
    values = {} if path is None else read_settings(path)
    axes: dict[str, tuple[Any, ...]] = {}
    search_only: dict[str, Any] = {}
    if is_manifest(values):
        model = model or model_of_manifest(values, path or "")
    else:
        values = flat(values, path)
        if path is not None and launch.find(path):
            values = {name: value for name, value in values.items() if name not in _SEARCHED}
        search_only = {name: values.pop(name) for name in [*values] if _is_search_only(name)}
        values = _pop_axes(values, axes, where)
    # Options override the run file, and --vary adds lists.
    from_file = {*axes}
    given = {name: value for name, value in settings.items() if value is not None}
    options = _pop_axes(given, axes)
    named_by_options = {*map(setting_of, given), *(("hardware",) if hardware else ())}
    vary_axes, specs = _split_vary(vary or {}, named_by_options)
    axes |= vary_axes
    origins = dict.fromkeys(from_file - named_by_options - vary_axes.keys(), where)
    without_allowance = _pop_zero_allowance(options) or _pop_zero_allowance(values)
    # What is left is one experiment, and axes of settings.
    listed_hardware, nodes = axes.pop("hardware", ()), axes.pop("nodes", ())
    fixed = {setting_of(name) for name in (*values, *options)} | {*axes}
    if tool in get_args(Framework) and "framework" not in fixed:
        options["framework"] = tool  # its steps are timed with its own habits
        fixed.add("framework")
    check_searched(axes)
    base = Experiment.of(values, options, path)
    cluster = base.cluster
    costs_of(cluster.price, cluster.costs)
    check_job(cluster, base.run.mode)
    if cluster.durations is not None:
        raise UserError(
            "a search computes all durations; leave durations out, and give the file "
            "to `simulate` with the run that was found"
        )
    # Machines: systems with each number of GPUs.
    systems: list[Hardware] = []
    for system in hardware or listed_hardware or filter(None, [cluster.hardware]):
        system = system if isinstance(system, Hardware) else resolve(str(system))
        systems += [system] if system not in systems else []
    if not systems:
        raise UserError("a search needs hardware; name some with --hardware, such as h100-sxm")
    if not nodes and cluster.nodes is not None:
        nodes = (cluster.nodes,)
    fixed |= {"memory_allowance"} if without_allowance else set()
    file_gpus = search_only.pop("gpus", None)
    specs = _with_file_specs(specs, search_only, systems, where)
    counts = _gpu_counts(gpus, file_gpus, nodes, fixed, where)
    added = families_of(families)
    fleets = _fleets([pair for system in systems for pair in varied(system, specs)], counts, nodes)
    if "dp" in fixed and "dp" not in axes:
        axes["dp"] = (base.run.dp,)
    model = model or resolve_model(base.run.model, base.run.as_family or "")
    return _with_defaults(base, model, fleets, axes, fixed, added, origins, tool)


_SEARCHED = frozenset({
    "tp", "cp", "dp", "pp", "ep", "etp", "vpp", "zero", "dp_shard", "sequence_parallel",
    "recompute", "recompute_modules", "recompute_num_layers", "recompute_method",
    "micro_batch_size", "layers_per_stage", "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout", "num_distributed_optimizer_instances",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "microbatch_group_size_per_vp_stage", "moe_token_dispatcher_type", "moe_flex_dispatcher",
})  # fmt: skip
"""Dropped from launch files, since the search finds them; those of a run file stay fixed."""


def _pop_zero_allowance(values: dict[str, Any]) -> bool:
    """A `memory_allowance` of 0 means no headroom: pop it, return True."""
    if str(values.get("memory_allowance")) in ("0", "0.0"):
        del values["memory_allowance"]
        return True
    return False


def _is_search_only(name: str) -> bool:
    """True for entries of a run file that only a search takes: `gpus`, and hardware specs."""
    return name == "gpus" or ("." in name and not is_setting_name(canonical(name)))


def _with_file_specs(
    specs: Mapping[str, Any], file_specs: Mapping[str, Any], systems: Iterable[Hardware], where: str
) -> dict[str, Any]:
    """Lists of specs by name, also those of a run file that `specs` do not override.

    UserError for a name that one of the systems lacks.
    """
    kept = dict(file_specs)
    for system in systems:
        paths = {path_of(name, system) for name in specs}
        for name in [*kept]:
            try:
                path = path_of(name, system)
            except UserError as error:
                raise UserError(f"{where}{str(error).removeprefix('--vary ')}") from None
            if path in paths:
                del kept[name]
    return {**kept, **specs}


def _split_vary(
    vary: Mapping[str, Any], taken: Collection[str | None]
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Axes of settings, and lists of hardware specs; UserError for a setting in `taken`."""
    axes: dict[str, tuple[Any, ...]] = {}
    specs: dict[str, Any] = {}
    for name, value in vary.items():
        setting = setting_of(name.replace("-", "_"))
        if name == "gpus":
            raise UserError(f"--vary gpus: GPUs are no setting; give --gpus {value}")
        if setting not in EXPERIMENT:
            specs[name] = value
            continue
        if setting in taken or setting in axes:
            flag = EXPERIMENT[setting].flag
            raise UserError(f"{flag} is given twice, once as --vary {name}; give one list of both")
        axes[setting] = values_of(EXPERIMENT[setting].kind, value, f"--vary {name}")
    return axes, specs


def _pop_axes(
    values: Mapping[str, Any], axes: dict[str, tuple[Any, ...]], where: str | None = None
) -> dict[str, Any]:
    """Settings of one value; those of several values become axes, by canonical name.

    `where`: prefix of errors about a run file; None: errors name options.
    """
    single: dict[str, Any] = {}
    for name, value in values.items():
        setting = setting_of(name)
        if setting not in EXPERIMENT:
            single[name] = value
            continue
        kind = EXPERIMENT[setting].kind
        label = EXPERIMENT[setting].flag if where is None else f"{where}{name}"
        if is_listed(kind, value):
            axes[setting] = values_of(kind, value, label)
            continue
        needs_parsing = isinstance(value, str) and (
            kind in (int, float, tuple, frozenset) or (kind is str and value.lower() == "none")
        )
        single[name] = values_of(kind, value, label)[0] if needs_parsing else value
        axes.pop(setting, None)
    return single


def _gpu_counts(
    gpus: object, file_gpus: object, nodes: Sequence[Any], fixed: Collection[str], where: str
) -> tuple[Any, ...]:
    """Numbers of GPUs, empty for numbers of nodes; UserError where there are both, or none.

    `file_gpus` counts if the options have neither.
    """
    from_options = gpus is not None or bool(nodes)
    option, text = ("--gpus", gpus) if from_options else (f"{where}gpus", file_gpus)
    counts = () if text is None else values_of(int, text, option)
    if counts and nodes:
        raise UserError("--gpus and --nodes both say how many GPUs there are; give one of them")
    for count in (*counts, *nodes):
        if type(count) is not int or not 1 <= count <= MOST_RANKS:
            option = option if counts else "--nodes"
            raise UserError(f"{option}: got {count}, wanted 1 to {MOST_RANKS:,}")
    if not counts and not nodes and "dp" not in fixed:
        raise UserError("a search needs the number of GPUs; give --gpus N, or --nodes N")
    return counts


def _fleets(
    systems: Sequence[tuple[Hardware, Specs]], counts: Sequence[int], nodes: Sequence[int]
) -> list[Fleet]:
    """Each system with each number of GPUs."""
    num_fleets = len(systems) * max(1, len(counts), len(nodes))
    if num_fleets > MOST_SYSTEMS:
        raise UserError(
            f"systems and their numbers of GPUs are {num_fleets:,} machines, wanted at most "
            f"{MOST_SYSTEMS:,}; give fewer values of --gpus or --vary"
        )
    return [
        Fleet(system, count, specs)
        for system, specs in systems
        for count in counts or tuple(n * system.gpus_per_node for n in nodes) or (None,)
    ]


def _with_defaults(
    base: Experiment,
    model: ModelConfig,
    fleets: Sequence[Fleet],
    axes: dict[str, tuple[Any, ...]],
    fixed: set[str],
    families: Sequence[str],
    origins: Mapping[str, str],
    tool: str | None,
) -> SearchRequest:
    """Request with default values of open settings; `origins`: prefixes of errors by setting."""
    run, notes = base.run, list[str]()
    config = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    check_value(run, config)
    if run.mode == "train" and "global_batch_size" not in fixed:
        lengths = axes.get("seq_length", (run.seq_length,))
        length = None if None in lengths else max(lengths)
        longest = run.model_copy(update={"seq_length": length})
        batch = usual_batch(longest, config, [fleet.gpus or 1 for fleet in fleets])
        tokens = batch * (longest.resolved(config).seq_length or 0)
        axes["global_batch_size"] = (batch,)
        notes.append(
            f"global_batch_size={batch} ({tokens:,} tokens) is assumed; give --global-batch-size"
        )
    defaults = {**default_axes(run, config, fleets), **family_axes(families, run, config, fleets)}
    asked = {*axes.get("precision", (run.precision,))} if "precision" in fixed else {"fp8"}
    if "fp8" not in asked:
        defaults.pop("fp8_recipe", None)
    elif len(asked) > 1 and "fp8_recipe" in defaults:
        defaults["fp8_recipe"] = (None, *defaults["fp8_recipe"])
    tried = {name: values for name, values in defaults.items() if name not in fixed}
    single = {name: (value,) for name, value in base.values().items() if name in fixed}
    no_effect = without_effect(tried, {**tried, **single, **axes})
    axes |= {name: tuple(values) for name, values in tried.items() if name not in no_effect}
    if axes.get("precision") == ("fp8",) and "precision" not in fixed:
        notes.append("precision=fp8 is assumed, as published weights are; give --precision bf16")
    if axes.get("fp8_recipe") == (PUBLISHED_RECIPE,) and "fp8_recipe" not in fixed:
        notes.append(
            f"fp8_recipe={PUBLISHED_RECIPE} is assumed, as published weights are; give --fp8-recipe"
        )
    notes += not_tried(run, axes, config)
    headroom = HEADROOM if run.mode == "train" and "memory_allowance" not in fixed else 0.0
    extra = default_constraints(fixed)
    extra += tool_constraints(tool, tried.keys() - no_effect) if tool else []
    space = Space.of(base, fleets, axes, model, extra, origins, headroom)
    return SearchRequest(space, tuple(notes))
