"""What a search is asked for: settings, lists of them, machines, and what is tried by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stagewright.errors import UserError
from stagewright.explore.space.constraints import check_value
from stagewright.explore.space.defaults import default_axes, default_batch, policies, without_idle
from stagewright.explore.space.families import axes_of, words
from stagewright.explore.space.listed import is_listed, values_of
from stagewright.explore.space.space import Space
from stagewright.explore.space.systems import Fleet, varied
from stagewright.model.catalog import resolve as resolve_model
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment
from stagewright.run.files import flat, is_manifest, read_settings, recorded_model
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.other_names import setting_of
from stagewright.run.training_rules import MOST_RANKS
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
    families: str = "",
) -> SearchRequest:
    """The space that settings ask for; any of them may be a list or a range (`listed`).

    `settings` go before those of the run file at `path`. `gpus` is a number of GPUs, or several;
    without it the setting `nodes` counts. `vary` has lists of settings and of figures of hardware
    by name. What is not given is tried by default (`defaults`), and what `families` add to that.
    Raises UserError.
    """
    values = {} if path is None else read_settings(path)
    if is_manifest(values):
        model = model or recorded_model(values, path or "")
    else:
        values = flat(values, path)
    axes: dict[str, tuple[Any, ...]] = {}
    file_values = _without_lists(values, axes) if not is_manifest(values) else values
    given = _without_lists({k: v for k, v in settings.items() if v is not None}, axes)
    once = {setting_of(name) for name, value in settings.items() if value is not None}
    lists, figures = _of_vary(vary or {}, once | ({"hardware"} if hardware else set()))
    axes |= lists
    named = axes.pop("hardware", ())
    nodes = axes.pop("nodes", ())
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
    systems = [
        each
        for of in _each_once(of if isinstance(of, Hardware) else resolve(str(of)) for of in named)
        for each in varied(of, figures)
    ]
    fleets = _fleets(systems, gpus, nodes, known)
    if "dp" in known and "dp" not in axes:
        axes["dp"] = (base.run.dp,)
    of_model = model or resolve_model(base.run.model, base.run.as_family or "")
    names = {name for name in known if name}
    return _completed(base, of_model, fleets, axes, names, words(families))


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


def _without_lists(values: Mapping[str, Any], axes: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Settings that have one value; those with several become axes, by our names."""
    rest: dict[str, Any] = {}
    for name, value in values.items():
        setting = setting_of(name)
        if setting not in EXPERIMENT:
            rest[name] = value
            continue
        kind = EXPERIMENT[setting].kind
        if is_listed(kind, value):
            axes[setting] = values_of(kind, value, name)
            continue
        of_text = isinstance(value, str) and (
            kind in (int, float, tuple, frozenset) or (kind is str and value.lower() == "none")
        )
        rest[name] = values_of(kind, value, name)[0] if of_text else value
        axes.pop(setting, None)
    return rest


def _fleets(
    systems: Iterable[Hardware], gpus: object, nodes: Sequence[Any], known: Iterable[Any]
) -> list[Fleet]:
    """Hardware with each number of GPUs."""
    counts = () if gpus is None else values_of(int, gpus, "--gpus")
    if counts and nodes:
        raise UserError("--gpus and --nodes both say how many GPUs there are; give one of them")
    option = "--gpus" if counts else "--nodes"
    for count in (*counts, *nodes):
        if not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
            raise UserError(f"{option}: got {count}, wanted 1 to {MOST_RANKS:,}")
    if not counts and not nodes and "dp" not in known:
        raise UserError("a search needs the number of GPUs; give --gpus N, or --nodes N")
    fleets: list[Fleet] = []
    for of in systems:
        of_system = counts or tuple(cast("int", n) * of.gpus_per_node for n in nodes) or (None,)
        fleets += [Fleet(of, count) for count in of_system]
    return fleets


def _completed(
    base: Experiment,
    model: ModelConfig,
    fleets: Sequence[Fleet],
    axes: dict[str, tuple[Any, ...]],
    known: set[str],
    families: Sequence[str],
) -> SearchRequest:
    """The space with what is tried by default, and with a batch."""
    run, notes = base.run, list[str]()
    of = model.with_overrides(run.layers, run.vocab, run.mtp_num_layers)
    check_value(run, of)
    if run.mode == "train" and "global_batch_size" not in known:
        length = axes.get("seq_length", (run.seq_length,))[0]
        gpus = [fleet.gpus or 1 for fleet in fleets]
        batch = default_batch(run.model_copy(update={"seq_length": length}), of, gpus)
        tokens = batch * (run.resolved(of).seq_length or 0)
        axes["global_batch_size"] = (batch,)
        notes.append(
            f"global_batch_size={batch} ({tokens:,} tokens) is assumed; give --global-batch-size"
        )
    every = default_axes(run, of, fleets) | axes_of(families, run, of, fleets)
    tried = {n: v for n, v in every.items() if n not in known}
    degrees = {name: (getattr(run, name),) for name in ("tp", "cp", "pp") if name in known}
    idle = without_idle(tried, {**tried, **degrees, **axes})
    axes |= {name: tuple(values) for name, values in tried.items() if name not in idle}
    return SearchRequest(Space.of(base, fleets, axes, model, policies(known)), tuple(notes))
