"""What a search is asked for: settings, lists of them, machines, and what is tried by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.files import flat, is_manifest, read_settings, recorded_model
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.foreign import canonical
from stagewright.run.sections.other_names import known as known_name
from stagewright.run.sections.other_names import setting_of
from stagewright.run.training_rules import MOST_RANKS
from stagewright.searching.constraints import check_value
from stagewright.searching.defaults import (
    HEADROOM,
    default_axes,
    default_batch,
    families_of,
    family_axes,
    not_tried,
    policies,
    without_effect,
)
from stagewright.searching.lists import is_listed, values_of
from stagewright.searching.machines import MOST_SYSTEMS, Fleet, path_of, varied
from stagewright.searching.space import Space, check_searched
from stagewright.time.expense.ownership import costs_of
from stagewright.time.hardware import Hardware, resolve


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The space of a search, and what was assumed for it."""

    space: Space
    notes: tuple[str, ...]


def asked(
    settings: Mapping[str, Any],
    path: str | Path | None = None,
    *,
    hardware: Sequence[str | Hardware] = (),
    gpus: object = None,
    vary: Mapping[str, Any] | None = None,
    model: ModelConfig | None = None,
    families: str | None = None,
) -> SearchRequest:
    """The space that settings ask for; any of them may be a list or a range (`listed`).

    `settings` go before those of the run file at `path`. `gpus` is a number of GPUs, or several;
    without it the setting `nodes` counts, and then `gpus` in the run file. `vary` has lists of
    settings and of figures of hardware by name; figures may stand in the run file, too. What is not
    given is tried by default (`defaults`), and what `families` add to that. Raises UserError.
    """
    values = {} if path is None else read_settings(path)
    where = "" if path is None else f"{path}: "
    beside: dict[str, Any] = {}
    if is_manifest(values):
        model = model or recorded_model(values, path or "")
    else:
        values, beside = _of_search(flat(values, path))
    axes: dict[str, tuple[Any, ...]] = {}
    file_values = values if is_manifest(values) else _without_lists(values, axes, where)
    from_file = {*axes}
    given = _without_lists({k: v for k, v in settings.items() if v is not None}, axes)
    once = {setting_of(name) for name, value in settings.items() if value is not None}
    lists, figures = _of_vary(vary or {}, once | ({"hardware"} if hardware else set()))
    axes |= lists
    from_file -= once | {*lists}
    without_allowance = _drop_zero_allowance(given) or _drop_zero_allowance(file_values)
    named = axes.pop("hardware", ())
    nodes = axes.pop("nodes", ())
    check_searched(axes)
    base = Experiment.of(file_values, given, path)
    costs_of(base.cluster.price, base.cluster.costs)
    if base.cluster.durations is not None:
        raise UserError(
            "a search computes all durations; leave durations out, and give the file "
            "to `simulate` with the run that was found"
        )
    named = tuple(hardware) or named or ((base.cluster.hardware,) if base.cluster.hardware else ())
    if not named:
        raise UserError("a search needs hardware; name some with --hardware, such as h100-sxm")
    if not nodes and base.cluster.nodes is not None:
        nodes = (base.cluster.nodes,)
    known = {*map(setting_of, [*file_values, *given]), *axes}
    known |= {"memory_allowance"} if without_allowance else set()
    every = _each_once(of if isinstance(of, Hardware) else resolve(str(of)) for of in named)
    figures = _figures(beside, figures, every, where)
    counts = _counts(gpus, beside.get("gpus"), nodes, known, where)
    added = families_of(families)
    systems = [each for of in every for each in varied(of, figures)]
    fleets = _fleets(systems, *counts)
    if "dp" in known and "dp" not in axes:
        axes["dp"] = (base.run.dp,)
    of_model = model or resolve_model(base.run.model, base.run.as_family or "")
    names = {name for name in known if name}
    origins = dict.fromkeys(from_file, where)
    return _completed(base, of_model, fleets, axes, names, added, origins)


def _drop_zero_allowance(values: dict[str, Any]) -> bool:
    """Take a `memory_allowance` of 0 out of settings: no run has one; True if there was one."""
    if str(values.get("memory_allowance")) in ("0", "0.0"):
        del values["memory_allowance"]
        return True
    return False


