import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.algebra.layout import Mesh
from stagewright.arrays import exact_sum
from stagewright.model.presets import PRESETS
from stagewright.numbers import quantity, spans
from stagewright.program.columns import Program, RankClass, RankWork, TaskKind, Tasks
from stagewright.program.communicators import Communicator, Peer
from stagewright.run.settings import Run
from stagewright.schedule.generators import gpipe
from stagewright.trace.run_manifest import manifest
from stagewright.views.summary import summary, summary_text


def column(rows: list[dict[str, int]], name: str, default: int, dtype: type) -> Any:
    return np.array([row.get(name, default) for row in rows], dtype=dtype)


def tasks(rows: list[dict[str, int]]) -> Tasks:
    """A table from the columns that a test cares about."""
    absent = {
        "kind": (0, np.uint8), "name": (0, np.int32), "op": (0, np.int32), "phase": (0, np.uint8),
        "stage": (0, np.int32), "layer": (-1, np.int32), "microbatch": (-1, np.int32),
        "flops": (0, np.int64), "traffic": (0, np.int64), "collective": (-1, np.int8),
        "dtype": (0, np.int8), "comm_bytes": (0, np.int64), "slot": (-1, np.int16),
        "tag": (-1, np.int32), "shape": (-1, np.int32),
    }  # fmt: skip
    columns = {name: column(rows, name, *default) for name, default in absent.items()}
    none = np.zeros(len(rows) + 1, dtype=np.int64)
    return Tasks(
        **columns,
        data_ptr=none,
        data=np.zeros(0, np.int32),
        order_ptr=none,
        order=np.zeros(0, np.int32),
        names=("x",),
        ops=("einsum",),
        dtypes=("bf16", "fp32"),
        shapes=(),
    )


def compiled() -> Any:
    """Four ranks, tp=2 and pp=2: what `compile` returns, made by hand."""
    first = tasks(
        [
            {"flops": 10, "layer": 0},
            {"kind": TaskKind.COLLECTIVE, "collective": 0, "slot": 0, "comm_bytes": 100},
            {
                "kind": TaskKind.COLLECTIVE,
                "collective": 0,
                "slot": 0,
                "comm_bytes": 100,
                "dtype": 1,
            },
            {"flops": 5, "layer": 1, "phase": 1},
            {"kind": TaskKind.COLLECTIVE, "collective": 0, "slot": 0, "comm_bytes": 50},
            {"kind": TaskKind.SEND, "slot": 0, "comm_bytes": 7},
            {"kind": TaskKind.RECV, "slot": 1, "comm_bytes": 8, "phase": 2},
            {"kind": TaskKind.COLLECTIVE, "collective": 2, "slot": 1, "comm_bytes": 3, "phase": 3},
        ]
    )
    last = tasks([{"kind": TaskKind.RECV, "slot": 1, "comm_bytes": 7}, {"flops": 20, "phase": 2}])
    program = Program(
        mesh=Mesh((("tp", 2), ("pp", 2))),
        classes=(
            RankClass(
                np.array([0, 1]), 0, RankWork.from_tables(first, {"parameters": 64, "peak": 128})
            ),
            RankClass(
                np.array([2, 3]), 1, RankWork.from_tables(last, {"parameters": 32, "peak": 96})
            ),
        ),
        communicators=(Communicator(("tp",)), Communicator(("pp",), only=(0, 1))),
        peers=(Peer("pp", 1), Peer("pp", -1)),
    )
    return SimpleNamespace(
        run=Run(model="toy", tp=2, pp=2),
        model=replace(PRESETS["gpt2"], name="toy"),
        program=program,
        parameters=1000,
        active_parameters=800,
        trained=None,
        load=None,
        fit=None,
    )


def test_summary_adds_up_what_a_rank_does():
    result = summary(compiled())

    assert result["model"] == "toy"
    assert (result["world_size"], result["microbatches"]) == (4, 2)
    assert result["parameters"] == {"total": 1000, "active": 800}
    first, last = result["rank_classes"]
    assert first["ranks"] == [0, 1]
    assert (first["stage"], first["layers"], first["tasks"]) == (0, 2, 8)
    assert first["flops"] == {"forward": 10, "recompute": 5, "backward": 0, "optimizer": 0}
    all_reduce = {"phase": "forward", "kind": "all_reduce", "axis": "tp", "group_size": 2}
    assert first["collectives"] == [
        all_reduce | {"dtype": "bf16", "count": 2, "bytes": 150},
        all_reduce | {"dtype": "fp32", "count": 1, "bytes": 100},
        {
            "phase": "optimizer",
            "kind": "reduce_scatter",
            "axis": "pp[0, 1]",
            "group_size": 2,
            "dtype": "bf16",
            "count": 1,
            "bytes": 3,
        },
    ]
    assert first["sends"] == [{"phase": "forward", "axis": "pp", "count": 1, "bytes": 7}]
    assert first["receives"] == [{"phase": "backward", "axis": "pp", "count": 1, "bytes": 8}]
    assert first["memory"] == {"parameters": 64, "peak": 128}
    assert last["collectives"] == last["sends"] == []
    assert last["flops"]["backward"] == 20


def test_summary_and_manifest_are_json():
    assert json.loads(json.dumps(summary(compiled()))) == summary(compiled())
    json.dumps(manifest(compiled()))


def test_manifest_holds_what_repeats_the_run():
    result = manifest(compiled())

    assert Run(**result["run"]) == Run(model="toy", tp=2, pp=2)
    assert result["model"]["name"] == "toy"
    assert result["mesh"] == {"tp": 2, "pp": 2}
    assert "schedule" not in result


def test_manifest_holds_a_schedule_that_came_from_a_file():
    of = compiled()
    of.run = Run(model="toy", schedule="mine.csv")
    of.order = gpipe(1, 2)

    assert manifest(of)["schedule"] == "0F0,0F1,0B0,0B1\n"


def printed(of: Any) -> str:
    return "\n".join(map(str, summary_text(summary(of))))


def test_tables_show_every_class_and_human_units():
    text = printed(compiled())

    assert "1,000 parameters (800 active per token), 4 ranks, 2 microbatches per step" in text
    assert "2: 0-1" in text
    assert "2: 2-3" in text
    assert "all_reduce bf16" in text
    assert "150 B" in text
    assert "128 B" in text


def test_tables_print_brackets_as_they_are():
    assert "pp[0, 1]" in printed(compiled())


def test_tables_join_classes_that_communicate_alike():
    same = compiled()
    first = same.program.classes[0]
    again = RankClass(np.array([2, 3]), 1, first.work)
    program = same.program
    same.program = Program(program.mesh, (first, again), program.communicators, program.peers)
    text = printed(same)

    assert text.count("all_reduce bf16") == 1
    assert re.search(r"^0-1 +forward ", text, re.MULTILINE)


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_total_is_exact(values: list[int]):
    assert exact_sum(np.array(values, dtype=np.int64)) == sum(values)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2**63, "9.22 EB"),
        (10**24, "1e+03 ZB"),
    ],
)
def test_quantity(number: int, expected: str):
    assert quantity(number, "B") == expected


@given(st.sets(st.integers(0, 60)))
def test_spans_name_every_rank_once(ranks: set[int]):
    words = spans(sorted(ranks), limit=100).split(", ") if ranks else []
    found = [w.split("-") for w in words]

    assert [r for w in found for r in range(int(w[0]), int(w[-1]) + 1)] == sorted(ranks)
