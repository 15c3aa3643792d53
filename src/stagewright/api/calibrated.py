"""A hardware file from recorded kernels: `stagewright.calibrate`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.api.compared import Paths, paths_of
from stagewright.api.result import PublicResult, check_suffix, path_text
from stagewright.files import write_text
from stagewright.recorded.calibrate import CalibratedHardware
from stagewright.recorded.calibrate import calibrate as calibrate_hardware
from stagewright.recorded.rank import chips_differ
from stagewright.recorded.read import read_traces
from stagewright.texttable import Table
from stagewright.time.hardware import Hardware, full_name, is_path, resolve


class Calibration(PublicResult):
    """Figures of a machine that recorded kernels tell.

    Attributes:

    * `hardware`: the base with these figures, for `simulate`.
    * `notes`: figures that stay those of the base, and why.
    * `durations`: the text of a CSV of measured kernels and collectives.

    Tables: `figures`. `write` writes a hardware file (`.yaml`) or the durations (`.csv`).
    """

    __slots__ = ("_base", "_calibrated", "notes")
    suffixes = (".yaml", ".csv", ".json")

    def __init__(self, calibrated: CalibratedHardware, base: str, notes: list[str]) -> None:
        """Wrap a calibration; `base` as a hardware file names it."""
        self._calibrated, self._base = calibrated, base
        self.notes = [*notes, *(f"as in {base}: {kept}" for kept in calibrated.kept)]

    @property
    def hardware(self) -> Hardware:
        """The base with the calibrated figures."""
        return self._calibrated.hardware

    @property
    def durations(self) -> str:
        """A CSV of measured kernels and collectives, for `durations` of `simulate`."""
        return self._calibrated.csv()

    @property
    def tables(self) -> Mapping[str, Callable[..., Table]]:
        """Functions of the tables, by name."""
        return {"figures": partial(figures, self._calibrated)}

    def text(self) -> Iterator[str | Table]:
        """Lines and tables of `stagewright calibrate`."""
        if self._calibrated.figures:
            yield figures(self._calibrated)
        else:
            yield "no figure: too few kernels of known extents"

    def yaml(self, name: str = "calibrated") -> str:
        """The text of a hardware file of this name."""
        return self._calibrated.yaml(self._base, name)

    def to_dict(self) -> dict[str, Any]:
        """The object of `calibrate --json`."""
        return {
            "base": self._base,
            "figures": [figure._asdict() for figure in self._calibrated.figures],
            "notes": self.notes,
        }

    def write(self, path: str | os.PathLike[str]) -> list[str]:
        """Write a hardware file (`.yaml`), the durations (`.csv`), or everything (`.json`)."""
        check_suffix(path_text(path), self.suffixes)
        out = os.fspath(path)
        if out.endswith(".json"):
            return super().write(path)
        base = Path(self._base)
        if is_path(self._base):  # a base is named as from the file
            base = Path(os.path.relpath(base, Path(out).parent))
        text = self._calibrated.yaml(base.as_posix(), Path(out).stem)
        write_text(out, self.durations if out.endswith(".csv") else text)
        return [out]


def figures(calibrated: CalibratedHardware) -> Table:
    """The calibrated figures beside those of the base."""
    rows = [(f.key, f.base, f.value, f.kernels, f.spread, f.rests_on) for f in calibrated.figures]
    columns = ["figure", "base", "calibrated", "kernels", "spread", "rests on"]
    units = {"base": "figure", "calibrated": "figure", "kernels": "count", "spread": "share"}
    return Table.of_rows("figures of the machine", columns, rows, units)


def calibrate(traces: Paths, base: str | os.PathLike[str]) -> Calibration:
    """Calibrate the figures of a hardware file to a step that PyTorch's profiler recorded.

    `traces`: files, archives or folders of Kineto's JSON, one file per rank. `base`: a name
    (`stagewright hardware`) or a YAML file, whose figures stay where the traces tell nothing.
    """
    name = path_text(base, "hardware as a name or a path")
    name = name if is_path(name) else full_name(name)
    recorded = read_traces(paths_of(traces))
    hardware = resolve(name)
    notes = [
        f"traces are of {trace.device}, the base is {hardware.name}: its other figures stay"
        for trace in recorded
        if chips_differ(trace.device, hardware.name)
    ]
    notes += [note for trace in recorded for note in trace.notes]
    return Calibration(calibrate_hardware(recorded, hardware), name, list(dict.fromkeys(notes)))
