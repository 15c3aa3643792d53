"""A candidate as a run file that other commands take."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stagewright.files import atomic, write_text
from stagewright.run.sections import EXPERIMENT, RUN_SECTIONS
from stagewright.searching.candidates import Candidates
from stagewright.searching.machines import figures_of, known_path
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.hardware import names as known_hardware


def is_packaged(hardware: Hardware) -> bool:
    """Whether a name says all of the hardware: no figure differs from that of the package."""
    if hardware.name not in known_hardware():
        return False
    own = resolve(hardware.name)
    return own is hardware or _figures(own) == _figures(hardware)


def _figures(hardware: Hardware) -> dict[str, Any]:
    return hardware.model_dump(mode="json", exclude_none=True, exclude={"sources"})


def hardware_file_name(hardware: Hardware) -> str:
    """The file that run files name for hardware that has no name of the package.

    >>> hardware_file_name(resolve("h100-sxm").model_copy(update={"name": "h100-sxm memory.gb=96"}))
    'h100-sxm-memory.gb-96.yaml'
    """
    return re.sub(r"[^\w.]+", "-", hardware.name) + ".yaml"


def varied_figures(hardware: Hardware) -> tuple[str, dict[str, float]]:
    """The name of hardware before a search has varied figures of it, and these by their paths.

    >>> from stagewright.searching.machines import varied
    >>> varied_figures(varied(resolve("h100-sxm"), {"memory.gb": "96", "scale_up.size": "16"})[0])
    ('h100-sxm', {'memory_gb': 96.0, 'scale_up.gpus': 16})
    >>> varied_figures(resolve("h100-sxm"))
    ('h100-sxm', {})
    """
    match = _VARIED.fullmatch(hardware.name)
    if match is None:
        return hardware.name, {}
    known = figures_of(hardware)
    paths = [known_path(part.partition("=")[0], known) for part in match[2].split(", ")]
    return match[1], {path: known[path] for path in paths if path is not None}


_VARIED = re.compile(r"(.+?) ([\w.-]+=[-+.\w]+(?:, [\w.-]+=[-+.\w]+)*)")
"""The name that `machines.varied` gives to hardware."""


def hardware_file(hardware: Hardware) -> str:
    """Hardware as a file in YAML: figures varied of hardware of the package over that, else all."""
    base, varied = varied_figures(hardware)
    if not varied:
        return _dumped(_figures(hardware))
    said = ", ".join(f"{path}={value:.12g}" for path, value in varied.items())
    described = {
        "name": hardware.name,
        "description": f"{hardware.description}; with {said} in place of its own",
    }
    if base in known_hardware():
        text = _dumped({"base": base, **described, **_nested(varied)})
        if _figures(resolve(text)) == _figures(hardware) | described:
            return text
    return _dumped(_figures(hardware) | described)


def _dumped(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, width=10**6)


def _nested(figures: Mapping[str, float]) -> dict[str, Any]:
    """Figures by their paths as blocks of YAML have them.

    >>> _nested({"memory_gb": 96, "scale_up.gpus": 16})
    {'memory_gb': 96, 'scale_up': {'gpus': 16}}
    """
    values: dict[str, Any] = {}
    for path, value in figures.items():
        *places, last = path.split(".")
        block = values
        for place in places:
            block = block.setdefault(place, {})
        block[last] = int(value) if value == int(value) else value
    return values


def given(candidates: Candidates, row: int) -> dict[str, Any]:
    """All settings of a candidate that are not defaults, by name, in the order of their sections.

    Of hardware the name; where figures of it are varied, of a name that no file has.
    """
    run, hardware = candidates.run(row), candidates.hardware(row)
    values: dict[str, Any] = {"model": run.model, "hardware": hardware.name, **run.given()}
    homes = {"cluster": candidates.cluster(row), "execution": candidates.execution(row)}
    for section, home in homes.items():
        for setting in EXPERIMENT.values():
            if setting.section == section and setting.name not in ("hardware", "nodes"):
                value = getattr(home, setting.name)
                if value != setting.default:
                    values[setting.name] = value
    order = ["model", "hardware", *EXPERIMENT]
    return {name: values[name] for name in order if name in values}


def run_file(candidates: Candidates, row: int, hardware: str | None = None) -> str:
    """A run file in YAML that `simulate`, `report` and `generate` take with --config.

    `hardware` is the path of a file that the run file names in place of the hardware, or the text
    of one; without it a run file names `hardware_file_name`, where no name of the package stands
    for the hardware.

    >>> from stagewright.searching import candidates as of
    >>> from stagewright.run.experiment import Experiment
    >>> from stagewright.run.settings import Run
    >>> from stagewright.time.hardware import resolve
    >>> base = Experiment(Run(model="gpt2"), of.ClusterSection(), of.Execution())
    >>> columns = {"tp": of.Column.of([4]), "no_overlap": of.Column.of([frozenset({"tp"})])}
    >>> print(run_file(Candidates.of(base, resolve("h100-sxm"), columns), 0), end="")
    model: gpt2
    tp: 4
    hardware: h100-sxm
    no_overlap: [tp]
    """
    values, of = given(candidates, row), candidates.hardware(row)
    if hardware is None and not is_packaged(of):
        hardware = hardware_file_name(of)
    if hardware is not None:
        values["hardware"] = hardware
    first = [name for name in values if name == "model" or EXPERIMENT[name].section in RUN_SECTIONS]
    ordered = [*first, *(name for name in values if name not in first)]
    return "".join(_line(name, _plain(values[name])) for name in ordered)


def printed_run_file(candidates: Candidates, row: int) -> str:
    """As `run_file`, with the text of hardware that has no name of the package in it."""
    hardware = candidates.hardware(row)
    return run_file(candidates, row, None if is_packaged(hardware) else hardware_file(hardware))


def _line(name: str, value: Any) -> str:
    """A setting as a line of YAML; a list in brackets, and text of several lines below its name."""
    if isinstance(value, str) and "\n" in value:
        return f"{name}: |\n{textwrap.indent(value, '  ')}"
    block = yaml.safe_dump({name: value}, default_flow_style=False, width=10**6)
    if not isinstance(value, list):
        return block
    return f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=10**6)}"


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, frozenset):
        return sorted(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [_plain(each) for each in value] if isinstance(value, tuple) else value  # pyright: ignore


def hardware_beside(path: str | Path) -> Path:
    """The file of hardware that belongs to the run file at `path`.

    >>> hardware_beside("found/best.yaml").name
    'best.hardware.yaml'
    """
    place = Path(path)
    return place.with_name(f"{place.stem}.hardware.yaml")


def write_run_file(candidates: Candidates, row: int, path: str | Path) -> list[str]:
    """Write the run file of a candidate, and hardware that no name of the package stands for to a
    file beside: both, or none of them. Returns their names."""
    place, hardware = Path(path), candidates.hardware(row)
    if is_packaged(hardware):
        write_text(place, run_file(candidates, row))
        return [str(place)]
    beside = hardware_beside(place)
    with atomic(place) as run, atomic(beside) as own:
        write_text(run, run_file(candidates, row, str(beside)))
        write_text(own, hardware_file(hardware))
    return [str(place), str(beside)]
