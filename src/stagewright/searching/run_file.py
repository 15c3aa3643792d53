"""Run files of candidates, for other commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stagewright.files import atomic, write_text
from stagewright.launch.tables import nested
from stagewright.run.experiment import Experiment
from stagewright.run.files import layout_of_script
from stagewright.run.sections import EXPERIMENT
from stagewright.run.sections.declare import plain
from stagewright.searching.candidates import Candidates
from stagewright.time.hardware import Hardware, resolve
from stagewright.time.hardware import names as packaged_names


def is_packaged(hardware: Hardware) -> bool:
    """True if the hardware equals the packaged one of its name."""
    if hardware.name not in packaged_names():
        return False
    packaged = resolve(hardware.name)
    return packaged is hardware or _dump(packaged) == _dump(hardware)


def _dump(hardware: Hardware) -> dict[str, Any]:
    return hardware.model_dump(mode="json", exclude_none=True, exclude={"sources"})


def hardware_file_name(hardware: Hardware) -> str:
    """File name of hardware that is not packaged, as run files refer to it.

    >>> hardware_file_name(resolve("h100-sxm").model_copy(update={"name": "h100-sxm memory.gb=96"}))
    'h100-sxm-memory.gb-96.yaml'
    """
    return re.sub(r"[^\w.]+", "-", hardware.name) + ".yaml"


def hardware_file(candidates: Candidates, index: int) -> str:
    """Hardware of a candidate in YAML; varied packaged hardware as a base and its varied specs."""
    hardware = candidates.hardware(index)
    varied = candidates.varied.get(hardware.name)
    if not varied:
        return _to_yaml(_dump(hardware))
    changes = ", ".join(f"{path}={value:.12g}" for path, value in varied.items())
    described = {
        "name": hardware.name,
        "description": f"{hardware.description}; with {changes} in place of its own",
    }
    base = hardware.name.partition(" ")[0]
    if base in packaged_names():
        specs = nested({path: f"{value:.17g}" for path, value in varied.items()})
        text = _to_yaml({"base": base, **described, **specs})
        if _dump(resolve(text)) == _dump(hardware) | described:
            return text
    return _to_yaml(_dump(hardware) | described)


def _to_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, width=10**6)


def non_default_settings(candidates: Candidates, index: int) -> dict[str, Any]:
    """Settings of a candidate that are not defaults, by name, in the order of their sections.

    Hardware is given by name, also where no file has that name.
    """
    run = candidates.run(index)
    experiment = Experiment(run, candidates.cluster(index), candidates.execution(index))
    values = experiment.given() | {"hardware": candidates.hardware(index).name}
    values.pop("nodes", None)
    # Another layout than the script's, whose defaults count, too.
    values |= {name: getattr(run, name) for name in layout_of_script(run.model)}
    return {"model": run.model} | {name: values[name] for name in EXPERIMENT if name in values}


def run_file(candidates: Candidates, index: int, hardware: str | None = None) -> str:
    """Run file in YAML that `simulate`, `report` and `generate` take with --config.

    `hardware`: path of the hardware file that the run file refers to, or its text. None: the name
    of packaged hardware, else `hardware_file_name`.

    >>> from stagewright.model.catalog import resolve as preset
    >>> from stagewright.run.settings import Run
    >>> from stagewright.searching import candidates as columns
    >>> base = Experiment(Run(model="gpt2"), columns.ClusterSection(), columns.Execution())
    >>> values = {"tp": 4, "no_overlap": frozenset({"tp"}), "hardware": resolve("h100-sxm")}
    >>> constants = {name: columns.Column.constant(value, 1) for name, value in values.items()}
    >>> print(run_file(Candidates(base, preset("gpt2"), constants, 1), 0), end="")
    model: gpt2
    tp: 4
    hardware: h100-sxm
    no_overlap: [tp]
    """
    values, system = non_default_settings(candidates, index), candidates.hardware(index)
    if hardware is None and not is_packaged(system):
        hardware = hardware_file_name(system)
    if hardware is not None:
        values["hardware"] = hardware
    return "".join(_line(name, plain(value)) for name, value in values.items())


def printed_run_file(candidates: Candidates, index: int) -> str:
    """Run file that contains the text of hardware that is not packaged."""
    packaged = is_packaged(candidates.hardware(index))
    return run_file(candidates, index, None if packaged else hardware_file(candidates, index))


def _line(name: str, value: Any) -> str:
    """YAML of one setting: a list in brackets, text of several lines indented below its name."""
    if isinstance(value, str) and "\n" in value:
        return f"{name}: |\n{textwrap.indent(value, '  ')}"
    block = yaml.safe_dump({name: value}, default_flow_style=False, width=10**6)
    if not isinstance(value, list):
        return block
    return f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=10**6)}"


def beside(run_file: str | Path, what: str) -> Path:
    """Path of another file of a run, next to its run file.

    >>> beside("runs/best.yaml", "hardware").name
    'best.hardware.yaml'
    """
    path = Path(run_file)
    return path.with_name(f"{path.stem}.{what}.yaml")


def write_run_file(candidates: Candidates, index: int, path: str | Path) -> list[str]:
    """Write the run file of a candidate, and next to it hardware that is not packaged.

    Both files are written, or none. Returns their names.
    """
    path = Path(path)
    if is_packaged(candidates.hardware(index)):
        write_text(path, run_file(candidates, index))
        return [str(path)]
    system_path = beside(path, "hardware")
    with atomic(path) as run, atomic(system_path) as system:
        write_text(run, run_file(candidates, index, str(system_path)))
        write_text(system, hardware_file(candidates, index))
    return [str(path), str(system_path)]
