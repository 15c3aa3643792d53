"""Predicts every published figure; writes the tables of docs/accuracy/data.

    python benchmarks/predictions.py [TABLE...] [--jobs N]

A table is a CSV file with a line for each figure: source, row, quantity, measured, predicted, and
the error (of the time, where steps of training were measured). Without names, all tables are
written, which takes half an hour. `benchmarks/accuracy.py` writes the pages from them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import astra_sim
import drafts
import replayed
from stagewright.evidence import kernels, memory, servers, training
from stagewright.evidence.rows import Prediction, Row, compare, prediction
from stagewright.executors import cores
from stagewright.lower.parameters import parameters
from stagewright.model.presets import PRESETS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
DATA = ROOT / "docs" / "accuracy" / "data"
COLUMNS = ("source", "row", "quantity", "measured", "predicted", "error")

ROWS: dict[str, Callable[[], Sequence[Row]]] = {
    "training": training.rows,
    "kernels": kernels.rows,
    "memory": memory.rows,
    "serving": servers.rows,
}
"""Tables of published figures in the package."""


# ---- figures outside the package -----------------------------------------------------------------


def recorded_servers() -> Iterator[Prediction]:
    """Figures of recorded workloads that are replayed."""
    for server in replayed.replayed_servers():
        yield from replayed.predictions(server)


def other_programs() -> Iterator[Prediction]:
    """Figures that other programs compute and that are to be equal."""
    yield from _counted_flops()
    yield from _schedules()
    yield from _parameters()
    yield from _activations()
    data = json.loads(astra_sim.DATA.read_text(encoding="utf-8"))
    for case in data["cases"]:
        ends, _ = astra_sim.ours(case, data["machine"])
        yield Prediction(
            "ASTRA-sim", case["name"], "step_ns", max(case["rank_ns"]), round(max(ends))
        )


def _counted_flops() -> Iterator[Prediction]:
    """FLOPs by PyTorch's rule, which counts the masked pairs of causal attention as well."""
    tests: Any = _test_module("conformance/test_flops.py")
    for case in tests.OURS:
        counted = tests.counted(case)
        for phase in ("forward", "backward"):
            for kind, recorded in tests.CASES[case][phase].items():
                masked = kind != "products" and case != "vision"
                flops = counted[phase, kind][0] * (2 if masked else 1)
                row = f"{case}, {phase}, {kind}"
                yield Prediction("PyTorch's FLOP counter", row, "flops", recorded["flops"], flops)


def _schedules() -> Iterator[Prediction]:
    """Ranks whose order of pipeline actions is the published one."""
    tests: Any = _test_module("unit/schedule/test_pipeline.py")
    for case in tests.RECORDED:
        order = [" ".join(map(str, steps)) for steps in tests.make(*tests.recorded(case))]
        equal = sum(a == b for a, b in zip(order, case["ranks"], strict=True))
        row = f"{case['schedule']}, pp={case['pp']} vpp={case['vpp']}, {case['microbatches']}"
        yield Prediction(
            "PyTorch's pipeline schedules", f"{row} microbatches", "equal_ranks", len(order), equal
        )


def _parameters() -> Iterator[Prediction]:
    text = (TESTS / "data" / "published_parameters.csv").read_text(encoding="utf-8")
    for cells in csv.DictReader(text.splitlines()):
        if cells["model"] in PRESETS:
            count = parameters(PRESETS[cells["model"]])[0]
            yield Prediction(
                "Published parameter counts", cells["model"], "parameters",
                int(cells["parameters"]), count, reason=cells["source"],
            )  # fmt: skip


def _activations() -> Iterator[Prediction]:
    """Bytes that the layers of a stage save for backward, by the paper's equations."""
    tests: Any = _test_module("slow/test_saved_activations.py")
    for model in tests.SIZES:
        for variant in tests.VARIANTS:
            ours, paper = tests.korthikanti(model, variant)
            row = f"{model}, {variant}"
            yield Prediction(
                "Korthikanti et al., equations", row, "bytes", float(paper), float(ours)
            )


def _test_module(path: str) -> ModuleType:
    """A module of the tests."""
    sys.path[:0] = [str(TESTS), str((TESTS / path).parent)]
    spec = importlib.util.spec_from_file_location(f"of_tests_{Path(path).stem}", TESTS / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


OTHERS: dict[str, Callable[[], Iterable[Prediction]]] = {
    "replayed": recorded_servers,
    "drafts": drafts.predictions,
    "programs": other_programs,
}
"""Tables whose figures have a simulation of their own."""
TABLES = (*ROWS, *OTHERS)


# ---- files ---------------------------------------------------------------------------------------


def path(name: str) -> Path:
    """The file of a table."""
    return DATA / f"{name}.csv"


def predict(name: str, jobs: int = 1) -> list[Prediction]:
    """The predictions of a table, simulated; rows that cannot be simulated are left out."""
    if name in OTHERS:
        return [*OTHERS[name]()]
    outcomes = compare(ROWS[name](), jobs=jobs)
    return [outcome for outcome in outcomes if isinstance(outcome, Prediction)]


def error(name: str, p: Prediction) -> float:
    """The error of a prediction: of training, that of the time of a step."""
    return p.error_of_time if name == "training" else p.error


def written(name: str, predictions: Iterable[Prediction]) -> str:
    """The text of the file of a table."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    for p in predictions:
        lines.writerow(
            (p.source, p.row, p.quantity, f"{p.measured:.12g}", _digits(p.predicted),
             f"{error(name, p):+.1%}")
        )  # fmt: skip
    return out.getvalue()


def _digits(value: float) -> str:
    """Six digits of a number, or all of a whole one."""
    return f"{value:.12g}" if value == int(value) else f"{value:.6g}"


def read(name: str) -> list[tuple[Row | None, Prediction]]:
    """The predictions of the file of a table, each with its row where the package has it.

    Figures whose row is no longer in the package are left out.
    """
    rows = {_key(row): row for row in ROWS[name]()} if name in ROWS else {}
    result: list[tuple[Row | None, Prediction]] = []
    for cells in csv.DictReader(path(name).read_text(encoding="utf-8").splitlines()):
        measured, predicted = float(cells["measured"]), float(cells["predicted"])
        plain = Prediction(cells["source"], cells["row"], cells["quantity"], measured, predicted)
        row = rows.get(_key(plain))
        if row is not None:
            result.append((row, prediction(row, predicted)))
        elif name in OTHERS:
            result.append((None, plain))
    return result


def _key(row: Row | Prediction) -> tuple[str, str, str, str]:
    return row.source, row.row, row.quantity, f"{row.measured:.12g}"


def sample(name: str, one_of: int) -> list[Row]:
    """One of `one_of` rows of a table, chosen by a hash of their names."""
    return [row for row in ROWS[name]() if int(place(row) * 2**20) % one_of == 0]


def place(row: Row) -> float:
    """A number from 0 to 1 that follows from the name of a row."""
    name = f"{row.source}, {row.row}"
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    given = parser.parse_args()
    for table in given.tables or TABLES:
        path(table).write_text(written(table, predict(table, given.jobs)), encoding="utf-8")
        print(path(table), flush=True)