def _of_search(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a run file, and what only a search takes: `gpus`, and figures of hardware."""
    beside = {
        name: value
        for name, value in values.items()
        if name == "gpus" or ("." in name and not known_name(canonical(name)))
    }
    return {name: value for name, value in values.items() if name not in beside}, beside


def _figures(
    beside: Mapping[str, Any], figures: dict[str, Any], every: Iterable[Hardware], where: str
) -> dict[str, Any]:
    """Lists of figures of hardware by name: those of a run file, and before them `figures`.

    UserError for a name that one of the machines has not.
    """
    systems = list(every)
    of_file = {name: value for name, value in beside.items() if name != "gpus"}
    for of in systems:
        paths = {path_of(name, of) for name in figures}
        for name in [*of_file]:
            try:
                path = path_of(name, of)
            except UserError as error:
                raise UserError(f"{where}{str(error).removeprefix('--vary ')}") from None
            if path in paths:
                del of_file[name]
    return of_file | figures


def _of_vary(
    vary: Mapping[str, Any], given: Collection[str | None]
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Lists of settings and of figures of hardware, by name; UserError for what is given twice."""
    axes: dict[str, tuple[Any, ...]] = {}
    figures: dict[str, Any] = {}
    for name, value in vary.items():
        setting = setting_of(name.replace("-", "_"))
        if name == "gpus":
            raise UserError(f"--vary gpus: GPUs are no setting; give --gpus {value}")
        if setting not in EXPERIMENT:
            figures[name] = value
            continue
        if setting in given or setting in axes:
            flag = EXPERIMENT[setting].flag
            raise UserError(f"{flag} is given twice, once as --vary {name}; give one list of both")
        axes[setting] = values_of(EXPERIMENT[setting].kind, value, f"--vary {name}")
    return axes, figures


def _each_once(systems: Iterable[Hardware]) -> list[Hardware]:
    """Hardware without what is named twice."""
    known: list[Hardware] = []
    for each in systems:
        if each not in known:
            known.append(each)
    return known


def _without_lists(
    values: Mapping[str, Any], axes: dict[str, tuple[Any, ...]], where: str | None = None
) -> dict[str, Any]:
    """Settings that have one value; those with several become axes, by our names.

    `where` begins errors about values of a run file; None: they are of options.
    """
    rest: dict[str, Any] = {}
    for name, value in values.items():
        setting = setting_of(name)
        if setting not in EXPERIMENT:
            rest[name] = value
            continue
        kind = EXPERIMENT[setting].kind
        called = EXPERIMENT[setting].flag if where is None else f"{where}{name}"
        if is_listed(kind, value):
            axes[setting] = values_of(kind, value, called)
            continue
        of_text = isinstance(value, str) and (
            kind in (int, float, tuple, frozenset) or (kind is str and value.lower() == "none")
        )
        rest[name] = values_of(kind, value, called)[0] if of_text else value
        axes.pop(setting, None)
    return rest


def _counts(
    gpus: object, of_file: object, nodes: Sequence[Any], known: Collection[Any], where: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Numbers of GPUs, or of nodes, that are asked for; UserError where there are both, or none.

    `of_file` counts where neither is given otherwise.
    """
    option = "--gpus" if gpus is not None or nodes else f"{where}gpus"
    asked_for = gpus if gpus is not None or nodes else of_file
    counts = () if asked_for is None else values_of(int, asked_for, option)
    if counts and nodes:
        raise UserError("--gpus and --nodes both say how many GPUs there are; give one of them")
    option = option if counts else "--nodes"
    for count in (*counts, *nodes):
        if type(count) is not int or not 1 <= count <= MOST_RANKS:
            raise UserError(f"{option}: got {count}, wanted 1 to {MOST_RANKS:,}")
    if not counts and not nodes and "dp" not in known:
        raise UserError("a search needs the number of GPUs; give --gpus N, or --nodes N")
    return counts, tuple(nodes)


def _fleets(
    systems: Sequence[Hardware], counts: Sequence[int], nodes: Sequence[int]
) -> list[Fleet]:
    """Hardware with each number of GPUs."""
    count = len(systems) * max(1, len(counts), len(nodes))
    if count > MOST_SYSTEMS:
        raise UserError(
            f"systems and their numbers of GPUs are {count:,} machines, wanted at most "
            f"{MOST_SYSTEMS:,}; give fewer values of --gpus or --vary"
        )
    fleets: list[Fleet] = []
    for of in systems:
        of_system = counts or tuple(n * of.gpus_per_node for n in nodes) or (None,)
        fleets += [Fleet(of, count) for count in of_system]
    return fleets


def _completed(
    base: Experiment,
    model: ModelConfig,
    fleets: Sequence[Fleet],
    axes: dict[str, tuple[Any, ...]],
    known: set[str],
    families: Sequence[str],
    origins: Mapping[str, str],
) -> SearchRequest:
    """The space with what is tried by default, and with a batch; `origins` as in `Space.of`."""
    run, notes = base.run, list[str]()
    of = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    check_value(run, of)
    if run.mode == "train" and "global_batch_size" not in known:
        length = _longest(axes.get("seq_length", (run.seq_length,)))
        gpus = [fleet.gpus or 1 for fleet in fleets]
        longest = run.model_copy(update={"seq_length": length})
        batch = default_batch(longest, of, gpus)
        tokens = batch * (longest.resolved(of).seq_length or 0)
        axes["global_batch_size"] = (batch,)
        notes.append(
            f"global_batch_size={batch} ({tokens:,} tokens) is assumed; give --global-batch-size"
        )
    defaults = {**default_axes(run, of, fleets), **family_axes(families, run, of, fleets)}
    if "precision" in known:
        defaults.pop("fp8_recipe", None)
    tried = {name: values for name, values in defaults.items() if name not in known}
    degrees = {name: (getattr(run, name),) for name in ("tp", "cp", "pp") if name in known}
    idle = without_effect(tried, {**tried, **degrees, **axes})
    axes |= {name: tuple(values) for name, values in tried.items() if name not in idle}
    if axes.get("precision") == ("fp8",) and "precision" not in known:
        notes.append("precision=fp8 is assumed, as published weights are; give --precision bf16")
    notes += not_tried(run, axes, of)
    headroom = HEADROOM if run.mode == "train" and "memory_allowance" not in known else 0.0
    space = Space.of(base, fleets, axes, model, policies(known), origins, headroom)
    return SearchRequest(space, tuple(notes))


def _longest(lengths: Sequence[Any]) -> Any:
    """The longest of some lengths of sequences, so that no step has more tokens than are told;
    None: that of the model. What is no length is refused elsewhere."""
    if all(isinstance(length, int) for length in lengths):
        return max(lengths)
    return None if None in lengths else lengths[0]
